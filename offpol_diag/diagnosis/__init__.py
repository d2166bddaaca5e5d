"""Is it a bug, or honest mismatch, and which one?"""

from offpol_diag.diagnosis.verdict import diagnose

__all__ = ["diagnose"]
