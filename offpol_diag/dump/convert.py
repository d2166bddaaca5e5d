"""Open a dump of any form, on disk or in memory, and convert it to canonical Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.dump import read
from offpol_diag.dump.forms import ENDINGS, FORMS, Files, Form, Row, explained, recognise
from offpol_diag.dump.read import Dump, first_line, named
from offpol_diag.dump.schema import NONE, ROLLOUT, find_columns, require
from offpol_diag.dump.sources import PARQUET, Location, find, kind
from offpol_diag.dump.writer import to_table, write_tables
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.files import TemporaryFolder
from offpol_diag.printable import is_url

UNKNOWN = "of no form"
GROUP = 1 << 19
"""Tokens that become a table, and a row group, at once."""


class Converted(NamedTuple):
    """A canonical dump made of other files, with remarks on what was read and left out."""

    path: Path
    sequences: int
    notes: tuple[str, ...] = ()


def form_of(sources: Sequence[Any]) -> tuple[list[Path], Form] | None:
    """Return the files and their form; None for Parquet.

    In directories Parquet goes before the forms of `FORMS`, and these before each other in their order.

    Raises:
        DumpError: the files are of no form that is known, or of several.
    """
    if any(isinstance(one, Location) or is_url(one) for one in sources):
        return None
    forms, found = {one.name: one for one in FORMS}, dict[str, list[Path]]()
    for path in (Path(one.shown) for one in find(sources, (PARQUET, *ENDINGS))):
        form, unknown = recognise(path), path.name.endswith((*ENDINGS, ".json"))
        found.setdefault(form.name if form else UNKNOWN if unknown else "parquet", []).append(path)
    if all(kind(one) == "directory" for one in sources):
        first = min(found, key=["parquet", *forms, UNKNOWN].index)
        found = {first: found[first]}
    if UNKNOWN in found:
        path = found[UNKNOWN][0]
        hint = "docs/dumps.md has the forms that are read, docs/trainers.md a hook for each trainer"
        hint = f"`offpol-diag report {path}` draws a result" if path.suffix == ".json" else hint
        raise DumpError(f"{path}: not a form of dump that is known", hint)
    if len(found) > 1:
        each = "; ".join(f"{paths[0]} is {name}" for name, paths in found.items())
        hint = "name the files of one form, or convert the others first: offpol-diag convert SRC --to FILE"
        raise DumpError(f"the files are of several forms: {each}", hint)
    name, paths = next(iter(found.items()))
    return (paths, forms[name]) if name in forms else None


# ---------------------------------------------------------------- convert


def convert(sources: Sequence[str], target: Path, columns: Mapping[str, str] | None = None) -> Converted:
    """Write files of any form as canonical Parquet, a row group at a time; it appears when it is whole.

    Raises:
        DumpError: the files cannot be read, or lack what a dump needs.
        UsageError: the target is no file, or one of those that are read.
    """
    found = form_of(sources)
    dump = None if found else read.open_dump(sources, columns=columns)
    files = [Path(one) for one in (dump.files if dump else found[0] if found else ())]
    if target.exists() and not (target.is_file() and target.resolve() not in map(Path.resolve, files)):
        raise UsageError(f"{target}: a device, or what is read", "write to another file")
    if found:
        return _convert(*found, target, columns or {})
    assert dump
    names = {column: role for role, column in dump.columns.items()}
    tables = (pa.Table.from_batches([rows.table]) for rows in dump.read(dump.names, GROUP))
    renamed = (one.rename_columns([names.get(x, x) for x in one.column_names]) for one in tables)
    return Converted(target, _write(renamed, target, dump.provenance))


def _convert(files: Sequence[Path], form: Form, target: Path, columns: Mapping[str, str]) -> Converted:
    """Convert files of a form; the first row says which token columns all have."""
    shown, empty, source = named(files), 0, Files(files, columns)

    def tables() -> Iterator[pa.Table]:
        nonlocal empty
        pending, size = list[tuple[str, Row]](), 0
        with explained(source, form.trainer):
            for row in form.rows(source):
                if ROLLOUT in row and not len(row[ROLLOUT]):
                    empty += 1
                    continue
                require(row, [*row], source.where, page=form.page)
                pending.append((source.where, row))
                size += len(row[ROLLOUT])
                if size >= GROUP:
                    yield _table(pending)
                    pending, size = [], 0
        if pending:
            yield _table(pending)

    provenance = {"form": form.name} | ({"trainer": form.trainer} if form.trainer else {})
    sequences = _write(tables(), target, provenance)
    if not sequences:
        raise DumpError(f"{shown}: no sequence that counts is in it", "check that its writer was closed")
    notes = [f"{shown} read as {f'{form.trainer} ({form.name})' if form.trainer else form.name}"]
    notes += [f"{empty} sequences without a token that counts are left out"] * (empty > 0)
    return Converted(target, sequences, tuple(notes))


def _table(pending: Sequence[tuple[str, Row]]) -> pa.Table:
    """Return rows as a table; columns that no row fills are left out."""
    names = dict.fromkeys(chain.from_iterable(row for _, row in pending))
    columns: dict[str, list[Any]] = {name: [row.get(name) for _, row in pending] for name in names}
    try:
        return to_table({name: x for name, x in columns.items() if any(one is not None for one in x)})
    except ValueError as error:
        span = f"{pending[0][0]} to {pending[-1][0].rpartition(', ')[2]}"
        raise DumpError(f"{span}: {error}", "mend the file, or leave the column out") from error


def _write(tables: Iterator[pa.Table], path: Path, provenance: Mapping[str, Any]) -> int:
    """Write tables to a file, and return its number of rows."""
    try:
        return write_tables(tables, path, json.dumps(provenance).encode())
    except (pa.ArrowException, OSError) as error:
        hint = "make room there, or give each column one type in all rows"
        raise DumpError(f"{path}: cannot be written ({first_line(error)})", hint) from error


# ---------------------------------------------------------------- open


def open_dump(sources: Sequence[Any], *, columns: Mapping[str, str] | None = None, **how: Any) -> Dump:
    """Open a dump of any form; what is no Parquet is converted to a temporary file first.

    The temporary file lies in a private directory, and goes when the process ends or nobody needs it. See
    `read.open_dump` for the arguments and errors.
    """
    given, found = columns or {}, form_of(sources)
    if found is None:
        return read.open_dump(sources, columns=columns, **how)
    (files, form), folder = found, TemporaryFolder()
    made = _convert(files, form, folder.path / "dump.parquet", given)
    left_out = {role: name for role, name in given.items() if name == NONE}
    dump = read.open_dump([Location(None, str(made.path), named(files))], columns=left_out, **how)
    return replace(dump, files=tuple(map(str, files)), notes=made.notes, folder=folder)


@contextmanager
def in_files(what: Any) -> Iterator[tuple[list[Any], str]]:
    """Yield what is read, and a name for a table or columns by name that lie in memory (else empty).

    What lies in memory is written to a temporary Parquet file, as the engines read files.

    Raises:
        UsageError: it is nothing that can be read.
    """
    each = list(what) if isinstance(what, list | tuple) else [what]
    if each and all(isinstance(one, str | Path) for one in each):
        yield [str(one) for one in each], ""
        return
    label = f"{type(what).__module__.partition('.')[0]}.{type(what).__qualname__}".removeprefix("builtins.")
    with TemporaryFolder() as folder:
        file = folder.path / "table.parquet"
        try:
            if isinstance(what, Mapping):
                roles = {name: role for role, name in find_columns(list(what), {}, label).items()}
                table = to_table({(roles.get(x) or x): values for x, values in what.items()}, pa.float64())
            else:
                table = pa.table(what)
            pq.write_table(table, file, compression="zstd", row_group_size=1 << 14)
        except (pa.ArrowException, TypeError, ValueError, RuntimeError) as error:
            hint = "give paths, a pyarrow, polars or pandas table, or a dict of tensors or lists by column"
            raise UsageError(f"a dump cannot be read from {label}: {first_line(error)}", hint) from error
        yield [Location(None, str(file), f"<{label}>")], f"<{label}>"
