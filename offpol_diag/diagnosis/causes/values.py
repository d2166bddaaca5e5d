"""Numbers that are no log-prob of the sampled token: constants, means, rounded ones, the likeliest one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.estimates import percent
from offpol_diag.diagnosis.rows import Flags, Floats, Rows

IMPOSSIBLE, LOWEST = -90.0, -1000.0
"""Log-prob below which a round number is no token's that was sampled, nats, and below which none is."""
LEAST, OFTEN, BESIDE = 6, 2.5, 0.3
"""Fewest tokens of a constant, how much more frequent than any other value it is, and how far the other
column is off beside it (nats, median): log-probs also repeat honestly where contexts do."""
NEARLY, NEAR, UNSURE, APART = -1e-2, 200, -0.05, 0.7
"""Log-prob above which a token is nearly certain; number of values just below 0; log-prob below which a token
is not certain; and |Δ| from which two log-probs of one token are far apart, nats (a factor of 2)."""
CERTAIN, USUAL, MANY, ONE_SIDED = 3.0, 0.5, 100, 0.98
"""How much more often the other column is far off beside 0.0 than beside values just below it; its share
below −1 there, in that of tokens of any kind: 21 to 55% in models of six architectures; and fewest other
tokens, and share of these with Δ below 0, by which sampling is truncated."""
OFF, RUN, PADDED, ORDINARY = 1e-3, 1.6, 0.3, 0.3
"""|Δ| from which columns differ, nats; mean run of constants from which they are no single tokens; least
share of sequences that end in padding, and of those of which a policy did not grow certain by degrees."""


class Sentinel(Cause):
    """A constant stands where a log-prob is missing.

    One value recurs among the sampled tokens: 0.0, −9999, +1, a rounded −inf. The other column
    has ordinary values there: a third to a half of them are below −1. Few tokens carry nearly all of K3, and
    E[r] falls below 1 where the constant is 0.0.
    """

    id = "sentinel"
    sentence = "{share} of the {column} log-probs are the constant {value}, which stands for a missing value"
    evidence = (
        "{:,} tokens of {:,} sequences hold exactly {:.7g} in the {} column, in runs of {:.2g} on average"
    )
    confirm = (
        "look for these tokens in the {side}'s own output: the constant is put in place of a missing "
        "log-prob later"
    )
    fix = (
        "mask these tokens, and find where their log-probs get lost: aborted or streamed requests, an "
        "appended end token"
    )
    after = "with these tokens masked"
    apart = {"wrong_mask": "Its tokens were never sampled, and stand in blocks."}
    blanks = {"side": "engine or trainer"}

    def look(self, rows: Rows) -> Found | None:
        for name, x, other in rows.both:
            value = constant(x, other)
            if value is None:
                continue
            tokens = x == value
            begins = tokens & ~(np.roll(tokens, 1) & (rows.index > 0))
            run = (np.cumsum(begins) - 1)[tokens]
            off = np.bincount(run, rows.gap[tokens] > OFF) > 0
            tokens[tokens] = off[run]  # a run of the constant needs one token that is off
            many, sequences = int(tokens.sum()), rows.sum(tokens) > 0
            length = float(np.bincount(run)[off].mean())
            at_random = 1 / max(1 - many / rows.lengths[sequences].sum(), 0.05)  # their mean run
            in_blocks = off.sum() > 1 and length > max(RUN, 1.5 * at_random) and not tokens.all()
            evidence = self.evidence.format(many, sequences.sum(), value, name, length)
            share, side = percent(float(tokens.mean())), "engine" if name == "rollout" else "trainer"
            words = {"value": f"{value:.7g}", "column": name, "share": share, "side": side}
            cause = WrongMask() if in_blocks and name == "rollout" else self
            return Found(cause, evidence, rows, tokens, rows.keep(~tokens), exact=True, words=words)
        return None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, q=np.where(rng.random(rows.tokens) < 0.02, rng.choice([0.0, -9999.0]), rows.q))


def constant(x: Floats, other: Floats) -> float | None:
    """Find a constant at several tokens whose other log-prob varies and is far off, or None."""
    if _zeros(x, other):
        return 0.0
    values, counts = np.unique(x[x < NEARLY], return_counts=True)
    often = np.argsort(-counts)[:12]
    found = [
        (float(values[at]), int(counts[at]))
        for at in often[counts[often] > 1]
        if impossible(float(values[at])) or len(np.unique(other[x == values[at]])) > 0.5 * counts[at]
    ]
    for (value, many), (_, next_one) in pairwise([*found, (0.0, 1)]):
        same, gap = x == value, np.abs(x - other)
        usual = float(np.median(gap[~same])) if not same.all() else 0.0
        if not np.median(gap[same]) > max(BESIDE, 10 * usual):
            continue
        if impossible(value) or (many >= LEAST and many > OFTEN * next_one and _chosen(x, value)):
            return value
    return None


def _zeros(x: Floats, other: Floats) -> bool:
    """Return whether 0.0 is written at tokens that are not certain.

    Where a policy is certain to the last bit, another one is no more certain of tokens just below 0, and few
    of those that it doubts are as improbable as tokens of any kind. Where truncated sampling left one token
    alone, the other policy is below at all tokens, and at these by no more than at the rest.
    """
    zero, delta = x == 0, other - x
    far, below = zero & (delta < -APART), np.flatnonzero((x < 0) & (x > NEARLY))
    near = below[np.argsort(x[below])[-NEAR:]]
    rate = (np.sum(delta[near] < -APART) + 1) / (len(near) + 30)
    if far.sum() < 2 or far.sum() < CERTAIN * rate * zero.sum():
        return False
    rest = delta[~zero]
    if len(rest) >= MANY and np.mean(rest < 0) > ONE_SIDED:
        return bool(np.quantile(delta[zero], 0.05) <= np.quantile(rest, 0.01))
    doubted, usual = (other[at & (other < UNSURE)] < -1 for at in (zero, ~zero))
    return not len(usual) or bool(doubted.mean() > USUAL * usual.mean())


def impossible(value: float) -> bool:
    """Return whether a value is a number such as −100 or −9999; broken weights may give a token −100.37."""
    return value < LOWEST or (value < IMPOSSIBLE and abs(value - round(value)) < 1e-3)


def _chosen(x: Floats, value: float) -> bool:
    """Return whether somebody wrote a value: a bound of its column, a round number or −log of an integer.

    Any other value may repeat where a policy repeats itself word by word.
    """
    whole = np.exp(-value)
    round_ = abs(value * 1000 - round(value * 1000)) < 1e-3 or abs(whole - round(whole)) < 1e-6 * whole
    return round_ or value in (x[x < NEARLY].min(), x[x < NEARLY].max())


class WrongMask(Cause):
    """The response mask counts tokens that were not sampled.

    Runs of tokens, after a turn or at the end of rows, where the engine has 0.0 or nothing and the trainer is
    far below. Rows with tools carry the mismatch, rows without agree.
    """

    id = "wrong_mask"
    sentence = "the response mask includes tokens that were not sampled: tool output or padding"
    evidence = (
        "{:,} tokens at the end of {:,} sequences hold exactly {:.7g} in the rollout column and {:.7g} in "
        "the train column"
    )
    confirm = "print response_mask next to the text of the sequences named here"
    fix = "set response_mask to 0 on tool output, observations and padding"
    after = "with these tokens masked"
    apart = {"sentinel": "A missing log-prob is one constant, at single tokens."}

    def look(self, rows: Rows) -> Found | None:
        """Find sequences of one length that end in runs of one constant in both columns.

        A policy that repeats itself until the longest length becomes certain by degrees.
        """
        last, full = rows.starts[1:] - 1, rows.lengths == rows.lengths.max()
        pairs, many = np.unique(np.stack((rows.q, rows.p), 1)[last], axis=0, return_counts=True)
        q, p = pairs[many.argmax()]
        same = (rows.q == q) & (rows.p == p)
        run = rows.lengths - 1 - np.maximum.reduceat(np.where(same, -1, rows.index), rows.starts[:-1])
        ends = full & (run > 0) & (run < rows.lengths)
        if full.mean() < 0.9 or ends.mean() < PADDED or run[ends].mean() < RUN:
            return None
        if np.mean(rows.q[last[ends] - run[ends]] < -1e-4) < ORDINARY:
            return None
        tokens = same & (rows.from_end < run[rows.owner]) & ends[rows.owner]
        evidence = self.evidence.format(tokens.sum(), ends.sum(), q, p)
        return Found(self, evidence, rows, tokens, rows.keep(~tokens), exact=True)

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
    confirm = "print one sequence of the {column} column before anything is averaged"
    fix = "write the log-prob of each sampled token: no masked mean, no cumulative_logprob / length"
    apart = {"sentinel": "A sentinel is the same number in all responses."}
    blanks = {"column": "rollout or train"}

    def look(self, rows: Rows) -> Found | None:
        first = rows.starts[:-1]
        for name, *columns in rows.both:
            spread, other_spread = (
                np.maximum.reduceat(x, first) - np.minimum.reduceat(x, first) for x in columns
            )
            varied = (other_spread > OFF) & (rows.lengths >= 4)
            if varied.sum() >= 8 and (spread[varied] == 0).mean() > 0.95:
                many = int((spread == 0).sum())
                evidence = f"all tokens of {many:,} sequences hold one value in the {name} column"
                nothing = rows.keep(~rows.every)
                return Found(self, evidence, rows, rows.every, nothing, exact=True, words={"column": name})
        return None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, q=rows.mean(rows.q)[rows.owner])


GRIDS: dict[str, Callable[[Floats], Flags]] = {
    "bfloat16": lambda x: (x.astype(np.float32).view(np.uint32) & 0xFFFF) == 0,
    "float16": lambda x: x.astype(np.float16) == x.astype(np.float32),
    "1-decimal": lambda x: np.abs(x * 1e1 - np.rint(x * 1e1)) < 0.01,
    "2-decimal": lambda x: np.abs(x * 1e2 - np.rint(x * 1e2)) < 0.01,
    "3-decimal": lambda x: np.abs(x * 1e3 - np.rint(x * 1e3)) < 0.01,
    "4-decimal": lambda x: np.abs(x * 1e4 - np.rint(x * 1e4)) < 0.01,
}
"""Number format → what flags its numbers."""
ON_GRID, VALUES, DIFFERENT = 0.98, 50, 20
"""Least share of values on a grid (by chance up to 2%; some are written by another path), fewest values, and
fewest different ones."""


class LowPrecision(Cause):
    """Log-probs were rounded before they were written.

    All values lie on a grid: bf16 steps of 0.0078 near −1 and 0.0625 near −10, fp16, or three decimals of
    JSON. K3 near 10⁻⁵ to 10⁻³ that no kernel explains, equal for all tokens of a size.
    """

    id = "low_precision_storage"
    sentence = "the {column} log-probs were rounded to {grid} before they were written"
    confirm = "check the dtype of the tensor where it is gathered, cast or serialised"
    fix = "compute log-softmax in float32 and keep it in float32: no .to(torch.bfloat16), no rounding in JSON"
    apart = {"numerics": "Kernels leave noise around any value, not a grid."}

    def look(self, rows: Rows) -> Found | None:
        for name, x, _ in rows.both:
            some = x[(x < -1e-4) & (x > -60)]
            if len(some) < VALUES or len(np.unique(some)) < DIFFERENT:
                continue
            for grid, on in GRIDS.items():
                if (share := float(np.mean(on(some)))) > ON_GRID:
                    evidence = f"{percent(share)} of the {name} log-probs are {grid} numbers"
                    q, p = (np.where(y == 0, -1e-6, y) for y in (rows.q, rows.p))  # what was rounded to 0
                    repaired, words = replace(rows, q=q, p=p), {"column": name, "grid": grid}
                    return Found(self, evidence, rows, rows.every, repaired, exact=True, words=words)
        return None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        bits = rows.q.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
        return replace(rows, q=(bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64))


FAR, AGREES, BELOW, SELDOM = 0.7, 0.1, 0.3, 0.01
"""|Δ| of a token that was not the likeliest, of one that was, how far the column may lie below, nats, and at
which share of the tokens."""
FEWEST, SOME, SPREAD = 30, 0.05, 0.5
"""Fewest tokens that were not the likeliest, and least share of either kind; and least share of different
values among these, which a constant lacks."""
SUMS, MASS = 0.985, 1.02
"""Share of these whose two probabilities are of two tokens of one distribution, and most of their sum."""


class Top1Logged(Cause):
    """The log-prob of the best token was logged, not that of the sampled one.

    The rollout column is never below the trainer's by more than 0.3, and π_train + π_rollout stays below 1.02
    for tokens that are far off. At temperature 0 all is well.
    """

    id = "top1_logged"
    sentence = "the {column} column holds the log-prob of the likeliest token, not of the sampled one"
    evidence = (
        "the {} column is below the other by more than {:g} nats at {} of the tokens, above it by more than "
        "{:g} at {}"
    )
    confirm = "print the dict of log-probs of one token: the sampled id's entry is not always the first"
    fix = "take the entry of the sampled id, not the first (vLLM: logprobs[token_id].logprob)"
    after = "without the tokens that were not the likeliest"
    apart = {"rollout_raw_logprobs": "Most tokens are off by a little."}

    def look(self, rows: Rows) -> Found | None:
        for name, x, other in rows.both:
            above = x - other
            far, below = above > FAR, float(np.mean(above < -BELOW))
            many = far.sum() >= max(FEWEST, SOME * len(far)) and np.mean(np.abs(above) < AGREES) >= SOME
            if not many or below > SELDOM:
                continue
            sums = np.mean(np.exp(np.minimum(x[far], 0)) + np.exp(np.minimum(other[far], 0)) <= MASS)
            if sums < SUMS or len(np.unique(x[far])) < SPREAD * far.sum():
                continue
            evidence = self.evidence.format(name, BELOW, percent(below), FAR, percent(float(far.mean())))
            # what was sampled is likely where the column is right: nothing else is to be seen
            return Found(self, evidence, rows, far, rows.keep(~rows.every), words={"column": name})
        return None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Log for tokens that are less likely than the rest together most of the rest's probability."""
        rest = np.log(np.maximum(-np.expm1(rows.q), 1e-12))
        best = rest + np.log(rng.uniform(0.6, 0.9, rows.tokens))
        return replace(rows, q=np.where(best > rows.q, np.minimum(best, -1e-4), rows.q))
