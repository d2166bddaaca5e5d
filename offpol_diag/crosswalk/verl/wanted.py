"""Which spreads presets of verl log, of which statistics: the same for every batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

from offpol_diag import correction
from offpol_diag.crosswalk.spread import Spread
from offpol_diag.crosswalk.verl.parts import GENERATIONS, Generation, Part, parts
from offpol_diag.presets import Over, Policy, Preset, Reject, Statistic


@dataclass(frozen=True)
class Source:
    """What a spread is of; under one numerator equal sources have equal numbers.

    Attributes:
        name: the statistic; None for the ratio.
        over: of what.
        center: see `Spread`; so is `empty`.
        weights: what the weights that the loss gets depend on; None for those before truncation or masking.
        high: the upper bound on those.
        preset: the first one that asks.
    """

    name: Statistic | None
    over: Over
    center: float
    empty: bool
    weights: object = None
    high: float = math.inf
    preset: Preset = field(compare=False, kw_only=True)

    @property
    def of_rows(self) -> bool:
        """Whether a row has one value, else tokens have their own."""
        return self.over not in ("token", "segment")

    @property
    def raw(self) -> Source:
        """The same before truncation or masking."""
        return Source(self.name, self.over, self.center, self.empty, preset=self.preset)


@dataclass(frozen=True, eq=False)
class Wanted:
    """What presets of one numerator log.

    Attributes:
        presets: they.
        sources: those of rows first.
        spreads: each once, with the place of its source.
        logs: names of ranges, each with what they are the ends of the log-ratio over.
    """

    presets: tuple[Preset, ...]
    sources: tuple[Source, ...]
    spreads: tuple[tuple[Spread, int], ...]
    logs: tuple[tuple[str, Over], ...]


@cache
def wanted(presets: tuple[Preset, ...]) -> tuple[Wanted, ...]:
    """What presets log, by numerator."""
    found: dict[Policy, list[Preset]] = {}
    for preset in presets:
        found.setdefault(preset.policy, []).append(preset)
    return tuple(_wanted(tuple(ours)) for ours in found.values())


def generation(preset: Preset) -> Generation:
    """How a preset's generation names and splits what it logs."""
    return GENERATIONS[preset.logs or ""]


def _wanted(presets: tuple[Preset, ...]) -> Wanted:
    spreads = {spread: source for preset in presets for spread, source in _spreads(preset)}
    sources = sorted(dict.fromkeys(spreads.values()), key=lambda one: not one.of_rows)
    places = tuple((spread, sources.index(source)) for spread, source in spreads.items())
    logs = {f"{part.spread.key}/log": part.rule.over for preset in presets for part in _of_ratios(preset)}
    logs[f"verl/{presets[0].policy}/g"] = "mean"
    return Wanted(presets, tuple(sources), places, tuple(logs.items()))


def _spreads(preset: Preset) -> Iterator[tuple[Spread, Source]]:
    """What is spread, and the statistic it is of; empty rows of a 2026 rejection statistic do not count."""
    for part in parts(preset, generation(preset)):
        source = _source(preset, part)
        yield part.spread, source
        if part.applied:
            weights, high = correction.weight_key(preset), part.applied.limits.high
            yield part.applied, Source(source.name, source.over, 1.0, True, weights, high, preset=preset)


def _source(preset: Preset, part: Part) -> Source:
    named = isinstance(part.rule, Reject) and generation(preset).divergences
    name = part.rule.statistic if named else None  # type: ignore[union-attr]
    name = "k1" if name == "ratio" else name
    return Source(name, part.rule.over, part.spread.center, part.spread.empty, preset=preset)


def _of_ratios(preset: Preset) -> Iterator[Part]:
    """Spreads of ratios of rows."""
    for part in parts(preset, generation(preset)):
        if part.spread.center and part.rule.over not in ("token", "segment"):
            yield part
