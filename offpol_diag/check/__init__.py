"""Compare the metrics that a trainer logged with those that its dump says it must have logged.

curves     the files of an experiment tracker → name → step → value
expected   one training step of a dump → what the trainer logs of it, by the tables of `offpol_diag.trainers`
variants   other definitions that a trainer may have computed instead, as a table
verdict    which metrics are equal, from which step on others differ, and which variant reproduces them
result     the answer, without numpy
"""

from offpol_diag.check.result import Checked, Finding, MetricCheck, Point

__all__ = ["Checked", "Finding", "MetricCheck", "Point"]
