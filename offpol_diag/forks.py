"""How worker processes are started: forked from a server that has imported what they need.

A fork of this process itself would inherit the locks of its threads in whatever state they are. Where there
is no such server each worker imports for itself. Importing torch is no business of this module: a server can
be started before this process has it.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

SERVED = sys.platform == "linux"
"""Whether workers are forked from a server: elsewhere forking is missing or unsafe."""
NAME = "offpol-diag-worker"
PRELOAD = ("offpol_diag.uncollected", "offpol_diag.analyze", "offpol_diag.engines.frozen")
"""Modules that the server imports, in this order: what jobs are made of, and what holds for all of it."""


def serve() -> None:
    """Start the server, if there is none, and do not wait for it."""
    if not SERVED:
        return
    from multiprocessing import forkserver, resource_tracker

    mp.set_forkserver_preload([*PRELOAD])
    resource_tracker.ensure_running()  # it unblocks signals, so it goes first
    with _undisturbed(), _nameless():
        forkserver.ensure_running()


def start(target: Callable[..., None], *given: Any) -> tuple[BaseProcess, Connection]:
    """A process that runs `target(line, *given)`, and this end of its line.

    It never sees Ctrl-C or SIGTERM: who started it ends it.

    Raises:
        OSError: the system does not start one.
    """
    context: BaseContext = mp.get_context("forkserver" if SERVED else "spawn")
    ours, theirs = context.Pipe()
    process: BaseProcess = context.Process(  # type: ignore[attr-defined]
        target=target, args=(theirs, *given), name=NAME, daemon=True
    )
    try:
        with _undisturbed(), _nameless():
            process.start()
    except EOFError as error:
        raise OSError("the server of worker processes has ended") from error
    finally:
        theirs.close()
    return process, ours


@contextmanager
def _undisturbed() -> Iterator[None]:
    """What is started in the block never hears a signal that asks to leave; this process does, after it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _nameless() -> Iterator[None]:
    """What is started in the block does not run the caller's script again: few scripts expect that."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def end(process: BaseProcess) -> None:
    """Kill a worker and wait until it is gone: it holds nothing that would have to be put away."""
    with suppress(ProcessLookupError):
        process.kill()
    process.join()
