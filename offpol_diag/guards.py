"""Guards that refuse a candidate whatever its score, each with the sentence that says why.

They are what the field has learned: a method may keep its direction on average and still lose what a run
lives on (long responses, failures to learn from, whole prompts), or hang on a handful of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from offpol_diag.summary import AlignmentRow, Number, Summary

Seen = Mapping[str, Number]
"""Metrics of the preset; empty where it was not analysed with these thresholds."""


@dataclass(frozen=True)
class Guard:
    """One guard.

    Attributes:
        name: short, stable.
        trips: its condition, on the estimates and on the preset's metrics.
        why: what is said of the candidate.
    """

    name: str
    trips: Callable[[AlignmentRow, Seen], bool]
    why: str


def _value(seen: Seen, name: str) -> float | None:
    number = seen.get(name)
    return number.value if number else None


def _lost(seen: Seen, part: str, whole: str) -> bool:
    """Whether of one part less than half as large a share is kept as of another."""
    one, other = _value(seen, part), _value(seen, whole)
    return one is not None and other is not None and one < other / 2


def _signs(row: AlignmentRow, seen: Seen) -> bool:
    return _lost(seen, "kept_negative", "kept_positive") or _lost(seen, "kept_positive", "kept_negative")


def _groups(row: AlignmentRow, seen: Seen) -> bool:
    lost = _value(seen, "groups_lost")
    return lost is not None and lost > 0.1


def _doubtful(row: AlignmentRow, seen: Seen) -> bool:
    number = seen.get("ess_sequences")
    return row.judges == "sequence" and number is not None and number.note is not None


def _ess(row: AlignmentRow, seen: Seen) -> bool:
    ess = _value(seen, "ess_sequences")
    return row.judges == "sequence" and ess is not None and ess < 0.1


def _scale(row: AlignmentRow, seen: Seen) -> bool:
    scale = _value(seen, "loss_scale_kept")
    return scale is not None and not 0.5 <= scale <= 2


GUARDS = (
    Guard("preset", lambda row, seen: row.method is None, "no built-in preset is this for such a dump"),
    Guard("kept", lambda row, seen: row.kept < 0.5, "it keeps less than half of the weight"),
    Guard(
        "length trap",
        lambda row, seen: _lost(seen, "kept_length_q4", "kept_length_q1"),
        "of the longest quarter of the responses it keeps less than half of what it keeps of the shortest",
    ),
    Guard(
        "signs", _signs, "of one sign of the advantage it keeps less than half of what it keeps of the other"
    ),
    Guard("groups", _groups, "more than a tenth of the prompts lose every sequence"),
    Guard("ESS", _ess, "less than a tenth of the sequences count effectively"),
    Guard("tail", _doubtful, "the tail of its weights is too heavy for their mean to be trusted (k̂)"),
    Guard("loss scale", _scale, "it changes the scale of the loss by more than a factor of 2"),
)


def guarded(summary: Summary) -> Summary:
    """The summary with a reason at every candidate that a guard refuses."""
    if summary.alignment is None:
        return summary
    rows = {name: _judged(row, _seen(row, summary)) for name, row in summary.alignment.rows.items()}
    return summary.model_copy(update={"alignment": summary.alignment.model_copy(update={"rows": rows})})


def _seen(row: AlignmentRow, summary: Summary) -> Seen:
    """Metrics of the row's preset, where it was analysed as the row has it."""
    result = summary.presets.get(row.method or "")
    return result.metrics if result and not row.settings else {}


def _judged(row: AlignmentRow, seen: Seen) -> AlignmentRow:
    why = next((guard.why for guard in GUARDS if guard.trips(row, seen)), None)
    return row.model_copy(update={"refused": why})
