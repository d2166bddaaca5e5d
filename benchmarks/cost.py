"""What an analysis costs, as ratios within one run: against only reading the columns, and per further preset.

    python benchmarks/cost.py [--sequences 1024] [--runs 3]

Each figure is the median over runs of a fresh process each, in turn, so that a machine whose speed drifts
favours none of them. Absolute times are printed for scale only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from offpol_diag import DumpWriter

THREADS = "2"
COLUMNS = ["rollout_log_probs", "old_log_probs", "current_log_probs", "response_mask"]


def make(path: Path, sequences: int) -> int:
    """A dump of log-normal lengths (mean 1024, at most 8192) and small drift; returns its tokens."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(np.log(1024) - 0.32, 0.8, sequences).astype(int) + 1, 8192)
    with DumpWriter(path) as dump:
        for start in range(0, sequences, 256):
            dump.write(**rows(lengths[start : start + 256], start, rng))
    return int(lengths.sum())


def rows(lengths: np.ndarray, start: int, rng: np.random.Generator) -> dict[str, object]:
    """A batch of the dump."""
    rollout = [-rng.exponential(0.3, n) for n in lengths]
    old = [np.minimum(q + rng.normal(0, 0.03, len(q)) * -np.expm1(q), 0) for q in rollout]
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": old,
        "current_log_probs": [np.minimum(p + rng.normal(0, 0.01, len(p)) * -np.expm1(p), 0) for p in old],
        "response_mask": [(rng.random(len(q)) > 0.02).astype(np.int8) for q in rollout],
        "advantages": rng.normal(size=len(lengths)),
        "group_id": (start + np.arange(len(lengths))) // 8,
    }


def read(path: str) -> None:
    """The peer: read and decode the columns, nothing else."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            file.read_row_group(group, columns=COLUMNS)


def analyse(path: str, presets: str) -> None:
    """The whole analysis under some presets."""
    from offpol_diag import analyze
    from offpol_diag.catalogue import load

    analyze([path], presets=load().resolve(presets))


JOBS = {"read": lambda path: read(path), "one": lambda path: analyse(path, "token_is")}
JOBS["all"] = lambda path: analyse(path, "all")


def child(job: str, path: str) -> None:
    """Run a job once and print its seconds (imports left out) and the process's peak memory."""
    import resource

    import offpol_diag.analyze  # noqa: F401  imports are not what is measured

    before = time.perf_counter()
    JOBS[job](path)
    seconds = time.perf_counter() - before
    print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))


def measure(job: str, path: str) -> tuple[float, float]:
    """Seconds and MiB of one fresh process."""
    command = [sys.executable, __file__, "--child", job, path]
    environment = os.environ | {"OMP_NUM_THREADS": THREADS}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    seconds, mib = json.loads(done.stdout)
    return seconds, mib


def main() -> None:
    """Make the dump, run the jobs in turn, print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.parquet"
        tokens = make(path, given.sequences)
        report(tokens, [{job: measure(job, str(path)) for job in JOBS} for _ in range(given.runs)])


def report(tokens: int, runs: list[dict[str, tuple[float, float]]]) -> None:
    """Print medians of the ratios within each run."""
    from offpol_diag.catalogue import load

    presets = len(load().resolve("all"))
    ratio = statistics.median(run["one"][0] / run["read"][0] for run in runs)
    more = statistics.median((run["all"][0] / run["one"][0] - 1) / (presets - 1) for run in runs)
    seconds = {job: statistics.median(run[job][0] for run in runs) for job in JOBS}
    memory = {job: max(run[job][1] for run in runs) for job in JOBS}
    print(f"{tokens:,} tokens, {len(runs)} runs, {THREADS} threads, {os.cpu_count()} cores")
    print(f"one preset / reading the columns only: {ratio:.1f}")
    print(f"each further preset costs {more:.1%} of an analysis under one ({presets} presets)")
    print("seconds: " + ", ".join(f"{job} {x:.2f}" for job, x in seconds.items()))
    print("peak MiB: " + ", ".join(f"{job} {x:.0f}" for job, x in memory.items()))


if __name__ == "__main__":
    main()
