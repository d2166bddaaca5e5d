"""The files that sources stand for: paths, directories, globs and URLs → files, each once."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote

import pyarrow as pa
from pyarrow import fs

from offpol_diag.errors import DumpError, OffpolError, did_you_mean, install
from offpol_diag.printable import LOGIN, QUERY, URL, clean, cleaned, is_url

PARQUET = ".parquet"
WILDCARDS = frozenset("*?[")
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
S3, GCS, NATIVE = ("s3", "s3a"), ("gs", "gcs"), ("abfs", "abfss", "hdfs", "viewfs")
OPTIONS = {
    **dict.fromkeys(S3, ("region", "endpoint_override", "scheme", "anonymous", "role_arn")),
    **dict.fromkeys(GCS, ("anonymous", "endpoint_override", "scheme", "project_id")),
}
"""Scheme → the options that its URLs may have after a `?`."""
SECONDS = 15.0
"""Time that a store may be silent."""
LOGINS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
    "?anonymous=true reads a public bucket",
    "gs": "run `gcloud auth application-default login`; ?anonymous=true reads a public bucket",
    "hf": "set HF_TOKEN, or run `hf auth login`",
}


# ---------------------------------------------------------------- files


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
    if not sources:
        raise DumpError("no dump was named", "name a Parquet file, a directory or a glob")
    found: dict[object, Location] = {}
    for source in [sources] if isinstance(sources, str) else map(str, sources):
        here = list(
            _in_store(source)
            if is_url(source) and not source.startswith("file://")
            else _on_disk(source, endings)
        )
        if not here:
            hint = f"a directory is searched for files named *{PARQUET}"
            raise DumpError(f"{clean(source)}: no file is there that can be read", hint)
        for one in sorted(here, key=lambda one: by_number(one.shown)):
            found.setdefault((id(one.store), one.path) if one.store else _identity(one.path), one)
    return [*found.values()]


def by_number(name: str) -> list[tuple[bool, int, str]]:
    """Order names with their numbers by value, so that step_2 comes before step_10."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def hidden(names: Iterable[str]) -> bool:
    """Return whether any name marks a hidden file or directory, by a leading `.` or `_`."""
    return any(name[:1] in ("_", ".") for name in names)


def kind(path: str | Path) -> str:
    """Return `file`, `directory`, `device` (whose opening could wait forever), or nothing for no path."""
    try:
        mode = Path(path).stat().st_mode
    except (OSError, ValueError):  # a name that no file can have
        return ""
    return "file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "device"


def _identity(path: str) -> object:
    """Return what all names of a local file have in common: its inode."""
    with suppress(OSError):
        found = Path(path).stat()
        return (found.st_dev, found.st_ino) if found.st_ino else path
    return path


def _on_disk(source: str, endings: Sequence[str]) -> Iterator[Location]:
    path = Path(unquote(source.removeprefix("file://")) if source.startswith("file://") else source)
    if (not kind(path) and WILDCARDS.isdisjoint(str(path))) or not source:
        names = (
            sorted(p.name for p in path.parent.iterdir())
            if source and kind(path.parent) == "directory"
            else []
        )
        near = did_you_mean(path.name, names, key=lambda name: (name.rpartition(".")[0] or name).lower())
        hint = near or f"check the path; relative ones start at {Path.cwd()}"
        raise DumpError(f"{source or 'an empty name'}: no such file or directory", hint)
    try:
        matches = [path] if kind(path) else list(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
    except (OSError, ValueError) as error:  # OSError: a name that is too long
        hint = "** stands alone between slashes: dir/**/*.parquet"
        raise DumpError(f"{source}: not a glob ({getattr(error, 'strerror', error)})", hint) from error
    for match in matches:
        found = kind(match)
        if found == "device":
            raise DumpError(
                f"{match}: a device or a pipe, no file", "Parquet is read from its end: name a file"
            )
        if match != path and hidden(part for part in match.parts if part not in path.parts):
            continue
        if found == "file" and not (path.name == "**" and match != path):
            yield Location(None, str(match), str(match))
        for one in match.rglob("*") if found == "directory" else ():
            if (
                one.name.endswith(tuple(endings))
                and one.is_file()
                and not hidden(one.relative_to(match).parts)
            ):
                yield Location(None, str(one), str(one))


# ---------------------------------------------------------------- stores


def _in_store(source: str) -> Iterator[Location]:
    """List the Parquet files at a URL: a file, a directory or a glob."""
    with explaining(source):
        store, path = located(source)
        path = path.rstrip("/") or "/"
        shown = clean(source).rstrip("/")
        if store.get_file_info(path).is_file:
            yield Location(store, path, shown)
            return
        names = path.split("/")
        first = next((i for i, name in enumerate(names) if not WILDCARDS.isdisjoint(name)), len(names))
        base, pattern = "/".join(names[:first]) or "/" * path.startswith("/"), names[first:]
        shown = shown[: len(shown) - len(path) + len(base)].rstrip("/")
        for one in store.get_file_info(fs.FileSelector(base, recursive=True)):
            below = one.path[len(base) :].lstrip("/").split("/")
            if (
                one.is_file
                and not hidden(name for name in below if name not in pattern)
                and _fits(below, pattern)
            ):
                yield Location(store, one.path, f"{shown}/{'/'.join(below)}")


def located(source: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a URL, and the path in it."""
    match = URL.fullmatch(source)
    assert match is not None
    scheme, rest = match["scheme"].lower(), match["rest"]
    if (login := LOGIN.match(rest)) and login["secret"] and scheme not in ("http", "https"):
        what = f"{clean(source)}: there are credentials in the URL, where everyone on the machine sees them"
        raise DumpError(what, LOGINS.get(scheme[:2], "set them in the environment"))
    if scheme in NATIVE:
        store, path = fs.FileSystem.from_uri(source)
        return store, path
    if scheme not in OPTIONS:
        from fsspec.core import url_to_fs

        found, path = url_to_fs(source)
        return _of_fsspec(found), path
    found = QUERY.search(rest)
    given = dict(parse_qsl(found[0][1:], True)) if found else {}
    if odd := [word for word in given if word not in OPTIONS[scheme]]:
        hint = did_you_mean(odd[0], list(OPTIONS[scheme])) or f"there are {', '.join(OPTIONS[scheme])}"
        raise DumpError(f"{clean(source)}: {scheme}:// has no option {odd[0]!r}", hint)
    path = QUERY.sub("", rest)
    path = path[login.end() :] if login else path
    bucket = path.partition("/")[0]
    if not bucket:
        raise DumpError(f"{clean(source)}: names no bucket", f"write {scheme}://bucket/path")
    named = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    return _of_arrow(scheme, bucket, named, tuple(sorted(given.items()))), path


@lru_cache(maxsize=64)
def _of_arrow(scheme: str, bucket: str, named: str, options: tuple[tuple[str, str], ...]) -> fs.FileSystem:
    """Open a filesystem of Arrow; `named` is the S3 server that the environment names."""
    given: dict[str, Any] = {"endpoint_override": named if scheme in S3 else "", **dict(options)}
    given["anonymous"] = given.get("anonymous", "").lower() in ("true", "1", "yes")
    before, _, server = given["endpoint_override"].rstrip("/").rpartition("://")
    given |= {"endpoint_override": server, "scheme": given.get("scheme") or before}
    given = {word: value for word, value in given.items() if value}
    if scheme in GCS:
        return fs.GcsFileSystem(retry_time_limit=timedelta(seconds=SECONDS), **given)
    stated = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if "region" not in given:
        given["region"] = stated or ("us-east-1" if server else fs.resolve_s3_region(bucket))
    return fs.S3FileSystem(connect_timeout=SECONDS / 3, request_timeout=SECONDS, **given)


class Ranges(fs.FSSpecHandler):  # type: ignore[misc]  # Arrow has no types
    """Arrow's adapter of an fsspec filesystem, which fetches what is asked for and nothing beside it."""

    def open_input_file(self, path: str) -> pa.PythonFile:
        """Open a file for random access."""
        return pa.PythonFile(self.fs.open(path, mode="rb", cache_type="none"), mode="r")


@lru_cache(maxsize=64)
def _of_fsspec(found: Any) -> fs.FileSystem:
    return fs.PyFileSystem(Ranges(found))


def _fits(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the names of a path match a glob, or those of a *.parquet file below what matches."""
    if not pattern:
        return not names or names[-1].endswith(PARQUET)
    if pattern[0] == "**":
        return any(_fits(names[i:], pattern[1:]) for i in range(len(names)))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _fits(names[1:], pattern[1:])


@contextmanager
def explaining(source: str) -> Iterator[None]:
    """Turn what a store raises into one error: its own words, and what to look at."""
    try:
        yield
    except OffpolError:
        raise
    except Exception as error:  # each client library has errors of its own
        scheme = source.partition(":")[0].lower()
        said = (
            re.sub(r"^When .*?(?=AWS Error)", "", cleaned(" ".join(str(error).split())))
            or type(error).__name__
        )
        hint = LOGINS.get(scheme[:2], "check the address, the network and your login")
        if isinstance(error, ImportError | ValueError) and scheme not in OPTIONS:
            hint = install("remote") if scheme in ("hf", "http", "https") else hint
        elif isinstance(error, FileNotFoundError):
            hint = "check the name, the path and your login"
        raise DumpError(f"{clean(source)}: cannot be read ({said[:200]})", hint) from error
