"""From a finished tally to the Summary: every state is read once, here."""

from offpol_diag.readout.facts import counts, facts, peak_rss
from offpol_diag.readout.gaps import histogram, metrics
from offpol_diag.readout.presets import preset_metrics, preset_result
from offpol_diag.readout.reading import Readout
from offpol_diag.readout.rows import CONDITIONAL
from offpol_diag.readout.whole import factors, summary

__all__ = [
    "CONDITIONAL",
    "Readout",
    "counts",
    "factors",
    "facts",
    "histogram",
    "metrics",
    "peak_rss",
    "preset_metrics",
    "preset_result",
    "summary",
]
