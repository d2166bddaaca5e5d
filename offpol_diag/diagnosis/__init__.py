"""Diagnosis of a mismatch: a logging or engine bug, or an honest difference, and its cause."""

from offpol_diag.diagnosis.verdict import diagnose

__all__ = ["diagnose"]
