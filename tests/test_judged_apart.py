"""Check whole sequences judged by far tokens and sums of near ones against all their tokens."""

import pytest
import torch

from offpol_diag.batch import Batch
from offpol_diag.engine import correction, losses, update
from offpol_diag.engine import outcome as signs
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.scene import Nearness, Scene
from offpol_diag.presets import Preset, Reject, Veto, Weight
from tests import oracles
from tests.test_near import opened

STATISTICS = ("ratio", "k1", "k2", "k3", "k3_reverse", "mult_prob_error", "prob_diff", "prob_gap", "tv")
OVER = ("sum", "mean", "max", "min")


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    rows = oracles.make_rows(0.05, seed=3, many=40, outliers=0.02)
    return opened(rows, tmp_path_factory.mktemp("apart"))


@pytest.fixture
def scene(dump):
    """Make a scene whose near tokens are those within 0.09."""
    _, found, batch = dump
    one = Scene.of(batch, 0, 16, found.fits, Nearness(0.09))
    one.use_split()
    yield one
    one.forget()


@pytest.fixture
def looked(monkeypatch):
    """Record of how many tokens a statistic was computed, each time."""
    counts, plain = [], Ratios._token

    def counted(self, *args):
        found = plain(self, *args)
        if isinstance(found, torch.Tensor):
            counts.append(len(found))
        return found

    monkeypatch.setattr(Ratios, "_token", counted)
    return counts


@pytest.mark.parametrize("policy", ["old", "current"])
@pytest.mark.parametrize("safety", [None, 0.2, 0.05])
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("statistic", STATISTICS)
def test_an_aggregate_is_that_of_all_tokens(scene, looked, statistic, over, safety, policy):
    looked.clear()
    found = scene.ratios(policy).aggregate(statistic, over, safety)
    many = sum(looked)
    wanted = Ratios(scene.batch, policy).aggregate(statistic, over, safety)

    assert found.per == wanted.per == "sequence"
    torch.testing.assert_close(found.values, wanted.values, rtol=1e-12, atol=1e-14)
    acts = safety is not None and safety < 0.09
    far = scene.far_and_near[0].batch.tokens
    known = over in ("sum", "mean") or (over == "max" and statistic in ("ratio", "k1"))
    assert acts or not known or many == far


@pytest.mark.parametrize("safety", [0.2, 0.05, None])
def test_tokens_beyond_a_safety_bound_are_counted_where_they_can_be(scene, safety):
    weight = Weight("sum", upper=2.0, safety=safety, safety_at="token")
    preset = Preset("", "", "old", weight=weight)
    mine, theirs = (
        correction.weigh(ratios, preset) for ratios in (scene.ratios("old"), Ratios(scene.batch, "old"))
    )

    assert torch.equal(mine.bounded, theirs.bounded)
    assert torch.equal(mine.tries, theirs.tries)
    assert safety is None or float(mine.bounded.sum()) > 0


SHARED = {
    "mean u, around π_old": lambda scene: {"u": losses.mean_u(scene.ratios("old"))},
    "mean u, around π_rollout": lambda scene: {"u": losses.mean_u(scene.ratios("current"))},
    "Σ|A|": update.shared,
    "signs of A": signs.every,
}


@pytest.mark.parametrize("what", SHARED)
def test_shared_numbers_of_sequences_are_made_of_far_and_near_tokens(scene, dump, what):
    _, found, batch = dump
    mine = SHARED[what](scene)
    theirs = SHARED[what](Scene.of(batch, 0, 16, found.fits))

    assert mine.keys() == theirs.keys()
    for name, x in mine.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("safety", [None, 0.2])
@pytest.mark.parametrize(
    "before",
    [
        Preset("", "", "old", reject=(Reject("ratio", upper=1.2),)),
        Preset("", "", "old", reject=(Reject("ratio", policy="current", lower=0.8),), veto=Veto(upper=1.5)),
        Preset("", "", "old", veto=Veto(lower=0.5)),
    ],
)
def test_rules_on_the_rest_of_sequences_are_judged_by_far_and_near_tokens(
    scene, looked, before, safety, over
):
    whole, plain = scene.ratios("old"), Ratios(scene.batch, "old")
    rule = Reject("k2", over, among="left")
    looked.clear()
    mine = correction.ratios_for(whole, before, rule).aggregate("k2", over, safety).values
    assert over in ("max", "min") or set(looked) <= {scene.far_and_near[0].batch.tokens}
    theirs = correction.ratios_for(plain, before, rule).aggregate("k2", over, safety).values

    assert over == "min" or not torch.equal(theirs, plain.aggregate("k2", over, safety).values)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def two_sequences(drift):
    """Make two sequences of as many tokens, with these Δ."""
    d = torch.tensor(drift, dtype=torch.float64)
    starts = torch.tensor([0, len(d) // 2, len(d)])
    none = torch.zeros(2, dtype=torch.int64)
    return Batch(torch.full_like(d, -5.0), starts, starts, torch.arange(len(d)), none, none, old=d - 5.0)


def test_a_sequence_of_which_no_token_is_left_has_nothing():
    batch = two_sequences([0.0, 0.01, 1.0, 1.1])
    scene = Scene.of(batch, 0, 16, near=Nearness(0.09))
    whole = scene.ratios("old")
    scene.use_split()
    before = Preset("", "", "old", reject=(Reject("ratio", upper=2.0),))

    found = correction.ratios_for(whole, before, Reject("ratio", "max", among="left")).aggregate(
        "ratio", "max"
    )
    assert found.values.tolist() == pytest.approx([0.01, 0.0])


@pytest.mark.parametrize(
    "before",
    [
        Preset("", "", "old", reject=(Reject("ratio", upper=1.02),)),
        Preset("", "", "old", reject=(Reject("binary_kl", upper=0.001),)),
        Preset("", "", "old", veto=Veto(lower=0.98)),
    ],
)
def test_rules_that_may_drop_a_near_token_are_judged_by_all_tokens(scene, before):
    whole, plain = scene.ratios("old"), Ratios(scene.batch, "old")
    rule = Reject("ratio", "mean", among="left")
    mine, theirs = (
        correction.ratios_for(some, before, rule).aggregate("ratio", "mean") for some in (whole, plain)
    )

    assert torch.equal(mine.values, theirs.values)
