"""The numbers a trainer would have logged for this dump, in its own names and definitions.

One module per trainer; a new trainer is a ledger here and a word in `catalogue.LOGS`.
"""

from __future__ import annotations

from offpol_diag.crosswalk import verl
from offpol_diag.crosswalk.ledger import Book

BOOKS: dict[str, Book] = {
    **{book.logs: book for book in verl.BOOKS},
}
"""The word in a preset's `logs` → how that trainer logs."""
