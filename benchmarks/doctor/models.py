"""Small causal language models: one forward for the trainer, one with a state for the engine that samples."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kernel = tuple[str, int, float]
"""A fault of an engine's kernel: its kind, the position from which it acts, and its size."""


@dataclass(frozen=True)
class Shape:
    """A model: its kind, task, size and seed.

    Attributes:
        name: what dumps call it.
        task: what it is trained on, "sums", "bytes" or "words".
        width: of the hidden state.
        layers: how many blocks.
        seed: of its weights and its training.
        gru: recurrent instead of attention.
        retention: linear attention that decays instead of a softmax.
        heads: of the queries.
        kv_heads: of keys and values.
        modern: norms of queries and keys, SwiGLU, embeddings tied to the output layer.
        experts: feed-forward layers to route between; 0 is one without a router.
        top: experts of one token.
        steps: of training.
    """

    name: str
    task: str
    width: int
    layers: int
    seed: int
    gru: bool = False
    retention: bool = False
    heads: int = 4
    kv_heads: int = 4
    modern: bool = False
    experts: int = 0
    top: int = 1
    steps: int = 300

    @property
    def family(self) -> str:
        """Name of this kind of model in tables."""
        kind = (
            "GRU"
            if self.gru
            else "retention"
            if self.retention
            else "MoE"
            if self.experts
            else "Qwen-like"
            if self.modern
            else "transformer"
        )
        return f"{kind}, {self.task}"


class Model(nn.Module):
    """A causal language model: tokens in, logits out; tokens continue the text of a `state` from `begin`."""

    kernel: Kernel | None = None

    def begin(self, rows: int, positions: int) -> Any:
        """Return an empty state for `many` sequences."""
        raise NotImplementedError

    def narrowed(self, state: Any, rows: Tensor) -> Any:
        """Return the state of some of its sequences."""
        return {name: one if name == "length" else one[:, :, rows] for name, one in state.items()}

    def forward(self, tokens: Tensor, state: Any = None) -> Tensor:
        """Return the logits [S, n, V] after each of `tokens` [S, n]."""
        raise NotImplementedError


class Experts(nn.Module):
    """Feed-forward layers with a router that sends each token to `top` of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        n, width, hidden = shape.experts, shape.width, 2 * shape.width
        self.top = shape.top
        self.router = nn.Linear(width, n, bias=False)
        self.up = nn.Parameter(torch.randn(n, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(n, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [S, n, width]; the router rounds as the model's own dtype does."""
        chosen = self.router(x).topk(self.top, dim=-1)
        gates = torch.zeros(*x.shape[:-1], self.router.out_features, dtype=x.dtype)
        gates = gates.scatter(
            -1, chosen.indices, chosen.values.softmax(-1) if self.top > 1 else 2 * chosen.values.sigmoid()
        )
        out = torch.zeros_like(x)
        for e in range(self.router.out_features):
            out = out + gates[..., e : e + 1] * (F.silu(x @ self.up[e]) @ self.down[e])
        return out


class FeedForward(nn.Module):
    """One feed-forward layer, gated or not."""

    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        hidden = (8 * width // 3) if gated else 4 * width
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Apply SwiGLU or GELU."""
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(hidden)
        return out


class Block(nn.Module):
    """Attention with rotary positions and grouped queries, then a feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = shape.heads, shape.kv_heads, shape.width // shape.heads
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, (self.heads + 2 * self.kv_heads) * self.size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(self.size) for _ in "qk") if shape.modern else None
        self.mlp = Experts(shape) if shape.experts else FeedForward(shape.width, shape.modern)

    def forward(self, x: Tensor, cache: Tensor | None, start: int, kernel: Kernel | None) -> Tensor:
        """`x` [S, n, width]; `cache` [2, S, kv heads, positions, size]."""
        counts = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (-1, self.size)).transpose(1, 2).split(counts, dim=1)
        if self.norms is not None:
            q, k = self.norms[0](q), self.norms[1](k)
        places = positions(start, x.shape[1], kernel)
        q, k = rotate(q, places), rotate(k, places)
        groups = self.heads // self.kv_heads
        if cache is None:
            k, v = (one.repeat_interleave(groups, dim=1) for one in (k, v))
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            end = start + x.shape[1]
            cache[0, :, :, start:end], cache[1, :, :, start:end] = k, v
            k, v = cache[:, :, :, :end]
            q = q.reshape(len(q), self.kv_heads, -1, self.size)  # queries of one key head below each other
            scores = (q @ k.transpose(-1, -2) / self.size**0.5).float()
            unseen = hidden(start, end, kernel).repeat(groups, 1)
            seen = scores.masked_fill(unseen, -torch.inf).softmax(-1).to(q.dtype) @ v
            seen = seen.reshape(len(q), self.heads, -1, self.size)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class Retention(nn.Module):
    """Linear attention that decays by position (RetNet), then a feed-forward layer.

    The trainer computes it as a masked product of all positions, the engine token by token from a state.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.size = shape.heads, shape.width // shape.heads
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.gate, self.out = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        self.norm = nn.RMSNorm(self.size)
        self.mlp = FeedForward(shape.width, shape.modern)
        self.decay = (1 - torch.exp2(-2.0 - 1.5 * torch.arange(self.heads))).tolist()

    def forward(self, x: Tensor, state: Tensor | None, start: int, kernel: Kernel | None) -> Tensor:
        """`x` [S, n, width]; `state` [1, S, heads, size, size], changed in place."""
        given = self.before(x)
        q, k, v = self.qkv(given).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
        places = positions(start, x.shape[1], kernel)
        q, k = rotate(q, places), rotate(k, places) / self.size**0.5
        decay = torch.tensor(self.decay, dtype=torch.float32)[:, None, None]
        at = torch.arange(x.shape[1])
        if state is None:
            past = decay ** (at[:, None] - at).clamp(min=0) * (at[:, None] >= at)
            seen = (q @ k.transpose(-1, -2) * past.to(q.dtype)) @ v
        else:
            seen = torch.empty_like(v)
            for i in range(x.shape[1]):
                added = k[:, :, i, :, None].float() * v[:, :, i, None, :].float()
                state.mul_(decay).add_(added)
                seen[:, :, i] = (q[:, :, i, None] @ state[0].to(q.dtype)).squeeze(2)
        mixed = self.norm(seen).transpose(1, 2).flatten(2)
        x = x + self.out(F.silu(self.gate(given)) * mixed)
        return x + self.mlp(self.between(x))


class Transformer(Model):
    """Blocks between an embedding and an output layer."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(vocabulary, shape.width)
        block = Retention if shape.retention else Block
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        if shape.modern:
            nn.init.normal_(self.embed.weight, std=shape.width**-0.5)
            self.head.weight = self.embed.weight

    def begin(self, rows: int, positions: int) -> Any:
        """Return empty keys and values of every layer, or a state, and the number of positions held."""
        block = self.blocks[0]
        if self.shape.retention:
            held = torch.zeros(len(self.blocks), 1, rows, block.heads, block.size, block.size)
            return {"cache": held, "length": 0}
        size = (len(self.blocks), 2, rows, block.kv_heads, positions, block.size)
        return {"cache": torch.zeros(size, dtype=self.embed.weight.dtype), "length": 0}

    def forward(self, tokens: Tensor, state: Any = None) -> Tensor:
        """See `Model`."""
        start = state["length"] if state else 0
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, state["cache"][i] if state else None, start, self.kernel)
        if state:
            state["length"] += tokens.shape[1]
        logits: Tensor = self.head(self.norm(x))
        return logits


class Recurrent(Model):
    """A GRU; the engine computes its gates with its own kernel, step by step."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(vocabulary, shape.width)
        self.gru = nn.GRU(shape.width, shape.width, shape.layers, batch_first=True)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)

    def begin(self, rows: int, positions: int) -> Any:
        """Return the hidden state of every layer."""
        size = (self.gru.num_layers, 1, rows, self.gru.hidden_size)
        hidden = torch.zeros(size, dtype=self.embed.weight.dtype)
        return {"hidden": hidden, "length": 0}

    def forward(self, tokens: Tensor, state: Any = None) -> Tensor:
        """See `Model`."""
        x = self.embed(tokens)
        if state is None:
            out = self.gru(x)[0]
        else:
            out = torch.stack([self._step(x[:, i], state) for i in range(x.shape[1])], dim=1)
        logits: Tensor = self.head(out)
        return logits

    def _step(self, x: Tensor, state: Any) -> Tensor:
        if self.kernel and state["length"] >= self.kernel[1]:
            if self.kernel[0] == "reset" and state["length"] == self.kernel[1]:
                state["hidden"].zero_()
            elif self.kernel[0] == "decay":
                state["hidden"].mul_(self.kernel[2])
        for i in range(self.gru.num_layers):
            w, u, b, c = self.gru.all_weights[i]
            h = state["hidden"][i, 0]
            (xr, xz, xn), (hr, hz, hn) = (F.linear(x, w, b)).chunk(3, -1), F.linear(h, u, c).chunk(3, -1)
            z = torch.sigmoid(xz + hz)
            x = (1 - z) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn) + z * h
            state["hidden"][i, 0] = x
        state["length"] += 1
        return x


def positions(start: int, many: int, kernel: Kernel | None) -> Tensor:
    """Return rotary positions of the new tokens; the fault "stretch" has them wrong from a position on."""
    places = torch.arange(start, start + many, dtype=torch.float32)
    if kernel and kernel[0] == "stretch":
        places = torch.where(places >= kernel[1], kernel[1] + (places - kernel[1]) * kernel[2], places)
    return places


def hidden(start: int, end: int, kernel: Kernel | None) -> Tensor:
    """Return which keys [n, end] the new tokens cannot see; the fault "window" hides early ones."""
    at, key = torch.arange(start, end)[:, None], torch.arange(end)
    future = key > at
    if kernel and kernel[0] == "window":
        future = future | ((at >= kernel[1]) & (key <= at - kernel[2]))
    return future


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Apply rotary positions, in float32. `x` [S, heads, n, d]."""
    half = x.shape[-1] // 2
    angle = places[:, None] * 1000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1).to(
        x.dtype
    )


def build(shape: Shape, vocabulary: int) -> Model:
    """Build an untrained model."""
    torch.manual_seed(shape.seed)
    return (Recurrent if shape.gru else Transformer)(shape, vocabulary)


STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEVELS = {"int8": 127, "int4": 7}


def engine(model: Model, precision: str, kernel: Kernel | None = None) -> Model:
    """Copy the weights as an inference engine holds them; it computes fp8, int8 and int4 weights in bf16."""
    copied = copy.deepcopy(model).requires_grad_(False).eval()
    copied.kernel = kernel
    if precision not in STORED:
        for name, weight in copied.named_parameters():
            if weight.dim() >= 2 and not name.startswith(("embed", "head")):
                weight.copy_(quantised(weight, precision))
    return copied.to(STORED.get(precision, torch.bfloat16))


def quantised(weight: Tensor, precision: str) -> Tensor:
    """Round through fp8 (e4m3) or integers and back, one scale per output channel."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp_min(1e-8)
    if precision == "fp8":
        return (weight / scale * 448).to(torch.float8_e4m3fn).to(weight.dtype) * scale / 448
    return (weight / scale * LEVELS[precision]).round() * scale / LEVELS[precision]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of the engine."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def kept(self, log_p: Tensor) -> Tensor | None:
        """Return the tokens that may be drawn, [..., V]; None for all."""
        if self.top_p == 1 and not self.top_k:
            return None
        value, order = log_p.sort(dim=-1, descending=True)
        before = value.exp().cumsum(-1) - value.exp()
        keep = before < self.top_p
        if self.top_k:
            keep[..., self.top_k :] = False
        return torch.zeros_like(keep).scatter(-1, order, keep)


@torch.no_grad()
def sample(
    model: Model, prompts: Tensor, limits: Tensor, how: Sampling, tool: Any, chance: torch.Generator
) -> dict[str, Tensor]:
    """Sample token by token until every sequence has ended or reached its limit.

    Returns:
        [S, L] each: `tokens`; `mask`, 1 where the engine sampled; `q`, the log-probs that were drawn from;
        `q_raw`, before temperature and truncation; `kept` [S, L, V] where some tokens could not be drawn;
        and `ends` [S], how many tokens belong to each response.
    """
    rows, longest = len(prompts), int(limits.max())
    state = model.begin(rows, prompts.shape[1] + longest)
    columns: dict[str, list[Tensor]] = {name: [] for name in ("tokens", "mask", "q", "q_raw", "kept")}
    fresh, ended, ends = prompts, torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
    alive, logits = torch.arange(rows), torch.zeros(rows, 1)
    for at in range(longest):
        if ended[alive].float().mean() > 0.3:  # what has ended needs no more computing
            held = ~ended[alive]
            alive, state = alive[held], model.narrowed(state, held)
        new = model(fresh[alive], state)[:, -1].float()
        logits = logits if at else torch.zeros(rows, new.shape[1])
        logits[alive] = new
        log_p = torch.log_softmax(logits / how.temperature, dim=-1)
        kept = how.kept(log_p)
        drawn_from = log_p if kept is None else log_p.masked_fill(~kept, -torch.inf).log_softmax(-1)
        drawn = torch.multinomial(drawn_from.exp(), 1, generator=chance).squeeze(1)
        own = (tool.silent() if tool else torch.ones(rows, dtype=torch.bool)) & ~ended
        token = torch.where(own, drawn, tool.inserted() if tool else torch.zeros(rows, dtype=torch.long))
        token = torch.where(ended, 0, token)
        pick = token[:, None]
        for name, value in (
            ("tokens", token),
            ("mask", own),
            ("q", torch.where(own, drawn_from.gather(1, pick).squeeze(1), 0.0)),
            ("q_raw", torch.where(own, logits.log_softmax(-1).gather(1, pick).squeeze(1), 0.0)),
        ):
            columns[name].append(value)
        if kept is not None:
            columns["kept"].append(kept)
        if tool:
            tool.append(token)
        ends = torch.where(ended, ends, at + 1)
        ended = ended | (own & (token == 0)) | (ends >= limits)
        fresh = pick
        if bool(ended.all()):
            break
    return {name: torch.stack(value, dim=1) for name, value in columns.items() if value} | {"ends": ends}


@torch.no_grad()
def score(
    model: Model, prompts: Tensor, tokens: Tensor, temperature: float, kept: Tensor | None = None
) -> dict[str, Tensor]:
    """Compute the trainer's log-probs of `tokens` [S, L] after `prompts` [S, P], in float32.

    Returns:
        [S, L] each: `p`, at that temperature and among the tokens the engine could draw; `p_full`, among all;
        `p_raw`, without the temperature; `entropy` and `entropy_raw`, with and without the temperature.
    """
    found: list[dict[str, Tensor]] = []
    for rows in torch.arange(len(tokens)).split(max(1, 16384 // tokens.shape[1])):
        both = torch.cat([prompts[rows], tokens[rows]], dim=1)
        logits = model(both[:, :-1])[:, prompts.shape[1] - 1 :].float()
        pick = tokens[rows, :, None]
        log_p = torch.log_softmax(logits / temperature, dim=-1)
        raw = logits.log_softmax(-1)
        one = {"p": log_p, "p_full": log_p, "p_raw": raw}
        if kept is not None:  # a token beyond what was kept is padding or inserted: any value will do
            hole = kept[rows].scatter(-1, pick, True)
            one["p"] = log_p.masked_fill(~hole, -torch.inf).log_softmax(-1)
        picked = {name: value.gather(-1, pick).squeeze(-1) for name, value in one.items()}
        entropies = {"entropy": -(log_p.exp() * log_p).sum(-1), "entropy_raw": -(raw.exp() * raw).sum(-1)}
        found.append(picked | entropies)
    return {name: torch.cat([one[name] for one in found]) for name in found[0]}


def text_loss(model: Model, tokens: Tensor, mask: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood, nats per token where `mask` [S, n] is 1."""
    log_p = torch.log_softmax(model(tokens[:, :-1]), dim=-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return -(log_p * mask[:, 1:]).sum() / mask[:, 1:].sum()


def learning_rate(step: int, steps: int, peak: float = 3e-3) -> float:
    """Return the learning rate: warm-up, then a cosine."""
    return peak * min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
