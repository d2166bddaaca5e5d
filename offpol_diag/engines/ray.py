"""A Ray cluster: one task per shard of the dump, and a tree of tasks that merge what they leave.

The driver holds neither rows nor states: it submits tasks, a bounded number at a time, and hears their
reports. What is read together and merged together depends on the dump alone, so neither the size of the
cluster nor the order in which tasks end, nor a task that had to be run again, changes a bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from offpol_diag.engines.cluster import RETRIES, connected, failure, kind_of, library, slots
from offpol_diag.engines.engine import Clock, Each, Job, M, Progress
from offpol_diag.engines.tasks import Order, Report, Unread, merge, work
from offpol_diag.engines.travel import packed, unpacked
from offpol_diag.engines.tree import Place, Tree
from offpol_diag.errors import OffpolError
from offpol_diag.readers import Dump
from offpol_diag.readers.dump import Noticed
from offpol_diag.readers.shards import BYTES, Span, spans

AHEAD = 2
"""Tasks submitted for each that can run at once: enough to keep the cluster busy."""
IN_FLIGHT = 4096
"""Tasks submitted, at most."""
NAMED = {"max_retries": RETRIES, "name": "offpol-diag"}
SHARDS = {"cpu": BYTES, "cuda": 16 * BYTES}
"""Bytes of the files in one task, at least: one with a GPU has a process of its own to start."""


@dataclass
class Ray:
    """Tasks on a cluster that this process is connected to.

    Attributes:
        device: where the jobs run; with cuda every task takes a GPU, wherever Ray finds one.
        slots: tasks that can run at once.
        progress: called as tasks end.
        clock: told what all tasks spent.
        shard: bytes of the files in one task, at least.
        tasks: shards done so far, over all readings.
    """

    device: torch.device
    slots: int
    progress: Progress | None = None
    clock: Clock = field(default_factory=Clock)
    shard: int = BYTES
    tasks: int = 0

    @classmethod
    @contextmanager
    def on(cls, device: str, progress: Progress | None = None) -> Iterator[Ray]:
        """An engine on the cluster of RAY_ADDRESS, or on one that is started here and stopped at the end.

        Args:
            device: auto and cpu are the CPUs of the nodes, cuda a GPU for each task.
            progress: called with (rows done, rows in all).

        Raises:
            UsageError: Ray is not installed, or the device cannot be meant.
            ClusterError: no cluster answers, or it has no such device.
        """
        kind = kind_of(device)
        with connected():
            yield cls(torch.device(kind), slots(kind), progress, shard=SHARDS[kind])

    @property
    def name(self) -> str:
        """What a report says of it."""
        return f"ray, {self.tasks} tasks"

    @property
    def beside(self) -> int:
        """`Engine.beside`: none."""
        return 0

    def task(self, function: Callable[..., object], **told: Any) -> Any:
        """A function as a task that reads a shard, with what it takes of its node in Ray's books.

        A process that had one GPU and is given another still computes on the first: CUDA does not look again.
        So no process has a second task with a GPU.
        """
        own = self.device.type == "cuda"
        once = library().remote(max_calls=1)(function) if own else library().remote(function)
        return once.options(num_cpus=1, num_gpus=int(own), scheduling_strategy="SPREAD", **NAMED, **told)

    def heard(self, report: Report) -> None:
        """Count what a task says it spent."""
        self.tasks += 1
        self.clock.read += report.seconds[0]
        self.clock.compute += report.seconds[1]

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`; a task that is lost is run again."""
        order = Order(dump, job, each.pick if each else None, self.device.type)
        reading = _Reading(self, spans(dump, self.shard), dump.rows, order, each)
        try:
            reading.run()
            dump.notice(reading.noticed())
            found: M | None = reading.result()
            return found
        finally:
            reading.cancel()


class _Reading:
    """One reading of a dump by tasks: which are under way, and what is there of the result."""

    def __init__(
        self, engine: Ray, cuts: list[Span], rows: int, order: Order, each: Each[Any] | None
    ) -> None:
        self._engine, self._cuts, self._rows, self._each = engine, cuts, rows, each
        self._ahead = min(AHEAD * engine.slots, IN_FLIGHT)
        self._tree: Tree[Any] = Tree(len(cuts))
        self._reports: dict[int, Report] = {}
        self._picked: dict[int, Any] = {}
        self._under_way: dict[Any, tuple[Place, Any]] = {}
        self._next = self._passed = 0
        self._failed: tuple[int, OffpolError] | None = None
        self._ray = library()
        self._work = engine.task(work, num_returns=3, retry_exceptions=[Unread])
        self._merge = self._ray.remote(merge).options(num_cpus=1, **NAMED)
        self._order = self._ray.put(packed(order))

    def run(self) -> None:
        """Until every shard is read and merged.

        Raises:
            OffpolError: what a reading from the first row on would have met first.
        """
        self._submit()
        while self._under_way:
            done, _ = self._ray.wait(list(self._under_way), num_returns=1, fetch_local=False)
            self._take(done[0])
            self._submit()
        if self._failed:
            raise self._failed[1]

    def _submit(self) -> None:
        """More shards, as long as few are under way and none has failed."""
        while self._next < len(self._cuts) and not self._failed and self._has_room():
            state, picked, report = self._work.remote(
                version("offpol-diag"), self._order, self._cuts[self._next]
            )
            self._under_way[report] = Place(0, self._next), state
            if self._each:
                self._picked[self._next] = picked
            self._next += 1

    def _has_room(self) -> bool:
        """Rows that wait for those of an earlier shard are bounded as well."""
        waiting = self._next - self._passed if self._each else 0
        return max(len(self._under_way), waiting) < self._ahead

    def _take(self, ended: Any) -> None:
        place, state = self._under_way.pop(ended)
        if place.level == 0 and not self._heard(place.index, ended):
            return
        step = self._tree.put(place, state)
        if step:
            above, states = step
            merged = self._merge.remote(*states)
            self._under_way[merged] = above, merged

    def _heard(self, index: int, ended: Any) -> bool:
        """Take a report; whether the shard was read."""
        report = self._report(ended)
        if report.error:
            self._fail(index, report.error)
            return False
        self._reports[index] = report
        self._engine.heard(report)
        self._tell()
        self._pass_on()
        return True

    def _report(self, ended: Any) -> Report:
        try:
            report: Report = self._ray.get(ended)
        except self._ray.exceptions.RayError as error:
            return Report(error=_told(error))
        return report

    def _fail(self, index: int, error: OffpolError) -> None:
        """The first shard that fails decides: those before it go on, all others end."""
        if self._failed is None or index < self._failed[0]:
            self._failed = index, error
        before = {
            ref for ref, (place, _) in self._under_way.items() if place.level == 0 and place.index < index
        }
        self.cancel(keep=before)

    def cancel(self, keep: frozenset[Any] | set[Any] = frozenset()) -> None:
        """End what is under way."""
        for ref in [ref for ref in self._under_way if ref not in keep]:
            del self._under_way[ref]
            self._ray.cancel(ref)

    def _tell(self) -> None:
        if self._engine.progress:
            self._engine.progress(sum(report.rows for report in self._reports.values()), self._rows)

    def _pass_on(self) -> None:
        """What was picked of the next shards, in order, if they are there."""
        while self._each and self._passed in self._reports:
            for one in self._ray.get(self._picked.pop(self._passed)):
                self._each.use(one)
            self._passed += 1

    def noticed(self) -> list[Noticed]:
        """What the readers of all shards noticed, in order."""
        found = [self._reports[index].noticed for index in range(len(self._cuts))]
        return [one for one in found if one is not None]

    def result(self) -> Any:
        """The merged result."""
        try:
            return unpacked(self._ray.get(self._tree.root))
        except self._ray.exceptions.RayError as error:
            raise _told(error) from error


def _told(error: Exception) -> OffpolError:
    """What the user can do about the end of a task; a bug is raised as it is."""
    told = failure(error)
    if told is None:
        raise error
    return told
