"""The formulas on torch: the same functions, given another `np`.

`rebound` copies a module's functions with other globals; on torch, `np` becomes a namespace of tensors'
functions.
"""

import types

import numpy as np

from offpol_diag.pipeline import formulas, plain, segments


def rebound(module, names, wrap=lambda function: function):
    """Return a module's functions with some globals replaced, each passed to `wrap`."""
    space = {**vars(module), **names}
    found = {}
    for name, function in vars(module).items():
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            if name not in names:
                copy = types.FunctionType(function.__code__, space, name, function.__defaults__)
                space[name] = wrap(copy)
            found[name] = space[name]
    made = types.ModuleType(module.__name__)  # numba reads attributes of modules only
    vars(made).update(found)
    return made


# ---------------------------------------------------------------- torch


def formulas_on_torch():
    """Return the functions of `formulas` for tensors; a number goes to the device of the tensor beside it."""
    return rebound(formulas, {"np": _numpy_of_torch("cpu")})


def on_torch(device="cpu"):
    """Return the functions of `plain` for tensors on a device, in float64."""
    import torch

    float64 = {"dtype": torch.float64, "device": device}

    def segment_sum(x, offsets):
        rows = x.reshape(-1, x.shape[-1])
        each = [torch.segment_reduce(row, "sum", offsets=offsets, initial=0.0) for row in rows]
        shape = (*x.shape[:-1], len(offsets) - 1)
        return torch.stack(each).reshape(shape) if each else torch.zeros(shape, **float64)

    def spread(x, offsets):
        return torch.repeat_interleave(x, segments.lengths(offsets), dim=-1)

    np_of_torch = _numpy_of_torch(device)
    torch_segments = rebound(segments, {"np": np_of_torch, "segment_sum": segment_sum, "spread": spread})
    torch_formulas = rebound(formulas, {"np": np_of_torch})
    names = {"np": np_of_torch, "segments": torch_segments, "formulas": torch_formulas}
    return rebound(plain, names)


def _numpy_of_torch(device):
    """Return what the formulas and the plain code use of numpy, for tensors."""
    import torch

    float64 = {"dtype": torch.float64, "device": device}

    def tensors(*each):
        """Make numbers tensors, on the device of the tensor that they meet."""
        where = next((x.device for x in each if torch.is_tensor(x)), device)
        return [
            x if torch.is_tensor(x) else torch.as_tensor(x, dtype=torch.float64, device=where) for x in each
        ]

    return types.SimpleNamespace(
        exp=torch.exp,
        expm1=torch.expm1,
        log=torch.log,
        abs=torch.abs,
        minimum=lambda x, y: torch.minimum(*tensors(x, y)),
        maximum=lambda x, y: torch.maximum(*tensors(x, y)),
        where=lambda condition, x, y: torch.where(condition, *tensors(x, y, condition)[:2]),
        asarray=lambda x: tensors(x)[0],
        zeros=lambda shape: torch.zeros(shape, **float64),
        zeros_like=torch.zeros_like,
        ones_like=torch.ones_like,
        stack=torch.stack,
        concatenate=torch.cat,
        flatnonzero=np.flatnonzero,
    )


def block_on_torch(block, device="cpu"):
    """Copy a block's arrays to a device."""
    import torch

    def sent(x):
        return torch.as_tensor(x, device=device)

    columns = type(block.columns)(*map(sent, block.columns))
    return type(block)(columns, *map(sent, block[1:]))
