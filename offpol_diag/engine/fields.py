"""Declarations of the fields of states: one codec saves any state, and refuses impossible ones.

An array is annotated with its type and the sizes of its axes, as in `Annotated[Array, Floats("rows", "B")]`.
A size with one name is the same in all fields of a state. Names in capitals are sizes that the presets and
columns of an analysis decide, and so equal in all states that are merged; others vary from dump to dump.
In JSON an array is its shape and base64 of little-endian numbers: every float is exact, NaN and the
infinities too, and reading one allocates no more than the bytes that are there.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, PlainSerializer, PlainValidator
from pydantic_core import CoreSchema, core_schema

MOST_AXES = 3
LARGE = 2**62
"""Upper limit of every count: no sum of two overflows an int64."""
Rule = tuple[Callable[[npt.NDArray[Any]], bool | np.bool_], str]
COUNTS: Rule = (lambda x: ((x >= 0) & (x < LARGE)).all(), "a count is finite and not negative")
NUMBERS: Rule = (lambda x: not np.isnan(x).any(), "a value is a number, not NaN")
RISING: Rule = (lambda x: (x[:-1] < x[1:]).all(), "values rise, and none stands twice")
Count = Annotated[int, Field(ge=0, lt=LARGE)]


def require(holds: object, rule: str) -> None:
    """Raise a ValueError unless `holds`; pydantic adds the field's place to its message."""
    if not holds:
        raise ValueError(rule)


class Saved:
    """Base of states whose fields can be saved."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def check(self) -> None:
        """Refuse fields that contradict each other; called on what was read from a file.

        Raises:
            ValueError: a state that no dump can cause.
        """


# ---------------------------------------------------------------- markers of fields


@dataclass(frozen=True)
class ArrayField:
    """Marker of an array.

    Attributes:
        kind: numpy type of its numbers in the file.
        shape: sizes of the axes, by name or as numbers; a leading "..." stands for any axes.
        rule: condition on the numbers, with its text.
    """

    kind: str
    shape: tuple[str | int, ...]
    rule: Rule | None = None

    def __get_pydantic_core_schema__(self, source: Any, _: GetCoreSchemaHandler) -> CoreSchema:
        """Give pydantic the schema that reads and writes the array."""
        written = core_schema.plain_serializer_function_ser_schema(self.written)
        return core_schema.no_info_plain_validator_function(self.read, serialization=written)

    def written(self, x: npt.NDArray[Any]) -> dict[str, Any]:
        """Encode an array as `{"shape": […], "data": "…"}`."""
        numbers = np.ascontiguousarray(x, dtype=self.kind)
        return {"shape": list(x.shape), "data": base64.b64encode(numbers.tobytes()).decode("ascii")}

    def read(self, value: object) -> npt.NDArray[Any]:
        """Decode what `written` wrote; an array is passed through.

        Raises:
            ValueError: anything else.
        """
        if isinstance(value, np.ndarray):
            return value
        if not isinstance(value, dict) or set(value) != {"shape", "data"}:
            raise ValueError("an array has a shape and data, and nothing else")
        shape, data = _shape(value["shape"]), _bytes(value["data"])
        require(
            len(data) == 8 * math.prod(shape),
            f"an array of shape {shape} cannot have {len(data)} bytes of data",
        )
        found = (
            np.frombuffer(data, self.kind).astype(self.kind[1:]).reshape(shape)
        )  # a copy: it may be written to
        if self.rule:
            holds, text = self.rule
            require(holds(found), text)
        return found

    def sizes(self, x: npt.NDArray[Any]) -> Iterator[tuple[str | int, object]]:
        """Yield every declared size and its value.

        Raises:
            ValueError: another number of axes.
        """
        shape, names = tuple(x.shape), self.shape
        if names[:1] == ("...",):
            many = max(len(shape) - len(names) + 1, 0)
            yield "...", shape[:many]
            shape, names = shape[many:], names[1:]
        require(len(shape) == len(names), f"it must be of shape {self}")
        yield from zip(names, shape, strict=True)

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.shape))}]"


def _shape(value: object) -> list[int]:
    if not isinstance(value, list) or len(value) > MOST_AXES:
        raise ValueError(f"a shape is a list of at most {MOST_AXES} sizes")
    require(
        all(type(size) is int and 0 <= size < 2**40 for size in value),
        "a shape is made of whole numbers, none of them negative",
    )
    return value


def _bytes(value: object) -> bytes:
    if not isinstance(value, str):
        raise ValueError("the data of an array is base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError("the data of an array is not base64") from error


def Floats(*shape: str | int, rule: Rule | None = None) -> ArrayField:
    """Mark an array of float64."""
    return ArrayField("<f8", shape, rule)


def Ints(*shape: str | int, rule: Rule | None = None) -> ArrayField:
    """Mark an array of int64."""
    return ArrayField("<i8", shape, rule)


@dataclass(frozen=True)
class Names:
    """Marker of column names, all different, that merged states have in common.

    Attributes:
        size: the name of the size that is their number.
        ordered: whether they must be in one order too.
    """

    size: str
    ordered: bool = False

    def sizes(self, names: tuple[str, ...]) -> Iterator[tuple[str | int, object]]:
        """Yield their number, and the names themselves as a size in capitals."""
        require(len(set(names)) == len(names), "a name stands twice")
        yield self.size, len(names)
        yield "NAMES", names if self.ordered else tuple(sorted(names))


@dataclass(frozen=True)
class Size:
    """Marker of a number that is a size."""

    name: str

    def sizes(self, value: int) -> Iterator[tuple[str | int, object]]:
        """Yield the number."""
        yield self.name, value


def _scalar(value: object) -> object:
    require(value is None or isinstance(value, str | bool | int | float), "is not a scalar")
    return value


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


Scalar = Annotated[Any, PlainValidator(_scalar), PlainSerializer(_plain)]
"""A value of a dump's scalar column; in a file, values that JSON lacks are text."""

# ---------------------------------------------------------------- what a state declares


def form(state: object) -> frozenset[tuple[str, object]]:
    """Return the properties that mergeable states share: names and the sizes in capitals, by place.

    Raises:
        ValueError: fields of the state contradict each other.
    """
    return frozenset(_form(state, ""))


def _form(state: Any, place: str) -> Iterator[tuple[str, object]]:
    sizes: dict[str, object] = {}
    for name, hint in _hints(type(state)).items():  # type: ignore[arg-type]
        for marker, value in _marked(hint, getattr(state, name)):
            if marker is None:
                yield from _form(value, f"{place}.{name}")
                continue
            for size, found in marker.sizes(value):
                wanted = sizes.setdefault(size, found) if isinstance(size, str) else size
                if found != wanted:
                    raise ValueError(f"{name}{marker}: {size} is {found}, and must be {wanted}")
    state.check()
    yield from (
        (f"{place}.{size}", found) for size, found in sizes.items() if size == "..." or size.isupper()
    )


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def _marked(hint: Any, value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the marked values in a field with their markers, and nested states with None."""
    args = get_args(hint)
    if is_dataclass(value):
        yield None, value
    elif get_origin(hint) is Annotated:
        yield from ((one, value) for one in args[1:] if isinstance(one, ArrayField | Names | Size))
    elif get_origin(hint) in (Union, UnionType) and value is not None:
        yield from _marked(args[0], value)
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _marked(args[1], inner)
