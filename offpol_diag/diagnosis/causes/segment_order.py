"""Parts of a row that stand in the wrong order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import CAP, Floats, Ints, Rows

WINDOW, ANCHORS = 8, 12
"""Length of the pieces that are searched for in the other column, tokens, and their number in a row: eight
log-probs agree by chance at no place of a row."""
BAD, NATS, FIT = 0.1, 0.15, 0.25
"""Mean |Δ| of a row that is looked at; distance up to which a piece agrees, and what that may be of its
distance in place: rows in another order agree to rounding."""
OFFSETS = 8
"""Most different offsets of a row: it is cut into a few parts of equal length, one or two for each rank."""
SHARE, ROWS, ALL, MOSTLY = 0.3, 4, 0.6, 0.75
"""Least share of the rows that differ, fewest of them, the share of their tokens that have to agree somewhere
else in their row, and of the tokens of a piece."""


class SegmentOrder(Cause):
    """Parts of a row stand in the wrong order.

    One part of a row agrees in place; others equal the other column some tokens further on or back, each by
    an offset of its own, often a quarter or an eighth of the row. E[r] is not 1.
    """

    id = "segment_order"
    sentence = (
        "parts of a row stand in the wrong order: one column's pieces equal the other's elsewhere in the row"
    )
    violates = "both columns are about the same token"
    confirm = "compare one named row without context parallelism: its columns then line up"
    fix = (
        "put the pieces of context parallelism back in order (zigzag: rank i holds pieces i and 2n − 1 − i) "
        "before log-probs are joined, and cut labels, masks and positions alike"
    )
    after = "with the pieces put back"
    ruled_out = "parts of a row in the wrong order"
    apart = {
        "off_by_one": "There the whole row fits at one shift.",
        "row_permutation": "There another row's values fit.",
        "rollout_raw_logprobs": "There every token differs a little, and no piece fits elsewhere.",
    }

    def look(self, rows: Rows) -> Found | None:
        bad = np.flatnonzero((rows.level > BAD) & (rows.lengths >= 2 * WINDOW))
        if len(bad) < ROWS:
            return None
        q, tokens, differ = rows.q.copy(), np.zeros(rows.tokens, bool), 0
        hit = np.zeros(rows.sequences, bool)
        for i in bad:
            at = slice(int(rows.starts[i]), int(rows.starts[i + 1]))
            moved, there = _put_back(rows.q[at], rows.p[at], rows.size[at])
            if min(np.sum(there > 0), np.sum(there < 0)) < WINDOW:
                continue  # what is only shifted from some token on is other text
            off = rows.size[at] > NATS
            if np.sum(there[off] != 0) > ALL * off.sum():
                q[at], tokens[at], hit[i] = moved, there != 0, True
                differ += len(there)
        if hit.sum() < max(ROWS, SHARE * len(bad)):
            return None
        lost = (hit | (rows.level > BAD))[rows.owner] & (np.abs(rows.p - q) > NATS)
        evidence = (
            f"in {int(hit.sum()):,} of {rows.sequences:,} sequences {int(tokens.sum()):,} of {differ:,} "
            f"tokens equal the other column elsewhere in the row to {np.abs(rows.p - q)[tokens].mean():.2g} "
            f"nats and differ in place by {rows.size[tokens].mean():.2g}"
        )
        mended = rows.with_q(q).keep(~lost)
        return Found(self, evidence, rows, tokens, hit, mended, exact=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Exchange the second and the last quarter of each row's train column."""
        p = rows.p.copy()
        for a, b in zip(rows.starts[:-1], rows.starts[1:], strict=True):
            one, *rest = np.array_split(p[a:b].copy(), 4)
            p[a:b] = np.concatenate((one, rest[2], rest[1], rest[0]))
        return replace(rows, p=p)


def _put_back(q: Floats, p: Floats, size: Floats) -> tuple[Floats, Ints]:
    """Return q of one row, [n], each value taken from where it agrees with p, and how far off that is."""
    places = np.flatnonzero(size[: len(q) - WINDOW + 1] > NATS)
    windows = np.lib.stride_tricks.sliding_window_view(q, WINDOW)
    offsets: list[int] = []
    for at in places[:: max(1, len(places) // ANCHORS)]:
        off = np.minimum(np.abs(windows - p[at : at + WINDOW]), CAP).mean(axis=1)
        best = int(off.argmin())
        varies = np.ptp(p[at : at + WINDOW]) > NATS
        if best != at and varies and off[best] < min(NATS, FIT * off[at]):
            offsets.append(best - int(at))
    moved, least, there = q.copy(), np.abs(q - p), np.zeros(len(q), np.int64)
    found = list(dict.fromkeys(offsets))
    for offset in found if len(found) <= OFFSETS else ():
        t = np.arange(max(0, -offset), min(len(q), len(q) - offset))
        off = np.abs(p[t] - q[t + offset])
        if len(t) < WINDOW:
            continue
        runs = np.convolve(off < NATS, np.ones(WINDOW), "valid") > MOSTLY * WINDOW
        near = np.convolve(runs, np.ones(WINDOW)) > 0
        better = near & (off < least[t]) & (off < NATS)
        moved[t[better]], least[t[better]] = q[t[better] + offset], off[better]
        there[t[better]] = offset
    return moved, there
