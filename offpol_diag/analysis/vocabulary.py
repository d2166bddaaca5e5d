"""The text of token ids, from a tokenizer.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offpol_diag import wholefiles
from offpol_diag.errors import UsageError
from offpol_diag.printable import printable
from offpol_diag.summary import Summary

MOST = 256 << 20
"""Maximum bytes of a tokenizer.json."""
SHOWN = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})
"""White space, made visible."""
UNKNOWN = "\ufffd"
"""What stands for bytes that are no text by themselves."""


def with_texts(summary: Summary, path: Path | None) -> Summary:
    """Return the summary with the text of every token id that a report shows.

    Args:
        summary: a result; without token ids it is returned as it is.
        path: a tokenizer.json, as the package `tokenizers` writes it; None returns the summary as it is.
    """
    if path is None:
        return summary
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        hint = "pip install 'offpol-diag[tokenizer]'"
        raise UsageError("--tokenizer needs the package tokenizers, which is not installed", hint) from error
    try:
        tokenizer = Tokenizer.from_buffer(wholefiles.read(path, MOST))
    except Exception as error:  # tokenizers raises Exception itself
        reason = error.strerror if isinstance(error, OSError) else str(error)
        hint = "give the tokenizer.json beside the model's weights"
        what = f"--tokenizer: cannot read {printable(str(path))}: {printable(str(reason))}"
        raise UsageError(what, hint) from None
    texts = {str(one): _text(tokenizer, one) for one in sorted(set(_ids(summary)))}
    charts = summary.charts.model_copy(
        update={"token_texts": {one: text for one, text in texts.items() if text}}
    )
    return summary.model_copy(update={"charts": charts})


def _ids(summary: Summary) -> Iterator[int]:
    worst = summary.worst
    for sequence in (*worst.sequences, *([worst.typical] if worst.typical else [])):
        yield from sequence.strip.token_ids if sequence.strip else []
    yield from (one.token_id for one in worst.tokens if one.token_id is not None)
    yield from (
        one.token_id for one in (summary.charts.token_types.worst if summary.charts.token_types else [])
    )


def _text(tokenizer: object, token_id: int) -> str:
    """Return a token's text with white space made visible; else its name in the vocabulary."""
    if not 0 <= token_id < 1 << 32:
        return ""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)  # type: ignore[attr-defined]
    if not text or UNKNOWN in text:
        text = tokenizer.id_to_token(token_id) or ""  # type: ignore[attr-defined]
    return printable(text.translate(SHOWN))
