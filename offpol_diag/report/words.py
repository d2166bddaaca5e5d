"""The findings of an analysis in sentences: is it a bug, what is its cause, what to do; causes explained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from offpol_diag.advice import MERGE, METHOD, growth, prescribed
from offpol_diag.diagnosis.main_gap import MainGap
from offpol_diag.metrics import band, title, tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, doubted, format_number, format_value, formatted, rounded
from offpol_diag.presets import catalogue
from offpol_diag.report.answer import EXPLAIN, Fact, Line
from offpol_diag.result import (
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

VERDICTS = {"healthy": "Healthy: no sign of a bug", "honest_mismatch": "Honest mismatch: no sign of a bug"}
"""Verdict → whether it is a bug; for other verdicts the headline of the diagnosis says it."""
SMALLER = "Make updates smaller: a lower learning rate, fewer epochs per batch, more frequent weight syncs."
FEW = 5
"""Ignored columns that are named."""


def sentence(text: str) -> str:
    """Return a clause as a sentence; names of columns and options keep their first letter."""
    text = text.strip()
    if text.partition(" ")[0].rstrip(",:;").replace("-", "").isalpha():
        text = text[0].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) or not text else ".")


def columns(facts: DumpFacts) -> str:
    """Return which columns have other names than ours, and which were ignored; empty where none."""
    found = [f"{role} = {column}" for role, column in facts.columns.items() if role != column]
    found += [] if "response_mask" in facts.columns else ["no mask"]
    ignored = facts.ignored or []
    more = f" and {count(len(ignored) - FEW)} more" if len(ignored) > FEW else ""
    found += [f"ignored: {', '.join(ignored[:FEW])}{more}"] if ignored else []
    return f"Columns: {', '.join(found)}." if found else ""


# ---------------------------------------------------------------- is it a bug

K1_BELOW_0 = "A clearly negative K1 points to tokens that were not drawn from the logged distribution."
OTHER_REASONS = (
    "Rounding, a few badly logged tokens, top-p or top-k sampling, and responses that are selected by their "
    "outcome make it negative too."
)


def bug_or_not(result: Result) -> Iterator[Fact]:
    """Yield whether it is a bug, with every check, and where the damaged tokens are."""
    given, measured = result.diagnosis, [*checks(result)]
    if given is None:
        yield Fact("Bug?", "", "Not examined")
        return
    lines = measured.copy()
    if given.sequences and given.sequences < result.dump.sequences:
        some = f"{count(given.sequences)} of the {count(result.dump.sequences)} sequences"
        lines.append(Line(f"Looked for faults in {some}", "ok"))
    lines += [Line(f"Not testable on this dump: {one}", "un") for one in given.undecidable]
    if result.is_bug and given.causes:
        yield from _bug(given, lines)
    elif given.verdict in VERDICTS:
        found = " ".join(sentence(one.text) for one in measured)
        yield Fact("Bug?", found, VERDICTS[given.verdict], tuple(lines))
    else:
        yield Fact("Bug?", "", given.headline, tuple(lines))
    for place in given.where[:1]:
        yield Fact("Where", place.sentence, lines=(Line(place.measure),))


def _bug(given: Diagnosis, checked: Sequence[Line]) -> Iterator[Fact]:
    """Yield the evidence for a bug, and what it affects."""
    first, *others = given.causes
    lines = list[Line]()
    for one in given.causes:
        lines.append(Line(one.statement, "no", sentence(one.statistic)))
        examples = (
            f"sequence {name}, position {at}: log π_rollout {format_value(q)}, log π_train {format_value(p)}"
            for name, at, q, p in one.examples
        )
        lines += [Line(f"Examples: {'; '.join(examples)}")] if one.examples else []
    found = [sentence(f"counted: {first.statistic}" if first.exact else first.statistic)]
    found += [f"Also: {one.statement}" for one in others]
    yield Fact("Bug?", " ".join(found), f"A bug ({first.id})", (*lines, *checked))

    counts = ((first.tokens, given.tokens, "tokens"), (first.sequences, given.sequences, "sequences"))
    affected = [f"{count(x)} of {count(of or x)} {unit}" for x, of, unit in counts if x is not None]
    if where := "; ".join(filter(None, (first.where, *affected))):
        yield Fact("Where", "", where)


def fix(result: Result, causes: Sequence[Cause]) -> Iterator[Fact]:
    """Yield how to confirm a bug, and what to do; no correction is named before that."""
    first, effect = causes[0], list[str]()
    yield Fact("To confirm", sentence(first.confirm))
    if (after := first.after) and (k3 := repaired(result)):
        ess = rounded(after.ess_tokens, "share")
        effect.append(f"After it, K3 is {k3} nats, E[r] {rounded(after.mean_ratio)} and ESS {ess}.")
    if where := next((one.where for one in causes if one.where), ""):
        effect.append(f"Until then, leave out the sequences with {where}.")
    effect.append("Decide on a correction after the fix.")
    heading = f"Fix the bug first: {first.fix}" if first.fix else "Fix the bug first"
    yield Fact("What to do", " ".join(effect), heading)


def repaired(result: Result) -> str:
    """Return K3 after the first cause is repaired, where that at least halves it; else nothing."""
    causes, k3 = result.diagnosis.causes if result.diagnosis else [], result.main("k3").value
    after = causes[0].after if causes else None
    if after is None or (k3 is not None and after.k3 > k3 / 2):
        return ""
    return f"{'about ' * after.approximate}{rounded(after.k3)}"


def checks(result: Result) -> Iterator[Line]:
    """Yield what was measured to find a bug: K1, K3 of weights in sync, and E[r]."""
    k1, ratio = (result.whole.get(result.prefix + name, Number()) for name in ("k1", "mean_ratio"))
    if k1.value is not None:
        detail = f"It is {format_number(k1)} nats. {K1_BELOW_0}"
        if not k1.interval or k1.interval[1] >= 0:
            yield Line(f"K1 is not {'' if k1.value >= 0 else 'clearly '}negative", "ok", detail)
        elif result.is_bug:
            yield Line("K1 is negative", "no", detail)
        else:
            yield Line("K1 is negative, and no known fault explains it", "un", f"{detail} {OTHER_REASONS}")
    synced, apart = in_sync(result), apart_in_sync(result)
    if apart and not result.is_bug:
        least, most = (f"{rounded(k3)} (step {step})" for step, k3 in apart.items())
        why = "With weights in sync only numerics differ, by about as much at every step."
        yield Line(f"In sync (lag 0) K3 is {least} to {most}", "un", why)
    elif synced and not result.is_bug and (row := band("k3", Number(value=synced.value))):
        agree = tone(row.name) in ("good", "info")
        why = f"Engine and trainer {'agree' if agree else 'already differ'} there. "
        why += "A wrong temperature, a shifted column or a padding value would show there too."
        yield Line(f"In sync (lag 0) K3 is {rounded(synced.value)}", "ok" if agree else "un", why)
    if ratio.value is not None and doubted(ratio):
        mean = formatted(ratio).value.removesuffix("*")
        why = f"The tail of r is too heavy: its sample mean, {mean}, is not a usable estimate."
        yield Line("E[r] = 1 cannot be tested", "un", why)
    elif ratio.interval is not None:
        holds = ratio.interval[0] <= 1 <= ratio.interval[1]
        why = "It is 1 when the tokens were drawn from the logged distribution."
        yield Line(f"E[r] is {format_number(ratio)}", "ok" if holds else "un", why)


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
            f"{lag.steps[1]}): updates grow, or weights no longer arrive. Compare checksums of the weights "
            "of both sides."
        )
    if lag and synced and lag.in_sync_share is not None and lag.in_sync_share < MOSTLY:
        level, share = rounded(synced.value), rounded(lag.in_sync_share, "share")
        evidence.append(f"Not the engine: with weights in sync (lag 0) K3 is {level}, {share} of the dump's.")
    evidence = evidence or [sentence(first.statistic)]
    more = {"To confirm": first.confirm, "At the source": first.fix}
    lines = [*evidence[1:], *(f"{label}: {text}" for label, text in more.items() if text)]
    lines += [f"Also: {one.statement} {one.statistic}" for one in causes[1:]]
    return Fact("Cause", evidence[0], first.statement, tuple(map(Line, lines)))


def grew(result: Result) -> bool:
    """Return whether stale weights are the cause, and K3 grows at a constant lag."""
    lag, given = result.charts.lag, result.diagnosis
    stale = given is not None and bool(given.causes) and given.causes[0].id == "stale"
    return bool(stale and lag and lag.growth and lag.growth > TWICE)


def candidates(given: Diagnosis) -> Fact:
    """Return the causes that fit in their order, and what speaks for and against each."""
    named = [f"({place}) {one.statement}" for place, one in enumerate(given.candidates, 1)]
    heading = "One fits but is not established" if len(named) == 1 else "The least contradicted first"
    lines = []
    for place, one in enumerate(given.candidates, 1):
        sides = {"For": one.for_, "Against": one.against}
        lines += [Line(f"{side} ({place}): {' '.join(text)}") for side, text in sides.items() if text]
    return Fact("Candidates", " ".join(named), heading, tuple(lines))


# ---------------------------------------------------------------- what to do


def grows(result: Result) -> str:
    """Return a sentence on K3 that grows over the steps, and on the mean reward that falls."""
    grown = growth(result)
    if grown is None:
        return ""
    first, last = grown.thirds
    changes = f"the median K3 rises from {rounded(first)} to {rounded(last)}"
    if grown.reward is not None:
        before, after = map(rounded, grown.reward)
        changes += f" and the mean reward falls from {before} to {after}"
    verb = "collapses" if grown.reward is not None and last > MERGE else "grows"
    return f"It {verb}: from the first third of the steps to the last, {changes}."


def what_to_do(result: Result, given: Recommendation) -> Iterator[Fact]:
    """Yield the correction, why, what it does to this dump, its configurations; and how sure that is."""
    grown, method, open_ = growth(result), given.method or "", result.undecided
    step = grown.since if grown else None
    steps = ["measure first"] if open_ else []
    steps += [f"resume from before step {step}"] if step else []
    when = "until the cause is known, " if open_ else "then " if step else ""
    steps.append(f"{when}use {given.title}" if given.title else given.decision)

    reasons, lines = list[str](), [given.sentence] if given.title else []
    if grown and step:
        perhaps = f" (perhaps from step {grown.perhaps_since})" if grown.perhaps_since != step else ""
        reasons.append(f"From step {step} on K3 is above {MERGE:g}{perhaps}.")
        reasons += [SMALLER] if grew(result) else []
    reasons += [] if given.title else [given.sentence]
    numbers = result.preset(method)
    if given.title and "ess_tokens" in numbers:
        cut = numbers.get("truncated_high", Number())
        truncated = f" and truncates {formatted(cut).value} of the tokens" if cut.value else ""
        reasons.append(
            f"The correction leaves an ESS of {formatted(numbers['ess_tokens']).value}{truncated}."
        )
    causes = result.diagnosis.causes if result.diagnosis else []
    source = next((one.fix for one in causes if one.kind == "honest" and one.fix), "")
    if given.title and source and SMALLER not in reasons:
        reasons.append(sentence(f"At the source: {source}"))

    if method in result.presets:
        lines.append(f"As a rule: {result.presets[method].method}, where r = π_train / π_rollout of a token.")
    lines += [f"As a preset: `offpol-diag presets {method}`"] if method else []
    heading, found = "; ".join(steps), " ".join(reasons)
    heading = heading[0].upper() + heading[1:]
    weights, configs = _weights(result, given), _configs(result, given)
    yield Fact("What to do", found, heading, tuple(map(Line, lines)), weights, configs)
    if given.decision in ("no correction needed", METHOD) and not open_:
        unknown = "Not known: how far the gradient is off without a correction. A dump holds no gradients."
        heading = "Known from simulations and training runs, not from this dump"
        yield Fact("How sure", given.source, heading, (Line(unknown),))


WEIGHTS = {
    "ess_tokens": "ess_tokens",
    "ess_sequences": "ess_sequences",
    "weight_mean": "mean_ratio",
    **dict.fromkeys(("weight_max", "truncated_high", "tokens_rejected", "sequences_dropped"), ""),
}
"""Number of a preset → the number of the dump that it is without a correction, if there is one."""


def _weights(result: Result, given: Recommendation) -> Table | None:
    """Return the weights without correction and under the method, where known."""
    own = result.preset(given.method or "")
    if not given.title or not own:
        return None
    pairs = {name: (result.main(raw) if raw else None, own.get(name)) for name, raw in WEIGHTS.items()}
    rows = [(title(name), *pair) for name, pair in pairs.items() if any(one and one.value for one in pair)]
    return Table("weights", "Weights before and after", ("on this dump", "uncorrected", given.title), rows)


def _configs(result: Result, given: Recommendation) -> tuple[tuple[str, str], ...]:
    """Return the recommendation for each trainer that can say it: that of --for, the dump's, all others."""
    known, own = catalogue.load(), named_in(result.dump.provenance)
    if not given.method or given.method not in known:
        return ()
    policy = MainGap(result).policy
    found = {name: prescribed(given, name, policy) for name in trainers_for(known[given.method])}
    ranked = sorted(found.items(), key=lambda one: (one[1] != given.config, one[0] != own))
    return tuple((name, text) for name, text in ranked if text)


# ---------------------------------------------------------------- a cause, without a dump

KINDS = {
    "logged": "a bug: the numbers are logged wrongly",
    "sampled": "a bug: tokens were sampled from another distribution than the logged one",
    "model": "a bug: the two sides compute different models",
    "weights": "a bug: the two sides hold different weights",
    "honest": "an honest mismatch",
}
"""Kind of a cause → whether it is a bug, and of what."""


def explained(cause: KnownCause) -> Iterator[str | Table]:
    """Yield what it looks like, known threads, how to confirm it, how to fix it, and what looks alike."""
    from offpol_diag.diagnosis.cause import TRAINERS  # which imports numpy

    rows = [("looks like", cause.looks)]
    for one in cause.threads:
        why = f" Cause: {one.cause}." if one.cause else ""
        rows.append(("known from", f"{', '.join(one.at)}: {one.symptom}.{why}"))
    rows.append(("to confirm", filled(cause, cause.confirm)))
    rows += [(f"in {TRAINERS[name]}", text) for name, text in cause.settings.items()]
    rows.append(("fix", filled(cause, cause.fix)))
    rows += [("looks alike", f"{name}: {what}") for name, what in cause.apart.items()]
    yield f"{cause.id}: {cause.title}"
    known = [(label, text.replace("`", "")) for label, text in rows if text]
    yield Table(cause.id, "", ("kind", KINDS[cause.kind]), known)


def filled(cause: KnownCause, text: str) -> str:
    """Return a text of a cause as a sentence, with words for what a dump would fill in."""
    return sentence(text.format_map(defaultdict(str, cause.blanks)))


def every_cause() -> Iterator[str | Table]:
    """Yield the list of causes."""
    from offpol_diag.diagnosis.registry import CAUSES

    yield f"{len(CAUSES)} causes of a mismatch; `{EXPLAIN} CAUSE` explains one."
    yield Table("causes", "", ("cause", "kind", "what it is"), [(x.id, x.kind, x.title) for x in CAUSES])
