"""Recommendation of a correction, if any: the first rule that holds decides.

A bug is fixed first, policies that agree need nothing, a run whose mismatch keeps growing is resumed from
before that; else it is token TIS at 2.0: where the true gradient is known, no rule that looks further was
better. Methods of other families stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Final, NamedTuple

from offpol_diag.diagnosis import main_gap as least
from offpol_diag.diagnosis.main_gap import MainGap
from offpol_diag.errors import ConfigError
from offpol_diag.presets import Policy, catalogue
from offpol_diag.presets.catalogue import FAMILIES
from offpol_diag.result import Decision, Recommendation, Result, curve

METHOD: Final = "METHOD at THRESHOLD"
DEFAULT, THRESHOLD = "token TIS at 2.0", "2.0"
"""The first preset of `FAMILIES` in words, and its threshold."""
NOTHING: Mapping[Policy, str] = {"old": "recompute", "current": "ppo_is"}
"""Numerator of the main drift → the preset without a correction."""
ALIGNED_K3 = 1e-6
"""K3 of policies that agree to rounding, whatever the diagnosis: slime and vLLM × TorchTitan gate at it."""
GROWN, LEAST = 5.0, 1e-4
"""K3 grows if its median over the last third of the steps is above this times the first third's, and this."""
MERGE = 0.015
"""K3 above which prime-rl merges no new model; a run that stays above it is resumed from before."""
HALF = 0.5
"""Share of itself by which a mean reward must fall to be called a collapse."""
SIMULATED = "In 117 simulated regimes with a known gradient nothing beat token TIS at 2.0 by more than 0.1%."
RUNS = "In whole runs every correction lasted longer than none"


class Growth(NamedTuple):
    """How K3 grows over the steps of a dump.

    Attributes:
        thirds: median K3 of the first third of the steps and of the last.
        reward: the mean reward of both thirds where it collapses, else None.
        since: the first step from which on the interval of K3 is above `MERGE`; None where there is none, or
            where it is the first step of the dump.
        perhaps_since: the same of its value.
    """

    thirds: tuple[float, float]
    reward: tuple[float, float] | None
    since: str | None
    perhaps_since: str | None


def growth(summary: Result) -> Growth | None:
    """Return how K3 grows over the steps; None where it does not, or there are fewer than three."""
    points, steps = [*curve(summary, "k3").values()], summary.charts.steps
    known = [one.value for one in points if one.value is not None]
    third = len(known) // 3
    if not third or steps is None:
        return None
    first, last = median(known[:third]), median(known[-third:])
    if last <= max(GROWN * first, LEAST):
        return None

    def since(values: Sequence[float | None]) -> str | None:
        """Return the first step from which on all values are above the gate."""
        above = None
        for step, value in zip(reversed(steps.first), reversed(values), strict=True):
            if value is None or value <= MERGE:
                break
            above = str(step)
        return above

    surely = since([point.interval[0] if point.interval else point.value for point in points])
    perhaps = since([point.value for point in points])
    if surely == str(steps.first[0]):
        surely = perhaps = None
    return Growth((first, last), collapse(summary), surely, perhaps)


def collapse(summary: Result) -> tuple[float, float] | None:
    """Return the mean reward of both thirds, if it falls by half and beyond its intervals.

    A step whose rewards are all equal has an interval of no width, and counts with the widest.
    """
    known = [
        (x.value, x.interval or (0.0, 0.0)) for x in curve(summary, "reward").values() if x.value is not None
    ]
    third = len(known) // 3
    if not third:
        return None
    halves = [(high - low) / 2 for _, (low, high) in known]
    halves = [half or max(halves) or math.inf for half in halves]
    first, last = (fmean(value for value, _ in part) for part in (known[:third], known[-third:]))
    above, below = (math.hypot(*part) / third for part in (halves[:third], halves[-third:]))
    return (first, last) if last < first - HALF * abs(first) and last + below < first - above else None


class Rule(NamedTuple):
    """A rule: its id, the decision where it holds, that condition, the sentence, and what it rests on."""

    name: str
    decision: Decision
    holds: Callable[[MainGap], bool]
    sentence: str
    source: str = ""


def _is(seen: MainGap, verdict: str) -> bool:
    return seen.summary.diagnosis is not None and seen.summary.diagnosis.verdict == verdict


RULES = (
    Rule(
        "bug",
        "fix the bug first",
        lambda seen: _is(seen, "bug"),
        "Fix it before choosing a correction: what a correction does to wrong numbers says little of what it "
        "does to the right ones.",
    ),
    Rule(
        "few",
        "not enough data",
        lambda seen: seen.few,
        f"Too little data to choose a method: at least {least.FEWEST_GROUPS} groups (prompts), "
        f"{least.FEWEST_SEQUENCES} sequences and {least.FEWEST_TOKENS:,} tokens are needed; without a column "
        f"group_id, which says what rows share a prompt, {least.FEWEST_GROUPS * least.SAMPLES} sequences.",
    ),
    Rule(
        "identical",
        "not enough data",
        lambda seen: seen.value("log_ratio_min") == 0.0 == seen.value("log_ratio_max"),
        "The same numbers twice: was one column copied from the other? Check what is logged; if both engines "
        "really agree to the last bit, no correction is needed.",
    ),
    Rule(
        "unknown",
        "not enough data",
        lambda seen: seen.number("k3").value is None,
        "The mismatch of this dump could not be measured.",
    ),
    Rule(
        "healthy",
        "no correction needed",
        lambda seen: (
            seen.value("k3") < ALIGNED_K3
            or _is(seen, "healthy")
            or (seen.value("k3") < least.HEALTHY_K3 and not _is(seen, "cannot_tell"))
        ),
        "A typical token differs by no more than rounding: there is little to correct.",
        "Simulated with a known gradient, below a K3 of 0.001: uncorrected updates were 98% as well aligned "
        "with it as those of the best correction, and those under token TIS at 2.0 99.5%.",
    ),
    Rule(
        "undecided",
        METHOD,
        lambda seen: seen.summary.undecided is not None,
        "This limits the harm until the cause is known, and mends nothing: several causes fit this dump. "
        "Measure first what decides between them.",
        SIMULATED,
    ),
    Rule(
        "collapse",
        METHOD,
        lambda seen: (grown := growth(seen.summary)) is not None and grown.since is not None,
        "A correction alone does not save the run.",
        f"{RUNS}, and none saved a run whose mismatch kept growing. In a public run of 200 steps KL rose 25 "
        "steps before the reward fell.",
    ),
    Rule(
        "default",
        METHOD,
        lambda seen: True,
        "The default: no other rule did better where the true gradient is known.",
        f"{SIMULATED} {RUNS}; a public run of 200 steps found token corrections no different from none.",
    ),
)


def advised(summary: Result, trainer: str | None = None) -> Result:
    """Add the recommendation to the summary, with the configuration of `trainer` if one is named."""
    given = recommend(summary)
    config = prescribed(given, trainer, MainGap(summary).policy) if trainer else None
    return summary.model_copy(update={"recommendation": given.model_copy(update={"config": config})})


def recommend(summary: Result) -> Recommendation:
    """Return the decision of the first rule that holds; beside a method, those of other families."""
    seen, shown = MainGap(summary), summary.presets
    rule = next(rule for rule in RULES if rule.holds(seen))
    chosen, *others = FAMILIES[seen.policy] if rule.decision == METHOD else (None,)
    return Recommendation(
        decision=rule.decision,
        title=chosen and DEFAULT,
        method=chosen,
        threshold=chosen and THRESHOLD,
        sentence=rule.sentence,
        rule=rule.name,
        alternatives=[name for name in others if name in shown and not shown[name].needs],
        source=rule.source,
    )


def prescribed(given: Recommendation, trainer: str, policy: Policy) -> str | None:
    """Return the configuration to paste, or a comment if the trainer cannot express it.

    Args:
        given: a recommendation; the result is None if it names no method.
        trainer: the trainer's own name (`trainers.trainer_named`).
        policy: the train policy of the dump.
    """
    from offpol_diag.trainers.translate import config_for  # a gate of a result needs no templates

    name = NOTHING[policy] if given.decision == "no correction needed" else given.method
    if name is None:
        return None
    try:
        return config_for(catalogue.load()[name], trainer).text()
    except ConfigError as error:
        return f"# {error}\n"
