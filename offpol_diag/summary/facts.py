"""What was read, and how."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from offpol_diag.summary.number import Model

DEEPEST = 32
"""Containers within containers of what a dump's writer says of it: what lies deeper is shown as text."""


def sound(value: Any, room: int = DEEPEST) -> Any:
    """A value as JSON can hold it and any reader can take it: whole characters, and not too deep."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if not isinstance(value, dict | list):
        return value
    if not room:
        return "…"
    if isinstance(value, list):
        return [sound(one, room - 1) for one in value]
    return {sound(key): sound(one, room - 1) for key, one in value.items()}


class Skipped(Model):
    """Rows left out because of --on-bad-row skip."""

    count: int = 0
    examples: list[str] = []


class DumpFacts(Model):
    """What was read."""

    @model_validator(mode="before")
    @classmethod
    def _sound(cls, given: Any) -> Any:
        return sound(given)

    files: list[str]
    rows: int
    sequences: int = Field(description="rows with at least one unmasked token")
    tokens: int = Field(description="unmasked tokens")
    masked_tokens: int
    groups: int = Field(description="distinct groups (prompts): the units of the bootstrap")
    groups_exact: bool = True
    mean_length: float
    max_length: int
    columns: dict[str, str] = Field(description="our name → the column it was read from")
    provenance: dict[str, object] = {}
    skipped: Skipped = Skipped()
    notes: list[str] = Field([], description="loud warnings about the data")


class Run(Model):
    """How the numbers were made."""

    command: str = "analyze"
    version: str
    device: str
    engine: str = "local"
    seed: int
    replicates: int
    tokens: int
    sequences: int
    peak_rss_bytes: int
    seconds: dict[str, float]
