"""Engines and trainers, right and at fault. Nothing here is shared with the hypotheses of `rescore`.

An engine has its adapter merged by hand, weights and products in bf16, and decodes token by token with a
cache. A trainer keeps the adapter apart, and scores whole sequences.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.rescore import models
from benchmarks.rescore.models import sample

E4M3 = np.array(
    sorted(
        {
            sign * value
            for sign in (-1, 1)
            for value in (
                *(m / 8 * 2.0**-6 for m in range(8)),
                *((1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)),
            )
        }
    )
)
"""Every value of fp8 e4m3."""
MIDDLES = (E4M3[1:] + E4M3[:-1]) / 2


def grid(x: np.ndarray) -> np.ndarray:
    """Round to fp8 by looking it up."""
    return E4M3[np.searchsorted(MIDDLES, x)]


def fp8(w: np.ndarray, axis: tuple[int, ...]) -> np.ndarray:
    """Round a matrix to fp8, with a scale over some axes."""
    scale = np.maximum(np.abs(w).max(axis=axis, keepdims=True) / 448, 1e-12)
    return grid(w / scale) * scale


def fp8_blocks(w: np.ndarray) -> np.ndarray:
    """Round a matrix to fp8, a scale for each 128 x 128."""
    w = w.copy()
    for i in range(0, w.shape[0], 128):
        for j in range(0, w.shape[1], 128):
            w[i : i + 128, j : j + 128] = fp8(w[i : i + 128, j : j + 128], (0, 1))
    return w


def whole(w: np.ndarray, top: int) -> np.ndarray:
    """Round rows to whole numbers up to `top`, a scale for each row."""
    scale = np.maximum(np.abs(w).max(axis=-1, keepdims=True) / top, 1e-12)
    return np.clip(np.rint(w / scale), -top, top) * scale


def int4(w: np.ndarray) -> np.ndarray:
    """Round to 15 levels, a scale for each 32 inputs."""
    return whole(w.reshape(len(w), -1, 32), 7).reshape(w.shape)


ROUND: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fp8 per tensor": lambda w: fp8(w, (0, 1)),
    "fp8 per channel": lambda w: fp8(w, (1,)),
    "fp8 per block": fp8_blocks,
    "int8 per channel": lambda w: whole(w, 127),
    "int4 in groups of 32": int4,
}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def bf16(x: torch.Tensor) -> torch.Tensor:
    """Round to bf16."""
    return x.bfloat16().float()


def engine(
    folder: Path, kind: str, *, step: int = 60, scale: float = 1.0, weights: str = "", **change: Any
) -> Any:
    """Return an engine's model: the adapter merged at a scale, weights rounded, products in bf16."""
    made = models.base_of(folder, kind, **change)
    state = dict(made.named_parameters())
    with torch.no_grad():
        for name, delta in models.deltas(folder, step).items():
            state[name].add_(scale * delta)
        for name, weight in state.items():
            weight.copy_(bf16(weight))
            if weights and weight.dim() == 2 and name.split(".")[-2] in LINEAR:
                weight.copy_(torch.from_numpy(ROUND[weights](weight.double().numpy())))
            elif weights and weight.dim() == 3:  # experts, stored one after another
                turned = kind == "gpt_oss"
                each = [one.T if turned else one for one in weight.double().numpy()]
                done = np.stack([(x.T if turned else x) for x in map(ROUND[weights], each)])
                weight.copy_(torch.from_numpy(done))
    return products_in_bf16(made)


def products_in_bf16(made: Any) -> Any:
    """Round what matrices, experts and layers return; norms and activations are fused and are not."""

    def hook(module: Any, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return tuple(bf16(x) if torch.is_tensor(x) and x.is_floating_point() else x for x in out)
        return bf16(out) if torch.is_tensor(out) else out

    head = made.get_output_embeddings()
    for module in made.modules():
        kind = type(module).__name__
        if module is not head and (
            isinstance(module, torch.nn.Linear | torch.nn.Embedding)
            or kind.endswith(("DecoderLayer", "Experts"))
        ):
            module.register_forward_hook(hook)
    return made


@torch.inference_mode()
def decode(
    made: Any,
    prompts: Sequence[Sequence[int]],
    seed: int,
    tokens: int,
    *,
    temperature: float = 1.0,
    masked: bool = True,
    narrow: bool = False,
    cache_fp8: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Sample token by token with a cache; `narrow`: the log-softmax in bf16; `masked`: padding is."""
    generator, found, said = torch.Generator().manual_seed(seed), [], []
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts])
    mask = (
        torch.arange(longest)[None] >= longest - torch.tensor([len(one) for one in prompts])[:, None]
    ).long()
    mask = mask if masked else torch.ones_like(mask)
    positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), None
    for _ in range(tokens):
        out = made(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache = out.past_key_values
        if cache_fp8:
            for layer in cache.layers:
                for one in (layer.keys, layer.values):
                    one.copy_(torch.from_numpy(grid(np.clip(one.double().numpy(), -448, 448))))
        logits = bf16(out.logits[:, -1].float()) / temperature
        ids = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        found.append(ids[:, 0])
        own = (logits.bfloat16() if narrow else logits).log_softmax(-1)
        said.append(own.float().gather(1, ids)[:, 0])
        positions, mask = positions[:, -1:] + 1, torch.cat([mask, torch.ones_like(ids)], 1)
    return torch.stack(found, 1).numpy(), torch.stack(said, 1).numpy()


def trainer(policy: Any) -> Any:
    """Return a trainer's model: the adapter apart, weights and products in bf16."""
    made = copy.deepcopy(policy)
    for weight in made.parameters():
        weight.data = bf16(weight.data)
    return products_in_bf16(made)


@torch.inference_mode()
def scored(
    made: Any, prompts: Sequence[Sequence[int]], responses: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Score whole sequences, one after another."""
    found = []
    for one, response in zip(prompts, responses, strict=True):
        ids = torch.tensor([[*one, *response.tolist()]])
        logits = bf16(made(input_ids=ids).logits[0].float()) / temperature
        wanted = torch.tensor(response)[:, None]
        found.append(logits[len(one) - 1 : -1].log_softmax(-1).gather(1, wanted)[:, 0].numpy())
    return np.stack(found)


def without_system(prompt: Sequence[int]) -> list[int]:
    """Return a prompt without its system block."""
    at = list(prompt).index(sample.USER)
    return [prompt[0], *prompt[at:]]
