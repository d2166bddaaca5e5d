"""Open a dump of any form, and convert it to canonical Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.dump import read
from offpol_diag.dump.forms import ENDINGS, FORMS, LOG_PROBS, Form, Row, Rows, records, told
from offpol_diag.dump.read import Dump, named
from offpol_diag.dump.schema import (
    CURRENT,
    NONE,
    OLD,
    PROMPT_IDS,
    ROLLOUT,
    TOKENS,
    WEIGHT_VERSIONS,
    assigned,
)
from offpol_diag.dump.sources import PARQUET, Location, find, kind
from offpol_diag.dump.writer import KEY, UNKNOWN, stamped, to_table
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
    known = {*columns.values()}.union(*LOG_PROBS)
    direct, within, alone = dict[str, list[Path]](), dict[str, list[Path]](), list[tuple[Path, Form]]()
    for path in (Path(one.path) for one in find(sources, (PARQUET, *ENDINGS))):
        given = folders.isdisjoint(path.resolve().parents)
        fields = _fields(path, given)
        form = told(path, fields, columns)
        if form and form.rows is None:
            alone.append((path, form))
        elif path.name.endswith(ENDINGS) and form is None:
            if given:
                hint = "see `offpol-diag convert --list`, or write Parquet with offpol_diag.DumpWriter"
                raise DumpError(f"{path}: not a form of dump that is known", hint)
        elif given or form is None or form.trainer or not fields.isdisjoint(known):
            (direct if given else within).setdefault(form.name if form else "parquet", []).append(path)
    trainers = [one.name for one in FORMS if one.trainer]
    levels = (["parquet"], trainers, ["jsonl"])
    for level in levels:
        if first := {name: paths for name, paths in within.items() if name in level}:
            direct |= {name: [*direct.get(name, ()), *paths] for name, paths in first.items()}
            break
    if len(direct) > 1:
        each = sorted((str(paths[0]), name) for name, paths in direct.items())
        what = f"the files are of several forms: {'; '.join(f'{path} is {name}' for path, name in each)}"
        hint = "name the files of one form, or convert the others first: offpol-diag convert SRC --to FILE"
        raise DumpError(what, hint)
    if alone and not direct:
        path, form = alone[0]
        what = f"{path}: {form.trainer} writes no file with the log-probs of both policies"
        hint = f"docs/trainers/{form.page}.md has a hook that writes them"
        raise DumpError(f"{what}, and this one has not both", hint)
    return next((Found(tuple(direct[one.name]), one) for one in FORMS if one.name in direct), None)


def _fields(path: Path, given: bool) -> set[str]:
    """Return the fields of a file's first record, or a table's columns; refuse one without content."""
    if given:
        try:
            with path.open("rb") as file:
                start = file.read(256)
        except OSError as error:
            what = f"{path}: cannot be opened ({error.strerror})"
            raise DumpError(what, "check that it may be read") from error
        if not start:
            raise DumpError(f"{path}: the file is empty (0 bytes)", "its writer did not finish; dump again")
        if saved := SAVED.match(start.decode(errors="replace")):
            judged = "" if "check" in saved[1] else f", `offpol-diag gate {path}` judges it"
            hint = f"`offpol-diag report {path}` draws it again{judged}"
            raise DumpError(f"{path}: this is a result of offpol-diag, and no dump", hint)
    if ".jsonl" in path.name:
        return {*next(records(path), ("", {}))[1]}
    try:
        return set() if path.name.endswith(ENDINGS) else {*pq.read_schema(path).names}
    except (pa.ArrowException, OSError, ValueError):
        return set()  # the reader says what is wrong


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
    """Convert files of a form."""
    form, marker = found.form, found.form.marker
    files = [path for path in found.files if not marker or path.with_name(marker).exists()]
    left = sorted({str(path.parent) for path in found.files if path not in files})
    if not files:
        hint = f"wait for the step to end; if the run was stopped, make an empty file {marker} there"
        raise DumpError(f"{left[0]}: no file {marker}, so its ranks may still be writing", hint)
    shown = named(files)
    made.notes.append(f"{shown} read as {f'{form.trainer} ({form.name})' if form.trainer else form.name}")
    assert form.rows is not None
    said = {"form": form.name, "versions": {}} | ({"trainer": form.trainer} if form.trainer else {})
    _put(_tables(_unchanged(form.rows(files, columns), files), form, made), made, stamped(said))
    if not made.sequences:
        raise DumpError(f"{shown}: no sequence that counts is in it", "check that its writer was closed")
    made.notes += [f"{folder} has no file {marker} and is left out" for folder in left]
    if made.dropped:
        made.notes.append(f"{made.dropped} sequences without a token that counts are left out")


def _unchanged(rows: Rows, files: Sequence[Path]) -> Rows:
    """Yield rows; if a file is another one at their end, that is an error: rows of both may be mixed."""
    places = [Location(None, str(path), str(path)) for path in files]
    before = [one.state for one in places]
    yield from rows
    for place, state in zip(places, before, strict=True):
        if place.state != state:
            hint = "wait until its writer has ended, or read a copy; then read again"
            raise DumpError(f"{place}: the file was changed while it was read", hint)


def _put(tables: Iterator[pa.Table], made: Converted, said: bytes) -> None:
    """Write tables as row groups of a file that appears when it is whole."""
    hidden, writer = beside(made.path.resolve()), None
    try:
        for table in tables:
            if writer is None:
                kept = table.schema.with_metadata({KEY: said})
                writer = pq.ParquetWriter(hidden, kept, compression="zstd", write_page_checksum=True)
            writer.write_table(pa.table([table.column(one.name).cast(one.type) for one in kept], schema=kept))
            made.sequences += table.num_rows
            made.tokens += pa.compute.sum(pa.compute.list_value_length(table[ROLLOUT])).as_py() or 0
        if writer is not None:
            writer.close()
            placed(hidden, made.path)
    except pa.ArrowInvalid as error:
        what = f"rows that {made.path} is made of cannot be written ({str(error).splitlines()[0]})"
        raise DumpError(what, "a file is damaged: copy it again, or dump again") from error
    except OSError as error:
        what = f"{made.path}: cannot be written ({error.strerror or error})"
        raise DumpError(what, "make room there, or set TMPDIR to another place") from error
    finally:
        if writer is not None:
            writer.close()
        hidden.unlink(missing_ok=True)


# ---------------------------------------------------------------- rows → tables


def _tables(rows: Rows, form: Form, made: Converted) -> Iterator[pa.Table]:
    """Yield rows as tables of `GROUP` tokens, and count those without a token that counts.

    The first row says which token columns there are, the first table which others, and of what type.
    """
    kinds: dict[str, type] = {}
    first: tuple[str, list[str]] | None = None
    held, size = list[tuple[str, Row]](), 0
    for where, row in rows:
        if row is None or len(row.get(ROLLOUT, (1,))) == 0:
            made.dropped += 1
            continue
        absent = {"rollout": ROLLOUT not in row, "old": not row.keys() & {OLD, CURRENT}}
        if any(absent.values()):
            whose = [{"rollout": "rollout", "old": "trainer"}[one] for one in absent if absent[one]]
            way = f"name them with --columns {','.join(f'{one}=…' for one in absent if absent[one])}"
            way = f"docs/trainers/{form.page}.md has a hook that writes both" if form.page else way
            what = f"{where}: no log-probs of the {' and none of the '.join(whose)}"
            raise DumpError(what, f"{way}; it holds {', '.join(row) or 'nothing that is known'}")
        first = first or (where, [name for name in row if name in TOKENS])
        _require_same(where, row, *first)
        held.append((where, row))
        size += len(row[ROLLOUT])
        if size >= GROUP:
            yield _table(held, kinds)
            held, size = [], 0
    if held:
        yield _table(held, kinds)


def _require_same(where: str, row: Row, place: str, tokens: Sequence[str]) -> None:
    """Refuse a row without a token column of the first one, or with another; versions may be unknown."""
    if WEIGHT_VERSIONS in tokens:
        row.setdefault(WEIGHT_VERSIONS, np.full(len(row[ROLLOUT]), UNKNOWN))
    else:
        row.pop(WEIGHT_VERSIONS, None)
    here = {name for name in row if name in TOKENS}
    if odd := sorted(here.symmetric_difference(tokens), key=lambda name: (name not in tokens, name)):
        lacks, has = (where, place) if odd[0] in tokens else (place, where)
        raise DumpError(f"{lacks}: no {odd[0]}, which {has} has", "give every sequence the same columns")


def _table(held: Sequence[tuple[str, Row]], kinds: dict[str, type]) -> pa.Table:
    """Return rows as a table; `kinds` are the types of labels, which the first table finds."""
    rows = [row for _, row in held]
    if not kinds:
        for name, value in (pair for row in rows for pair in row.items()):
            if name not in TOKENS and name != PROMPT_IDS and value is not None:
                kinds.setdefault(name, type(value.item() if isinstance(value, np.generic) else value))
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0] if name in TOKENS}
    columns |= {name: [_as(row.get(name), kind) for row in rows] for name, kind in kinds.items()}
    if PROMPT_IDS in rows[0]:
        columns[PROMPT_IDS] = [row.get(PROMPT_IDS, ()) for row in rows]
    try:
        return to_table(columns, refuses=False)
    except ValueError as error:
        span = f"{held[0][0]} to {held[-1][0].rpartition(', ')[2]}"
        raise DumpError(f"{span}: {error}", "mend the file, or leave the column out") from error


def _as(value: Any, kind: type) -> Any:
    """Return a value of the type of the first row's; None where there is none of that type."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or isinstance(value, np.ndarray | kind):
        return value
    if kind is str:
        return str(value)
    if kind in (int, float) and isinstance(value, int | float):
        fits = isinstance(value, int) or kind is float or value.is_integer()  # NaN and infinity are none
        return kind(value) if fits and kind(value) == value else None
    return None


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
    fields = () if found.form.trainer else _fields(found.files[0], given=False)
    names = assigned([*fields], given, shown) if fields else {}
    called = {role: names.get(role, role) for role in dump.info.columns}
    info = replace(dump.info, files=tuple(map(str, found.files)), columns=called)
    return replace(dump, info=info, remarks=(*made.notes, *dump.remarks), folder=folder)
