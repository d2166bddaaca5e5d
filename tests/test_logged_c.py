"""prime-rl, SkyRL, ROLL and open-instruct in their own numbers: against a restatement, and by hand."""

import functools
import math
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from logged_c_reference import COLUMNS, WORDS, Padded, open_instruct_debug

from offpol_diag.analyze import analyze
from offpol_diag.presets import Preset, Weight, catalogue
from offpol_diag.trainers import LOGS

OURS = ("prime-rl", "skyrl", "roll", "open-instruct")
PRESETS = tuple(one for one in catalogue.load().values() if one.logs in OURS)


def test_every_row_of_these_trainers_is_restated():
    assert set(WORDS) == {one.name for one in PRESETS}


# ---------------------------------------------------------------- dumps


def rows_of(seed, lengths, sigma, *, wild=0.0, holes=0.0, empty=()):
    """Columns whose Δ have spread `sigma`, a share `wild` of them far beyond every clamp."""
    rng = np.random.default_rng(seed)
    found = {name: [] for name in COLUMNS.values()}
    far = np.array([-31.0, -22.0, -12.0, -9.5, -6.0, 6.0, 9.5, 12.0, 22.0, 31.0])
    for i, n in enumerate(lengths):
        middle = rng.normal() * sigma
        old, current = (middle + sigma * rng.normal(size=n) for _ in range(2))
        old = np.where(rng.random(n) < wild, rng.choice(far, n), old)
        current = np.where(rng.random(n) < wild, rng.choice(far, n), current)
        rollout = -rng.exponential(0.4, n) - np.maximum(0.0, np.maximum(old, current))
        mask = (rng.random(n) >= holes).astype(np.int8)
        mask[0] = 1
        found["rollout_log_probs"].append(rollout)
        found["old_log_probs"].append(rollout + old)
        found["current_log_probs"].append(rollout + current)
        found["response_mask"].append(np.zeros_like(mask) if i in empty else mask)
        found["advantages"].append(rng.choice([-1.5, -0.2, 0.0, 0.7, 2.0], n))
        found["entropy"].append(rng.exponential(0.5, n))
    return found


def ragged(seed, count=24, most=40):
    return np.random.default_rng(seed).integers(1, most, count)


DUMPS = {
    "near": rows_of(1, ragged(1), 1e-3),
    "far": rows_of(2, ragged(2), 0.4, holes=0.2),
    "farther": rows_of(3, ragged(3), 1.5, holes=0.3, empty=(0, 7, 23)),
    "wild": rows_of(4, ragged(4, 40), 0.02, wild=0.06, holes=0.1, empty=(3,)),
    "wilder": rows_of(5, ragged(5), 0.3, wild=0.5, holes=0.4),
    "single tokens": rows_of(6, [1] * 20, 0.5, wild=0.1),
    "one row": rows_of(7, [37], 0.3, holes=0.2),
    "one token": rows_of(8, [1], 0.3),
    "one length": rows_of(9, [16] * 12, 0.05),
    "one of five has tokens": rows_of(10, [5, 7, 3, 4, 6], 0.4, empty=(0, 1, 3, 4)),
}


def logged_of(columns, presets=PRESETS, parts=1):
    """Preset → as_logged, and what it needs; the dump in so many files."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        count = len(columns["rollout_log_probs"])
        for part in range(parts):
            at = range(part * count // parts, (part + 1) * count // parts)
            paths.append(Path(folder) / f"part{part}.parquet")
            pq.write_table(pa.table({k: [v[i] for i in at] for k, v in columns.items()}), paths[-1])
        results = analyze([str(path) for path in paths], presets=presets).presets
    return {name: result.as_logged for name, result in results.items()}


@functools.cache
def logged_of_dump(stem, parts=1):
    return logged_of(DUMPS[stem], parts=parts)


def close(got, want, rel=1e-9):
    if got is None:
        return not math.isfinite(want)
    return math.isclose(got, want, rel_tol=rel, abs_tol=1e-15)


def differences(got, want, rel=1e-9):
    names = sorted({*got, *want})
    return {
        name: (got.get(name, "absent"), want.get(name, "absent"))
        for name in names
        if name not in got or name not in want or not close(got[name], want[name], rel)
    }


@pytest.mark.parametrize("stem", list(DUMPS))
def test_a_row_logs_what_its_trainer_would(stem):
    for name, words in WORDS.items():
        with np.errstate(over="ignore", invalid="ignore"):
            want = words(Padded(DUMPS[stem]))
        rel = 1e-6 if stem == "near" and name.startswith("prime") else 1e-9
        assert differences(logged_of_dump(stem)[name], want, rel) == {}, name


def test_how_a_dump_is_cut_changes_nothing():
    whole, parts = logged_of_dump("wild"), logged_of_dump("wild", parts=3)
    for name, logged in whole.items():
        assert differences(parts[name], {k: math.nan if v is None else v for k, v in logged.items()}) == {}


# ---------------------------------------------------------------- by hand

LN = math.log


def dump(rollout, old=None, current=None, advantages=None, mask=None, entropy=None):
    """A dump from probabilities."""
    given = {"rollout_log_probs": rollout, "old_log_probs": old, "current_log_probs": current}
    columns = {name: [[LN(p) for p in row] for row in rows] for name, rows in given.items() if rows}
    plain = {"advantages": advantages, "response_mask": mask, "entropy": entropy}
    return columns | {name: rows for name, rows in plain.items() if rows}


def one(name, columns):
    return logged_of(columns, (catalogue.load()[name],))[name]


def ratios(rows, below=0.001):
    """Rollout and train probabilities whose ratios are these."""
    return [[below for _ in row] for row in rows], [[below * r for r in row] for row in rows]


def test_prime_masks_a_token_without_advantage_and_counts_it_on_neither_side():
    """π falls from 0.5 to 0.2, by more than 0.2; in row 1 with A = 0, in row 2 with A = −1 and A = +1."""
    columns = dump(
        rollout=[[0.5, 0.5], [0.5, 0.5]],
        current=[[0.2, 0.5], [0.2, 0.2]],
        advantages=[[0.0, 1.0], [-1.0, 1.0]],
    )
    logged = one("prime_rl_dppo", columns)
    assert logged["is_masked/mean"] == (1 / 2 + 1 / 2) / 2
    assert logged["is_masked_low/mean"] == (0 + 1 / 2) / 2
    assert logged["is_masked_high/mean"] == 0
    assert logged["masked_advantage_negative/mean"] == (0 + 1) / 2
    assert logged["masked_advantage_positive/mean"] == 0
    assert logged["masked_mismatch_kl/mean"] == pytest.approx(0.4 - 1 - LN(0.4))
    assert "kl_ent_ratio/mean" not in logged


def test_prime_averages_over_sequences_now_and_over_tokens_then():
    """One dropped token in a row of one; three kept ones in the other; a third row has no loss token."""
    columns = dump(
        rollout=[[0.05], [0.05, 0.05, 0.05], [0.05]],
        current=[[0.95], [0.05, 0.05, 0.05], [0.95]],
        mask=[[1], [1, 1, 1], [0]],
    )
    kl = 19 - 1 - LN(19)
    now, then = one("prime_rl_ipo", columns), one("prime_rl_v02_token", columns)
    assert now["is_masked/mean"] == pytest.approx((1 + 0 + 0) / 3)
    assert then["is_masked/mean"] == pytest.approx((1 + 0 + 0 + 0) / 4)
    assert then["is_masked_high/mean"] == pytest.approx(1 / 4)
    assert now["mismatch_kl/all/mean"] == pytest.approx(kl / 4)
    assert then["mismatch_kl/mean"] == pytest.approx((kl + 0 + 0) / 3)
    assert then["geo_seq_ratio/mean"] == pytest.approx((19 + 1 + 1) / 3)
    assert then["geo_masked_high/mean"] == pytest.approx(1 / 3)


def test_prime_divides_mean_kl_by_mean_entropy():
    """KL 1 − ln 2 and 0; entropies 0.1 and 0.5: their mean is 0.3, and no ratio of a token enters."""
    columns = dump([[0.1, 0.1]], current=[[0.2, 0.1]], entropy=[[0.1, 0.5]])
    assert one("prime_rl_ipo", columns)["kl_ent_ratio/mean"] == pytest.approx((1 - LN(2)) / 2 / 0.3)


def test_skyrl_counts_padding_as_a_ratio_of_0():
    """Ratios 2, 2 and 2 in rows of two and one: padded to 2, 2, 2, 0, of mean 1.5 and variance 3/3."""
    rollout, old = ratios([[2, 2], [2]])
    logged = one("skyrl_tis_token", dump(rollout, old))
    assert logged["is_ratio_mean"] == pytest.approx(2)
    assert logged["is_ratio_min"] == 0
    assert logged["is_ratio_std"] == pytest.approx(math.sqrt((3 * 0.5**2 + 1.5**2) / 3))
    rollout, old = ratios([[2, 3], [2, 2]])
    assert one("skyrl_tis_token", dump(rollout, old))["is_ratio_min"] == pytest.approx(2)


@pytest.mark.parametrize("name", ["skyrl_rollout_is", "skyrl_dppo_tv", "skyrl_cispo_rollout"])
def test_skyrls_smallest_difference_of_a_minibatch_is_0_where_anything_is_masked_or_padding(name):
    """|log 2|, |log 3| and |log 2|: padded to four entries, or one of four masked, the smallest is 0."""
    for rows, mask, least in (
        ([[2, 3], [2, 2]], [[1, 1], [1, 1]], LN(2)),
        ([[2, 3], [2, 2]], [[1, 1], [1, 0]], 0),
        ([[2, 3], [2]], [[1, 1], [1]], 0),
    ):
        rollout, current = ratios(rows)
        advantages = [[1.0] * len(row) for row in rows]
        logged = one(name, dump(rollout, None, current, advantages, mask))
        assert logged["policy/minibatch_rollout_logprobs_abs_diff_min"] == pytest.approx(least)
        assert logged["policy/minibatch_rollout_logprobs_abs_diff_max"] == pytest.approx(LN(3))


def test_skyrl_counts_each_mask_over_what_the_ones_before_it_left():
    """Row 1 has an outlier; row 2 loses its token of 6, and without it passes cap and band."""
    rollout, old = ratios([[200, 1], [6, 1.005], [1, 1]])
    logged = one("skyrl_all", dump(rollout, old))
    assert logged["is_ratio_mean"] == pytest.approx((200 + 1 + 6 + 1.005 + 1 + 1) / 6)
    assert logged["outlier_seq_masked_ratio"] == logged["outlier_seq_over_high_ratio"] == pytest.approx(1 / 3)
    assert logged["outlier_seq_under_low_ratio"] == 0
    assert logged["token_mask_ratio"] == 1 / 4
    assert logged["tis_seq_clip_high_ratio"] == 0
    assert logged["geo_sequence_mask_masked_ratio"] == 0
    assert one("skyrl_tis_sequence", dump(rollout, old))["tis_seq_clip_high_ratio"] == pytest.approx(2 / 3)


def test_skyrl_counts_rows_without_a_token_among_its_sequences():
    rollout, old = ratios([[4], [1]])
    logged = one("skyrl_product_mask", dump(rollout, old, mask=[[1], [0]]))
    assert logged["product_sequence_mask_over_high_ratio"] == 1 / 2


def test_roll_averages_the_means_of_sequences_that_have_a_token():
    """Ratios 2 in a row of one and 1 in a row of three: 1.5, where a mean over tokens would be 1.25."""
    rollout, old = ratios([[2], [1, 1, 1], [9]])
    logged = one("roll_is_token", dump(rollout, old, mask=[[1], [1, 1, 1], [0]]))
    assert logged["actor/train_infer_ratio_token_mean@sum"] == pytest.approx((2 + 1) / 2, rel=1e-7)
    assert logged["actor/is_weight_clipfrac@sum"] == pytest.approx(1 / 4)


def test_roll_takes_the_mean_of_each_turn():
    """Turns of one token, r = 4 and 1: their mean is 2.5, the sequence's geometric mean 2, its product 4."""
    rollout, old = ratios([[4, 7, 1]])
    logged = one("roll_filter_segment", dump(rollout, old, mask=[[1, 0, 1]]))
    get = "actor/train_infer_{}_mean@sum".format
    assert logged[get("ratio_segment")] == pytest.approx(2.5, rel=1e-7)
    assert logged[get("ratio_geometric")] == pytest.approx(2, rel=1e-7)
    assert logged[get("ratio_sequence")] == pytest.approx(4, rel=1e-7)
    assert logged[get("diff_geometric")] == pytest.approx((0.003 + 0) / 2, rel=1e-7)
    assert logged[get("diff_sequence")] == pytest.approx(0.003, rel=1e-7)
    assert logged["actor/train_infer_segment_ratio_mask_mean@sum"] == 1 / 2
    assert logged["actor/train_infer_final_mask_mean"] == pytest.approx(1 / 2, rel=1e-7)


def test_open_instruct_drops_what_raises_the_distance_and_counts_its_clamp_too():
    """r = 4 and 0.5 with A = 1: mean |r − 1| = 1.75 > 1.1; the first has A·Δ > 0, goes, and was clamped."""
    rollout, old = ratios([[4, 0.5]])
    logged = one("open_instruct_rho_tv", dump(rollout, old, advantages=[[1.0, 1.0]]))
    assert logged["val/rho_drop_frac"] == logged["val/rho_drop_high_frac"] == 1 / 2
    assert logged["val/rho_drop_low_frac"] == 0
    assert logged["val/rho_weight"] == pytest.approx((0 + 0.5) / 2)
    assert logged["val/rho_clipfrac"] == 1 / 2


def test_open_instruct_clamps_the_log_of_rho_to_10():
    columns = {"rollout_log_probs": [[-40.0, -1.0]], "old_log_probs": [[-10.0, -1.0]]}
    assert one("open_instruct_rho_mask", columns)["val/rho_drop_high_frac"] == 1 / 2
    assert one("open_instruct_rho_clamp", columns)["val/rho_weight"] == pytest.approx((2 + 1) / 2)
    logged = one("open_instruct_rho_sequence", columns)
    assert logged["val/rho_drop_frac"] == logged["val/rho_drop_high_frac"] == 1
    assert logged["debug/vllm_vs_local_logprob_diff_mean"] == pytest.approx(15)


def test_open_instruct_counts_every_token_of_a_sequence_it_clamps():
    """Geometric means 4 and 1 in rows of two and one, clamped at 2."""
    rollout, old = ratios([[2, 8], [1]])
    weight = Weight(over="mean", action="truncate", upper=2.0, safety=10.0, safety_at="token")
    mine = Preset("mine", "", weight=weight, logs="open-instruct")
    logged = logged_of(dump(rollout, old), (mine,))["mine"]
    assert logged["val/rho_clipfrac"] == pytest.approx(2 / 3)
    assert logged["val/rho_weight"] == pytest.approx((2 + 2 + 1) / 3)


def test_open_instruct_s_ratio_variance_is_between_rows():
    """Rows of one and three tokens with mean π_θ/π_old of 2 and 1: mean 5/4, variance (0.75² + 3·0.25²)/4."""
    rollout, old = ratios([[1], [1, 1, 1]])
    current = [[0.002], [0.0005, 0.001, 0.0015]]
    logged = one("open_instruct_rho_clamp", dump(rollout, old, current))
    assert logged["val/ratio"] == pytest.approx(5 / 4)
    assert logged["val/ratio_var"] == pytest.approx((0.75**2 + 3 * 0.25**2) / 4)


# ---------------------------------------------------------------- what a dump lacks, and what names mean


def test_names_whose_columns_the_dump_lacks_are_left_out():
    both = logged_of({name: DUMPS["far"][name] for name in ("rollout_log_probs", "old_log_probs")})
    skyrl_names = set(logged_of_dump("far")["skyrl_all"])
    assert skyrl_names - set(both["skyrl_all"]) == {"clip_ratio"}
    lost = set(logged_of_dump("far")["open_instruct_rho_mask"]) - set(both["open_instruct_rho_mask"])
    assert lost == {"val/ratio", "val/ratio_var"}
    assert both["prime_rl_ipo"] == both["skyrl_dppo_tv"] == both["open_instruct_rho_tv"] == {}
    assert both["roll_turn"].keys() == logged_of_dump("far")["roll_turn"].keys()


def test_open_instruct_takes_old_for_local_where_there_is_no_current():
    columns = {name: DUMPS["one length"][name] for name in ("rollout_log_probs", "old_log_probs")}
    want = open_instruct_debug(*(np.concatenate(columns[f"{p}_log_probs"]) for p in ("old", "rollout")))
    logged = one("open_instruct_rho_clamp", columns)
    assert differences({name: logged[name] for name in want}, want) == {}


@pytest.mark.parametrize("logs", OURS)
def test_every_name_that_is_logged_has_a_meaning(logs):
    said = LOGS[logs].names()
    logged = {
        name
        for preset in PRESETS
        if preset.logs == logs
        for stem in DUMPS
        for name in logged_of_dump(stem)[preset.name]
    }
    assert logged == set(said)
    assert all(len(text) > 15 for text in said.values())


def test_a_name_with_two_meanings_says_both():
    assert "Under other presets" in LOGS["prime-rl"].names()["kl_ent_ratio/mean"]
