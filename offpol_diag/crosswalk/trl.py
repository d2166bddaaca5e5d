"""What TRL's GRPO trainer logs under `sampling/` while its vLLM correction is on.

Off TRL f2cd5771. Its means are of one process each, then over processes; here the dump is one process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.ends import Ends, rows
from offpol_diag.crosswalk.keys import weighed
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page, Range
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Preset
from offpol_diag.ratios import Level


def _corrects(preset: Preset) -> bool:
    """Whether the correction is on: without it none of these names is logged."""
    return preset.weight is not None


def _final(view: View) -> Level:
    """The ratio as the loss gets it: of tokens, or of rows, where an empty one has e^0 = 1."""
    return correction.weigh(view.ratios, view.preset).final


RATIO = Measure(
    "final weight", lambda view: _final(view).values, lambda view: correction.weight_key(view.preset)
)


def _rows(view: View) -> Tensor | None:
    """The ratios of rows, [S]; None in token modes."""
    found = _final(view.first)
    return found.values if found.per == "sequence" else None


def _total_ratio(view: View) -> Tensor:
    found = _rows(view)
    return view.total(RATIO) if found is None else found


def _units(view: View) -> Tensor:
    """Of how many ratios the mean is, [S]: tokens, or every row."""
    return view.n if _rows(view) is None else torch.ones_like(view.n)


def _ends(view: View) -> Ends:
    found = _rows(view)
    return view.ends(RATIO) if found is None else rows(found)


def _mean_ratio(page: Page) -> float:
    return page("ratio") / page("units")


_ROWS = " In sequence modes it is over completions, long or short; one without a token has a ratio of 1."

BOOK = Ledger(
    "trl",
    (
        Column("difference", lambda view: view.total(powers.DISTANCE), when=_corrects),
        Column("ratio", _total_ratio, own=True, when=_corrects, by=weighed),
        Column("units", _units, own=True, when=_corrects, by=weighed),
    ),
    (
        Range("|Δ|", lambda view: view.ends(powers.DISTANCE), when=_corrects),
        Range("ratios", _ends, own=True, when=_corrects, by=weighed),
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
