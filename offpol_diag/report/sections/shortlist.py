"""Presets in an order that can be read: by family, and one of each for those who want no more."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.summary import PresetResult, Summary

Presets = Mapping[str, PresetResult]

FEW = 24
"""Up to this many presets stand in one table, row by row."""


def chosen(summary: Summary) -> str:
    """The recommended preset, or an empty name."""
    return (summary.recommendation and summary.recommendation.method) or ""


def judged(summary: Summary) -> dict[str, PresetResult]:
    """The presets that could be computed, family by family; the recommended one leads its family."""
    able = {name: one for name, one in summary.presets.items() if not one.needs}
    families = [leading(chosen(summary), family) for family in by_family(able).values()]
    return {name: one for family in families for name, one in family.items()}


def by_family(presets: Presets) -> dict[str, dict[str, PresetResult]]:
    """Family → its presets, both in the order in which they come; those without a family under ""."""
    found: dict[str, dict[str, PresetResult]] = {}
    for name, one in presets.items():
        found.setdefault(one.family, {})[name] = one
    return found


def leading(name: str, presets: Presets) -> dict[str, PresetResult]:
    """The same presets with the one of this name, where it is among them, before all others."""
    return {other: presets[other] for other in sorted(presets, key=lambda other: other != name)}


def shortlist(presets: Presets) -> dict[str, PresetResult]:
    """The first of each family; all of them where they are few."""
    if len(presets) <= FEW:
        return dict(presets)
    firsts = (next(iter(family)) for family in by_family(presets).values())
    return {name: presets[name] for name in firsts}
