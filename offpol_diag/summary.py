"""The Summary, which holds every number of every report, and its JSON (`format = 1`).

Renderers, the recommendation and the gate read only a `Summary`: it suffices to draw a report again, and none
of them computes a number of the analysis.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, model_validator

from offpol_diag.errors import ResultError
from offpol_diag.printable import printable_json
from offpol_diag.wholefiles import MOST_RESULT, read, up_to

FORMAT = 1
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63), WithJsonSchema({"type": "integer"})]
"""A whole number of 64 bits: a larger one is no count of anything, and cannot become a float."""
HINT = "give the file that `offpol-diag analyze --json` wrote"


class Model(BaseModel):
    """A part of the result; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Points(Model):
    """A part with lists of equal length, an entry for each point; of `edges`, one more.

    Attributes:
        PARALLEL: names of the lists; those with a default may be empty.
    """

    PARALLEL: ClassVar[tuple[str, ...]] = ()

    @model_validator(mode="after")
    def _of_equal_length(self) -> Self:
        required = {name for name, field in type(self).model_fields.items() if field.is_required()}
        sizes = {name: len(getattr(self, name)) for name in self.PARALLEL}
        sizes = {name: size for name, size in sizes.items() if size or name in required}
        edges = {"edges less one": sizes.pop("edges") - 1} if "edges" in sizes else {}
        _equal(edges | sizes)
        return self


def _equal(sizes: Mapping[str, int]) -> None:
    """Refuse lists of different lengths that describe the same points."""
    if len(set(sizes.values())) > 1:
        raise ValueError(f"lists differ in length: {', '.join(f'{n} {size}' for n, size in sizes.items())}")


LARGEST = sys.float_info.max


def finite(x: float) -> float:
    """Return x, or the largest float64 of its sign where it overflows."""
    return min(max(x, -LARGEST), LARGEST)


class Number(Model):
    """A number with its interval, unit and definition.

    `value` is null where the number cannot be computed; `unknown` gives the reason.
    """

    value: float | None = None
    interval: tuple[float, float] | None = Field(
        None,
        description="95%, bootstrap over groups of sequences; an end that overflows is the largest float64",
    )
    unit: str = ""
    over: str = Field("", description="what it is averaged over")
    formula: str = ""
    unknown: str | None = Field(None, description="why there is no value, e.g. 'missing column rewards'")
    note: str | None = Field(None, description="a caution on this number, e.g. an unreliable heavy tail")
    log10: float | None = Field(None, description="log10 of the value, where the value itself overflows")
    clamped: float | None = Field(None, description="share of terms on which the safety bound acted")

    @property
    def known(self) -> bool:
        """Whether there is a value, be it the logarithm of one that overflows."""
        return self.value is not None or self.log10 is not None


Numbers = dict[str, Number]


class Estimate(Model):
    """A value with its 95% interval, where the name says all that there is to say."""

    value: float | None
    interval: tuple[float, float] | None = None


# ---------------------------------------------------------------- what was read, and how

DEEPEST = 32
"""Deepest nesting of a writer's provenance that is kept; deeper containers are replaced by "…"."""


def sound(value: Any, room: int = DEEPEST) -> Any:
    """Make a value valid for JSON and every reader: whole characters, and limited depth."""
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
    """Bad rows that were skipped (--on-bad-row skip)."""

    count: Whole = 0
    examples: list[str] = []


class DumpFacts(Model):
    """The dump: its files, size and columns, and notes on the data."""

    @model_validator(mode="before")
    @classmethod
    def _sound(cls, given: Any) -> Any:
        return sound(given)

    files: list[str]
    rows: Whole
    sequences: Whole = Field(description="rows with at least one unmasked token")
    tokens: Whole = Field(description="unmasked tokens")
    masked_tokens: Whole
    groups: Whole = Field(description="distinct groups (prompts): the units of the bootstrap")
    groups_exact: bool = True
    mean_length: float
    max_length: Whole
    columns: dict[str, str] = Field(description="our name → the column it was read from")
    others: list[str] = Field(
        [], description="columns read by their own names: of --group-by, and for groups that stand out"
    )
    ignored: list[str] | None = Field(None, description="columns that nobody reads; null: it is not known")
    provenance: dict[str, object] = {}
    skipped: Skipped = Skipped()
    notes: list[str] = Field([], description="loud warnings about the data")


class Run(Model):
    """Provenance of the numbers: version, device, seed, time and memory."""

    command: str = "analyze"
    version: str
    device: str
    engine: str = "local"
    seed: Whole
    replicates: Whole
    tokens: Whole
    sequences: Whole
    peak_rss_bytes: Whole
    seconds: dict[str, float]
    logs_left_out: list[str] = Field(
        [], description="presets whose trainer's logged numbers (as_logged) were not asked for: --presets all"
    )


# ---------------------------------------------------------------- where the mismatch is


class Place(Model):
    """One row of a location table: one step, one position bucket, one group-by value."""

    key: str
    order: float = Field(description="position on the axis")
    tokens: Whole
    sequences: Whole
    metrics: Numbers
    asked: Numbers = Field({}, description="further numbers, requested by place")


class Location(Model):
    """The mismatch along one axis: by training step, position, length or another column."""

    axis: str
    title: str
    numeric: bool = Field(description="whether the axis is a number line")
    places: list[Place]
    left_out: Whole = Field(0, description="number of places omitted because there are too many")


class Histogram(Points):
    """Counts over bins; `edges` has one entry more than `counts`."""

    PARALLEL = ("edges", "counts", "in_sync")

    title: str
    unit: str
    edges: list[float]
    counts: list[Whole]
    in_sync: list[Whole] = Field([], description="the same of tokens with lag 0; empty: no lag is known")


class Strip(Points):
    """Tokens of one response, to be drawn one by one: lists of equal length, one entry per unmasked token.

    A longer response is cut to the stretch of so many tokens that holds most of its K3.
    """

    PARALLEL = ("positions", "token_ids", "log_ratios", "rollout_log_probs", "train_log_probs")

    first: Whole = Field(description="unmasked tokens of the response before the first one here")
    positions: list[Whole] = Field(description="in the response, from 0; a gap is masked tokens")
    token_ids: list[Whole] = Field([], description="empty where the dump has none")
    log_ratios: list[float] = Field(description="Δ, nats, to 5 digits")
    rollout_log_probs: list[float] = Field(description="nats, to 5 digits")
    train_log_probs: list[float] = Field(description="nats, to 5 digits")


class WorstSequence(Model):
    """A sequence with a large mismatch."""

    sequence_id: str
    step: Whole | None = None
    length: Whole
    log_ratio_sum: float
    k3_mean: float
    max_abs_log_ratio: float
    policy_lag: Whole | None = None
    reward: float | None = None
    strip: Strip | None = None


class WorstToken(Model):
    """A token with a large mismatch, in context."""

    sequence_id: str
    step: Whole | None = None
    position: Whole
    length: Whole
    token_id: Whole | None = None
    rollout_log_prob: float
    train_log_prob: float
    log_ratio: float
    before: list[float] = Field([], description="log-ratios of up to 3 unmasked tokens before it")
    after: list[float] = Field([], description="log-ratios of up to 3 unmasked tokens after it")


class Worst(Model):
    """The worst sequences (by mean k3) and tokens (by |log-ratio|)."""

    sequences: list[WorstSequence] = []
    tokens: list[WorstToken] = []
    typical: WorstSequence | None = Field(None, description="of median k3 in a sample, of lag 0 if any is")


# ---------------------------------------------------------------- what one preset does to the dump


class Rule(Model):
    """One rejection rule of a preset, as declared."""

    statistic: str
    over: str
    lower: float | None = None
    upper: float | None = None
    advantage: str = "any"


class PresetResult(Model):
    """The numbers of one preset on this dump."""

    summary: str
    policy: str
    method: str = Field(description="weight, rejection and veto in one line")
    loss: str
    family: str = Field("", description="the method, by the name that trainers share")
    denominator: str = Field("kept", description="kept: the loss's denominator counts no rejected tokens")
    guards: list[str] = Field([], description="how overflow is prevented; unusual bounds")
    aspects: dict[str, str] = Field({}, description="what it does, by aspect: how members of a family differ")
    applied: bool = Field(True, description="false: the trainer only logs the numbers")
    aliases: list[str] = []
    trainers: list[str] = []
    source: str = ""
    note: str = ""
    logs: str | None = None
    needs: list[str] = Field([], description="columns the dump lacks; when not empty there are no metrics")
    metrics: Numbers = {}
    as_logged: dict[str, float | None] = Field({}, description="the trainer's own names and definitions")
    same_as: str = Field("", description="the first preset with the same metrics on this dump, if another")

    @property
    def idle(self) -> bool:
        """Whether every token weighs 1 on this dump: an ESS of 100% is then no merit."""
        ones = (self.metrics.get(name) for name in ("weight_min", "weight_max", "tokens_weighted"))
        return all(one is not None and one.value == 1.0 for one in ones)


# ---------------------------------------------------------------- what pictures need


class Series(Points):
    """A number along an axis: one entry per point, null where it is not known there."""

    PARALLEL = ("values", "low", "high")

    unit: str = Field("", description="nats, fraction, tokens; empty: a pure number")
    values: list[float | None]
    low: list[float | None] = Field([], description="lower ends of the 95% intervals; empty: none are known")
    high: list[float | None] = []


class BySteps(Points):
    """Numbers by training step, each group of equally many adjacent steps together where there are many."""

    PARALLEL = ("first", "last", "tokens", "sequences")

    first: list[Whole] = Field(description="first step of each group, [G]")
    last: list[Whole] = Field(description="last step of each group; equal to `first` for groups of one step")
    tokens: list[Whole]
    sequences: list[Whole]
    series: dict[str, Series] = Field(
        description="k1, k3, mean_ratio, ess_tokens, ess_sequences, chi2_token, chi2_sequence, ppl_ratio, "
        "khat_tokens, khat_sequences, reward, entropy, length, policy_lag, f_2; k1, k3 also with drift2. and "
        "total.; of each method in `weights`: METHOD.truncated_high, .tokens_rejected, .tokens_weighted, "
        ".ess_tokens; [G] each"
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.first:
            raise ValueError("there is no group of steps")
        _equal({"first": len(self.first)} | {name: len(x.values) for name, x in self.series.items()})
        return self


class RangeOfRatios(Model):
    """Tokens whose importance ratio r lies between two bounds."""

    low: float | None = Field(description="r ≥ low; null: no bound")
    high: float | None = Field(description="r < high; null: no bound")
    tokens: Whole
    share: float = Field(description="of all tokens, 0 to 1")
    k3_share: float | None = Field(description="of the sum of K3 over all tokens, 0 to 1")
    in_sync: Whole | None = Field(None, description="tokens with lag 0 among them; null: no lag is known")


class Density(Model):
    """Tokens by their probability under both policies, on bins of about equal width in the logit."""

    edges: list[float] = Field(description="probabilities that bound the bins, rising from 0 to 1, [N+1]")
    counts: list[list[Whole]] = Field(description="tokens, [N][N]: by rollout bin, then by trainer bin")
    in_sync: list[list[Whole]] = Field([], description="the same of tokens with lag 0; empty: none are known")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        bins = len(self.edges) - 1
        for table in (self.counts, self.in_sync or self.counts):
            if len(table) != bins or any(len(row) != bins for row in table):
                raise ValueError(f"{bins} bins do not hold a table of {len(table)} rows")
        return self


class Corner(Model):
    """Tokens that are likely under one policy and unlikely under the other."""

    tokens: Whole
    share: float = Field(description="of all tokens, 0 to 1")
    k3_share: float | None = Field(description="of the sum of K3 over all tokens, 0 to 1")
    in_sync_share: float | None = Field(None, description="of the tokens with lag 0; null: none are known")


class Noise(Points):
    """Quantiles of |Δ| by the rollout probability of the token, read off bins 1/16 wide (relative)."""

    PARALLEL = ("edges", "tokens", "median", "p90", "p99", "in_sync_tokens", "in_sync_median", "in_sync_p90")

    edges: list[float] = Field(description="rollout probabilities that bound the bins, from 0 to 1, [N+1]")
    tokens: list[Whole] = Field(description="[N]")
    median: list[float | None] = Field(description="nats, [N]")
    p90: list[float | None]
    p99: list[float | None]
    in_sync_tokens: list[Whole] = Field([], description="tokens with lag 0; empty: no lag is known")
    in_sync_median: list[float | None] = []
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
    split: str = Field("", description="why it is cut there, e.g. 'K3 passes 0.1 at step 4'")
    grid: list[PositionSteps] = Field([], description="at most 16 groups of steps, in order, no intervals")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for one in (self.every, self.early, self.late, *self.grid):
            if one is not None:
                _equal({"labels": len(self.labels), "tokens": len(one.tokens), "k3": len(one.k3.values)})
        return self


class TokenThresholds(Points):
    """Rules on single tokens at many thresholds b, of the raw ratios of the main drift; [N] each."""

    PARALLEL = ("b", "ess_tokens", "truncated", "weight_mean", "kept")

    b: list[float]
    ess_tokens: list[float | None] = Field(description="of min(r, b) over the tokens")
    truncated: list[float] = Field(description="share of tokens with r ≥ b")
    weight_mean: list[float | None] = Field(description="mean of min(r, b)")
    kept: list[float] = Field(description="share of tokens with 1/b ≤ r < b")


class SequenceThresholds(Points):
    """Rules on whole sequences at many thresholds b; w = ∏r of a sequence, g its geometric mean; [N] each."""

    PARALLEL = (
        "b",
        "kept_geometric",
        "kept_product",
        "sequences_geometric",
        "sequences_product",
        "ess_tokens",
        "ess_sequences",
    )

    b: list[float]
    kept_geometric: list[float] = Field(description="tokens in sequences with 1/b ≤ g < b, share of tokens")
    kept_product: list[float] = Field(description="tokens in sequences with 1/b ≤ w < b, share of tokens")
    sequences_geometric: list[float] = Field(description="share of sequences with 1/b ≤ g < b")
    sequences_product: list[float] = Field(description="share of sequences with 1/b ≤ w < b")
    ess_tokens: list[float | None] = Field(description="of min(w, b), every token weighed by its sequence")
    ess_sequences: list[float | None] = Field(description="of min(w, b) over the sequences")


class ParetoTail(Points):
    """The largest importance weights, and the generalised Pareto distribution fitted to them."""

    PARALLEL = ("rank", "log_weight", "log_fitted")

    over: Literal["tokens", "sequences"]
    weights: Whole = Field(description="n, weights in all")
    tail: Whole = Field(description="M, weights in the fitted tail")
    khat: Estimate = Field(description="interval: k̂ ± 1.96 (1 + k̂)/√M, weights taken as independent")
    limit: float = Field(description="k̂ above which means of the weights are unreliable at this n")
    log_cut: float = Field(description="log-weight at which the tail begins, nats")
    log_scale: float = Field(description="log of the scale of the fit, nats")
    rank: list[Whole] = Field(description="1 is the largest weight; at most 60 ranks, dense at the top")
    log_weight: list[float] = Field(description="the weight of that rank, as logged, nats")
    log_fitted: list[float | None] = Field(description="the same by the fit: quantile 1 − (rank − ½)/M")


class Kept(Points):
    """Shares that a method keeps, at its own threshold, by length and by the sign of the advantage."""

    PARALLEL = ("lengths", "by_length", "weight_by_length")

    lengths: list[str] = Field(description="quartiles of response length in words, short first, [4]")
    by_length: list[float | None] = Field(description="share not rejected of the tokens of the quartile, [4]")
    weight_by_length: list[float | None] = Field([], description="its mean weight, 0 of rejected tokens, [4]")
    positive: float | None = Field(None, description="the same where A > 0; null: no advantages")
    negative: float | None = Field(None, description="the same where A < 0")


class TokenType(Model):
    """All tokens with one id."""

    token_id: Whole
    tokens: Whole
    share: float = Field(description="of all tokens, 0 to 1")
    k3_share: float | None = Field(description="of the sum of K3 over all tokens, 0 to 1")
    k3: float = Field(description="mean K3, nats")
    mean_log_ratio: float = Field(description="mean Δ, nats")


class TokenTypes(Model):
    """Token ids by their share of K3."""

    distinct: Whole = Field(description="ids seen; those from 2^19 on count as one")
    half: Whole | None = Field(description="fewest ids that carry half of K3 together")
    worst: list[TokenType] = Field(description="at most 20, the largest share of K3 first")


class LagEvidence(Model):
    """Evidence of policy lag about the cause; the points to draw are `by.policy_lag` and `charts.steps`."""

    in_sync: Estimate | None = Field(None, description="K3 at lag 0, nats")
    in_sync_steps: list[Whole] = Field([], description="steps whose sequences all have lag 0, at most 20")
    in_sync_share: float | None = Field(None, description="K3 at lag 0 over K3 of the dump")
    tokens_in_sync: float | None = Field(None, description="share of tokens with lag 0")
    ratio_by_lag: dict[str, float] = Field({}, description="lag → K3 of its first step over K3 at lag 0")
    lag: Whole | None = Field(None, description="the lag that most steps have, if all of their sequences do")
    steps: tuple[Whole, Whole] | None = Field(None, description="first and last step of that lag")
    start: Estimate | None = Field(None, description="K3 of the first such step, nats")
    end: Estimate | None = Field(None, description="K3 of the last such step, nats")
    growth: float | None = Field(None, description="`end` over `start`")


class Band(Model):
    """A named range of a number, and who set it."""

    metric: str = Field(description="as in `metrics`")
    name: str = Field(description="typical, elevated, high, severe, good, fair, low, unreliable")
    low: float | None = Field(description="from here; null: no bound")
    high: float | None = Field(description="to below here; null: no bound")
    regime: str = ""
    source: str


class Crossing(Model):
    """The first step from which on a number is in a worse band, for all that follows or at least once."""

    metric: str
    band: str
    bound: float
    step: Whole


class Charts(Model):
    """Binned numbers from which the pictures of a report are drawn; empty or null where nothing is known."""

    bands: list[Band] = Field([], description="all published bands, best first within a metric")
    band: dict[str, str] = Field({}, description="metric → the band that this dump is in, if reliable")
    crossings: list[Crossing] = Field([], description="steps at which a number first enters a worse band")
    steps: BySteps | None = None
    gap_shares: dict[str, Estimate] = Field({}, description="rollout_old, old_current: K1 over that of total")
    ranges: list[RangeOfRatios] = Field([], description="rising r, from 0 to infinity")
    density: Density | None = None
    lost: Corner | None = Field(None, description="π_rollout above 0.9, π_train below 0.5")
    found: Corner | None = Field(None, description="the mirror image: π_rollout below 0.5, π_train above 0.9")
    noise: Noise | None = None
    positions: Positions | None = None
    token_thresholds: TokenThresholds | None = None
    sequence_thresholds: SequenceThresholds | None = None
    tails: dict[str, ParetoTail] = Field({}, description="tokens, sequences; with drift2. and total. before")
    kept: dict[str, Kept] = Field({}, description="by the names in `weights`")
    token_types: TokenTypes | None = None
    token_texts: dict[str, str] = Field({}, description="token id → text, white space visible; --tokenizer")
    lag: LagEvidence | None = None


# ---------------------------------------------------------------- the diagnosis


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
    statement: str
    for_: list[str] = Field([], alias="for", description="what speaks for it, a sentence each")
    against: list[str] = Field([], description="what speaks against it, a sentence each")


DiagnosisVerdict = Literal["healthy", "honest_mismatch", "bug", "cannot_tell"]


class Diagnosis(Model):
    """Whether the mismatch is a bug or genuine, and its causes."""

    verdict: DiagnosisVerdict
    headline: str
    causes: list[Cause] = Field(
        [], description="established causes, most likely first; none where the verdict is cannot_tell"
    )
    candidates: list[CandidateCause] = Field(
        [], description="causes that fit where none is established, most likely first; with cannot_tell only"
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


# ---------------------------------------------------------------- advice and verdicts

Decision = Literal[
    "fix the bug first", "no correction needed", "METHOD at THRESHOLD", "no method helps", "not enough data"
]


Label = Literal["measured", "default", "no difference detected"]


class Fired(Model):
    """A rule whose condition held, with the numbers it depends on."""

    rule: str
    level: Literal["decision", "alert", "info"]
    sentence: str
    saw: dict[str, float | None]
    source: str


class AtLength(Model):
    """Sequence importance sampling on the first T tokens of every response that has as many."""

    tokens: Whole = Field(description="T")
    sequences: Whole = Field(description="responses with at least T tokens")
    ess_sequences: Number
    khat: Estimate | None = Field(None, description="k̂ of the same weights")


class Lengths(Model):
    """Effective sample size of sequence importance sampling, by the length of the response."""

    longest: Number = Field(description="tokens of a response up to which it keeps 10% ESS")
    curve: list[AtLength] = Field(description="at increasing T, up to the length that 50 responses reach")
    median: Whole | None = Field(None, description="median length of a response, tokens, to 9%")
    log_normal: float | None = Field(None, description="tokens up to which e^(−2·K3·T) is above 10%")


MARGIN = 0.02
"""Share of the estimated error that matters: a method is significantly better if the interval of the
difference lies beyond it."""


class Ranked(Model):
    """A correction's place by the estimated error of an update."""

    title: str
    score: float = Field(description="least error of all / its error, in percent: 100 for the best")
    behind: Number | None = Field(description="its error / the chosen one's − 1; null: the chosen one")

    @property
    def tie(self) -> bool:
        """Whether it is a toss-up with the chosen one: the interval of the difference includes 0."""
        ends = self.behind.interval if self.behind else None
        return ends is not None and ends[0] <= 0 <= ends[1]

    @property
    def ahead(self) -> bool:
        """Whether its error is below the chosen one's: the interval of the difference lies below 0."""
        ends = self.behind.interval if self.behind else None
        return ends is not None and ends[1] < 0


class Recommendation(Model):
    """Which correction, at which threshold, and why."""

    decision: Decision
    label: Label | None = Field(None, description="whether the decision was measured or is the default")
    title: str | None = Field(None, description="the method in words")
    method: str | None = Field(None, description="preset name when the decision is a method")
    threshold: str | None = None
    settings: dict[str, str] = Field({}, description="settings that differ from the preset's, as in --set")
    sentence: str
    rule: str
    runner_up: str | None = None
    reasons: list[str] = Field([], description="mismatch, staleness, dependence on the token, in sentences")
    unknown: list[str] = Field([], description="what cannot be determined, and the column that it needs")
    numbers: dict[str, Numbers] = Field(
        {}, description="of the weights of the method, the runner-up and no correction, each at its threshold"
    )
    ranking: list[Ranked] = Field([], description="by the estimated error of an update, the best first")
    despite: str = Field("", description="why it is advised also where another's estimated error is lower")
    longest_response: Number | None = Field(None, description="`lengths.longest`")
    config: str | None = Field(None, description="configuration for the trainer of --for, ready to paste")
    fired: list[Fired] = []


class GateVerdict(Model):
    """The verdict on one bound."""

    name: str = Field(description="k3, seq_mis.ess_tokens, step:k3, p90:k3; or diagnosis")
    said: str = Field("", description="the trainer's name for it that was given; empty: ours")
    bound: Literal["max", "min", "within", "diagnosis"] = Field(
        description="the value, or its distance from `centre` (within), against `limit`; or `diagnosis`"
    )
    limit: float = Field(description="0 for a diagnosis")
    unit: str = Field("", description="of value and limit, as in `metrics`; empty: a pure number")
    centre: float | None = None
    value: float | None
    interval: tuple[float, float] | None = None
    log10: float | None = Field(None, description="log10 of the value, where the value itself overflows")
    passed: bool | None = Field(description="null: undecided")
    open: bool = Field(False, description="the interval crosses the bound: no evidence of a failure")
    reason: str = ""
    level: Literal["error", "warn"] = Field("error", description="warn: leaves the exit code alone")
    judged_on: Literal["interval", "value", ""] = Field("", description="empty: undecided")
    steps: str = Field("", description="the steps that the bound is for; empty: all")
    where: str = Field("", description="the place that decided, e.g. step 40")
    source: str = Field("", description="where the bound was set: an option, or a file and its table")
    note: str = Field("", description="the note of the gate file")
    baseline: float | None = Field(None, description="the value in the baseline")
    baseline_interval: tuple[float, float] | None = None
    tolerance: str = Field("", description="by how much the baseline's value may be exceeded")
    diagnosis: DiagnosisVerdict | None = Field(None, description="the one found, where it is the bound")
    diagnosis_fails: DiagnosisVerdict | None = Field(None, description="the mildest one that fails")
    diagnosis_baseline: DiagnosisVerdict | None = Field(None, description="the one in the baseline")


# ---------------------------------------------------------------- side by side


class Subset(Model):
    """A subset of the tokens or of the sequences: its size and means."""

    count: Whole
    share: Number
    length: Number
    reward: Number
    positive: Number
    negative: Number
    log_ratio: Number


class LostSequence(Model):
    """A sequence with tokens that one preset drops and the other keeps."""

    sequence_id: str
    step: Whole | None = None
    length: Whole
    tokens: Whole = Field(description="number of such tokens")
    log_ratio_sum: float
    reward: float | None = None
    fired: list[str] = Field([], description="the rules that dropped them")


class Drops(Model):
    """The tokens and sequences that one preset drops and the other keeps."""

    dropped_by: str
    kept_by: str
    tokens: Subset
    sequences: Subset = Field(description="sequences dropped whole by the one only")
    examples: list[LostSequence] = Field([], description="such sequences with the largest |ΣΔ|")


class Comparison(Model):
    """Presets against one of them; differences are paired: taken within each bootstrap replicate."""

    against: str = Field(description="the preset that the others are compared with")
    differences: dict[str, Numbers] = Field(description="preset → number → its value less the reference's")
    better: dict[str, str] = Field(description="number → the better preset, or why there is none")
    all_tokens: Subset | None = None
    all_sequences: Subset | None = None
    drops: list[Drops] = []


class Contrast(Model):
    """One number of run B beside that of run A."""

    name: str
    a: Number
    b: Number
    difference: Number = Field(description="B less A, taken within each bootstrap replicate")
    ratio: Number | None = Field(None, description="B over A, where both are positive")
    effect: str = Field("", description="the size of the difference in words")
    p_value: float | None = None
    p_adjusted: float | None = Field(None, description="corrected for the number of tests")
    differs: bool | None = Field(None, description="null: not tested")
    reason: str = Field("", description="why it was not tested")


class Pairing(Model):
    """Which groups (prompts) two runs share: those are resampled together."""

    by: Literal["group_id", "contents", "nothing"]
    shared: Whole
    only_a: Whole
    only_b: Whole
    exact: bool = True
    sentence: str


class OtherRun(Model):
    """Run B of two."""

    dump: DumpFacts
    metrics: Numbers
    presets: dict[str, PresetResult] = {}
    by: dict[str, Location] = {}
    histograms: dict[str, Histogram] = {}
    diagnosis: Diagnosis | None = None
    run: Run


class Against(Model):
    """Run A (the result around this) against run B."""

    b: OtherRun
    headline: str
    pairing: Pairing
    correction: str = Field(description="how p-values were corrected for their number")
    level: float
    tested: Whole
    differing: Whole
    contrasts: list[Contrast] = Field(description="most important first")
    needs: dict[str, str] = Field({}, description="what cannot be compared → the columns that it needs")
    notes: list[str] = []


# ---------------------------------------------------------------- many thresholds


class SweptPoint(Model):
    """A preset at one threshold."""

    threshold: float
    bounds: dict[str, float] = Field(description="the preset's bounds at this threshold, by their keys")
    own: bool = Field(False, description="whether it is the preset's own threshold")
    metrics: Numbers = Field(description="as those of `presets`")


class SolvedWindow(Model):
    """The bounds that keep a requested share."""

    asked: float
    kept: Whole = Field(description="units within the bounds")
    of: Whole
    ties: Whole = Field(0, description="further units with the last value kept, which no bound can separate")
    point: SweptPoint
    trainer: str = ""
    config: str = Field("", description="ready to paste")


class Sweep(Model):
    """One preset over many thresholds."""

    preset: str
    which: str = Field(description="the bound that moves, e.g. reject[0].upper")
    others: list[str] = Field([], description="other bounds of the preset that can be swept")
    statistic: str = Field(description="the statistic that is compared with the threshold")
    unit: str = Field(description="token or sequence: what the bound acts on")
    quartiles: list[str] = Field([], description="lengths of the quartiles, in words")
    points: list[SweptPoint]
    remarks: list[str] = []
    window: SolvedWindow | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.points:
            raise ValueError("there is no threshold")
        if len(self.quartiles) not in (0, 4):
            raise ValueError(f"{len(self.quartiles)} quartiles")
        return self


# ---------------------------------------------------------------- the whole


class Summary(Model):
    """The result of an analysis: every number of the report."""

    format: Literal[1] = 1
    dump: DumpFacts
    metrics: Numbers
    presets: dict[str, PresetResult]
    by: dict[str, Location] = {}
    histograms: dict[str, Histogram] = {}
    worst: Worst = Worst()
    lengths: Lengths | None = None
    weights: dict[str, Numbers] = Field({}, description="of the weights of each method to be recommended")
    diagnosis: Diagnosis | None = None
    recommendation: Recommendation | None = None
    charts: Charts = Charts()
    gates: list[GateVerdict] = []
    not_compared: str = Field("", description="what `gate` could not compare with the baseline, and why")
    sweep: Sweep | None = Field(None, description="one preset over many thresholds (`sweep`)")
    comparison: Comparison | None = Field(None, description="presets side by side (`compare DUMP`)")
    against: Against | None = Field(None, description="this run against another (`compare A B`)")
    run: Run

    @property
    def prefix(self) -> str:
        """The prefix of the main pair of policies: rollout → old, or the first other that is known."""
        known = (one for one in ("", "total.", "drift2.") if self.number("k3", one).value is not None)
        return next(known, "")

    def number(self, name: str, prefix: str | None = None) -> Number:
        """Return a number of a pair of policies, by default the main one; an empty one if there is none."""
        return self.metrics.get((self.prefix if prefix is None else prefix) + name, Number())

    @property
    def is_bug(self) -> bool:
        """Whether the log-probs are logged wrongly, so that no correction may be ranked."""
        return self.diagnosis is not None and self.diagnosis.verdict == "bug"

    @property
    def undecided(self) -> Diagnosis | None:
        """The diagnosis of a dump that cannot decide between causes that fit; None of any other."""
        return self.diagnosis if self.diagnosis is not None and self.diagnosis.candidates else None

    def to_json(self) -> str:
        """Return the published JSON: one object, indented, ending in a newline."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        return printable_json(text) + "\n"


class _Stamp(BaseModel):
    format: Whole


def load(path: Path) -> Summary:
    """Read a result written by `to_json`.

    Raises:
        ResultError: not readable, not JSON, not ours, or of another format.
    """
    return loads(text_of(path), str(path))


def text_of(path: Path) -> str:
    """Read the JSON of a result."""
    with _readable(str(path)):
        return read(path, MOST_RESULT).decode()


def text_of_stream(stream: BinaryIO, name: str) -> str:
    """Read the JSON of a result from a stream."""
    with _readable(name):
        return up_to(stream, MOST_RESULT).decode()


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ResultError(f"{name}: cannot be read as a result ({why})", HINT) from error


def first_mistake(error: ValidationError) -> str:
    """Return the place of the first mistake in a file, and what is wrong there."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"


def loads(text: str, name: str) -> Summary:
    """Parse the JSON of a result; `name` is its name in errors."""
    try:
        stamp = _Stamp.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(f"{name}: this is not a result of offpol-diag", HINT) from error
    if stamp.format != FORMAT:
        message = f"{name}: result format {stamp.format}, this version reads format {FORMAT}"
        raise ResultError(message, "analyze the dump again")
    try:
        return Summary.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(f"{name}: {first_mistake(error)}", HINT) from error
