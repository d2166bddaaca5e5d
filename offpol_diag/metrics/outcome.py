"""One preset applied to one batch: what is kept, with which weights.

Presets that share a weight rule, or rules on tokens, share the work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.correction import Kept, Weighed
from offpol_diag.metrics.summed import Inputs, Summed, left
from offpol_diag.moments import Moments
from offpol_diag.presets import Policy, Preset, Reject
from offpol_diag.ratios import Ratios
from offpol_diag.segments import numbers

PER_SEQUENCE = ("sum", "mean")
"""Weights over these are one for the whole sequence; over `token` and `segment` tokens have their own."""
SMALLEST_NORM = 1e-8
"""A mean weight that batch normalisation still divides by."""
NORMS = ("norm", "norm_units")
"""What that mean is made of: a sum, and of how many."""


@dataclass(frozen=True)
class WeightSums:
    """Sums per sequence, [S] float64 each.

    Σw and Σw² stay exact when every weight is tiny, Σ(w − 1) and Σ(w − 1)² when every weight is near 1.

    Attributes:
        first: Σw.
        second: Σw².
        excess: Σ(w − 1).
        about_one: Σ(w − 1)².
    """

    first: Tensor
    second: Tensor
    excess: Tensor
    about_one: Tensor

    def named(self) -> dict[str, Tensor]:
        """By the name of the sum."""
        return dict(vars(self))

    def map(self, function: Callable[[Tensor], Tensor]) -> WeightSums:
        """The same sums with a function applied to each."""
        return WeightSums(**{name: function(x) for name, x in self.named().items()})

    def times(self, x: Tensor) -> WeightSums:
        """Every sum times x [S]."""
        return WeightSums(self.first * x, self.second * x, self.excess * x, self.about_one * x)

    def plus(self, more: WeightSums) -> WeightSums:
        """Sums over the tokens of both."""
        return WeightSums(
            self.first + more.first,
            self.second + more.second,
            self.excess + more.excess,
            self.about_one + more.about_one,
        )


@dataclass(frozen=True)
class Outcome:
    """One preset applied to one batch, per sequence [S] float64.

    Attributes:
        ratios: of the preset's numerator policy.
        preset: one with the same weight, rules and veto.
        kept: what is left.
    """

    ratios: Ratios
    preset: Preset
    kept: Kept

    @cached_property
    def passed(self) -> Tensor:
        """Tokens that pass the rules on tokens."""
        return passing_tokens(self, self.preset)["passed"]

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Tokens left."""
        return self.passed * self.kept.sequences

    @cached_property
    def weight_sum(self) -> Tensor:
        """Σ of the final weights over all unmasked tokens, rejected or not."""
        weight, lengths = self.preset.weight, self.ratios.batch.lengths
        if weight is None:
            return lengths.to(torch.float64)
        if weight.over not in PER_SEQUENCE:
            return _total(self.ratios, self.preset)
        return correction.weigh(self.ratios, self.preset).final.values * lengths

    @cached_property
    def sums(self) -> WeightSums:
        """Of the final weights, over kept tokens."""
        weight, tokens = self.preset.weight, self.kept_tokens
        if weight is None:
            none = torch.zeros_like(tokens)
            return WeightSums(tokens, tokens, none, none)
        if weight.over in PER_SEQUENCE:
            return powers(correction.weigh(self.ratios, self.preset).final.values).times(tokens)
        return self.moments().times(self.kept.sequences)

    def moments(self) -> WeightSums:
        """Of tokens' own weights, over those that pass the rules on tokens."""
        return WeightSums(**token_moments(self, self.preset))

    @cached_property
    def weighed(self) -> Weighed | None:
        """Weights before rejection; None when the preset has none (then every weight is 1)."""
        return None if self.preset.weight is None else correction.weigh(self.ratios, self.preset)


class Weights(Protocol):
    """What knows the sum of all weights: an outcome."""

    @property
    def ratios(self) -> Ratios:
        """Of all tokens."""
        ...

    @property
    def weight_sum(self) -> Tensor:
        """Per sequence, [S]."""
        ...


def applied(preset: Preset) -> Preset:
    """What the trainer really does: a preset that is only logged changes nothing."""
    return preset if preset.apply else replace(preset, weight=None, reject=(), veto=None)


def normalised(preset: Preset) -> bool:
    """Whether weights are divided by a batch mean; a preset that is only logged divides nothing."""
    return preset.apply and preset.weight is not None and preset.weight.normalize


def of(ratios: Ratios, preset: Preset) -> Outcome:
    """A preset that is applied, on some tokens or all; presets that share rules share the work."""
    key = ("outcome", preset.weight, preset.reject, preset.veto)
    return ratios.once(key, lambda: Outcome(ratios, preset, correction.keep(ratios, preset)))


def _passing(done: Outcome, preset: Preset) -> Inputs | dict[str, Tensor]:
    if done.kept.tokens is not None:
        return (done.kept.tokens,)
    ratios = done.ratios
    return {"passed": ratios.once("lengths", lambda: ratios.batch.lengths.to(torch.float64))}


def _total(ratios: Ratios, preset: Preset) -> Tensor:
    """Σ of the weights of tokens."""
    return ratios.once(
        ("total", correction.weight_key(preset)),
        lambda: segments.total(correction.weigh(ratios, preset).final.values, ratios.batch.cu_seqlens),
    )


def powers(w: Tensor) -> WeightSums:
    """What each weight adds to the sums."""
    return WeightSums(w, w.square(), w - 1, (w - 1).square())


def token_weights(done: Outcome) -> Tensor:
    """The weights of tokens, [T], which must have their own."""
    assert done.weighed is not None
    return done.weighed.final.values


def _moments(weights: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
    return powers(weights).map(lambda x: left(x, keep)).named()


def near_weight_sums(near: Moments, policy: Policy) -> WeightSums:
    """Of near tokens, which weigh r."""
    x, xx = near.of("x", policy), near.of("x²", policy)
    return WeightSums(near.n + x, near.n + 2 * x + xx, x, xx)


def token_rules(done: Outcome, preset: Preset) -> tuple[Reject, ...]:
    """What the mask of single tokens depends on; presets that drop whole sequences share what follows."""
    return applied(preset).reject if done.kept.tokens is not None else ()


passing_tokens = Summed(
    lambda done, preset: ("left", token_rules(done, preset)),
    _passing,
    lambda keep: {"passed": numbers(keep)},
)
"""How many tokens pass the rules on tokens."""
token_moments: Summed[Outcome] = Summed(
    lambda done, preset: ("moments", correction.weight_key(done.preset), token_rules(done, preset)),
    lambda done, preset: (token_weights(done), done.kept.tokens),
    _moments,
)
"""`WeightSums` of tokens' own weights, over those that pass the rules on tokens."""


def norm(done: Weights, preset: Preset) -> dict[str, Tensor]:
    """What batch normalisation divides by: the mean weight before rejection, over tokens or sequences."""
    if preset.weight is None or not preset.weight.normalize:
        return {}
    n = done.ratios.batch.lengths.to(torch.float64)
    if preset.weight.over == "token":
        return dict(zip(NORMS, (done.weight_sum, n), strict=True))
    return dict(zip(NORMS, (done.weight_sum / n.clamp(min=1), (n > 0).to(torch.float64)), strict=True))


def norm_factor(total: Tensor, units: Tensor) -> Tensor:
    """What batch normalisation divides by; 1 where the mean weight is at most 1e-8, as in verl."""
    mean_weight = total / units
    return torch.where(mean_weight > SMALLEST_NORM, mean_weight, 1.0)
