"""Token ids that are scored differently: some wherever they stand, or all that came before."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.causes.sampling import EXPLAINED, fit_temperature
from offpol_diag.diagnosis.estimates import bound, estimate, percent
from offpol_diag.diagnosis.rows import CAP, Flags, Rows

UNCERTAIN, FEW = (-8.0, -0.3), 50
"""Range of log π_rollout in which a token is neither certain nor an outlier, nats; fewest of a kind."""
LEAST_GAP, LEAST_EXPLAINED = 0.12, 0.15
"""Smallest gap between ids that came before and others, nats, and share of the variance of Δ that it
explains: 0.20 to 0.79 and 30 to 48% of penalties from 1.1 on, at most 0.05 and 2% where there is none."""


class RepetitionPenalty(Cause):
    """A repetition penalty acts on one side only.

    Ids seen earlier in the response have a lower rollout log-prob than the trainer's: mean Δ of seen ids less
    unseen is +0.6 to +0.96 (honest at most 0.05), 25% to 36% of the variance.
    """

    kind = "sampled"
    needs = ("token_ids",)
    id = "repetition_penalty"
    sentence = (
        "the engine penalises tokens that came before, and only the rollout column includes the penalty"
    )
    evidence = (
        "Δ of tokens whose id came before lies {:.2g} nats above that of others ({:.2g} and {:.2g}): {} of "
        "its variance"
    )
    confirm = "look for penalties in the rollout's sampling parameters and the model's generation_config.json"
    fix = "sample with repetition_penalty=1.0 and no presence or frequency penalty"
    after = "without tokens that came before"
    apart = {"special_token": "Certain ids are off, whether they came before or not."}

    def look(self, rows: Rows) -> Found | None:
        came, delta = rows.repeated, np.clip(rows.delta, -CAP, CAP)
        some = (rows.q > UNCERTAIN[0]) & (rows.q < UNCERTAIN[1])
        if min((some & came).sum(), (some & ~came).sum()) < FEW:
            return None
        repeated, others = estimate(rows, delta, some & came), estimate(rows, delta, some & ~came)
        gap, left = repeated.value - others.value, delta - np.where(came, repeated.value, others.value)
        explained = float(1 - np.square(left[some]).mean() / max(delta[some].var(), 1e-12))
        sure = gap > bound(repeated.groups) * float(np.hypot(repeated.error, others.error))
        if gap < LEAST_GAP or explained < LEAST_EXPLAINED or not sure:
            return None
        if rows.once(fit_temperature).explained > EXPLAINED:
            return None  # tokens that come again are likely ones, which a temperature moves most
        evidence = self.evidence.format(gap, repeated.value, others.value, percent(explained))
        return Found(self, evidence, rows, came, rows.keep(~came), approximate=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows | None:
        return None if rows.ids is None else replace(rows, q=rows.q - 0.6 * rows.repeated, entropy=None)


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
    engine suppresses an id, or one side has an embedding or an output row that the other lacks.
    """

    needs = ("token_ids",)
    id = "special_token"
    sentence = "tokens with id {ids} are scored differently wherever they stand"
    evidence = "{:,} tokens with id {} differ by {:.2g} nats on average, all others by {:.2g}"
    confirm = "decode id {ids}; compare its embedding and its row of the output layer in engine and trainer"
    fix = "sync embeddings and lm_head of added tokens, and treat bad_words and logit_bias alike"
    after = "without these tokens"
    apart = {"repetition_penalty": "Whatever came before in the response has a lower log-prob."}
    blanks = {"ids": "in the answer"}

    def look(self, rows: Rows) -> Found | None:
        assert rows.ids is not None
        ids, which, many = np.unique(rows.ids, return_inverse=True, return_counts=True)
        mean = np.bincount(which, rows.gap) / many
        often = np.bincount(which, rows.gap > 0.5 * mean[which]) / many > OFTEN
        least = LEAST_OFF if set(rows.column("policy_lag")) == {0} else LEAST_APART
        worst = np.flatnonzero((many >= FEWEST) & (mean >= least) & often)
        flagged = np.isin(which, worst)
        seen = np.cumsum(flagged)  # a token whose embedding is another one disturbs all that follow it, too
        clean: Flags = seen == (seen - flagged)[rows.starts[:-1]][rows.owner]
        others = clean if clean.sum() >= 100 else ~flagged
        worst = worst[mean[worst] > (TIMES * float(rows.gap[others].mean()) if others.any() else np.inf)]
        tokens = np.isin(which, worst)
        if not len(worst) or tokens.mean() > MOST:
            return None
        place = np.minimum(np.log2(rows.index + 1).astype(np.int64), 3)  # 0; 1 and 2; 3 to 6; later
        total, count = (np.bincount(place[others], x[others], 4) for x in (rows.gap, rows.every))
        usual = float((total / np.maximum(count, 1))[place[tokens]].mean())
        unsure = ~tokens & rows.uncertain
        level = float(rows.scaled_gap[unsure].mean()) if unsure.sum() >= 100 else 0.0
        if rows.gap[tokens].mean() < USUAL * usual or rows.scaled_gap[tokens].mean() < UNSURE * level:
            return None  # other tokens that begin responses, or are uncertain, are off as well
        names = ", ".join(map(str, ids[worst]))
        inside, outside = rows.gap[tokens].mean(), rows.gap[~tokens].mean()
        evidence = self.evidence.format(tokens.sum(), names, inside, outside)
        return Found(self, evidence, rows, tokens, rows.keep(~tokens), words={"ids": names})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows | None:
        """Lower the train log-probs of an id that makes up about a fiftieth of the tokens."""
        if rows.ids is None:
            return None
        ids, many = np.unique(rows.ids, return_counts=True)
        one = ids[np.argmin(np.abs(many / rows.tokens - 0.02))]
        return replace(rows, p=rows.p - 1.5 * (rows.ids == one))
