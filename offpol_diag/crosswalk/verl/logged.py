"""From sums to the numbers that verl would have logged, under its names."""

from __future__ import annotations

import math

from offpol_diag.crosswalk.read import Read
from offpol_diag.crosswalk.verl import update
from offpol_diag.crosswalk.verl.parts import GENERATIONS, SAFETY, Generation, Part, reject_parts, weight_part
from offpol_diag.metrics.outcome import SMALLEST_NORM
from offpol_diag.presets import Preset, Reject

Logged = dict[str, float]


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
    named = {generation.prefix + name: value for name, value in found.items()}
    return named | (update.logged(preset, read) if generation.debug else {})


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
    if generation.applied and preset.weight.action == "mask":
        found["rollout_is_oob_ratio"] = read.mean(f"{preset.name}!oob")
    norm = f"{preset.name}|norm"
    if preset.weight.normalize and norm in read.sums:
        mean = read.sums[norm] / read.sums[f"{norm}_units"]
        found["rollout_is_batch_norm_factor"] = mean if mean > SMALLEST_NORM else 1.0
    return found


def _ratio_spread(part: Part, generation: Generation, read: Read) -> Logged:
    """verl's `compute_is_metrics`, for weights and (2025) for rejection ratios."""
    key, rows = part.spread.key, read.sums["rows"]
    of = part.applied.key if part.applied else key
    low, high = read.ranges[f"{of}/x"]
    sequence = part.rule.over in (("sum",) if generation.weight_band else ("sum", "mean"))
    if part.rule.over not in ("token", "segment"):
        smallest, largest = read.ranges[f"{key}/log"]
        low, high = _exp(smallest), _exp(min(largest, SAFETY))
    found = {
        "mean": read.mean(f"{of}/x"),
        "max": high,
        "min": low,
        "ratio_fraction_high": read.sums[f"{key}/high_rows"] / rows if sequence else read.mean(f"{key}/high"),
        "ratio_fraction_low": read.sums[f"{key}/low_rows"] / rows if sequence else read.mean(f"{key}/low"),
        "std": read.std(of, part.spread.center),
        "eff_sample_size": read.ess(of),
        **_per_row(of, rows, read),
        **_rows_beyond(key, rows, read),
    }
    return {f"{part.stem}_{name}": value for name, value in found.items()}


def _per_row(key: str, rows: float, read: Read) -> Logged:
    """The same of the row means."""
    low, high = read.ranges[f"{key}/m"]
    return {
        "seq_mean": read.row_mean(key, rows),
        "seq_std": read.row_std(key, rows),
        "seq_max": high,
        "seq_min": low,
        "seq_max_deviation": read.ranges[f"{key}/dev"][1],
    }


def _rows_beyond(key: str, rows: float, read: Read) -> Logged:
    """How many row means lie beyond the thresholds."""
    return {
        "seq_fraction_high": read.sums[f"{key}/m_high"] / rows,
        "seq_fraction_low": read.sums[f"{key}/m_low"] / rows,
    }


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
        "std": read.std(key, part.spread.center),
        **_per_row(key, rows, read),
        **_rows_beyond(key, rows, read),
        "masked_fraction": read.mean(f"{preset.name}!rule{at}"),
        "seq_masked_fraction": read.sums[f"{preset.name}!rule{at}_rows"] / rows,
    }
    if not two_sided:
        found["fraction_low"] = 0.0
        del found["seq_fraction_low"]
    return {f"{part.stem}_{name}": value for name, value in found.items()}
