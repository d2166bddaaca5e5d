"""The trainer: GRPO with a PPO clip, fed by engines that may be stale or quantised."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import model
import rollout
import task
import torch
from torch import Tensor

CLIP = 0.2
MAX_GRADIENT = 1.0


@dataclass(frozen=True)
class Regime:
    """Settings in which runs differ."""

    learning_rate: float
    quantize: bool = False
    lags: tuple[int, ...] = (0,)  # the groups of a step take these in turn
    epochs: int = 1
    minibatches: int = 4
    warmup: int = 1  # steps over which the learning rate rises to its value
    unlogged: int = 0  # steps before the first one that is handed out
    steps: int = 8
    groups: int = 8
    samples: int = 8


class Batch(NamedTuple):
    """One step's S samples, group after group, with the trainer's columns."""

    step: int
    rollout: rollout.Rollout
    rewards: Tensor  # [S]
    advantages: Tensor  # [S]
    old: Tensor  # [S, L] nats, at the start of the step
    current: Tensor  # [S, L] nats, when the sequence was last about to be trained on
    lags: Tensor  # [S] steps of training between the weights that sampled and `old`
    groups: Tensor  # [S] number of the prompt within the run


class Trainer:
    """Trainer with its policy, its optimizer and engines made from its past weights."""

    def __init__(self, policy: model.Transformer, regime: Regime, seed: int) -> None:
        self.policy, self.regime = policy, regime
        self.engines: list[model.Transformer] = []  # newest first
        self.optimizer = torch.optim.Adam(policy.parameters())
        self.chance, self.torch_chance = random.Random(seed), torch.Generator().manual_seed(seed)

    def batches(self) -> Iterator[Batch]:
        """Run the loop and yield its steps, each after its updates."""
        regime = self.regime
        for step in range(regime.unlogged + regime.steps):
            newest = model.engine(self.policy, regime.quantize)
            self.engines = [newest, *self.engines][: max(regime.lags) + 1]
            batch = self.collect(step)
            self.optimizer.param_groups[0]["lr"] = regime.learning_rate * min(1.0, (step + 1) / regime.warmup)
            self.update(batch)
            if step >= regime.unlogged:
                yield batch

    def collect(self, step: int) -> Batch:
        """Sample the groups of one step, score them and recompute their log-probs."""
        regime = self.regime
        lags = [min(lag, len(self.engines) - 1) for lag in regime.lags]
        problems = [task.problem(self.chance) for _ in range(regime.groups)]
        share = regime.groups // len(lags)
        parts = [self.sample(lag, problems[i * share : (i + 1) * share]) for i, lag in enumerate(lags)]
        samples = rollout.Rollout(*(torch.cat(column) for column in zip(*parts, strict=True)))
        rewards = scores([p for p in problems for _ in range(regime.samples)], samples.tokens)
        with torch.no_grad():
            old = model.sampled_log_probs(self.policy, samples.tokens, task.PROMPT)
        groups = (step * regime.groups + torch.arange(regime.groups)).repeat_interleave(regime.samples)
        lag_column = torch.tensor(lags).repeat_interleave(share * regime.samples)
        advantages = group_advantages(rewards, regime.samples)
        return Batch(step, samples, rewards, advantages, old, old.clone(), lag_column, groups)

    def sample(self, lag: int, problems: list[task.Problem]) -> rollout.Rollout:
        """Draw several samples for each problem from the weights of `lag` steps ago."""
        prompts = torch.tensor([task.encode(p.prompt) for p in problems])
        return rollout.sample(
            self.engines[lag], prompts.repeat_interleave(self.regime.samples, dim=0), self.torch_chance
        )

    def update(self, batch: Batch) -> None:
        """Do several epochs of minibatches; overwrites `batch.current` as each sequence comes up."""
        sequences = len(batch.rewards)
        for _ in range(self.regime.epochs):
            order = torch.randperm(sequences, generator=self.torch_chance)
            for chosen in order.chunk(self.regime.minibatches):
                log_probs = model.sampled_log_probs(self.policy, batch.rollout.tokens[chosen], task.PROMPT)
                batch.current[chosen] = log_probs.detach()
                loss = clipped_loss(log_probs, batch, chosen)
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), MAX_GRADIENT)
                self.optimizer.step()


def scores(problems: list[task.Problem], tokens: Tensor) -> Tensor:
    """Return the rewards [S] of `tokens` [S, prompt + L], one problem for each sequence."""
    texts = [task.decode(row) for row in tokens[:, task.PROMPT :].tolist()]
    return torch.tensor([task.reward(p, text) for p, text in zip(problems, texts, strict=True)])


def group_advantages(rewards: Tensor, samples: int) -> Tensor:
    """Normalise rewards [S] within their group, to mean 0 and standard deviation 1; 0 where all agree."""
    grouped = rewards.view(-1, samples)
    centred = grouped - grouped.mean(dim=1, keepdim=True)
    return (centred / (grouped.std(dim=1, keepdim=True) + 1e-6)).flatten()


def clipped_loss(log_probs: Tensor, batch: Batch, chosen: Tensor) -> Tensor:
    """Compute PPO's clipped loss, a mean over tokens. `log_probs` [s, L] of `chosen` sequences [s], nats."""
    advantages, mask = batch.advantages[chosen, None], batch.rollout.mask[chosen]
    ratio = ((log_probs - batch.old[chosen]) * mask).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * mask).sum() / mask.sum()
