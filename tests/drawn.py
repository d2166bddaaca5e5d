"""Results drawn as the commands draw them."""

import base64
import gzip
import re

from offpol_diag.report import answered
from offpol_diag.report import markdown as _markdown
from offpol_diag.report import terminal as _terminal
from offpol_diag.report.page import page as html

__all__ = ["html", "markdown", "read_back", "terminal", "unpacked"]


def markdown(result):
    """Draw a result for a pull request."""
    return _markdown(answered(result))


def terminal(result, verbose=False, quiet=False):
    """Draw a result for stdout."""
    return _terminal.terminal(answered(result), verbose, quiet)


def unpacked(text):
    """Return what a script element of a page holds."""
    return gzip.decompress(base64.b64decode(text)).decode()


def read_back(page):
    """Return the JSON of the summary that a page carries."""
    return unpacked(re.search('id="offpol-diag-data">(.*?)</script>', page)[1])
