"""Hold the package against what was frozen before its rooms were rebuilt.

    python -m tests.frozen                       # everything, a minute
    python -m tests.frozen --only stale          # a dump, or a layer: values, intervals, texts, …
    python -m tests.frozen --update-intervals    # low and high as they are now; prints old and new widths
    python -m tests.frozen --update-texts        # texts as they are now, to be read in the diff

The exit code is 1 where anything differs or is missing. What is new is listed, and passes.

- `values.parquet`: the numbers of eight dumps by command, subject and name, and what trainers log of them
  under each method. Made once from f8bfca2a, with its rows of the 46 methods renamed. Never updated.
- `intervals.parquet`: low and high of those of the numbers that have them.
- `texts/`: what commands print and write as Markdown, and the configurations of every trainer.

`cases.py` says which commands are run on which dumps, `dumps/` holds the dumps that do not ship, and
`package.py` alone knows the package: a change of its API or of its JSON is followed there.
"""

from __future__ import annotations

import difflib
import re
import shutil
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import chdir
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.frozen import package
from tests.frozen.cases import CASES, DUMPS, HERE, TRAINERS, Case
from tests.frozen.package import Number

VALUES, INTERVALS = HERE / "values.parquet", HERE / "intervals.parquet"
TEXTS = HERE / "texts"
PRESETS = HERE / "presets.toml"
LAYERS = ("values", "intervals", "texts", "logged")
RTOL, FLOOR = 1e-9, 1e-14
"""A number may differ by `RTOL` of itself, or by `FLOOR`: zero, and what cancelling terms leave."""
SHOWN = 30
Key = tuple[str, str]
"""Subject and name of a number."""
Values = dict[Key, float]


# ---------------------------------------------------------------- what is there now


def numbers(case: Case) -> tuple[Number, ...]:
    """Run a case; return its numbers."""
    return ran(case)[0]


@cache
def ran(case: Case) -> tuple[tuple[Number, ...], str]:
    """Run a case; return its numbers, and what it prints and writes as Markdown."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for name in DUMPS:
            if f"{name}.parquet" in (*case.before.split(), *case.line.split()):
                shutil.copy(DUMPS[name].folder / f"{name}.parquet", folder)
        shutil.copy(PRESETS, folder)
        if case.before:
            package.run(case.before)
        printed = package.text(case.line, Path("result.md"))
        found: list[Number] = []
        if case.sequences:
            found += [*package.numbers(Path("result.json")), *package.sums(Path("sequences.parquet"))]
        elif case.numbers:
            found += package.own_numbers(Path("result.json"))
    return tuple(found), printed


@cache
def logged(dump: str) -> tuple[Number, ...]:
    """Return what trainers log of a dump, and of some of its steps, under the methods that are frozen."""
    names = (subject.partition("@")[0].split("/")[1:] for subject, _ in frozen(f"logged-{dump}"))
    pairs = [(method, log) for method, log in dict.fromkeys(map(tuple, names))]
    path = DUMPS[dump].folder / f"{dump}.parquet"
    return tuple(one for step in (None, *DUMPS[dump].steps) for one in package.logged(path, pairs, step))


@cache
def printed(trainer: str) -> str:
    """Return the configurations for a trainer as they are printed, of the methods whose are frozen."""
    text = (TEXTS / f"presets-{trainer}.txt").read_text(encoding="utf-8")
    methods = re.findall(rf"^# (\S+) for {trainer}$", text, re.MULTILINE)
    return "\n".join(package.printed(method, trainer) or "" for method in methods)


# ---------------------------------------------------------------- what was there


@cache
def _stored(path: Path) -> Mapping[str, Mapping[Key, tuple[float, ...]]]:
    """Return case → subject and name → numbers of a file."""
    columns = pq.read_table(path).to_pydict()
    found: dict[str, dict[Key, tuple[float, ...]]] = {}
    for case, subject, name, *x in zip(*columns.values(), strict=True):
        found.setdefault(case, {})[subject, name] = tuple(x)
    return found


def frozen(case: str) -> Values:
    """Return the frozen values of a case."""
    return {key: x for key, (x,) in _stored(VALUES).get(case, {}).items()}


# ---------------------------------------------------------------- what differs


def differing(old: Mapping[Key, float], new: Mapping[Key, float]) -> list[str]:
    """Return a line for each number that differs or is missing."""
    lines = [f"missing  {' '.join(key)}: {x!r}" for key, x in old.items() if key not in new]
    for key in old.keys() & new.keys():
        a, b = old[key], new[key]
        size = max(abs(a), abs(b))
        if not (a == b or abs(a - b) <= max(RTOL * size, FLOOR) or np.isnan((a, b)).all()):
            lines.append(f"differs  {' '.join(key)}: {a!r} → {b!r} ({abs(a - b) / size:.1e})")
    return sorted(lines)


def of_values(case: Case) -> list[str]:
    """Return what differs of the values of a case."""
    return differing(frozen(case.name), values(numbers(case)))


def of_intervals(case: Case) -> list[str]:
    """Return what differs of the intervals of a case."""
    old, new = _stored(INTERVALS).get(case.name, {}), ends(numbers(case))
    return [
        line.replace(":", f" {end}:", 1)
        for at, end in enumerate(("low", "high"))
        for line in differing(*({key: x[at] for key, x in one.items()} for one in (old, new)))
    ]


def of_text(name: str, now: str) -> list[str]:
    """Return a unified diff of a text."""
    path = TEXTS / f"{name}.txt"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = (old.splitlines(), now.splitlines(), f"frozen/{name}", f"now/{name}")
    return list(difflib.unified_diff(*lines, n=1, lineterm=""))


def of_output(case: Case) -> list[str]:
    """Return a diff of what a case prints and writes as Markdown."""
    return of_text(case.name, ran(case)[1])


def of_presets(trainer: str) -> list[str]:
    """Return a diff of the configurations for a trainer."""
    return of_text(f"presets-{trainer}", printed(trainer))


def of_logged(dump: str) -> list[str]:
    """Return what differs of what trainers log of a dump."""
    return differing(frozen(f"logged-{dump}"), values(logged(dump)))


def values(found: Iterable[Number]) -> Values:
    """Return subject and name → value."""
    return {(one.subject, one.name): one.value for one in found}


def ends(found: Iterable[Number]) -> dict[Key, tuple[float, float]]:
    """Return subject and name → low and high, of numbers that have them."""
    return {(one.subject, one.name): (one.low, one.high) for one in found if not np.isnan(one.low)}


def new_names(cases: Iterable[Case]) -> str:
    """Return the names of numbers that are not frozen."""
    names = {key[1] for case in cases for key in values(numbers(case)).keys() - frozen(case.name).keys()}
    return f"new names: {', '.join(sorted(names))}\n" if names else ""


# ---------------------------------------------------------------- updates


def update_intervals(cases: Iterable[Case]) -> str:
    """Store low and high of the frozen numbers as they are now; return how their widths have changed."""
    found, ratios = dict(_stored(INTERVALS)), []
    for case in cases:
        old = found.get(case.name, {})
        new = {key: x for key, x in ends(numbers(case)).items() if key in frozen(case.name)}
        found[case.name] = new
        for key in old.keys() & new.keys():
            before, now = (x[1] - x[0] for x in (old[key], new[key]))
            if before > FLOOR:
                ratios.append((now / before, f"{case.name} {' '.join(key)}: {before:.3g} → {now:.3g}"))
    rows = [(case, *key, *x) for case, one in found.items() for key, x in one.items()]
    texts = ["case", "subject", "name"]
    table = pa.table([pa.array(x) for x in zip(*rows, strict=True)], [*texts, "low", "high"])
    pq.write_table(table, INTERVALS, compression="zstd", compression_level=19, use_dictionary=texts)
    _stored.cache_clear()
    ratios.sort()
    head = f"{len(ratios)} widths, now / before: median {np.median([one[0] for one in ratios]):.4f}\n"
    return head + "".join(f"  {ratio:8.3f}  {name}\n" for ratio, name in (*ratios[:10], *ratios[-10:]))


def update_texts(cases: Iterable[Case], trainers: Iterable[str]) -> str:
    """Store texts as they are now; return the names of those that have changed."""
    found = {case.name: ran(case)[1] for case in cases if case.text}
    found |= {f"presets-{one}": printed(one) for one in trainers}
    changed = [name for name, now in found.items() if of_text(name, now)]
    TEXTS.mkdir(exist_ok=True)
    for name in changed:
        (TEXTS / f"{name}.txt").write_text(found[name], encoding="utf-8")
    return f"texts that changed: {', '.join(changed) or 'none'}\n"


# ---------------------------------------------------------------- the command


def main(arguments: list[str]) -> int:
    """Compare, print what differs, and return the exit code."""
    parser = ArgumentParser(
        "python -m tests.frozen", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=[*DUMPS, *LAYERS], help="a dump or a layer; repeatable"
    )
    parser.add_argument("--update-intervals", action="store_true", help="store low and high as they are now")
    parser.add_argument("--update-texts", action="store_true", help="store texts as they are now")
    given = parser.parse_args(arguments)
    begin, say, only = time.monotonic(), sys.stdout.write, set(given.only or ())
    layers, dumps = only & set(LAYERS) or set(LAYERS), only & set(DUMPS)
    cases = [case for case in CASES if not dumps or case.dump in dumps]
    trainers = () if dumps else TRAINERS
    if given.update_intervals:
        say(update_intervals([case for case in cases if case.numbers]))
    if given.update_texts:
        say(update_texts(cases, trainers))
    if given.update_intervals or given.update_texts:
        return 0
    wrong = []
    for layer, name, check in checks(cases, trainers, dumps or DUMPS):
        if layer in layers and (lines := tried(check)):
            more = [f"… and {len(lines) - SHOWN} more"] * (len(lines) > SHOWN)
            say("\n".join((f"== {layer} of {name}: {len(lines)} lines", *lines[:SHOWN], *more)) + "\n")
            wrong.append(f"{layer} of {name}")
    if "values" in layers:
        say(new_names([case for case in cases if case.numbers]))
    say(f"{time.monotonic() - begin:.0f} s; what differs: {', '.join(wrong) or 'nothing'}\n")
    return int(bool(wrong))


def checks(
    cases: Iterable[Case], trainers: Iterable[str], dumps: Iterable[str]
) -> Iterator[tuple[str, str, Callable[[], list[str]]]]:
    """Yield layer, name, and the function that returns what differs there."""
    for case in cases:
        if case.numbers:
            yield "values", case.name, partial(of_values, case)
            yield "intervals", case.name, partial(of_intervals, case)
        if case.text:
            yield "texts", case.name, partial(of_output, case)
    for trainer in trainers:
        yield "texts", f"presets-{trainer}", partial(of_presets, trainer)
    for dump in dumps:
        yield "logged", dump, partial(of_logged, dump)


def tried(check: Callable[[], list[str]]) -> list[str]:
    """Return what differs, or the error of a command that does not run any more."""
    try:
        return check()
    except RuntimeError as error:
        return [f"fails    {error}"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
