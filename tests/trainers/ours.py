"""Our pipeline's effect on a dump, token by token, for one built-in row."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from offpol_diag.core.preset_numbers import norm_factor, normalised
from offpol_diag.dump.read import open_dump
from offpol_diag.presets import catalogue
from offpol_diag.trainers.logged import steps_of
from tests import trainer_dumps

BUILT_IN = catalogue.load(Path(__file__).parent / "rows.toml")
"""The catalogue, and corrections as trainers ship them."""
COLUMNS = frozenset({"rollout_log_probs", "old_log_probs", "current_log_probs", "advantages"})


def ours(name, batch):
    """Return each token's factor of the loss and whether it is in the denominator, [T] each."""
    preset = BUILT_IN[name]
    (done,) = steps_of(batch, [preset], COLUMNS)
    mask, weights = done.kept.astype(float), done.w
    if normalised(preset):
        n, total = batch.lengths.astype(np.float64), done.row_sum(weights)
        by_token = preset.weight.over == "token"
        total, units = (total, n) if by_token else (total / np.maximum(n, 1), (n > 0) * 1.0)
        weights = weights / norm_factor(total.sum(), units.sum())
    counted = mask if preset.denominator == "kept" else np.ones_like(mask)
    return weights * mask, counted.astype(bool)


def read(rows, path):
    (batch,) = open_dump([trainer_dumps.write(rows, path)]).batches()
    return batch


def differences(got, want, rel=1e-9, least=1e-12, of_std=None):
    """Return names that one side lacks or whose numbers differ; non-finite numbers are logged as None."""

    def same(name):
        ours, theirs = got[name], want[name]
        if ours is None or theirs is None or not math.isfinite(theirs):
            return ours is None and (theirs is None or not math.isfinite(theirs))
        largest = want.get(f"{name.removesuffix('std')}max") or 1.0  # whose squares the sums hold
        floor = of_std * max(1.0, abs(theirs), abs(largest)) if of_std and name.endswith("_std") else least
        return math.isclose(ours, theirs, rel_tol=rel, abs_tol=floor)

    every = dict.fromkeys([*want, *got])
    both = got.keys() & want.keys()
    bad = [name for name in every if name not in both or not same(name)]
    return {name: (got.get(name, "absent"), want.get(name, "absent")) for name in bad}
