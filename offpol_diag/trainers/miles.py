"""miles, a fork of slime: two names more under `train/`, and the anchor in the place of π_θ.

Off miles 31f1ca961: loss_hub/losses.py:290-385, loss_hub/math_utils.py:19-86 and 139-180. The numbers and the
settings that it has in common with slime are those of `slime`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from offpol_diag.trainers import slime
from offpol_diag.trainers.base import Entry, Log, Sum, Value, per_row, table
from offpol_diag.trainers.config import Trainer
from offpol_diag.trainers.measures import K3_CLAMPED, SAFETY, UPDATE, Measure, squared

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import View

LEAST = 1e-8
"""Lower bound on Σw² of a sample."""
WEIGHT = Measure("e^u within e^±20", lambda x: x.update_ratio.clip(math.exp(-SAFETY), math.exp(SAFETY)))


def _ess(view: View) -> Array:
    """Return (Σw)²/(n Σw²) of each sequence over the original loss mask, [S]; 0 for one without tokens."""
    if view.preset.loss == "gspo":
        return view.nonempty + view.zeros
    least = view.divisor * view.total(squared(WEIGHT)).clip(min=LEAST)
    found: Array = view.total(WEIGHT) ** 2 / least
    return found


def _of_anchor(value: Value) -> Value:
    """A number of the anchor against the rollout: 0 where the rollout is the anchor."""
    return replace(value, of=lambda totals: value.of(totals) if totals.preset.policy == "old" else 0.0)


def _names(rejects: bool) -> tuple[Entry, ...]:
    """Return the entries that miles adds to slime's."""
    kl = slime.of_loss("rollout_kl", lambda view, mask: view.total(K3_CLAMPED, mask), rejects)
    return table(
        {
            "ess_ratio": per_row(Sum("ess", _ess, needs=UPDATE)).means(
                "Mean over samples of (Σw)²/(n Σw²), w = π_θ/π_old with its log within ±20: the effective "
                "sample size of the update within a sample, not of the mismatch; 0 for a sample without a "
                "token, and of all tokens, rejected or not. Under GSPO all w of a sample are equal, so that "
                "it is 1."
            ),
            "train_rollout_kl": _of_anchor(per_row(kl)).means(
                "Mean of r − 1 − log r, r = π_old/π_rollout, with log r within ±20 and the result at most "
                "10: k3, averaged per sample first. Tokens that the MIS helper rejects are 0 in it and still "
                "divide; with --use-rollout-logprobs it is 0."
            ),
        },
        "train/",
    )


GAP = (
    "Mean |log π_old − log π_rollout|, nats. With --use-rollout-logprobs π_rollout stands in π_old's place, "
    "so that it is 0 whatever the mismatch. Tokens that the MIS helper rejects are 0 in it and still divide."
)


def _log(name: str, of: Log, rejects: bool) -> Log:
    """slime's, with miles's own definition of the gap and what it has beside slime's."""
    gap, *others = of.entries
    gap = replace(gap, meaning=GAP, value=_of_anchor(gap.value))
    return Log(name, (gap, *others, *_names(rejects)))


PATHS = slime.Paths(
    "miles",
    "miles.backends.training_utils.loss_hub.corrections.icepop_function",
    "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    False,
)
LOGS = (_log("miles", slime.LOG, rejects=False), _log("miles-mis", slime.MIS, rejects=True))
TRAINER = Trainer("miles", partial(slime.slime, paths=PATHS), slime.guards, slime.CLIP, LOGS)
