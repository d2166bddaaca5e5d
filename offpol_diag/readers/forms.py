"""The form of a dump: a row is a sequence and holds lists, or a row is a token and holds numbers.

A file is in the long form, one row per token, if a column that can be the rollout log-probs holds one float
per row and no column with a value per token holds lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns, kinds
from offpol_diag.readers.columns import Role


@dataclass(frozen=True)
class Form:
    """A form that a dump can have.

    Attributes:
        roles: the parts that its columns can play.
        long: whether a row is a token.
    """

    roles: tuple[Role, ...]
    long: bool = False

    def __reduce__(self) -> str:
        """It travels by its name: the tests of its kinds are functions without one."""
        return "LONG" if self.long else "LIST"

    def kind(self, name: str) -> kinds.Kind:
        """What the column of a part must hold."""
        return next(role.kind for role in self.roles if role.name == name)

    def resolve(self, names: Sequence[str], overrides: Mapping[str, str], file: str) -> dict[str, str]:
        """Our name → the column's name.

        Raises:
            DumpError: as `columns.resolve`, or one row per token and no column says of which sequence.
        """
        mapping = columns.resolve(names, overrides, file, self.roles)
        if self.long and columns.SEQUENCE not in mapping:
            raise DumpError(
                f"{file}: there is one row per token, and no column holds {columns.SEQUENCE}",
                f"name it with --columns {columns.SEQUENCE}=…; {columns.there_are(names)}",
            )
        return mapping


def _per_token(role: Role) -> Role:
    kind = kinds.PER_TOKEN.get(role.kind, role.kind)
    return replace(role, kind=kind, aliases=(*role.aliases, *role.per_token))


LIST = Form(columns.ROLES)
LONG = Form(
    (
        *map(_per_token, columns.ROLES),
        Role(columns.POSITION, kinds.INTEGER, ("token_position", "pos", "t")),
    ),
    long=True,
)
# Parts with a value per token in the long form.
TOKENS = (*(role.name for role in columns.ROLES if role.kind in kinds.PER_TOKEN), columns.POSITION)


def form_of(schema: pa.Schema, overrides: Mapping[str, str]) -> Form:
    """The form of a file."""
    types = {
        role.name: [schema.field(name).type for name in _names(role, overrides) if _once(schema, name)]
        for role in LONG.roles
        if role.name in TOKENS
    }
    lists = any(kinds.is_list(dtype) for found in types.values() for dtype in found)
    return LIST if lists or not any(map(kinds.is_float, types[columns.ROLLOUT])) else LONG


def _once(schema: pa.Schema, name: str) -> bool:
    return len(schema.get_all_field_indices(name)) == 1


def _names(role: Role, overrides: Mapping[str, str]) -> Sequence[str]:
    """What the column of a part may be called; the user's word goes first."""
    given = [overrides[word] for word in (role.name, role.short) if word in overrides]
    return given or (role.name, *role.aliases)
