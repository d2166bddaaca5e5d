"""A form of dump: its row in the table, one sequence read from it, the beginning of a file."""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.forms import pickles

Array = npt.NDArray[Any]
Span = Literal["response", "full"]
Padding = Literal["none", "left", "right"]
Read = Callable[[Sequence[Path], Mapping[str, str]], Iterator["Row"]]
"""Reads files, with the user's `--columns` (role → name): a row per sequence."""

LONGEST_LINE = 512 << 20
"""Maximum bytes of a line of JSON."""


@dataclass(frozen=True)
class Alignment:
    """Alignment of the lists of a row with its tokens.

    Attributes:
        span: whether the lists cover the response, or the whole sequence with its prompt. In a whole
            sequence shorter lists cover its end, and the mask says which tokens are read.
        shift: the trainer's log-prob at index t belongs to token t + shift of the rollout's.
        padding: at which end rows are padded to one length; masked tokens are cut off there.
    """

    span: Span = "response"
    shift: int = 0
    padding: Padding = "none"

    def __str__(self) -> str:
        padded = {"none": "", "left": ", padded on the left", "right": ", padded on the right"}
        covered = {"response": "response only", "full": "whole sequence"}
        return f"{covered[self.span]}, shift {self.shift}{padded[self.padding]}"


@dataclass(eq=False)
class Row:
    """One sequence: columns per token, and further ones, by canonical name; `names` are those in the file.

    `where` is file and place in it, for messages; `unread` are fields of the file that nobody reads.
    """

    tokens: dict[str, Array]
    scalars: dict[str, Any]
    where: str
    names: dict[str, str] = field(default_factory=dict)
    unread: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Head:
    """The beginning of a file, by which its form is found.

    Attributes:
        kind: one of the kinds of `MAGIC`, or empty.
        fields: names of its columns, or of the fields of its first record.
        fault: why a pickle is not read.
    """

    path: Path
    kind: str
    fields: frozenset[str] = frozenset()
    fault: DumpError | None = None

    @classmethod
    def of(cls, path: Path) -> Head:
        """Look at the beginning of a file."""
        try:
            with path.open("rb") as file:
                start = file.read(64)
        except OSError as error:
            raise DumpError(f"{path}: cannot be read ({error.strerror})", "check its permissions") from error
        kind = next((kind for magic, kind in MAGIC if re.match(magic, start)), "")
        if kind == "zip":
            kind = "torch" if any(name.endswith("data.pkl") for name in _members(path)) else "npz"
        if kind == "jsonl":
            return cls(path, kind, frozenset(next((one for _, one in records([path])), {})))
        if kind in ("torch", "pickle"):
            names, fault = pickles.peek(path)
            return cls(path, kind, frozenset(names), fault=fault)
        return cls(path, kind, frozenset(_names(path, kind)))


MAGIC: tuple[tuple[bytes, str], ...] = (
    (rb"PAR1", "parquet"),
    (rb"ARROW1|\xff\xff\xff\xff", "arrow"),
    (rb"PK\x03\x04", "zip"),
    (rb"\x80[\x02-\x05]", "pickle"),
    (rb"\x1f\x8b|(?:\xef\xbb\xbf)?\s*\{|$", "jsonl"),
)
"""First bytes of a file → its kind; a zip file is of torch or of NumPy."""


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Explain errors of Arrow and of the system while a file is read."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DumpError(f"{path}: damaged, or cut off ({error})", "write or copy it again") from error


def _members(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as file:
            return file.namelist()
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise DumpError(f"{path}: a damaged zip file ({error})", "write or copy it again") from error


def _names(path: Path, kind: str) -> list[str]:
    """Return the names of the columns of a Parquet, Arrow or NumPy file; others have none yet."""
    if kind == "npz":
        return [name.removesuffix(".npy") for name in _members(path)]
    with undamaged(path):
        if kind == "parquet":
            return list(pq.read_schema(path).names)
        if kind == "arrow":
            with arrow(path) as reader:
                return list(reader.schema.names)
    return []


def arrow(path: Path) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    """Open an Arrow IPC file (Feather) or stream."""
    with path.open("rb") as file:
        whole = file.read(6) == b"ARROW1"
    source = pa.memory_map(str(path))
    return pa.ipc.open_file(source) if whole else pa.ipc.open_stream(source)


def records(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of JSONL files, which may be gzipped, each with its place."""
    for path in files:
        try:
            yield from _lines(path)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise DumpError(f"{path}: cannot be read as JSONL ({error})", "write or copy it again") from error


class _Once:
    """Builds the objects of JSON; `twice` is a name that the last one, the outermost, holds twice."""

    twice: str | None = None

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        names = [name for name, _ in pairs]
        self.twice = None if len(found) == len(names) else max(names, key=names.count)
        return found


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    once = _Once()
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw) if zipped else io.BufferedReader(raw, 1 << 20) as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), 1):
                where = f"{path}, line {number}"
                if len(line) == LONGEST_LINE:
                    what = f"{where}: longer than {LONGEST_LINE >> 20} MiB"
                    raise DumpError(what, "write one object per sequence")
                if not line.strip():
                    continue
                one, text = "the file holds one JSON object per line", line.decode("utf-8-sig")
                try:
                    found = json.loads(text, object_pairs_hook=once)
                except (ValueError, RecursionError) as error:
                    hint = f"{one}; was its writer cut off?"
                    raise DumpError(f"{where}: no JSON ({error})", hint) from error
                if not isinstance(found, dict):
                    raise DumpError(f"{where}: {type(found).__name__}, no JSON object", one)
                if once.twice:
                    hint = "write the file again with one of them renamed"
                    raise DumpError(f"{where}: two fields are called {once.twice!r}", hint)
                yield where, found


def numbers(value: object, name: str, where: str) -> Array:
    """Return a list of numbers as a 1-D array; null is NaN."""
    try:
        found = np.asarray(value)
        if found.dtype == object:
            found = np.asarray(value, np.float64)  # null becomes NaN
    except (TypeError, ValueError, OverflowError):
        found = np.empty((0, 0))
    if found.ndim == 1 and found.size == 0:
        return np.empty(0, np.float32)
    if found.ndim != 1 or found.dtype.kind not in "fiub":
        hint = "give each token one number, in one flat list"
        raise DumpError(f"{where}: {name!r} is no list of numbers", hint)
    return found


@dataclass(frozen=True)
class Form:
    """A form in which dumps are found: a row of `table.FORMS`.

    Attributes:
        name: the word for `--form`.
        trainer: who writes it; empty for anyone.
        files: what its files are called, for people.
        holds: what they hold of a dump, for people.
        detect: whether a file is of this form.
        alignment: as its trainer writes it.
        guess: whether other files could look alike; it is then said that this one was chosen.
        choose: its files → those to read, and notes on those that are left out.
        source: repository, commit and file where this was read.
    """

    name: str
    trainer: str
    files: str
    holds: str
    detect: Callable[[Head], bool]
    read: Read
    alignment: Alignment = Alignment()
    guess: bool = False
    choose: Callable[[Sequence[Path]], tuple[list[Path], list[str]]] | None = None
    source: str = ""


def having(kind: str, *fields: str, named: str = "") -> Callable[[Head], bool]:
    """Return a test for files of a kind with some fields, and with a name that matches a pattern."""
    return lambda head: (
        head.kind == kind and head.fields.issuperset(fields) and bool(re.search(named, head.path.name))
    )
