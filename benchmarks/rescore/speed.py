"""Tokens a second and memory of scoring, by turns with plain loops and TRL's `selective_log_softmax`.

python -m benchmarks.rescore.speed [--rounds N] [--tokens N]

Every turn of every contestant is a process of its own; the best of its turns counts, as others use the
machine too. Time is that of the processor beside the wall's; memory is the peak of the process above what the
model and one short response needed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from offpol_diag.rescore.score import Row, score

VOCABULARIES = {"32k": 32_000, "150k": 150_000}
SIZE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8}


def model(vocabulary: int) -> Any:
    """Return a Llama with random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    given = LlamaConfig(vocab_size=vocabulary, num_key_value_heads=4, tie_word_embeddings=True, **SIZE)
    return LlamaForCausalLM(given).eval()


def rows(tokens: int, vocabulary: int) -> list[Row]:
    """Return responses of 20 to 400 tokens behind prompts of 10 to 100, together about so many tokens."""
    rng, found, many = np.random.default_rng(1), list[Row](), 0
    while many < tokens:
        prompt, response = int(rng.integers(10, 100)), int(np.exp(rng.uniform(3, 6)))
        found.append(Row(rng.integers(0, vocabulary, prompt + response), prompt))
        many += prompt + response
    return found


def plain(made: Any, given: Sequence[Row], batch: int, take: Callable[[Any, Any], Any]) -> None:
    """Score right-padded batches in the order of the dump, with logits of every token."""
    for begin in range(0, len(given), batch):
        some = given[begin : begin + batch]
        ids = torch.zeros(len(some), max(len(row.ids) for row in some), dtype=torch.long)
        for at, row in enumerate(some):
            ids[at, : len(row.ids)] = torch.from_numpy(row.ids)
        logits = made(input_ids=ids).logits[:, :-1]
        take(logits, ids[:, 1:])


def log_softmax(logits: Any, wanted: Any) -> Any:
    """Take the log-prob of each token from a log-softmax."""
    return logits.float().log_softmax(-1).gather(2, wanted[..., None])


def of_trl(logits: Any, wanted: Any) -> Any:
    """Take the log-prob of each token as TRL does."""
    from trl.trainer.utils import selective_log_softmax

    return selective_log_softmax(logits, wanted)


CONTESTANTS: dict[str, Callable[[Any, Sequence[Row]], Any]] = {
    "rescore": lambda made, given: score(made, given),
    "plain, batch 1": lambda made, given: plain(made, given, 1, log_softmax),
    "plain, batch 8": lambda made, given: plain(made, given, 8, log_softmax),
    "TRL, batch 8": lambda made, given: plain(made, given, 8, of_trl),
}


def peak() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def turn(name: str, vocabulary: int, tokens: int) -> dict[str, float]:
    """Run one contestant in this process."""
    torch.set_num_threads(1)
    made, given = model(vocabulary), rows(tokens, vocabulary)
    with torch.inference_mode():
        CONTESTANTS[name](made, [Row(given[0].ids[:16], 8)])
        before, begun, used = peak(), time.perf_counter(), time.process_time()
        CONTESTANTS[name](made, given)
    took, used = time.perf_counter() - begun, time.process_time() - used
    tokens = sum(len(row.ids) for row in given)
    return {"wall": tokens / took, "speed": tokens / used, "memory": peak() - before}


def main() -> None:
    """Let all take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--turn", nargs=2)
    asked = parser.parse_args()
    if asked.turn:
        name, vocabulary = asked.turn
        print(json.dumps(turn(name, VOCABULARIES[vocabulary], asked.tokens)))
        return
    for size in VOCABULARIES:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
        for _ in range(asked.rounds):
            for name in CONTESTANTS:
                words = [sys.executable, "-m", "benchmarks.rescore.speed", "--turn", name, size]
                words += ["--tokens", str(asked.tokens)]
                ran = subprocess.run(words, capture_output=True, text=True, check=True)
                found[name].append(json.loads(ran.stdout.splitlines()[-1]))
        for name, turns in found.items():
            best, wall, most = (max(one[key] for one in turns) for key in ("speed", "wall", "memory"))
            print(
                f"V {size:5} {name:16} {best:8,.0f} tokens/s of processor {wall:8,.0f} of the wall "
                f"{most:8,.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    main()
