"""By what a book parts the tokens under a preset: far ones, on which it can act, and near ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Loss, Policy, Preset

WITHOUT_CLIP = ("reinforce", "surrogate")
"""Losses that have a clip and do not use it."""


@cache
def parting(preset: Preset) -> Preset | None:
    """By what tokens are parted under a preset; None where they are not."""
    if _in_full(preset):
        return applied(preset)
    if preset.apply or _told(preset):  # what is not used may still be logged
        return replace(preset, apply=True, loss="ppo_clip")
    return None


def _in_full(preset: Preset) -> bool:
    return preset.apply and preset.loss not in WITHOUT_CLIP


def as_is(rules: Preset, preset: Preset) -> Preset:
    """What is left of a preset, used as that is."""
    return rules if _in_full(preset) else _used(rules, preset.apply, preset.loss)


@cache
def _used(rules: Preset, apply: bool, loss: Loss) -> Preset:
    return replace(rules, apply=apply, loss=loss)


@cache
def without_rules(preset: Preset) -> Preset:
    """What is left where no rule has a say."""
    return replace(preset, reject=(), veto=None)


@cache
def free(policy: Policy) -> Preset:
    """One that does nothing."""
    return Preset("", "", policy, loss="reinforce")


def _told(preset: Preset) -> bool:
    """Whether |Δ| alone says where a preset that is only logged would act on tokens."""
    psis = preset.weight is not None and preset.weight.action == "psis"
    rules = (rule for rule in preset.reject if rule.on_tokens)
    return not psis and all(rule.over == "token" and rule.statistic != "binary_kl" for rule in rules)
