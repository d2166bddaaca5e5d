"""Binned numbers from which the charts of a report are drawn, as columns."""

from __future__ import annotations

from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from offpol_diag.metrics import Band
from offpol_diag.number import Number
from offpol_diag.result.parts import Model, Points, Whole, equal
from offpol_diag.rows import Columns


class AtLength(NamedTuple):
    """Sequence importance sampling on the first `tokens` tokens of every response that has as many.

    Attributes:
        sequences: responses with at least so many tokens.
    """

    tokens: int
    sequences: int
    ess_sequences: Number


class Lengths(Model):
    """Effective sample size of sequence importance sampling, by the length of the response."""

    longest: Number = Field(description="tokens of a response up to which it keeps 10% ESS")
    curve: Annotated[list[AtLength], Columns(AtLength)] = Field(
        [], description="at increasing T, up to the length that 50 responses reach"
    )
    median: Whole | None = Field(None, description="median length of a response, tokens, to 9%")


class Series(Points):
    """A number along an axis: one entry per point, null where it is not known there."""

    unit: str = Field("", description="nats, fraction, tokens; empty: a pure number")
    values: list[float | None]
    low: list[float | None] = Field([], description="lower ends of the 95% intervals; empty: none are known")
    high: list[float | None] = []

    def numbers(self) -> list[Number]:
        """Return each point as a number with its interval."""
        none: list[float | None] = [None] * len(self.values)
        each = zip(self.values, self.low or none, self.high or none, strict=True)
        return [
            Number(value=value, interval=None if low is None or high is None else (low, high))
            for value, low, high in each
        ]


class BySteps(Points):
    """Numbers by training step, each group of equally many adjacent steps together where there are many."""

    first: list[Whole] = Field(description="first step of each group, [G]")
    last: list[Whole] = Field(description="last step of each group; equal to `first` for groups of one step")
    tokens: list[Whole]
    sequences: list[Whole]
    series: dict[str, Series] = Field(
        description="k1, k3, mean_ratio, ess_tokens, ess_sequences, chi2_token, chi2_sequence, ppl_ratio, "
        "reward, policy_lag, f_2; k1, k3 also with drift2. and total.; "
        "METHOD.tokens_rejected of methods that may be recommended; [G] each"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.first:
            raise ValueError("there is no group of steps")
        equal({"first": len(self.first)} | {name: len(x.values) for name, x in self.series.items()})
        return self


class Density(Model):
    """Tokens by their probability under both policies, on bins of about equal width in the logit."""

    edges: list[float] = Field(description="probabilities that bound the bins, rising from 0 to 1, [N+1]")
    counts: list[list[Whole]] = Field(description="tokens, [N][N]: by rollout bin, then by trainer bin")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        bins = len(self.edges) - 1
        if len(self.counts) != bins or any(len(row) != bins for row in self.counts):
            raise ValueError(f"{bins} bins do not hold a table of {len(self.counts)} rows")
        return self


class Corner(Model):
    """Some tokens, and what they carry of K3."""

    tokens: Whole
    share: float = Field(description="of all tokens, 0 to 1")
    k3_share: float | None = Field(description="of the sum of K3 over all tokens, 0 to 1")


class Noise(Points):
    """Quantiles of |Δ| by the rollout probability of the token, read off bins 1/16 wide (relative)."""

    edges: list[float] = Field(description="rollout probabilities that bound the bins, from 0 to 1, [N+1]")
    median: list[float | None] = Field(description="nats, [N]")
    p90: list[float | None]
    p99: list[float | None]
    in_sync_tokens: list[Whole] = Field([], description="tokens with lag 0; empty: no lag is known")
    in_sync_p90: list[float | None] = []


class PositionSteps(Model):
    """K3 by position in the response, in some training steps."""

    first_step: Whole | None = Field(description="null: all steps")
    last_step: Whole | None
    tokens: list[Whole] = Field(description="by position, [P]")
    k3: Series = Field(description="nats, [P]; null without tokens")


class Positions(Model):
    """K3 by position in the response, before and from the step at which the mismatch grew."""

    labels: list[str] = Field(description="positions, such as 15–30, from 0, masked tokens counted, [P]")
    every: PositionSteps
    early: PositionSteps | None = Field(None, description="null: one step, or none known")
    late: PositionSteps | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for one in (self.every, self.early, self.late):
            if one is not None:
                equal({"labels": len(self.labels), "tokens": len(one.tokens), "k3": len(one.k3.values)})
        return self


class TokenThresholds(Points):
    """Rules on single tokens at many thresholds b, of the raw ratios of the main drift; [N] each."""

    b: list[float]
    ess_tokens: list[float | None] = Field(description="of min(r, b) over the tokens")
    truncated: list[float] = Field(description="share of tokens with r ≥ b")
    kept: list[float] = Field(description="share of tokens with 1/b ≤ r < b")


class ParetoTail(Points):
    """The largest importance weights, and the generalised Pareto distribution fitted to them."""

    weights: Whole = Field(description="n, weights in all")
    khat: Number = Field(description="interval: k̂ ± 1.96 (1 + k̂)/√M, weights taken as independent")
    limit: float = Field(description="k̂ above which means of the weights are unreliable at this n")
    rank: list[Whole] = Field(description="1 is the largest weight; at most 60 ranks, dense at the top")
    log_weight: list[float] = Field(description="the weight of that rank, as logged, nats")
    log_fitted: list[float | None] = Field(description="by the fit to M weights: quantile 1 − (rank − ½)/M")


class LagEvidence(Model):
    """Evidence of policy lag about the cause; the points to draw are `by.policy_lag` and `charts.steps`."""

    in_sync: Number | None = Field(None, description="K3 at lag 0, nats")
    in_sync_share: float | None = Field(None, description="K3 at lag 0 over K3 of the dump")
    ratio_by_lag: dict[str, float] = Field({}, description="lag → K3 of its first step over K3 at lag 0")
    lag: Whole | None = Field(None, description="the lag that most steps have, if all of their sequences do")
    steps: tuple[Whole, Whole] | None = Field(None, description="first and last step of that lag")
    start: Number | None = Field(None, description="K3 of the first such step, nats")
    end: Number | None = Field(None, description="K3 of the last such step, nats")
    growth: float | None = Field(None, description="`end` over `start`")


class Crossing(NamedTuple):
    """The first step from which on K3 is in a worse band, for all that follows or at least once."""

    band: str
    bound: float
    step: int


class Charts(Model):
    """Binned numbers from which the pictures of a report are drawn; empty or null where nothing is known."""

    expected: Annotated[list[Band], Columns(Band)] = Field(
        [],
        description="published K3 of runs without a known fault that record the same",
    )
    crossings: Annotated[list[Crossing], Columns(Crossing)] = Field(
        [], description="steps at which K3 first enters a worse band"
    )
    steps: BySteps | None = None
    less: Corner | None = Field(None, description="r below ½: less likely under the trainer")
    more: Corner | None = Field(None, description="r of at least 2: more likely under the trainer")
    density: Density | None = None
    lost: Corner | None = Field(None, description="π_rollout above 0.9, π_train below 0.5")
    noise: Noise | None = None
    positions: Positions | None = None
    token_thresholds: TokenThresholds | None = None
    tails: dict[str, ParetoTail] = Field({}, description="tokens, sequences; total. before without π_old")
    token_texts: dict[str, str] = Field({}, description="token id → text, white space visible; --tokenizer")
    lag: LagEvidence | None = None
