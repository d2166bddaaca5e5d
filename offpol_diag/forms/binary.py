"""Pickled dumps of trainers: `.pt` and `.pkl` of any writer, slime, miles.

Files are read by `pickles`, which runs no code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offpol_diag.errors import DumpError
from offpol_diag.forms import generic
from offpol_diag.forms.form import Row, numbers
from offpol_diag.forms.pickles import load, plain
from offpol_diag.readers import columns as role

Record = generic.Record
NO_NUMBERS = object()
"""In place of a list that holds lists or texts: to look through it may take forever, and nobody reads it."""


def _record(value: object, where: str) -> dict[str, Any]:
    """Return a record with its arrays as NumPy's, and a mark in place of lists of anything but numbers."""
    if not isinstance(value, dict):
        hint = "store a dict of padded tensors, or a list with a dict per sequence"
        raise DumpError(f"{where}: {type(value).__name__}, no mapping of columns", hint)
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
            records = iter([(f"{path}, sequence {i}", one) for i, one in enumerate(each)])
        else:
            if not isinstance(found, dict):
                _record(found, str(path))
            known = {name: plain(one) for name, one in found.items() if isinstance(name, str)}
            arrays = {name: one for name, one in known.items() if isinstance(one, list | np.ndarray)}
            records = generic.sequences(arrays, path)
        for where, record in records:
            yield generic.row_of(_record(record, where), where, columns)


# ---------------------------------------------------------------- slime

SLIME = {
    role.ROLLOUT: "rollout_log_probs",
    role.OLD: "log_probs",
    role.MASK: "loss_masks",
    role.ADVANTAGES: "advantages",
    role.REWARDS: "rewards",
    role.ENTROPY: "entropy",
    role.TOKEN_IDS: "tokens",
}
SAMPLE = {
    role.ROLLOUT: "rollout_log_probs",
    role.MASK: "loss_mask",
    role.REWARDS: "reward",
    role.GROUP: "group_index",
    role.TOKEN_IDS: "tokens",
}

OF_A_SAMPLE = (
    *("response_length", "response_lengths", "total_lengths", "index", "sample_index", "rollout_position"),
    *("remove_sample", "weight_versions"),
)
"""Fields that tell lengths, place and use of a sample."""


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
            row = generic.by_names(record, where, SAMPLE, columns, used=OF_A_SAMPLE)
            length = record.get("response_length")
            row.tokens[role.TOKEN_IDS] = _response(row, length)
            row.tokens.setdefault(role.MASK, np.ones(len(row.tokens[role.TOKEN_IDS]), np.int8))
            if record.get("remove_sample") is True:
                row.tokens[role.MASK] = np.zeros_like(row.tokens[role.MASK])
            row.scalars |= _named(rollout, _integer(record.get("index"), i)) | _version(one)
            yield row


def _dump(path: Path, name: str, kind: type = list) -> dict[str, Any]:
    """Read a file that holds a mapping with a list (or mapping) of one name."""
    found = load(path)
    if not isinstance(found, dict) or not isinstance(found.get(name), kind):
        hint = "was the file changed? see `offpol-diag convert --list`"
        raise DumpError(f"{path}: no {name!r} is in it", hint)
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
    row = generic.by_names(record, where, SLIME, columns, used=OF_A_SAMPLE)
    if role.TOKEN_IDS in row.tokens:
        row.tokens[role.TOKEN_IDS] = _response(row, record.get("response_lengths"))
    row.scalars |= _named(rollout, index)
    other = sampled.get(index, {})
    if type(other.get("reward")) in (int, float):
        row.scalars[role.REWARDS] = other["reward"]
    if type(other.get("group_index")) is int:
        row.scalars[role.GROUP] = other["group_index"]
    if role.ROLLOUT not in row.tokens and other.get("rollout_log_probs") is not None:
        row.tokens[role.ROLLOUT] = numbers(other["rollout_log_probs"], "rollout_log_probs", where)
    if role.ROLLOUT_VERSION in other:
        row.scalars[role.ROLLOUT_VERSION] = other[role.ROLLOUT_VERSION]
    return row


def _response(row: Row, length: object) -> Any:
    """Return the tokens of the response, which end those of the whole sequence."""
    tokens = row.tokens.get(role.TOKEN_IDS, np.empty(0, np.int64))
    if type(length) is not int or not 0 <= length <= len(tokens):
        what = f"{row.where}: the response has no length, or one that exceeds the {len(tokens)} tokens"
        raise DumpError(what, "slime writes it; was the file changed?")
    return tokens[len(tokens) - length :]


def _named(rollout: int, index: int) -> dict[str, Any]:
    """Return the step, and an id of the sequence."""
    return {role.STEP: rollout, role.SEQUENCE: f"{rollout}/{index}"}


def _version(record: Mapping[str, Any]) -> dict[str, int]:
    """Return the oldest weights that sampled the response; their versions are texts."""
    versions = record.get("weight_versions")
    texts = versions if isinstance(versions, list) else []
    known = [int(one) for one in texts if isinstance(one, str) and one.isdecimal() and len(one) < 18]
    return {role.ROLLOUT_VERSION: min(known)} if known else {}


# ---------------------------------------------------------------- a file per rank: slime up to 0.3.1, miles

SLICED = ("rollout_log_probs", "log_probs", "advantages", "entropy")
"""Columns of which a context-parallel rank holds its slice; the others are whole."""
WHOLE = ("tokens", "loss_masks", "rewards", "total_lengths", "response_lengths")
SIZES = (2, 4, 8, 16, 32, 64)
"""Numbers of context-parallel ranks that are tried where the files do not say it."""
TOGETHER = "convert the files of all ranks of a rollout together, and none of another run"


@dataclass(frozen=True)
class Slice:
    """The part of a sample that one rank holds: its slices of columns, or all of them.

    Attributes:
        total, response: tokens of the sequence, and of its response.
        padded: length to which sequences are padded before they are cut; their own where they are packed.
        rank, count: place among the context-parallel ranks, and their number; None where it is not said.
    """

    values: Mapping[str, Any]
    total: int
    response: int
    padded: int
    rank: int | None = None
    count: int | None = None

    def spans(self, rank: int, count: int) -> list[tuple[int, int]]:
        """Return the two spans of the response that one of `count` ranks holds.

        A sequence is cut into 2·count chunks, of which rank r has the r-th from both ends; the log-prob of a
        token lies where the token before it does.
        """
        chunk = -(-self.padded // (2 * count))
        prompt = self.total - self.response
        found = []
        for at in (rank, 2 * count - 1 - rank):
            begin, end = max(at * chunk, prompt - 1), min((at + 1) * chunk, self.total - 1)
            if begin < end:
                found.append((begin - prompt + 1, end - prompt + 1))
        return found

    def width(self, rank: int, count: int) -> int:
        """Return the number of values of one rank."""
        return sum(end - begin for begin, end in self.spans(rank, count))


def ranks(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read train dumps with a file per rank, `{rollout}_{rank}.pt`: each sample once, its slices joined.

    Tensor-parallel ranks repeat each other, and of the pipeline's only the last one has log-probs.
    """
    for paths in _by(files, r"(\d+)_(\d+)\.pt$", 1):
        dumps = sorted(
            ((_dump(path, "rollout_data", dict), path) for path in paths),
            key=lambda one: _integer(one[0].get("rank")),
        )
        rollout = _integer(dumps[0][0].get("rollout_id"))
        samples: dict[object, list[Slice]] = {}
        for dump, path in dumps:
            for key, one in _slices(dump, path):
                samples.setdefault(key, []).append(one)
        sampled = _sampled(paths[0], rollout)
        count = _count(list(samples.values()), str(paths[0]))
        for i, (key, slices) in enumerate(samples.items()):
            index = key if isinstance(key, int) else i
            where = f"{paths[0]}, sample {index}"
            record = dict(slices[0].values) | {name: _joined(slices, name, count, where) for name in SLICED}
            yield _completed(record, where, columns, rollout, index, sampled)


def _by(files: Sequence[Path], pattern: str, group: int) -> list[list[Path]]:
    """Gather files of a directory whose names agree in one number."""
    found: dict[object, list[Path]] = {}
    for path in files:
        match = re.search(pattern, path.name)
        found.setdefault((path.parent, match[group] if match else path.name), []).append(path)
    return list(found.values())


def _slices(dump: Record, path: Path) -> Iterator[tuple[object, Slice]]:
    """Yield what a file holds of each sample, with its index, or its tokens where there is none."""
    held = {name: plain(one) for name, one in dump["rollout_data"].items() if isinstance(name, str)}
    lengths = held.get("response_lengths")
    if not isinstance(lengths, list | np.ndarray):
        raise DumpError(f"{path}: no 'response_lengths' is in its 'rollout_data'", "was the file changed?")
    for i in range(len(lengths)):
        values = {name: _at(held, name, i) for name in (*WHOLE, *SLICED)}
        where = f"{path}, sample {i}"
        total, response = (
            _length(values[name], name, where) for name in ("total_lengths", "response_lengths")
        )
        padded = None if dump.get("qkv_format", "bshd") == "thd" else _at(held, "max_seq_lens", i)
        index, rank = _at(held, "sample_indices", i), dump.get("cp_rank")
        place: tuple[int, int] | tuple[()] = ()
        if rank is not None:
            count = _length(dump.get("cp_size"), "cp_size", str(path))
            place = _length(rank, "cp_rank", str(path)), max(1, count)
        tokens = numbers([] if values["tokens"] is None else values["tokens"], "tokens", where)
        width = total if padded is None else _length(padded, "max_seq_lens", where)
        key = (tokens.tobytes(), response) if index is None else _integer(index, -1)
        yield key, Slice(values, total, response, width, *place)


def _at(held: Mapping[str, Any], name: str, i: int) -> Any:
    """Return a value of a column, an array where it is a list of numbers."""
    values = held.get(name)
    if not isinstance(values, list | np.ndarray) or i >= len(values):
        return None
    value = plain(values[i])
    if isinstance(value, np.ndarray) and not value.ndim:
        return value.item()
    return NO_NUMBERS if isinstance(value, list) and not _numeric(value) else value


def _length(value: object, name: str, where: str) -> int:
    """Return a number of tokens or ranks."""
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise DumpError(f"{where}: {name!r} is no length", "was the file changed?")
    return value


def _count(samples: Sequence[Sequence[Slice]], where: str) -> int:
    """Return the number of context-parallel ranks; where it is not said, the one that fits all slices."""
    said = {one.count for slices in samples for one in slices if one.count is not None}
    if said and max(said) > SIZES[-1]:
        raise DumpError(f"{where}: {max(said)} context-parallel ranks are more than {SIZES[-1]}", TOGETHER)
    if said:
        return max(said)
    cut = [slices for slices in samples if not any(_whole(one) for one in slices)]
    for count in SIZES if cut else (1,):
        if count == 1 or all(_fitting(slices, count) for slices in cut):
            return count
    raise DumpError(f"{where}: the slices of its ranks fit no number of context-parallel ranks", TOGETHER)


def _probe(one: Slice) -> Any:
    """Return the column by which slices are told from each other."""
    values = (one.values.get(name) for name in (*SLICED, LOSS[role.CURRENT]))
    return next((x for x in values if isinstance(x, np.ndarray)), None)


def _whole(one: Slice) -> bool:
    values = _probe(one)
    return values is not None and len(values) == one.response


def _fitting(slices: Sequence[Slice], count: int) -> dict[int, Slice] | None:
    """Return the slices by their rank, if their widths are those of so many ranks, in order."""
    distinct: dict[bytes, Slice] = {}
    for one in slices:
        values = _probe(one)
        if values is not None and len(values):
            distinct.setdefault(values.tobytes(), one)
    holders = [rank for rank in range(count) if slices[0].width(rank, count)]
    widths = [slices[0].width(rank, count) for rank in holders]
    if widths != [len(_probe(one)) for one in distinct.values()]:
        return None
    return dict(zip(holders, distinct.values(), strict=True))


def _joined(slices: Sequence[Slice], name: str, count: int, where: str) -> Any:
    """Return a column of a sample, its slices at their places; None where no rank has it."""
    holders = [one for one in slices if one.values.get(name) is not None]
    if not holders:
        return None
    first = holders[0]
    if count == 1 or (first.rank is None and any(map(_whole, holders))):
        return next((one.values[name] for one in holders if _whole(one)), first.values[name])
    if first.rank is None:
        placed = _fitting(holders, count)
    else:
        placed = {one.rank: one for one in reversed(holders) if one.rank is not None}
    needed = [rank for rank in range(count) if first.width(rank, count)]
    if placed is None or not placed.keys() >= set(needed):
        raise DumpError(f"{where}: {name} is there for some of its {count} context-parallel ranks", TOGETHER)
    parts = {rank: numbers(placed[rank].values[name], name, where) for rank in needed}
    if any(len(values) != first.width(rank, count) for rank, values in parts.items()) or (
        sum(map(len, parts.values())) != first.response
    ):
        said = ", ".join(f"{len(values)} of {first.width(rank, count)}" for rank, values in parts.items())
        what = f"{where}: {name} is cut otherwise than for {count} context-parallel ranks (values: {said})"
        raise DumpError(what, TOGETHER)
    found = np.zeros(first.response, np.float32)
    for rank, values in parts.items():
        taken = 0
        for begin, end in first.spans(rank, count):
            found[begin:end] = values[taken : taken + end - begin]
            taken += end - begin
    return found


# ---------------------------------------------------------------- miles

LOSS = {
    role.ROLLOUT: "rollout_log_probs",
    role.OLD: "old_log_probs",
    role.CURRENT: "train_log_probs",
    role.MASK: "local_loss_mask",
    role.ADVANTAGES: "advantages",
}


def miles_columns(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read `dashboard_columns`: the rollout's log-probs, mask and tokens, without the trainer's."""
    names = {key: SAMPLE[key] for key in (role.ROLLOUT, role.MASK, role.TOKEN_IDS)}
    for where, record in generic.table_records(files):
        row = generic.by_names(record, where, names, columns, used=OF_A_SAMPLE)
        row.tokens[role.TOKEN_IDS] = _response(row, record.get("response_length"))
        row.tokens.setdefault(role.MASK, np.ones(len(row.tokens[role.TOKEN_IDS]), np.int8))
        found = re.search(r"rollout_(\d+)\.parquet", where)
        row.scalars |= _named(int(found[1]) if found else 0, _integer(record.get("sample_index")))
        yield row


def policy_loss(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read `policy_loss_debug`: all three log-probs of each call of the loss, without ids.

    Tensor-parallel ranks repeat each other; the slices of context-parallel ones are put together by their
    widths.
    """
    for paths in _by(files, r"rank_(\d+)_call_(\d+)\.pt$", 2):
        samples: dict[tuple[int, int, int], list[Slice]] = {}
        for path in paths:
            for i, one in enumerate(_dump(path, "samples")["samples"]):
                where = f"{path}, sample {i}"
                record = _record(one, where)
                total = _length(record.get("total_length"), "total_length", where)
                response = _length(record.get("response_length"), "response_length", where)
                values = {
                    name: numbers(record[name], name, where) for name in LOSS.values() if name in record
                }
                samples.setdefault((i, total, response), []).append(Slice(values, total, response, total))
        call = re.search(r"call_(\d+)", paths[0].name)
        for (i, _, response), slices in sorted(samples.items()):
            where = f"{paths[0]}, sample {i}"
            if any(map(_full, slices)):
                distinct = {_full(one): one for one in slices if _full(one)}
                records: list[dict[str, Any]] = [dict(one.values) for one in distinct.values()]
            elif not response:
                continue
            else:
                count = _count([slices], where)
                records = [{name: _joined(slices, name, count, where) for name in slices[0].values}]
            for at, record in enumerate(records):
                row = generic.by_names(record, where, LOSS, columns)
                row.tokens[role.MASK] = (row.tokens.get(role.MASK, np.zeros(0)) != 0).astype(np.int8)
                row.scalars |= {role.SEQUENCE: f"{call[1] if call else 0}/{i}/{response}/{at}"}
                yield row


def _full(one: Slice) -> bytes:
    """Return what tells a whole sample from another one; nothing for a slice."""
    first = one.values.get(LOSS[role.CURRENT])
    whole = first is not None and len(first) == one.response
    return b"".join(values.tobytes() for values in one.values.values()) if whole else b""
