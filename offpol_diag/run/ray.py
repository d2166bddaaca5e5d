"""Run an analysis on a Ray cluster: one task per shard of the dump, and tasks that merge eight results each.

Shards and merges depend on the dump alone, so neither the size of the cluster nor the order in which tasks
end, nor a task that had to be run again, changes a bit of the result.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
from threadpoolctl import threadpool_limits

from offpol_diag.dump.check import Seen
from offpol_diag.dump.read import Dump, said
from offpol_diag.errors import ClusterError, OffpolError, UsageError, install
from offpol_diag.run.devices import Choice
from offpol_diag.run.threads import Clock, Each, Job, M, Progress, Threads, cores

ADDRESS = "RAY_ADDRESS"
WHERE = f"check that the cluster runs and can be reached from here; without {ADDRESS} a local one is started"
LOST = "see why it ended (memory of its machine, Ray's logs), start it and repeat the command"
RETRIES = 3
"""Maximum retries of a task whose worker died."""
AHEAD, FAN = 2, 8
"""Shards submitted per task slot, and results merged per task."""
SHARDS = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Minimum uncompressed bytes per task; more with a GPU, where each task starts its own process."""
TICK, PATIENCE = 1.0, 5.0
"""Seconds between checks that the head is there, and for which it may be silent."""


@dataclass
class Ray:
    """Engine of tasks on the connected cluster; with cuda every task gets one GPU.

    Attributes:
        slots: number of tasks that can run at once.
        head: address of the cluster's head.
        tasks: shards done so far, over all passes.
    """

    device: str
    slots: int
    progress: Progress | None = None
    head: str = ""
    clock: Clock = field(default_factory=Clock)
    tasks: int = 0

    @classmethod
    @contextmanager
    def on(cls, device: str, progress: Progress | None = None) -> Iterator[Ray]:
        """Yield an engine on the cluster at RAY_ADDRESS, or on a local one that is stopped at the end.

        Raises:
            UsageError: Ray is not installed, or the device is not auto, cpu or cuda.
            ClusterError: no cluster answers, or it has no such device.
        """
        kind = {"auto": "cpu", "cpu": "cpu", "cuda": "cuda"}.get(device)
        if kind is None:
            hint = "with --engine ray say cpu, or cuda for a GPU per task"
            raise UsageError(f"device {device!r}: tasks run where Ray has room", hint)
        try:
            ray = import_module("ray")
        except ImportError as error:
            raise UsageError("Ray is not installed", install("ray")) from error
        ours = not ray.is_initialized()
        try:
            if ours:
                _connect(ray, os.environ.get(ADDRESS, ""))
            there = ray.cluster_resources()
            cpus, gpus = int(there.get("CPU", 0)), int(there.get("GPU", 0))
            if kind == "cuda" and not gpus:
                raise ClusterError(
                    "no node of the cluster has a GPU", "say --device cpu, or add a node with one"
                )
            if not cpus:
                raise ClusterError("no node of the cluster has a CPU for tasks", "offer CPUs to Ray")
            slots = min(cpus, gpus) if kind == "cuda" else cpus
            yield cls(kind, slots, progress, ray.get_runtime_context().gcs_address)
        finally:
            if ours:
                ray.shutdown()

    @property
    def name(self) -> str:
        """Name of the engine in a report."""
        return f"ray, {self.tasks} tasks"

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """Run one pass, see `Engine.reduce`; tasks of workers that died are retried."""
        ray = import_module("ray")
        task = ray.remote(num_cpus=1, max_retries=RETRIES, name="offpol-diag")
        merge = task(_merge)
        gpu = {"num_gpus": 1, "max_calls": 1} if self.device == "cuda" else {}  # a process selects a GPU once
        work = task(_work).options(num_returns=3, scheduling_strategy="SPREAD", **gpu)
        given, seen, done = (
            ray.put((version("offpol-diag"), self.device, job, each.pick if each else None)),
            Seen(),
            0,
        )
        waiting: deque[tuple[Any, Any]] = deque()
        states: list[Any] = []
        shards = deque(dump.shards(SHARDS[self.device]))
        while shards or waiting:
            while shards and len(waiting) < AHEAD * self.slots:
                state, picked, report = work.remote(given, shards.popleft())
                states.append(state)
                waiting.append((report, picked))
            report, picked = waiting.popleft()
            of_shard, rows, clock = self._fetched(report)
            for one in self._fetched(picked) if each else ():
                each.use(one)  # type: ignore[union-attr]
            seen.add(of_shard)
            done, self.tasks = done + rows, self.tasks + 1
            self.clock.read, self.clock.compute = (
                self.clock.read + clock.read,
                self.clock.compute + clock.compute,
            )
            if self.progress:
                self.progress(done, dump.rows)
        while len(states) > 1:  # the shape depends on the dump alone
            states = [merge.remote(*states[i : i + FAN]) for i in range(0, len(states), FAN)]
        dump.seen = seen
        dump.judge()
        found: M | None = pickle.loads(self._fetched(states[0])) if states else None
        return found

    def _fetched(self, ref: Any) -> Any:
        """Return the result of a task; that the head is there is checked meanwhile."""
        ray, errors = import_module("ray"), import_module("ray.exceptions")
        while True:
            try:
                return ray.get(ref, timeout=TICK)
            except errors.GetTimeoutError:
                _knock(
                    self.head,
                    "the cluster is lost",
                    "see why its head ended, start it and repeat the command",
                )
            except errors.RayTaskError as error:
                if isinstance(error.cause, OffpolError):
                    raise error.cause from None
                if isinstance(error.cause, ImportError):
                    what = f"a node cannot import what a task needs ({said(error.cause)})"
                    raise ClusterError(what, "install the same offpol-diag on every node") from error
                raise
            except (errors.RayError, ConnectionError) as error:
                hint = (
                    "a worker that is killed most often had too little memory: offer Ray fewer CPUs per node"
                )
                raise ClusterError(
                    f"the cluster lost a task {RETRIES + 1} times ({said(error)})", hint
                ) from error


def _connect(ray: Any, address: str) -> None:
    """Connect to a cluster, or start a local one."""
    where: dict[str, Any] = {"address": address}
    if not address:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        where = {"address": "local", "num_cpus": cores(), "include_dashboard": False}
    elif address not in ("auto", "local"):
        _knock(address.removeprefix("ray://"), f"{ADDRESS}={address}: no cluster answers there", WHERE)
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.CRITICAL)
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        who = f"{ADDRESS}={address}: the cluster" if address else "a local Ray"
        raise ClusterError(f"{who} cannot be used ({said(error)})", WHERE) from error


def _knock(address: str, what: str, hint: str) -> None:
    """Refuse a cluster whose head accepts no connection: Ray would try for a minute, and end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, ValueError) as error:
        raise ClusterError(f"{what} ({said(error)})", hint) from error


# ---------------------------------------------------------------- a task


@np.errstate(all="ignore")
def _work(
    given: tuple[str, str, Job[Any], Callable[[Any], Any] | None], shard: Dump
) -> tuple[bytes, list[Any], Any]:
    """Read and merge one shard in one thread: its state, what is picked of each batch, and a report."""
    ours, device, job, pick = given
    if (theirs := version("offpol-diag")) != ours:
        hint = "install the same version on all nodes, or numbers of two definitions would be merged"
        raise ClusterError(f"a node has offpol-diag {theirs}, and this is {ours}", hint)
    pa.set_cpu_count(1)  # other tasks keep their cores
    threadpool_limits(1, user_api="blas")
    picked: list[Any] = []
    engine = Threads(1, choice=Choice((device,)))
    try:
        state = engine.reduce(shard, job, Each(pick, picked.append) if pick else None)
    except OffpolError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        hint = f"every node must find the dump under the same path, with its credentials; {error.hint}"
        raise type(error)(f"on node {socket.gethostname()}: {error.message}", hint) from error
    return pickle.dumps(state, pickle.HIGHEST_PROTOCOL), picked, (shard.seen, shard.rows, engine.clock)


def _merge(*states: bytes) -> bytes:
    """Merge pickled states; None is that of a shard without batches."""
    there = [state for state in map(pickle.loads, states) if state is not None]
    merged = reduce(lambda one, two: one.merge(two), there) if there else None
    return pickle.dumps(merged, pickle.HIGHEST_PROTOCOL)
