"""Tests of single lines that mutation testing could break unnoticed."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from offpol_diag import result as summaries
from offpol_diag.advice import growth
from offpol_diag.cli import app
from offpol_diag.gate import judged, required
from offpol_diag.number import Number
from offpol_diag.report import answered
from offpol_diag.report.parts import parts
from offpol_diag.result import Place, Result
from offpol_diag.table import Table
from tests import oracles
from tests.factory import Location, Row, dump_facts, make_summary
from tests.reading import analyze


def along(axis: str, *k3: float) -> dict[str, Location]:
    """Return k3 along an axis, each within 1%."""
    ratio = Number(value=1.0, interval=(0.99, 1.01))
    each = [{"k3": Number(value=x, interval=(0.99 * x, 1.01 * x)), "mean_ratio": ratio} for x in k3]
    many = {"tokens": 9000, "sequences": 90}
    places = [Place(key=str(i), numbers=one, **many) for i, one in enumerate(each)]
    return {axis: Location(title=axis, places=places)}


def table(name: str, summary: Result) -> Table:
    """Return a table further down the page."""
    every = (one for part in parts(summary, answered(summary)) for one in part.tables)
    return next(one for one in every if one.id == name)


# ---------------------------------------------------------------- the recommendation


@pytest.mark.parametrize(
    ("steps", "alarmed"),
    [
        ((1e-3, 1e-3, 4.9e-3), False),
        ((1e-3, 1e-3, 5.1e-3), True),
        ((1e-6, 1e-6, 9e-5), False),  # grows, and is still nothing
        ((1e-6, 1e-6, 1.1e-4), True),
        ((5.1e-3, 1e-3, 1e-3), False),
    ],
)
def test_growth_is_five_times_the_first_third_and_more_than_rounding(
    steps: tuple[float, ...], alarmed: bool
) -> None:
    assert (growth(make_summary(by=along("step", *steps))) is not None) is alarmed


def test_the_longest_preset_name_before_a_dot_is_the_one_meant() -> None:
    def result(k3: float) -> Row:
        return Row(make_summary().presets["disabled"], {"k3": Number(value=k3)})

    summary = make_summary(presets={"a": result(1.0), "a.b": result(2.0)})
    assert judged(summary, required(max=["a.b.k3=9"]))[0].value == 2.0


# ---------------------------------------------------------------- what is shown


@pytest.mark.parametrize("exact", [True, False])
def test_an_estimated_count_of_groups_says_so(exact: bool) -> None:
    summary = make_summary(dump=dump_facts(groups_exact=exact))
    (dump,) = (part for part in parts(summary, answered(summary)) if part.id == "dump")
    assert (", in about " in dump.text[0]) is not exact


# ---------------------------------------------------------------- what is read out of a dump


def row(rollout: list[float], old: list[float], **more: Any) -> dict[str, Any]:
    return {"rollout_log_probs": rollout, "old_log_probs": old, **more}


def measured(rows: list[dict[str, Any]], folder: Path, **more: Any) -> Result:
    return analyze([oracles.write(rows, folder / "dump.parquet")], **more)


def test_the_overflow_guard_is_counted_for_each_drift_by_itself(tmp_path: Path) -> None:
    p = [-1.0, -1.0]
    found = measured([row(p, p, current_log_probs=[-1.0, -2000.0])], tmp_path).whole
    for name in ("k3", "mean_ratio"):
        assert [found[f"{prefix}{name}"].clamped for prefix in ("", "drift2.", "total.")] == [0.0, 0.5, 0.5]


def test_the_tail_of_sequences_is_no_word_about_tokens(tmp_path: Path) -> None:
    d = np.random.default_rng(0).normal(0, 0.3, (100, 400))
    found = measured([row([-9.0] * 400, (x - 9.0).tolist()) for x in d], tmp_path).whole
    assert [found[name].note is None for name in ("ess_tokens", "ess_sequences", "chi2_sequence")] == [
        True,
        False,
        False,
    ]


def test_the_mean_length_is_over_sequences_that_have_a_token(tmp_path: Path) -> None:
    p = [-1.0, -1.0]
    facts = measured([row(p, p, response_mask=mask) for mask in ([1, 1], [0, 0])], tmp_path).dump
    assert (facts.mean_length, facts.rows, facts.sequences) == (2.0, 2, 1)
    assert (facts.tokens, facts.masked_tokens) == (2, 2)


def test_the_bars_of_a_histogram_hold_every_token(tmp_path: Path) -> None:
    d = np.random.default_rng(0).standard_t(1.5, 30_000)
    found = measured([row([-1e6] * 30_000, (d - 1e6).tolist())], tmp_path).histograms["log_ratio"]
    assert sum(found.counts) == 30_000
    assert (found.edges[0], found.edges[-1]) == (d.min() - 1e6 + 1e6, d.max() - 1e6 + 1e6)
    assert all(low < high for low, high in pairwise(found.edges))


def test_one_token_is_the_worst_hundredth_of_ten(tmp_path: Path) -> None:
    found = measured([row([-1.0] * 10, [-1.0] * 9 + [-2.0])], tmp_path).whole
    assert found["k3_top1_share"].value == pytest.approx(1.0)


def test_the_neighbours_of_a_worst_token_are_those_of_its_own_sequence(tmp_path: Path) -> None:
    p = [-1.0] * 4
    rows = [row(p, p), row(p, [-4.0, -1.0, -1.0, -3.0]), row(p, p)]
    first, last = measured(rows, tmp_path).worst.tokens
    assert (first.position, first.before, first.after) == (0, [], [0.0, 0.0, -2.0])
    assert (last.position, last.before, last.after) == (3, [-3.0, 0.0, 0.0], [])


def test_the_position_of_a_worst_token_counts_the_masked_ones_before_it(tmp_path: Path) -> None:
    p = [-1.0] * 4
    (token,) = measured([row(p, [-1.0, -1.0, -1.0, -3.0], response_mask=[0, 1, 0, 1])], tmp_path).worst.tokens
    assert (token.position, token.length) == (3, 2)


def test_places_are_labelled_by_what_they_hold(tmp_path: Path) -> None:
    p = [math.log(0.5)] * 3
    rows = [row(p, p, host=None), row(p[:1], p[:1], host="a")]
    found = measured(rows, tmp_path, group_by=["host"])

    def keys(axis: str) -> dict[str, tuple[int, int]]:
        return {place.key: (place.tokens, place.sequences) for place in found.at(axis)}

    assert keys("host") == {"a": (1, 1), "∅": (3, 1)}
    assert keys("length") == {"1–1": (1, 1), "2–3": (3, 1)}
    assert keys("position") == {"0": (2, 2), "1–2": (2, 1)}
    assert keys("rollout_probability") == {"0.1–0.5": (4, 2)}


def test_few_groups_give_no_place_an_interval(tmp_path: Path) -> None:
    rows = [row([-1.0, -1.0], [-1.1 - i / 9, -1.2], step=0, group_id=f"g{i % 3}") for i in range(12)]
    found = measured(rows, tmp_path)
    assert found.whole["k3"].interval is None
    assert {place.numbers["k3"].interval for axis in found.axes for place in found.at(axis)} == {None}


@pytest.mark.parametrize(("seed", "noted"), [(5, True), (3, False)])
def test_a_short_sample_is_held_to_the_limit_of_its_length(tmp_path: Path, seed: int, noted: bool) -> None:
    d = np.random.default_rng(seed).exponential(0.6, 200)  # k̂ = 0.66 and 0.30; the limit for 200 is 0.57
    found = measured([row([-50.0] * 200, (d - 50.0).tolist())], tmp_path).whole["khat_tokens"]
    assert found.value is not None
    assert found.value < 0.7
    assert (found.note is not None) is noted


# ---------------------------------------------------------------- options of the command line


def asked(command: str, dump: Path, result: Path, *options: str) -> tuple[int, Result | None]:
    """Run a command; return its exit code, and the result it wrote."""
    more = {"analyze": ["--no-html", "--presets", "disabled"], "compare": ["--presets", "disabled"]}
    bounds = more.get(command, ["--max", "k3=9"])
    words = [command, str(dump), *bounds, "--json", str(result), "--quiet", *options]
    ran = CliRunner().invoke(app, words)
    return ran.exit_code, summaries.load(result) if result.exists() else None


COMMANDS = pytest.mark.parametrize("command", ["analyze", "compare", "gate"])


@COMMANDS
def test_a_bad_row_stops_every_command_unless_it_may_be_skipped(command: str, tmp_path: Path) -> None:
    dump, result = tmp_path / "dump.parquet", tmp_path / "r.json"
    p = [-1.0, -2.0]
    oracles.write([row(p, p), row(p, p[:1]), row(p, p)], dump)
    assert asked(command, dump, result) == (2, None)
    code, found = asked(command, dump, result, "--on-bad-row", "skip")
    assert (code, found and found.dump.skipped.count) == (0, 1)


@COMMANDS
def test_the_seed_of_every_command_moves_its_intervals(command: str, tmp_path: Path) -> None:
    dump = Path(oracles.write(oracles.make_rows(0.3), tmp_path / "dump.parquet"))
    drawn = {}
    for seed in ("1", "2"):
        code, found = asked(command, dump, tmp_path / f"{seed}.json", "--seed", seed)
        assert code == 0
        assert found is not None
        assert found.run.seed == int(seed)
        drawn[seed] = found.whole["k3"].interval
    assert drawn["1"] != drawn["2"]


def test_the_second_drift_is_not_called_a_divergence(tmp_path: Path) -> None:
    found = measured([row([-1.0], [-1.5], current_log_probs=[-2.25])], tmp_path).whole
    assert "not a KL" in found["drift2.k3"].formula
    assert "KL(π_rollout‖π_train)" in found["total.k3"].formula
    assert found["k1"].value + found["drift2.k1"].value == pytest.approx(found["total.k1"].value)
