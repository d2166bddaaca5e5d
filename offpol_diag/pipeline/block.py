"""A block of whole sequences as the formulas read it, with what was fitted per trainer batch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.engine.scope import BatchFits, codes
from offpol_diag.pipeline.plan import Plan
from offpol_diag.pipeline.tables import Floats, Ints


class Columns(NamedTuple):
    """Columns of tokens, [T] float64 each, log-probs in nats; one that the dump lacks is 0.

    Attributes:
        smoothed: log-ratios whose tails were smoothed, [smoothed, T].
        later: discounted sums over later tokens, [later, T]; made on the way.
    """

    advantages: Floats
    rollout: Floats
    old: Floats
    current: Floats
    smoothed: Floats
    later: Floats


class Block(NamedTuple):
    """Tokens end to end, and where sequences and turns begin.

    Attributes:
        columns: the columns of tokens.
        offsets: where sequences begin, and the end, [S + 1].
        turn_offsets: the same of turns.
        position: place of each token in its sequence, masked ones counted, [T].
        cuts: cut of each sequence's trainer batch, by batch-wide rule, [cuts, S].
        good: 1 where the sequence's reward is positive, else 0, [S].
    """

    columns: Columns
    offsets: Ints
    turn_offsets: Ints
    position: Ints
    cuts: Floats
    good: Floats


def block_of(batch: Batch, fits: BatchFits, plan: Plan) -> Block:
    """Make a block of a packed batch, with the fits of its trainer batches that the plan reads."""
    none = np.zeros(batch.tokens)
    given = (batch.advantages, batch.rollout, batch.old, batch.current)
    advantages, rollout, old, current = (none if x is None else x.numpy() for x in given)
    labels, which = codes(batch)
    offsets = batch.cu_seqlens.numpy()
    smoothed = []
    for policy, weight in plan.smoothed:
        train = batch.policy(policy)
        assert train is not None  # a preset is planned only where the dump has what it weighs
        smoothed.append(fits.smoothed(policy, weight, train - batch.rollout, "token", batch).numpy())
    cuts = [np.array([fits.cuts[key][one] for one in labels])[which.numpy()] for key in plan.cuts]
    many = batch.sequences
    return Block(
        Columns(
            advantages,
            rollout,
            old,
            current,
            smoothed=np.array(smoothed).reshape(len(smoothed), batch.tokens),
            later=np.zeros((0, batch.tokens)),
        ),
        offsets,
        batch.cu_runs.numpy(),
        batch.position.numpy(),
        np.array(cuts).reshape(len(cuts), many),
        np.zeros(many) if batch.rewards is None else (batch.rewards.numpy() > 0) * 1.0,
    )
