"""A number, its uncertainty and its meaning; what all parts of a result have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Model(BaseModel):
    """A part of the result; unknown keys are refused so that a typo cannot pass for a value."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Number(Model):
    """One number with its uncertainty and its meaning.

    `value` is null when it cannot be known, and `unknown` says why.
    """

    value: float | None = None
    interval: tuple[float, float] | None = Field(
        None, description="95% interval, bootstrap over groups of sequences"
    )
    unit: str = ""
    over: str = Field("", description="what it is averaged over")
    formula: str = ""
    unknown: str | None = Field(
        None, description="why there is no value, e.g. 'missing column current_log_probs'"
    )
    note: str | None = Field(
        None, description="a caution that belongs to this number, e.g. an unreliable heavy tail"
    )
    log10: float | None = Field(None, description="log10 of the value, where the value itself overflows")
    clamped: float | None = Field(None, description="share of terms on which the safety bound acted")


Numbers = dict[str, Number]
