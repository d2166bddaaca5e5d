"""Each built-in row logs what its trainer would have logged: restated, under the same settings.

The restatements hold a batch as the trainer does, padded [B, L] or as lists of samples, in float64, and share
nothing with the package. verl's `rollout_corr/` is held in `test_verl_reference`; what it logs beside, here.
"""

import fnmatch
import itertools
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.presets import Loss, Over, Preset, Reject, Sign, Statistic, Weight
from offpol_diag.presets.grammar import LOGS as NAMES
from offpol_diag.trainers import LOGS
from tests import trainer_dumps
from tests.trainers import (
    areal,
    logged_areal,
    logged_hub,
    logged_loop,
    logged_nemo_rl,
    logged_slime,
    nemo_rl,
    slime,
)
from tests.trainers import prime_skyrl as loop
from tests.trainers import trl_swift_openrlhf as hub
from tests.trainers.ours import BUILT_IN, differences
from tests.trainers.padded import padded, row_sum
from tests.trainers.samples import samples
from tests.trainers.table import TABLE, bare

PADDED = {
    hub.trl: logged_hub.trl,
    hub.swift: logged_hub.swift,
    loop.prime_dppo: logged_loop.prime_default,
    loop.prime_ipo: logged_loop.prime_ipo,
    loop.skyrl_correction: logged_loop.skyrl,
    loop.skyrl_rollout_is: logged_loop.skyrl_rollout_is,
    loop.skyrl_dppo: logged_loop.skyrl_dppo,
    loop.skyrl_cispo: logged_loop.skyrl_cispo,
}
LISTED = {
    nemo_rl.nemo_rl: logged_nemo_rl.nemo_rl,
    slime.tis: logged_slime.tis,
    slime.mis: logged_slime.mis,
    areal.rejection_sampling: logged_areal.rejection_sampling,
    areal.behave_cap: logged_areal.behave_cap,
    areal.m2po: logged_areal.m2po,
}
"""Restatement of a trainer's correction → that of its logs, on padded arrays or lists of samples."""
OWN = {
    "raw": (Preset("raw", "", logs="nemo-rl"), nemo_rl.nemo_rl, {}),
    "product": (
        Preset("product", "", weight=Weight("sum", upper=5.0, normalize=True), logs="slime-mis"),
        slime.mis,
        {"tis_level": "sequence", "tis_upper_bound": 5.0, "tis_batch_normalize": True},
    ),
    "unweighted": (Preset("unweighted", "", logs="slime-mis"), slime.mis, {"use_tis": False}),
    "weighted_gspo": (  # type and thresholds of the correction are ignored under GSPO
        replace(BUILT_IN["openrlhf_gspo"], name="weighted_gspo", weight=BUILT_IN["token_clip"].weight),
        hub.openrlhf,
        {"policy_loss_type": "gspo"},
    ),
}
"""Presets of a user's own, with what they are in their trainer's settings."""
LOGGED = {name: one for name, one in BUILT_IN.items() if one.logs and name in TABLE}
LOGGED |= {name: one for name, (one, *_) in OWN.items()}
LOGGED |= {
    name: replace(BUILT_IN[name], logs="verl-2026-03")
    for name in ("token_is", "seq_mis", "bypass_pg_token_icepop")
}
VERL = [name for name, one in LOGGED.items() if one.logs == "verl-2026-03"]


def restated(name, rows):
    """Compute what the trainer logs of the rows."""
    preset, p = LOGGED[name], padded(rows)
    if name in VERL:
        return verl(preset, p)
    trainer, settings = OWN[name][1:] if name in OWN else TABLE[name]
    if trainer in LISTED:
        fork = {"miles": True} if name.startswith("miles") else {}
        return LISTED[trainer](samples(rows), **settings, **fork)
    if trainer is hub.openrlhf:
        since = preset.logs == "openrlhf-2026-09"
        return (logged_hub.openrlhf_2026_09 if since else logged_hub.openrlhf)(p, **settings)
    if preset.logs == "skyrl" and trainer in (bare, loop.skyrl_correction):
        return logged_loop.skyrl(p, **settings, loss=preset.loss)
    found = PADDED[trainer](p, **settings)
    return found | logged_hub.trl_clips(p, preset.loss) if preset.logs == "trl" else found


def verl(preset, p):
    """Compute what verl logs beside the correction: of probabilities, and of the update after rejection."""
    if preset.policy == "current":  # REINFORCE
        return {"actor/ppo_kl": (-p.gap("current"))[p.mask].sum() / (p.mask.sum() + 1e-8)}
    keep = p.mask & (np.abs(row_sum(p.gap(), p.mask)) <= math.log(2))
    keep = keep if preset.name == "seq_mis" else p.mask
    return logged_hub.verl_debug(p) | logged_hub.verl_actor(p, keep)


# ---------------------------------------------------------------- dumps

LN2 = math.log(2.0)


def row(old, current=None, rollout=None, advantage=1.0, reward=0.0, mask=None):
    """Make a row whose log-probs lie `old` and `current` above the rollout's."""
    rollout, current = rollout or [-40.0] * len(old), old if current is None else current
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": [r + d for r, d in zip(rollout, old, strict=True)],
        "current_log_probs": [r + v for r, v in zip(rollout, current, strict=True)],
        "response_mask": [1] * len(old) if mask is None else mask,
        "advantages": [advantage] * len(old),
        "rewards": reward,
    }


def drawn(seed, lengths, draw):
    """Make rows of (old, current, rollout) drawn for each length, with random advantages and rewards."""
    rng, rows = np.random.default_rng((20261122, seed)), []
    for n in lengths:
        old, current, rollout = (np.asarray(x, float).tolist() for x in draw(rng, n))
        rows.append(row(old, current, rollout, float(rng.normal()), float(rng.integers(0, 2))))
    return rows


def far(rng, n):
    """Draw |Δ| up to 60, so that products leave float32 and log-ratios every clamp."""
    old = rng.normal(0, 20, n)
    return old, old + rng.normal(0, 3, n), -rng.exponential(1, n) - 90


def close(rng, n):
    """Draw σ(Δ) = 1e-3: the digits of every number when the policies agree."""
    return *rng.normal(0, 1e-3, (2, n)), -0.1 - rng.exponential(1, n)


def beyond_float32(rng, n):
    """Draw |Δ| and |u| around 88.7, from where e^x is inf in float32, a few of them beyond."""
    return *rng.choice([0.1, -0.2, 80.0, 88.0, -95.0, 101.0], (2, n)), [-110.0] * n


def scattered(seed, many, **more):
    return trainer_dumps.masked_rows(np.random.default_rng((20261121, seed)), many, **more)


def ragged(seed, most=40):
    return np.random.default_rng(seed).integers(1, most, 24)


spread = trainer_dumps.spread_rows
DUMPS = {
    "scattered": scattered(0, 120, scalar=False),
    "advantages of rows": scattered(1, 90, scalar=True),
    "mild": scattered(2, 40, scalar=False, wild=False),
    "far off": drawn(0, ragged(1, 12), far),
    "close by": drawn(1, [20] * 40, close),
    "beyond float32": drawn(2, ragged(3, 6), beyond_float32),
    "holes": spread(3, ragged(4), 1.5, holes=0.3, empty=(0, 7, 23)),
    "wild": spread(4, ragged(5), 0.02, wild=0.06, holes=0.1, empty=(3,)),
    "single tokens": spread(5, [1] * 20, 0.5, wild=0.1),
    "one length": spread(6, [16] * 12, 0.05),
    "one of five has tokens": spread(7, [5, 7, 3, 4, 6], 0.4, empty=(0, 1, 3, 4)),
    "one row": spread(8, [37], 0.3, holes=0.2),
    "on bounds": [row([2 * LN2, LN2, 0.0, -2 * LN2], rollout=[-2 * LN2, -LN2, -1.0, -1.0])],
    "one token": [row([0.3], [0.1], reward=1.0)],
    "everything far above": [row([30.0, 31.0], reward=1.0), row([29.0])],
    "nearly all far below": [row([-30.0, -31.0], [-25.0, -25.0], advantage=-1.0), row([-29.0, 0.2])],
}
for rows in DUMPS.values():
    for i, one in enumerate(rows):
        one.setdefault("rewards", float(i % 2))
        one.setdefault("entropy", [0.1 + 0.3 * ((i + t) % 5) for t in range(len(one["response_mask"]))])


def summary_of(rows, path, presets=None, without=(), **options):
    presets = [*LOGGED.values()] if presets is None else presets
    less = [{name: value for name, value in one.items() if name not in without} for one in rows]
    return analyze([trainer_dumps.write(less, path)], presets=presets, device="cpu", **options).presets


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Return dump → preset → its logged values."""
    where, found = tmp_path_factory.mktemp("logged"), {}

    def of(stem):
        if stem not in found:
            presets = summary_of(DUMPS[stem], where / f"{len(found)}.parquet")
            found[stem] = {name: one.as_logged for name, one in presets.items()}
        return found[stem]

    return of


# ---------------------------------------------------------------- every row


@pytest.mark.filterwarnings("ignore:(overflow|invalid|divide)")
@pytest.mark.parametrize("stem", DUMPS)
def test_presets_log_what_their_trainer_would_have_logged(logged, stem):
    wrong = {}
    for name in LOGGED:
        got = logged(stem)[name]
        if name in VERL:
            got = {key: value for key, value in got.items() if key.startswith(("training/", "actor/"))}
        # a standard deviation of verl's is read off Σx and Σx², which know it to √ε of the values
        found = differences(got, restated(name, DUMPS[stem]), 1e-9, 1e-13, 3e-8 if name in VERL else None)
        wrong |= {(name, key): pair for key, pair in found.items()}
    assert wrong == {}


# ---------------------------------------------------------------- by hand, what no built-in row shows

ACTOR = "ppo_actor/update/"
MOVED = [row([0.0, 0.0], [0.3, -0.3]), row([0.0, 0.0], [0.1, 0.1])]
EIGHTS = [row([3 * LN2, 0.0]), row([LN2, LN2]), row([LN2] * 4)]
SLIME = Preset("own", "", weight=Weight(upper=2.0), logs="slime")
AREAL = Preset("own", "", weight=Weight(action="none", upper=2.0), reject=(Reject(upper=5.0),), logs="areal")
MASKED = Weight(action="mask", upper=3.0)
PRODUCTS = (Reject(over="sum", upper=10.0),)
BY_HAND = {
    "PPO clips one token of the first sample": (SLIME, MOVED, {"train/pg_clipfrac": 1 / 4}),
    "… CISPO both": (replace(SLIME, loss="cispo"), MOVED, {"train/pg_clipfrac": 2 / 4}),
    "… REINFORCE none": (replace(SLIME, loss="reinforce"), MOVED, {"train/pg_clipfrac": 0.0}),
    "… GSPO all of the second, of mean u = 0.5": (
        replace(SLIME, loss="gspo"),
        [MOVED[0], row([0.0, 0.0], [0.1, 0.9])],
        {"train/pg_clipfrac": 2 / 4},
    ),
    "Products e^(−20) are below 1e-8: the factor is 1 and the weights stay": (
        OWN["product"][0],
        [row([-30.0]), row([-25.0])],
        {"train/mis_batch_norm_factor": 1, "train/mis_is_ratio_mean_final": math.exp(-20)},
    ),
    "Weights 8, 4 and 1 of action none, tokens above 5 rejected: a third is filtered, 4 is not clamped": (
        AREAL,
        [row([3 * LN2, 2 * LN2, 0.0])],
        {f"{ACTOR}rs_filtered_fraction": 1 / 3, f"{ACTOR}behave_imp_weight/max": 4.0},
    ),
    # r = (8, 1), (2, 2) and 2 four times: weights above 3 are 0, products above 10 rejected
    "Masked weights and rejected sequences leave the survivors: by tokens 1, 2 and 2": (
        replace(AREAL, weight=MASKED, reject=PRODUCTS),
        EIGHTS,
        {f"{ACTOR}behave_imp_weight/{end}": x for end, x in (("avg", 5 / 3), ("min", 1.0), ("max", 2.0))},
    ),
    "… by geometric means √8 of two tokens and 2 of two": (
        replace(AREAL, weight=replace(MASKED, over="mean"), reject=PRODUCTS),
        EIGHTS,
        {f"{ACTOR}behave_imp_weight/avg": (8**0.5 + 2) / 2, f"{ACTOR}behave_imp_weight/max": 8**0.5},
    ),
    # u = 0.1, 0.3 and −0.4; the clip is [0.8, 1.2]. REINFORCE has no ratio: log π_θ stands in its place
    **{
        f"NeMo-RL's ratio is the loss's own: {loss}": (
            Preset("own", "", loss=loss, logs="nemo-rl"),
            [row([0.5, 0.5], [0.6, 0.8], [-2.0, -3.0]), row([0.5], [0.1], [-1.0])],
            {
                "train/probs_ratio": sum(ratios) / 3,
                "train/probs_ratio_max": max(ratios),
                "train/probs_ratio_clamped": sum(clipped) / 3,
                "train/probs_ratio_clamped_min": min(clipped),
            },
        )
        for loss, ratios, clipped in (
            ("reinforce", (-1.4, -2.2, -0.9), (-1.4, -2.2, -0.9)),
            ("cispo", np.exp([0.1, 0.3, -0.4]), (math.exp(0.1), 1.2, 0.8)),
            ("gspo", np.exp([0.2, 0.2, -0.4]), (1.2, 1.2, 0.8)),
        )
    },
}


@pytest.mark.parametrize("what", BY_HAND)
def test_presets_log_a_dump_that_fits_on_a_line(what, tmp_path):
    preset, rows, want = BY_HAND[what]
    got = summary_of(rows, tmp_path / "dump.parquet", [preset])[preset.name].as_logged

    assert {key: got[key] for key in want} == pytest.approx(want, rel=1e-7, abs=1e-12)


# ---------------------------------------------------------------- missing columns, cuts, names

LOST = {
    "current_log_probs": {
        "token_clip": {"ppo_kl", "ppo_clip_ratio"},
        "token_is": {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"},
        "m2po": "ppo_actor/*",
        "slime_tis": {"train/ois", "train/pg_clipfrac", "train/ppo_kl"},
    },
    "advantages": {
        "token_clip": {"ppo_clip_ratio"},
        "token_is": {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"},
        "trl_token_mask": "clip_ratio/*",
        "slime_tis": {"train/pg_clipfrac"},
        "nemo_rl_tis": set(),
    },
    "old_log_probs": {"openrlhf_gspo": {"ppo_kl"}, "bypass_pg_token_icepop": "training/*"},
    "rewards": {"nemo_rl_tis": {"train/masked_correct_pct"}, "slime_tis": set()},
    "entropy": {"ipo": {"kl_ent_ratio/mean"}},
}
"""Column → row → names that are left out without it: a set, or a pattern."""


@pytest.mark.parametrize("column", LOST)
def test_a_name_whose_column_is_missing_is_left_out_and_the_others_stay(logged, column, tmp_path):
    whole = logged("holes")
    less = summary_of(DUMPS["holes"], tmp_path / "less.parquet", without=(column,))
    for name, one in less.items():
        got, want = one.as_logged, {key: whole[name][key] for key in one.as_logged}
        assert got == {} or not one.needs, name
        assert differences(got, want) == {}, name
    for name, lost in LOST[column].items():
        gone = whole[name].keys() - less[name].as_logged.keys()
        assert gone == (set(fnmatch.filter(whole[name], lost)) if isinstance(lost, str) else lost), name


def test_cutting_the_dump_changes_nothing(logged, tmp_path):
    cut = summary_of(DUMPS["scattered"], tmp_path / "dump.parquet", batch_tokens=300)
    for name, want in logged("scattered").items():
        want = {key: math.nan if x is None else x for key, x in want.items()}
        assert differences(cut[name].as_logged, want) == {}, name


# ---------------------------------------------------------------- whatever the grammar allows

WEIGHTS = (
    None,
    Weight(upper=2.0),
    Weight("sum", upper=2.0, normalize=True),
    Weight("mean", "mask", lower=0.9, upper=1.1),
    Weight("segment", "none"),
)
BOUNDS = {"ratio": (0.5, 2.0), "k1": (-0.3, 0.3), "mult_prob_error": (None, 1.5)}


def combined(logs):
    """Draw a third of the pairs of statistic and level, plain or with other options of a rule."""
    rng, at = np.random.default_rng(NAMES.index(logs)), NAMES.index(logs)
    for statistic, over in itertools.product(get_args(Statistic), get_args(Over)):
        low, high = BOUNDS.get(statistic, (None, 0.1))
        signs = {"plain": "any", "negative": "negative", "odd": str(rng.choice(get_args(Sign)))}
        for kind, sign in signs.items():
            rule = Reject(statistic, over, None if over == "batch" else low, high, sign)
            at += 1
            if at % 3 == 0 and not list(rule.slips()):
                policy, weight = ("old", "current")[rng.integers(2)], WEIGHTS[rng.integers(len(WEIGHTS))]
                loss = str(rng.choice(get_args(Loss)))
                name = f"{statistic}_{over}_{kind}"
                yield Preset(name, "", policy=policy, reject=(rule,), weight=weight, loss=loss, logs=logs)


@pytest.mark.parametrize("logs", LOGS)
def test_every_preset_of_the_grammar_is_computed(logs, tmp_path):
    tried = list(combined(logs))
    found = summary_of(spread(1, [3, 1, 8, 5] * 3, 0.6, holes=0.2), tmp_path / "dump.parquet", tried)

    assert len(tried) > 30
    assert set(found) == {preset.name for preset in tried}
