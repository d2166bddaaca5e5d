"""What has to be summed over a dump so that verl's numbers can be told at its end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.ends import Columns, Ends, Ranges, rows
from offpol_diag.crosswalk.limits import UNKNOWN, Piece, Thresholds
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.read import EPS
from offpol_diag.crosswalk.spread import Sample, Samples
from offpol_diag.crosswalk.verl import dropped
from offpol_diag.crosswalk.verl.parts import SAFETY
from offpol_diag.crosswalk.verl.wanted import Source, Wanted, wanted
from offpol_diag.crosswalk.view import View
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Over, Preset, Statistic
from offpol_diag.ratios import OVERFLOW, Level, Ratios


def columns(scene: Scene, presets: tuple[Preset, ...]) -> Columns:
    """Per-sequence columns [S] behind everything the generations of these presets log."""
    found: Columns = {}
    for ours in wanted(presets):
        found |= _gap_columns(View.at(scene, ours.presets[0]))
        if ours.spreads:
            found |= _samples(scene, ours).columns(ours.spreads)
        found |= dropped.columns([View.at(scene, preset) for preset in ours.presets])
    return found


def ranges(scene: Scene, presets: tuple[Preset, ...]) -> Ranges:
    """Extremes behind everything the generations of these presets log."""
    found: Ranges = {}
    for ours in wanted(presets):
        ratios = scene.ratios(ours.presets[0].policy)
        found |= {name: _log_range(ratios, over) for name, over in ours.logs}
        if ours.spreads:
            found |= _samples(scene, ours).ranges(ours.spreads)
    return found


def _log_range(ratios: Ratios, over: Over) -> Ends:
    """Extremes of the log-ratio of rows, bounded nowhere."""
    return rows(ratios.aggregate("ratio", over).values)


# ---------------------------------------------------------------- spreads


def _samples(scene: Scene, ours: Wanted) -> Samples:
    """Every statistic that is spread."""
    n = View.at(scene, ours.presets[0]).n
    return scene.once(
        ("verl samples", ours), lambda: Samples(tuple(_sample(scene, one) for one in ours.sources), n)
    )


def _sample(scene: Scene, source: Source) -> Sample:
    view, make = View.at(scene, source.preset), _raw if source.weights is None else _applied
    return view.ratios.once(("verl sample", source), lambda: make(view, source))


def _raw(view: View, source: Source) -> Sample:
    """Of the raw statistic; spreads that differ in their limits share it."""
    name = source.name
    if source.of_rows:
        return Sample(source.center, source.empty, _level(view.ratios, name, source.over).values)
    if source.over == "segment":
        whole = Piece(view.undivided, _of_turns(name))
        return Sample(source.center, source.empty, pieces=(whole,))
    pieces = tuple(Piece(some, _of_tokens(name), _span(name, some)) for some in view.split)
    return Sample(source.center, source.empty, pieces=pieces)


_SPANS: dict[Statistic | None, Callable[[float], Thresholds]] = {
    None: lambda a: Thresholds(math.exp(-a), math.exp(a)),
    "k1": lambda a: Thresholds(-a, a),
    "k2": lambda a: Thresholds(0.0, a * a / 2),
    "k3": lambda a: Thresholds(0.0, math.expm1(a) - a),
}
"""Between what a statistic lies where |Δ| <= a; None for the weight."""


def _span(name: Statistic | None, view: View) -> Thresholds:
    return _SPANS[name](view.reach) if name in _SPANS and view.reach < SAFETY else UNKNOWN


@cache
def _of_tokens(name: Statistic | None) -> Measure:
    """The statistic of every token, Δ clamped to ±20; without a name its weight."""
    return Measure(f"verl {name}", lambda view: _values(view, name))


def _values(view: View, name: Statistic | None) -> Tensor:
    ratios, safety = view.ratios, None if view.reach < SAFETY else SAFETY
    if name is None:
        return powers.ratio(ratios, safety)
    return ratios.token(name, safety)


@cache
def _of_turns(name: Statistic | None) -> Measure:
    """The statistic of each token's turn."""
    return Measure(f"verl {name} of turns", lambda view: _level(view.ratios, name, "segment").values)


def _level(ratios: Ratios, name: Statistic | None, over: Over) -> Level:
    """Weights before truncation are exp of the log-ratio clamped to ±20 after aggregation."""
    if name is None:
        return ratios.log_ratio(over, SAFETY, "aggregate").map(torch.exp)
    return ratios.aggregate(name, over, SAFETY)


def _applied(view: View, source: Source) -> Sample:
    """The weights that the loss gets; a truncation has no lower bound there."""
    assert view.preset.weight is not None
    raw, masks, high = _sample(view.scene, source.raw), view.preset.weight.action == "mask", source.high
    if raw.rows is not None:
        applied = (
            correction.weigh(view.ratios, view.preset).final.values if masks else raw.rows.clamp(max=high)
        )
        return replace(raw, rows=applied)
    if masks:
        return replace(raw, pieces=tuple(_masked(part, raw) for part in view.parts))
    return replace(raw, pieces=tuple(piece.capped(high) for piece in raw.pieces))


def _masked(part: View, raw: Sample) -> Piece:
    """Weights of tokens after masking, which near ones are not."""
    if part.close:
        return raw.pieces[-1]
    return Piece(part, WEIGHT)


WEIGHT = Measure(
    "verl weight",
    lambda view: correction.weigh(view.ratios, view.preset).final.values,
    lambda view: correction.weight_key(view.preset),
)


# ---------------------------------------------------------------- the gap


GAP_K3 = Measure(
    "verl gap k3",
    lambda view: powers.k3(view.ratios).clamp(max=math.exp(2 * OVERFLOW)),
)


def _gap_columns(view: View) -> Columns:
    """The policy-gap numbers of verl's `compute_offpolicy_metrics`, per numerator policy."""
    n, total = view.n + EPS, view.total(powers.LOG)
    log_train, log_rollout = view.total(powers.TRAIN) / n, view.total(powers.ROLLOUT) / n
    found = {
        "ppl": torch.exp(-log_train),
        "log_ppl": -log_train,
        "rollout_ppl": torch.exp(-log_rollout),
        "rollout_log_ppl": -log_rollout,
        "kl": -total,
        "k3": view.total(GAP_K3),
        "diff": log_rollout - log_train,
        "abs": (log_rollout - log_train).abs(),
        "ratio": torch.exp(log_rollout - log_train),
        "rr": view.total(powers.RATIO_SQUARED),
        "ss": torch.exp(2 * total.clamp(-SAFETY, SAFETY)),
    }
    return {f"verl/{view.preset.policy}/{name}": values for name, values in found.items()}
