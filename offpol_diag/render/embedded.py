"""The summary inside a page: JSON in a script element, small enough to travel with it.

Fields at their default are left out, and what a number means (formula, over, unit) is said by the first of
its name in a family: presets are one, the places along an axis another. Reading fills both in again, exactly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from offpol_diag.errors import ResultError
from offpol_diag.summary import Summary, loads

DATA_ID = "offpol-diag-data"

_DEFINITION = ("formula", "over", "unit")

Json = dict[str, Any]


def embedded(summary: Summary) -> str:
    """What stands in the script element `DATA_ID`."""
    data = {"format": summary.format, **summary.model_dump(mode="json", exclude_defaults=True)}
    for family in _families(data):
        _say_once(family)
    return script_json(json.dumps(data, ensure_ascii=False, separators=(",", ":")))


def read_back(html: str) -> str:
    """The JSON of the summary in a page, as `Summary.to_json` writes it.

    Raises:
        ResultError: the page is not a report of ours.
    """
    found = re.search(rf'<script type="application/json" id="{DATA_ID}">(.*?)</script>', html, re.DOTALL)
    if found is None:
        raise ResultError("this HTML holds no data of offpol-diag", "give the report that `analyze` wrote")
    data = json.loads(found[1])
    for family in _families(data):
        _say_again(family)
    return loads(json.dumps(data), "this report").to_json()


def script_json(text: str) -> str:
    """JSON that can stand inside a script element: nothing in it can close or open one."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _families(data: Json) -> Iterator[list[Json]]:
    """Lists of {name: number} in which one name means one thing."""
    yield [preset.get("metrics", {}) for preset in data.get("presets", {}).values()]
    for location in data.get("by", {}).values():
        yield [place["metrics"] for place in location["places"]]


def _say_once(family: list[Json]) -> None:
    first: Json = {}
    for name, number in _numbers(family):
        said = {key: number.pop(key, "") for key in _DEFINITION}
        if name not in first or first[name] != said:
            number.update(said)
        first.setdefault(name, said)


def _say_again(family: list[Json]) -> None:
    first: Json = {}
    for name, number in _numbers(family):
        said = {key: number[key] for key in _DEFINITION if key in number}
        number.update(said or first[name])
        first.setdefault(name, said)


def _numbers(family: list[Json]) -> Iterator[tuple[str, Json]]:
    return ((name, number) for numbers in family for name, number in numbers.items())
