"""What trainers write by themselves, and JSON lines: the rows that come back, and one error for a mistake.

Makers of files follow the code that their docstrings name.
"""

import gzip
import io
import itertools
import json
import os
import pickle
from collections import namedtuple
from functools import partial

import numpy as np
import pytest
import torch

from tests.factory import converted, unconvertible

# ---------------------------------------------------------------- one batch as trainers write it


class Sampled(namedtuple("Sampled", "prompt ids rollout old mask reward advantage")):
    """A sequence: token ids of prompt and response; of the response's tokens float32 log-probs and a mask."""

    __slots__ = ()

    @property
    def tokens(self):
        return [*self.prompt.tolist(), *self.ids.tolist()]

    def whole(self, response, prompt=0):
        """Return a column over prompt and response."""
        return [prompt] * len(self.prompt) + response.tolist()


def batch():
    """Make eight sequences of four prompts; the second has a tool's tokens, some log-probs are exactly 0."""
    random, made = np.random.default_rng(3), []
    for i in range(8):
        prompt = made[-1].prompt if i % 2 else random.integers(0, 1000, random.integers(4, 9))
        ids = random.integers(0, 1000, int(random.integers(16, 30)))
        rollout = -random.exponential(1, len(ids)).astype(np.float32)
        rollout[[4, 5]] = 0.0
        old = np.minimum(rollout + random.normal(0, 0.02, len(ids)), 0).astype(np.float32)
        mask = np.ones(len(ids), int)
        if i == 1:
            mask[7:12], rollout[7:12], old[7:12] = 0, 0.0, -3.0
        made.append(Sampled(prompt, ids, rollout, old, mask, float(i % 3), i / 4 - 1))
    return made


MADE = batch()
WIDEST = max(len(one.ids) for one in MADE)
WIDTH = -(-max(len(one.tokens) for one in MADE) // 8) * 8
"""Length of a padded row, a multiple of 8 as NeMo-RL makes it."""


def saved(path, value):
    """Write records as JSON lines, or an object of torch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in value))
    else:
        torch.save(value, path)
    return path


def nemo_rl(folder):
    """NVIDIA-NeMo/RL: grpo.py (log_data), utils/logger.py (log_batched_dict_as_jsonl, micro-batches of 1).

    prev_logprobs begins with a placeholder 0, which may be in the mask, and covers the prompt;
    generation_logprobs is 0 there.
    """
    records = []
    for i, one in enumerate(MADE):
        columns = {
            "token_ids": one.tokens,
            "token_loss_mask": [int(i == 0), *one.whole(one.mask)[1:]],
            "advantages": [one.advantage] * len(one.tokens),
            "generation_logprobs": one.whole(one.rollout),
            "prev_logprobs": [0.0, *one.whole(one.old, -2.5)[1:]],
        }
        record = {name: [x + [0] * (WIDTH - len(x))] for name, x in columns.items()}
        more = {"input_lengths": [len(one.tokens)], "sample_loss_mask": [float(i != 5)], "idx": i}
        records.append(record | more | {"content": [f"text {i}"], "rewards": [one.reward]})
    return saved(folder / "train_data_step7.jsonl", records)


def prime_rl(folder, step=12):
    """PrimeIntellect-ai/prime-rl: trainer/rl/token_export.py (TokenExporter, two ranks).

    trainer_logprobs begins with log(1/vocabulary); what is not finite is null.
    """
    place = folder / "token_exports" / f"step_{step}"
    for rank in (0, 1):
        records = []
        for index, (i, one) in enumerate([*enumerate(MADE)][rank::2]):
            n = len(one.tokens)
            record = {"step": step, "rank": rank, "run_id": None, "export_sequence_idx": index}
            record |= {"token_ids": one.tokens, "loss_mask": [bool(x) for x in one.whole(one.mask)]}
            record |= {"advantages": [one.advantage or None] * n, "rewards": [one.reward] * n}
            record |= {"inference_logprobs": one.whole(one.rollout), "entropy": [None, *[0.5] * (n - 1)]}
            record["trainer_logprobs"] = [float(np.log(1 / 151936)), *one.whole(one.old, -2.5)[1:]]
            records.append(record | {"env_name": "math" if i < 4 else "code"})
        saved(place / f"rank_{rank}.jsonl", records)
    return place


# ---------------------------------------------------------------- slime, miles


def slime_rollout(folder):
    """THUDM/slime: observability/rollout_data_utils.py, utils/types.py; miles: ray/rollout/debug_data.py."""
    samples = []
    for i, one in enumerate(MADE):
        sample = {"group_index": i // 2, "index": 40 + i, "reward": one.reward, "status": "completed"}
        sample |= {"tokens": one.tokens, "response_length": len(one.ids)}
        samples.append(sample)
    return saved(folder / "rollout_data" / "13.pt", {"rollout_id": 13, "samples": samples})


def columns(one):
    """Return a sample's columns in `train_data`, where rewards are normalised."""
    n = len(one.ids)
    return {
        "tokens": torch.tensor(one.tokens),
        "response_lengths": n,
        "loss_masks": torch.tensor(one.mask, dtype=torch.int),
        "rewards": one.advantage,
        "rollout_log_probs": torch.tensor(one.rollout),
        "log_probs": torch.tensor(one.old),
        "advantages": torch.full((n,), one.advantage),
        "entropy": torch.full((n,), 0.5, dtype=torch.bfloat16),
    }


def slime(folder):
    """THUDM/slime: observability/train_data_utils.py (_build_dump_payload), of two data-parallel ranks."""
    samples = [{"sample_index": 40 + i, "rollout_position": i} | columns(one) for i, one in enumerate(MADE)]
    payload = {"format_version": 2, "rollout_id": 13, "rank": 0, "samples": samples}
    return saved(folder / "train_data" / "13.pt", payload | {"raw_reward": [one.reward for one in MADE]})


def spans(total, response, rank, size, padded):
    """radixark/miles: cp_utils.py (get_logits_and_tokens_offset_with_cp, slice_log_prob_with_cp)."""
    begin, chunk = total - response - 1, (padded + 2 * size - 1) // (2 * size)
    parts = [(at * chunk, (at + 1) * chunk) for at in (rank, 2 * size - rank - 1)]
    logits = [(max(low, begin), min(high, total - 1)) for low, high in parts]
    return [(low - begin, high - begin) for low, high in logits if low < high]


def ranks(folder, context=1, miles=True, padded=False):
    """radixark/miles: utils/train_dump_utils.py; THUDM/slime v0.3.1: the same without the last three fields.

    Two data-parallel groups of two pipeline stages, two tensor-parallel ranks and some of context.
    """
    for rank, at in enumerate(itertools.product((0, 1), (0, 1), range(context), (0, 1))):
        stage, group, part, _ = at
        data = {"sample_indices": [40 + i for i in range(group, 8, 2)]}
        for one in map(columns, MADE[group::2]):
            total = len(one["tokens"])
            here = spans(total, one["response_lengths"], part, context, WIDTH if padded else total)
            for name in ("rollout_log_probs", "log_probs", "advantages", "entropy"):
                if stage == 0 and name != "rollout_log_probs":
                    del one[name]
                elif context > 1:
                    one[name] = torch.cat([one[name][:0], *(one[name][a:b] for a, b in here)])
            for name, x in (one | {"max_seq_lens": WIDTH} if padded else one).items():
                data.setdefault(name, []).append(x)
        value = {"rollout_id": 13, "rank": rank, "rollout_data": data}
        if miles:
            value |= {"cp_rank": part, "cp_size": context, "qkv_format": "bshd" if padded else "thd"}
        saved(folder / "train_data" / f"13_{rank}.pt", value)
    return folder / "train_data"


# ---------------------------------------------------------------- SkyRL


class Batch:
    """Stands for a class of the trainer, which is not installed where its pickle is read."""

    def __init__(self, state):
        self.state = state

    def __reduce__(self):
        return _rebuild, (Batch, self.state)


def _rebuild(kind, state):
    raise AssertionError("the code of a pickle runs")


def skyrl(folder, appended=False):
    """NovaSky-AI/SkyRL: training_batch.py (TensorBatch.__reduce__, _serialize_tensor), padded on the left.

    Of a token that the generator `appended`, the rollout's log-prob is 0.
    """

    def left(rows, width=WIDEST):
        return np.stack([np.pad(row, (width - len(row), 0)) for row in rows])

    arrays = {
        "sequences": left([one.tokens for one in MADE], WIDTH),
        "response_mask": left([one.mask | 1 for one in MADE]),
        "loss_mask": left([one.mask.astype(np.float32) for one in MADE]),
        "rollout_logprobs": left([one.rollout for one in MADE]),
        "action_log_probs": left([one.old for one in MADE]),
    }
    if appended:
        arrays["rollout_logprobs"][:, -1], arrays["action_log_probs"][:, -1] = 0.0, -9.0
    tensors = {
        name: {"format": "numpy", "data": x.tobytes(), "shape": x.shape, "dtype": str(x.dtype)}
        for name, x in arrays.items()
    }
    advantages = torch.tensor([[one.advantage] * WIDEST for one in MADE])
    torch.save(advantages.to(torch.bfloat16), buffer := io.BytesIO())  # a type that NumPy lacks
    tensors |= {"advantages": {"format": "torch", "data": buffer.getvalue()}, "values": None}
    groups = {"policy_prompt_boundaries": [(i, i + 2) for i in range(0, 8, 2)]}
    path = folder / "dumped_data" / "global_step_6_training_input.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(Batch({"batch_dict": tensors, "metadata": groups})))
    return path


# ---------------------------------------------------------------- what comes back


def edited(make, change, file=""):
    """Return a maker of a file (or one of a folder's) whose bytes, records or object are changed."""

    def made(folder):
        path = make(folder) / file if file else make(folder)
        if change in (cut, misspelt):
            path.write_bytes(change(path.read_bytes()))
            return path
        jsonl = path.suffix == ".jsonl"
        value = [*map(json.loads, path.read_text().splitlines())] if jsonl else torch.load(path)
        change(value)
        return saved(path, value)

    return made


def cut(data):
    return data[:-50]


def misspelt(data):
    return data.replace(b"loss_mask", b"loss_musk")


def beside(make):
    """Return a maker of a file with slime's rollouts beside it."""
    return lambda folder: [slime_rollout(folder), make(folder)][1]


TOKENS = "rollout_log_probs old_log_probs response_mask token_ids advantages "
NEMO = TOKENS + "prompt_ids group_id rewards"
PRIME = NEMO + " entropy current_log_probs env_name"
SLIME = TOKENS + "prompt_ids entropy"
BESIDE = SLIME + " rewards group_id finish_reason"
LEFT_OUT = "1 sequences without a token that counts are left out"
RANKS = "read as miles, slime up to 0.3.1 (ranks)"
TRIPS = {  # maker, columns that come back, what names a sequence, what is noted
    "nemo-rl": (nemo_rl, NEMO, "7/{i}", LEFT_OUT),
    "prime-rl": (prime_rl, PRIME, "12/{rank}/{at}", "prime-rl (prime-rl)"),
    "slime": (slime, SLIME + " rewards", "13/4{i}", "read as slime (slime)"),
    "slime beside rollouts": (beside(slime), BESIDE, "13/4{i}", "read as slime (slime)"),
    "slime, ranks": (partial(ranks, miles=False), SLIME, "13/4{i}", RANKS),
    "miles": (beside(ranks), BESIDE, "13/4{i}", RANKS),
    "skyrl": (skyrl, TOKENS + "group_id", "6/{i}", "SkyRL (skyrl)"),
}
for how in ({"context": 2}, {"context": 2, "padded": True}, {"context": 4}, {"context": 4, "padded": True}):
    TRIPS[f"miles, {how}"] = (beside(partial(ranks, **how)), BESIDE, "13/4{i}", RANKS)


@pytest.mark.parametrize("name", TRIPS)
def test_what_a_trainer_wrote_comes_back(name, tmp_path):
    make, columns, called, note = TRIPS[name]
    rows, notes = converted(make(tmp_path))
    groups = dict[object, int]()
    for i, one in enumerate(MADE):
        wanted = {"token_ids": one.ids.tolist(), "prompt_ids": one.prompt.tolist(), "rewards": one.reward}
        wanted |= {"rollout_log_probs": one.rollout.tolist(), "response_mask": one.mask.tolist()}
        wanted |= dict.fromkeys(("old_log_probs", "current_log_probs"), one.old.tolist())
        wanted |= {"advantages": [one.advantage] * len(one.ids), "entropy": [0.5] * len(one.ids)}
        wanted |= {"env_name": "math" if i < 4 else "code", "finish_reason": "completed"}
        found = [row for row in rows if row["sequence_id"] == called.format(i=i, rank=i % 2, at=i // 2)]
        if name.startswith("nemo") and i == 5:
            assert found == [], "it has no loss"
            continue
        assert found[0]["step"] == int(called.partition("/")[0])
        shared = wanted.keys() & {*columns.split()}
        assert {x: found[0][x] for x in shared} == {x: wanted[x] for x in shared}
        if "group_id" in columns:
            assert groups.setdefault(found[0]["group_id"], i // 2) == i // 2
    assert len(groups) == 4 * ("group_id" in columns)
    assert any(note in one for one in notes), notes


def test_a_token_that_skyrl_appended_and_nobody_sampled_is_masked(tmp_path):
    rows, _ = converted(skyrl(tmp_path, appended=True))
    assert [row["response_mask"] for row in rows] == [[*one.mask[:-1].tolist(), 0] for one in MADE]


LOGS = {"logprobs": [-1.0], "old_logprobs": [-1.0]}


def test_json_lines_are_read_in_the_order_of_numbers(tmp_path):
    """A number may be written 1 or 1.0; lists and objects that are no column are left out."""
    for at, more in ((10, {"step": 4.0, "host": "7"}), (9, {"step": None, "host": "a", "prompt": ["p"]})):
        saved(tmp_path / f"step_{at}.jsonl", [LOGS | more])
    found, _ = converted(tmp_path)
    assert [(one["step"], one["host"]) for one in found] == [(None, "a"), (4, "7")]
    assert "prompt" not in found[0]


# ---------------------------------------------------------------- mistakes


class Calls:
    """An object whose pickle calls a function."""

    def __reduce__(self):
        return os.system, ("touch called",)


def raw(name, data):
    """Return a maker of a file of some bytes."""

    def made(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        return folder / name

    return made


def jsonl(*rows):
    return lambda folder: saved(folder / "a.jsonl", rows)


def some_ranks(folder):
    """Leave out one part of the context of one group, in each stage."""
    path = ranks(folder, 2)
    for rank in (0, 1, 8, 9):
        (path / f"13_{rank}.pt").unlink()
    return path


def skip_prev(rows):
    """Make log-probs of a pass that was skipped."""
    for one in rows:
        one["prev_logprobs"] = [[0.0] * len(one["prev_logprobs"][0])]


def sample(at, **change):
    return edited(slime, lambda dump: dump["samples"][at].update(change))


def line(at, **change):
    return edited(nemo_rl, lambda rows: rows[at].update(change))


BLANKS = 400 * gzip.compress(b" " * ((1 << 20) - 1) + b"\n")
HOOK = "docs/trainers/{}.md has a hook"
MISTAKES = [
    # JSON lines
    (jsonl(LOGS, [1]), "line 2: not as a writer of JSON lines writes it"),
    (raw("a.jsonl", b"hello"), "line 1: not as a writer of JSON lines writes it"),
    (raw("a.jsonl", b"{" + b'"a":{' * 100_000), "line 1: not as a writer of JSON lines"),
    (raw("a.jsonl.gz", BLANKS), "unfolds to more than 100 times"),
    (jsonl({"logprobs": [], "old_logps": []}), "no sequence that counts is in it"),
    (jsonl(LOGS | {"logprobs": ["a"]}), "(logprobs is no list of num"),
    (jsonl(LOGS | {"old_logprobs": [-1.0, -2.0]}), "old_log_probs, sequence 0: 2 tokens"),
    (jsonl(LOGS | {"step": float("inf")}), "step is not one plain value per sequence"),
    # log-probs of one policy
    (jsonl({"input": "a", "output": "b", "score": 1.0}), HOOK.format("verl")),
    (jsonl({"prompt": ["a"], "completion": ["b"]}), HOOK.format("trl")),
    (edited(nemo_rl, skip_prev), HOOK.format("nemo-rl")),
    (edited(slime, lambda dump: dump["samples"][0].pop("log_probs")), HOOK.format("slime")),
    (raw("rollout_data/13.pt", b""), "docs/trainers.md a hook for each trainer"),
    # what trainers write, damaged
    (edited(nemo_rl, cut), "line 8: not as NeMo-RL writes it"),
    (edited(nemo_rl, misspelt), "line 1: not as NeMo-RL writes it (no field 'token_loss_mask')"),
    (line(2, prev_logprobs=[["a"]]), "line 3: not as NeMo-RL writes it (prev_logprobs is no list"),
    (line(2, token_ids=[[None] * 20]), "token_ids does not fit int32"),
    (edited(prime_rl, cut, "rank_0.jsonl"), "line 4: not as prime-rl writes it"),
    (edited(slime, cut), "13.pt: not as slime writes it ("),
    (sample(3, response_lengths=10**6), "sample 43: not as slime writes it"),
    (sample(1, log_probs=torch.zeros(3)), "(3 log_probs, and rank 0 of 1 has 24"),
    (sample(1, log_probs=torch.zeros(1).expand(1 << 40)), "(1099511627776 log_probs, and rank 0 of 1"),
    (edited(slime, lambda dump: dump.update(samples=Calls())), "13.pt: not as slime writes it (Weights only"),
    (some_ranks, "context-parallel ranks are missing"),
    (partial(ranks, context=2, miles=False), "and rank 0 of 1 has"),
    (edited(skyrl, cut), "not as SkyRL writes it (pickle data was truncated"),
    (edited(skyrl, misspelt), "no field 'loss_mask'"),
    (raw("x_training_input.pkl", pickle.dumps({"batch_dict": Calls()})), "not as SkyRL writes it"),
]


@pytest.mark.parametrize(("make", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_a_mistake_is_one_error_with_a_hint_and_no_code_of_a_pickle_runs(make, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unconvertible(make(tmp_path), says)
    assert not (tmp_path / "called").exists()
