"""A preset taken apart: a translator takes what its trainer can say, and what is left over is refused.

So a part that nobody has thought of is never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NoReturn

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Loss, Policy, Preset, Reject, Statistic, Veto, Weight

Band = tuple[float | None, float | None]
LEVELS = {
    "token": "each token's ratio",
    "sum": "the product ratio of the sequence",
    "mean": "the geometric mean of the sequence",
    "segment": "the geometric mean of a turn",
    "max": "the largest token of the sequence",
    "min": "the smallest token of the sequence",
    "batch": "the whole batch",
}
NUMERATORS = {
    "old": "the recomputed π_old",
    "current": "π_θ against the rollout (bypass)",
    "rollout": "the rollout's own log-probs",
}
IDLE_LOW, IDLE_HIGH = 1e-9, 1e9
"""Bounds that a ratio whose logarithm is clamped to ±20 never reaches: e^20 = 4.9e8."""


def cannot(part: str) -> NoReturn:
    """Refuse, naming the part that cannot be said."""
    raise ConfigError(part)


class Parts:
    """A preset whose parts are taken one by one.

    Attributes:
        preset: as given.
        policy: numerator; `rollout` has become `current` without weights and rules, which is the same.
        weight: what is left of it.
        rules: what is left of them.
        veto: what is left of it.
    """

    def __init__(self, preset: Preset) -> None:
        preset = _settled(preset)
        self.preset = preset
        self.policy: Policy = preset.policy
        self.loss: Loss = preset.loss
        self.weight: Weight | None = preset.weight
        self.veto: Veto | None = preset.veto
        self.rules: list[Reject] = list(_independent(preset))

    @property
    def bare(self) -> bool:
        """Whether nothing is left to say."""
        return self.weight is None and not self.rules and self.veto is None

    def need(self, policies: Sequence[Policy], losses: Sequence[Loss]) -> None:
        """Refuse another numerator or loss."""
        if self.policy not in policies:
            cannot(f"ratios of {NUMERATORS[self.policy]}")
        if self.loss not in losses:
            cannot(f"the loss {self.loss}")

    def take_weight(
        self,
        *overs: str,
        actions: Sequence[str] = ("truncate", "none"),
        lower: bool = False,
        normalize: bool = False,
    ) -> Weight | None:
        """The weight, if the trainer has its level and action; `none` loses the bounds it counts with."""
        found = self.weight
        if found is None:
            return None
        _check_weight(found, overs, actions, lower, normalize)
        self.weight = None
        return replace(found, upper=None, lower=None) if found.action == "none" else found

    def take_band(self, over: str) -> Band | None:
        """The bounds inside which the raw ratio is the weight and outside which nothing counts, if any.

        Either a weight of action mask, or a rule over the same level that leaves truncation idle.
        """
        weight = self.weight
        if weight is None or weight.over != over or weight.normalize or weight.strict:
            return None
        if weight.action == "mask":
            self.weight = None
            return (weight.lower, weight.upper)
        rule = self._find("ratio", over)
        if rule is None or not _within(rule, weight):
            return None
        self.weight = None
        self.rules.remove(rule)
        return (rule.lower, rule.upper)

    def split_mask(self) -> None:
        """A weight that is 0 outside its bounds becomes the raw ratio and a rule with those bounds."""
        weight = self.weight
        if weight is not None and weight.action == "mask" and not weight.normalize:
            rule = Reject("ratio", weight.over, weight.lower, weight.upper, strict=weight.strict)
            self.rules.insert(0, replace(rule, safety=weight.safety, safety_at=weight.safety_at))
            self.weight = replace(weight, action="none", lower=None, upper=None, strict=False)

    def drop_idle(self) -> None:
        """A truncation that a rule over the same level leaves nothing to do becomes the raw ratio."""
        weight = self.weight
        rule = self._find("ratio", weight.over) if weight is not None and not weight.normalize else None
        if weight is not None and rule is not None and _within(rule, weight):
            self.weight = replace(weight, action="none", lower=None, upper=None)

    def take(
        self, statistic: Statistic, over: str, sides: Literal["both", "upper"] = "both"
    ) -> Reject | None:
        """A rule on this statistic, whoever's advantage it is of, if there is one with those bounds."""
        found = self._find(statistic, over)
        if found is None or (sides == "upper" and found.lower is not None):
            return None
        self.rules.remove(found)
        return found

    def take_opsm(self) -> float | None:
        """The bound, in nats per token, of a mask on sequences of negative advantage against π_θ."""
        for rule in self.rules:
            right = (rule.statistic, rule.over, rule.advantage, rule.lower) == (
                "k1",
                "mean",
                "negative",
                None,
            )
            if right and (rule.policy or self.policy) == "current" and not _odd(rule, policy=False):
                self.rules.remove(rule)
                return rule.upper
        return None

    def take_veto(self, upper: bool = False) -> Veto | None:
        """The veto, refused if it has a bound on large ratios that the trainer lacks."""
        found = self.veto
        if found is not None and found.upper is not None and not upper:
            cannot("a veto on large ratios")
        self.veto = None
        return found

    def _find(self, statistic: str, over: str) -> Reject | None:
        plain = (rule for rule in self.rules if rule.advantage == "any" and not _odd(rule))
        return next((rule for rule in plain if (rule.statistic, rule.over) == (statistic, over)), None)

    def finish(self) -> None:
        """Refuse what nobody has taken."""
        if self.weight is not None:
            cannot(_weight_words(self.weight))
        if self.rules:
            cannot(_rule_words(self.rules[0], self.policy))
        if self.veto is not None:
            cannot("a veto on one token")
        if not self.preset.apply:
            cannot("numbers that are logged and not applied")


def _settled(preset: Preset) -> Preset:
    """With the rollout's log-probs on both sides r is 1: weights are 1 and nothing is rejected."""
    if preset.policy != "rollout":
        return preset
    return replace(preset, policy="current", weight=None, reject=(), veto=None)


def _independent(preset: Preset) -> tuple[Reject, ...]:
    """`among = left` is `all` where no rule on tokens comes first: a veto leaves sequences whole or empty."""
    if any(rule.on_tokens for rule in preset.reject):
        return preset.reject
    return tuple(replace(rule, among="all") for rule in preset.reject)


def _odd(rule: Reject, policy: bool = True) -> bool:
    """Whether a rule has a turn that a plain key cannot mean."""
    return rule.strict or rule.among == "left" or (policy and rule.policy is not None)


def _within(rule: Reject, weight: Weight) -> bool:
    """Whether what a rule keeps is never truncated."""
    if weight.action == "none":
        return True
    high = weight.upper is None or (rule.upper is not None and rule.upper <= weight.upper)
    low = weight.lower is None or (rule.lower is not None and rule.lower >= weight.lower)
    return weight.action == "truncate" and high and low


def _check_weight(
    found: Weight, overs: Sequence[str], actions: Sequence[str], lower: bool, normalize: bool
) -> None:
    if found.over not in overs or found.action not in actions or found.strict:
        cannot(_weight_words(found))
    if found.normalize and not normalize:
        cannot("weights divided by their batch mean")
    if found.action == "truncate" and found.lower is not None and not lower:
        cannot("a lower bound of the truncated weight")


def _weight_words(weight: Weight) -> str:
    action = {
        "truncate": "truncated",
        "mask": "zeroed outside their bounds",
        "none": "untruncated",
        "psis": "Pareto-smoothed",
    }[weight.action]
    strict = " (strictly)" if weight.strict else ""
    return f"weights of {LEVELS[weight.over]}, {action}{strict}"


def _rule_words(rule: Reject, policy: str) -> str:
    sign = "" if rule.advantage == "any" else f" with a condition on the advantage ({rule.advantage})"
    own = f" of {NUMERATORS[rule.policy]}" if rule.policy not in (None, policy) else ""
    left = " over the tokens that are left" if rule.among == "left" else ""
    what = LEVELS[rule.over]
    return f"a rejection by {rule.statistic} over {what.removeprefix('the ')}{own}{sign}{left}"
