"""miles, a fork of slime: two names more under `train/`, and the anchor in the place of π_θ.

Off miles 31f1ca961: loss_hub/losses.py:290-385, loss_hub/math_utils.py:19-86 and 139-180. The numbers and the
settings that it has in common with slime are those of `slime`.
"""

from __future__ import annotations

import math
from functools import partial

from offpol_diag.trainers import slime
from offpol_diag.trainers.base import SAFETY, Array, Log, Numbers, Tokens, Totals, np
from offpol_diag.trainers.config import FLAGS, Trainer
from offpol_diag.trainers.slime import of_samples

LEAST = 1e-8
"""Lower bound on Σw² of a sample."""


def log(t: Tokens, s: Totals) -> Numbers:
    """Return slime's numbers, and 0 for those of the anchor against the rollout where it is the rollout."""
    return own(t, s, slime.log(t, s), t.only())


def mis_log(t: Tokens, s: Totals) -> Numbers:
    """Return the same with the MIS helper."""
    return own(t, s, slime.mis_log(t, s), t.only("reject", "veto"))


def own(t: Tokens, s: Totals, result: Numbers, left: Tokens) -> Numbers:
    """Return slime's numbers, and what miles adds; `left` has the tokens that are not 0 in the loss's."""
    if t.batch.current is not None:
        result["train/ess_ratio"] = of_samples(t, s, effective(t))
    kl = of_samples(t, s, mean_k3(left))
    result["train/train_rollout_kl"] = kl
    if t.preset.policy != "old":
        of_anchor = ("train/train_rollout_logprob_abs_diff", "train/train_rollout_kl")
        result |= dict.fromkeys(of_anchor, 0.0)
    return result


def mean_k3(t: Tokens) -> Array:
    """Return the mean k3 of each sample, its log-ratio within ±20 and itself at most 10, [S]."""
    return t.row_mean(np.where(t.kept, np.minimum(t.k3(SAFETY), 10.0), 0.0))


def effective(t: Tokens) -> Array:
    """Return (Σw)²/(n Σw²) of each sample over the original loss mask, [S]; 0 for one without tokens."""
    if t.preset.loss == "gspo":
        return t.there * 1.0
    w = np.exp(t.token_u).clip(math.exp(-SAFETY), math.exp(SAFETY))
    result: Array = t.row_sum(w) ** 2 / (np.maximum(t.n, 1) * np.maximum(t.row_sum(w**2), LEAST))
    return result


MILES = partial(
    slime.slime,
    icepop="miles.backends.training_utils.loss_hub.corrections.icepop_function",
    mis="examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    losses=("ppo_clip", "gspo"),
)
LOGS = (Log("miles", log), Log("miles-mis", mis_log))
READ = "radixark/miles 31f1ca961 (2026-08-21)"
TRAINER = Trainer("miles", READ, MILES, FLAGS, slime.guards, slime.CLIP, LOGS)
