"""A preset in formulas: what it weighs, rejects and vetoes, with the direction of the ratio.

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
STATISTICS = {"k1": "−Δ", "k2": "Δ²/2", "k3": "(r−1−Δ)", "prob_diff": "(π_train−π_rollout)", "tv": "|r−1|/2"}
OVER = {"token": "", "sum": "Σ ", "mean": "mean ", "max": "max ", "min": "min ", "segment": "turn mean of "}
UNITS = {"token": "tokens", "segment": "turns"}
SIGNS = {
    "any": "",
    "negative": ", where A < 0",
    "positive": ", where A > 0",
    "against": ", the upper bound where A > 0, the lower where A < 0",
}
LOSSES = {"ppo_clip": "PPO clip on π_θ/π_anchor", "reinforce": "REINFORCE, −A log π_θ"}
NOTHING = "–"


def weight(rule: Weight | None) -> str:
    """The weight that multiplies the loss: `min(r_t, 2)`."""
    if rule is None:
        return NOTHING
    text = _weighted(rule, RATIOS[rule.over])
    return f"{text} / batch mean" if rule.normalize else text


def _weighted(rule: Weight, ratio: str) -> str:
    if rule.action == "none":
        return ratio
    if rule.action == "mask":
        return f"{ratio} where {_between(ratio, rule.lower, rule.upper)}, else 0"
    if rule.lower is None:
        return f"min({ratio}, {rule.upper:g})"
    return (
        f"max({ratio}, {rule.lower:g})"
        if rule.upper is None
        else f"clamp({ratio}, {rule.lower:g}, {rule.upper:g})"
    )


def rejection(rules: tuple[Reject, ...]) -> str:
    """What is kept; every rule must hold: `sequences with 0.5 ≤ ∏r ≤ 2`."""
    return "; ".join(_rule(rule) for rule in rules) or NOTHING


def _rule(rule: Reject) -> str:
    statistic = (
        RATIOS[rule.over] if rule.statistic == "ratio" else OVER[rule.over] + STATISTICS[rule.statistic]
    )
    bounds = _between(statistic, rule.lower, rule.upper)
    return f"{UNITS.get(rule.over, 'sequences')} with {bounds}{SIGNS[rule.advantage]}"


def veto(rule: Veto | None) -> str:
    """What one token does to its sequence: `any r_t < 0.0001`."""
    if rule is None:
        return NOTHING
    sides = (
        rule.lower is not None and f"r_t < {rule.lower:g}",
        rule.upper is not None and f"r_t > {rule.upper:g}",
    )
    return "any " + " or ".join(side for side in sides if side)


def method(preset: Preset) -> str:
    """Weight, rejection and veto in one line."""
    parts = (
        ("weight", weight(preset.weight)),
        ("keep", rejection(preset.reject)),
        ("veto", veto(preset.veto)),
    )
    return "; ".join(f"{word} {text}" for word, text in parts if text != NOTHING) or "no correction"


def _between(what: str, lower: float | None, upper: float | None) -> str:
    left = "" if lower is None else f"{lower:g} ≤ "
    right = "" if upper is None else f" ≤ {upper:g}"
    return f"{left}{what}{right}"


# ---------------------------------------------------------------- sections


def catalogue_section(presets: Mapping[str, Preset]) -> Section:
    """Every preset, a row each."""
    rows = tuple(
        (
            name,
            weight(one.weight),
            rejection(one.reject),
            veto(one.veto),
            one.loss,
            ", ".join(one.trainers) or NOTHING,
        )
        for name, one in presets.items()
    )
    header = ("preset", "weight", "keeps", "drops a sequence with", "loss", "trainers")
    caption = f"{len(rows)} presets; r = π_train/π_rollout, ∏r over the response of n tokens"
    notes = ("`offpol-diag presets NAME` has the exact formulas, the aliases and the source.",)
    return Section("catalogue", "Presets", (Table("catalogue", caption, header, rows, notes),))


def preset_section(preset: Preset) -> Section:
    """One preset, line by line."""
    rows = tuple((word, text) for word, text in _lines(preset) if text)
    note = (Text(f"Note: {preset.note}", "warn"),) if preset.note else ()
    return Section(
        preset.name,
        preset.name,
        (Text(preset.summary), Table(preset.name, "Formulas", ("what", "how"), rows), *note),
    )


def _lines(preset: Preset) -> tuple[tuple[str, str], ...]:
    return (
        ("ratio", NUMERATORS[preset.policy]),
        ("weight", weight(preset.weight)),
        ("weight's safety", _clamp(preset.weight) if preset.weight else ""),
        ("keeps", rejection(preset.reject)),
        ("rules' safety", "; ".join(filter(None, map(_clamp, preset.reject)))),
        ("drops a sequence with", veto(preset.veto)),
        ("loss", LOSSES[preset.loss]),
        ("applied", "yes" if preset.apply else "no: the trainer only logs the numbers"),
        ("also called", ", ".join(preset.aliases)),
        ("trainers", ", ".join(preset.trainers)),
        ("logs like", preset.logs or ""),
        ("source", preset.source),
    )


def _clamp(rule: Weight | Reject) -> str:
    if rule.safety is None:
        return ""
    late = isinstance(rule, Weight) or rule.statistic in AGGREGATES
    each = rule.over == "token" or rule.safety_at == "token" or not late
    return f"{'Δ of each token' if each else 'the aggregated log-ratio'} is clamped to ±{rule.safety:g}"
