"""DumpWriter: from a trainer's tensors to a dump, batch by batch. Needs pyarrow and numpy, never torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offpol_diag import versions
from offpol_diag.journal import (
    JOURNAL,
    ROW_GROUP_TOKENS,
    Journal,
    Made,
    of_journal,
    whole_batches,
    widened,
)
from offpol_diag.wholefiles import beside

Array = npt.NDArray[Any]

METADATA_KEY = b"offpol_diag"
FLOATS = {"float16": pa.float16(), "float32": pa.float32(), "float64": pa.float64()}
FLOAT_TOKENS = (
    *("rollout_log_probs", "old_log_probs", "current_log_probs", "entropy"),
    *("reference_log_probs", "reference_entropy"),
)
LOG_PROBS = frozenset(name for name in FLOAT_TOKENS if "log_probs" in name)
PROMPT_IDS = "prompt_ids"
"""Lists of a length of their own: the tokens before the response."""
VERSIONS = "weight_versions"
INT_TOKENS = {"response_mask": pa.int8(), "token_ids": pa.int32(), VERSIONS: pa.int64()}
INT_TOKENS |= {"reference_rank": pa.int32()}
TOLERANCE = 1e-3
"""Largest log-prob in nats that counts as rounding: in reduced precision a certain token can exceed 0."""
TEXTS = ("weight_digest_rollout", "weight_digest_train", "finish_reason")
DIGESTS = TEXTS[:2]
NUMBERS = ("rewards", "advantages")
"""Columns whose values are numbers; in all others with a value per sequence a NaN is a null."""
# Fixed, so that a first batch of whole rewards does not make every later batch integers.
INTEGERS = ("step", "policy_lag", "prompt_length")
SCALARS = dict.fromkeys(NUMBERS, pa.float64()) | dict.fromkeys(INTEGERS, pa.int64())


class Ragged(NamedTuple):
    """A token column: `values` [T], cut into rows of `lengths` [S]."""

    values: Array
    lengths: Array


class DumpWriter:
    """Writes a dump: one row per sequence, ragged lists over response tokens.

    A context manager, which threads may share. Every batch is appended to a hidden journal beside the file.
    The file is made of it and appears under its name only when the block ends well; an exception leaves
    nothing behind. If the process is killed, or the disk is full, `recover` makes the dump of the journal.
    What a reader would refuse is refused here: what is not finite where the mask is 1, and log-probs above 0.

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
        journal: Whether to keep the journal, of which `close` makes the file. Without it a kill or a full
            disk loses all, and a column or type that the first row groups lack is refused.

    Attributes:
        path: The file, with its rank.

    Raises:
        ValueError: Bad input; the message says what, where, and what to do.
    """

    _refuses = True

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
        self._made: Made | None = None
        self._lost = False  # the file is of no use, and there is no journal
        self._journal = Journal(self._temporary.with_suffix(JOURNAL)) if journal else None
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
        weight_versions: Any = None,
        weight_digest_rollout: Any = None,
        weight_digest_train: Any = None,
        prompt_length: Any = None,
        prompt_ids: Any = None,
        finish_reason: Any = None,
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
            weight_versions: Version of the weights that sampled each token, -1 where unknown; or, in a list
                with an element per sequence, runs: pairs [start, version], or spans as SGLang writes them.
            weight_digest_rollout: A text made of the weights that sampled, as the engine holds them.
            weight_digest_train: The same text made of the trainer's weights that `old_log_probs` are of.
            prompt_length: Tokens of the prompt.
            prompt_ids: The tokens before the response as the model saw them, without padding, a list or array
                of its own length per sequence: with `token_ids`, what `rescore` needs.
            finish_reason: Why the response ended, such as "stop" or "length".
            **scalar_columns: Anything else with one value per sequence, for reports to group by.

        Raises:
            ValueError: A required column is missing, columns disagree with each other or with those of the
                batches before, or a value cannot be stored as given. The batch is then not written.
            OSError: The disk is full. The batch is then not written, and may be given again.
        """
        columns = {**locals(), **scalar_columns}  # the parameters bear the columns' names
        del columns["self"], columns["scalar_columns"]
        self._check()
        with self._lock:
            if self._closing and not self._closed:
                raise ValueError(f"{self.path}: close() has failed; call it again, and open a new DumpWriter")
            if self._closed:
                raise ValueError(f"{self.path} is closed; open a new DumpWriter")
            try:
                given = {k: v for k, v in columns.items() if v is not None}
                table = _table(given, self._dtype, self._schema, self._refuses)
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
        self._check()
        with self._lock:
            if self._closed:
                return
            if self._schema is None:
                raise ValueError(f"{self.path}: no sequence was written; call write() before closing")
            self._closing = True
            try:
                self._finish()
            except BaseException as failure:
                if self._made is not None:
                    self._made.remove()
                self._keep_journal(failure)
                raise
            self.discard()

    def discard(self) -> None:
        """Close, and remove what is unfinished."""
        self._lost = False
        self._check()
        with self._lock:
            self._closed = True
            if self._made is not None:
                self._made.remove()
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

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise ValueError(
                f"{self.path}: another process opened it; open a DumpWriter in each, with a rank"
            )
        if self._lost and not self._closed:
            raise ValueError(f"{self.path}: a write has failed, and there is no journal; write all again")

    def _accept(self, table: pa.Table) -> None:
        """Keep a batch: in the journal, or in row groups of the Parquet file."""
        self._full = False
        try:
            if self._journal is not None:
                self._journal.append(table.replace_schema_metadata(self._metadata))
            else:
                self._made = self._made or Made(self._temporary, self._metadata, self._row_group_tokens)
                self._lost = True  # should this be interrupted
                self._made.add(table)
                self._lost = False
        except ValueError as slip:
            self._lost = False
            raise ValueError(f"batch {self._batches}: {slip}") from slip
        except OSError as failure:
            self._full = True
            failure.add_note(f"batch {self._batches} is not written to {self.path}; those before it are kept")
            raise
        self._schema = table.schema
        self._negative |= _negative(table)

    def _finish(self) -> None:
        """Complete the Parquet file, and give it its name."""
        if self._journal is not None:
            self._journal.lock()
            with self._journal.path.open("rb") as file:
                whole = whole_batches(file)
                if whole is None or whole.end < self._journal.end:
                    raise ValueError(f"{self._journal.path}: damaged; recover gives the batches before that")
                self._made = of_journal(file, whole, self._temporary, self._row_group_tokens)
        assert self._made is not None
        self._lost = self._journal is None
        self._made.finish(self._target, durable=self._journal is not None)

    def _keep_journal(self, failure: BaseException | None) -> None:
        """Leave the journal to the next `close`, or to `recover`."""
        if self._journal is None or not self._journal.end:
            return
        self._journal.release()
        if failure is not None and self._journal.path.exists():
            failure.add_note(
                f"{self._journal.path} holds what was written: make room, and call close() again, or run "
                f"offpol-diag recover {self.path}"
            )


class AsGiven(DumpWriter):
    """A writer of what somebody else has made, which the reader judges."""

    _refuses = False


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


def _table(columns: Mapping[str, Any], dtype: str, schema: pa.Schema | None, refuses: bool) -> pa.Table:
    """Convert one batch to a table [S rows]; see `_require_log_probs` for what it `refuses`."""
    _require(columns, schema)
    mask = columns.get("response_mask")
    keep = None  # [S, L] bool: true up to the last 1 of each row
    if _is_padded(mask):
        keep = np.logical_or.accumulate((_numbers("response_mask", mask, "int8") != 0)[:, ::-1], axis=1)[
            :, ::-1
        ]
    given = {k: v for k, v in columns.items() if _is_per_token(k, v)}
    tokens = {k: _ragged(k, v, keep, dtype) for k, v in given.items() if k != VERSIONS}
    lengths = tokens["rollout_log_probs"].lengths
    if VERSIONS in given:
        tokens[VERSIONS] = _ragged(VERSIONS, versions.listed(given[VERSIONS], lengths), keep, dtype)
    _agree(tokens)
    counted = (tokens["response_mask"].values if mask is not None else np.ones(lengths.sum())) != 0
    if VERSIONS in tokens:
        versions.require_rising(tokens[VERSIONS].values, counted, lengths)
    for name in tokens if refuses else ():
        if name not in INT_TOKENS:
            _require_finite(name, tokens[name], counted)
    rows = len(lengths)
    arrays = {k: _token_array(k, v, dtype) for k, v in tokens.items()}
    if PROMPT_IDS in columns:
        arrays[PROMPT_IDS] = _prompts(columns[PROMPT_IDS], rows)
    arrays |= {k: _scalar_array(k, v, rows) for k, v in columns.items() if k not in arrays}
    _both(arrays)
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
        return widened(table, wider)
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
        needed = {*FLOAT_TOKENS, *INT_TOKENS, *SCALARS, PROMPT_IDS}
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


def _prompts(value: Any, rows: int) -> pa.ListArray:
    """Return the lists of prompts' tokens, each with a length of its own."""
    if _is_padded(value):
        hint = "pass a list of S one-dimensional arrays, without padding"
        raise ValueError(f"{PROMPT_IDS} is padded, and what is padding is not said; {hint}")
    found = _ragged(PROMPT_IDS, value, None, "int32")
    if len(found.lengths) != rows:
        raise ValueError(f"{PROMPT_IDS} has {len(found.lengths)} lists for {rows} sequences; pass one each")
    offsets = np.concatenate([[0], np.cumsum(found.lengths)]).astype(np.int32)
    values = _narrowed(PROMPT_IDS, found.values, np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values, pa.int32()))


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


def _require_finite(name: str, column: Ragged, counted: Array) -> None:
    """Refuse what is not finite at a token that counts, and log-probs above 0."""
    bad, what = ~np.isfinite(column.values) & counted, "not finite"
    hint = "set response_mask to 0 where a token does not count"
    if name in LOG_PROBS and not bad.any():
        bad, what = (column.values > TOLERANCE) & counted, "above 0, which no log-prob is"
        hint = "pass log-probs, no probabilities and no negative log-likelihoods"
    if bad.any():
        at = int(bad.argmax())
        ends = np.cumsum(column.lengths)
        row = int(np.searchsorted(ends, at, side="right"))
        token = at - int(ends[row] - column.lengths[row])
        raise ValueError(f"{name}, sequence {row}, token {token}: {column.values[at]:.6g} is {what}; {hint}")


def _both(arrays: Mapping[str, pa.Array]) -> None:
    """Refuse digests of one side only."""
    there = [name for name in DIGESTS if name in arrays]
    hint = "digests are compared: pass both of a sequence, or none"
    if len(there) == 1:
        (lacks,) = {*DIGESTS} - {*there}
        raise ValueError(f"{there[0]} is there without {lacks}; {hint}")
    null = [arrays[name].is_null().to_numpy(zero_copy_only=False) for name in there]
    if there and (null[0] != null[1]).any():
        row = int(np.argmax(null[0] != null[1]))
        raise ValueError(
            f"{there[int(null[1][row])]}, sequence {row}: it is None, and the other is not; {hint}"
        )


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
    if name in TEXTS:
        if odd := kinds - {str}:
            raise ValueError(f"it holds {', '.join(sorted(kind.__name__ for kind in odd))}; pass text")
        return pa.array(items, pa.string())
    if name in SCALARS:
        for one in items if name not in NUMBERS else ():
            if isinstance(one, bool) or not (one is None or isinstance(one, int) or float(one).is_integer()):
                raise ValueError(f"{one} is no whole number")
            if name == "prompt_length" and one is not None and one < 0:
                raise ValueError(f"{one} is no length")
        return pa.array(items, SCALARS[name])
    if len(kinds) > 1 and not kinds <= {int, float}:
        raise ValueError(f"it mixes {', '.join(sorted(kind.__name__ for kind in kinds))}")
    large = kinds == {int} and (unsigned or max(one for one in items if one is not None) > 2**63 - 1)
    return pa.array(items, pa.uint64() if large else None)
