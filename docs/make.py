"""Write the generated pages of this folder: `python docs/make.py`. A test fails when one is out of date."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from offpol_diag.summary import Summary

HERE = Path(__file__).parent


def result_schema() -> str:
    """The JSON Schema of a result, as `--json` writes it."""
    schema = Summary.model_json_schema(mode="serialization")
    stamped = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(stamped, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "result.schema.json": result_schema,
}
"""File → what makes its text."""


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")


if __name__ == "__main__":
    main()
