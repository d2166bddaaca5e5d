"""Read default settings from a file in the working directory; the default dump is else the sample.

Flags beat the environment (`OFFPOL_DIAG_*`), which beats the file. The file is `offpol-diag.toml`, or else
the table `[tool.offpol-diag]` of `pyproject.toml`; the two are not merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from offpol_diag.cli.output import note
from offpol_diag.errors import OffpolError, UsageError, did_you_mean
from offpol_diag.wholefiles import MOST_TOML, read, toml

HOMES: Mapping[str, tuple[str, ...]] = {"offpol-diag.toml": (), "pyproject.toml": ("tool", "offpol-diag")}
"""Files that may hold settings → the path of tables to them."""


def _listed(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _paired(value: object) -> str:
    pairs = value.items() if isinstance(value, dict) else ()
    return ",".join(f"{ours}={theirs}" for ours, theirs in pairs) or str(value)


OPTIONS = (
    "preset_file",
    "device",
    "engine",
    "workers",
    "for",
    "seed",
    "on_bad_row",
    "quiet",
    "verbose",
    "no_explore",
)
KEYS: Mapping[str, Callable[[object], str]] = {
    "dump": _listed,
    "presets": _listed,
    "columns": _paired,
    "form": str,
    "align": _listed,
    "join": str,
    "on": str,
    "group_by": _listed,
    **dict.fromkeys(OPTIONS, str),
}
"""Settings allowed in a file → conversion to command-line form. Keys may be written with `-` or `_`."""


@dataclass(frozen=True)
class Settings:
    """Settings read from a file.

    Attributes:
        file: the file it was read from, or empty.
        dump: the dump it names, as patterns and paths.
        options: option → value as the command line would have it.
    """

    file: str = ""
    dump: tuple[str, ...] = ()
    options: dict[str, str] = field(default_factory=dict)


def settings(folder: Path = Path()) -> Settings:
    """Read the settings of a directory; empty if no file there has any.

    Raises:
        UsageError: the file is not TOML, or has an unknown key.
    """
    for file, tables in HOMES.items():
        table = _table(folder / file, tables)
        if table:
            values = {_key(file, key): value for key, value in table.items()}
            dump = values.pop("dump", [])
            named = tuple(map(str, dump)) if isinstance(dump, list) else (str(dump),)
            return Settings(file, named, {key: KEYS[key](value) for key, value in values.items()})
    return Settings()


def dumps(given: Sequence[str] | None, quiet: bool = False) -> list[str]:
    """Return the dumps to read: those given, else the settings file's, else the sample, noted on stderr."""
    if given:
        if len(given) > 1:
            note(f"{len(given)} DUMPs given: they are read as one dump", quiet)
        return list(given)
    found = settings()
    if found.dump:
        from offpol_diag.readers.sources import clean

        whole = ", as one dump" if len(found.dump) > 1 else ""
        named = ", ".join(map(clean, found.dump))
        note(f"no DUMP given: reading {named}, named in {found.file}{whole}", quiet)
        return list(found.dump)
    note("no DUMP given: reading the sample dump that ships with offpol-diag", quiet)
    return [str(sample())]


@contextmanager
def judged(key: str, value: object) -> Iterator[None]:
    """Validate a value within the block; errors on a value from a settings file name that file."""
    try:
        yield
    except OffpolError as error:
        found = settings()
        if value is None or found.options.get(key) != str(value):
            raise
        raise UsageError(f"{found.file}: {key}: {error.message}", error.hint) from error


def sample() -> Path:
    """Return the path of the sample dump in the package."""
    return Path(__file__).parents[1] / "data" / "sample.parquet"


def _table(path: Path, inside: Sequence[str]) -> dict[str, object]:
    try:
        table: object = toml(read(path, MOST_TOML).decode("utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path}: cannot be read as TOML ({why})", "mend it, or run in another folder"
        ) from error
    for name in inside:
        table = table.get(name, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def _key(file: str, key: str) -> str:
    name = key.replace("-", "_")
    if name not in KEYS:
        known = f"the keys are {', '.join(KEYS)}"
        raise UsageError(f"{file}: there is no setting {key!r}", did_you_mean(name, list(KEYS)) or known)
    return name
