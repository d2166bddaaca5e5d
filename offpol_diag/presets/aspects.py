"""A preset described aspect by aspect, to show how presets of one family differ.

r_t = π_train/π_rollout of token t, Δ = log r; every bound is on r or on a divergence of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from offpol_diag.presets import Preset, Reject, Weight, formulas

NONE = "none"


def aspects(preset: Preset) -> dict[str, str]:
    """Return aspect → the preset's value in words; in the order of `ASPECTS`."""
    return {name: words(preset) for name, words in ASPECTS.items()}


def _rules(preset: Preset) -> Iterator[tuple[str, Weight | Reject]]:
    """Yield the weight and rules, each with its word."""
    if preset.weight is not None:
        yield "weight", preset.weight
    for rule in preset.reject:
        yield "rule", rule


def _each(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words)) or NONE


def _numerator(preset: Preset) -> str:
    own = (rule.policy for rule in preset.reject if rule.policy and rule.policy != preset.policy)
    return _each([preset.policy, *(f"{policy} in a rule" for policy in own)])


def _bound(side: str) -> Callable[[Preset], str]:
    def words(preset: Preset) -> str:
        bounds = ((getattr(rule, side), word) for word, rule in _rules(preset))
        return _each(f"{bound:g} ({word})" for bound, word in bounds if bound is not None)

    return words


def _advantage(preset: Preset) -> str:
    rules = (rule for rule in preset.reject if rule.advantage != "any")
    return _each(rule.advantage.replace("_", " ") + " of each token" * rule.of_token for rule in rules)


def _rejected(preset: Preset) -> str:
    if not preset.reject and not preset.veto:
        masked = preset.weight is not None and preset.weight.action == "mask"
        return "of weight 0, stay in the denominator" if masked else NONE
    return "leave the denominator" if preset.denominator == "kept" else "stay in the denominator"


def _clamp(preset: Preset) -> str:
    def at(rule: Weight | Reject) -> str:
        return "each token" if rule.over == "token" or rule.safety_at == "token" else "the aggregate"

    rules = ((word, rule) for word, rule in _rules(preset) if rule.safety is not None)
    return _each(f"±{rule.safety:g} on {at(rule)} ({word})" for word, rule in rules)


def _among(preset: Preset) -> str:
    left = _each(word for word, rule in _rules(preset) if rule.among == "left")
    return "all" if left == NONE else f"those left ({left})"


def _of_weight(words: Callable[[Weight], str | bool], without: str = NONE) -> Callable[[Preset], str]:
    return lambda preset: str((preset.weight and words(preset.weight)) or without)


ASPECTS: Mapping[str, Callable[[Preset], str]] = {
    "numerator": _numerator,
    "weight": _of_weight(lambda weight: weight.action, "unweighted"),
    "statistic": lambda preset: _each(
        "r" if rule.statistic == "ratio" else formulas.STATISTICS[rule.statistic] for rule in preset.reject
    ),
    "over what": lambda preset: _each(f"{rule.over} ({word})" for word, rule in _rules(preset)),
    "lower bound": _bound("lower"),
    "upper bound": _bound("upper"),
    "sign of the advantage": _advantage,
    "veto": lambda preset: formulas.veto(preset.veto) if preset.veto else NONE,
    "rejected tokens": _rejected,
    "normalisation": _of_weight(lambda weight: weight.normalize and "batch mean"),
    "clamp on the log-ratio": _clamp,
    "overflow": _of_weight(lambda weight: weight.overflow == "zero" and "zero"),
    "strict bounds": lambda preset: _each(word for word, rule in _rules(preset) if rule.strict),
    "tokens aggregated": _among,
    "loss": lambda preset: preset.loss,
    "clip of the loss": lambda preset: formulas.clipped(preset) or NONE,
    "shape of the loss": lambda preset: formulas.shape(preset) or NONE,
    "application": lambda preset: "to the loss" if preset.apply else "only logged",
}
"""Aspect → the function that describes it, most distinctive first."""
