"""Dumps with the k likeliest ids of both sides, and with `current_log_probs` of the weights of the old ones.

They are made as those of sampled.py, by engines and trainers of the same models. The engine's lists, and its
log-probs of the sampled tokens, are those of one forward over the finished response.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.doctor.hub import Hub
from benchmarks.doctor.models import engine
from benchmarks.doctor.sampled import (
    MOE,
    Array,
    Drawn,
    Dump,
    Field,
    How,
    Make,
    _only,
    _part,
    adapted,
    capped,
    dropped,
    half,
    noisy_router,
    plain,
    scaled,
    windowed,
)

Score = Callable[[Hub, Drawn], Tensor]
K = (16, 24)
"""Ids that the engine and the trainer list for a token."""


@dataclass(frozen=True)
class Side:
    """How one side writes its numbers.

    Attributes:
        temperature: that divides its logits.
        score: computes the logits.
        model: makes the model of each version; None for the side's own.
        lost: share of the sampled tokens whose ids, the last ones, its softmax lacks.
        top1: whether the column holds the likeliest id's log-prob.
    """

    temperature: float = 1.0
    score: Score = plain
    model: Callable[[Field], Callable[[int], Hub]] | None = None
    lost: float = 0.0
    top1: bool = False

    def known(self, drawn: Drawn) -> int:
        """Return the id from which on it has none."""
        return int(np.quantile(drawn.tokens[drawn.mask], 1 - self.lost)) + 1


BF16 = How()


def engines(field: Field, how: How) -> Callable[[int], Any]:
    """Return the engine of each version of the trainer."""
    return lambda version: half(engine(field.model(field.versions[max(version - how.lag, 0)]), how.precision))


def distributions(field: Field, drawn: Drawn, side: Side, model: Callable[[int], Any]) -> Array:
    """Return the log-probs of all ids at each token of the responses, [S, L, vocabulary]."""
    parts = [np.zeros(0)] * len(drawn.q)
    for version in np.unique(drawn.version):
        rows = np.flatnonzero(drawn.version == version)
        logits = side.score(model(int(version)), drawn.take(rows)) / side.temperature
        known = logits[..., : side.known(drawn)] if side.lost else logits
        for i, one in zip(rows, (logits - known.logsumexp(-1, keepdim=True)).numpy(), strict=True):
            parts[i] = one
    return np.stack(parts)


def listed(how: How = BF16, q: Side | None = None, p: Side | None = None) -> Make:
    """Return a maker of dumps with the lists of both sides, whose temperature is that of sampling."""
    sides = tuple(one or Side(how.temperature) for one in (q, p))

    def make(field: Field) -> Dump:
        drawn, columns, extra = field.drawn(how), [], {}
        models = (engines(field, how), sides[1].model(field) if sides[1].model else field.trainer)
        for name, side, model, k in zip(("rollout", "train"), sides, models, K, strict=True):
            log_p = distributions(field, drawn, side, model)
            known = log_p[..., : side.known(drawn)] if side.lost else log_p
            ids = np.argsort(-known, -1, kind="stable")[..., :k]
            top = np.take_along_axis(known, ids, -1)
            picked = np.take_along_axis(log_p, drawn.tokens[..., None], -1)[..., 0]
            columns.append(np.where(drawn.mask, top[..., 0] if side.top1 else picked, 0.0))
            extra |= {f"{name}_top_ids": ids, f"{name}_top_log_probs": top}
        return Dump(drawn, columns[0], columns[1], how.lag, extra)

    return make


def parts(first: Make, second: Make, share: float) -> Make:
    """Return a maker of dumps of which a part of the rows, and of their lists, is made as `second`."""

    def make(field: Field) -> Dump | None:
        made: list[Dump] = []

        def kept(one: Make) -> Make:
            def make(field: Field) -> Dump | None:
                found = one(field)
                made.extend([found] if found else [])
                return found

            return make

        dump = _part(kept(first), kept(second), share)(field)
        if dump is not None:
            many, width = min(len(one.q) for one in made), dump.drawn.tokens.shape[1]
            some = np.random.default_rng(5).random(many) < share
            for name in made[0].extra:
                pad = [
                    np.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0)))
                    for x in (m.extra[name] for m in made)
                ]
                dump.extra[name] = np.where(some[:, None, None], pad[1][:many], pad[0][:many])
        return dump

    return make


def _later(field: Field, on: int) -> Callable[[int], Hub]:
    return lambda version: field.trainer(min(version + on, len(field.versions) - 1))


def current(
    score: Score = plain, rate: int = 0, minibatches: int = 4, how: How = BF16, named: str = "minibatch"
) -> Make:
    """Return a maker of dumps with `current_log_probs`.

    Args:
        score: how the trainer computes them.
        rate: versions by which the trainer moves from the first minibatch of a step to the last.
        minibatches: of a step.
        how: responses are sampled.
        named: the column of the index of the minibatch; empty for none.
    """

    def make(field: Field) -> Dump:
        drawn = field.drawn(how)
        dump = Dump(drawn, drawn.q.astype(float), field.scored(drawn, how.temperature), how.lag)
        chance = np.random.default_rng(9)
        index = chance.permutation(len(drawn.q)) % minibatches
        moved = np.zeros(drawn.q.shape)
        for at in range(minibatches):
            rows = np.flatnonzero(index == at)
            on = rate * at // (minibatches - 1) if minibatches > 1 else rate
            model = _later(field, on)
            moved[rows] = field.scored(drawn.take(rows), how.temperature, model=model, score=score)
        dump.extra = {"current_log_probs": moved} | ({named: index} if named else {})
        return dump

    return make


T = Side()
HONEST: dict[str, Make] = {
    "lists bf16": listed(),
    "lists fp8": listed(How("fp8")),
    "lists int4": listed(How("int4")),
    "lists lag2": listed(How(lag=2)),
    "lists T0.7": listed(How(temperature=0.7)),
    "lists peaked int4": listed(How("int4", temperature=0.15)),
    "lists peaked lag2": listed(How(temperature=0.15, lag=2)),
    "lists temperatures by row": parts(listed(), listed(How(temperature=0.6, seed=1)), 0.3),
    "current of several minibatches": current(rate=1),
    "current far off": current(rate=3),
    "current after the step": current(rate=3, minibatches=1),
    "current, nothing recorded": current(rate=2, named=""),
    "current fp8": current(rate=1, how=How("fp8")),
}
FAULTS: dict[str, tuple[str, Make]] = {
    "lists, trainer T 0.7": ("trainer_temperature", listed(How(temperature=0.7), p=T)),
    "lists, trainer T 1.2": ("trainer_temperature", listed(How(temperature=1.2), p=T)),
    "lists, trainer T 0.7 int4": ("trainer_temperature", listed(How("int4", temperature=0.7), p=T)),
    "lists, rollout raw T 0.7": ("rollout_raw_logprobs", listed(How(temperature=0.7), q=T)),
    "lists, rollout raw T 1.2 int8": ("rollout_raw_logprobs", listed(How("int8", temperature=1.2), q=T)),
    "lists, part T 0.6": (
        "mixed_temperature",
        parts(listed(), listed(How(temperature=0.6, seed=1), p=T), 0.3),
    ),
    "lists, part T 0.6 raw": (
        "mixed_temperature",
        parts(listed(), listed(How(temperature=0.6, seed=1), q=T), 0.3),
    ),
    "lists, top-1": ("top1_logged", listed(q=Side(top1=True))),
    "lists, top-1 trainer int8": ("top1_logged", listed(How("int8"), p=Side(top1=True))),
    "lists, shard": ("vocabulary_shard", listed(p=Side(lost=0.4))),
    "lists, shard int8": ("vocabulary_shard", listed(How("int8"), p=Side(lost=0.6))),
    "lists, window 16": ("model_differs", listed(p=Side(score=lambda lm, x: windowed(lm, x, 16)))),
    "lists, soft cap": ("model_differs", listed(p=Side(score=capped(6.0)))),
    "lists, head": (
        "weights_differ",
        listed(p=Side(model=lambda f: scaled(f, ("lm_head", "embed_out"), 1.15))),
    ),
    "lists, adapter missing": ("weights_differ", listed(p=Side(model=lambda f: adapted(f, 0.0)))),
    "current with dropout": ("stochastic_forward", current(dropped(0.1), rate=1)),
    "current with dropout 0.05 fp8": ("stochastic_forward", current(dropped(0.05), how=How("fp8"))),
    "current with router noise": ("stochastic_forward", _only(MOE, current(noisy_router(0.3), rate=1))),
    "current with dropout, nothing recorded": (
        "stochastic_forward",
        current(dropped(0.1), rate=1, named=""),
    ),
}
TABLE = {f"honest: {name}": ("honest", make) for name, make in HONEST.items()} | FAULTS
ALSO = {
    "lists, head": ("trainer_temperature",),
    "lists, window 16": ("long_context",),
}
