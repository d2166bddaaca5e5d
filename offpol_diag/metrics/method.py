"""What one preset does to the dump: its weights after processing, and what it rejects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.accumulators import extremes
from offpol_diag.correction import weight_key
from offpol_diag.metrics.formula import Formula, Lookup, mean
from offpol_diag.metrics.outcome import Outcome, norm, token_rules
from offpol_diag.metrics.pieces import Pieces, pieces
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset, Reject
from offpol_diag.ratios import Ratios


def columns(scene: Scene, preset: Preset) -> dict[str, Tensor]:
    """Per-sequence columns [S] that the formulas of this module read."""
    done = pieces(scene, preset)
    n = scene.batch.lengths.to(torch.float64)
    there, acted = n > 0, done.acted
    weight = done.sums.first / n.clamp(min=1)
    found = {
        "kept": done.kept_tokens,
        "w": done.sums.first,
        "ww": done.sums.second,
        "w11": done.sums.about_one,
        "dropped": ((done.kept_tokens == 0) & there).to(torch.float64),
        "touched": ((done.kept_tokens < n) & there).to(torch.float64),
        "vetoed": done.first.kept.vetoed.to(torch.float64),
        "catastrophic": done.first.kept.catastrophic,
        "v": weight,  # of a sequence: the mean over its tokens of what each contributes (0 when rejected)
        "vv": weight.square(),
        "high": acted.high,
        "low": acted.low,
        "units": acted.units,
        "bounded": acted.bounded,
        "tries": acted.tries,
        **norm(done, preset),
        **_by_sign(done),
    }
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def _by_sign(done: Pieces) -> dict[str, Tensor]:
    """Tokens and kept tokens where the advantage is positive and where it is negative."""
    if done.ratios.batch.advantages is None:
        return {}
    every = _signs(done.ratios, None)
    left = done.total(sign_counts)
    return every | {f"{name}_kept": x * done.sequences for name, x in left.items()}


def sign_counts(done: Outcome, preset: Preset) -> dict[str, Tensor]:
    """Tokens by the sign of their advantage that pass the rules on tokens, [S]."""
    return _signs(done.ratios, done.kept.tokens, token_rules(done, preset))


def _signs(ratios: Ratios, keep: Tensor | None, rules: tuple[Reject, ...] = ()) -> dict[str, Tensor]:
    """Tokens by the sign of their advantage, of those to keep, [S]."""
    return ratios.once(("signs", rules), lambda: _count_signs(ratios, keep))


def _count_signs(ratios: Ratios, keep: Tensor | None) -> dict[str, Tensor]:
    advantages, offsets = ratios.batch.advantages, ratios.batch.cu_seqlens
    assert advantages is not None
    flags = {"positive": advantages > 0, "negative": advantages < 0}
    return {name: segments.count(at if keep is None else at & keep, offsets) for name, at in flags.items()}


def ranges(scene: Scene, preset: Preset) -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest and largest final weight of a kept token."""
    low, high = weight_span(pieces(scene, preset))
    return {f"{preset.name}|weight": (extremes(low)[0], extremes(high)[1])}


def weight_span(done: Pieces) -> tuple[Tensor, Tensor]:
    """Smallest and largest final weight of a sequence's kept tokens, [S]; (+inf, -inf) where none is kept."""
    if done.first.preset.weight is None or done.per_sequence is not None:
        low = high = torch.ones_like(done.kept_tokens) if done.per_sequence is None else done.per_sequence
    else:
        found = [token_span(one, rules) for one, rules in done.each]
        low = reduce(torch.minimum, [low for low, _ in found])
        high = reduce(torch.maximum, [high for _, high in found])
    left = done.kept_tokens > 0
    return torch.where(left, low, torch.inf), torch.where(left, high, -torch.inf)


def token_span(done: Outcome, preset: Preset) -> tuple[Tensor, Tensor]:
    """Of the tokens that pass the rules on tokens; presets with equal weights and rules share it."""
    key = ("span", weight_key(preset), token_rules(done, preset))
    return done.ratios.once(key, lambda: _kept_span(done))


def _kept_span(done: Outcome) -> tuple[Tensor, Tensor]:
    assert done.weighed is not None
    weights, keep, offsets = done.weighed.final.values, done.kept.tokens, done.ratios.batch.cu_seqlens
    low, high = (
        weights if keep is None else torch.where(keep, weights, absent) for absent in (torch.inf, -torch.inf)
    )
    return segments.smallest(low, offsets), segments.largest(high, offsets)


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
