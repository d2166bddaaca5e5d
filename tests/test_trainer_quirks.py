"""What one trainer does and its neighbour does not, each in numbers that fit on a line.

A row is given by the ratios r or the log-ratios Δ of its tokens; the result is what the loss of each trained
token is multiplied by.
"""

from __future__ import annotations

from math import exp, log

import pytest

from tests.trainer_dumps import exact_row, probable_row
from tests.trainers.ours import ours, read


def of_logs(*deltas, **more):
    return exact_row(list(deltas), **more)


def of_ratios(*ratios, **more):
    return exact_row([log(r) for r in ratios], **more)


@pytest.fixture
def done(tmp_path):
    """(name of a row, rows of a dump) → factors of their tokens, and which the loss is divided by."""
    return lambda name, *rows: ours(name, read(list(rows), tmp_path / "dump.parquet"))


DRIFT = {"current": [-0.5, -0.5, -0.5, -0.5]}
NEGATIVE = of_logs(0.0, 0.0, 0.0, 0.0, advantage=[-1.0, 2.0, 0.0, -3.0], **DRIFT)  # mean −0.5
POSITIVE = of_logs(0.0, 0.0, 0.0, 0.0, advantage=[-1.0, 4.0, 0.0, -1.0], **DRIFT)  # mean 0.5
FALLEN, RISEN = (probable_row([(0.5, x)], advantage=0.0) for x in (0.2, 0.8))
BACK = probable_row([(0.5, 0.2), (0.5, 0.45)], advantage=1.0)  # fallen, and pushed up again
TURNS = of_logs(0.1, 0.1, 9.0, -0.4, -0.2, mask=[1, 1, 0, 1, 1])
THREE, FOUR = (probable_row([(0.5, 0.56)] * n) for n in (3, 4))  # 0.18 and 0.24; the bound is 0.2

QUIRKS = {
    # ---- TRL, ms-swift, OpenRLHF
    "TRL keeps the product however small, ms-swift the tokens' ratios": [
        ("trl_sequence_mask", of_logs(-3.0, -3.0, -3.0, -3.0), [exp(-12)] * 4),
        ("swift_sequence_mask", of_logs(-3.0, -3.0, -3.0, -3.0), [exp(-3)] * 4),
    ],
    "a sequence is a product to TRL and a geometric mean to ms-swift: ∏r = e^1.8 = 6.05": [
        ("trl_sequence_truncate", of_logs(0.6, 0.6, 0.6), [3, 3, 3]),
        ("trl_sequence_mask", of_logs(0.6, 0.6, 0.6), [0, 0, 0]),
        ("swift_sequence_truncate", of_logs(0.6, 0.6, 0.6), [exp(0.6)] * 3),
    ],
    "ms-swift gates a sequence by its geometric mean and weighs with raw token ratios": [
        ("swift_sequence_mask", of_logs(2.0, -2.0, 0.3), [exp(2), exp(-2), exp(0.3)]),
        ("swift_sequence_mask", of_logs(1.0, 1.0, 0.2), [0, 0, 0]),  # e^(2.2/3) = 2.08 > 2
    ],
    "OpenRLHF raises small ratios to its lower bound": [
        ("openrlhf_tis", of_ratios(0.1, 0.6, 7.0), [0.5, 0.6, 5]),
        ("trl_token_truncate", of_ratios(0.1, 0.6, 7.0), [0.1, 0.6, 3]),
    ],
    "a drifted sequence goes only where its advantage is negative: mean(log π_rollout − log π_θ) = 0.15": [
        (name, of_logs(0.0, 0.0, current=[-0.3, 0.0], advantage=advantage), [kept, kept])
        for name in ("deepseek_v32_mask", "swift_opsm")
        for advantage, kept in ((-1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    ],
    "TRL's off-policy mask asks the current policy, 0.6 and 0.4 nats for 0.5, and its weight the old one": [
        ("trl_off_policy_mask", of_ratios(1.5, 1.0, current=[-1.2, 0.0], advantage=-1.0), [0, 0]),
        ("trl_off_policy_mask", of_ratios(1.5, 1.0, current=[-0.8, 0.0], advantage=-1.0), [1.5, 1.5]),
    ],
    # ---- NeMo-RL
    "a weight beyond float32 is nothing to NeMo-RL and 2 to those who cap it": [
        ("nemo_rl_tis", of_logs(100.0, 88.0, 0.0), [0, 2, 1]),
        ("vanilla_is", of_logs(100.0, 88.0, 0.0), [0, exp(88), 1]),
        *(
            (name, of_logs(100.0, 88.0, 0.0), [2, 2, 1])
            for name in ("token_is", "tis", "slime_tis", "areal_token_clamp", "skyrl_tis_token")
        ),
    ],
    "a product beyond float32 drops its sequence in NeMo-RL": [
        ("nemo_rl_seq_product", of_logs(60.0, 40.0), [0, 0]),
        ("nemo_rl_seq_product", of_logs(60.0, 20.0), [5, 5]),
    ],
    # ---- slime
    "slime's OPSM asks each token's advantage and the others the sequence's": [
        ("slime_opsm", NEGATIVE, [0, 1, 1, 0]),
        ("slime_opsm", POSITIVE, [0, 1, 1, 0]),
        ("deepseek_v32_mask", NEGATIVE, [0, 0, 0, 0]),
        ("deepseek_v32_mask", POSITIVE, [1, 1, 1, 1]),
    ],
    "slime's MIS divides by the mean of bounded weights before the first and last token are rejected": [
        ("slime_mis", of_ratios(0.25, 1.0, 4.0), [0, 3 / (0.25 + 1 + 2), 0])
    ],
    "a veto needs a ratio truly below its bound": [
        ("slime_mis_veto", of_logs(log(1e-4), 0.0), [1e-4, 1]),
        ("slime_mis_veto", of_logs(log(1e-4) - 1e-9, 0.0), [0, 0]),
        ("slime_mis_veto", of_logs(50.0, 0.0), [2, 1]),
    ],
    # ---- AReaL
    "AReaL's k1 is the log-ratio itself": [
        ("areal_token_k1", of_logs(0.8, -0.8), [0, exp(-0.8)]),
        ("areal_sequence_k1", of_logs(0.04, 0.0), [0, 0]),  # mean Δ = 0.02 > 0.01
        ("areal_sequence_k1", of_logs(-0.04, 0.0), [exp(-0.04), 1]),
    ],
    # e^1.6 − 1 − 1.6 = 2.35 on one side, e^−1.6 − 1 + 1.6 = 0.80 on the other
    "AReaL's k3 punishes small ratios and verl's large ones": [
        ("areal_token_k3", of_logs(-1.6, 1.6), [0, exp(1.6)]),
        ("verl_2026_01_rs_token_k3", of_logs(-1.6, 1.6), [1, 0]),
    ],
    "AReaL's sequence weight is geometric whatever is tested": [
        ("areal_sequence_mask_sum", of_logs(0.5, 0.1), [exp(0.3), exp(0.3)]),  # ∏r = 1.82
        ("areal_sequence_mask_sum", of_logs(0.5, 0.3), [0, 0]),  # ∏r = 2.23
        ("areal_sequence_mask_max", of_ratios(99.0, 1.0), [99**0.5, 99**0.5]),
        ("areal_sequence_mask_max", of_ratios(101.0, 1.0), [0, 0]),
    ],
    "M2PO's threshold, 0.04, is on the mean of squares": [
        ("areal_m2po", of_logs(0.1, 0.1, 0.3), [1, 1, 1]),  # (0.01 + 0.01 + 0.09) / 3 = 0.0367
        ("areal_m2po", of_logs(0.1, 0.1, 0.32), [1, 1, 0]),  # (0.01 + 0.01 + 0.1024) / 3 = 0.0408
        ("areal_m2po", of_logs(1.0, 2.0), [1, 0]),  # never everything
    ],
    # ---- prime-rl, SkyRL
    "zero advantage takes prime-rl's lower bound and none of SkyRL's": [
        ("prime_rl_dppo", FALLEN, [0]),
        ("skyrl_dppo_tv", FALLEN, [0.4]),
        ("prime_rl_dppo", RISEN, [1.6]),
        ("skyrl_dppo_tv", RISEN, [1.6]),
    ],
    "DPPO lets a token come back and IPO does not": [
        ("prime_rl_dppo", BACK, [0.4, 0.9]),
        ("prime_rl_ipo", BACK, [0, 0.9]),
    ],
    "prime-rl 0.2 drops a sequence for a ratio above 100 and for none below": [
        ("prime_rl_v02_token", of_ratios(101.0, 0.9), [0, 0]),
        ("prime_rl_v02_token", of_ratios(99.0, 0.9), [0, 0.9]),  # √(99·0.9) = 9.4 ≤ 10
        ("prime_rl_v02_token", of_ratios(0.02, 1.0), [0, 1]),  # √0.02 = 0.14 ≥ 0.1
        ("prime_rl_v02_token", of_ratios(0.005, 1.0), [0, 0]),  # √0.005 = 0.07
    ],
    "in SkyRL a sequence passes because its worst token is gone": [
        ("skyrl_all", of_ratios(6.0, 1.0, 1.0, 1.0), [0, 1, 1, 1]),
        ("skyrl_all", of_ratios(4.0, 1.0, 1.0, 1.0), [0, 0, 0, 0]),  # 4^(1/4) = 1.41
        ("skyrl_all", of_ratios(101.0, 1.0, 1.0, 1.0), [0, 0, 0, 0]),  # an outlier
    ],
    "SkyRL's rollout_is excludes its bounds": [
        (
            "skyrl_rollout_is",
            of_logs(log(1.2), log(1.2) - 1e-9, log(0.8), log(0.8) + 1e-9),
            [0, 1.2 * exp(-1e-9), 0, 0.8 * exp(1e-9)],
        )
    ],
    # ---- ROLL, open-instruct
    "ROLL's turns are the unbroken runs of the mask": [
        ("roll_is_segment", TURNS, [exp(0.1), exp(0.1), exp(-0.3), exp(-0.3)]),
        ("roll_filter_segment", TURNS, [1, 1, 0, 0]),  # e^−0.3 = 0.74 < 0.8
        ("roll_is_geometric", TURNS, [exp(-0.1)] * 4),
    ],
    "ROLL's difference of a sequence is a sum": [
        ("roll_diff_sequence", THREE, [1, 1, 1]),
        ("roll_diff_sequence", FOUR, [0, 0, 0, 0]),
        ("roll_diff_geometric", FOUR, [1, 1, 1, 1]),
    ],
    "open-instruct holds each token within ten before the mean": [
        ("open_instruct_rho_sequence", of_logs(25.0, -10.0), [1, 1]),
        ("areal_sequence_mask", of_logs(25.0, -10.0), [0, 0]),
        ("open_instruct_rho_mask", of_logs(-25.0), [0]),
    ],
    # (2 + 0.8 + 2) / 3 = 1.6 > 1.1, and (1.5 + 0.5) / 2 = 1
    "open-instruct's TV rule takes only tokens pushed further away": [
        case
        for advantage, far in ((1.0, [0, 0.2, 0]), (-1.0, [2, 0, 2]), (0.0, [2, 0.2, 2]))
        for case in (
            ("open_instruct_rho_tv", of_ratios(3.0, 0.2, 3.0, advantage=advantage), far),
            ("open_instruct_rho_tv", of_ratios(2.5, 0.5, advantage=advantage), [2, 0.5]),
        )
    ],
}
"""What is peculiar → built-in row, row of a dump, factors of its tokens."""


@pytest.mark.parametrize("quirk", QUIRKS)
def test_what_one_trainer_does_and_its_neighbour_does_not(quirk, done):
    for name, row, want in QUIRKS[quirk]:
        assert done(name, row)[0].tolist() == pytest.approx(want, rel=1e-12, abs=1e-300), name


@pytest.mark.parametrize(
    ("name", "rows", "count"),
    [
        # e^|Δ| = 2.72 > 2, and outside every band
        ("nemo_rl_seq_error_mask", [of_logs(1.0, 1.0), of_logs(0.0)], 1),
        ("nemo_rl_seq_mask_tis", [of_logs(1.0, 1.0), of_logs(0.0)], 3),
        ("nemo_rl_icepop", [of_logs(3.0, 3.0), of_logs(0.0)], 3),
        ("areal_m2po", [of_logs(0.1, 0.1, 0.32)], 2),
        ("roll_filter_segment", [TURNS], 2),
    ],
)
def test_what_leaves_the_denominator(name, rows, count, done):
    assert int(done(name, *rows)[1].sum()) == count


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
def test_a_ratio_on_the_bound_is_inside_and_one_beyond_it_is_not(name, bound, kept, done):
    outwards = 1e-9 if bound > 1 else -1e-9

    assert done(name, of_ratios(bound))[0].tolist() == pytest.approx([kept], rel=1e-12)
    assert done(name, of_logs(log(bound) + outwards))[0].tolist() == [0.0]
