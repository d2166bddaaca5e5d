"""Translation of a preset into a trainer's own configuration: output types and shared helpers.

A translation goes by what a preset does (weight, rules, veto, numerator, loss, clip), never by its name. It
consumes the parts that its trainer can express and refuses the preset if any remain, so that no part is
dropped silently. Differences due to the trainer's own guards become remarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from offpol_diag.presets import AGGREGATES, Clip, Denominator, Preset, Reject, Statistic, Veto, Weight
from offpol_diag.trainers import schema
from offpol_diag.trainers.schema import Form, Settings, Snippet, Writers, cannot

# ---------------------------------------------------------------- output


@dataclass(frozen=True)
class Config:
    """A preset in a trainer's own syntax.

    Attributes:
        preset: the preset's name.
        trainer: the trainer's name.
        snippets: blocks, for the newest version first.
        read: repository, commit and date at which its keys were read.
        remarks: differences from the preset as computed here; never in the bounds, the quantities they
            apply to, or what is rejected.
    """

    preset: str
    trainer: str
    snippets: tuple[Snippet, ...]
    read: str
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the full text to paste; remarks and headings are `#` comments, valid in every language."""
        lines = [f"# {self.preset} for {self.trainer}, keys as read at {self.read}"]
        lines += (f"# {remark}" for remark in self.remarks)
        for one in self.snippets:
            heading = ", ".join(word for word in (one.file, one.versions, one.title) if word)
            lines.append((f"\n# {heading}\n" if heading else "") + (one.text or "# nothing to set"))
        return "\n".join(lines) + "\n"


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
}
IDLE_LOW, IDLE_HIGH = 1e-9, 1e9
"""Bounds that a ratio whose logarithm is clamped to ±20 never reaches: e^20 = 4.9e8."""
YAML: Writers = {"yaml": schema.yaml}
FLAGS: Writers = {"flags": schema.flags}
YAML_AND_HYDRA: Writers = {"yaml": schema.yaml, "hydra": schema.hydra}


def idle_bounds(low: float | None, high: float | None) -> tuple[float, float]:
    """Replace missing bounds by idle ones."""
    return (IDLE_LOW if low is None else low, IDLE_HIGH if high is None else high)


def open_bounds(low: float | None, high: float | None) -> tuple[float, float]:
    """Replace missing bounds of a ratio by 0 and infinity."""
    return (0.0 if low is None else low, math.inf if high is None else high)


def prefixed(prefix: str, settings: Mapping[str, Any]) -> Settings:
    """Return the settings below a common path."""
    return {prefix + key: value for key, value in settings.items()}


def idle(settings: Mapping[str, Any]) -> bool:
    """Return whether any bound is an idle one."""
    return any(isinstance(value, float) and value in (IDLE_LOW, IDLE_HIGH) for value in settings.values())


class Parts:
    """The parts of a preset that a translation consumes one by one.

    Attributes:
        preset: the preset.
        policy: the numerator policy.
        loss: the loss.
        weight: the weight, or None once consumed.
        rules: the rejection rules not yet consumed.
        veto: the veto, or None once consumed.
    """

    def __init__(self, preset: Preset) -> None:
        self.preset, self.policy, self.loss = preset, preset.policy, preset.loss
        self.weight, self.veto = preset.weight, preset.veto
        self.rules = list(preset.reject)

    @property
    def bare(self) -> bool:
        """Return whether every part has been consumed."""
        return self.weight is None and not self.rules and self.veto is None

    def need(self, policies: Sequence[str], losses: Sequence[str]) -> None:
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
        result = self.weight
        if result is None:
            return None
        if result.over not in overs or result.action not in actions:
            cannot(_weight_words(result))
        if result.normalize and not normalize:
            cannot("weights divided by their batch mean")
        if result.action == "truncate" and result.lower is not None and not lower:
            cannot("a lower bound of the truncated weight")
        self.weight = None
        return replace(result, upper=None, lower=None) if result.action == "none" else result

    def take_band(self, over: str) -> Band | None:
        """Consume a weight that is the raw ratio inside two bounds and 0 outside; return the bounds or None.

        This is either a weight of action mask, or a weight with a rule over the same level within its bounds.
        """
        weight = self.weight
        if weight is None or weight.over != over or weight.normalize:
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
            rule = Reject("ratio", weight.over, weight.lower, weight.upper)
            self.rules.insert(0, replace(rule, safety=weight.safety, safety_at=weight.safety_at))
            self.weight = replace(weight, action="none", lower=None, upper=None)

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
        result = self._find(statistic, over)
        if result is None or (sides == "upper" and result.lower is not None):
            return None
        self.rules.remove(result)
        return result

    def take_veto(self, upper: bool = False) -> Veto | None:
        """Consume the veto; refuse one with an upper bound unless `upper` is supported."""
        result = self.veto
        if result is not None and result.upper is not None and not upper:
            cannot("a veto on large ratios")
        self.veto = None
        return result

    def _find(self, statistic: str, over: str) -> Reject | None:
        plain = (rule for rule in self.rules if rule.advantage == "any")
        return next((rule for rule in plain if (rule.statistic, rule.over) == (statistic, over)), None)

    def finish(self) -> None:
        """Refuse the preset if any part was not consumed."""
        if self.weight is not None:
            cannot(_weight_words(self.weight))
        for rule in self.rules:
            sign = "" if rule.advantage == "any" else f" with a condition on the advantage ({rule.advantage})"
            what = LEVELS[rule.over].removeprefix("the ")
            cannot(f"a rejection by {rule.statistic} over {what}{sign}")
        if self.veto is not None:
            cannot("a veto on one token")


def _within(rule: Reject, weight: Weight) -> bool:
    """Return whether the weight never truncates what the rule keeps."""
    if weight.action == "none":
        return True
    high = weight.upper is None or (rule.upper is not None and rule.upper <= weight.upper)
    low = weight.lower is None or (rule.lower is not None and rule.lower >= weight.lower)
    return weight.action == "truncate" and high and low


def _weight_words(weight: Weight) -> str:
    action = {
        "truncate": "truncated",
        "mask": "zeroed outside their bounds",
        "none": "untruncated",
    }[weight.action]
    return f"weights of {LEVELS[weight.over]}, {action}"


# ---------------------------------------------------------------- a trainer's fixed behaviour


@dataclass(frozen=True)
class Guards:
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


def differences(preset: Preset, guards: Guards) -> Iterator[str]:
    """Yield a sentence for each numerical difference between the trainer and the preset."""
    yield from _clamps(preset.weight, guards.clamp, guards.clamp_at, "weight")
    for rule in preset.reject:
        bound = None if rule.statistic in guards.unclamped else guards.clamp
        yield from _clamps(rule, bound, guards.rule_at, "rejection")
    if preset.weight is not None and guards.overflow:
        yield guards.overflow
    if (preset.reject or preset.veto) and guards.denominator not in (None, preset.denominator):
        yield {
            "all": "rejected tokens stay in the loss's denominator here; the preset takes them out",
            "kept": "rejected tokens leave the loss's denominator here; the preset leaves them in",
        }[str(guards.denominator)]


def _clamps(part: Weight | Reject | None, bound: float | None, at: str, what: str) -> Iterator[str]:
    if part is None:
        return
    here, there = ("not clamped" if x is None else f"clamped to ±{x:g}" for x in (bound, part.safety))
    late = isinstance(part, Weight) or part.statistic in AGGREGATES
    if here != there:
        yield f"the log-ratio of the {what} is {here} here before exp; in the preset {there}"
    elif bound is not None and late and part.over != "token" and at != part.safety_at:
        yield f"the clamp of the {what} acts on {AT[at]} here, in the preset on {AT[part.safety_at]}"


AT = {"token": "each token", "aggregate": "the aggregate"}


# ---------------------------------------------------------------- the clip of the loss


@dataclass(frozen=True)
class ClipKeys:
    """A trainer's keys for the PPO clip, and their defaults; "" for a missing key.

    Attributes:
        low: key of the lower bound; high: of the upper one; dual: of the dual clip.
        low_default: the trainer's default of `low`.
        high_default: the trainer's default of `high`.
        dual_default: the trainer's default of `dual`; None for no dual clip.
        dual_words: describes the settings that turn the dual clip on, if one key is not enough.
    """

    low: str = ""
    high: str = ""
    dual: str = ""
    low_default: float = 0.2
    high_default: float = 0.2
    dual_default: float | None = None
    dual_words: Callable[[float], str] | None = None

    def remark(self, preset: Preset) -> str:
        """Return a remark on the dual clip if the trainer's differs from the preset's, else ""."""
        dual = preset.clip.dual
        if preset.loss != "ppo_clip":
            return ""
        if dual is not None and self.dual_default is None and (not self.dual or dual == DUAL):
            words = self.dual_words(dual) if self.dual_words else f"{self.dual} is {dual:g}"
            unless = f" unless {words}" if self.dual else ""
            return f"no dual clip here{unless}; the preset bounds the loss at -{dual:g} A where A < 0"
        if dual is None and self.dual_default is not None:
            return f"dual clip: at most -{self.dual_default:g} A here where A < 0, which the preset has not"
        return ""


DUAL = Clip().dual
"""The dual clip of presets by default: a guard, which is not printed if the trainer has none."""


def clip_settings(preset: Preset, keys: ClipKeys, prefix: str = "") -> Settings:
    """Return the clip settings that differ from the trainer's defaults.

    Raises:
        ConfigError: the ratio has no upper clip, which no trainer can express.
    """
    if preset.loss not in ("ppo_clip", "gspo", "cispo"):
        return {}
    low, high = clip_bounds(preset)
    result: Settings = {}
    if (low, high) != (keys.low_default, keys.high_default):
        result = {keys.low: low, keys.high: high}
    if keys.dual and preset.loss != "cispo" and preset.clip.dual not in (None, DUAL, keys.dual_default):
        result[keys.dual] = preset.clip.dual
    return prefixed(prefix, result)


def clip_bounds(preset: Preset) -> tuple[float, float]:
    """Return (low, high) of the clip; no lower bound is low = 1, since a ratio is never below 0."""
    if preset.clip.high is None:
        cannot("a ratio that the loss does not clip from above")
    return (1.0 if preset.clip.low is None else preset.clip.low, preset.clip.high)


def cispo_high(preset: Preset) -> float:
    """Return the upper bound of CISPO's weight less 1, for trainers whose weight has no lower bound."""
    low, high = clip_bounds(preset)
    if low < 1:
        cannot("a lower bound of CISPO's weight")
    return high


def no_dual_clip(preset: Preset) -> None:
    """Refuse a non-default dual clip under GSPO, for trainers whose GSPO loss has none."""
    if preset.loss == "gspo" and preset.clip.dual not in (None, DUAL):
        cannot("a dual clip under the GSPO loss")


# ---------------------------------------------------------------- a trainer

Translation = tuple[Sequence[Form], tuple[object, ...]]
"""The settings in each form that they have had, the newest first; and what the trainer does differently.

A remark is a text, or a condition `and`ed with it.
"""


@dataclass(frozen=True)
class Trainer:
    """A trainer: its translation of presets, and its numerical guards.

    Attributes:
        name: canonical name.
        read: repository, commit and date at which its keys were read.
        translate: translates the parts of a preset into settings and remarks.
        writers: the languages that these are written in.
        guards: its numerical guards, or a function of the preset and its snippets that returns them.
        clip: its keys for the clip, if the remark on its dual clip is to follow the others.
        title: its name before versions; empty if only one was looked at.
    """

    name: str
    read: str
    translate: Callable[[Parts], Translation]
    writers: Writers
    guards: Guards | Callable[[Preset, tuple[Snippet, ...]], Guards] = Guards()
    clip: ClipKeys | None = None
    title: str = ""

    def config(self, preset: Preset) -> Config:
        """Return a preset in the trainer's own syntax.

        Raises:
            ConfigError: the trainer cannot express it; the message is the part that it cannot express.
        """
        forms, notes = self.translate(Parts(preset))
        snippets = schema.blocks(self.title, self.writers, forms)
        guards = self.guards if isinstance(self.guards, Guards) else self.guards(preset, snippets)
        clip = self.clip.remark(preset) if self.clip else ""
        every = (*notes, clip, *differences(preset, guards))
        remarks = dict.fromkeys(note for note in every if isinstance(note, str) and note)
        return Config(preset.name, self.name, snippets, self.read, tuple(remarks))
