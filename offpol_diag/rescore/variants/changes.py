"""What else is changed in a model: attention, positions, routers, adapters; context managers that undo it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from offpol_diag.rescore.score import unwrapped
from offpol_diag.rescore.variants.rounding import bf16, e4m3, is_router, lora_layers, swap

NO_SINK = -1e4
"""Logit of an attention sink that takes nothing."""
NO_WINDOW = 1 << 30
"""A window wider than any sequence: None is refused by the masks of transformers."""


@contextlib.contextmanager
def keys_and_values(model: nn.Module, cast: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Round keys and values before whatever attention the model has."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    causal = unwrapped(model)
    before = causal.config._attn_implementation

    def changed(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        plain = sys.modules[type(module).__module__].eager_attention_forward
        inner = ALL_ATTENTION_FUNCTIONS.get_interface(before, plain)
        return inner(module, query, cast(key), cast(value), mask, **more)

    name = f"{before}_rounded"
    ALL_ATTENTION_FUNCTIONS.register(name, changed)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[before])
    configs = {id(one.config): one.config for one in causal.modules() if hasattr(one, "config")}.values()
    try:
        for config in configs:  # set_attn_implementation refuses names that it does not know
            config._attn_implementation = name
        yield
    finally:
        for config in configs:
            config._attn_implementation = before


def cache_fp8(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Keys and values in fp8 with a scale of 1, as engines store them by default."""
    return keys_and_values(model, lambda x: e4m3(x.float()).to(x.dtype))


def cache_bf16(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Keys and values in bf16."""
    return keys_and_values(model, bf16)


@contextlib.contextmanager
def attributes(modules: list[Any], name: str, values: list[Any]) -> Iterator[None]:
    """Set an attribute of modules."""
    held = [getattr(one, name) for one in modules]
    try:
        for one, value in zip(modules, values, strict=True):
            setattr(one, name, value)
        yield
    finally:
        for one, value in zip(modules, held, strict=True):
            setattr(one, name, value)


@contextlib.contextmanager
def window_off(model: nn.Module) -> Iterator[None]:
    """Full attention in place of a sliding window; flash kernels read the layers' own copy of it."""
    causal = unwrapped(model)
    layers = [one for one in causal.modules() if getattr(one, "sliding_window", None) is not None]
    config = causal.config.get_text_config()
    with (
        attributes([config], "sliding_window", [NO_WINDOW]),
        attributes(layers, "sliding_window", [None] * len(layers)),
    ):
        yield


def ropes(model: nn.Module) -> Iterator[tuple[Any, str, str]]:
    """Yield (module, prefix of its buffers, type of layer or '') of each table of RoPE."""
    for module in unwrapped(model).modules():
        for key, _ in list(module.named_buffers(recurse=False)):
            if key.endswith("inv_freq") and "original" not in key:
                prefix = key.removesuffix("inv_freq")
                yield module, prefix, prefix.removesuffix("_")


def scaled_ropes(model: nn.Module) -> list[tuple[Any, str, str]]:
    """Return the tables of RoPE that are scaled for longer contexts."""
    found = []
    for module, prefix, layer in ropes(model):
        kind = getattr(module, "rope_type", "default")
        if (kind.get(layer) if isinstance(kind, dict) else kind) != "default":
            found.append((module, prefix, layer))
    return found


@contextlib.contextmanager
def rope_unscaled(model: nn.Module) -> Iterator[None]:
    """RoPE without its scaling."""
    with contextlib.ExitStack() as back:
        for module, prefix, layer in scaled_ropes(model):
            more = {"layer_type": layer} if layer else {}
            plain, factor = type(module).compute_default_rope_parameters(module.config, **more)
            swap(
                back,
                getattr(module, f"{prefix}inv_freq"),
                plain.to(getattr(module, f"{prefix}inv_freq").device),
            )
            back.enter_context(attributes([module], f"{prefix}attention_scaling", [factor]))
            kind = module.rope_type
            plainly = {**kind, layer: "default"} if isinstance(kind, dict) else "default"
            back.enter_context(attributes([module], "rope_type", [plainly]))
        yield


def with_sinks(model: nn.Module) -> list[Any]:
    """Return the modules that have attention sinks."""
    return [
        one for one in unwrapped(model).modules() if isinstance(getattr(one, "sinks", None), nn.Parameter)
    ]


@contextlib.contextmanager
def sinks_off(model: nn.Module) -> Iterator[None]:
    """Attention without its sinks."""
    with contextlib.ExitStack() as back:
        for module in with_sinks(model):
            swap(back, module.sinks, torch.full_like(module.sinks.data, NO_SINK))
        yield


@contextlib.contextmanager
def router_bf16(model: nn.Module) -> Iterator[None]:
    """Routers that compute in bf16."""
    with contextlib.ExitStack() as back:
        for module in [one for one in unwrapped(model).modules() if is_router(one)]:
            back.callback(_restore, module, vars(module).get("forward"))
            module.forward = _narrow(module, module.forward)
        yield


def _restore(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Give a module back the forward of its own, or that of its class."""
    vars(module).pop("forward")
    if forward is not None:
        vars(module)["forward"] = forward


def _narrow(module: nn.Module, real: Callable[..., Any]) -> Callable[..., Any]:
    def forward(hidden: Tensor, *args: Any, **more: Any) -> Any:
        held = {name: one.data for name, one in module.named_parameters(recurse=False)}
        try:
            for _, one in module.named_parameters(recurse=False):
                one.data = one.data.to(torch.bfloat16)
            found = real(hidden.to(torch.bfloat16), *args, **more)
        finally:
            for name, one in module.named_parameters(recurse=False):
                one.data = held[name]
        each = found if isinstance(found, tuple) else (found,)
        wide = tuple(x.to(hidden.dtype) if x.is_floating_point() else x for x in each)
        return wide if isinstance(found, tuple) else wide[0]

    return forward


def adapter_off(model: Any) -> contextlib.AbstractContextManager[None]:
    """The base model without its adapter."""
    found: contextlib.AbstractContextManager[None] = model.disable_adapter()
    return found


def adapter_times(model: nn.Module, by: float) -> contextlib.AbstractContextManager[None]:
    """The adapter at another scale."""
    layers = lora_layers(model)
    return attributes(
        layers, "scaling", [{name: by * x for name, x in one.scaling.items()} for one in layers]
    )
