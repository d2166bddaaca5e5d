"""Write gate verdicts as GitHub Actions annotations: `::error title=…::…`, one line each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from offpol_diag.gate import beyond
from offpol_diag.printable import printable
from offpol_diag.report.gate import explained, title, word
from offpol_diag.result import GateVerdict

MOST = 10
"""Maximum annotations of each kind that GitHub shows per step; it silently drops more."""

DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
PROPERTY = DATA | {":": "%3A", ",": "%2C"}


def annotated(verdicts: Sequence[GateVerdict]) -> Iterator[str]:
    """Yield annotation lines, failures first; the last of each kind counts those omitted."""
    said = [(kind, one) for one in verdicts if (kind := _kind(one))]
    totals, seen = Counter(kind for kind, _ in said), Counter[str]()
    for kind, one in sorted(said, key=lambda pair: pair[1].passed is None):
        seen[kind] += 1
        more = totals[kind] - MOST
        if seen[kind] > MOST:
            continue
        tail = f" ({more} more like this: see the log)" if seen[kind] == MOST and more > 0 else ""
        heading = f"offpol-diag gate: {title(one)} {word(one)[2:]}"
        yield f"::{kind} title={escaped(heading, PROPERTY)}::{escaped(explained(one) + tail, DATA)}"


def _kind(one: GateVerdict) -> str:
    """Return the annotation command of a verdict; empty if it passed without remarks."""
    if one.passed is True:
        return "notice" if one.open and beyond(one) else ""
    return "error"


def escaped(text: str, table: dict[str, str]) -> str:
    """Escape characters that would end a message or property, as GitHub decodes them."""
    return "".join(table.get(char, char) for char in printable(text))
