"""The short form of comparisons and sweeps: what was found in a sentence, and the numbers that decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offpol_diag.blocks import Block, Cell, Code, Section, Table, Text, Verdict
from offpol_diag.directions import PRESET, Worse, worse
from offpol_diag.numerals import count, say, written
from offpol_diag.report.sections.answer import about
from offpol_diag.report.sections.comparison import ACROSS
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.runs import runs
from offpol_diag.report.sections.sweep import sweep
from offpol_diag.summary import Comparison, Contrast, Number, PresetResult, Summary

DECISIVE = (
    "ess_tokens",
    "ess_sequences",
    "tokens_rejected",
    "sequences_dropped",
    "truncated_high",
    "weight_mean",
    "weight_max",
    "k3",
    "kept_positive",
    "kept_negative",
    "loss_scale_kept",
    "update_kept",
)
"""Numbers of presets that decide between them, the most important first."""
COLUMNS = ("ess_tokens", "ess_sequences", "tokens_rejected", "truncated_high", "weight_max")
"""Those that stand in a table with a row per preset."""
DOZEN, FEW_ROWS = 12, 24


def short(summary: Summary) -> tuple[Section, ...]:
    """Return the short form of a comparison of runs or presets, or of a sweep; empty for other results."""
    blocks: tuple[Block, ...] = ()
    if summary.against is not None:
        blocks = _runs(summary)
    elif summary.comparison is not None:
        blocks = _presets(summary, summary.comparison)
    elif summary.sweep is not None:
        blocks = _sweep(summary)
    return (Section("short", "", blocks),) if blocks else ()


def direction(sign: Worse) -> str:
    """Return in words which way a number is better."""
    words = {"higher": "lower", "lower": "higher", "either": "–"}
    return words.get(sign.sign, f"near {sign.target:g}")


def _unit(number: Number) -> str:
    return {"fraction": "share", "": "–"}.get(number.unit, number.unit)


def _value(number: Number) -> str:
    return written(number).value if number.value is not None or number.log10 is not None else "–"


# ---------------------------------------------------------------- presets side by side


def _presets(summary: Summary, found: Comparison) -> tuple[Block, ...]:
    able = {name: one for name, one in summary.presets.items() if not one.needs}
    lacking = [f"{name} needs {', '.join(one.needs)}" for name, one in summary.presets.items() if one.needs]
    missing = (Text(f"Not computed: {'; '.join(lacking[:3])}.", "warn"),) if lacking else ()
    if not able:
        return (Text("None of these presets can be computed from this dump.", "warn"), *missing)
    table = _by_preset(able, found) if len(able) > ACROSS else _by_number(able, found, not is_bug(summary))
    drops = [
        f"{one.dropped_by} drops {count(one.tokens.count)} tokens ({_value(one.tokens.share)}) "
        f"that {one.kept_by} keeps."
        for one in found.drops
        if one.tokens.count and len(able) <= ACROSS
    ]
    more = "-v: every number, the differences with their intervals, and what each drops."
    return (
        Text(about(summary)),
        _verdict(summary, able, found),
        *missing,
        table,
        *(Text(line) for line in drops[:3]),
        Text(more),
    )


def _verdict(summary: Summary, able: Mapping[str, PresetResult], found: Comparison) -> Verdict:
    if is_bug(summary):
        headline = summary.diagnosis.headline if summary.diagnosis else ""
        return Verdict("BUG", f"{headline} Nothing is ranked before the fix.", "bad")
    best, key = found.better.get("ess_tokens", ""), "ess_tokens"
    if best in able:
        rest = sorted(
            (one.metrics.get(key, Number()).value or 0.0, name) for name, one in able.items() if name != best
        )
        next_best = f", ahead of {rest[-1][1]} with {_value(able[rest[-1][1]].metrics[key])}" if rest else ""
        return Verdict(
            f"{best} keeps the largest ESS of tokens", f"{say(able[best].metrics[key])}{next_best}.", "info"
        )
    if len(able) == 1:
        return Verdict(next(iter(able)), next(iter(able.values())).method, "info")
    return Verdict(
        "A toss-up", "the intervals of the best ESS of tokens overlap; the simpler rule wins.", "info"
    )


def _by_number(able: Mapping[str, PresetResult], found: Comparison, ranked: bool) -> Table:
    """Return a row for each number, with unit and direction, and a column for each preset."""
    rows: list[tuple[Cell, ...]] = []
    for name in DECISIVE:
        numbers = [one.metrics.get(name, Number()) for one in able.values()]
        known = [number for number in numbers if number.value is not None or number.log10 is not None]
        if known:
            best = (found.better.get(name, "–"),) if ranked else ()
            rows.append((name, _unit(known[0]), direction(PRESET[name]), *map(_value, numbers), *best))
    header = ("number", "unit", "better", *able, *(("ahead",) if ranked else ()))
    notes = tuple(f"{name}: {one.method}" for name, one in able.items())
    return Table("decisive", "", header, tuple(rows[:DOZEN]), notes)


def _by_preset(able: Mapping[str, PresetResult], found: Comparison) -> Table:
    """Return a row for each preset, those with the largest ESS of tokens first; equal rows are one."""
    names = [name for name in COLUMNS if any(name in one.metrics for one in able.values())]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, one in sorted(
        able.items(), key=lambda pair: -(pair[1].metrics.get(COLUMNS[0], Number()).value or 0.0)
    ):
        rows.setdefault(tuple(_value(one.metrics.get(key, Number())) for key in names), []).append(name)
    lines = [
        (same[0] + (f" and {len(same) - 1} equal" if len(same) > 1 else ""), *cells)
        for cells, same in rows.items()
    ]
    notes = (f"better: {', '.join(f'{name} {direction(PRESET[name])}' for name in names)}",)
    left = (f"{count(len(lines) - FEW_ROWS)} more rows: -v.",) if len(lines) > FEW_ROWS else ()
    return Table("decisive", "", ("preset", *names), tuple(lines[:FEW_ROWS]), (*notes, *left))


# ---------------------------------------------------------------- two runs


def _runs(summary: Summary) -> tuple[Block, ...]:
    found, whole = summary.against, runs(summary)
    assert found is not None  # the caller looked
    assert whole is not None
    head, *rest = whole.blocks
    cautions = [block for block in rest if isinstance(block, Text)]
    bugs = [
        Verdict(f"BUG in {run}", f"{one.headline} Mend it before you compare.", "bad")
        for run, one in (("A", summary.diagnosis), ("B", found.b.diagnosis))
        if one is not None and one.verdict == "bug"
    ]
    differ = [one for one in found.contrasts if one.differs]
    rows = differ if differ else [one for one in found.contrasts if one.a.value is not None]
    caption = "" if differ else "Nothing differs; the main numbers:"
    more = f"{count(len(found.contrasts) - min(len(rows), DOZEN))} more numbers, intervals and p-values: -v."
    header = ("number", "better", "A → B", "B against A")
    table = Table("decisive", caption, header, tuple(map(_contrast, rows[:DOZEN])), (more,))
    return (*bugs, head, *cautions[:3], table) if rows else (*bugs, head, *cautions[:3])


def _contrast(one: Contrast) -> tuple[Cell, ...]:
    prefix, _, name = one.name.rpartition(".")
    better = direction(worse(f"{prefix}." if prefix else "", name))
    nats = " (nats)" if one.a.unit == "nats" else ""
    return (f"{one.name}{nats}", better, f"{_value(one.a)} → {_value(one.b)}", one.effect or "not told apart")


# ---------------------------------------------------------------- thresholds


def _sweep(summary: Summary) -> tuple[Block, ...]:
    whole = sweep(summary)
    assert whole is not None  # the caller looked
    tables = [block for block in whole.blocks if isinstance(block, Table)]
    spoken = [block for block in whole.blocks if isinstance(block, Text | Verdict)]
    config = [block for block in whole.blocks if isinstance(block, Code)]
    main = replace(tables[0], rows=_thinned(tables[0].rows), notes=tables[0].notes[:1])
    more = "-v: by length of response, intervals, the numerical noise, and every threshold."
    return (Text(about(summary)), *spoken[:5], main, *config, Text(more))


def _thinned(rows: tuple[tuple[Cell, ...], ...], most: int = 18) -> tuple[tuple[Cell, ...], ...]:
    """Return at most so many rows, evenly, with the first, the last and the preset's own threshold."""
    step = -(-len(rows) // most)
    return tuple(
        row
        for at, row in enumerate(rows)
        if at % step == 0 or at == len(rows) - 1 or str(row[0]).endswith("←")
    )
