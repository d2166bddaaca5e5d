"""Run a command in a process of its own: interpreter settings, signals, errors, exit codes."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer

from offpol_diag.cli.output import put
from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.printable import printable

FAILED, COULD_NOT_SAY, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Signals at which incomplete files are removed → exit code."""
GRACE = 5.0
"""Seconds during which a second signal (`timeout` sends two) is ignored, so that clean-up completes."""
LONGEST = 1600
"""Maximum characters per line of an error."""
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EROFS)
"""Errors of writing that are no bugs: no room, a closed stdout, or a disk that is read-only by now."""
NO_MEMORY = ("t allocate memory", "annot allocate memory", "failed to map segment", "can't start new thread")
"""In messages of torch, the system and its loader where memory is short, besides MemoryError."""
BUG = OffpolError(
    "this is a bug in offpol-diag", "please report it with the traceback above and what was run"
)
SELDOM = 1_000_000
"""Net number of new objects that triggers a collection; a small analysis makes about half as many."""
SIZES, SIZE = ("COLUMNS", "LINES", "TERMINAL_WIDTH"), re.compile("[1-9][0-9]{1,3}")
"""Environment variables of the terminal's size, and their valid values: 10 to 9,999."""
THREADS = "OPENBLAS_NUM_THREADS"
"""Environment variable read when numpy is imported, here and in child processes."""
PROGRAM = "offpol-diag"
NEAR = re.compile(r" (?:Did you mean (?P<words>.+)\?|\(Possible options: (?P<options>.+)\))$")
"""Pattern of the suggestion at the end of typer's messages."""


def tune() -> None:
    """Configure the process before a command's imports, which saves a third of its time.

    The garbage collector would repeatedly scan all imported modules, and once more at exit; memory of batches
    is freed without it. BLAS threads would keep other cores busy while idle, unless the user sets their
    number. Arrow uses the heap that numpy uses, so that either can use what the other has freed. Invalid
    terminal sizes are removed, since rich would raise on them.
    """
    for name in SIZES:
        if not SIZE.fullmatch(os.environ.get(name, "")):
            os.environ.pop(name, None)
    os.environ.setdefault(THREADS, "1")
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    gc.set_threshold(SELDOM)
    atexit.register(gc.freeze)


def run(app: Callable[..., object]) -> None:
    """Run the command line: arguments, signals, exit code."""
    _open_streams()
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminator())
            # else a second signal would end the interpreter while it exits with the code of the first
            atexit.register(signal.signal, number, signal.SIG_IGN)
    with exit_codes(), usage_errors():
        code = app(prog_name=PROGRAM, standalone_mode=False)
        if isinstance(code, int):  # what typer makes of `typer.Exit`
            raise SystemExit(code)


def _open_streams() -> None:
    """Open closed standard streams: a closed stdout then refuses text, a closed stderr swallows it."""
    while (number := os.open(os.devnull, os.O_RDONLY)) <= 2:
        pass
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def terminator() -> Callable[[int, object], None]:
    """Return a signal handler that exits like Ctrl-C, so that incomplete files are removed."""
    last = float("-inf")

    def leave(signum: int, frame: object) -> None:
        nonlocal last
        if time.monotonic() - last > GRACE:
            last = time.monotonic()
            raise SystemExit(SIGNALS[signal.Signals(signum)])

    return leave


@contextmanager
def exit_codes() -> Iterator[None]:
    """Convert errors raised within the block to a message on stderr and an exit code.

    A failed gate, and a bug found with `--strict`, are the only ways to 1: a crash is 2, or CI would
    read it as a verdict.
    """
    try:
        yield
        sys.stdout.flush()
    except OffpolError as error:
        complain(error)
        raise SystemExit(COULD_NOT_SAY) from error
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # typer's own answer to it is 1
            raise SystemExit(BROKEN_PIPE) from stop
        raise
    except typer.Exit as stop:
        raise SystemExit(stop.exit_code) from stop
    except (KeyboardInterrupt, typer.Abort) as error:
        with _stderr_may_fail():
            put(sys.stderr, "interrupted")
        raise SystemExit(INTERRUPTED) from error
    except BrokenPipeError as error:
        _silence(sys.stdout)
        raise SystemExit(BROKEN_PIPE) from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in REFUSED:
            what = f"{error.filename or 'output'}: cannot be written ({error.strerror})"
            complain(OffpolError(what, "make room, or open stdout"))
            _silence(sys.stdout)
        elif isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
            what = f"there is not enough memory ({str(error).partition(chr(10))[0] or 'none is left'})"
            hint = "leave more memory free, say --threads 1, or choose fewer presets"
            complain(OffpolError(what, hint))
        else:
            with _stderr_may_fail():
                put(sys.stderr, *"".join(traceback.format_exception(error)).splitlines())
            complain(BUG)
        raise SystemExit(COULD_NOT_SAY) from error


def complain(error: OffpolError) -> None:
    """Print `error: …`, a blank line and `hint: …` on stderr, if anything can be printed there."""
    message, *details = map(_short, error.lines)
    with _stderr_may_fail():
        put(sys.stderr, f"error: {message}")
        sys.stderr.writelines(f"  {printable(one)}\n" for one in details)
        if error.hint:
            sys.stderr.write("\n")
            put(sys.stderr, f"hint: {_short(error.hint)}")


def _short(text: str) -> str:
    """Shorten a long text in the middle."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


@contextmanager
def _stderr_may_fail() -> Iterator[None]:
    """Let the block write to stderr, if that can be written at all."""
    try:
        yield
        sys.stderr.flush()
    except OSError:
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Redirect a stream that cannot be written: the interpreter's final flush would end in exit code 120."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


# ---------------------------------------------------------------- usage errors of typer
# They have no public names, and are recognised by their attributes.


@contextmanager
def usage_errors() -> Iterator[None]:
    """Convert typer's errors within the block to UsageError; without arguments the exit code is 2."""
    try:
        yield
    except Exception as error:
        if not (hasattr(error, "format_message") and hasattr(error, "ctx")):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # with rich, typer has printed the help already
            sys.stderr.write(error.format_message())
            raise SystemExit(2) from error
        message = _message(error)
        hint, near = f"see `{_command(error)} --help`", NEAR.search(message)
        if near:
            message = message[: near.start()].removesuffix(".")
            hint = f"did you mean {(near['words'] or near['options']).replace(chr(39), '')}?"
        raise UsageError(message, hint) from error


def _message(error: Any) -> str:
    """Return typer's message; values from elsewhere than a flag are named after their source."""
    reason = str(getattr(error, "message", "")).removeprefix("Value error, ")
    param = getattr(error, "param", None)
    if param is None or not reason:
        return _plain(error.format_message())
    source = getattr(error.ctx.get_parameter_source(param.name), "name", "")
    place = param.envvar if source == "ENVIRONMENT" else param.opts[0]
    return f"{place}: {_plain(reason)}"


def _plain(message: str) -> str:
    """Return a message in the style of our own: lower case, without a final full stop."""
    return message[:1].lower() + message[1:].removesuffix(".")


def _command(error: Any) -> str:
    """Return the command whose help to suggest; typer knows it unless an option lacks its value."""
    if error.ctx is not None:
        return str(error.ctx.command_path)
    said = [word for word in sys.argv[1:2] if not word.startswith("-")]
    return " ".join([PROGRAM, *said])
