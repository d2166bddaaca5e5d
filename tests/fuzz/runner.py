"""Run the command line on inputs made at random, in this process, and tell which it answers badly.

A good answer is exit code 0, or 1 from a gate; or 2 with one `error: …` and one `hint: …`, and then no file
is new or changed. No answer holds a traceback, a warning of Python or a control character, and every file
that is written can be read by what reads its kind. An input depends on its seed and number alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import unicodedata
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

SECONDS = 20
MEMORY = 2 << 30
"""Bytes of address space beyond those of the process when it begins."""
KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL")
"""Environment variables of this process that an input keeps."""


@dataclass(frozen=True)
class Input:
    """One call of `offpol-diag`: arguments, files (name → content) where it runs, variables, stdin."""

    arguments: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""


@dataclass(frozen=True)
class Answer:
    """Outcome of an input: the exit code, what is printed, warnings, files that are new or changed."""

    given: Input
    code: object
    out: str
    err: str
    warned: list[str]
    changed: dict[str, bytes]

    @property
    def judged(self) -> bool:
        """Return whether the exit code is a verdict, of a gate or with --strict."""
        return not {"gate", "--strict"}.isdisjoint(self.given.arguments) and "error:" not in self.err


def read(*names: str) -> None:
    """Read a dump of any form to its end: what every command does first."""
    from offpol_diag.dump.convert import open_dump

    for batch in open_dump(names).batches():
        assert batch.tokens >= 0


def answer(given: Input) -> Answer:
    """Run one input in a folder of its own; it is interrupted after `SECONDS`."""
    import typer.rich_utils  # noqa: F401 -- it asks for variables as it is imported

    from offpol_diag.cli import app
    from offpol_diag.cli.exits import PROGRAM, exit_codes, usage_errors

    def late(*_: object) -> None:
        raise TimeoutError(f"it takes longer than {SECONDS} s")

    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    streams = [
        io.TextIOWrapper(io.BytesIO(data), "utf-8", errors="backslashreplace")
        for data in (given.stdin, b"", b"")
    ]
    code: object = 0
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        for file, content in given.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(patch.dict(os.environ, kept | dict(given.environment), clear=True))
        for at, stream in enumerate(("stdin", "stdout", "stderr")):
            stack.enter_context(patch.object(sys, stream, streams[at]))
        stack.enter_context(patch.object(sys, "argv", [PROGRAM, *given.arguments]))
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("default")
        signal.signal(signal.SIGALRM, late)
        signal.alarm(SECONDS)
        try:
            with exit_codes(), usage_errors():
                if given.arguments[:1] == ("read",):
                    read(*given.arguments[1:])
                else:
                    code = app(args=[*given.arguments], prog_name=PROGRAM, standalone_mode=False)
        except SystemExit as end:
            code = end.code
        finally:
            signal.alarm(0)
        files = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
    out, err = (stream.buffer.getvalue().decode() for stream in streams[1:] if not stream.flush())  # type: ignore[attr-defined]
    changed = {name: content for name, content in files.items() if given.files.get(name) != content}
    return Answer(given, code or 0, out, err, [one.category.__name__ for one in said], changed)


# ---------------------------------------------------------------- what is bad about an answer

TOLD = re.compile(r"(?:^|\n)error: [^\n]*(?:\n  [^\n]*)*\n\nhint: [^\n]+\n\Z")
CONTROLS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what drives a terminal, turns text around, is half a character or ends a line."""
COLOUR = re.compile(r"\x1b\[(?!8m)[0-9;]*m")
COMMAND = re.compile(r"^\s*::|##\[", re.M)
"""What a log must not hold: GitHub Actions would run it."""


def _control(text: str) -> str:
    """Return the first character that must never be printed, or nothing."""
    odd = (x for x in text if x not in "\n\t" and unicodedata.category(x) in CONTROLS)
    return "" if text.replace("\n", "").isprintable() else next((f"U+{ord(x):04X}" for x in odd), "")


def _page(text: str) -> None:
    if "<planted" in text:
        raise ValueError("a name is markup")


def _markdown(text: str) -> None:
    _page(text)
    if odd := _control(text):
        raise ValueError(f"a control character, {odd}")


FORMATS: dict[str, Callable[[str], object]] = {
    ".html": _page,
    ".md": _markdown,
    ".json": json.loads,
    ".xml": ET.fromstring,
}


def problems(found: Answer) -> Iterator[str]:
    """Yield what is wrong with an answer, in the same words for the same mistake."""
    errors, environment = len(re.findall(r"^error:", found.err, re.M)), found.given.environment
    if "Traceback (most recent call last)" in found.err:
        yield f"a traceback: {found.err.strip().splitlines()[-4:]}"
    if found.code not in (0, 1, 2) or (found.code == 1 and not found.judged):
        yield f"exit code {found.code}"
    if found.code != 2 and errors:
        yield f"an error is printed, and the exit code is {found.code}"
    if found.code == 2 and found.given.arguments and not found.judged:
        if errors != 1 or not TOLD.search(found.err):
            yield f"exit code 2, and {errors} errors with a hint each are printed"
        elif "there is not enough memory" in found.err:
            yield "it takes all the memory there is"
        elif found.changed:
            yield "refused, and files are left or changed"
    yield from (f"a warning of Python: {kind}" for kind in found.warned)
    text = found.out + found.err
    text = COLOUR.sub("", text) if {"FORCE_COLOR", "GITHUB_ACTIONS"} & environment.keys() else text
    if odd := _control(text):
        yield f"a control character is printed: {odd}"
    if COMMAND.search(text) and ("GITHUB_ACTIONS" not in environment or "\n::error::planted" in text):
        yield "a line of the log is a command of GitHub Actions"
    for name, content in found.changed.items():
        if name.endswith(".tmp"):
            yield "a temporary file is left"
        try:
            FORMATS.get(Path(name).suffix, str)(content.decode(errors="replace"))
        except (ValueError, ET.ParseError, RecursionError) as error:
            yield f"a damaged {Path(name).suffix}: {type(error).__name__} {str(error).partition(':')[0]}"


def fuzz(make: Callable[[Random], Input], seed: int, inputs: int, seconds: float) -> dict[str, Any]:
    """Judge inputs until there are as many, or the time is over.

    Returns:
        `inputs` answered; `refused` of them; `bad`: number of an input → what is wrong; `peak`: bytes.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    most = pages * resource.getpagesize() + MEMORY if pages else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    end, refused, number = time.monotonic() + seconds, 0, 0
    bad: dict[int, list[str]] = {}
    while number < inputs and time.monotonic() < end:
        found = answer(make(Random(f"{seed}:{number}")))
        refused += found.code == 2 and not found.judged
        if said := [*problems(found)]:
            bad[number] = said
        number += 1
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"inputs": number, "refused": refused, "bad": bad, "peak": peak}


def keep(given: Input, folder: Path) -> None:
    """Write an input to a folder, to look at it."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in given.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "arguments.json").write_text(json.dumps([given.arguments, dict(given.environment)]))
