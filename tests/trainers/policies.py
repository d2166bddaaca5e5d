"""The per-token policy losses that trainers' factors multiply, by default settings.

`bound` is that on the log-ratio before exp: ±20 in verl, OpenRLHF, SkyRL and miles; the others have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainers.padded import Padded, exp, row_mean

Loss = Callable[..., np.ndarray]


def update(p: Padded, anchor: str) -> np.ndarray:
    """Compute log π_θ − log π_anchor, [B, L]; 0 where masked."""
    return np.where(p.mask, p.current - getattr(p, anchor), 0.0)


def ppo(
    p: Padded,
    *,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    anchor: str = "old",
    bound: float = np.inf,
) -> np.ndarray:
    """Compute PPO: the worse of −A r and −A clip(r); where A < 0 never worse than −dual A."""
    return _clipped(exp(np.clip(update(p, anchor), -bound, bound)), p.advantages, low, high, dual)


def gspo(p: Padded, *, low: float, high: float, anchor: str = "old", bound: float = np.inf) -> np.ndarray:
    """Compute GSPO: PPO's clip on one ratio for the row, the geometric mean, bounded from above."""
    mean = np.minimum(row_mean(update(p, anchor), p.mask), bound)
    ratio = exp(mean) * np.ones(p.mask.shape)
    return _clipped(ratio, p.advantages, low, high, None)


def _clipped(ratio: np.ndarray, a: np.ndarray, low: float, high: float, dual: float | None) -> np.ndarray:
    loss = -np.minimum(a * ratio, a * np.clip(ratio, 1 - low, 1 + high))
    return loss if dual is None else np.where((a < 0) & (loss > -dual * a), -dual * a, loss)


def cispo(p: Padded, *, low: float = 1.0, high: float = 4.0, bound: float = 20.0) -> np.ndarray:
    """Compute CISPO: −A log π_θ, times the clipped ratio, which no gradient passes."""
    return np.clip(exp(np.clip(update(p, "old"), -bound, bound)), 1 - low, 1 + high) * reinforce(p)


def reinforce(p: Padded) -> np.ndarray:
    """Compute REINFORCE: −A log π_θ."""
    return -p.advantages * p.current


def surrogate(p: Padded) -> np.ndarray:
    """Compute −A; the factor is the ratio that the gradient passes."""
    return -p.advantages


PLAIN: tuple[Loss, dict[str, Any]] = (ppo, {})
BOUNDED: tuple[Loss, dict[str, Any]] = (ppo, {"bound": 20.0})
ALONE: dict[str, tuple[Loss, dict[str, Any]]] = {
    "token_clip": BOUNDED,
    "seq_mask_tis": BOUNDED,
    "openrlhf_gspo": (gspo, {"low": 0.2, "high": 0.2, "anchor": "rollout", "bound": 20.0}),
    "kpop": (ppo, {"low": 0.4, "high": 0.4}),
    "nemo_rl_force_on_policy": (surrogate, {}),
    "nemo_rl_reinforce": (reinforce, {}),
    "nemo_rl_seq_product": (gspo, {"low": 0.2, "high": 0.2}),
    "dppo_tv": (surrogate, {}),
    "ipo": (surrogate, {}),
    "skyrl_dppo_tv": (surrogate, {}),
    "skyrl_dppo_kl": (surrogate, {}),
    "skyrl_cispo_rollout": (reinforce, {}),
    "opsm": (ppo, {"anchor": "rollout"}),  # the report's π_old is the sampler
    "verl_gpg": (reinforce, {}),
    "verl_dppo_tv": (reinforce, {}),
    "dppo_kl": (reinforce, {}),
    "trl_cispo": (cispo, {"bound": np.inf}),
    "areal_cispo": (cispo, {"bound": np.inf}),
    "skyrl_importance_sampling": (ppo, {"low": np.inf, "high": np.inf}),
}

BY_TRAINER = {
    "openrlhf": BOUNDED,
    "skyrl": BOUNDED,
    "miles": BOUNDED,
}


def loss_of(name: str) -> tuple[Loss, dict[str, Any]]:
    """Return the loss of a row of the table, and its settings."""
    trainer = name.partition("_")[0]
    return ALONE.get(name, BY_TRAINER.get(trainer, PLAIN))
