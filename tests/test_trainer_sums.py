"""What is summed of near and far tokens for trainers' logged numbers is what all tokens together have."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offpol_diag.analysis.first_pass import Needs, read_ahead
from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.outcome import apply
from offpol_diag.engine.scene import Nearness, Scene, splits
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight, catalogue
from offpol_diag.trainers import LOGS, measures, view
from offpol_diag.trainers.view import View, columns, outermost
from tests import oracles
from tests.test_judged_apart import two_sequences
from tests.test_near import opened

ALL = catalogue.load().resolve("all")
BY_LOG = {logs: [preset for preset in ALL if preset.logs == logs] for logs in LOGS}


def row(*values):
    return torch.tensor(values, dtype=torch.float64)


# ---------------------------------------------------------------- near and far tokens


@pytest.fixture(scope="module", params=[0.0, 0.05], ids=["calm", "outliers"])
def dump(request, tmp_path_factory):
    rows = oracles.make_rows(0.03, seed=5, many=24, outliers=request.param)
    return opened(rows, tmp_path_factory.mktemp("sums"))


def tightened(of):
    """A rule or a weight with bounds much nearer to 1, or to 0 where they are no ratios; a cut stays."""
    if of.over == "batch":
        return of
    ratio = getattr(of, "statistic", "ratio") in ("ratio", "mult_prob_error")
    upper, lower = (None if x is None else (x**0.02 if ratio else x * 0.02) for x in (of.upper, of.lower))
    return replace(of, upper=upper, lower=lower)


def variants(preset):
    """The preset, and others that differ from it in one thing."""
    yield preset
    if preset.weight:
        yield replace(preset, weight=tightened(preset.weight))
        yield replace(preset, weight=replace(preset.weight, normalize=not preset.weight.normalize))
    if preset.reject:
        yield replace(preset, reject=tuple(map(tightened, preset.reject)))
    if preset.veto:
        yield replace(preset, veto=Veto(lower=0.97, upper=1.1))
    yield replace(preset, clip=Clip(0.01, 0.02, None))
    if not all(one.apply for one in BY_LOG[preset.logs]):
        yield replace(preset, apply=not preset.apply)


def varied(logs):
    found = [one for preset in BY_LOG[logs] for one in variants(preset)]
    return [replace(one, name=f"{at}") for at, one in enumerate(found)]


def made(dump, presets, near):
    """Sums per sequence, and extremes of all."""
    _, found, batch = dump
    scene = Scene.of(batch, 0, 4, found.fits, near)
    sums, ranges = columns(scene, presets)
    ends = {name: [*map(float, pair)] for name, pair in outermost(ranges).items()}
    scene.forget()
    return sums, ends


@pytest.mark.parametrize("block", [1 << 15, 40], ids=["whole", "blocks"])
@pytest.mark.parametrize("logs", LOGS)
def test_near_and_far_tokens_have_together_what_all_have(dump, logs, block, monkeypatch):
    monkeypatch.setattr(view, "BLOCK", block)
    presets = varied(logs)
    sums, ends = made(dump, presets, Nearness.of((*dump[0].presets, *presets)))
    want, all_ends = made(dump, presets, None)

    assert sums.keys() == want.keys()
    assert [
        name
        for name, x in want.items()
        if not torch.allclose(sums[name], x, rtol=1e-12, atol=1e-14, equal_nan=True)
    ] == []
    assert ends.keys() == all_ends.keys()
    for name, pair in all_ends.items():
        assert ends[name] == pytest.approx(pair, rel=1e-12, abs=1e-14), name


def test_what_is_only_logged_follows_its_bounds(dump):
    """A preset that is not applied did nothing, whatever it would have done."""
    presets = [
        Preset(
            str(upper), "", "old", weight=Weight("token", upper=upper, safety=None), apply=False, logs="trl"
        )
        for upper in (1.0001, 1.01)
    ]
    sums, _ = made(dump, presets, None)

    assert not torch.equal(sums["1.0001!ratio"], sums["1.01!ratio"])


def test_tokens_that_m2po_drops_are_no_valid_ones_of_which_a_weight_is_changed(dump):
    """Whatever else drops them too."""
    m2po = next(rules for one in BY_LOG["areal"] if (rules := [r for r in one.reject if r.over == "batch"]))
    tight, weight = Reject("ratio", upper=1.0001, lower=0.9999), Weight("token", upper=1.2)
    presets = [
        Preset(str(len(rules)), "", "old", weight=weight, reject=(*rules, tight), logs="areal")
        for rules in (m2po, ())
    ]
    sums, _ = made(dump, presets, None)

    assert torch.equal(sums["0!valid"] - sums["1!valid"], sums["0!changed"] - sums["1!changed"])


def test_what_a_row_needs_is_what_a_batch_may_lack():
    rows = [one for log in LOGS.values() for entry in log.entries for one in entry.value.columns]
    optional = {"old", "current", "advantages", "rewards", "entropy"}
    assert {name for one in rows for name in one.needs} <= optional


@pytest.mark.parametrize("logs", LOGS)
def test_no_two_columns_of_a_trainer_have_one_name(logs):
    """Else one would stand for the other."""
    entries = [*LOGS[logs].entries, *(e for preset in BY_LOG[logs] for e in LOGS[logs].entries_of(preset))]
    columns = {one: (type(one), one.name, one.shared) for entry in entries for one in entry.value.columns}
    of = {}
    for one, key in columns.items():
        of.setdefault(key, set()).add(getattr(one.of, "__qualname__", one.of))
    assert {key: names for key, names in of.items() if len(names) > 1} == {}


# ---------------------------------------------------------------- what all tokens of a sequence share

GSPO = Preset("p", "", "old", loss="gspo", clip=Clip(0.02, 0.03, None))


@pytest.fixture(params=[None, 0.09], ids=["whole", "apart"])
def few(request):
    """Sequences of u up, down, next to none and mixed, A of both signs and 0; one has no token."""
    one = two_sequences([0.0] * 10)
    u = row(0.1, 0.06, -0.2, 0.01, 0.01, 0.02, 0.3, -0.3, 0.02, 0.05)
    batch = replace(
        one,
        current=one.old + u,
        advantages=row(1.0, -1.0, -2.0, -1.0, 1.0, -1.0, 0.0, 3.0, 0.0, -3.0),
        cu_seqlens=torch.tensor([0, 2, 4, 4, 6, 10]),
        cu_runs=torch.tensor([0, 2, 4, 6, 10]),
        key=torch.zeros(5, dtype=torch.int64),
        masked=torch.zeros(5, dtype=torch.int64),
    )
    scene = Scene.of(batch, 0, 4, near=request.param and Nearness(request.param))
    yield scene
    scene.forget()


@pytest.mark.parametrize("measure", [measures.U, measures.UPDATE_RATIO], ids=lambda measure: measure.name)
def test_under_gspo_sums_and_ends_are_those_of_every_token(few, measure):
    pooled, alone = View(few, GSPO), View(few, replace(GSPO, loss="ppo_clip"))
    u = segments.mean(alone.batch.current - alone.batch.old, alone.batch.cu_seqlens)
    each = u if measure is measures.U else u.exp()

    torch.testing.assert_close(pooled.total(measure), each * pooled.n, rtol=1e-14, atol=0)
    low, high = pooled.ends(measure)
    torch.testing.assert_close(low[pooled.nonempty], each[pooled.nonempty], rtol=1e-14, atol=0)
    assert high.isneginf().tolist() == (~pooled.nonempty).tolist()
    assert alone.pooled_ratio is None


def test_tokens_of_one_sign_decide_together(few):
    """Means of u of 0.08, −0.095, 0.015, and 0.0175 are beyond the bounds twice: up and down."""
    assert measures.clip_decides(View(few, GSPO)).tolist() == [1.0, 2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("rule", "dropped"),
    [
        (Reject("ratio", "segment", upper=1.01), [2.0, 0.0, 0.0, 2.0, 4.0]),
        (Reject("ratio", "segment", upper=1.01, advantage="negative"), [1.0, 0.0, 0.0, 1.0, 1.0]),
        (Reject("ratio", "segment", lower=0.95), [0.0, 2.0, 0.0, 0.0, 0.0]),
        # the clamp decides: −0.095 becomes −0.05, above log 0.94; 0.08 becomes 0.05, below log 1.07
        (Reject("ratio", "segment", lower=0.94, upper=1.01, safety=0.05), [2.0, 0.0, 0.0, 2.0, 4.0]),
        (Reject("ratio", "segment", lower=0.96, upper=1.07, safety=0.05), [0.0, 2.0, 0.0, 0.0, 0.0]),
        (Reject("ratio", upper=1.05), [2.0, 0.0, 0.0, 0.0, 2.0]),
        (Reject("ratio", "mean", upper=1.05), [2.0, 0.0, 0.0, 0.0, 0.0]),
    ],
    ids=str,
)
@pytest.mark.parametrize("apply", [True, False], ids=["applied", "only logged"])
def test_what_a_rule_drops_is_counted_also_where_nothing_is_dropped(few, rule, dropped, apply):
    """Means of Δ of 0.08, −0.095, 0.015, and 0.0175. Of the rule alone: without a veto."""
    preset = Preset("p", "", "current", reject=(rule,), veto=Veto(lower=0.95), apply=apply)
    at = View(Scene.of(few.batch, 0, 4, near=few.near and Nearness.of([preset])), preset)

    assert at.dropped_by(rule).tolist() == dropped


def test_ends_keep_their_names_and_are_infinite_where_nothing_is():
    nothing = torch.empty(0, dtype=torch.float64)
    found = outermost(
        {
            "rows": (row(3, 1, 2), row(4, 7, 5)),
            "bad": (row(1, float("nan"), 2),) * 2,
        }
    )

    assert [*found] == ["rows", "bad"]
    assert [*map(float, found["rows"])] == [1.0, 7.0]
    assert [*map(float, outermost({"nothing": (nothing, nothing)})["nothing"])] == [
        float("inf"),
        float("-inf"),
    ]
    assert all(end.isnan() for end in found["bad"])


# ---------------------------------------------------------------- what it costs

T, S = 6000, 12


class OneBatch:
    """An engine, and its dump of one batch."""

    def __init__(self, batch):
        self.batch = batch

    def only(self, *columns):
        return self

    def reduce(self, dump, job, each=None):
        return job(self.batch)


@pytest.fixture(scope="module")
def batch():
    draw = torch.Generator().manual_seed(4)
    rollout = -torch.rand(T, generator=draw, dtype=torch.float64)
    near, far = (scale * torch.randn(T, generator=draw, dtype=torch.float64) for scale in (0.01, 1.5))
    old = rollout + torch.where(torch.rand(T, generator=draw) < 0.01, far, near)
    current = old + 0.005 * torch.randn(T, generator=draw, dtype=torch.float64)
    starts = torch.linspace(0, T, S + 1).to(torch.int64)
    return Batch(
        rollout=rollout,
        cu_seqlens=starts,
        cu_runs=starts,
        position=torch.arange(T),
        key=torch.arange(S) // 2,
        masked=torch.zeros(S, dtype=torch.int64),
        old=old,
        current=current,
        advantages=torch.randn(S, generator=draw, dtype=torch.float64).repeat_interleave(starts.diff()),
        rewards=torch.ones(S, dtype=torch.float64),
    )


class Seen(TorchDispatchMode):
    """Counts operations on nearly as many values as there are tokens."""

    VIEWS = ("detach", "slice", "expand", "select", "alias", "lift_fresh")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.")
        found = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, found) if isinstance(x, torch.Tensor)]
        large = max((x.numel() for x in tensors), default=0) > T // 2
        self.count += large and not name.startswith(self.VIEWS)
        return found


def scened(batch, presets):
    one = OneBatch(batch)
    fits = read_ahead(one, one, Needs.of(presets, False)).fits
    scene = Scene.of(batch, 0, 2, fits, Nearness.of(presets))
    scene.use_split()
    for preset in presets:  # what the engine makes of a preset is there already
        apply(scene, preset)
    return scene


def wider(of):
    """The same with its bounds farther out; a cut through a batch stays: it was found before."""
    if of is None or getattr(of, "over", "") == "batch":
        return of
    ratio = getattr(of, "statistic", "ratio") in ("ratio", "mult_prob_error")

    def out(bound):
        return None if bound is None else bound / 1.25 if ratio and bound < 1 else bound * 1.25

    return replace(of, upper=out(of.upper), lower=out(of.lower))


def retuned(preset):
    rules = tuple(map(wider, preset.reject))
    name = f"{preset.name}_wider"
    return replace(preset, name=name, weight=wider(preset.weight), veto=wider(preset.veto), reject=rules)


def looks_at_all(preset):
    """Rules that are judged for all tokens at once, whatever is near."""
    turns = any(rule.over == "segment" or (rule.on_tokens and rule.over != "token") for rule in preset.reject)
    return turns or any(rule.statistic == "binary_kl" or rule.among == "left" for rule in preset.reject)


@pytest.mark.parametrize("logs", LOGS)
def test_further_presets_with_other_thresholds_look_at_no_array_of_all_tokens_again(logs, batch):
    presets = BY_LOG[logs]
    further = [retuned(preset) for preset in presets]
    scene = scened(batch, [*presets, *further])
    with Seen() as first:
        columns(scene, presets)
    added = {}
    for preset in further:
        with Seen() as seen:
            columns(scene, [preset])
        added[preset.name] = seen.count
    split = [preset for preset in further if splits(preset, scene.near.radius)]

    assert 0 < first.count <= 150
    assert {one.name for one in split if added[one.name] and not looks_at_all(one)} == set()
