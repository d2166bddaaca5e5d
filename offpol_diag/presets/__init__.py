"""Correction methods as data: a preset, the catalogue of those that ship, their grammar and their words."""

from offpol_diag.presets.preset import AGGREGATES as AGGREGATES
from offpol_diag.presets.preset import FLOAT32_OVERFLOW as FLOAT32_OVERFLOW
from offpol_diag.presets.preset import OF_SEQUENCES as OF_SEQUENCES
from offpol_diag.presets.preset import SMALLEST_NORM as SMALLEST_NORM
from offpol_diag.presets.preset import UNSIGNED as UNSIGNED
from offpol_diag.presets.preset import Action as Action
from offpol_diag.presets.preset import Clip as Clip
from offpol_diag.presets.preset import Denominator as Denominator
from offpol_diag.presets.preset import Loss as Loss
from offpol_diag.presets.preset import Numerator as Numerator
from offpol_diag.presets.preset import Over as Over
from offpol_diag.presets.preset import Overflow as Overflow
from offpol_diag.presets.preset import Policy as Policy
from offpol_diag.presets.preset import Preset as Preset
from offpol_diag.presets.preset import Reject as Reject
from offpol_diag.presets.preset import Sign as Sign
from offpol_diag.presets.preset import Statistic as Statistic
from offpol_diag.presets.preset import Veto as Veto
from offpol_diag.presets.preset import Weight as Weight
from offpol_diag.presets.preset import WeightOver as WeightOver
