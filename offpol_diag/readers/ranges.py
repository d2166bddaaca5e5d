"""A filesystem of fsspec, for Arrow: read by ranges, tried again, and never waited for without an end."""

from __future__ import annotations

import io
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

T = TypeVar("T")

ATTEMPTS = 5
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0
"""Seconds before the second attempt, doubled before each further one; as much again at most, by chance."""
SECONDS = 30.0
"""How long one attempt may take."""
PIECE = 8 << 20
"""Bytes asked for at once: what any connection worth waiting for brings within `SECONDS`."""
FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NotImplementedError,
)
"""What trying again does not mend."""
PLAIN = (*FINAL, ConnectionError, TimeoutError)
"""What says enough by its type."""
TOO_MANY, TIMED_OUT = 429, 408


class Unanswered(TimeoutError):
    """A store that did not answer in time."""


class StoreError(OSError):
    """What a store's client raised, in a form that Arrow hands on; `status` is that of a web server."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.status = http_status(error)


class Ranged(fs.FSSpecHandler):  # type: ignore[misc]  # Arrow has no types
    """Arrow's adapter, with the patience of this module."""

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        """What is at some paths."""
        found: list[fs.FileInfo] = tried(lambda: fs.FSSpecHandler.get_file_info(self, paths))
        return found

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        """What is in a directory."""
        found: list[fs.FileInfo] = tried(lambda: fs.FSSpecHandler.get_file_info_selector(self, selector))
        return found

    def open_input_file(self, path: str) -> pa.PythonFile:
        """A file to be read at any place."""
        return pa.PythonFile(RangedFile(self.fs, path), mode="r")


class RangedFile(io.RawIOBase):
    """A file whose every read is one range, asked for again when it fails."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._at = 0
        self._stream: Any = None
        self._size = tried(self._measured)

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Read elsewhere; nothing is fetched."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes, up to the end of the file."""
        left = max(self._size - self._at, 0)
        end = self._at + (left if size is None or size < 0 else min(size, left))
        pieces = []
        while self._at < end:
            piece = tried(lambda: self._fetched(min(PIECE, end - self._at)))
            self._at += len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _fetched(self, size: int) -> bytes:
        # Taken out until all went well: a stream that failed, or is still waited for, is used no more.
        stream, self._stream = self._opened(), None
        stream.seek(self._at)
        piece: bytes = stream.read(size)
        if len(piece) != size:
            raise ConnectionError(f"{len(piece)} bytes came where {size} were asked for")
        self._stream = stream
        return piece

    def _measured(self) -> int:
        size = self._opened().size
        if size is None:
            raise io.UnsupportedOperation("the server sends whole files only, and Parquet is read by ranges")
        return int(size)

    def _opened(self) -> Any:
        if self._stream is None:
            self._stream = self._filesystem.open(self._path, "rb", cache_type="none")
        return self._stream


def tried(call: Callable[[], T]) -> T:
    """What a call returns, after as many attempts as it takes; waits between them, longer each time.

    Raises:
        Exception: what the last attempt raised, or what no further attempt would mend.
    """
    for attempt in range(ATTEMPTS):
        try:
            return within(SECONDS, call)
        except Exception as error:
            if attempt == ATTEMPTS - 1 or not passing(error):
                if isinstance(error, PLAIN):
                    raise
                raise StoreError(error) from error
            wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT)
            time.sleep(wait * (1 + random.random()))
    raise AssertionError("there is always an attempt")


def passing(error: Exception) -> bool:
    """Whether what went wrong may go right a second later."""
    status = http_status(error)
    if status is not None:
        return status >= 500 or status in (TOO_MANY, TIMED_OUT)
    return not isinstance(error, FINAL)


def http_status(error: BaseException) -> int | None:
    """The status that a web server answered with, whichever client says so."""
    found = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return found if isinstance(found, int) else None


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns, if it does so in time; one that does not is left behind in its thread.

    Raises:
        Unanswered: it did not.
        BaseException: what it raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="offpol-diag-range")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise Unanswered(f"no answer within {seconds:g} s")
    return results[0]
