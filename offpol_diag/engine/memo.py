"""A cache of computed values by key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Memo(dict[object, object]):
    """Cached values by key."""

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        found = self.get(key, self)  # looked up once: keys are long, and most are cached
        if found is self:
            found = self[key] = make()
        return found  # type: ignore[return-value]
