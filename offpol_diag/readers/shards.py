"""Cut a dump into dumps: row groups, or parts of one, that can be read apart and are together the whole.

Where to cut depends on the dump alone, never on how many will read it, so that its numbers do not either. In
the long form the rows of a sequence may lie anywhere, so a cut is made only where the footers say that no id
can be on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from offpol_diag.batch import Batch
from offpol_diag.readers import columns
from offpol_diag.readers.dump import ROOM, Dump, Noticed
from offpol_diag.readers.parquet import READ_ERRORS, Part, chunk_of, open_again
from offpol_diag.readers.remote import Location

FEW = (1, 2, 4, 8, 12, 16)
"""Pieces of a dump, so that the cores of most machines are done at the same time."""
LEAST, MOST_TOKENS = 1 << 20, 1 << 21
"""Tokens of a piece: of fewer, its fixed cost is felt; with more, too little is shared out."""
BYTES = 32 << 20
"""Of the files, in one shard: a few seconds of work for a core."""
MOST = 4096
"""Shards: a dump that would have more is cut into larger ones."""
LARGE = 2
"""Batches in a row group, from which on threads do not hold it whole."""


@dataclass(frozen=True)
class Span:
    """Row groups of a dump, from one to before another, counted through all its files.

    Attributes:
        begin: the first.
        end: the one after the last.
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
    # The bytes of a row group are a share of its file's by its rows.
    weights = (part.bytes * rows / part.rows for part in dump.parts for rows in part.group_rows)
    return _grouped(weights, _safe(dump), lambda held, _: held >= size)


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
    many = sum(weights) / (ROOM * least)
    few = next((some for some in FEW if many <= some), FEW[-1])
    size = max(min(sum(weights) / few, max(MOST_TOKENS, least)), 1.0)
    rows = [rows for part in dump.parts for rows in part.group_rows]
    parts = [1 if dump.long else min(round(w / size), n) for w, n in zip(weights, rows, strict=True)]
    return _grouped(weights, _safe(dump), lambda held, weight: held + weight / 2 > size, rows, parts)


def _grouped(
    weights: Iterable[float],
    safe: Sequence[bool],
    full: Callable[[float, float], bool],
    rows: Sequence[int] = (),
    parts: Sequence[int] = (),
) -> list[Span]:
    """Spans of row groups.

    Args:
        weights: of each row group.
        safe: whether a cut before it parts no sequence.
        full: whether a span that weighs so much ends before a row group of such a weight.
        rows: of each row group that may be cut.
        parts: into how many it is cut where it begins a span.
    """
    found, begin, held = list[Span](), 0, 0.0
    for group, weight in enumerate(weights):
        if held and safe[group] and full(held, weight):
            found.append(Span(begin, group))
            begin, held = group, 0.0
        if not held and parts and parts[group] > 1:
            cuts = [rows[group] * i // parts[group] for i in range(parts[group] + 1)]
            found += [Span(group, group + 1, between) for between in pairwise(cuts)]
            begin = group + 1
        else:
            held += weight
    return [*found, Span(begin, len(safe))] if begin < len(safe) else found


def cut(dump: Dump, span: Span) -> Dump:
    """The row groups of a span as a dump, which may be read in another process and another folder.

    Rows are numbered as in the whole, and files go by the same names. That no token is left in it is no
    error; `Dump.notice` gives the whole what all shards noticed.
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
    return path if path.remote else replace(path, path=str(Path(path.path).absolute()))


# ---------------------------------------------------------------- the long form


def _safe(dump: Dump) -> list[bool]:
    """Whether a cut before each row group parts no sequence."""
    groups = sum(len(part.group_rows) for part in dump.parts)
    if not dump.long:
        return [True] * groups
    try:
        bounds = [bounds for part in dump.parts for bounds in _bounds(part, dump)]
        lowest = list(accumulate((low for low, _ in reversed(bounds)), min))[::-1]
        highest = accumulate((high for _, high in bounds), max)
        return [False, *(bool(high < low) for high, low in zip(highest, lowest[1:], strict=False))]
    except (TypeError, *READ_ERRORS):  # ids that do not compare or have no bounds, or damage, found when read
        return [False] * groups


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


# ---------------------------------------------------------------- several threads


def ahead(dump: Dump, threads: int, progress: Callable[[int], None]) -> Iterator[Batch]:
    """Read with several threads: every batch in order, as `Dump.batches` of even ones.

    Parquet is decoded without the interpreter's lock, so threads share that work out, for a GPU that computes
    a batch in less time than a core decodes it. Where the dump is cut depends on it alone, so the number of
    threads changes no batch. As many batches are held as there are threads, and the one that was taken. Row
    groups of many batches are read by one thread: their rows are reached only by decoding those before them.

    Args:
        dump: what is read; it has what the reading noticed once the last batch was taken.
        threads: how many.
        progress: called in the thread of the caller with the number of rows just taken.

    Raises:
        DumpError: as `Dump.batches`; the first by the order of the rows.
    """
    if max(dump.group_tokens) > LARGE * dump.batch_tokens:
        yield from dump.batches(progress, even=True)
        return
    noticed: list[Noticed] = []
    with ThreadPoolExecutor(threads, "offpol-diag-reader") as pool:
        waiting: deque[Future[tuple[list[Batch], Noticed]]] = deque()

        def taken() -> Iterator[Batch]:
            batches, seen = waiting.popleft().result()
            noticed.append(seen)
            while batches:
                yield batches.pop(0)
            progress(seen.rows)

        try:
            for shard in of_batches(dump):
                waiting.append(pool.submit(_read, shard))
                if len(waiting) >= threads:
                    yield from taken()
            while waiting:
                yield from taken()
        finally:
            for future in waiting:
                future.cancel()
    dump.notice(noticed)


def _read(shard: Dump) -> tuple[list[Batch], Noticed]:
    return list(shard.batches(even=True)), shard.noticed()
