"""A GPU that is pretended: its tensors lie in the host's memory, and are as hard to get at as a GPU's.

What the code asks of a GPU is checked where there is none: tensors of the host and of the GPU, or of two
GPUs, do not meet in one operator; numpy does not see a GPU's; products are of floats. Speed, memory and the
order of sums are not those of a GPU: the same tests run on a real one where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

HOST = torch.device("cpu")
ACROSS = {"aten::copy_", "aten::_to_copy"}
"""Operators that carry values from one memory to another."""
SINGLE = {"aten::where", "aten::index_put_", *ACROSS}
"""Operators that take one number from the host's memory beside tensors of a GPU."""
PLACES = {"aten::index", "aten::index_put_"}
"""Operators that take indices from the host's memory."""
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::mv", "aten::dot"}
"""Operators that a GPU has for floats only."""

told: list[Callable[[str], None]] = []
"""Called with the name of every operator that runs on a pretended GPU."""


class There(Tensor):
    """A tensor on a pretended GPU: Python is told it lies there, torch's own code knows better."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    inside: Tensor
    where: torch.device

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
        self.inside, self.where = inside, where
        return self

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(operator, args, kwargs or {})

    def __repr__(self) -> str:
        return f"There({self.inside}, {self.where})"

    def __deepcopy__(self, memo: Any) -> There:
        return There(self.inside.clone(), self.where)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("a tensor is pickled on a GPU")

    @property
    def device(self) -> torch.device:
        return self.where

    @property
    def is_cuda(self) -> bool:
        return True

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("numpy is asked for a tensor on a GPU")

    __array__ = numpy

    def new_tensor(self, *args: Any, **kwargs: Any) -> Tensor:
        found = self.inside.new_tensor(*args, **kwargs)
        return found if "device" in kwargs else There(found, self.where)

    def tolist(self) -> Any:
        return self.inside.tolist()

    def cpu(self) -> Tensor:
        return self.inside.clone()

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        goal = next((x for x in (*args, *kwargs.values()) if isinstance(x, str | torch.device)), self.where)
        rest = [x for x in args if not isinstance(x, str | torch.device)]
        found = self.inside.to(*rest, **{name: x for name, x in kwargs.items() if name != "device"})
        if torch.device(goal).type == "cpu":
            return found.clone()
        return self if found is self.inside and at(goal) == self.where else There(found, at(goal))

    def record_stream(self, stream: Any) -> None:
        pass


def at(device: Any) -> torch.device:
    """With its number."""
    found = torch.device(device)
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def run(operator: Any, args: Any, kwargs: Any) -> Any:
    """An operator some of whose tensors are on a pretended GPU.

    Raises:
        RuntimeError: a GPU would not run it.
    """
    name = operator._schema.name
    for tell in told:
        tell(name)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    where = _one_place(name, tensors)
    goal = at(kwargs["device"]) if kwargs.get("device") is not None else where
    if name == "aten::copy_":
        goal = args[0].device
    known = {id(x.inside): x for x in tensors if isinstance(x, There)}
    kept = {key: HOST if key == "device" and x is not None else x for key, x in kwargs.items()}
    inside = tree_map(lambda x: x.inside if isinstance(x, There) else x, (args, kept))
    found = operator(*inside[0], **inside[1])

    def outside(x: Any) -> Any:
        if not isinstance(x, Tensor) or goal.type == "cpu":
            return x
        return known[id(x)] if id(x) in known else There(x, goal)

    return tree_map(outside, found)


def _one_place(name: str, tensors: list[Tensor]) -> torch.device:
    """Where all of them are, but for those of the host that a GPU takes too."""
    there = [x for x in tensors if isinstance(x, There)]
    if name not in ACROSS and len({x.where for x in there}) > 1:
        raise RuntimeError(f"{name}: tensors of two GPUs")
    host = [x for x in tensors if not isinstance(x, There)]
    fine = name in ACROSS or (name in PLACES and isinstance(tensors[0], There))
    if not fine and any(x.dim() or name not in SINGLE for x in host):
        raise RuntimeError(f"{name}: tensors of the host's memory and of a GPU")
    if name in PRODUCTS and not all(x.is_floating_point() for x in tensors):
        raise RuntimeError(f"{name} is not implemented for whole numbers on a GPU")
    return there[0].where


def _made(make: Callable[..., Tensor]) -> Callable[..., There]:
    """A way to make a tensor, for one on a GPU."""

    def there(*args: Any, device: Any = None, dtype: Any = None, **rest: Any) -> There:
        return There(make(*args, dtype=dtype), at(device))

    return there


def install() -> torch.library.Library:
    """Let tensors be made on a pretended GPU from now on; for where there is no real one only."""
    assert not torch.cuda.is_available()
    torch.cuda._lazy_init = lambda: None
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("empty.memory_format", _made(torch.empty))
    library.impl("empty_strided", _made(torch.empty_strided))
    library.impl("arange.start_step", _made(torch.arange))
    plain = torch.tensor

    def tensor(*args: Any, device: Any = None, **rest: Any) -> Tensor:
        found = plain(*args, **rest)
        return found if device is None or at(device) == HOST else There(found, at(device))

    torch.tensor = tensor
    return library


class Stream:
    """Stands for a stream, and for an event: all is done in order."""

    def __init__(self, device: Any = None) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


@contextmanager
def _on(stream: Stream) -> Iterator[None]:
    yield


@contextmanager
def gpus(many: int = 1, memory: int = 80 << 30) -> Iterator[None]:
    """So many pretended GPUs are told of, and can be copied to; each says it has so many bytes."""
    with (
        patch.multiple(
            torch.cuda,
            is_available=lambda: True,
            device_count=lambda: many,
            Stream=Stream,
            Event=Stream,
            stream=_on,
            current_stream=Stream,
            empty_cache=lambda: None,
            get_device_properties=lambda device: SimpleNamespace(total_memory=memory),
        ),
        patch.object(Tensor, "pin_memory", lambda x: x.clone()),
    ):
        yield
