"""Rules of an emulated GPU for `pretended.py`: refused calls, synchronising calls, order of summation.

Read off torch: which operators have a kernel for CUDA stands in the list that it ships, the rest in its
sources (`SegmentReduce.cu`, `TensorAdvancedIndexing.cpp`, `Copy.cu`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torchgen
from torch import Tensor

FLOATS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::mv", "aten::dot"}
FLOATS |= {"aten::segment_reduce"}
"""Operators that a GPU has for floats only."""
NARROW = {torch.uint16, torch.uint32, torch.uint64}
"""Kinds of number with which a GPU does hardly anything."""
WAITING = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::masked_select",
    "aten::bincount",
    "aten::histc",
    "aten::equal",
    "aten::is_nonzero",
}
"""Operators that ask a GPU for a value, or for a shape that depends on values."""

ROUGH = {f"aten::{name}" for name in ("exp", "expm1", "log", "log1p", "log2", "sinh")}
"""Functions that a GPU rounds in its own way."""

Args = tuple[Any, ...]
There = Callable[[Any], bool]
"""Predicate: a tensor on a GPU."""


@cache
def lacking() -> frozenset[str]:
    """List operators, with their overloads, for which the installed torch has no CUDA kernel."""
    path = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    blocks = re.split(r"\n(?=- func: )", path.read_text(encoding="utf-8"))[1:]
    return frozenset(f"aten::{re.split('[( ]', block[8:])[0]}" for block in blocks if not _has_cuda(block))


def _has_cuda(block: str) -> bool:
    found = re.search(r"\n  dispatch:\n((?:    .*\n?)+)", block)
    keys = re.findall(r"\w+(?=[\w, ]*:)", found[1]) if found else []
    return "structured_delegate" in block or not keys or any(re.match("CUDA|Composite", key) for key in keys)


def refuse(operator: Any, name: str, tensors: list[Tensor], args: Args, kwargs: dict[str, Any]) -> None:
    """Refuse calls that a GPU refuses; at least one of the tensors is on it.

    Raises:
        RuntimeError: a GPU would not run it, or would stop for good.
    """
    full = operator._schema.name + (f".{overload}" if (overload := operator._schema.overload_name) else "")
    if full in lacking():
        raise RuntimeError(f"{full}: there is none for a GPU")
    if name in FLOATS and not _of_numbers(name, tensors):
        raise RuntimeError(f"{name} is not implemented for whole numbers on a GPU")
    if any(x.dtype in NARROW for x in tensors):
        raise RuntimeError(f"{name}: numbers of a kind that a GPU hardly knows")
    if name == "aten::segment_reduce" and args[0].dim() > 1:
        raise RuntimeError(
            f"{name}: of a table one thread adds each run, which takes a hundred times as long"
        )
    if name == "aten::repeat_interleave" and kwargs.get("output_size", int(args[0].sum())) != int(
        args[0].sum()
    ):
        raise RuntimeError(f"{name}: another size than was said stops a GPU for good")


def _of_numbers(name: str, tensors: list[Tensor]) -> bool:
    first = tensors[:1] if name == "aten::segment_reduce" else tensors  # offsets are whole
    return all(x.is_floating_point() for x in first)


def waits(name: str, args: Args, kwargs: dict[str, Any], there: There) -> str | None:
    """Return the reason why an operator call makes the host wait for a GPU, if it does."""
    if name in WAITING:
        return name
    if name == "aten::copy_" and there(args[0]) != there(args[1]):
        later = (len(args) > 2 and args[2]) or kwargs.get("non_blocking")
        return None if later and _pinned(args[0], args[1], there) else "a copy"
    if name in ("aten::index", "aten::index_put", "aten::index_put_"):
        return _of_places(name, args, there)
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None:
        return name
    return None


def _pinned(target: Tensor, source: Tensor, there: There) -> bool:
    host = source if there(target) else target
    return getattr(host, "pinned", False)


def _of_places(name: str, args: Args, there: There) -> str | None:
    places = [x for x in args[1] if x is not None]
    if name != "aten::index" and len(places) == 1 and places[0].dtype == torch.bool and not there(args[2]):
        return None  # filled where the flags are
    if any(x.dtype in (torch.bool, torch.uint8) for x in places):
        return f"{name} by flags"
    if not all(map(there, places)):
        return f"{name} by places of the host"
    return f"{name} of the host's number" if name != "aten::index" and not there(args[2]) else None


def rough(name: str, found: Any) -> Any:
    """Perturb the last bit of a host function's result, as a GPU's function may differ.

    It is the same for the same number, and 0, 1 and what is no number stay.
    """
    if name not in ROUGH or found.dtype != torch.float64:
        return found
    bits = found.contiguous().view(torch.int64)
    moved = (bits + (bits * 0x1E3779B97F4A7C15 >> 62).clamp(min=-1)).view(torch.float64)
    return torch.where(found.isfinite() & (found != 0) & (found != 1), moved, found)


def shuffled(name: str, args: Args, kwargs: dict[str, Any]) -> tuple[Args, dict[str, Any], bool]:
    """Reorder the terms of a sum of host tensors; also return whether to reverse the result.

    A GPU adds in an order of its own, and with atomic additions in another one each time.
    """
    if name in ("aten::index_add_", "aten::index_add") and args[3].is_floating_point():
        self, dim, index, source, *rest = args
        order = torch.randperm(len(index))
        return (self, dim, index[order], source.index_select(dim, order), *rest), kwargs, False
    if name == "aten::scatter_add_" and args[3].dim() == 1 and args[3].is_floating_point():
        order = torch.randperm(len(args[2]))
        return (*args[:2], args[2][order], args[3][: len(order)][order]), kwargs, False
    if name == "aten::mm":
        order = torch.randperm(len(args[1]))
        return (args[0][:, order], args[1][order]), kwargs, False
    if name == "aten::sum" and args[0].is_floating_point():
        over = args[1] if len(args) > 1 and args[1] is not None else range(args[0].dim())
        return (args[0].flip(tuple(over)), *args[1:]), kwargs, False
    if name == "aten::segment_reduce":
        offsets = (len(args[0]) - kwargs["offsets"]).flip(0)
        return (args[0].flip(0), *args[1:]), {**kwargs, "offsets": offsets}, True
    return args, kwargs, False
