"""The numbers a trainer would have logged for this dump, in its own names and definitions.

One module per trainer; a new trainer is a ledger here and a word in `catalogue.LOGS`.
"""

from __future__ import annotations

from offpol_diag.crosswalk import open_instruct, prime_rl, roll, skyrl, verl
from offpol_diag.crosswalk.ledger import Book

BOOKS: dict[str, Book] = {
    **{book.logs: book for book in verl.BOOKS},
    prime_rl.BOOK.logs: prime_rl.BOOK,
    skyrl.BOOK.logs: skyrl.BOOK,
    roll.BOOK.logs: roll.BOOK,
    open_instruct.BOOK.logs: open_instruct.BOOK,
}
"""The word in a preset's `logs` → how that trainer logs."""
