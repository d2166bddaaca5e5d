"""Files that are read or written whole: results, presets, gates, settings. No device, and no more than fits.

What is wrong with one is an OSError or a ValueError, with words that can stand in a message.
"""

from __future__ import annotations

import errno
import os
import stat
import tomllib
import zlib
from pathlib import Path
from typing import Any, BinaryIO

MOST_TOML = 16 << 20
"""Bytes of a file that people write."""
MOST_RESULT = 512 << 20
"""Bytes of a result."""
LONGEST = 200
"""Bytes of a file's name that leave room for more: 255 is what file systems allow."""
DEEPEST = 64
"""Tables within tables: what goes deeper is meant to exhaust who goes after it."""


def read(path: Path, most: int) -> bytes:
    """The bytes of a plain file.

    Raises:
        OSError: it cannot be read, is a device, a pipe or a directory, or is larger than `most`.
    """
    check(path)
    with path.open("rb") as stream:
        return up_to(stream, most)


def check(path: Path) -> None:
    """Refuse what is no plain file.

    Raises:
        OSError: it is not there, or a device, a pipe or a directory.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "its name holds a NUL")
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "a device or a pipe, no file")


def up_to(stream: BinaryIO, most: int) -> bytes:
    """What a stream holds.

    Raises:
        OSError: that is more than `most` bytes.
    """
    data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB")
    return data


def beside(path: Path) -> Path:
    """Where a file is written until it is whole: in its folder, by a name that fits however long its own."""
    name = os.fsencode(path.name)
    kept = path.name if len(name) <= LONGEST else f"offpol-diag-{zlib.crc32(name):08x}"
    return path.with_name(f".{kept}.{os.getpid()}.tmp")


def toml(text: str) -> dict[str, Any]:
    """A text as TOML.

    Raises:
        ValueError: it is none, holds an integer that no computer could, or nests too deep.
    """
    try:
        table = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("tables or arrays nest too deep") from error
    if _depth(table) > DEEPEST:
        raise ValueError(f"tables or arrays nest deeper than {DEEPEST}")
    return table


def _depth(value: object) -> int:
    """How deep containers nest, up to one more than `DEEPEST`; by levels, since a stack is finite."""
    level, depth = [value], 0
    while level and depth <= DEEPEST:
        inside = (one for one in level if isinstance(one, dict | list))
        level = [part for one in inside for part in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth
