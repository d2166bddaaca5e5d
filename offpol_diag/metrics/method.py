"""What one preset does to the dump: its weights after processing, and what it rejects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.accumulators import extremes
from offpol_diag.metrics.formula import Formula, Lookup, mean
from offpol_diag.metrics.outcome import Outcome, norm, outcome, token_mask
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Per-sequence columns [S] that the formulas of this module read."""
    done = outcome(scene, preset)
    n = scene.batch.lengths.to(torch.float64)
    there = n > 0
    found = {
        "kept": done.kept_tokens,
        "w": done.sums.first,
        "ww": done.sums.second,
        "w11": done.sums.about_one,
        "dropped": ((done.kept_tokens == 0) & there).to(torch.float64),
        "touched": ((done.kept_tokens < n) & there).to(torch.float64),
        "vetoed": done.kept.vetoed.to(torch.float64),
        "catastrophic": done.kept.catastrophic,
        **_sequence_weights(done, n),
        **norm(done, preset),
        **_truncated(done, n),
        **_by_sign(scene, done, preset),
    }
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def _sequence_weights(done: Outcome, n: Tensor) -> dict[str, Tensor]:
    """A sequence's weight: the mean over its tokens of what each contributes (0 when rejected)."""
    weight = done.sums.first / n.clamp(min=1)
    return {"v": weight, "vv": weight.square()}


def _truncated(done: Outcome, n: Tensor) -> dict[str, Tensor]:
    if done.weighed is None:
        zero = torch.zeros_like(n)
        return {"high": zero, "low": zero, "units": n, "bounded": zero, "tries": n}
    units = n if done.weighed.final.per == "token" else (n > 0).to(torch.float64)
    weighed = done.weighed
    counts = {"high": weighed.high, "low": weighed.low, "units": units}
    return counts | {"bounded": weighed.bounded, "tries": weighed.tries}


def _by_sign(scene: Scene, done: Outcome, preset: Preset) -> dict[str, Tensor]:
    """Tokens and kept tokens where the advantage is positive and where it is negative."""
    advantages = scene.batch.advantages
    if advantages is None:
        return {}
    found: dict[str, Tensor] = {}
    offsets = scene.batch.cu_seqlens
    for name, flags in (("positive", advantages > 0), ("negative", advantages < 0)):
        every = done.ratios.once(("sign", name), lambda f=flags: segments.count(f, offsets))  # type: ignore[misc]
        left = every if done.kept.tokens is None else segments.count(flags & done.kept.tokens, offsets)
        found |= {name: every, f"{name}_kept": left * done.kept.sequences}
    return found


def ranges(scene: Scene, preset: Preset) -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest and largest final weight of a kept token."""
    done = outcome(scene, preset)
    left = done.kept_tokens > 0
    if done.weighed is None:
        found = extremes(torch.ones_like(done.kept_tokens)[left])
    elif done.weighed.final.per == "sequence":
        found = extremes(done.weighed.final.values[left])
    elif done.kept.tokens is None:
        found = _per_sequence_range(done, left)
    else:
        found = extremes(done.weighed.final.values[token_mask(done) > 0])
    return {f"{preset.name}|weight": found}


def _per_sequence_range(done: Outcome, left: Tensor) -> tuple[Tensor, Tensor]:
    """Of token weights when whole sequences are kept or dropped; presets with equal weights share it."""
    assert done.weighed is not None
    weights, offsets = done.weighed.final.values, done.ratios.batch.cu_seqlens
    low = done.ratios.once(("low", id(weights)), lambda: segments.smallest(weights, offsets))
    high = done.ratios.once(("high", id(weights)), lambda: segments.largest(weights, offsets))
    return extremes(low[left])[0], extremes(high[left])[1]


def own_denominators(presets: Sequence[Preset], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What each preset's trainer divides its loss by, of sums read: kept tokens, or all tokens."""
    kept = {
        preset.name: f"{preset.name}|kept" if preset.denominator == "kept" else "tokens" for preset in presets
    }
    return {f"{name}|own": sums[column] for name, column in kept.items()}


ROUNDING = 16 * torch.finfo(torch.float64).eps


def _std(get: Lookup) -> Tensor:
    """From the sums about 1, or about 0 where the mean is nearer to it, so that little cancels.

    A variance below what rounding leaves of those sums (equal weights) is none.
    """
    mean_weight, n = get("w") / get("kept"), get("kept")
    small = mean_weight < 0.5
    about = torch.where(small, mean_weight, mean_weight - 1)
    variance = torch.where(small, get("ww"), get("w11")) / n - about**2
    floor = ROUNDING * torch.where(small, about**2, about.abs())
    return torch.sqrt(torch.where(variance > floor, variance, (0.0 * variance).abs()))


def _ess_tokens(get: Lookup) -> Tensor:
    return get("w") ** 2 / (get("tokens") * get("ww"))


_T, _S = "tokens", "sequences"

ROWS = (
    Formula("weight_mean", "", "kept tokens", "mean of the final weights", mean("w", "kept")),
    Formula("weight_std", "", "kept tokens", "standard deviation of the final weights", _std),
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
    ),
    Formula(
        "truncated_low", "fraction", "weights", "share of weights below the lower bound", mean("low", "units")
    ),
    Formula(
        "tokens_rejected",
        "fraction",
        _T,
        "share of tokens that rejection and veto remove",
        lambda get: 1 - get("kept") / get("tokens"),
    ),
    Formula(
        "sequences_dropped", "fraction", _S, "share of sequences with no token left", mean("dropped", _S)
    ),
    Formula(
        "sequences_touched",
        "fraction",
        _S,
        "share of sequences with at least one token rejected",
        mean("touched", _S),
    ),
    Formula("vetoed", "fraction", _S, "share of sequences dropped by the veto", mean("vetoed", _S)),
    Formula(
        "catastrophic_tokens", "fraction", _T, "share of tokens beyond the veto's bound", mean("catastrophic")
    ),
    Formula(
        "loss_scale",
        "",
        "the preset's own denominator",
        "Σw / kept tokens, or all tokens where rejected ones stay: the loss's scale in its trainer",
        mean("w", "own"),
    ),
    Formula(
        "loss_scale_removed",
        "",
        "kept tokens",
        "Σw / kept tokens: the loss's scale when rejected tokens leave the denominator",
        mean("w", "kept"),
    ),
    Formula(
        "loss_scale_kept",
        "",
        _T,
        "Σw / all tokens: the loss's scale when rejected tokens stay in the denominator",
        mean("w"),
    ),
)

SIGN_ROWS = (
    Formula(
        "kept_positive", "fraction", "tokens with A > 0", "share kept", mean("positive_kept", "positive")
    ),
    Formula(
        "kept_negative", "fraction", "tokens with A < 0", "share kept", mean("negative_kept", "negative")
    ),
)
