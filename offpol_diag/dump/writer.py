"""DumpWriter: a trainer's tensors → whole Parquet files in a folder. Needs numpy and pyarrow alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from offpol_diag.dump.schema import (
    COLUMNS,
    CURRENT,
    DIGESTS,
    LOG_PROBS,
    MASK,
    OLD,
    ROLLOUT,
    TOKENS,
    WEIGHT_VERSIONS,
    Column,
    is_list,
)
from offpol_diag.files import beside, placed

Array = npt.NDArray[Any]
KEY = b"offpol_diag"
"""Key of the metadata that say how the numbers were made."""
VERSIONED = ("vllm", "sglang", "verl", "trl", "torch")
"""Packages whose installed versions are noted."""
TOLERANCE = 1e-3
"""Largest log-prob in nats that counts as rounding."""
UNKNOWN = -1
"""Version of the weights of a token of which nothing is known."""
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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{folder}: no folder can be made there ({error.strerror}); choose another name"
            ) from error
        if provenance.get("logprobs") not in (None, "raw", "processed"):
            raise ValueError(f"logprobs={provenance['logprobs']!r}: choose raw or processed")
        self._metadata = stamped(provenance | ({"rank": rank} if rank else {}))
        self._rank, self._most = rank, file_tokens
        self._held: list[pa.Table] = []
        self._tokens = 0
        self._step: int | None = None

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
            OSError: the disk is full; what is held is kept, and written by the next `flush`.
        """
        table = to_table(columns | {"step": step})
        if not table.num_rows:
            return
        first = table["step"][0].as_py() if "step" in table.column_names else None
        if first != self._step:
            self.flush()
            self._step = first
        if self._held and (odd := ({*table.column_names} ^ {*self._held[0].column_names}) & {*TOKENS}):
            raise ValueError(
                f"{min(odd)}: a batch has it, and another one of this step has not; pass it in all"
            )
        try:
            pa.unify_schemas(
                [self._held[0].schema, table.schema], promote_options="permissive"
            ) if self._held else None
        except pa.ArrowException as error:
            raise ValueError(
                f"the types of this batch are not those of the ones before it: {error}"
            ) from error
        self._held.append(table)
        self._tokens += int(pc.sum(pc.list_value_length(table[ROLLOUT])).as_py() or 0)
        if self._tokens >= self._most:
            self.flush()

    def flush(self) -> Path | None:
        """Write what is held to a file, and return its path; None where nothing is held."""
        if not self._held:
            return None
        step = "" if self._step is None else f"step_{self._step:06}-"
        stem = f"{step}rank{self._rank:05}-"
        part = _PARTS.get(f"{self.folder}/{stem}", 0)
        path = self.folder / f"{stem}{part}.parquet"
        write_table(pa.concat_tables(self._held, promote_options="permissive"), path, self._metadata)
        for old in self.folder.glob(f"{stem}*.parquet") if not part else ():
            if old != path:  # of a run before this one
                old.unlink()
        self._held, self._tokens, _PARTS[f"{self.folder}/{stem}"] = [], 0, part + 1
        return path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()  # after an exception too: what was written is good


def stamped(provenance: Mapping[str, Any]) -> bytes:
    """Return provenance as metadata of a file, with the installed versions where it does not say them."""

    def installed(name: str) -> str | None:
        try:
            return metadata.version(name)  # without importing it
        except metadata.PackageNotFoundError:
            return None

    there = {one: found for one in VERSIONED if (found := installed(one))}
    try:
        return json.dumps({"versions": there, **provenance}).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the provenance cannot be stored as JSON: {error}; pass plain values") from error


def write_table(table: pa.Table, path: Path, said: bytes = b"{}", group: int | None = None) -> None:
    """Write a table that appears whole or not at all, with checksums; readers pass over hidden files."""
    lists = {one.name: f"{one.name}.list.element" for one in table.schema if is_list(one.type)}
    floats = [
        path for name, path in lists.items() if pt.is_floating(table.schema.field(name).type.value_type)
    ]
    hidden = beside(path.resolve())
    try:
        pq.write_table(
            table.replace_schema_metadata({KEY: said}),
            hidden,
            compression="zstd",
            column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
            use_dictionary=[x for one in table.schema if (x := lists.get(one.name, one.name)) not in floats],
            write_page_checksum=True,
            row_group_size=group or None,
        )
        placed(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)


# ---------------------------------------------------------------- a batch → a table


def to_table(columns: Mapping[str, Any], floats: pa.DataType | None = None, refuses: bool = True) -> pa.Table:
    """Return a batch as a table, [S rows].

    Args:
        columns: as `DumpWriter.write` takes them.
        floats: the type of log-probs; float32 by default.
        refuses: whether values that a reader would refuse are refused.

    Raises:
        ValueError: what is wrong with which column, sequence and token.
    """
    given = {name: one for name, one in columns.items() if one is not None}
    if ROLLOUT not in given or not given.keys() & {OLD, CURRENT}:
        raise ValueError(f"pass {ROLLOUT}, and {OLD} or {CURRENT}")
    keep = None  # [S, L]: true up to the last 1 of each row
    if getattr(given.get(MASK), "ndim", 1) == 2:
        keep = np.logical_or.accumulate((_numbers(MASK, given[MASK]) != 0)[:, ::-1], axis=1)[:, ::-1]
    of_tokens = [name for name, one in given.items() if name in COLUMNS and _per_token(COLUMNS[name], one)]
    rows = {name: _rows(name, given[name], keep) for name in of_tokens if name != WEIGHT_VERSIONS}
    lengths = [len(row) for row in rows[ROLLOUT]]
    if WEIGHT_VERSIONS in of_tokens:
        rows[WEIGHT_VERSIONS] = _versions(given[WEIGHT_VERSIONS], lengths, keep)
    for name, each in rows.items():
        if len(each) != len(lengths):
            raise ValueError(f"{name} has {len(each)} sequences but {ROLLOUT} has {len(lengths)}")
        for i, (row, length) in enumerate(zip(each, lengths, strict=True)):
            if len(row) != length:
                what = f"{len(row)} tokens but {ROLLOUT} has {length}"
                raise ValueError(f"{name}, sequence {i}: {what}; cover the same response tokens")
    arrays = {}
    for name, each in rows.items():
        kind = COLUMNS[name].stored
        arrays[name] = _lists(name, each, floats or kind if pt.is_float32(kind) else kind)
    if MASK in arrays and not np.isin(values := arrays[MASK].values.to_numpy(), (0, 1)).all():
        raise ValueError(
            f"{MASK} holds {values[~np.isin(values, (0, 1))][0]}; pass 1 for a token that counts, and 0"
        )
    if refuses:
        _require_readable(arrays, lengths)
    for name, one in given.items():
        if name in COLUMNS and COLUMNS[name].holds == "list":
            arrays[name] = _lists(name, _rows(name, one, None, own=True), COLUMNS[name].stored)
        elif name not in arrays:
            arrays[name] = _scalars(name, one, len(lengths))
        if len(arrays[name]) != len(lengths):
            raise ValueError(
                f"{name} has {len(arrays[name])} values for {len(lengths)} sequences; pass one each"
            )
    if len(there := [one for one in DIGESTS if one in arrays]) == 1 or (
        there and arrays[there[0]].is_null() != arrays[there[1]].is_null()
    ):
        raise ValueError(f"{' and '.join(there)}: digests are compared: pass both of a sequence, or none")
    return pa.table({name: arrays[name] for name in given})


def _per_token(column: Column, value: Any) -> bool:
    """Return whether a column has a value per token; advantages may have either."""
    if column.holds != "either":
        return column.holds == "tokens"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return (
            len(value) > 0
            and np.ndim(value[0].detach().cpu() if hasattr(value[0], "detach") else value[0]) == 1
        )
    return getattr(value, "ndim", 0) == 2 or (
        isinstance(value, np.ndarray) and value.dtype.kind == "O" and np.ndim(value[0]) == 1
    )


def _rows(name: str, value: Any, keep: Array | None, own: bool = False) -> list[Array]:
    """Return a padded or ragged column as an array per sequence; `own`: of lengths of its own."""
    if getattr(value, "ndim", 1) > 1:
        values = _numbers(name, value)
        if own or keep is None or values.shape != keep.shape:
            shape = f" {keep.shape}" if keep is not None else ""
            raise ValueError(f"{name} is padded, {values.shape}: pass a {MASK}{shape} of its shape, or lists")
        return [row[some] for row, some in zip(values, keep, strict=True)]
    found = [_numbers(name, () if row is None and own else row, i) for i, row in enumerate(value)]
    for i, row in enumerate(found):
        if row.ndim != 1:
            raise ValueError(f"{name}, sequence {i}: shape {row.shape}; pass [S, L] or S arrays [length]")
    return found


def _numbers(name: str, value: Any, row: int | None = None) -> Array:
    """Return a tensor on any device, or an array-like, as numbers; text, None and booleans are refused."""
    if getattr(value, "is_meta", False):
        raise ValueError(f"{name} is a tensor on the device meta, which holds no numbers")
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (
            value
            if str(value.dtype).rpartition(".")[2] not in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
            else value.float()
        )
    where = name if row is None else f"{name}, sequence {row}"
    if np.ma.is_masked(value) or (
        isinstance(value, list | tuple) and any(isinstance(x, bool) for x in value) and name != MASK
    ):
        raise ValueError(f"{where} holds booleans, masked or null values; pass a number for every token")
    found = np.asarray(value)
    if found.size and found.dtype.kind not in ("fiub" if name == MASK else "fiu"):
        hint = f"pass a number for every token, also where {MASK} is 0"
        raise ValueError(f"{where} holds {'text' if found.dtype.kind in 'US' else found.dtype}; {hint}")
    return found if found.size else np.empty(found.shape, np.float32)


def _lists(name: str, rows: Sequence[Array], kind: pa.DataType) -> pa.ListArray:
    """Return rows as lists of a type."""
    flat = np.concatenate([*rows, np.empty(0, rows[0].dtype if rows else float)])
    inner = kind.to_pandas_dtype()
    with np.errstate(over="ignore", invalid="ignore"):
        stored = flat.astype(inner)
    if np.issubdtype(inner, np.integer) and (stored != flat).any():
        raise ValueError(f"{name} does not fit {kind}; pass whole numbers in its range")
    if flat.size > np.iinfo(np.int32).max:
        raise ValueError(f"{flat.size} tokens in a batch; write fewer at once")
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(stored, kind))


def _require_readable(arrays: Mapping[str, pa.ListArray], lengths: Sequence[int]) -> None:
    """Refuse what is not finite at a token that counts, log-probs above 0, and versions that fall."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.repeat(np.cumsum([0, *lengths])[:-1], lengths)
    counted = arrays[MASK].values.to_numpy() != 0 if MASK in arrays else np.ones(len(row), np.bool_)

    def refuse(name: str, bad: Array, why: str) -> None:
        if bad.any():
            at = int(bad.argmax())
            value = arrays[name].values[at].as_py()
            raise ValueError(f"{name}, sequence {row[at]}, token {at - begins[at]}: {value:.6g} is {why}")

    for name, column in arrays.items():
        values = column.values.to_numpy()
        if values.dtype.kind == "f":
            refuse(
                name,
                ~np.isfinite(values) & counted,
                f"not finite; set {MASK} to 0 where a token does not count",
            )
        if name in LOG_PROBS:
            why = "above 0, which no log-prob is; pass no probabilities and no negative log-likelihoods"
            refuse(name, (values > TOLERANCE) & counted, why)
    if WEIGHT_VERSIONS in arrays:
        values = arrays[WEIGHT_VERSIONS].values.to_numpy()
        refuse(
            WEIGHT_VERSIONS, (values < UNKNOWN) & counted, f"no version; pass {UNKNOWN} where it is unknown"
        )
        known = np.flatnonzero(counted & (values > UNKNOWN))
        down = np.zeros(len(row), np.bool_)
        down[known[1:][(np.diff(values[known]) < 0) & (np.diff(row[known]) == 0)]] = True
        refuse(WEIGHT_VERSIONS, down, "older than the token before it; pass the engine's counter of updates")


def _scalars(name: str, value: Any, rows: int) -> pa.Array:
    """Return one value per sequence."""
    if getattr(value, "ndim", 0) > 1:
        known = ", ".join(one.name for one in COLUMNS.values() if one.of_tokens)
        raise ValueError(f"{name} has {value.ndim} dimensions; only these are per token: {known}")
    plain = value.tolist() if hasattr(value, "tolist") else value
    plain = list(plain) if isinstance(plain, list | tuple) else [plain] * rows
    items = [one.item() if hasattr(one, "item") and not getattr(one, "ndim", 0) else one for one in plain]
    column = COLUMNS.get(name)
    kind = column.stored if column else None
    if kind != pa.float64():  # a label that is NaN is null
        items = [None if isinstance(one, float) and math.isnan(one) else one for one in items]
    try:
        if kind == pa.int64() and any(
            isinstance(one, bool) or (one is not None and one != int(one)) for one in items
        ):
            raise ValueError("pass whole numbers")
        if kind == pa.string() and not all(isinstance(one, str | None) for one in items):
            raise ValueError("pass text")
        if kind == pa.float64() and any(isinstance(one, str) for one in items):
            raise ValueError("pass numbers")
        large = kind is None and any(isinstance(one, int) and one > 2**63 - 1 for one in items)
        found = pa.array(items, pa.uint64() if large else kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not one plain value per sequence: {error}") from error
    if pt.is_nested(found.type):
        raise ValueError(f"{name} is not one plain value per sequence: {found.type}; pass strings or numbers")
    return found


# ---------------------------------------------------------------- runs of versions


def _versions(value: Any, lengths: Sequence[int], keep: Array | None) -> list[Array]:
    """Return the version of each token, of a column of them or of runs per sequence."""
    if getattr(value, "ndim", 1) > 1:
        return _rows(WEIGHT_VERSIONS, value, keep)
    found = []
    for i, row in enumerate(value):
        try:
            runs = row.tolist() if hasattr(row, "tolist") else row
            of_runs = len(runs) > 0 and isinstance(runs[0], Mapping | list | tuple)
            found.append(
                spread(runs, lengths[i] if i < len(lengths) else 0)
                if of_runs
                else _numbers(WEIGHT_VERSIONS, row, i)
            )
        except ValueError as slip:
            hint = "pass a version per token, or runs [[0, 5], [120, 6]]"
            raise ValueError(f"{WEIGHT_VERSIONS}, sequence {i}: {slip}; {hint}") from slip
    return found


def spread(runs: Sequence[Any], length: int, prompt: int = 0) -> Array:
    """Return the version of each token of a response, [length], `UNKNOWN` outside of the runs.

    Args:
        runs: pairs [start, version], or mappings with `start` and `version` (and `end`, as SGLang writes
            spans), or those of several calls in lists, with `abs_start` and `abs_end` (as miles does). A run
            without an end lasts until the next one.
        length: tokens of the response.
        prompt: tokens of the prompt, which `abs_start` and `abs_end` count too.

    Raises:
        ValueError: what is wrong with the runs.
    """
    each = list(_runs(runs, prompt))
    found, before = np.full(length, UNKNOWN, np.int64), -1
    for (first, end, version), after in zip(each, [*(one[0] for one in each[1:]), length], strict=False):
        last = after if end is None else end
        if first <= before or (first and first >= length) or not first <= last <= length:
            what = f"a run covers tokens {first} to {last} of {length}"
            raise ValueError(f"{what}; runs begin within the response, each after the one before it")
        found[first:last] = version
        before = first
    return found


def _runs(runs: Sequence[Any], prompt: int) -> Iterator[tuple[int, int | None, int]]:
    """Yield start, end and version of runs."""
    for run in runs:
        try:
            if isinstance(run, Mapping):
                moved, prefix = (prompt, "abs_") if "abs_start" in run else (0, "")
                end = run.get(f"{prefix}end")
                yield (
                    int(run[f"{prefix}start"]) - moved,
                    None if end is None else int(end) - moved,
                    int(run["version"]),
                )
            elif len(run) and isinstance(run[0], Mapping):
                yield from _runs(run, prompt)
            elif len(run):
                first, version = run
                yield int(first), None, int(version)
        except (TypeError, KeyError, OverflowError) as error:
            raise ValueError(f"a run is {str(run)[:40]}, and a pair [start, version] is needed") from error
