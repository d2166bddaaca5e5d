"""What prime-rl logs (trainer/rl/loss.py, train.py): r = π_θ/π_rollout, nothing clamped.

What its loss function returns is a mean per sequence, which the trainer then takes the mean and the maximum
of; a sequence without a loss token counts there as 0. The rows of v0.2 log other names.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from offpol_diag.crosswalk.ledger import Entry, Ledger, Page
from offpol_diag.crosswalk.moments import std
from offpol_diag.crosswalk.prime_rl_sums import EXTREMES, MASKED_MEANS, SIGNED_MEANS, SUMS, default, now, then
from offpol_diag.presets import Preset


def _token_kl(page: Page) -> float:
    return page("kl") / page.tokens


def _over_entropy(kl: Callable[[Page], float]) -> Callable[[Page], float]:
    return lambda page: kl(page) / (page("entropy") / page.tokens) if page("entropy") > 0 else math.nan


def _of_rows(name: str) -> Callable[[Page], float]:
    return lambda page: page(name) / page.rows


def _of_tokens(name: str) -> Callable[[Page], float]:
    return lambda page: page(name) / page.tokens


def _highest(name: str) -> Callable[[Page], float]:
    return lambda page: page.high(name)


PER_SEQUENCE = "a mean over the tokens of each sequence, then over sequences (one without a loss token is 0)"
WORST = "the largest of the sequences' means, not of the tokens"
MEANINGS = {
    "masked_mismatch_kl": "r − 1 − log r, r = π_θ/π_rollout, over the tokens that the mask drops",
    "unmasked_mismatch_kl": "r − 1 − log r, r = π_θ/π_rollout, over the tokens that the mask keeps",
    "is_masked": "the share of loss tokens that the mask drops, those with A = 0 included",
    "is_masked_low": "the share of loss tokens with A < 0 that are dropped at the lower bound; one dropped "
    "with A = 0 is in is_masked alone",
    "is_masked_high": "the share of loss tokens with A > 0 that are dropped at the upper bound",
    "masked_advantage_positive": "of the tokens dropped, the share with A > 0: no advantage itself",
    "masked_advantage_negative": "of the tokens dropped, the share with A < 0: no advantage itself",
}


def _pair(name: str, when: Callable[[Preset], bool]) -> tuple[Entry, Entry]:
    text = f"{MEANINGS[name]}: {PER_SEQUENCE}"
    return (
        Entry(f"{name}/mean", text, _of_rows(name), when),
        Entry(f"{name}/max", f"{MEANINGS[name]}: {WORST}", _highest(name), when),
    )


NOW = (
    Entry(
        "mismatch_kl/all/mean",
        "r − 1 − log r, r = π_θ/π_rollout, so an estimate of KL(π_rollout‖π_θ); mean over the loss tokens of "
        "the batch. The policy is the one being trained, not π_old",
        _token_kl,
        now,
    ),
    Entry(
        "mismatch_kl/all/std",
        "standard deviation of that over tokens, n − 1 below",
        lambda p: std(p("kl"), p("kl²"), p.tokens),
        now,
    ),
    Entry("mismatch_kl/all/max", "the largest of any loss token", lambda p: p.high("token kl"), now),
    Entry(
        "kl_ent_ratio/mean",
        "mismatch_kl/all/mean over the mean entropy: a ratio of two means, not a mean of ratios. The entropy "
        "is the dump's; prime-rl takes the trainer's",
        _over_entropy(_token_kl),
        now,
    ),
    *(entry for name in MASKED_MEANS for entry in _pair(name, now)),
    *(entry for name in SIGNED_MEANS for entry in _pair(name, default)),
)

OLD_FLAG_MEANINGS = {
    "sequence_masked_low": "the share of sequences with a token whose r is below sequence_mask_low",
    "sequence_masked_high": "the share of sequences with a token whose r is above sequence_mask_high",
    "geo_masked_low": "the share of sequences whose geometric mean of r is below geo_mask_low",
    "geo_masked_high": "the share of sequences whose geometric mean of r is above geo_mask_high",
}
OLD_COUNT_MEANINGS = {
    "is_masked": "the share of loss tokens that any of the masks drops, over tokens: later versions take the "
    "mean of each sequence first",
    "is_masked_low": "the share of loss tokens with r below token_mask_low, whatever their advantage",
    "is_masked_high": "the share of loss tokens with r above token_mask_high, whatever their advantage",
}


def _row_mean_kl(page: Page) -> float:
    return page("row kl") / page.rows


THEN = (
    Entry(
        "mismatch_kl/mean",
        f"r − 1 − log r, r = π_θ/π_rollout: {PER_SEQUENCE}. Later versions take it over all tokens",
        _row_mean_kl,
        then,
    ),
    Entry(
        "mismatch_kl/std",
        "standard deviation of the sequences' means, n − 1 below",
        lambda p: std(p("row kl"), p("row kl²"), p.rows),
        then,
    ),
    Entry("mismatch_kl/min", "the smallest of the sequences' means", lambda p: p.low("row kl"), then),
    Entry("mismatch_kl/max", WORST, lambda p: p.high("row kl"), then),
    Entry(
        "kl_ent_ratio/mean",
        "mismatch_kl/mean over the mean entropy of the tokens",
        _over_entropy(_row_mean_kl),
        then,
    ),
    *(
        Entry(f"{name}/mean", f"{MEANINGS[name]}: {PER_SEQUENCE}", _of_rows(name), then)
        for name in ("masked_mismatch_kl", "unmasked_mismatch_kl")
    ),
    *(
        Entry(f"{name}/mean", text, _of_tokens(f"tokens {name}"), then)
        for name, text in OLD_COUNT_MEANINGS.items()
    ),
    *(Entry(f"{name}/mean", text, _of_rows(name), then) for name, text in OLD_FLAG_MEANINGS.items()),
    Entry(
        "geo_seq_ratio/mean",
        "mean over sequences of the geometric mean of r = π_θ/π_rollout, unclamped; a sequence without a "
        "loss token is 1",
        lambda p: 1 + p("geo − 1") / p.rows,
        then,
    ),
)

BOOK = Ledger("prime-rl", SUMS, EXTREMES, (*NOW, *THEN))
