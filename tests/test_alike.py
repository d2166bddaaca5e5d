"""Presets that did the same to a batch are summed once; nothing that tells two apart is overlooked."""

import math
from dataclasses import replace

import pytest
import torch

from offpol_diag import catalogue, segments
from offpol_diag.batch import Batch
from offpol_diag.metrics import alike, method, nearsums, policyloss, residual, selection, update
from offpol_diag.metrics.alike import Marks
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.stack import Stack
from offpol_diag.near import Near
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.sheet import Sheet
from tests import oracles
from tests.test_near import opened

ALL = catalogue.load().resolve("all")
PARTS = (method, residual, policyloss, update)


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Mostly near on-policy, with a few tokens far off."""
    rows = oracles.make_rows(0.03, seed=5, many=40, outliers=0.02)
    return opened(rows, tmp_path_factory.mktemp("alike"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Near on-policy."""
    return opened(oracles.make_rows(0.03, seed=5, many=40, outliers=0.0), tmp_path_factory.mktemp("calm"))


@pytest.fixture
def scene(dump):
    study, found, batch = dump
    one = Scene.of(batch, 0, 16, found.settled, study.near)
    yield one
    one.forget()


def columns(stack):
    sheet = Sheet.joined(*(part.columns(stack) for part in PARTS))
    return dict(zip(sheet.names, sheet.values, strict=True))


def same(one, two):
    assert one.keys() == two.keys()
    assert [
        name for name in one if not torch.equal(one[name].nan_to_num(7.0), two[name].nan_to_num(7.0))
    ] == []


def test_every_preset_has_the_columns_it_would_have_alone(scene, dump):
    stack = Stack.of(scene, dump[0].presets)

    assert len(stack.few.presets) < len(stack.presets)
    same(columns(stack), columns(stack.few))
    assert method.ranges(stack) == method.ranges(stack.few)
    assert torch.equal(selection.by_length(stack).values, selection.by_length(stack.few).values)
    assert torch.equal(selection.by_group(stack).values, selection.by_group(stack.few).values)


def alone(dump, presets):
    """The columns of each preset by itself, and the ends of its weights."""
    study, found, batch = dump
    made, spans = {}, {}
    for preset in presets:
        one = Scene.of(batch, 0, 16, found.settled, study.near)
        stack = Stack.of(one, (preset,))
        made |= columns(stack)
        spans |= method.ranges(stack)
        one.forget()
    return made, spans


def close(one, two):
    """Up to how sums are rounded: presets share those of others that weigh or drop as they do."""
    assert one.keys() == two.keys()
    assert [
        name for name, x in one.items() if not torch.allclose(x, two[name], rtol=1e-12, equal_nan=True)
    ] == []


def test_presets_that_share_a_row_of_a_column_have_what_each_has_alone(scene, dump):
    study, _, _ = dump
    pairs = (preset for pair in PAIRS.values() for preset in pair)
    named = enumerate((*study.presets, BASE, *APART.values(), *pairs))
    presets = [replace(preset, name=str(at)) for at, preset in named]
    stack = Stack.of(scene, presets)
    made, spans = alone(dump, presets)

    close(columns(stack), made)
    assert method.ranges(stack) == spans
    assert method.columns(stack).height < 0.6 * len(method.columns(stack).names)


def test_a_part_of_the_presets_keeps_its_names_and_rows(scene, dump):
    stack = Stack.of(scene, dump[0].presets)
    some = [preset.name for preset in stack.few.presets if preset.policy == "old"]
    one, two = (each.only(lambda preset: preset.policy == "old") for each in (stack, stack.few))

    assert len(two.presets) == len(some)
    assert [name for name, _ in one.users] == [name for name, _ in two.users]
    same(columns(one), columns(two))


BASE = Preset(
    "base",
    "",
    "old",
    weight=Weight("token", upper=1.5, lower=0.5),
    reject=(Reject("ratio", "token", upper=1.4, lower=0.6),),
    veto=Veto(lower=0.2),
    clip=Clip(0.2, 0.2),
)
APART = {
    "numerator": replace(BASE, policy="current"),
    "loss": replace(BASE, loss="reinforce"),
    "clip": replace(BASE, clip=Clip(1e-4, 1e-4)),
    "no weight": replace(BASE, weight=None),
    "weight": replace(BASE, weight=Weight("token", upper=1.1, lower=0.5)),
    "action": replace(BASE, weight=Weight("token", action="mask", upper=1.5, lower=0.5)),
    "weight of sequences": replace(BASE, weight=Weight("mean", upper=1.5, lower=0.5)),
    "of another mean": replace(BASE, weight=Weight("sum", upper=1.5, lower=0.5)),
    "safety": replace(BASE, weight=Weight("token", upper=1.5, lower=0.5, safety=0.6)),
    "rule": replace(BASE, reject=(Reject("ratio", "token", upper=1.05, lower=0.6),)),
    "rule on sequences": replace(BASE, reject=(*BASE.reject, Reject("ratio", "mean", upper=1.001))),
    "veto": replace(BASE, veto=Veto(upper=1.5)),
    "normalised": replace(BASE, weight=Weight("token", upper=1.5, lower=0.5, normalize=True)),
    "not applied": replace(BASE, apply=False),
    "a rule on turns": replace(BASE, reject=(Reject("ratio", "segment", upper=1.001),)),
}


@pytest.mark.parametrize("how", APART)
def test_what_tells_two_presets_apart_is_seen(scene, how):
    other = replace(APART[how], name="other")
    stack = Stack.of(scene, (BASE, other))

    assert len(stack.few.presets) == 2
    same(columns(stack), columns(stack.few))


NONE = Weight("token", action="none", upper=1.5, lower=0.5)
PAIRS = {
    "numerators of no weight": (Preset("x", "", "current"), Preset("y", "", "rollout")),
    "how many are above": [
        Preset(name, "", "old", weight=replace(NONE, upper=upper))
        for name, upper in (("x", 1.5), ("y", 1e12))
    ],
    "how many are below": [
        Preset(name, "", "old", weight=replace(NONE, lower=lower))
        for name, lower in (("x", 0.5), ("y", 1e-12))
    ],
    "of how many weights": [
        Preset(name, "", "old", weight=Weight("mean", upper=1.5, safety=1e3, safety_at=at))
        for name, at in (("x", "token"), ("y", "aggregate"))
    ],
    "whether weights multiply the loss": [
        Preset(loss, "", "current", weight=Weight("sum", upper=1.5), loss=loss)
        for loss in ("ppo_clip", "reinforce")
    ],
    "the safety of a rule": [
        Preset(name, "", "old", reject=(Reject("ratio", "sum", upper=1.05, safety=safety),))
        for name, safety in (("x", 0.01), ("y", 20.0))
    ],
    "cells": [
        Preset(
            name,
            "",
            "old",
            reject=(Reject("tv", "mean", upper=upper, advantage="positive", advantage_of="token"),),
        )
        for name, upper in (("x", 0.002), ("y", 0.012))
    ],
}


@pytest.mark.parametrize("how", PAIRS)
def test_pairs_that_differ_in_one_thing_are_told_apart(scene, how):
    stack = Stack.of(scene, PAIRS[how])

    assert len(stack.few.presets) == 2
    same(columns(stack), columns(stack.few))


def test_cells_of_near_tokens_are_told_apart_where_far_ones_are_not(calm):
    _, found, batch = calm
    rules = [
        Reject("ratio", "mean", upper=upper, advantage="positive", advantage_of="token")
        for upper in (1.0, 1.003)
    ]
    presets = [Preset(str(at), "", "old", reject=(rule,)) for at, rule in enumerate(rules)]
    stack = Stack.of(Scene.of(batch, 0, 16, found.settled, Near(0.5, celled=tuple(presets))), presets)

    assert len(stack.few.presets) == 2
    assert not torch.equal(*stack.kept_tokens)
    same(columns(stack), columns(stack.few))


def plain(drift, turns):
    """A sequence of tokens with these Δ, and where its turns start."""
    d = torch.tensor(drift, dtype=torch.float64)
    starts = torch.tensor([0, len(d)])
    return Batch(
        rollout=torch.full_like(d, -5.0),
        old=d - 5.0,
        cu_seqlens=starts,
        cu_runs=torch.tensor(turns),
        position=torch.arange(len(d)),
        key=torch.zeros(1, dtype=torch.int64),
        masked=torch.zeros(1, dtype=torch.int64),
    )


def test_a_weight_of_the_only_far_token_is_not_that_of_its_sequence():
    weights = [Weight(over, upper=2.0) for over in ("token", "sum")]
    presets = [Preset(weight.over, "", "old", weight=weight) for weight in weights]
    scene = Scene.of(plain([0.0, 0.0, 1.0], [0, 3]), 0, 16, near=Near(0.5))
    stack = Stack.of(scene, presets)

    assert len(stack.few.presets) == 2
    assert stack.few.sums["first"].all.tolist() == [[4.0], [6.0]]


def test_tokens_beyond_two_vetoes_that_drop_the_same_are_counted_apart():
    presets = [Preset(str(edge), "", "old", veto=Veto(upper=math.exp(edge))) for edge in (0.5, 1.5)]
    sheet = method.columns(Stack.of(Scene.of(plain([1.0, 2.0, 0.0], [0, 3]), 0, 16), presets))
    found = dict(zip(sheet.names, sheet.values.tolist(), strict=True))

    assert found["0.5|vetoed"] == found["1.5|vetoed"] == [1.0]
    assert (found["0.5|catastrophic"], found["1.5|catastrophic"]) == ([2.0], [1.0])


def test_a_mean_weight_of_tokens_is_not_one_of_sequences():
    weights = [Weight(over, upper=2.0, normalize=True) for over in ("token", "segment")]
    presets = [Preset(weight.over, "", "old", weight=weight) for weight in weights]
    stack = Stack.of(Scene.of(plain([0.1, 0.2, 1.0], [0, 1, 2, 3]), 0, 16), presets).few
    sheet = method.columns(stack)
    found = dict(zip(sheet.names, sheet.values.tolist(), strict=True))

    assert found["token|norm_units"] == [3.0]
    assert found["segment|norm_units"] == [1.0]


def idle(at):
    """A preset whose bounds are so wide that no token comes near."""
    bound = float(10 ** (3 + at))
    return Preset(f"idle {at}", "", "old", weight=Weight("token", upper=bound), veto=Veto(lower=1 / bound**2))


def test_presets_that_act_on_nothing_are_alike_whatever_their_bounds(calm):
    study, found, batch = calm
    stack = Stack.of(Scene.of(batch, 0, 16, found.settled, study.near), [idle(at) for at in range(20)])

    assert len(stack.few.presets) == 1
    assert [name for name, _ in stack.few.users] == [f"idle {at}" for at in range(20)]


def test_a_further_preset_that_does_the_same_costs_no_sum_over_tokens(calm, monkeypatch):
    study, found, batch = calm
    calls = []
    for name in ("total", "largest", "smallest", "count"):
        of = getattr(segments, name)
        monkeypatch.setattr(segments, name, lambda *args, of=of: calls.append(1) or of(*args))

    def counted(many):
        scene = Scene.of(batch, 0, 16, found.settled, study.near)
        stack = Stack.of(scene, [idle(at) for at in range(many)]).few
        calls.clear()
        columns(stack)
        scene.forget()
        return len(calls)

    assert counted(2) == counted(30) > 0


def test_on_a_gpu_presets_are_alike_that_share_what_was_made(scene, monkeypatch):
    monkeypatch.setattr(alike, "here", lambda x: False)
    twin = replace(idle(0), name="twin", denominator="all")
    stack = Stack.of(scene, (idle(0), idle(1), twin))

    assert stack.few.users == (("idle 0", 0), ("idle 1", 1), ("twin", 0))
    same(columns(stack), columns(stack.few))


def test_rows_of_a_later_block_lie_where_those_of_the_first_do(dump, monkeypatch):
    study, found, batch = dump
    monkeypatch.setattr(nearsums, "BLOCK", 40)
    from offpol_diag import tally

    scenes = [Scene.of(batch, 0, 16, found.settled, None) for _ in range(2)]
    stack, few = (Stack.of(scene, study.presets) for scene in scenes)
    one, two = tally._by_block(stack), tally._by_block(few.few)
    same(*(dict(zip(sheet.names, sheet.values, strict=True)) for sheet in (one, two)))


def test_equal_numbers_have_one_mark_and_flags_that_are_all_set_are_none():
    marks, x = Marks(), torch.tensor([1.0, float("nan")])

    assert marks.of(x) == marks.of(x.clone()) != marks.of(torch.tensor([1.0, 2.0]))
    assert marks.of_mask(torch.tensor([True, True])) is marks.of_mask(None) is None
    assert marks.of_mask(torch.tensor([True, False])) is not None
