"""Types: of each column in its file, and across the files of a dump."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns, kinds
from offpol_diag.readers.files import Part
from offpol_diag.readers.forms import LIST, TOKENS, Form, form_of

OTHER_COLUMN = "write the column again in that type, or give the part to another column with --columns"
OTHER_GROUPS = "group by a column with one value per sequence"


@dataclass(frozen=True)
class Plan:
    """Which columns to read, as what.

    Attributes:
        columns: our name → the column's name.
        extra: group-by columns that play no part of ours.
        form: whether a row is a sequence or a token.
        bare: whether nobody asks for positions, turns or keys of the batches.
    """

    columns: dict[str, str]
    extra: tuple[str, ...]
    form: Form = LIST
    bare: bool = False

    @property
    def names(self) -> list[str]:
        """Every column to read, once."""
        return list(dict.fromkeys((*self.columns.values(), *self.extra)))

    @property
    def labels(self) -> list[str]:
        """The columns that end as labels of sequences, once."""
        found = (self.columns[role] for role in columns.SCALARS if role in self.columns)
        return list(dict.fromkeys((*found, *self.extra)))

    def only(self, roles: Collection[str]) -> Plan:
        """To read no more than the columns of some parts."""
        found = {role: name for role, name in self.columns.items() if role in roles}
        return replace(self, columns=found, extra=(), bare=True)


def agree(parts: Sequence[Part], overrides: Mapping[str, str], group_by: Sequence[str]) -> Plan:
    """The one plan that fits all files.

    Raises:
        DumpError: a column that is missing, ambiguous or of the wrong type, or two files that differ.
    """
    first = parts[0]
    plan = _plan(first, overrides, group_by)
    _check_types(first, plan)
    for other in parts[1:]:
        _check_columns(first, other, plan, overrides)
        _check_families(first, other, plan)
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


def _check_columns(first: Part, other: Part, plan: Plan, overrides: Mapping[str, str]) -> None:
    for name in plan.names:
        if name not in other.schema.names:
            raise _mixed(first, other, f"column {name!r} is in the first and missing in the second")
    found = plan.form.resolve(other.schema.names, overrides, str(other.path))
    for role, name in found.items():
        if plan.columns.get(role) != name:
            raise _mixed(first, other, f"column {name!r} is in the second and missing in the first")


def _check_families(first: Part, other: Part, plan: Plan) -> None:
    for name in plan.names:
        one, two = _type(first, name), _type(other, name)
        if not kinds.alike(one, two):
            raise _mixed(first, other, f"column {name!r} holds {one} in the first and {two} in the second")


def _check_types(part: Part, plan: Plan) -> None:
    needs = [(name, plan.form.kind(role), OTHER_COLUMN) for role, name in plan.columns.items()]
    needs += [(name, kinds.LABEL, OTHER_GROUPS) for name in plan.extra]
    for name, kind, hint in needs:
        dtype = _type(part, name)
        if not kind.accepts(dtype):
            raise DumpError(f"{part.path}: column {name!r} holds {dtype}, and {kind.needs} is needed", hint)


def _type(part: Part, name: str) -> pa.DataType:
    return part.schema.field(name).type


def _mixed(first: Part, other: Part, what: str) -> DumpError:
    return DumpError(
        f"{first.path} and {other.path} differ: {what}",
        "read files of one form at a time, or write them alike",
    )
