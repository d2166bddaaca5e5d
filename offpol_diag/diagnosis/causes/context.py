"""Responses that were scored after another prompt."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import Rows, numbers, percent, uncertain
from offpol_diag.diagnosis.seen import Seen

OCTAVES = ((0, 8), (8, 16), (16, 32), (32, 64))
EACH, WHOLE, FAR, NEAR = 1.1, 2.0, 0.06, 0.15
"""Least factor between octaves of a response, and from the first to the last, of |Δ|/(1 − π_rollout) after a
changed prompt: 1.11 and 2.1. And shares of tokens above 8 times the usual size and below an eighth of it from
which two kinds of tokens are mixed: 0.12 and 0.16 where weights were updated on the way, 0.02 and 0.12 after
another prompt."""
EARLY, LATE = 8, 32
"""A wrong prompt affects the first `EARLY` tokens of a response most, and tokens from `LATE` on less."""
FALLS, NATS, PART = 3.0, 0.15, 0.5
"""Least factor by which |Δ| falls along a response, and least |Δ| at its beginning, nats; and share of
responses below which only these are concerned."""
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

    Whole responses are off, the first tokens most; the excess decays over tens of tokens as the response
    becomes its own context. With another template about 0.8 nats a token at the beginning, without an image
    more.
    """

    id = "wrong_context"
    sentence = "engine and trainer scored {share} of the responses after different prompts"
    violates = "the same weights after the same prompt give about the same log-probs"
    confirm = "print the prompt ids that the engine got and those the trainer used for one of these sequences"
    fix = (
        "apply the chat template once, with the same system prompt and tools, and pass prompt ids instead of "
        "text"
    )
    after = "without these sequences, or from token 32 on where all are concerned"
    ruled_out = "responses scored after another prompt"
    apart = {
        "retokenization": "There the prompt is right and the response breaks at a token.",
        "model_differs": "There the excess does not decay.",
    }
    blanks = {"share": "some or all"}

    def look(self, rows: Rows) -> Found | None:
        return self._along(rows) or self._at_first(rows)

    def _along(self, rows: Rows) -> Found | None:
        """Find a mismatch that fades by octaves of the response, from step 0 on.

        Keys of older weights fade alike, but are the trainer's own at step 0, and padding does where the
        length of the prompt is not known.
        """
        if not np.isfinite(numbers(rows.column("prompt_length"))).all():
            return None
        level = faded(rows)
        if level is None or not rows.once(Seen).from_start:
            return None
        places = ", ".join(f"{a} to {b - 1}: {x:.2g}" for (a, b), x in zip(OCTAVES, level, strict=True))
        evidence = f"|Δ|/(1 − q) fades along the response, from step 0 on: tokens {places}"
        return self.of_all(evidence, rows, words={"share": "all"}, approximate=True)

    def _at_first(self, rows: Rows) -> Found | None:
        long = rows.lengths >= LATE + EARLY
        if long.sum() < 6:
            return None
        first, later = rows.index < EARLY, rows.index >= LATE
        heads = np.where(first, rows.size, 0.0)
        worst = np.maximum.reduceat(heads, rows.starts[:-1])  # one token that is far off is no context
        early = (rows.sum(heads) - worst) / np.maximum(np.minimum(rows.lengths, EARLY) - 1, 1)
        end = rows.sum(np.where(later, rows.size, 0)) / np.maximum(rows.lengths - LATE, 1)
        usual = float(np.quantile(early[long], 0.25))
        falling = long & (early > NATS) & (early > FALLS * end)
        rising = long & (end > NATS) & (end > FALLS * early)
        excess = (falling.sum() - rising.sum()) / np.sqrt(max(falling.sum() + rising.sum(), 1))
        if falling.sum() < max(4, 0.02 * long.sum()) or excess < 2 or falling.sum() < 4 * rising.sum():
            return None
        share = float(falling.sum() / long.sum())
        part = share < PART
        least = max(8 * usual, NATS if usual < 0.01 else 2 * NATS)
        if part and (early[falling].mean() < least or falling.sum() < 10 * rising.sum()):
            return None
        begin = rows.scaled[(rows.index == 0) & falling[rows.owner]].mean()
        near = (rows.index > 2) & first & falling[rows.owner]
        if begin < AT_FIRST and not begin > max(STEEP[0], STEEP[1] * rows.scaled[near].mean()):
            return None  # weights that changed during the response differ at its start as they do elsewhere
        some = falling[rows.owner] & uncertain(rows)
        fades = rows.scaled[some & first].mean() > FADES * rows.scaled[some & later].mean()
        if (some & later).sum() < 100 or not fades:
            return None  # later tokens are more certain, and differ as much as that leaves room for
        if not part and end[falling].mean() > FADED:
            return None
        sequences = falling if part else np.ones(rows.sequences, bool)
        evidence = (
            f"in {int(falling.sum()):,} of {int(long.sum()):,} longer responses the first {EARLY} tokens "
            f"differ by {early[falling].mean():.2g} nats on average and those from {LATE} on by "
            f"{end[falling].mean():.2g}; the other way round in {int(rising.sum()):,}"
        )
        rest = rows.only(~falling) if part else rows.keep(later)
        words = {"share": percent(share) if part else "all"}
        tokens = sequences[rows.owner] & ~(later & (not part))
        mended = rest if rest.tokens > 200 else None
        return Found(self, evidence, rows, tokens, sequences, mended, words=words, approximate=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Move the train column of a third of the rows by what fades over tens of tokens."""
        some = (np.arange(rows.sequences) % 3 == 0)[rows.owner]
        size = np.where(rows.index == 0, 3.0, 1.5 / (1 + rows.index / 4))
        off = size * rng.choice([-1.2, 0.6], rows.tokens) * -np.expm1(rows.q)
        return replace(rows, p=np.where(some, np.minimum(rows.p + off, -1e-9), rows.p))


def faded(rows: Rows) -> list[float] | None:
    """Return |Δ|/(1 − π_rollout) of uncertain tokens by octave of the response if it fades in each; or None.

    It does not count where later tokens are more certain, where a part of the sequences is clean as the
    first of each pack is, or where a part of the tokens is, as behind an update of the weights.
    """
    some = uncertain(rows)
    octaves = [(rows.index >= a) & (rows.index < b) for a, b in OCTAVES]
    if min((some & at).sum() for at in octaves) < 200:
        return None
    level = [float(rows.scaled[some & at].mean()) for at in octaves]
    sure = [float(some[at].mean()) for at in octaves]
    steps = [a / b for a, b in pairwise(level)]
    if min(steps) < EACH or level[0] < WHOLE * level[-1] or sure[-1] < 0.8 * sure[0]:
        return None
    begin = rows.keep(some & octaves[0])
    each = begin.mean(begin.scaled)
    size = rows.scaled[some] / (float(np.median(rows.scaled[some])) / 0.6745)
    clean = float(np.quantile(each, 0.1)) < 0.3 * float(np.median(each))
    return None if clean or np.mean(size > 8) > FAR or np.mean(size < 1 / 8) > NEAR else level
