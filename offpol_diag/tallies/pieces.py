"""What is known of each piece of a dump: what was read, and what tells whether two pieces overlap.

A piece is what one `analyze --tally` read. What a trainer batch settles before its tokens are judged (the
cuts of M2PO, smoothed tails, advantages made of rewards) was settled by the rows of the piece: it is what the
whole dump would say only if no other piece holds rows of that trainer batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple, Self

import pyarrow as pa
import torch
from pydantic import Field, model_validator

from offpol_diag.accumulators import Places
from offpol_diag.readers import Dump
from offpol_diag.readers.alike import value
from offpol_diag.readers.files import Part, merged, open_again
from offpol_diag.readers.signs import Count, remarks
from offpol_diag.scope import Label
from offpol_diag.settle import Found
from offpol_diag.summary import DumpFacts, Model, Run, Skipped
from offpol_diag.tallies.arrays import Ints
from offpol_diag.tallies.states import require
from offpol_diag.tally import Tally

MOST_GROUPS = 1 << 16
"""Groups of rewards that a piece lists; of a piece with more only the steps are known."""
MOST_GROUPS_IN_ALL = 1 << 20
"""Groups that all pieces of a file list together; of more only the steps are written."""
EXAMPLES = 5
LARGE = 2**62


class File(Model):
    """A file that was read whole.

    Attributes:
        name: as it was read.
        mark: a digest of its Parquet footer: sizes, offsets and statistics of all columns.
    """

    name: str
    mark: str


class Signs(Model):
    """Positive values of one column."""

    tokens: int = Field(ge=0, lt=LARGE)
    positive: int = Field(ge=0, lt=LARGE)
    first: str

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(self.positive <= self.tokens, "no more tokens than there are can be positive")
        return self


class Piece(Model):
    """What one analysis read.

    Attributes:
        facts: of the dump, but for the remarks that `signs` makes.
        run: how the numbers were made.
        files: those with rows.
        signs: column → its positive values.
        steps: the trainer batches that have rows in it.
        ends: in the long form, digests of the ids of the first and the last sequence.
        groups: keys of the groups whose rewards were made into advantages, where they were and are few.
    """

    facts: DumpFacts
    run: Run
    files: list[File]
    signs: dict[str, Signs]
    steps: list[str]
    ends: tuple[str, str] | None = None
    groups: Ints | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(len(set(self.steps)) == len(self.steps), "a step stands twice")
        require(self.groups is None or self.groups.ndim == 1, "groups must be of shape [G]")
        counts = (self.facts.rows, self.facts.skipped.count, self.run.peak_rss_bytes)
        require(all(0 <= count < LARGE for count in counts), "a count is not negative, and below 2^62")
        require(all(0 <= one < LARGE for one in self.run.seconds.values()), "seconds are not negative")
        return self


def piece(dump: Dump, tally: Tally, found: Found, facts: DumpFacts, run: Run) -> Piece:
    """Of a dump that was read, and what came of it."""
    normal = tally.states["normal"]
    assert isinstance(normal, Places)
    said = remarks(dump.signs)
    keys = found.rewards.keys.cpu() if found.rewards else None
    return Piece(
        facts=facts.model_copy(update={"notes": [note for note in facts.notes if note not in said]}),
        run=run,
        files=[File(name=str(part.path), mark=_mark(part)) for part in dump.parts],
        signs={
            column: Signs(tokens=count.tokens, positive=count.positive, first=count.first)
            for column, count in dump.signs.items()
        },
        steps=sorted(normal.sums),
        ends=_ends(dump),
        groups=keys if keys is not None and len(keys) <= MOST_GROUPS else None,
    )


def _mark(part: Part) -> str:
    with open_again(part.path) as parquet:
        footer = pa.BufferOutputStream()
        parquet.metadata.write_metadata_file(footer)
    return blake2b(footer.getvalue(), digest_size=16).hexdigest()


def _ends(dump: Dump) -> tuple[str, str] | None:
    """Whose the first and the last token of a dump in the long form are."""
    if not dump.long:
        return None
    name = dump.info.columns["sequence_id"]
    return _id(dump.parts[0], name, last=False), _id(dump.parts[-1], name, last=True)


def _id(part: Part, name: str, last: bool) -> str:
    """A digest of the id in the first or the last row of a file that has rows."""
    found = part.partitions.get(name)
    if found is None:
        filled = [group for group, rows in enumerate(part.group_rows) if rows]
        with open_again(part.path) as parquet:
            ids = parquet.read_row_group(filled[-1 if last else 0], columns=[name]).column(name)
        found = ids[-1 if last else 0]
    return blake2b(str(value(found)).encode(), digest_size=16).hexdigest()


# ---------------------------------------------------------------- which pieces overlap


class Held(NamedTuple):
    """A piece, and the tally file that it came from."""

    file: str
    piece: Piece


def twice(held: Sequence[Held]) -> Iterator[tuple[str, str, str]]:
    """Files of the dump that two pieces read: its name, and the two tally files."""
    first: dict[str, str] = {}
    for file, one in held:
        for read in one.files:
            if read.mark in first:
                yield read.name, first[read.mark], file
            first.setdefault(read.mark, file)


def torn(held: Sequence[Held]) -> Iterator[tuple[str, str]]:
    """In the long form: pieces that end with the sequence that another begins with, by their tally files."""
    begins = {one.ends[0]: at for at, (_, one) in enumerate(held) if one.ends}
    for at, (file, one) in enumerate(held):
        other = begins.get(one.ends[1], at) if one.ends else at
        if other != at:
            yield file, held[other].file


def shared_steps(held: Sequence[Held]) -> dict[Label, list[str]]:
    """Trainer batches with rows in more than one piece → the tally files of those pieces."""
    where: dict[Label, list[str]] = {}
    for file, one in held:
        for step in one.steps:
            where.setdefault(step, []).append(file)
    return {step: files for step, files in where.items() if len(files) > 1}


def listed(held: Sequence[Held]) -> list[Piece]:
    """The pieces as they are written: without their groups where those are too many."""
    many = sum(0 if one.groups is None else len(one.groups) for _, one in held)
    forget = {"groups": None} if many > MOST_GROUPS_IN_ALL else {}
    return [one.model_copy(update=forget) for _, one in held]


def groups_apart(held: Sequence[Held]) -> bool:
    """Whether the groups of every piece are known, and none of them lies in two pieces."""
    known = [one.groups for _, one in held if one.groups is not None]
    if len(known) < len(held):
        return False
    every = torch.cat(known)
    return len(torch.unique(every)) == len(every)


# ---------------------------------------------------------------- the facts of all pieces together


def facts(pieces: Sequence[Piece], counts: Mapping[str, object], more: Iterable[str] = ()) -> DumpFacts:
    """What was read in all pieces; `counts` are those fields that the merged tally knows.

    Args:
        pieces: in the order of the dump.
        counts: from `readout.counts`.
        more: further notes.
    """
    parts = [one.facts for one in pieces]
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return parts[0].model_copy(
        update={
            **counts,
            "files": [name for part in parts for name in part.files],
            "rows": sum(part.rows for part in parts),
            "provenance": _provenance([part.provenance for part in parts]),
            "skipped": _skipped([part.skipped for part in parts]),
            "notes": [*more, *notes, *remarks(_signs(pieces))],
        }
    )


def _signs(pieces: Sequence[Piece]) -> dict[str, Count]:
    found: dict[str, Count] = {}
    for one in pieces:
        for column, seen in one.signs.items():
            so_far = found.setdefault(column, Count())
            so_far.tokens += seen.tokens
            so_far.positive += seen.positive
            so_far.first = so_far.first or seen.first
    return found


def _skipped(all_skipped: Sequence[Skipped]) -> Skipped:
    examples = [example for skipped in all_skipped for example in skipped.examples]
    return Skipped(count=sum(skipped.count for skipped in all_skipped), examples=examples[:EXAMPLES])


def _provenance(found: Sequence[dict[str, object]]) -> dict[str, object]:
    """As of all files at once: a list that not all pieces have is what the files of a piece said in turn."""
    agreed = {key for key in found[0] if all(one.get(key) == found[0][key] for one in found)}
    whole = {key: value for key, value in found[0].items() if key in agreed}
    apart = (
        {key: value}
        for one in found
        for key, many in one.items()
        if key not in agreed
        for value in _listed(many)
    )
    return whole | merged(apart)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def run(pieces: Sequence[Piece], counts: Mapping[str, int], version: str) -> Run:
    """How the numbers of all pieces were made: seconds added up, the most memory that any of them held."""
    runs = [one.run for one in pieces]
    seconds = sum((Counter(one.seconds) for one in runs), Counter())
    return runs[0].model_copy(
        update={
            "command": "merge",
            "version": version,
            "device": _all(runs, lambda one: one.device),
            "engine": _all(runs, lambda one: one.engine),
            "tokens": counts["tokens"],
            "sequences": counts["sequences"],
            "peak_rss_bytes": max(one.peak_rss_bytes for one in runs),
            "seconds": dict(seconds),
        }
    )


def _all(runs: Sequence[Run], of: Callable[[Run], str]) -> str:
    return ", ".join(dict.fromkeys(map(of, runs)))
