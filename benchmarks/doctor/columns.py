"""Dumps with the columns that decide: a second scoring, prefill, kept mass, experts, packs, prompts, images.

They are made as those of sampled.py, by engines and trainers of the same models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.doctor.hub import Hub
from benchmarks.doctor.models import engine
from benchmarks.doctor.sampled import (
    MOE,
    ROPE,
    START,
    STEPS,
    Array,
    Drawn,
    Dump,
    Field,
    How,
    Make,
    Weights,
    _dump,
    _logits,
    _of_responses,
    _only,
    _recorded,
    adapted,
    after,
    configured,
    dropped,
    half,
    noisy_router,
    packed,
    plain,
    rope,
    scaled,
)

EXPERTS = f"{MOE} mixtral gpt-oss"
BF16, INT8, LAG2 = How(), How("int8"), How(lag=2)
Score = Callable[[Hub, Drawn], Tensor]


def engines(field: Field, how: How) -> Callable[[int], Any]:
    """Return the engine of each version of the trainer, as it prefills."""
    return lambda version: half(
        engine(field.model(field.versions[max(version - how.lag, 0)]), how.precision), inputs=True
    )


def repeated(how: How, score: Score = plain, model: Any = None) -> Make:
    """Return dumps of a trainer in bf16 that scores twice, the second time in other batches and kernels."""

    def make(field: Field) -> Dump:
        made = model(field) if model else field.trainer
        dump = _dump(how, model=lambda _: lambda version: half(made(version)), score=score)(field)
        assert dump is not None
        order = np.lexsort((dump.drawn.lengths, dump.drawn.version))
        again = field.scored(
            dump.drawn.take(order), how.temperature, model=lambda v: half(made(v), True), score=score
        )
        dump.extra = {"old_log_probs_repeat": again[np.argsort(order)]}
        return dump

    return make


def prefilled(how: How, **scoring: Any) -> Make:
    """Return dumps with the log-probs of the engine's prefill of the finished responses."""

    def make(field: Field) -> Dump:
        dump = _dump(how, **scoring)(field)
        assert dump is not None
        prefill = field.scored(dump.drawn, how.temperature, model=engines(field, how))
        dump.extra = {"engine_prefill_log_probs": prefill}
        return dump

    return make


def massed(how: How, kept: bool = False) -> Make:
    """Return dumps with the probability that truncated sampling kept, at a temperature of 1."""

    def make(field: Field) -> Dump:
        dump = _dump(how, kept=kept)(field)
        assert dump is not None
        dump.extra = {"kept_mass": np.minimum(np.exp(dump.drawn.raw - dump.drawn.q), 1.0)}
        return dump

    return make


def routed(score: Score, found: list[Array]) -> Score:
    """Return a scoring that also keeps the experts of each token of the responses, [S, L, layers, k]."""

    def watched(lm: Hub, drawn: Drawn) -> Tensor:
        layers: list[Tensor] = []
        gates = [m for name, m in lm.lm.named_modules() if name.endswith((".mlp.gate", ".mlp.router"))]
        hooks = [gate.register_forward_hook(lambda _m, _a, out: layers.append(out[2])) for gate in gates]
        try:
            logits = score(lm, drawn)
        finally:
            for hook in hooks:
                hook.remove()
        many = len(drawn.tokens)
        each = torch.stack([ids.view(many, -1, ids.shape[-1]) for ids in layers], dim=2)
        at = torch.arange(drawn.tokens.shape[1])
        of_responses = _of_responses(each.flatten(2), torch.from_numpy(drawn.lengths), at)
        found.append(of_responses.view(many, len(at), *each.shape[2:]).numpy())
        return logits

    return watched


def expert(how: How, score: Score = plain, model: Any = None) -> Make:
    """Return dumps of mixtures of experts with the experts of both sides."""

    def make(field: Field) -> Dump:
        own: list[Array] = []
        theirs: list[Array] = []
        given = {"model": model} if model else {}
        dump = _dump(how, score=routed(score, own), **given)(field)
        assert dump is not None
        field.scored(dump.drawn, model=engines(field, how), score=routed(plain, theirs))
        dump.extra = {"train_experts": np.concatenate(own), "rollout_experts": np.concatenate(theirs)}
        return dump

    return _only(EXPERTS, make)


def gates(change: Callable[[Tensor], Tensor]) -> Callable[[Field], Callable[[int], Hub]]:
    """Return trainers whose routers are changed."""

    def changed(weights: Weights) -> Weights:
        some = (".mlp.gate.weight", ".mlp.router.weight")
        return {name: change(x) if name.endswith(some) else x for name, x in weights.items()}

    return lambda field: lambda version: field.trainer(version, changed)


def coarse(weight: Tensor) -> Tensor:
    """Round to 4 bits."""
    scale = weight.abs().amax(dim=-1, keepdim=True) / 7
    return (weight / scale).round() * scale


def packs(how: How, leak: bool = False, ordered: bool = False, index: bool = True, many: int = 4) -> Make:
    """Return dumps of packed rows, of which later sequences see the earlier ones, or none does."""

    def make(field: Field) -> Dump:
        dump = _dump(how)(field)
        assert dump is not None
        place, pack = np.zeros(len(dump.q), int), np.zeros(len(dump.q), int)
        for version in STEPS:
            rows = np.flatnonzero(dump.drawn.version == version)
            rows = np.random.default_rng(version).permutation(rows)
            if ordered:  # the longest first
                rows = rows[np.argsort(-dump.drawn.ends[rows], kind="stable")]
            place[rows], pack[rows] = (
                np.arange(len(rows)) % many,
                1000 * version + np.arange(len(rows)) // many,
            )
            if leak:
                part = dump.drawn.take(rows)
                logits = packed(field.trainer(version), part, many)
                pick = torch.from_numpy(part.tokens)[..., None]
                dump.p[rows] = logits.log_softmax(-1).gather(-1, pick).squeeze(-1).numpy()
        dump.extra = {"pack_id": pack} | ({"pack_index": place} if index else {})
        return dump

    return make


def prompted(make: Make) -> Make:
    """Return the same dumps with the tokens of their prompts."""

    def with_prompts(field: Field) -> Dump | None:
        dump = make(field)
        if dump is not None:
            both = zip(dump.drawn.prompts, dump.drawn.lengths, strict=True)
            dump.extra |= {"prompt_ids": [prompt[-n:] for prompt, n in both]}
        return dump

    return with_prompts


# Images: a span of some prompts stands for one.

SPAN = (-8, -2)
"""Where an image lies, counted from the end of its prompt."""


def with_image(group: int) -> bool:
    """Return whether the prompt of a group has an image."""
    return group * 7919 % 100 < 40


def imaged(how: How, score: Score = plain) -> Make:
    """Return dumps of which a part of the prompts has an image."""

    def make(field: Field) -> Dump:
        dump = _dump(how, score=score)(field)
        assert dump is not None
        both = zip(dump.drawn.group.tolist(), dump.drawn.lengths.tolist(), strict=True)
        spans = [[n + SPAN[0], n + SPAN[1]] if with_image(one) else [] for one, n in both]
        dump.extra = {"image_spans": spans}
        return dump

    return make


def other_pixels(lm: Hub, drawn: Drawn) -> Tensor:
    """Score with other tokens in the place of images, as after another preprocessing."""

    def change(prompt: list[int], group: int) -> list[int]:
        before, span, rest = prompt[: SPAN[0]], prompt[slice(*SPAN)], prompt[SPAN[1] :]
        return [*before, *reversed(span), *rest] if with_image(group) else prompt

    return after(lm, drawn, change)


@torch.no_grad()
def other_places(lm: Hub, drawn: Drawn) -> Tensor:
    """Score with images that take one position, as where only one side has positions of its own for them."""
    width = drawn.prompts.shape[1]
    tokens = torch.from_numpy(np.concatenate([drawn.prompts, drawn.tokens], axis=1))
    lengths = torch.from_numpy(drawn.lengths)
    at = torch.arange(tokens.shape[1])
    image = torch.tensor([with_image(int(one)) for one in drawn.group])[:, None]
    inside = (at > width + SPAN[0]) & (at < width + SPAN[1]) & image
    real = at >= (width - lengths)[:, None]
    places = ((real & ~inside).long().cumsum(1) - 1).clamp(min=0)
    logits = _logits(lm, tokens, attention_mask=real.long(), position_ids=places)
    return logits[:, width - 1 : width - 1 + drawn.tokens.shape[1]]


HONEST: dict[str, Make] = {
    "repeat": repeated(BF16),
    "repeat int8": repeated(INT8),
    "repeat lag2": repeated(LAG2),
    "prefill": prefilled(BF16),
    "prefill int8": prefilled(INT8),
    "prefill lag2": prefilled(LAG2),
    "prefill, cache in fp8": prefilled(How(decode="cache")),
    "prefill from step 0": _recorded(prefilled(START)),
    "kept mass, both sides": massed(How(top_p=0.9), kept=True),
    "kept mass, both sides fp8": massed(How("fp8", top_p=0.9), kept=True),
    "kept mass of 1 lag2": massed(LAG2),
    "experts": expert(BF16),
    "experts int8": expert(INT8),
    "experts lag2": expert(LAG2),
    "packs": packs(BF16),
    "packs int8": packs(INT8),
    "packs lag2": packs(LAG2),
    "packs lag2, longest first": packs(LAG2, ordered=True),
    "packs lag2, no index": packs(LAG2, index=False),
    "prompt ids": prompted(_dump(BF16)),
    "prompt ids lag2": prompted(_dump(LAG2)),
    "images": imaged(BF16),
    "images int8": imaged(INT8),
    "images lag2": imaged(LAG2),
}
FACTOR = rope(factor=4.0)
FAULTS: dict[str, tuple[str, Make]] = {
    "dropout, repeat": ("stochastic_forward", repeated(BF16, dropped(0.1))),
    "dropout 0.05 int8, repeat": ("stochastic_forward", repeated(INT8, dropped(0.05))),
    "router noise, repeat": ("stochastic_forward", _only(EXPERTS, repeated(BF16, noisy_router(0.3)))),
    "RoPE factor, repeat": (
        "model_differs",
        _only(ROPE, repeated(BF16, model=lambda f: configured(f, FACTOR))),
    ),
    "decode window, prefill": ("decode_differs", prefilled(How(decode="window"))),
    "decode place, prefill": ("decode_differs", prefilled(How(decode="place"))),
    "RoPE factor, prefill": (
        "model_differs",
        _only(ROPE, prefilled(BF16, model=lambda f: configured(f, FACTOR))),
    ),
    "queries, prefill": (
        "model_differs",
        prefilled(BF16, model=lambda f: scaled(f, ("q_proj", "q_norm", "c_attn"), 1.5)),
    ),
    "norm from step 0, prefill": (
        "model_differs",
        _recorded(prefilled(START, model=lambda f: scaled(f, ("layernorm", "ln_", "norm.w"), 1.2))),
    ),
    "adapter missing, prefill": ("weights_differ", prefilled(BF16, model=lambda f: adapted(f, 0.0))),
    "top-p, kept mass": ("truncated_sampling", massed(How(top_p=0.9))),
    "top-p fp8, kept mass": ("truncated_sampling", massed(How("fp8", top_p=0.9))),
    "router of 4 bits": ("moe_outliers", expert(BF16, model=gates(coarse))),
    "router of other experts": ("weights_differ", expert(BF16, model=gates(lambda x: x.roll(1, 0)))),
    "router noise": ("stochastic_forward", expert(BF16, noisy_router(0.3))),
    "RoPE factor, experts": (
        "model_differs",
        _only(ROPE, expert(BF16, model=lambda f: configured(f, FACTOR))),
    ),
    "packs leak": ("packing_leak", packs(BF16, leak=True)),
    "packs leak int8": ("packing_leak", packs(INT8, leak=True)),
    "packs leak, longest first": ("packing_leak", packs(BF16, leak=True, ordered=True)),
    "packs leak, no index": ("packing_leak", packs(BF16, leak=True, index=False)),
    "penalty 1.2, prompt ids": ("repetition_penalty", prompted(_dump(How(penalty=1.2)))),
    "presence 1, prompt ids": ("repetition_penalty", prompted(_dump(How(presence=1.0)))),
    "other pixels": ("image_differs", imaged(BF16, other_pixels)),
    "other pixels int8": ("image_differs", imaged(INT8, other_pixels)),
    "other places": ("image_differs", imaged(BF16, other_places)),
}
ALSO = {
    "decode window, prefill": ("long_context",),
    "router noise": ("moe_outliers",),
    **dict.fromkeys(("other pixels", "other pixels int8"), ("wrong_context",)),
    "router of other experts": ("moe_outliers", "model_differs"),
    "router of 4 bits": ("quantized_rollout",),
    "norm from step 0, prefill": ("trainer_temperature",),
}
"""Name → other causes that are right, as in sampled.py: the window of decoding acts beyond some position,
and what is said of a context that differs where there are images is their fix."""
TABLE = {f"honest: {name}": ("honest", make) for name, make in HONEST.items()} | FAULTS
