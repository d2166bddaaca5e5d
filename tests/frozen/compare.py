"""Recompute the frozen cases, and name every number that differs from its stored value.

    python tests/frozen/compare.py                        # every case
    python tests/frozen/compare.py --case turns --case far
    python tests/frozen/compare.py --update               # what is computed now becomes the frozen result
    python tests/frozen/compare.py before.json after.json  # two results that --json wrote

The exit code is 1 where anything differs.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.frozen.results import BY_NAME, Case, Values, of_json, values

DATA = Path(__file__).parent / "data"
RTOL = 1e-12
"""Threads change no bit on one machine, and another instruction set 3e-14 at most."""
FLOOR = 1e-14
"""Absolute difference that is always allowed, relative to the terms that a number is a sum of."""
TERMS = (
    (r"chi2_|weight_std|difference|p_value|p_adjusted|error_above", 1.0),
    (r"pg_loss|ppo_kl|log_ppl_(abs_)?diff", 0.01),
)
"""Numbers that are what larger terms leave: a part of the path, and the size of those terms."""
ROOTS = r"as_logged.*_std|weight_std"
"""Square roots of such numbers, with terms of size 1, as trainers take them: √(mean of x² − (mean of x)²)."""
SHOWN = 20


@dataclass(frozen=True)
class Difference:
    """A number that differs; None on the side that lacks it."""

    path: str
    old: float | None
    new: float | None

    @property
    def relative(self) -> float:
        """Return |new − old| over the larger of the two; infinite where one side has no number."""
        if self.old is None or self.new is None or np.isnan(self.old) or np.isnan(self.new):
            return np.inf
        return abs(self.new - self.old) / max(abs(self.old), abs(self.new))

    def __str__(self) -> str:
        old, new = ("—" if one is None else f"{one!r}" for one in (self.old, self.new))
        return f"{self.relative:9.2e}  {self.path}: {old} → {new}"


@dataclass(frozen=True)
class Report:
    """Findings of a comparison of two results.

    Attributes:
        compared: numbers that both have.
        differing: those that differ by more than the tolerance: of the dump itself first, then the largest
            relative difference.
        missing: numbers that only the old result has.
        new: numbers that only the new result has.
    """

    compared: int
    differing: list[Difference]
    missing: list[Difference]
    new: list[Difference]

    @property
    def same(self) -> bool:
        """Return whether nothing differs, is missing or is new."""
        return not (self.differing or self.missing or self.new)

    def __str__(self) -> str:
        counts = f"{self.compared} numbers compared: {len(self.differing)} differ, "
        lines = [f"{counts}{len(self.missing)} missing, {len(self.new)} new"]
        for title, found in (("differ", self.differing), ("missing", self.missing), ("new", self.new)):
            if found:
                kinds = Counter(kind(one.path) for one in found).most_common(12)
                lines.append(f"  {title}: " + ", ".join(f"{name} ({count})" for name, count in kinds))
                lines += [f"    {one}" for one in found[:SHOWN]]
                lines += [f"    … and {len(found) - SHOWN} more"] * (len(found) > SHOWN)
        return "\n".join(lines)


def kind(path: str) -> str:
    """Return the metric of a path, in any preset or place: `numbers.preset/x.k3` → `k3`."""
    bare = re.sub(r"\[[^][]*\]$", "", path)
    logged = bare.rpartition(".as_logged.")
    name = logged[2] if logged[1] else bare.rpartition(".")[2]
    return f"sequences.*.{name}" if path.startswith("sequences.") else name


def scale_group(path: str) -> str:
    """Name the numbers that round alike: a value and its interval, or what all presets log under one name."""
    before, found, name = path.rpartition(".as_logged.")
    return f"{before.rpartition('.')[0]}{found}{name}" if found else path


def compare(old: Values, new: Values, rtol: float = RTOL) -> Report:
    """Compare two results.

    Counts must be equal. Other numbers may differ by `rtol` of the larger one, or by `FLOOR` of their terms:
    those of `TERMS`, or the largest of the `scale_group`, at most 1. A mean near 0 is as exact as its
    interval is wide.
    """
    missing = [one for path, x in old.items() if path not in new for one in _one_sided(path, x, "old")]
    added = [one for path, x in new.items() if path not in old for one in _one_sided(path, x, "new")]
    shared = [path for path in old if path in new]
    differing: list[Difference] = []
    unequal = [path for path in shared if not _identical(old[path], new[path])]
    scales = _scales(old, new) if unequal else {}
    for path in unequal:
        a, b = old[path], new[path]
        both = min(a.size, b.size)
        missing += _one_sided(path, a, "old", both)
        added += _one_sided(path, b, "new", both)
        terms = max([size for part, size in TERMS if re.search(part, path)], default=0.0)
        floor = FLOOR * max(terms, min(1.0, scales[scale_group(path)]))
        wrong = _apart(a[:both], b[:both], rtol, floor, bool(re.search(ROOTS, path)))
        many = max(a.size, b.size) > 1
        differing += [
            Difference(_at(path, i, many), a[i].item(), b[i].item()) for i in np.flatnonzero(wrong).tolist()
        ]
    differing.sort(key=lambda one: (not one.path.startswith("dump."), -one.relative, one.path))
    return Report(sum(min(old[path].size, new[path].size) for path in shared), differing, missing, added)


def _identical(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Return whether two arrays agree in every bit, as most do: a shortcut."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _scales(*results: Values) -> dict[str, float]:
    """Return the largest absolute number in each group of `scale_group`, 0 without any."""
    found: dict[str, float] = {}
    for path, x in (item for result in results for item in result.items()):
        group = scale_group(path)
        size = float(np.abs(x[~np.isnan(x)]).max(initial=0.0))
        found[group] = max(found.get(group, 0.0), size)
    return found


def _apart(
    a: npt.NDArray[Any], b: npt.NDArray[Any], rtol: float, floor: float, roots: bool
) -> npt.NDArray[np.bool_]:
    """Return which numbers of two arrays differ; of roots, the squares may differ by `FLOOR`."""
    if a.dtype == b.dtype == np.int64:
        return np.asarray(a != b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        size = np.maximum(np.abs(x), np.abs(y))
        allowed = np.maximum(rtol * size, np.minimum(FLOOR / size, np.sqrt(FLOOR)) if roots else floor)
        close = np.abs(x - y) <= allowed
    return np.asarray(~(close | (x == y) | (np.isnan(x) & np.isnan(y))))


def _one_sided(path: str, x: npt.NDArray[Any], side: str, begin: int = 0) -> list[Difference]:
    """Return the numbers from `begin` on as differences to nothing."""
    return [
        Difference(
            _at(path, i, x.size > 1),
            x[i].item() if side == "old" else None,
            x[i].item() if side == "new" else None,
        )
        for i in range(begin, x.size)
    ]


def _at(path: str, index: int, many: bool) -> str:
    return f"{path}[{index}]" if many else path


# ---------------------------------------------------------------- the stored numbers


def store(found: Values, path: Path) -> None:
    """Write a result as Parquet: `path`, and `counts` (int64) or `values` (float64, every bit)."""
    names = sorted(found)

    def column(dtype: type, kind: pa.DataType) -> pa.Array:
        return pa.array([found[one] if found[one].dtype == dtype else None for one in names], pa.list_(kind))

    table = pa.table(
        {"path": names, "counts": column(np.int64, pa.int64()), "values": column(np.float64, pa.float64())}
    )
    pq.write_table(
        table,
        path,
        compression="zstd",
        compression_level=19,
        use_dictionary=["counts.list.element", "values.list.element"],
        column_encoding={"path": "DELTA_BYTE_ARRAY"},
        dictionary_pagesize_limit=1 << 26,
        data_page_size=1 << 26,
        write_statistics=False,
        store_schema=False,
    )


def stored(path: Path) -> Values:
    """Load a file of `store`, or the numbers of a result's JSON."""
    if path.suffix == ".json":
        return of_json(path)
    table = pq.read_table(path)
    found: Values = {}
    for name, dtype in (("counts", np.int64), ("values", np.float64)):
        lists = table[name].combine_chunks()
        ends = np.cumsum(np.nan_to_num(pc.list_value_length(lists).to_numpy(zero_copy_only=False)))
        flat = lists.flatten().to_numpy(zero_copy_only=False).astype(dtype)
        parts = np.split(flat, ends[:-1].astype(np.int64))
        there = lists.is_valid().to_pylist()
        found |= {
            path: x for path, x, valid in zip(table["path"].to_pylist(), parts, there, strict=True) if valid
        }
    return found


def frozen(case: Case) -> Path:
    """Return the path of a case's stored numbers."""
    return DATA / f"{case.name}.parquet"


def recomputed(case: Case) -> Values:
    """Recompute the numbers of a case."""
    with tempfile.TemporaryDirectory() as folder:
        return values(case, Path(folder))


# ---------------------------------------------------------------- the command


def main(arguments: list[str]) -> int:
    """Compare, print what differs, and return the exit code."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULT.json", help="two results to compare")
    parser.add_argument("--case", action="append", choices=list(BY_NAME), help="one case; repeatable")
    parser.add_argument("--update", action="store_true", help="store what is computed now")
    parser.add_argument("--rtol", type=float, default=RTOL, help="relative tolerance (default %(default)s)")
    given = parser.parse_args(arguments)
    if len(given.results) not in (0, 2) or (given.results and (given.case or given.update)):
        parser.error("give two results and no --case or --update, or no result")
    if given.results:
        old, new = map(stored, given.results)
        report = compare(old, new, given.rtol)
        sys.stdout.write(f"{report}\n")
        return int(not report.same)
    return _cases([BY_NAME[name] for name in given.case or BY_NAME], given.update, given.rtol)


def _cases(cases: Iterable[Case], update: bool, rtol: float) -> int:
    begin, total, wrong = time.monotonic(), 0, []
    for case in cases:
        now = recomputed(case)
        report = compare(stored(frozen(case)) if frozen(case).exists() else {}, now, rtol)
        total += report.compared
        sys.stdout.write(f"{case.name}: {report}\n")
        sys.stdout.flush()
        if not report.same:
            wrong.append(case.name)
        if update:
            DATA.mkdir(exist_ok=True)
            store(now, frozen(case))
    seconds, named = time.monotonic() - begin, ", ".join(wrong) or "none"
    sys.stdout.write(f"{total} numbers in {seconds:.0f} s; cases that differ: {named}\n")
    if update:
        gone = [path for path in DATA.glob("*.parquet") if path.stem not in BY_NAME]
        for path in gone:
            path.unlink()
    return int(bool(wrong) and not update)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
