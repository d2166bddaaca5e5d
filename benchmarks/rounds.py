"""Measure peers in turn, so that a machine whose speed drifts favours none of them."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import peak

Job = Callable[[], object]


@dataclass(frozen=True)
class Rounds:
    """Seconds by job, one per round: `wall` by the clock, `cpu` of this process and those it started."""

    wall: dict[str, list[float]]
    cpu: dict[str, list[float]]

    def median(self, job: str) -> float:
        """Median of wall seconds."""
        return statistics.median(self.wall[job])

    def ratio(self, job: str, peer: str) -> float:
        """Median of the ratios within a round."""
        return statistics.median(a / b for a, b in zip(self.wall[job], self.wall[peer], strict=True))

    def seconds(self) -> dict[str, dict[str, float]]:
        """Medians by job."""
        return {job: {"wall": self.median(job), "cpu": statistics.median(self.cpu[job])} for job in self.wall}


def alternate(jobs: Mapping[str, Job], rounds: int) -> Rounds:
    """Run every job once in every round."""
    wall: dict[str, list[float]] = {job: [] for job in jobs}
    cpu: dict[str, list[float]] = {job: [] for job in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            before, spent = time.perf_counter(), _processor()
            job()
            wall[name].append(time.perf_counter() - before)
            cpu[name].append(_processor() - spent)
    return Rounds(wall, cpu)


def _processor() -> float:
    """Return CPU seconds so far; those of ended processes are counted where their server still runs."""
    return time.process_time() + peak.processor(peak.below(os.getpid()))


def slope(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Fit a line by least squares: intercept, slope, and the largest residual as a share of its y."""
    line = statistics.linear_regression(x, y)
    off = max(abs(line.intercept + line.slope * a - b) / b for a, b in zip(x, y, strict=True))
    return line.intercept, line.slope, off
