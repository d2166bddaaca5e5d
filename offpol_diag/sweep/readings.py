"""The numbers of each threshold, from the sums of a sweep; each metric is a row of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag.analysis.tally import Tally
from offpol_diag.engine import loglattice, method, residual
from offpol_diag.engine.accumulators import Bins, GroupSample, Sums
from offpol_diag.engine.formula import Formula, Reader, mean
from offpol_diag.engine.selection import Grid, quartile_parts
from offpol_diag.summary import Number, Numbers, SweptPoint
from offpol_diag.sweep.evaluate import COLUMNS, Plan
from offpol_diag.sweep.rounding import Stored

KNOWN = {row.name: row for row in (*method.ROWS, *residual.ROWS)}

ROWS = (
    Formula("tokens_kept", "fraction", "tokens", "share of tokens left", mean("kept")),
    Formula("sequences_kept", "fraction", "sequences", "share with a token left", mean("left", "sequences")),
    KNOWN["ess_tokens"],
    KNOWN["ess_sequences"],
    Formula(
        "kappa",
        "",
        "tokens",
        "κ = Σw/n of the final weights, a rejected token weighs 0; with unbiased weights it is 1",
        mean("w"),
    ),
    KNOWN["chi2_token"],
    KNOWN["chi2_sequence"],
)
"""Metrics of each threshold, overall and by length quartile: share kept, bias (κ), variance (ESS, χ²)."""
ACTED = Formula(
    "acted", "fraction", "weights", "share of weights that the bound changes", mean("acted", "units")
)
FRESH = "share kept of what was sampled at policy lag 0, where only numerics make the policies differ"
DIGITS = 1e-12
S = TypeVar("S")


@dataclass(frozen=True)
class Readings:
    """Typed access to the states of a finished sweep."""

    plan: Plan
    tally: Tally

    def state(self, name: str, kind: type[S]) -> S:
        """Return one of the sweep's states."""
        found = self.tally.states[name]
        assert isinstance(found, kind)
        return found

    @cached_property
    def sums(self) -> dict[str, Tensor]:
        """Column → its sum and replicates, [1+B]."""
        return self.state("sweep.sums", Sums).read()

    @cached_property
    def reader(self) -> Reader:
        """Reader of formulas over the sums and their replicates."""
        return Reader(self.sums, self.state("group", GroupSample).groups)

    @cached_property
    def grid(self) -> Tensor:
        """Sums by length bin, [bins, 2 + columns × N]."""
        return self.state("sweep.length", Grid).values.cpu()

    @cached_property
    def shape(self) -> Bins | None:
        """Histogram of the statistic on the grid of `loglattice`; None if it depends on other units."""
        if "sweep.shape" not in self.tally.states:
            return None
        found = self.state("sweep.shape", Bins)
        return Bins(found.counts.cpu(), found.sums.cpu())

    @property
    def stored(self) -> Stored:
        """State of the number formats of the stored log-probs."""
        return self.state("sweep.steps", Stored)

    @property
    def length(self) -> float:
        """Mean number of tokens of a response."""
        return float(self.sums["tokens"][0] / self.sums["sequences"][0])

    @property
    def units(self) -> str:
        """Units that the bound acts on: "tokens" or "sequences"."""
        return "tokens" if self.plan.per_token else "sequences"

    def point(self, at: int) -> SweptPoint:
        """Return the numbers of one threshold."""
        plan, value = self.plan, self.plan.values[at]
        found = {row.name: self.reader.number(row, f"{at}|") for row in ROWS}
        if plan.bound.part == "weight":
            found[ACTED.name] = self.reader.wrap(self.sums[f"{at}|acted"] / self.sums[self.units], ACTED)
        there = self.sums[f"fresh_{self.units}"]
        if float(there[0]):  # else the dump has nothing of lag 0
            column = "fresh_kept" if plan.per_token else "fresh_left"
            row = Formula("fresh_kept", "fraction", f"{self.units} of lag 0", FRESH, mean(column))
            found[row.name] = self.reader.wrap(self.sums[f"{at}|{column}"] / there, row)
        return SweptPoint(
            threshold=value,
            bounds=plan.bound.places(plan.bound.bounds(value)),
            own=value == plan.bound.threshold(plan.preset),
            metrics=found,
            quartiles=[self._quartile(at, part) for part in quartile_parts(self.grid[:, 0])],
        )

    def _quartile(self, at: int, part: Tensor) -> Numbers:
        """Return the metrics of `ROWS` for one length quartile of the sequences."""
        whole = (part @ self.grid)[:, None]
        columns = whole[2 + at :: len(self.plan.values)]
        sums = {"sequences": whole[0], "tokens": whole[1], **dict(zip(COLUMNS, columns, strict=True))}
        reader = Reader(sums, 0)
        return {row.name: reader.number(row) for row in ROWS}

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
            inside = torch.nonzero(part * self.grid[:, 0] > DIGITS).flatten().tolist()
            low, high = (2.0 ** (inside[0] / 8), 2.0 ** ((inside[-1] + 1) / 8)) if inside else (0, 0)
            found.append(f"{low:.0f} to {high:.0f}")
        return found

    def centre(self) -> float | None:
        """Return the mean of the statistic."""
        many = 0.0 if self.shape is None else float(self.shape.counts.sum())
        return float(self.shape.sums.sum()) / many if self.shape is not None and many else None

    def median(self) -> float | None:
        """Return the median of the statistic, to 1/32."""
        return None if self.shape is None else loglattice.quantile(self.shape.counts, 0.5)

    def share_between(self, low: float, high: float) -> float:
        """Return the approximate share of the statistic's values in [low, high] (bins of 1/32)."""
        assert self.shape is not None
        counts, edges = self.shape.counts, loglattice.edges()
        within = edges[1:].clamp(max=high) - edges[:-1].clamp(min=low)
        parts = (within / (edges[1:] - edges[:-1])).clamp(0, 1)
        return float((counts * parts).sum() / counts.sum())

    def kept(self, numbers: Mapping[str, Number]) -> float | None:
        """Return the kept share of tokens or sequences, whichever the bound acts on."""
        return numbers[f"{self.units}_kept"].value
