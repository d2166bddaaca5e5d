"""Numbers by place, and the ESS of sequence weights by length, against plain Python over rows."""

from __future__ import annotations

import math
from collections import defaultdict
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
    return rows


def octave(n: int) -> int:
    return n.bit_length() - 1


def turns(mask: list[int]) -> list[int]:
    """Return the number of each token's turn, from 1."""
    found, number = [], 0
    for before, here in pairwise([0, *mask]):
        number += here == 1 and before != 1
        found.append(number)
    return found


def probability(log: float) -> str:
    names = ("< 0.01", "0.01–0.1", "0.1–0.5", "0.5–0.9", "0.9–0.99", "> 0.99")
    return names[sum(log > math.log(edge) for edge in (0.01, 0.1, 0.5, 0.9, 0.99))]


def places_of(row: dict[str, Any], t: int) -> dict[str, str | None]:
    """Return the place of one token along every axis."""
    at, long = octave(t + 1), octave(sum(row["response_mask"]))
    lag = None if row["train_version"] is None else row["train_version"] - row["weight_versions"][t]
    a = row["advantages"] if isinstance(row["advantages"], float) else row["advantages"][t]
    return {
        "step": str(row["step"]),
        "policy_lag": str(row["policy_lag"]),
        "host": row["host"],
        "length": f"{2**long}–{2 ** (long + 1) - 1}",
        "position": f"{2**at - 1}–{2 ** (at + 1) - 2}" if at else "0",
        "turn": str(turns(row["response_mask"])[t]),
        "token_lag": None if lag is None or row["weight_versions"][t] < 0 else "< 0" if lag < 0 else str(lag),
        "rollout_probability": probability(row["rollout_log_probs"][t]),
        "advantage_sign": f"A {'<' if a < 0 else '>' if a > 0 else '='} 0",
    }


Places = dict[str, dict[str, list[tuple[int, float, float]]]]


def wanted(rows: list[dict[str, Any]]) -> Places:
    """Return axis → place → row, log π_rollout and log π_old of its tokens."""
    found: Places = defaultdict(lambda: defaultdict(list))
    for i, row in enumerate(rows):
        for t, counts in enumerate(row["response_mask"]):
            for axis, place in places_of(row, t).items() if counts else ():
                if place is not None:
                    token = (i, row["rollout_log_probs"][t], row["old_log_probs"][t])
                    found[axis][place].append(token)
    return found


def read(path: str, **how: Any) -> Result:
    return analyze([path], presets=(), device="cpu", **how)


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> tuple[Places, Result, str]:
    rows = rows_of()
    path = oracles.write(rows, tmp_path_factory.mktemp("places") / "a.parquet")
    return wanted(rows), read(path, group_by=("host",)), path


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
        tokens = of_axis[place.key]
        d = [p - q for _, q, p in tokens]
        r = [*map(math.exp, d)]
        want = {
            "k1": -oracles.mean(d),
            "k3": oracles.mean([math.expm1(x) - x for x in d]),
            "mean_ratio": oracles.mean(r),
            "ess_tokens": oracles.mean(r) ** 2 / oracles.mean([x * x for x in r]),
            "abs_log_ratio": oracles.mean([*map(abs, d)]),
            "prob_diff_mean": oracles.mean([abs(math.exp(p) - math.exp(q)) for _, q, p in tokens]),
            "f_2": oracles.mean([float(abs(x) > math.log(2)) for x in d]),
        }
        assert (place.tokens, place.sequences) == (len(d), len({i for i, _, _ in tokens}))
        assert {name: one.value for name, one in place.numbers.items()} == pytest.approx(want, rel=1e-10)


def test_turns_and_lags_of_tokens_are_in_order(dump):
    for axis, labels in (("turn", ["1", "2", "3"]), ("token_lag", ["< 0", "0", "1"])):
        found = dump[1].axes[axis]
        assert found.places[:3] == labels
        assert found.order == sorted(found.order)


def test_batches_change_no_number_of_any_place(dump):
    few = read(dump[2], group_by=("host",), batch_tokens=700)

    assert few.axes == dump[1].axes
    for axis in AXES:
        for one, two in zip(few.at(axis), dump[1].at(axis), strict=True):
            for name, number in one.numbers.items():
                ends = [(x.value, *(x.interval or ())) for x in (number, two.numbers[name])]
                assert ends[0] == pytest.approx(ends[1], rel=1e-9)


def test_without_a_second_turn_and_without_versions_there_is_no_such_axis(tmp_path):
    rows = oracles.make_rows(0.1)
    for row in rows:
        row["response_mask"] = [1] * len(row["rollout_log_probs"])

    assert not {"turn", "token_lag"} & read(oracles.write(rows, tmp_path / "a.parquet")).axes.keys()


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


# ---------------------------------------------------------------- sequence weights by length


def ess_at(sequences: list[Sequence], tokens: int) -> tuple[int, float]:
    """Count the sequences of so many tokens, and compute (Σw)² / (n Σw²) of the products over them."""
    logs = [math.fsum(one.delta("old")[:tokens]) for one in sequences if one.n >= tokens]
    weights = [math.exp(log - max(logs)) for log in logs]
    many = len(logs)
    return many, math.fsum(weights) ** 2 / (many * math.fsum(w * w for w in weights))


def longest(curve: list[tuple[int, float]]) -> float | None:
    """Try every whole T: log ESS is a line between two lengths, and 0 at none."""
    ends = [(0, 1.0), *curve]
    for (t0, e0), (t1, e1) in pairwise(ends):
        inside = [t for t in range(t0, t1 + 1) if _line(t, t0, e0, t1, e1) >= math.log(0.1)]
        if t1 not in inside:
            return float(max(inside))
    return None


def _line(t: int, t0: int, e0: float, t1: int, e1: float) -> float:
    return math.log(e0) + (math.log(e1) - math.log(e0)) * (t - t0) / (t1 - t0)


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
    assert found.longest.value == longest([(at.tokens, at.ess_sequences.value) for at in found.curve])


def test_the_longest_response_has_the_ends_of_the_curves_interval_for_its_own():
    found = lengths("sample_data/collapse.parquet")
    low, high = ([(at.tokens, at.ess_sequences.interval[end]) for at in found.curve] for end in (0, 1))

    assert found.longest.value == 42.0
    assert found.longest.interval == (longest(low), 181.0)
    assert longest(high) is None  # never above 10% at the end: as far as is known
    assert found.curve[-1].tokens == 181


@pytest.mark.parametrize(("name", "said"), [("healthy", "181"), ("stale", "128")])
def test_the_longest_length_is_unknown_where_every_length_keeps_a_tenth(name, said):
    found = lengths(f"sample_data/{name}.parquet").longest

    assert found.value is None
    assert found.unknown.startswith(f"beyond the longest responses ({said} tokens, which ")


def test_no_length_keeps_a_tenth_where_a_single_token_does_not(tmp_path):
    rows = oracles.make_rows(0.1, many=200)
    for row in rows[:2]:
        row["response_mask"] = [1] * len(row["rollout_log_probs"])
        row["old_log_probs"] = [log + 12.0 for log in row["rollout_log_probs"]]
    found = lengths(oracles.write(rows, tmp_path / "d.parquet")).longest

    assert (found.value, found.interval[0]) == (0.0, 0.0)


def test_fewer_than_fifty_responses_have_no_longest_length(tmp_path):
    found = lengths(oracles.write(oracles.make_rows(0.1, many=FEWEST - 1), tmp_path / "d.parquet"))

    assert (found.longest.value, found.longest.unknown) == (None, "fewer than 50 responses")
    assert found.curve == []


def test_batches_change_no_length():
    few = lengths("sample_data/collapse.parquet", batch_tokens=12_000)
    whole = lengths("sample_data/collapse.parquet")
    for one, two in zip(few.curve, whole.curve, strict=True):
        assert (one.tokens, one.sequences) == (two.tokens, two.sequences)
        for x, y in ((one.ess_sequences, two.ess_sequences), (few.longest, whole.longest)):
            assert (x.value, *(x.interval or ())) == pytest.approx((y.value, *(y.interval or ())), rel=1e-9)


# ---------------------------------------------------------------- many places


def test_a_long_axis_is_thinned_evenly_and_keeps_its_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(breakdowns, "MOST_LISTED", 5)
    rows = [
        {"rollout_log_probs": [-1.0], "old_log_probs": [-1.0 - 0.01 * step], "step": step}
        for step in range(21)
    ]
    found = read(oracles.write(rows, tmp_path / "a.parquet")).axes["step"]

    assert (found.places, found.left_out) == (["0", "5", "10", "15", "20"], 16)
