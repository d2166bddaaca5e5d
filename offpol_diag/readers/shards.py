"""Divide a dump into parts of whole or partial row groups that can be read independently.

The division depends on the dump alone, so the number of readers does not change results. In the long form the
rows of a sequence may lie anywhere, so a cut is made only where the footers show that no id occurs on both
sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from offpol_diag.readers import parquet
from offpol_diag.readers.columns import SEQUENCE
from offpol_diag.readers.dump import ROOM, Dump

FEW = (1, 2, 4, 8, 12, 16)
"""Numbers of parts that divide evenly among the usual numbers of cores."""
LEAST, MOST_TOKENS = 1 << 20, 1 << 21
"""Limits on tokens per part: fewer make fixed costs dominate, more leave too few parts to distribute."""
BYTES = 32 << 20
"""File bytes per shard: a few seconds of work for a core."""
MOST = 4096
"""Maximum number of shards; larger dumps get larger shards."""


@dataclass(frozen=True)
class Span:
    """Row groups `begin` to before `end`, numbered through all files of a dump, or `rows` of a single one."""

    begin: int
    end: int
    rows: tuple[int, int] | None = None


def spans(dump: Dump, size: int = BYTES) -> list[Span]:
    """Divide a dump into spans of at least `size` file bytes, but the last; at least one span."""
    size = max(size, dump.info.bytes // MOST)
    # A row group's bytes are estimated from its share of the file's rows.
    weights = (part.bytes * rows / part.rows for part in dump.parts for rows in part.group_rows)
    return _grouped(weights, _safe(dump), lambda held, _: held >= size)


def pieces(dump: Dump, least: int = LEAST) -> list[Span]:
    """Divide a dump into spans of about `least` tokens or more, for the cores of one machine; at least one.

    Small row groups are grouped, and large ones are divided between rows.
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
    """Group row groups into spans.

    Args:
        weights: size of each row group.
        safe: for each row group, whether a cut before it splits no sequence.
        full: (size of the span, size of the next row group) → whether the span ends here.
        rows: rows of each row group that may be divided.
        parts: number of parts that each row group is divided into if it begins a span.
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
    """Return a span as a dump that can be read in another process and working directory.

    Rows and files keep their numbers and names. A span without tokens is no error.
    """
    parts, before, first = [], 0, 0
    for part in dump.parts:
        count = len(part.group_rows)
        begin, end = max(span.begin - first, 0), min(span.end - first, count)
        if begin < end:
            path = part.path
            if not path.store:
                path = replace(path, path=str(Path(path.path).absolute()))
            parts.append(replace(part, path=path, span=(begin, end), between=span.rows))
        elif not parts:
            before += sum(part.group_rows)
        first += count
    return dump.shard(parts, before)


# ---------------------------------------------------------------- the long form


def _safe(dump: Dump) -> list[bool]:
    """Return, for each row group, whether a cut before it splits no sequence."""
    groups = sum(len(part.group_rows) for part in dump.parts)
    if not dump.long:
        return [True] * groups
    try:
        name, bounds = dump.info.columns[SEQUENCE], list[tuple[Any, Any]]()
        for part in dump.parts:
            value = part.partitions[name].as_py() if name in part.partitions else None
            whole = [(value, value)] * len(part.group_rows)
            bounds += whole if name in part.partitions else parquet.bounds(part, name)
        lowest = list(accumulate((low for low, _ in reversed(bounds)), min))[::-1]
        highest = accumulate((high for _, high in bounds), max)
        return [False, *(bool(high < low) for high, low in zip(highest, lowest[1:], strict=False))]
    except (TypeError, *parquet.READ_ERRORS):  # ids without order or bounds
        return [False] * groups
