"""Arrays in JSON: their shape, and their numbers as base64 of little-endian float64 or int64.

Text of this form holds every float exactly, NaN and the infinities too, and is read without running or
allocating anything that it asks for: the shape must be that of the bytes which are there.
"""

from __future__ import annotations

import base64
import binascii
import math
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor

FLOAT, INT = "<f8", "<i8"
MOST_AXES = 3


def written(x: Tensor, kind: str) -> dict[str, Any]:
    """A tensor as `{"shape": […], "data": "…"}`."""
    numbers = x.detach().cpu().contiguous().numpy().astype(kind, copy=False)
    return {"shape": list(x.shape), "data": base64.b64encode(numbers.tobytes()).decode("ascii")}


def read(value: object, kind: str) -> Tensor:
    """The tensor of what `written` wrote; a tensor is passed through.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, dict) or set(value) != {"shape", "data"}:
        raise ValueError("an array has a shape and data, and nothing else")
    shape, data = _shape(value["shape"]), _bytes(value["data"])
    if len(data) != 8 * math.prod(shape):
        raise ValueError(f"an array of shape {list(shape)} cannot have {len(data)} bytes of data")
    numbers = np.frombuffer(data, kind).astype(kind[1:]).reshape(shape)  # a copy: it may be written to
    return torch.from_numpy(numbers)


def _shape(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_AXES:
        raise ValueError(f"a shape is a list of at most {MOST_AXES} sizes")
    if not all(type(size) is int and 0 <= size < 2**40 for size in value):
        raise ValueError("a shape is made of whole numbers, none of them negative")
    return tuple(value)


def _bytes(value: object) -> bytes:
    if not isinstance(value, str):
        raise ValueError("the data of an array is base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("the data of an array is not base64") from error


Floats = Annotated[
    Tensor, PlainValidator(partial(read, kind=FLOAT)), PlainSerializer(partial(written, kind=FLOAT))
]
Ints = Annotated[Tensor, PlainValidator(partial(read, kind=INT)), PlainSerializer(partial(written, kind=INT))]
