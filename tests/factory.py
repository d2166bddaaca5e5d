"""Make dumps small enough to be read by eye, and a plausible Result of a healthy run with a heavy tail."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.dump.batch import Batch, joined
from offpol_diag.dump.convert import convert, open_dump
from offpol_diag.dump.writer import stamped, to_table, write_tables
from offpol_diag.errors import DumpError
from offpol_diag.number import OVERFLOWS, Number, Numbers
from offpol_diag.result import (
    Axis,
    Cause,
    Comparison,
    Diagnosis,
    Drops,
    DumpFacts,
    GateVerdict,
    LostSequence,
    Place,
    PresetFacts,
    Recommendation,
    Result,
    Run,
    Subset,
    WorstSequence,
    place_of,
)

ROLLOUT = [[-0.5, -1.0, -0.25], [-2.0], [], [-0.125, -4.0]]
OLD = [[-0.75, -1.5, -0.5], [-1.0], [], [-0.25, -3.0]]
ALL = 1_000_000
"""More tokens than a dump of these tests has."""


def write(
    path: Path, table: pa.Table | None = None, group: int | None = None, pages: Any = None, **columns: Any
) -> str:
    """Write a table, or columns beside ROLLOUT and OLD; None leaves a column out.

    `group` is the number of rows in a row group, `pages` are options of Parquet.
    """
    columns = {"rollout_log_probs": ROLLOUT, "old_log_probs": OLD} | columns
    if table is None:
        table = pa.table({name: column for name, column in columns.items() if column is not None})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group, **(pages or {}))
    return str(path)


def read(*sources: str, **options: Any) -> Batch:
    """Return the whole dump as one batch."""
    return joined(list(open_dump(sources, **options).batches()))


def plain(batch: Batch) -> dict[str, Any]:
    """Return a batch as plain Python, for comparing."""
    values = {name: value.tolist() for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
    return values | {"scalars": batch.scalars}


def refusal(*sources: str, **options: Any) -> DumpError:
    """Return the error that reading a dump ends in; its hint is never empty."""
    with pytest.raises(DumpError) as caught:
        list(open_dump(sources, **options).batches())
    assert caught.value.hint
    return caught.value


# ---------------------------------------------------------------- files of other forms

Table = list[dict[str, Any]]


class DumpFile:
    """A writer of one Parquet file, whatever the values of its batches."""

    def __init__(
        self,
        path: str | Path,
        provenance: Mapping[str, Any] | None = None,
        dtype: str = "float32",
        group: int = 0,
        **said: Any,
    ) -> None:
        self.path, self.said, self.group = Path(path), {**(provenance or {}), **said}, group
        self.floats = {"float32": pa.float32(), "float64": pa.float64(), "float16": pa.float16()}[dtype]
        self.tables: list[pa.Table] = []

    def write(self, **columns: Any) -> None:
        self.tables.append(to_table(columns, self.floats))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        table = pa.concat_tables(self.tables, promote_options="permissive")
        write_tables([table], self.path, stamped(self.said), self.group)


def converted(*sources: Path, columns: Mapping[str, str] | None = None) -> tuple[Table, list[str]]:
    """Convert files, and return the rows and what is noted of them."""
    to = sources[0].with_name("converted.parquet")
    try:
        made = convert([str(one) for one in sources], to, columns)
        rows: Table = pq.read_table(to).to_pylist()
    finally:
        to.unlink(missing_ok=True)
    return rows, made.notes


def unconvertible(path: Path, says: str, *options: str) -> None:
    """Check that the conversion of a file is one error with a hint, and that nothing else happens."""
    before = sorted(path.parent.rglob("*"))
    call = ["convert", str(path), "--to", str(path.with_name("out.parquet")), *options]
    ran = CliRunner().invoke(app, call)
    assert (ran.exit_code, ran.stderr[:7]) == (2, "error: "), (ran.stderr, ran.exception)
    assert ran.stderr.count("error: ") == ran.stderr.count("hint: ") == 1
    assert "Traceback" not in ran.stderr
    assert says in " ".join(ran.stderr.split()), ran.stderr
    assert sorted(path.parent.rglob("*")) == before


# ---------------------------------------------------------------- a Result

CURRENT = "current_log_probs"
NO_CURRENT = f"missing column {CURRENT}"


def number(value: float, spread: float | None = None, unit: str = "", **more: Any) -> Number:
    """Return a number with the interval value ± spread."""
    interval = None if spread is None else (value - spread, value + spread)
    return Number(value=value, interval=interval, unit=unit, **more)


def unknown(why: str = NO_CURRENT) -> Number:
    return Number(unknown=why)


def policy_gap(scale: float = 1.0) -> Numbers:
    """Make the gap metrics of one pair of policies."""
    return {
        "k3": number(2.03e-3 * scale, 1.5e-4 * scale, "nats", over="tokens", formula="mean of e^Δ − 1 − Δ"),
        "k1": number(2.05e-3 * scale, 1.6e-4 * scale, "nats", over="tokens", formula="mean of −Δ"),
        "mean_ratio": number(0.99998, 3e-4, over="tokens", formula="mean of e^Δ"),
        "chi2_token": number(4.6e-3 * scale, 5e-4 * scale, over="tokens", formula="mean of e^2Δ, minus 1"),
        "chi2_sequence": Number(
            log10=45.2, unknown=OVERFLOWS, over="sequences", formula="mean of e^(2ΣΔ), minus 1"
        ),
        "ppl_ratio": number(1.00205, 1.6e-4, over="sequences", formula="mean of e^(−mean Δ)"),
        "prob_diff_mean": number(0.0052, 2e-4, "fraction", over="tokens", formula="mean of |p − q|"),
        "pearson": number(0.9992, 1e-4, over="tokens", formula="Pearson correlation of p and q"),
        "f_2": number(8.3e-4, 1.1e-4, "fraction", over="tokens", formula="share of tokens with |Δ| > ln 2"),
    }


def metrics() -> Numbers:
    """Make metrics in which rollout → old is known, and old → current and rollout → current are not."""
    gap = policy_gap()
    absent = {f"{prefix}{name}": unknown() for prefix in ("drift2.", "total.") for name in gap}
    weights = {
        "ess_tokens": number(0.9954, 4e-4, "fraction", over="tokens", formula="(Σw)² / (n Σw²)"),
        "ess_sequences": number(0.031, 0.012, "fraction", over="sequences", formula="(Σw)² / (n Σw²)"),
        "khat_tokens": number(0.41, 0.03, over="tokens", formula="shape of the generalised Pareto tail"),
        "khat_sequences": number(1.2, 0.2, note="unreliable: k̂ exceeds 0.67", over="sequences"),
        "max_weight_share": number(0.12, unit="fraction"),
        "k3_top1_share": number(0.83, 0.02, "fraction", over="tokens"),
    }
    return {**gap, **weights, **absent}


@dataclass
class Row:
    """A preset with its numbers."""

    facts: PresetFacts
    numbers: Numbers

    def but(self, **changes: Any) -> Row:
        """Return it with some facts replaced."""
        return Row(self.facts.model_copy(update=changes), self.numbers)


@dataclass
class Location:
    """An axis with its places."""

    title: str
    places: list[Place]
    left_out: int = 0


def preset(summary: str, method: str, ess: float, rejected: float = 0.0, **more: Any) -> Row:
    """Make a preset with plausible numbers."""
    numbers = {
        "weight_mean": number(0.998, 0.001),
        "weight_max": number(2.0),
        "ess_tokens": number(0.9971, 2e-4, "fraction"),
        "ess_sequences": number(ess, 0.02, "fraction"),
        "chi2_token": number(2.9e-3, 2e-4),
        "k3": number(1.9e-3, 1e-4, "nats"),
        "ppl_ratio": number(1.002, 2e-4),
        "tokens_rejected": number(rejected, rejected / 10 or None, "fraction"),
        "tokens_weighted": number(1 - rejected, rejected / 10 or None, "fraction"),
        "sequences_dropped": number(rejected * 0.8, rejected / 10 or None, "fraction"),
        "vetoed": number(0.0, unit="fraction"),
        "pg_loss": number(-0.0123, 0.002),
        "pg_clipfrac": number(0.0031, 4e-4, "fraction"),
        "ppo_kl": unknown(),
    }
    given = {"policy": "old", "loss": "ppo_clip", **more}
    return Row(PresetFacts(summary=summary, method=method, **given), {} if "needs" in more else numbers)


def presets() -> dict[str, Row]:
    tis = {"kind": "sequence"}
    bounded = "weight sum truncate ≤ 2"
    window = "reject ratio mean [0.999, 1.001]; veto < 1e-4"
    return {
        "disabled": preset("No correction", "weight none", 1.0),
        "token_is": preset("Token TIS", "weight token truncate ≤ 2", 0.97, aliases=["token_tis"]),
        "seq_is": preset("Sequence TIS", bounded, 0.61, **tis),
        "seq_mis": preset("Sequence MIS", f"{bounded}; reject ratio sum [0.5, 2]", 0.83, 0.31),
        "geo_rs": preset("Geometric rejection", window, 0.99, 0.92),
        "seq_is_metrics": preset("The same", bounded, 0.61, **tis),
        "ppo_is_bypass": preset("PPO-IS", "none", 1.0, policy="current", needs=[CURRENT]),
    }


def place(key: str, order: float, k3: float) -> Place:
    numbers = {
        "k3": number(k3, k3 * 0.08, "nats"),
        "mean_ratio": number(1 + 1e-4 * math.sin(order), 4e-4),
        "ess_tokens": number(1 - 2.3 * k3, k3 / 5, "fraction"),
        "f_2": number(k3 * 0.4, k3 * 0.05, "fraction"),
    }
    return Place(key, 120_000, 256, numbers)


def by() -> dict[str, Location]:
    steps = [place(str(step), step, 1.6e-3 * (1 + 0.03 * step + 0.05 * math.sin(step))) for step in range(20)]
    starts = [0, 16, 64, 256, 1024, 4096]
    positions = [place(f"{start}+", start, 1.8e-3 * (1 + 0.1 * i)) for i, start in enumerate(starts)]
    chances = ["p < 0.01", "0.01–0.1", "0.1–0.5", "0.5–0.9", "0.9–1"]
    probabilities = [place(key, i, 0.05 / 8**i) for i, key in enumerate(chances)]
    engines = [place(key, i, 2e-3 * (1 + i)) for i, key in enumerate(("vllm-0", "vllm-1", "sglang-0"))]
    rows = [
        ("step", "step", steps, 0),
        ("position", "position in the response", positions, 0),
        ("probability", "rollout probability", probabilities, 0),
        ("engine", "engine", engines, 2),
    ]
    return {axis: Location(*row) for axis, *row in rows}


def worst() -> list[WorstSequence]:
    return [
        WorstSequence(
            f"prompt-{17 * i}/sample-{i}", i, 4096 - 31 * i, -9.1 + i, 0.031 / (i + 1), 7.2 - 0.3 * i
        )
        for i in range(8)
    ]


def recommendation() -> Recommendation:
    return Recommendation(
        decision="METHOD at THRESHOLD",
        title="token TIS at 2.0",
        method="token_is",
        threshold="2.0",
        sentence="Use truncated token weights: they lose 0.5% of the sample and bound every weight at 2.",
        rule="heavy_sequence_tail",
        source="Vehtari et al. 2024, Pareto smoothed importance sampling",
    )


def diagnosis() -> Diagnosis:
    cause = Cause(
        id="moe_outliers",
        statement="A few tokens carry most of the mismatch, as when routers pick other experts.",
        statistic="83% [81, 85]% of k3 lies in 1% of the tokens",
        confirm="replay the rollout's routing in the trainer (R3) and compare f_2",
        fix="routing replay, or a token-level cap",
    )
    return Diagnosis(
        verdict="honest_mismatch",
        headline="The two engines disagree, but the log-probs are those of the policy that sampled.",
        causes=[cause],
        undecidable=["temperature mismatch: the dump has no entropy column"],
    )


def gates() -> list[GateVerdict]:
    rows: list[tuple[str, str, float, Number, bool | None, str]] = [
        ("k3", "≤ 0.002", 0.002, number(2.03e-3, 1.5e-4), True, "the interval reaches below the limit"),
        ("ess_sequences", "≥ 0.5", 0.5, number(0.031, 0.012), False, ""),
        ("drift2.k3", "≤ 0.01", 0.01, Number(unknown=NO_CURRENT), None, NO_CURRENT),
    ]
    return [
        GateVerdict(name=name, must=must, limit=limit, number=one, passed=passed, reason=reason)
        for name, must, limit, one, passed, reason in rows
    ]


def dump_facts(**changes: Any) -> DumpFacts:
    columns = {"rollout_log_probs": "rollout_logprobs", "old_log_probs": "prev_logprobs", "step": "step"}
    given: dict[str, Any] = {
        "files": ["runs/moe-30b/step-000.parquet", "runs/moe-30b/step-001.parquet"],
        "given": ["runs/moe-30b"],
        "rows": 5130,
        "sequences": 5120,
        "tokens": 2_412_345,
        "masked_tokens": 81_234,
        "groups": 640,
        "columns": columns,
        "provenance": {"trainer": "verl 0.6", "engine": "vLLM 0.11", "temperature": 1.0},
        "notes": ["old_log_probs look as if stored in bfloat16: 16 low bits are zero throughout."],
    }
    return DumpFacts(**{**given, **changes})


def run() -> Run:
    counts = {"replicates": 1000, "tokens": 2_412_345, "sequences": 5120, "peak_rss_bytes": 412_000_000}
    seconds = {"total": 4.2, "read": 1.1, "compute": 2.6}
    return Run(version="0.1.0", device="cpu", seed=0, seconds=seconds, **counts)


def make_summary(**changes: Any) -> Result:
    """Make the Result with some of its fields replaced.

    `metrics` are the numbers of the dump, `presets` rows of `preset`, and `by` locations by axis.
    """
    given: dict[str, Any] = {
        "dump": dump_facts(),
        "metrics": metrics(),
        "presets": presets(),
        "by": by(),
        "worst": worst(),
        "diagnosis": diagnosis(),
        "recommendation": recommendation(),
        "gates": [],
        "run": run(),
    }
    given |= changes
    rows, axes = given.pop("presets"), given.pop("by")
    numbers = {"dump": given.pop("metrics")}
    numbers |= {f"preset/{name}": row.numbers for name, row in rows.items() if row.numbers}
    found = Result(subjects=numbers, presets={name: row.facts for name, row in rows.items()}, **given)
    for axis, one in axes.items():
        put(found, axis, one)
    return found


def put(summary: Result, axis: str, found: Location) -> None:
    """Give a result an axis with its places."""
    columns = ("key", "tokens", "sequences")
    keys, tokens, sequences = ([getattr(one, name) for one in found.places] for name in columns)
    summary.axes[axis] = Axis(
        title=found.title,
        places=keys,
        tokens=tokens,
        sequences=sequences,
        left_out=found.left_out,
    )
    summary.subjects |= {place_of(axis, place.key): place.numbers for place in found.places}


def with_numbers(summary: Result, subject: str, numbers: Numbers) -> Result:
    """Return a result with the numbers of a subject replaced."""
    return summary.model_copy(update={"subjects": summary.subjects | {subject: numbers}})


def make_comparison() -> Comparison:
    """Make a comparison of two presets of `make_summary`, with the tokens that the second drops."""
    difference = number(-0.31, 0.02, "fraction", formula="less that of disabled")
    means = {
        "share": number(0.12, 0.01, "fraction"),
        "length": number(812.5, 30.0, "tokens"),
        "reward": unknown("missing column rewards"),
    }
    some = Subset(count=1234, numbers=means)
    lost = LostSequence(
        sequence_id="a-very-long-name-of-a-sequence/0017",
        step=12,
        length=4096,
        tokens=4096,
        log_ratio_sum=-51.2,
        reward=None,
    )
    drops = Drops(dropped_by="seq_mis", kept_by="disabled", tokens=some, sequences=some, examples=[lost])
    return Comparison(
        against="disabled",
        differences={"seq_mis": {"ess_tokens": difference, "weight_max": number(1.0)}},
        all_tokens=some,
        all_sequences=some,
        drops=[drops],
    )
