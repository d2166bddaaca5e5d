"""Section on families of similar presets: how their definitions and numbers differ."""

from __future__ import annotations

from collections.abc import Iterator

from offpol_diag.blocks import Cell, Section, Table, Text
from offpol_diag.numerals import say_value
from offpol_diag.report.sections.shortlist import Presets, by_family, judged
from offpol_diag.summary import Number, PresetResult, Summary

LEAD = (
    "Trainers give one name to different things. Below, family by family: in which aspects of their "
    "definition the presets differ, and how far apart their numbers are on this dump."
)

NUMBERS = ("weight_mean", "ess_tokens", "tokens_rejected", "loss_scale")
"""Metrics compared within a family."""

POLICIES = {"old": "π_old", "current": "π_θ", "rollout": "π_rollout"}


def families(summary: Summary) -> Section | None:
    """Return a folded table per family of two or more presets; its caption states the differences."""
    groups = by_family(judged(summary))
    several = {family: rows for family, rows in groups.items() if family and len(rows) > 1}
    tables = (_table(f"same-{place}", *group) for place, group in enumerate(several.items(), 1))
    return Section("families", "Same idea, different numbers", (Text(LEAD), *tables)) if several else None


def _table(identity: str, family: str, rows: Presets) -> Table:
    names = tuple(name for name in NUMBERS if any(name in one.metrics for one in rows.values()))
    apart = dict(_differing(rows))
    return Table(
        identity,
        f"{family}: {_aspects(len(rows), list(apart))} {_numbers(rows, names)}".strip(),
        ("preset", "weight and rules", *names, *DEFINED, "note"),
        tuple((name, *_row(one, names)) for name, one in rows.items()),
        tuple(f"{aspect}: {' | '.join(ways)}" for aspect, ways in apart.items()),
        wide=True,
        collapsed=True,
    )


REJECTED = "rejected tokens"
"""The aspect that describes the loss's denominator."""

DEFINED = ("numerator", REJECTED, "guards", "trainers")


def _row(one: PresetResult, names: tuple[str, ...]) -> tuple[Cell, ...]:
    return (
        one.method,
        *(one.metrics.get(name) for name in names),
        POLICIES.get(one.policy, one.policy),
        one.aspects.get(REJECTED, one.denominator),
        "; ".join(one.guards) or "–",
        ", ".join(one.trainers) or "–",
        one.note or "–",
    )


def _aspects(presets: int, apart: list[str]) -> str:
    """Return a sentence on the aspects in which the definitions differ."""
    return f"{presets} presets that {f'differ in {_listed(apart)}' if apart else 'are defined alike'}."


def _differing(rows: Presets) -> Iterator[tuple[str, list[str]]]:
    """Yield the aspects in which presets differ, each with its distinct values."""
    for aspect in dict.fromkeys(name for one in rows.values() for name in one.aspects):
        found = list(dict.fromkeys(one.aspects.get(aspect, "none") for one in rows.values()))
        if len(found) > 1:
            yield aspect, found


def _numbers(rows: Presets, names: tuple[str, ...]) -> str:
    """Return a sentence on the range of each number, or that all are equal."""
    spans = {
        name: _span([one.metrics[name] for one in rows.values() if name in one.metrics]) for name in names
    }
    known = {name: ends for name, ends in spans.items() if ends}
    parts = [f"{name} goes from {low} to {high}" for name, (low, high) in known.items() if low != high]
    if known and not parts:
        return f"On this dump their {_listed(list(known))} are equal."
    return f"On this dump {_listed(parts)}." if parts else ""


def _span(numbers: list[Number]) -> tuple[str, ...]:
    """Return the minimum and maximum, formatted for a sentence; empty if no value is known."""
    known = {one.value: one.unit for one in numbers if one.value is not None}
    return tuple(say_value(value, known[value]) for value in (min(known), max(known))) if known else ()


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
