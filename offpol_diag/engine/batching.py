"""Dynamic batching: formulas written for one preset, computed for all presets at once.

An operation on a `Deferred` is only recorded. When values are needed, operations that differ in operands
alone are computed as one, on rows [K, S]; an operation that was recorded twice is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from offpol_diag.engine import segments
from offpol_diag.engine.segments import Memo, Reduce

OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow"),
    *("and", "or", "gt", "ge", "lt", "le", "neg", "invert"),
)
COLUMNS = {"add", "sub", "mul", "div", "clamp", "where", "reduced_rows"} | {
    f"__{name}__" for name in OPERATORS if name != "pow"
}
"""Operations in which a number may be a column [K, 1], one for each row."""


ABSENT: dict[Reduce, float] = {
    segments.total: 0.0,
    segments.smallest: torch.inf,
    segments.largest: -torch.inf,
}
"""Reduction → the value that it ignores."""
Term = Callable[..., Tensor]


def first(x: Tensor) -> Tensor:
    """Return the operand itself."""
    return x


class Deferred:
    """A tensor [S] that is computed when it is needed, in elementwise operations the same as any tensor.

    Attributes:
        graph: the operations that were recorded for the batch.
        function: computes rows [K, S] from rows of the operands.
        kind: what must be equal for operations to be computed together, beside the shapes of operands.
        operands: tensors, deferred ones, and numbers.
        names: names of the last operands, which are passed by keyword.
        depth: number of operations to the operand furthest away.
        value: the result, once it is computed.
    """

    __slots__ = ("depth", "function", "graph", "kind", "names", "operands", "value")

    depth: int

    def __init__(
        self,
        graph: Graph,
        function: Callable[..., Tensor],
        kind: object,
        operands: tuple[Any, ...],
        names: Any,
    ) -> None:
        self.graph, self.function, self.kind, self.operands, self.names = (
            graph,
            function,
            kind,
            operands,
            names,
        )
        self.depth = 1 + max((x.depth for x in operands if isinstance(x, Deferred)), default=0)
        self.value: Tensor | None = None

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, operands: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Tensor:
        """Record an operation of torch."""
        graph = next(x.graph for x in operands if isinstance(x, Deferred))
        return graph.record(function, function, operands, named)

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        """Return a method of tensors that records itself."""
        function = getattr(Tensor, name)
        return lambda *operands, **named: self.graph.record(function, function, (self, *operands), named)

    def tolist(self) -> object:
        """Return the values."""
        return computed(cast(Tensor, self)).tolist()


def _operator(name: str) -> Callable[..., Tensor]:
    function = getattr(Tensor, name)
    return lambda self, *operands: self.graph.record(function, function, (self, *operands), None)


for _name in OPERATORS:
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))


class Graph:
    """The operations recorded for one batch; equal ones are the same `Deferred`."""

    def __init__(self) -> None:
        self._known = Memo()
        self._levels: dict[int, list[Deferred]] = {}
        self._held: dict[int, int] = {}

    def leaf(self, x: Tensor) -> Tensor:
        """Return a tensor whose operations are recorded."""

        def made() -> Deferred:
            found = Deferred(self, torch.clone, None, (x,), ())
            found.value = x
            return found

        return x if isinstance(x, Deferred) else cast(Tensor, self._known.once(id(x), made))

    def record(
        self,
        function: Callable[..., Tensor],
        kind: object,
        operands: tuple[Any, ...],
        named: dict[str, Any] | None = None,
    ) -> Tensor:
        """Record an operation."""
        names = tuple(named or ())
        operands = (*operands, *named.values()) if named else operands
        key = kind, names, tuple([id(x) if isinstance(x, Deferred | Tensor) else ("=", x) for x in operands])

        def made() -> Deferred:
            found = Deferred(self, function, kind, operands, names)
            self._levels.setdefault(found.depth, []).append(found)
            return found

        return cast(Tensor, self._known.once(key, made))

    def reduced(
        self,
        reduce: Reduce,
        operands: tuple[Any, ...],
        kept: Tensor | None,
        offsets: Tensor,
        term: Term = first,
    ) -> Tensor:
        """Record a reduction of a term of the kept tokens of each sequence, [T] → [S]."""
        for x in (*operands, kept):
            if isinstance(x, Tensor):
                self._held[id(x)] = x.nbytes

        def reduced_rows(*operands: Any) -> Tensor:
            return reduced(reduce, term(*operands[:-1]), operands[-1], offsets)

        return self.record(reduced_rows, (reduce, term, id(offsets)), (*operands, kept))

    def compute(self, beyond: int = 0) -> None:
        """Compute what was recorded, if that keeps more than so many bytes of tokens alive."""
        if sum(self._held.values()) < beyond:
            return
        for depth in sorted(self._levels):
            kinds: dict[object, list[Deferred]] = {}
            for one in self._levels[depth]:
                kinds.setdefault(_kind(one), []).append(one)
            for alike in kinds.values():
                _compute(alike)
        self._known.clear()
        self._levels.clear()
        self._held.clear()


def computed(x: Tensor) -> Tensor:
    """Compute a deferred tensor; any other is returned as it is."""
    if not isinstance(x, Deferred):
        return x
    if x.value is None:
        x.graph.compute()
    return cast(Tensor, x.value)


def reduced(reduce: Reduce, x: Tensor, kept: Tensor | None, offsets: Tensor) -> Tensor:
    """Reduce the kept tokens of each sequence, [..., T] → [..., S]; of flags, count how many are set."""
    if x.dtype == torch.bool:
        x = segments.numbers(x if kept is None else x & kept)
    elif kept is not None:
        x = torch.where(kept, x, ABSENT[reduce])
    return reduce(x, offsets) if x.ndim == 1 else segments.of_rows(reduce, x, offsets)


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Deferred) else x


def _kind(one: Deferred) -> object:
    """Return what is equal for operations that are computed together."""
    columns = getattr(one.function, "__name__", "") in COLUMNS
    return one.kind, one.names, tuple([_shape(_value(x), columns) for x in one.operands])


def _shape(x: Any, columns: bool) -> object:
    if isinstance(x, Tensor):
        return x.shape, x.dtype
    return float if columns and isinstance(x, int | float) else (x,)


def _compute(alike: Sequence[Deferred]) -> None:
    """Compute operations of one kind, as many at once as `segments.in_parts` allows."""
    like = next(x for x in map(_value, alike[0].operands) if isinstance(x, Tensor))
    for some in segments.in_parts(alike, like):
        one = some[0]
        operands = _rows(
            list(zip(*[list(map(_value, each.operands)) for each in some], strict=True)), like.device
        )
        split = len(operands) - len(one.names)
        found = one.function(*operands[:split], **dict(zip(one.names, operands[split:], strict=True)))
        for each, row in zip(some, found.unbind() if len(some) > 1 else (found,), strict=True):
            each.value = row
    for each in alike:
        each.operands = ()


def _rows(operands: Sequence[tuple[Any, ...]], device: torch.device) -> list[Any]:
    """Return the operands of K operations as rows [K, S], or as they are if all have the same.

    Numbers become columns [K, 1], all of them if one differs: torch bounds by two numbers or by two tensors.
    """
    apart = any(len(set(x)) > 1 for x in operands if isinstance(x[0], int | float))
    found: list[Any] = []
    for each in operands:
        if isinstance(each[0], Tensor) and any(x is not each[0] for x in each):
            found.append(torch.stack(each))
        elif apart and isinstance(each[0], int | float):
            found.append(segments.column(each, device))
        else:
            found.append(each[0])
    return found
