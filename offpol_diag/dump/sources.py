"""The files that sources stand for: paths, directories, globs and URLs → files, each once."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote

import pyarrow as pa
from pyarrow import fs

from offpol_diag.errors import DumpError, OffpolError, did_you_mean, install
from offpol_diag.printable import LOGIN, QUERY, clean, cleaned, is_url

PARQUET = ".parquet"
WILDCARDS = frozenset("*?[")
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
SECONDS = 15.0
"""Time that an S3 server may be silent."""
LOGIN_HINT = "check the address and your login in the environment (docs/scale.md)"


@dataclass(frozen=True)
class Location:
    """A file on this disk (without a `store`) or in a filesystem of Arrow; `shown` is its name in reports."""

    store: Any = field(repr=False)
    path: str = field(repr=False)
    shown: str

    def __str__(self) -> str:
        return self.shown

    @property
    def partitions(self) -> dict[str, str | None]:
        """The hive partition values of its directories (`step=3/`); None is null."""
        parts = (PurePosixPath if self.store else Path)(self.shown).parts[:-1]
        pairs = (part.split("=", 1) for part in parts if "=" in part)
        return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, value in pairs if key}

    def open(self) -> pa.NativeFile | BinaryIO:
        """Open it for reading bytes."""
        return self.store.open_input_file(self.path) if self.store else pa.OSFile(os.fsencode(self.path))


def find(sources: Sequence[str], endings: Sequence[str] = (PARQUET,)) -> list[Location]:
    """List the files that sources stand for, in order, each once; in directories those with some endings.

    Raises:
        DumpError: nothing is there.
    """
    found: dict[str, Location] = {}
    for source in sources:
        here = _in_store(source) if is_url(source) else list(_on_disk(source, endings))
        if not here:
            hint = f"a directory is searched for files named *{PARQUET}"
            raise DumpError(f"{clean(source)}: no file is there that can be read", hint)
        for one in sorted(here, key=by_number):
            found.setdefault(one.shown if one.store else str(Path(one.path).resolve()), one)
    return [*found.values()]


def by_number(one: Location) -> list[str]:
    """Order names with their numbers by value, so that step_2 comes before step_10."""
    return [part.zfill(20) if part.isdecimal() else part for part in re.split(r"(\d+)", one.shown)]


def hidden(names: Iterable[str]) -> bool:
    """Return whether any name marks a hidden file or directory, by a leading `.` or `_`."""
    return any(name.startswith((".", "_")) for name in names)


def kind(path: str | Path) -> str:
    """Return `file`, `directory`, `device` (whose opening could wait forever), or nothing for no path."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # a name that no file can have
        return ""
    return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "device"


def _on_disk(source: str, endings: Sequence[str]) -> Iterator[Location]:
    """Find the files of a path or a glob; a directory is searched for some endings, past hidden names."""
    path = Path(source)
    if not source or not (kind(path) or WILDCARDS & {*source}):
        names = [one.name for one in path.parent.iterdir()] if kind(path.parent) == "directory" else []
        hint = did_you_mean(path.name, sorted(names))
        hint = hint or f"check the path; relative ones start at {Path.cwd()}"
        raise DumpError(f"{source or 'an empty name'}: no such file or directory", hint)
    for match in [path] if kind(path) else map(Path, glob(str(path), recursive=True)):  # noqa: PTH207
        if kind(match) == "device":
            raise DumpError(f"{match}: a device or a pipe, no file", "name a file: it is read from its end")
        found = match.rglob("*") if kind(match) == "directory" else [match] * (path.name != "**")
        for one in found:
            named = one == match or (one.name.endswith(tuple(endings)) and one.is_file())
            if named and not hidden(part for part in one.parts if part not in path.parts):
                yield Location(None, str(one.absolute()), str(one))


# ---------------------------------------------------------------- stores


def _in_store(source: str) -> list[Location]:
    """Find the Parquet files at a URL: a file, a directory or a glob; errors of a store become one."""
    try:
        store, path = located(source)
        path, shown = path.rstrip("/") or "/", clean(source).rstrip("/")
        if store.get_file_info(path).is_file:
            return [Location(store, path, shown)]
        names = path.split("/")
        first = next((i for i, name in enumerate(names) if WILDCARDS & {*name}), len(names))
        base, pattern = "/".join(names[:first]) or "/" * path.startswith("/"), names[first:]
        shown, found = shown[: len(shown) - len(path) + len(base)].rstrip("/"), []
        for one in store.get_file_info(fs.FileSelector(base, recursive=True)):
            below = one.path[len(base) :].lstrip("/").split("/")
            is_hidden = hidden(name for name in below if name not in pattern)
            if one.is_file and not is_hidden and _fits(below, pattern):
                found.append(Location(store, one.path, f"{shown}/{'/'.join(below)}"))
        return found
    except OffpolError:
        raise
    except Exception as error:  # each client library has errors of its own
        why = cleaned(" ".join(str(error).split()))[:300] or type(error).__name__
        hint = f"{LOGIN_HINT}; hf:// and https:// need an extra: {install('remote')}"
        raise DumpError(f"{clean(source)}: cannot be read ({why})", hint) from error


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the names of a path match a glob, or those of a *.parquet file below what matches."""
    if not pattern:
        return not names or names[-1].endswith(PARQUET)
    if pattern[0] == "**":
        return any(_fits(names[i:], pattern[1:]) for i in range(len(names)))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


def located(source: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a URL, and the path in it: by Arrow where it has one, else by fsspec."""
    scheme, _, rest = source.partition("://")
    scheme, login = scheme.lower(), LOGIN.match(rest)
    if login and login["secret"] and scheme not in ("http", "https"):
        what = f"{clean(source)}: there are credentials in the URL, where everyone on the machine sees them"
        raise DumpError(what, LOGIN_HINT)
    if scheme in ("gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "file"):  # Arrow has them, with its options
        store, path = fs.FileSystem.from_uri(source)
        return store, path
    if scheme not in ("s3", "s3a"):
        from fsspec.core import url_to_fs

        found, path = url_to_fs(source)
        return fs.PyFileSystem(fs.FSSpecHandler(found)), path
    path, query = QUERY.sub("", rest), QUERY.search(rest)
    given: dict[str, Any] = dict(parse_qsl(query[0][1:])) if query else {}
    given["anonymous"] = given.get("anonymous") == "true"
    server = given.setdefault("endpoint_override", os.environ.get("AWS_ENDPOINT_URL"))
    region = os.environ.get("AWS_REGION") or ("us-east-1" if server else None)
    given.setdefault("region", region or fs.resolve_s3_region(path.partition("/")[0]))
    return fs.S3FileSystem(**given, connect_timeout=SECONDS / 3, request_timeout=SECONDS), path
