"""Rows that are kept as they are: the sample of the diagnosis, and the rows of highest score."""

from __future__ import annotations

from collections import Counter
from functools import reduce
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from offpol_diag.core import kept_rows
from offpol_diag.core.gap import DRIFTS, Tokens
from offpol_diag.core.kept_rows import EACH, PLACE, Records, Sample
from offpol_diag.core.state import groups_of
from offpol_diag.dump.batch import Batch, joined
from offpol_diag.dump.read import open_dump
from tests import oracles
from tests.reading import analyze

ROOM = 6000


def batches(steps, groups=6, seed=0):
    """Return a batch of each step: so many groups of one to four sequences of one to 40 tokens."""
    chance = np.random.default_rng(seed)
    for step in steps:
        many = chance.integers(1, 5, groups)
        key = np.repeat(np.arange(groups), many)
        lengths = chance.integers(1, 41, len(key))
        ends = np.concatenate(([0], np.cumsum(lengths)))
        logs = -chance.exponential(size=ends[-1])
        yield Batch(
            rollout=logs,
            old=logs - 1,
            cu_seqlens=ends,
            cu_runs=ends,
            position=np.arange(ends[-1]) - np.repeat(ends[:-1], lengths),
            key=key,
            masked=np.arange(len(key)),
            scalars={"step": [step] * len(key), "group_id": key.tolist(), "host": ["a\ud800"] * len(key)},
        )


def drawn(batch: Batch) -> Sample:
    groups = groups_of(batch.key, [*map(str, batch.scalars["step"])] if "step" in batch.scalars else None)
    return Sample.of(Tokens.of(batch).terms(DRIFTS[0]), groups)


def same(one: Sample, two: Sample, placed: bool = True) -> bool:
    """Whether samples are equal; `placed`: the places of sequences in their groups, too."""
    arrays = [one.rows, *one.values.values()], [two.rows, *two.values.values()]
    mine, theirs = (dict(some.scalars) for some in (one, two))
    equal = (mine.pop(PLACE) == theirs.pop(PLACE) or not placed) and mine == theirs
    return equal and all(map(np.array_equal, *arrays))


@pytest.mark.parametrize("steps", [range(3), range(12), range(0, 60, 2)])
def test_the_sample_does_not_depend_on_cuts_and_order(steps, monkeypatch):
    monkeypatch.setattr(kept_rows, "ROOM", ROOM)
    monkeypatch.setattr(kept_rows, "STEPS", 16)
    parts = [*batches(steps)]
    halves = [half for part in parts for half in (part.rows(0, 3), part.rows(3, part.sequences))]
    shuffled = [halves[i] for i in np.random.default_rng(1).permutation(len(halves))]

    whole = drawn(joined(parts)).read()
    for some in (parts, shuffled):
        each = [*map(drawn, some)]
        pairs = [reduce(Sample.merge, each[i : i + 5]) for i in range(0, len(each), 5)]
        assert same(reduce(Sample.merge, each).read(), whole, placed=some is parts)
        assert same(reduce(Sample.merge, pairs[::-1]).read(), whole, placed=False)
    assert (len(whole.lengths) < sum(part.sequences for part in parts)) == (len(steps) > 3)


def test_a_sample_has_some_of_every_step_whole_groups_and_no_less_than_fits(monkeypatch):
    monkeypatch.setattr(kept_rows, "ROOM", ROOM)
    parts = [*batches(range(12), groups=40), *batches([99], groups=2)]
    found = reduce(Sample.merge, map(drawn, parts)).read()

    every = Counter(pair for part in parts for pair in keys(part.scalars))
    kept = Counter(keys(found.scalars))
    assert {step for step, _ in kept} == {*range(12), 99}
    assert all(every[group] == many for group, many in kept.items())
    assert sum(step == 99 for step, _ in kept) == 2  # what a small step leaves is the others'
    cost = found.lengths.sum() + EACH * len(found.lengths)
    most = 4 * (40 + EACH)  # of a group
    assert ROOM - 13 * most < cost < ROOM + 13 * most


def keys(scalars):
    return zip(scalars["step"], scalars["group_id"], strict=True)


def test_a_group_that_is_larger_than_the_share_of_its_step_is_there_in_part(monkeypatch):
    monkeypatch.setattr(kept_rows, "ROOM", 200)
    (one,) = batches([0], groups=1, seed=3)
    (other,) = batches([1], groups=1, seed=4)
    many = joined([one] * 9 + [other])
    found = drawn(many).read()
    assert {*found.scalars["step"]} == {0, 1}
    assert 0 < len(found.lengths) < many.sequences


def test_a_small_dump_is_read_whole_with_every_column(tmp_path: Path) -> None:
    every = oracles.make_rows(0.3, 1, 16)
    rows = [row | {"rewards": float(i), "entropy": row["advantages"]} for i, row in enumerate(every)]
    (batch,) = open_dump([oracles.write(rows, tmp_path / "a.parquet")]).batches()
    found = drawn(batch).read()

    ends = np.cumsum(found.lengths)[:-1]
    values = {name: [x.tolist() for x in np.split(some, ends)] for name, some in found.values.items()}
    there = [row for row in rows if any(row["response_mask"])]  # without those that are masked
    at = dict(zip(found.scalars["sequence_id"], range(len(found.lengths)), strict=True))
    assert at.keys() == {row["sequence_id"] for row in there}
    names = {"q": "rollout_log_probs", "p": "old_log_probs", "token_ids": "token_ids", "entropy": "entropy"}
    for row, one in zip(there, oracles.sequences(there), strict=True):
        i, live = at[row["sequence_id"]], [t for t, counts in enumerate(row["response_mask"]) if counts]
        assert found.rows[4][i] == len(row["response_mask"])
        assert (values["position"][i], values["turn"][i]) == (live, one.turn)
        for name, column in names.items():
            assert values[name][i] == [row[column][t] for t in live], name
    assert {"group_id", "rewards", "sequence_id"} <= found.scalars.keys()


def test_no_response_is_cut():
    tokens = (1 << 17) + 5
    logs, ends = -np.ones(tokens), np.array([0, tokens])
    batch = Batch(logs, ends, ends, np.arange(tokens), np.zeros(1, np.int64), np.zeros(1, np.int64), old=logs)
    found = drawn(batch).read()
    assert found.values["position"].tolist() == list(range(tokens))


# ---------------------------------------------------------------- the rows of highest score


def worst(rows, folder):
    return analyze([oracles.write(rows, folder / "a.parquet")], presets=()).worst


def test_the_worst_sequences_hold_their_tokens(tmp_path):
    rows = [row | {"rewards": float(i % 2)} for i, row in enumerate(oracles.make_rows(0.8, 5, 60))]
    of = {row["sequence_id"]: row for row in rows}
    found = worst(rows, tmp_path)
    assert len(found) == 10
    for one in found:
        row = of[one.sequence_id]
        live = [t for t, counts in enumerate(row["response_mask"]) if counts]
        q, p, ids = (
            [row[name][t] for t in live] for name in ("rollout_log_probs", "old_log_probs", "token_ids")
        )
        assert (one.first, one.positions, one.token_ids) == (0, live, ids)
        assert one.log_ratios == pytest.approx([y - x for x, y in zip(q, p, strict=True)], rel=1e-4)
        assert one.rollout_log_probs == pytest.approx(q, rel=1e-4)
        assert one.train_log_probs == pytest.approx(p, rel=1e-4)
        assert (one.reward, one.policy_lag) == (row["rewards"], row["policy_lag"])


def test_a_long_response_is_cut_to_where_most_of_its_k3_is(tmp_path):
    old = [-0.5 - (0.3 if 600 <= t < 700 else 0.001) for t in range(1000)]
    (strip,) = worst([{"rollout_log_probs": [-0.5] * 1000, "old_log_probs": old}], tmp_path)

    assert len(strip.positions) == 256
    assert strip.first <= 600 < 700 <= strip.first + 256
    assert (strip.positions[0], strip.token_ids) == (strip.first, [])


def test_equal_sequences_make_no_worst_list_depend_on_the_cut(tmp_path):
    """Scores tie when log-probs are stored in few bits; which equals are shown is no matter of the batch."""
    old = [-1.0, -1.25, -0.75, -1.0, -1.25, -1.0]
    rows = [
        {"sequence_id": f"s{(i * 17) % 30:02d}", "rollout_log_probs": [-1.0] * 6, "old_log_probs": old}
        for i in range(30)
    ]
    one = worst(rows, tmp_path)
    two = analyze([oracles.write(rows[::-1], tmp_path / "b.parquet")], batch_tokens=13).worst

    assert one == two
    assert [row.sequence_id for row in one] == [f"s{i:02d}" for i in range(10)]


def test_records_of_equal_score_are_ordered_by_their_text_and_merge_in_any_order():
    def of(*rows):
        return Records.of(3, [(score, {"id": name, "x": np.array([at])}) for score, name, at in rows])

    parts = of((1.0, "b", 1), (1.0, "a", 2)), of((2.0, "z", 3), (0.5, "a", 4)), of((1.0, "a", 1))
    for some in permutations(parts):
        found = reduce(Records.merge, some).rows
        assert [(row["id"], *row["x"].tolist()) for *_, row in found] == [("z", 3), ("a", 1), ("a", 2)]
