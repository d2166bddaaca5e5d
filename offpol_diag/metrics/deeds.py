"""What a preset did to a batch, in marks: where marks are equal, so is what they stand for."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class Acted(NamedTuple):
    """What weights came out as: marks of what `Weighed` says, and what a mean weight is over."""

    per: str
    each_token: bool
    values: Hashable
    high: Hashable
    low: Hashable
    bounded: Hashable
    tries: Hashable


class Deed(NamedTuple):
    """What one preset did.

    Attributes:
        normal: whether its weights are divided by a mean.
        loss: the kind of its loss.
        weighed: whether the weights multiply it.
        tokens: which tokens pass the rules on tokens, of which ratios.
        sequences: which pass all other rules and the veto.
        vetoed: which the veto drops.
        catastrophic: for how many tokens.
        weights: None where there are none.
    """

    normal: bool
    loss: Hashable
    weighed: bool
    tokens: Hashable
    sequences: Hashable
    vetoed: Hashable
    catastrophic: Hashable
    weights: Acted | None


def of_sequence(deed: Deed) -> Hashable:
    """The weights of sequences, where those have weights."""
    return deed.weights.values if deed.weights and deed.weights.per == "sequence" else None


def of_token(deed: Deed) -> Hashable:
    """The weights of tokens, where those have their own."""
    return deed.weights.values if deed.weights and deed.weights.per != "sequence" else None


def nothing(deed: Deed) -> Hashable:
    """Nothing but which tokens pass."""
    return None
