"""Find the files that sources stand for, and the form they have: by their names and their first record."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.forms.files import KINDS, Head, undamaged
from offpol_diag.forms.form import Form
from offpol_diag.forms.pickles import load
from offpol_diag.forms.table import FORMS, HOOKS, ONE_POLICY
from offpol_diag.readers.columns import NONE, is_long, resolve, unknown
from offpol_diag.readers.sources import FILE_URL, WILDCARDS, hidden, identity, is_dir, is_file, kind
from offpol_diag.readers.sources import find as parquet_files
from offpol_diag.readers.urls import is_url
from offpol_diag.result.whole import SAVED

PARQUET = ".parquet"


@dataclass(frozen=True)
class Found:
    """Files of one form, in the order of their names, numbers by value; notes on files that are left out."""

    files: tuple[Path, ...]
    form: Form
    notes: tuple[str, ...] = ()


def find(sources: Sequence[str], columns: Mapping[str, str], always: bool = False) -> Found | None:
    """Return the files and their form; None for a canonical dump, which is read as it is.

    Args:
        sources: files, directories and globs.
        columns: role → name, from the user.
        always: whether a canonical dump is to be converted as well.

    Raises:
        DumpError: the files are of no form that is known, of several, or have one policy's log-probs only.
    """
    files = _files(sources)
    if not always and _canonical(sources, files, columns):
        _of_one_form(files)
        return None
    if not files and always:
        if absent := [one for one in sources if not is_url(one)]:
            parquet_files(absent)  # which says what does not exist
        hint = "name local files, or a directory of them; a URL is read as Parquet only"
        raise DumpError(f"{', '.join(sources)}: no file is there that can be converted", hint)
    kinds: dict[str, list[Path]] = {}
    alone: DumpError | None = None
    for path, given, _ in files:
        if given:
            _require_content(path)
        head = Head.of(path)
        fits = next((one for one in FORMS if one.detect(head)), None)
        if not (fits and fits.trainer) and (trainer := _one_policy(head)):
            alone = alone or _without_a_policy(path, trainer)
            continue
        if not fits and not head.fields.isdisjoint(columns.values()):
            fits = next((one for one in FORMS if one.name == head.kind), None)
        if head.kind in ("parquet", "") and not always and (given or fits):
            return None  # the reader says what is missing
        if fits:
            kinds.setdefault(fits.name, []).append(path)
        elif given:
            raise _unknown(head, columns)
    forms = {one.name: one for one in FORMS}
    if alone and not kinds:
        raise alone
    found = {name: paths for name, paths in kinds.items() if forms[name].trainer} or kinds
    if len(found) > 1:
        several = "; ".join(f"{paths[0]} is {name}" for name, paths in found.items())
        raise DumpError(f"the files are of several forms: {several}", "name the files of one")
    for name, paths in found.items():
        choose = forms[name].choose
        chosen, notes = choose(paths) if choose else (paths, [])
        return Found(tuple(chosen), forms[name], tuple(notes))
    return None


def _one_policy(head: Head) -> str:
    """Return whose file this is that has one policy's log-probs, or none; empty for any other file."""
    return next((trainer for trainer, detect in ONE_POLICY if detect(head)), "")


def _without_a_policy(path: Path, trainer: str) -> DumpError:
    what = f"{path}: {trainer} writes no file with the log-probs of both policies, and this one has not both"
    hint = f"docs/trainers/{HOOKS[trainer]}.md has a hook of ten lines that writes them"
    return DumpError(what, hint)


def _unknown(head: Head, columns: Mapping[str, str]) -> DumpError:
    """Return the error of a file of no form that is known."""
    if head.kind in ("pickle", "torch"):
        load(head.path)  # which says what is damaged, or not read
    if head.kind != "jsonl" or not head.fields:
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
    other = next((one for one in paths if one.suffix != PARQUET and one.name.endswith((*KINDS,))), None)
    first = next((one for one in paths if one.suffix == PARQUET), None)
    if other is not None and first is not None:
        convert = f"offpol-diag convert {other} --to FILE"
        hint = f"name the files of one form, or convert the others first: {convert}"
        raise DumpError(f"the files are of several forms: {first} is parquet; {other} is not", hint)


def _canonical(sources: Sequence[str], files: Sequence[Local], columns: Mapping[str, str]) -> bool:
    """Return whether the first Parquet file is a dump as it is, or is not on this disk."""
    if any(is_url(one) and not one.startswith(FILE_URL) for one in sources):
        return True
    found = next((path for path, given, _ in files if given or path.suffix == PARQUET), None)
    if found is None:
        return False
    try:
        schema = pq.read_schema(found)
    except (pa.ArrowException, OSError, ValueError):
        return found.suffix == PARQUET  # the reader says what is wrong
    try:
        resolve(schema.names, columns, str(found), is_long(schema, columns))
    except DumpError:
        return False
    return True


def _odd(path: Path) -> bool:
    """Return whether a file has a name that says nothing of its form."""
    return not path.name.endswith((*KINDS,))


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
                if not hidden(one.relative_to(path).parts) and not _odd(one) and one.is_file():
                    found.setdefault(identity(one), Local(one, False, True))
    return list(found.values())


def _by_number(path: Path) -> list[tuple[bool, int, str]]:
    """Order names with their numbers by value, so that step_2 comes before step_10."""
    parts = re.split(r"(\d+)", str(path))
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]
