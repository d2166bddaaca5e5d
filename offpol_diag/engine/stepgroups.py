"""Sums, sequence weights and tails by training step, with a bound on their number.

Steps are grouped by a power of two: one step a group at first, then two, four, …, so that at most `MOST`
groups have sequences. The width follows from the steps of the dump alone, however it is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from offpol_diag.engine import segments
from offpol_diag.engine.accumulators import LogSums, Sums
from offpol_diag.engine.fields import LARGE, NUMBERS, Count, Floats, Saved, require
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tails import Tail

MOST = 64
TOP = 2048
"""Largest log-weights kept of a group for k̂: all that a fit uses up to 466,000 weights."""


@dataclass(frozen=True)
class Top(Saved):
    """The largest values of many samples at once.

    Attributes:
        n: how many values there were in each, [...].
        kept: the `TOP` largest, falling, -inf where there are fewer, [..., k] with k at most `TOP`.
    """

    n: Annotated[Array, Floats("...")]
    kept: Annotated[Array, Floats("...", "kept", rule=NUMBERS)]

    def check(self) -> None:
        """Refuse more values than are kept."""
        require(self.kept.shape[-1] <= TOP, f"at most {TOP} values are kept")

    @classmethod
    def of(cls, x: Array, n: Array) -> Top:
        """Keep the largest of x [..., N], where -inf is no value."""
        beyond = max(x.shape[-1] - TOP, 0)
        largest = np.partition(x, beyond, axis=-1)[..., beyond:] if beyond else x
        return cls(n, np.sort(largest, axis=-1)[..., ::-1])

    def merge(self, other: Top) -> Top:
        """Keep the largest of both."""
        return Top.of(np.concatenate((self.kept, other.kept), axis=-1), self.n + other.n)


@dataclass(frozen=True)
class Step(Saved):
    """Stored sums of a group of steps.

    Attributes:
        sums: of columns, with replicates.
        logs: Σw and Σw² of the product weights of sequences.
        tokens, sequences: the largest Δ, and the largest ΣΔ of a sequence.
    """

    sums: Sums
    logs: LogSums
    tokens: Top
    sequences: Top

    def merge(self, other: Step) -> Step:
        """Merge part by part."""
        return Step(
            self.sums.merge(other.sums),
            self.logs.merge(other.logs),
            self.tokens.merge(other.tokens),
            self.sequences.merge(other.sequences),
        )


@dataclass(frozen=True)
class StepGroups(Saved):
    """Groups of steps; the group of a step is ⌊step / 2^shift⌋, as text.

    Attributes:
        shift: log2 of the number of steps in a group, as small as `MOST` allows.
        groups: by group.
    """

    shift: Count
    groups: dict[str, Step]

    def check(self) -> None:
        """Refuse more groups than there may be, and other keys than whole numbers."""
        require(len(self.groups) <= MOST and self.shift < 64, f"there are at most {MOST} groups")
        require(all(abs(int(key)) < LARGE for key in self.groups), "a group is a whole number")

    def merge(self, other: StepGroups) -> StepGroups:
        """Merge group by group, at the wider width, or wider where there are too many."""
        shift = max(self.shift, other.shift)
        return StepGroups._within(shift, [one._at(shift) for one in (self, other)])

    def _at(self, shift: int) -> StepGroups:
        return StepGroups._joined(
            shift, [(int(key) >> (shift - self.shift), one) for key, one in self._sorted]
        )

    @property
    def _sorted(self) -> list[tuple[str, Step]]:
        return sorted(self.groups.items(), key=lambda item: int(item[0]))

    @staticmethod
    def _joined(shift: int, parts: Sequence[tuple[int, Step]]) -> StepGroups:
        found: dict[str, Step] = {}
        for key, one in parts:
            found[str(key)] = found[str(key)].merge(one) if str(key) in found else one
        return StepGroups(shift, found)

    @staticmethod
    def _within(shift: int, each: Sequence[StepGroups]) -> StepGroups:
        parts = [(int(key), one) for groups in each for key, one in groups._sorted]
        found = StepGroups._joined(shift, parts)
        while len(found.groups) > MOST:
            found = found._at(found.shift + 1)
        return found

    @property
    def steps(self) -> list[tuple[int, int, Step]]:
        """First and last step of each group, and what is kept of it; rising."""
        width = 1 << self.shift
        return [(int(key) * width, int(key) * width + width - 1, one) for key, one in self._sorted]


def of_scene(scene: Scene, columns: Mapping[str, Array], delta: Array, total: Array) -> StepGroups | None:
    """Group one batch; None where the dump has no steps.

    Args:
        scene: the batch.
        columns: to be summed, [S] each.
        delta: Δ of each token, [T].
        total: ΣΔ of each sequence, [S].
    """
    batch, steps = scene.batch, scene.batch.scalars.get("step")
    if steps is None:
        return None
    rows = {step: at for step, at in segments.by_key(steps).items() if type(step) is int}
    names, stacked = tuple(columns), np.stack(tuple(columns.values()))
    offsets, filled = batch.cu_seqlens.tolist(), batch.lengths > 0
    logs = np.where(filled, total, -np.inf)
    parts = []
    for step in sorted(rows):
        at = segments.index(rows[step])
        own, draws = logs[at], scene.draws[at]
        tokens = _tokens(delta, offsets, rows[step])
        parts.append(
            StepGroups(
                0,
                {
                    str(step): Step(
                        Sums.of_stacked(names, stacked[:, at], draws, batch.key[at]),
                        LogSums.of(own, draws),
                        Top.of(Tail.of(tokens).kept, np.array(float(len(tokens)))),
                        Top.of(own, np.array(float(filled[at].sum()))),
                    )
                },
            )
        )
    return StepGroups._within(0, parts)


def _tokens(delta: Array, offsets: Sequence[int], rows: Sequence[int]) -> Array:
    """Return Δ of the tokens of some sequences, rising."""
    begins = [row for i, row in enumerate(rows) if not i or rows[i - 1] != row - 1]
    ends = [row + 1 for i, row in enumerate(rows) if i + 1 == len(rows) or rows[i + 1] != row + 1]
    parts = [delta[offsets[first] : offsets[last]] for first, last in zip(begins, ends, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
