"""What verl logs, of three generations: 2025-10 (`mismatch/`), 2025-11 and 2026-01 (`rollout_corr/`).

Read off verl 4424616d, 418f964a and b178a3cd. The whole dump is one trainer batch. Two things to know
before laying
these beside our own numbers: verl clamps log-ratios to ±20, and its std and ESS are of weights clamped to
[1/C, C].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.accumulators import extremes
from offpol_diag.crosswalk.spread import EPS, Columns, Ranges, Read, Spread, Thresholds
from offpol_diag.metrics.outcome import SMALLEST_NORM
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Over, Preset, Reject, Statistic, Weight
from offpol_diag.ratios import OVERFLOW, Level, Ratios

SAFETY = 20.0
Logged = dict[str, float]


@dataclass(frozen=True)
class Generation:
    """How one generation names and splits what it logs.

    Attributes:
        prefix: before every name; `gap` is put before the names of the policy-gap numbers.
        chi2: whether it logs χ².
        veto: whether it logs the veto's fractions.
        divergences: whether rejection is logged per k1/k2/k3 option (2026-01) or as one ratio band.
        weight_band: 2025-10: rejection is a mode of the weights and has no numbers of its own, and
            fractions beyond a threshold are taken over rows for product ratios only, over tokens for
            geometric means.
    """

    prefix: str
    gap: str = ""
    chi2: bool = True
    veto: bool = True
    divergences: bool = False
    weight_band: bool = False


GENERATIONS = {
    "verl-2025-10": Generation("mismatch/", gap="mismatch_", chi2=False, weight_band=True),
    "verl-2025-11": Generation("rollout_corr/"),
    "verl-2026-01": Generation("rollout_corr/", veto=False, divergences=True),
}


@dataclass(frozen=True)
class Part:
    """One spread that a preset logs: under which stem, of which statistic."""

    stem: str
    spread: Spread
    rule: Weight | Reject


def weight_part(preset: Preset, generation: Generation) -> Part | None:
    """The spread of the importance weights, thresholds [1/C, C] unless a lower bound is given."""
    if preset.weight is None:
        return None
    band = (_ratio_rule(preset) if generation.weight_band else None) or preset.weight
    high = band.upper or math.inf
    low = band.lower or 1 / high
    key = f"is/{preset.policy}/{preset.weight.over}/{low:.17g}/{high:.17g}"
    return Part("rollout_is", Spread(key, Thresholds(low, high), 1.0), preset.weight)


def _ratio_rule(preset: Preset) -> Reject | None:
    return next((_in_ratio(rule) for rule in preset.reject if rule.statistic in ("ratio", "k1")), None)


def _in_ratio(rule: Reject) -> Reject:
    """A band of k1 = −Δ in nats as the same band of r."""
    if rule.statistic != "k1":
        return rule
    lower = None if rule.upper is None else math.exp(-rule.upper)
    upper = None if rule.lower is None else math.exp(-rule.lower)
    return replace(rule, statistic="ratio", lower=lower, upper=upper)


def reject_parts(preset: Preset, generation: Generation) -> Iterator[Part]:
    """The spreads of the rejection statistics."""
    if generation.weight_band:
        return
    for rule in preset.reject:
        yield _divergence_part(preset, rule) if generation.divergences else _ratio_part(preset, rule)


def _ratio_part(preset: Preset, rule: Reject) -> Part:
    rule = _in_ratio(rule)
    high = rule.upper or math.inf
    low = rule.lower if rule.lower is not None else 1 / high
    key = f"is/{preset.policy}/{rule.over}/{low:.17g}/{high:.17g}"
    return Part("rollout_rs", Spread(key, Thresholds(low, high), 1.0), rule)


_AS_K1 = {"ratio": "k1"}


def _divergence_part(preset: Preset, rule: Reject) -> Part:
    """verl 2026-01 speaks of −log r where we speak of r: the band is mirrored."""
    name = _AS_K1.get(rule.statistic, rule.statistic)
    limits = _divergence_limits(rule)
    option = f"token_{name}" if rule.over == "token" else f"seq_{rule.over}_{name}"
    key = f"rs/{preset.policy}/{name}/{rule.over}/{limits.low:.17g}/{limits.high:.17g}"
    return Part(f"rollout_rs_{option}", Spread(key, limits, 0.0, empty=False), rule)


def _divergence_limits(rule: Reject) -> Thresholds:
    if rule.statistic == "ratio":
        return Thresholds(
            -math.log(rule.upper or math.inf), -math.log(rule.lower) if rule.lower else math.inf
        )
    if rule.statistic == "k1":
        return Thresholds(-math.inf if rule.lower is None else rule.lower, _or_inf(rule.upper))
    return Thresholds(rule.lower or 0.0, _or_inf(rule.upper))


def _or_inf(bound: float | None) -> float:
    return math.inf if bound is None else bound


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


_K3_OVER = {"token": None, "sum": segments.total, "mean": segments.mean, "max": segments.largest}


def _k3(ratios: Ratios, over: Over) -> Level:
    """K3 with verl's rounding, e^Δ − 1 − Δ, which is all that its smallest values are."""
    d, reduce = ratios.clamped(SAFETY), _K3_OVER[over]
    x = ratios.once("verl k3", lambda: torch.exp(d) - 1.0 - d)
    if reduce is None:
        return Level(x, "token")
    values = reduce(x, ratios.batch.cu_seqlens)
    return Level(torch.where(ratios.batch.lengths > 0, values, 0.0), "sequence")


def _parts(preset: Preset, generation: Generation) -> list[Part]:
    weight = weight_part(preset, generation)
    return [*([weight] if weight else []), *reject_parts(preset, generation)]


def columns(scene: Scene, preset: Preset) -> Columns:
    """Per-sequence columns [S] behind everything this preset's generation logs."""
    generation = GENERATIONS[preset.logs or ""]
    ratios = scene.ratios(preset.policy)
    found = gap_columns(scene, preset)
    for part in _parts(preset, generation):
        level = _level(ratios, part, generation)
        made = ratios.once(part.spread, lambda p=part, x=level: p.spread.columns(x, scene.batch))  # type: ignore[misc]
        found |= {name: _fit(values, scene) for name, values in made.items()}
    return found | _mask_columns(scene, preset, ratios, generation)


def _fit(values: Tensor, scene: Scene) -> Tensor:
    return values if len(values) == scene.batch.sequences else values.expand(scene.batch.sequences)


def ranges(scene: Scene, preset: Preset) -> Ranges:
    """Extremes behind everything this preset's generation logs."""
    generation = GENERATIONS[preset.logs or ""]
    ratios = scene.ratios(preset.policy)
    found: Ranges = {f"verl/{preset.policy}/g": extremes(segments.mean(ratios.delta, scene.batch.cu_seqlens))}
    for part in _parts(preset, generation):
        level = _level(ratios, part, generation)
        key = ("ranges", part.spread.key)
        found |= ratios.once(key, lambda p=part, x=level: p.spread.ranges(x, scene.batch))  # type: ignore[misc]
        if part.spread.center and level.per == "sequence":
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


def logged(preset: Preset, read: Read) -> Logged:
    """What this preset's generation would have logged for the whole dump as one batch."""
    generation = GENERATIONS[preset.logs or ""]
    found = _gap(preset, generation, read)
    weight = weight_part(preset, generation)
    if weight and preset.weight:
        found |= _weight(weight, preset, generation, read)
    if generation.veto:
        found |= _veto(preset, read)
    found |= _rejections(preset, generation, read)
    return {generation.prefix + name: value for name, value in found.items()}


def _gap(preset: Preset, generation: Generation, read: Read) -> Logged:
    rows, key = read.sums["rows"], f"verl/{preset.policy}/"
    low, high = read.ranges[key + "g"]
    found = {
        "training_ppl": read.sums[key + "ppl"] / rows,
        "training_log_ppl": read.sums[key + "log_ppl"] / rows,
        "kl": read.mean(key + "kl"),
        "k3_kl": read.mean(key + "k3"),
        "rollout_ppl": read.sums[key + "rollout_ppl"] / rows,
        "rollout_log_ppl": read.sums[key + "rollout_log_ppl"] / rows,
        "log_ppl_diff": read.sums[key + "diff"] / rows,
        "log_ppl_abs_diff": read.sums[key + "abs"] / rows,
        "log_ppl_diff_max": -low,
        "log_ppl_diff_min": -high,
        "ppl_ratio": read.sums[key + "ratio"] / rows,
    }
    if generation.chi2:
        found |= {"chi2_token": read.mean(key + "rr") - 1, "chi2_seq": read.sums[key + "ss"] / rows - 1}
    return {generation.gap + name: value for name, value in found.items()}


def _weight(part: Part, preset: Preset, generation: Generation, read: Read) -> Logged:
    assert preset.weight is not None
    found = _ratio_spread(part, generation, read)
    if preset.weight.normalize:
        norm = f"{preset.name}|norm"
        mean = read.sums[norm] / read.sums[f"{norm}_units"]
        found["rollout_is_batch_norm_factor"] = mean if mean > SMALLEST_NORM else 1.0
    return found


def _ratio_spread(part: Part, generation: Generation, read: Read) -> Logged:
    """verl's `compute_is_metrics`, for weights and (2025) for rejection ratios."""
    key, rows = part.spread.key, read.sums["rows"]
    low, high = read.ranges[f"{key}/x"]
    sequence = part.rule.over in (("sum",) if generation.weight_band else ("sum", "mean"))
    if part.rule.over != "token":
        smallest, largest = read.ranges[f"{key}/log"]
        low, high = _exp(smallest), _exp(min(largest, SAFETY))
    found = {
        "mean": read.mean(f"{key}/x"),
        "max": high,
        "min": low,
        "ratio_fraction_high": read.sums[f"{key}/high_rows"] / rows if sequence else read.mean(f"{key}/high"),
        "ratio_fraction_low": read.sums[f"{key}/low_rows"] / rows if sequence else read.mean(f"{key}/low"),
        "std": read.std(key),
        "eff_sample_size": read.ess(key),
        "seq_mean": read.row_mean(key, rows),
        "seq_std": read.row_std(key, rows),
        "seq_max": read.ranges[f"{key}/m"][1],
        "seq_min": read.ranges[f"{key}/m"][0],
        "seq_max_deviation": read.ranges[f"{key}/dev"][1],
        "seq_fraction_high": read.sums[f"{key}/m_high"] / rows,
        "seq_fraction_low": read.sums[f"{key}/m_low"] / rows,
    }
    return {f"{part.stem}_{name}": value for name, value in found.items()}


def _exp(x: float) -> float:
    """e^x, infinite where that overflows, as torch has it."""
    return math.exp(x) if x < 709 else math.inf


def _veto(preset: Preset, read: Read) -> Logged:
    return {
        "rollout_is_veto_fraction": read.sums[f"{preset.name}!vetoed"] / read.sums["rows"],
        "rollout_is_catastrophic_token_fraction": read.mean(f"{preset.name}!hits"),
    }


def _rejections(preset: Preset, generation: Generation, read: Read) -> Logged:
    if not preset.reject:
        return {}
    found: Logged = {}
    for i, part in enumerate(reject_parts(preset, generation)):
        found |= (
            _divergence(preset, part, i, read)
            if generation.divergences
            else _ratio_spread(part, generation, read)
        )
    stem = "rollout_is" if generation.weight_band else "rollout_rs"
    found[f"{stem}_masked_fraction"] = read.mean(f"{preset.name}!lost")
    found[f"{stem}_seq_masked_fraction"] = read.sums[f"{preset.name}!lost_rows"] / read.sums["rows"]
    return found


def _divergence(preset: Preset, part: Part, at: int, read: Read) -> Logged:
    """verl 2026-01's `compute_rs_metrics`; sequence fractions are over rows with a token."""
    key, rows = part.spread.key, read.sums["sequences"]
    sequence = isinstance(part.rule, Reject) and part.rule.over != "token"
    two_sided = isinstance(part.rule, Reject) and part.rule.statistic in ("ratio", "k1")
    found = {
        "mean": read.mean(f"{key}/x"),
        "max": read.ranges[f"{key}/x"][1],
        "min": read.ranges[f"{key}/x"][0],
        "fraction_high": read.sums[f"{key}/high_rows"] / rows if sequence else read.mean(f"{key}/high"),
        "fraction_low": read.sums[f"{key}/low_rows"] / rows if sequence else read.mean(f"{key}/low"),
        "std": read.std(key),
        "seq_mean": read.row_mean(key, rows),
        "seq_std": read.row_std(key, rows),
        "seq_max": read.ranges[f"{key}/m"][1],
        "seq_min": read.ranges[f"{key}/m"][0],
        "seq_max_deviation": read.ranges[f"{key}/dev"][1],
        "seq_fraction_high": read.sums[f"{key}/m_high"] / rows,
        "seq_fraction_low": read.sums[f"{key}/m_low"] / rows,
        "masked_fraction": read.mean(f"{preset.name}!rule{at}"),
        "seq_masked_fraction": read.sums[f"{preset.name}!rule{at}_rows"] / rows,
    }
    if not two_sided:
        found["fraction_low"] = 0.0
        del found["seq_fraction_low"]
    return {f"{part.stem}_{name}": value for name, value in found.items()}
