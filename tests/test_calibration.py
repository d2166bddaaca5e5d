"""The probabilities of candidates: learned from what is kept, and as often right as they say."""

from __future__ import annotations

import pytest

from benchmarks.doctor import learn
from offpol_diag.diagnosis.candidates import WEIGHTS


@pytest.fixture(scope="module")
def known():
    return learn.kept()


@pytest.fixture(scope="module")
def answers(known):
    return [one for one in learn.judged(known) if one["likely"]]


def test_the_weights_are_those_that_the_kept_examples_teach(known):
    taught = learn.learned([one for one in known if one["architecture"] not in learn.HELD_BACK])
    assert taught.keys() == WEIGHTS.keys()
    for cause, weights in taught.items():
        assert WEIGHTS[cause] == pytest.approx(weights, abs=0.02), cause


def test_probabilities_are_as_often_right_as_they_say_in_architectures_that_did_not_teach(answers):
    """A fifth with n candidates may miss by 5 points and three standard errors."""
    assert len({one["architecture"] for one in answers}) >= 6
    for row in learn.calibration(answers):
        error = (row["stated"] * (1 - row["stated"]) / row["many"]) ** 0.5
        assert abs(row["stated"] - row["right"]) < 0.05 + 3 * error, row


def test_no_honest_dump_of_the_examples_is_called_a_bug(known):
    wrong = [one for one in known if one["verdict"] == "bug" and not {*one["causes"]} & {*one["right"]}]
    assert not wrong


def test_the_page_is_what_the_script_writes(known):
    assert learn.PAGE.read_text(encoding="utf-8") == learn.page(known)


def test_the_table_by_cause_counts_what_is_named_first_and_what_is_called_a_bug():
    def one(cause, said, right, of="logged"):
        return {"of": of, "cause": cause, "said": said, "right": right}

    found = learn.by_cause(
        [one("sentinel", "sentinel", True)] * 99
        + [one("off_by_one", "off_by_one", True), one("off_by_one", "cannot_tell", False)]
        + [one("stale", "sentinel", False, learn.DECIDED), one("sentinel", "stale", False, learn.DECIDED)]
    )

    assert found["share"] == "100 / 101 (99%)"  # of what is to be named, without the dumps of the candidates
    assert found["short"] == ["`off_by_one` 1 / 2 (50%)"]
    assert found["alarms"] == 1
    assert found["rows"][0] == ("`off_by_one`", ["1 / 2 (50%)", ""], "cannot_tell 1")
    assert found["rows"][-1] == ("all bugs", ["100 / 101 (99%)", "0 / 1 (0%)"], "")
