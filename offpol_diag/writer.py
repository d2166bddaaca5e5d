"""DumpWriter: from a trainer's tensors to a dump, batch by batch. Needs pyarrow and numpy, never torch."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import secrets
import stat
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offpol_diag.wholefiles import beside, put, sync, sync_directory

Array = npt.NDArray[Any]

METADATA_KEY = b"offpol_diag"
JOURNAL = ".journal"
FLOATS = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}
FLOAT_TOKENS = ("rollout_log_probs", "old_log_probs", "current_log_probs", "entropy")
INT_TOKENS = {"response_mask": pa.int8(), "token_ids": pa.int32()}
NUMBERS = ("rewards", "advantages")
"""Columns whose values are numbers; in all others with a value per sequence a NaN is a null."""
# Fixed, so that a first batch of whole rewards does not make every later batch integers.
SCALARS = dict.fromkeys(NUMBERS, pa.float64()) | dict.fromkeys(("step", "policy_lag"), pa.int64())
LOG = logging.getLogger("offpol_diag")
MARK = b"ODJ1"
FRAME = struct.Struct("<4sIQ")
"""What precedes a batch in a journal: `MARK`, the checksum of `_checksum`, the bytes of the batch."""
OLD_JOURNAL = b"\xff\xff\xff\xff"
"""How a journal without frames begins: an Arrow IPC stream."""


class Ragged(NamedTuple):
    """A token column: `values` [T], cut into rows of `lengths` [S]."""

    values: Array
    lengths: Array


ROW_GROUP_TOKENS = 1_000_000
"""Tokens of a row group, about, unless the caller says otherwise."""


class DumpWriter:
    """Writes a dump: one row per sequence, ragged lists over response tokens.

    A context manager, which threads may share. The file appears under its name only when the block ends well;
    an exception leaves nothing behind. Until then every batch is also appended to a hidden journal beside it:
    if the process is killed, or the disk is full, `recover` makes the dump of it.
    Values are stored as given: a NaN or a positive log-prob is for the reader to judge. What cannot be stored
    as given is refused.

    Args:
        path: The Parquet file to make; so is its directory, where there is none.
        provenance: What else a reader of the numbers should know (model, commit, cluster, ...); anything JSON
            can hold. `versions` is added: those installed of vllm, sglang, verl, trl and torch.
        row_group_tokens: Tokens per row group: what a reader holds in memory at once.
        dtype: How float token columns are stored: "float16", "float32" or "float64". The default rounds a
            float64 input to float32; only "float16" rounds further.
        trainer: The trainer, such as "verl".
        engine: The engine that sampled, such as "vLLM".
        temperature: Of sampling; the same must divide the trainer's logits.
        top_p: Of sampling.
        logprobs: Whether the engine's log-probs are "raw" (of the model) or "processed" (after temperature,
            top-p and top-k).
        rank: Of the process that writes: `step_1.parquet` of rank 3 is `step_1-rank00003.parquet`. The
            directory, or the glob `step_1-rank*.parquet`, is then the dump.
        journal: Whether to keep the journal. Without it a kill loses all, and a column or type that the first
            row groups lack is refused.

    Attributes:
        path: The file, with its rank.

    Raises:
        ValueError: Bad input; the message says what, where, and what to do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        provenance: Mapping[str, Any] | None = None,
        row_group_tokens: int = ROW_GROUP_TOKENS,
        dtype: str = "float32",
        *,
        trainer: str | None = None,
        engine: str | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        logprobs: str | None = None,
        rank: int | None = None,
        journal: bool = True,
    ) -> None:
        if dtype not in FLOATS:
            raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(FLOATS)}")
        if logprobs not in (None, "raw", "processed"):
            raise ValueError(f"logprobs={logprobs!r}: choose raw or processed")
        given = {"trainer": trainer, "engine": engine, "temperature": temperature, "top_p": top_p}
        given |= {"logprobs": logprobs, "rank": rank}
        self.path = Path(path)
        if rank is not None:
            self.path = self.path.with_name(f"{self.path.stem}-rank{rank:05}{self.path.suffix}")
        self._metadata = {METADATA_KEY: _stamped(given, provenance or {})}
        try:
            special = self.path.exists() and not self.path.is_file()
            self._target = self.path.resolve()  # now: the process may change its directory
            self._target.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValueError(f"{self.path}: its directory is a file; choose another name") from error
        except OSError as error:
            raise ValueError(f"{self.path} cannot be made: {error.strerror}; choose another name") from error
        if special:  # a device would be replaced, /dev/null by root even
            raise ValueError(f"{self.path}: a directory or a device, no file; choose another name")
        # random, as numbers of processes come again, and a process may write a file twice
        self._temporary = beside(self._target).with_suffix(f".{secrets.token_hex(4)}.tmp")
        self._row_group_tokens = row_group_tokens
        self._dtype = dtype
        self._batches = 0
        self._schema: pa.Schema | None = None
        self._negative: set[str] = set()  # integer columns that had a value below 0
        self._pending: pa.Table | None = None
        self._output: Output | None = None
        self._journal = Journal(self._temporary.with_suffix(JOURNAL)) if journal else None
        self._again = False  # what was written as Parquet is of no use: only the journal has all batches
        self._full = False  # the last batch found no room
        self._closing = self._closed = False
        self._lock = threading.RLock()
        self._process = os.getpid()

    def write(
        self,
        *,
        rollout_log_probs: Any = None,
        old_log_probs: Any = None,
        current_log_probs: Any = None,
        response_mask: Any = None,
        advantages: Any = None,
        rewards: Any = None,
        token_ids: Any = None,
        entropy: Any = None,
        sequence_id: Any = None,
        group_id: Any = None,
        step: Any = None,
        policy_lag: Any = None,
        **scalar_columns: Any,
    ) -> None:
        """Append one batch of S sequences.

        A token column is a padded tensor or array [S, L], or a list of S one-dimensional arrays (ragged).
        Padded columns need a padded `response_mask`: in each row the zeros after its last 1 are padding and
        are trimmed; zeros before it stay. Every other column is one value per sequence, or one for all;
        of these, names and `scalar_columns` may be left out of some batches, whose rows then have nulls.

        Args:
            rollout_log_probs: log π of each sampled token under the policy that sampled it, nats.
            old_log_probs: The same under the trainer's policy at the start of the step.
            current_log_probs: The same under the trainer's policy during the step.
            response_mask: 1 for a token that counts; 0 for tool output, observations and padding.
            advantages: One per sequence, or one per token.
            rewards: One per sequence.
            token_ids: The sampled tokens.
            entropy: Of the policy that `old_log_probs` are of, at its temperature, nats, as trainers log it.
            sequence_id: A name per sequence, string or integer.
            group_id: A name per prompt, shared by its samples.
            step: Training step.
            policy_lag: Trainer updates between the weights that sampled and the weights that train.
            **scalar_columns: Anything else with one value per sequence, for reports to group by.

        Raises:
            ValueError: A required column is missing, columns disagree with each other or with those of the
                batches before, or a value cannot be stored as given. The batch is then not written.
            OSError: The disk is full. The batch is then not written, and may be given again.
        """
        columns = {**locals(), **scalar_columns}  # the parameters bear the columns' names
        del columns["self"], columns["scalar_columns"]
        self._check_process()
        with self._lock:
            if self._closing and not self._closed:
                raise ValueError(f"{self.path}: close() has failed; call it again, and open a new DumpWriter")
            if self._closed:
                raise ValueError(f"{self.path} is closed; open a new DumpWriter")
            try:
                table = _table({k: v for k, v in columns.items() if v is not None}, self._dtype, self._schema)
                table = _conformed(table, self._schema, self._negative)
            except (TypeError, ValueError, OverflowError, pa.ArrowException) as slip:
                raise ValueError(f"batch {self._batches}: {slip}") from slip
            if table.num_rows:
                self._accept(table)
            self._batches += 1

    def close(self) -> None:
        """Write what is pending and give the file its name. Closing twice does nothing.

        Raises:
            ValueError: No sequence was written.
            OSError: The disk is full, for one. Nothing is lost: make room and close again, or, with a
                journal, `recover` the dump to another disk.
        """
        self._check_process()
        with self._lock:
            if self._closed:
                return
            if self._schema is None:
                raise ValueError(f"{self.path}: no sequence was written; call write() before closing")
            self._closing = True
            try:
                self._finish()
            except BaseException as failure:
                self._keep_journal(failure)
                raise
            self.discard()

    def discard(self) -> None:
        """Close, and remove what is unfinished."""
        self._check_process()
        with self._lock:
            self._closed = True
            if self._output is not None:
                self._output.remove()
            if self._journal is not None:
                self._journal.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None:
            self.close()
        elif os.getpid() != self._process:  # a fork leaves the block, and the file is its parent's
            return
        elif self._full and self._journal is not None:
            with self._lock:
                self._closing = self._closed = True
                self._keep_journal(error)
        else:
            self.discard()

    def _lost(self) -> str:
        return f"{self.path}: a write was interrupted, and there is no journal; write all again"

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                f"{self.path}: another process opened it; open a DumpWriter in each, with a rank"
            )

    def _accept(self, table: pa.Table) -> None:
        """Keep a batch: once it is in the journal, no failure of the Parquet file loses it."""
        grown = self._schema is not None and table.schema != self._schema
        if self._again and self._journal is None:
            raise ValueError(self._lost())
        if grown and self._journal is None and self._output is not None:
            odd = set(table.schema) ^ set(self._schema or ())
            names = ", ".join(sorted({field.name for field in odd}))
            raise ValueError(
                f"batch {self._batches}: {names}: row groups that are in the file already do not have it so; "
                "pass the columns of the first batch every time, or keep the journal"
            )
        self._full = False
        try:
            if self._journal is not None:
                self._journal.append(table.replace_schema_metadata(self._metadata))
            elif self._output is not None:
                self._output.drain()
        except OSError as failure:
            self._full = True
            failure.add_note(f"batch {self._batches} is not written to {self.path}; those before it are kept")
            raise
        self._schema = table.schema
        self._negative |= _negative(table)
        if grown and self._output is not None:
            self._start_again()
        if not self._again:
            tables = [table] if self._pending is None else [_widened(self._pending, table.schema), table]
            self._pending = pa.concat_tables(tables)
            self._flush(self._row_group_tokens)

    def _flush(self, at_least: int) -> None:
        """Write row groups while the pending rows hold at least that many tokens; 0 writes all."""
        while self._pending is not None and (
            rows := _row_group(self._pending, at_least, self._row_group_tokens)
        ):
            if self._output is None:
                self._output = Output(self._temporary, self._pending.schema.with_metadata(self._metadata))
            self._again = True  # should this be interrupted
            self._output.add(self._pending.slice(0, rows))
            self._pending = self._pending.slice(rows)
            self._again = False
            try:
                self._output.drain()
            except OSError:  # it keeps what found no room; the journal has that as well, and needs the room
                if self._journal is not None:
                    self._start_again()

    def _start_again(self) -> None:
        """Remove what was written as Parquet; `close` makes it of the journal."""
        self._again, self._pending = True, None
        if self._output is not None:
            with contextlib.suppress(OSError):
                self._output.remove()
            self._output = None

    def _finish(self) -> None:
        """Complete the Parquet file, and give it its name."""
        if self._journal is not None:
            self._journal.lock()
        if not self._again:
            self._flush(0)
        if self._again:
            self._output = self._rewritten()
        if self._output is None:
            raise AssertionError("a row group is written by now")
        self._output.finish(durable=self._journal is not None)
        if not self._output.is_at(self._target):  # where it is after a close() that was interrupted
            with contextlib.suppress(FileNotFoundError):
                self._temporary.chmod(stat.S_IMODE(self._target.stat().st_mode))
            self._temporary.replace(self._target)
        if self._journal is not None:
            sync_directory(self._target.parent)

    def _rewritten(self) -> Output:
        """Write the Parquet file anew, from the journal."""
        if self._journal is None:
            raise ValueError(self._lost())
        with self._journal.path.open("rb") as file:
            whole = _whole(file)
            if whole is None or whole.end < self._journal.end:
                raise ValueError(f"{self._journal.path}: damaged; recover gives the batches before that")
            return _rewrite(file, whole, self._temporary, self._row_group_tokens)

    def _keep_journal(self, failure: BaseException | None) -> None:
        """Remove what was written as Parquet, and leave the journal to the next `close`, or to `recover`."""
        if self._journal is None or not self._journal.end:
            return
        self._start_again()
        self._journal.release()
        if failure is not None and self._journal.path.exists():
            failure.add_note(
                f"{self._journal.path} holds what was written: make room, and call close() again, or run "
                f"offpol-diag recover {self.path}"
            )


class Output:
    """A Parquet file in the making. What its disk has no room for is kept, and written later.

    So Arrow, which leaves a damaged file after an error, never sees one.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._sink = Sink(path)
        options = {"compression": "zstd", "compression_level": 1, "write_batch_size": 1 << 16}
        self._parquet = pq.ParquetWriter(self._sink, schema, **options, **_encodings(schema))

    def add(self, table: pa.Table) -> None:
        """Encode a row group."""
        self._parquet.write_table(table, row_group_size=max(1, table.num_rows))

    def drain(self) -> None:
        """Write what is encoded.

        Raises:
            OSError: There is no room for it; it may be tried again.
        """
        self._sink.drain()

    def finish(self, durable: bool) -> None:
        """Write the footer, wait until all is on disk if asked to, and close; a second time does nothing."""
        self._parquet.close()
        self._sink.finish(durable)

    def is_at(self, path: Path) -> bool:
        """Return whether the finished file bears that name."""
        try:
            return self._sink.made is not None and os.path.samestat(self._sink.made, path.stat())
        except FileNotFoundError:
            return False

    def remove(self) -> None:
        """Close the file, and remove it unless it has been renamed."""
        self._parquet.is_open = False  # or Arrow would write a footer
        self._sink.release()
        self._sink.path.unlink(missing_ok=True)


class Sink(io.RawIOBase):
    """A file that keeps what it is given in memory until `drain`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.made: os.stat_result | None = None
        """What the file was when it was finished."""
        self._file: io.FileIO | None = None
        self._held: list[bytes] = []
        self._end = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Keep a copy of some bytes."""
        self._held.append(bytes(data))
        return len(self._held[-1])

    def drain(self) -> None:
        """Write what is kept; what finds no room stays, and goes to the same place the next time."""
        if self._held and self._file is None:
            self._file = self.path.open("wb", buffering=0)
        while self._held and self._file is not None:
            self._end = put(self._file, self._end, self._held[0])
            del self._held[0]

    def finish(self, durable: bool) -> None:
        """Write all, wait until it is on disk if asked to, and close the file."""
        self.drain()
        if self._file is not None and not self._file.closed:
            if durable:
                sync(self._file.fileno())
            self.made = os.fstat(self._file.fileno())
            self._file.close()
            self._file = None

    def release(self) -> None:
        """Close the file, and forget what is kept."""
        self._held = []
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


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
            whole, size = _whole(file), file.seek(0, os.SEEK_END)
            file.seek(0)
            begin = file.read(len(OLD_JOURNAL))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(found)) from error
        if whole is None and begin == OLD_JOURNAL:
            raise ValueError(f"{found}: an earlier version made it; recover it with that version")
        if whole is None:
            raise ValueError(
                f"{found}: it holds no whole batch; its writer was killed before the first, or it is damaged"
            )
        if whole.end == size and OWN.fullmatch(found.name):  # the unfinished file may be what fills the disk
            found.with_suffix(".tmp").unlink(missing_ok=True)
        temporary = beside(target.resolve())
        output = _rewrite(file, whole, temporary, ROW_GROUP_TOKENS)
        try:
            output.finish(durable=True)
            temporary.replace(target.resolve())
            sync_directory(target.resolve().parent)
        finally:
            output.remove()
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


def _whole(file: BinaryIO) -> Whole | None:
    """Find out which batches of a journal are whole; None if none is."""
    found = None
    for number, (table, end) in enumerate(_frames(file), 1):
        found = Whole(number, end, table.schema)  # a later batch has all columns and the wider types
    return found


def _row_group(pending: pa.Table, at_least: int, most: int) -> int:
    """Return how many rows make the next row group, of `most` tokens or all; 0 if there are not enough."""
    if not pending.num_rows:
        return 0
    ends = np.cumsum(pc.list_value_length(pending["rollout_log_probs"]).to_numpy())
    return 0 if ends[-1] < at_least else min(int(np.searchsorted(ends, most)) + 1, pending.num_rows)


def _rewrite(file: BinaryIO, whole: Whole, path: Path, at_least: int) -> Output:
    """Write the whole batches of a journal as row groups of so many tokens, without the footer."""
    output, pending = Output(path, whole.schema), whole.schema.empty_table()
    try:
        for table, end in _frames(file):
            pending = pa.concat_tables([pending, _widened(table, whole.schema)])
            while rows := _row_group(pending, 0 if end == whole.end else at_least, at_least):
                output.add(pending.slice(0, rows))
                output.drain()
                pending = pending.slice(rows)
    except BaseException:
        output.remove()
        raise
    return output


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


def _stamped(given: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """Return the metadata as JSON: what was given, and versions unless `provenance` has its own."""
    versions = {}
    for name in ("vllm", "sglang", "verl", "trl", "torch"):  # which decide about log-probs
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)  # without importing it
    known = {"versions": versions, **{k: v for k, v in given.items() if v is not None}, **provenance}
    if not known["versions"]:
        del known["versions"]
    try:
        return json.dumps({**known, "format": 1})
    except TypeError as error:
        raise ValueError(f"provenance: {error}; give strings, numbers, lists and dictionaries") from error


def _encodings(schema: pa.Schema) -> dict[str, Any]:
    """Choose encodings: byte-split for float lists, a dictionary for all else; with checksums."""
    lists = {f.name: f.type.value_type for f in schema if pa.types.is_list(f.type)}
    paths = {name: f"{name}.list.element" if name in lists else name for name in schema.names}
    split = [paths[name] for name, kind in lists.items() if pa.types.is_floating(kind)]
    rest = [path for path in paths.values() if path not in split]
    split_bytes = dict.fromkeys(split, "BYTE_STREAM_SPLIT")
    return {"use_dictionary": rest, "column_encoding": split_bytes, "write_page_checksum": True}


def _table(columns: Mapping[str, Any], dtype: str, schema: pa.Schema | None) -> pa.Table:
    """Convert one batch to a table [S rows]."""
    _require(columns, schema)
    mask = columns.get("response_mask")
    keep = None  # [S, L] bool: true up to the last 1 of each row
    if _is_padded(mask):
        keep = np.logical_or.accumulate((_numbers("response_mask", mask, "int8") != 0)[:, ::-1], axis=1)[
            :, ::-1
        ]
    tokens = {k: _ragged(k, v, keep, dtype) for k, v in columns.items() if _is_per_token(k, v)}
    _agree(tokens)
    rows = len(tokens["rollout_log_probs"].lengths)
    arrays = {k: _token_array(k, v, dtype) for k, v in tokens.items()}
    arrays |= {k: _scalar_array(k, v, rows) for k, v in columns.items() if k not in tokens}
    return pa.table(arrays)


def _conformed(table: pa.Table, schema: pa.Schema | None, negative: set[str]) -> pa.Table:
    """Give a batch the columns and types of those before it, without loss, or wider ones that suit all."""
    if schema is None:
        return table
    wider = schema
    for field in table.schema:
        i = schema.get_field_index(field.name)
        if i < 0:
            wider = wider.append(field)
        elif schema.types[i] != field.type:
            unsigned = schema.types[i] == pa.int64() and field.name not in negative
            wider = wider.set(i, pa.field(field.name, _wider(schema.field(i), field.type, unsigned)))
    try:
        return _widened(table, wider)
    except pa.ArrowException as slip:
        raise ValueError(f"its types differ from those of the first batch: {slip}") from slip


def _wider(field: pa.Field, new: pa.DataType, unsigned: bool) -> pa.DataType:
    """Return the type that holds what a column has had so far and what it has now.

    Arrow also casts between text and numbers, which would change values without a word.
    """
    old = field.type
    if pa.types.is_null(old) or (unsigned and new == pa.uint64()):
        return new
    numbers = all(pa.types.is_integer(one) or pa.types.is_floating(one) for one in (old, new))
    if not numbers and not pa.types.is_null(new):
        raise ValueError(f"its types differ from those of the first batch: {field.name} is {new}, was {old}")
    return old


def _widened(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Cast a batch to wider types, with nulls for columns that it lacks."""
    for field in schema:
        if field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(schema.names).cast(schema)


def _negative(table: pa.Table) -> set[str]:
    """Return the columns of signed integers that have a value below 0."""
    signed = [name for name in table.column_names if table.schema.field(name).type == pa.int64()]
    return {name for name in signed if (pc.min(table[name]).as_py() or 0) < 0}


def _require(columns: Mapping[str, Any], schema: pa.Schema | None) -> None:
    if "rollout_log_probs" not in columns:
        raise ValueError("rollout_log_probs is missing; pass the log-probs of the engine that sampled")
    if not columns.keys() & {"old_log_probs", "current_log_probs"}:
        raise ValueError("old_log_probs and current_log_probs are both missing; pass at least one of them")
    if schema is not None:
        needed = {*FLOAT_TOKENS, *INT_TOKENS, *SCALARS}
        if odd := (columns.keys() ^ set(schema.names)) & needed:
            names = ", ".join(sorted(odd))
            raise ValueError(f"{names}: not in every batch; pass the columns of the first batch every time")


def _is_padded(value: Any) -> bool:
    return getattr(value, "ndim", None) == 2


def _is_per_token(name: str, value: Any) -> bool:
    """Return whether a column is per token; advantages can be per sequence or per token."""
    if name != "advantages":
        return name in FLOAT_TOKENS or name in INT_TOKENS
    rows = isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.dtype.kind == "O")
    first = next(iter(value), 0.0) if rows else 0.0
    return _is_padded(value) or (not isinstance(first, str) and _numpy(first).ndim == 1)


def _numpy(value: Any) -> Array:
    """Convert a tensor on any device, or an array-like, to a NumPy array.

    Raises:
        ValueError: It holds masked values, which would count as any other.
    """
    if isinstance(value, list | tuple) and not {*map(type, value)} <= {int, float}:
        value = [_item(one) for one in value]
        if any(isinstance(one, bool) for one in value) and not all(isinstance(one, bool) for one in value):
            return np.array(value, object)  # NumPy would make True 1.0
    if not hasattr(value, "detach"):
        absent = getattr(value, "null_count", 0)  # of Arrow and Polars, which make it NaN
        if np.ma.is_masked(value) or (absent() if callable(absent) else absent):
            raise ValueError("masked or null values; pass their data, and 0 for them in response_mask")
        return np.asarray(value)
    if getattr(value, "is_meta", False):
        raise ValueError("a tensor on the device meta, which holds no numbers")
    value = value.detach().to("cpu")
    try:
        return np.asarray(value.numpy())
    except TypeError:  # bfloat16 and float8 are unknown to NumPy, and exact in float32
        return np.asarray(value.float().numpy())


def _item(value: Any) -> Any:
    """Return the Python number of a tensor or array without dimensions, and anything else as it is."""
    if np.ma.is_masked(value):
        return None
    return value.item() if hasattr(value, "item") and not getattr(value, "ndim", 0) else value


def _numbers(name: str, value: Any, kind: str, row: int | None = None) -> Array:
    """Convert to an array of numbers, and refuse what NumPy would make a number of, such as text and None."""
    where = name if row is None else f"{name}, sequence {row},"
    try:
        values = _numpy(value)
    except ValueError as slip:
        raise ValueError(f"{where} cannot be stored as {kind}: {slip}") from slip
    if values.dtype.kind in ("fiub" if name == "response_mask" else "fiu"):
        return values
    odd = "text" if values.dtype.kind in "US" else values.dtype.name
    if values.dtype == object:
        kinds = {type(one) for one in values.flat} - {float}
        odd = " and ".join(sorted("None" if kind is type(None) else kind.__name__ for kind in kinds))
        odd = "integers beyond 64 bits" if kinds == {int} else odd
    hint = "pass a number for every token, also where response_mask is 0"
    raise ValueError(f"{where} cannot be stored as {kind}: it holds {odd}; {hint}")


def _ragged(name: str, value: Any, keep: Array | None, dtype: str) -> Ragged:
    kind = str(INT_TOKENS.get(name, dtype))
    if _is_padded(value):
        values = _numbers(name, value, kind)
        if keep is None:
            raise ValueError(f"{name} is padded; pass response_mask {values.shape} as well, or ragged lists")
        if values.shape != keep.shape:
            raise ValueError(f"{name} is {values.shape} but response_mask is {keep.shape}; make them equal")
        return Ragged(values[keep], keep.sum(axis=1))
    rows = []
    for i, row in enumerate(value):
        rows.append(_numbers(name, row, kind, i))
        if rows[i].ndim != 1:
            raise ValueError(f"{name}, sequence {i}: shape {rows[i].shape}; pass [S, L] or S arrays [length]")
    return Ragged(np.concatenate(rows or [np.empty(0)]), np.array([len(row) for row in rows], np.int64))


def _agree(tokens: Mapping[str, Ragged]) -> None:
    wanted = tokens["rollout_log_probs"].lengths
    if wanted.sum() > np.iinfo(np.int32).max:
        raise ValueError(f"{wanted.sum()} tokens in a batch; write at most {np.iinfo(np.int32).max} at once")
    for name, (_, lengths) in tokens.items():
        if len(lengths) != len(wanted):
            raise ValueError(f"{name} has {len(lengths)} sequences but rollout_log_probs has {len(wanted)}")
        if (lengths != wanted).any():
            i = int(np.argmax(lengths != wanted))
            lengths_differ = f"{lengths[i]} tokens but rollout_log_probs has {wanted[i]}"
            raise ValueError(f"{name}, sequence {i}: {lengths_differ}; cover the same response tokens")


def _token_array(name: str, ragged: Ragged, dtype: str) -> pa.ListArray:
    kind = INT_TOKENS.get(name, FLOATS[dtype])
    values = _narrowed(name, ragged.values, kind.to_pandas_dtype())
    if name == "response_mask" and not np.isin(values, (0, 1)).all():
        raise ValueError("response_mask holds values besides 0 and 1; pass 1 for a token that counts")
    offsets = np.concatenate([[0], np.cumsum(ragged.lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values, kind))


def _narrowed(name: str, values: Array, kind: type[np.generic]) -> Array:
    try:
        with np.errstate(over="raise", invalid="ignore"):  # what is invalid is found below
            narrow = values.astype(kind)
    except FloatingPointError as slip:
        raise ValueError(f"{name} cannot be stored as {np.dtype(kind)}: {slip}") from slip
    if np.issubdtype(kind, np.integer) and (narrow != values).any():
        raise ValueError(f"{name} does not fit {np.dtype(kind)}; pass whole numbers in its range")
    return narrow


def _scalar_array(name: str, value: Any, rows: int) -> pa.Array:
    if getattr(value, "ndim", 0) > 1:
        known = ", ".join((*FLOAT_TOKENS, *INT_TOKENS, "advantages"))
        raise ValueError(f"{name} has {value.ndim} dimensions; only these are per token: {known}")
    times = getattr(getattr(value, "dtype", None), "kind", "") in tuple("mM")  # which would become integers
    plain = value.tolist() if hasattr(value, "tolist") and not times else value
    if isinstance(plain, str | bytes | bytearray) or not (isinstance(plain, Sequence) or np.ndim(plain)):
        plain = [plain] * rows
    if len(plain) != rows:
        raise ValueError(f"{name}: {len(plain)} values for {rows} sequences; pass one each, or one for all")
    try:
        if times:
            return pa.array(np.asarray(plain))
        items = [_item(v) for v in plain]
        if name not in NUMBERS:
            items = [None if isinstance(v, float) and math.isnan(v) else v for v in items]
        found = _typed(name, items, "uint64" in str(getattr(value, "dtype", "")))
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as slip:
        raise ValueError(f"{name} is not one plain value per sequence: {slip}") from slip
    if pa.types.is_nested(found.type):
        raise ValueError(f"{name} is not one plain value per sequence: {found.type}; pass strings or numbers")
    return found


def _typed(name: str, items: list[Any], unsigned: bool) -> pa.Array:
    """Convert to the type of a known column or, without a change of any value, to that of the items."""
    kinds = {type(one) for one in items} - {type(None)}
    if name in SCALARS:
        for one in items if name not in NUMBERS else ():
            if isinstance(one, bool) or not (one is None or isinstance(one, int) or float(one).is_integer()):
                raise ValueError(f"{one} is no whole number")
        return pa.array(items, SCALARS[name])
    if len(kinds) > 1 and not kinds <= {int, float}:
        raise ValueError(f"it mixes {', '.join(sorted(kind.__name__ for kind in kinds))}")
    large = kinds == {int} and (unsigned or max(one for one in items if one is not None) > 2**63 - 1)
    return pa.array(items, pa.uint64() if large else None)
