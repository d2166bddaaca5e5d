"""Check that time grows linearly with the tokens and with the presets, or slower.

    python benchmarks/complexity.py [--sequences N] [--rounds N] [--write]

Time per token from 1 M to 64 M tokens must not grow by more than `GROWTH` from one size to any larger one,
and the last presets must not cost more than the first ones by more than `STEEPER`; else the exit code is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations

import machine
import part
import presets
import rounds

from offpol_diag.analyze import analyze
from offpol_diag.presets.catalogue import load

GROWTH = 0.25
STEEPER = 0.5
SMALLEST = 1024


def measure(given: part.Given) -> part.Result:
    """Measure seconds by tokens and by presets.

    Raises:
        Failed: one of the two is not as claimed.
    """
    by_size = [_one(n, given.rounds) for n in part.sizes(given.sequences, SMALLEST)]
    by_presets = presets.measure(part.Given(min(given.sequences, part.SEQUENCES), given.rounds))
    found = growth([row["ns_per_token"] for row in by_size])
    steep = steeper(by_presets["presets"], by_presets["seconds"])
    held(found, steep)
    return {
        "rounds": given.rounds,
        "rows": by_size,
        "growth": found,
        "growth_allowed": GROWTH,
        "presets": by_presets,
        "steeper": steep,
        "steeper_allowed": STEEPER,
    }


def growth(per_token: Sequence[float]) -> float:
    """Return the largest relative growth of time per token from a size to a larger; negative if it falls."""
    return max((large / small - 1 for small, large in combinations(per_token, 2)), default=0.0)


def steeper(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return how much steeper the line through the last two counts is than that through all before them."""
    _, first, _ = rounds.slope(counts[:-1], seconds[:-1])
    return (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2]) / first - 1


def held(growth: float, steep: float) -> None:
    """Raise `Failed` naming each claim that does not hold."""
    if not growth <= GROWTH:
        raise part.Failed(f"time per token grows by {growth:.0%} with the dump, more than {GROWTH:.0%}")
    if not steep <= STEEPER:
        raise part.Failed(f"time per further preset grows by {steep:.0%}, more than {STEEPER:.0%}")


def _one(sequences: int, times: int) -> part.Result:
    every = load().resolve("all")
    with part.dump(sequences) as (path, facts):
        one = partial(analyze, [str(path)], presets=every, threads=machine.THREADS)
        timed = rounds.alternate({"analyze": one}, times)
    seconds = timed.median("analyze")
    return facts | {"seconds": seconds, "ns_per_token": seconds * 1e9 / facts["tokens"]}


if __name__ == "__main__":
    part.main("complexity", measure, __doc__, sequences=65_536)
