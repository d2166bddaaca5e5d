"""An answer as one self-contained HTML file, without network access, readable without JavaScript."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from offpol_diag.metrics import BANDS
from offpol_diag.numerals import counted, minus
from offpol_diag.report import answered
from offpol_diag.report.answer import Answer, Tile
from offpol_diag.report.cells import shown
from offpol_diag.report.compare import named
from offpol_diag.report.embedded import (
    UNSEEN,
    digest,
    embedded,
    packed,
    script_json,
    templates_dir,
)
from offpol_diag.report.layout import breakable, laid_out
from offpol_diag.report.parts import Part, parts
from offpol_diag.report.picture import Picture
from offpol_diag.report.remedy import forms
from offpol_diag.report.svg import meter, panel_svg, spark, triangle
from offpol_diag.result import Result
from offpol_diag.result.steps import in_sync

if TYPE_CHECKING:
    from offpol_diag.check import Checked

_WHOLE = re.compile(
    r"--\w[\w-]*|\[(?:&[lg]t;)?[−\-\d.,%]+, (?:&[lg]t;)?[−\-\d.,%]+\][\de%-]*|\d[\d.,]*e-\d+%?|"
    r"(?:[\w/]+ ?)?(?:[≤≥=±]|&[lg]t;) ?[−-]?[\w½][\w.,%]*"
)
_CODE = re.compile("`([^`]+)`")


@dataclass(frozen=True)
class Chart:
    """A picture, drawn: its panels, and what to say of their points as JSON."""

    picture: Picture
    svgs: tuple[Any, ...]
    json: str


def page(result: Result | Checked) -> str:
    """Render the whole page; equal results give equal pages."""
    answer = answered(result)
    if not isinstance(result, Result):
        name = PurePath(result.dump[0]).name if result.dump else "a dump"
        kind, data, version = f"What {result.trainer} logs", packed(result.to_json()), result.version
        tables = tuple(table for table in answer.tables if table.shown != "always")
        sections = [Part("steps", "Steps", "Steps", answer.remarks, tables=tables)]
    else:
        dumps = [result.dump, *(one.run.dump for one in result.against)]
        name, data, version = " against ".join(named(*dumps)), embedded(result), result.run.version
        kind = "Thresholds" if result.sweep else "Off-policy mismatch"
        kind = "Rescored" if result.run.command == "rescore" else kind
        kind = "Comparison" if result.against or result.comparison else "Gate" if result.gates else kind
        sections = list(parts(result, answer))
    style, script = (
        (templates_dir() / name).read_text(encoding="utf-8").strip() for name in ("report.css", "report.js")
    )
    policy = (  # this script and inline styles, and no network
        f"default-src 'none'; script-src 'sha256-{digest(script)}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page: str = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=f"{kind} · {name} · offpol-diag",
            name=name,
            head=_head(result, answer),
            parts=[(one, _view(one, result), list(map(laid_out, one.tables))) for one in sections],
            data=data,
            version=version,
            policy=policy,
            style=style,
            script=script,
        )
    )
    return UNSEEN.sub("\ufffd", page)


# ---------------------------------------------------------------- what stands where


def _head(result: Result | Checked, answer: Answer) -> dict[str, Any]:
    """Return the facts of the first screen."""
    of_analysis = isinstance(result, Result) and any(fact.title for fact in answer.facts)
    diagnosed = result.diagnosis.headline if isinstance(result, Result) and result.diagnosis else ""
    said = diagnosed if of_analysis and not (isinstance(result, Result) and result.is_bug) else ""
    telling = [_drawn(one) for one in answer.charts if one.telling]
    rest = [_drawn(one) for one in answer.charts if not one.telling]
    return {
        "answer": answer,
        "eye": answer.about.replace(": ", " · ", 1).replace(", ", " · "),
        "sev": _calm(answer.word) if answer.word else "",
        "interval": minus(answer.interval),
        "lede": " ".join(one for one in (answer.more, said) if one),
        "cards": {fact.label: fact for fact in answer.facts if fact.title} if of_analysis else {},
        "facts": [fact for fact in answer.facts if fact.sentence],
        "others": [
            fact for fact in answer.facts if fact.label in ("Where", "Missing", "Also") and fact.sentence
        ],
        "meter": _meter(result) if of_analysis and isinstance(result, Result) else "",
        "triangle": triangle(result.reference) if isinstance(result, Result) and result.reference else "",
        "cause": next((_drawn(fact.chart) for fact in answer.facts if fact.chart), None),
        "tiles": [_tile(one, tinted=False) for one in answer.tiles],
        "tables": [laid_out(one) for one in answer.tables if one.shown == "always" and one.rows],
        "charts": [] if of_analysis else telling,
        "rest": [] if of_analysis else rest,
        "more": f"{counted(len(rest), 'further chart')}",
    }


def _view(part: Part, result: Result | Checked) -> Any:
    """Return what the macro of a section takes."""
    drawn = part.drawn
    if part.macro == "Tiles" and isinstance(result, Result):
        return drawn.lead, [_tile(tile, tinted=True) for tile in drawn.tiles], drawn.heavy
    if part.macro == "Charts":
        pictures, bands_, tables = drawn
        telling = [one for one in pictures if one.telling]
        rest = [_drawn(one) for one in pictures if not one.telling]
        return {
            "groups": [
                (name, [_drawn(one) for one in telling if one.group == name])
                for name in dict.fromkeys(one.group for one in telling)
            ],
            "rest": rest,
            "what": f"{counted(len(rest), 'chart')} without a finding of their own",
            "bands": bands_,
            "tables": list(map(laid_out, tables)),
        }
    return drawn


def _tile(tile: Tile, tinted: bool) -> tuple[Tile, str]:
    """Return a tile and its small curve; if tinted, by the band it lies in where that is not a good one."""
    rows = [one for one in BANDS.get(tile.key.rpartition(".")[2], ()) if one.name == tile.band]
    tints = rows if tinted and tile.tone not in ("good", None) else []
    log = tile.log and all(one is None or one > 0 for one in tile.curve)
    return tile, spark(tile.curve, tints, log) if len(tile.curve) > 1 else ""


def _drawn(one: Picture) -> Chart:
    panels = [panel_svg(panel, f"{one.title}: {panel.y_title}") for panel in one.panels]
    hover = json.dumps([points for _, points in panels], ensure_ascii=False, separators=(",", ":"))
    return Chart(one, tuple(svg for svg, _ in panels), script_json(hover))


def _calm(text: str) -> str:
    """Return an opening such as SEVERE off-policy mismatch without its capitals."""
    words = [word.lower() if word.isupper() and len(word) > 3 else word for word in text.split(" ")]
    return " ".join((words[0][:1].upper() + words[0][1:], *words[1:]))


def _meter(summary: Result) -> Any:
    k3 = summary.number("k3")
    if k3.value is None or k3.value <= 0:
        return ""
    synced = in_sync(summary)
    return meter(k3, BANDS["k3"], synced.value if synced else None, next(iter(summary.charts.expected), None))


# ---------------------------------------------------------------- the file


def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(templates_dir()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": breakable,
        "unbroken": _unbroken,
        "cell": shown,
        "forms": forms,
        "minus": minus,
    }
    return environment


def _unbroken(text: str) -> Any:
    """Return a sentence as HTML without line breaks in numbers, intervals and options; `x` is code."""
    from markupsafe import Markup, escape

    whole = _WHOLE.sub(r'<span class="nw">\g<0></span>', str(escape(minus(text))))
    return Markup(_CODE.sub(r"<code>\1</code>", whole))
