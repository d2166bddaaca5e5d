"""What has to be summed over a dump so that verl's numbers can be told at its end."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.accumulators import extremes
from offpol_diag.crosswalk.spread import EPS, Columns, Ranges, Spread
from offpol_diag.crosswalk.verl.parts import GENERATIONS, SAFETY, Generation, Part, parts
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Over, Preset, Reject, Statistic
from offpol_diag.ratios import OVERFLOW, Level, Ratios


def _weights(ratios: Ratios, over: Over) -> Level:
    """verl's weights before truncation: exp of the log-ratio clamped to ±20 after aggregation."""
    make = ratios.log_ratio(over, SAFETY, "aggregate").map
    return ratios.once(("verl weights", over), lambda: make(torch.exp))


def _level(ratios: Ratios, part: Part, generation: Generation) -> Level:
    if isinstance(part.rule, Reject) and generation.divergences:
        name: Statistic = "k1" if part.rule.statistic == "ratio" else part.rule.statistic
        if name == "k3" and part.rule.over in _K3_OVER:
            return _k3(ratios, part.rule.over)
        return ratios.aggregate(name, part.rule.over, SAFETY)
    return _weights(ratios, part.rule.over)


def _spreads(ratios: Ratios, preset: Preset, generation: Generation) -> Iterator[tuple[Spread, Level]]:
    """What is spread, and the statistic it is of; empty rows of a 2026 rejection statistic do not count."""
    for part in parts(preset, generation):
        level = _level(ratios, part, generation)
        yield part.spread, level
        if part.applied:
            yield part.applied, _applied(ratios, preset, level, part.spread.limits.high)


def _applied(ratios: Ratios, preset: Preset, raw: Level, high: float) -> Level:
    """The weights that the loss gets; a truncation has no lower bound there."""
    assert preset.weight is not None
    if preset.weight.action == "mask":
        return correction.weigh(ratios, preset).final
    return raw.map(lambda x: x.clamp(max=high))


_K3_OVER = {"token": None, "sum": segments.total, "mean": segments.mean, "max": segments.largest}


def _k3(ratios: Ratios, over: Over) -> Level:
    """K3 with verl's rounding, e^Δ − 1 − Δ, which is all that its smallest values are."""
    d, reduce = ratios.clamped(SAFETY), _K3_OVER[over]
    x = ratios.once("verl k3", lambda: torch.exp(d) - 1.0 - d)
    if reduce is None:
        return Level(x, "token")
    values = reduce(x, ratios.batch.cu_seqlens)
    return Level(torch.where(ratios.batch.lengths > 0, values, 0.0), "sequence")


def columns(scene: Scene, preset: Preset) -> Columns:
    """Per-sequence columns [S] behind everything this preset's generation logs."""
    generation = GENERATIONS[preset.logs or ""]
    ratios = scene.ratios(preset.policy)
    found = gap_columns(scene, preset)
    for spread, level in _spreads(ratios, preset, generation):
        made = ratios.once(spread, lambda s=spread, x=level: s.columns(x, scene.batch))  # type: ignore[misc]
        found |= {name: _fit(values, scene) for name, values in made.items()}
    return found | _mask_columns(scene, preset, ratios, generation) | _masked_weights(ratios, preset)


def _masked_weights(ratios: Ratios, preset: Preset) -> Columns:
    """Tokens whose weight IcePop sets to 0."""
    if preset.weight is None or preset.weight.action != "mask":
        return {}
    weighed = correction.weigh(ratios, preset)
    outside = weighed.high + weighed.low
    tokens = outside * ratios.batch.lengths if weighed.final.per == "sequence" else outside
    return {f"{preset.name}!oob": tokens}


def _fit(values: Tensor, scene: Scene) -> Tensor:
    return values if len(values) == scene.batch.sequences else values.expand(scene.batch.sequences)


def ranges(scene: Scene, preset: Preset) -> Ranges:
    """Extremes behind everything this preset's generation logs."""
    generation = GENERATIONS[preset.logs or ""]
    ratios = scene.ratios(preset.policy)
    found: Ranges = {f"verl/{preset.policy}/g": extremes(segments.mean(ratios.delta, scene.batch.cu_seqlens))}
    for spread, level in _spreads(ratios, preset, generation):
        key = ("ranges", spread)
        found |= ratios.once(key, lambda s=spread, x=level: s.ranges(x, scene.batch))  # type: ignore[misc]
    for part in parts(preset, generation):
        if part.spread.center and part.rule.over not in ("token", "segment"):
            found[f"{part.spread.key}/log"] = extremes(ratios.aggregate("ratio", part.rule.over).values)
    return found


def gap_columns(scene: Scene, preset: Preset) -> Columns:
    """The policy-gap numbers of verl's `compute_offpolicy_metrics`, per numerator policy."""
    ratios = scene.ratios(preset.policy)
    return ratios.once("verl gap", lambda: _gap_columns(ratios))


def _gap_columns(ratios: Ratios) -> Columns:
    batch, n = ratios.batch, ratios.batch.lengths.to(torch.float64) + EPS
    train = batch.rollout if ratios.policy == "rollout" else ratios.train
    log_train = segments.total(train, batch.cu_seqlens) / n
    log_rollout = segments.total(batch.rollout, batch.cu_seqlens) / n
    d = ratios.delta
    safe = torch.exp(ratios.clamped(SAFETY))
    total = segments.total(d, batch.cu_seqlens)
    found = {
        "ppl": torch.exp(-log_train),
        "log_ppl": -log_train,
        "rollout_ppl": torch.exp(-log_rollout),
        "rollout_log_ppl": -log_rollout,
        "kl": -total,
        "k3": segments.total(torch.exp(d.clamp(max=2 * OVERFLOW)) - d - 1, batch.cu_seqlens),
        "diff": log_rollout - log_train,
        "abs": (log_rollout - log_train).abs(),
        "ratio": torch.exp(log_rollout - log_train),
        "rr": segments.total(safe.square(), batch.cu_seqlens),
        "ss": torch.exp(2 * total.clamp(-SAFETY, SAFETY)),
    }
    return {f"verl/{ratios.policy}/{name}": values for name, values in found.items()}


def _mask_columns(scene: Scene, preset: Preset, ratios: Ratios, generation: Generation) -> Columns:
    """Tokens that rejection (not the veto) removes, rule by rule and together; the veto's counts.

    In 2025 a row without a token has a ratio of 1, and is rejected where the band leaves that out.
    """
    batch = scene.batch
    n = batch.lengths.to(torch.float64)
    gone = [_gone(correction.passes(ratios, rule), batch.cu_seqlens, n) for rule in preset.reject]
    together = correction.keep(ratios, Preset("", "", preset.policy, reject=preset.reject))
    left = segments.count(together.tokens, batch.cu_seqlens) if together.tokens is not None else n
    lost = n - left * together.sequences
    lost_rows = lost > 0 if generation.divergences else (lost > 0) | ~together.sequences
    hits = correction.veto_hits(ratios, preset.veto)
    found = {
        "lost": lost,
        "lost_rows": lost_rows.to(torch.float64),
        "hits": hits,
        "vetoed": (hits > 0).to(torch.float64),
    }
    for i, part in enumerate(gone):
        found |= {f"rule{i}": part, f"rule{i}_rows": (part > 0).to(torch.float64)}
    return {f"{preset.name}!{name}": values for name, values in found.items()}


def _gone(passed: Level, offsets: Tensor, n: Tensor) -> Tensor:
    if passed.per == "sequence":
        return n * ~passed.values
    return n - segments.count(passed.values, offsets)
