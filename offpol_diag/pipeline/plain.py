"""Rows and sums of a block by broadcasting: bounds are columns [N, 1], tokens the last axis.

This is the definition, the way on a GPU, and what the compiled pass is tested against.
`namespaces.on_torch` gives the same functions on tensors.
"""

import math

import numpy as np

from offpol_diag.pipeline import formulas, segments
from offpol_diag.pipeline.tables import (
    FIXED_ROWS,
    NEGATIVE,
    NOT_POSITIVE,
    ONE,
    POSITIVE,
    STATISTICS,
    Sums,
    SumTables,
)


def column(numbers):
    """Give a table's numbers [N] the shape [N, 1]."""
    return np.asarray(numbers)[:, None]


# ---------------------------------------------------------------- Rows of tokens


def fixed_rows(columns):
    """The rows that every plan has, in their order: [8, T]."""
    advantage = columns.advantages
    return np.stack(
        [
            np.ones_like(advantage),
            advantage,
            formulas.positive(advantage),
            formulas.negative(advantage),
            formulas.not_positive(advantage),
            columns.rollout,
            columns.old,
            columns.current,
        ]
    )


def token_rows(tables, columns, many, sequence_numbers, turn_numbers, offsets, turn_offsets):
    """Compute the rows that `TokenRows` asks for, X [many, T]; other rows stay 0."""
    fixed = fixed_rows(columns)
    X = np.zeros((many, fixed.shape[-1]))
    X[: len(fixed)] = fixed
    advantage, rollout = columns.advantages, columns.rollout

    t = tables.log_ratios
    X[t.row] = formulas.log_ratio_of(X[t.log_prob], X[t.log_prob_before])
    t = tables.bounded_log_ratios
    X[t.row] = formulas.clip(X[t.log_ratio], -column(t.bound), column(t.bound))
    t = tables.ratios
    X[t.row] = formulas.importance_ratio(X[t.log_ratio])
    t = tables.ratios_minus_one
    X[t.row] = formulas.ratio_minus_one(X[t.log_ratio])
    t = tables.away
    X[t.row] = formulas.moves_away(advantage, X[t.log_ratio])

    t = tables.statistics
    for kind, name in enumerate(STATISTICS.values()):
        own = np.flatnonzero(t.kind == kind)
        if not len(own):
            continue
        log_ratio = formulas.clip(X[t.log_ratio[own]], column(t.lowest[own]), column(t.highest[own]))
        least, most = column(t.least_minus_1[own]), column(t.most_minus_1[own])
        ratio_minus_1 = formulas.clip(X[t.ratio_minus_1[own]], least, most)
        X[t.row[own]] = getattr(formulas, name)(log_ratio, ratio_minus_1, rollout)

    t = tables.of_sequences
    X[t.row] = segments.spread(sequence_numbers[t.number], offsets, X.shape[-1])
    t = tables.of_turns
    X[t.row] = segments.spread(turn_numbers[t.number], turn_offsets, X.shape[-1])
    t = tables.cut_off
    X[t.row] = columns.cut_off[t.column]
    t = tables.outside
    X[t.row] = np.where(formulas.outside(X[t.value], column(t.lower), column(t.upper)), 1.0, 0.0)
    return X


# ---------------------------------------------------------------- Numbers of sequences and turns


def sequence_numbers(tables, totals, extremes, offsets, first=0):
    """Compute numbers per sequence, [first + numbers, S]; the first ones stay 0.

    Args:
        tables: what to compute.
        totals: sums of rows of tokens over each sequence, {row: [S]}.
        extremes: the largest value of a row and of its negative, {row: [2, S]}; −inf without a token.
        offsets: where sequences begin, and the end.
        first: numbers before these.
    """
    lengths = segments.lengths(offsets)
    filled, count = lengths > 0, np.maximum(lengths, 1)
    numbers = np.zeros((first + sum(len(t.number) for t in tables), len(lengths)))
    for number, row in zip(*tables.totals, strict=True):
        numbers[number] = totals[row]
    for number, row in zip(*tables.means, strict=True):
        numbers[number] = totals[row] / count
    for number, row, sign in zip(*tables.extremes, strict=True):
        numbers[number] = np.where(filled, extremes[row][0] if sign > 0 else -extremes[row][1], 0.0)
    for number, mean in zip(*tables.mean_ratios, strict=True):
        numbers[number] = formulas.importance_ratio(numbers[mean])
    for number, value, lower, upper in zip(*tables.beyond, strict=True):
        beyond = formulas.outside(numbers[value], lower, upper) & filled
        numbers[number] = np.where(beyond, 1.0, 0.0)
    return numbers


def turn_numbers(tables, totals, offsets):
    """Compute numbers per turn, [numbers, turns], from sums over each turn, {row: [turns]}."""
    count = np.maximum(segments.lengths(offsets), 1)
    numbers = np.zeros((sum(len(t.number) for t in tables), len(offsets) - 1))
    for number, row in zip(*tables.means, strict=True):
        numbers[number] = totals[row] / count
    for number, mean in zip(*tables.mean_ratios, strict=True):
        numbers[number] = formulas.importance_ratio(numbers[mean])
    return numbers


def totals_of(X, tables, offsets):
    """Sum the rows that numbers are made of over each sequence or turn: {row: [S]}."""
    rows = {row for name in ("totals", "means") for row in summed_by(tables, name)}
    return {row: segments.segment_sum(X[row], offsets) for row in rows}


def extremes_of(X, tables, offsets):
    """Return the largest value of rows, and of their negatives, in each sequence: {row: [2, S]}."""
    rows = set(tables.extremes.summed.tolist())
    return {row: segments.segment_max(np.stack((X[row], -X[row])), offsets) for row in rows}


def summed_by(tables, name):
    """Return the rows that a table of numbers sums; none where there is no such table."""
    return getattr(tables, name).summed.tolist() if name in tables._fields else []


# ---------------------------------------------------------------- Decisions about whole sequences


def decided(plan, totals, extremes, advantage, offsets):
    """Return numbers of sequences, which sequences each mask keeps, and weights of sequences.

    Args:
        plan: the plan.
        totals: sums over sequences of the rows that are needed, {row: [S]}.
        extremes: as `sequence_numbers` reads them.
        advantage: ΣA of each sequence, [S].
        offsets: where sequences begin, and the end.
    """
    own = plan.decisions
    numbers = sequence_numbers(own.numbers, totals, extremes, offsets, FIXED_ROWS)
    mean = advantage / np.maximum(segments.lengths(offsets), 1)
    numbers[ONE] = np.ones_like(mean)
    numbers[POSITIVE], numbers[NEGATIVE] = formulas.positive(mean), formulas.negative(mean)
    numbers[NOT_POSITIVE] = formulas.not_positive(mean)
    return numbers, mask_rows(own.rules, own.masks, numbers), weight_rows(own.weights, numbers)


def rows_of_block(plan, block):
    """Compute all rows of a block, X [rows, T]: first those that sums over sequences need."""
    columns, offsets, turn_offsets = block
    none = np.zeros((0, len(offsets) - 1)), np.zeros((0, len(turn_offsets) - 1))
    first = token_rows(plan.first, columns, plan.sizes.rows, *none, offsets, turn_offsets)
    totals, extremes = totals_of(first, plan.sequences, offsets), extremes_of(first, plan.sequences, offsets)
    numbers = (
        sequence_numbers(plan.sequences, totals, extremes, offsets),
        turn_numbers(plan.turns, totals_of(first, plan.turns, turn_offsets), turn_offsets),
    )
    return token_rows(plan.rows, columns, plan.sizes.rows, *numbers, offsets, turn_offsets)


# ---------------------------------------------------------------- Weights, masks, losses


def weight_rows(t, X):
    """Importance weights W [weights + 1, T]; the last is 1."""
    bounds = column(t.lower), column(t.upper), column(t.zero_below), column(t.zero_above)
    weights = formulas.importance_weight(X[t.ratio], X[t.log_ratio], *bounds)
    return np.concatenate((weights, np.ones_like(X[:1])))


def mask_rows(t, masks, X):
    """Tokens that are kept, K [masks + 1, T] bool; the last has all."""
    kept = np.zeros((masks + 1, X.shape[-1])) == 0.0
    bounds = column(t.lower), column(t.upper)
    failed = formulas.rejected(X[t.value], *bounds, X[t.counts_above], X[t.counts_below])
    for rule, mask in enumerate(t.mask.tolist()):
        kept[mask] &= ~failed[rule]
    return kept


def loss_rows(tables, many, X, advantage, log_prob):
    """Losses [losses, T], and where their clip and their dual clip act (bool)."""
    loss = np.zeros((many, X.shape[-1]))
    clipped, dual_clipped = loss != 0.0, loss != 0.0

    t = tables.ppo
    bounds = map(column, (t.low, t.high, t.dual, t.r_lowest, t.r_highest))
    made = formulas.ppo_clip(advantage, X[t.ratio], *bounds)
    loss[t.loss], clipped[t.loss], dual_clipped[t.loss] = made
    t = tables.reinforce
    loss[t.loss] = formulas.reinforce(advantage, X[t.log_prob])
    t = tables.cispo
    bounds = map(column, (t.low, t.high, t.r_lowest, t.r_highest))
    loss[t.loss], clipped[t.loss] = formulas.cispo(advantage, log_prob, X[t.ratio], *bounds)
    return loss, clipped, dual_clipped


# ---------------------------------------------------------------- Sums


def sums(plan, block):
    """Compute every distinct sum of a block's sequences, and what is decided about them: `Sums`."""
    columns, offsets = block.columns, block.offsets
    X = rows_of_block(plan, block)
    advantage = columns.advantages
    weights = weight_rows(plan.weights, X)
    kept = mask_rows(plan.rules, plan.sizes.masks, X)
    loss, clipped, dual = loss_rows(plan.losses, plan.sizes.losses, X, advantage, columns.current)
    kls = formulas.loss_kl(X[plan.losses.kls.log_ratio], column(plan.losses.kls.bound))

    def total(counted, *terms):
        """Sum terms [N, T] or [T] over the tokens that are counted, [N, T] bool: [N, terms, S]."""
        each = [segments.segment_sum(np.where(counted, x, 0.0), offsets) for x in terms]
        return np.stack(each, 1)

    def spans(counted, x):
        """Return the largest value of x [N, T] and of −x over the tokens that are counted: [N, 2, S]."""
        ends = [segments.segment_max(np.where(counted, each, -math.inf), offsets) for each in (x, -x)]
        return np.stack(ends, 1)

    def of_weights(t):
        w = weights[t.weight]
        deviation = formulas.deviation(w)
        return total(kept[t.mask], w, w * w, deviation, deviation * deviation, np.where(w != 0.0, 1.0, 0.0))

    def of_losses(t):
        w = weights[t.weight]
        return total(kept[t.mask], w * loss[t.loss])

    def of_flags(flags, t):
        return total(kept[t.mask], np.where(flags[t.loss], 1.0, 0.0))

    t = plan.sums
    over_tokens = SumTables(
        kept=total(kept[t.kept.mask], X[ONE]),
        gap=total(kept[t.gap.mask], X[t.gap.k3], X[t.gap.log_ratio]),
        weight=of_weights(t.weight),
        clip=of_flags(clipped, t.clip),
        dual_clip=of_flags(dual, t.dual_clip),
        kl=total(kept[t.kl.mask], kls[t.kl.kl]),
        loss=of_losses(t.loss),
    )
    numbers = plan.decisions.numbers
    totals, extremes = totals_of(X, numbers, offsets), extremes_of(X, numbers, offsets)
    total_advantage = segments.segment_sum(advantage, offsets)
    return Sums(
        over_tokens,
        spans(kept[t.weight.mask], weights[t.weight.weight]),
        *decided(plan, totals, extremes, total_advantage, offsets),
    )
