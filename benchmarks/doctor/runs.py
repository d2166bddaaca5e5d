"""Whole runs of GRPO whose engine gets its weights, or does not: responses by step, host and policy lag.

A trajectory is a model trained on text and then for `STEPS` steps of GRPO; the weights after each step are
its versions. A run samples each step's responses with an engine's weights, which are a version or what a
broken sync made of it, and scores them with the trainer's version of that step.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.doctor.hub import Hub
from benchmarks.doctor.models import Sampling, engine, learning_rate, sample, score, text_loss
from benchmarks.doctor.rollouts import PROMPT, SAMPLES, TASKS, _batch, _policy_loss, _step

STEPS = 12
"""Steps of GRPO of a trajectory."""
PROMPTS = 8
"""Prompts of a step; each has `SAMPLES` responses."""
LIMITS = (24, 96)
"""Least and greatest limit of a response, tokens."""
SEEDS = {
    "qwen3": ("words", 41),
    "llama": ("bytes", 42),
    "olmo2": ("words", 43),
    "phi": ("words", 44),
    "qwen3-moe": ("words", 45),
    "gpt-bigcode": ("bytes", 46),
    "gpt-oss": ("words", 47),
    "gemma3": ("words", 48),
    "mixtral": ("bytes", 49),
    "gpt-neox": ("words", 50),
}
"""Architecture → task and seed of its model."""
EXACT = Sampling()
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Path_:
    """A trajectory: architecture, task, seed, learning rates of its steps."""

    architecture: str
    task: str
    seed: int
    rates: tuple[float, ...] = (1.5e-4,) * STEPS
    steps: int = 220

    @property
    def name(self) -> str:
        """Name of its files."""
        key = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        return f"{self.architecture}-{self.task}-{key}"


@dataclass(frozen=True)
class Held:
    """Weights that an engine holds.

    Attributes:
        kind: "version"; or what stands in their place: "scaled" (the adapter by a factor), "head" and
            "experts" (of an older version), "shuffled" (a part of one matrix in another order), "cache" (keys
            and values of the prompt from an older version).
        version: the version.
        older: the older version, where there are two.
        factor: of "scaled".
        precision: of the engine.
    """

    version: int
    kind: str = "version"
    older: int = 0
    factor: float = 1.0
    precision: str = "bf16"


class Trajectory:
    """A trained model with its versions, and the responses that engines sampled."""

    def __init__(self, path: Path_, folder: Path) -> None:
        self.path, self.folder = path, folder / path.name
        self.task = TASKS[path.task](path.seed)

    @cached_property
    def versions(self) -> list[Weights]:
        """Weights before and after each step."""
        return self._kept("versions.pt", self._trained)

    def _kept(self, name: str, make: Any) -> Any:
        file = self.folder / name
        if not file.exists():
            made = make()
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = file.with_suffix(f".{random.Random().getrandbits(32)}")
            torch.save(made, beside)
            beside.rename(file)
        return torch.load(file, weights_only=False)

    def model(self, weights: Weights) -> Hub:
        """Return a model that holds these weights."""
        made = Hub(self.path.architecture, self.task.vocabulary)
        made.load_state_dict(weights)
        return made.requires_grad_(False).eval()

    def _trained(self) -> list[Weights]:
        torch.manual_seed(self.path.seed)
        model = Hub(self.path.architecture, self.task.vocabulary)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
        loss = torch.zeros(())
        for step in range(self.path.steps):
            optimizer.param_groups[0]["lr"] = learning_rate(step, self.path.steps)
            loss = text_loss(model, *_batch(self.task.text(24)))
            _step(model, optimizer, loss)
        print(f"{self.path.name}: {loss.item():.2f} nats a token", file=sys.stderr, flush=True)
        kept = [copy.deepcopy(model.state_dict())]
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
        for step, rate in enumerate(self.path.rates, 1):
            optimizer.param_groups[0]["lr"] = rate
            reward = self._reinforced(model, optimizer, step)
            print(f"{self.path.name}: step {step}, reward {reward:.3f}", file=sys.stderr, flush=True)
            kept.append(copy.deepcopy(model.state_dict()))
        return kept

    def _reinforced(self, model: Hub, optimizer: torch.optim.Optimizer, step: int) -> float:
        chance = torch.Generator().manual_seed(self.path.seed * 1000 + step)
        prompts = self.task.prompts(PROMPTS).repeat_interleave(SAMPLES, dim=0)
        limits = torch.full((len(prompts),), LIMITS[1])
        drawn = sample(engine(model, "bf16"), prompts, limits, EXACT, None, chance)
        rewards = self.task.rewards(prompts, drawn["tokens"])
        advantages = torch.from_numpy(normalised(rewards.numpy()))
        both = torch.cat([prompts, drawn["tokens"]], dim=1)
        for rows in torch.randperm(len(prompts), generator=chance).chunk(2):
            mask = torch.cat([torch.zeros(len(rows), PROMPT), drawn["mask"][rows]], dim=1)
            _step(model, optimizer, _policy_loss(model, both[rows], mask, advantages[rows]))
        return float(rewards.mean())

    # ------------------------------------------------------------ engines

    def held(self, how: Held) -> Weights:
        """Return the weights of an engine."""
        new, old = self.versions[how.version], self.versions[how.older]
        if how.kind == "scaled":
            return {name: old[name] + how.factor * (new[name] - old[name]) for name in new}
        if how.kind in ("head", "experts"):
            words = ("lm_head", "embed_out") if how.kind == "head" else ("expert", "mlp")
            return {name: old[name] if any(w in name for w in words) else new[name] for name in new}
        if how.kind == "shuffled":
            name = [name for name, x in new.items() if x.dim() >= 2 and ("mlp" in name or "expert" in name)][
                -1
            ]
            order = torch.randperm(new[name].shape[-1], generator=torch.Generator().manual_seed(1))
            part = order[: max(2, int(how.factor * len(order)))]
            moved = new[name].clone()
            moved[..., part] = new[name][..., part.roll(1)]
            return new | {name: moved}
        return new

    def responses(
        self, how: Held, trainer: int, batch: int, rows: int = PROMPTS * SAMPLES, hard: float = 0
    ) -> Any:
        """Return responses of an engine, scored by the trainer's version.

        Args:
            how: the engine's weights.
            trainer: the trainer's version.
            batch: number of the prompts.
            rows: responses.
            hard: how surprising the prompts are, as a quantile; 0 for any.
        """
        key = hashlib.sha256(repr((how, trainer, batch, rows, hard)).encode()).hexdigest()[:12]
        return self._kept(f"rows-{key}.pt", lambda: self._sampled(how, trainer, batch, rows, hard))

    def _sampled(self, how: Held, trainer: int, batch: int, rows: int, hard: float) -> dict[str, Any]:
        seed = int(hashlib.sha256(repr((self.path, batch)).encode()).hexdigest()[:8], 16)
        chance, self.task.chance = torch.Generator().manual_seed(seed), random.Random(seed)
        prompts = self._prompts(rows // SAMPLES, hard).repeat_interleave(SAMPLES, dim=0)
        low, high = np.log(LIMITS)
        limits = torch.exp(low + (high - low) * torch.rand(rows, generator=chance) ** 0.6).long()
        sampler: Any = engine(self.model(self.held(how)), how.precision)
        if how.kind == "cache":
            sampler = Cached(sampler, engine(self.model(self.versions[how.older]), how.precision))
        drawn = sample(sampler, prompts, limits, EXACT, None, chance)
        scored = score(self.model(self.versions[trainer]), prompts, drawn["tokens"], 1.0)
        found = {name: value.numpy() for name, value in (drawn | scored).items()}
        found["rewards"] = self.task.rewards(prompts, drawn["tokens"]).double().numpy()
        found["prompts"] = prompts.numpy()
        return found

    def _prompts(self, many: int, hard: float) -> Tensor:
        if not hard:
            return self.task.prompts(many)
        pool = self.task.prompts(8 * many)
        logits = self.model(self.versions[0])(pool[:, :-1]).log_softmax(-1)
        surprise = -logits.gather(-1, pool[:, 1:, None]).mean(dim=(1, 2))
        first = int(hard * 7 * many)
        return pool[surprise.argsort()[first : first + many]]


class Cached(torch.nn.Module):
    """An engine whose prefix cache holds the prompts' keys and values of older weights."""

    def __init__(self, new: Hub, old: Hub) -> None:
        super().__init__()
        self.new, self.old = new, old
        self.begin, self.narrowed = new.begin, new.narrowed

    def forward(self, tokens: Tensor, state: Any = None) -> Tensor:
        """Fill the cache with the old weights, but for the last token of a prompt."""
        if tokens.shape[1] > 1:
            self.old(tokens[:, :-1], state)
            tokens = tokens[:, -1:]
        made: Tensor = self.new(tokens, state)
        return made


def normalised(rewards: Any) -> Any:
    """Return advantages as GRPO makes them of the rewards of `SAMPLES` responses a prompt."""
    each = rewards.reshape(-1, SAMPLES)
    return ((each - each.mean(1, keepdims=True)) / (each.std(1, keepdims=True) + 1e-4)).reshape(-1)
