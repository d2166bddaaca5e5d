"""From Parquet files to packed batches: `open_dump(sources).batches()`.

sources   what the user named → files
urls      a URL in parts, and without what is secret
stores    a URL → the store it is in
locations where a file is
listing   directories and globs of a store
ranges    filesystems of fsspec, by ranges and with patience
outages   why a store does not give what it was asked for
spool     standard input, kept on disk
files     a file's metadata; why a file cannot be read
columns   whose column is whose: roles, aliases, overrides
forms     a row is a sequence, or a token
schemas   types, in one file and across files
slices    files → slices of rows, with their place for messages
sizes     how large batches are, and row groups
long      rows of one token → slices
thrift    the protocol of Parquet's headers
pages     whether the sizes that a column declares can be true
plain     labels of any scalar type → numbers, booleans, text or bytes
ragged    Arrow lists → values and lengths
checks    which rows are bad, and why
signs     positive log-probs on the train side
keys      what the bootstrap draws
pack      rows → Batch
join      small batches → larger ones
dump      all of it, one after the other
shards    a dump in pieces that can be read apart
ahead     a dump that several threads read

What reads with torch is imported when it is first asked for: a URL can be cleaned without (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.readers.dump import Dump, open_dump
    from offpol_diag.readers.files import DumpInfo
    from offpol_diag.readers.skipping import BadRow, Skipped

__all__ = ["BadRow", "Dump", "DumpInfo", "Skipped", "open_dump"]

_HOMES = {
    "BadRow": "skipping",
    "Dump": "dump",
    "DumpInfo": "files",
    "Skipped": "skipping",
    "open_dump": "dump",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
