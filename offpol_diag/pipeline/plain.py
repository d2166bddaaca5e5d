"""Rows and sums of a block by broadcasting: bounds are columns [N, 1], tokens the last axis.

This is the definition, the way on a GPU, and what the compiled pass is tested against.
`namespaces.on_torch` gives the same functions on tensors.
"""

import numpy as np

from offpol_diag.pipeline import formulas, segments
from offpol_diag.pipeline.tables import NEGATIVE, ONE, POSITIVE, STATISTICS, SumTables


def column(numbers):
    """Give a table's numbers [N] the shape [N, 1]."""
    return np.asarray(numbers)[:, None]


# ---------------------------------------------------------------- Rows of tokens


def fixed_rows(columns):
    """The rows that every plan has, in their order: [10, T]."""
    advantage = columns.advantages
    return np.stack(
        [
            np.ones_like(advantage),
            advantage,
            np.maximum(advantage, 0.0),
            np.maximum(-advantage, 0.0),
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
        bound = column(t.bound[own])
        log_ratio = formulas.clip(X[t.log_ratio[own]], -bound, bound)
        least, most = column(t.least_minus_1[own]), column(t.most_minus_1[own])
        ratio_minus_1 = formulas.clip(X[t.ratio_minus_1[own]], least, most)
        X[t.row[own]] = getattr(formulas, name)(log_ratio, ratio_minus_1, rollout)

    t = tables.gmpo_log_ratios
    bounds = column(t.low), column(t.high)
    X[t.row] = formulas.gmpo_log_ratio(advantage, X[t.log_ratio], *bounds)
    t = tables.vespo_log_weights
    bounds = column(t.lower), column(t.upper), column(t.zero_below), column(t.zero_above)
    X[t.row] = formulas.vespo_log_weight(X[t.ratio], X[t.log_ratio], *bounds)
    t = tables.fipo_log_ratios
    bounds = column(t.dual), column(t.r_lowest), column(t.r_highest)
    X[t.row] = formulas.fipo_log_ratio(X[t.log_ratio], X[t.ratio], *bounds)

    t = tables.later
    X[t.row] = columns.later[t.column]
    t = tables.of_sequences
    X[t.row] = segments.spread(sequence_numbers[t.number], offsets)
    t = tables.of_turns
    X[t.row] = segments.spread(turn_numbers[t.number], turn_offsets)
    t = tables.at_least_cut
    X[t.row] = formulas.at_least(X[t.value], X[t.cut])
    t = tables.fipo_influences
    bounds = column(t.least), column(t.most), column(t.threshold)
    safety = column(t.r_lowest), column(t.r_highest)
    X[t.row] = formulas.fipo_influence(advantage, X[t.ratio], X[t.later], *bounds, *safety)
    return X


# ---------------------------------------------------------------- Numbers of sequences and turns


def sequence_numbers(tables, totals, offsets, cuts, good):
    """Numbers per sequence, [numbers, S], from sums over each sequence, {row: [S]}."""
    count = np.maximum(segments.lengths(offsets), 1)
    numbers = np.zeros((sum(len(t.number) for t in tables), len(offsets) - 1))
    for number, row in zip(*tables.totals, strict=True):
        numbers[number] = totals[row]
    for number, row in zip(*tables.means, strict=True):
        numbers[number] = totals[row] / count
    for number, mean in zip(*tables.mean_ratios, strict=True):
        numbers[number] = formulas.importance_ratio(numbers[mean])
    for number, advantage, held in zip(*tables.gmpo, strict=True):
        numbers[number] = formulas.gmpo_of_sequence(numbers[advantage], numbers[held])
    for number, log_ratio, log_weight, k, rate in zip(*tables.vespo, strict=True):
        log_w = numbers[log_ratio] + (numbers[log_weight] if log_weight >= 0 else 0.0)
        numbers[number] = formulas.vespo_factor(log_w, k, rate)
    for number, which in zip(*tables.cuts, strict=True):
        numbers[number] = cuts[which]
    for (number,) in zip(*tables.good, strict=True):
        numbers[number] = good
    return numbers


def turn_numbers(tables, totals, offsets):
    """Numbers per turn, [numbers, turns], from sums over each turn, {row: [turns]}."""
    count = np.maximum(segments.lengths(offsets), 1)
    numbers = np.zeros((sum(len(t.number) for t in tables), len(offsets) - 1))
    for number, row in zip(*tables.means, strict=True):
        numbers[number] = totals[row] / count
    for number, mean in zip(*tables.mean_ratios, strict=True):
        numbers[number] = formulas.importance_ratio(numbers[mean])
    return numbers


def rows_of_block(plan, block):
    """Compute all rows of a block, X [rows, T]: first those that sums over sequences need."""
    columns, many, offsets, turn_offsets = (
        block.columns,
        plan.sizes.rows,
        block.offsets,
        block.turn_offsets,
    )
    none = np.zeros((0, len(offsets) - 1)), np.zeros((0, len(turn_offsets) - 1))
    first = token_rows(plan.first, columns, many, *none, offsets, turn_offsets)
    summed = {*plan.sequences.totals.summed.tolist(), *plan.sequences.means.summed.tolist()}
    of_sequences = {row: segments.segment_sum(first[row], offsets) for row in summed}
    summed = set(plan.turns.means.summed.tolist())
    of_turns = {row: segments.segment_sum(first[row], turn_offsets) for row in summed}
    later = np.zeros((len(plan.rows.later.row), len(columns.advantages)))
    for _, row, at, half_life in zip(*plan.rows.later, strict=True):
        later[at] = segments.later_sum(first[row], block.position, offsets, half_life)
    numbers = (
        sequence_numbers(plan.sequences, of_sequences, offsets, block.cuts, block.good),
        turn_numbers(plan.turns, of_turns, turn_offsets),
    )
    columns = columns._replace(later=later)
    return token_rows(plan.rows, columns, many, *numbers, offsets, turn_offsets)


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
    """Every distinct sum of a block's sequences: `SumTables` of [lines, numbers, S]."""
    columns, offsets = block.columns, block.offsets
    X = rows_of_block(plan, block)
    advantage = columns.advantages
    weights = weight_rows(plan.weights, X)
    kept = mask_rows(plan.rules, plan.sizes.masks, X)
    loss, slope, clipped, dual = loss_rows(plan.losses, plan.sizes.losses, X, advantage, columns.current)
    kls = formulas.loss_kl(X[plan.losses.kls.log_ratio], column(plan.losses.kls.bound))

    def total(counted, *terms):
        """Sum terms [N, T] or [T] over the tokens that are counted, [N, T] bool: [N, terms, S]."""
        each = [segments.segment_sum(np.where(counted, x, 0.0), offsets) for x in terms]
        return np.stack(each, 1)

    def of_weights(t):
        w = weights[t.weight]
        excess = formulas.deviation(w)
        return total(kept[t.mask], w, w * w, excess, excess * excess)

    def of_losses(t):
        w = weights[t.weight]
        return total(kept[t.mask], w * loss[t.loss], w * np.abs(slope[t.loss]))

    def of_still(t):
        still = formulas.without_gradient(slope[t.loss], weights[t.weight], kept[t.mask])
        return total(still, np.maximum(advantage, 0.0), np.maximum(-advantage, 0.0))

    def of_flags(flags, t):
        return total(kept[t.mask], np.where(flags[t.loss], 1.0, 0.0))

    t = plan.sums
    one, up, down = X[ONE], X[POSITIVE], X[NEGATIVE]
    return SumTables(
        kept=total(kept[t.kept.mask], one, up, down),
        gap=total(kept[t.gap.mask], X[t.gap.k3], X[t.gap.log_ratio]),
        weight=of_weights(t.weight),
        clip=of_flags(clipped, t.clip),
        dual_clip=of_flags(dual, t.dual_clip),
        kl=total(kept[t.kl.mask], kls[t.kl.kl]),
        loss=of_losses(t.loss),
        still=of_still(t.still),
    )
