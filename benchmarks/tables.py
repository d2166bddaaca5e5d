"""Tables of docs/how-often-it-is-right.md, each between two comments that name it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "how-often-it-is-right.md"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = (header, ["---"] * len(header), *rows)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put(name: str, text: str) -> None:
    """Put a text between the comments of this name."""
    page = PAGE.read_text(encoding="utf-8")
    place = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not place.search(page):
        raise SystemExit(f"{PAGE} has no place for {name}")
    PAGE.write_text(place.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page), encoding="utf-8")
