"""Text dumps that trainers write themselves: NeMo-RL, prime-rl, ROLL, open-instruct, verl, TRL, ms-swift."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.forms import generic
from offpol_diag.forms.files import Head, records, undamaged
from offpol_diag.forms.form import Array, Row, named, prompt_ids, step_in
from offpol_diag.readers import columns as role


def _short(values: object) -> str:
    """Return a short name that is the same for the same prompt."""
    data = values.tobytes() if isinstance(values, np.ndarray) else repr(values).encode()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# ---------------------------------------------------------------- NeMo-RL

NEMO = {
    role.ROLLOUT: "generation_logprobs",
    role.OLD: "prev_logprobs",
    role.MASK: "token_loss_mask",
    role.ADVANTAGES: "advantages",
    role.REWARDS: "rewards",
    role.TOKEN_IDS: "token_ids",
}
CERTAIN = 0.05
"""Mean |log-prob| of the trainer up to which a run of exact zeros may have been sampled."""


def nemo_rl(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read `train_data_step*.jsonl`: every field is a list of one, padded, over prompt and response.

    Index 0 holds a placeholder and is masked. Versions up to 0.5 have no masks; the sampled tokens are then
    those whose log-prob is not exactly 0.
    """
    for where, record in records(files):
        one = {
            name: value[0] if isinstance(value, list) and len(value) == 1 else value
            for name, value in record.items()
        }
        used = ("input_lengths", "sample_loss_mask", "idx")
        row = generic.by_names(one, where, NEMO, columns, used=used)
        length = one.get("input_lengths")
        if not isinstance(length, int) or length < 0:
            hint = "NeMo-RL writes it; was the file changed?"
            raise DumpError(f"{where}: no 'input_lengths', the number of tokens without padding", hint)
        row.tokens = {name: values[:length] for name, values in row.tokens.items()}
        if role.MASK in row.tokens:
            sample = one.get("sample_loss_mask", 1)
            if not isinstance(sample, int | float):
                raise DumpError(f"{where}: 'sample_loss_mask' is no number", "was the file changed?")
            row.tokens[role.MASK] = ((row.tokens[role.MASK] != 0) & (sample != 0)).astype(np.int8)
        elif role.ROLLOUT in row.tokens:
            row.tokens[role.MASK] = _sampled(row.tokens[role.ROLLOUT], row.tokens.get(role.OLD))
        row.tokens.get(role.MASK, np.zeros(1))[:1] = 0
        _without_placeholder(row, role.OLD)
        step = step_in(where, r"train_data_step(\d+)\.jsonl")
        row.scalars |= named(step, one.get("idx")) | _prompt(row)
        yield row


def _prompt(row: Row) -> dict[str, Any]:
    """Return the group of a whole sequence, by its tokens before the first that counts, and their number."""
    if role.TOKEN_IDS not in row.tokens or role.MASK not in row.tokens or not row.tokens[role.MASK].any():
        return {}
    prompt = row.tokens[role.TOKEN_IDS][: int(row.tokens[role.MASK].argmax())]
    with np.errstate(invalid="ignore"):  # an id beyond 64 bits names a group as well
        found = {role.GROUP: _short(prompt.astype(np.int64)), role.PROMPT_LENGTH: len(prompt)}
        return found | prompt_ids(prompt)


def _sampled(rollout: Array, train: Array | None) -> Array:
    """Return which tokens were sampled: not the prompt, nor later runs of exact zeros that are uncertain."""
    zero = rollout == 0
    mask = ~zero
    edges = np.flatnonzero(np.diff(np.concatenate([[0], zero.astype(np.int8), [0]])))
    for begin, end in edges.reshape(-1, 2):
        sure = train is not None and len(train) >= end and np.abs(train[begin:end]).mean() < CERTAIN
        if begin and sure:
            mask[begin:end] = True
    return np.asarray(mask, np.int8)


def _without_placeholder(row: Row, name: str) -> None:
    """Drop a column of zeros, which stands where a trainer skipped the pass that computes it."""
    values, mask = row.tokens.get(name), row.tokens.get(role.MASK)
    if values is not None and len(values) and not values.any() and (mask is None or mask.any()):
        del row.tokens[name]


# ---------------------------------------------------------------- prime-rl

PRIME = {
    role.ROLLOUT: "inference_logprobs",
    role.OLD: "trainer_logprobs",
    role.MASK: "loss_mask",
    role.ADVANTAGES: "advantages",
    role.TOKEN_IDS: "token_ids",
    role.ENTROPY: "entropy",
    role.STEP: "step",
}


def prime_rl(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read the token export: whole sequences; the trainer's only log-probs are old and current at once."""
    for where, record in records(files):
        more, used = ("env_name", "rank", "run_id"), ("rewards", "export_sequence_idx")
        row = generic.by_names(record, where, PRIME, columns, more, used)
        if role.OLD in row.tokens:
            row.tokens.setdefault(role.CURRENT, row.tokens[role.OLD])
        if isinstance(row.tokens.get(role.ADVANTAGES), np.ndarray):  # null: the token is in no policy loss
            row.tokens[role.ADVANTAGES] = np.nan_to_num(row.tokens[role.ADVANTAGES].astype(np.float64))
        rewards = record.get("rewards")
        if isinstance(rewards, list):
            known = [one for one in rewards if one is not None]
            row.scalars |= {role.REWARDS: known[-1]} if known else {}
        within = (record.get(name) for name in ("run_id", "step", "rank", "export_sequence_idx"))
        row.scalars[role.SEQUENCE] = "/".join(str(one) for one in within if one is not None)
        row.scalars |= _prompt(row)
        yield row


def stable(files: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Leave out steps that are still being written: the exporter marks finished ones with a file STABLE."""
    done = [path for path in files if path.with_name("STABLE").exists()]
    left = sorted({str(path.parent) for path in files if path not in set(done)})
    if not done:
        hint = "wait for the step to end; if the run was stopped, make an empty file STABLE there"
        raise DumpError(f"{left[0]}: no file STABLE, so its ranks may still be writing", hint)
    return done, [f"{name} has no file STABLE and is left out" for name in left]


# ---------------------------------------------------------------- ROLL

ROLL = {
    role.OLD: "logprobs",
    role.MASK: "new_response_mask",
    role.ENTROPY: "old_log_probs2_entropy",
    role.REWARDS: "reward",
    role.STEP: "step",
}


def roll(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read the logging board: the trainer's log-probs only, from the first response token on, padded."""
    for count, (where, record) in enumerate(records(files)):
        row = generic.by_names(record, where, ROLL, columns, used=("prompt",))
        _without_placeholder(row, role.OLD)
        row.scalars |= {role.SEQUENCE: count}
        if record.get("prompt") is not None:
            row.scalars |= {role.GROUP: _short(record["prompt"])}
        yield row


# ---------------------------------------------------------------- open-instruct

OPEN_INSTRUCT = {
    role.ROLLOUT: "logprobs",
    role.TOKEN_IDS: "response_tokens",
    role.ADVANTAGES: "advantage",
    role.REWARDS: "reward",
    role.STEP: "step",
}


def open_instruct(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read rollout traces: the response, without the trainer's log-probs and without a mask.

    Where a tool was called its tokens have log-prob 0, and are masked; so is NaN.
    """
    for where, record in records(files):
        more, used = ("dataset",), ("prompt_tokens", "request_info", "sample_idx", "prompt_idx")
        row = generic.by_names(record, where, OPEN_INSTRUCT, columns, more, used)
        rollout = row.tokens.get(role.ROLLOUT)
        if rollout is not None:
            info = record.get("request_info")
            called = isinstance(info, dict) and bool(info.get("tool_calleds"))
            row.tokens[role.MASK] = (np.isfinite(rollout) & ~(called & (rollout == 0))).astype(np.int8)
        step = record.get("step")
        row.scalars |= {role.SEQUENCE: f"{step}/{record.get('sample_idx')}"}
        row.scalars |= {role.GROUP: f"{step}/{record.get('prompt_idx')}"}
        if isinstance(prompt := record.get("prompt_tokens"), list):
            row.scalars |= {role.PROMPT_LENGTH: len(prompt)} | prompt_ids(prompt)
        yield row


# ---------------------------------------------------------------- texts: verl, TRL, ms-swift


def verl(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read rollout dumps: text and score; log-probs come from a second file."""
    for where, record in records(files):
        names, more = {role.REWARDS: "score", role.STEP: "step"}, ("request_id", "data_source")
        row = generic.by_names(record, where, names, columns, more, ("uid", "input"))
        uid = record.get("uid")
        if uid is not None:  # {uid}_{session}_{index}
            row.scalars |= {role.SEQUENCE: uid, role.GROUP: str(uid).rsplit("_", 2)[0]}
        elif record.get("input") is not None:
            row.scalars |= {role.GROUP: _short(record["input"])}
        yield row


TEXTS = frozenset({"prompt", "completion"})


def trl(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read completions: text, with the columns that a reward function or a hook adds."""
    return _completions(generic.table_records(files), columns)


def ms_swift(files: Sequence[Path], columns: Mapping[str, str]) -> Iterator[Row]:
    """Read completions: a record per sequence, or one with a list of values per field."""
    return _completions(_exploded(files), columns)


def _completions(each: Iterator[tuple[str, dict[str, Any]]], columns: Mapping[str, str]) -> Iterator[Row]:
    for where, record in each:
        if "gen_step" in record and "step" not in record:
            record["step"] = record.pop("gen_step")
        if isinstance(record.get("step"), str) and record["step"].isdigit():
            record["step"] = int(record["step"])
        row = generic.row_of(record, where, columns, TEXTS, ("prompt",))
        if record.get("prompt") is not None:
            row.scalars.setdefault(role.GROUP, _short(record["prompt"]))
        yield row


def _exploded(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the sequences of records whose fields are lists of values, one per sequence."""
    for where, record in records(files):
        completions = record.get("completion")
        if not isinstance(completions, list):
            yield where, record
            continue
        columns = {name: value for name, value in record.items() if isinstance(value, list)}
        for name, value in columns.items():
            if len(value) != len(completions):
                what = f"{where}: {name!r} has {len(value)} values for {len(completions)} completions"
                raise DumpError(what, "a hook that adds a field must add it for every sequence")
        for i in range(len(completions)):
            yield f"{where}, sequence {i}", {name: value[i] for name, value in columns.items()}


def unrepeated(files: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Leave out files that repeat the one before: completions are logged again until the next generation."""
    kept: list[Path] = []
    notes: list[str] = []
    before: pa.Table | None = None
    for path in files:
        with undamaged(path):
            here = pq.read_table(path, columns=sorted(TEXTS)).select(sorted(TEXTS))
        if before is not None and here.equals(before):
            notes.append(f"{path} repeats {kept[-1]} and is left out")
        else:
            kept.append(path)
        before = here
    return kept, notes


def is_swift(head: Head) -> bool:
    """Return whether a file is a log of completions as ms-swift writes it."""
    steps = "gen_step" in head.fields or head.fields >= {"step", "advantages"}
    return head.kind == "jsonl" and head.fields >= TEXTS and steps
