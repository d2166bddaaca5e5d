"""A result and its JSON: numbers are short lists, what they are stands once, and rows are columns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from factory import Location, make_summary, place, put

from offpol_diag.errors import ResultError
from offpol_diag.number import OVERFLOWS, Number
from offpol_diag.presets.catalogue import load
from offpol_diag.result import Result, loads, place_of
from tests.reading import analyze


def written(summary: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(summary.to_json())
    return found


@pytest.mark.parametrize(
    ("one", "parts"),
    [
        (Number(), []),
        (Number(value=0.5), [0.5]),
        (Number(value=0.5, interval=(0.25, 1.0)), [0.5, 0.25, 1.0]),
        (Number(value=0.5, note="heavy"), [0.5, None, None, None, "heavy"]),
        (Number(unknown="missing column rewards"), [None, None, None, None, "missing column rewards"]),
        (Number(log10=400.0), [None, None, None, None, None, 400.0]),
        (Number(log10=400.0, unknown=OVERFLOWS), [None, None, None, None, OVERFLOWS, 400.0]),
        (
            Number(log10=400.0, unknown=OVERFLOWS, note="heavy"),
            [None, None, None, None, f"{OVERFLOWS}; heavy", 400.0],
        ),
        (Number(1.0, (1.0, 1.0), "nats", clamped=0.0), [1.0, 1.0, 1.0, "nats", None, None, 0.0]),
    ],
)
def test_a_number_is_a_short_list_and_is_read_back(one: Number, parts: list[Any]) -> None:
    assert one.parts() == parts
    assert Number.of(parts) == one


@pytest.mark.parametrize(
    "parts",
    [[True], ["1"], [float("nan")], [1e999], [10**400], [1.0, 0.5], [1.0, None, None, 3], [0.0] * 8, {}],
)
def test_what_is_no_number_is_refused(parts: Any) -> None:
    with pytest.raises(ValueError, match=r"number|interval"):
        Number.of(parts)


def test_a_result_comes_back_from_its_json_with_the_units_of_its_numbers() -> None:
    summary = make_summary()
    found = written(summary)
    again = loads(summary.to_json(), "result")

    assert found["numbers"]["dump"]["k3"] == [2.03e-3, 2.03e-3 - 1.5e-4, 2.03e-3 + 1.5e-4, "nats"]
    assert again == summary
    assert again.number("k3").unit == again.at("step")[3].numbers["k3"].unit == "nats"
    assert summary.to_json() == again.to_json()


def test_numbers_are_found_by_subject_and_place() -> None:
    summary = make_summary()
    for axis, k3 in (("a/b", 0.1), ("a", 0.2), ("a%2Fb", 0.3)):
        put(summary, axis, Location(axis, [place("b/c", 0.0, k3)]))

    again = loads(summary.to_json(), "result")
    assert [again.at(axis)[0].numbers["k3"].value for axis in ("a/b", "a", "a%2Fb")] == [0.1, 0.2, 0.3]
    assert place_of("step", "3", "preset/token_is") == "preset/token_is@step/3"
    assert again.preset("seq_is")["ess_sequences"].value == 0.61
    assert (again.at("no such axis"), again.preset("no such preset")) == ([], {})


@pytest.mark.parametrize(
    ("at", "cell", "said"), [(2, "x", "valid integer"), (4, None, "valid number"), (1, 2**70, "less than")]
)
def test_a_row_with_a_wrong_cell_is_refused(at: int, cell: Any, said: str) -> None:
    found = written(make_summary())
    found["worst"][0][at] = cell
    with pytest.raises(ResultError, match=said):
        loads(json.dumps(found), "result")


def test_the_result_of_a_sample_takes_less_than_250_kB() -> None:
    summary = analyze(["sample_data/stale.parquet"], presets=load().resolve("all"))
    assert len(summary.to_json().encode()) < 250_000
