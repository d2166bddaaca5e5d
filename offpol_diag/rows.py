"""Rows of a result: named tuples in memory, one object of columns in JSON, as data frames are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from offpol_diag.number import SCHEMA, Number, real


class Kind(NamedTuple):
    """What a cell of a column is: how it is read, and its JSON schema."""

    read: Callable[[Any], Any]
    schema: Mapping[str, Any]


def _one_of(kinds: type | tuple[type, ...]) -> Callable[[Any], Any]:
    def read(x: Any) -> Any:
        if not isinstance(x, kinds) or (isinstance(x, bool) and kinds is not bool):
            raise ValueError(f"{x!r} is no cell of this column")
        return x

    return read


def _whole(x: Any) -> Any:
    if not isinstance(x, int) or isinstance(x, bool) or not -(2**63) <= x < 2**63:
        raise ValueError(f"{x!r} is no whole number of 64 bits")
    return x


def _several(kind: Kind) -> Kind:
    def read(x: Any) -> Any:
        if not isinstance(x, list):
            raise ValueError(f"{x!r} is no list")
        return [kind.read(one) for one in x]

    return Kind(read, {"type": "array", "items": kind.schema})


def _or_none(kind: Kind) -> Kind:
    schema = {"anyOf": [kind.schema, {"type": "null"}]}
    return Kind(lambda x: None if x is None else kind.read(x), schema)


TEXT, WHOLE = Kind(_one_of(str), {"type": "string"}), Kind(_whole, {"type": "integer"})
REAL, FLAG = Kind(real, {"type": "number"}), Kind(_one_of(bool), {"type": "boolean"})
NUMBER = Kind(Number.of, SCHEMA)
KINDS: Mapping[str, Kind] = {
    "str": TEXT,
    "int": WHOLE,
    "float": REAL,
    "bool": FLAG,
    "Number": NUMBER,
    "list[str]": _several(TEXT),
    "list[int]": _several(WHOLE),
    "list[float]": _several(REAL),
}
"""Annotation of a field → what its cells are; any may be followed by `| None`."""


class Columns:
    """Let pydantic read and write a list of named tuples as columns: `Annotated[list[Row], Columns(Row)]`.

    Cells of the columns `alike` are lists, in each row of one length where they are not empty.
    """

    def __init__(self, row: Any, *alike: str) -> None:
        self.alike = alike
        said = {name: one.__forward_arg__ for name, one in row.__annotations__.items()}
        self.row, self.kinds = row, dict[str, Kind]()
        for name, text in said.items():
            kind = KINDS[text.removesuffix(" | None")]
            self.kinds[name] = _or_none(kind) if text.endswith(" | None") else kind

    def read(self, table: object) -> list[Any]:
        """Return the rows of an object of columns.

        Raises:
            ValueError: it is none, or a column is missing, unknown, of another length or of another kind.
        """
        if isinstance(table, list) and all(isinstance(one, self.row) for one in table):
            return table
        if not isinstance(table, dict):
            raise ValueError("a table is an object of columns")
        if table.keys() != self.kinds.keys():
            raise ValueError(f"the columns of this table are {', '.join(self.kinds)}")
        columns = [_several(kind).read(table[name]) for name, kind in self.kinds.items()]
        if len({len(one) for one in columns}) > 1:
            sizes = (f"{name} {len(one)}" for name, one in zip(self.kinds, columns, strict=True))
            raise ValueError(f"columns differ in length: {', '.join(sizes)}")
        rows = [self.row(*cells) for cells in zip(*columns, strict=True)]
        for row in rows:
            if len({len(getattr(row, name)) for name in self.alike} - {0}) > 1:
                raise ValueError(f"{', '.join(self.alike)} of one row differ in length")
        return rows

    def write(self, rows: Sequence[Any]) -> dict[str, list[Any]]:
        """Return the columns of rows."""
        columns = zip(*rows, strict=True) if rows else [()] * len(self.kinds)
        return {
            name: [_written(one) for one in cells] for name, cells in zip(self.kinds, columns, strict=True)
        }

    def __get_pydantic_core_schema__(self, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Read and write columns."""
        written = core_schema.plain_serializer_function_ser_schema(self.write)
        return core_schema.no_info_plain_validator_function(self.read, serialization=written)

    def __get_pydantic_json_schema__(self, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe the columns."""
        columns = {name: {"type": "array", "items": kind.schema} for name, kind in self.kinds.items()}
        return {
            "type": "object",
            "description": self.row.__doc__,
            "properties": columns,
            "required": [*columns],
            "additionalProperties": False,
        }


def _written(cell: Any) -> Any:
    return cell.parts() if isinstance(cell, Number) else cell
