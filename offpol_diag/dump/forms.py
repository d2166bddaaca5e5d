"""What trainers write by themselves → rows of a dump: NeMo-RL, prime-rl, slime, miles, SkyRL; JSON lines.

A form is a function: files → the columns of each sequence, by the names of `schema`. To add a form, write
its function (`prime_rl` is a short one) and its row in `FORMS`: whatever is raised in it becomes one error
that names `Files.where`.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offpol_diag.dump.schema import MASK, OLD, ROLLOUT, find_columns, require
from offpol_diag.dump.writer import Array, as_array
from offpol_diag.errors import DumpError

Row = dict[str, Any]
FOLD, FREE = 100, 1 << 28
"""Most bytes that a compressed byte may unfold to, and bytes that are free; log-probs unfold to 3 to 20."""
APPENDED = -0.05
"""Log-prob of the trainer below which a last token that the engine is certain of was not sampled."""


@dataclass
class Files:
    """The files of a form.

    Attributes:
        columns: the argument `--columns`.
        where: the file, and the line or sample of it, that is being read; for messages.
    """

    paths: Sequence[Path]
    columns: Mapping[str, str] = field(default_factory=dict)
    where: str = ""

    def records(self) -> Iterator[tuple[Path, Row]]:
        """Yield the objects of files of JSON lines, which may be gzipped."""
        for path in self.paths:
            opened, most = gzip.open if path.suffix == ".gz" else open, FREE + FOLD * path.stat().st_size
            with opened(path, "rb") as file:
                for number, line in enumerate(iter(partial(file.readline, most), b""), 1):
                    self.where = f"{path}, line {number}"
                    if file.tell() >= most:
                        raise ValueError(f"the file unfolds to more than {FOLD} times its size")
                    if line.strip():
                        yield path, json.loads(line)


@contextmanager
def explained(files: Files, trainer: str) -> Iterator[None]:
    """Turn what a record or a file that is damaged, or of another version, raises into one error."""
    try:
        yield
    except DumpError:
        raise
    except Exception as error:  # of any type: a damaged pickle raises what its instructions meet
        why = " ".join(str(error).split())[:200] or type(error).__name__
        why = f"no field {why}" if isinstance(error, KeyError) else why
        hint = "was the file changed, or cut off? see docs/trainers"
        writer = trainer or "a writer of JSON lines"
        raise DumpError(f"{files.where}: not as {writer} writes it ({why})", hint) from error


def numbers(value: Any, name: str = "a column") -> Array:
    """Return a list of numbers or a tensor as an array; null is NaN."""
    found = as_array(value)
    if found.dtype == object:
        found = np.asarray(value, np.float64)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "fiub"):
        raise ValueError(f"{name} is no list of numbers")
    return found if found.size else np.empty(0, np.float32)


# ---------------------------------------------------------------- JSON lines, NeMo-RL, prime-rl


def json_lines(files: Files) -> Iterator[Row]:
    """One object per sequence, a list per token column, under any names; other plain fields are kept."""
    for _, one in files.records():
        found = find_columns([*one], files.columns, files.where)
        found = {name: key for name, key in found.items() if one[key] is not None}
        require(found, [*one], files.where)
        row: Row = {key: x for key, x in one.items() if isinstance(x, int | float | str)}
        for name, key in found.items():
            row.pop(key, None)
            row[name] = numbers(one[key], key) if isinstance(one[key], list) else one[key]
        yield row


def response_of(mask: Any, tokens: Any, **columns: Any) -> Row:
    """Cut columns over prompt and response to the response; it is empty if no token counts.

    The response begins at the first token that counts, and ends at the last one.
    """
    counts = numbers(mask, "the mask") != 0
    n, at = len(counts), np.flatnonzero(counts)
    first, last = (int(at[0]), int(at[-1]) + 1) if at.size else (0, 0)
    ids = numbers(tokens, "token_ids")[:n]
    row = {name: numbers(x, name)[:n][first:last].copy() for name, x in columns.items() if x is not None}
    row |= {MASK: counts[first:last].astype(np.int8), "token_ids": ids[first:last]}
    group = blake2b(ids[:first].tobytes(), digest_size=8).hexdigest()
    return row | {"prompt_ids": ids[:first], "prompt_length": first, "group_id": group}


def step_of(path: Path) -> int | None:
    """Return the training step that is in a file's name."""
    found = re.search(r"step_?(\d{1,17})", path.name)
    return int(found[1]) if found else None


def nemo_rl(files: Files) -> Iterator[Row]:
    """`train_data_step*.jsonl` since 0.6 (nemo_rl/utils/logger.py): each field is a list of one, padded.

    Index 0 holds a placeholder, and is masked.
    """
    for i, (path, one) in enumerate(files.records()):
        one = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in one.items()}
        n, step = one["input_lengths"], step_of(path)
        mask = (numbers(one["token_loss_mask"])[:n] != 0) & (float(one.get("sample_loss_mask", 1)) != 0)
        mask[:1] = 0
        old = numbers(one["prev_logprobs"], "prev_logprobs")[:n]
        yield response_of(
            mask,
            one["token_ids"][:n],
            rollout_log_probs=one["generation_logprobs"],
            old_log_probs=old if old.any() else None,  # that pass was skipped
            advantages=one.get("advantages"),
        ) | {"rewards": one.get("rewards"), "step": step, "sequence_id": f"{step}/{one.get('idx', i)}"}


def prime_rl(files: Files) -> Iterator[Row]:
    """`token_exports/step_*/rank_*.jsonl` (rl/token_export.py): one pass, which is old and current."""
    for _, one in files.records():
        old, advantages = numbers(one["trainer_logprobs"], "trainer_logprobs"), one.get("advantages")
        within = (one.get(name) for name in ("run_id", "step", "rank", "export_sequence_idx"))
        yield response_of(
            one["loss_mask"],
            one["token_ids"],
            rollout_log_probs=one["inference_logprobs"],
            old_log_probs=old,
            current_log_probs=old,
            advantages=advantages and np.nan_to_num(numbers(advantages).astype(float)),
            entropy=one.get("entropy"),
        ) | {
            "sequence_id": "/".join(str(x) for x in within if x is not None),
            "step": one["step"],
            "env_name": one.get("env_name"),
            "rewards": next((x for x in reversed(one.get("rewards") or []) if x is not None), None),
        }


# ---------------------------------------------------------------- slime, miles

SLIME = {"log_probs": OLD} | {name: name for name in (ROLLOUT, "advantages", "entropy")}
"""Their columns → ours; a context-parallel rank holds a slice of each."""


def slime(files: Files) -> Iterator[Row]:
    """`train_data/{rollout}.pt` of slime since 2026-08-12 (observability/train_data_utils.py).

    And `{rollout}_{rank}.pt` of miles, and of slime up to 0.3.1 (utils/train_dump_utils.py): tensor-parallel
    ranks repeat each other, only the last pipeline stage has log-probs, and each context-parallel rank has
    two chunks of the response, from both ends (training_utils/cp_utils.py). `rollout_data/` beside it has
    groups, raw rewards and why responses ended.
    """
    for (folder, _), group in groupby(files.paths, lambda path: (path.parent, path.stem.partition("_")[0])):
        rows = dict[int, Row]()
        for path in group:
            files.where = str(path)
            dump = load(path)
            for index, sample in _samples(dump):
                files.where = f"{path}, sample {index}"
                _add_sample(rows.setdefault(index, {}), sample, dump)
        rollout = dump["rollout_id"]
        beside = folder.parent / "rollout_data" / f"{rollout}.pt"
        files.where = str(beside)
        samples = load(beside)["samples"] if beside.is_file() else ()
        sampled = {one.get("index", i): one for i, one in enumerate(samples)}
        for index, row in rows.items():
            files.where = f"{folder}, rollout {rollout}, sample {index}"
            if any(np.isnan(row[name]).any() for name in SLIME.values() if name in row):
                raise ValueError("context-parallel ranks are missing: read all files of a rollout together")
            other = sampled.get(index, {})
            raw = other.get("reward")
            yield row | {
                "rewards": raw if isinstance(raw, int | float) else row["rewards"],
                "group_id": other.get("group_index"),
                "finish_reason": other.get("status"),
                "step": rollout,
                "sequence_id": f"{rollout}/{index}",
            }


def _samples(dump: Row) -> Iterator[tuple[int, Row]]:
    """Yield index and columns of the samples of a file: of a list of them, or of lists by column."""
    if "samples" in dump:
        raw = dump.get("raw_reward")
        for i, one in enumerate(dump["samples"]):
            at = one.get("rollout_position", i)
            yield one.get("sample_index", at), one | ({"rewards": raw[at]} if isinstance(raw, list) else {})
        return
    data = {name: x for name, x in dump["rollout_data"].items() if isinstance(x, list)}
    for i, index in enumerate(data["sample_indices"]):
        yield index, {name: x[i] for name, x in data.items() if name != "raw_reward"}


def _add_sample(row: Row, sample: Row, dump: Row) -> None:
    """Put what a file has of a sample into its row, and a rank's slice of log-probs at its places.

    Of 2·count chunks of all tokens, a context-parallel rank has those of numbers rank and 2·count − 1 − rank.
    """
    n, tokens = sample["response_lengths"], numbers(sample["tokens"], "tokens")
    rank, count, total = dump.get("cp_rank") or 0, dump.get("cp_size") or 1, len(tokens)
    padded = total if dump.get("qkv_format") == "thd" else sample.get("max_seq_lens", total)
    if not (0 <= rank < count and 0 <= n < total <= padded):
        raise ValueError(f"rank {rank} of {count} has no part of {n} of {total} tokens")
    size = -(-padded // (2 * count))
    chunk = np.arange(total - n - 1, total - 1) // size  # a log-prob lies before its token
    at = np.isin(chunk, (rank, 2 * count - 1 - rank)) | (count == 1)
    for name in SLIME.keys() & sample.keys():
        values = numbers(sample[name], name)
        if len(values) != at.sum():
            raise ValueError(f"{len(values)} {name}, and rank {rank} of {count} has {at.sum()}")
        row.setdefault(SLIME[name], np.full(n, np.nan, np.float32))[at] = values
    row.setdefault(MASK, numbers(sample["loss_masks"], "loss_masks"))
    row.setdefault("token_ids", tokens[total - n :])
    row.setdefault("prompt_ids", tokens[: total - n])
    row.setdefault("prompt_length", total - n)
    row.setdefault("rewards", sample.get("rewards"))


def load(file: Path | io.BytesIO) -> Any:
    """Read what `torch.save` has written: plain values and tensors; torch refuses anything that could run."""
    import torch

    return torch.load(file, map_location="cpu", weights_only=True)


# ---------------------------------------------------------------- SkyRL


class Stub:
    """An object of a class that is not loaded: its state alone."""

    def __init__(self, *args: object) -> None:
        self.state: Any = args[-1] if args else None

    def __setstate__(self, state: object) -> None:
        self.state = state


class Unpickler(pickle.Unpickler):
    """An unpickler that runs no code of the file: whatever it names becomes a `Stub`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        return Stub


def skyrl(files: Files) -> Iterator[Row]:
    """`dumped_data/global_step_*_training_input.pkl` (training_batch.py): padded on the left.

    An end that the generator appended has rollout log-prob 0; it was not sampled, and is masked.
    """
    for path in files.paths:
        files.where, step = str(path), step_of(path)
        state = Unpickler(io.BytesIO(path.read_bytes())).load().state
        data = {name: _array(one) for name, one in state["batch_dict"].items() if isinstance(one, dict)}
        mask, width = data["loss_mask"] != 0, data["loss_mask"].shape[1]
        rollout, old = data["rollout_logprobs"], data["action_log_probs"]
        mask[:, -1] &= ~((rollout[:, -1] == 0) & (old[:, -1] < APPENDED))
        parts = (state.get("metadata") or {}).get("policy_prompt_boundaries") or []
        cut = ((max(first, 0), min(last, len(mask))) for first, last in parts)
        groups = {row: group for group, part in enumerate(cut) for row in range(*part)}
        begins = (data["response_mask" if "response_mask" in data else "loss_mask"] != 0).argmax(1)
        for i, begin in enumerate(begins):
            files.where = f"{path}, sequence {i}"
            yield {
                ROLLOUT: rollout[i, begin:],
                OLD: old[i, begin:],
                MASK: mask[i, begin:].astype(np.int8),
                "token_ids": data["sequences"][i, data["sequences"].shape[1] - width :][begin:],
                "advantages": data["advantages"][i, begin:] if "advantages" in data else None,
                "rewards": float(data["rewards"][i].sum()) if "rewards" in data else None,
                "group_id": groups.get(i),
                "step": step,
                "sequence_id": f"{step}/{i}",
            }


def _array(one: Row) -> Array:
    """Return a tensor that SkyRL has made bytes of: with its type and shape, or by torch.save."""
    if one["format"] == "torch":
        return as_array(load(io.BytesIO(one["data"])))
    return np.frombuffer(one["data"], one["dtype"]).reshape(one["shape"])


# ---------------------------------------------------------------- which form


class Form(NamedTuple):
    """A form of the files that a trainer writes; a file is of the first form of the table that fits it.

    Attributes:
        name: its name in reports and docs.
        trainer: the trainers that write it; none for JSON lines of any.
        files: what its files are called, for the docs.
        path: a regular expression that the last two names of a file's path match.
        fields: fields that the first record of its JSON lines has.
        rows: the function that reads it.
        page: of docs/trainers, with the hook that writes the log-probs of both policies.
    """

    name: str
    trainer: str
    files: str
    path: str
    fields: str
    rows: Callable[[Files], Iterator[Row]]
    page: str = ""


LINES = r".*\.jsonl(\.gz)?"
# fmt: off
FORMS = (
    Form("nemo-rl", "NeMo-RL", "train_data_step*.jsonl", LINES,
         "generation_logprobs prev_logprobs input_lengths", nemo_rl, "nemo-rl"),
    Form("prime-rl", "prime-rl", "token_exports/step_*/rank_*.jsonl", LINES,
         "inference_logprobs trainer_logprobs loss_mask", prime_rl, "prime-rl"),
    Form("slime", "slime", "train_data/*.pt", r"(?!rollout_data/).*/\d+\.pt", "", slime, "slime"),
    Form("ranks", "miles, slime up to 0.3.1", "train_data/*_*.pt", r".*/\d+_\d+\.pt", "", slime, "slime"),
    Form("skyrl", "SkyRL", "dumped_data/*_training_input.pkl", r".*_training_input\.pkl", "", skyrl, "skyrl"),
    Form("jsonl", "", "*.jsonl, *.jsonl.gz", LINES, "", json_lines),
)
# fmt: on
ENDINGS = (".jsonl", ".jsonl.gz", ".pt", ".pkl")
"""Endings of files that are of a form."""


def recognise(path: Path) -> Form | None:
    """Return the form of a file, by its path and its first record."""
    files, fields = Files([path], where=str(path)), set[str]()
    if ".jsonl" in path.name:
        with explained(files, ""):
            fields = {*next(files.records(), (path, {}))[1]}
    place = "/".join(path.absolute().parts[-2:])
    return next((x for x in FORMS if re.fullmatch(x.path, place) and {*x.fields.split()} <= fields), None)
