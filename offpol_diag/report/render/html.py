"""Render the report as one self-contained HTML file, without network access, readable without JavaScript."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePath
from typing import Any

from offpol_diag.blocks import Block, Figure, Section, Table, Text
from offpol_diag.check import Checked
from offpol_diag.metrics import METRICS, tone
from offpol_diag.numerals import counted, minus, say, written
from offpol_diag.report.picture import Picture, listed
from offpol_diag.report.render.embedded import (
    DATA_ID,
    UNSEEN,
    digest,
    embedded,
    packed,
    read_back,
    script_json,
    templates_dir,
)
from offpol_diag.report.render.explore import drawn, library
from offpol_diag.report.render.numbers import shown
from offpol_diag.report.render.svg import meter, panel_svg, spark
from offpol_diag.report.render.tables import TableView, breakable, laid_out
from offpol_diag.report.sections import SECTIONS, check, sections
from offpol_diag.report.sections.answer import about, answer, forms
from offpol_diag.report.sections.charts import Charts, cause
from offpol_diag.report.sections.explored import Drawn, explored, places
from offpol_diag.report.sections.gate import report as gates
from offpol_diag.report.sections.numbers import Tile, Tiles, drift
from offpol_diag.report.sections.opening import Opening, opening
from offpol_diag.report.sections.runs import file_name
from offpol_diag.summary import Number, Summary

_WHOLE = re.compile(
    r"--\w[\w-]*|\[(?:&[lg]t;)?[−\-\d.,%]+, (?:&[lg]t;)?[−\-\d.,%]+\][\de%-]*|\d[\d.,]*e-\d+%?|"
    r"(?:[\w/]+ ?)?(?:[≤≥=±]|&[lg]t;) ?[−-]?[\w½][\w.,%]*"
)
_CODE = re.compile("`([^`]+)`")

__all__ = ["read_back", "render_html", "templates_dir"]


@dataclass(frozen=True)
class Chart:
    """A picture, drawn: its panels, what to say of their points as JSON, and its numbers as a table."""

    picture: Picture
    svgs: tuple[Any, ...]
    json: str
    data: TableView


@dataclass(frozen=True)
class Part:
    """A section of the page: runs of blocks, each with the macro that draws it."""

    id: str
    title: str
    short: str
    runs: tuple[tuple[str, Any], ...]


def render_html(summary: Summary, explore: bool = True) -> str:
    """Render the whole page; equal summaries give equal pages.

    Args:
        summary: the result.
        explore: whether the page carries plotly, to draw its charts large.
    """
    charts = explored(summary) if explore else {}
    if charts:
        library()
    kind = "Thresholds" if summary.sweep else "Off-policy mismatch"
    kind = "Comparison" if summary.against or summary.comparison else kind
    return _page(
        title=f"{kind} · {_named(summary)} · offpol-diag",
        name=_named(summary),
        head=_head(summary),
        parts=_parts(summary),
        data=embedded(summary),
        version=summary.run.version,
        charts=charts,
    )


def render_check(found: Checked, explore: bool = True) -> str:
    """Render what `check` found as a page of the same kind."""
    opened = check.opening(found)
    charts = {one.id: {"": one} for one in opened.pictures} if explore else {}
    name = f"{PurePath(found.dump[0]).name if found.dump else 'a dump'} and its curves"
    notes = [Text(line) for line in check.notes(found)]
    runs = (("Table", [laid_out(check.table(found, found.metrics))]), ("Text", notes))
    files = " · ".join((f"{found.trainer} · {found.preset}", *(PurePath(one).name for one in found.logged)))
    return _page(
        title=f"Curves · {name} · offpol-diag",
        name=name,
        head=_opened(opened, files),
        parts=[Part("metrics", "All metrics", "Metrics", tuple(run for run in runs if run[1]))],
        data=packed(found.to_json()),
        version=found.version,
        charts=charts,
    )


def _page(charts: Drawn, **facts: Any) -> str:
    """Fill the template; `charts` are those that plotly can draw."""
    style, script, early, more, opener = (
        (templates_dir() / name).read_text(encoding="utf-8").strip()
        for name in ("report.css", "report.js", "theme.js", "explore.css", "explore.js")
    )
    hashes = [digest(early), digest(script)]
    carried: dict[str, Any] = {"explore": {}}
    if charts:
        source, its = library().result()
        hashes += [digest(opener), its]
        style = f"{style}\n{more}"
        carried = {"explore": places(charts), "figures": drawn(charts), "plotly": source, "opener": opener}
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    policy = (  # these scripts and inline styles, and no network
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    assets = {"policy": policy, "style": style, "early": early, "script": script, "data_id": DATA_ID}
    page: str = _environment().get_template("report.html.j2").render(**facts, **assets, **carried)
    return UNSEEN.sub("\ufffd", page)


# ---------------------------------------------------------------- what stands where

IN_HEAD = ("diagnosis", "verdict")
"""Sections of a single run that the first screen holds."""


OPENED = {
    "runs": ("All numbers of A and B", "A and B"),
    "comparison": ("All numbers of every preset", "Side by side"),
    "sweep": ("", ""),
}
"""Sections of which the opening holds the findings and the charts → what is left of them, and in short."""


def _parts(summary: Summary) -> list[Part]:
    """Return the sections of the page, in reading order."""
    names = [name for name in SECTIONS if summary.against or name not in IN_HEAD]
    parts = [_part(section, summary) for section in sections(summary, names)]
    if opening(summary) and summary.against is None:
        facts = _verdict(summary)
        title = f"The dump: {facts['sev'].lower()} {facts['h1']} {facts['interval']}"
        after = sum(one.id in OPENED for one in parts)
        parts.insert(after, Part("mismatch", title, "The dump", (("mismatch", [facts]),)))
    return parts


def _part(section: Section, summary: Summary) -> Part:
    """Return a section as drawn; of one that the opening tells, what else it holds, folded."""
    blocks = section.blocks
    if section.id in OPENED:
        title, short = OPENED[section.id]
        left = (one for one in blocks if isinstance(one, Table | Text) and getattr(one, "tone", "") != "warn")
        blocks = tuple(replace(one, folded=True) if isinstance(one, Table) else one for one in left)
        section = replace(section, title=title or section.title, short=short)
    drawable = (one for one in blocks if not isinstance(one, Figure))  # a terminal's
    runs = ((kind, list(run)) for kind, run in groupby(drawable, lambda block: type(block).__name__))
    views = tuple((kind, [_view(one, summary) for one in run]) for kind, run in runs)
    return Part(section.id, section.title, section.short or section.title.split(" ")[0], views)


def _view(block: Block, summary: Summary) -> Any:
    """Return a block as its macro takes it."""
    match block:
        case Table():
            return laid_out(block)
        case Tiles():
            return block.lead, [(tile, *_tile(tile, summary)) for tile in block.tiles], block.heavy
        case Charts():
            opened = opening(summary) is not None
            telling = [one for one in block.pictures if one.telling and not opened]
            rest = [_drawn(one) for one in block.pictures if one not in telling]
            what = f"{len(rest)} charts without a finding of their own"
            return {
                "groups": [
                    (name, [_drawn(one) for one in telling if one.group == name])
                    for name in dict.fromkeys(one.group for one in telling)
                ],
                "rest": rest,
                "what": f"{counted(len(rest), 'chart')} of the dump" if opened else what,
                "bands": block.bands,
                "tables": list(map(laid_out, block.tables)),
            }
        case _:
            return block


def _tile(tile: Tile, summary: Summary) -> tuple[str, str, Any]:
    """Return a tile's value, what stands below it, and its small curve."""
    value, interval = written(tile.number.model_copy(update={"note": None}))
    metric = tile.key.rpartition(".")[2]
    rows = [one for one in summary.charts.bands if one.metric == metric and one.name == tile.band]
    tints = [(one.low, one.high, tone(one.name)) for one in rows if tile.tone not in ("good", None)]
    log = metric in METRICS and METRICS[metric].log and all(one is None or one > 0 for one in tile.curve)
    curve = spark(tile.curve, tints, log) if tile.curve else ""
    below = " · ".join(filter(None, (interval, tile.beside)))
    return minus(value) if tile.number.known else "–", minus(below), curve


def _drawn(one: Picture) -> Chart:
    panels = [panel_svg(panel, f"{one.title}: {panel.y_title}") for panel in one.panels]
    hover = json.dumps([points for _, points in panels], ensure_ascii=False, separators=(",", ":"))
    return Chart(one, tuple(svg for svg, _ in panels), script_json(hover), laid_out(one.data or listed(one)))


# ---------------------------------------------------------------- the first screen


def _head(summary: Summary) -> dict[str, Any]:
    """Return the facts of the first screen: the answer to what was asked, or the verdict of an analysis."""
    found = opening(summary)
    if found is None:
        return {"opening": None, **_verdict(summary)}
    eye = _named(summary) if summary.against else _eye(summary)
    return _opened(found, eye) | {"gates": laid_out(gates(summary.gates)) if summary.gates else None}


def _opened(found: Opening, eye: str) -> dict[str, Any]:
    return {
        "opening": found,
        "eye": eye,
        "sev": found.sev,
        "h1": found.h1,
        "interval": minus(found.interval),
        "tone": found.tone,
        "lede": found.lede,
        "cautions": found.cautions,
        "facts": [(one, spark(one.curve, (), False) if len(one.curve) > 1 else "") for one in found.facts],
        "charts": [_drawn(one) for one in found.pictures if one.telling],
        "rest": [_drawn(one) for one in found.pictures if not one.telling],
        "more": f"{counted(sum(not one.telling for one in found.pictures), 'chart')} without a difference",
        "gates": None,
    }


def _eye(summary: Summary) -> str:
    return about(summary).replace(": ", " · ", 1).replace(", ", " · ")


def _verdict(summary: Summary) -> dict[str, Any]:
    """Return the facts of the verdict of an analysis."""
    found, k3 = answer(summary), summary.metrics.get(f"{drift(summary)}k3", Number())
    lead, colon, rest = found.headline[0].partition(": ")
    rest, bracket, interval = rest.partition(" [")
    diagnosed = "" if found.bug or summary.diagnosis is None else summary.diagnosis.headline
    evidence = cause(summary)
    return {
        "eye": _eye(summary),
        "sev": _calm(lead) if colon else "",
        "h1": rest if colon else lead,
        "interval": minus(bracket.strip() + interval),
        "tone": found.tone,
        "lede": " ".join(one for one in (*found.headline[1:], diagnosed) if one),
        "cautions": found.cautions,
        "answer": found,
        "meter": _meter(summary, k3),
        "chart": _drawn(evidence) if evidence and not found.bug else None,
    }


def _calm(text: str) -> str:
    """Return an opening such as SEVERE off-policy mismatch without its capitals."""
    words = [word.lower() if word.isupper() and len(word) > 3 else word for word in text.split(" ")]
    return " ".join((words[0][:1].upper() + words[0][1:], *words[1:])) + ":"


def _meter(summary: Summary, k3: Number) -> Any:
    rows = [one for one in summary.charts.bands if one.metric == "k3"]
    if k3.value is None or k3.value <= 0 or not rows:
        return ""
    named = [(one.low, one.high, tone(one.name), one.name) for one in rows]
    lag = summary.charts.lag
    synced = lag.in_sync.value if lag and lag.in_sync else None
    near = (synced, say(Number(value=synced))) if synced and synced > 0 else None
    return meter(named, k3.value, k3.interval, written(k3)[0], near)


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
        "packed": packed,
    }
    return environment


def _unbroken(text: str) -> Any:
    """Return a sentence as HTML without line breaks in numbers, intervals and options; `x` is code."""
    from markupsafe import Markup, escape

    whole = _WHOLE.sub(r'<span class="nw">\g<0></span>', str(escape(minus(text))))
    return Markup(_CODE.sub(r"<code>\1</code>", whole))


def _named(summary: Summary) -> str:
    dumps = [summary.dump, *([summary.against.b.dump] if summary.against else [])]
    return " against ".join(map(file_name, dumps))
