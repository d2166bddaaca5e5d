"""Corrections inside a trainer's own loop: apply a preset to padded log-probs on any device.

    done = correct("token_is", rollout=rollout, train=old, mask=response_mask)
    loss = (done.weights * policy_loss * done.mask).sum() / done.mask.sum().clamp(min=1)

Weights, mask and metrics are those of `offpol-diag analyze` on the same tokens; a batch counts as one step.
Under `torch.compile` it runs eagerly, between two graphs: not with `fullgraph=True`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from offpol_diag.core.segments import Segments
from offpol_diag.core.steps import steps
from offpol_diag.core.study import Readout, Study
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.check import TOLERANCE
from offpol_diag.errors import UsageError
from offpol_diag.presets import SMALLEST_NORM, Policy, Preset, catalogue


@dataclass(frozen=True)
class Correction:
    """Effect of a preset on S padded responses of L tokens; unpacks as weights, mask, metrics.

    Attributes:
        weights: the factor of each token's loss, [S, L], in the dtype of `train` (of integers: torch's
            default); 0 where `mask` is. Those that the dtype cannot hold are finite, and not below any other;
            add up in float32. All 1 where no token of the batch counts.
        mask: the tokens that stay in the loss, [S, L] bool: the given mask without what the preset rejects.
    """

    weights: Tensor
    mask: Tensor
    _study: Study = field(repr=False)
    _tokens: Evaluator = field(repr=False)
    _counted: Tensor = field(repr=False)

    @cached_property
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    @np.errstate(all="ignore")
    def metrics(self) -> dict[str, float]:
        """Numbers of the batch and of the preset by the names that `analyze` uses, computed on first use.

        `k3`, `ppl_ratio`, `chi2_token` … of the batch, `ess_tokens`, `tokens_rejected` … of the preset; where
        both have a name it is the preset's. Without intervals; what is undefined is absent: all of them where
        no token of the batch counts.
        """
        tokens, counted = self._tokens, self._counted.cpu()
        if not tokens.sequences.tokens:
            return {}
        lengths = tokens.sequences.lengths.cpu().numpy()
        columns: dict[str, Any] = {policy: x.cpu().numpy() for policy, x in tokens.log_probs.items()}
        if tokens.advantages is not None:
            columns["advantages"] = tokens.advantages.cpu().numpy()
        batch = Batch(
            cu_seqlens=tokens.sequences.offsets.cpu().numpy(),
            cu_runs=tokens.turns.offsets.cpu().numpy(),
            position=counted.nonzero()[:, 1].numpy(),
            key=np.arange(len(lengths)),
            masked=counted.shape[1] - lengths,
            **columns,
        )
        out = Readout(self._study, Observe(self._study)(batch).state)
        found = readout.of_dump(out) | readout.of_preset(out, self._study.presets[0])
        return {name: one.value for name, one in found.items() if one.value is not None}

    def __iter__(self) -> Iterator[Any]:
        """Yield weights, mask and metrics."""
        yield from (self.weights, self.mask, self.metrics)


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

    Returns:
        Weights, mask and metrics, on the device of `rollout`.

    Raises:
        UsageError: an unknown preset, an input that is no dense tensor of real numbers, shapes that differ,
            a mask not of 0 and 1, a log-prob under it that is not finite, or an input lacking.
    """
    named = catalogue.load().resolve(preset if isinstance(preset, str) else [preset])
    if len(named) != 1:
        raise UsageError(f"{preset!r} names {len(named)} presets", "name one")
    optional = {name: x for name, x in (("mask", mask), ("advantages", advantages)) if x is not None}
    for name, x in ({"rollout": rollout, "train": train} | optional).items():
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_complex():
            raise UsageError(f"{name} is no dense tensor of real numbers", "give torch tensors")
        shapes = [rollout.shape, *([rollout.shape[:1]] if name == "advantages" else [])]
        if x.shape not in shapes or x.ndim > 2 or rollout.ndim != 2:
            raise UsageError(f"{name} has the shape {tuple(x.shape)}", "pad all tensors to one [S, L]")
    counted = torch.ones_like(rollout, dtype=torch.bool) if mask is None else mask != 0
    if mask is not None and bool((counted & (mask != 1)).any()):
        raise UsageError("mask must be 0 or 1", "give booleans, or 1 for the tokens that count")
    given: dict[Policy, Tensor] = {"rollout": rollout, named[0].policy: train}
    tokens = _packed(given, counted, advantages)
    fine = [x.isfinite().all() for x in tokens.log_probs.values()]
    if not all((*fine, (tokens.log_probs["rollout"] <= TOLERANCE).all())):
        what = "log-probs under the mask are NaN, infinite or, of rollout, positive"
        raise UsageError(what, "mask those tokens")
    have = {f"{name}_log_probs" for name in given} | (optional.keys() - {"mask"})
    if lacking := named[0].lacking(have):
        raise UsageError(f"preset {named[0].name} needs {', '.join(lacking)}", "pass it, or choose another")
    dtype = train.dtype if train.is_floating_point() else torch.get_default_dtype()
    weights, kept = _weights_and_mask(tokens, counted, named[0], dtype)
    tokens.known.clear()
    return Correction(weights, kept, Study(named, frozenset(have)), tokens, counted)


def _packed(log_probs: Mapping[Policy, Tensor], counted: Tensor, advantages: Tensor | None) -> Evaluator:
    """Pack log-probs [S, L] and advantages [S] or [S, L] of what counts, [S, L]; the rest may be anything."""
    if advantages is not None:
        wide = advantages if advantages.ndim == 2 else advantages[:, None]
        advantages = wide.expand(counted.shape)[counted].double()
    offsets = pad(counted.sum(1).cumsum(0), (1, 0))
    begins = (counted & ~pad(counted[:, :-1], (1, 0)))[counted].nonzero().flatten()
    tokens, turns = int(offsets[-1]), torch.cat((begins, offsets[-1:]))
    logs = {policy: x[counted].double() for policy, x in log_probs.items()}
    segments = Segments(offsets, tokens), Segments(turns, tokens)
    return Evaluator(logs, *segments, advantages, lambda rule, x: batch_cut(x, rule.reject.upper or 0.0))


def _weights_and_mask(
    tokens: Evaluator, counted: Tensor, preset: Preset, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Apply a preset to packed tokens, as to one trainer batch.

    Returns: weights [S, L], and which tokens are kept, [S, L] bool; weights that the dtype cannot hold share
    half of its range, but exceed all others.
    """
    if not tokens.sequences.tokens:
        return torch.ones_like(counted, dtype=dtype), counted
    own = steps(preset)
    kept, w = tokens.kept(own.tokens, own.sequences), torch.ones_like(tokens.log_probs["rollout"])
    if own.weight is not None:
        w = tokens.weight(own.weight)
        w = w if own.weight.on_tokens else tokens.sequences.spread(w)
    if preset.weight is not None and preset.weight.normalize:
        by_sequence = preset.weight.over != "token"
        mean = (tokens.sequences.mean(w)[tokens.sequences.filled] if by_sequence else w).mean()
        w = w / torch.where(mean > SMALLEST_NORM, mean, 1.0)
    w, most = w * kept, torch.finfo(dtype).max
    over = w > most
    room = (most / 2 / over.sum()).clamp(min=w.masked_fill(over, 0.0).max())
    weights, mask = torch.zeros_like(counted, dtype=dtype), counted.clone()
    weights[counted], mask[counted] = torch.where(over, room, w).to(dtype), kept
    return weights, mask
