"""A dump that several threads read: batches come in the order of its rows, and as if one thread had read it.

Parquet is decoded without the interpreter's lock, so threads share that work out. For a GPU, which computes a
batch in less time than a core decodes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from offpol_diag.batch import Batch
from offpol_diag.readers.dump import Dump, Noticed, Progress
from offpol_diag.readers.shards import of_batches

LARGE = 2
"""Batches in a row group, from which on it is not held whole."""

Read = tuple[list[Batch], Noticed]


def ahead(dump: Dump, threads: int, progress: Progress) -> Iterator[Batch]:
    """Every batch, as `Dump.batches` of even ones.

    Where the dump is cut depends on it alone, so the number of threads changes no batch. As many batches are
    held as there are threads, and the one that was taken. Row groups of many batches are read by one thread:
    their rows can be reached only by decoding those before them.

    Args:
        dump: what is read; it knows what the reading noticed when the last batch was taken.
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
        waiting: deque[Future[Read]] = deque()
        try:
            for shard in of_batches(dump):
                waiting.append(pool.submit(_read, shard))
                if len(waiting) >= threads:
                    yield from _taken(waiting, noticed, progress)
            while waiting:
                yield from _taken(waiting, noticed, progress)
        finally:
            for future in waiting:
                future.cancel()
    dump.notice(noticed)


def _read(shard: Dump) -> Read:
    return list(shard.batches(even=True)), shard.noticed()


def _taken(waiting: deque[Future[Read]], noticed: list[Noticed], progress: Progress) -> Iterator[Batch]:
    batches, seen = waiting.popleft().result()
    noticed.append(seen)
    while batches:
        yield batches.pop(0)
    progress(seen.rows)
