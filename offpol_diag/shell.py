"""A command's process: streams, progress, errors, exit codes, and files that appear whole or not at all."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.files import beside, placed
from offpol_diag.printable import printable, printable_lines

STDOUT = Path("-")
SELDOM = 1_000_000
"""Net number of new objects that triggers a collection; a small analysis makes about half as many."""


def run(app: Callable[..., object]) -> None:
    """Run the command line in this process, set up for it before a command's imports, which saves a third.

    The garbage collector would scan all imported modules again and again. BLAS threads would keep other cores
    busy while idle, unless the user sets their number. Arrow uses the heap that numpy uses.
    """
    nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere  # None: it was closed
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    gc.set_threshold(SELDOM)
    atexit.register(gc.freeze)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminated)
    app(prog_name="offpol-diag")


def terminated(number: int, _: object) -> None:
    """Leave as on Ctrl-C, so that incomplete files are removed; a second signal does not cut that short."""
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what is raised within the block into a message on stderr and an exit code.

    A failed gate, and what `--strict` finds, are the only ways to 1: a crash is 2, or CI would read it as a
    verdict.
    """
    try:
        yield
    except SystemExit as stop:
        if isinstance(
            stop.__context__, BrokenPipeError
        ):  # whoever read stdout went away: typer leaves with 1
            raise SystemExit(141) from stop
        raise
    except OffpolError as error:
        complain(error)
    except MemoryError as error:
        complain(OffpolError(f"there is not enough memory ({error})", "leave more free, say --threads 1"))
    except OSError as error:
        what = f"{error.filename or 'output'}: cannot be read or written ({error.strerror})"
        mute(sys.stdout)
        complain(OffpolError(what, "choose another place, or make room"))
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # typer has printed the help
            raise SystemExit(2) from error
        if message := getattr(error, "format_message", str)():  # typer's own, of arguments
            where = getattr(error, "ctx", None)
            hint = f"see `{where.command_path if where else 'offpol-diag'} --help`"
            complain(UsageError(message[:1].lower() + message[1:].removesuffix("."), hint))
        note("".join(traceback.format_exception(error)))
        complain(OffpolError("this is a bug in offpol-diag", "please report it with the traceback above"))


def mute(stream: TextIO) -> None:
    """Redirect a stream that cannot be written: the interpreter's last flush would end in exit code 120."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def complain(error: OffpolError) -> None:
    """Print `error: …`, a blank line and `hint: …` on stderr, and leave with exit code 2.

    Raises:
        SystemExit: always.
    """
    message, *details = error.lines
    note("\n".join((f"error: {printable(message)}", *(f"  {printable(one)}" for one in details))))
    if error.hint:
        note(f"\nhint: {printable(error.hint)}")
    raise SystemExit(2)


# ---------------------------------------------------------------- stderr: remarks and progress


def note(text: str, quiet: bool = False) -> None:
    """Print a remark on stderr, if anything can be printed there."""
    if not quiet:
        try:
            sys.stderr.write(f"{printable_lines(text)}\n")
            sys.stderr.flush()
        except OSError:
            mute(sys.stderr)


@contextmanager
def progress(quiet: bool, doing: str, unit: str) -> Iterator[Any]:
    """Yield a function that shows (done, in all) as a bar on stderr; None if that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    rate = f"{unit}, {{task.fields[rate]}} {unit}/s,"
    columns = (doing, BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None, rate="–")

        def report(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, rate=f"{bar.tasks[0].speed or 0:,.0f}")

        yield report


# ---------------------------------------------------------------- files, and stdout


def check_targets(targets: Sequence[Path], sources: Sequence[object]) -> None:
    """Refuse, before any work is done, a file that cannot be written or that is one of those that are read.

    Raises:
        UsageError: there is no such place, it is given twice, or is read.
    """
    read = [Path(str(one)) for some in sources for one in (some if isinstance(some, list) else [some])]
    for target in targets:
        if target.is_dir() or not target.parent.is_dir():
            raise UsageError(
                f"{target}: no file can be written there", "name a file in a directory that exists"
            )
        if (
            target != STDOUT
            and target.exists()
            and any(one.exists() and target.samefile(one) for one in read)
        ):
            raise UsageError(f"{target}: is what is read", "write to another file")
    if len({target.resolve() for target in targets}) < len(targets):
        raise UsageError("two results cannot both go to one place", "give each a file of its own")


def write(texts: Mapping[Path, str], shown: str = "") -> None:
    """Write each text to its file, and what is shown to stdout, unless that gets a text.

    Nothing is renamed before all is written; but where whoever read stdout went away, which is no failure.

    Raises:
        OSError: a file, a device or stdout cannot be written.
    """
    ready, left = dict[Path, Path](), None
    try:
        for target, text in texts.items():
            if target != STDOUT:
                regular = target.is_file() or not target.exists()  # else a device or a pipe
                ready |= {target: beside(target.resolve())} if regular else {}
                ready.get(target, target).write_bytes(text.encode("utf-8", "backslashreplace"))
        encoding = "utf-8" if STDOUT in texts else sys.stdout.encoding or "utf-8"
        data = memoryview(texts.get(STDOUT, shown).encode(encoding, "replace"))
        try:
            while data:  # unbuffered, a write may take a part
                data = data[sys.stdout.buffer.write(data) :]
            sys.stdout.buffer.flush()
        except BrokenPipeError as error:
            left = error
        for target, file in ready.items():
            placed(file, target)
        if left:
            raise left
    finally:
        for file in ready.values():
            file.unlink(missing_ok=True)
