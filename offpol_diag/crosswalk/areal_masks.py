"""Which tokens AReaL's statistics run over: valid ones, kept ones, and those with a weight above 0."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk.keys import KEPT, kept, weighed
from offpol_diag.crosswalk.measures import Mask, Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.crosswalk.views import Measures, Sums, Views, sums
from offpol_diag.metrics.outcome import applied
from offpol_diag.metrics.rows import Rows, distinct, joined
from offpol_diag.presets import Preset, Reject
from offpol_diag.ratios import Level


@dataclass(frozen=True, eq=False)
class Some:
    """Some of the batch's tokens.

    Attributes:
        tokens: which tokens of a sequence.
        sequences: whose, [S] bool; one of them may have none. None for all.
        by: what of a preset that depends on besides its numerator.
    """

    tokens: Mask
    by: Callable[[View], Hashable]
    sequences: Callable[[View], Tensor] | None = None

    def sums(self, views: Views, measures: Measures) -> Sums:
        """K measures over them under each preset, [R, K, S]; 0, inf and -inf where a sequence has none."""
        few, at = self._distinct(views, measures)
        found = zip(sums(few, measures, self.tokens), (0.0, torch.inf, -torch.inf), strict=True)
        there = self._sequences(few)
        return Sums(*(_among(x, there, absent).of(at) for x, absent in found))

    def _distinct(self, views: Views, measures: Measures) -> tuple[list[View], tuple[int, ...]]:
        """The first of each that have the same, and which each one has."""
        keys = [(self.by(view), *(of.by and of.by(view) for of in measures)) for view in views]
        first, at = distinct(keys)
        return [views[one] for one in first], at

    def _sequences(self, views: Views) -> Rows | None:
        if self.sequences is None:
            return None
        each = [self.sequences(view) for view in views]
        return Rows.made([id(flags) for flags in each], lambda at: each[at])


def _among(x: Rows, there: Rows | None, absent: float) -> Rows:
    """What sequences that are not there count as."""
    if there is None:
        return x
    return joined(lambda one, flags: one.masked_fill(~flags[:, None], absent), x, there)


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
    left = view.done.kept.tokens
    if not _masks(view) or _weight(view).per == "sequence":
        return left
    above = _weight(view).values > 0
    return above if left is None else above & left


def _behaves(view: View) -> Tensor:
    left = view.pieces.sequences
    if not _masks(view.first) or _weight(view.first).per == "token":
        return left
    return view.once("areal behaves", lambda: left & (_weight(view.first).values > 0))


def _edits(view: View) -> Hashable:
    return batch_wide(view.preset)


def _behaving(view: View) -> Hashable:
    return weighed(view) if _masks(view) else kept(view)


VALID = Some(Mask(_valid, _edits), _edits)
"""n_valid_tokens."""
LEFT = Some(KEPT, kept, lambda view: view.pieces.sequences)
"""The loss mask after rejection sampling."""
BEHAVE = Some(
    Mask(
        _with_weight,
        lambda view: (
            (KEPT.by(view), correction.weight_key(applied(view.preset))) if _masks(view) else KEPT.by(view)
        ),
    ),
    _behaving,
    _behaves,
)
"""unclipped_behave_tokens; without rejection sampling there is no such mask, and all valid ones count."""
