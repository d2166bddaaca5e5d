"""A preset described aspect by aspect, to show how presets of one family differ.

r_t = π_train/π_rollout of token t, Δ = log r; every bound is on r or on a divergence of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.presets.formulas import STATISTICS, clipped
from offpol_diag.presets.formulas import veto as vetoed

NONE = "none"


def aspects(preset: Preset) -> dict[str, str]:
    """Return aspect → the preset's value in words; in the order of `ASPECTS`."""
    return {name: say(preset) for name, say in ASPECTS.items()}


def _numerator(preset: Preset) -> str:
    own = (rule.policy for rule in preset.reject if rule.policy and rule.policy != preset.policy)
    return _each([preset.policy, *(f"{policy} in a rule" for policy in own)])


def _over(preset: Preset) -> str:
    return _each(f"{rule.over} ({word})" for word, rule in _rules(preset))


def _measured(preset: Preset) -> str:
    return _each("r" if one.statistic == "ratio" else STATISTICS[one.statistic] for one in preset.reject)


def _does(preset: Preset) -> str:
    return preset.weight.action if preset.weight else "unweighted"


def _bound(side: str) -> Callable[[Preset], str]:
    def say(preset: Preset) -> str:
        return _each(
            f"{getattr(rule, side):g} ({word})"
            for word, rule in _rules(preset)
            if getattr(rule, side) is not None
        )

    return say


def _advantage(preset: Preset) -> str:
    return _each(
        rule.advantage.replace("_", " ") + (" of each token" if rule.of_token else "")
        for rule in preset.reject
        if rule.advantage != "any"
    )


def _rejected(preset: Preset) -> str:
    if not preset.reject and not preset.veto:
        masked = preset.weight is not None and preset.weight.action == "mask"
        return "of weight 0, stay in the denominator" if masked else NONE
    return "leave the denominator" if preset.denominator == "kept" else "stay in the denominator"


def _clamp(preset: Preset) -> str:
    return _each(
        f"±{rule.safety:g} on {_clamped(rule)} ({word})"
        for word, rule in _rules(preset)
        if rule.safety is not None
    )


def _clamped(rule: Weight | Reject) -> str:
    return "each token" if rule.over == "token" or rule.safety_at == "token" else "the aggregate"


def _strict(preset: Preset) -> str:
    return _each(word for word, rule in _rules(preset) if rule.strict)


def _among(preset: Preset) -> str:
    left = _each(word for word, rule in _rules(preset) if rule.among == "left")
    return "all" if left == NONE else f"those left ({left})"


ASPECTS: Mapping[str, Callable[[Preset], str]] = {
    "numerator": _numerator,
    "weight": _does,
    "statistic": _measured,
    "over what": _over,
    "lower bound": _bound("lower"),
    "upper bound": _bound("upper"),
    "sign of the advantage": _advantage,
    "veto": lambda preset: vetoed(preset.veto) if preset.veto else NONE,
    "rejected tokens": _rejected,
    "normalisation": lambda preset: "batch mean" if preset.weight and preset.weight.normalize else NONE,
    "clamp on the log-ratio": _clamp,
    "overflow": lambda preset: "zero" if preset.weight and preset.weight.overflow == "zero" else NONE,
    "strict bounds": _strict,
    "tokens aggregated": _among,
    "loss": lambda preset: preset.loss,
    "clip of the loss": lambda preset: clipped(preset) or NONE,
    "application": lambda preset: "to the loss" if preset.apply else "only logged",
}
"""Aspect → the function that describes it, most distinctive first."""


def _rules(preset: Preset) -> Iterator[tuple[str, Weight | Reject]]:
    """Yield the weight and rules, each with its word."""
    if preset.weight is not None:
        yield "weight", preset.weight
    for rule in preset.reject:
        yield "rule", rule


def _each(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words)) or NONE
