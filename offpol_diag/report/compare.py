"""The answers of `compare`: presets side by side on one dump, and run A against run B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, pairwise, zip_longest
from pathlib import PurePath
from typing import Any

from offpol_diag.metrics import FIRST_GAP, FIRST_PRESET, PAIRS, Tone, title, worse
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import count, counted, say, value_or_dash, written
from offpol_diag.report import columns
from offpol_diag.report.analyze import cautions, dropped_by_length, of_dump
from offpol_diag.report.answer import Answer, Fact, Line, Tile, listed
from offpol_diag.report.diagnosis import candidates, cause_details
from offpol_diag.report.plot import (
    BLUE,
    COLOURS,
    LABELS,
    LOG,
    ORANGE,
    SHARE,
    TEAL,
    Chart,
    Panel,
    Points,
    chart,
    curve,
    k3_panel,
    level,
    plain,
    steps_axis,
)
from offpol_diag.report.tiles import below_0
from offpol_diag.result import (
    Against,
    Comparison,
    Contrast,
    Diagnosis,
    DumpFacts,
    Histogram,
    Result,
    Subset,
    idle,
)
from offpol_diag.result.steps import at_steps
from offpol_diag.table import Cell, Table

Presets = Mapping[str, Numbers]
DECISIVE = (
    "ess_tokens",
    "ess_sequences",
    "tokens_weighted",
    "sequences_dropped",
    "truncated_high",
    "weight_mean",
    "k3",
)
"""Numbers of presets that decide between them, the most important first."""
FEW = ("ess_tokens", "ess_sequences", "tokens_weighted", "truncated_high", "weight_max")
"""Those that stand in a table with a row per preset."""
BESIDE = 2
"""Presets whose differences from the reference stand in the short table, too."""
ACROSS, MOST_ROWS, FEW_ROWS, MOST_DRAWN, TILES = 8, 24, 8, 12, 8
"""Presets shown as columns; rows of the short tables of presets, of runs; presets in a chart; tiles."""
ABSENT = Number(unknown="not computed for this preset")
IDLE = "None of these presets changes anything on this dump"
BETTER = (
    "better: a preset is named where the interval of its difference from the next best excludes 0, and "
    "undecided stands where it does not; without intervals the values decide."
)
UNRANKED = "No preset is called better while the diagnosis is a bug: fix the bug first."
PAIRED = (
    "What two presets share cancels within a replicate, so these intervals are usually narrower than those "
    "of the numbers themselves. Differences of shares are in percentage points."
)
DROPPED = (
    "A token is dropped where nothing of its update is left: rejected, vetoed, or of weight 0; a sequence, "
    "where all its tokens are. Lengths and rewards are those of the sequences. A sequence has the sign of "
    "its mean advantage. Δ is per token, ΣΔ per sequence."
)


# ---------------------------------------------------------------- presets side by side


def of_presets(summary: Result, found: Comparison) -> Answer:
    """Return the answer on presets: which keeps most, the numbers that decide, and what each drops."""
    facts = summary.presets
    able = {name: summary.preset(name) for name, one in facts.items() if not one.needs}
    lacking = [f"{name} needs {listed(one.needs)}" for name, one in facts.items() if one.needs]
    missing = (f"Not computed: {'; '.join(lacking[:5])}.",) if lacking else ()
    answered = of_dump(summary, *missing)
    if not able:
        return answered("", "None of these presets can be computed from this dump", "warn")
    by_ess = sorted(able, key=lambda name: (idle(able[name]), -(_ess(able[name]).value or 0.0)))
    some = [name for name in by_ess if not facts[name].same_as]
    some = some[: MOST_DRAWN if len(able) > TILES else TILES]
    bug, best = summary.is_bug, found.better.get("ess_tokens", "")
    word, sentence, tone, interval, more = _verdict(summary, able, by_ess, found)
    return answered(
        word,
        sentence,
        tone,
        interval=interval,
        more=more,
        facts=(
            *(() if len(able) > ACROSS else _drops(found)),
            *_bug(summary.diagnosis, "Bug?", summary.whole),
        ),
        lead=f"ESS of tokens after each correction, of {counted(len(able), 'preset')}; 95% intervals.",
        tiles=tuple(_tile(name, able[name], best if not bug else "", found) for name in some[:TILES]),
        tables=tuple(one for one in _tables(summary, able, by_ess, found, not bug) if one.rows),
        charts=tuple(_charts({name: able[name] for name in some}, found)),
    )


def _bug(given: Diagnosis | None, label: str, metrics: Numbers) -> tuple[Fact, ...]:
    """Return what the bug check says of a dump, and what speaks for its causes or its candidates."""
    if given is None:
        return ()
    lines = [
        Line(f"{one.statement} {text}") for one in given.causes for text in cause_details(one, given, metrics)
    ]
    lines += candidates(given).lines
    lines += [Line(f"To decide: {given.decide}")] if given.decide else []
    return (Fact(label, given.headline, lines=tuple(lines)),)


def _ess(one: Numbers) -> Number:
    return one.get("ess_tokens", Number())


def _verdict(
    summary: Result, able: Presets, by_ess: Sequence[str], found: Comparison
) -> tuple[str, str, Tone, str, str]:
    """Return the word, the sentence, its tone, the interval and what follows."""
    if summary.is_bug:
        text = summary.diagnosis.headline if summary.diagnosis else ""
        return "Bug", text.rstrip("."), "bad", "", "Nothing is ranked before the fix."
    acting = [name for name in by_ess if not idle(able[name])]
    first, best, unmoved = by_ess[0], found.better.get("ess_tokens", ""), _idle(able)
    value, interval = written(_ess(able[best if best in able else first]))
    known = {
        name: one["tokens_weighted"]
        for name, one in able.items()
        if "tokens_weighted" in one and one["tokens_weighted"].value is not None
    }
    losing = min(known, key=lambda name: known[name].value or 0.0, default="")
    fewest = ""
    if losing and (known[losing].value or 0.0) < 0.999:
        fewest = f"{losing} gives the fewest tokens a weight: {say(known[losing])}."
    if best in able and len(able) > 1:
        other = next(name for name in acting if name != best)
        apart = _overlap(_ess(able[best]), _ess(able[other]))
        paired = "; paired, the difference excludes 0" if apart else ""
        more = f"Next is {other} with {say(_ess(able[other]))}{paired}."
        sentence = f"{best} keeps the largest ESS of tokens: {value}"
        return "", sentence, "good", interval, " ".join(filter(None, (more, fewest, unmoved)))
    if not acting and len(able) > 1:
        return "", IDLE, "info", "", "Every token weighs 1."
    if len(acting) < 2:
        why = summary.presets[first].method if len(able) == 1 else f"{fewest} {unmoved}".strip()
        return "", f"{first} keeps an ESS of tokens of {value}", "info", interval, why
    sentence, why = _undecided(able, acting, found.better.get("ess_tokens", ""))
    return "", sentence, "info", "", " ".join(filter(None, (why, fewest, unmoved)))


def _idle(presets: Presets) -> str:
    """Return a sentence on the presets that change nothing, whose ESS says nothing of the mismatch."""
    some = [name for name, one in presets.items() if idle(one)]
    if not some or len(presets) == 1:
        return ""
    if len(some) == 1:
        return f"{some[0]} changes nothing here, so that its ESS of 100% says nothing."
    more = f"{some[0]} and {count(len(some) - 1)} more" if len(some) > 2 else " and ".join(some)
    return f"{more} change nothing here, so that their ESS of 100% says nothing."


def _undecided(able: Presets, acting: Sequence[str], word: str) -> tuple[str, str]:
    """Return what is said where no preset has the largest ESS of tokens: of the two largest, and why."""
    one, other = acting[:2]
    if word == "equal":
        why = f"It is {say(_ess(able[one]))}: a toss-up, so the simpler one."
        return f"{one} and {other} have the same ESS of tokens", why
    if word == "undecided":
        values = f"{value_or_dash(_ess(able[one]))} and {value_or_dash(_ess(able[other]))}"
        why = "the paired interval of the difference includes 0: a toss-up, so the simpler one."
        return f"{one} and {other} cannot be told apart by ESS of tokens", f"It is {values}, and {why}"
    return "The ESS of tokens is not known of all these presets", "Nothing is ranked."


def _overlap(a: Number, b: Number) -> bool:
    if not a.interval or not b.interval:
        return a.value == b.value
    return a.interval[0] <= b.interval[1] and b.interval[0] <= a.interval[1]


def _tile(name: str, one: Numbers, best: str, found: Comparison) -> Tile:
    cut, weighted = (one.get(key, Number()) for key in ("truncated_high", "tokens_weighted"))
    below = f"{value_or_dash(weighted)} with a weight"
    below += f", {value_or_dash(cut)} above the bound" if cut.value else ""
    band = "largest" if name == best else "reference" if name == found.against else ""
    band = "changes nothing" if idle(one) else band
    return Tile(name, _ess(one), band, "good" if name == best else None, below=below)


def _tables(
    summary: Result, able: Presets, by_ess: Sequence[str], found: Comparison, ranked: bool
) -> Iterator[Table]:
    """Yield the numbers that decide, all numbers, the paired differences, and what each preset drops."""
    names = [name for name in FIRST_PRESET if any(name in one for one in able.values())]
    names += dict.fromkeys(name for one in able.values() for name in one if name not in names)
    known = [name for name in names if any(one.get(name, ABSENT).known for one in able.values())]
    unknown = [name for name in names if name not in known]
    others = [name for name in able if name in found.differences]
    notes: tuple[str, ...] = (BETTER if ranked else UNRANKED,) if others else ()
    notes += (f"Cannot be known from this dump: {', '.join(unknown)}.",) if unknown else ()
    rows: list[tuple[Cell, ...]]
    if len(able) > ACROSS:
        yield _by_preset(able, by_ess)
        rows = [(name, *(one.get(key, ABSENT) for key in known)) for name, one in able.items()]
        yield Table("comparison", "Every number", ("preset", *known), rows, notes, shown="page")
        yield dropped_by_length(summary, able)
        return

    def table(name: str, caption: str, chosen: Sequence[str], beside: Sequence[str], **more: Any) -> Table:
        """Return a row for each number: of each preset, less that of the reference, and which is better."""
        lines = [
            (
                key,
                worse(key).better,
                *(one.get(key, ABSENT) for one in able.values()),
                *(found.differences[one].get(key) for one in beside),
                *((found.better.get(key, "–"),) if ranked else ()),
            )
            for key in chosen
        ]
        less = (f"{one} − {found.against}" for one in beside)
        header = ("number", "better", *able, *less, *(("ahead",) if ranked else ()))
        return Table(name, caption, header, lines, **more)

    methods = tuple(f"{name}: {summary.presets[name].method}" for name in able)
    decisive, few = [name for name in DECISIVE if name in known], others if len(others) <= BESIDE else ()
    yield table("decisive", "", decisive, few, notes=methods)
    yield table("comparison", "Every number", known, (), notes=notes, shown="more")
    rows = [(metric, *(found.differences[name].get(metric) for name in others)) for metric in known]
    alike = [metric for metric, *cells in rows if all(isinstance(x, Number) and x.value == 0 for x in cells)]
    equal = (f"Equal: {', '.join(map(str, alike))}.",) if alike else ()
    header = ("number", *(f"{name} − {found.against}" for name in others))
    caption = f"Differences from {found.against}, paired by bootstrap replicate"
    lines = [row for row in rows if row[0] not in alike and others]
    yield Table("differences", caption, header, lines, (PAIRED, *equal), shown="more")
    if found.drops and found.all_tokens and found.all_sequences:
        yield _kinds(found, found.all_tokens, found.all_sequences)
        yield _examples(found)
    yield dropped_by_length(summary, able)


def _by_preset(able: Presets, by_ess: Sequence[str]) -> Table:
    """Return a row for each preset, those with the largest ESS of tokens first; equal rows are one.

    Presets that change nothing on this dump come last, and are not left out.
    """
    names = [name for name in FEW if any(name in one for one in able.values())]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in by_ess:
        cells = tuple(value_or_dash(able[name].get(key)) for key in names)
        rows.setdefault(cells, []).append(name)
    lines = [
        (same[0] + (f" and {len(same) - 1} equal" if len(same) > 1 else ""), *cells)
        for cells, same in rows.items()
    ]
    notes = (
        f"better: {', '.join(f'{name} {worse(name).better}' for name in names)}",
        f"Name up to {ACROSS} presets to see what each drops.",
    )
    left = (f"{count(len(lines) - MOST_ROWS)} more rows: --json.",) if len(lines) > MOST_ROWS else ()
    shown = lines if not left else [*lines[: MOST_ROWS - 1], lines[-1]]
    return Table("decisive", "", ("preset", *names), shown, (*notes, *left))


# ---------------------------------------------------------------- what one drops and another keeps


def _drops(found: Comparison) -> Iterator[Fact]:
    """Yield a sentence for each preset that drops what the reference keeps."""
    every = found.all_sequences
    for one in found.drops:
        if not one.tokens.count or every is None:
            continue
        whole, share = one.sequences, value_or_dash(one.tokens.numbers["share"])
        text = (
            f"{one.dropped_by} drops {counted(one.tokens.count, 'token')} ({share}) that {one.kept_by} keeps"
        )
        if not whole.count:
            yield Fact("Drops", f"{text}, and no sequence whole.")
            continue
        length, reward = ([one.numbers[name] for one in (whole, every)] for name in ("length", "reward"))
        lengths = f"{say(length[0])} tokens long against {say(length[1])} of all"
        rewards = f", of mean reward {say(reward[0])} against {say(reward[1])}"
        many = f"{counted(whole.count, 'sequence')} ({value_or_dash(whole.numbers['share'])})"
        rewards = rewards if reward[0].value is not None else ""
        yield Fact("Drops", f"{text}, among them all of {many}, on average {lengths}{rewards}.")


def _kinds(found: Comparison, tokens: Subset, sequences: Subset) -> Table:
    ways = [(f"dropped by {one.dropped_by}, kept by {one.kept_by}", one) for one in found.drops]
    subsets = [
        ("all tokens", tokens),
        *((f"tokens {way}", one.tokens) for way, one in ways if one.tokens.count),
        ("all sequences", sequences),
        *((f"sequences {way}", one.sequences) for way, one in ways if one.sequences.count),
    ]
    names = ("share", "length", "reward", "positive", "negative", "log_ratio")
    rows: list[tuple[Cell, ...]] = [
        (what, of.count, *(of.numbers[name] for name in names)) for what, of in subsets
    ]
    header = ("what", "count", "share", "mean length", "mean reward", "A > 0", "A < 0", "mean Δ or ΣΔ, nats")
    absent = {i for i, cell in enumerate(rows[0]) if isinstance(cell, Number) and cell.unknown}
    lacking = tuple(f"The dump does not say: {header[i]}." for i in sorted(absent))
    caption = "What one drops and the other keeps"
    return Table("drops", caption, header, rows, (DROPPED, *lacking), shown="more").without(absent)


def _examples(found: Comparison) -> Table:
    """Return a table of examples, without columns that the dump lacks."""
    rows = [
        (
            row.sequence_id,
            one.dropped_by,
            one.kept_by,
            None if row.step is None else str(row.step),
            row.length,
            row.tokens,
            Number(value=row.log_ratio_sum),
            None if row.reward is None else Number(value=row.reward),
        )
        for one in found.drops
        for row in one.examples
    ]
    where = ("sequence", "dropped by", "kept by", "step", "length")
    header = (*where, "tokens lost", "ΣΔ, nats", "reward")
    caption = "Sequences that lose tokens to one preset only, the largest |ΣΔ| first"
    table = Table("dropped", caption, header, rows, shown="more")
    return table.without(table.empty)


# ---------------------------------------------------------------- charts of presets


def _charts(some: Presets, found: Comparison) -> Iterator[Chart]:
    names, ess = list(some), [_ess(one) for one in some.values()]
    if len(names) > 1:
        kept = [one.get("tokens_weighted", Number()) for one in some.values()]
        traces = curve((names, ess, "ESS of tokens", TEAL), mode="markers")
        traces += curve((names, kept, "tokens with a weight", ORANGE), mode="markers")
        acting = [at for at, name in enumerate(names) if not idle(some[name])] or [0, -1]
        ends = [f"{names[at]} {value_or_dash(ess[at])}" for at in (acting[0], acting[-1])]
        said = f"ESS of tokens runs from {ends[0]} to {ends[1]}"
        yield chart("ess", said, Panel("", "share", traces, LABELS, SHARE))
    apart = {name: found.differences[name].get("ess_tokens") for name in names if name in found.differences}
    known = {name: one for name, one in apart.items() if one and one.known}
    if known:
        intervals = [one.interval for one in known.values() if one.interval]
        sure = sum(low > 0 or high < 0 for low, high in intervals)
        differ = "differs" if sure == 1 else "differ"
        said = f"{sure} of {counted(len(apart), 'preset')} {differ} from {found.against} in ESS of tokens"
        traces = curve(([*known], [*known.values()], "", BLUE), mode="markers")
        panel = Panel("", f"difference from {found.against}", traces, LABELS, SHARE, [level(0.0)])
        yield chart("differences", said, panel)


# ---------------------------------------------------------------- runs against the first

Rows = Mapping[str, Mapping[str, Contrast]]
"""Number → run → what it is there beside A's."""


def of_runs(summary: Result) -> Answer:
    """Return the answer on runs: whether they differ from the first, in which numbers and by how much."""
    found = summary.against
    runs = {"A": summary, **{one.letter: one.run for one in found}}
    rows: dict[str, dict[str, Contrast]] = {}
    for run in found:
        for one in run.contrasts:
            rows.setdefault(one.name, {})[run.letter] = one
    prefix = next((one for one in PAIRS if f"{one}k3" in rows), "")
    word, sentence, interval, tone = _said_of_runs(found, rows.get(f"{prefix}k3", {}))
    more = " ".join(f"{one.headline.rstrip('.')}. {one.pairing.sentence}" for one in found)
    if wrong := {run: one.diagnosis.headline for run, one in runs.items() if one.is_bug and one.diagnosis}:
        word = (
            "Bug in one run"
            if len(wrong) == 1
            else "Bug in both"
            if len(runs) == 2
            else "Bug in several runs"
        )
        sentence, interval, tone = ": ".join(next(iter(wrong.items()))), "", "bad"
        more = f"Mend it before the runs are compared. {more}"
    main = [prefix + name for name in FIRST_GAP if prefix + name in rows]
    differ = [name for name, row in rows.items() if any(one.differs for one in row.values())]
    lacking = {f"{what}: {why}": None for one in found for what, why in one.needs.items()}
    names = named(*(one.dump for one in runs.values()))
    metrics = {run.letter: {one.name: one.b for one in run.contrasts} for run in found}
    others = listed([one.letter for one in found])
    return Answer(
        "; ".join(f"{run} is {name}" for run, name in zip(runs, names, strict=True)),
        word,
        sentence.rstrip("."),
        tone,
        interval,
        more,
        facts=tuple(
            fact
            for run, one in runs.items()
            for fact in _bug(one.diagnosis, f"{run}, bug?", metrics.get(run, summary.whole))
        ),
        cautions=(
            *(f"{run}: {said}" for run, one in runs.items() for said in cautions(one.dump)),
            *(said for one in found for said in one.notes),
            *((f"Cannot be compared: {'; '.join(lacking)}.",) if lacking else ()),
        ),
        lead=f"{' → '.join(runs)}, and how {others} {'stands' if len(found) == 1 else 'stand'} to A; a "
        "number differs where its corrected p-value says so.",
        tiles=tuple(_of_row(name, rows[name]) for name in dict.fromkeys((*main, *differ)))[:TILES],
        tables=tuple(_of_runs(summary, rows, main, differ, names)),
        charts=tuple(_charts_of_runs(runs, rows)),
        remarks=columns.of_runs({run: one.dump for run, one in runs.items()}),
    )


def _said_of_runs(found: Sequence[Against], k3: Mapping[str, Contrast]) -> tuple[str, str, str, Tone]:
    """Return a word, the sentence, the interval and the tone of how K3 of the runs stands to A's."""
    tones = {run: _judged(one) for run, one in k3.items()}
    word = ", ".join(
        f"{word} in {listed(those)}"
        for word, tone in (("worse", "bad"), ("better", "good"))
        if (those := [run for run, one in tones.items() if one == tone])
    )
    word = word[:1].upper() + word[1:]
    tone: Tone = "bad" if "bad" in tones.values() else "good" if "good" in tones.values() else "info"
    if not k3 or not all(one.a.known and one.b.known for one in k3.values()):
        return "", found[0].headline.rstrip("."), "", tone
    one = next(iter(k3.values()))
    if len(found) > 1:
        each = [f"{value_or_dash(other.b)} in {run}" for run, other in k3.items()]
        told = "" if word else ": no difference can be told"
        return word, f"K3 KL is {listed([f'{value_or_dash(one.a)} in A', *each])}{told}", "", tone
    a, b = value_or_dash(one.a), value_or_dash(one.b)
    if not one.differs:
        return "", f"K3 KL is {a} nats per token in A and {b} in B: no difference can be told", "", tone
    interval = f"({say(one.ratio)} times A's)" if one.ratio and one.ratio.known else ""
    return (
        word,
        f"K3 KL {'falls' if tone == 'good' else 'rises'} from {a} to {b} nats per token",
        interval,
        tone,
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


def _judged(one: Contrast) -> Tone | None:
    """Return whether a run is better (good) or worse (bad) than A; None where that cannot be said."""
    if not one.differs or one.a.value is None or one.b.value is None:
        return None
    way = worse(one.name)
    if way.sign == "either":
        return None
    a, b = (abs(v - way.target) if way.sign == "away" else v for v in (one.a.value, one.b.value))
    return "good" if (b > a) == (way.sign == "lower") else "bad"


def _of_row(name: str, row: Mapping[str, Contrast]) -> Tile:
    """Return a number of all runs as a tile."""
    metric, first = name.rpartition(".")[2], next(iter(row.values()))
    words = {
        run: {"good": "better", "bad": "worse"}.get(
            _judged(one) or "", {True: "differs", False: "not told apart", None: "not tested"}[one.differs]
        )
        for run, one in row.items()
    }
    tones = {_judged(one) for one in row.values()}
    below = first.reason if first.differs is None else below_0(metric, first.b) or below_0(metric, first.a)
    several = len(row) > 1
    return Tile(
        title(metric),
        " → ".join(value_or_dash(one) for one in (first.a, *(one.b for one in row.values()))),
        ", ".join(f"{run} {word}" for run, word in words.items()) if several else next(iter(words.values())),
        "bad" if "bad" in tones else "good" if "good" in tones else None,
        "; ".join(f"{run}: {one.effect}" for run, one in row.items() if one.effect)
        if several
        else first.effect,
        below,
        name,
    )


def _of_runs(
    summary: Result, rows: Rows, main: Sequence[str], differ: Sequence[str], names: Sequence[str]
) -> Iterator[Table]:
    """Yield the numbers that differ, or else the main ones; the runs; and all other numbers."""
    found = summary.against
    alike = [
        name for name in rows if name not in differ and any(x.differs is False for x in rows[name].values())
    ]
    rest = [name for name in rows if name not in differ and name not in alike]
    corrected = (
        f"p, corrected: {found[0].correction} over {count(sum(one.tested for one in found))} tests; the "
        "intervals are 95% each and not corrected."
    )
    first = differ or [name for name in rows if name in main and _first(rows[name]).a.value is not None]
    more = f"{count(len(rows) - len(first[:FEW_ROWS]))} more numbers: -v."
    caption = f"{counted(len(differ), 'number')} {'differs' if len(differ) == 1 else 'differ'}"
    caption = caption if differ else "Nothing differs; the main numbers:"
    letters = [one.letter for one in found]
    yield _contrasts("decisive", caption, rows, first[:FEW_ROWS], letters, (corrected, more), "always")
    dumps = {"A": summary.dump, **{one.letter: one.run.dump for one in found}}
    yield _facts(dumps, names)
    yield _contrasts("differ", "Every number that differs", rows, differ, letters, (corrected,), "more")
    yield _contrasts("alike", "Numbers that cannot be told apart", rows, alike, letters, (), "page")
    yield _contrasts("untested", "Numbers that were not tested", rows, rest, letters, (), "page")


def _first(row: Mapping[str, Contrast]) -> Contrast:
    return next(iter(row.values()))


def _contrasts(
    id: str,
    caption: str,
    rows: Rows,
    names: Sequence[str],
    letters: Sequence[str],
    notes: tuple[str, ...],
    shown: str,
) -> Table:
    """Return a row for each number: how each run stands to A, the values of all, and the tests."""
    lines: list[tuple[Cell, ...]] = []
    for name in names:
        row = [rows[name].get(letter) for letter in letters]
        p = [
            "–"
            if one is None or one.p_adjusted is None
            else "< 0.0001"
            if one.p_adjusted < 1e-4
            else f"{one.p_adjusted:.2g}"
            for one in row
        ]
        effects = [(one.effect or one.reason or "–") if one else "–" for one in row]
        values = [_first(rows[name]).a, *(one.b if one else None for one in row)]
        lines.append((name, *effects, *values, *p, worse(name).better))
    tests = ["p, corrected"] if len(letters) == 1 else [f"p of {one}, corrected" for one in letters]
    header = ("number", *(f"{one} against A" for one in letters), "A", *letters, *tests, "better")
    return Table(id, caption, header, lines, notes, shown=shown)  # type: ignore[arg-type]


def _facts(dumps: Mapping[str, DumpFacts], names: Sequence[str]) -> Table:
    """Return what the runs are, and in what their provenance differs."""
    some = dumps.values()
    rows: list[tuple[Cell, ...]] = [
        ("file", *names),
        ("tokens", *(one.tokens for one in some)),
        ("sequences", *(one.sequences for one in some)),
        ("groups (prompts)", *(one.groups for one in some)),
        ("mean length", *(Number(value=one.mean_length) for one in some)),
        ("longest", *(one.max_length for one in some)),
        ("rows skipped", *(one.skipped.count for one in some)),
        *_provenance(*(one.provenance for one in some)),
    ]
    caption = "The two runs" if len(dumps) == 2 else "The runs"
    return Table("runs", caption, ("what", *dumps), rows, shown="more")


def _provenance(*dumps: dict[str, object]) -> list[tuple[Cell, ...]]:
    """Return the provenance fields in which the runs differ."""
    each = [_flat(one) for one in dumps]
    keys = dict.fromkeys(key for one in each for key in one)
    rows = [(key, *(one.get(key, "not said") for one in each)) for key in keys]
    return [row for row in rows if len({*row[1:]}) > 1]


def _flat(found: dict[str, object], before: str = "") -> dict[str, str]:
    """Flatten nested tables to keys such as `outer.inner`."""
    flat: dict[str, str] = {}
    for key, value in found.items():
        name = f"{before}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return flat


# ---------------------------------------------------------------- charts of runs


def _charts_of_runs(runs: Mapping[str, Result], rows: Rows) -> Iterator[Chart]:
    """Yield the curves of all runs by step in one chart, and their histograms of Δ in another."""
    panels = []
    for name in ("k3", "ess_tokens"):
        points = {run: _by_step(one, name) for run, one in runs.items()}
        if all(len(some) > 1 for some in points.values()):
            axis = steps_axis([step for some in points.values() for step in some])
            lines: list[Points] = [
                ([*some], [*some.values()], run * (name == "k3"), colour)
                for (run, some), colour in zip(points.items(), cycle(COLOURS), strict=False)
            ]
            if name == "k3":
                panels.append(k3_panel("training step", lines, x=axis))
            else:
                traces = [trace for line in lines for trace in curve(line)]
                panels.append(Panel("training step", title(name), traces, axis, SHARE))
    if panels:
        yield chart("runs_by_step", _apart(runs), *panels)
    shapes = {run: one.histograms.get("log_ratio") for run, one in runs.items()}
    lines = [
        ([(low + high) / 2 for low, high in pairwise(one.edges)], plain(_density(one)), run, colour)
        for (run, one), colour in zip(shapes.items(), cycle(COLOURS), strict=False)
        if one and one.counts
    ]
    if len(lines) == len(runs):
        said = "The log-ratios Δ of all runs"
        if off := rows.get("f_2"):
            each = [f"{value_or_dash(_first(off).a)} of A's tokens"]
            each += [f"{value_or_dash(one.b)} of {run}'s" for run, one in off.items()]
            said = f"{listed(each)} are off by more than 2×"
        traces = [trace for line in lines for trace in curve(line, mode="lines", hoverinfo="skip")]
        panel = Panel("Δ = log π_train − log π_rollout, nats", "density, 1/nats", traces, {}, LOG)
        yield chart("runs_histogram", said, panel)


def _by_step(run: Result, name: str) -> Mapping[int, Number]:
    """Return a number of the main pair of policies by training step, rising."""
    places = {int(one.key): one.numbers for one in at_steps(run) if one.key.lstrip("-").isdecimal()}
    found = {step: one.get(run.prefix + name, one.get(name)) for step, one in sorted(places.items())}
    return {step: one for step, one in found.items() if one and one.value is not None}


def _apart(runs: Mapping[str, Result]) -> str:
    """Return at how many of the steps that a run shares with A the intervals of K3 do not overlap."""
    a, *others = (_by_step(one, "k3") for one in runs.values())
    said = []
    for run, b in zip([*runs][1:], others, strict=True):
        both = [(a[step].interval, b[step].interval) for step in a if step in b]
        pairs = [(x, y) for x, y in both if x and y]
        lower, higher = sum(y[1] < x[0] for x, y in pairs), sum(x[1] < y[0] for x, y in pairs)
        side, many = ("below", lower) if lower >= higher else ("above", higher)
        if many:
            said.append(f"K3 of {run} lies {side} A's at {many} of {len(pairs)} steps")
        else:
            said.append(f"K3 of {run} overlaps A's at all {len(pairs)} steps that both have")
    return "; ".join(said)


def _density(one: Histogram) -> Iterator[float | None]:
    """Yield the share of the tokens in each bin, divided by its width."""
    whole = sum(one.counts) or 1.0
    for (low, high), n in zip(pairwise(one.edges), one.counts, strict=True):
        yield n / whole / (high - low) or None if high > low else None
