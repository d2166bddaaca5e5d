"""The beginning of a file, by which its form is found; files of JSON lines and of Arrow."""

from __future__ import annotations

import gzip
import io
import json
import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.forms import pickles
from offpol_diag.readers.columns import is_long


@dataclass(frozen=True)
class Head:
    """The beginning of a file, by which its form is found.

    Attributes:
        kind: one of the kinds of `MAGIC`, or empty.
        fields: names of its columns, or of the fields of its first record.
        long: whether a row is a token.
    """

    path: Path
    kind: str
    fields: frozenset[str] = frozenset()
    long: bool = False

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
            return cls(path, kind, frozenset(pickles.peek(path)))
        if kind == "parquet":
            with undamaged(path):
                schema = pq.read_schema(path)
            return cls(path, kind, frozenset(schema.names), long=is_long(schema, {}))
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
    """Return the names of the columns of an Arrow or NumPy file; others have none yet."""
    if kind == "npz":
        return [name.removesuffix(".npy") for name in _members(path)]
    if kind == "arrow":
        with undamaged(path), arrow(path) as reader:
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


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw) if zipped else io.BufferedReader(raw, 1 << 20) as file:
            for number, line in enumerate(file, 1):
                where, one = f"{path}, line {number}", "the file holds one JSON object per line"
                if not line.strip():
                    continue
                try:
                    found = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise DumpError(
                        f"{where}: no JSON ({error})", f"{one}; was its writer cut off?"
                    ) from error
                if not isinstance(found, dict):
                    raise DumpError(f"{where}: {type(found).__name__}, no JSON object", one)
                yield where, found
