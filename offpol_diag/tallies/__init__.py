"""Tallies as files: pieces of a dump are analysed apart, on any machines, and merged.

arrays    numbers as text
states    every kind of state as plain data
settings  what must be equal before two tallies are merged
pieces    what each piece read, and whether two of them overlap
expected  what the tally of a study must look like
file      the JSON of it: written, and read without trust
merging   many files → one tally, and its Summary
"""

from offpol_diag.tallies.file import TallyFile, read, write
from offpol_diag.tallies.merging import merge, summary
from offpol_diag.tallies.pieces import piece

__all__ = ["TallyFile", "merge", "piece", "read", "summary", "write"]
