"""Presets against one of them on one dump, and one run against another."""

from offpol_diag.contrast.presets import DIRECTIONS, of_presets, reference
from offpol_diag.contrast.runs import MATTERS, of_runs

__all__ = ["DIRECTIONS", "MATTERS", "of_presets", "of_runs", "reference"]
