"""Convert errors to exit codes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from offpol_diag.cli.output import put
from offpol_diag.cli.usage import PROGRAM, spoken
from offpol_diag.errors import OffpolError
from offpol_diag.printable import printable

FAILED, COULD_NOT_SAY, INTERRUPTED, BROKEN_PIPE, TERMINATED = 1, 2, 130, 141, 143

GRACE = 5.0
"""Seconds during which a second SIGTERM (`timeout` sends two) is ignored, so that clean-up completes."""

LONGEST = 1600
"""Maximum characters per line of an error."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
BUG = OffpolError(
    "this is a bug in offpol-diag", "please report it with the traceback above and what was run"
)


def run(app: Callable[..., object]) -> None:
    """Run the command line: arguments, signals, exit code."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, terminator())
    with exit_codes(), spoken():
        code = app(prog_name=PROGRAM, standalone_mode=False)
        if isinstance(code, int):  # what typer makes of `typer.Exit`
            raise SystemExit(code)


def terminator() -> Callable[[int, object], None]:
    """Return a SIGTERM handler that exits like Ctrl-C, so that incomplete files are removed."""
    last = float("-inf")

    def leave(signum: int, frame: object) -> None:
        nonlocal last
        if time.monotonic() - last > GRACE:
            last = time.monotonic()
            raise SystemExit(TERMINATED)

    return leave


@contextmanager
def exit_codes() -> Iterator[None]:
    """Convert errors raised within the block to a message on stderr and an exit code.

    A failed gate, and a bug found by `doctor --strict`, are the only ways to 1: a crash is 2, or CI would
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
        raise SystemExit(INTERRUPTED) from error
    except BrokenPipeError as error:
        _silence_stdout()
        raise SystemExit(BROKEN_PIPE) from error
    except Exception as error:
        _unforeseen(error)
        raise SystemExit(COULD_NOT_SAY) from error


def complain(error: OffpolError) -> None:
    """Print `error: …`, a blank line and `hint: …` on stderr."""
    message, *details = map(_short, error.lines)
    put(sys.stderr, f"error: {message}")
    sys.stderr.writelines(f"  {printable(one)}\n" for one in details)
    if error.hint:
        sys.stderr.write("\n")
        put(sys.stderr, f"hint: {_short(error.hint)}")


def _short(text: str) -> str:
    """Shorten a long text in the middle."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def _unforeseen(error: Exception) -> None:
    """Report an unexpected error: a full disk by a message, anything else as a bug with its traceback."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        complain(
            OffpolError(f"{error.filename or 'output'}: cannot be written ({error.strerror})", "make room")
        )
        return
    lines = "".join(traceback.format_exception(error)).splitlines()
    put(sys.stderr, *lines)
    complain(BUG)


def _silence_stdout() -> None:
    """Redirect a closed stdout, so that the interpreter's final flush does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
