"""Jobs and states on their way between processes: pickled, with tensors as plain arrays of the host.

A state that was made on a GPU can so be merged where there is none, and a view of a large tensor takes no
more than what it shows. Bytes come only from processes of the same run.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


class _Packer(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return torch.from_numpy, (obj.detach().cpu().contiguous().numpy(),)
        return NotImplemented


def packed(thing: object) -> bytes:
    """A job, a dump or a state, as bytes."""
    out = io.BytesIO()
    _Packer(out, pickle.HIGHEST_PROTOCOL).dump(thing)
    return out.getvalue()


def unpacked(data: bytes) -> Any:
    """The same again, tensors on the CPU."""
    return pickle.loads(data)
