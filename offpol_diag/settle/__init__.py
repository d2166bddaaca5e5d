"""The reading that goes before the analysis: what every trainer batch settles, and rewards by group.

It is made only when a preset looks beyond a sequence, or when advantages have to be made of rewards.
"""

from offpol_diag.settle.asked import Asked, Found
from offpol_diag.settle.look import Look
from offpol_diag.settle.reading import settle

__all__ = ["Asked", "Found", "Look", "settle"]
