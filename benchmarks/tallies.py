"""Measure the size of a tally file by size of its dump, and the time to merge one more.

    python benchmarks/tallies.py [--sequences N] [--rounds N] [--write]

Every preset; packed, as `analyze --tally x.tally` writes it. `--sequences` is the larger dump; the
smaller ones, which are merged, have an eighth of it. A merge takes one core; its time is of processor.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import part
import peak
import rounds

from offpol_diag.analysis.merge import merge

PIECES = 2
SMALLER = 8


def measure(given: part.Given) -> part.Result:
    """Measure bytes of a tally of two sizes, and the seconds of a merge."""
    small = max(1, given.sequences // SMALLER)
    with tempfile.TemporaryDirectory() as folder:
        pieces = [Path(folder) / f"{i}.tally" for i in range(PIECES)]
        rows = [_one(small + i, path) for i, path in enumerate(pieces)]  # no two dumps alike: that is refused
        rows.append(_one(given.sequences, Path(folder) / "large.tally"))
        timed = rounds.alternate(
            {"one": partial(merge, pieces[:1]), "all": partial(merge, pieces)}, given.rounds
        )
    spent = timed.seconds()
    seconds = (spent["all"]["cpu"] - spent["one"]["cpu"]) / (PIECES - 1)
    return {"rounds": given.rounds, "pieces": PIECES, "rows": [rows[0], rows[-1]], "merge_seconds": seconds}


def _one(sequences: int, tally: Path) -> part.Result:
    with part.dump(sequences) as (path, facts):
        peak.offpol_diag("analyze", str(path), "--quiet", "--no-html", "--tally", str(tally))
    return facts | {"tally_bytes": tally.stat().st_size}


if __name__ == "__main__":
    part.main("tallies", measure, __doc__, sequences=8192)
