"""Check that near tokens are alike for a preset by looking at all tokens, preset by preset."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offpol_diag.analysis.first_pass import Found, Needs, read_ahead
from offpol_diag.analysis.tally import Study, observe
from offpol_diag.analyze import analyze
from offpol_diag.batch import Batch
from offpol_diag.engine import correction, moments, ratios
from offpol_diag.engine import scene as near
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.scene import RADII, Nearness, Scene, neutral, splits
from offpol_diag.engine.scope import NO_FITS, BatchFits, Smooth
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight, catalogue
from offpol_diag.readers import open_dump
from offpol_diag.run.task import Local
from tests import oracles
from tests.kinds import EACH
from tests.whole import outcome

CPU = torch.device("cpu")
ALL = catalogue.load().resolve("all")


def opened(rows, folder, presets=ALL):
    """Open a dump: its study, its cuts and tails, and all of it as one batch."""
    path = oracles.write(rows, folder / "dump.parquet")
    dump = open_dump([path], batch_tokens=10**6)
    study = Study.of(dump.info.columns, presets, (), 0)
    asked = Needs.of(study.presets, False)
    found = read_ahead(Local(CPU), dump, asked) if asked else Found(NO_FITS, None)
    (batch,) = dump.batches()
    return study, found, batch


def tallied(study: Study, found: Found, batch, split: Nearness | None):
    scene = Scene.of(batch, 0, 16, found.fits, split)
    seen = observe(study, scene)
    scene.forget()
    return seen


def apart(one, two, name):
    """Return sums that differ by more than rounding, each compared with the sum of sizes where it cancels."""
    mine, theirs = (seen.states[name].read() for seen in (one, two))
    assert mine.keys() == theirs.keys()
    return {
        key: (x, y)
        for key in mine
        for x, y in zip(mine[key].tolist(), theirs[key].tolist(), strict=True)
        if not (x == y or math.isclose(x, y, rel_tol=1e-10, abs_tol=1e-12) or (x != x and y != y))
    }


@pytest.mark.parametrize(
    ("sigma", "block", "presets"),
    [(1e-8, 40, EACH), (1e-4, 10**9, EACH), (0.03, 40, ALL), (0.2, 10**9, EACH), (1.0, 60, EACH)],
    ids=["1e-8", "1e-4", "0.03", "0.2", "1"],
)
def test_near_and_far_tokens_together_are_all_tokens(tmp_path, monkeypatch, sigma, block, presets):
    for module in (moments, ratios):
        monkeypatch.setattr(module, "BLOCK", block)
    rows = oracles.make_rows(sigma, seed=11, many=30, outliers=0.02)
    study, found, batch = opened(rows, tmp_path, presets)

    split, whole = (tallied(study, found, batch, how) for how in (study.near, None))

    assert apart(split, whole, "sums") == {}
    assert apart(split, whole, "logged") == {}
    mine, theirs = (seen.states["ranges"].read() for seen in (split, whole))
    assert mine.keys() == theirs.keys()
    for name, ends in mine.items():
        assert ends == pytest.approx(theirs[name], rel=1e-9, abs=1e-13), name


def test_nearly_every_preset_that_ships_is_split():
    radius = Nearness.of(ALL).radius
    left = [preset.name for preset in ALL if not splits(preset, radius)]
    assert len(left) <= len(ALL) // 20, left


@pytest.mark.parametrize("radius", RADII)
def test_no_preset_that_is_split_drops_or_bounds_a_near_token(tmp_path, radius):
    """All |Δ| at or just below the radius, to both sides, and all signs of the advantage."""
    rows = oracles.make_rows(0.5, seed=5, many=30)
    for i, row in enumerate(rows):
        for t, q in enumerate(row["rollout_log_probs"]):
            step = (radius * (1, -1, 0.999, -0.5)[(t + i) % 4]) if q < -2 * radius else 0.0
            row["old_log_probs"][t] = q + step / 2
            row["current_log_probs"][t] = q + step
    presets = [preset for preset in ALL if splits(preset, radius)]
    study, found, batch = opened(rows, tmp_path, presets)
    scene = Scene.of(batch, 0, 2, found.fits, Nearness(radius * (1 + 1e-9)))
    close = near.close(scene.ratios("rollout"), Nearness(radius * (1 + 1e-9)))
    assert bool(close.all())
    watched = {rule for preset in presets for rule in preset.reject if near._watched(rule)}
    for preset in presets:
        done = outcome(scene, preset)
        if done.kept.tokens is not None and not watched & set(preset.reject):
            assert bool(done.kept.tokens.all()), preset.name
        assert not bool(done.kept.vetoed.any()), preset.name
        weight = done.preset.weight
        if weight is not None and weight.over == "token" and weight.action != "psis":
            assert done.weighed is not None
            assert torch.equal(done.weighed.final.values, done.weighed.raw.values), preset.name
            assert not bool(done.weighed.bounded.any()), preset.name
    assert study.near.radius >= RADII[-1]


TOKEN = Weight(over="token", upper=2.0)
PLAIN = Preset("p", "", weight=TOKEN, loss="reinforce")


@pytest.mark.parametrize(
    ("preset", "alike"),
    [
        (PLAIN, True),
        (replace(PLAIN, weight=None), True),
        (replace(PLAIN, weight=Weight(over="token", upper=1.05)), False),
        (replace(PLAIN, weight=Weight(over="token", upper=0.9)), False),  # it acts on all near tokens
        (replace(PLAIN, weight=Weight(upper=math.exp(0.101), lower=math.exp(-0.101))), True),
        (replace(PLAIN, weight=Weight(over="token", upper=2.0, lower=0.95)), False),
        (replace(PLAIN, weight=Weight(over="token", upper=2.0, safety=0.05)), False),
        (replace(PLAIN, weight=Weight(over="sum", upper=1.001)), True),
        (replace(PLAIN, weight=Weight(over="segment", upper=2.0)), False),
        (replace(PLAIN, veto=Veto(lower=1e-4)), True),
        (replace(PLAIN, veto=Veto(lower=0.95)), False),
        (replace(PLAIN, veto=Veto(upper=1.05)), False),
        (replace(PLAIN, reject=(Reject("ratio", "token", 0.5, 2.0),)), True),
        (replace(PLAIN, reject=(Reject("ratio", "token", 0.95, None),)), False),
        (replace(PLAIN, reject=(Reject("ratio", "token", None, 1.05),)), False),
        (replace(PLAIN, reject=(Reject("k1", "token", None, 0.05),)), False),
        (replace(PLAIN, reject=(Reject("k2", "token", None, 0.006),)), True),
        (replace(PLAIN, reject=(Reject("k2", "token", None, 0.004),)), False),
        (replace(PLAIN, reject=(Reject("k3", "token", None, 0.0045),)), False),
        (replace(PLAIN, reject=(Reject("tv", "token", None, 0.04),)), False),
        (replace(PLAIN, reject=(Reject("mult_prob_error", "token", None, 1.05),)), False),
        (replace(PLAIN, reject=(Reject("prob_diff", "token", -0.2, 0.05),)), False),
        (replace(PLAIN, reject=(Reject("binary_kl", "token", None, 0.05),)), True),  # watched
        (replace(PLAIN, reject=(Reject("ratio", "mean", 0.999, 1.001),)), True),
        (replace(PLAIN, reject=(Reject("ratio", "mean", 0.999, 1.001, among="left"),)), True),
        (replace(PLAIN, reject=(Reject("ratio", "segment", 0.999, 1.001),)), True),  # watched
        (replace(PLAIN, reject=(Reject("ratio", "segment", 0.999, 1.001, among="left"),)), False),
        (replace(PLAIN, reject=(Reject("k1", "mean", None, 0.1, advantage="away"),)), True),  # watched
        (replace(PLAIN, loss="ppo_clip", clip=Clip(0.2, 0.2, 3.0)), True),
        (replace(PLAIN, loss="ppo_clip", clip=Clip(0.2, 0.05, None)), False),
        (replace(PLAIN, loss="ppo_clip", clip=Clip(0.05, None, None)), False),
        (replace(PLAIN, loss="ppo_clip", clip=Clip(None, None, 1.05)), False),
        (replace(PLAIN, loss="gspo", clip=Clip(3e-4, 4e-4, None)), True),
        (replace(PLAIN, weight=Weight(over="token", upper=1.05), apply=False), True),
    ],
    ids=str,
)
def test_presets_that_treat_tokens_within_a_tenth_alike(preset, alike):
    assert splits(preset, 0.1) is alike


def test_neutral_presets_of_one_kind_are_one():
    one, two = PLAIN, replace(PLAIN, name="q", reject=(Reject("ratio", "mean", 0.9, 1.1),), veto=Veto(1e-4))
    assert neutral(one) == neutral(two)
    assert neutral(one) != neutral(replace(PLAIN, policy="current"))
    assert neutral(one) != neutral(replace(PLAIN, weight=Weight(over="sum", upper=2.0)))


class Large(TorchDispatchMode):
    """Counter of operations on at least as many numbers as there are tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.count = tokens, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        sizes = [x.numel() for x in args if isinstance(x, torch.Tensor)]
        self.count += max(sizes, default=0) >= self.tokens
        return function(*args, **(kwargs or {}))


def test_a_further_preset_that_is_split_costs_nothing_per_token(tmp_path):
    """Of the same numerator, loss and kind of weight; rules on sequences share what they judge by."""
    rows = oracles.make_rows(0.01, seed=2, many=100)
    named = [
        replace(PLAIN, name=f"p{i}", weight=Weight(over="token", upper=2.0 + i), veto=Veto(lower=1e-4))
        for i in range(6)
    ]
    counts = []
    for presets in (named[:1], named):
        study, _, batch = opened(rows, tmp_path, presets)
        scene = Scene.of(batch, 0, 2, near=study.near)
        with Large(9 * batch.tokens // 10) as large:
            observe(study, scene)
        counts.append(large.count)
    assert counts[0] == counts[1]


def test_two_runs_give_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(moments, "BLOCK", 1000)
    path = oracles.write(oracles.make_rows(0.02, seed=1, many=60), tmp_path / "dump.parquet")
    how = {"presets": EACH[::2], "device": "cpu", "batch_tokens": 1000}
    one, two = (analyze([path], **how).model_dump(mode="json", exclude={"run"}) for _ in range(2))
    assert one == two


def _close(x, y):
    return x == y or (x is not None and y is not None and math.isclose(x, y, rel_tol=1e-8, abs_tol=1e-11))


@pytest.mark.parametrize("many", [1, 3])
def test_a_few_very_long_sequences_are_looked_at_in_blocks_too(tmp_path, monkeypatch, many):
    rows = [row for row in oracles.make_rows(0.1, seed=9, many=12) if sum(row["response_mask"]) > 20][:many]
    path = oracles.write(rows, tmp_path / "long.parquet")
    monkeypatch.setattr(moments, "BLOCK", 10**9)
    whole = analyze([path], presets=EACH, device="cpu").model_dump(mode="json", exclude={"run"})
    monkeypatch.setattr(moments, "BLOCK", 5)
    cut = analyze([path], presets=EACH, device="cpu").model_dump(mode="json", exclude={"run"})
    assert cut["presets"].keys() == whole["presets"].keys()
    for name, one in cut["presets"].items():
        for key, number in one["metrics"].items():
            assert _close(number["value"], whole["presets"][name]["metrics"][key]["value"]), (name, key)


COINS = Reject("binary_kl", "token", None, 0.2)


def packed(rollout, old, current=None, advantages=None, lengths=None, runs=None, **scalars):
    """Make a batch of these log-probs, one sequence of one turn unless the lengths say otherwise."""
    tensors = [
        None if x is None else torch.tensor(x, dtype=torch.float64) for x in (old, current, advantages)
    ]
    n = len(rollout)
    starts = torch.tensor([0, *np.cumsum(lengths if lengths is not None else [n]).tolist()])
    return Batch(
        torch.tensor(rollout, dtype=torch.float64),
        starts,
        starts if runs is None else torch.tensor([0, *np.cumsum(runs).tolist()]),
        torch.arange(n),
        torch.arange(len(starts) - 1),
        torch.zeros(len(starts) - 1, dtype=torch.int64),
        *tensors,
        scalars={name: list(column) for name, column in scalars.items()},
    )


def near_tokens(batch, which, fits=None):
    return near.close(Ratios(batch, "rollout", fits or BatchFits()), which).tolist()


@pytest.mark.parametrize("sigma", [1e-4, 0.03, 0.5])
def test_blocks_find_what_the_whole_batch_does(tmp_path, monkeypatch, sigma):
    study, found, batch = opened(oracles.make_rows(sigma, seed=3, many=60, outliers=0.03), tmp_path)
    scene = Scene.of(batch, 0, 2, found.fits, study.near)
    whole = near.close(scene.ratios("rollout"), study.near)
    monkeypatch.setattr(ratios, "BLOCK", 7)

    assert torch.equal(near.close(scene.ratios("rollout"), study.near), whole)
    assert len(study.near.rules) + len(study.near.tails) > 5
    far, close = scene.far_and_near
    assert torch.equal(close.index, torch.nonzero(whole).flatten())
    assert torch.equal(far.index, torch.nonzero(~whole).flatten())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_log_ratios_that_are_no_numbers_are_far(bad):
    for columns in ({"old": [bad, -1.0]}, {"old": [-1.0, -1.0], "current": [bad, -1.0]}):
        assert near_tokens(packed([-1.0, -1.0], **columns), Nearness(0.09)) == [False, True]
    assert near_tokens(packed([bad, -1.0], [bad, -1.0]), Nearness(0.09)) == [False, True]


def test_a_token_is_far_where_only_the_drift_between_the_trainers_policies_is():
    assert near_tokens(packed([-1.0] * 2, [-1.08, -1.0], [-0.92, -1.0]), Nearness(0.09)) == [False, True]


def test_the_share_of_far_tokens_is_that_of_any_two_policies():
    q, near = torch.full((1600,), -1.0), Nearness(0.09)
    third = torch.where(torch.arange(1600) < 400, 0.12, 0.06)
    third[1200:] = math.nan
    both = (q + third / 2).tolist()

    assert near.share_of_far(packed(q.tolist(), (q + third).tolist())) == 0.5
    assert near.share_of_far(packed(q.tolist(), both)) == 0.25  # NaN alone
    assert near.share_of_far(packed(q.tolist(), both, (q - third / 2).tolist())) == 0.5
    assert near.share_of_far(packed([], [])) == 0.0


@pytest.mark.parametrize("sign", ["any", "positive", "negative", "against", "against_or_zero", "away"])
def test_a_token_that_a_watched_rule_drops_is_far(sign):
    d = np.linspace(-0.09, 0.09, 301)
    q = np.tile([-0.05, -0.1, -2.0], 101)[:301]
    d = np.repeat(d[::3], 3)[:301]
    batch = packed(q, q + d, advantages=np.resize([1.0, -1.0, 0.0], 301), runs=[3] * 100 + [1])
    for rule in (COINS, Reject("ratio", "segment", 0.97, 1.03), Reject("prob_diff", "segment", -0.01, 0.01)):
        rule = replace(rule, advantage=sign)
        passes = correction.passes(Ratios(batch, "old"), rule).values
        within = torch.from_numpy(np.abs(q + d - q) <= 0.09)
        found = near_tokens(batch, Nearness(0.09, rules=(("old", rule),)))
        assert found == (passes & within).tolist()
        assert any(found)
        assert not all(found)


def test_cuts_and_tails_are_those_of_each_trainer_batch():
    d = np.linspace(-0.12, 0.12, 400)
    q = np.full(len(d), -0.7)
    batch = packed(q, q + d, lengths=[200, 200], step=[1, 2])
    delta = (batch.old - batch.rollout).numpy()
    rule, weight = Reject("k2", "batch", None, 0.02), Weight(over="token", action="psis", upper=None)
    ends = torch.tensor([0.2, 0.3], dtype=torch.float64)
    fits = BatchFits(
        cuts={("old", rule): {"1": 1e-3, "2": math.inf}},
        tails={("old", weight): {"1": None, "2": Smooth(0.05, ends, ends)}},
    )
    which = Nearness(0.09, rules=(("old", rule),), tails=(("old", weight),))
    first = np.arange(400) < 200
    expected = (np.abs(delta) <= 0.09) & np.where(first, delta**2 / 2 < 1e-3, delta <= 0.05)

    assert near_tokens(batch, which, fits) == expected.tolist()
