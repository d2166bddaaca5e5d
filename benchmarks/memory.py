"""Measure peak memory of `offpol-diag analyze` with every preset and two workers.

    python benchmarks/memory.py [--sequences N] [--write]

Dumps of 4 M, 16 M and 64 M tokens, and 64 M tokens in one row group; `--sequences 262144` goes on to 256 M.
Each is one fresh command, and its dump is deleted before the next is made.
"""

from __future__ import annotations

import machine
import part
import peak

SMALLEST = 4096
"""Sequences of the smallest dump, of about 1,008 tokens each."""


def measure(given: part.Given) -> part.Result:
    """Measure peak bytes and seconds for each dump."""
    sizes = part.sizes(given.sequences, SMALLEST)
    one_group = min(given.sequences, 16 * SMALLEST)
    rows = [_one(n, None) for n in sizes]
    return {"rows": [*rows, _one(one_group, one_group)]}


def _one(sequences: int, rows_per_group: int | None) -> part.Result:
    with part.dump(sequences, rows_per_group) as (path, facts):
        options = ["--quiet", f"--workers={machine.THREADS}", "-o", str(path.with_suffix(".html"))]
        spent = peak.offpol_diag("analyze", str(path), *options)
    seen = {"peak": spent.peak, "together": spent.together, "seconds": spent.wall}
    return facts | {"one_row_group": rows_per_group is not None, **seen}


if __name__ == "__main__":
    part.main("memory", measure, __doc__, sequences=16 * SMALLEST)
