"""The journal of a `DumpWriter`, and the Parquet file that is made of it; `recover`."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offpol_diag.wholefiles import beside, placed, put, sync, sync_directory

JOURNAL = ".journal"
LOG = logging.getLogger("offpol_diag")
MARK = b"ODJ1"
FRAME = struct.Struct("<4sIQ")
"""What precedes a batch in a journal: `MARK`, the checksum of `_checksum`, the bytes of the batch."""
ROW_GROUP_TOKENS = 1_000_000
"""Tokens of a row group, about, unless the caller says otherwise."""


class Made:
    """A Parquet file in the making: `tokens` of a row group, under a temporary name until `finish`."""

    def __init__(self, path: Path, metadata: Mapping[bytes, Any], tokens: int) -> None:
        self.path, self._metadata, self._tokens = path, metadata, tokens
        self._pending: pa.Table | None = None
        self._file: BinaryIO | None = None
        self._parquet: pq.ParquetWriter | None = None

    def add(self, table: pa.Table) -> None:
        """Add rows, of the columns of those before.

        Raises:
            ValueError: Row groups that are written lack a column, or have another type.
            OSError: There is no room; the file is of no use any more.
        """
        if self._pending is not None and table.schema != self._pending.schema:
            if self._parquet is not None:
                odd = set(table.schema) ^ set(self._pending.schema)
                names = ", ".join(sorted({field.name for field in odd}))
                raise ValueError(
                    f"{names}: row groups that are in the file already do not have it so; pass the columns "
                    "of the first batch every time, or keep the journal"
                )
            self._pending = widened(self._pending, table.schema)
        self._pending = table if self._pending is None else pa.concat_tables([self._pending, table])
        self._flush(self._tokens)

    def _flush(self, at_least: int) -> None:
        """Write row groups while the pending rows hold at least that many tokens; 0 writes all."""
        while self._pending is not None and self._pending.num_rows:
            ends = np.cumsum(pc.list_value_length(self._pending["rollout_log_probs"]).to_numpy())
            if ends[-1] < at_least:
                return
            rows = min(int(np.searchsorted(ends, self._tokens)) + 1, self._pending.num_rows)
            if self._parquet is None:
                self._file, schema = self.path.open("wb"), self._pending.schema.with_metadata(self._metadata)
                options = {"compression": "zstd", "compression_level": 1, "write_batch_size": 1 << 16}
                self._parquet = pq.ParquetWriter(self._file, schema, **options, **_encodings(schema))
            self._parquet.write_table(self._pending.slice(0, rows), row_group_size=rows)
            self._pending = self._pending.slice(rows)

    def finish(self, target: Path, durable: bool) -> None:
        """Write what is pending and give the file its name; if asked to, wait until both are on disk."""
        try:
            self._flush(0)
            assert self._parquet is not None
            assert self._file is not None
            self._parquet.close()
            self._file.flush()
            if durable:
                sync(self._file.fileno())
            self._file.close()
            placed(self.path, target)
            if durable:
                sync_directory(target.parent)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Close the file, and remove it unless it has been renamed."""
        if self._parquet is not None:
            self._parquet.is_open = False  # or Arrow would write a footer
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self.path.unlink(missing_ok=True)


class Journal:
    """The batches written so far, each an Arrow IPC stream after a `FRAME`; locked while its writer lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        """Bytes of the batches that are written whole."""
        self._batches = 0
        self._file: io.FileIO | None = None
        OPEN.add(self)

    def append(self, table: pa.Table) -> None:
        """Append a batch, and hand it to the operating system, where it survives this process.

        Raises:
            OSError: There is no room; the journal is as before.
        """
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        batch = sink.getvalue()
        frame = FRAME.pack(MARK, _checksum(self._batches, batch), batch.size)
        try:
            if self._file is None:
                self._file = self.path.open("xb", buffering=0)
                _locked(self._file)
            self._file.truncate(self.end)  # after a write that was interrupted
            end = put(self._file, self.end, frame, batch)
        except OSError as failure:
            failure.filename = failure.filename or str(self.path)
            with contextlib.suppress(OSError):
                self._file.truncate(self.end) if self.end and self._file is not None else self.remove()
            raise
        self.end, self._batches = end, self._batches + 1

    def lock(self) -> None:
        """Lock it again after `release`.

        Raises:
            ValueError: Meanwhile it was recovered, or is just being.
        """
        if self._file is not None:
            return
        try:
            self._file = self.path.open("r+b", buffering=0)
        except FileNotFoundError as error:
            raise ValueError(f"{self.path} is gone: recovered or removed; nothing is left to do") from error
        if not _locked(self._file):
            self.release()
            raise ValueError(f"{self.path}: another process recovers it; nothing is left to do")

    def release(self) -> None:
        """Close the file, which unlocks it."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def remove(self) -> None:
        """Close and remove the file."""
        made = self._file is not None or self.end
        self.release()
        if made:
            self.path.unlink(missing_ok=True)


OPEN: weakref.WeakSet[Journal] = weakref.WeakSet()
"""The journals of this process."""


def _unlock_in_child() -> None:
    """Close the journals in a forked process: as long as it had them open, they would stay locked."""
    for journal in list(OPEN):
        journal.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_in_child)


OWN = re.compile(r"\..+\.\d+\.[0-9a-f]{8}" + re.escape(JOURNAL))
"""Names of journals as a writer gives them; beside one of another name lies nothing of ours."""


def recover(
    path: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    warn: Callable[[str], object] = LOG.warning,
) -> Path:
    """Make the dump that a `DumpWriter` did not finish: every batch that it had been given, once.

    Of a damaged journal the dump has the batches before the damage; then the journal stays, and a warning
    says so.

    Args:
        path: The dump as it was to be called, or the journal beside it (`.NAME.….journal`).
        to: Another name for the dump, needed for a journal given by its own name.
        warn: What is called with a warning.

    Returns:
        The file that was made. The journal and the unfinished file are then gone.

    Raises:
        ValueError: There is no journal, or more than one, or its writer is still at work, or it holds no
            whole batch, or the dump exists already.
    """
    found = Path(path)
    if found.suffix != JOURNAL:
        stem = beside(found.resolve()).name.removesuffix(f"{os.getpid()}.tmp")
        names = re.compile(re.escape(stem) + r"\d+\.[0-9a-f]{8}" + re.escape(JOURNAL))
        there = sorted(p for p in found.resolve().parent.glob(".*") if names.fullmatch(p.name))
        if not there:
            raise ValueError(
                f"{found}: no journal of a killed writer lies beside it; there is nothing to recover"
            )
        if len(there) > 1:
            listed = ", ".join(p.name for p in there)
            raise ValueError(f"{found}: {len(there)} journals lie beside it; give one, and --to: {listed}")
        to, found = to or found, there[0]
    if to is None:
        raise ValueError(f"{found}: a journal does not say how its dump is called; give --to as well")
    target = Path(to)
    if target.exists():
        raise ValueError(f"{target} exists; move it away, or give another name with --to")
    with found.open("rb") as file:
        if not _locked(file):
            raise ValueError(f"{found}: its writer is still at work; wait for it, or stop it first")
        try:
            whole, size = whole_batches(file), file.seek(0, os.SEEK_END)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(found)) from error
        if whole is None:
            raise ValueError(
                f"{found}: it holds no whole batch; its writer was killed before the first, or it is damaged"
            )
        if whole.end == size and OWN.fullmatch(found.name):  # the unfinished file may be what fills the disk
            found.with_suffix(".tmp").unlink(missing_ok=True)
        made = of_journal(file, whole, beside(target.resolve()), ROW_GROUP_TOKENS)
        made.finish(target.resolve(), durable=True)
    if whole.end < size:
        has = f"{target} has the {whole.batches} batches before that; the journal stays"
        warn(f"{found}: cut off or damaged at byte {whole.end} of {size}: {has}")
        return target
    try:
        found.unlink()
    except OSError as error:
        warn(f"{found}: cannot be removed ({error.strerror}); all that it holds is in {target}")
    return target


class Whole(NamedTuple):
    """The batches of a journal that are whole: how many, where they end, and the types of all of them."""

    batches: int
    end: int
    schema: pa.Schema


def _checksum(number: int, batch: Any) -> int:
    """Return the checksum of a batch, its number in the journal and its length."""
    return zlib.crc32(batch, zlib.crc32(struct.pack("<QQ", number, len(memoryview(batch)))))


def _frames(file: BinaryIO) -> Iterator[tuple[pa.Table, int]]:
    """Yield the batches of a journal, and where each ends, up to the first that is damaged or cut off."""
    size, end, number = file.seek(0, os.SEEK_END), 0, 0
    while size - end >= FRAME.size:
        file.seek(end)
        mark, checksum, length = FRAME.unpack(file.read(FRAME.size))
        if mark != MARK or length > size - end - FRAME.size:
            return
        batch = file.read(length)
        if len(batch) != length or _checksum(number, batch) != checksum:  # Arrow may abort on such bytes
            return
        end, number = end + FRAME.size + length, number + 1
        yield pa.ipc.open_stream(pa.py_buffer(batch)).read_all(), end


def whole_batches(file: BinaryIO) -> Whole | None:
    """Find out which batches of a journal are whole; None if none is."""
    found = None
    for number, (table, end) in enumerate(_frames(file), 1):
        found = Whole(number, end, table.schema)  # a later batch has all columns and the wider types
    return found


def of_journal(file: BinaryIO, whole: Whole, path: Path, tokens: int) -> Made:
    """Write the whole batches of a journal as row groups of so many tokens, without the footer."""
    made = Made(path, whole.schema.metadata or {}, tokens)
    try:
        for number, (table, _) in enumerate(_frames(file)):
            if number < whole.batches:
                made.add(widened(table, whole.schema.remove_metadata()))
    except BaseException:
        made.remove()
        raise
    return made


def _locked(file: BinaryIO | io.FileIO) -> bool:
    """Lock a file as long as it is open; False if another process has it, True where there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a system, or a file system, without locks
        pass
    return True


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """Choose encodings: byte-split for float lists, a dictionary for all else; with checksums."""
    lists = {f.name: f.type.value_type for f in schema if pa.types.is_list(f.type)}
    paths = {name: f"{name}.list.element" if name in lists else name for name in schema.names}
    split = [paths[name] for name, kind in lists.items() if pa.types.is_floating(kind)]
    rest = [path for path in paths.values() if path not in split]
    split_bytes = dict.fromkeys(split, "BYTE_STREAM_SPLIT")
    return {"use_dictionary": rest, "column_encoding": split_bytes, "write_page_checksum": True}


def widened(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast a batch to wider types, with nulls for columns that it lacks."""
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema)
