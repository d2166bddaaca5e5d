"""DumpWriter: a trainer's tensors → whole Parquet files in a folder. Needs numpy and pyarrow alone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from offpol_diag.dump import schema
from offpol_diag.dump.check import good_rows
from offpol_diag.dump.pack import Rows
from offpol_diag.dump.schema import COLUMNS, CURRENT, MASK, OLD, ROLLOUT
from offpol_diag.errors import DumpError
from offpol_diag.files import beside, placed

Array = npt.NDArray[Any]
KEY = b"offpol_diag"
"""Key of the metadata that say how the numbers were made."""
VERSIONED = ("vllm", "sglang", "verl", "trl", "torch")
"""Packages whose installed versions are noted."""
_PARTS: dict[str, int] = {}
"""Beginning of the name of a file → how many this process has written."""


class DumpWriter:
    """Writes a folder of Parquet files, one row per sequence: `step_000100-rank00003-0.parquet`.

    A file appears under its name when it is whole: when the step changes, when it holds `file_tokens` tokens,
    on `flush` and on leaving the block. So a process that is killed loses the step it was at alone, and
    a run that is resumed replaces the files of the steps that it repeats. The folder is the dump.

    Args:
        folder: where to write; it is made.
        rank: of this process; each rank has files of its own.
        file_tokens: tokens after which a file is written, and so about what a reader holds at once.
        **provenance: what a report should say of the run: trainer, engine, temperature, top_p, logprobs
            ("raw" or "processed"), rollout_dtype, quantization, model, …; anything that JSON can hold.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, rank: int = 0, file_tokens: int = 1 << 20, **provenance: Any
    ) -> None:
        self.folder = Path(folder).absolute()  # now: the process may change its directory
        self.folder.mkdir(parents=True, exist_ok=True)
        self._metadata = stamped(provenance | ({"rank": rank} if rank else {}))
        self._rank, self._most = rank, file_tokens
        self._held: pa.Table | None = None
        self._step: Any = None

    def write(self, *, step: Any = None, **columns: Any) -> None:
        """Add a batch of S sequences of one step.

        A column of tokens is padded, [S, L], with a padded `response_mask` whose last 1 ends each row, or S
        arrays of their own lengths. All others have one value per sequence, or one for all. The table of
        docs/dumps.md has the columns; any other one is for reports to group by.

        Args:
            step: the training step; of a list the first one names the file.
            **columns: rollout_log_probs and old_log_probs or current_log_probs at least.

        Raises:
            ValueError: what is wrong with which column, sequence and token; the batch is not written.
            OSError: the disk is full; the buffer is kept, and written by the next `flush`.
        """
        table = to_table(columns | {"step": step})
        if not table.num_rows:
            return
        _require_readable(table)
        first = table["step"][0].as_py() if "step" in table.column_names else None
        if first != self._step:
            self.flush()
            self._step = first
        if self._held is not None:
            if odd := ({*table.column_names} ^ {*self._held.column_names}) & {*schema.TOKENS}:
                what = f"{min(odd)}: one batch of this step has it, another does not"
                raise ValueError(f"{what}; pass it in all")
            table = pa.concat_tables([self._held, table], promote_options="permissive")
        self._held = table
        if (pc.sum(pc.list_value_length(table[ROLLOUT])).as_py() or 0) >= self._most:
            self.flush()

    def flush(self) -> Path | None:
        """Write what is buffered to a file, and return its path; None if nothing is."""
        if self._held is None:
            return None
        stem = f"{'' if self._step is None else f'step_{self._step:06}-'}rank{self._rank:05}-"
        part = _PARTS.get(f"{self.folder}/{stem}", 0)
        path = self.folder / f"{stem}{part}.parquet"
        write_tables([self._held], path, self._metadata)
        for old in {*self.folder.glob(f"{stem}*.parquet")} - {path} if not part else ():
            old.unlink()  # of a run before this one
        self._held, _PARTS[f"{self.folder}/{stem}"] = None, part + 1
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()  # after an exception too: what was written is good


def stamped(provenance: Mapping[str, Any]) -> bytes:
    """Return provenance as metadata of a file, with the installed versions where it does not say them."""
    versions = {}
    for name in VERSIONED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)  # without importing it
    return json.dumps({"versions": versions, **provenance}).encode()


def write_tables(tables: Iterable[pa.Table], path: Path, provenance: bytes = b"{}", group: int = 0) -> int:
    """Write tables as row groups of a file that appears when it is whole, and return its number of rows.

    The first one has its columns. Pages have checksums. Readers pass over hidden files, as it is until then.
    """
    tables = iter(tables)
    if (first := next(tables, None)) is None:
        return 0
    rows, kept, hidden = 0, first.schema.with_metadata({KEY: provenance}), beside(path.resolve())
    lists = (x for x in kept if schema.is_list(x.type) and pt.is_floating(x.type.value_type))
    encoding: Any = {f"{x.name}.list.element": "BYTE_STREAM_SPLIT" for x in lists}
    how = {"column_encoding": encoding, "use_dictionary": False, "compression": "zstd"}
    try:
        with pq.ParquetWriter(hidden, kept, write_page_checksum=True, **how) as writer:
            for table in chain([first], tables):
                alike = pa.concat_tables([first.slice(0, 0), table], promote_options="permissive")
                writer.write_table(alike.select(kept.names).cast(kept), row_group_size=group or None)
                rows += len(table)
        placed(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)
    return rows


# ---------------------------------------------------------------- a batch → a table


def to_table(columns: Mapping[str, Any], floats: pa.DataType = schema.FLOAT) -> pa.Table:
    """Return a batch, as `DumpWriter.write` takes it, as a table [S rows] with log-probs of type `floats`.

    Raises:
        ValueError: what is wrong with which column and sequence; values are not looked at.
    """
    given = {name: one for name, one in columns.items() if one is not None}
    if ROLLOUT not in given or not given.keys() & {OLD, CURRENT}:
        raise ValueError(f"pass {ROLLOUT}, and {OLD} or {CURRENT}")
    keep = None  # [S, L]: true up to the last 1 of each row
    if getattr(given.get(MASK), "ndim", 1) == 2:
        keep = np.logical_or.accumulate(as_array(given[MASK])[:, ::-1] != 0, axis=1)[:, ::-1]
    rows = len(given[ROLLOUT])
    table = pa.table({name: _column(name, value, rows, keep, floats) for name, value in given.items()})
    wanted = pc.list_value_length(table[ROLLOUT]).to_numpy()
    for field in table.schema:
        if schema.is_list(field.type) and field.name in schema.OF_TOKENS:
            lengths = pc.list_value_length(table[field.name]).to_numpy()
            if (odd := np.flatnonzero(lengths != wanted)).size:
                what = f"{field.name}, sequence {odd[0]}: {lengths[odd[0]]} tokens but {ROLLOUT} has"
                raise ValueError(f"{what} {wanted[odd[0]]}; cover the same response tokens")
    return table


def as_array(value: Any) -> Array:
    """Return a tensor on any device, or an array-like, as an array; types that NumPy lacks become float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype).startswith(("torch.bfloat16", "torch.float8")) else value
    return np.asarray(value)


def _column(name: str, value: Any, rows: int, keep: Array | None, floats: pa.DataType) -> pa.Array:
    """Return a column: lists, of tokens up to the last that counts, or one value per sequence."""
    column, width = COLUMNS.get(name), getattr(value, "ndim", 1)
    several = isinstance(value, list | tuple | np.ndarray) and width > 0 and len(value) > 0
    nested = width > 1 or (several and np.ndim(value[0]) == 1)
    if column is None or column.holds == "row" or (column.holds == "either" and not nested):
        return _scalars(name, value, rows, column.stored if column else None)
    if width > 1:
        values = as_array(value)
        if keep is None or values.shape != keep.shape or column.holds == "list":
            shape = "" if keep is None else f" {keep.shape}"
            raise ValueError(f"{name} is padded, {values.shape}: pass a {MASK}{shape} of its shape, or lists")
        flat, lengths = values[keep], keep.sum(1)
    else:
        each = [as_array(() if one is None and column.holds == "list" else one) for one in value]
        if odd := [i for i, one in enumerate(each) if one.ndim != 1]:
            raise ValueError(f"{name}, sequence {odd[0]}: pass [S, L] or S arrays [length]")
        flat, lengths = np.concatenate([np.empty(0, np.int8), *each]), np.array([*map(len, each)], int)
    if flat.dtype.kind not in ("fiub" if name == MASK else "fiu"):
        kind = flat.dtype.name
        raise ValueError(f"{name} holds {kind}; pass a number for every token, also where {MASK} is 0")
    dtype: Any = floats if column.stored == schema.FLOAT else column.stored
    with np.errstate(over="ignore", invalid="ignore"):
        stored = flat.astype(dtype.to_pandas_dtype())
    if pt.is_integer(dtype) and (stored != flat).any():
        raise ValueError(f"{name} does not fit {dtype}; pass whole numbers in its range")
    offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int64)).cast(pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(stored, dtype))


def _scalars(name: str, value: Any, rows: int, dtype: pa.DataType | None) -> pa.Array:
    """Return one value per sequence, of a type or of the one that Arrow finds."""
    value = as_array(value) if hasattr(value, "detach") else value
    each = value if getattr(value, "ndim", int(isinstance(value, list | tuple))) else [value] * rows
    if isinstance(each, list | tuple):
        each = [one.item() if hasattr(one, "item") and not np.ndim(one) else one for one in each]
    try:
        found = pa.array(each, from_pandas=dtype != schema.DOUBLE)  # a label that is NaN is null
        found = found.cast(dtype) if dtype else found
        if pt.is_nested(found.type):
            raise ValueError(f"{found.type}; pass strings or numbers")
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not one plain value per sequence: {error}") from error
    return found


def _require_readable(table: pa.Table) -> None:
    """Refuse values by the rules of the reader, and the trainer's log-probs by those of the rollout's."""
    batch, many = table.combine_chunks().to_batches()[0], np.arange(len(table))
    columns = {name: name for name in table.column_names if name in COLUMNS}
    for name in (name for name in schema.LOG_PROBS if name in columns):
        try:
            good_rows(Rows(batch, columns | {ROLLOUT: name}, (), many, "the batch", many), None)
        except DumpError as error:
            raise ValueError(f"{error.message}; {error.hint.partition('; if not')[0]}") from None
