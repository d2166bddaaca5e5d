"""The sums over near tokens, made block by block: a block's arrays stay in the caches, and memory stays low.

What is found is put where the presets look for it. Whatever is missing there they make themselves, slower.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from offpol_diag import losses
from offpol_diag.batch import Batch
from offpol_diag.host import here
from offpol_diag.metrics import method, policyloss, residual, update
from offpol_diag.metrics.outcome import Outcome, of
from offpol_diag.metrics.scene import Scene
from offpol_diag.near import Near, neutral, splits
from offpol_diag.presets import Policy, Preset
from offpol_diag.ratios import Ratios

BLOCK = 1 << 16
"""Tokens of a block."""


def prepare(scene: Scene, presets: Sequence[Preset]) -> None:
    """Make the sums of all presets that look at near tokens apart."""
    split = [preset for preset in presets if scene.near and splits(preset, scene.near.radius)]
    if not split or scene.near is None or not large(scene.batch):
        return
    close = scene.parts(split[0])[1][0]
    kinds = list(dict.fromkeys(map(neutral, split)))
    found: dict[Policy, list[dict[object, Any]]] = {policy: [] for policy in _numerators(kinds, scene.near)}
    blocks, asked = list(_blocks(close, BLOCK)), list(scene.near.asked.items())
    for block in blocks:
        for kind in kinds:
            _make(block.of(kind.policy), kind)
        for (policy, key), make in asked:
            _ask(scene, block.of(policy), key, make)
        block.slim(2 * block.batch.sequences + 2)
        for policy, parts in found.items():
            parts.append(block.of(policy).kept())
        _let_go(block)
    sizes = [block.batch.sequences for block in blocks]
    for policy, parts in found.items():
        close.of(policy).put(_joined(parts, sizes))


def _let_go(block: Ratios) -> None:
    block.forget()
    if block.whole is not None:
        block.whole.forget()


def _numerators(kinds: Sequence[Preset], near: Near) -> list[Policy]:
    return list(dict.fromkeys((*(kind.policy for kind in kinds), *(policy for policy, _ in near.asked))))


def large(batch: Batch) -> bool:
    """Whether blocks pay: on a GPU they do not."""
    return batch.tokens > 2 * BLOCK and here(batch.rollout)


def _ask(scene: Scene, ratios: Ratios, key: object, make: Callable[[Any, Any], object]) -> None:
    ratios.once(key, lambda: make(scene, ratios))


def _make(ratios: Ratios, kind: Preset) -> None:
    """Ask for all that `Pieces.total` will ask for."""
    done = of(ratios, kind)
    for make in _asked(ratios, kind):
        make(done, kind)


def _asked(ratios: Ratios, kind: Preset) -> Iterator[Callable[[Outcome, Preset], object]]:
    yield residual.gap_sums
    if kind.weight is not None:
        yield method.token_span
    if ratios.batch.advantages is not None:
        yield from (method.sign_counts, policyloss.weighed_sums, update.still_sums)
    if losses.known(ratios.batch, kind):
        yield policyloss.clip_sums


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


# ---------------------------------------------------------------- joining what blocks found


class _Apart(ValueError):
    """What is not per sequence."""


def _joined(parts: Sequence[Mapping[object, Any]], sizes: Sequence[int]) -> dict[object, Any]:
    """Entries of all blocks whose values are per sequence, one after the other."""
    found = {}
    for key in parts[0]:
        try:
            found[key] = _join([part[key] for part in parts], sizes)
        except _Apart:
            continue
    return found


def _join(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if any(x.shape != (size,) for x, size in zip(values, sizes, strict=True)):
            raise _Apart
        return torch.cat(list(values))
    if isinstance(first, dict):
        return {name: _join([x[name] for x in values], sizes) for name in first}
    if isinstance(first, tuple):
        return tuple(_join(column, sizes) for column in zip(*values, strict=True))
    if is_dataclass(first) and not isinstance(first, Outcome | Ratios):
        names = [field.name for field in fields(first)]
        make: Any = type(first)
        return make(**{name: _join([getattr(x, name) for x in values], sizes) for name in names})
    raise _Apart
