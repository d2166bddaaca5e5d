"""The tally file: one JSON object, gzip where its name ends in .gz. Reading it runs nothing.

What is read may come from strangers: its size is bounded before and after unpacking, the number of its values
before they are made, and every array's shape must be that of the bytes which are there.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO, Literal

from pydantic import BaseModel, Field, ValidationError

from offpol_diag import wholefiles
from offpol_diag.accumulators import State
from offpol_diag.errors import ResultError, UsageError
from offpol_diag.presets import Preset
from offpol_diag.summary import Model
from offpol_diag.tallies.kinds import AnySaved, saved
from offpol_diag.tallies.pieces import Held, Piece, listed
from offpol_diag.tallies.settings import Settings
from offpol_diag.tally import Study, Tally

FORMAT = 1
HINT = "give a file that `offpol-diag analyze --tally` wrote"
DAMAGED = "copy it again, or analyze that piece again"
MOST_BYTES = 2 << 30
"""A tally file as text, at most."""
MOST_VALUES = 4_000_000
"""Values in it (numbers inside arrays not counted), at most."""
RATIO, ALWAYS = 64, 256 << 20
"""A packed file may unpack to this many times its size, and to ALWAYS in any case."""
GZIP, LEVEL = b"\x1f\x8b", 1
STEP = 1 << 20


class SavedTally(Model):
    """What a tally file holds."""

    format: Literal[1] = 1
    offpol_diag: str = Field(description="the version that made it")
    settings: Settings
    pieces: list[Piece] = Field(min_length=1)
    states: dict[str, AnySaved]


@dataclass(frozen=True)
class TallyFile:
    """A tally with all that is needed to merge it and to read it out.

    Attributes:
        name: the file it was read from, or what errors should call it.
        version: of offpol-diag that made it.
        settings: how its pieces were analysed.
        held: its pieces, in the order of the dump.
        tally: the states of all of them together.
    """

    name: str
    version: str
    settings: Settings
    held: tuple[Held, ...]
    tally: Tally

    @classmethod
    def of(
        cls, study: Study, asked: Sequence[Preset], columns: dict[str, str], one: Piece, tally: Tally
    ) -> TallyFile:
        """Of a piece that was just analysed."""
        settings = Settings.of(study, asked, columns)
        return cls("", version("offpol-diag"), settings, (Held("", one),), tally)

    def data(self) -> SavedTally:
        """To be written."""
        return SavedTally(
            offpol_diag=self.version,
            settings=self.settings,
            pieces=listed(self.held),
            states={name: saved(state) for name, state in self.tally.states.items()},
        )


# ---------------------------------------------------------------- writing


def write(path: Path, tally: TallyFile) -> None:
    """Write a tally file beside its place and put it there; nothing is left behind when that fails.

    Raises:
        UsageError: the place cannot be written.
    """
    text = tally.data().model_dump_json().encode() + b"\n"
    beside = wholefiles.beside(path)
    try:
        packed = path.suffix.lower() == ".gz"
        beside.write_bytes(gzip.compress(text, LEVEL, mtime=0) if packed else text)
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror})", "choose another place") from error
    finally:
        beside.unlink(missing_ok=True)


# ---------------------------------------------------------------- reading


class _Stamp(BaseModel):
    format: int
    offpol_diag: str


def read(path: Path) -> TallyFile:
    """Read what `write` wrote.

    Raises:
        ResultError: not readable, not ours, too large, damaged, or of another format.
        PresetError: a preset in it that the grammar does not allow.
    """
    return parse(_text(path), str(path))


def parse(text: bytes, name: str) -> TallyFile:
    """A tally file's text; `name` is what errors call it."""
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MOST_VALUES:
        raise ResultError(f"{name}: more than {MOST_VALUES} values, which no tally has", HINT)
    _stamp(text, name)
    try:
        data = SavedTally.model_validate_json(text)
    except ValidationError as error:
        raise _refusal(name, error) from error
    states: dict[str, State] = {key: one.state() for key, one in data.states.items()}
    held = tuple(Held(name, one) for one in data.pieces)
    return TallyFile(name, data.offpol_diag, data.settings, held, Tally(states))


def _stamp(text: bytes, name: str) -> None:
    try:
        stamp = _Stamp.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(f"{name}: this is not a tally of offpol-diag", HINT) from error
    if stamp.format != FORMAT:
        raise ResultError(
            f"{name}: tally format {stamp.format}, this version reads format {FORMAT}",
            "analyze that piece again with this version",
        )


def _refusal(name: str, error: ValidationError) -> ResultError:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return ResultError(f"{name}: {where}: {first['msg']}", DAMAGED)


def _text(path: Path) -> bytes:
    try:
        wholefiles.check(path)
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if not stream.peek(2).startswith(GZIP):
                return _read(stream, MOST_BYTES, str(path))
            with gzip.GzipFile(fileobj=stream) as plain:
                return _read(plain, min(MOST_BYTES, max(RATIO * size, ALWAYS)), str(path))
    except (OSError, EOFError, zlib.error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ResultError(f"{path}: cannot be read as a tally ({why})", HINT) from error


def _read(stream: BinaryIO | gzip.GzipFile, most: int, name: str) -> bytes:
    parts, size = [], 0
    while part := stream.read(STEP):
        size += len(part)
        if size > most:
            raise ResultError(f"{name}: unpacks to more than {most >> 20} MiB, which no tally does", HINT)
        parts.append(part)
    return b"".join(parts)
