"""Follow one number from file to result: `python benchmarks/follow.py [PRESET] [METRIC] [--list]`.

Reads the sample dump batch by batch, sums what the metrics of the preset's weights need and nothing else, and
reads the number out, as `analyze` does. Prints how many files and functions of the package are visited on the
way, and how often the program goes from one file to another.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any

import offpol_diag
from offpol_diag.analysis.study import Study
from offpol_diag.engine import bootstrap, method
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.formula import Reader
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns
from offpol_diag.engine.tally import Arrays, Names
from offpol_diag.number import Number
from offpol_diag.presets import catalogue
from offpol_diag.readers import open_dump

PACKAGE = Path(offpol_diag.__file__).parent
SAMPLE = PACKAGE.parent / "sample_data" / "stale.parquet"


def number(name: str, metric: str) -> Number:
    """Compute the metric of a preset, with its interval."""
    dump = open_dump([str(SAMPLE)])
    study = Study.of(dump.info.columns, (catalogue.load()[name],), (), 0)
    seen: list[Arrays] = []
    for batch in dump.batches():
        context = BatchContext.of(batch, study.seed, bootstrap.REPLICATES)
        of_presets = method.columns(PresetSums.of(context, study.presets))
        columns = Columns.joined(Columns.of(context.counts), of_presets)
        sums = bootstrap.resampled(columns.parts, context.draws, batch.key)
        names = Names(columns.names, columns.which)
        seen.append(Arrays(sums={"columns": sums}, names={"columns": names}))
    (row,) = [row for row in method.ROWS if row.name == metric]
    read = reduce(Arrays.merge, seen).read("columns")
    ours = {key.removeprefix(f"{name}|"): values for key, values in read.items()}
    return Reader(ours, int(dump.info.rows)).number(row)


class Walk:
    """Profiler that counts visited files and functions, and changes of file."""

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.functions: set[tuple[str, str]] = set()
        self.changes = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        """Record a call of a function of the package."""
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(str(PACKAGE)):
            return
        name = str(Path(path).relative_to(PACKAGE))
        self.files[name] += 1
        self.functions.add((name, frame.f_code.co_qualname))
        self.changes += name != self._last
        self._last = name


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("preset", nargs="?", default="token_is")
    parser.add_argument("metric", nargs="?", default="ess_tokens")
    parser.add_argument("--list", action="store_true", help="name the files, with the calls in each")
    given = parser.parse_args()
    number(given.preset, given.metric)  # what is made once a process is made now
    walk = Walk()
    sys.setprofile(walk)
    found = number(given.preset, given.metric)
    sys.setprofile(None)
    print(f"{given.preset}.{given.metric} = {found.value:.6g}")
    print(f"{len(walk.files)} files, {len(walk.functions)} functions, {walk.changes} changes of file")
    if given.list:
        print(*(f"{calls:7,}  {name}" for name, calls in walk.files.most_common()), sep="\n")


if __name__ == "__main__":
    main()
