"""What to do about a mismatch, and how sure that is: the recommendation in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from statistics import median

from offpol_diag.advice.prescription import expressible, prescribed
from offpol_diag.metrics import title
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, rounded, say, written
from offpol_diag.presets.candidates import DEFAULT, NOTHING
from offpol_diag.presets.tuning import command
from offpol_diag.report.answer import Fact, Line
from offpol_diag.report.diagnosis import capital, grew, lower, sentence
from offpol_diag.report.tiles import curve
from offpol_diag.result import MARGIN, Cause, Diagnosis, Recommendation, Result
from offpol_diag.table import Table
from offpol_diag.trainers import TRAINERS, named_in

GROWN = 5.0
"""Factor between the first and last third of the steps from which K3 is said to grow, as in the alert."""
MERGE, ALIGNED = 0.015, 0.001
"""Bounds proposed for the gate: that of a merge, and the one of a dense model where this dump is below it."""
SMALLER = (
    "Make updates smaller: a lower learning rate, fewer epochs per batch, fewer steps between weight syncs."
)
ALONE = "A correction alone does not save the run."
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
"""Rows of the table of weights under the method, the runner-up and no correction."""
LABELS = {
    "default": "The default: no alternative has a measurably lower estimated error.",
    "measured": "Measured on this dump: no alternative has a measurably lower estimated error.",
    "no difference detected": "No method has a measurably lower estimated error than no correction.",
}
UNRANKED = {
    "default": "The default: estimated errors could not be compared on this dump.",
    "measured": "Measured on this dump, but not by estimated errors, which could not be compared.",
    "no difference detected": "Estimated errors could not be compared on this dump.",
}
"""Label of the recommendation → how sure it is, where no alternative is ahead, and where none is ranked."""


def what_to_do(summary: Result, given: Recommendation, causes: list[Cause]) -> Fact:
    """Return the correction, why, what it changes on this dump, and its configuration for each trainer."""
    open_, named = summary.undecided, given.method in summary.presets and not given.settings
    rule = summary.presets[given.method].method if named and given.method else ""
    asked = command(given.method, given.settings) if given.method else ""
    lines = (
        Line(_why(given, open_, _before(summary))),
        Line(rule and f"As a rule: {rule}, where r = π_train / π_rollout of a token."),
        Line(asked and f"As a preset: `{asked}`"),
    )
    return Fact(
        "What to do",
        _remedy(summary, given, causes),
        _action(summary, given, open_ is not None),
        tuple(one for one in lines if one.text),
        table=_weights(summary, given),
        code=_configs(summary, given),
        shortened="last",
    )


def how_sure(given: Recommendation) -> Fact:
    """Return how the decision was made, what is measured against it, and what is not known."""
    sure = certainty(given)
    unknown = [line for line in given.unknown if "needs" in line] if sure else []
    said = " ".join([*sure, *(f"Not known: {lower(line)}" for line in unknown[:1])])
    return Fact("How sure", said, "How sure?", tuple(map(Line, (*sure, *_reasons(given)))))


def growth(summary: Result) -> str:
    """Return a sentence on a collapse: K3 that grows over the steps, and the mean reward that falls."""
    known = [(key, value) for key, value, _ in curve(summary, "k3") if value is not None]
    third = len(known) // 3
    if not third:
        return ""
    first, last = (median(v for _, v in part) for part in (known[:third], known[-third:]))
    if last <= max(GROWN * first, 1e-4):
        return ""
    rewards = [one.value for one in curve(summary, "reward") if one.value is not None]
    fell = len(rewards) > 1 and rewards[-1] < rewards[0] - 0.5 * abs(rewards[0])
    word = "It collapses" if fell and last > MERGE else "It grows"
    (a, low), (b, high) = known[0], known[-1]
    rises = f"{word}: K3 rises from {rounded(low)} (step {a}) to {rounded(high)} (step {b})"
    if high < GROWN * low:  # the first or the last step is unlike its third
        rises = f"{word}: the median K3 of the steps rises from {rounded(first)} (first third)"
        rises += f" to {rounded(last)} (last third)"
    ends = (
        f", while the mean reward falls from {rounded(rewards[0])} to {rounded(rewards[-1])}" if fell else ""
    )
    return f"{rises}{ends}."


def _last_good(summary: Result) -> tuple[str, str]:
    """Return where K3 goes above the merge gate for good; empty where it does not, or is from the first step.

    Returns:
        The first step from which on its whole interval is above the gate, and from which on its value is.
    """
    known = curve(summary, "k3")
    if not growth(summary):
        return "", ""
    steps = summary.charts.steps
    names = [str(one) for one in steps.first] if steps else [one.step for one in known]
    sure = _beyond(names, [one.interval[0] if one.interval else one.value for one in known])
    likely = _beyond(names, [one.value for one in known])
    return ("", "") if sure == names[0] else (sure, likely)


def _beyond(names: list[str], values: list[float | None]) -> str:
    """Return the first step from which on all values are above the merge gate."""
    ends = zip(reversed(names), reversed(values), strict=True)
    above = [name for name, _ in takewhile(lambda end: end[1] is not None and end[1] > MERGE, ends)]
    return above[-1] if above else ""


def _before(summary: Result) -> str:
    """Return what a run whose K3 grows needs before a correction: the last good step, and smaller updates."""
    sure, likely = _last_good(summary)
    if not sure:
        return ""
    perhaps = f" (perhaps from step {likely})" if likely != sure else ""
    said = f"Resume from before step {sure}: from there K3 is above {MERGE:g}{perhaps}."
    return f"{said} {SMALLER}" if grew(summary) else said


def _action(summary: Result, given: Recommendation, open_: bool) -> str:
    if open_ and given.title:
        return f"Measure first; until the cause is known, {given.title}"
    at = f"{given.method} at {given.threshold}" if given.threshold else given.method
    named, step = given.title or at, _last_good(summary)[0]
    if step and named:
        return f"Resume from before step {step}, then use {named}"
    return f"Use {named}" if named else given.decision[:1].upper() + given.decision[1:]


def _why(given: Recommendation, open_: Diagnosis | None, before: str) -> str:
    """Return why it is recommended, after what comes first: a measurement, or an earlier step."""
    first = f"First: {lower(open_.decide)}" if open_ and open_.decide else ""
    return " ".join(filter(None, (first, before, before and ALONE, given.sentence)))


def _effect(summary: Result, given: Recommendation) -> str:
    """Return what the method changes on this dump: ESS, and the tokens that it truncates or leaves out.

    A raw ESS that is unreliable is no measure of what the method gains.
    """
    numbers = given.numbers.get(given.title or "", {})
    raw = summary.whole.get(f"{summary.prefix}ess_tokens", Number())
    cut, weighted = (numbers.get(name, Number()) for name in ("truncated_high", "tokens_weighted"))
    parts = []
    if "ess_tokens" in numbers:
        before = f"{written(raw).value} → " if raw.known and not doubted(raw) else ""
        parts.append(f"ESS {before}{written(numbers['ess_tokens']).value}")
    if weighted.value is not None and weighted.value < 1:
        parts.append(f"{written(weighted).value} of the tokens with a weight")
    elif cut.value:
        parts.append(f"{written(cut).value} truncated")
    return ", ".join(parts)


def _weights(summary: Result, given: Recommendation) -> Table | None:
    """Return the weights without correction, under the method and under the runner-up, where known."""
    if not given.title or given.title not in given.numbers:
        return None
    names = [name for name in (given.title, given.runner_up or "") if name in given.numbers]
    known, prefix = summary.whole, summary.prefix
    ess = {key: known.get(prefix + key) for key in ("ess_tokens", "ess_sequences")}
    raw = {**ess, "weight_mean": known.get(f"{prefix}mean_ratio")}
    columns: list[Mapping[str, Number | None]] = [raw, *(given.numbers[name] for name in names)]
    rows = [(title(key), *(column.get(key) for column in columns)) for key in WEIGHTS]
    some = [row for row in rows if any(one and one.value for one in row[1:] if not isinstance(one, str))]
    return Table("weights", "Weights before and after", ("on this dump", "uncorrected", *names), some)


def _configs(summary: Result, given: Recommendation) -> tuple[tuple[str, str], ...]:
    """Return the recommendation in the syntax of each trainer that can say it.

    That of --for comes first, then the dump's own.
    """
    if not given.method:
        return ()
    own = trainer_of(summary)
    known = [name for name in TRAINERS if expressible(given.method, given.settings, name)]
    found = [(name, prescribed(given, name) or "") for name in known]
    asked = next((name for name, text in found if text == given.config), own)
    if given.config and not any(text == given.config for _, text in found) and own not in known:
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


def tie(given: Recommendation) -> list[str]:
    """Return a sentence on the runner-up, or on the default beside no correction: a toss-up, or not.

    There is none if its error is lower, which `ahead` says.
    """
    other = given.runner_up or (DEFAULT.title if given.decision == "no correction needed" else "")
    found = next((one for one in given.ranking if one.title == other and one.behind), None)
    if found is None or found.behind is None or found.behind.interval is None:
        return [f"The runner-up is {other}."] if given.runner_up else []
    low, high = found.behind.interval
    if found.ahead:
        return []
    if found.tie and max(-low, high) <= MARGIN:
        return [f"A toss-up with {other}, whose estimated error is within {MARGIN:.0%}: so the simpler one."]
    if found.tie:
        return [f"A toss-up with {other}, whose estimated error is {_by(found.behind)}: so the simpler one."]
    return [f"The estimated error of {other} is {_by(found.behind)}."]


def certainty(given: Recommendation) -> tuple[str, ...]:
    """Return how the decision was made, what is measured against it, and how the runner-up stands."""
    compared = any(one.behind and one.behind.interval for one in given.ranking)
    stands = ahead(given) or (LABELS if compared else UNRANKED).get(given.label or "", "")
    return tuple(filter(None, (stands, *tie(given))))


def ahead(given: Recommendation) -> str:
    """Return a sentence on the alternatives whose estimated error is measurably lower; empty without."""
    found = [(one.title, one.behind) for one in given.ranking if one.ahead and one.behind]
    chosen = given.title or NOTHING.title
    why = f"; {chosen} is advised all the same{f', because {given.despite}' if given.despite else ''}."
    if not found:
        return ""
    if len(found) == 1:
        ((name, behind),) = found
        size = _by(behind)
        if name == NOTHING.title:
            return f"Without a correction the estimated error is {size}{why}"
        article = "an" if re.match(r"8|1[18](\D|$)", size) else "a"
        return f"{capital(name)} has {article} {size} estimated error{why}"
    every = ", ".join(f"{name} ({_by(behind).removesuffix(' lower')})" for name, behind in found)
    return f"Estimated errors that are measurably lower: {every}{why}"


def _by(number: Number) -> str:
    """Return a difference of errors in words: 3.1% [1.6%, 4.5%] higher."""
    value, ends = number.value or 0.0, number.interval or (0.0, 0.0)
    low, high = sorted(ends) if value >= 0 else sorted(-end for end in ends)
    size = say(replace(number, value=abs(value), interval=(low, high)))
    return f"{size} {'higher' if value >= 0 else 'lower'}"


def _reasons(given: Recommendation) -> tuple[str, ...]:
    """Return the reasons, what is not known, the longest response and who set the rule."""
    longest = given.longest_response
    usable = longest and (longest.unknown if longest.value is None else f"{say(longest)} tokens")
    limit = f"Longest response at which importance sampling of whole sequences keeps 10% ESS: {usable}"
    sources = dict.fromkeys(one.source for one in given.fired if one.rule == given.rule and one.source)
    return (
        *given.reasons,
        *(f"Not known: {lower(line)}" for line in given.unknown),
        *((limit,) if usable else ()),
        *(f"Source: {source}" for source in sources),
    )


def _remedy(summary: Result, given: Recommendation, causes: list[Cause]) -> str:
    """Return the correction, what it changes, and the fix at the source."""
    before, effect = _before(summary), _effect(summary, given)
    if summary.undecided:
        harm = f"Until the cause is known, {given.title} limits the harm{f': {effect}' if effect else ''}"
        said = sentence(harm) if given.title else given.sentence
        return " ".join(filter(None, ("Measure first.", before, said)))
    fix = next((one.fix for one in causes if one.kind == "honest" and one.fix), "")
    also = f" At the source: {lower(sentence(fix))}" if fix else ""
    if not given.title:
        label = {"no correction needed": "No correction is needed. "}.get(given.decision, "")
        said = f"{label}{given.sentence}" + (also if given.decision == "no method helps" else "")
        return f"{before} {said}".strip()
    if before:
        then = f"Then {given.title}{f' ({effect})' if effect else ''}: alone it does not save the run."
        return f"{before} {then}{'' if grew(summary) else also}"
    small = summary.diagnosis is not None and summary.diagnosis.verdict == "healthy"
    why = f" {given.sentence}" if effect and small else ""  # although the mismatch is small
    return f"{capital(given.title)}: {sentence(effect or given.sentence)}{why}{also}"


def trainer_of(summary: Result) -> str:
    """Return the trainer that the dump's metadata names; empty if it names none that is known."""
    return named_in(summary.dump.provenance)
