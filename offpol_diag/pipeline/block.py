"""A block of whole sequences as the formulas read it."""

from __future__ import annotations

from typing import NamedTuple

from offpol_diag.pipeline.tables import Array


class Columns(NamedTuple):
    """Columns of tokens, [T] float64 each, log-probs in nats; one that the dump lacks is 0.

    Attributes:
        smoothed: log-ratios whose tails were smoothed, [smoothed, T].
        cut_off: 1 where a rule on whole trainer batches drops a token, else 0, [rules, T].
        later: discounted sums over later tokens, [later, T]; made on the way.
    """

    advantages: Array
    rollout: Array
    old: Array
    current: Array
    smoothed: Array
    cut_off: Array
    later: Array


class Block(NamedTuple):
    """Tokens end to end, and where sequences and turns begin.

    Attributes:
        columns: the columns of tokens.
        offsets: where sequences begin, and the end, [S + 1].
        turn_offsets: the same of turns.
        position: place of each token in its sequence, masked ones counted, [T].
        given: numbers of sequences that were found beforehand, as the plan lists them, [given, S].
        good: 1 where the sequence's reward is positive, else 0, [S].
    """

    columns: Columns
    offsets: Array
    turn_offsets: Array
    position: Array
    given: Array
    good: Array
