"""What one trainer batch settles for methods that look beyond a sequence: where a cut falls, how a tail ends.

A trainer batch is the rows of one `step`; without that column the whole dump is one. Batch-wide rules (M2PO)
and Pareto smoothing need these numbers before a token can be judged, so they are gathered in a reading of the
dump that goes before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.presets import Reject, Weight

Label = str
ONE: Label = ""
"""The label of the only trainer batch of a dump that has no steps."""


def labels(batch: Batch) -> list[Label]:
    """The trainer batch of each sequence, [S]; a row without a step is of a batch of such rows."""
    steps = batch.scalars.get("step")
    return (
        [ONE] * batch.sequences if steps is None else ["null" if one is None else str(one) for one in steps]
    )


def codes(batch: Batch) -> tuple[list[Label], Tensor]:
    """The labels that occur, in order of appearance, and which each sequence has, [S] int64."""
    every = labels(batch)
    at = {label: i for i, label in enumerate(dict.fromkeys(every))}
    return list(at), torch.tensor(
        [at[label] for label in every], dtype=torch.int64, device=batch.rollout.device
    )


@dataclass(frozen=True)
class Smooth:
    """How a trainer batch's largest log-weights are replaced.

    Attributes:
        old: the M log-weights that are replaced, rising, [M].
        new: what they become, rising, [M].
    """

    old: Tensor
    new: Tensor


@dataclass(frozen=True)
class Settled:
    """Per trainer batch: the cut of each batch-wide rule, the tail of each smoothed weight."""

    cuts: Mapping[Reject, Mapping[Label, float]] = field(default_factory=dict)
    tails: Mapping[Weight, Mapping[Label, Smooth]] = field(default_factory=dict)

    def cut(self, rule: Reject, batch: Batch) -> Tensor:
        """The value from which on tokens are dropped, of every token [T]; inf where none need be."""
        found, which = codes(batch)
        by_label = batch.rollout.new_tensor(
            [self.cuts.get(rule, {}).get(label, torch.inf) for label in found]
        )
        return segments.spread(by_label[which], batch.cu_seqlens)

    def smoothed(self, weight: Weight, log: Tensor, per: str, batch: Batch) -> Tensor:
        """Log-weights with the tail of their trainer batch smoothed, same shape."""
        found, which = codes(batch)
        which = segments.spread(which, batch.cu_seqlens) if per == "token" else which
        for at, label in enumerate(found):
            smooth = self.tails.get(weight, {}).get(label)
            if smooth is not None:
                log = torch.where(which == at, _replaced(log, smooth), log)
        return log


UNSETTLED = Settled()


def _replaced(log: Tensor, smooth: Smooth) -> Tensor:
    """Equal weights get the mean of what their ranks would become, so that no order among them is needed."""
    old, new = smooth.old.to(log.device), smooth.new.to(log.device)
    first, last = torch.searchsorted(old, log), torch.searchsorted(old, log, right=True)
    before = torch.cat((new.new_zeros(1), torch.cumsum(torch.exp(new - new[-1]), 0)))
    share = (before[last] - before[first]) / (last - first).clamp(min=1)
    return torch.where(last > first, torch.log(share) + new[-1], log)
