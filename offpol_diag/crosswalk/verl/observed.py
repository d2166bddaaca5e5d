"""What has to be summed over a dump so that verl's numbers can be told at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.ends import Ends, rows
from offpol_diag.crosswalk.spread import EPS, UNKNOWN, Columns, Piece, Ranges, Sample, Spread, Thresholds
from offpol_diag.crosswalk.verl.parts import GENERATIONS, SAFETY, Generation, Part, parts
from offpol_diag.crosswalk.view import Measure, View
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Over, Preset, Reject, Statistic, Veto
from offpol_diag.ratios import OVERFLOW, Level, Ratios


def columns(scene: Scene, preset: Preset) -> Columns:
    """Per-sequence columns [S] behind everything this preset's generation logs."""
    generation, view = GENERATIONS[preset.logs or ""], View.at(scene, preset)
    found = dict(view.ratios.once("verl gap", lambda: _gap_columns(view)))
    for spread, sample in _spreads(view, generation):
        found |= view.ratios.once(spread, lambda s=spread, x=sample: s.columns(x))  # type: ignore[misc]
    return found | _mask_columns(view, generation) | _masked_weights(view)


def ranges(scene: Scene, preset: Preset) -> Ranges:
    """Extremes behind everything this preset's generation logs."""
    generation, view = GENERATIONS[preset.logs or ""], View.at(scene, preset)
    found: Ranges = {f"verl/{preset.policy}/g": _log_range(view.ratios, "mean")}
    for spread, sample in _spreads(view, generation):
        found |= spread.ranges(sample)
    for part in parts(preset, generation):
        if part.spread.center and part.rule.over not in ("token", "segment"):
            found[f"{part.spread.key}/log"] = _log_range(view.ratios, part.rule.over)
    return found


def _log_range(ratios: Ratios, over: Over) -> Ends:
    """Extremes of the log-ratio of rows, bounded nowhere."""
    return rows(ratios.aggregate("ratio", over).values)


# ---------------------------------------------------------------- spreads


def _spreads(view: View, generation: Generation) -> Iterator[tuple[Spread, Sample]]:
    """What is spread, and the statistic it is of; empty rows of a 2026 rejection statistic do not count."""
    for part in parts(view.preset, generation):
        sample = _sample(view, part, generation)
        yield part.spread, sample
        if part.applied:
            yield part.applied, _applied(view, part.applied, sample)


def _sample(view: View, part: Part, generation: Generation) -> Sample:
    """Of the raw statistic; spreads that differ in their limits share it."""
    name = part.rule.statistic if isinstance(part.rule, Reject) and generation.divergences else None
    name = "k1" if name == "ratio" else name
    over = part.rule.over
    return view.ratios.once(("verl sample", name, over), lambda: _make_sample(view, part.spread, name, over))


def _make_sample(view: View, spread: Spread, name: Statistic | None, over: Over) -> Sample:
    if over == "token":
        each = (Piece(some, _of_tokens(name), _span(name, some)) for some in view.split)
        return spread.of_tokens(tuple(each), view.n)
    if over == "segment":
        return spread.of_tokens((Piece(view.undivided, _of_turns(name)),), view.n)
    return spread.of_rows(_of_rows(view, name, over), view.n)


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


def _of_rows(view: View, name: Statistic | None, over: Over) -> Tensor:
    """The statistic of each row, [S]."""
    return _level(view.ratios, name, over).values


def _level(ratios: Ratios, name: Statistic | None, over: Over) -> Level:
    """Weights before truncation are exp of the log-ratio clamped to ±20 after aggregation."""
    if name is None:
        return ratios.log_ratio(over, SAFETY, "aggregate").map(torch.exp)
    return ratios.aggregate(name, over, SAFETY)


def _applied(view: View, spread: Spread, raw: Sample) -> Sample:
    """The weights that the loss gets; a truncation has no lower bound there."""
    key = "verl applied", correction.weight_key(view.preset), spread.limits.high
    return view.ratios.once(key, lambda: _make_applied(view, spread, raw))


def _make_applied(view: View, spread: Spread, raw: Sample) -> Sample:
    assert view.preset.weight is not None
    masks, high = view.preset.weight.action == "mask", spread.limits.high
    if not raw.pieces:
        rows = (
            correction.weigh(view.ratios, view.preset).final.values
            if masks
            else raw.judged[1].clamp(max=high)
        )
        return spread.of_rows(rows, view.n)
    if masks:
        return spread.of_tokens(tuple(_masked(part, raw) for part in view.parts), view.n)
    return spread.of_tokens(tuple(piece.capped(high) for piece in raw.pieces), view.n)


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


# ---------------------------------------------------------------- what is dropped


def _masked_weights(view: View) -> Columns:
    """Tokens whose weight IcePop sets to 0."""
    preset = view.preset
    if preset.weight is None or preset.weight.action != "mask":
        return {}
    weighed = correction.weigh(view.first.ratios, preset)
    outside = weighed.high + weighed.low
    return {f"{preset.name}!oob": outside * view.n if weighed.final.per == "sequence" else outside}


def _mask_columns(view: View, generation: Generation) -> Columns:
    """Tokens that rejection (not the veto) removes, rule by rule and together; the veto's counts.

    In 2025 a row without a token has a ratio of 1, and is rejected where the band leaves that out.
    """
    preset, some = view.preset, view.first.ratios
    lost = some.once(("verl lost", preset.reject, generation.divergences), lambda: _lost(view, generation))
    found = lost | some.once(("verl vetoed", preset.veto), lambda: _vetoed(some, preset.veto))
    return {f"{preset.name}!{name}": values for name, values in found.items()}


def _vetoed(ratios: Ratios, veto: Veto | None) -> Columns:
    hits = correction.veto_hits(ratios, veto)
    return {"hits": hits, "vetoed": (hits > 0).to(torch.float64)}


def _lost(view: View, generation: Generation) -> Columns:
    preset, some = view.preset, view.first.ratios
    together = correction.keep(some, Preset("", "", preset.policy, reject=preset.reject))
    alone = view.zeros if together.tokens is None else segments.count(~together.tokens, some.batch.cu_seqlens)
    lost = torch.where(together.sequences, alone, view.n)
    lost_rows = lost > 0 if generation.divergences else (lost > 0) | ~together.sequences
    found = {"lost": lost, "lost_rows": lost_rows.to(torch.float64)}
    for i, rule in enumerate(preset.reject if generation.divergences else ()):
        found |= {f"rule{i}{name}": values for name, values in _gone(view, rule).items()}
    return found


def _gone(view: View, rule: Reject) -> Columns:
    """Tokens that one rule rejects, and rows with one."""
    return view.first.ratios.once(("verl gone", rule), lambda: _make_gone(view, rule))


def _make_gone(view: View, rule: Reject) -> Columns:
    some = view.first.ratios
    passed = correction.passes(some, rule)
    failed = ~passed.values
    gone = view.n * failed if passed.per == "sequence" else segments.count(failed, some.batch.cu_seqlens)
    return {"": gone, "_rows": (gone > 0).to(torch.float64)}
