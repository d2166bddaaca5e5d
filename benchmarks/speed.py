"""Print what reading, `analyze` and its parts cost beside peers, as ratios within one run.

    pip install -c constraints.txt -e '.[bench]'
    python benchmarks/speed.py [--sequences 16384] [--rounds 3] [--only NAME,NAME]

Every figure is processor time (user and system, of a process of its own, imports included) or the largest
resident set of that process; a ratio is the median over rounds in which both sides took turns. The peer of
`analyze` is one DuckDB query of nine of its numbers; both must agree to 1e-6, or nothing is printed. All
processes are held to two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
STALE = HERE.parent / "sample_data" / "stale.parquet"
THREADS = 2
IMPORTS = "import numpy, pyarrow.parquet, polars"
"""What any tool of this kind must load; start-up is measured against it."""
TOLERANCE = 1e-6

QUERY = """
WITH token AS (
    SELECT file_row_number AS id, unnest(rollout_log_probs) AS q, unnest(old_log_probs) AS p,
           unnest(response_mask) AS m
    FROM read_parquet(?, file_row_number = true)
), gap AS (
    SELECT id, p::DOUBLE - q::DOUBLE AS d FROM token WHERE m = 1
), ratio AS (
    SELECT id, d, exp(d) AS r, least(exp(d), 2) AS w FROM gap
), sequence AS (
    SELECT id, count(*) AS n, sum(d) AS s, sum(r - 1 - d) AS k3, sum(r * r) AS rr,
           sum(w) AS w, sum(w * w) AS ww, sum((r NOT BETWEEN 0.5 AND 2)::INT) AS outside, min(d) AS least
    FROM ratio GROUP BY id
)
SELECT sum(n) AS tokens,
       sum(k3) / sum(n) AS "dump.k3",
       sum(rr) / sum(n) - 1 AS "dump.chi2_token",
       avg(exp(2 * s)) - 1 AS "dump.chi2_sequence",
       avg(exp(-s / n)) AS "dump.ppl_ratio",
       sum(w) * sum(w) / (sum(n) * sum(ww)) AS "preset/token_is.ess_tokens",
       sum(outside) / sum(n) AS "preset/token_mis.tokens_rejected",
       avg((s NOT BETWEEN ln(0.5) AND ln(2))::INT) AS "preset/seq_mis.sequences_dropped",
       avg((least < ln(1e-4))::INT) AS "preset/geo_rs.vetoed"
FROM sequence
"""
"""The fastest form found: lists are unnested once, and exp is taken in a step of its own. A column is named
SUBJECT.NAME, as the number of a result that it must equal."""

# Scripts that are run in a process of their own; {threads} is filled in.
DUCKDB = """
import duckdb, json, sys
connection = duckdb.connect()
connection.execute("SET threads = {threads}")
cursor = connection.execute(sys.argv[1], [sys.argv[2]])
print(json.dumps(dict(zip([column[0] for column in cursor.description], map(float, cursor.fetchone())))))
"""
PYARROW = """
import sys, pyarrow.parquet as pq
columns = ["rollout_log_probs", "old_log_probs", "current_log_probs", "response_mask", "advantages"]
for batch in pq.ParquetFile(sys.argv[1]).iter_batches(1024, columns=columns):
    pass
"""
OURS = """
import sys
from offpol_diag.dump.read import open_dump
print(sum(batch.tokens for batch in open_dump([sys.argv[1]]).batches()))
"""


class Spent(NamedTuple):
    """Processor seconds, wall seconds, largest resident set in bytes, and what was printed."""

    cpu: float
    wall: float
    peak: int
    out: str


def run(*command: str) -> Spent:
    """Run a command to its end. This process imports nothing large: a child inherits the peak of its parent.

    Raises:
        subprocess.CalledProcessError: it did not exit with 0.
    """
    with tempfile.TemporaryFile("w+") as out:
        began = os.times().elapsed
        child = subprocess.Popen([sys.executable, *command], stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
        wall = os.times().elapsed - began
        if status:
            raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)
        out.seek(0)
        return Spent(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024, out.read())


def analyze(dump: Path, *options: str) -> Callable[[], Spent]:
    """Return what runs `analyze` on a dump, with its page, in a folder that is thrown away."""

    def job() -> Spent:
        with tempfile.TemporaryDirectory() as folder:
            page = ("--html", f"{folder}/page.html", "--quiet", "--threads", str(THREADS))
            return run("-m", "offpol_diag", "analyze", str(dump), *page, *options)

    return job


def in_turn(jobs: dict[str, Callable[[], Spent]], rounds: int) -> dict[str, list[Spent]]:
    """Run every job once in every round, so that a machine whose speed drifts favours none of them."""
    spent: dict[str, list[Spent]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            spent[name].append(job())
    return spent


def table(title: str, spent: dict[str, list[Spent]], peer: str, tokens: int = 0) -> None:
    """Print a line per job: processor seconds, their ratio to the peer's, ns a token, wall, peak."""
    print(f"\n{title}\n{'':44}{'cpu s':>8}{'ratio':>8}{'ns/token':>10}{'wall s':>8}{'peak MB':>9}")
    for name, runs in spent.items():
        cpu, wall, peak = (statistics.median(run[i] for run in runs) for i in range(3))
        ratio = statistics.median(a.cpu / b.cpu for a, b in zip(runs, spent[peer], strict=True))
        each = f"{cpu / tokens * 1e9:10.0f}" if tokens else f"{'':10}"
        print(f"{name:44}{cpu:8.2f}{ratio:8.2f}{each}{wall:8.2f}{peak / 1e6:9.0f}")


def make(folder: Path, sequences: int, shape: str = "ordinary") -> tuple[Path, int]:
    """Make a dump by dump.py; return its path and its tokens."""
    path = folder / f"{shape}-{sequences}.parquet"
    made = run(str(HERE / "dump.py"), str(path), "--sequences", str(sequences), "--shape", shape)
    return path, int(json.loads(made.out)["tokens"])


def duckdb(dump: Path) -> Callable[[], Spent]:
    """Return what asks DuckDB for the nine numbers."""
    return lambda: run("-c", DUCKDB.format(threads=THREADS), QUERY, str(dump))


def agree(dump: Path, folder: Path) -> None:
    """Compare the nine numbers with those of a result.

    Raises:
        SystemExit: they differ by more than the tolerance, so that a timing would show nothing.
    """
    expected = json.loads(duckdb(dump)().out)
    target = folder / "result.json"
    analyze(dump, "--presets", "token_is,token_mis,seq_mis,geo_rs", "--json", str(target))()
    result = json.loads(target.read_text(encoding="utf-8"))
    tokens = expected.pop("tokens")
    found = {key: result["numbers"][key.partition(".")[0]][key.partition(".")[2]][0] for key in expected}
    off = [key for key, value in expected.items() if not math.isclose(found[key], value, rel_tol=TOLERANCE)]
    if off or tokens != result["dump"]["tokens"]:
        sys.exit(f"speed: DuckDB and analyze disagree on {', '.join(off) or 'the tokens'}")


# ---------------------------------------------------------------- what is measured


def reading(folder: Path, sequences: int, rounds: int) -> None:
    """Print what reading alone costs beside pyarrow's reading of the same columns."""
    dump, tokens = make(folder, 2 * sequences)
    jobs = {"pyarrow": lambda: run("-c", PYARROW, str(dump)), "ours": lambda: run("-c", OURS, str(dump))}
    table(f"Reading, {tokens:,} tokens", in_turn(jobs, rounds), "pyarrow", tokens)


def peers(folder: Path, sequences: int, rounds: int) -> None:
    """Print what `analyze` costs beside DuckDB's nine numbers."""
    dump, tokens = make(folder, sequences)
    agree(dump, folder)
    jobs = {
        "DuckDB, nine numbers": duckdb(dump),
        "analyze, one preset": analyze(dump, "--presets", "token_is"),
        "analyze, default presets": analyze(dump),
        "analyze, all presets": analyze(dump, "--presets", "all"),
    }
    table(f"Analysis, {tokens:,} tokens", in_turn(jobs, rounds), "DuckDB, nine numbers", tokens)


def shapes(folder: Path, sequences: int, rounds: int) -> None:
    """Print what a token costs in dumps of other lengths and of a larger drift, beside an ordinary one."""
    for shape in ("collapsed", "log_normal", "short"):
        ordinary, _ = make(folder, sequences // 4)
        dump, tokens = make(folder, sequences // 4, shape)
        jobs = {"ordinary": analyze(ordinary), shape: analyze(dump)}
        table(f"Shape {shape}, {tokens:,} tokens", in_turn(jobs, rounds), "ordinary", tokens)


def threads(folder: Path, sequences: int, rounds: int) -> None:
    """Print what one thread and two take (look at the wall seconds)."""
    dump, tokens = make(folder, sequences)
    jobs = {f"{n} threads": analyze(dump, "--threads", str(n)) for n in (1, 2)}
    table(f"Threads, {tokens:,} tokens", in_turn(jobs, rounds), "1 threads", tokens)


def memory(folder: Path, sequences: int, rounds: int) -> None:
    """Print the peak by size of the dump: it must not grow with it."""
    for many in (sequences // 4, sequences, 4 * sequences):
        dump, tokens = make(folder, many)
        table(f"Memory, {tokens:,} tokens", in_turn({"analyze": analyze(dump)}, 1), "analyze", tokens)


def startup(folder: Path, sequences: int, rounds: int) -> None:
    """Print what a sample with its page, and `--help`, cost beside the imports that any such tool needs."""
    jobs = {
        IMPORTS: lambda: run("-c", IMPORTS),
        "offpol-diag --help": lambda: run("-m", "offpol_diag", "--help"),
        "analyze stale.parquet, with its page": analyze(STALE),
    }
    table("Start-up", in_turn(jobs, max(rounds, 5)), IMPORTS)


PARTS = {part.__name__: part for part in (startup, reading, peers, shapes, threads, memory)}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=16_384, help="of about 1,010 tokens each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    given = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    folder = Path(tempfile.mkdtemp())
    try:
        for name in given.only.split(","):
            PARTS[name](folder, given.sequences, given.rounds)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
