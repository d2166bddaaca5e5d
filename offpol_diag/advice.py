"""Recommendation of a correction, if any: the first rule of an ordered table whose condition holds decides.

A bug is fixed first, policies that agree need nothing, and where most tokens differ nothing helps. A run
whose mismatch keeps growing is resumed from before that; in that and every other case the correction is token
TIS at 2.0: where the true gradient is known no rule that looks further was better. What methods of other
families do stands beside it, for a reader to choose. Published thresholds are alerts, each with its source.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, median
from typing import Literal

from offpol_diag.diagnosis.numbers import (
    FEWEST_GROUPS,
    FEWEST_SEQUENCES,
    FEWEST_TOKENS,
    HEALTHY_K3,
    SAMPLES,
    Evidence,
)
from offpol_diag.errors import ConfigError
from offpol_diag.metrics import METRICS, crossed
from offpol_diag.presets import Policy, catalogue
from offpol_diag.presets.catalogue import FAMILIES
from offpol_diag.presets.words import method
from offpol_diag.result import Decision, Fired, Recommendation, Result
from offpol_diag.result.steps import Point, curve

DEFAULT, THRESHOLD = "token TIS at 2.0", "2.0"
"""The first preset of `FAMILIES` in words, and its threshold."""
NOTHING: Mapping[Policy, str] = {"old": "recompute", "current": "ppo_is"}
"""Numerator of the main drift → the preset without a correction."""
ALIGNED_K3 = 1e-6
"""K3 of policies that agree to rounding, whatever the diagnosis: slime and vLLM × TorchTitan gate at it."""
MOST_TOKENS = 0.5
"""Share of tokens that differ by more than a factor of 2 from which on no weight helps."""
GROWN, LEAST = 5.0, 1e-4
"""K3 grows if its median over the last third of the steps is above this times the first third's, and this."""
MERGE = 0.015
"""K3 above which prime-rl merges no new model; a run that stays above it is resumed from before."""
HALF = 0.5
"""Share of itself by which a mean reward must fall to be called a collapse."""
SIMULATED = "In 117 simulated regimes with a known gradient nothing beat token TIS at 2.0 by more than 0.1%."
RUNS = "In whole runs every correction lasted longer than none"

# ---------------------------------------------------------------- K3 that grows


@dataclass(frozen=True)
class Growth:
    """K3 grows over the steps of a dump.

    Attributes:
        ends: K3 at the first step and at the last.
        thirds: median K3 of the first third of the steps and of the last.
        reward: the mean reward of both thirds where it collapses, else None.
        surely: the first step from which on the interval of K3 is above `MERGE`; None where there is none, or
            where it is the first step of the dump.
        perhaps: the same of its value.
    """

    ends: tuple[Point, Point]
    thirds: tuple[float, float]
    reward: tuple[float, float] | None
    surely: str | None
    perhaps: str | None


def growth(summary: Result) -> Growth | None:
    """Return how K3 grows over the steps; None where it does not, or there are fewer than three."""
    points = curve(summary, "k3")
    known = [(one, one.value) for one in points if one.value is not None]
    third = len(known) // 3
    if not third:
        return None
    first, last = (median(value for _, value in part) for part in (known[:third], known[-third:]))
    if last <= max(GROWN * first, LEAST):
        return None
    steps = summary.charts.steps
    names = [str(one) for one in steps.first] if steps else [one.step for one in points]

    def above(values: Sequence[float | None]) -> str | None:
        """Return the first step from which on all values are above the merge gate."""
        backwards = zip(reversed(names), reversed(values), strict=True)
        found = [name for name, _ in takewhile(lambda end: end[1] is not None and end[1] > MERGE, backwards)]
        return found[-1] if found else None

    surely = above([one.interval[0] if one.interval else one.value for one in points])
    perhaps = above([one.value for one in points])
    if surely == names[0]:
        surely = perhaps = None
    return Growth((known[0][0], known[-1][0]), (first, last), _collapse(summary), surely, perhaps)


def _collapse(summary: Result) -> tuple[float, float] | None:
    """Return the mean reward of both thirds, if it falls by half and beyond its intervals.

    A step whose rewards are all equal has an interval of no width, and counts with the widest.
    """
    known = [(one.value, one.interval) for one in curve(summary, "reward") if one.value is not None]
    third = len(known) // 3
    if not third:
        return None
    widest = max(((high - low) / 2 for low, high in (ends for _, ends in known if ends)), default=math.inf)
    means, margins = [], []
    for part in (known[:third], known[-third:]):
        halves = [(ends[1] - ends[0]) / 2 if ends and ends[1] > ends[0] else widest for _, ends in part]
        means.append(fmean(value for value, _ in part))
        margins.append(math.hypot(*halves) / third)
    (first, last), (above, below) = means, margins
    fell = last < first - HALF * abs(first) and last + below < first - above
    return (first, last) if fell else None


# ---------------------------------------------------------------- rules


@dataclass(frozen=True)
class Rule:
    """One rule of the recommendation, or one alert.

    Attributes:
        name: short, stable id.
        holds: the condition.
        saw: names of the metrics to report, or a function that returns name → value.
        sentence: text for the user.
        source: what it rests on: the origin of a threshold, and the regime it applies to.
        decision: the decision; None for an alert.
    """

    name: str
    holds: Callable[[Evidence], bool]
    saw: tuple[str, ...] | Callable[[Evidence], dict[str, float | None]]
    sentence: str
    source: str
    decision: Decision | None = None

    def fired(self, seen: Evidence) -> Fired:
        """Return that the rule holds, with the numbers it saw."""
        names = () if callable(self.saw) else self.saw
        saw = {seen.prefix + name: seen.number(name).value for name in names}
        saw = self.saw(seen) if callable(self.saw) else saw
        level: Literal["decision", "alert"] = "decision" if self.decision else "alert"
        return Fired(rule=self.name, level=level, sentence=self.sentence, saw=saw, source=self.source)


def _held(seen: Evidence) -> dict[str, float | None]:
    dump = seen.summary.dump
    groups = dump.groups if "group_id" in dump.columns else None
    return {"groups": groups, "sequences": dump.sequences, "tokens": dump.tokens}


def _thirds(seen: Evidence) -> dict[str, float | None]:
    grown = growth(seen.summary)
    words = ("first third, median k3", "last third, median k3")
    return dict(zip(words, grown.thirds, strict=True)) if grown else {}


def _verdict(seen: Evidence) -> str:
    return seen.summary.diagnosis.verdict if seen.summary.diagnosis else ""


def _healthy(seen: Evidence) -> bool:
    k3, verdict = seen.value("k3"), _verdict(seen)
    return k3 < ALIGNED_K3 or verdict == "healthy" or (k3 < HEALTHY_K3 and verdict != "cannot_tell")


def _collapses(seen: Evidence) -> bool:
    grown = growth(seen.summary)
    return grown is not None and grown.surely is not None


RULES = (
    Rule(
        "bug",
        lambda seen: _verdict(seen) == "bug",
        ("mean_ratio", "k1", "k3"),
        "Fix it before choosing a correction: what a correction does to wrong numbers says little of what it "
        "does to the right ones.",
        "E_rollout[r] = 1 and k1 ≥ 0 hold for any honest mismatch",
        "fix the bug first",
    ),
    Rule(
        "few",
        lambda seen: seen.few,
        _held,
        f"Too little data to choose a method: at least {FEWEST_GROUPS} groups (prompts), {FEWEST_SEQUENCES} "
        f"sequences and {FEWEST_TOKENS:,} tokens are needed; without a column group_id, which says what rows "
        f"share a prompt, {FEWEST_GROUPS * SAMPLES} sequences.",
        "bootstrap over groups",
        "not enough data",
    ),
    Rule(
        "identical",
        lambda seen: seen.value("log_ratio_min") == 0.0 == seen.value("log_ratio_max"),
        ("log_ratio_min", "log_ratio_max"),
        "The same numbers twice: was one column copied from the other? Check what is logged; if both engines "
        "really agree to the last bit, no correction is needed.",
        "two engines that compute apart do not agree exactly at every token",
        "not enough data",
    ),
    Rule(
        "unknown",
        lambda seen: seen.number("k3").value is None,
        (),
        "The mismatch of this dump could not be measured.",
        "",
        "not enough data",
    ),
    Rule(
        "healthy",
        _healthy,
        ("k3", "f_2"),
        "A usual token differs as little as rounding makes it: a correction has little to mend.",
        "Simulated with a known gradient, below a K3 of 0.001: updates without a correction were 98% as well "
        "aligned with it as those of the best correction, with token TIS at 2.0 99.5%.",
        "no correction needed",
    ),
    Rule(
        "hopeless",
        lambda seen: seen.value("f_2") > MOST_TOKENS,
        ("f_2", "k3"),
        "Most tokens differ by more than a factor of 2: no weight mends that. Change the source of the drift "
        "(weight sync, precision, replay).",
        "a share of tokens, which no single outlier moves",
        "no method helps",
    ),
    Rule(
        "undecided",
        lambda seen: seen.summary.undecided is not None,
        ("k3", "f_2"),
        "This limits the harm until the cause is known, and mends nothing: several causes fit this dump. "
        "Measure first what decides between them.",
        SIMULATED,
        "METHOD at THRESHOLD",
    ),
    Rule(
        "collapse",
        _collapses,
        _thirds,
        "A correction alone does not save the run.",
        f"{RUNS}, and none saved a run whose mismatch kept growing. In a public run of 200 steps KL rose 25 "
        "steps before the reward fell.",
        "METHOD at THRESHOLD",
    ),
    Rule(
        "default",
        lambda seen: True,
        ("k3", "f_2"),
        "The default: no other rule did better where the true gradient is known.",
        f"{SIMULATED} {RUNS}; a public run of 200 steps found token corrections no different from none.",
        "METHOD at THRESHOLD",
    ),
)

ALERTS = (
    Rule(
        "growing",
        lambda seen: growth(seen.summary) is not None,
        _thirds,
        "K3 grew more than 5-fold from the first third of the steps to the last",
        "Ring and LR-decay reports: growth is an optimisation symptom; corrections alone fail in long runs",
    ),
    Rule(
        "heavy tail",
        lambda seen: seen.number("ess_tokens").note is not None,
        ("khat_tokens",),
        "k̂ of tokens above its limit: means of the ratios are unreliable",
        "Vehtari et al. 2024: k̂ above min(1 − 1/log10 n, 0.7)",
    ),
)
"""Warnings that are no level of one number; those are in `metrics.py`."""


# ---------------------------------------------------------------- the recommendation


def advised(summary: Result, trainer: str | None = None) -> Result:
    """Add the recommendation to the summary, with the configuration of `trainer` if one is named."""
    given = recommend(summary)
    config = prescribed(given, trainer, Evidence(summary).policy) if trainer else None
    return summary.model_copy(update={"recommendation": given.model_copy(update={"config": config})})


def recommend(summary: Result) -> Recommendation:
    """Return the decision of the first rule that holds for a dump's numbers and diagnosis, and the alerts."""
    seen, shipped = Evidence(summary), catalogue.load()
    rule = next(rule for rule in RULES if rule.holds(seen))
    assert rule.decision is not None
    sentence, causes = rule.sentence, summary.diagnosis.causes if summary.diagnosis else []
    where = next((cause.where for cause in causes if cause.kind == "bug" and cause.where), "")
    if rule.name == "bug" and where:
        sentence += f" Until then, leave out the sequences with {where}."
    chosen, *others = FAMILIES[seen.policy] if rule.decision == "METHOD at THRESHOLD" else (None,)
    alerts = [alert.fired(seen) for alert in ALERTS if alert.holds(seen)] + levels(seen)
    shown = summary.presets  # a user's preset may have the name of one of ours
    as_shipped = [
        name
        for name in others
        if name in shown and not shown[name].needs and shown[name].method == method(shipped[name])
    ]
    return Recommendation(
        decision=rule.decision,
        title=chosen and DEFAULT,
        method=chosen,
        threshold=chosen and THRESHOLD,
        sentence=sentence,
        rule=rule.name,
        alternatives=as_shipped,
        fired=[rule.fired(seen), *alerts],
    )


def levels(seen: Evidence) -> list[Fired]:
    """Return the published warning levels that the numbers of the main pair of policies cross."""
    return [
        Fired(
            rule=level.name,
            level="alert",
            sentence=level.sentence,
            saw={seen.prefix + name: seen.number(name).value for name in (metric.name, level.beside) if name},
            source=level.source,
        )
        for metric in METRICS.values()
        for level in crossed(metric, seen.value(metric.name))
    ]


def prescribed(given: Recommendation, trainer: str, policy: Policy) -> str | None:
    """Return the configuration to paste, or a comment if the trainer cannot express it, or None.

    Args:
        given: a recommendation; the result is None if it names no method of this version.
        trainer: the trainer's own name (`trainers.trainer_named`).
        policy: the train policy of the dump.
    """
    from offpol_diag.trainers.translate import config_for  # a gate of a result needs no templates

    name = NOTHING[policy] if given.decision == "no correction needed" else given.method
    presets = catalogue.load()
    if name is None or name not in presets:
        return None
    try:
        return config_for(presets[name], trainer).text()
    except ConfigError as error:
        return f"# {error}\n"
