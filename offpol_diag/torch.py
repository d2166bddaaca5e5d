"""Corrections inside a trainer's own loop: apply a preset to padded log-probs on any device.

    from offpol_diag.torch import correct

    done = correct("token_is", rollout=rollout, train=old, mask=response_mask)
    loss = (done.weights * policy_loss * done.mask).sum() / done.mask.sum().clamp(min=1)

Weights, mask and metrics are those of `offpol-diag analyze` on the same tokens; a batch counts as one step.
Under `torch.compile` it runs eagerly, between two graphs: not with `fullgraph=True`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from offpol_diag.core import readout
from offpol_diag.core.correct import Packed
from offpol_diag.core.observe import observe
from offpol_diag.core.readout import Readout
from offpol_diag.core.study import Study
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.writer import TOLERANCE
from offpol_diag.errors import UsageError
from offpol_diag.presets import Policy, Preset, catalogue

Function = TypeVar("Function", bound=Callable[..., Any])


def _eagerly(function: Function) -> Function:
    """Have `torch.compile` call a function as it is, between two graphs."""
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Correction:
    """Effect of a preset on S padded responses of L tokens; unpacks as weights, mask, metrics.

    Attributes:
        weights: the factor of each token's loss, [S, L], in the dtype of `train` (of integers: torch's
            default); 0 where `mask` is. Those that the dtype cannot hold are bounded to a finite number, and
            are not below any other; add up in float32. All 1 where no token of the batch counts.
        mask: the tokens that stay in the loss, [S, L] bool: the given mask without what the preset rejects.
    """

    weights: Tensor
    mask: Tensor
    _study: Study = field(repr=False)
    _packed: Packed = field(repr=False)

    @cached_property
    @_eagerly
    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """Numbers of the batch and of the preset by the names that `analyze` uses, computed on first use.

        `k3`, `ppl_ratio`, `chi2_token` … of the batch, `ess_tokens`, `tokens_rejected` … of the preset; where
        both have a name it is the preset's. Without intervals; what is undefined is absent. All are NaN where
        no token of the batch counts.
        """
        with np.errstate(all="ignore"):
            empty = not self._packed.sequences.tokens
            batch = _batch(_some(self._packed) if empty else self._packed)
            out = Readout(self._study, observe(self._study, batch))
            own = readout.preset_numbers(out, self._study.presets[0])
            result = {**readout.metrics(out), **own}
        known = {name: one.value for name, one in result.items() if one.value is not None}
        return dict.fromkeys(known, math.nan) if empty else known

    def __iter__(self) -> Iterator[Any]:
        """Yield weights, mask and metrics."""
        yield from (self.weights, self.mask, self.metrics)


@_eagerly
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
            differ, a mask of other values than 0 and 1, a log-prob under the mask that is not finite, or an
            input that the preset needs and did not get.
    """
    named = catalogue.chosen(preset if isinstance(preset, str) else [preset])
    if len(named) != 1:
        raise UsageError(f"{preset!r} names {len(named)} presets", "name one")
    chosen = named[0]
    given: dict[Policy, Tensor] = {"rollout": rollout, chosen.policy: train}
    _require_tensors({"rollout": rollout, "train": train}, {"mask": mask, "advantages": advantages})
    counted = torch.ones_like(rollout, dtype=torch.bool) if mask is None else _flags(mask)
    _require_shapes(given, counted, advantages)
    packed = Packed.of(given, counted, advantages)
    for name, x in packed.log_probs.items():
        if not bool((x.isfinite() & (x <= (TOLERANCE if name == "rollout" else math.inf))).all()):
            shown = "rollout" if name == "rollout" else "train"
            what = "NaN, infinite or positive" if name == "rollout" else "NaN or infinite"
            raise UsageError(f"{shown} holds log-probs under the mask that are {what}", "mask those tokens")
    have = {f"{name}_log_probs" for name in given} | ({"advantages"} if advantages is not None else set())
    if lacking := chosen.lacking(have):
        hint = "pass it, or choose another preset"
        raise UsageError(f"preset {chosen.name} needs {', '.join(lacking)}", hint)
    study = Study((chosen,), frozenset(have), replicates=2)
    dtype = train.dtype if train.is_floating_point() else torch.get_default_dtype()
    if not packed.sequences.tokens:
        ones = torch.ones(counted.shape, dtype=dtype, device=rollout.device)
        return Correction(ones, counted, study, packed)
    weights, kept = packed.correct(chosen)
    return Correction(_held(weights, dtype), kept, study, packed)


def _require_tensors(log_probs: dict[str, Any], others: dict[str, Any]) -> None:
    """Check that inputs are tensors of real numbers on one device; others than log-probs may be None.

    Raises:
        UsageError: one is not.
    """
    hint = "give torch tensors of floats, padded to [S, L], on one device"
    every = log_probs | others
    for name, x in every.items():
        if x is None and name not in ("rollout", "train"):
            continue
        if not isinstance(x, Tensor):
            raise UsageError(f"{name} is a {type(x).__name__}, no tensor", hint)
        if x.is_meta:
            raise UsageError(f"{name} is on the device meta, where a tensor has no values", hint)
        if x.layout != torch.strided or x.is_nested or x.is_quantized:
            raise UsageError(f"{name} is a sparse, nested or quantized tensor, no dense one", hint)
        narrow = name == "mask" and x.is_floating_point() and x.element_size() == 1
        if x.is_complex() or narrow or (x.dtype == torch.bool and name != "mask"):
            raise UsageError(f"{name} holds {str(x.dtype).removeprefix('torch.')}, no real numbers", hint)
        if x.device != log_probs["rollout"].device:
            places = f"rollout is on {log_probs['rollout'].device}, {name} on {x.device}"
            raise UsageError(f"the tensors are on several devices: {places}", hint)


def _some(empty: Packed) -> Packed:
    """Return tokens with the columns of an empty batch, to name the numbers that are read off it."""
    rows = -torch.linspace(0.5, 2.0, 1024).reshape(4, 256)
    waves = torch.arange(1024).sin().reshape(4, 256)
    apart: dict[Policy, Tensor] = {name: rows + 0.01 * at * waves for at, name in enumerate(empty.log_probs)}
    signs = None if empty.advantages is None else torch.tensor([1.0, -1.0, 1.0, -1.0])
    return Packed.of(apart, torch.ones_like(rows, dtype=torch.bool), signs)


def _flags(mask: Tensor) -> Tensor:
    """Return a mask of 0 and 1, in any dtype, as bool."""
    counted = mask != 0
    if not bool((mask == counted).all()):
        odd = mask[mask != counted].flatten()[0].item()
        hint = "give booleans, or 1 for the tokens that count and 0 for all others"
        raise UsageError(f"mask holds {odd}: it must be 0 or 1", hint)
    return counted


def _held(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert weights; those that overflow share half of the range, but exceed all others."""
    most = torch.finfo(dtype).max
    over = weights > most
    if bool(over.any()):
        room = (most / 2 / over.sum()).clamp(min=weights.masked_fill(over, 0.0).max())
        weights = torch.where(over, room, weights)
    return weights.to(dtype)


def _require_shapes(log_probs: Mapping[Policy, Tensor], counted: Tensor, advantages: Tensor | None) -> None:
    """Check that log-probs and mask are alike, and that advantages fit.

    Raises:
        UsageError: they do not.
    """
    shape = log_probs["rollout"].shape
    wrong = [name for name, x in log_probs.items() if x.shape != shape or x.ndim != 2]
    if wrong or counted.shape != shape:
        named = *log_probs.items(), ("mask", counted)
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named)
        raise UsageError(f"log-probs and mask must have one shape [S, L], not {shapes}", "pad them alike")
    if advantages is not None and advantages.shape not in (shape, shape[:1]):
        raise UsageError(f"advantages have shape {tuple(advantages.shape)}", "give [S] or [S, L]")


def _batch(packed: Packed) -> Batch:
    """Copy packed tokens to the host, as a batch of a dump."""
    sequences, width = packed.counted.shape
    columns: dict[str, Any] = {policy: x.cpu().numpy() for policy, x in packed.log_probs.items()}
    if packed.advantages is not None:
        columns["advantages"] = packed.advantages.cpu().numpy()
    lengths = packed.sequences.lengths.cpu().numpy()
    return Batch(
        cu_seqlens=packed.sequences.offsets.cpu().numpy(),
        cu_runs=packed.turns.offsets.cpu().numpy(),
        position=packed.counted.nonzero()[:, 1].cpu().numpy(),
        key=np.arange(sequences),
        masked=width - lengths,
        **columns,
    )
