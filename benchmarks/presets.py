"""Measure the cost of each further preset, as a share of an analysis with one.

    python benchmarks/presets.py [--sequences N] [--rounds N] [--write]

A line through the times of 1, 20, 60 and all presets; smaller sets are spread over the catalogue and lie
within the larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import machine
import part
import rounds

from offpol_diag.analyze import analyze
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import load

COUNTS = (1, 20, 60)


def spread(presets: Sequence[Preset], counts: Sequence[int]) -> dict[int, tuple[Preset, ...]]:
    """Return, by count, that many presets in the order of a walk through the catalogue in large steps."""
    step = next(
        step for step in range(round(len(presets) * 0.618), len(presets) + 1) if _visits_all(step, presets)
    )
    walk = [presets[i * step % len(presets)] for i in range(len(presets))]
    return {count: tuple(walk[:count]) for count in (*(n for n in counts if n < len(walk)), len(walk))}


def _visits_all(step: int, presets: Sequence[Preset]) -> bool:
    return len({i * step % len(presets) for i in range(len(presets))}) == len(presets)


def measure(given: part.Given) -> part.Result:
    """Measure seconds by number of presets, and fit a line through them."""
    sets = spread(load().resolve("all"), COUNTS)
    with part.dump(given.sequences) as (path, facts):
        one = partial(analyze, [str(path)], threads=machine.THREADS)
        jobs = {str(n): partial(one, presets=some) for n, some in sets.items()}
        timed = rounds.alternate(jobs, given.rounds)
    seconds = [timed.median(str(n)) for n in sets]
    _, each, off = rounds.slope([*sets], seconds)
    return facts | {
        "rounds": given.rounds,
        "presets": [*sets],
        "seconds": seconds,
        "each": each / seconds[0],
        "off_the_line": off,
    }


if __name__ == "__main__":
    part.main("presets", measure, __doc__)
