"""What was computed once, by key: shared by all that ask, and let go of where it is large."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import TypeVar

from torch import Tensor

T = TypeVar("T")


class Memo(dict[object, object]):
    """Values by key."""

    def __init__(self, found: Mapping[object, object] | None = None) -> None:
        super().__init__(found or {})
        self._small: set[object] = set()

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, computed once per key."""
        found = self.get(key, self)  # looked up once: keys are long, and most of them are there
        if found is self:
            found = self[key] = make()
        return found  # type: ignore[return-value]

    def slim(self, size: int) -> None:
        """Drop what holds a tensor of at least `size` numbers, or a memo; it is made again when asked."""
        for key in self.keys() - self._small:
            if hasattr(self[key], "once") or _holds(self[key], size):
                del self[key]
        self._small.update(self)


def _holds(value: object, size: int) -> bool:
    """Whether a value, or what it is made of, is a tensor that large."""
    if isinstance(value, Tensor):
        return value.numel() >= size
    if isinstance(value, dict):
        return any(_holds(one, size) for one in value.values())
    if isinstance(value, list | tuple):
        return any(_holds(one, size) for one in value)
    if is_dataclass(value) and not hasattr(value, "once"):  # a memo further in is slimmed itself
        return any(_holds(getattr(value, field.name), size) for field in fields(value))
    return False
