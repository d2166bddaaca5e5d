"""Which tokens AReaL's statistics run over: valid ones, kept ones, and those with a weight above 0."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk.ledger import View
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Preset, Reject


@dataclass(frozen=True)
class Some:
    """Some of the batch's tokens.

    Attributes:
        tokens: which pass what acts on tokens, [T] bool; None for all.
        sequences: whose tokens, [S] bool; one of them may have none.
    """

    tokens: Tensor | None
    sequences: Tensor

    def total(self, x: Tensor, view: View, shared: object) -> Tensor:
        """Σ of x over them, [S]; `shared` is a key under which sums over all tokens are the same."""
        offsets = view.batch.cu_seqlens
        if self.tokens is None:
            sums = view.ratios.once(("areal", shared), lambda: segments.total(x, offsets))
        else:
            sums = segments.total(torch.where(self.tokens, x, 0.0), offsets)
        return torch.where(self.sequences, sums, 0.0)

    def ends(self, x: Tensor, view: View, shared: object) -> Tensor:
        """The smallest and the largest of every sequence that has one of them, one after the other."""
        offsets = view.batch.cu_seqlens
        if self.tokens is None:
            low, high = view.ratios.once(("areal ends", shared), lambda: _ends(x, x, offsets))
        else:
            inside = self.tokens
            low, high = _ends(torch.where(inside, x, torch.inf), torch.where(inside, x, -torch.inf), offsets)
        there = self.sequences & (low <= high)
        return torch.cat((low[there], high[there]))

    def count(self, view: View) -> Tensor:
        """How many they are, [S]."""
        return self.total(torch.ones_like(view.batch.rollout), view, "ones")


def _ends(low: Tensor, high: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    return segments.smallest(low, offsets), segments.largest(high, offsets)


# ---------------------------------------------------------------- denominators


def _batch_wide(preset: Preset) -> tuple[Reject, ...]:
    """M2PO, which edits the loss mask before anything is counted."""
    return tuple(rule for rule in applied(preset).reject if rule.over == "batch")


def valid(view: View) -> Some:
    """n_valid_tokens."""
    rules = _batch_wide(view.preset)
    found = correction.keep(view.ratios, replace(view.preset, reject=rules, veto=None))
    return Some(found.tokens, found.sequences)


def kept(view: View) -> Some:
    """The loss mask after rejection sampling."""
    return Some(view.done.kept.tokens, view.done.kept.sequences)


def behave(view: View) -> Some:
    """unclipped_behave_tokens; without rejection sampling there is no such mask, and all valid ones count."""
    return view.ratios.once(("behave", view.preset.name), lambda: _make_behave(view))


def _make_behave(view: View) -> Some:
    """Only a masked weight can be 0; float64 has room for every other."""
    left, weighed, rule = kept(view), view.done.weighed, view.preset.weight
    if weighed is None or rule is None or rule.action != "mask":
        return left
    above = weighed.final.values > 0
    if weighed.final.per == "sequence":
        return Some(left.tokens, left.sequences & above)
    return Some(above if left.tokens is None else above & left.tokens, left.sequences)
