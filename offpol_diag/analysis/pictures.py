"""Read out what the pictures of a report are drawn from: the arrays of `engine.charts` as `Charts`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from offpol_diag import metrics
from offpol_diag.core.intervals import AS_SEEN, Formula, Groups, Reader, mean
from offpol_diag.core.study import Study
from offpol_diag.engine import (
    breakdowns,
    charts,
    gap,
    loglattice,
    method,
    prefixes,
    stepgroups,
    tails,
)
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tails import ESS_SEQUENCES, ESS_TOKENS, Tail
from offpol_diag.engine.tally import Arrays, Tally
from offpol_diag.number import Number, Numbers
from offpol_diag.result import (
    BySteps,
    Charts,
    Corner,
    Crossing,
    Density,
    LagEvidence,
    Lengths,
    Noise,
    ParetoTail,
    Positions,
    PositionSteps,
    PresetFacts,
    RangeOfRatios,
    Result,
    SequenceThresholds,
    Series,
    TokenThresholds,
    TokenType,
    TokenTypes,
)

POINTS = 60
"""Most points of a tail."""
TYPES = 20
"""Most token ids listed."""


@dataclass(frozen=True)
class Drawn:
    """The tally that pictures need, with its sums and the numbers that were read out."""

    study: Study
    tally: Tally
    reader: Reader
    result: Result

    @property
    def sums(self) -> dict[str, Array]:
        """Arrays of the whole dump that were added up."""
        return self.tally.whole.sums

    @cached_property
    def synced(self) -> float:
        """Number of tokens with lag 0; 0 where no lag is known."""
        return float(self.sums["in_sync"].sum())

    def tail(self, prefix: str, over: str) -> Tail:
        """Return the largest log-weights of a drift, over tokens or sequences."""
        return Tail.read(self.tally.whole.largest[f"{prefix}tail.{over}"], float(self.reader.drawn[over][0]))

    @cached_property
    def k3(self) -> float:
        """ΣK3 over all tokens."""
        return float(self.reader.column("k3", self.study.main.prefix)[0])

    @cached_property
    def tokens(self) -> float:
        """Number of tokens."""
        return float(self.reader.drawn["tokens"][0])

    @cached_property
    def groups(self) -> list[tuple[int, int, Arrays]]:
        """First and last step of each group of steps, and what was kept; rising."""
        result = self.tally.by_key.get("step_groups")
        return list(stepgroups.groups(result)) if result else []


def charts_of(drawn: Drawn) -> Charts:
    """Read out every picture."""
    steps = _by_steps(drawn)
    crossings = list(_crossings(steps)) if steps else []
    main = drawn.study.main
    known = {main.prefix + over: _tail(drawn.tail(main.prefix, over)) for over in ("tokens", "sequences")}
    return Charts(
        bands=list(_bands(drawn)),
        crossings=crossings,
        steps=steps,
        gap_shares=gap_shares(drawn),
        ranges=_ranges(drawn),
        density=_density(drawn),
        lost=_corner(drawn, 0),
        found=_corner(drawn, 1),
        noise=_noise(drawn),
        positions=positions(drawn, crossings),
        token_thresholds=_token_thresholds(drawn),
        sequence_thresholds=_sequence_thresholds(drawn),
        tails={name: tail for name, tail in known.items() if tail},
        token_types=_token_types(drawn),
        lag=_lag_evidence(drawn, steps),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share(part: float, whole: float) -> float | None:
    return _finite(part / whole) if whole else None


def _series(numbers: Sequence[Number | Number], unit: str) -> Series:
    """Gather numbers along an axis; without intervals where none has one."""
    ends = [number.interval or (None, None) for number in numbers]
    known = any(number.interval for number in numbers)
    return Series(
        unit=unit,
        values=[number.value for number in numbers],
        low=[low for low, _ in ends] if known else [],
        high=[high for _, high in ends] if known else [],
    )


# ---------------------------------------------------------------- bands

_TAIL = "Vehtari et al. 2024"
_LIMIT = "0.7, or 1 − 1/log₁₀ n of n weights where that is lower"


def _bands(drawn: Drawn) -> Iterator[metrics.Band]:
    """Yield all bands as ranges of values, best first within a metric."""
    for rows in metrics.BANDS.values():
        yield from rows
    for over in ("tokens", "sequences"):
        limit = tails.limit(int(drawn.reader.drawn[over][0]))
        for name, above in (("good", False), ("unreliable", True)):
            low, high = (limit, None) if above else (None, limit)
            metric = f"khat_{over}"
            yield metrics.Band(metric=metric, name=name, low=low, high=high, regime=_LIMIT, source=_TAIL)


def _crossings(steps: BySteps) -> Iterator[Crossing]:
    """Yield the first step at which a number is in a band worse than at all steps before, band by band."""
    for metric, rows in metrics.BANDS.items():
        worst = -1
        for first, value in zip(steps.first, steps.series[metric].values, strict=True):
            row = metrics.band(metric, Number(value=value))
            at = worst if row is None else rows.index(row)
            for worse in rows[worst + 1 : at + 1] if worst >= 0 else ():
                bound = metrics.start(worse)
                assert bound is not None  # only the best band begins nowhere
                yield Crossing(metric=metric, band=worse.name, bound=bound, step=first)
            worst = max(at, worst)


# ---------------------------------------------------------------- by step

_OF_STEPS = (
    *(row for row in gap.ROWS if row.name in ("k1", "k3", "mean_ratio", "chi2_token", "ppl_ratio", "f_2")),
    ESS_TOKENS,
    gap.CHI2_SEQUENCE,
)
_PLAIN = (
    Formula("reward", "", "sequences", "mean reward", mean("reward", "sequences"), AS_SEEN),
    Formula("policy_lag", "updates", "sequences", "mean policy lag", mean("lag", "lagged"), AS_SEEN),
)
_NEEDS = {"reward": "reward", "policy_lag": "lag"}
_REJECTED = next(row for row in method.ROWS if row.name == "tokens_rejected")


def _by_steps(drawn: Drawn) -> BySteps | None:
    groups = drawn.groups
    if not groups:
        return None
    read = [_of_step(drawn, step) for _, _, step in groups]
    units = {name: number.unit for one in read for name, number in one.items()}
    sizes = [step.read("columns") for _, _, step in groups]
    blank = Number(value=None)
    return BySteps(
        first=[first for first, _, _ in groups],
        last=[last for _, last, _ in groups],
        tokens=[round(float(sums["tokens"][0])) for sums in sizes],
        sequences=[round(float(sums["sequences"][0])) for sums in sizes],
        series={name: _series([one.get(name, blank) for one in read], unit) for name, unit in units.items()},
    )


def _reader(drawn: Drawn, sums: Mapping[str, Array]) -> Reader:
    """Read the sums of some sequences, which have at most as many groups as they are."""
    many = min(drawn.reader.groups.many, round(float(sums["sequences"][0])))
    return Reader(sums, Groups.drawn(sums["tokens"], many))


def _of_step(drawn: Drawn, step: Arrays) -> Numbers:
    """Read the numbers of a group of steps."""
    sums = step.read("columns")
    reader, prefix = _reader(drawn, sums), drawn.study.main.prefix
    rows = [(row.name, row, prefix) for row in _OF_STEPS]
    rows += [(row.name, row, "") for row in _PLAIN if _NEEDS[row.name] in sums]
    kl = [row for row in _OF_STEPS if row.name in ("k1", "k3")]
    rows += [(drift.prefix + row.name, row, drift.prefix) for drift in drawn.study.drifts[1:] for row in kl]
    for preset in drawn.study.families:
        read = method.row_of(_REJECTED, method.idle(preset))
        rows.append((f"{preset.name}.{_REJECTED.name}", read, f"{preset.name}|"))
    values = [row.of(partial(reader.column, prefix=own)) for _, row, own in rows]
    rows.append((ESS_SEQUENCES.name, ESS_SEQUENCES, ""))
    values.append(tails.ess_of_sequences(reader, step.log_sums["products"]))
    names, formulas, _ = zip(*rows, strict=True)
    result = dict(zip(names, reader.wrapped(formulas, np.stack(values)), strict=True))
    of = {f"khat_{over}": _khat(sums[over][0], step.largest[over]) for over in ("tokens", "sequences")}
    return result | of


def _khat(n: float, kept: Array) -> Number:
    """Number k̂ of n log-weights, of which the largest are known; -inf is no weight."""
    fitted = tails.fit(Tail.read(kept, n))
    return Number(value=None) if fitted is None else _estimate(fitted)


def _estimate(fitted: tails.Fit) -> Number:
    half = 1.96 * abs(1 + fitted.k) / math.sqrt(len(fitted.logs))
    return Number(value=fitted.k, interval=(fitted.k - half, fitted.k + half))


def gap_shares(drawn: Drawn) -> dict[str, Number]:
    """Read out which share of K1 from rollout to current each of the two drifts has."""
    prefixes = [drift.prefix for drift in drawn.study.drifts]
    if prefixes != ["", "drift2.", "total."]:
        return {}
    result = {}
    for name, prefix in (("rollout_old", ""), ("old_current", "drift2.")):
        values = drawn.reader.drawn[f"{prefix}d"] / drawn.reader.drawn["total.d"]
        value = _finite(float(values[0]))
        around = None if value is None else drawn.reader.around(values)
        result[name] = Number(value=value, interval=around)
    return result


# ---------------------------------------------------------------- bins of tokens


_RANGES = (-1000.0, -100.0, -10.0, -2.0, 2.0, 10.0, 100.0)
"""Bounds of the ranges of r; a negative one is of 1/r."""


def _ranges(drawn: Drawn) -> list[RangeOfRatios]:
    between = drawn.sums["between"]
    logs = [math.copysign(math.log(abs(b)), b) for b in _RANGES]
    cuts = [0, *(charts.EDGES.index(x) + 1 for x in logs), between.shape[1]]
    bounds = [None, *(b if b > 0 else -1 / b for b in _RANGES), None]
    result = []
    for (first, last), (low, high) in zip(pairwise(cuts), pairwise(bounds), strict=True):
        tokens, _, _, k3 = between[:, first:last].sum(1).tolist()
        result.append(
            RangeOfRatios(
                low=low,
                high=high,
                tokens=round(tokens),
                share=tokens / drawn.tokens,
                k3_share=_share(k3, drawn.k3),
            )
        )
    return result


def _density(drawn: Drawn) -> Density:
    size = charts.BINS
    counts = drawn.sums["density"].round().astype(np.int64).reshape(size, size)
    return Density(edges=charts.probabilities(charts.DENSITY_LOGS), counts=counts.tolist())


def _corner(drawn: Drawn, at: int) -> Corner:
    tokens, k3 = drawn.sums["corners"][:, at].tolist()
    return Corner(tokens=round(tokens), share=tokens / drawn.tokens, k3_share=_share(k3, drawn.k3))


def _noise(drawn: Drawn) -> Noise:
    out, synced = drawn.sums["noise"].reshape(2, -1, charts.SIZES)
    every = out + synced
    return Noise(
        edges=charts.probabilities(charts.NOISE_LOGS),
        tokens=[round(n) for n in every.sum(1).tolist()],
        median=_quantiles(every, 0.5),
        p90=_quantiles(every, 0.9),
        p99=_quantiles(every, 0.99),
        in_sync_tokens=[round(n) for n in synced.sum(1).tolist()] if drawn.synced else [],
        in_sync_p90=_quantiles(synced, 0.9) if drawn.synced else [],
    )


def _quantiles(counts: Array, q: float) -> list[float | None]:
    """Compute a quantile of |Δ| of each row of counts [Q, N]; null in an empty row."""
    edges = charts.size_edges().tolist()
    return [_quantile(row, edges[:-1], edges[1:], q) for row in counts]


def _quantile(counts: Array, low: Sequence[float], high: Sequence[float], q: float) -> float | None:
    """Compute a quantile of binned values [N], linear within a bin; None if there are none."""
    total = float(counts.sum())
    if not total:
        return None
    below = np.cumsum(counts)
    at = int(np.searchsorted(below, q * total))
    part = (q * total - (float(below[at]) - float(counts[at]))) / float(counts[at])
    return low[at] if math.isinf(high[at]) else low[at] + (high[at] - low[at]) * part


def in_sync(drawn: Drawn, edges: Sequence[float]) -> list[int]:
    """Count the tokens with lag 0 between edges, which are the ends of Δ and edges of the lattice."""
    if not drawn.synced:
        return []
    counts = drawn.sums["in_sync"]
    below = np.concatenate(([0.0], np.cumsum(counts)))
    cuts = [0, *np.searchsorted(loglattice.edges(), edges[1:-1]), loglattice.SIZE]
    return [round(count) for count in np.diff(below[cuts]).tolist()]


# ---------------------------------------------------------------- by position and step


def positions(drawn: Drawn, crossings: Sequence[Crossing]) -> Positions | None:
    """Read out K3 by position: of all steps, and before and after the mismatch grew."""
    axis = breakdowns.TOKEN_AXES[0]
    places = {place.key: place for place in drawn.result.at(axis.name)}
    if not places:
        return None
    labels = axis.labels[: 1 + max(axis.labels.index(key) for key in places)]
    blank = Number()
    k3 = [places[key].numbers["k3"] if key in places else blank for key in labels]
    every = PositionSteps(
        first_step=None,
        last_step=None,
        tokens=[places[key].tokens if key in places else 0 for key in labels],
        k3=_series(k3, "nats"),
    )
    result = Positions(labels=list(labels), every=every)
    groups, many = drawn.groups, len(labels)
    if len(groups) < 2:
        return result
    at, why = _split(drawn, crossings)
    early, late = (_of_groups(drawn, some, many) for some in (groups[:at], groups[at:]))
    return result.model_copy(update={"early": early, "late": late, "split": why})


def _split(drawn: Drawn, crossings: Sequence[Crossing]) -> tuple[int, str]:
    """Return the group of steps from which on the mismatch is worse, and why it is that one."""
    firsts = [first for first, _, _ in drawn.groups]
    worst = [one for one in crossings if one.metric == "k3"]
    if worst and worst[-1].step > firsts[0]:
        return firsts.index(worst[-1].step), f"K3 passes {worst[-1].bound:g} at step {worst[-1].step}"
    return (len(firsts) + 1) // 2, "first and second half of the steps"


def _of_groups(drawn: Drawn, groups: Sequence[tuple[int, int, Arrays]], many: int) -> PositionSteps:
    each = [step.read("columns") for _, _, step in groups]
    names = [name for name in each[0] if "@" in name or name in ("tokens", "sequences")]
    reader = _reader(drawn, {name: sum((one[name] for one in each[1:]), each[0][name]) for name in names})
    tokens = [reader.drawn[f"tokens@{at}"] for at in range(many)]
    values = np.stack([reader.drawn[f"k3@{at}"] / n for at, n in enumerate(tokens)])
    row = next(row for row in gap.ROWS if row.name == "k3")
    k3 = _series(reader.wrapped([row] * many, values), "nats")
    counts = [round(float(n[0])) for n in tokens]
    return PositionSteps(first_step=groups[0][0], last_step=groups[-1][1], tokens=counts, k3=k3)


# ---------------------------------------------------------------- rules at many thresholds


def _token_thresholds(drawn: Drawn) -> TokenThresholds:
    tokens, r1, r11, _ = drawn.sums["between"]
    many, n = len(charts.THRESHOLDS), drawn.tokens
    ess, truncated, inside = [], [], []
    for i, b in enumerate(charts.THRESHOLDS):
        cut = many + 1 + i  # the first bin whose ratios are at least b
        above = float(tokens[cut:].sum())
        once = n - above + float(r1[:cut].sum()) + above * b
        twice = n - above + 2 * float(r1[:cut].sum()) + float(r11[:cut].sum()) + above * b * b
        ess.append(_share(once * once, n * twice))
        truncated.append(above / n)
        inside.append(float(tokens[many - i : cut].sum()) / n)
    return TokenThresholds(b=list(charts.THRESHOLDS), ess_tokens=ess, truncated=truncated, kept=inside)


def _sequence_thresholds(drawn: Drawn) -> SequenceThresholds:
    (product, nw, nww), geometric = drawn.sums["by_sum"], drawn.sums["by_mean"]
    many, tokens = len(charts.SEQUENCE_THRESHOLDS), float(product.sum())
    rows: dict[str, list[float | None]] = {name: [] for name in SequenceThresholds.model_fields}
    for i, b in enumerate(charts.SEQUENCE_THRESHOLDS):
        cut, first = many + 1 + i, many - i
        once, twice, above = (float(x.sum()) for x in (nw[:cut], nww[:cut], product[cut:]))
        rows["b"].append(b)
        rows["kept_geometric"].append(float(geometric[first:cut].sum()) / tokens)
        rows["kept_product"].append(float(product[first:cut].sum()) / tokens)
        rows["ess_tokens"].append(_share((once + above * b) ** 2, tokens * (twice + above * b * b)))
    return SequenceThresholds.model_validate(rows)


# ---------------------------------------------------------------- tails


def _tail(tail: Tail) -> ParetoTail | None:
    fitted = tails.fit(tail)
    if fitted is None:
        return None
    top, size = tail.kept, len(fitted.logs)
    largest = float(top[0])
    last = min(size, len(top))
    ranks = sorted({round(last ** (i / (POINTS - 1))) for i in range(POINTS)})
    cut = math.exp(fitted.above - largest)
    logs = []
    for rank in ranks:
        p = 1 - (rank - 0.5) / size
        beyond = math.expm1(-fitted.k * math.log1p(-p)) / fitted.k if fitted.k else -math.log1p(-p)
        logs.append(_finite(largest + math.log(cut + fitted.scale * beyond)))
    return ParetoTail(
        weights=tail.n,
        tail=size,
        khat=_estimate(fitted),
        limit=tails.limit(tail.n),
        rank=ranks,
        log_weight=[float(top[rank - 1]) for rank in ranks],
        log_fitted=logs,
    )


def lengths(drawn: Drawn) -> Lengths:
    """Read out sequence weights by length, with k̂ of each, the median length and the log-normal rule."""
    whole, k3 = drawn.tally.whole, drawn.result.whole[f"{drawn.study.main.prefix}k3"].value
    many, curve = whole.sums["prefixes.many"][:, 0].tolist(), list(prefixes.curve(drawn.reader, whole))
    tops = zip(curve, many, whole.largest["prefixes"], strict=False)
    return Lengths(
        longest=prefixes.longest(curve),
        curve=[at._replace(khat=_khat(n, row)) for at, n, row in tops],
        median=_median_length(drawn.sums["lengths"]),
        log_normal=_finite(math.log(10) / (2 * k3)) if k3 else None,
    )


def _median_length(sequences: Array) -> int | None:
    """Return the median length of sequences by length bin."""
    starts = [math.ceil(2 ** (at / 8) - 1e-9) for at in range(len(sequences) + 1)]
    low, high = starts[:-1], [max(first, after - 1) for first, after in pairwise(starts)]
    result = _quantile(sequences, low, high, 0.5)
    return None if result is None else round(result)


# ---------------------------------------------------------------- token ids


def _token_types(drawn: Drawn) -> TokenTypes | None:
    by_id = drawn.tally.by_key.get("token_ids")
    if not by_id:
        return None
    ids, values = by_id.keys, by_id.arrays.sums["terms"]
    total = float(values[:, 1].sum())
    k3 = values[:, 1]
    order = np.argsort(-k3, kind="stable")
    carried = np.cumsum(k3[order])
    worst = []
    for at in order[:TYPES].tolist():
        n, own, delta = values[at].tolist()
        if math.isfinite(own) and math.isfinite(delta):
            worst.append(
                TokenType(
                    token_id=int(ids[at]),
                    tokens=round(n),
                    share=n / drawn.tokens,
                    k3_share=_share(own, total),
                    k3=own / n,
                    mean_log_ratio=delta / n,
                )
            )
    half = int((carried < total / 2).sum()) + 1 if 0 < total < math.inf else None
    return TokenTypes(distinct=len(ids), half=half, worst=worst)


# ---------------------------------------------------------------- the cause


def _lag_evidence(drawn: Drawn, steps: BySteps | None) -> LagEvidence | None:
    if "policy_lag" not in drawn.result.axes:
        return None
    zero = next((place for place in drawn.result.at("policy_lag") if place.key == "0"), None)
    whole, level = drawn.result.whole[f"{drawn.study.main.prefix}k3"].value, None
    result: dict[str, Any] = {}
    if zero is not None:
        level, interval = zero.numbers["k3"].value, zero.numbers["k3"].interval
        result["in_sync"] = Number(value=level, interval=interval)
        result["in_sync_share"] = _share(level, whole) if level is not None and whole else None
    own = _steps_of_one_lag(drawn) if steps else []
    if steps is None or not own:
        return LagEvidence(**result)
    k3 = steps.series["k3"]
    by_lag: dict[int, list[int]] = {}
    for at, lag in enumerate(own):
        if lag is not None:
            by_lag.setdefault(lag, []).append(at)
    firsts = {lag: k3.values[at[0]] for lag, at in sorted(by_lag.items()) if lag}
    ratios = {str(lag): _share(x, level) for lag, x in firsts.items() if level and x is not None}
    result["ratio_by_lag"] = {lag: ratio for lag, ratio in ratios.items() if ratio is not None}
    most = max(by_lag, key=lambda one: (len(by_lag[one]), one), default=None)
    if most is not None and len(by_lag[most]) > 1:
        first, last = by_lag[most][0], by_lag[most][-1]
        start, end = _at(k3, first), _at(k3, last)
        growth = None if start.value is None or end.value is None else _share(end.value, start.value)
        ends = (steps.first[first], steps.last[last])
        result |= {"lag": most, "steps": ends, "start": start, "end": end, "growth": growth}
    return LagEvidence(**result)


def _at(series: Series, at: int) -> Number:
    low, high = (series.low[at], series.high[at]) if series.low else (None, None)
    between = None if low is None or high is None else (low, high)
    return Number(value=series.values[at], interval=between)


def _steps_of_one_lag(drawn: Drawn) -> list[int | None]:
    """Return the lag of each group of steps; None where its sequences have several, or none is known."""
    result: list[int | None] = []
    for _, _, step in drawn.groups:
        sums = step.read("columns")
        if "lag" not in sums:
            return []
        many, lag, square = (float(sums[name][0]) for name in ("lagged", "lag", "lag2"))
        one = many > 0 and lag % many == 0 and square * many == lag * lag
        result.append(int(lag / many) if one else None)
    return result


# ---------------------------------------------------------------- presets with equal numbers


def same_as(presets: Mapping[str, PresetFacts], numbers: Mapping[str, Numbers]) -> dict[str, PresetFacts]:
    """Name in each preset the first one with the same numbers on this dump."""
    first: dict[tuple[object, ...], str] = {}
    result = {}
    for name, one in presets.items():
        key = tuple((metric, number.value, number.interval) for metric, number in numbers[name].items())
        earlier = first.setdefault(key, name) if key else name
        result[name] = one if earlier == name else one.model_copy(update={"same_as": earlier})
    return result
