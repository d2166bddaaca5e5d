"""What is summed of a dump for what ms-swift logs: see `swift`."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.ends import rows
from offpol_diag.crosswalk.ledger import Column, Range
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Preset
from offpol_diag.ratios import Level

SAFETY = 20.0

Make = Callable[[View], Tensor]


# ---------------------------------------------------------------- the gap


def _mean(of: Measure) -> Make:
    """Per row, [S]; 0 for one without a token."""
    return lambda view: view.total(of) / view.divisor


def _log_train(view: View) -> Tensor:
    """Mean log π_old of a row, [S]."""
    return _mean(powers.TRAIN)(view)


def _log_rollout(view: View) -> Tensor:
    """Mean log π_rollout of a row, [S]."""
    return _mean(powers.ROLLOUT)(view)


def _log_geometric(view: View) -> Tensor:
    """Mean Δ of a row, [S]."""
    return view.ratios.once("swift mean Δ", lambda: _mean(powers.LOG)(view))


def _difference(view: View) -> Tensor:
    """Mean log π_rollout less mean log π_old of a row, [S]."""
    return -_log_geometric(view)


def _geometric_square(view: View) -> Tensor:
    return torch.exp(2 * _log_geometric(view).clamp(-SAFETY, SAFETY))


_GAP = (
    Column("training_ppl", lambda view: torch.exp(-_log_train(view))),
    Column("training_log_ppl", lambda view: -_log_train(view)),
    Column("rollout_ppl", lambda view: torch.exp(-_log_rollout(view))),
    Column("rollout_log_ppl", lambda view: -_log_rollout(view)),
    Column("kl", lambda view: -view.total(powers.LOG)),
    Column("k3_kl", lambda view: view.total(powers.K3_HELD)),
    Column("log_ppl_diff", _difference),
    Column("log_ppl_abs_diff", lambda view: _difference(view).abs()),
    Column("ppl_ratio", lambda view: torch.exp(_difference(view))),
    Column("rr", lambda view: view.total(powers.RATIO_SQUARED)),
    Column("gg", _geometric_square),
)


# ---------------------------------------------------------------- the weights


def weighs(preset: Preset) -> bool:
    """Whether an importance sampling mode is set; without one only the gap is logged."""
    return preset.weight is not None


def _gate(preset: Preset) -> float | None:
    """sequence_mask: the largest geometric mean that a row may have."""
    rules = (rule for rule in preset.reject if rule.statistic == "ratio" and rule.over == "mean")
    return next((rule.upper for rule in rules if rule.policy in (None, preset.policy)), None)


def _threshold(preset: Preset) -> float:
    """C of the mode."""
    weight = preset.weight
    assert weight is not None
    return weight.upper or _gate(preset) or math.inf


def of_rows(preset: Preset) -> bool:
    """Whether the mode judges sequences."""
    weight = preset.weight
    assert weight is not None
    return weight.over != "token" or (weight.upper is None and _gate(preset) is not None)


def _bounded_geometric(view: View) -> Tensor:
    """Mean over a row of Δ bounded to ±20, [S]: what sequence modes compare with ln C."""
    return view.ratios.aggregate("ratio", "mean", SAFETY).values


def _beyond(view: View) -> Tensor:
    """Rows whose geometric mean is above C, [S] bool."""
    return _bounded_geometric(view) > math.log(_threshold(view.preset))


def _final(view: View) -> Level:
    return correction.weigh(view.ratios, view.preset).final


def _row_weights(view: View) -> Tensor | None:
    """As the loss gets them, [S]; None where tokens have their own."""
    found = _final(view.first)
    return found.values if found.per == "sequence" else None


def weight_key(view: View) -> object:
    """What the weights depend on."""
    return correction.weight_key(view.preset)


WEIGHT = Measure("final weight", lambda view: _final(view).values, weight_key)


def _kept_weight(view: View) -> Tensor:
    """Σ of the weights, [S]: sequence_mask multiplies token ratios by 0 or 1."""
    weights = _row_weights(view)
    if weights is not None:
        return weights * view.n
    return _without(view, 0.0, view.total(WEIGHT))


def _without(view: View, of_masked: float, sums: Tensor) -> Tensor:
    """Sums per row, those of rows that sequence_mask drops replaced by as much for each token."""
    if not of_rows(view.preset):
        return sums
    return torch.where(_beyond(view), view.n * of_masked, sums)


def _within(high: float, power: int) -> Measure:
    """The weights of tokens within [1/C, C], or their squares."""

    def of(view: View) -> Tensor:
        x = _final(view).values
        x = x if view.free(1 / high, high) else x.clamp(1 / high, high)
        return x if power == 1 else x.square()

    def by(view: View) -> object:
        return weight_key(view), None if view.free(1 / high, high) else high

    return Measure(f"swift bounded {power}", of, by)


def _bounded(power: int) -> Make:
    """Σ of the weights, or of their squares, within [1/C, C]: what the ESS is of, [S]."""

    def column(view: View) -> Tensor:
        high, weights = _threshold(view.preset), _row_weights(view)
        if weights is not None:
            return weights.clamp(1 / high, high) ** power * view.n
        return _without(view, high**-power, view.total(_within(high, power)))

    return column


def _clipped(view: View) -> Tensor:
    """Rows above C; or tokens above it, [S]; under token_mask tokens of weight 0."""
    weight = view.preset.weight
    assert weight is not None
    if of_rows(view.preset):
        return _beyond(view).to(torch.float64)
    weighed = correction.weigh(view.far, view.preset)
    return weighed.high + weighed.low if weight.action == "mask" else weighed.high


_WEIGHTS = (
    Column("weight", _kept_weight, own=True, when=weighs),
    Column("bounded", _bounded(1), own=True, when=weighs),
    Column("bounded²", _bounded(2), own=True, when=weighs),
    Column("clipped", _clipped, own=True, when=weighs),
)
SUMS = (*_GAP, *_WEIGHTS)
EXTREMES = (Range("log_ppl_diff", lambda view: rows(_difference(view))),)
