"""What policies of advice see and choose, and the page that is made of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.advice import draws, dumps, policies, rollouts, table, training, worlds
from benchmarks.advice.draws import Draw
from benchmarks.advice.dumps import Seen
from benchmarks.advice.worlds import World, log_softmax
from offpol_diag import ladder
from offpol_diag.analyze import analyze
from offpol_diag.candidates import CANDIDATES, REFERENCE
from offpol_diag.metrics import alignment
from offpol_diag.summary import Summary


def drawn(make: rollouts.Make, sequences: int = 1024, reward: worlds.Reward = "dense", seed: int = 1) -> Draw:
    world = worlds.make(6, reward, 3, vocabulary=4)
    theta, rollout = make(world, np.random.default_rng(1))
    return draws.draw(world.at(theta), rollout, sequences, np.random.default_rng(seed))


NOISE, STALE, COLD = rollouts.noise(0.1), rollouts.stale(4), rollouts.temperature(0.6)


# ---------------------------------------------------------------- what is seen


def test_a_dump_in_parts_is_the_dump() -> None:
    whole = drawn(NOISE, 512)

    parts = dumps.joined(dumps.seen(whole.rows(first, first + 128)) for first in range(0, 512, 128))

    one = dumps.seen(whole)
    np.testing.assert_allclose(parts.folds.sums, one.folds.sums, atol=1e-12)
    np.testing.assert_allclose(parts.folds.moved, one.folds.moved, atol=1e-12)
    assert (parts.tokens, parts.sequences) == (one.tokens, one.sequences)
    assert parts.squared == pytest.approx(one.squared)


def test_the_sums_of_a_fold_are_those_of_its_sequences() -> None:
    dump = drawn(STALE, 64)
    fold = alignment.fold(dumps.batch(dump))
    expected = [0.0] * alignment.FOLDS

    for row in range(64):
        for at in range(int(dump.lengths[row])):
            r = min(math.exp(dump.train[row, at] - dump.rollout[row, at]), 5.0)
            expected[int(fold[row])] += dump.advantage[row] * (r - 1)

    np.testing.assert_allclose(dumps.seen(dump).folds.moved, expected, atol=1e-9)


def test_the_file_says_what_the_packed_batch_says(tmp_path: Path) -> None:
    dump = drawn(STALE, 256)
    dumps.write(tmp_path / "dump.parquet", [dump.rows(0, 128), dump.rows(128, 256)])

    found: Summary = analyze([str(tmp_path / "dump.parquet")], presets=())

    seen = dumps.seen(dump)
    assert found.dump.sequences == 256
    assert found.dump.tokens == seen.tokens
    assert found.metrics["k1"].value == pytest.approx(-seen.log_ratio / seen.tokens)
    assert found.alignment is not None
    assert found.alignment.direction
    rows = found.alignment.rows
    told = alignment.estimates(seen.folds, REFERENCE.name, 256.0)
    assert rows["none"].noise == pytest.approx(told["none"].noise, rel=0.01)  # groups lie in other folds


def test_the_product_of_different_folds_has_no_bias_from_noise() -> None:
    world = worlds.make(6, "dense", 3, vocabulary=4)
    theta, rollout = rollouts.stale(4)(world, np.random.default_rng(1))

    def signals(sequences: int, times: int, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        return np.array([_signal(world.at(theta), rollout, sequences, rng) for _ in range(times)])

    small, large = signals(256, 60, 0), signals(8192, 4, 1)

    error = math.hypot(small.std(ddof=1) / math.sqrt(60), large.std(ddof=1) / 2)
    assert small.mean() == pytest.approx(large.mean(), abs=4 * error)
    assert large.mean() > 8 * error  # and there is something to see


def _signal(world: World, rollout: rollouts.Rollout, sequences: int, rng: np.random.Generator) -> float:
    folds = dumps.seen(draws.draw(world, rollout, sequences, rng)).folds
    mine, base = (folds.sums[folds.names.index(name)].numpy() for name in ("none", "token_tis_5.0"))
    return float(alignment._Product.of(mine, base, folds.sequences.numpy()).signal)


# ---------------------------------------------------------------- what is chosen


def test_a_trainer_that_has_moved_is_told_from_noise() -> None:
    still = [alignment.moved(dumps.seen(drawn(NOISE, seed=seed)).folds) for seed in range(12)]
    moved = [alignment.moved(dumps.seen(drawn(STALE, seed=seed)).folds) for seed in range(4)]

    assert max(map(abs, still)) < 4
    assert abs(float(np.mean(still))) < 4 / math.sqrt(12)
    assert min(moved) > 6


def test_the_default_is_recommended_unless_another_is_better_by_the_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = dumps.seen(drawn(COLD))
    assert policies.recommended(seen, 256) != "token_tis_2.0"

    monkeypatch.setattr(ladder, "AHEAD", 1.0)
    assert policies.recommended(seen, 256) == "token_tis_2.0"


@pytest.mark.parametrize("size", [1024, 4096])
def test_no_correction_is_chosen_for_noise_and_one_for_a_policy_that_has_moved(size: int) -> None:
    assert policies.recommended(dumps.seen(drawn(rollouts.noise(0.3), size)), 256) in (
        "none",
        "token_mask_0.5_2.0",
    )
    assert policies.recommended(dumps.seen(drawn(STALE, size)), 256).startswith("token_tis")


def test_a_policy_names_a_candidate_whatever_is_lacking() -> None:
    names = {one.name for one in CANDIDATES}
    for columns in ((True, True), (False, True), (True, False), (False, False)):
        seen = dumps.seen(drawn(COLD, 512), *columns)
        for policy in policies.POLICIES.values():
            assert policy(seen, 64) in names


@pytest.mark.parametrize(
    ("changes", "severity", "length"),
    [
        ({"apart": 0.0049}, "none", "none"),
        ({"apart": 0.006}, "token_tis_2.0", "seq_tis_2.0"),
        ({"apart": 0.006, "log_ratio": -0.2}, "seq_tis_2.0", "seq_tis_2.0"),
        ({"apart": 0.006, "squared": 2.1}, "seq_tis_2.0", "seq_tis_2.0"),
        ({"apart": 0.006, "sequences": 1}, "token_tis_2.0", "geo_rs_0.1%"),
    ],
)
def test_the_guide_is_followed_at_its_own_lines(
    changes: dict[str, float], severity: str, length: str
) -> None:
    base = dumps.seen(drawn(NOISE, 64))
    means = {"log_ratio": 0.0, "squared": 1.0} | {k: v for k, v in changes.items() if k != "sequences"}
    tokens = 1000
    seen: Seen = replace(
        base,
        tokens=tokens,
        sequences=int(changes.get("sequences", 10)),
        **{name: value * tokens for name, value in means.items()},  # type: ignore[arg-type]
    )

    assert policies.by_severity(seen, 64) == severity
    assert policies.by_length(seen, 64) == length


# ---------------------------------------------------------------- the table and the page


def test_a_row_scores_each_dump_by_what_was_chosen_for_it() -> None:
    row = {
        "reached": {"64": {"a": 0.5, "b": 1.0}, "256": {"a": 0.7, "b": 0.9}},
        "chosen": {"p": {"1024": {"64": ["a", "b"], "256": ["b", "b"]}, "4096": {"64": ["b"], "256": ["a"]}}},
        "best": {"64": ["b", 0.1], "256": ["b", 0.2]},
        "name": "r",
    }

    assert sorted(table.scores([row], "p")) == [0.5, 0.7, 0.9, 0.9, 1.0, 1.0]
    assert sorted(table.scores([row], "p", 1024)) == [0.5, 0.9, 0.9, 1.0]
    assert sorted(table.scores([row], "p", 4096, 256)) == [0.7]
    assert [one["score"] for one in table.worst([row], "p", 1024, 2)] == [0.75, 0.9]


def test_training_reaches_more_and_the_optimiser_takes_steps_of_its_size() -> None:
    setting = training.Setting("no mismatch", training.temperature(1.0), "found", 8)

    short, long = (training.run(setting, training.Fixed("none"), 0, steps)[1] for steps in (10, 60))

    assert long > short
    np.testing.assert_allclose(training.Adam(0.1)(np.array([3.0, -0.01])), [0.1, -0.1], rtol=1e-5)


def test_a_choosing_policy_chooses_at_the_start_and_again() -> None:
    setting = training.Setting("noise", training.noisy(0.1), "dense", 6)
    choose = training.Chosen(policies.recommended)

    training.run(setting, choose, 0, training.AGAIN + 1)

    assert len(choose.names) == 2


def test_rollouts_of_a_training_run_lag_behind() -> None:
    path = [np.full((1, 2, 2), float(k)) for k in range(6)]
    path = [one + np.array([0.0, k]) for k, one in enumerate(path)]

    old = training.stale(2)(path, np.random.default_rng(0))
    several = training.replay(2, 3)(path, np.random.default_rng(0))

    np.testing.assert_allclose(old.policies()[0][:, :, 0], log_softmax(path[3]))
    expected = [log_softmax(path[k]) for k in (5, 3, 1)]
    np.testing.assert_allclose([one[:, :, 0] for one in several.policies()], expected)
