"""Compare an analysis with every preset, with one, and with every trainer's log, with one DuckDB query.

    python benchmarks/peers.py [--sequences N] [--rounds N] [--write]

All in turn with only reading, on one file and two cores: reading and DuckDB with two threads, the analysis
with two threads. Then the same on dumps of every shape of dump.py, of a quarter as many tokens; the
shapes take turns as well, so that each has a ratio to the ordinary dump of its size. What the query and the
analysis both know must agree to 1e-6, or this fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import duck
import dump
import machine
import part
import pyarrow.parquet as pq
import rounds

from offpol_diag.analyze import analyze
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import load
from offpol_diag.result import Result

ONE = "token_is"
COLUMNS = ["rollout_log_probs", "old_log_probs", "current_log_probs", "response_mask", "advantages"]


def read(path: Path) -> None:
    """Read and decode the columns: the lower bound of every peer."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=COLUMNS)


@dataclass
class Peers:
    """All that is timed on one file, and the numbers that come out of it, which must agree."""

    path: Path
    query: duck.Duck
    presets: Sequence[Preset]
    ours: list[dict[str, float]] = field(default_factory=list)
    nine: list[dict[str, float]] = field(default_factory=list)

    def jobs(self) -> dict[str, rounds.Job]:
        """Return the jobs by name."""
        return {
            "reading": lambda: read(self.path),
            "duckdb": lambda: self.nine.append(self.query.nine(self.path)),
            # a Result that lives on would be collected through again
            "analyze": lambda: self.ours.append(duck.ours(self._analyzed(self.presets, every_log=False))),
            "one": lambda: self._analyzed([preset for preset in self.presets if preset.name == ONE]),
        }

    def logs(self) -> dict[str, rounds.Job]:
        """Return the job that computes what every trainer logs, too, as `--presets all` does."""
        return {"every log": lambda: self._analyzed(self.presets)}

    def _analyzed(self, presets: Sequence[Preset], *, every_log: bool = True) -> Result:
        return analyze([str(self.path)], presets=presets, threads=machine.THREADS, every_log=every_log)

    def agree(self) -> None:
        """Raise `duck.Disagreement` where the numbers of a round do not agree."""
        for found, numbers in zip(self.ours, self.nine, strict=True):
            duck.agree(found, numbers)


def measure(given: part.Given) -> part.Result:
    """Measure medians of the rounds, and check that the numbers agree."""
    presets, query = load().resolve("all"), duck.Duck(machine.THREADS)
    with part.dump(given.sequences) as (path, facts):
        peers = Peers(path, query, presets)
        timed = rounds.alternate(peers.jobs() | peers.logs(), given.rounds)
    peers.agree()
    return facts | {
        "rounds": given.rounds,
        "threads": machine.THREADS,
        "presets": len(presets),
        "seconds": timed.seconds(),
        "analyze_over_duckdb": timed.ratio("analyze", "duckdb"),
        "every_log_over_duckdb": timed.ratio("every log", "duckdb"),
        "one_over_duckdb": timed.ratio("one", "duckdb"),
        "duckdb_over_reading": timed.ratio("duckdb", "reading"),
        "agreed": peers.nine[-1],
        "shapes": shapes(max(given.sequences // 4, 1), given.rounds, query, presets),
    }


def shapes(sequences: int, times: int, query: duck.Duck, presets: Sequence[Preset]) -> list[part.Result]:
    """Measure the same on a dump of each shape, in turn; `over_ordinary` is a ratio of times per token."""
    with ExitStack() as stack:
        dumps = {shape: stack.enter_context(part.dump(sequences, shape=shape)) for shape in dump.SHAPES}
        peers = {shape: Peers(path, query, presets) for shape, (path, _) in dumps.items()}
        jobs = {(shape, job): run for shape, one in peers.items() for job, run in one.jobs().items()}
        timed = rounds.alternate({" ".join(key): run for key, run in jobs.items()}, times)
    for one in peers.values():
        one.agree()
    tokens = {shape: facts["tokens"] for shape, (_, facts) in dumps.items()}
    return [
        dumps[shape][1]
        | {
            "shape": shape,
            "seconds": {job: timed.median(f"{shape} {job}") for of, job in jobs if of == shape},
            "analyze_over_duckdb": timed.ratio(f"{shape} analyze", f"{shape} duckdb"),
            "one_over_duckdb": timed.ratio(f"{shape} one", f"{shape} duckdb"),
            "over_ordinary": timed.ratio(f"{shape} analyze", "ordinary analyze")
            * (tokens["ordinary"] / tokens[shape]),
        }
        for shape in peers
    ]


if __name__ == "__main__":
    part.main("peers", measure, __doc__)
