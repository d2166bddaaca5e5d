"""The answer of `analyze` and `doctor`: how bad the mismatch is, whether it is a bug, and what to do."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from offpol_diag.advice import MERGE
from offpol_diag.metrics import FIRST_GAP, METRICS, PAIRS, Tone, band, metric, tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, doubted, say, written
from offpol_diag.report import columns
from offpol_diag.report.answer import EXPLAIN, Answer, Fact, Line
from offpol_diag.report.charts import charts
from offpol_diag.report.diagnosis import (
    approximately,
    candidates,
    checks,
    evidence,
    expected,
    grew,
    located,
    lower,
    mended,
    of_bug,
    sentence,
    verdict,
)
from offpol_diag.report.remedy import ALIGNED, grows, how_sure, trainer_of, what_to_do
from offpol_diag.report.rescore import deciding, reproduced
from offpol_diag.report.tiles import heavy, steps_of, tiles
from offpol_diag.result import DumpFacts, Fired, Recommendation, Result
from offpol_diag.table import Cell, Table

MOST_NAMED = 4
"""Most files that a command is suggested for."""
MOST_STEPS = 30
"""Rows of the table by step."""


def answer(summary: Result) -> Answer:
    """Return the answer of an analysis."""
    given, found, steps = summary.recommendation, tiles(summary), steps_of(summary)
    word, text, tone, interval, more = headline(summary)
    return of_dump(summary)(
        word,
        text,
        tone,
        interval,
        more,
        facts=tuple(_facts(summary)),
        lead=_resampled(summary),
        tiles=found,
        over=f"steps {steps[0]} to {steps[-1]}" if steps and any(tile.curve for tile in found) else "",
        heavy=heavy(summary),
        tables=tuple(one for one in _tables(summary) if one.rows),
        charts=charts(summary),
        code=(("The configuration, ready to paste", given.config),) if given and given.config else (),
        next=tuple(_commands(summary)),
        further=_explained(summary),
    )


def of_dump(summary: Result, *more_cautions: str) -> partial[Answer]:
    """Return an answer on one dump so far: what was read, in one line, and what limits every number."""
    dump, steps = summary.dump, steps_of(summary)
    name = PurePath(dump.files[0]).name if dump.files else "dump"
    more = f" and {counted(len(dump.files) - 1, 'more file')}" if len(dump.files) > 1 else ""
    parts = [counted(dump.sequences, "sequence"), counted(dump.tokens, "token")]
    parts += [counted(dump.groups, "prompt")] if "group_id" in dump.columns else []
    without = " and rows without a step" if len(steps) < len(summary.at("step")) else ""
    parts += [f"steps {steps[0]} to {steps[-1]}{without}"] if len(steps) > 1 else []
    about = f"{name}{more}: {', '.join(parts)}{columns.all_read(dump)}"
    limits = (*cautions(dump), *more_cautions)
    return partial(Answer, about, cautions=limits, remarks=columns.unlike(dump))


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


def _few(summary: Result) -> bool:
    from offpol_diag.diagnosis.numbers import Evidence  # which imports numpy

    return Evidence(summary).few


def headline(summary: Result) -> tuple[str, str, Tone, str, str]:
    """Return word, sentence, tone and interval of the verdict, and what follows: growth, or K3 of a bug."""
    prefix, given, k3 = summary.prefix, summary.diagnosis, summary.number("k3")
    size, ends = "", ""
    if k3.known:
        value, ends = written(replace(k3, note=None))
        size = f"K3 KL is {value} nats per token{f' ({PAIRS[prefix]})' if prefix else ''}"
    if given is not None and given.verdict == "bug":
        after = mended(summary)
        fixed = f"; {approximately(after)} after the fix" if after else ""
        logged = f"As logged, {size}{f' {ends}' if ends else ''}{fixed}." if size else ""
        return "BUG", lower(given.headline).rstrip("."), "bad", "", logged
    row = band("k3", k3)
    if row is None:
        return "", "The dump holds no pair of policies whose mismatch could be measured", "warn", "", ""
    advised, untold = summary.recommendation, given is not None and given.verdict == "cannot_tell"
    few = advised.rule == "few" if advised else _few(summary)
    if few and not (given and any(one.exact for one in given.causes)):
        return "TOO LITTLE DATA for a verdict", f"{size} ({row.name})", "warn", ends, grows(summary)
    if advised and advised.rule == "identical":
        return "", "THE SAME NUMBERS TWICE: was one column copied from the other?", "warn", "", ""
    found = tone(row.name)
    found = "warn" if untold and found in ("good", "info") else found
    if untold and not summary.undecided:
        return "CANNOT TELL a bug from a mismatch", f"{size} ({row.name})", found, ends, grows(summary)
    return f"{row.name.upper()} off-policy mismatch", size, found, ends, grows(summary)


# ---------------------------------------------------------------- facts


def _facts(summary: Result) -> Iterator[Fact]:
    """Yield bug, cause or candidates, remedy, certainty, columns that would decide more, and warnings."""
    given, advised, open_ = summary.diagnosis, summary.recommendation, summary.undecided
    causes = given.causes if given else []
    if summary.is_bug:
        yield from of_bug(summary)
        yield from expected(summary)
        if summary.reference is not None:
            yield reproduced(summary.reference)
        return
    checked = checks(summary)
    said = [
        one.text for one in checked if not one.text.endswith(("on this dump", "ruled out", "in the dump"))
    ]
    no_sign = f"No sign of one. {' '.join(map(sentence, said))}".strip()
    bug = "Not examined." if given is None else given.headline if given.verdict == "cannot_tell" else no_sign
    yield Fact("Bug?", open_.headline if open_ else bug, verdict(summary), checked)
    yield from located(summary)
    if summary.reference is not None:
        yield reproduced(summary.reference)
    if open_:
        yield from expected(summary)
        yield candidates(open_)
        yield Fact("Decide", open_.decide, shortened="last")
        yield from deciding(summary)
    elif found := evidence(summary):
        # where K3 grows, that says more than the cause's own clause
        clause = causes[0].statement.partition(":")[0] if grew(summary) else causes[0].statement
        lines = tuple(map(Line, found))
        lines += tuple(Line(f"Also: {one.statement} {one.statistic}") for one in causes[1:])
        yield Fact(
            "Cause",
            f"{sentence(clause)} {found[0]}",
            causes[0].statement,
            lines,
        )
    if advised is not None:
        yield what_to_do(summary, advised, causes)
        sure = how_sure(advised)
        if sure and not open_:
            yield sure
    told = open_.decide if open_ else ""
    lacks = [f"{name}: {why}" for name, why in columns.missing(summary.dump).items() if name not in told]
    if lacks:
        yield Fact("Missing", f"{'; '.join(lacks)}.")
    if warned := _warnings(summary):
        yield Fact("Warnings", warned, shortened="first")
    if not open_ and (advised is None or not advised.title):
        yield from (Fact("Also", one) for one in _findings(summary))


def _warnings(summary: Result) -> str:
    """Return the published levels that are crossed, the first two in words."""
    every = alerts(summary)
    some = [one.sentence.rstrip(".") for one in every if _tells(one, summary)][:2]
    many = f"{len(every)} published {'level is' if len(every) == 1 else 'levels are'} crossed (-v)"
    among = ", among them" if len(some) < len(every) else ""
    return f"{many}{among}: {'; '.join(some)}." if some else ""


def alerts(summary: Result) -> list[Fired]:
    """Return the published warning levels that this dump crosses."""
    fired = summary.recommendation.fired if summary.recommendation else []
    return [one for one in fired if one.level == "alert"]


def _tells(alert: Fired, summary: Result) -> bool:
    """Return whether a level is told as crossed: not by a number that a heavy tail leaves unknown."""
    return not any(doubted(summary.whole.get(key, Number())) for key in alert.saw)


def _findings(summary: Result) -> tuple[str, ...]:
    """Return what else matters, in sentences."""
    longest = summary.lengths.longest if summary.lengths else None
    top, f_2 = (summary.whole.get(summary.prefix + name, Number()) for name in ("k3_top1_share", "f_2"))
    said = []
    if f_2.value is not None:
        some = f"{say(f_2)} of the tokens differ" if f_2.value else "No token differs"
        said.append(f"{some} by more than a factor of 2.")
    if top.value is not None:
        said.append(f"The top 1% of the tokens carry {written(top).value} of K3.")
    if longest is not None and longest.value is not None:
        mean = count(round(summary.dump.mean_length))
        keep = f"Sequence weights keep less than 10% ESS beyond {say(longest)} tokens"
        said.append(f"{keep}; the mean response has {mean}.")
    return tuple(said)


# ---------------------------------------------------------------- tables


def _tables(summary: Result) -> Iterator[Table]:
    """Yield the corrections; then what is behind the answer: levels, and all numbers."""
    if summary.recommendation is not None and not summary.is_bug:
        yield _corrections(summary, summary.recommendation)
    yield _alerts(summary)
    yield _where(summary)
    yield _steps(summary)
    yield _turns(summary)
    yield dropped_by_length(summary, summary.presets)
    yield from policies(summary)


MOST_OTHERS = 4
"""Most presets beside the recommended ones that stand before these, as a user named them one by one."""


def _corrections(summary: Result, given: Recommendation) -> Table:
    """Return the recommended method, others where they are few, and one of each other family."""
    some = [given.method, *given.alternatives] if given.method else []
    others = [name for name in summary.presets if name not in some]
    if some and len(others) <= MOST_OTHERS:
        some[1:1] = others
    rows: list[tuple[Cell, ...]] = [
        (name, numbers["ess_tokens"], numbers["tokens_rejected"], numbers["tokens_weighted"])
        for name in some
        if (numbers := summary.preset(name))
    ]
    left = len(summary.presets) - len(rows)
    more = f"The report has {counted(left, 'more preset')}." if left > 0 and rows else ""
    header = ("recommended first", "ESS, tokens", "rejected", "with a weight")
    return Table("corrections", "", header, rows, (more,) if more else ())


def _alerts(summary: Result) -> Table:
    rows = [(one.sentence, _saw(one, summary), one.source or "–") for one in alerts(summary)]
    said = f"{len(rows)} published warning {'level is' if len(rows) == 1 else 'levels are'} crossed"
    return Table("alerts", said, ("level", "this dump", "set by"), rows, shown="more")


def _saw(one: Fired, summary: Result) -> str:
    """Return the numbers that crossed a level, with intervals if they are metrics."""
    parts = []
    for key, value in one.saw.items():
        metric = summary.whole.get(key, Number())
        number = metric if metric.value == value else Number(value=value, unit=metric.unit)
        parts.append(f"{key} = {say(number)}")
    return "; ".join(parts) or "–"


def _steps(summary: Result) -> Table:
    """Return the main numbers by training step."""
    places = summary.at("step")
    names = [name for name in FIRST_GAP if any(name in one.numbers for one in places)][:4]
    rows = [(one.key, one.tokens, *(one.numbers.get(name) for name in names)) for one in places]
    return Table("steps", "By training step", ("step", "tokens", *names), rows[:MOST_STEPS], shown="more")


def _turns(summary: Result) -> Table:
    """Return the main numbers by turn of the response, where there are turns."""
    places = summary.at("turn")
    names = [name for name in FIRST_GAP if any(name in one.numbers for one in places)][:4]
    rows = [(one.key, one.tokens, *(one.numbers.get(name) for name in names)) for one in places]
    header = ("turn", "tokens", *names)
    return Table("turns", "By turn of the response", header, rows if len(rows) > 1 else (), shown="folded")


def _where(summary: Result) -> Table:
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
        for one in (summary.diagnosis.where if summary.diagnosis else ())
    ]
    header = ("tokens", "K3 there", "K3 elsewhere", "share of tokens", "gain", "what decides")
    notes = ("Gain: deviance of an exponential model of K3, cut at 4 nats a token, that the cut takes away.",)
    return Table("where", "Where the mismatch lives", header, rows, notes, shown="folded")


def dropped_by_length(summary: Result, presets: Iterable[str]) -> Table:
    """Return the share of sequences that presets drop, by length; of those that drop any."""
    places = [place.key for place in summary.at("length")]
    rows: list[tuple[Cell, ...]] = []
    for name in presets:
        dropped = [one.numbers.get("sequences_dropped") for one in summary.at("length", f"preset/{name}")]
        if any(one and one.value for one in dropped):
            rows.append((name, *dropped))
    caption = "Dropped sequences by their length in tokens"
    return Table("dropped-by-length", caption, ("preset", *places), rows, shown="more")


def policies(summary: Result) -> Iterator[Table]:
    """Yield the numbers of each pair of policies, side by side: the main ones, and for the page all."""
    known = summary.whole
    pairs = {
        prefix: PAIRS[prefix]
        for prefix in ("", "drift2.", "total.")
        if known.get(f"{prefix}k3", Number()).known
    }
    names = dict.fromkeys(
        key.removeprefix(prefix) for key in known for prefix in PAIRS if prefix and key.startswith(prefix)
    )
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
    header = ("number", *pairs.values())
    yield Table("pairs", "The three policy pairs", header, main, note, shown="more")
    caption = "All numbers of the three policy pairs"
    yield Table("policies", caption, header, [*rows.values()], note, shown="page")


def _resampled(summary: Result) -> str:
    """Return what the intervals rest on, and what the small curves run over."""
    steps, dump = summary.charts.steps, summary.dump
    curves = ""
    if steps is not None and len(steps.first) > 1:
        curves = f" The small curves run from step {steps.first[0]} to {steps.last[-1]}."
    if all(number.interval is None for number in summary.whole.values()):
        return f"Without intervals: {counted(dump.groups, 'group')} to resample.{curves}"
    unit = "prompt" if "group_id" in dump.columns else "sequence"
    return f"95% intervals, resampling the {counted(dump.groups, unit)}.{curves}"


def _explained(summary: Result) -> tuple[tuple[str, str], ...]:
    """Return the commands that explain the causes, or the candidates."""
    given = summary.diagnosis
    if given is None:
        return ()
    named = [*(one.id for one in given.causes), *(one.id for one in given.candidates)]
    return tuple(("explain", f"{EXPLAIN} {name}") for name in named)


def _commands(summary: Result) -> Iterator[tuple[str, str]]:
    """Yield the commands to go on with: the configuration of the method, and a gate."""
    given, prefix, k3 = summary.recommendation, summary.prefix, summary.number("k3").value
    if given is not None and given.method and not given.config and not summary.is_bug:
        yield "config", f"offpol-diag presets {given.method} --for {trainer_of(summary) or 'TRAINER'}"
    ids = "token_ids" in summary.dump.columns and summary.dump.prompts
    if summary.undecided and ids:
        for _, said in analysis(summary.dump):
            yield "rescore", f"{said.replace(' analyze ', ' rescore ')} --model CHECKPOINT"
    if k3 is not None:
        limit = ALIGNED if k3 < ALIGNED else MERGE
        yield "gate", f"offpol-diag gate NEXT.parquet --fail-on bug --max {prefix}k3={limit}"
