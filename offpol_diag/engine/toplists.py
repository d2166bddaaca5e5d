"""Lists of the k likeliest ids of both sides, reduced to a few numbers for each token.

The lists themselves go no further than the reader: what the diagnosis needs of them is in `COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from offpol_diag.engine.segments import Array

MOST = 64
"""Most ids that a list may hold for a token."""
COLUMNS = (
    *("listed_q", "listed_p", "top_q", "top_p", "top_id_q", "top_id_p", "last_q", "last_p"),
    *("lacks_q", "lacks_p"),
    *("shared", "mean_q", "mean_p", "square_q", "square_p", "product", "head_q", "head_p"),
    *("kl", "kl_reverse"),
)
"""What is kept of a token's lists, q of the rollout and p of the trainer; NaN where a side has none.

listed: log-prob that the list has for the sampled id; NaN where it is not listed or not known.
top, top_id: log-prob and id of the likeliest token.
last: largest id in the list.
lacks: likeliest id of the other list that should be in this one, by what the other says of it, and is not.
shared: number of ids in both lists, with a probability above 0 in both.
mean: of the log-probs of the shared ids.
square, product: sums of squares and of products of those log-probs, each less their mean.
head: square, of the likelier half of the shared ids.
kl, kl_reverse: KL(rollout ‖ train) and KL(train ‖ rollout) of the shared ids, with all others as one.
"""
CHUNK = 1 << 14
"""Tokens whose lists are compared at once."""
CLEARLY = 2.0
"""Nats by which an id has to be likelier than what a list ends with to be missed in it."""
REST = 1e-4
"""Least probability of all ids that are not shared: rounding of the others is as large."""


class Lists(NamedTuple):
    """Lists of a side: ids and log-probs, [T, k]."""

    ids: Array
    log_probs: Array


def reduced(q: Lists | None, p: Lists | None, sampled: Array | None) -> Array:
    """Reduce the lists of both sides, or of one, and the sampled ids [T], if known, to [T, `COLUMNS`]."""
    many = len(next(one.ids for one in (q, p) if one is not None))
    found = np.full((many, len(COLUMNS)), np.nan)
    for begin in range(0, many, CHUNK):
        at = slice(begin, begin + CHUNK)
        sides = {name: _ordered(one, at) for name, one in (("q", q), ("p", p)) if one is not None}
        for name, values in _reduced(sides, None if sampled is None else sampled[at]).items():
            found[at, COLUMNS.index(name)] = values
    return found


def _ordered(one: Lists, at: slice) -> Lists:
    """Sort some of the lists by id; an id that comes twice (the sampled one) counts once."""
    bits = one.log_probs[at].astype(np.float32).view(np.uint32).astype(np.int64)
    packed = np.sort(one.ids[at].astype(np.int64) << 32 | bits, axis=1)  # ids have 31 bits
    ids, log_probs = packed >> 32, packed.astype(np.uint32).view(np.float32).astype(np.float64)
    log_probs[:, 1:][ids[:, 1:] == ids[:, :-1]] = -np.inf
    return Lists(ids, log_probs)


def _reduced(sides: Mapping[str, Lists], sampled: Array | None) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, one in sides.items():
        rows, first = np.arange(len(one.ids)), one.log_probs.argmax(1)
        found[f"top_{name}"], found[f"top_id_{name}"] = one.log_probs[rows, first], one.ids[rows, first]
        found[f"last_{name}"] = np.where(np.isfinite(one.log_probs), one.ids, -1).max(1)
        if sampled is not None:
            same = one.ids == sampled[:, None]
            found[f"listed_{name}"] = np.where(
                same.any(1), np.where(same, one.log_probs, -np.inf).max(1), np.nan
            )
    return found | (_compared(**sides) if len(sides) == 2 else {})


def _compared(q: Lists, p: Lists) -> dict[str, Array]:
    """Compare the lists of both sides."""
    row = np.arange(len(q.ids), dtype=np.int64)[:, None] << 32
    wanted, listed = (row + q.ids).ravel(), (row + p.ids).ravel()
    at = np.minimum(np.searchsorted(listed, wanted), len(listed) - 1)  # the first of two equal ones
    there = listed[at] == wanted
    theirs = np.where(there, p.log_probs.ravel()[at], -np.inf).reshape(q.ids.shape)
    in_q = np.zeros(len(listed), np.bool_)
    in_q[at[there]] = True
    both = np.isfinite(q.log_probs) & np.isfinite(theirs)
    x, y = np.where(both, q.log_probs, 0.0), np.where(both, theirs, 0.0)
    shared = both.sum(1)
    means = [z.sum(1) / np.maximum(shared, 1) for z in (x, y)]
    off_x, off_y = (np.where(both, z - at[:, None], 0.0) for z, at in zip((x, y), means, strict=True))
    found = {
        "lacks_q": _lacks(q, p, ~in_q.reshape(p.ids.shape)),
        "lacks_p": _lacks(p, q, ~there.reshape(q.ids.shape)),
        "shared": shared,
        "mean_q": means[0],
        "mean_p": means[1],
        "square_q": np.square(off_x).sum(1),
        "square_p": np.square(off_y).sum(1),
        "product": (off_x * off_y).sum(1),
    }
    head = both & (off_x >= 0)
    many = np.maximum(head.sum(1), 1)
    for name, z in (("q", np.where(head, off_x, 0.0)), ("p", np.where(head, off_y, 0.0))):
        found[f"head_{name}"] = np.square(z).sum(1) - np.square(z.sum(1)) / many
    own, other = (np.where(both, np.exp(z), 0.0) for z in (x, y))
    rests = [np.maximum(1 - z.sum(1), REST) for z in (own, other)]
    gap = np.log(rests[0] / rests[1])
    found["kl"] = (own * (x - y)).sum(1) + rests[0] * gap
    found["kl_reverse"] = (other * (y - x)).sum(1) - rests[1] * gap
    return found


def _lacks(one: Lists, other: Lists, missing: Array) -> Array:
    """Return the likeliest id of the other lists that is missing in these; NaN where none is.

    It counts as missing where the other side puts it far above the end of the list.
    """
    ends = np.where(np.isfinite(one.log_probs), one.log_probs, np.inf)
    last = min(1, ends.shape[1] - 1)  # the very last may be the sampled one
    end = np.partition(ends, last, axis=1)[:, last]
    above = np.where(missing & (other.log_probs > end[:, None] + CLEARLY), other.log_probs, -np.inf)
    rows, at = np.arange(len(above)), above.argmax(1)
    return np.where(above[rows, at] > -np.inf, other.ids[rows, at], np.nan)
