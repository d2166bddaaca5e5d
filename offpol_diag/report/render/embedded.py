"""What a page carries packed, its summary above all: gzipped, then written in 85 characters.

Base 85 takes a sixteenth less than base 64, of two megabytes. Of the summary, fields at their default are
left out; reading fills them in again, exactly.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import zlib

from offpol_diag.errors import ResultError
from offpol_diag.summary import Summary, loads

DATA_ID = "offpol-diag-data"

DIGITS = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;,=>?@^_`{|}~"
"""Of RFC 1924, with `,` for `<`, which a script element must not hold."""

HINT = "give the report that `analyze` wrote"


def embedded(summary: Summary) -> str:
    """What stands in the script element `DATA_ID`; equal summaries give equal texts."""
    data = {"format": summary.format, **summary.model_dump(mode="json", exclude_defaults=True)}
    return packed(json.dumps(data, ensure_ascii=False, separators=(",", ":")))


def packed(text: str) -> str:
    """A text gzipped, in base 85, so that a script element can hold it."""
    return base85(gzipped(text))


def gzipped(text: str) -> bytes:
    """A text as small as gzip makes it; equal texts give equal bytes."""
    return gzip.compress(text.encode(), 9, mtime=0)


def base85(data: bytes) -> str:
    """Bytes in base 85 (RFC 1924) with `,` for `<`; the standard library takes seven times as long."""
    import numpy as np

    spare = -len(data) % 4
    words = np.frombuffer(data + bytes(spare), dtype=">u4").astype(np.uint32)
    digits = np.empty((len(words), 5), dtype=np.uint8)
    for place in reversed(range(5)):
        words, digits[:, place] = np.divmod(words, 85)
    text = np.frombuffer(DIGITS, dtype=np.uint8)[digits].tobytes()
    return text[: len(text) - spare].decode("ascii")


def unpacked(text: str) -> str:
    """The text that `packed` was given; ValueError, OSError or EOFError where it is damaged."""
    return gzip.decompress(base64.b85decode(text.replace(",", "<"))).decode()


def digest(text: str) -> str:
    """SHA-256 in base 64, as a content security policy names a script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def read_back(html: str) -> str:
    """The JSON of the summary in a page, as `Summary.to_json` writes it.

    Raises:
        ResultError: the page is not a report of ours, or its data are damaged.
    """
    found = re.search(rf'<script type="text/plain" id="{DATA_ID}">(.*?)</script>', html, re.DOTALL)
    if found is None:
        raise ResultError("this HTML holds no data of offpol-diag", HINT)
    try:
        text = unpacked(found[1])
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise ResultError("the data in this HTML are damaged", HINT) from error
    return loads(text, "this report").to_json()


def script_json(text: str) -> str:
    """JSON that can stand inside a script element: nothing in it can close or open one."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
