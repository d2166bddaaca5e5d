"""The answer of `analyze` and `doctor`: how bad the mismatch is, whether it is a bug, and what to do."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from offpol_diag.advice import MERGE
from offpol_diag.diagnosis.main_gap import MainGap
from offpol_diag.metrics import FIRST_GAP, METRICS, PAIRS, Tone, band, metric, title, tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, doubted, formatted
from offpol_diag.report import words
from offpol_diag.report.answer import EXPLAIN, Answer, Fact, Tile, listed
from offpol_diag.report.charts import charts
from offpol_diag.result import DumpFacts, Result, at_steps, curve
from offpol_diag.table import Cell, Shown, Table
from offpol_diag.trainers import named_in

MOST_NAMED, MOST_PLACES = 4, 30
"""Most files that a command is suggested for, and most rows of a table by place."""
ALIGNED = 0.001
"""Bound proposed for the gate of a dump that is below it; of any other it is `MERGE`."""


def answer(result: Result) -> Answer:
    """Return the answer of an analysis."""
    given = result.recommendation
    return of_dump(result)(
        *headline(result),
        facts=tuple(_facts(result)),
        tiles=tiles(result),
        heavy=heavy(result),
        tables=tuple(one for one in _tables(result) if one.rows),
        charts=charts(result),
        config=(given and given.config) or "",
        next=tuple(_commands(result)),
    )


def of_dump(result: Result, *more_cautions: str) -> partial[Answer]:
    """Return an answer on one dump so far: what was read, in one line, and what limits every number."""
    dump = result.dump
    steps = [one.key for one in at_steps(result)]
    parts = [counted(dump.sequences, "sequence"), counted(dump.tokens, "token")]
    parts += [counted(dump.groups, "prompt")] if "group_id" in dump.columns else []
    parts += [f"steps {steps[0]} to {steps[-1]}"] if len(steps) > 1 else []
    about, remarks = f"{name_of(dump)}: {', '.join(parts)}", (words.columns(dump),)
    return partial(Answer, about, cautions=(*cautions(dump), *more_cautions), remarks=remarks)


def name_of(dump: DumpFacts) -> str:
    """Return what the dump is called: the folder that was given, or its file and how many more."""
    if len(dump.given) == 1 and len(dump.files) > 1 and not set("*?[") & set(dump.given[0]):
        return f"{PurePath(dump.given[0]).name or dump.given[0]} ({counted(len(dump.files), 'file')})"
    more = f" and {counted(len(dump.files) - 1, 'more file')}" if len(dump.files) > 1 else ""
    return f"{PurePath(dump.files[0]).name if dump.files else 'dump'}{more}"


def analysis(dump: DumpFacts) -> tuple[tuple[str, str], ...]:
    """Return the command that analyses a dump as it was given."""
    named = [*(dump.given or dump.files)]
    return (("analyze", f"offpol-diag analyze {shlex.join(named)}"),) if len(named) <= MOST_NAMED else ()


def cautions(dump: DumpFacts) -> tuple[str, ...]:
    """Return what limits every number: skipped rows, and warnings about the data."""
    first = f" The first: {dump.skipped_examples[0]}." if dump.skipped_examples else ""
    skipped = f"{counted(dump.skipped, 'row')} skipped as bad; no number here covers them.{first}"
    return (skipped, *dump.notes) if dump.skipped else (*dump.notes,)


def headline(result: Result) -> tuple[str, str, Tone, str]:
    """Return word, sentence and tone of the verdict, and what follows: growth, or K3 of a bug."""
    given, k3, advised = result.diagnosis, result.main("k3"), result.recommendation
    value, interval = formatted(k3)
    pair = f"({PAIRS[result.prefix]})" if result.prefix else ""
    size = " ".join(filter(None, (f"K3 KL is {value.removesuffix('*')} nats per token", interval, pair)))
    if given and result.is_bug:
        after = f"; {k3_after} after the fix" if (k3_after := words.repaired(result)) else ""
        sentence = f"{given.headline[:1].lower()}{given.headline[1:]}".rstrip(".")
        return "BUG", sentence, "bad", f"As logged, {size}{after}." if k3.known else ""
    row = band("k3", k3)
    if row is None:
        return "", "The dump holds no pair of policies whose mismatch could be measured", "warn", ""
    if advised and advised.rule == "identical":
        return "", "THE SAME NUMBERS TWICE: was one column copied from the other?", "warn", ""
    named, growing = f"{size} ({row.name})", words.grows(result)
    if MainGap(result).few and not (given and any(one.exact for one in given.causes)):
        return "TOO LITTLE DATA for a verdict", named, "warn", growing
    severity = tone(row.name)
    if given and given.verdict == "cannot_tell":
        severity = "warn" if severity in ("good", "info") else severity
        if not result.undecided:
            return "CANNOT TELL a bug from a mismatch", named, severity, growing
    return f"{row.name.upper()} off-policy mismatch", size, severity, growing


# ---------------------------------------------------------------- facts


def _facts(result: Result) -> Iterator[Fact]:
    """Yield bug, where it lies, cause or candidates, remedy and certainty, and what decides."""
    causes = result.diagnosis.causes if result.diagnosis else []
    yield from words.bug_or_not(result)
    if result.reference is not None:
        yield Fact("Reference", f"Given {result.reference.rests_on}, {result.reference.headline}.")
    if result.undecided:
        yield words.candidates(result.undecided)
    if causes and result.is_bug:
        yield from words.fix(result, causes)
    elif causes:
        yield words.cause(result, causes)
    if result.recommendation and not result.is_bug:
        yield from words.what_to_do(result, result.recommendation)
    if result.undecided:
        yield Fact("Decide", result.undecided.decide)
        lacks = [name for name in ("token_ids", "prompt_ids") if name not in result.dump.columns]
        needs = f", with {listed(lacks)} in the dump" if lacks else ""
        again = f"Scoring again with the trainer's checkpoint tells which side is off{needs}."
        yield from () if result.reference else (Fact("Rescore", again),)


def _commands(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the commands to go on with: the configuration, a gate, and what is known of the cause."""
    given, k3 = result.recommendation, result.main("k3").value
    if given is not None and given.method and not given.config and not result.is_bug:
        trainer = named_in(result.dump.provenance) or "TRAINER"
        yield "config", f"offpol-diag presets {given.method} --for {trainer}"
    if k3 is not None:
        limit = ALIGNED if k3 < ALIGNED else MERGE
        yield "gate", f"offpol-diag gate NEXT.parquet --fail-on bug --max {result.prefix}k3={limit}"
    diagnosed = result.diagnosis
    for one in (diagnosed.causes or diagnosed.candidates)[:1] if diagnosed else ():
        yield "explain", f"{EXPLAIN} {one.id}"


# ---------------------------------------------------------------- headline numbers

TILES = ("k3", "ppl_ratio", "ess_tokens", "ess_sequences", "chi2_token")
"""Numbers of the dump that have a tile, with a band where no heavy tail decides them."""
MASKS = ("seq_mis", "geo_rs", "bypass_ppo_clip_geo_rs")
"""Presets whose rejected tokens are shown where the recommended method rejects none; the last of dumps
without π_old."""


def heavy(result: Result) -> str:
    """Return the sentence on a heavy tail: which numbers it leaves unknown; empty where there is none."""
    over = [one for one in ("tokens", "sequences") if doubted(result.main(f"ess_{one}"))]
    if not over:
        return ""
    lost = "ESS, χ² and E[r] cannot be estimated, and K3 may be too low"
    lost = lost if "tokens" in over else "ESS and χ² of sequences cannot be estimated"
    khats = " and ".join(formatted(result.main(f"khat_{one}")).value for one in over)
    return f"Heavy tail (k̂ {khats}): {lost}."


def tiles(result: Result) -> tuple[Tile, ...]:
    """Return the eight headline numbers: the mismatch, what methods reject, the tail, the reward.

    No band stands at a number that a heavy tail decides, nor beside a bug, where no method is shown either.
    """
    found = []
    for name in TILES:
        number = result.main(name)
        row, remark = band(name, number), ""
        if name == "chi2_token" and number.value is not None and number.value < 0:  # which no χ² is
            chance = number.interval is not None and number.interval[1] >= 0
            remark = "0 by its interval" if chance else "mean of r² below 1"
        judged = row.name if row and not (result.is_bug or doubted(number) or remark) else ""
        found.append(_tile(result, name, result.prefix + name, number, band=judged, remark=remark))
    found += [] if result.is_bug else [_rejected(result)]
    khat, sequences = result.main("khat_tokens"), result.main("khat_sequences")
    remark = f"sequences: {formatted(sequences).value}" if sequences.known else ""
    judged = "unreliable" if khat.note else "reliable"
    found.append(Tile("Pareto k̂", f"{result.prefix}khat_tokens", khat, judged, remark))
    found.append(_tile(result, "reward", "mean_reward", result.whole.get("mean_reward", Number())))
    return tuple(one for one in found if one.number.known)


def _rejected(result: Result) -> Tile:
    """Return what the recommended method rejects; where that is nothing, what two masks would."""
    method = (result.recommendation.method if result.recommendation else None) or ""
    numbers = {name: result.preset(name).get("tokens_rejected", Number()) for name in (method, *MASKS)}
    masks = [name for name in MASKS if numbers[name].known]
    name, *others = [method] if numbers[method].value or not masks else masks[:2]
    remark = "; ".join((f"by {name}", *(f"{other}: {formatted(numbers[other]).value}" for other in others)))
    key = f"{name}.tokens_rejected"
    return replace(_tile(result, key, key, numbers[name], remark=remark), label="Rejected")


def _tile(result: Result, name: str, key: str, number: Number, **more: str) -> Tile:
    """Return a tile with its curve over the steps, and the ends of that."""
    points = [*curve(result, name).values()]
    known = [one for one in points if one.value is not None]
    heights, trend = list[float | None](), ""
    if len(known) > 1 and is_flat(known):
        trend = "no trend"
    elif len(known) > 1:
        ends = (Number(one.value, one.interval, number.unit) for one in (known[0], known[-1]))
        trend = " → ".join(formatted(one).value for one in ends)
        heights = [one.value for one in points]
        if metric(name).log:
            heights = [math.log10(y) if y and y > 0 else None for y in heights]
    return Tile(title(key.removeprefix(result.prefix)), key, number, curve=heights, trend=trend, **more)


def is_flat(points: Sequence[Number]) -> bool:
    """Return whether one value lies within the 95% interval of every step; without intervals: no."""
    ends = [one.interval for one in points if one.interval]
    return len(ends) == len(points) and max(low for low, _ in ends) <= min(high for _, high in ends)


# ---------------------------------------------------------------- tables

PRESETS = {
    "ess_tokens": "ESS, tokens",
    "ess_sequences": "ESS, sequences",
    "chi2_token": "χ² of the weights",
    "tokens_rejected": "tokens rejected",
    "sequences_dropped": "sequences dropped",
    "vetoed": "vetoed",
    "truncated_high": "truncated",
    "k3": "K3 of what is kept",
    "ppl_ratio": "PPL ratio of what is kept",
}
"""Number of a preset → the header of its column."""


def _tables(result: Result) -> Iterator[Table]:
    """Yield what presets do, then what is behind the answer: places, and all pairs of policies."""
    given = result.recommendation
    chosen = [given.method, *given.alternatives] if given and given.method and not result.is_bug else []
    some = [name for name in chosen if name in result.presets]
    keys = ("ess_tokens", "tokens_rejected", "tokens_weighted")
    rows: list[Sequence[Cell]] = [(name, *(result.preset(name).get(key) for key in keys)) for name in some]
    left = len(result.presets) - len(rows)
    more = (f"The report has {counted(left, 'more preset')}.",) if left > 0 else ()
    header: Sequence[str] = ("recommended first", "ESS, tokens", "rejected", "with a weight")
    yield Table("corrections", "", header, rows, more)
    yield presets(result, some)
    rows = [
        (one.words, Number(one.inside), Number(one.outside), Number(one.share, unit="share"), one.measure)
        for one in (result.diagnosis.where if result.diagnosis else ())
    ]
    header = ("tokens", "K3 there", "K3 elsewhere", "share of tokens", "what decides")
    notes = ("K3 of a token is cut at 4 nats here.",)
    yield Table("where", "Where the mismatch lives", header, rows, notes, shown="folded")
    for axis, found in result.axes.items():
        places = result.at(axis)
        names = [name for name in FIRST_GAP if any(name in one.numbers for one in places)][:4]
        rows = [(one.key, one.tokens, *(one.numbers.get(name) for name in names)) for one in places]
        left = max(len(rows) - MOST_PLACES, 0) + found.left_out
        more = (f"{count(left)} more places are not listed.",) if left else ()
        by = (axis, "tokens", *names)
        shown: Shown = "more" if axis == "step" else "folded" if axis == "turn" else "page"
        yield Table(f"by-{axis}", f"By {found.title}", by, rows[:MOST_PLACES], more, shown)
    yield replace(dropped_by_length(result, result.presets), shown="folded")
    yield pairs(result)


def presets(result: Result, first: Sequence[str] = ()) -> Table:
    """Return what each preset does to this batch: the recommended one, those beside it, and all others."""
    able = {name: one for name, one in result.presets.items() if not one.needs}
    rows: list[Sequence[Cell]] = []
    for name in dict.fromkeys((*first, *able)):
        marked = f"{name} (recommended)" if first and name == first[0] else name
        rows.append((marked, able[name].method, *(result.preset(name).get(key) for key in PRESETS)))
    notes = ["χ² of the weights is mean(w²) − 1 of the final ones: below 0 where large weights are cut off."]
    for needs in dict.fromkeys(tuple(one.needs) for one in result.presets.values() if one.needs):
        lacking = [name for name, one in result.presets.items() if tuple(one.needs) == needs]
        notes.append(f"The dump lacks {listed(needs)}, which {listed(lacking)} would need.")
    return Table("presets", "", ("preset", "rule", *PRESETS.values()), rows, tuple(notes), shown="page")


def dropped_by_length(result: Result, presets: Iterable[str]) -> Table:
    """Return the share of sequences that presets drop, by length; of those that drop any."""
    rows: list[Sequence[Cell]] = []
    for name in presets:
        dropped = [one.numbers.get("sequences_dropped") for one in result.at("length", f"preset/{name}")]
        if any(one and one.value for one in dropped):
            rows.append((name, *dropped))
    header = ("preset", *(place.key for place in result.at("length")))
    caption = "Dropped sequences by their length in tokens"
    return Table("dropped-by-length", caption, header, rows, shown="more")


OF_PAIRS = (*FIRST_GAP, "khat_tokens", "khat_sequences", "k3_top1_share", "tokens_differ")
"""Numbers that are shown of every pair of policies."""


def pairs(result: Result) -> Table:
    """Return the main numbers of each pair of policies, side by side."""
    known, none = result.whole, Number(unknown="not computed for this pair")
    prefixes = [one for one in ("", "drift2.", "total.") if known.get(f"{one}k3", Number()).known]
    rows: list[Sequence[Cell]] = [
        (one.name, *(known.get(prefix + one.name, none) for prefix in prefixes))
        for one in METRICS.values()
        if one.name in OF_PAIRS and any(prefix + one.name in known for prefix in prefixes)
    ]
    note = (
        "Rollout → old is engine numerics and policy lag; old → current, the updates within the step. K1 "
        "adds up over the two; K3 of old → current is the size of the update, not a KL."
    )
    header = ("number", *(PAIRS[prefix] for prefix in prefixes))
    return Table("pairs", "The three policy pairs", header, rows, (note,), shown="more")
