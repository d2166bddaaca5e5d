"""Measure peak memory of `offpol-diag analyze` with every preset and two threads.

    python benchmarks/memory.py [--sequences N] [--write]

Dumps of 4 M, 16 M and 64 M tokens, 64 M tokens in one row group, and 4 M and 64 M of every other shape of
dump.py (a collapsed run, lengths of a large spread, very short rows), each after the ordinary dump of its
size; `--sequences 262144` goes on to 256 M. Each is one fresh command; its dump is deleted before the next
is made.
"""

from __future__ import annotations

import dump
import machine
import part
import peak
import report

SMALLEST = 4096
"""Sequences of the smallest dump, of about 1,008 tokens each."""


def measure(given: part.Given) -> part.Result:
    """Measure peak bytes and seconds for each dump; `over_ordinary` is a ratio of peaks at the same size."""
    rows: list[part.Result] = []
    sizes = part.sizes(given.sequences, SMALLEST)
    for n in sizes:
        rows.append(ordinary := _one(n, report.SHAPES["ordinary"]))
        for shape in [*dump.SHAPES][1:] if n in (sizes[0], sizes[-1]) else []:
            row = _one(n, report.SHAPES[shape], shape=shape)
            rows.append(row | {"over_ordinary": row["peak"] / ordinary["peak"]})
    one_group = min(given.sequences, 16 * SMALLEST)
    return {"rows": [*rows, _one(one_group, "in one row group", rows_per_group=one_group)]}


def _one(sequences: int, kind: str, **options: float | str) -> part.Result:
    with part.dump(sequences, **options) as (path, facts):
        given = ["--quiet", f"--threads={machine.THREADS}", "-o", str(path.with_suffix(".html"))]
        spent = peak.offpol_diag("analyze", str(path), *given)
    return facts | {"kind": kind, "peak": spent.peak, "together": spent.together, "seconds": spent.wall}


if __name__ == "__main__":
    part.main("memory", measure, __doc__, sequences=16 * SMALLEST)
