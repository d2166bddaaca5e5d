"""The tables of a plan: one line per row of tokens or result, and a column per meaning.

A row of tokens is one number per token, X[row]. A column of `Ints` that is named after a row
(`ratio`, `log_ratio`, `value`, …) holds numbers of rows; `only` follows them. Bounds are never
strict: x >= b is x > the number before b, and a bound that is absent is ±inf.
Log-ratios are in nats.
"""

from typing import Annotated, Any, NamedTuple

import numpy as np

Ints = Annotated[np.ndarray, np.int64]  # [N]
Floats = Annotated[np.ndarray, np.float64]  # [N]
Array = Any  # of numpy or torch

# ---------------------------------------------------------------- Rows that every plan has

(ONE, ADVANTAGE, POSITIVE, NEGATIVE, NOT_POSITIVE, ROLLOUT, OLD, CURRENT) = range(8)
FIXED_ROWS = 8
LOG_PROBS = {"rollout": ROLLOUT, "old": OLD, "current": CURRENT}

COUNTS = {  # sign condition of a rule → rows: where a violation above, and one below, counts
    "any": (ONE, ONE),
    "positive": (POSITIVE, POSITIVE),
    "negative": (NEGATIVE, NEGATIVE),
    "against": (POSITIVE, NEGATIVE),
    "against_or_zero": (POSITIVE, NOT_POSITIVE),
}

STATISTICS = {  # statistic of a rule → its formula; its place here is the kind in `Statistics`
    "ratio": "log_ratio_itself",
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
    "k3_reverse": "k3_reverse",
    "mult_prob_error": "ratio_either_way",
    "prob_diff": "probability_difference",
    "tv": "total_variation",
    "binary_kl": "binary_kl",
    "binary_kl_max": "binary_kl_larger",
}
KINDS = list(STATISTICS)

# ---------------------------------------------------------------- Rows, in the order of computing


class LogRatios(NamedTuple):
    """row = log-prob − log-prob: Δ or u, nats."""

    row: Ints
    log_prob: Ints
    log_prob_before: Ints


class BoundedLogRatios(NamedTuple):
    """row = log-ratio clipped to ±bound, nats."""

    row: Ints
    log_ratio: Ints
    bound: Floats


class Ratios(NamedTuple):
    """row = e^log-ratio."""

    row: Ints
    log_ratio: Ints


class RatiosMinusOne(NamedTuple):
    """row = e^log-ratio − 1."""

    row: Ints
    log_ratio: Ints


class Away(NamedTuple):
    """row = 1 where the update pushes r further from 1, else 0."""

    row: Ints
    log_ratio: Ints


class Statistics(NamedTuple):
    """row = a divergence of each token, its Δ clipped to [lowest, highest], its r − 1 to what those are."""

    row: Ints
    log_ratio: Ints
    ratio_minus_1: Ints
    kind: Ints
    lowest: Floats
    highest: Floats
    least_minus_1: Floats
    most_minus_1: Floats


class OfSequences(NamedTuple):
    """row = a number of the token's sequence, by its place among all such numbers."""

    row: Ints
    number: Ints


class OfTurns(NamedTuple):
    """row = a number of the token's turn, by its place among all such numbers."""

    row: Ints
    number: Ints


class CutOff(NamedTuple):
    """row = 1 where a value reaches the cut of its trainer batch (M2PO), else 0: a column of the block."""

    row: Ints
    column: Ints


class Outside(NamedTuple):
    """row = 1 where a value is outside its bounds, else 0."""

    row: Ints
    value: Ints
    lower: Floats
    upper: Floats


class TokenRows(NamedTuple):
    """How the rows of tokens are computed; a table reads rows of the tables before it only."""

    log_ratios: LogRatios
    bounded_log_ratios: BoundedLogRatios
    ratios: Ratios
    ratios_minus_one: RatiosMinusOne
    away: Away
    statistics: Statistics
    of_sequences: OfSequences
    of_turns: OfTurns
    cut_off: CutOff
    outside: Outside


# ---------------------------------------------------------------- Numbers of sequences and turns


class Totals(NamedTuple):
    """number = sum of a row over each sequence."""

    number: Ints
    summed: Ints


class Means(NamedTuple):
    """number = mean of a row over each sequence, or over each turn."""

    number: Ints
    summed: Ints


class Extremes(NamedTuple):
    """number = largest value of a row over each sequence (sign 1), or the smallest (sign −1)."""

    number: Ints
    summed: Ints
    sign: Ints


class MeanRatios(NamedTuple):
    """number = e^log-ratio of a sequence or turn: of a mean, the geometric mean of the ratios."""

    number: Ints
    mean: Ints  # a number


class Beyond(NamedTuple):
    """number = 1 where another number of a sequence with a token is outside its bounds, else 0."""

    number: Ints
    value: Ints  # a number
    lower: Floats
    upper: Floats


class SequenceNumbers(NamedTuple):
    """How the numbers of sequences are computed, in order."""

    totals: Totals
    means: Means
    extremes: Extremes
    mean_ratios: MeanRatios
    beyond: Beyond


class TurnNumbers(NamedTuple):
    """How the numbers of turns are computed, in order."""

    means: Means
    mean_ratios: MeanRatios


# ---------------------------------------------------------------- Weights, masks and losses


class Weights(NamedTuple):
    """Distinct importance weights; line i is W[i], and W[number of lines] is 1: no weight."""

    log_ratio: Ints
    ratio: Ints
    lower: Floats  # bounds of r
    upper: Floats
    zero_below: Floats  # bounds of log r, nats
    zero_above: Floats


class Rules(NamedTuple):
    """Rejection rules on tokens; mask K[i] is where none of its rules rejects, K[masks] is all."""

    mask: Ints
    value: Ints
    counts_above: Ints
    counts_below: Ints
    lower: Floats
    upper: Floats


class PpoLosses(NamedTuple):
    """PPO clip and GSPO; `loss` is the result's line in all tables of losses."""

    loss: Ints
    ratio: Ints
    low: Floats  # bounds of r
    high: Floats
    dual: Floats
    r_lowest: Floats  # its safety bounds
    r_highest: Floats


class ReinforceLosses(NamedTuple):
    """REINFORCE (log_prob is log π_θ), and the surrogate (log_prob is 1)."""

    loss: Ints
    log_prob: Ints


class CispoLosses(NamedTuple):
    """CISPO."""

    loss: Ints
    ratio: Ints
    low: Floats
    high: Floats
    r_lowest: Floats
    r_highest: Floats


class LossKls(NamedTuple):
    """k1 of the loss's own ratio, within ±bound."""

    log_ratio: Ints
    bound: Floats


class Losses(NamedTuple):
    """The losses by kind."""

    ppo: PpoLosses
    reinforce: ReinforceLosses
    cispo: CispoLosses
    kls: LossKls


# ---------------------------------------------------------------- Sums over kept tokens


class KeptSums(NamedTuple):
    """Tokens that are kept."""

    mask: Ints


class GapSums(NamedTuple):
    """Σ k3, Σ Δ, nats."""

    k3: Ints
    log_ratio: Ints
    mask: Ints


class WeightSums(NamedTuple):
    """Σ w, Σ w², Σ (w − 1), Σ (w − 1)², tokens with w ≠ 0; and the largest w and −w."""

    weight: Ints
    mask: Ints


class ClipSums(NamedTuple):
    """Tokens that the loss's clip, or its dual clip, acts on."""

    loss: Ints
    mask: Ints


class KlSums(NamedTuple):
    """Σ −u of the loss, nats."""

    kl: Ints
    mask: Ints


class LossSums(NamedTuple):
    """Σ w · loss."""

    loss: Ints
    weight: Ints
    mask: Ints


class SumTables(NamedTuple):
    """Distinct sums that presets want; the numbers of `WIDTHS` each."""

    kept: KeptSums
    gap: GapSums
    weight: WeightSums
    clip: ClipSums
    dual_clip: ClipSums
    kl: KlSums
    loss: LossSums


WIDTHS = {
    "kept": 1,
    "gap": 2,
    "weight": 5,
    "clip": 1,
    "dual_clip": 1,
    "kl": 1,
    "loss": 1,
}
"""Numbers of a line of each table of sums, in the order of `SumTables`."""


class Sums(NamedTuple):
    """What is computed of a block of S sequences.

    Attributes:
        over_tokens: sums over kept tokens, [lines, numbers, S] by kind.
        spans: largest w and −w of kept tokens, of each line of `WeightSums`: [lines, 2, S]; −inf without one.
        numbers: numbers of sequences, from `FIXED_ROWS` on.
        kept: sequences that are kept, a row a mask, bool.
        weights: weights of whole sequences.
    """

    over_tokens: Array
    spans: Array
    numbers: Array
    kept: Array
    weights: Array


def beside(parts, concatenate):
    """Join the sums of blocks of a batch, sequence by sequence."""

    def joined(each):
        return each[0] if len(each) == 1 else concatenate(each, -1)

    tables = SumTables._make(map(joined, zip(*(part.over_tokens for part in parts), strict=True)))
    return Sums(tables, *map(joined, zip(*(part[1:] for part in parts), strict=True)))


class Sizes(NamedTuple):
    """Number of rows of tokens, weights, masks, losses, loss KLs and sums."""

    rows: int
    weights: int
    masks: int
    losses: int
    kls: int
    sums: int


# ---------------------------------------------------------------- Making tables


def table(cls, lines):
    """Make a table of its lines: a column is int64 or float64, as the class says."""
    columns = list(zip(*lines, strict=True)) or [()] * len(cls._fields)
    kinds = [cls.__annotations__[name].__metadata__[0] for name in cls._fields]
    return cls(*(np.array(c, dtype=kind) for c, kind in zip(columns, kinds, strict=True)))


def parts(cls):
    """Return the names and classes of the tables that a group of tables has."""
    return list(cls.__annotations__.items())


def tables(cls, lines):
    """Make a group of tables of the lines of each."""
    return cls(*(table(c, list(own)) for (_, c), own in zip(parts(cls), lines, strict=True)))


def without_lines(one):
    """Return a table, or a group of tables, of the same kind that has no line."""
    return type(one)(*(x[:0] if isinstance(x, np.ndarray) else without_lines(x) for x in one))


ROWS = {
    *("log_prob", "log_prob_before", "log_ratio", "ratio", "ratio_minus_1", "value"),
    *("k3", "counts_above", "counts_below"),
}
"""Columns that hold numbers of rows of tokens."""


def inputs(of):
    """Return the rows that a table reads."""
    return {row for name in of._fields if name in ROWS for row in getattr(of, name).tolist()}


def summed(numbers):
    """Return the rows of tokens that numbers of sequences or turns are aggregated from."""
    return {row for table in numbers if "summed" in table._fields for row in table.summed.tolist()}


def only(every, wanted, without=()):
    """Return the lines of all tables that the wanted rows need."""
    wanted, kept = set(wanted), []
    for own in reversed(every):
        needed = [] if isinstance(own, without) else [row in wanted for row in own.row.tolist()]
        own = type(own)(*(column[np.flatnonzero(needed)] for column in own))
        wanted |= inputs(own)
        kept.append(own)
    return TokenRows(*reversed(kept))
