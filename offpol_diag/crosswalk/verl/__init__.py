"""What verl logs, of three generations: 2025-10 (`mismatch/`), 2025-11 and 2026-01 (`rollout_corr/`).

Read off verl 4424616d, 418f964a and b178a3cd. The whole dump is one trainer batch. Two things to know before
laying these beside our own numbers: verl clamps log-ratios to ±20, and its std and ESS are of weights clamped
to [1/C, C].
"""

from offpol_diag.crosswalk.verl.logged import logged
from offpol_diag.crosswalk.verl.observed import columns, ranges

__all__ = ["columns", "logged", "ranges"]
