"""Supervised fine-tuning on worked examples, from which every run starts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import model
import task
import torch
from torch import Tensor

STEPS = 1000
BATCH = 32
PEAK = 4e-3  # learning rate
WARMUP = 50


def finetuned(seed: int, say: Callable[[str], None]) -> model.Transformer:
    """Train a model from scratch and return it; `say` is called with its progress."""
    torch.manual_seed(seed)
    policy = model.Transformer(len(task.CHARACTERS))
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    for step, texts in zip(range(STEPS), batches(random.Random(seed)), strict=False):
        optimizer.param_groups[0]["lr"] = PEAK * min(1.0, (step + 1) / WARMUP) * (1 - step / STEPS)
        loss = text_loss(policy, texts)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            say(f"fine-tuning step {step + 1}: {loss.item():.3f} nats per character")
    return policy


def batches(chance: random.Random) -> Iterator[list[str]]:
    """Draw batches of worked examples of about equal length, so that little is padding."""
    while True:
        texts = sorted((example(chance) for _ in range(4 * BATCH)), key=len)
        cuts = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
        chance.shuffle(cuts)
        yield from cuts


def example(chance: random.Random) -> str:
    """Draw a prompt and its solution."""
    given = task.problem(chance)
    return given.prompt + task.solution(given, chance)


def text_loss(policy: model.Transformer, texts: list[str]) -> Tensor:
    """Compute the mean negative log-likelihood of the solutions, nats per character."""
    longest = max(map(len, texts))
    tokens = torch.tensor([task.encode(text.ljust(longest, task.END)) for text in texts])
    ends = torch.tensor([len(text) - task.PROMPT for text in texts])
    log_probs = model.sampled_log_probs(policy, tokens, task.PROMPT)
    mask = torch.arange(log_probs.shape[1]) < ends[:, None]
    return -(log_probs * mask).sum() / mask.sum()
