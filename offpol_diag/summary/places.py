"""Where the mismatch is: places, distributions, the worst of them."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from offpol_diag.summary.number import Model, Numbers


class Place(Model):
    """One row of a location table: one step, one position bucket, one group-by value."""

    key: str
    order: float = Field(description="where it stands on the axis")
    tokens: int
    sequences: int
    metrics: Numbers
    asked: Numbers = Field({}, description="further numbers that were asked for by place")


class Location(Model):
    """Where the mismatch is, along one axis."""

    axis: str
    title: str
    numeric: bool = Field(description="whether the axis is a number line")
    places: list[Place]
    left_out: int = Field(0, description="places beyond the cap on their number, not listed")


class Histogram(Model):
    """Counts over bins; `edges` has one entry more than `counts`."""

    title: str
    unit: str
    edges: list[float]
    counts: list[int]

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.edges)} edges do not bound {len(self.counts)} counts")
        return self


class WorstSequence(Model):
    """A sequence with a large mismatch."""

    sequence_id: str
    step: int | None = None
    length: int
    log_ratio_sum: float
    k3_mean: float
    max_abs_log_ratio: float


class WorstToken(Model):
    """A token with a large mismatch, in context."""

    sequence_id: str
    step: int | None = None
    position: int
    length: int
    token_id: int | None = None
    rollout_log_prob: float
    train_log_prob: float
    log_ratio: float
    before: list[float] = Field([], description="log-ratios of up to 3 unmasked tokens before it")
    after: list[float] = Field([], description="log-ratios of up to 3 unmasked tokens after it")


class Worst(Model):
    """The worst sequences (by mean k3) and tokens (by |log-ratio|)."""

    sequences: list[WorstSequence] = []
    tokens: list[WorstToken] = []
