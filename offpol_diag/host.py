"""Where values can be looked at for free.

In the host's own memory a number is there as soon as it is asked for, and numpy may work on it. On a GPU
asking waits for all that was queued before, so the code that runs there takes shapes that no value decides.
"""

from __future__ import annotations

from torch import Tensor


def here(x: Tensor) -> bool:
    """Whether a tensor lies in the host's memory."""
    return x.device.type == "cpu"
