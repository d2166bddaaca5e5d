"""Train log-probs beside another sequence's rollout log-probs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import CAP, Floats, Ints, Rows, against_chance, correlation

HEAD, PROBED = 32, 128
"""Number of first tokens by which sequences are compared, and of sequences that are matched first."""
BAD, MANY, SHORTEST = 0.1, 0.12, 6
"""Mean |Δ| of a sequence that is looked at, share of its tokens beyond 0.1 nats (not a few that are far off),
and its fewest tokens."""
MATCH, ALONE, SHARE = 0.25, 0.5, 0.3
"""What another row's distance may be of one's own, and of that of the nearest twentieth of rows; and share of
rows that have to match another."""
UNRELATED, CHANCE = 0.6, 0.8
"""Correlation of the columns of a response below which they belong to different responses, and ratio of |p −
q| to that of any two tokens from which they are unrelated."""
CENTRED = 0.15
"""Most mean Δ of first tokens in their |Δ|: after another prompt a response is less probable under the
trainer."""


class RowPermutation(Cause):
    """Train log-probs stand beside another response.

    Rows as a whole do not correlate with their own rollout values and agree with those of another row, within
    a batch, a group or a micro-batch. Lengths may fit, so nothing raises an error.
    """

    id = "row_permutation"
    sentence = (
        "rows are permuted: train log-probs stand beside another sequence's rollout log-probs, within "
        "{within}"
    )
    violates = "both columns are about the same sequence"
    confirm = "rows whose train log-probs belong to another row: {examples}"
    fix = (
        "restore the order after dynamic batching or sorting by length (verl: revert_dynamic_batch, "
        "restore_dynamic_batch indices on every log-prob tensor), or join by sequence id"
    )
    after = "with the rows matched"
    ruled_out = "permuted rows"
    apart = {
        "off_by_one": "There the same row fits after a shift.",
        "wrong_context": (
            "There the same tokens are scored after another prompt: columns correlate, at a higher level of "
            "mismatch."
        ),
    }
    blanks = {"within": "the dump", "examples": "the answer names some"}

    def look(self, rows: Rows) -> Found | None:
        inner = (rows.from_end > 0) & (rows.index > 0)  # a fault of the last token alone is none of this
        level = rows.sum(np.where(inner, rows.size, 0.0)) / np.maximum(rows.lengths - 2, 1)
        many = rows.mean(inner & (rows.size > BAD)) > MANY
        bad = np.flatnonzero((level > BAD) & many & (rows.lengths >= SHORTEST))
        if len(bad) < 2:
            return None
        q, p = _heads(rows, np.where(inner, rows.q, np.nan)), _heads(rows, np.where(inner, rows.p, np.nan))
        own = np.nanmean(np.minimum(np.abs(p[bad] - q[bad]), CAP), axis=1)
        probe = np.arange(0, len(bad), max(1, len(bad) // PROBED))
        for some in (probe, np.arange(len(bad))):
            mate, least = _nearest(p[bad[some]], q, bad[some])
            matched = (least < MATCH * own[some]) & (own[some] > BAD)
            if matched.sum() < 2 or matched.mean() < SHARE:
                return self._unmatched(rows, bad)
        who, mates = bad[matched], mate[matched]
        evidence = (
            f"{len(who):,} of {rows.sequences:,} sequences agree with another sequence to "
            f"{least[matched].mean():.2g} nats a token and with their own to {own[matched].mean():.2g}"
        )
        names, pairs, within = rows.column("sequence_id"), list(zip(who, mates, strict=True)), "the dump"
        for name, words in (("step", "its step"), ("group_id", "its prompt")):
            column = rows.column(name)
            if any(x is not None for x in column) and all(column[i] == column[j] for i, j in pairs):
                within = words
        said = {"within": within, "examples": ", ".join(f"{names[i]} → {names[j]}" for i, j in pairs[:3])}
        mended = _matched(rows, who, mates, np.setdiff1d(bad, who))
        return self.of_sequences(evidence, rows, rows.of(who), repaired=mended, words=said, exact=True)

    def _unmatched(self, rows: Rows, bad: Ints) -> Found | None:
        """Find permuted rows whose partners are not in the sample: equal distributions, unrelated columns."""
        among = rows.only(rows.of(bad[:: max(1, len(bad) // PROBED)]))
        ends = zip(among.starts[:-1], among.starts[1:], strict=True)
        begun = among.sum(np.where(among.index < 4, among.size, 0.0)) / np.minimum(among.lengths, 4)
        apart = np.array([against_chance(among, a, b) for a, b in ends]) > CHANCE
        apart &= begun > BAD
        if apart.sum() < 8 or len(bad) < 0.02 * rows.sequences or apart.mean() < 0.5:
            return None
        there = among.only(apart)
        head = there.keep(there.index < 8)
        gap = float(np.mean(np.clip(head.delta, -CAP, CAP)))
        ends = zip(there.starts[:-1], there.starts[1:], strict=True)
        together = float(np.median([correlation(there.p[a:b], there.q[a:b]) for a, b in ends]))
        if abs(gap) > CENTRED * float(head.size.mean()) or together > UNRELATED:
            return None
        sequences = rows.of(bad)
        evidence = (
            f"{len(bad):,} of {rows.sequences:,} sequences differ by more than {BAD:g} nats a token; in "
            f"{int(apart.sum())} of {among.sequences} of these that were compared the columns differ by "
            f"{there.size.mean():.2g} nats a token, correlate {together:.2f} and have the same mean "
            f"to {abs(gap):.2g} nats: other rows' values; their own are not in the sample"
        )
        words = {
            "within": "the dump",
            "examples": "compare the first tokens of all rows of a step",
            "after": "without these sequences",
        }
        rest = {"repaired": rows.only(~sequences), "words": words, "approximate": True}
        return self.of_sequences(evidence, rows, sequences, **rest)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Give each row the train log-probs of the next one, and what it lacks at random."""
        p = -rng.exponential(2.0, rows.tokens)
        for i in range(rows.sequences):
            j = (i + 1) % rows.sequences
            n = min(rows.lengths[i], rows.lengths[j])
            p[rows.starts[i] : rows.starts[i] + n] = rows.p[rows.starts[j] : rows.starts[j] + n]
        return replace(rows, p=p)


def _heads(rows: Rows, x: Floats) -> Floats:
    """Return the first `HEAD` values of each sequence, [S, HEAD]; NaN beyond its end."""
    found = np.full((rows.sequences, HEAD), np.nan)
    at = rows.index < HEAD
    found[rows.owner[at], rows.index[at]] = np.maximum(x[at], -20)
    return found


def _nearest(p: Floats, q: Floats, own: Ints) -> tuple[Ints, Floats]:
    """Find the nearest other row of q for each row of p, and its distance: mean of min(|p − q|, CAP)."""
    mate, least = np.zeros(len(p), np.int64), np.full(len(p), np.inf)
    there = (~np.isnan(q)).astype(np.float32)
    filled, known = np.nan_to_num(q).astype(np.float32), ~np.isnan(p)
    for i in range(len(p)):
        at = known[i]
        off = np.minimum(np.abs(filled[:, at] - p[i, at].astype(np.float32)), CAP)
        many = there[:, at].sum(axis=1)
        mean = np.where(many >= 5, np.einsum("sh,sh->s", off, there[:, at]) / np.maximum(many, 1), np.inf)
        mean[own[i]] = np.inf
        mate[i], few = int(mean.argmin()), len(mean) // 20
        if mean[mate[i]] < ALONE * np.partition(mean, few)[few]:  # log-probs that vary little are near many
            least[i] = mean[mate[i]]
    return mate, least


def _matched(rows: Rows, who: Ints, mates: Ints, lost: Ints) -> Rows:
    """Give rows `who` the rollout log-probs of rows `mates` at common positions; drop the rows `lost`."""
    q, kept = rows.q.copy(), np.ones(rows.tokens, bool)
    for i, j in zip(who, mates, strict=True):
        a, b = rows.starts[i], rows.starts[j]
        mine, theirs = rows.position[a : rows.starts[i + 1]], rows.position[b : rows.starts[j + 1]]
        _, at, place = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
        q[a + at] = rows.q[b + place]
        kept[a : rows.starts[i + 1]] = np.isin(mine, theirs)
    kept &= ~np.isin(rows.owner, lost)
    found = rows.with_q(q).keep(kept)
    fits = found.level < 10 * np.median(found.level) + 0.05  # a row without a mate shows it
    return found.only(fits) if fits.any() else found
