"""The answer of `analyze` and `doctor`: how bad the mismatch is, whether it is a bug, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import Any

from offpol_diag.advice import MERGE
from offpol_diag.metrics import FIRST_GAP, METRICS, PAIRS, Tone, band, metric, title, tone
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import count, counted, doubted, say, written
from offpol_diag.report import words
from offpol_diag.report.answer import EXPLAIN, Answer, Fact, Line, Tile
from offpol_diag.report.charts import charts
from offpol_diag.report.rescore import deciding, reproduced
from offpol_diag.result import DumpFacts, Place, Point, Result, at_steps, curve
from offpol_diag.table import Cell, Table

MOST_NAMED, MOST_STEPS, MOST_OTHERS = 4, 30, 4
"""Most files that a command is suggested for; rows of the table by step; presets beside the recommended ones
that stand before these, as a user named them one by one."""
ALIGNED = 0.001
"""Bound proposed for the gate of a dump that is below it; of any other it is `MERGE`."""


def answer(result: Result) -> Answer:
    """Return the answer of an analysis."""
    given, found, steps = result.recommendation, tiles(result), [one.key for one in at_steps(result)]
    word, said, shade, interval, more = headline(result)
    return of_dump(result)(
        word,
        said,
        shade,
        interval,
        more,
        facts=tuple(_facts(result)),
        lead=_resampled(result),
        tiles=found,
        over=f"steps {_step(steps[0])} to {_step(steps[-1])}"
        if steps and any(x.curve for x in found)
        else "",
        heavy=heavy(result),
        tables=tuple(one for one in _tables(result) if one.rows),
        charts=charts(result),
        code=(("The configuration, ready to paste", given.config),) if given and given.config else (),
        next=tuple(_commands(result)),
        further=tuple(("explain", f"{EXPLAIN} {name}") for name in _named(result)),
    )


def _named(result: Result) -> list[str]:
    given = result.diagnosis
    return [*(one.id for one in given.causes), *(one.id for one in given.candidates)] if given else []


def _step(key: str) -> str:
    return key.removesuffix(".0")


def of_dump(result: Result, *more_cautions: str) -> partial[Answer]:
    """Return an answer on one dump so far: what was read, in one line, and what limits every number."""
    dump, steps = result.dump, [_step(one.key) for one in at_steps(result)]
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
    """Return the command that analyses a dump as it was given; of the sample that comes along none."""
    named = [*(dump.given or dump.files)]
    if len(named) > MOST_NAMED or any(name.endswith("offpol_diag/data/sample.parquet") for name in named):
        return ()
    return (("analyze", f"offpol-diag analyze {shlex.join(named)}"),)


def cautions(dump: DumpFacts) -> tuple[str, ...]:
    """Return what limits every number: skipped rows, and warnings about the data."""
    skipped = dump.skipped
    rows = "1 row was" if skipped.count == 1 else f"{count(skipped.count)} rows were"
    first = f" The first: {skipped.examples[0]}." if skipped.examples else ""
    left_out = (f"{rows} skipped as bad; no number here covers them.{first}",) if skipped.count else ()
    return (*left_out, *dump.notes)


def headline(result: Result) -> tuple[str, str, Tone, str, str]:
    """Return word, sentence, tone and interval of the verdict, and what follows: growth, or K3 of a bug."""
    prefix, given, k3, advised = result.prefix, result.diagnosis, result.main("k3"), result.recommendation
    size, ends = "", ""
    if k3.known:
        value, ends = written(replace(k3, note=None))
        size = f"K3 KL is {value} nats per token{f' ({PAIRS[prefix]})' if prefix else ''}"
    if given is not None and given.verdict == "bug":
        after = words.mended(result)
        fixed = f"; {words.approximately(after)} after the fix" if after else ""
        logged = f"As logged, {size}{f' {ends}' if ends else ''}{fixed}." if size else ""
        return "BUG", words.lower(given.headline).rstrip("."), "bad", "", logged
    row = band("k3", k3)
    if row is None:
        return "", "The dump holds no pair of policies whose mismatch could be measured", "warn", "", ""
    if _few(result) and not (given and any(one.exact for one in given.causes)):
        return "TOO LITTLE DATA for a verdict", f"{size} ({row.name})", "warn", ends, words.grows(result)
    if advised and advised.rule == "identical":
        return "", "THE SAME NUMBERS TWICE: was one column copied from the other?", "warn", "", ""
    found, untold = tone(row.name), given is not None and given.verdict == "cannot_tell"
    found = "warn" if untold and found in ("good", "info") else found
    if untold and not result.undecided:
        return "CANNOT TELL a bug from a mismatch", f"{size} ({row.name})", found, ends, words.grows(result)
    return f"{row.name.upper()} off-policy mismatch", size, found, ends, words.grows(result)


def _few(result: Result) -> bool:
    if result.recommendation:
        return result.recommendation.rule == "few"
    from offpol_diag.diagnosis.numbers import Evidence  # which imports numpy

    return Evidence(result).few


def _resampled(result: Result) -> str:
    """Return what the intervals rest on, and what the small curves run over."""
    steps, dump = result.charts.steps, result.dump
    curves = ""
    if steps is not None and len(steps.first) > 1:
        curves = f" The small curves run from step {steps.first[0]} to {steps.last[-1]}."
    if all(number.interval is None for number in result.whole.values()):
        return f"Without intervals: {counted(dump.groups, 'group')} to resample.{curves}"
    unit = "prompt" if "group_id" in dump.columns else "sequence"
    return f"95% intervals, resampling the {counted(dump.groups, unit)}.{curves}"


# ---------------------------------------------------------------- facts


def _facts(result: Result) -> Iterator[Fact]:
    """Yield bug, cause or candidates, remedy, certainty, columns that would decide more, and warnings."""
    given, advised, open_ = result.diagnosis, result.recommendation, result.undecided
    scored = [reproduced(result.reference)] if result.reference is not None else []
    if result.is_bug:
        yield from (*words.of_bug(result), *words.expected(result), *scored)
        return
    checked, causes = tuple(words.checks(result)), given.causes if given else []
    brief = " ".join(words.sentence(one.text) for one in checked if one.brief)
    bug = "Not examined." if given is None else f"No sign of one. {brief}".strip()
    bug = given.headline if given and given.verdict == "cannot_tell" else bug
    yield Fact("Bug?", bug, words.verdict(result), checked)
    yield from (*words.located(result), *scored)
    if open_:
        yield from words.expected(result)
        yield words.candidates(open_)
        yield Fact("Decide", open_.decide)
        yield from deciding(result)
    elif found := words.evidence(result):
        # where K3 grows, that says more than the cause's own clause
        clause = causes[0].statement.partition(":")[0] if words.grew(result) else causes[0].statement
        also = (Line(f"Also: {one.statement} {one.statistic}") for one in causes[1:])
        lines = (Line(found[0], said=True), *map(Line, found[1:]), *also)
        yield Fact("Cause", f"{words.sentence(clause)} {found[0]}", causes[0].statement, lines)
    if advised is not None:
        yield words.what_to_do(result, advised, causes)
        sure = words.how_sure(advised)
        if sure and not open_:
            yield sure
    decides = open_.decide if open_ else ""
    lacks = [f"{name}: {why}" for name, why in words.lacking(result.dump).items() if name not in decides]
    if lacks:
        yield Fact("Missing", f"{'; '.join(lacks)}.")
    if not open_ and (advised is None or not advised.title):
        yield from (Fact("Also", one) for one in _findings(result))


def _findings(result: Result) -> Iterator[str]:
    """Yield what else matters, in sentences."""
    longest = result.lengths.longest if result.lengths else None
    top, f_2 = (result.whole.get(result.prefix + name, Number()) for name in ("k3_top1_share", "f_2"))
    if f_2.value is not None:
        some = f"{say(f_2)} of the tokens differ" if f_2.value else "No token differs"
        yield f"{some} by more than a factor of 2."
    if top.value is not None:
        yield f"The top 1% of the tokens carry {written(top).value} of K3."
    if longest is not None and longest.value is not None:
        mean = count(round(result.dump.mean_length))
        keep = f"Sequence weights keep less than 10% ESS beyond {say(longest)} tokens"
        yield f"{keep}; the mean response has {mean}."


def _commands(result: Result) -> Iterator[tuple[str, str]]:
    """Yield the commands to go on with: the configuration of the method, and a gate."""
    given, prefix, k3 = result.recommendation, result.prefix, result.main("k3").value
    if given is not None and given.method and not given.config and not result.is_bug:
        yield "config", f"offpol-diag presets {given.method} --for {words.trainer_of(result) or 'TRAINER'}"
    if result.undecided and "token_ids" in result.dump.columns and result.dump.prompts:
        for _, said in analysis(result.dump):
            yield "rescore", f"{said.replace(' analyze ', ' rescore ')} --model CHECKPOINT"
    if k3 is not None:
        limit = ALIGNED if k3 < ALIGNED else MERGE
        yield "gate", f"offpol-diag gate NEXT.parquet --fail-on bug --max {prefix}k3={limit}"


# ---------------------------------------------------------------- headline numbers

SHORT = ("k3", "ppl_ratio", "ess_tokens", "ess_sequences", "chi2_token")
"""Numbers with a tile in the short answer too."""
MASKS = ("seq_mis", "geo_rs", "bypass_ppo_clip_geo_rs")
"""Presets whose rejected tokens are shown where the recommended method rejects none; the last of dumps
without π_old."""


def heavy(result: Result) -> str:
    """Return the sentence on a heavy tail: which numbers it leaves unknown; empty where there is none."""
    tokens, sequences = (
        written(result.main(f"khat_{over}")).value.rstrip("*") if doubted(result.main(f"ess_{over}")) else ""
        for over in ("tokens", "sequences")
    )
    if tokens:
        also = f" and {sequences}" if sequences else ""
        return f"Heavy tail (k̂ {tokens}{also}): ESS, χ² and E[r] cannot be estimated, and K3 may be too low."
    return f"Heavy tail (k̂ {sequences}): ESS and χ² of sequences cannot be estimated." if sequences else ""


def tiles(result: Result) -> tuple[Tile, ...]:
    """Return the eight headline numbers: the mismatch, what methods reject, the tail, the reward."""
    found = [tile for name in SHORT if (tile := _tile(result, name))]
    found += _rejected(result)
    khat, sequences = result.main("khat_tokens"), result.main("khat_sequences")
    if khat.known:
        named: tuple[str, Tone] = ("unreliable", "bad") if khat.note else ("reliable", "good")
        beside = f"sequences: {written(sequences).value.rstrip('*')}" if sequences.value is not None else ""
        plain, course = replace(khat, note=None, interval=None), _course(result, "khat_tokens", khat.unit)
        key = f"{result.prefix}khat_tokens"
        found.append(Tile(title("khat_tokens"), plain, *named, interval=beside, key=key, **course))
    reward = result.whole.get("mean_reward", Number())
    if reward.value is not None or len({one.value for one in curve(result, "reward")}) > 1:
        course = _course(result, "reward", reward.unit)
        found.append(Tile(title("mean_reward"), reward, key="mean_reward", short=True, **course))
    return tuple(found)


def _tile(result: Result, name: str) -> Tile | None:
    """Return a number with its band; of one that a heavy tail decides, and beside a bug, there is none."""
    number = result.main(name)
    if not number.known:
        return None
    row, remark, doubt = band(name, number), below_0(name, number), doubted(number)
    bare = row is None or result.is_bug or doubt or bool(remark)
    return Tile(
        title(name),
        number,
        "" if bare or row is None else row.name,
        None if bare or row is None else tone(row.name),
        key=result.prefix + name,
        remark=remark,
        short=True,
        log=METRICS[name].log,
        **_course(result, name, number.unit),
    )


def _rejected(result: Result) -> list[Tile]:
    """Return what the recommended method rejects or, where that is nothing, what usual masks would."""
    method = (result.recommendation and result.recommendation.method) or ""
    rejects = {
        name: one
        for name in (method, *MASKS)
        if (one := result.preset(name).get("tokens_rejected", Number())).value is not None
    }
    if not rejects:
        return []
    if (own := rejects.pop(method, None)) and own.value:
        rejects = {method: own}
    (first, number), *others = [*rejects.items()][:2] or [(method, own or Number())]
    beside = "; ".join([first, *(f"{name}: {written(one).value}" for name, one in others)])
    key = f"{first}.tokens_rejected"
    plain, course = replace(number, interval=None), _course(result, key, number.unit)
    return [Tile("Rejected", plain, interval=beside, key=key, **course)]


def _course(result: Result, name: str, unit: str) -> dict[str, Any]:
    """Return the curve of a tile over the steps, whether it is flat, and its ends in words."""
    points = curve(result, name)
    known = [one for one in points if one.value is not None]
    if len(known) < 2:
        return {}
    flat = is_flat(known)
    ordered = sorted(known, key=lambda one: one.value or 0.0) if flat else known
    ends = [Number(value=one.value, interval=one.interval, unit=unit) for one in (ordered[0], ordered[-1])]
    spelled = [written(one).value for one in ends]
    below = " to ".join(dict.fromkeys(spelled)) if flat else " → ".join(spelled)
    return {"curve": tuple(one.value for one in points), "flat": flat, "below": below}


def is_flat(points: Sequence[Point]) -> bool:
    """Return whether one value lies within the 95% interval of every step; without intervals: no."""
    ends = [one.interval for one in points]
    return all(ends) and max(low for low, _ in filter(None, ends)) <= min(
        high for _, high in filter(None, ends)
    )


def below_0(name: str, number: Number) -> str:
    """Return what it means that mean(r²) − 1 is below 0, as no χ² is; empty of any other number."""
    if not name.startswith("chi2") or number.value is None or number.value >= 0:
        return ""
    chance = number.interval is not None and number.interval[1] >= 0
    return "0 by its interval" if chance else "mean of r² below 1"


# ---------------------------------------------------------------- tables


def _tables(result: Result) -> Iterator[Table]:
    """Yield the corrections; then what is behind the answer: levels, places, and all numbers."""
    if result.recommendation is not None and not result.is_bug:
        yield _corrections(result)
    yield _where(result)
    yield _by_place(result, "step", "By training step", MOST_STEPS)
    turns = _by_place(result, "turn", "By turn of the response")
    yield replace(turns, id="turns", shown="folded", rows=turns.rows if len(turns.rows) > 1 else ())
    yield dropped_by_length(result, result.presets)
    yield from policies(result)


def _corrections(result: Result) -> Table:
    """Return the recommended method, others where they are few, and one of each other family."""
    given = result.recommendation
    some = [given.method, *given.alternatives] if given and given.method else []
    others = [name for name in result.presets if name not in some]
    if some and len(others) <= MOST_OTHERS:
        some[1:1] = others
    keys = ("ess_tokens", "tokens_rejected", "tokens_weighted")
    rows: list[tuple[Cell, ...]] = [
        (name, *(numbers[key] for key in keys)) for name in some if (numbers := result.preset(name))
    ]
    left = len(result.presets) - len(rows)
    more = (f"The report has {counted(left, 'more preset')}.",) if left > 0 and rows else ()
    return Table(
        "corrections", "", ("recommended first", "ESS, tokens", "rejected", "with a weight"), rows, more
    )


def _by_place(result: Result, axis: str, caption: str, most: int | None = None) -> Table:
    """Return the main numbers by place of an axis."""
    places = result.at(axis)
    names = [name for name in FIRST_GAP if any(name in one.numbers for one in places)][:4]
    rows = [(one.key, one.tokens, *(one.numbers.get(name) for name in names)) for one in places]
    return Table(f"{axis}s", caption, (axis, "tokens", *names), rows[:most], shown="more")


def _where(result: Result) -> Table:
    """Return the places that tell damaged tokens from clean ones."""
    rows: list[tuple[Cell, ...]] = [
        (
            one.words,
            Number(value=one.inside, unit="nats"),
            Number(value=one.outside, unit="nats"),
            Number(value=one.share, unit="fraction"),
            Number(value=one.gain),
            one.measure,
        )
        for one in (result.diagnosis.where if result.diagnosis else ())
    ]
    header = ("tokens", "K3 there", "K3 elsewhere", "share of tokens", "gain", "what decides")
    notes = ("Gain: deviance of an exponential model of K3, cut at 4 nats a token, that the cut takes away.",)
    return Table("where", "Where the mismatch lives", header, rows, notes, shown="folded")


def dropped_by_length(result: Result, presets: Iterable[str]) -> Table:
    """Return the share of sequences that presets drop, by length; of those that drop any."""
    rows: list[tuple[Cell, ...]] = []
    for name in presets:
        dropped = [one.numbers.get("sequences_dropped") for one in result.at("length", f"preset/{name}")]
        if any(one and one.value for one in dropped):
            rows.append((name, *dropped))
    header = ("preset", *(place.key for place in result.at("length")))
    return Table(
        "dropped-by-length", "Dropped sequences by their length in tokens", header, rows, shown="more"
    )


def policies(result: Result) -> Iterator[Table]:
    """Yield the numbers of each pair of policies, side by side: the main ones, and for the page all."""
    known = result.whole
    pairs = [prefix for prefix in ("", "drift2.", "total.") if known.get(f"{prefix}k3", Number()).known]
    longer = [prefix for prefix in PAIRS if prefix]
    names = dict.fromkeys(key.removeprefix(one) for key in known for one in longer if key.startswith(one))
    names |= {name: None for name, one in METRICS.items() if names and one.meaning and name in known}
    none = Number(unknown="not computed for this pair")
    rows: dict[str, tuple[Cell, ...]] = {
        name: (name, *(known.get(p + name, none) for p in pairs)) for name in names if pairs
    }
    main = [row for name, row in rows.items() if metric(name).meaning or metric(name).first]
    note = (
        "Rollout → old is engine numerics and policy lag; old → current, the updates within the step. K1 "
        "adds up over the two; K3 of old → current is the size of the update, not a KL.",
    )
    header = ("number", *(PAIRS[prefix] for prefix in pairs))
    yield Table("pairs", "The three policy pairs", header, main, note, shown="more")
    caption = "All numbers of the three policy pairs"
    yield Table("policies", caption, header, [*rows.values()], note, shown="page")


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


def presets(result: Result) -> Table:
    """Return what each preset does to this batch: the recommended one, those beside it, then by kind."""
    able = {name: one for name, one in result.presets.items() if not one.needs}
    kinds, given = list(dict.fromkeys(one.kind for one in able.values())), result.recommendation
    chosen = [given.method, *given.alternatives] if given and given.method and not result.is_bug else []
    first = [name for name in chosen if name in able]
    others = sorted(
        (name for name in able if name not in first), key=lambda name: kinds.index(able[name].kind)
    )
    rows: list[tuple[Cell, ...]] = []
    for name in (*first, *others):
        numbers: Numbers = result.preset(name)
        marked = f"{name} (recommended)" if first and name == first[0] else name
        rows.append((marked, able[name].method, *(numbers.get(key) for key in PRESETS)))
    note = "χ² of the weights is mean(w²) − 1 of the final ones: below 0 where large weights are cut off."
    return Table("presets", "", ("preset", "rule", *PRESETS.values()), rows, (note,))


def missing(result: Result) -> Table:
    """Return the presets that need a column, and how a dump of two policies is read for most of them."""
    lacking = {name: one for name, one in result.presets.items() if one.needs}
    rows = [(name, ", ".join(one.needs), one.summary) for name, one in lacking.items()]
    current = result.dump.columns.get("current_log_probs")
    read = any("old_log_probs" in one.needs for one in lacking.values()) and current is not None
    hint = f"The trainer's one policy is read as the old one with --columns old={current}."
    caption, header = "Presets that need a column this dump lacks", ("preset", "needs", "what it is")
    return Table("needs", caption, header, rows, (hint,) if read else (), shown="page")


def by_place(result: Result) -> Iterator[Table]:
    """Yield a table of all numbers for each axis."""
    for axis, found in result.axes.items():
        places: list[Place] = result.at(axis)
        names = dict.fromkeys(name for place in places for name in place.numbers)
        rows: list[tuple[Cell, ...]] = [
            (place.key, place.tokens, place.sequences, *(place.numbers.get(name, Number()) for name in names))
            for place in places
        ]
        more = (f"{count(found.left_out)} more places are not listed.",) if found.left_out else ()
        header = (found.title, "tokens", "sequences", *names)
        yield Table(f"by-{axis}", f"All numbers by {found.title}", header, rows, more, shown="page")
