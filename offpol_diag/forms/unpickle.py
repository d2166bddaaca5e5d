"""Read pickles and `torch.save` files without running their code.

A pickle is a program: it names functions and calls them. Here a name becomes an inert `Name`, and calls go to
the functions of `NAMES`, which build plain values, NumPy arrays and `Record`s. Any other name is refused. Of
the instructions that would call, import or set attributes none is left as Python has it. Tensors are views of
the mapped file, so that only what is read of them takes memory.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from offpol_diag.errors import DumpError

Array = npt.NDArray[Any]
PEEKED = 1 << 16
"""Bytes of a pickle that are read to find the names of its columns."""
EXPANDED = 1 << 26
"""Values that a tensor may have beyond those that are stored: a stride of 0 repeats them."""


class Refused(ValueError):
    """A pickle asks for what is not done."""


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A function or class of an allowed name; `make` stands for it, and without one it makes a `Record`."""

    qualified: str
    make: Callable[..., object] | None

    def __call__(self, *args: object) -> object:
        """Make what stands for an object."""
        return self.make(*args) if self.make else Record(self.qualified, args)


class Record:
    """An object of a known class, as the arguments it is made of and the state it is given."""

    __slots__ = ("args", "qualified", "state")

    def __init__(self, qualified: str, args: tuple[object, ...]) -> None:
        self.qualified, self.args, self.state = qualified, args, None

    def build(self, state: Any) -> None:
        """Take the state."""
        self.state = state


# ---------------------------------------------------------------- NumPy

DTYPE = re.compile(r"[fiu][1248]|b1|\?|[SU]\d{1,6}|O8?")


class DType(Record):
    """A NumPy type; its state says the byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: str, *_: object) -> None:
        super().__init__("numpy.dtype", ())
        if not DTYPE.fullmatch(code):
            raise Refused(f"values of NumPy type {code[:20]!r}")
        self.dtype = np.dtype(code)

    def build(self, state: Any) -> None:
        """Set the byte order."""
        order = state[1]
        if order not in ("<", ">", "|", "="):
            raise Refused("a damaged NumPy type")
        self.dtype = self.dtype.newbyteorder(order)


class Stored(Record):
    """A NumPy array, which is made empty and then given its values; those of objects are a list."""

    __slots__ = ("value",)

    def __init__(self, *_: object) -> None:
        super().__init__("numpy.ndarray", ())
        self.value: Array | list[Any] = np.empty(0)

    def build(self, state: Any) -> None:
        """Set shape and values."""
        shape, dtype, fortran, data = state[-4:]
        if isinstance(data, list) and dtype.dtype == object:
            self.value = data
        else:
            self.value = _array(data, dtype, shape, "F" if fortran else "C")


def _array(data: bytes | bytearray, dtype: DType, shape: tuple[int, ...], order: Any = "C") -> Array:
    """Return bytes as an array."""
    if dtype.dtype == object or not isinstance(data, bytes | bytearray | memoryview):
        raise Refused("an array of objects")
    flat = np.frombuffer(data, dtype.dtype)
    if len(flat) != math.prod(shape):
        raise Refused("an array whose size is not that of its values")
    return flat.reshape(shape, order=order)


def plain(value: object) -> Any:
    """Return the values of a NumPy array, and anything else as it is."""
    return value.value if isinstance(value, Stored) else value


# ---------------------------------------------------------------- torch

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": "uint8",
}
SIZES = ("8", "16", "32", "64")
DTYPES = frozenset(
    ["bool", "bfloat16", *(f"{kind}{size}" for kind in ("float", "int", "uint") for size in SIZES)]
) - {"float8"}


def typed(data: Array, dtype: str) -> Array:
    """Return bytes as a flat array of a torch type; bfloat16 becomes float32."""
    if dtype not in DTYPES:
        raise Refused(f"tensors of type {dtype[:20]}")
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.dtype(dtype))


def _tensor(
    flat: Array, offset: int, size: Sequence[int], stride: Sequence[int], *_: object, dtype: str = ""
) -> Array:
    """Return a tensor as a view of its storage, within its bounds."""
    if not isinstance(flat, np.ndarray) or not all(
        type(n) is int and n >= 0 for n in (offset, *size, *stride)
    ):
        raise Refused("a damaged tensor")
    count = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if count and (last >= len(flat) or count > max(len(flat), EXPANDED)):
        raise Refused("a tensor larger than its storage")
    if not count:
        return np.empty(tuple(size), flat.dtype)
    steps = tuple(step * flat.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(flat[offset:], tuple(size), steps, writeable=False)


def _untyped(
    flat: Array, offset: int, size: Any, stride: Any, grad: object, hooks: object, dtype: Name, *_: object
) -> Array:
    return _tensor(typed(flat, dtype.qualified.removeprefix("torch.")), offset, size, stride)


def _jagged(state: Mapping[str, Any]) -> list[Array]:
    """Return a nested tensor as a list of arrays."""
    ends = [int(end) for end in state["offsets"]]
    return [state["values"][start:end] for start, end in pairwise(ends)]


def _nested(flat: Array, sizes: Array, strides: Array, offsets: Array) -> list[Array]:
    rows = zip(sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True)
    return [_tensor(flat, offset, size, stride) for size, stride, offset in rows]


def _consolidated(metadata: Mapping[str, Any], storage: Array) -> dict[str, Array]:
    """Return a TensorDict whose tensors lie in one storage: name → type, shape, begin, end, padding."""
    return {
        name: typed(storage[begin:end], dtype.removeprefix("torch."))[: math.prod(shape)].reshape(shape)
        for name, (dtype, shape, begin, end, *_) in metadata["leaves"].items()
    }


def _bytes(text: object, *encoding: object) -> bytes:
    """Return bytes, which older protocols write as text."""
    if isinstance(text, bytes | bytearray):
        return bytes(text)
    if not isinstance(text, str) or encoding not in (("latin1",), ("latin-1",)):
        raise Refused("bytes in another encoding")
    return text.encode("latin1")


def _listed(items: Sequence[object] = ()) -> list[object]:
    if not isinstance(items, list | tuple):
        raise Refused("a damaged set")
    return list(items)


def _batch(kind: Name, state: Mapping[str, Any]) -> Record:
    """Return a batch of SkyRL."""
    record = Record("skyrl._rebuild_tensor_batch", ())
    record.build(state)
    return record


def _named(prefixes: Sequence[str], **makers: Callable[..., object] | None) -> Iterator[tuple[str, Any]]:
    return ((f"{prefix}.{name}", make) for prefix in prefixes for name, make in makers.items())


NAMES: Mapping[str, Callable[..., object] | None] = dict(
    [
        *_named(["collections"], OrderedDict=dict),
        *_named(["builtins", "__builtin__"], set=_listed, frozenset=_listed, bytearray=_bytes),
        *_named(["_codecs"], encode=_bytes),
        *_named(["numpy"], dtype=DType, ndarray=None),
        *_named(
            ["numpy.core.multiarray", "numpy._core.multiarray"],
            _reconstruct=Stored,
            scalar=lambda dtype, data: _array(data, dtype, ()).item(),
        ),
        *_named(["numpy.core.numeric", "numpy._core.numeric"], _frombuffer=_array),
        *_named(["torch"], **dict.fromkeys((*STORAGES, *DTYPES)), Tensor=None, device=None),
        *_named(["torch"], Size=lambda items=(): tuple(_listed(items))),
        *_named(["torch.storage"], UntypedStorage=None, TypedStorage=None),
        *_named(["torch.nn.parameter"], Parameter=None),
        *_named(
            ["torch._utils"],
            _rebuild_tensor_v2=_tensor,
            _rebuild_tensor_v3=_untyped,
            _rebuild_parameter=lambda data, *_: data,
            _rebuild_nested_tensor=_nested,
        ),
        *_named(
            ["torch._tensor"], _rebuild_from_type_v2=lambda function, _, args, state: _call(function, args)
        ),
        *_named(["torch.nested._internal.nested_tensor"], _rebuild_njt=_jagged, NestedTensor=None),
        *_named(["torch._dynamo.decorators"], _DimRange=None),
        *_named(["tensordict", "tensordict._td", "tensordict.tensordict"], TensorDict=None),
        *_named(
            ["tensordict._reductions"],
            _make_td=lambda _, state: state["_tensordict"],  # its tensors
            _rebuild_tensordict_files_consolidated=_consolidated,
        ),
        *_named(["verl", "verl.protocol"], DataProto=None),
        *_named(
            ["skyrl.backends.skyrl_train.training_batch", "skyrl_train.training_batch"],
            _rebuild_tensor_batch=_batch,
            TrainingInputBatch=None,
            TensorBatch=None,
        ),
        *_named(["slime.utils.types", "miles.utils.types"], Sample=None),
        *(
            (f"{one}.utils.types.Sample.Status", lambda value: value)  # an enumeration by its value
            for one in ("slime", "miles")
        ),
    ]
)
"""Qualified name → what is made in its place; None: a `Record`. Nothing else is read."""


# ---------------------------------------------------------------- the machine


def _call(function: object, args: object) -> object:
    """Call what stands for a name."""
    if not isinstance(function, Name) or not isinstance(args, tuple):
        raise Refused("a call of something that is no function")
    return function(*args)


FORBIDDEN = (
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.PERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
    *(pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)
"""Instructions that are not carried out: they call, import or refer out of the file."""


class Unpickler(pickle._Unpickler):
    """Python's unpickler, without what could run code or write attributes.

    Args:
        data: the pickle.
        storages: key → the bytes of a tensor's storage.
    """

    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, data: Any, storages: Callable[[str], Array] | None = None) -> None:
        super().__init__(data)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Name:
        """Return what stands for a function or class."""
        qualified = f"{module}.{name}"
        if qualified not in NAMES:
            raise Refused(qualified[:200])
        return Name(qualified, NAMES[qualified])

    def persistent_load(self, pid: Any) -> Array:
        """Return the storage of a tensor, flat."""
        if self._storages is None:
            raise Refused("a reference out of the file")
        word, kind, key, _, _ = pid
        if word != "storage" or not isinstance(kind, Name) or not isinstance(key, str):
            raise Refused("a reference out of the file")
        return typed(self._storages(key), STORAGES[kind.qualified.rpartition(".")[2]])

    def load_reduce(self) -> None:
        """Call a function of the table."""
        args = self.stack.pop()
        self.stack[-1] = _call(self.stack[-1], args)

    def load_build(self) -> None:
        """Give a record its state."""
        state = self.stack.pop()
        if not isinstance(self.stack[-1], Record):
            raise Refused("a change of something that is no record")
        self.stack[-1].build(state)

    def load_bytearray8(self) -> None:
        """Read bytes, without making room for more than there are."""
        (size,) = struct.unpack("<Q", self.read(8))  # type: ignore[attr-defined]
        self.append(self.read(size))  # type: ignore[attr-defined]

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        **{code: load for code, load in pickle._Unpickler.dispatch.items() if bytes([code]) not in FORBIDDEN},
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }

    def names(self) -> list[str]:
        """Return the keys read so far of the outermost mapping, and of the first record in a list."""
        frames: list[list[Any]] = [*self.metastack, self.stack]
        filled = {id(outer[-1]): inner for outer, inner in pairwise(frames) if outer}
        root = frames[0][0] if frames[0] else None
        if isinstance(root, Name | Record):
            return [root.qualified.rpartition(".")[2]]
        pending = filled.get(id(root), []) if len(frames[0]) == 1 else frames[0][1:]
        if isinstance(root, dict):
            within = [value for value in (*root.values(), *pending[1::2]) if isinstance(value, list)]
        else:
            within = [root] if isinstance(root, list) else []
        first = next((one for one in ([*each, *filled.get(id(each), ())] for each in within) if one), [None])[
            0
        ]
        keys: list[Any] = [*root, *pending[::2]] if isinstance(root, dict) else []
        keys += [*first, *filled.get(id(first), ())[::2]] if isinstance(first, dict) else []
        return [key for key in keys if isinstance(key, str)]


def _machine(path: Path, whole: bool) -> Unpickler:
    """Return an unpickler of a file, or of its beginning."""
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            return _of_zip(file, np.memmap(path, np.uint8, "r"), whole)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Unpickler(mapped if whole else io.BytesIO(mapped[:PEEKED]))


def _of_zip(file: Any, data: Array, whole: bool = True) -> Unpickler:
    """Return an unpickler of what `torch.save` writes: a zip file, not compressed, a member per storage."""
    with zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
    if sum(info.file_size for info in members.values()) > len(data):
        raise Refused("members larger than the file")
    name = next(one for one in members if one.rpartition("/")[2] == "data.pkl")
    folder = name.removesuffix("data.pkl")

    def member(key: str) -> Array:
        info = members[folder + key]
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise Refused("compressed members, which torch.save does not write")
        start = info.header_offset
        lengths = struct.unpack("<HH", data[start + 26 : start + 30].tobytes())
        start += 30 + sum(lengths)
        found = data[start : start + info.file_size]
        if len(found) != info.file_size:
            raise Refused("members outside of the file")
        return found

    if folder + "byteorder" in members and member("byteorder").tobytes() != b"little":
        raise Refused("numbers of a big-endian machine")
    text = member("data.pkl")
    return Unpickler(
        io.BytesIO((text if whole else text[:PEEKED]).tobytes()), lambda key: member(f"data/{key}")
    )


def _fault(path: Path, error: Exception) -> DumpError:
    """Return what went wrong as an error for the user."""
    if isinstance(error, Refused):
        return DumpError(
            f"{path}: holds {error}, which is not read: a pickle can run any code",
            "convert it in the trainer's own environment: load it there, and write its columns with "
            "offpol_diag.DumpWriter",
        )
    said = " ".join(str(error).split())[:80] or type(error).__name__
    return DumpError(f"{path}: a damaged pickle ({said})", "write or copy it again")


def load(path: Path) -> Any:
    """Read a pickle or a `torch.save` file: plain values, arrays and records."""
    try:
        return _machine(path, True).load()
    except Exception as error:  # a damaged pickle raises whatever its instructions meet
        raise _fault(path, error) from error


def load_bytes(data: bytes, path: Path) -> Any:
    """Read what `torch.save` wrote to memory; see `load`."""
    try:
        return _of_zip(io.BytesIO(data), np.frombuffer(data, np.uint8)).load()
    except Exception as error:
        raise _fault(path, error) from error


def peek(path: Path) -> tuple[list[str], DumpError | None]:
    """Return the names at the beginning of a file, and what was refused there."""
    try:
        machine = _machine(path, False)
    except Exception as error:
        return [], _fault(path, error)
    try:
        found = machine.load()
        machine.metastack, machine.stack = [], [found]
    except Refused as error:
        return machine.names(), _fault(path, error)
    except Exception as error:  # the beginning ends anywhere
        short = path.stat().st_size <= PEEKED
        return machine.names(), _fault(path, error) if short else None
    return machine.names(), None
