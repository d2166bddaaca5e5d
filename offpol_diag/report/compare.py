"""The answers of `compare`: presets side by side on one dump, and further runs against run A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, zip_longest
from pathlib import PurePath

from offpol_diag.metrics import PAIRS, Tone, title
from offpol_diag.number import Number
from offpol_diag.numerals import count, format_number
from offpol_diag.report.analyze import cautions, dropped_by_length, of_dump
from offpol_diag.report.answer import Answer, Fact, listed
from offpol_diag.report.plot import COLOURS, Chart, chart, k3_panel, steps_axis
from offpol_diag.report.words import columns
from offpol_diag.result import Comparison, Contrast, DumpFacts, Result, at_steps
from offpol_diag.table import Cell, Table

DECISIVE = ("ess_tokens", "tokens_weighted", "sequences_dropped", "truncated_high")
"""Numbers of presets in the short table."""
SAID, ACROSS, ROWS, FEW_ROWS = 3, 8, 24, 8
"""Presets that the sentence names, whose differences are shown, and rows of both; rows of runs, at most."""
PAIRED = (
    "What two presets share cancels within a replicate: a difference may be certain where their intervals "
    "overlap. Differences of shares are in percentage points."
)
DROPPED = (
    "A token is dropped where nothing of its update is left: rejected, vetoed, or of weight 0; a sequence, "
    "where all its tokens are. Lengths and rewards are those of sequences that are dropped whole."
)
TESTS = "intervals are 95% each, not corrected. ×: times A's value; else the difference, of shares in points."


# ---------------------------------------------------------------- presets side by side


def of_presets(summary: Result, found: Comparison) -> Answer:
    """Return the answer on presets: what each keeps, how it differs from the first, and what each drops."""
    able = {name: summary.preset(name) for name, one in summary.presets.items() if not one.needs}
    lacking = [f"{name} needs {listed(one.needs)}" for name, one in summary.presets.items() if one.needs]
    less = found.differences if len(able) <= ACROSS else {}
    rows: list[tuple[Cell, ...]] = []
    for name, numbers in able.items():
        rows.append((name, *(numbers.get(key) for key in DECISIVE)))
        if name in less:
            rows.append((f"− {found.against}", *(less[name].get(key) for key in DECISIVE)))
    notes = (PAIRED, *(f"{name}: {summary.presets[name].method}" for name in able)) if less else ()
    notes += (f"{count(len(rows) - ROWS)} more presets: --json.",) if len(rows) > ROWS else ()
    tables = (
        Table("presets", "", ("preset", *map(title, DECISIVE)), rows[:ROWS], notes),
        *_drops(found),
        dropped_by_length(summary, able),
    )
    ess = [f"{name} {format_number(able[name].get('ess_tokens', Number()))}" for name in [*able][:SAID]]
    bug = summary.diagnosis.headline if summary.diagnosis else ""
    return of_dump(summary, *((f"Not computed: {'; '.join(lacking)}.",) if lacking else ()))(
        "Bug" if summary.is_bug else "",
        bug.rstrip(".") if summary.is_bug else f"ESS of tokens: {', '.join(ess)}",
        "bad" if summary.is_bug else "info",
        more="Fix it before a correction is chosen." if summary.is_bug else "",
        facts=(Fact("Bug?", bug),) if bug and not summary.is_bug else (),
        tables=tuple(one for one in tables if one.rows),
    )


def _drops(found: Comparison) -> Iterator[Table]:
    """Yield how much each preset drops that the other keeps, and examples."""
    ways = [(x.dropped_by, x.kept_by, x.tokens, x.sequences) for x in found.drops if x.tokens.count]
    if found.all_tokens and found.all_sequences:
        ways.append(("(all)", "", found.all_tokens, found.all_sequences))
    rows: list[tuple[Cell, ...]] = []
    for by, kept, tokens, whole in ways:
        means = (whole.numbers.get(name, Number()) for name in ("length", "reward"))
        some = (one if one.known else None for one in means)  # no reward in the dump, or no whole sequence
        rows.append((by, kept, tokens.count, tokens.numbers["share"], whole.count, *some))
    heads = ("dropped by", "kept by", "tokens", "share", "whole sequences", "mean length", "mean reward")
    table = Table("drops", "What one drops and the other keeps", heads, rows, (DROPPED,))
    yield table.without_empty()
    rows = [
        (one.dropped_by, one.kept_by, *(Number(value=x) if isinstance(x, float) else x for x in row))
        for one in found.drops
        for row in one.examples
    ]
    header = ("dropped by", "kept by", "sequence", "step", "length", "tokens lost", "ΣΔ, nats", "reward")
    caption = "Sequences that lose tokens to one preset only, the largest |ΣΔ| first"
    table = Table("dropped", caption, header, rows, shown="more" if len(found.differences) == 1 else "page")
    yield table.without_empty()


# ---------------------------------------------------------------- runs against the first


def of_runs(summary: Result) -> Answer:
    """Return the answer on runs: whether they differ from the first, in which numbers and by how much."""
    found = summary.against
    runs = {"A": summary, **{one.letter: one.run for one in found}}
    rows: dict[str, dict[str, Contrast]] = {}
    for run in found:
        for one in run.contrasts:
            rows.setdefault(one.name, {})[run.letter] = one
    k3 = next((rows[f"{prefix}k3"] for prefix in PAIRS if f"{prefix}k3" in rows), {})
    larger = {run: (one.difference.value or 0.0) > 0 for run, one in k3.items() if one.differs}
    word = ", ".join(f"{'Worse' if up else 'Better'} in {run}" for run, up in larger.items())
    tone: Tone = "bad" if any(larger.values()) else "good" if larger else "info"
    numbers = [*(one.a for one in [*k3.values()][:1]), *(one.b for one in k3.values())]
    each = [f"{format_number(number)} in {run}" for number, run in zip(numbers, ["A", *k3], strict=False)]
    sentence, more = f"K3 KL is {listed(each) if each else 'not known in both'}", ""
    for run in found:
        tested = [row.differs for row in run.contrasts if row.differs is not None]
        said = f"{sum(tested)} of {len(tested)} metrics differ after correction."
        said = said if any(tested) else f"No difference is established: {said}"
        said = said if tested else "Cannot say: too few groups (prompts) for intervals."
        more += f"{said} {run.pairing} "
    diagnosed = {run: one.diagnosis.headline for run, one in runs.items() if one.diagnosis}
    if wrong := [run for run, one in runs.items() if one.is_bug]:
        word, tone, more = f"Bug in {listed(wrong)}", "bad", f"Mend it before the runs are compared. {more}"
        sentence = diagnosed[wrong[0]].rstrip(".")
    missing = dict.fromkeys(name for one in found for name in one.missing)
    names = zip(runs, named(*(one.dump for one in runs.values())), strict=True)
    return Answer(
        "; ".join(f"{run} is {name}" for run, name in names),
        word,
        sentence,
        tone,
        more=more.strip(),
        facts=tuple(Fact(f"{run}, bug?", said) for run, said in diagnosed.items()),
        cautions=(
            *(f"{run}: {said}" for run, one in runs.items() for said in cautions(one.dump)),
            *((f"Not in all runs, and not compared there: {'; '.join(missing)}.",) if missing else ()),
        ),
        tables=tuple(_numbers(rows, [*runs])),
        charts=tuple(_by_step(runs)),
        remarks=tuple(f"{run}. {read}" for run, one in runs.items() if (read := columns(one.dump))),
    )


def named(*dumps: DumpFacts) -> tuple[str, ...]:
    """Return a name for each run: its first file, by as much of its path as tells the runs apart."""
    paths = [PurePath(one.files[0] if one.files else "a dump") for one in dumps]
    names = [path.name for path in paths]
    if len({*names}) < len({*paths}):
        steps = zip_longest(*(path.parts for path in paths))
        shared = next(at for at, parts in enumerate(steps) if len({*parts}) > 1)
        names = [str(PurePath(*path.parts[shared:])) for path in paths]
    more = [f" and {count(len(one.files) - 1)} more" if len(one.files) > 1 else "" for one in dumps]
    return tuple(map(str.__add__, names, more))


def _numbers(rows: Mapping[str, Mapping[str, Contrast]], runs: Sequence[str]) -> Iterator[Table]:
    """Yield the numbers that differ first, and all numbers; a column for each run."""
    letters, every = runs[1:], list[tuple[Cell, ...]]()
    differ = [name for name, row in rows.items() if any(one.differs for one in row.values())]
    for name in [*differ, *(name for name in rows if name not in differ)]:
        row = [rows[name].get(letter) for letter in letters]
        against = [
            "not told apart"
            if not one or not one.differs
            else one.difference
            if one.ratio is None
            else f"×{format_number(one.ratio)}"
            for one in row
        ]
        values = [next(one.a for one in row if one), *(one and one.b for one in row)]
        tests = [one and (one.reason if one.p_adjusted is None else f"{one.p_adjusted:.2g}") for one in row]
        every.append((name, *against, *values, *tests))
    tested = sum(one.differs is not None for row in rows.values() for one in row.values())
    left = f"{count(max(len(every) - FEW_ROWS, 0))} more numbers: the report and --json."
    notes = (f"Corrected for {count(tested)} tests (Holm); {TESTS}", left)
    header = ("number", *(f"{one} against A" for one in letters), *runs, *(f"p of {one}" for one in letters))
    short, caption = len(letters) + len(runs) + 1, f"Numbers that differ: {len(differ)}"
    yield Table("decisive", caption, header[:short], [row[:short] for row in every[:FEW_ROWS]], notes)
    yield Table("numbers", "Every number", header, every, shown="page")


def _by_step(runs: Mapping[str, Result]) -> Iterator[Chart]:
    """Yield K3 of all runs by step; the title says at how many steps it is apart from A's."""
    points: dict[str, dict[int, Number]] = {}
    for run, one in runs.items():
        places = {int(at.key): at.numbers for at in at_steps(one) if at.key.lstrip("-").isdecimal()}
        k3 = {at: x.get(f"{one.prefix}k3", x.get("k3", Number())) for at, x in sorted(places.items())}
        points[run] = {at: number for at, number in k3.items() if number.value is not None}
    if not all(len(some) > 1 for some in points.values()):
        return
    colours = zip(points.items(), cycle(COLOURS), strict=False)
    lines = [([*some], [*some.values()], run, colour) for (run, some), colour in colours]
    a, said = points.pop("A"), []
    for run, b in points.items():
        known = [(x, y) for at in a if at in b and (x := a[at].interval) and (y := b[at].interval)]
        below, above = sum(y[1] < x[0] for x, y in known), sum(x[1] < y[0] for x, y in known)
        said.append(f"K3 of {run} lies above A's at {above} of {len(known)} steps and below at {below}")
    axis = steps_axis([step for line in lines for step in line[0]])
    yield chart("runs_by_step", "; ".join(said), k3_panel("training step", lines, x=axis))
