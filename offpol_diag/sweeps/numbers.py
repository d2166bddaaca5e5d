"""From the sums of a sweep to the numbers of each threshold: a metric is a row, and another row adds one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag import loglattice
from offpol_diag.accumulators import Bins, GroupSample, Sums
from offpol_diag.metrics import method, residual
from offpol_diag.metrics.formula import Formula, Reader, mean
from offpol_diag.metrics.selection import Grid, quartile_parts
from offpol_diag.summary import Number, Numbers, SweptPoint
from offpol_diag.sweeps.columns import COLUMNS, Plan
from offpol_diag.sweeps.floor import Steps
from offpol_diag.tally import Tally

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
"""Of each threshold, overall and by length quartile: what is kept, bias (κ) and variance (ESS, χ²)."""
ACTED = Formula(
    "acted", "fraction", "weights", "share of weights that the bound changes", mean("acted", "units")
)
DIGITS = 1e-12
S = TypeVar("S")


@dataclass(frozen=True)
class Readings:
    """The states of a finished sweep under their types."""

    plan: Plan
    tally: Tally

    @cached_property
    def sums(self) -> dict[str, Tensor]:
        """Column → [1+B]."""
        return _typed(self.tally.states["sweep.sums"], Sums).read()

    @cached_property
    def reader(self) -> Reader:
        """Sums and replicates."""
        return Reader(self.sums, _typed(self.tally.states["group"], GroupSample).groups)

    @cached_property
    def grid(self) -> Tensor:
        """By length: [bins, 2 + columns × N]."""
        return _typed(self.tally.states["sweep.length"], Grid).values.cpu()

    @cached_property
    def shape(self) -> Bins | None:
        """Of the statistic; None where it is not one of single units."""
        found = self.tally.states.get("sweep.shape")
        return None if found is None else _typed(found, Bins)

    @property
    def steps(self) -> Steps:
        """Of the stored values."""
        return _typed(self.tally.states["sweep.steps"], Steps)

    @property
    def per_token(self) -> bool:
        """Whether the bound acts on tokens one by one."""
        held = self.plan.dial.held(self.plan.preset)
        return self.plan.dial.part != "veto" and getattr(held, "over", "") in ("token", "segment", "batch")

    def point(self, at: int) -> SweptPoint:
        """One threshold."""
        plan, value = self.plan, self.plan.values[at]
        found = {row.name: self.reader.number(row, f"{at}|") for row in ROWS}
        return SweptPoint(
            threshold=value,
            bounds=plan.dial.places(plan.dial.bounds(value)),
            own=value == plan.dial.at(plan.preset),
            metrics=found | self._acted(at) | self._fresh(at),
            quartiles=[self._quartile(at, part) for part in quartile_parts(self.grid[:, 0])],
        )

    def effect(self, at: int) -> float:
        """How much the threshold does: what it drops, or the share of weights it changes."""
        total = self.sums["tokens"][0]
        if self.plan.dial.part == "weight":
            return float(self.sums[f"{at}|acted"][0] / total)
        return float(
            self.sums[f"{at}|kept"][0] / total + self.sums[f"{at}|left"][0] / self.sums["sequences"][0]
        )

    def _acted(self, at: int) -> Numbers:
        if self.plan.dial.part != "weight":
            return {}
        units = self.sums["tokens" if self.per_token else "sequences"]
        values = self.sums[f"{at}|acted"] / units
        return {ACTED.name: self.reader.wrap(values, ACTED)}

    def _fresh(self, at: int) -> Numbers:
        """What is kept of lag 0; nothing where the dump has none."""
        per = "tokens" if self.per_token else "sequences"
        there = self.sums[f"fresh_{per}"]
        if not float(there[0]):
            return {}
        column = "fresh_kept" if self.per_token else "fresh_left"
        text = "share kept of what was sampled at policy lag 0, where only numerics make the policies differ"
        row = Formula("fresh_kept", "fraction", f"{per} of lag 0", text, mean(column))
        return {row.name: self.reader.wrap(self.sums[f"{at}|{column}"] / there, row)}

    def _quartile(self, at: int, part: Tensor) -> Numbers:
        """The same numbers of one quarter of the sequences."""
        whole = (part @ self.grid)[:, None]
        many = len(self.plan.values)
        sums = {"sequences": whole[0], "tokens": whole[1]}
        sums |= {name: whole[2 + i * many + at] for i, name in enumerate(COLUMNS)}
        reader = Reader(sums, 0)
        return {row.name: reader.number(row) for row in ROWS}

    def borders(self) -> list[str]:
        """The quartiles' lengths in words; a border lies within a bin, which is 9% wide."""
        parts = quartile_parts(self.grid[:, 0])
        found = []
        for part in parts:
            inside = torch.nonzero(part * self.grid[:, 0] > DIGITS).flatten()
            low, high = (
                (2.0 ** (float(at) / 8) for at in (inside[0], inside[-1] + 1)) if len(inside) else (0, 0)
            )
            found.append(f"{low:.0f} to {high:.0f}")
        return found

    def centre(self) -> float | None:
        """The mean of the statistic over its units."""
        shape = self.shape
        many = 0.0 if shape is None else float(shape.counts.sum())
        return float(shape.sums.sum()) / many if shape is not None and many else None

    def median(self) -> float | None:
        """The middle value of the statistic, to 1/32."""
        return None if self.shape is None else loglattice.quantile(self.shape.counts.cpu(), 0.5)

    def share_between(self, low: float, high: float) -> float:
        """About which share of the units has the statistic in between (bins of 1/32)."""
        assert self.shape is not None
        counts, edges = self.shape.counts.cpu(), loglattice.edges()
        within = edges[1:].clamp(max=high) - edges[:-1].clamp(min=low)
        parts = (within / (edges[1:] - edges[:-1])).clamp(0, 1)
        return float((counts * parts).sum() / counts.sum())


def _typed(state: object, kind: type[S]) -> S:
    assert isinstance(state, kind)
    return state


def main(found: SweptPoint, per_token: bool) -> Number:
    """The share kept of what the bound acts on."""
    return found.metrics["tokens_kept" if per_token else "sequences_kept"]


def main_of(numbers: Mapping[str, Number], per_token: bool) -> float:
    """The same of one quartile; 0 where nothing is there."""
    return numbers["tokens_kept" if per_token else "sequences_kept"].value or 0.0
