"""The choice among candidates: a truth table of scores, errors, prices and what guards refused."""

from __future__ import annotations

import math

import pytest

from offpol_diag.candidates import CANDIDATES, DEFAULT, NOTHING
from offpol_diag.ladder import AHEAD, choose, instead_of, sure
from offpol_diag.summary import Alignment
from tests.estimated import alignment, row

TIS, NONE, MASK, SEQ = DEFAULT.name, NOTHING.name, "token_mask_0.5_2.0", "seq_tis_2.0"
WHY = "refused in a test"
ALL = [one.name for one in CANDIDATES]


@pytest.mark.parametrize(
    ("given", "best"),
    [
        # the best score of those that judge single tokens, where it is ahead of the default
        ({}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, 1.1 * AHEAD)}, MASK),
        ({"token_mask_0_5_2_0": row(MASK, 0.9 * AHEAD)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, 2 * AHEAD, measured=None, error=None)}, MASK),
        ({"none": row(NONE, 1.1 * AHEAD)}, NONE),
        ({"none": row(NONE, 0.9 * AHEAD)}, TIS),
        ({"none": row(NONE, 2 * AHEAD), "token_mask_0_5_2_0": row(MASK, 3 * AHEAD)}, MASK),
        # without token ids or advantages less noise alone does not win
        ({"direction": False, "none": row(NONE, 0.5)}, TIS),
        ({"direction": False, "token_mask_0_5_2_0": row(MASK, 0.5)}, TIS),
        ({"direction": False, "token_tis_2_0": row(TIS, refused=WHY), "none": row(NONE, 0.5)}, NONE),
        # methods that judge whole sequences are not chosen where there is another
        ({"seq_tis_2_0": row(SEQ, 1.0)}, TIS),
        ({"direction": False, "seq_tis_2_0": row(SEQ, 1.0)}, TIS),
        # refused and unknown
        ({"token_mask_0_5_2_0": row(MASK, 1.0, refused=WHY)}, TIS),
        ({"token_mask_0_5_2_0": row(MASK, None)}, TIS),
        ({"token_tis_2_0": row(TIS, refused=WHY)}, "token_tis_1.5"),
        ({"token_tis_2_0": row(TIS, None)}, "token_tis_1.5"),
        ({"none": row(NONE, None)}, TIS),
    ],
)
def test_which_candidate_is_chosen(given, best):
    assert choose(alignment(**given)).best == best


@pytest.mark.parametrize(
    ("best", "nothing", "known"),
    [
        (row(TIS, 0.1, error=0.02), row(NONE, 0.0, error=0.03), True),  # 0.1 is more than 1.96 · 0.05
        (row(TIS, 0.1, error=0.03), row(NONE, 0.0, error=0.03), False),
        (row(TIS, 0.1, measured=0.0), row(NONE, 0.0), False),
        (row(TIS, 0.1, error=None), row(NONE, 0.0), False),
        (row(TIS, 0.1), row(NONE, 0.0, measured=None, error=None), False),
        (row(TIS, 0.1, error=0.0), row(NONE, 0.0, error=0.0), True),
    ],
)
def test_a_choice_is_sure_where_it_was_measured_to_be_ahead_by_both_errors(best, nothing, known):
    given = alignment(token_tis_2_0=best, none=nothing)
    assert sure(given, choose(given)) is known


def test_where_nothing_is_known_or_all_is_refused_there_is_no_choice():
    given = alignment()
    unknown = {name: row(name, None) for name in ALL}
    refused = {name: row(name, refused=WHY) for name in ALL}

    assert choose(given.model_copy(update={"rows": unknown})) is None
    assert choose(given.model_copy(update={"rows": refused})) is None
    assert choose(given.model_copy(update={"rows": {}})) is None


@pytest.mark.parametrize("noise", [1e-15, -1e-15])
def test_rounding_decides_neither_the_choice_nor_the_runner_up(noise):
    """A GPU adds in another order each time; the first of those that did the same is taken."""
    given = alignment(
        none=row(NONE, 0.5), token_mask_0_5_2_0=row(MASK, 0.5 + noise), token_tis_2_0=row(TIS, refused=WHY)
    )
    plain = alignment(
        none=row(NONE, 0.5), token_mask_0_5_2_0=row(MASK, 0.5), token_tis_2_0=row(TIS, refused=WHY)
    )

    assert (choose(given).best, choose(given).next) == (choose(plain).best, choose(plain).next)
    others = {
        name: one.model_copy(update={"score": 0.1 + noise * at})
        for at, (name, one) in enumerate(plain.rows.items())
    }
    alike = {name: one.model_copy(update={"score": 0.1}) for name, one in plain.rows.items()}
    assert instead_of(others, NONE).next == instead_of(alike, NONE).next


@pytest.mark.parametrize("name", ALL)
def test_the_only_one_that_is_left_is_chosen_and_has_no_runner_up_of_its_own_method(name):
    rows = {other: row(other, refused=None if other == name else WHY) for other in ALL}
    found = choose(Alignment(batch_sequences=1, reference=TIS, direction=True, moved=0.0, rows=rows))

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
        ({"none": row(NONE, 0.1)}, NONE, TIS),
        ({"token_mask_0_5_2_0": row(MASK, 0.1)}, MASK, TIS),
        (
            {"token_mask_0_5_2_0": row(MASK, 0.1), "token_tis_2_0": row(TIS, refused=WHY)},
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


def test_a_runner_up_that_looks_a_little_better_costs_nothing():
    found = choose(alignment(token_mask_0_5_2_0=row(MASK, AHEAD / 2)))
    assert (found.best, found.next, found.price) == (TIS, MASK, 0.0)


def test_no_gain_is_known_over_what_is_unknown():
    assert choose(alignment(none=row(NONE, None))).gain == 0


@pytest.mark.parametrize("name", ALL)
def test_a_refused_candidate_is_never_chosen_nor_the_runner_up(name):
    """Whatever its score, and whichever is taken."""
    rows = {one: row(one, 5.0 if one == name else 0.0, refused=WHY if one == name else None) for one in ALL}
    given = Alignment(batch_sequences=1, reference=TIS, direction=True, moved=0.0, rows=rows)

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
