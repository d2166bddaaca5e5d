"""The numbers a trainer would have logged for this dump, in its own names and definitions.

One module per trainer; a new trainer is a ledger here and a word in `grammar.LOGS`.
"""

from __future__ import annotations

from offpol_diag.crosswalk import (
    areal,
    miles,
    nemo_rl,
    open_instruct,
    openrlhf,
    prime_rl,
    roll,
    skyrl,
    slime,
    slime_mis,
    swift,
    trl,
    verl,
)
from offpol_diag.crosswalk.ledger import Book

BOOKS: dict[str, Book] = {
    **{book.logs: book for book in verl.BOOKS},
    trl.BOOK.logs: trl.BOOK,
    swift.BOOK.logs: swift.BOOK,
    openrlhf.BOOK.logs: openrlhf.BOOK,
    prime_rl.BOOK.logs: prime_rl.BOOK,
    skyrl.BOOK.logs: skyrl.BOOK,
    roll.BOOK.logs: roll.BOOK,
    open_instruct.BOOK.logs: open_instruct.BOOK,
    nemo_rl.BOOK.logs: nemo_rl.BOOK,
    slime.BOOK.logs: slime.BOOK,
    slime_mis.BOOK.logs: slime_mis.BOOK,
    **{book.logs: book for book in (*miles.BOOKS, *areal.BOOKS)},
}
"""The word in a preset's `logs` → how that trainer logs."""
