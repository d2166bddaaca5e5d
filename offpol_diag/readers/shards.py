"""A dump cut into dumps: row groups that can be read apart, and are together the whole.

Where to cut depends on the dump alone, never on how many will read it, so that its numbers do not either. In
the long form the rows of a sequence may lie anywhere, so a cut is made only where the footers say that no id
can be on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from offpol_diag.readers import columns
from offpol_diag.readers.dump import Dump
from offpol_diag.readers.files import READ_ERRORS, Part, chunk_of, open_again
from offpol_diag.readers.locations import Location
from offpol_diag.readers.sizes import ROOM

FEW = (1, 2, 4, 8, 12, 16)
"""Pieces of a dump, so that the cores of most machines are done at the same time."""
LEAST, MOST_TOKENS = 1 << 20, 1 << 21
"""Tokens: of fewer, what a piece costs beside its tokens is felt; with more, too little is shared out."""
BYTES = 32 << 20
"""Of the files, in one shard: a few seconds of work for a core."""
MOST = 4096
"""Shards: a dump that would have more is cut into larger ones."""


@dataclass(frozen=True)
class Span:
    """Row groups of a dump, from one to before another, counted through all its files.

    Attributes:
        rows: of a single row group, those from one to before another, counted from its first; None for all.
    """

    begin: int
    end: int
    rows: tuple[int, int] | None = None


def spans(dump: Dump, size: int = BYTES) -> list[Span]:
    """Where to cut a dump: every row group once, in order; at least one span.

    Args:
        dump: what is to be cut.
        size: bytes of the files in a span, at least, save in the last; it has one row group or more.
    """
    size = max(size, dump.info.bytes // MOST)
    safe = _safe(dump)
    found, begin, held = [], 0, 0.0
    for group, weight in enumerate(_bytes(dump)):
        if held >= size and safe[group]:
            found.append(Span(begin, group))
            begin, held = group, 0.0
        held += weight
    return [*found, Span(begin, len(safe))]


def pieces(dump: Dump, least: int = LEAST) -> list[Span]:
    """Where to cut a dump for the cores of one machine; at least one span.

    Small row groups go together, and one that is larger than a piece is cut between its rows.

    Args:
        dump: what is to be cut.
        least: tokens of a piece of a small dump, about; one that holds little more is not cut.

    Raises:
        DumpError: a file does not open any more.
    """
    weights = dump.group_tokens
    size = _size(sum(weights), least)
    found, begin, held = list[Span](), 0, 0.0
    groups = [rows for part in dump.parts for rows in part.group_rows]
    for group, (rows, weight, safe) in enumerate(zip(groups, weights, _safe(dump), strict=True)):
        if held and safe and held + weight / 2 > size:
            found.append(Span(begin, group))
            begin, held = group, 0.0
        many = 1 if dump.long or held else min(round(weight / size), rows)
        if many > 1:
            found += _parted(group, rows, many)
            begin = group + 1
        else:
            held += weight
    return [*found, Span(begin, len(groups))] if begin < len(groups) else found


def _size(tokens: float, least: int) -> float:
    """Tokens of a piece of a dump of so many."""
    many = tokens / (ROOM * least)
    few = next((some for some in FEW if many <= some), FEW[-1])
    return max(min(tokens / few, max(MOST_TOKENS, least)), 1.0)


def _parted(group: int, rows: int, many: int) -> Iterator[Span]:
    cuts = [rows * i // many for i in range(many + 1)]
    return (Span(group, group + 1, between) for between in pairwise(cuts))


def cut(dump: Dump, span: Span) -> Dump:
    """The row groups of a span as a dump, which may be read in another process and another folder.

    Rows are numbered as in the whole, and files go by the same names. That no token is left in it is no
    error; `Dump.notice` tells the whole what all shards noticed.
    """
    parts, before, first = [], 0, 0
    for part in dump.parts:
        count = len(part.group_rows)
        begin, end = max(span.begin - first, 0), min(span.end - first, count)
        if begin < end:
            parts.append(replace(part, path=_absolute(part.path), span=(begin, end), between=span.rows))
        elif not parts:
            before += sum(part.group_rows)
        first += count
    return dump.shard(parts, before)


def shards(dump: Dump, size: int = BYTES) -> list[Dump]:
    """The dump in pieces, in order: `spans`, each `cut`."""
    return [cut(dump, span) for span in spans(dump, size)]


def of_batches(dump: Dump, least: int = 1) -> list[Dump]:
    """The dump in pieces of about a batch, or of so many bytes of its files where that is more."""
    share = dump.batch_tokens / max(dump.tokens, 1.0)
    return shards(dump, max(least, int(share * dump.info.bytes)))


def _absolute(path: Location) -> Location:
    return path if path.far else replace(path, path=str(Path(path.path).absolute()))


def _bytes(dump: Dump) -> Iterator[float]:
    """The bytes of each row group: a share of its file's by its rows."""
    for part in dump.parts:
        for rows in part.group_rows:
            yield part.bytes * rows / part.rows


# ---------------------------------------------------------------- the long form


def _safe(dump: Dump) -> list[bool]:
    """Whether a cut before each row group parts no sequence."""
    groups = sum(len(part.group_rows) for part in dump.parts)
    if not dump.long:
        return [True] * groups
    try:
        return _apart([bounds for part in dump.parts for bounds in _bounds(part, dump)])
    except (
        TypeError,
        *READ_ERRORS,
    ):  # ids that do not compare or have no bounds, or damage, told when it is read
        return [False] * groups


def _apart(bounds: Sequence[tuple[Any, Any]]) -> list[bool]:
    """Whether all ids before each row group are below all from there on."""
    lowest = list(_running(min, [low for low, _ in reversed(bounds)]))[::-1]
    highest = list(_running(max, [high for _, high in bounds]))
    return [False, *(bool(high < low) for high, low in zip(highest, lowest[1:], strict=False))]


def _running(pick: Any, values: Sequence[Any]) -> Iterator[Any]:
    so_far = values[0]
    for value in values:
        so_far = pick(so_far, value)
        yield so_far


def _bounds(part: Part, dump: Dump) -> Iterable[tuple[Any, Any]]:
    """The smallest and the largest id of each row group, by the file's footer.

    Raises:
        ValueError: it does not say.
    """
    name = dump.info.columns[columns.SEQUENCE]
    if name in part.partitions:
        value = part.partitions[name].as_py()
        return [(value, value)] * len(part.group_rows)
    with open_again(part.path) as parquet:
        paths = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
        leaf = paths.index(name)
        found = [chunk_of(parquet, group, leaf).statistics for group in range(len(part.group_rows))]
    if any(statistics is None or not statistics.has_min_max for statistics in found):
        raise ValueError(f"{part.path}: no bounds of {name!r}")
    return [(statistics.min, statistics.max) for statistics in found]
