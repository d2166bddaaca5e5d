"""What is concluded: the diagnosis, the recommendation, and the verdicts of a gate."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from offpol_diag.number import Number
from offpol_diag.result.parts import Model, Whole


class Example(Model):
    """One token that shows a cause."""

    sequence_id: str
    position: Whole = Field(description="in the response, from 0, masked tokens counted")
    rollout_log_prob: float
    train_log_prob: float


class After(Model):
    """The mismatch after a cause has been repaired."""

    what: str = Field(description="the repair")
    k3: float
    mean_ratio: float
    ess_tokens: float
    tokens: Whole
    approximate: bool = Field(False, description="whether the repair is only approximate")


class Cause(Model):
    """One cause, with its evidence."""

    id: str
    kind: Literal["bug", "honest"] = "bug"
    statement: str
    statistic: str = Field(description="the evidence: numbers with intervals, or exact counts")
    violates: str = Field("", description="the identity or fact that the evidence contradicts")
    exact: bool = Field(False, description="whether the evidence is an exact count")
    where: str = Field("", description="the group affected, e.g. 'engine = 3'; empty: all")
    tokens: Whole | None = Field(None, description="affected tokens of the sample")
    sequences: Whole | None = Field(None, description="affected sequences of the sample")
    examples: list[Example] = []
    confirm: str = ""
    fix: str = ""
    after: After | None = None


class CandidateCause(Model):
    """A cause that fits a mismatch, where the dump cannot decide between several; it comes without a fix."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    id: str
    kind: Literal["bug", "honest"]
    statement: str
    for_: list[str] = Field([], alias="for", description="what speaks for it, a sentence each")
    against: list[str] = Field([], description="what speaks against it, a sentence each")


class Location(Model):
    """A place that tells damaged tokens from clean ones: a cut of one column, or of two."""

    split: str = Field(description="the column that is cut, e.g. turn; two of them joined by 'and'")
    words: str = Field(description="the tokens inside, e.g. 'after the first tool output'")
    sentence: str = Field(description="both levels in words, of the smaller side where both are one")
    inside: float = Field(description="K3 inside, nats per token, of single tokens at most 4")
    outside: float = Field(description="K3 outside")
    share: float = Field(description="share of the tokens that are inside")
    gain: float = Field(description="deviance per token that the cut gains, of an exponential model of K3")
    measure: str = Field(description="what such a place points to, and the measurement that decides")


DiagnosisVerdict = Literal["healthy", "honest_mismatch", "bug", "cannot_tell"]


class Diagnosis(Model):
    """Whether the mismatch is a bug or genuine, and its causes."""

    verdict: DiagnosisVerdict
    headline: str
    causes: list[Cause] = Field(
        [], description="established causes, most likely first; none where the verdict is cannot_tell"
    )
    candidates: list[CandidateCause] = Field(
        [],
        description="causes that fit where none is established, the least contradicted first; "
        "with cannot_tell only",
    )
    where: list[Location] = Field(
        [], description="established places that tell damaged tokens from clean ones, the clearest first"
    )
    decide: str = Field("", description="the one measurement that decides between the candidates")
    ruled_out: list[str] = []
    undecidable: list[str] = []
    systematic: Number | None = Field(
        None,
        description="share of the variance of min(r, 2) that tokens of one kind (a token id after another) "
        "have in common: 0 for noise of single tokens; null without token ids",
    )
    sequences: Whole | None = Field(None, description="size of the sample that was examined, in sequences")
    tokens: Whole | None = Field(None, description="size of the sample that was examined, in tokens")


Decision = Literal["fix the bug first", "no correction needed", "METHOD at THRESHOLD", "not enough data"]


class Fired(Model):
    """A rule whose condition held, with the numbers it depends on."""

    rule: str
    level: Literal["decision", "alert"]
    sentence: str
    saw: dict[str, float | None]
    source: str


class Recommendation(Model):
    """Which correction, at which threshold, and why."""

    decision: Decision
    title: str | None = Field(None, description="the method in words")
    method: str | None = Field(None, description="preset name when the decision is a method")
    threshold: str | None = None
    sentence: str
    rule: str
    alternatives: list[str] = Field(
        [], description="presets of other families, to be seen beside it; what each does stands in `numbers`"
    )
    config: str | None = Field(None, description="configuration for the trainer of --for, ready to paste")
    fired: list[Fired] = []


class GateVerdict(Model):
    """The verdict on one bound."""

    name: str = Field(description="k3, seq_mis.ess_tokens, step:k3; or diagnosis")
    bound: Literal["max", "min", "within", "diagnosis"] = Field(
        description="the value, or how far it is from where it should be (within), against `limit`"
    )
    must: str = Field(description="the bound in words: ≤ 0.002")
    limit: float = Field(description="0 for a diagnosis")
    unit: str = Field("", description="of value and limit, as in `metrics`; empty: a pure number")
    value: float | None = None
    interval: tuple[float, float] | None = None
    log10: float | None = Field(None, description="log10 of the value, where the value itself overflows")
    passed: bool | None = Field(description="null: undecided")
    open: bool = Field(False, description="the interval crosses the bound: no evidence of a failure")
    reason: str = ""
    where: str = Field("", description="the place that decided, e.g. step 40")
