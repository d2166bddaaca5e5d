"""A result and its JSON: numbers are short lists, what they are stands once, and rows are columns."""

from __future__ import annotations

import json
from typing import Any

import pytest
from factory import Location, make_summary, place, put
from pydantic import TypeAdapter, ValidationError

from offpol_diag.errors import ResultError
from offpol_diag.number import OVERFLOWS, Number
from offpol_diag.presets.catalogue import load
from offpol_diag.result import Result, loads, place_of
from tests.reading import analyze


def written(summary: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(summary.to_json())
    return found


LIST = TypeAdapter(Number)


@pytest.mark.parametrize(
    ("number", "parts"),
    [
        (Number(), []),
        (Number(value=0.5), [0.5]),
        (Number(value=0.5, interval=(0.25, 1.0)), [0.5, 0.25, 1.0]),
        (Number(value=0.5, note="heavy"), [0.5, None, None, None, "heavy"]),
        (Number(unknown="missing column rewards"), [None, None, None, None, "missing column rewards"]),
        (Number(log10=400.0, unknown=OVERFLOWS), [None, None, None, None, None, 400.0]),
        (Number(log10=400.0, unknown=OVERFLOWS, note="heavy"), [None, None, None, None, "heavy", 400.0]),
        (Number(1.0, (1.0, 1.0), "nats", clamped=0.0), [1.0, 1.0, 1.0, "nats", None, None, 0.0]),
    ],
)
def test_a_number_is_a_short_list_and_is_read_back(number: Number, parts: list[Any]) -> None:
    assert LIST.dump_python(number) == parts
    assert LIST.validate_json(json.dumps(parts)) == number


@pytest.mark.parametrize(
    "text",
    ["[true]", '["1"]', "[1e999]", f"[1{'0' * 400}]", "[1, 0.5]", "[1, null, null, 3]", "{}", str([0] * 8)],
)
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        LIST.validate_json(text)


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


def change(place: str, value: Any) -> str:
    """Return the JSON of a result with another value at a place."""
    found = part = written(make_summary())
    *path, last = (int(key) if key.isdigit() else key for key in place.split("."))
    for key in path:
        part = part[key]
    part[last] = value
    return json.dumps(found)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("worst.0.2", "x", "valid integer"),
        ("worst.0.4", None, "valid number"),
        ("worst.0.1", 2**70, "less than"),
        ("axes.step.tokens", [1], "not equally long"),
        ("charts.steps", {"first": [1], "last": [1], "series": {"k3": []}}, "not equally long"),
        ("charts.density", [[0.0, 0.5, 1.0], [[1, 2], [3]]], "density is not"),
    ],
)
def test_a_file_with_a_wrong_value_or_lists_of_unequal_length_is_refused(
    place: str, value: Any, message: str
) -> None:
    with pytest.raises(ResultError, match=message):
        loads(change(place, value), "result")


def test_the_result_of_a_sample_takes_less_than_250_kB() -> None:
    summary = analyze(["sample_data/stale.parquet"], presets=load().resolve("all"))
    assert len(summary.to_json().encode()) < 250_000
