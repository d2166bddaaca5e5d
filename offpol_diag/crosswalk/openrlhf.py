"""What OpenRLHF's actor logs of its policy loss: three numbers, none of them about the weights.

Off OpenRLHF 3c3be623 (models/loss.py). Averages over micro-batches are weighted by their tokens, so the dump
as one batch gives the same.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from offpol_diag.crosswalk import update
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Preset


def _corrects(preset: Preset) -> bool:
    """Under GSPO the rollout is the anchor: there is no correction of its own, and no vllm_kl."""
    return preset.loss == "ppo_clip" and preset.weight is not None


def _drift(view: View) -> Tensor:
    """log π_old − log π_θ, [T]; of π_old also where GSPO clips around the rollout."""
    old, current = view.batch.old, view.batch.current
    assert old is not None
    assert current is not None
    return old - current


def _mismatch(view: View) -> Tensor:
    """log π_rollout − log π_old, [T]."""
    return -view.of("old").delta


DRIFT = Measure("openrlhf drift", _drift)
MISMATCH = Measure("openrlhf mismatch", _mismatch)


def _mean(column: str) -> Callable[[Page], float]:
    """Over tokens."""
    return lambda page: page(column) / page.tokens


BOOK = Ledger(
    "openrlhf",
    (
        Column("clipped", update.decided, own=True, needs=(*update.NEEDS, "advantages"), by=update.clip_key),
        Column("drift", lambda view: view.total(DRIFT), needs=(*update.NEEDS, "old")),
        Column("mismatch", lambda view: view.total(MISMATCH), when=_corrects, needs=("old",)),
    ),
    (),
    (
        Entry(
            "ppo_clip_ratio",
            "Share of tokens whose clipped term is the smaller surrogate. The ratio is π_θ/π_old, under GSPO "
            "the geometric mean of π_θ/π_rollout; what the correction masks counts all the same.",
            _mean("clipped"),
        ),
        Entry(
            "ppo_kl",
            "Mean log π_old − log π_θ over tokens, nats: k1 of the update, not of the mismatch; it may be "
            "negative. Under GSPO it is still of π_old, though the loss clips around the rollout.",
            _mean("drift"),
        ),
        Entry(
            "vllm_kl",
            "Mean log π_rollout − log π_old over tokens, nats: k1 of the mismatch, which may be negative. "
            "Logged by the PPO loss only, with the correction on.",
            _mean("mismatch"),
            _corrects,
        ),
    ),
)
