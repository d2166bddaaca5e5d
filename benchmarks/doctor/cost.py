"""Measure what share of `analyze` the diagnosis takes: drawing the sample, and looking at it.

    python benchmarks/doctor/cost.py [--dump FILE] [--rounds 5]

Prints the median over rounds of seconds and of the share, with no preset, one and all.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import offpol_diag
from offpol_diag.analysis import readout
from offpol_diag.engine import sample

DUMP = Path(__file__).parents[2] / "sample_data" / "healthy.parquet"


class Stopwatch:
    """Stopwatch of the seconds spent in the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that its time is added up."""

        def run(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return run


def main() -> None:
    """Time whole analyses in this process, and in them the diagnosis."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dump", type=Path, default=DUMP)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    watch = Stopwatch()
    readout.diagnose = watch.timed(readout.diagnose)  # type: ignore[attr-defined]
    sample.sample = watch.timed(sample.sample)
    for presets in ("", "token_is", "all"):
        seconds, shares = [], []
        for _ in range(given.rounds + 1):
            watch.seconds, began = 0.0, time.perf_counter()
            offpol_diag.analyze([str(given.dump)], presets=presets or (), device="cpu", threads=1)
            seconds.append(time.perf_counter() - began)
            shares.append(watch.seconds / seconds[-1])
        middle = statistics.median(seconds[1:]), statistics.median(shares[1:])
        print(
            f"{presets or 'no preset':10} {middle[0]:6.2f} s, of which the diagnosis {100 * middle[1]:.1f}%"
        )


if __name__ == "__main__":
    main()
