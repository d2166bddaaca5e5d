"""A few token ids that are scored differently wherever they stand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import Flags, Rows, uncertain

LEAST_OFF, LEAST_APART = 0.15, 0.5
"""Least mean |Δ| of a token id that is scored differently, nats: at a recorded lag of 0, and where older
weights may be the reason, for an update can move one frequent id by 0.2 nats and others by 0.04."""
FEWEST, WORST = 8, 8
"""Fewest tokens of an id, and how many ids are tried."""
OFTEN, TIMES = 0.75, 8.0
"""Share of an id's tokens that are off, and factor of its mean |Δ| over that of the others."""
NEARLY_ALL, BESIDE, QUIET = 0.9, 3.0, 0.15
"""The same where the others are hardly ever as far off, and their share that is."""
ANEW = (0.85, 2.0, 12.0)
"""The same, with its least |Δ| in nats, of an id with weights of its own, beside tokens before which it never
came."""
USUAL, UNSURE = 3.0, 2.0
"""Factor over what tokens of its probability or place are off by, and over the level of other uncertain
tokens."""
MOST, CARRIED = 0.3, 0.1
"""Most of all tokens that may be of these ids, and least share of Σ|Δ| that they carry."""


class SpecialToken(Cause):
    """Some token ids are scored differently wherever they stand.

    A few ids, often added ones or those of tools and thinking tags, are off by nats; all other ids agree. The
    engine suppresses an id, or one side has an embedding or an output row that the other has not.
    """

    needs = ("token_ids",)
    id = "special_token"
    sentence = "tokens with id {ids} are scored differently wherever they stand"
    violates = "a mismatch of kernels or weights does not single out one token"
    confirm = "decode id {ids}; compare its embedding and its row of the output layer in engine and trainer"
    fix = (
        "sync embeddings and lm_head of added tokens (resize_token_embeddings on both sides), and treat "
        "bad_words and logit_bias alike in engine and trainer"
    )
    after = "without these tokens"
    ruled_out = "single token ids that carry the mismatch"
    apart = {
        "repetition_penalty": "There ids seen earlier in the response are lowered, whichever they are.",
        "boundary": "There the position decides and not the id.",
        "weights_not_synced": "A head that was not synced moves all ids, and rare ones most.",
    }
    blanks = {"ids": "in the answer"}

    def look(self, rows: Rows) -> Found | None:
        assert rows.ids is not None
        values, which = np.unique(rows.ids, return_inverse=True)
        many, total = np.bincount(which), np.bincount(which, rows.size)
        mean = total / many
        far = max(0.2, float(np.quantile(rows.size, 0.99)))
        share = np.bincount(which, rows.size > np.maximum(0.1, 0.5 * np.minimum(mean, far)[which])) / many
        least = LEAST_OFF if set(rows.column("policy_lag")) == {0} else LEAST_APART
        worst: list[int] = []
        for at in np.argsort(-np.where(many >= 5, mean, 0))[:WORST]:
            rest = np.delete(np.arange(len(values)), [*worst, at])
            if not many[rest].sum():
                break
            others = total[rest].sum() / many[rest].sum()
            quiet = share[rest] @ many[rest] < QUIET * many[rest].sum()
            beyond = share[at] > OFTEN and mean[at] > TIMES * others
            nearly_all = share[at] > NEARLY_ALL and mean[at] > BESIDE * others and quiet
            anew = share[at] > ANEW[0] and mean[at] > max(ANEW[1], ANEW[2] * _before(rows, which == at))
            if many[at] < FEWEST or mean[at] < least or not (beyond or nearly_all or anew):
                continue
            if mean[at] > USUAL * _usual(rows, np.isin(which, [*worst, at])):
                worst.append(int(at))
        tokens = np.isin(which, worst)
        if not worst or tokens.mean() > MOST or total[worst].sum() < CARRIED * total.sum():
            return None
        others = ~tokens & uncertain(rows)
        if others.sum() >= 100 and UNSURE * rows.scaled[others].mean() > rows.scaled[tokens].mean():
            return None  # wherever the other tokens are uncertain, they are off as well
        names = ", ".join(str(values[at]) for at in worst)
        evidence = (
            f"{int(tokens.sum()):,} tokens with id {names} differ by {rows.size[tokens].mean():.2g} nats on "
            f"average, all others by {float(rows.size[~tokens].mean()):.2g}"
        )
        return self.of_tokens(evidence, rows, tokens, words={"ids": names})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows | None:
        """Lower the train log-probs of an id that makes up about a fiftieth of the tokens."""
        if rows.ids is None:
            return None
        ids, many = np.unique(rows.ids, return_counts=True)
        one = ids[np.argmin(np.abs(many / rows.tokens - 0.02))]
        return replace(rows, p=rows.p - 1.5 * (rows.ids == one))


def _usual(rows: Rows, at: Flags) -> float:
    """Return the mean |Δ| of unflagged tokens, weighted to the probabilities or the places of flagged ones.

    The larger of the two: an id that only begins responses is no worse than other tokens that do.
    """
    cuts = np.quantile(rows.q, np.linspace(0, 1, 13)[1:-1])
    places = np.minimum(np.log2(rows.index + 1).astype(np.int64), 3)  # 0; 1 and 2; 3 to 6; later
    found = []
    for cell in (np.searchsorted(cuts, rows.q), places):
        others = np.bincount(cell[~at], minlength=len(cuts) + 1)
        total = np.bincount(cell[~at], rows.size[~at], minlength=len(cuts) + 1)
        found.append(float(np.mean((total / np.maximum(others, 1))[cell[at]])))
    return max(found)


def _before(rows: Rows, at: Flags) -> float:
    """Return the mean |Δ| of tokens with no flagged one before them in their sequence, nats.

    A token whose embedding is another one on one side disturbs all that follow it, too. Where there are too
    few such tokens, it is the mean of all that are not flagged.
    """
    seen = np.cumsum(at)
    clean: Flags = seen == (seen - at)[rows.starts[:-1]][rows.owner]
    return float(rows.size[clean if clean.sum() >= 100 else ~at].mean())
