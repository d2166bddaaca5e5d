"""Render the report as one self-contained HTML file, without network access, readable without JavaScript."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from offpol_diag.blocks import Block, Figure, Section, Series, Table
from offpol_diag.numerals import count, counted
from offpol_diag.report.render.embedded import (
    DATA_ID,
    base85,
    digest,
    embedded,
    packed,
    read_back,
    script_json,
)
from offpol_diag.report.render.figures import SHARED, plotly_figure
from offpol_diag.report.render.library import library
from offpol_diag.report.render.tables import TableView, breakable, laid_out
from offpol_diag.report.sections import sections
from offpol_diag.summary import DumpFacts, Number, Summary

_WHOLE = re.compile(r"--\w[\w-]*|\[[-\d.,]+, [-\d.,]+\][\de%-]*|\d[\d.,]*e-\d+%?")

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates, which HTML does not allow."""
MUCH = 3000
"""Total cells of folded lookup tables above which these are embedded gzipped and unpacked by a script."""


__all__ = ["read_back", "render_html", "templates_dir"]


@dataclass(frozen=True)
class FigureView:
    """A figure, its plotly JSON, and its numbers as a table."""

    figure: Figure
    json: str
    data: TableView


def render_html(summary: Summary) -> str:
    """Render the whole page; equal summaries give equal pages."""
    script, early = _asset("report.js"), _asset("theme.js")
    drawing, report = library(), sections(summary)
    pack = _much(report)
    page: str = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=_title(summary),
            facts=_facts(summary),
            sections=[(section, _grouped(section.blocks, pack)) for section in report],
            policy=_policy(digest(early), digest(script), drawing.digest),
            style=_asset("report.css"),
            early=early,
            script=script,
            plotly=base85(drawing.gzipped),
            shared=script_json(json.dumps(SHARED)),
            data_id=DATA_ID,
            data=embedded(summary),
            version=summary.run.version,
        )
    )
    return UNSEEN.sub("\ufffd", page)


def templates_dir() -> Path:
    """Return the templates' directory: in the package if installed from a wheel, else in the repository."""
    package = Path(__file__).parents[2]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(templates_dir()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": breakable, "unbroken": _unbroken, "led": _led, "packed": packed}
    return environment


def _unbroken(text: str) -> Any:
    """Return a sentence as HTML with numbers, intervals and options protected from line breaks."""
    from markupsafe import Markup, escape

    return Markup(_WHOLE.sub(r'<span class="n">\g<0></span>', str(escape(text))))


def _led(caption: str) -> Any:
    """Return a caption as HTML with the words before its colon emphasised."""
    from markupsafe import Markup, escape

    head, colon, rest = caption.partition(": ")
    return Markup(f"<b>{escape(head)}</b>: {escape(rest)}") if colon else caption


def _asset(name: str) -> str:
    return (templates_dir() / name).read_text(encoding="utf-8").strip()


def _policy(*digests: str) -> str:
    """Return a content security policy that allows these scripts and inline styles, and no network."""
    hashes = " ".join(f"'sha256-{one}'" for one in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _title(summary: Summary) -> str:
    other = f" against {_named(summary.against.b.dump)}" if summary.against else ""
    return f"Off-policy mismatch in {_named(summary.dump)}{other}"


def _named(dump: DumpFacts) -> str:
    files = dump.files
    first = Path(files[0]).name if files else "a dump"
    more = f" and {count(len(files) - 1)} more" if len(files) > 1 else ""
    return f"{first}{more}"


def _facts(summary: Summary) -> str:
    dump = summary.dump
    run = "A: " if summary.against else ""
    return (
        f"{run}{counted(dump.sequences, 'sequence')} · {counted(dump.tokens, 'token')} · "
        f"{counted(dump.groups, 'group')} · {summary.run.device}"
    )


def _much(report: tuple[Section, ...]) -> bool:
    """Return whether the lookup tables are too large to embed uncompressed."""
    tables = (block for section in report for block in section.blocks if isinstance(block, Table))
    return sum(len(table.rows) * len(table.header) for table in tables if _folded(table)) > MUCH


def _folded(table: Table) -> bool:
    return table.collapsed and table.lookup


def _grouped(blocks: tuple[Block, ...], pack: bool) -> list[tuple[str, list[Any]]]:
    """Group consecutive blocks of one kind, so that adjacent figures share a row."""
    return [
        (kind, [_view(block, pack) for block in run])
        for kind, run in groupby(blocks, lambda block: type(block).__name__)
    ]


def _view(block: Block, pack: bool) -> Block | TableView | FigureView:
    if isinstance(block, Table):
        return laid_out(block, pack and _folded(block))
    if isinstance(block, Figure):
        return FigureView(block, script_json(json.dumps(plotly_figure(block))), laid_out(_data(block)))
    return block


def _data(figure: Figure) -> Table:
    """Return the numbers of a figure as a table, one row per point."""
    rows = tuple(
        (series.name, _x(x), Number(value=y, interval=_interval(series, place), unit=figure.y_unit))
        for series in figure.series
        for place, (x, y) in enumerate(zip(series.x, series.y, strict=True))
        if y is not None and math.isfinite(y)
    )
    header = ("series", figure.x_label, figure.y_label)
    return Table(f"{figure.id}-data", f"Data of “{figure.title}”", header, rows)


def _x(x: float | str) -> str | Number:
    return x if isinstance(x, str) else Number(value=x) if math.isfinite(x) else f"{x:g}"


def _interval(series: Series, place: int) -> tuple[float, float] | None:
    low = series.low[place] if series.low else None
    high = series.high[place] if series.high else None
    known = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    return (low, high) if known else None  # type: ignore[return-value]
