"""Imported by the server that worker processes are forked from: they share what their jobs are made of.

Nothing that is imported here is garbage: without the collector the import takes a fifth less. What is frozen
is never written to by the collectors of workers, so that its memory stays shared.
"""

from __future__ import annotations

import gc
from importlib import import_module

gc.disable()
import_module("offpol_diag.analyze")
gc.freeze()
