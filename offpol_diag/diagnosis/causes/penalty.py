"""A repetition, presence or frequency penalty that one column alone knows of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.causes.sampling import fit_temperature
from offpol_diag.diagnosis.rows import CAP, Flags, Rows, bound, estimate, percent

UNCERTAIN, FEWEST = (-8.0, -0.3), 50
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
    sentence = "the engine penalises tokens that came before, and only the rollout column knows of it"
    violates = "whether a token came before makes no difference between two engines of one model"
    confirm = (
        "the sampling parameters of the rollout and generation_config.json of the model: repetition_penalty, "
        "presence_penalty, frequency_penalty"
    )
    fix = (
        "sample with repetition_penalty=1.0 and without presence and frequency penalties (vLLM: "
        'generation_config="vllm" takes none from the model)'
    )
    after = "without tokens that came before"
    apart = {
        "special_token": "There fixed ids are off, seen or not.",
        "rollout_raw_logprobs": "A temperature bends all tokens, seen or not.",
    }

    def look(self, rows: Rows) -> Found | None:
        came, delta = seen_before(rows), np.clip(rows.delta, -CAP, CAP)
        some = (rows.q > UNCERTAIN[0]) & (rows.q < UNCERTAIN[1])
        kinds = some & came, some & ~came
        if min(kinds[0].sum(), kinds[1].sum()) < FEWEST:
            return None
        after, before = (estimate(rows, delta, at) for at in kinds)
        gap, left = after.value - before.value, delta - np.where(came, after.value, before.value)
        explained = float(1 - np.square(left[some]).mean() / max(delta[some].var(), 1e-12))
        sure = gap > bound(after.groups) * float(np.hypot(after.error, before.error))
        if gap < LEAST_GAP or explained < LEAST_EXPLAINED or not sure:
            return None
        if rows.once(fit_temperature).clear:
            return None  # tokens that come again are likely ones, which a temperature moves most
        evidence = (
            f"log π_train − log π_rollout of tokens whose id came before lies {gap:.2g} nats above that of "
            f"others ({after.value:.2g} and {before.value:.2g}): {percent(explained)} of its variance"
        )
        one = self.of_tokens(evidence, rows, came, approximate=True)
        return one if one.helps else replace(one, repaired=None)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows | None:
        return None if rows.ids is None else replace(rows, q=rows.q - 0.6 * seen_before(rows), entropy=None)


def seen_before(rows: Rows) -> Flags:
    """Return whether the id of a token came before in its sequence, [T]."""
    assert rows.ids is not None
    ids = np.unique(rows.ids, return_inverse=True)[1]
    first = np.unique(rows.owner * (int(ids.max()) + 1) + ids, return_index=True)[1]
    found = np.ones(rows.tokens, bool)
    found[first] = False
    return found
