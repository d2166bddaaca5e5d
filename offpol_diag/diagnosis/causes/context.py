"""Responses that were scored after another prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import Rows, percent, uncertain

EARLY, LATE, FEWEST = 8, 32, 4
"""A wrong prompt affects the first `EARLY` tokens of a response most, and tokens from `LATE` on less; and
fewest responses that show it."""
FALLS, NATS, USUAL, PART, OTHERWISE = 3.0, 0.15, 8.0, 0.5, 4.0
"""Least factor by which |Δ| falls along a response, least |Δ| at its beginning (nats), and its least factor
over that of other responses; share of responses below which only these are concerned; how many more fall."""
AT_FIRST, STEEP = 1.8, (1.0, 3.0)
"""Least mean |Δ|/(1 − π_rollout), cut at `CAP`, of first tokens after another prompt: it is 2.4 to 2.9 as a
rule, and 0.2 to 1.5 where the weights were updated during the response. Where it fades at once: its least
size, and least factor of it in that of the fourth to eighth token, which is at most 1.7 where the weights
were updated."""
FADES, FADED = 1.6, 0.2
"""Least factor of |Δ|/(1 − π_rollout), of uncertain tokens, by which the effect of another prompt fades; and
most mean |Δ| from `LATE` on where all responses follow another prompt, nats: at most 0.12 in real rollouts,
and 0.29 where an adapter counts twice and moves the first tokens most."""


class WrongContext(Cause):
    """Engine and trainer scored the response after different prompts.

    Whole responses are off, the first tokens most (by 0.8 nats after another template); the excess decays
    over tens of tokens as the response becomes its own context.
    """

    id = "wrong_context"
    sentence = "engine and trainer scored {share} of the responses after different prompts"
    confirm = "print the prompt ids that the engine got and those the trainer used for one of these sequences"
    fix = "apply the chat template once, with the same system prompt and tools, and pass prompt ids, not text"
    after = "without these sequences, or from token 32 on where all are concerned"
    apart = {"model_differs": "There the excess does not decay."}

    def look(self, rows: Rows) -> Found | None:
        long = rows.lengths >= LATE + EARLY
        if long.sum() < FEWEST:
            return None
        first, later = rows.index < EARLY, rows.index >= LATE
        heads = np.where(first, rows.size, 0.0)
        worst = np.maximum.reduceat(heads, rows.starts[:-1])  # one token that is far off is no context
        early = (rows.sum(heads) - worst) / np.maximum(np.minimum(rows.lengths, EARLY) - 1, 1)
        end = rows.sum(np.where(later, rows.size, 0)) / np.maximum(rows.lengths - LATE, 1)
        falling = long & (early > NATS) & (early > FALLS * end)
        rising = long & (end > NATS) & (end > FALLS * early)
        if falling.sum() < max(FEWEST, 0.02 * long.sum(), OTHERWISE * rising.sum()):
            return None
        share = float(falling.sum() / long.sum())
        part, usual = share < PART, float(np.quantile(early[long], 0.25))
        if early[falling].mean() < USUAL * usual if part else end[falling].mean() > FADED:
            return None
        there = falling[rows.owner]
        begin, near = rows.scaled[there & (rows.index == 0)], rows.scaled[there & first & (rows.index > 2)]
        if begin.mean() < AT_FIRST and not begin.mean() > max(STEEP[0], STEEP[1] * near.mean()):
            return None  # weights that changed during the response differ at its start as they do elsewhere
        some = there & uncertain(rows)
        fades = rows.scaled[some & first].mean() > FADES * rows.scaled[some & later].mean()
        if (some & later).sum() < 100 or not fades:
            return None  # later tokens are more certain, and differ as much as that leaves room for
        first_ones, later_ones = f"{early[falling].mean():.2g}", f"{end[falling].mean():.2g}"
        evidence = (
            f"in {falling.sum():,} of {long.sum():,} longer responses the first {EARLY} tokens differ by "
        )
        evidence += f"{first_ones} nats on average, those from {LATE} on by {later_ones}"
        tokens, words = there if part else ~later, {"share": percent(share) if part else "all"}
        return self.of_tokens(evidence, rows, tokens, words=words, approximate=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Move the train column of a third of the rows by what fades over tens of tokens."""
        some = (np.arange(rows.sequences) % 3 == 0)[rows.owner]
        size = np.where(rows.index == 0, 3.0, 1.5 / (1 + rows.index / 4))
        off = size * rng.choice([-1.2, 0.6], rows.tokens) * -np.expm1(rows.q)
        return replace(rows, p=np.where(some, np.minimum(rows.p + off, -1e-9), rows.p))
