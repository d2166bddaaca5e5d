"""verl: what four generations log (2025-10 `mismatch/`; 2025-11, 2026-01 and 2026-03 `rollout_corr/`); keys.

Logged numbers are read off verl 4424616d, 418f964a, b178a3cd and 1dda039b. Two things to know before laying
these beside our own: verl clamps log-ratios to ±20, and its std and ESS are of weights clamped to [1/C, C]
([0, C] since 2026-03). Its masked mean divides by (Σmask + 1e-8), which is reproduced.

Of the keys there are three generations, and those of its fork for Flash-RL. Since 0.7.1 its k1 bounds are
compared with −Δ, so bounds [lo, hi] on r are written "1/hi_1/lo". A threshold is always a quoted string: YAML
reads 0.5_2 as 0.52.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers import schema, verl_sums
from offpol_diag.trainers.base import EPS, SAFETY, SMALLEST_NORM, Columns, Log, Ranges, Read, std
from offpol_diag.trainers.config import (
    IDLE_HIGH,
    IDLE_LOW,
    ClipKeys,
    Habits,
    Parts,
    Said,
    Settings,
    Snippet,
    Trainer,
    cannot,
    clip_remarks,
    clip_settings,
    no_dual_clip,
    remarks,
)
from offpol_diag.trainers.schema import yaml_and_hydra
from offpol_diag.trainers.verl_sums import GENERATIONS, Generation, Part, reject_parts, weight_part

if TYPE_CHECKING:
    from offpol_diag.trainers.view import View

Logged = dict[str, float]
Names = dict[str, str]


class Verl(Log):
    """One generation; its sums and names follow from its presets, not from rows."""

    def __init__(self, name: str) -> None:
        super().__init__(name, (), (), ())

    def columns(self, view: View) -> tuple[Columns, Ranges]:
        """Compute the summands and extremes under one preset."""
        return verl_sums.columns(view)

    def logged(self, preset: Preset, read: Read) -> Logged:
        """Return name → value that this generation would have logged for the dump as one batch."""
        return _logged(preset, read)

    def names(self) -> Mapping[str, str]:
        """Return logged name → meaning."""
        return _names(self.name)


def _logged(preset: Preset, read: Read) -> Logged:
    """Return name → value that the preset's generation would have logged for the dump as one batch."""
    generation = GENERATIONS[preset.logs or ""]
    found = _gap(preset, generation, read)
    weight = weight_part(preset, generation)
    if weight and preset.weight:
        found |= _weight(weight, preset, generation, read)
    if generation.veto:
        found |= _veto(preset, read)
    found |= _rejections(preset, generation, read)
    named = {generation.prefix + name: value for name, value in found.items()}
    return named | (_of_update(preset, read) if generation.debug else {})


def _gap(preset: Preset, generation: Generation, read: Read) -> Logged:
    rows, key = read.sums["rows"], f"verl/{preset.policy}/"
    low, high = read.ranges[key + "g"]
    found = {
        "training_ppl": read.sums[key + "ppl"] / rows,
        "training_log_ppl": read.sums[key + "log_ppl"] / rows,
        "kl": _mean(read, key + "kl"),
        "k3_kl": _mean(read, key + "k3"),
        "rollout_ppl": read.sums[key + "rollout_ppl"] / rows,
        "rollout_log_ppl": read.sums[key + "rollout_log_ppl"] / rows,
        "log_ppl_diff": read.sums[key + "diff"] / rows,
        "log_ppl_abs_diff": read.sums[key + "abs"] / rows,
        "log_ppl_diff_max": -low,
        "log_ppl_diff_min": -high,
        "ppl_ratio": read.sums[key + "ratio"] / rows,
    }
    if generation.chi2:
        found |= {"chi2_token": _mean(read, key + "rr") - 1, "chi2_seq": read.sums[key + "ss"] / rows - 1}
    return {generation.gap + name: value for name, value in found.items()}


def _weight(part: Part, preset: Preset, generation: Generation, read: Read) -> Logged:
    assert preset.weight is not None
    found = _ratio_spread(part, generation, read)
    if generation.applied and preset.weight.action == "mask":
        found["rollout_is_oob_ratio"] = _mean(read, f"{preset.name}!oob")
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
        "mean": _mean(read, f"{of}/x"),
        "max": high,
        "min": low,
        "ratio_fraction_high": read.sums[f"{key}/high_rows"] / rows
        if sequence
        else _mean(read, f"{key}/high"),
        "ratio_fraction_low": read.sums[f"{key}/low_rows"] / rows if sequence else _mean(read, f"{key}/low"),
        "std": _std(read, of, part.spread.center),
        "eff_sample_size": _ess(read, of),
        **_per_row(of, rows, read),
        **_rows_beyond(key, rows, read),
    }
    return {f"{part.stem}_{name}": value for name, value in found.items()}


def _per_row(key: str, rows: float, read: Read) -> Logged:
    """Return verl's statistics of the row means."""
    low, high = read.ranges[f"{key}/m"]
    return {
        "seq_mean": _row_mean(read, key, rows),
        "seq_std": _row_std(read, key, rows),
        "seq_max": high,
        "seq_min": low,
        "seq_max_deviation": read.ranges[f"{key}/dev"][1],
    }


def _rows_beyond(key: str, rows: float, read: Read) -> Logged:
    """Return the shares of row means beyond the thresholds."""
    return {
        "seq_fraction_high": read.sums[f"{key}/m_high"] / rows,
        "seq_fraction_low": read.sums[f"{key}/m_low"] / rows,
    }


def _exp(x: float) -> float:
    """Return e^x, infinite on overflow as in torch."""
    return math.exp(x) if x < 709 else math.inf


def _veto(preset: Preset, read: Read) -> Logged:
    return {
        "rollout_is_veto_fraction": read.sums[f"{preset.name}!vetoed"] / read.sums["rows"],
        "rollout_is_catastrophic_token_fraction": _mean(read, f"{preset.name}!hits"),
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
    found[f"{stem}_masked_fraction"] = _mean(read, f"{preset.name}!lost")
    found[f"{stem}_seq_masked_fraction"] = read.sums[f"{preset.name}!lost_rows"] / read.sums["rows"]
    return found


def _divergence(preset: Preset, part: Part, at: int, read: Read) -> Logged:
    """verl 2026-01's `compute_rs_metrics`; sequence fractions are over rows with a token."""
    key, rows = part.spread.key, read.sums["sequences"]
    sequence = isinstance(part.rule, Reject) and part.rule.over != "token"
    two_sided = isinstance(part.rule, Reject) and part.rule.statistic in ("ratio", "k1")
    found = {
        "mean": _mean(read, f"{key}/x"),
        "max": read.ranges[f"{key}/x"][1],
        "min": read.ranges[f"{key}/x"][0],
        "fraction_high": read.sums[f"{key}/high_rows"] / rows if sequence else _mean(read, f"{key}/high"),
        "fraction_low": read.sums[f"{key}/low_rows"] / rows if sequence else _mean(read, f"{key}/low"),
        "std": _std(read, key, part.spread.center),
        **_per_row(key, rows, read),
        **_rows_beyond(key, rows, read),
        "masked_fraction": _mean(read, f"{preset.name}!rule{at}"),
        "seq_masked_fraction": read.sums[f"{preset.name}!rule{at}_rows"] / rows,
    }
    if not two_sided:
        found["fraction_low"] = 0.0
        del found["seq_fraction_low"]
    return {f"{part.stem}_{name}": value for name, value in found.items()}


# ---------------------------------------------------------------- sums read back


def _mean(read: Read, column: str) -> float:
    """Return verl's masked mean over tokens."""
    return read.sums[column] / (read.sums["tokens"] + EPS)


def _std(read: Read, key: str, center: float = 0.0) -> float:
    """Return the standard deviation of the clamped statistic over tokens; 0 for one token.

    From the sums about the center where there are some, so that little cancels; verl's means divide by
    n + 1e-8, which the last two terms make up for.
    """
    n = read.sums["tokens"]
    if n < 2:
        return 0.0
    if f"{key}/cd" not in read.sums:
        mean = _mean(read, f"{key}/c")
        return math.sqrt(max(_mean(read, f"{key}/cc") - mean * mean, 0.0))
    off, short = _mean(read, f"{key}/c1"), EPS / (n + EPS)
    about = _mean(read, f"{key}/cd") - off * off
    return math.sqrt(max(about + 2 * center * off * short + center**2 * (1 - short) * short, 0.0))


def _ess(read: Read, key: str) -> float:
    """1 / E[(w/E w)²] of the clamped weights, over tokens."""
    normalised = _mean(read, f"{key}/cc") / (_mean(read, f"{key}/c") + EPS) ** 2
    return 1.0 / normalised if normalised > 0 else math.nan


def _row_mean(read: Read, key: str, rows: float) -> float:
    """Mean over rows of the row means."""
    return read.sums[f"{key}/m"] / rows


def _row_std(read: Read, key: str, rows: float) -> float:
    """Standard deviation over rows of the row means (n − 1); 0 for one row."""
    if rows < 2:
        return 0.0
    first, second = read.sums[f"{key}/m1"], read.sums[f"{key}/m2"]
    return math.sqrt(max(second - first * first / rows, 0.0) / (rows - 1))


# ---------------------------------------------------------------- the update


def _of_update(preset: Preset, read: Read) -> Logged:
    """`training/` of decoupled presets, whose old policy the trainer computed; `actor/` with its columns."""
    return (_probabilities(read) if preset.policy == "old" else {}) | _actor(preset, read)


def _probabilities(read: Read) -> Logged:
    """|π_old − π_rollout| over tokens, from the sums that the policy gap has made."""
    n, sums = read.sums["tokens"], read.sums
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": read.ranges["pd"][1],
        "training/rollout_probs_diff_mean": sums["pd"] / n,
        "training/rollout_probs_diff_std": std(sums["pd"], sums["pdd"], n),
        "training/rollout_actor_probs_pearson_corr": _pearson(sums, n),
    }


def _pearson(sums: dict[str, float], n: float) -> float:
    """Return the Pearson correlation of both probabilities; NaN if one does not vary."""
    p, q = sums["p"] / n, sums["q"] / n
    of_p, of_q = sums["pp"] / n - p * p, sums["qq"] / n - q * q
    return (sums["pq"] / n - p * q) / math.sqrt(of_p * of_q) if of_p > 0 and of_q > 0 else math.nan


_ACTOR = {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "clipped_lower", "actor/ppo_kl": "kl"}


def _actor(preset: Preset, read: Read) -> Logged:
    """Return `actor/` metrics over the tokens kept; empty if the dump has no update.

    REINFORCE clips nothing, and logs no share of it.
    """
    kept = read.sums[f"{preset.name}|kept"] + EPS
    clips = preset.loss != "reinforce"
    found = {name: f"{preset.name}|{column}" for name, column in _ACTOR.items() if clips or column == "kl"}
    return {name: read.sums[column] / kept for name, column in found.items() if column in read.sums}


_MASK = "over tokens that rejection leaves; of the dump's current policy, where verl averages mini-batches"

# ---------------------------------------------------------------- what each name means

UPDATE = {
    "training/rollout_probs_diff_valid": "1: there was a token to compare.",
    "training/rollout_probs_diff_max": "Largest |π_old − π_rollout| of a sampled token: probabilities, not "
    "logs. Decoupled runs only, as all of training/rollout_*.",
    "training/rollout_probs_diff_mean": "Mean |π_old − π_rollout| over tokens: probabilities, so unlikely "
    "tokens, which carry the mismatch, hardly show.",
    "training/rollout_probs_diff_std": "Standard deviation (n − 1) of |π_old − π_rollout| over tokens.",
    "training/rollout_actor_probs_pearson_corr": "Correlation of the two probabilities over tokens; near 1 "
    "for any two policies that agree on which tokens are sure.",
    "actor/pg_clipfrac": f"Share where the clipped term of the PPO loss is the larger one, {_MASK}.",
    "actor/pg_clipfrac_lower": f"Share where A < 0 and the dual clip decides, {_MASK}.",
    "actor/ppo_kl": f"Mean log π_anchor − log π_θ, nats, the anchor being π_old (π_rollout in bypass), "
    f"{_MASK}: it may be negative. PPO and CISPO bound it to ±20 per token; REINFORCE and GSPO do not.",
}
"""Name → what it means."""

_ROWS = "over all rows of the batch, each once; one without a token counts as {}"

_GAP = {
    "training_ppl": f"e^(−mean log π_train) of a row, mean {_ROWS.format(1)}; not the perplexity of all "
    "tokens.",
    "training_log_ppl": f"−mean log π_train of a row, mean {_ROWS.format(0)}; nats.",
    "kl": "Mean over tokens of log π_rollout − log π_train, nats (k1): unbounded, and it may be negative.",
    "k3_kl": "Mean over tokens of r − 1 − log r. Neither r nor the result is bounded: one token can decide "
    "it.",
    "rollout_ppl": f"e^(−mean log π_rollout) of a row, mean {_ROWS.format(1)}.",
    "rollout_log_ppl": f"−mean log π_rollout of a row, mean {_ROWS.format(0)}; nats.",
    "log_ppl_diff": "Mean log π_rollout − mean log π_train of a row (verl's docs have the sign the other "
    f"way), mean {_ROWS.format(0)}; nats.",
    "log_ppl_abs_diff": f"|log_ppl_diff| of a row, mean {_ROWS.format(0)}; nats.",
    "log_ppl_diff_max": "Largest log_ppl_diff of a row: where the trainer finds a text least likely; nats.",
    "log_ppl_diff_min": "Smallest log_ppl_diff of a row, nats.",
    "ppl_ratio": f"Perplexity of π_train over that of π_rollout, row by row, mean {_ROWS.format(1)}; a mean "
    "of ratios, not the ratio of means.",
}

_CHI2 = {
    "chi2_token": "Mean over tokens of r², log r bounded to ±20, minus 1; below 0 where the sample lacks "
    "the tail.",
    "chi2_seq": "The squared product of r over a row, its log bounded to ±20 before squaring, minus 1; mean "
    f"{_ROWS.format('r = 1')}. It cannot exceed e^40 ≈ 2.35e17, and sits there on long rows.",
}

_VETO = {
    "rollout_is_veto_fraction": "Rows with a token whose unbounded r is below the veto threshold, over all "
    "rows. Logged as 0 where there is no veto.",
    "rollout_is_catastrophic_token_fraction": "Tokens whose unbounded r is below the veto threshold, over "
    "all tokens.",
}


def _spread(what: str, clamp: str, level: str) -> Names:
    """verl's `compute_is_metrics`: of weights, or (2025) of the ratio that rejects."""
    return {
        "mean": f"Mean over tokens of {what}; at sequence level each row thus counts by its length.",
        "max": f"Largest of {what}; {level} e^(log-ratio bounded above to 20) before truncation.",
        "min": f"Smallest of {what}; {level} e^(log-ratio) before truncation, bounded nowhere.",
        "ratio_fraction_high": "Share with raw r above the upper threshold: of tokens, at sequence level of "
        "rows.",
        "ratio_fraction_low": "Share with raw r below the lower threshold (1/C unless one is set, though a "
        "truncation acts from above only): of tokens, at sequence level of rows.",
        "std": f"Standard deviation over tokens of {what} clamped to {clamp}; of the tail it knows nothing.",
        "eff_sample_size": f"1/E[(w/E[w])²] over tokens, a fraction, of {what} clamped to {clamp}: not the "
        "ESS of what was sampled, and token-weighted at sequence level too.",
        "seq_mean": f"A row's mean of {what}, mean {_ROWS.format(0)}.",
        "seq_std": f"Standard deviation (n − 1) of the rows' means of {what}; 0 for one row.",
        "seq_max": f"Largest mean of {what} in a row.",
        "seq_min": f"Smallest mean of {what} in a row; 0 as soon as one has no token.",
        "seq_max_deviation": f"Largest |mean of {what} in a row − 1|.",
        "seq_fraction_high": "Rows whose mean raw r is above the upper threshold, over all rows; at token "
        "level a mean is compared with a threshold meant for tokens.",
        "seq_fraction_low": "Rows whose mean raw r is below the lower threshold, over all rows; one without "
        "a token has a mean of 0.",
    }


_APPLIED = {
    "rollout_is_oob_ratio": "IcePop only: share of tokens whose weight is 0 because r lies outside [lower, "
    "upper]; at sequence level every token of a row counts.",
}

_NORM = {
    "rollout_is_batch_norm_factor": "What batch normalisation divided by: the mean weight before rejection "
    "(at sequence level of rows with a token), 1 where it was too small to divide by. The other rollout_is_ "
    "numbers are taken before that division.",
}


def _masked(stem: str) -> Names:
    return {
        f"{stem}_masked_fraction": "Tokens that rejection removes, over all tokens; what a veto removes "
        "besides is not in it.",
        f"{stem}_seq_masked_fraction": "Rows with at least one rejected token, over all rows: for rules on "
        "tokens that is not the share of rows dropped.",
    }


def _option_names(statistic: str, sign: str) -> Names:
    """verl 2026's `compute_rs_metrics`, under each option's name."""
    return {
        "mean": f"Mean over tokens of {statistic} as the option aggregates it: a sequence option's value "
        "counts once per token.",
        "max": f"Largest {statistic}: of a token, under sequence options of a row.",
        "min": f"Smallest {statistic}: of a token, under sequence options of a row.",
        "fraction_high": f"Share above the upper threshold, of tokens, under sequence options of rows with a "
        f"token.{sign}",
        "std": f"Standard deviation over tokens of {statistic} clamped to the thresholds.",
        "seq_mean": f"Mean over rows with a token of their {statistic}; token options take a row's mean.",
        "seq_std": f"Standard deviation (n − 1) over rows with a token of their {statistic}; 0 for one row.",
        "seq_max": f"Largest {statistic} of a row with a token; token options take a row's mean.",
        "seq_min": f"Smallest {statistic} of a row with a token; token options take a row's mean.",
        "seq_max_deviation": f"Largest absolute {statistic} of a row with a token.",
        "seq_fraction_high": "Share of rows with a token whose value is above the upper threshold; under "
        f"token options that compares a mean with a threshold meant for tokens.{sign}",
        "masked_fraction": "Tokens that this option alone rejects, over all tokens.",
        "seq_masked_fraction": "Rows with a token that this option rejects, over rows with a token.",
    }


def _low(statistic: str) -> Names:
    return {
        "fraction_low": f"Share of {statistic} below the lower threshold, that is of r too HIGH: of tokens, "
        "under sequence options of rows with a token.",
        "seq_fraction_low": "Share of rows with a token whose value is below the lower threshold: r too "
        "HIGH.",
    }


_K1 = "k1 = −log r (bounded to ±20), compared with [ln lower, ln upper]"


def _every_option() -> Iterator[tuple[str, str]]:
    k1 = _option_names(_K1, " k1 is −log r, so this is r too LOW.") | _low(_K1)
    never = {"fraction_low": "0: the statistic has no lower threshold."}
    k2 = _option_names("k2 = (log r)²/2, log r bounded to ±20", "") | never
    k3 = _option_names("k3 = r − 1 − log r, log r bounded to ±20", "") | never
    for statistic, found in (("k1", k1), ("k2", k2), ("k3", k3)):
        yield from ((f"rollout_rs_*_{statistic}_{name}", meaning) for name, meaning in found.items())


def _stemmed(stem: str, found: Mapping[str, str]) -> Names:
    return {f"{stem}_{name}": meaning for name, meaning in found.items()}


_RAW = "the weights before truncation (e^(log-ratio bounded to ±20))"
_LEVEL = "at sequence or geometric level"


def _weights(generation: Generation) -> Names:
    if generation.applied:
        return _stemmed("rollout_is", _spread("the weights as applied", "[0, C]", "at sequence level"))
    return _stemmed("rollout_is", _spread(_RAW, "[1/C, C]", _LEVEL))


def _rejection(generation: Generation) -> Iterator[Names]:
    if generation.divergences:
        yield dict(_every_option())
    elif not generation.weight_band:
        yield _stemmed("rollout_rs", _spread("the ratio that rejects", "the thresholds", _LEVEL))
    yield _masked("rollout_is" if generation.weight_band else "rollout_rs")


def _parts(generation: Generation) -> Iterator[Mapping[str, str]]:
    gap = _GAP | (_CHI2 if generation.chi2 else {})
    yield {generation.gap + name: meaning for name, meaning in gap.items()}
    yield _weights(generation)
    if not generation.weight_band:
        yield _NORM
    if generation.veto:
        yield _VETO
    if generation.applied:
        yield _APPLIED
    yield from _rejection(generation)


def _names(logs: str) -> Mapping[str, str]:
    """Each name that this generation can log, `*` for the part of an option's name before its statistic."""
    generation = GENERATIONS[logs]
    found = {
        generation.prefix + name: meaning for part in _parts(generation) for name, meaning in part.items()
    }
    return found | (UPDATE if generation.debug else {})


# ---------------------------------------------------------------- configuration

BLOCK = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
LOSS = "actor_rollout_ref.actor.policy_loss."
LOG_PROBS = {"actor_rollout_ref.rollout.calculate_log_probs": True}
CLIP = ClipKeys("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", dual_default=3.0)
LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}
OPTIONS = {"token": "token", "sum": "seq_sum", "mean": "seq_mean", "max": "seq_max"}
IDLE = "bounds of 1.0e-9 and 1.0e+9 are idle: the log-ratio is clamped to ±20"
NOW = "verl from 0.7.1"


def verl(preset: Preset) -> Said:
    """Today's keys, and those of the generation whose logs the preset has, or that could still say it."""
    logs = preset.logs or ""
    older = (november, october) if logs == "verl-2025-10" else (november,)
    tried = [_try(january, preset)]
    if logs in ("verl-2025-10", "verl-2025-11") or isinstance(tried[0], ConfigError):
        tried += [_try(one, preset) for one in older]
    said = [one for one in tried if isinstance(one, tuple)]
    if not said:
        raise next(one for one in tried if isinstance(one, ConfigError))
    gone = f"{NOW} cannot say this: {tried[0].message}" if isinstance(tried[0], ConfigError) else ""
    texts = dict.fromkeys((*(text for _, found in said for text in found), *([gone] if gone else ())))
    return tuple(one for snippets, _ in said for one in snippets), tuple(texts)


def _try(generation: Callable[[Preset], Said], preset: Preset) -> Said | ConfigError:
    try:
        return generation(preset)
    except ConfigError as error:
        return error


def _said(settings: Settings, preset: Preset, *notes: str, added: str = "") -> Said:
    no_dual_clip(preset)
    settings = {**settings, **LOG_PROBS, **clip_settings(preset, CLIP, ACTOR)}
    idle = (IDLE,) if {IDLE_HIGH, IDLE_LOW} & set(map(_number, settings.values())) else ()
    return yaml_and_hydra("verl", settings, added), (*notes, *idle, *clip_remarks(preset, CLIP))


def _number(value: object) -> object:
    return value if isinstance(value, float) else None


# ---------------------------------------------------------------- 0.6.0, and until 2025-11-07


def october(preset: Preset) -> Said:
    """algorithm.rollout_is*: one level for weight and bounds; bounds on r itself."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip",))
    settings: Settings = {"rollout_is": preset.apply and not parts.bare}
    if parts.weight is not None:
        settings |= _october_weight(parts)
    veto = parts.take_veto()
    if veto is not None and parts.weight is None and "rollout_is_level" not in settings:
        cannot("a veto without a weight")
    settings["rollout_is_veto_threshold"] = veto.lower if veto else None
    parts.preset = Preset(preset.name, preset.summary)  # `apply` has been said
    parts.finish()
    block = {f"algorithm.{key}": value for key, value in settings.items()}
    drops = settings["rollout_is_veto_threshold"] or settings.get("rollout_is_mode") == "mask"
    zeroed = ("in verl 0.6.0 what is dropped stays in the denominator: its weight is 0",) if drops else ()
    return _said(block, preset, *zeroed)


def _october_weight(parts: Parts) -> Settings:
    over = parts.weight.over if parts.weight else ""
    level = LEVELS.get(over) or cannot("weights of a turn")
    band = parts.take_band(over) if parts.rules or (parts.weight and parts.weight.action == "mask") else None
    if band is not None:
        low, high = _idle(*band)
        mode = {"rollout_is_mode": "mask", "rollout_is_threshold": high, "rollout_is_threshold_lower": low}
        return {"rollout_is_level": level, **mode}
    weight = parts.take_weight(over)
    upper = IDLE_HIGH if weight is None or weight.upper is None else weight.upper
    return {"rollout_is_level": level, "rollout_is_mode": "truncate", "rollout_is_threshold": upper}


# ---------------------------------------------------------------- 0.6.1 and 0.7.0


def november(preset: Preset) -> Said:
    """algorithm.rollout_correction with rollout_rs and the veto; bounds on r itself.

    In bypass mode these releases set the loss where the actors do not see it, so that a PPO clip against the
    rollout is all they can do.
    """
    parts = Parts(preset)
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip",))
    if bypass and not parts.bare:
        cannot("weights or rules of π_θ")
    parts.split_mask()
    settings = {**_november_weight(parts), **_november_rule(parts)}
    veto = parts.take_veto()
    settings["rollout_token_veto_threshold"] = veto.lower if veto else None
    settings["bypass_mode"] = bypass
    parts.finish()
    return _said({BLOCK + key: value for key, value in settings.items()}, preset)


def _november_weight(parts: Parts) -> Settings:
    weight = parts.take_weight("token", "sum")
    if weight is None:
        return {"rollout_is": None}
    upper = IDLE_HIGH if weight.upper is None else weight.upper
    return {"rollout_is": LEVELS[weight.over], "rollout_is_threshold": upper}


def _november_rule(parts: Parts) -> Settings:
    for over, name in LEVELS.items():
        rule = parts.take("ratio", over)
        if rule is not None:
            low, high = _idle(rule.lower, rule.upper)
            return {"rollout_rs": name, "rollout_rs_threshold": high, "rollout_rs_threshold_lower": low}
    return {"rollout_rs": None}


def _idle(low: float | None, high: float | None) -> tuple[float, float]:
    return (IDLE_LOW if low is None else low, IDLE_HIGH if high is None else high)


# ---------------------------------------------------------------- since 0.7.1


def january(preset: Preset) -> Said:
    """algorithm.rollout_correction with the k1, k2, k3 options."""
    parts = Parts(preset)
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip", "reinforce") if bypass else ("ppo_clip", "gspo", "cispo"))
    if bypass and parts.loss == "ppo_clip" and parts.weight is not None:
        cannot("weights of π_θ under a PPO clip: bypass_mode applies them to loss_type reinforce alone")
    settings = {**_january_weight(parts), **_january_rules(parts)}
    settings |= {"bypass_mode": bypass, **({"loss_type": parts.loss} if bypass else {})}
    if parts.veto is not None:
        cannot("a veto on one token, which is gone since 2026-01-14 (its nearest is rollout_rs=seq_max_k2)")
    parts.finish()
    block = {BLOCK + key: value for key, value in settings.items()}
    if bypass:
        block |= {ACTOR + "use_rollout_log_probs": True, LOSS + "loss_mode": "bypass_mode"}
        block |= {f"{LOSS}rollout_correction.{key}": value for key, value in settings.items()}
    elif parts.loss != "ppo_clip":
        block[LOSS + "loss_mode"] = parts.loss
    return _said(block, preset, *_remarks(preset, settings, bypass), added=LOSS + "rollout_correction")


def _january_weight(parts: Parts) -> Settings:
    weight = parts.take_weight("token", "sum", actions=("truncate", "none", "mask"), normalize=True)
    if weight is None:
        return {"rollout_is": None}
    threshold: object = IDLE_HIGH if weight.upper is None else weight.upper
    if weight.action == "mask":
        low, high = _idle(weight.lower, weight.upper)
        threshold = f"{schema.number(low)}_{schema.number(high)}"
    found = {"rollout_is": LEVELS[weight.over], "rollout_is_threshold": threshold}
    return {**found, **({"rollout_is_batch_normalize": True} if weight.normalize else {})}


def _january_rules(parts: Parts) -> Settings:
    said: dict[str, str] = {}
    for rule in tuple(parts.rules):
        found = _option(rule)
        if found and found[0] not in said and parts.take(rule.statistic, rule.over):
            said[found[0]] = found[1]
    if not said:
        return {"rollout_rs": None}
    return {"rollout_rs": ",".join(said), "rollout_rs_threshold": ",".join(said.values())}


def _option(rule: Reject) -> tuple[str, str] | None:
    """(option, threshold) of a rule; None where there is none."""
    over, statistic = OPTIONS.get(rule.over), rule.statistic
    if over is None:
        return None
    if statistic in ("k2", "k3") and rule.lower is None and rule.upper is not None:
        return f"{over}_{statistic}", schema.number(rule.upper)
    if statistic not in ("ratio", "k1") or rule.over == "max":
        return None
    bounds = _k1(rule)
    return None if bounds is None else (f"{over}_k1", "_".join(map(schema.number, bounds)))


def _k1(rule: Reject) -> tuple[float, float] | None:
    """The bounds on 1/r that keep what the rule keeps; a missing one is idle where the clamp makes it so."""
    if rule.over == "sum" and None in (rule.lower, rule.upper):
        return None  # tokens are clamped, their sum is not
    if rule.statistic == "ratio":
        low = IDLE_LOW if rule.upper is None else schema.inverse(rule.upper)
        return low, IDLE_HIGH if rule.lower is None else schema.inverse(rule.lower)
    low = IDLE_LOW if rule.lower is None else math.exp(rule.lower)
    return low, IDLE_HIGH if rule.upper is None else math.exp(rule.upper)


def _remarks(preset: Preset, settings: Settings, bypass: bool) -> tuple[str, ...]:
    rules = settings["rollout_rs"] is not None
    loose = not bypass and rules
    kept = "the V1 trainer (the default) counts rejected tokens in the denominator, the legacy one not"
    return remarks(
        rules
        and any(rule.statistic in ("ratio", "k1") for rule in preset.reject)
        and "since 0.7.1 verl compares k1 bounds with -log r: these thresholds are on 1/r",
        loose and kept,
        bypass and "without the second block the loss falls back to sequence weights with threshold 2",
    )


# ---------------------------------------------------------------- the fork for Flash-RL


def flash_rl(preset: Preset) -> Said:
    """yaof20/verl: an upper bound on the token weight, and nothing else."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip",))
    weight = parts.take_weight("token", actions=("truncate",))
    parts.finish()
    cap = -1.0 if weight is None else weight.upper
    settings = {ACTOR + "tis_imp_ratio_cap": cap, **LOG_PROBS, **clip_settings(preset, CLIP, ACTOR)}
    remark = "key of the fork yaof20/verl, main; its branch flash-rl calls it imp_ratio_cap"
    return yaml_and_hydra("flash-rl", settings), (remark, *clip_remarks(preset, CLIP))


def _habits(preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
    """Return the guards of the newest version that can express the preset."""
    if all(one.age[0] for one in snippets):
        return Habits(20.0, denominator="kept")
    return Habits(20.0, rule_at="token", denominator=None if preset.policy == "old" else "all")


TRAINER = Trainer("verl", verl, _habits, tuple(map(Verl, GENERATIONS)))
FLASH_RL = Trainer("flash-rl", flash_rl)
