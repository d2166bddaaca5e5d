"""Corrections inside a trainer's own loop: apply a preset to padded log-probs on any device.

    done = correct("token_is", rollout=rollout, train=old, mask=response_mask)
    loss = (done.weights * policy_loss * done.mask).sum() / done.mask.sum().clamp(min=1)

Weights, mask and metrics are those of `offpol-diag analyze` on the same tokens; a batch counts as one step.
Under `torch.compile` it runs eagerly, between two graphs: not with `fullgraph=True`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from offpol_diag.core import readout
from offpol_diag.core.evaluate import Evaluator
from offpol_diag.core.formulas import batch_cut
from offpol_diag.core.observe import Observe
from offpol_diag.core.plan import plan
from offpol_diag.core.segments import Segments
from offpol_diag.core.study import Readout, Study
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.check import TOLERANCE
from offpol_diag.errors import UsageError
from offpol_diag.presets import SMALLEST_NORM, Preset, catalogue


@dataclass(frozen=True)
class Correction:
    """Effect of a preset on S padded responses of L tokens.

    Attributes:
        weights: the factor of each token's loss, [S, L], in the dtype of `train` (of integers: torch's
            default); 0 where `mask` is. One that the dtype cannot hold is the largest that it can: add up in
            float32. All 1 where no token of the batch counts.
        mask: the tokens that stay in the loss, [S, L] bool: the given mask without what the preset rejects.
    """

    weights: Tensor
    mask: Tensor
    _study: Study = field(repr=False)
    _batch: dict[str, Tensor] = field(repr=False)

    @cached_property
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @np.errstate(all="ignore")
    def metrics(self) -> dict[str, float]:
        """Numbers of the batch and of the preset by the names that `analyze` uses, computed on first use.

        `k3`, `ppl_ratio`, `chi2_token` … of the batch, `ess_tokens`, `tokens_rejected` … of the preset; where
        both have a name it is the preset's. Without intervals; what is undefined is absent: all of them where
        no token of the batch counts.
        """
        if not self._batch["rollout"].numel():
            return {}
        host: dict[str, Any] = {name: x.cpu().numpy() for name, x in self._batch.items()}
        out = Readout(self._study, Observe(self._study)(Batch(**host)).state)
        found = readout.of_dump(out) | readout.of_preset(out, self._study.presets[0])
        return {name: number.value for name, number in found.items() if number.value is not None}


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.no_grad()
def correct(
    preset: str | Preset,
    *,
    rollout: Tensor,
    train: Tensor,
    mask: Tensor | None = None,
    advantages: Tensor | None = None,
) -> Correction:
    """Apply a preset to one batch, with the sums in float64; nothing of it is differentiable.

    Args:
        preset: a name (`offpol-diag presets`) or a `Preset`. Its bounds are on r = π_train/π_rollout.
        rollout: log π_rollout of the sampled tokens, [S, L], nats, on any device.
        train: log π of the trainer's policy that the preset weighs, [S, L]: π_old for a preset on `old`, the
            policy being trained for one on `current`.
        mask: 1 for tokens that count, [S, L]; None for all. Its holes divide a response into turns.
        advantages: of each sequence [S] or each token [S, L], for presets whose rules look at their sign.

    Raises:
        UsageError: an unknown preset, shapes that differ, a mask not of 0 and 1, a log-prob under it that is
            not finite or, of rollout, above 0, or advantages lacking.
    """
    presets = catalogue.load().resolve(preset)
    if len(presets) != 1:
        raise UsageError(f"{preset!r} names {len(presets)} presets", "name one")
    for name, x in {"rollout": rollout, "train": train, "mask": mask, "advantages": advantages}.items():
        shapes = [rollout.shape, rollout.shape[:1]] if name == "advantages" else [rollout.shape]
        if x is not None and (x.shape not in shapes or rollout.ndim != 2):
            raise UsageError(f"{name} has the shape {tuple(x.shape)}", "pad all tensors to one [S, L]")
    mask = torch.ones_like(rollout, dtype=torch.bool) if mask is None else mask
    counted = mask != 0
    if (counted & (mask != 1)).any():
        raise UsageError("mask must be 0 or 1", "give booleans, or 1 for the tokens that count")

    own, offsets = plan(presets[0]), pad(counted.sum(1).cumsum(0), (1, 0))
    begins = (counted & ~pad(counted[:, :-1], (1, 0)))[counted].nonzero().flatten()  # of turns
    log_probs: dict[Any, Tensor] = {"rollout": rollout[counted].double(), own.policy: train[counted].double()}
    if any(not x.isfinite().all() for x in log_probs.values()) or (log_probs["rollout"] > TOLERANCE).any():
        what = "log-probs under the mask are NaN, infinite or, of rollout, positive"
        raise UsageError(what, "mask those tokens")
    batch = {**log_probs, "cu_seqlens": offsets, "key": torch.arange(len(counted))}
    batch |= {"position": counted.nonzero()[:, 1], "masked": (~counted).sum(1)}
    batch["cu_runs"], many = torch.cat((begins, offsets[-1:])), len(batch["rollout"])
    if advantages is not None:
        by_token = advantages if advantages.ndim == 2 else advantages[:, None]
        batch["advantages"] = advantages = by_token.expand(rollout.shape)[counted].double()
    columns = frozenset(f"{name}_log_probs" if name in log_probs else name for name in batch)
    if lacking := presets[0].lacking(columns):
        raise UsageError(f"preset {presets[0].name} needs {', '.join(lacking)}", "pass it, or choose another")

    runs = Segments(offsets, many), Segments(batch["cu_runs"], many)
    tokens = Evaluator(log_probs, *runs, advantages, lambda rule, x: batch_cut(x, rule.reject.upper or 0.0))
    dtype = train.dtype if train.is_floating_point() else torch.get_default_dtype()
    weights, kept = torch.ones_like(counted, dtype=dtype), counted.clone()
    if many:
        kept[counted] = tokens.kept(own.tokens, own.sequences)
        w = _weights(tokens, presets[0], kept[counted]).clamp(max=torch.finfo(dtype).max)
        weights = torch.zeros_like(weights).masked_scatter(counted, w.to(dtype))
    return Correction(weights, kept, Study(presets, columns), batch)


def _weights(tokens: Evaluator, preset: Preset, kept: Tensor) -> Tensor:
    """Compute final weights, normalised over the batch, [T] float64; 0 where a token is not `kept`, [T]."""
    weighting = plan(preset).weight
    if weighting is None or preset.weight is None:
        return kept.double()
    w = tokens.weight(weighting)
    w = w if weighting.on_tokens else tokens.sequences.spread(w)
    if preset.weight.normalize:
        of_sequences = tokens.sequences.mean(w)[tokens.sequences.filled]
        mean = w.mean() if preset.weight.over == "token" else of_sequences.mean()
        w = w / torch.where(mean > SMALLEST_NORM, mean, 1.0)
    return torch.where(kept, w, 0.0)
