"""Per-token policy losses and their derivatives with respect to log π_θ.

A is the advantage, π_θ the current policy, u = log π_θ − log π_anchor, r = e^u. The preset's weight is a
constant in the gradient, so only the loss's own terms have one. Sources: Schulman et al. 2017 (PPO clip),
Ye et al. 2020 (dual clip), Williams 1992 (REINFORCE), Zheng et al. 2025 (GSPO), MiniMax-M1 2025 (CISPO).
Some trainers bound u before exp (`BOUNDS`); a preset has its trainer's bound in `clip.safety`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.moments import Direction
from offpol_diag.engine.ratios import OVERFLOW, Ratios
from offpol_diag.presets import Clip, Policy, Preset

BOUNDS: dict[str, tuple[float | None, float | None, str]] = {
    "verl": (20.0, 10.0, "1dda039b core_algos.py:1338,2070 (vanilla, cispo), 1590 (gspo, above only)"),
    "openrlhf": (20.0, None, "3c3be623 openrlhf/models/loss.py:168"),
    "skyrl": (20.0, 10.0, "a9564572e ppo_utils.py:567,782 (regular, cispo), 709 (gspo, above only)"),
    "miles": (20.0, 20.0, "31f1ca961 loss_hub/math_utils.py:19-33"),
    "slime": (None, None, "624b824a8 slime/utils/ppo_utils.py:125-171"),
    "trl": (None, None, "f2cd57710 trl/trainer/grpo_trainer.py:3066"),
    "ms-swift": (None, None, "3602360a5 swift/rlhf_trainers/grpo_trainer.py:1039"),
    "nemo-rl": (None, None, "7ea279abf nemo_rl/algorithms/loss/loss_functions.py:527-540"),
    "areal": (None, None, "4aef98d8d areal/utils/functional/functional.py:509"),
    "roll": (None, None, "8eb27cc2 roll/pipeline/rlvr/actor_worker.py:72"),
    "open-instruct": (None, None, "e6c3044aa open_instruct/grpo_fast.py:703"),
}
"""Trainer → its bound on a token's |u| before exp, its bound on GSPO's sequence mean of u, and the source.

None: no bound. Beyond a bound r is constant, and a loss that depends on r has no gradient.
"""


@dataclass(frozen=True)
class TokenLoss:
    """Per-token terms before the preset's weights and mask, [T] each.

    Attributes:
        loss: the value.
        slope: its derivative with respect to u (log π_θ where the loss has no ratio).
        clipped: whether the clip is active.
        clipped_lower: whether the dual clip is active (A < 0 only).
        kl: −u of the token, bounded where the loss bounds u token by token (verl's ppo_kl).
    """

    loss: Tensor
    slope: Tensor
    clipped: Tensor
    clipped_lower: Tensor
    kl: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> TokenLoss:
        """Return the same terms with a function applied to each."""
        return TokenLoss(**{name: function(x) for name, x in vars(self).items()})


@dataclass(frozen=True)
class Terms:
    """Inputs of a loss, [T] each.

    Attributes:
        advantages: A.
        current: log π_θ, nats.
        ratio: r of the token, or of the sequence where the loss pools u.
        moves: whether r depends on π_θ, i.e. u is within the preset's bound.
        clip: the preset's bounds on r.
    """

    advantages: Tensor
    current: Tensor
    ratio: Tensor
    moves: Tensor
    clip: Clip


@dataclass(frozen=True)
class Loss:
    """One policy loss.

    Attributes:
        of: inputs → value, slope, and where the clip and the dual clip are active (None: nowhere).
        weighted: whether the preset's weight multiplies it for any anchor; else only for the anchor π_old:
            with the anchor π_rollout its own ratio is already the correction.
        pooled: whether u is the mean over the sequence's tokens.
    """

    of: Callable[[Terms], tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
    weighted: bool = False
    pooled: bool = False


def _ppo(x: Terms) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute max(−A r, −A clip(r)), capped at −dual·A where A < 0: −A r with r bounded on A's side."""
    clip = x.clip
    low, high = _bounds(clip)
    if low is None and high is None and clip.dual is None:
        loss = -x.advantages * x.ratio
        return loss, torch.where(x.moves, loss, 0.0), None, None
    negative = x.advantages < 0
    up, down = _clamp(x.ratio, None, high), _clamp(x.ratio, low, clip.dual)
    held = torch.where(negative, down, up)
    loss = -x.advantages * held
    slope = torch.where((held == x.ratio) & x.moves, loss, 0.0)
    over = (x.ratio > high) & (x.advantages > 0) if high is not None else torch.zeros_like(negative)
    clipped = over if low is None else over | ((x.ratio < low) & negative)
    return loss, slope, clipped, None if clip.dual is None else (x.ratio > clip.dual) & negative


def _reinforce(x: Terms) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute −A log π_θ."""
    return -x.advantages * x.current, -x.advantages, None, None


def _surrogate(x: Terms) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute −A; its weight is the loss's own ratio: d(−A r) = −A r d log π_θ."""
    return -x.advantages, -x.advantages, None, None


def _cispo(x: Terms) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute −A log π_θ times the clipped r as a constant: every token keeps its gradient."""
    held = _clamp(x.ratio, *_bounds(x.clip))
    slope = -x.advantages * held
    return slope * x.current, slope, held != x.ratio, None


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(_ppo),
    "reinforce": Loss(_reinforce, weighted=True),
    "surrogate": Loss(_surrogate, weighted=True),
    "gspo": Loss(_ppo, pooled=True),
    "cispo": Loss(_cispo),
}


def _bounds(clip: Clip) -> tuple[float | None, float | None]:
    """Return the bounds below and above which r is clipped."""
    return None if clip.low is None else 1 - clip.low, None if clip.high is None else 1 + clip.high


def _clamp(x: Tensor, low: float | None, high: float | None) -> Tensor:
    return x if low is None and high is None else x.clamp(low, high)


def weighted(preset: Preset) -> bool:
    """Return whether the preset's weight multiplies its loss.

    With the anchor π_rollout a loss with a ratio of its own is corrected by it; a weight would correct twice.
    """
    return preset.policy == "old" or LOSSES[preset.loss].weighted


def kind(preset: Preset) -> tuple[object, ...]:
    """Key of a preset's per-token loss: on the same batch, presets with equal keys have equal `TokenLoss`."""
    return preset.loss, preset.policy == "old", preset.clip if _has_ratio(preset) else None


def anchor_of(policy: Policy) -> Policy:
    """Return the denominator of the loss's own ratio: π_old for decoupled presets, else π_rollout."""
    return "old" if policy == "old" else "rollout"


def drift(policy: Policy) -> Direction:
    """Return the log-ratio u in the loss of a preset with this numerator."""
    return "drift" if anchor_of(policy) == "old" else "current"


def known(batch: Batch, preset: Preset) -> bool:
    """Return whether the batch has the columns that the preset's loss needs."""
    return batch.has("current") and batch.has("advantages") and batch.has(anchor_of(preset.policy))


def token_loss(ratios: Ratios, preset: Preset) -> TokenLoss | None:
    """Compute the preset's loss per token, cached in `ratios`; None when the batch lacks columns."""
    if not known(ratios.batch, preset):
        return None
    return ratios.once(("loss of", kind(preset)), lambda: _token_loss(ratios, preset))


def _token_loss(ratios: Ratios, preset: Preset) -> TokenLoss:
    batch, row = ratios.batch, LOSSES[preset.loss]
    assert batch.current is not None
    assert batch.advantages is not None
    u = _u(ratios)
    key = "loss e^u", row.pooled, _limits(preset)
    ratio, moves = ratios.once(key, lambda: _ratio(ratios, u, *key[1:]))
    loss, slope, clipped, lower = row.of(Terms(batch.advantages, batch.current, ratio, moves, preset.clip))
    never = torch.zeros_like(u, dtype=torch.bool) if clipped is None or lower is None else u
    return TokenLoss(
        loss,
        slope,
        never if clipped is None else clipped,
        never if lower is None else lower,
        kl(ratios, preset),
    )


def kl(ratios: Ratios, preset: Preset) -> Tensor:
    """Compute −u of every token, [T], within the loss's bound where that applies to tokens."""
    bound = preset.clip.safety if _has_ratio(preset) and not LOSSES[preset.loss].pooled else None
    u = _u(ratios)
    return ratios.once(("loss kl", bound), lambda: -(u if bound is None else u.clamp(-bound, bound)))


def _has_ratio(preset: Preset) -> bool:
    """Return whether the loss has a ratio of its own."""
    return preset.loss not in ("reinforce", "surrogate")


def _limits(preset: Preset) -> tuple[float, float]:
    """Return the bounds of u before exp; trainers bound a sequence's mean from above only."""
    bound = OVERFLOW if preset.clip.safety is None else preset.clip.safety
    return (-OVERFLOW if LOSSES[preset.loss].pooled else -bound), bound


def parts(advantages: Tensor) -> dict[str, Tensor]:
    """Split A into |A| where it is positive and |A| where it is negative, 0 elsewhere, [T] each."""
    return {"positive": advantages.clamp(min=0), "negative": -advantages.clamp(max=0)}


def by_sign(ratios: Ratios, preset: Preset) -> dict[str, TokenLoss]:
    """Compute a pooled loss at A = 1 and at A = −1, [S]; a token has |A| times that of its sequence."""
    return ratios.once(("loss by sign", kind(preset)), lambda: _by_sign(ratios, preset))


def _by_sign(ratios: Ratios, preset: Preset) -> dict[str, TokenLoss]:
    u = mean_u(ratios)
    held, none = u.clamp(*_limits(preset)), torch.zeros_like(u)
    ratio, never = torch.exp(held), torch.zeros_like(u, dtype=torch.bool)
    found = {}
    for sign, a in {"positive": none + 1, "negative": none - 1}.items():
        terms = Terms(a, none, ratio, held == u, preset.clip)
        loss, slope, clipped, lower = LOSSES[preset.loss].of(terms)
        clipped, lower = (never if x is None else x for x in (clipped, lower))
        found[sign] = TokenLoss(loss, slope, clipped, lower, -u)
    return found


def _u(ratios: Ratios) -> Tensor:
    """Compute u of every token, [T]."""

    def made() -> Tensor:
        current, before = ratios.batch.current, ratios.batch.policy(anchor_of(ratios.policy))
        assert current is not None
        assert before is not None
        return current - before

    return ratios.once("loss u", made)


def mean_u(ratios: Ratios) -> Tensor:
    """Compute the mean of u over all tokens of each sequence, [S], also where this batch has only some."""
    whole = ratios.whole or ratios
    return ratios.own(whole.once("loss mean u", lambda: _mean_u(whole)))


def _mean_u(whole: Ratios) -> Tensor:
    offsets = whole.batch.cu_seqlens
    if whole.split is None:
        return segments.mean(_u(whole), offsets)
    far = whole.split.far
    total = segments.total(_u(far), far.batch.cu_seqlens) + whole.split.near.of("d", drift(whole.policy))
    return total / segments.lengths(offsets).clamp(min=1)


def _ratio(ratios: Ratios, u: Tensor, pooled: bool, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Compute e^u and whether it depends on π_θ, [T]."""
    if pooled:
        u = segments.spread(mean_u(ratios), ratios.batch.cu_seqlens)
    held = u.clamp(*limits)
    return torch.exp(held), held == u
