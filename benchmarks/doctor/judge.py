"""Make the dumps of sampled.py, columns.py and lists.py, diagnose them, write docs/doctor-sampled.md.

    python benchmarks/doctor/judge.py [--split NAME] [--only ARCHITECTURE …] [--cache DIR] [--write]

--write keeps the rows and writes the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))


from benchmarks.doctor import columns, lists, sync
from benchmarks.doctor.sampled import ALSO, TABLE, dumps
from offpol_diag.analyze import analyze

CACHE = sync.HERE / ".cache"
RESULTS = sync.HERE / "sampled.json"
DOCS = sync.DOCS.with_name("doctor-sampled.md")
SPLITS = {
    "development": ("qwen3", "llama", "olmo2", "phi", "qwen3-moe", "gpt-neox"),
    "final": ("gpt-bigcode", "gemma3", "gpt-oss"),
    "columns": ("qwen3", "llama", "olmo2", "phi", "qwen3-moe", "gpt-neox", "mixtral"),
}
DECIDING = columns.TABLE | lists.TABLE
TABLES = {name: DECIDING if name == "columns" else TABLE for name in SPLITS}
"""Split → its dumps."""


class Case(NamedTuple):
    """A kind of dump, and its cause, empty for an honest one."""

    name: str
    cause: str


CASES = [Case(n, "" if c == "honest" else c) for n, (c, _) in (TABLE | DECIDING).items()]
ALSO_RIGHT = ALSO | columns.ALSO | lists.ALSO


def diagnosed(name: str, cause: str, path: Path) -> sync.Row:
    """Diagnose a dump; return what is known of it with what the diagnosis says."""
    found = analyze([str(path)], presets=(), device="cpu", threads=1).diagnosis
    assert found is not None
    cause = "" if cause == "honest" else cause
    named, fitting = [one.id for one in found.causes], [one.id for one in found.candidates]
    said = [sync.judged(one, found.verdict, named, fitting) for one in (cause, *ALSO_RIGHT.get(name, ()))]
    return {
        "case": name,
        "cause": cause,
        "verdict": found.verdict,
        "named": named,
        "candidates": fitting,
        "answer": f"`{named[0]}`" if named else found.verdict,
        "said": "right" if "right" in said else said[0],
    }


def rows(split: str, architectures: tuple[str, ...], cache: Path) -> Iterator[sync.Row]:
    """Make and diagnose the dumps of a split, of some architectures."""
    for architecture in architectures:
        for name, cause, path in dumps(architecture, cache, table=TABLES[split]):
            row: dict[str, Any] = {"architecture": architecture} | diagnosed(name, cause, path)
            print(f"{architecture:12s} {name:45s} {row['said']:12s} {row['named']} {row['candidates']}")
            yield row


def text() -> str:
    """Render docs/doctor-sampled.md."""
    return sync.text(sync.results(RESULTS), "sampled.md.j2", CASES)


def main() -> None:
    """Make, diagnose, print and store the dumps of a split."""
    given = sync.asked(__doc__, SPLITS, CACHE, DOCS)
    some = tuple(one for one in SPLITS[given.split] if not given.only or one in given.only)
    found = list(rows(given.split, some, given.cache))
    if given.write:
        sync.keep(given.split, found, RESULTS)
        DOCS.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
