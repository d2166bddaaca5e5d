"""Merge the tallies of pieces into one and its Result, or say why they do not belong together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from offpol_diag.analysis import readout
from offpol_diag.analysis.first_pass import Needs
from offpol_diag.analysis.tally_file import AGAIN, Held, Piece, Settings, TallyFile, read
from offpol_diag.engine import worst
from offpol_diag.engine.scope import ONE, Label
from offpol_diag.errors import ResultError, UsageError
from offpol_diag.readers.checks import Count, remarks
from offpol_diag.readers.dump import merged
from offpol_diag.result import DumpFacts, Result, Run, Skipped

ALIKE = "analyze every piece with the same version and options: presets, columns, group-by, seed"
ONCE = "give every piece once; if two tallies overlap, analyze the rows that only one of them has again"
BETWEEN = "where a row is a token, cut the dump between sequences"
WHOLE = "cut the dump between steps, so that each step lies whole in one piece"
WORST = ("worst.sequences", "worst.typical", "worst.tokens")
MOST_NAMED = 3
EXAMPLES = 5


def merge(paths: Iterable[Path]) -> TallyFile:
    """Read tally files one after the other and merge them; two are held at a time.

    Args:
        paths: in the order of the dump, which numbers rows that have no `sequence_id`; no other number
            depends on it.

    Raises:
        UsageError: no file.
        ResultError: a file that is no tally, or files that do not belong together.
        PresetError: a preset in a file that the grammar does not allow.
    """
    whole: TallyFile | None = None
    for path in paths:
        one = read(path)
        whole = one if whole is None else _joined(whole, one)
        _refuse_overlaps(whole.held)
    if whole is None:
        raise UsageError("no tally is given", "name the files that `analyze --tally` wrote")
    return whole


def _joined(whole: TallyFile, one: TallyFile) -> TallyFile:
    """Merge two tallies that were made alike."""
    unlike = differences(whole.settings, one.settings)
    if unlike:
        raise ResultError(f"{whole.name} and {one.name} were not made alike: {_some(unlike)}", ALIKE)
    rows, tally = sum(held.piece.facts.rows for held in whole.held), one.tally
    if "sequence_id" not in one.settings.columns:  # rows are numbered as in the whole dump
        renumbered = {name: worst.renumbered(tally.records[name], rows) for name in WORST}
        tally = replace(tally, records=tally.records | renumbered)
    return replace(whole, held=(*whole.held, *one.held), tally=whole.tally.merge(tally))


# ---------------------------------------------------------------- which pieces belong together

_ABSENT = object()


def differences(one: Settings, two: Settings) -> list[str]:
    """Say which settings differ, and how; only the presets that one of them lacks, if there are any."""
    alone = [name for name in one.presets | two.presets if not (name in one.presets and name in two.presets)]
    if alone:
        return [f"preset {name} is in only one of them" for name in alone]
    first, second = _flat(one), _flat(two)
    pairs = ((name, first.get(name, _ABSENT), second.get(name, _ABSENT)) for name in first | second)
    return [f"{name}: {_shown(a)} and {_shown(b)}" for name, a, b in pairs if a != b]


def _flat(settings: Settings) -> dict[str, object]:
    """Flatten all settings to one table, the presets key by key."""
    return {
        "seed": settings.seed,
        "replicates": settings.replicates,
        "group_by": settings.group_by,
        "columns made": settings.made,
        "order of the presets": list(settings.presets),
        **{f"column {ours}": theirs for ours, theirs in settings.columns.items()},
        **dict(_leaves({f"preset {name}": one for name, one in settings.presets.items()})),
    }


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Flatten tables within tables, and lists (rules of rejection) by number."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{name}.{key}".lstrip("."))


def _shown(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse_overlaps(held: Sequence[Held]) -> None:
    """Refuse files of the dump that two pieces read, and sequences of the long form that two pieces share."""
    read_for: dict[str, str] = {}
    for file, one in held:
        for part in one.files:
            first = read_for.get(part.mark)
            if first is not None:
                where = f"{first}, which is given twice" if first == file else f"{first} and {file}"
                raise ResultError(f"{part.name} was read for {where}: its rows would count twice", ONCE)
            read_for[part.mark] = file
    begins = {one.ends[0]: at for at, (_, one) in enumerate(held) if one.ends}
    for at, (file, one) in enumerate(held):
        other = begins.get(one.ends[1], at) if one.ends else at
        if other != at:
            raise ResultError(f"{file} ends with a sequence that goes on in {held[other].file}", BETWEEN)


# ---------------------------------------------------------------- what comes of it


@np.errstate(all="ignore")
def summary(whole: TallyFile) -> Result:
    """Read out every number of the report; presets that cannot be computed are left out, with a note."""
    where: dict[Label, list[str]] = {}
    for file, one in whole.held:
        for step in one.steps:
            where.setdefault(step, []).append(file)
    broken = {step: files for step, files in where.items() if len(files) > 1}
    known = [piece.groups for _, piece in whole.held if piece.groups is not None]
    every = [key for keys in known for key in keys]
    separate = len(known) == len(whole.held) and len(set(every)) == len(every)
    if whole.settings.made and broken and not separate:
        what = f"advantages were made of the rewards of each group, and {_steps(broken)}: a group may be torn"
        raise ResultError(what, f"{WHOLE}; or write advantages into the dump")
    requested, notes = whole.settings.requested(whole.name), list[str]()
    torn = [one for one in requested if broken and Needs.of((one,), rewards=False)]
    if torn:
        names = ", ".join(one.name for one in torn)
        why = f"They judge a token by all of its step, and {_steps(broken)}; {WHOLE}"
        notes = [f"left out: {names}. {why}"]
    pieces = [one.piece for one in whole.held]
    try:
        counts = readout.counts(whole.tally)
        return readout.summary(
            whole.settings.study(whole.name),
            whole.tally,
            [one for one in requested if one not in torn],
            _facts(pieces, counts, notes),
            _run(pieces, counts),
        )
    except (ArithmeticError, ValueError) as error:
        files = _some(list(dict.fromkeys(one.file for one in whole.held)))
        raise ResultError(f"{files}: the numbers contradict each other", AGAIN) from error


def _steps(broken: dict[Label, list[str]]) -> str:
    files = list(dict.fromkeys(file for where in broken.values() for file in where))
    if list(broken) == [ONE]:
        return f"the dump, which has no step and is one, lies in {len(files)} pieces ({_some(files)})"
    return f"rows of step {_some(list(broken))} lie in more than one piece ({_some(files)})"


def _some(words: Sequence[str]) -> str:
    rest = f" and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    return ", ".join(words[:MOST_NAMED]) + rest


def _facts(pieces: Sequence[Piece], counts: Mapping[str, object], left_out: Sequence[str]) -> DumpFacts:
    """Combine the facts of all parts, in the order of the dump; `counts` are of the merged tally."""
    parts = [one.facts for one in pieces]
    signs: dict[str, Count] = {}
    for one in pieces:
        for column, seen in one.signs.items():
            signs.setdefault(column, Count()).add(Count(seen.tokens, seen.positive, first=seen.first))
    skipped = [example for part in parts for example in part.skipped.examples]
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return parts[0].model_copy(
        update={
            **counts,
            "files": [name for part in parts for name in part.files],
            "rows": sum(part.rows for part in parts),
            "others": list(dict.fromkeys(name for part in parts for name in part.others)),
            "ignored": _ignored(parts),
            "provenance": _provenance([part.provenance for part in parts]),
            "skipped": Skipped(count=sum(part.skipped.count for part in parts), examples=skipped[:EXAMPLES]),
            "notes": [*left_out, *notes, *remarks(signs)],
        }
    )


def _ignored(parts: Sequence[DumpFacts]) -> list[str] | None:
    """Return the columns that are read of no part; None where a part does not say."""
    if any(part.ignored is None for part in parts):
        return None
    read = {name for part in parts for name in (*part.columns.values(), *part.others)}
    every = dict.fromkeys(name for part in parts for name in part.ignored or ())
    return [name for name in every if name not in read]


def _provenance(result: Sequence[dict[str, object]]) -> dict[str, object]:
    """Combine provenance as if all files were read at once; lists that differ between parts are merged."""
    agreed = {key: value for key, value in result[0].items() if all(one.get(key) == value for one in result)}
    apart = ((key, many) for one in result for key, many in one.items() if key not in agreed)
    listed = ((key, many if isinstance(many, list) else [many]) for key, many in apart)
    return agreed | merged({key: value} for key, many in listed for value in many)


def _run(pieces: Sequence[Piece], counts: Mapping[str, int]) -> Run:
    """Combine how the numbers were made: seconds are summed, peak memory is the largest of any part."""
    runs = [one.run for one in pieces]
    return runs[0].model_copy(
        update={
            "command": "merge",
            "version": version("offpol-diag"),
            "device": ", ".join(dict.fromkeys(one.device for one in runs)),
            "engine": ", ".join(dict.fromkeys(one.engine for one in runs)),
            "tokens": counts["tokens"],
            "sequences": counts["sequences"],
            "peak_rss_bytes": max(one.peak_rss_bytes for one in runs),
            "seconds": dict(sum((Counter(one.seconds) for one in runs), Counter())),
        }
    )
