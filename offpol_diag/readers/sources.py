"""What the user named → files to read.

A new kind of source is a row in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from offpol_diag.errors import DumpError, did_you_mean

HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
MAGIC = frozenset("*?[")


@dataclass(frozen=True)
class File:
    """A file of the dump.

    Attributes:
        path: Where it is, as the user would write it.
        partitions: Hive partition values from its directories (`step=3/`), None for a null partition.
    """

    path: Path
    partitions: dict[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A kind of source: which names are of it, and the files they stand for."""

    takes: Callable[[str], bool]
    files: Callable[[str], Iterable[Path]]


def find(sources: Sequence[str]) -> list[File]:
    """The files that `sources` stand for, in order, each file once.

    Args:
        sources: Files, directories (read recursively) or globs.

    Raises:
        DumpError: A source that is not there or holds no Parquet file, or no source at all.
    """
    if not sources:
        raise DumpError("no dump was named", "name a Parquet file, a directory or a glob")
    named = [sources] if isinstance(sources, str) else sources
    paths = dict.fromkeys(path for source in named for path in _expand(str(source)))
    return [File(path, _partitions(path)) for path in paths]


def _expand(source: str) -> list[Path]:
    kind = next((kind for kind in KINDS if kind.takes(source)), None)
    if kind is None:
        raise DumpError(f"{source}: no such file or directory", _nearby(Path(source)))
    paths = sorted(kind.files(source))
    if not paths:
        raise DumpError(
            f"{source}: no Parquet file is there", "a directory is searched for files named *.parquet"
        )
    return paths


def _nearby(path: Path) -> str:
    """A hint at siblings of a missing path with a similar name."""
    folder = path.parent
    names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    return did_you_mean(path.name, names) or f"check the path; relative ones start at {Path.cwd()}"


def _in_directory(source: str) -> Iterator[Path]:
    """Every *.parquet below, except what writers hide."""
    root = Path(source)
    for path in root.rglob("*.parquet"):
        if path.is_file() and not _hides(path.relative_to(root).parts):
            yield path


def _hides(parts: Iterable[str]) -> bool:
    """Whether a file or directory on the way is named `.name` or `_name`."""
    return any(part[0] in "._" for part in parts)


def _in_glob(source: str) -> Iterator[Path]:
    pattern = Path(source)
    for match in _matches(pattern):
        if _hides(part for part in match.parts if part not in pattern.parts):
            continue
        if match.is_dir():
            yield from _in_directory(str(match))
        else:
            yield match


def _matches(pattern: Path) -> list[Path]:
    try:
        return list(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor))))
    except ValueError as error:
        raise DumpError(
            f"{pattern}: not a glob ({error})", "** stands alone between slashes: dir/**/*.parquet"
        ) from error


KINDS = (
    Kind(lambda source: Path(source).is_file(), lambda source: [Path(source)]),
    Kind(lambda source: Path(source).is_dir(), _in_directory),
    Kind(lambda source: not MAGIC.isdisjoint(source), _in_glob),
)


def _partitions(path: Path) -> dict[str, str | None]:
    pairs = (part.split("=", 1) for part in path.parent.parts if "=" in part)
    return {unquote(key): None if value == HIVE_NULL else unquote(value) for key, value in pairs if key}
