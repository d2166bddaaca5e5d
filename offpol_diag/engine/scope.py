"""Trainer batches, and quantities of each that rules and weights need before a token can be judged.

A trainer batch is the rows of one `step`; without that column it is the whole dump. Batch-wide rules (M2PO)
need the cut, Pareto smoothing the tail; both are computed in a first pass over the dump
(`analysis/first_pass.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.segments import Array
from offpol_diag.errors import DumpError
from offpol_diag.presets import Policy, Reject, Weight

Label = str
ONE: Label = ""
"""The label of the only trainer batch of a dump that has no steps."""

MOST_STEPS = 1 << 14
"""Most training steps of a dump; sums are kept of each."""
MOST_STEP_BYTES = 1 << 30
"""Most bytes of the sums that are kept of all training steps."""


class TooManySteps(DumpError):
    """The dump has more training steps than sums are kept of."""


def refuse_steps(steps: int, size: int) -> None:
    """Refuse too many training steps, of each of which `size` bytes are kept.

    Raises:
        TooManySteps: there are more than `MOST_STEPS`, or they need more than `MOST_STEP_BYTES`.
    """
    if steps > MOST_STEPS or steps * size > MOST_STEP_BYTES:
        most = min(MOST_STEPS, MOST_STEP_BYTES // max(size, 1))
        raise TooManySteps(
            f"column 'step': the dump has more than {most} training steps, and sums are kept of each",
            "name the column that numbers the trainer batches with --column step=NAME, or analyze the dump "
            "in parts; fewer presets and bounds by step need less memory",
        )


def count(batch: Batch) -> int:
    """Count the distinct steps of a batch; 0 without the column."""
    return len(set(batch.scalars.get("step", ())))


def labels(batch: Batch) -> list[Label]:
    """Return the trainer batch of each sequence, [S]; rows without a step form one of their own."""
    steps = batch.scalars.get("step")
    if steps is None:
        return [ONE] * batch.sequences
    named = {step: label(step) for step in set(steps)}
    return [named[step] for step in steps]


def label(step: object) -> Label:
    """Return the label of a step's trainer batch."""
    whole = isinstance(step, float) and step.is_integer()
    return "∅" if step is None else str(int(step) if whole else step)  # type: ignore[call-overload]


def codes(batch: Batch) -> tuple[list[Label], Array]:
    """Return the distinct labels, in order of appearance, and the index of each sequence's, [S] int64."""
    every = labels(batch)
    at = {label: i for i, label in enumerate(dict.fromkeys(every))}
    which = [at[label] for label in every]
    return list(at), np.array(which, np.int64)


def of_units(which: Array, on_tokens: bool, batch: Batch) -> Array:
    """Spread a sequence's code to its tokens where values are those of tokens."""
    return segments.spread(which, batch.cu_seqlens) if on_tokens else which


@dataclass(frozen=True)
class Smooth:
    """A map that replaces a trainer batch's largest log-weights.

    Attributes:
        above: log-weights up to this value are unchanged.
        old: log-weights that are replaced, rising, distinct, [M].
        new: their replacements, rising, [M].
    """

    above: float
    old: Array
    new: Array

    def __call__(self, log: Array) -> Array:
        """Smooth log-weights of any shape."""
        old = self.old
        after = np.minimum(np.searchsorted(old, log), len(old) - 1)
        before = np.maximum(after - 1, 0)
        nearest = np.where(log - old[before] < old[after] - log, before, after)
        return np.where(log > self.above, self.new[nearest], log)


@dataclass(frozen=True)
class BatchFits:
    """Per trainer batch: the cut of each batch-wide rule, the tail of each smoothed weight.

    Attributes:
        cuts: (numerator, rule) → trainer batch → the value from which on tokens are dropped.
        tails: (numerator, weight) → trainer batch → its smoothing; None where no tail was fitted.
    """

    cuts: Mapping[tuple[Policy, Reject], Mapping[Label, float]] = field(default_factory=dict)
    tails: Mapping[tuple[Policy, Weight], Mapping[Label, Smooth | None]] = field(default_factory=dict)

    def cut(self, policy: Policy, rule: Reject, batch: Batch) -> Array:
        """Return the value from which on tokens are dropped, for every token [T]; inf where none need be."""
        result, which = codes(batch)
        cuts = self.cuts.get((policy, rule), {})  # empty batches need none
        by_label = np.array([cuts[one] for one in result], np.float64)
        return segments.spread(by_label[which], batch.cu_seqlens)

    def smoothed(self, policy: Policy, weight: Weight, log: Array, batch: Batch) -> Array:
        """Smooth the tails of log-weights [T] or [S] by trainer batch."""
        result, which = codes(batch)
        which, tails = of_units(which, weight.on_tokens, batch), self.tails.get((policy, weight), {})
        for at, one in enumerate(result):
            smooth = tails[one]
            if smooth is not None:  # few are in the tail
                some = np.flatnonzero((which == at) & (log > smooth.above))
                log = log.copy()
                log[some] = smooth(log[some])
        return log


NO_FITS = BatchFits()
"""No cuts and tails: for methods that look at one sequence at a time."""
