"""Several devices of this machine: each takes the next shard of the dump as soon as it is free.

Where the dump is cut and in which order results are merged depends on the dump alone, so neither the number
of devices nor which of them was faster changes a bit of the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch

from offpol_diag.engines.engine import Clock, Each, Engine, Job, M, Progress
from offpol_diag.engines.local import Local
from offpol_diag.engines.travel import packed, unpacked
from offpol_diag.errors import UsageError
from offpol_diag.readers import Dump
from offpol_diag.readers.dump import Noticed
from offpol_diag.readers.shards import BYTES, of_batches

HINT = "give auto, cpu, cuda or cuda:N"


@dataclass(frozen=True)
class Choice:
    """Where to compute.

    Attributes:
        devices: at least one, of one kind.
        unused: why no GPU was taken though there is one; empty where that is not so.
    """

    devices: tuple[torch.device, ...]
    unused: str = ""


def devices(name: str) -> Choice:
    """What a name means here: auto is all GPUs that work, or the CPU where none does; cuda is all GPUs.

    Raises:
        UsageError: no such device, or it does not work.
    """
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = tuple(torch.device("cuda", at) for at in range(there))
    if name == "auto":
        return _working(every)
    try:
        found = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device {name!r} is not known", HINT) from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device {name!r} is not supported", HINT)
    if found.type == "cuda" and (found.index or 0) >= there:
        raise UsageError(f"device {name!r}: there are {there} CUDA devices here", "use --device cpu")
    asked = every if found.type == "cuda" and found.index is None else (found,)
    for device in asked:
        if why := trouble(device):
            raise UsageError(f"device {str(device)!r} does not work: {why}", "use --device cpu")
    return Choice(asked)


def _working(every: Sequence[torch.device]) -> Choice:
    """Those that work, else the CPU."""
    why = {device: trouble(device) for device in every}
    fine = tuple(device for device in every if not why[device])
    unused = "; ".join(f"{device} does not work: {said}" for device, said in why.items() if said)
    return Choice(fine) if fine else Choice((torch.device("cpu"),), unused)


def trouble(device: torch.device) -> str:
    """Why a device cannot compute: its driver is too old, others hold all its memory; empty where it can."""
    try:
        float(torch.ones(1, dtype=torch.float64, device=device).exp())
    except RuntimeError as error:
        return next(iter(str(error).splitlines()), "") or type(error).__name__
    return ""


def on(found: Sequence[torch.device], progress: Progress | None = None) -> Engine:
    """The engine for these devices of this machine."""
    return Local.on(found[0], progress) if len(found) == 1 else Devices(tuple(found), progress)


@dataclass
class Devices:
    """A thread for each device.

    Attributes:
        devices: where the jobs run.
        progress: called as rows are read.
        clock: told what all devices spent.
        shard: bytes of the files that a device takes at once, at least.
        device: of what kind they are.
    """

    devices: tuple[torch.device, ...]
    progress: Progress | None = None
    clock: Clock = field(default_factory=Clock)
    shard: int = BYTES
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = torch.device(self.devices[0].type)

    @property
    def name(self) -> str:
        """What a report says of it."""
        return f"local, {len(self.devices)} devices"

    @property
    def beside(self) -> int:
        """`Engine.beside`: none."""
        return 0

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`."""
        merged: M | None = None
        noticed: list[Noticed] = []
        for done in self._in_order(dump, job, each):
            for one in done.picked:
                if each:
                    each.use(one)
            state = unpacked(done.state)
            merged = state if merged is None else merged if state is None else merged.merge(state)
            noticed.append(done.noticed)
            self.clock.read += done.clock.read
            self.clock.compute += done.clock.compute
        dump.notice(noticed)
        return merged

    def _in_order(self, dump: Dump, job: Job[M], each: Each[M] | None) -> Iterator[_Done]:
        """Every shard's result; few wait for an earlier one."""
        free: SimpleQueue[torch.device] = SimpleQueue()
        for device in self.devices:
            free.put(device)
        told = _Told(self.progress, dump.rows)
        waiting: deque[Future[_Done]] = deque()
        with ThreadPoolExecutor(len(self.devices), "offpol-diag-device") as pool:
            try:
                for shard in of_batches(dump, self.shard):
                    waiting.append(pool.submit(_run, free, shard, job, each, told))
                    if len(waiting) > 2 * len(self.devices):
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                for future in waiting:
                    future.cancel()


@dataclass(frozen=True)
class _Done:
    """A shard's result: its state, packed for the host; what was picked of it; what the reader noticed."""

    state: bytes
    picked: list[Any]
    noticed: Noticed
    clock: Clock


def _run(
    free: SimpleQueue[torch.device], shard: Dump, job: Job[M], each: Each[M] | None, told: _Told
) -> _Done:
    device, picked = free.get(), list[Any]()
    try:
        engine = Local(device, progress=told.of_shard())
        state = engine.reduce(shard, job, Each(each.pick, picked.append) if each else None)
        return _Done(packed(state), picked, shard.noticed(), engine.clock)
    finally:
        free.put(device)


class _Told:
    """Adds up the progress of shards."""

    def __init__(self, progress: Progress | None, rows: int) -> None:
        self._progress, self._rows, self._done, self._lock = progress, rows, 0, Lock()

    def of_shard(self) -> Callable[[int, int], None]:
        """Called with the rows done of one shard."""
        before = 0

        def tell(done: int, rows: int) -> None:
            nonlocal before
            with self._lock:
                self._done += done - before
                before = done
                if self._progress:
                    self._progress(self._done, self._rows)

        return tell
