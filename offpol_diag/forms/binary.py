"""What trainers write as pickles: `.pt` and `.pkl` of any writer, slime.

Files are read by `unpickle`, which runs no code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offpol_diag.errors import DumpError
from offpol_diag.forms import generic
from offpol_diag.forms.form import Row, numbers
from offpol_diag.forms.unpickle import load, plain
from offpol_diag.readers.columns import (
    ADVANTAGES,
    ENTROPY,
    GROUP,
    MASK,
    OLD,
    REWARDS,
    ROLLOUT,
    ROLLOUT_VERSION,
    SEQUENCE,
    STEP,
    TOKEN_IDS,
)

Record = generic.Record
NO_NUMBERS = object()
"""In place of a list that holds lists or texts: to look through it may take forever, and nobody reads it."""


def _record(value: object, where: str) -> dict[str, Any]:
    """Return a record with its arrays as NumPy's, and a mark in place of lists of anything but numbers.

    Raises:
        DumpError: it is no mapping.
    """
    if not isinstance(value, dict):
        raise DumpError(
            f"{where}: {type(value).__name__}, no mapping of columns",
            "store a dict of padded tensors, or a list with a dict per sequence",
        )
    found = {name: plain(one) for name, one in value.items() if isinstance(name, str)}
    return {
        name: NO_NUMBERS if isinstance(one, list) and not _numeric(one) else one
        for name, one in found.items()
    }


def _numeric(values: list[Any]) -> bool:
    """Return whether a list holds numbers and None only; nested lists may be endless."""
    return {type(one) for one in values} <= {int, float, bool, type(None)}


def pickled(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read a dict of padded or flat tensors or of ragged lists, or a list with a dict per sequence.

    A dict with a list of dicts, such as `samples`, is that list.
    """
    for path in files:
        found = plain(load(path))
        lists = [found, *found.values()] if isinstance(found, dict) else [found]
        each = next(
            (one for one in lists if isinstance(one, list) and one and isinstance(one[0], dict)), None
        )
        if each is not None:
            for i, one in enumerate(each):
                where = f"{path}, sequence {i}"
                yield generic.row_of(_record(one, where), where, columns)
            continue
        if not isinstance(found, dict):
            _record(found, str(path))
        known = {name: plain(one) for name, one in found.items() if isinstance(name, str)}
        arrays = {name: one for name, one in known.items() if isinstance(one, list | np.ndarray)}
        for where, record in generic.sequences(arrays, path):
            yield generic.row_of(_record(record, where), where, columns)


# ---------------------------------------------------------------- slime

SLIME = {
    ROLLOUT: "rollout_log_probs",
    OLD: "log_probs",
    MASK: "loss_masks",
    ADVANTAGES: "advantages",
    REWARDS: "rewards",
    ENTROPY: "entropy",
    TOKEN_IDS: "tokens",
}
SAMPLE = {
    ROLLOUT: "rollout_log_probs",
    MASK: "loss_mask",
    REWARDS: "reward",
    GROUP: "group_index",
    TOKEN_IDS: "tokens",
}


def slime(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read train dumps of version 2: one file per rollout, a record per sample, response only.

    Prompt groups, raw rewards and weight versions come from the rollout dump beside it, if there is one.
    """
    for path in files:
        dump = _dump(path, "samples")
        rollout = _integer(dump.get("rollout_id"))
        sampled = _sampled(path, rollout)
        raw = plain(dump.get("raw_reward"))
        for i, one in enumerate(dump["samples"]):
            where = f"{path}, sample {i}"
            record = _record(one, where)
            position = _integer(record.get("rollout_position"), i)
            index = _integer(record.get("sample_index"), position)
            if isinstance(raw, list) and 0 <= position < len(raw):
                record["rewards"] = raw[position] if type(raw[position]) in (int, float) else None
            yield _completed(record, where, columns, rollout, index, sampled)


def slime_rollout(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read rollout dumps of slime and miles: the rollout's log-probs without the trainer's."""
    for path in files:
        dump = _dump(path, "samples")
        rollout = _integer(dump.get("rollout_id"))
        for i, one in enumerate(dump["samples"]):
            where = f"{path}, sample {i}"
            record = _record(one, where)
            if type(record.get("reward")) not in (int, float):
                record["reward"] = None
            row = generic.by_names(record, where, SAMPLE, columns)
            length = record.get("response_length")
            row.tokens[TOKEN_IDS] = _response(row, length)
            row.tokens.setdefault(MASK, np.ones(len(row.tokens[TOKEN_IDS]), np.int8))
            if record.get("remove_sample") is True:
                row.tokens[MASK] = np.zeros_like(row.tokens[MASK])
            row.scalars |= _named(rollout, _integer(record.get("index"), i)) | _version(one)
            yield row


def _dump(path: Path, name: str, kind: type = list) -> dict[str, Any]:
    """Read a file that holds a mapping with a list (or mapping) of one name."""
    found = load(path)
    if not isinstance(found, dict) or not isinstance(found.get(name), kind):
        raise DumpError(
            f"{path}: no {name!r} is in it", "was the file changed? see `offpol-diag convert --list`"
        )
    return found


def _integer(value: object, otherwise: int = 0) -> int:
    """Return an integer of 64 bits, or another one where there is none."""
    return value if type(value) is int and abs(value) < 1 << 63 else otherwise


def _sampled(path: Path, rollout: int) -> dict[int, dict[str, Any]]:
    """Return the samples of the rollout dump of the same rollout, by their index."""
    beside = path.parent.parent / "rollout_data" / f"{rollout}.pt"
    if not beside.is_file():
        return {}
    found = {}
    for i, one in enumerate(_dump(beside, "samples")["samples"]):
        record = _record(one, f"{beside}, sample {i}")
        found[_integer(record.get("index"), i)] = record | _version(one)
    return found


def _completed(
    record: dict[str, Any],
    where: str,
    columns: Mapping[str, str],
    rollout: int,
    index: int,
    sampled: Mapping[int, Record],
) -> Row:
    """Return a row of a train dump, with what the rollout dump says of the sample."""
    row = generic.by_names(record, where, SLIME, columns)
    if TOKEN_IDS in row.tokens:
        row.tokens[TOKEN_IDS] = _response(row, record.get("response_lengths"))
    row.scalars |= _named(rollout, index)
    other = sampled.get(index, {})
    if type(other.get("reward")) in (int, float):
        row.scalars[REWARDS] = other["reward"]
    if type(other.get("group_index")) is int:
        row.scalars[GROUP] = other["group_index"]
    if ROLLOUT not in row.tokens and other.get("rollout_log_probs") is not None:
        row.tokens[ROLLOUT] = numbers(other["rollout_log_probs"], "rollout_log_probs", where)
    if ROLLOUT_VERSION in other:
        row.scalars[ROLLOUT_VERSION] = other[ROLLOUT_VERSION]
    return row


def _response(row: Row, length: object) -> Any:
    """Return the tokens of the response, which end those of the whole sequence."""
    tokens = row.tokens.get(TOKEN_IDS, np.empty(0, np.int64))
    if type(length) is not int or not 0 <= length <= len(tokens):
        raise DumpError(
            f"{row.where}: the response has no length, or one that exceeds the {len(tokens)} tokens",
            "slime writes it; was the file changed?",
        )
    return tokens[len(tokens) - length :]


def _named(rollout: int, index: int) -> dict[str, Any]:
    """Return the step, and an id of the sequence."""
    return {STEP: rollout, SEQUENCE: f"{rollout}/{index}"}


def _version(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the oldest weights that sampled the response; their versions are texts."""
    versions = record.get("weight_versions")
    texts = versions if isinstance(versions, list) else []
    known = [int(one) for one in texts if isinstance(one, str) and one.isdecimal() and len(one) < 18]
    return {ROLLOUT_VERSION: min(known)} if known else {}
