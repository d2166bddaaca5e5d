"""One value in place of log-probs: missing ones, tokens that were not sampled, a mean, a rounded column."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import Flags, Floats, Rows

IMPOSSIBLE, LOWEST = -90.0, -1000.0
"""Log-prob below which no token is ever sampled, nats, and below which none is computed."""
UNSURE, FAR = -0.05, 0.7
"""Log-prob below which a policy is not certain of a token, and |Δ| from which two log-probs of one token
count as different (a factor of 2), nats."""
OFTEN, BESIDE, LEAST = 2.5, 0.3, 6
"""How much more frequent than any other value a constant is, how far the other column is off beside it (nats,
median), and its fewest tokens: log-probs also repeat honestly where contexts do, but no value stands out."""
CERTAIN = 3.0
"""How much more often the other column is far off beside 0.0 than beside values just below it."""
PADDED = 0.3
"""Smallest share of sequences that end in padding."""


class Sentinel(Cause):
    """A constant stands where a log-prob is missing.

    One value comes again and again among the sampled tokens: 0.0, −9999, +1, a rounded −inf. The other column
    has ordinary values there: a third to a half of them are below −1. Few tokens carry nearly all of K3, and
    E[r] falls below 1 where the constant is 0.0.
    """

    id = "sentinel"
    sentence = "{share} of the {column} log-probs are the constant {value}, which stands for a missing value"
    violates = "log-probs of sampled tokens vary; one value does not come again and again"
    confirm = (
        "look at these tokens in what the {side} returns: a missing log-prob is filled in with {value} on "
        "the way"
    )
    fix = (
        "keep such tokens out of the loss (response_mask 0), and find where they get lost: streamed chunks, "
        "aborted and resumed requests, tokens the engine did not sample"
    )
    after = "with these tokens masked"
    ruled_out = "constants in place of log-probs"
    apart = {
        "wrong_mask": (
            "There the tokens were never sampled (tool output, padding); here they were, and their log-prob "
            "is missing."
        ),
        "boundary": "There the last token has a varying, wrong value; a constant is a sentinel.",
        "low_precision_storage": (
            "Rounding leaves many values of a grid, and peaked tokens at exactly 0.0 on both sides."
        ),
    }
    blanks = {"side": "engine or trainer", "value": "a constant"}

    def look(self, rows: Rows) -> Found | None:
        for name, x, other in (("rollout", rows.q, rows.p), ("train", rows.p, rows.q)):
            whole = self._whole(rows, name, x, other) or COPIED_MEAN.in_column(rows, name, x, other)
            if whole is not None:
                return whole
            value = constant(x, other)
            if value is None or _same_context(rows, x == value, value):
                continue
            same = x == value
            at_ids = rows.ids is not None and len(np.unique(rows.ids[same])) > 2
            if _written(x, value) or (np.mean(rows.sum(same) > 0) >= 0.3 and at_ids):
                first, length = rows.runs(same)
                run = np.repeat(np.arange(len(first)), length)
                sure = np.bincount(run[np.abs(other[same] - value) > 1e-3], minlength=len(first)) > 0
                tokens = np.zeros_like(same)
                tokens[same] = sure[run]  # a run of the constant needs one token that is off
                return self._placed(rows, name, value, tokens)
        return None

    def _whole(self, rows: Rows, column: str, x: Floats, other: Floats) -> Found | None:
        """Find a column of one value where the other column varies."""
        if x.min() < x.max() or np.abs(x - other).max() <= 1e-3:
            return None  # where both are as good as certain of every token, the policies agree
        text = written(float(x[0]))
        words = {
            "column": column,
            "value": text,
            "sentence": "the {column} column holds nothing but the constant {value}, in place of log-probs",
            "confirm": "look at one sequence of the {column} column: its log-probs are all different",
            "fix": "write the log-prob of each sampled token, as the {side} computed it",
        }
        evidence = f"all {rows.tokens:,} tokens hold exactly {text} in the {column} column"
        return self.of_tokens(evidence, rows, np.ones(rows.tokens, bool), words=words, exact=True)

    def _placed(self, rows: Rows, column: str, value: float, tokens: Flags) -> Found:
        """Classify constants by position: single tokens, an edge, or blocks that were not sampled."""
        from offpol_diag.diagnosis.causes.boundary import Boundary

        first, length = rows.runs(tokens)
        many, hit = int(tokens.sum()), rows.sum(tokens) > 0
        density = many / max(int(rows.lengths[hit].sum()), 1)
        blocks = len(first) >= 2 and float(length.mean()) > max(1.6, 1.5 / max(1 - density, 0.05))
        last, begins = (np.mean(at[tokens] == 0) > 0.8 for at in (rows.from_end, rows.index))
        cause: Cause = self
        place = "blocks" if blocks else "single tokens"
        if blocks and column == "rollout":
            to_end = (rows.from_end[first + length - 1] == 0).mean() > 0.9
            cause, place = WRONG_MASK, AT_END if to_end else IN_BLOCKS
        elif last or begins:
            cause, place = Boundary(), f"the {'last' if last else 'first'} token of the response"
        evidence = (
            f"{many:,} tokens of {int(hit.sum()):,} sequences hold exactly {written(value)} in the {column} "
            f"column, in runs of {float(length.mean()):.2g} on average"
        )
        words = {"value": written(value), "column": column, "place": place}
        return cause.of_tokens(evidence, rows, tokens, words=words, exact=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, q=np.where(rng.random(rows.tokens) < 0.02, rng.choice([0.0, -9999.0]), rows.q))


class WrongMask(Cause):
    """The response mask counts tokens that were not sampled.

    Runs of tokens, after a turn or at the end of rows, where the engine has 0.0 or nothing and the trainer is
    far below. Rows with tools carry the mismatch, rows without agree.
    """

    id = "wrong_mask"
    sentence = "the response mask includes tokens that were not sampled: {place}"
    violates = "a token that the engine did not sample has no rollout log-prob"
    confirm = "print response_mask beside the text of the sequences named here"
    fix = (
        "set response_mask to 0 on tool output, observations and padding (in multi-turn rollouts: 1 only on "
        "tokens that the model generated)"
    )
    after = "with these tokens masked"
    ruled_out = "unsampled tokens inside the mask"
    apart = {
        "sentinel": (
            "A lost log-prob of a sampled token is the same constant, but at places that have no role in the"
            " dialogue."
        ),
        "wrong_context": "There whole responses differ, from their first token on.",
    }
    blanks = {"place": "tool output, observations or padding"}

    def look(self, rows: Rows) -> Found | None:
        """Find sequences of one length that end in runs of one constant in both columns.

        Where a policy repeats itself until the longest length, it becomes certain to the last bit by degrees,
        and each response repeats tokens of its own.
        """
        full = rows.lengths == rows.lengths.max()
        last = rows.starts[1:] - 1
        constant = (rows.q == rows.q[last][rows.owner]) & (rows.p == rows.p[last][rows.owner])
        other = np.where(constant, -1, rows.index)
        run = rows.lengths - 1 - np.maximum.reduceat(other, rows.starts[:-1])
        ends = full & (run > 1) & (run < rows.lengths)
        if full.mean() < 0.9 or ends.sum() < max(8, PADDED * rows.sequences):
            return None
        q, p, before = rows.q[last[ends]], rows.p[last[ends]], rows.q[last[ends] - run[ends]]
        one = all(x.min() == x.max() for x in (q, p)) and len(np.unique(run[ends])) > 3
        if not one or np.mean(before < -1e-4) < 0.3:
            return None
        ends = (rows.q[last] == q[0]) & (rows.p[last] == p[0])  # of one token, too
        tokens = constant & (rows.from_end < run[rows.owner]) & ends[rows.owner]
        if rows.ids is not None and len(np.unique(rows.ids[tokens])) > 1:
            return None
        evidence = (
            f"{int(tokens.sum()):,} tokens at the end of {int(ends.sum()):,} sequences hold {written(q[0])} "
            f"in the rollout column and {written(p[0])} in the train column, exactly"
        )
        words = {"value": written(q[0]), "column": "rollout", "place": AT_END}
        return self.of_tokens(evidence, rows, tokens, words=words, exact=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        block = (rows.index // 8 % 3 == 1) & (rng.random(rows.sequences) < 0.3)[rows.owner]
        p = np.where(block, -rng.exponential(4.0, rows.tokens) - 0.1, rows.p)
        return replace(rows, q=np.where(block, 0.0, rows.q), p=p)


class CopiedMean(Cause):
    """One number, a mean, stands at every token of a response.

    A column is constant within each response, at its own mean; K3 is as large as the spread of the other
    column.
    """

    id = "copied_mean"
    sentence = "the {column} column holds one value for each sequence, copied to all of its tokens"
    violates = "no two log-probs of a response are equal"
    confirm = (
        "print one sequence of the {column} column as the {side} returns it, before anything is averaged"
    )
    fix = (
        "write the log-prob of each sampled token: no mean over the sequence (a masked mean, or "
        "cumulative_logprob / length) before it"
    )
    apart = {
        "sentinel": "A sentinel is the same in all responses.",
    }
    blanks = {"column": "rollout or train", "side": "engine or trainer"}

    def in_column(self, rows: Rows, column: str, x: Floats, other: Floats) -> Found | None:
        """Find a column of one value in each sequence where the other column varies."""
        begins = rows.starts[:-1]
        varies = np.maximum.reduceat(other, begins) - np.minimum.reduceat(other, begins) > 1e-3
        same = np.maximum.reduceat(x, begins) == np.minimum.reduceat(x, begins)
        varied = varies & (rows.lengths >= 4)
        if varied.sum() < 8 or not same[varied].mean() > 0.95:
            return None
        off = float(np.median(np.abs(x[begins] - rows.mean(other))))
        evidence = (
            f"{int(same[varied].sum()):,} of {int(varied.sum()):,} sequences hold one value throughout in "
            f"the {column} column, {off:.2g} nats from the mean of the other column (median)"
        )
        words = {"column": column}
        return self.of_tokens(evidence, rows, np.ones(rows.tokens, bool), words=words, exact=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, q=rows.mean(rows.q)[rows.owner])


WRONG_MASK, COPIED_MEAN = WrongMask(), CopiedMean()
AT_END, IN_BLOCKS = "padding at the end", "blocks inside the response (tool output?)"


def _same_context(rows: Rows, tokens: Flags, value: float) -> bool:
    """Return whether a value may be one token repeated in one context: same position, same id."""
    if value == 0 or np.bincount(rows.index[tokens]).max() < 0.8 * tokens.sum():
        return False
    if rows.ids is not None:
        return len(np.unique(rows.ids[tokens])) == 1
    return bool(tokens.sum() < 0.9 * rows.sequences)


def constant(x: Floats, other: Floats) -> float | None:
    """Find a constant at several tokens whose other log-prob varies and is far off, or None."""
    if _zeros(x, other):
        return 0.0
    values, counts = np.unique(x[x < -1e-2], return_counts=True)
    often = np.argsort(-counts)[:12]
    alone: list[tuple[float, int, float]] = []  # value, count, median |Δ|: if the other column varies
    for at in often[counts[often] >= 2]:
        beside = other[x == values[at]]
        if len(np.unique(beside)) > 0.5 * counts[at] or _impossible(float(values[at])):
            alone.append((float(values[at]), int(counts[at]), float(np.median(np.abs(beside - values[at])))))
    size = np.abs(x - other)
    for rank, (value, many, off) in enumerate(alone):
        others = [count for one, count, _ in alone[rank + 1 :] if not _impossible(one)]
        if _impossible(value) or (many >= LEAST and many > OFTEN * max(others, default=1)):
            rest = size[x != value]  # the constant may be most of the column
            if off > max(BESIDE, 10 * float(np.median(rest)) if len(rest) else 0.0):
                return value
    return None


def _zeros(x: Floats, other: Floats) -> bool:
    """Return whether 0.0 is written at tokens that are not certain.

    Where a policy is certain to the last bit, another one may not be. Then it is no more certain of tokens
    whose log-prob is just below 0, so that exact zeros are not apart; and of those of which it is not
    certain, few are as improbable as tokens of any kind, 21 to 55% of which are below −1 in models of six
    architectures.
    """
    zero = (x == 0) & (other < -1e-3)
    far = zero & (other < -FAR)
    if zero.sum() < 3 or not far.any() or far.sum() <= 0.02 * zero.sum():
        return False
    near = x < 0
    for least in (-1e-2, -1e-3, -1e-4, -1e-5):
        closer = (x < 0) & (x > least)
        near = closer if closer.sum() >= 100 or least == -1e-2 else near
    rate = (float(np.sum(other[near] < -FAR)) + 1) / (float(near.sum()) + 30)
    if not far.sum() > CERTAIN * rate * np.sum(x == 0) or _truncated(x, other):
        return False
    theirs, usual = (some[some < UNSURE] for some in (other[x == 0], other[x < 0]))
    return not len(theirs) or len(usual) < 30 or bool(np.mean(theirs < -1) > 0.5 * np.mean(usual < -1))


def _truncated(x: Floats, other: Floats) -> bool:
    """Return whether zeros are of tokens that truncated sampling left alone.

    Then the other policy gives a lower log-prob to all tokens, and to these by no more than to the rest.
    """
    difference, zero = other - x, x == 0
    rest = difference[~zero]
    return len(rest) >= 100 and bool(
        np.mean(rest < 0) > 0.98 and np.quantile(difference[zero], 0.05) > np.quantile(rest, 0.01)
    )


def _impossible(value: float) -> bool:
    """Return whether a value is no log-prob of a sampled token, but a number such as −100 or −9999.

    Broken weights give a token −100.37 too.
    """
    return value < IMPOSSIBLE and (value < LOWEST or abs(value - round(value)) < 1e-3)


def _written(x: Floats, value: float) -> bool:
    """Return whether a value looks written: a bound of its column, a round number or −log of an integer.

    Any other value may repeat where a policy repeats itself word by word.
    """
    small = x[(x < -1e-2) & (x >= IMPOSSIBLE)]
    if _impossible(value) or value == 0 or value <= small.min() or value >= small.max():
        return True
    whole = np.exp(-value)
    return abs(value * 1000 - round(value * 1000)) < 1e-3 or abs(whole - round(whole)) < 1e-6 * whole


def written(value: float) -> str:
    """Return a constant in words."""
    return "0.0" if value == 0 else f"{value:.7g}"
