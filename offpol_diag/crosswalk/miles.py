"""What miles, a fork of slime, logs under `train/`: two names more, and the anchor in the place of π_θ.

Off miles 31f1ca961: loss_hub/losses.py:290-385, loss_hub/math_utils.py:19-86 and 139-180. The numbers that it
has in common with slime are made in `slime` and `slime_mis`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from offpol_diag.crosswalk import powers, slime, slime_mis, update
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page
from offpol_diag.crosswalk.view import View

SAFETY = 20.0
"""Bound on log π_θ/π_old in ess_ratio, nats."""
LEAST = 1e-8
"""The least that Σw² of a sample is taken for."""

WEIGHT = slime.OIS.then("to ±20", lambda r: r.clamp(math.exp(-SAFETY), math.exp(SAFETY)))
SQUARED = WEIGHT.then("squared", torch.square)
GAP = "train/train_rollout_logprob_abs_diff"


def _ess(view: View) -> Tensor:
    """(Σw)²/(n Σw²) of each sample, [S], of the loss mask as it came; 0 for one without a token."""
    if update.pooled(view):
        return view.there.to(torch.float64)
    return view.total(WEIGHT).square() / (view.divisor * view.total(SQUARED).clamp(min=LEAST))


def _of_anchor(of: Callable[[Page], float]) -> Callable[[Page], float]:
    """A number of the anchor against the rollout: 0 where the rollout is the anchor."""
    return lambda page: of(page) if page.preset.policy == "old" else 0.0


ESS = Entry(
    "train/ess_ratio",
    "Mean over samples of (Σw)²/(n Σw²), w = π_θ/π_old with its log within ±20: the effective sample size of "
    "the update within a sample, not of the mismatch; 0 for a sample without a token, and of all tokens, "
    "rejected or not. Under GSPO all w of a sample are equal, so that it is 1.",
    slime.mean("ess"),
)
KL = Entry(
    "train/train_rollout_kl",
    "Mean of r − 1 − log r, r = π_old/π_rollout, with log r within ±20 and the result at most 10: k3, "
    "averaged per sample first. Tokens that the MIS helper rejects are 0 in it and still divide; with "
    "--use-rollout-logprobs it is 0.",
    _of_anchor(slime.mean("rollout_kl")),
)


def _entry(entry: Entry) -> Entry:
    """slime's entry as miles has it."""
    if entry.name != GAP:
        return entry
    meaning = (
        "Mean |log π_old − log π_rollout|, nats. With --use-rollout-logprobs π_rollout stands in π_old's "
        "place, so that it is 0 whatever the mismatch. Tokens that the MIS helper rejects are 0 in it and "
        "still divide."
    )
    return replace(entry, meaning=meaning, of=_of_anchor(entry.of))


def _book(logs: str, base: Ledger, rejects: bool) -> Ledger:
    """slime's book with what miles has beside it."""
    sums = (
        *base.sums,
        Column("ess", _ess, own=True, needs=update.NEEDS, by=update.pooled),
        slime.of_loss("rollout_kl", powers.K3_HELD, rejects),
    )
    return Ledger(logs, sums, base.extremes, (*map(_entry, base.entries), ESS, KL))


BOOKS = (_book("miles", slime.BOOK, rejects=False), _book("miles-mis", slime_mis.BOOK, rejects=True))
