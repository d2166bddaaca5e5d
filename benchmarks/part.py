"""Common to all parts of the benchmarks: options, the dump, and where results are stored."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
SEQUENCES = 16_384
ROUNDS = 5
ROOM = 25_000
"""Bytes of disk that a sequence of the dump may take, half as much again as it does."""
NOTHING = "nothing_measured"
"""Key of the reason in a result that only checks the script; such a result is printed and not stored."""
Result = dict[str, Any]


class Failed(Exception):
    """A benchmark shows nothing: its numbers do not agree, or its claim does not hold."""


@dataclass(frozen=True)
class Given:
    """Size of a benchmark: sequences of its (largest) dump, and rounds."""

    sequences: int
    rounds: int


Measure = Callable[[Given], Result]


@contextmanager
def dump(sequences: int, **options: float | str) -> Iterator[tuple[Path, Result]]:
    """Make a dump in a temporary folder, with options of dump.py; yield its path with its size.

    Another process makes it: what it takes is neither in this process's memory nor in its caches.

    Raises:
        Failed: the disk has no room for it.
    """
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < sequences * ROOM:
            raise Failed(f"no room for a dump of {sequences:,} sequences where temporary files go")
        path = Path(folder) / "dump.parquet"
        command = [sys.executable, str(HERE / "dump.py"), str(path), f"--sequences={sequences}"]
        command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        yield path, json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def sizes(largest: int, smallest: int) -> list[int]:
    """List numbers of sequences, each four times the one before, up to the largest."""
    found = []
    while smallest < largest:
        found.append(smallest)
        smallest *= 4
    return [*found, largest]


def main(
    name: str, measure: Measure, about: str | None, sequences: int = SEQUENCES, threads: int | None = 2
) -> None:
    """Run one part as a command: print its result as JSON, or the failure with exit code 1.

    `threads`: how many cores the whole process is held to; None is all.
    """
    import machine
    import report

    given = options(about, sequences).parse_args()
    if threads:
        machine.limit(threads)
    try:
        result = measure(Given(given.sequences, given.rounds))
    except Failed as failed:
        sys.exit(f"{name}: {failed}")
    if NOTHING in result:
        print(f"{name}: {result[NOTHING]}", file=sys.stderr)
    elif given.write:
        report.keep(name, result, machine.facts(), given.results)
    print(json.dumps(result, indent=1))


def options(about: str | None, sequences: int | None = None) -> argparse.ArgumentParser:
    """Build the option parser of a part; `sequences` is the default size."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=sequences, help="of the (largest) dump")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="medians are over these")
    parser.add_argument("--write", action="store_true", help="keep the result, and write the pages from it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept")
    return parser
