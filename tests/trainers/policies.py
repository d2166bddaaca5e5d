"""The per-token policy losses that trainers' factors multiply, by default settings.

`bound` is that on the log-ratio before exp: ±20 in verl, OpenRLHF, SkyRL and miles; the others have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainers.padded import Padded, exp, row_mean, row_sum

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


def sapo(p: Padded, *, anchor: str = "old", bound: float = np.inf) -> np.ndarray:
    """Compute SAPO: a sigmoid gate of the ratio, steeper where A is not above 0."""
    ratio = exp(np.clip(update(p, anchor), -bound, bound))
    tau = np.where(p.advantages > 0, 1.0, 1.05)
    return -p.advantages * 4 / tau / (1 + exp(-tau * (ratio - 1)))


def geo_mean(p: Padded, *, low: float = 0.4, high: float = 0.4) -> np.ndarray:
    """Compute verl's GMPO before its mean over rows: each token has its row's loss."""
    u, sign = update(p, "old"), np.sign(p.advantages)
    held = sign * np.minimum(sign * u, sign * np.clip(u, -low, high))
    return -p.row_advantage() * exp(row_mean(held, p.mask)) * np.ones(p.mask.shape)


def quadratic(p: Padded, *, beta: float = 0.1) -> np.ndarray:
    """Compute DRO of verl, kimi15 of ROLL."""
    return reinforce(p) + beta / 2 * update(p, "old") ** 2


def topr(p: Padded) -> np.ndarray:
    """Compute TOPR, of rewards whose sign is the advantage's."""
    return np.where(p.advantages > 0, 1.0, np.minimum(exp(update(p, "old")), 1.0)) * reinforce(p)


def fipo(p: Padded, *, low: float = 0.2, high: float = 0.2) -> np.ndarray:
    """Compute FIPO: PPO's loss times the discounted drift of later tokens, with a half-life of 32 tokens."""
    u, ahead = update(p, "old"), np.subtract.outer(np.arange(p.mask.shape[1]), np.arange(p.mask.shape[1])).T
    decay = np.where(ahead >= 0, 2.0 ** (-np.maximum(ahead, 0) / 32), 0.0)
    influence = np.clip(exp(u @ decay.T), 1.0, 1.2)
    risky = (p.advantages < 0) & (exp(u) > 4.0)
    return ppo(p, low=low, high=high) * np.where(risky, np.clip(influence, 0.8, 1.0), influence)


def vespo(p: Padded, *, clip_max: float = 3.0) -> np.ndarray:
    """Compute VESPO: REINFORCE times φ of the row's product of ratios and truncated weights."""
    return vespo_factor(p, p.advantages >= 0, clip_max) * reinforce(p)


def vespo_factor(p: Padded, good: np.ndarray, clip_max: float = 3.0) -> np.ndarray:
    """Compute φ, with the exponents of A >= 0 where `good`."""
    least = np.log(1e-8)
    log_w = row_sum(np.clip(update(p, "old"), -20, 20), p.mask)
    weights = np.log(np.maximum(np.minimum(exp(p.gap()), clip_max), 1e-300))
    log_w = np.clip(log_w + row_sum(np.clip(weights, least, 20), p.mask), least, 20)
    k, rate = (np.where(good, *pair) for pair in ((2.0, 3.0), (3.0, 2.0)))
    return exp(rate + k * log_w - rate * exp(log_w))


def surrogate(p: Padded) -> np.ndarray:
    """Compute −A; the factor is the ratio that the gradient passes."""
    return -p.advantages


PLAIN: tuple[Loss, dict[str, Any]] = (ppo, {})
BOUNDED: tuple[Loss, dict[str, Any]] = (ppo, {"bound": 20.0})
OPEN_INSTRUCT = (ppo, {"high": 0.272})
ALONE: dict[str, tuple[Loss, dict[str, Any]]] = {
    "tis": (ppo, {"dual": 3.0, "bound": 20.0}),  # the fork is of verl
    "openrlhf_gspo": (gspo, {"low": 0.2, "high": 0.2, "anchor": "rollout", "bound": 20.0}),
    "areal_kpop": (ppo, {"low": 0.4, "high": 0.4}),
    "nemo_rl_force_on_policy": (surrogate, {}),
    "nemo_rl_reinforce": (reinforce, {}),
    "prime_rl_ref_kl": (surrogate, {}),
    "nemo_rl_seq_product": (gspo, {"low": 0.2, "high": 0.2}),
    "prime_rl_dppo": (surrogate, {}),
    "prime_rl_ipo": (surrogate, {}),
    "prime_rl_v02_token": (reinforce, {}),
    "prime_rl_v02_sequence": (reinforce, {}),
    "skyrl_rollout_is": (reinforce, {}),
    "skyrl_dppo_tv": (surrogate, {}),
    "skyrl_dppo_kl": (surrogate, {}),
    "skyrl_cispo_rollout": (reinforce, {}),
    "slime_opsm": (ppo, {"anchor": "rollout"}),  # --use-rollout-logprobs
    "miles_opsm": (ppo, {"anchor": "rollout", "bound": 20.0}),
    "deepseek_v32_mask": (ppo, {"anchor": "rollout"}),  # the report's π_old is the sampler
    "torchforge": (reinforce, {}),
    "sapo": (sapo, {"bound": 20.0}),
    "gmpo": (geo_mean, {}),
    "verl_dro": (quadratic, {}),
    "verl_gpg": (reinforce, {}),
    "verl_dppo_tv": (reinforce, {}),
    "verl_dppo_kl": (reinforce, {}),
    "trl_cispo": (cispo, {"bound": np.inf}),
    "trl_sapo": (sapo, {}),
    "trl_luspo": (gspo, {"low": 0.2, "high": 0.2}),
    "trl_vespo": (vespo, {}),
    "swift_sapo": (sapo, {}),
    "swift_fipo": (fipo, {}),
    "areal_sapo": (sapo, {"anchor": "rollout"}),
    "areal_cispo": (cispo, {"bound": np.inf}),
    "skyrl_sapo": (sapo, {"bound": 20.0}),
    "skyrl_importance_sampling": (ppo, {"low": np.inf, "high": np.inf}),
    "roll_pg_tis": (cispo, {"low": 1.0, "high": 0.0, "bound": np.inf}),
    "roll_topr": (topr, {}),
    "roll_kimi15": (quadratic, {}),
}

WITHIN = frozenset({"trl_vespo"})
"""Rows whose factor is a part of the loss, and does not multiply it."""
BY_TRAINER = {
    "open": OPEN_INSTRUCT,
    "openrlhf": BOUNDED,
    "skyrl": BOUNDED,
    "miles": BOUNDED,
    "molt": (ppo, {"bound": 30.0}),
}


def loss_of(name: str) -> tuple[Loss, dict[str, Any]]:
    """Return the loss of a row of the table, and its settings."""
    trainer = name.partition("_")[0]
    return ALONE.get(name, BY_TRAINER.get(trainer, PLAIN))
