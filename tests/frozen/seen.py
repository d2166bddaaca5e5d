"""Run the commands on four dumps, and compare all that a user sees of them with files under review.

    python tests/frozen/seen.py                  # every command, a minute
    python tests/frozen/seen.py --only gate      # one; repeatable
    python tests/frozen/seen.py --update         # what is seen now becomes the frozen text

The exit code is 1 where anything differs; each difference is printed as a unified diff.

`seen/COMMAND-DUMP.txt` holds the command line, its exit code, stdout of a pipe, stderr, stdout in 80 columns
(what a terminal of that width shows, without colours), the Markdown, and of a gate the JUnit file.
`seen/COMMAND-keys.txt` holds the keys of the objects in the JSON that the command writes, of all its dumps
together; its numbers are frozen in `data/`.

The dumps are the four samples, and one whose log-probs are shifted by a token, for what is said of a bug. So
that each sentence is frozen once: `-v` draws the tables of the Markdown, and is frozen of one dump with three
presets; the Markdown of other commands leaves out the sections that `analyze` has too; commands other than
`analyze` evaluate a few presets, and freeze the keys of their own part of the JSON; `check` reads 96
sequences of each dump beside curves of independent restatements of three trainers; `merge` adds the tallies
of a dump's two halves. HTML is left to the tests of the page.

What differs from run to run (seconds, memory, version) is replaced by `…`. Numbers are printed with two to
seven digits (those with more are cut), and other machines differ by 3e-14 of them: no digit should flip
unless it is a tie in rounding, or what larger terms leave when they cancel.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typer.testing import CliRunner, Result

from offpol_diag.cli import app
from tests import faults, verl_reference
from tests.frozen.dumps import piece, sample
from tests.trainers import logged_hub, logged_slime
from tests.trainers.padded import padded
from tests.trainers.samples import samples

FOLDER = Path(__file__).parent / "seen"
WIDTH = 80
SAMPLES = ("healthy", "stale", "quantized", "collapse")
SOME = "token_is,seq_is,seq_mis,geo_rs,slime_icepop,areal_decoupled"
FEW = "token_is,seq_mis"
HALF = 4
"""Steps of a dump's first half."""
ROWS, STEPS = 24, 4
"""Sequences per step, and steps, of a dump that is checked."""
Texts = dict[str, str]
"""File name → text."""
Row = dict[str, Any]


# ---------------------------------------------------------------- what the commands read


def sampled(folder: Path) -> None:
    """Write the samples, and a dump whose rollout log-probs are shifted by a token."""
    for name in SAMPLES:
        shutil.copy(sample(name), folder)
    faults.dump(str(folder / "shift.parquet"), "shift")


def halved(folder: Path) -> None:
    """Write each sample in two pieces, cut between its steps."""
    for name in SAMPLES:
        for part, begin, end in (("a", 0, HALF), ("b", HALF, None)):
            write = piece(name, begin, end)
            assert callable(write)
            write(folder / f"{name}_{part}.parquet")


def logged(folder: Path) -> None:
    """Write a part of each sample with the curves that a trainer logs of it, rightly or wrongly; 6 digits."""
    for name, curves in LOGGED.items():
        table = pq.read_table(sample(name))
        steps = sorted(set(table["step"].to_pylist()))[-STEPS:]
        parts = [table.filter(pc.equal(table["step"], step)).slice(0, ROWS) for step in steps]
        pq.write_table(pa.concat_tables(parts), folder / f"{name}.parquet")
        lines = [
            {"step": step} | {metric: float(f"{x:.6g}") for metric, x in curves(part.to_pylist()).items()}
            for step, part in zip(steps, parts, strict=True)
        ]
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _verl(rows: list[Row]) -> Mapping[str, float]:
    names = ("response_mask", "old_log_probs", "rollout_log_probs", "current_log_probs")
    columns = {name: [row[name] for row in rows] for name in names}
    method = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": False}
    return verl_reference.run("2025-11", columns, method).metrics


def _mask_ignored(rows: list[Row]) -> Mapping[str, float]:
    """Log as TRL does, masked tokens included."""
    whole = [row | {"response_mask": [1] * len(row["response_mask"])} for row in rows]
    return logged_hub.trl(padded(whole), mode="token_truncate", clip_max=3.0)


def _of_ranks(rows: list[Row]) -> Mapping[str, float]:
    """Log as slime does, averaged over four ranks without their sizes."""
    ranks = [
        logged_slime.tis(samples(rows[i : i + ROWS // 4]), tis_clip=2.0) for i in range(0, ROWS, ROWS // 4)
    ]
    return {name: sum(one[name] for one in ranks) / len(ranks) for name in ranks[0]}


def _reversed(rows: list[Row]) -> Mapping[str, float]:
    """Log as verl does, with the policies in each other's place."""
    columns = [(row["rollout_log_probs"], row["old_log_probs"]) for row in rows]
    swapped = [
        row | {"rollout_log_probs": old, "old_log_probs": rollout}
        for row, (rollout, old) in zip(rows, columns, strict=True)
    ]
    return _verl(swapped)


LOGGED: dict[str, Callable[[list[Row]], Mapping[str, float]]] = {
    "healthy": _verl,
    "stale": _mask_ignored,
    "quantized": _of_ranks,
    "collapse": _reversed,
}


# ---------------------------------------------------------------- the commands


@dataclass(frozen=True)
class Command:
    """A command with what it reads.

    Attributes:
        lines: name of the dump → the command line.
        prepare: writes what is read into an empty folder.
        before: command lines that run first, of which nothing is frozen; `{}` is the name of each dump.
        files: option → the file whose text is frozen.
        keys: of the JSON, those whose keys are frozen too; empty: all.
        shared: whether sections of the Markdown that `analyze` has as well are left out.
        narrow: whether stdout is frozen in 80 columns alone.
    """

    lines: Mapping[str, str]
    prepare: Callable[[Path], None] = sampled
    before: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = (("--md", "result.md"),)
    keys: tuple[str, ...] = ()
    shared: bool = False
    narrow: bool = False


COMMANDS = {
    "analyze": Command(
        {
            "healthy": "analyze healthy.parquet",
            "stale": "analyze stale.parquet --no-html --for verl",
            "quantized": "analyze quantized.parquet --no-html --group-by tool_calls",
            "collapse": "analyze collapse.parquet --for slime",
            "shift": f"analyze shift.parquet --no-html --strict --presets {FEW}",
        },
    ),
    "analyze_verbose": Command(
        {"stale": "analyze stale.parquet -v --no-html --presets token_is,seq_mis,geo_rs"},
        files=(),
        keys=("run",),
        narrow=True,
    ),
    "doctor": Command(
        {
            **{name: f"doctor {name}.parquet" for name in SAMPLES},
            "shift": "doctor shift.parquet --strict",
        },
        keys=("diagnosis", "run"),
        shared=True,
    ),
    "compare": Command(
        {name: f"compare {name}.parquet --presets {SOME}" for name in SAMPLES},
        keys=("comparison",),
        shared=True,
    ),
    "compare_runs": Command(
        {
            f"{a}_{b}": f"compare {a}.parquet {b}.parquet --presets {FEW}"
            for a, b in (
                ("healthy", "healthy"),
                ("healthy", "stale"),
                ("quantized", "healthy"),
                ("stale", "collapse"),
            )
        },
        keys=("against",),
        shared=True,
    ),
    "sweep": Command(
        {
            "healthy": "sweep healthy.parquet --preset seq_mis",
            "stale": "sweep stale.parquet --preset token_is --keep 0.99 --for trl",
            "quantized": "sweep quantized.parquet --preset geo_rs --keep 0.9",
            "collapse": "sweep collapse.parquet --preset token_is --at 1.5,2,5",
        },
        keys=("sweep",),
        shared=True,
    ),
    "gate": Command(
        {
            "healthy": "gate healthy.parquet --fail-on bug --max k3=0.001 --min token_is.ess_tokens=0.9",
            "stale": "gate stale.parquet --baseline base.json --presets token_is",
            "quantized": "gate quantized.parquet --max step:k3=0.001 --max p90:k3=1 --max nothing=1",
            "collapse": "gate collapse.parquet --max k3=0.01 --max last:k3=0.01 --min seq_mis.ess_tokens=0.5",
        },
        before=("analyze healthy.parquet --presets token_is --no-html --json base.json",),
        files=(("--md", "result.md"), ("--junit", "result.xml")),
        keys=("gates",),
        shared=True,
    ),
    "check": Command(
        {
            "healthy": "check healthy.parquet --logged healthy.jsonl --trainer verl",
            "stale": "check stale.parquet --logged stale.jsonl --trainer trl",
            "quantized": "check quantized.parquet --logged quantized.jsonl --preset slime_tis --dp 4",
            "collapse": "check collapse.parquet --logged collapse.jsonl --strict",
        },
        prepare=logged,
    ),
    "merge": Command(
        {name: f"merge {name}_a.tally.json {name}_b.tally.json" for name in SAMPLES},
        prepare=halved,
        before=tuple(
            f"analyze {{}}_{part}.parquet --presets {FEW} --no-html --tally {{}}_{part}.tally.json"
            for part in "ab"
        ),
        keys=("run", "dump"),
        shared=True,
    ),
}


# ---------------------------------------------------------------- running them


def seen(name: str) -> Texts:
    """Run a command on its dumps; return the text of each of its files."""
    command = COMMANDS[name]
    found: Texts = {}
    keys: dict[str, Keys] = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        command.prepare(Path(folder))
        for before in dict.fromkeys(
            one.format(dump, dump) for one in command.before for dump in command.lines
        ):
            run(before)
        for dump, line in command.lines.items():
            found[f"{name}-{dump}.txt"] = _seen(command, line)
            keys[dump] = keys_of(json.loads(Path("result.json").read_text()), command.keys)
    return found | {f"{name}-keys.txt": keys_text(keys)}


def _seen(command: Command, line: str) -> str:
    """Run a command line once for a pipe, with every file, and once as it stands in 80 columns.

    Raises:
        RuntimeError: the two have different exit codes.
        FileNotFoundError: a file was not written.
    """
    options = " ".join(f"{option} {file}" for option, file in (*command.files, ("--json", "result.json")))
    for left in Path().glob("result.*"):
        left.unlink()
    wide, narrow = run(f"{line} {options}"), run(line, WIDTH)
    if narrow.exit_code != wide.exit_code:
        raise RuntimeError(f"{line}: exit code {narrow.exit_code}, and {wide.exit_code} with {options}")
    parts = {} if command.narrow else {"stdout, a pipe": wide.stdout}
    parts |= {"stderr": wide.stderr, f"stdout, {WIDTH} columns, without options for files": narrow.stdout}
    parts |= {file: Path(file).read_text(encoding="utf-8") for _, file in command.files}
    if command.shared:
        parts["result.md"] = REPEATED.sub(r"\1\n\n(as of analyze)\n\n</details>", parts["result.md"])
    head = f"$ offpol-diag {line} {options}\nexit code {wide.exit_code}\n"
    return head + "".join(f"\n{'=' * 8} {title}\n{settled(text)}" for title, text in parts.items() if text)


def run(line: str, columns: int | None = None) -> Result:
    """Run one command line in this process, without the settings of the environment.

    Raises:
        RuntimeError: it ends with an error that has no exit code.
    """
    unset = (
        "OFFPOL_DIAG_",
        "GITHUB_",
        "COLUMNS",
        "LINES",
        "NO_COLOR",
        "FORCE_COLOR",
        "TTY_",
        "TERMINAL_WIDTH",
    )
    environment: dict[str, str | None] = {one: None for one in os.environ if one.startswith(unset)}
    environment["OFFPOL_DIAG_DEVICE"] = "cpu"
    if columns:
        environment["COLUMNS"] = str(columns)
    ran = CliRunner().invoke(app, shlex.split(line), env=environment)
    if ran.exception and not isinstance(ran.exception, SystemExit):
        raise RuntimeError(f"{line}\n{ran.output}") from ran.exception
    return ran


REPEATED = re.compile(
    r"(<details><summary>(?:Headline numbers|All numbers of the three policy pairs|Where the mismatch is|"
    r"Every correction on this batch|The \d+ worst|As your trainer|As \S+ logs it|Data and provenance)[^\n]*)"
    r".*?</details>",
    re.DOTALL,
)
"""Sections of the Markdown that say of every command what they say of `analyze`."""
VARIES = (
    (r"(\| (?:offpol-diag|peak memory|seconds, [a-z ]+) \| )[^|]*( \|)", r"\1…\2"),
    (r"(?m)^((?:offpol-diag|peak memory|seconds, [a-z ]+?)  +)\S.*()$", r"\1…\2"),
    (r"(The run\nwhat +value\n─)─*()", r"\1…\2"),
    (r'( time=")[^"]*(")', r"\1…\2"),
    (r'(name="version" value=")[^"]*(")', r"\1…\2"),
    (r"><(?=test|prop|fail|skip|error|system)", r">\n<"),
)
"""What differs from run to run, in Markdown, tables and JUnit files; and XML in lines."""
DIGITS = 7


def settled(text: str) -> str:
    """Replace what differs from run to run, and digits after the seventh, by `…`."""
    for pattern, by in VARIES:
        text = re.sub(pattern, by, text)
    return re.sub(r"\d+\.\d+", _cut, text)


def _cut(number: re.Match[str]) -> str:
    """Return a number with `DIGITS` significant digits at most."""
    whole, _, part = number[0].partition(".")
    zeros = len(part) - len(part.lstrip("0"))
    kept = max(DIGITS - len(whole), 0) if int(whole) else DIGITS + zeros
    return number[0] if len(part) <= kept else f"{whole}.{part[:kept]}…"


# ---------------------------------------------------------------- keys of a JSON

FREE = {
    *(
        "as_logged",
        "axes",
        "band",
        "better",
        "bounds",
        "columns",
        "differences",
        "kept",
        "numbers",
        "presets",
    ),
    *("provenance", "ratio_by_lag", "regime", "saw", "series"),
}
"""Objects whose keys are names or values, no fields: one `*` stands for all of them."""
METRIC = {"formula", "over", "unit", "worse"}
"""Keys of what says what a number is, listed once, under `METRIC`."""
PREFIXED = re.compile(r"(drift2|total|error_above)\..*")
"""Numbers of the other two policy pairs, named as those of the first; and numbers by the name of a method."""
Keys = dict[str, set[str]]
"""Path of an object, e.g. `charts.lag` or `worst.tokens[]` → its keys."""


def keys_of(value: Any, only: tuple[str, ...] = (), path: str = "") -> Keys:
    """Return the keys of every object in a JSON; of its own keys, look into `only` some (empty: all)."""
    found: Keys = {}
    if isinstance(value, list):
        for inner in value:
            _join(found, keys_of(inner, path=f"{path}[]"))
    elif isinstance(value, dict) and value.keys() == METRIC:
        found["METRIC"] = set(value)
    elif isinstance(value, dict):
        free = path.rpartition(".")[2] in FREE
        names = {name: "*" if free else PREFIXED.sub(r"\1.*", name) for name in value}
        found[path] = set(names.values())
        for name, inner in value.items():
            if not only or name in only:
                _join(found, keys_of(inner, path=f"{path}.{names[name]}".lstrip(".")))
    return found


def _join(found: Keys, more: Keys) -> None:
    for path, keys in more.items():
        found[path] = found.get(path, set()) | keys


def keys_text(found: Mapping[str, Keys]) -> str:
    """Return a line per path: the dumps that have it, where not all do, and its keys in any of them."""
    every: Keys = {}
    for keys in found.values():
        _join(every, keys)
    lines = []
    for path, names in sorted(every.items()):
        have = [dump for dump, keys in found.items() if path in keys]
        where = "" if len(have) == len(found) else f" ({', '.join(have)})"
        lines.append(f"{path or 'all'}{where}: {', '.join(sorted(names))}")
    return "".join(f"{textwrap.fill(one, 110, subsequent_indent='    ')}\n" for one in lines)


# ---------------------------------------------------------------- comparing


def frozen(name: str) -> Texts:
    """Return the frozen texts of a command by file name."""
    return {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob(f"{name}-*.txt")}


def difference(old: Texts, new: Texts) -> str:
    """Return unified diffs of the files that differ; empty where none does."""
    found = ""
    for file in sorted(old.keys() | new.keys()):
        before, now = (texts.get(file, "").splitlines(keepends=True) for texts in (old, new))
        found += "".join(difflib.unified_diff(before, now, f"frozen/{file}", f"now/{file}", n=2))
    return found


def accept(name: str) -> str:
    """Return the command that makes what is seen now the frozen text."""
    return f"python tests/frozen/seen.py --update --only {name}"


def main(arguments: list[str]) -> int:
    """Compare, print what differs, and return the exit code."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(COMMANDS), help="one command; repeatable")
    parser.add_argument("--update", action="store_true", help="store what is seen now")
    given = parser.parse_args(arguments)
    begin, wrong = time.monotonic(), []
    for name in given.only or COMMANDS:
        old, new = frozen(name), seen(name)
        found = difference(old, new)
        if found:
            wrong.append(name)
            sys.stdout.write(found)
            sys.stdout.write("" if given.update else f"\nIf that is meant: {accept(name)}\n")
        if given.update:
            store(name, new)
    if given.update and not given.only:
        for path in FOLDER.iterdir():
            if path.name.partition("-")[0] not in COMMANDS:
                path.unlink()
    sys.stdout.write(
        f"{time.monotonic() - begin:.0f} s; commands that differ: {', '.join(wrong) or 'none'}\n"
    )
    return int(bool(wrong) and not given.update)


def store(name: str, texts: Texts) -> None:
    """Write the texts of a command in place of its frozen ones."""
    FOLDER.mkdir(exist_ok=True)
    for file in frozen(name).keys() - texts.keys():
        (FOLDER / file).unlink()
    for file, text in texts.items():
        (FOLDER / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
