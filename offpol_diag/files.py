"""Read small files (results, presets, gates, settings), refusing devices and oversized files; write safely.

Errors are OSError or ValueError, with texts that can be used in messages.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
import tomllib
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

MOST_TOML, MOST_RESULT = 16 << 20, 512 << 20
"""Most bytes of a hand-written file, and of a result."""
LONGEST = 200
"""Bytes of a file name that leave room for a suffix: file systems allow 255."""


def read(path: Path, most: int) -> bytes:
    """Read a regular file.

    Raises:
        OSError: it cannot be read, is a device, a pipe or a directory, or exceeds `most` bytes.
        ValueError: its name holds a NUL.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "a directory, a device or a pipe")
    with path.open("rb") as stream:
        return up_to(stream, most)


def up_to(stream: BinaryIO, most: int) -> bytes:
    """Read a stream to its end."""
    data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB")
    return data


def beside(path: Path) -> Path:
    """Return a temporary path in the same directory, for writing a file before it is renamed.

    It is absolute, since Arrow takes a relative one such as `run:1/a.parquet` for a URL.
    """
    name = os.fsencode(path.name)
    kept = path.name if len(name) <= LONGEST else f"offpol-diag-{zlib.crc32(name):08x}"
    return path.absolute().with_name(f".{kept}.{os.getpid()}.tmp")


def placed(file: Path, target: Path) -> None:
    """Rename a finished file to its target: links are followed, and what is replaced keeps its mode."""
    with suppress(FileNotFoundError):
        file.chmod(stat.S_IMODE(target.stat().st_mode))
    file.replace(target.resolve())


def toml(text: str) -> dict[str, Any]:
    """Parse TOML."""
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("tables or arrays nest too deep") from error


class TemporaryFolder:
    """A directory, `path`, removed with this object, on leaving its `with` block, or when the process ends.

    Unlike with tempfile.TemporaryDirectory, removal is arranged before the directory exists: a signal that
    arrives in between leaves none behind.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.gettempdir(), f"offpol-diag-{secrets.token_hex(8)}")
        self._remove = weakref.finalize(self, _remove, self.path, os.getpid())
        self.path.mkdir(0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()


def _remove(folder: Path, owner: int) -> None:
    """Remove a directory, unless this is a child process of the one that made it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
