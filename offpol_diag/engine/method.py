"""The effect of one preset on the dump: its final weights, and the tokens it rejects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from offpol_diag.core.intervals import POSITIVE, Formula, Lookup, mean
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns, Rows
from offpol_diag.engine.segments import Array
from offpol_diag.presets import Preset


def columns(sums: PresetSums) -> Columns:
    """Compute the per-sequence columns [S] of this module's formulas, for every preset."""
    n, kept, there = sums.n, sums["kept"], sums.n > 0
    result = {
        **_weights(sums),
        "w11": sums["about_one"],
        "touched": kept.map(lambda x: ((x < n) & there).astype(np.float64)),
        "vetoed": sums.vetoed,
        "catastrophic": sums["hits"],
    }
    return Columns.joined(sums.named(result), sums.norms())


def weight_columns(sums: PresetSums) -> Columns:
    """Compute only the columns of weights."""
    return sums.named(_weights(sums))


def _weights(sums: PresetSums) -> dict[str, Rows]:
    n, kept = sums.n, sums["kept"]
    there = n > 0
    weight = sums["w"].map(lambda x: x / np.maximum(n, 1))
    return {
        "kept": kept,
        **{name: sums[name] for name in ("weighted", "w", "ww", "high", "low", "units", "bounded", "tries")},
        "dropped": kept.map(lambda x: ((x == 0) & there).astype(np.float64)),
        "v": weight,  # per sequence: mean over its tokens of the final weight (0 where rejected)
        "vv": weight.map(np.square),
    }


def ranges(sums: PresetSums) -> dict[str, tuple[float, float]]:
    """Return the smallest and largest final weight of a kept token, for every preset."""
    lows, highs = sums["smallest"], sums["largest"]
    low, high = lows.values.min(axis=1), highs.values.max(axis=1)
    names = [f"{preset.name}|weight" for preset in sums.presets]
    return {name: (low[lows.at[row]], high[highs.at[row]]) for row, name in enumerate(names)}


def own_denominators(presets: Sequence[Preset], sums: Mapping[str, Array]) -> dict[str, Array]:
    """Return the denominator of each preset's trainer's loss, from sums: kept tokens, or all tokens."""
    kept = {
        preset.name: f"{preset.name}|kept" if preset.denominator == "kept" else "tokens" for preset in presets
    }
    return {f"{name}|own": sums[column] for name, column in kept.items()}


ROUNDING = 16 * np.finfo(np.float64).eps


def _std(get: Lookup) -> Array:
    """Compute the standard deviation of the weights from sums about 1, or about 0 where the mean is below ½.

    A variance below the rounding error of those sums (equal weights) counts as 0.
    """
    mean_weight, n = get("w") / get("kept"), get("kept")
    small = mean_weight < 0.5
    about = np.where(small, mean_weight, mean_weight - 1)
    variance = np.where(small, get("ww"), get("w11")) / n - about**2
    floor = ROUNDING * np.where(small, about**2, np.abs(about))
    deviation: Array = np.sqrt(np.where(variance > floor, variance, np.abs(0.0 * variance)))
    return deviation


def _ess_tokens(get: Lookup) -> Array:
    share: Array = get("w") ** 2 / (get("tokens") * get("ww"))
    return share


_T, _S = "tokens", "sequences"

ROWS = (
    Formula(
        "weight_mean", "", "tokens not rejected", "mean of the final weights", mean("w", "kept"), POSITIVE
    ),
    Formula(
        "weight_std", "", "tokens not rejected", "standard deviation of the final weights", _std, POSITIVE
    ),
    Formula("ess_tokens", "fraction", _T, "(Σw)² / (n Σw²), a rejected token weighs 0", _ess_tokens),
    Formula(
        "ess_sequences",
        "fraction",
        _S,
        "(Σv)² / (n Σv²), v = mean over the sequence's tokens of the final weight, 0 where rejected",
        lambda get: get("v") ** 2 / (get("sequences") * get("vv")),
    ),
    Formula(
        "truncated_high",
        "fraction",
        "weights",
        "share of weights above the upper bound",
        mean("high", "units"),
        counts=True,
    ),
    Formula(
        "truncated_low",
        "fraction",
        "weights",
        "share of weights below the lower bound",
        mean("low", "units"),
        counts=True,
    ),
    Formula(
        "tokens_rejected",
        "fraction",
        _T,
        "share of tokens that rejection and veto remove",
        lambda get: 1 - get("kept") / get("tokens"),
        counts=True,
    ),
    Formula(
        "tokens_weighted",
        "fraction",
        _T,
        "share of tokens with a weight: not rejected, and of a final weight above 0",
        mean("weighted"),
        counts=True,
    ),
    Formula(
        "sequences_dropped",
        "fraction",
        _S,
        "share of sequences with no token left",
        mean("dropped", _S),
        counts=True,
    ),
    Formula(
        "sequences_touched",
        "fraction",
        _S,
        "share of sequences with at least one token rejected",
        mean("touched", _S),
        counts=True,
    ),
    Formula(
        "vetoed", "fraction", _S, "share of sequences dropped by the veto", mean("vetoed", _S), counts=True
    ),
    Formula(
        "catastrophic_tokens",
        "fraction",
        _T,
        "share of tokens beyond the veto's bound",
        mean("catastrophic"),
        counts=True,
    ),
)


def idle(preset: Preset) -> frozenset[str]:
    """Return the events that this preset cannot cause, whatever the data: their 0, or 1, is exact."""
    weight = preset.weight
    upper, lower = (weight.upper, weight.lower) if weight else (None, None)
    rejects = bool(preset.reject or preset.veto)
    zeroes = weight is not None and (weight.action == "mask" or weight.overflow == "zero")
    able = {
        **dict.fromkeys(("tokens_rejected", "sequences_dropped", "sequences_touched"), rejects),
        "tokens_weighted": rejects or zeroes,
        **dict.fromkeys(("vetoed", "catastrophic_tokens"), preset.veto is not None),
        "truncated_high": upper is not None,
        "truncated_low": lower is not None,
    }
    return frozenset(name for name, can in able.items() if not can)


def row_of(row: Formula, impossible: frozenset[str]) -> Formula:
    """Return a metric's formula for a preset, given what is `idle` for it."""
    return replace(row, counts=False) if row.name in impossible else row
