"""The text of token ids, from a tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from offpol_diag import files
from offpol_diag.errors import UsageError, install
from offpol_diag.printable import printable
from offpol_diag.result import Result

MOST = 256 << 20
"""Maximum bytes of a tokenizer.json."""
SHOWN = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})
"""White space, made visible."""
UNKNOWN = "\ufffd"
"""Replacement for bytes that are no text by themselves."""


def with_texts(summary: Result, path: Path | None) -> Result:
    """Add the text of every token id that a report shows, if a tokenizer.json is given."""
    if path is None:
        return summary
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        what = "--tokenizer needs the package tokenizers, which is not installed"
        raise UsageError(what, install("tokenizer")) from error
    try:
        tokenizer = Tokenizer.from_buffer(files.read(path, MOST))
    except Exception as error:  # tokenizers raises Exception itself
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = "give the tokenizer.json beside the model's weights"
        what = f"--tokenizer: cannot read {printable(str(path))}: {printable(str(reason))}"
        raise UsageError(what, hint) from None
    worst, types = summary.worst, summary.charts.token_types
    ids = {token_id for one in (*worst.sequences, *worst.typical) for token_id in one.token_ids}
    ids |= {one.token_id for one in worst.tokens if one.token_id is not None}
    ids |= {one.token_id for one in (types.worst if types else [])}
    texts = {str(one): _text(tokenizer, one) for one in sorted(ids)}
    charts = summary.charts.model_copy(
        update={"token_texts": {one: text for one, text in texts.items() if text}}
    )
    return summary.model_copy(update={"charts": charts})


def _text(tokenizer: object, token_id: int) -> str:
    """Return a token's text with white space made visible; else its name in the vocabulary."""
    if not 0 <= token_id < 1 << 32:
        return ""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)  # type: ignore[attr-defined]
    if not text or UNKNOWN in text:
        text = tokenizer.id_to_token(token_id) or ""  # type: ignore[attr-defined]
    return printable(text.translate(SHOWN))
