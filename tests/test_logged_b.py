"""What NeMo-RL, slime, miles, their helper and AReaL would have logged, against restatements on lists."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.presets import catalogue
from offpol_diag.trainers import LOGS
from tests import trainer_dumps
from tests.trainers import areal, logged_areal, logged_nemo_rl, logged_slime, nemo_rl, slime
from tests.trainers.samples import samples
from tests.trainers.table import TABLE

OURS = ("nemo-rl", "slime", "slime-mis", "miles", "miles-mis", "areal", "areal-v1.0.3")
BUILT_IN = {p.name: p for p in catalogue.load().values() if p.logs in OURS}
LOGGED = {
    nemo_rl.nemo_rl: logged_nemo_rl.nemo_rl,
    slime.tis: logged_slime.tis,
    slime.opsm: logged_slime.opsm,
    slime.mis: logged_slime.mis,
    areal.rejection_sampling: logged_areal.rejection_sampling,
    areal.behave_cap: logged_areal.behave_cap,
    areal.m2po: logged_areal.m2po,
}
"""What a trainer does to tokens → what it logs of it, under the same settings."""
FILTERED = "ppo_actor/update/rs_filtered_fraction"


# ---------------------------------------------------------------- dumps


def row(old, current=None, rollout=None, advantage=1.0, reward=0.0, mask=None):
    """A row whose log-probs lie `old` and `current` above the rollout's."""
    rollout = rollout or [-40.0] * len(old)
    current = old if current is None else current
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": [r + d for r, d in zip(rollout, old, strict=True)],
        "current_log_probs": [r + v for r, v in zip(rollout, current, strict=True)],
        "response_mask": [1] * len(old) if mask is None else mask,
        "advantages": [advantage] * len(old),
        "rewards": reward,
    }


def scattered(seed, many=120, **more):
    rng = np.random.default_rng((20261121, seed))
    found = trainer_dumps.masked_rows(rng, many, scalar=False)
    return [{**one, "rewards": float(rng.integers(0, 2)), **more} for one in found]


def far(seed):
    """|Δ| up to 60, so that products leave float32 and log-ratios every clamp."""
    rng = np.random.default_rng((20261122, seed))
    rows = []
    for _ in range(60):
        n = int(rng.integers(1, 12))
        old, move = rng.normal(0, 20, n), rng.normal(0, 3, n)
        rollout = list(-rng.exponential(1, n) - 90)
        rows.append(row(list(old), list(old + move), rollout, float(rng.normal()), float(rng.integers(0, 2))))
    return rows


def close_by(seed):
    """σ(Δ) = 1e-3: what is left of every number when the policies agree."""
    rng = np.random.default_rng((20261123, seed))
    return [
        row(list(rng.normal(0, 1e-3, 20)), list(rng.normal(0, 1e-3, 20)), advantage=float(rng.normal()))
        for _ in range(40)
    ]


def beyond_float32(seed):
    """|Δ| and |u| around 88.7, from where e^x is inf in float32, a few of them beyond."""
    rng = np.random.default_rng((20261124, seed))
    rows = []
    for _ in range(30):
        n = int(rng.integers(1, 6))
        old, current = (rng.choice([0.1, -0.2, 80.0, 88.0, -95.0, 101.0], n).tolist() for _ in range(2))
        rows.append(row(old, current, [-110.0] * n, float(rng.normal()), float(rng.integers(0, 2))))
    return rows


DUMPS = {
    "beyond float32": beyond_float32(0),
    "scattered": scattered(0),
    "scattered too": scattered(1, 90),
    "far off": far(0),
    "close by": close_by(0),
    "one token a row": [
        row([d], [d / 2], advantage=(-1) ** i) for i, d in enumerate((-3.0, -0.2, 0.1, 0.9, 30.0))
    ],
    "one token": [row([0.3], [0.1], reward=1.0)],
    "one row of three with a token": [row([0.3, 9.0], mask=[0, 0]), row([0.4], [0.6]), row([])],
    "everything far above": [row([30.0, 31.0], reward=1.0), row([29.0])],
}


def summary_of(rows, path, *, without=(), **options):
    lists = pa.list_(pa.float64())
    kinds = {
        **{f"{policy}_log_probs": lists for policy in ("rollout", "old", "current")},
        "response_mask": pa.list_(pa.int8()),
        "advantages": lists,
        "rewards": pa.float64(),
    }
    kinds = {name: kind for name, kind in kinds.items() if name not in without}
    pq.write_table(
        pa.table({name: pa.array([r[name] for r in rows], kind) for name, kind in kinds.items()}), path
    )
    return analyze([str(path)], presets=list(options.pop("presets", BUILT_IN.values())), **options)


def logged(rows, path, name, **options):
    """What one preset's trainer would have logged."""
    presets = [options.pop("preset", None) or BUILT_IN[name]]
    return summary_of(rows, path, presets=presets, **options).presets[name].as_logged


def restated(name, rows):
    trainer, settings = TABLE[name]
    fork = {"miles": True} if name.startswith("miles") else {}
    return LOGGED[trainer](samples(rows), **settings, **fork)


def differences(got, want):
    """Names that one side lacks or whose numbers differ; what is not finite stands in JSON as null."""
    found = {name: (got.get(name, "absent"), want.get(name, "absent")) for name in got.keys() ^ want.keys()}
    for name in got.keys() & want.keys():
        ours, theirs = got[name], want[name]
        same = (
            not math.isfinite(theirs) if ours is None else ours == pytest.approx(theirs, rel=1e-9, abs=1e-13)
        )
        if not same:
            found[name] = (ours, theirs)
    return found


def wrong(summary, rows):
    found = {}
    for name in BUILT_IN:
        got = summary.presets[name].as_logged
        found |= {(name, key): pair for key, pair in differences(got, restated(name, rows)).items()}
    return found


# ---------------------------------------------------------------- against the restatements


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in DUMPS), ("scattered", {"batch_tokens": 300})]
)
def test_every_number_is_what_the_trainer_would_have_logged(name, options, tmp_path):
    rows = DUMPS[name]

    assert wrong(summary_of(rows, tmp_path / "dump.parquet", **options), rows) == {}


def test_every_row_of_these_trainers_is_restated():
    assert {TABLE[name][0] for name in BUILT_IN} == set(LOGGED)
    assert {preset.logs for preset in BUILT_IN.values()} == set(OURS)


@pytest.mark.parametrize(
    ("without", "of"),
    [
        (
            ("current_log_probs",),
            ("probs_ratio", "approx_entropy", "ois", "ppo_kl", "pg_clipfrac", "importance_", "ess_ratio"),
        ),
        (("advantages",), ("pg_clipfrac",)),
        (("rewards",), ("masked_correct_pct",)),
    ],
)
def test_a_name_whose_column_is_missing_is_left_out_and_the_others_stay(without, of, tmp_path):
    rows = DUMPS["scattered"]
    summary = summary_of(rows, tmp_path / "dump.parquet", without=without)
    gone = set()
    for name in BUILT_IN:
        result = summary.presets[name]
        if result.needs:
            assert result.as_logged == {}
            continue
        want = restated(name, rows)
        got = result.as_logged
        gone |= want.keys() - got.keys()
        assert differences(got, {key: want[key] for key in got}) == {}

    assert gone
    assert all(any(word in name for name in gone) for word in of)
    if without != ("current_log_probs",):
        assert all(any(word in name for word in of) for name in gone)
    assert not any(word in name for name in gone for word in ("_kl_error", "mis_kl", "train/tis", "behave_"))


def test_every_name_says_what_it_means_there():
    for logs in OURS:
        meanings = LOGS[logs].names()
        assert len(meanings) >= 8
        assert all(len(text) > 20 and text.endswith(".") for text in meanings.values())


def own(text, logs, folder):
    """A preset of one's own."""
    file = folder / "own.toml"
    file.write_text(f'[own]\nlogs = "{logs}"\n{text}\n')
    return catalogue.load(file)["own"]


# ---------------------------------------------------------------- by hand: NeMo-RL

LN2 = math.log(2.0)


def test_nemo_rl_averages_weights_after_truncation(tmp_path):
    """Ratios 4, 1/2, 1: min(·, 2) is 2, 1/2, 1, whose mean is 3.5/3; one of three is out of bounds."""
    found = logged([row([2 * LN2, -LN2]), row([0.0])], tmp_path / "d.parquet", "nemo_rl_tis")

    assert found["train/sampling_importance_ratio"] == pytest.approx(3.5 / 3, rel=1e-7)
    assert found["train/is_oob_ratio"] == pytest.approx(1 / 3, rel=1e-7)


def test_nemo_rl_counts_a_weight_beyond_float32_as_0_which_no_upper_bound_finds(tmp_path):
    """e^90 is inf in float32 and becomes 0: inside [0, 2] for tis, outside [0.5, 5] for icepop."""
    rows = [row([90.0, 0.0], rollout=[-95.0, -1.0])]
    tis = logged(rows, tmp_path / "d.parquet", "nemo_rl_tis")
    icepop = logged(rows, tmp_path / "d.parquet", "nemo_rl_icepop")

    assert tis["train/sampling_importance_ratio"] == pytest.approx(1 / 2, rel=1e-7)  # (0 + 1) / 2
    assert tis["train/is_oob_ratio"] == 0
    assert icepop["train/is_oob_ratio"] == pytest.approx(1 / 2, rel=1e-7)


def test_nemo_rls_exponentials_are_of_float32(tmp_path):
    """Δ = 90 in the second sequence, u = 90 in the third: inf, where float64 would have e^90 = 1.2e39."""
    rows = [row([0.5, 0.0]), row([90.0], rollout=[-95.0]), row([0.0], [90.0], rollout=[-95.0])]
    found = logged(rows, tmp_path / "d.parquet", "nemo_rl_tis")
    none = {name for name, value in found.items() if value is None}

    assert none == {
        f"train/{name}"
        for name in (
            "token_mult_prob_error",
            "gen_kl_error",
            "probs_ratio",
            "probs_ratio_max",
            "approx_entropy",
            "max_seq_mult_prob_error",
            "mean_seq_mult_prob_error",
            "max_seq_mult_prob_error_after_mask",
            "mean_seq_mult_prob_error_after_mask",
        )
    }
    assert found["train/min_seq_mult_prob_error"] == 1
    assert found["train/policy_kl_error"] == pytest.approx((math.exp(-0.5) - 0.5 + 89) / 4)


def test_nemo_rl_knows_no_divergence_where_float32_holds_neither_probability(tmp_path):
    none = logged([row([1.0], rollout=[-105.0])], tmp_path / "d.parquet", "nemo_rl_tis")
    some = logged([row([5.0], rollout=[-105.0])], tmp_path / "d.parquet", "nemo_rl_tis")

    assert none["train/js_divergence_error"] is None
    assert some["train/js_divergence_error"] == pytest.approx(math.log(math.cosh(2.5)))


def test_nemo_rl_counts_a_product_out_of_bounds_by_tokens_and_averages_it_by_sequences(tmp_path):
    """Products 8 (of 3 tokens) and 1 (of 1): min(8, 5) and 1, whose mean is 3; 3 of 4 tokens are outside."""
    found = logged([row([LN2] * 3), row([0.0])], tmp_path / "d.parquet", "nemo_rl_seq_product")

    assert found["train/sampling_importance_ratio"] == pytest.approx(3.0, rel=1e-7)
    assert found["train/is_oob_ratio"] == pytest.approx(3 / 4, rel=1e-7)


def test_nemo_rl_counts_sequences_under_seq_mask_tis(tmp_path):
    """Geometric means 2 (3 tokens) and 1: one of two sequences; its three weights are 0, the other's is 1."""
    found = logged([row([LN2] * 3), row([0.0])], tmp_path / "d.parquet", "nemo_rl_seq_mask_tis")

    assert found["train/is_oob_ratio"] == pytest.approx(1 / 2, rel=1e-7)
    assert found["train/sampling_importance_ratio"] == pytest.approx(1 / 4, rel=1e-7)


def test_nemo_rl_speaks_of_what_the_error_mask_leaves(tmp_path):
    """Errors e^|Δ|: 3 (correct) and (1 + 1.5)/2 = 1.25; above 2 goes the first, tokens and all."""
    rows = [row([math.log(3.0)], reward=1.0), row([0.0, -math.log(1.5)])]
    found = logged(rows, tmp_path / "d.parquet", "nemo_rl_seq_error_mask")

    assert found["train/token_mult_prob_error"] == pytest.approx(1.25, rel=1e-7)
    assert found["train/max_seq_mult_prob_error"] == pytest.approx(3.0)
    assert found["train/mean_seq_mult_prob_error"] == pytest.approx(4.25 / 2)
    assert found["train/max_seq_mult_prob_error_after_mask"] == pytest.approx(1.25)
    assert found["train/num_masked_seqs_by_logprob_error"] == 1
    assert found["train/masked_correct_pct"] == 1
    assert found["train/sampling_importance_ratio"] == pytest.approx((1 + 1 / 1.5) / 2, rel=1e-7)


def test_nemo_rls_js_divergence_is_of_estimates_at_the_sampled_token(tmp_path):
    """p = 0.6, q = 0.2: the mixture is 0.4; k3 of log(3/2) is 1/2 − log 3/2, of log(1/2) log 2 − 1/2."""
    found = logged([row([math.log(3.0)], rollout=[math.log(0.2)])], tmp_path / "d.parquet", "nemo_rl_tis")

    want = 0.5 * (0.5 - math.log(1.5)) + 0.5 * (LN2 - 0.5)
    assert found["train/js_divergence_error"] == pytest.approx(want, rel=1e-7)
    assert found["train/gen_kl_error"] == pytest.approx(3 - 1 - math.log(3), rel=1e-7)
    assert found["train/policy_kl_error"] == pytest.approx(1 / 3 - 1 + math.log(3), rel=1e-7)


@pytest.mark.parametrize("loss", ["reinforce", "cispo", "gspo"])
def test_nemo_rls_ratio_is_the_losss_own(loss, tmp_path):
    """u = 0.1, 0.3 and −0.4; the clip is [0.8, 1.2]. REINFORCE has no ratio: log π_θ stands in its place."""
    rows = [row([0.5, 0.5], [0.6, 0.8], rollout=[-2.0, -3.0]), row([0.5], [0.1], rollout=[-1.0])]
    found = logged(rows, tmp_path / "d.parquet", "own", preset=own(f'loss = "{loss}"', "nemo-rl", tmp_path))

    u = {"cispo": [0.1, 0.3, -0.4], "gspo": [0.2, 0.2, -0.4]}.get(loss, [])
    ratios = [math.exp(x) for x in u] or [-1.4, -2.2, -0.9]
    clipped = [min(max(r, 0.8), 1.2) for r in ratios] if u else ratios
    assert found["train/probs_ratio"] == pytest.approx(sum(ratios) / 3, rel=1e-7)
    assert found["train/probs_ratio_clamped"] == pytest.approx(sum(clipped) / 3, rel=1e-7)
    assert found["train/probs_ratio_max"] == pytest.approx(max(ratios))
    assert found["train/probs_ratio_clamped_min"] == pytest.approx(min(clipped))


def test_nemo_rl_averages_raw_weights_where_none_is_used(tmp_path):
    """The number is made whether or not the correction is on: of 4 and e^90, which is 0."""
    rows = [row([2 * LN2, 90.0], rollout=[-2.0, -95.0], reward=1.0)]
    found = logged(rows, tmp_path / "d.parquet", "own", preset=own("", "nemo-rl", tmp_path))

    assert found["train/sampling_importance_ratio"] == pytest.approx(4 / 2, rel=1e-7)
    assert "train/is_oob_ratio" not in found


# ---------------------------------------------------------------- by hand: slime


def test_slime_averages_samples_not_tokens(tmp_path):
    """Ratios 4, 1 and 2: (2.5 + 2)/2; over tokens it would be 7/3. A sample without a token divides too."""
    rows = [row([2 * LN2, 0.0]), row([LN2])]

    assert logged(rows, tmp_path / "d.parquet", "slime_tis")["train/tis"] == pytest.approx(2.25)
    rows.append(row([0.0], mask=[0]))
    assert logged(rows, tmp_path / "d.parquet", "slime_tis")["train/tis"] == pytest.approx(1.5)


def test_slimes_clip_fraction_counts_what_changed_and_not_what_lies_on_the_bound(tmp_path):
    """Ratios 4, 2, 1 and 1/4: min(·, 2) changes one, [0.5, 5] of IcePop only the last."""
    rows = [row([2 * LN2, LN2, 0.0, -2 * LN2], rollout=[-2 * LN2, -LN2, -1.0, -1.0])]  # log 2 to the last bit

    assert logged(rows, tmp_path / "d.parquet", "slime_tis")["train/tis_clipfrac"] == 1 / 4
    assert logged(rows, tmp_path / "d.parquet", "slime_icepop")["train/tis_clipfrac"] == 1 / 4
    assert logged(rows, tmp_path / "d.parquet", "slime_tis_two_sided")["train/tis_clipfrac"] == 2 / 4


def test_slimes_opsm_fraction_sums_shares_and_divides_by_samples(tmp_path):
    """Drifts mean(R − C) 0.5, 0.5, −0.5; tokens of A < 0 are 1 of 2, 0 of 1, 1 of 1: (1/2 + 0 + 0)/3."""
    rows = [
        row([0.0, 0.0], [-0.5, -0.5]) | {"advantages": [-1.0, 1.0]},
        row([0.0], [-0.5]),
        row([0.0], [0.5], advantage=-1.0),
    ]
    found = logged(rows, tmp_path / "d.parquet", "slime_opsm")

    assert found["train/opsm_clipfrac"] == pytest.approx(1 / 6)
    assert found["train/ppo_kl"] == pytest.approx((0.5 + 0.5 - 0.5) / 3)
    assert "train/tis" not in found
    assert "train/ois" not in found


def test_slimes_opsm_fraction_counts_tool_tokens_above_the_line_only(tmp_path):
    """Two loss tokens and three tool tokens, the drift 0.5: with A = −1 at all of them (2 + 3)/2."""
    one = row([0.0] * 5, [-0.5] * 5, advantage=-1.0, mask=[1, 0, 0, 0, 1])
    mixed = one | {"advantages": [1.0, -1.0, 0.0, -1.0, -1.0]}  # of each token: one in the mask, two outside
    for name in ("slime_opsm", "miles_opsm"):
        assert logged([one], tmp_path / "d.parquet", name)["train/opsm_clipfrac"] == pytest.approx(5 / 2)
        assert logged([mixed], tmp_path / "d.parquet", name)["train/opsm_clipfrac"] == pytest.approx(3 / 2)


def test_slimes_opsm_fraction_gives_tool_tokens_the_advantage_of_their_sample(tmp_path):
    rows = [
        row([0.0] * 4, [-0.5] * 4, mask=[1, 0, 0, 1]) | {"advantages": -1.0},
        row([0.0] * 3, [-0.5] * 3, mask=[1, 0, 1]) | {"advantages": 1.0},
        row([0.0] * 2, [-0.5] * 2, mask=[0, 0]) | {"advantages": -1.0},
    ]
    file = trainer_dumps.write(rows, tmp_path / "d.parquet")
    found = analyze([file], presets=[BUILT_IN["slime_opsm"]]).presets["slime_opsm"].as_logged

    assert found["train/opsm_clipfrac"] == pytest.approx((4 / 2 + 0 + 0) / 3)


def test_miles_compares_the_anchor_with_the_rollout(tmp_path):
    """Under --use-rollout-logprobs that is the rollout itself: 0, where slime has π_θ against it."""
    rows = [row([0.3, -0.1], [0.5, -0.5])]
    slime, miles = (logged(rows, tmp_path / "d.parquet", f"{one}_opsm") for one in ("slime", "miles"))

    assert slime["train/train_rollout_logprob_abs_diff"] == pytest.approx(0.5)
    assert miles["train/train_rollout_logprob_abs_diff"] == miles["train/train_rollout_kl"] == 0
    assert logged(rows, tmp_path / "d.parquet", "miles_tis")[
        "train/train_rollout_logprob_abs_diff"
    ] == pytest.approx(0.2)


def test_miles_logs_the_ess_of_the_update_within_samples(tmp_path):
    """w = 2, 1 and 1: 9/(2 · 5)/…: (3²/(2·5) + 1 + 0)/3 with a sample of one and one without a token."""
    rows = [row([0.0, 0.0], [LN2, 0.0]), row([0.0], [5.0]), row([0.0], mask=[0])]
    found = logged(rows, tmp_path / "d.parquet", "miles_tis")

    assert found["train/ess_ratio"] == pytest.approx((9 / 10 + 1 + 0) / 3)
    small = logged([row([30.0], [5.0])], tmp_path / "d.parquet", "miles_tis")  # w = e^−20, Σw² below 1e-8
    assert small["train/ess_ratio"] == pytest.approx(math.exp(-40) / 1e-8)


def test_miles_bounds_its_k3_twice(tmp_path):
    """Δ = log 2, 5 (k3 142, cut to 10) and −30 (k3 19 at −20, cut to 10)."""
    found = logged([row([LN2]), row([5.0]), row([-30.0])], tmp_path / "d.parquet", "miles_tis")

    assert found["train/train_rollout_kl"] == pytest.approx((1 - LN2 + 10 + 10) / 3)


def test_slimes_loss_is_averaged_after_rejection_and_the_helper_before(tmp_path):
    """Δ = log 4 is rejected (above 2): it is 0 in the loss's mean, and still divides: (0 + log 3/2)/2."""
    found = logged(
        [row([2 * LN2, math.log(1.5)], [0.0, 0.0])], tmp_path / "d.parquet", "slime_mis_token_mask"
    )

    assert found["train/train_rollout_logprob_abs_diff"] == pytest.approx(math.log(1.5) / 2)
    assert found["train/ppo_kl"] == pytest.approx(math.log(1.5) / 2)
    assert found["train/ois"] == pytest.approx((1 / 4 + 1 / 1.5) / 2)
    assert found["train/mis_kl"] == pytest.approx(-math.log(6.0) / 2)
    assert found["train/mis_is_ratio_mean_final"] == pytest.approx((4 + 1.5) / 2)
    assert found["train/mis_tis_mask_fraction_high"] == 1 / 2


def test_the_mis_helper_clamps_chi2_and_not_k3(tmp_path):
    """Δ = 25 alone: k3 is e^25 − 26, χ² ends at e^40 − 1 for the token and for the product of two."""
    found = logged([row([25.0]), row([12.0, 13.0])], tmp_path / "d.parquet", "slime_mis_token_truncate")

    k3 = (math.exp(25) - 26 + (math.exp(12) - 13 + math.exp(13) - 14) / 2) / 2
    assert found["train/mis_k3_kl"] == pytest.approx(k3)
    assert found["train/mis_chi2_seq"] == pytest.approx(math.exp(40) - 1)
    assert found["train/mis_chi2_token"] == pytest.approx(
        (math.exp(40) - 1 + (math.exp(24) + math.exp(26)) / 2 - 1) / 2
    )


def test_the_mis_helper_normalises_by_tokens_of_the_mask_as_it_came(tmp_path):
    """Weights min(4, 2), 1/4, 1 have mean 3.25/3, though 4 and 1/4 are rejected; by samples 1.0625."""
    rows = [row([2 * LN2, -2 * LN2]), row([0.0])]
    found = logged(rows, tmp_path / "d.parquet", "slime_mis")

    assert found["train/mis_batch_norm_factor"] == pytest.approx(3.25 / 3)
    assert found["train/mis_is_ratio_mean_final"] == pytest.approx(1.0625 / (3.25 / 3))
    assert found["train/mis_is_ratio_max_final"] == pytest.approx((2 + 1) / 2 / (3.25 / 3))
    assert found["train/mis_rs_mask_fraction_low"] == pytest.approx(1 / 4)


def test_the_mis_helper_normalises_products_by_all_samples(tmp_path):
    """Products 4 and 1 and a sample without a token: (4 + 1 + 0)/3, logged as 5/3 · 2/3."""
    preset = own('weight = { over = "sum", upper = 5.0, normalize = true }', "slime-mis", tmp_path)
    rows = [row([LN2, LN2]), row([0.0]), row([0.0], mask=[0])]
    found = logged(rows, tmp_path / "d.parquet", "own", preset=preset)

    assert found["train/mis_batch_norm_factor"] == pytest.approx(5 / 3 * 2 / 3)
    assert found["train/mis_is_ratio_mean_final"] == pytest.approx((4 + 1) / (5 / 3) / 3)


def test_the_mis_helpers_metrics_alone_make_no_weight(tmp_path):
    preset = own("apply = false\nweight = { upper = 2.0 }", "slime-mis", tmp_path)
    found = logged(DUMPS["scattered"], tmp_path / "d.parquet", "own", preset=preset)

    assert differences(found, logged_slime.mis(samples(DUMPS["scattered"]), use_tis=False)) == {}


def test_the_mis_helper_divides_by_no_mean_that_is_next_to_nothing(tmp_path):
    """Products e^(−20) are below 1e-8: the factor is 1 and the weights stay."""
    preset = own('weight = { over = "sum", upper = 5.0, normalize = true }', "slime-mis", tmp_path)
    found = logged([row([-30.0]), row([-25.0])], tmp_path / "d.parquet", "own", preset=preset)

    assert found["train/mis_batch_norm_factor"] == 1
    assert found["train/mis_is_ratio_mean_final"] == pytest.approx(math.exp(-20))


@pytest.mark.parametrize(
    ("loss", "share"),
    [("ppo_clip", 1 / 4), ("cispo", 2 / 4), ("reinforce", 0.0), ("gspo", 2 / 4)],
)
def test_slimes_clip_fraction_is_the_losss_own(loss, share, tmp_path):
    """u = (0.3, −0.3) and (0.1, 0.1), or under GSPO (0.1, 0.9); A > 0, and the clip is [0.8, 1.2].

    PPO clips one token of the first sample, CISPO both. GSPO has means 0 and 0.5: all of the second sample.
    """
    rows = [row([0.0, 0.0], [0.3, -0.3]), row([0.0, 0.0], [0.1, 0.9 if loss == "gspo" else 0.1])]
    preset = own(f'loss = "{loss}"\nweight = {{ upper = 2.0 }}', "slime", tmp_path)
    found = logged(rows, tmp_path / "d.parquet", "own", preset=preset)["train/pg_clipfrac"]

    assert found == pytest.approx(share)


# ---------------------------------------------------------------- by hand: AReaL

ACTOR = "ppo_actor/update/"


def test_areals_older_cap_logs_no_share_of_what_it_changed():
    assert {preset.logs for name, preset in BUILT_IN.items() if name.startswith("areal_cap")} == {
        "areal-v1.0.3"
    }
    assert set(LOGS["areal"].names()) - set(LOGS["areal-v1.0.3"].names()) == {FILTERED}


def test_areals_importance_weight_is_0_where_a_token_was_dropped(tmp_path):
    """Behave ratios 8 (dropped, above 5) and 1; updates 2 and 2: the mean is (0 + 2)/2, the smallest 0."""
    found = logged([row([3 * LN2, 0.0], [4 * LN2, LN2])], tmp_path / "d.parquet", "areal_decoupled")

    assert found[f"{ACTOR}importance_weight/avg"] == pytest.approx(1.0)
    assert found[f"{ACTOR}importance_weight/min"] == 0
    assert found[f"{ACTOR}approx_kl/avg"] == pytest.approx(LN2)
    assert found[f"{ACTOR}rs_filtered_fraction"] == 1 / 2


def test_areal_averages_behave_weights_over_survivors(tmp_path):
    """Ratios 8, 1 and 1/2: 8 is dropped, so that the mean is 0.75; KL(θ) too runs over those two only."""
    rows = [row([3 * LN2, 0.0, -LN2], [9.0, LN2, LN2])]
    for name in ("areal_decoupled", "areal_cap_token_mask"):
        found = logged(rows, tmp_path / "d.parquet", name)
        assert found[f"{ACTOR}behave_imp_weight/avg"] == pytest.approx(0.75)
        assert found[f"{ACTOR}behave_approx_kl/avg"] == pytest.approx(-LN2 / 2)
        assert found[f"{ACTOR}compute_logp/kl_div_direct/avg"] == pytest.approx(-LN2)
        assert found[f"{ACTOR}compute_logp/kl_div_taylor/max"] == pytest.approx(LN2**2 / 2)
        assert found[f"{ACTOR}compute_logp/kl_div_dual/avg"] == pytest.approx(2 - 1 - LN2)


def test_areal_logs_nothing_of_no_token(tmp_path):
    """Every token is dropped: means of survivors are not logged, those of valid tokens are."""
    found = logged([row([5.0]), row([6.0])], tmp_path / "d.parquet", "areal_decoupled")

    assert not any("behave" in name or "compute_logp" in name for name in found)
    assert found[f"{ACTOR}importance_weight/avg"] == found[f"{ACTOR}importance_weight/max"] == 0
    assert found[f"{ACTOR}rs_filtered_fraction"] == 1


def test_areals_m2po_edits_the_mask_before_anything_is_counted(tmp_path):
    """Δ² = 1, 0.01, 0: the first goes (0.337 ≥ 0.04), the rest has 0.005; nothing is weighed or filtered."""
    found = logged([row([1.0, 0.1, 0.0], [1.5, 0.3, 0.2])], tmp_path / "d.parquet", "areal_m2po")

    assert found[f"{ACTOR}approx_kl/avg"] == pytest.approx(0.2)
    assert found[f"{ACTOR}importance_weight/min"] == pytest.approx(math.exp(0.2))
    assert not any("behave" in name or "filtered" in name for name in found)


def test_areal_filters_by_rules_and_not_by_the_bound_of_a_weight_that_is_left_as_it_is(tmp_path):
    """Weights 8, 4 and 1 of action none, tokens above 5 rejected: a third is filtered, 4 is not clamped."""
    preset = own('weight = { action = "none", upper = 2.0 }\nreject = [{ upper = 5.0 }]', "areal", tmp_path)
    found = logged([row([3 * LN2, 2 * LN2, 0.0])], tmp_path / "d.parquet", "own", preset=preset)

    assert found[f"{ACTOR}rs_filtered_fraction"] == pytest.approx(1 / 3)
    assert found[f"{ACTOR}behave_imp_weight/max"] == pytest.approx(4.0)


@pytest.mark.parametrize("over", ["token", "mean"])
def test_areals_masked_weights_and_rejected_sequences_both_leave_the_survivors(over, tmp_path):
    """r = (8, 1), (2, 2) and 2 four times: weights above 3 are 0, products above 10 rejected.

    By tokens 1, 2, 2 are left (mean 5/3); by geometric means √8 of two tokens and 2 of two (2.414).
    """
    rows = [row([3 * LN2, 0.0]), row([LN2, LN2]), row([LN2] * 4)]
    weight = f'weight = {{ over = "{over}", action = "mask", upper = 3.0 }}'
    text = f'{weight}\nreject = [{{ over = "sum", upper = 10.0 }}]'
    found = logged(rows, tmp_path / "d.parquet", "own", preset=own(text, "areal", tmp_path))

    want = {"token": (5 / 3, 1.0, 2.0), "mean": ((math.sqrt(8) + 2) / 2, 2.0, math.sqrt(8))}[over]
    assert tuple(found[f"{ACTOR}behave_imp_weight/{end}"] for end in ("avg", "min", "max")) == pytest.approx(
        want
    )
