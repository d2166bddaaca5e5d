"""DumpWriter: from a trainer's tensors to a dump, batch by batch. Needs pyarrow and numpy, never torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import stat
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offpol_diag.wholefiles import beside

Array = npt.NDArray[Any]

METADATA_KEY = b"offpol_diag"
JOURNAL = ".journal"
FLOATS = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}
FLOAT_TOKENS = ("rollout_log_probs", "old_log_probs", "current_log_probs", "entropy")
INT_TOKENS = {"response_mask": pa.int8(), "token_ids": pa.int32()}
# Fixed, so that a first batch of whole rewards does not make every later batch integers.
NUMBERS = ("rewards", "advantages")
"""Columns whose values are numbers; in all others with a value per sequence a NaN is a null."""
SCALARS = {"rewards": pa.float64(), "step": pa.int64(), "policy_lag": pa.int64()}


class Ragged(NamedTuple):
    """A token column: `values` [T], cut into rows of `lengths` [S]."""

    values: Array
    lengths: Array


class DumpWriter:
    """Writes a dump: one row per sequence, ragged lists over response tokens.

    A context manager, which threads may share. The file appears under its name only when the block ends well;
    an exception leaves nothing behind. Until then every batch is also appended to a hidden journal beside it
    (an Arrow IPC stream, which needs no footer): if the process is killed, `recover` makes the dump of it.
    Values are stored as given: a NaN or a positive log-prob is for the reader to judge.

    Args:
        path: The Parquet file to make.
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
        journal: Whether to keep the journal. Without it a kill loses all.

    Attributes:
        path: The file, with its rank.

    Raises:
        ValueError: Bad input; the message says what, where, and what to do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        provenance: Mapping[str, Any] | None = None,
        row_group_tokens: int = 1_000_000,
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
        if not self.path.parent.is_dir():
            raise ValueError(f"{self.path}: its directory does not exist; make it first")
        if (
            self.path.exists() and not self.path.is_file()
        ):  # a device would be replaced, /dev/null by root even
            raise ValueError(f"{self.path}: a directory or a device, no file; choose another name")
        self._temporary = beside(self.path.resolve())
        self._metadata = {METADATA_KEY: _stamped(given, provenance or {})}
        self._row_group_tokens = row_group_tokens
        self._dtype = dtype
        self._batches = 0
        self._schema: pa.Schema | None = None
        self._pending: pa.Table | None = None
        self._file: pq.ParquetWriter | None = None
        # random, as numbers of processes come again
        name = self._temporary.with_suffix(f".{secrets.token_hex(4)}{JOURNAL}")
        self._journal = Journal(name) if journal else None
        self._closed = False
        self._lock = threading.RLock()

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
        are trimmed; zeros before it stay. Every other column is one value per sequence, or one for all.

        Args:
            rollout_log_probs: log π of each sampled token under the policy that sampled it, nats.
            old_log_probs: The same under the trainer's policy at the start of the step.
            current_log_probs: The same under the trainer's policy during the step.
            response_mask: 1 for a token that counts; 0 for tool output, observations and padding.
            advantages: One per sequence, or one per token.
            rewards: One per sequence.
            token_ids: The sampled tokens.
            entropy: Of the distribution each token was drawn from, nats.
            sequence_id: A name per sequence, string or integer.
            group_id: A name per prompt, shared by its samples.
            step: Training step.
            policy_lag: Trainer updates between the weights that sampled and the weights that train.
            **scalar_columns: Anything else with one value per sequence, for reports to group by.

        Raises:
            ValueError: A required column is missing, or columns disagree with each other or with those of
                the first batch. The batch is then not written.
        """
        columns = {**locals(), **scalar_columns}  # the parameters bear the columns' names
        del columns["self"], columns["scalar_columns"]
        with self._lock:
            if self._closed:
                raise ValueError(f"{self.path} is closed; open a new DumpWriter")
            try:
                table = _table({k: v for k, v in columns.items() if v is not None}, self._dtype, self._schema)
            except (TypeError, ValueError) as slip:
                raise ValueError(f"batch {self._batches}: {slip}") from slip
            self._batches += 1
            if table.num_rows:
                self._schema = table.schema
                if self._journal is not None:
                    self._journal.append(table.replace_schema_metadata(self._metadata))
                self._pending = table if self._pending is None else pa.concat_tables([self._pending, table])
                self._flush(self._row_group_tokens)

    def close(self) -> None:
        """Write what is pending and give the file its name. Closing twice does nothing."""
        with self._lock:
            if self._closed:
                return
            if self._pending is None:
                raise ValueError(f"{self.path}: no sequence was written; call write() before closing")
            try:
                self._flush(0)
                self._output().close()
                target = self.path.resolve()
                with contextlib.suppress(FileNotFoundError):
                    self._temporary.chmod(stat.S_IMODE(target.stat().st_mode))
                self._temporary.replace(target)
            finally:
                self.discard()

    def discard(self) -> None:
        """Close, and remove what is unfinished."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                with contextlib.suppress(OSError):  # where the disk is full
                    self._file.close()  # a second time does nothing
                self._temporary.unlink(missing_ok=True)
            if self._journal is not None:
                self._journal.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close() if kind is None else self.discard()

    def _flush(self, at_least: int) -> None:
        """Write row groups while the pending rows hold at least that many tokens; 0 writes all."""
        while self._pending is not None and self._pending.num_rows:
            ends = np.cumsum(pc.list_value_length(self._pending["rollout_log_probs"]).to_numpy())
            if ends[-1] < at_least:
                return
            rows = int(np.searchsorted(ends, self._row_group_tokens)) + 1
            self._output().write_table(self._pending.slice(0, rows), row_group_size=rows)
            self._pending = self._pending.slice(rows)

    def _output(self) -> pq.ParquetWriter:
        if self._file is None and self._schema is not None:
            schema = self._schema.with_metadata(self._metadata)
            self._file = _parquet(self._temporary, schema)
        return self._file


class Journal:
    """An Arrow IPC stream of the batches written so far, locked while its writer lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._stream: Any = None

    def append(self, table: pa.Table) -> None:
        """Append a batch, and hand it to the operating system, where it survives this process."""
        if self._file is None:
            self._file = self.path.open("wb")
            _locked(self._file)
            self._stream = pa.ipc.new_stream(self._file, table.schema)
        self._stream.write_table(table)
        self._file.flush()

    def remove(self) -> None:
        """Close and remove the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self.path.unlink(missing_ok=True)


def recover(path: str | os.PathLike[str], to: str | os.PathLike[str] | None = None) -> Path:
    """Make the dump that a killed `DumpWriter` did not finish: every batch that it had been given, once.

    Args:
        path: The dump as it was to be called, or the journal beside it (`.NAME.….journal`).
        to: Another name for the dump, needed for a journal given by its own name.

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
        temporary = beside(target.resolve())
        try:
            _rewrite(file, found, temporary)
            temporary.replace(target.resolve())
        finally:
            temporary.unlink(missing_ok=True)
    found.with_suffix("").with_suffix(".tmp").unlink(missing_ok=True)
    found.unlink()
    return target


def _rewrite(file: BinaryIO, name: Path, temporary: Path) -> None:
    """Write the whole batches of a journal as Parquet; a last one may be torn."""
    try:
        stream = pa.ipc.open_stream(file)
        first = stream.read_next_batch()
    except (pa.ArrowException, OSError, StopIteration) as torn:
        raise ValueError(f"{name}: it holds no whole batch; its writer was killed before the first") from torn
    pending, tokens, more = [first], 0, True
    with _parquet(temporary, first.schema) as output:
        while more:
            try:
                pending.append(stream.read_next_batch())
            except (pa.ArrowException, OSError, StopIteration):
                more = False
            tokens = sum(len(batch["rollout_log_probs"].flatten()) for batch in pending)
            if not more or tokens >= 1_000_000:
                table = pa.Table.from_batches(pending)
                output.write_table(table, row_group_size=max(1, table.num_rows))
                pending = []


def _locked(file: BinaryIO) -> bool:
    """Lock a file as long as it is open; False if another process has it, True where there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a system, or a file system, without locks
        pass
    return True


def _parquet(path: Path, schema: pa.Schema) -> pq.ParquetWriter:
    options = {"compression": "zstd", "compression_level": 1, "write_batch_size": 1 << 16}
    return pq.ParquetWriter(path, schema, **options, **_encodings(schema))


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
    """Convert one batch to a table [S rows], with the types of `schema` if given."""
    _require(columns, schema)
    mask = columns.get("response_mask")
    keep = None  # [S, L] bool: true up to the last 1 of each row
    if _is_padded(mask):
        keep = np.logical_or.accumulate((_numpy(mask) != 0)[:, ::-1], axis=1)[:, ::-1]
    tokens = {k: _ragged(k, v, keep) for k, v in columns.items() if _is_per_token(k, v)}
    _agree(tokens)
    rows = len(tokens["rollout_log_probs"].lengths)
    arrays = {k: _token_array(k, v, dtype) for k, v in tokens.items()}
    arrays |= {k: _scalar_array(k, v, rows) for k, v in columns.items() if k not in tokens}
    table = pa.table(arrays)
    try:  # to the types of the first batch, without loss
        return table if schema is None else table.select(schema.names).cast(schema)
    except pa.ArrowInvalid as slip:
        raise ValueError(f"its types differ from those of the first batch: {slip}") from slip


def _require(columns: Mapping[str, Any], schema: pa.Schema | None) -> None:
    if "rollout_log_probs" not in columns:
        raise ValueError("rollout_log_probs is missing; pass the log-probs of the engine that sampled")
    if not columns.keys() & {"old_log_probs", "current_log_probs"}:
        raise ValueError("old_log_probs and current_log_probs are both missing; pass at least one of them")
    if schema is not None and columns.keys() != set(schema.names):
        odd = ", ".join(sorted(columns.keys() ^ set(schema.names)))
        raise ValueError(f"{odd}: not in every batch; pass the columns of the first batch every time")


def _is_padded(value: Any) -> bool:
    return getattr(value, "ndim", None) == 2


def _is_per_token(name: str, value: Any) -> bool:
    """Return whether a column is per token; advantages can be per sequence or per token."""
    if name != "advantages":
        return name in FLOAT_TOKENS or name in INT_TOKENS
    first = value[0] if isinstance(value, Sequence) and value else 0.0
    return _is_padded(value) or _numpy(first).ndim == 1


def _numpy(value: Any) -> Array:
    """Convert a tensor on any device, or an array-like, to a NumPy array."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    value = value.detach().to("cpu")
    try:
        return np.asarray(value.numpy())
    except TypeError:  # bfloat16 and float8 are unknown to NumPy, and exact in float32
        return np.asarray(value.float().numpy())


def _ragged(name: str, value: Any, keep: Array | None) -> Ragged:
    if _is_padded(value):
        values = _numpy(value)
        if keep is None:
            raise ValueError(f"{name} is padded; pass response_mask {values.shape} as well, or ragged lists")
        if values.shape != keep.shape:
            raise ValueError(f"{name} is {values.shape} but response_mask is {keep.shape}; make them equal")
        return Ragged(values[keep], keep.sum(axis=1))
    rows = [_numpy(row) for row in value]
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"{name}, sequence {i}: shape {row.shape}; pass [S, L] or S arrays [length]")
    return Ragged(np.concatenate(rows or [np.empty(0)]), np.array([len(row) for row in rows], np.int64))


def _agree(tokens: Mapping[str, Ragged]) -> None:
    wanted = tokens["rollout_log_probs"].lengths
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
        with np.errstate(over="raise"):
            narrow = values.astype(kind)
    except (FloatingPointError, TypeError, ValueError) as slip:
        raise ValueError(f"{name} cannot be stored as {np.dtype(kind)}: {slip}") from slip
    if np.issubdtype(kind, np.integer) and (narrow != values).any():
        raise ValueError(f"{name} does not fit {np.dtype(kind)}; pass whole numbers in its range")
    return narrow


def _scalar_array(name: str, value: Any, rows: int) -> pa.Array:
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, str) or not isinstance(plain, Sequence):
        plain = [plain] * rows
    if len(plain) != rows:
        raise ValueError(f"{name}: {len(plain)} values for {rows} sequences; pass one each, or one for all")
    try:
        items = [v.item() if hasattr(v, "item") else v for v in plain]
        if name not in NUMBERS:
            items = [None if isinstance(v, float) and math.isnan(v) else v for v in items]
        return pa.array(items, SCALARS.get(name))
    except (pa.ArrowException, OverflowError, ValueError) as slip:
        raise ValueError(f"{name} is not one plain value per sequence: {slip}") from slip
