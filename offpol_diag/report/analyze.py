"""The answer of `analyze` and `doctor`: how bad the mismatch is, whether it is a bug, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from offpol_diag.advice import MERGE
from offpol_diag.diagnosis.numbers import Evidence
from offpol_diag.metrics import FIRST_GAP, METRICS, PAIRS, Tone, band, title, tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, doubted, formatted
from offpol_diag.report import words
from offpol_diag.report.answer import EXPLAIN, Answer, Fact, Line, Tile, listed
from offpol_diag.report.charts import charts
from offpol_diag.report.rescore import deciding, reproduced
from offpol_diag.result import DumpFacts, Point, Result, at_steps, curve
from offpol_diag.table import Cell, Shown, Table
from offpol_diag.trainers import named_in

MOST_NAMED, MOST_PLACES = 4, 30
"""Most files that a command is suggested for, and most rows of a table by place."""
ALIGNED = 0.001
"""Bound proposed for the gate of a dump that is below it; of any other it is `MERGE`."""


def answer(result: Result) -> Answer:
    """Return the answer of an analysis."""
    given, found, steps = result.recommendation, tiles(result), _steps(result)
    diagnosed = result.diagnosis
    named = [one.id for some in (diagnosed.causes, diagnosed.candidates) for one in some] if diagnosed else []
    unit = "prompt" if "group_id" in result.dump.columns else "sequence"
    resampled = f"95% intervals, resampling the {counted(result.dump.groups, unit)}."
    resampled = resampled if any(number.interval for number in result.whole.values()) else ""
    return of_dump(result)(
        *headline(result),
        facts=tuple(_facts(result)),
        lead=resampled,
        tiles=found,
        over=f"steps {steps[0]} to {steps[-1]}" if steps and any(one.curve for one in found) else "",
        heavy=heavy(result),
        tables=tuple(one for one in _tables(result) if one.rows),
        charts=charts(result),
        code=(("The configuration, ready to paste", given.config),) if given and given.config else (),
        next=tuple(_commands(result)),
        further=tuple(("explain", f"{EXPLAIN} {one}") for one in named),
    )


def _steps(result: Result) -> list[str]:
    return [one.key.removesuffix(".0") for one in at_steps(result)]  # of a column with rows without a step


def of_dump(result: Result, *more_cautions: str) -> partial[Answer]:
    """Return an answer on one dump so far: what was read, in one line, and what limits every number."""
    dump, steps = result.dump, _steps(result)
    parts = [counted(dump.sequences, "sequence"), counted(dump.tokens, "token")]
    parts += [counted(dump.groups, "prompt")] if "group_id" in dump.columns else []
    without = " and rows without a step" if len(steps) < len(result.at("step")) else ""
    parts += [f"steps {steps[0]} to {steps[-1]}{without}"] if len(steps) > 1 else []
    about = f"{name_of(dump)}: {', '.join(parts)}{words.every_column(dump)}"
    remarks = () if words.every_column(dump) else (f"Columns: {words.columns(dump)}.",)
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
    rows = "1 row was" if dump.skipped == 1 else f"{count(dump.skipped)} rows were"
    first = f" The first: {dump.skipped_examples[0]}." if dump.skipped_examples else ""
    left_out = (f"{rows} skipped as bad; no number here covers them.{first}",) if dump.skipped else ()
    return (*left_out, *dump.notes)


def headline(result: Result) -> tuple[str, str, Tone, str, str]:
    """Return word, sentence, tone and interval of the verdict, and what follows: growth, or K3 of a bug."""
    given, k3, advised = result.diagnosis, result.main("k3"), result.recommendation
    value, ends = formatted(replace(k3, note=None))
    size = f"K3 KL is {value} nats per token{f' ({PAIRS[result.prefix]})' if result.prefix else ''}"
    if given is not None and given.verdict == "bug":
        after = words.mended(result)
        logged = f"As logged, {size}{ends and f' {ends}'}{after and f'; {after} after the fix'}."
        return "BUG", words.lower(given.headline).rstrip("."), "bad", "", logged if k3.known else ""
    row, untold = band("k3", k3), given is not None and given.verdict == "cannot_tell"
    if row is None:
        return "", "The dump holds no pair of policies whose mismatch could be measured", "warn", "", ""
    if Evidence(result).few and not (given and any(one.exact for one in given.causes)):
        return "TOO LITTLE DATA for a verdict", f"{size} ({row.name})", "warn", ends, words.grows(result)
    if advised and advised.rule == "identical":
        return "", "THE SAME NUMBERS TWICE: was one column copied from the other?", "warn", "", ""
    found = "warn" if untold and tone(row.name) in ("good", "info") else tone(row.name)
    if untold and not result.undecided:
        return "CANNOT TELL a bug from a mismatch", f"{size} ({row.name})", found, ends, words.grows(result)
    return f"{row.name.upper()} off-policy mismatch", size, found, ends, words.grows(result)


# ---------------------------------------------------------------- facts


def _facts(result: Result) -> Iterator[Fact]:
    """Yield bug, where it lies, cause or candidates, what decides between these, remedy and certainty."""
    given, advised, open_ = result.diagnosis, result.recommendation, result.undecided
    scored = [reproduced(result.reference)] if result.reference is not None else []
    if result.is_bug:
        yield from (*words.bug_facts(result), *scored)
        return
    checked, causes = tuple(words.checks(result)), given.causes if given else []
    brief = " ".join(words.sentence(one.text) for one in checked if one.brief)
    bug = "Not examined." if given is None else f"No sign of one. {brief}".strip()
    bug = given.headline if given and given.verdict == "cannot_tell" else bug
    yield Fact("Bug?", bug, words.TITLES[given.verdict] if given else "Not examined", checked)
    yield from (*words.located(result), *scored)
    if open_:
        yield words.candidates(open_)
        yield Fact("Decide", open_.decide)
        yield from deciding(result)
    elif found := words.evidence(result):
        also = (Line(f"Also: {one.statement} {one.statistic}") for one in causes[1:])
        lines = (Line(found[0], said=True), *map(Line, found[1:]), *also)
        yield Fact("Cause", f"{causes[0].statement} {found[0]}", causes[0].statement, lines)
    if advised is not None:
        yield words.what_to_do(result, advised)
        yield from () if open_ else words.how_sure(advised)


def _commands(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the commands to go on with: the configuration of the method, what decides, and a gate."""
    given, k3 = result.recommendation, result.main("k3").value
    if given is not None and given.method and not given.config and not result.is_bug:
        trainer = named_in(result.dump.provenance) or "TRAINER"
        yield "config", f"offpol-diag presets {given.method} --for {trainer}"
    if k3 is not None:
        limit = ALIGNED if k3 < ALIGNED else MERGE
        yield "gate", f"offpol-diag gate NEXT.parquet --fail-on bug --max {result.prefix}k3={limit}"


# ---------------------------------------------------------------- headline numbers

SHORT = ("k3", "ppl_ratio", "ess_tokens", "ess_sequences", "chi2_token")
"""Numbers with a tile in the short answer too."""
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
    return f"Heavy tail (k̂ {' and '.join(_bare(result.main(f'khat_{one}')) for one in over)}): {lost}."


def _bare(number: Number) -> str:
    return formatted(replace(number, note=None)).value


def tiles(result: Result) -> tuple[Tile, ...]:
    """Return the eight headline numbers: the mismatch, what methods reject, the tail, the reward.

    No band stands at a number that a heavy tail decides, nor beside a bug.
    """
    found = []
    for name in SHORT:
        number = result.main(name)
        row, remark = band(name, number), below_0(name, number)
        named = "" if row is None or result.is_bug or doubted(number) or remark else row.name
        found.append(_tile(result, name, number, band=named, short=True, remark=remark))
    given = result.recommendation
    names = dict.fromkeys((given.method if given and given.method else "", *MASKS))
    rejected = {name: one for name in names if (one := result.preset(name).get("tokens_rejected"))}
    some = [name for name in rejected if name not in MASKS and rejected[name].value]
    some = some or [name for name in rejected if name in MASKS] or [*rejected]
    for name in some[:1]:
        others = (f"{one}: {formatted(rejected[one]).value}" for one in some[1:2])
        number, below = replace(rejected[name], interval=None), "; ".join((name, *others))
        found.append(_tile(result, f"{name}.tokens_rejected", number, label="Rejected", interval=below))
    khat, sequences = result.main("khat_tokens"), result.main("khat_sequences")
    named = "unreliable" if khat.note else "reliable"
    below = f"sequences: {_bare(sequences)}" if sequences.known else ""
    number = replace(khat, note=None, interval=None)
    found.append(_tile(result, "khat_tokens", number, band=named, interval=below))
    reward = result.whole.get("mean_reward", Number())
    found.append(_tile(result, "reward", reward, label=title("mean_reward"), key="mean_reward", short=True))
    return tuple(one for one in found if isinstance(one.number, Number) and one.number.known)


def _tile(result: Result, name: str, number: Number, **more: Any) -> Tile:
    """Return a tile with its curve over the steps, whether that is flat, and its ends in words."""
    points = curve(result, name)
    known = [one for one in points if one.value is not None]
    if len(known) > 1:
        flat = is_flat(known)
        ordered = sorted(known, key=lambda one: one.value or 0.0) if flat else known
        ends = [Number(one.value, one.interval, number.unit) for one in (ordered[0], ordered[-1])]
        spelled = [formatted(one).value for one in ends]
        more["below"] = " to ".join(dict.fromkeys(spelled)) if flat else " → ".join(spelled)
        more |= {"flat": flat, "curve": tuple(one.value for one in points)}
    own: dict[str, Any] = {"label": title(name), "key": name}
    if name in METRICS:
        own |= {"key": result.prefix + name, "log": METRICS[name].log}
    if more.get("band"):
        own["tone"] = tone(more["band"])
    return Tile(number=number, **own | more)


def is_flat(points: Sequence[Point]) -> bool:
    """Return whether one value lies within the 95% interval of every step; without intervals: no."""
    ends = [one.interval for one in points if one.interval]
    return len(ends) == len(points) and max(low for low, _ in ends) <= min(high for _, high in ends)


def below_0(name: str, number: Number) -> str:
    """Return what it means that mean(r²) − 1 is below 0, as no χ² is; empty of any other number."""
    if not name.startswith("chi2") or number.value is None or number.value >= 0:
        return ""
    chance = number.interval is not None and number.interval[1] >= 0
    return "0 by its interval" if chance else "mean of r² below 1"


# ---------------------------------------------------------------- tables

KEPT = ("ess_tokens", "tokens_rejected", "tokens_weighted")
"""Columns of the short table of presets."""
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
    rows: list[Sequence[Cell]] = [(name, *(result.preset(name).get(key) for key in KEPT)) for name in some]
    left = len(result.presets) - len(rows)
    more = (f"The report has {counted(left, 'more preset')}.",) if left > 0 else ()
    yield Table(
        "corrections", "", ("recommended first", "ESS, tokens", "rejected", "with a weight"), rows, more
    )
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
        shown: Shown = "more" if axis == "step" else "folded" if axis == "turn" and len(rows) > 1 else "page"
        by = (axis, "tokens", *names)
        yield Table(f"by-{axis}", f"By {found.title}", by, rows[:MOST_PLACES], more, shown)
    yield replace(dropped_by_length(result, result.presets), shown="folded")
    yield pairs(result)


def presets(result: Result, first: Sequence[str] = ()) -> Table:
    """Return what each preset does to this batch: the recommended one, those beside it, then by kind."""
    able = {name: one for name, one in result.presets.items() if not one.needs}
    kinds = [*dict.fromkeys(one.kind for one in able.values())]
    others = sorted(
        able.keys() - {*first}, key=lambda name: (kinds.index(able[name].kind), [*able].index(name))
    )
    rows: list[Sequence[Cell]] = []
    for name in (*first, *others):
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


def pairs(result: Result) -> Table:
    """Return the main numbers of each pair of policies, side by side."""
    known, none = result.whole, Number(unknown="not computed for this pair")
    prefixes = [one for one in ("", "drift2.", "total.") if known.get(f"{one}k3", Number()).known]
    rows: list[Sequence[Cell]] = [
        (one.name, *(known.get(prefix + one.name, none) for prefix in prefixes))
        for one in METRICS.values()
        if (one.meaning or one.first) and any(prefix + one.name in known for prefix in prefixes)
    ]
    note = (
        "Rollout → old is engine numerics and policy lag; old → current, the updates within the step. K1 "
        "adds up over the two; K3 of old → current is the size of the update, not a KL."
    )
    header = ("number", *(PAIRS[prefix] for prefix in prefixes))
    return Table("pairs", "The three policy pairs", header, rows, (note,), shown="more")
