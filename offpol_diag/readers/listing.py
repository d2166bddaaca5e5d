"""Files, directories and globs in a store: found as they are on a disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase

from pyarrow import fs

from offpol_diag.errors import DumpError, did_you_mean
from offpol_diag.readers.locations import Location

MAGIC = frozenset("*?[")
NO_GLOB = "** stands alone between slashes: dir/**/*.parquet"


def hides(name: str) -> bool:
    """Whether writers hide what is called so: `.name`, `_name`."""
    return name[:1] in ("_", ".")


def files(place: Location) -> list[Location]:
    """The Parquet files that a place stands for: a file, a directory, or a glob.

    Raises:
        DumpError: nothing is there.
        Exception: what the store raises.
    """
    kind = _kind(place, place.path)
    if kind == fs.FileType.File:
        return [place]
    if kind == fs.FileType.Directory:
        return list(_in_directory(place))
    if not MAGIC.isdisjoint(place.path):
        return list(_in_glob(place))
    raise _missing(place)


def _kind(place: Location, path: str) -> fs.FileType:
    return place.store.filesystem.get_file_info(path).type


def _listed(place: Location, recursive: bool = False) -> list[fs.FileInfo]:
    found: list[fs.FileInfo] = place.store.filesystem.get_file_info(
        fs.FileSelector(place.path, recursive=recursive)
    )
    return found


def _in_directory(root: Location) -> Iterator[Location]:
    """Every *.parquet below, except what writers hide."""
    above = len(root.path.rstrip("/"))
    for info in _listed(root, recursive=True):
        below = info.path[above:].strip("/").split("/")
        if info.type == fs.FileType.File and below[-1].endswith(".parquet") and not any(map(hides, below)):
            yield root.at(info.path)


def _in_glob(pattern: Location) -> Iterator[Location]:
    root, segments = _split(pattern)
    for segment in segments:
        if "**" in segment and segment != "**":
            raise DumpError(f"{pattern}: not a glob", NO_GLOB)
    for path, kind in _walk(root, segments):
        found = root.at(path)
        below = path[len(root.path.rstrip("/")) :].strip("/").split("/")
        if any(hides(name) for name in below if name not in segments):
            continue
        if kind == fs.FileType.Directory:
            yield from _in_directory(found)
        else:
            yield found


def _split(pattern: Location) -> tuple[Location, list[str]]:
    """The deepest directory above every wildcard, and the rest in segments."""
    names = pattern.path.split("/")
    first = next(i for i, name in enumerate(names) if not MAGIC.isdisjoint(name))
    base = "/".join(names[:first]) or "/" * pattern.path.startswith("/")
    tail = pattern.path[len(base) :]
    shown = pattern.shown.removesuffix(tail)
    shown = shown if shown != pattern.shown else f"{pattern.store.scheme}://{base.lstrip('/')}"
    return Location(pattern.store, base, shown), [name for name in names[first:] if name]


def _walk(root: Location, segments: list[str]) -> Iterator[tuple[str, fs.FileType]]:
    """The paths that segments of a pattern lead to, below a directory."""
    head, *rest = segments
    if head == "**":
        yield from _onwards(root, fs.FileType.Directory, rest)
        below = [info for info in _listed(root, recursive=True) if info.type == fs.FileType.Directory]
        for info in below:
            yield from _onwards(root.at(info.path), info.type, rest)
        return
    if MAGIC.isdisjoint(head):
        path = f"{root.path.rstrip('/')}/{head}"
        kind = _kind(root, path)
        if kind != fs.FileType.NotFound:
            yield from _onwards(root.at(path), kind, rest)
        return
    for info in _listed(root):
        if fnmatchcase(info.base_name, head):
            yield from _onwards(root.at(info.path), info.type, rest)


def _onwards(place: Location, kind: fs.FileType, rest: list[str]) -> Iterator[tuple[str, fs.FileType]]:
    if not rest:
        yield place.path, kind
    elif kind == fs.FileType.Directory:
        yield from _walk(place, rest)


def _missing(place: Location) -> DumpError:
    """Nothing is at a path: perhaps there is not even its bucket, perhaps its neighbour is meant."""
    bucket = place.path.partition("/")[0]
    if not _adapted(place) and bucket and _kind(place, bucket) == fs.FileType.NotFound:
        return DumpError(
            f"{place}: there is no bucket {bucket!r}",
            "check its name; a store of your own is named by AWS_ENDPOINT_URL",
        )
    hint = "check the path; keys are taken as written, %20 is no blank"
    with suppress(Exception):  # a hint is not worth an error of its own
        hint = _nearby(place) or hint
    return DumpError(f"{place}: no such file or directory", hint)


def _adapted(place: Location) -> bool:
    """Whether the store is one of fsspec's, whose paths begin with who knows what."""
    return isinstance(place.store.filesystem, fs.PyFileSystem)


def _nearby(place: Location) -> str:
    """A hint at siblings of a missing path with a similar name."""
    above, _, name = place.path.rpartition("/")
    folder = Location(place.store, above, place.shown.removesuffix(name))
    known = _kind(folder, above) if above else fs.FileType.NotFound
    names = sorted(info.base_name for info in _listed(folder)) if known == fs.FileType.Directory else []
    return did_you_mean(name, names)
