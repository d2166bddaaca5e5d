"""Render the report as one self-contained HTML file, without network access, readable without JavaScript."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

from offpol_diag.bands import band
from offpol_diag.blocks import Block, Figure, Section, Table, Text, Tone
from offpol_diag.numerals import counted, say, written
from offpol_diag.report.picture import Picture, number, of_figure, place_name
from offpol_diag.report.render.embedded import DATA_ID, digest, embedded, read_back, script_json
from offpol_diag.report.render.numbers import shown
from offpol_diag.report.render.svg import meter, panel_svg, spark
from offpol_diag.report.render.tables import TableView, breakable, laid_out
from offpol_diag.report.sections import cards, charts, front, sections, strips
from offpol_diag.report.sections.answer import about, cautions, drift, headline, tie, trainer_of
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.gate import report as gates
from offpol_diag.report.sections.opening import opening
from offpol_diag.report.sections.worst import token_name
from offpol_diag.summary import Number, Summary

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates, which HTML does not allow."""
_WHOLE = re.compile(r"--\w[\w-]*|[≤≥] [\d.e-]*\d|\[[-\d.,%]+, [-\d.,%]+\][\de%-]*|\d[\d.,]*e-\d+%?")
LOG_SPARKS = frozenset({"k3", "chi2_token", "chi2_sequence"})

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
    """A section of the page: its template is named `kind`, and `blocks` are drawn at its end."""

    id: str
    title: str
    short: str
    kind: str = "blocks"
    blocks: tuple[Block, ...] = ()
    facts: Any = None


def render_html(summary: Summary) -> str:
    """Render the whole page; equal summaries give equal pages."""
    script, early = _asset("report.js"), _asset("theme.js")
    parts = _parts(summary)
    page: str = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=_title(summary),
            name=_named(summary),
            head=_head(summary),
            parts=[(part, _grouped(part.blocks)) for part in parts],
            policy=_policy(digest(early), digest(script)),
            style=_asset("report.css"),
            early=early,
            script=script,
            data_id=DATA_ID,
            data=embedded(summary),
            version=summary.run.version,
        )
    )
    return UNSEEN.sub("\ufffd", page)


# ---------------------------------------------------------------- what stands where


def _parts(summary: Summary) -> list[Part]:
    """Return the sections of the page, in reading order."""
    made = {section.id: section for section in sections(summary)}
    if summary.against is not None:
        return [_plain(made[name]) for name in ("runs", "diagnosis", "made") if name in made]
    first = [_plain(made[name]) for name in ("comparison", "sweep") if name in made]
    if opening(summary):
        facts = _verdict(summary)
        title = f"The dump: {facts['sev'].lower()} {facts['h1']} {facts['interval']}"
        first.append(Part("mismatch", title, "The dump", "mismatch", (), facts))
    found = [*first, _numbers(summary, made), _charts(summary, made)]
    if "presets" in made and summary.comparison is None and summary.sweep is None:
        found.append(_presets(summary, made))
    if "worst" in made:
        found.append(_tokens(summary, made["worst"]))
    if "crosswalk" in made:
        found.append(_logs(made["crosswalk"]))
    data = (*made["dump"].blocks, *made["made"].blocks)
    found.append(Part("data", "Data and provenance", "Data", "blocks", _folded(data, keep=())))
    return [part for part in found if part is not None]


def _plain(section: Section) -> Part:
    """Return what a section holds beside the opening: its sentences, and its tables folded."""
    titles = {"runs": "All numbers of A and B", "comparison": "All numbers of every preset"}
    short = {"runs": "A and B", "made": "How made", "comparison": "Side by side"}
    blocks = section.blocks
    if section.id in ("runs", "comparison", "sweep"):
        blocks = tuple(
            one for one in blocks if isinstance(one, Table | Text) and getattr(one, "tone", "") != "warn"
        )
    title = short.get(section.id, section.title.split(" ")[0])
    return Part(section.id, titles.get(section.id, section.title), title, "blocks", _folded(blocks))


def _folded(blocks: Iterable[Block], keep: tuple[str, ...] = ()) -> tuple[Block, ...]:
    return tuple(
        replace(b, collapsed=True) if isinstance(b, Table) and b.id not in keep else b for b in blocks
    )


def _numbers(summary: Summary, made: dict[str, Section]) -> Part | None:
    found = front.tiles(summary)
    fired = (
        [one for one in summary.recommendation.fired if one.level == "alert"]
        if summary.recommendation
        else []
    )
    rows = tuple(
        (
            one.sentence,
            "; ".join(f"{key} = {say(_saw(key, value, summary))}" for key, value in one.saw.items()) or "–",
            one.source or "–",
        )
        for one in fired
    )
    said = (
        "1 published warning level is crossed"
        if len(rows) == 1
        else f"{len(rows)} published warning levels are crossed"
    )
    blocks: list[Block] = (
        [Table("alerts", said, ("level", "this dump", "set by"), rows, collapsed=True)] if rows else []
    )
    bands = tuple(
        (one.metric, one.name, _range(one.low, one.high), one.regime, one.source)
        for one in summary.charts.bands
    )
    if bands:
        blocks.append(
            Table(
                "bands",
                "Where the bands come from",
                ("number", "band", "range", "regime", "source"),
                bands,
                collapsed=True,
            )
        )
    for name, caption in (
        ("policies", "All numbers of the three policy pairs"),
        ("numbers", "What the headline numbers mean"),
    ):
        if name in made:
            blocks += [
                replace(b, caption=caption, collapsed=True)
                for b in made[name].blocks
                if isinstance(b, Table) and b.id in ("policies", "headline")
            ]
    if not found and not blocks:
        return None
    drawn = [(tile, _spark(tile, summary)) for tile in found]
    return Part(
        "numbers",
        "Headline numbers",
        "Numbers",
        "numbers",
        tuple(blocks),
        {"lead": front.resampled(summary), "tiles": drawn},
    )


def _saw(key: str, value: float | None, summary: Summary) -> Number:
    metric = summary.metrics.get(key)
    return (
        metric
        if metric and metric.value == value
        else Number(value=value, unit=metric.unit if metric else "")
    )


def _range(low: float | None, high: float | None) -> str:
    ends = [None if one is None else say(Number(value=one)) for one in (low, high)]
    return f"{ends[0]} to {ends[1]}" if all(ends) else f"below {ends[1]}" if ends[1] else f"above {ends[0]}"


def _spark(tile: front.Tile, summary: Summary) -> Any:
    if not tile.curve:
        return ""
    rows = [one for one in summary.charts.bands if one.metric == tile.metric and one.name == tile.band]
    bands = [(one.low, one.high, charts.tone(one.name)) for one in rows if tile.tone not in ("good", None)]
    return spark(
        tile.curve, bands, tile.metric in LOG_SPARKS and all(one is None or one > 0 for one in tile.curve)
    )


def _charts(summary: Summary, made: dict[str, Section]) -> Part | None:
    found = charts.pictures(summary)
    telling = [] if opening(summary) else [one for one in found if one.telling]
    groups = [
        (name, [_drawn(one) for one in telling if one.group == name])
        for name in dict.fromkeys(one.group for one in telling)
    ]
    rest = [_drawn(one) for one in found if one not in telling]
    tables = (
        tuple(block for block in made["where"].blocks if isinstance(block, Table)) if "where" in made else ()
    )
    k3 = [(charts.tone(one.name), one.name) for one in summary.charts.bands if one.metric == "k3"]
    if not found and not tables:
        return None
    what = (
        f"{counted(len(rest), 'chart')} of the dump"
        if opening(summary)
        else "charts without a finding of their own"
    )
    facts = {
        "groups": groups,
        "rest": rest,
        "what": what if opening(summary) else f"{len(rest)} more {what}",
        "bands": k3,
        "tables": [_view(table) for table in tables],
    }
    return Part("charts", "Where the mismatch is", "Charts", "charts", (), facts)


def _presets(summary: Summary, made: dict[str, Section]) -> Part:
    found, lacking = cards.cards(summary), cards.lacking(summary)
    shown = [one for one in found if not one.mark]
    own = trainer_of(summary)
    names = sorted({name for one in shown for name in one.trainers})
    blocks = [
        b
        for b in made["presets"].blocks
        if isinstance(b, Table) and b.id in ("losses", "all", "needs", "methods")
    ]
    if "families" in made:
        blocks += [b for b in made["families"].blocks if isinstance(b, Table)]
    many = len(blocks) > 6
    facts = {
        "cards": found,
        "columns": cards.COLUMNS,
        "trainers": names,
        "own": own if own in names else "",
        "families": sum(one.first for one in shown),
        "distinct": cards.alike(tuple(shown)),
        "all": len(shown),
        "lacking": len(lacking),
        "bug": is_bug(summary),
        "fold": many,
    }
    return Part("presets", "Every correction on this batch", "Presets", "presets", _folded(blocks), facts)


def _logs(section: Section) -> Part:
    """Return what each trainer would have logged, one fold for each set of names."""
    tables = [block for block in section.blocks if isinstance(block, Table)]
    trainers = [
        (name, [laid_out(one) for one in some])
        for name, some in groupby(tables, lambda one: one.caption.split()[1])
    ]
    lead = next((block.text for block in section.blocks if isinstance(block, Text)), "")
    return Part("crosswalk", section.title, "Trainer logs", "logs", (), {"lead": lead, "trainers": trainers})


def _tokens(summary: Summary, section: Section) -> Part:
    found = strips.responses(summary)
    types = summary.charts.token_types
    rows: tuple[tuple[Any, ...], ...] = ()
    if types and types.worst:
        share = [Number(value=one.share, unit="share") for one in types.worst]
        k3 = [Number(value=one.k3_share, unit="share") for one in types.worst]
        means = [(Number(value=one.k3), Number(value=one.mean_log_ratio)) for one in types.worst]
        rows = tuple(
            (token_name(one.token_id, summary.charts.token_texts), one.tokens, a, b, *c)
            for one, a, b, c in zip(types.worst, share, k3, means, strict=True)
        )
    header = ("token id", "tokens", "share of tokens", "share of K3", "mean K3, nats", "mean Δ, nats")
    table = (
        (Table("types", strips.types(summary) or "Token ids by share of K3", header, rows, collapsed=True),)
        if rows
        else ()
    )
    facts = {
        "worst": found,
        "typical": strips.typical(summary),
        "open": 2,
        "texts": bool(summary.charts.token_texts),
    }
    title = strips.title(summary) if found else section.title
    return Part("tokens", title, "Tokens", "tokens", (*table, *_folded(section.blocks)), facts)


# ---------------------------------------------------------------- the first screen


def _head(summary: Summary) -> dict[str, Any]:
    """Return the facts of the first screen: the answer to what was asked, or the verdict of an analysis."""
    found = opening(summary)
    if found is None:
        return {"opening": None, **_verdict(summary)}
    return {
        "opening": found,
        "eye": _named(summary) if summary.against else _about(summary),
        "sev": found.sev,
        "h1": found.h1,
        "interval": found.interval,
        "tone": found.tone,
        "lede": found.lede,
        "cautions": found.cautions,
        "facts": [(one, spark(one.curve, (), False) if len(one.curve) > 1 else "") for one in found.facts],
        "charts": [_drawn(one) for one in found.pictures if one.telling],
        "rest": [_drawn(one) for one in found.pictures if not one.telling],
        "more": f"{counted(sum(not one.telling for one in found.pictures), 'chart')} without a difference",
        "gates": laid_out(gates(summary.gates)) if summary.gates else None,
    }


def _about(summary: Summary) -> str:
    return about(summary).replace(": ", " · ", 1).replace(", ", " · ")


def _verdict(summary: Summary) -> dict[str, Any]:
    given = summary.recommendation
    opening, colon, rest = headline(summary)[0].partition(": ")
    rest, bracket, interval = rest.partition(" [")
    k3 = summary.metrics.get(f"{drift(summary)}k3", Number())
    row = band("k3", k3)
    bug = is_bug(summary)
    cause = charts.cause(summary)
    return {
        "eye": _about(summary),
        "sev": _calm(opening) if colon else "",
        "h1": rest if colon else opening,
        "interval": bracket.strip() + interval,
        "tone": "bad" if bug else row.tone if row else "info",
        "lede": front.lede(summary),
        "cautions": cautions(summary),
        "meter": _meter(summary, k3),
        "verdict": front.verdict_title(summary),
        "checks": front.checks(summary),
        "cause": summary.diagnosis.causes[0].statement
        if summary.diagnosis and summary.diagnosis.causes
        else "",
        "chart": _drawn(cause) if cause and not bug else None,
        "evidence": front.evidence(summary),
        "others": summary.diagnosis.causes[1:] if summary.diagnosis else [],
        "action": front.action(summary),
        "method": summary.presets[given.method].method
        if given and given.method in summary.presets and not given.settings
        else "",
        "weights": front.before_after(summary),
        "tabs": front.tabs(summary),
        "sure": () if bug else front.sure(given),
        "runner_up": tie(given) if given and not bug else [],
        "label": (given.label or "") if given and not bug else "",
        "command": front.preset_command(given) if given and not bug else "",
    }


def _calm(text: str) -> str:
    """Return an opening such as SEVERE off-policy mismatch without its capitals."""
    first, *others = text.split(" ")
    shout = first.isupper() and len(first) > 3
    return (
        " ".join(
            [
                first.capitalize() if shout else first,
                *(w.lower() if w.isupper() and len(w) > 3 else w for w in others),
            ]
        )
        + ":"
    )


def _meter(summary: Summary, k3: Number) -> Any:
    rows = [one for one in summary.charts.bands if one.metric == "k3"]
    if k3.value is None or k3.value <= 0 or not rows:
        return ""
    named: list[tuple[float | None, float | None, Tone, str]] = [
        (one.low, one.high, charts.tone(one.name), one.name) for one in rows
    ]
    lag = summary.charts.lag
    synced = lag.in_sync.value if lag and lag.in_sync else None
    near = (synced, say(Number(value=synced))) if synced and synced > 0 else None
    return meter(named, k3.value, k3.interval, written(k3)[0], near)


# ---------------------------------------------------------------- blocks and charts, as templates take them


def _grouped(blocks: tuple[Block, ...]) -> list[tuple[str, list[Any]]]:
    """Group consecutive blocks of one kind, so that adjacent figures share a row."""
    return [
        (kind, [_view(block) for block in run])
        for kind, run in groupby(blocks, lambda block: type(block).__name__)
    ]


def _view(block: Block) -> Any:
    if isinstance(block, Table):
        return laid_out(block)
    return _drawn(of_figure(block)) if isinstance(block, Figure) else block


def _drawn(one: Picture) -> Chart:
    drawn = [panel_svg(panel, f"{one.title}: {panel.y_title}") for panel in one.panels]
    hover = json.dumps([points for _, points in drawn], ensure_ascii=False, separators=(",", ":"))
    return Chart(one, tuple(svg for svg, _ in drawn), script_json(hover), laid_out(one.data or _data(one)))


def _data(one: Picture) -> Table:
    """Return the numbers of a picture as a table, one row per point."""
    rows = []
    for panel in one.panels:
        for layer in panel.layers:
            for place, (x, y) in enumerate(zip(layer.x, layer.y, strict=True)):
                if y is not None and math.isfinite(y):
                    given = number(layer, place, panel.percent)
                    rows.append((layer.name or panel.y_title, place_name(panel, x), given))
    return Table(
        f"{one.id}-data", f"Data of “{one.title}”", ("series", one.panels[0].x_title, "value"), tuple(rows)
    )


# ---------------------------------------------------------------- the file


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
    environment.filters |= {
        "breakable": breakable,
        "unbroken": _unbroken,
        "cell": shown,
        "forms": front.forms,
    }
    return environment


def _unbroken(text: str) -> Any:
    """Return a sentence as HTML with numbers, intervals and options protected from line breaks."""
    from markupsafe import Markup, escape

    return Markup(_WHOLE.sub(r'<span class="nw">\g<0></span>', str(escape(text))))


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
    kind = (
        "Comparison"
        if summary.against or summary.comparison
        else "Thresholds"
        if summary.sweep
        else "Off-policy mismatch"
    )
    return f"{kind} · {_named(summary)} · offpol-diag"


def _named(summary: Summary) -> str:
    dumps = [summary.dump, *([summary.against.b.dump] if summary.against else [])]
    return " against ".join(
        PurePath(one.files[0]).name + (f" and {len(one.files) - 1} more" if len(one.files) > 1 else "")
        if one.files
        else "a dump"
        for one in dumps
    )
