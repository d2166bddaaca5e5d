"""Text dumps that trainers write themselves: NeMo-RL and prime-rl."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offpol_diag.errors import DumpError
from offpol_diag.forms import generic
from offpol_diag.forms.files import records
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
