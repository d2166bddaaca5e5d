"""What trainers write by themselves, made of one batch; makers follow the code that their docstrings name."""

from __future__ import annotations

import io
import itertools
import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch


class Sampled(NamedTuple):
    """A sequence: token ids of prompt and response; of the response's tokens float32 log-probs and a mask."""

    prompt: Any
    ids: Any
    rollout: Any
    old: Any
    mask: Any
    reward: float
    advantage: float

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt.tolist(), *self.ids.tolist()]

    def whole(self, response: Any, prompt: float = 0) -> list[Any]:
        """Return a column over prompt and response."""
        return [prompt] * len(self.prompt) + response.tolist()


def batch() -> list[Sampled]:
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
WIDTH = -(-max(len(one.tokens) for one in MADE) // 8) * 8
"""Length of a padded row, a multiple of 8 as NeMo-RL makes it."""


def saved(path: Path, value: Any) -> Path:
    """Write records as JSON lines, or an object of torch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in value))
    else:
        torch.save(value, path)
    return path


def nemo_rl(folder: Path) -> Path:
    """NVIDIA-NeMo/RL: grpo.py (log_data), utils/logger.py (log_batched_dict_as_jsonl, micro-batches of 1).

    prev_logprobs begins with a placeholder 0 and covers the prompt; generation_logprobs is 0 there.
    """
    records = []
    for i, one in enumerate(MADE):
        columns = {
            "token_ids": one.tokens,
            "token_loss_mask": one.whole(one.mask),
            "advantages": [one.advantage] * len(one.tokens),
            "generation_logprobs": one.whole(one.rollout),
            "prev_logprobs": [0.0, *one.whole(one.old, -2.5)[1:]],
        }
        record = {name: [x + [0] * (WIDTH - len(x))] for name, x in columns.items()}
        more = {"input_lengths": [len(one.tokens)], "sample_loss_mask": [float(i != 5)], "idx": i}
        records.append(record | more | {"content": [f"text {i}"], "rewards": [one.reward]})
    return saved(folder / "train_data_step7.jsonl", records)


def prime_rl(folder: Path, step: int = 12, stable: bool = True) -> Path:
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
    if stable:
        (place / "STABLE").touch()
    return place


# ---------------------------------------------------------------- slime, miles


def slime_rollout(folder: Path) -> Path:
    """THUDM/slime: observability/rollout_data_utils.py, utils/types.py; miles: ray/rollout/debug_data.py."""
    samples = []
    for i, one in enumerate(MADE):
        sample = {"group_index": i // 2, "index": 40 + i, "reward": one.reward, "status": "completed"}
        sample |= {"tokens": one.tokens, "response_length": len(one.ids), "weight_versions": ["11", "12"]}
        samples.append(sample)
    return saved(folder / "rollout_data" / "13.pt", {"rollout_id": 13, "samples": samples})


def columns(one: Sampled) -> dict[str, Any]:
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


def slime(folder: Path) -> Path:
    """THUDM/slime: observability/train_data_utils.py (_build_dump_payload), of two data-parallel ranks."""
    samples = [{"sample_index": 40 + i, "rollout_position": i} | columns(one) for i, one in enumerate(MADE)]
    payload = {"format_version": 2, "rollout_id": 13, "rank": 0, "samples": samples}
    return saved(folder / "train_data" / "13.pt", payload | {"raw_reward": [one.reward for one in MADE]})


def spans(total: int, response: int, rank: int, size: int, padded: int) -> list[tuple[int, int]]:
    """radixark/miles: cp_utils.py (get_logits_and_tokens_offset_with_cp, slice_log_prob_with_cp)."""
    begin, chunk = total - response - 1, (padded + 2 * size - 1) // (2 * size)
    parts = [(at * chunk, (at + 1) * chunk) for at in (rank, 2 * size - rank - 1)]
    logits = [(max(low, begin), min(high, total - 1)) for low, high in parts]
    return [(low - begin, high - begin) for low, high in logits if low < high]


def ranks(folder: Path, context: int = 1, miles: bool = True, padded: bool = False) -> Path:
    """radixark/miles: utils/train_dump_utils.py; THUDM/slime v0.3.1: the same without the last three fields.

    Two data-parallel groups of two pipeline stages, two tensor-parallel ranks and some of context.
    """
    for rank, at in enumerate(itertools.product((0, 1), (0, 1), range(context), (0, 1))):
        stage, group, part, _ = at
        data: dict[str, Any] = {"sample_indices": [40 + i for i in range(group, 8, 2)]}
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

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return _rebuild, (Batch, self.state)


def _rebuild(kind: Any, state: Any) -> Any:
    raise AssertionError("the code of a pickle runs")


def skyrl(folder: Path, appended: bool = False) -> Path:
    """NovaSky-AI/SkyRL: training_batch.py (TensorBatch.__reduce__, _serialize_tensor), padded on the left.

    Of a token that the generator `appended`, the rollout's log-prob is 0.
    """

    def left(rows: Any, width: int = max(len(one.ids) for one in MADE)) -> Any:
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
    tensors: dict[str, Any] = {
        name: {"format": "numpy", "data": x.tobytes(), "shape": x.shape, "dtype": str(x.dtype)}
        for name, x in arrays.items()
    }
    advantages = torch.tensor([[one.advantage] * arrays["loss_mask"].shape[1] for one in MADE])
    torch.save(advantages.to(torch.bfloat16), buffer := io.BytesIO())  # a type that NumPy lacks
    tensors |= {"advantages": {"format": "torch", "data": buffer.getvalue()}, "values": None}
    groups = {"policy_prompt_boundaries": [(i, i + 2) for i in range(0, 8, 2)]}
    path = folder / "dumped_data" / "global_step_6_training_input.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(Batch({"batch_dict": tensors, "metadata": groups})))
    return path
