"""The formulas on torch: the same functions, given another `np`.

`rebound` copies a module's functions with other globals; on torch, `np` becomes a namespace of tensors'
functions.
"""

import math
import types
from functools import cache, lru_cache

import numpy as np

from offpol_diag.pipeline import formulas, plain, segments


def rebound(module, names, wrap=lambda function: function):
    """Return a module's functions with some globals replaced, each passed to `wrap`."""
    space = {**vars(module), **names}
    result = {}
    for name, function in vars(module).items():
        if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
            if name not in names:
                copy = types.FunctionType(function.__code__, space, name, function.__defaults__)
                space[name] = wrap(copy)
            result[name] = space[name]
    made = types.ModuleType(module.__name__)  # numba reads attributes of modules only
    vars(made).update(result)
    return made


# ---------------------------------------------------------------- torch


@cache
def formulas_on_torch():
    """Return the functions of `formulas` for tensors; a number goes to the device of the tensor beside it."""
    return rebound(formulas, {"np": _numpy_of_torch("cpu")})


def on_torch(device="cpu"):
    """Return the functions of `plain` for tensors on a device, in float64.

    Nothing that they ask of a GPU makes the host wait: shapes depend on no value there, and the numbers of a
    plan's tables are copied to it once.
    """
    import torch

    def reduction(how, initial):
        def reduced(x, offsets):
            rows, segments_of = x.reshape(-1, x.shape[-1]), len(offsets) - 1
            begins = torch.arange(len(rows), device=x.device)[:, None] * x.shape[-1]
            ends = (offsets[1:] + begins).flatten()
            every = torch.cat((torch.zeros_like(offsets[:1]), ends))
            sums = torch.segment_reduce(rows.flatten(), how, offsets=every, initial=initial, unsafe=True)
            return sums.reshape(*x.shape[:-1], segments_of)

        return reduced

    def spread(x, offsets, tokens):
        every = torch.arange(tokens, device=x.device)
        return x[..., torch.searchsorted(offsets, every, right=True) - 1]

    np_of_torch = _numpy_of_torch(device)
    of_segments = {
        "segment_sum": reduction("sum", 0.0),
        "segment_max": reduction("max", -math.inf),
        "spread": spread,
    }
    torch_segments = rebound(segments, {"np": np_of_torch, **of_segments})
    torch_formulas = rebound(formulas, {"np": np_of_torch})
    names = {"np": np_of_torch, "segments": torch_segments, "formulas": torch_formulas}
    made = rebound(plain, names)
    sums, indices = made.sums, _indices_on(device)

    def with_indices(plan, block):
        with indices:
            return sums(plan, block)

    made.sums = with_indices
    return made


def _indices_on(device):
    """Return a mode of torch in which arrays of indices are copied to a device once."""
    import torch

    class Indices(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            reads = func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
            if reads and isinstance(args[1], np.ndarray):
                args = (args[0], constant(args[1], device), *args[2:])
            return func(*args, **(kwargs or {}))

    return Indices()


def constant(array, device):
    """Return an array of a plan as a tensor on a device, copied there once."""
    return _constant(array.tobytes(), array.dtype.str, array.shape, str(device))


@lru_cache(1 << 12)
def _constant(data, dtype, shape, device):
    import torch

    return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()).to(device)


def _numpy_of_torch(device):
    """Return what the formulas and the plain code use of numpy, for tensors."""
    import torch

    float64 = {"dtype": torch.float64, "device": device}

    def tensors(*each):
        """Make numbers tensors, on the device of the tensor that they meet."""
        where = next((x.device for x in each if torch.is_tensor(x)), device)
        return [x if torch.is_tensor(x) else constant(np.asarray(x, np.float64), where) for x in each]

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
        searchsorted=lambda x, y, side: torch.searchsorted(x, y, right=side == "right"),
    )


# ---------------------------------------------------------------- numba


def compiled(flags=frozenset({"contract", "nsz"})):
    """Return the functions of `formulas` compiled for one number at a time."""
    import numba

    from offpol_diag.pipeline import scalars

    inlined = numba.njit(fastmath=set(flags), error_model="numpy", forceinline=True)
    return rebound(formulas, {"np": scalars}, inlined)
