"""Read pickles and `torch.save` files without running code: only names of the tables below are looked up.

Tensors become NumPy arrays, and objects of trainers' own classes `Record`s, so neither torch nor a trainer is
needed. To read a further class, add its name to `CLASSES`, or what makes it to `STANDINS`.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offpol_diag.errors import DumpError

Array = npt.NDArray[Any]
HEAD = 1 << 16
"""Bytes of a pickle in which the names of its columns are looked for."""


class Refused(pickle.UnpicklingError):
    """A pickle asks for something that is not in the tables."""


class Record:
    """An object of a known class: the arguments it was made of, and its state."""

    def __init__(self, *args: object) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: object) -> None:
        self.state = state


# ---------------------------------------------------------------- stand-ins for torch and the trainers

DTYPES = {f"{kind}{size}" for kind in ("int", "uint") for size in (8, 16, 32, 64)}
DTYPES |= {"bool", "bfloat16", "float16", "float32", "float64"}
STORAGES = {"Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16"}
STORAGES |= {
    "Bool": "bool",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}


def typed(data: Array, dtype: str) -> Array:
    """Return bytes as a flat array of a torch type; bfloat16 becomes float32."""
    if dtype not in DTYPES:
        raise ValueError(f"no type of a tensor: {dtype!r:.20}")
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.dtype(dtype))


def _tensor(flat: Array, offset: int, size: Any, stride: Any, *_: object) -> Array:
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min(offset, *size, *stride, 0) < 0 or (math.prod(size) and last >= len(flat)):
        raise ValueError("a tensor lies outside of its storage")
    steps = tuple(step * flat.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(size), steps, writeable=False)


def _stated(_: object, state: object) -> Record:
    record = Record()
    record.state = state
    return record


def _bytes(text: Any = b"", *_: object) -> bytes:
    """Return bytes, which older protocols write as text."""
    return text.encode("latin1") if isinstance(text, str) else bytes(memoryview(text))


SKYRL = ("skyrl.backends.skyrl_train.training_batch", "skyrl_train.training_batch")
STANDINS: dict[str, Any] = {
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytes,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": lambda flat, at, size, stride, grad, hooks, dtype, *_: _tensor(
        typed(flat, dtype), at, size, stride
    ),
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._tensor._rebuild_from_type_v2": lambda make, kind, args, state: make(*args),
    "torch.Size": lambda items=(): tuple(items),
    **{f"{one}._rebuild_tensor_batch": _stated for one in SKYRL},
    **{f"torch.{name}": name for name in DTYPES},
    **{f"torch.{name}Storage": dtype for name, dtype in STORAGES.items()},
    "torch.storage.UntypedStorage": "uint8",
    **{f"{one}.utils.types.Sample.Status": lambda value: value for one in ("slime", "miles")},
}
"""Qualified name → what stands for it."""
CLASSES = {"torch.device", "torch.Tensor", "torch.nn.parameter.Parameter"}
CLASSES |= {f"{one}.{name}" for one in SKYRL for name in ("TrainingInputBatch", "TensorBatch")}
CLASSES |= {"slime.utils.types.Sample", "miles.utils.types.Sample"}
"""Classes whose objects become records."""
SAFE = {"collections.OrderedDict", "builtins.set", "builtins.frozenset", "numpy.dtype", "numpy.ndarray"}
SAFE |= {"numpy._core.multiarray._reconstruct", "numpy._core.multiarray.scalar"}
SAFE |= {"numpy._core.numeric._frombuffer"}
"""Names that stand for themselves: they make plain values and arrays, and do nothing else."""
RENAMED = {"__builtin__": "builtins", "numpy.core": "numpy._core"}
RENAMED |= {f"numpy.core.{name}": f"numpy._core.{name}" for name in ("multiarray", "numeric")}
"""Modules as older Pythons and NumPys call them."""


# ---------------------------------------------------------------- reading


class Unpickler(pickle.Unpickler):
    """Python's unpickler with tables in place of imports.

    Args:
        file: the pickle.
        storage: key → the bytes of a tensor's storage.
    """

    def __init__(self, file: Any, storage: Callable[[str], bytes] | None = None) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for."""
        module = RENAMED.get(module, module)
        whole = f"{module}.{name}"
        if whole in SAFE:
            return super().find_class(module, name)
        if whole in CLASSES:
            return type(name, (Record,), {})
        if whole in STANDINS:
            return STANDINS[whole]
        raise Refused(whole[:200])

    def persistent_load(self, pid: Any) -> Array:
        """Return the storage of a tensor, flat."""
        if self._storage is None:
            raise Refused("a reference out of the file")
        return typed(np.frombuffer(self._storage(pid[2]), np.uint8), pid[1])


def _unpickled(file: Any) -> Any:
    if file.read(2) != b"PK":
        file.seek(0)
        return Unpickler(file).load()
    with zipfile.ZipFile(file) as archive:
        name, text = _pickle_of(archive)
        folder = name.removesuffix("data.pkl")
        if folder + "byteorder" in archive.namelist() and archive.read(folder + "byteorder") != b"little":
            raise ValueError("numbers of a big-endian machine")
        return Unpickler(io.BytesIO(text), cache(lambda key: archive.read(f"{folder}data/{key}"))).load()


def _pickle_of(archive: zipfile.ZipFile) -> tuple[str, bytes]:
    """Return the pickle in what `torch.save` writes: a zip file with further members for tensors."""
    name = next(one for one in archive.namelist() if one.rpartition("/")[2] == "data.pkl")
    return name, archive.read(name)  # whole, so that its checksum is compared


def load(path: Path, data: bytes | None = None) -> Any:
    """Read a pickle or a `torch.save` file, or bytes within one: plain values, arrays and records."""
    with path.open("rb") if data is None else io.BytesIO(data) as file:
        try:
            return _unpickled(file)
        except Refused as error:
            raise DumpError(
                f"{path}: holds {error}, which is not read: a pickle can run any code",
                "convert it in the trainer's own environment: load it there, and write its columns with "
                "offpol_diag.DumpWriter",
            ) from error
        except Exception as error:  # a damaged pickle raises whatever its instructions meet
            said = " ".join(str(error).split())[:80] or type(error).__name__
            raise DumpError(f"{path}: a damaged pickle ({said})", "write or copy it again") from error


def peek(path: Path) -> set[str]:
    """Return the words at the beginning of a file, by which its form is known."""
    words = set[str]()
    with suppress(Exception), path.open("rb") as file:  # it ends anywhere; `load` says what is damaged
        head = file.read(HEAD)
        if head[:2] == b"PK":
            with zipfile.ZipFile(file) as archive:
                head = _pickle_of(archive)[1][:HEAD]
        for code, word, _ in pickletools.genops(head):
            if isinstance(word, str):
                words.add(word.partition(" ")[2] if code.name == "GLOBAL" else word)
    return words


def plain(value: object) -> Any:
    """Return an array of objects as a list, and anything else as it is."""
    return value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value
