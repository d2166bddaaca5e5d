"""The short form of comparisons and sweeps: what was found in a sentence, and the numbers that decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offpol_diag.blocks import Block, Cell, Code, Section, Table, Text, Verdict
from offpol_diag.directions import PRESET, Worse, worse
from offpol_diag.numerals import count, say, value_or_dash
from offpol_diag.report.sections import columns
from offpol_diag.report.sections.answer import about
from offpol_diag.report.sections.comparison import ACROSS
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.opening import IDLE, by_ess, change, opening, undecided, without_effect
from offpol_diag.report.sections.runs import bugs, runs
from offpol_diag.report.sections.sweep import sweep
from offpol_diag.summary import Comparison, Contrast, Number, PresetResult, Summary, Sweep

DECISIVE = (
    "ess_tokens",
    "ess_sequences",
    "tokens_weighted",
    "sequences_dropped",
    "truncated_high",
    "weight_mean",
    "weight_max",
    "k3",
    "update_removed_positive",
    "update_removed_negative",
    "loss_scale_kept",
    "update_kept",
)
"""Numbers of presets that decide between them, the most important first."""
COLUMNS = ("ess_tokens", "ess_sequences", "tokens_weighted", "truncated_high", "weight_max")
"""Those that stand in a table with a row per preset."""
DOZEN, FEW_ROWS = 12, 24
MOST_ROWS = 18
"""Rows of thresholds, evenly; beside them the first, the last and the preset's own."""


def short(summary: Summary) -> tuple[Section, ...]:
    """Return the short form of a comparison of runs or presets, or of a sweep; empty for other results."""
    blocks: tuple[Block, ...] = ()
    if summary.against is not None:
        blocks = _runs(summary)
    elif summary.comparison is not None:
        blocks = _presets(summary, summary.comparison)
    elif summary.sweep is not None:
        blocks = _sweep(summary, summary.sweep)
    return (Section("short", "", blocks),) if blocks else ()


def direction(sign: Worse) -> str:
    """Return in words which way a number is better."""
    words = {"higher": "lower", "lower": "higher", "either": "–"}
    return words.get(sign.sign, f"near {sign.target:g}")


# ---------------------------------------------------------------- presets side by side


def _presets(summary: Summary, found: Comparison) -> tuple[Block, ...]:
    able = {name: one for name, one in summary.presets.items() if not one.needs}
    lacking = [f"{name} needs {', '.join(one.needs)}" for name, one in summary.presets.items() if one.needs]
    missing = (Text(f"Not computed: {'; '.join(lacking[:3])}.", "warn"),) if lacking else ()
    if not able:
        return (Text("None of these presets can be computed from this dump.", "warn"), *missing)
    table = _by_preset(able, found) if len(able) > ACROSS else _by_number(able, found, not is_bug(summary))
    drops = [
        f"{one.dropped_by} drops {count(one.tokens.count)} tokens ({value_or_dash(one.tokens.share)}) "
        f"that {one.kept_by} keeps."
        for one in found.drops
        if one.tokens.count and len(able) <= ACROSS
    ]
    more = "-v: every number, the differences with their intervals, and what each drops."
    return (
        Text(about(summary)),
        Text(columns.sentence(summary.dump)),
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
    best = found.better.get("ess_tokens", "")
    ess = {name: one.metrics.get("ess_tokens", Number()) for name, one in able.items()}
    acting = {name: number for name, number in ess.items() if not able[name].idle}
    idle = without_effect(able)
    if best in able:
        rest = max(((one.value or 0.0, name) for name, one in acting.items() if name != best), default=None)
        ahead = f", ahead of {rest[1]} with {value_or_dash(ess[rest[1]])}" if rest else ""
        said = f"{say(ess[best])}{ahead}. {idle}"
        return Verdict(f"{best} keeps the largest ESS of tokens", said.strip(), "info")
    if len(able) == 1:
        return Verdict(next(iter(able)), next(iter(able.values())).method, "info")
    if not acting:
        return Verdict(f"{IDLE} on this dump", "Every token weighs 1.", "info")
    if len(acting) < 2:
        (one,) = acting
        return Verdict(f"{one} keeps an ESS of tokens of {value_or_dash(ess[one])}", idle, "info")
    head, why = undecided(acting, found)
    return Verdict(head, f"{why} {idle}".strip(), "info")


def _by_number(able: Mapping[str, PresetResult], found: Comparison, ranked: bool) -> Table:
    """Return a row for each number, with unit and direction, and a column for each preset."""
    rows: list[tuple[Cell, ...]] = []
    for name in DECISIVE:
        numbers = [one.metrics.get(name, Number()) for one in able.values()]
        known = [number for number in numbers if number.known]
        if known:
            best = (found.better.get(name, "–"),) if ranked else ()
            unit = {"fraction": "share", "": "–"}.get(known[0].unit, known[0].unit)
            rows.append((name, unit, direction(PRESET[name]), *map(value_or_dash, numbers), *best))
    header = ("number", "unit", "better", *able, *(("ahead",) if ranked else ()))
    notes = tuple(f"{name}: {one.method}" for name, one in able.items())
    return Table("decisive", "", header, tuple(rows[:DOZEN]), notes)


def _by_preset(able: Mapping[str, PresetResult], found: Comparison) -> Table:
    """Return a row for each preset, those with the largest ESS of tokens first; equal rows are one.

    Presets that change nothing on this dump come last, and are not left out.
    """
    names = [name for name in COLUMNS if any(name in one.metrics for one in able.values())]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in by_ess(able):
        cells = tuple(value_or_dash(able[name].metrics.get(key)) for key in names)
        rows.setdefault(cells, []).append(name)
    lines = [
        (same[0] + (f" and {len(same) - 1} equal" if len(same) > 1 else ""), *cells)
        for cells, same in rows.items()
    ]
    notes = (f"better: {', '.join(f'{name} {direction(PRESET[name])}' for name in names)}",)
    left = (f"{count(len(lines) - FEW_ROWS)} more rows: -v.",) if len(lines) > FEW_ROWS else ()
    shown = lines if not left else [*lines[: FEW_ROWS - 1], lines[-1]]
    return Table("decisive", "", ("preset", *names), tuple(shown), (*notes, *left))


# ---------------------------------------------------------------- two runs


def _runs(summary: Summary) -> tuple[Block, ...]:
    found, whole = summary.against, runs(summary)
    assert found is not None  # the caller looked
    assert whole is not None
    head, *rest = whole.blocks
    cautions = [block for block in rest if isinstance(block, Text) and block.tone == "warn"]
    wrong = [
        Verdict(f"BUG in {run}", f"{headline} Mend it before you compare.", "bad")
        for run, headline in bugs(summary, found)
    ]
    differ = [one for one in found.contrasts if one.differs]
    rows = differ or [one for one in found.contrasts if one.a.value is not None]
    caption = "" if differ else "Nothing differs; the main numbers:"
    more = f"{count(len(found.contrasts) - min(len(rows), DOZEN))} more numbers, intervals and p-values: -v."
    header = ("number", "better", "A → B", "B against A")
    table = Table("decisive", caption, header, tuple(map(_contrast, rows[:DOZEN])), (more,))
    said = columns.of_two(summary.dump, found.b.dump, columns.sentence)
    return (*wrong, head, *cautions[:3], *((table,) if rows else ()), *said)


def _contrast(one: Contrast) -> tuple[Cell, ...]:
    prefix, dot, name = one.name.rpartition(".")
    better = direction(worse(prefix + dot, name))
    nats = " (nats)" if one.a.unit == "nats" else ""
    both = f"{value_or_dash(one.a)} → {value_or_dash(one.b)}"
    return (f"{one.name}{nats}", better, both, one.effect or "not told apart")


# ---------------------------------------------------------------- thresholds


def _sweep(summary: Summary, swept: Sweep) -> tuple[Block, ...]:
    whole, found = sweep(summary), opening(summary)
    assert whole is not None  # the caller looked
    assert found is not None
    tables = [block for block in whole.blocks if isinstance(block, Table)]
    spoken = [block for block in whole.blocks if isinstance(block, Text | Verdict)]
    config = [block for block in whole.blocks if isinstance(block, Code)]
    rows = tables[0].rows
    step, last = -(-len(rows) // MOST_ROWS), len(rows) - 1
    evenly = [row for at, row in enumerate(rows) if at % step == 0 or at == last or str(row[0]).endswith("←")]
    main = replace(tables[0], rows=evenly, notes=tables[0].notes[:1])
    more = "-v: intervals, every threshold, and what the columns are."
    if not any(isinstance(block, Verdict) for block in spoken):
        spoken.insert(0, Verdict(f"{found.h1} {found.interval}".strip(), change(swept), found.tone))
    read = Text(columns.sentence(summary.dump))
    return (Text(about(summary)), read, *spoken[:5], main, *config, Text(more))
