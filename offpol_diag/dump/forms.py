"""What trainers write by themselves → rows of a dump: NeMo-RL, prime-rl, slime, miles, SkyRL; JSON lines.

A form is a function: files → the place and the columns of each sequence, by the names of `schema`. To add
one, write it and its row in `FORMS`.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offpol_diag.dump import schema
from offpol_diag.dump.schema import COLUMNS, CURRENT, FINISH_REASON, OLD, ROLLOUT, WEIGHT_VERSIONS
from offpol_diag.dump.writer import UNKNOWN, spread
from offpol_diag.errors import DumpError

Array = npt.NDArray[Any]
Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
MOST_LINE = 1 << 28
"""Bytes of a line of JSON, which is held as a whole; a response of a million tokens takes half of it."""
FOLD, FREE = 100, 1 << 28
"""Most bytes that a compressed byte may unfold to, and bytes that are free; log-probs unfold to 3 to 20."""
LONGEST_TEXT = 64
"""Characters of a text that describes a row's origin; longer ones are prompts and responses."""
APPENDED = -0.05
"""Log-prob of the trainer below which a last token that the engine is certain of was not sampled."""
AGAIN = "was the file changed, or cut off? see docs/trainers"


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


# ---------------------------------------------------------------- JSON lines


def records(path: Path) -> Rows:
    """Yield the objects of a file of JSON lines, which may be gzipped, each with its place."""
    try:
        for number, line in enumerate(_lines(path), 1):
            where, one = f"{path}, line {number}", "the file holds one JSON object per line"
            if not line.strip():
                continue
            try:
                found = json.loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise DumpError(f"{where}: no JSON ({error})", f"{one}; was its writer cut off?") from error
            if not isinstance(found, dict):
                raise DumpError(f"{where}: {type(found).__name__}, no JSON object", one)
            yield where, found
    except (OSError, EOFError) as error:
        raise DumpError(
            f"{path}: cannot be read as JSON lines ({error})", "write or copy it again"
        ) from error


def _lines(path: Path) -> Iterator[bytes]:
    """Yield lines; refuse one that is too long, or a file that unfolds to far more than any dump does."""
    zipped = path.suffix == ".gz"
    most, seen = FREE + FOLD * path.stat().st_size, 0
    with gzip.open(path) if zipped else path.open("rb") as raw, io.BufferedReader(raw, 1 << 20) as file:
        while line := file.readline(MOST_LINE):
            seen += len(line)
            if len(line) == MOST_LINE:
                hint = "the file holds one JSON object per line, of one sequence"
                raise DumpError(f"{path}: a line is longer than {MOST_LINE >> 20} MiB", hint)
            if zipped and seen > most:
                what = f"{path}: it unfolds to more than {FOLD} times its size, which no log-probs do"
                raise DumpError(what, "was it damaged? unpack it, and look at what it holds")
            yield line


def numbers(value: Any, name: str = "") -> Array:
    """Return a list of numbers as an array [N]; null is NaN."""
    found = np.asarray(value)
    if found.dtype == object:
        found = np.asarray(value, np.float64)
    if found.size and (found.ndim != 1 or found.dtype.kind not in "fiub"):
        raise ValueError(f"{name or 'a column'} is no list of numbers")
    return found.reshape(-1) if found.size else np.empty(0, np.float32)


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
    row: Row = {name: numbers(one, name)[:n][first:last] for name, one in columns.items() if one is not None}
    prompt = ids[:first].astype(np.int64)
    group = blake2b(prompt.tobytes(), digest_size=8).hexdigest()
    row |= {"response_mask": counts[first:last].astype(np.int8), "token_ids": ids[first:last]}
    return row | {"prompt_ids": prompt, "prompt_length": first, "group_id": group}


def nemo_rl(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """`train_data_step*.jsonl` since 0.6 (nemo_rl/utils/logger.py): each field is a list of one, padded.

    Index 0 holds a placeholder, and is masked.
    """
    for path in files:
        step = _in_name(path, r"step(\d+)")
        for i, (where, one) in enumerate(records(path)):
            with explained(where, "NeMo-RL"):
                record = {name: x[0] if isinstance(x, list) and len(x) == 1 else x for name, x in one.items()}
                if "token_loss_mask" not in record:
                    raise DumpError(
                        f"{where}: no 'token_loss_mask'", "NeMo-RL writes it since 0.6: use the hook"
                    )
                n = record["input_lengths"]
                mask = numbers(record["token_loss_mask"])[:n] * float(record.get("sample_loss_mask", 1))
                mask[:1] = 0
                old = numbers(record["prev_logprobs"], "prev_logprobs")[:n]
                row = whole(
                    mask,
                    record["token_ids"][:n],
                    rollout_log_probs=record["generation_logprobs"],
                    old_log_probs=old if old.any() else None,  # that pass was skipped
                    advantages=record.get("advantages"),
                )
                name = f"{step}/{record.get('idx', i)}"
                yield (
                    where,
                    {}
                    if row is None
                    else row | {"rewards": record.get("rewards"), "step": step, "sequence_id": name},
                )


def prime_rl(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """`token_exports/step_*/rank_*.jsonl` (rl/token_export.py): one pass, which is old and current."""
    for path in files:
        for where, one in records(path):
            with explained(where, "prime-rl"):
                old = numbers(one["trainer_logprobs"], "trainer_logprobs")
                advantages = one.get("advantages")
                row = whole(
                    one["loss_mask"],
                    one["token_ids"],
                    rollout_log_probs=one["inference_logprobs"],
                    old_log_probs=old,
                    current_log_probs=old,
                    advantages=None
                    if advantages is None
                    else np.nan_to_num(numbers(advantages).astype(float)),
                    entropy=one.get("entropy"),
                )
                within = (one.get(name) for name in ("run_id", "step", "rank", "export_sequence_idx"))
                name = "/".join(str(x) for x in within if x is not None)
                rewards = next((x for x in reversed(one.get("rewards") or []) if x is not None), None)
                more = {
                    "sequence_id": name,
                    "step": one["step"],
                    "env_name": one.get("env_name"),
                    "rewards": rewards,
                }
                yield where, {} if row is None else row | more


def json_lines(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """One object per sequence, a list per token column, under names that trainers give."""
    for path in files:
        for where, one in records(path):
            found = schema.assigned(list(one), columns, where)
            row: Row = {}
            for name, field in found.items():
                value = one[field]
                if value is None:
                    continue
                if name == FINISH_REASON and isinstance(value, dict):  # as SGLang says it
                    value = value.get("type")
                row[name] = value
            with explained(where, "a writer of numbers"):
                for name, value in row.items():
                    if COLUMNS[name].holds in ("tokens", "list") or (
                        COLUMNS[name].of_tokens and isinstance(value, list)
                    ):
                        runs = name == WEIGHT_VERSIONS and len(value) and isinstance(value[0], dict | list)
                        row[name] = (
                            spread(value, len(one[found[ROLLOUT]])) if runs else numbers(value, found[name])
                        )
                    elif isinstance(value, dict | list):
                        raise ValueError(
                            f"{found[name]!r} is a {type(value).__name__}, and one value is needed"
                        )
            for name, value in one.items():  # what may say where a row is from
                short = isinstance(value, int | float) or (
                    isinstance(value, str) and len(value) <= LONGEST_TEXT
                )
                if name not in found.values() and short:
                    row[name] = value
            yield where, row


def _in_name(path: Path, pattern: str) -> int:
    found = re.search(pattern, path.name)
    return int(found[1]) if found and len(found[1]) < 18 else 0


# ---------------------------------------------------------------- slime, miles

SLIME = {"log_probs": OLD, "loss_masks": "response_mask"}
SLIME |= {name: name for name in (ROLLOUT, "advantages", "entropy")}
SLICED = ("rollout_log_probs", "log_probs", "advantages", "entropy")
"""Columns of which a context-parallel rank holds its slice; the others are whole."""
TOGETHER = "convert the files of all ranks of a rollout together, and none of another run"


def slime(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """`train_data/*.pt` since 2026-08-12 (observability/train_data_utils.py): a file per rollout."""
    for path in files:
        with explained(str(path), "slime"):
            dump = load(path)
            sampled, raw = _sampled(path, dump["rollout_id"]), dump.get("raw_reward")
            for i, one in enumerate(dump["samples"]):
                where = f"{path}, sample {i}"
                with explained(where, "slime"):
                    at = one.get("rollout_position", i)
                    record = one | (
                        {"rewards": raw[at]} if isinstance(raw, list) and 0 <= at < len(raw) else {}
                    )
                    yield where, _of_slime(record, dump["rollout_id"], one.get("sample_index", at), sampled)


def ranks(files: Sequence[Path], columns: Mapping[str, str]) -> Rows:
    """`train_data/{rollout}_{rank}.pt` of miles, and of slime up to 0.3.1 (utils/train_dump_utils.py).

    Tensor-parallel ranks repeat each other, only the last pipeline stage has log-probs, and each
    context-parallel rank has two chunks of the response, from both ends (training_utils/cp_utils.py).
    """
    for _, group in groupby(files, lambda path: (path.parent, path.stem.rpartition("_")[0])):
        paths = list(group)
        samples: dict[object, Row] = {}
        for path in paths:
            with explained(str(path), "slime"):
                dump = load(path)
                data, place = dump["rollout_data"], (dump.get("cp_rank") or 0, dump.get("cp_size") or 1)
                for i, n in enumerate(data["response_lengths"]):
                    one = {
                        name: x[i] for name, x in data.items() if name != "raw_reward" and isinstance(x, list)
                    }
                    index = one.get("sample_indices", (numbers(one["tokens"]).tobytes(), n))
                    row = samples.setdefault(index, one | {"rollout": dump["rollout_id"]})
                    for name in (name for name in SLICED if name in one):
                        width = one["total_lengths"]
                        if dump.get("qkv_format", "bshd") != "thd":
                            width = one.get("max_seq_lens", width)
                        at = _places(one["total_lengths"], n, width, *place)
                        values = numbers(one[name], name)
                        if len(values) != at.sum():
                            said = f"{name} is cut otherwise than for {place[1]} context-parallel ranks"
                            raise DumpError(f"{path}, sample {i}: {said}", TOGETHER)
                        full = row.setdefault(f"{name}, whole", np.full(n, np.nan, np.float32))
                        full[at] = values
        sampled: dict[int, Row] | None = None
        for i, (index, row) in enumerate(samples.items()):
            where = f"{paths[0]}, sample {index if isinstance(index, int) else i}"
            with explained(where, "slime"):
                sampled = _sampled(paths[0], row["rollout"]) if sampled is None else sampled
                there = {name: row[f"{name}, whole"] for name in SLICED if f"{name}, whole" in row}
                if any(np.isnan(one).any() for one in there.values()):
                    raise DumpError(f"{where}: some of its context-parallel ranks are missing", TOGETHER)
                rest = {name: x for name, x in row.items() if name not in SLICED}
                yield (
                    where,
                    _of_slime(rest | there, row["rollout"], index if isinstance(index, int) else i, sampled),
                )


def _places(total: int, response: int, padded: int, rank: int, count: int) -> Array:
    """Return which response tokens a context-parallel rank has: chunks r and 2·count − 1 − r of 2·count."""
    if count == 1:
        return np.ones(response, np.bool_)
    chunk = -(-padded // (2 * count))
    at = np.arange(total - response - 1, total - 1)  # a token's log-prob lies where the one before it does
    return np.isin(at // chunk, (rank, 2 * count - 1 - rank))


def _of_slime(one: Row, rollout: int, index: int, sampled: Mapping[int, Row]) -> Row:
    """Return a sample of a train dump, with what the rollout dump beside it says."""
    other, n = sampled.get(index, {}), one["response_lengths"]
    row: Row = {ours: numbers(one[name], name) for name, ours in SLIME.items() if one.get(name) is not None}
    if ROLLOUT not in row and other.get(ROLLOUT) is not None:
        row[ROLLOUT] = numbers(other[ROLLOUT], ROLLOUT)
    tokens = numbers(one["tokens"])
    if type(n) is not int or not 0 <= n <= len(tokens):
        raise ValueError(f"the response has no length, or one that exceeds the {len(tokens)} tokens")
    reward, prompt = other.get("reward"), len(tokens) - n
    each = _weights(other.get("weight_versions", one.get("weight_versions")), row["response_mask"], prompt)
    known = each[each > UNKNOWN] if each is not None else np.empty(0)
    calls = [int(x) for x in other.get("weight_versions") or () if isinstance(x, str) and x.isdecimal()]
    return (
        row
        | {
            "token_ids": tokens[prompt:],
            "prompt_ids": tokens[:prompt],
            "prompt_length": prompt,
            "rewards": reward if isinstance(reward, int | float) else one.get("rewards"),
            "group_id": other.get("group_index"),
            "finish_reason": other.get("status"),
            "rollout_version": min([*calls, *known.tolist()], default=None),
            "step": rollout,
            "sequence_id": f"{rollout}/{index}",
        }
        | ({} if each is None else {WEIGHT_VERSIONS: each})
    )


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
    return (
        {one.get("index", i): one for i, one in enumerate(load(beside)["samples"])}
        if beside.is_file()
        else {}
    )


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
            groups = {row: group for group, part in enumerate(parts) for row in range(*part)}
            begins = (data["response_mask" if "response_mask" in data else "loss_mask"] != 0).argmax(1)
            for i, begin in enumerate(begins):
                row: Row = {
                    ROLLOUT: rollout[i, begin:],
                    OLD: old[i, begin:],
                    "response_mask": mask[i, begin:].astype(np.int8),
                    "token_ids": data["sequences"][i, data["sequences"].shape[1] - width :][begin:],
                    "group_id": groups.get(i),
                    "step": step,
                    "sequence_id": f"{step}/{i}",
                }
                row |= {"advantages": data["advantages"][i, begin:]} if "advantages" in data else {}
                row |= {"rewards": float(data["rewards"][i].sum())} if "rewards" in data else {}
                yield f"{path}, sequence {i}", row if mask[i].any() else {}


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


DTYPES = {f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)}
DTYPES |= {"bool", "bfloat16", "float16", "float32", "float64"}
STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Bool": "bool",
}
STORAGES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}


def typed(data: Array, dtype: str) -> Array:
    """Return bytes as a flat array of a torch type; bfloat16 becomes float32."""
    if dtype not in DTYPES:
        raise ValueError(f"no type of a tensor: {dtype!r:.20}")
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.dtype(dtype))


def _tensor(flat: Array, offset: int, size: Any, stride: Any, *_: object) -> Array:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min(offset, *size, *stride, 0) < 0 or (math.prod(size) and last >= len(flat)):
        raise ValueError("a tensor lies outside of its storage")
    steps = tuple(step * flat.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(size), steps, writeable=False)


def _bytes(text: Any = b"", *_: object) -> bytes:
    return text.encode("latin1") if isinstance(text, str) else bytes(memoryview(text))


SKYRL = ("skyrl.backends.skyrl_train.training_batch", "skyrl_train.training_batch")
STANDINS: dict[str, Any] = {
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytes,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda flat, at, size, stride, grad, hooks, dtype, *_: _tensor(
        typed(flat, dtype), at, size, stride
    ),
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": lambda make, kind, args, state: make(*args),
    "torch.Size": lambda items=(): tuple(items),
    **{f"{one}._rebuild_tensor_batch": Record for one in SKYRL},
    **{f"torch.{name}": name for name in DTYPES},
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()},
    "torch.storage.UntypedStorage": "uint8",
    **{f"{one}.utils.types.Sample.Status": lambda value: value for one in ("slime", "miles")},
    **dict.fromkeys(("torch.device", "torch.Tensor", "torch.nn.parameter.Parameter"), Record),
    **{f"{one}.{name}": Record for one in SKYRL for name in ("TrainingInputBatch", "TensorBatch")},
    **{f"{one}.utils.types.Sample": Record for one in ("slime", "miles")},
}
"""Qualified name → what stands for it."""
SAFE = {"collections.OrderedDict", "builtins.set", "builtins.frozenset", "numpy.dtype", "numpy.ndarray"}
SAFE |= {f"numpy._core.multiarray.{name}" for name in ("_reconstruct", "scalar")} | {
    "numpy._core.numeric._frombuffer"
}
"""Names that stand for themselves: they make plain values and arrays, and do nothing else."""
OLDER = re.compile(r"^(?:__builtin__|numpy\.core)(?=\.|$)")
"""Modules as older Pythons and NumPys call them."""


class Unpickler(pickle.Unpickler):
    """Python's unpickler with tables in place of imports; `storage` returns the bytes of a tensor."""

    def __init__(self, file: Any, storage: Callable[[str], bytes] | None = None) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        module = OLDER.sub(lambda found: "builtins" if found[0] == "__builtin__" else "numpy._core", module)
        if f"{module}.{name}" in SAFE:
            return super().find_class(module, name)
        if f"{module}.{name}" in STANDINS:
            return STANDINS[f"{module}.{name}"]
        raise DumpError(
            f"holds {module}.{name}"[:200] + ", which is not read: a pickle can run any code",
            "load it in the trainer's own environment, and write its columns with offpol_diag.DumpWriter",
        )

    def persistent_load(self, pid: Any) -> Array:
        """Return the storage of a tensor, flat."""
        if self._storage is None:
            raise ValueError("a reference out of the file")
        return typed(np.frombuffer(self._storage(pid[2]), np.uint8), pid[1])


def load(path: Path, data: bytes | None = None) -> Any:
    """Read a pickle or a `torch.save` file, or bytes within one: plain values, arrays and records."""
    try:
        with path.open("rb") if data is None else io.BytesIO(data) as file:
            if file.read(2) != b"PK":
                file.seek(0)
                return Unpickler(file).load()
            with zipfile.ZipFile(file) as archive:
                name, text = _pickle_of(archive)
                folder = name.removesuffix("data.pkl")
                if (
                    folder + "byteorder" in archive.namelist()
                    and archive.read(folder + "byteorder") != b"little"
                ):
                    raise ValueError("numbers of a big-endian machine")
                storage = cache(lambda key: archive.read(f"{folder}data/{key}"))
                return Unpickler(io.BytesIO(text), storage).load()
    except DumpError as error:
        raise DumpError(f"{path}: {error.message}", error.hint) from error
    except Exception as error:  # a damaged pickle raises whatever its instructions meet
        said = " ".join(str(error).split())[:80] or type(error).__name__
        raise DumpError(f"{path}: a damaged pickle ({said})", "write or copy it again") from error


def _pickle_of(archive: zipfile.ZipFile) -> tuple[str, bytes]:
    """Return the pickle in what `torch.save` writes: a zip file with further members for tensors."""
    name = next(one for one in archive.namelist() if one.rpartition("/")[2] == "data.pkl")
    return name, archive.read(name)  # whole, so that its checksum is compared


def words(path: Path) -> set[str]:
    """Return the words at the beginning of a pickle, or the fields of the first JSON object."""
    found = set[str]()
    if ".jsonl" in path.name:
        return {*next(records(path), ("", {}))[1]}
    with suppress(Exception), path.open("rb") as file:  # it ends anywhere; `load` says what is damaged
        head = file.read(1 << 16)
        if head[:2] == b"PK":
            with zipfile.ZipFile(file) as archive:
                head = _pickle_of(archive)[1][: 1 << 16]
        for code, word, _ in pickletools.genops(head):
            if isinstance(word, str):
                found.add(word.partition(" ")[2] if code.name == "GLOBAL" else word)
    return found


# ---------------------------------------------------------------- which form

BOTH = tuple(
    frozenset(name for one in names for name in COLUMNS[one].called(False))
    for names in ((ROLLOUT,), (OLD, CURRENT))
)
"""Names of the log-probs of the rollout, and of the trainer."""


class Form(NamedTuple):
    """A form: whose, what its files are called and hold, the words by which it is told, and what reads it.

    `marker` is a file that its trainer puts beside files that are finished; empty: none.
    """

    name: str
    trainer: str
    files: str
    holds: str
    told_by: frozenset[str]
    rows: Callable[[Sequence[Path], Mapping[str, str]], Rows]
    marker: str = ""


def _form(name: str, trainer: str, files: str, holds: str, told_by: str, rows: Any, marker: str = "") -> Form:
    return Form(name, trainer, files, holds, frozenset(told_by.split()), rows, marker)


_SAMPLES = (
    "rollout and old log-probs, mask, advantages, rewards, tokens; groups of the rollout dump beside it"
)
FORMS = (
    _form(
        "nemo-rl",
        "NeMo-RL",
        "train_data_step*.jsonl",
        "rollout and old log-probs, mask, advantages, rewards, tokens",
        "generation_logprobs prev_logprobs input_lengths",
        nemo_rl,
    ),
    _form(
        "prime-rl",
        "prime-rl",
        "token_exports/step_*/rank_*.jsonl",
        "rollout log-probs, the trainer's as old and current, mask, advantages, entropy, tokens",
        "inference_logprobs trainer_logprobs loss_mask",
        prime_rl,
        "STABLE",
    ),
    _form("slime", "slime", "train_data/*.pt", _SAMPLES, "format_version rollout_id samples", slime),
    _form(
        "ranks",
        "miles, slime up to 0.3.1",
        "train_data/*_*.pt, a file per rank",
        _SAMPLES,
        "rollout_id rank rollout_data",
        ranks,
    ),
    _form(
        "skyrl",
        "SkyRL",
        "dumped_data/*_training_input.pkl",
        "rollout and old log-probs, mask, advantages, tokens, groups",
        "_rebuild_tensor_batch",
        skyrl,
    ),
    _form(
        "jsonl", "", "*.jsonl, *.jsonl.gz", "one object per sequence, a list per token column", "", json_lines
    ),
)
ENDINGS = (".jsonl", ".jsonl.gz", ".pt", ".pkl", ".dp")
"""Endings of files that are of a form."""
HOOKS = {"verl": "verl", "TRL": "trl", "ms-swift": "trl", "NeMo-RL": "nemo-rl", "prime-rl": "prime-rl"}
HOOKS |= {"SkyRL": "skyrl"} | dict.fromkeys(("slime", "miles", "miles, slime up to 0.3.1"), "slime")
"""Trainer → page with the hook that writes the log-probs of both policies."""
ONE_POLICY = {
    "verl": ("input output score", "DataProto", "tensordict keys"),
    "TRL": ("step prompt completion",),
    "ms-swift": ("prompt completion",),
    "slime": ("rollout_id samples response_length",),
    "miles": ("sample_index response_length tokens",),
}
"""Trainer → words of its own files that have the log-probs of one policy, or of none."""


def one_policy(there: set[str]) -> str:
    """Return whose file this is that has not the log-probs of both policies; empty for any other file."""
    if not any(names.isdisjoint(there) for names in BOTH):
        return ""
    each = ((trainer, set(text.split())) for trainer, texts in ONE_POLICY.items() for text in texts)
    return next((trainer for trainer, told_by in each if there >= told_by), "")
