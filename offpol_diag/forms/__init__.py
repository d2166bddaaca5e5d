"""Read what trainers write by themselves: find the form, and convert it to a canonical dump.

form        what a form is: `Form`, `Row` (one sequence)
table       the forms, one row each
files       the beginning of a file (`Head`); JSON lines
pickles     pickles and torch files, read without running their code
generic     records whose fields bear names that we know, or are told
trainers    what NeMo-RL and prime-rl write as JSON lines
slime       what slime and miles pickle
batches     batches that SkyRL pickles whole
detect      sources → files and their form
long        one row per token → one row per sequence
conversion  rows → canonical Parquet; `open_dump`, which reads any form

To add a form, write a row in `FORMS` of `table.py`: `detect` judges the `Head` of a file, and `read` yields a
`Row` per sequence from the files of a dump; `covers` says what its lists cover. A `Row` has canonical names
(`readers.columns`): `tokens` holds one array per column, `scalars` one value each, `where` the place, for
messages. A mistake in a file is a `DumpError` with a hint. Then a generator in `tests/forms/` that writes the
form as its trainer does, and its round trip.
"""

from __future__ import annotations

from offpol_diag.forms.conversion import Converted, convert, open_dump

__all__ = ["Converted", "convert", "open_dump"]
