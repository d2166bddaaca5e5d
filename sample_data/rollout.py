"""The engine: sampling token by token with a key-value cache and a calculator that answers calls."""

from __future__ import annotations

from typing import NamedTuple

import model
import task
import torch
import torch.nn.functional as F
from torch import Tensor

LENGTH = 256  # response tokens at most


class Rollout(NamedTuple):
    """Responses of the engine, [S, L = `LENGTH`], with 0.0 and mask 0 where it did not sample."""

    tokens: Tensor  # [S, prompt + L]
    log_probs: Tensor
    entropy: Tensor
    mask: Tensor


@torch.no_grad()
def sample(engine: model.Transformer, prompts: Tensor, chance: torch.Generator) -> Rollout:
    """Sample at temperature 1 and top-p 1, token by token, until every sequence has ended. `prompts` [S, P].

    The probabilities that are logged are the very numbers that are drawn from.
    """
    rows = len(prompts)
    cache = model.Cache(rows, task.PROMPT + LENGTH, engine.embed.weight.dtype)
    calculator = Calculator(rows)
    columns: list[tuple[Tensor, ...]] = []
    fresh, zero = prompts, torch.zeros(())
    while len(columns) < LENGTH and not calculator.ended.all():
        log_p = torch.log_softmax(engine(fresh, cache)[:, -1].float(), dim=-1)
        p = log_p.exp()
        drawn = torch.multinomial(p, 1, generator=chance).squeeze(1)
        own = calculator.silent()
        token = torch.where(own, drawn, calculator.inserted())
        calculator.append(token)
        chosen = log_p.gather(1, token[:, None]).squeeze(1)
        entropy = -(p * log_p).sum(dim=1)
        columns.append((token, chosen.where(own, zero), entropy.where(own, zero), own.int()))
        fresh = token[:, None]
    stacked = [torch.stack(column, dim=1) for column in zip(*columns, strict=True)]
    tokens, *logged = (F.pad(s, (0, LENGTH - s.shape[1])) for s in stacked)
    return Rollout(torch.cat([prompts, tokens], dim=1), *logged)


class Calculator:
    """Calculator beside the engine: the text of each sequence, and the tokens to insert into it next."""

    def __init__(self, rows: int) -> None:
        self.texts = [""] * rows
        self.waiting = [""] * rows
        self.ended = torch.zeros(rows, dtype=torch.bool)

    def silent(self) -> Tensor:
        """Sequences whose next token is the engine's own, [S] bool."""
        return torch.tensor([not w for w in self.waiting]) & ~self.ended

    def inserted(self) -> Tensor:
        """Return the next token to insert, [S]; `END` where there is none."""
        return torch.tensor([task.encode(w[:1] or task.END)[0] for w in self.waiting])

    def append(self, tokens: Tensor) -> None:
        """Append one token to each sequence, [S], and answer the calls that it completes."""
        for i, character in enumerate(task.decode(tokens.tolist())):
            if self.ended[i]:
                continue
            self.texts[i] += character
            self.waiting[i] = task.tool(self.texts[i]) if character == "]" else self.waiting[i][1:]
            self.ended[i] = character == task.END
