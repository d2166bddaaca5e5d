"""Presets side by side, and one run beside another."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from offpol_diag.summary.advice import Diagnosis
from offpol_diag.summary.facts import DumpFacts, Run
from offpol_diag.summary.number import Model, Number, Numbers
from offpol_diag.summary.places import Histogram, Location
from offpol_diag.summary.presets import PresetResult


class Lot(Model):
    """Some of the tokens, or some of the sequences: how many, and of what kind."""

    count: int
    share: Number
    length: Number
    reward: Number
    positive: Number
    negative: Number
    log_ratio: Number


class LostSequence(Model):
    """A sequence that loses tokens to one preset and not to the other."""

    sequence_id: str
    step: int | None = None
    length: int
    tokens: int = Field(description="how many tokens the one drops and the other keeps")
    log_ratio_sum: float
    reward: float | None = None
    fired: list[str] = Field([], description="what dropped them")


class Drops(Model):
    """What one preset drops and the other keeps."""

    dropped_by: str
    kept_by: str
    tokens: Lot
    sequences: Lot = Field(description="sequences of which the one keeps no token, the other some")
    examples: list[LostSequence] = Field([], description="of the sequences concerned, the largest |ΣΔ|")


class Comparison(Model):
    """Presets against one of them; differences are paired: taken within each bootstrap replicate."""

    against: str = Field(description="the preset that the others are compared with")
    differences: dict[str, Numbers] = Field(description="preset → number → its value less the reference's")
    better: dict[str, str] = Field(description="number → the preset that is better, or why none is named")
    all_tokens: Lot | None = None
    all_sequences: Lot | None = None
    drops: list[Drops] = []


class Contrast(Model):
    """One number of run B beside that of run A."""

    name: str
    a: Number
    b: Number
    difference: Number = Field(description="B less A, taken within each bootstrap replicate")
    ratio: Number | None = Field(None, description="B over A, where both are positive")
    effect: str = Field("", description="the size of the difference in words")
    p_value: float | None = None
    p_adjusted: float | None = Field(None, description="corrected for the number of tests")
    differs: bool | None = Field(None, description="null: not tested")
    reason: str = Field("", description="why it was not tested")


class Pairing(Model):
    """Which groups (prompts) two runs share: those are resampled together."""

    by: Literal["group_id", "contents", "nothing"]
    shared: int
    only_a: int
    only_b: int
    exact: bool = True
    sentence: str


class OtherRun(Model):
    """Run B of two."""

    dump: DumpFacts
    metrics: Numbers
    presets: dict[str, PresetResult] = {}
    by: dict[str, Location] = {}
    histograms: dict[str, Histogram] = {}
    diagnosis: Diagnosis | None = None
    run: Run


class Against(Model):
    """Run A (the result around this) against run B."""

    b: OtherRun
    headline: str
    pairing: Pairing
    correction: str = Field(description="how p-values were corrected for their number")
    level: float
    tested: int
    differing: int
    contrasts: list[Contrast] = Field(description="what matters first")
    needs: dict[str, str] = Field({}, description="what cannot be compared → what it needs")
    notes: list[str] = []
