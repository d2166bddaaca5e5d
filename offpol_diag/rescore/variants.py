"""Hypotheses: a change of the model, of the inputs or of the head, what it would mean, and what to do then.

A change of the model is a function of the model and of a stack that undoes it. `table` makes the hypotheses
that a model and its responses can test, and says why the others cannot be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from offpol_diag.rescore.score import Head, Ints, Row, unwrapped

Change = Callable[[Any, ExitStack], Any]
"""(model, what undoes the change) → another model in its place, or None."""
HONEST = ("as given", "numerics")
"""Families that are no fault: another precision or another kernel of the same computation."""
TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.2)
HEADER = 5
"""Most tokens of the header of a turn, which may be left of what all prompts begin with."""
NO_SINK = -1e4
"""Logit of an attention sink that takes nothing."""
NO_WINDOW = 1 << 30
"""A window wider than any sequence: None is refused by the masks of transformers."""

LOAD = "Load the adapter in the {side} (vLLM: enable_lora, and the LoRA request on every call)."
SCALE = "Compare lora_alpha, r and use_rslora of both sides, and look for an adapter that is merged twice."
SYNC = "Look at what copies the weights to the {side}: it has older ones."
TEMPERATURE = "Divide the logits of both sides by the same temperature, once."
PROMPT = "Send both sides the same token ids, not text through two templates."
CONFIG = "Compare config.json of both sides: the {side} leaves this out."


@dataclass(frozen=True)
class Variant:
    """One hypothesis.

    Attributes:
        name: what it is called in tables.
        family: what is named together.
        meaning: what a side computes if it is true, after "its numbers are those of".
        fix: what to do then, `{side}` being the engine or the trainer.
        change: what is changed in the model; None for nothing.
        row: what is changed in each response and its prompt; None for nothing.
        head: how logits become log-probs.
    """

    name: str
    family: str
    meaning: str
    fix: str = ""
    change: Change | None = None
    row: Callable[[Row], Row] | None = None
    head: Head = Head()  # noqa: RUF009

    @property
    def head_only(self) -> bool:
        """Whether a pass of the unchanged body is enough."""
        return self.change is None and self.row is None

    @contextlib.contextmanager
    def of(self, model: Any) -> Iterator[Any]:
        """Yield the model as the hypothesis has it; afterwards it is as it was."""
        with ExitStack() as back:
            yield (self.change(model, back) if self.change else None) or model

    def rows(self, rows: Sequence[Row]) -> Sequence[Row]:
        """Return responses and prompts as the hypothesis has them."""
        return [self.row(one) for one in rows] if self.row else rows


class Missing(NamedTuple):
    """A hypothesis that cannot be tested here, and why."""

    name: str
    why: str


Found = Iterator[Variant | Missing]
AS_GIVEN = Variant("as given", "as given", "the model as it is given")


def table(
    model: Any, rows: Sequence[Row], checkpoints: Mapping[str, Change]
) -> tuple[list[Variant], dict[str, str]]:
    """Return the hypotheses that can be tested, "as given" first, and why the others cannot.

    Args:
        model: the model.
        rows: all responses that may be scored, to find what their prompts have in common.
        checkpoints: name → a change that yields the model of another checkpoint.
    """
    longest = max(len(row.ids) for row in rows)
    families = _adapters(model), _checkpoints(checkpoints), _heads(rows), _prompts(rows)
    every = [AS_GIVEN, *chain(*families, _architecture(model, longest))]
    missing = {one.name: one.why for one in every if isinstance(one, Missing)}
    return [one for one in every if isinstance(one, Variant)], missing


# ---------------------------------------------------------------- weights


def swap(back: ExitStack, weight: Tensor, new: Tensor) -> None:
    """Give a weight another value until `back` is closed; on a GPU what was there waits on the host."""
    device, held = weight.device, weight.data.cpu() if weight.is_cuda else weight.data
    weight.data = new
    back.callback(lambda: setattr(weight, "data", held.to(device)))


def put(back: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute until `back` is closed."""
    back.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def bf16(x: Tensor) -> Tensor:
    """Round to bf16."""
    return x.to(torch.bfloat16).to(x.dtype)


def lora_layers(model: nn.Module) -> list[Any]:
    """Return the layers that an adapter of peft has changed."""
    return [x for x in model.modules() if hasattr(x, "lora_A") and isinstance(x.scaling, dict)]


def adapter_off(model: Any, back: ExitStack) -> None:
    """Leave the base model without its adapter."""
    back.enter_context(model.disable_adapter())


def adapter_times(model: Any, back: ExitStack, by: float) -> None:
    """Give the adapter another scale."""
    for layer in lora_layers(model):
        put(back, layer, "scaling", {name: by * x for name, x in layer.scaling.items()})


def adapter_merged(model: Any, back: ExitStack) -> None:
    """Add the adapter to the weights, as most engines do, and round the sums to bf16."""
    for layer in lora_layers(model):
        base = layer.base_layer.weight
        deltas = (layer.get_delta_weight(name).float() for name in layer.active_adapters)
        swap(back, base, bf16(bf16(base.data.float() + sum(deltas)).to(base.dtype)))
    adapter_off(model, back)


def weights_in_bf16(model: Any, back: ExitStack) -> None:
    """Round all weights to bf16, those of an adapter by themselves."""
    for weight in {id(one): one for one in model.parameters()}.values():
        swap(back, weight, bf16(weight.data))


def in_bf16(model: Any, back: ExitStack) -> None:
    """Compute as in bf16: weights rounded, and what modules return; products are accumulated in float32.

    Tensor cores do the same. A CPU's own bf16 is several times slower.
    """
    causal = unwrapped(model)
    head = causal.get_output_embeddings()

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return tuple(bf16(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in out)
        return bf16(out) if isinstance(out, Tensor) else out

    weights_in_bf16(model, back)
    for module in causal.modules():
        kind = type(module).__name__
        leaf = not list(module.children()) and not kind.endswith("RotaryEmbedding") and module is not head
        if leaf or kind.endswith(("DecoderLayer", "Experts")):
            back.callback(module.register_forward_hook(hook).remove)


def _adapters(model: Any) -> Found:
    layers = lora_layers(model)
    if not layers:
        yield Missing("adapter", "the model has none")
        return
    off = "the base model without the adapter, which was never loaded"
    yield Variant("adapter off", "adapter off", off, LOAD, adapter_off)
    rank = next(iter(layers[0].r.values()))
    scales = {rank**0.5: "alpha / sqrt(r), as rslora has it", 0.5: "alpha / r halved"}
    scales |= {2.0: "alpha / r doubled, or merged twice"}  # a rank of 4 makes that of rslora
    for by, why in scales.items():
        meaning = f"the adapter at {by:.3g} times its scale ({why})"
        yield Variant(f"adapter x {by:.3g}", "adapter scale", meaning, SCALE, partial(adapter_times, by=by))
    merged = "the adapter merged into bf16 weights"
    yield Variant("adapter merged in bf16", "numerics", merged, change=adapter_merged)


def _checkpoints(checkpoints: Mapping[str, Change]) -> Found:
    for name, change in checkpoints.items():
        yield Variant(name, "checkpoint", f"the weights of {name}", SYNC, change)
    if not checkpoints:
        yield Missing("other checkpoints", "none is given: --model again, for each of them")


# ---------------------------------------------------------------- the head


def _heads(rows: Sequence[Row]) -> Found:
    own = {row.temperature for row in rows}
    for t in TEMPERATURES:
        if own != {t}:
            yield Variant(f"temperature {t}", "temperature", f"temperature {t}", TEMPERATURE, head=Head(t))
    if own != {1.0}:
        raw = "temperature 1, raw log-probs before the temperature"
        yield Variant("temperature 1", "temperature", raw, TEMPERATURE, head=Head(1.0))
        if len(own) == 1:
            (t,) = own
            twice = f"temperature {t:g} divided out twice"
            yield Variant("temperature twice", "temperature", twice, TEMPERATURE, head=Head(t * t))
    yield Variant("logits bf16", "numerics", "logits rounded to bf16", head=Head(logits=torch.bfloat16))


# ---------------------------------------------------------------- prompts


def with_prompt(row: Row, to: Callable[[Ints], Ints]) -> Row:
    """Return a row with another prompt; of an empty one the last token stays: it predicts."""
    prompt = to(row.ids[: row.start])
    prompt = prompt if len(prompt) else row.ids[row.start - 1 : row.start]
    return replace(row, ids=np.concatenate((prompt, row.ids[row.start :])), start=len(prompt))


def without(prompt: Ints, begin: int, end: int) -> Ints:
    """Return a prompt without its tokens from `begin` to before `end`."""
    return np.concatenate((prompt[:begin], prompt[end:]))


def shared(prompts: Sequence[Ints]) -> int:
    """Return the length of what all prompts begin with."""
    most = min(map(len, prompts))
    first = prompts[0][:most]
    same = np.logical_and.reduce([one[:most] == first for one in prompts])
    return most if same.all() else int(np.argmin(same))


def _prompts(rows: Sequence[Row]) -> Found:
    def changed(name: str, family: str, meaning: str, to: Callable[[Ints], Ints]) -> Variant:
        return Variant(name, family, f"the prompt {meaning}", PROMPT, row=partial(with_prompt, to=to))

    prompts = [row.ids[: row.start] for row in rows]
    first, alike = prompts[0], len({one.tobytes() for one in prompts}) == 1
    same = 0 if alike else shared(prompts)
    if same > 1:
        bos = 0 if (first[1:same] == first[0]).any() else 1  # what opens a block again is no BOS
        for keep in range(min(HEADER + 1, same - 1)):  # the header of the user's turn, of unknown length
            block = partial(without, begin=bos, end=max(same - keep, bos))
            name = f"no system prompt ({keep} of its tokens left)"
            yield changed(name, "system prompt", "without its system block", block)
    else:
        yield Missing("no system prompt", "the prompts begin with nothing in common")
    ending = shared([one[::-1] for one in prompts])
    if 0 < ending < min(map(len, prompts)):
        bare = "without the generation prompt, which all prompts end with"
        yield changed("no generation prompt", "generation prompt", bare, lambda prompt: prompt[:-ending])
    else:
        yield Missing("no generation prompt", "the prompts end with nothing in common")
    yield changed("no prompt", "prompt", "cut to its last token", lambda prompt: prompt[-1:])
    if len({int(one[0]) for one in prompts}) == 1:
        yield changed("no BOS", "bos", "without its first token", lambda prompt: prompt[1:])
        twice = "with its first token twice, as template and tokenizer each add one"
        yield changed("two BOS", "bos", twice, lambda prompt: np.concatenate((prompt[:1], prompt)))
    else:
        yield Missing("no BOS, two BOS", "the prompts begin with different tokens")


# ---------------------------------------------------------------- the architecture


def window_off(model: Any, back: ExitStack) -> None:
    """Attend to everything in place of a sliding window; flash kernels read the layers' own copy of it."""
    causal = unwrapped(model)
    for layer in causal.modules():
        if getattr(layer, "sliding_window", None) is not None:
            put(back, layer, "sliding_window", None)
    put(back, causal.config.get_text_config(), "sliding_window", NO_WINDOW)


def soft_caps(model: Any) -> list[tuple[Any, str]]:
    """Return what bounds logits and the scores of attention, as (owner, attribute)."""
    causal = unwrapped(model)
    owners = [(causal.config.get_text_config(), "final_logit_softcapping")]
    owners += [(module, "attn_logit_softcapping") for module in causal.modules()]
    return [(owner, name) for owner, name in owners if getattr(owner, name, None) is not None]


def soft_cap_off(model: Any, back: ExitStack) -> None:
    """Leave logits and the scores of attention unbounded."""
    for owner, name in soft_caps(model):
        put(back, owner, name, None)


def scaled_ropes(model: Any) -> list[tuple[Any, str, str]]:
    """Return (module, prefix of its buffers, type of layer or '') of RoPE scaled for longer contexts."""
    found = []
    for module in unwrapped(model).modules():
        for key, _ in list(module.named_buffers(recurse=False)):
            if key.endswith("inv_freq") and "original" not in key:
                prefix = key.removesuffix("inv_freq")
                layer, kind = prefix.removesuffix("_"), getattr(module, "rope_type", "default")
                if (kind.get(layer) if isinstance(kind, dict) else kind) != "default":
                    found.append((module, prefix, layer))
    return found


def rope_unscaled(model: Any, back: ExitStack) -> None:
    """Turn by the angles of RoPE without its scaling."""
    for module, prefix, layer in scaled_ropes(model):
        more = {"layer_type": layer} if layer else {}
        plain, factor = type(module).compute_default_rope_parameters(module.config, **more)
        angles, kind = getattr(module, f"{prefix}inv_freq"), module.rope_type
        swap(back, angles, plain.to(angles))
        put(back, module, f"{prefix}attention_scaling", factor)
        put(back, module, "rope_type", {**kind, layer: "default"} if isinstance(kind, dict) else "default")


def with_sinks(model: Any) -> list[Any]:
    """Return the modules that have attention sinks."""
    return [x for x in unwrapped(model).modules() if isinstance(getattr(x, "sinks", None), nn.Parameter)]


def sinks_off(model: Any, back: ExitStack) -> None:
    """Attend without sinks."""
    for module in with_sinks(model):
        swap(back, module.sinks, torch.full_like(module.sinks.data, NO_SINK))


PARTS = (
    ("soft-cap off", "soft-cap", "logits without their soft cap", soft_cap_off, soft_caps, "soft cap"),
    ("RoPE scaling off", "rope", "RoPE without its scaling", rope_unscaled, scaled_ropes, "scaling"),
    ("sinks off", "sinks", "attention without its sinks", sinks_off, with_sinks, "sinks"),
)
"""Name, family and meaning of a hypothesis, its change, where a model has the part, and the part's name."""


def _architecture(model: Any, longest: int) -> Found:
    window = getattr(unwrapped(model).config.get_text_config(), "sliding_window", None)
    if not window:
        yield Missing("window off", "the configuration has no window")
    elif window < longest:
        full = "full attention in place of the sliding window"
        yield Variant("window off", "window", full, CONFIG, window_off)
    else:
        short = f"no sequence is longer than the window: {window:,} for {longest:,} tokens"
        yield Missing("window off", short)
    for name, family, meaning, change, found_in, part in PARTS:
        if found_in(model):
            yield Variant(name, family, meaning, CONFIG, change)
        else:
            yield Missing(name, f"the model has no {part}")
    yield Variant("weights bf16", "numerics", "weights rounded to bf16", change=weights_in_bf16)
