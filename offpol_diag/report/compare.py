"""The answers of `compare`: presets side by side on one dump, and further runs against run A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, zip_longest
from pathlib import PurePath

from offpol_diag.metrics import FIRST_PRESET, PAIRS, Tone, title, worse
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import FRACTIONS, count, counted, minus, say, written
from offpol_diag.report.analyze import cautions, dropped_by_length, of_dump
from offpol_diag.report.answer import Answer, Fact, listed
from offpol_diag.report.plot import COLOURS, Chart, Points, chart, k3_panel, steps_axis
from offpol_diag.report.words import columns
from offpol_diag.result import Against, Comparison, Contrast, DumpFacts, Result, at_steps, idle
from offpol_diag.table import Cell, Table

DECISIVE = ("ess_tokens", "tokens_weighted", "sequences_dropped", "truncated_high")
"""Numbers of presets in the short table."""
SAID, ACROSS, ROWS = 3, 8, 24
"""Presets that the sentence names; most whose differences and methods are shown; rows of the short table."""
FEW_ROWS, FEW = 8, 0.2
"""Rows of the short table of runs; shares up to this are compared by their ratio, larger ones by points."""
PAIRED = (
    "What two presets share cancels within a replicate: a difference may be certain where their intervals "
    "overlap. Differences of shares are in percentage points."
)
DROPPED = (
    "A token is dropped where nothing of its update is left: rejected, vetoed, or of weight 0; a sequence, "
    "where all its tokens are. Lengths and rewards are those of sequences that are dropped whole."
)


# ---------------------------------------------------------------- presets side by side


def of_presets(summary: Result, found: Comparison) -> Answer:
    """Return the answer on presets: what each keeps, how it differs from the first, and what each drops."""
    able = {name: summary.preset(name) for name, one in summary.presets.items() if not one.needs}
    lacking = [f"{name} needs {listed(one.needs)}" for name, one in summary.presets.items() if one.needs]
    idlers = [name for name in able if idle(able[name])]
    ess = {name: one.get("ess_tokens", Number()) for name, one in able.items() if name not in idlers}
    acting = sorted(ess, key=lambda name: -(ess[name].value or 0.0))
    sentence = f"ESS of tokens: {', '.join(f'{name} {say(ess[name])}' for name in acting[:SAID])}"
    sentence = sentence if acting else "None of these presets changes anything on this dump"
    more = f"{listed(idlers)} {'change' if idlers[1:] else 'changes'} nothing here." if idlers else ""
    bug = summary.diagnosis.headline if summary.diagnosis else ""
    return of_dump(summary, *((f"Not computed: {'; '.join(lacking)}.",) if lacking else ()))(
        "Bug" if summary.is_bug else "",
        bug.rstrip(".") if summary.is_bug else sentence,
        "bad" if summary.is_bug else "info",
        more="Fix it before a correction is chosen." if summary.is_bug else more,
        facts=(Fact("Bug?", bug),) if bug and not summary.is_bug else (),
        tables=tuple(one for one in _of_presets(summary, able, [*acting, *idlers], found) if one.rows),
    )


def _of_presets(
    summary: Result, able: Mapping[str, Numbers], order: Sequence[str], found: Comparison
) -> Iterator[Table]:
    """Yield a row for each preset and one for its difference, all numbers, and what each preset drops."""
    known = dict.fromkeys(name for one in able.values() for name in one)
    keys = sorted(known, key=lambda name: name not in FIRST_PRESET)
    less = {name: one for name, one in found.differences.items() if len(able) <= ACROSS}
    rows: list[tuple[Cell, ...]] = []
    for name in sorted(order, key=lambda name: name != found.against):
        rows.append((name, *(able[name].get(key) for key in DECISIVE)))
        if name in less:
            rows.append((f"− {found.against}", *(less[name].get(key) for key in DECISIVE)))
    notes = (PAIRED, *(f"{name}: {summary.presets[name].method}" for name in able)) if less else ()
    notes += (f"{count(len(rows) - ROWS)} more presets: --json.",) if len(rows) > ROWS else ()
    yield Table("presets", "", ("preset", *map(title, DECISIVE)), rows[:ROWS], notes)
    sides = {**able, **{f"{name} − {found.against}": one for name, one in less.items()}}
    lines = [(key, *(one.get(key) for one in sides.values()), worse(key).better) for key in keys]
    yield Table("comparison", "Every number", ("number", *sides, "better"), lines, shown="page")

    ways = [(x.dropped_by, x.kept_by, x.tokens, x.sequences) for x in found.drops if x.tokens.count]
    if found.all_tokens and found.all_sequences:
        ways.append(("(all)", "", found.all_tokens, found.all_sequences))
    rows = []
    for by, kept, tokens, whole in ways:
        means = (whole.numbers.get(name, Number()) for name in ("length", "reward"))
        some = (one if one.known else None for one in means)  # no reward in the dump, or no whole sequence
        rows.append((by, kept, tokens.count, tokens.numbers["share"], whole.count, *some))
    header = ("dropped by", "kept by", "tokens", "share", "whole sequences", "mean length", "mean reward")
    table = Table("drops", "What one drops and the other keeps", header, rows, (DROPPED,))
    yield table.without(table.empty)
    examples: list[tuple[Cell, ...]] = [
        (one.dropped_by, one.kept_by, *(Number(value=x) if isinstance(x, float) else x for x in row))
        for one in found.drops
        for row in one.examples
    ]
    heads = ("dropped by", "kept by", "sequence", "step", "length", "tokens lost", "ΣΔ, nats", "reward")
    caption = "Sequences that lose tokens to one preset only, the largest |ΣΔ| first"
    table = Table("dropped", caption, heads, examples, shown="more" if len(less) == 1 else "page")
    yield table.without(table.empty)
    yield dropped_by_length(summary, able)


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
    differs = {run: (one.difference.value or 0.0) > 0 for run, one in k3.items() if one.differs}
    sides = {side: [run for run in differs if differs[run] == up] for side, up in SIDES}
    word = "; ".join(f"{side} in {listed(those)}" for side, those in sides.items() if those)
    tone: Tone = "bad" if any(differs.values()) else "good" if differs else "info"
    sentence, more = "K3 KL is not known in both", " ".join(f"{_tested(one)} {one.pairing}" for one in found)
    if k3:
        numbers = [next(iter(k3.values())).a, *(one.b for one in k3.values())]
        each = zip(["A", *k3], numbers, strict=True)
        sentence = f"K3 KL is {listed([f'{say(number)} in {run}' for run, number in each])}"
    diagnosed = {run: one.diagnosis.headline for run, one in runs.items() if one.diagnosis}
    if wrong := [run for run, one in runs.items() if one.is_bug]:
        word, tone, more = f"Bug in {listed(wrong)}", "bad", f"Mend it before the runs are compared. {more}"
        sentence = diagnosed[wrong[0]].rstrip(".")
    names = named(*(one.dump for one in runs.values()))
    missing = dict.fromkeys(name for one in found for name in one.missing)
    return Answer(
        "; ".join(f"{run} is {name}" for run, name in zip(runs, names, strict=True)),
        word,
        sentence,
        tone,
        more=more,
        facts=tuple(Fact(f"{run}, bug?", said) for run, said in diagnosed.items()),
        cautions=(
            *(f"{run}: {said}" for run, one in runs.items() for said in cautions(one.dump)),
            *((f"Not in all runs, and not compared there: {'; '.join(missing)}.",) if missing else ()),
        ),
        tables=tuple(_of_runs(runs, rows, names)),
        charts=tuple(_by_step(runs)),
        remarks=tuple(f"{run}. Columns: {columns(one.dump)}." for run, one in runs.items()),
    )


SIDES = (("Worse", True), ("Better", False))
"""What a run is called whose K3 is surely larger than A's, and one whose K3 is smaller."""


def _tested(one: Against) -> str:
    """Return how many numbers of a run differ from A's."""
    tested = [row.differs for row in one.contrasts if row.differs is not None]
    if not tested:
        return "Cannot say: too few groups (prompts) for intervals."
    said = f"{sum(tested)} of {len(tested)} metrics differ after correction."
    return said if any(tested) else f"No difference is established: {said}"


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


def _of_runs(
    runs: Mapping[str, Result], rows: Mapping[str, Mapping[str, Contrast]], names: Sequence[str]
) -> Iterator[Table]:
    """Yield the numbers that differ first, all numbers, and the runs."""
    letters = [*runs][1:]
    ranks = {name: min(one.differs is not True for one in row.values()) for name, row in rows.items()}
    short, every = list[tuple[Cell, ...]](), list[tuple[Cell, ...]]()
    for name in sorted(rows, key=lambda name: ranks[name]):
        row = [rows[name].get(letter) for letter in letters]
        effects = [one and f"{effect(one)}{'' if one.differs else ' (not told apart)'}" for one in row]
        values = [next(one.a for one in row if one), *(one and one.b for one in row)]
        short.append((name, *effects, *values))
        tests = [one and (one.reason if one.p_adjusted is None else f"{one.p_adjusted:.2g}") for one in row]
        every.append((*short[-1], *tests, worse(name).better))
    tested = sum(one.differs is not None for row in rows.values() for one in row.values())
    notes = (
        f"Corrected for {count(tested)} tests (Holm); intervals are 95% each and not corrected. "
        "x: times A's value; else the difference, of shares in percentage points.",
        f"{count(max(len(short) - FEW_ROWS, 0))} more numbers: the report and --json.",
    )
    differ = sum(not one for one in ranks.values())
    caption = f"{counted(differ, 'number')} differ{'s' * (differ == 1)}" if differ else "Nothing differs"
    header = ("number", *(f"{one} against A" for one in letters), *runs)
    yield Table("decisive", caption, header, short[:FEW_ROWS], notes)
    header = (*header, *(f"p of {one}, corrected" for one in letters), "better")
    yield Table("numbers", "Every number", header, every, shown="page")
    dumps = [one.dump for one in runs.values()]
    facts: list[tuple[Cell, ...]] = [("file", *names)]
    facts += [(what, *(getattr(one, what) for one in dumps)) for what in ("tokens", "sequences", "groups")]
    facts += [("mean length", *(Number(value=one.mean_length) for one in dumps))]
    yield Table("runs", "The runs", ("what", *runs), facts, shown="more")


def effect(one: Contrast) -> str:
    """Return the size of a difference as text: B over A, `2.3x [1.9, 2.8]`, or B less A, `0.3 [0.1, 0.5]`."""
    a, b, ratio = one.a.value, one.b.value, one.ratio
    if a is None or b is None:
        return ""
    if one.difference.value == 0:
        return "equal"
    if ratio is None or ratio.value is None or (one.b.unit in FRACTIONS and max(a, b) > FEW):
        return minus(" ".join(filter(None, written(replace(one.difference, note=None)))))
    value, interval = written(replace(ratio, note=None))
    return " ".join(filter(None, (f"{value}x", interval)))


def _by_step(runs: Mapping[str, Result]) -> Iterator[Chart]:
    """Yield K3 of all runs by step; the title says at how many steps it is apart from A's."""
    points: dict[str, dict[int, Number]] = {}
    for run, one in runs.items():
        places = {int(at.key): at.numbers for at in at_steps(one) if at.key.lstrip("-").isdecimal()}
        k3 = {at: x.get(f"{one.prefix}k3", x.get("k3", Number())) for at, x in sorted(places.items())}
        points[run] = {at: number for at, number in k3.items() if number.value is not None}
    if not all(len(some) > 1 for some in points.values()):
        return
    lines: list[Points] = [
        ([*some], [*some.values()], run, colour)
        for (run, some), colour in zip(points.items(), cycle(COLOURS))
    ]
    a, said = points.pop("A"), []
    for run, b in points.items():
        known = [(x, y) for at in a if at in b and (x := a[at].interval) and (y := b[at].interval)]
        below, above = sum(y[1] < x[0] for x, y in known), sum(x[1] < y[0] for x, y in known)
        said.append(f"K3 of {run} lies above A's at {above} of {len(known)} steps and below at {below}")
    axis = steps_axis([step for line in lines for step in line[0]])
    yield chart("runs_by_step", "; ".join(said), k3_panel("training step", lines, x=axis))
