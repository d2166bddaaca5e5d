"""What NeMo-RL logs (algorithms/loss/loss_functions.py and grpo.py of v0.6 and later), under `train/`.

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

from offpol_diag.crosswalk.ledger import Entry, Ledger, Page
from offpol_diag.crosswalk.nemo_rl_sums import EXTREMES, SUMS, bounds, geometric
from offpol_diag.metrics.outcome import applied
from offpol_diag.ratios import FLOAT32_MAX

EPS = 1e-8


def _single(x: float) -> float:
    """As float32 holds it: infinite beyond its largest number."""
    return math.copysign(math.inf, x) if abs(x) > FLOAT32_MAX else x


def _mean(column: str) -> Callable[[Page], float]:
    return lambda page: _single(page(column)) / (page("tokens") + EPS)


def _divergence(page: Page) -> float:
    return math.nan if page("vanished") else _mean("js")(page)


def _mean_weight(page: Page) -> float:
    weight = applied(page.preset).weight
    per = "rows" if weight is not None and weight.over != "token" else "tokens"
    return _single(page("weights")) / (page(per) + EPS)


def _share_oob(page: Page) -> float:
    return page("oob") / (page("rows" if geometric(page.preset) else "tokens") + EPS)


def _dropped(page: Page) -> float:
    return page.sequences - page("rows")


def _correct(page: Page) -> float:
    return page("dropped_correct") / max(_dropped(page), 1)


Side = Callable[[Page, str], float]


def _end(side: Side, name: str) -> Callable[[Page], float]:
    return lambda page: _single(side(page, name))


def _row_end(side: Side, name: str, rows: Callable[[Page], float]) -> Callable[[Page], float]:
    """An extreme of sequences; 0 where there is none."""
    return lambda page: side(page, name) if rows(page) else 0.0


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
        bounds,
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
    Entry(
        "train/probs_ratio_min", "Smallest π_θ/π_old of a token, not clamped.", _end(Page.low, "ratio_range")
    ),
    Entry(
        "train/probs_ratio_max", "Largest π_θ/π_old of a token, not clamped.", _end(Page.high, "ratio_range")
    ),
    Entry(
        "train/probs_ratio_clamped_min",
        "Smallest clamped ratio of a token.",
        _end(Page.low, "clipped_range"),
    ),
    Entry(
        "train/probs_ratio_clamped_max",
        "Largest clamped ratio of a token.",
        _end(Page.high, "clipped_range"),
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
        _row_end(Page.high, "row_errors", lambda page: page.sequences),
    ),
    Entry(
        "train/mean_seq_mult_prob_error",
        "Mean over sequences of their mean e^|Δ|, before the error mask; token_mult_prob_error weights them "
        "by length.",
        lambda page: _single(page("row_error")) / max(page.sequences, 1),
    ),
    Entry(
        "train/min_seq_mult_prob_error",
        "Smallest mean e^|Δ| of a sequence, before the error mask.",
        _row_end(Page.low, "row_errors", lambda page: page.sequences),
    ),
    Entry(
        "train/max_seq_mult_prob_error_after_mask",
        "Largest mean e^|Δ| of a sequence that the error mask leaves; 0 if it leaves none.",
        _row_end(Page.high, "row_errors_left", lambda page: page("rows")),
    ),
    Entry(
        "train/mean_seq_mult_prob_error_after_mask",
        "Mean over the sequences that the error mask leaves of their mean e^|Δ|.",
        lambda page: _single(page("row_error_left")) / max(page("rows"), 1),
    ),
    Entry(
        "train/min_seq_mult_prob_error_after_mask",
        "Smallest mean e^|Δ| of a sequence that the error mask leaves; 0 if it leaves none.",
        _row_end(Page.low, "row_errors_left", lambda page: page("rows")),
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

BOOK = Ledger("nemo-rl", SUMS, EXTREMES, ENTRIES)
