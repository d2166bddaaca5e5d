"""What the charts of a report are drawn from: tokens binned for pictures, and numbers by training step.

Bins are sums over the tokens of the main drift, so that they merge by adding and do not grow with the dump.
Steps are grouped by a power of two, one step a group at first, so that there are at most `MOST_STEPS` groups;
the width follows from the steps of the dump, however it is cut. Tokens "in sync" are those of policy lag 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from offpol_diag import metrics
from offpol_diag.core import breakdowns, gap, preset_numbers, tails
from offpol_diag.core.breakdowns import POSITIONS, TOP
from offpol_diag.core.gap import Drift, Terms
from offpol_diag.core.intervals import AS_SEEN, Formula, Reader, mean
from offpol_diag.core.state import MOST_STEPS, Array, State, Table, largest_of
from offpol_diag.core.tails import ESS_SEQUENCES, ESS_TOKENS
from offpol_diag.number import Number
from offpol_diag.presets import Preset
from offpol_diag.result import Result
from offpol_diag.result import charts as shown

# ---------------------------------------------------------------- bins

BINS, LOGITS = 55, (-14.0, 14.0)
"""Bins of a probability in the density, the outer two open; logits of the outermost edges between them."""
NOISE_EDGES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.997, 0.999, 0.9997, 0.9999)
"""Probabilities at which tokens are divided for the quantiles of |Δ|."""
OCTAVES, PER_OCTAVE = (-24, 7), 16
SIZES = (OCTAVES[1] - OCTAVES[0]) * PER_OCTAVE + 2
"""Bins of |Δ|, relative width 1/16 between 2^-24 and 2^7; one below, one above."""
THRESHOLDS = (
    *(1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 50.0, 70.0, 100.0),
    *(200.0, 500.0, 1000.0),
)
"""Thresholds b of rules on tokens; all are at least the 1.1 from which on `Terms.far` looks at tokens."""
LIKELY, UNLIKELY = 0.9, 0.5
"""A token is lost if the rollout gives it more than the first and the trainer less than the second."""
LENGTH_BINS = 256
"""Eight bins to an octave: lengths below 12 have bins of their own, longer ones are binned to 9%."""


EDGES = np.concatenate((-np.log(THRESHOLDS[::-1]), np.log(THRESHOLDS)))
"""Logarithms of 1/b and b, rising."""
_SHIFT = np.uint64(tails.SHIFT)


def _on_lattice(log: float) -> float:
    """Round a log-prob to the nearer end of its code, by at most 1.6% of it."""
    code = np.float64(log).view(np.uint64) >> _SHIFT
    ends = (np.arange(code, code + np.uint64(2), dtype=np.uint64) << _SHIFT).view(np.float64)
    return float(ends[np.abs(ends - log).argmin()])


DENSITY_LOGS = tuple(_on_lattice(-math.log1p(math.exp(-x))) for x in np.linspace(*LOGITS, BINS - 1).tolist())
NOISE_LOGS = tuple(_on_lattice(math.log(q)) for q in NOISE_EDGES)
"""Log-probs between bins, rising; a bin holds its upper edge."""


@cache
def _bins() -> tuple[Array, ...]:
    """Return the bin of each code of a float64: rollout and trainer bin of the density, noise, |Δ|; int16."""
    codes = np.arange(tails.CODES, dtype=np.uint64) << _SHIFT
    logs = np.nan_to_num(codes.view(np.float64), nan=0.0)
    density, noise = (np.searchsorted(edges, logs, side="left") for edges in (DENSITY_LOGS, NOISE_LOGS))
    size = (np.arange(tails.CODES // 2) >> 1) - (1023 + OCTAVES[0]) * PER_OCTAVE + 1
    sizes = np.tile(np.clip(size, 0, SIZES - 1), 2)
    return tuple(x.astype(np.int16) for x in (density * BINS, density, noise * SIZES, sizes))


# ---------------------------------------------------------------- one batch

OF_STEPS = ("d", "k3", "r1", "r2", "f_2", "ppl_ratio", "s2")
"""Columns of the main drift that are summed by step."""


def observe(
    terms: Terms,
    drifts: Sequence[Drift],
    columns: Mapping[str, Array],
    rejected: Mapping[str, Array],
    buckets: Array,
) -> State:
    """Bin the tokens of a batch, and sum by training step.

    Args:
        terms: of the main drift.
        drifts: those that the dump has, the main one first.
        columns: sums of each sequence by drift's prefix and name, `tokens` and `sequences`, [S].
        rejected: `PRESET|kept`, tokens that presets keep of each sequence, [S].
        buckets: what sums are kept apart for, [S].
    """
    batch = terms.batch
    lags = batch.scalars.get("policy_lag", ())
    synced = np.repeat(np.array([lag == 0 for lag in lags], np.int16), batch.lengths if lags else 0)
    counts = _binned(terms, synced) | _between(terms) | {"lengths": _lengths(batch.lengths)}
    tables = _by_step(terms, {**_of_steps(terms, drifts, columns), **rejected}, buckets)
    return State(tables=tables, counts=counts)


def _binned(terms: Terms, synced: Array) -> dict[str, Array]:
    """Count tokens by both probabilities, by rollout probability and |Δ|, and by Δ where they are in sync.

    Returns:
        density, by rollout and trainer bin, [BINS²]; noise, without and with lag 0, by rollout probability
        and |Δ|, [2 · Q · SIZES]; in_sync, on the lattice.
    """
    first, second, noise, sizes = _bins()
    of_q, many = tails.code(terms.q), (len(NOISE_EDGES) + 1) * SIZES
    both = first[of_q] + second[tails.code(terms.p)]
    size = noise[of_q] + sizes[tails.code(terms.size)]
    lattice = np.zeros(tails.SIZE)
    if synced.any():
        size += synced * np.int16(many)
        lattice += np.bincount(tails.index(terms.delta), synced, tails.SIZE)
    counts = {"density": np.bincount(both, minlength=BINS**2), "noise": np.bincount(size, minlength=2 * many)}
    return {name: x.astype(np.float64) for name, x in counts.items()} | {"in_sync": lattice}


def _between(terms: Terms) -> dict[str, Array]:
    """Sum between edges of Δ, and in the corner of tokens that only the rollout holds likely.

    Returns:
        between, tokens, Σ(r − 1), Σ(r − 1)² and ΣK3 between `EDGES`, [4, E+1]; corner, tokens and ΣK3, [2].
    """
    far, r1, k3 = terms.far, terms.r1, terms.k3
    near = np.ones_like(r1)
    near[far] = 0.0  # what is near is summed without what is far, which may be larger by e^300
    between = np.zeros((4, len(EDGES) + 1))
    near_r1 = near * r1
    between[:, len(THRESHOLDS)] = [x.sum() for x in (near, near_r1, near_r1 * r1, near * k3)]
    delta, r1, k3, q, p = (x[far] for x in (terms.delta, r1, k3, terms.q, terms.p))
    at = np.searchsorted(EDGES, delta, side="right")
    for row, x in zip(between, (np.ones_like(r1), r1, r1 * r1, k3), strict=True):
        row += np.bincount(at, x, len(row))
    high, low = math.log(LIKELY), math.log(UNLIKELY)
    lost = (q > high) & (p < low)
    return {"between": between, "corner": np.array([lost.sum(), k3[lost].sum()], np.float64)}


def _lengths(lengths: Array) -> Array:
    """Count sequences with a token by length bin."""
    n = lengths.astype(np.float64)
    return np.bincount((8 * np.log2(np.maximum(n, 1))).astype(np.int64), n > 0, LENGTH_BINS)


# ---------------------------------------------------------------- by step

LARGE = 1 << 62
"""Steps from here on are in no group."""


def _of_steps(terms: Terms, drifts: Sequence[Drift], columns: Mapping[str, Array]) -> dict[str, Array]:
    """Return what is summed by step beside presets, [S] each; K3 and tokens also by position."""
    batch, there = terms.batch, columns["sequences"]
    found = {name: columns[name] for name in ("tokens", "sequences")}
    for drift in drifts:
        names = OF_STEPS if drift is drifts[0] else ("d", "k3")
        found |= {drift.prefix + name: columns[drift.prefix + name] for name in names}
    if batch.rewards is not None:
        found["reward"] = batch.rewards * there
    if (lags := batch.scalars.get("policy_lag")) is not None:
        known = np.array([type(lag) is int for lag in lags], np.float64)
        lag = np.array([lag if type(lag) is int else 0 for lag in lags], np.float64)
        found |= {"lagged": known, "lag": lag, "lag2": lag * lag}
    row = np.repeat(np.arange(batch.sequences), batch.lengths)
    codes, many = row * POSITIONS + breakdowns.position(batch), batch.sequences * POSITIONS
    for name, x in (("k3", terms.k3), ("tokens", None)):
        of_places = np.bincount(codes, x, many).astype(np.float64).reshape(-1, POSITIONS).T
        found |= {f"{name}@{at}": one for at, one in enumerate(np.ascontiguousarray(of_places))}
    return found


def _by_step(terms: Terms, columns: Mapping[str, Array], buckets: Array) -> dict[str, Table]:
    """Sum columns [S] in groups of steps, with Σw and Σw² of sequence weights and the largest Δ of tokens."""
    batch, delta, total = terms.batch, terms.delta, columns[f"{terms.drift.prefix}d"]
    given = batch.scalars.get("step", ())
    steps = np.array([x if type(x) is int and abs(x) < LARGE else LARGE for x in given], np.int64)
    rows, width = np.flatnonzero(steps < LARGE), 1
    if not len(rows):
        return {}
    while len(np.unique(steps[rows] // width)) > MOST_STEPS:
        width *= 2
    steps = steps // width * width
    of_tokens, labels = np.repeat(steps, batch.lengths), np.unique(steps[rows])
    if (of_tokens[1:] < of_tokens[:-1]).any():
        order = np.argsort(of_tokens, kind="stable")
        delta, of_tokens = delta[order], of_tokens[order]
    ends = np.searchsorted(of_tokens, np.append(labels, LARGE))
    tops = np.stack([largest_of(delta[a:b], TOP) for a, b in pairwise(ends)], axis=1)
    logs = np.where(batch.lengths > 0, total, -np.inf)[rows]
    own, bound = (buckets[rows], steps[rows]), dict[str, Any](most=MOST_STEPS, width=width)
    return {
        "by_step": Table.of({name: x[rows] for name, x in columns.items()}, *own, **bound),
        "by_step.products": Table.of({"w": logs, "ww": 2 * logs}, *own, kind="logs", **bound),
        "by_step.largest": Table.best(tops, labels, **bound),
    }


# ---------------------------------------------------------------- reading


class Group(NamedTuple):
    """A group of steps: its ends, its sums, and its largest Δ."""

    first: int
    last: int
    reader: Reader
    largest: Array


@dataclass(frozen=True)
class Drawn:
    """The state that charts are read from, with the numbers that were read out.

    Attributes:
        drifts: those of the dump, the main one first.
        families: presets of which the tokens rejected are shown by step.
        reader: sums of the whole dump.
        result: what was read before.
    """

    state: State
    seed: int
    drifts: Sequence[Drift]
    families: Sequence[Preset]
    reader: Reader
    result: Result

    @property
    def prefix(self) -> str:
        """The prefix of the main drift."""
        return self.drifts[0].prefix

    @cached_property
    def synced(self) -> bool:
        """Whether any token is known to have lag 0."""
        return bool(self.state.counts["in_sync"].any())

    @cached_property
    def groups(self) -> list[Group]:
        """The groups of steps, rising."""
        tables = self.state.tables
        if "by_step" not in tables:
            return []
        found, products = [], tables["by_step.products"].by_place()
        for at, (first, sums) in enumerate(tables["by_step"].by_place().items()):
            reader = Reader.of(sums, self.seed, self.among(sums.sums()["sequences"]))
            reader = replace(reader, drawn={**reader.drawn, **products[first].drawn(self.seed)})
            top = tables["by_step.largest"].values[:, at]
            found.append(Group(first, first + sums.width - 1, reader, top))
        return found

    def among(self, sequences: float) -> int:
        """Return the most groups that some sequences may be of."""
        return min(self.reader.groups.many, round(sequences))

    def corner(self, tokens: float, k3: float) -> shown.Corner:
        """Return some tokens and their ΣK3 as shares of the dump's."""
        many, whole = (float(self.reader.column(name, self.prefix)[0]) for name in ("tokens", "k3"))
        return shown.Corner(tokens=round(tokens), share=tokens / many, k3_share=_share(k3, whole))


def charts_of(drawn: Drawn) -> shown.Charts:
    """Read out every chart."""
    steps, counts = _steps(drawn), drawn.state.counts
    crossings = list(_crossings(steps)) if steps else []
    tokens, r1, r11, k3 = counts["between"]
    under, over = np.searchsorted(EDGES, (-math.log(2), math.log(2))) + 1  # the first bins from r = ½, and 2
    density = counts["density"].astype(np.int64).reshape(BINS, BINS)
    above, of_tokens = _thresholds(THRESHOLDS, np.stack((tokens, tokens + r1, tokens + 2 * r1 + r11)))
    return shown.Charts(
        crossings=crossings,
        steps=steps,
        less=drawn.corner(tokens[:under].sum(), k3[:under].sum()),
        more=drawn.corner(tokens[over:].sum(), k3[over:].sum()),
        density=shown.Density(edges=[0.0, *map(math.exp, DENSITY_LOGS), 1.0], counts=density.tolist()),
        lost=drawn.corner(*counts["corner"]),
        noise=_noise(drawn),
        positions=positions(drawn, crossings),
        token_thresholds=shown.TokenThresholds(
            b=list(THRESHOLDS), ess_tokens=of_tokens, truncated=above.tolist(), kept=_within(tokens)
        ),
        tails=_tails(drawn),
        lag=_lag_evidence(drawn, steps),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share(part: float, whole: float) -> float | None:
    return _finite(part / whole) if whole else None


def _series(numbers: Sequence[Number], unit: str) -> shown.Series:
    """Gather numbers along an axis; without intervals where none has one."""
    low, high = ([one.interval and one.interval[end] for one in numbers] for end in (0, 1))
    known, values = any(one.interval for one in numbers), [one.value for one in numbers]
    return shown.Series(unit=unit, values=values, low=low if known else [], high=high if known else [])


# ---------------------------------------------------------------- by step

_OF_STEPS = (
    *(row for row in gap.ROWS if row.name in ("k1", "k3", "mean_ratio", "chi2_token", "ppl_ratio", "f_2")),
    ESS_TOKENS,
    gap.CHI2_SEQUENCE,
)
_KL = {row.name: row for row in _OF_STEPS if row.name in ("k1", "k3")}
_PLAIN = {
    "reward": Formula("reward", "", "sequences", "mean reward", mean("reward", "sequences"), AS_SEEN),
    "lag": Formula("policy_lag", "updates", "sequences", "mean policy lag", mean("lag", "lagged"), AS_SEEN),
}
"""Column → the number that it gives, of dumps that have it."""
_REJECTED = next(row for row in preset_numbers.ROWS if row.name == "tokens_rejected")


def _steps(drawn: Drawn) -> shown.BySteps | None:
    """Read the numbers of every group of steps."""
    groups = drawn.groups
    if not groups:
        return None
    rows = {row.name: (row, drawn.prefix) for row in _OF_STEPS} | {ESS_SEQUENCES.name: (ESS_SEQUENCES, "")}
    rows |= {row.name: (row, "") for column, row in _PLAIN.items() if column in groups[0].reader.drawn}
    rows |= {one.prefix + name: (row, one.prefix) for one in drawn.drifts[1:] for name, row in _KL.items()}
    for preset in drawn.families:
        row = replace(_REJECTED, counts=_REJECTED.name not in preset_numbers.idle(preset))
        rows[f"{preset.name}.{row.name}"] = row, f"{preset.name}|"
    read = []
    for _, _, reader, top in groups:
        values = np.stack([row.of(partial(reader.column, prefix=own)) for row, own in rows.values()])
        numbers = reader.wrapped([row for row, _ in rows.values()], values)
        read.append([*numbers, _khat(reader.drawn["tokens"][0], top)])
    series = dict(zip((*rows, "khat_tokens"), zip(*read, strict=True), strict=True))
    return shown.BySteps(
        first=[group.first for group in groups],
        last=[group.last for group in groups],
        tokens=[round(float(group.reader.drawn["tokens"][0])) for group in groups],
        sequences=[round(float(group.reader.drawn["sequences"][0])) for group in groups],
        series={name: _series(numbers, numbers[0].unit) for name, numbers in series.items()},
    )


def _khat(n: float, kept: Array) -> Number:
    """Return k̂ of n log-weights, of which the largest are known; -inf is no weight."""
    fitted = tails.fit(kept, int(n))
    return Number(value=None) if fitted is None else _estimate(fitted)


def _estimate(fitted: tails.Fit) -> Number:
    half = 1.96 * abs(1 + fitted.k) / math.sqrt(len(fitted.logs))
    return Number(value=fitted.k, interval=(fitted.k - half, fitted.k + half))


def _crossings(steps: shown.BySteps) -> Iterator[shown.Crossing]:
    """Yield the first step at which K3 is in a band worse than at all steps before, band by band."""
    worst, rows = -1, metrics.BANDS["k3"]
    for first, value in zip(steps.first, steps.series["k3"].values, strict=True):
        row = metrics.band("k3", Number(value=value))
        at = worst if row is None else rows.index(row)
        for worse in rows[worst + 1 : at + 1] if worst >= 0 else ():
            bound = metrics.start(worse)
            assert bound is not None  # only the best band begins nowhere
            yield shown.Crossing(band=worse.name, bound=bound, step=first)
        worst = max(at, worst)


# ---------------------------------------------------------------- bins of tokens


def _noise(drawn: Drawn) -> shown.Noise:
    out, synced = drawn.state.counts["noise"].reshape(2, -1, SIZES)
    every = out + synced
    return shown.Noise(
        edges=[0.0, *map(math.exp, NOISE_LOGS), 1.0],
        median=_quantiles(every, 0.5),
        p90=_quantiles(every, 0.9),
        p99=_quantiles(every, 0.99),
        in_sync_tokens=[round(n) for n in synced.sum(1).tolist()] if drawn.synced else [],
        in_sync_p90=_quantiles(synced, 0.9) if drawn.synced else [],
    )


def _quantiles(counts: Array, q: float) -> list[float | None]:
    """Compute a quantile of |Δ| of each row of counts [Q, SIZES]; null in an empty row."""
    inner = 2.0 ** np.arange(*OCTAVES)[:, None] * (1 + np.arange(PER_OCTAVE) / PER_OCTAVE)
    edges = [0.0, *inner.flatten().tolist(), 2.0 ** OCTAVES[1], math.inf]
    return [_quantile(row, edges[:-1], edges[1:], q) for row in counts]


def _quantile(counts: Array, low: Sequence[float], high: Sequence[float], q: float) -> float | None:
    """Compute a quantile of binned values [N], linear within a bin; None if there are none."""
    total, below = float(counts.sum()), np.cumsum(counts)
    if not total:
        return None
    at = int(np.searchsorted(below, q * total))
    part = (q * total - (float(below[at]) - float(counts[at]))) / float(counts[at])
    return low[at] if math.isinf(high[at]) else low[at] + (high[at] - low[at]) * part


def in_sync(drawn: Drawn, edges: Sequence[float]) -> list[int]:
    """Count the tokens with lag 0 between edges, which are the ends of Δ and edges of the lattice."""
    if not drawn.synced:
        return []
    below = np.concatenate(([0.0], np.cumsum(drawn.state.counts["in_sync"])))
    cuts = [0, *np.searchsorted(tails.edges(), edges[1:-1]), tails.SIZE]
    return [round(count) for count in np.diff(below[cuts]).tolist()]


def _thresholds(thresholds: Sequence[float], sums: Array) -> tuple[Array, list[float | None]]:
    """Apply N thresholds b to Σ1, Σw and Σw² between their edges, [3, 2N + 1].

    Returns:
        The share that is above each b, and ESS of min(w, b), [N] each.
    """
    b, below = np.array(thresholds), np.cumsum(sums, axis=1)[:, len(thresholds) : -1]
    n = sums[0].sum()
    above = n - below[0]
    once, twice = below[1] + above * b, below[2] + above * b * b
    ess = [_share(x, n * xx) for x, xx in zip((once * once).tolist(), twice.tolist(), strict=True)]
    return above / n, ess


def _within(x: Array) -> list[float]:
    """Return the share of x, [2N + 1] between edges, that lies from 1/b to b, for N thresholds."""
    below, many = np.cumsum(x), len(x) // 2
    shares: list[float] = ((below[many:-1] - below[:many][::-1]) / below[-1]).tolist()
    return shares


# ---------------------------------------------------------------- by position and step


def positions(drawn: Drawn, crossings: Sequence[shown.Crossing]) -> shown.Positions | None:
    """Read out K3 by position: of all steps, and before and after the mismatch grew."""
    axis, groups = breakdowns.POSITION, drawn.groups
    places = {place.key: place for place in drawn.result.at(axis.name)}
    if not places:
        return None
    labels = axis.labels[: 1 + max(axis.labels.index(key) for key in places)]
    k3 = [places[key].numbers["k3"] if key in places else Number() for key in labels]
    tokens = [places[key].tokens if key in places else 0 for key in labels]
    every = shown.PositionSteps(first_step=None, last_step=None, tokens=tokens, k3=_series(k3, "nats"))
    result = shown.Positions(labels=list(labels), every=every)
    if len(groups) < 2:
        return result
    at = (len(groups) + 1) // 2
    if crossings and crossings[-1].step > groups[0].first:
        at = [group.first for group in groups].index(crossings[-1].step)
    early, late = (_of_groups(drawn, some, len(labels)) for some in (groups[:at], groups[at:]))
    return result.model_copy(update={"early": early, "late": late})


def _of_groups(drawn: Drawn, groups: Sequence[Group], many: int) -> shown.PositionSteps:
    """Read K3 at the first `many` positions, in some groups of steps."""
    first, last = groups[0].first, groups[-1].last
    sums = reduce(Table.merge, (drawn.state.tables["by_step"].at(group.first) for group in groups))
    reader = Reader.of(sums, drawn.seed, drawn.among(sums.sums()["sequences"]))
    tokens = [reader.drawn[f"tokens@{at}"] for at in range(many)]
    values = np.stack([reader.drawn[f"k3@{at}"] / n for at, n in enumerate(tokens)])
    return shown.PositionSteps(
        first_step=first,
        last_step=last,
        tokens=[round(float(n[0])) for n in tokens],
        k3=_series(reader.wrapped([_KL["k3"]] * many, values), "nats"),
    )


# ---------------------------------------------------------------- tails, lengths

POINTS = 60
"""Most points of a tail."""


def _tails(drawn: Drawn) -> dict[str, shown.ParetoTail]:
    """Read the largest weights of tokens and sequences, and the tails fitted to them."""
    found = {}
    for over in ("tokens", "sequences"):
        top, n = drawn.state.largest[f"{drawn.prefix}tail.{over}"], int(drawn.reader.drawn[over][0])
        fitted = tails.fit(top, n)
        if fitted is None:
            continue
        k, size = fitted.k, len(fitted.logs)
        last, largest = min(size, int((top > -np.inf).sum())), float(top[0])
        ranks = sorted({round(last ** (i / (POINTS - 1))) for i in range(POINTS)})
        log = np.log((np.array(ranks) - 0.5) / size)  # of the share beyond
        beyond = np.expm1(-k * log) / k if k else -log
        logs = largest + np.log(math.exp(fitted.above - largest) + fitted.scale * beyond)
        found[drawn.prefix + over] = shown.ParetoTail(
            weights=n,
            khat=_estimate(fitted),
            limit=tails.limit(n),
            rank=ranks,
            log_weight=[float(top[rank - 1]) for rank in ranks],
            log_fitted=[_finite(x) for x in logs.tolist()],
        )
    return found


def lengths(drawn: Drawn) -> shown.Lengths:
    """Read out sequence weights by length, with k̂ of each, and the median length."""
    curve = breakdowns.curve(drawn.state, drawn.reader, drawn.seed)
    tops = zip(curve, drawn.state.largest[breakdowns.PREFIXES], strict=False)
    starts = [math.ceil(2 ** (at / 8) - 1e-9) for at in range(LENGTH_BINS + 1)]
    ends = [max(first, after - 1) for first, after in pairwise(starts)]
    median = _quantile(drawn.state.counts["lengths"], starts[:-1], ends, 0.5)
    return shown.Lengths(
        longest=breakdowns.longest(curve),
        curve=[at._replace(khat=_khat(at.sequences, top)) for at, top in tops],
        median=None if median is None else round(median),
    )


# ---------------------------------------------------------------- the cause


def _lag_evidence(drawn: Drawn, steps: shown.BySteps | None) -> shown.LagEvidence | None:
    """Read K3 in sync, and how it grows with the lag of the steps; None without lags."""
    if "policy_lag" not in drawn.result.axes:
        return None
    found = shown.LagEvidence()
    for zero in (place.numbers["k3"] for place in drawn.result.at("policy_lag") if place.key == "0"):
        whole = drawn.result.whole[f"{drawn.prefix}k3"].value
        found.in_sync = Number(value=zero.value, interval=zero.interval)
        found.in_sync_share = _share(zero.value, whole) if zero.value is not None and whole else None
    by_lag: dict[int, list[int]] = {}
    for at, group in enumerate(drawn.groups):
        many, lag, square = (float(group.reader.drawn[name][0]) for name in ("lagged", "lag", "lag2"))
        if many > 0 and lag % many == 0 and square * many == lag * lag:  # all have one
            by_lag.setdefault(int(lag / many), []).append(at)
    if steps is None or not by_lag:
        return found
    k3, level = steps.series["k3"].numbers(), found.in_sync.value if found.in_sync else None
    firsts = {lag: k3[at[0]].value for lag, at in sorted(by_lag.items()) if lag}
    ratios = {str(lag): _share(x, level) for lag, x in firsts.items() if level and x is not None}
    found.ratio_by_lag = {lag: ratio for lag, ratio in ratios.items() if ratio is not None}
    most = max(by_lag, key=lambda one: (len(by_lag[one]), one))
    if len(by_lag[most]) > 1:
        first, last = by_lag[most][0], by_lag[most][-1]
        found.lag, found.steps = most, (steps.first[first], steps.last[last])
        found.start, found.end = k3[first], k3[last]
        if found.start.value is not None and found.end.value is not None:
            found.growth = _share(found.end.value, found.start.value)
    return found
