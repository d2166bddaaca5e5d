"""What a task on a cluster does: one shard of a dump on one core or one GPU, or a merge of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import torch
from threadpoolctl import threadpool_limits

from offpol_diag.engines.engine import Each, Job
from offpol_diag.engines.local import Local
from offpol_diag.engines.travel import packed, unpacked
from offpol_diag.errors import ClusterError, DumpError, OffpolError
from offpol_diag.readers import Dump
from offpol_diag.readers.dump import Noticed
from offpol_diag.readers.shards import Span, cut


@dataclass(frozen=True)
class Order:
    """What is to be done with every shard of a dump.

    Attributes:
        dump: the whole.
        job: done with every batch.
        pick: what of a batch's result goes back beside the merged state; None for nothing.
        device: cpu or cuda.
    """

    dump: Dump
    job: Job[Any]
    pick: Callable[[Any], Any] | None
    device: str


@dataclass(frozen=True)
class Report:
    """What a task says of its shard; small, whatever the shard.

    Attributes:
        noticed: by the reader; None where the task failed.
        rows: of the files.
        seconds: reading, computing.
        error: why it failed, where the user can do something about it.
    """

    noticed: Noticed | None = None
    rows: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    error: OffpolError | None = None


Result = tuple[bytes, list[Any], Report]
"""The merged state, packed; what was picked of every batch, in order; the report."""


class Unread(Exception):
    """A shard could not be read, and may be readable the next time; holds the error."""

    def __init__(self, error: OffpolError) -> None:
        super().__init__(error)
        self.error = error


def work(ours: str, order: bytes, span: Span) -> Result:
    """One shard, read and merged in one thread.

    Args:
        ours: the version that asks.
        order: an `Order`, packed.
        span: which shard.

    Raises:
        Unread: reading failed for a cause that may pass.
    """
    theirs = version("offpol-diag")
    if theirs != ours:
        return _failed(ClusterError(f"a node has offpol-diag {theirs}, and this is {ours}", ALIKE))
    be_one_thread()
    todo: Order = unpacked(order)
    try:
        return _done(todo, cut(todo.dump, span))
    except OffpolError as error:
        if may_pass(error):
            raise Unread(error) from error
        return _failed(error)


ALIKE = "install the same version on all nodes, or numbers of two definitions would be merged"


def _done(todo: Order, shard: Dump) -> Result:
    picked: list[Any] = []
    each = Each(todo.pick, picked.append) if todo.pick else None
    engine, rows = Local(torch.device(todo.device)), shard.rows
    state = engine.reduce(shard, todo.job, each)
    seconds = engine.clock.read, engine.clock.compute
    return packed(state), picked, Report(shard.noticed(), rows, seconds)


def _failed(error: OffpolError) -> Result:
    return b"", [], Report(error=error)


def be_one_thread() -> None:
    """A task has one core: threads of libraries would take those of other tasks."""
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    threadpool_limits(1, user_api="blas")


def may_pass(error: OffpolError) -> bool:
    """Whether a dump could not be read because of what a disk or a network did."""
    return isinstance(error, DumpError) and any(isinstance(cause, OSError) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


def merge(*states: bytes) -> bytes:
    """Packed states merged in their order; None where all are."""
    found = [state for state in map(unpacked, states) if state is not None]
    return packed(reduce(lambda one, two: one.merge(two), found) if found else None)
