"""Presets against one of them on one dump, and one run against another."""

from offpol_diag.compare.presets import of_presets, reference
from offpol_diag.compare.runs import of_runs

__all__ = ["of_presets", "of_runs", "reference"]
