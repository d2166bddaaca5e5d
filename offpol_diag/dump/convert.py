"""Open a dump of any form, and convert it to canonical Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from offpol_diag.dump import read
from offpol_diag.dump.forms import ENDINGS, PARQUET, Form, Row, Rows, canonical, fields_of, told
from offpol_diag.dump.read import Dump, named
from offpol_diag.dump.schema import COLUMNS, NONE, ROLLOUT, TOKENS, assigned, require
from offpol_diag.dump.sources import PARQUET as ENDING
from offpol_diag.dump.sources import Location, find, kind
from offpol_diag.dump.writer import stamped, to_table, write_tables
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.files import TemporaryFolder
from offpol_diag.printable import is_url
from offpol_diag.result.whole import SAVED

GROUP = 1 << 19
"""Tokens that become a table, and a row group, at once."""


@dataclass
class Converted:
    """A canonical dump made of other files; `tokens` include masked ones, `dropped` have no others."""

    path: Path
    notes: list[str] = field(default_factory=list)
    sequences: int = 0
    tokens: int = 0
    dropped: int = 0


def form_of(sources: Sequence[str], columns: Mapping[str, str]) -> tuple[list[Path], Form] | None:
    """Return the files, each once, and their form, by their names and first records; None for Parquet.

    In a directory Parquet goes before what a trainer writes by itself, and that before JSON lines.

    Raises:
        DumpError: the files are of no form that is known, of several, or have one policy's log-probs only.
    """
    if any(is_url(one) and not one.startswith("file://") for one in sources):
        return None
    found = dict[Form, list[str]]()
    for source in sources:
        folder, here = kind(source.removeprefix("file://")) == "directory", dict[Form, list[str]]()
        for path in (Path(one.path) for one in find([source], (ENDING, *ENDINGS))):
            form = told(path, columns)
            if not folder:
                _require_dump(path, form)
            if form:
                here.setdefault(form, []).append(str(path))
        first = min(map(_turn, here), default=None)
        for form, paths in here.items():
            if not folder or _turn(form) == first:
                found[form] = [*found.get(form, ()), *paths]
    if len(found) > 1:
        each = sorted((paths[0], form.name or form.trainer) for form, paths in found.items())
        what = f"the files are of several forms: {'; '.join(f'{path} is {name}' for path, name in each)}"
        hint = "name the files of one form, or convert the others first: offpol-diag convert SRC --to FILE"
        raise DumpError(what, hint)
    form, paths = next(iter(found.items()), (PARQUET, []))
    if form.page and form.rows is None:
        what = f"{paths[0]}: {form.trainer} writes no file with the log-probs of both policies"
        hint = f"docs/trainers/{form.page}.md has a hook that writes them"
        raise DumpError(f"{what}, and this one has not both", hint)
    return None if form is PARQUET else ([Path(one.path) for one in find(paths)], form)


def _turn(form: Form) -> tuple[bool, bool, bool]:
    """Order forms: Parquet, what a trainer writes by itself, JSON lines, what has one policy's log-probs."""
    return form is not PARQUET, form.rows is None, not form.trainer


def _require_dump(path: Path, form: Form | None) -> None:
    """Refuse a file that was named, and is a result of this tool or of no form that is known."""
    start = b"PAR1"
    with suppress(OSError), path.open("rb") as file:  # the reader says what is wrong
        start = file.read(256)
    if not start:
        raise DumpError(f"{path}: the file is empty (0 bytes)", "its writer did not finish; dump again")
    if saved := SAVED.match(start.decode(errors="replace")):
        judged = "" if "check" in saved[1] else f", `offpol-diag gate {path}` judges it"
        hint = f"`offpol-diag report {path}` draws it again{judged}"
        raise DumpError(f"{path}: this is a result of offpol-diag, and no dump", hint)
    if form is None:
        hint = "see `offpol-diag convert --list`, or write Parquet with offpol_diag.DumpWriter"
        raise DumpError(f"{path}: not a form of dump that is known", hint)


# ---------------------------------------------------------------- convert


def convert(sources: Sequence[str], target: Path, columns: Mapping[str, str] | None = None) -> Converted:
    """Write files of any form as canonical Parquet, a row group at a time; it appears when it is whole.

    Raises:
        DumpError: the files cannot be read, or lack what a dump needs.
        UsageError: the target is no file, or one of those that are read.
    """
    found, made = form_of(sources, columns or {}), Converted(target)
    dump = None if found else read.open_dump(sources, columns=columns)
    files = dump.info.files if dump else found[0] if found else ()
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: a directory or a device, no file", "name a file for the dump")
    if any(target.exists() and Path(one).exists() and target.samefile(one) for one in files):
        raise UsageError(f"{target}: is what is read", "write to another file")
    if found:
        _convert(*found, made, columns or {})
    elif dump:
        names = {column: role for role, column in dump.plan.columns.items()}
        batches = (
            pa.table({names.get(x, x): rows.table.column(x) for x in rows.table.schema.names})
            for rows in dump.read(dump.plan.names, GROUP)
        )
        _put(batches, made, stamped({"versions": {}, **dump.info.provenance}))
    return made


def _convert(given: Sequence[Path], form: Form, made: Converted, columns: Mapping[str, str]) -> None:
    """Convert files of a form; if one is another file at the end, rows of both may be mixed: an error."""
    marker = form.marker
    files = [path for path in given if not marker or path.with_name(marker).exists()]
    left = sorted({str(path.parent) for path in given if path not in files})
    if not files:
        hint = f"wait for the step to end; if the run was stopped, make an empty file {marker} there"
        raise DumpError(f"{left[0]}: no file {marker}, so its ranks may still be writing", hint)
    shown, places = named(files), [Location(None, str(path), str(path)) for path in files]
    made.notes.append(f"{shown} read as {f'{form.trainer} ({form.name})' if form.trainer else form.name}")
    said = {"form": form.name, "versions": {}} | ({"trainer": form.trainer} if form.trainer else {})
    before = [one.state for one in places]

    def tables() -> Iterator[pa.Table]:
        assert form.rows is not None
        rows = form.rows(files)
        yield from _tables(rows if form.trainer else canonical(rows, columns), form, made)
        for place, state in zip(places, before, strict=True):
            if place.state != state:
                hint = "wait until its writer has ended, or read a copy; then read again"
                raise DumpError(f"{place}: the file was changed while it was read", hint)

    _put(tables(), made, stamped(said))
    if not made.sequences:
        raise DumpError(f"{shown}: no sequence that counts is in it", "check that its writer was closed")
    made.notes += [f"{folder} has no file {marker} and is left out" for folder in left]
    if made.dropped:
        made.notes.append(f"{made.dropped} sequences without a token that counts are left out")


def _put(tables: Iterator[pa.Table], made: Converted, said: bytes) -> None:
    """Write tables to the file that is made, and count what is in them."""

    def counted() -> Iterator[pa.Table]:
        for table in tables:
            made.sequences += table.num_rows
            made.tokens += pa.compute.sum(pa.compute.list_value_length(table[ROLLOUT])).as_py() or 0
            yield table

    try:
        write_tables(counted(), made.path, said)
    except pa.ArrowException as error:
        what = f"rows that {made.path} is made of cannot be written ({str(error).splitlines()[0]})"
        raise DumpError(what, "give each column one type, or copy the file again if it has") from error
    except OSError as error:
        what = f"{made.path}: cannot be written ({error.strerror or error})"
        raise DumpError(what, "make room there, or set TMPDIR to another place") from error


def _tables(rows: Rows, form: Form, made: Converted) -> Iterator[pa.Table]:
    """Yield rows as tables of `GROUP` tokens, and count those without a token that counts.

    The first row says which token columns all have.
    """
    held, size, first, tokens = list[tuple[str, Row]](), 0, "", set[str]()
    for where, row in rows:
        if row is None or len(row.get(ROLLOUT, (1,))) == 0:
            made.dropped += 1
            continue
        here = {name for name in row if name in TOKENS}
        if not first:
            way = f"docs/trainers/{form.page}.md has a hook that writes both" if form.page else ""
            require(row, [*row], where, way=way)
            first, tokens = where, here
        if odd := min(tokens - here or here - tokens, default=None):
            lacks, has = (where, first) if odd in tokens else (first, where)
            raise DumpError(f"{lacks}: no {odd}, which {has} has", "give every sequence the same columns")
        held.append((where, row))
        size += len(row[ROLLOUT])
        if size >= GROUP:
            yield _table(held)
            held, size = [], 0
    if held:
        yield _table(held)


def _table(held: Sequence[tuple[str, Row]]) -> pa.Table:
    """Return rows as a table; labels of several kinds become text, and those of no row are left out."""
    rows = [row for _, row in held]
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if name not in COLUMNS or COLUMNS[name].stored is None:
            try:
                pa.array(values, from_pandas=True)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                values = [None if one is None else str(one) for one in values]
        if any(one is not None for one in values):
            columns[name] = values
    try:
        return to_table(columns, refuses=False)
    except ValueError as error:
        span = f"{held[0][0]} to {held[-1][0].rpartition(', ')[2]}"
        raise DumpError(f"{span}: {error}", "mend the file, or leave the column out") from error


# ---------------------------------------------------------------- open


def open_dump(sources: Sequence[str], *, columns: Mapping[str, str] | None = None, **how: Any) -> Dump:
    """Open a dump of any form; what is no Parquet is converted to a temporary file first.

    The temporary file lies in a private directory, and goes when the process ends or nobody needs it. See
    `read.open_dump` for the arguments and errors.
    """
    given = columns or {}
    found = form_of(sources, given)
    if found is None:
        return read.open_dump(sources, columns=columns, **how)
    (files, form), folder = found, TemporaryFolder()
    made, shown = Converted(folder.path / "dump.parquet"), named(files)
    _convert(files, form, made, given)
    none = {role: name for role, name in given.items() if name == NONE}
    dump = read.open_dump([Location(None, str(made.path), shown)], columns=none, **how)
    names = {} if form.trainer else assigned([*fields_of(files[0])], given, shown)
    called = {role: names.get(role, role) for role in dump.info.columns}
    info = replace(dump.info, files=tuple(map(str, files)), columns=called)
    return replace(dump, info=info, remarks=(*made.notes, *dump.remarks), folder=folder)
