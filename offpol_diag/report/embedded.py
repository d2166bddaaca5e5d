"""What a page carries besides its text: the summary and what a script unpacks, gzipped and in base 64.

Fields of the summary with their default value are omitted; reading the JSON restores them exactly.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path

from offpol_diag.result import Result

UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters and lone surrogates, which HTML does not allow."""


def templates_dir() -> Path:
    """Return the templates' directory: in the package if installed from a wheel, else in the repository."""
    package = Path(__file__).parents[1]
    inside = package / "templates"
    return inside if inside.is_dir() else package.parent / "templates"


def embedded(summary: Result) -> str:
    """Return the summary as packed JSON; equal summaries give equal texts."""
    summary.describe()
    data = {"format": summary.format, **summary.model_dump(mode="json", exclude_defaults=True)}
    return packed(json.dumps(data, ensure_ascii=False, separators=(",", ":")))


def packed(text: str) -> str:
    """Gzip a text, in base 64, which is safe in a script element; equal texts give equal ones."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode()


def digest(text: str) -> str:
    """Return the SHA-256 in base 64, as used in a content security policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def script_json(text: str) -> str:
    """Escape JSON for a script element, so that it can neither close nor open one."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
