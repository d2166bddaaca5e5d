"""From Parquet files to packed batches: `open_dump(sources).batches()`.

urls       a URL in parts, and without what is secret
remote     files on this disk and in stores: retries, and why one cannot be read
sources    what the user named → files
parquet    a file's metadata; why a file cannot be read
columns    roles of columns: aliases, overrides, what they may hold
schema     the form and the columns of a dump, in one file and across files
pages      the sizes that a column declares, checked
rowgroups  row groups → slices of rows
decode     slices → arrays → batches
keys       what the bootstrap draws
checks     bad rows, and signs of the train columns
long       rows of one token → slices
dump       all of it, one after the other
shards     a dump in parts that can be read apart

What reads with torch is imported on first use: a URL can be cleaned without (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.readers.checks import BadRow, Skipped
    from offpol_diag.readers.dump import Dump, DumpInfo, open_dump

__all__ = ["BadRow", "Dump", "DumpInfo", "Skipped", "open_dump"]

_HOMES = {"BadRow": "checks", "Dump": "dump", "DumpInfo": "dump", "Skipped": "checks", "open_dump": "dump"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
