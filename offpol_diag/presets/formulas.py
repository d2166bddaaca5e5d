"""Presets as formulas: weight, rejection and veto, with the direction of the ratio.

r_t = π_train/π_rollout of token t, Δ = log r; ∏r over the response is the product ratio of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.blocks import Section, Table, Text
from offpol_diag.presets import AGGREGATES, Preset, Reject, Veto, Weight

NUMERATORS = {
    "old": "r = π_old/π_rollout (decoupled: the trainer recomputes log π_old)",
    "current": "r = π_θ/π_rollout (bypass: the rollout's log-probs are the anchor)",
    "rollout": "r = 1 by construction (the trainer takes the rollout's log-probs for its own)",
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
}
OVER = {
    "token": "",
    "sum": "Σ ",
    "mean": "mean ",
    "max": "max ",
    "min": "min ",
    "segment": "turn mean of ",
    "batch": "batch mean of ",
}
UNITS = {"token": "tokens", "segment": "turns", "batch": "the tokens with the smallest values,"}
SIGNS = {
    "any": "",
    "negative": " (asked only where A < 0)",
    "positive": " (asked only where A > 0)",
    "against": " (the upper bound asked where A > 0, the lower where A < 0)",
    "against_or_zero": " (the upper bound asked where A > 0, the lower where A ≤ 0)",
    "away": " (asked only where A·Δ > 0)",
}
LOSSES = {
    "ppo_clip": "PPO clip on π_θ/π_anchor",
    "reinforce": "REINFORCE, −A log π_θ",
    "surrogate": "−A times the weight, which the gradient goes through",
    "gspo": "GSPO: PPO clip on the geometric mean of π_θ/π_anchor over the sequence",
    "cispo": "CISPO: −A log π_θ times the clipped, constant π_θ/π_anchor",
}
ANCHORS = {"old": "π_old", "current": "π_rollout", "rollout": "π_rollout"}
POLICIES = {"old": "old", "current": "θ", "rollout": "rollout"}
DENOMINATORS = {
    "kept": "rejected tokens leave the loss's denominator",
    "all": "rejected tokens stay in the loss's denominator",
}
NOTHING = "–"


def weight(rule: Weight | None) -> str:
    """Write the weight that multiplies the loss: `min(r_t, 2)`."""
    if rule is None:
        return NOTHING
    text = _weighted(rule, RATIOS[rule.over])
    return f"{text} / batch mean" if rule.normalize else text


def _weighted(rule: Weight, ratio: str) -> str:
    if rule.action == "none":
        return ratio
    if rule.action == "psis":
        return f"{ratio}, its tail Pareto-smoothed"
    if rule.action == "mask":
        return f"{ratio} where {_between(ratio, rule.lower, rule.upper, rule.strict)}, else 0"
    if rule.lower is None:
        return f"min({ratio}, {rule.upper:g})"
    return (
        f"max({ratio}, {rule.lower:g})"
        if rule.upper is None
        else f"clamp({ratio}, {rule.lower:g}, {rule.upper:g})"
    )


def rejection(rules: tuple[Reject, ...]) -> str:
    """Write the conditions for keeping tokens or sequences, all required: `sequences with 0.5 ≤ ∏r ≤ 2`."""
    return "; ".join(_rule(rule) for rule in rules) or NOTHING


def _rule(rule: Reject) -> str:
    unit = (
        "tokens of sequences" if rule.of_token and not _by_token(rule) else UNITS.get(rule.over, "sequences")
    )
    return f"{unit} with {bounds(rule)}{SIGNS[rule.advantage]}{_own(rule)}"


def judged(rule: Reject) -> str:
    """Write the statistic that a rule bounds: `∏r`, `mean (r−1−Δ)`."""
    return RATIOS[rule.over] if rule.statistic == "ratio" else OVER[rule.over] + STATISTICS[rule.statistic]


def bounds(rule: Reject) -> str:
    """Write the bounds on that statistic: `0.5 ≤ ∏r ≤ 2`."""
    return _between(judged(rule), rule.lower, rule.upper, rule.strict or rule.over == "batch")


def _by_token(rule: Reject) -> bool:
    return rule.over in UNITS


def _own(rule: Reject) -> str:
    """Write a rule's own numerator and token set, where they are not the preset's."""
    numerator = f" (r = π_{POLICIES[rule.policy]}/π_rollout)" if rule.policy else ""
    return numerator + (" over the tokens left" if rule.among == "left" else "")


def veto(rule: Veto | None) -> str:
    """Write the condition on a token that drops its sequence: `any r_t < 0.0001`."""
    if rule is None:
        return NOTHING
    sides = (
        rule.lower is not None and f"r_t < {rule.lower:g}",
        rule.upper is not None and f"r_t > {rule.upper:g}",
    )
    return "any " + " or ".join(side for side in sides if side)


def method(preset: Preset) -> str:
    """Write weight, rejection and veto in one line."""
    parts = (
        ("weight", weight(preset.weight)),
        ("keep", rejection(preset.reject)),
        ("veto", veto(preset.veto)),
    )
    return "; ".join(f"{word} {text}" for word, text in parts if text != NOTHING) or "no correction"


def _between(what: str, lower: float | None, upper: float | None, strict: bool = False) -> str:
    sign = "<" if strict else "≤"
    left = "" if lower is None else f"{lower:g} {sign} "
    right = "" if upper is None else f" {sign} {upper:g}"
    return f"{left}{what}{right}"


# ---------------------------------------------------------------- sections


def catalogue_section(presets: Mapping[str, Preset]) -> Section:
    """Build a table of all presets, grouped by family in the order of first appearance."""
    rows = tuple(
        (
            name,
            one.family or NOTHING,
            weight(one.weight),
            rejection(one.reject),
            veto(one.veto),
            one.loss,
            ", ".join(one.trainers) or NOTHING,
        )
        for name, one in _by_family(presets)
    )
    header = ("preset", "method", "weight", "keeps", "drops a sequence with", "loss", "trainers")
    caption = f"{len(rows)} presets; r = π_train/π_rollout, ∏r over the response of n tokens"
    notes = (
        "`offpol-diag presets NAME` has the exact formulas, the aliases and the source.",
        "`offpol-diag presets NAME --for TRAINER` prints its configuration, ready to paste.",
    )
    return Section("catalogue", "Presets", (Table("catalogue", caption, header, rows, notes),))


def _by_family(presets: Mapping[str, Preset]) -> list[tuple[str, Preset]]:
    order = list(dict.fromkeys(one.family for one in presets.values()))
    return sorted(presets.items(), key=lambda item: order.index(item[1].family))


def preset_section(preset: Preset) -> Section:
    """Build the section that describes one preset."""
    rows = tuple((word, text) for word, text in _lines(preset) if text)
    note = (Text(f"Note: {preset.note}", "warn"),) if preset.note else ()
    return Section(
        preset.name,
        preset.name,
        (Text(preset.summary), Table(preset.name, "Formulas", ("what", "how"), rows), *note),
    )


def _lines(preset: Preset) -> tuple[tuple[str, str], ...]:
    return (
        ("family", preset.family),
        ("ratio", NUMERATORS[preset.policy]),
        ("weight", weight(preset.weight)),
        ("keeps", rejection(preset.reject)),
        ("drops a sequence with", veto(preset.veto)),
        ("loss", LOSSES[preset.loss]),
        ("clipped", clipped(preset)),
        ("denominator", denominator(preset)),
        ("guards", "; ".join(guards(preset))),
        ("applied", "yes" if preset.apply else "no: the trainer only logs the numbers"),
        ("also called", ", ".join(preset.aliases)),
        ("trainers", ", ".join(preset.trainers)),
        ("logs like", preset.logs or ""),
        ("source", preset.source),
    )


CLIPPED = {
    "ppo_clip": "the ratio π_θ/{anchor}",
    "gspo": "the ratio (∏π_θ/{anchor})^(1/n)",
    "cispo": "the weight π_θ/{anchor}",
}
"""Loss → the ratio or weight that it clips, for losses that clip."""


def clipped(preset: Preset) -> str:
    """Write the clip of the loss's own ratio, `the ratio π_θ/π_old to [0.8, 1.2]`, and its other bounds."""
    if preset.loss not in CLIPPED:
        return ""
    clip, what = preset.clip, CLIPPED[preset.loss].format(anchor=ANCHORS[preset.policy])
    low = "−∞" if clip.low is None else f"{1 - clip.low:g}"
    high = "∞" if clip.high is None else f"{1 + clip.high:g}"
    dual = (
        ""
        if clip.dual is None or preset.loss == "cispo"
        else f"; where A < 0 the loss is at most −{clip.dual:g} A"
    )
    return f"{what} to [{low}, {high}]{dual}{_loss_bound(preset)}"


def _loss_bound(preset: Preset) -> str:
    """Write the bound on the log of that ratio; under GSPO an upper bound only."""
    safety = preset.clip.safety
    if safety is None:
        return ""
    return f"; its log {'at most ' if preset.loss == 'gspo' else 'within ±'}{safety:g} before exp"


def denominator(preset: Preset) -> str:
    """Write whether rejected tokens stay in the loss's denominator; empty where none are removed."""
    masked = preset.weight is not None and preset.weight.action == "mask"
    found = (
        (preset.reject or preset.veto) and DENOMINATORS[preset.denominator],
        masked and "tokens of weight 0 stay in the loss's denominator",
    )
    return "; ".join(text for text in found if text)


def guards(preset: Preset) -> tuple[str, ...]:
    """List the treatment of values that are too large, and unusual bounds."""
    rule = preset.weight
    found = (
        rule and (_clamp(rule) or "no bound on the log-ratio before exp"),
        rule and rule.overflow == "zero" and "a weight beyond float32 (log r > 88.7) counts as 0",
        rule and rule.action == "mask" and rule.strict and "a weight equal to a bound is outside",
        rule and rule.among == "left" and "the weight is over the tokens that veto and token rules leave",
        *(f"in the rules, {_clamp(one)}" for one in preset.reject if _clamp(one)),
        any(one.strict for one in preset.reject) and "a value equal to a bound is rejected",
    )
    return tuple(dict.fromkeys(text for text in found if text))


def _clamp(rule: Weight | Reject) -> str:
    if rule.safety is None:
        return ""
    late = isinstance(rule, Weight) or rule.statistic in AGGREGATES
    each = rule.over == "token" or rule.safety_at == "token" or not late
    return f"{'Δ of each token' if each else 'the aggregated log-ratio'} is clamped to ±{rule.safety:g}"
