"""Columns that are shifted against each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import CAP, Floats, Ints, Rows, correlation
from offpol_diag.numerals import counted

LAGS = tuple(lag for k in range(1, 9) for lag in (k, -k))
OVERLAP, SHARE = 8, 0.03
"""Fewest tokens that both columns of a run have at a shift, and smallest share of runs to have it: a few
tokens agree at one of so many lags by chance."""
BAD, GAIN, NATS = 0.02, 0.35, 2.0
"""Mean |Δ| of a run that is looked at, what a shift has to leave of it, and to gain in all, nats."""
RULE, NEARLY_ALL, MENDED = 0.3, 0.8, 0.5
"""Share from which it is the rule, also where a large mismatch hides it; from which all have it, for the rest
is too short to show it; and level that a mended run then has, nats."""
FITS = (3.0, 0.1)
"""Factor and nats by which first tokens fit better at one of two places."""


class OffByOne(Cause):
    """The two columns are shifted against each other.

    In place the columns do not correlate, one token further they agree to rounding. K3 is 1 to 20 nats, and
    falls to the engine's own level once one column is moved.
    """

    id = "off_by_one"
    sentence = "the rollout column is shifted by {tokens} against the train column"
    confirm = "shift one column by {tokens}: K3 falls as it does below"
    fix = "{slice}; logits at position t − 1 score token t, so slice logits[:, :-1] and tokens[:, 1:]"
    after = "with the shift undone"
    apart = {"retokenization": "There the columns agree up to some token, and are shifted behind it."}
    blanks = {"tokens": "the number of tokens in the answer", "slice": "move one column"}

    def look(self, rows: Rows) -> Found | None:
        """Find a shift in runs of unmasked tokens, each by itself, as after a tool's answer."""
        edges, last = rows.edges
        begins = np.flatnonzero(edges == 0)
        runs = Rows(rows.q, rows.p, np.append(begins, rows.tokens), rows.position)
        bad = runs.level > BAD
        if bad.sum() < 2:
            return None
        among = runs.only(bad)
        every = np.stack([at_lag(among, lag) for lag in LAGS])
        at = np.where(among.lengths - np.abs(LAGS)[:, None] >= OVERLAP, every, np.inf)
        best, least = at.argmin(axis=0), at.min(axis=0)
        moved = (least < GAIN * among.level) & ((among.level - least) * among.lengths > NATS)
        votes = np.bincount(best[moved], minlength=len(LAGS))
        which = int(votes.argmax())
        lag, k, long = LAGS[which], abs(LAGS[which]), runs.lengths - abs(LAGS[which]) >= OVERLAP
        moved &= best == which
        few = moved.sum() < max(2, SHARE * long.sum(), votes.sum() / 2)
        if few or not _from_start(among.only(moved), lag):
            return None
        share = moved.sum() / long[bad].sum()
        moved |= (share > RULE) & (every[which] < 0.9 * among.level)  # also what is short, or differs by much
        hit = runs.of(np.flatnonzero(bad)[moved])
        hit[:] |= hit.mean() > NEARLY_ALL
        tokens, there = hit[runs.owner], runs.only(hit)
        apart = correlation(*pairs(there, lag)[:2]), correlation(there.p, there.q)
        if not apart[0] > apart[1]:
            return None  # also where a column is constant, and correlates with nothing
        q, takes = rows.q.copy(), tokens & ((last if lag > 0 else edges) >= k)
        q[takes] = rows.q[np.flatnonzero(takes) + lag]
        mended = rows.with_q(q).keep(~tokens | takes)
        if share > RULE and (mended.level < MENDED).any():  # rows that still differ likely have it too
            mended = mended.only(mended.level < MENDED)
        sequences = rows.sum(tokens) > 0
        evidence = f"the columns correlate {apart[0]:.2f} at {counted(k, 'token')} apart and "
        evidence += f"{round(apart[1], 2) + 0.0:.2f} in place, "
        evidence += f"in {sequences.sum():,} of {rows.sequences:,} sequences"
        old, rollout = (f":-{k}", f"{k}:") if lag > 0 else (f"{k}:", f":-{k}")
        words = {
            "tokens": "one token" if k == 1 else counted(k, "token"),
            "slice": f"old_log_probs[:, {old}] belongs to rollout_log_probs[:, {rollout}]",
        }
        return Found(self, evidence, rows, tokens, sequences, mended, words=words, exact=True)

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
    here, there = begin.keep(begin.index < 4).level, at_lag(begin, lag)
    in_place, shifted = there > FITS[0] * here + FITS[1], here > FITS[0] * there + FITS[1]
    return bool(in_place.sum() <= RULE * max(int((in_place | shifted).sum()), 1))
