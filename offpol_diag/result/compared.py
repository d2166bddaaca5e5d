"""Presets side by side, the numbers of two runs, and one preset at many thresholds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from offpol_diag.number import Number, Numbers
from offpol_diag.result.parts import Model, Whole
from offpol_diag.rows import Columns


class Subset(Model):
    """A subset of the tokens or of the sequences: its size, share and means."""

    count: Whole
    numbers: Numbers = Field(description="share, length, reward, positive, negative, log_ratio")


class LostSequence(NamedTuple):
    """A sequence with tokens that one preset drops and the other keeps."""

    sequence_id: str
    step: int | None
    length: int
    tokens: int
    log_ratio_sum: float
    reward: float | None


class Drops(Model):
    """The tokens and sequences that one preset drops and the other keeps."""

    dropped_by: str
    kept_by: str
    tokens: Subset
    sequences: Subset = Field(description="sequences dropped whole by the one only")
    examples: Annotated[list[LostSequence], Columns(LostSequence)] = Field(
        [], description="such sequences with the largest |ΣΔ|"
    )


class Comparison(Model):
    """Presets against one of them; differences are paired: taken within each bootstrap replicate."""

    against: str = Field(description="the preset that the others are compared with")
    differences: dict[str, Numbers] = Field(description="preset → number → its value less the reference's")
    better: dict[str, str] = Field(description="number → the better preset, or why there is none")
    all_tokens: Subset | None = None
    all_sequences: Subset | None = None
    drops: list[Drops] = []

    def by_kind(self) -> Iterator[tuple[str, Numbers]]:
        """Yield its numbers, with what they are of."""
        yield from (("difference", numbers) for numbers in self.differences.values())
        for unit in ("tokens", "sequences"):
            every = (getattr(self, f"all_{unit}"), *(getattr(one, unit) for one in self.drops))
            yield from ((f"some {unit}", one.numbers) for one in every if one)


class Contrast(NamedTuple):
    """One number of a further run, here called B, beside that of run A.

    Attributes:
        difference: B less A, taken within each bootstrap replicate.
        ratio: B over A, where both are positive.
        effect: the size of the difference in words.
        p_adjusted: corrected for the number of tests.
        differs: None: not tested; `reason` says why.
    """

    name: str
    a: Number
    b: Number
    difference: Number
    ratio: Number | None = None
    effect: str = ""
    p_value: float | None = None
    p_adjusted: float | None = None
    differs: bool | None = None
    reason: str = ""

    def by_kind(self) -> Iterator[tuple[str, Numbers]]:
        """Yield its numbers, with what they are of."""
        given = (("run", self.a), ("run", self.b), ("difference", self.difference), ("ratio", self.ratio))
        yield from ((kind, {self.name: one}) for kind, one in given if one)


class Pairing(Model):
    """Which groups (prompts) two runs share: those are resampled together."""

    by: Literal["group_id", "contents", "nothing"]
    shared: Whole
    only_a: Whole
    only_b: Whole
    exact: bool = True
    sentence: str


class SweptPoint(Model):
    """A preset at one threshold."""

    threshold: float
    bounds: dict[str, float] = Field(description="the preset's bounds at this threshold, by their keys")
    own: bool = Field(False, description="whether it is the preset's own threshold")
    numbers: Numbers = Field(description="as those of presets")


class SolvedWindow(Model):
    """The bounds that keep a requested share."""

    asked: float
    kept: Whole = Field(description="units within the bounds")
    of: Whole
    preset: str = Field(description="the preset with these bounds, by name")
    point: SweptPoint


class Sweep(Model):
    """One preset over many thresholds."""

    preset: str
    which: str = Field(description="the bound that moves, e.g. reject[0].upper")
    statistic: str = Field(description="the statistic that is compared with the threshold")
    unit: str = Field(description="token or sequence: what the bound acts on")
    points: list[SweptPoint]
    window: SolvedWindow | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.points:
            raise ValueError("there is no threshold")
        return self
