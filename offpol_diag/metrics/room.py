"""Memory that block after block is computed in: fresh memory costs more than what is computed in it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


class Room:
    """Arrays by name, each as large as the largest that was asked for under it."""

    def __init__(self) -> None:
        self._held: dict[object, NDArray[np.float64]] = {}

    def __call__(self, name: object, *shape: int) -> NDArray[np.float64]:
        """An array of a shape with anything in it; what was there under this name before is lost."""
        size = math.prod(shape)
        if name not in self._held or self._held[name].size < size:
            self._held[name] = np.empty(size)
        return self._held[name][:size].reshape(shape)
