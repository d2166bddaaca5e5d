"""What is kept of a dump: sums by place and bucket, their draws, and merging."""

import math
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from offpol_diag.core.state import (
    BUCKETS,
    COUNTED,
    MOST_STEP_GROUPS,
    OTHERS,
    State,
    Table,
    buckets_of,
    draws,
    groups_of,
)
from offpol_diag.report import answered
from offpol_diag.report.parts import parts
from tests.reading import analyze


def part(prompts, values):
    """Return a state of one sequence per prompt with a value each, at a step, a host and a position."""
    groups = groups_of(np.array(prompts, np.int64), None)
    x, buckets = np.array(values), buckets_of(groups)
    steps, hosts = [prompt // 3 for prompt in prompts], [f"host {prompt}" for prompt in prompts]
    tables = {
        "dump": Table.of({"x": x, "same": x, "xx": x * x}, buckets),
        "logs": Table.of({"x": 400 * x}, buckets, kind="logs"),
        "step": Table.of({"x": x}, buckets, np.array(steps), most=MOST_STEP_GROUPS, width=1),
        "host": Table.of({"x": x}, buckets, hosts, most=50),
    }
    ends = {"x": (x.min(), x.max())}
    return State.joined(
        State.of_groups(groups), State(tables=tables, counts={"n": np.ones(3)}, ranges=ends, largest={"x": x})
    )


def cut(many, parts, seed=0):
    """Return the states of a dump of so many prompts in so many parts of equal length, and its values."""
    rng = np.random.default_rng(seed)
    order, values = rng.permutation(many), rng.normal(size=many)
    at = np.array_split(np.arange(many), parts)
    return [part(order[rows].tolist(), values[rows]) for rows in at], values


@pytest.mark.parametrize("many", [8, 200, BUCKETS + 44, 2 * COUNTED])
def test_the_order_of_merging_changes_nothing(many):
    parts, values = cut(many, 4)
    one, other = reduce(State.merge, parts), reduce(State.merge, parts[::-1])
    for name, table in one.tables.items():
        assert table.places.tolist() == other.tables[name].places.tolist()
        assert table.buckets.tolist() == other.tables[name].buckets.tolist()
        np.testing.assert_allclose(table.values, other.tables[name].values, rtol=1e-12, atol=1e-12)
    units = len(one.tables["dump"].buckets)  # groups, or the buckets that they are hashed to
    assert units == many if many <= BUCKETS else BUCKETS / 2 < units <= BUCKETS
    assert one.tables["dump"].sums()["xx"] == pytest.approx(math.fsum(values**2), rel=1e-13)
    top = 400 * values.max()
    log = math.log(math.fsum(np.exp(400 * values - top))) + top
    assert one.tables["logs"].sums()["x"] == pytest.approx(log, rel=1e-13)
    assert one.ranges["x"] == (values.min(), values.max())
    assert one.counts["n"].tolist() == [4, 4, 4]
    assert one.top("x").tolist() == sorted(values)[::-1]


@pytest.mark.parametrize(("groups", "exact"), [(COUNTED, True), (COUNTED + 1000, False)])
def test_groups_are_counted_up_to_4096_and_beyond_estimated_which_is_said(tmp_path, groups, exact):
    values = [[-1.0]] * groups
    table = {"rollout_log_probs": values, "old_log_probs": values, "group_id": list(range(groups))}
    pq.write_table(pa.table(table), tmp_path / "dump.parquet")
    found = analyze([str(tmp_path / "dump.parquet")])
    (shown,) = (one for part in parts(found, answered(found)) for one in part.tables if one.id == "dump")

    assert found.dump.groups_exact is exact
    assert found.dump.groups == pytest.approx(groups, rel=0.0 if exact else 0.1)
    assert dict(shown.rows)["groups exact"] == str(exact).lower()


def test_a_prompt_of_two_steps_is_two_groups():
    key = np.array([7, 7, 7, 8])
    assert len(set(groups_of(key, ["1", "1", "2", "2"]).tolist())) == 3
    assert len(set(groups_of(key, None).tolist())) == 2


def test_steps_are_grouped_by_a_power_of_two_and_values_beyond_the_bound_are_one_place():
    parts, values = cut(1200, 3)
    step, host = (reduce(State.merge, parts).tables[name] for name in ("step", "host"))
    assert (step.width, step.labels) == (8, list(range(0, 400, 8)))
    each = host.by_place()
    assert len(host.labels) == 51
    assert math.fsum(one.sums()["x"] for one in each.values()) == pytest.approx(math.fsum(values))
    assert OTHERS in each


# ---------------------------------------------------------------- draws


KEYS = (np.arange(3000) * 7919 - 10_000_000).view(np.uint64)


def poisson_p_value(drawn):
    """Compute the p-value of the chi-square test against Poisson(1), counts of 5 and more taken together."""
    seen = np.bincount(drawn.astype(int).clip(max=5).ravel(), minlength=6)
    chance = [math.exp(-1) / math.factorial(k) for k in range(5)]
    return float(stats.chisquare(seen, np.array([*chance, 1 - sum(chance)]) * seen.sum()).pvalue)


@pytest.mark.parametrize("seed", [0, -7])
def test_each_replicate_and_each_key_is_poisson_with_mean_one_on_its_own(seed):
    drawn = draws(KEYS, seed)
    by_replicate = [poisson_p_value(drawn[:, b]) for b in range(drawn.shape[1])]
    by_key = [poisson_p_value(draws(KEYS[i : i + 1], seed, 3000)) for i in range(50)]

    assert min(by_replicate) > 1e-3 / len(by_replicate)
    assert min(by_key) > 1e-3 / len(by_key)


def test_a_draw_is_a_function_of_key_seed_and_replicate():
    whole = draws(KEYS, 3, 64)
    order = np.random.default_rng(0).permutation(len(KEYS))

    assert np.array_equal(draws(KEYS[order], 3, 64), whole[order])
    assert np.array_equal(np.concatenate([draws(part, 3, 64) for part in np.array_split(KEYS, 5)]), whole)
    assert np.array_equal(draws(KEYS, 3, 33), whole[:, :33])
    assert draws(KEYS[:0], 3, 64).shape == (0, 64)
    assert not np.array_equal(draws(KEYS, 4, 64), whole)
