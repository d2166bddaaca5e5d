"""Comparisons: presets with a reference preset on one dump, and one run with another."""

from offpol_diag.compare.presets import lacking, of_presets, reference
from offpol_diag.compare.runs import of_runs

__all__ = ["lacking", "of_presets", "of_runs", "reference"]
