"""Corrections inside a trainer's own loop: apply a preset to padded log-probs on any device.

    from offpol_diag.torch import correct

    done = correct("token_is", rollout=rollout, train=old, mask=response_mask)
    loss = (done.weights * policy_loss * done.mask).sum() / done.mask.sum().clamp(min=1)

Weights, mask and metrics are those of `offpol-diag analyze` on the same tokens; a batch counts as one step.
Under `torch.compile` it runs eagerly, between two graphs: not with `fullgraph=True`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offpol_diag.core import readout
from offpol_diag.core.correct import batch_of, packed, weights_and_mask
from offpol_diag.core.evaluate import Evaluator
from offpol_diag.core.observe import Observe
from offpol_diag.core.study import Readout, Study
from offpol_diag.dump.writer import TOLERANCE
from offpol_diag.errors import UsageError
from offpol_diag.presets import Policy, Preset, catalogue

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


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
        if not self._tokens.sequences.tokens:
            return {}
        batch = batch_of(self._tokens, self._counted)
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
        UsageError: an unknown preset, an input that is no tensor of real numbers, shapes or devices that
            differ, a mask not of 0 and 1, a log-prob under it that is not finite, or an input lacking.
    """
    named = catalogue.load().resolve(preset if isinstance(preset, str) else [preset])
    if len(named) != 1:
        raise UsageError(f"{preset!r} names {len(named)} presets", "name one")
    chosen, counted = named[0], _checked(rollout, train, mask, advantages)
    given: dict[Policy, Tensor] = {"rollout": rollout, chosen.policy: train}
    tokens = packed(given, counted, advantages)
    for name, x in zip(("rollout", "train"), tokens.log_probs.values(), strict=True):
        first = name == "rollout"
        if not bool((x.isfinite() & (x <= (TOLERANCE if first else math.inf))).all()):
            what = "NaN, infinite or positive" if first else "NaN or infinite"
            raise UsageError(f"{name} holds log-probs under the mask that are {what}", "mask those tokens")
    have = {f"{name}_log_probs" for name in given} | ({"advantages"} if advantages is not None else set())
    if lacking := chosen.lacking(have):
        raise UsageError(f"preset {chosen.name} needs {', '.join(lacking)}", "pass it, or choose another")
    dtype = train.dtype if train.is_floating_point() else torch.get_default_dtype()
    weights, kept = weights_and_mask(tokens, counted, chosen, dtype)
    tokens.known.clear()
    return Correction(weights, kept, Study((chosen,), frozenset(have)), tokens, counted)


def _checked(rollout: Any, train: Any, mask: Any, advantages: Any) -> Tensor:
    """Refuse what is no dense tensor of numbers, or does not fit; return the mask as flags, [S, L]."""
    for name, x in {"rollout": rollout, "train": train, "mask": mask, "advantages": advantages}.items():
        if x is None and name in ("mask", "advantages"):
            continue
        if not isinstance(x, Tensor):
            wrong = f"is a {type(x).__name__}, no tensor"
        elif x.is_meta:
            wrong = "is on the device meta, where a tensor has no values"
        elif x.layout != torch.strided or x.is_nested or x.is_quantized:
            wrong = "is a sparse, nested or quantized tensor, no dense one"
        elif x.is_complex() or x.dtype in (FLOAT8 if name == "mask" else (torch.bool,)):
            wrong = f"holds {str(x.dtype).removeprefix('torch.')}, no real numbers"
        elif x.device != rollout.device:
            wrong = f"is on {x.device}, and rollout on {rollout.device}"
        else:
            continue
        raise UsageError(f"{name} {wrong}", "give torch tensors of floats, padded to [S, L], on one device")
    mask = torch.ones_like(rollout, dtype=torch.bool) if mask is None else mask
    counted: Tensor = mask != 0
    if bool((odd := mask != counted).any()):
        hint = "give booleans, or 1 for the tokens that count and 0 for all others"
        raise UsageError(f"mask holds {mask[odd].flatten()[0].item()}: it must be 0 or 1", hint)
    shapes = {"rollout": rollout.shape, "train": train.shape, "mask": mask.shape}
    if rollout.ndim != 2 or len(set(shapes.values())) > 1:
        said = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise UsageError(f"log-probs and mask must have one shape [S, L], not {said}", "pad them alike")
    if advantages is not None and advantages.shape not in (rollout.shape, rollout.shape[:1]):
        raise UsageError(f"advantages have shape {tuple(advantages.shape)}", "give [S] or [S, L]")
    return counted
