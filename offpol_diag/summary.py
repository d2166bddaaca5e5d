"""The Summary, which holds every number of every report, and its JSON (`format = 1`).

Renderers, the recommendation and the gate read only a `Summary`: it suffices to draw a report again, and none
of them computes a number of the analysis.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from offpol_diag.errors import ResultError
from offpol_diag.printable import printable_json
from offpol_diag.wholefiles import MOST_RESULT, read, up_to

FORMAT = 1
HINT = "give the file that `offpol-diag analyze --json` wrote"


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


# ---------------------------------------------------------------- where the mismatch is


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


# ---------------------------------------------------------------- what one preset does to the dump


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


# ---------------------------------------------------------------- the diagnosis


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


# ---------------------------------------------------------------- advice and verdicts

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


# ---------------------------------------------------------------- side by side


class Lot(Model):
    """Some of the tokens, or some of the sequences: how many, and of what kind."""

    count: int
    share: Number
    length: Number
    reward: Number
    positive: Number
    negative: Number
    log_ratio: Number


class LostSequence(Model):
    """A sequence that loses tokens to one preset and not to the other."""

    sequence_id: str
    step: int | None = None
    length: int
    tokens: int = Field(description="how many tokens the one drops and the other keeps")
    log_ratio_sum: float
    reward: float | None = None
    fired: list[str] = Field([], description="what dropped them")


class Drops(Model):
    """What one preset drops and the other keeps."""

    dropped_by: str
    kept_by: str
    tokens: Lot
    sequences: Lot = Field(description="sequences of which the one keeps no token, the other some")
    examples: list[LostSequence] = Field([], description="of the sequences concerned, the largest |ΣΔ|")


class Comparison(Model):
    """Presets against one of them; differences are paired: taken within each bootstrap replicate."""

    against: str = Field(description="the preset that the others are compared with")
    differences: dict[str, Numbers] = Field(description="preset → number → its value less the reference's")
    better: dict[str, str] = Field(description="number → the preset that is better, or why none is named")
    all_tokens: Lot | None = None
    all_sequences: Lot | None = None
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
    shared: int
    only_a: int
    only_b: int
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
    tested: int
    differing: int
    contrasts: list[Contrast] = Field(description="what matters first")
    needs: dict[str, str] = Field({}, description="what cannot be compared → what it needs")
    notes: list[str] = []


# ---------------------------------------------------------------- many thresholds


class SweptPoint(Model):
    """A preset at one threshold."""

    threshold: float
    bounds: dict[str, float] = Field(description="what the preset then holds, by the place in its table")
    own: bool = Field(False, description="the threshold that the preset has as it stands")
    metrics: Numbers
    quartiles: list[Numbers] = Field([], description="the same by quartile of sequence length, short first")
    marks: list[str] = Field([], description="length, floor, centre: what `remarks` warn of")


class NoiseFloor(Model):
    """How far numerics alone move the statistic, by one account of them."""

    source: str
    per_token: Number = Field(description="standard deviation of a token's Δ")
    statistic: Number = Field(description="the same of what the thresholds are compared with")
    found: bool = Field(description="true: seen in this dump; false: what that format would do")


class PredictedKeep(Model):
    """What a window keeps of responses of one length."""

    length: float
    kept: Number
    observed: Number | None = Field(None, description="in this dump, at about that length")


class SolvedWindow(Model):
    """The bounds that keep an asked share."""

    asked: float
    kept: int = Field(description="units within the bounds")
    of: int
    ties: int = Field(0, description="further units on the last value kept, which no bound can tell apart")
    centre: Number | None = Field(None, description="E[log r], nats; none where only one side is bounded")
    centre_k1: Number | None = Field(None, description="−k1, the same over tokens")
    point: SweptPoint
    predicted: list[PredictedKeep] = []
    spread: Numbers = Field({}, description="of log r at length L: √(falling²/L + staying²)")
    trainer: str = ""
    config: str = Field("", description="ready to paste")


class Sweep(Model):
    """One preset over many thresholds."""

    preset: str
    which: str = Field(description="the bound that moves, e.g. reject[0].upper")
    others: list[str] = Field([], description="what else of it could have moved")
    statistic: str = Field(description="what the threshold is compared with, in words")
    unit: str = Field(description="token or sequence: what the bound acts on")
    quartiles: list[str] = Field([], description="lengths of the quartiles, in words")
    points: list[SweptPoint]
    floor: list[NoiseFloor] = []
    remarks: list[str] = []
    window: SolvedWindow | None = None


# ---------------------------------------------------------------- the whole


class Summary(Model):
    """One dump, analysed."""

    format: Literal[1] = 1
    dump: DumpFacts
    metrics: Numbers
    presets: dict[str, PresetResult]
    by: dict[str, Location] = {}
    histograms: dict[str, Histogram] = {}
    worst: Worst = Worst()
    lengths: Lengths | None = None
    weights: dict[str, Numbers] = Field(
        {}, description="of the weights of each method that can be recommended"
    )
    diagnosis: Diagnosis | None = None
    recommendation: Recommendation | None = None
    gates: list[GateVerdict] = []
    sweep: Sweep | None = Field(None, description="one preset over many thresholds (`sweep`)")
    comparison: Comparison | None = Field(None, description="presets side by side (`compare DUMP`)")
    against: Against | None = Field(None, description="this run against another (`compare A B`)")
    run: Run

    def to_json(self) -> str:
        """Return the published JSON: one object, indented, ending in a newline."""
        text = json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)
        return printable_json(text) + "\n"


class _Stamp(BaseModel):
    format: int


def load(path: Path) -> Summary:
    """Read a result written by `to_json`.

    Raises:
        ResultError: not readable, not JSON, not ours, or of another format.
    """
    with _readable(str(path)):
        return loads(read(path, MOST_RESULT).decode(), str(path))


def load_stream(stream: BinaryIO, name: str) -> Summary:
    """Read a result from a stream, as `load` does; `name` is its name in errors."""
    with _readable(name):
        return loads(up_to(stream, MOST_RESULT).decode(), name)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ResultError(f"{name}: cannot be read as a result ({why})", HINT) from error


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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ResultError(f"{name}: {where}: {first['msg']}", HINT) from error
