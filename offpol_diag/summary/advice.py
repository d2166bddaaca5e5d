"""What follows from the numbers: the diagnosis, the recommendation, the verdicts of a gate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from offpol_diag.summary.number import Model, Number, Numbers


class Example(Model):
    """One token that shows a cause."""

    sequence_id: str
    position: int = Field(description="in the response, from 0, masked tokens counted")
    rollout_log_prob: float
    train_log_prob: float


class After(Model):
    """The mismatch with a cause undone."""

    what: str = Field(description="what was undone")
    k3: float
    mean_ratio: float
    ess_tokens: float
    tokens: int
    approximate: bool = Field(False, description="whether the logged numbers allow no exact repair")


class Cause(Model):
    """One cause, with its evidence."""

    id: str
    kind: Literal["bug", "honest"] = "bug"
    statement: str
    statistic: str = Field(description="the numbers that speak for it, with intervals or exact counts")
    violates: str = Field("", description="the identity or fact that they contradict")
    exact: bool = Field(False, description="whether it was counted, and needs no interval")
    where: str = Field("", description="the group that has it, e.g. 'engine = 3'; empty: no one group")
    tokens: int | None = Field(None, description="tokens concerned, among those looked at")
    sequences: int | None = Field(None, description="sequences concerned, among those looked at")
    examples: list[Example] = []
    confirm: str = ""
    fix: str = ""
    after: After | None = None


class Diagnosis(Model):
    """Is it a bug, or honest mismatch?"""

    verdict: Literal["healthy", "honest_mismatch", "bug", "cannot_tell"]
    headline: str
    causes: list[Cause] = Field([], description="the likeliest first")
    ruled_out: list[str] = []
    undecidable: list[str] = []
    systematic: Number | None = Field(
        None,
        description="share of the variance of min(r, 2) that tokens of one kind (a token id after another) "
        "have in common: 0 for noise of single tokens; null without token ids",
    )
    sequences: int | None = Field(None, description="sequences that were looked at token by token")
    tokens: int | None = Field(None, description="tokens that were looked at one by one")


Decision = Literal[
    "fix the bug first", "no correction needed", "METHOD at THRESHOLD", "no method helps", "not enough data"
]


Label = Literal["measured", "default", "no difference detected"]


class Fired(Model):
    """A rule whose condition held, with the numbers it saw."""

    rule: str
    level: Literal["decision", "alert", "info"]
    sentence: str
    saw: dict[str, float | None]
    source: str


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
    label: Label | None = Field(None, description="whether the decision was measured or is the default")
    title: str | None = Field(None, description="the method in words")
    method: str | None = Field(None, description="preset name when the decision is a method")
    threshold: str | None = None
    settings: dict[str, str] = Field({}, description="what of the preset is set otherwise, as in --set")
    sentence: str
    rule: str
    runner_up: str | None = None
    reasons: list[str] = Field([], description="mismatch, staleness, dependence on the token, in sentences")
    unknown: list[str] = Field([], description="what this dump cannot say, and which column would")
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
