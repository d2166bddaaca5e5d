"""A cache of computed values by key, whose large entries can be dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Memo(dict[object, object]):
    """Cached values by key."""

    def __init__(self, found: Mapping[object, object] | None = None) -> None:
        super().__init__(found or {})
        self._small: set[object] = set()

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        found = self.get(key, self)  # looked up once: keys are long, and most are cached
        if found is self:
            found = self[key] = make()
        return found  # type: ignore[return-value]

    def slim(self, size: int) -> None:
        """Drop entries with a tensor of at least `size` numbers or a memo of their own; use remakes them."""
        for key in self.keys() - self._small:
            if hasattr(self[key], "once") or _holds(self[key], size):
                del self[key]
        self._small.update(self)


def _holds(value: object, size: int) -> bool:
    """Return whether a value contains a tensor of at least `size` numbers."""
    if isinstance(value, Tensor):
        return value.numel() >= size
    if isinstance(value, dict):
        return any(_holds(one, size) for one in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(one, size) for one in value)
    if is_dataclass(value) and not hasattr(value, "once"):  # a nested memo is slimmed by its owner
        return any(_holds(getattr(value, field.name), size) for field in fields(value))
    return False
