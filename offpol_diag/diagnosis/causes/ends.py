"""Ends of responses: a first or last token that is logged wrongly, or a beginning after another prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.estimates import correlation, percent
from offpol_diag.diagnosis.rows import Rows

FEWEST, LEAST, TIMES, APART = 8, 0.12, 8.0, 2.5
"""Fewest tokens at a place; their least mean |Δ|, nats; its least factor over that of other tokens, up to a
nat, and beyond it."""
UNRELATED, ALONE, NEAR = 0.5, 2.0, 4
"""Correlation of the columns at a place below which one of them is of another token (0.84 to 0.98 where the
weights were updated after the first); and most mean |Δ| of the tokens beside it, in that of others: after
another prompt, which changes the first token most, it is 2.2 or more."""


class Boundary(Cause):
    """The first or the last token of a response is logged wrongly.

    One position per sequence carries K3, ten times the others or more; the rest agrees to rounding. With the
    end-of-sequence token the last position of responses that ended, not of those that were cut.
    """

    id = "boundary"
    sentence = "{place} is logged wrongly"
    evidence = (
        "{} differs by {:.2g} nats on average, tokens elsewhere by {:.2g}; the columns correlate {:.2f} there"
    )
    confirm = "compare both columns at {place} of a few sequences with log-softmax of its logits"
    fix = "shift within each sequence and not across packed ones (cu_seqlens, not torch.roll)"
    after = "without these tokens"
    apart = {"wrong_context": "The excess at the first token decays over tens of tokens."}
    blanks = {"place": "the first or the last token"}

    def look(self, rows: Rows) -> Found | None:
        """Find a place that alone stands out, with unrelated columns."""
        after, before = rows.edges
        inner = np.minimum(after, before) > 0
        if not inner.any():
            return None
        distance = {
            "the first token": rows.index,
            "the last token": rows.from_end,
            "the token after masked ones": np.where(after < rows.index, after, NEAR),
            "the token before masked ones": np.where(before < rows.from_end, before, NEAR),
        }
        usual = float(rows.gap[inner].mean())
        least = max(LEAST, min(TIMES * usual, 1.0), APART * usual)
        for place, away in distance.items():
            at, beside = away == 0, inner & (away < NEAR)
            if at.sum() < FEWEST or (mean := float(rows.gap[at].mean())) < least:
                continue
            related = correlation(rows.p[at], rows.q[at])
            if related > UNRELATED or (beside.any() and rows.gap[beside].mean() > ALONE * usual):
                continue
            evidence = self.evidence.format(place, mean, usual, related)
            return Found(self, evidence, rows, at, rows.keep(~at), words={"place": place})
        return None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Put a number of another token's at the last token of each row, in the train column."""
        wrong = -1 - 3 * rng.random(rows.tokens)
        return replace(rows, p=np.where(rows.from_end == 0, wrong, rows.p))


EARLY, LATE, RESPONSES = 8, 32, 4
"""A wrong prompt affects the first `EARLY` tokens of a response most, and tokens from `LATE` on less; and
fewest responses that show it."""
FALLS, NATS, USUAL, PART, OTHERWISE = 3.0, 0.15, 8.0, 0.5, 4.0
"""Least factor by which |Δ| falls along a response, least |Δ| at its beginning (nats), and its least factor
over that of other responses; share of responses below which only these are concerned; and how many more
responses fall than rise: single tokens that are far off come as often late as early."""
AT_FIRST, STEEP = 1.8, (1.0, 3.0)
"""Least mean |Δ|/(1 − π_rollout), cut at `CAP`, of first tokens after another prompt: it is 2.4 to 2.9 as a
rule, and 0.2 to 1.5 where the weights were updated during the response. Where it fades at once: its least
size, and least factor of it in that of the fourth to eighth token, which is at most 1.7 where the weights
were updated."""
FADES, FADED = 1.6, 0.2
"""Least factor of |Δ|/(1 − π_rollout) by which the excess fades, of uncertain tokens; and most mean |Δ| from
`LATE` on where all responses follow another prompt, nats: up to 0.12 in real rollouts, and 0.29 where an
adapter counts twice and moves the first tokens most."""


class WrongContext(Cause):
    """Engine and trainer scored the response after different prompts.

    Whole responses are off, the first tokens most (by 0.8 nats after another template); the excess decays
    over tens of tokens as the response becomes its own context.
    """

    id = "wrong_context"
    sentence = "engine and trainer scored {share} of the responses after different prompts"
    evidence = (
        "in {:,} of {:,} longer responses the first 8 tokens differ by {:.2g} nats on average, those from 32 "
        "on by {:.2g}"
    )
    confirm = "print the prompt ids that the engine got and those the trainer used for one of these sequences"
    fix = "apply the chat template once, with the same system prompt and tools, and pass prompt ids, not text"
    after = "without these sequences, or without their first 32 tokens if all are affected"
    apart = {"model_differs": "The excess does not decay along the response."}

    def look(self, rows: Rows) -> Found | None:
        long = rows.lengths >= LATE + EARLY
        if long.sum() < RESPONSES:
            return None
        first, later = rows.index < EARLY, rows.index >= LATE
        heads = np.where(first, rows.gap, 0.0)
        worst = np.maximum.reduceat(heads, rows.starts[:-1])  # one token that is far off is no context
        early = (rows.sum(heads) - worst) / np.maximum(np.minimum(rows.lengths, EARLY) - 1, 1)
        end = rows.sum(np.where(later, rows.gap, 0)) / np.maximum(rows.lengths - LATE, 1)
        falling = long & (early > NATS) & (early > FALLS * end)
        rising = long & (end > NATS) & (end > FALLS * early)
        if falling.sum() < max(RESPONSES, 0.02 * long.sum(), OTHERWISE * rising.sum()):
            return None
        share = float(falling.sum() / long.sum())
        part, usual = share < PART, float(np.quantile(early[long], 0.25))
        if early[falling].mean() < USUAL * usual if part else end[falling].mean() > FADED:
            return None
        there, level = falling[rows.owner], rows.scaled_gap
        at_first, soon = level[there & (rows.index == 0)], level[there & first & (rows.index > 2)]
        if at_first.mean() < AT_FIRST and not at_first.mean() > max(STEEP[0], STEEP[1] * soon.mean()):
            return None  # weights that changed during the response differ at its start as they do elsewhere
        some = there & rows.uncertain
        fades = level[some & first].mean() > FADES * level[some & later].mean()
        if (some & later).sum() < 100 or not fades:
            return None  # later tokens are more certain, and differ as much as that leaves room for
        evidence = self.evidence.format(falling.sum(), long.sum(), early[falling].mean(), end[falling].mean())
        tokens, words = there if part else ~later, {"share": percent(share) if part else "all"}
        return Found(self, evidence, rows, tokens, rows.keep(~tokens), approximate=True, words=words)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Move the train column of a third of the rows by what fades over tens of tokens."""
        some = (np.arange(rows.sequences) % 3 == 0)[rows.owner]
        size = np.where(rows.index == 0, 3.0, 1.5 / (1 + rows.index / 4))
        off = size * rng.choice([-1.2, 0.6], rows.tokens) * -np.expm1(rows.q)
        return replace(rows, p=np.where(some, np.minimum(rows.p + off, -1e-9), rows.p))
