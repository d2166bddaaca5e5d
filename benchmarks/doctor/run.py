"""Diagnose every dump of a split, and write figures and docs/doctor.md.

    python benchmarks/doctor/run.py [--split NAME] [--limit N] [--jobs 2] [--dumps DIR] [--write]

--dumps diagnoses what `make.py` has written there. --write keeps the rows and writes the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import offpol_diag
from benchmarks.doctor import make, page

Row = dict[str, Any]
KEPT = ("name", "causes", "also", "verdicts", "family", "model", "base", "severity", "place", "where")
KEPT += ("sequences", "tokens", "off_tokens", "off_sequences")


def diagnosed(entry: Row, folder: Path) -> Row:
    """Diagnose a dump; return its known facts with what the diagnosis says."""
    began = time.perf_counter()
    found = offpol_diag.analyze([str(folder / entry["path"])], presets=(), device="cpu", threads=1).diagnosis
    seconds = time.perf_counter() - began
    assert found is not None
    after = found.causes[0].after if found.causes else None
    said = {
        "verdict": found.verdict,
        "named": [one.id for one in found.causes],
        "candidates": [one.id for one in found.candidates],
        "places": [one.where for one in found.causes],
        "statistic": found.causes[0].statistic if found.causes else found.headline,
        "after": None if after is None or after.approximate else float(f"{after.k3:.3g}"),
        "seconds": round(seconds, 3),
    }
    sizes = {name: entry[name] and float(f"{entry[name]:.3g}") for name in ("change", "noise", "k3")}
    return {name: entry[name] for name in KEPT} | sizes | said


def main() -> None:
    """Make, diagnose, print and store the dumps of a split."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=make.SHAPES, default="development")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dumps", type=Path, help="a folder with a manifest.json; default: make them now")
    parser.add_argument("--cache", type=Path, default=make.CACHE)
    parser.add_argument("--write", action="store_true", help="keep the rows and write docs/doctor.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.dumps or Path(made)
        if given.dumps is None:
            make.make(make.chosen(given.split, given.limit), folder, given.cache)
        entries = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))[: given.limit]
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            rows = list(pool.map(diagnosed, entries, [folder] * len(entries), chunksize=4))
    print(page.tables(rows))
    if given.write:
        page.keep(given.split, rows)
        page.write()


if __name__ == "__main__":
    main()
