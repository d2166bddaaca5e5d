"""Rows and sums of a block, tile by tile: loops over the plan's tables that call the formulas.

A tile's rows stay in the cache, [rows, tile]. Formulas are those of `formulas.py`, compiled for one
token; a function here is the loop of one table. Flags of tokens are bytes, and indices of tokens
are unsigned: with bools or signed indices a loop is not vectorised.
"""

import numba
import numpy as np

from offpol_diag.pipeline import kernels, namespaces, plain
from offpol_diag.pipeline.block import Block, Columns
from offpol_diag.pipeline.plan import Plan
from offpol_diag.pipeline.tables import (
    ADVANTAGE,
    CURRENT,
    NEGATIVE,
    NOT_POSITIVE,
    OLD,
    ONE,
    POSITIVE,
    ROLLOUT,
    WIDTHS,
    Sums,
    SumTables,
    summed,
)
from offpol_diag.presets import Preset, Weight

TILE = 512  # tokens

f = namespaces.compiled()
of_rows = numba.njit(fastmath={"contract", "nsz"}, error_model="numpy")
of_sums = numba.njit(fastmath={"contract", "nsz", "reassoc"}, error_model="numpy")


def entry(function):
    """Compile a function that Python calls, and keep its machine code in `kernels.folder`."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(kernels.folder())
    try:
        return numba.njit(error_model="numpy", cache=True, nogil=True)(function)
    finally:
        numba.config.CACHE_DIR = before


# ---------------------------------------------------------------- Segments of a tile


@of_rows
def pieces(offsets, begin, end):
    """The first segment with tokens in [begin, end), and where segments begin within, uint64."""
    first = np.searchsorted(offsets, begin, side="right") - 1
    last = np.searchsorted(offsets, end, side="left")
    cuts = np.empty(last - first + 1, np.uint64)
    for s in range(first, last + 1):
        cuts[s - first] = min(max(offsets[s], begin), end) - begin
    return first, cuts


@of_rows
def spread(t, numbers, first, cuts, X):
    for i in range(len(t.row)):
        out = X[t.row[i]]
        for piece in range(len(cuts) - 1):
            number = numbers[t.number[i], first + piece]
            for k in range(cuts[piece], cuts[piece + 1]):
                out[k] = number


@of_sums
def add_totals(rows, X, first, cuts, out):
    for i in range(len(rows)):
        x = X[rows[i]]
        for piece in range(len(cuts) - 1):
            total = 0.0
            for k in range(cuts[piece], cuts[piece + 1]):
                total += x[k]
            out[i, first + piece] += total


# ---------------------------------------------------------------- Rows of tokens


@of_rows
def copy(x, n, out):
    for k in range(n):
        out[k] = x[k]


@of_rows
def fixed_rows(columns, begin, end, n, X):
    advantage = columns.advantages[begin:end]
    one, same = X[ONE], X[ADVANTAGE]
    positive, negative, not_positive = X[POSITIVE], X[NEGATIVE], X[NOT_POSITIVE]
    for k in range(n):
        one[k] = 1.0
        same[k] = advantage[k]
    for k in range(n):
        positive[k] = f.positive(advantage[k])
        negative[k] = f.negative(advantage[k])
        not_positive[k] = f.not_positive(advantage[k])
    copy(columns.rollout[begin:end], n, X[ROLLOUT])
    copy(columns.old[begin:end], n, X[OLD])
    copy(columns.current[begin:end], n, X[CURRENT])


@of_rows
def log_ratios(t, X, n):
    for i in range(len(t.row)):
        log_prob, before, out = X[t.log_prob[i]], X[t.log_prob_before[i]], X[t.row[i]]
        for k in range(n):
            out[k] = f.log_ratio_of(log_prob[k], before[k])


@of_rows
def bounded_log_ratios(t, X, n):
    for i in range(len(t.row)):
        log_ratio, out, bound = X[t.log_ratio[i]], X[t.row[i]], t.bound[i]
        for k in range(n):
            out[k] = f.clip(log_ratio[k], -bound, bound)


@of_rows
def ratios(t, X, n):
    for i in range(len(t.row)):
        log_ratio, out = X[t.log_ratio[i]], X[t.row[i]]
        for k in range(n):
            out[k] = f.importance_ratio(log_ratio[k])


@of_rows
def ratios_minus_one(t, X, n):
    for i in range(len(t.row)):
        log_ratio, out = X[t.log_ratio[i]], X[t.row[i]]
        for k in range(n):
            out[k] = f.ratio_minus_one(log_ratio[k])


@of_rows
def away(t, X, n):
    for i in range(len(t.row)):
        advantage, log_ratio, out = X[ADVANTAGE], X[t.log_ratio[i]], X[t.row[i]]
        for k in range(n):
            out[k] = f.moves_away(advantage[k], log_ratio[k])


def statistic(formula):
    """Return the loop of one divergence; Δ is clipped to [lowest, highest], r − 1 to [least, most]."""

    def loop(log_ratio, ratio_minus_1, rollout, lowest, highest, least, most, n, out):
        for k in range(n):
            d = f.clip(log_ratio[k], lowest, highest)
            out[k] = formula(d, f.clip(ratio_minus_1[k], least, most), rollout[k])

    return of_rows(loop)


log_ratio_itself = statistic(f.log_ratio_itself)
k1 = statistic(f.k1)
k2 = statistic(f.k2)
k3 = statistic(f.k3)
k3_reverse = statistic(f.k3_reverse)
ratio_either_way = statistic(f.ratio_either_way)
probability_difference = statistic(f.probability_difference)
total_variation = statistic(f.total_variation)
binary_kl = statistic(f.binary_kl)
binary_kl_larger = statistic(f.binary_kl_larger)


@of_rows
def statistics(t, X, n):
    """Kinds are the places in `plan.STATISTICS`."""
    rollout = X[ROLLOUT]
    for i in range(len(t.row)):
        d, r1, out, kind = X[t.log_ratio[i]], X[t.ratio_minus_1[i]], X[t.row[i]], t.kind[i]
        lowest, highest, least, most = t.lowest[i], t.highest[i], t.least_minus_1[i], t.most_minus_1[i]
        if kind == 0:
            log_ratio_itself(d, r1, rollout, lowest, highest, least, most, n, out)
        elif kind == 1:
            k1(d, r1, rollout, lowest, highest, least, most, n, out)
        elif kind == 2:
            k2(d, r1, rollout, lowest, highest, least, most, n, out)
        elif kind == 3:
            k3(d, r1, rollout, lowest, highest, least, most, n, out)
        elif kind == 4:
            k3_reverse(d, r1, rollout, lowest, highest, least, most, n, out)
        elif kind == 5:
            ratio_either_way(d, r1, rollout, lowest, highest, least, most, n, out)
        elif kind == 6:
            probability_difference(d, r1, rollout, lowest, highest, least, most, n, out)
        elif kind == 7:
            total_variation(d, r1, rollout, lowest, highest, least, most, n, out)
        elif kind == 8:
            binary_kl(d, r1, rollout, lowest, highest, least, most, n, out)
        else:
            binary_kl_larger(d, r1, rollout, lowest, highest, least, most, n, out)


@of_rows
def outside(t, X, n):
    for i in range(len(t.row)):
        value, lower, upper, out = X[t.value[i]], t.lower[i], t.upper[i], X[t.row[i]]
        for k in range(n):
            out[k] = 1.0 if f.outside(value[k], lower, upper) else 0.0


@of_rows
def token_rows(t, columns, begin, end, sequences, turns, offsets, turn_offsets, X):
    """Compute the rows of tokens [begin, end) that `TokenRows` asks for: as `plain.token_rows`."""
    n = np.uint64(end - begin)
    fixed_rows(columns, begin, end, n, X)
    log_ratios(t.log_ratios, X, n)
    bounded_log_ratios(t.bounded_log_ratios, X, n)
    ratios(t.ratios, X, n)
    ratios_minus_one(t.ratios_minus_one, X, n)
    away(t.away, X, n)
    statistics(t.statistics, X, n)
    first, cuts = pieces(offsets, begin, end)
    spread(t.of_sequences, sequences, first, cuts, X)
    if len(t.of_turns.row):
        first, cuts = pieces(turn_offsets, begin, end)
        spread(t.of_turns, turns, first, cuts, X)
    for i in range(len(t.cut_off.row)):
        copy(columns.cut_off[t.cut_off.column[i]][begin:end], n, X[t.cut_off.row[i]])
    outside(t.outside, X, n)


# ---------------------------------------------------------------- Weights, masks, losses


@of_rows
def weight_rows(t, X, n, W):
    for i in range(len(t.ratio)):
        ratio, log_ratio, out = X[t.ratio[i]], X[t.log_ratio[i]], W[i]
        lower, upper, below, above = t.lower[i], t.upper[i], t.zero_below[i], t.zero_above[i]
        for k in range(n):
            out[k] = f.importance_weight(ratio[k], log_ratio[k], lower, upper, below, above)


@of_rows
def mask_rows(t, X, n, K):
    for mask in range(len(K)):
        kept = K[mask]
        for k in range(n):
            kept[k] = 1
    for i in range(len(t.mask)):
        value, kept, lower, upper = X[t.value[i]], K[t.mask[i]], t.lower[i], t.upper[i]
        if t.counts_above[i] == ONE and t.counts_below[i] == ONE:
            for k in range(n):
                kept[k] &= np.uint8(0 if f.outside(value[k], lower, upper) else 1)
        else:
            above, below = X[t.counts_above[i]], X[t.counts_below[i]]
            for k in range(n):
                failed = f.rejected(value[k], lower, upper, above[k], below[k])
                kept[k] &= np.uint8(0 if failed else 1)


@of_rows
def ppo_losses(t, X, n, loss, clipped, dual_clipped):
    for i in range(len(t.loss)):
        advantage, ratio = X[ADVANTAGE], X[t.ratio[i]]
        low, high, dual, r_lowest, r_highest = t.low[i], t.high[i], t.dual[i], t.r_lowest[i], t.r_highest[i]
        out, clip, dual_clip = loss[t.loss[i]], clipped[t.loss[i]], dual_clipped[t.loss[i]]
        for k in range(n):
            out[k], c, d = f.ppo_clip(advantage[k], ratio[k], low, high, dual, r_lowest, r_highest)
            clip[k] = 1 if c else 0
            dual_clip[k] = 1 if d else 0


@of_rows
def reinforce_losses(t, X, n, loss):
    for i in range(len(t.loss)):
        advantage, log_prob, out = X[ADVANTAGE], X[t.log_prob[i]], loss[t.loss[i]]
        for k in range(n):
            out[k] = f.reinforce(advantage[k], log_prob[k])


@of_rows
def cispo_losses(t, X, n, loss, clipped):
    for i in range(len(t.loss)):
        advantage, log_prob, ratio = X[ADVANTAGE], X[CURRENT], X[t.ratio[i]]
        low, high, r_lowest, r_highest = t.low[i], t.high[i], t.r_lowest[i], t.r_highest[i]
        out, clip = loss[t.loss[i]], clipped[t.loss[i]]
        for k in range(n):
            out[k], c = f.cispo(advantage[k], log_prob[k], ratio[k], low, high, r_lowest, r_highest)
            clip[k] = 1 if c else 0


@of_rows
def loss_kls(t, X, n, out):
    for i in range(len(t.log_ratio)):
        log_ratio, bound, kl = X[t.log_ratio[i]], t.bound[i], out[i]
        for k in range(n):
            kl[k] = f.loss_kl(log_ratio[k], bound)


@of_rows
def loss_rows(t, X, n, loss, clipped, dual_clipped, kl):
    ppo_losses(t.ppo, X, n, loss, clipped, dual_clipped)
    reinforce_losses(t.reinforce, X, n, loss)
    cispo_losses(t.cispo, X, n, loss, clipped)
    loss_kls(t.kls, X, n, kl)


# ---------------------------------------------------------------- Sums over sequences


@of_sums
def kept_sums(t, K, first, cuts, out):
    for i in range(len(t.mask)):
        kept = K[t.mask[i]]
        for piece in range(len(cuts) - 1):
            many = 0
            for k in range(cuts[piece], cuts[piece + 1]):
                many += np.int64(kept[k])
            out[i, 0, first + piece] += many


@of_sums
def gap_sums(t, X, K, first, cuts, out):
    for i in range(len(t.mask)):
        k3_row, log_ratio, kept = X[t.k3[i]], X[t.log_ratio[i]], K[t.mask[i]]
        for piece in range(len(cuts) - 1):
            divergence, drift = 0.0, 0.0
            for k in range(cuts[piece], cuts[piece + 1]):
                divergence += k3_row[k] if kept[k] else 0.0
                drift += log_ratio[k] if kept[k] else 0.0
            out[i, 0, first + piece] += divergence
            out[i, 1, first + piece] += drift


@of_sums
def weight_sums(t, W, K, first, cuts, out):
    for i in range(len(t.mask)):
        weight, kept = W[t.weight[i]], K[t.mask[i]]
        for piece in range(len(cuts) - 1):
            w_total, w2_total, e_total, e2_total, many = 0.0, 0.0, 0.0, 0.0, 0.0
            for k in range(cuts[piece], cuts[piece + 1]):
                deviation = f.deviation(weight[k])
                w = weight[k] if kept[k] else 0.0
                e = deviation if kept[k] else 0.0
                w_total += w
                w2_total += w * weight[k]
                e_total += e
                e2_total += e * deviation
                many += 1.0 if w != 0.0 else 0.0
            out[i, 0, first + piece] += w_total
            out[i, 1, first + piece] += w2_total
            out[i, 2, first + piece] += e_total
            out[i, 3, first + piece] += e2_total
            out[i, 4, first + piece] += many


@of_sums
def clip_sums(t, clipped, K, first, cuts, out):
    for i in range(len(t.mask)):
        clip, kept = clipped[t.loss[i]], K[t.mask[i]]
        for piece in range(len(cuts) - 1):
            total = 0
            for k in range(cuts[piece], cuts[piece + 1]):
                total += np.int64(clip[k] & kept[k])
            out[i, 0, first + piece] += total


@of_sums
def loss_sums(t, loss, W, K, first, cuts, out):
    for i in range(len(t.mask)):
        x, weight, kept = loss[t.loss[i]], W[t.weight[i]], K[t.mask[i]]
        for piece in range(len(cuts) - 1):
            total = 0.0
            for k in range(cuts[piece], cuts[piece + 1]):
                total += weight[k] * x[k] if kept[k] else 0.0
            out[i, 0, first + piece] += total


@of_sums
def kl_sums(t, kl, K, first, cuts, out):
    for i in range(len(t.mask)):
        x, kept = kl[t.kl[i]], K[t.mask[i]]
        for piece in range(len(cuts) - 1):
            total = 0.0
            for k in range(cuts[piece], cuts[piece + 1]):
                total += x[k] if kept[k] else 0.0
            out[i, 0, first + piece] += total


@of_rows
def spans_of(x, kept, first, cuts, out):
    for piece in range(len(cuts) - 1):
        high, low = out[0, first + piece], out[1, first + piece]
        for k in range(cuts[piece], cuts[piece + 1]):
            high = max(high, x[k] if kept[k] else -np.inf)
            low = max(low, -x[k] if kept[k] else -np.inf)
        out[0, first + piece], out[1, first + piece] = high, low


# ---------------------------------------------------------------- Passes over a block


@entry
def one_pass(tables, rows_to, columns, offsets, turn_offsets, numbers, sizes, tile, totals, out, spans):
    """Compute rows of tokens tile by tile; add up some of them, and the sums of losses and weights.

    A block is passed over twice, first for the numbers of sequences and turns. Both are this
    function, with tables that have no line where nothing is wanted: it is compiled once.

    `tables` are those of rows, weights, rules, losses and sums; `rows_to` the rows to sum over sequences,
    to sum over turns, and whose extremes are wanted, and `totals` where they go, [rows, S], [rows, turns] and
    [rows, 2, S]; `numbers` those of sequences and of turns. Sums go to `out`, `SumTables` of
    [lines, numbers, S], and the largest and smallest weights to `spans`, [lines, 2, S].
    """
    rows, weights, rules, losses, sums = tables
    X = np.empty((sizes.rows, tile))
    W, K = np.ones((sizes.weights + 1, tile)), np.ones((sizes.masks + 1, tile), np.uint8)
    loss = np.zeros((sizes.losses, tile))
    clipped = np.zeros((sizes.losses, tile), np.uint8)
    dual_clipped = np.zeros((sizes.losses, tile), np.uint8)
    kl = np.empty((sizes.kls, tile))
    for begin in range(0, len(columns.rollout), tile):
        end = min(begin + tile, len(columns.rollout))
        n = np.uint64(end - begin)
        token_rows(rows, columns, begin, end, numbers[0], numbers[1], offsets, turn_offsets, X)
        weight_rows(weights, X, n, W)
        mask_rows(rules, X, n, K)
        loss_rows(losses, X, n, loss, clipped, dual_clipped, kl)
        if len(rows_to[1]):
            first, cuts = pieces(turn_offsets, begin, end)
            add_totals(rows_to[1], X, first, cuts, totals[1])
        first, cuts = pieces(offsets, begin, end)
        add_totals(rows_to[0], X, first, cuts, totals[0])
        for i in range(len(rows_to[2])):
            spans_of(X[rows_to[2][i]], K[sizes.masks], first, cuts, totals[2][i])
        kept_sums(sums.kept, K, first, cuts, out.kept)
        gap_sums(sums.gap, X, K, first, cuts, out.gap)
        weight_sums(sums.weight, W, K, first, cuts, out.weight)
        for i in range(len(sums.weight.mask)):
            spans_of(W[sums.weight.weight[i]], K[sums.weight.mask[i]], first, cuts, spans[i])
        clip_sums(sums.clip, clipped, K, first, cuts, out.clip)
        clip_sums(sums.dual_clip, dual_clipped, K, first, cuts, out.dual_clip)
        kl_sums(sums.kl, kl, K, first, cuts, out.kl)
        loss_sums(sums.loss, loss, W, K, first, cuts, out.loss)


def sums(plan, block, tile=TILE):
    """Compute every distinct sum of a block's sequences, and what is decided about them: as `plain.sums`."""
    sequences, turns, offsets = plan.sequences, plan.turns, block.offsets
    nothing, none = np.zeros(0, np.int64), np.zeros((0, 0))

    rows_to = totalled(sequences), totalled(turns), np.unique(sequences.extremes.summed)
    totals, _ = passed(plan, block, (plan.first, *plan.nothing), rows_to, (none, none), tile)
    summed_, of_turns, extremes = map(by_row, rows_to, totals)
    numbers = (
        plain.sequence_numbers(sequences, summed_, extremes, offsets),
        plain.turn_numbers(turns, of_turns, block.turn_offsets),
    )

    wanted = plan.decisions.numbers
    of_decisions = np.unique(np.append(totalled(wanted), ADVANTAGE))
    rows_to = of_decisions, nothing, np.unique(wanted.extremes.summed)
    tables = plan.rows, plan.weights, plan.rules, plan.losses, plan.sums
    result, out = passed(plan, block, tables, rows_to, numbers, tile)
    summed_, extremes = by_row(rows_to[0], result[0]), by_row(rows_to[2], result[2])
    return Sums(*out, *plain.decided(plan, summed_, extremes, summed_[ADVANTAGE], offsets))


def compile_all():
    """Compile everything, or load it, by computing the sums of a block of one token."""
    zero, ends = np.zeros(1), np.array([0, 1])
    columns = Columns(zero, zero, zero, zero, cut_off=np.zeros((0, 1)))
    sums(Plan.of((Preset("", "", "old", Weight()),)), Block(columns, ends, ends))


def by_row(rows, totals):
    """Return row of tokens → its total."""
    return dict(zip(rows.tolist(), totals, strict=True))


def totalled(numbers):
    """Return the rows of tokens that numbers are the sums or means of."""
    without = numbers._replace(extremes=numbers[0]) if "extremes" in numbers._fields else numbers
    return np.array(sorted(summed(without)), np.int64)


def passed(plan, block, tables, rows_to, numbers, tile):
    """Pass over a block once, and return what `one_pass` fills; nothing where no row is wanted."""
    columns, offsets, turn_offsets = block
    many, sums = len(offsets) - 1, tables[-1]
    of_turns = np.zeros((len(rows_to[1]), len(turn_offsets) - 1))
    totals = np.zeros((len(rows_to[0]), many)), of_turns, none_yet(rows_to[2], many)
    widths = zip(sums, WIDTHS.values(), strict=True)
    out = SumTables(*(np.zeros((len(t.mask), width, many)) for t, width in widths))
    spans = none_yet(sums.weight.mask, many)
    if any(map(len, rows_to)):
        given = columns, offsets, turn_offsets, numbers, plan.sizes, tile
        one_pass(tables, rows_to, *given, totals, out, spans)
    return totals, (out, spans)


def none_yet(lines, many):
    """Return extremes of no token, [lines, 2, S]."""
    return np.full((len(lines), 2, many), -np.inf)
