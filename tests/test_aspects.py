"""A preset taken apart: aspects differ where definitions do, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.presets.aspects import ASPECTS, aspects
from offpol_diag.presets.catalogue import load

BASE = Preset(
    "base",
    "",
    weight=Weight(over="token", action="mask", lower=0.5, upper=2.0),
    reject=(Reject(over="sum", lower=0.5, upper=2.0, safety=20.0),),
    veto=Veto(lower=1e-4),
)
WEIGHT, RULE = BASE.weight, BASE.reject[0]


@pytest.mark.parametrize(
    ("changed", "aspect"),
    [
        ({"policy": "current"}, "numerator"),
        ({"reject": (replace(RULE, policy="current"),)}, "numerator"),
        ({"weight": replace(WEIGHT, action="truncate")}, "weight"),
        ({"reject": (replace(RULE, statistic="k3"),)}, "statistic"),
        ({"reject": (replace(RULE, over="mean"),)}, "over what"),
        ({"weight": replace(WEIGHT, lower=0.25)}, "lower bound"),
        ({"reject": (replace(RULE, upper=3.0),)}, "upper bound"),
        ({"reject": (replace(RULE, advantage="negative"),)}, "sign of the advantage"),
        ({"veto": Veto(lower=1e-3)}, "veto"),
        ({"denominator": "all"}, "rejected tokens"),
        ({"weight": replace(WEIGHT, normalize=True)}, "normalisation"),
        ({"weight": replace(WEIGHT, safety=None)}, "clamp on the log-ratio"),
        ({"reject": (replace(RULE, safety_at="token"),)}, "clamp on the log-ratio"),
        ({"weight": replace(WEIGHT, overflow="zero")}, "overflow"),
        ({"weight": replace(WEIGHT, strict=True)}, "strict bounds"),
        ({"reject": (replace(RULE, among="left"),)}, "tokens aggregated"),
        ({"loss": "reinforce", "clip": Clip()}, "loss"),
        ({"clip": Clip(high=0.28)}, "clip of the loss"),
        ({"apply": False}, "application"),
    ],
)
def test_a_changed_definition_changes_its_own_aspect(changed: dict[str, object], aspect: str) -> None:
    before, after = aspects(BASE), aspects(replace(BASE, **changed))

    assert aspect in {name for name in ASPECTS if before[name] != after[name]}


@pytest.mark.parametrize("changed", [{"name": "x"}, {"summary": "x"}, {"source": "x"}, {"note": "x"}])
def test_what_is_only_said_of_a_preset_changes_no_aspect(changed: dict[str, str]) -> None:
    assert aspects(replace(BASE, **changed)) == aspects(BASE)


def test_every_preset_of_the_catalogue_has_every_aspect_in_words() -> None:
    for preset in load(None).values():
        said = aspects(preset)
        assert list(said) == list(ASPECTS)
        assert all(said.values()), preset.name
