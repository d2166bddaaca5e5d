"""Pickles as trainers write them, from one batch; each function follows the code that its docstring names."""

from __future__ import annotations

import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.forms.written import Written


def _sample(made: Written, i: int) -> dict[str, Any]:
    """THUDM/slime: utils/types.py (Sample.to_dict)."""
    where = {"group_index": i // 2, "index": 40 + i, "rollout_id": None, "prompt": f"prompt {i // 2}"}
    answer = {"response": f"text {i}", "response_length": len(made.responses[i]), "label": "7"}
    lists = {"loss_mask": made.mask[i].tolist(), "rollout_log_probs": made.rollout[i].tolist()}
    state = {"remove_sample": False, "status": "completed", "metadata": {}, "non_generation_time": 0.0}
    caches = {"spec_info": {"spec_accept_token_num": 0}, "prefix_cache_info": {"cached_tokens": 0}}
    tokens = [*made.prompts[i].tolist(), *made.responses[i].tolist()]
    sample = {"tokens": tokens, "reward": made.rewards[i], "weight_versions": ["11", "12"]}
    return {**where, **sample, "multimodal_inputs": None, **answer, **lists, **state, **caches}


def slime_rollout(folder: Path, made: Written, rollout: int = 13, miles: bool = False) -> Path:
    """THUDM/slime: observability/rollout_data_utils.py; radixark/miles: ray/rollout/debug_data.py."""
    path = folder / "rollout_data" / f"{rollout}.pt"
    path.parent.mkdir(exist_ok=True)
    samples = [_sample(made, i) for i in range(len(made))]
    head: dict[str, Any] = {"rollout_id": rollout} | ({"metadata": {}} if miles else {})
    torch.save({**head, "samples": samples}, path)
    return path


def _columns(made: Written, i: int) -> dict[str, Any]:
    """The columns of a sample in `rollout_data`, whose rewards are normalised."""
    return {
        "tokens": torch.tensor(np.concatenate([made.prompts[i], made.responses[i]])),
        "total_lengths": len(made.prompts[i]) + len(made.responses[i]),
        "response_lengths": len(made.responses[i]),
        "loss_masks": torch.tensor(made.mask[i], dtype=torch.int),
        "rewards": made.advantages[i],
        "truncated": 0,
        "rollout_log_probs": torch.tensor(made.rollout[i]),
        "log_probs": torch.tensor(made.old[i]),
        "advantages": torch.full((len(made.responses[i]),), made.advantages[i]),
        "entropy": torch.full((len(made.responses[i]),), 0.5, dtype=torch.bfloat16),
    }


def slime(folder: Path, made: Written, rollout: int = 13) -> Path:
    """THUDM/slime: observability/train_data_utils.py (_build_dump_payload), of two data-parallel ranks."""
    path = folder / "train_data" / f"{rollout}.pt"
    path.parent.mkdir(exist_ok=True)
    samples = [
        {"data_parallel_rank": i % 2, "sample_index": 40 + i, "rollout_position": i} | _columns(made, i)
        for i in range(len(made))
    ]
    parts = [list(range(rank, len(made), 2)) for rank in (0, 1)]
    shards = [{"rank": i, "data_parallel_rank": i, "partition": part} for i, part in enumerate(parts)]
    payload = {"format_version": 2, "rollout_id": rollout, "rank": 0, "samples": samples}
    torch.save(payload | {"dp_shards": shards, "raw_reward": made.rewards}, path)
    return path


# ---------------------------------------------------------------- a file per rank


def spans(
    total: int, response: int, rank: int, size: int, padded: int | None = None
) -> list[tuple[int, int]]:
    """radixark/miles: cp_utils.py (get_logits_and_tokens_offset_with_cp, slice_log_prob_with_cp)."""
    prompt = total - response
    chunk = ((padded or total) + 2 * size - 1) // (2 * size)
    chunk_0 = (rank * chunk, (rank + 1) * chunk)
    chunk_1 = ((2 * size - rank - 1) * chunk, (2 * size - rank) * chunk)
    logits_0 = (max(chunk_0[0], prompt - 1), min(chunk_0[1], total - 1))
    logits_1 = (max(chunk_1[0], prompt - 1), min(chunk_1[1], total - 1))
    return [(low - (prompt - 1), high - (prompt - 1)) for low, high in (logits_0, logits_1) if low < high]


def ranks(
    folder: Path, made: Written, context: int = 1, miles: bool = True, padded: bool = False, rollout: int = 13
) -> Path:
    """radixark/miles: utils/train_dump_utils.py; THUDM/slime v0.3.1: the same without the last three fields.

    Two data-parallel groups of two pipeline stages, two tensor-parallel ranks and some of context.
    """
    place = folder / "train_data"
    place.mkdir(exist_ok=True)
    width = made.width if padded else None
    grid = itertools.product((0, 1), (0, 1), range(context), (0, 1))
    for rank, (stage, group, part, _) in enumerate(grid):
        rows = range(group, len(made), 2)
        columns = [_columns(made, i) for i in rows]
        for one in columns:
            if stage == 0:
                del one["log_probs"], one["advantages"], one["entropy"]
            here = spans(one["total_lengths"], one["response_lengths"], part, context, width)
            for name in {"rollout_log_probs", "log_probs", "advantages", "entropy"} & one.keys():
                if context > 1:
                    one[name] = torch.cat([one[name][:0], *(one[name][a:b] for a, b in here)])
        data: dict[str, Any] = {name: [one[name] for one in columns] for name in columns[0]}
        data |= {"sample_indices": [40 + i for i in rows], "raw_reward": made.rewards}
        if padded:
            data["max_seq_lens"] = [made.width] * len(columns)
        value = {"rollout_id": rollout, "rank": rank, "rollout_data": data}
        if miles:
            value |= {"cp_rank": part, "cp_size": context, "qkv_format": "bshd" if padded else "thd"}
        torch.save(value, place / f"{rollout}_{rank}.pt")
    return place


# ---------------------------------------------------------------- SkyRL


class Batch:
    """Stands for a class of the trainer, which is not installed where its pickle is read."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def __reduce__(self) -> Any:
        return _rebuild, (Batch, self.state)


def _rebuild(kind: Any, state: Any) -> Any:
    raise AssertionError("the code of a pickle runs")


def _left(rows: list[Any], width: int, dtype: Any) -> torch.Tensor:
    return torch.tensor(np.stack([np.pad(np.asarray(row, dtype), (width - len(row), 0)) for row in rows]))


def skyrl(folder: Path, made: Written, step: int = 6, appended: bool = False) -> Path:
    """NovaSky-AI/SkyRL: training_batch.py (TensorBatch.__reduce__, __getstate__, _serialize_tensor)."""
    responses = max(map(len, made.responses))
    whole = [np.concatenate(pair) for pair in zip(made.prompts, made.responses, strict=True)]
    advantages = [np.full(len(row), value) for row, value in zip(made.mask, made.advantages, strict=True)]
    batch: dict[str, Any] = {
        "sequences": _left(whole, made.width, np.int64),
        "response_mask": _left([np.ones(len(row)) for row in made.responses], responses, np.int64),
        "loss_mask": _left(made.mask, responses, np.float32),
        "rollout_logprobs": _left(made.rollout, responses, np.float32),
        "action_log_probs": _left(made.old, responses, np.float32),
        "values": None,
        "advantages": _left(advantages, responses, np.float32).to(torch.bfloat16),
    }
    if appended:
        batch["rollout_logprobs"][:, -1] = 0.0
        batch["action_log_probs"][:, -1] = -9.0

    def serialize(value: torch.Tensor | None) -> dict[str, Any] | None:
        if value is None:
            return None
        try:
            array = value.numpy()
        except TypeError:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            return {"format": "torch", "data": buffer.getvalue()}
        return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}

    state = {
        "batch_dict": {name: serialize(value) for name, value in batch.items()},
        "batch_size": len(made),
        "device": torch.device("cpu"),
        "metadata": {"uids": ["a"], "policy_prompt_boundaries": [(i, i + 2) for i in range(0, len(made), 2)]},
    }
    path = folder / "dumped_data" / f"global_step_{step}_training_input.pkl"
    path.parent.mkdir()
    path.write_bytes(pickle.dumps(Batch(state)))
    return path
