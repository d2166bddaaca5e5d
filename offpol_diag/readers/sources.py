"""The files that sources stand for: paths, directories, globs and URLs → files, each once."""

from __future__ import annotations

import platform
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import fs

from offpol_diag.errors import DumpError, did_you_mean
from offpol_diag.readers.stores import explaining, locate
from offpol_diag.readers.urls import clean, is_url, split

FILE_URL = "file://"
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
WILDCARDS = frozenset("*?[")
NO_GLOB = "** stands alone between slashes: dir/**/*.parquet"
NODE = platform.node()


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class Location:
    """A file or directory on this disk, or in a store; `shown` is its name in reports, without secrets.

    `store` is a filesystem of Arrow, or None on this disk. `origin` returns where a row was before the file
    was converted, of its path, row group and row.
    """

    store: Any = field(repr=False)
    path: str = field(repr=False)
    shown: str
    origin: Callable[[str, int, int], str] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def local(cls, path: Path | str, shown: str = "") -> Location:
        """Return a local location, shown as its path by default."""
        return cls(None, str(path), shown or str(path))

    def __str__(self) -> str:
        return self.shown

    def place(self, row_group: int, row: int) -> str:
        """Return where a row lies, for messages."""
        if self.origin:
            return self.origin(self.path, row_group, row)
        return f"{self}, row group {row_group}, row {row}"

    @property
    def parts(self) -> tuple[str, ...]:
        """Path components as shown, by which files are sorted."""
        return (PurePosixPath if self.store else Path)(self.shown).parts

    @property
    def partitions(self) -> dict[str, str | None]:
        """The hive partition values of its directories (`step=3/`); None is null.

        A converted file has none: they are columns of it.
        """
        pairs = (part.split("=", 1) for part in self.parts[:-1] if "=" in part and not self.origin)
        return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, value in pairs if key}

    def open(self) -> pa.NativeFile | BinaryIO:
        """Open it for reading bytes."""
        return self.store.open_input_file(self.path) if self.store else Path(self.path).open("rb")

    def state(self) -> tuple[Any, ...]:
        """Return what changes when the file is replaced or rewritten; its size in bytes comes first.

        Inodes and times are compared on one machine only: nodes of a cluster may hold copies of a file.
        """
        if isinstance(self.store, fs.PyFileSystem):
            return tuple(self.store.handler.state(self.path))
        if self.store:
            info = self.store.get_file_info(self.path)
            return int(info.size), info.mtime_ns
        found = Path(self.path).stat()
        return found.st_size, found.st_mtime_ns, found.st_ino, NODE


@dataclass(frozen=True)
class Part:
    """A file of a dump, or some of its rows: what is known without reading them.

    Attributes:
        state: the file's `Location.state` when it was opened; its size comes first.
        schema: its columns, hive partitions included.
        partitions: hive partition column → value.
        group_rows, group_bytes: rows of each row group, and its bytes before compression.
        provenance: how the numbers were made, from the file's metadata.
        span: the row groups that are read, as (begin, end); None for all.
    """

    path: Location
    state: tuple[Any, ...]
    schema: pa.Schema
    partitions: dict[str, pa.Scalar]
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]
    provenance: dict[str, object]
    span: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return int(self.state[0])

    @property
    def groups(self) -> range:
        """The row groups that are read."""
        return range(*(self.span or (0, len(self.group_rows))))

    @property
    def rows(self) -> int:
        """Number of rows that are read."""
        return sum(self.group_rows[group] for group in self.groups)


def find(sources: Sequence[str | Location]) -> list[Location]:
    """List the files that `sources` stand for, in order, each file once, however it is spelled.

    They are files, directories (read recursively) or globs, on this disk or as URLs. Files that were
    found before stay as they are.
    """
    if found := [source for source in sources if isinstance(source, Location)]:
        return found
    if not sources:
        raise DumpError("no dump was named", "name a Parquet file, a directory or a glob")
    named = [str(source) for source in ([sources] if isinstance(sources, str) else sources)]
    paths: dict[object, Location] = {}
    for source in named:
        for path in sorted(_expand(source), key=lambda path: path.parts):
            paths.setdefault((id(path.store), path.path) if path.store else identity(Path(path.path)), path)
    return [*paths.values()]


def _expand(source: str) -> list[Location]:
    if not source:
        raise DumpError("a dump is named by an empty text", "name a Parquet file, a directory or a glob")
    if source.startswith(FILE_URL):
        return _expand(unquote(source.removeprefix(FILE_URL)))
    found = list(_in_store(source) if is_url(source) else _on_disk(source))
    if not found:
        hint = "a directory is searched for files named *.parquet"
        raise DumpError(f"{clean(source)}: no Parquet file is there", hint)
    return found


def hidden(names: Iterable[str]) -> bool:
    """Return whether any name marks a hidden file or directory, by a leading `.` or `_`."""
    return any(name[:1] in ("_", ".") for name in names)


# ---------------------------------------------------------------- this disk


def identity(path: Path) -> object:
    """Return what all names of a local file have in common: its inode, or the path where it has none."""
    with suppress(OSError):
        if (found := path.stat()).st_ino:
            return found.st_dev, found.st_ino
    return path


def kind(path: str | Path) -> str:
    """Return `file`, `directory`, `device` (whose opening could wait forever), or nothing for no path."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # a name that no file can have
        return ""
    return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "device"


def is_file(path: str | Path) -> bool:
    """Return whether a regular file is there."""
    return kind(path) == "file"


def is_dir(path: str | Path) -> bool:
    """Return whether a directory is there."""
    return kind(path) == "directory"


def _on_disk(source: str) -> Iterator[Location]:
    found = kind(source)
    if found:
        yield from _of_path(Path(source))
    elif WILDCARDS.isdisjoint(source):
        path = Path(source)
        names = sorted(p.name for p in path.parent.iterdir()) if is_dir(path.parent) else []
        near = did_you_mean(path.name, names, key=stem)
        hint = near or f"check the path; relative ones start at {Path.cwd()}"
        raise DumpError(f"{source}: no such file or directory", hint)
    else:
        yield from _in_glob(Path(source))


def stem(name: str) -> str:
    """Return the name of a file without its ending, which files that are unlike share, in lower case."""
    return (name.rpartition(".")[0] or name).lower()


def _of_path(path: Path) -> Iterator[Location]:
    """Yield a file, or every *.parquet file below a directory, except hidden ones."""
    found = kind(path)
    if found == "device":
        hint = "Parquet is read from its end: name a file"
        raise DumpError(f"{path}: a device or a pipe, no file", hint)
    if found == "file":
        yield Location.local(path)
    for one in path.rglob("*.parquet") if found == "directory" else ():
        if one.is_file() and not hidden(one.relative_to(path).parts):
            yield Location.local(one)


def _in_glob(pattern: Path) -> Iterator[Location]:
    try:
        matches = list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    except (OSError, ValueError) as error:  # OSError: a name that is too long
        raise DumpError(f"{pattern}: not a glob ({getattr(error, 'strerror', error)})", NO_GLOB) from error
    for match in matches:
        if pattern.name == "**" and not match.is_dir():
            continue  # Python 3.13 and later also list files
        if not hidden(part for part in match.parts if part not in pattern.parts):
            yield from _of_path(match)


# ---------------------------------------------------------------- stores


def _in_store(source: str) -> list[Location]:
    """List the Parquet files at a URL: a file, a directory or a glob."""
    with explaining(clean(source), split(source).scheme):
        place = Location(*locate(source))
        store, path = place.store, place.path
        info = store.get_file_info(path)
        if info.is_file:
            return [place]
        if info.type == fs.FileType.NotFound and WILDCARDS.isdisjoint(path):
            raise _missing(place)
        names = path.split("/")
        if any("**" in name and name != "**" for name in names):
            raise DumpError(f"{place}: not a glob", NO_GLOB)
        wild = (i for i, name in enumerate(names) if not WILDCARDS.isdisjoint(name))
        first = len(names) if info.type == fs.FileType.Directory else next(wild)
        base = "/".join(names[:first]) or "/" * path.startswith("/")
        shown = place.shown[: len(place.shown) - len(path) + len(base)]
        shown += "" if shown.endswith("/") else "/"
        found = []
        for one in store.get_file_info(fs.FileSelector(base, recursive=True)):
            below = one.path[len(base) :].lstrip("/").split("/")
            strange = hidden(name for name in below if name not in names[first:])
            if one.is_file and not strange and _fits(below, names[first:]):
                found.append(Location(store, one.path, shown + "/".join(below)))
        return found


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the names of a path match a glob, or those of a *.parquet file below what matches."""
    if not pattern:
        return not names or names[-1].endswith(".parquet")
    if pattern[0] == "**":
        return any(_fits(names[i:], pattern[1:]) for i in range(len(names)))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def _missing(place: Location) -> DumpError:
    """Explain a missing path: its bucket does not exist, or a similar name does."""
    (bucket, *_), (above, _, name) = place.path.split("/"), place.path.rpartition("/")
    ours = not isinstance(place.store, fs.PyFileSystem)  # paths of fsspec may begin with anything
    if ours and bucket and place.store.get_file_info(bucket).type == fs.FileType.NotFound:
        hint = "check its name; a store of your own is named by AWS_ENDPOINT_URL"
        return DumpError(f"{place}: there is no bucket {bucket!r}", hint)
    hint = "check the path; keys are taken as written, %20 is no blank"
    with suppress(Exception):  # failing to find a hint must not hide the error
        names = sorted(info.base_name for info in place.store.get_file_info(fs.FileSelector(above)))
        hint = did_you_mean(name, names, key=stem) or hint
    return DumpError(f"{place}: no such file or directory", hint)
