"""Expand sources (files, directories, globs, URLs, standard input) into the files to read.

To support a new kind of source, add a row to `KINDS`. This module imports neither torch nor Arrow.
"""

from __future__ import annotations

import atexit
import os
import platform
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import parse_qsl, unquote

from offpol_diag.errors import DumpError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import fs

    from offpol_diag.readers.remote import Store

# ---------------------------------------------------------------- URLs

SCHEME = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+(?:::[A-Za-z][\w+.-]+)*)://(?P<rest>.*)", re.DOTALL)
# A host's port is no password. A secret key may hold unescaped slashes.
CREDENTIALS = re.compile(r"(?P<user>[^/:@]*)(?::(?!\d+(?:/|$))(?P<secret>[^@]*))?@")
# A `?` not followed by a word and `=` is part of a glob, except in http(s) URLs.
OPTIONS = re.compile(r"\?(?=[\w.-]+=)(?P<options>.*)$", re.DOTALL)
WEB_QUERY = re.compile(r"\?(?P<options>.*)$", re.DOTALL)
WEB = frozenset({"http", "https"})
CONTAINERS = frozenset({"abfs", "abfss"})
"""Schemes in which the name before @ is a container, not a user."""
IN_TEXT = re.compile(r"[A-Za-z][\w+.-]+://[^\s'\"<>]*")


@dataclass(frozen=True)
class Url:
    """The parts of a URL: scheme in lower case, bucket or host and path, login, and options after `?`.

    `shown` is the URL without login and options.
    """

    scheme: str
    place: str = field(repr=False)
    shown: str
    user: str = field(default="", repr=False)
    secret: str = field(default="", repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)


def is_url(source: str) -> bool:
    """Return whether a source is a URL, such as `s3://…`."""
    return bool(SCHEME.match(source))


def split(source: str) -> Url:
    """Split a URL into its parts; object keys are never unescaped."""
    found = SCHEME.fullmatch(source)
    if found is None:
        raise ValueError(f"{source!r} is no URL")
    scheme, place = found["scheme"].lower(), found["rest"]
    query = (WEB_QUERY if scheme.rpartition("::")[2] in WEB else OPTIONS).search(place)
    place = place[: query.start()] if query else place
    shown, login = place, CREDENTIALS.match(place)
    user = secret = ""
    if login:
        place, user, secret = place[login.end() :], unquote(login["user"]), unquote(login["secret"] or "")
        if login["secret"] or scheme not in CONTAINERS:
            shown = place
    options = dict(parse_qsl(query["options"], keep_blank_values=True)) if query else {}
    return Url(scheme, place, f"{scheme}://{shown}", user, secret, options)


def clean(source: str) -> str:
    """Return a source for display: URLs without credentials and options, other sources unchanged."""
    return split(source).shown if is_url(source) else source


def cleaned(text: str) -> str:
    """Remove credentials and options from every URL in a message."""
    return IN_TEXT.sub(lambda found: clean(found[0]), text)


# ---------------------------------------------------------------- files

NODE = platform.node()


@dataclass(frozen=True)
class Location:
    """A file or a directory in a store, or on local disk; `shown` is its name in reports, without secrets.

    `origin` returns where a row was before the file was converted, of its path, row group and row.
    """

    store: Store | None
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
    def filesystem(self) -> fs.FileSystem:
        """The filesystem of its store."""
        assert self.store is not None
        return self.store.filesystem

    def open(self) -> pa.NativeFile | BinaryIO:
        """Open it for reading bytes."""
        return self.filesystem.open_input_file(self.path) if self.store else Path(self.path).open("rb")

    def state(self) -> tuple[Any, ...]:
        """Return what changes when the file is replaced or rewritten; its size in bytes comes first.

        Inodes and times are compared on one machine only: nodes of a cluster may hold copies of a file.
        """
        if self.store and (handler := getattr(self.filesystem, "handler", None)):
            return tuple(handler.state(self.path))
        if self.store:
            info = self.filesystem.get_file_info(self.path)
            return int(info.size), info.mtime_ns
        found = Path(self.path).stat()
        return found.st_size, found.st_mtime_ns, found.st_ino, NODE

    def at(self, path: str) -> Location:
        """Return another location in the same store, by its path."""
        base = self.path.rstrip("/")
        if base and path.startswith(base):
            return Location(self.store, path, self.shown.rstrip("/") + path[len(base) :])
        return Location(self.store, path, f"{self.store.scheme if self.store else ''}://{path.lstrip('/')}")


@dataclass(frozen=True)
class File:
    """A file of the dump, with the hive partition values of its directories (`step=3/`); None is null."""

    path: Location
    partitions: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Footer:
    """The contents of a file, known without reading its rows.

    Attributes:
        group_bytes: bytes of each row group before compression; 0 where unknown.
        provenance: how the numbers were made, from its metadata.
        small: flat columns of few bytes a row, which may describe where a row comes from.
        binary: columns, flat or of lists, that may hold nothing but 0 and 1, by the first row group.
    """

    schema: pa.Schema
    group_rows: tuple[int, ...]
    group_bytes: tuple[int, ...]
    provenance: dict[str, object] = field(default_factory=dict)
    small: frozenset[str] = frozenset()
    binary: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Part(Footer):
    """A file of a dump, or some of its rows.

    Attributes:
        partitions: hive partition column → value; `schema` and `small` include them.
        state: the file's `Location.state` when it was opened; its size comes first.
        span: the row groups that are read, as (begin, end); None for all.
        between: the rows that are read, as (begin, end) within the single row group of `span`; None for all.
    """

    path: Location
    partitions: dict[str, pa.Scalar]
    state: tuple[Any, ...]
    span: tuple[int, int] | None = None
    between: tuple[int, int] | None = None

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
        if self.between:
            return self.between[1] - self.between[0]
        return sum(self.group_rows[group] for group in self.groups)


STDIN, STDIN_SHOWN = "-", "standard input"
CHUNK = 1 << 20
"""Bytes per read when standard input is copied."""
FILE_URL = "file://"
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
WILDCARDS = frozenset("*?[")
NO_GLOB = "** stands alone between slashes: dir/**/*.parquet"


def find(sources: Sequence[str | File]) -> list[File]:
    """List the files that `sources` stand for, in order, each file once, however it is spelled.

    They are files, directories (read recursively) or globs, on this disk or as URLs; `-` is stdin. Files that
    were found before stay as they are.
    """
    if found := [source for source in sources if isinstance(source, File)]:
        return found
    if not sources:
        raise DumpError("no dump was named", "name a Parquet file, a directory or a glob")
    named = [str(source) for source in ([sources] if isinstance(sources, str) else sources)]
    if named.count(STDIN) > 1:
        hint = "it holds one Parquet file and is read once"
        raise DumpError(f"{STDIN}: standard input is named twice", hint)
    paths: dict[object, Location] = {}
    for source in named:
        for path in _expand(source):
            paths.setdefault(path if path.store else identity(Path(path.path)), path)
    return [File(path, _partitions(path)) for path in paths.values()]


def identity(path: Path) -> object:
    """Return what all names of a local file have in common: its inode, or the path where it has none."""
    with suppress(OSError):
        if (found := path.stat()).st_ino:
            return found.st_dev, found.st_ino
    return path


def is_file(path: str | Path) -> bool:
    """Return whether a regular file is there; a name that no file can have is none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # a name that is too long
        return False


def is_dir(path: str | Path) -> bool:
    """Return whether a directory is there; a name that none can have is none."""
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):
        return False


def _expand(source: str) -> list[Location]:
    if not source:
        raise DumpError("a dump is named by an empty text", "name a Parquet file, a directory or a glob")
    files = next((files for applies, files in KINDS if applies(source)), None)
    if files is None:
        path = Path(source)
        names = sorted(p.name for p in path.parent.iterdir()) if is_dir(path.parent) else []
        hint = did_you_mean(path.name, names) or f"check the path; relative ones start at {Path.cwd()}"
        raise DumpError(f"{source}: no such file or directory", hint)
    paths = sorted(files(source), key=lambda path: path.parts)
    if not paths:
        hint = "a directory is searched for files named *.parquet"
        raise DumpError(f"{clean(source)}: no Parquet file is there", hint)
    return paths


def _partitions(path: Location) -> dict[str, str | None]:
    pairs = (part.split("=", 1) for part in path.parts[:-1] if "=" in part)
    return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, value in pairs if key}


def hidden(names: Iterable[str]) -> bool:
    """Return whether any name marks a hidden file or directory, by a leading `.` or `_`."""
    return any(name[:1] in ("_", ".") for name in names)


def _in_directory(source: str | Path) -> Iterator[Location]:
    """Yield every *.parquet file below a directory, except hidden ones."""
    for path in Path(source).rglob("*.parquet"):
        if path.is_file() and not hidden(path.relative_to(source).parts):
            yield Location.local(path)


def _in_glob(source: str) -> Iterator[Location]:
    pattern = Path(source)
    try:
        matches = list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    except OSError as error:  # a name that is too long
        raise DumpError(f"{pattern}: not a glob ({error.strerror})", NO_GLOB) from error
    except ValueError as error:
        raise DumpError(f"{pattern}: not a glob ({error})", NO_GLOB) from error
    for match in matches:
        if pattern.name == "**" and not match.is_dir():
            continue  # Python 3.13 and later also list files
        if not hidden(part for part in match.parts if part not in pattern.parts):
            if _is_device(match):
                _refuse_device(str(match))
            yield from _in_directory(match) if match.is_dir() else [Location.local(match)]


def _is_device(path: str | Path) -> bool:
    """Return whether a path is a pipe, a socket or a device, whose opening could wait forever."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _refuse_device(source: str) -> list[Location]:
    hint = "Parquet is read from its end: name a file, or pipe one into standard input and name it -"
    raise DumpError(f"{source}: a device or a pipe, no file", hint)


@lru_cache(maxsize=1)
def stdin_copy() -> Path:
    """Copy standard input to a temporary file that is removed when the process ends; it is read once.

    Parquet is read from the end of the file, which a pipe cannot seek to.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        hint = "pipe one Parquet file in: cat step_100.parquet | offpol-diag analyze -"
        raise DumpError(f"{STDIN}: nothing is piped into standard input", hint)
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


def _in_store(source: str) -> Iterable[Location]:
    from offpol_diag.readers import remote

    return remote.files(source)


KINDS: tuple[tuple[Callable[[str], bool], Callable[[str], Iterable[Location]]], ...] = (
    (lambda source: source == STDIN, lambda _: [Location.local(stdin_copy(), STDIN_SHOWN)]),
    (lambda source: source.startswith(FILE_URL), lambda url: _expand(unquote(url.removeprefix(FILE_URL)))),
    (is_url, _in_store),
    (is_file, lambda source: [Location.local(Path(source))]),
    (is_dir, _in_directory),
    (_is_device, _refuse_device),
    (lambda source: not WILDCARDS.isdisjoint(source), _in_glob),
)
"""Kinds of source: a test of the source, and a function that lists its files; the first match is used."""
