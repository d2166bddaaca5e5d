"""Open a dump of any form, and convert it to canonical Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.dump import read
from offpol_diag.dump.forms import ENDINGS, Form, Row, Rows, canonical, records, told
from offpol_diag.dump.read import Dump, named
from offpol_diag.dump.schema import COLUMNS, NONE, ROLLOUT, TOKENS, assigned, require
from offpol_diag.dump.sources import PARQUET, Location, find, kind
from offpol_diag.dump.writer import KEY, stamped, to_table
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.files import TemporaryFolder, beside, placed
from offpol_diag.printable import is_url
from offpol_diag.result.whole import SAVED

GROUP = 1 << 19
"""Tokens that become a table, and a row group, at once."""


@dataclass(frozen=True)
class Found:
    """Files of one form, in the order of their names, numbers by value."""

    files: tuple[Path, ...]
    form: Form


@dataclass
class Converted:
    """A canonical dump made of other files; `tokens` include masked ones, `dropped` have no others."""

    path: Path
    notes: list[str] = field(default_factory=list)
    sequences: int = 0
    tokens: int = 0
    dropped: int = 0


def form_of(sources: Sequence[str], columns: Mapping[str, str]) -> Found | None:
    """Return the files and their form, by their names and first records; None for Parquet.

    In a directory Parquet goes before what a trainer writes by itself, and that before JSON lines.

    Raises:
        DumpError: the files are of no form that is known, of several, or have one policy's log-probs only.
    """
    if any(is_url(one) and not one.startswith("file://") for one in sources):
        return None
    folders = {Path(one.removeprefix("file://")).resolve() for one in sources if kind(one) == "directory"}
    given, within = dict[Form | None, list[Path]](), dict[Form | None, list[Path]]()
    for path in (Path(one.path) for one in find(sources, (PARQUET, *ENDINGS))):
        form, direct = told(path, _fields(path), columns), folders.isdisjoint(path.resolve().parents)
        if direct:
            _require_dump(path, form)
        if direct or form or not path.name.endswith(ENDINGS):
            (given if direct else within).setdefault(form, []).append(path)
    first = min(map(_order, within), default=0)
    for form, paths in within.items():
        if _order(form) == first:
            given[form] = [*given.get(form, ()), *paths]
    if len(given) > 1:
        each = sorted(
            (str(paths[0]), form.name or form.trainer if form else "parquet") for form, paths in given.items()
        )
        what = f"the files are of several forms: {'; '.join(f'{path} is {name}' for path, name in each)}"
        hint = "name the files of one form, or convert the others first: offpol-diag convert SRC --to FILE"
        raise DumpError(what, hint)
    form, files = next(iter(given.items()), (None, []))
    if form and form.rows is None:
        what = f"{files[0]}: {form.trainer} writes no file with the log-probs of both policies"
        hint = f"docs/trainers/{form.page}.md has a hook that writes them"
        raise DumpError(f"{what}, and this one has not both", hint)
    return Found(tuple(files), form) if form else None


def _order(form: Form | None) -> int:
    """Return its turn in a folder: Parquet, a trainer's form, JSON lines, what has one policy's log-probs."""
    return 0 if form is None else 3 if form.rows is None else 1 if form.trainer else 2


def _fields(path: Path) -> set[str]:
    """Return the fields of a file's first record, or a table's columns."""
    if ".jsonl" in path.name:
        return {*next(records(path), ("", {}))[1]}
    with suppress(pa.ArrowException, OSError, ValueError):  # the reader says what is wrong
        return set() if path.name.endswith(ENDINGS) else {*pq.read_schema(path).names}
    return set()


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
    if form is None and path.name.endswith(ENDINGS):
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
    dump = read.open_dump(sources, columns=columns) if found is None else None
    files = dump.info.files if dump else found.files if found else ()
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: a directory or a device, no file", "name a file for the dump")
    if any(target.exists() and Path(one).exists() and target.samefile(one) for one in files):
        raise UsageError(f"{target}: is what is read", "write to another file")
    if found:
        _convert(found, made, columns or {})
    elif dump:
        names = {column: role for role, column in dump.plan.columns.items()}
        batches = (
            pa.table({names.get(x, x): rows.table.column(x) for x in rows.table.schema.names})
            for rows in dump.read(dump.plan.names, GROUP)
        )
        _put(batches, made, stamped({"versions": {}, **dump.info.provenance}))
    return made


def _convert(found: Found, made: Converted, columns: Mapping[str, str]) -> None:
    """Convert files of a form; if one is another file at the end, rows of both may be mixed: an error."""
    form, marker = found.form, found.form.marker
    files = [path for path in found.files if not marker or path.with_name(marker).exists()]
    left = sorted({str(path.parent) for path in found.files if path not in files})
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
    """Write tables as row groups of a file that appears when it is whole; the first one has its columns."""
    hidden, writer = beside(made.path.resolve()), None
    try:
        for table in tables:
            if writer is None:
                kept = table.schema.with_metadata({KEY: said})
                writer = pq.ParquetWriter(hidden, kept, compression="zstd", write_page_checksum=True)
            there = {*table.schema.names}
            columns = [
                table[x.name].cast(x.type) if x.name in there else pa.nulls(len(table), x.type) for x in kept
            ]
            writer.write_table(pa.table(columns, schema=kept))
            made.sequences += table.num_rows
            made.tokens += pa.compute.sum(pa.compute.list_value_length(table[ROLLOUT])).as_py() or 0
        if writer is not None:
            writer.close()
            placed(hidden, made.path)
    except pa.ArrowInvalid as error:
        what = f"rows that {made.path} is made of cannot be written ({str(error).splitlines()[0]})"
        raise DumpError(
            what, "give each column one type; if it has one, the file is damaged: copy it again"
        ) from error
    except OSError as error:
        what = f"{made.path}: cannot be written ({error.strerror or error})"
        raise DumpError(what, "make room there, or set TMPDIR to another place") from error
    finally:
        if writer is not None:
            writer.close()
        hidden.unlink(missing_ok=True)


def _tables(rows: Rows, form: Form, made: Converted) -> Iterator[pa.Table]:
    """Yield rows as tables of `GROUP` tokens, and count those without a token that counts.

    The first row says which token columns all have.
    """
    held, size, places, tokens = list[Row](), 0, list[str](), set[str]()
    first = ""
    for where, row in rows:
        if row is None or len(row.get(ROLLOUT, (1,))) == 0:
            made.dropped += 1
            continue
        here = {name for name in row if name in TOKENS}
        if not first:
            way = f"docs/trainers/{form.page}.md has a hook that writes both" if form.page else ""
            require(row, [*row], where, way)
            first, tokens = where, here
        if odd := min(tokens - here or here - tokens, default=None):
            lacks, has = (where, first) if odd in tokens else (first, where)
            raise DumpError(f"{lacks}: no {odd}, which {has} has", "give every sequence the same columns")
        held.append(row)
        places.append(where)
        size += len(row[ROLLOUT])
        if size >= GROUP:
            yield _table(held, places)
            held, size, places = [], 0, []
    if held:
        yield _table(held, places)


def _table(rows: Sequence[Row], places: Sequence[str]) -> pa.Table:
    """Return rows as a table; labels of several kinds become text, and those of no row are left out."""
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if name not in COLUMNS or COLUMNS[name].stored is None:
            try:
                pa.array(values, from_pandas=True)
            except (TypeError, ValueError, OverflowError):  # Arrow's errors are of these types
                values = [None if one is None else str(one) for one in values]
        if any(one is not None for one in values):
            columns[name] = values
    try:
        return to_table(columns, refuses=False)
    except ValueError as error:
        span = f"{places[0]} to {places[-1].rpartition(', ')[2]}"
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
    folder, shown = TemporaryFolder(), named(found.files)
    made = Converted(folder.path / "dump.parquet")
    _convert(found, made, given)
    none = {role: name for role, name in given.items() if name == NONE}
    dump = read.open_dump([Location(None, str(made.path), shown)], columns=none, **how)
    fields = () if found.form.trainer else _fields(found.files[0])
    names = assigned([*fields], given, shown) if fields else {}
    called = {role: names.get(role, role) for role in dump.info.columns}
    info = replace(dump.info, files=tuple(map(str, found.files)), columns=called)
    return replace(dump, info=info, remarks=(*made.notes, *dump.remarks), folder=folder)
