"""What one preset does to the dump: weights after processing, what is rejected, the loss and its scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offpol_diag import correction, losses, segments
from offpol_diag.accumulators import extremes
from offpol_diag.correction import Kept, Weighed
from offpol_diag.metrics.formula import Formula, Lookup, mean
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.ratios import Level, Ratios


SMALLEST_NORM = 1e-8
"""A mean weight that batch normalisation still divides by."""


@dataclass(frozen=True)
class Moments:
    """Sums per sequence, [S] float64 each.

    Σw and Σw² stay exact when every weight is tiny, Σ(w − 1)² when every weight is near 1.

    Attributes:
        first: Σw.
        second: Σw².
        about_one: Σ(w − 1)².
    """

    first: Tensor
    second: Tensor
    about_one: Tensor

    def times(self, x: Tensor) -> Moments:
        """Every sum times x [S]."""
        return Moments(self.first * x, self.second * x, self.about_one * x)


@dataclass(frozen=True)
class Outcome:
    """One preset applied to one batch, per sequence [S] float64.

    Attributes:
        ratios: of the preset's numerator policy.
        weighed: weights before rejection; None when the preset has none (then every weight is 1).
        kept: what is left.
        kept_tokens: tokens left.
        weight_sum: Σ of the final weights over all unmasked tokens, rejected or not.
        sums: over kept tokens, of the final weights.
    """

    ratios: Ratios
    weighed: Weighed | None
    kept: Kept
    kept_tokens: Tensor
    weight_sum: Tensor
    sums: Moments


def applied(preset: Preset) -> Preset:
    """What the trainer really does: a preset that is only logged changes nothing."""
    return preset if preset.apply else replace(preset, weight=None, reject=(), veto=None)


def outcome(scene: Scene, preset: Preset) -> Outcome:
    """Apply a preset to the batch; presets that share rules share the work."""
    preset = applied(preset)
    ratios = scene.ratios(preset.policy)
    key = ("outcome", preset.weight, preset.reject, preset.veto)
    return ratios.once(key, lambda: _outcome(ratios, preset))


def _outcome(ratios: Ratios, preset: Preset) -> Outcome:
    n = ratios.batch.lengths.to(torch.float64)
    kept = correction.keep(ratios, preset)
    tokens = _left(ratios, kept, preset, n)
    if preset.weight is None:
        return Outcome(ratios, None, kept, tokens, n, Moments(tokens, tokens, torch.zeros_like(n)))
    weighed = correction.weigh(ratios, preset.weight)
    sums = _moments(ratios, preset, weighed.final, kept, tokens)
    return Outcome(ratios, weighed, kept, tokens, _total(ratios, weighed.final, preset), sums)


def _left(ratios: Ratios, kept: Kept, preset: Preset, n: Tensor) -> Tensor:
    """Kept tokens per sequence."""
    if kept.tokens is None:
        return n * kept.sequences
    flags = kept.tokens
    counted = ratios.once(("left", preset.reject), lambda: segments.count(flags, ratios.batch.cu_seqlens))
    return counted * kept.sequences


def _total(ratios: Ratios, weights: Level, preset: Preset) -> Tensor:
    if weights.per == "sequence":
        return weights.values * ratios.batch.lengths
    return ratios.once(
        ("total", preset.weight), lambda: segments.total(weights.values, ratios.batch.cu_seqlens)
    )


def _moments(ratios: Ratios, preset: Preset, weights: Level, kept: Kept, tokens: Tensor) -> Moments:
    """Sums over kept tokens; shared by presets with the same weights and the same rules on tokens."""
    if weights.per == "sequence":
        return _powers(weights.values).times(tokens)
    rules = preset.reject if kept.tokens is not None else ()
    sums = ratios.once(
        ("moments", preset.weight, rules), lambda: _token_moments(ratios, weights.values, kept)
    )
    return sums.times(kept.sequences)


def _powers(w: Tensor) -> Moments:
    return Moments(w, w.square(), (w - 1).square())


def _token_moments(ratios: Ratios, w: Tensor, kept: Kept) -> Moments:
    each, offsets = _powers(w), ratios.batch.cu_seqlens

    def total(x: Tensor) -> Tensor:
        return segments.total(x if kept.tokens is None else torch.where(kept.tokens, x, 0.0), offsets)

    return Moments(total(each.first), total(each.second), total(each.about_one))


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
        **_norm(done, preset, n),
        **_truncated(done, n),
        **_by_sign(scene, done, preset),
        **loss_columns(scene, preset, done),
    }
    return {f"{preset.name}|{name}": values for name, values in found.items()}


def _sequence_weights(done: Outcome, n: Tensor) -> dict[str, Tensor]:
    """A sequence's weight: the mean over its tokens of what each contributes (0 when rejected)."""
    weight = done.sums.first / n.clamp(min=1)
    return {"v": weight, "vv": weight.square()}


def _norm(done: Outcome, preset: Preset, n: Tensor) -> dict[str, Tensor]:
    """What batch normalisation divides by: the mean weight before rejection, over tokens or sequences."""
    if preset.weight is None or not preset.weight.normalize:
        return {}
    if preset.weight.over == "token":
        return {"norm": done.weight_sum, "norm_units": n}
    return {"norm": done.weight_sum / n.clamp(min=1), "norm_units": (n > 0).to(torch.float64)}


def _truncated(done: Outcome, n: Tensor) -> dict[str, Tensor]:
    if done.weighed is None:
        zero = torch.zeros_like(n)
        return {"high": zero, "low": zero, "units": n}
    units = n if done.weighed.final.per == "token" else (n > 0).to(torch.float64)
    return {"high": done.weighed.high, "low": done.weighed.low, "units": units}


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


def loss_columns(scene: Scene, preset: Preset, done: Outcome) -> dict[str, Tensor]:
    """Weighted loss over kept tokens, its mean over the sequence's kept tokens, clip counts, ppo_kl.

    Normalised presets scale their loss when it is read, like their weights, by `loss_norm` over `loss_norm_units`.
    """
    key = ("loss", preset.loss, preset.policy)
    loss = done.ratios.once(key, lambda: losses.token_loss(scene.batch, preset))
    if loss is None:
        return {}
    scale = _norm(done, preset, scene.batch.lengths.to(torch.float64)) if loss.weighted else {}
    weights = _token_weights(scene, done) if loss.weighted else None
    mask = _token_mask(scene, done)
    offsets = scene.batch.cu_seqlens
    summed = segments.total((loss.loss if weights is None else loss.loss * weights) * mask, offsets)
    return {
        **{f"loss_{name}": values for name, values in scale.items()},
        "loss": summed,
        "loss_mean": summed / done.kept_tokens.clamp(min=1),
        "loss_rows": (done.kept_tokens > 0).to(torch.float64),
        "clipped": segments.total(loss.clipped * mask, offsets),
        "clipped_lower": segments.total(loss.clipped_lower * mask, offsets),
        "kl": segments.total(loss.kl * mask, offsets),
    }


def _token_weights(scene: Scene, done: Outcome) -> Tensor | None:
    if done.weighed is None:
        return None
    return to_tokens(done.weighed.final, scene)


def to_tokens(level: Level, scene: Scene) -> Tensor:
    """Values per token, [T]."""
    return level.values if level.per == "token" else segments.spread(level.values, scene.batch.cu_seqlens)


def _token_mask(scene: Scene, done: Outcome) -> Tensor:
    mask = segments.spread(done.kept.sequences, scene.batch.cu_seqlens)
    mask = mask if done.kept.tokens is None else mask & done.kept.tokens
    return mask.to(torch.float64)


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
        found = extremes(done.weighed.final.values[_token_mask(scene, done) > 0])
    return {f"{preset.name}|weight": found}


def _per_sequence_range(done: Outcome, left: Tensor) -> tuple[Tensor, Tensor]:
    """Of token weights when whole sequences are kept or dropped; presets with equal weights share it."""
    assert done.weighed is not None
    weights, offsets = done.weighed.final.values, done.ratios.batch.cu_seqlens
    low = done.ratios.once(("low", id(weights)), lambda: segments.smallest(weights, offsets))
    high = done.ratios.once(("high", id(weights)), lambda: segments.largest(weights, offsets))
    return extremes(low[left])[0], extremes(high[left])[1]


def _scale(get: Lookup, of: str = "norm") -> Tensor:
    """1, or what batch normalisation multiplies every weight by."""
    return 1 / norm_factor(get(of), get(f"{of}_units"))


def norm_factor(total: Tensor, units: Tensor) -> Tensor:
    """What batch normalisation divides by; 1 where the mean weight is at most 1e-8, as in verl."""
    mean_weight = total / units
    return torch.where(mean_weight > SMALLEST_NORM, mean_weight, 1.0)


def _weights(get: Lookup) -> Tensor:
    return get("w") * _scale(get)


def _std(get: Lookup) -> Tensor:
    away = get("w") / get("kept") - 1
    return torch.sqrt((get("w11") / get("kept") - away**2).clamp(min=0)) * _scale(get)


def _ess_tokens(get: Lookup) -> Tensor:
    return get("w") ** 2 / (get("tokens") * get("ww"))


def _loss(column: str, per: str) -> Callable[[Lookup], Tensor]:
    return lambda get: get(column) / get(per) * _scale(get, "loss_norm")


_T, _S = "tokens", "sequences"

ROWS = (
    Formula(
        "weight_mean", "", "kept tokens", "mean of the final weights", lambda get: _weights(get) / get("kept")
    ),
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
        "loss_scale_removed",
        "",
        "kept tokens",
        "Σw / kept tokens: the loss's scale when rejected tokens leave the denominator",
        lambda get: _weights(get) / get("kept"),
    ),
    Formula(
        "loss_scale_kept",
        "",
        _T,
        "Σw / all tokens: the loss's scale when rejected tokens stay in the denominator",
        lambda get: _weights(get) / get("tokens"),
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

LOSS_ROWS = (
    Formula("pg_loss", "", "kept tokens", "Σ w L / kept tokens (token-mean)", _loss("loss", "kept")),
    Formula(
        "pg_loss_kept",
        "",
        _T,
        "Σ w L / all tokens (token-mean, rejected tokens stay)",
        _loss("loss", "tokens"),
    ),
    Formula(
        "pg_loss_seq_sum", "", _S, "Σ w L / sequences left (seq-mean-token-sum)", _loss("loss", "loss_rows")
    ),
    Formula(
        "pg_loss_seq_mean",
        "",
        _S,
        "mean over sequences left of their mean w L (seq-mean-token-mean)",
        _loss("loss_mean", "loss_rows"),
    ),
    Formula(
        "pg_loss_seq_norm",
        "",
        _S,
        "Σ w L / sequences left / longest response (seq-mean-token-sum-norm)",
        lambda get: _loss("loss", "loss_rows")(get) / get("longest"),
    ),
    Formula(
        "pg_clipfrac", "fraction", "kept tokens", "share where the PPO clip decides", mean("clipped", "kept")
    ),
    Formula(
        "pg_clipfrac_lower",
        "fraction",
        "kept tokens",
        "share where the dual clip decides",
        mean("clipped_lower", "kept"),
    ),
    Formula("ppo_kl", "nats", "kept tokens", "mean(log π_anchor − log π_θ)", mean("kl", "kept")),
)
