"""Every table of a result's page as data, under names: what is drawn as text on the page is a number here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from offpol_diag.diagnosis.floors import observed
from offpol_diag.frames import Data, Value, named
from offpol_diag.metrics import REGIMES
from offpol_diag.number import Number, Numbers
from offpol_diag.report import answered
from offpol_diag.report.analyze import alerts
from offpol_diag.report.answer import Tile
from offpol_diag.report.parts import parts
from offpol_diag.report.picture import Picture, points
from offpol_diag.report.presets import Cards
from offpol_diag.report.tokens import Strips
from offpol_diag.result import Contrast, Place, Result, WorstSequence, place_of
from offpol_diag.table import Table

Row = Sequence[Value]
WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")


def tables(summary: Result) -> dict[str, Data]:
    """Return every table of a result's page by name, those of its charts too, in the order of the page."""
    return named(_all(summary))


def _all(summary: Result) -> Iterator[Data]:
    answer = answered(summary)
    evidence = [fact.chart for fact in answer.facts if fact.chart]
    if answer.tiles and not summary.against and not summary.comparison:
        yield _tiles(answer.tiles)
    for fact in answer.facts:
        if fact.table:
            yield _of(fact.table, summary)
    for table in answer.tables:
        if table.id not in FEWER:
            yield _of(table, summary)
    for picture in (*answer.charts, *evidence):
        yield from _points(picture)
    for part in parts(summary, answer):
        if part.id == "charts":
            yield from (_places(axis, summary) for axis in summary.axes)
        if isinstance(part.drawn, Cards):
            yield _presets(part.drawn)
            yield from _as_logged(summary)
        elif isinstance(part.drawn, Strips):
            yield _responses(summary)
        for table in part.tables:
            if table not in answer.tables:
                yield _of(table, summary)


FEWER = {"corrections", "decisive", "pairs", "steps"}
"""Tables whose rows and columns another one has too."""


def _of(table: Table, summary: Result) -> Data:
    exact = EXACT.get(table.id)
    return exact(table, summary) if exact else Data(table.id, table.header, table.rows)


def _wide(header: Sequence[str], rows: Sequence[tuple[Row, Numbers]]) -> tuple[Sequence[str], list[Row]]:
    """Return rows with a column for every number that any of them has."""
    names = dict.fromkeys(name for _, numbers in rows for name in numbers)
    return (*header, *names), [(*row, *(numbers.get(name) for name in names)) for row, numbers in rows]


# ---------------------------------------------------------------- of composites


def _places(axis: str, summary: Result) -> Data:
    places, numeric = summary.at(axis), summary.axes[axis].numeric
    keys: list[Value] = [place.key for place in places]
    if numeric and all(WHOLE.fullmatch(place.key) for place in places):
        keys = [int(place.key) for place in places]
    rows: list[tuple[Row, Numbers]] = [
        ((key, place.tokens, place.sequences), _of_presets(axis, place, summary) | place.numbers)
        for key, place in zip(keys, places, strict=True)
    ]
    header, cells = _wide((axis, "tokens", "sequences"), rows)
    if axis in header[1:]:
        header = ("place", *header[1:])
    return Data(f"by-{axis}", header, cells)


def _of_presets(axis: str, place: Place, summary: Result) -> Numbers:
    """Return the numbers of presets at a place, as `PRESET.NAME`."""
    return {
        f"{preset}.{name}": one
        for preset in summary.presets
        for name, one in summary.of(place_of(axis, place.key, f"preset/{preset}")).items()
    }


def _points(picture: Picture) -> Iterator[Data]:
    """Yield the points of a chart, and the cells of a density."""
    rows: list[Row] = []
    for panel, layer, x, number in points(picture):
        at: Value = panel.names[int(x)] if panel.names and 0 <= x < len(panel.names) else x
        rows.append((panel.y_title, layer.name or None, at, number))
    if picture.data:
        yield Data(picture.data.id, picture.data.header, picture.data.rows)
    if rows:
        name = f"{picture.id}-points" if picture.data else f"{picture.id}-data"
        yield Data(name, ("panel", "series", "x", "value"), rows)
    for heat in (panel.heat for panel in picture.panels if panel.heat):
        ends = heat.edges
        cells = [
            (ends[i], ends[i + 1], ends[j], ends[j + 1], many)
            for i, column in enumerate(heat.counts)
            for j, many in enumerate(column)
            if many
        ]
        yield Data(f"{picture.id}-cells", ("x_low", "x_high", "y_low", "y_high", "count"), cells)


def _tiles(tiles: Sequence[Tile]) -> Data:
    rows: list[Row] = []
    for one in tiles:
        known = [y for y in one.curve if y is not None]
        ends = (known[0], known[-1]) if known else (None, None)
        rows.append((one.key or None, one.label, one.number, one.band or None, *ends))
    return Data("tiles", ("number", "label", "value", "band", "first_step", "last_step"), rows)


def _presets(block: Cards) -> Data:
    rows: list[tuple[Row, Numbers]] = [
        ((title, "uncorrected", None), numbers) for title, numbers in block.uncorrected
    ]
    rows += [((one.name, one.mark or None, one.family or None), one.metrics) for one in block.cards]
    return Data("presets", *_wide(("preset", "mark", "family"), rows))


def _as_logged(summary: Result) -> Iterator[Data]:
    rows = [
        (preset, one.logs, name, None if value is None else float(value))
        for preset, one in summary.presets.items()
        for name, value in one.as_logged.items()
    ]
    if rows:
        yield Data("as-logged", ("preset", "logs", "name", "value"), rows)


RESPONSE = ("sequence_id", "typical", "step", "policy_lag", "reward")
TOKEN = ("position", "token_id", "text", "rollout_log_prob", "train_log_prob", "log_ratio")


def _responses(summary: Result) -> Data:
    """Return the worst responses and the ordinary one, token by token."""
    usual, texts = summary.worst.typical, summary.charts.token_texts
    rows: list[Row] = []
    for one in (*summary.worst.sequences, *usual):
        head = (one.sequence_id, one in usual, one.step, one.policy_lag, one.reward)
        for place, position in enumerate(one.positions):
            token = one.token_ids[place] if one.token_ids else None
            logs = (one.rollout_log_probs[place], one.train_log_probs[place], one.log_ratios[place])
            rows.append((*head, position, token, texts.get(str(token)), *logs))
    return Data("worst-responses", (*RESPONSE, *TOKEN), rows)


# ---------------------------------------------------------------- of tables with numbers in words


def _gates(_: Table, summary: Result) -> Data:
    fields = ("name", "said", "bound", "level", "passed", "open", "limit", "centre")
    more = ("baseline", "tolerance", "diagnosis", "steps", "where", "reason", "note", "source")
    rows = [
        (
            *(getattr(one, name) for name in fields),
            Number(value=one.value, interval=one.interval, log10=one.log10),
            *(getattr(one, name) or None if name != "baseline" else one.baseline for name in more),
        )
        for one in summary.gates
    ]
    return Data("gates", (*fields, "value", *more), rows)


def _ranking(_: Table, summary: Result) -> Data:
    given = summary.recommendation
    rows = [(one.title, one.score, one.behind, one.tie) for one in (given.ranking if given else ())]
    return Data("ranking", ("correction", "score", "error_above", "tie"), rows)


def _alerts(_: Table, summary: Result) -> Data:
    rows = []
    for one in alerts(summary):
        for key, value in one.saw.items():
            metric = summary.whole.get(key, Number())
            rows.append((one.sentence, key, metric if metric.value == value else value, one.source))
    return Data("alerts", ("level", "number", "value", "source"), rows)


def _bands(_: Table, summary: Result) -> Data:
    rows: list[Row] = [
        (one.metric, one.name, one.low, one.high, None, one.regime, one.source)
        for one in summary.charts.bands
    ]
    rows += [(metric, None, None, None, *rest) for metric, _, *rest in (*observed(), *REGIMES)]
    return Data("bands", ("number", "band", "low", "high", "observed", "regime", "source"), rows)


def _run(_: Table, summary: Result) -> Data:
    run = summary.run.model_dump()
    seconds = run.pop("seconds")
    rows = [*run.items(), *((f"seconds, {name}", value) for name, value in seconds.items())]
    return Data("run", ("what", "value"), rows)


def _types(_: Table, summary: Result) -> Data:
    fields = ("tokens", "share", "k3_share", "k3", "mean_log_ratio")
    texts, found = summary.charts.token_texts, summary.charts.token_types
    rows = [
        (one.token_id, texts.get(str(one.token_id)), *(getattr(one, name) for name in fields))
        for one in (found.worst if found else ())
    ]
    return Data("types", ("token_id", "text", *fields), rows)


def _worst_sequences(_: Table, summary: Result) -> Data:
    fields = WorstSequence._fields[: WorstSequence._fields.index("first")]
    rows = [tuple(getattr(one, name) for name in fields) for one in summary.worst.sequences]
    return Data("worst-sequences", fields, rows)


AROUND = (*(f"log_ratio_before_{i}" for i in (3, 2, 1)), *(f"log_ratio_after_{i}" for i in (1, 2, 3)))
"""Columns of the log-ratios around a token, in reading order."""


def _worst_tokens(_: Table, summary: Result) -> Data:
    fields = ("sequence_id", "step", "position", "length", "token_id")
    logs = ("rollout_log_prob", "train_log_prob", "log_ratio")
    texts = summary.charts.token_texts
    rows = [
        (
            *(getattr(one, name) for name in fields),
            texts.get(str(one.token_id)),
            *(getattr(one, name) for name in logs),
            *[*[None] * 3, *one.before][-3:],
            *[*one.after, *[None] * 3][:3],
        )
        for one in summary.worst.tokens
    ]
    return Data("worst-tokens", (*fields, "text", *logs, *AROUND), rows)


def _dropped(_: Table, summary: Result) -> Data:
    fields = ("sequence_id", "step", "length", "tokens", "log_ratio_sum", "reward")
    rows = [
        (one.dropped_by, one.kept_by, *(getattr(row, name) for name in fields), "; ".join(row.fired))
        for one in (summary.comparison.drops if summary.comparison else ())
        for row in one.examples
    ]
    return Data("dropped", ("dropped_by", "kept_by", *fields, "fired"), rows)


def _contrasts(table: Table, summary: Result) -> Data:
    found = {one.name: one for one in (summary.against.contrasts if summary.against else ())}
    some: list[Contrast] = [found[str(row[0])] for row in table.rows]
    rows = [
        (one.name, one.a, one.b, one.difference, one.p_value, one.p_adjusted, one.effect or one.reason)
        for one in some
    ]
    return Data(table.id, ("metric", "a", "b", "difference", "p", "p_corrected", "said"), rows)


def _sweep(_: Table, summary: Result) -> Data:
    points = summary.sweep.points if summary.sweep else []
    rows: list[tuple[Row, Numbers]] = [((one.threshold, one.own), one.numbers) for one in points]
    return Data("sweep", *_wide(("threshold", "own"), rows))


EXACT: Mapping[str, Callable[[Table, Result], Data]] = {
    "alerts": _alerts,
    "bands": _bands,
    "dropped": _dropped,
    "gates": _gates,
    "ranking": _ranking,
    "run": _run,
    "sweep": _sweep,
    "types": _types,
    "worst-sequences": _worst_sequences,
    "worst-tokens": _worst_tokens,
    **dict.fromkeys(("differ", "alike", "untested"), _contrasts),
}
"""Id of a table whose cells hold numbers in words → it, of the numbers themselves."""
