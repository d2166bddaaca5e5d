"""What was read, and how."""

from __future__ import annotations

from pydantic import Field

from offpol_diag.summary.number import Model


class Skipped(Model):
    """Rows left out because of --on-bad-row skip."""

    count: int = 0
    examples: list[str] = []


class DumpFacts(Model):
    """What was read."""

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
