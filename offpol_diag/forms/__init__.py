"""Read what trainers write by themselves: find the form, align its log-probs, convert to a canonical dump.

form        what a form is: `Form`, `Alignment`, `Row` (one sequence)
table       the forms, one row each
files       the beginning of a file (`Head`); JSON lines, Arrow
pickles     pickles and torch files, read without running their code
generic     files of any writer whose columns bear names that we know, or are told
trainers    what NeMo-RL, prime-rl, ROLL, open-instruct, verl, TRL and ms-swift write as text
slime       what slime and miles pickle
batches     batches that SkyRL and verl pickle whole
detect      sources → files and their form
align       span, shift and padding of log-probs: applied, and checked against the data
join        columns of a second file, found by the id of the sequence
unread      fields that nobody reads
long        one row per token → one row per sequence
conversion  rows → canonical Parquet; `open_dump`, which reads any form

To add a form, write a row in `FORMS` of `table.py`: `detect` judges the `Head` of a file, and `read` yields a
`Row` per sequence from the files of a dump, in the frame that `alignment` declares. A `Row` has canonical
names (`readers.columns`): `tokens` holds one array per column, `scalars` one value each, `where` the place,
for messages. Do not shift, cut or pad in `read`: `align` does it, and checks it. A mistake in a file is a
`DumpError` with a hint. A kind of file that `Head.of` does not know needs a row in `MAGIC` of `files.py`.
Then a generator in `tests/forms/` that writes the form as its trainer does, and its round trip.
"""

from __future__ import annotations

from offpol_diag.forms.conversion import Converted, Reading, convert, open_dump

__all__ = ["Converted", "Reading", "convert", "open_dump"]
