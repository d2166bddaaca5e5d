"""Dumps whose faults lie in the sampled tokens or in the model, of small models of real architectures.

Each engine samples with a cache after prompts of several lengths; the trainer scores the responses with its
own forward. A fault is computed as it arises: in the sampler, in the forward, in the prompt, in what is
logged. Every fault has honest look-alikes made in the same way.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from benchmarks.doctor.hub import Hub
from benchmarks.doctor.models import engine, learning_rate, quantised, text_loss
from benchmarks.doctor.rollouts import SAMPLES, Inserter, _batch, _step
from benchmarks.doctor.runs import SEEDS, Path_, Trajectory, normalised
from offpol_diag import DumpWriter

STEPS = (4, 8, 12)
"""Versions of the trainer's weights, one for each step of a dump."""
PROMPTS = (8, 48)
"""Least and greatest length of a prompt."""
Array = np.ndarray[Any, np.dtype[Any]]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class How:
    """How responses are sampled.

    Attributes:
        precision: of the engine.
        lag: versions by which the engine's weights are older.
        temperature, top_p, min_p, penalty, presence: of sampling.
        tool: whether text is inserted into responses.
        draft: whether a draft model proposes tokens.
        decode: what decoding does otherwise than prefill: "cache" (keys and values in fp8), "window" (sees
            the last 24 tokens) or "place" (positions that skip four behind the prompt).
        cap: soft cap of the engine's logits; 0 is none.
        lengths: least and greatest limit of a response.
        prompts: prompts of a step.
        seed: of the prompts.
        steps: of the dump, each with the trainer's weights of that version.
    """

    precision: str = "bf16"
    lag: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    presence: float = 0.0
    tool: bool = False
    draft: bool = False
    decode: str = ""
    cap: float = 0.0
    lengths: tuple[int, int] = (24, 96)
    prompts: int = 10
    seed: int = 0
    steps: tuple[int, ...] = STEPS


@dataclass
class Drawn:
    """Responses: prompts [S, P] with zeros on their left and their lengths, and [S, L] columns."""

    prompts: Array
    lengths: Array
    tokens: Array
    mask: Array
    q: Array
    raw: Array
    top1: Array
    draft: Array
    kept: Array
    ends: Array
    version: Array
    group: Array

    def take(self, rows: Array) -> Drawn:
        """Return some of the responses."""
        return Drawn(**{name: value[rows] for name, value in vars(self).items()})

    @classmethod
    def joined(cls, parts: list[Drawn]) -> Drawn:
        """Concatenate responses, padded on the right; prompts on the left."""
        widest = max(one.tokens.shape[1] for one in parts)
        found = {}
        for name in vars(parts[0]):
            values = [getattr(one, name) for one in parts]
            if values[0].ndim > 1 and name != "prompts":
                values = [
                    np.pad(x, ((0, 0), (0, widest - x.shape[1]), *[(0, 0)] * (x.ndim - 2))) for x in values
                ]
            found[name] = np.concatenate(values)
        return cls(**found)


class Field(Trajectory):
    """A trained model of one architecture, its engines and its trainers."""

    def __init__(self, architecture: str, folder: Path) -> None:
        task, seed = SEEDS[architecture]
        super().__init__(Path_(architecture, task, seed), folder)

    @cached_property
    def draft(self) -> Hub:
        """A draft model: one that is trained for few steps."""

        def made() -> Weights:
            torch.manual_seed(7)
            model = Hub(self.path.architecture, self.task.vocabulary)
            optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
            for step in range(60):
                optimizer.param_groups[0]["lr"] = learning_rate(step, 60)
                _step(model, optimizer, text_loss(model, *_batch(self.task.text(16))))
            return copy.deepcopy(model.state_dict())

        return self.model(self._kept("draft.pt", made))

    def drawn(self, how: How) -> Drawn:
        """Return the responses of all steps."""
        key = hashlib.sha256(repr(how).encode()).hexdigest()[:12]

        def made() -> dict[str, Array]:
            return vars(Drawn.joined([self._step(how, version) for version in how.steps]))

        return Drawn(**self._kept(f"drawn-{key}.pt", made))

    def _step(self, how: How, version: int) -> Drawn:
        seed = int(hashlib.sha256(repr((self.path, version, how.seed)).encode()).hexdigest()[:8], 16)
        chance, self.task.chance = torch.Generator().manual_seed(seed), random.Random(seed)
        rows = how.prompts * SAMPLES
        longest = PROMPTS[1]
        texts = [one[:longest] for one in self.task._pieces(4 * how.prompts) if len(one) > longest]
        lengths = torch.randint(PROMPTS[0], longest + 1, (how.prompts,), generator=chance)
        given = torch.tensor([list(one) for one in texts[: how.prompts]])
        at = torch.arange(longest)
        moved = (at - (longest - lengths[:, None])).clamp(min=0)
        prompts = torch.where(at >= longest - lengths[:, None], given.gather(1, moved), 0)
        prompts, lengths = (x.repeat_interleave(SAMPLES, dim=0) for x in (prompts, lengths))
        low, high = np.log(how.lengths)
        limits = torch.exp(low + (high - low) * torch.rand(rows, generator=chance) ** 0.6).long()
        sampler = half(engine(self.model(self.versions[max(version - how.lag, 0)]), how.precision))
        tool = Inserter(rows, self.task.chance) if how.tool else None
        found = _sampled(
            sampler, prompts, lengths, limits, how, tool, chance, self.draft if how.draft else None
        )
        found |= {"prompts": prompts, "lengths": lengths}
        arrays = {name: value.numpy() for name, value in found.items()}
        group = 1000 * version + np.arange(rows) // SAMPLES
        return Drawn(**arrays, version=np.full(rows, version), group=group)

    def trainer(self, version: int, change: Callable[[Weights], Weights] | None = None) -> Hub:
        """Return the trainer's model, its weights changed."""
        weights = self.versions[version]
        return self.model(change(weights) if change else weights)

    def scored(
        self,
        drawn: Drawn,
        temperature: float = 1.0,
        *,
        model: Callable[[int], Hub] | None = None,
        score: Callable[..., Tensor] | None = None,
        kept: bool = False,
    ) -> Array:
        """Return the trainer's log-probs [S, L]; `score` computes the logits of a batch."""
        found = np.zeros(drawn.q.shape)
        for version in np.unique(drawn.version):
            lm = (model or self.trainer)(int(version))
            for rows in np.array_split(np.flatnonzero(drawn.version == version), 2):
                part = drawn.take(rows)
                logits = (score or plain)(lm, part) / temperature
                if kept:
                    hole = torch.from_numpy(part.kept).scatter(
                        -1, torch.from_numpy(part.tokens)[..., None], True
                    )
                    logits = logits.masked_fill(~hole, -torch.inf)
                pick = torch.from_numpy(part.tokens)[..., None]
                found[rows] = logits.log_softmax(-1).gather(-1, pick).squeeze(-1).numpy()
        return found


def half(model: Any, inputs: bool = False) -> Any:
    """Return an engine of bf16 that computes in float32 and rounds what every layer returns, or is given.

    The one is what decoding does, and the other prefill. Processors without bf16 are ten times as fast so,
    and accelerators accumulate in float32 too.
    """
    model = model.float()

    def cut(x: Any) -> Any:
        return x.bfloat16().float() if isinstance(x, Tensor) and x.is_floating_point() else x

    for module in model.lm.modules():
        if next(module.children(), None) is None and inputs:
            module.register_forward_pre_hook(lambda _, args: tuple(map(cut, args)))
        elif next(module.children(), None) is None:
            module.register_forward_hook(lambda _m, _a, out: cut(out))
    return model


def _logits(lm: Hub, tokens: Tensor, **given: Any) -> Tensor:
    return lm.lm(input_ids=tokens, use_cache=False, **given).logits.float()


class Eighth(transformers.DynamicCache):
    """A cache that holds keys and values in fp8."""

    def update(self, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        """Round them before they are held."""
        keys, values = (x.to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values))
        return super().update(keys, values, *rest, **more)


def _warped(logits: Tensor, how: How, seen: Tensor, came: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits before penalties, and those after temperature and truncation.

    `seen` are ids of prompt and response, as repetition_penalty counts them; `came` those of the response.
    """
    if how.cap:
        logits = how.cap * torch.tanh(logits / how.cap)
    raw = logits
    if how.penalty != 1:
        logits = torch.where(
            seen, torch.where(logits > 0, logits / how.penalty, logits * how.penalty), logits
        )
    logits = (logits - how.presence * came) / how.temperature
    log_p = logits.log_softmax(-1)
    keep = torch.ones_like(log_p, dtype=torch.bool)
    if how.min_p:
        keep &= log_p >= log_p.max(-1, keepdim=True).values + np.log(how.min_p)
    if how.top_p < 1:
        value, order = log_p.sort(dim=-1, descending=True)
        before = value.exp().cumsum(-1) - value.exp()
        keep &= torch.zeros_like(keep).scatter(-1, order, before < how.top_p)
    return raw, logits.masked_fill(~keep, -torch.inf)


@torch.no_grad()
def _sampled(
    model: Any,
    prompts: Tensor,
    lengths: Tensor,
    limits: Tensor,
    how: How,
    tool: Any,
    chance: torch.Generator,
    draft: Any,
) -> dict[str, Tensor]:
    """Sample token by token with a cache, after prompts with zeros on their left that nothing attends to."""
    rows, width = prompts.shape
    longest = int(limits.max())
    attend = (torch.arange(width) >= width - lengths[:, None]).long()
    names = ("tokens", "mask", "q", "raw", "top1", "draft", "kept")
    columns: dict[str, list[Tensor]] = {name: [] for name in names}
    kept = Eighth if how.decode == "cache" else transformers.DynamicCache
    keys, aside = kept(config=model.lm.config), transformers.DynamicCache(config=model.lm.config)
    fresh, places = prompts, (attend.cumsum(1) - 1).clamp(min=0)
    ended, ends = torch.zeros(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
    seen: Tensor | None = None
    pending = torch.zeros(rows, dtype=torch.long)
    for at in range(longest):
        given = {"attention_mask": attend, "position_ids": places}
        if at and how.decode == "window":
            given["attention_mask"] = attend * (torch.arange(attend.shape[1]) >= attend.shape[1] - 24)
        logits = model.lm(fresh, past_key_values=keys, use_cache=True, **given).logits[:, -1].float()
        if seen is None:
            came = torch.zeros(logits.shape, dtype=torch.bool)
            seen = came.scatter(1, prompts, True)
            seen[:, 0] = False
        raw, warped = _warped(logits, how, seen, came)
        log_p = warped.log_softmax(-1)
        drawn = torch.multinomial(log_p.exp(), 1, generator=chance)
        by = log_p.gather(1, drawn)
        if draft is not None:
            theirs = draft.lm(fresh, past_key_values=aside, use_cache=True, **given).logits[:, -1].float()
            other = theirs.log_softmax(-1)
            guess = torch.multinomial(other.exp(), 1, generator=chance)
            ratio = (log_p - other).gather(1, guess).exp().squeeze(1)
            tried = pending < 3  # the fourth token is the engine's own
            taken = tried & (torch.rand(rows, generator=chance) < ratio)
            left = (log_p.exp() - other.exp()).clamp(min=1e-12)
            again = torch.multinomial(left, 1, generator=chance)
            drawn = torch.where(tried[:, None], torch.where(taken[:, None], guess, again), drawn)
            by = torch.where(taken[:, None], other.gather(1, drawn), log_p.gather(1, drawn))
            pending = torch.where(taken, pending + 1, 0)
        own = (tool.silent() if tool else torch.ones(rows, dtype=torch.bool)) & ~ended
        token = torch.where(own, drawn.squeeze(1), tool.inserted() if tool else torch.zeros(rows).long())
        token = torch.where(ended, 0, token)
        pick = token[:, None]
        values = (
            token,
            own,
            log_p.gather(1, pick).squeeze(1),
            raw.log_softmax(-1).gather(1, pick).squeeze(1),
            log_p.max(-1).values,
            by.squeeze(1),
            warped > -torch.inf,
        )
        for name, value in zip(names, values, strict=True):
            columns[name].append(
                value if name in ("tokens", "mask", "kept") else torch.where(own, value, 0.0)
            )
        if tool:
            tool.append(token)
        ends = torch.where(ended, ends, at + 1)
        ended = ended | (own & (token == 0)) | (ends >= limits)
        seen, came = seen.scatter(1, pick, True), came.scatter(1, pick, True)
        fresh, places = pick, (lengths + at + 4 * (how.decode == "place"))[:, None]
        attend = torch.cat([attend, torch.ones(rows, 1, dtype=torch.long)], dim=1)
        if bool(ended.all()):
            break
    if how.top_p == 1 and not how.min_p:
        columns["kept"] = [torch.ones(rows, 1, dtype=torch.bool) for _ in columns["kept"]]
    return {name: torch.stack(value, dim=1) for name, value in columns.items()} | {"ends": ends}


# ------------------------------------------------------------ how the trainer scores


def _beside(drawn: Drawn) -> tuple[Tensor, Tensor, Tensor]:
    """Return prompts and responses without the zeros on the left, [S, P + L], and P of each."""
    both = torch.from_numpy(np.concatenate([drawn.prompts, drawn.tokens], axis=1))
    width, lengths = drawn.prompts.shape[1], torch.from_numpy(drawn.lengths)
    at = (torch.arange(both.shape[1]) + (width - lengths[:, None])).clamp(max=both.shape[1] - 1)
    return both.gather(1, at), lengths, torch.arange(drawn.tokens.shape[1])


def _of_responses(logits: Tensor, lengths: Tensor, at: Tensor) -> Tensor:
    index = (lengths[:, None] - 1 + at)[..., None].expand(-1, -1, logits.shape[-1])
    return logits.gather(1, index)


@torch.no_grad()
def plain(lm: Hub, drawn: Drawn, **given: Any) -> Tensor:
    """Compute the logits of the responses after their prompts."""
    tokens, lengths, at = _beside(drawn)
    return _of_responses(_logits(lm, tokens, **given), lengths, at)


@torch.no_grad()
def padded(lm: Hub, drawn: Drawn, attended: bool, counted: bool) -> Tensor:
    """Score with prompts padded on the left: the zeros attended to, or counted as positions, or neither."""
    width = int(drawn.lengths.max())
    prompts = torch.from_numpy(drawn.prompts[:, -width:])
    both = torch.cat([prompts, torch.from_numpy(drawn.tokens)], dim=1)
    real = torch.arange(both.shape[1]) >= (width - torch.from_numpy(drawn.lengths))[:, None]
    mask = torch.ones_like(both) if attended else real.long()
    places = torch.arange(both.shape[1]).expand_as(both)
    if not counted:
        places = (real.long().cumsum(1) - 1).clamp(min=0)
    logits = _logits(lm, both, attention_mask=mask, position_ids=places)
    return logits[:, width - 1 : width - 1 + drawn.tokens.shape[1]]


@torch.no_grad()
def after(lm: Hub, drawn: Drawn, change: Callable[[list[int], int], list[int]]) -> Tensor:
    """Score after other prompts: `change` of a prompt and its group."""
    prompts = [
        change(p[-n:].tolist(), int(g))
        for p, n, g in zip(drawn.prompts, drawn.lengths, drawn.group, strict=True)
    ]
    width = max(map(len, prompts))
    left = np.array([[0] * (width - len(one)) + one for one in prompts])
    return plain(lm, replace(drawn, prompts=left, lengths=np.array([len(one) for one in prompts])))


@torch.no_grad()
def windowed(lm: Hub, drawn: Drawn, window: int) -> Tensor:
    """Score with a sliding window."""
    tokens, lengths, at = _beside(drawn)
    many = tokens.shape[1]
    i, j = torch.arange(many)[:, None], torch.arange(many)
    hidden = (j > i) | (j <= i - window)
    mask = torch.zeros(1, 1, many, many).masked_fill(hidden, torch.finfo(torch.float32).min)
    return _of_responses(
        _logits(lm, tokens, attention_mask=mask.expand(len(tokens), -1, -1, -1)), lengths, at
    )


@torch.no_grad()
def packed(lm: Hub, drawn: Drawn, many: int, restart: bool = True) -> Tensor:
    """Score responses packed `many` to a row, each attending to those before it."""
    tokens, lengths, at = _beside(drawn)
    found: list[Tensor] = []
    for first in range(0, len(tokens), many):
        some = range(first, min(first + many, len(tokens)))
        whole = [tokens[i, : int(lengths[i]) + int(drawn.ends[i])] for i in some]
        starts = np.concatenate([[0], np.cumsum([len(one) for one in whole])])
        row = torch.cat(whole)[None]
        places = torch.cat([torch.arange(len(one)) for one in whole])[None]
        mask = torch.full((len(row[0]),) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
        given = {
            "attention_mask": mask,
            "position_ids": places if restart else torch.arange(len(row[0]))[None],
        }
        logits = _logits(lm, row, **given)[0]
        for k, i in enumerate(some):
            index = (starts[k] + int(lengths[i]) - 1 + at).clamp(max=len(row[0]) - 1)
            found.append(logits[index])
    return torch.stack(found)


def dropped(rate: float) -> Callable[[Hub, Drawn], Tensor]:
    """Score with dropout behind every attention and feed-forward layer."""

    def score(lm: Hub, drawn: Drawn) -> Tensor:
        hooks = []

        def off(module: Any, args: Any, out: Any) -> Any:
            first, *rest = out if isinstance(out, tuple) else (out,)
            lost = torch.nn.functional.dropout(first, rate)
            return (lost, *rest) if isinstance(out, tuple) else lost

        for name, module in lm.lm.named_modules():
            if name.endswith((".mlp", ".attn", ".self_attn")):
                hooks.append(module.register_forward_hook(off))
        try:
            return plain(lm, drawn)
        finally:
            for hook in hooks:
                hook.remove()

    return score


def noisy_router(size: float) -> Callable[[Hub, Drawn], Tensor]:
    """Score with noise in the inputs of every router."""

    def score(lm: Hub, drawn: Drawn) -> Tensor:
        def jitter(module: Any, args: Any) -> Any:
            x, *rest = args
            return (x * (1 + size * (2 * torch.rand_like(x) - 1)), *rest)

        gates = [m for name, m in lm.lm.named_modules() if name.endswith(".mlp.gate")]
        hooks = [gate.register_forward_pre_hook(jitter) for gate in gates]
        try:
            return plain(lm, drawn)
        finally:
            for hook in hooks:
                hook.remove()

    return score


def capped(size: float) -> Callable[[Hub, Drawn], Tensor]:
    """Score with a soft cap of the final logits."""
    return lambda lm, drawn: size * torch.tanh(plain(lm, drawn) / size)


def configured(trainer: Field, change: Callable[[Any], None]) -> Callable[[int], Hub]:
    """Return trainers whose model is built with another configuration."""

    def model(version: int) -> Hub:
        lm = trainer.trainer(version)
        config = copy.deepcopy(lm.lm.config)
        change(config)
        other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        other.load_state_dict(lm.lm.state_dict(), strict=False)
        lm.lm = other.eval().requires_grad_(False)
        return lm

    return model


def rope(theta: float = 10000.0, factor: float = 1.0) -> Callable[[Any], None]:
    """Return a change of the rotary positions: another base, or stretched linearly."""

    def change(config: Any) -> None:
        given = dict(getattr(config, "rope_parameters", None) or {})
        given["rope_theta"] = theta
        if factor != 1:
            given |= {"rope_type": "linear", "factor": factor}
        config.rope_parameters = given

    return change


def adapted(field: Field, factor: float) -> Callable[[int], Hub]:
    """Return trainers whose steps since version 0 weigh `factor` times as much."""

    def model(version: int) -> Hub:
        old, new = field.versions[0], field.versions[version]
        return field.model({name: old[name] + factor * (new[name] - old[name]) for name in new})

    return model


def rounded(field: Field, precision: str) -> Callable[[int], Hub]:
    """Return trainers whose weights are rounded."""

    def change(weights: Weights) -> Weights:
        return {n: quantised(w, precision) if w.dim() >= 2 else w for n, w in weights.items()}

    return lambda version: field.trainer(version, change)


def scaled(field: Field, words: tuple[str, ...], factor: float) -> Callable[[int], Hub]:
    """Return trainers with some weights, those whose names end so, larger or smaller."""

    def change(weights: Weights) -> Weights:
        return {n: w * factor if any(x in n for x in words) else w for n, w in weights.items()}

    return lambda version: field.trainer(version, change)


# ------------------------------------------------------------ dumps


@dataclass
class Dump:
    """A dump in the making: the responses, both columns and the weights of each row.

    Attributes:
        drawn: the responses.
        q, p: the columns, [S, L].
        lag: of every row.
        extra: further columns.
        without: columns to leave out.
        recorded: further metadata.
    """

    drawn: Drawn
    q: Array
    p: Array
    lag: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    recorded: dict[str, str] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write it as a trainer would."""
        one, many = self.drawn, len(self.drawn.q)
        advantages = normalised(self.rewards)
        columns: dict[str, Any] = {
            "rollout_log_probs": self.q,
            "old_log_probs": self.p,
            "response_mask": one.mask.astype(np.int8),
            "token_ids": one.tokens,
            "group_id": one.group,
            "step": one.version,
            "policy_lag": np.full(many, self.lag),
            "prompt_length": one.lengths,
            "host": [f"host-{i * 7 % 11 % 4}" for i in range(many)],
            "rewards": self.rewards,
            "advantages": advantages,
        }
        columns |= self.extra
        path.parent.mkdir(parents=True, exist_ok=True)
        with DumpWriter(path, provenance={"trainer": "verl"} | self.recorded) as writer:
            for version in np.unique(one.version):
                at = np.flatnonzero(one.version == version)
                given = {n: x for n, x in columns.items() if n not in self.without}
                writer.write(
                    **{n: [x[i] for i in at] if isinstance(x, list) else x[at] for n, x in given.items()}
                )

    @property
    def rewards(self) -> Array:
        """Share of the larger half of the vocabulary among the tokens."""
        high = self.drawn.tokens >= np.median(self.drawn.tokens[self.drawn.mask])
        return (high * self.drawn.mask).sum(1) / np.maximum(self.drawn.mask.sum(1), 1)


Make = Callable[[Field], Dump | None]


def _dump(how: How = How(), column: str = "q", **scoring: Any) -> Make:
    """Return a maker of dumps whose rollout column is `column`; scoring may be a function of the field."""

    def make(field: Field) -> Dump:
        drawn = field.drawn(how)
        given = {name: x(field) if name == "model" else x for name, x in scoring.items()}
        given = {"temperature": how.temperature} | given
        return Dump(drawn, getattr(drawn, column).astype(float), field.scored(drawn, **given), how.lag)

    return make


def _then(make: Make, change: Callable[[Dump], None]) -> Make:
    def changed(field: Field) -> Dump | None:
        dump = make(field)
        if dump is not None:
            change(dump)
        return dump

    return changed


def _exchanged(dump: Dump) -> None:
    dump.q, dump.p = dump.p, dump.q


def _times(factor: float, column: str = "q") -> Callable[[Dump], None]:
    return lambda dump: setattr(dump, column, getattr(dump, column) * factor)


def _mean(column: str) -> Callable[[Dump], None]:
    def change(dump: Dump) -> None:
        x, mask = getattr(dump, column), dump.drawn.mask
        mean = (x * mask).sum(1) / np.maximum(mask.sum(1), 1)
        setattr(dump, column, np.where(mask, mean[:, None], 0.0))

    return change


def _pieces(dump: Dump) -> None:
    """Write the sum of a piece of text at its first token and 0 at the others."""
    chance = np.random.default_rng(3)
    for i, end in enumerate(dump.drawn.ends):
        at = 0
        while at < end:
            many = min(int(chance.integers(1, 4)), int(end) - at)
            dump.q[i, at] = dump.q[i, at : at + many].sum()
            dump.q[i, at + 1 : at + many] = 0
            at += many


def _lost(value: float, share: float, blocks: bool = False) -> Callable[[Dump], None]:
    def change(dump: Dump) -> None:
        chance = np.random.default_rng(4)
        at = chance.random(dump.q.shape) < share
        if blocks:
            at = (
                chance.random((len(dump.q), dump.q.shape[1] // 8 + 1)).repeat(8, 1)[:, : dump.q.shape[1]]
                < share
            )
        dump.q[at & dump.drawn.mask] = value

    return change


def _turns(dump: Dump) -> None:
    """Shift the trainer's column by one token after each insertion."""
    mask = dump.drawn.mask
    for i in range(len(mask)):
        seen = False
        for t in range(mask.shape[1] - 1, 0, -1):
            seen = bool((~mask[i, :t]).any())
            if seen and mask[i, t]:
                dump.p[i, t] = dump.p[i, t - 1]


def _part(first: Make, second: Make, share: float, by_group: bool = False) -> Make:
    """Return a maker of dumps of which a part of the rows is made as `second`."""

    def make(field: Field) -> Dump | None:
        a, b = first(field), second(field)
        if a is None or b is None:
            return None
        many = min(len(a.q), len(b.q))
        chance = np.random.default_rng(5)
        some = chance.random(many) < share
        if by_group:
            groups = np.unique(a.drawn.group[:many])
            some = np.isin(a.drawn.group[:many], groups[chance.random(len(groups)) < share])
        rows = (np.flatnonzero(~some), np.flatnonzero(some))
        drawn = Drawn.joined([a.drawn.take(rows[0]), b.drawn.take(rows[1])])
        width = drawn.tokens.shape[1]
        order = np.argsort(np.concatenate(rows), kind="stable")
        q, p = (
            np.concatenate([np.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in pair])[order]
            for pair in ((a.q[rows[0]], b.q[rows[1]]), (a.p[rows[0]], b.p[rows[1]]))
        )
        return Dump(drawn.take(order), q, p, a.lag)

    return make


def _midway(field: Field) -> Dump:
    """Make an honest dump whose weights were updated during the responses."""
    dump = _dump()(field)
    assert dump is not None
    later = field.scored(dump.drawn, model=lambda v: field.trainer(max(v - 2, 0)))
    cut = np.random.default_rng(6).random(len(dump.q)) * dump.drawn.ends
    dump.p = np.where(np.arange(dump.q.shape[1]) < cut[:, None], later, dump.p)
    return dump


def _few(make: Make, groups: int = 2) -> Make:
    def few(field: Field) -> Dump | None:
        dump = make(field)
        if dump is not None:
            rows = np.flatnonzero(np.isin(dump.drawn.group, np.unique(dump.drawn.group)[:groups]))
            dump.drawn, dump.q, dump.p = dump.drawn.take(rows), dump.q[rows], dump.p[rows]
            dump.extra = {n: x[rows] for n, x in dump.extra.items()}
        return dump

    return few


def _packed(many: int, restart: bool) -> Make:
    def make(field: Field) -> Dump:
        dump = _dump(score=lambda lm, drawn: packed(lm, drawn, many, restart))(field)
        assert dump is not None
        half = [np.array_split(np.flatnonzero(dump.drawn.version == v), 2) for v in STEPS]
        place, pack = np.zeros(len(dump.q), int), np.zeros(len(dump.q), int)
        number = 0
        for rows in (one for pair in half for one in pair):
            for k, i in enumerate(rows):
                place[i], pack[i] = k % many, number + k // many
            number += len(rows)
        dump.extra = {"pack_id": pack, "pack_index": place}
        return dump

    return make


def _only(architectures: str, make: Make) -> Make:
    return lambda field: make(field) if field.path.architecture in architectures.split() else None


def _template(drop: int = 0, end: tuple[int, ...] = (), part: float = 1.0) -> Callable[[Hub, Drawn], Tensor]:
    """Score after prompts without their first tokens, with other last ones, in a part of the groups."""

    def change(prompt: list[int], group: int) -> list[int]:
        if (group * 7919 % 100) / 100 >= part:
            return prompt
        prompt = prompt[min(drop, len(prompt) - 2) :]
        return [*prompt[: len(prompt) - len(end)], *end] if end else prompt

    return lambda lm, drawn: after(lm, drawn, change)


def _mixed_up(steps: tuple[int, ...]) -> Make:
    """Score the responses of some steps after the prompts of others of the step."""

    def make(field: Field) -> Dump:
        dump = _dump()(field)
        assert dump is not None
        drawn = dump.drawn
        for step in steps:
            rows = np.flatnonzero(drawn.version == step)
            moved = np.roll(rows, SAMPLES)
            other = replace(drawn.take(rows), prompts=drawn.prompts[moved], lengths=drawn.lengths[moved])
            dump.p[rows] = field.scored(other)
        return dump

    return make


def _padded_counted(lm: Hub, drawn: Drawn) -> Tensor:
    return padded(lm, drawn, True, True)


BF16, PEAKED, COLD = _dump(), How(temperature=0.15), How(temperature=0.6, seed=1)
FROM_0 = (0, 4, 8, 12)
START = How(steps=FROM_0)
ROPE = "qwen3 llama olmo2 phi qwen3-moe"
"""Architectures with rotary positions that one parameter of the configuration changes."""
MOE = "qwen3-moe"
_peaked = _dump(PEAKED)


def _recorded(make: Make) -> Make:
    """Return a maker of the same dumps that say which number format the engine has."""
    return _then(make, lambda dump: setattr(dump, "recorded", {"rollout_dtype": "bfloat16"}))


HONEST: dict[str, Make] = {
    "bf16": BF16,
    "fp8": _dump(How("fp8")),
    "int8": _dump(How("int8")),
    "int4": _dump(How("int4")),
    "lag1": _dump(How(lag=1)),
    "lag2": _dump(How(lag=2)),
    "T0.7": _dump(How(temperature=0.7)),
    "T1.2": _dump(How(temperature=1.2)),
    "T1.2 int4": _dump(How("int4", temperature=1.2)),
    "top-p": _dump(How(top_p=0.9), kept=True),
    "top-p fp8": _dump(How("fp8", top_p=0.9), kept=True),
    "min-p": _dump(How(min_p=0.1), kept=True),
    "tool": _dump(How(tool=True)),
    "tool int8": _dump(How("int8", tool=True)),
    "tool lag2": _dump(How(tool=True, lag=2)),
    "short": _dump(How(lengths=(3, 12), prompts=16)),
    "short fp8": _dump(How("fp8", lengths=(3, 12), prompts=16)),
    "long": _dump(How(lengths=(100, 220), prompts=4)),
    "long int8": _dump(How("int8", lengths=(100, 220), prompts=4)),
    "small": _few(BF16),
    "small int4": _few(_dump(How("int4")), 3),
    "small lag2": _few(_dump(How(lag=2)), 3),
    "peaked": _peaked,
    "peaked fp8": _dump(replace(PEAKED, precision="fp8")),
    "peaked int4": _dump(replace(PEAKED, precision="int4")),
    "peaked lag2": _dump(replace(PEAKED, lag=2)),
    "draft logged right": _dump(How(draft=True)),
    "temperatures by row": _part(BF16, _dump(COLD), 0.3),
    "midway": _midway,
    "fp8, no ids": _then(_dump(How("fp8")), lambda dump: setattr(dump, "without", ("token_ids",))),
    "from step 0": _recorded(_dump(START)),
    "int8 from step 0": _dump(replace(START, precision="int8")),
    "int4 from step 0": _dump(replace(START, precision="int4")),
    "int4 T0.6 from step 0": _dump(replace(START, precision="int4", temperature=0.6)),
    "peaked from step 0": _recorded(_dump(replace(PEAKED, steps=FROM_0))),
    "lag2 from step 0": _recorded(_dump(replace(START, lag=2))),
    "lag2, no columns": _then(
        _dump(How(lag=2)),
        lambda dump: setattr(dump, "without", ("policy_lag", "prompt_length", "step", "host")),
    ),
}
FAULTS: dict[str, tuple[str, Make]] = {
    "penalty 1.2": ("repetition_penalty", _dump(How(penalty=1.2))),
    "penalty 1.1 fp8": ("repetition_penalty", _dump(How("fp8", penalty=1.1))),
    "presence 1": ("repetition_penalty", _dump(How(presence=1.0))),
    "log 2": ("log_base", _then(BF16, _times(1.4427))),
    "log 10 int8": ("log_base", _then(_dump(How("int8")), _times(0.4343))),
    "log 10 trainer": ("log_base", _then(BF16, _times(0.4343, "p"))),
    "top-1": ("top1_logged", _dump(column="top1")),
    "top-1 int8": ("top1_logged", _dump(How("int8"), "top1")),
    "draft": ("draft_log_probs", _dump(How(draft=True), "draft")),
    "draft fp8": ("draft_log_probs", _dump(How("fp8", draft=True), "draft")),
    "exchanged int8": ("columns_exchanged", _then(_dump(How("int8")), _exchanged)),
    "exchanged int4": ("columns_exchanged", _then(_dump(How("int4")), _exchanged)),
    "exchanged lag2": ("columns_exchanged", _then(_dump(How(lag=2)), _exchanged)),
    "copied mean": ("copied_mean", _then(BF16, _mean("q"))),
    "copied mean trainer": ("copied_mean", _then(_dump(How("fp8")), _mean("p"))),
    "pieces": ("summed_pieces", _then(BF16, _pieces)),
    "pieces int8": ("summed_pieces", _then(_dump(How("int8")), _pieces)),
    "part T 0.6": (
        "mixed_temperature",
        _part(BF16, _dump(How(temperature=0.6, seed=1), temperature=1.0), 0.3),
    ),
    "part T 0.6 raw": ("mixed_temperature", _part(BF16, _dump(How(temperature=0.6, seed=1), "raw"), 0.3)),
    "part T 1.3": (
        "mixed_temperature",
        _part(_dump(How("fp8")), _dump(How("fp8", temperature=1.3, seed=1), temperature=1.0), 0.3, True),
    ),
    "min-p": ("truncated_sampling", _dump(How(min_p=0.1))),
    "top-p": ("truncated_sampling", _dump(How(top_p=0.9))),
    "dropout": ("stochastic_forward", _dump(score=dropped(0.1))),
    "dropout 0.05 fp8": ("stochastic_forward", _dump(How("fp8"), score=dropped(0.05))),
    "router noise": ("stochastic_forward", _only(MOE, _dump(score=noisy_router(0.3)))),
    "padding attended": ("prompt_positions", _dump(score=lambda lm, x: padded(lm, x, True, False))),
    "padding attended and counted": (
        "prompt_positions",
        _dump(score=lambda lm, x: padded(lm, x, True, True)),
    ),
    "padding counted": (
        "prompt_positions",
        _only("gpt-bigcode", _dump(score=lambda lm, x: padded(lm, x, False, True))),
    ),
    "template head": ("wrong_context", _dump(score=_template(drop=6))),
    "template end": ("wrong_context", _dump(score=_template(end=(10, 35, 32)))),
    "template of one kind": ("wrong_context", _dump(score=_template(end=(10, 35, 32), part=0.3))),
    "turn shift": ("off_by_one", _then(_dump(How(tool=True)), _turns)),
    "mixed up 1 of 3": ("wrong_context", _mixed_up((8,))),
    "RoPE base": ("model_differs", _only(ROPE, _dump(model=lambda f: configured(f, rope(1e6))))),
    "RoPE factor": ("model_differs", _only(ROPE, _dump(model=lambda f: configured(f, rope(factor=4.0))))),
    "window 16": ("model_differs", _dump(score=lambda lm, x: windowed(lm, x, 16))),
    "window 48": ("model_differs", _dump(score=lambda lm, x: windowed(lm, x, 48))),
    "packing": ("packing_leak", _packed(4, True)),
    "packing, positions": ("packing_leak", _only(f"{ROPE} gpt-neox gemma3", _packed(4, False))),
    "adapter missing": ("weights_differ", _dump(model=lambda f: adapted(f, 0.0))),
    "adapter twice": ("weights_differ", _dump(model=lambda f: adapted(f, 2.0))),
    "head": ("weights_differ", _dump(model=lambda f: scaled(f, ("lm_head", "embed_out"), 1.15))),
    "queries": (
        "model_differs",
        _dump(model=lambda f: scaled(f, ("q_proj", "q_norm", "c_attn"), 1.5)),
    ),
    "norm": ("model_differs", _dump(model=lambda f: scaled(f, ("layernorm", "ln_", "norm.w"), 1.1))),
    "soft cap": ("model_differs", _dump(score=capped(6.0))),
    "zeros, peaked": ("sentinel", _then(_peaked, _lost(0.0, 0.03))),
    "zeros": ("sentinel", _then(BF16, _lost(0.0, 0.03))),
    "zero blocks, peaked": ("wrong_mask", _then(_peaked, _lost(0.0, 0.05, True))),
    "model, peaked": ("model_differs", _dump(PEAKED, score=lambda lm, x: windowed(lm, x, 16))),
    "RoPE base from step 0": (
        "model_differs",
        _only(ROPE, _recorded(_dump(START, model=lambda f: configured(f, rope(1e6))))),
    ),
    "RoPE factor from step 0": (
        "model_differs",
        _only(ROPE, _recorded(_dump(START, model=lambda f: configured(f, rope(factor=4.0))))),
    ),
    "RoPE factor from step 0, nothing recorded": (
        "model_differs",
        _only(ROPE, _dump(START, model=lambda f: configured(f, rope(factor=4.0)))),
    ),
    "window 16 from step 0": (
        "model_differs",
        _recorded(_dump(START, score=lambda lm, x: windowed(lm, x, 16))),
    ),
    "queries from step 0": (
        "model_differs",
        _recorded(_dump(START, model=lambda f: scaled(f, ("q_proj", "q_norm", "c_attn"), 2.0))),
    ),
    "norm from step 0": (
        "model_differs",
        _recorded(_dump(START, model=lambda f: scaled(f, ("layernorm", "ln_", "norm.w"), 1.2))),
    ),
    "adapter missing from step 0": (
        "weights_differ",
        _recorded(_dump(START, model=lambda f: adapted(f, 0.0))),
    ),
    "template head from step 0": ("wrong_context", _recorded(_dump(START, score=_template(drop=6)))),
    "adapter missing, peaked": ("weights_differ", _dump(PEAKED, model=lambda f: adapted(f, 0.0))),
}
"""Name → the cause, and how the dump is made; None where an architecture has no such fault."""
ALSO = {
    "head": ("trainer_temperature",),
    "norm": ("trainer_temperature",),
    **dict.fromkeys(("window 16", "window 48", "window 16 from step 0", "model, peaked"), ("long_context",)),
}
"""Name → other causes that are right: a larger head or last norm scales the logits as a temperature does, and
a window is another model beyond some position."""


TABLE = {f"honest: {name}": ("honest", make) for name, make in HONEST.items()} | FAULTS


def dumps(
    architecture: str,
    folder: Path,
    wanted: Callable[[str, str], bool] = lambda name, cause: True,
    table: Mapping[str, tuple[str, Make]] | None = None,
) -> Iterator[tuple[str, str, Path]]:
    """Make the wanted dumps of a table, or all of this file; yield name, cause and path."""
    made = Field(architecture, folder)
    for name, (cause, make) in (TABLE if table is None else table).items():
        if not wanted(name, cause):
            continue
        path = folder / "dumps" / architecture / f"{name.replace(' ', '_').replace(',', '')}.parquet"
        none = path.with_suffix(".none")
        if not path.exists() and not none.exists():
            torch.manual_seed(11)
            dump = make(made)
            path.parent.mkdir(parents=True, exist_ok=True)
            if dump is None:
                none.touch()
            else:
                dump.write(path)
        if path.exists():
            yield name, cause, path


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for one in sys.argv[2:] or SEEDS:
        for name, _, path in dumps(one, Path(sys.argv[1])):
            print(one, name, path.name, flush=True)
