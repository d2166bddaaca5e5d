"""A copy of this process that forks workers when it is told to: they have all that was imported by then.

Nothing is imported twice, and pages that nobody writes to lie in memory once. A copy is made before this
process has threads of its own: a fork finds their locks in whatever state they are.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn

ORDER = struct.Struct("!i")
"""To the copy: 0 to fork, with one end of the worker's line, or the worker that is asked about. From it: the
worker, or how it ended; an error's number, negative, where it could not be forked."""
RUNNING = 1 << 16
"""How a worker ended that has not."""
PAUSE = 0.002
"""Seconds between two questions whether a worker has ended."""

_life: int | None = None


def life() -> int | None:
    """In a worker: what is at its end when the process that has the copy is gone; None elsewhere."""
    return _life


def possible() -> bool:
    """Whether this process can be copied now."""
    return sys.platform == "linux" and threading.active_count() == 1


@dataclass
class Child:
    """A worker; what of `multiprocessing.Process` is needed of one.

    Attributes:
        pid: its number.
        exitcode: how it ended, the signal negative; None while it runs, or where nobody knows any more.
    """

    pid: int
    _zygote: Zygote
    exitcode: int | None = None

    def kill(self) -> None:
        """End it at once. Its number is its own until the copy was asked how it ended."""
        if self._running():
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float = float("inf")) -> None:
        """Wait until it has ended, or so many seconds."""
        end = time.monotonic() + timeout
        while self._running() and time.monotonic() < end:
            time.sleep(PAUSE)

    def _running(self) -> bool:
        if self.exitcode is None:
            try:
                self.exitcode = self._zygote.ended(self.pid)
            except OSError:  # the copy is gone, and the worker nobody's
                return False
        return self.exitcode is None


@dataclass
class Zygote:
    """The copy, as the process sees it that was copied.

    Attributes:
        pid: its number.
    """

    pid: int
    _line: socket.socket = field(repr=False)
    _held: int = field(repr=False)

    @classmethod
    def born(cls) -> Zygote:
        """Copy this process as it stands.

        Raises:
            OSError: the system does not.
        """
        ours, theirs = socket.socketpair()
        life, held = os.pipe()
        gc.freeze()  # the collector writes to what it looks at, and a page that is written to is copied
        with undisturbed():
            pid = _forked()
            if pid == 0:
                ours.close()
                os.close(held)
                _leave(lambda: _serve(theirs, life))
        theirs.close()
        os.close(life)
        return cls(pid, ours, held)

    def start(self, target: Callable[..., None], *given: Any) -> tuple[Child, Connection]:
        """A worker that runs `target(line, *given)`, and this end of its line.

        Raises:
            OSError: the system does not start one, or the copy is gone.
        """
        ours, theirs = Pipe()
        try:
            socket.send_fds(self._line, [ORDER.pack(0)], [theirs.fileno()])
            pid = self._answer()
        finally:
            theirs.close()
        if pid < 0:
            raise OSError(-pid, os.strerror(-pid))
        ours.send((target, given))
        return Child(pid, self), ours

    def ended(self, pid: int) -> int | None:
        """How a worker ended; None where it has not.

        Raises:
            OSError: the copy is gone.
        """
        self._line.sendall(ORDER.pack(pid))
        code = self._answer()
        return None if code == RUNNING else code

    def close(self) -> None:
        """End it, and with it the workers there are."""
        self._line.close()
        with suppress(OSError):
            os.close(self._held)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _answer(self) -> int:
        said = self._line.recv(ORDER.size)
        if len(said) < ORDER.size:
            raise OSError("the process that forks workers has ended")
        (found,) = ORDER.unpack(said)
        return int(found)


@contextmanager
def undisturbed() -> Iterator[None]:
    """What is started in the block never hears a signal that asks to leave; this process does, after it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---------------------------------------------------------------- in the copy


def _serve(line: socket.socket, life: int) -> None:
    """Until nobody is there to say anything."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):  # who reads what the process prints must not wait for the copy
        os.dup2(nowhere, standard)
    while True:
        said, given, _, _ = socket.recv_fds(line, ORDER.size, 1)
        if not said:
            return
        (pid,) = ORDER.unpack(said)
        line.sendall(ORDER.pack(_ended(pid) if pid else _worker(line, life, given[0])))


def _ended(pid: int) -> int:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else RUNNING


def _worker(line: socket.socket, life: int, end: int) -> int:
    """Fork one: its number, or an error's."""
    try:
        pid = _forked()
    except OSError as error:
        os.close(end)
        return -(error.errno or 1)
    if pid == 0:
        line.close()
        _leave(lambda: _work(life, Connection(end)))
    os.close(end)
    return pid


def _work(alive: int, line: Connection) -> None:
    global _life
    _life = alive
    with suppress(EOFError):
        target, given = line.recv()
        target(line, *given)


def _forked() -> int:
    with warnings.catch_warnings():  # pyarrow has a thread, whose locks it sets right in a fork
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _leave(do: Callable[[], None]) -> NoReturn:
    """Do it and end here: nothing of what the copied process would still do is done."""
    code = 1
    try:
        do()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
