"""Run a job on a Ray cluster: a task per range of row groups, merged here in the order of the dump.

Ranges and merges depend on the dump alone, so neither the size of the cluster nor the order in which tasks
end, nor a task that had to be run again, changes a bit of the result.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

import pyarrow as pa

from offpol_diag.dump.check import Seen
from offpol_diag.dump.read import Dump, Progress, first_line
from offpol_diag.errors import ClusterError, OffpolError, UsageError, install
from offpol_diag.run.threads import Each, Job, M, Threads, cores

ADDRESS = "RAY_ADDRESS"
WHERE = f"check that the cluster runs and can be reached from here; without {ADDRESS} a local one is started"
RANGE = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Minimum uncompressed bytes per task; more with a GPU, where each task starts its own process."""
AHEAD, RETRIES = 2, 3
"""Tasks submitted for each that can run, and retries of a task whose worker died."""
TICK, PATIENCE = 1.0, 5.0
"""Seconds between checks that the head is there, and for which it may be silent."""


@dataclass
class Ray:
    """Engine of tasks on the connected cluster, of which `slots` run at once; with cuda each gets one GPU."""

    device: str
    slots: int
    head: str
    progress: Progress | None = None
    name = "ray"

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """Run one pass, see `Threads.reduce`; keeping one state here, and those that wait for their turn."""
        ray = import_module("ray")
        gpu = {"num_gpus": 1, "max_calls": 1} if self.device == "cuda" else {}  # a process selects a GPU once
        how = {"num_cpus": 1, "max_retries": RETRIES, "scheduling_strategy": "SPREAD", **gpu}
        work = ray.remote(name="offpol-diag", **how)(_work)
        given = ray.put((version("offpol-diag"), job))
        ranges, waiting = deque(dump.shards(RANGE[self.device])), deque[Any]()
        state, seen, done = None, Seen(), 0
        while ranges or waiting:
            while ranges and len(waiting) < AHEAD * self.slots:
                waiting.append(work.remote(given, ranges.popleft()))
            found, of_range, rows = self._fetched(waiting.popleft())
            found = each(found) if each and found is not None else found
            state = found if state is None else state if found is None else state.merge(found)
            seen.add(of_range)
            done += rows
            if self.progress:
                self.progress(done, dump.rows)
        dump.seen = seen
        dump.judge()
        return state

    def _fetched(self, task: Any) -> Any:
        """Return the result of a task; that the head is there is checked meanwhile."""
        ray, errors = import_module("ray"), import_module("ray.exceptions")
        while True:
            try:
                return pickle.loads(ray.get(task, timeout=TICK))
            except errors.GetTimeoutError:
                _knock(self.head, "the cluster is lost", "see why its head ended, and start it again")
            except errors.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, OffpolError) else error) from None
            except (errors.RayError, ConnectionError) as error:
                what = f"the cluster lost a task {RETRIES + 1} times ({first_line(error)})"
                hint = "a worker that is killed most often had too little memory: offer fewer CPUs per node"
                raise ClusterError(what, hint) from error


@contextmanager
def connected(device: str, progress: Progress | None = None) -> Iterator[Ray]:
    """Yield an engine on the cluster at RAY_ADDRESS, or on a local one that is stopped at the end.

    Raises:
        UsageError: Ray is not installed, or the device is not auto, cpu or cuda.
        ClusterError: no cluster answers, or it has no such device.
    """
    if device not in ("auto", "cpu", "cuda"):
        hint = "with --engine ray say cpu, or cuda for a GPU per task"
        raise UsageError(f"device {device!r}: tasks run where Ray has room", hint)
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise UsageError("Ray is not installed", install("ray")) from error
    ours, address = not ray.is_initialized(), os.environ.get(ADDRESS) or "local"
    local = {"num_cpus": cores(), "include_dashboard": False} if address == "local" else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ours and address not in ("auto", "local"):
        _knock(address.removeprefix("ray://"), f"{ADDRESS}={address}: no cluster answers there", WHERE)
    try:
        if ours:
            ray.init(address, log_to_driver=False, logging_level=logging.CRITICAL, **local)
    except (OSError, RuntimeError, ValueError) as error:
        raise ClusterError(f"{ADDRESS}={address}: cannot be used ({first_line(error)})", WHERE) from error
    try:
        there = ray.cluster_resources()
        cpus, gpus = int(there.get("CPU", 0)), int(there.get("GPU", 0))
        if not cpus or (device == "cuda" and not gpus):  # Ray would wait for one
            raise ClusterError(f"no node of the cluster has a {'GPU' if cpus else 'CPU'} for tasks", WHERE)
        kind, slots = ("cuda", min(cpus, gpus)) if device == "cuda" else ("cpu", cpus)
        yield Ray(kind, slots, ray.get_runtime_context().gcs_address, progress)
    finally:
        if ours:
            ray.shutdown()


def _knock(address: str, what: str, hint: str) -> None:
    """Refuse a cluster whose head accepts no connection: Ray would try for a minute, and end the process."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()
    except (OSError, ValueError) as error:
        raise ClusterError(f"{what} ({first_line(error)})", hint) from error


def _work(given: tuple[str, Job[Any]], part: Dump) -> bytes:
    """Run a job on one range in one thread, as a task; pickled, for arrays that Ray returns are read-only."""
    ours, job = given
    if (theirs := version("offpol-diag")) != ours:
        hint = "install the same version on all nodes, or numbers of two definitions would be merged"
        raise ClusterError(f"a node has offpol-diag {theirs}, and this is {ours}", hint)
    pa.set_cpu_count(1)  # other tasks keep their cores
    return pickle.dumps((Threads(1).reduce(part, job), part.seen, part.rows), pickle.HIGHEST_PROTOCOL)


Engine = Threads | Ray
