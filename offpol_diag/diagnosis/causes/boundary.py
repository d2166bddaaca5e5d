"""A first or last token, or one beside masked ones, that is logged wrongly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import Rows, correlation

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
    confirm = "compare both columns at {place} of a few sequences with log-softmax of its logits"
    fix = "shift within each sequence and not across packed ones (cu_seqlens, not torch.roll)"
    after = "without these tokens"
    apart = {"wrong_context": "There the excess of the first token decays over tens of tokens."}
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
        usual = float(rows.size[inner].mean())
        least = max(LEAST, min(TIMES * usual, 1.0), APART * usual)
        for name, away in distance.items():
            at, beside = away == 0, inner & (away < NEAR)
            if at.sum() < FEWEST or (mean := float(rows.size[at].mean())) < least:
                continue
            related = correlation(rows.p[at], rows.q[at])
            if related > UNRELATED or (beside.any() and rows.size[beside].mean() > ALONE * usual):
                continue
            evidence = f"{name} differs by {mean:.2g} nats on average, tokens elsewhere by {usual:.2g}; the "
            evidence += f"columns correlate {related:.2f} there"
            return self.of_tokens(evidence, rows, at, words={"place": name})
        return None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Put a number of another token's at the last token of each row, in the train column."""
        wrong = -1 - 3 * rng.random(rows.tokens)
        return replace(rows, p=np.where(rows.from_end == 0, wrong, rows.p))
