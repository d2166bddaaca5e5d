"""Prepare plotly's bundled plotly.js for embedding: gzipped, with its digest for the content security policy.

Gzipping it takes as long as rendering the rest of a page. It does not depend on the summary, so `begin`
starts it early in a thread; gzip releases the interpreter's lock.
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
    """Return the script for all pages, waiting for `begin` if it is in progress."""
    with _LOCK:
        return _made()


def begin() -> None:
    """Start preparing the script in a thread; errors are raised by `library`."""
    Thread(target=_quietly, name="offpol-diag-library", daemon=True).start()


def _quietly() -> None:
    with suppress(Exception):
        library()


@cache
def _made() -> Library:
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return Library(gzipped(source), digest(source))
