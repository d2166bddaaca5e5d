"""What to do about a mismatch, and what that rests on: the recommendation in words."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.advice import GROWN, MERGE, Growth, growth, prescribed
from offpol_diag.metrics import title
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, rounded, written
from offpol_diag.presets import catalogue
from offpol_diag.report.answer import Fact, Line
from offpol_diag.report.diagnosis import capital, grew, lower, sentence
from offpol_diag.result import Cause, Diagnosis, Recommendation, Result
from offpol_diag.table import Table
from offpol_diag.trainers import named_in
from offpol_diag.trainers.translate import sayable

ALIGNED = 0.001
"""Bound proposed for the gate of a dump that is below it; of any other it is `MERGE`."""
SMALLER = (
    "Make updates smaller: a lower learning rate, fewer epochs per batch, fewer steps between weight syncs."
)
WEIGHTS = (
    "ess_tokens",
    "ess_sequences",
    "weight_max",
    "weight_mean",
    "truncated_high",
    "truncated_low",
    "tokens_weighted",
    "tokens_rejected",
    "sequences_dropped",
)
"""Rows of the table of weights without a correction and under the method."""


def what_to_do(summary: Result, given: Recommendation, causes: list[Cause]) -> Fact:
    """Return the correction, why, what it changes on this dump, and its configuration for each trainer."""
    open_, grown = summary.undecided, growth(summary)
    rule = summary.presets[given.method].method if given.method in summary.presets else ""
    lines = (
        Line(_why(given, open_, _before(summary, grown))),
        Line(rule and f"As a rule: {rule}, where r = π_train / π_rollout of a token."),
        Line(f"As a preset: `offpol-diag presets {given.method}`" if given.method else ""),
    )
    return Fact(
        "What to do",
        _remedy(summary, given, causes, grown),
        _action(given, open_ is not None, grown),
        tuple(one for one in lines if one.text),
        table=_weights(summary, given),
        code=_configs(summary, given),
        shortened="last",
    )


def how_sure(given: Recommendation) -> Fact | None:
    """Return what the decision rests on, and what is not known; None where no correction was weighed up."""
    if given.decision not in ("no correction needed", "METHOD at THRESHOLD"):
        return None
    said = next(one.source for one in given.fired if one.level == "decision")
    return Fact("How sure", said, "How sure?", (Line(said), Line(NO_GRADIENT)))


NO_GRADIENT = "Not known: how far the gradient is off without a correction. A dump holds no gradients."


def grows(summary: Result) -> str:
    """Return a sentence on K3 that grows over the steps, and on the mean reward that falls."""
    grown = growth(summary)
    if grown is None:
        return ""
    (a, low, _), (b, high, _) = grown.ends
    first, last = grown.thirds
    word = "It collapses" if grown.reward and last > MERGE else "It grows"
    rises = f"{word}: K3 rises from {rounded(low)} (step {a}) to {rounded(high)} (step {b})"
    if (high or 0.0) < GROWN * (low or 0.0):  # the first or the last step is unlike its third
        rises = f"{word}: the median K3 of the steps rises from {rounded(first)} (first third)"
        rises += f" to {rounded(last)} (last third)"
    if grown.reward is None:
        return f"{rises}."
    before, after = map(rounded, grown.reward)
    return f"{rises}, while the mean reward falls from {before} (first third) to {after} (last third)."


def _before(summary: Result, grown: Growth | None) -> str:
    """Return what a run whose K3 grows needs before a correction: the last good step, and smaller updates."""
    if grown is None or grown.surely is None:
        return ""
    perhaps = f" (perhaps from step {grown.perhaps})" if grown.perhaps != grown.surely else ""
    said = f"Resume from before step {grown.surely}: from there K3 is above {MERGE:g}{perhaps}."
    return f"{said} {SMALLER}" if grew(summary) else said


def _action(given: Recommendation, open_: bool, grown: Growth | None) -> str:
    if open_ and given.title:
        return f"Measure first; until the cause is known, {given.title}"
    if grown and grown.surely and given.title:
        return f"Resume from before step {grown.surely}, then use {given.title}"
    return f"Use {given.title}" if given.title else capital(given.decision)


def _why(given: Recommendation, open_: Diagnosis | None, before: str) -> str:
    """Return why it is recommended, after what comes first: a measurement, or an earlier step."""
    first = f"First: {lower(open_.decide)}" if open_ and open_.decide else ""
    return " ".join(filter(None, (first, before, given.sentence)))


def _effect(summary: Result, given: Recommendation) -> str:
    """Return what the method changes on this dump: ESS, and the tokens that it truncates.

    A raw ESS that is unreliable is no measure of what the method gains.
    """
    numbers = summary.preset(given.method or "")
    raw = summary.number("ess_tokens")
    parts = []
    if "ess_tokens" in numbers:
        before = f"{written(raw).value} → " if raw.known and not doubted(raw) else ""
        parts.append(f"ESS {before}{written(numbers['ess_tokens']).value}")
    if numbers.get("truncated_high", Number()).value:
        parts.append(f"{written(numbers['truncated_high']).value} truncated")
    return ", ".join(parts)


def _weights(summary: Result, given: Recommendation) -> Table | None:
    """Return the weights without correction and under the method, where known."""
    own = summary.preset(given.method or "")
    if not given.title or not own:
        return None
    raw = {key: summary.number(key) for key in ("ess_tokens", "ess_sequences")}
    raw["weight_mean"] = summary.number("mean_ratio")
    columns: list[Mapping[str, Number]] = [raw, own]
    rows = [(title(key), *(column.get(key) for column in columns)) for key in WEIGHTS]
    some = [row for row in rows if any(one and one.value for one in row[1:] if not isinstance(one, str))]
    header = ("on this dump", "uncorrected", given.title)
    return Table("weights", "Weights before and after", header, some)


def _configs(summary: Result, given: Recommendation) -> tuple[tuple[str, str], ...]:
    """Return the recommendation in the syntax of each trainer that can say it.

    That of --for comes first, then the dump's own.
    """
    known = catalogue.load()
    if not given.method or given.method not in known:
        return ()
    from offpol_diag.diagnosis.numbers import Evidence  # which imports numpy

    own, policy = trainer_of(summary), Evidence(summary).policy
    found = [(name, prescribed(given, name, policy) or "") for name in sayable(known[given.method])]
    asked = next((name for name, text in found if text == given.config), own)
    if given.config and not any(text == given.config for _, text in found):
        found.insert(0, (own or "configuration", given.config))
    first = (asked, own)
    ranked = sorted(found, key=lambda one: first.index(one[0]) if one[0] in first else len(first))
    return tuple(one for one in ranked if one[1])


def forms(text: str) -> tuple[str, str]:
    """Split a configuration into its first form and all others, which begin with a comment each."""
    pieces = text.strip().split("\n\n# ")
    head = 2 if len(pieces) > 1 and all(line.startswith("#") for line in pieces[0].splitlines()) else 1
    first, others = "\n\n# ".join(pieces[:head]), "\n\n# ".join(pieces[head:])
    return first, f"# {others}" if others else ""


def _remedy(summary: Result, given: Recommendation, causes: list[Cause], grown: Growth | None) -> str:
    """Return the correction, what it changes, and the fix at the source."""
    before, effect = _before(summary, grown), _effect(summary, given)
    if summary.undecided:
        harm = f"Until the cause is known, {given.title} limits the harm{f': {effect}' if effect else ''}"
        said = sentence(harm) if given.title else given.sentence
        return " ".join(filter(None, ("Measure first.", before, said)))
    fix = next((one.fix for one in causes if one.kind == "honest" and one.fix), "")
    also = f" At the source: {lower(sentence(fix))}" if fix else ""
    if not given.title:
        label = {"no correction needed": "No correction is needed. "}.get(given.decision, "")
        return f"{before} {label}{given.sentence}".strip()
    if before:
        then = f"Then {given.title}{f' ({effect})' if effect else ''}."
        return f"{before} {then}{'' if grew(summary) else also}"
    return f"{capital(given.title)}: {sentence(effect or given.sentence)}{also}"


def trainer_of(summary: Result) -> str:
    """Return the trainer that the dump's metadata names; empty if it names none that is known."""
    return named_in(summary.dump.provenance)
