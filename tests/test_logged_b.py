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


# ---------------------------------------------------------------- by hand

LN2 = math.log(2.0)
ACTOR = "ppo_actor/update/"
FAR = [-95.0, -1.0]
OPSM = [row([0.0] * 5, [-0.5] * 5, advantage=-1.0, mask=[1, 0, 0, 0, 1])]
MIXED = [OPSM[0] | {"advantages": [1.0, -1.0, 0.0, -1.0, -1.0]}]
PRODUCT = 'weight = { over = "sum", upper = 5.0, normalize = true }'
TRIED = {
    # ---- NeMo-RL
    "Weights are averaged after truncation: min(·, 2) of 4, 1/2, 1; one of three is out of bounds": (
        "nemo_rl_tis",
        [row([2 * LN2, -LN2]), row([0.0])],
        {"train/sampling_importance_ratio": 3.5 / 3, "train/is_oob_ratio": 1 / 3},
    ),
    "e^90 is inf in float32 and becomes 0: inside [0, 2] for tis": (
        "nemo_rl_tis",
        [row([90.0, 0.0], rollout=FAR)],
        {"train/sampling_importance_ratio": 1 / 2, "train/is_oob_ratio": 0},
    ),
    "… and outside [0.5, 5] for icepop": (
        "nemo_rl_icepop",
        [row([90.0, 0.0], rollout=FAR)],
        {"train/is_oob_ratio": 1 / 2},
    ),
    "float32 holds neither probability: no divergence": (
        "nemo_rl_tis",
        [row([1.0], rollout=[-105.0])],
        {"train/js_divergence_error": None},
    ),
    "float32 holds one of them": (
        "nemo_rl_tis",
        [row([5.0], rollout=[-105.0])],
        {"train/js_divergence_error": math.log(math.cosh(2.5))},
    ),
    "Products 8 (of 3 tokens) and 1: min(8, 5) and 1 have mean 3 over sequences; 3 of 4 tokens are outside": (
        "nemo_rl_seq_product",
        [row([LN2] * 3), row([0.0])],
        {"train/sampling_importance_ratio": 3.0, "train/is_oob_ratio": 3 / 4},
    ),
    "Geometric means 2 (3 tokens) and 1: one of two sequences; its weights are 0, the other's is 1": (
        "nemo_rl_seq_mask_tis",
        [row([LN2] * 3), row([0.0])],
        {"train/is_oob_ratio": 1 / 2, "train/sampling_importance_ratio": 1 / 4},
    ),
    "Errors e^|Δ|: 3 (correct) and (1 + 1.5)/2 = 1.25; above 2 goes the first, tokens and all": (
        "nemo_rl_seq_error_mask",
        [row([math.log(3.0)], reward=1.0), row([0.0, -math.log(1.5)])],
        {
            "train/token_mult_prob_error": 1.25,
            "train/max_seq_mult_prob_error": 3.0,
            "train/mean_seq_mult_prob_error": 4.25 / 2,
            "train/max_seq_mult_prob_error_after_mask": 1.25,
            "train/num_masked_seqs_by_logprob_error": 1,
            "train/masked_correct_pct": 1,
            "train/sampling_importance_ratio": (1 + 1 / 1.5) / 2,
        },
    ),
    "p = 0.6, q = 0.2: the mixture is 0.4; k3 of log(3/2) is 1/2 − log 3/2, of log(1/2) log 2 − 1/2": (
        "nemo_rl_tis",
        [row([math.log(3.0)], rollout=[math.log(0.2)])],
        {
            "train/js_divergence_error": 0.5 * (0.5 - math.log(1.5)) + 0.5 * (LN2 - 0.5),
            "train/gen_kl_error": 3 - 1 - math.log(3),
            "train/policy_kl_error": 1 / 3 - 1 + math.log(3),
        },
    ),
    "Raw weights are averaged where none is used: of 4 and e^90, which is 0": (
        ("nemo-rl", ""),
        [row([2 * LN2, 90.0], rollout=[-2.0, -95.0], reward=1.0)],
        {"train/sampling_importance_ratio": 4 / 2, "train/is_oob_ratio": "absent"},
    ),
    # ---- slime
    "slime averages samples, not tokens: ratios 4, 1 and 2": (
        "slime_tis",
        [row([2 * LN2, 0.0]), row([LN2])],
        {"train/tis": 2.25},
    ),
    "A sample without a token divides too": (
        "slime_tis",
        [row([2 * LN2, 0.0]), row([LN2]), row([0.0], mask=[0])],
        {"train/tis": 1.5},
    ),
    **{
        f"Ratios 4, 2, 1 and 1/4, log 2 to the last bit: what {name} changes, not what lies on a bound": (
            name,
            [row([2 * LN2, LN2, 0.0, -2 * LN2], rollout=[-2 * LN2, -LN2, -1.0, -1.0])],
            {"train/tis_clipfrac": share},
        )
        for name, share in (("slime_tis", 1 / 4), ("slime_icepop", 1 / 4), ("slime_tis_two_sided", 2 / 4))
    },
    "Drifts mean(R − C) 0.5, 0.5, −0.5; tokens of A < 0 are 1 of 2, 0 of 1, 1 of 1: (1/2 + 0 + 0)/3": (
        "slime_opsm",
        [
            row([0.0, 0.0], [-0.5, -0.5]) | {"advantages": [-1.0, 1.0]},
            row([0.0], [-0.5]),
            row([0.0], [0.5], advantage=-1.0),
        ],
        {
            "train/opsm_clipfrac": 1 / 6,
            "train/ppo_kl": (0.5 + 0.5 - 0.5) / 3,
            "train/tis": "absent",
            "train/ois": "absent",
        },
    ),
    **{
        f"Two loss tokens, three tool tokens, the drift 0.5, {words}, {name}": (
            name,
            rows,
            {"train/opsm_clipfrac": share},
        )
        for name in ("slime_opsm", "miles_opsm")
        for words, rows, share in (
            ("A = −1 at all of them: tool tokens count above the line only", OPSM, 5 / 2),
            ("A of each token: one in the mask, two outside", MIXED, 3 / 2),
        )
    },
    "Under --use-rollout-logprobs slime has π_θ against the rollout": (
        "slime_opsm",
        [row([0.3, -0.1], [0.5, -0.5])],
        {"train/train_rollout_logprob_abs_diff": 0.5},
    ),
    "… and miles the anchor, which is the rollout": (
        "miles_opsm",
        [row([0.3, -0.1], [0.5, -0.5])],
        {"train/train_rollout_logprob_abs_diff": 0, "train/train_rollout_kl": 0},
    ),
    "… or π_old": (
        "miles_tis",
        [row([0.3, -0.1], [0.5, -0.5])],
        {"train/train_rollout_logprob_abs_diff": 0.2},
    ),
    "w = 2 and 1; one token; none: (3²/(2·5) + 1 + 0)/3": (
        "miles_tis",
        [row([0.0, 0.0], [LN2, 0.0]), row([0.0], [5.0]), row([0.0], mask=[0])],
        {"train/ess_ratio": (9 / 10 + 1 + 0) / 3},
    ),
    "w = e^−20, Σw² below 1e-8": (
        "miles_tis",
        [row([30.0], [5.0])],
        {"train/ess_ratio": math.exp(-40) / 1e-8},
    ),
    "miles bounds its k3 twice: Δ = log 2, 5 (k3 142, cut to 10) and −30 (k3 19 at −20, cut to 10)": (
        "miles_tis",
        [row([LN2]), row([5.0]), row([-30.0])],
        {"train/train_rollout_kl": (1 - LN2 + 10 + 10) / 3},
    ),
    "Δ = log 4 is rejected (above 2): 0 in the loss's mean, and still divides; the helper has it": (
        "slime_mis_token_mask",
        [row([2 * LN2, math.log(1.5)], [0.0, 0.0])],
        {
            "train/train_rollout_logprob_abs_diff": math.log(1.5) / 2,
            "train/ppo_kl": math.log(1.5) / 2,
            "train/ois": (1 / 4 + 1 / 1.5) / 2,
            "train/mis_kl": -math.log(6.0) / 2,
            "train/mis_is_ratio_mean_final": (4 + 1.5) / 2,
            "train/mis_tis_mask_fraction_high": 1 / 2,
        },
    ),
    "The helper clamps χ² and not k3: it ends at e^40 − 1 for the token and for the product of two": (
        "slime_mis_token_truncate",
        [row([25.0]), row([12.0, 13.0])],
        {
            "train/mis_k3_kl": (math.exp(25) - 26 + (math.exp(12) - 13 + math.exp(13) - 14) / 2) / 2,
            "train/mis_chi2_seq": math.exp(40) - 1,
            "train/mis_chi2_token": (math.exp(40) - 1 + (math.exp(24) + math.exp(26)) / 2 - 1) / 2,
        },
    ),
    "Weights min(4, 2), 1/4, 1 have mean 3.25/3, though 4 and 1/4 are rejected; by samples 1.0625": (
        "slime_mis",
        [row([2 * LN2, -2 * LN2]), row([0.0])],
        {
            "train/mis_batch_norm_factor": 3.25 / 3,
            "train/mis_is_ratio_mean_final": 1.0625 / (3.25 / 3),
            "train/mis_is_ratio_max_final": (2 + 1) / 2 / (3.25 / 3),
            "train/mis_rs_mask_fraction_low": 1 / 4,
        },
    ),
    "Products 4 and 1 and a sample without a token: (4 + 1 + 0)/3, logged as 5/3 · 2/3": (
        ("slime-mis", PRODUCT),
        [row([LN2, LN2]), row([0.0]), row([0.0], mask=[0])],
        {
            "train/mis_batch_norm_factor": 5 / 3 * 2 / 3,
            "train/mis_is_ratio_mean_final": (4 + 1) / (5 / 3) / 3,
        },
    ),
    "Products e^(−20) are below 1e-8: the factor is 1 and the weights stay": (
        ("slime-mis", PRODUCT),
        [row([-30.0]), row([-25.0])],
        {"train/mis_batch_norm_factor": 1, "train/mis_is_ratio_mean_final": math.exp(-20)},
    ),
    # u = (0.3, −0.3) and (0.1, 0.1), or under GSPO (0.1, 0.9); A > 0, and the clip is [0.8, 1.2]
    **{
        f"PPO clips one token of the first sample, CISPO both, GSPO all of the second: {loss}": (
            ("slime", f'loss = "{loss}"\nweight = {{ upper = 2.0 }}'),
            [row([0.0, 0.0], [0.3, -0.3]), row([0.0, 0.0], [0.1, 0.9 if loss == "gspo" else 0.1])],
            {"train/pg_clipfrac": share},
        )
        for loss, share in (("ppo_clip", 1 / 4), ("cispo", 2 / 4), ("reinforce", 0.0), ("gspo", 2 / 4))
    },
    # ---- AReaL
    "Behave ratios 8 (dropped, above 5) and 1; updates 2 and 2: the mean is (0 + 2)/2, the smallest 0": (
        "areal_decoupled",
        [row([3 * LN2, 0.0], [4 * LN2, LN2])],
        {
            f"{ACTOR}importance_weight/avg": 1.0,
            f"{ACTOR}importance_weight/min": 0,
            f"{ACTOR}approx_kl/avg": LN2,
            f"{ACTOR}rs_filtered_fraction": 1 / 2,
        },
    ),
    **{
        f"Ratios 8, 1 and 1/2: 8 is dropped, so that the mean is 0.75; KL(θ) too is of those two: {name}": (
            name,
            [row([3 * LN2, 0.0, -LN2], [9.0, LN2, LN2])],
            {
                f"{ACTOR}behave_imp_weight/avg": 0.75,
                f"{ACTOR}behave_approx_kl/avg": -LN2 / 2,
                f"{ACTOR}compute_logp/kl_div_direct/avg": -LN2,
                f"{ACTOR}compute_logp/kl_div_taylor/max": LN2**2 / 2,
                f"{ACTOR}compute_logp/kl_div_dual/avg": 2 - 1 - LN2,
            },
        )
        for name in ("areal_decoupled", "areal_cap_token_mask")
    },
    "Every token is dropped: means of survivors are not logged, those of valid tokens are": (
        "areal_decoupled",
        [row([5.0]), row([6.0])],
        {
            f"{ACTOR}behave_imp_weight/avg": "absent",
            f"{ACTOR}compute_logp/kl_div_dual/max": "absent",
            f"{ACTOR}importance_weight/avg": 0,
            f"{ACTOR}importance_weight/max": 0,
            f"{ACTOR}rs_filtered_fraction": 1,
        },
    ),
    "Δ² = 1, 0.01, 0: M2PO drops the first before anything is counted; nothing is weighed or filtered": (
        "areal_m2po",
        [row([1.0, 0.1, 0.0], [1.5, 0.3, 0.2])],
        {
            f"{ACTOR}approx_kl/avg": 0.2,
            f"{ACTOR}importance_weight/min": math.exp(0.2),
            f"{ACTOR}behave_imp_weight/avg": "absent",
            f"{ACTOR}rs_filtered_fraction": "absent",
        },
    ),
    "Weights 8, 4 and 1 of action none, tokens above 5 rejected: a third is filtered, 4 is not clamped": (
        ("areal", 'weight = { action = "none", upper = 2.0 }\nreject = [{ upper = 5.0 }]'),
        [row([3 * LN2, 2 * LN2, 0.0])],
        {f"{ACTOR}rs_filtered_fraction": 1 / 3, f"{ACTOR}behave_imp_weight/max": 4.0},
    ),
    # r = (8, 1), (2, 2) and 2 four times: weights above 3 are 0, products above 10 rejected. By tokens
    # 1, 2 and 2 are left (mean 5/3); by geometric means √8 of two tokens and 2 of two
    **{
        f"Masked weights and rejected sequences both leave the survivors: {over}": (
            (
                "areal",
                f'weight = {{ over = "{over}", action = "mask", upper = 3.0 }}\n'
                'reject = [{ over = "sum", upper = 10.0 }]',
            ),
            [row([3 * LN2, 0.0]), row([LN2, LN2]), row([LN2] * 4)],
            {
                f"{ACTOR}behave_imp_weight/{end}": value
                for end, value in zip(("avg", "min", "max"), want, strict=True)
            },
        )
        for over, want in (
            ("token", (5 / 3, 1.0, 2.0)),
            ("mean", ((math.sqrt(8) + 2) / 2, 2.0, math.sqrt(8))),
        )
    },
}
"""What is computed by hand → a built-in row, or (logs, the text of a preset); the dump; what is logged."""


@pytest.mark.parametrize("what", TRIED)
def test_what_is_logged_of_a_dump_that_fits_on_a_line(what, tmp_path):
    name, rows, want = TRIED[what]
    preset = BUILT_IN[name] if isinstance(name, str) else own(name[1], name[0], tmp_path)
    found = logged(rows, tmp_path / "d.parquet", preset.name, preset=preset)
    found = {key: found.get(key, "absent") for key in want}

    assert {key: value for key, value in found.items() if not isinstance(value, float)} == {
        key: value for key, value in want.items() if value is None or value == "absent"
    }
    numbers = {key: value for key, value in want.items() if value not in (None, "absent")}
    assert {key: found[key] for key in numbers} == pytest.approx(numbers, rel=1e-7, abs=1e-12)


def test_nemo_rls_exponentials_are_of_float32(tmp_path):
    """Δ = 90 in the second sequence, u = 90 in the third: inf, where float64 would have e^90 = 1.2e39."""
    rows = [row([0.5, 0.0]), row([90.0], rollout=[-95.0]), row([0.0], [90.0], rollout=[-95.0])]
    found = logged(rows, tmp_path / "d.parquet", "nemo_rl_tis")
    errors = [f"{end}_seq_mult_prob_error{of}" for end in ("max", "mean") for of in ("", "_after_mask")]
    names = ["token_mult_prob_error", "gen_kl_error", "probs_ratio", "probs_ratio_max", "approx_entropy"]

    assert {name for name, value in found.items() if value is None} == {
        f"train/{name}" for name in names + errors
    }
    assert found["train/min_seq_mult_prob_error"] == 1
    assert found["train/policy_kl_error"] == pytest.approx((math.exp(-0.5) - 0.5 + 89) / 4)


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


def test_slimes_opsm_fraction_gives_tool_tokens_the_advantage_of_their_sample(tmp_path):
    rows = [
        row([0.0] * 4, [-0.5] * 4, mask=[1, 0, 0, 1]) | {"advantages": -1.0},
        row([0.0] * 3, [-0.5] * 3, mask=[1, 0, 1]) | {"advantages": 1.0},
        row([0.0] * 2, [-0.5] * 2, mask=[0, 0]) | {"advantages": -1.0},
    ]
    file = trainer_dumps.write(rows, tmp_path / "d.parquet")
    found = analyze([file], presets=[BUILT_IN["slime_opsm"]]).presets["slime_opsm"].as_logged

    assert found["train/opsm_clipfrac"] == pytest.approx((4 / 2 + 0 + 0) / 3)


def test_the_mis_helpers_metrics_alone_make_no_weight(tmp_path):
    preset = own("apply = false\nweight = { upper = 2.0 }", "slime-mis", tmp_path)
    found = logged(DUMPS["scattered"], tmp_path / "d.parquet", "own", preset=preset)

    assert differences(found, logged_slime.mis(samples(DUMPS["scattered"]), use_tis=False)) == {}


def test_areals_older_cap_logs_no_share_of_what_it_changed():
    assert {p.logs for name, p in BUILT_IN.items() if name.startswith("areal_cap")} == {"areal-v1.0.3"}
    assert set(LOGS["areal"].names()) - set(LOGS["areal-v1.0.3"].names()) == {FILTERED}
