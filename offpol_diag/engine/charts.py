"""Binned tokens from which pictures are drawn: density, noise by probability, ranges of r, token types.

Everything is a sum over tokens of the main drift on fixed bins, so it merges by adding, and its size does not
depend on how many tokens there are. Tokens "in sync" are those of sequences with policy lag 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from offpol_diag.engine import (
    breakdowns,
    gap,
    loglattice,
    method,
    selection,
    stepgroups,
)
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.segments import Array, count_by, sum_by
from offpol_diag.engine.tally import Arrays, ByKey, Tally
from offpol_diag.engine.terms import Drift, Terms, collected

BINS = 55
"""Bins of a probability in the density; the outer two are open."""
LOGITS = (-14.0, 14.0)
"""Logits of the outermost inner edges of the density."""
NOISE_EDGES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.997, 0.999, 0.9997, 0.9999)
"""Probabilities at which tokens are divided for the quantiles of |Δ|."""
_OCTAVES, _PER_OCTAVE = (-24, 7), 16
SIZES = (_OCTAVES[1] - _OCTAVES[0]) * _PER_OCTAVE + 2
"""Bins of |Δ|, relative width 1/16 between 2^-24 and 2^7; one below, one above."""

THRESHOLDS = (
    *(1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 50.0, 70.0, 100.0),
    *(200.0, 500.0, 1000.0),
)
"""Thresholds b of rules on tokens; all are at least e^FAR."""
_LOGS = tuple(math.log(b) for b in THRESHOLDS)
EDGES = (*(-x for x in reversed(_LOGS)), *_LOGS)
"""Edges of Δ between which tokens are summed; the middle bin holds r from 1/1.1 to 1.1."""
CORNER = (0.9, 0.5)
"""A token is in a corner if one policy gives it more than the first and the other less than the second."""

MOST_IDS = 1 << 19
"""Token ids from here on are counted together."""
SUMMED = ("tokens", "r1", "r11", "k3")
"""Terms summed between edges: tokens, r − 1, (r − 1)², K3."""


# ---------------------------------------------------------------- bins

_SHIFT = np.uint64(loglattice.SHIFT)


def _on_lattice(log: float) -> float:
    """Round a log-prob to the nearer end of its code, by at most 1.6% of it."""
    code = np.float64(log).view(np.uint64) >> _SHIFT
    ends = (np.arange(code, code + np.uint64(2), dtype=np.uint64) << _SHIFT).view(np.float64)
    return float(ends[np.abs(ends - log).argmin()])


_LOGITS = [LOGITS[0] + (LOGITS[1] - LOGITS[0]) * i / (BINS - 2) for i in range(BINS - 1)]
DENSITY_LOGS = tuple(_on_lattice(-math.log1p(math.exp(-x))) for x in _LOGITS)
"""Log-probs between the bins of the density, rising; a bin holds its upper edge."""
NOISE_LOGS = tuple(_on_lattice(math.log(q)) for q in NOISE_EDGES)
"""The same of the quantiles of |Δ|."""


def probabilities(logs: Sequence[float]) -> list[float]:
    """Return the probabilities that bound bins, with 0 and 1 at the ends."""
    return [0.0, *map(math.exp, logs), 1.0]


def _of_logs(edges: tuple[float, ...], times: int) -> Array:
    """Return for each code of a log-prob its bin among rising edges, multiplied: [CODES] int64."""
    codes = np.arange(loglattice.CODES, dtype=np.uint64) << _SHIFT
    ends = np.nan_to_num(codes.view(np.float64), nan=0.0)
    return np.searchsorted(edges, ends, side="left") * times


def _of_sizes() -> Array:
    """Return the bin of |Δ| for each code: [CODES] int64."""
    codes = np.arange(loglattice.CODES // 2)
    bins = np.clip((codes >> 1) - ((1023 + _OCTAVES[0]) * _PER_OCTAVE) + 1, 0, SIZES - 1)
    return np.concatenate((bins, bins))


def size_edges() -> Array:
    """Return the edges of the bins of |Δ|, [SIZES + 1]; the last is infinite."""
    octaves = np.arange(*_OCTAVES)[:, None]
    inner = 2.0**octaves * (1 + np.arange(_PER_OCTAVE) / _PER_OCTAVE)
    return np.concatenate(([0.0], inner.flatten(), [2.0 ** _OCTAVES[1], math.inf]))


@cache
def _tables() -> tuple[Array, ...]:
    """Return the bin of each code: rollout and trainer bin of the density, noise, |Δ|."""
    bins = (
        _of_logs(DENSITY_LOGS, BINS),
        _of_logs(DENSITY_LOGS, 1),
        _of_logs(NOISE_LOGS, SIZES),
        _of_sizes(),
    )
    return tuple(x.astype(np.int16) for x in bins)  # in a quarter of the cache


# ---------------------------------------------------------------- one batch


class Pictures:
    """Collect binned tokens, block by block."""

    def __init__(self, context: BatchContext, drift: Drift) -> None:
        batch = context.batch
        self.ids = batch.token_ids
        lags = batch.scalars.get("policy_lag")
        self.synced = None if lags is None else np.array([lag == 0 for lag in lags], np.bool_)
        self.density = np.zeros(BINS * BINS)
        self.noise = np.zeros(2 * (len(NOISE_EDGES) + 1) * SIZES)
        self.between = np.zeros((len(SUMMED), len(EDGES) + 1))
        self.corners = np.zeros((2, 2))
        self.in_sync = np.zeros(loglattice.SIZE)
        self.by_id = None if self.ids is None else np.zeros((3, self._most_ids(self.ids) + 1))

    @staticmethod
    def _most_ids(ids: Array) -> int:
        """Return the largest id, at most MOST_IDS, which stands for negative ones too."""
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
        return MOST_IDS if low < 0 else min(high, MOST_IDS)

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        self._bin(terms, self._synced(terms))
        self._sum(terms)
        if self.ids is not None and self.by_id is not None:
            ids = self.ids[terms.block.tokens]
            ids = np.where((ids < 0) | (ids > MOST_IDS), MOST_IDS, ids)
            tokens, k3, delta = self.by_id
            np.add.at(tokens, ids, 1.0)
            np.add.at(k3, ids, terms.k3)
            np.add.at(delta, ids, terms.delta)

    def _synced(self, terms: Terms) -> Array | None:
        """Return whether each token has lag 0, [t] int16; None where none has."""
        if self.synced is None or not (flags := self.synced[terms.block.rows]).any():
            return None
        return np.repeat(flags.astype(np.int16), terms.block.lengths)

    def _bin(self, terms: Terms, synced: Array | None) -> None:
        """Count by both probabilities, and by rollout probability and |Δ|."""
        rollout, trained, noise, sizes = _tables()
        q, p, size, delta = terms.q, terms.p, terms.size, terms.delta
        of_q = loglattice.code(q)
        first, second = (x.take(of_q, mode="clip") for x in (rollout, noise))  # codes are in range
        first += trained.take(loglattice.code(p), mode="clip")
        second += sizes.take(loglattice.code(size), mode="clip")
        if synced is not None:
            second += synced * ((len(NOISE_EDGES) + 1) * SIZES)
            self.in_sync += sum_by(loglattice.index(delta), loglattice.SIZE, synced.astype(np.float64))
        self.density += count_by(first, len(self.density))
        self.noise += count_by(second, len(self.noise))

    def _sum(self, terms: Terms) -> None:
        """Sum between edges, and in the corners."""
        delta, r1, k3, q, p = terms.delta, terms.r1, terms.k3, terms.q, terms.p
        far = terms.far  # only these are looked at one by one
        self.between[:, len(THRESHOLDS)] += _without(far, r1, k3)
        delta, r1, k3, q, p = (x[far] for x in (delta, r1, k3, q, p))
        at = np.searchsorted(EDGES, delta, side="right")
        for row, x in zip(self.between, (np.ones_like(r1), r1, r1 * r1, k3), strict=True):
            row += sum_by(at, len(row), x)
        likely, unlikely = math.log(CORNER[0]), math.log(CORNER[1])
        for i, here_ in enumerate(((q > likely) & (p < unlikely), (q < unlikely) & (p > likely))):
            self.corners[:, i] += (here_.sum(), k3[here_].sum())

    @property
    def arrays(self) -> Arrays:
        """Binned tokens.

        density: tokens by rollout and trainer bin, [BINS²].
        noise: tokens by rollout probability and |Δ|, without and with lag 0, [2, Q · SIZES].
        between: `SUMMED` over the tokens between `EDGES`, [4, E+1].
        corners: tokens and K3 in the two corners (lost, found), [2, 2].
        in_sync: Δ of tokens with lag 0, on the lattice.
        """
        result = {
            "density": self.density,
            "noise": self.noise.reshape(2, -1),
            "between": self.between,
            "corners": self.corners,
            "in_sync": self.in_sync,
        }
        return Arrays(sums=result)

    @property
    def token_ids(self) -> ByKey | None:
        """Tokens, ΣK3 and ΣΔ of each token id, [N, 3]; `MOST_IDS` also stands for larger or negative ones."""
        if self.by_id is None:
            return None
        at = np.flatnonzero(self.by_id[0])
        return ByKey(at, Arrays(sums={"terms": np.ascontiguousarray(self.by_id[:, at].T)}))


def _without(far: Array, r1: Array, k3: Array) -> tuple[float, ...]:
    """Sum over the tokens that are not far: how many, r − 1, (r − 1)², K3."""
    r1, k3 = r1.copy(), k3.copy()
    r1[far] = k3[far] = 0.0
    return len(r1) - len(far), r1.sum(), np.dot(r1, r1), k3.sum()


# ---------------------------------------------------------------- rules on sequences

SEQUENCE_THRESHOLDS = (
    *(1 + x * 10.0**power for power in range(-4, 3) for x in (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)),
    1001.0,
)
"""Thresholds b of rules on sequences."""
_SEQUENCE_LOGS = tuple(math.log(b) for b in SEQUENCE_THRESHOLDS)
SEQUENCE_EDGES = (*(-x for x in reversed(_SEQUENCE_LOGS)), *_SEQUENCE_LOGS)


def by_sequence(lengths: Array, total: Array) -> Arrays:
    """Sum sequences by ΣΔ and by mean Δ; both inputs are [S], and empty sequences are left out.

    by_sum: tokens of the sequences whose ΣΔ lies between `SEQUENCE_EDGES`, and w = ∏r and w² times their
        tokens, these only up to the last edge, [3, E+1].
    by_mean: tokens by mean Δ, [E+1].
    """
    n, edges = lengths.astype(np.float64), np.array(SEQUENCE_EDGES)
    w = np.exp(np.minimum(total, SEQUENCE_EDGES[-1])) * (total < SEQUENCE_EDGES[-1])
    at, size = np.searchsorted(edges, total, side="right"), len(edges) + 1
    sums = np.stack([sum_by(at, size, x) for x in (n, n * w, n * w * w)])
    at = np.searchsorted(edges, total / np.maximum(n, 1), side="right")
    return Arrays(sums={"by_sum": sums, "by_mean": sum_by(at, size, n)})


# ---------------------------------------------------------------- all of them


def tally(context: BatchContext, drifts: Sequence[Drift], weighed: PresetSums) -> Tally:
    """Sum what pictures of one batch need; the first drift is the main one, `weighed` are of families."""
    main = drifts[0]
    total = gap.columns(context, main)[f"{main.prefix}d"]
    pictures = collected(context, main, Pictures)
    whole = pictures.arrays.merge(by_sequence(context.batch.lengths, total))
    by_key = {"token_ids": pictures.token_ids, "step_groups": _by_step(context, drifts, weighed, total)}
    return Tally(
        whole.merge(Arrays(sums={"lengths": selection.by_length(context.batch.lengths)})),
        {name: one for name, one in by_key.items() if one is not None},
    )


OF_STEPS = ("d", "k3", "r1", "r2", "f_2", "ppl_ratio", "s2")
"""Columns of the main drift that are summed by step."""


def _by_step(
    context: BatchContext, drifts: Sequence[Drift], weighed: PresetSums, total: Array
) -> ByKey | None:
    batch, main = context.batch, drifts[0]
    if "step" not in batch.scalars:
        return None
    result = dict(context.counts)
    for drift in drifts:
        columns = gap.columns(context, drift)
        names = OF_STEPS if drift is main else ("d", "k3")
        result |= {drift.prefix + name: columns[drift.prefix + name] for name in names}
    if batch.rewards is not None:
        result["reward"] = batch.rewards * context.counts["sequences"]
    if (lags := batch.scalars.get("policy_lag")) is not None:
        ints = [lag if type(lag) is int else None for lag in lags]
        known = [(0.0, 0.0, 0.0) if lag is None else (1.0, float(lag), float(lag) ** 2) for lag in ints]
        result |= zip(("lagged", "lag", "lag2"), np.array(known).reshape(-1, 3).T, strict=True)
    if weighed.presets:
        weights = method.weight_columns(weighed)
        few = weights.only([at for at, name in enumerate(weights.names) if name.endswith("|kept")])
        result |= dict(zip(few.names, few.values, strict=True))
    axis = breakdowns.TOKEN_AXES[0]
    table = np.concatenate(collected(context, main, breakdowns.ByPlace).parts[axis.name], -1)
    for name in ("k3", "tokens"):
        of_places = table[breakdowns.COLUMNS.index(name)].reshape(-1, len(axis.labels)).T
        result |= {f"{name}@{at}": x for at, x in enumerate(of_places)}
    p, q = batch.policy(main.numerator), batch.policy(main.denominator)
    assert p is not None
    assert q is not None
    return stepgroups.by_group(context, result, p - q, total)
