"""The answers of `compare`: presets side by side on one dump, and further runs against run A."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, zip_longest
from pathlib import PurePath

from offpol_diag.metrics import FIRST_PRESET, PAIRS, Tone, title, worse
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import count, counted, say, value_or_dash, written
from offpol_diag.report.analyze import cautions, dropped_by_length, of_dump
from offpol_diag.report.answer import Answer, Fact, listed
from offpol_diag.report.plot import (
    COLOURS,
    LABELS,
    ORANGE,
    SHARE,
    TEAL,
    Chart,
    Panel,
    Points,
    chart,
    curve,
    k3_panel,
    steps_axis,
)
from offpol_diag.report.words import columns_of_runs
from offpol_diag.result import Against, Comparison, Contrast, DumpFacts, Result, at_steps, idle
from offpol_diag.table import Cell, Table

DECISIVE = ("ess_tokens", "tokens_weighted", "sequences_dropped", "truncated_high")
"""Numbers of presets that decide between them, the most important first."""
ACROSS, ROWS = 8, 24
"""Presets whose differences and whose numbers stand side by side; most rows of a table of presets."""
FEW_ROWS = 8
"""Rows of the short table of runs."""
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
    """Return the answer on presets: which keeps most, the numbers that decide, and what each drops."""
    facts = summary.presets
    able = {name: summary.preset(name) for name, one in facts.items() if not one.needs}
    lacking = [f"{name} needs {listed(one.needs)}" for name, one in facts.items() if one.needs]
    answered = of_dump(summary, *((f"Not computed: {'; '.join(lacking)}.",) if lacking else ()))
    if not able:
        return answered("", "None of these presets can be computed from this dump", "warn")
    ess = {name: one.get("ess_tokens", Number()) for name, one in able.items()}
    idlers = [name for name in able if idle(able[name])]
    acting = sorted((one for one in able if one not in idlers), key=lambda one: -(ess[one].value or 0.0))
    tone: Tone = "info"
    word, interval, best = "", "", found.better.get("ess_tokens", "")
    if summary.is_bug and summary.diagnosis:
        word, sentence, tone = "Bug", summary.diagnosis.headline.rstrip("."), "bad"
    elif best in able:
        (value, interval), tone = written(ess[best]), "good"
        sentence = f"{best} keeps the largest ESS of tokens: {value}"
    elif not acting:
        sentence = "None of these presets changes anything on this dump"
    elif len(acting) == 1:
        value, interval = written(ess[acting[0]])
        sentence = f"{acting[0]} keeps an ESS of tokens of {value}"
    else:
        one, other = acting[:2]
        sentence = (
            f"{one} ({say(ess[one])}) and {other} ({say(ess[other])}) cannot be told apart by ESS of tokens"
        )
    unmoved = (
        f"{listed(idlers)} {'changes' if idlers[1:] == [] else 'change'} nothing here." if idlers else ""
    )
    more = "Nothing is ranked before the fix." if word else unmoved
    headline = summary.diagnosis.headline if summary.diagnosis and not word else ""
    return answered(
        word,
        sentence,
        tone,
        interval,
        more,
        facts=(Fact("Bug?", headline),) if headline else (),
        tables=tuple(one for one in _tables(summary, able, [*acting, *idlers], found) if one.rows),
        charts=tuple(_chart(able, [*acting, *idlers][:ROWS])),
    )


def _tables(
    summary: Result, able: Mapping[str, Numbers], order: Sequence[str], found: Comparison
) -> Iterator[Table]:
    """Yield a row for each preset and one for its difference, all numbers, and what each preset drops."""
    known = [name for name in FIRST_PRESET if any(name in one for one in able.values())]
    known += dict.fromkeys(name for one in able.values() for name in one if name not in known)
    short = [name for name in DECISIVE if name in known]
    few = len(able) <= ACROSS
    rows: list[tuple[Cell, ...]] = []
    for name in [found.against, *(one for one in order if one != found.against)]:
        rows.append((name, *(able[name].get(key) for key in short)))
        if few and name in found.differences:
            rows.append((f"− {found.against}", *(found.differences[name].get(key) for key in short)))
    methods = tuple(f"{name}: {summary.presets[name].method}" for name in able) if few else ()
    left = (f"{count(len(rows) - ROWS)} more presets: --json.",) if len(rows) > ROWS else ()
    header = ("preset", *(f"{title(key)}" for key in short))
    yield Table("presets", "", header, rows[:ROWS], (*((PAIRED,) if few else ()), *methods, *left))
    others = [*found.differences] if few else []
    lines = [
        (
            key,
            *(one.get(key) for one in able.values()),
            *(found.differences[name].get(key) for name in others),
            worse(key).better,
            "–" if summary.is_bug else found.better.get(key, "–"),
        )
        for key in known
    ]
    heads = ("number", *able, *(f"{name} − {found.against}" for name in others), "better", "ahead")
    yield Table("comparison", "Every number", heads, lines, shown="page")
    if found.drops:
        yield from _drops(found)
    yield dropped_by_length(summary, able)


def _drops(found: Comparison) -> Iterator[Table]:
    """Yield how much each preset drops that another keeps, and examples."""
    ways = [
        (one.dropped_by, one.kept_by, one.tokens, one.sequences) for one in found.drops if one.tokens.count
    ]
    if found.all_tokens and found.all_sequences:
        ways.append(("(all)", "", found.all_tokens, found.all_sequences))
    rows: list[tuple[Cell, ...]] = []
    for by, kept, tokens, whole in ways:
        means = [whole.numbers.get(name, Number()) for name in ("length", "reward")]
        known = [one if one.known else None for one in means]  # no reward in the dump, or no whole sequence
        rows.append((by, kept, tokens.count, tokens.numbers["share"], whole.count, *known))
    header = ("dropped by", "kept by", "tokens", "share", "whole sequences", "mean length", "mean reward")
    table = Table("drops", "What one drops and the other keeps", header, rows, (DROPPED,))
    yield table.without(table.empty)
    rows = [
        (
            one.dropped_by,
            one.kept_by,
            *(Number(value=cell) if isinstance(cell, float) else cell for cell in row),
        )
        for one in found.drops
        for row in one.examples
    ]
    heads = ("dropped by", "kept by", "sequence", "step", "length", "tokens lost", "ΣΔ, nats", "reward")
    caption = "Sequences that lose tokens to one preset only, the largest |ΣΔ| first"
    table = Table("dropped", caption, heads, rows, shown="more" if len(found.differences) == 1 else "page")
    yield table.without(table.empty)


def _chart(able: Mapping[str, Numbers], names: list[str]) -> Iterator[Chart]:
    if len(names) > 1:
        ess, kept = ([able[name].get(key, Number()) for name in names] for key in DECISIVE[:2])
        traces = curve((names, ess, "ESS of tokens", TEAL), mode="markers")
        traces += curve((names, kept, "tokens with a weight", ORANGE), mode="markers")
        ends = " to ".join(f"{names[at]} {value_or_dash(ess[at])}" for at in (0, -1))
        yield chart("ess", f"ESS of tokens from {ends}", Panel("", "share", traces, LABELS, SHARE))


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
    tones = {run: _judged(one) for run, one in k3.items()}
    worst: Tone = "bad" if "bad" in tones.values() else "good" if "good" in tones.values() else "info"
    sides = [
        (side, [run for run in tones if tones[run] == tone])
        for side, tone in JUDGED
        if tone in tones.values()
    ]
    word = "; ".join(f"{side} in {listed(those)}" for side, those in sides)
    first = next(iter(k3.values()), None)
    values = [f"{say(one)} in {run}" for run, one in zip(runs, _values(k3), strict=True)] if first else []
    sentence = f"K3 KL is {listed(values)}" if first else found[0].headline.rstrip(".")
    more = " ".join(f"{one.headline} {one.pairing}" for one in found)
    if wrong := [run for run, one in runs.items() if one.is_bug]:
        word, worst, more = f"Bug in {listed(wrong)}", "bad", f"Mend it before the runs are compared. {more}"
        sentence = next(
            one.diagnosis.headline for one in runs.values() if one.is_bug and one.diagnosis
        ).rstrip(".")
    names = named(*(one.dump for one in runs.values()))
    lacking = {f"{what} ({why})": None for one in found for what, why in one.needs.items()}
    return Answer(
        "; ".join(f"{run} is {name}" for run, name in zip(runs, names, strict=True)),
        word,
        sentence,
        worst,
        "",
        more,
        facts=tuple(
            Fact(f"{run}, bug?", one.diagnosis.headline)
            for run, one in runs.items()
            if one.diagnosis is not None
        ),
        cautions=(
            *(f"{run}: {said}" for run, one in runs.items() for said in cautions(one.dump)),
            *(said for one in found for said in one.notes),
            *((f"Cannot be compared: {'; '.join(lacking)}.",) if lacking else ()),
        ),
        tables=tuple(_of_runs(runs, rows, found, names)),
        charts=tuple(_by_step(runs)),
        remarks=columns_of_runs({run: one.dump for run, one in runs.items()}),
    )


JUDGED: tuple[tuple[str, Tone], ...] = (("Worse", "bad"), ("Better", "good"))


def _judged(one: Contrast) -> Tone | None:
    """Return whether a run is better (good) or worse (bad) than A; None where that cannot be said."""
    way = worse(one.name)
    if not one.differs or one.a.value is None or one.b.value is None or way.sign == "either":
        return None
    a, b = (abs(v - way.target) if way.sign == "away" else v for v in (one.a.value, one.b.value))
    return "good" if (b > a) == (way.sign == "lower") else "bad"


def _values(row: Mapping[str, Contrast]) -> list[Number]:
    """Return a number of A, and of the other runs."""
    return [next(iter(row.values())).a, *(one.b for one in row.values())]


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
    runs: Mapping[str, Result],
    rows: Mapping[str, Mapping[str, Contrast]],
    found: Sequence[Against],
    names: Sequence[str],
) -> Iterator[Table]:
    """Yield the numbers that differ first, the runs and in what their provenance differs, and all numbers."""
    letters = [one.letter for one in found]
    ranks = {name: min(one.differs is not True for one in row.values()) for name, row in rows.items()}
    short, every = list[tuple[Cell, ...]](), list[tuple[Cell, ...]]()
    for name in sorted(rows, key=lambda name: ranks[name]):
        row = [rows[name].get(letter) for letter in letters]
        effects = [one and f"{one.effect}{'' if one.differs else ' (not told apart)'}" for one in row]
        values = [next(one.a for one in row if one), *(one and one.b for one in row)]
        short.append((name, *effects, *values))
        tests = [
            one and (f"{one.p_adjusted:.2g}" if one.p_adjusted is not None else one.reason) for one in row
        ]
        every.append((*short[-1], *tests, worse(name).better))
    header = ("number", *(f"{one} against A" for one in letters), "A", *letters)
    tested = count(sum(one.tested for one in found))
    notes = (
        f"Corrected for {tested} tests ({found[0].correction}); intervals are 95% each and not corrected. "
        "x: times A's value; else the difference, of shares in percentage points.",
        f"{count(max(len(short) - FEW_ROWS, 0))} more numbers: the report and --json.",
    )
    differ = sum(not one for one in ranks.values())
    caption = (
        f"{counted(differ, 'number')} {'differs' if differ == 1 else 'differ'}"
        if differ
        else "Nothing differs"
    )
    yield Table("decisive", caption, header, short[:FEW_ROWS], notes)
    header = (*header, *(f"p of {one}, corrected" for one in letters), "better")
    yield Table("numbers", "Every number", header, every, shown="page")
    some = [one.dump for one in runs.values()]
    facts: list[tuple[Cell, ...]] = [
        ("file", *names),
        ("tokens", *(one.tokens for one in some)),
        ("sequences", *(one.sequences for one in some)),
        ("groups (prompts)", *(one.groups for one in some)),
        ("mean length", *(Number(value=one.mean_length) for one in some)),
        *provenance(*(one.provenance for one in some)),
    ]
    yield Table("runs", "The runs", ("what", *runs), facts, shown="more")


def provenance(*dumps: Mapping[str, object]) -> list[tuple[Cell, ...]]:
    """Return the provenance fields in which the runs differ; nested ones as `outer.inner`."""

    def flat(found: Mapping[str, object], before: str = "") -> dict[str, str]:
        each = ((f"{before}{key}", value) for key, value in found.items())
        parts = (flat(x, f"{key}.") if isinstance(x, dict) else {key: str(x)} for key, x in each)
        return {key: x for part in parts for key, x in part.items()}

    each = [flat(one) for one in dumps]
    keys = dict.fromkeys(key for one in each for key in one)
    rows = [(key, *(one.get(key, "not said") for one in each)) for key in keys]
    return [row for row in rows if len({*row[1:]}) > 1]


def _by_step(runs: Mapping[str, Result]) -> Iterator[Chart]:
    """Yield K3 of all runs by step; the title says at how many steps it is apart from A's."""
    points = {run: _steps(one) for run, one in runs.items()}
    if not all(len(some) > 1 for some in points.values()):
        return
    lines: list[Points] = [
        ([*some], [*some.values()], run, colour)
        for (run, some), colour in zip(points.items(), cycle(COLOURS), strict=False)
    ]
    a, said = points["A"], []
    for run, b in [*points.items()][1:]:
        pairs = [(a[at].interval, b[at].interval) for at in a if at in b]
        known = [(x, y) for x, y in pairs if x and y]
        below, above = sum(y[1] < x[0] for x, y in known), sum(x[1] < y[0] for x, y in known)
        said.append(f"K3 of {run} lies above A's at {above} of {len(known)} steps and below at {below}")
    axis = steps_axis([step for some in points.values() for step in some])
    yield chart("runs_by_step", "; ".join(said), k3_panel("training step", lines, x=axis))


def _steps(run: Result) -> Mapping[int, Number]:
    """Return K3 of the main pair of policies by training step, rising."""
    places = {int(one.key): one.numbers for one in at_steps(run) if one.key.lstrip("-").isdecimal()}
    found = {step: one.get(f"{run.prefix}k3", one.get("k3")) for step, one in sorted(places.items())}
    return {step: one for step, one in found.items() if one and one.value is not None}
