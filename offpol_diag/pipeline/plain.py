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
    t = tables.smoothed_log_ratios
    X[t.row] = columns.smoothed[t.column]
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

    t = tables.gmpo_log_ratios
    bounds = column(t.low), column(t.high)
    X[t.row] = formulas.gmpo_log_ratio(advantage, X[t.log_ratio], *bounds)
    t = tables.fipo_log_ratios
    bounds = column(t.dual), column(t.r_lowest), column(t.r_highest)
    X[t.row] = formulas.fipo_log_ratio(X[t.log_ratio], X[t.ratio], *bounds)

    t = tables.later
    X[t.row] = columns.later[t.column]
    t = tables.of_sequences
    X[t.row] = segments.spread(sequence_numbers[t.number], offsets, X.shape[-1])
    t = tables.of_turns
    X[t.row] = segments.spread(turn_numbers[t.number], turn_offsets, X.shape[-1])
    t = tables.vespo_log_weights
    bounds = column(t.lower), column(t.upper), column(t.zero_below), column(t.zero_above)
    X[t.row] = formulas.vespo_log_weight(X[t.ratio], X[t.log_ratio], *bounds)
    t = tables.cut_off
    X[t.row] = columns.cut_off[t.column]
    t = tables.outside
    X[t.row] = np.where(formulas.outside(X[t.value], column(t.lower), column(t.upper)), 1.0, 0.0)
    t = tables.fipo_influences
    bounds = column(t.least), column(t.most), column(t.threshold)
    safety = column(t.r_lowest), column(t.r_highest)
    X[t.row] = formulas.fipo_influence(advantage, X[t.ratio], X[t.later], *bounds, *safety)
    return X


# ---------------------------------------------------------------- Numbers of sequences and turns


def sequence_numbers(tables, totals, extremes, block, left, first=0):
    """Compute numbers per sequence, [first + numbers, S]; the first ones stay 0.

    Args:
        tables: what to compute.
        totals: sums of rows of tokens over each sequence, {row: [S]}.
        extremes: the largest value of a row and of its negative, {row: [2, S]}; −inf without a token.
        block: the block.
        left: numbers over the tokens that other rules leave, [S] each.
        first: numbers before these.
    """
    lengths = segments.lengths(block.offsets)
    filled, count = lengths > 0, np.maximum(lengths, 1)
    numbers = np.zeros((first + sum(len(t.number) for t in tables), len(lengths)))
    for number, row in zip(*tables.totals, strict=True):
        numbers[number] = totals[row]
    for number, row in zip(*tables.means, strict=True):
        numbers[number] = totals[row] / count
    for number, row, sign in zip(*tables.extremes, strict=True):
        numbers[number] = np.where(filled, extremes[row][0] if sign > 0 else -extremes[row][1], 0.0)
    for number, which in zip(*tables.given, strict=True):
        numbers[number] = block.given[which]
    for number, which in zip(*tables.left, strict=True):
        numbers[number] = left[which]
    for number, mean in zip(*tables.mean_ratios, strict=True):
        numbers[number] = formulas.importance_ratio(numbers[mean])
    for number, advantage, held in zip(*tables.gmpo, strict=True):
        numbers[number] = formulas.gmpo_of_sequence(numbers[advantage], numbers[held])
    for number, log_ratio, log_weight, k, rate in zip(*tables.vespo, strict=True):
        log_w = numbers[log_ratio] + (numbers[log_weight] if log_weight >= 0 else 0.0)
        numbers[number] = formulas.vespo_factor(log_w, k, rate)
    for (number,) in zip(*tables.good, strict=True):
        numbers[number] = block.good
    for number, value, lower, upper in zip(*tables.beyond, strict=True):
        beyond = formulas.outside(numbers[value], lower, upper) & filled
        numbers[number] = np.where(beyond, 1.0, 0.0)
    return numbers


def turn_numbers(tables, totals, offsets, left):
    """Compute numbers per turn, [numbers, turns], from sums over each turn, {row: [turns]}."""
    count = np.maximum(segments.lengths(offsets), 1)
    numbers = np.zeros((sum(len(t.number) for t in tables), len(offsets) - 1))
    for number, row in zip(*tables.means, strict=True):
        numbers[number] = totals[row] / count
    for number, which in zip(*tables.left, strict=True):
        numbers[number] = left[which]
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


def left_numbers(plan, done, block):
    """Return the numbers over the tokens that other rules leave, [S] or [turns] each; 0 where none is left.

    Args:
        plan: the plan that needs them.
        done: the sums of `plan.before`.
        block: the block.
    """
    result = []
    for preset, over, row, count in plan.left:
        lines, decided = plan.before.of_preset, plan.before.decisions.of_preset
        if over == "weight":
            result.append(formulas.bounded_log(done.weights[decided.weight[preset]]))
        elif over == "weights":
            result.append(done.over_tokens.row[row, 0])
        else:
            kept, many = done.kept[decided.kept[preset]], done.over_tokens.kept[lines.kept[preset], 0]
            x = done.over_tokens.row[row, 0] if over in ("sum", "mean") else None
            if over == "segment":
                kept = kept[segments.segment_of(block.offsets, block.turn_offsets)]
                x, many = (done.over_tokens.turn_row[line, 0] for line in (row, count))
            if over in ("max", "min"):
                x = done.row_spans[row, 0] if over == "max" else -done.row_spans[row, 1]
            if over in ("mean", "segment"):
                x = x / np.maximum(many, 1)
            result.append(np.where(kept & (many > 0), x, 0.0))
    return result


# ---------------------------------------------------------------- Decisions about whole sequences


def decided(plan, totals, extremes, advantage, block, left):
    """Return numbers of sequences, which sequences each mask keeps, and weights of sequences.

    Args:
        plan: the plan.
        totals: sums over sequences of the rows that are needed, {row: [S]}.
        extremes: as `sequence_numbers` reads them.
        advantage: ΣA of each sequence, [S].
        block: the block.
        left: `left_numbers`.
    """
    own = plan.decisions
    numbers = sequence_numbers(own.numbers, totals, extremes, block, left, FIXED_ROWS)
    mean = advantage / np.maximum(segments.lengths(block.offsets), 1)
    numbers[ONE] = np.ones_like(mean)
    numbers[POSITIVE], numbers[NEGATIVE] = formulas.positive(mean), formulas.negative(mean)
    numbers[NOT_POSITIVE] = formulas.not_positive(mean)
    return numbers, mask_rows(own.rules, own.masks, numbers), weight_rows(own.weights, numbers)


def rows_of_block(plan, block, left):
    """Compute all rows of a block, X [rows, T]: first those that sums over sequences need."""
    columns, many, offsets, turn_offsets = (
        block.columns,
        plan.sizes.rows,
        block.offsets,
        block.turn_offsets,
    )
    none = np.zeros((0, len(offsets) - 1)), np.zeros((0, len(turn_offsets) - 1))
    first = token_rows(plan.first, columns, many, *none, offsets, turn_offsets)
    later = np.zeros((len(plan.rows.later.row), len(columns.advantages)))
    for _, row, at, half_life in zip(*plan.rows.later, strict=True):
        later[at] = segments.later_sum(first[row], block.position, offsets, half_life)
    totals, extremes = totals_of(first, plan.sequences, offsets), extremes_of(first, plan.sequences, offsets)
    numbers = (
        sequence_numbers(plan.sequences, totals, extremes, block, left),
        turn_numbers(plan.turns, totals_of(first, plan.turns, turn_offsets), turn_offsets, left),
    )
    return token_rows(plan.rows, columns._replace(later=later), many, *numbers, offsets, turn_offsets)


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
    """Losses [losses, T], their slopes, and where their clip and their dual clip act (bool)."""
    loss, slope = np.zeros((many, X.shape[-1])), np.zeros((many, X.shape[-1]))
    clipped, dual_clipped = loss != 0.0, loss != 0.0

    t = tables.ppo
    bounds = map(column, (t.low, t.high, t.dual, t.lowest, t.highest, t.r_lowest, t.r_highest))
    made = formulas.ppo_clip(advantage, X[t.log_ratio], X[t.ratio], X[t.influence], *bounds)
    loss[t.loss], slope[t.loss], clipped[t.loss], dual_clipped[t.loss] = made
    t = tables.reinforce
    loss[t.loss], slope[t.loss] = formulas.reinforce(advantage, X[t.log_prob], 1.0)
    t = tables.cispo
    bounds = map(column, (t.low, t.high, t.r_lowest, t.r_highest))
    made = formulas.cispo(advantage, log_prob, X[t.ratio], *bounds)
    loss[t.loss], slope[t.loss], clipped[t.loss] = made
    t = tables.topr
    bounds = map(column, (t.low, t.high, t.r_lowest, t.r_highest))
    made = formulas.topr(advantage, log_prob, X[t.ratio], X[t.good], *bounds)
    loss[t.loss], slope[t.loss], clipped[t.loss] = made
    t = tables.sapo
    shape = column(t.tau_positive), column(t.tau_negative)
    bounds = map(column, (t.lowest, t.highest, t.r_lowest, t.r_highest))
    made = formulas.sapo(advantage, X[t.log_ratio], X[t.ratio], *shape, *bounds)
    loss[t.loss], slope[t.loss] = made
    t = tables.dro
    made = formulas.dro(advantage, log_prob, X[t.log_ratio], column(t.penalty))
    loss[t.loss], slope[t.loss] = made
    t = tables.gmpo
    bounds = column(t.low), column(t.high)
    made = formulas.gmpo(advantage, X[t.log_ratio], X[t.shared], *bounds)
    loss[t.loss], slope[t.loss], clipped[t.loss] = made
    t = tables.vespo
    made = formulas.vespo(advantage, log_prob, X[t.factor_positive], X[t.factor_negative])
    loss[t.loss], slope[t.loss] = made
    return loss, slope, clipped, dual_clipped


# ---------------------------------------------------------------- Sums


def sums(plan, block):
    """Compute every distinct sum of a block's sequences, and what is decided about them: `Sums`."""
    columns, offsets = block.columns, block.offsets
    left = left_numbers(plan, sums(plan.before, block), block) if plan.left else []
    X = rows_of_block(plan, block, left)
    advantage = columns.advantages
    weights = weight_rows(plan.weights, X)
    kept = mask_rows(plan.rules, plan.sizes.masks, X)
    loss, _, clipped, dual = loss_rows(plan.losses, plan.sizes.losses, X, advantage, columns.current)
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
        row=total(kept[t.row.mask], X[t.row.row]),
        turn_row=segments.segment_sum(
            np.where(kept[t.turn_row.mask], X[t.turn_row.row], 0.0), block.turn_offsets
        )[:, None],
    )
    numbers = plan.decisions.numbers
    totals, extremes = totals_of(X, numbers, offsets), extremes_of(X, numbers, offsets)
    total_advantage = segments.segment_sum(advantage, offsets)
    return Sums(
        over_tokens,
        spans(kept[t.weight.mask], weights[t.weight.weight]),
        spans(kept[t.row.mask], X[t.row.row]),
        *decided(plan, totals, extremes, total_advantage, block, left),
    )
