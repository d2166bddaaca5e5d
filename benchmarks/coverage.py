"""How often the 95% intervals hold the truth, on dumps drawn from policies whose true numbers are known.

    python benchmarks/coverage.py [--groups 5 8 32 …] [--dumps 500] [--write]

Eight responses to a prompt; prompts and responses differ in length and in the size of the mismatch. Beside
the intervals as they are, from 512 draws of at most 256 buckets of prompts, stand those from 256 draws of
every prompt, on the same dumps. Every dump has a seed of its own: the counts are the same on every machine.
--write puts the table into docs/how-often-it-is-right.md. All of it takes two to three minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

sys.path.insert(0, str(Path(__file__).parents[1]))


from benchmarks import tables
from offpol_diag.core import gap, preset_numbers, tails
from offpol_diag.core.intervals import Formula, Groups, Reader, less
from offpol_diag.core.state import TAIL, Table, buckets_of, draws
from offpol_diag.dump.batch import mix
from offpol_diag.number import Number

Array = npt.NDArray[np.float64]
GROUPS = (5, 32, 72, 1000, 4000)
RESPONSES, MEDIAN_LENGTH = 8, 24
"""Responses to a prompt, and median of their lengths in tokens, whose logarithm has a deviation of 0.57."""
WIDEST = 3.0
"""Largest spread as a multiple of the median: unbounded, E[r²] would not exist."""
ENOUGH, LIGHT = 72, 0.5
"""Prompts from which on, and k̂ up to which, an interval is to hold the truth in 93 to 97% of dumps."""
LOW, HIGH = math.log(0.5), math.log(2.0)
"""Tokens with log r outside are rejected."""
LATER = 1.15
"""Spread of the second of two runs over that of the first."""
ROWS: dict[str, Formula] = {
    "K3": next(row for row in gap.ROWS if row.name == "k3"),
    "ESS": tails.ESS_TOKENS,
    "χ²": next(row for row in gap.ROWS if row.name == "chi2_token"),
    "rejected": next(row for row in preset_numbers.ROWS if row.name == "tokens_rejected"),
}
DIFFERENCE = "K3 of two runs"


@dataclass(frozen=True)
class World:
    """A pair of policies: Δ is Gaussian with mean −s²/2 at spread s, so that E[r] = 1, but for wide tokens.

    Attributes:
        text: in words.
        spread: median of s over responses.
        by_group: standard deviation of log s between prompts; within a prompt it is half of that.
        wide: share of tokens that are wide.
        width: their spread.
        rate: in place of it, rate λ of an exponential Δ, whose r has a Pareto tail of index k = 1/λ.
    """

    text: str
    spread: float
    by_group: float
    wide: float
    width: float = 0.0
    rate: float = 0.0


WORLDS = (
    World("light: precision noise", 0.02, 0.4, 0.0, width=1.0),
    World("light, but one token in 1,000 is wide", 0.02, 0.4, 1e-3, width=0.5),
    World("quantised: spread doubles between prompts", 0.25, 0.5, 0.01, width=0.8),
    World("heavy: 1% with a Pareto tail of k = 0.7", 0.1, 0.4, 0.01, rate=1.43),
)


def responses(world: World, groups: int, rng: np.random.Generator) -> tuple[npt.NDArray[np.int64], Array]:
    """Draw length and spread of the responses to some prompts, [8 G] each."""
    of_group, own = (
        rng.standard_normal((2, groups)).repeat(RESPONSES, 1),
        rng.standard_normal((2, groups * RESPONSES)),
    )
    lengths = np.clip(np.rint(MEDIAN_LENGTH * np.exp(0.4 * (of_group[0] + own[0]))), 1, 2000).astype(np.int64)
    log_spread = world.by_group * (of_group[1] + 0.5 * own[1])
    return lengths, world.spread * np.exp(np.minimum(log_spread, math.log(WIDEST)))


def summed(
    world: World, lengths: npt.NDArray[np.int64], spread: Array, rng: np.random.Generator
) -> tuple[dict[str, Array], Array]:
    """Draw the tokens of responses: return what the formulas need, added up, [8 G] each, and Δ, [T]."""
    s, n = np.repeat(spread, lengths), int(lengths.sum())
    delta = s * rng.standard_normal(n) - s**2 / 2
    at = np.flatnonzero(rng.random(n) < world.wide)
    if world.rate:
        delta[at] = math.log(1 - 1 / world.rate) + rng.exponential(1 / world.rate, len(at))
    else:
        delta[at] = world.width * rng.standard_normal(len(at)) - world.width**2 / 2
    r1 = np.expm1(delta)
    kept = ((delta >= LOW) & (delta <= HIGH)).astype(np.float64)
    found = {"k3": r1 - delta, "ratio_minus_1": r1, "ratio_sq_minus_1": r1 * (r1 + 2), "kept": kept}
    starts = np.cumsum(lengths) - lengths
    sums = {name: np.add.reduceat(x, starts) for name, x in found.items()}
    return sums | {"tokens": lengths.astype(np.float64), "sequences": np.ones(len(lengths))}, delta


def truths(world: World, groups: int = 100_000) -> dict[str, float]:
    """Compute the true numbers, by the expected sums of each response, over many of them."""
    lengths, spread = responses(world, groups, np.random.default_rng(7))

    def gaussian(s: Array) -> tuple[Array, Array, Array]:
        """Compute E[k3], E[r²] − 1 and the share that is kept, at spreads s."""
        return s**2 / 2, np.expm1(s**2), ndtr((HIGH + s**2 / 2) / s) - ndtr((LOW + s**2 / 2) / s)

    def mixed(factor: float) -> list[float]:
        usual = [float((lengths * x).sum() / lengths.sum()) for x in gaussian(factor * spread)]
        if world.rate:  # Δ = first + an exponential number, first > log(1/2)
            first = math.log(1 - 1 / world.rate)
            chi2 = math.exp(2 * first) / (1 - 2 / world.rate) - 1 if world.rate > 2 else math.inf
            above = math.exp(-world.rate * max(LOW - first, 0.0)) - math.exp(-world.rate * (HIGH - first))
            wide = [-first - 1 / world.rate, chi2, above]
        else:
            wide = [float(x[0]) for x in gaussian(np.array([world.width]))]
        return [(1 - world.wide) * x + world.wide * y for x, y in zip(usual, wide, strict=True)]

    k3, chi2, kept = mixed(1.0)
    found = {
        "K3": k3,
        "ESS": 1 / (1 + chi2),
        "χ²": chi2,
        "rejected": 1 - kept,
        DIFFERENCE: mixed(LATER)[0] - k3,
    }
    if math.isinf(chi2):
        del found["ESS"], found["χ²"]
    if found["rejected"] < 1e-9:
        del found["rejected"]
    return found


def as_they_are(columns: Mapping[str, Array], groups: npt.NDArray[np.uint64], many: int) -> Reader:
    """Read sums as the tool does, by bucket of groups."""
    return Reader.of(Table.of(columns, buckets_of(groups)), 0, many)


def each_group_drawn(columns: Mapping[str, Array], groups: npt.NDArray[np.uint64], many: int) -> Reader:
    """Read sums by 256 draws of every group, whose effective number is of the replicates of the tokens."""
    times = draws(groups, 0, 256)
    drawn = {name: np.concatenate(([x.sum()], x @ times)) for name, x in columns.items()}
    tokens = drawn["tokens"]
    square = float(np.square(tokens[1:] - tokens[0]).mean())
    return Reader(drawn, Groups(many, min(float(tokens[0]) ** 2 / square, float(many))))


METHODS = (as_they_are, each_group_drawn)


@np.errstate(all="ignore")
def dump(world: World, many: int, seed: tuple[int, ...]) -> tuple[list[dict[str, Number]], float]:
    """Draw a dump, and a second run of the same prompts; return the numbers by each method, and k̂."""
    rng = np.random.default_rng(seed)
    lengths, spread = responses(world, many, rng)
    first, delta = summed(world, lengths, spread, rng)
    second, _ = summed(world, lengths, LATER * spread, rng)
    groups = np.repeat(mix(rng.integers(0, 2**63, many).astype(np.uint64)), RESPONSES)
    found = []
    for method in METHODS:
        one, other = (method(columns, groups, many) for columns in (first, second))
        k3, later = (reader.column("k3") / reader.column("tokens") for reader in (one, other))
        numbers = {name: one.number(row) for name, row in ROWS.items()}
        found.append(numbers | {DIFFERENCE: less(later, k3, numbers["K3"], one.groups)})
    fit = tails.fit(np.sort(delta)[::-1][:TAIL], len(delta))
    return found, fit.k if fit else math.nan


@dataclass(frozen=True)
class Cell:
    """Many dumps: number → coverage and median width over the truth, by each method; and median k̂."""

    found: dict[str, list[tuple[float, float]]]
    khat: float


def cell(place: int, many: int, dumps: int) -> Cell:
    """Draw dumps, and hold their intervals against the truth."""
    seen = [dump(WORLDS[place], many, (place, many, i)) for i in range(dumps)]
    result: dict[str, list[tuple[float, float]]] = {}
    for (name, value), method in product(truths(WORLDS[place]).items(), range(len(METHODS))):
        every = (numbers[method][name].interval for numbers, _ in seen)
        low, high = np.array([ends for ends in every if ends]).reshape(-1, 2).T
        held = (low <= value) & (value <= high)
        result.setdefault(name, []).append((float(held.mean()), float(np.median(high - low)) / value))
    return Cell(result, float(np.median([khat for _, khat in seen])))


def rows(cells: Mapping[tuple[int, int], Cell]) -> Iterator[tuple[str, ...]]:
    """Yield lines of coverage and width; those of draws of every prompt are in brackets.

    A star stands where k̂ is above 0.5, or prompts are fewer than 72.
    """
    for (place, many), one in cells.items():
        star, said = "*" if many < ENOUGH or one.khat > LIGHT else "", []
        for name in (*ROWS, DIFFERENCE):
            (held, width), (before, wide) = one.found.get(name, [(math.nan, math.nan)] * 2)
            text = f"{held:.1%}{star} ({before:.1%}), {width:.2g} ({wide:.2g})"
            said.append("–" if math.isnan(held) else text)
        yield f"{many:,}", WORLDS[place].text, f"{one.khat:.2f}", *said


def main() -> None:
    """Measure what is asked for, and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, nargs="*", default=GROUPS)
    parser.add_argument("--dumps", type=int, default=500, help="of each; fewer where there are many groups")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    asked = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        few = {many: min(asked.dumps, max(200_000 // many, 60)) for many in asked.groups}
        jobs = {
            (place, many): pool.submit(cell, place, many, few[many])
            for place, many in product(range(len(WORLDS)), asked.groups)
        }
        cells = {at: job.result() for at, job in jobs.items()}
    text = tables.table(("prompts", "policies", "k̂", *ROWS, DIFFERENCE), [*rows(cells)])
    print(text)
    if asked.write:
        tables.put("intervals", text)


if __name__ == "__main__":
    main()
