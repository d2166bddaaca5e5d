"""What the user named → files to read.

A new kind of source is a row in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from offpol_diag.errors import DumpError, did_you_mean
from offpol_diag.readers import listing, spool, stores
from offpol_diag.readers.listing import MAGIC, NO_GLOB
from offpol_diag.readers.locations import Location, Store
from offpol_diag.readers.outages import told
from offpol_diag.readers.urls import clean, is_url, split

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class File:
    """A file of the dump.

    Attributes:
        path: Where it is.
        partitions: Hive partition values from its directories (`step=3/`), None for a null partition.
    """

    path: Location
    partitions: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of source: which names are of it, and the files they stand for."""

    takes: Callable[[str], bool]
    files: Callable[[str], Iterable[Location]]


def find(sources: Sequence[str]) -> list[File]:
    """The files that `sources` stand for, in order, each file once.

    Args:
        sources: Files, directories (read recursively) or globs, on this disk or as URLs; `-` is stdin.

    Raises:
        DumpError: A source that is not there or holds no Parquet file, that cannot be reached, or no source
            at all.
    """
    if not sources:
        raise DumpError("no dump was named", "name a Parquet file, a directory or a glob")
    named = [str(source) for source in ([sources] if isinstance(sources, str) else sources)]
    if named.count(spool.STDIN) > 1:
        raise DumpError(
            f"{spool.STDIN}: standard input is named twice", "it holds one Parquet file and is read once"
        )
    paths = dict.fromkeys(path for source in named for path in _expand(source))
    return [File(path, _partitions(path)) for path in paths]


def _expand(source: str) -> list[Location]:
    kind = next((kind for kind in KINDS if kind.takes(source)), None)
    if kind is None:
        raise DumpError(f"{source}: no such file or directory", _nearby(Path(source)))
    paths = sorted(kind.files(source), key=lambda path: path.parts)
    if not paths:
        raise DumpError(
            f"{clean(source)}: no Parquet file is there", "a directory is searched for files named *.parquet"
        )
    return paths


def _nearby(path: Path) -> str:
    """A hint at siblings of a missing path with a similar name."""
    folder = path.parent
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return did_you_mean(path.name, names) or f"check the path; relative ones start at {Path.cwd()}"


def _in_directory(source: str) -> Iterator[Location]:
    """Every *.parquet below, except what writers hide."""
    root = Path(source)
    for path in root.rglob("*.parquet"):
        if path.is_file() and not any(map(listing.hides, path.relative_to(root).parts)):
            yield Location.local(path)


def _in_glob(source: str) -> Iterator[Location]:
    pattern = Path(source)
    for match in _matches(pattern):
        if any(listing.hides(part) for part in match.parts if part not in pattern.parts):
            continue
        if match.is_dir():
            yield from _in_directory(str(match))
        else:
            yield Location.local(match)


def _matches(pattern: Path) -> list[Path]:
    try:
        return list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    except ValueError as error:
        raise DumpError(f"{pattern}: not a glob ({error})", NO_GLOB) from error


def _in_store(source: str) -> list[Location]:
    """What a URL stands for; whatever its store raises is told as an error of ours."""
    unopened = Location(Store(split(source).scheme, stores.locate, ""), "", clean(source))
    with told(unopened):
        return listing.files(stores.locate(source))


def _on_disk(url: str) -> list[Location]:
    return _expand(unquote(url.removeprefix(FILE_URL)))


def _stdin(_: str) -> list[Location]:
    return [Location.local(spool.spooled(), spool.SHOWN)]


FILE_URL = "file://"
KINDS = (
    Kind(lambda source: source == spool.STDIN, _stdin),
    Kind(lambda source: source.startswith(FILE_URL), _on_disk),
    Kind(is_url, _in_store),
    Kind(lambda source: Path(source).is_file(), lambda source: [Location.local(Path(source))]),
    Kind(lambda source: Path(source).is_dir(), _in_directory),
    Kind(lambda source: not MAGIC.isdisjoint(source), _in_glob),
)


def _partitions(path: Location) -> dict[str, str | None]:
    pairs = (part.split("=", 1) for part in path.parts[:-1] if "=" in part)
    return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, value in pairs if key}
