"""What one trainer does and its neighbour does not, each in numbers that fit on a line.

A row is told by the ratios r or the log-ratios Δ of its tokens; what comes back is what the loss of each
trained token is multiplied by.
"""

from __future__ import annotations

from math import exp, log

import pytest

from tests.trainer_dumps import exact_row, probable_row
from tests.trainers.ours import ours, read

NOTHING = 0.0


@pytest.fixture
def factors(tmp_path):
    """(name of a row, rows of a dump) → factors of their tokens, one list for all."""
    return lambda name, *rows: ours(name, read(list(rows), tmp_path / "dump.parquet"))[0].tolist()


@pytest.fixture
def counted(tmp_path):
    """(name of a row, rows of a dump) → how many tokens the loss is divided by."""
    return lambda name, *rows: int(ours(name, read(list(rows), tmp_path / "dump.parquet"))[1].sum())


def of_logs(*deltas, **more):
    return exact_row(list(deltas), **more)


def of_ratios(*ratios, **more):
    return exact_row([log(r) for r in ratios], **more)


def nearly(*numbers):
    return pytest.approx(list(numbers), rel=1e-12, abs=1e-300)


# ---------------------------------------------------------------- TRL, ms-swift, OpenRLHF


def test_trl_keeps_the_product_however_small_where_ms_swift_keeps_the_tokens_ratio(factors):
    row = of_logs(-3.0, -3.0, -3.0, -3.0)

    assert factors("trl_sequence_mask", row) == nearly(*[exp(-12)] * 4)
    assert factors("swift_sequence_mask", row) == nearly(*[exp(-3)] * 4)


def test_a_sequence_is_a_product_to_trl_and_a_geometric_mean_to_ms_swift(factors):
    row = of_logs(0.6, 0.6, 0.6)  # ∏r = e^1.8 = 6.05

    assert factors("trl_sequence_truncate", row) == nearly(3, 3, 3)
    assert factors("trl_sequence_mask", row) == [NOTHING] * 3
    assert factors("swift_sequence_truncate", row) == nearly(*[exp(0.6)] * 3)


def test_ms_swift_gates_a_sequence_by_its_geometric_mean_and_weighs_with_raw_token_ratios(factors):
    assert factors("swift_sequence_mask", of_logs(2.0, -2.0, 0.3)) == nearly(exp(2), exp(-2), exp(0.3))
    assert factors("swift_sequence_mask", of_logs(1.0, 1.0, 0.2)) == [NOTHING] * 3  # e^(2.2/3) = 2.08 > 2


def test_openrlhf_raises_small_ratios_to_its_lower_bound(factors):
    row = of_ratios(0.1, 0.6, 7.0)

    assert factors("openrlhf_tis", row) == nearly(0.5, 0.6, 5)
    assert factors("trl_token_truncate", row) == nearly(0.1, 0.6, 3)


@pytest.mark.parametrize(("advantage", "kept"), [(-1.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
@pytest.mark.parametrize("name", ["deepseek_v32_mask", "swift_opsm"])
def test_a_drifted_sequence_goes_only_where_its_advantage_is_negative(name, advantage, kept, factors):
    row = of_logs(0.0, 0.0, current=[-0.3, 0.0], advantage=advantage)  # mean(log π_rollout − log π_θ) = 0.15

    assert factors(name, row) == [kept, kept]


def test_trls_off_policy_mask_asks_the_current_policy_and_its_weight_the_old_one(factors):
    far, near = ([-1.2, 0.0], [-0.8, 0.0])  # 0.6 and 0.4 nats per token; its bound is 0.5

    assert factors("trl_off_policy_mask", of_ratios(1.5, 1.0, current=far, advantage=-1.0)) == [0, 0]
    assert factors("trl_off_policy_mask", of_ratios(1.5, 1.0, current=near, advantage=-1.0)) == nearly(
        1.5, 1.5
    )


# ---------------------------------------------------------------- NeMo-RL


def test_a_weight_beyond_float32_is_nothing_to_nemo_and_two_to_those_who_cap_it(factors):
    row = of_logs(100.0, 88.0, 0.0)

    assert factors("nemo_rl_tis", row) == nearly(0, 2, 1)
    assert factors("vanilla_is", row) == nearly(0, exp(88), 1)
    for name in ("token_is", "tis", "slime_tis", "areal_token_clamp", "skyrl_tis_token"):
        assert factors(name, row) == nearly(2, 2, 1)


def test_a_product_beyond_float32_drops_its_sequence_in_nemo(factors):
    assert factors("nemo_rl_seq_product", of_logs(60.0, 40.0)) == [NOTHING, NOTHING]
    assert factors("nemo_rl_seq_product", of_logs(60.0, 20.0)) == nearly(5, 5)


def test_only_nemos_error_mask_leaves_the_denominator(counted):
    row = of_logs(1.0, 1.0)  # e^|Δ| = 2.72 > 2, and outside every band

    assert counted("nemo_rl_seq_error_mask", row, of_logs(0.0)) == 1
    assert counted("nemo_rl_seq_mask_tis", row, of_logs(0.0)) == 3
    assert counted("nemo_rl_icepop", of_logs(3.0, 3.0), of_logs(0.0)) == 3


# ---------------------------------------------------------------- slime


def test_slimes_opsm_asks_each_tokens_advantage_and_the_others_the_sequences(factors):
    drifted = {"current": [-0.5, -0.5, -0.5, -0.5]}
    negative = of_logs(0.0, 0.0, 0.0, 0.0, advantage=[-1.0, 2.0, 0.0, -3.0], **drifted)  # mean −0.5
    positive = of_logs(0.0, 0.0, 0.0, 0.0, advantage=[-1.0, 4.0, 0.0, -1.0], **drifted)  # mean 0.5

    assert factors("slime_opsm", negative) == [0, 1, 1, 0]
    assert factors("slime_opsm", positive) == [0, 1, 1, 0]
    assert factors("deepseek_v32_mask", negative) == [0, 0, 0, 0]
    assert factors("deepseek_v32_mask", positive) == [1, 1, 1, 1]


def test_slimes_mis_divides_by_the_mean_before_anything_is_rejected(factors):
    mean = (0.25 + 1 + 2) / 3  # of the bounded weights; the first and the last token are then rejected

    assert factors("slime_mis", of_ratios(0.25, 1.0, 4.0)) == nearly(0, 1 / mean, 0)


def test_a_veto_needs_a_ratio_truly_below_its_bound(factors):
    below = log(1e-4) - 1e-9

    assert factors("slime_mis_veto", of_logs(log(1e-4), 0.0)) == nearly(1e-4, 1)
    assert factors("slime_mis_veto", of_logs(below, 0.0)) == [NOTHING, NOTHING]
    assert factors("slime_mis_veto", of_logs(50.0, 0.0)) == nearly(2, 1)


# ---------------------------------------------------------------- AReaL


def test_areals_k1_is_the_log_ratio_itself(factors):
    assert factors("areal_token_k1", of_logs(0.8, -0.8)) == nearly(0, exp(-0.8))
    assert factors("areal_sequence_k1", of_logs(0.04, 0.0)) == [0, 0]  # mean Δ = 0.02 > 0.01
    assert factors("areal_sequence_k1", of_logs(-0.04, 0.0)) == nearly(exp(-0.04), 1)


def test_areals_k3_punishes_small_ratios_and_verls_large_ones(factors):
    row = of_logs(-1.6, 1.6)  # e^1.6 − 1 − 1.6 = 2.35 on one side, e^−1.6 − 1 + 1.6 = 0.80 on the other

    assert factors("areal_token_k3", row) == nearly(0, exp(1.6))
    assert factors("verl_2026_01_rs_token_k3", row) == [1, 0]


def test_areals_sequence_weight_is_geometric_whatever_is_tested(factors):
    assert factors("areal_sequence_mask_sum", of_logs(0.5, 0.1)) == nearly(exp(0.3), exp(0.3))  # ∏r = 1.82
    assert factors("areal_sequence_mask_sum", of_logs(0.5, 0.3)) == [0, 0]  # ∏r = 2.23
    assert factors("areal_sequence_mask_max", of_ratios(99.0, 1.0)) == nearly(99**0.5, 99**0.5)
    assert factors("areal_sequence_mask_max", of_ratios(101.0, 1.0)) == [0, 0]


def test_m2pos_threshold_is_on_squares_and_what_goes_leaves_the_denominator(factors, counted):
    below = of_logs(0.1, 0.1, 0.3)  # (0.01 + 0.01 + 0.09) / 3 = 0.0367 < 0.04
    above = of_logs(0.1, 0.1, 0.32)  # (0.01 + 0.01 + 0.1024) / 3 = 0.0408

    assert factors("areal_m2po", below) == [1, 1, 1]
    assert factors("areal_m2po", above) == [1, 1, 0]
    assert counted("areal_m2po", above) == 2
    assert factors("areal_m2po", of_logs(1.0, 2.0)) == [1, 0]  # never everything


# ---------------------------------------------------------------- prime-rl, SkyRL


def test_zero_advantage_takes_prime_rls_lower_bound_and_none_of_skyrls(factors):
    fallen, risen = (probable_row([(0.5, p)], advantage=0.0) for p in (0.2, 0.8))

    assert factors("prime_rl_dppo", fallen) == [NOTHING]
    assert factors("skyrl_dppo_tv", fallen) == nearly(0.4)
    assert factors("prime_rl_dppo", risen) == nearly(1.6)
    assert factors("skyrl_dppo_tv", risen) == nearly(1.6)


def test_dppo_lets_a_token_come_back_and_ipo_does_not(factors):
    back = probable_row([(0.5, 0.2), (0.5, 0.45)], advantage=1.0)  # fallen, and pushed up again

    assert factors("prime_rl_dppo", back) == nearly(0.4, 0.9)
    assert factors("prime_rl_ipo", back) == nearly(0, 0.9)


def test_prime_rl_v02_drops_a_sequence_for_a_ratio_above_100_and_for_none_below(factors):
    assert factors("prime_rl_v02_token", of_ratios(101.0, 0.9)) == [0, 0]
    assert factors("prime_rl_v02_token", of_ratios(99.0, 0.9)) == nearly(0, 0.9)  # √(99·0.9) = 9.4 ≤ 10
    assert factors("prime_rl_v02_token", of_ratios(0.02, 1.0)) == nearly(0, 1)  # √0.02 = 0.14 ≥ 0.1
    assert factors("prime_rl_v02_token", of_ratios(0.005, 1.0)) == [0, 0]  # √0.005 = 0.07


def test_in_skyrl_a_sequence_passes_because_its_worst_token_is_gone(factors):
    assert factors("skyrl_all", of_ratios(6.0, 1.0, 1.0, 1.0)) == nearly(0, 1, 1, 1)
    assert factors("skyrl_all", of_ratios(4.0, 1.0, 1.0, 1.0)) == [0, 0, 0, 0]  # 4^(1/4) = 1.41
    assert factors("skyrl_all", of_ratios(101.0, 1.0, 1.0, 1.0)) == [0, 0, 0, 0]  # an outlier


def test_skyrls_rollout_is_excludes_its_bounds(factors):
    row = of_logs(log(1.2), log(1.2) - 1e-9, log(0.8), log(0.8) + 1e-9)

    assert factors("skyrl_rollout_is", row) == nearly(0, 1.2 * exp(-1e-9), 0, 0.8 * exp(1e-9))


# ---------------------------------------------------------------- ROLL, open-instruct


def test_rolls_turns_are_the_unbroken_runs_of_the_mask(factors, counted):
    row = of_logs(0.1, 0.1, 9.0, -0.4, -0.2, mask=[1, 1, 0, 1, 1])

    assert factors("roll_is_segment", row) == nearly(exp(0.1), exp(0.1), exp(-0.3), exp(-0.3))
    assert factors("roll_filter_segment", row) == [1, 1, 0, 0]  # e^−0.3 = 0.74 < 0.8
    assert counted("roll_filter_segment", row) == 2
    assert factors("roll_is_geometric", row) == nearly(*[exp(-0.1)] * 4)


def test_rolls_difference_of_a_sequence_is_a_sum(factors):
    three, four = (probable_row([(0.5, 0.56)] * n) for n in (3, 4))  # 0.18 and 0.24; its bound is 0.2

    assert factors("roll_diff_sequence", three) == [1, 1, 1]
    assert factors("roll_diff_sequence", four) == [0, 0, 0, 0]
    assert factors("roll_diff_geometric", four) == [1, 1, 1, 1]


def test_open_instruct_holds_each_token_within_ten_before_the_mean(factors):
    row = of_logs(25.0, -10.0)

    assert factors("open_instruct_rho_sequence", row) == nearly(1, 1)
    assert factors("areal_sequence_mask", row) == [0, 0]
    assert factors("open_instruct_rho_mask", of_logs(-25.0)) == [NOTHING]


@pytest.mark.parametrize(
    ("advantage", "expected"), [(1.0, (0, 0.2, 0)), (-1.0, (2, 0, 2)), (0.0, (2, 0.2, 2))]
)
def test_the_tv_rule_takes_only_tokens_pushed_further_away(advantage, expected, factors):
    far = of_ratios(3.0, 0.2, 3.0, advantage=advantage)  # (2 + 0.8 + 2) / 3 = 1.6 > 1.1
    near = of_ratios(2.5, 0.5, advantage=advantage)  # (1.5 + 0.5) / 2 = 1

    assert factors("open_instruct_rho_tv", far) == nearly(*expected)
    assert factors("open_instruct_rho_tv", near) == nearly(2, 0.5)


# ---------------------------------------------------------------- bounds

INCLUSIVE = [
    ("trl_token_mask", 3.0, 3.0),
    ("trl_token_icepop", 0.5, 0.5),
    ("trl_sequence_mask", 3.0, 3.0),
    ("swift_token_mask", 2.0, 2.0),
    ("swift_sequence_mask", 2.0, 2.0),
    ("openrlhf_icepop", 5.0, 5.0),
    ("openrlhf_seq_mask_tis", 0.5, 0.5),
    ("nemo_rl_icepop", 0.5, 0.5),
    ("nemo_rl_seq_mask_tis", 1.002, 1.002),
    ("slime_icepop", 5.0, 5.0),
    ("slime_mis_token_mask", 2.0, 2.0),
    ("slime_mis_sequence_mask", 0.2, 0.2),
    ("areal_decoupled", 5.0, 5.0),
    ("areal_sequence_mask", 0.999, 0.999),
    ("areal_cap_sequence_mask", 5.0, 5.0),
    ("prime_rl_v02_token", 8.0, 8.0),
    ("skyrl_token_mask", 5.0, 2.0),
    ("skyrl_geometric_mask", 1.01, 1.0),
    ("roll_filter_token", 0.8, 1.0),
    ("roll_filter_sequence", 1.2, 1.0),
    ("open_instruct_rho_mask", 5.0, 5.0),
    ("open_instruct_rho_sequence", 1.001, 1.001),
]


@pytest.mark.parametrize(("name", "bound", "kept"), INCLUSIVE)
def test_a_ratio_on_the_bound_is_inside_and_one_beyond_it_is_not(name, bound, kept, factors):
    outwards = 1e-9 if bound > 1 else -1e-9

    assert factors(name, of_ratios(bound)) == pytest.approx([kept], rel=1e-12)
    assert factors(name, of_logs(log(bound) + outwards)) == [NOTHING]
