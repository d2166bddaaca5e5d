"""Measure the seconds of two threads as a share of those of one.

    python benchmarks/threads.py [--sequences N] [--rounds N]

Dumps of 2 M, 4 M and 8 M tokens.
"""

from __future__ import annotations

import tempfile
from functools import partial

import part
import peak
import rounds

SMALLEST = 2048
"""Sequences of the smallest dump, of about 1,008 tokens each."""


def measure(given: part.Given) -> part.Result:
    """Measure seconds by tokens and threads; the commands in turn."""
    sizes = [n for n in (SMALLEST, 2 * SMALLEST, 4 * SMALLEST) if n < given.sequences]
    return {"rounds": given.rounds, "rows": [_one(n, given.rounds) for n in [*sizes, given.sequences]]}


def _one(sequences: int, many: int) -> part.Result:
    with part.dump(sequences) as (path, facts), tempfile.TemporaryDirectory() as folder:
        options = ["analyze", str(path), "--quiet", "-o", f"{folder}/report.html"]
        timed = rounds.alternate(
            {n: partial(peak.offpol_diag, *options, f"--threads={n}") for n in ("1", "2")}, many
        )
    return facts | {"seconds": timed.seconds(), "two_over_one": timed.ratio("2", "1")}


def main() -> None:
    """Print a line for each size."""
    given = part.options(__doc__, 4 * SMALLEST).parse_args()
    for row in measure(part.Given(given.sequences, given.rounds))["rows"]:
        print(f"{row['tokens']:>12,} tokens  two threads take {row['two_over_one']:.2f} of the time of one")


if __name__ == "__main__":
    main()
