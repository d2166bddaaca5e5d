"""Per-token policy losses and their derivatives with respect to log π_θ.

A is the advantage, π_θ the current policy, u = log π_θ − log π_anchor, r = e^u. The preset's weight is a
constant in the gradient, so only the loss's own terms have one. Sources: Schulman et al. 2017 (PPO clip),
Ye et al. 2020 (dual clip), Williams 1992 (REINFORCE), Zheng et al. 2025 (GSPO), MiniMax-M1 2025 (CISPO), Gao
et al. 2025 (SAPO, arXiv 2511.20347), Zhao et al. 2025 (GMPO, arXiv 2507.20673), Roux et al. 2025 (TOPR, arXiv
2503.14286), Richemond et al. 2024 (DRO), Kimi k1.5 2025 (arXiv 2501.12599); VESPO and LUSPO as TRL defines
them, FIPO as ms-swift does. Some trainers bound u before exp (`BOUNDS`); a preset has that in `clip.safety`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import correction, segments
from offpol_diag.engine.moments import BLOCK, Direction
from offpol_diag.engine.ratios import OVERFLOW, Ratios, Split
from offpol_diag.presets import Clip, Policy, Preset

BOUNDS: dict[str, tuple[float | None, float | None, str]] = {
    "verl": (20.0, 10.0, "1dda039b core_algos.py:1338,2070 (vanilla, cispo), 1590 (gspo, above only)"),
    "openrlhf": (
        20.0,
        20.0,
        "3c3be623 openrlhf/models/loss.py:168; GSPO since pull request 1339, September 2026",
    ),
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
        preset: the preset, for its clip and its shape.
        ratios: these tokens; None for a pooled loss at A = 1 or −1.
    """

    advantages: Tensor
    current: Tensor
    ratio: Tensor
    moves: Tensor
    preset: Preset
    ratios: Ratios | None = None

    @property
    def u(self) -> Tensor:
        """u of every token, unbounded."""
        return _u(self.tokens)

    @property
    def tokens(self) -> Ratios:
        """These tokens, of which a pooled loss at A = 1 or −1 has none."""
        assert self.ratios is not None
        return self.ratios


Found = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Value, slope, and where the clip and the dual clip are active (None: nowhere), [T] each."""


@dataclass(frozen=True)
class Loss:
    """One policy loss.

    Attributes:
        of: inputs → value, slope, and where the clips are active.
        weighted: whether the preset's weight multiplies it for any anchor, for the anchor π_old alone (with
            the anchor π_rollout its own ratio is already the correction), or never.
        ratio: whether it has a ratio of its own, within the preset's `clip`.
        log: whether log π_θ is a factor of its value.
        pooled: whether u is the mean over the sequence's tokens.
        factors: constants of each sequence where A >= 0 and where A < 0, [S] each, that multiply −A log π_θ.
        values: the value that all tokens of a sequence share where no clip, of u, acts, [S].
        linear: whether its value and slope are multiples of A where no clip acts, of A e^u if it has a ratio
            and neither values nor a gate: then near tokens are summed by moments. Else every token is looked
            at.
        gate: whether it is |A| times a smooth gate (`moments.GATES`) in place of a clip.
        later: whether it depends on the tokens after (`later_drift`).
    """

    of: Callable[[Terms], Found]
    weighted: Literal["always", "old", "never"] = "old"
    ratio: bool = True
    log: bool = False
    pooled: bool = False
    factors: Callable[[Ratios, Preset, bool], tuple[Tensor, Tensor]] | None = None
    values: Callable[[Ratios, Preset, bool], Tensor] | None = None
    linear: bool = True
    gate: bool = False
    later: bool = False


def _ppo(x: Terms) -> Found:
    """Compute max(−A r, −A clip(r)), capped at −dual·A where A < 0: −A r with r bounded on A's side."""
    clip = x.preset.clip
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


def _reinforce(x: Terms) -> Found:
    """Compute −A log π_θ."""
    return -x.advantages * x.current, -x.advantages, None, None


def _surrogate(x: Terms) -> Found:
    """Compute −A; its weight is the loss's own ratio: d(−A r) = −A r d log π_θ."""
    return -x.advantages, -x.advantages, None, None


def _cispo(x: Terms) -> Found:
    """Compute −A log π_θ times the clipped r as a constant: every token keeps its gradient."""
    held = _clamp(x.ratio, *_bounds(x.preset.clip))
    slope = -x.advantages * held
    return slope * x.current, slope, held != x.ratio, None


def _sapo(x: Terms) -> Found:
    """Compute −A σ(τ(r − 1))·4/τ, with one τ where A > 0 and another elsewhere."""
    shape = x.preset.shape
    tau = torch.full_like(x.ratio, shape.tau_negative).masked_fill(x.advantages > 0, shape.tau_positive)
    gate = torch.sigmoid(tau * (x.ratio - 1))
    # σ(−z), not 1 − σ(z): the slope of a gate that is nearly open has its own digits
    rising = 4 * gate * torch.sigmoid(-tau * (x.ratio - 1)) * x.ratio
    return -x.advantages * gate * 4 / tau, torch.where(x.moves, -x.advantages * rising, 0.0), None, None


def _topr(x: Terms) -> Found:
    """Compute −A log π_θ, times the clipped, constant r where the reward (if there is none, A) is <= 0."""
    rewards = x.tokens.batch.rewards
    good = x.advantages > 0
    if rewards is not None:
        good = segments.spread(rewards > 0, x.tokens.batch.cu_seqlens)
    held = _clamp(x.ratio, *_bounds(x.preset.clip))
    slope = -x.advantages * torch.where(good, 1.0, held)
    return slope * x.current, slope, (held != x.ratio) & ~good, None


def _dro(x: Terms) -> Found:
    """Compute −A log π_θ + penalty/2 u²."""
    penalty = x.preset.shape.penalty
    return penalty / 2 * x.u.square() - x.advantages * x.current, penalty * x.u - x.advantages, None, None


def _gmpo(x: Terms) -> Found:
    """Compute −A times the geometric mean of r, u held to [−low, high] on A's side; A is their mean."""
    held = _held(x.u, x.advantages, x.preset.clip)
    loss = segments.spread(gmpo_values(x.tokens, x.preset), x.tokens.batch.cu_seqlens)
    clipped = (held != x.u) & (x.advantages != 0)
    return loss, torch.where(clipped | (x.advantages == 0), 0.0, loss), clipped, None


def _held(u: Tensor, advantages: Tensor, clip: Clip) -> Tensor:
    """Hold u to [−low, high] on A's side; 0 where A is."""
    up, down = _clamp(u, None, clip.high), _clamp(u, clip.low and -clip.low, None)
    return torch.where(advantages < 0, down, up).where(advantages != 0, 0.0)


def gmpo_values(ratios: Ratios, preset: Preset, by_moments: bool | None = None) -> Tensor:
    """Compute the GMPO loss that all tokens of a sequence share, [S]; `by_moments` as for `vespo_factors`."""
    whole = ratios.whole or ratios
    by_moments = ratios.whole is not None if by_moments is None else by_moments
    key = "gmpo", preset.clip, by_moments
    return ratios.own(
        whole.once(key, lambda: _gmpo_values(whole, preset, whole.split if by_moments else None))
    )


def _gmpo_values(whole: Ratios, preset: Preset, split: Split | None) -> Tensor:
    far = whole if split is None else split.far
    batch, offsets = far.batch, far.batch.cu_seqlens
    assert batch.advantages is not None
    held = segments.total(_held(_u(far), batch.advantages, preset.clip), offsets)
    if split is not None:
        d = drift(preset.policy)
        held = held + split.near.of("d", d, "", "1+") + split.near.of("d", d, "", "1-")
    n = segments.lengths(whole.batch.cu_seqlens).clamp(min=1)
    mean = torch.exp((held / n).clamp(-OVERFLOW, OVERFLOW))
    return -correction.mean_advantage(whole) * mean


def _vespo(x: Terms) -> Found:
    """Compute −φ A log π_θ."""
    offsets = x.tokens.batch.cu_seqlens
    positive, negative = (segments.spread(phi, offsets) for phi in vespo_factors(x.tokens, x.preset))
    slope = -x.advantages * torch.where(x.advantages < 0, negative, positive)
    return slope * x.current, slope, None, None


def vespo_factors(ratios: Ratios, preset: Preset, by_moments: bool | None = None) -> tuple[Tensor, Tensor]:
    """Compute φ = e^(λ + k log w − λ w) of each sequence, where A >= 0 and where A < 0, [S] each.

    log w is the sum of u and of the logs of the weights over the sequence, each token's bounded; a weight of
    the sequence counts once, as TRL's [B, 1] ratio does. With `by_moments` near tokens, on which no bound
    acts, enter by moments (by default where `ratios` are of some tokens).
    """
    whole, shape = ratios.whole or ratios, preset.shape
    by_moments = ratios.whole is not None if by_moments is None else by_moments
    log_w = whole.once(("log w", preset.weight, by_moments), lambda: _log_w(whole, preset, by_moments))

    def phi(k: float, rate: float) -> Tensor:
        return ratios.own(torch.exp(rate + k * log_w - rate * torch.exp(log_w)))

    positive = phi(shape.k_positive, shape.lambda_positive)
    return positive, phi(shape.k_negative, shape.lambda_negative)


def _log_w(whole: Ratios, preset: Preset, by_moments: bool) -> Tensor:
    split = whole.split if by_moments else None
    far = whole if split is None else split.far
    offsets = far.batch.cu_seqlens
    log_w = segments.total(_u(far).clamp(-VESPO_LARGEST, VESPO_LARGEST), offsets)
    by_token = preset.weight is not None and preset.weight.over in ("token", "segment")
    if preset.weight is not None:
        final = correction.weigh(far, preset).final
        logs = torch.log(final.values).clamp(VESPO_SMALLEST, VESPO_LARGEST)
        log_w = log_w + (segments.total(logs, offsets) if final.per == "token" else logs)
    if split is not None:
        log_w = log_w + split.near.of("d", drift(preset.policy))
        log_w = log_w + split.near.of("d", preset.policy) if by_token else log_w
    return log_w.clamp(VESPO_SMALLEST, VESPO_LARGEST)


VESPO_SMALLEST, VESPO_LARGEST = math.log(1e-8), 20.0
"""Bounds on VESPO's log w and its terms: TRL f2cd57710 (2026-07-24) trl/trainer/grpo_trainer.py:2967-2979."""


def _fipo(x: Terms) -> Found:
    """Compute PPO's loss times the influence of the tokens after: e^Σ 2^(−distance/half_life) u, bounded.

    Tokens with r above the dual clip do not count in the sum; where A < 0 and r is above `threshold`, the
    influence is within `CALM`.
    """
    shape, later = x.preset.shape, later_drift(x.tokens, x.preset)
    influence = torch.exp(later.clamp(-OVERFLOW, OVERFLOW)).clamp(shape.lowest, shape.highest)
    risky = (x.advantages < 0) & (x.ratio > shape.threshold)
    influence = torch.where(risky, influence.clamp(*CALM), influence)
    loss, slope, clipped, lower = _ppo(x)
    return loss * influence, slope * influence, clipped, lower


CALM = (0.8, 1.0)
"""FIPO's bounds where A < 0 and r is large: ms-swift 3602360a5 (2026-08-22) grpo_trainer.py:933-939."""


def later_drift(ratios: Ratios, preset: Preset) -> Tensor:
    """Compute the discounted sum of u over each token and those after it in its sequence, [T].

    It is computed once, of all tokens of the batch, also where these are some.
    """
    key, whole = later_key(preset), ratios.whole
    if whole is None:
        return ratios.once(key, lambda: _later_drift(ratios, preset))
    return ratios.once(key, lambda: ratios.batch.pick(later_drift(whole, preset)))


def later_key(preset: Preset) -> tuple[object, ...]:
    """Return the key under which the discounted sum of a preset is cached."""
    clip = preset.clip
    return "later u", anchor_of(preset.policy), clip.dual, clip.safety, preset.shape.half_life


def _later_drift(ratios: Ratios, preset: Preset) -> Tensor:
    def calmed(u: Tensor) -> Tensor:
        if preset.clip.dual is None:
            return u
        return torch.where(torch.exp(u.clamp(*_limits(preset))) > preset.clip.dual, 0.0, u)

    batch, gamma = ratios.batch, 2 ** (-1 / preset.shape.half_life)
    return _discounted(_drift(ratios), batch.position, batch.cu_seqlens, gamma, calmed)


def _discounted(
    u: Tensor, position: Tensor, offsets: Tensor, gamma: float, calmed: Callable[[Tensor], Tensor]
) -> Tensor:
    """Sum calmed(u) of each token and those after it in its sequence, each times gamma^distance, [T]."""
    if not segments.on_host(u):  # which is not waited for
        return _summed_on(calmed(u), position, offsets, gamma, len(u))
    found = torch.empty_like(u)
    for first, last in segments.spans(offsets, BLOCK):
        ends = offsets[first : last + 1] - offsets[first]
        at = slice(int(offsets[first]), int(offsets[last]))
        longest = int(segments.lengths(ends).max())
        found[at] = _summed_on(calmed(u[at]), position[at], ends, gamma, longest)
    return found


def _summed_on(u: Tensor, position: Tensor, offsets: Tensor, gamma: float, longest: int) -> Tensor:
    """Do `_discounted` in one block; no sequence has more than `longest` tokens."""
    if not len(u):
        return u
    step = torch.zeros_like(u)  # gamma^distance to the next token; 0 at the end of a sequence
    step[:-1] = torch.exp((position[1:] - position[:-1]).to(u.dtype) * math.log(gamma))
    last = torch.arange(len(u), device=u.device) == segments.spread(offsets[1:] - 1, offsets)
    return _scanned(u, step.masked_fill_(last, 0.0), min(longest, _reach(gamma)))


def _reach(gamma: float) -> int:
    """Return the distance from which on gamma^distance is nothing beside 1."""
    return math.ceil(-45 / math.log(gamma)) if gamma < 1 else sys.maxsize


def _scanned(u: Tensor, step: Tensor, longest: int) -> Tensor:
    """Sum u over the `longest` tokens from each on, each times the steps on the way to it, [T]."""
    found, many = u, 1
    while many < longest:  # `found` sums `many` tokens, `step` is gamma^distance to the token after them
        sums, steps = found.clone(), torch.zeros_like(step)
        torch.addcmul(found[:-many], step[:-many], found[many:], out=sums[:-many])
        torch.mul(step[:-many], step[many:], out=steps[:-many])
        found, step, many = sums, steps, 2 * many
    return found


LOSSES: dict[str, Loss] = {
    "ppo_clip": Loss(_ppo),
    "reinforce": Loss(_reinforce, "always", ratio=False, log=True),
    "surrogate": Loss(_surrogate, "always", ratio=False),
    "gspo": Loss(_ppo, pooled=True),
    "luspo": Loss(_ppo, pooled=True),
    "cispo": Loss(_cispo, log=True),
    "sapo": Loss(_sapo, gate=True),
    "topr": Loss(_topr, linear=False),
    "gmpo": Loss(_gmpo, values=gmpo_values),
    "fipo": Loss(_fipo, linear=False, later=True),
    "dro": Loss(_dro, ratio=False, linear=False),
    "vespo": Loss(_vespo, "never", ratio=False, log=True, factors=vespo_factors),
}


def _bounds(clip: Clip) -> tuple[float | None, float | None]:
    """Return the bounds below and above which r is clipped."""
    return None if clip.low is None else 1 - clip.low, None if clip.high is None else 1 + clip.high


def _clamp(x: Tensor, low: float | None, high: float | None) -> Tensor:
    return x if low is None and high is None else x.clamp(low, high)


def linear(preset: Preset) -> bool:
    """Return whether near tokens are summed by moments; not where a clip at r = 1 acts on half of them."""
    row = LOSSES[preset.loss]
    clips_tokens = row.ratio and not (row.pooled or row.gate or row.values)
    touches = clips_tokens and 0 in (preset.clip.low, preset.clip.high)
    return row.linear and not touches


def taus(preset: Preset) -> dict[str, float]:
    """Return the rate of SAPO's gate by sign of A."""
    return {"positive": preset.shape.tau_positive, "negative": preset.shape.tau_negative}


def weighted(preset: Preset) -> bool:
    """Return whether the preset's weight multiplies its loss.

    With the anchor π_rollout a loss with a ratio of its own is corrected by it; a weight would correct twice.
    """
    when = LOSSES[preset.loss].weighted
    return when == "always" or (when == "old" and preset.policy == "old")


def kind(preset: Preset) -> tuple[object, ...]:
    """Key of a preset's per-token loss: on the same batch, presets with equal keys have equal `TokenLoss`."""
    row = LOSSES[preset.loss]
    within = preset.weight if row.weighted == "never" else None
    return preset.loss, preset.policy == "old", preset.clip if row.ratio else None, preset.shape, within


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
    loss, slope, clipped, lower = row.of(Terms(batch.advantages, batch.current, ratio, moves, preset, ratios))
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
    row = LOSSES[preset.loss]
    bound = preset.clip.safety if row.ratio and not row.pooled else None
    u = _u(ratios)
    return ratios.once(("loss kl", bound), lambda: -(u if bound is None else u.clamp(-bound, bound)))


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
        terms = Terms(a, none, ratio, held == u, preset)
        loss, slope, clipped, lower = LOSSES[preset.loss].of(terms)
        clipped, lower = (never if x is None else x for x in (clipped, lower))
        found[sign] = TokenLoss(loss, slope, clipped, lower, -u)
    return found


def _u(ratios: Ratios) -> Tensor:
    """Compute u of every token, [T], cached."""
    return ratios.once("loss u", lambda: _drift(ratios))


def _drift(ratios: Ratios) -> Tensor:
    current, before = ratios.batch.current, ratios.batch.policy(anchor_of(ratios.policy))
    assert current is not None
    assert before is not None
    return current - before


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
