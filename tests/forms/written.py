"""Files as trainers write them, from one batch; each function follows the code that its docstring names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class Written:
    """A batch: prompts and responses of several lengths, padded as trainers pad them.

    Attributes:
        prompts: token ids of each prompt; two sequences share one.
        responses: token ids of each response.
        rollout, old: log-probs of the response tokens, float32; some are exactly 0.
        mask: 0 for a tool's tokens, which the second sequence has.
    """

    prompts: list[Array]
    responses: list[Array]
    rollout: list[Array]
    old: list[Array]
    mask: list[Array]
    rewards: list[float]
    advantages: list[float]

    def __len__(self) -> int:
        return len(self.prompts)

    def whole(self, i: int, response: Array, prompt: float = 0.0) -> Array:
        """Return a column over prompt and response."""
        return np.concatenate([np.full(len(self.prompts[i]), prompt, response.dtype), response])

    @property
    def width(self) -> int:
        """Return the length of a padded row, a multiple of 8 as NeMo-RL makes it."""
        longest = max(len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True))
        return -(-longest // 8) * 8

    def padded(self, i: int, response: Array, prompt: float = 0.0) -> list[Any]:
        """Return a column over prompt, response and padding on the right."""
        row = self.whole(i, response, prompt)
        padded: list[Any] = np.pad(row, (0, self.width - len(row))).tolist()
        return padded


def batch(seed: int = 3, tool: bool = True) -> Written:
    """Make eight sequences of four prompts."""
    random = np.random.default_rng(seed)
    made = Written([], [], [], [], [], [], [])
    for i in range(8):
        if i % 2 == 0:
            prompt = random.integers(0, 1000, random.integers(4, 9))
        n = int(random.integers(16, 30))
        rollout = -random.exponential(1, n).astype(np.float32)
        rollout[[4, 5]] = 0.0  # certain tokens
        old = np.minimum(rollout + random.normal(0, 0.02, n), 0).astype(np.float32)
        mask = np.ones(n, np.int64)
        if tool and i == 1:
            mask[7:12] = 0
            rollout[7:12] = 0.0
            old[7:12] = -3.0
        made.prompts.append(prompt)
        made.responses.append(random.integers(0, 1000, n))
        made.rollout.append(rollout)
        made.old.append(old)
        made.mask.append(mask)
        made.rewards.append(float(i % 3))
        made.advantages.append(i / 4 - 1)
    return made


def lines(path: Path, records: list[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record, **options) + "\n" for record in records))
    return path


def nemo_rl(folder: Path, made: Written, step: int = 7) -> Path:
    """NVIDIA-NeMo/RL: grpo.py (log_data) and utils/logger.py (log_batched_dict_as_jsonl, micro-batches of 1).

    prev_logprobs begins with a placeholder 0 and covers the prompt; generation_logprobs is 0 there.
    """
    records = []
    for i in range(len(made)):
        previous = made.padded(i, made.old[i], -2.5)
        previous[0] = 0.0
        record: dict[str, Any] = {"content": [f"text {i}"], "rewards": [made.rewards[i]]}
        record["input_lengths"] = [len(made.prompts[i]) + len(made.responses[i])]
        ids = np.concatenate([made.prompts[i], made.responses[i]])
        ones = np.full(len(made.mask[i]), made.advantages[i])
        record |= {
            "token_ids": [np.pad(ids, (0, made.width - len(ids))).tolist()],
            "token_loss_mask": [made.padded(i, made.mask[i])],
            "sample_loss_mask": [0.0 if i == 5 else 1.0],
            "advantages": [made.padded(i, ones, made.advantages[i])],
        }
        record["generation_logprobs"] = [made.padded(i, made.rollout[i])]
        record["prev_logprobs"] = [previous]
        records.append({**record, "idx": i})
    return lines(folder / f"train_data_step{step}.jsonl", records)


def prime_rl(folder: Path, made: Written, step: int = 12, stable: bool = True, old: bool = False) -> Path:
    """PrimeIntellect-ai/prime-rl: trainer/rl/token_export.py (TokenExporter, two ranks).

    trainer_logprobs begins with log(1/vocabulary); what is not finite is null.
    """
    place = folder / "token_exports" / f"step_{step}"
    for rank in (0, 1):
        records = []
        for index, i in enumerate(range(rank, len(made), 2)):
            prompt, n = len(made.prompts[i]), len(made.prompts[i]) + len(made.responses[i])
            trainer = made.whole(i, made.old[i], -2.5)
            trainer[0] = np.log(1 / 151936)
            mask = made.whole(i, made.mask[i])
            entropy: list[float | None] = np.full(n, 0.5).tolist()
            entropy[0] = None
            advantages = made.whole(i, np.full(n - prompt, made.advantages[i])).tolist()
            count = {"micro_step": index // 2, "micro_sequence_idx": index % 2, "export_sequence_idx": index}
            record = {"schema_version": 1, "step": step, "export_step": step, "rank": rank, **count}
            record |= {"run_id": None, "env_name": "math" if i < 4 else "code"}
            record |= {
                "token_ids": np.concatenate([made.prompts[i], made.responses[i]]).tolist(),
                "position_ids": list(range(n)),
                "loss_mask": (mask != 0).tolist(),
                "advantages": [None] * n if i == 7 else advantages,
                "losses": [{}] * n,
                "rewards": made.whole(i, np.full(n - prompt, made.rewards[i])).tolist(),
                "inference_logprobs": made.whole(i, made.rollout[i]).tolist(),
                "trainer_logprobs": trainer.tolist(),
                "entropy": entropy,
                "is_masked": [None] * n,
            }
            if old:
                for name in ("export_step", "run_id", "losses", "rewards"):
                    del record[name]
            records.append(record)
        lines(place / f"rank_{rank}.jsonl", records, separators=(",", ":"), allow_nan=False)
    if stable:
        (place / "STABLE").touch()
    return place
