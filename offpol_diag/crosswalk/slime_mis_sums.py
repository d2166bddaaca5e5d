"""What is summed of a dump for the MIS helper of slime and miles: see `slime_mis`; per sample [S] each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.correction import weight_key
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.bounds import Side, bound, half
from offpol_diag.crosswalk.keys import acted, weighed
from offpol_diag.crosswalk.ledger import Column, together
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.slime import Rows, When, loss_columns, row_mean, shares, there, weighs
from offpol_diag.crosswalk.view import View
from offpol_diag.crosswalk.views import Views
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.ratios import Level

By = Callable[[View], Hashable]
Many = Callable[[Views], Sequence[Tensor]]
SAFETY = 20.0
"""Bound on log-ratios, nats."""


def _masks(preset: Preset) -> bool:
    """tis_mode mask: the weight stays as it is, and a rule on the same aggregate is in its place."""
    rule = preset.weight
    return weighs(preset) and rule is not None and rule.action == "none" and _bands(preset)[:1] != ()


def _bands(preset: Preset) -> tuple[Reject, ...]:
    return tuple(rule for rule in preset.reject if rule.statistic == "ratio")


def _band(preset: Preset, of: str) -> Reject | None:
    """The band of tis_mode mask, or that of use_rs."""
    bands = _bands(preset)
    mine, others = (bands[:1], bands[1:]) if _masks(preset) else ((), bands)
    found = mine if of == "tis" else others
    return found[0] if found else None


def _mode(preset: Preset) -> str:
    """truncate, clip or mask; empty where no weight is made."""
    rule = preset.weight
    if not weighs(preset) or rule is None:
        return ""
    if _masks(preset):
        return "mask"
    if rule.action != "truncate":
        return ""
    return "clip" if rule.lower is not None else "truncate"


def in_mode(mode: str) -> When:
    """Whether tis_mode is this one."""
    return lambda preset: _mode(preset) == mode


def rejects(preset: Preset) -> bool:
    """use_rs; a preset with a veto alone has opened the band, since the veto is evaluated nowhere else."""
    return weighs(preset) and (_band(preset, "rs") is not None or preset.veto is not None)


def vetoes(preset: Preset) -> bool:
    """Whether rs_veto_threshold is set."""
    return weighs(preset) and preset.veto is not None


def normal(preset: Preset) -> bool:
    """Whether tis_batch_normalize is set."""
    return weighs(preset) and preset.weight is not None and preset.weight.normalize


def _outside(of: str, side: Side) -> Rows:
    """The share of a sample's tokens beyond one bound of a band, [S]."""

    def column(view: View) -> Tensor:
        rule, some = _band(view.preset, of), view.far
        if rule is None or bound(rule, side) is None:
            return view.zeros
        passed = correction.passes(some, half(rule, side))
        if passed.per == "sequence":
            return (~passed.values & view.there).to(torch.float64)
        return shares(segments.count(~passed.values, some.batch.cu_seqlens), "token", view)

    return column


def _acted(which: str) -> Rows:
    """How many weights a bound moved, per sample."""

    def column(view: View) -> Tensor:
        weighed = view.pieces.first.weighed
        assert weighed is not None
        return shares(getattr(weighed, which), weighed.final.per, view)

    return column


def _weights(which: str) -> Measure:
    """The raw or final weight of each token; of a sample's weight nothing."""

    def of(view: View) -> Tensor:
        assert view.done.weighed is not None
        found: Level = getattr(view.done.weighed, which)
        return found.values

    return Measure(f"{which} weights", of, lambda view: weight_key(applied(view.preset)))


RAW, FINAL = _weights("raw"), _weights("final")


def _weighed(which: str) -> Many:
    """The mean weight of a sample."""
    measure = RAW if which == "raw" else FINAL

    def mean(view: View) -> Tensor:
        weighed = view.pieces.first.weighed
        assert weighed is not None
        found: Level = getattr(weighed, which)
        return row_mean(measure, view) if found.per == "token" else found.values

    return _where_there(mean)


def _extreme(at: Literal[0, 1]) -> Many:
    """The smallest or largest final weight of each sample, before normalisation."""

    def end(view: View) -> Tensor:
        found = view.pieces.per_sequence
        return view.once("ends", lambda: view.ends(FINAL))[at] if found is None else found

    return _where_there(end)


def _where_there(of: Rows) -> Many:
    """Of many presets, 0 for a sample without a token."""
    return lambda views: there(torch.stack([of(view) for view in views]), views[0]).unbind()


def _catastrophic(view: View) -> Tensor:
    return view.pieces.first.kept.catastrophic / view.divisor


def _log_ppl(of: Measure) -> Rows:
    return lambda view: -row_mean(of, view)


def _ppl(of: Measure) -> Rows:
    return lambda view: there(torch.exp(-row_mean(of, view)), view)


def _mean_gap(view: View) -> Tensor:
    """Mean log π_rollout − mean log π_train of each sample."""
    return -view.ratios.aggregate("ratio", "mean").values


def _chi2(view: View) -> Tensor:
    """r² − 1 = (r − 1)(r + 1) of each token, which keeps the digits of small differences."""
    excess = powers.excess(view.ratios, SAFETY)
    return excess * (excess + 2)


def _chi2_seq(view: View) -> Tensor:
    total = view.ratios.log_ratio("sum", SAFETY, "aggregate").values
    return there(torch.expm1(2 * total), view)


CHI2 = Measure("r² − 1 to ±20", _chi2)


def _shared(name: str, of: Rows) -> Column:
    return Column(name, of)


def _own(name: str, of: Rows, by: By, when: When = weighs) -> Column:
    return Column(name, of, own=True, when=when, by=by)


def _raw(view: View) -> Hashable:
    """What weights before their bounds depend on."""
    weight = view.preset.weight
    return weight and replace(weight, upper=None, lower=None) if _of_all(weight) else view.preset


def _of_all(weight: Weight | None) -> bool:
    return weight is not None and weight.among == "all"


def _of_side(of: str, side: Side) -> By:
    """One bound of a band."""

    def by(view: View) -> Hashable:
        rule = _band(view.preset, of)
        return None if rule is None or bound(rule, side) is None else half(rule, side)

    return by


GAP = (
    _shared("training_log_ppl", _log_ppl(powers.TRAIN)),
    _shared("training_ppl", _ppl(powers.TRAIN)),
    _shared("rollout_log_ppl", _log_ppl(powers.ROLLOUT)),
    _shared("rollout_ppl", _ppl(powers.ROLLOUT)),
    _shared("mis_kl", _mean_gap),
    _shared("k3_kl", lambda view: row_mean(powers.K3, view)),
    _shared("log_ppl_abs_diff", lambda view: _mean_gap(view).abs()),
    _shared("ppl_ratio", lambda view: there(torch.exp(_mean_gap(view)), view)),
    _shared("chi2_token", lambda view: row_mean(CHI2, view)),
    _shared("chi2_seq", _chi2_seq),
)
SIDES: tuple[Side, ...] = ("lower", "upper")
WEIGHTS = (
    together("before", _weighed("raw"), when=weighs, by=_raw),
    together("after", _weighed("final"), when=weighs, by=weighed),
    _own("weights", lambda view: view.pieces.weight_sum, weighed, normal),
    _own("high", _acted("high"), acted),
    _own("low", _acted("low"), acted),
    *(_own(f"{of}_{side}", _outside(of, side), _of_side(of, side)) for of in ("tis", "rs") for side in SIDES),
    _own("catastrophic", _catastrophic, lambda view: view.did("catastrophic"), vetoes),
    _own(
        "vetoed",
        lambda view: view.pieces.first.kept.vetoed.to(torch.float64),
        lambda view: view.did("vetoed"),
        vetoes,
    ),
    together("smallest", _extreme(0), when=weighs, by=weighed),
    together("largest", _extreme(1), when=weighs, by=weighed),
)
SUMS = (*loss_columns(rejects=True), *GAP, *WEIGHTS)
