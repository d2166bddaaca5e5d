"""Translation of a preset into a trainer's own configuration: output types and shared helpers.

A translation goes by what a preset does (weight, rules, veto, numerator, loss, clip), never by its name. It
consumes the parts that its trainer can express and refuses the preset if any remain, so that no part is
dropped silently. Differences due to the trainer's own guards become remarks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from offpol_diag.errors import ConfigError
from offpol_diag.presets import (
    AGGREGATES,
    Clip,
    Denominator,
    Loss,
    Policy,
    Preset,
    Reject,
    Statistic,
    Veto,
    Weight,
)
from offpol_diag.trainers.base import Log

# ---------------------------------------------------------------- output

Language = Literal["yaml", "toml", "python", "flags", "hydra"]


@dataclass(frozen=True)
class Snippet:
    """A block of configuration to paste.

    Attributes:
        language: yaml, toml, python, flags (of a command line) or hydra (overrides on a command line).
        text: the block; empty if there is nothing to set.
        title: distinguishes blocks for the same versions: `as overrides`.
        file: name of the file it belongs in, if the trainer reads a fixed one.
        versions: the trainer's versions that accept it: `verl from 0.7.1`; empty if its table has only one.
        age: of the newest and the oldest of them, in changes of the trainer's keys; 0 is the current one.
    """

    language: Language
    text: str
    title: str = ""
    file: str = ""
    versions: str = ""
    age: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Config:
    """A preset in a trainer's own syntax.

    Attributes:
        preset: the preset's name.
        trainer: the trainer's name.
        snippets: blocks, for the newest version first.
        remarks: differences from the preset as computed here; never in the bounds, the quantities they
            apply to, or what is rejected.
    """

    preset: str
    trainer: str
    snippets: tuple[Snippet, ...]
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the full text to paste; remarks and headings are `#` comments, valid in every language."""
        head = [f"# {self.preset} for {self.trainer}", *(f"# {remark}" for remark in self.remarks)]
        return "\n".join([*head, *map(_block, self.snippets)]) + "\n"


def _block(snippet: Snippet) -> str:
    heading = ", ".join(word for word in (snippet.file, snippet.versions, snippet.title) if word)
    return (f"\n# {heading}\n" if heading else "") + (snippet.text or "# nothing to set")


# ---------------------------------------------------------------- the parts of a preset

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
    """Raise ConfigError, naming the part that the trainer cannot express."""
    raise ConfigError(part)


class Parts:
    """The parts of a preset that a translation consumes one by one.

    Attributes:
        preset: the preset; one with numerator `rollout` becomes `current` without weight, rules and veto,
            which is equivalent.
        policy: the numerator policy.
        loss: the loss.
        weight: the weight, or None once consumed.
        rules: the rejection rules not yet consumed.
        veto: the veto, or None once consumed.
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
        """Return whether every part has been consumed."""
        return self.weight is None and not self.rules and self.veto is None

    def need(self, policies: Sequence[Policy], losses: Sequence[Loss]) -> None:
        """Refuse a preset with another numerator or loss than these."""
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
        """Consume the weight; refuse it if its level or action is unsupported. `none` drops its bounds."""
        found = self.weight
        if found is None:
            return None
        _check_weight(found, overs, actions, lower, normalize)
        self.weight = None
        return replace(found, upper=None, lower=None) if found.action == "none" else found

    def take_band(self, over: str) -> Band | None:
        """Consume a weight that is the raw ratio inside two bounds and 0 outside; return the bounds or None.

        This is either a weight of action mask, or a weight with a rule over the same level within its bounds.
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
        """Replace a weight of action mask by the raw ratio and a rule with the same bounds."""
        weight = self.weight
        if weight is not None and weight.action == "mask" and not weight.normalize:
            rule = Reject("ratio", weight.over, weight.lower, weight.upper, strict=weight.strict)
            self.rules.insert(0, replace(rule, safety=weight.safety, safety_at=weight.safety_at))
            self.weight = replace(weight, action="none", lower=None, upper=None, strict=False)

    def drop_idle(self) -> None:
        """Replace a truncation without effect, due to a rule over the same level, by the raw ratio."""
        weight = self.weight
        rule = self._find("ratio", weight.over) if weight is not None and not weight.normalize else None
        if weight is not None and rule is not None and _within(rule, weight):
            self.weight = replace(weight, action="none", lower=None, upper=None)

    def take(
        self, statistic: Statistic, over: str, sides: Literal["both", "upper"] = "both"
    ) -> Reject | None:
        """Consume the rule on this statistic and level, for any advantage; None if there is none."""
        found = self._find(statistic, over)
        if found is None or (sides == "upper" and found.lower is not None):
            return None
        self.rules.remove(found)
        return found

    def take_opsm(self) -> float | None:
        """Consume OPSM: a mask on sequences with A < 0 by mean log π_rollout/π_θ; return its bound, nats."""
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
        """Consume the veto; refuse one with an upper bound unless `upper` is supported."""
        found = self.veto
        if found is not None and found.upper is not None and not upper:
            cannot("a veto on large ratios")
        self.veto = None
        return found

    def _find(self, statistic: str, over: str) -> Reject | None:
        plain = (rule for rule in self.rules if rule.advantage == "any" and not _odd(rule))
        return next((rule for rule in plain if (rule.statistic, rule.over) == (statistic, over)), None)

    def finish(self) -> None:
        """Refuse the preset if any part was not consumed, or if it is only logged."""
        if self.weight is not None:
            cannot(_weight_words(self.weight))
        if self.rules:
            cannot(_rule_words(self.rules[0], self.policy))
        if self.veto is not None:
            cannot("a veto on one token")
        if not self.preset.apply:
            cannot("numbers that are logged and not applied")


def _settled(preset: Preset) -> Preset:
    """Replace the numerator `rollout`, with which r = 1, by `current` without weight, rules and veto."""
    if preset.policy != "rollout":
        return preset
    return replace(preset, policy="current", weight=None, reject=(), veto=None)


def _independent(preset: Preset) -> tuple[Reject, ...]:
    """Return the rules, with `among = left` as `all` if no rule is on tokens, which is equivalent."""
    if any(rule.on_tokens for rule in preset.reject):
        return preset.reject
    return tuple(replace(rule, among="all") for rule in preset.reject)


def _odd(rule: Reject, policy: bool = True) -> bool:
    """Return whether a rule has an option that ordinary configuration keys cannot express."""
    return rule.strict or rule.among == "left" or (policy and rule.policy is not None)


def _within(rule: Reject, weight: Weight) -> bool:
    """Return whether the weight never truncates what the rule keeps."""
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


# ---------------------------------------------------------------- a trainer's fixed behaviour


@dataclass(frozen=True)
class Habits:
    """Numerical guards of a trainer that no setting changes.

    Attributes:
        clamp: bound on |log-ratio| before exp, nats; None for no bound.
        clamp_at: whether the clamp of the weight acts on each token or on the aggregate.
        rule_at: whether the clamp of a rejection does.
        unclamped: rejection statistics without a clamp.
        denominator: which tokens the loss's denominator counts; None if nothing can be rejected.
        overflow: sentence on ratios that overflow float32, if the trainer treats them specially.
    """

    clamp: float | None = None
    clamp_at: Literal["token", "aggregate"] = "aggregate"
    rule_at: Literal["token", "aggregate"] = "aggregate"
    unclamped: frozenset[Statistic] = frozenset()
    denominator: Denominator | None = "all"
    overflow: str = ""


def differences(preset: Preset, habits: Habits) -> Iterator[str]:
    """Yield a sentence for each numerical difference between the trainer and the preset."""
    yield from _clamps(preset.weight, habits.clamp, habits.clamp_at, "weight")
    for rule in preset.reject:
        bound = None if rule.statistic in habits.unclamped else habits.clamp
        yield from _clamps(rule, bound, habits.rule_at, "rejection")
    if preset.weight is not None and habits.overflow:
        yield habits.overflow
    if (preset.reject or preset.veto) and habits.denominator not in (None, preset.denominator):
        yield {
            "all": "rejected tokens stay in the loss's denominator here; the preset takes them out",
            "kept": "rejected tokens leave the loss's denominator here; the preset leaves them in",
        }[str(habits.denominator)]


def _clamps(part: Weight | Reject | None, bound: float | None, at: str, what: str) -> Iterator[str]:
    if part is None:
        return
    here, there = _clamp(bound), _clamp(part.safety)
    late = isinstance(part, Weight) or part.statistic in AGGREGATES
    if here != there:
        yield f"the log-ratio of the {what} is {here} here before exp; in the preset {there}"
    elif bound is not None and late and part.over != "token" and at != part.safety_at:
        yield f"the clamp of the {what} acts on {AT[at]} here, in the preset on {AT[part.safety_at]}"


AT = {"token": "each token", "aggregate": "the aggregate"}


def _clamp(bound: float | None) -> str:
    return "not clamped" if bound is None else f"clamped to ±{bound:g}"


# ---------------------------------------------------------------- the clip of the loss


@dataclass(frozen=True)
class ClipKeys:
    """A trainer's keys for the PPO clip, and their defaults; "" for a missing key.

    Attributes:
        low: key of the lower bound; high: of the upper one; dual: of the dual clip.
        low_default: the trainer's default of `low`.
        high_default: the trainer's default of `high`.
        dual_default: the trainer's default of `dual`; None for no dual clip.
        dual_said: describes the settings that turn the dual clip on, if one key is not enough.
    """

    low: str
    high: str
    dual: str = ""
    low_default: float = 0.2
    high_default: float = 0.2
    dual_default: float | None = None
    dual_said: Callable[[float], str] | None = None


DUAL = Clip().dual
"""The dual clip of presets by default: a guard, which is not printed if the trainer has none."""


def clip_settings(preset: Preset, keys: ClipKeys, prefix: str = "") -> dict[str, Any]:
    """Return the clip settings that differ from the trainer's defaults.

    Raises:
        ConfigError: the ratio has no upper clip, which no trainer can express.
    """
    if preset.loss not in ("ppo_clip", "gspo", "cispo"):
        return {}
    low, high = clip_bounds(preset)
    found: dict[str, Any] = {}
    if (low, high) != (keys.low_default, keys.high_default):
        found = {keys.low: low, keys.high: high}
    if keys.dual and preset.loss != "cispo" and preset.clip.dual not in (None, DUAL, keys.dual_default):
        found[keys.dual] = preset.clip.dual
    return {prefix + key: value for key, value in found.items()}


def clip_bounds(preset: Preset) -> tuple[float, float]:
    """Return (low, high) of the clip; no lower bound is low = 1, since a ratio is never below 0."""
    if preset.clip.high is None:
        cannot("a ratio that the loss does not clip from above")
    return (1.0 if preset.clip.low is None else preset.clip.low, preset.clip.high)


def no_dual_clip(preset: Preset) -> None:
    """Refuse a non-default dual clip under GSPO, for trainers whose GSPO loss has none."""
    if preset.loss == "gspo" and preset.clip.dual not in (None, DUAL):
        cannot("a dual clip under the GSPO loss")


def clip_remarks(preset: Preset, keys: ClipKeys) -> Iterator[str]:
    """Yield a remark on the dual clip if the trainer's differs from the preset's."""
    if preset.loss != "ppo_clip":
        return
    dual = preset.clip.dual
    if dual is not None and keys.dual_default is None and (not keys.dual or dual == DUAL):
        said = keys.dual_said(dual) if keys.dual_said else f"{keys.dual} is {dual:g}"
        key = f" unless {said}" if keys.dual else ""
        yield f"no dual clip here{key}; the preset bounds the loss at -{dual:g} A where A < 0"
    if dual is None and keys.dual_default is not None:
        yield f"dual clip: at most -{keys.dual_default:g} A here where A < 0, which the preset has not"


# ---------------------------------------------------------------- a trainer

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
"""Snippets, and remarks on what the trainer does differently."""
Settings = dict[str, Any]


@dataclass(frozen=True)
class Trainer:
    """A trainer: its translation of presets, its numerical guards and its logged metrics.

    Attributes:
        name: canonical name; its keys are in `keys/NAME.toml`.
        translate: translates a preset into snippets and remarks.
        habits: its numerical guards, or a function of the preset and its snippets that returns them.
        logs: its logged metrics, one `Log` per generation.
    """

    name: str
    translate: Callable[[Preset], Said]
    habits: Habits | Callable[[Preset, tuple[Snippet, ...]], Habits] = Habits()
    logs: tuple[Log, ...] = ()

    def config(self, preset: Preset) -> Config:
        """Return a preset in the trainer's own syntax.

        Raises:
            ConfigError: the trainer cannot express it; the message is the part that it cannot express.
        """
        snippets, remarks = self.translate(preset)
        habits = self.habits if isinstance(self.habits, Habits) else self.habits(preset, snippets)
        newest = sorted(snippets, key=lambda one: one.age[0])
        shown = (one for i, one in enumerate(newest) if not any(_covers(other, one) for other in newest[:i]))
        every = dict.fromkeys((*remarks, *differences(preset, habits)))
        return Config(preset.name, self.name, tuple(shown), tuple(every))


def _covers(newer: Snippet, older: Snippet) -> bool:
    """Return whether all versions that accept the older block accept the newer one too."""
    same = (newer.language, newer.file, newer.title) == (older.language, older.file, older.title)
    return same and newer.age[1] >= older.age[1]


def remarks(*found: object) -> tuple[str, ...]:
    """Keep the remarks that apply: arguments are conditions `and`ed with a text."""
    return tuple(text for text in found if isinstance(text, str) and text)
