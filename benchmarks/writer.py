"""Measure the cost of DumpWriter: its stages, and levels and encodings of Parquet.

python benchmarks/writer.py [--rounds N] [--write]
"""

from __future__ import annotations

import io
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import dump
import part
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag import writer

FORMS: tuple[tuple[str, int | None, bool], ...] = (
    ("none", None, True),
    ("lz4", None, True),
    ("zstd", 1, True),
    ("zstd", 1, False),
    ("zstd", 3, True),
    ("zstd", 9, True),
)
"""Compression, level, and whether floats are split into bytes."""


def measure(given: part.Given) -> part.Result:
    """Measure tokens per CPU second: `write` and `close`, each stage, other ways to encode; medians."""
    load = os.getloadavg()[0]
    table = dump.block(0)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    columns = {name: list(rows) if rows.dtype == object else rows for name, rows in columns.items()}
    tokens = len(table["rollout_log_probs"].combine_chunks().flatten())
    made = writer._table(columns, "float32", None)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "d.parquet"

        def journal() -> None:
            log = writer.Journal(Path(folder) / "j")
            log.append(made)
            log.remove()

        stages = {
            "whole": lambda: _written(path, columns, True),
            "without": lambda: _written(path, columns, False),
            "columns": lambda: writer._table(columns, "float32", None),
            "journal": journal,
        }
        seconds = {name: _seconds(stage, given.rounds) for name, stage in stages.items()}
    rows = []
    for codec, level, split in FORMS:
        size = _encoded(made, codec, level, split)
        taken = _seconds(lambda form=(codec, level, split): _encoded(made, *form), given.rounds)
        rows.append(
            {"codec": codec, "level": level, "split": split, "rate": tokens / taken, "bytes": size / tokens}
        )
    rates = {name: tokens / taken for name, taken in seconds.items()}
    return {"rounds": given.rounds, "load": round(load, 1), "tokens": tokens, "rates": rates, "rows": rows}


def _written(path: Path, columns: dict[str, Any], journal: bool) -> None:
    with writer.DumpWriter(path, journal=journal) as output:
        output.write(**columns)


def _encoded(table: pa.Table, codec: str, level: int | None, split: bool) -> int:
    """Encode a table in memory; return its bytes."""
    options = writer._encodings(table.schema)
    if not split:
        options |= {"column_encoding": dict.fromkeys(options["column_encoding"], "PLAIN")}
    sink = io.BytesIO()
    kind = {"compression": codec, "compression_level": level, "write_batch_size": 1 << 16}
    with pq.ParquetWriter(sink, table.schema, **kind, **options) as output:
        output.write_table(table)
    return len(sink.getvalue())


def _seconds(stage: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):
        start = time.process_time()
        stage()
        taken.append(time.process_time() - start)
    return median(taken[1:])


if __name__ == "__main__":
    part.main("writer", measure, __doc__)
