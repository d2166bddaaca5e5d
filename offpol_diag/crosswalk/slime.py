"""What slime logs under `train/` of loss, vanilla TIS, IcePop and OPSM; its helper: `slime_mis`; `miles` too.

Every number is reduced as the loss is by default: over the tokens of each sample, then over the samples of
the batch, one without a token counting as 0; --calculate-per-token-loss makes token means of them instead.
The helper's own numbers (`mis_`) are of the mask as it came. The loss's (`pg_clipfrac`, `ppo_kl`,
`train_rollout_logprob_abs_diff`) are taken after the helper's rejection: what it rejects counts as 0, and
still divides (up to v0.2.4 it left the denominator).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.batch import Batch
from offpol_diag.crosswalk import powers, update
from offpol_diag.crosswalk.keys import KEPT, kept
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page, together
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.crosswalk.views import Views
from offpol_diag.metrics import signs
from offpol_diag.presets import Preset, Reject

When = Callable[[Preset], bool]
Rows = Callable[[View], Tensor]


def row_mean(of: Measure, view: View) -> Tensor:
    """Σ over the tokens of the sample, over their number: [S], 0 for one without any."""
    return view.total(of) / view.divisor


def there(x: Tensor, view: View) -> Tensor:
    """[S], 0 for a sample without a token."""
    return torch.where(view.there, x, 0.0)


def shares(counts: Tensor, per: str, view: View) -> Tensor:
    """Counts of tokens, or 1 for a sample → the share of the sample's tokens, [S]."""
    return counts / view.divisor if per == "token" else counts


def mean(column: str) -> Callable[[Page], float]:
    """Over the samples of the batch."""
    return lambda page: page(column) / page.rows


# ---------------------------------------------------------------- the loss


def _clip_decides(view: View) -> Tensor:
    """REINFORCE clips nothing, CISPO wherever its weight moves."""
    loss = view.preset.loss
    if loss == "reinforce":
        return torch.zeros_like(view.ratios.delta)
    r = update.ratio(view)
    found = update.clipped(r, view.preset.clip) != r if loss == "cispo" else update.decides(view)
    return found.to(torch.float64)


CLIPPED = Measure("slime clipped", _clip_decides, lambda view: (view.preset.loss, view.preset.clip))
KL = Measure("slime kl", lambda view: -update.log_ratio(view), update.pooled)
OIS = Measure("slime ois", update.ratio, update.pooled)


def of_loss(name: str, of: Measure, rejects: bool, needs: tuple[str, ...] = ()) -> Column:
    """A number of the loss, per sample; with `rejects`, what the helper rejects counts as 0 in it."""

    def left(views: Views) -> Sequence[Tensor]:
        means = torch.stack([view.total(of, KEPT) for view in views]) / views[0].divisor
        return torch.where(torch.stack([view.pieces.sequences for view in views]), means, 0.0).unbind()

    def by(view: View) -> Hashable:
        return of.by and of.by(view), kept(view) if rejects else None

    if rejects:
        return together(name, left, needs=needs, by=by)
    return Column(name, lambda view: row_mean(of, view), own=True, needs=needs, by=by)


def loss_columns(rejects: bool) -> tuple[Column, ...]:
    """What is summed of the loss; `rejects` where a rejection zeroes it."""
    return (
        of_loss("abs_diff", powers.DISTANCE, rejects),
        of_loss("clipped", CLIPPED, rejects, (*update.NEEDS, "advantages")),
        of_loss("kl", KL, rejects, update.NEEDS),
        of_loss("ois", OIS, False, update.NEEDS),
    )


def loss_entries(corrected: When) -> tuple[Entry, ...]:
    """What is logged of the loss; `corrected` says under which presets a TIS function is called."""
    return (
        Entry(
            "train/train_rollout_logprob_abs_diff",
            "Mean |log π_old − log π_rollout| (π_θ in π_old's place with --use-rollout-logprobs), nats. "
            "Tokens that the MIS helper rejects are 0 in it and still divide: it falls as more is rejected.",
            mean("abs_diff"),
        ),
        Entry(
            "train/pg_clipfrac",
            "Share of tokens whose clipped loss is the larger one; the ratio is π_θ/π_old (π_θ/π_rollout "
            "with --use-rollout-logprobs), so no number of the mismatch. Of rejected tokens none counts.",
            mean("clipped"),
        ),
        Entry(
            "train/ppo_kl",
            "Mean of log π_old − log π_θ (π_rollout in π_old's place with --use-rollout-logprobs), rejected "
            "tokens as 0: of the update, not of the mismatch; it may be negative.",
            mean("kl"),
        ),
        Entry(
            "train/ois",
            "Mean of π_θ/π_old (1 before the first update), of all tokens, rejected or not; logged only "
            "where TIS or the mismatch metrics are on. Not clamped.",
            mean("ois"),
            corrected,
        ),
    )


# ---------------------------------------------------------------- vanilla TIS, IcePop, OPSM


def weighs(preset: Preset) -> bool:
    """Whether there is a weight, and it is used."""
    return preset.apply and preset.weight is not None


def _opsm(preset: Preset) -> Reject | None:
    """OPSM's rule as one on sequences, whatever the sign of A."""
    rules = (rule for rule in preset.reject if rule.statistic == "k1" and rule.of_token)
    found = next((rule for rule in rules if rule.advantage == "negative"), None)
    return found and replace(found, advantage="any", advantage_of="unit")


def _masks(preset: Preset) -> bool:
    return preset.apply and _opsm(preset) is not None


def _changed(view: View) -> Tensor:
    weighed = view.pieces.first.weighed
    assert weighed is not None
    return shares(weighed.high + weighed.low, weighed.final.per, view)


def _masked(view: View) -> Tensor:
    """Tokens with A < 0 of samples that drifted, those outside the loss mask too, over those in it."""
    rule, negative = _opsm(view.preset), signs.every(view.scene)["negative"]
    assert rule is not None
    drifted = ~correction.passes(view.ratios, rule).values
    return torch.where(drifted, negative + _outside(view.batch, negative), 0.0) / view.divisor


def _outside(batch: Batch, negative: Tensor) -> Tensor:
    """Tokens outside the loss mask with A < 0, [S]; without A of their own they have their sample's."""
    if batch.masked_negative is not None:
        return batch.masked_negative.to(torch.float64)
    return torch.where(negative > 0, batch.masked.to(torch.float64), 0.0)


EXCESS = Measure("|r − 1|", lambda view: powers.excess(view.ratios).abs())

BOOK = Ledger(
    "slime",
    (
        *loss_columns(rejects=False),
        Column("tis", lambda view: row_mean(powers.RATIO, view), when=weighs),
        Column("tis_abs", lambda view: row_mean(EXCESS, view), when=weighs),
        Column("tis_clipped", _changed, own=True, when=weighs),
        Column("opsm", _masked, own=True, when=_masks, needs=("advantages",)),
    ),
    (),
    (
        *loss_entries(weighs),
        Entry(
            "train/tis",
            "Mean of π_old/π_rollout before anything is truncated; neither clamped nor the weight that the "
            "loss gets.",
            mean("tis"),
            weighs,
        ),
        Entry(
            "train/tis_clipfrac",
            "Share of tokens whose weight differs from their ratio: truncated from either side, or under "
            "IcePop set to 0. A ratio equal to a bound is not counted.",
            mean("tis_clipped"),
            weighs,
        ),
        Entry("train/tis_abs", "Mean |π_old/π_rollout − 1|, before truncation.", mean("tis_abs"), weighs),
        Entry(
            "train/opsm_clipfrac",
            "Tokens that OPSM masks over loss tokens, averaged over samples. Tool tokens with A < 0 (with "
            "GRPO all of a sample's) count above and not below the line, so that it can exceed 1; per-token "
            "runs divide the same sum by tokens (slime 624b824a8 ppo_utils.py:77-87).",
            mean("opsm"),
            _masks,
        ),
    ),
)
