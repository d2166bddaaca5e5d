"""Convert errors to exit codes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import typer

from offpol_diag.cli.output import put
from offpol_diag.cli.usage import PROGRAM, spoken
from offpol_diag.errors import OffpolError
from offpol_diag.printable import printable

FAILED, COULD_NOT_SAY, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
SIGNALS = {signal.SIGTERM: 143, signal.SIGHUP: 129}
"""Signals at which incomplete files are removed → exit code."""
GRACE = 5.0
"""Seconds during which a second signal (`timeout` sends two) is ignored, so that clean-up completes."""
LONGEST = 1600
"""Maximum characters per line of an error."""
REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF)
"""Errors of writing that are no bugs: no room, or a closed stdout."""
BUG = OffpolError(
    "this is a bug in offpol-diag", "please report it with the traceback above and what was run"
)


def run(app: Callable[..., object]) -> None:
    """Run the command line: arguments, signals, exit code."""
    _open_streams()
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, terminator())
    with exit_codes(), spoken():
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
        if isinstance(error, OSError) and error.errno in REFUSED:
            where = error.filename or "output"
            complain(
                OffpolError(f"{where}: cannot be written ({error.strerror})", "make room, or open stdout")
            )
            _silence_stdout()
        else:
            with suppress(OSError):
                put(sys.stderr, *"".join(traceback.format_exception(error)).splitlines())
            complain(BUG)
        raise SystemExit(COULD_NOT_SAY) from error


def complain(error: OffpolError) -> None:
    """Print `error: …`, a blank line and `hint: …` on stderr, if anything can be printed there."""
    message, *details = map(_short, error.lines)
    with suppress(OSError):
        put(sys.stderr, f"error: {message}")
        sys.stderr.writelines(f"  {printable(one)}\n" for one in details)
        if error.hint:
            sys.stderr.write("\n")
            put(sys.stderr, f"hint: {_short(error.hint)}")


def _short(text: str) -> str:
    """Shorten a long text in the middle."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} … {text[-LONGEST // 2 :]}"


def _silence_stdout() -> None:
    """Redirect a stdout that cannot be written, so that the interpreter's final flush does not fail."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
