"""A softmax policy over a small vocabulary, trained on another policy's samples.

What a trainer computes is written here on padded matrices; ours comes from `analyze` on a dump of the same
numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from offpol_diag.core.observe import analyze
from offpol_diag.presets import Clip, Preset, Reject, Weight
from tests.factory import DumpFile

VOCABULARY, LONGEST = 5, 9
LENGTHS = (9, 1, 4, 0, 7, 2, 9, 6, 3, 8, 1, 5)
TIGHT = Clip(0.1, 0.15, 1.3)  # so that every branch is taken often


@dataclass
class World:
    """Three policies on one batch of samples, [S, N] each."""

    current: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    path: object

    def log_probs(self, policy):
        return {"current": self.current, "old": self.old, "rollout": self.rollout}[policy]


def world(folder, lengths=LENGTHS, seed=0, drift=0.5, step=0.35, per_sequence=False, many=4):
    """Make a dump of `many` batches' worth of sequences sampled from π_rollout."""
    torch.manual_seed(seed)
    lengths = torch.tensor(lengths * many)
    shape = (len(lengths), max(lengths.tolist()))
    base = torch.randn(*shape, VOCABULARY, dtype=torch.float64)
    old = base + drift * torch.randn_like(base)
    logits = old + step * torch.randn_like(base)
    tokens = torch.multinomial(base.softmax(-1).flatten(0, 1), 1).view(*shape, 1)
    rollout, before, current = (x.log_softmax(-1).gather(-1, tokens).squeeze(-1) for x in (base, old, logits))
    advantages = torch.randn(shape, dtype=torch.float64).where(torch.rand(shape) > 0.1, 0.0)
    if per_sequence:
        advantages = advantages[:, :1].expand(shape).contiguous()
    mask = torch.arange(shape[1]) < lengths[:, None]
    made = World(current, before, rollout, advantages, mask, folder / f"{seed}{drift}{step}.parquet")
    write(made)
    return made


def write(made):
    with DumpFile(made.path, dtype="float64") as writer:
        writer.write(
            rollout_log_probs=made.rollout,
            old_log_probs=made.old,
            current_log_probs=made.current,
            advantages=made.advantages,
            response_mask=made.mask.to(torch.int64),
        )


# ---------------------------------------------------------------- what a trainer computes


def ratio(x, log_prob, anchor, preset):
    u = log_prob - anchor
    if preset.loss == "gspo":
        u = ((u * x.mask).sum(1) / x.mask.sum(1).clamp(min=1))[:, None].expand_as(u)
        return torch.exp(u if preset.clip.safety is None else u.clamp(max=preset.clip.safety))
    return torch.exp(u if preset.clip.safety is None else u.clamp(-preset.clip.safety, preset.clip.safety))


def clipped(r, clip):
    low = -math.inf if clip.low is None else 1 - clip.low
    high = math.inf if clip.high is None else 1 + clip.high
    return r.clamp(low, high)


def terms(x, log_prob, preset):
    """Compute the loss of each token; the surrogate's includes its ratio."""
    a = x.advantages
    r = ratio(x, log_prob, x.old if preset.policy == "old" else x.rollout, preset)
    if preset.loss == "reinforce":
        return -a * log_prob
    if preset.loss == "surrogate":
        return -a * r
    if preset.loss == "cispo":
        return -a * log_prob * clipped(r, preset.clip)
    worse = torch.maximum(-a * r, -a * clipped(r, preset.clip))
    if preset.clip.dual is None:
        return worse
    return torch.where(a < 0, torch.minimum(worse, -a * preset.clip.dual), worse)


def trainer_weights(x, preset, log_prob):
    """Compute min(r, 1.4) of tokens, min(∏r, 2) of sequences, or the raw r of tokens; else 1."""
    own_ratio = preset.loss == "surrogate" or (preset.policy != "old" and preset.loss != "reinforce")
    if preset.weight is None or own_ratio:
        return torch.ones_like(x.advantages)
    delta = ((x.old if preset.policy == "old" else log_prob) - x.rollout) * x.mask
    if preset.weight.over == "sum":
        return torch.exp(delta.sum(1, keepdim=True)).clamp(max=2.0).expand_as(delta)
    return torch.exp(delta) if preset.weight.action == "none" else torch.exp(delta).clamp(max=1.4)


def trainer_mask(x, preset):
    """Return where r is in [0.6, 1.7], of tokens, or in [0.8, 1.25], a sequence's geometric mean; or all."""
    delta = (x.log_probs(preset.policy) - x.rollout) * x.mask
    keep = x.mask
    for rule in preset.reject:
        geometric = torch.exp(delta.sum(1, keepdim=True) / x.mask.sum(1, keepdim=True).clamp(min=1))
        of = torch.exp(delta) if rule.over == "token" else geometric.expand_as(delta)
        keep = keep & (of >= rule.lower) & (of <= rule.upper)
    return keep


def factors(x, keep, how):
    """Return the factor of each kept token's loss with which the sum over tokens is the trainer's loss."""
    rows = keep.any(1).sum()
    keep = keep.to(torch.float64)
    return {
        "pg_loss": keep / keep.sum(),
        "pg_loss_kept": keep / x.mask.sum(),
        "pg_loss_seq_sum": keep / rows,
        "pg_loss_seq_mean": keep / keep.sum(1, keepdim=True).clamp(min=1) / rows,
        "pg_loss_seq_norm": keep / rows / LONGEST,
    }[how]


def trained(x, preset, how):
    """Compute the trainer's loss."""
    each = terms(x, x.current, preset) * trainer_weights(x, preset, x.current)
    return (each * factors(x, trainer_mask(x, preset), how)).sum().item()


def numbers(x, *presets):
    found = analyze([x.path], presets=presets)
    return [{name: n.value for name, n in found.preset(preset.name).items()} for preset in presets]


TOKEN, SEQUENCE, RAW = Weight("token", upper=1.4), Weight("sum", upper=2.0), Weight("token", "none")
BAND, GEOMETRIC = Reject("ratio", "token", 0.6, 1.7), Reject("ratio", "mean", 0.8, 1.25)


def preset(name, loss, **given):
    return Preset(name, "", loss=loss, **{"clip": TIGHT, **given})


CASES = (
    preset("ppo", "ppo_clip"),
    preset("ppo_usual_clip", "ppo_clip", clip=Clip()),
    preset("ppo_token_weight", "ppo_clip", weight=TOKEN, reject=(BAND,)),
    preset("ppo_sequence_weight", "ppo_clip", weight=SEQUENCE, reject=(GEOMETRIC,)),
    preset("ppo_no_dual", "ppo_clip", clip=Clip(0.1, 0.15, None), weight=TOKEN),
    preset("ppo_no_clip", "ppo_clip", clip=Clip(None, None, None), weight=TOKEN),
    preset("ppo_low_only", "ppo_clip", clip=Clip(0.1, None, None)),
    preset("ppo_high_only", "ppo_clip", clip=Clip(None, 0.1, None)),
    preset("ppo_dual_only", "ppo_clip", clip=Clip(None, None, 1.2)),
    preset("bypass", "ppo_clip", policy="current", weight=TOKEN, reject=(BAND, GEOMETRIC)),
    preset("reinforce_token", "reinforce", policy="current", weight=TOKEN, reject=(GEOMETRIC,)),
    preset("reinforce_sequence", "reinforce", policy="current", weight=SEQUENCE, reject=(BAND,)),
    preset("reinforce_old", "reinforce", weight=RAW),
    preset("surrogate", "surrogate", policy="current", weight=RAW, reject=(BAND,)),
    preset("gspo", "gspo"),
    preset("gspo_weighted", "gspo", weight=SEQUENCE, reject=(GEOMETRIC,)),
    preset("gspo_of_tokens", "gspo", weight=TOKEN, reject=(BAND,)),
    preset("gspo_no_clip", "gspo", clip=Clip(None, None, None)),
    preset("gspo_bypass", "gspo", policy="current", weight=TOKEN),
    preset("cispo", "cispo", clip=Clip(1.0, 0.2, None)),
    preset("cispo_weighted", "cispo", weight=TOKEN, reject=(BAND,)),
    preset("cispo_bypass", "cispo", policy="current", weight=TOKEN),
)
AGGREGATIONS = ("pg_loss", "pg_loss_kept", "pg_loss_seq_sum", "pg_loss_seq_mean", "pg_loss_seq_norm")


# ---------------------------------------------------------------- by hand


def tokens(tmp_path, rows, **presets):
    """Compute metrics of each preset on sequences of (log π_rollout, log π_old, log π_θ, A) tokens."""
    path = tmp_path / "hand.parquet"
    with DumpFile(path, dtype="float64") as writer:
        rollout, old, current, advantages = ([[t[i] for t in row] for row in rows] for i in range(4))
        writer.write(
            rollout_log_probs=rollout, old_log_probs=old, current_log_probs=current, advantages=advantages
        )
    found = analyze([path], presets=list(presets.values()))
    return {
        name: {key: number.value for key, number in found.preset(one.name).items()}
        for name, one in presets.items()
    }


FAR = (-3.0, -3.0, -1.0)  # r = e² of drift 2
NEAR = (-1.0, -1.0, -3.0)  # r = e^-2
