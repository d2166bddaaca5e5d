"""What has to be summed over a dump so that verl's numbers can be told at its end."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.accumulators import extremes
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.spread import EPS, Columns, Ranges, Sample, Spread
from offpol_diag.crosswalk.verl.parts import GENERATIONS, SAFETY, Generation, Part, parts
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Over, Preset, Reject, Statistic, Veto
from offpol_diag.ratios import OVERFLOW, Level, Ratios


def _weights(ratios: Ratios, over: Over) -> Level:
    """verl's weights before truncation: exp of the log-ratio clamped to ±20 after aggregation."""
    if over == "token":
        return Level(powers.ratio(ratios, SAFETY), "token")
    return ratios.log_ratio(over, SAFETY, "aggregate").map(torch.exp)


def _spreads(ratios: Ratios, preset: Preset, generation: Generation) -> Iterator[tuple[Spread, Sample]]:
    """What is spread, and the statistic it is of; empty rows of a 2026 rejection statistic do not count."""
    for part in parts(preset, generation):
        sample = _sample(ratios, part, generation)
        yield part.spread, sample
        if part.applied:
            yield part.applied, _applied(ratios, preset, part.applied, sample.x)


def _sample(ratios: Ratios, part: Part, generation: Generation) -> Sample:
    """Of the raw statistic; spreads that differ in their limits share it."""
    divergence = isinstance(part.rule, Reject) and generation.divergences
    name: Statistic = _divergence(part.rule) if divergence else "ratio"  # type: ignore[arg-type]
    over = part.rule.over

    def make() -> Sample:
        level = _divergences(ratios, name, over) if divergence else _weights(ratios, over)
        return part.spread.sample(level, ratios.batch)

    return ratios.once(("verl sample", divergence, name, over), make)


def _divergence(rule: Reject) -> Statistic:
    return "k1" if rule.statistic == "ratio" else rule.statistic


def _divergences(ratios: Ratios, name: Statistic, over: Over) -> Level:
    if name == "k3" and over in _K3_OVER:
        return _k3(ratios, over)
    return ratios.aggregate(name, over, SAFETY)


def _applied(ratios: Ratios, preset: Preset, spread: Spread, raw: Level) -> Sample:
    """The weights that the loss gets; a truncation has no lower bound there."""
    assert preset.weight is not None
    masks, high = preset.weight.action == "mask", spread.limits.high

    def make() -> Sample:
        final = correction.weigh(ratios, preset).final if masks else raw.map(lambda x: x.clamp(max=high))
        return spread.sample(final, ratios.batch)

    return ratios.once(("verl applied", correction.weight_key(preset), high), make)


_K3_OVER = {"token": None, "sum": segments.total, "mean": segments.mean, "max": segments.largest}


def _k3(ratios: Ratios, over: Over) -> Level:
    """K3 with verl's rounding, e^Δ − 1 − Δ, which is all that its smallest values are."""
    d, reduce = ratios.clamped(SAFETY), _K3_OVER[over]
    x = ratios.once("verl k3", lambda: powers.ratio(ratios, SAFETY) - 1.0 - d)
    if reduce is None:
        return Level(x, "token")
    values = reduce(x, ratios.batch.cu_seqlens)
    return Level(torch.where(ratios.batch.lengths > 0, values, 0.0), "sequence")


def columns(scene: Scene, preset: Preset) -> Columns:
    """Per-sequence columns [S] behind everything this preset's generation logs."""
    generation = GENERATIONS[preset.logs or ""]
    ratios = scene.ratios(preset.policy)
    found = dict(gap_columns(scene, preset))
    for spread, sample in _spreads(ratios, preset, generation):
        found |= ratios.once(spread, lambda s=spread, x=sample: s.columns(x))  # type: ignore[misc]
    return found | _mask_columns(ratios, preset, generation) | _masked_weights(ratios, preset)


def _masked_weights(ratios: Ratios, preset: Preset) -> Columns:
    """Tokens whose weight IcePop sets to 0."""
    if preset.weight is None or preset.weight.action != "mask":
        return {}
    weighed = correction.weigh(ratios, preset)
    outside = weighed.high + weighed.low
    tokens = outside * ratios.batch.lengths if weighed.final.per == "sequence" else outside
    return {f"{preset.name}!oob": tokens}


def ranges(scene: Scene, preset: Preset) -> Ranges:
    """Extremes behind everything this preset's generation logs."""
    generation = GENERATIONS[preset.logs or ""]
    ratios = scene.ratios(preset.policy)
    found: Ranges = {f"verl/{preset.policy}/g": _log_range(ratios, "mean")}
    for spread, sample in _spreads(ratios, preset, generation):
        found |= spread.ranges(sample)
    for part in parts(preset, generation):
        if part.spread.center and part.rule.over not in ("token", "segment"):
            found[f"{part.spread.key}/log"] = _log_range(ratios, part.rule.over)
    return found


def _log_range(ratios: Ratios, over: Over) -> tuple[Tensor, Tensor]:
    """Extremes of the log-ratio of rows, bounded nowhere."""
    return ratios.once(("verl log", over), lambda: extremes(ratios.aggregate("ratio", over).values))


def gap_columns(scene: Scene, preset: Preset) -> Columns:
    """The policy-gap numbers of verl's `compute_offpolicy_metrics`, per numerator policy."""
    ratios = scene.ratios(preset.policy)
    return ratios.once("verl gap", lambda: _gap_columns(ratios))


def _gap_columns(ratios: Ratios) -> Columns:
    batch, n = ratios.batch, ratios.batch.lengths.to(torch.float64) + EPS
    train = batch.rollout if ratios.policy == "rollout" else ratios.train
    log_train = segments.total(train, batch.cu_seqlens) / n
    log_rollout = segments.total(batch.rollout, batch.cu_seqlens) / n
    d, raw = ratios.delta, powers.ratio(ratios)
    total = segments.total(d, batch.cu_seqlens)
    found = {
        "ppl": torch.exp(-log_train),
        "log_ppl": -log_train,
        "rollout_ppl": torch.exp(-log_rollout),
        "rollout_log_ppl": -log_rollout,
        "kl": -total,
        "k3": segments.total(raw.clamp(max=math.exp(2 * OVERFLOW)) - d - 1, batch.cu_seqlens),
        "diff": log_rollout - log_train,
        "abs": (log_rollout - log_train).abs(),
        "ratio": torch.exp(log_rollout - log_train),
        "rr": segments.total(powers.ratio(ratios, SAFETY).square(), batch.cu_seqlens),
        "ss": torch.exp(2 * total.clamp(-SAFETY, SAFETY)),
    }
    return {f"verl/{ratios.policy}/{name}": values for name, values in found.items()}


def _mask_columns(ratios: Ratios, preset: Preset, generation: Generation) -> Columns:
    """Tokens that rejection (not the veto) removes, rule by rule and together; the veto's counts.

    In 2025 a row without a token has a ratio of 1, and is rejected where the band leaves that out.
    """
    of = ("verl lost", preset.reject, generation.divergences), ("verl vetoed", preset.veto)
    lost = ratios.once(of[0], lambda: _lost(ratios, preset, generation))
    found = lost | ratios.once(of[1], lambda: _vetoed(ratios, preset.veto))
    return {f"{preset.name}!{name}": values for name, values in found.items()}


def _vetoed(ratios: Ratios, veto: Veto | None) -> Columns:
    hits = correction.veto_hits(ratios, veto)
    return {"hits": hits, "vetoed": (hits > 0).to(torch.float64)}


def _lost(ratios: Ratios, preset: Preset, generation: Generation) -> Columns:
    n = ratios.batch.lengths.to(torch.float64)
    together = correction.keep(ratios, Preset("", "", preset.policy, reject=preset.reject))
    left = segments.count(together.tokens, ratios.batch.cu_seqlens) if together.tokens is not None else n
    lost = n - left * together.sequences
    lost_rows = lost > 0 if generation.divergences else (lost > 0) | ~together.sequences
    found = {"lost": lost, "lost_rows": lost_rows.to(torch.float64)}
    for i, rule in enumerate(preset.reject if generation.divergences else ()):
        found |= {f"rule{i}{name}": values for name, values in _gone(ratios, rule).items()}
    return found


def _gone(ratios: Ratios, rule: Reject) -> Columns:
    """Tokens that one rule rejects, and rows with one."""
    return ratios.once(("verl gone", rule), lambda: _make_gone(ratios, rule))


def _make_gone(ratios: Ratios, rule: Reject) -> Columns:
    passed, n = correction.passes(ratios, rule), ratios.batch.lengths.to(torch.float64)
    of_rows, flags = passed.per == "sequence", passed.values
    gone = n - (n * flags if of_rows else segments.count(flags, ratios.batch.cu_seqlens))
    return {"": gone, "_rows": (gone > 0).to(torch.float64)}
