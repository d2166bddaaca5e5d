"""The log-prob of the likeliest token in place of the sampled one's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import Rows, percent

FAR, NEAR, BELOW, SELDOM = 0.7, 0.1, 0.3, 0.01
"""|Δ| of a token that was not the likeliest, of one that was, how far the column may lie below, nats, and at
which share of the tokens."""
FEWEST, SOME = 30, 0.05
"""Fewest tokens that were not the likeliest, and least share of either kind."""
SUMS, MASS = 0.985, 1.02
"""Share of these whose two probabilities are of two tokens of one distribution, and most of their sum."""
SPREAD = 0.5
"""Least share of different values among these, which a constant has not."""


class Top1Logged(Cause):
    """The best token's log-prob was logged and not the sampled one's.

    The rollout column is never below the trainer's by more than 0.3, and π_train + π_rollout stays below 1.02
    for tokens that are far off. At temperature 0 all is well.
    """

    id = "top1_logged"
    sentence = "the {column} column holds the log-prob of the likeliest token, not of the sampled one"
    confirm = "print the dict of log-probs of one token: the sampled id's entry is not always the first"
    fix = "take the entry of the sampled id, not the first (vLLM: logprobs[token_id].logprob)"
    after = "without the tokens that were not the likeliest"
    apart = {"rollout_raw_logprobs": "There most tokens are off a little."}

    def look(self, rows: Rows) -> Found | None:
        for name, x, other in rows.both:
            above = x - other
            far, below = above > FAR, float(np.mean(above < -BELOW))
            many = far.sum() >= max(FEWEST, SOME * len(far)) and np.mean(np.abs(above) < NEAR) >= SOME
            if not many or below > SELDOM:
                continue
            sums = np.mean(np.exp(np.minimum(x[far], 0)) + np.exp(np.minimum(other[far], 0)) <= MASS)
            if sums < SUMS or len(np.unique(x[far])) < SPREAD * far.sum():
                continue
            evidence = (
                f"the {name} column is below the other by more than {BELOW:g} nats at {percent(below)} of "
            )
            evidence += f"the tokens, above it by more than {FAR:g} at {percent(float(far.mean()))}; both "
            evidence += f"probabilities add up to at most {MASS:g} in {percent(float(sums))} of these"
            # what was sampled is likely where the column is right: nothing else is to be seen
            nothing = rows.keep(np.zeros(rows.tokens, bool))
            return self.of_tokens(evidence, rows, far, repaired=nothing, words={"column": name})
        return None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Log for tokens that are less likely than the rest together most of the rest's probability."""
        rest = np.log(np.maximum(-np.expm1(rows.q), 1e-12))
        best = rest + np.log(rng.uniform(0.6, 0.9, rows.tokens))
        return replace(rows, q=np.where(best > rows.q, np.minimum(best, -1e-4), rows.q))
