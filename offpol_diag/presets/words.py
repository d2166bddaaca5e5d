"""Presets in words and formulas: weight, rejection, veto and loss, with the direction of the ratio.

r_t = π_train/π_rollout of token t, Δ = log r; ∏r over the response is the product ratio of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.presets import Kind, Preset, Reject, Veto, Weight

KINDS: Mapping[Kind, str] = {
    "none": "only PPO's own ratio corrects anything",
    "token": "each token is weighted or rejected by its own ratio",
    "sequence": "tokens are weighted or rejected by a number of their sequence",
    "geometric and k3": "sequences are judged by their geometric mean of r or their mean K3",
    "bypass": "r is π_θ/π_rollout, without π_old",
    "other": "the loss has its own ratio or weight",
}
"""Kind → what methods of this kind do, in the order in which they are listed."""
NUMERATORS = {
    "old": "r = π_old/π_rollout (decoupled: the trainer recomputes log π_old)",
    "current": "r = π_θ/π_rollout (bypass: the rollout's log-probs are the anchor)",
}
RATIOS = {
    "token": "r_t",
    "sum": "∏r",
    "mean": "(∏r)^(1/n)",
    "max": "max r_t",
    "min": "min r_t",
    "segment": "(∏r)^(1/n) of the turn",
}
STATISTICS = {
    "k1": "−Δ",
    "k2": "Δ²/2",
    "k3": "(r−1−Δ)",
    "k3_reverse": "(1/r−1+Δ)",
    "mult_prob_error": "e^|Δ|",
    "prob_diff": "(π_train−π_rollout)",
    "tv": "|r−1|/2",
    "binary_kl": "KL₂(π_rollout‖π_train)",
    "binary_kl_max": "max KL₂ of both directions",
}
OVER = {"token": "", "sum": "Σ ", "segment": "turn mean of ", "batch": "batch mean of "}
"""Aggregation → the words before a statistic, where they are not its own name (mean, max, min)."""
UNITS = {"token": "tokens", "segment": "turns", "batch": "the tokens with the smallest values,"}
SIGNS = {
    "any": "",
    "negative": " (applies only where A < 0)",
    "positive": " (applies only where A > 0)",
    "against": " (the upper bound applies where A > 0, the lower where A < 0)",
    "against_or_zero": " (the upper bound applies where A > 0, the lower where A ≤ 0)",
    "away": " (applies only where A·Δ > 0)",
}
LOSSES = {
    "ppo_clip": "PPO clip on π_θ/{anchor}",
    "reinforce": "REINFORCE",
    "surrogate": "−A times the weight, with its gradient",
    "gspo": "PPO clip on (∏π_θ/{anchor})^(1/n)",
    "cispo": "REINFORCE times the clipped, constant π_θ/{anchor}",
}
DENOMINATORS = {
    "kept": "rejected tokens leave the loss's denominator",
    "all": "rejected tokens stay in the loss's denominator",
}
NOTHING = "–"


def weight(rule: Weight | None) -> str:
    """Write the weight that multiplies the loss: `min(r_t, 2)`."""
    if rule is None:
        return NOTHING
    text = ratio = RATIOS[rule.over]
    if rule.action == "mask":
        text = f"{ratio} where {_between(ratio, rule.lower, rule.upper)}, else 0"
    elif rule.action == "truncate" and rule.lower is None:
        text = f"min({ratio}, {rule.upper:g})"
    elif rule.action == "truncate":
        lower = f"{ratio}, {rule.lower:g}"
        text = f"max({lower})" if rule.upper is None else f"clamp({lower}, {rule.upper:g})"
    return f"{text} / batch mean" if rule.normalize else text


def rejection(rules: tuple[Reject, ...]) -> str:
    """Write the conditions for keeping tokens or sequences, all required: `sequences with 0.5 ≤ ∏r ≤ 2`."""
    found = []
    for rule in rules:
        unit = UNITS.get(rule.over, "tokens of sequences" if rule.on_tokens else "sequences")
        bounds = _between(judged(rule), rule.lower, rule.upper, "<" if rule.over == "batch" else "≤")
        found.append(f"{unit} with {bounds}{SIGNS[rule.advantage]}")
    return "; ".join(found) or NOTHING


def judged(rule: Reject) -> str:
    """Write the statistic that a rule bounds: `∏r`, `mean (r−1−Δ)`."""
    if rule.statistic == "ratio":
        return RATIOS[rule.over]
    return OVER.get(rule.over, f"{rule.over} ") + STATISTICS[rule.statistic]


def veto(rule: Veto | None) -> str:
    """Write the condition on a token that drops its sequence: `any r_t < 0.0001`."""
    sides = (("<", rule.lower), (">", rule.upper)) if rule else ()
    return " or ".join(f"any r_t {sign} {bound:g}" for sign, bound in sides if bound is not None) or NOTHING


def _between(what: str, lower: float | None, upper: float | None, sign: str = "≤") -> str:
    left = "" if lower is None else f"{lower:g} {sign} "
    return f"{left}{what}" if upper is None else f"{left}{what} {sign} {upper:g}"


def method(preset: Preset) -> str:
    """Write weight, rejection and veto in one line."""
    parts = {"weight": weight(preset.weight), "keep": rejection(preset.reject), "veto": veto(preset.veto)}
    return "; ".join(f"{word} {text}" for word, text in parts.items() if text != NOTHING) or "no correction"


def loss(preset: Preset) -> str:
    """Write the policy loss: `PPO clip on π_θ/π_old`."""
    return LOSSES[preset.loss].format(anchor="π_old" if preset.policy == "old" else "π_rollout")


def clipped(preset: Preset) -> str:
    """Write where the loss clips its own ratio: `to [0.8, 1.2]; where A < 0 the loss is at most −3 A`."""
    clip = preset.clip
    if preset.loss in ("reinforce", "surrogate"):
        return ""
    low = "−∞" if clip.low is None else f"{1 - clip.low:g}"
    high = "∞" if clip.high is None else f"{1 + clip.high:g}"
    dual = clip.dual is not None and preset.loss != "cispo"
    return f"to [{low}, {high}]{f'; where A < 0 the loss is at most −{clip.dual:g} A' if dual else ''}"
