"""A block of whole sequences as the formulas read it."""

from __future__ import annotations

from typing import NamedTuple

from offpol_diag.pipeline.tables import Array


class Columns(NamedTuple):
    """Columns of tokens, [T] float64 each, log-probs in nats; one that the dump lacks is 0.

    Attributes:
        cut_off: 1 where a rule on whole trainer batches drops a token, else 0, [rules, T].
    """

    advantages: Array
    rollout: Array
    old: Array
    current: Array
    cut_off: Array


class Block(NamedTuple):
    """Tokens end to end, and where sequences and turns begin.

    Attributes:
        columns: the columns of tokens.
        offsets: where sequences begin, and the end, [S + 1].
        turn_offsets: the same of turns.
    """

    columns: Columns
    offsets: Array
    turn_offsets: Array
