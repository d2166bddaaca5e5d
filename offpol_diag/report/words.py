"""The sentences of an analysis: checks for a bug, causes with their evidence, what to do, what was read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from offpol_diag.advice import GROWN, MERGE, METHOD, growth, prescribed
from offpol_diag.diagnosis.numbers import Evidence
from offpol_diag.metrics import band, title, tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, doubted, format_number, format_value, formatted, rounded
from offpol_diag.presets import catalogue
from offpol_diag.report.answer import EXPLAIN, Answer, Fact, Line
from offpol_diag.result import (
    After,
    Cause,
    Diagnosis,
    DumpFacts,
    Recommendation,
    Result,
    apart_in_sync,
    in_sync,
)
from offpol_diag.table import Table
from offpol_diag.trainers import named_in
from offpol_diag.trainers.translate import trainers_for

if TYPE_CHECKING:
    from offpol_diag.diagnosis.cause import Cause as KnownCause

VERDICTS = {
    "healthy": "Healthy: no sign of a bug",
    "honest_mismatch": "Honest mismatch: no sign of a bug",
    "bug": "A bug: the log-probs are logged or computed wrongly",
}
"""Verdict → the answer to whether it is a bug; where nothing can be told, the diagnosis says why."""
SMALLER = (
    "Make updates smaller: a lower learning rate, fewer epochs per batch, fewer steps between weight syncs."
)
NO_GRADIENT = "Not known: how far the gradient is off without a correction. A dump holds no gradients."


def sentence(text: str) -> str:
    """Return a clause as a sentence; names of columns and options keep their first letter."""
    text = text.strip()
    if text.partition(" ")[0].rstrip(",:;").replace("-", "").isalpha():
        text = capital(text)
    return text + ("" if text.endswith((".", "!", "?")) or not text else ".")


def lower(text: str) -> str:
    """Return a text with its first letter in lower case."""
    return text[:1].lower() + text[1:]


def capital(text: str) -> str:
    """Return a text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- is it a bug

DRAWN = "A clearly negative K1 would mean that the tokens were not drawn from the logged distribution."
ALSO_NEGATIVE = (
    "Rounding, a few tokens that are logged far off, sampling cut by top-p or top-k, and responses that are "
    "selected by their outcome make it negative too."
)
K1 = {
    "above": ("ok", "K1 is not negative", ""),
    "around": ("ok", "K1 is not clearly negative", ""),
    "bug": ("no", "K1 is negative", ""),
    "open": ("un", "K1 is negative, which no logging fault looked for explains", f" {ALSO_NEGATIVE}"),
}
"""Where K1 lies → mark, finding, and what else it may come from."""


def bug_or_not(result: Result) -> Fact:
    """Return whether it is a bug, by which evidence, and every check."""
    given = result.diagnosis
    if given is None:
        return Fact("Bug?", "", "Not examined")
    bugs = [one for one in given.causes if one.kind == "bug"]
    lines = [Line(one.statement, "no", sentence(one.statistic)) for one in bugs]
    lines += [Line(f"Examples: {'; '.join(map(_example, one.examples))}") for one in bugs if one.examples]
    checked = [*checks(result)]
    lines += checked
    if given.sequences and given.sequences < result.dump.sequences:
        some = f"{count(given.sequences)} of the {count(result.dump.sequences)} sequences"
        lines.append(Line(f"Looked for faults in {some}", "ok"))
    lines += [Line(f"Not testable on this dump: {one}", "un") for one in given.undecidable]
    if given.verdict == "cannot_tell":
        return Fact("Bug?", "", given.headline, tuple(lines))
    found, title_ = " ".join(sentence(one.text) for one in checked), VERDICTS[given.verdict]
    if result.is_bug and given.causes:
        first, *others = given.causes
        title_ = f"A bug ({first.id})"
        found = sentence(f"counted: {first.statistic}" if first.exact else first.statistic)
        found += f" Also: {' '.join(one.statement for one in others)}" if others else ""
    return Fact("Bug?", found, title_, tuple(lines))


def checks(result: Result) -> Iterator[Line]:
    """Yield what was measured to find a bug: K1, K3 of weights in sync, and E[r]."""
    k1, ratio = (result.whole.get(result.prefix + name, Number()) for name in ("k1", "mean_ratio"))
    if k1.value is not None:
        place = "above" if k1.value >= 0 else "around"
        if k1.interval and k1.interval[1] < 0:
            place = "bug" if result.is_bug else "open"
        mark, finding, others = K1[place]
        yield Line(finding, mark, f"It is {format_number(k1)} nats. {DRAWN}{others}")
    synced, apart = in_sync(result), apart_in_sync(result)
    if apart and not result.is_bug:
        least, most = (f"{rounded(one.value)} (step {one.step})" for one in apart)
        why = "Weights in sync differ by numerics alone, and as much at every step."
        yield Line(f"In sync (lag 0) K3 is {least} to {most}", "un", why)
    elif synced and not result.is_bug and (row := band("k3", Number(value=synced.value))):
        agree = tone(row.name) in ("good", "info")
        why = f"There engine and trainer {'agree' if agree else 'differ already'}. "
        why += "A wrong temperature, a shifted column or a padding value would show here already."
        yield Line(f"In sync (lag 0) K3 is {rounded(synced.value)}", "ok" if agree else "un", why)
    if ratio.value is not None and doubted(ratio):
        mean = formatted(replace(ratio, note=None)).value
        why = f"The tail of r is too heavy: its sample mean, {mean}, is not a usable estimate."
        yield Line("E[r] = 1 cannot be tested", "un", why)
    elif ratio.interval is not None:
        holds = ratio.interval[0] <= 1 <= ratio.interval[1]
        why = "It is 1 when the tokens were drawn from the logged distribution."
        yield Line(f"E[r] is {format_number(ratio)}", "ok" if holds else "un", why)


def _example(one: tuple[str, int, float, float]) -> str:
    name, position, rollout, train = one
    logs = f"log π_rollout {format_value(rollout)}, log π_train {format_value(train)}"
    return f"sequence {name}, position {position}: {logs}"


def places(result: Result) -> Iterator[Fact]:
    """Yield what a bug affects, then the clearest place that tells damaged tokens from clean ones."""
    given = result.diagnosis
    if given is None:
        return
    for one in given.causes[:1] if result.is_bug else ():
        counts = ((one.tokens, given.tokens, "tokens"), (one.sequences, given.sequences, "sequences"))
        affected = [f"{count(x)} of {count(of or x)} {unit}" for x, of, unit in counts if x is not None]
        if one.where or affected:
            yield Fact("Where", "", "; ".join(filter(None, (one.where, *affected))))
    for place in given.where[:1]:
        yield Fact("Where", place.sentence, lines=(Line(place.measure),))


# ---------------------------------------------------------------- causes

MOSTLY, TWICE = 0.5, 2.0
"""Share of K3 at lag 0 below which it is not the engine's; growth at one lag from which the updates grow."""


def cause(result: Result, causes: Sequence[Cause]) -> Fact:
    """Return the honest cause, the most telling evidence for it, how to confirm it, and other causes."""
    lag, synced, first = result.charts.lag, in_sync(result), causes[0]
    evidence = []
    if lag and lag.start and lag.end and lag.steps and grew(result):
        low, high = rounded(lag.start.value), rounded(lag.end.value)
        evidence.append(
            f"At a constant lag of {lag.lag}, K3 rises from {low} (step {lag.steps[0]}) to {high} (step "
            f"{lag.steps[1]}): updates grow, or weights no longer arrive. Compare checksums of the "
            "weights of both sides."
        )
    if lag and synced and lag.in_sync_share is not None and lag.in_sync_share < MOSTLY:
        level, share = rounded(synced.value), rounded(lag.in_sync_share, "share")
        synced_ = f"with weights in sync (lag 0) K3 is {level}, {share} of the dump's"
        evidence.append(f"It is not the engine: {synced_}.")
    evidence = evidence or [sentence(first.statistic)]
    more = {"To confirm": first.confirm, "At the source": first.fix}
    lines = [*evidence[1:], *(f"{label}: {text}" for label, text in more.items() if text)]
    lines += [f"Also: {one.statement} {one.statistic}" for one in causes[1:]]
    return Fact("Cause", evidence[0], first.statement, tuple(map(Line, lines)))


def grew(result: Result) -> bool:
    """Return whether stale weights are the cause, and K3 grows at a constant lag."""
    lag, given = result.charts.lag, result.diagnosis
    stale = given is not None and bool(given.causes) and given.causes[0].id == "stale"
    return bool(stale and lag and lag.growth and lag.growth > TWICE and lag.start and lag.end and lag.steps)


def candidates(given: Diagnosis) -> Iterator[Fact]:
    """Yield the causes that fit in their order, what speaks for and against each, and what decides."""
    named = [f"({place}) {one.statement}" for place, one in enumerate(given.candidates, 1)]
    title_ = "One fits, and is not established" if len(named) == 1 else "The least contradicted first"
    lines = []
    for place, one in enumerate(given.candidates, 1):
        sides = {"For": one.for_, "Against": one.against}
        lines += [Line(f"{side} ({place}): {' '.join(text)}") for side, text in sides.items() if text]
    yield Fact("Candidates", " ".join(named), title_, tuple(lines))
    yield Fact("Decide", given.decide)


# ---------------------------------------------------------------- what to do


def fix(result: Result) -> Iterator[Fact]:
    """Yield how to confirm a bug and what to do: no correction is named before it is fixed."""
    given = result.diagnosis
    assert given is not None
    first = given.causes[0] if given.causes else None
    title_, effect, lines = "Fix the bug first", "", []
    if first is not None:
        yield Fact("To confirm", sentence(first.confirm))
        where, after = next((one.where for one in given.causes if one.where), ""), mended(result)
        title_ += f": {first.fix}" if first.fix else ""
        effect = f"After it, K3 is {after} nats. " if after else ""
        effect += f"Until then, leave out the sequences with {where}. " if where else ""
        lines += [_after(first.after, result)] if first.after else []
    lines += [f"Also: {one.statement} {one.statistic}" for one in given.causes[1:]]
    lines += [result.recommendation.sentence] if result.recommendation else []
    named = "No correction is named before the fix."
    yield Fact("What to do", f"{effect}{named}", title_, tuple(map(Line, lines)))


def _after(after: After, result: Result) -> str:
    """Return the numbers as logged, and after a repair."""
    changes = []
    for name, key, unit in (("K3", "k3", ""), ("E[r]", "mean_ratio", ""), ("ESS", "ess_tokens", "share")):
        logged = format_number(replace(result.main(key), interval=None, note=None))
        about = "≈ " if after.approximate else ""
        changes.append(f"{name} {logged} → {about}{format_value(getattr(after, key), unit)}")
    return f"After the fix, {after.what}: {', '.join(changes)} (over {counted(after.tokens, 'token')})"


def mended(result: Result) -> str:
    """Return K3 after the first cause is repaired, where that at least halves it; else nothing."""
    causes, k3 = result.diagnosis.causes if result.diagnosis else [], result.main("k3").value
    after = causes[0].after if causes else None
    if after is None or (k3 is not None and after.k3 > k3 / 2):
        return ""
    return f"{'about ' * after.approximate}{rounded(after.k3)}"


def grows(result: Result) -> str:
    """Return a sentence on K3 that grows over the steps, and on the mean reward that falls."""
    grown = growth(result)
    if grown is None:
        return ""
    (a, low, _), (b, high, _) = grown.ends
    first, last = grown.thirds
    rises = f"K3 rises from {rounded(low)} (step {a}) to {rounded(high)} (step {b})"
    if (high or 0.0) < GROWN * (low or 0.0):  # the first or the last step is unlike its third
        rises = f"the median K3 of the steps rises from {rounded(first)} (first third)"
        rises += f" to {rounded(last)} (last third)"
    fall = ""
    if grown.reward is not None:
        before, after = map(rounded, grown.reward)
        fall = f", while the mean reward falls from {before} (first third) to {after} (last third)"
    return f"{'It collapses' if fall and last > MERGE else 'It grows'}: {rises}{fall}."


def what_to_do(result: Result, given: Recommendation) -> Fact:
    """Return the correction, why, what it changes on this dump, and its configuration for each trainer."""
    grown, method, open_ = growth(result), given.method or "", result.undecided
    step = grown.since if grown else None
    steps = ["measure first"] if open_ else []
    steps += [f"resume from before step {step}"] if step else []
    when = "until the cause is known, " if open_ else "then " if step else ""
    steps.append(f"{when}use {given.title}" if given.title else given.decision)
    said = []
    if grown and step:
        perhaps = f" (perhaps from step {grown.perhaps_since})" if grown.perhaps_since != step else ""
        said.append(f"From step {step} on K3 is above {MERGE:g}{perhaps}.")
        said += [SMALLER] if grew(result) else []
    said.append(_effect(result, method) if given.title else given.sentence)
    causes = result.diagnosis.causes if result.diagnosis else []
    source = next((one.fix for one in causes if one.kind == "honest" and one.fix), "")
    if given.title and source and not (step and grew(result)):
        said.append(f"At the source: {lower(sentence(source))}")
    lines = [given.sentence] if given.title else []
    if method in result.presets:
        lines.append(f"As a rule: {result.presets[method].method}, where r = π_train / π_rollout of a token.")
    lines += [f"As a preset: `offpol-diag presets {method}`"] if method else []
    return Fact(
        "What to do",
        " ".join(filter(None, said)),
        capital("; ".join(steps)),
        tuple(map(Line, lines)),
        _weights(result, given),
        _configs(result, given),
    )


def _effect(result: Result, method: str) -> str:
    """Return what the method changes on this dump: ESS, and what it truncates."""
    numbers = result.preset(method)
    ess, cut = numbers.get("ess_tokens", Number()), numbers.get("truncated_high", Number())
    truncated = f" and truncates {formatted(cut).value} of the tokens" if cut.value else ""
    return f"The correction leaves an ESS of {formatted(ess).value}{truncated}." if ess.known else ""


UNCORRECTED = {"ess_tokens": "ess_tokens", "ess_sequences": "ess_sequences", "weight_mean": "mean_ratio"}
WEIGHTS = (*UNCORRECTED, "weight_max", "truncated_high", "tokens_rejected", "sequences_dropped")
"""Rows of the table of weights; of some the number of the dump that it is without a correction."""


def _weights(result: Result, given: Recommendation) -> Table | None:
    """Return the weights without correction and under the method, where known."""
    own = result.preset(given.method or "")
    if not given.title or not own:
        return None
    raw = {name: result.main(key) for name, key in UNCORRECTED.items()}
    pairs = [(name, raw.get(name), own.get(name)) for name in WEIGHTS]
    rows = [(title(name), *pair) for name, *pair in pairs if any(one and one.value for one in pair)]
    return Table("weights", "Weights before and after", ("on this dump", "uncorrected", given.title), rows)


def _configs(result: Result, given: Recommendation) -> tuple[tuple[str, str], ...]:
    """Return the recommendation for each trainer that can say it: that of --for, the dump's, all others."""
    known, own = catalogue.load(), named_in(result.dump.provenance)
    if not given.method or given.method not in known:
        return ()
    policy = Evidence(result).policy
    found = {name: prescribed(given, name, policy) for name in trainers_for(known[given.method])}
    ranked = sorted(found.items(), key=lambda one: (one[1] != given.config, one[0] != own))
    return tuple((name, text) for name, text in ranked if text)


def how_sure(given: Recommendation) -> Iterator[Fact]:
    """Yield what the decision rests on, where a correction was weighed up."""
    if given.decision in ("no correction needed", METHOD):
        title_ = "Known from simulations and whole runs, not from this dump"
        yield Fact("How sure", given.source, title_, (Line(NO_GRADIENT),))


# ---------------------------------------------------------------- what was read

FEW = 5
"""Ignored columns that are named."""


def columns(facts: DumpFacts) -> str:
    """Return which columns have other names than ours, and which were ignored; empty where none."""
    found = [f"{role} = {column}" for role, column in facts.columns.items() if role != column]
    found += [] if "response_mask" in facts.columns else ["no mask"]
    ignored = facts.ignored or []
    more = f" and {count(len(ignored) - FEW)} more" if len(ignored) > FEW else ""
    found += [f"ignored are {', '.join(ignored[:FEW])}{more}"] if ignored else []
    return f"Columns: {', '.join(found)}." if found else ""


# ---------------------------------------------------------------- a cause, without a dump

KINDS = {
    "logged": "a bug: the numbers are logged wrongly",
    "sampled": "a bug: tokens were sampled from another distribution than the logged one",
    "model": "a bug: the two sides compute different models",
    "weights": "a bug: the two sides hold different weights",
    "honest": "an honest mismatch",
}
"""Kind of a cause → what is said of it."""


def explained(cause: KnownCause) -> Answer:
    """Return what it looks like, known threads, how to confirm it, how to fix it, and what looks alike."""
    from offpol_diag.diagnosis.cause import TRAINERS  # which imports numpy

    said = [("Looks like", cause.looks)]
    for one in cause.threads:
        why = f" Cause: {one.cause}." if one.cause else ""
        said.append(("Known from", f"{', '.join(one.at)}: {one.symptom}.{why}"))
    said.append(("Confirm", filled(cause, cause.confirm)))
    said += [(f"In {TRAINERS[name]}", text) for name, text in cause.settings.items()]
    said.append(("Fix", filled(cause, cause.fix)))
    said += [("Look-alikes", f"{name}: {what}") for name, what in cause.apart.items()]
    others = tuple(("explain", f"{EXPLAIN} {name}") for name in list(cause.apart)[:1])
    return Answer(
        f"{cause.id}: {KINDS[cause.kind]}",
        "",
        cause.title,
        "info",
        facts=tuple(Fact(label, text.replace("`", "")) for label, text in said if text),
        next=(*others, ("doctor", "offpol-diag doctor DUMP.parquet")),
        heading=cause.id,
    )


def filled(cause: KnownCause, text: str) -> str:
    """Return a text of a cause as a sentence, with words for what a dump would fill in."""
    return sentence(text.format_map(defaultdict(str, cause.blanks)))


def every_cause() -> Answer:
    """Return the list of causes."""
    from offpol_diag.diagnosis.registry import CAUSES

    rows = [(one.id, one.kind, one.title) for one in CAUSES]
    return Answer(
        "what each looks like, how to confirm it in a trainer, and how to fix it",
        "",
        f"{len(rows)} causes of a mismatch",
        "info",
        tables=(Table("causes", "", ("cause", "kind", "what it is"), rows),),
        next=(("explain", f"{EXPLAIN} CAUSE"),),
    )
