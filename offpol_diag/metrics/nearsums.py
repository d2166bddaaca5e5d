"""The sums over near tokens, made before the presets ask for them, and put where they look.

Nearly all are made of a few power sums (`traced.py`). The others are taken block by block: a block's arrays
stay in the caches, and memory stays low. Whatever is missing the presets make themselves, slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from offpol_diag import losses
from offpol_diag.batch import Batch
from offpol_diag.host import here
from offpol_diag.metrics import method, policyloss, residual, update
from offpol_diag.metrics.cells import cells, told_by
from offpol_diag.metrics.outcome import Outcome, of, token_moments
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.signs import sign_counts
from offpol_diag.metrics.traced import Mixed, Step, Traced, mapped
from offpol_diag.near import Near, neutral
from offpol_diag.presets import Policy, Preset
from offpol_diag.ratios import Ratios

BLOCK = 1 << 16
"""Tokens of a block."""


def prepare(scene: Scene, presets: Sequence[Preset]) -> None:
    """Make the sums of all presets that look at near tokens apart."""
    near, alike = scene.near, kinds(presets, scene.near)
    if near is None or not alike or not large(scene.batch):
        return
    close = scene.apart[1]
    traced = near.once(
        ("traced", alike, len(near.asked)), lambda: Traced.of(scene, close, list(steps(scene, alike)))
    )
    _put(close, traced.found(close.batch))
    _put(close, _by_block(scene, close, traced.rest))
    scene.judge_apart()
    for celled in _alike_cells(near):
        for finer in cells(scene, celled[0])[1:]:
            _put(finer.ratios, _of_cells(scene, near, celled).found(finer.ratios.batch))


def _put(ratios: Ratios, found: Mapping[Policy, Mapping[object, Any]]) -> None:
    for policy, values in found.items():
        ratios.of(policy).put(values)


def _alike_cells(near: Near) -> list[list[Preset]]:
    """The presets that look at cells, by what tells those apart."""
    found: dict[object, list[Preset]] = {}
    for preset in near.celled:
        found.setdefault(told_by(preset), []).append(preset)
    return list(found.values())


def _of_cells(scene: Scene, near: Near, celled: Sequence[Preset]) -> Traced:
    """What the metrics ask of near tokens for some presets."""
    alike = kinds(celled, near)
    asked = (step for kind in alike for step in _of_metrics(scene, kind))
    return near.once(("cells", alike), lambda: Traced.of(scene, scene.apart[1], list(asked)))


def kinds(presets: Sequence[Preset], near: Near | None) -> tuple[Preset, ...]:
    """The presets that look at near tokens apart, as those see them."""
    return tuple(dict.fromkeys(neutral(one) for one in presets if near and near.divides(one)))


def large(batch: Batch) -> bool:
    """Whether blocks pay: on a GPU they do not."""
    return batch.tokens > 2 * BLOCK and here(batch.rollout)


def steps(scene: Scene, kinds: Sequence[Preset]) -> Iterator[Step]:
    """All that `Stack.total` will ask for, and what else was asked for in a rehearsal."""
    for kind in kinds:
        yield from _of_metrics(scene, kind)
    for (policy, key), ask in scene.near.asked.items() if scene.near else ():
        yield (
            policy,
            lambda scene, ratios, key=key, ask=ask: ratios.once(key, lambda: ask(scene, ratios)),  # type: ignore[misc]
        )


def _of_metrics(scene: Scene, kind: Preset) -> Iterator[Step]:
    for make in _asked(scene.batch, kind):
        yield kind.policy, lambda _, ratios, make=make, kind=kind: make(of(ratios, kind), kind)  # type: ignore[misc]


def _asked(batch: Batch, kind: Preset) -> Iterator[Any]:
    yield residual.gap_sums
    if kind.weight is not None:
        yield method.token_span
        yield token_moments
        yield lambda done, kind: done.weight_sum
    if batch.advantages is not None:
        yield sign_counts
        yield lambda done, kind: policyloss.mass_sums(done, kind, weighed=False)
        pooled = losses.LOSSES[kind.loss].pooled and losses.known(batch, kind)  # made of these, per sequence
        yield from (_masses,) if pooled else (policyloss.weighed_sums, update.still_sums)
    if losses.known(batch, kind):
        yield policyloss.kl_sum if losses.LOSSES[kind.loss].pooled else policyloss.clip_sums


def _masses(done: Outcome, kind: Preset) -> object:
    return policyloss.mass_sums(done, kind), policyloss.mass_sums(done, kind, weighed=False)


# ---------------------------------------------------------------- block by block


def _by_block(scene: Scene, close: Ratios, steps: Sequence[Step]) -> dict[Policy, dict[object, Any]]:
    """What some steps find, by numerator."""
    parts: dict[Policy, list[dict[object, Any]]] = {policy: [] for policy, _ in steps}
    blocks = list(_blocks(close, BLOCK)) if steps else []
    for block in blocks:
        for policy, make in steps:
            make(scene, block.of(policy))
        block.slim(2 * block.batch.sequences + 2)
        for policy, found in parts.items():
            found.append(block.of(policy).kept())
        _let_go(block)
    sizes = [block.batch.sequences for block in blocks]
    return {policy: _joined(found, sizes) for policy, found in parts.items()}


def _let_go(block: Ratios) -> None:
    block.forget()
    if block.whole is not None:
        block.whole.forget()


def _blocks(ratios: Ratios, tokens: int) -> Iterator[Ratios]:
    """The same near tokens by spans of whole sequences, each with its own whole."""
    assert ratios.whole is not None
    whole, starts = ratios.whole.batch, ratios.batch.cu_seqlens
    for first, last in spans(starts, tokens):
        own = Ratios(whole.rows(first, last), ratios.policy, ratios.settled)
        yield Ratios(ratios.batch.rows(first, last), ratios.policy, ratios.settled, whole=own)


def spans(starts: Tensor, tokens: int) -> list[tuple[int, int]]:
    """Sequences that begin at `starts` [S+1], about `tokens` tokens at a time: (first, one past last)."""
    wanted = torch.arange(tokens, max(int(starts[-1]), tokens), tokens, device=starts.device)
    cuts = sorted({0, *torch.searchsorted(starts, wanted).tolist(), len(starts) - 1})
    return list(pairwise(cuts))


def _joined(parts: Sequence[Mapping[object, Any]], sizes: Sequence[int]) -> dict[object, Any]:
    """Entries of all blocks whose values are per sequence, one after the other."""

    def join(*values: object) -> Tensor:
        there = [x for x in values if isinstance(x, Tensor)]
        if [x.shape for x in there] != [(size,) for size in sizes]:
            raise Mixed
        return torch.cat(there)

    found = {}
    for key in parts[0]:
        try:
            found[key] = mapped(join, [part[key] for part in parts])
        except (Mixed, KeyError):
            continue
    return found
