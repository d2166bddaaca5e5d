"""Damaged files of JSON lines, converted and analysed.

python tests/fuzz/forms.py --seconds 60 --seed 0
"""

from __future__ import annotations

from random import Random
from typing import Any

import mutations
import runner

WAYS: tuple[tuple[str, ...], ...] = (
    ("convert", "{name}", "--to", "out.parquet"),
    ("analyze", "{name}", "--presets", "token_is", "--no-html", "-q", "--json", "a.json"),
    ("doctor", ".", "-q"),
)


def records(random: Random) -> list[dict[str, Any]]:
    """Return a few sequences, in the fields of some trainer or in ours."""
    made = []
    kind = random.choice(("ours", "nemo", "prime"))
    for i in range(random.randint(1, 6)):
        n = random.choice((0, 1, 3, 17))
        logs = [-random.expovariate(1.0) for _ in range(n)]
        ours = {
            "rollout_log_probs": logs,
            "old_log_probs": logs,
            "response_mask": [1] * n,
            "token_ids": [3] * n,
        }
        made.append(
            {
                "ours": {**ours, "sequence_id": f"s{i}", "rewards": 1.0, "host": "a", "step": i // 2},
                "nemo": {
                    "generation_logprobs": [logs],
                    "prev_logprobs": [logs],
                    "input_lengths": [n],
                    "token_loss_mask": [[0, *[1] * n][:n]],
                    "sample_loss_mask": [1.0],
                    "token_ids": [[3] * n],
                    "idx": i,
                },
                "prime": {
                    "inference_logprobs": logs,
                    "trainer_logprobs": logs,
                    "loss_mask": [True] * n,
                    "token_ids": [3] * n,
                    "advantages": [None] * n,
                    "rewards": [1.0] * n,
                    "step": 1,
                },
            }[kind]
        )
    return made


def make(random: Random) -> runner.Input:
    """Draw a damaged file in one of the forms that are read."""
    trees = [mutations.tree(random, row) if random.random() < 0.5 else row for row in records(random)]
    bad = b"\n".join(mutations.as_json(random, tree).replace(b"\n", b" ") for tree in trees)
    bad = mutations.blob(random, bad) if random.random() < 0.2 else bad
    way = tuple(word.format(name="dump.jsonl") for word in random.choice(WAYS))
    return runner.Input(way, {"dump.jsonl": bad}, {}, b"")


if __name__ == "__main__":
    raise SystemExit(runner.main(make))
