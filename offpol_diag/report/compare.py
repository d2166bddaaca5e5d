"""The answers of `compare`: presets side by side on one dump, and run A against run B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import PurePath

from offpol_diag.metrics import FIRST_GAP, FIRST_PRESET, PAIRS, Tone, title, worse
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import count, counted, say, value_or_dash, written
from offpol_diag.report import columns
from offpol_diag.report.analyze import cautions, dropped_by_length, of_dump
from offpol_diag.report.answer import Answer, Fact, Line, Tile, listed
from offpol_diag.report.diagnosis import candidates, cause_details
from offpol_diag.report.picture import SERIES, Layer, Panel, Picture, Values, at_places
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
    """Yield the numbers that decide, all numbers, the paired differences, and what each drops."""
    names = [name for name in FIRST_PRESET if any(name in one for one in able.values())]
    names += dict.fromkeys(name for one in able.values() for name in one if name not in names)
    known = [name for name in names if any(one.get(name, ABSENT).known for one in able.values())]
    unknown = [name for name in names if name not in known]
    others = [name for name in able if name in found.differences]
    many = len(able) > ACROSS
    if many:
        yield _by_preset(able, by_ess)
    else:
        methods = tuple(f"{name}: {summary.presets[name].method}" for name in able)
        decisive = [name for name in DECISIVE if name in known]
        yield _by_number("decisive", "", decisive, able, found, ranked, methods)
    notes: tuple[str, ...] = (BETTER if ranked else UNRANKED,) if others else ()
    notes += (f"Cannot be known from this dump: {', '.join(unknown)}.",) if unknown else ()
    if many:
        rows: list[tuple[Cell, ...]] = [
            (name, *(one.get(key, ABSENT) for key in known)) for name, one in able.items()
        ]
        yield Table("comparison", "Every number", ("preset", *known), rows, notes, shown="page")
    else:
        yield _by_number("comparison", "Every number", known, able, found, ranked, notes, shown="more")
    yield from _differences(known, others, found, many)
    if not many and found.drops and found.all_tokens and found.all_sequences:
        yield _kinds(found, found.all_tokens, found.all_sequences)
        yield _examples(found)
    yield dropped_by_length(summary, able)


def _by_number(
    name: str,
    caption: str,
    names: Sequence[str],
    able: Presets,
    found: Comparison,
    ranked: bool,
    notes: tuple[str, ...],
    shown: str = "always",
) -> Table:
    """Return a row for each number, with its direction, and a column for each preset."""
    rows = [
        (
            key,
            worse(key).better,
            *(one.get(key, ABSENT) for one in able.values()),
            *((found.better.get(key, "–"),) if ranked else ()),
        )
        for key in names
    ]
    header = ("number", "better", *able, *(("ahead",) if ranked else ()))
    return Table(name, caption, header, rows, notes, shown=shown)  # type: ignore[arg-type]


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


def _differences(
    known: Sequence[str], others: Sequence[str], found: Comparison, many: bool
) -> Iterator[Table]:
    """Yield each preset's difference from the reference; numbers equal for all are omitted and listed."""
    rows = {metric: [found.differences[name].get(metric) for name in others] for metric in known}
    alike = [metric for metric, cells in rows.items() if all(one and one.value == 0 for one in cells)]
    lines = [(metric, *cells) for metric, cells in rows.items() if metric not in alike]
    if not others or not lines:
        return
    equal = (f"Equal: {', '.join(alike)}.",) if alike else ()
    caption = f"Differences from {found.against}, paired by bootstrap replicate"
    header = ("number", *(f"{name} − {found.against}" for name in others))
    yield Table("differences", caption, header, lines, (PAIRED, *equal), shown="page" if many else "more")


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
    table = Table("dropped", caption, header, rows, shown="page")
    return table.without(table.empty)


# ---------------------------------------------------------------- charts of presets


def _charts(some: Presets, found: Comparison) -> Iterator[Picture]:
    names, ess = list(some), [_ess(one) for one in some.values()]
    share = partial(Panel, names=names, percent=True, y_range=(0, 1.05))
    if len(names) > 1:
        weighted = [one.get("tokens_weighted", Number()).value for one in some.values()]
        bars = Layer("", range(len(names)), weighted, "orange", "bars", width=0.7)
        panels = (
            share("", "ESS of tokens", (at_places("", ess, "teal", "points"),)),
            share("", "tokens with a weight", (bars,)),
        )
        acting = [at for at, name in enumerate(names) if not idle(some[name])] or [0, -1]
        ends = [f"{names[at]} {value_or_dash(ess[at])}" for at in (acting[0], acting[-1])]
        finding = f"ESS of tokens runs from {ends[0]} to {ends[1]}"
        sub = "After the correction, with 95% intervals; a token with a weight may still be truncated."
        yield Picture("ess", "", finding, sub, panels)
    apart = {name: found.differences[name].get("ess_tokens") for name in names if name in found.differences}
    if any(one and one.known for one in apart.values()):
        sure = sum(
            one.interval[0] > 0 or one.interval[1] < 0 for one in apart.values() if one and one.interval
        )
        differ = "differs" if sure == 1 else "differ"
        finding = f"{sure} of {counted(len(apart), 'preset')} {differ} from {found.against} in ESS of tokens"
        sub = "Both presets on the same bootstrap replicates, with 95% intervals, in percentage points."
        layer, level = at_places("", [*apart.values()], "blue", "points"), ((0.0, found.against),)
        panel = Panel("", "difference of ESS", (layer,), names=[*apart], percent=True, levels=level)
        yield Picture("differences", "", finding, sub, (panel,), telling=sure > 0)


# ---------------------------------------------------------------- run A against run B


def of_runs(summary: Result, found: Against) -> Answer:
    """Return the answer on two runs: whether they differ, in which numbers and by how much."""
    by_name = {one.name: one for one in found.contrasts}
    prefix = next((one for one in PAIRS if f"{one}k3" in by_name), "")
    lead = by_name.get(f"{prefix}k3")
    word, sentence, interval, tone = "", found.headline.rstrip("."), "", _judged(lead) or "info"
    if lead is not None and lead.a.known and lead.b.known:
        a, b = value_or_dash(lead.a), value_or_dash(lead.b)
        sentence = f"K3 KL is {a} nats per token in A and {b} in B: no difference can be told"
        if lead.differs:
            sentence = f"K3 KL {'falls' if tone == 'good' else 'rises'} from {a} to {b} nats per token"
            interval = f"({say(lead.ratio)} times A's)" if lead.ratio and lead.ratio.known else ""
            word = "Better in B" if tone == "good" else "Worse in B"
    more = f"{found.headline.rstrip('.')}. {found.pairing.sentence}"
    if wrong := bugs(summary, found):
        word, sentence = "Bug in one run" if len(wrong) == 1 else "Bug in both", ": ".join(wrong[0])
        interval, tone, more = "", "bad", f"Mend it before the runs are compared. {more}"
    names = [prefix + name for name in FIRST_GAP if prefix + name in by_name]
    names += [one.name for one in found.contrasts if one.differs and one.name not in names]
    lacking = "; ".join(f"{what}: {why}" for what, why in found.needs.items())
    return Answer(
        "A is {}; B is {}".format(*named(summary.dump, found.b.dump)),
        word,
        sentence.rstrip("."),
        tone,
        interval,
        more,
        facts=(
            *_bug(summary.diagnosis, "A, bug?", summary.whole),
            *_bug(found.b.diagnosis, "B, bug?", {one.name: one.b for one in found.contrasts}),
        ),
        cautions=(
            *(
                f"{run}: {one}"
                for run, dump in (("A", summary.dump), ("B", found.b.dump))
                for one in cautions(dump)
            ),
            *found.notes,
            *((f"Cannot be compared: {lacking}.",) if lacking else ()),
        ),
        lead="A → B, and how B stands to A; a number differs where its corrected p-value says so.",
        tiles=tuple(_of_contrast(by_name[name]) for name in names[:TILES]),
        tables=tuple(_of_runs(summary, found, {prefix + name for name in FIRST_GAP})),
        charts=tuple(_charts_of_runs(summary, found)),
        remarks=columns.of_two(summary.dump, found.b.dump),
    )


def named(*dumps: DumpFacts) -> tuple[str, ...]:
    """Return a name for each run: its first file, by as much of its path as tells two runs apart."""
    paths = [PurePath(one.files[0] if one.files else "a dump") for one in dumps]
    names = [path.name for path in paths]
    if len({*names}) < len({*paths}):
        steps = zip_longest(*(path.parts for path in paths))
        shared = next(at for at, parts in enumerate(steps) if len({*parts}) > 1)
        names = [str(PurePath(*path.parts[shared:])) for path in paths]
    more = [f" and {count(len(one.files) - 1)} more" if len(one.files) > 1 else "" for one in dumps]
    return tuple(map(str.__add__, names, more))


def bugs(summary: Result, found: Against) -> list[tuple[str, str]]:
    """Return A, B or both: the runs whose diagnosis is a bug, each with its headline."""
    both = (("A", summary.diagnosis), ("B", found.b.diagnosis))
    return [(run, one.headline) for run, one in both if one is not None and one.verdict == "bug"]


def _judged(one: Contrast | None) -> Tone | None:
    """Return whether B is better (good) or worse (bad) than A; None where that cannot be said."""
    if one is None or not one.differs or one.a.value is None or one.b.value is None:
        return None
    way = worse(one.name)
    if way.sign == "either":
        return None
    a, b = (abs(v - way.target) if way.sign == "away" else v for v in (one.a.value, one.b.value))
    return "good" if (b > a) == (way.sign == "lower") else "bad"


def _of_contrast(one: Contrast) -> Tile:
    name, tone = one.name.rpartition(".")[2], _judged(one)
    band = {True: "differs", False: "not told apart", None: "not tested"}[one.differs]
    band = {"good": "better", "bad": "worse"}.get(tone or "", band)
    below = one.reason if one.differs is None else below_0(name, one.b) or below_0(name, one.a)
    value = f"{value_or_dash(one.a)} → {value_or_dash(one.b)}"
    return Tile(title(name), value, band, tone, one.effect, below, one.name)


def _of_runs(summary: Result, found: Against, main: set[str]) -> Iterator[Table]:
    """Yield the numbers that differ, or else the main ones; the two runs; and all other numbers."""
    differ = [one for one in found.contrasts if one.differs]
    alike = [one for one in found.contrasts if one.differs is False]
    rest = [one for one in found.contrasts if one.differs is None]
    corrected = (
        f"p, corrected: {found.correction} over {count(found.tested)} tests; the intervals are 95% each and "
        "not corrected."
    )
    first = differ or [one for one in found.contrasts if one.name in main and one.a.value is not None]
    more = f"{count(len(found.contrasts) - len(first[:FEW_ROWS]))} more numbers: -v."
    caption = f"{counted(len(differ), 'number')} {'differs' if len(differ) == 1 else 'differ'}"
    caption = caption if differ else "Nothing differs; the main numbers:"
    yield _contrasts("decisive", caption, first[:FEW_ROWS], (corrected, more), "always")
    yield _facts(summary.dump, found.b.dump)
    yield _contrasts("differ", "Every number that differs", differ, (corrected,), "more")
    yield _contrasts("alike", "Numbers that cannot be told apart", alike, (), "page")
    yield _contrasts("untested", "Numbers that were not tested", rest, (), "page")


def _contrasts(
    name: str, caption: str, some: Sequence[Contrast], notes: tuple[str, ...], shown: str
) -> Table:
    rows = []
    for one in some:
        p = (
            "–"
            if one.p_adjusted is None
            else "< 0.0001"
            if one.p_adjusted < 1e-4
            else f"{one.p_adjusted:.2g}"
        )
        rows.append((one.name, one.effect or one.reason or "–", one.a, one.b, p, worse(one.name).better))
    header = ("number", "B against A", "A", "B", "p, corrected", "better")
    return Table(name, caption, header, rows, notes, shown=shown)  # type: ignore[arg-type]


def _facts(a: DumpFacts, b: DumpFacts) -> Table:
    rows: list[tuple[Cell, ...]] = [
        ("file", *named(a, b)),
        ("tokens", a.tokens, b.tokens),
        ("sequences", a.sequences, b.sequences),
        ("groups (prompts)", a.groups, b.groups),
        ("mean length", Number(value=a.mean_length), Number(value=b.mean_length)),
        ("longest", a.max_length, b.max_length),
        ("rows skipped", a.skipped.count, b.skipped.count),
        *_provenance(a.provenance, b.provenance),
    ]
    return Table("runs", "The two runs", ("what", "A", "B"), rows, shown="more")


def _provenance(a: dict[str, object], b: dict[str, object]) -> list[tuple[Cell, ...]]:
    """Return the provenance fields in which the runs differ."""
    mine, theirs = _flat(a), _flat(b)
    rows = [(key, mine.get(key, "not said"), theirs.get(key, "not said")) for key in {**mine, **theirs}]
    return [row for row in rows if row[1] != row[2]]


def _flat(found: dict[str, object], before: str = "") -> dict[str, str]:
    """Flatten nested tables to keys such as `outer.inner`."""
    flat: dict[str, str] = {}
    for key, value in found.items():
        name = f"{before}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: str(value)}
    return flat


# ---------------------------------------------------------------- charts of runs


def _charts_of_runs(summary: Result, found: Against) -> Iterator[Picture]:
    for axis in summary.axes:
        if axis in found.b.axes and (one := _both(axis, summary, found.b)):
            yield one
    for name, a_shape in summary.histograms.items():
        other = found.b.histograms.get(name)
        if a_shape.counts and other and other.counts:
            yield _shapes(name, a_shape, other, found.contrasts)


def _both(axis: str, a: Result, b: Result) -> Picture | None:
    """Return K3 of both runs at the places that either has."""
    title = a.axes[axis].title
    points = [
        {place.key: place.numbers["k3"] for place in one.at(axis) if "k3" in place.numbers} for one in (a, b)
    ]
    keys = list(dict.fromkeys([*points[0], *points[1]]))
    if axis == "step" and all(key.lstrip("-").isdecimal() for key in keys):
        keys.sort(key=int)
    if len(keys) < 2 or not all(points):
        return None
    ours, theirs = ([some.get(key) for key in keys] for some in points)
    pairs = [
        (x.interval, y.interval)
        for x, y in zip(ours, theirs, strict=True)
        if x and y and x.interval and y.interval
    ]
    lower, higher = sum(y[1] < x[0] for x, y in pairs), sum(x[1] < y[0] for x, y in pairs)
    finding = f"K3 by {title}: the intervals of A and B overlap at all {len(pairs)} places both have"
    if lower or higher:
        side, many = ("below", lower) if lower >= higher else ("above", higher)
        finding = f"K3 of B lies {side} A's at {many} of {len(pairs)} places, by {title}"
    layers = (at_places("A", ours, "blue"), at_places("B", theirs, "orange"))
    panel = Panel(title, "K3 KL, nats per token (log)", layers, y_scale="log", names=keys)
    telling = bool(lower or higher) and len(pairs) > 1
    sub = "With 95% intervals, each of one run alone."
    return Picture(f"runs-{axis}", "", finding, sub, (panel,), telling=telling)


def _shapes(name: str, a: Histogram, b: Histogram, contrasts: Sequence[Contrast]) -> Picture:
    layers = [
        Layer(run, [(low + high) / 2 for low, high in pairwise(one.edges)], _density(one), SERIES[i])
        for i, (run, one) in enumerate((("A", a), ("B", b)))
    ]
    off = next((one for one in contrasts if one.name == name.replace("log_ratio", "f_2")), None)
    finding = f"{a.title[:1].upper()}{a.title[1:]}"
    if off is not None and name.endswith("log_ratio"):
        pair, ends = a.title.partition(": ")[2] or a.title, (value_or_dash(off.a), value_or_dash(off.b))
        finding = f"{ends[0]} of A's tokens and {ends[1]} of B's are off by more than 2×, {pair}"
    panel = Panel(f"Δ, {a.unit}", f"density, 1/{a.unit} (log)", layers, y_scale="log")
    sub = "Share of the tokens in each bin, divided by its width."
    return Picture(f"runs-{name}", "", finding, sub, (panel,), telling=bool(off and off.differs))


def _density(one: Histogram) -> Values:
    whole = sum(one.counts) or 1.0
    bins = zip(pairwise(one.edges), one.counts, strict=True)
    return [n / whole / (b - a) or None if b > a else None for (a, b), n in bins]
