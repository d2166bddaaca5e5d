"""Make the sample dumps: one small real RL run for each, every log-prob from a forward of a real model.

python sample_data/make.py [--only NAME] [--out DIR]
"""

from __future__ import annotations

import argparse
import copy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import finetuning
import model
import pyarrow as pa
import task
import torch
from trainer import Batch, Regime, Trainer

from offpol_diag.dump.writer import stamped, to_table, write_tables

SEED = 20
THREADS = 1  # fixed, for the number of threads changes the order of sums

RUNS = {
    "healthy": Regime(learning_rate=1e-4),
    "stale": Regime(learning_rate=3e-4, lags=(0, 1, 2, 3), unlogged=3),
    "quantized": Regime(learning_rate=1e-4, quantize=True),
    "collapse": Regime(learning_rate=2e-3, warmup=20, quantize=True, lags=(2,), epochs=4, steps=9),
}


def main() -> None:
    """Read the arguments, fine-tune once, and make the dumps from there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNS, action="append", help="make this one; may be repeated")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="where to (default: here)")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    policy = finetuning.finetuned(SEED, say)
    for name in arguments.only or RUNS:
        write(name, copy.deepcopy(policy), arguments.out / f"{name}.parquet")


def write(name: str, policy: model.Transformer, path: Path) -> None:
    """Run one regime and write its dump."""
    regime = RUNS[name]
    tables = []
    for batch in Trainer(policy, regime, SEED + list(RUNS).index(name)).batches():
        tables.append(to_table(columns(batch)))
        say(f"{name} step {batch.step}: {progress(batch)}")
    table = pa.concat_tables(tables, promote_options="permissive")
    write_tables([table], path, stamped(provenance(regime, policy)))


def columns(batch: Batch) -> dict[str, Any]:
    """Return a batch's columns under the names of the dump format."""
    response = batch.rollout.tokens[:, task.PROMPT :]
    return {
        "rollout_log_probs": batch.rollout.log_probs,
        "old_log_probs": batch.old,
        "current_log_probs": batch.current,
        "response_mask": batch.rollout.mask,
        "token_ids": response,
        "entropy": batch.rollout.entropy,
        "advantages": batch.advantages,
        "rewards": batch.rewards,
        "sequence_id": [f"{batch.step}-{i}" for i in range(len(response))],
        "group_id": batch.groups,
        "step": batch.step,
        "policy_lag": batch.lags,
        "tool_calls": ((response == task.encode("]")[0]) & batch.rollout.mask.bool()).sum(dim=1),
    }


def provenance(regime: Regime, policy: model.Transformer) -> dict[str, Any]:
    """Return the provenance that the dump's metadata holds."""
    size = sum(parameter.numel() for parameter in policy.parameters())
    return {
        "trainer": "GRPO, PPO clip 0.2, no correction (sample_data/trainer.py)",
        "trainer_dtype": "float32",
        "engine": "token by token with a KV cache (sample_data/rollout.py)",
        "rollout_dtype": "bfloat16, linear weights float8_e4m3fn" if regime.quantize else "bfloat16",
        "model": f"causal transformer, {size} parameters, characters as tokens",
        "temperature": 1.0,
        "top_p": 1.0,
        "logprobs": "processed",
        "regime": asdict(regime),
        "seed": SEED,
    }


def progress(batch: Batch) -> str:
    """Format one line of progress."""
    sampled = batch.rollout.mask.bool()
    delta = (batch.old - batch.rollout.log_probs).double()[sampled]
    k3 = (torch.expm1(delta) - delta).mean()
    return f"reward {batch.rewards.mean():.2f}, {len(delta)} tokens, k3 {k3:.1e}"


def say(line: str) -> None:
    """Print progress to stderr."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
