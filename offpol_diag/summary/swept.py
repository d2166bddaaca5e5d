"""One preset at many thresholds."""

from __future__ import annotations

from pydantic import Field

from offpol_diag.summary.number import Model, Number, Numbers


class SweptPoint(Model):
    """A preset at one threshold."""

    threshold: float
    bounds: dict[str, float] = Field(description="what the preset then holds, by the place in its table")
    own: bool = Field(False, description="the threshold that the preset has as it stands")
    metrics: Numbers
    quartiles: list[Numbers] = Field([], description="the same by quartile of sequence length, short first")
    marks: list[str] = Field([], description="length, floor, centre: what `remarks` warn of")


class NoiseFloor(Model):
    """How far numerics alone move the statistic, by one account of them."""

    source: str
    per_token: Number = Field(description="standard deviation of a token's Δ")
    statistic: Number = Field(description="the same of what the thresholds are compared with")
    found: bool = Field(description="true: seen in this dump; false: what that format would do")


class PredictedKeep(Model):
    """What a window keeps of responses of one length."""

    length: float
    kept: Number
    observed: Number | None = Field(None, description="in this dump, at about that length")


class SolvedWindow(Model):
    """The bounds that keep an asked share."""

    asked: float
    kept: int = Field(description="units within the bounds")
    of: int
    ties: int = Field(0, description="further units on the last value kept, which no bound can tell apart")
    centre: Number | None = Field(None, description="E[log r], nats; none where only one side is bounded")
    centre_k1: Number | None = Field(None, description="−k1, the same over tokens")
    point: SweptPoint
    predicted: list[PredictedKeep] = []
    spread: Numbers = Field({}, description="of log r at length L: √(falling²/L + staying²)")
    trainer: str = ""
    config: str = Field("", description="ready to paste")


class Sweep(Model):
    """One preset over many thresholds."""

    preset: str
    which: str = Field(description="the bound that moves, e.g. reject[0].upper")
    others: list[str] = Field([], description="what else of it could have moved")
    statistic: str = Field(description="what the threshold is compared with, in words")
    unit: str = Field(description="token or sequence: what the bound acts on")
    quartiles: list[str] = Field([], description="lengths of the quartiles, in words")
    points: list[SweptPoint]
    floor: list[NoiseFloor] = []
    remarks: list[str] = []
    window: SolvedWindow | None = None
