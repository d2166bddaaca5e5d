"""Open a dump of any form, and convert it to canonical Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offpol_diag.dump import read
from offpol_diag.dump.forms import BOTH, ENDINGS, FORMS, HOOKS, Form, Row, Rows, load, one_policy, words
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

BATCH, GROUP = 1 << 16, 1 << 20
"""Tokens that become a table at once, and about those of a row group."""


@dataclass(frozen=True)
class Found:
    """Files of one form, in the order of their names, numbers by value."""

    files: tuple[Path, ...]
    form: Form


@dataclass
class Converted:
    """A canonical dump made of other files; `tokens` include masked ones."""

    path: Path
    notes: list[str]
    sequences: int = 0
    tokens: int = 0


def form_of(sources: Sequence[str], columns: Mapping[str, str]) -> Found | None:
    """Return the files and their form, by their names and first records; None for Parquet.

    In a directory a trainer's own files go before others. Files with one policy's log-probs are an error.

    Raises:
        DumpError: the files are of no form that is known, of several, or have one policy's log-probs only.
    """
    if any(is_url(one) and not one.startswith("file://") for one in sources):
        return None
    folders = [Path(one.removeprefix("file://")).resolve() for one in sources if kind(one) == "directory"]
    paths = [Path(one.path) for one in find(sources, (PARQUET, *ENDINGS))]
    files = [(path, folders == [] or not {*folders} & {*path.resolve().parents}) for path in paths]
    kinds: dict[str, list[Path]] = {}
    alone, tables = "", [path for path, _ in files if not path.name.endswith(ENDINGS)]
    for path, given in files:
        if given or path in tables:
            _require_content(path)
        if path in tables:
            alone = alone or _without(path, _names(path))
            continue
        there = words(path)
        fits = next((one for one in FORMS if one.trainer and there >= one.told_by), None)
        if fits is None and (lone := _without(path, there)):
            alone = alone or lone
        elif (
            fits is None
            and ".jsonl" in path.name
            and (given or not there.isdisjoint(BOTH[0] | BOTH[1] | {*columns.values()}))
        ):
            kinds.setdefault("jsonl", []).append(path)
        elif fits:
            kinds.setdefault(fits.name, []).append(path)
        elif given:
            load(path)  # which says what is damaged, or not read
            hint = "see `offpol-diag convert --list`, or write Parquet with offpol_diag.DumpWriter"
            raise DumpError(f"{path}: not a form of dump that is known", hint)
    forms = {one.name: one for one in FORMS}
    found = {name: paths for name, paths in kinds.items() if forms[name].trainer} or kinds
    if alone and not found:
        what, _, page = alone.rpartition("|")
        raise DumpError(what, f"docs/trainers/{page}.md has a hook that writes them")
    if tables and not any(given for path, given in files if path not in tables):
        return None
    if len(found) > 1 or (found and tables):
        each = [(name, paths[0]) for name, paths in found.items()] + [("parquet", one) for one in tables[:1]]
        several = "; ".join(f"{path} is {name}" for name, path in sorted(each, key=lambda one: str(one[1])))
        hint = "name the files of one form, or convert the others first: offpol-diag convert SRC --to FILE"
        raise DumpError(f"the files are of several forms: {several}", hint)
    return next((Found(tuple(paths), forms[name]) for name, paths in found.items()), None)


def _names(path: Path) -> set[str]:
    try:
        return {*pq.read_schema(path).names}
    except (pa.ArrowException, OSError, ValueError):
        return set()  # the reader says what is wrong


def _without(path: Path, there: set[str]) -> str:
    """Return what is wrong with a file that lacks log-probs of a policy, and the page of the hook."""
    trainer = one_policy(there)
    what = f"{path}: {trainer} writes no file with the log-probs of both policies, and this one has not both"
    return f"{what}|{HOOKS[trainer]}" if trainer else ""


def _require_content(path: Path) -> None:
    """Refuse a file that is empty, or a result and no dump."""
    try:
        with path.open("rb") as file:
            start = file.read(256)
    except OSError as error:
        raise DumpError(
            f"{path}: cannot be opened ({error.strerror})", "check that it may be read"
        ) from error
    if not start:
        raise DumpError(f"{path}: the file is empty (0 bytes)", "its writer did not finish; dump again")
    if found := SAVED.match(start.decode(errors="replace")):
        judged = "" if "check" in found[1] else f", `offpol-diag gate {path}` judges it"
        hint = f"`offpol-diag report {path}` draws it again{judged}"
        raise DumpError(f"{path}: this is a result of offpol-diag, and no dump", hint)


def convert(found: Found, target: Path, columns: Mapping[str, str]) -> Converted:
    """Write files of a form as canonical Parquet, a row group at a time; it appears when it is whole.

    Raises:
        DumpError: the files cannot be read, or lack what a dump needs.
    """
    form, marker = found.form, found.form.marker
    files = [path for path in found.files if not marker or path.with_name(marker).exists()]
    left = sorted({str(path.parent) for path in found.files if path not in files})
    if not files:
        hint = f"wait for the step to end; if the run was stopped, make an empty file {marker} there"
        raise DumpError(f"{left[0]}: no file {marker}, so its ranks may still be writing", hint)
    shown = named(files)
    made = Converted(
        target, [f"{shown} read as {f'{form.trainer} ({form.name})' if form.trainer else form.name}"]
    )
    said = {"form": form.name, "versions": {}} | ({"trainer": form.trainer} if form.trainer else {})
    before = [Location(None, str(path), "").state for path in files]
    _write(_of_one_version(form.rows(files, columns), files, before), form, made, stamped(said))
    made.notes += [f"{folder} has no file {marker} and is left out" for folder in left]
    return made


def _of_one_version(rows: Rows, files: Sequence[Path], before: Sequence[tuple[int, ...]]) -> Rows:
    """Yield rows; if a file is another one at their end, that is an error: rows of both may be mixed."""
    yield from rows
    for path, state in zip(files, before, strict=True):
        if Location(None, str(path), "").state != state:
            hint = "wait until its writer has ended, or read a copy; then read again"
            raise DumpError(f"{path}: the file was changed while it was read", hint)


def convert_dump(dump: Dump, target: Path) -> Converted:
    """Write a dump of Parquet files as canonical Parquet: a row per sequence, under our names."""
    made = Converted(target, [])
    names = {column: role for role, column in dump.plan.columns.items()}

    def tables() -> Iterator[pa.Table]:
        for rows in dump.read(dump.plan.names, GROUP):
            made.sequences += rows.many
            made.tokens += int(rows.offsets[-1])
            yield pa.table(
                {names.get(name, name): rows.table.column(name) for name in rows.table.schema.names}
            )

    _put(tables(), made, stamped({"versions": {}, **dump.info.provenance}))
    return made


def _put(tables: Iterator[pa.Table], made: Converted, said: bytes) -> None:
    """Write tables as row groups of a file that appears when it is whole."""
    target = made.path
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: a directory or a device, no file", "name a file for the dump")
    hidden, writer = beside(target.resolve()), None
    try:
        for table in tables:
            if writer is None:
                kept = table.schema.with_metadata({KEY: said})
                writer = pq.ParquetWriter(hidden, kept, compression="zstd", write_page_checksum=True)
            writer.write_table(pa.table([table.column(one.name).cast(one.type) for one in kept], schema=kept))
        if writer is not None:
            writer.close()
            placed(hidden, target)
    except OSError as error:
        what = f"{target}: cannot be written ({error.strerror or error})"
        raise DumpError(what, "make room there, or set TMPDIR to another place") from error
    finally:
        if writer is not None:
            writer.close()
        hidden.unlink(missing_ok=True)


def _write(rows: Iterator[tuple[str, Row]], form: Form, made: Converted, said: bytes) -> None:
    """Write rows in batches; the first row says which token columns there are, the first batch the others."""
    kinds: dict[str, type] = {}
    first: tuple[str, list[str]] | None = None
    dropped = 0

    def batches() -> Iterator[list[tuple[str, Row]]]:
        nonlocal dropped
        held, size = list[tuple[str, Row]](), 0
        for where, row in rows:
            if not row or len(row.get(ROLLOUT, (1,))) == 0:
                dropped += 1
                continue
            _require_both(where, row, form)
            held.append((where, row))
            size += len(row[ROLLOUT])
            if size >= BATCH:
                yield held
                held, size = [], 0
        if held:
            yield held

    def tables() -> Iterator[pa.Table]:
        nonlocal first
        group, size = list[pa.Table](), 0
        for batch in batches():
            table = _table(batch, kinds, first)
            first = first or (batch[0][0], [name for name in batch[0][1] if name in TOKENS])
            group.append(table)
            made.sequences += table.num_rows
            size += pc.sum(pc.list_value_length(table[ROLLOUT])).as_py()
            if size >= GROUP:
                yield pa.concat_tables(group)
                made.tokens, group, size = made.tokens + size, [], 0
        made.tokens += size
        if group:
            yield pa.concat_tables(group)

    _put(tables(), made, said)
    if not made.sequences:
        raise DumpError(
            f"{made.notes[0].partition(' read as')[0]}: no sequence that counts is in it",
            "check that its writer was closed",
        )
    if dropped:
        made.notes.append(f"{dropped} sequences without a token that counts are left out")


def _require_both(where: str, row: Row, form: Form) -> None:
    """Refuse a row without the log-probs of a policy, or of both."""
    absent = [] if ROLLOUT in row else [("rollout", "rollout")]
    absent += [] if row.keys() & {OLD, CURRENT} else [("trainer", "old")]
    if absent:
        whose, short = zip(*absent, strict=True)
        way = f"name them with --columns {','.join(f'{one}=…' for one in short)}"
        if form.trainer:
            way = f"docs/trainers/{HOOKS[form.trainer]}.md has a hook that writes both"
        what = f"{where}: no log-probs of the {' and none of the '.join(whose)}"
        raise DumpError(what, f"{way}; it holds {', '.join(row) or 'nothing that is known'}")


def _table(
    batch: Sequence[tuple[str, Row]], kinds: dict[str, type], first: tuple[str, list[str]] | None
) -> pa.Table:
    """Return rows as a table with the columns of the first one."""
    lead, (place, tokens) = batch[0], first or (batch[0][0], [name for name in batch[0][1] if name in TOKENS])
    for where, row in batch:
        if WEIGHT_VERSIONS in tokens:
            row.setdefault(WEIGHT_VERSIONS, np.full(len(row[ROLLOUT]), UNKNOWN))
        odd = {*tokens} ^ {name for name in row if name in TOKENS}
        for name in sorted(odd, key=lambda name: (name not in tokens, name)):
            if name == WEIGHT_VERSIONS:
                del row[name]
                continue
            lacks, has = (where, place) if name in tokens else (place, where)
            raise DumpError(f"{lacks}: no {name}, which {has} has", "give every sequence the same columns")
        if first is None:
            for name, value in row.items():
                if name not in TOKENS and value is not None and name != PROMPT_IDS:
                    kinds.setdefault(name, type(value.item() if isinstance(value, np.generic) else value))
    columns: dict[str, Any] = {name: [row[name] for _, row in batch] for name in tokens}
    columns |= {name: [_as(row.get(name), kind) for _, row in batch] for name, kind in kinds.items()}
    if PROMPT_IDS in lead[1]:
        columns[PROMPT_IDS] = [row.get(PROMPT_IDS, ()) for _, row in batch]
    try:
        return to_table(columns, refuses=False)
    except ValueError as error:
        span = f"{batch[0][0]} to {batch[-1][0].rpartition(', ')[2]}"
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
    folder = TemporaryFolder()
    made = convert(found, folder.path / "dump.parquet", given)
    shown = named(found.files)
    none = {role: name for role, name in given.items() if name == NONE}
    dump = read.open_dump([Location(None, str(made.path), shown)], columns=none, **how)
    names = assigned([*words(found.files[0])], given, shown) if not found.form.trainer else {}
    called = {role: names.get(role, role) for role in dump.info.columns}
    info = replace(dump.info, files=tuple(map(str, found.files)), columns=called)
    return replace(dump, info=info, remarks=(*made.notes, *dump.remarks), folder=folder)
