"""An emulated GPU: its tensors are in host memory, with the access restrictions of a real GPU.

What the code asks of a GPU is checked where there is none: tensors of the host and of the GPU, or of two
GPUs, do not meet in one operator; numpy does not see a GPU's; what a GPU lacks is refused (`gpu_rules.py`).
Sums are added in another order than the host's, and memory that nothing wrote holds no numbers. Speed is not
that of a GPU: the same tests run on a real one where there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from offpol_diag.run import devices
from tests import gpu_rules

HOST = torch.device("cpu")
ACROSS = {"aten::copy_", "aten::_to_copy"}
"""Operators that carry values from one memory to another."""
SINGLE = {"aten::where", "aten::index_put_", *ACROSS}
"""Operators that take one number from the host's memory beside tensors of a GPU."""
PLACES = {"aten::index", "aten::index_put_"}
"""Operators that take indices from the host's memory."""

observers: list[Callable[[str], None]] = []
"""Called with the name of every operator that runs on a pretended GPU."""
waited: list[Callable[[str], None]] = []
"""Called with what makes the host wait for a pretended GPU, each time."""


def wait(why: str) -> None:
    """Tell of one."""
    for tell in waited:
        tell(why)


class There(Tensor):
    """A tensor on an emulated GPU: on the host for torch's own code, on the GPU for Python."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inside: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, inside: Tensor, where: torch.device) -> There:
        self = Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            layout=inside.layout,
            device=HOST,
        )
        self.inside, self.place = inside, where
        return self

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(operator, args, kwargs or {})

    def __repr__(self) -> str:
        return f"There({self.inside}, {self.place})"

    def __deepcopy__(self, memo: Any) -> There:
        return There(self.inside.clone(), self.place)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor is pickled on a GPU")

    @property
    def device(self) -> torch.device:
        return self.place

    @property
    def is_cuda(self) -> bool:
        return True

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("numpy is asked for a tensor on a GPU")

    __array__ = numpy

    def new_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        found = self.inside.new_tensor(*args, **kwargs)
        if "device" in kwargs:
            return found
        wait("new_tensor")
        return There(found, self.place)

    def tolist(self) -> Any:
        wait("tolist")
        return self.inside.tolist()

    def cpu(self) -> Tensor:
        wait("cpu")
        return self.inside.clone()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        goal = next((x for x in (*args, *kwargs.values()) if isinstance(x, str | torch.device)), self.place)
        rest = [x for x in args if not isinstance(x, str | torch.device)]
        found = self.inside.to(*rest, **{name: x for name, x in kwargs.items() if name != "device"})
        if torch.device(goal).type == "cpu":
            wait("to the host")
            return found.clone()
        return self if found is self.inside and at(goal) == self.place else There(found, at(goal))


def at(device: Any) -> torch.device:
    """Return the device with its number."""
    found = torch.device(device)
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


@contextmanager
def counted(calls: list[Callable[[str], None]] = waited) -> Iterator[Counter[str]]:
    """Count waits for an emulated GPU within the block, by reason; or the calls of other observers."""
    seen: Counter[str] = Counter()

    def tell(name: str) -> None:
        seen[name.removeprefix("aten::")] += 1

    calls.append(tell)
    try:
        yield seen
    finally:
        calls.remove(tell)


def run(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run an operator some of whose tensors are on an emulated GPU.

    Raises:
        RuntimeError: a GPU would not run it.
    """
    name = operator._schema.name
    for observe in observers:
        observe(name)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    where = _one_place(name, tensors)
    gpu_rules.refuse(operator, name, tensors, args, kwargs)
    if why := gpu_rules.waits(name, args, kwargs, _is_there):
        wait(why)
    goal = at(kwargs["device"]) if kwargs.get("device") is not None else where
    if name == "aten::copy_":
        goal = args[0].device
    known = {id(x.inside): x for x in tensors if isinstance(x, There)}
    kept = {key: HOST if key == "device" and x is not None else x for key, x in kwargs.items()}
    inside = tree_map(lambda x: x.inside if isinstance(x, There) else x, (args, kept))
    *inside, turned = gpu_rules.shuffled(name, *inside)
    found = operator(*inside[0], **inside[1])
    found = gpu_rules.rough(name, found.flip(0) if turned else found)

    def outside(x: Any) -> Any:
        if not isinstance(x, Tensor) or goal.type == "cpu":
            return x
        return known[id(x)] if id(x) in known else There(x, goal)

    return tree_map(outside, found)


def _one_place(name: str, tensors: list[Tensor]) -> torch.device:
    """Return the common device of all tensors, except host tensors that a GPU accepts too."""
    there = [x for x in tensors if isinstance(x, There)]
    if name not in ACROSS and len({x.place for x in there}) > 1:
        raise RuntimeError(f"{name}: tensors of two GPUs")
    host = [x for x in tensors if not isinstance(x, There)]
    fine = name in ACROSS or (name in PLACES and isinstance(tensors[0], There))
    if not fine and any(x.dim() or name not in SINGLE for x in host):
        raise RuntimeError(f"{name}: tensors of the host's memory and of a GPU")
    return there[0].place


def _is_there(x: Any) -> bool:
    return isinstance(x, There)


def _made(make: Callable[..., Tensor], *, filled: bool) -> Callable[..., There]:
    """Return a factory function for tensors on a GPU; uninitialised memory holds no numbers."""

    def there(*args: Any, device: Any = None, dtype: Any = None, **rest: Any) -> There:
        made = make(*args, dtype=dtype)
        return There(made if filled else _spoilt(made), at(device))

    return there


def _spoilt(x: Tensor) -> Tensor:
    """Fill memory that nothing was written to with junk."""
    if x.is_floating_point():
        return x.fill_(torch.nan)
    return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).min)


@contextmanager
def installed() -> Iterator[None]:
    """Let tensors be made on an emulated GPU within the block; for where there is no real one only."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("empty.memory_format", _made(torch.empty, filled=False))
    library.impl("empty_strided", _made(torch.empty_strided, filled=False))
    library.impl("arange.start_step", _made(torch.arange, filled=True))
    plain = torch.tensor

    def tensor(*args: Any, device: Any = None, **rest: Any) -> Tensor:
        found = plain(*args, **rest)
        if device is None or at(device) == HOST:
            return found
        wait("torch.tensor")
        return There(found, at(device))

    try:
        with (
            patch.object(torch.cuda, "_lazy_init", lambda: None),
            patch.object(torch, "tensor", tensor),
            patch.object(Tensor, "pin_memory", pinned),
        ):
            yield
    finally:
        library._destroy()


def pinned(x: Tensor) -> Tensor:
    """Copy to host memory from which a GPU copies by itself."""
    found = x.clone()
    found.pinned = True  # type: ignore[attr-defined]
    return found


@contextmanager
def gpus() -> Iterator[None]:
    """Let there be an emulated GPU, to which tensors can be copied."""
    found = {"is_available": lambda: True, "device_count": lambda: 1}
    with installed(), patch.multiple(torch.cuda, **found), patch.object(devices, "present", lambda: True):
        yield
