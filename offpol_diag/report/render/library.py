"""The plotly.js that ships with plotly, as a page carries it: gzipped, and allowed to run by its digest.

To gzip it takes as long as all else in a page. Nothing in it depends on a summary: `begin` has it made beside
what comes before a page, on another core, since gzip needs no lock of the interpreter.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from threading import Lock, Thread
from typing import NamedTuple

from offpol_diag.report.render.embedded import digest, gzipped

_LOCK = Lock()


class Library(NamedTuple):
    """A script: its source gzipped, and the SHA-256 of the source in base 64."""

    gzipped: bytes
    digest: str


def library() -> Library:
    """What every page carries; who asks while it is being made waits for it."""
    with _LOCK:
        return _made()


def begin() -> None:
    """Begin to make it, and do not wait; what goes wrong is told to who asks for it."""
    Thread(target=_quietly, name="offpol-diag-library", daemon=True).start()


def _quietly() -> None:
    with suppress(Exception):
        library()


@cache
def _made() -> Library:
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return Library(gzipped(source), digest(source))
