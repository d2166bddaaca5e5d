"""The numbers of each threshold, from the sums of a sweep, and the warnings about thresholds.

A point is marked where its threshold drops long responses (`length`), lies below the noise (`floor`) or
misses the data (`centre`); each kind of warning has a sentence if it is the preset's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from offpol_diag.engine import loglattice, method, residual
from offpol_diag.engine.formula import POSITIVE, Formula, Reader, mean, plain
from offpol_diag.engine.segments import Array
from offpol_diag.engine.selection import SampledGroups, by_quartile, quartile_parts
from offpol_diag.engine.tally import Tally
from offpol_diag.numerals import say, say_value
from offpol_diag.presets import Reject
from offpol_diag.summary import NoiseFloor, Number, SolvedWindow, SweptPoint
from offpol_diag.sweep.evaluate import BITS, COLUMNS, LOGIT, Plan, Stored, in_statistic, of_logits
from offpol_diag.sweep.thresholds import LOGARITHMIC

KNOWN = {row.name: row for row in (*method.ROWS, *residual.ROWS)}

ROWS = (
    Formula("tokens_kept", "fraction", "tokens", "share of tokens left", mean("kept"), counts=True),
    Formula(
        "sequences_kept",
        "fraction",
        "sequences",
        "share with a token left",
        mean("left", "sequences"),
        counts=True,
    ),
    KNOWN["ess_tokens"],
    KNOWN["ess_sequences"],
    Formula(
        "kappa",
        "",
        "tokens",
        "κ = Σw/n of the final weights, a rejected token weighs 0; with unbiased weights it is 1",
        mean("w"),
        POSITIVE,
    ),
    KNOWN["chi2_token"],
    KNOWN["chi2_sequence"],
)
"""Metrics of each threshold, overall and by length quartile: share kept, bias (κ), variance (ESS, χ²)."""
ACTED = Formula(
    "acted",
    "fraction",
    "weights",
    "share of weights that the bound changes",
    mean("acted", "units"),
    counts=True,
)
REST = {"tokens_kept": "tokens_rejected", "sequences_kept": "sequences_dropped"}
"""Share kept → the share dropped that `analyze` has."""
FRESH = "share kept of what was sampled at policy lag 0, where only numerics make the policies differ"
DIGITS = 1e-12
TRAP, TRAP_RATIO = 0.05, 0.9
"""A threshold drops long responses if the kept share of the longest quarter is lower by this much, and less
than this multiple, than that of the shortest."""
FLIPS = 0.32
"""A threshold that drops more than this share at lag 0 lies within one standard deviation of numerics."""
MORE, LEAST = 1.2, 0.05
"""A window is misplaced if one as wide around the median keeps this many times, and this much, more."""


@dataclass(frozen=True)
class Readings:
    """The numbers of a finished sweep, read from its tally."""

    plan: Plan
    tally: Tally

    @cached_property
    def sums(self) -> dict[str, Array]:
        """Column → its sum and replicates, [1+B]."""
        return self.tally.whole.read("sweep.columns")

    @cached_property
    def reader(self) -> Reader:
        """Reader of formulas over the sums and their replicates."""
        return Reader(self.sums, SampledGroups.read(self.tally.by_key["groups"]).many)

    @cached_property
    def rows(self) -> list[Formula]:
        """The formulas of a threshold, with the intervals that `analyze` has for the preset's numbers."""
        preset, idle = self.plan.preset, method.idle(self.plan.preset)
        idle |= {name for name, rest in REST.items() if rest in idle}
        return [method.row_of(row, preset, idle) for row in ROWS]

    @cached_property
    def grid(self) -> Array:
        """Sums by length bin, [bins, 2 + columns × N]."""
        return self.tally.whole.sums["sweep.length"]

    @cached_property
    def shape(self) -> Array | None:
        """Counts and sums of the statistic on `loglattice`, [2, SIZE]; None if it depends on other units."""
        return self.tally.whole.sums.get("sweep.shape")

    @property
    def length(self) -> float:
        """Mean number of tokens of a response."""
        return float(self.sums["tokens"][0] / self.sums["sequences"][0])

    def point(self, at: int) -> SweptPoint:
        """Return the numbers of one threshold, with its marks."""
        plan, value = self.plan, self.plan.values[at]
        found = {row.name: self.reader.number(row, f"{at}|") for row in self.rows}
        if plan.bound.part == "weight":
            found[ACTED.name] = self.reader.wrap(self.sums[f"{at}|acted"] / self.sums[plan.units], ACTED)
        there = self.sums[f"fresh_{plan.units}"]
        if float(there[0]):  # else the dump has nothing of lag 0
            column = "fresh_kept" if plan.units == "tokens" else "fresh_left"
            over = f"{plan.units} of lag 0"
            row = Formula("fresh_kept", "fraction", over, FRESH, mean(column), counts=True)
            fresh = Reader(self.sums | {"sequences": self.sums["fresh_sequences"]}, self.reader.groups)
            found[row.name] = fresh.wrap(self.sums[f"{at}|{column}"] / there, row)
        quartiles = []
        for whole in by_quartile(self.grid)[..., None]:  # [C, 1] each
            columns = zip(COLUMNS, whole[2 + at :: len(plan.values)], strict=True)
            reader = Reader({"sequences": whole[0], "tokens": whole[1], **dict(columns)}, 0)
            quartiles.append({row.name: reader.number(row) for row in ROWS})
        point = SweptPoint(
            threshold=value,
            bounds=plan.bound.places(plan.bound.bounds(value)),
            own=value == plan.bound.threshold(plan.preset),
            metrics=found,
            quartiles=quartiles,
        )
        short, long = self.kept(point.quartiles[0]), self.kept(point.quartiles[-1])
        marks = {
            "length": short - long > TRAP and long < TRAP_RATIO * short,
            "floor": self._under_storage(point) or _under_lag(point),
            "centre": self._beside(point),
        }
        return point.model_copy(update={"marks": [name for name, true in marks.items() if true]})

    def effect(self, at: int) -> float:
        """Return the share of weights that the threshold changes, or the sum of the shares that it keeps."""
        tokens, sequences = self.sums["tokens"][0], self.sums["sequences"][0]
        if self.plan.bound.part == "weight":
            return float(self.sums[f"{at}|acted"][0] / tokens)
        return float(self.sums[f"{at}|kept"][0] / tokens + self.sums[f"{at}|left"][0] / sequences)

    def borders(self) -> list[str]:
        """Return the length range of each quartile as text, accurate to a bin (9% wide)."""
        found = []
        for part in quartile_parts(self.grid[:, 0]):
            inside = np.flatnonzero(part * self.grid[:, 0] > DIGITS).tolist()
            low, high = (2.0 ** (inside[0] / 8), 2.0 ** ((inside[-1] + 1) / 8)) if inside else (0, 0)
            found.append(f"{low:.0f} to {high:.0f}")
        return found

    def centre(self) -> float | None:
        """Return the mean of the statistic."""
        many, total = (0.0, 0.0) if self.shape is None else self.shape.sum(axis=1).tolist()
        return total / many if many else None

    def kept(self, numbers: Mapping[str, Number]) -> float:
        """Return the kept share of tokens or sequences, whichever the bound acts on; 0 if there are none."""
        return numbers[f"{self.plan.units}_kept"].value or 0.0

    def remarks(self, points: Sequence[SweptPoint]) -> list[str]:
        """Return a sentence on each kind of mark that the preset's own threshold has."""
        plan, said = self.plan, []
        for point in _own(points, "centre"):
            found = self._around_the_data(point)
            assert found is not None
            low, high, middle, share = found
            said.append(
                f"Beside the data (C): the window {low:.6g} to {high:.6g} lies around 1, keeps "
                f"{say_value(self.kept(point.metrics), 'fraction')}; half of the data lie below {middle:.6g} "
                f"(E[log r] = {self.centre():.3g}). A window as wide around that would keep about "
                f"{say_value(round(share, 2), 'fraction')}; --keep solves for one."
            )
        for point in _own(points, "length"):
            short, long = (say_value(self.kept(point.quartiles[at]), "fraction") for at in (0, -1))
            borders = self.borders()
            said.append(
                f"Length trap (L): at {_named(point)}, {short} is kept of the shortest quarter of responses "
                f"({borders[0]} tokens) and {long} of the longest ({borders[-1]}). The batch that is left is "
                "a shorter one, whatever its quality."
            )
        for point in filter(_under_lag, _own(points, "floor")):
            dropped = 1 - (point.metrics["fresh_kept"].value or 0.0)
            said.append(
                f"Noise floor (N): at {_named(point)}, {say_value(dropped, 'fraction')} of the "
                f"{plan.units} of policy lag 0 are dropped, where nothing but numerics (and what is "
                "wrong with them) makes the policies differ."
            )
        for point in filter(self._under_storage, _own(points, "floor")):
            said.append(
                f"Noise floor (N): {self.floors[0].source} alone move the statistic by "
                f"{say(self.floors[0].statistic)}, and the threshold {_named(point)} lies closer than that: "
                "what is kept there is decided by rounding."
            )
        if plan.preset.weight is not None and plan.preset.weight.normalize:
            said.append(
                "The weights are shown before they are divided by their batch mean, after which κ is near 1."
            )
        return said

    def window_remarks(self, one: SolvedWindow) -> list[str]:
        """Return the warnings about solved bounds."""
        short, long = (say_value(self.kept(one.point.quartiles[at]), "fraction") for at in (0, -1))
        trap = (
            f"the solved bounds keep {short} of the shortest quarter of responses and {long} of the longest"
        )
        ties = "more than asked are kept: they equal the last one, and no bound parts them"
        floor = "The solved bounds lie under the noise floor of the stored values."
        lag = "The solved bounds drop much of policy lag 0 as well, where only numerics differ."
        said = {
            f"Length trap: {trap}.": "length" in one.point.marks,
            floor: self._under_storage(one.point),
            lag: _under_lag(one.point),
            f"{one.ties} {ties}.": one.ties > 0,
        }
        return [text for text, true in said.items() if true]

    @cached_property
    def floors(self) -> list[NoiseFloor]:
        """Noise floors: of the formats of the stored values, and of low-precision logits."""
        sums = self.tally.whole.sums
        stored = Stored(sums["sweep.unfit"], sums["sweep.squares"], float(self.sums["tokens"][0]))
        first, second = stored.formats()
        kinds = first if first == second else f"{first} (rollout) and {second} (trainer)"
        rows = [(f"log-probs stored as {kinds}", stored.deviation(), True)]
        rows += [
            (f"logits of about {LOGIT:g} computed in {name}", of_logits(bits), False)
            for name, bits in BITS.items()
        ]
        name, over = self.plan.bound.statistic(self.plan.preset), self.plan.bound.over(self.plan.preset)
        text = "how far that moves (the log of) the statistic, at the mean length"
        unknown = Number(unknown=f"no rule is known for {name} over {over}")
        moved = [in_statistic(name, over, deviation, self.length) for _, deviation, _ in rows]
        return [
            NoiseFloor(
                source=source,
                per_token=plain(value, "nats", "", "standard deviation of Δ of a token"),
                statistic=unknown if size is None else plain(size, "", "", text),
                found=found,
            )
            for (source, value, found), size in zip(rows, moved, strict=True)
        ]

    def _under_storage(self, point: SweptPoint) -> bool:
        """Return whether the nearest varying bound is closer to on-policy than the stored values' noise."""
        stored = self.floors[0].statistic.value
        if stored is None:
            return False
        bounds = list(point.bounds.values())
        if self.plan.bound.statistic(self.plan.preset) not in LOGARITHMIC:
            return min(map(abs, bounds)) < stored
        logs = [math.log(one) for one in bounds if one > 0]
        distance = abs(logs[1] - logs[0]) / 2 if len(logs) == 2 else min(map(abs, logs), default=math.inf)
        return distance < stored

    def _beside(self, point: SweptPoint) -> bool:
        """Return whether a window drops over half the data and one as wide at the median far less."""
        kept, found = self.kept(point.metrics), self._around_the_data(point)
        return kept < 0.5 and found is not None and found[-1] > max(MORE * kept, kept + LEAST)

    def _around_the_data(self, point: SweptPoint) -> tuple[float, float, float, float] | None:
        """Return both bounds and the median on r, and the share kept by a window as wide around the median.

        The share is approximate (bins of 1/32). None unless the rule is on a ratio and has both bounds,
        varying or not.
        """
        rule = self.plan.bound.rule(self.plan.preset)
        if not isinstance(rule, Reject) or rule.statistic != "ratio" or self.shape is None:
            return None
        moved = {name.rpartition(".")[2]: bound for name, bound in point.bounds.items()}
        low, high = moved.get("lower", rule.lower), moved.get("upper", rule.upper)
        if not low or not high:
            return None
        counts, edges = self.shape[0], loglattice.edges()
        middle, half = loglattice.quantile(counts, 0.5), (math.log(high) - math.log(low)) / 2
        within = np.minimum(edges[1:], middle + half) - np.maximum(edges[:-1], middle - half)
        parts = np.clip(within / np.diff(edges), 0, 1)
        return low, high, math.exp(middle), float((counts * parts).sum() / counts.sum())


def _under_lag(point: SweptPoint) -> bool:
    kept = point.metrics.get("fresh_kept")
    return kept is not None and kept.value is not None and 1 - kept.value > FLIPS


def _own(points: Sequence[SweptPoint], mark: str) -> list[SweptPoint]:
    """Return the preset's own threshold if it has the mark; others are marked in the table alone."""
    return [point for point in points if point.own and mark in point.marks]


def _named(point: SweptPoint) -> str:
    """Format a threshold for a sentence."""
    return f"{point.threshold:.7g}{' (the preset as it stands)' if point.own else ''}"
