"""The causes in the order in which they are looked for, each in rows that are mended of those before."""

from __future__ import annotations

from offpol_diag.diagnosis.cause import Cause
from offpol_diag.diagnosis.causes.boundary import Boundary
from offpol_diag.diagnosis.causes.breaks import LongContext, Retokenization
from offpol_diag.diagnosis.causes.constants import CopiedMean, LowPrecision, Sentinel, WrongMask
from offpol_diag.diagnosis.causes.context import WrongContext
from offpol_diag.diagnosis.causes.group import GroupFault
from offpol_diag.diagnosis.causes.honest import MoeOutliers, Numerics, QuantizedRollout, Stale
from offpol_diag.diagnosis.causes.ids import RepetitionPenalty, SpecialToken
from offpol_diag.diagnosis.causes.order import RowPermutation, SegmentOrder
from offpol_diag.diagnosis.causes.sampling import RawLogProbs, TrainerTemperature, TruncatedSampling
from offpol_diag.diagnosis.causes.shift import OffByOne
from offpol_diag.diagnosis.causes.top1 import Top1Logged
from offpol_diag.diagnosis.causes.weights import ModelDiffers, WeightsNotSynced
from offpol_diag.errors import UsageError, did_you_mean

CAUSES: tuple[Cause, ...] = (
    *(LowPrecision(), Sentinel(), WrongMask(), CopiedMean(), Top1Logged()),  # what is counted
    *(OffByOne(), SegmentOrder(), RowPermutation(), WeightsNotSynced()),  # what is out of place, or not equal
    *(RepetitionPenalty(), Boundary(), WrongContext(), SpecialToken()),  # what is told by tokens and places
    *(LongContext(), Retokenization()),
    *(TruncatedSampling(), RawLogProbs(), TrainerTemperature()),  # what is fitted
    *(ModelDiffers(), GroupFault()),  # two models, or one group
    *(Stale(), QuantizedRollout(), MoeOutliers(), Numerics()),  # honest: the first ends the search
)
CANDIDATES = ("stale", "weights_not_synced", "quantized_rollout", "model_differs", "moe_outliers", "numerics")
"""Causes that may fit where none is established, more common ones first."""


def cause(name: str) -> Cause:
    """Return the cause of an id.

    Raises:
        UsageError: there is none.
    """
    known, word = {one.id: one for one in CAUSES}, name.strip().lower().replace("-", "_")
    if word not in known:
        every, hint = "`offpol-diag doctor --explain list` lists all", did_you_mean(word, list(known))
        raise UsageError(f"there is no cause {name!r}", f"{hint}; {every}" if hint else every)
    return known[word]
