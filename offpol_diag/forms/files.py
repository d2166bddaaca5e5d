"""The name and the beginning of a file, by which its form is found; files of JSON lines."""

from __future__ import annotations

import gzip
import io
import json
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

KINDS = {
    ".jsonl": "jsonl",
    ".jsonl.gz": "jsonl",
    ".parquet": "parquet",
    ".pt": "torch",
    ".pkl": "pickle",
    ".dp": "pickle",
}
"""Ending of a file's name → its kind."""
MOST_LINE = 1 << 28
"""Bytes of a line of JSON, which is held as a whole; a response of a million tokens takes half of it."""
FOLD, FREE = 100, 1 << 28
"""Most bytes that a compressed byte may unfold to, and bytes that are free; log-probs unfold to 3 to 20."""


@dataclass(frozen=True)
class Head:
    """The beginning of a file, by which its form is found.

    Attributes:
        kind: one of `KINDS`, or empty.
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
        kind = next((kind for ending, kind in KINDS.items() if path.name.endswith(ending)), "")
        if kind == "jsonl":
            return cls(path, kind, frozenset(next((one for _, one in records([path])), {})))
        if kind in ("torch", "pickle"):
            return cls(path, kind, frozenset(pickles.peek(path)))
        if kind == "parquet":
            with undamaged(path):
                schema = pq.read_schema(path)
            return cls(path, kind, frozenset(schema.names), long=is_long(schema, {}))
        return cls(path, kind)


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Explain errors of Arrow and of the system while a file is read."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DumpError(f"{path}: damaged, or cut off ({error})", "write or copy it again") from error


def records(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of JSONL files, which may be gzipped, each with its place."""
    for path in files:
        try:
            yield from _objects(path)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise DumpError(f"{path}: cannot be read as JSONL ({error})", "write or copy it again") from error


def _objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_lines(path), 1):
        where, one = f"{path}, line {number}", "the file holds one JSON object per line"
        if not line.strip():
            continue
        try:
            found = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise DumpError(f"{where}: no JSON ({error})", f"{one}; was its writer cut off?") from error
        if not isinstance(found, dict):
            raise DumpError(f"{where}: {type(found).__name__}, no JSON object", one)
        yield where, found


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, which may be gzipped.

    Raises:
        DumpError: one is too long to be held, or the file unfolds to far more than any dump does.
    """
    zipped = path.suffix == ".gz"
    most, seen = FREE + FOLD * path.stat().st_size, 0
    with gzip.open(path) if zipped else path.open("rb") as raw, io.BufferedReader(raw, 1 << 20) as file:
        while line := file.readline(MOST_LINE):
            seen += len(line)
            if len(line) == MOST_LINE:
                hint = "the file holds one JSON object per line, of one sequence"
                raise DumpError(f"{path}: a line is longer than {MOST_LINE >> 20} MiB", hint)
            if zipped and seen > most:
                what = f"{path}: it unfolds to more than {FOLD} times its size, which no log-probs do"
                raise DumpError(what, "was it damaged? unpack it, and look at what it holds")
            yield line
