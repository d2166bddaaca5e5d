"""Signatures of what is logged for single tokens: another token's log-prob, or a penalty.

Each takes `Rows` and returns a `Found` or None, as those of `signatures` do.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.rows import CAP, Estimate, Flags, Rows, bound, estimate
from offpol_diag.diagnosis.signatures import FAR, Found, percent


def top1_logged(rows: Rows) -> Found | None:
    """Find the log-prob of the likeliest token in place of the sampled one.

    Then it is never below the sampled token's, and where they differ both are probabilities of two tokens of
    one distribution: together they are at most 1.
    """
    for name, x, other in (("rollout", rows.q, rows.p), ("train", rows.p, rows.q)):
        above = x - other
        far = above > FAR
        near = np.abs(above) < 0.1
        if far.mean() < 0.05 or far.sum() < 30 or near.mean() < 0.05 or np.mean(above < -0.3) > 0.01:
            continue
        both = np.exp(np.minimum(x[far], 0)) + np.exp(np.minimum(other[far], 0))
        share = float(np.mean(both <= 1.02))
        if share < 0.985 or (x[far] > -1e-4).mean() > 0.2 or len(np.unique(x[far])) < 0.5 * far.sum():
            continue
        statistic = (
            f"the {name} column is below the other by more than 0.3 nats at "
            f"{percent(float(np.mean(above < -0.3)))} of the tokens, above it by more than {FAR:g} at "
            f"{percent(float(far.mean()))}; both probabilities add up to at most 1.02 in {percent(share)} "
            "of these"
        )
        nothing = rows.keep(
            np.zeros(rows.tokens, bool)
        )  # what was sampled is likely where the column is right
        fields = {"column": name}
        return Found.of_tokens("top1_logged", statistic, rows, far, repaired=nothing, fields=fields)
    return None


UNCERTAIN = (-8.0, -0.3)
"""Range of log π_rollout in which a token is neither certain nor an outlier, nats."""
LEAST_GAP, LEAST_EXPLAINED = 0.12, 0.15
"""Smallest gap between ids that came before and others, nats, and share of the variance of Δ that it
explains: 0.20 to 0.79 and 30 to 48% of penalties from 1.1 on, at most 0.05 and 2% where there is none."""


def _seen(rows: Rows) -> Flags:
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

    @property
    def size(self) -> float:
        """The difference of the means, nats."""
        return self.after.value - self.before.value

    @property
    def sure(self) -> bool:
        """Whether the difference is beyond doubt."""
        return self.size > bound(self.after.groups) * float(np.hypot(self.after.error, self.before.error))


def _gap(rows: Rows, some: Flags, seen: Flags) -> Gap | None:
    """Compare flagged tokens with others, among some; None where there are few of a kind."""
    if min((some & seen).sum(), (some & ~seen).sum()) < 50:
        return None
    delta = np.clip(rows.delta, -CAP, CAP)
    after, before = (estimate(rows, delta, some & part) for part in (seen, ~seen))
    among, expected = delta[some], np.where(seen[some], after.value, before.value)
    left, whole = np.square(among - expected).sum(), np.square(among - among.mean()).sum()
    return Gap(seen, after, before, float(1 - left / whole) if whole > 0 else 0.0)


def repetition_penalty(rows: Rows) -> Found | None:
    """Find tokens that the engine makes less likely once they have come: those seen before stand apart.

    A repetition penalty counts the ids of the prompt too; presence and frequency penalties do not.
    """
    if rows.ids is None:
        return None
    came, prompt = _seen(rows), rows.in_prompt
    some = (rows.q > UNCERTAIN[0]) & (rows.q < UNCERTAIN[1])
    whole = came if prompt is None else came | (prompt > 0)
    found = [one for one in (_gap(rows, some, came), _gap(rows, some, whole)) if one is not None]
    if not found:
        return None
    best = max(found, key=lambda one: one.explained)
    if best.size < LEAST_GAP or best.explained < LEAST_EXPLAINED or not best.sure:
        return None
    statistic = (
        "log π_train − log π_rollout of tokens whose id came before in the "
        f"{'response' if best.seen is came else 'prompt or response'} lies {best.size:.2g} nats "
        f"above that of others ({best.after.value:.2g} and {best.before.value:.2g}), which explains "
        f"{percent(best.explained)} of its variance"
    )
    alone = None if prompt is None else _gap(rows, some & ~came, whole)
    fields = {}
    if alone is not None and alone.sure and alone.size > 0.5 * best.size:
        fields = PENALTIES["prompt"]
    elif alone is not None and alone.size < 0.25 * best.size:
        fields = PENALTIES["response"]
    if alone is not None:
        statistic += f"; ids that only the prompt holds lie {alone.size:.2g} above ids that are new"
    repaired = rows.keep(~best.seen)
    return Found.of_tokens(
        "repetition_penalty", statistic, rows, best.seen, repaired=repaired, fields=fields, approximate=True
    )


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
