"""Batches that trainers pickle whole: SkyRL, verl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from offpol_diag.errors import DumpError
from offpol_diag.forms import generic
from offpol_diag.forms.form import Array, Row, named, step_in
from offpol_diag.forms.pickles import Record, load, plain, typed
from offpol_diag.readers import columns as role
from offpol_diag.versions import UNKNOWN

CHANGED = (
    "was the file changed? load it in the trainer's environment, and write it with offpol_diag.DumpWriter"
)


def _tensor(value: object, path: Path, name: str) -> Array | list[Any] | None:
    """Return a tensor that a trainer has made bytes of: with its type and shape, or by torch.save."""
    value = plain(value)
    if _is_array(value) or (isinstance(value, list) and all(map(_is_array, value))):
        return value  # type: ignore[return-value]
    if isinstance(value, dict) and value.get("format") == "torch" and isinstance(value.get("data"), bytes):
        found = load(path, value["data"])
        return found if isinstance(found, np.ndarray) else None
    if isinstance(value, dict) and "data" in value:
        value = value.get("dtype"), value.get("shape"), value["data"]
    if not isinstance(value, tuple) or len(value) != 3:
        return None
    dtype, shape, data = value
    try:
        found = typed(np.frombuffer(plain(data), np.uint8), dtype)
        if found.size != math.prod(shape):
            raise ValueError("its size is not that of its shape")
        return found.reshape(shape)
    except (TypeError, ValueError) as error:
        raise DumpError(f"{path}: {name!r} is a damaged tensor", CHANGED) from error


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "fiub"


def _tensors(values: object, path: Path) -> dict[str, Array | list[Any]]:
    """Return the tensors of a batch; other values are left out."""
    if not isinstance(values, dict):
        raise DumpError(f"{path}: {type(values).__name__}, no batch of tensors", CHANGED)
    found = {name: _tensor(value, path, name) for name, value in values.items() if isinstance(name, str)}
    return {name: value for name, value in found.items() if value is not None}


def _summed(arrays: dict[str, Array | list[Any]], *names: str) -> None:
    """Make `rewards` one number per sequence: the sum of the first of some columns over its tokens."""
    values = next((arrays[name] for name in names if name in arrays), None)
    arrays.pop("rewards", None)
    if values is not None:
        arrays["rewards"] = np.array([float(np.sum(one)) for one in values])


# ---------------------------------------------------------------- SkyRL

SKYRL = {
    role.ROLLOUT: "rollout_logprobs",
    role.OLD: "action_log_probs",
    role.MASK: "loss_mask",
    role.ADVANTAGES: "advantages",
    role.REWARDS: "rewards",
    role.TOKEN_IDS: "sequences",
}
APPENDED = -0.05
"""Log-prob of the trainer below which a last token that the engine is certain of was not sampled."""


def skyrl(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read training batches: responses at the right of their rows.

    An end-of-sequence token that the generator appends has rollout log-prob 0 and counts in its loss mask; it
    was not sampled, and is masked.
    """
    for path in files:
        found = load(path)
        state: Any = found.state if isinstance(found, Record) else None
        state = state if isinstance(state, dict) else {}
        arrays = _tensors(state.get("batch_dict"), path)
        masks = arrays.get("loss_mask")
        if not isinstance(masks, np.ndarray) or masks.ndim != 2:
            raise DumpError(f"{path}: no 'loss_mask' [sequences, tokens] is in it", CHANGED)
        tokens = arrays.get("sequences")
        if isinstance(tokens, np.ndarray) and tokens.ndim == 2 and tokens.shape[1] >= masks.shape[1]:
            arrays["sequences"] = tokens[:, tokens.shape[1] - masks.shape[1] :]
        _summed(arrays, "rewards")
        step, groups = step_in(path.name, r"global_step_(\d+)_"), _groups(state.get("metadata"), len(masks))
        for i, (where, record) in enumerate(generic.sequences(arrays, path)):
            row = generic.by_names(record, where, SKYRL, columns)
            rollout, old, mask = (row.tokens.get(name) for name in (role.ROLLOUT, role.OLD, role.MASK))
            if mask is not None and rollout is not None and old is not None:
                whole = len(rollout) == len(old) == len(mask) > 0
                if whole and mask[-1] and not rollout[-1] and old[-1] < APPENDED:
                    row.tokens[role.MASK] = np.append(mask[:-1], np.zeros(1, mask.dtype))
            row.scalars |= named(step, i) | ({role.GROUP: groups[i]} if i in groups else {})
            yield row


def _groups(metadata: object, count: int) -> dict[int, int]:
    """Return row → prompt, of the ranges of rows that share one."""
    ranges = metadata.get("policy_prompt_boundaries") if isinstance(metadata, dict) else None
    found: dict[int, int] = {}
    for group, pair in enumerate(ranges if isinstance(ranges, list) else ()):
        if isinstance(pair, tuple | list) and len(pair) == 2 and all(type(at) is int for at in pair):
            found |= dict.fromkeys(range(max(0, pair[0]), min(count, pair[1])), group)
    return found


# ---------------------------------------------------------------- verl

VERL = {
    role.ROLLOUT: "rollout_log_probs",
    role.OLD: "old_log_probs",
    role.MASK: "response_mask",
    role.ADVANTAGES: "advantages",
    role.REWARDS: "rewards",
    role.TOKEN_IDS: "responses",
}
SCORES = ("token_level_scores", "rm_scores", "token_level_rewards")


def verl(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read pickled `DataProto`s: responses, padded on the right."""
    for path in files:
        found = load(path)
        state: Any = found.state if isinstance(found, Record) else None
        if not isinstance(state, tuple) or len(state) != 3:
            raise DumpError(f"{path}: holds no DataProto", CHANGED)
        stored, others, meta = state
        if isinstance(stored, bytes):
            stored = load(path, stored)
        elif isinstance(stored, tuple) and len(stored) == 3:  # VERL_DATAPROTO_SERIALIZATION_METHOD=numpy
            stored = stored[2]
        step = meta.get("global_steps") if isinstance(meta, dict) else None
        if type(step) is not int:
            step = None
            with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                said = json.loads(path.with_name("meta.json").read_text())["global_steps"]  # of a skip cache
                step = said if type(said) is int else None
        names = ("uid", "min_global_steps", "max_global_steps")
        uids, *ends = (plain(others.get(name)) if isinstance(others, dict) else None for name in names)
        for i, row in enumerate(_verl_rows(stored, path, columns)):
            row.scalars |= named(step, i)
            uid = _element(uids, i)
            if isinstance(uid, str):
                row.scalars[role.GROUP] = str(uid)
            _versions(row, _element(ends[0], i), _element(ends[1], i), columns)
            yield row


def verl_queue(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read batches of TransferQueue: ragged responses, their keys `{uid}_{session}_{index}`."""
    for path in files:
        found = load(path)
        if not isinstance(found, dict):
            raise DumpError(f"{path}: {type(found).__name__}, no batch of tensors", CHANGED)
        keys, tags, step = found.get("keys"), found.get("tags"), found.get("global_steps")
        for i, row in enumerate(_verl_rows(found.get("tensordict"), path, columns)):
            tag, key = _element(tags, i), _element(keys, i)
            tag = tag if isinstance(tag, dict) else {}
            if tag.get("is_padding") is True:
                continue
            row.scalars |= {role.STEP: step} if type(step) is int else {}
            if isinstance(key, str):
                row.scalars |= {role.SEQUENCE: key, role.GROUP: key.rsplit("_", 2)[0]}
            _versions(row, tag.get("min_global_steps"), tag.get("max_global_steps"), columns)
            yield row


def _versions(row: Row, oldest: object, newest: object, columns: Mapping[str, str]) -> None:
    """Add the oldest weights that sampled a response, and those of each token where all are of the same."""
    if isinstance(oldest, int | np.integer):
        row.scalars[role.ROLLOUT_VERSION] = int(oldest)
        if isinstance(newest, int | np.integer) and columns.get(role.WEIGHT_VERSIONS) != role.NONE:
            same = int(oldest) if oldest == newest else UNKNOWN
            row.tokens[role.WEIGHT_VERSIONS] = np.full(len(row.tokens[role.MASK]), same)


def _element(values: object, i: int) -> Any:
    """Return an element of a list or array; None where it has none."""
    return values[i] if isinstance(values, list | np.ndarray) and i < len(values) else None


def _verl_rows(stored: object, path: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    """Yield the sequences of a batch.

    Its response mask is made of the attention mask where there is none, and so is the length of prompts.
    """
    arrays = _tensors(stored, path)
    both = (arrays.get(name) for name in ("attention_mask", "responses"))
    padded = [values for values in both if isinstance(values, np.ndarray) and values.ndim == 2]
    if len(padded) == 2:
        attention, responses = padded
        prompt = max(0, attention.shape[1] - responses.shape[1])
        arrays.setdefault("response_mask", attention[:, prompt:])
        arrays.setdefault("prompt_length", (attention[:, :prompt] != 0).sum(axis=1))
    _summed(arrays, *SCORES)
    for where, record in generic.sequences(arrays, path):
        yield generic.by_names(record, where, VERL, columns, used=("attention_mask", *SCORES))
