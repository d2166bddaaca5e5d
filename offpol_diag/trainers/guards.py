"""The clip of the loss in a trainer's keys, and in words what it does otherwise where no key says so.

The `guards` of a form of a trainer's table:

    clamp              bound on |log-ratio| before exp, in nats; without it there is none
    clamp_at, rule_at  whether that bound acts on each `token` or on the `aggregate` (the default), of a
                       weight and of a rejection
    unclamped          statistics of rejections without it
    denominator        which tokens the loss's denominator counts: `kept` or `all` (the default); "" where
                       that differs
    overflow           a sentence on ratios that float32 does not hold
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offpol_diag.errors import ConfigError
from offpol_diag.presets import AGGREGATES, Clip, Preset, Weight
from offpol_diag.trainers.writers import Settings

DUAL = Clip().dual
"""The dual clip of presets by default: a guard, which is not set if the trainer has none."""
UNCLIPPED = ("reinforce", "surrogate")
AT = {"token": "each token", "aggregate": "the aggregate"}
DENOMINATORS = {
    "all": "rejected tokens stay in the loss's denominator here; the preset takes them out",
    "kept": "rejected tokens leave the loss's denominator here; the preset leaves them in",
}


def clip(preset: Preset, keys: Mapping[str, Any]) -> Settings:
    """Return the clip of the loss where it is not the trainer's default; no lower bound is 1, as r > 0.

    Raises:
        ConfigError: the ratio has no upper clip, which no trainer can express.
    """
    own, result = preset.clip, Settings()
    if preset.loss in UNCLIPPED:
        return result
    if own.high is None:
        raise ConfigError("a ratio that the loss does not clip from above")
    bounds = (1.0 if own.low is None else own.low, own.high)
    if list(bounds) != keys["default"]:
        pair = zip((keys["low"], keys["high"]), bounds, strict=True) if "low" in keys else ()
        result = dict(pair) or {keys["pair"]: bounds}
    if "dual" in keys and preset.loss != "cispo" and own.dual not in (None, DUAL):
        result[keys["dual"]] = own.dual
    return result


def dual_clip(preset: Preset, keys: Mapping[str, Any]) -> str:
    """Return a remark on the dual clip if the trainer's differs from the preset's, else ""."""
    bound, own = preset.clip.dual, keys.get("dual_default")
    if preset.loss != "ppo_clip":
        return ""
    if bound is None and own is not None:
        return f"dual clip: at most -{own:g} A here where A < 0, which the preset has not"
    if bound is not None and own is None and ("dual" not in keys or bound == DUAL):
        needed = keys.get("dual_set", f"{keys.get('dual')} is {{:g}}").format(bound)
        unless = f" unless {needed}" if "dual" in keys else ""
        return f"no dual clip here{unless}; the preset bounds the loss at -{bound:g} A where A < 0"
    return ""


def differences(preset: Preset, trainer: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each difference between a trainer's guards and the preset's."""
    for part in (preset.weight, *preset.reject):
        if part is None:
            continue
        of_weight = isinstance(part, Weight)
        late = isinstance(part, Weight) or part.statistic in AGGREGATES
        free = not isinstance(part, Weight) and part.statistic in trainer.get("unclamped", ())
        bound = None if free else trainer.get("clamp")
        place = trainer.get("clamp_at" if of_weight else "rule_at", "aggregate")
        what = "weight" if of_weight else "rejection"
        here, there = ("not clamped" if x is None else f"clamped to ±{x:g}" for x in (bound, part.safety))
        if here != there:
            yield f"the log-ratio of the {what} is {here} here before exp; in the preset {there}"
        elif bound is not None and late and part.over != "token" and place != part.safety_at:
            yield f"the clamp of the {what} acts on {AT[place]} here, in the preset on {AT[part.safety_at]}"
    if preset.weight is not None:
        yield trainer.get("overflow", "")
    denominator = trainer.get("denominator", "all")
    if (preset.reject or preset.veto) and denominator not in ("", preset.denominator):
        yield DENOMINATORS[denominator]
