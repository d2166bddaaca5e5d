"""The worker processes of one run, as the process that started them sees them."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from offpol_diag import forks
from offpol_diag.engines import worker
from offpol_diag.errors import WorkerError
from offpol_diag.readers.shards import Span

HINT = "say --workers 1 to do without them"
LATER = ("pyro.ops.stats",)
"""Modules that this process needs when a reading ends: imported while it waits for the server of workers."""


class Lost(Exception):
    """A worker is gone."""


@dataclass(eq=False)
class Hand:
    """One worker.

    Attributes:
        piece: the number of the piece it is at; None where it waits for one.
        grown: bytes it takes at most beyond what it began with, as it said last.
        read: pieces that it has read before, of which it may have kept columns.
    """

    process: forks.Worker
    line: Connection
    piece: int | None = None
    grown: int = 0
    read: set[Span] = field(default_factory=set)

    def tell(self, message: object) -> None:
        """Say something to it.

        Raises:
            Lost: it is gone.
        """
        try:
            self.line.send(message)
        except OSError as error:
            raise Lost from error

    def hear(self) -> Any:
        """What it says next; it was seen to say something.

        Raises:
            Lost: it is gone.
        """
        try:
            return self.line.recv()
        except (EOFError, OSError) as error:
            raise Lost from error

    def take(self) -> bytes:
        """The state that follows `worker.Done`.

        Raises:
            Lost: it is gone.
        """
        try:
            return self.line.recv_bytes()
        except (EOFError, OSError) as error:
            raise Lost from error


@dataclass
class Crew:
    """Workers that wait for pieces.

    Attributes:
        hands: the workers there are.
        grown: bytes that all workers took at most beyond what they began with.
    """

    hands: list[Hand] = field(default_factory=list)
    grown: int = 0

    def grow(self, many: int) -> None:
        """Start workers until there are so many.

        Raises:
            WorkerError: the system does not start them.
        """
        try:
            forks.serve()
            for module in LATER:
                import_module(module)
            while len(self.hands) < many:
                self.hands.append(Hand(*forks.start(worker.serve, dict(os.environ))))
        except OSError as error:
            raise WorkerError(f"a worker process cannot be started ({error})", HINT) from error

    def hands_with_news(self) -> list[Hand]:
        """Wait until one that is at a piece says something or is gone."""
        busy = {hand.line: hand for hand in self.hands if hand.piece is not None}
        return [busy[line] for line in connection.wait([*busy])]  # type: ignore[index]

    def heard(self, hand: Hand, grown: int) -> None:
        """Note how large a worker has become."""
        hand.grown = grown
        self.grown = max(self.grown, sum(one.grown for one in self.hands))

    def bury(self, hand: Hand) -> str:
        """Let go of a worker that is gone; how it ended, in words."""
        self.hands.remove(hand)
        hand.line.close()
        hand.process.join(1)
        code = hand.process.exitcode
        forks.end(hand.process)
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End all workers, at once."""
        hands, self.hands = self.hands, []
        for hand in hands:
            with suppress(OSError):
                hand.line.close()
            hand.process.kill()
        for hand in hands:
            forks.end(hand.process)
