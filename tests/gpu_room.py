"""Memory accounting of an emulated GPU, with a limit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor


@dataclass
class Room:
    """The memory of tensors created while this is active; shared memory counts once.

    Attributes:
        limit: bytes, at most.
        taken: bytes now.
        most: bytes so far, at most.
    """

    limit: float = float("inf")
    taken: int = 0
    most: int = 0
    _users: dict[int, int] = field(default_factory=dict)
    _lock: Any = field(default_factory=RLock)

    def take(self, owner: Tensor, inside: Tensor) -> None:
        """A tensor of the GPU is made.

        Raises:
            torch.OutOfMemoryError: there is no room for it.
        """
        memory = inside.untyped_storage()
        place, size = memory.data_ptr(), memory.nbytes()
        with self._lock:
            new = place not in self._users
            if new and self.taken + size > self.limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is.")
            self._users[place] = self._users.get(place, 0) + 1
            self.taken += size if new else 0
            self.most = max(self.most, self.taken)
        weakref.finalize(owner, self._leave, place, size)

    def _leave(self, place: int, size: int) -> None:
        with self._lock:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self.taken -= size


watched: list[Room] = []
"""The room that is watched, if any is."""


@contextmanager
def room(limit: float = float("inf")) -> Iterator[Room]:
    """Watched within the block."""
    found = Room(limit)
    watched.append(found)
    try:
        yield found
    finally:
        watched.remove(found)
