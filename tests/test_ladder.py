"""The choice among candidates: a truth table of scores, errors, prices and what guards refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offpol_diag.candidates import CANDIDATES, DEFAULT, NOTHING
from offpol_diag.ladder import MARGIN, SURE, choose, instead_of
from offpol_diag.summary import Alignment
from tests.estimated import alignment, row, spoken
from tests.oracle_alignment import shrunk

TIS, NONE, MASK, SEQ = DEFAULT.name, NOTHING.name, "token_mask_0.5_2.0", "seq_tis_2.0"
WHY = "refused in a test"
ALL = [one.name for one in CANDIDATES]


def noisy(name, noise, **more):
    return row(name, noise=noise, **more)


def lead(name, errors, error=0.01, more=1e-6):
    """A row whose estimate lies above the default's by the margin and so many errors, and a little more."""
    score = MARGIN + errors * error + more
    return row(name, score, error=error)


def priced(price):
    """The default's noise above that of no correction, as a share of the alignment."""
    return {"none": noisy(NONE, math.exp(-2 * price))}


@pytest.mark.parametrize(
    ("given", "best"),
    [
        # what stands: the default, unless its price is above the risk
        ({}, TIS),
        ({"risk": 0.05, **priced(0.04)}, TIS),
        ({"risk": 0.05, **priced(0.06)}, NONE),
        ({"risk": None, **priced(0.5)}, TIS),
        ({"risk": 0.0, "none": noisy(NONE, 1.0)}, TIS),
        ({"risk": 0.0, **priced(1e-6)}, NONE),
        ({"risk": 0.05, "none": noisy(NONE, None)}, TIS),
        ({"risk": 0.05, "token_tis_2_0": noisy(TIS, None)}, TIS),
        ({"risk": 0.05, "none": noisy(NONE, 1.0), "token_tis_2_0": noisy(TIS, math.exp(0.12))}, NONE),
        # what beats it: a lead beyond the margin and the errors, from both estimates
        ({"token_mask_0_5_2_0": lead(MASK, SURE["token"])}, MASK),
        ({"token_mask_0_5_2_0": lead(MASK, SURE["token"], more=-1e-6)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, MARGIN / 2, error=0.0)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, 1.0, error=None)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, 1.0, measured=None)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, 1.0, measured=0.0)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, 0.0, measured=1.0)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, None)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, 1.0, refused=WHY)}, TIS),
        # sequences' weights need more
        ({"seq_tis_2_0": lead(SEQ, SURE["token"])}, TIS),
        ({"seq_tis_2_0": lead(SEQ, SURE["sequence"])}, SEQ),
        ({"seq_tis_2_0": row(SEQ, 1.0, refused=WHY)}, TIS),
        # no correction has to be beaten where it stands, and can win where it does not
        ({"risk": 0.0, **priced(0.06), "token_mask_0_5_2_0": lead(MASK, SURE["token"])}, MASK),
        ({"none": lead(NONE, SURE["nothing"])}, NONE),
        # refused and unknown
        ({"token_tis_2_0": row(TIS, refused=WHY)}, NONE),
        ({"token_tis_2_0": row(TIS, None)}, NONE),
        ({"none": row(NONE, None)}, TIS),
        ({"none": row(NONE, None), "token_tis_2_0": row(TIS, None)}, "token_tis_1.5"),
    ],
)
def test_which_candidate_is_chosen(given, best):
    assert choose(alignment(**given)).best == best


def test_sequences_are_asked_for_more_errors_than_tokens():
    assert SURE["sequence"] > SURE["token"] > 0
    assert MARGIN > 0


def test_the_luckiest_of_many_noisy_estimates_is_hardly_ever_chosen():
    """The winner's curse: all are alike, and the highest of fourteen estimates lies 1.7 errors above 0."""
    rng, error, left = np.random.default_rng(0), 0.05, 0
    for _ in range(300):
        luck = dict(zip(ALL, (error * rng.standard_normal(len(ALL))).tolist(), strict=True))
        rows = {
            spoken(name): row(name, shrunk(0.0, found, error), measured=found, error=error)
            for name, found in luck.items()
        }
        left += choose(alignment(**rows)).best != TIS
        assert max(luck.values()) > 0
    assert left / 300 < 0.08


def test_of_two_that_beat_what_stands_the_later_has_to_beat_the_earlier():
    first, second = lead("token_tis_1.5", 5), row("token_mask_0.5_2.0", 1.0, error=0.01)

    assert choose(alignment(token_tis_1_5=first)).best == "token_tis_1.5"
    assert choose(alignment(token_tis_1_5=first, token_mask_0_5_2_0=second)).best == MASK
    near = row(MASK, first.score + MARGIN / 2, error=0.0)
    assert choose(alignment(token_tis_1_5=first, token_mask_0_5_2_0=near)).best == "token_tis_1.5"


def test_where_nothing_is_known_or_all_is_refused_there_is_no_choice():
    given = alignment()
    unknown = {name: row(name, None) for name in ALL}
    refused = {name: row(name, refused=WHY) for name in ALL}

    assert choose(given.model_copy(update={"rows": unknown})) is None
    assert choose(given.model_copy(update={"rows": refused})) is None
    assert choose(given.model_copy(update={"rows": {}})) is None


@pytest.mark.parametrize("name", ALL)
def test_the_only_one_that_is_left_is_chosen_and_has_no_runner_up_of_its_own_method(name):
    rows = {other: row(other, refused=None if other == name else WHY) for other in ALL}
    found = choose(Alignment(batch_sequences=1, reference=TIS, direction=True, rows=rows))

    assert (found.best, found.next, found.price) == (name, None, 0.0)


@pytest.mark.parametrize(
    ("given", "best", "runner_up"),
    [
        ({}, TIS, MASK),  # not the same method at another threshold; of equals the first is not token TIS
        ({"token_icepop_0_5_5_0": 0.001}, TIS, "token_icepop_0.5_5.0"),
        ({"seq_tis_2_0": 0.002}, TIS, MASK),  # sequences are no runner-up
        (
            {
                "token_mask_0_5_2_0": row(MASK, -0.5),
                "token_icepop_0_5_2_0": -0.2,
                "token_icepop_0_5_5_0": -0.3,
            },
            TIS,
            "token_icepop_0.5_2.0",
        ),
        ({"risk": 0.0, **priced(0.1)}, NONE, TIS),
        ({"token_mask_0_5_2_0": lead(MASK, 5)}, MASK, TIS),
        (
            {"token_mask_0_5_2_0": lead(MASK, 5), "token_tis_2_0": row(TIS, refused=WHY)},
            MASK,
            "token_tis_1.5",
        ),
    ],
)
def test_the_runner_up_is_another_method_on_tokens_the_default_first(given, best, runner_up):
    given = {"token_mask_0_5_2_0": row(MASK, 1e-5), **given}
    found = choose(alignment(**given))

    assert (found.best, found.next) == (best, runner_up)


def test_price_and_gain_are_shares_of_the_alignment():
    found = choose(
        alignment(
            none=row(NONE, -0.2),
            token_mask_0_5_2_0=row(MASK, -0.1),
            token_icepop_0_5_2_0=-0.3,
            token_icepop_0_5_5_0=-0.3,
        )
    )
    assert (found.best, found.next) == (TIS, MASK)
    assert found.price == pytest.approx(1 - math.exp(-0.1))
    assert found.gain == pytest.approx(1 - math.exp(-0.2))


def test_a_runner_up_that_looks_better_and_is_not_for_sure_costs_nothing():
    found = choose(alignment(token_mask_0_5_2_0=row(MASK, 0.2, error=0.5)))
    assert (found.best, found.next, found.price) == (TIS, MASK, 0.0)


def test_no_gain_is_known_over_what_is_unknown():
    assert choose(alignment(none=row(NONE, None))).gain == 0


@pytest.mark.parametrize("name", ALL)
def test_a_refused_candidate_is_never_chosen_nor_the_runner_up(name):
    """Whatever its score, and whichever is taken."""
    rows = {one: row(one, 5.0 if one == name else 0.0, refused=WHY if one == name else None) for one in ALL}
    given = Alignment(batch_sequences=1, reference=TIS, direction=True, risk=0.0, rows=rows)

    found = choose(given)
    assert name not in (found.best, found.next)
    assert instead_of(rows, NONE).next != name


def test_what_is_taken_instead_keeps_its_own_runner_up_and_price():
    given = alignment(none=row(NONE, -0.01), token_tis_2_0=row(TIS, -0.03))
    found = instead_of(given.rows, NONE)

    assert (found.best, found.next, found.gain) == (NONE, TIS, 0.0)
    assert found.price == pytest.approx(1 - math.exp(-0.02))


def test_what_is_taken_instead_may_be_unknown_itself():
    given = alignment(none=row(NONE, None))
    assert instead_of(given.rows, NONE).best == NONE
