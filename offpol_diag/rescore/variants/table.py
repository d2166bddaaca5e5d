"""The table of hypotheses: those that a model and its responses can test, and why others cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from offpol_diag.rescore.score import UNPENALISED, Head, Penalties, Row, unwrapped
from offpol_diag.rescore.variants import changes, inputs, rounding

Change = Callable[[Any], contextlib.AbstractContextManager[Any]]
HONEST = ("as given", "numerics")
"""Families that are no fault: another precision or another kernel of the same computation."""
TEMPERATURES = (0.6, 0.7, 0.8, 0.9, 1.2)
TOP_K, TOP_P = (20, 50), (0.9, 0.95)
HEADER = 5
"""Most tokens of the header of a turn, which may be left of what all prompts begin with."""
WEIGHTS = (
    ("fp8 per tensor", "fp8", rounding.fp8_tensor),
    ("fp8 per channel", "fp8", rounding.fp8_channel),
    ("fp8 per block", "fp8", rounding.fp8_block),
    ("int8 per channel", "int8", rounding.int8_channel),
    ("int4 in groups of 32", "int4", rounding.int4_group),
)


MODELS_OWN = Head()


def unchanged(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Change nothing."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Variant:
    """One hypothesis.

    Attributes:
        name: what it is called in tables.
        family: what is named together.
        meaning: what a side computes if it is true, after "its numbers are those of".
        fix: what to do then, `{side}` being the engine or the trainer.
        model: a context in which the model is changed; it may yield another model.
        rows: what is changed in the inputs.
        head: how logits become log-probs.
    """

    name: str
    family: str
    meaning: str
    fix: str = ""
    model: Change = unchanged
    rows: Callable[[Sequence[Row]], Sequence[Row]] | None = None
    head: Head = MODELS_OWN

    @property
    def of_the_head(self) -> bool:
        """Whether a pass of the unchanged body is enough."""
        return self.model is unchanged and self.rows is None


AS_GIVEN = Variant("as given", "as given", "the model as it is given")
LOAD = "Load the adapter in the {side} (vLLM: enable_lora, and the LoRA request on every call)."
SCALE = "Compare lora_alpha, r and use_rslora of both sides, and look for an adapter that is merged twice."
SYNC = "Look at what copies the weights to the {side}: it has older ones."
TEMPERATURE = "Divide the logits of both sides by the same temperature, once."
CUT = "Log what the model says, not what is left after top-k and top-p, or cut the other side alike."
CUT_PENALTIES = "Sample without penalties: what is trained is the distribution without them."
PROMPT = "Send both sides the same token ids, not text through two templates."
POSITIONS = "Give the {side} positions that count real tokens, and a mask over padding."
CONFIG = "Compare config.json of both sides: the {side} leaves this out."
QUANTISED = "A quantised {side} is this far off: a correction (TIS) belongs to it, or bf16 weights."


class Missing(NamedTuple):
    """A hypothesis that cannot be tested here, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Given:
    """What the table is made for.

    Attributes:
        model: the model.
        rows: the responses.
        checkpoints: name → a context that yields the model of another checkpoint.
        marks: special tokens of the prompts' template.
        pad: the token for padding.
        said: what the dump's provenance says.
    """

    model: Any
    rows: Sequence[Row]
    checkpoints: Mapping[str, Change] = field(default_factory=dict)
    marks: Collection[int] = ()
    pad: int = 0
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(len(row.ids) for row in self.rows)

    @property
    def config(self) -> Any:
        """The configuration of the language model."""
        return unwrapped(self.model).config.get_text_config()


Rule = Callable[[Given], Iterator[Variant | Missing]]


def table(given: Given) -> tuple[list[Variant], dict[str, str]]:
    """Return the hypotheses that can be tested, "as given" first, and why the others cannot."""
    found, left = [AS_GIVEN], dict[str, str]()
    for rule in RULES:
        for one in rule(given):
            if isinstance(one, Missing):
                left[one.name] = one.why
            else:
                found.append(one)
    return found, left


def numerics(found: Sequence[Variant]) -> list[str]:
    """Return the names of the hypotheses that are no fault."""
    return [one.name for one in found if one.family in HONEST]


def _adapters(given: Given) -> Iterator[Variant | Missing]:
    layers = rounding.lora_layers(given.model)
    if not layers:
        yield Missing("adapter", "the model has none")
        return
    off = "the base model without the adapter, which was never loaded"
    yield Variant("adapter off", "adapter off", off, LOAD, changes.adapter_off)
    rank = next(iter(layers[0].r.values()))
    scales = {rank**0.5: "alpha / sqrt(r), as rslora has it", 0.5: "alpha / r halved"}
    scales |= {2.0: "alpha / r doubled, or merged twice"}  # a rank of 4 makes that of rslora
    for by, why in scales.items():
        times = partial(changes.adapter_times, by=by)
        yield Variant(
            f"adapter x {by:.3g}",
            "adapter scale",
            f"the adapter at {by:.3g} times its scale ({why})",
            SCALE,
            times,
        )
    merged = partial(rounding.merged, cast=rounding.bf16)
    yield Variant("adapter merged in bf16", "numerics", "the adapter merged into bf16 weights", model=merged)


def _checkpoints(given: Given) -> Iterator[Variant | Missing]:
    for name, how in given.checkpoints.items():
        yield Variant(name, "checkpoint", f"the weights of {name}", SYNC, how)
    if not given.checkpoints:
        yield Missing("other checkpoints", "none is given: --model again, for each of them")


def _temperatures(given: Given) -> Iterator[Variant | Missing]:
    own = {row.temperature for row in given.rows}
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


def _truncated(given: Given) -> Iterator[Variant | Missing]:
    k, p = (given.said.get(name) for name in ("top_k", "top_p"))
    for one in dict.fromkeys((*TOP_K, *([k] if isinstance(k, int) and k > 0 else []))):
        yield Variant(
            f"top-k {one}",
            "truncated",
            f"the distribution renormalised over its top {one}",
            CUT,
            head=Head(top_k=one),
        )
    for share in dict.fromkeys((*TOP_P, *([p] if isinstance(p, float) and 0 < p < 1 else []))):
        yield Variant(
            f"top-p {share:g}",
            "truncated",
            f"the distribution renormalised over top-p {share:g}",
            CUT,
            head=Head(top_p=share),
        )


def _penalties(given: Given) -> Iterator[Variant | Missing]:
    if all(row.penalties == UNPENALISED for row in given.rows):
        names = ", ".join(f"{name}_penalty" for name in Penalties._fields)
        yield Missing("penalties", f"neither the metadata nor a column gives one ({names})")
        return
    meaning = "the distribution under the penalties of the run, as the engine sampled it"
    yield Variant("penalties", "penalties", meaning, CUT_PENALTIES, head=Head(penalised=True))


def _precision_of_head(given: Given) -> Iterator[Variant | Missing]:
    low = "a log-softmax taken in bf16"
    fix = "Take the log-softmax of the {side} in float32."
    yield Variant("softmax bf16", "low precision", low, fix, head=Head(softmax=torch.bfloat16))
    yield Variant("logits bf16", "numerics", "logits rounded to bf16", head=Head(logits=torch.bfloat16))


def _prompts(given: Given) -> Iterator[Variant | Missing]:
    prompts, marks = inputs.prompts_of(given.rows), given.marks
    block = "the prompt without its system block"
    same = inputs.shared(prompts) if len({one.tobytes() for one in prompts}) > 1 else 0
    if any(inputs.system_block(one, marks)[1] for one in prompts):
        without = partial(inputs.without_system, marks=marks)
        yield Variant("no system prompt", "system prompt", block, PROMPT, rows=without)
    elif same > 1:  # how long the header of the user's turn is, no tokenizer says
        for keep in range(min(HEADER + 1, same - 1)):
            name = f"no system prompt ({keep} of its tokens left)"
            without = partial(inputs.without_beginning, keep=keep)
            yield Variant(name, "system prompt", block, PROMPT, rows=without)
    else:
        yield Missing("no system prompt", "the prompts begin with nothing in common")
    if end := inputs.suffix(given.rows):
        rest = partial(inputs.cut, to=lambda prompt: prompt[: len(prompt) - end])
        bare = "the prompt without the generation prompt, which all prompts end with"
        yield Variant("no generation prompt", "generation prompt", bare, PROMPT, rows=rest)
    else:
        yield Missing("no generation prompt", "the prompts end with nothing in common")
    alone = partial(inputs.cut, to=lambda prompt: prompt[-1:])
    yield Variant("no prompt", "prompt", "the response without its prompt", PROMPT, rows=alone)
    first = {int(one[0]) for one in prompts}
    if len(first) == 1:
        less, more = (lambda prompt: prompt[1:]), (lambda prompt: np.concatenate((prompt[:1], prompt)))
        yield Variant(
            "no BOS", "bos", "the prompt without its first token", PROMPT, rows=partial(inputs.cut, to=less)
        )
        twice = "the prompt with its first token twice, as template and tokenizer each add one"
        yield Variant("two BOS", "bos", twice, PROMPT, rows=partial(inputs.cut, to=more))
    else:
        yield Missing("no BOS, two BOS", "the prompts begin with different tokens")


def _positions(given: Given) -> Iterator[Variant | Missing]:
    starts = {row.start for row in given.rows}
    if len(starts) > 1:
        most = max(starts)
        attended = partial(inputs.padded, pad=given.pad)
        yield Variant(
            "padding attended", "padding", "padding on the left without a mask", POSITIONS, rows=attended
        )
        counted = "response positions counted from the longest prompt, padding included"
        from_pad = partial(inputs.moved, by=lambda row: most - row.start)
        yield Variant("positions from padding", "positions", counted, POSITIONS, rows=from_pad)
    else:
        yield Missing("padding", "all prompts are of one length: there is none")
    one = partial(inputs.moved, by=lambda row: 1)
    yield Variant("positions + 1", "positions", "response positions one too high", POSITIONS, rows=one)
    again = partial(inputs.moved, by=lambda row: -row.start)
    yield Variant(
        "positions restart", "positions", "response positions that begin at 0 again", POSITIONS, rows=again
    )


def _architecture(given: Given) -> Iterator[Variant | Missing]:
    window, longest = getattr(given.config, "sliding_window", None), given.longest
    if window and window < longest:
        full = "full attention in place of the sliding window"
        yield Variant("window off", "window", full, CONFIG, changes.window_off)
    elif window:
        yield Missing(
            "window off", f"no sequence is longer than the window: {window:,} for {longest:,} tokens"
        )
    else:
        yield Missing("window off", "the configuration has no window")
    if changes.scaled_ropes(given.model):
        yield Variant("RoPE scaling off", "rope", "RoPE without its scaling", CONFIG, changes.rope_unscaled)
    else:
        yield Missing("RoPE scaling off", "the configuration has no scaling")
    if changes.with_sinks(given.model):
        yield Variant("sinks off", "sinks", "attention without its sinks", CONFIG, changes.sinks_off)
    else:
        yield Missing("sinks off", "the model has none")
    if any(rounding.is_router(one) for one in unwrapped(given.model).modules()):
        yield Variant("router bf16", "numerics", "routers in bf16", model=changes.router_bf16)


def _rounded(given: Given) -> Iterator[Variant | Missing]:
    yield Variant("weights bf16", "numerics", "weights rounded to bf16", model=rounding.weights_in_bf16)
    for name, family, how in WEIGHTS:
        yield Variant(name, family, f"weights in {name}", QUANTISED, partial(rounding.rounded, how=how))
    both = "weights in fp8 per channel, and activations in fp8 per token"
    yield Variant("fp8 W8A8", "fp8", both, QUANTISED, rounding.w8a8)
    if hasattr(given.config, "_attn_implementation") and hasattr(given.config, "num_attention_heads"):
        cache = "keys and values in fp8"
        yield Variant("KV cache fp8", "kv fp8", cache, QUANTISED, changes.cache_fp8)
        yield Variant("KV cache bf16", "numerics", "keys and values in bf16", model=changes.cache_bf16)
    yield Missing(
        "AWQ, GPTQ", "their scales come from data that is not here: only rounding to nearest is tried"
    )


RULES: tuple[Rule, ...] = (
    _adapters,
    _checkpoints,
    _temperatures,
    _truncated,
    _penalties,
    _precision_of_head,
    _prompts,
    _positions,
    _architecture,
    _rounded,
)
