"""Attacks by scarce resources, signals, killed processes and runs at the same time."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import shutil
import signal
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from attack.base import COMMANDS, TRACES, Attack, lines, state, target
from attack.files import JSON_OUT, PRINTED, STREAMED, TARGET
from fuzz import runner

MOMENTS = 3
"""Moments of a run at which a signal is sent, the three of `ENDED` by turns."""
ENDED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
SAYS = {signal.SIGINT: "interrupted"}
"""Signal → exit code."""
STAGES = {
    "planning": {"readers/dump.py:describe", "forms/detect.py:find"},
    "reading": {
        "readers/parquet.py:tables",
        "forms/conversion.py:convert",
        "wholefiles.py:up_to",
        "journal.py:recover",
    },
    "merging": {"analyze.py:merge", "analysis/merge.py:merge"},
    "rendering": {"cli/output.py:render"},
    "writing": {"cli/output.py:write_all"},
    "renaming": {"pathlib.py:replace", "posix:replace", "posix:rename"},
}
"""Stage of a run → functions that are called in it."""
PASSED_OVER = {
    "planning": {"merge", "recover", "report"},
    "merging": {"convert", "recover", "report", "merge", "check"},
    "rendering": {"convert", "recover"},
    "writing": {"convert", "recover"},
}
"""Stage → commands that have none."""
Change = Callable[[], None]


def heard() -> None:
    """Let signals act as in a terminal: nohup ignores SIGHUP, and shells SIGINT in the background."""
    for number in ENDED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# ---------------------------------------------------------------- resources


def limited(what: int, most: int) -> Change:
    """Return a function that limits a resource."""
    return lambda: resource.setrlimit(what, (most, most))


def named(folder: Path) -> None:
    """Write a dump whose file, columns and values have names that are no ASCII."""
    table = pq.read_table(folder / "a.parquet")
    hosts = pa.array(["größe→"] * len(table))
    pq.write_table(table.append_column("höst", hosts), folder / "größe→.parquet")


# ---------------------------------------------------------------- streams


def to_no_reader() -> None:
    """Make stdout a pipe whose reader has left."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.close(writer)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


# ---------------------------------------------------------------- signals


def calls(called: Callable[[str], None], only: Collection[str] = ()) -> None:
    """Call a function with the name of each function that is called from now on, or only of some."""

    def seen(frame: FrameType, event: str, thing: object) -> None:
        if event == "call" and (not only or frame.f_code.co_name in only):
            file = frame.f_code.co_filename
            called(f"{file.rpartition('/offpol_diag/')[2] or file}:{frame.f_code.co_name}")
        elif event == "c_call" and (not only or getattr(thing, "__name__", "") in only):
            called(f"{getattr(thing, '__module__', '')}:{getattr(thing, '__name__', '')}")

    threading.setprofile(seen)
    sys.setprofile(seen)


def uncalled() -> None:
    """Undo `calls`."""
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]


def signalled(number: signal.Signals, stage: str) -> Change:
    """Return a function that makes a run send itself a signal when it comes to a stage."""

    def called(name: str) -> None:
        if any(name.endswith(one) for one in STAGES[stage]):
            uncalled()
            os.kill(os.getpid(), number)

    def change() -> None:
        analyze: Any = import_module("offpol_diag.analyze")
        analyze.TOKENS = 1000  # so that there is something to merge
        heard()
        calls(called, {name.rpartition(":")[2] for name in STAGES[stage]})

    return change


def ended(found: runner.Answer, number: signal.Signals, before: dict[str, tuple[int, ...]]) -> list[str]:
    """Return what is wrong with the answer of a run that was sent a signal."""
    wrong = [] if found.code == ENDED[number] else [f"exit code {found.code}, not {ENDED[number]}"]
    wrong += [f"it says {found.errors[-800:]!r}"] if found.errors.strip() != SAYS.get(number, "") else []
    return wrong + [f"{one} is left" for one in changed(before, found.folder)]


def at_stage(stage: str) -> Callable[[str, Path], list[str]]:
    """Return an attack that sends a signal at a stage, another one to each command."""

    def run(line: str, folder: Path) -> list[str]:
        number = list(ENDED)[(list(COMMANDS).index(line.split()[0]) + list(STAGES).index(stage)) % len(ENDED)]
        before = state(folder)
        found, _ = answered(line, folder, signalled(number, stage))
        return ended(found, number, before)

    return run


def at_moments(line: str, folder: Path) -> list[str]:
    """Send a signal at `MOMENTS` of a run."""
    count, before, wrong = ctypes.c_long.from_buffer(mmap.mmap(-1, 8)), state(folder), []

    def at(most: int, number: signal.Signals) -> Change:
        def called(_: str) -> None:
            count.value += 1
            if count.value == most:
                uncalled()
                os.kill(os.getpid(), number)

        def change() -> None:
            heard()
            count.value = 0
            calls(called)

        return change

    alone, _ = answered(line, folder, at(-1, signal.SIGINT))
    if alone.code:
        return [f"exit code {alone.code}: {alone.errors[-800:]}"]
    (folder / target(line)).unlink()
    total = count.value
    for moment in range(MOMENTS):
        number = list(ENDED)[moment % len(ENDED)]
        found, _ = answered(line, folder, at(total * (2 * moment + 1) // (2 * MOMENTS), number))
        where = f"{number.name} at {(2 * moment + 1) / (2 * MOMENTS):.0%}"
        wrong += [f"{where}: {one}" for one in ended(found, number, before)]
    return wrong


# ---------------------------------------------------------------- processes


def answered(line: str, folder: Path, change: Change = lambda: None) -> tuple[runner.Answer, list[int]]:
    """Run a line in a fork; return its answer, and the processes of it that stay for five seconds."""
    stay: list[int] = []

    def stopped(group: int) -> None:
        end = time.monotonic() + 5
        while (left := session(group)) and time.monotonic() < end:
            time.sleep(0.02)
        stay.extend(left)
        stop(group)

    stop, runner._stop_all = runner._stop_all, stopped
    try:
        shutil.rmtree(folder.parent / "said", ignore_errors=True)
        found = runner.answer(runner.Input(tuple(line.split())), folder.parent, change)
    finally:
        runner._stop_all = stop
    return found, stay


def session(of: int) -> list[int]:
    """Return the processes of a session that are no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            mode, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
            if int(own) == of and mode != "Z":
                found.append(int(path.parent.name))
    return found


def changed(before: dict[str, tuple[int, ...]], folder: Path) -> list[str]:
    """Return the files that are new or changed."""
    after = state(folder)
    return sorted(
        name
        for name in after
        if after[name] != before.get(name) and "lost.parquet" not in name and name != "b.html"
    )


def traces(text: str) -> list[str]:
    """Return what is printed that no run prints."""
    return [f"{trace!r} is printed" for trace in TRACES if trace in text]


def whole(path: Path) -> None:
    """Read a result; fail if it is not whole."""
    if path.suffix == ".json":
        json.loads(path.read_text())
    elif path.suffix == ".parquet":
        pq.read_table(path)
    elif path.suffix == ".xml":
        ET.parse(path)
    elif path.suffix == ".tally":
        from offpol_diag.analysis import tally_file

        tally_file.read(path)
    elif path.suffix == ".html":
        assert path.read_text().rstrip().endswith("</html>")
    else:
        assert path.read_text().endswith("\n")


def at_once(line: str, folder: Path) -> list[str]:
    """Run a line three times at once."""
    before, children = state(folder), []
    for one in range(3):
        place = folder.parent / f"place-{one}"
        place.mkdir()
        (place / "work").symlink_to(folder)
        if (child := os.fork()) == 0:
            code, errors = 70, "?"
            with suppress(BaseException):
                found = runner.answer(runner.Input(tuple(line.split())), place)
                code, errors = 70 if found.code is None else abs(found.code), found.errors
            (place / "errors").write_text(errors)
            os._exit(code)
        children.append((child, place))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
    wrong = [
        f"exit code {code}: {(place / 'errors').read_text()[-800:]}"
        for code, (_, place) in zip(codes, children, strict=True)
        if code
    ]
    whole(folder / target(line))
    return wrong + [f"{name} is left" for name in changed(before, folder) if name != target(line)]


def killed_and_again(line: str, folder: Path) -> list[str]:
    """Kill a run before it renames its file, and run it again."""
    before = state(folder)
    found, _ = answered(line, folder, signalled(signal.SIGKILL, "renaming"))
    wrong = [] if found.code == -signal.SIGKILL else [f"exit code {found.code}"]
    left = changed(before, folder)
    wrong += [f"{name} is left" for name in left if not (name.startswith(".") and ".tmp" in name)]
    again, _ = answered(line, folder)
    wrong += [] if again.code == 0 else [f"then exit code {again.code}: {again.errors[-800:]}"]
    whole(folder / target(line))
    for name in left:
        (folder / name).unlink(missing_ok=True)
    return wrong


def many_groups(folder: Path) -> None:
    """Write a dump of 16 row groups."""
    random = np.random.default_rng(0)
    rollout = -random.exponential(1, (64, 100)).round(3)
    old = np.minimum(rollout + random.normal(0, 0.05, rollout.shape), 0)
    table = pa.table(
        {"rollout_log_probs": pa.array(list(rollout)), "old_log_probs": pa.array(list(old)), "step": [1] * 64}
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=4)


# ---------------------------------------------------------------- the table

ALL = (*PRINTED, *lines("convert", "recover"), "analyze rows.jsonl --presets token_is --quiet --no-html")
NON_ASCII = tuple(
    COMMANDS[one].replace("a.parquet", "größe→.parquet").replace("--quiet", "")
    for one in ("analyze", "compare", "gate", "doctor")
)
NO_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
FIRST = tuple(next(iter(lines(one))) for one in COMMANDS)

ON_PROCESSES: tuple[Attack, ...] = (
    # ---------------------------------------------------------------- resources
    Attack(
        "16 open files at most",
        ALL,
        "it works",
        limit=limited(resource.RLIMIT_NOFILE, 16),
        left=None,
    ),
    *(
        Attack(
            f"an address space of {megabytes} MB",
            JSON_OUT,
            "an error",
            own={},
            limit=limited(resource.RLIMIT_AS, megabytes << 20),
            code=2,
            says="there is not enough memory",
        )
        for megabytes in (300, 700)
    ),
    *(
        Attack(how, ALL, "it works", own=changes, left=None)
        for how, changes in {
            "no HOME, no TMPDIR": {"HOME": "", "TMPDIR": ""},
            "HOME and TMPDIR are not there": {"HOME": "/missing", "TMPDIR": "/missing"},
            "HOME and TMPDIR cannot be written": {"HOME": "/proc", "TMPDIR": "/proc"},
        }.items()
    ),
    *(
        Attack(name, chosen, answer, named, code, own=NO_LOCALE, left=None)
        for name, chosen, answer, code in (
            (
                "names of files that are no ASCII, and no locale",
                tuple(f"{line} --json größe→.json" for line in NON_ASCII),
                "it works",
                0,
            ),
            (
                "a column named on the command line that is no ASCII, and no locale",
                tuple(f"{line} --group-by höst" for line in NON_ASCII if not line.startswith("gate")),
                "an error: the column is not found",
                2,
            ),
        )
    ),
    # ---------------------------------------------------------------- a reader that leaves
    *(
        Attack(
            f"{what} into a pipe whose reader has left",
            chosen,
            "it ends as by SIGPIPE, and says nothing",
            limit=to_no_reader,
            code=141,
            says=r"\A\Z",
        )
        for what, chosen in {"a result": STREAMED, "what is printed": PRINTED}.items()
    ),
    # ---------------------------------------------------------------- runs at the same time
    Attack(
        "three runs at once that write the same file",
        tuple(line for line in lines() if not line.startswith("recover")),
        "the file is that of one of them, whole",
        instead=at_once,
        left=TARGET,
    ),
    # ---------------------------------------------------------------- signals
    *(
        Attack(
            f"a signal when {stage} begins: SIGINT, SIGTERM, SIGHUP, by turns",
            tuple(line for line in FIRST if line.split()[0] not in PASSED_OVER.get(stage, ())),
            "exit code 130, 143, 129; of SIGINT the word `interrupted`, else no message",
            many_groups,
            code=None,
            instead=at_stage(stage),
        )
        for stage in STAGES
    ),
    Attack(
        f"a signal at each of {MOMENTS} moments of a run, evenly spaced by its calls of functions",
        (*JSON_OUT, *lines("convert"), lines("report")[0]),
        "exit code 130, 143, 129; of SIGINT the word `interrupted`, else no message",
        code=None,
        instead=at_moments,
    ),
    # ---------------------------------------------------------------- killed processes
    Attack(
        "SIGKILL before a file is renamed, and the same run again",
        tuple(line for line in lines() if not line.startswith("recover")),
        "a hidden temporary file is left, which harms no later run",
        instead=killed_and_again,
        left=TARGET,
    ),
)
