"""What TRL's GRPO trainer logs under `sampling/` while its vLLM correction is on.

Off TRL f2cd5771. Its means are of one process each, then over processes; here the dump is one process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page, View
from offpol_diag.presets import Preset
from offpol_diag.ratios import Level


def _corrects(preset: Preset) -> bool:
    """Whether the correction is on: without it none of these names is logged."""
    return preset.weight is not None


def _difference(view: View) -> Tensor:
    """|Δ| of every token, [T]."""
    return view.ratios.once("|Δ|", lambda: view.ratios.delta.abs())


def _total_difference(view: View) -> Tensor:
    return segments.total(_difference(view), view.batch.cu_seqlens)


def _ratio(view: View) -> Level:
    """The ratio as the loss gets it: of tokens, or of rows, where an empty one has e^0 = 1."""
    return correction.weigh(view.ratios, view.preset).final


def _total_ratio(view: View) -> Tensor:
    ratio = _ratio(view)
    if ratio.per == "sequence":
        return ratio.values
    return view.ratios.once(
        ("Σ weights", correction.weight_key(view.preset)),
        lambda: segments.total(ratio.values, view.batch.cu_seqlens),
    )


def _units(view: View) -> Tensor:
    """Of how many ratios the mean is, [S]: tokens, or every row."""
    n = view.batch.lengths.to(torch.float64)
    return torch.ones_like(n) if _ratio(view).per == "sequence" else n


def _mean_ratio(page: Page) -> float:
    return page("ratio") / page("units")


_ROWS = " In sequence modes it is over completions, long or short; one without a token has a ratio of 1."

BOOK = Ledger(
    "trl",
    (
        Column("difference", _total_difference, when=_corrects),
        Column("ratio", _total_ratio, own=True, when=_corrects),
        Column("units", _units, own=True, when=_corrects),
    ),
    (
        Column("|Δ|", _difference, when=_corrects),
        Column("ratios", lambda view: _ratio(view).values, own=True, when=_corrects),
    ),
    (
        Entry(
            "sampling/sampling_logp_difference/mean",
            "Mean |log π_old − log π_rollout| over tokens, nats, whatever the mode: a size, which cannot "
            "tell drift from noise.",
            lambda page: page("difference") / page.tokens,
            _corrects,
        ),
        Entry(
            "sampling/sampling_logp_difference/max",
            "Largest |log π_old − log π_rollout| of a token, nats.",
            lambda page: page.high("|Δ|"),
            _corrects,
        ),
        Entry(
            "sampling/importance_sampling_ratio/min",
            "Smallest ratio after truncation or masking: 0 as soon as anything is masked, the lower bound "
            "(if there is one) as soon as anything is truncated." + _ROWS,
            lambda page: page.low("ratios"),
            _corrects,
        ),
        Entry(
            "sampling/importance_sampling_ratio/mean",
            "Mean ratio after truncation or masking, zeros included: not an estimate of E[r], which is 1."
            + _ROWS,
            _mean_ratio,
            _corrects,
        ),
        Entry(
            "sampling/importance_sampling_ratio/max",
            "Largest ratio after truncation or masking, never above clip_max: it says nothing of the raw "
            "tail." + _ROWS,
            lambda page: page.high("ratios"),
            _corrects,
        ),
    ),
)
