"""What is summed of a dump for the MIS helper of slime and miles: see `slime_mis`; per sample [S] each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.correction import weight_key
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.bounds import Side, bound, half
from offpol_diag.crosswalk.ledger import Column, View
from offpol_diag.crosswalk.slime import Rows, When, loss_columns, per_row, row_mean, shares, there, weighs
from offpol_diag.presets import Preset, Reject

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
        rule = _band(view.preset, of)
        if rule is None or bound(rule, side) is None:
            return torch.zeros_like(view.batch.lengths, dtype=torch.float64)
        passed = correction.passes(view.ratios, half(rule, side))
        flags = ~passed.values
        return shares(correction.per_sequence(flags, passed, view.batch), passed, view)

    return column


def _weighed(which: str) -> Rows:
    """Counts or weights of the preset's weight rule, per sample."""

    def column(view: View) -> Tensor:
        weighed = view.done.weighed
        assert weighed is not None
        if which in ("high", "low"):
            return shares(getattr(weighed, which), weighed.final, view)
        key = ("slime", which, weight_key(view.preset))
        return view.ratios.once(key, lambda: per_row(getattr(weighed, which), view))

    return column


def _extreme(reduce: Callable[[Tensor, Tensor], Tensor]) -> Rows:
    """The smallest or largest final weight of each sample, before normalisation."""

    def column(view: View) -> Tensor:
        weighed = view.done.weighed
        assert weighed is not None
        final = weighed.final
        x = reduce(final.values, view.batch.cu_seqlens) if final.per == "token" else final.values
        return there(x, view)

    return column


def _catastrophic(view: View) -> Tensor:
    return view.done.kept.catastrophic / view.batch.lengths.clamp(min=1)


def _log_ppl(policy: str) -> Rows:
    def column(view: View) -> Tensor:
        found = view.ratios.train if policy == "train" else view.batch.rollout
        return -row_mean(found, view)

    return column


def _ppl(policy: str) -> Rows:
    return lambda view: there(torch.exp(_log_ppl(policy)(view)), view)


def _mean_gap(view: View) -> Tensor:
    """Mean log π_rollout − mean log π_train of each sample."""
    return -view.ratios.aggregate("ratio", "mean").values


def _chi2_token(view: View) -> Tensor:
    """r² − 1 = (r − 1)(r + 1), which keeps the digits of small differences."""
    excess = powers.excess(view.ratios, SAFETY)
    return row_mean(excess * (excess + 2), view)


def _chi2_seq(view: View) -> Tensor:
    total = view.ratios.log_ratio("sum", SAFETY, "aggregate").values
    return there(torch.expm1(2 * total), view)


def _shared(name: str, of: Rows) -> Column:
    return Column(name, of)


def _own(name: str, of: Rows, when: When = weighs) -> Column:
    return Column(name, of, own=True, when=when)


GAP = (
    _shared("training_log_ppl", _log_ppl("train")),
    _shared("training_ppl", _ppl("train")),
    _shared("rollout_log_ppl", _log_ppl("rollout")),
    _shared("rollout_ppl", _ppl("rollout")),
    _shared("mis_kl", _mean_gap),
    _shared("k3_kl", lambda view: row_mean(view.ratios.token("k3"), view)),
    _shared("log_ppl_abs_diff", lambda view: _mean_gap(view).abs()),
    _shared("ppl_ratio", lambda view: there(torch.exp(_mean_gap(view)), view)),
    _shared("chi2_token", _chi2_token),
    _shared("chi2_seq", _chi2_seq),
)
SIDES: tuple[Side, ...] = ("lower", "upper")
WEIGHTS = (
    _own("before", _weighed("raw")),
    _own("after", _weighed("final")),
    _own("weights", lambda view: view.done.weight_sum, normal),
    _own("high", _weighed("high")),
    _own("low", _weighed("low")),
    *(_own(f"{of}_{side}", _outside(of, side)) for of in ("tis", "rs") for side in SIDES),
    _own("catastrophic", _catastrophic, vetoes),
    _own("vetoed", lambda view: view.done.kept.vetoed.to(torch.float64), vetoes),
    _own("smallest", _extreme(segments.smallest)),
    _own("largest", _extreme(segments.largest)),
)
SUMS = (*loss_columns(rejects=True), *GAP, *WEIGHTS)
