"""An answer as one self-contained HTML file: nothing is fetched, and only charts need a script.

What a script unpacks is gzipped, in base 64: the result as JSON, the charts, and plotly, which draws them.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from offpol_diag.metrics import BANDS, tone
from offpol_diag.numerals import minus, rounded
from offpol_diag.report import answered
from offpol_diag.report.answer import Answer, footnotes, shown
from offpol_diag.report.compare import named
from offpol_diag.report.parts import Part, parts
from offpol_diag.report.plot import TEMPLATES, look
from offpol_diag.result import Result, in_sync

if TYPE_CHECKING:
    from offpol_diag.check import Checked

ELSEWHERE = ("Decide", "Rescore", "Reference", "Warnings", "To confirm")
"""Facts that stand in the card of the cause, or in a table."""
LEVEL = 5
"""Of gzip: two thirds of the time of its default, for 1% more."""
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates, which HTML does not allow."""
_WHOLE = re.compile(
    r"--\w[\w-]*|\[(?:&[lg]t;)?[−\-\d.,%]+, (?:&[lg]t;)?[−\-\d.,%]+\][\de%-]*|\d[\d.,]*e-\d+%?|"
    r"(?:[\w/]+ ?)?(?:[≤≥=±]|&[lg]t;) ?[−-]?[\w½][\w.,%]*"
)
_CODE = re.compile("`([^`]+)`")


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
        (TEMPLATES / name).read_text(encoding="utf-8").strip() for name in ("report.css", "report.js")
    )
    plotly, digest = library() if answer.charts else ("", "")
    scripts = " ".join(f"'sha256-{one}'" for one in (sha256(script), digest) if one)
    policy = (  # these scripts and inline styles, and no network; charts are saved as images
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    looks = {"light": look("light"), "dark": look("dark")}
    rendered: str = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=f"{kind} · {name} · offpol-diag",
            name=name,
            head=_head(result, answer),
            parts=sections,
            data=data,
            plotly=plotly,
            looks=json.dumps(looks, separators=(",", ":")),
            version=version,
            policy=policy,
            style=style,
            script=script,
        )
    )
    return UNSEEN.sub("\ufffd", rendered)


def _head(result: Result | Checked, answer: Answer) -> dict[str, Any]:
    """Return the facts of the first screen."""
    of_analysis = isinstance(result, Result) and any(fact.title for fact in answer.facts)
    diagnosed = result.diagnosis.headline if isinstance(result, Result) and result.diagnosis else ""
    said = diagnosed if of_analysis and not (isinstance(result, Result) and result.is_bug) else ""
    cards = {one.label: one for one in answer.facts if one.title} if of_analysis else {}
    return {
        "answer": answer,
        "eye": answer.about.replace(": ", " · ", 1).replace(", ", " · "),
        "sev": _calm(answer.word) if answer.word else "",
        "interval": minus(answer.interval),
        "lede": " ".join(one for one in (answer.more, said) if one),
        "cards": cards,
        "facts": [fact for fact in answer.facts if fact.sentence],
        "others": [
            one for one in answer.facts if one.sentence and not one.title and one.label not in ELSEWHERE
        ],
        "meter": _meter(result) if of_analysis and isinstance(result, Result) else None,
        "cause": next((one for one in answer.charts if one.name == "by_lag" and "Cause" in cards), None),
        "tables": [] if of_analysis else [one for one in answer.tables if one.shown == "always" and one.rows],
        "charts": [] if of_analysis else answer.charts,
    }


def _calm(text: str) -> str:
    """Return an opening such as SEVERE off-policy mismatch without its capitals."""
    words = [word.lower() if word.isupper() and len(word) > 3 else word for word in text.split(" ")]
    return " ".join((words[0][:1].upper() + words[0][1:], *words[1:]))


def _meter(summary: Result) -> dict[str, Any] | None:
    """Return the scale of K3 from 1e-5 to 1, in percent: its bands, this dump, and what is at lag 0."""
    k3, synced = summary.main("k3"), in_sync(summary)
    if k3.value is None or k3.value <= 0:
        return None

    def at(x: float | None) -> float:
        return 20 * (min(max(math.log10(max(x or 0.0, 1e-5)), -5), 0) + 5)

    low, high = k3.interval or (k3.value, k3.value)
    here, lag_0 = at(k3.value), synced.value if synced else None
    apart = lag_0 is not None and lag_0 > 0 and abs(at(lag_0) - here) > APART
    return {
        "bands": [
            (one.name, tone(one.name), at(one.low), at(one.high or 1.0), rounded(one.low) if one.low else "")
            for one in BANDS["k3"]
        ],
        "here": here,
        "value": rounded(k3.value),
        "ends": (at(low), at(high)),
        "synced": at(lag_0) if apart else None,
        "lag_0": rounded(lag_0),
        "expected": [(at(one.low), at(one.high), one.regime) for one in summary.charts.expected[:1]],
    }


APART = 17
"""Percent of the scale that two names on it take."""


def spark(values: Sequence[float | None], log: bool) -> str:
    """Return the points of a small curve in a box of 240 by 30."""
    places = [math.log10(y) if y and log and y > 0 else None if log else y for y in values]
    known = [y for y in places if y is not None]
    low = min(known, default=0.0)
    span, step = (max(known, default=1.0) - low) or 1.0, 234 / max(len(places) - 1, 1)
    pairs = [(3 + i * step, 27 - 24 * (y - low) / span) for i, y in enumerate(places) if y is not None]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in pairs)


# ---------------------------------------------------------------- the file


def packed(text: str) -> str:
    """Gzip a text, in base 64, which is safe in HTML; equal texts give equal ones."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), LEVEL, mtime=0)).decode()


def sha256(text: str) -> str:
    """Return the digest of a script, as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def library() -> tuple[str, str]:
    """Return the plotly.min.js of the installed package, packed, and its digest."""
    found = find_spec("plotly")
    assert found  # the extra `cli` has it
    script = (Path(str(found.origin)).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return packed(script), sha256(script)


def embedded(summary: Result) -> str:
    """Return the result as packed JSON without what is as by default; equal results give equal texts."""
    data = {"format": summary.format, **summary.model_dump(mode="json", exclude_defaults=True)}
    return packed(json.dumps(data, ensure_ascii=False, separators=(",", ":")))


def forms(text: str) -> tuple[str, str]:
    """Split a configuration into its first form and all others, which begin with a comment each."""
    pieces = text.strip().split("\n\n# ")
    head = 2 if len(pieces) > 1 and all(line.startswith("#") for line in pieces[0].splitlines()) else 1
    first, others = "\n\n# ".join(pieces[:head]), "\n\n# ".join(pieces[head:])
    return first, f"# {others}" if others else ""


def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "breakable": breakable,
        "cell": shown,
        "cells": lambda table: [[shown(cell) for cell in row] for row in table.rows],
        "footnotes": footnotes,
        "forms": forms,
        "minus": minus,
        "packed": lambda one: packed(one.to_json()),
        "spark": spark,
        "unbroken": _unbroken,
    }
    return environment


def breakable(name: str) -> Any:
    """Return a name with optional line breaks after each slash and underscore."""
    from markupsafe import Markup, escape

    return Markup(str(escape(name)).replace("_", "_<wbr>").replace("/", "/<wbr>"))


def _unbroken(text: str) -> Any:
    """Return a sentence as HTML without line breaks in numbers, intervals and options; `x` is code."""
    from markupsafe import Markup, escape

    whole = _WHOLE.sub(r'<span class="nw">\g<0></span>', str(escape(minus(text))))
    return Markup(_CODE.sub(r"<code>\1</code>", whole))
