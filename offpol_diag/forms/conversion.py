"""Convert a dump of any form to canonical Parquet, and open it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag import wholefiles
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.forms import long
from offpol_diag.forms.detect import Found, find
from offpol_diag.forms.form import Form, Row, cut
from offpol_diag.forms.table import HOOKS
from offpol_diag.readers.columns import (
    CURRENT,
    NONE,
    OLD,
    POSITION,
    ROLLOUT,
    WEIGHT_VERSIONS,
    agree,
    ignored,
    is_long,
)
from offpol_diag.readers.sources import Location
from offpol_diag.readers.sources import find as parquet_files
from offpol_diag.versions import UNKNOWN
from offpol_diag.writer import PROMPT_IDS, AsGiven

if TYPE_CHECKING:
    from offpol_diag.readers import Dump

BATCH = 1 << 16
"""Tokens that are given to the writer at once."""


@dataclass
class Converted:
    """A canonical dump made of other files.

    Attributes:
        notes: what was read, and what to know about it.
        columns: canonical column → what it is called in the files.
        ignored: fields of the files that nobody reads.
        tokens: number of tokens, masked ones included.
    """

    path: Path
    files: tuple[Path, ...]
    notes: list[str]
    columns: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    sequences: int = 0
    tokens: int = 0


def convert(found: Found, target: Path, columns: Mapping[str, str]) -> Converted:
    """Write files as canonical Parquet, a row group at a time.

    Raises:
        DumpError: the files cannot be read, or lack what a dump needs.
        UsageError: the target is no file.
    """
    form = found.form
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: a directory or a device, no file", "name a file for the dump")
    what = f"{form.trainer} ({form.name})" if form.trainer else form.name
    made = Converted(target, found.files, [f"{_named(found.files)} read as {what}", *found.notes])
    with _room(str(found.files[0])):
        rows = _cut(_of_one_version(form.read(found.files, columns), found), form, made)
        provenance: dict[str, Any] = {"form": form.name, "versions": {}}  # those here say nothing of the run
        if form.trainer:
            provenance["trainer"] = form.trainer
        _write(rows, made, provenance)
    return made


@contextmanager
def _room(file: str) -> Iterator[None]:
    """Explain that a converted dump cannot be written."""
    try:
        yield
    except OSError as error:
        hint = "make room there, or set TMPDIR to another place"
        raise DumpError(f"{file}: cannot be converted ({error.strerror or error})", hint) from error


def _of_one_version(rows: Iterator[Row], found: Found) -> Iterator[Row]:
    """Yield rows; if a file is another one at their end, that is an error: rows of both may be mixed."""

    def states() -> list[tuple[Any, ...]]:
        stats = [(path, path.stat()) for path in found.files]
        return [(path, stat.st_size, stat.st_mtime_ns, stat.st_ino) for path, stat in stats]

    before = states()
    yield from rows
    for old, new in zip(before, states(), strict=True):
        if old != new:
            hint = "wait until its writer has ended, or read a copy; then read again"
            raise DumpError(f"{new[0]}: the file was changed while it was read", hint)


def _named(files: Sequence[object]) -> str:
    """Return the name of the first file, and how many more there are."""
    return f"{files[0]}{f' and {len(files) - 1} more' if len(files) > 1 else ''}"


def _lacking(row: Row, whose: Sequence[str], short: Sequence[str], form: Form) -> DumpError:
    """Return the error on a row without the log-probs of a policy, or of both."""
    if form.trainer in HOOKS:
        way = f"docs/trainers/{HOOKS[form.trainer]}.md has a hook of ten lines that writes both"
    else:
        way = f"name them with --columns {','.join(f'{one}=…' for one in short)}"
    there = ", ".join([*row.tokens, *row.scalars]) or "nothing that is known"
    what = f"{row.where}: no log-probs of the {' and none of the '.join(whose)}"
    return DumpError(what, f"{way}; it holds {there}")


def _cut(rows: Iterator[Row], form: Form, made: Converted) -> Iterator[Row]:
    """Yield the responses of rows; those without a token that counts are left out and counted."""
    dropped, read, unread = 0, set[str](), dict[str, None]()
    policies = (((ROLLOUT,), "rollout", "rollout"), ((OLD, CURRENT), "trainer", "old"))
    for row in rows:
        if absent := [one for one in policies if row.tokens.keys().isdisjoint(one[0])]:
            _, whose, short = zip(*absent, strict=True)
            raise _lacking(row, whose, short, form)
        read.update(row.names.values(), row.scalars)
        unread |= dict.fromkeys(row.unread)
        found = cut(row, form.covers)
        if found is not None:
            yield found
        dropped += found is None
    made.ignored = tuple(name for name in unread if name not in read)
    if dropped:
        made.notes.append(f"{dropped} sequences without a token that counts are left out")


def _write(rows: Iterator[Row], made: Converted, provenance: Mapping[str, Any]) -> None:
    """Write rows in batches; the first row says which token columns there are, the first batch the others."""
    first: Row | None = None
    kinds: dict[str, type] = {}
    with ExitStack() as stack:
        for batch in _batches(rows):
            if first is None:
                first = batch[0]
                made.columns = first.names
                writer = AsGiven(made.path, provenance, journal=False)
                stack.callback(writer.discard)  # after a close() that failed
                stack.enter_context(writer)
                known = (pair for row in batch for pair in row.scalars.items() if pair[1] is not None)
                for name, value in known:
                    kinds.setdefault(name, type(value))
                versioned = any(WEIGHT_VERSIONS in row.tokens for row in batch)
            for row in batch:
                unknown = np.full(len(row.tokens[ROLLOUT]), UNKNOWN) if versioned else None
                if (versions := row.tokens.pop(WEIGHT_VERSIONS, unknown)) is not None and versioned:
                    row.tokens[WEIGHT_VERSIONS] = versions
                if odd := first.tokens.keys() ^ row.tokens.keys():
                    odd_name = min(first.tokens.keys() - row.tokens.keys() or odd)
                    has, lacks = (first, row) if odd_name in first.tokens else (row, first)
                    what = f"{lacks.where}: no {odd_name}, which {has.where} has"
                    raise DumpError(what, "give every sequence the same columns")
            columns: dict[str, Any] = {name: [row.tokens[name] for row in batch] for name in first.tokens}
            columns |= {
                name: [_as(row.scalars.get(name), kind) for row in batch] for name, kind in kinds.items()
            }
            if PROMPT_IDS in columns:
                columns[PROMPT_IDS] = [() if one is None else one for one in columns[PROMPT_IDS]]
            try:
                with np.errstate(invalid="ignore"):  # what does not fit is an error below
                    writer.write(**columns)
            except ValueError as error:
                span = f"{batch[0].where} to {batch[-1].where.rpartition(', ')[2]}"
                raise DumpError(f"{span}: {error}", "mend the file, or leave the column out") from error
            made.sequences += len(batch)
            made.tokens += sum(len(row.tokens[ROLLOUT]) for row in batch)
        if first is None:
            hint = "check that its writer was closed"
            raise DumpError(f"{made.files[0]}: no sequence that counts is in it", hint)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Gather rows up to about `BATCH` tokens."""
    held, size = list[Row](), 0
    for row in rows:
        held.append(row)
        size += len(row.tokens[ROLLOUT])
        if size >= BATCH:
            yield held
            held, size = [], 0
    if held:
        yield held


def _as(value: object, kind: type) -> object:
    """Return a value of the type of the first row's; None where there is none of that type."""
    if value is None or isinstance(value, kind):
        return value
    if kind is str:
        return str(value)
    if kind in (int, float) and isinstance(value, int | float):
        fits = isinstance(value, int) or kind is float or value.is_integer()  # NaN and infinity are none
        return kind(value) if fits and kind(value) == value else None
    return None


# ---------------------------------------------------------------- open


def open_dump(
    sources: Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    batch_tokens: int = 1_000_000,
) -> Dump:
    """Open a dump of any form; what is no canonical Parquet is converted to a temporary file first.

    The temporary file lies in a private directory, and goes when the process ends or nobody needs it. See
    `readers.open_dump` for the arguments and errors.
    """
    from offpol_diag import readers

    chosen = columns or {}
    how: dict[str, Any] = {"group_by": group_by, "on_bad_row": on_bad_row, "batch_tokens": batch_tokens}
    found = find(sources, chosen)
    if found is None:
        files = parquet_files(sources)
        if _is_long(files[0], chosen):
            return _of_tokens(files, chosen, how)
        return readers.open_dump(files, columns=columns, **how)
    folder = wholefiles.TemporaryFolder()
    made = convert(found, folder.path / "dump.parquet", chosen)
    shown = _named(found.files)
    try:
        none = {role: name for role, name in chosen.items() if name == NONE}
        dump = readers.open_dump([str(made.path)], columns=none, **how)
    except DumpError as error:
        message, *details = (line.replace(str(made.path), shown) for line in error.lines)
        raise DumpError(message, error.hint, details) from error
    info = replace(
        dump.info,
        files=tuple(map(str, found.files)),
        columns={role: made.columns.get(role, role) for role in dump.info.columns},
        ignored=(*made.ignored, *dump.info.ignored),
        bytes=sum(path.stat().st_size for path in found.files),
    )
    parts = [replace(part, path=replace(part.path, shown=shown)) for part in dump.parts]
    return replace(dump, info=info, parts=parts, remarks=tuple(made.notes), folder=folder)


def _is_long(file: Location, overrides: Mapping[str, str]) -> bool:
    """Return whether a file has a row per token; False where it cannot be read, which the reader explains."""
    try:
        with file.open() as stream:
            schema = pq.read_schema(stream)
    except (pa.ArrowException, OSError, ValueError):
        return False
    return is_long(schema, overrides)


def _of_tokens(files: Sequence[Location], columns: Mapping[str, str], how: Mapping[str, Any]) -> Dump:
    """Open a dump of one row per token, converted to one row per sequence."""
    from offpol_diag import readers
    from offpol_diag.readers.dump import describe, merged

    parts = describe(files)
    filled = [part for part in parts if part.rows]
    if not filled:
        return readers.open_dump(files, columns=columns, **how)  # which says so
    plan = agree(filled, columns, how["group_by"])
    skip = how["on_bad_row"] == "skip"
    folder = wholefiles.TemporaryFolder()
    target = folder.path / "dump.parquet"
    with _room(str(filled[0].path)):
        notes = long.convert(filled, plan, target, skip)
    shown = _named([part.path for part in filled])
    given = {role: name for role, name in columns.items() if name == NONE} | plan.columns
    location = replace(Location.local(target, shown), origin=long.place)
    dump = readers.open_dump([location], columns=given, **how)
    info = replace(
        dump.info,
        files=tuple(str(part.path) for part in parts),
        bytes=sum(part.bytes for part in parts),
        columns={{POSITION: "position"}.get(role, role): name for role, name in plan.columns.items()},
        provenance=merged(part.provenance for part in parts),
        ignored=ignored(filled, plan),
    )
    return replace(dump, info=info, remarks=tuple(notes), folder=folder)
