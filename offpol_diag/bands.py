"""Bands of the headline numbers: from where on a mismatch is elevated, high or severe, and who says so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from offpol_diag.summary import Number

Tone = Literal["good", "info", "warn", "bad"]


@dataclass(frozen=True)
class Band:
    """A range of a metric: from `start` on in its worse direction, until the next band begins.

    Attributes:
        metric: name without prefix.
        name: typical, elevated, high, severe; good, fair, low.
        start: where it begins.
        tone: how bad it is.
        regime: what models or runs the range is about.
        source: who published it.
    """

    metric: str
    name: str
    start: float
    tone: Tone
    regime: str
    source: str


STUDY = "SGLang/miles study of train-inference mismatch"
BANDS = (
    Band("k3", "typical", 0.0, "good", "dense model, BF16", STUDY),
    Band(
        "k3",
        "elevated",
        1e-3,
        "info",
        "usual for MoE in BF16 and for FP8 rollouts",
        f"{STUDY}; NeMo-RL recipes",
    ),
    Band("k3", "high", 0.015, "warn", "above the gate for merging a new model", "prime-rl development guide"),
    Band("k3", "severe", 0.1, "bad", "warning level for |KL|", "verl rollout-correction guide"),
    Band("ppl_ratio", "typical", 0.0, "good", "e^±0.001, the same level as K3", "derived"),
    Band("ppl_ratio", "elevated", 1e-3, "info", "e^±0.001, the same level as K3", "derived"),
    Band("ppl_ratio", "high", 0.015, "warn", "e^±0.015, the same level as K3", "derived"),
    Band("ppl_ratio", "severe", 0.1, "bad", "e^±0.1, the same level as K3", "derived"),
    Band("ess", "good", 0.0, "good", "from 50%", "verl guide (of clamped weights there, of raw ones here)"),
    Band("ess", "fair", 0.5, "info", "30% to 50%", "verl guide (of clamped weights there, of raw ones here)"),
    Band("ess", "low", 0.7, "warn", "below 30%", "verl guide (of clamped weights there, of raw ones here)"),
    Band("chi2", "typical", 0.0, "good", "up to 1", "verl pull request 3984"),
    Band("chi2", "elevated", 1.0, "warn", "above 1", "verl pull request 3984"),
    Band("chi2", "high", 10.0, "bad", "from 10", "verl pull request 3984"),
)
"""Rising in badness within a metric. `ppl_ratio` is measured by |log|, `ess` by 1 − ESS."""

METRICS = ("k3", "ppl_ratio", "ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence")
"""Metrics that have bands."""

FAMILIES = {
    "ess_tokens": "ess",
    "ess_sequences": "ess",
    "chi2_token": "chi2",
    "chi2_sequence": "chi2",
}


def band(metric: str, number: Number) -> Band | None:
    """Return the band of a metric's value; None if it has none, or is unknown."""
    rows, value = of(metric), number.value
    if value is None and number.log10 is not None:
        value = math.inf if number.log10 > 0 else 0.0
    if not rows or value is None or (metric == "ppl_ratio" and value <= 0):
        return None
    away = abs(math.log(value)) if metric == "ppl_ratio" else value
    away = 1 - value if rows[0].metric == "ess" else away
    return [row for row in rows if row.start <= away or row is rows[0]][-1]


def of(metric: str) -> list[Band]:
    """Return the bands of a metric, best first; none where it has none."""
    return [row for row in BANDS if row.metric == FAMILIES.get(metric, metric)]


def bound(metric: str, row: Band) -> float:
    """Return where a band begins, as a value of the metric (of the PPL ratio the one above 1)."""
    if row.metric == "ess":
        return round(1 - row.start, 9)
    return math.exp(row.start) if metric == "ppl_ratio" else row.start
