"""Measure peak memory of `offpol-diag analyze` with every preset and two workers.

    python benchmarks/memory.py [--sequences N] [--write]

Dumps of 4 M, 16 M and 64 M tokens, 64 M tokens in one row group, and 4 M of a collapsed run; `--sequences
262144` goes on to 256 M. Each is one fresh command, and its dump is deleted before the next is made.
"""

from __future__ import annotations

import machine
import part
import peak

SMALLEST = 4096
"""Sequences of the smallest dump, of about 1,008 tokens each."""
COLLAPSED = 2.0
"""Standard deviation of Δ of unlikely tokens in a collapsed run, nats: presets act on most tokens."""


def measure(given: part.Given) -> part.Result:
    """Measure peak bytes and seconds for each dump."""
    rows = [_one(n, "ordinary") for n in part.sizes(given.sequences, SMALLEST)]
    one_group, collapsed = (min(given.sequences, n) for n in (16 * SMALLEST, SMALLEST))
    rows.append(_one(one_group, "in one row group", rows_per_group=one_group))
    return {"rows": [*rows, _one(collapsed, "a collapsed run", rounding=COLLAPSED)]}


def _one(sequences: int, kind: str, **options: float) -> part.Result:
    with part.dump(sequences, **options) as (path, facts):
        report = ["--quiet", f"--workers={machine.THREADS}", "-o", str(path.with_suffix(".html"))]
        spent = peak.offpol_diag("analyze", str(path), *report)
    return facts | {"kind": kind, "peak": spent.peak, "together": spent.together, "seconds": spent.wall}


if __name__ == "__main__":
    part.main("memory", measure, __doc__, sequences=16 * SMALLEST)
