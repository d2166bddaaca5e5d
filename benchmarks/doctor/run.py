"""Diagnose dumps of known causes, and print how often these are named.

    python benchmarks/doctor/run.py [--split NAME] [--limit N] [--jobs 2] [--dumps DIR] [--write]

--dumps diagnoses what `make.py` has written there. --write puts the table into
docs/how-often-it-is-right.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import offpol_diag
from benchmarks import tables
from benchmarks.doctor import make
from benchmarks.doctor.faults import HONEST

Row = dict[str, Any]
ALWAYS = ("numerics", "moe_outliers", "low_precision_storage")
"""Causes without a size above the numerics: they are the numerics, or are counted exactly."""
ABOVE, TOKENS, SEQUENCES, ENOUGH = 3.0, 20, 8, 64
"""Change of a fault over the mismatch beside it, its tokens, their sequences, and sequences of the dump, from
which it is decidable."""


def diagnosed(entry: Row, folder: Path) -> Row:
    """Diagnose a dump; return its known facts with what the diagnosis says."""
    found = offpol_diag.doctor(str(folder / entry["path"]), device="cpu", threads=1).diagnosis
    assert found is not None
    said = {
        "verdict": found.verdict,
        "named": [one.id for one in found.causes],
        "fixes": [bool(one.fix) for one in found.causes],
        "candidates": [one.id for one in found.candidates],
        "statistic": found.causes[0].statistic if found.causes else found.headline,
    }
    return entry | said


# ---------------------------------------------------------------- what is right


def right(row: Row) -> set[str]:
    """Return the causes that are right to name."""
    return {*row["causes"], *row["also"]}


def said(row: Row) -> str:
    """Return the cause named first, or the verdict where none was."""
    return str(row["named"][0]) if row["named"] else str(row["verdict"])


def first(row: Row) -> bool:
    """Return whether a true cause was named first; for numerics, a verdict of healthy counts too."""
    return said(row) in right(row) or ("numerics" in right(row) and said(row) == "healthy")


def considered(row: Row) -> bool:
    """Return whether no cause was named, and a true one is among the candidates."""
    return bool(right(row) & {*row["candidates"]})


def misled(row: Row) -> bool:
    """Return whether a wrong cause was named first, with a fix."""
    return bool(row["named"]) and not first(row) and bool(row["fixes"][0])


def decidable(row: Row) -> bool:
    """Return whether the dump is large enough, and the fault larger than the mismatch beside it."""
    enough = row["off_tokens"] >= TOKENS and row["off_sequences"] >= SEQUENCES
    above = row["causes"][0] in ALWAYS or (enough and row["change"] >= ABOVE * row["noise"])
    return bool(row["sequences"] >= ENOUGH and above)


# ---------------------------------------------------------------- the table


def share(rows: Sequence[Row], is_right: Callable[[Row], bool]) -> str:
    """Format a share: 12 of 13."""
    return f"{sum(map(is_right, rows))} of {len(rows)}" if rows else "–"


def text(rows: Sequence[Row]) -> str:
    """Return the table by cause, honest ones last, and the false alarms."""
    honest = [row for row in rows if {*row["causes"]} <= {*HONEST}]
    bugs = [row for row in rows if row not in honest]
    single = [row for row in (*bugs, *honest) if len(row["causes"]) == 1]
    groups = {f"`{row['causes'][0]}`": [] for row in single} | {"two at once": []}
    for row in (*bugs, *honest):
        groups[f"`{row['causes'][0]}`" if len(row["causes"]) == 1 else "two at once"].append(row)
    groups["all bugs"] = [row for row in bugs if len(row["causes"]) == 1]
    cells = [
        (
            cause,
            str(len(some)),
            share(some, first),
            share([row for row in some if decidable(row)], first),
            share(some, considered),
            share(some, misled),
        )
        for cause, some in groups.items()
        if some
    ]
    alarms = sum(row["verdict"] == "bug" for row in honest)
    header = ("cause", "dumps", "first", "decidable", "candidate", "misled")
    return f"{tables.table(header, cells)}\n\nThe verdict is `bug` in {alarms} of {len(honest)} honest dumps."


def main() -> None:
    """Make and diagnose the dumps of a split, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=make.SHAPES, default="development")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dumps", type=Path, help="a folder with a manifest.json; default: make them now")
    parser.add_argument("--cache", type=Path, default=make.CACHE)
    parser.add_argument("--wrong", action="store_true", help="also list what misled and false alarms")
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.dumps or Path(made)
        if given.dumps is None:
            make.make(make.chosen(given.split, given.limit), folder, given.cache)
        entries = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))[: given.limit]
        with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
            rows = list(pool.map(diagnosed, entries, [folder] * len(entries), chunksize=4))
    print(text(rows))
    for row in rows if given.wrong else ():
        if misled(row) or (row["verdict"] == "bug" and {*row["causes"]} <= {*HONEST}):
            print(f"{row['name']}: {', '.join(row['causes'])}; {said(row)}: {row['statistic']}")
    if given.write:
        tables.put("faults", text(rows))


if __name__ == "__main__":
    main()
