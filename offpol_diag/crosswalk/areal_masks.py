"""Which tokens AReaL's statistics run over: valid ones, kept ones, and those with a weight above 0."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.correction import Kept
from offpol_diag.crosswalk.ledger import View
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Preset, Reject
from offpol_diag.ratios import Level


@dataclass(frozen=True)
class Some:
    """Some of the batch's tokens.

    Attributes:
        tokens: which, [T] bool; None where only whole sequences are left out.
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
        """Values of x whose smallest and largest are those of all of them; empty where there is none."""
        if self.tokens is not None:
            return _ends(x, self.tokens)
        offsets = view.batch.cu_seqlens
        low, high = view.ratios.once(
            ("areal ends", shared), lambda: (segments.smallest(x, offsets), segments.largest(x, offsets))
        )
        there = self.sequences & (view.batch.lengths > 0)
        return torch.cat((low[there], high[there]))

    def count(self, view: View) -> Tensor:
        """How many they are, [S]."""
        if self.tokens is None:
            return torch.where(self.sequences, view.batch.lengths, 0).to(torch.float64)
        return segments.count(self.tokens, view.batch.cu_seqlens)


def _ends(x: Tensor, inside: Tensor) -> Tensor:
    """[2], or [0]: filled and reduced, which takes a tenth of the time of going by sequence."""
    if x.numel() == 0:
        return x
    ends = torch.stack((torch.where(inside, x, torch.inf).amin(), torch.where(inside, x, -torch.inf).amax()))
    return ends[ends.diff().expand(2) >= 0]


# ---------------------------------------------------------------- denominators


def _batch_wide(preset: Preset) -> tuple[Reject, ...]:
    """M2PO, which edits the loss mask before anything is counted."""
    return tuple(rule for rule in applied(preset).reject if rule.over == "batch")


def _some(view: View, found: Kept) -> Some:
    """What rules leave; where some act on tokens and some on sequences, by token."""
    sequences = Some(None, found.sequences)
    if found.tokens is None:
        return sequences
    return _narrowed(sequences, Level(found.tokens, "token"), view.batch.cu_seqlens)


def valid(view: View) -> Some:
    """n_valid_tokens."""
    rules = _batch_wide(view.preset)
    before = replace(view.preset, reject=rules, veto=None)
    return view.ratios.once(
        ("areal left", rules, None), lambda: _some(view, correction.keep(view.ratios, before))
    )


def kept(view: View) -> Some:
    """The loss mask after rejection sampling."""
    key = ("areal left", applied(view.preset).reject, applied(view.preset).veto)
    return view.ratios.once(key, lambda: _some(view, view.done.kept))


def behave(view: View) -> Some:
    """unclipped_behave_tokens; without rejection sampling there is no such mask, and all valid ones count."""
    return view.ratios.once(("behave", view.preset.name), lambda: _make_behave(view))


def _make_behave(view: View) -> Some:
    """Only a masked weight can be 0; float64 has room for every other."""
    left, weighed, rule = kept(view), view.done.weighed, view.preset.weight
    if weighed is None or rule is None or rule.action != "mask":
        return left
    return _narrowed(left, weighed.final.map(lambda w: w > 0), view.batch.cu_seqlens)


def _narrowed(some: Some, flags: Level, offsets: Tensor) -> Some:
    """Those of some tokens that are flagged, or whose sequences are."""
    if flags.per == "sequence" and some.tokens is None:
        return Some(None, some.sequences & flags.values)
    tokens = segments.spread(some.sequences, offsets) if some.tokens is None else some.tokens
    inside = flags.values if flags.per == "token" else segments.spread(flags.values, offsets)
    return Some(tokens & inside, torch.ones_like(some.sequences))
