"""Standard input, kept on disk: a Parquet file is read from its end, and a pipe has none until it is over."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from offpol_diag.errors import DumpError

STDIN = "-"
SHOWN = "standard input"
CHUNK = 1 << 20


@lru_cache(maxsize=1)
def spooled() -> Path:
    """What standard input held, in a temporary file that is gone when the process is; it is read once.

    Raises:
        DumpError: standard input is a terminal or is closed, or the disk has no room.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        raise DumpError(
            f"{STDIN}: nothing is piped into standard input",
            "pipe one Parquet file in: cat step_100.parquet | offpol-diag analyze -",
        )
    path = Path(tempfile.gettempdir(), f"offpol-diag-{secrets.token_hex(8)}.parquet")
    atexit.register(_remover(path, os.getpid()))  # first: a signal may come at any time
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, CHUNK)
    except OSError as error:
        raise DumpError(
            f"{STDIN}: standard input cannot be kept in {path.parent} ({error.strerror})",
            "Parquet is not read from a pipe as it comes: make room there, or set TMPDIR to another place",
        ) from error
    return path


def _remover(path: Path, owner: int) -> Callable[[], None]:
    """Removes a file at the end of the process that made it, not of its children."""

    def remove() -> None:
        if os.getpid() == owner:
            path.unlink(missing_ok=True)

    return remove
