"""Weights and activations of fewer bits, rounded to nearest; a context manager for each, which undoes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from offpol_diag.rescore.score import unwrapped

Rounding = Callable[[Tensor, int], Tensor]
"""(weight, dim of the inputs) → the weight rounded."""
E4M3, INT8, INT4 = 448.0, 127.0, 7.0
BLOCK, GROUP = 128, 32


def bf16(w: Tensor, inputs: int = -1) -> Tensor:
    """Round to bf16."""
    return w.to(torch.bfloat16).to(w.dtype)


def e4m3(x: Tensor) -> Tensor:
    """Round to fp8 (e4m3), saturating."""
    return x.clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).float()


def _whole(top: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x.round().clamp(-top, top)


def _scaled(w: Tensor, amax: Tensor, top: float, cast: Callable[[Tensor], Tensor]) -> Tensor:
    scale = (amax.float() / top).clamp(min=1e-12)
    return (cast(w.float() / scale) * scale).to(w.dtype)


def fp8_tensor(w: Tensor, inputs: int = -1) -> Tensor:
    """Round to fp8 with one scale, for each expert where there are several."""
    over = (-2, -1) if w.dim() == 3 else tuple(range(w.dim()))
    return _scaled(w, w.abs().amax(over, keepdim=True), E4M3, e4m3)


def fp8_channel(w: Tensor, inputs: int = -1) -> Tensor:
    """Round to fp8 with a scale per output channel (of activations: per token)."""
    return _scaled(w, w.abs().amax(inputs, keepdim=True), E4M3, e4m3)


def fp8_block(w: Tensor, inputs: int = -1) -> Tensor:
    """Round to fp8 with a scale per block of 128 x 128."""
    rows, columns = w.shape[-2:]
    padded = nn.functional.pad(w, (0, -columns % BLOCK, 0, -rows % BLOCK))
    down, across = padded.shape[-2] // BLOCK, padded.shape[-1] // BLOCK
    blocks = padded.reshape(*padded.shape[:-2], down, BLOCK, across, BLOCK)
    found = _scaled(blocks, blocks.abs().amax((-3, -1), keepdim=True), E4M3, e4m3)
    return found.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns]


def int8_channel(w: Tensor, inputs: int = -1) -> Tensor:
    """Round to int8 with a scale per output channel."""
    return _scaled(w, w.abs().amax(inputs, keepdim=True), INT8, _whole(INT8))


def int4_group(w: Tensor, inputs: int = -1) -> Tensor:
    """Round to int4 with a scale per 32 inputs."""
    w = w.transpose(inputs, -1)
    parts = w.reshape(*w.shape[:-1], -1, GROUP if w.shape[-1] % GROUP == 0 else w.shape[-1])
    found = _scaled(parts, parts.abs().amax(-1, keepdim=True), INT4, _whole(INT4))
    return found.flatten(-2, -1).transpose(inputs, -1)


# ---------------------------------------------------------------- in a model


def is_router(module: nn.Module) -> bool:
    """Return whether a module chooses experts."""
    weight = getattr(module, "weight", None)
    return "Router" in type(module).__name__ or (
        hasattr(module, "top_k") and isinstance(weight, nn.Parameter)
    )


def quantised(model: nn.Module) -> Iterator[tuple[nn.Module, str, int]]:
    """Yield (module, name, dim of the inputs) of weights that engines quantise."""
    causal = unwrapped(model)
    head = causal.get_output_embeddings()
    for name, module in causal.named_modules():
        if module is head or is_router(module) or ".lora_" in name:
            continue
        if isinstance(module, nn.Linear):
            yield module, "weight", -1
        elif type(module).__name__ == "Conv1D":  # GPT-2's: inputs first
            yield module, "weight", 0
        elif not list(module.children()) or "Experts" in type(module).__name__:
            for key, value in module.named_parameters(recurse=False):
                if value.dim() == 3:
                    yield module, key, -2 if getattr(module, "is_transposed", False) else -1


def swap(back: contextlib.ExitStack, weight: Tensor, new: Tensor) -> None:
    """Give a weight another value until `back` is closed; on a GPU what was there waits on the host."""
    held = weight.data.cpu() if weight.is_cuda else weight.data
    device = weight.device
    weight.data = new.to(weight.dtype)

    def restore() -> None:
        weight.data = held.to(device)

    back.callback(restore)


def lora_layers(model: nn.Module) -> list[Any]:
    """Return the layers that an adapter of peft has changed."""
    return [
        one
        for one in model.modules()
        if isinstance(getattr(one, "scaling", None), dict) and hasattr(one, "lora_A")
    ]


@contextlib.contextmanager
def merged(model: Any, cast: Rounding = lambda w, inputs: w) -> Iterator[None]:
    """Add the adapter to the weights, as most engines do before they quantise, and `cast` the sums."""
    with contextlib.ExitStack() as back:
        layers = lora_layers(model)
        for layer in layers:
            base = layer.base_layer.weight
            total = base.data.float() + sum(
                layer.get_delta_weight(name).float() for name in layer.active_adapters
            )
            swap(back, base, cast(cast(total, -1).to(base.dtype), -1))
        if layers:
            back.enter_context(model.disable_adapter())
        yield


@contextlib.contextmanager
def rounded(model: nn.Module, how: Rounding) -> Iterator[None]:
    """Merge the adapter, and round the weights that engines quantise: from bf16, as checkpoints hold them."""
    with contextlib.ExitStack() as back:
        back.enter_context(merged(model))
        for module, key, inputs in list(quantised(model)):
            weight = getattr(module, key)
            swap(back, weight, how(bf16(weight.data), inputs))
        yield


@contextlib.contextmanager
def weights_in_bf16(model: nn.Module) -> Iterator[None]:
    """Round all weights to bf16, those of an adapter by themselves."""
    with contextlib.ExitStack() as back:
        for weight in {id(one): one for one in model.parameters()}.values():
            swap(back, weight, bf16(weight.data))
        yield


@contextlib.contextmanager
def in_bf16(model: nn.Module) -> Iterator[None]:
    """Compute as in bf16: weights rounded, and what modules return; products are accumulated in float32.

    Tensor cores do the same. A CPU's own bf16 is several times slower.
    """
    causal = unwrapped(model)
    head = causal.get_output_embeddings()

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, Tensor):
            return bf16(out)
        if isinstance(out, tuple):
            return tuple(bf16(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in out)
        return out

    with contextlib.ExitStack() as back:
        back.enter_context(weights_in_bf16(model))
        for module in causal.modules():
            kind = type(module).__name__
            leaf = not list(module.children()) and not kind.endswith("RotaryEmbedding") and module is not head
            if leaf or kind.endswith(("DecoderLayer", "Experts")):
                back.callback(module.register_forward_hook(hook).remove)
        yield


@contextlib.contextmanager
def w8a8(model: nn.Module) -> Iterator[None]:
    """Weights in fp8 per channel, inputs of their layers in fp8 per token (of experts, their input alone)."""

    def hook(module: nn.Module, args: Any) -> Any:
        return (fp8_channel(args[0]), *args[1:])

    with contextlib.ExitStack() as back:
        back.enter_context(rounded(model, fp8_channel))
        for module in {id(one): one for one, _, _ in quantised(model)}.values():
            back.callback(module.register_forward_pre_hook(hook).remove)
        yield
