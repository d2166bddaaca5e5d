"""Dumps of slime and miles: train data per rollout or per rank, the loss."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offpol_diag.errors import DumpError
from offpol_diag.forms import generic
from offpol_diag.forms.form import Array, Row, named, numbers, prompt_ids
from offpol_diag.forms.generic import Record, record_of
from offpol_diag.forms.pickles import load, plain
from offpol_diag.readers import columns as role
from offpol_diag.versions import UNKNOWN

SLIME = {
    role.ROLLOUT: "rollout_log_probs",
    role.OLD: "log_probs",
    role.MASK: "loss_masks",
    role.ADVANTAGES: "advantages",
    role.REWARDS: "rewards",
    role.ENTROPY: "entropy",
    role.TOKEN_IDS: "tokens",
}
OF_A_SAMPLE = (
    *("response_length", "response_lengths", "total_lengths", "index", "sample_index", "rollout_position"),
    *("weight_versions", "status"),
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
            record = record_of(one, where)
            position = _integer(record.get("rollout_position"), i)
            index = _integer(record.get("sample_index"), position)
            if isinstance(raw, list) and 0 <= position < len(raw):
                record["rewards"] = raw[position] if type(raw[position]) in (int, float) else None
            yield _completed(record, where, columns, rollout, index, sampled)


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
        record = record_of(one, f"{beside}, sample {i}")
        found[_integer(record.get("index"), i)] = record
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
    row.scalars |= named(rollout, index)
    other = sampled.get(index, {})
    if type(other.get("reward")) in (int, float):
        row.scalars[role.REWARDS] = other["reward"]
    if type(other.get("group_index")) is int:
        row.scalars[role.GROUP] = other["group_index"]
    if role.ROLLOUT not in row.tokens and other.get("rollout_log_probs") is not None:
        row.tokens[role.ROLLOUT] = numbers(other["rollout_log_probs"], "rollout_log_probs", where)
    _tell(row, {**record, **other}, columns)
    return row


def _response(row: Row, length: object) -> Any:
    """Return the tokens of the response, which end those of the whole sequence."""
    tokens = row.tokens.get(role.TOKEN_IDS, np.empty(0, np.int64))
    if type(length) is not int or not 0 <= length <= len(tokens):
        what = f"{row.where}: the response has no length, or one that exceeds the {len(tokens)} tokens"
        raise DumpError(what, "slime writes it; was the file changed?")
    return tokens[len(tokens) - length :]


def _tell(row: Row, record: Record, columns: Mapping[str, str]) -> None:
    """Add what a sample says of its weights, its prompt and its end; of its weights also the oldest."""
    response, tokens = record.get("response_length", record.get("response_lengths")), record.get("tokens")
    prompt = 0
    if type(response) is int and isinstance(tokens, list | np.ndarray) and len(tokens) >= response:
        prompt = row.scalars[role.PROMPT_LENGTH] = len(tokens) - response
        row.scalars |= prompt_ids(tokens[:prompt])
    if isinstance(record.get("status"), str):
        row.scalars[role.FINISH_REASON] = record["status"]
    oldest, each = _versions(row, record.get("weight_versions"), prompt)
    if oldest is not None:
        row.scalars[role.ROLLOUT_VERSION] = oldest
        if columns.get(role.WEIGHT_VERSIONS) != role.NONE:
            row.tokens[role.WEIGHT_VERSIONS] = each


def _versions(row: Row, value: object, prompt: int) -> tuple[int | None, Array]:
    """Return the oldest weights that sampled a response, and those of each token.

    slime names the weights of each call of the engine by a text, miles the spans of tokens. Where there are
    more texts than turns, weights changed within a turn, and nothing says where.
    """
    mask = row.tokens.get(role.MASK, np.empty(0))
    found = np.full(len(mask), UNKNOWN, np.int64)
    calls = [one for one in value if one] if isinstance(value, list) else []
    if any(isinstance(one, list | dict) for one in calls):
        found = generic.spread(calls, len(mask), row.where, prompt)
        known = found[found > UNKNOWN]
        return (int(known.min()) if known.size else None), found
    known = np.array([int(one) for one in calls if str(one).isdecimal() and len(str(one)) < 18], np.int64)
    turns = np.flatnonzero(np.diff(np.concatenate([[0], mask != 0, [0]]))).reshape(-1, 2)
    if known.size == len(calls) and (known.size == len(turns) or len({*known.tolist()}) == 1):
        for i, (begin, end) in enumerate(turns):
            found[begin:end] = known[min(i, known.size - 1)]
    return (int(known.min()) if known.size else None), found


# ---------------------------------------------------------------- a file per rank: slime up to 0.3.1, miles

SLICED = ("rollout_log_probs", "log_probs", "advantages", "entropy")
"""Columns of which a context-parallel rank holds its slice; the others are whole."""
WHOLE = ("tokens", "loss_masks", "rewards", "total_lengths", "response_lengths", "weight_versions")
TOGETHER = "convert the files of all ranks of a rollout together, and none of another run"


@dataclass(frozen=True)
class Slice:
    """The part of a sample that one rank holds: its slices of columns, or all of them.

    Attributes:
        total, response: tokens of the sequence, and of its response.
        padded: length to which sequences are padded before they are cut; their own where they are packed.
        rank, count: place among the context-parallel ranks, and their number; files of slime up to 0.3.1, and
            those of the loss, do not say it.
    """

    values: Mapping[str, Any]
    total: int
    response: int
    padded: int
    rank: int = 0
    count: int = 1

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """Return the two spans of the response that a rank holds.

        A sequence is cut into 2·count chunks, of which rank r has the r-th from both ends; the log-prob of a
        token lies where the token before it does.
        """
        if self.count == 1:
            return [(0, self.response)]
        chunk = -(-self.padded // (2 * self.count))
        prompt = self.total - self.response
        both = (
            (max(at * chunk, prompt - 1), min((at + 1) * chunk, self.total - 1))
            for at in (rank, 2 * self.count - 1 - rank)
        )
        return [(begin - prompt + 1, end - prompt + 1) for begin, end in both if begin < end]


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
        for i, (key, slices) in enumerate(samples.items()):
            index = key if isinstance(key, int) else i
            where = f"{paths[0]}, sample {index}"
            record = dict(slices[0].values) | {name: _joined(slices, name, where) for name in SLICED}
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
    place: tuple[int, ...] = ()
    if dump.get("cp_rank") is not None:
        place = tuple(_length(dump.get(name), name, str(path)) for name in ("cp_rank", "cp_size"))
    for i in range(len(lengths)):
        where = f"{path}, sample {i}"
        values = {name: _at(held, name, i) for name in (*WHOLE, *SLICED)}
        total, response = (
            _length(values[name], name, where) for name in ("total_lengths", "response_lengths")
        )
        padded = None if dump.get("qkv_format", "bshd") == "thd" else _at(held, "max_seq_lens", i)
        width = total if padded is None else _length(padded, "max_seq_lens", where)
        index, tokens = _at(held, "sample_indices", i), values["tokens"]
        ids = numbers([] if tokens is None else tokens, "tokens", where).tobytes()
        yield (
            (ids, response) if index is None else _integer(index, -1),
            Slice(values, total, response, width, *place),
        )


def _at(held: Mapping[str, Any], name: str, i: int) -> Any:
    """Return a value of a column, an array where it is a list of numbers."""
    values = held.get(name)
    if not isinstance(values, list | np.ndarray) or i >= len(values):
        return None
    value = plain(values[i])
    return value.item() if isinstance(value, np.ndarray) and not value.ndim else value


def _length(value: object, name: str, where: str) -> int:
    """Return a number of tokens or ranks."""
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise DumpError(f"{where}: {name!r} is no length", "was the file changed?")
    return value


def _joined(slices: Sequence[Slice], name: str, where: str) -> Any:
    """Return a column of a sample, its slices at their places; None where no rank has it."""
    placed = {one.rank: one for one in reversed(slices) if one.values.get(name) is not None}
    if not placed:
        return None
    first = next(iter(placed.values()))
    needed = [rank for rank in range(first.count) if first.spans(rank)]
    if not placed.keys() >= set(needed):
        what = f"{where}: {name} is there for some of its {first.count} context-parallel ranks"
        raise DumpError(what, TOGETHER)
    parts = {rank: numbers(placed[rank].values[name], name, where) for rank in needed}
    widths = {rank: sum(end - begin for begin, end in first.spans(rank)) for rank in needed}
    if any(len(values) != widths[rank] for rank, values in parts.items()):
        said = ", ".join(f"{len(values)} of {widths[rank]}" for rank, values in parts.items())
        what = (
            f"{where}: {name} is cut otherwise than for {first.count} context-parallel ranks (values: {said})"
        )
        raise DumpError(what, f"{TOGETHER}; slices are joined where the files hold cp_rank and cp_size")
    if first.count == 1:
        return parts[0]
    found = np.zeros(first.response, np.float32)
    for rank, values in parts.items():
        for begin, end in first.spans(rank):
            found[begin:end], values = values[: end - begin], values[end - begin :]
    return found


# ---------------------------------------------------------------- miles

LOSS = {
    role.ROLLOUT: "rollout_log_probs",
    role.OLD: "old_log_probs",
    role.CURRENT: "train_log_probs",
    role.MASK: "local_loss_mask",
    role.ADVANTAGES: "advantages",
}


def policy_loss(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read `policy_loss_debug`: all three log-probs of each call of the loss, without ids.

    Tensor-parallel ranks repeat each other. The files do not say which slices context-parallel ranks hold.
    """
    for paths in _by(files, r"rank_(\d+)_call_(\d+)\.pt$", 2):
        call = re.search(r"call_(\d+)", paths[0].name)
        samples: dict[tuple[int, int], dict[bytes, tuple[str, dict[str, Any]]]] = {}
        for path in paths:
            for i, one in enumerate(_dump(path, "samples")["samples"]):
                where = f"{path}, sample {i}"
                record = record_of(one, where)
                response = _length(record.get("response_length"), "response_length", where)
                values = {
                    name: numbers(record[name], name, where) for name in LOSS.values() if name in record
                }
                whole = Slice(values, 0, response, 0)
                values = {name: _joined([whole], name, where) for name in values}
                same = b"".join(column.tobytes() for column in values.values())
                samples.setdefault((i, response), {}).setdefault(same, (where, values))
        for (i, response), each in sorted(samples.items()):
            for at, (where, values) in enumerate(each.values()):
                row = generic.by_names(values, where, LOSS, columns)
                row.tokens[role.MASK] = (row.tokens.get(role.MASK, np.zeros(0)) != 0).astype(np.int8)
                row.scalars |= {role.SEQUENCE: f"{call[1] if call else 0}/{i}/{response}/{at}"}
                yield row
