"""verl of 2026-03, TRL, ms-swift and OpenRLHF in their own numbers, against their rules on padded arrays.

The restatements hold a batch as those trainers do, padded on the right with a mask, float64, and carry the
trainers' own option names; they share nothing with the package. verl's `rollout_corr/` is restated in
`verl_reference`; what it logs beside that is here.
"""

import fnmatch
import math
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.presets import catalogue
from offpol_diag.trainers import LOGS
from tests import trainer_dumps
from tests.trainer_dumps import exact_row
from tests.trainers.padded import over, padded, row_mean, row_sum, under, within
from tests.trainers.policies import update, vespo_factor
from tests.trainers.table import TABLE

BUILT_IN = catalogue.load()
VERL = ("verl-2025-10", "verl-2025-11", "verl-2026-01", "verl-2026-03")
OURS = (*VERL, "trl", "ms-swift", "openrlhf", "openrlhf-2026-09", "molt")
PRESETS = {name: preset for name, preset in BUILT_IN.items() if preset.logs in OURS}


def of(*logs):
    """Names of the built-in rows that log so."""
    return [name for name, preset in PRESETS.items() if preset.logs in logs]


# ---------------------------------------------------------------- TRL


def trl(p, *, mode="sequence_mask", clip_max=3.0, clip_min=None, off_policy_mask_threshold=None):
    """`_generate_and_score_completions`; the off-policy mask comes later, in the loss, and is not seen."""
    level, action = mode.split("_")
    log = p.gap() if level == "token" else row_sum(p.gap(), p.mask)
    ratio = np.exp(log)
    if action == "truncate":
        ratio = np.clip(ratio, clip_min, clip_max)
    else:
        ratio = np.where(within(ratio, clip_min, clip_max), ratio, 0.0)
    flat = ratio[p.mask] if level == "token" else ratio.flatten()
    delta = np.abs(p.gap())[p.mask]
    return {
        "sampling/sampling_logp_difference/mean": delta.mean(),
        "sampling/sampling_logp_difference/max": delta.max(),
        "sampling/importance_sampling_ratio/min": flat.min(),
        "sampling/importance_sampling_ratio/mean": flat.mean(),
        "sampling/importance_sampling_ratio/max": flat.max(),
    }


def trl_clips(p, loss):
    """`_compute_loss`, of a completion with one advantage: of tokens, or of rows under a ratio of rows."""
    good = ~((p.advantages < 0) & p.mask).any(axis=1, keepdims=True)
    if loss == "vespo":
        return {"vespo/phi_seq_mean": vespo_factor(p, good).mean()}
    u, up, down = update(p, "old"), (p.advantages > 0) & p.mask, (p.advantages < 0) & p.mask
    if loss == "cispo":
        return {"cispo_clip_ratio": (over(np.exp(u), 5.0) & up).sum() / p.mask.sum()}
    if loss == "sapo":
        return {}
    if loss == "luspo":
        u = row_mean(u, p.mask)
        up, down = (x.any(axis=1, keepdims=True) for x in (up, down))
    low, high = under(np.exp(u), 0.8) & down, over(np.exp(u), 1.2) & up
    there = p.mask if loss == "ppo_clip" else np.ones_like(low)
    filled = there.any(axis=1)
    rows = [(x.sum(axis=1)[filled] / there.sum(axis=1)[filled]) for x in (low, high)]
    shares = [x.sum() / there.sum() for x in (low, high)]
    return {
        "clip_ratio/low_mean": shares[0],
        "clip_ratio/low_min": rows[0].min(),
        "clip_ratio/high_mean": shares[1],
        "clip_ratio/high_max": rows[1].max(),
        "clip_ratio/region_mean": sum(shares),
    }


# ---------------------------------------------------------------- ms-swift


def masked_mean(x, mask):
    return np.where(mask, x, 0.0).sum() / max(mask.sum(), 1.0)


def swift_gap(p):
    log_ratio = p.gap()
    safe = np.clip(log_ratio, -20, 20)
    k3 = np.clip(np.expm1(safe) - safe, -10, 10)
    train, rollout = row_mean(p.old, p.mask)[:, 0], row_mean(p.rollout, p.mask)[:, 0]
    geometric = np.exp(np.clip(row_mean(log_ratio, p.mask)[:, 0], -20, 20))
    diff = rollout - train
    return {
        "training_ppl": np.exp(-train).mean(),
        "training_log_ppl": (-train).mean(),
        "kl": masked_mean(-log_ratio, p.mask),
        "k3_kl": masked_mean(k3, p.mask),
        "rollout_ppl": np.exp(-rollout).mean(),
        "rollout_log_ppl": (-rollout).mean(),
        "log_ppl_diff": diff.mean(),
        "log_ppl_abs_diff": np.abs(diff).mean(),
        "log_ppl_diff_max": diff.max(),
        "log_ppl_diff_min": diff.min(),
        "ppl_ratio": np.exp(diff).mean(),
        "chi2_token": masked_mean(np.exp(safe) ** 2, p.mask) - 1,
        "chi2_seq": (geometric**2).mean() - 1,
    }


def swift_weights(p, mode, threshold):
    """The weights as applied [B, L], and what `clipped_frac` is."""
    ratio = np.exp(np.clip(p.gap(), -20, 20))
    rows = np.exp(row_mean(np.log(np.maximum(ratio, 1e-10)), p.mask))
    beyond = over(rows, threshold)
    weights = {
        "token_truncate": np.minimum(ratio, threshold),
        "token_mask": np.where(over(ratio, threshold), 0.0, ratio),
        "sequence_truncate": np.minimum(rows, threshold) * np.ones_like(ratio),
        "sequence_mask": ratio * ~beyond,
    }[mode]
    clipped = {
        "token_truncate": masked_mean(over(ratio, threshold), p.mask),
        "token_mask": masked_mean(weights == 0, p.mask),
    }
    return weights, clipped.get(mode, beyond.mean())


def swift(
    p,
    *,
    rollout_importance_sampling_mode=None,
    rollout_importance_sampling_threshold=2.0,
    off_policy_sequence_mask_delta=None,
):
    """`_compute_rollout_offpolicy_metrics`, and `_compute_is_correction_metrics` where a mode is set."""
    found, threshold = swift_gap(p), rollout_importance_sampling_threshold
    if rollout_importance_sampling_mode:
        weights, clipped = swift_weights(p, rollout_importance_sampling_mode, threshold)
        bounded = np.clip(weights, 1 / threshold, threshold)
        normalised = bounded / (masked_mean(bounded, p.mask) + 1e-8)
        found |= {
            "is_weight_mean": masked_mean(weights, p.mask),
            "ess": 1 / max(masked_mean(normalised**2, p.mask), 1e-10),
            "clipped_frac": clipped,
        }
    return {f"rollout_correction/{name}": value for name, value in found.items()}


# ---------------------------------------------------------------- OpenRLHF


def openrlhf(p, *, policy_loss_type="ppo", is_correction_type="tis", is_correction_threshold=(0.5, 5.0)):
    """`PolicyLoss.forward` with the correction on and eps_clip 0.2."""
    update = p.current - p.old
    if policy_loss_type == "gspo":
        ratio = np.exp(row_mean(p.gap("current"), p.mask)) * p.mask
    else:
        ratio = np.exp(np.clip(update, -20, 20))
    surr1, surr2 = ratio * p.advantages, np.clip(ratio, 0.8, 1.2) * p.advantages
    found = {
        "ppo_clip_ratio": (surr2 < surr1)[p.mask].mean(),
        "ppo_kl": (-update)[p.mask].mean(),
    }
    if policy_loss_type == "ppo":
        found["vllm_kl"] = (p.rollout - p.old)[p.mask].mean()
    return found


def openrlhf_2026_09(p, *, is_correction_gating, is_correction_threshold, level="token"):
    """The same, with the share that the gate drops: of tokens, or of rows."""
    rollout, old = (np.clip(np.exp(x), 1e-6, 1 - 1e-6) for x in (p.rollout, p.old))
    gate = np.abs(rollout - old)
    if is_correction_gating == "binary_kl":
        gate = rollout * np.log(rollout / old) + (1 - rollout) * np.log((1 - rollout) / (1 - old))
    if level == "seq":
        filtered = (row_mean(gate, p.mask) > is_correction_threshold[1]).mean()
    else:
        filtered = (gate > is_correction_threshold[1])[p.mask].mean()
    return openrlhf(p) | {"is_filter_ratio": filtered}


def molt(p, *, level="token", mode="mask", threshold=(0.5, 5.0)):
    """Its own names, and the share that lies outside the bounds."""
    found, gap = openrlhf(p), np.clip(p.gap(), -30, 30)
    gates = {"token": gap, "seq": np.clip(row_sum(gap, p.mask), -30, 30), "geo": row_mean(gap, p.mask)}
    ratio = np.exp(gates[level])
    outside = (ratio > threshold[1]) | ((ratio < threshold[0]) & (mode != "trunc"))
    return {
        "policy_clip_ratio": found["ppo_clip_ratio"],
        "policy_kl": found["ppo_kl"],
        "vllm_kl": found["vllm_kl"],
        "is_filter_ratio": outside[p.mask].mean() if level == "token" else outside.mean(),
    }


# ---------------------------------------------------------------- verl, beside the correction


def verl_debug(p):
    """`calculate_debug_metrics`: of probabilities."""
    old, rollout = np.exp(p.old[p.mask]), np.exp(p.rollout[p.mask])
    diff = np.abs(old - rollout)
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": diff.max(),
        "training/rollout_probs_diff_mean": diff.mean(),
        "training/rollout_probs_diff_std": diff.std(ddof=1) if len(diff) > 1 else math.nan,
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(old, rollout)[0, 1]
        if len(diff) > 1
        else math.nan,
    }


def verl_actor(p, keep, clip_ratio=0.2, clip_ratio_c=3.0):
    """`compute_policy_loss_vanilla` on the mask that rejection leaves; it bounds u for ppo_kl too."""
    log, a = np.clip(p.current - p.old, -20, 20), p.advantages
    ratio = np.exp(log)
    plain, clipped = -a * ratio, -a * np.clip(ratio, 1 - clip_ratio, 1 + clip_ratio)
    worse, count = np.maximum(plain, clipped), keep.sum() + 1e-8
    return {
        "actor/pg_clipfrac": (clipped > plain)[keep].sum() / count,
        "actor/pg_clipfrac_lower": ((worse > -a * clip_ratio_c) & (a < 0))[keep].sum() / count,
        "actor/ppo_kl": (-log)[keep].sum() / count,
    }


# ---------------------------------------------------------------- dumps


def dumps():
    """Name → rows: far off-policy, in turns, empty and masked through; one row; one token."""
    found = {}
    for seed, scalar in ((0, True), (1, False)):
        rng = np.random.default_rng((20260824, seed))
        found[f"random {seed}"] = trainer_dumps.masked_rows(rng, 150, scalar=scalar)
    rng = np.random.default_rng(20260825)
    found["mild"] = trainer_dumps.masked_rows(rng, 40, scalar=False, wild=False)
    found["one token"] = [exact_row([0.3], current=[0.7], advantage=1.0)]
    found["one token a row"] = [exact_row([x], current=[x / 2], advantage=-1.0) for x in (0.1, -2.0, 1.5)]
    found["far, both ways"] = [exact_row([x, -x, 0.1], current=[0.2, x, -x]) for x in (30.0, -25.0, 100.0)]
    found["far, all of it"] = [exact_row([x, x + 1], current=[x, x]) for x in (24.0, -31.0, 99.0)]
    return found


DUMPS = dumps()


def summary_of(rows, names, folder, **options):
    file = trainer_dumps.write(rows, folder / "dump.parquet")
    return analyze([file], presets=[BUILT_IN[name] for name in names], device="cpu", **options)


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Dump → preset → what was logged."""
    where = tmp_path_factory.mktemp("logged")
    found = {stem: summary_of(rows, PRESETS, where).presets for stem, rows in DUMPS.items()}
    return {stem: {name: one.as_logged for name, one in presets.items()} for stem, presets in found.items()}


def one(name, rows, folder):
    return summary_of(rows, [name], folder).presets[name].as_logged


def same(name, got, want):
    """A standard deviation is read off Σx and Σx², which know it to √ε of the values."""
    if got is None or not math.isfinite(want):
        return got is None and not math.isfinite(want)
    return math.isclose(got, want, rel_tol=1e-9, abs_tol=3e-8 if name.endswith("_std") else 1e-12)


def differences(got, want):
    return {
        name: (got.get(name, "absent"), want.get(name, "absent"))
        for name in {*got, *want}
        if name not in got or name not in want or not same(name, got[name], want[name])
    }


# ---------------------------------------------------------------- every row

RESTATED = {
    "trl": trl,
    "ms-swift": swift,
    "openrlhf": openrlhf,
    "openrlhf-2026-09": openrlhf_2026_09,
    "molt": molt,
}


@pytest.mark.parametrize("stem", DUMPS)
def test_what_the_trainer_would_have_logged(logged, stem):
    p = padded(DUMPS[stem])
    for name in of(*RESTATED):
        want = RESTATED[PRESETS[name].logs](p, **TABLE[name][1])
        if PRESETS[name].logs == "trl":
            want |= trl_clips(p, PRESETS[name].loss)
        assert differences(logged[stem][name], want) == {}, name


@pytest.mark.parametrize("stem", DUMPS)
def test_what_verl_logs_of_probabilities(logged, stem):
    of_old = verl_debug(padded(DUMPS[stem]))
    for name in of("verl-2026-03"):
        got = {key: value for key, value in logged[stem][name].items() if key.startswith("training/")}
        assert differences(got, of_old if PRESETS[name].policy == "old" else {}) == {}, name


@pytest.mark.parametrize("stem", DUMPS)
def test_what_verl_logs_of_the_update(logged, stem):
    p = padded(DUMPS[stem])
    product = row_sum(np.clip(p.gap(), -20, 20), p.mask)
    inside = np.abs(product) <= math.log(2)
    for name in of("verl-2026-03"):
        got = {key: value for key, value in logged[stem][name].items() if key.startswith("actor/")}
        want = verl_actor(p, p.mask & inside if name == "verl_2026_03_seq_is_rs" else p.mask)
        if PRESETS[name].policy == "current":  # REINFORCE
            want = {"actor/ppo_kl": (-p.gap("current"))[p.mask].sum() / (p.mask.sum() + 1e-8)}
        assert differences(got, want) == {}, name


def test_generations_with_golden_numbers_log_what_those_have(logged):
    for name in of("verl-2025-10", "verl-2025-11", "verl-2026-01"):
        assert not [key for key in logged["mild"][name] if key.startswith(("training/", "actor/"))], name


# ---------------------------------------------------------------- by hand

IS, SAMPLING, SWIFT = "rollout_corr/rollout_is_", "sampling/", "rollout_correction/"
EMPTY = exact_row([5.0], mask=[0])
FOURS = [exact_row([math.log(4)] * 2), exact_row([0.0] * 3), exact_row([1.0], mask=[0])]
FLOOR = [exact_row([0.0, math.log(0.01)])]
TRIED = {
    # ---- verl
    "IcePop's numbers are of what is left: 0.4, 0.8, 6 become 0, 0.8, 0: E = 0.8/3, of squares 0.64/3": (
        "decoupled_token_icepop",
        [exact_row([math.log(x) for x in (0.4, 0.8, 6.0)])],
        {
            IS + "mean": 0.8 / 3,
            IS + "max": 0.8,
            IS + "min": 0.0,
            IS + "std": math.sqrt(0.64 / 3 - 0.64 / 9),
            IS + "eff_sample_size": 1 / 3,  # (0.8/3)² / (0.64/3)
            IS + "oob_ratio": 2 / 3,
            IS + "ratio_fraction_high": 1 / 3,
            IS + "ratio_fraction_low": 1 / 3,
            IS + "seq_mean": 0.8 / 3,
            IS + "seq_max_deviation": 1 - 0.8 / 3,
            IS + "seq_fraction_high": 0.0,  # the raw mean is 2.4, the bound 5
        },
    ),
    "Row fractions are of raw weights: (1, 6), (0.9, 1.1), C = 2, applied means 1.5 and 1, raw 3.5 and 1": (
        "verl_2026_03_token_is",
        [exact_row([0.0, math.log(6)]), exact_row([math.log(0.9), math.log(1.1)])],
        {IS + "seq_fraction_high": 0.5, IS + "seq_max": 1.5, IS + "oob_ratio": "absent"},
    ),
    **{
        f"Where {name} leaves nothing the ESS is undefined: verl divides 1.0 by 0.0 there, and stops": (
            name,
            [exact_row([3.0]), exact_row([-2.0, -1.0])],
            {IS + "eff_sample_size": None, IS + "oob_ratio": 1.0, IS + "mean": 0.0, IS + "std": 0.0},
        )
        for name in ("decoupled_token_icepop", "verl_2026_03_seq_icepop")
    },
    "Extremes of products are taken before truncation: e^3 and e^−1 of one and two tokens, C = 2": (
        "verl_2026_03_seq_is",
        [exact_row([3.0]), exact_row([-0.5, -0.5])],
        {
            IS + "max": math.exp(3),
            IS + "min": math.exp(-1),
            IS + "mean": (2 + 2 * math.exp(-1)) / 3,
            IS + "seq_mean": (2 + math.exp(-1)) / 2,
        },
    ),
    "Weights 1 and 0.01, C = 2: 2026-01 lifts 0.01 to 0.5: 1.5²/(2·1.25)": (
        "decoupled_token_is",
        FLOOR,
        {IS + "eff_sample_size": 0.9},
    ),
    "… and 2026-03 no longer": (
        "verl_2026_03_token_is",
        FLOOR,
        {IS + "eff_sample_size": 1.01**2 / (2 * 1.0001)},
    ),
    # ---- TRL
    "A completion without a token has a ratio of 1: products 0.5 and (of nothing) 1; it has no difference": (
        "trl_sequence_mask",
        [exact_row([math.log(0.5)]), EMPTY],
        {
            SAMPLING + "importance_sampling_ratio/mean": 0.75,
            SAMPLING + "importance_sampling_ratio/max": 1.0,
            SAMPLING + "sampling_logp_difference/mean": math.log(2),
            SAMPLING + "sampling_logp_difference/max": math.log(2),
        },
    ),
    **{
        f"Three tokens of r = 1 and one of r = 4, which a cap of 3 truncates or masks: {name}": (
            name,
            [exact_row([0.0, 0.0, 0.0]), exact_row([math.log(4)])],
            {SAMPLING + "importance_sampling_ratio/mean": mean},
        )
        for name, mean in (
            ("trl_sequence_truncate", (1 + 3) / 2),
            ("trl_token_truncate", (3 + 3) / 4),
            ("trl_sequence_mask", 1 / 2),
            ("trl_token_mask", 3 / 4),
        )
    },
    "The off-policy mask of the loss (A < 0, π_θ far below) does not show in π_old/π_rollout = 1": (
        "trl_off_policy_mask",
        [exact_row([0.0]), exact_row([0.0], current=[-2.0], advantage=-1.0)],
        {SAMPLING + "importance_sampling_ratio/min": 1.0},
    ),
    # ---- ms-swift
    "One bad token adds at most ten to k3: Δ = 30 is bounded to 20, and e^20 − 1 − 20 to 10; k1 is not": (
        "swift_token_truncate",
        [exact_row([30.0, 0.0])],
        {SWIFT + "k3_kl": 5.0, SWIFT + "kl": -15.0},
    ),
    "Δ = (1, 1): geometric mean e, squared e²; the product would give e⁴; no mode, so no weight": (
        "swift_opsm",
        [exact_row([1.0, 1.0])],
        {SWIFT + "chi2_seq": math.exp(2) - 1, SWIFT + "ess": "absent", SWIFT + "is_weight_mean": "absent"},
    ),
    "The ESS takes a masked token for 1/C: r = 1 and 4 → 1 and 0 → 1 and 0.5: (1.5/2)² / (1.25/2)": (
        "swift_token_mask",
        [exact_row([0.0, math.log(4)])],
        {SWIFT + "ess": 0.9, SWIFT + "is_weight_mean": 0.5, SWIFT + "clipped_frac": 0.5},
    ),
    # r = (4, 4) above C in geometric mean, (1, 1, 1), no token: of five tokens two above 2, of three rows one
    **{
        f"Clipped tokens or clipped rows are counted by mode: {name}": (
            name,
            FOURS,
            {SWIFT + "clipped_frac": clipped, SWIFT + "is_weight_mean": mean},
        )
        for name, clipped, mean in (
            ("swift_token_truncate", 2 / 5, 7 / 5),
            ("swift_token_mask", 2 / 5, 3 / 5),
            ("swift_sequence_truncate", 1 / 3, 7 / 5),
            ("swift_sequence_mask", 1 / 3, 3 / 5),
        )
    },
    # ---- OpenRLHF
    "π_old is 0.5 nats above the rollout, π_θ 0.2 above π_old: both negative; e^0.2 = 1.22 > 1.2, A > 0": (
        "openrlhf_tis",
        [exact_row([0.5], current=[0.7])],
        {"vllm_kl": -0.5, "ppo_kl": -0.2, "ppo_clip_ratio": 1.0},
    ),
    "GSPO clips around the rollout, geometric mean e^0.2 > 1.2, and measures from π_old, which is π_θ": (
        "openrlhf_gspo",
        [exact_row([0.3, 0.1])],
        {"ppo_clip_ratio": 1.0, "ppo_kl": 0.0, "vllm_kl": "absent"},
    ),
    "IcePop gives the first token a weight of 0; its log-ratio of 3 is half of vllm_kl all the same": (
        "openrlhf_icepop",
        [exact_row([3.0, 0.0])],
        {"vllm_kl": -1.5},
    ),
}
"""What is computed by hand → a built-in row, the dump, what is logged."""


@pytest.mark.parametrize("what", TRIED)
def test_what_is_logged_of_a_dump_that_fits_on_a_line(what, tmp_path):
    name, rows, want = TRIED[what]
    got = one(name, rows, tmp_path)
    found = {key: got.get(key, "absent") for key in want}
    words = {key: value for key, value in want.items() if value in (None, "absent")}

    assert {key: found.pop(key) for key in words} == words
    assert found == pytest.approx({key: want[key] for key in found}, rel=1e-6, abs=1e-12)


def test_swift_without_a_mode_logs_the_gap_alone(tmp_path):
    assert len(one("swift_opsm", [exact_row([0.1])], tmp_path)) == 13


def test_openrlhfs_gspo_logs_no_mismatch_even_where_a_weight_is_set(tmp_path):
    """The correction's type and thresholds are ignored under GSPO."""
    preset = replace(BUILT_IN["openrlhf_gspo"], name="own", weight=BUILT_IN["openrlhf_tis"].weight)
    file = trainer_dumps.write([exact_row([0.3, 0.1])], tmp_path / "dump.parquet")

    assert set(analyze([file], presets=[preset], device="cpu").presets["own"].as_logged) == {
        "ppo_clip_ratio",
        "ppo_kl",
    }


# ---------------------------------------------------------------- missing columns, cuts, names, cost


def without(folder, *columns):
    """Preset → what is logged of the first dump without these columns."""
    file = folder / "less.parquet"
    whole = pq.read_table(trainer_dumps.write(DUMPS["random 0"], folder / "whole.parquet"))
    pq.write_table(whole.drop_columns(list(columns)), file)
    found = analyze([str(file)], presets=list(PRESETS.values()), device="cpu").presets
    return {name: result.as_logged for name, result in found.items()}


def test_what_a_column_is_missing_for_is_left_out_and_the_rest_stands(logged, tmp_path):
    whole = logged["random 0"]
    no_current = without(tmp_path, "current_log_probs")
    no_advantages = without(tmp_path, "advantages")
    no_old = without(tmp_path, "old_log_probs")

    assert set(no_current["openrlhf_tis"]) == {"vllm_kl"}
    assert set(no_advantages["openrlhf_tis"]) == {"vllm_kl", "ppo_kl"}
    assert set(no_old["openrlhf_gspo"]) == {"ppo_clip_ratio"}
    assert no_current["openrlhf_gspo"] == {}  # the preset itself needs it
    actor = {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"}
    for less in (no_current, no_advantages):
        assert whole["verl_2026_03_token_is"].keys() - less["verl_2026_03_token_is"].keys() == actor
    assert not any(key.startswith("training/") for key in no_old["bypass_pg_token_icepop"])
    for name in of("trl", "ms-swift"):
        of_loss = ("clip_ratio/", "cispo_clip_ratio", "vespo/")
        others = {key: value for key, value in whole[name].items() if not key.startswith(of_loss)}
        assert no_advantages[name] in ({}, others)
    for less in (no_current, no_advantages, no_old):
        for name, values in less.items():
            assert differences(values, {key: whole[name][key] for key in values}) == {}


def test_how_the_dump_is_cut_changes_nothing(logged, tmp_path):
    stem = "random 0"
    names = of("verl-2026-03", "trl", "ms-swift", "openrlhf")
    cut = summary_of(DUMPS[stem], names, tmp_path, batch_tokens=64).presets

    for name in names:
        assert differences(cut[name].as_logged, logged[stem][name]) == {}, name


@pytest.mark.parametrize("logs", OURS)
def test_every_name_that_is_logged_has_exactly_one_meaning(logged, logs):
    patterns = LOGS[logs].names()
    found = {name for stem in DUMPS for preset in of(logs) for name in logged[stem][preset]}

    assert found
    for name in found:
        assert len([one for one in patterns if fnmatch.fnmatchcase(name, one)]) == 1, name
    assert all(len(meaning) > 15 and meaning.endswith(".") for meaning in patterns.values())


@pytest.mark.parametrize("logs", ["verl-2025-10", "verl-2026-01", "trl", "ms-swift", "openrlhf"])
def test_no_name_has_a_meaning_that_nothing_logs(logged, logs):
    found = {name for stem in DUMPS for preset in of(logs) for name in logged[stem][preset]}

    assert [one for one in LOGS[logs].names() if not fnmatch.filter(found, one)] == []
