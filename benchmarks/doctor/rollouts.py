"""Trained models, their reinforcement steps, and responses that engines sample; kept in a cache folder."""

from __future__ import annotations

import copy
import hashlib
import random
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "sample_data"))

import rollout as calculator
import task as sums

from benchmarks.doctor.models import (
    Kernel,
    Model,
    Sampling,
    Shape,
    build,
    engine,
    learning_rate,
    sample,
    score,
    text_loss,
)

VERSIONS = 9
"""Stored versions of each model's weights: as pretrained, and after each of 8 reinforcement steps."""
SAMPLES = 8
"""Responses to each prompt."""
PROMPT = 24
Array = np.ndarray[Any, np.dtype[Any]]


class Sums:
    """Task of sums in words with a calculator (`sample_data/task.py`)."""

    vocabulary = len(sums.CHARACTERS)

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.asked: dict[tuple[int, ...], sums.Problem] = {}

    def text(self, rows: int) -> list[list[int]]:
        """Draw worked examples."""
        given = [sums.problem(self.chance) for _ in range(rows)]
        return [sums.encode(one.prompt + sums.solution(one, self.chance)) for one in given]

    def prompts(self, rows: int) -> Tensor:
        """Draw questions, [rows, PROMPT]."""
        given = [sums.problem(self.chance) for _ in range(rows)]
        self.asked |= {tuple(sums.encode(one.prompt)): one for one in given}
        return torch.tensor([sums.encode(one.prompt) for one in given])

    def tool(self, rows: int, inserts: bool) -> Any:
        """Return the calculator, which is always there."""
        return calculator.Calculator(rows)

    def rewards(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Return 1 for a right answer, and the share of digits."""
        pairs = zip(prompts.tolist(), tokens.tolist(), strict=True)
        right = torch.tensor([sums.reward(self.asked[tuple(p)], sums.decode(t)) for p, t in pairs])
        return right + ((tokens >= 2) & (tokens < 12)).float().mean(dim=1)


@cache
def corpus() -> list[bytes]:
    """Load top-level pieces of the standard library's source, ASCII only; byte 0 ends each."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    pieces = [one for file in files for one in file.read_bytes().split(b"\n\n\n")]
    return [one + b"\0" for one in pieces if len(one) > 100 and one.isascii() and b"\0" not in one]


class Bytes:
    """Task of continuing Python source, byte by byte; the reward is the share of lower-case letters."""

    vocabulary = 128

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def text(self, rows: int) -> list[list[int]]:
        """Draw pieces of source, from a random place near the start on."""
        found = []
        for one in self._pieces(rows):
            start = self.chance.randrange(max(1, len(one) - 100))
            found.append(list(one[start : start + 192]))
        return found

    def prompts(self, rows: int) -> Tensor:
        """Draw the first tokens of pieces, [rows, PROMPT]."""
        return torch.tensor([list(one[:PROMPT]) for one in self._pieces(rows)])

    def tool(self, rows: int, inserts: bool) -> Any:
        """Return a tool that inserts text now and then, or None."""
        return Inserter(rows, self.chance) if inserts else None

    def rewards(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Return the share of lower-case letters."""
        return ((tokens >= 97) & (tokens < 123)).float().mean(dim=1)

    def _pieces(self, rows: int) -> list[Any]:
        return self.chance.choices(corpus(), k=rows)


@cache
def words() -> tuple[list[list[int]], int]:
    """Return the corpus in tokens of one or more bytes, and the vocabulary's size; a byte is its own id."""
    pattern = re.compile(rb" ?\w+| {2,}|\n +|[^\w\s]+")
    counts = Counter(word for text in corpus() for word in pattern.findall(text) if len(word) > 1)
    often = sorted(counts, key=lambda word: (-counts[word] * (len(word) - 1), word))[:384]
    ids = {word: 128 + i for i, word in enumerate(often)}
    longest = re.compile(b"|".join(map(re.escape, sorted(often, key=len, reverse=True))) + b"|.", re.DOTALL)
    encoded = ([ids.get(one, one[0]) for one in longest.findall(text)] for text in corpus())
    return [one for one in encoded if len(one) > 2 * PROMPT], 128 + len(often)


class Words(Bytes):
    """Task of continuing Python source in tokens of several bytes; the reward is the share of long ones."""

    @cached_property
    def vocabulary(self) -> int:  # type: ignore[override]
        """Size of the vocabulary."""
        return words()[1]

    def rewards(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Return the share of tokens of more than one byte."""
        return (tokens >= 128).float().mean(dim=1)

    def _pieces(self, rows: int) -> list[Any]:
        return self.chance.choices(words()[0], k=rows)


class Inserter:
    """Tool that inserts pieces of other text into a response, like a tool's answers."""

    def __init__(self, rows: int, chance: random.Random) -> None:
        self.chance, self.waiting = chance, [b""] * rows

    def silent(self) -> Tensor:
        """Sequences whose next token is the engine's own, [S] bool."""
        return torch.tensor([not one for one in self.waiting])

    def inserted(self) -> Tensor:
        """Return the next token to insert, [S]."""
        return torch.tensor([one[0] if one else 0 for one in self.waiting])

    def append(self, tokens: Tensor) -> None:
        """Take in one token for each sequence, [S]."""
        for i, one in enumerate(self.waiting):
            self.waiting[i] = one[1:] or (self._answer() if not one and self.chance.random() < 0.02 else b"")

    def _answer(self) -> bytes:
        return self.chance.choice(corpus())[: self.chance.randint(3, 20)]


TASKS = {"sums": Sums, "bytes": Bytes, "words": Words}


EXACT = Sampling()


@dataclass(frozen=True)
class Base:
    """Settings by which a set of responses is sampled and scored, before any fault.

    Attributes:
        precision: of the engine.
        how: of sampling.
        pairs: versions of the trainer's and the engine's weights, one pair for each step.
        rows: sequences.
        lengths: least and greatest limit of a response.
        inserts: whether something inserts text into the responses of a task without a calculator.
        kernel: fault of the engine's kernel, positions counted from the first response token.
    """

    precision: str = "bf16"
    how: Sampling = EXACT
    pairs: tuple[tuple[int, int], ...] = ((0, 0),)
    rows: int = 512
    lengths: tuple[int, int] = (16, 160)
    inserts: bool = False
    kernel: Kernel | None = None


@dataclass
class Rows:
    """S responses in padded columns [S, L], with their numbers per response."""

    prompts: Array
    tokens: Array
    mask: Array
    q: Array
    q_raw: Array
    p: Array
    p_full: Array
    p_raw: Array
    entropy: Array
    entropy_raw: Array
    ends: Array
    group: Array
    lag: Array
    trainer: Array
    temperature: float = 1.0

    def arrays(self) -> dict[str, Array]:
        """Return the columns that have one row for each response."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "temperature"}

    def take(self, rows: Array) -> Rows:
        """Copy some of the responses."""
        return Rows(
            **{name: value[rows] for name, value in self.arrays().items()}, temperature=self.temperature
        )

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Rows:
        """Concatenate responses, padded to the longest."""
        parts = list(parts)
        some = [one.arrays() for one in parts]
        longest = max(one["tokens"].shape[1] for one in some)
        return Rows(
            **{name: np.concatenate([_padded(one[name], name, longest) for one in some]) for name in some[0]},
            temperature=parts[0].temperature,
        )

    @property
    def sampled(self) -> Array:
        """Tokens that count, [S, L] bool."""
        return self.mask.astype(bool)


def _padded(value: Array, name: str, longest: int) -> Array:
    if value.ndim == 1 or name == "prompts":
        return value
    return np.pad(value, ((0, 0), (0, longest - value.shape[1])))


class World:
    """A trained model with its versions, and the responses sampled from them."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape, self.folder = shape, folder / shape.name
        self.task = TASKS[shape.task](shape.seed)

    @cached_property
    def weights(self) -> list[dict[str, Tensor]]:
        """Weights of every version."""
        return self._kept("weights", repr(self.shape), self._trained)

    @cache  # noqa: B019
    def version(self, number: int) -> Model:
        """Return the trainer's model."""
        model = build(self.shape, self.task.vocabulary)
        model.load_state_dict(self.weights[number])
        return model.requires_grad_(False).eval()

    def rows(self, base: Base) -> Rows:
        """Return the responses sampled from a base."""
        return self._kept("rows", repr((self.shape, base)), lambda: self._sampled(base))

    def _kept(self, kind: str, key: str, make: Any) -> Any:
        path = self.folder / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.pt"
        if not path.exists():
            made = make()
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = path.with_suffix(f".{random.Random().getrandbits(32)}")
            torch.save(made, beside)
            beside.rename(path)
        return torch.load(path, weights_only=False)

    def _trained(self) -> list[dict[str, Tensor]]:
        model = build(self.shape, self.task.vocabulary)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
        loss = torch.zeros(())
        for step in range(self.shape.steps):
            optimizer.param_groups[0]["lr"] = learning_rate(step, self.shape.steps)
            loss = text_loss(model, *_batch(self.task.text(24)))
            _step(model, optimizer, loss)
        print(f"{self.shape.name}: {loss.item():.2f} nats a token", file=sys.stderr, flush=True)
        kept = [copy.deepcopy(model.state_dict())]
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
        for step in range(1, VERSIONS):
            reward = self._reinforce(model, optimizer, step)
            print(f"{self.shape.name}: step {step}, reward {reward:.2f}", file=sys.stderr, flush=True)
            kept.append(copy.deepcopy(model.state_dict()))
        return kept

    def _reinforce(self, model: Model, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Do one GRPO step of two minibatches."""
        prompts = self.task.prompts(8).repeat_interleave(SAMPLES, dim=0)
        chance = torch.Generator().manual_seed(self.shape.seed * 100 + step)
        drawn = sample(
            engine(model, "bf16"),
            prompts,
            torch.full((64,), 96),
            Sampling(),
            self.task.tool(64, False),
            chance,
        )
        rewards = self.task.rewards(prompts, drawn["tokens"]).view(-1, SAMPLES)
        advantages = (
            (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        ).flatten()
        both = torch.cat([prompts, drawn["tokens"]], dim=1)
        for rows in torch.randperm(64, generator=chance).chunk(2):
            mask = torch.cat([torch.zeros(len(rows), PROMPT), drawn["mask"][rows]], dim=1)
            _step(model, optimizer, _policy_loss(model, both[rows], mask, advantages[rows]))
        return float(rewards.mean())

    def _sampled(self, base: Base) -> Rows:
        many = base.rows // len(base.pairs) // SAMPLES * SAMPLES
        return Rows.joined(self._part(base, i, many) for i in range(len(base.pairs)))

    def _part(self, base: Base, i: int, many: int) -> Rows:
        """Sample the responses of one step."""
        trainer, old = base.pairs[i]
        seed = int(hashlib.sha256(repr((self.shape, base, i)).encode()).hexdigest()[:8], 16)
        chance, self.task.chance = torch.Generator().manual_seed(seed), random.Random(seed)
        prompts = self.task.prompts(many // SAMPLES).repeat_interleave(SAMPLES, dim=0)
        low, high = np.log(base.lengths)
        limits = torch.exp(low + (high - low) * torch.rand(many, generator=chance) ** 0.6).long()
        kernel = base.kernel and (base.kernel[0], base.kernel[1] + PROMPT, base.kernel[2])
        sampler = engine(self.version(old), base.precision, kernel)
        drawn = sample(sampler, prompts, limits, base.how, self.task.tool(many, base.inserts), chance)
        scored = score(
            self.version(trainer), prompts, drawn["tokens"], base.how.temperature, drawn.pop("kept", None)
        )
        found = {name: value.numpy() for name, value in (drawn | scored | {"prompts": prompts}).items()}
        found["mask"] = found["mask"].astype(np.int8)
        found["group"] = i * many + np.arange(many) // SAMPLES
        labels = {"lag": trainer - old, "trainer": trainer}
        found |= {name: np.full(many, value) for name, value in labels.items()}
        return Rows(**found, temperature=base.how.temperature)

    def scored(
        self, rows: Rows, which: Array, prompts: Array, tokens: Array, model: Model | None = None
    ) -> Array:
        """Score `which` [S] with other tokens, prompts or another model, [S, L]; the rest is `rows.p`."""
        found = rows.p.copy()
        for version in np.unique(rows.trainer[which]):
            some = np.flatnonzero(which & (rows.trainer == version))
            given = torch.from_numpy(prompts[some]), torch.from_numpy(tokens[some])
            found[some] = score(model or self.version(int(version)), *given, rows.temperature)["p"].numpy()
        return found


def _batch(texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Pad texts with 0 to [S, n], with a mask that is 1 up to their ends."""
    longest = max(map(len, texts))
    tokens = torch.tensor([one + [0] * (longest - len(one)) for one in texts])
    return tokens, (torch.arange(longest) < torch.tensor([[len(one)] for one in texts])).float()


def _policy_loss(model: Model, tokens: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    log_p = torch.log_softmax(model(tokens[:, :-1]), dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return -(log_p * mask[:, 1:] * advantages[:, None]).sum() / mask.sum()


def _step(model: Model, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
