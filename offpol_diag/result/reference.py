"""Whose log-probs a third computation reproduces: engine, trainer, and the run's model scored again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from offpol_diag.result.parts import Model, Whole

Outcome = Literal["same", "engine", "trainer", "both", "reference", "few"]
State = Literal["same", "variant", "unknown"]
SAMPLE = 16
"""Prompts that `rescore` begins with."""
SAMPLE_TOKENS = 4000
"""Tokens that `rescore` scores at least, where the dump has them."""


class Fit(Model):
    """One hypothesis against one column."""

    name: str
    family: str
    meaning: str = Field(description="what a side computes if it is true")
    share: float = Field(description="share of tokens reproduced: closer than 90% of what bf16 changes")
    k3: float = Field(description="K3 left, nats per token")
    distance: float = Field(description="mean |Δ| to the column, nats")
    score: float = Field(description="mean log(|Δ| + floor), by which hypotheses are ranked: lower is nearer")


class Side(Model):
    """One column against the reference and every hypothesis.

    `variant` is the nearest hypothesis that is no honest one, where the state is `variant`; where it is
    `unknown`, the nearest of all, which does not reproduce the column.
    """

    column: str
    state: State
    distance: float = Field(description="mean |Δ| to the reference, nats")
    k3: float = Field(description="K3 between column and reference, nats per token")
    variant: str = ""
    meaning: str = ""
    fix: str = ""
    lead: float | None = Field(None, description="lead over all honest hypotheses, in standard errors")
    own_floors: float | None = Field(
        None, description="mean |Δ| to the variant, in what bf16 changes of the variant itself"
    )
    reproduced: bool = Field(False, description="whether that is at most 1.5")
    alike: list[str] = Field([], description="hypotheses that fit as well, not told from it")
    share: float = Field(1.0, description="share of the tokens that it holds for")
    where: str = Field("", description="their place, e.g. 'host = b'; empty: all, or no common one")
    groups: dict[str, Whole] = Field({}, description="hypothesis → prompts that it fits best, by itself")
    fits: list[Fit] = Field([], description="nearest first; empty without hypotheses")


class Reference(Model):
    """The verdict of three."""

    verdict: Outcome
    headline: str
    model: str = Field(description="what scored the responses again")
    rests_on: str = Field(description="what the verdict is conditional on")
    floor: float = Field(description="mean |Δ| that bf16 alone makes of this model, nats")
    apart: float = Field(description="mean |Δ| between engine and trainer, nats")
    engine: Side
    trainer: Side
    tokens: Whole
    sequences: Whole
    groups: Whole
    groups_in_dump: Whole | None = None
    missing: dict[str, str] = Field({}, description="hypothesis that cannot be tested here → why")
    small: dict[str, Whole] = Field(
        {}, description="hypothesis that changes less than could be told here → tokens that would do"
    )
    written: str = Field("", description="the dump that holds the reference's columns")
    how: str = Field("", description="device, type, passes and time")
    notes: list[str] = []

    @property
    def odd(self) -> bool:
        """Whether a side is not reproduced."""
        return self.verdict not in ("same", "few")

    def side(self) -> Side | None:
        """Return the side at fault, where there is one."""
        return {"engine": self.engine, "trainer": self.trainer}.get(self.verdict)
