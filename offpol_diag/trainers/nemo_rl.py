"""NeMo-RL: `train/` (algorithms/loss/loss_functions.py and grpo.py of v0.6 and later), and keys of `loss_fn`.

Δ = prev_logprobs − generation_logprobs; nothing is clamped. A mean is over tokens and divides by their number
plus 1e-8. The error mask (seq_logprob_error_threshold) is applied before the loss, so that everything else is
about the sequences it leaves. A sequence without a token counts as one whose sample_mask is 0.

All of it is float32, where e^x is infinite from x = 88.7 on and a sum beyond 3.4e38: such a number is so here
too, and nan where it is multiplied by 0. NeMo-RL multiplies masked tokens by 0 after exp (masked_mean,
algorithms/utils.py:212-224 of 7ea279abf), so that one which overflows makes its means nan; that is not
reproduced, since masked tokens are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers import config, measures, schema
from offpol_diag.trainers.base import Log, Range, Row, Rows, Sum, Totals, Value, among, applied, ends, table
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Settings, Snippet, Trainer, Translation
from offpol_diag.trainers.measures import (
    CURRENT,
    FLOAT32_OVERFLOW,
    UPDATE,
    UPDATE_RATIO,
    Measure,
    clipped,
    log_cosh,
    where,
)

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import Tokens, View

FLOAT32_VANISHES = math.log(1.5) - 149 * math.log(2.0)
"""Half of e^x is 0 in float32 below this x, nats."""

# ---------------------------------------------------------------- numbers of tokens


def _surprisal(x: Tokens) -> Array:
    drift = x.of("current")
    overflows = (drift.delta > FLOAT32_OVERFLOW) & (x.column("current") == 0)
    return where(overflows, math.nan, -drift.ratio() * x.column("current"))


ERROR = Measure("e^|Δ|", lambda x: x.ratios.token("mult_prob_error"))
JS = Measure("log cosh(Δ/2)", lambda x: log_cosh(x.delta / 2))
"""½ k3 of π_old and ½ k3 of π_rollout, each against the mean of both probabilities."""
VANISHED = Measure(
    "no float32 probability",
    lambda x: (x.ratios.train < FLOAT32_VANISHES) & (x.batch.rollout < FLOAT32_VANISHES),
)
"""1 where the mean of both probabilities is 0 in float32."""
FINITE_RATIO = Measure(
    "r, 0 beyond float32",
    lambda x: where(x.delta > FLOAT32_OVERFLOW, 0.0, x.ratio()),
)
SURPRISAL = Measure("−(π_θ/π_rollout) log π_θ", _surprisal, needs=UPDATE)
CLIPPED_RATIO = Measure(
    "clipped e^u",
    lambda x: clipped(x.update_ratio, x.preset.clip),
    own=True,
    rows=lambda view: None if (r := view.pooled_ratio) is None else clipped(r, view.preset.clip),
)

# ---------------------------------------------------------------- the error mask


def _kept_rows(view: View) -> Array:
    """Flag the non-empty sequences that the error mask keeps, [S] bool."""
    kept = view.nonempty
    for rule in applied(view.preset).reject:
        if rule.statistic == "mult_prob_error" and not rule.on_tokens:
            kept = kept & view.passes(rule)
    return kept


def _sum_of_kept(name: str, of: Rows, needs: tuple[str, ...] = ()) -> Sum:
    """Return a sum over the sequences that the error mask keeps."""
    return Sum(name, lambda view: where(_kept_rows(view), of(view), 0.0), needs=needs)


def _single(x: float) -> float:
    """Return x as in float32: infinite beyond its largest number."""
    return math.copysign(math.inf, x) if abs(x) > measures.FLOAT32_MAX else x


TOKENS, ROWS = (
    _sum_of_kept("tokens", lambda view: view.n),
    _sum_of_kept("rows", lambda view: _kept_rows(view) + view.zeros),
)


def _over(column: Sum, tokens: Callable[[Preset], bool] = lambda preset: True) -> Value:
    """Divide a sum by the tokens of the sequences kept, or by those sequences."""
    return Value(
        lambda x: _single(x(column)) / (x(TOKENS if tokens(x.preset) else ROWS) + measures.EPS),
        (column, TOKENS, ROWS),
    )


def _mean(of: Measure) -> Value:
    return _over(_sum_of_kept(of.name, lambda view: view.total(of), of.needs))


def _of_loss(of: Measure) -> tuple[Value, Value, Value]:
    """Return mean, minimum and maximum of the loss's ratio; under REINFORCE, which has none, of log π_θ."""

    def actual(view: View) -> Measure:
        return CURRENT if view.preset.loss == "reinforce" else of

    total = _sum_of_kept(of.name, lambda view: view.total(actual(view)), UPDATE)
    span = Range(of.name, lambda view: among(view.ends(actual(view)), _kept_rows(view)), needs=UPDATE)
    low = Value(lambda totals: _single(totals.ends(span)[0]), (span,))
    return _over(total), low, Value(lambda totals: _single(totals.ends(span)[1]), (span,))


# ---------------------------------------------------------------- weights


def _of_tokens(preset: Preset) -> bool:
    """Return whether weights are of tokens."""
    weight = applied(preset).weight
    return weight is None or weight.over == "token"


def _weights(view: View) -> Array:
    """Σ of the weights as the loss gets them; of a sequence's weight, once."""
    nonempty, rows = view.effect.kept_tokens > 0, view.effect.per_sequence
    if applied(view.preset).weight is None:
        return view.total(FINITE_RATIO) * nonempty
    return view.effect.kept_weight_sum if rows is None else rows * nonempty


def _geometric(preset: Preset) -> tuple[Reject, ...]:
    """Return the rules of seq-mask-tis: bounds on the geometric mean."""
    rules = (rule for rule in applied(preset).reject if rule.statistic == "ratio" and not rule.on_tokens)
    return tuple(rule for rule in rules if rule.over == "mean")


def _bounds(preset: Preset) -> bool:
    """Return whether truncated_importance_sampling_type is set."""
    weight = applied(preset).weight
    return bool(_geometric(preset)) or (weight is not None and weight.action in ("truncate", "mask"))


def _out_of_bounds(view: View) -> Array:
    """Count tokens out of bounds; under seq-mask-tis, flag sequences; [S].

    Overflowed weights are 0 first, so only a lower bound counts them.
    """
    rules, weight, outside = _geometric(view.preset), view.preset.weight, view.capped()
    if rules:
        passed = view.nonempty
        for rule in rules:
            passed = passed & view.passes(rule)
        return ~passed + view.zeros
    if weight is None or weight.overflow != "zero" or weight.lower:
        return outside
    return outside - view.tokens_above(weight.over, FLOAT32_OVERFLOW)


# ---------------------------------------------------------------- errors of sequences


def _error(view: View) -> Array:
    """Mean e^|Δ| of each sequence; 0 for one without a token, infinite where float32 has no room."""
    total = view.total(ERROR)
    return where(total > measures.FLOAT32_MAX, math.inf, total) / view.divisor


def _dropped_correct(view: View) -> Array:
    rewards = view.batch.rewards
    assert rewards is not None
    correct: Array = rewards == 1
    return (view.nonempty & ~_kept_rows(view) & correct) + view.zeros


def _dropped(totals: Totals) -> float:
    return totals.sequences - totals(ROWS)


def _of_errors(kept: bool) -> tuple[Value, Value, Value]:
    """Return largest, mean and smallest error of all sequences, or of those kept; 0 if there are none."""
    total = _sum_of_kept("row_error_left", _error) if kept else Sum("row_error", _error, shared=True)
    span = Range(
        f"{total.name}s",
        lambda view: ends(_error(view), _kept_rows(view) if kept else view.nonempty),
        not kept,
    )

    def rows(totals: Totals) -> float:
        return totals(ROWS) if kept else totals.sequences

    return (
        Value(lambda totals: totals.ends(span)[1] if rows(totals) else 0.0, (span, ROWS)),
        Value(lambda totals: _single(totals(total)) / max(rows(totals), 1), (total, ROWS)),
        Value(lambda totals: totals.ends(span)[0] if rows(totals) else 0.0, (span, ROWS)),
    )


CORRECT = Sum("dropped_correct", _dropped_correct, needs=("rewards",))
RATIOS, CLIPPED = _of_loss(UPDATE_RATIO), _of_loss(CLIPPED_RATIO)
ERRORS, ERRORS_KEPT = _of_errors(kept=False), _of_errors(kept=True)
NO_PROBABILITY = _sum_of_kept(VANISHED.name, lambda view: view.total(VANISHED))
DIVERGENCE = _mean(JS)
_OF_PAIR = "π_old/π_rollout; not clamped"

NAMES: dict[str, Row] = {
    "token_mult_prob_error": _mean(ERROR).means(
        "Mean over tokens of e^|Δ|, whichever way the two policies differ: 1 when they agree, never below. "
        "It is not the mean ratio."
    ),
    "gen_kl_error": _mean(measures.K3).means(
        f"Mean over tokens of r − 1 − log r, r = {_OF_PAIR}: the estimate of KL(π_rollout‖π_old) that is k3 "
        "here, with reference_policy_kl_type at its default."
    ),
    "policy_kl_error": _mean(measures.K3_REVERSE).means(
        "Mean over tokens of 1/r − 1 + log r, r = π_old/π_rollout: the same function of the reverse ratio. "
        "The tokens are still the rollout's, so it does not estimate KL(π_old‖π_rollout)."
    ),
    "js_divergence_error": Value(
        lambda totals: math.nan if totals(NO_PROBABILITY) else DIVERGENCE.of(totals),
        (NO_PROBABILITY, *DIVERGENCE.columns),
    ).means(
        "Mean over tokens of half the k3 of π_old and half that of π_rollout, each against the mean of the "
        "two probabilities, at the sampled token only: a divergence of estimates, not bounded by log 2; nan "
        "as soon as float32 holds neither probability of a token (both logs below −102.9)."
    ),
    "sampling_importance_ratio": _over(Sum("weights", _weights), _of_tokens).means(
        "Mean of the weights as the loss gets them, so after truncation and with rejected ones as 0; over "
        "tokens, or over sequences where the weight is the product. There the trainer multiplies a column of "
        "weights by a row of masks, and logs it times the valid sequences of the micro-batch; here it is the "
        "mean."
    ),
    "is_oob_ratio": _over(_sum_of_kept("oob", _out_of_bounds), lambda preset: not _geometric(preset)).means(
        "Share of tokens whose weight is outside the bounds, or under seq-mask-tis of sequences whose "
        "geometric mean is. The product weight counts by tokens too; a weight that float32 cannot hold is 0 "
        "by then, so that only a lower bound finds it outside.",
        _bounds,
    ),
    "probs_ratio": RATIOS[0].means(
        "Mean over tokens of π_θ/π_old, the loss's own ratio (GSPO: the geometric mean of the sequence, by "
        "tokens); it has no part in the mismatch. With disable_ppo_ratio it is the mean of log π_θ."
    ),
    "probs_ratio_clamped": CLIPPED[0].means(
        "The same ratio within [1 − ratio_clip_min, 1 + ratio_clip_max], whatever the sign of the advantage."
    ),
    "probs_ratio_min": RATIOS[1].means("Smallest π_θ/π_old of a token, not clamped."),
    "probs_ratio_max": RATIOS[2].means("Largest π_θ/π_old of a token, not clamped."),
    "probs_ratio_clamped_min": CLIPPED[1].means("Smallest clamped ratio of a token."),
    "probs_ratio_clamped_max": CLIPPED[2].means("Largest clamped ratio of a token."),
    "approx_entropy": _mean(SURPRISAL).means(
        "Mean over tokens of −(π_θ/π_rollout) log π_θ at the sampled token, unclamped: an "
        "importance-weighted estimate of the entropy of π_θ, not a sum over the vocabulary."
    ),
    "max_seq_mult_prob_error": ERRORS[0].means("Largest mean e^|Δ| of a sequence, before the error mask."),
    "mean_seq_mult_prob_error": ERRORS[1].means(
        "Mean over sequences of their mean e^|Δ|, before the error mask; token_mult_prob_error weights them "
        "by length."
    ),
    "min_seq_mult_prob_error": ERRORS[2].means("Smallest mean e^|Δ| of a sequence, before the error mask."),
    "max_seq_mult_prob_error_after_mask": ERRORS_KEPT[0].means(
        "Largest mean e^|Δ| of a sequence that the error mask leaves; 0 if it leaves none."
    ),
    "mean_seq_mult_prob_error_after_mask": ERRORS_KEPT[1].means(
        "Mean over the sequences that the error mask leaves of their mean e^|Δ|."
    ),
    "min_seq_mult_prob_error_after_mask": ERRORS_KEPT[2].means(
        "Smallest mean e^|Δ| of a sequence that the error mask leaves; 0 if it leaves none."
    ),
    "num_masked_seqs_by_logprob_error": Value(_dropped, (ROWS,)).means(
        "How many sequences the error mask drops; 0 where no threshold is set. It counts nothing that "
        "seq-mask-tis drops."
    ),
    "masked_correct_pct": Value(
        lambda totals: totals(CORRECT) / max(_dropped(totals), 1), (CORRECT, ROWS)
    ).means(
        "Share (not per cent) of the sequences the error mask drops whose reward is exactly 1; 0 if it drops "
        "none."
    ),
}
LOG = Log("nemo-rl", table(NAMES, "train/"))

# ---------------------------------------------------------------- configuration

TYPE, CAP, LOW = (f"truncated_importance_sampling_{key}" for key in ("type", "ratio", "ratio_min"))
CLIP = ClipKeys("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
RAW = {TYPE: None, CAP: None}
"""No truncation: a ratio that is left over from a base file is an error without its type."""
ON_POLICY = {"surrogate": "force_on_policy_ratio", "reinforce": "disable_ppo_ratio"}
"""Loss → the key that takes the clipped ratio away: a ratio of 1, or REINFORCE."""


def nemo_rl(parts: Parts) -> Translation:
    """tis, icepop or seq-mask-tis, and a threshold on the sequence's log-prob error."""
    on_policy = parts.policy == "current"
    parts.need(
        ("old", "current"), ("surrogate",) if on_policy else ("ppo_clip", "gspo", "cispo", "reinforce")
    )
    error = parts.take("mult_prob_error", "mean", "upper")
    settings = {**_weight_settings(parts), **_loss_settings(parts.preset)}
    parts.finish()
    block = config.prefixed("loss_fn.", settings)
    if error is not None:
        block["grpo.seq_logprob_error_threshold"] = error.upper
    return schema.yaml_and_hydra("nemo-rl", block), config.remarks(
        settings.get(TYPE) == "tis"
        and not settings[LOW]
        and f"before NeMo-RL 0.6.0 there is no {TYPE}: the ratio alone means tis",
        on_policy
        and "force_on_policy_ratio takes one update per batch, and skips the pass for the old log-probs",
        error and "the sequences of seq_logprob_error_threshold leave the denominator",
    )


def _weight_settings(parts: Parts) -> Settings:
    """sequence_level_importance_ratios makes both the weight a product and the loss GSPO."""
    if parts.weight is None:
        return {"use_importance_sampling_correction": False, **RAW}
    on = {"use_importance_sampling_correction": True}
    sequence = parts.loss == "gspo"
    if parts.weight.over == "sum" and not sequence:
        config.cannot("weights of the product ratio without the GSPO loss")
    band = None if sequence else parts.take_band("token")
    if band is not None:
        return on | _bounded("icepop", *band)
    weight = parts.take_weight("sum" if sequence else "token", lower=True)
    if weight is None or weight.action == "none":
        rule = None if sequence else parts.take("ratio", "mean")
        return on | (_bounded("seq-mask-tis", rule.lower, rule.upper) if rule else RAW)
    if weight.upper is None:
        config.cannot("weights truncated from below alone")
    return {**on, TYPE: "tis", CAP: weight.upper, LOW: weight.lower}


def _bounded(kind: str, low: float | None, high: float | None) -> Settings:
    """icepop and seq-mask-tis need both bounds; a ratio is never below 0."""
    if high is None:
        config.cannot(f"{kind} without an upper bound")
    return {TYPE: kind, CAP: high, LOW: 0.0 if low is None else low}


def _loss_settings(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        low, high = config.clip_bounds(preset)
        return {"use_cispo": True, CLIP.low: low, CLIP.high: high, CLIP.dual: None}
    if preset.loss in ON_POLICY:
        return {ON_POLICY[preset.loss]: True}
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    return {**(gspo if preset.loss == "gspo" else {}), **config.clip_settings(preset, CLIP)}


def _guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    error = any(rule.statistic == "mult_prob_error" for rule in preset.reject)
    overflow = "a ratio that float32 cannot hold counts as 0 here"
    return Guards(denominator="kept" if error else "all", overflow=overflow)


TRAINER = Trainer("nemo-rl", nemo_rl, _guards, CLIP, (LOG,))
