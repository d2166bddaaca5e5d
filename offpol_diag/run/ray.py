"""Run an analysis on a Ray cluster: one task per shard of the dump, and tasks that merge eight results each.

The driver holds neither rows nor states: it submits tasks, a bounded number at a time, and reads their
reports. Shards and merges depend on the dump alone, so neither the size of the cluster nor the order in which
tasks end, nor a task that had to be run again, changes a bit of the result.
"""

from __future__ import annotations

import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential
from threadpoolctl import threadpool_limits

from offpol_diag.errors import ClusterError, DumpError, OffpolError, UsageError
from offpol_diag.readers import Dump
from offpol_diag.readers.dump import Seen
from offpol_diag.readers.parquet import first_line
from offpol_diag.readers.stores import denied
from offpol_diag.run.cluster import TICK, Lifeline, connected, library, slots
from offpol_diag.run.devices import Choice
from offpol_diag.run.threads import Clock, Each, Job, M, Progress, Threads

RETRIES = 3
"""Maximum retries, by Ray when a worker died, and within a task when files could not be read."""
AHEAD = 2
"""Shards submitted per task slot, enough to keep the cluster busy."""
FAN = 8
"""Results merged per task."""
BYTES = 32 << 20
"""File bytes per shard: a few seconds of work for a core."""
SHARDS = {"cpu": BYTES, "cuda": 16 * BYTES}
"""Minimum file bytes per task; more with a GPU, where each task starts its own process."""


def remote(function: Callable[..., object], **options: Any) -> Any:
    """Return a function as a Ray task, which is retried when its worker dies."""
    return library().remote(num_cpus=1, max_retries=RETRIES, name="offpol-diag", **options)(function)


@dataclass
class Ray:
    """Engine of tasks on the connected cluster; with cuda every task gets one GPU.

    Attributes:
        slots: number of tasks that can run at once.
        shard: minimum file bytes per task.
        lifeline: checks that the cluster is there, or None.
        tasks: shards done so far, over all passes.
    """

    device: str
    slots: int
    progress: Progress | None = None
    lifeline: Lifeline | None = None
    clock: Clock = field(default_factory=Clock)
    shard: int = BYTES
    tasks: int = 0

    @classmethod
    @contextmanager
    def on(cls, device: str, progress: Progress | None = None) -> Iterator[Ray]:
        """Yield an engine on the cluster at RAY_ADDRESS, or on a local one that is stopped at the end.

        Device auto and cpu are the CPUs of the nodes, cuda a GPU for each task.

        Raises:
            UsageError: Ray is not installed, or the device is not allowed.
            ClusterError: no cluster answers, or it has no such device.
        """
        kind = {"auto": "cpu", "cpu": "cpu", "cuda": "cuda"}.get(device)
        if kind is None:
            hint = "with --engine ray say cpu, or cuda for a GPU per task"
            raise UsageError(f"device {device!r}: tasks run where Ray has room", hint)
        with connected():
            yield cls(kind, slots(kind), progress, Lifeline.now(), shard=SHARDS[kind])

    @property
    def name(self) -> str:
        """Name of the engine in a report."""
        return f"ray, {self.tasks} tasks"

    def task(self, function: Callable[..., object], **more: Any) -> Any:
        """Return a function as a Ray task that reads a shard, with its resource requirements.

        CUDA selects the GPU of a process only once, so a process that was later assigned another would still
        use the first. Hence each process runs at most one GPU task.
        """
        gpu = {"num_gpus": 1, "max_calls": 1} if self.device == "cuda" else {}
        return remote(function, scheduling_strategy="SPREAD", **gpu, **more)

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """Run one pass, see `Engine.reduce`; lost tasks are retried."""
        shards, done, seen = dump.shards(self.shard), 0, Seen()
        merges = _Merges(remote(_merge))
        order = job, each.pick if each else None
        for (of_shard, rows, clock), picked in self._reports(shards, order, merges):
            for one in self._fetched(picked) if each else ():
                each.use(one)  # type: ignore[union-attr]
            seen.add(of_shard)
            self.tasks += 1
            self.clock.read += clock.read
            self.clock.compute += clock.compute
            done += rows
            if self.progress:
                self.progress(done, dump.rows)
        dump.seen = seen
        dump.judge()
        found: M | None = pickle.loads(self._fetched(merges.root()))
        return found

    def _reports(self, shards: Sequence[Dump], order: Order, merges: _Merges) -> Iterator[tuple[Report, Any]]:
        """Yield every shard's report and a reference to its picked results, in order; few tasks run ahead."""
        work = self.task(_work, num_returns=3)
        given = version("offpol-diag"), self.device, RETRIES, library().put(order)
        waiting: deque[tuple[Any, Any]] = deque()
        try:
            for shard in shards:
                state, picked, report = work.remote(*given, shard)
                merges.add(state)
                waiting.append((report, picked))
                if len(waiting) >= AHEAD * self.slots:
                    yield self._fetched(waiting[0][0]), waiting.popleft()[1]
            while waiting:
                yield self._fetched(waiting[0][0]), waiting.popleft()[1]
        except ClusterError:  # other workers may have died as well: cancelling a task while Ray
            raise  # retries it can crash this process, and the tasks end when it disconnects
        except BaseException:
            reports = [report for report, _ in waiting]
            _, running = library().wait(reports, num_returns=len(reports), timeout=0) if reports else ([], [])
            for report in running:
                library().cancel(report)
            raise

    def _fetched(self, ref: Any) -> Any:
        """Return the result of a task; the cluster is checked meanwhile."""
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        while True:
            if self.lifeline:
                self.lifeline.check()
            try:
                return library().get(ref, timeout=TICK)
            except GetTimeoutError:
                continue
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, OffpolError):
                    raise cause from None
                if isinstance(cause, ImportError) or "failed to import on the worker" in str(error):
                    what = f"a node cannot import what a task needs ({first_line(cause)})"
                    raise ClusterError(what, "install the same offpol-diag on every node") from error
                raise
            except (RayError, ConnectionError) as error:
                if self.lifeline:
                    self.lifeline.check(at_once=True)
                raise ClusterError(
                    f"the cluster lost a task {RETRIES + 1} times ({first_line(error)})",
                    "a worker that is killed most often had too little memory: offer Ray fewer CPUs per node",
                ) from error


class _Merges:
    """A tree of merges whose shape depends only on the number of results: sums depend on their order.

    Merge tasks are submitted before their arguments exist; Ray runs them when these are ready.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._levels: list[list[Any]] = [[]]

    def add(self, state: Any, level: int = 0) -> None:
        """Add the next result of a level; level 0 holds results of shards."""
        self._levels += [[]] * (level == len(self._levels))
        states = self._levels[level] = [*self._levels[level], state]
        if len(states) == FAN:
            self._levels[level] = []
            self.add(self._task.remote(*states), level + 1)

    def root(self) -> Any:
        """Return the final result, after the last one was added."""
        found: list[Any] = []
        for states in self._levels:
            states = [*states, *found]
            found = [self._task.remote(*states)] if len(states) > 1 else states
        return found[0]


# ---------------------------------------------------------------- a task


Order = tuple[Job[Any], Callable[[Any], Any] | None]
"""A job to run on every shard of a dump, and what extracts further data from each batch's result."""
Report = tuple[Seen, int, Clock]
"""What a task reports of its shard, small whatever its size: what it has seen, its rows, and the time."""
Result = tuple[bytes, list[Any], Report]
"""The merged state, pickled, since what Ray shares cannot be written to; the data picked from every batch, in
order; the report."""


def _work(ours: str, device: str, retries: int, order: Order, shard: Dump) -> Result:
    """Read and merge one shard in one thread, again where a disk or a network failed."""
    theirs = version("offpol-diag")
    if theirs != ours:
        hint = "install the same version on all nodes, or numbers of two definitions would be merged"
        raise ClusterError(f"a node has offpol-diag {theirs}, and this is {ours}", hint)
    pa.set_cpu_count(1)  # other tasks keep their cores
    threadpool_limits(1, user_api="blas")

    def may_pass(error: BaseException | None) -> bool:
        """Return whether a dump could not be read because of a disk or network failure."""
        cause: BaseException | None = error if isinstance(error, DumpError) else None
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__
        return cause is not None and not denied(cause)

    again, stop = retry_if_exception(may_pass), stop_after_attempt(retries + 1)
    try:
        for attempt in Retrying(retry=again, stop=stop, wait=wait_exponential(0.25), reraise=True):
            with attempt:
                result = _read(order, shard, device)
    except DumpError as error:
        raise _of_this_node(error) from error.__cause__
    return result


@np.errstate(all="ignore")
def _read(order: Order, shard: Dump, device: str) -> Result:
    """Read one shard and merge its results."""
    (job, pick), picked = order, list[Any]()
    engine = Threads(1, choice=Choice((device,)))
    state = engine.reduce(shard, job, Each(pick, picked.append) if pick else None)
    return pickle.dumps(state, pickle.HIGHEST_PROTOCOL), picked, (shard.seen, shard.rows, engine.clock)


def _of_this_node(error: DumpError) -> DumpError:
    """Return a task's error; it names the node where that cannot read what the driver has opened."""
    causes, cause = list[BaseException](), error.__cause__
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    if not any(isinstance(one, OSError | ImportError) for one in causes):
        return error
    hint = error.hint
    if any(map(denied, causes)):
        hint = f"every node needs the credentials, not only the one of the command; {hint}"
    elif any(isinstance(one, FileNotFoundError) for one in causes):
        hint = "every node must find the dump under the same path: put it on a shared disk or at a URL"
    node = f"{socket.gethostname()} ({library().util.get_node_ip_address()})"
    return DumpError(f"on node {node}: {error.lines[0]}", hint, error.lines[1:])


def _merge(*states: bytes) -> bytes:
    """Merge pickled states; None is that of a shard without batches."""
    there = [state for state in map(pickle.loads, states) if state is not None]
    merged = reduce(lambda one, two: one.merge(two), there) if there else None
    return pickle.dumps(merged, pickle.HIGHEST_PROTOCOL)
