"""NeMo-RL: `train/` (algorithms/loss/loss_functions.py and grpo.py of v0.6 and later), and keys of `loss_fn`.

Δ = prev_logprobs − generation_logprobs; nothing is clamped. A mean is over tokens and divides by their number
plus 1e-8. The error mask (seq_logprob_error_threshold) is applied before the loss, so that everything else is
about the sequences it leaves. A sequence without a token counts as one whose sample_mask is 0.

All of it is float32, where e^x is infinite from x = 88.7 on and a sum beyond 3.4e38: such a number is so here
too, and nan where it is multiplied by 0. NeMo-RL multiplies masked tokens by 0 after exp (masked_mean,
algorithms/utils.py:212-224 of 7ea279abf), so that one which overflows makes its means nan; that is not told
here, since masked tokens are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers.base import (
    EPS,
    FLOAT32_MAX,
    FLOAT32_OVERFLOW,
    K3,
    ONE,
    RATIO,
    UPDATE,
    UPDATE_RATIO,
    Entry,
    Log,
    Measure,
    Range,
    Sum,
    Totals,
    Value,
    among,
    applied,
    clipped,
    ends,
)
from offpol_diag.trainers.config import (
    ClipKeys,
    Habits,
    Parts,
    Said,
    Settings,
    Snippet,
    Trainer,
    cannot,
    clip_bounds,
    clip_remarks,
    clip_settings,
    remarks,
)
from offpol_diag.trainers.schema import yaml_and_hydra

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import Tokens, View

FLOAT32_VANISHES = math.log(1.5) - 149 * math.log(2.0)
"""Half of e^x is 0 in float32 below this x, nats."""

# ---------------------------------------------------------------- the error mask


def _errors(preset: Preset) -> tuple[Reject, ...]:
    """Return the rules of the error mask, if any."""
    return tuple(rule for rule in applied(preset).reject if rule.statistic == "mult_prob_error")


def _left(view: View) -> Tensor:
    """Flag the non-empty sequences that the error mask keeps, [S] bool."""
    left = view.there
    for rule in _errors(view.preset):
        left = left & view.passes(rule)
    return left


def _in_left(x: Tensor, view: View) -> Tensor:
    return x.masked_fill(~_left(view), 0.0)


def _sum(name: str, of: Measure) -> Sum:
    """Return a sum over the sequences that the error mask keeps."""
    return Sum(name, lambda view: _in_left(view.total(of), view), own=True)


def _of_loss(name: str, of: Callable[[Preset], Measure]) -> tuple[Sum, Range]:
    """Return a sum and the extremes of a measure of the loss over the sequences that the error mask keeps."""
    return (
        Sum(name, lambda view: _in_left(view.total(of(view.preset)), view), own=True, needs=UPDATE),
        Range(
            f"{name} of a token",
            lambda view: among(view.ends(of(view.preset)), _left(view)),
            own=True,
            needs=UPDATE,
        ),
    )


# ---------------------------------------------------------------- numbers of tokens


def _vanished(x: Tokens) -> Tensor:
    """Flag tokens at which the mean of both probabilities is 0 in float32."""
    return (x.ratios.train < FLOAT32_VANISHES) & (x.batch.rollout < FLOAT32_VANISHES)


def _held(x: Tokens) -> Tensor:
    """Return r, with 0 where it overflows float32, [T]."""
    return x.ratio().masked_fill(x.delta > FLOAT32_OVERFLOW, 0.0)


def _surprisal(x: Tokens) -> Tensor:
    drift = x.of("current")
    return (-drift.ratio() * x.current).masked_fill(
        (drift.delta > FLOAT32_OVERFLOW) & (x.current == 0), math.nan
    )


def _clipped_rows(view: View) -> Tensor | None:
    r = view.pooled_ratio
    return None if r is None else clipped(r, view.preset.clip)


_ERROR_EXCESS = Measure("e^|Δ| − 1", lambda x: x.delta.abs().expm1(), moment=("e^|d| − 1", "Δ", "", ""))
ERROR = Measure("e^|Δ|", lambda x: x.ratios.token("mult_prob_error"), linear=((1, ONE), (1, _ERROR_EXCESS)))
K3_REVERSE = Measure(
    "1/r − 1 + Δ", lambda x: x.ratios.token("k3_reverse"), moment=("k3_reverse", "Δ", "", "")
)
JS = Measure(
    "log cosh(Δ/2)",
    lambda x: (2 * (x.delta / 4).sinh().square()).log1p(),
    moment=("log cosh(d/2)", "Δ", "", ""),
)
"""½ k3 of π_old and ½ k3 of π_rollout, each against the mean of both probabilities."""
VANISHED = Measure("no float32 probability", _vanished)
HELD = Measure("r, 0 beyond float32", _held, near=RATIO)
CURRENT = Measure("log π_θ", lambda x: x.current, moment=("1", "", "log π_θ", ""))
_MORE = Measure(
    "(π_θ/π_rollout − 1) log π_θ",
    lambda x: x.of("current").excess() * x.current,
    moment=("x", "current", "log π_θ", ""),
)
SURPRISAL = Measure("−(π_θ/π_rollout) log π_θ", _surprisal, linear=((-1, CURRENT), (-1, _MORE)))
CLIPPED_RATIO = Measure(
    "clipped e^u",
    lambda x: clipped(x.update_ratio, x.preset.clip),
    own=True,
    near=UPDATE_RATIO,
    rows=_clipped_rows,
)


def _ratio(preset: Preset) -> Measure:
    """The loss's ratio; a REINFORCE loss has none, and log π_θ stands in its place."""
    return CURRENT if preset.loss == "reinforce" else UPDATE_RATIO


def _clipped(preset: Preset) -> Measure:
    return CURRENT if preset.loss == "reinforce" else CLIPPED_RATIO


def _weights(view: View) -> Tensor:
    """Σ of the weights as the loss gets them; of a sequence's weight, once."""
    there = view.kept_tokens > 0
    if applied(view.preset).weight is None:
        return view.total(HELD) * there
    return view.kept_weights if view.row_weights is None else view.row_weights * there


# ---------------------------------------------------------------- out of bounds


def _geometric(preset: Preset) -> tuple[Reject, ...]:
    """Return the rules of seq-mask-tis: bounds on the geometric mean."""
    return tuple(r for r in applied(preset).reject if r.statistic == "ratio" and r.over == "mean")


def _bounds(preset: Preset) -> bool:
    """Return whether truncated_importance_sampling_type is set."""
    weight = applied(preset).weight
    return bool(_geometric(preset)) or (weight is not None and weight.action in ("truncate", "mask"))


def _oob(view: View) -> Tensor:
    """Count tokens out of bounds; under seq-mask-tis, flag sequences; [S]."""
    rules = _geometric(view.preset)
    if not rules:
        return _in_left(_oob_tokens(view), view)
    passed = view.there
    for rule in rules:
        passed = passed & view.passes(rule)
    return _in_left(~passed + view.zeros, view)


def _oob_tokens(view: View) -> Tensor:
    """Count tokens out of bounds, [S]; overflowed weights are 0 first, so only a lower bound counts them."""
    weight, outside = view.preset.weight, view.capped()
    if weight is None or weight.overflow != "zero" or weight.lower:
        return outside
    return outside - view.tokens_above(weight.over, FLOAT32_OVERFLOW)


# ---------------------------------------------------------------- errors of sequences


def _error(view: View) -> Tensor:
    """Mean e^|Δ| of each sequence; 0 for one without a token, infinite where float32 has no room."""
    total = view.total(ERROR)
    return total.masked_fill(total > FLOAT32_MAX, math.inf) / view.divisor


def _dropped_correct(view: View) -> Tensor:
    rewards = view.batch.rewards
    assert rewards is not None
    return (view.there & ~_left(view) & (rewards == 1)) + view.zeros


RATIO_SUM, RATIO_RANGE = _of_loss("ratio", _ratio)
CLIPPED_SUM, CLIPPED_RANGE = _of_loss("clipped", _clipped)
SUMS = (
    Sum("tokens", lambda view: _in_left(view.n, view), own=True),
    Sum("rows", lambda view: _left(view) + view.zeros, own=True),
    _sum("error", ERROR),
    _sum("k3", K3),
    _sum("k3_reverse", K3_REVERSE),
    _sum("js", JS),
    _sum("vanished", VANISHED),
    Sum("weights", _weights, own=True),
    Sum("oob", _oob, own=True, when=_bounds),
    RATIO_SUM,
    CLIPPED_SUM,
    Sum("surprisal", lambda view: _in_left(view.total(SURPRISAL), view), own=True, needs=UPDATE),
    Sum("row_error", _error),
    Sum("row_error_left", lambda view: _in_left(_error(view), view), own=True),
    Sum("dropped_correct", _dropped_correct, own=True, needs=("rewards",)),
)
RANGES = (
    RATIO_RANGE,
    CLIPPED_RANGE,
    Range("row_errors", lambda view: ends(_error(view), view.there)),
    Range("row_errors_left", lambda view: ends(_error(view), _left(view)), own=True),
)

# ---------------------------------------------------------------- what is logged


def _single(x: float) -> float:
    """Return x as in float32: infinite beyond its largest number."""
    return math.copysign(math.inf, x) if abs(x) > FLOAT32_MAX else x


def _mean(column: str) -> Value:
    return lambda totals: _single(totals(column)) / (totals("tokens") + EPS)


def _divergence(totals: Totals) -> float:
    return math.nan if totals("vanished") else _mean("js")(totals)


def _mean_weight(totals: Totals) -> float:
    weight = applied(totals.preset).weight
    per = "rows" if weight is not None and weight.over != "token" else "tokens"
    return _single(totals("weights")) / (totals(per) + EPS)


def _share_oob(totals: Totals) -> float:
    return totals("oob") / (totals("rows" if _geometric(totals.preset) else "tokens") + EPS)


def _dropped(totals: Totals) -> float:
    return totals.sequences - totals("rows")


def _correct(totals: Totals) -> float:
    return totals("dropped_correct") / max(_dropped(totals), 1)


def _low(name: str) -> Value:
    return lambda totals: _single(totals.low(name))


def _high(name: str) -> Value:
    return lambda totals: _single(totals.high(name))


def _row_end(side: Callable[[Totals, str], float], name: str, rows: Value) -> Value:
    """Return an extreme over sequences; 0 if there are none."""
    return lambda totals: side(totals, name) if rows(totals) else 0.0


_OF_PAIR = "π_old/π_rollout; not clamped"

ENTRIES = (
    Entry(
        "train/token_mult_prob_error",
        "Mean over tokens of e^|Δ|, whichever way the two policies differ: 1 when they agree, never below. "
        "It is not the mean ratio.",
        _mean("error"),
    ),
    Entry(
        "train/gen_kl_error",
        f"Mean over tokens of r − 1 − log r, r = {_OF_PAIR}: the estimate of KL(π_rollout‖π_old) that is k3 "
        "here, with reference_policy_kl_type at its default.",
        _mean("k3"),
    ),
    Entry(
        "train/policy_kl_error",
        "Mean over tokens of 1/r − 1 + log r, r = π_old/π_rollout: the same function of the reverse ratio. "
        "The tokens are still the rollout's, so it does not estimate KL(π_old‖π_rollout).",
        _mean("k3_reverse"),
    ),
    Entry(
        "train/js_divergence_error",
        "Mean over tokens of half the k3 of π_old and half that of π_rollout, each against the mean of the "
        "two probabilities, at the sampled token only: a divergence of estimates, not bounded by log 2; nan "
        "as soon as float32 holds neither probability of a token (both logs below −102.9).",
        _divergence,
    ),
    Entry(
        "train/sampling_importance_ratio",
        "Mean of the weights as the loss gets them, so after truncation and with rejected ones as 0; over "
        "tokens, or over sequences where the weight is the product. There the trainer multiplies a column of "
        "weights by a row of masks, and logs it times the valid sequences of the micro-batch; here it is the "
        "mean.",
        _mean_weight,
    ),
    Entry(
        "train/is_oob_ratio",
        "Share of tokens whose weight is outside the bounds, or under seq-mask-tis of sequences whose "
        "geometric mean is. The product weight counts by tokens too; a weight that float32 cannot hold is 0 "
        "by then, so that only a lower bound finds it outside.",
        _share_oob,
        _bounds,
    ),
    Entry(
        "train/probs_ratio",
        "Mean over tokens of π_θ/π_old, the loss's own ratio (GSPO: the geometric mean of the sequence, by "
        "tokens); it has no part in the mismatch. With disable_ppo_ratio it is the mean of log π_θ.",
        _mean("ratio"),
    ),
    Entry(
        "train/probs_ratio_clamped",
        "The same ratio within [1 − ratio_clip_min, 1 + ratio_clip_max], whatever the sign of the advantage.",
        _mean("clipped"),
    ),
    Entry("train/probs_ratio_min", "Smallest π_θ/π_old of a token, not clamped.", _low("ratio of a token")),
    Entry("train/probs_ratio_max", "Largest π_θ/π_old of a token, not clamped.", _high("ratio of a token")),
    Entry(
        "train/probs_ratio_clamped_min",
        "Smallest clamped ratio of a token.",
        _low("clipped of a token"),
    ),
    Entry(
        "train/probs_ratio_clamped_max",
        "Largest clamped ratio of a token.",
        _high("clipped of a token"),
    ),
    Entry(
        "train/approx_entropy",
        "Mean over tokens of −(π_θ/π_rollout) log π_θ at the sampled token, unclamped: an "
        "importance-weighted estimate of the entropy of π_θ, not a sum over the vocabulary.",
        _mean("surprisal"),
    ),
    Entry(
        "train/max_seq_mult_prob_error",
        "Largest mean e^|Δ| of a sequence, before the error mask.",
        _row_end(Totals.high, "row_errors", lambda totals: totals.sequences),
    ),
    Entry(
        "train/mean_seq_mult_prob_error",
        "Mean over sequences of their mean e^|Δ|, before the error mask; token_mult_prob_error weights them "
        "by length.",
        lambda totals: _single(totals("row_error")) / max(totals.sequences, 1),
    ),
    Entry(
        "train/min_seq_mult_prob_error",
        "Smallest mean e^|Δ| of a sequence, before the error mask.",
        _row_end(Totals.low, "row_errors", lambda totals: totals.sequences),
    ),
    Entry(
        "train/max_seq_mult_prob_error_after_mask",
        "Largest mean e^|Δ| of a sequence that the error mask leaves; 0 if it leaves none.",
        _row_end(Totals.high, "row_errors_left", lambda totals: totals("rows")),
    ),
    Entry(
        "train/mean_seq_mult_prob_error_after_mask",
        "Mean over the sequences that the error mask leaves of their mean e^|Δ|.",
        lambda totals: _single(totals("row_error_left")) / max(totals("rows"), 1),
    ),
    Entry(
        "train/min_seq_mult_prob_error_after_mask",
        "Smallest mean e^|Δ| of a sequence that the error mask leaves; 0 if it leaves none.",
        _row_end(Totals.low, "row_errors_left", lambda totals: totals("rows")),
    ),
    Entry(
        "train/num_masked_seqs_by_logprob_error",
        "How many sequences the error mask drops; 0 where no threshold is set. It counts nothing that "
        "seq-mask-tis drops.",
        _dropped,
    ),
    Entry(
        "train/masked_correct_pct",
        "Share (not per cent) of the sequences the error mask drops whose reward is exactly 1; 0 if it drops "
        "none.",
        _correct,
    ),
)

LOG = Log("nemo-rl", SUMS, RANGES, ENTRIES)

# ---------------------------------------------------------------- configuration

TYPE, CAP, LOW = (f"truncated_importance_sampling_{key}" for key in ("type", "ratio", "ratio_min"))
CLIP = ClipKeys("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
LOSS = "loss_fn."
RAW = {TYPE: None, CAP: None}
"""No truncation: a ratio that is left over from a base file is an error without its type."""


def nemo_rl(preset: Preset) -> Said:
    """tis, icepop or seq-mask-tis, and a threshold on the sequence's log-prob error."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    error = parts.take("mult_prob_error", "mean", "upper")
    settings = {**_said_weights(parts), **_said_loss(preset)}
    parts.finish()
    block = {LOSS + key: value for key, value in settings.items()}
    if error is not None:
        block["grpo.seq_logprob_error_threshold"] = error.upper
    return yaml_and_hydra("nemo-rl", block), (
        *_remarks(settings, error is not None),
        *clip_remarks(preset, CLIP),
    )


def _said_weights(parts: Parts) -> Settings:
    if parts.weight is None:
        return {"use_importance_sampling_correction": False, **RAW}
    on = {"use_importance_sampling_correction": True}
    if parts.weight.over == "sum" or parts.loss == "gspo":
        return on | _sequence(parts)
    band = parts.take_band("token")
    if band is not None:
        return on | _bounded("icepop", *band)
    weight = parts.take_weight("token", lower=True)
    if weight is None or weight.action == "none":
        rule = parts.take("ratio", "mean")
        return on | (_bounded("seq-mask-tis", rule.lower, rule.upper) if rule else RAW)
    return on | _tis(weight.lower, weight.upper)


def _sequence(parts: Parts) -> Settings:
    """sequence_level_importance_ratios makes both the weight a product and the loss GSPO."""
    if parts.loss != "gspo":
        cannot("weights of the product ratio without the GSPO loss")
    weight = parts.take_weight("sum", lower=True)
    if weight is None or weight.action == "none":
        return dict(RAW)
    return _tis(weight.lower, weight.upper)


def _tis(low: float | None, high: float | None) -> Settings:
    if high is None:
        cannot("weights truncated from below alone")
    return {TYPE: "tis", CAP: high, LOW: low}


def _bounded(kind: str, low: float | None, high: float | None) -> Settings:
    """icepop and seq-mask-tis need both bounds; a ratio is never below 0."""
    if high is None:
        cannot(f"{kind} without an upper bound")
    return {TYPE: kind, CAP: high, LOW: 0.0 if low is None else low}


def _said_loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        low, high = clip_bounds(preset)
        return {"use_cispo": True, CLIP.low: low, CLIP.high: high, CLIP.dual: None}
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    return {**(gspo if preset.loss == "gspo" else {}), **clip_settings(preset, CLIP)}


def _remarks(settings: Settings, error: bool) -> tuple[str, ...]:
    return remarks(
        settings.get(TYPE) == "tis"
        and not settings[LOW]
        and f"before NeMo-RL 0.6.0 there is no {TYPE}: the ratio alone means tis",
        error and "the sequences of seq_logprob_error_threshold leave the denominator",
    )


def _habits(preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
    error = any(rule.statistic == "mult_prob_error" for rule in preset.reject)
    overflow = "a ratio that float32 cannot hold counts as 0 here"
    return Habits(denominator="kept" if error else "all", overflow=overflow)


TRAINER = Trainer("nemo-rl", nemo_rl, _habits, (LOG,))
