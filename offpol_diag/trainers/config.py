"""A trainer's own configuration of a preset: what is printed, a preset taken apart, and what trainers share.

A translation goes by what a preset does (weight, rules, veto, numerator, loss, clip), never by its name. It
takes what its trainer can say; what is left over is refused, so that a part that nobody has thought of is
never dropped in silence. What a trainer's own guards make different is a remark.
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

# ---------------------------------------------------------------- what is printed

Language = Literal["yaml", "toml", "python", "flags", "hydra"]


@dataclass(frozen=True)
class Snippet:
    """One piece of text to paste.

    Attributes:
        language: yaml, toml, python, flags (of a command line) or hydra (overrides on a command line).
        text: what is pasted; empty where there is nothing to set.
        title: what it is beside others for the same versions: `as overrides`.
        file: the file it belongs in, where the trainer reads one by its name.
        versions: of the trainer, that take it: `verl from 0.7.1`; empty where its table has one version only.
        age: of the newest and of the oldest of them, in changes of the trainer's keys; 0 is today's.
    """

    language: Language
    text: str
    title: str = ""
    file: str = ""
    versions: str = ""
    age: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Config:
    """One preset in one trainer's own syntax.

    Attributes:
        preset: its name.
        trainer: the trainer's name.
        snippets: the newest version's first.
        remarks: what the trainer does differently from the preset as computed here. The bounds, what they
            are on and what is rejected never differ.
    """

    preset: str
    trainer: str
    snippets: tuple[Snippet, ...]
    remarks: tuple[str, ...] = ()

    def text(self) -> str:
        """All of it, to be pasted: remarks and headings are comments, which every syntax here spells `#`."""
        head = [f"# {self.preset} for {self.trainer}", *(f"# {remark}" for remark in self.remarks)]
        return "\n".join([*head, *map(_block, self.snippets)]) + "\n"


def _block(snippet: Snippet) -> str:
    heading = ", ".join(word for word in (snippet.file, snippet.versions, snippet.title) if word)
    return (f"\n# {heading}\n" if heading else "") + (snippet.text or "# nothing to set")


# ---------------------------------------------------------------- a preset taken apart

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


# ---------------------------------------------------------------- what a trainer does whatever is set


@dataclass(frozen=True)
class Habits:
    """A trainer's own guards.

    Attributes:
        clamp: bound on |log-ratio| before exp, nats; None = none.
        clamp_at: whether that of the weight acts on each token or on the aggregate.
        rule_at: whether that of a rejection does.
        unclamped: statistics of rejections that have no such bound.
        denominator: whether rejected tokens leave the loss's denominator; None where no setting rejects.
        overflow: what becomes of a ratio that float32 cannot hold, where the trainer has a rule for it.
    """

    clamp: float | None = None
    clamp_at: Literal["token", "aggregate"] = "aggregate"
    rule_at: Literal["token", "aggregate"] = "aggregate"
    unclamped: frozenset[Statistic] = frozenset()
    denominator: Denominator | None = "all"
    overflow: str = ""


def differences(preset: Preset, habits: Habits) -> Iterator[str]:
    """What the trainer does differently though the method is the same, a sentence each."""
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
    """A trainer's keys for the clip of its own ratio, and their defaults; "" where it has no such key.

    Attributes:
        low: the key of the lower bound; high: of the upper one; dual: of the dual clip.
        low_default: of each where nothing is set.
        high_default: the same.
        dual_default: the same; None for no dual clip.
        dual_said: what turns a dual clip on, where that is more than its key.
    """

    low: str
    high: str
    dual: str = ""
    low_default: float = 0.2
    high_default: float = 0.2
    dual_default: float | None = None
    dual_said: Callable[[float], str] | None = None


DUAL = Clip().dual
"""The dual clip of a preset that does not speak of it: a guard, not printed where the trainer has none."""


def clip_settings(preset: Preset, keys: ClipKeys, prefix: str = "") -> dict[str, Any]:
    """The clip's keys that are not at the trainer's default.

    Raises:
        ConfigError: a ratio that is not clipped from above, which no trainer's key can mean.
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
    """(low, high) of the clip; a ratio is never below 0, so no lower bound is low = 1."""
    if preset.clip.high is None:
        cannot("a ratio that the loss does not clip from above")
    return (1.0 if preset.clip.low is None else preset.clip.low, preset.clip.high)


def no_dual_clip(preset: Preset) -> None:
    """Refuse a dual clip that was asked for under GSPO, where the trainer's loss has none."""
    if preset.loss == "gspo" and preset.clip.dual not in (None, DUAL):
        cannot("a dual clip under the GSPO loss")


def clip_remarks(preset: Preset, keys: ClipKeys) -> Iterator[str]:
    """How the dual clip differs, where no key can help it."""
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
    """One trainer.

    Attributes:
        name: as this project spells it; its keys are in `keys/NAME.toml`.
        translate: a preset in its own syntax.
        habits: what it does whatever is set, or how that follows from a preset and what was said of it.
        logs: what it logs, a row per generation of its names.
    """

    name: str
    translate: Callable[[Preset], Said]
    habits: Habits | Callable[[Preset, tuple[Snippet, ...]], Habits] = Habits()
    logs: tuple[Log, ...] = ()

    def config(self, preset: Preset) -> Config:
        """A preset in its own syntax.

        Raises:
            ConfigError: it cannot say it; the message is the part that it cannot say.
        """
        snippets, remarks = self.translate(preset)
        habits = self.habits if isinstance(self.habits, Habits) else self.habits(preset, snippets)
        newest = sorted(snippets, key=lambda one: one.age[0])
        shown = (one for i, one in enumerate(newest) if not any(_covers(other, one) for other in newest[:i]))
        every = dict.fromkeys((*remarks, *differences(preset, habits)))
        return Config(preset.name, self.name, tuple(shown), tuple(every))


def _covers(newer: Snippet, older: Snippet) -> bool:
    """Whether all versions that take the older block take the newer one as well."""
    same = (newer.language, newer.file, newer.title) == (older.language, older.file, older.title)
    return same and newer.age[1] >= older.age[1]


def remarks(*found: object) -> tuple[str, ...]:
    """Those that apply: conditions `and`ed with a text each."""
    return tuple(text for text in found if isinstance(text, str) and text)
