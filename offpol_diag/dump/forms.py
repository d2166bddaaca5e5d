"""What trainers write by themselves → rows of a dump: NeMo-RL, prime-rl, slime, miles, SkyRL; JSON lines.

A form is a function: files → the place and the columns of each sequence, by the names of `schema`; a row
that is None has no token that counts. To add a form, write its function and its row in `FORMS`.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offpol_diag.dump import schema
from offpol_diag.dump.schema import COLUMNS, CURRENT, FINISH_REASON, MASK, OLD, ROLLOUT, WEIGHT_VERSIONS
from offpol_diag.dump.writer import UNKNOWN, spread
from offpol_diag.errors import DumpError

Array = npt.NDArray[Any]
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
def explained(where: str, trainer: str) -> Iterator[None]:
    """Turn what a record that is damaged, or of another version, raises into one error."""
    try:
        yield
    except DumpError:
        raise
    except KeyError as error:
        raise DumpError(f"{where}: no field {error}, which {trainer} writes", AGAIN) from error
    except (ValueError, TypeError, IndexError, AttributeError, OverflowError, AssertionError) as error:
        said = " ".join(str(error).split())[:120] or type(error).__name__
        raise DumpError(f"{where}: not as {trainer} writes it ({said})", AGAIN) from error


def numbers(value: Any, name: str = "a column") -> Array:
    """Return a list of numbers as an array [N]; null is NaN."""
    found = np.asarray(value)
    if found.dtype == object:
        found = np.asarray(value, np.float64)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "fiub"):
        raise ValueError(f"{name} is no list of numbers")
    return found.reshape(-1) if found.size else np.empty(0, np.float32)


# ---------------------------------------------------------------- JSON lines


def records(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield the objects of a file of JSON lines, which may be gzipped, each with its place.

    Raises:
        DumpError: a line is no JSON or too long, or the file unfolds to far more than any dump does.
    """
    zipped, hint = path.suffix == ".gz", "the file holds one JSON object per line, of one sequence"
    try:
        most, seen, number = FREE + FOLD * path.stat().st_size, 0, 0
        with gzip.open(path) if zipped else path.open("rb") as raw, io.BufferedReader(raw, 1 << 20) as file:
            while line := file.readline(MOST_LINE):
                seen, number = seen + len(line), number + 1
                where = f"{path}, line {number}"
                if len(line) == MOST_LINE:
                    raise DumpError(f"{where}: it is longer than {MOST_LINE >> 20} MiB", hint)
                if zipped and seen > most:
                    what = f"{path}: it unfolds to more than {FOLD} times its size, which no log-probs do"
                    raise DumpError(what, "was it damaged? unpack it, and look at what it holds")
                if not line.strip():
                    continue
                try:
                    found = json.loads(line.decode("utf-8-sig"))
                except (ValueError, RecursionError) as error:
                    raise DumpError(f"{where}: no JSON ({error})", f"{hint}; was it cut off?") from error
                if not isinstance(found, dict):
                    raise DumpError(f"{where}: {type(found).__name__}, no JSON object", hint)
                yield where, found
    except (OSError, EOFError, zlib.error) as error:
        what = f"{path}: cannot be read as JSON lines ({error})"
        raise DumpError(what, "write or copy it again") from error


def whole(mask: Any, tokens: Any, **columns: Any) -> Row | None:
    """Return a row of columns over prompt and response; None if no token counts.

    The response begins at the first token that counts, and ends at the last one.
    """
    counts = np.asarray(mask) != 0
    if not counts.any():
        return None
    n = len(counts)
    first, last = int(counts.argmax()), n - int(counts[::-1].argmax())
    ids = numbers(tokens, "token_ids")[:n].copy()
    if len(ids) and ids.dtype.kind == "f":
        raise ValueError("token_ids holds a number that is not whole")
    row = {x: numbers(one, x)[:n][first:last].copy() for x, one in columns.items() if one is not None}
    row |= {MASK: counts[first:last].astype(np.int8), "token_ids": ids[first:last]}
    group = blake2b(ids[:first].astype(np.int64).tobytes(), digest_size=8).hexdigest()
    return row | {"prompt_ids": ids[:first], "prompt_length": first, "group_id": group}


def nemo_rl(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
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
                mask = numbers(one["token_loss_mask"])[:n] * float(one.get("sample_loss_mask", 1))
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


def prime_rl(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
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


def json_lines(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """One object per sequence, a list per token column, under names that trainers give."""
    for where, one in (record for path in files for record in records(path)):
        assigned = schema.assigned(list(one), columns, where)
        found = {name: field for name, field in assigned.items() if one[field] is not None}
        row: Row = {}
        with explained(where, "a writer of numbers"):
            for name, field in found.items():
                value, column = one[field], COLUMNS[name]
                if name == FINISH_REASON and isinstance(value, dict):  # as SGLang says it
                    value = value.get("type")
                if name == WEIGHT_VERSIONS and ROLLOUT in found:
                    value = spread(value, len(one[found[ROLLOUT]]))
                elif column.holds in ("tokens", "list") or (column.of_tokens and isinstance(value, list)):
                    value = numbers(value, field)
                elif isinstance(value, dict | list):
                    raise ValueError(f"{field!r} is a {type(value).__name__}, and one value is needed")
                row[name] = value
        for name, value in one.items():  # what may say where a row is from
            short = isinstance(value, int | float) or (isinstance(value, str) and len(value) <= LONGEST_TEXT)
            if name not in found.values() and short:
                row[name] = value
        yield where, row


def _in_name(path: Path, pattern: str) -> int:
    found = re.search(pattern, path.name)
    return int(found[1]) if found and len(found[1]) < 18 else 0


# ---------------------------------------------------------------- slime, miles

SLIME = {"log_probs": OLD, "loss_masks": MASK} | {x: x for x in (ROLLOUT, "advantages", "entropy")}
"""Their columns → ours; of all but the mask a context-parallel rank holds its slice."""


def slime(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """`train_data/*.pt` since 2026-08-12 (observability/train_data_utils.py): a file per rollout."""
    for path in files:
        with explained(str(path), "slime"):
            dump = load(path)
            rollout, samples, raw = dump["rollout_id"], [*enumerate(dump["samples"])], dump.get("raw_reward")
            sampled = _sampled(path, rollout)
        for i, one in samples:
            with explained(where := f"{path}, sample {i}", "slime"):
                at = one.get("rollout_position", i)
                if isinstance(raw, list) and 0 <= at < len(raw):
                    one = one | {"rewards": raw[at]}
                row = _of_slime(one, rollout, one.get("sample_index", at), sampled)
            yield where, row


def ranks(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """`train_data/{rollout}_{rank}.pt` of miles, and of slime up to 0.3.1 (utils/train_dump_utils.py).

    Tensor-parallel ranks repeat each other, only the last pipeline stage has log-probs, and each
    context-parallel rank has two chunks of the response, from both ends (training_utils/cp_utils.py).
    """
    sliced = SLIME.keys() - {"loss_masks"}
    for _, group in groupby(files, lambda path: (path.parent, path.stem.rpartition("_")[0])):
        paths, samples = list(group), dict[object, Row]()
        for path in paths:
            with explained(str(path), "slime"):
                dump = load(path)
                data, place = dump["rollout_data"], (dump.get("cp_rank") or 0, dump.get("cp_size") or 1)
                rollout = dump["rollout_id"]
                lists = {name: x for name, x in data.items() if name != "raw_reward" and isinstance(x, list)}
                for i in range(len(data["response_lengths"])):
                    one = {name: x[i] for name, x in lists.items()}
                    n, tokens = _response(one)
                    rest = {name: x for name, x in one.items() if name not in sliced}
                    row = samples.setdefault(one.get("sample_indices", (tokens.tobytes(), n)), rest)
                    width = one["total_lengths"]
                    if dump.get("qkv_format", "bshd") != "thd":
                        width = one.get("max_seq_lens", width)
                    at = _places(one["total_lengths"], n, width, *place)
                    for name in sliced & one.keys():
                        values = numbers(one[name], name)
                        if len(values) != at.sum():
                            said = f"{name} is cut otherwise than for {place[1]} context-parallel ranks"
                            raise DumpError(f"{path}, sample {i}: {said}", TOGETHER)
                        row.setdefault(name, np.full(n, np.nan, np.float32))[at] = values
        with explained(str(paths[0]), "slime"):
            sampled = _sampled(paths[0], rollout)
        for i, (index, row) in enumerate(samples.items()):
            number = index if isinstance(index, int) else i
            with explained(where := f"{paths[0]}, sample {number}", "slime"):
                if any(np.isnan(row[name]).any() for name in sliced & row.keys()):
                    raise DumpError(f"{where}: some of its context-parallel ranks are missing", TOGETHER)
                made = _of_slime(row, rollout, number, sampled)
            yield where, made


def _places(total: int, response: int, padded: int, rank: int, count: int) -> Array:
    """Return which response tokens a context-parallel rank has: chunks r and 2·count − 1 − r of 2·count."""
    if not (0 <= rank < count and response < total <= padded):
        raise ValueError(f"rank {rank} of {count} has no part of {response} of {total} tokens")
    if count == 1:
        return np.ones(response, np.bool_)
    chunk = -(-padded // (2 * count))
    at = np.arange(total - response - 1, total - 1)  # a token's log-prob lies where the one before it does
    return np.isin(at // chunk, (rank, 2 * count - 1 - rank))


def _response(one: Row) -> tuple[int, Array]:
    """Return the length of a response, and the tokens of prompt and response."""
    n, tokens = one["response_lengths"], numbers(one["tokens"])
    if type(n) is not int or not 0 <= n <= len(tokens):
        raise ValueError(f"the response has no length, or one that exceeds the {len(tokens)} tokens")
    return n, tokens


def _of_slime(one: Row, rollout: int, index: int, sampled: Mapping[int, Row]) -> Row:
    """Return a sample of a train dump, with what the rollout dump beside it says."""
    other, (n, tokens) = sampled.get(index, {}), _response(one)
    logs = {ROLLOUT: other.get(ROLLOUT)} | one
    row: Row = {ours: numbers(logs[x], x) for x, ours in SLIME.items() if logs.get(x) is not None}
    reward, prompt, calls = other.get("reward"), len(tokens) - n, other.get("weight_versions")
    each = _weights(calls or one.get("weight_versions"), row[MASK], prompt)
    known = [] if each is None else each[each > UNKNOWN].tolist()
    known += [int(x) for x in calls or () if isinstance(x, str) and x.isdecimal()]
    row |= {} if each is None else {WEIGHT_VERSIONS: each}
    return row | {
        "token_ids": tokens[prompt:],
        "prompt_ids": tokens[:prompt],
        "prompt_length": prompt,
        "rewards": reward if isinstance(reward, int | float) else one.get("rewards"),
        "group_id": other.get("group_index"),
        "finish_reason": other.get("status"),
        "rollout_version": min(known, default=None),
        "step": rollout,
        "sequence_id": f"{rollout}/{index}",
    }


def _weights(calls: Any, mask: Array, prompt: int) -> Array | None:
    """Return the version of each token: slime has a text for each turn, miles spans of tokens."""
    calls = [one for one in calls if one] if isinstance(calls, list) else []
    if any(isinstance(one, list | dict) for one in calls):
        return spread(calls, len(mask), prompt)
    known = [int(one) for one in calls if str(one).isdecimal() and len(str(one)) < 18]
    turns = np.flatnonzero(np.diff(np.concatenate([[0], mask != 0, [0]]))).reshape(-1, 2)
    if not known or len(known) < len(calls):
        return None
    found = np.full(len(mask), UNKNOWN, np.int64)
    if len(known) == len(turns) or len({*known}) == 1:  # else nothing says where in a turn weights changed
        for i, (begin, end) in enumerate(turns):
            found[begin:end] = known[min(i, len(known) - 1)]
    return found


def _sampled(path: Path, rollout: int) -> dict[int, Row]:
    """Return the samples of the rollout dump beside a train dump: groups, raw rewards, versions."""
    beside = path.parent.parent / "rollout_data" / f"{rollout}.pt"
    samples = load(beside)["samples"] if beside.is_file() else ()
    return {one.get("index", i): one for i, one in enumerate(samples)}


# ---------------------------------------------------------------- SkyRL


def skyrl(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """`dumped_data/global_step_*_training_input.pkl` (training_batch.py): padded on the left.

    An end that the generator appended has rollout log-prob 0; it was not sampled, and is masked.
    """
    for path in files:
        with explained(str(path), "SkyRL"):
            state, step = load(path).state, _in_name(path, r"global_step_(\d+)_")
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
        found: Array = load(Path("a tensor"), one["data"])
        return found
    return np.frombuffer(one["data"], one["dtype"]).reshape(one["shape"])


# ---------------------------------------------------------------- pickles, of which no code runs


class Record:
    """An object of a trainer's class: its state alone."""

    def __init__(self, *args: object) -> None:
        self.state: Any = args[-1] if args else None

    def __setstate__(self, state: object) -> None:
        self.state = state


_KINDS = "Double Float Half BFloat16 Bool Long Int Short Char Byte"
_TYPES = "float64 float32 float16 bfloat16 bool int64 int32 int16 int8 uint8"
STORAGES = dict(zip(_KINDS.split(), _TYPES.split(), strict=True))
"""Name of a storage in torch → the type of its numbers."""
SKYRL = (
    r"skyrl(\.backends\.skyrl_train|_train)\.training_batch\.(TrainingInputBatch|TensorBatch|_rebuild_\w+)"
)
RECORDS = re.compile(rf"{SKYRL}|(slime|miles)\.utils\.types\.Sample(\.Status)?|torch\.(device|Tensor)")
"""Classes of trainers: an object of one is a `Record`."""
SAFE = re.compile(
    r"collections\.OrderedDict|builtins\.(set|frozenset)|numpy\.(dtype|ndarray)|"
    r"numpy\._core\.(multiarray\.(_reconstruct|scalar)|numeric\._frombuffer)"
)
"""Names that stand for themselves: they make plain values and arrays, and do nothing else."""


REPEATED = 1 << 24
"""Most numbers of a tensor that repeats those of its storage."""


def _tensor(flat: Array, offset: int, size: Any, stride: Any, *_: object) -> Array:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    many = math.prod(size)
    if min(offset, *size, *stride, 0) < 0 or (many and last >= len(flat)) or many > max(len(flat), REPEATED):
        raise ValueError("a tensor lies outside of its storage")
    steps = tuple(step * flat.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(size), steps, writeable=False)


class Unpickler(pickle.Unpickler):
    """Python's unpickler with tables in place of imports; `storage` returns the bytes of a tensor."""

    def __init__(self, file: Any, storage: Callable[[str], bytes] | None = None) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        module = re.sub(r"^numpy\.core\b", "numpy._core", module.replace("__builtin__", "builtins"))
        called = f"{module}.{name}"  # older Pythons and NumPys have other modules
        if SAFE.fullmatch(called):
            return super().find_class(module, name)
        if RECORDS.fullmatch(called):
            return Record
        if called == "torch._utils._rebuild_tensor_v2":
            return _tensor
        if called == "_codecs.encode":  # bytes, of protocol 2
            return lambda text, *_: text.encode("latin1")
        if module == "torch" and (dtype := STORAGES.get(name.removesuffix("Storage"))):
            return dtype
        raise DumpError(
            f"holds {called}"[:200] + ", which is not read: a pickle can run any code",
            "load it in the trainer's own environment, and write its columns with offpol_diag.DumpWriter",
        )

    def persistent_load(self, pid: Any) -> Array:
        """Return the storage of a tensor, flat; bfloat16 becomes float32."""
        if self._storage is None:
            raise ValueError("a reference out of the file")
        data = np.frombuffer(self._storage(pid[2]), np.uint8)
        if pid[1] == "bfloat16":
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return data.view(np.dtype(pid[1]))


def load(path: Path, data: bytes | None = None) -> Any:
    """Read a pickle or a `torch.save` file, or bytes within one: plain values, arrays and records."""
    try:
        with path.open("rb") if data is None else io.BytesIO(data) as file:
            if file.read(2) != b"PK":
                file.seek(0)
                return Unpickler(file).load()
            with zipfile.ZipFile(file) as archive:  # with further members for tensors, and checksums
                names = archive.namelist()
                folder = next(one for one in names if one.endswith("data.pkl")).removesuffix("data.pkl")
                if f"{folder}byteorder" in names and archive.read(f"{folder}byteorder") != b"little":
                    raise ValueError("numbers of a big-endian machine")
                storage = cache(lambda key: archive.read(f"{folder}data/{key}"))
                return Unpickler(io.BytesIO(archive.read(f"{folder}data.pkl")), storage).load()
    except DumpError as error:
        raise DumpError(f"{path}: {error.message}", error.hint) from error
    except Exception as error:  # a damaged pickle raises whatever its instructions meet
        said = " ".join(str(error).split())[:80] or type(error).__name__
        raise DumpError(f"{path}: a damaged pickle ({said})", "write or copy it again") from error


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
    rows: Callable[[Sequence[Path], Mapping[str, str]], Rows] | None
    page: str = ""
    marker: str = ""


_SAMPLES = (
    "rollout and old log-probs, mask, advantages, rewards, tokens; groups of the rollout dump beside it"
)
_NEMO = "rollout and old log-probs, mask, advantages, rewards, tokens"
_PRIME = "rollout log-probs, the trainer's as old and current, mask, advantages, entropy, tokens"
_SKYRL = "rollout and old log-probs, mask, advantages, tokens, groups"
# fmt: off
FORMS = (
    Form("nemo-rl", "NeMo-RL", "train_data_step*.jsonl", _NEMO, r".*\.jsonl(\.gz)?",
         "generation_logprobs prev_logprobs input_lengths", nemo_rl, "nemo-rl"),
    Form("prime-rl", "prime-rl", "token_exports/step_*/rank_*.jsonl", _PRIME, r".*\.jsonl(\.gz)?",
         "inference_logprobs trainer_logprobs loss_mask", prime_rl, "prime-rl", "STABLE"),
    Form("slime", "slime", "train_data/*.pt", _SAMPLES, r"(?!rollout_data/).*/\d+\.pt", "", slime, "slime"),
    Form("ranks", "miles, slime up to 0.3.1", "train_data/*_*.pt, a file per rank", _SAMPLES,
         r".*/\d+_\d+\.pt", "", ranks, "slime"),
    Form("skyrl", "SkyRL", "dumped_data/*_training_input.pkl", _SKYRL, r".*_training_input\.pkl", "", skyrl,
         "skyrl"),
    Form("", "verl", "", "", r".*\.jsonl", "input output score", None, "verl"),
    Form("", "verl", "", "", r".*\.dp|.*/tq_batch\.pt", "", None, "verl"),
    Form("", "TRL, ms-swift", "", "", "", "prompt completion", None, "trl"),
    Form("", "slime", "", "", r"rollout_data/.*\.pt", "", None, "slime"),
    Form("", "miles", "", "", "", "sample_index response_length tokens", None, "slime"),
    Form("jsonl", "", "*.jsonl, *.jsonl.gz", "one object per sequence, a list per token column",
         r".*\.jsonl(\.gz)?", "", json_lines),
)
# fmt: on
ENDINGS = (".jsonl", ".jsonl.gz", ".pt", ".pkl", ".dp")
"""Endings of files that are of a form."""
LOG_PROBS = tuple(
    {x for one in names for x in COLUMNS[one].called(False)} for names in ((ROLLOUT,), (OLD, CURRENT))
)
"""Names of the log-probs of the rollout, and of the trainer."""


def told(path: Path, fields: Set[str], columns: Mapping[str, str]) -> Form | None:
    """Return the form of a file, by its path and the fields of its first record."""
    place = "/".join(path.absolute().parts[-2:])
    both = bool(columns) or not any(names.isdisjoint(fields) for names in LOG_PROBS)
    for one in FORMS:
        fits = re.fullmatch(one.path or ".*", place) and fields >= {*one.fields.split()}
        if fits and not (one.rows is None and both):  # a hook may add columns to a trainer's own file
            return one
    return None
