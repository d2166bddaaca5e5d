"""Read default settings from a file in the working directory; the default dump is else the sample.

Flags beat the environment (`OFFPOL_DIAG_*`), which beats the file. The file is `offpol-diag.toml`, or else
the table `[tool.offpol-diag]` of `pyproject.toml`; the two are not merged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offpol_diag.cli.output import note
from offpol_diag.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from offpol_diag.requests import ReadDump

HOMES: Mapping[str, tuple[str, ...]] = {"offpol-diag.toml": (), "pyproject.toml": ("tool", "offpol-diag")}
"""Files that may hold settings → the path of tables to them."""


@dataclass(frozen=True)
class Settings:
    """Settings read from a file.

    Attributes:
        file: the file they were read from, or empty.
        values: key → value, as TOML has it.
    """

    file: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def settings(folder: Path = Path()) -> Settings:
    """Read the settings of a directory; empty if no file there has any.

    Raises:
        UsageError: the file is not TOML, or has an unknown key.
    """
    for file, tables in HOMES.items():
        if table := _table(folder / file, tables):
            return Settings(file, {_key(file, key): value for key, value in table.items()})
    return Settings()


def dumps(request: ReadDump) -> list[str]:
    """Return the dumps to read: those given, else the settings file's, else the sample; remarked on."""
    from offpol_diag.printable import clean

    given, file = list(request.dump), request.from_file("dump")
    many = len(given) > 1
    if file:
        named = ", ".join(map(clean, given))
        note(f"no DUMP given: reading {named}, named in {file}{', as one dump' * many}", request.quiet)
    elif many:
        note(f"{len(given)} DUMPs given: they are read as one dump", request.quiet)
    elif not given:
        note("no DUMP given: reading the sample dump that ships with offpol-diag", request.quiet)
    return given or [str(sample())]


def sample() -> Path:
    """Return the path of the sample dump in the package."""
    return Path(__file__).parents[1] / "data" / "sample.parquet"


def _table(path: Path, inside: Sequence[str]) -> dict[str, object]:
    from offpol_diag.files import MOST_TOML, read, toml

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


def allowed() -> list[str]:
    """Return the settings that a file may have; they may be written with `-` or `_`."""
    from offpol_diag.options import settings as of_model
    from offpol_diag.requests import MODELS

    return list(dict.fromkeys(key for model in MODELS.values() for key in of_model(model)))


def _key(file: str, key: str) -> str:
    name, known = key.replace("-", "_"), allowed()
    if name not in known:
        hint = did_you_mean(name, known) or f"the keys are {', '.join(known)}"
        raise UsageError(f"{file}: there is no setting {key!r}", hint)
    return name
