"""Numbers by place, and the ESS of sequence weights by length, against plain Python over rows."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offpol_diag.core import breakdowns
from offpol_diag.core.breakdowns import FEWEST, GRID
from offpol_diag.result import Lengths, Result
from tests import oracles
from tests.oracles import Sequence
from tests.reading import analyze


def rows_of(many: int = 90) -> list[dict[str, Any]]:
    """Make rows with several turns, versions that change within a response, and rows without them."""
    rows = oracles.make_rows(0.6, 3, many)
    rng = np.random.default_rng(17)
    for i, row in enumerate(rows):
        length, sampled = len(row["rollout_log_probs"]), 10 + i % 4
        row |= {"step": i % 5, "policy_lag": i % 3, "host": f"node-{i % 2}", "train_version": 12}
        row["weight_versions"] = sorted(rng.integers(sampled - 1, sampled + 1, length).tolist())
        if i % 7 == 0:
            row["weight_versions"] = [-1] * (length // 2) + row["weight_versions"][length // 2 :]
        if i % 11 == 0:
            row["train_version"] = None
        if i % 13 == 0:
            row["host"] = None
    return rows


def probability(log: float) -> str:
    names = ("< 0.01", "0.01–0.1", "0.1–0.5", "0.5–0.9", "0.9–0.99", "> 0.99")
    return names[sum(log > math.log(edge) for edge in (0.01, 0.1, 0.5, 0.9, 0.99))]


def places_of(row: dict[str, Any], t: int, turn: int) -> dict[str, str | None]:
    """Return the place of one token along every axis."""
    at, long = int(math.log2(t + 1)), int(math.log2(sum(row["response_mask"])))
    lag = None if row["train_version"] is None else row["train_version"] - row["weight_versions"][t]
    a = row["advantages"][t]
    return {
        "step": str(row["step"]),
        "policy_lag": str(row["policy_lag"]),
        "host": row["host"] or "∅",
        "length": f"{2**long}–{2 ** (long + 1) - 1}",
        "position": f"{2**at - 1}–{2 ** (at + 1) - 2}" if at else "0",
        "turn": str(turn + 1),
        "token_lag": None if lag is None or row["weight_versions"][t] < 0 else "< 0" if lag < 0 else str(lag),
        "rollout_probability": probability(row["rollout_log_probs"][t]),
        "advantage_sign": f"A {'<' if a < 0 else '>' if a > 0 else '='} 0",
    }


def wanted(rows: list[dict[str, Any]]) -> dict[str, dict[str, list[Sequence]]]:
    """Return axis → place → the sequences that have tokens there, with those alone."""
    found: dict[str, dict[str, list[Sequence]]] = defaultdict(lambda: defaultdict(list))
    for row, whole in zip(rows, oracles.sequences(rows), strict=True):
        live = [t for t, counts in enumerate(row["response_mask"]) if counts]
        there: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, t in enumerate(live):
            for axis, place in places_of(row, t, whole.turn[i]).items():
                if place is not None:
                    there[axis, place].append(i)
        for (axis, place), some in there.items():
            names = ("rollout", "old", "current", "advantages")
            found[axis][place].append(
                replace(whole, **{name: [getattr(whole, name)[i] for i in some] for name in names})
            )
    return found


def read(path: str, **how: Any) -> Result:
    return analyze([path], presets=(), device="cpu", **how)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Result]:
    rows = rows_of()
    path = oracles.write(rows, tmp_path_factory.mktemp("places") / "a.parquet")
    return wanted(rows), read(path, group_by=("host",))


AXES = (
    *("step", "policy_lag", "host", "length"),
    *("position", "turn", "token_lag", "rollout_probability", "advantage_sign"),
)


@pytest.mark.parametrize("axis", AXES)
def test_the_numbers_of_every_place_are_those_of_its_tokens(dump, axis):
    of_axis, result = dump[0][axis], dump[1]

    assert {place.key for place in result.at(axis)} == of_axis.keys()
    assert len(of_axis) > 1
    for place in result.at(axis):
        data = of_axis[place.key]
        want = oracles.policy_gap(data, "") | oracles.raw_weights(data, "")
        assert (place.tokens, place.sequences) == (sum(one.n for one in data), len(data))
        assert {"k1", "k3", "mean_ratio", "ess_tokens", "prob_diff_mean", "f_2"} < place.numbers.keys()
        assert {name: one.value for name, one in place.numbers.items()} == {
            name: pytest.approx(want[name], rel=1e-10) for name in place.numbers
        }


def test_turns_and_lags_of_tokens_are_in_order(dump):
    assert dump[1].axes["turn"].places[:3] == ["1", "2", "3"]
    assert dump[1].axes["token_lag"].places[:3] == ["< 0", "0", "1"]


def test_many_turns_and_old_tokens_share_the_last_place(tmp_path):
    length = 200
    row = {
        "rollout_log_probs": [-1.0] * length,
        "old_log_probs": [-1.1] * length,
        "response_mask": [1, 0] * (length // 2),
        "weight_versions": [0] * 100 + [950] * 100,
        "train_version": 1000,
    }
    found = read(oracles.write([row], tmp_path / "a.parquet"))

    assert [(one.key, one.tokens) for one in found.at("turn")][-2:] == [("63", 1), ("64+", 37)]
    assert [(one.key, one.tokens) for one in found.at("token_lag")] == [("50", 50), ("62+", 50)]


def test_a_long_axis_is_thinned_evenly_and_keeps_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(breakdowns, "MOST_LISTED", 5)
    rows = [
        {"rollout_log_probs": [-1.0], "old_log_probs": [-1.0 - 0.01 * step], "step": step}
        for step in range(21)
    ]
    found = read(oracles.write(rows, tmp_path / "a.parquet")).axes["step"]

    assert (found.places, found.left_out) == (["0", "5", "10", "15", "20"], 16)


def test_few_groups_give_no_place_an_interval_and_one_turn_and_no_versions_no_axis(tmp_path):
    rows = [
        {"rollout_log_probs": [-1.0], "old_log_probs": [-1.1 - i / 9], "step": 0, "group_id": f"g{i % 3}"}
        for i in range(12)
    ]
    found = read(oracles.write(rows, tmp_path / "a.parquet"))
    assert not {"turn", "token_lag"} & found.axes.keys()
    assert found.whole["k3"].interval is None
    assert {place.numbers["k3"].interval for axis in found.axes for place in found.at(axis)} == {None}


# ---------------------------------------------------------------- sequence weights by length


def ess_at(sequences: list[Sequence], tokens: int) -> tuple[int, float]:
    """Count the sequences of so many tokens, and compute (Σw)² / (n Σw²) of the products over them."""
    logs = [math.fsum(one.delta("old")[:tokens]) for one in sequences if one.n >= tokens]
    weights = [math.exp(log - max(logs)) for log in logs]
    return len(logs), math.fsum(weights) ** 2 / (len(logs) * math.fsum(w * w for w in weights))


def longest(curve: list[tuple[int, float]]) -> float | None:
    """Try every whole T: log ESS is a line between two lengths, and 0 at none."""
    for (t0, e0), (t1, e1) in pairwise([(0, 1.0), *curve]):
        slope = (math.log(e1) - math.log(e0)) / (t1 - t0)
        inside = [t for t in range(t0, t1 + 1) if math.log(e0) + slope * (t - t0) >= math.log(0.1)]
        if t1 not in inside:
            return float(max(inside))
    return None


def lengths(path: str | Path, **how: Any) -> Lengths:
    found = read(str(path), **how).lengths
    assert found is not None
    return found


@pytest.mark.parametrize("sigma", [0.05, 0.6, 3.0])
def test_ess_at_every_length_is_that_of_plain_python(sigma, tmp_path):
    rows = oracles.make_rows(sigma, many=240)
    found = lengths(oracles.write(rows, tmp_path / "d.parquet"))
    sequences = oracles.sequences(rows)

    assert [at.tokens for at in found.curve] == [
        t for t in GRID if sum(one.n >= t for one in sequences) >= FEWEST
    ]
    for at in found.curve:
        many, ess = ess_at(sequences, at.tokens)
        assert (at.sequences, at.ess_sequences.value) == (many, pytest.approx(ess, rel=1e-9))
        assert at.ess_sequences.interval[0] <= ess <= at.ess_sequences.interval[1]
    assert found.longest == longest([(at.tokens, at.ess_sequences.value) for at in found.curve])
    there = sorted(one.n for one in sequences if one.n)
    assert found.median == pytest.approx(there[len(there) // 2], rel=0.09, abs=1)


def test_the_longest_length_is_0_where_one_token_is_too_many_and_unknown_where_none_or_few_are(tmp_path):
    rows = oracles.make_rows(0.1, many=200)
    for row in rows[:2]:
        row["response_mask"] = [1] * len(row["rollout_log_probs"])
        row["old_log_probs"] = [log + 12.0 for log in row["rollout_log_probs"]]
    none = lengths(oracles.write(rows, tmp_path / "far.parquet")).longest
    all_of_them = lengths("sample_data/healthy.parquet").longest
    few = lengths(oracles.write(oracles.make_rows(0.1, many=FEWEST - 1), tmp_path / "few.parquet"))

    assert (none, all_of_them) == (0, None)
    assert (few.longest, few.curve) == (None, [])
