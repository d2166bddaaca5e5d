"""Policy losses against the textbook: their values, clips and denominators."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest

from offpol_diag.presets import Clip, Loss, Preset, Reject, Veto, Weight
from tests import oracles
from tests.reading import analyze

TIGHT = Clip(0.1, 0.15, 1.3)  # so that every branch is taken often
TOKEN, SEQUENCE, RAW = Weight("token", upper=1.4), Weight("sum", upper=2.0), Weight("token", "none")
BAND, GEOMETRIC = Reject("ratio", "token", 0.6, 1.7), Reject("ratio", "mean", 0.8, 1.25)


def preset(name, loss, **given):
    return Preset(name, "", loss=loss, **{"clip": TIGHT, **given})


CASES = (
    preset("ppo", "ppo_clip"),
    preset("ppo_usual_clip", "ppo_clip", clip=Clip()),
    preset("ppo_token_weight", "ppo_clip", weight=TOKEN, reject=(BAND,)),
    preset("ppo_sequence_weight", "ppo_clip", weight=SEQUENCE, reject=(GEOMETRIC,)),
    preset("ppo_no_dual", "ppo_clip", clip=Clip(0.1, 0.15, None), weight=TOKEN),
    preset("ppo_no_clip", "ppo_clip", clip=Clip(None, None, None), weight=TOKEN),
    preset("ppo_low_only", "ppo_clip", clip=Clip(0.1, None, None)),
    preset("ppo_high_only", "ppo_clip", clip=Clip(None, 0.1, None)),
    preset("ppo_dual_only", "ppo_clip", clip=Clip(None, None, 1.2)),
    preset("bypass", "ppo_clip", policy="current", weight=TOKEN, reject=(BAND, GEOMETRIC)),
    preset("bypass_normed", "ppo_clip", policy="current", weight=replace(TOKEN, normalize=True)),
    preset("reinforce_token", "reinforce", policy="current", weight=TOKEN, reject=(GEOMETRIC,)),
    preset("reinforce_sequence", "reinforce", policy="current", weight=SEQUENCE, reject=(BAND,)),
    preset("reinforce_old", "reinforce", weight=RAW),
    preset("surrogate", "surrogate", policy="current", weight=RAW, reject=(BAND,)),
    preset("gspo", "gspo"),
    preset("gspo_weighted", "gspo", weight=SEQUENCE, reject=(GEOMETRIC,)),
    preset("gspo_of_tokens", "gspo", weight=TOKEN, reject=(BAND,)),
    preset("gspo_no_clip", "gspo", clip=Clip(None, None, None)),
    preset("gspo_bypass", "gspo", policy="current", weight=TOKEN),
    preset("cispo", "cispo", clip=Clip(1.0, 0.2, None)),
    preset("cispo_weighted", "cispo", weight=TOKEN, reject=(BAND,)),
    preset("cispo_bypass", "cispo", policy="current", weight=TOKEN),
    *(
        preset(f"{loss}_within_{safety}", loss, clip=Clip(0.3, 0.4, None, safety))
        for loss in ("ppo_clip", "gspo", "cispo")
        for safety in (0.05, 0.4)
    ),
)
EVERY = tuple(
    replace(case, name=f"{case.name}, {denominator}", denominator=denominator)
    for case in CASES
    for denominator in ("all", "kept")
)


def numbers(rows, folder, *presets):
    """Return each preset's numbers of a dump of these rows."""
    found = analyze([oracles.write(rows, folder / "dump.parquet")], presets=presets)
    return [{name: n.value for name, n in found.preset(preset.name).items()} for preset in presets]


@pytest.fixture(scope="module", params=["of tokens", "of sequences"])
def rows(request):
    """Make rows with an advantage per token, or per sequence; a tenth of them is 0."""
    made = oracles.make_rows(0.5, seed=2, many=48)
    for i, row in enumerate(made):
        given = row["advantages"]
        row["advantages"] = [0.0 if (i + t) % 10 == 0 else a for t, a in enumerate(given)]
        if request.param == "of sequences":
            row["advantages"] = given[:1] * len(given)
    return made


@pytest.fixture(scope="module")
def found(rows, tmp_path_factory):
    got = numbers(rows, tmp_path_factory.mktemp("losses"), *EVERY)
    return dict(zip([one.name for one in EVERY], got, strict=True))


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_the_loss_is_the_textbooks(rows, found, case):
    wanted, _, _ = oracles.preset_metrics(oracles.sequences(rows), case)
    wanted = {name: x for name, x in wanted.items() if name.startswith(("pg_", "ppo_kl"))}
    assert len(wanted) == 9
    assert {name: found[case.name][name] for name in wanted} == pytest.approx(wanted, rel=1e-9, abs=1e-13)


def test_the_rows_clip_on_both_sides_and_are_rejected(found):
    """Else the comparisons above would show nothing."""
    assert 0.1 < found["ppo, all"]["pg_clipfrac"] < 0.9
    assert 0.01 < found["ppo, all"]["pg_clipfrac_lower"] < 0.5
    assert 0.01 < found["gspo, all"]["pg_clipfrac"] < 0.9
    assert 0.05 < found["bypass, all"]["tokens_rejected"] < 0.95


def test_gspo_of_one_token_sequences_is_ppo(tmp_path):
    made = [row for row in oracles.make_rows(0.5, seed=5, many=40) if row["rollout_log_probs"]]
    names = [name for name, x in made[0].items() if isinstance(x, list) and name != "response_mask"]
    short = [{name: row[name][:1] for name in names} for row in made]
    ppo, gspo = (preset(loss, loss, weight=TOKEN) for loss in ("ppo_clip", "gspo"))
    first, second = numbers(short, tmp_path, ppo, gspo)

    assert first == pytest.approx(second, rel=1e-12, nan_ok=True)


# ---------------------------------------------------------------- the edges


def by_hand(rows):
    """Return the rows of sequences of (log π_rollout, log π_old, log π_θ, A) tokens."""
    names = ("rollout_log_probs", "old_log_probs", "current_log_probs", "advantages")
    return [{name: [t[i] for t in row] for i, name in enumerate(names)} for row in rows]


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_a_ratio_on_a_bound_of_the_clip_is_not_clipped(tmp_path, loss):
    """e^u of 2 and of 1/2, as it is in float64, without the clip and with one that ends there."""
    on = math.log(2)
    rows = by_hand([[(-2 * on, -2 * on, -on, 1.0)], [(-on, -on, -2 * on, -1.0)], [(-1.0, -1.0, -1.0, 1.0)]])
    clips = Clip(None, None, None), Clip(0.5, 1.0, None), Clip(0.5 - 1e-15, 1 - 1e-15, None)
    free, bounded, inside = (numbers(rows, tmp_path, preset("one", loss, clip=clip))[0] for clip in clips)
    assert bounded["pg_clipfrac"] == 0
    assert bounded["pg_loss"] == free["pg_loss"]
    assert inside["pg_clipfrac"] == pytest.approx(2 / 3)


def test_rejecting_everything_leaves_no_loss(tmp_path):
    rows = by_hand([[(-1.0, -2.0, -2.0, 1.0)], [(-1.0, -3.0, -3.0, -1.0)]])
    for rule in ({"reject": (BAND,)}, {"reject": (GEOMETRIC,)}, {"veto": Veto(lower=0.9)}):
        got = numbers(rows, tmp_path, preset("one", "ppo_clip", weight=TOKEN, **rule))[0]
        assert (got["pg_loss"], got["pg_loss_own"], got["pg_loss_kept"]) == (None, None, 0)


@pytest.mark.parametrize("loss", get_args(Loss))
def test_log_ratios_beyond_the_safety_bound_stay_finite(tmp_path, loss):
    rows = by_hand([[(-200.0, -200.0, -0.1, -1.0), (-0.1, -0.1, -200.0, 1.0)], [(-200.0, -200.0, -0.1, 1.0)]])
    for clip in (Clip(), Clip(None, None, None)):
        got = numbers(rows, tmp_path, preset("one", loss, clip=clip))[0]
        assert math.isfinite(got["pg_loss"])
