"""Batches that SkyRL pickles whole."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offpol_diag.errors import DumpError
from offpol_diag.forms import generic
from offpol_diag.forms.form import Array, Row, named, step_in
from offpol_diag.forms.pickles import Record, load, plain, typed
from offpol_diag.readers import columns as role

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
