"""Values that stand elsewhere: train log-probs of another row, or parts of a row in the wrong order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import CAP, Floats, Ints, Rows, against_chance

HEAD, PROBED = 32, 128
"""Number of first tokens by which sequences are compared, and of sequences that are matched first."""
BAD, MANY, SHORTEST = 0.1, 0.12, 6
"""Mean |Δ| of a sequence that is looked at, share of its tokens beyond 0.1 nats (not a few that are far off),
and its fewest tokens."""
MATCH, ALONE, SHARE = 0.25, 0.5, 0.3
"""What the distance to another place may be of that in place, and to the nearest twentieth of places; and
share of the rows that differ that have to fit elsewhere."""
UNRELATED, CENTRED = 0.8, 0.15
"""`against_chance` from which columns belong to different responses; and most mean Δ of first tokens in their
|Δ|: after another prompt, or in another model, a response is less probable under the trainer."""


def nearest(p: Floats, q: Floats, own: Ints) -> tuple[Ints, Floats]:
    """Find for each piece of p, [M, W], the nearest of the pieces of q, [N, W], but its own, [M].

    NaN is beyond the end of a piece. Returns the index of the nearest piece, and its distance: the mean of
    min(|p − q|, CAP); infinite where many are about as near, as where log-probs vary little.
    """
    mate, least = np.zeros(len(p), np.int64), np.full(len(p), np.inf)
    for i, piece in enumerate(p):
        at = np.isfinite(piece)
        off = np.minimum(np.abs(q[:, at] - piece[at]), CAP)
        many = np.isfinite(off).sum(axis=1)
        mean = np.where(many >= 5, np.nansum(off, axis=1) / np.maximum(many, 1), np.inf)
        mean[own[i]] = np.inf
        mate[i], few = int(mean.argmin()), len(mean) // 20
        if mean[mate[i]] < ALONE * np.partition(mean, few)[few]:
            least[i] = mean[mate[i]]
    return mate, least


class RowPermutation(Cause):
    """Train log-probs stand beside another response.

    Rows as a whole do not correlate with their own rollout values and agree with those of another row, within
    a batch, a group or a micro-batch. Lengths may fit, so nothing raises an error.
    """

    id = "row_permutation"
    sentence = "rows are permuted: train log-probs stand beside another sequence's rollout log-probs"
    confirm = "rows whose train log-probs belong to another row: {examples}"
    fix = "restore the order after dynamic batching or sorting by length, or join by sequence id"
    after = "with the rows matched"
    apart = {"off_by_one": "There the same row fits after a shift."}
    blanks = {"examples": "the answer names some"}

    def look(self, rows: Rows) -> Found | None:
        """Match the first tokens of rows that differ; both ends are left out, whose faults are others."""
        inner = (rows.from_end > 0) & (rows.index > 0)
        level = rows.sum(np.where(inner, rows.size, 0.0)) / np.maximum(rows.lengths - 2, 1)
        many = rows.mean(inner & (rows.size > BAD)) > MANY
        bad = np.flatnonzero((level > BAD) & many & (rows.lengths >= SHORTEST))
        if len(bad) < 2:
            return None
        p, q = np.full((2, rows.sequences, HEAD), np.nan)
        at = inner & (rows.index < HEAD)
        for heads, column in ((p, rows.p), (q, rows.q)):
            heads[rows.owner[at], rows.index[at]] = np.maximum(column[at], -20)
        own = np.nanmean(np.minimum(np.abs(p - q), CAP)[bad], axis=1)
        for some in (np.arange(0, len(bad), max(1, len(bad) // PROBED)), np.arange(len(bad))):
            mate, least = nearest(p[bad[some]], q, bad[some])
            matched = (least < MATCH * own[some]) & (own[some] > BAD)
            if matched.sum() < 2 or matched.mean() < SHARE:
                return self._unmatched(rows, bad)
        who, mates, names = bad[matched], mate[matched], rows.column("sequence_id")
        near, apart = least[matched].mean(), own[matched].mean()
        evidence = f"{len(who):,} of {rows.sequences:,} sequences agree with another sequence to "
        evidence += f"{near:.2g} nats a token and with their own to {apart:.2g}"
        pairs = ", ".join(f"{names[i]} → {names[j]}" for i, j in zip(who[:3], mates[:3], strict=True))
        mended = _matched(rows, who, mates, np.setdiff1d(bad, who))
        rest = {"repaired": mended, "words": {"examples": pairs}, "exact": True}
        return self.of_sequences(evidence, rows, rows.of(who), **rest)

    def _unmatched(self, rows: Rows, bad: Ints) -> Found | None:
        """Find permuted rows whose partners are not in the sample: equal distributions, unrelated columns."""
        probed = bad[:: max(1, len(bad) // PROBED)]
        apart = [against_chance(rows, rows.starts[i], rows.starts[i + 1]) > UNRELATED for i in probed]
        if sum(apart) < 8 or np.mean(apart) < 0.5:
            return None
        there = rows.only(rows.of(probed[apart]))
        head = there.keep(there.index < 8)
        gap, size = abs(float(np.clip(head.delta, -CAP, CAP).mean())), float(head.size.mean())
        if gap > CENTRED * size:
            return None
        evidence = f"in {sum(apart)} of {len(probed)} sequences that differ the columns are unrelated, of "
        evidence += f"one mean to {gap:.2g} nats: other rows' values; their own are not in the sample"
        words = {"examples": "compare first tokens in a step", "after": "without these sequences"}
        rest = {"repaired": rows.only(~rows.of(bad)), "words": words, "approximate": True}
        return self.of_sequences(evidence, rows, rows.of(bad), **rest)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Give each row the train log-probs of the next one, and what it lacks at random."""
        p = -rng.exponential(2.0, rows.tokens)
        for i in range(rows.sequences):
            j = (i + 1) % rows.sequences
            n = min(rows.lengths[i], rows.lengths[j])
            p[rows.starts[i] : rows.starts[i] + n] = rows.p[rows.starts[j] : rows.starts[j] + n]
        return replace(rows, p=p)


def _matched(rows: Rows, who: Ints, mates: Ints, lost: Ints) -> Rows:
    """Give rows `who` the rollout log-probs of rows `mates` at common positions; drop the rows `lost`."""
    q, kept = rows.q.copy(), ~np.isin(rows.owner, lost)
    for i, j in zip(who, mates, strict=True):
        a, b = rows.starts[i], rows.starts[j]
        mine, theirs = rows.position[a : rows.starts[i + 1]], rows.position[b : rows.starts[j + 1]]
        _, at, place = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
        q[a + at] = rows.q[b + place]
        kept[a : rows.starts[i + 1]] &= np.isin(mine, theirs)
    found = rows.with_q(q).keep(kept)
    fits = found.level < 10 * np.median(found.level) + 0.05  # a row without a mate shows it
    return found.only(fits) if fits.any() else found


WINDOW, ANCHORS, OFFSETS = 8, 12, 8
"""Tokens of the pieces that are searched for in the other column, their number in a row, and the most
different offsets: a row is cut into a few parts of equal length, one or two for each rank."""
NATS, ROWS, ALL, MOSTLY = 0.15, 4, 0.6, 0.75
"""Distance up to which a piece agrees; fewest rows, and the share of their tokens that differ, and of the
tokens of a piece, that has to agree elsewhere in the row."""


class SegmentOrder(Cause):
    """Parts of a row stand in the wrong order.

    One part of a row agrees in place; others equal the other column some tokens further on or back, each by
    an offset of its own, often a quarter or an eighth of the row. E[r] is not 1.
    """

    id = "segment_order"
    sentence = "parts of a row stand in the wrong order: one column's pieces equal the other's elsewhere"
    confirm = "compare one named row without context parallelism: its columns then line up"
    fix = "put the pieces of context parallelism back in order (zigzag: rank i has pieces i and 2n − 1 − i)"
    after = "with the pieces put back"
    apart = {"off_by_one": "There the whole row fits at one shift."}

    def look(self, rows: Rows) -> Found | None:
        bad = np.flatnonzero((rows.level > BAD) & (rows.lengths >= 2 * WINDOW))
        q, there, differs = rows.q.copy(), np.zeros(rows.tokens, np.int64), rows.size > NATS
        for i in bad:
            at = slice(int(rows.starts[i]), int(rows.starts[i + 1]))
            moved, offset = _put_back(rows.q[at], rows.p[at])
            both_ways = min(np.sum(offset > 0), np.sum(offset < 0)) >= WINDOW  # else it may be other text
            if both_ways and np.mean(offset[differs[at]] != 0) > ALL:
                q[at], there[at] = moved, offset
        tokens = there != 0
        hit = rows.sum(tokens) > 0
        if hit.sum() < max(ROWS, SHARE * len(bad)):
            return None
        left, many = np.abs(rows.p - q), f"{tokens.sum():,} tokens of {hit.sum():,} sequences"
        evidence = f"{many} equal the other column elsewhere in the row to {left[tokens].mean():.2g} nats, "
        evidence += f"in place to {rows.size[tokens].mean():.2g}"
        lost = (hit | (rows.level > BAD))[rows.owner] & (left > NATS)
        return Found(self, evidence, rows, tokens, hit, rows.with_q(q).keep(~lost), exact=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Exchange the second and the last quarter of each row's train column."""
        p = rows.p.copy()
        for a, b in zip(rows.starts[:-1], rows.starts[1:], strict=True):
            one, *rest = np.array_split(p[a:b].copy(), 4)
            p[a:b] = np.concatenate((one, rest[2], rest[1], rest[0]))
        return replace(rows, p=p)


def _put_back(q: Floats, p: Floats) -> tuple[Floats, Ints]:
    """Return q of one row, [n], each value taken from where it agrees with p, and how far off that is."""
    ours, theirs = (np.lib.stride_tricks.sliding_window_view(x, WINDOW) for x in (p, q))
    apart = np.minimum(np.abs(ours - theirs), CAP).mean(axis=1) > NATS / MATCH
    places = np.flatnonzero(apart & (np.ptp(ours, axis=1) > NATS))  # certain tokens fit anywhere
    places = places[:: max(1, len(places) // ANCHORS)]
    mate, least = nearest(ours[places], theirs, places)
    found = set((mate - places)[least < NATS].tolist())
    moved, near, there = q.copy(), np.abs(q - p), np.zeros(len(q), np.int64)
    for offset in found if len(found) <= OFFSETS else ():
        t = np.arange(max(0, -offset), min(len(q), len(q) - offset))
        off = np.abs(p[t] - q[t + offset])
        if len(t) < WINDOW:
            continue
        runs = np.convolve(off < NATS, np.ones(WINDOW), "valid") > MOSTLY * WINDOW
        better = (np.convolve(runs, np.ones(WINDOW)) > 0) & (off < near[t]) & (off < NATS)
        moved[t[better]], near[t[better]], there[t[better]] = q[t[better] + offset], off[better], offset
    return moved, there
