"""What one trainer batch settles for methods that look beyond a sequence: where a cut falls, how a tail ends.

A trainer batch is the rows of one `step`; without that column the whole dump is one. Batch-wide rules (M2PO)
and Pareto smoothing need these numbers before a token can be judged, so they are gathered in a reading of the
dump that goes before (`settle.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.host import sent
from offpol_diag.presets import Policy, Reject, Weight

Label = str
ONE: Label = ""
"""The label of the only trainer batch of a dump that has no steps."""


def labels(batch: Batch) -> list[Label]:
    """The trainer batch of each sequence, [S]; rows without a step are one of their own."""
    steps = batch.scalars.get("step")
    return [ONE] * batch.sequences if steps is None else [label(step) for step in steps]


def label(step: object) -> Label:
    """The label of the trainer batch of a step."""
    whole = isinstance(step, float) and step.is_integer()
    return "∅" if step is None else str(int(step) if whole else step)  # type: ignore[call-overload]


def codes(batch: Batch) -> tuple[list[Label], Tensor]:
    """The labels that occur, in order of appearance, and which each sequence has, [S] int64."""
    every = labels(batch)
    at = {label: i for i, label in enumerate(dict.fromkeys(every))}
    which = [at[label] for label in every]
    return list(at), sent(torch.tensor(which, dtype=torch.int64), batch.rollout.device)


def of_units(which: Tensor, per: str, batch: Batch) -> Tensor:
    """A sequence's code given to its tokens where values are per token."""
    return segments.spread(which, batch.cu_seqlens) if per == "token" else which


@dataclass(frozen=True)
class Smooth:
    """How a trainer batch's largest log-weights are replaced.

    Attributes:
        above: log-weights up to this one stay.
        old: the log-weights that are replaced, rising, distinct, [M].
        new: what they become, rising, [M].
    """

    above: float
    old: Tensor
    new: Tensor

    def __call__(self, log: Tensor) -> Tensor:
        """Log-weights of any shape, smoothed."""
        old, new = sent(self.old, log.device), sent(self.new, log.device)
        after = torch.searchsorted(old, log).clamp(max=len(old) - 1)
        before = (after - 1).clamp(min=0)
        nearest = torch.where(log - old[before] < old[after] - log, before, after)
        return torch.where(log > self.above, new[nearest], log)


@dataclass(frozen=True)
class Settled:
    """Per trainer batch: the cut of each batch-wide rule, the tail of each smoothed weight.

    Attributes:
        cuts: (numerator, rule) → trainer batch → the value from which on tokens are dropped.
        tails: (numerator, weight) → trainer batch → how its tail is smoothed; None where it has none.
    """

    cuts: Mapping[tuple[Policy, Reject], Mapping[Label, float]] = field(default_factory=dict)
    tails: Mapping[tuple[Policy, Weight], Mapping[Label, Smooth | None]] = field(default_factory=dict)

    def cut(self, policy: Policy, rule: Reject, batch: Batch) -> Tensor:
        """The value from which on tokens are dropped, of every token [T]; inf where none need be."""
        found, which = codes(batch)
        cuts = self.cuts[policy, rule]
        by_label = _sent([cuts[one] for one in found], batch.rollout.device)
        return segments.spread(by_label[which], batch.cu_seqlens)

    def smoothed(self, policy: Policy, weight: Weight, log: Tensor, per: str, batch: Batch) -> Tensor:
        """Log-weights [T] or [S] with the tail of their trainer batch smoothed."""
        found, which = codes(batch)
        which, tails = of_units(which, per, batch), self.tails[policy, weight]
        for at, one in enumerate(found):
            smooth = tails[one]
            log = log if smooth is None else torch.where(which == at, smooth(log), log)
        return log

    def in_tail(self, policy: Policy, weight: Weight, log: Tensor, per: str, batch: Batch) -> Tensor:
        """Which log-weights [T] or [S] lie in the tail of their trainer batch."""
        found, which = codes(batch)
        tails = self.tails[policy, weight]
        above = _sent([torch.inf if (t := tails[one]) is None else t.above for one in found], log.device)
        return log > above[of_units(which, per, batch)]


def _sent(values: list[float], device: torch.device) -> Tensor:
    return sent(torch.tensor(values, dtype=torch.float64), device)


UNSETTLED = Settled()
"""For methods that look at one sequence at a time."""
