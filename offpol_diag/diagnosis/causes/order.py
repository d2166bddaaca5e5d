"""Values that stand elsewhere: shifted columns, permuted rows, parts of a row in the wrong order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.estimates import against_chance, correlation
from offpol_diag.diagnosis.rows import CAP, Flags, Floats, Ints, Rows
from offpol_diag.numerals import counted

LAGS = tuple(lag for k in range(1, 9) for lag in (k, -k))
OVERLAP, RUNS = 8, 0.03
"""Fewest tokens that both columns of a run have at a shift, and smallest share of runs to have it: a few
tokens agree at one of this many lags by chance."""
LOOKED_AT, GAIN, GAINED = 0.02, 0.35, 2.0
"""Mean |Δ| of a run that is looked at, what a shift has to leave of it, and to gain in all, nats."""
RULE, NEARLY_ALL, REPAIRED = 0.3, 0.8, 0.5
"""Share from which it is the rule, also where a large mismatch hides it; from which all have it, for the rest
is too short to show it; and mean |Δ| that a repaired run then has, nats."""
FITS = (3.0, 0.1)
"""Factor and nats by which first tokens fit better at one of two places."""


class OffByOne(Cause):
    """The two columns are shifted against each other.

    The columns do not correlate in place, and agree to rounding one token further on. K3 is 1 to 20 nats, and
    falls to the engine's own level once one column is moved.
    """

    id = "off_by_one"
    sentence = "the rollout column is shifted by {tokens} against the train column"
    evidence = "the columns correlate {:.2f} at {} apart and {:.2f} in place, in {:,} of {:,} sequences"
    confirm = "shift one column by {tokens} and compute K3 again"
    fix = "{slice}; logits at position t − 1 score token t, so slice logits[:, :-1] and tokens[:, 1:]"
    after = "with the shift undone"
    apart = {"retokenization": "The columns agree up to some token, and are shifted after it."}
    blanks = {"tokens": "the number of tokens in the answer", "slice": "move one column"}

    def look(self, rows: Rows) -> Found | None:
        """Find a shift in runs of unmasked tokens, each by itself, as after a tool's answer."""
        edges, last = rows.edges
        begins = np.flatnonzero(edges == 0)
        runs = Rows(rows.q, rows.p, np.append(begins, rows.tokens), rows.position)
        bad = runs.mean_gap > LOOKED_AT
        if bad.sum() < 2:
            return None
        among = runs.only(bad)
        every = np.stack([at_lag(among, lag) for lag in LAGS])
        at = np.where(among.lengths - np.abs(LAGS)[:, None] >= OVERLAP, every, np.inf)
        best, least = at.argmin(axis=0), at.min(axis=0)
        moved = (least < GAIN * among.mean_gap) & ((among.mean_gap - least) * among.lengths > GAINED)
        votes = np.bincount(best[moved], minlength=len(LAGS))
        which = int(votes.argmax())
        lag, k = LAGS[which], abs(LAGS[which])
        long = runs.lengths - k >= OVERLAP
        moved &= best == which
        few = moved.sum() < max(2, RUNS * long.sum(), votes.sum() / 2)
        if few or not _from_start(among.only(moved), lag):
            return None
        share = moved.sum() / long[bad].sum()
        moved |= (share > RULE) & (
            every[which] < 0.9 * among.mean_gap
        )  # also what is short, or differs by much
        hit = np.zeros(runs.sequences, np.bool_)
        hit[bad] = moved
        hit |= hit.mean() > NEARLY_ALL
        tokens, there = hit[runs.owner], runs.only(hit)
        shifted, in_place = correlation(*pairs(there, lag)[:2]), correlation(there.p, there.q)
        if not shifted > in_place:
            return None  # also where a column is constant, and correlates with nothing
        q, takes = rows.q.copy(), tokens & ((last if lag > 0 else edges) >= k)
        q[takes] = rows.q[np.flatnonzero(takes) + lag]
        repaired = replace(rows, q=q, entropy=None).keep(~tokens | takes)
        if share > RULE and (repaired.mean_gap < REPAIRED).any():  # rows that still differ likely have it too
            repaired = repaired.only(repaired.mean_gap < REPAIRED)
        apart, many = counted(k, "token"), (rows.sum(tokens) > 0).sum()
        evidence = self.evidence.format(shifted, apart, round(in_place, 2) + 0.0, many, rows.sequences)
        old, rollout = (f":-{k}", f"{k}:") if lag > 0 else (f"{k}:", f":-{k}")
        words = {
            "tokens": "one token" if k == 1 else apart,
            "slice": f"old_log_probs[:, {old}] belongs to rollout_log_probs[:, {rollout}]",
        }
        return Found(self, evidence, rows, tokens, repaired, exact=True, words=words)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, q=np.roll(rows.q, rng.choice([1, -1, 2])))


def pairs(rows: Rows, lag: int) -> tuple[Floats, Floats, Ints]:
    """Return p_t, q_{t+lag} and the index of the sequence of all pairs of tokens of one sequence."""
    k = abs(lag)
    p, q = (rows.p[:-k], rows.q[k:]) if lag > 0 else (rows.p[k:], rows.q[:-k])
    same = rows.owner[k:] == rows.owner[:-k]
    return p[same], q[same], rows.owner[k:][same]


def at_lag(rows: Rows, lag: int) -> Floats:
    """Return the mean of min(|p_t − q_{t+lag}|, CAP) of each sequence, [S]; infinite without a pair."""
    p, q, owner = pairs(rows, lag)
    many = np.bincount(owner, minlength=rows.sequences)
    total = np.bincount(owner, np.minimum(np.abs(p - q), CAP), minlength=rows.sequences)
    return np.where(many > 0, total / np.maximum(many, 1), np.inf)


def _from_start(rows: Rows, lag: int) -> bool:
    """Return whether the shift is there at the first tokens, and not only behind a token that is left out."""
    begin = rows.keep(rows.index < 4 + abs(lag))
    here, there = begin.keep(begin.index < 4).mean_gap, at_lag(begin, lag)
    in_place, shifted = there > FITS[0] * here + FITS[1], here > FITS[0] * there + FITS[1]
    return bool(in_place.sum() <= RULE * max(int((in_place | shifted).sum()), 1))


HEAD, PROBED = 32, 128
"""Number of first tokens by which sequences are compared, and of sequences that are matched first."""
BAD, MANY = 0.1, 0.12
"""Mean |Δ| of a sequence that is looked at, and share of its tokens beyond that: not a few far off."""
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
    evidence = (
        "{:,} of {:,} sequences agree with another sequence to {:.2g} nats a token and with their own to "
        "{:.2g}"
    )
    confirm = "compare rows whose train log-probs belong to another row: {examples}"
    fix = "restore the order after dynamic batching or sorting by length, or join by sequence id"
    after = "with the rows matched"
    apart = {"off_by_one": "The same row fits after a shift."}
    blanks = {"examples": "the answer names some"}

    def look(self, rows: Rows) -> Found | None:
        """Match the first tokens of rows that differ; both ends are left out, whose faults are others."""
        inner = (rows.from_end > 0) & (rows.index > 0)
        gap = rows.sum(np.where(inner, rows.gap, 0.0)) / np.maximum(rows.lengths - 2, 1)
        many = rows.mean(inner & (rows.gap > BAD)) > MANY
        bad = np.flatnonzero((gap > BAD) & many)
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
        evidence = self.evidence.format(len(who), rows.sequences, least[matched].mean(), own[matched].mean())
        examples = ", ".join(f"{names[i]} → {names[j]}" for i, j in zip(who[:3], mates[:3], strict=True))
        repaired, tokens = _matched(rows, who, mates, np.setdiff1d(bad, who)), of(rows, who)[rows.owner]
        return Found(self, evidence, rows, tokens, repaired, exact=True, words={"examples": examples})

    def _unmatched(self, rows: Rows, bad: Ints) -> Found | None:
        """Find permuted rows whose partners are not in the sample: equal distributions, unrelated columns."""
        probed = bad[:: max(1, len(bad) // PROBED)]
        apart = [against_chance(rows, rows.starts[i], rows.starts[i + 1]) > UNRELATED for i in probed]
        if sum(apart) < 8 or np.mean(apart) < 0.5:
            return None
        head = rows.keep(of(rows, probed[apart])[rows.owner] & (rows.index < 8))
        mean = abs(float(np.clip(head.delta, -CAP, CAP).mean()))
        if mean > CENTRED * head.gap.mean():
            return None
        evidence = (
            f"in {sum(apart)} of {len(probed)} sequences that differ the columns are unrelated, of one mean "
            f"to {mean:.2g} nats: other rows' values; their own are not in the sample"
        )
        words = {"examples": "compare first tokens in a step", "after": "without these sequences"}
        tokens = of(rows, bad)[rows.owner]
        return Found(self, evidence, rows, tokens, rows.keep(~tokens), approximate=True, words=words)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Give each row the train log-probs of the next one, and what it lacks at random."""
        p = -rng.exponential(2.0, rows.tokens)
        for i in range(rows.sequences):
            j = (i + 1) % rows.sequences
            n = min(rows.lengths[i], rows.lengths[j])
            p[rows.starts[i] : rows.starts[i] + n] = rows.p[rows.starts[j] : rows.starts[j] + n]
        return replace(rows, p=p)


def of(rows: Rows, sequences: Ints) -> Flags:
    """Return flags of these sequences, [S]."""
    return np.isin(np.arange(rows.sequences), sequences)


def _matched(rows: Rows, who: Ints, mates: Ints, lost: Ints) -> Rows:
    """Give rows `who` the rollout log-probs of rows `mates` at common positions; drop the rows `lost`."""
    q, kept = rows.q.copy(), ~np.isin(rows.owner, lost)
    for i, j in zip(who, mates, strict=True):
        a, b = rows.starts[i], rows.starts[j]
        mine, theirs = rows.position[a : rows.starts[i + 1]], rows.position[b : rows.starts[j + 1]]
        _, at, place = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
        q[a + at] = rows.q[b + place]
        kept[a : rows.starts[i + 1]] &= np.isin(mine, theirs)
    found = replace(rows, q=q, entropy=None).keep(kept)
    fits = found.mean_gap < 10 * np.median(found.mean_gap) + 0.05  # a row without a mate shows it
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
    evidence = (
        "{:,} tokens of {:,} sequences equal the other column elsewhere in the row to {:.2g} nats, in place "
        "to {:.2g}"
    )
    confirm = "score one of the rows named here without context parallelism: its columns then line up"
    fix = "put the pieces of context parallelism back in order (zigzag: rank i has pieces i and 2n − 1 − i)"
    after = "with the pieces put back"
    apart = {"off_by_one": "The whole row fits after one shift."}

    def look(self, rows: Rows) -> Found | None:
        bad = np.flatnonzero((rows.mean_gap > BAD) & (rows.lengths >= 2 * WINDOW))
        q, offsets, differs = rows.q.copy(), np.zeros(rows.tokens, np.int64), rows.gap > NATS
        for i in bad:
            at = slice(int(rows.starts[i]), int(rows.starts[i + 1]))
            moved, offset = _put_back(rows.q[at], rows.p[at])
            both_ways = min(np.sum(offset > 0), np.sum(offset < 0)) >= WINDOW  # else it may be other text
            if both_ways and np.mean(offset[differs[at]] != 0) > ALL:
                q[at], offsets[at] = moved, offset
        tokens = offsets != 0
        hit = rows.sum(tokens) > 0
        if hit.sum() < max(ROWS, SHARE * len(bad)):
            return None
        left = np.abs(rows.p - q)
        evidence = self.evidence.format(tokens.sum(), hit.sum(), left[tokens].mean(), rows.gap[tokens].mean())
        lost = (hit | (rows.mean_gap > BAD))[rows.owner] & (left > NATS)
        return Found(self, evidence, rows, tokens, replace(rows, q=q, entropy=None).keep(~lost), exact=True)

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
    moved, near, offsets = q.copy(), np.abs(q - p), np.zeros(len(q), np.int64)
    for offset in found if len(found) <= OFFSETS else ():
        t = np.arange(max(0, -offset), min(len(q), len(q) - offset))
        off = np.abs(p[t] - q[t + offset])
        if len(t) < WINDOW:
            continue
        runs = np.convolve(off < NATS, np.ones(WINDOW), "valid") > MOSTLY * WINDOW
        better = (np.convolve(runs, np.ones(WINDOW)) > 0) & (off < near[t]) & (off < NATS)
        at = t[better]
        moved[at], near[at], offsets[at] = q[at + offset], off[better], offset
    return moved, offsets
