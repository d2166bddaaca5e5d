"""What trainers do with their settings, restated on padded arrays from their code, and presets to try it on.

A function of `EFFECTS` takes a trainer's settings, flat dotted keys that default as the trainer's do, and a
padded batch, and returns what multiplies each token's loss. Numbers within 1e-12 of a bound count as equal to
it: whether a bound is part of its band is a trainer's decision, how exp(log(b)) rounds is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offpol_diag.presets.catalogue import load

Flat = dict[str, Any]
Array = np.ndarray
Bound = float | None
NEAR = 1e-12
CATALOGUE = load()

VARIED = """
token_is@weight.lower=0.5 token_is@3 token_is@weight.action=mask token_is@loss=reinforce token_clip@0.5..2
areal_decoupled@reject.lower=0.5 seq_is@5 seq_is@weight.lower=0.2:weight.upper=5 seq_is@weight.action=mask
seq_is@loss=gspo seq_icepop@inf..3 seq_icepop@loss=cispo:clip.low=1:clip.high=4 seq_mask_tis@0.9..1.1
geo_is@1.001:weight.lower=0.999 geo_is@5:weight.action=mask geo_mask@0.999..1.002
geo_mask@0.5..2:reject.over=sum seq_mask_tis@0.999..1.002 token_k3_mask@reject.statistic=k2
token_k3_mask@0.01:reject.over=mean seq_error_mask@1.5 token_is_veto@veto.upper=100 gspo@policy=current
recompute@loss=reinforce areal_decoupled@loss=cispo:clip.low=1:clip.high=4
recompute@clip.low=inf:clip.high=inf:clip.dual=inf bypass_pg_token_is@loss=surrogate bypass_pg_token_is@5
bypass_pg_token_icepop@0.2..5 ipo@-0.3..0.3 dppo_tv@-0.1..0.3 dppo_tv@-0.1..0.3:reject.advantage=against
dppo_kl@0.2:weight.action=none:loss=surrogate
dppo_tv@-0.15..0.15:weight.action=truncate:weight.upper=1e4:loss=reinforce token_clip@2
ipo@weight.action=truncate:weight.upper=20
"""
"""Methods of the catalogue as one trainer or another has them."""
HARD = """
recompute@weight.action=mask:weight.lower=0.5 recompute@weight.lower=0.5
recompute@weight.over=sum:weight.action=none recompute@weight.action=none:weight.upper=2
recompute@weight.action=none:reject.over=mean:reject.upper=2 token_is@reject.lower=0.9
recompute@weight.action=none:reject.upper=1.1 token_is@9:reject.lower=0.9:reject.upper=1.1
token_is@1.1:reject.lower=0.9:reject.upper=9 recompute@weight.action=none:reject.over=mean:reject.lower=0.99
recompute@weight.over=mean:weight.action=none:reject.over=max:reject.upper=100
recompute@weight.action=none:reject.statistic=k1:reject.lower=-0.2:reject.upper=1
recompute@weight.action=none:reject.statistic=k1:reject.over=mean:reject.lower=-0.01
recompute@reject[0].upper=1.1:reject[1].statistic=k3:reject[1].over=mean:reject[1].upper=0.01
recompute@reject[0].statistic=k2:reject[0].over=max:reject[0].upper=2.5:reject[1].lower=0.625:reject[1].upper=1.6
token_is@clip.low=0.1:clip.high=0.28:clip.dual=4 recompute@loss=gspo:clip.low=0.1:clip.high=0.28:clip.dual=4
token_is@veto.upper=3 recompute@weight.over=sum:weight.upper=2:reject.upper=1.1
recompute@weight.action=none:weight.normalize=true:reject.upper=1.1
token_is@clip.low=inf:clip.high=0.28:clip.dual=inf recompute@loss=cispo:clip.low=0.5:clip.high=2
recompute@weight.action=mask:weight.upper=2:reject.statistic=mult_prob_error:reject.over=mean:reject.upper=1.5
"""
"""Corrections that are no row of the catalogue, where a table could go wrong."""
BUILT_IN = {**CATALOGUE, **{one.name: one for one in map(CATALOGUE.__getitem__, VARIED.split())}}
OWN = {one.name: one for one in map(CATALOGUE.__getitem__, HARD.split())}
PRESETS = BUILT_IN | OWN


@dataclass(frozen=True)
class Padded:
    """A batch as a trainer holds it, [B, L] each; values where `mask` is False mean nothing.

    Attributes:
        rollout, old, current: log π of the sampled token, nats.
        mask: response tokens that are trained on.
        advantages: of each token.
    """

    rollout: Array
    old: Array
    current: Array
    mask: Array
    advantages: Array

    def gap(self, train: str = "old") -> Array:
        """Compute log π_train − log π_rollout, [B, L]; 0 where masked."""
        return np.where(self.mask, getattr(self, train) - self.rollout, 0.0)

    def total(self, x: Array, mask: Array | None = None) -> Array:
        """Sum each row, [B, 1]."""
        return np.where(self.mask if mask is None else mask, x, 0.0).sum(axis=1, keepdims=True)

    def mean(self, x: Array, mask: Array | None = None) -> Array:
        """Average each row, [B, 1]; 0 for a row without a token."""
        mask = self.mask if mask is None else mask
        return self.total(x, mask) / np.maximum(mask.sum(axis=1, keepdims=True), 1)

    def largest(self, x: Array) -> Array:
        """Return the maximum of each row, [B, 1]."""
        return np.where(self.mask, x, -np.inf).max(axis=1, keepdims=True)

    def ratio(self, level: str, train: str = "old", clamp: float = 700.0) -> Array:
        """Compute r of tokens, their product over the sequence, or its geometric mean, [B, L]."""
        log = {"token": lambda x: x, "sequence": self.total, "geometric": self.mean}[level](self.gap(train))
        return exp(log, clamp) * np.ones(self.mask.shape)

    def weight(self, how: str, low: Bound, high: Bound, *of: Any) -> Array:
        """Weigh by a ratio (`how`: see `KINDS`) with its bounds; `of`: as of `ratio`."""
        level, action, *gate = how.split()
        w = self.ratio(level, *of)
        clipped = np.clip(w, -np.inf if low is None else low, np.inf if high is None else high)
        return clipped if action != "mask" else w * within(self.ratio(*gate or [level], *of), low, high)

    def normalized(self, w: Array, level: str) -> Array:
        """Divide weights by their mean over tokens, or over the means of sequences."""
        return w / (w[self.mask].mean() if level == "token" else self.mean(w).mean())


def padded(rows: list[dict[str, Any]]) -> Padded:
    """Pad rows of a dump, as lists, on the right."""
    width = max(len(row["response_mask"]) for row in rows)
    columns = ("rollout_log_probs", "old_log_probs", "current_log_probs", "response_mask", "advantages")
    blocks = [np.array([[*row[one], *[0] * (width - len(row[one]))] for row in rows]) for one in columns]
    return Padded(*blocks[:3], blocks[3].astype(bool), blocks[4])


@dataclass
class Effect:
    """Factor of each token's loss, [B, L], 0 where it is dropped; the loss, its anchor and its clip.

    `denominator`: what is rejected still divides the loss (all), or does not (kept); "" where it depends.
    """

    factor: Array | float = 1.0
    loss: str = "ppo_clip"
    anchor: str = "old"
    clip: tuple[float, float | None] = (0.2, 0.2)
    denominator: str = "all"


def exp(x: Array, bound: float = 700.0) -> Array:
    return np.exp(np.clip(x, -bound, bound))


def over(x: Array, bound: Bound) -> Array:
    """Return where x is strictly above the bound; nowhere without one."""
    return np.zeros(np.shape(x), bool) if bound is None else x > bound + NEAR * abs(bound)


def within(x: Array, low: Bound, high: Bound) -> Array:
    """Return where x is in the band, its ends included."""
    return ~over(x, high) & ~over(-x, None if low is None else -low)


def below(f: Flat, prefix: str) -> Flat:
    """Return the keys below a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in f.items() if key.startswith(prefix)}


GEOMETRIC_GATE = "token mask geometric"
KINDS = {"tis": "token clip", "cispo": "token clip", "icepop": "token mask"}
KINDS |= dict.fromkeys(("mis", "seq-mask-tis"), GEOMETRIC_GATE)
"""Word of OpenRLHF, NeMo-RL and prime-rl for a weight → level of its ratio, whether it is clipped at its
bounds or masked (0) outside of them, and the level of the ratio held against them, if that is another."""


def sides(f: Flat, low: str, high: str) -> tuple[float, float]:
    """Return the bounds of a clip whose upper one defaults to the lower."""
    return f.get(low, 0.2), f.get(high) or f.get(low, 0.2)


def coin(p: Padded) -> Array:
    """Compute the KL from the rollout's "this token or another" to the current policy's."""
    mu, pi, tiny = np.exp(p.rollout), np.exp(p.current), 1e-8
    return -mu * p.gap("current") + (1 - mu) * np.log((1 - mu + tiny) / (1 - pi + tiny))


# ---------------------------------------------------------------- verl and its fork


def verl(f: Flat, p: Padded) -> Effect:
    """rollout_corr_helper.py, and mismatch_helper.py of 0.6.0: the log-ratio is clamped to ±20."""
    assert f["actor_rollout_ref.rollout.calculate_log_probs"] is True
    actor, block = below(f, "actor_rollout_ref.actor."), below(f, "algorithm.rollout_correction.")
    clip = (actor.get("clip_ratio_low", 0.2), actor.get("clip_ratio_high", 0.2))
    if not block:
        flat = below(f, "algorithm.")
        return Effect(verl_flat(flat, p) if flat["rollout_is"] else 1.0, clip=clip, denominator="kept")
    bypass, mode = block["bypass_mode"], actor.get("policy_loss.loss_mode", "ppo_clip")
    if "rollout_token_veto_threshold" in block:  # in bypass no weights and no rules, whatever is set
        factor = 1.0 if bypass else verl_2025(block, p)
        return Effect(factor, "ppo_clip", "rollout" if bypass else "old", clip, "kept")
    if not bypass:
        return Effect(verl_2026(block, p, "old"), {"gpg": "reinforce"}.get(mode, mode), "old", clip, "")
    if mode != "bypass_mode":
        change, up, bound = np.exp(p.current) - np.exp(p.rollout), p.advantages > 0, clip[1]
        gone = np.where(up, over(change, bound), over(-change, bound))
        if mode == "dppo_kl":
            gone = over(coin(p), bound) & np.where(up, change > 0, (change < 0) & (p.advantages < 0))
        cap = actor["clip_ratio_c"]
        return Effect(np.minimum(p.ratio("token", "current", 20), cap) * ~gone, "reinforce", "rollout")
    assert below(actor, "policy_loss.rollout_correction.") == block
    assert actor["use_rollout_log_probs"] is True
    assert block["loss_type"] == "reinforce" or block["rollout_is"] is None
    return Effect(verl_2026(block, p, "current"), block["loss_type"], "rollout", clip)


def no_veto(p: Padded, threshold: float | None) -> Array:
    """Return rows without a trained token below the threshold, the ratio unclamped, [B, 1]."""
    return ~(over(-p.gap(), -math.log(threshold)) & p.mask).any(axis=1, keepdims=True) if threshold else True


def verl_flat(f: Flat, p: Padded) -> Array:
    """0.6.0: one level, at which weights are truncated, or are 0 outside a band."""
    level, upper, mask = f["rollout_is_level"], f["rollout_is_threshold"], f["rollout_is_mode"] == "mask"
    band = (level if mask else None, f.get("rollout_is_threshold_lower"), upper)
    return weighted(p, level, None if mask else upper, *band, f["rollout_is_veto_threshold"])


def verl_2025(f: Flat, p: Padded) -> Array:
    band = (f["rollout_rs"], f.get("rollout_rs_threshold_lower"), f.get("rollout_rs_threshold"))
    return weighted(
        p, f["rollout_is"], f.get("rollout_is_threshold"), *band, f["rollout_token_veto_threshold"]
    )


def weighted(
    p: Padded, level: str | None, cap: Bound, rejects: str | None, low: Bound, upper: Bound, veto: Bound
) -> Array:
    """Weigh by min(r, cap) of a level; what is outside a band of the level that `rejects` is dropped."""
    w = p.weight(f"{level} clip", None, cap, "old", 20) if level else np.ones(p.mask.shape)
    if rejects:
        w = w * within(p.ratio(rejects, "old", 20), low or 1 / upper, upper)
    return w * no_veto(p, veto)


def verl_2026(f: Flat, p: Padded, policy: str) -> Array:
    w, keep, level = np.ones(p.mask.shape), p.mask, f["rollout_is"]
    if level:
        band = str(f["rollout_is_threshold"]).split("_")
        action, low = ("mask", float(band[0])) if len(band) == 2 else ("clip", None)
        w = p.weight(f"{level} {action}", low, float(band[-1]), policy, 20)
    w = p.normalized(w, level) if f.get("rollout_is_batch_normalize") else w
    options = f["rollout_rs"].split(",") if f["rollout_rs"] else []
    thresholds = f["rollout_rs_threshold"].split(",") if options else []
    assert len(set(options)) == len(options)
    for option, threshold in zip(options, thresholds, strict=True):
        how, _, k = option.rpartition("_")
        d = np.clip(p.gap(policy), -20, 20)
        x = {"k1": -d, "k2": d * d / 2, "k3": np.expm1(d) - d}[k]
        x = {"token": lambda x: x, "seq_sum": p.total, "seq_mean": p.mean, "seq_max": p.largest}[how](x)
        bounds = [float(bound) for bound in threshold.split("_")]
        keep = keep & within(x, *(map(math.log, bounds) if k == "k1" else (None, *bounds)))
    return w * keep


def flash_rl(f: Flat, p: Padded) -> Effect:
    """A cap on the token's ratio; the rest is verl's."""
    cap = f["actor_rollout_ref.actor.tis_imp_ratio_cap"]
    rest = verl({"algorithm.rollout_is": False} | f, p)
    return replace(rest, factor=np.minimum(p.ratio("token"), cap) if cap > 0 else 1.0, denominator="all")


# ---------------------------------------------------------------- TRL, ms-swift, OpenRLHF, NeMo-RL


def trl(f: Flat, p: Padded) -> Effect:
    """vllm_importance_sampling_*: a sequence's ratio is the product, unbounded before exp."""
    g = below(f, "vllm_importance_sampling_")
    how, high = g.get("mode", "sequence_mask").replace("_", " "), g.get("clip_max", g.get("cap", 3.0))
    w = p.weight(how, g.get("clip_min"), high)
    return Effect(w if g.get("correction", True) else 1.0, *hf_loss(f))


def hf_loss(f: Flat) -> tuple[str, str, tuple[float, float | None]]:
    """Read the loss as TRL and ms-swift have it: CISPO's epsilon_high is the bound itself."""
    if f.get("loss_type") == "cispo":
        return "cispo", "old", (1.0, f["epsilon_high"] - 1)
    loss = "gspo" if f.get("importance_sampling_level") == "sequence" else "ppo_clip"
    return loss, "old", sides(f, "epsilon", "epsilon_high")


def ms_swift(f: Flat, p: Padded) -> Effect:
    """_apply_rollout_importance_sampling: its sequence ratio is the geometric mean; logs clamped to ±20."""
    mode, cap = f["rollout_importance_sampling_mode"], f["rollout_importance_sampling_threshold"]
    assert f["use_vllm"] or mode is None
    how = (mode or "").replace("sequence_truncate", "geometric truncate").replace("_", " ")
    how = GEOMETRIC_GATE if mode == "sequence_mask" else how
    return Effect(p.weight(how, None, cap, "old", 20) if mode else 1.0, *hf_loss(f))


def openrlhf(f: Flat, p: Padded) -> Effect:
    """PolicyLoss in any of its spellings: a level, a mode and a gate since 0.11, before a type."""
    g = below(f, "algo.advantage.is_correction_")
    f = {key.removeprefix("actor."): value for key, value in f.items()}
    on = g["level"] != "off" if "level" in g else g.get("enable", f.get("enable_vllm_is_correction"))
    how = KINDS.get(g.get("type", f.get("vllm_is_correction_type")))
    if "level" in g:
        assert g["gating"] == "ratio"
        how = GEOMETRIC_GATE if g["level"] == "seq" else f"token {g['mode']}"
    loss, clip = f["policy_loss_type"], f["eps_clip_low_high"]
    if loss == "gspo" or not on:
        return Effect(1.0, "gspo" if loss == "gspo" else "ppo_clip", "rollout" if on else "old", clip)
    bounds = g.get("threshold", f.get("vllm_is_truncated_threshold"))
    return Effect(p.weight(how, *bounds), clip=clip)


def nemo_rl(f: Flat, p: Padded) -> Effect:
    """ClippedPGLossFn, and the error mask before it; prev_logprobs are the current ones on-policy."""
    g, error = below(f, "loss_fn."), f.get("grpo.seq_logprob_error_threshold")
    sequence, on_policy = g.get("sequence_level_importance_ratios"), g.get("force_on_policy_ratio")
    assert not sequence or g["token_level_loss"] is False
    tis = below(g, "truncated_importance_sampling_")
    kind, low, high = tis.get("type"), tis.get("ratio_min"), tis.get("ratio")
    assert high is None or kind is not None
    how = "sequence clip" if sequence else KINDS[kind or "tis"]
    weight = p.weight(how, low, high, "current" if on_policy else "old")
    weight = weight if g["use_importance_sampling_correction"] else np.ones(p.mask.shape)
    keep = ~over(p.mean(exp(np.abs(p.gap()))), error)
    named = {"use_cispo": "cispo", "disable_ppo_ratio": "reinforce", "force_on_policy_ratio": "surrogate"}
    loss = next((loss for key, loss in named.items() if g.get(key)), "gspo" if sequence else "ppo_clip")
    clip = (g.get("ratio_clip_min", 0.2), g.get("ratio_clip_max", 0.2))
    return Effect(weight * keep, loss, "rollout" if on_policy else "old", clip, "kept" if error else "all")


def slime(f: Flat, p: Padded) -> Effect:
    """--use-tis, IcePop, OPSM with --use-rollout-logprobs, and mis.py with the settings of mis.yaml."""
    estimator, bypass = f["advantage-estimator"], f["use-rollout-logprobs"]
    path, factor = f["custom-tis-function-path"] or "", 1.0
    assert not (bypass and f["use-tis"])
    if "mis.compute_mis" in path:
        assert f["custom-config-path"] == "mis.yaml"
        factor = mis(f, p)
    elif f["use-opsm"]:
        factor = ~((p.advantages < 0) & over(-p.mean(p.gap("current")), f["opsm-delta"])) * 1.0
    elif f["use-tis"]:
        how = "token mask" if path.endswith("icepop_function") else "token clip"
        factor = p.weight(how, f["tis-clip-low"], f["tis-clip"])
    loss = "ppo_clip" if estimator == "grpo" else estimator
    return Effect(factor, loss, "rollout" if bypass else "old", sides(f, "eps-clip", "eps-clip-high"))


def mis(f: Flat, p: Padded) -> Array:
    """Apply mis.yaml, which needs all of its keys; the batch mean is of weights before any rejection."""
    assert f["use_tis"] is True
    level, low, high = f["tis_level"], f["tis_lower_bound"], f["tis_upper_bound"]
    masks, veto = f["tis_mode"] == "mask", f["rs_veto_threshold"]
    keep = weighted(p, None, None, level if masks else None, low, high, None)
    if f["use_rs"]:
        keep = keep * weighted(p, None, None, f["rs_level"], f["rs_lower_bound"], f["rs_upper_bound"], veto)
    low = None if f["tis_mode"] == "truncate" else low
    w = p.ratio(level, "old", 20) if masks else p.weight(f"{level} clip", low, high, "old", 20)
    assert not (f["tis_batch_normalize"] and level == "geometric")
    return (p.normalized(w, level) if f["tis_batch_normalize"] else w) * keep


def areal(f: Flat, p: Padded) -> Effect:
    """rejection_sampling, or the cap before 1.0.4; k1 is +log r there, and k3 is that of 1/r. Or M2PO."""
    f = below(f, "actor.")
    decoupled, gap, factor = f["use_decoupled_loss"], p.gap(), 1.0
    g, moment = below(f, "rejection_sampling."), "m2_threshold" in f
    if moment:
        assert decoupled
        assert f.get("behave_imp_weight_mode", "disabled") == "disabled"
        squares = np.sort(gap[p.mask] ** 2)
        means = np.cumsum(squares) / np.arange(1, squares.size + 1)
        factor = (gap**2 <= squares[max(int((means < f["m2_threshold"]).sum()), 1) - 1]) * 1.0
    elif decoupled and "behave_imp_weight_cap" in f:
        how = f["behave_imp_weight_mode"].replace("sequence", "geometric").replace("_", " ")
        factor = p.weight(how, None, f["behave_imp_weight_cap"])
    elif decoupled:
        metric, low, high = g["metric"], g.get("lower"), g.get("upper", 5.0)
        sequence = g["level"] == "sequence"
        assert high > 1 or metric != "ratio"
        assert g["action"] == "mask" or metric == "ratio"
        x = {"ratio": gap, "kl_k1": gap, "kl_k2": gap**2 / 2, "kl_k3": exp(-gap) - 1 + gap}[metric]
        x = {"sum": p.total, "mean": p.mean, "max": p.largest}[g.get("agg", "mean")](x) if sequence else x
        w = p.ratio("geometric" if sequence and metric == "ratio" else "token")
        keep = within(exp(x) if metric == "ratio" else x, low, high)
        factor = w * keep if g["action"] == "mask" else np.clip(w, low or 0.0, high)
    loss = "gspo" if f.get("importance_sampling_level") == "sequence" else "ppo_clip"
    loss = "cispo" if f.get("use_cispo_loss") else loss
    anchor = "old" if decoupled or f["recompute_logprob"] else "rollout"
    return Effect(factor, loss, anchor, sides(f, "eps_clip", "eps_clip_higher"), "kept" if moment else "all")


def prime_rl(f: Flat, p: Padded) -> Effect:
    """[trainer.loss], one pass against the rollout."""
    f = below(f, "trainer.loss.")
    change, low, high = np.exp(p.current) - np.exp(p.rollout), f.get("ratio_low"), f.get("ratio_high")
    if f["type"] in ("icepop", "cispo"):
        return Effect(p.weight(KINDS[f["type"]], low, high, "current"), "reinforce", "rollout")
    if f["type"] == "ppo":
        return Effect(1.0, "ppo_clip", "rollout", (1 - low, high - 1))
    if f["type"] == "ipo":
        keep = ~over(np.abs(change), f.get("eps", f.get("ipo_threshold", 0.3)))
    else:
        far, near = over(change, f["dppo_mask_high"]), over(-change, f["dppo_mask_low"])
        keep = ~np.where(p.advantages > 0, far, near)
    w = np.minimum(p.ratio("token", "current"), f.get("max_importance_ratio", 1e4))
    return Effect(w * keep, "surrogate", "rollout")


def skyrl(f: Flat, p: Padded) -> Effect:
    """off_policy_correction, each stage on what the last has left; or a loss against the rollout."""
    assert f["generator.sampling_params.logprobs"] == 1
    f = below(f, "trainer.algorithm.")
    kind, current = f["policy_loss_type"], p.ratio("token", "current", 20)
    d, c = below(f, "dppo."), below(f, "off_policy_correction.")
    cispo = (f.get("cispo.cispo_eps_clip_low", 1.0), f.get("cispo.cispo_eps_clip_high", 4.0))
    if kind == "dppo":
        change, far = np.exp(p.current) - np.exp(p.rollout), coin(p)
        far = far if d.get("dppo_type") == "binary_kl" else np.abs(change)
        up = (change > 0) & over(far, d.get("delta_high", 0.2))
        down = (change < 0) & over(far, d.get("delta_low", 0.2))
        gone = np.where(p.advantages > 0, up, (p.advantages < 0) & down)
        return Effect(current * ~gone, "surrogate", "rollout")
    if kind == "cispo" and f.get("cispo.cispo_anchor") == "rollout":
        return Effect(np.clip(current, 1 - cispo[0], 1 + cispo[1]), "reinforce", "rollout")
    outliers, masked = (
        ~within(p.ratio("token", "old", 20), c.get(f"{of}_threshold_low"), c.get(f"{of}_threshold_high"))
        for of in ("outlier_token_is", "token_mask_is")
    )
    left, weight = p.mask & ~(p.mask & outliers).any(axis=1, keepdims=True) & ~masked, 1.0
    if c["tis_ratio_type"] == "token":
        weight = np.minimum(p.ratio("token", "old", 20), c["token_tis_ratio_clip_high"])
    elif c["tis_ratio_type"] == "sequence":
        weight = np.minimum(exp(p.total(p.gap(), left), 20), c["sequence_tis_ratio_clip_high"])
    if metric := c.get("sequence_mask_metric"):
        name, of = {"geometric": ("geo", p.mean), "product": ("product", p.total)}[metric]
        left = left & within(exp(of(p.gap(), left), 20), c[f"{name}_mask_low"], c[f"{name}_mask_high"])
    clip = cispo if kind == "cispo" else (f.get("eps_clip_low", 0.2), f.get("eps_clip_high", 0.2))
    if kind == "importance_sampling":
        assert c["tis_ratio_type"] is None
        clip = (1.0, None)
    return Effect(weight * left, kind if kind in ("gspo", "cispo") else "ppo_clip", "old", clip)


def colossalai(f: Flat, p: Padded) -> Effect:
    return Effect(1.0, "ppo_clip", "rollout", (f["clip_eps_low"], f["clip_eps_high"]))


OF_EACH = (verl, trl, ms_swift, openrlhf, nemo_rl, slime, areal, prime_rl, skyrl, flash_rl, colossalai)
EFFECTS: dict[str, Callable[[Flat, Padded], Effect]] = {
    "miles": slime,
    **{one.__name__.replace("_", "-"): one for one in OF_EACH},
}
