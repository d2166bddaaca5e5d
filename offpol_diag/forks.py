"""How worker processes are started: forked from a process that has imported what they need.

A command that is about to need some is copied while it has no threads (`zygote.py`). Elsewhere, in a
notebook say, a fork would inherit the locks of threads in whatever state they are: there a server is started
anew, which imports for itself. Where a system has no safe fork each worker does.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from offpol_diag.zygote import Child, Zygote, life, possible, undisturbed

SERVED = sys.platform == "linux"
"""Whether workers are forked from a server: elsewhere forking is missing or unsafe."""
Worker = BaseProcess | Child
NAME = "offpol-diag-worker"
PRELOAD = ("offpol_diag.uncollected", "offpol_diag.analyze", "offpol_diag.engines.frozen")
"""Modules that the server imports, in this order: what jobs are made of, and what holds for all of it."""


_copy: Zygote | None = None


def copy() -> None:
    """Copy this process, if that can be: workers will be forked from what it has imported by now."""
    global _copy
    if _copy is None and SERVED and possible():
        with suppress(OSError):  # then there will be a server, or the error is told of that
            _copy = Zygote.born()
            atexit.register(_copy.close)


def parent() -> int | None:
    """In a worker: what can be waited for until who started it is gone; None elsewhere."""
    server = mp.parent_process()
    return life() if server is None else server.sentinel


def serve() -> None:
    """Start the server, if nothing is there to fork workers from, and do not wait for it."""
    if not SERVED or _copy is not None:
        return
    from multiprocessing import forkserver, resource_tracker

    mp.set_forkserver_preload([*PRELOAD])
    resource_tracker.ensure_running()  # it unblocks signals, so it goes first
    with undisturbed(), _nameless():
        forkserver.ensure_running()


def start(target: Callable[..., None], *given: Any) -> tuple[Worker, Connection]:
    """A process that runs `target(line, *given)`, and this end of its line.

    It never sees Ctrl-C or SIGTERM: who started it ends it.

    Raises:
        OSError: the system does not start one.
    """
    if _copy is not None:
        return _copy.start(target, *given)
    context: BaseContext = mp.get_context("forkserver" if SERVED else "spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=target, args=(theirs, *given), name=NAME, daemon=True
    )
    try:
        with undisturbed(), _nameless():
            process.start()
    except EOFError as error:
        raise OSError("the server of worker processes has ended") from error
    finally:
        theirs.close()
    return process, ours


@contextmanager
def _nameless() -> Iterator[None]:
    """What is started in the block does not run the caller's script again: few scripts expect that."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end(process: Worker) -> None:
    """Kill a worker and wait until it is gone: it holds nothing that would have to be put away."""
    with suppress(ProcessLookupError):
        process.kill()
    process.join()
