"""What ms-swift logs under `rollout_correction/`, of π_old against the rollout.

Off ms-swift 3602360a. Names are verl's, definitions are not: chi2_seq is of geometric means, k3 is bounded at
10 per token, the ESS counts a masked token as 1/C. Its means are per micro-batch and rank, here of the dump.
"""

from __future__ import annotations

from collections.abc import Callable

from offpol_diag.crosswalk.ledger import Entry, Ledger, Page
from offpol_diag.crosswalk.read import EPS
from offpol_diag.crosswalk.swift_sums import EXTREMES, SUMS, of_rows

ESS_LEAST = 1e-10
"""The least that the normalised second moment is taken for."""


def _over_tokens(column: str, minus: float = 0.0) -> Callable[[Page], float]:
    return lambda page: page(column) / page.tokens - minus


def _over_rows(column: str, minus: float = 0.0) -> Callable[[Page], float]:
    return lambda page: page(column) / page.rows - minus


def _ess(page: Page) -> float:
    mean = page("bounded") / page.tokens
    return 1 / max(page("bounded²") / page.tokens / (mean + EPS) ** 2, ESS_LEAST)


def _clipped_frac(page: Page) -> float:
    return page("clipped") / (page.rows if of_rows(page.preset) else page.tokens)


_EMPTY = " A row without a token counts as {}."


def _entry(name: str, meaning: str, of: Callable[[Page], float]) -> Entry:
    return Entry(f"rollout_correction/{name}", meaning, of)


BOOK = Ledger(
    "ms-swift",
    SUMS,
    EXTREMES,
    (
        _entry(
            "training_ppl",
            "Mean over rows of e^(−mean log π_old), not the perplexity of all tokens." + _EMPTY.format(1),
            _over_rows("training_ppl"),
        ),
        _entry(
            "training_log_ppl",
            "Mean over rows of −mean log π_old, nats." + _EMPTY.format(0),
            _over_rows("training_log_ppl"),
        ),
        _entry(
            "kl",
            "Mean over tokens of log π_rollout − log π_old, nats (k1; it may be negative). Before 2025-12-22 "
            "its sign was the opposite.",
            _over_tokens("kl"),
        ),
        _entry(
            "k3_kl",
            "Mean over tokens of r − 1 − log r, with log r bounded to ±20 and the result to 10: one bad "
            "token cannot show as it does in verl.",
            _over_tokens("k3_kl"),
        ),
        _entry(
            "rollout_ppl",
            "Mean over rows of e^(−mean log π_rollout)." + _EMPTY.format(1),
            _over_rows("rollout_ppl"),
        ),
        _entry(
            "rollout_log_ppl",
            "Mean over rows of −mean log π_rollout, nats." + _EMPTY.format(0),
            _over_rows("rollout_log_ppl"),
        ),
        _entry(
            "log_ppl_diff",
            "Mean over rows of mean log π_rollout − mean log π_old, nats: above 0 where the trainer finds "
            "the text less likely." + _EMPTY.format(0),
            _over_rows("log_ppl_diff"),
        ),
        _entry(
            "log_ppl_abs_diff",
            "The same without its sign, row by row." + _EMPTY.format(0),
            _over_rows("log_ppl_abs_diff"),
        ),
        _entry(
            "log_ppl_diff_max",
            "Largest log_ppl_diff of a row." + _EMPTY.format(0),
            lambda page: page.high("log_ppl_diff"),
        ),
        _entry(
            "log_ppl_diff_min",
            "Smallest log_ppl_diff of a row." + _EMPTY.format(0),
            lambda page: page.low("log_ppl_diff"),
        ),
        _entry(
            "ppl_ratio",
            "Mean over rows of the two perplexities' ratio, 1/r in geometric mean." + _EMPTY.format(1),
            _over_rows("ppl_ratio"),
        ),
        _entry(
            "chi2_token",
            "Mean over tokens of r², log r bounded to ±20, minus 1; below 0 on samples that lack the tail.",
            _over_tokens("rr", 1.0),
        ),
        _entry(
            "chi2_seq",
            "Mean over rows of the squared GEOMETRIC mean of r, minus 1: near 0 where verl's number of that "
            "name, of products, is huge." + _EMPTY.format("r = 1"),
            _over_rows("gg", 1.0),
        ),
        _entry(
            "is_weight_mean",
            "Mean over tokens of the weights as the loss gets them, zeros included.",
            _over_tokens("weight"),
        ),
        _entry(
            "ess",
            "1/E[(w/E[w])²] over tokens, a fraction, of weights bounded to [1/C, C]: a masked token counts "
            "as 1/C, and the untruncated tail of sequence_mask as C.",
            _ess,
        ),
        _entry(
            "clipped_frac",
            "token_truncate: share of tokens with r > C; token_mask: share of weights that are 0; sequence "
            "modes: share of all rows, empty ones included, whose geometric mean of r is above C.",
            _clipped_frac,
        ),
    ),
)
