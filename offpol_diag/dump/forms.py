"""What trainers write by themselves → rows of a dump: NeMo-RL, prime-rl, slime, miles, SkyRL; JSON lines.

A form is a function: files → the columns of each sequence, by the names of `schema`; a row that is None has
no token that counts. To add a form, write its function and its row in `FORMS`: whatever goes wrong in it is
one error that names the place `Files.where`.
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
from hashlib import blake2b
from itertools import count, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offpol_diag.dump.schema import COLUMNS, FINISH_REASON, MASK, OLD, ROLLOUT, assigned, require
from offpol_diag.dump.writer import Array, as_array
from offpol_diag.errors import DumpError

Row = dict[str, Any]
Rows = Iterator[Row | None]
FOLD, FREE = 100, 1 << 28
"""Most bytes that a compressed byte may unfold to, and bytes that are free; log-probs unfold to 3 to 20."""
LONGEST_TEXT = 64
"""Characters of a text that describes a row's origin; longer ones are prompts and responses."""
APPENDED = -0.05
"""Log-prob of the trainer below which a last token that the engine is certain of was not sampled."""


@dataclass
class Files:
    """The files of a form, and where its function is: a file, and a line or sample of it.

    Attributes:
        columns: what `--columns` says.
    """

    paths: Sequence[Path]
    columns: Mapping[str, str] = field(default_factory=dict)
    where: str = ""

    def records(self, paths: Sequence[Path] = ()) -> Iterator[tuple[Path, Row]]:
        """Yield the objects of files (all by default) of JSON lines, which may be gzipped."""
        for path in paths or self.paths:
            unpacked, left = gzip.open if path.suffix == ".gz" else open, FREE + FOLD * path.stat().st_size
            with unpacked(path, "rb") as file:
                for number in count(1):
                    self.where = f"{path}, line {number}"
                    line = file.readline(left)
                    left -= len(line)
                    if not left:
                        raise ValueError(f"the file unfolds to more than {FOLD} times its size")
                    if not line:
                        break
                    if line.strip():
                        found = json.loads(line.decode("utf-8-sig"))
                        if not isinstance(found, dict):
                            raise ValueError(f"{type(found).__name__}, no JSON object")
                        yield path, found


@contextmanager
def explained(files: Files, trainer: str) -> Iterator[None]:
    """Turn what a record or a file that is damaged, or of another version, raises into one error."""
    try:
        yield
    except DumpError:
        raise
    except Exception as error:  # of any type: a damaged pickle raises what its instructions meet
        said = " ".join(str(error).split())[:200] or type(error).__name__
        said = f"no field {said}" if isinstance(error, KeyError) else said
        hint = "was the file changed, or cut off? see docs/trainers"
        raise DumpError(f"{files.where}: not as {trainer} writes it ({said})", hint) from error


def numbers(value: Any, name: str = "a column", dimensions: int = 1) -> Array:
    """Return a list of numbers or a tensor as an array; null is NaN."""
    if hasattr(value, "untyped_storage") and value.nbytes > value.untyped_storage().nbytes():
        raise ValueError(f"{name} repeats the numbers of a smaller tensor")  # it could take any memory
    found = as_array(value)
    if found.dtype == object:
        found = np.asarray(value, np.float64)
    if found.size and (found.ndim != dimensions or found.dtype.kind not in "fiub"):
        raise ValueError(f"{name} is no list of numbers")
    return found if found.size else np.empty(0, np.float32)


# ---------------------------------------------------------------- JSON lines, NeMo-RL, prime-rl


def json_lines(files: Files) -> Rows:
    """One object per sequence, a list per token column, under any names.

    Of fields that are no column, short ones, which may say where a row is from, are kept.
    """
    for _, one in files.records():
        found = assigned([*one], files.columns, files.where)
        found = {name: x for name, x in found.items() if one[x] is not None}
        require(found, [*one], files.where)
        plain = {x: y for x, y in one.items() if isinstance(y, int | float | str)}
        row: Row = {x: y for x, y in plain.items() if not isinstance(y, str) or len(y) <= LONGEST_TEXT}
        for name, key in found.items():
            value, column = one[key], COLUMNS[name]
            row.pop(key, None)
            if name == FINISH_REASON and isinstance(value, dict):  # as SGLang says it
                value = value.get("type")
            listed = column.holds in ("tokens", "list") or (column.of_tokens and isinstance(value, list))
            row[name] = numbers(value, key) if listed else value
        yield row


def whole(mask: Any, tokens: Any, **columns: Any) -> Row | None:
    """Return a row of columns over prompt and response; None if no token counts.

    The response begins at the first token that counts, and ends at the last one.
    """
    counts = np.asarray(mask) != 0
    if not counts.any():
        return None
    n = len(counts)
    first, last = int(counts.argmax()), n - int(counts[::-1].argmax())
    ids = numbers(tokens, "token_ids")[:n]
    row = {x: numbers(one, x)[:n][first:last].copy() for x, one in columns.items() if one is not None}
    row |= {MASK: counts[first:last].astype(np.int8), "token_ids": ids[first:last]}
    group = blake2b(ids[:first].tobytes(), digest_size=8).hexdigest()
    return row | {"prompt_ids": ids[:first], "prompt_length": first, "group_id": group}


def nemo_rl(files: Files) -> Rows:
    """`train_data_step*.jsonl` since 0.6 (nemo_rl/utils/logger.py): each field is a list of one, padded.

    Index 0 holds a placeholder, and is masked.
    """
    for i, (path, one) in enumerate(files.records()):
        one = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in one.items()}
        n, step = one["input_lengths"], _in_name(path, r"step(\d+)")
        mask = (numbers(one["token_loss_mask"])[:n] != 0) & (float(one.get("sample_loss_mask", 1)) != 0)
        mask[:1] = 0
        old = numbers(one["prev_logprobs"], "prev_logprobs")[:n]
        row = whole(
            mask,
            one["token_ids"][:n],
            rollout_log_probs=one["generation_logprobs"],
            old_log_probs=old if old.any() else None,  # that pass was skipped
            advantages=one.get("advantages"),
        )
        more = {"rewards": one.get("rewards"), "step": step, "sequence_id": f"{step}/{one.get('idx', i)}"}
        yield row and row | more


def prime_rl(files: Files) -> Rows:
    """`token_exports/step_*/rank_*.jsonl` (rl/token_export.py): one pass, which is old and current.

    Ranks of a step may still be writing until its file STABLE is there.
    """
    stable = [path for path in files.paths if path.with_name("STABLE").exists()]
    if not stable:
        hint = "wait for the step to end; if the run was stopped, make an empty file STABLE there"
        raise DumpError(f"{files.paths[0].parent}: no file STABLE, so its ranks may still be writing", hint)
    for _, one in files.records(stable):
        old, advantages = numbers(one["trainer_logprobs"], "trainer_logprobs"), one.get("advantages")
        row = whole(
            one["loss_mask"],
            one["token_ids"],
            rollout_log_probs=one["inference_logprobs"],
            old_log_probs=old,
            current_log_probs=old,
            advantages=advantages and np.nan_to_num(numbers(advantages).astype(float)),
            entropy=one.get("entropy"),
        )
        within = (one.get(name) for name in ("run_id", "step", "rank", "export_sequence_idx"))
        more = {
            "sequence_id": "/".join(str(x) for x in within if x is not None),
            "step": one["step"],
            "env_name": one.get("env_name"),
            "rewards": next((x for x in reversed(one.get("rewards") or []) if x is not None), None),
        }
        yield row and row | more


def _in_name(path: Path, pattern: str) -> int:
    found = re.search(pattern, path.name)
    return int(found[1]) if found and len(found[1]) < 18 else 0


# ---------------------------------------------------------------- slime, miles

SLIME = {"log_probs": OLD} | {name: name for name in (ROLLOUT, "advantages", "entropy")}
"""Their columns → ours, of which a context-parallel rank holds its slice."""


def slime(files: Files) -> Rows:
    """`train_data/{rollout}.pt` of slime since 2026-08-12 (observability/train_data_utils.py).

    And `{rollout}_{rank}.pt` of miles, and of slime up to 0.3.1 (utils/train_dump_utils.py): tensor-parallel
    ranks repeat each other, only the last pipeline stage has log-probs, and each context-parallel rank has
    two chunks of the response, from both ends (training_utils/cp_utils.py). `rollout_data/` beside it has
    groups, raw rewards, versions and ends.
    """
    for (folder, _), group in groupby(files.paths, lambda path: (path.parent, path.stem.partition("_")[0])):
        samples = dict[int, tuple[str, Row]]()
        for path in group:
            files.where = str(path)
            dump = load(path)
            rollout = dump["rollout_id"]
            for index, one in _samples(dump):
                files.where = f"{path}, sample {index}"
                _, row = samples.setdefault(index, (files.where, {}))
                row |= {name: x for name, x in _of_slime(one, dump, row).items() if name not in row}
        beside = folder.parent / "rollout_data" / f"{rollout}.pt"
        files.where = str(beside)
        there = load(beside)["samples"] if beside.is_file() else ()
        sampled = {one.get("index", i): one for i, one in enumerate(there)}
        for index, (files.where, row) in samples.items():
            if any(np.isnan(row[name]).any() for name in SLIME.values() if name in row):
                raise ValueError("context-parallel ranks are missing: read all files of a rollout together")
            row |= _of_rollout(sampled.get(index, {}), row)
            yield row | {"step": rollout, "sequence_id": f"{rollout}/{index}"}


def _samples(dump: Row) -> Iterator[tuple[int, Row]]:
    """Yield index and columns of the samples of a file: of a list of them, or of lists by column."""
    if "samples" in dump:
        raw = dump.get("raw_reward")
        for i, one in enumerate(dump["samples"]):
            at = one.get("rollout_position", i)
            more = {"rewards": raw[at]} if isinstance(raw, list) and 0 <= at < len(raw) else {}
            yield one.get("sample_index", at), one | more
        return
    data = {name: x for name, x in dump["rollout_data"].items() if isinstance(x, list)}
    for i, index in enumerate(data["sample_indices"]):
        yield index, {name: x[i] for name, x in data.items() if name != "raw_reward"}


def _of_slime(one: Row, dump: Row, row: Row) -> Row:
    """Return a sample of a train dump, and put what this rank has of its log-probs at their places in `row`.

    Of 2·count chunks of all tokens, a context-parallel rank has those of numbers rank and 2·count − 1 − rank.
    """
    n, tokens = one["response_lengths"], numbers(one["tokens"], "tokens")
    rank, count, total = dump.get("cp_rank") or 0, dump.get("cp_size") or 1, len(tokens)
    padded = total if dump.get("qkv_format") == "thd" else one.get("max_seq_lens", total)
    if not (0 <= rank < count and 0 <= n < total <= padded):
        raise ValueError(f"rank {rank} of {count} has no part of {n} of {total} tokens")
    size = -(-padded // (2 * count))
    chunk = np.arange(total - n - 1, total - 1) // size  # a log-prob lies before its token
    at = np.isin(chunk, (rank, 2 * count - 1 - rank)) | (count == 1)
    for name in SLIME.keys() & one.keys():
        values = numbers(one[name], name)
        if len(values) != at.sum():
            raise ValueError(f"{len(values)} {name}, and rank {rank} of {count} has {at.sum()}")
        row.setdefault(SLIME[name], np.full(n, np.nan, np.float32))[at] = values
    return {
        MASK: numbers(one["loss_masks"], "loss_masks"),
        "token_ids": tokens[total - n :],
        "prompt_ids": tokens[: total - n],
        "prompt_length": total - n,
        "rewards": one.get("rewards"),
        "weight_versions": one.get("weight_versions"),
    }


def _of_rollout(other: Row, row: Row) -> Row:
    """Return what a rollout dump says of a sample: of its versions (a text, or spans, per call) the first."""
    own, reward = row.pop("weight_versions"), other.get("reward")
    calls = other.get("weight_versions") or own or ()
    spans = [span for call in calls for span in (call if isinstance(call, list) else [call])]
    versions = [str(span["version"] if isinstance(span, dict) else span) for span in spans]
    return {
        "rewards": reward if isinstance(reward, int | float) else row["rewards"],
        "group_id": other.get("group_index"),
        "finish_reason": other.get("status"),
        "rollout_version": min((int(one) for one in versions if one.isdecimal()), default=None),
    }


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
    """Python's unpickler, by which no code of a file runs: whatever it names is a `Stub`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        if (module, name) == ("_codecs", "encode"):  # bytes, of protocol 2
            return lambda text, *_: text.encode("latin1")
        return Stub


def skyrl(files: Files) -> Rows:
    """`dumped_data/global_step_*_training_input.pkl` (training_batch.py): padded on the left.

    An end that the generator appended has rollout log-prob 0; it was not sampled, and is masked.
    """
    for path in files.paths:
        files.where, step = str(path), _in_name(path, r"global_step_(\d+)_")
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
            row: Row = {
                ROLLOUT: rollout[i, begin:],
                OLD: old[i, begin:],
                MASK: mask[i, begin:].astype(np.int8),
                "token_ids": data["sequences"][i, data["sequences"].shape[1] - width :][begin:],
                "group_id": groups.get(i),
                "step": step,
                "sequence_id": f"{step}/{i}",
            }
            row |= {"advantages": data["advantages"][i, begin:]} if "advantages" in data else {}
            row |= {"rewards": float(data["rewards"][i].sum())} if "rewards" in data else {}
            yield row if mask[i].any() else None


def _array(one: Row) -> Array:
    """Return a tensor that SkyRL has made bytes of: with its type and shape, or by torch.save."""
    if one["format"] == "torch":
        return numbers(load(io.BytesIO(one["data"])), dimensions=2)
    return np.frombuffer(one["data"], one["dtype"]).reshape(one["shape"])


# ---------------------------------------------------------------- which form


class Form(NamedTuple):
    """A form: whose, what its files are called and hold, how it is told, and what reads it.

    Attributes:
        path: the last two names of a file's path, as a regular expression.
        fields: what the first record has.
        page: of docs/trainers, with the hook that writes the log-probs of both policies.
    """

    name: str
    trainer: str
    files: str
    holds: str
    path: str
    fields: str
    rows: Callable[[Files], Rows]
    page: str = ""


_BOTH = "rollout and old log-probs, mask, advantages, tokens"
_PRIME = "rollout log-probs, the trainer's as old and current, mask, advantages, entropy, tokens"
_SLIME = f"{_BOTH}, rewards; groups of the rollout dump beside it"
# fmt: off
FORMS = (
    Form("nemo-rl", "NeMo-RL", "train_data_step*.jsonl", f"{_BOTH}, rewards", r".*\.jsonl(\.gz)?",
         "generation_logprobs prev_logprobs input_lengths", nemo_rl, "nemo-rl"),
    Form("prime-rl", "prime-rl", "token_exports/step_*/rank_*.jsonl", _PRIME, r".*\.jsonl(\.gz)?",
         "inference_logprobs trainer_logprobs loss_mask", prime_rl, "prime-rl"),
    Form("slime", "slime", "train_data/*.pt", _SLIME, r"(?!rollout_data/).*/\d+\.pt", "", slime, "slime"),
    Form("ranks", "miles, slime up to 0.3.1", "train_data/*_*.pt, a file per rank", _SLIME,
         r".*/\d+_\d+\.pt", "", slime, "slime"),
    Form("skyrl", "SkyRL", "dumped_data/*_training_input.pkl", f"{_BOTH}, groups",
         r".*_training_input\.pkl", "", skyrl, "skyrl"),
    Form("jsonl", "", "*.jsonl, *.jsonl.gz", "one object per sequence, a list per token column",
         r".*\.jsonl(\.gz)?", "", json_lines),
)
# fmt: on
ENDINGS = (".jsonl", ".jsonl.gz", ".pt", ".pkl")
"""Endings of files that are of a form."""


def told(path: Path) -> Form | None:
    """Return the form of a file, by its path and the fields of its first record."""
    place, files, fields = "/".join(path.absolute().parts[-2:]), Files([path], where=str(path)), set[str]()
    if ".jsonl" in path.name:
        with explained(files, "a writer of JSON lines"):
            fields = {*next(files.records(), (path, {}))[1]}
    return next((x for x in FORMS if re.fullmatch(x.path, place) and {*x.fields.split()} <= fields), None)


def rows_of(form: Form, files: Files) -> Iterator[tuple[str, Row | None]]:
    """Yield the rows of files of a form, each with its place.

    Raises:
        DumpError: the place, and what is wrong there.
    """
    with explained(files, form.trainer or "a writer of JSON lines"):
        for row in form.rows(files):
            yield files.where, row
