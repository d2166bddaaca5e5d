"""What the charts of a report are drawn from: numbers by training step, histograms, tails, evidence of lag.

Steps are grouped by a power of two, one step a group at first, so that there are at most `MOST_STEP_GROUPS`;
the width follows from the steps of the dump, however it is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from offpol_diag import metrics
from offpol_diag import result as shown
from offpol_diag.core import breakdowns, gap, histograms, preset_numbers, tails
from offpol_diag.core.gap import Drift, Terms
from offpol_diag.core.histograms import EDGES, share
from offpol_diag.core.intervals import AS_SEEN, Formula, Reader, mean
from offpol_diag.core.places import LAG
from offpol_diag.core.state import MOST_STEP_GROUPS, Array, Table
from offpol_diag.core.study import Readout
from offpol_diag.number import Number
from offpol_diag.result import Lengths, Result

# ---------------------------------------------------------------- sums by step

OF_STEPS = ("log_ratio", "k3", "ratio_minus_1", "ratio_sq_minus_1", "f_2", "ppl_ratio", "chi2_sequence")
"""Columns of the main drift that are summed by step."""


def observe(
    terms: Terms,
    drifts: Sequence[Drift],
    columns: Mapping[str, Array],
    kept: Mapping[str, Array],
    buckets: Array,
) -> dict[str, Table]:
    """Sum by group of training steps.

    Args:
        terms: of the main drift.
        drifts: those that the dump has, the main one first.
        columns: sums of each sequence by drift's prefix and name, `tokens` and `sequences`, [S].
        kept: `PRESET|kept`, tokens that presets keep of each sequence, [S].
        buckets: what sums are kept apart for, [S].
    """
    batch, prefix = terms.tokens.batch, terms.drift.prefix
    given = batch.scalars.get("step", ())
    rows = np.flatnonzero([type(step) is int and abs(step) < 1 << 62 for step in given])
    if not len(rows):
        return {}
    names = ["tokens", "sequences", *(prefix + name for name in OF_STEPS)]
    names += [drift.prefix + name for drift in drifts[1:] for name in ("log_ratio", "k3")]
    found = {name: columns[name] for name in (*names, "reward") if name in columns} | {**kept}
    if (lags := batch.scalars.get(LAG)) is not None:
        lag = np.array([float(lag) if type(lag) is int else math.nan for lag in lags])
        known = np.isfinite(lag).astype(np.float64)
        found |= {"lagged": known, "lag": np.nan_to_num(lag), "lag2": np.nan_to_num(lag) ** 2}
    products = tails.products(terms, columns[f"{prefix}log_ratio"])
    steps = np.array([given[row] for row in rows], np.int64)
    by_group = partial(Table.of, buckets=buckets[rows], places=steps, most=MOST_STEP_GROUPS, width=1)
    return {
        "by_step": by_group({name: x[rows] for name, x in found.items()}),
        "by_step.products": by_group({name: x[rows] for name, x in products.items()}, kind="logs"),
    }


# ---------------------------------------------------------------- reading


class Group(NamedTuple):
    """A group of steps: its ends, its sums as they are kept, and as they are read."""

    first: int
    last: int
    sums: Table
    reader: Reader


def charts_of(out: Readout, result: Result) -> shown.Charts:
    """Read out every chart; `result` has the numbers of the dump and its places."""
    counts, prefix, groups = out.state.counts, out.study.main.prefix, _groups(out)
    steps = _steps(out, groups) if groups else None
    tokens, (lost, k3) = counts["between"][0], counts["lost"].tolist()
    under, over = np.searchsorted(EDGES, (-math.log(2), math.log(2))) + 1  # the first bins from r = ½, and 2
    many, whole = float(tokens.sum()), out.reader.sum(f"{prefix}k3")
    return shown.Charts(
        crossings=list(_crossings(steps)) if steps else [],
        steps=steps,
        log_ratios=histograms.log_ratios(
            counts[f"{prefix}bins.log_ratio"], out.state.ranges[f"{prefix}log_ratio"], counts["in_sync"]
        ),
        less=share(float(tokens[:under].sum()), many),
        more=share(float(tokens[over:].sum()), many),
        density=histograms.density(counts["density"]),
        lost=shown.Corner(round(lost), share=lost / many, k3_share=share(k3, whole)),
        noise=histograms.noise(counts["noise"]),
        token_thresholds=histograms.token_thresholds(counts["between"]),
        tails=_tails(out),
        lag=_lag_evidence(result, groups, steps),
    )


def _series(numbers: Sequence[Number]) -> list[Number]:
    """Return numbers along an axis without their notes: values, intervals and units."""
    return [Number(one.value, one.interval, one.unit) for one in numbers]


# ---------------------------------------------------------------- by step

_ROWS = {row.name: row for row in (*gap.ROWS, gap.CHI2_SEQUENCE, tails.ESS_TOKENS, tails.ESS_SEQUENCES)}
_MAIN = (
    *("k1", "k3", "mean_ratio", "chi2_token", "ppl_ratio", "f_2"),
    *("ess_tokens", "chi2_sequence", "ess_sequences"),
)
_REJECTED = next(row for row in preset_numbers.ROWS if row.name == "tokens_rejected")
_OF_DUMP = {
    "reward": Formula("reward", "mean reward", mean("reward", "sequences"), "", "sequences", AS_SEEN),
    "lag": Formula(LAG, "mean policy lag", mean("lag", "lagged"), "updates", "sequences", AS_SEEN),
}
"""Column → the number that it gives, of dumps that have it."""


def _reader(out: Readout, sums: Table) -> Reader:
    """Read sums of some steps, of no more groups than they have sequences."""
    return Reader.of(sums, out.study.seed, min(out.state.many, round(sums.sums()["sequences"])))


def _groups(out: Readout) -> list[Group]:
    """Return the groups of steps, rising; none of a dump without steps."""
    found, tables = list[Group](), out.state.tables
    products = tables["by_step.products"].by_place() if "by_step" in tables else {}
    for first, sums in tables["by_step"].by_place().items() if products else ():
        reader = _reader(out, sums)
        reader = replace(reader, drawn={**reader.drawn, **products[first].drawn(out.study.seed)})
        found.append(Group(first, first + sums.width - 1, sums, reader))
    return found


def _steps(out: Readout, groups: Sequence[Group]) -> shown.BySteps:
    """Read the numbers of every group of steps."""
    main, *others = (drift.prefix for drift in out.study.drifts)
    rows = {name: (_ROWS[name], main) for name in _MAIN}
    rows |= {row.name: (row, "") for column, row in _OF_DUMP.items() if column in groups[0].reader.drawn}
    rows |= {prefix + name: (_ROWS[name], prefix) for prefix in others for name in ("k1", "k3")}
    for preset in out.study.families:
        row = preset_numbers.row_of(_REJECTED, preset)
        rows[f"{preset.name}.{row.name}"] = row, f"{preset.name}|"
    numbers = zip(*(group.reader.all([*rows.values()]) for group in groups), strict=True)
    return shown.BySteps(
        first=[group.first for group in groups],
        last=[group.last for group in groups],
        series={name: _series(some) for name, some in zip(rows, numbers, strict=True)},
    )


def _crossings(steps: shown.BySteps) -> Iterator[tuple[str, float, int]]:
    """Yield the first step at which K3 is in a band worse than at all steps before, band by band."""
    worst, rows = -1, metrics.BANDS["k3"]
    for first, number in zip(steps.first, steps.series["k3"], strict=True):
        row = metrics.band("k3", number)
        at = worst if row is None else rows.index(row)
        for worse in rows[worst + 1 : at + 1] if worst >= 0 else ():
            yield worse.name, worse.low or 0.0, first
        worst = max(at, worst)


# ---------------------------------------------------------------- tails, lengths

POINTS = 60
"""Most points of a tail."""


def _tails(out: Readout) -> dict[str, shown.ParetoTail]:
    """Read the largest weights of tokens and sequences, and the tails fitted to them."""
    found, prefix = {}, out.study.main.prefix
    for over in ("tokens", "sequences"):
        top, n = out.state.top(f"{prefix}tail.{over}"), int(out.reader.sum(over))
        fitted = tails.fit(top, n)
        if fitted is None:
            continue
        k, size = fitted.k, len(fitted.logs)
        half = 1.96 * abs(1 + k) / math.sqrt(size)  # weights taken as independent
        last, largest = min(size, len(top)), float(top[0])
        ranks = sorted({round(last ** (i / (POINTS - 1))) for i in range(POINTS)})
        log = np.log((np.array(ranks) - 0.5) / size)  # of the share beyond
        beyond = np.expm1(-k * log) / k if k else -log
        logs = largest + np.log(math.exp(fitted.above - largest) + fitted.scale * beyond)
        found[prefix + over] = shown.ParetoTail(
            weights=n,
            khat=Number(value=k, interval=(k - half, k + half)),
            limit=tails.limit(n),
            points=[
                (rank, float(top[rank - 1]), x if math.isfinite(x) else None)
                for rank, x in zip(ranks, logs.tolist(), strict=True)
            ],
        )
    return found


def lengths(out: Readout) -> Lengths:
    """Read out sequence weights by length, and the median length."""
    curve, median = breakdowns.curve(out), histograms.median_length(out.state.counts["lengths"])
    return Lengths(longest=breakdowns.longest(curve), curve=curve, median=median)


# ---------------------------------------------------------------- the cause


def _lag_evidence(
    result: Result, groups: Sequence[Group], steps: shown.BySteps | None
) -> shown.LagEvidence | None:
    """Read K3 in sync, and how it grows with the lag of the steps; None without lags."""
    if LAG not in result.axes:
        return None
    found = shown.LagEvidence()
    for k3 in (place.numbers["k3"] for place in result.at(LAG) if place.key == "0"):
        whole = result.whole[f"{result.prefix}k3"].value
        found.in_sync = Number(value=k3.value, interval=k3.interval)
        found.in_sync_share = share(k3.value, whole) if k3.value is not None and whole else None
    by_lag: dict[int, list[int]] = {}
    for at, group in enumerate(groups):
        many, lag, square = (group.reader.sum(name) for name in ("lagged", "lag", "lag2"))
        if many > 0 and lag % many == 0 and square * many == lag * lag:  # all sequences have one lag
            by_lag.setdefault(int(lag / many), []).append(at)
    lag_of_most = max(by_lag, key=lambda lag: (len(by_lag[lag]), lag), default=0)
    if steps is not None and len(at_lag := by_lag.get(lag_of_most, [])) > 1:
        first, last = at_lag[0], at_lag[-1]
        found.lag, found.steps = lag_of_most, (steps.first[first], steps.last[last])
        found.start, found.end = steps.series["k3"][first], steps.series["k3"][last]
        if found.start.value is not None and found.end.value is not None:
            found.growth = share(found.end.value, found.start.value)
    return found
