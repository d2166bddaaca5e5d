"""Several processes of this machine: each takes the next piece of the dump as soon as it is free.

Two threads would wait for the interpreter's lock most of the time. Where the dump is cut depends on the dump
alone, and pieces are merged in their order, so the number of workers does not change a bit of the result; one
worker is this process itself. This process holds no batch: only what was merged so far, and what pieces left
that wait for an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from offpol_diag.engines.crew import Crew, Hand, Lost
from offpol_diag.engines.engine import Clock, Each, Job, M, Progress
from offpol_diag.engines.local import Local, one_thread
from offpol_diag.engines.room import workers as room
from offpol_diag.engines.tasks import Order, Report
from offpol_diag.engines.travel import packed, unpacked
from offpol_diag.engines.worker import Begin, Failed, Piece, Read
from offpol_diag.errors import OffpolError, WorkerError
from offpol_diag.readers import Dump
from offpol_diag.readers.dump import Noticed
from offpol_diag.readers.kept import KEPT
from offpol_diag.readers.shards import LEAST, Span, cut, pieces

WORTH = 2_500_000
"""Tokens from which on more than one worker is faster, their start counted.

Whole commands with every preset on two cores (`benchmarks/workers.py`): with two workers 2.1 M tokens take
as long as with one, 4.2 M 0.90 of that, 8.4 M 0.87.
"""
AHEAD = 2
"""Pieces that may wait for an earlier one, for each worker."""
TRIES = 2
"""How often a piece is begun before the loss of its worker is an error."""


@dataclass
class Processes:
    """The CPU of this machine.

    Attributes:
        workers: processes, at most; None for as many as there is room for, where they are worth their start.
        progress: called as rows are read.
        unused: why no GPU was taken, where there is one.
        clock: told what all workers spent.
        least: tokens of the smallest piece.
        device: the CPU.
        used: workers that were started.
    """

    workers: int | None = None
    progress: Progress | None = None
    unused: str = ""
    clock: Clock = field(default_factory=Clock)
    least: int = LEAST
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    used: int = 1
    _crew: Crew = field(default_factory=Crew)

    @classmethod
    @contextmanager
    def on(
        cls, workers: int | None, progress: Progress | None = None, unused: str = ""
    ) -> Iterator[Processes]:
        """An engine whose workers end with the block."""
        engine = cls(workers, progress, unused)
        try:
            with KEPT.open():
                yield engine
        finally:
            engine.close()

    @property
    def name(self) -> str:
        """What a report says of it."""
        many = f"local, {self.used} processes" if self.used > 1 else "local"
        return f"{many}; {self.unused}" if self.unused else many

    @property
    def beside(self) -> int:
        """Bytes that workers took at most, beside this process."""
        return self._crew.grown

    def close(self) -> None:
        """End the workers."""
        self._crew.close()

    def reduce(self, dump: Dump, job: Job[M], each: Each[M] | None = None) -> M | None:
        """One reading, `Engine.reduce`.

        Raises:
            WorkerError: workers cannot be started, or are killed again and again.
        """
        cuts = pieces(dump, self.least)
        many = self._many(dump, len(cuts))
        if len(cuts) == 1:
            return self._alone.reduce(dump, job, each)
        merged: M | None = None
        noticed: list[Noticed] = []
        found = self._here(dump, cuts, job, each) if many == 1 else self._there(many, dump, cuts, job, each)
        with one_thread():
            for state, notes in found:
                merged = state if merged is None else merged if state is None else merged.merge(state)
                noticed.append(notes)
        dump.notice(noticed)
        return merged

    def _many(self, dump: Dump, cuts: int) -> int:
        if self.workers is None and dump.tokens < WORTH:
            return 1
        return min(cuts, self.workers or room())

    @property
    def _alone(self) -> Local:
        return Local(self.device, progress=self.progress, clock=self.clock)

    def _here(
        self, dump: Dump, cuts: Sequence[Span], job: Job[M], each: Each[M] | None
    ) -> Iterator[tuple[M | None, Noticed]]:
        """Every piece in this process, in order."""
        parts = [cut(dump, span) for span in cuts]
        for part, state in zip(parts, self._alone.over(parts, job, each), strict=True):
            yield state, part.noticed()

    def _there(
        self, many: int, dump: Dump, cuts: Sequence[Span], job: Job[M], each: Each[M] | None
    ) -> Iterator[tuple[M | None, Noticed]]:
        """Every piece by workers, in order."""
        self.used = max(self.used, many)
        order = Order(dump, job, each.pick if each else None, self.device.type)
        reading = _Reading(self._crew, many, cuts, order, Told(self.progress, dump.rows))
        try:
            for one in reading.run():
                self.clock.read += one.report.seconds[0]
                self.clock.compute += one.report.seconds[1]
                for thing in one.picked:
                    if each:
                        each.use(thing)
                assert one.report.noticed is not None
                yield unpacked(one.state), one.report.noticed
        except BaseException:
            self.close()
            raise


@dataclass(frozen=True)
class Result:
    """What is there of a piece: its state, packed; what was picked of it; the report."""

    state: bytes
    picked: list[Any]
    report: Report


class Told:
    """Adds up the rows read of all pieces; those that are read again count once."""

    def __init__(self, progress: Progress | None, rows: int) -> None:
        self._progress, self._rows, self._most = progress, rows, 0
        self._done: dict[int, int] = {}

    def __call__(self, piece: int, done: int) -> None:
        """So many rows of a piece are read."""
        self._done[piece] = max(done, self._done.get(piece, 0))
        if self._progress:
            self._progress(sum(self._done.values()), self._rows)


class _Reading:
    """One reading of a dump by workers: which pieces are under way, and which wait to be merged."""

    def __init__(self, crew: Crew, many: int, cuts: Sequence[Span], order: Order, told: Told) -> None:
        self._crew, self._many, self._cuts, self._told = crew, many, cuts, told
        self._begin = Begin(packed(order))
        self._begun: set[Hand] = set()
        self._todo = [*range(len(cuts))][::-1]
        self._lost: dict[int, int] = {}
        self._done: dict[int, Result] = {}
        self._passed = 0
        self._failed: tuple[int, Exception] | None = None

    def run(self) -> Iterator[Result]:
        """Every piece's result, in order.

        Raises:
            OffpolError: what a reading from the first row on would have met first.
        """
        self._crew.grow(self._many)
        while self._passed < len(self._cuts):
            self._hand_out()
            if not any(hand.piece is not None for hand in self._crew.hands):
                break
            for hand in self._crew.hands_with_news():
                self._hear(hand)
            while self._passed in self._done:
                yield self._done.pop(self._passed)
                self._passed += 1
        if self._failed:
            raise self._failed[1]

    def _hand_out(self) -> None:
        for hand in [hand for hand in self._crew.hands if hand.piece is None]:
            try:
                self._next(hand)
            except Lost:
                self._lose(hand)

    def _next(self, hand: Hand) -> None:
        """Give a worker a piece, where there is one to be begun."""
        ready = [piece for piece in reversed(self._todo) if piece < self._end()]
        if not ready:
            return
        hand.piece = min(ready, key=lambda piece: self._strange(hand, self._cuts[piece]))
        self._todo.remove(hand.piece)
        if hand not in self._begun:
            self._begun.add(hand)
            hand.tell(self._begin)
        hand.tell(Piece(self._cuts[hand.piece]))

    def _strange(self, hand: Hand, span: Span) -> int:
        """0 where a worker has read a piece before, 2 where only another one has, who may have kept some."""
        if span in hand.read:
            return 0
        return 2 if any(span in one.read for one in self._crew.hands) else 1

    def _end(self) -> int:
        """Before which piece one may be begun: few wait for an earlier one, none for one that failed."""
        last = self._passed + AHEAD * self._many
        return min(last, self._failed[0]) if self._failed else last

    def _hear(self, hand: Hand) -> None:
        piece = hand.piece
        assert piece is not None
        try:
            said = hand.hear()
            if isinstance(said, Read):
                self._told(piece, said.rows)
                return
            hand.piece = None
            if isinstance(said, Failed):
                self._fail(piece, said.error)
                return
            self._crew.heard(hand, said.grown)
            hand.read.add(self._cuts[piece])
            self._next(hand)  # it need not wait until its state was taken
            self._done[piece] = Result(hand.take(), said.picked, said.report)
        except Lost:
            self._lose(hand, piece)

    def _fail(self, piece: int, error: Exception) -> None:
        """The first piece that fails decides: those before it are still read."""
        if self._failed is None or piece < self._failed[0]:
            self._failed = piece, error

    def _lose(self, hand: Hand, unheard: int | None = None) -> None:
        """A worker is gone: the others do its pieces, or a new one where it was the last."""
        how = self._crew.bury(hand)
        for piece in {piece for piece in (unheard, hand.piece) if piece is not None}:
            self._lost[piece] = self._lost.get(piece, 0) + 1
            if self._lost[piece] < TRIES:
                self._todo = sorted([*self._todo, piece], reverse=True)
                self._crew.grow(1)
            else:
                self._fail(piece, _killed(how))


def _killed(how: str) -> OffpolError:
    return WorkerError(
        f"worker processes were ended from outside ({how}), twice at the same rows of the dump",
        "most often memory ran short: say --workers 1, or leave more memory free",
    )
