"""Check trainers' logged sums: blocks of sequences against all of them, and what rules drop."""

from dataclasses import replace

import numpy as np
import pytest

from offpol_diag.engine.scene import Scene
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight, catalogue
from offpol_diag.trainers import LOGS, view
from offpol_diag.trainers.view import View, columns, outermost
from tests import oracles
from tests.whole import effect, opened

ALL = catalogue.load().resolve("all")
BY_LOG = {logs: [preset for preset in ALL if preset.logs == logs] for logs in LOGS}


# ---------------------------------------------------------------- sums


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


def made(dump, presets):
    """Return sums per sequence, and extremes of all."""
    _, found, batch = dump
    scene = Scene.of(batch, 0, 4, found.fits)
    sums, ranges = columns(scene, presets)
    ends = {name: [*map(float, pair)] for name, pair in outermost(ranges).items()}
    scene.forget()
    return sums, ends


@pytest.mark.parametrize("logs", LOGS)
def test_blocks_have_together_what_all_tokens_have(dump, logs, monkeypatch):
    """Also of presets that differ from those that ship."""
    varied = [one for preset in BY_LOG[logs] for one in variants(preset)]
    presets = [replace(one, name=f"{at}") for at, one in enumerate(varied)]
    want, all_ends = made(dump, presets)
    monkeypatch.setattr(view, "BLOCK", 40)
    sums, ends = made(dump, presets)

    assert sums.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_allclose(sums[name], x, rtol=1e-12, atol=1e-14, err_msg=name)
    assert ends.keys() == all_ends.keys()
    for name, pair in all_ends.items():
        assert ends[name] == pytest.approx(pair, rel=1e-12, abs=1e-14), name


def test_logged_only_rules_follow_their_bounds(dump):
    """A preset that is not applied did nothing, whatever it would have done."""
    weights = (Weight("token", upper=upper, safety=None) for upper in (1.0001, 1.01))
    presets = [Preset(f"{w.upper}", "", "old", weight=w, apply=False, logs="trl") for w in weights]
    sums, _ = made(dump, presets)

    assert not np.array_equal(sums["1.0001!ratio"], sums["1.01!ratio"])


def test_tokens_that_m2po_drops_are_no_valid_ones_of_which_a_weight_is_changed(dump):
    """Whatever else drops them too."""
    m2po = next(rules for one in BY_LOG["areal"] if (rules := [r for r in one.reject if r.over == "batch"]))
    tight, weight = Reject("ratio", upper=1.0001, lower=0.9999), Weight("token", upper=1.2)
    presets = [
        Preset(str(len(rules)), "", "old", weight=weight, reject=(*rules, tight), logs="areal")
        for rules in (m2po, ())
    ]
    sums, _ = made(dump, presets)

    assert np.array_equal(sums["0!valid"] - sums["1!valid"], sums["0!changed"] - sums["1!changed"])


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
    preset = Preset("p", "", "current", reject=(rule,))
    dropped = []
    for apply_ in (True, False):
        scene = Scene.of(dump[2], 0, 4)
        one = replace(preset, apply=apply_, veto=None if apply_ else Veto(lower=0.95))
        dropped.append(View(scene, one).dropped_by(rule))
        if apply_:
            kept = effect(scene, preset).kept_tokens
        scene.forget()
    assert np.array_equal(dropped[0], scene.counts["tokens"] - kept)
    assert np.array_equal(dropped[1], dropped[0])


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
    found = outermost({name: tuple(map(np.array, pair)) for name, pair in ends.items()})

    assert [*map(float, found["rows"])] == [1.0, 7.0]
    assert all(np.isnan(end) for end in found["bad"])
    nothing = outermost({"nothing": (np.empty(0), np.empty(0))})["nothing"]
    assert [*map(float, nothing)] == [float("inf"), float("-inf")]
