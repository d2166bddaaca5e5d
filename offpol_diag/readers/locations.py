"""Where a file of a dump is: on this disk, in a bucket, on a hub."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa
from pyarrow import fs


@dataclass(frozen=True)
class Store:
    """A filesystem, by what opens it: it travels to other processes, and equal ones are opened once.

    Attributes:
        scheme: the word before `://`; empty for this disk.
        opens: makes the filesystem.
        options: of what; may hold secrets.
    """

    scheme: str
    opens: Callable[[Any], fs.FileSystem]
    options: Hashable = field(repr=False)

    @property
    def filesystem(self) -> fs.FileSystem:
        """The filesystem, opened."""
        return _opened(self)


@lru_cache(maxsize=256)
def _opened(store: Store) -> fs.FileSystem:
    return store.opens(store.options)


def _disk(_: object) -> fs.FileSystem:
    return fs.LocalFileSystem()


DISK = Store("", _disk, ())


@dataclass(frozen=True)
class Location:
    """A file or a directory.

    Attributes:
        store: where it is.
        path: in its filesystem.
        shown: as messages and reports say it, without secrets.
    """

    store: Store
    path: str = field(repr=False)
    shown: str

    @classmethod
    def local(cls, path: Path | str, shown: str = "") -> Location:
        """A place on this disk, shown as its path unless told otherwise."""
        return cls(DISK, str(path), shown or str(path))

    def __str__(self) -> str:
        return self.shown

    @property
    def far(self) -> bool:
        """Whether reading it goes through a network, or through a library that may."""
        return self.store != DISK

    @property
    def parts(self) -> tuple[str, ...]:
        """Directories and name, as shown; files are sorted by them."""
        return PurePosixPath(self.shown).parts if self.far else Path(self.shown).parts

    def open(self) -> pa.NativeFile | BinaryIO:
        """Its bytes, for reading."""
        return self.store.filesystem.open_input_file(self.path) if self.far else Path(self.path).open("rb")

    def size(self) -> int:
        """Bytes of the file."""
        if not self.far:
            return Path(self.path).stat().st_size
        return int(self.store.filesystem.get_file_info(self.path).size)

    def at(self, path: str) -> Location:
        """Another place in the same store, by its path there."""
        base = self.path.rstrip("/")
        if base and path.startswith(base):
            return Location(self.store, path, self.shown.rstrip("/") + path[len(base) :])
        return Location(self.store, path, f"{self.store.scheme}://{path.lstrip('/')}")
