"""Presets as formulas: weight, rejection and veto, with the direction of the ratio.

r_t = π_train/π_rollout of token t, Δ = log r; ∏r over the response is the product ratio of the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.presets import AGGREGATES, Preset, Reject, Veto, Weight
from offpol_diag.table import Table

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
ANCHORS = {"old": "π_old", "current": "π_rollout"}
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
    return "; ".join(_rule(rule) for rule in rules) or NOTHING


def _rule(rule: Reject) -> str:
    unit = UNITS.get(rule.over, "tokens of sequences" if rule.on_tokens else "sequences")
    return f"{unit} with {bounds(rule)}{SIGNS[rule.advantage]}"


def judged(rule: Reject) -> str:
    """Write the statistic that a rule bounds: `∏r`, `mean (r−1−Δ)`."""
    return RATIOS[rule.over] if rule.statistic == "ratio" else OVER[rule.over] + STATISTICS[rule.statistic]


def bounds(rule: Reject) -> str:
    """Write the bounds on that statistic: `0.5 ≤ ∏r ≤ 2`."""
    return _between(judged(rule), rule.lower, rule.upper, strict=rule.over == "batch")


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


# ---------------------------------------------------------------- tables


def catalogue_table(presets: Mapping[str, Preset]) -> Table:
    """Build a table of all presets, grouped by family in the order of first appearance."""
    families = list(dict.fromkeys(one.family for one in presets.values()))
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
        for name, one in sorted(presets.items(), key=lambda item: families.index(item[1].family))
    )
    header = ("preset", "method", "weight", "keeps", "drops a sequence with", "loss", "trainers")
    caption = f"{len(rows)} presets; r = π_train/π_rollout, ∏r over the response of n tokens"
    notes = (
        "`offpol-diag presets NAME` has the exact formulas, the aliases and the source.",
        "`offpol-diag presets NAME --for TRAINER` prints its configuration, ready to paste.",
        "Score centering is none of them: no dump of sampled tokens holds the sampler's top-k.",
    )
    return Table("catalogue", caption, header, rows, notes)


def description(preset: Preset) -> tuple[str | Table, ...]:
    """Describe one preset: its summary, its formulas and a note."""
    lines = {
        "family": preset.family,
        "ratio": NUMERATORS[preset.policy],
        "weight": weight(preset.weight),
        "keeps": rejection(preset.reject),
        "drops a sequence with": veto(preset.veto),
        "loss": LOSSES[preset.loss],
        "clipped": clipped(preset),
        "denominator": denominator(preset),
        "guards": "; ".join(guards(preset)),
        "also called": ", ".join(preset.aliases),
        "trainers": ", ".join(preset.trainers),
        "logs like": preset.logs or "",
        "source": preset.source,
    }
    table = Table(
        preset.name, "Formulas", ("what", "how"), tuple((word, text) for word, text in lines.items() if text)
    )
    note = (f"! Note: {preset.note}",) if preset.note else ()
    return (f"{preset.name}: {preset.summary}", table, *note)


CLIPPED = {
    "ppo_clip": "the ratio π_θ/{anchor}",
    "gspo": "the ratio (∏π_θ/{anchor})^(1/n)",
    "cispo": "the weight π_θ/{anchor}",
}
"""Loss → the ratio or weight that it clips, for losses that clip."""


def clipped(preset: Preset) -> str:
    """Write the clip of the loss's own ratio, `the ratio π_θ/π_old to [0.8, 1.2]`, and its other bounds."""
    clip = preset.clip
    if preset.loss not in CLIPPED:
        return ""
    what = CLIPPED[preset.loss].format(anchor=ANCHORS[preset.policy])
    low = "−∞" if clip.low is None else f"{1 - clip.low:g}"
    high = "∞" if clip.high is None else f"{1 + clip.high:g}"
    text = f"{what} to [{low}, {high}]"
    if clip.dual is not None and preset.loss != "cispo":
        text += f"; where A < 0 the loss is at most −{clip.dual:g} A"
    if clip.safety is not None:
        text += f"; its log {'at most ' if preset.loss == 'gspo' else 'within ±'}{clip.safety:g} before exp"
    return text


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
        *(f"in the rules, {_clamp(one)}" for one in preset.reject if _clamp(one)),
    )
    return tuple(dict.fromkeys(text for text in found if text))


def _clamp(rule: Weight | Reject) -> str:
    if rule.safety is None:
        return ""
    late = isinstance(rule, Weight) or rule.statistic in AGGREGATES
    each = rule.over == "token" or rule.safety_at == "token" or not late
    return f"{'Δ of each token' if each else 'the aggregated log-ratio'} is clamped to ±{rule.safety:g}"
