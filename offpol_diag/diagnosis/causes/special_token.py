"""A few token ids that are scored differently wherever they stand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import Flags, Rows, uncertain

LEAST_OFF, LEAST_APART = 0.15, 0.5
"""Least mean |Δ| of a token id that is scored differently, nats: at a recorded lag of 0, and where older
weights may be the reason, for an update can move one frequent id by 0.2 nats and others by 0.04."""
FEWEST, OFTEN, MOST = 8, 0.75, 0.3
"""Fewest tokens of an id, share of them that are off by half of their mean, and most of all tokens that may
be of such ids."""
TIMES, USUAL, UNSURE = 8.0, 3.0, 2.0
"""Least factor of an id's mean |Δ| over that of other ids, over that of other tokens of its place in the
response, and of its level over that of other uncertain tokens."""


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
        values, which, many = np.unique(rows.ids, return_inverse=True, return_counts=True)
        mean = np.bincount(which, rows.size) / many
        off = np.bincount(which, rows.size > 0.5 * mean[which]) / many
        least = LEAST_OFF if set(rows.column("policy_lag")) == {0} else LEAST_APART
        worst = np.flatnonzero((many >= FEWEST) & (mean >= least) & (off > OFTEN))
        others = _before(rows, np.isin(which, worst))
        beyond = TIMES * float(rows.size[others].mean()) if others.any() else np.inf
        worst = worst[mean[worst] > beyond]
        tokens = np.isin(which, worst)
        if not len(worst) or tokens.mean() > MOST:
            return None
        place = np.minimum(np.log2(rows.index + 1).astype(np.int64), 3)  # 0; 1 and 2; 3 to 6; later
        total, count = (np.bincount(place[others], x[others], 4) for x in (rows.size, np.ones(rows.tokens)))
        usual = float((total / np.maximum(count, 1))[place[tokens]].mean())
        unsure = ~tokens & uncertain(rows)
        level = float(rows.scaled[unsure].mean()) if unsure.sum() >= 100 else 0.0
        if rows.size[tokens].mean() < USUAL * usual or rows.scaled[tokens].mean() < UNSURE * level:
            return None  # other tokens that begin responses, or are uncertain, are off as well
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


def _before(rows: Rows, at: Flags) -> Flags:
    """Flag tokens with no flagged one before them in their sequence; all that are not, if there are few.

    A token whose embedding is another one on one side disturbs all that follow it, too.
    """
    seen = np.cumsum(at)
    clean: Flags = seen == (seen - at)[rows.starts[:-1]][rows.owner]
    return clean if clean.sum() >= 100 else ~at
