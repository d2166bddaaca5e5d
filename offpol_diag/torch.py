"""Corrections inside a trainer's own loop: apply a preset to padded log-probs on any device.

    from offpol_diag.torch import correct

    done = correct("token_is", rollout=rollout, train=old, mask=response_mask)
    loss = (done.weights * policy_loss * done.mask).sum() / done.mask.sum().clamp(min=1)

Weights, mask and metrics are those of `offpol-diag analyze` on the same tokens; a batch counts as one step.
Under `torch.compile` it runs eagerly, between two graphs: not with `fullgraph=True`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from offpol_diag.analysis import readout
from offpol_diag.analysis.first_pass import of_batch
from offpol_diag.analysis.readout import Readout
from offpol_diag.analysis.study import Study, observe
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.writer import TOLERANCE
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.evaluator import Evaluator
from offpol_diag.engine.segments import Array
from offpol_diag.errors import UsageError
from offpol_diag.pipeline import namespaces
from offpol_diag.presets import SMALLEST_NORM, Policy, Preset, Reject, Weight, catalogue

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
    _batch: Batch = field(repr=False)
    _empty: bool = field(default=False, repr=False)

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
            fits = of_batch(self._batch, self._study.presets).fits
            out = Readout(self._study, observe(self._study, BatchContext.of(self._batch, 0, 2, fits)))
            own = readout.preset_numbers(out, self._study.presets[0])
            result = {**readout.metrics(out), **own}
        known = {name: one.value for name, one in result.items() if one.value is not None}
        return dict.fromkeys(known, math.nan) if self._empty else known

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
    given = {"rollout": rollout, chosen.policy: train}
    _require_tensors({"rollout": rollout, "train": train}, {"mask": mask, "advantages": advantages})
    counted = torch.ones_like(rollout, dtype=torch.bool) if mask is None else _flags(mask)
    batch = _packed(given, counted, advantages)
    for name in given:
        x = batch.policy(name)
        assert x is not None
        fine = np.isfinite(x) & (x <= TOLERANCE) if name == "rollout" else np.isfinite(x)
        if not fine.all():
            shown = "rollout" if name == "rollout" else "train"
            what = "NaN, infinite or positive" if name == "rollout" else "NaN or infinite"
            raise UsageError(f"{shown} holds log-probs under the mask that are {what}", "mask those tokens")
    have = {f"{name}_log_probs" for name in given} | ({"advantages"} if advantages is not None else set())
    if lacking := chosen.lacking(have):
        hint = "pass it, or choose another preset"
        raise UsageError(f"preset {chosen.name} needs {', '.join(lacking)}", hint)
    study = Study((chosen,), frozenset(have), (), 0, 2)
    dtype = train.dtype if train.is_floating_point() else torch.get_default_dtype()
    if not batch.tokens:
        ones = torch.ones(counted.shape, dtype=dtype, device=rollout.device)
        return Correction(ones, counted, study, _some(given, rollout, advantages), True)
    signs = None if advantages is None else advantages.reshape(len(rollout), -1).expand(rollout.shape)
    evaluator: Any = Evaluator(Padded(given, counted, signs))
    kept = evaluator.kept(chosen)
    weights = torch.ones_like(counted, dtype=torch.float64)
    if chosen.weight is not None:
        weights = _normalised(evaluator.weight(chosen).expand_as(counted), chosen.weight, evaluator.layout)
    return Correction(_held(weights.masked_fill(~kept, 0.0), dtype), kept, study, batch)


class Padded:
    """Tokens of S padded responses, [S, L] float64; a number of a sequence is [S, 1], which broadcasts.

    A layout of `engine.evaluator`, of one trainer batch; what does not count is 0, whatever it held.
    """

    xp = torch

    def __init__(self, log_probs: Mapping[str, Tensor], counted: Tensor, advantages: Tensor | None) -> None:
        """Take log-probs by policy, the tokens that count (holes divide turns), advantages: [S, L] each."""
        self.formulas: Any = namespaces.formulas_on_torch()
        self.counted = counted
        self._log_probs = {name: self._filled(x) for name, x in log_probs.items()}
        self.advantages = None if advantages is None else self._filled(advantages)

    def _filled(self, x: Tensor) -> Tensor:
        return torch.where(self.counted, x, 0.0).to(torch.float64)

    def log_prob(self, policy: Policy) -> Tensor:
        """Return the log-probs of a policy, nats, [S, L]."""
        return self._log_probs[policy]

    def sum(self, x: Tensor) -> Tensor:
        """Sum over each sequence: [S, L] → [S, 1]."""
        return torch.where(self.counted, x, 0.0).sum(1, keepdim=True)

    def max(self, x: Tensor) -> Tensor:
        """Return the largest of each sequence, −inf over no token: [S, L] → [S, 1]."""
        return torch.where(self.counted, x, -math.inf).amax(1, keepdim=True)

    def count(self, tokens: Tensor) -> Tensor:
        """Count the flagged tokens of each sequence: [S, L] → [S, 1] float64."""
        return (tokens & self.counted).sum(1, keepdim=True).to(torch.float64)

    def turn_mean(self, x: Tensor) -> Tensor:
        """Give each token the mean of its turn: [S, L] → [S, L]."""
        begins = self.counted & ~torch.nn.functional.pad(self.counted[:, :-1], (1, 0))
        turn = begins.flatten().cumsum(0)
        zeros = x.new_zeros(int(turn[-1]) + 1)
        total = zeros.index_add(0, turn, torch.where(self.counted, x, 0.0).flatten())
        many = zeros.index_add(0, turn, self.counted.flatten().to(x.dtype))
        return (total / many.clamp(min=1))[turn].view_as(x)

    def spread(self, x: Tensor) -> Tensor:
        """Give each token its sequence's number: [S, 1] as it is."""
        return x

    def cut(self, policy: Policy, rule: Reject, values: Tensor) -> Tensor | float:
        """Return the value from which on tokens are dropped so that the mean of the rest is below `upper`.

        The smallest value is never dropped; inf where none need be.
        """
        assert rule.upper is not None
        rising = values[self.counted].sort().values
        many = torch.arange(1, len(rising) + 1, device=rising.device)
        enough = (rising.cumsum(0) < rule.upper * many).nonzero().flatten()
        if not len(enough):
            return torch.nextafter(rising[0], rising.new_tensor(math.inf))
        last = int(enough[-1])
        return math.inf if last == len(rising) - 1 else rising[last + 1]


def _normalised(weights: Tensor, weight: Weight, layout: Padded) -> Tensor:
    """Divide weights [S, L] by their mean over tokens or sequences, where the preset does so."""
    if not weight.normalize:
        return weights
    if weight.over == "token":
        mean = weights[layout.counted].mean()
    else:
        lengths = layout.count(layout.counted)
        mean = (layout.sum(weights) / lengths)[lengths > 0].mean()
    return weights / torch.where(mean > SMALLEST_NORM, mean, 1.0)


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


def _some(given: Collection[str], like: Tensor, advantages: Tensor | None) -> Batch:
    """Return a batch with the columns of an empty one, to name the numbers that are read off it."""
    rows = -torch.linspace(0.5, 2.0, 1024, device=like.device).reshape(4, 256)
    waves = torch.arange(1024, device=like.device).sin().reshape(4, 256)
    apart = {name: rows + 0.01 * at * waves for at, name in enumerate(given)}
    signs = None if advantages is None else torch.tensor([1.0, -1.0, 1.0, -1.0], device=like.device)
    return _packed(apart, torch.ones_like(rows, dtype=torch.bool), signs)


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


def _packed(given: dict[str, Tensor], counted: Tensor, advantages: Tensor | None) -> Batch:
    """Pack the tokens that count."""
    shape = given["rollout"].shape
    wrong = [name for name, x in given.items() if x.shape != shape or x.ndim != 2]
    if wrong or counted.shape != shape:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in {**given, "mask": counted}.items())
        raise UsageError(f"log-probs and mask must have one shape [S, L], not {shapes}", "pad them alike")
    if advantages is not None and advantages.shape not in (shape, shape[:1]):
        raise UsageError(f"advantages have shape {tuple(advantages.shape)}", "give [S] or [S, L]")
    flags = counted.cpu().numpy()
    lengths = flags.sum(axis=1)
    before = np.pad(flags[:, :-1], ((0, 0), (1, 0)))
    starts = np.flatnonzero((flags & ~before)[flags])
    columns = {name: _double(x)[flags] for name, x in given.items()}
    if advantages is not None:
        each = _double(advantages).reshape(len(lengths), -1)
        columns["advantages"] = np.broadcast_to(each, flags.shape)[flags]
    return Batch(
        cu_seqlens=np.concatenate(([0], lengths.cumsum())),
        cu_runs=np.append(starts, lengths.sum()) if len(starts) else np.zeros(1, np.int64),
        position=np.broadcast_to(np.arange(shape[1]), flags.shape)[flags],
        key=np.arange(shape[0]),
        masked=shape[1] - lengths,
        **columns,
    )


def _double(x: Tensor) -> Array:
    """Copy a tensor into an array of float64 in host memory."""
    return x.detach().to("cpu", torch.float64).numpy()
