"""Open a dump of any form, on disk or in memory, and convert it to canonical Parquet."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.dump import read
from offpol_diag.dump.forms import ENDINGS, FORMS, Files, Form, Row, explained
from offpol_diag.dump.read import Dump, first_line, named
from offpol_diag.dump.schema import COLUMNS, NONE, ROLLOUT, assigned, require
from offpol_diag.dump.sources import PARQUET, Location, find, kind
from offpol_diag.dump.writer import stamped, to_table, write_tables
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.files import TemporaryFolder
from offpol_diag.printable import is_url

GROUP = 1 << 19
"""Tokens that become a table, and a row group, at once."""


@dataclass
class Converted:
    """A canonical dump made of other files."""

    path: Path
    notes: list[str] = field(default_factory=list)
    sequences: int = 0


def form_of(sources: Sequence[Any]) -> tuple[list[Path], Form] | None:
    """Return the files and their form, by their names and first records; None for Parquet.

    In directories Parquet goes before what a trainer writes by itself, and that before JSON lines.

    Raises:
        DumpError: the files are of no form that is known, or of several.
    """
    if any(isinstance(one, Location) or is_url(one) for one in sources):
        return None
    forms, found = {one.name: one for one in FORMS}, dict[str, list[Path]]()
    for path in (Path(one.shown) for one in find(sources, (PARQUET, *ENDINGS))):
        files, fields = Files([path], where=str(path)), set[str]()
        if ".jsonl" in path.name:
            with explained(files, "a writer of JSON lines"):
                fields = {*next(files.records(), (path, {}))[1]}
        place = "/".join(path.absolute().parts[-2:])
        fits = (x for x in FORMS if re.fullmatch(x.path, place) and {*x.fields.split()} <= fields)
        form = next(fits, None)
        name = form.name if form else "" if path.name.endswith((*ENDINGS, ".json")) else "parquet"
        found.setdefault(name, []).append(path)
    if all(kind(one) == "directory" for one in sources):
        rank = {name: {"parquet": 0, "jsonl": 2, "": 3}.get(name, 1) for name in found}
        found = {name: paths for name, paths in found.items() if rank[name] == min(rank.values())}
    if "" in found:
        path = found[""][0]
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
    found, made = form_of(sources), Converted(target)
    dump = None if found else read.open_dump(sources, columns=columns)
    files = [Path(one) for one in (dump.info.files if dump else found[0] if found else ())]
    if target.exists() and not (target.is_file() and target.resolve() not in map(Path.resolve, files)):
        raise UsageError(f"{target}: a device, or what is read", "write to another file")
    if found:
        _convert(*found, made, columns or {})
    elif dump:
        names = {column: role for role, column in dump.roles.items()}
        tables = (pa.Table.from_batches([rows.table]) for rows in dump.read(dump.names, GROUP))
        renamed = (one.rename_columns([names.get(x, x) for x in one.column_names]) for one in tables)
        _put(renamed, made, dump.info.provenance)
    return made


def _convert(files: Sequence[Path], form: Form, made: Converted, columns: Mapping[str, str]) -> None:
    """Convert files of a form; the first row says which token columns all have."""
    shown, dropped, source = named(files), 0, Files(files, columns)

    def tables() -> Iterator[pa.Table]:
        nonlocal dropped
        held, size = list[tuple[str, Row]](), 0
        with explained(source, form.trainer or "a writer of JSON lines"):
            for row in form.rows(source):
                if ROLLOUT in row and not len(row[ROLLOUT]):
                    dropped += 1
                    continue
                require(row, [*row], source.where, page=form.page)
                held.append((source.where, row))
                size += len(row[ROLLOUT])
                if size >= GROUP:
                    yield _table(held)
                    held, size = [], 0
        if held:
            yield _table(held)

    _put(tables(), made, {"form": form.name} | ({"trainer": form.trainer} if form.trainer else {}))
    if not made.sequences:
        raise DumpError(f"{shown}: no sequence that counts is in it", "check that its writer was closed")
    made.notes.append(f"{shown} read as {f'{form.trainer} ({form.name})' if form.trainer else form.name}")
    if dropped:
        made.notes.append(f"{dropped} sequences without a token that counts are left out")


def _table(held: Sequence[tuple[str, Row]]) -> pa.Table:
    """Return rows as a table; columns that no row fills are left out."""
    names = dict.fromkeys(chain.from_iterable(row for _, row in held))
    columns: dict[str, list[Any]] = {name: [row.get(name) for _, row in held] for name in names}
    for name, x in columns.items():
        if name not in COLUMNS and any(isinstance(one, str) for one in x):  # beside texts all is text
            columns[name] = [None if one is None else str(one) for one in x]
    try:
        return to_table({name: x for name, x in columns.items() if any(one is not None for one in x)})
    except ValueError as error:
        span = f"{held[0][0]} to {held[-1][0].rpartition(', ')[2]}"
        raise DumpError(f"{span}: {error}", "mend the file, or leave the column out") from error


def _put(tables: Iterator[pa.Table], made: Converted, said: dict[str, Any]) -> None:
    """Write tables to the file that is made."""
    try:
        made.sequences = write_tables(tables, made.path, stamped({"versions": {}, **said}))
    except (pa.ArrowException, OSError) as error:
        hint = "make room there, or give each column one type in all rows"
        raise DumpError(f"{made.path}: cannot be written ({first_line(error)})", hint) from error


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
    made, shown = Converted(folder.path / "dump.parquet"), named(files)
    _convert(files, form, made, given)
    none = {role: name for role, name in given.items() if name == NONE}
    dump = read.open_dump([Location(None, str(made.path), shown)], columns=none, **how)
    names = {} if form.trainer else assigned([*next(Files(files).records())[1]], given, shown)
    called = {role: names.get(role, role) for role in dump.info.columns}
    info = replace(dump.info, files=tuple(map(str, files)), columns=called)
    return replace(dump, info=info, notes=tuple(made.notes), folder=folder)


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
                ours = {name: role for role, name in assigned(list(what), {}, "dict").items()}
                table = to_table({(ours.get(x) or x): values for x, values in what.items()}, pa.float64())
            else:
                table = pa.table(what)
            pq.write_table(table, file, compression="zstd", row_group_size=1 << 14)
        except (pa.ArrowException, TypeError, ValueError, RuntimeError) as error:
            hint = "give paths, a pyarrow, polars or pandas table, or a dict of tensors or lists by column"
            raise UsageError(f"a dump cannot be read from {label}: {first_line(error)}", hint) from error
        yield [Location(None, str(file), f"<{label}>")], f"<{label}>"
