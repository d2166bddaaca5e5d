"""verl: what four generations log (2025-10 `mismatch/`; 2025-11, 2026-01 and 2026-03 `rollout_corr/`); keys.

Logged numbers are read off verl 4424616d, 418f964a, b178a3cd and 1dda039b. Two things to know before laying
these beside our own: verl clamps log-ratios to ±20, and its std and ESS are of weights clamped to [1/C, C]
([0, C] since 2026-03). Its masked mean divides by (Σmask + 1e-8), which is reproduced. Statistics over rows
include those without a token (as 0), except the rejection statistics of 2026.

The configuration has three generations of keys, and there are those of its fork for Flash-RL. Since 0.7.1
its k1 bounds are compared with −Δ, so bounds [lo, hi] on r are written "1/hi_1/lo". A threshold is always a
quoted string: YAML reads 0.5_2 as 0.52.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from offpol_diag.errors import ConfigError
from offpol_diag.presets import SMALLEST_NORM, Loss, Over, Preset, Reject, Statistic, Weight
from offpol_diag.trainers import config, schema
from offpol_diag.trainers.base import (
    EPS,
    SAFETY,
    Array,
    Log,
    Number,
    Numbers,
    Tokens,
    Totals,
    named,
    np,
    of_rows,
    std,
)
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, Snippet, cannot

# ---------------------------------------------------------------- what a generation logs


def log(t: Tokens, s: Totals, generation: str) -> Numbers:
    """Return all that one generation logs."""
    preset, oldest = t.preset, generation == "2025-10"
    by_option, newest = generation >= "2026", generation == "2026-03"
    prefix = "mismatch/" if oldest else "rollout_corr/"
    result = named(prefix + "mismatch_" * oldest, s.part(policy_gap, t.only(), not oldest))
    if preset.weight is not None:
        result |= named(prefix + "rollout_is_", weights(t, s, preset.weight, generation))
    if not by_option:
        result |= named(prefix, veto(t, s))
    for rule in () if oldest else preset.reject:
        if by_option:
            result |= named(prefix + f"rollout_rs_{option_name(rule)}_", s.part(option, t.only(), rule))
        else:
            band = ratio_band(rule)
            high = band.upper or math.inf
            low = 1 / high if band.lower is None else band.lower
            whole = rule.over in ("sum", "mean")
            result |= named(prefix + "rollout_rs_", s.part(ratios, t.only(), rule.over, low, high, whole))
    if preset.reject:
        stem = "rollout_is_" if oldest else "rollout_rs_"
        result |= named(prefix + stem, s.part(masked, t.only("reject"), not by_option))
    if newest and preset.policy == "old":
        result |= named("training/", s.part(probabilities, t.only()))
    if newest and t.batch.current is not None and t.batch.advantages is not None:
        parts = ("reject", "veto", "loss", "clip")
        result |= named("actor/", s.part(update, t.only(*parts)))
    return result


def mean(t: Tokens, s: Totals, x: Array) -> Number:
    """Return verl's masked mean of a number of each token, or of the tokens that a flag is set of."""
    return over_tokens(t, s, t.row_sum(x))


def over_tokens(t: Tokens, s: Totals, x: Array) -> Number:
    """Return the sum of a number of each row over Σmask + 1e-8."""
    return s.sum(x) / (s.sum(t.n) + EPS)


# ---------------------------------------------------------------- the policy gap


def policy_gap(t: Tokens, s: Totals, chi2: bool) -> Numbers:
    """Return perplexities of rows, and KL and χ² estimates of tokens."""
    n, d, rows = t.n + EPS, t.log_ratio, s.sum(t.one)
    train, rollout = t.row_sum(t.train) / n, t.row_sum(t.batch.rollout) / n

    def average(x: Array) -> Number:
        return s.sum(x) / rows

    result = {
        "training_ppl": average(np.exp(-train)),
        "training_log_ppl": average(-train),
        "kl": mean(t, s, -d),
        "k3_kl": mean(t, s, np.minimum(t.k3(), math.exp(2 * 345.0))),
        "rollout_ppl": average(np.exp(-rollout)),
        "rollout_log_ppl": average(-rollout),
        "log_ppl_diff": average(rollout - train),
        "log_ppl_abs_diff": average(abs(rollout - train)),
        "log_ppl_diff_max": s.max(-t.row_mean(d)),
        "log_ppl_diff_min": s.min(-t.row_mean(d)),
        "ppl_ratio": average(np.exp(rollout - train)),
    }
    if chi2:
        result["chi2_token"] = mean(t, s, t.ratio(SAFETY) ** 2) - 1
        result["chi2_seq"] = average(np.exp(2 * t.row_sum(d).clip(-SAFETY, SAFETY))) - 1
    return result


# ---------------------------------------------------------------- the distribution of one statistic


def distribution(
    t: Tokens, s: Totals, x: Array, by_row: bool, low: float, high: float, center: float, among: Array
) -> Numbers:
    """Return mean, extremes, std, ESS and numbers of rows of a statistic.

    Args:
        t: the batch.
        s: adds up.
        x: the statistic, [T], or [S] with `by_row`.
        by_row: whether a row's tokens share it.
        low: lower limit that x is clamped to for std and ESS.
        high: upper limit.
        center: what x is on-policy; standard deviations are of sums about it, so that nothing cancels.
        among: rows that count, [S] bool.
    """
    n, rows = s.sum(t.n), s.sum(among)

    def total(x: Array) -> Array:
        return x * t.n if by_row else t.row_sum(x)

    held = x.clip(low, high)
    off = held - center
    first, second = over_tokens(t, s, total(off)), over_tokens(t, s, total(off**2))
    short = EPS / (n + EPS)  # 1 less verl's mean of 1
    variance = second - first * first + 2 * center * first * short + center**2 * (1 - short) * short
    row = total(x) / (t.n + EPS)
    off = (row - center) * among
    return {
        "mean": over_tokens(t, s, total(x)),
        "max": s.max(np.where(t.there, x, -math.inf) if by_row else t.row_max(x)),
        "min": s.min(np.where(t.there, x, math.inf) if by_row else t.row_min(x)),
        "std": np.where(n >= 2, np.sqrt(np.maximum(variance, 0.0)), 0.0),
        "eff_sample_size": effective(*(over_tokens(t, s, total(y)) for y in (held, held**2))),
        "seq_mean": s.sum(row) / rows,
        "seq_std": np.where(rows >= 2, std(s.sum(off), s.sum(off**2), rows), 0.0),
        "seq_max": s.max(np.where(among, row, -math.inf)),
        "seq_min": s.min(np.where(among, row, math.inf)),
        "seq_max_deviation": s.max(np.where(among, abs(row - center), -math.inf)),
        "seq_fraction_high": s.sum((row > high) & among) / rows,
        "seq_fraction_low": s.sum((row < low) & among) / rows,
    }


def effective(first: Number, second: Number) -> Number:
    """Return 1 / E[(w/E w)²] from E w and E w²."""
    normalised = second / (first + EPS) ** 2
    return np.where(normalised > 0, 1 / normalised, math.nan)


# ---------------------------------------------------------------- weights


def weights(t: Tokens, s: Totals, weight: Weight, generation: str) -> Numbers:
    """Return `rollout_is_`: the weights, with thresholds [1/C, C] unless a lower bound is given."""
    oldest, newest = generation == "2025-10", generation == "2026-03"
    bands = [ratio_band(rule) for rule in t.preset.reject if rule.statistic in ("ratio", "k1")]
    band = bands[0] if oldest and bands else weight
    high = band.upper or math.inf
    low = band.lower or 1 / high
    whole = weight.over == "sum" or (weight.over == "mean" and not oldest)
    own = t.only("weight") if newest else t.only()
    result = dict(s.part(ratios, own, weight.over, low, high, whole))
    if newest and weight.action == "mask":
        result["oob_ratio"] = over_tokens(t, s, t.n_bounded)
    if weight.normalize and not oldest:
        result["batch_norm_factor"] = s.part(norm, t.only("weight"))
    return result


def ratios(t: Tokens, s: Totals, over: Over, low: float, high: float, share_of_rows: bool) -> Numbers:
    """Return verl's `compute_is_metrics`, of weights, or (2025) of the ratio that rejects.

    Fractions beyond [low, high] are of the raw ratio, of rows or of tokens; so are a row's extremes. All else
    is of the weight as the loss gets it, if `t` has a weight: bounded to [0, C].
    """
    by_row = of_rows(over)
    log = t.aggregate("ratio", over)
    raw = t.ratio(SAFETY) if over == "token" else np.exp(log.clip(-SAFETY, SAFETY))
    everyone = t.one > 0
    if t.preset.weight is None:
        result = distribution(t, s, raw, by_row, low, high, 1.0, everyone)
    else:
        x = as_applied(t, t.preset.weight, raw)
        result = distribution(t, s, x, by_row, 0.0, high, 1.0, everyone)
        row = (raw * t.n if by_row else t.row_sum(raw)) / (t.n + EPS)
        result |= {
            "seq_fraction_high": s.sum(row > high) / s.sum(t.one),
            "seq_fraction_low": s.sum(row < low) / s.sum(t.one),
        }
    if by_row:
        result["max"] = np.exp(np.minimum(s.max(log), SAFETY))
        result["min"] = np.exp(s.min(log))

    def share(flags: Array) -> Number:
        if share_of_rows:
            return s.sum(flags) / s.sum(t.one)
        return over_tokens(t, s, flags * t.n if by_row else t.row_sum(flags))

    fractions = {"ratio_fraction_high": share(raw > high), "ratio_fraction_low": share(raw < low)}
    first = ("mean", "max", "min")
    return {name: result[name] for name in first} | fractions | result


def as_applied(t: Tokens, weight: Weight, raw: Array) -> Array:
    """Return the weights as the loss gets them, [T] or [S]: what truncates has no lower bound there."""
    if weight.action == "mask":
        return t.unit_weight
    return raw if weight.upper is None else np.minimum(raw, weight.upper)


def norm(t: Tokens, s: Totals) -> Number:
    """Return what batch normalisation divides by: the mean weight, at sequence level of rows with a token."""
    weight = t.preset.weight
    assert weight is not None
    total, units = t.row_sum(t.weight), t.n
    if weight.over != "token":
        total, units = total / np.maximum(t.n, 1), t.there
    result = s.sum(total) / s.sum(units)
    return np.where(result > SMALLEST_NORM, result, 1.0)


# ---------------------------------------------------------------- rejection and veto


def option(t: Tokens, s: Totals, rule: Reject) -> Numbers:
    """Return verl 2026's `compute_rs_metrics`, of one option, of −log r where presets speak of r."""
    by_row = of_rows(rule.over)
    statistic, low = rule.statistic, rule.lower or 0.0
    high = math.inf if rule.upper is None else rule.upper
    if statistic == "ratio":
        statistic, low = "k1", -math.log(rule.upper or math.inf)
        high = -math.log(rule.lower) if rule.lower else math.inf
    elif statistic == "k1":
        low = -math.inf if rule.lower is None else rule.lower
    x = t.aggregate(statistic, rule.over, SAFETY)
    result = distribution(t, s, x, by_row, low, high, 0.0, t.there)
    del result["eff_sample_size"]
    rows, lost = s.sum(t.there), t.dropped_by(rule)

    def share(flags: Array) -> Number:
        return s.sum(flags & t.there) / rows if by_row else mean(t, s, flags)

    fractions = {"fraction_high": share(x > high), "fraction_low": share(x < low)}
    if statistic != "k1":  # the others have no lower threshold
        fractions["fraction_low"] = 0.0
        del result["seq_fraction_low"]
    first = ("mean", "max", "min")
    return (
        {name: result[name] for name in first}
        | fractions
        | result
        | {"masked_fraction": over_tokens(t, s, lost), "seq_masked_fraction": s.sum(lost > 0) / rows}
    )


def option_name(rule: Reject) -> str:
    """Return verl's name of a rule's option."""
    statistic = "k1" if rule.statistic == "ratio" else rule.statistic
    return f"{'token' if rule.over == 'token' else f'seq_{rule.over}'}_{statistic}"


def masked(t: Tokens, s: Totals, empty_too: bool) -> Numbers:
    """Return the tokens that rejection (not the veto) removes, and the rows that lose one.

    In 2025 (`empty_too`) a row without a token has r = 1, and may be rejected.
    """
    lost = t.n - t.n_kept
    rows = (lost > 0) | ~t.kept_rows if empty_too else lost > 0
    return {
        "masked_fraction": over_tokens(t, s, lost),
        "seq_masked_fraction": s.sum(rows) / s.sum(t.one),
    }


def veto(t: Tokens, s: Totals) -> Numbers:
    """Return the rows with a token beyond the veto's threshold, and those tokens; 0 without a veto."""
    hits = t.veto_hits(t.preset.veto)
    return {
        "rollout_is_veto_fraction": s.sum(hits > 0) / s.sum(t.one),
        "rollout_is_catastrophic_token_fraction": over_tokens(t, s, hits),
    }


def ratio_band(rule: Reject) -> Reject:
    """Return a band of k1 = −Δ in nats as the same band of r."""
    if rule.statistic != "k1":
        return rule
    lower = None if rule.upper is None else math.exp(-rule.upper)
    upper = None if rule.lower is None else math.exp(-rule.lower)
    return replace(rule, statistic="ratio", lower=lower, upper=upper)


# ---------------------------------------------------------------- probabilities and the update


def probabilities(t: Tokens, s: Totals) -> Numbers:
    """Return `training/`, of decoupled presets: how the two probabilities of a token differ."""
    n, gap, p, q = s.sum(t.n), abs(t.difference), np.exp(t.train), np.exp(t.batch.rollout)
    first, second = s.sum(t.row_sum(gap)), s.sum(t.row_sum(gap**2))
    x, y, xx, yy, xy = (s.sum(t.row_sum(z)) / n for z in (p, q, p * p, q * q, p * q))
    of_x, of_y = xx - x * x, yy - y * y
    vary = (of_x > 0) & (of_y > 0)
    return {
        "rollout_probs_diff_valid": 1.0,
        "rollout_probs_diff_max": s.max(t.row_max(gap)),
        "rollout_probs_diff_mean": first / n,
        "rollout_probs_diff_std": std(first, second, n),
        "rollout_actor_probs_pearson_corr": np.where(vary, (xy - x * y) / np.sqrt(of_x * of_y), math.nan),
    }


def update(t: Tokens, s: Totals) -> Numbers:
    """Return `actor/`, over the tokens that rejection leaves; clip fractions of losses that clip."""
    clipped, dual = t.loss_acts
    n = s.sum(t.n_kept) + EPS

    def of_kept(x: Array) -> Number:
        return s.sum(t.row_sum(x & t.kept if x.dtype == bool else np.where(t.kept, x, 0.0))) / n

    clips = {"pg_clipfrac": clipped, "pg_clipfrac_lower": dual} if t.preset.loss != "reinforce" else {}
    return {name: of_kept(x) for name, x in clips.items()} | {"ppo_kl": of_kept(t.loss_kl)}


LOGS = tuple(
    Log(f"verl-{one}", partial(log, generation=one)) for one in ("2025-10", "2025-11", "2026-01", "2026-03")
)

# ---------------------------------------------------------------- configuration

BLOCK = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
LOSS = "actor_rollout_ref.actor.policy_loss."
LOG_PROBS = {"actor_rollout_ref.rollout.calculate_log_probs": True}
CLIP = ClipKeys("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", dual_default=3.0)
LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}
MODES = {
    "ppo_clip": "vanilla",
    "gspo": "gspo",
    "cispo": "cispo",
    "reinforce": "gpg",
}
"""Losses that the decoupled form can have → loss_mode."""
DPPO = {("prob_diff", "against_or_zero"): "dppo_tv", ("binary_kl", "away"): "dppo_kl"}
"""Statistic and advantage of a rule on tokens → loss_mode."""
OPTIONS = {"token": "token", "sum": "seq_sum", "mean": "seq_mean", "max": "seq_max"}


def verl(parts: Parts) -> Translation:
    """Today's keys, and those of the generation whose logs the preset has, or that could still express it."""
    preset = parts.preset
    forms: list[Form] = []
    notes: list[object] = []
    failed: list[ConfigError] = []
    refused = ""
    for keys in (january, november, october):
        if keys is november and not failed and preset.logs not in ("verl-2025-10", "verl-2025-11"):
            break
        if keys is october and preset.logs != "verl-2025-10":
            break
        try:
            (form,), differs = keys(Parts(preset))
        except ConfigError as error:
            failed.append(error)
            if keys is january:
                refused = f"verl from 0.7.1 cannot say this: {error.message}"
        else:
            if all(form.since < newer.since for newer in forms):
                forms.append(form)
                notes += differs
    if not forms:
        raise failed[0]
    return forms, (*notes, refused)


def _translation(
    settings: Settings, preset: Preset, since: str, before: str = "", notes: Sequence[object] = ()
) -> Translation:
    config.no_dual_clip(preset)
    settings = {**settings, **LOG_PROBS, **config.clip_settings(preset, CLIP, ACTOR)}
    idle = "bounds of 1.0e-9 and 1.0e+9 are idle: the log-ratio is clamped to ±20"
    return (Form(settings, since, before),), (*notes, config.idle(settings) and idle, CLIP.remark(preset))


def october(parts: Parts) -> Translation:
    """0.6.0: algorithm.rollout_is*: one level for weight and bounds; bounds on r itself."""
    preset = parts.preset
    parts.need(("old",), ("ppo_clip",))
    settings: Settings = {"rollout_is": not parts.bare}
    weighted = parts.weight is not None
    if weighted:
        settings |= _october_weight(parts)
    veto = parts.take_veto()
    if veto is not None and not weighted:
        cannot("a veto without a weight")
    settings["rollout_is_veto_threshold"] = veto.lower if veto else None
    parts.finish()
    drops = settings["rollout_is_veto_threshold"] or settings.get("rollout_is_mode") == "mask"
    zeroed = "in verl 0.6.0 what is dropped stays in the denominator: its weight is 0"
    return _translation(
        config.prefixed("algorithm.", settings), preset, "0.6.0", "0.6.1", (drops and zeroed,)
    )


def _october_weight(parts: Parts) -> Settings:
    over = parts.weight.over if parts.weight else ""
    level = LEVELS.get(over) or cannot("weights of a turn")
    band = parts.take_band(over) if parts.rules or (parts.weight and parts.weight.action == "mask") else None
    if band is not None:
        low, high = config.idle_bounds(*band)
        mode = {"rollout_is_mode": "mask", "rollout_is_threshold": high, "rollout_is_threshold_lower": low}
        return {"rollout_is_level": level, **mode}
    weight = parts.take_weight(over)
    _, upper = config.idle_bounds(None, weight.upper if weight else None)
    return {"rollout_is_level": level, "rollout_is_mode": "truncate", "rollout_is_threshold": upper}


def november(parts: Parts) -> Translation:
    """0.6.1 and 0.7.0: algorithm.rollout_correction with rollout_rs and the veto; bounds on r itself.

    In bypass mode these releases set the loss where the actors do not see it, so that a PPO clip against the
    rollout is all they can do.
    """
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip",))
    if bypass and not parts.bare:
        cannot("weights or rules of π_θ")
    parts.split_mask()
    settings: Settings = {"rollout_is": None}
    weight = parts.take_weight("token", "sum")
    if weight is not None:
        _, upper = config.idle_bounds(None, weight.upper)
        settings = {"rollout_is": LEVELS[weight.over], "rollout_is_threshold": upper}
    rule = next((rule for over in LEVELS if (rule := parts.take("ratio", over))), None)
    settings["rollout_rs"] = LEVELS[rule.over] if rule else None
    if rule is not None:
        low, high = config.idle_bounds(rule.lower, rule.upper)
        settings |= {"rollout_rs_threshold": high, "rollout_rs_threshold_lower": low}
    veto = parts.take_veto()
    settings["rollout_token_veto_threshold"] = veto.lower if veto else None
    settings["bypass_mode"] = bypass
    parts.finish()
    return _translation(config.prefixed(BLOCK, settings), parts.preset, "0.6.1", "0.7.1")


def january(parts: Parts) -> Translation:
    """Since 0.7.1: algorithm.rollout_correction with the k1, k2, k3 options."""
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip", "reinforce") if bypass else tuple(MODES))
    dppo = _dppo(parts) if bypass else None
    if dppo is not None:
        parts.finish()
        anchored = "needs the V1 trainer (the default): the legacy one replaces loss_mode in bypass mode"
        return _translation(dppo, parts.preset, "0.9.0", notes=(anchored,))
    if bypass and parts.loss == "ppo_clip" and parts.weight is not None:
        cannot("weights of π_θ under a PPO clip: bypass_mode applies them to loss_type reinforce alone")
    settings = {**_january_weight(parts), **_january_rules(parts)}
    settings |= {"bypass_mode": bypass, **({"loss_type": parts.loss} if bypass else {})}
    if parts.veto is not None:
        cannot("a veto on one token, which is gone since 2026-01-14 (its nearest is rollout_rs=seq_max_k2)")
    parts.finish()
    block = config.prefixed(BLOCK, settings)
    if bypass:
        block |= {ACTOR + "use_rollout_log_probs": True, LOSS + "loss_mode": "bypass_mode"}
        block |= config.prefixed(f"{LOSS}rollout_correction.", settings)
    elif parts.loss != "ppo_clip":
        block[LOSS + "loss_mode"] = MODES[parts.loss]
    rules = settings["rollout_rs"] is not None
    notes = (
        rules
        and any(rule.statistic in ("ratio", "k1") for rule in parts.preset.reject)
        and "since 0.7.1 verl compares k1 bounds with -log r: these thresholds are on 1/r",
        rules
        and not bypass
        and "the V1 trainer (the default) counts rejected tokens in the denominator, the legacy one not",
        bypass and "without the second block the loss falls back to sequence weights with threshold 2",
    )
    return _translation(block, parts.preset, _since(settings, parts.loss), notes=notes)


def _since(settings: Settings, loss: Loss) -> str:
    """Return the first version that reads these keys of the correction."""
    if isinstance(settings.get("rollout_is_threshold"), str):
        return "0.8.0"
    if settings["bypass_mode"] or settings["rollout_rs"]:
        return "0.7.1"
    return "0.7.0" if loss == "cispo" else "0.6.1"


def _dppo(parts: Parts) -> Settings | None:
    """Return the settings of a DPPO mask with its truncated ratio; None if there is none.

    Its bounds are clip_ratio_low and _high, on a divergence from the anchor: the rollout, in bypass mode.
    """
    weight = parts.weight
    mode = next((name for rule in parts.rules if (name := DPPO.get((rule.statistic, rule.advantage)))), None)
    if parts.loss != "reinforce" or mode is None or weight is None or weight.upper is None:
        return None
    rule = parts.rules.pop()
    low = rule.upper if mode == "dppo_kl" else rule.lower and -rule.lower
    if parts.rules or rule.over != "token" or None in (low, rule.upper):
        cannot(f"this rule beside {mode}")
    parts.take_weight("token", actions=("truncate",))
    return {
        BLOCK + "bypass_mode": True,
        LOSS + "loss_mode": mode,
        ACTOR + "clip_ratio_low": low,
        ACTOR + "clip_ratio_high": rule.upper,
        ACTOR + "clip_ratio_c": weight.upper,
    }


def _january_weight(parts: Parts) -> Settings:
    weight = parts.take_weight("token", "sum", actions=("truncate", "none", "mask"), normalize=True)
    if weight is None:
        return {"rollout_is": None}
    low, high = config.idle_bounds(weight.lower, weight.upper)
    band = f"{schema.number(low)}_{schema.number(high)}"
    result = {
        "rollout_is": LEVELS[weight.over],
        "rollout_is_threshold": band if weight.action == "mask" else high,
    }
    return {**result, **({"rollout_is_batch_normalize": True} if weight.normalize else {})}


def _january_rules(parts: Parts) -> Settings:
    options: dict[str, str] = {}
    for rule in tuple(parts.rules):
        option, threshold = _option_of(rule) or ("", "")
        if option and option not in options and parts.take(rule.statistic, rule.over):
            options[option] = threshold
    if not options:
        return {"rollout_rs": None}
    return {"rollout_rs": ",".join(options), "rollout_rs_threshold": ",".join(options.values())}


def _option_of(rule: Reject) -> tuple[str, str] | None:
    """Return (option, threshold) of a rule; None if there is none.

    A k1 option has bounds on 1/r; a missing one is idle where the clamp makes it so.
    """
    over, statistic, open_ended = OPTIONS.get(rule.over), rule.statistic, None in (rule.lower, rule.upper)
    if over is None:
        return None
    if statistic in ("k2", "k3") and rule.lower is None and rule.upper is not None:
        return f"{over}_{statistic}", schema.number(rule.upper)
    if statistic not in ("ratio", "k1") or rule.over == "max" or (rule.over == "sum" and open_ended):
        return None  # tokens are clamped, their sum is not
    low, high = rule.lower, rule.upper
    if statistic == "ratio":
        low, high = high and schema.inverse(high), low and schema.inverse(low)
    else:
        low, high = (None if bound is None else math.exp(bound) for bound in (low, high))
    return f"{over}_k1", "_".join(map(schema.number, config.idle_bounds(low, high)))


def flash_rl(parts: Parts) -> Translation:
    """yaof20/verl, the fork for Flash-RL: an upper bound on the token weight, and nothing else."""
    parts.need(("old",), ("ppo_clip",))
    weight = parts.take_weight("token", actions=("truncate",))
    parts.finish()
    cap = -1.0 if weight is None else weight.upper
    clip = config.clip_settings(parts.preset, CLIP, ACTOR)
    remark = "key of the fork yaof20/verl, main; its branch flash-rl calls it imp_ratio_cap"
    settings = {ACTOR + "tis_imp_ratio_cap": cap, **LOG_PROBS, **clip}
    return (Form(settings),), (remark,)


def _guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    """Return the guards of the newest version that can express the preset."""
    if not any(one.current for one in snippets):
        return Guards(20.0, denominator="kept")
    unclamped: frozenset[Statistic] = frozenset({"prob_diff", "binary_kl"})
    return Guards(20.0, "aggregate", "token", unclamped, None if preset.policy == "old" else "all")


OVERRIDES = partial(schema.hydra, added=LOSS + "rollout_correction")
TRAINER = Trainer(
    "verl",
    "verl-project/verl 1dda039b (2026-08-22)",
    verl,
    {"yaml": schema.yaml, "hydra": OVERRIDES},
    _guards,
    logs=LOGS,
    title="verl",
)
FLASH_RL = Trainer(
    "flash-rl", "yaof20/verl 1e413344 (2025-08-27)", flash_rl, config.YAML_AND_HYDRA, clip=CLIP
)
