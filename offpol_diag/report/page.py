"""An answer as one self-contained HTML file: nothing is fetched, and only charts need a script.

What a script unpacks is gzipped, in base 64: the result as JSON, the charts, and plotly, which draws them.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from offpol_diag.metrics import BANDS, tone
from offpol_diag.numerals import minus, rounded
from offpol_diag.report import answered
from offpol_diag.report.answer import footnotes, shown
from offpol_diag.report.charts import TEMPLATES, Chart, look
from offpol_diag.report.parts import Part, parts
from offpol_diag.result import Result, in_sync

if TYPE_CHECKING:
    from offpol_diag.check import Checked

NOT_IN_HTML = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # controls, lone surrogates


def page(result: Result | Checked) -> str:
    """Render the whole page; equal results give equal pages."""
    answer, known = answered(result), dict[str, Any](k3=None)
    if isinstance(result, Result):
        known = {"k3": result.main("k3"), "synced": in_sync(result), "bands": BANDS["k3"]}
        sections, version = [*parts(result, answer)], result.run.version
    else:
        tables = tuple(table for table in answer.tables if table.shown != "always")
        sections, version = [Part("steps", "Steps", answer.remarks, tables=tables)], result.version
    style, script = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    data = packed(result.to_json())
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    called = (drawn, footnotes, minus, percent, rounded, spark, tone, unbroken)
    environment.filters |= {function.__name__: function for function in called}
    environment.filters["cells"] = lambda table: [[*map(shown, row)] for row in table.rows]
    rendered: str = environment.get_template("report.html.j2").render(
        known,
        answer=answer,
        parts=sections,
        version=version,
        cards={fact.label: fact for fact in answer.facts if fact.title},
        data=data,
        nonce=sha256(data.encode()).hexdigest(),  # the only scripts that run; no name in a dump can know it
        plotly=library() if answer.charts else "",
        looks=json.dumps({"light": look("light"), "dark": look("dark")}),
        style=style,
        script=script,
    )
    return NOT_IN_HTML.sub("\ufffd", rendered)


def packed(text: str) -> str:
    """Gzip a text, in base 64, which is safe in HTML; equal texts give equal ones."""
    zipped = gzip.compress(text.encode("utf-8", "replace"), 5, mtime=0)  # 9 takes half as long again, for 1%
    return base64.b64encode(zipped).decode()


@cache
def library() -> str:
    """Return the plotly.min.js of the installed package, packed."""
    found = find_spec("plotly")
    assert found  # the extra `cli` has it
    file = Path(str(found.origin)).parent / "package_data" / "plotly.min.js"
    return packed(file.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- what the templates call


def drawn(chart: Chart) -> str:
    """Return traces and layout of a chart as plotly reads them, packed."""
    return packed(json.dumps({"data": chart.data, "layout": chart.layout}, separators=(",", ":")))


def percent(k3: float | None) -> float:
    """Return the place of a K3 on the scale, in percent: its logarithm, from 1e-5 to 1."""
    return round(20 * (min(max(math.log10(max(k3 or 0.0, 1e-5)), -5), 0) + 5), 2)


def spark(heights: Sequence[float | None]) -> str:
    """Return the points of a small curve in a box of 240 by 30."""
    known = [y for y in heights if y is not None]
    low, step = min(known, default=0.0), 234 / max(len(heights) - 1, 1)
    span = (max(known, default=1.0) - low) or 1.0
    points = [(3 + i * step, 27 - 24 * (y - low) / span) for i, y in enumerate(heights) if y is not None]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def unbroken(text: str) -> Markup:
    """Return a sentence as HTML without line breaks in intervals; `x` is code."""
    whole = re.sub(r"\[\S+, \S+\]", r'<span class="nw">\g<0></span>', str(escape(minus(text))))
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", whole))
