"""Which tokens AReaL's statistics run over: valid ones, kept ones, and those with a weight above 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk.ends import Ends, among
from offpol_diag.crosswalk.view import KEPT, Mask, Measure, View
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Preset, Reject
from offpol_diag.ratios import Level


@dataclass(frozen=True)
class Some:
    """Some of the batch's tokens.

    Attributes:
        tokens: which tokens of a sequence.
        sequences: whose, [S] bool; one of them may have none. None for all.
    """

    tokens: Mask
    sequences: Callable[[View], Tensor] | None = None

    def total(self, x: Measure, view: View) -> Tensor:
        """Σ of x over them, [S]."""
        sums = view.total(x, self.tokens)
        return sums if self.sequences is None else sums.masked_fill(~self.sequences(view), 0.0)

    def ends(self, x: Measure, view: View) -> Ends:
        """The smallest and largest x of each sequence, [S] each; ±inf where it has none of them."""
        ends = view.ends(x, self.tokens)
        return ends if self.sequences is None else among(ends, self.sequences(view))

    def count(self, view: View) -> Tensor:
        """How many they are, [S]."""
        return self.total(ONE, view)


ONE = Measure("1", lambda view: torch.ones_like(view.ratios.delta))

# ---------------------------------------------------------------- denominators


def batch_wide(preset: Preset) -> tuple[Reject, ...]:
    """M2PO, which edits the loss mask before anything is counted."""
    return tuple(rule for rule in applied(preset).reject if rule.over == "batch")


def _valid(view: View) -> Tensor | None:
    rules = batch_wide(view.preset)
    return (
        correction.keep(view.ratios, replace(view.preset, reject=rules, veto=None)).tokens if rules else None
    )


def _masks(view: View) -> bool:
    """Only a masked weight can be 0; float64 has room for every other."""
    rule = applied(view.preset).weight
    return rule is not None and rule.action == "mask"


def _weight(view: View) -> Level:
    assert view.done.weighed is not None
    return view.done.weighed.final


def _with_weight(view: View) -> Tensor | None:
    """Tokens that are kept, with a weight above 0 where tokens have their own."""
    kept = view.done.kept.tokens
    if not _masks(view) or _weight(view).per == "sequence":
        return kept
    above = _weight(view).values > 0
    return above if kept is None else above & kept


def _behaves(view: View) -> Tensor:
    kept = view.pieces.sequences
    if not _masks(view.first) or _weight(view.first).per == "token":
        return kept
    return view.once("areal behaves", lambda: kept & (_weight(view.first).values > 0))


VALID = Some(Mask(_valid, lambda view: batch_wide(view.preset)))
"""n_valid_tokens."""
LEFT = Some(KEPT, lambda view: view.pieces.sequences)
"""The loss mask after rejection sampling."""
BEHAVE = Some(
    Mask(
        _with_weight,
        lambda view: (
            (KEPT.by(view), correction.weight_key(applied(view.preset))) if _masks(view) else KEPT.by(view)
        ),
    ),
    _behaves,
)
"""unclipped_behave_tokens; without rejection sampling there is no such mask, and all valid ones count."""
