"""What one preset does to the dump."""

from __future__ import annotations

from pydantic import Field

from offpol_diag.summary.number import Model, Numbers


class Rule(Model):
    """One rejection rule of a preset, as declared."""

    statistic: str
    over: str
    lower: float | None = None
    upper: float | None = None
    advantage: str = "any"


class PresetResult(Model):
    """One preset on this dump."""

    summary: str
    policy: str
    method: str = Field(description="weight, rejection and veto in one line")
    loss: str
    family: str = Field("", description="the idea, in a word that trainers share")
    denominator: str = Field(
        "kept", description="whether rejected tokens leave the loss's denominator (kept)"
    )
    guards: list[str] = Field([], description="what becomes of numbers that are too large; unusual bounds")
    aspects: dict[str, str] = Field({}, description="what it does, aspect by aspect, to tell a family apart")
    applied: bool = Field(True, description="false: the trainer only logs the numbers")
    aliases: list[str] = []
    trainers: list[str] = []
    source: str = ""
    note: str = ""
    logs: str | None = None
    needs: list[str] = Field([], description="columns the dump lacks; when not empty there are no metrics")
    metrics: Numbers = {}
    as_logged: dict[str, float | None] = Field({}, description="the trainer's own names and definitions")
