"""A small causal transformer: one forward for the trainer, one with a key-value cache for the engine."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS = 64, 4, 3
FP8_MAX = 448.0  # the largest float8_e4m3fn


class Cache:
    """Keys and values of every layer: [layers, 2, S, heads, positions, width / heads]."""

    def __init__(self, sequences: int, positions: int, dtype: torch.dtype) -> None:
        self.store = torch.zeros(LAYERS, 2, sequences, HEADS, positions, WIDTH // HEADS, dtype=dtype)
        self.length = 0


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_forward = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, layer: Tensor | None, start: int) -> Tensor:
        """Compute the layer of `x` [S, n, width]; `layer` [2, S, heads, positions, .] is its cache."""
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, start), rotate(k, start)
        if layer is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = attend(q, k, v, layer, start)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norm_forward(x))))
        return hidden


class Transformer(nn.Module):
    """A causal transformer: tokens in, logits out."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return logits [S, n, vocabulary] after each of `tokens` [S, n], which continue the cache if any."""
        start = 0 if cache is None else cache.length
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, None if cache is None else cache.store[i], start)
        if cache is not None:
            cache.length += tokens.shape[1]
        logits: Tensor = self.head(self.norm(x))
        return logits


def rotate(x: Tensor, start: int) -> Tensor:
    """Apply rotary positions, in float32. `x` [S, heads, n, d]."""
    half = x.shape[-1] // 2
    speed = 1000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(start, start + x.shape[2], dtype=torch.float32)[:, None] * speed
    a, b = x.float().chunk(2, dim=-1)
    turned = torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)
    return turned.to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, layer: Tensor, start: int) -> Tensor:
    """Attend from n new tokens to the cache, after appending them to it. All [S, heads, n, d]."""
    end = start + q.shape[2]
    layer[0, :, :, start:end], layer[1, :, :, start:end] = k, v
    scores = q @ layer[0, :, :, :end].transpose(-1, -2) / q.shape[-1] ** 0.5
    future = torch.ones(q.shape[2], end, dtype=torch.bool).triu(start + 1)
    weights = scores.float().masked_fill(future, -torch.inf).softmax(-1).to(q.dtype)
    attended: Tensor = weights @ layer[1, :, :, :end]
    return attended


def engine(model: Transformer, quantize: bool = False) -> Transformer:
    """Copy the weights as an inference engine holds them: bfloat16, and linear layers first through fp8."""
    copied = copy.deepcopy(model).requires_grad_(False)
    if quantize:
        for block in copied.blocks:
            for layer in block.children():
                if isinstance(layer, nn.Linear):
                    layer.weight.copy_(through_fp8(layer.weight))
    return copied.to(torch.bfloat16)


def through_fp8(weight: Tensor) -> Tensor:
    """Round to float8 e4m3 and back, one scale per output channel. `weight` [out, in]."""
    scale = weight.abs().amax(dim=1, keepdim=True) / FP8_MAX
    rounded = (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype)
    return rounded * scale


def sampled_log_probs(model: Transformer, tokens: Tensor, prompt: int) -> Tensor:
    """Compute the trainer's log π [S, L], float32 nats, of `tokens` [S, prompt + L] after the prompt."""
    logits = model(tokens[:, :-1])[:, prompt - 1 :]
    response = tokens[:, prompt:, None]
    return torch.log_softmax(logits.float(), dim=-1).gather(2, response).squeeze(2)
