"""Compute a 64-bit key per sequence, which identifies its resampling unit in the bootstrap.

The key depends on the sequence's group id or contents, never on its position in the dump, so that splitting,
merging or reordering files changes no key.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def starts(lengths: Ints) -> Ints:
    """Return the start offset of each row, and the end, from lengths: [S] → [S+1] int64."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


def mix(x: Words) -> Words:
    """Hash 64-bit words bijectively, [N] → [N] (splitmix64, Steele et al. 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)  # arrays of words wrap around without a warning
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def of_groups(ids: pa.Array, contents: Callable[[], Ints]) -> Ints:
    """Return keys from group ids, [S] → [S] int64; null ids take theirs from `contents()` [S]."""
    encoded = ids if pt.is_dictionary(ids.type) else ids.dictionary_encode()
    uniques = _of_labels(encoded.dictionary) if len(encoded.dictionary) else np.zeros(1, np.uint64)
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    found = mix(uniques)[codes].view(np.int64)
    null = encoded.is_null().to_numpy(zero_copy_only=False)
    return np.where(null, contents(), found) if null.any() else found


def _of_labels(values: pa.Array) -> Words:
    """Apply `_of_label` to each value, [N]; vectorised for integers."""
    if pt.is_integer(values.type) and not values.null_count:
        words: Words = values.to_numpy().astype(np.uint64)
        return words
    return np.array([_of_label(value) for value in values.to_pylist()], dtype=np.uint64)


def _of_label(value: Any) -> int:
    """Return a 64-bit word for a group id; integers map to themselves, so that 3 and 3.0 agree."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int):
        return value % 2**64
    text = value if isinstance(value, bytes) else str(value).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def of_contents(rollout: Floats, position: Ints, lengths: Ints) -> Ints:
    """Return keys from contents: unmasked log-probs [T], their positions [T] and lengths [S] → [S] int64."""
    bits = (rollout + 0.0).view(np.uint64)  # + 0.0: -0.0 and 0.0 are one number
    words = mix(bits ^ mix(position.astype(np.uint64)))
    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)))  # modulo 2⁶⁴
    ends = starts(lengths)
    return mix(sums[ends[1:]] - sums[ends[:-1]]).view(np.int64)
