"""Trainer batches, and quantities of each that rules need before a token can be judged.

A trainer batch is the rows of one `step`; without that column it is the whole dump. Batch-wide rules (M2PO)
need a cut, which is computed in a first pass over the dump (`analysis/first_pass.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.segments import Array
from offpol_diag.errors import DumpError
from offpol_diag.presets import Policy, Reject

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


@dataclass(frozen=True)
class BatchFits:
    """The cuts of batch-wide rules.

    Attributes:
        cuts: (numerator, rule) → trainer batch → the value from which on tokens are dropped.
    """

    cuts: Mapping[tuple[Policy, Reject], Mapping[Label, float]] = field(default_factory=dict)

    def cut(self, policy: Policy, rule: Reject, batch: Batch) -> Array:
        """Return the value from which on tokens are dropped, for every token [T]; inf where none need be."""
        result, which = codes(batch)
        cuts = self.cuts.get((policy, rule), {})  # empty batches need none
        by_label = np.array([cuts[one] for one in result], np.float64)
        return segments.spread(by_label[which], batch.cu_seqlens)


NO_FITS = BatchFits()
"""No cuts: for methods that look at one sequence at a time."""
