"""Sums that stand in for the gradient, and the alignment estimated of them: against lists and `math.fsum`."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from offpol_diag import candidates, evidence
from offpol_diag.batch import Batch
from offpol_diag.metrics import coordinates, foldbins, foldblocks, folds, tokenblocks
from offpol_diag.metrics.alignment import BUCKETS, FOLDS, Folds, _Product, estimates, moved, sums, systematic
from offpol_diag.metrics.scene import Scene
from offpol_diag.near import Near
from offpol_diag.presets import Reject, Veto
from tests import oracle_alignment as oracle
from tests.devices import DEVICES
from tests.oracle_alignment import Row

SIDES = ("old", "current")
NAMES = tuple(one.name for one in candidates.CANDIDATES)
REFERENCE = candidates.REFERENCE.name
NEARS = (None, Near(0.5), Near(0.03))
WAYS = ("by token", "by row", "by table", "by turns")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """How the sums are made: by token as on a GPU, or in small blocks, by rows of times or by tables."""
    if request.param == "by token":
        monkeypatch.setattr(folds, "here", lambda x: False)
    monkeypatch.setattr(tokenblocks, "BLOCK", 40)
    monkeypatch.setattr(foldblocks, "BLOCK", 7)
    monkeypatch.setattr(foldbins, "LINES", 4)
    monkeypatch.setattr(foldbins, "LONG", {"by row": 10**6, "by table": 0}.get(request.param, 12))
    return request.param


COLUMNS = [(True, True), (True, False), (False, True), (False, False)]


def make(seed=0, many=24, words=6, wild=True):
    """Ragged rows: empty ones, groups, steps in positions, sequences near to on-policy and far from it."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(many):
        n = 0 if i in (3, many - 1) else int(rng.integers(1, 30))
        rollout = -rng.exponential(0.7, n)
        scale = (1e-4, 0.02, 0.3, 1.0)[i % 4]
        train = {side: rollout + scale * rng.standard_normal(n) for side in SIDES}
        if wild and n:
            train["old"][0] += (50.0, -50.0)[i % 2]
        rows.append(
            Row(
                key=int(rng.integers(-(2**63), 2**63 - 1)) if i % 3 else 77,
                rollout=rollout.tolist(),
                train={side: values.tolist() for side, values in train.items()},
                advantages=rng.normal(size=n).tolist(),
                ids=rng.integers(0, words, n).tolist(),
                position=np.cumsum(rng.integers(1, 4, n)).tolist(),
            )
        )
    return rows


def packed(rows, ids=True, advantages=True, device="cpu"):
    """The rows as a batch."""

    def flat(lists, kind=torch.float64):
        return torch.tensor([x for one in lists for x in one], dtype=kind, device=device)

    starts = torch.tensor([0, *accumulate(len(row.rollout) for row in rows)], device=device)
    return Batch(
        rollout=flat(row.rollout for row in rows),
        cu_seqlens=starts,
        cu_runs=torch.unique(starts),
        position=flat((row.position for row in rows), torch.int64),
        key=torch.tensor([row.key for row in rows], dtype=torch.int64, device=device),
        masked=torch.zeros(len(rows), dtype=torch.int64, device=device),
        old=flat(row.train["old"] for row in rows),
        current=flat(row.train["current"] for row in rows),
        advantages=flat(row.advantages for row in rows) if advantages else None,
        token_ids=flat((row.ids for row in rows), torch.int64) if ids else None,
    )


def folded(batch, side="old", near=None):
    return sums(Scene.of(batch, 0, 2, near=near), candidates.presets(side))


def table(found: dict[tuple[int, int], float]):
    """A vector of the oracle, [FOLDS, BUCKETS]."""
    values = np.zeros((FOLDS, BUCKETS))
    for at, value in found.items():
        values[at] = value
    return values


def assert_same(one: Folds, two: Folds):
    assert one.names == two.names
    for name in (field.name for field in fields(Folds) if field.name != "names"):
        np.testing.assert_allclose(
            getattr(one, name).cpu(), getattr(two, name).cpu(), rtol=1e-9, atol=1e-11, err_msg=name
        )


# ---------------------------------------------------------------- the sums


def test_every_candidate_has_a_row_in_the_oracle():
    assert set(oracle.WEIGHTS) == set(NAMES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("near", NEARS, ids=str)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("ids", "advantages"), COLUMNS)
def test_sums_are_those_of_the_oracle(side, ids, advantages, near, device, way):
    rows = make()
    told = oracle.sums(rows, side, ids, advantages)

    found = folded(packed(rows, ids, advantages, device), side, near)

    assert found.names == NAMES
    for name, values, weight in zip(found.names, found.sums.cpu(), found.weights.tolist(), strict=True):
        np.testing.assert_allclose(values, table(told.sums[name]), rtol=1e-9, atol=1e-9, err_msg=name)
        assert weight == pytest.approx(told.weights[name], rel=1e-9), name
    for values, cells in zip(found.cells.cpu(), told.cells, strict=True):
        np.testing.assert_allclose(values, table(cells), rtol=1e-9, atol=1e-9)
    assert float(found.spread) == pytest.approx(told.spread, rel=1e-9)
    np.testing.assert_allclose(
        found.moved.cpu(), [told.moved.get(f, 0.0) for f in range(FOLDS)], rtol=1e-9, atol=1e-9
    )
    assert found.sequences.tolist() == [told.sequences.get(f, 0.0) for f in range(FOLDS)]
    assert float(found.tokens) == told.tokens


def test_the_batch_of_these_tests_has_something_for_every_rule_to_act_on():
    """Else the oracle would agree about nothing."""
    told = oracle.sums(make(), "current")

    assert len({round(x, 6) for x in told.weights.values()}) >= len(NAMES) - 2
    assert all(x > 0 for x in told.weights.values())


@pytest.mark.parametrize("near", NEARS, ids=str)
def test_cutting_a_dump_anywhere_and_merging_changes_nothing(near, way):
    batch = packed(make())
    whole = folded(batch, near=near)

    for at in (1, 3, 4, 7, 20, 23):
        parts = [folded(batch.rows(*ends), near=near) for ends in ((0, at), (at, batch.sequences))]
        assert_same(parts[0].merge(parts[1]), whole)
        assert_same(parts[1].merge(parts[0]), whole)


def test_packed_sequences_are_what_each_is_by_itself():
    rows = make()
    alone = [folded(packed([row])) for row in rows]

    whole = alone[0]
    for one in alone[1:]:
        whole = whole.merge(one)

    assert_same(folded(packed(rows)), whole)


@pytest.mark.parametrize("ids", [True, False])
def test_the_order_of_rows_does_not_matter(ids):
    rows = make()
    order = np.random.default_rng(1).permutation(len(rows))

    assert_same(folded(packed([rows[i] for i in order], ids)), folded(packed(rows, ids)))


def test_a_batch_without_a_token_adds_nothing(way):
    empty = folded(packed([make()[3]]))

    assert {getattr(empty, one.name).dtype for one in fields(Folds)[1:]} == {torch.float64}
    assert float(empty.tokens) == float(empty.sequences.sum()) == float(empty.sums.abs().sum()) == 0


@pytest.mark.parametrize(("ids", "advantages"), COLUMNS)
@pytest.mark.parametrize("side", SIDES)
def test_blocks_give_what_a_pass_over_the_tokens_gives(side, ids, advantages, way, monkeypatch):
    batch = packed(make(seed=5, many=90), ids, advantages)
    blocks = folded(batch, side)
    monkeypatch.setattr(folds, "here", lambda x: False)
    tokens = folded(batch, side)

    for name in ("sums", "weights", "cells", "spread", "moved"):
        one, two = getattr(blocks, name), getattr(tokens, name)
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-12 * float(two.abs().max()), err_msg=name)
    assert torch.equal(blocks.sequences, tokens.sequences)


@pytest.mark.parametrize(("ids", "advantages"), COLUMNS)
def test_each_block_may_be_a_little_longer_than_the_one_before(ids, advantages, monkeypatch):
    batch = packed(sorted(make(many=60), key=lambda row: len(row.rollout)), ids, advantages)
    tokens = folded(batch)
    monkeypatch.setattr(tokenblocks, "BLOCK", 1)

    assert_same(folded(batch), tokens)


def test_blocks_leave_the_batch_as_it_was(way):
    batch = packed(make())
    before = {name: getattr(batch, name).clone() for name in ("rollout", "old", "advantages", "token_ids")}
    folded(batch)

    for name, x in before.items():
        assert torch.equal(getattr(batch, name), x), name


# ---------------------------------------------------------------- which candidates blocks are for


def test_near_tokens_are_alike_for_all_candidates():
    for side in SIDES:
        assert foldblocks.alike(candidates.presets(side))


TIGHT = candidates.presets("old")[1]
UNLIKE = {
    "a bound within": replace(TIGHT, weight=replace(TIGHT.weight, upper=1.4)),
    "a tail": replace(TIGHT, weight=replace(TIGHT.weight, action="psis", upper=None)),
    "a weight of turns": replace(TIGHT, weight=replace(TIGHT.weight, over="segment")),
    "a rule on turns": replace(TIGHT, reject=(Reject("ratio", "segment", 0.9, 1.1),)),
    "a rule that |Δ| does not tell": replace(TIGHT, reject=(Reject("binary_kl", "token", None, 1e-3),)),
    "a veto within": replace(TIGHT, veto=Veto(0.9, None)),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_candidates_that_act_on_near_tokens_are_looked_at_token_by_token(name, monkeypatch):
    given = (*candidates.presets("old"), replace(UNLIKE[name], name="other"))
    scene = Scene.of(packed(make()), 0, 2)
    assert not foldblocks.alike(given)
    if name in ("a tail", "a weight of turns", "a rule on turns"):
        return  # a trainer batch settles the one; the others need turns
    found = sums(scene, given)
    monkeypatch.setattr(folds, "here", lambda x: False)

    assert_same(sums(Scene.of(packed(make()), 0, 2), given), found)
    assert float((found.sums[-1] - found.sums[1]).abs().max()) > 0.01


def test_what_is_only_logged_does_nothing():
    first, *_ = candidates.presets("old")
    logged = replace(TIGHT, apply=False)

    found = sums(Scene.of(packed(make()), 0, 2), (first, logged))

    assert torch.equal(found.sums[0], found.sums[1])
    assert found.weights[0] == found.weights[1] == found.tokens


# ---------------------------------------------------------------- hashes of arrays


EDGES = [x for k in range(1, 18) for x in (k * k / 2 - 1e-12, k * k / 2, k * k / 2 + 1e-12)]
ROLLOUT = [0.0, -0.0, 1e-9, 5.0, 1e-300, -1e-300, -1e4, -40000.0, -1e9, *(-x for x in EDGES)]
POSITIONS = [x for k in range(45) for x in (2**k - 2, 2**k - 1, 2**k) if x >= 0]


@pytest.mark.parametrize("most", [2**7, 2**23, 2**24 - 2, 2**24 - 1, 2**25 - 2, 2**45])
def test_classes_in_narrow_numbers_are_those_of_the_oracle(most):
    rollout = [x for x in ROLLOUT for at in POSITIONS if at <= most]
    position = [at for _ in ROLLOUT for at in POSITIONS if at <= most]
    octaves = (most + 1).bit_length()

    found = coordinates.classes(np.array(rollout), np.array(position), octaves)

    expected = [
        min(math.isqrt(int(2 * max(-x, 0.0))), 15) * octaves + (at + 1).bit_length() - 1
        for x, at in zip(rollout, position, strict=True)
    ]
    assert found.dtype == np.int16
    assert found.tolist() == expected


def test_kinds_of_tensors_are_those_of_the_oracle_for_whatever_tokens():
    rows = [replace(make(many=1)[0], rollout=ROLLOUT, position=[at] * len(ROLLOUT)) for at in POSITIONS]
    rows = [replace(row, train=dict.fromkeys(SIDES, ROLLOUT)) for row in rows]
    hashed = coordinates.kinds(packed(rows, ids=False, advantages=False))

    expected = [oracle.kind(row, t, False) for row in rows for t in range(len(ROLLOUT))]
    found = zip((hashed & (BUCKETS - 1)).tolist(), coordinates.sign(hashed).tolist(), strict=True)
    assert list(found) == expected


def test_classes_are_hashed_alike_however_many_octaves_tell_them_apart():
    at = [(likely, octave) for likely in range(16) for octave in range(20)]
    expected = [oracle.mix(likely * 64 + octave) for likely, octave in at]
    for octaves in (20, 33, 64):
        codes = torch.tensor([likely * octaves + octave for likely, octave in at])
        assert [x % 2**64 for x in coordinates.of_classes(codes, octaves).tolist()] == expected


@pytest.mark.parametrize("ids", [True, False])
def test_hashes_of_arrays_are_those_of_tensors(ids):
    batch = packed(make(many=40), ids)
    starts = batch.cu_seqlens.numpy()
    begins = starts[:-1][np.diff(starts) > 0]
    group = np.repeat(coordinates.mix(batch.key).numpy(), np.diff(starts))

    expected = coordinates.coordinates(batch).numpy()

    if ids:
        found = coordinates.bigrams(batch.token_ids.numpy(), begins)
    else:
        found = coordinates.lone(group, batch.position.numpy(), batch.rollout.numpy())
    assert found.tolist() == expected.tolist()


def test_sums_of_other_candidates_do_not_merge():
    found = folded(packed(make()))
    with pytest.raises(ValueError, match="different corrections"):
        found.merge(replace(found, names=found.names[::-1]))


def test_sequences_of_a_group_share_a_fold_and_groups_are_dealt_evenly():
    one = make(many=4)[0]
    rows = [replace(one, key=i // 2) for i in range(64 * FOLDS)]
    n = folded(packed(rows)).sequences.numpy()

    assert (n % 2 == 0).all()
    assert n.min() / 64 > 0.5
    assert n.max() / 64 < 2


# ---------------------------------------------------------------- the estimates, against the oracle


def random_folds(seed, signal=0.02, kept=0.8, sequences=4000, names=("base", "mine", "blind"), moving=0.1):
    """Sums of sequences with a known mean, another that keeps part of it and turns, and one with none."""
    rng = np.random.default_rng(seed)
    n = rng.multinomial(sequences, np.ones(FOLDS) / FOLDS).astype(float)
    mean = np.zeros(BUCKETS)
    mean[:40] = signal
    turn = np.zeros(BUCKETS)
    turn[40:80] = signal * 0.7
    noise = rng.normal(size=(FOLDS, BUCKETS)) * np.sqrt(n)[:, None]
    more = rng.normal(size=(2, FOLDS, BUCKETS)) * np.sqrt(n)[:, None]
    vectors = np.stack(
        (
            n[:, None] * mean + noise,
            n[:, None] * (kept * mean + turn) + kept * noise + 0.5 * more[0],
            more[1],
        )
    )
    tokens = 10.0 * sequences
    return Folds(
        names,
        torch.tensor(vectors),
        torch.tensor([1.0, kept, 0.3], dtype=torch.float64) * tokens,
        torch.tensor(rng.normal(size=(2, FOLDS, BUCKETS)) + 3 * n.mean() * np.ones((2, 1, 1))),
        torch.tensor(tokens * 9.0, dtype=torch.float64),
        torch.tensor(moving * n + rng.normal(size=FOLDS) * np.sqrt(n)),
        torch.tensor(n),
        torch.tensor(tokens, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("seed", "signal", "batch"),
    [(0, 0.05, 1.0), (0, 0.05, 1e6), (1, 0.02, 64.0), (2, 0.005, 1e6), (3, 0.0, 64.0), (4, 0.0, 1.0)],
)
def test_estimates_are_those_of_the_oracle(seed, signal, batch):
    folds = random_folds(seed, signal)
    vectors, n = folds.sums.tolist(), folds.sequences.tolist()

    found = estimates(folds, "base", batch)
    cost = oracle.cost(folds.moved.tolist(), n, systematic(folds).value)

    assert list(found) == list(folds.names)
    for name, mine, kept in zip(folds.names, vectors, (1.0, 0.8, 0.3), strict=True):
        told = oracle.estimate(mine, vectors[0], n, kept, batch, cost)
        assert vars(found[name]) == pytest.approx(told, rel=1e-9, abs=1e-9, nan_ok=True), name


def test_the_share_of_a_kind_is_that_of_the_oracle():
    folds = random_folds(0)
    n, variance = folds.sequences.tolist(), 9.0
    off, there = (oracle.Pairs.of(x, x, n) for x in folds.cells.tolist())
    whole, *left = (off.signal(f) / there.signal(f) / variance for f in (None, *range(FOLDS)))

    found = systematic(folds)

    assert found.value == pytest.approx(whole, rel=1e-9)
    assert found.error == pytest.approx(oracle.jackknife(left, whole), rel=1e-9)


def test_a_measured_bias_moves_the_score_by_its_precision():
    found = estimates(random_folds(0, 0.05), "base", 1e6)["mine"]
    weight = found.distance / 16 / (found.distance / 16 + found.error**2)
    assert 0.5 < weight < 1
    prior = (found.score - weight * found.measured) / (1 - weight)
    assert prior < found.expected  # there is a systematic share, and the trainer has moved


@pytest.mark.parametrize(("moving", "errors"), [(-5.0, 0.0), (5.0, 3.0)])
def test_where_the_trainer_has_moved_along_the_gradient_less_noise_counts_for_less(moving, errors):
    still = random_folds(0, 0.0, moving=0.0)
    folds = replace(still, moved=still.moved + moving * still.sequences)
    one, two = (estimates(given, "base", 64.0)["mine"] for given in (still, folds))

    known = math.isfinite(one.error)
    weight = one.error**2 / (one.error**2 + one.distance / 16) if known else 1.0
    before = min(max(moved(still) - 1, 0.0), 3.0)
    assert one.score - two.score == pytest.approx(weight * 0.25 * (errors - before) * math.sqrt(one.distance))


# ---------------------------------------------------------------- the estimates, against the truth


REPLICATIONS = 400


@pytest.fixture(scope="module")
def replications():
    """Products of two vectors whose means are known and whose noise is correlated, fold sizes as dealt."""
    rng = np.random.default_rng(7)
    one, two = rng.normal(size=(2, BUCKETS)) * 0.02
    found = []
    for _ in range(REPLICATIONS):
        n = rng.multinomial(500, np.ones(FOLDS) / FOLDS).astype(float)
        shared, own = rng.normal(size=(2, FOLDS, BUCKETS)) * np.sqrt(n)[:, None]
        a = n[:, None] * one + shared
        b = n[:, None] * two + 0.6 * shared + 0.8 * own
        found.append((_Product.of(a, b, n), _Product.of(a, a, n)))
    return one, two, found


def within(values, truth, errors=4.0):
    spread = np.std(values, ddof=1) / math.sqrt(len(values))
    assert spread > 0
    assert abs(np.mean(values) - truth) < errors * spread


def test_the_product_of_different_folds_is_unbiased(replications):
    one, two, found = replications

    within([cross.signal for cross, _ in found], float(one @ two))
    within([own.signal for _, own in found], float(one @ one))


def test_the_product_of_all_with_all_would_not_be(replications):
    """What the folds are for: the square of a noisy mean holds the noise."""
    one, _, found = replications
    plain = [own.signal + own.noise / 500 for _, own in found]

    assert np.mean(plain) > 3 * float(one @ one)


def test_the_noise_is_unbiased(replications):
    found = replications[2]

    within([cross.noise for cross, _ in found], 0.6 * BUCKETS)
    within([own.noise for _, own in found], 1.0 * BUCKETS)


@pytest.mark.parametrize(("signal", "batch"), [(0.05, 64.0), (0.08, 1e6)])
def test_the_jackknife_error_is_about_the_spread_over_replications(signal, batch):
    found = [estimates(random_folds(seed, signal), "base", batch)["mine"] for seed in range(200)]

    ratio = np.mean([one.error for one in found]) / np.std([one.measured for one in found], ddof=1)
    assert 0.7 < ratio < 1.4


def test_what_turns_the_gradient_is_measured():
    """Of the mean it keeps 0.8 along the reference and adds 0.7 beside it: a cosine, without noise."""
    found = [estimates(random_folds(seed, 0.08), "base", 1e9)["mine"].measured for seed in range(60)]

    within(found, math.log(0.8 / math.hypot(0.8, 0.7)), 5)


@pytest.mark.parametrize("scale", [7.0, -0.3, 1e-6])
def test_the_scale_of_advantages_is_no_matter(scale):
    rows = make(many=200, wild=False)
    scaled = [replace(row, advantages=[scale * a for a in row.advantages]) for row in rows]

    one, two = (estimates(folded(packed(each)), REFERENCE, 64) for each in (rows, scaled))

    for name in NAMES:
        assert vars(two[name]) == pytest.approx(vars(one[name]), rel=1e-7, abs=1e-9, nan_ok=True), name


@pytest.mark.parametrize("near", NEARS, ids=str)
@pytest.mark.parametrize("ids", [True, False])
def test_on_policy_no_candidate_differs_from_the_reference(ids, near):
    rows = make(many=200)
    rows = [replace(row, train=dict.fromkeys(SIDES, row.rollout)) for row in rows]

    folds = folded(packed(rows, ids), near=near)

    for name, found in estimates(folds, REFERENCE, 64).items():
        assert (found.kept, found.noise) == (1.0, pytest.approx(1.0)), name
        assert (found.expected, found.score) == (pytest.approx(0, abs=1e-12),) * 2, name
        assert math.isnan(found.measured) or abs(found.measured) < 1e-12, name
    share = systematic(folds)
    assert math.isnan(share.value) or share.value == 0
    assert moved(folds) == 0


@pytest.mark.parametrize("seed", range(3))
def test_what_differs_from_the_reference_by_rounding_is_the_reference(seed):
    folds = random_folds(seed, 0.05)
    noise = torch.tensor(np.random.default_rng(seed).normal(size=folds.sums[0].shape))
    same = replace(
        folds, sums=torch.stack((folds.sums[0], folds.sums[0] * (1 + 1e-16 + 3e-16 * noise), folds.sums[2]))
    )
    found = estimates(same, "base", 64.0)

    assert not torch.equal(same.sums[0], same.sums[1])
    assert (found[folds.names[1]].measured, found[folds.names[1]].error, found[folds.names[1]].distance) == (
        0,
        0,
        0,
    )
    other = replace(same, sums=torch.stack((folds.sums[0], folds.sums[0] + 1e-9 * noise, folds.sums[2])))
    assert estimates(other, "base", 64.0)[folds.names[1]].distance > 0


def halves(seed, signal, batch):
    """A correction that drops a random half of the sequences' tokens, beside one that drops none."""
    rng = np.random.default_rng(seed)
    n = np.full(FOLDS, 2000.0)
    each = rng.normal(size=(2, FOLDS, BUCKETS)) * np.sqrt(n / 2)[:, None, None].reshape(1, -1, 1)
    each += (n / 2)[:, None] * signal
    tokens = float(n.sum())
    folds = Folds(
        ("all", "half"),
        torch.tensor(np.stack((each.sum(0), each[0]))),
        torch.tensor([tokens, tokens / 2], dtype=torch.float64),
        torch.zeros((2, FOLDS, BUCKETS), dtype=torch.float64),
        torch.tensor(0.0, dtype=torch.float64),
        torch.zeros(FOLDS, dtype=torch.float64),
        torch.tensor(n),
        torch.tensor(tokens, dtype=torch.float64),
    )
    return estimates(folds, "all", batch)["half"]


@pytest.mark.parametrize("seed", range(4))
def test_dropping_a_random_half_costs_the_root_of_two_where_noise_is_all_there_is(seed):
    assert halves(seed, 0.0, 1.0).expected == pytest.approx(math.log(math.sqrt(0.5)), abs=0.02)


def test_dropping_a_random_half_costs_nothing_where_there_is_no_noise():
    found = halves(0, 0.5, 1e9)

    assert found.expected == pytest.approx(0, abs=1e-3)
    assert found.measured == pytest.approx(0, abs=1e-3)


# ---------------------------------------------------------------- what tokens of a kind have in common


WORDS = 5


def drifted(delta, seed=0, many=500, length=30):
    """Rows of few words, all as likely; `delta(rng, before, ids, position)` says how far off each is."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(many):
        ids = rng.integers(0, WORDS, length)
        rollout = np.full(length, -3.0)
        off = delta(rng, np.concatenate(([-1], ids[:-1])), ids)
        rows.append(
            Row(
                key=i,
                rollout=rollout.tolist(),
                train={side: (rollout + off).tolist() for side in SIDES},
                advantages=[1.0] * length,
                ids=ids.tolist(),
                position=list(range(length)),
            )
        )
    return rows


OFF = np.log1p((-0.2, 0.2))
"""As often below as above: r is 1 on average, as for any honest mismatch."""
OFFSET = np.random.default_rng(5).choice(OFF, size=(WORDS + 1, WORDS))


def per_token(rng, before, ids):
    return rng.choice(OFF, len(ids))


def per_bigram(rng, before, ids):
    return OFFSET[before, ids]


def per_dump(rng, before, ids):
    return np.full(len(ids), 0.2)


SKETCH = 0.25
"""Kinds that share a bucket: twice what hashing into 256 buckets errs by."""


@pytest.mark.parametrize(
    ("delta", "ids", "share", "near"),
    [
        (per_token, True, 0.0, 0.01),
        (per_token, False, 0.0, 0.01),
        (per_bigram, True, 1.0, SKETCH),
        (per_bigram, False, 0.0, 0.05),
        (per_dump, True, 1.0, 1e-9),
        (per_dump, False, 1.0, 1e-9),
    ],
)
def test_noise_of_tokens_is_not_systematic_and_an_offset_of_their_kind_is(delta, ids, share, near):
    found = systematic(folded(packed(drifted(delta), ids)))

    assert found.value == pytest.approx(share, abs=near)
    assert 0 <= found.error < 0.02


def test_noise_and_offset_of_one_size_share_the_variance():
    found = systematic(folded(packed(drifted(lambda *given: per_token(*given) + per_bigram(*given)))))

    assert found.value == pytest.approx(0.5, abs=SKETCH / 2)


def test_noise_of_tokens_is_within_its_errors_of_nothing():
    found = [systematic(folded(packed(drifted(per_token, seed, many=60)))) for seed in range(30)]
    far = [abs(one.value) / one.error for one in found]

    assert sum(x > 2 for x in far) <= 6
    assert max(far) < 5


def test_a_few_broken_tokens_are_not_all_there_is_to_see():
    """A token counts as at most 5 times too likely: one of e^50 would drown every offset."""
    rows = drifted(per_bigram)
    rows[0].train["old"][5] += 50.0
    found = systematic(folded(packed(rows)))

    assert found.value == pytest.approx(1.0, abs=SKETCH)


# ---------------------------------------------------------------- hostile values


def hostile(**changes):
    """Rows of which one token has another value."""
    rows = make(many=80, wild=False)
    for name, value in changes.items():
        target = rows[0].train[name] if name in SIDES else getattr(rows[0], name)
        target[0] = value
    return rows


@pytest.mark.parametrize("near", NEARS[:2], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"old": 50.0},
        {"old": -50.0},
        {"old": 1e300},
        {"old": -1e300},
        {"old": -math.inf},
        {"old": math.inf},
        {"rollout": -math.inf},
        {"advantages": math.inf},
        {"advantages": -math.inf},
        {"advantages": math.nan},
        {"advantages": 1e300},
    ],
    ids=str,
)
def test_hostile_values_leave_finite_numbers_or_an_unknown(changes, near):
    rows = hostile(**changes)

    found = evidence.alignment(folded(packed(rows), near=near), "old", evidence.DIRECTION, 64)

    text = found.model_dump_json()  # refuses what is not finite
    assert "NaN" not in text
    assert "Infinity" not in text
    assert set(found.rows) == set(NAMES)


@pytest.mark.parametrize("many", [1, 2])
def test_a_dump_of_next_to_nothing_leaves_its_errors_unknown(many):
    rows = [row for row in make() if row.rollout][:many]

    found = evidence.alignment(folded(packed(rows)), "old", evidence.DIRECTION, 1)

    assert found.model_dump_json()
    assert all(row.error is None for row in found.rows.values())


def test_a_token_of_e_to_the_fifty_moves_no_bounded_candidate_much():
    rows = make(many=80, wild=False)
    plain, wild = (folded(packed(each)) for each in (rows, hostile(old=50.0)))

    for name, before, after in zip(plain.names, plain.weights, wild.weights, strict=True):
        assert abs(float(after - before)) <= 5 * len(rows[0].rollout), name


def test_coordinates_are_dealt_evenly():
    """Half of them have each sign, and few share a bucket: the sketch keeps inner products."""
    words = range(40)
    row = Row(1, [-1.0] * 40, {}, [1.0] * 40, list(words), list(words))
    placed = [oracle.coordinate(row, t, True) for t in range(40)]

    assert 8 < sum(sign == 1 for _, sign in placed) < 32
    assert len({bucket for bucket, _ in placed}) > 30


def surely(folds, errors):
    """Sums per fold whose total is so many of their standard errors."""
    n = folds.sequences
    one = torch.where(torch.arange(FOLDS) % 2 == 0, 1.0, -1.0).to(torch.float64)
    one = one - one.sum() / n.sum() * n
    return errors * one.square().sum().sqrt() * n / n.sum() + one


def test_how_surely_the_trainer_moved_is_that_of_the_oracle():
    folds = random_folds(0)
    told = oracle.moved(folds.moved.tolist(), folds.sequences.tolist())

    assert moved(folds) == pytest.approx(told, rel=1e-9)
    assert moved(replace(folds, moved=-folds.moved)) == pytest.approx(-told, rel=1e-9)
    assert moved(replace(folds, moved=torch.zeros_like(folds.moved))) == 0


@pytest.mark.parametrize(
    ("away", "share", "feared"),
    [
        (-5.0, 0.0, 0.0),
        (1.0, 0.0, 0.0),
        (2.0, 0.0, 0.25),
        (4.0, 0.0, 0.75),
        (40.0, 0.0, 0.75),
        (1.0, 0.25, 0.05),
        (1.0, 5.0, 0.1),
        (2.0, 0.25, 0.3),
    ],
)
def test_a_bias_that_is_not_measured_is_feared_by_movement_and_share(away, share, feared):
    """In units of the root of the distance; beyond the first standard error, up to three of them."""
    folds = random_folds(4, 0.0)
    there = torch.ones((FOLDS, BUCKETS), dtype=torch.float64) * folds.sequences[:, None]
    cells = torch.stack((math.sqrt(share * 9.0) * there, there))
    folds = replace(folds, cells=cells, moved=surely(folds, away))
    found = estimates(folds, "base", 64)["blind"]

    assert moved(folds) == pytest.approx(away)
    assert found.error == math.inf
    assert found.expected - found.score == pytest.approx(feared * math.sqrt(found.distance), abs=1e-9)


def test_a_variance_of_next_to_nothing_leaves_the_share_of_a_kind_without_an_error():
    folds = replace(random_folds(0), spread=torch.tensor(1e-290, dtype=torch.float64))

    assert systematic(folds).error == math.inf or math.isfinite(systematic(folds).error)
