"""Exit codes, and the one place where errors become them."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from offpol_diag.errors import OffpolError

FAILED, COULD_NOT_SAY, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
BUG = OffpolError(
    "this is a bug in offpol-diag", "please report it with the traceback above and what was run"
)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Run a block; what it raises becomes a message on stderr and an exit code.

    A failed gate is the only way to 1: a crash is 2, or CI would read it as a verdict.
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
    except KeyboardInterrupt as error:
        raise SystemExit(INTERRUPTED) from error
    except BrokenPipeError as error:
        _silence_stdout()
        raise SystemExit(BROKEN_PIPE) from error
    except Exception as error:
        _unforeseen(error)
        raise SystemExit(COULD_NOT_SAY) from error


def complain(error: OffpolError) -> None:
    """`error: …`, a blank line, `hint: …`, on stderr."""
    parts = [f"error: {error.message}", *([f"hint: {error.hint}"] if error.hint else [])]
    sys.stderr.write("\n\n".join(parts) + "\n")


def _unforeseen(error: Exception) -> None:
    """A full disk is the machine's; anything else is a bug of ours and shows its traceback."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        complain(
            OffpolError(f"{error.filename or 'output'}: cannot be written ({error.strerror})", "make room")
        )
        return
    traceback.print_exception(error)
    complain(BUG)


def _silence_stdout() -> None:
    """Nobody reads stdout any more: keep the interpreter's last flush from complaining about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
