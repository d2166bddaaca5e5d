"""Weights that do not arrive: rows of policy lag 0 whose engine and trainer hold other weights."""

from __future__ import annotations

import numpy as np

from offpol_diag.diagnosis.rows import Rows
from offpol_diag.diagnosis.signatures import Found

DIGESTS = ("weight_digest_rollout", "weight_digest_train")
"""Columns with a digest of the weights that sampled a row, and of those that scored it."""


def digests(rows: Rows) -> Found | None:
    """Find rows that are recorded at policy lag 0 and whose weights are not the trainer's, by their digests.

    Older weights honestly have another digest at any other lag. Where no row has equal digests, the two
    sides may be made of different tensors or dtypes, and nothing follows.
    """
    pairs = list(zip(*(rows.column(name) for name in DIGESTS), strict=True))
    lags = rows.column("policy_lag")
    known = np.array([lag == 0 and None not in two for lag, two in zip(lags, pairs, strict=True)], np.bool_)
    other = np.array([a != b for a, b in pairs], np.bool_)
    differ = known & other
    if not differ.any() or not (known & ~other).any():
        return None
    theirs = [pair for pair, off in zip(pairs, differ, strict=True) if off]
    held, wanted = (len(set(side)) for side in zip(*theirs, strict=True))
    statistic = (
        f"engine and trainer have other digests in {int(differ.sum()):,} of {int(known.sum()):,} rows of "
        f"policy lag 0: {held:,} of the engine, {wanted:,} of the trainer"
    )
    cause = "sync_stopped" if held == 1 < wanted else "weights_differ"
    return Found.of_sequences(cause, statistic, rows, differ, repaired=rows.only(~differ), exact=True)
