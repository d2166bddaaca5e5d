"""What follows from the numbers: the diagnosis, the recommendation, the verdicts of a gate."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from offpol_diag.summary.number import Model, Number, Numbers


class Cause(Model):
    """One hypothesis of the diagnosis, with its evidence."""

    id: str
    statement: str
    statistic: str
    confirm: str = ""
    fix: str = ""


class Diagnosis(Model):
    """Is it a bug, or honest mismatch?"""

    verdict: Literal["healthy", "honest_mismatch", "bug", "cannot_tell"]
    headline: str
    causes: list[Cause] = []
    ruled_out: list[str] = []
    undecidable: list[str] = []


Decision = Literal[
    "fix the bug first", "no correction needed", "METHOD at THRESHOLD", "no method helps", "not enough data"
]


class Fired(Model):
    """A rule whose condition held, with the numbers it saw."""

    rule: str
    level: Literal["decision", "alert", "info"]
    sentence: str
    saw: dict[str, float | None]
    source: str


class AlignmentRow(Model):
    """One method at one threshold: how well the gradient it induces would point, beside the reference."""

    title: str
    judges: Literal["nothing", "token", "sequence"] = Field(description="what one weight or rule is about")
    method: str | None = Field(description="preset name; null: no built-in preset is this for such a dump")
    threshold: str | None = None
    settings: dict[str, str] = Field({}, description="what of the preset is set otherwise, as in --set")
    kept: float = Field(description="mean weight over all tokens")
    noise: float | None = Field(description="variance of the gradient's stand-in over the reference's")
    expected: float | None = Field(description="log of the alignment, if only `kept` and `noise` differ")
    measured: float | None = Field(description="log of the alignment, bias included; null: drowned in noise")
    error: float | None = Field(description="standard error of `measured`; null: not known")
    distance: float | None = Field(
        None, description="variance of the difference to the reference's stand-in, over the reference's"
    )
    score: float | None = Field(description="log of the alignment that is believed, prior and measurement")
    alignment: Number = Field(Number(), description="e^score: relative to the reference")
    seen: Number = Field(Number(), description="e^measured, with its 95% interval (jackknife)")
    refused: str | None = Field(None, description="the guard that forbids it, whatever its score")
    metrics: Numbers = Field(
        {}, description="of its weights, at its own threshold; none of what judges whole sequences"
    )


class Alignment(Model):
    """Methods that could be recommended."""

    batch_sequences: float = Field(description="sequences in one update of the trainer")
    reference: str
    direction: bool = Field(description="whether token ids and advantages allow to see a bias")
    systematic: float | None = Field(
        None, description="share of the variance of r that tokens of one kind have in common"
    )
    moved: float | None = Field(
        None, description="Σ A (r − 1) in standard errors: how surely the trainer has moved since; null: no A"
    )
    rows: dict[str, AlignmentRow]

    @model_validator(mode="after")
    def _has_reference(self) -> Self:
        if self.reference not in self.rows:
            raise ValueError("reference is one of the rows")
        return self


class AtLength(Model):
    """Sequence importance sampling on the first T tokens of every response that has as many."""

    tokens: int = Field(description="T")
    sequences: int = Field(description="responses with at least T tokens")
    ess_sequences: Number


class Lengths(Model):
    """What sequence importance sampling keeps of its sample size, by the length of the response."""

    longest: Number = Field(description="tokens of a response up to which it keeps 10% ESS")
    curve: list[AtLength] = Field(description="at rising T, as far as 50 responses go")


class Recommendation(Model):
    """Which correction, at which threshold, and why."""

    decision: Decision
    title: str | None = Field(None, description="the method in words")
    method: str | None = Field(None, description="preset name when the decision is a method")
    threshold: str | None = None
    settings: dict[str, str] = Field({}, description="what of the preset is set otherwise, as in --set")
    sentence: str
    rule: str
    runner_up: str | None = None
    price: float | None = Field(None, description="share of the alignment that the runner-up would cost")
    numbers: dict[str, Numbers] = Field(
        {},
        description="of the weights of the method, of the runner-up and of no correction, by their titles, "
        "each at its own threshold",
    )
    longest_response: Number | None = Field(
        None, description="tokens of a response up to which sequence importance sampling keeps 10% ESS"
    )
    config: str | None = Field(None, description="for the trainer asked for, ready to paste")
    fired: list[Fired] = []


class GateVerdict(Model):
    """One bound, judged."""

    name: str = Field(description="as asked for: k3, seq_mis.ess_tokens, step:k3, p90:k3")
    bound: Literal["max", "min", "within"] = Field(
        description="the value, or its distance from `centre` (within), against `limit`"
    )
    limit: float
    centre: float | None = None
    value: float | None
    interval: tuple[float, float] | None = None
    log10: float | None = Field(None, description="log10 of the value, where the value itself overflows")
    passed: bool | None = Field(description="null: could not say")
    open: bool = Field(
        False, description="the interval holds values on both sides of the bound: no evidence of a failure"
    )
    reason: str = ""
    level: Literal["error", "warn"] = Field("error", description="warn: leaves the exit code alone")
    judged_on: Literal["interval", "value", ""] = Field("", description="empty: nothing could be said")
    steps: str = Field("", description="the steps it was asked of; empty: all")
    where: str = Field("", description="the place that decided, e.g. step 40")
    source: str = Field("", description="who asked: an option, or a file and its table")
    note: str = Field("", description="what the gate file says about the bound")
    baseline: float | None = Field(None, description="the value in the baseline")
    baseline_interval: tuple[float, float] | None = None
    tolerance: str = Field("", description="what a baseline's value may be exceeded by")
