"""Whether a run is equal to the last bit, where it claims that (`--expect bitwise`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offpol_diag.gate.bounds import Gates
from offpol_diag.gate.ruling import Ruling, shown, silence
from offpol_diag.result import GateVerdict, Result

DIFFER = "tokens_differ"
MOST = 3
"""Most positions that a reason lists."""


def expectation(now: Result, gates: Gates) -> Iterator[GateVerdict]:
    """Yield the verdict on what a run claims, if it claims anything; counts are exact: the value decides."""
    if not gates.expect:
        return
    number = replace(now.number(DIFFER), interval=None)
    ruling = Ruling(None, silence(number))
    if number.value is not None:
        some = f"{round(number.value * now.dump.tokens):,} of {now.dump.tokens:,} tokens differ"
        reason = "; ".join(filter(None, (some, first(now)))) if number.value else equal(now)
        ruling = Ruling(not number.value, reason, on="value")
    yield GateVerdict(
        name=now.prefix + DIFFER,
        bound="max",
        limit=0.0,
        reason=ruling.reason,
        source=gates.source,
        expects=gates.expect,
        **shown(number, ruling),
    )


def equal(now: Result) -> str:
    """Return that all tokens are equal, as is expected."""
    many = f"{now.dump.tokens:,}"
    return f"{many} of {many} tokens are equal to the last bit, as --expect bitwise asks"


def first(now: Result) -> str:
    """Return the first positions at which sequences differ, as far as the result tells them."""
    places = [(one.position, one.sequence_id) for one in now.worst.tokens if one.log_ratio]
    for row in (*now.worst.sequences, *now.worst.typical):
        each = zip(row.positions, row.log_ratios, strict=True)
        places += [(position, row.sequence_id) for position, delta in each if delta]
    known: dict[str, int] = {}
    for position, name in sorted(places):
        known.setdefault(name, position)
    said = ", ".join(f"{known[name]} (sequence {name})" for name in [*known][:MOST])
    return f"the first positions known: {said}" if said else ""


def as_expected(now: Result, gates: Gates) -> Result:
    """Return the result; columns that are equal where that is expected are no copies, but healthy."""
    given = now.diagnosis
    if not gates.expect or now.number(DIFFER).value != 0 or given is None:
        return now
    if given.verdict != "cannot_tell" or given.tokens is None:  # a bug, or too few tokens
        return now
    update = {"verdict": "healthy", "headline": f"{equal(now)}."}
    return now.model_copy(update={"diagnosis": given.model_copy(update=update)})
