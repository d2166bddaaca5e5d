"""The Result, which holds every number of every report, and its JSON.

Renderers, the recommendation and the gate read only a `Result`: it suffices to draw a report again, and none
of them computes a number of the analysis. What is in memory is what is in the file: a `Number` is a short
list there, and so is a row of a table. `Result.model_json_schema()` is the schema.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from offpol_diag.errors import ResultError, UsageError, did_you_mean
from offpol_diag.files import MOST_RESULT, read, up_to
from offpol_diag.metrics import PAIRS
from offpol_diag.number import Number, Numbers
from offpol_diag.printable import printable_json

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl


T = TypeVar("T")
HINT = "give the file that `offpol-diag analyze --json` wrote, or analyze the dump again"
DEEPEST = 32
"""Deepest nesting of a writer's provenance that is kept; deeper containers are replaced by "…"."""
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A whole number of 64 bits: a larger one is no count of anything, and cannot become a float."""


class Model(BaseModel):
    """A part of the result; unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", allow_inf_nan=False, defer_build=True, validate_by_name=True, serialize_by_alias=True
    )


# ---------------------------------------------------------------- what was read, and how


class DumpFacts(Model):
    """The dump: its files, size and columns, and notes on the data."""

    files: list[str]
    given: list[str] = Field([], description="files, folders, globs and URIs as they were given")
    rows: Whole
    sequences: Whole = Field(description="rows with at least one unmasked token")
    tokens: Whole = Field(description="unmasked tokens")
    masked_tokens: Whole
    groups: Whole = Field(description="distinct groups (a prompt of a step): units of the bootstrap")
    groups_exact: bool = True
    columns: dict[str, str] = Field(description="our name → the column it was read from")
    others: list[str] = Field([], description="columns read by their own names, as of --group-by")
    ignored: list[str] | None = Field(None, description="columns that nobody reads; null: it is not known")
    provenance: dict[str, object] = {}
    skipped: Whole = Field(0, description="bad rows that were left out (--on-bad-row skip)")
    skipped_examples: list[str] = Field([], description="what was bad about the first of them")
    above_0: dict[str, Whole] = Field({}, description="column → log-probs above 0, if there are any")
    notes: list[str] = Field([], description="loud warnings about the data")

    @model_validator(mode="before")
    @classmethod
    def _sound(cls, given: Any) -> Any:
        return _sound(given)


def _sound(value: Any, room: int = DEEPEST) -> Any:
    """Make what a file says of itself valid for JSON: whole characters, and limited depth."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_sound(one, room - 1) for one in value] if room else "…"
    if isinstance(value, dict):
        return {_sound(key): _sound(one, room - 1) for key, one in value.items()} if room else "…"
    return value


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


# ---------------------------------------------------------------- where the mismatch is


class Place(NamedTuple):
    """One place of an axis: one step, one position bucket, one group-by value."""

    key: str
    tokens: int
    sequences: int
    numbers: Numbers


class Columns(Model):
    """A part of the result whose lists are the columns of one table; a dictionary holds further ones."""

    @model_validator(mode="after")
    def _equally_long(self) -> Self:
        found = [value for _, value in self]
        columns = chain(found, *(value.values() for value in found if isinstance(value, dict)))
        if len({len(one) for one in columns if isinstance(one, list)}) > 1:
            raise ValueError("its lists are not equally long")
        return self


class Axis(Columns):
    """The places along an axis: training step, position, length or another column."""

    title: str
    places: list[str] = Field(description="their numbers are those of `dump@AXIS/PLACE`")
    tokens: list[Whole]
    sequences: list[Whole]
    left_out: Whole = Field(0, description="number of places omitted because there are too many")


class WorstSequence(NamedTuple):
    """A sequence with a large mismatch, with up to 256 of its tokens: the stretch that holds most of its K3.

    `first` unmasked tokens of the response come before it. `positions` in the response count from 0, and a
    gap is masked tokens; log-ratios and log-probs are in nats, to 5 digits. A list is empty where nothing is
    known.
    """

    sequence_id: str
    step: Whole | None
    length: Whole
    log_ratio_sum: float
    k3_mean: float
    max_abs_log_ratio: float
    policy_lag: Whole | None = None
    reward: float | None = None
    first: Whole = 0
    positions: list[Whole] = []
    token_ids: list[Whole] = []
    log_ratios: list[float] = []
    rollout_log_probs: list[float] = []
    train_log_probs: list[float] = []


# ---------------------------------------------------------------- numbers behind charts


class AtLength(NamedTuple):
    """Sequence importance sampling on the first `tokens` tokens of the `sequences` that have as many."""

    tokens: Whole
    sequences: Whole
    ess_sequences: Number


class Lengths(Model):
    """Effective sample size of sequence importance sampling, by the length of the response."""

    longest: Whole | None = Field(
        description="tokens of a response up to which it keeps 10% ESS; null: all in the curve, or unknown"
    )
    curve: list[AtLength] = Field([], description="at increasing T, up to the length that 50 responses reach")
    median: Whole | None = Field(None, description="median length of a response, tokens, to 9%")


class BySteps(Columns):
    """Numbers by training step, each group of equally many adjacent steps together where there are many."""

    first: list[Whole] = Field(description="first step of each group, [G]", min_length=1)
    last: list[Whole] = Field(description="last step of each group; equal to `first` for groups of one step")
    series: dict[str, list[Number]] = Field(
        description="names of the main pair, drift2.k3, METHOD.tokens_rejected → a number for each group, [G]"
    )


class Corner(NamedTuple):
    """Some tokens: how many, which share of all, and which share of the sum of K3, 0 to 1."""

    tokens: Whole
    share: float
    k3_share: float | None


class ParetoTail(Model):
    """The largest importance weights, and the generalised Pareto distribution fitted to them."""

    weights: Whole = Field(description="n, weights in all")
    khat: Number = Field(description="interval: k̂ ± 1.96 (1 + k̂)/√M, weights taken as independent")
    limit: float = Field(description="k̂ above which means of the weights are unreliable at this n")
    points: list[tuple[Whole, float, float | None]] = Field(
        description="rank, from 1, at most 60 of them; log of that weight, nats; the same by the fit"
    )


class LagEvidence(Model):
    """Evidence of policy lag about the cause; the points to draw are `charts.steps`."""

    in_sync: Number | None = Field(None, description="K3 at lag 0, nats")
    in_sync_share: float | None = Field(None, description="K3 at lag 0 over K3 of the dump")
    lag: Whole | None = Field(None, description="the lag that most steps have, if all of their sequences do")
    steps: tuple[Whole, Whole] | None = Field(None, description="first and last step of that lag")
    start: Number | None = Field(None, description="K3 of the first such step, nats")
    end: Number | None = Field(None, description="K3 of the last such step, nats")
    growth: float | None = Field(None, description="`end` over `start`")


class Charts(Model):
    """Numbers from which the pictures of a report are drawn; empty or null where nothing is known."""

    crossings: list[tuple[str, float, Whole]] = Field(
        [], description="band of K3, where it begins, and the first step from which on K3 is in it or beyond"
    )
    steps: BySteps | None = None
    log_ratios: list[tuple[float, float, Whole, Whole]] = Field(
        [], description="bins of Δ of the main pair: from, to, nats; tokens, and those of them with lag 0"
    )
    less: float | None = Field(None, description="share of tokens with r below ½: less likely in the trainer")
    more: float | None = Field(None, description="share of tokens with r of at least 2: more likely there")
    density: tuple[list[float], list[list[Whole]]] | None = Field(
        None,
        description="tokens by their probability under both policies: the N + 1 probabilities that bound the "
        "bins, about equally wide in the logit; tokens, [N][N], by rollout bin, then by trainer bin",
    )
    lost: Corner | None = Field(None, description="π_rollout above 0.9, π_train below 0.5")
    noise: list[tuple[float, float, float | None, float | None, float | None, Whole, float | None]] = Field(
        [],
        description="bins of the rollout probability: from, to; median, 90th and 99th percentile of |Δ|, "
        "nats, read off bins 1/16 wide; tokens with lag 0, and their 90th percentile",
    )
    token_thresholds: list[tuple[float, float | None, float, float]] = Field(
        [], description="b; ESS of min(r, b) over the tokens; share with r ≥ b; share with 1/b ≤ r < b"
    )
    tails: dict[str, ParetoTail] = Field({}, description="tokens, sequences; total. before without π_old")
    token_texts: dict[str, str] = Field({}, description="token id → text, white space visible; --tokenizer")
    lag: LagEvidence | None = None

    @model_validator(mode="after")
    def _fit(self) -> Self:
        bounds, rows = self.density or ([0.0], [])
        if any(size != len(bounds) - 1 for size in (len(rows), *map(len, rows))):
            raise ValueError("density is not [N + 1] and [N][N]")
        return self


# ---------------------------------------------------------------- presets, side by side and swept


class PresetFacts(Model):
    """One preset: what it does; its numbers are those of `preset/NAME`."""

    summary: str
    policy: str
    method: str = Field(description="weight, rejection and veto in one line")
    loss: str
    kind: str = Field("", description="what the method acts on: presets are grouped by it")
    aliases: list[str] = []
    needs: list[str] = Field([], description="columns the dump lacks; when not empty there are no numbers")


class Subset(Model):
    """A subset of the tokens or of the sequences: its size, share and means over their sequences."""

    count: Whole
    numbers: Numbers = Field(description="share, length, log_ratio, reward")


class LostSequence(NamedTuple):
    """A sequence with tokens that one preset drops and the other keeps."""

    sequence_id: str
    step: Whole | None
    length: Whole
    tokens: Whole
    log_ratio_sum: float
    reward: float | None


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
    all_tokens: Subset | None = None
    all_sequences: Subset | None = None
    drops: list[Drops] = []


class SweptPoint(Model):
    """A preset at one threshold."""

    threshold: float
    bounds: dict[str, float] = Field(description="the preset's bounds at this threshold, by their keys")
    own: bool = Field(False, description="whether it is the preset's own threshold")
    numbers: Numbers = Field(description="as those of presets")


class SolvedWindow(Model):
    """The bounds that keep a requested share."""

    asked: float
    kept: Whole = Field(description="units within the bounds")
    of: Whole
    preset: str = Field(description="the preset with these bounds, by name")
    point: SweptPoint


class Sweep(Model):
    """One preset over many thresholds."""

    preset: str
    which: str = Field(description="the bound that moves, e.g. reject[0].upper")
    statistic: str = Field(description="the statistic that is compared with the threshold")
    unit: str = Field(description="token or sequence: what the bound acts on")
    points: list[SweptPoint] = Field(min_length=1)
    window: SolvedWindow | None = None


# ---------------------------------------------------------------- runs against the first


class Contrast(NamedTuple):
    """One number of a further run, here called B, beside that of run A.

    Attributes:
        difference: B less A, taken within each bootstrap replicate.
        ratio: B over A, where both are positive.
        p_adjusted: by Holm's method for the number of tests, over all runs.
        differs: whether that is below 5%; None: not tested, `reason` says why.
    """

    name: str
    a: Number
    b: Number
    difference: Number
    ratio: Number | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    differs: bool | None = None
    reason: str = ""


class Against(Model):
    """A further run against run A (the result around this); of it only the numbers compared are kept."""

    letter: str = Field("B", description="what the run is called: B, C, …")
    run: Result
    pairing: str = Field(description="which groups (prompts) both have: those are resampled together")
    contrasts: list[Contrast] = Field(description="most important first")
    missing: list[str] = Field([], description="pairs of policies and presets that not both have")


# ---------------------------------------------------------------- the diagnosis


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
    exact: bool = Field(False, description="whether the evidence is an exact count")
    where: str = Field("", description="the group affected, e.g. 'engine = 3'; empty: all")
    tokens: Whole | None = Field(None, description="affected tokens of the sample")
    sequences: Whole | None = Field(None, description="affected sequences of the sample")
    examples: list[tuple[str, Whole, float, float]] = Field(
        [], description="tokens: sequence, position in the response from 0, log π_rollout, log π_train"
    )
    confirm: str = ""
    fix: str = ""
    after: After | None = None


class CandidateCause(Model):
    """A cause that fits a mismatch, where the dump cannot decide between several; it comes without a fix."""

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
    causes: list[Cause] = Field([], description="established, most likely first; none with cannot_tell")
    candidates: list[CandidateCause] = Field([], description="that fit, with cannot_tell only")
    where: list[Location] = Field([], description="that tell damaged tokens from clean ones, clearest first")
    decide: str = Field("", description="the one measurement that decides between the candidates")
    undecidable: list[str] = []
    sequences: Whole | None = Field(None, description="size of the sample that was examined, in sequences")
    tokens: Whole | None = Field(None, description="size of the sample that was examined, in tokens")


# ---------------------------------------------------------------- the third opinion of `rescore`

Outcome = Literal["same", "engine", "trainer", "both", "reference", "few"]
State = Literal["same", "variant", "unknown"]


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
    variant: str = ""
    meaning: str = ""
    fix: str = ""
    lead: float | None = Field(None, description="lead over all honest hypotheses, in standard errors")
    reproduced: bool = Field(False, description="whether mean |Δ| to it is at most 1.5 of its bf16 noise")
    alike: list[str] = Field([], description="hypotheses that fit equally well")
    share: float = Field(1.0, description="share of the tokens that it holds for")
    where: str = Field("", description="their place, e.g. 'host = b'; empty: all, or no common one")
    groups: dict[str, Whole] = Field({}, description="hypothesis → prompts that it fits best, by itself")
    fits: list[Fit] = Field([], description="nearest first; empty without hypotheses")


class Reference(Model):
    """The verdict of three: whose log-probs a third computation, the run's model, reproduces."""

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
    missing: dict[str, str] = Field({}, description="hypothesis that cannot be tested here → why")
    small: dict[str, Whole] = Field(
        {}, description="hypothesis whose effect is too small to detect here → tokens needed"
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


# ---------------------------------------------------------------- advice and gate

Decision = Literal["fix the bug first", "no correction needed", "METHOD at THRESHOLD", "not enough data"]


class Recommendation(Model):
    """Which correction, at which threshold, and why."""

    decision: Decision
    title: str | None = Field(None, description="the method in words")
    method: str | None = Field(None, description="preset name when the decision is a method")
    threshold: str | None = None
    sentence: str
    rule: str
    source: str = Field("", description="what the rule rests on")
    alternatives: list[str] = Field([], description="presets of other families, to be seen beside it")
    config: str | None = Field(None, description="configuration for the trainer of --for, ready to paste")


class GateVerdict(Model):
    """The verdict on one bound."""

    name: str = Field(description="k3, seq_mis.ess_tokens, step:k3; or diagnosis")
    must: str = Field(description="the bound in words: ≤ 0.002")
    limit: float = Field(0.0, description="0 for a diagnosis; of one near a target, the distance from it")
    number: Number = Field(Number(), description="what was judged; of a diagnosis nothing")
    passed: bool | None = Field(description="null: undecided")
    open: bool = Field(False, description="the interval crosses the bound: no evidence of a failure")
    reason: str = ""
    where: str = Field("", description="the place that decided, e.g. step 40")


# ---------------------------------------------------------------- the whole


class Result(Model):
    """The result of an analysis: every number of the report.

    A number is found by its subject and its name. Subjects are `dump`, `preset/NAME`, and these at a place:
    `dump@step/3`, `preset/token_is@step/3`.
    """

    format: Literal[3] = 3
    dump: DumpFacts
    run: Run
    subjects: dict[str, Numbers] = Field({}, alias="numbers", description="subject → name → number")
    axes: dict[str, Axis] = {}
    presets: dict[str, PresetFacts] = {}
    worst: list[WorstSequence] = Field([], description="by mean K3, the largest first")
    lengths: Lengths | None = None
    diagnosis: Diagnosis | None = None
    recommendation: Recommendation | None = None
    reference: Reference | None = Field(None, description="of a dump with what `rescore` writes")
    charts: Charts = Charts()
    gates: list[GateVerdict] = []
    sweep: Sweep | None = Field(None, description="one preset over many thresholds (`sweep`)")
    comparison: Comparison | None = Field(None, description="presets side by side (`compare DUMP`)")
    against: list[Against] = Field([], description="further runs against this one (`compare A B C`)")

    def of(self, subject: str) -> Numbers:
        """Return the numbers of a subject; none if it has none."""
        return self.subjects.get(subject, {})

    @property
    def whole(self) -> Numbers:
        """The numbers of the whole dump by name, with their prefix."""
        return self.of("dump")

    def preset(self, name: str) -> Numbers:
        """Return the numbers of a preset."""
        return self.of(f"preset/{name}")

    def at(self, axis: str, subject: str = "dump") -> list[Place]:
        """Return the places of an axis with the numbers of a subject there; none without the axis."""
        found = self.axes.get(axis)
        if found is None:
            return []
        rows = zip(found.places, found.tokens, found.sequences, strict=True)
        return [Place(*row, self.of(place_of(axis, row[0], subject))) for row in rows]

    @property
    def prefix(self) -> str:
        """The prefix of the main pair of policies: rollout → old, or the first other that is known."""
        known = (one for one in PAIRS if self.whole.get(f"{one}k3", Number()).value is not None)
        return next(known, "")

    def main(self, name: str) -> Number:
        """Return a number of the main pair of policies; an empty one if there is none."""
        return self.whole.get(self.prefix + name, Number())

    def number(self, name: str, preset: str | None = None) -> Number:
        """Return a number of the dump (`k3`, `drift2.k3`) or of a preset (`ess_tokens`): value and interval.

        Raises:
            UsageError: there is no such preset, or no such number; the hint has the names.
        """
        if preset is not None:
            _require(preset, self.presets, "preset")
        found = self.whole if preset is None else self.preset(preset)
        return _require(name, found, "number")

    def numbers(self) -> pl.DataFrame:
        """Return a row for every number: its name, preset (null for the dump's), value, interval and unit."""
        import polars as pl

        rows = []
        for preset in (None, *self.presets):
            for name, one in (self.preset(preset) if preset else self.whole).items():
                whole, ends = f"{preset}.{name}" if preset else name, one.interval or (None, None)
                rows.append((whole, preset, name, one.value, *ends, one.unit, one.unknown))
        columns = ("name", "preset", "metric", "value", "low", "high", "unit", "unknown")
        schema = {name: pl.Float64 if name in ("value", "low", "high") else pl.String for name in columns}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def values(self) -> dict[str, float]:
        """Return every known number by name as trackers take it: `k3`, `token_is.ess_tokens`."""
        pairs = self.numbers().select("name", "value").iter_rows()
        return {name: value for name, value in pairs if value is not None}

    @property
    def is_bug(self) -> bool:
        """Whether the log-probs are logged wrongly, so that no correction may be ranked."""
        return self.diagnosis is not None and self.diagnosis.verdict == "bug"

    @property
    def undecided(self) -> Diagnosis | None:
        """The diagnosis of a dump that cannot decide between causes that fit; None of any other."""
        return self.diagnosis if self.diagnosis is not None and self.diagnosis.candidates else None

    @property
    def passed(self) -> bool:
        """Whether every bound of `gate` holds."""
        return bool(self.gates) and all(one.passed for one in self.gates)

    def figure(self, name: str) -> go.Figure:
        """Return a chart of the page (`by_step`) as a figure of plotly, with its finding as title.

        Raises:
            UsageError: there is none of that name; the hint has the names.
        """
        from offpol_diag.report import answered

        return _require(name, {chart.name: chart for chart in answered(self).charts}, "figure").figure()

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the published JSON; write it to `path` if given."""
        return _kept(printable_json(self.model_dump_json() + "\n"), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the page, one file that fetches nothing; write it to `path` if given."""
        from offpol_diag.report import render

        return _kept(render(self, "report"), path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return the report as Markdown for a pull request; write it to `path` if given."""
        from offpol_diag.report import render

        return _kept(render(self, "md"), path)

    def __repr__(self) -> str:
        """Return the verdict in one line."""
        from offpol_diag.report import render

        return f"Result({render(self, 'terminal', quiet=True).strip()})"

    def _repr_html_(self) -> str:
        """Return the terminal's screen for a notebook; `to_html` makes the page."""
        from offpol_diag.report import render

        return f"<pre>{escape(render(self, 'terminal'))}</pre>"


def _require(name: str, known: Mapping[str, T], what: str) -> T:
    if name not in known:
        hint = did_you_mean(name, list(known)) or f"there are {', '.join(known) or 'none'}"
        raise UsageError(f'the result has no {what} "{name}"', hint)
    return known[name]


def _kept(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def place_of(axis: str, place: str, subject: str = "dump") -> str:
    """Return the subject at a place; a slash in the name of an axis is written %2F."""
    return f"{subject}@{axis.replace('%', '%25').replace('/', '%2F')}/{place}"


# ---------------------------------------------------------------- numbers by training step

NO_STEP = "∅"
"""Key of the rows without a step."""
APART = 5.0
"""Factor between K3 of steps at lag 0 from which they are not reported as one number."""


def at_steps(summary: Result) -> list[Place]:
    """Return the training steps of the dump with their numbers, without the rows that have no step."""
    return [one for one in summary.at("step") if one.key != NO_STEP]


def curve(summary: Result, name: str) -> dict[int, Number]:
    """Return training step → a number of the main pair of policies; empty where it is not known by step."""
    steps = summary.charts.steps
    return dict(zip(steps.last, steps.series[name], strict=True)) if steps and name in steps.series else {}


def apart_in_sync(summary: Result) -> dict[int, float]:
    """Return step → K3 of the least and the largest at lag 0, where these are `APART` or more apart."""
    synced = [step for step, lag in curve(summary, "policy_lag").items() if lag.value == 0]
    known = {step: k3.value for step, k3 in curve(summary, "k3").items() if k3.value and step in synced}
    ends = [pick(known, key=known.__getitem__) for pick in (min, max)] if known else []
    return {step: known[step] for step in ends} if ends and known[ends[1]] >= APART * known[ends[0]] else {}


def in_sync(summary: Result) -> Number | None:
    """Return K3 at lag 0; None where it is unknown, or differs too much by step to be one number."""
    lag = summary.charts.lag
    return lag.in_sync if lag and not apart_in_sync(summary) else None


# ---------------------------------------------------------------- reading


def load(path: Path) -> Result:
    """Read a result written by `to_json`; `-` is stdin.

    Raises:
        ResultError: not readable, not JSON, not ours, or of another format.
    """
    name = "stdin" if str(path) == "-" else str(path)
    try:
        data = up_to(sys.stdin.buffer, MOST_RESULT) if name == "stdin" else read(path, MOST_RESULT)
        return loads(data.decode(), name)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ResultError(f"{name}: cannot be read as a result ({why})", HINT) from error


def loads(text: str, name: str) -> Result:
    """Parse the JSON of a result; `name` is its name in errors."""
    try:
        return Result.model_validate_json(text)
    except ValidationError as error:
        message = f"{name}: this is not a result of this version of offpol-diag ({first_mistake(error)})"
        raise ResultError(message, HINT) from error


def first_mistake(error: ValidationError) -> str:
    """Return the place of the first mistake in a file, and what is wrong there."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "")
    return f"{place}: " * bool(place) + first["msg"].removeprefix("Value error, ")
