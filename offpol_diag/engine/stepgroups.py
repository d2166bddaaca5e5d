"""Sums, sequence weights and tails by training step, with a bound on their number.

Steps are grouped by a power of two: one step a group at first, then two, four, …, so that at most
`tally.MOST_STEPS` groups have sequences. The width follows from the steps of the dump, however it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from offpol_diag.engine import segments
from offpol_diag.engine.bootstrap import log_resampled, resampled_by
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.prefixes import TOP
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Arrays, ByKey, Names, largest_of

LARGE = 1 << 62
"""Steps from here on are in no group."""


def by_group(context: BatchContext, columns: Mapping[str, Array], delta: Array, total: Array) -> ByKey | None:
    """Group one batch; None where the dump has no steps.

    Args:
        context: the batch.
        columns: to be summed, [S] each.
        delta: Δ of each token, [T].
        total: ΣΔ of each sequence, [S].

    Returns:
        Of each group: sums of the columns, log Σw and log Σw² of the product weights of sequences, the
        largest Δ and ΣΔ.
    """
    batch, steps = context.batch, context.batch.scalars.get("step")
    if steps is None:
        return None
    result = segments.by_key(steps)
    rows = {step: result[step] for step in sorted(s for s in result if type(s) is int and abs(s) < LARGE)}
    members = {step: segments.index(at) for step, at in rows.items()}
    logs, offsets = np.where(batch.lengths > 0, total, -np.inf), batch.cu_seqlens.tolist()
    products = [
        log_resampled(np.stack((logs[at], 2 * logs[at])), context.draws[at]) for at in members.values()
    ]
    arrays = Arrays(
        sums={"columns": resampled_by(members, np.stack((*columns.values(),)), context.draws, batch.key)},
        maxima={"shift": np.zeros(len(rows))},
        log_sums={"products": np.array(products).reshape(len(rows), 2, 1 + context.draws.shape[1])},
        largest={
            "tokens": _largest([_tokens(delta, offsets, at) for at in rows.values()]),
            "sequences": _largest([logs[at] for at in members.values()]),
        },
        names={"columns": Names(tuple(columns))},
    )
    return ByKey(np.array([*rows], np.int64), arrays, "steps").bounded


def _largest(each: Sequence[Array]) -> Array:
    """Return the largest values of several samples, [N, TOP]."""
    return np.array([largest_of(x, TOP) for x in each]).reshape(len(each), TOP)


def _tokens(delta: Array, offsets: Sequence[int], rows: Sequence[int]) -> Array:
    """Return Δ of the tokens of some sequences, rising."""
    begins = [row for i, row in enumerate(rows) if not i or rows[i - 1] != row - 1]
    ends = [row + 1 for i, row in enumerate(rows) if i + 1 == len(rows) or rows[i + 1] != row + 1]
    parts = [delta[offsets[first] : offsets[last]] for first, last in zip(begins, ends, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def groups(by_step: ByKey) -> Iterator[tuple[int, int, Arrays]]:
    """Yield the first and last step of each group, and what is kept of it; rising."""
    for first, arrays in by_step.items():
        yield first, first + (1 << int(arrays.maxima["shift"])) - 1, arrays
