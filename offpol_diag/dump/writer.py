"""DumpWriter: a trainer's tensors → whole Parquet files in a folder. Needs numpy and pyarrow alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from offpol_diag.dump import schema
from offpol_diag.dump.schema import COLUMNS, CURRENT, DIGESTS, LOG_PROBS, MASK, OLD, ROLLOUT, WEIGHT_VERSIONS
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
            what = f"{folder}: no folder can be made there ({error.strerror})"
            raise ValueError(f"{what}; choose another name") from error
        if provenance.get("logprobs") not in (None, "raw", "processed"):
            raise ValueError(f"logprobs={provenance['logprobs']!r}: choose raw or processed")
        self._metadata = stamped(provenance | ({"rank": rank} if rank else {}))
        self._rank, self._most = rank, file_tokens
        self._held: list[pa.Table] = []
        self._tokens, self._step = 0, None

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
        if self._held:
            before = self._held[0].schema
            if odd := ({*table.column_names} ^ {*before.names}) & {*schema.TOKENS}:
                what = f"{min(odd)}: a batch has it, and another one of this step has not"
                raise ValueError(f"{what}; pass it in all")
            try:
                pa.unify_schemas([before, table.schema], promote_options="permissive")
            except pa.ArrowException as error:
                what = f"the types of this batch are not those of the ones before it: {error}"
                raise ValueError(what) from error
        self._held.append(table)
        self._tokens += int(pc.sum(pc.list_value_length(table[ROLLOUT])).as_py() or 0)
        if self._tokens >= self._most:
            self.flush()

    def flush(self) -> Path | None:
        """Write what is held to a file, and return its path; None where nothing is held."""
        if not self._held:
            return None
        stem = f"{'' if self._step is None else f'step_{self._step:06}-'}rank{self._rank:05}-"
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
    versions = {}
    for name in VERSIONED:
        try:
            versions[name] = metadata.version(name)  # without importing it
        except metadata.PackageNotFoundError:
            continue
    try:
        return json.dumps({"versions": versions, **provenance}).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the provenance cannot be stored as JSON: {error}; pass plain values") from error


def write_table(table: pa.Table, path: Path, said: bytes = b"{}", group: int | None = None) -> None:
    """Write a table that appears whole or not at all, with checksums; readers pass over hidden files."""
    leaves = {one.name: one.name + ".list.element" * schema.is_list(one.type) for one in table.schema}
    lists = (one for one in table.schema if schema.is_list(one.type))
    floats = [leaves[one.name] for one in lists if pt.is_floating(one.type.value_type)]
    hidden = beside(path.resolve())
    try:
        pq.write_table(
            table.replace_schema_metadata({KEY: said}),
            hidden,
            compression="zstd",
            column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
            use_dictionary=[leaf for leaf in leaves.values() if leaf not in floats],
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
        keep = np.logical_or.accumulate(_numbers(MASK, given[MASK])[:, ::-1] != 0, axis=1)[:, ::-1]
    rollout = _rows(ROLLOUT, given[ROLLOUT], keep)
    lengths = [len(row) for row in rollout]
    arrays: dict[str, Any] = {}
    for name, value in given.items():
        column = COLUMNS.get(name)
        if column is None or column.holds == "row" or (column.holds == "either" and not _nested(value)):
            arrays[name] = _scalars(name, value, len(lengths))
        else:
            wanted = None if column.holds == "list" else lengths
            rows = rollout if name == ROLLOUT else _rows(name, value, keep, wanted)
            kind = floats if floats and column.stored == schema.F else column.stored
            arrays[name] = _lists(name, rows, kind)
        if len(arrays[name]) != len(lengths):
            what = f"{name} is of {len(arrays[name])} sequences and {ROLLOUT} of {len(lengths)}"
            raise ValueError(f"{what}; pass one each")
    masks = arrays[MASK].values.to_numpy() if MASK in arrays else np.ones(sum(lengths), np.int8)
    if (odd := masks[(masks != 0) & (masks != 1)]).size:
        raise ValueError(f"{MASK} holds {odd[0]}; pass 1 for a token that counts, and 0")
    for name in (x for x in arrays if refuses and schema.is_list(arrays[x].type) and COLUMNS[x].of_tokens):
        _require_readable(name, arrays[name].values.to_numpy(), masks == 1, np.array(lengths))
    there = [arrays[one].is_null() for one in DIGESTS if one in arrays]
    if len(there) == 1 or (there and there[0] != there[1]):
        raise ValueError(f"{' and '.join(DIGESTS)}: digests are compared: pass both of a sequence, or none")
    return pa.table(arrays)


def _nested(value: Any) -> bool:
    """Return whether advantages have a value per token."""
    if isinstance(value, list | tuple) or str(getattr(value, "dtype", "")) == "object":
        return len(value) > 0 and np.ndim(value[0]) == 1
    return getattr(value, "ndim", 0) == 2


def _rows(name: str, value: Any, keep: Array | None, lengths: Sequence[int] | None = None) -> list[Array]:
    """Return a padded or ragged column as an array per sequence, of given lengths."""
    if getattr(value, "ndim", 1) > 1:
        values = _numbers(name, value)
        if keep is None or values.shape != keep.shape or COLUMNS[name].holds == "list":
            shape = "" if keep is None else f" {keep.shape}"
            raise ValueError(f"{name} is padded, {values.shape}: pass a {MASK}{shape} of its shape, or lists")
        return [row[some] for row, some in zip(values, keep, strict=True)]
    found = []
    for i, row in enumerate(value):
        place, wanted = f"{name}, sequence {i}", lengths[i] if lengths and i < len(lengths) else None
        if name == WEIGHT_VERSIONS and wanted is not None:
            one = spread(row, wanted, place=place)
        else:
            one = _numbers(place, () if row is None and COLUMNS[name].holds == "list" else row)
        if one.ndim != 1:
            raise ValueError(f"{place}: shape {one.shape}; pass [S, L] or S arrays [length]")
        if wanted not in (None, len(one)):
            what = f"{place}: {len(one)} tokens but {ROLLOUT} has {wanted}"
            raise ValueError(f"{what}; cover the same response tokens")
        found.append(one)
    return found


def _numbers(name: str, value: Any) -> Array:
    """Return a tensor on any device, or an array-like, as numbers; text, None and booleans are refused."""
    if hasattr(value, "detach"):
        if value.is_meta:
            raise ValueError("a tensor on the device meta, which holds no numbers")
        value = value.detach().cpu()
        narrow = str(value.dtype).startswith(("torch.bfloat16", "torch.float8"))  # types that numpy lacks
        value = value.float() if narrow else value
    found, masks = np.asarray(value), name.startswith(MASK)
    flags = isinstance(value, list | tuple) and any(isinstance(one, bool) for one in value) and not masks
    if flags or np.ma.is_masked(value) or (found.size and found.dtype.kind not in "fiub"[: 3 + masks]):
        kind = "masked values" if np.ma.is_masked(value) else "booleans" if flags else found.dtype.name
        raise ValueError(f"{name} holds {kind}; pass a number for every token, also where {MASK} is 0")
    return found if found.size else np.empty(found.shape, np.float32)


def _lists(name: str, rows: Sequence[Array], kind: pa.DataType) -> pa.ListArray:
    """Return rows as lists of a type."""
    flat = np.concatenate([*rows, np.empty(0, rows[0].dtype if rows else float)])
    with np.errstate(over="ignore", invalid="ignore"):
        stored = flat.astype(kind.to_pandas_dtype())
    if pt.is_integer(kind) and (stored != flat).any():
        raise ValueError(f"{name} does not fit {kind}; pass whole numbers in its range")
    if flat.size > np.iinfo(np.int32).max:
        raise ValueError(f"{flat.size} tokens in a batch; write fewer at once")
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(stored, kind))


def _require_readable(name: str, values: Array, counts: Array, lengths: Array) -> None:
    """Refuse what is not finite at a token that counts, log-probs above 0, and versions that fall."""
    row, versions = np.repeat(np.arange(len(lengths)), lengths), name == WEIGHT_VERSIONS
    older = np.zeros(len(row), np.bool_)
    if versions:
        known = np.flatnonzero(counts & (values > UNKNOWN))
        older[known[1:]] = (np.diff(values[known]) < 0) & (np.diff(row[known]) == 0)
    positive = "above 0, which no log-prob is; pass no probabilities and no negative log-likelihoods"
    for at, why in (
        (~np.isfinite(values), f"not finite; set {MASK} to 0 where a token does not count"),
        ((values > TOLERANCE) & (name in LOG_PROBS), positive),
        ((values < UNKNOWN) & versions, f"no version; pass {UNKNOWN} where it is unknown"),
        (older, "older than the token before it; pass the engine's counter"),
    ):
        if (bad := np.flatnonzero(at & counts)).size:
            i, token = row[bad[0]], bad[0] - lengths[: row[bad[0]]].sum()
            raise ValueError(f"{name}, sequence {i}, token {token}: {values[bad[0]]:.6g} is {why}")


def _scalars(name: str, value: Any, rows: int) -> pa.Array:
    """Return one value per sequence."""
    if getattr(value, "ndim", 0) > 1:
        known = ", ".join(one.name for one in COLUMNS.values() if one.of_tokens)
        raise ValueError(f"{name} has {value.ndim} dimensions; only these are per token: {known}")
    plain = value.tolist() if hasattr(value, "tolist") else value
    plain = plain if isinstance(plain, list | tuple) else [plain] * rows
    items = [one.item() if hasattr(one, "item") and not getattr(one, "ndim", 0) else one for one in plain]
    kind = COLUMNS[name].stored if name in COLUMNS else None
    if kind is None and any(isinstance(one, int) and one >> 63 > 0 for one in items):
        kind = pa.uint64()
    try:
        if kind == schema.L and any(
            isinstance(one, float) and math.isfinite(one) and one % 1 for one in items
        ):
            raise ValueError("pass whole numbers")
        found = pa.array(items, kind, from_pandas=kind != schema.D)  # a label that is NaN is null
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is not one plain value per sequence: {error}") from error
    if pt.is_nested(found.type):
        raise ValueError(f"{name} is not one plain value per sequence: {found.type}; pass strings or numbers")
    return found


def spread(runs: Any, length: int, prompt: int = 0, place: str = WEIGHT_VERSIONS) -> Array:
    """Return the version of the weights that sampled each token of a response, [length].

    Args:
        runs: a version per token, or pairs [start, version], or mappings with `start` and `version` (and
            `end`, as SGLang writes spans), or lists of mappings with `abs_start` and `abs_end`, one for each
            call (as miles does). A run without an end lasts until the next one; a token outside of all runs
            is `UNKNOWN`.
        length: tokens of the response.
        prompt: tokens of the prompt, which `abs_start` and `abs_end` count too.
        place: what to call the versions in messages.

    Raises:
        ValueError: what is wrong with the runs.
    """
    if getattr(runs, "ndim", 0) == 1 or not len(runs) or not hasattr(runs[0], "__len__"):
        return _numbers(place, runs)
    spans = isinstance(runs[0], list) and isinstance(next(iter(runs[0]), None), Mapping)  # of several calls
    each = list[tuple[int, int | None, int]]()
    for run in (run for call in (runs if spans else [runs]) for run in call if len(run)):
        try:
            if isinstance(run, Mapping):
                prefix, moved = ("abs_", prompt) if "abs_start" in run else ("", 0)
                first, last = int(run[f"{prefix}start"]) - moved, run.get(f"{prefix}end")
                each.append((first, None if last is None else int(last) - moved, int(run["version"])))
            else:
                first, version = run
                each.append((int(first), None, int(version)))
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            what = f"{place}: a run is {str(run)[:40]}, and a pair [start, version] is needed"
            raise ValueError(f"{what}; pass a version per token, or runs [[0, 5], [120, 6]]") from error
    found, before = np.full(length, UNKNOWN, np.int64), -1
    for (first, end, version), after in zip(each, [*(one[0] for one in each[1:]), length], strict=False):
        last = after if end is None else end
        if first <= before or (first and first >= length) or not first <= last <= length:
            what = f"{place}: a run covers tokens {first} to {last} of {length}"
            raise ValueError(f"{what}; runs begin within the response, each after the one before it")
        found[first:last], before = version, first
    return found
