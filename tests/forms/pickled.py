"""Pickles as trainers write them, from one batch; each function follows the code that its docstring names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.forms.written import Written


def _sample(made: Written, i: int) -> dict[str, Any]:
    """THUDM/slime: utils/types.py (Sample.to_dict)."""
    return {
        "group_index": i // 2,
        "index": 40 + i,
        "rollout_id": None,
        "prompt": f"prompt {i // 2}",
        "tokens": [*made.prompts[i].tolist(), *made.responses[i].tolist()],
        "multimodal_inputs": None,
        "response": f"text {i}",
        "response_length": len(made.responses[i]),
        "label": "7",
        "reward": made.rewards[i],
        "loss_mask": made.mask[i].tolist(),
        "weight_versions": ["12", "11"],
        "rollout_log_probs": made.rollout[i].tolist(),
        "remove_sample": False,
        "status": "completed",
        "metadata": {},
        "spec_info": {"spec_accept_token_num": 0},
        "prefix_cache_info": {"cached_tokens": 0},
        "non_generation_time": 0.0,
    }


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
    shards = [
        {"rank": rank, "data_parallel_rank": rank, "partition": list(range(rank, len(made), 2))}
        for rank in (0, 1)
    ]
    payload = {
        "format_version": 2,
        "rollout_id": rollout,
        "rank": 0,
        "samples": samples,
        "dp_shards": shards,
        "raw_reward": made.rewards,
    }
    torch.save(payload, path)
    return path
