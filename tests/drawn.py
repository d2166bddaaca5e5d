"""Results drawn as the commands draw them."""

import base64
import gzip
import re

from offpol_diag.report import answered
from offpol_diag.report import markdown as _markdown
from offpol_diag.report import terminal as _terminal
from offpol_diag.report.page import page as html  # noqa: F401


def markdown(result):
    """Draw a result for a pull request."""
    return _markdown(answered(result))


def terminal(result, verbose=False, quiet=False):
    """Draw a result for stdout."""
    return _terminal.terminal(answered(result), verbose, quiet)


def read_back(page):
    """Return the JSON of the summary that a page carries."""
    packed = re.search('id="offpol-diag-data">(.*?)</script>', page)[1]
    return gzip.decompress(base64.b64decode(packed)).decode()
