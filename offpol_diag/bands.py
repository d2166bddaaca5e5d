"""Bands of the headline numbers: from where on a mismatch is elevated, high or severe, and who says so."""

from __future__ import annotations

import math
from typing import Literal

from offpol_diag.summary import Band, Number

Tone = Literal["good", "warn", "bad", "info"]
TONES: dict[str, Tone] = {
    "typical": "good",
    "good": "good",
    "reliable": "good",
    "elevated": "info",
    "fair": "info",
    "high": "warn",
}
"""Name of a band → how bad it is; others are bad."""

STUDY = "SGLang/miles study of train-inference mismatch"
_MOE, _GATE = "usual for MoE in BF16 and for FP8 rollouts", "above the gate for merging a new model"
_K3 = (
    ("typical", 1e-3, "dense model, BF16", STUDY),
    ("elevated", 0.015, _MOE, f"{STUDY}; NeMo-RL recipes"),
    ("high", 0.1, _GATE, "prime-rl development guide"),
    ("severe", None, "warning level for |KL|", "verl rollout-correction guide"),
)
_LEVELS = ("e^±0.001", "e^±0.001", "e^±0.015", "e^±0.1")
_PPL = tuple(
    (name, end and math.exp(end), f"{level}, the same level as K3", "derived")
    for (name, end, *_), level in zip(_K3, _LEVELS, strict=True)
)
_VERL, _CHI2_SOURCE = "verl guide (of clamped weights there, of raw ones here)", "verl pull request 3984"
_ESS = (
    ("good", 0.5, "from 50%", _VERL),
    ("fair", 0.3, "30% to 50%", _VERL),
    ("low", None, "below 30%", _VERL),
)
_CHI2 = (
    ("typical", 1.0, "up to 1", _CHI2_SOURCE),
    ("elevated", 10.0, "above 1", _CHI2_SOURCE),
    ("high", None, "from 10", _CHI2_SOURCE),
)
_ROWS = {
    "k3": _K3,
    "ppl_ratio": _PPL,
    "ess_tokens": _ESS,
    "ess_sequences": _ESS,
    "chi2_token": _CHI2,
    "chi2_sequence": _CHI2,
}
"""Metric → name, end in its worse direction, regime and source of each band, best first."""


def _ranges(metric: str) -> tuple[Band, ...]:
    start, found = None, []
    for name, end, regime, source in _ROWS[metric]:
        low, high = (end, start) if metric.startswith("ess") else (start, end)
        found.append(Band(metric=metric, name=name, low=low, high=high, regime=regime, source=source))
        start = end
    return tuple(found)


BANDS = {metric: _ranges(metric) for metric in _ROWS}
"""Metric → its bands, best first; those of the PPL ratio are of its side above 1."""


def band(metric: str, number: Number) -> Band | None:
    """Return the band of a metric's value; None if it has none, or is unknown."""
    value = number.value
    if value is None and number.log10 is not None:
        value = math.inf if number.log10 > 0 else 0.0
    if metric not in BANDS or value is None or (metric == "ppl_ratio" and value <= 0):
        return None
    value = max(value, 1 / value) if metric == "ppl_ratio" else value
    for one in BANDS[metric]:
        end = one.low if metric.startswith("ess") else one.high
        if end is None or (value > end if metric.startswith("ess") else value < end):
            return one
    raise AssertionError(f"the worst band of {metric} has an end")


def start(one: Band) -> float | None:
    """Return where a band begins in its worse direction; None for the best."""
    return one.high if one.metric.startswith("ess") else one.low


def tone(name: str) -> Tone:
    """Return how bad a band is."""
    return TONES.get(name, "bad")
