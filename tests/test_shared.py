"""What all tokens of a sequence have is not asked of each token, and comes out as if it were."""

from dataclasses import replace

import pytest
import torch

from offpol_diag.crosswalk import open_instruct, roll, update
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.nemo_rl_sums import CLIPPED, LOSS_RATIO
from offpol_diag.crosswalk.view import View
from offpol_diag.metrics.scene import Scene
from offpol_diag.near import Near
from offpol_diag.presets import Clip, Preset, Reject, Veto
from tests.test_alike import plain

GSPO = Preset("p", "", "old", loss="gspo", clip=Clip(0.02, 0.03, None))
MEASURES = (LOSS_RATIO, CLIPPED)


@pytest.fixture(params=[None, 0.09], ids=["whole", "apart"])
def view(request):
    """Sequences of u up, down, next to none and mixed, A of both signs and 0; one has no token."""
    one = plain([0.0] * 10, [0, 10])
    offsets = torch.tensor([0, 2, 4, 4, 6, 10])
    u = torch.tensor([0.1, 0.06, -0.2, 0.01, 0.01, 0.02, 0.3, -0.3, 0.02, 0.05], dtype=torch.float64)
    a = torch.tensor([1.0, -1.0, -2.0, -1.0, 1.0, -1.0, 0.0, 3.0, 0.0, -3.0], dtype=torch.float64)
    batch = replace(
        one,
        current=one.old + u,
        advantages=a,
        cu_seqlens=offsets,
        cu_runs=torch.tensor([0, 2, 4, 6, 10]),
        key=torch.zeros(5, dtype=torch.int64),
        masked=torch.zeros(5, dtype=torch.int64),
    )
    scene = Scene.of(batch, 0, 4, near=request.param and Near(request.param))
    yield View(scene, GSPO)
    scene.forget()


@pytest.mark.parametrize("measure", MEASURES, ids=["ratio", "clipped"])
def test_sums_and_ends_are_those_of_every_token(view, measure):
    each = Measure(f"{measure.name} of each", measure.of, measure.by)

    torch.testing.assert_close(view.total(measure), view.total(each), rtol=1e-14, atol=0)
    for mine, theirs in zip(view.ends(measure), view.ends(each), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=0)


def test_tokens_of_one_sign_decide_together(view):
    """Means of u of 0.08, −0.095, 0.015, and 0.0175 are beyond the bounds twice: up and down."""
    decided = update.decided(view)

    assert decided.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0]
    assert torch.equal(decided, view.count(update.DECIDES))


@pytest.mark.parametrize("preset", [GSPO, replace(GSPO, loss="ppo_clip")], ids=["gspo", "ppo"])
def test_only_under_gspo_do_tokens_share_a_ratio(view, preset):
    found = update.shared(replace(view, preset=preset))
    assert (found is not None) == (preset is GSPO)


@pytest.mark.parametrize(
    ("advantage", "passed"), [("any", [0.0, 2.0, 0.0, 0.0, 0.0]), ("negative", [1.0, 2.0, 0.0, 1.0, 3.0])]
)
def test_turns_that_a_filter_of_rolls_drops_are_counted(view, advantage, passed):
    """Means of Δ of 0.08, −0.095, 0.015, and 0.0175, all but one beyond the bound."""
    rule = Reject("ratio", "segment", upper=1.01, advantage=advantage)
    preset = Preset("p", "", "current", reject=(rule,))
    at = View(Scene.of(view.batch, 0, 4, near=Near.of([preset])), preset)
    assert roll._passed("ratio", "segment")(at).tolist() == passed


def test_turns_below_a_filter_of_rolls_are_dropped_as_well(view):
    rule = Reject("ratio", "segment", lower=0.95)
    at = View(view.scene, Preset("p", "", "current", reject=(rule,)))
    assert roll._passed("ratio", "segment")(at).tolist() == [2.0, 0.0, 0.0, 2.0, 4.0]


@pytest.mark.parametrize("apply", [True, False], ids=["applied", "only logged"])
@pytest.mark.parametrize("veto", [None, Veto(lower=0.95)], ids=["no veto", "veto"])
def test_what_one_bound_drops_is_logged_also_where_nothing_is_dropped(view, apply, veto):
    """Of the bound alone: a veto's sequences are not among them."""
    rule = Reject("ratio", upper=1.05)
    preset = Preset("p", "", "current", reject=(rule,), veto=veto, apply=apply)
    assert open_instruct._gone(View(view.scene, preset), (rule,)).tolist() == [2.0, 0.0, 0.0, 0.0, 2.0]
