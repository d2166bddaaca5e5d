"""Damaged files of other forms than Parquet, converted and analysed.

python tests/fuzz/forms.py --seconds 60 --seed 0
"""

from __future__ import annotations

import io
import json
from random import Random
from typing import Any

import mutations
import numpy as np
import pyarrow as pa
import runner

WAYS: tuple[tuple[str, ...], ...] = (
    ("convert", "{name}", "--to", "out.parquet"),
    ("convert", "{name}", "--to", "out.parquet", "--align", "full"),
    ("convert", "{name}", "--to", "out.parquet", "--form", "{form}"),
    ("convert", "{name}", "--to", "out.parquet", "--join", "good.jsonl:old_log_probs", "--on", "row"),
    ("convert", "good.jsonl", "--to", "out.parquet", "--join", "{name}:entropy"),
    ("analyze", "{name}", "--presets", "token_is", "--no-html", "-q", "--json", "a.json"),
    ("doctor", ".", "-q"),
)


def records(random: Random) -> list[dict[str, Any]]:
    """Return a few sequences, in the fields of some trainer or in ours."""
    made = []
    kind = random.choice(("ours", "nemo", "prime", "traces", "swift"))
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
                "traces": {
                    "sample_idx": i,
                    "prompt_idx": 0,
                    "prompt_tokens": [1],
                    "response_tokens": [3] * n,
                    "logprobs": logs,
                    "old_logprobs": logs,
                    "request_info": {"tool_calleds": True},
                },
                "swift": {
                    "gen_step": [1, 1],
                    "prompt": ["a", "a"],
                    "completion": ["b", "c"],
                    "rollout_per_token_logps": [logs, logs],
                    "old_per_token_logps": [logs, logs],
                },
            }[kind]
        )
    return made


def as_npz(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    arrays = {
        name: np.array([row[name][:1] if isinstance(row[name], list) else row[name] for row in rows])
        for name in rows[0]
    }
    np.savez(file, **{name: array for name, array in arrays.items() if array.dtype != object})
    return file.getvalue()


def as_arrow(rows: list[dict[str, Any]]) -> bytes:
    table = pa.Table.from_pylist(rows)
    file = io.BytesIO()
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def make(random: Random) -> runner.Input:
    """Draw a damaged file in one of the forms that are read."""
    rows = records(random)
    good = "".join(json.dumps(one) + "\n" for one in records(Random(1))).encode()
    kind = random.choice(("jsonl", "jsonl", "jsonl", "npz", "arrow"))
    if kind == "jsonl":
        trees = [mutations.tree(random, row) if random.random() < 0.5 else row for row in rows]
        bad = b"\n".join(mutations.as_json(random, tree).replace(b"\n", b" ") for tree in trees)
        bad = mutations.blob(random, bad) if random.random() < 0.2 else bad
    else:
        try:
            bad = as_npz(rows) if kind == "npz" else as_arrow(rows)
        except (ValueError, pa.ArrowException):  # rows that no array or table holds
            bad = good
        bad = mutations.blob(random, bad) if random.random() < 0.8 else bad
    name = f"dump.{kind}"
    form = random.choice(("jsonl", "npz", "arrow", "nemo-rl", "prime-rl", "verl", "trl"))
    way = tuple(word.format(name=name, form=form) for word in random.choice(WAYS))
    return runner.Input(way, {name: bad, "good.jsonl": good}, {}, b"")


if __name__ == "__main__":
    raise SystemExit(runner.main(make))
