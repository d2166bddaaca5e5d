"""Where an analysis runs: this machine, or a cluster."""

from offpol_diag.engines.engine import Clock, Engine, Job, Progress
from offpol_diag.engines.local import Local

__all__ = ["Clock", "Engine", "Job", "Local", "Progress"]
