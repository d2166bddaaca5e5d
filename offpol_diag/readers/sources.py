"""Expand sources (files, directories, globs, URLs, standard input) into the files to read.

To support a new kind of source, add a row to `KINDS`.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from pyarrow import fs

from offpol_diag.errors import DumpError, did_you_mean
from offpol_diag.readers.remote import Location, explaining, locate
from offpol_diag.readers.urls import clean, is_url, split

STDIN, STDIN_SHOWN = "-", "standard input"
CHUNK = 1 << 20
"""Bytes per read when standard input is copied."""
FILE_URL = "file://"
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
WILDCARDS = frozenset("*?[")
NO_GLOB = "** stands alone between slashes: dir/**/*.parquet"


@dataclass(frozen=True)
class File:
    """A file of the dump.

    Attributes:
        path: its location.
        partitions: hive partition values from its directories (`step=3/`), None for a null partition.
    """

    path: Location
    partitions: dict[str, str | None] = field(default_factory=dict)


def find(sources: Sequence[str]) -> list[File]:
    """List the files that `sources` stand for, in order, each file once.

    Args:
        sources: files, directories (read recursively) or globs, on this disk or as URLs; `-` is stdin.

    Raises:
        DumpError: no source, or a source that does not exist, holds no Parquet file or cannot be reached.
    """
    if not sources:
        raise DumpError("no dump was named", "name a Parquet file, a directory or a glob")
    named = [str(source) for source in ([sources] if isinstance(sources, str) else sources)]
    if named.count(STDIN) > 1:
        raise DumpError(
            f"{STDIN}: standard input is named twice", "it holds one Parquet file and is read once"
        )
    paths = dict.fromkeys(path for source in named for path in _expand(source))
    return [File(path, _partitions(path)) for path in paths]


def _expand(source: str) -> list[Location]:
    files = next((files for applies, files in KINDS if applies(source)), None)
    if files is None:
        path = Path(source)
        names = sorted(p.name for p in path.parent.iterdir()) if path.parent.is_dir() else []
        hint = did_you_mean(path.name, names) or f"check the path; relative ones start at {Path.cwd()}"
        raise DumpError(f"{source}: no such file or directory", hint)
    paths = sorted(files(source), key=lambda path: path.parts)
    if not paths:
        raise DumpError(
            f"{clean(source)}: no Parquet file is there", "a directory is searched for files named *.parquet"
        )
    return paths


def _partitions(path: Location) -> dict[str, str | None]:
    pairs = (part.split("=", 1) for part in path.parts[:-1] if "=" in part)
    return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, value in pairs if key}


def _hidden(names: Iterable[str]) -> bool:
    """Return whether any name marks a hidden file or directory, by a leading `.` or `_`."""
    return any(name[:1] in ("_", ".") for name in names)


# ---------------------------------------------------------------- this disk


def _in_directory(source: str | Path) -> Iterator[Location]:
    """Yield every *.parquet file below a directory, except hidden ones."""
    for path in Path(source).rglob("*.parquet"):
        if path.is_file() and not _hidden(path.relative_to(source).parts):
            yield Location.local(path)


def _in_glob(source: str) -> Iterator[Location]:
    pattern = Path(source)
    try:
        matches = list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    except ValueError as error:
        raise DumpError(f"{pattern}: not a glob ({error})", NO_GLOB) from error
    for match in matches:
        if not _hidden(part for part in match.parts if part not in pattern.parts):
            yield from _in_directory(match) if match.is_dir() else [Location.local(match)]


@lru_cache(maxsize=1)
def stdin_copy() -> Path:
    """Copy standard input to a temporary file that is removed when the process ends; it is read once.

    Parquet is read from the end of the file, which a pipe cannot seek to.

    Raises:
        DumpError: standard input is a terminal or is closed, or the disk has no room.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        raise DumpError(
            f"{STDIN}: nothing is piped into standard input",
            "pipe one Parquet file in: cat step_100.parquet | offpol-diag analyze -",
        )
    path, owner = Path(tempfile.gettempdir(), f"offpol-diag-{secrets.token_hex(8)}.parquet"), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not when a child process exits
            path.unlink(missing_ok=True)

    atexit.register(remove)  # registered before the file exists, since a signal may come at any time
    try:
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file, CHUNK)
    except OSError as error:
        raise DumpError(
            f"{STDIN}: standard input cannot be kept in {path.parent} ({error.strerror})",
            "Parquet is not read from a pipe as it comes: make room there, or set TMPDIR to another place",
        ) from error
    return path


# ---------------------------------------------------------------- stores


def _in_store(source: str) -> list[Location]:
    """Return the Parquet files at a URL: a file, a directory or a glob."""
    with explaining(clean(source), split(source).scheme):
        place = locate(source)
        kind = _kind(place, place.path)
        if kind == fs.FileType.File:
            return [place]
        if kind == fs.FileType.Directory:
            return list(_in_store_directory(place))
        if not WILDCARDS.isdisjoint(place.path):
            return list(_in_store_glob(place))
        raise _missing(place)


def _kind(place: Location, path: str) -> fs.FileType:
    return place.filesystem.get_file_info(path).type


def _entries(place: Location, recursive: bool = False) -> list[fs.FileInfo]:
    found: list[fs.FileInfo] = place.filesystem.get_file_info(
        fs.FileSelector(place.path, recursive=recursive)
    )
    return found


def _names_below(root: Location, path: str) -> list[str]:
    return path[len(root.path.rstrip("/")) :].strip("/").split("/")


def _in_store_directory(root: Location) -> Iterator[Location]:
    for info in _entries(root, recursive=True):
        names = _names_below(root, info.path)
        if info.type == fs.FileType.File and names[-1].endswith(".parquet") and not _hidden(names):
            yield root.at(info.path)


def _in_store_glob(pattern: Location) -> Iterator[Location]:
    root, segments = _split_glob(pattern)
    if any("**" in segment and segment != "**" for segment in segments):
        raise DumpError(f"{pattern}: not a glob", NO_GLOB)
    for path, kind in _matches(root, segments):
        found = root.at(path)
        if not _hidden(name for name in _names_below(root, path) if name not in segments):
            yield from _in_store_directory(found) if kind == fs.FileType.Directory else [found]


def _split_glob(pattern: Location) -> tuple[Location, list[str]]:
    """Split a pattern into the deepest directory without wildcards and the remaining path segments."""
    names = pattern.path.split("/")
    first = next(i for i, name in enumerate(names) if not WILDCARDS.isdisjoint(name))
    base = "/".join(names[:first]) or "/" * pattern.path.startswith("/")
    shown = pattern.shown.removesuffix(pattern.path[len(base) :])
    if shown == pattern.shown and pattern.store:
        shown = f"{pattern.store.scheme}://{base.lstrip('/')}"
    return Location(pattern.store, base, shown), [name for name in names[first:] if name]


def _matches(root: Location, segments: list[str]) -> Iterator[tuple[str, fs.FileType]]:
    """Yield the paths below a directory that match the segments of a pattern."""
    head, *rest = segments
    if head == "**":
        below = [info for info in _entries(root, recursive=True) if info.type == fs.FileType.Directory]
        found = [(root.path, fs.FileType.Directory), *((info.path, info.type) for info in below)]
    elif WILDCARDS.isdisjoint(head):
        path = f"{root.path.rstrip('/')}/{head}"
        kind = _kind(root, path)
        found = [] if kind == fs.FileType.NotFound else [(path, kind)]
    else:
        found = [(info.path, info.type) for info in _entries(root) if fnmatchcase(info.base_name, head)]
    for path, kind in found:
        if not rest:
            yield path, kind
        elif kind == fs.FileType.Directory:
            yield from _matches(root.at(path), rest)


def _missing(place: Location) -> DumpError:
    """Explain a missing path: its bucket does not exist, or a similar name does."""
    bucket = place.path.partition("/")[0]
    through_fsspec = isinstance(place.filesystem, fs.PyFileSystem)  # whose paths may begin with anything
    if not through_fsspec and bucket and _kind(place, bucket) == fs.FileType.NotFound:
        return DumpError(
            f"{place}: there is no bucket {bucket!r}",
            "check its name; a store of your own is named by AWS_ENDPOINT_URL",
        )
    hint = "check the path; keys are taken as written, %20 is no blank"
    with suppress(Exception):  # failing to find a hint must not hide the error
        above, _, name = place.path.rpartition("/")
        folder = Location(place.store, above, place.shown.removesuffix(name))
        if above and _kind(folder, above) == fs.FileType.Directory:
            hint = did_you_mean(name, sorted(info.base_name for info in _entries(folder))) or hint
    return DumpError(f"{place}: no such file or directory", hint)


# ---------------------------------------------------------------- kinds of source

KINDS: tuple[tuple[Callable[[str], bool], Callable[[str], Iterable[Location]]], ...] = (
    (lambda source: source == STDIN, lambda _: [Location.local(stdin_copy(), STDIN_SHOWN)]),
    (lambda source: source.startswith(FILE_URL), lambda url: _expand(unquote(url.removeprefix(FILE_URL)))),
    (is_url, _in_store),
    (lambda source: Path(source).is_file(), lambda source: [Location.local(Path(source))]),
    (lambda source: Path(source).is_dir(), _in_directory),
    (lambda source: not WILDCARDS.isdisjoint(source), _in_glob),
)
"""Kinds of source: a test of the source, and a function that lists its files; the first match is used."""
