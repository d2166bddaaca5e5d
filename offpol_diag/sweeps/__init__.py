"""One preset over many thresholds, and the window that keeps an asked share."""

from offpol_diag.sweeps.dial import Dial, dials, pick
from offpol_diag.sweeps.run import Ask, sweep

__all__ = ["Ask", "Dial", "dials", "pick", "sweep"]
