"""What trainers write by themselves → rows of a dump: NeMo-RL, prime-rl, slime, miles, SkyRL; JSON lines.

A form is a function: files → the place and the columns of each sequence, by the names of `schema`; a row
that is None has no token that counts. To add a form, write its function and its row in `FORMS`.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.dump.schema import COLUMNS, CURRENT, FINISH_REASON, MASK, OLD, ROLLOUT, assigned
from offpol_diag.dump.writer import Array, as_array
from offpol_diag.errors import DumpError

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row | None]]
MOST_LINE = 1 << 28
"""Bytes of a line of JSON, which is held as a whole; a response of a million tokens takes half of it."""
FOLD, FREE = 100, 1 << 28
"""Most bytes that a compressed byte may unfold to, and bytes that are free; log-probs unfold to 3 to 20."""
LONGEST_TEXT = 64
"""Characters of a text that describes a row's origin; longer ones are prompts and responses."""
APPENDED = -0.05
"""Log-prob of the trainer below which a last token that the engine is certain of was not sampled."""
AGAIN = "was the file changed, or cut off? see docs/trainers"
TOGETHER = "convert the files of all ranks of a rollout together, and none of another run"


@contextmanager
def explained(where: str | Path, trainer: str) -> Iterator[None]:
    """Turn what a record or a file that is damaged, or of another version, raises into one error."""
    try:
        yield
    except DumpError:
        raise
    except KeyError as error:
        raise DumpError(f"{where}: no field {error}, which {trainer} writes", AGAIN) from error
    except Exception as error:  # of any type: a damaged pickle raises what its instructions meet
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise DumpError(f"{where}: not as {trainer} writes it ({said})", AGAIN) from error


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


# ---------------------------------------------------------------- JSON lines


def records(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the objects of a file of JSON lines, which may be gzipped, each with its place.

    Raises:
        DumpError: a line is no JSON or too long, or the file unfolds to far more than any dump does.
    """
    hint = "the file holds one JSON object per line, of one sequence; was it cut off?"
    try:
        most, seen, number = FREE + FOLD * path.stat().st_size, 0, 0
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb", 1 << 20) as file:
            while line := file.readline(MOST_LINE):
                seen, number = seen + len(line), number + 1
                where = f"{path}, line {number}"
                if len(line) == MOST_LINE:
                    raise DumpError(f"{where}: it is longer than {MOST_LINE >> 20} MiB", hint)
                if seen > most:
                    what = f"{path}: it unfolds to more than {FOLD} times its size, which no log-probs do"
                    raise DumpError(what, "was it damaged? unpack it, and look at what it holds")
                if not line.strip():
                    continue
                try:
                    found = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise DumpError(f"{where}: no JSON ({error})", hint) from error
                if not isinstance(found, dict):
                    raise DumpError(f"{where}: {type(found).__name__}, no JSON object", hint)
                yield where, found
    except (OSError, EOFError, zlib.error) as error:
        what = f"{path}: cannot be read as JSON lines ({error})"
        raise DumpError(what, "write or copy it again") from error


def json_lines(files: Sequence[Path]) -> Rows:
    """One object per sequence, a list per token column, under any names: `canonical` finds them."""
    return (record for path in files for record in records(path))


def canonical(rows: Rows, columns: Mapping[str, str]) -> Rows:
    """Name fields as `schema` does; of the others what may say where a row is from is kept."""
    for where, one in rows:
        assert one is not None
        found = {name: x for name, x in assigned([*one], columns, where).items() if one[x] is not None}
        row: Row = {}
        with explained(where, "a writer of numbers"):
            for name, field in found.items():
                value, column = one[field], COLUMNS[name]
                if name == FINISH_REASON and isinstance(value, dict):  # as SGLang says it
                    value = value.get("type")
                if column.holds in ("tokens", "list") or (column.of_tokens and isinstance(value, list)):
                    value = numbers(value, field)
                elif isinstance(value, dict | list):
                    raise ValueError(f"{field!r} is a {type(value).__name__}, and one value is needed")
                row[name] = value
        for name, value in one.items():
            short = isinstance(value, int | float) or (isinstance(value, str) and len(value) <= LONGEST_TEXT)
            if name not in found.values() and short:
                row[name] = value
        yield where, row


# ---------------------------------------------------------------- NeMo-RL, prime-rl


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


def nemo_rl(files: Sequence[Path]) -> Rows:
    """`train_data_step*.jsonl` since 0.6 (nemo_rl/utils/logger.py): each field is a list of one, padded.

    Index 0 holds a placeholder, and is masked.
    """
    for path in files:
        step = _in_name(path, r"step(\d+)")
        for i, (where, one) in enumerate(records(path)):
            with explained(where, "NeMo-RL"):
                one = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in one.items()}
                if "token_loss_mask" not in one:
                    hint = "NeMo-RL writes it since 0.6; docs/trainers/nemo-rl.md has a hook for older ones"
                    raise DumpError(f"{where}: no 'token_loss_mask'", hint)
                n = one["input_lengths"]
                counts = float(one.get("sample_loss_mask", 1)) != 0
                mask = (numbers(one["token_loss_mask"])[:n] != 0) & counts
                mask[:1] = 0
                old = numbers(one["prev_logprobs"], "prev_logprobs")[:n]
                row = whole(
                    mask,
                    one["token_ids"][:n],
                    rollout_log_probs=one["generation_logprobs"],
                    old_log_probs=old if old.any() else None,  # that pass was skipped
                    advantages=one.get("advantages"),
                )
                name = f"{step}/{one.get('idx', i)}"
                more = {"rewards": one.get("rewards"), "step": step, "sequence_id": name}
            yield where, row and row | more


def prime_rl(files: Sequence[Path]) -> Rows:
    """`token_exports/step_*/rank_*.jsonl` (rl/token_export.py): one pass, which is old and current."""
    for where, one in (record for path in files for record in records(path)):
        with explained(where, "prime-rl"):
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
        yield where, row and row | more


def _in_name(path: Path, pattern: str) -> int:
    found = re.search(pattern, path.name)
    return int(found[1]) if found and len(found[1]) < 18 else 0


# ---------------------------------------------------------------- slime, miles

SLIME = {"log_probs": OLD} | {name: name for name in (ROLLOUT, "advantages", "entropy")}
"""Their columns → ours, of which a context-parallel rank holds its slice."""


def slime(files: Sequence[Path]) -> Rows:
    """`train_data/{rollout}.pt` of slime since 2026-08-12 (observability/train_data_utils.py).

    And `{rollout}_{rank}.pt` of miles, and of slime up to 0.3.1 (utils/train_dump_utils.py): tensor-parallel
    ranks repeat each other, only the last pipeline stage has log-probs, and each context-parallel rank has
    two chunks of the response, from both ends (training_utils/cp_utils.py).
    """
    for _, group in groupby(files, lambda path: (path.parent, path.stem.partition("_")[0])):
        paths, samples = list(group), dict[int, Row]()
        for path in paths:
            with explained(path, "slime"):
                dump = load(path)
                rollout, packed = dump["rollout_id"], dump.get("qkv_format") == "thd"
                rank, count = dump.get("cp_rank") or 0, dump.get("cp_size") or 1
                for index, one in _samples(dump):
                    with explained(f"{path}, sample {index}", "slime"):
                        prompt, response = _tokens(one)
                        n, total = len(response), len(prompt) + len(response)
                        width = total if packed else one.get("max_seq_lens", total)
                        at = _places(total, n, width, rank, count)
                        row = samples.setdefault(index, {x: one[x] for x in one if x not in SLIME})
                        for name in SLIME.keys() & one.keys():
                            values = numbers(one[name], name)
                            if len(values) != at.sum():
                                said = f"{len(values)} {name}, and rank {rank} of {count} has {at.sum()}"
                                raise DumpError(f"{path}, sample {index}: {said}", TOGETHER)
                            row.setdefault(name, np.full(n, np.nan, np.float32))[at] = values
        with explained(paths[0], "slime"):
            sampled = _sampled(paths[0], rollout)
        for index, row in samples.items():
            with explained(where := f"{paths[0]}, sample {index}", "slime"):
                if any(np.isnan(row[name]).any() for name in SLIME.keys() & row.keys()):
                    raise DumpError(f"{where}: some of its context-parallel ranks are missing", TOGETHER)
                made = _of_slime(row, rollout, index, sampled)
            yield where, made


def _samples(dump: Row) -> Iterator[tuple[int, Row]]:
    """Yield index and columns of the samples of a file: of a list of them, or of lists by column."""
    if "samples" in dump:
        raw = dump.get("raw_reward")
        for i, one in enumerate(dump["samples"]):
            at = one.get("rollout_position", i)
            more = {"rewards": raw[at]} if isinstance(raw, list) and 0 <= at < len(raw) else {}
            yield one.get("sample_index", at), one | more
        return
    data = {
        name: x for name, x in dump["rollout_data"].items() if isinstance(x, list) and name != "raw_reward"
    }
    for i, index in enumerate(data["sample_indices"]):
        yield index, {name: x[i] for name, x in data.items()}


def _places(total: int, response: int, padded: int, rank: int, count: int) -> Array:
    """Return which response tokens a context-parallel rank has: chunks r and 2·count − 1 − r of 2·count."""
    if not (0 <= rank < count and response < total <= padded):
        raise ValueError(f"rank {rank} of {count} has no part of {response} of {total} tokens")
    if count == 1:
        return np.ones(response, np.bool_)
    chunk = -(-padded // (2 * count))
    at = np.arange(total - response - 1, total - 1)  # a token's log-prob lies where the one before it does
    return np.isin(at // chunk, (rank, 2 * count - 1 - rank))


def _tokens(one: Row) -> tuple[Array, Array]:
    """Return the tokens of a sample's prompt, and of its response."""
    n, tokens = one["response_lengths"], numbers(one["tokens"], "tokens")
    if type(n) is not int or not 0 <= n <= len(tokens):
        raise ValueError(f"the response has no length, or one that exceeds the {len(tokens)} tokens")
    return tokens[: len(tokens) - n], tokens[len(tokens) - n :]


def _of_slime(one: Row, rollout: int, index: int, sampled: Mapping[int, Row]) -> Row:
    """Return a sample of a train dump, with what the rollout dump beside it says.

    `weight_versions` has a text for each turn (slime), or a list of spans for each call (miles): the weights
    that sampled first are the row's.
    """
    other, (prompt, response) = sampled.get(index, {}), _tokens(one)
    logs, reward = {ROLLOUT: other.get(ROLLOUT)} | one, other.get("reward")
    calls = other.get("weight_versions") or one.get("weight_versions") or ()
    spans = [span for call in calls for span in (call if isinstance(call, list) else [call])]
    versions = [str(span["version"] if isinstance(span, dict) else span) for span in spans]
    return {ours: numbers(logs[name], name) for name, ours in SLIME.items() if logs.get(name) is not None} | {
        MASK: numbers(one["loss_masks"], "loss_masks"),
        "token_ids": response,
        "prompt_ids": prompt,
        "prompt_length": len(prompt),
        "rewards": reward if isinstance(reward, int | float) else one.get("rewards"),
        "group_id": other.get("group_index"),
        "finish_reason": other.get("status"),
        "rollout_version": min((int(one) for one in versions if one.isdecimal()), default=None),
        "step": rollout,
        "sequence_id": f"{rollout}/{index}",
    }


def _sampled(path: Path, rollout: int) -> dict[int, Row]:
    """Return the samples of the rollout dump beside a train dump: groups, raw rewards, versions."""
    beside = path.parent.parent / "rollout_data" / f"{rollout}.pt"
    samples = load(beside)["samples"] if beside.is_file() else ()
    return {one.get("index", i): one for i, one in enumerate(samples)}


def load(file: Path | io.BytesIO) -> Any:
    """Read what `torch.save` has written: plain values and tensors, of which no code runs.

    Raises:
        DumpError: it is damaged, or holds anything else, such as an object of a class of the trainer.
    """
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of any type, as a damaged pickle does
        lines = [line for line in map(str.strip, str(error).splitlines()) if line]
        said = next((line for line in lines if "GLOBAL" in line), lines[0] if lines else type(error).__name__)
        what = f"{file if isinstance(file, Path) else 'a tensor'}: torch.load refuses it ({said[:120]})"
        hint = "was it cut off? if it holds objects of the trainer, docs/trainers/slime.md has a hook"
        raise DumpError(what, hint) from error


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


def skyrl(files: Sequence[Path]) -> Rows:
    """`dumped_data/global_step_*_training_input.pkl` (training_batch.py): padded on the left.

    An end that the generator appended has rollout log-prob 0; it was not sampled, and is masked.
    """
    for path in files:
        with explained(path, "SkyRL"), path.open("rb") as file:
            state, step = Unpickler(file).load().state, _in_name(path, r"global_step_(\d+)_")
            data = {name: _array(one) for name, one in state["batch_dict"].items() if isinstance(one, dict)}
            mask, width = data["loss_mask"] != 0, data["loss_mask"].shape[1]
            rollout, old = data["rollout_logprobs"], data["action_log_probs"]
            mask[:, -1] &= ~((rollout[:, -1] == 0) & (old[:, -1] < APPENDED))
            parts = (state.get("metadata") or {}).get("policy_prompt_boundaries") or []
            cut = ((max(first, 0), min(last, len(mask))) for first, last in parts)
            groups = {row: group for group, part in enumerate(cut) for row in range(*part)}
            begins = (data["response_mask" if "response_mask" in data else "loss_mask"] != 0).argmax(1)
            for i, begin in enumerate(begins):
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
                yield f"{path}, sequence {i}", row if mask[i].any() else None


def _array(one: Row) -> Array:
    """Return a tensor that SkyRL has made bytes of: with its type and shape, or by torch.save."""
    if one["format"] == "torch":
        return numbers(load(io.BytesIO(one["data"])), dimensions=2)
    return np.frombuffer(one["data"], one["dtype"]).reshape(one["shape"])


# ---------------------------------------------------------------- which form


class Form(NamedTuple):
    """A form: whose, what its files are called and hold, how it is told, and what reads it.

    Attributes:
        path: the last two names of a file's path, as a regular expression; empty: any.
        fields: what the first record has.
        rows: what reads it; None where a trainer's files have the log-probs of one policy, or of none.
        page: of docs/trainers, with the hook that writes the log-probs of both.
        marker: a file that its trainer puts beside files that are finished; empty: none.
    """

    name: str
    trainer: str
    files: str
    holds: str
    path: str
    fields: str
    rows: Callable[[Sequence[Path]], Rows] | None
    page: str = ""
    marker: str = ""


_BOTH = "rollout and old log-probs, mask, advantages, tokens"
_PRIME = "rollout log-probs, the trainer's as old and current, mask, advantages, entropy, tokens"
_SLIME = f"{_BOTH}, rewards; groups of the rollout dump beside it"
# fmt: off
FORMS = (
    Form("nemo-rl", "NeMo-RL", "train_data_step*.jsonl", f"{_BOTH}, rewards", r".*\.jsonl(\.gz)?",
         "generation_logprobs prev_logprobs input_lengths", nemo_rl, "nemo-rl"),
    Form("prime-rl", "prime-rl", "token_exports/step_*/rank_*.jsonl", _PRIME, r".*\.jsonl(\.gz)?",
         "inference_logprobs trainer_logprobs loss_mask", prime_rl, "prime-rl", "STABLE"),
    Form("slime", "slime", "train_data/*.pt", _SLIME, r"(?!rollout_data/).*/\d+\.pt", "", slime, "slime"),
    Form("ranks", "miles, slime up to 0.3.1", "train_data/*_*.pt, a file per rank", _SLIME,
         r".*/\d+_\d+\.pt", "", slime, "slime"),
    Form("skyrl", "SkyRL", "dumped_data/*_training_input.pkl", f"{_BOTH}, groups",
         r".*_training_input\.pkl", "", skyrl, "skyrl"),
    Form("", "verl", "", "", r".*\.jsonl", "input output score", None, "verl"),
    Form("", "verl", "", "", r".*\.dp|.*/tq_batch\.pt", "", None, "verl"),
    Form("", "TRL, ms-swift", "", "", "", "prompt completion", None, "trl"),
    Form("", "slime", "", "", r"rollout_data/.*\.pt", "", None, "slime"),
    Form("", "miles", "", "", "", "sample_index response_length tokens", None, "slime"),
    Form("jsonl", "", "*.jsonl, *.jsonl.gz", "one object per sequence, a list per token column",
         r".*\.jsonl(\.gz)?", "", json_lines),
)
# fmt: on
PARQUET = Form("parquet", "", "*.parquet", "", "", "", None)
"""What needs no conversion."""
ENDINGS = (".jsonl", ".jsonl.gz", ".pt", ".pkl", ".dp")
"""Endings of files that are of a form."""


def fields_of(path: Path) -> set[str]:
    """Return the fields of a file's first record, or a table's columns."""
    if ".jsonl" in path.name:
        return {*next(records(path), ("", {}))[1]}
    with suppress(pa.ArrowException, OSError, ValueError):  # the reader says what is wrong
        return set() if path.name.endswith(ENDINGS) else {*pq.read_schema(path).names}
    return set()


def told(path: Path, columns: Mapping[str, str]) -> Form | None:
    """Return the form of a file, by its path and the fields of its first record."""
    place, fields = "/".join(path.absolute().parts[-2:]), fields_of(path)
    trainer = {*COLUMNS[OLD].called(False), *COLUMNS[CURRENT].called(False)}
    both = columns or not (trainer.isdisjoint(fields) or {*COLUMNS[ROLLOUT].called(False)}.isdisjoint(fields))
    for one in FORMS:
        fits = re.fullmatch(one.path or ".*", place) and fields >= {*one.fields.split()}
        if fits and (one.rows or not both):  # a hook may add columns to a trainer's own file
            return one
    return None if path.name.endswith(ENDINGS) else PARQUET
