"""miles, a fork of slime: its paths of the helper's functions."""

from __future__ import annotations

from functools import partial

from offpol_diag.trainers import slime
from offpol_diag.trainers.config import FLAGS, Trainer

MILES = partial(
    slime.slime,
    icepop="miles.backends.training_utils.loss_hub.corrections.icepop_function",
    mis="examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    losses=("ppo_clip", "gspo"),
)
READ = "radixark/miles 31f1ca961 (2026-08-21)"
TRAINER = Trainer("miles", READ, MILES, FLAGS, slime.guards, slime.CLIP)
