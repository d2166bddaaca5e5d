"""Where an analysis runs: this machine, or a cluster."""

from offpol_diag.engines.engine import Clock, Each, Engine, Job, Progress
from offpol_diag.engines.local import Local
from offpol_diag.engines.processes import Processes
from offpol_diag.engines.ray import Ray

__all__ = ["Clock", "Each", "Engine", "Job", "Local", "Processes", "Progress", "Ray"]
