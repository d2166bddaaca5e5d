"""Every number of every report: plain floats with units, and the JSON of them (`format = 1`).

A `Summary` is what all renderers, the recommendation and the gate read. Nothing below it is needed to draw
a report again, and nothing above it computes a number.
"""

from offpol_diag.summary.advice import (
    After,
    AtLength,
    Cause,
    Decision,
    Diagnosis,
    Example,
    Fired,
    GateVerdict,
    Label,
    Lengths,
    Recommendation,
)
from offpol_diag.summary.compared import (
    Against,
    Comparison,
    Contrast,
    Drops,
    LostSequence,
    Lot,
    OtherRun,
    Pairing,
)
from offpol_diag.summary.facts import DumpFacts, Run, Skipped
from offpol_diag.summary.number import Model, Number, Numbers
from offpol_diag.summary.places import Histogram, Location, Place, Worst, WorstSequence, WorstToken
from offpol_diag.summary.presets import PresetResult, Rule
from offpol_diag.summary.result import FORMAT, Summary, load, load_stream, loads
from offpol_diag.summary.swept import NoiseFloor, PredictedKeep, SolvedWindow, Sweep, SweptPoint

__all__ = [
    "FORMAT",
    "After",
    "Against",
    "AtLength",
    "Cause",
    "Comparison",
    "Contrast",
    "Decision",
    "Diagnosis",
    "Drops",
    "DumpFacts",
    "Example",
    "Fired",
    "GateVerdict",
    "Histogram",
    "Label",
    "Lengths",
    "Location",
    "LostSequence",
    "Lot",
    "Model",
    "NoiseFloor",
    "Number",
    "Numbers",
    "OtherRun",
    "Pairing",
    "Place",
    "PredictedKeep",
    "PresetResult",
    "Recommendation",
    "Rule",
    "Run",
    "Skipped",
    "SolvedWindow",
    "Summary",
    "Sweep",
    "SweptPoint",
    "Worst",
    "WorstSequence",
    "WorstToken",
    "load",
    "load_stream",
    "loads",
]
