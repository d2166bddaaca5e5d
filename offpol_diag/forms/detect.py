"""Find the files that sources stand for, and the form they have."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError, UsageError, did_you_mean
from offpol_diag.forms.files import Head, undamaged
from offpol_diag.forms.form import Form
from offpol_diag.forms.pickles import load
from offpol_diag.forms.table import BY_COLUMNS, FORMS, WRITTEN
from offpol_diag.readers.columns import GROUP, NONE, is_long, resolve, unknown
from offpol_diag.readers.sources import FILE_URL, STDIN, WILDCARDS, hidden, identity, is_dir, is_file, kind
from offpol_diag.readers.sources import find as parquet_files
from offpol_diag.readers.urls import is_url
from offpol_diag.result.whole import SAVED

PARQUET = ".parquet"


@dataclass(frozen=True)
class Found:
    """Files of one form, in the order of their names, numbers by value; notes on files that are left out."""

    files: tuple[Path, ...]
    form: Form
    named: bool = False
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, files: Sequence[Path], form: Form, named: bool = False) -> Found:
        """Return those of the files that are to be read."""
        chosen, notes = form.choose(files) if form.choose else (files, [])
        return cls(tuple(chosen), form, named, tuple(notes))


def find(
    sources: Sequence[str],
    form: str | None,
    columns: Mapping[str, str],
    always: bool = False,
    joined: bool = False,
) -> Found | None:
    """Return the files and their form; None for a canonical dump, which is read as it is.

    Args:
        sources: files, directories and globs.
        form: the form's name, or None to detect it.
        columns: role → name, from the user.
        always: whether a canonical dump is to be converted as well.
        joined: whether the file is one of two, so that it need not hold log-probs.
    """
    chosen = named(form) if form else None
    files = _files(sources)
    if not chosen and not always and _canonical(sources, files, columns):
        _of_one_form(files)
        return None
    if not files:
        if chosen or always:
            if absent := [one for one in sources if one != STDIN and not is_url(one)]:
                parquet_files(absent)  # which says what does not exist
            hint = "name local files, or a directory of them; a URL is read as Parquet only"
            raise DumpError(f"{', '.join(sources)}: no file is there that can be converted", hint)
        return None
    if chosen:
        fitting = [path for path, given, _ in files if given or chosen.detect(Head.of(path))]
        if not fitting:
            what = f"{', '.join(sources)}: no file is of the form {chosen.name} ({chosen.files})"
            raise DumpError(what, "see `offpol-diag convert --list`, or leave out --form to have it detected")
        return Found.of(fitting, chosen, True)
    return _detected(files, columns, always, joined)


def named(form: str) -> Form:
    """Return a form by its name."""
    found = next((one for one in FORMS if one.name == form.lower()), None)
    if found is None:
        names = [one.name for one in FORMS]
        hint = did_you_mean(form, names) or f"the forms are {', '.join(names)}"
        raise UsageError(f"--form {form}: no such form", hint)
    return found


def _detected(files: Sequence[Local], columns: Mapping[str, str], always: bool, joined: bool) -> Found | None:
    """Return the form that all files have; in a directory a trainer's form goes before a guess."""
    kinds: dict[str, list[Path]] = {}
    for path, given, _ in files:
        if given:
            _require_content(path)
        head = Head.of(path)
        fits = next((one for one in FORMS if one.detect(head)), None)
        if not fits and head.fields and (joined or not head.fields.isdisjoint(columns.values())):
            fits = BY_COLUMNS.get(head.kind)
        if head.kind == "parquet" and not always and (fits.guess if fits else given):
            return None  # the reader says what is missing
        if fits:
            kinds.setdefault(fits.name, []).append(path)
        elif given:
            raise _unknown(head, columns)
    sure = {name: paths for name, paths in kinds.items() if not named(name).guess} or kinds
    if len(sure) > 1:
        several = "; ".join(f"{paths[0]} is {name}" for name, paths in sure.items())
        hint = "say which with --form, or name the files of one"
        raise DumpError(f"the files are of several forms: {several}", hint)
    for name, paths in sure.items():
        return Found.of(paths, named(name))
    return None


def _unknown(head: Head, columns: Mapping[str, str]) -> DumpError:
    """Return the error of a file of no form that is known."""
    if head.kind in ("pickle", "torch"):
        load(head.path)  # which says what is damaged, or not read
    if not head.fields:
        hint = "see `offpol-diag convert --list`, or write Parquet with offpol_diag.DumpWriter"
        return DumpError(f"{head.path}: not a form of dump that is known", hint)
    if absent := [one for one in columns.values() if one not in (NONE, *head.fields)]:
        some = "no fields" if len(absent) > 1 else "no field"
        what = f"{head.path}: it has {some} {' and '.join(map(repr, absent))}"
        return DumpError(what, unknown(absent, sorted(head.fields)))
    held = ", ".join(sorted(head.fields)[:12])
    hint = f"it holds {held}; name them with --columns rollout=…,old=…"
    return DumpError(f"{head.path}: not a form of dump that is known", hint)


def _require_content(path: Path) -> None:
    """Raise DumpError where a file is empty, or is a result and no dump."""
    with undamaged(path), path.open("rb") as file:
        start = file.read(256)
    if not start:
        raise DumpError(f"{path}: the file is empty (0 bytes)", "its writer did not finish; dump again")
    if found := SAVED.match(start.decode(errors="replace")):
        judged = "" if "check" in found[1] else f", `offpol-diag gate {path}` judges it"
        hint = f"`offpol-diag report {path}` draws it again{judged}"
        raise DumpError(f"{path}: this is a result of offpol-diag, and no dump", hint)


def _of_one_form(files: Sequence[Local]) -> None:
    """Raise DumpError where files named beside Parquet are of another form; directories are left out."""
    paths = [path for path, _, within in files if not within]
    others = (one for one in paths if one.name.endswith(WRITTEN) and one.suffix != PARQUET)
    other = next((head for head in map(Head.of, others) if head.kind not in ("parquet", "")), None)
    first = next((one for one in paths if one.suffix == PARQUET), None)
    if other is not None and first is not None:
        kind = next((one.name for one in FORMS if one.detect(other)), other.kind)
        convert = f"offpol-diag convert {other.path} --to FILE"
        hint = f"name the files of one form, or convert the others first: {convert}"
        raise DumpError(f"the files are of several forms: {first} is parquet; {other.path} is {kind}", hint)


def _canonical(sources: Sequence[str], files: Sequence[Local], columns: Mapping[str, str]) -> bool:
    """Return whether the first Parquet file is a dump as it is, or is not on this disk."""
    if any(one == STDIN or (is_url(one) and not one.startswith(FILE_URL)) for one in sources):
        return True
    found = next((path for path, given, _ in files if given or path.suffix == PARQUET), None)
    if found is None:
        return False
    try:
        schema = pq.read_schema(found)
    except (pa.ArrowException, OSError, ValueError):
        return found.suffix == PARQUET  # the reader says what is wrong
    try:
        mapping = resolve(schema.names, columns, str(found), is_long(schema, columns))
    except DumpError:
        return False
    head = Head(found, "parquet", frozenset(schema.names))
    return GROUP in mapping or not any(one.detect(head) for one in FORMS if not one.guess)


class Local(NamedTuple):
    """A file on this disk: whether it was named itself, and whether it lies in a directory that was."""

    path: Path
    given: bool
    within: bool


def _files(sources: Sequence[str]) -> list[Local]:
    """List files, each once; in directories all that a trainer may have written."""
    found: dict[object, Local] = {}
    for source in (one.removeprefix(FILE_URL) for one in sources if one and "\0" not in one):
        there = bool(kind(source))
        globbed = glob.glob(source, recursive=True) if not there and WILDCARDS & {*source} else []  # noqa: PTH207
        for path in [Path(source)] if there else sorted(map(Path, globbed), key=_by_number):
            if is_file(path):
                found.setdefault(identity(path), Local(path, there, False))
            inside = path.rglob("*") if is_dir(path) else ()
            for one in sorted(inside, key=_by_number):
                if not hidden(one.relative_to(path).parts) and one.name.endswith(WRITTEN) and one.is_file():
                    found.setdefault(identity(one), Local(one, False, True))
    return list(found.values())


def _by_number(path: Path) -> list[tuple[bool, int, str]]:
    """Order names with their numbers by value, so that step_2 comes before step_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
