"""Determine the form of a dump, its columns and their types, and check them across files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns
from offpol_diag.readers.columns import Kind, Role
from offpol_diag.readers.parquet import Part

OTHER_COLUMN = "write the column again in that type, or give the part to another column with --columns"
OTHER_GROUPS = "group by a column with one value per sequence"
MOST_DESCRIBED = 16
"""Maximum number of columns without a role that are read for the diagnosis."""


# ---------------------------------------------------------------- a row is a sequence or a token


@dataclass(frozen=True)
class Form:
    """Form of a dump: wide (a row is a sequence, with lists) or long (a row is a token, with numbers).

    Attributes:
        roles: the roles that its columns can have.
        long: whether a row is a token.
    """

    roles: tuple[Role, ...]
    long: bool = False

    def __reduce__(self) -> str:
        """Pickle by name, since the lambdas in `Kind` cannot be pickled."""
        return "LONG" if self.long else "LIST"

    def kind(self, name: str) -> Kind:
        """Return the type requirement of a role's column."""
        return next(role.kind for role in self.roles if role.name == name)

    def resolve(self, names: Sequence[str], overrides: Mapping[str, str], file: str) -> dict[str, str]:
        """Assign columns to roles: canonical name → the column's name.

        Raises:
            DumpError: as `columns.resolve`, or the long form without a sequence column.
        """
        mapping = columns.resolve(names, overrides, file, self.roles)
        if self.long and columns.SEQUENCE not in mapping:
            raise DumpError(
                f"{file}: there is one row per token, and no column holds {columns.SEQUENCE}",
                f"name it with --columns {columns.SEQUENCE}=…; {columns.there_are(names)}",
            )
        return mapping


def _per_token(role: Role) -> Role:
    kind = columns.PER_TOKEN.get(role.kind, role.kind)
    return replace(role, kind=kind, aliases=(*role.aliases, *role.per_token))


POSITION = Role(columns.POSITION, columns.INTEGER, ("token_position", "pos", "t"))
LIST = Form(columns.ROLES)
LONG = Form((*map(_per_token, columns.ROLES), POSITION), long=True)
TOKENS = (*(role.name for role in columns.ROLES if role.kind in columns.PER_TOKEN), columns.POSITION)
"""Roles with a value per token in the long form."""


def form_of(schema: pa.Schema, overrides: Mapping[str, str]) -> Form:
    """Determine the form of a file.

    It is the long form if a column that can be the rollout log-probs holds one float per row and no column
    with a value per token holds lists.
    """

    def types(role: Role) -> list[pa.DataType]:
        given = [overrides[word] for word in (role.name, role.short) if word in overrides]
        names = given or (role.name, *role.aliases)
        return [schema.field(name).type for name in names if schema.names.count(name) == 1]

    found = {role.name: types(role) for role in LONG.roles if role.name in TOKENS}
    lists = any(columns.is_list(dtype) for some in found.values() for dtype in some)
    return LIST if lists or not any(map(columns.is_float, found[columns.ROLLOUT])) else LONG


# ---------------------------------------------------------------- which columns are read


@dataclass(frozen=True)
class Plan:
    """The columns to read and their roles.

    Attributes:
        columns: canonical name → the column's name.
        extra: group-by columns without a role.
        form: whether a row is a sequence or a token.
        described: further small columns, which the diagnosis searches for conspicuous groups.
        bare: whether batches lack positions, turns and keys.
    """

    columns: dict[str, str]
    extra: tuple[str, ...]
    form: Form = LIST
    bare: bool = False
    described: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All columns to read, without duplicates."""
        return list(dict.fromkeys((*self.columns.values(), *self.extra, *self.described)))

    @property
    def labels(self) -> list[str]:
        """The columns that become labels of sequences, without duplicates."""
        found = (self.columns[role] for role in columns.SCALARS if role in self.columns)
        return list(dict.fromkeys((*found, *self.extra)))

    def only(self, roles: Collection[str]) -> Plan:
        """Return a plan that reads only the columns of some roles."""
        found = {role: name for role, name in self.columns.items() if role in roles}
        return replace(self, columns=found, extra=(), described=(), bare=True)


def agree(parts: Sequence[Part], overrides: Mapping[str, str], group_by: Sequence[str]) -> Plan:
    """Return a plan that fits all files.

    Raises:
        DumpError: a column that is missing, ambiguous or of the wrong type, or two files that differ.
    """
    first = parts[0]
    plan = _plan(first, overrides, group_by)
    _check_types(first, plan)
    plan = replace(plan, described=_described(parts, plan))
    for other in parts[1:]:
        _check_same(first, other, plan, overrides)
        _check_types(other, plan)
    return plan


def _plan(part: Part, overrides: Mapping[str, str], group_by: Sequence[str]) -> Plan:
    form = form_of(part.schema, overrides)
    mapping = form.resolve(part.schema.names, overrides, str(part.path))
    versioned = {columns.ROLLOUT_VERSION, columns.TRAIN_VERSION} <= mapping.keys()
    known = {name for name in columns.SCALARS if name in mapping} | ({columns.LAG} if versioned else set())
    extra = tuple(name for name in group_by if name not in known)
    for name in extra:
        columns.existing(name, part.schema.names, f"{part.path}: --group-by")
        columns.once(name, part.schema.names, str(part.path))
        if form.long and name in {mapping.get(role) for role in TOKENS}:
            raise DumpError(f"{part.path}: --group-by: {name!r} holds a value per token", OTHER_GROUPS)
    return Plan(mapping, extra, form)


def _described(parts: Sequence[Part], plan: Plan) -> tuple[str, ...]:
    """Return small text, integer or boolean columns without a role that all files have with one type."""
    taken = {*plan.columns.values(), *plan.extra}

    def everywhere(field: pa.Field) -> bool:
        return all(
            field.name in part.small
            and part.schema.names.count(field.name) == 1
            and part.schema.field(field.name).type == field.type
            for part in parts
        )

    found = [
        field.name
        for field in parts[0].schema
        if field.name not in taken and columns.is_described(field.type) and everywhere(field)
    ]
    return () if plan.form.long else tuple(found[:MOST_DESCRIBED])


def _check_types(part: Part, plan: Plan) -> None:
    needs = [(name, plan.form.kind(role), OTHER_COLUMN) for role, name in plan.columns.items()]
    needs += [(name, columns.LABEL, OTHER_GROUPS) for name in plan.extra]
    for name, kind, hint in needs:
        dtype = part.schema.field(name).type
        if not kind.accepts(dtype):
            raise DumpError(f"{part.path}: column {name!r} holds {dtype}, and {kind.needs} is needed", hint)


def _check_same(first: Part, other: Part, plan: Plan, overrides: Mapping[str, str]) -> None:
    """Refuse a file whose columns differ from the first file's in name or family of types."""
    there = other.schema.names
    found = [
        f"{name!r} is in the first and missing in the second" for name in plan.names if name not in there
    ]
    if not found:
        resolved = plan.form.resolve(there, overrides, str(other.path))
        found = [
            f"{name!r} is in the second and missing in the first"
            for role, name in resolved.items()
            if plan.columns.get(role) != name
        ]
    if not found:
        types = [(name, first.schema.field(name).type, other.schema.field(name).type) for name in plan.names]
        found = [
            f"{name!r} holds {one} in the first and {two} in the second"
            for name, one, two in types
            if not columns.agree(one, two)
        ]
    if found:
        raise DumpError(
            f"{first.path} and {other.path} differ: column {found[0]}",
            "read files of one form at a time, or write them alike",
        )
