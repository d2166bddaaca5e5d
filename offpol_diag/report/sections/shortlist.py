"""Order presets by family, and select a shortlist with one of each."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.summary import PresetResult, Summary

Presets = Mapping[str, PresetResult]

FEW = 24
"""Maximum number of presets shown in one table."""


def chosen(summary: Summary) -> str:
    """Return the name of the recommended preset; empty if there is none."""
    return (summary.recommendation and summary.recommendation.method) or ""


def judged(summary: Summary) -> dict[str, PresetResult]:
    """Return the computed presets by family; the recommended one is first in its family."""
    able = {name: one for name, one in summary.presets.items() if not one.needs}
    families = [leading(chosen(summary), family) for family in by_family(able).values()]
    return {name: one for family in families for name, one in family.items()}


def by_family(presets: Presets) -> dict[str, dict[str, PresetResult]]:
    """Group presets by family, in their original order; those without a family under ""."""
    found: dict[str, dict[str, PresetResult]] = {}
    for name, one in presets.items():
        found.setdefault(one.family, {})[name] = one
    return found


def leading(name: str, presets: Presets) -> dict[str, PresetResult]:
    """Return the presets with the one of this name, if present, moved to the front."""
    return {other: presets[other] for other in sorted(presets, key=lambda other: other != name)}


def shortlist(presets: Presets) -> dict[str, PresetResult]:
    """Return the first preset of each family; all presets if there are few."""
    if len(presets) <= FEW:
        return dict(presets)
    firsts = (next(iter(family)) for family in by_family(presets).values())
    return {name: presets[name] for name in firsts}
