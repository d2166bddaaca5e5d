"""Proof that the advice is good: what `recommend` and other policies reach where the true gradient is known.

    python benchmarks/advice/run.py [--quick] [--write] [--workers N] [--cache FOLDER]

`--write` keeps what was measured in benchmarks/advice/results.json and writes docs/advice.md from it.
`--quick` measures a few regimes only and keeps nothing. `--cache` keeps what was drawn in a folder and takes
it from there, so that another rule is judged by the same dumps in seconds; it must be emptied when anything
below the rules has changed. The training runs of the page are made by
`training.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.advice import page, table
from benchmarks.advice.regimes import Regime, regimes


def main() -> None:
    """Measure, print the tables, keep them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few regimes, in seconds; nothing is kept")
    parser.add_argument("--write", action="store_true", help="keep the results and write the page")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--cache", type=Path, help="keep what was drawn here, and take it from here")
    given = parser.parse_args()
    chosen = [regime for regime in regimes() if not given.quick or _quick(regime)]
    rows = measured(chosen, given.workers, given.cache)
    if given.write and not given.quick:
        page.keep("regimes", rows)
        page.write()
    print(page.tables(rows))


def _quick(regime: Regime) -> bool:
    return regime.longest in (8, 12) and regime.kind.name.endswith(("0.05", "1.25", "4 steps old"))


def measured(chosen: list[Regime], workers: int, cache: Path | None = None) -> list[table.Row]:
    """A row for each regime, in their order; those of short responses are begun first."""
    names = [one.name for one in sorted(chosen, key=lambda one: one.longest)]
    rows: dict[str, table.Row] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _alone) as pool:
        for job in as_completed([pool.submit(_row, name, cache) for name in names]):
            row = job.result()
            rows[row["name"]] = row
            print(f"{len(rows)}/{len(chosen)} {row['name']}", file=sys.stderr)
    return [rows[one.name] for one in chosen]


def _row(name: str, cache: Path | None) -> table.Row:
    regime = next(one for one in regimes() if one.name == name)
    kept = cache / f"{name.replace(' ', '_')}.pickle" if cache else None
    if kept and kept.exists():
        return table.row(regime, pickle.loads(kept.read_bytes()))
    found = table.measure(regime)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps(found))
    return table.row(regime, found)


def _alone() -> None:
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
