"""What a worker process does: pieces of a dump, one after the other, in one thread.

What it has to say goes through a thread of its own: the next piece is begun while a state is on its way.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import torch

from offpol_diag import forks
from offpol_diag.engines import heap
from offpol_diag.engines.engine import Each
from offpol_diag.engines.local import Local
from offpol_diag.engines.tasks import Order, Report, be_one_thread
from offpol_diag.engines.travel import packed, unpacked
from offpol_diag.errors import OffpolError
from offpol_diag.readers import kept
from offpol_diag.readers.kept import KEPT
from offpol_diag.readers.shards import Span, cut

CPU = torch.device("cpu")
OFTEN = (700, 10, 10)
"""When the collector of garbage looks: as Python has it, since a worker lives long."""


@dataclass(frozen=True)
class Begin:
    """To a worker: a reading begins; `order` is an `Order`, packed."""

    order: bytes


@dataclass(frozen=True)
class Piece:
    """To a worker: one piece of the dump of the last order."""

    span: Span


@dataclass(frozen=True)
class Read:
    """From a worker: rows of its piece that it has read so far."""

    rows: int


@dataclass(frozen=True)
class Done:
    """From a worker: a piece is done, and its state follows as bytes of its own.

    Attributes:
        picked: of every batch's result, in order.
        report: on the piece.
        grown: bytes that the process takes at most beyond what it took when it began.
    """

    picked: list[Any]
    report: Report
    grown: int


@dataclass(frozen=True)
class Failed:
    """From a worker: a piece failed; what is no `OffpolError` is a bug, and says where in its notes."""

    error: Exception


def serve(line: Connection, environ: Mapping[str, str]) -> None:
    """Do what is said on the line until its other end is closed, or the process there is gone."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    os.environ.update(environ)
    gc.enable()  # the server had none, and a command that was copied has it seldom
    gc.set_threshold(*OFTEN)
    be_one_thread()
    heap.keep()
    KEPT.room = kept.ROOM
    before, order, said = _most(), None, Said(line)
    with suppress(EOFError, OSError):
        while True:
            message = line.recv()
            if isinstance(message, Begin):
                order = unpacked(message.order)
                continue
            assert isinstance(message, Piece)
            assert order is not None
            _answer(said, order, message.span, before)


class Said:
    """Sends what a worker says, in order; who says it does not wait until it is heard.

    No more than one state waits: the next piece takes longer than the way of one.
    """

    def __init__(self, line: Connection) -> None:
        self._line, self._waiting = line, SimpleQueue[object]()
        threading.Thread(target=self._send, daemon=True).start()

    def __call__(self, message: object) -> None:
        """Say something; bytes go as they are."""
        self._waiting.put(message)

    def _send(self) -> None:
        with suppress(OSError):  # nobody listens: the worker is about to end
            while True:
                message = self._waiting.get()
                if isinstance(message, bytes):
                    self._line.send_bytes(message)
                else:
                    self._line.send(message)
                del message  # while the next is waited for


def _leave_with_parent() -> None:
    """At once, whatever is under way: nobody waits for it any more."""
    parent = forks.parent()
    if parent is not None:
        connection.wait([parent])
        os._exit(1)


def _answer(said: Said, order: Order, span: Span, before: int) -> None:
    try:
        picked, report, state = _one(said, order, span)
    except Exception as error:
        said(Failed(_portable(error)))
        return
    said(Done(picked, report, max(0, _most() - before)))
    said(state)


def _one(said: Said, order: Order, span: Span) -> tuple[list[Any], Report, bytes]:
    """One piece, read and merged."""
    picked: list[Any] = []
    each = Each(order.pick, picked.append) if order.pick else None
    engine = Local(CPU, workers=0, progress=lambda done, _: said(Read(done)))
    shard = cut(order.dump, span)
    rows = shard.rows
    state = engine.reduce(shard, order.job, each)
    seconds = engine.clock.read, engine.clock.compute
    return picked, Report(shard.noticed(), rows, seconds), packed(state)


def _portable(error: Exception) -> Exception:
    """The error as it can travel: without its traceback, which a note tells where it is a bug."""
    if isinstance(error, OffpolError):
        return error
    error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        packed(error)
    except Exception:
        return RuntimeError("\n".join((repr(error), *error.__notes__)))
    return error


def _most() -> int:
    """Bytes that this process has taken at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
