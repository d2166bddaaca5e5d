"""Read Parquet files into packed batches: `open_dump(sources).batches()`.

sources    paths, directories, globs and URLs → list of files
remote     files behind URLs: access, listing, retries, error messages
columns    roles of columns: aliases, overrides, types; the columns of a dump, checked across files
parquet    footers; declared sizes; row groups → tables of whole rows
decode     tables → arrays → batches; labels and keys of sequences
checks     bad rows, and the signs of the train columns
long       long form (one row per token) → tables of one row per sequence
dump       the steps above as one reader
shards     division of a dump into parts that can be read independently

Modules that need torch are imported on first use (PEP 562), so that `sources` works without it.
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
