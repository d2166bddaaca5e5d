"""Measure and write `docs/coverage.md`: `python benchmarks/covering/run.py [--dumps N] [--write]`.

Every dump is drawn with a seed of its own, so the counts are the same on every machine and with any number of
processes; they are kept in `results.json`, from which the page is written (`--write` alone writes it again).
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from threadpoolctl import threadpool_limits

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from covering import alarms, page, truth  # noqa: E402
from covering.cells import cells  # noqa: E402
from covering.worlds import WORLDS  # noqa: E402

RESULTS = Path(__file__).with_name("results.json")
ALARMS = Path(__file__).with_name("alarms.json")
DUMPS = {8: 100, 32: 150, 128: 250, 1024: 50}
"""Groups → number of dumps of each world."""


def measured(place: int, groups: int, dumps: int) -> dict[str, Any]:
    """Measure one world at one number of groups."""
    threadpool_limits(1)
    world = WORLDS[place]
    known = truth.truths(world)
    found = cells(world, known, groups, dumps)
    return {name: asdict(one) | {"truth": known[name].value} for name, one in found.items()}


def main() -> None:
    """Measure what is asked for, store it, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, nargs="*", default=[*DUMPS])
    parser.add_argument("--dumps", type=int, help="of each world, for every number of groups")
    parser.add_argument(
        "--alarms", type=int, help="only the identities, on so many honest dumps of each world"
    )
    parser.add_argument("--write", action="store_true", help="only write the page from what is kept")
    asked = parser.parse_args()
    if asked.alarms:
        ALARMS.write_text(json.dumps(alarms.measured(asked.alarms), indent=1) + "\n", encoding="utf-8")
    elif not asked.write:
        measure(asked.groups, asked.dumps)
    page.write(ROOT / "docs" / "coverage.md", kept(), json.loads(ALARMS.read_text(encoding="utf-8")))


def measure(groups: list[int], dumps: int | None) -> None:
    """Measure world by world; each result is stored at once."""
    with ProcessPoolExecutor(2) as pool:
        jobs = {
            pool.submit(measured, place, many, dumps or DUMPS[many]): f"{WORLDS[place].name}|{many}"
            for many in groups
            for place in range(len(WORLDS))
        }
        for job in as_completed(jobs):
            keep(jobs[job], job.result())
            print(jobs[job], flush=True)


def kept() -> dict[str, Any]:
    """Load all results, by world and groups."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return found


def keep(name: str, result: object) -> None:
    """Store one result in place of its last."""
    text = json.dumps(dict(sorted((kept() | {name: result}).items())), indent=1, ensure_ascii=False)
    RESULTS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
