"""Compare our reading with pyarrow's of the same columns, in one run.

    python benchmarks/reading.py DUMP [--rounds N]

Ours decodes, checks, drops what the mask excludes and packs to float64 tensors with positions, runs and keys.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import pyarrow.parquet as pq

from offpol_diag.readers import Dump, open_dump
from offpol_diag.run.threads import TOKENS

BUFFER = 1 << 20
Times = tuple[float, float]


def ours(dump: Dump) -> int:
    """Count the tokens that our reading yields."""
    return sum(batch.tokens for batch in dump.batches())


def pyarrows(dump: Dump, rows: int) -> None:
    """Read the same columns with pyarrow, `rows` at a time."""
    for path in dump.info.files:
        with pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER) as parquet:
            for _ in parquet.iter_batches(rows, columns=list(dump.info.columns.values())):
                pass


def timed(task: Callable[[], object]) -> Times:
    """Measure CPU seconds, of all threads, and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    task()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    """Print nanoseconds per token of both, and the medians of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    dump = open_dump(given.dump, batch_tokens=TOKENS)
    tokens = ours(dump)
    rows = max(1, TOKENS * dump.rows // tokens)
    pairs = [(timed(lambda: pyarrows(dump, rows)), timed(lambda: ours(dump))) for _ in range(given.rounds)]
    print(f"{tokens} tokens, median of {given.rounds}")
    for which, name in enumerate(("CPU", "wall")):
        peer, own = (median(pair[side][which] for pair in pairs) / tokens * 1e9 for side in (0, 1))
        ratio = median(mine[which] / theirs[which] for theirs, mine in pairs)
        print(f"{name:4}  pyarrow {peer:6.1f} ns/token  ours {own:6.1f} ns/token  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
