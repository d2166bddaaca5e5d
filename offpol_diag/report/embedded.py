"""What a page carries: the summary by xz, in base 85 (RFC 1924) with `,` for `<`, unsafe in a script.

What a browser is to unpack is gzipped, since browsers have no xz; of a summary that takes two thirds more.
Fields with their default value are omitted, and restored exactly on reading.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import lzma
import re
import zlib
from pathlib import Path

from offpol_diag.errors import ResultError
from offpol_diag.result import Result, loads

DATA_ID = "offpol-diag-data"
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates, which HTML does not allow."""
XZ = b"\xfd7zXZ\0"
"""First bytes of an xz file."""
MOST = 2**26
"""Bytes of memory that unpacking may take; what `embedded` writes takes 9 MiB."""
DAMAGED = (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError)
"""Errors of decoding damaged data."""

HINT = "give the report that `analyze` wrote"


def templates_dir() -> Path:
    """Return the templates' directory: in the package if installed from a wheel, else in the repository."""
    package = Path(__file__).parents[1]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def embedded(summary: Result) -> str:
    """Return the text of the script element `DATA_ID`; equal summaries give equal texts."""
    summary.describe()
    data = {"format": summary.format, **summary.model_dump(mode="json", exclude_defaults=True)}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return _encoded(lzma.compress(text.encode(), preset=1))  # a fifth of the time, and a quarter larger


def packed(text: str) -> str:
    """Gzip a text and encode it in base 85, safe in a script element; equal texts give equal ones."""
    return _encoded(gzip.compress(text.encode(), 9, mtime=0))


def unpacked(text: str) -> str:
    """Decode the output of `embedded` or `packed`; one of `DAMAGED` if it is damaged."""
    data = base64.b85decode(text.replace(",", "<"))
    return (lzma.decompress(data, memlimit=MOST) if data.startswith(XZ) else gzip.decompress(data)).decode()


def _encoded(data: bytes) -> str:
    return base64.b85encode(data).decode().replace("<", ",")


def digest(text: str) -> str:
    """Return the SHA-256 in base 64, as used in a content security policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def read_back(html: str) -> str:
    """Extract the summary's JSON from a page, as written by `Result.to_json`.

    Raises:
        ResultError: the page is not a report of ours, or its data are damaged.
    """
    found = re.search(rf'<script type="text/plain" id="{DATA_ID}">(.*?)</script>', html, re.DOTALL)
    if found is None:
        raise ResultError("this HTML holds no data of offpol-diag", HINT)
    try:
        text = unpacked(found[1])
    except DAMAGED as error:
        raise ResultError("the data in this HTML are damaged", HINT) from error
    return loads(text, "this report").to_json()


def script_json(text: str) -> str:
    """Escape JSON for a script element, so that it can neither close nor open one."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
