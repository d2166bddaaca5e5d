"""Run the command line on inputs made at random, and tell which of them it answers badly.

A script beside this one makes the inputs: `main(make)` calls `make(random)` for each and counts the answers.
An input depends on the seed and its number only, so that any of them can be made again. Each is run in a fork
of a process that has imported everything, in an empty directory, with bounds on its time and its memory.

A good answer is exit code 0, or 1 from a gate; or 2 with one `error: …` and one `hint: …`, and then no file
is new or changed. No answer holds a traceback, a warning of Python or a control character, and every file
that is written can be read by what reads its kind.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import pkgutil
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NoReturn

CPU_SECONDS = 20
"""CPU seconds that an input may take, so that a busy machine changes nothing."""
WALL_SECONDS = 120
MEMORY = 3 << 30
"""Bytes of address space beyond those of the process that forks; malloc reserves 64 MiB for each thread."""
FILE_BYTES = 256 << 20
SAVED_OF_A_KIND = 3
PLANTED = "planted"
"""Inputs put this word where it must never be markup: `<planted>` in a page, `::error::planted` in a log."""

KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "LANG", "LC_ALL")
"""Environment variables of this process that an input keeps."""
LATE = ("jinja2", "rich.progress")
"""Modules that commands import late, in functions."""


@dataclass(frozen=True)
class Input:
    """One call of `offpol-diag`.

    Attributes:
        arguments: after the program's name.
        files: name → content, in the working directory.
        environment: variables to set.
        stdin: what can be read there.
    """

    arguments: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""


@dataclass(frozen=True)
class Answer:
    """Outcome of an input.

    Attributes:
        given: the input.
        code: the exit code; a signal is negative, and None is what had to be stopped.
        out: stdout.
        err: stderr.
        changed: files that are new or not as they were.
        folder: where they lie.
    """

    given: Input
    code: int | None
    out: bytes
    err: bytes
    changed: tuple[str, ...]
    folder: Path

    @property
    def text(self) -> str:
        """Text of stdout."""
        return (self.out + b"\n" + self.err).decode(errors="surrogateescape")

    @property
    def errors(self) -> str:
        """Text of stderr."""
        return self.err.decode(errors="surrogateescape")

    @property
    def judged(self) -> bool:
        """Return whether a gate came to a verdict, so that the exit code repeats it."""
        return "gate" in self.given.arguments and not re.search("^error:", self.errors, re.M)


Make = Callable[[Random], Input]


# ---------------------------------------------------------------- one input


def warm() -> None:
    """Import everything, make what is made once, and start no thread."""
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
    for name in [name for name in os.environ if name.startswith("OFFPOL_DIAG_")] + ["COLUMNS"]:
        os.environ.pop(name, None)
    import offpol_diag

    for module in pkgutil.walk_packages(offpol_diag.__path__, "offpol_diag."):
        if not module.name.endswith(".ray"):
            importlib.import_module(module.name)
    for name in LATE:
        importlib.import_module(name)
    from offpol_diag.presets import catalogue

    catalogue.load()
    gc.collect()
    gc.freeze()


def answer(given: Input, folder: Path) -> Answer:
    """Run one input in a folder of its own, and wait for it."""
    work, said = folder / "work", folder / "said"
    for place in (work, said):
        place.mkdir(parents=True, exist_ok=True)
    for name, content in given.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_bytes(content)
    (said / "in").write_bytes(given.stdin)
    before = _stamps(work)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _run(given, work, said)
    code = _waited(child)
    after = _stamps(work)
    changed = tuple(name for name in after if before.get(name) != after[name])
    gone = tuple(name for name in before if name not in after)
    out, err = ((said / name).read_bytes() for name in ("out", "err"))
    return Answer(given, code, out, err, (*changed, *gone), work)


def _stamps(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path.relative_to(folder): path.lstat() for path in sorted(folder.rglob("*"))}
    return {str(name): (stat.st_size, stat.st_mtime_ns) for name, stat in found.items() if name.name}


def _waited(child: int) -> int | None:
    """Return the exit status, None if the run was stopped with its processes."""
    end = time.monotonic() + WALL_SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            _stop_all(child)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    _stop_all(child)
    os.waitpid(child, 0)
    return None


def _stop_all(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _run(given: Input, work: Path, said: Path) -> NoReturn:
    """Run the program in the fork, as its own process would."""
    code = 70
    try:
        os.setsid()
        os.chdir(work)
        _rewire(said)
        _limit()
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        os.environ.clear()
        os.environ.update(kept | {"OMP_NUM_THREADS": "1"} | dict(given.environment))
        tempfile.tempdir = str(said)  # emptied with it, as this process ends without atexit
        sys.argv = ["offpol-diag", *given.arguments]
        from offpol_diag.__main__ import main

        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)


def _rewire(said: Path) -> None:
    """Connect standard streams to files, as strict as Python's own."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, name, how in ((0, "in", os.O_RDONLY), (1, "out", flags), (2, "err", flags)):
        os.dup2(os.open(said / name, how, 0o600), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    pages = Path("/proc/self/statm")
    if pages.exists():
        most = int(pages.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


# ---------------------------------------------------------------- what is bad about an answer

TRACEBACK = "Traceback (most recent call last)"
FRAME = re.compile(r'File "[^"]*/(offpol_diag/[^"]+)", line (\d+), in (\S+)')
RAISED = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Iteration|Warning))\b", re.M)
WARNING = re.compile(r"^\S+:\d+: (\w*Warning): ", re.M)
TOLD = re.compile(r"(?:^|\n)error: [^\n]*(?:\n  [^\n]*)*\n\nhint: [^\n]+\n\Z")
CONTROLS = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what drives a terminal, turns text around, is half a character or ends a line."""
COLOUR = re.compile(r"\x1b\[(?!8m)[0-9;]*m|\r?\x1b\[(?:2K|1A|\?25[lh])|\r(?=\x1b)")
"""Where colour is forced: colours, and what draws a bar of progress. Concealed text is never ours."""
COMMAND = re.compile(r"^\s*::|##\[", re.M)
MARKUP = f"<{PLANTED}"


def problem(found: Answer) -> str:
    """Describe what is wrong with an answer, in the same words for the same mistake; empty if nothing is."""
    return next((said for check in CHECKS for said in check(found)), "")


def _ended(found: Answer) -> Iterator[str]:
    if found.code is None:
        yield f"it takes longer than {WALL_SECONDS} s"
    elif found.code == -signal.SIGXCPU:
        yield f"it takes more than {CPU_SECONDS} s of a core"
    elif found.code < 0:
        yield f"it ends by {signal.Signals(-found.code).name}"


def _traced(found: Answer) -> Iterator[str]:
    if TRACEBACK in found.errors:
        frames, raised = FRAME.findall(found.errors), RAISED.findall(found.errors)
        file, line, function = frames[-1] if frames else ("elsewhere", "0", "?")
        yield f"a traceback: {raised[-1] if raised else '?'} in {file}:{line} ({function})"


def _exit(found: Answer) -> Iterator[str]:
    if found.code not in (0, 1, 2) or (found.code == 1 and not found.judged):
        yield f"exit code {found.code}"


def _refused(found: Answer) -> Iterator[str]:
    errors = len(re.findall(r"^error:", found.errors, re.M))
    if found.code != 2 and errors:
        yield f"an error is printed, and the exit code is {found.code}"
    if found.code != 2 or _may_be_silent(found):
        return
    if errors != 1 or not TOLD.search(found.errors):
        yield f"exit code 2, and {errors} errors with a hint each are printed"
    elif "there is not enough memory" in found.errors:
        yield "an input takes all the memory there is"
    elif found.changed:
        yield "refused, and files are left or changed"


def _may_be_silent(found: Answer) -> bool:
    """Return whether silence is right: an undecided gate, or no argument at all, which prints the help."""
    return found.judged or not found.given.arguments


def _warned(found: Answer) -> Iterator[str]:
    yield from (f"a warning of Python: {kind}" for kind in WARNING.findall(found.errors))


def _controls(found: Answer) -> Iterator[str]:
    forced = {"FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "GITHUB_ACTIONS"} & set(
        found.given.environment
    )
    text = COLOUR.sub("", found.text) if forced else found.text
    if char := _control(text):
        yield f"a control character is printed: U+{ord(char):04X}"
    lines = COMMAND.findall(text) and found.given.environment.get("GITHUB_ACTIONS") != "true"
    if lines or f"\n::error::{PLANTED}" in text:
        yield "a line of the log is a command of GitHub Actions"


def _control(text: str) -> str:
    """Return the first character that must never be printed, or nothing."""
    odd = (char for char in text if char not in "\n\t" and unicodedata.category(char) in CONTROLS)
    return "" if text.replace("\n", "").isprintable() else next(odd, "")


def _left(found: Answer) -> Iterator[str]:
    if any(name.endswith(".tmp") for name in found.changed):
        yield "a temporary file is left"


def _files(found: Answer) -> Iterator[str]:
    for name in found.changed:
        path = found.folder / name
        check = FORMATS.get(path.suffix)
        if check and path.is_file() and not path.name.endswith(".tmp"):
            try:
                check(path.read_bytes().decode())
            except (ValueError, ET.ParseError, RecursionError) as error:
                yield f"a damaged {path.suffix}: {type(error).__name__} {str(error).partition(':')[0]}"


def _page(text: str) -> None:
    if MARKUP in text:
        raise ValueError("a name is markup")


def _markdown(text: str) -> None:
    _page(text)
    if char := _control(text):
        raise ValueError(f"a control character, U+{ord(char):04X}")


FORMATS: dict[str, Callable[[str], object]] = {
    ".html": _page,
    ".md": _markdown,
    ".json": json.loads,
    ".xml": ET.fromstring,
}
CHECKS = (_ended, _traced, _exit, _refused, _warned, _controls, _left, _files)
"""The first that finds something names the mistake."""


# ---------------------------------------------------------------- many inputs


def main(make: Make, argv: Sequence[str] | None = None) -> int:
    """Run inputs until the time is over; the number of exit is 1 where one was answered badly."""
    asked = _asked(argv)
    warm()
    counts, bad = Counter[str](), Counter[str]()
    scratch = Path(tempfile.mkdtemp(prefix="offpol-fuzz-"))
    save = asked.save or Path(tempfile.mkdtemp(prefix="offpol-fuzz-bad-"))
    made(make, asked.seed, asked.first)  # what inputs are made of is there before the time begins
    end, number = time.monotonic() + asked.seconds, asked.first
    while time.monotonic() < end and number - asked.first < asked.inputs:
        found = answer(made(make, asked.seed, number), scratch / str(number))
        said = problem(found)
        counts["badly" if said else "refused" if found.code == 2 and not found.judged else "answered"] += 1
        if said:
            bad[said] += 1
            if bad[said] <= SAVED_OF_A_KIND:
                _save(found, said, save / f"{asked.seed}-{number}")
                _say(
                    f"bad: input {number} of seed {asked.seed}: {said}; see {save / f'{asked.seed}-{number}'}"
                )
        shutil.rmtree(scratch / str(number), ignore_errors=True)
        number += 1
    shutil.rmtree(scratch, ignore_errors=True)
    if not bad and not asked.save:
        save.rmdir()
    for said, times in bad.most_common():
        _say(f"{times} times: {said}")
    _say(
        f"{counts.total()} inputs: {counts['answered']} answered, {counts['refused']} refused, "
        f"{counts['badly']} badly"
    )
    return int(bool(bad))


def made(make: Make, seed: int, number: int) -> Input:
    """Return an input by its number."""
    return make(Random(f"{seed}:{number}"))


def _asked(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first input")
    parser.add_argument("--inputs", type=int, default=sys.maxsize, metavar="N", help="at most so many inputs")
    parser.add_argument("--save", type=Path, metavar="DIR", help="where inputs answered badly are kept")
    return parser.parse_args(argv)


def _save(found: Answer, said: str, folder: Path) -> None:
    """Save an input and its answer: the working directory as it was left, and the files given."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(found.folder, folder / "work", symlinks=True)
    given = {
        "arguments": found.given.arguments,
        "environment": dict(found.given.environment),
        "problem": said,
    }
    (folder / "input.json").write_text(json.dumps(given, indent=1))
    for name, content in found.given.files.items():
        (folder / "work" / name).write_bytes(content)
    for name, said_there in (("stdin", found.given.stdin), ("stdout", found.out), ("stderr", found.err)):
        (folder / name).write_bytes(said_there)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# ---------------------------------------------------------------- what inputs are made of


def written(arguments: Sequence[str], files: Mapping[str, bytes] = {}) -> dict[str, bytes]:
    """Return the files that a valid call leaves, the given ones among them, to make inputs from."""
    with tempfile.TemporaryDirectory() as folder:
        found = answer(Input(tuple(arguments), files), Path(folder))
        if problem(found) or found.code:
            raise RuntimeError(f"{' '.join(arguments)}: {problem(found)}\n{found.errors}")
        left = [path for path in sorted(found.folder.rglob("*")) if path.is_file()]
        return {str(path.relative_to(found.folder)): _steady(path.read_bytes()) for path in left}


def _steady(text: bytes) -> bytes:
    """Remove the times and the memory of a result, which differ from run to run."""
    text = re.sub(rb'("peak_rss_bytes": ?)\d+', rb"\g<1>1000000", text)
    return re.sub(rb'("seconds": ?\{)[^}]*\}', rb'\1"total": 1.0}', text)


def dump(rows: int = 6, step: int = 1, longest: int = 9) -> bytes:
    """Make a small dump with every kind of column, as Parquet; another one for each step."""
    from offpol_diag.dump.writer import stamped, to_table, write_table

    random = Random(f"dump {step}")
    lengths = [random.randint(2, longest) for _ in range(rows)]

    def tokens(spread: float) -> list[list[float]]:
        return [[-abs(random.gauss(1, spread)) for _ in range(length)] for length in lengths]

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dump.parquet")
        columns = {
            "rollout_log_probs": (rollout := tokens(0.5)),
            "old_log_probs": [[min(0.0, x + random.gauss(0, 0.05)) for x in row] for row in rollout],
            "current_log_probs": [[min(0.0, x + random.gauss(0, 0.1)) for x in row] for row in rollout],
            "response_mask": [[1] * length for length in lengths],
            "advantages": [random.gauss(0, 1) for _ in lengths],
            "rewards": [float(random.random() < 0.5) for _ in lengths],
            "token_ids": [[random.randint(0, 99) for _ in range(length)] for length in lengths],
            "entropy": [[-x for x in row] for row in tokens(0.1)],
            "sequence_id": [f"s{step}-{at}" for at in range(rows)],
            "group_id": [f"g{step}-{at // 2}" for at in range(rows)],
            "step": [step] * rows,
            "policy_lag": [at % 2 for at in range(rows)],
            "host": [f"h{at % 2}" for at in range(rows)],
        }
        write_table(to_table(columns), path, stamped({"trainer": "verl", "engine": "vllm"}))
        return path.read_bytes()
