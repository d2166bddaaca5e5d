"""Columns that are shifted against each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import CAP, Flags, Floats, Ints, Rows, correlation

LAGS = tuple(lag for k in range(1, 9) for lag in (k, -k))
OVERLAP, SHARE = 8, 0.03
"""Fewest tokens that both columns of a sequence have at a shift, and smallest share of sequences to have it:
a few tokens agree at one of so many lags by chance."""
BAD, GAIN, NATS = 0.02, 0.35, 2.0
"""Mean |Δ| of a sequence that is looked at; what a shift has to leave of it; and what it has to gain in all,
nats."""
RULE, MENDED = 0.3, 0.5
"""Share from which it is the rule, and level that a mended sequence then has, nats."""


class OffByOne(Cause):
    """The two columns are shifted against each other.

    In place the columns do not correlate, one token further they agree to rounding. K3 is 1 to 20 nats, and
    falls to the engine's own level once one column is moved.
    """

    id = "off_by_one"
    sentence = "the rollout column is shifted by {tokens} against the train column"
    violates = "both columns are about the same sampled token"
    confirm = "shift one column by {tokens}: K3 falls as it does below"
    fix = "{slice}; logits at position t − 1 score token t, so slice logits[:, :-1] and tokens[:, 1:]"
    after = "with the shift undone"
    ruled_out = "columns shifted against each other (by up to 8 tokens)"
    apart = {
        "row_permutation": "There no shift helps; another row's values fit.",
        "retokenization": "There the columns agree up to some token, and are shifted only behind it.",
        "boundary": "There one token per sequence is wrong, and the others agree in place.",
    }
    blanks = {"tokens": "the number of tokens in the answer", "slice": "move one column"}

    def look(self, rows: Rows) -> Found | None:
        return self._whole(rows) or self._behind_masked(rows)

    def _whole(self, rows: Rows) -> Found | None:
        bad = rows.level > BAD
        if bad.sum() < 2:
            return None
        among = rows.only(bad)
        long = {lag: rows.lengths - abs(lag) >= OVERLAP for lag in LAGS}
        every = np.stack([at_lag(among, lag) for lag in LAGS])
        at = np.where(np.stack([long[lag][bad] for lag in LAGS]), every, np.inf)
        best, least = at.argmin(axis=0), at.min(axis=0)
        moved = (least < GAIN * among.level) & ((among.level - least) * among.lengths > NATS)
        if moved.sum() < 2:
            return None
        votes = np.bincount(best[moved], minlength=len(LAGS))
        if votes.max() < 0.5 * votes.sum():
            return None  # short sequences that fit at one of so many lags by chance
        lag = LAGS[int(votes.argmax())]
        moved &= best == LAGS.index(lag)
        if _periodic(among.only(moved), lag):
            return None  # text that repeats itself fits there too
        share = moved.sum() / max(int(long[lag][bad].sum()), 1)
        if moved.sum() < max(2, SHARE * long[lag].sum()) or not _from_start(among, moved, lag):
            return None
        least = every[LAGS.index(lag)]  # short sequences may have what longer ones show
        gain = (among.level - least) * among.lengths
        moved |= (least < GAIN * among.level) & (gain > NATS) & (among.lengths >= 6)
        if share > RULE:  # then also where a large mismatch hides it
            moved |= least < 0.9 * among.level
        sequences = rows.of(np.flatnonzero(bad)[moved])
        if sequences.mean() > 0.8:
            sequences[:] = True  # the rest is too short, or too certain, to show it
        return self._undone(rows, sequences, lag, share)

    def _undone(self, rows: Rows, sequences: Flags, lag: int, share: float) -> Found | None:
        k, tokens, there = abs(lag), sequences[rows.owner], rows.only(sequences)
        apart, placed = (
            round(correlation(p, q), 2) + 0.0 for p, q in (_pairs(there, lag)[:2], (there.p, there.q))
        )
        if not apart > placed:
            return None  # also where a column is constant, and correlates with nothing
        moved, (first, last) = rows.q.copy(), rows.edges  # masked tokens between runs are not in the dump
        takes = tokens & ((last if lag > 0 else first) >= k)
        moved[takes] = rows.q[np.flatnonzero(takes) + lag]
        mended = rows.with_q(moved).keep(~tokens | takes)
        if share > RULE and (mended.level < MENDED).any():  # rows that still differ likely have it too
            mended = mended.only(mended.level < MENDED)
        evidence = (
            f"the columns correlate {apart:.2f} at {k} token{'s' if k > 1 else ''} apart and {placed:.2f} in "
            f"place, in {int(sequences.sum()):,} of {rows.sequences:,} sequences"
        )
        old, rollout = (f":-{k}", f"{k}:") if lag > 0 else (f"{k}:", f":-{k}")
        words = {
            "lag": str(k),
            "tokens": "one token" if k == 1 else f"{k} tokens",
            "slice": f"old_log_probs[:, {old}] belongs to rollout_log_probs[:, {rollout}]",
        }
        return Found(self, evidence, rows, tokens, sequences, mended, words=words, exact=True)

    def _behind_masked(self, rows: Rows) -> Found | None:
        """Find a shift that begins behind masked tokens, as after a tool's answer: in each run by itself."""
        new = np.ones(rows.tokens, bool)
        new[1:] = (np.diff(rows.position) != 1) | (rows.index[1:] == 0)
        begins = np.flatnonzero(new)
        owner = rows.owner[begins]
        scalars = {name: [column[i] for i in owner] for name, column in rows.scalars.items()}
        runs = replace(rows, starts=np.append(begins, rows.tokens), scalars=scalars)
        later = np.append(False, owner[1:] == owner[:-1])
        found = self._whole(runs.only(later)) if later.sum() >= 8 else None
        if found is None or found.sequences.mean() < RULE:
            return None
        run = np.zeros(len(begins), bool)
        run[np.flatnonzero(later)[found.sequences]] = True
        evidence = f"behind masked tokens {found.evidence.replace('sequences', 'runs of tokens')}"
        words = {**found.words, "after": "without what lies behind masked tokens"}
        return self.of_tokens(evidence, rows, run[np.cumsum(new) - 1], words=words, exact=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, q=np.roll(rows.q, rng.choice([1, -1, 2])))


def _pairs(rows: Rows, lag: int) -> tuple[Floats, Floats, Ints]:
    """Return p_t, q_{t+lag} and the index of the sequence of all pairs of tokens of one sequence."""
    k = abs(lag)
    p, q = (rows.p[:-k], rows.q[k:]) if lag > 0 else (rows.p[k:], rows.q[:-k])
    same = rows.owner[k:] == rows.owner[:-k]
    return p[same], q[same], rows.owner[k:][same]


def at_lag(rows: Rows, lag: int) -> Floats:
    """Return the mean of min(|p_t − q_{t+lag}|, CAP) of each sequence, [S]; infinite without a pair."""
    p, q, owner = _pairs(rows, lag)
    many = np.bincount(owner, minlength=rows.sequences)
    total = np.bincount(owner, np.minimum(np.abs(p - q), CAP), minlength=rows.sequences)
    return np.where(many > 0, total / np.maximum(many, 1), np.inf)


def _periodic(rows: Rows, lag: int) -> bool:
    """Return whether most tokens have the id of the token at this distance."""
    if rows.ids is None:
        return False
    k = abs(lag)
    same = rows.owner[k:] == rows.owner[:-k]
    return bool(np.mean((rows.ids[k:] == rows.ids[:-k])[same]) > 0.5)


def _from_start(rows: Rows, moved: Flags, lag: int) -> bool:
    """Return whether the shift starts at the first tokens of most sequences."""
    k, head = abs(lag), rows.only(moved)
    begin = head.keep(head.index < 4 + k)
    here, there = begin.keep(begin.index < 4).level, at_lag(begin, lag)
    in_place, shifted = there > 3 * here + 0.1, here > 3 * there + 0.1
    if in_place.sum() > RULE * max(int((in_place | shifted).sum()), 1):
        return False  # sequences that agree in place until a token is left out
    head = head.keep(head.index < np.maximum(6, head.lengths[head.owner] // 3) + k)
    return float(np.mean(at_lag(head, lag) < 0.6 * np.maximum(head.level, 1e-9))) > 0.5
