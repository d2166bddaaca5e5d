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
from offpol_diag.core.evaluate import rules_of
from offpol_diag.core.formulas import batch_cut
from offpol_diag.core.gap import Tokens
from offpol_diag.core.observe import Observe
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

        `k3`, `mean_ratio` … of the batch, `ess_tokens`, `tokens_rejected` … of the preset; where both have a
        name it is the preset's. Without intervals; what is undefined is absent, or all where no token counts.
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
    counted = torch.ones_like(rollout, dtype=torch.bool) if mask is None else mask != 0
    if mask is not None and (counted & (mask != 1)).any():
        raise UsageError("mask must be 0 or 1", "give booleans, or 1 for the tokens that count")
    own, q, p = presets[0], rollout[counted].double(), train[counted].double()
    if not (q.isfinite().all() and p.isfinite().all()) or (q > TOLERANCE).any():
        what = "log-probs under the mask are NaN, infinite or, of rollout, positive"
        raise UsageError(what, "mask those tokens")
    offsets = pad(counted.sum(1).cumsum(0), (1, 0))
    turns = (counted & ~pad(counted[:, :-1], (1, 0)))[counted].nonzero().flatten()  # where each begins
    batch: dict[str, Any] = {"rollout": q, own.policy: p, "position": counted.nonzero()[:, 1]}
    batch |= {"cu_seqlens": offsets, "cu_runs": torch.cat((turns, offsets[-1:]))}
    batch |= {"key": torch.arange(len(counted)), "masked": (~counted).sum(1)}
    if advantages is not None:
        by_token = advantages if advantages.ndim == 2 else advantages[:, None]
        batch["advantages"] = by_token.expand(rollout.shape)[counted].double()
    columns = {"rollout_log_probs", f"{own.policy}_log_probs", *batch}  # a preset needs no others
    if lacking := own.lacking(columns):
        raise UsageError(f"preset {own.name} needs {', '.join(lacking)}", "pass it, or choose another")

    dtype = train.dtype if train.is_floating_point() else torch.get_default_dtype()
    weights, kept = torch.ones_like(counted, dtype=dtype), counted.clone()
    if len(q):
        tokens = Tokens.of(Batch(**batch), lambda rule, x: batch_cut(x, rule.reject.upper or 0.0))
        kept[counted] = passing = tokens.kept(*rules_of(own))
        w = _weights(tokens, own, passing).clamp(max=torch.finfo(dtype).max)
        weights = torch.zeros_like(weights).masked_scatter(counted, w.to(dtype))
    return Correction(weights, kept, Study(presets, frozenset(columns)), batch)


def _weights(tokens: Tokens, preset: Preset, kept: Tensor) -> Tensor:
    """Compute final weights, normalised over the batch, [T] float64; 0 where a token is not `kept`, [T]."""
    if (weight := preset.weight) is None:
        return kept.double()
    w = tokens.weight(preset.policy, weight)
    w = w if weight.on_tokens else tokens.sequences.spread(w)
    if weight.normalize:
        mean = (w if weight.over == "token" else tokens.sequences.mean(w)[tokens.sequences.filled]).mean()
        w = w / torch.where(mean > SMALLEST_NORM, mean, 1.0)
    return torch.where(kept, w, 0.0)
