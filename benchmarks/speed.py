"""Print what reading, `analyze` and its parts cost beside peers, as ratios within one run.

    pip install -c constraints.txt -e '.[bench]'
    python benchmarks/speed.py [--sequences 16384] [--rounds 3] [--only NAME,NAME] [--against CHECKOUT]

Every figure is processor time (user and system, of a process of its own, imports included), time by the clock
or the largest resident set of that process; a ratio is the median over rounds in which both sides took turns.
The peer of `analyze` is one DuckDB query of nine of its numbers; both must agree to 1e-6, or nothing is
printed. All processes are held to two cores. With --against another checkout of offpol-diag takes turns too,
where what is measured is reading, `analyze` of a dump, or its memory.
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
THREADS, NEMO_ROWS = 2, 640
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
JSON = """
import json, sys
for line in open(sys.argv[1], "rb"):
    json.loads(line)
"""
OURS = """
import sys
from offpol_diag.dump.convert import open_dump
print(sum(batch.tokens for batch in open_dump([sys.argv[1]]).batches()))
"""


NEMO_RL = """
import json, sys
import pyarrow.parquet as pq
tokens = 0
with open(sys.argv[2], "w") as file:
    for i, row in enumerate(pq.read_table(sys.argv[1]).to_pylist()):
        n, name = len(row["response_mask"]), dict(rollout="generation_logprobs", old="prev_logprobs")
        lists = {name[x]: [[0.0, *row[x + "_log_probs"]]] for x in name}
        lists |= {"token_ids": [[7] * (n + 1)], "token_loss_mask": [[0, *row["response_mask"]]]}
        record = {"input_lengths": [n + 1], "sample_loss_mask": [1.0], "rewards": [1.0], "idx": i}
        file.write(json.dumps(record | lists) + "\\n")
        tokens += n
print(tokens)
"""


class Given(NamedTuple):
    """What is asked for: where dumps lie, their size, rounds, and another checkout or None."""

    folder: Path
    sequences: int
    rounds: int
    against: Path | None


class Spent(NamedTuple):
    """Processor seconds, wall seconds, largest resident set in bytes, and what was printed."""

    cpu: float
    wall: float
    peak: int
    out: str


def run(*command: str, checkout: Path = HERE.parent) -> Spent:
    """Run a command to its end. This process imports nothing large: a child inherits the peak of its parent.

    Args:
        command: what follows `python`.
        checkout: whose offpol-diag is imported.

    Raises:
        subprocess.CalledProcessError: it did not exit with 0.
    """
    with tempfile.TemporaryFile("w+") as out:
        began = os.times().elapsed
        env = os.environ | {"PYTHONPATH": str(checkout), "RAY_USAGE_STATS_ENABLED": "0"}
        child = subprocess.Popen([sys.executable, *command], stdout=out, env=env, cwd=checkout)
        _, status, usage = os.wait4(child.pid, 0)
        wall = os.times().elapsed - began
        if status:
            raise subprocess.CalledProcessError(os.waitstatus_to_exitcode(status), command)
        out.seek(0)
        return Spent(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024, out.read())


def analyze(dump: Path, *options: str, checkout: Path = HERE.parent) -> Callable[[], Spent]:
    """Return what runs `analyze` on a dump, with its page, in a folder that is thrown away."""

    def job() -> Spent:
        with tempfile.TemporaryDirectory() as folder:
            line = ("analyze", str(dump), "--html", f"{folder}/page.html", "--quiet", *options)
            return run("-m", "offpol_diag", *line, checkout=checkout)

    return job


def in_turn(jobs: dict[str, Callable[[], Spent]], rounds: int) -> dict[str, list[Spent]]:
    """Run every job once in every round, so that a machine whose speed drifts favours none of them."""
    spent: dict[str, list[Spent]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            spent[name].append(job())
    return spent


def table(title: str, spent: dict[str, list[Spent]], tokens: int = 0) -> None:
    """Print a line per job: processor and wall seconds, their ratios to the first job's, ns a token, peak."""
    print(
        f"\n{title}\n{'':44}{'cpu s':>8}{'ratio':>8}{'ns/token':>10}{'wall s':>8}{'ratio':>8}{'peak MB':>9}"
    )
    peer = next(iter(spent.values()))
    for name, runs in spent.items():
        cpu, wall, peak = (statistics.median(run[i] for run in runs) for i in range(3))
        ratios = [statistics.median(a[i] / b[i] for a, b in zip(runs, peer, strict=True)) for i in range(2)]
        each = f"{cpu / tokens * 1e9:10.0f}" if tokens else f"{'':10}"
        line = f"{name:44}{cpu:8.2f}{ratios[0]:8.2f}{each}{wall:8.2f}{ratios[1]:8.2f}{peak / 1e6:9.0f}"
        print(line, flush=True)


def make(folder: Path, sequences: int, shape: str = "ordinary") -> tuple[Path, int]:
    """Make a dump by dump.py; return its path and its tokens."""
    path = folder / f"{shape}-{sequences}.parquet"
    size = path.with_suffix(".json")
    if not size.exists():
        made = run(str(HERE / "dump.py"), str(path), "--sequences", str(sequences), "--shape", shape)
        size.write_text(made.out, encoding="utf-8")
    return path, int(json.loads(size.read_text(encoding="utf-8"))["tokens"])


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


def nemo_rl(folder: Path) -> tuple[Path, int]:
    """Write a step of NeMo-RL's log, 31 MB of JSON lines, from an ordinary dump; return its tokens too."""
    made, _ = make(folder, NEMO_ROWS)
    path = folder / "train_data_step1.jsonl"
    return path, int(run("-c", NEMO_RL, str(made), str(path)).out)


# ---------------------------------------------------------------- what is measured


def reading(given: Given) -> None:
    """Print what reading alone costs beside pyarrow's reading of the same columns."""
    dump, tokens = make(given.folder, 2 * given.sequences)
    jobs = {"pyarrow": lambda: run("-c", PYARROW, str(dump)), "ours": lambda: run("-c", OURS, str(dump))}
    if given.against:
        jobs["ours, there"] = lambda: run("-c", OURS, str(dump), checkout=given.against)
    table(f"Reading, {tokens:,} tokens", in_turn(jobs, given.rounds), tokens)


def forms(given: Given) -> None:
    """Print what reading a trainer's own file costs beside parsing its JSON."""
    path, tokens = nemo_rl(given.folder)
    jobs = {"json.loads": lambda: run("-c", JSON, str(path)), "ours": lambda: run("-c", OURS, str(path))}
    if given.against:
        jobs["ours, there"] = lambda: run("-c", OURS, str(path), checkout=given.against)
    size = path.stat().st_size / 1e6
    table(f"NeMo-RL, {size:.0f} MB, {tokens:,} tokens", in_turn(jobs, given.rounds), tokens)


def peers(given: Given) -> None:
    """Print what `analyze` costs beside DuckDB's nine numbers."""
    dump, tokens = make(given.folder, given.sequences)
    agree(dump, given.folder)
    two = ("--threads", str(THREADS))
    jobs = {
        "DuckDB, nine numbers": duckdb(dump),
        "analyze, one preset": analyze(dump, "--presets", "token_is", *two),
        "analyze, default presets": analyze(dump, *two),
        "analyze, all presets": analyze(dump, "--presets", "all", *two),
    }
    if given.against:
        jobs["analyze, default presets, there"] = analyze(dump, *two, checkout=given.against)
    table(f"Analysis, {tokens:,} tokens", in_turn(jobs, given.rounds), tokens)


def shapes(given: Given) -> None:
    """Print what a token costs in dumps of other lengths and of a larger drift, beside an ordinary one."""
    for shape in ("collapsed", "log_normal", "short"):
        ordinary, _ = make(given.folder, given.sequences // 4)
        dump, tokens = make(given.folder, given.sequences // 4, shape)
        jobs = {"ordinary": analyze(ordinary), shape: analyze(dump)}
        table(f"Shape {shape}, {tokens:,} tokens", in_turn(jobs, given.rounds), tokens)


def threads(given: Given) -> None:
    """Print what one thread, two, and tasks of Ray on this machine take (look at the wall seconds).

    Ray's workers are not children of the command: neither their processor time nor their memory is counted.
    """
    dump, tokens = make(given.folder, given.sequences)
    jobs = {f"{n} threads": analyze(dump, "--threads", str(n)) for n in (1, 2)}
    jobs["Ray, started and stopped"] = analyze(dump, "--engine", "ray")
    table(f"Threads, {tokens:,} tokens", in_turn(jobs, given.rounds), tokens)


def memory(given: Given) -> None:
    """Print the peak by size of the dump: it must not grow with it."""
    for many in (given.sequences, 6 * given.sequences):
        dump, tokens = make(given.folder, many)
        jobs = {"analyze": analyze(dump, "--threads", str(THREADS))}
        if given.against:
            jobs["analyze, there"] = analyze(dump, "--threads", str(THREADS), checkout=given.against)
        table(f"Memory, {tokens:,} tokens", in_turn(jobs, 1), tokens)


def startup(given: Given) -> None:
    """Print what a sample with its page, and `--help`, cost beside the imports that any such tool needs."""
    jobs = {
        IMPORTS: lambda: run("-c", IMPORTS),
        "offpol-diag --help": lambda: run("-m", "offpol_diag", "--help"),
        "analyze stale.parquet, with its page": analyze(STALE),
    }
    table("Start-up", in_turn(jobs, max(given.rounds, 5)))


PARTS = {part.__name__: part for part in (startup, reading, forms, peers, shapes, threads, memory)}


def main() -> None:
    """Measure the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=16_384, help="of about 1,010 tokens each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--against", type=Path, help="another checkout, whose offpol-diag takes turns")
    parser.add_argument("--folder", type=Path, help="where dumps are made and kept; a temporary one")
    asked = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    folder = (asked.folder or Path(tempfile.mkdtemp())).resolve()
    try:
        for name in asked.only.split(","):
            PARTS[name](Given(folder, asked.sequences, asked.rounds, asked.against))
    finally:
        if not asked.folder:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
