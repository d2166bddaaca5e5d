"""A repetition, presence or frequency penalty that one column alone knows of."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.causes.sampling import fit_temperature
from offpol_diag.diagnosis.rows import CAP, Estimate, Flags, Rows, bound, estimate, percent

UNCERTAIN = (-8.0, -0.3)
"""Range of log π_rollout in which a token is neither certain nor an outlier, nats."""
LEAST_GAP, LEAST_EXPLAINED = 0.12, 0.15
"""Smallest gap between ids that came before and others, nats, and share of the variance of Δ that it
explains: 0.20 to 0.79 and 30 to 48% of penalties from 1.1 on, at most 0.05 and 2% where there is none."""
PROMPT, RESPONSE = 0.5, 0.25
"""Gap of ids that only the prompt holds, in that of the others, from which it counts too, and below which it
does not."""
FEWEST = 50
"""Fewest tokens of a kind."""
PENALTIES = {
    "prompt": {
        "sentence": "the engine penalises tokens that came before, in the prompt too, as repetition_penalty "
        "does, and only the rollout column knows of it",
        "fix": "sample with repetition_penalty=1.0 (vLLM: "
        'generation_config="vllm" takes none from the model)',
    },
    "response": {
        "sentence": "the engine penalises tokens that came before in the response, not those of the prompt, "
        "as presence_penalty and frequency_penalty do, and only the rollout column knows of it",
        "fix": "sample with presence_penalty=0 and frequency_penalty=0",
    },
}
"""What is penalised → the sentences, of vLLM and SGLang alike."""


class RepetitionPenalty(Cause):
    """A repetition penalty acts on one side only.

    Ids seen earlier in the response (with prompt_ids also: in the prompt, which repetition_penalty counts,
    presence and frequency penalties do not) have a lower rollout log-prob than the trainer's: mean Δ of seen
    ids less unseen is +0.6 to +0.96 (honest at most 0.05), 25% to 36% of the variance.
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
        came, prompt = seen_before(rows), rows.in_prompt
        some = (rows.q > UNCERTAIN[0]) & (rows.q < UNCERTAIN[1])
        whole = came if prompt is None else came | (prompt > 0)
        found = [one for one in (Gap.of(rows, some, came), Gap.of(rows, some, whole)) if one is not None]
        if not found:
            return None
        best = max(found, key=lambda one: one.explained)
        if best.size < LEAST_GAP or best.explained < LEAST_EXPLAINED or not best.sure:
            return None
        if rows.once(fit_temperature).clear:
            return None  # tokens that come again are likely ones, which a temperature moves most
        evidence = (
            "log π_train − log π_rollout of tokens whose id came before in the "
            f"{'response' if best.seen is came else 'prompt or response'} lies {best.size:.2g} nats "
            f"above that of others ({best.after.value:.2g} and {best.before.value:.2g}), which explains "
            f"{percent(best.explained)} of its variance"
        )
        alone, words = None if prompt is None else Gap.of(rows, some & ~came, whole), dict[str, str]()
        if alone is not None:
            evidence += f"; ids that only the prompt holds lie {alone.size:.2g} above ids that are new"
            if alone.sure and alone.size > PROMPT * best.size:
                words = PENALTIES["prompt"]
            elif alone.size < RESPONSE * best.size:
                words = PENALTIES["response"]
        one = self.of_tokens(evidence, rows, best.seen, words=words, approximate=True)
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


class Gap(NamedTuple):
    """What a flag explains of Δ: means of flagged and other tokens, and the share of the variance."""

    seen: Flags
    after: Estimate
    before: Estimate
    explained: float

    @classmethod
    def of(cls, rows: Rows, some: Flags, seen: Flags) -> Gap | None:
        """Compare flagged tokens with others, among some; None where there are few of a kind."""
        if min((some & seen).sum(), (some & ~seen).sum()) < FEWEST:
            return None
        delta = np.clip(rows.delta, -CAP, CAP)
        after, before = (estimate(rows, delta, some & part) for part in (seen, ~seen))
        among, expected = delta[some], np.where(seen[some], after.value, before.value)
        left, whole = np.square(among - expected).sum(), np.square(among - among.mean()).sum()
        return cls(seen, after, before, float(1 - left / whole) if whole > 0 else 0.0)

    @property
    def size(self) -> float:
        """The difference of the means, nats."""
        return self.after.value - self.before.value

    @property
    def sure(self) -> bool:
        """Whether the difference is beyond doubt."""
        return self.size > bound(self.after.groups) * float(np.hypot(self.after.error, self.before.error))
