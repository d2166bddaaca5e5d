"""Print how often intervals hold the truth, as docs/how-often-it-is-right.md has it.

    python benchmarks/covering/run.py [--groups 8 32 128 1024] [--dumps N] [--details] [--write]

Every dump is drawn with a seed of its own, so the counts are the same on every machine and with any number
of processes. All takes minutes on two cores. --details prints every number, --write puts the table into the
page.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import tables
from benchmarks.covering import truth
from benchmarks.covering.cells import Cell, cells
from benchmarks.covering.worlds import RARE, WORLDS

DUMPS = {8: 100, 32: 150, 128: 250, 1024: 50}
"""Groups → number of dumps of each world."""
AIM = (0.93, 0.97)
Cells = Mapping[str, Cell]


def measured(place: int, groups: int, dumps: int) -> Cells:
    """Measure one world at one number of groups."""
    threadpool_limits(1)
    world = WORLDS[place]
    return cells(world, truth.truths(world), groups, dumps)


def rows(found: Mapping[tuple[int, int], Cells]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each number of groups and each world, over all numbers that have a true value.

    A number that is left in fewer than half of the dumps is no fair sample of them, and is left out.
    """
    for (place, groups), every in found.items():
        judged = {name: one for name, one in every.items() if one.judged >= one.dumps / 2}
        if not judged:
            continue
        within = sum(
            AIM[0] - 2 * one.binomial <= one.coverage <= AIM[1] + 2 * one.binomial for one in judged.values()
        )
        lowest = min(judged, key=lambda name: judged[name].coverage)
        middle = statistics.median(one.coverage for one in judged.values())
        yield (
            f"{groups:,}",
            WORLDS[place].text,
            str(max(one.dumps for one in judged.values())),
            f"{middle:.1%}",
            f"{within} of {len(judged)}",
            f"{judged[lowest].coverage:.1%} (`{lowest}`)",
        )


def details(found: Mapping[tuple[int, int], Cells]) -> Iterator[tuple[str, ...]]:
    """Yield a line for each number: coverage, width over the truth, misses on both sides, unreliable ones."""
    for (place, groups), every in found.items():
        for name, one in every.items():
            share = "–" if math.isnan(one.coverage) else f"{one.coverage:.1%}"
            counts = (str(one.below), str(one.above), str(one.unreliable))
            yield f"{groups:,}", WORLDS[place].name, name, share, f"{one.width:.2g}", *counts


def measure(groups: Sequence[int], dumps: int | None) -> dict[tuple[int, int], Cells]:
    """Measure every world at every number of groups, but rare events, which a dump may lack."""
    places = [(at, many) for many in groups for at, world in enumerate(WORLDS) if world.name not in RARE]
    with ProcessPoolExecutor(2) as pool:
        jobs = {(at, many): pool.submit(measured, at, many, dumps or DUMPS[many]) for at, many in places}
        return {place: job.result() for place, job in jobs.items()}


def main() -> None:
    """Measure what is asked for, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="*", default=[*DUMPS], choices=DUMPS)
    parser.add_argument("--dumps", type=int, help="of each world, for every number of groups")
    parser.add_argument("--details", action="store_true", help="also print every number")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    asked = parser.parse_args()
    found = measure(asked.groups, asked.dumps)
    header = ("prompts", "policies", "dumps", "median coverage", "within", "lowest")
    text = tables.table(header, [*rows(found)])
    print(text)
    if asked.details:
        numbers = ("prompts", "policies", "number", "coverage", "width", "below", "above", "unreliable")
        print(tables.table(numbers, [*details(found)]))
    if asked.write:
        tables.put("intervals", text)


if __name__ == "__main__":
    main()
