"""The causes in the order in which they are looked for, each in rows that are repaired of those before."""

from __future__ import annotations

from offpol_diag.diagnosis.cause import Cause
from offpol_diag.diagnosis.causes.breaks import LongContext, Retokenization
from offpol_diag.diagnosis.causes.ends import Boundary, WrongContext
from offpol_diag.diagnosis.causes.honest import MoeOutliers, Numerics, QuantizedRollout, Stale
from offpol_diag.diagnosis.causes.ids import RepetitionPenalty, SpecialToken
from offpol_diag.diagnosis.causes.order import OffByOne, RowPermutation, SegmentOrder
from offpol_diag.diagnosis.causes.sampling import RawLogProbs, TrainerTemperature, TruncatedSampling
from offpol_diag.diagnosis.causes.values import CopiedMean, LowPrecision, Sentinel, Top1Logged, WrongMask
from offpol_diag.diagnosis.causes.weights import GroupFault, ModelDiffers, WeightsNotSynced
from offpol_diag.errors import UsageError, did_you_mean

CAUSES: tuple[Cause, ...] = (
    *(LowPrecision(), Sentinel(), WrongMask(), CopiedMean(), Top1Logged()),  # what is counted
    *(OffByOne(), SegmentOrder(), RowPermutation(), WeightsNotSynced()),  # what is out of place, or not equal
    *(RepetitionPenalty(), Boundary(), WrongContext(), SpecialToken()),  # what tokens and places show
    *(LongContext(), Retokenization()),
    *(TruncatedSampling(), RawLogProbs(), TrainerTemperature()),  # what is fitted
    *(ModelDiffers(), GroupFault()),  # two models, or one group
    *(Stale(), QuantizedRollout(), MoeOutliers(), Numerics()),  # honest: the first ends the search
)
BY_ID = {cause.id: cause for cause in CAUSES}
ALONE = ("rollout_raw_logprobs", "group_fault", "weights_not_synced", "model_differs")
"""Causes that are looked for by `look_alone`, in this order, where nothing else is found."""
CANDIDATES = ("stale", "weights_not_synced", "quantized_rollout", "model_differs", "moe_outliers", "numerics")
"""Causes that may fit where none is established, more common ones first."""


def cause(name: str) -> Cause:
    """Return the cause of an id.

    Raises:
        UsageError: there is none.
    """
    word = name.strip().lower().replace("-", "_")
    if word not in BY_ID:
        every, hint = "`offpol-diag doctor --explain list` lists all", did_you_mean(word, list(BY_ID))
        raise UsageError(f"there is no cause {name!r}", f"{hint}; {every}" if hint else every)
    return BY_ID[word]
