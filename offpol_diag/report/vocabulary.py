"""The text of token ids, from a tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from offpol_diag import files
from offpol_diag.errors import UsageError, install
from offpol_diag.printable import printable
from offpol_diag.result import Result

MOST = 256 << 20
"""Most bytes of a tokenizer.json."""
SHOWN = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})
"""White space, made visible."""
NO_TEXT = "\ufffd"
"""What a tokenizer decodes bytes to that are no text by themselves."""


def with_texts(summary: Result, path: Path | None) -> Result:
    """Add the text of every token id that a report shows, if a tokenizer.json is given.

    White space is made visible, and a token without a text of its own has its name in the vocabulary.
    """
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
        what = f"--tokenizer: cannot read {printable(str(path))}: {printable(str(reason))}"
        raise UsageError(what, "give the tokenizer.json beside the model's weights") from None
    worst = summary.worst
    ids = {one for row in worst.sequences for one in row.token_ids}
    ids |= {token.token_id for token in worst.tokens if token.token_id is not None}
    texts = {}
    for one in sorted(one for one in ids if 0 <= one < 1 << 32):
        text = tokenizer.decode([one], skip_special_tokens=False)
        if not text or NO_TEXT in text:
            text = tokenizer.id_to_token(one) or ""
        if text:
            texts[str(one)] = printable(text.translate(SHOWN))
    charts = summary.charts.model_copy(update={"token_texts": texts})
    return summary.model_copy(update={"charts": charts})
