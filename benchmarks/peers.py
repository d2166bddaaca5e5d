"""Compare an analysis with every preset with one DuckDB query, and that with only reading the columns.

    python benchmarks/peers.py [--sequences N] [--rounds N] [--write]

All three in turn, on the same file and two cores: reading and DuckDB with two threads, the analysis with two
worker processes. What the query and the analysis both know
must agree to 1e-6, or this fails.
"""

from __future__ import annotations

from pathlib import Path

import duck
import machine
import part
import pyarrow.parquet as pq
import rounds

from offpol_diag.analyze import analyze
from offpol_diag.presets.catalogue import load

COLUMNS = ["rollout_log_probs", "old_log_probs", "current_log_probs", "response_mask", "advantages"]


def read(path: Path) -> None:
    """Read and decode the columns: the lower bound of every peer."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=COLUMNS)


def measure(given: part.Given) -> part.Result:
    """Measure medians of the rounds, and check that the numbers agree."""
    presets, query = load().resolve("all"), duck.Duck(machine.THREADS)
    ours: list[dict[str, float]] = []
    nine: list[dict[str, float]] = []
    with part.dump(given.sequences) as (path, facts):
        jobs = {
            "reading": lambda: read(path),
            "duckdb": lambda: nine.append(query.nine(path)),
            "analyze": lambda: ours.append(  # a Summary that lives on would be collected through again
                duck.ours(analyze([str(path)], presets=presets, workers=machine.THREADS))
            ),
        }
        timed = rounds.alternate(jobs, given.rounds)
    for found, numbers in zip(ours, nine, strict=True):
        duck.agree(found, numbers)
    return facts | {
        "rounds": given.rounds,
        "threads": machine.THREADS,
        "presets": len(presets),
        "seconds": timed.seconds(),
        "analyze_over_duckdb": timed.ratio("analyze", "duckdb"),
        "duckdb_over_reading": timed.ratio("duckdb", "reading"),
        "agreed": nine[-1],
    }


if __name__ == "__main__":
    part.main("peers", measure, __doc__)
