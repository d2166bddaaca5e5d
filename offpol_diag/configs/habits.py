"""What a trainer does whatever its settings: guards, denominators, clips; and how a preset differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from offpol_diag.configs.parts import cannot
from offpol_diag.presets import AGGREGATES, Clip, Denominator, Preset, Reject, Statistic, Weight


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
