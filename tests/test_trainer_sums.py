"""Check trainers' logged sums over near and far tokens against those over all tokens together."""

from dataclasses import replace

import pytest
import torch

from offpol_diag.engine import moments
from offpol_diag.engine.outcome import apply
from offpol_diag.engine.scene import Nearness, Scene, splits
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight, catalogue
from offpol_diag.trainers import LOGS
from offpol_diag.trainers.view import View, columns, outermost
from tests import oracles
from tests.test_near import Large, opened

ALL = catalogue.load().resolve("all")
BY_LOG = {logs: [preset for preset in ALL if preset.logs == logs] for logs in LOGS}


# ---------------------------------------------------------------- near and far tokens


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    rows = oracles.make_rows(0.03, seed=5, many=24, outliers=0.05)
    return opened(rows, tmp_path_factory.mktemp("sums"))


def tightened(of):
    """Tighten a rule or a weight: bounds nearer to 1, or to 0 where they are no ratios; a cut stays."""
    if of.over == "batch":
        return of
    ratio = getattr(of, "statistic", "ratio") in ("ratio", "mult_prob_error")
    upper, lower = (None if x is None else (x**0.02 if ratio else x * 0.02) for x in (of.upper, of.lower))
    return replace(of, upper=upper, lower=lower)


def variants(preset):
    """Yield the preset, and others that differ from it in one thing."""
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


def made(dump, presets, near):
    """Return sums per sequence, and extremes of all."""
    _, found, batch = dump
    scene = Scene.of(batch, 0, 4, found.fits, near)
    sums, ranges = columns(scene, presets)
    ends = {name: [*map(float, pair)] for name, pair in outermost(ranges).items()}
    scene.forget()
    return sums, ends


@pytest.mark.parametrize("logs", LOGS)
def test_near_and_far_tokens_have_together_what_all_have(dump, logs, monkeypatch):
    """Also of presets that differ from those that ship; `test_near` has these. In blocks of 40 tokens."""
    monkeypatch.setattr(moments, "BLOCK", 40)
    varied = [one for preset in BY_LOG[logs] for one in variants(preset)]
    presets = [replace(one, name=f"{at}") for at, one in enumerate(varied)]
    sums, ends = made(dump, presets, Nearness.of((*dump[0].presets, *presets)))
    want, all_ends = made(dump, presets, None)

    assert sums.keys() == want.keys()
    for name, x in want.items():
        torch.testing.assert_close(sums[name], x, rtol=1e-12, atol=1e-14, equal_nan=True, msg=name)
    assert ends.keys() == all_ends.keys()
    for name, pair in all_ends.items():
        assert ends[name] == pytest.approx(pair, rel=1e-12, abs=1e-14), name


def test_logged_only_rules_follow_their_bounds(dump):
    """A preset that is not applied did nothing, whatever it would have done."""
    weights = (Weight("token", upper=upper, safety=None) for upper in (1.0001, 1.01))
    presets = [Preset(f"{w.upper}", "", "old", weight=w, apply=False, logs="trl") for w in weights]
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


@pytest.mark.parametrize(
    "rule",
    [
        Reject("ratio", "segment", upper=1.01),
        Reject("ratio", "segment", lower=0.97, advantage="negative"),
        Reject("ratio", "segment", lower=0.94, upper=1.01, safety=0.05),
        Reject("ratio", upper=1.05),
        Reject("ratio", "mean", upper=1.01),
    ],
    ids=str,
)
def test_drops_of_a_rule_are_counted_also_where_it_is_not_applied(dump, rule):
    """Of the rule alone, and of near tokens as of all."""
    preset = Preset("p", "", "current", reject=(rule,))
    dropped = []
    for apply_, near in ((True, None), (False, None), (False, Nearness.of([preset]))):
        scene = Scene.of(dump[2], 0, 4, near=near)
        one = replace(preset, apply=apply_, veto=None if apply_ else Veto(lower=0.95))
        dropped.append(View(scene, one).dropped_by(rule))
        if apply_:
            kept = apply(scene, preset).kept_tokens
        scene.forget()
    assert torch.equal(dropped[0], scene.counts["tokens"] - kept)
    assert torch.equal(dropped[1], dropped[0])
    assert torch.equal(dropped[2], dropped[0])


# ---------------------------------------------------------------- columns


@pytest.mark.parametrize("logs", LOGS)
def test_no_two_columns_of_a_trainer_have_one_name(logs):
    """Else one would stand for the other."""
    entries = [*LOGS[logs].entries, *(e for preset in BY_LOG[logs] for e in LOGS[logs].entries_of(preset))]
    columns = {one: (type(one), one.name, one.shared) for entry in entries for one in entry.value.columns}
    of = {}
    for one, key in columns.items():
        of.setdefault(key, set()).add(getattr(one.of, "__qualname__", one.of))
    assert {key: names for key, names in of.items() if len(names) > 1} == {}
    optional = {"old", "current", "advantages", "rewards", "entropy"}
    assert {name for one in columns for name in one.needs} <= optional


def test_ends_keep_their_names_and_are_infinite_where_nothing_is():
    ends = {"rows": ([3.0, 1], [4.0, 7]), "bad": ([1, float("nan")],) * 2}
    found = outermost({name: tuple(map(torch.tensor, pair)) for name, pair in ends.items()})

    assert [*map(float, found["rows"])] == [1.0, 7.0]
    assert all(end.isnan() for end in found["bad"])
    nothing = outermost({"nothing": (torch.empty(0), torch.empty(0))})["nothing"]
    assert [*map(float, nothing)] == [float("inf"), float("-inf")]


# ---------------------------------------------------------------- what it costs


def wider(of):
    """Widen the bounds; a cut through a batch stays: it was found before."""
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
    """Return whether rules are judged for all tokens at once, whatever is near."""
    turns = any(rule.over == "segment" or (rule.on_tokens and rule.over != "token") for rule in preset.reject)
    return turns or any(rule.statistic == "binary_kl" or rule.among == "left" for rule in preset.reject)


@pytest.mark.parametrize("logs", LOGS)
def test_further_presets_with_other_thresholds_look_at_no_array_of_all_tokens_again(logs, tmp_path):
    presets = BY_LOG[logs]
    further = [retuned(preset) for preset in presets]
    study, found, batch = opened(oracles.make_rows(0.01, seed=4, many=200), tmp_path, [*presets, *further])
    scene = Scene.of(batch, 0, 2, found.fits, study.near)
    scene.use_split()
    for preset in (*presets, *further):  # what the engine makes of a preset is there already
        apply(scene, preset)
    counts = []
    for some in (presets, *([one] for one in further)):
        with Large(9 * batch.tokens // 10) as large:
            columns(scene, some)
        counts.append(large.count)
    added = dict(zip(further, counts[1:], strict=True))
    split = [preset for preset in further if splits(preset, scene.near.radius)]

    assert 0 < counts[0] <= 150
    assert {one.name for one in split if added[one] and not looks_at_all(one)} == set()
