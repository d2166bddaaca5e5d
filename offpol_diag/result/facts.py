"""What was read, and how; where the mismatch is; and what each preset does."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import Field, model_validator

from offpol_diag.number import Numbers
from offpol_diag.result.parts import Model, Points, Whole
from offpol_diag.rows import Columns

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
    given: list[str] = Field([], description="files, folders, globs and URIs as they were given")
    rows: Whole
    sequences: Whole = Field(description="rows with at least one unmasked token")
    tokens: Whole = Field(description="unmasked tokens")
    masked_tokens: Whole
    groups: Whole = Field(description="distinct groups (a prompt of a step): units of the bootstrap")
    groups_exact: bool = True
    mean_length: float
    max_length: Whole
    columns: dict[str, str] = Field(description="our name → the column it was read from")
    others: list[str] = Field(
        [], description="columns read by their own names: of --group-by, and for groups that stand out"
    )
    ignored: list[str] | None = Field(None, description="columns that nobody reads; null: it is not known")
    prompts: str = Field("", description="column of prompt ids, which `rescore` needs; empty: none")
    provenance: dict[str, object] = {}
    skipped: Skipped = Skipped()
    above_0: dict[str, Whole] = Field({}, description="column → log-probs above 0, if there are any")
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


# ---------------------------------------------------------------- where the mismatch is


class Place(NamedTuple):
    """One place of an axis: one step, one position bucket, one group-by value; `order` is where it lies."""

    key: str
    order: float
    tokens: int
    sequences: int
    numbers: Numbers


class Axis(Points):
    """The places along an axis: training step, position, length or another column."""

    title: str
    numeric: bool = Field(description="whether the axis is a number line")
    places: list[str] = Field(description="their numbers are those of `dump@AXIS/PLACE`")
    order: list[float] = Field(description="position of each place on the axis")
    tokens: list[Whole]
    sequences: list[Whole]
    left_out: Whole = Field(0, description="number of places omitted because there are too many")


class Histogram(Points):
    """Counts over bins; `edges` has one entry more than `counts`."""

    title: str
    unit: str
    edges: list[float]
    counts: list[Whole]
    in_sync: list[Whole] = Field([], description="the same of tokens with lag 0; empty: no lag is known")


class WorstSequence(NamedTuple):
    """A sequence with a large mismatch, with up to 256 of its tokens: the stretch that holds most of its K3.

    Attributes:
        first: unmasked tokens of the response before the first one here.
        positions: in the response, from 0; a gap is masked tokens; empty: no tokens were kept.
        token_ids: empty where the dump has none.
        log_ratios: Δ, nats, to 5 digits, as are the log-probs.
    """

    sequence_id: str
    step: int | None
    length: int
    log_ratio_sum: float
    k3_mean: float
    max_abs_log_ratio: float
    policy_lag: int | None = None
    reward: float | None = None
    first: int = 0
    positions: list[int] = []
    token_ids: list[int] = []
    log_ratios: list[float] = []
    rollout_log_probs: list[float] = []
    train_log_probs: list[float] = []


TOKEN_COLUMNS = {
    "positions": "<i8",
    "token_ids": "<i8",
    "log_ratios": "<f8",
    "rollout_log_probs": "<f8",
    "train_log_probs": "<f8",
}
"""Column of a sequence with an entry for each token → the type of an array of them."""


class WorstToken(NamedTuple):
    """A token with a large mismatch, with the log-ratios of up to 3 unmasked tokens before and after it."""

    sequence_id: str
    step: int | None
    position: int
    length: int
    token_id: int | None
    rollout_log_prob: float
    train_log_prob: float
    log_ratio: float
    before: list[float]
    after: list[float]


class Worst(Model):
    """The worst sequences (by mean k3) and tokens (by |log-ratio|)."""

    sequences: Annotated[list[WorstSequence], Columns(WorstSequence, *TOKEN_COLUMNS)] = []
    tokens: Annotated[list[WorstToken], Columns(WorstToken)] = []


# ---------------------------------------------------------------- what one preset does to the dump


class PresetFacts(Model):
    """One preset: what it does; its numbers are those of `preset/NAME`."""

    summary: str
    policy: str
    method: str = Field(description="weight, rejection and veto in one line")
    loss: str
    kind: str = Field("", description="what the method acts on, by which presets are listed")
    aliases: list[str] = []
    needs: list[str] = Field([], description="columns the dump lacks; when not empty there are no numbers")
    same_as: str = Field("", description="the first preset with the same numbers on this dump, if another")
