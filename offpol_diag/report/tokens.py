"""The worst responses, token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from offpol_diag import files
from offpol_diag.errors import UsageError, install
from offpol_diag.number import Number
from offpol_diag.numerals import counted, rounded
from offpol_diag.printable import printable
from offpol_diag.result import Result, WorstSequence
from offpol_diag.table import Cell, Table

STEPS = (1.1, 2.0, 10.0, 1000.0)
"""Factors between the policies at which the colour of a token changes."""


class Token(NamedTuple):
    """A token: its text, its colour (n1 to n4: less likely under the trainer; p1 to p4), a remark."""

    text: str
    look: str
    remark: str


class Response(NamedTuple):
    """A response as a strip of tokens."""

    name: str
    facts: str
    tokens: tuple[Token, ...]


def strips(result: Result) -> tuple[Response, ...]:
    """Return the worst responses as strips; none where the texts of their tokens are not known."""
    texts = result.charts.token_texts
    return tuple(_response(one, texts) for one in result.worst if one.token_ids and texts)


def _response(one: WorstSequence, texts: Mapping[str, str]) -> Response:
    named = {"step": one.step, "lag": one.policy_lag, "tokens": one.length, "mean K3": rounded(one.k3_mean)}
    named |= {"reward": None if one.reward is None else rounded(one.reward), "from token": one.first or None}
    found, last = list[Token](), one.positions[0] - 1
    for token, at, delta, *logs in zip(
        one.token_ids, one.positions, one.log_ratios, one.rollout_log_probs, one.train_log_probs, strict=True
    ):
        if at > last + 1:
            found.append(Token(f"[{at - last - 1} masked]", "mk", ""))
        q, p = (math.exp(min(log, 700)) for log in logs)  # log-probs above 0 are a bug, and may be any
        remark = f"position {at}: Δ {delta:+.3g}, π_rollout {q:.3g}, π_train {p:.3g}"
        found.append(Token(texts.get(str(token), str(token)), shade(delta), remark))
        last = at
    facts = " · ".join(f"{name} {value}" for name, value in named.items() if value is not None)
    return Response(one.sequence_id, facts, tuple(found))


def shade(delta: float) -> str:
    """Return the colour of a token by its log-ratio; empty if both policies agree within a factor of 1.1."""
    strength = sum(abs(delta) >= math.log(step) for step in STEPS)
    return f"{'n' if delta < 0 else 'p'}{strength}" if strength else ""


def table(result: Result) -> Table:
    """Return the worst responses, without columns that the dump lacks."""
    rows: list[tuple[Cell, ...]] = []
    for one in result.worst:
        numbers = (one.k3_mean, one.log_ratio_sum, one.max_abs_log_ratio)
        rows.append((one.sequence_id, one.step, one.length, *(Number(value=x) for x in numbers)))
    caption = f"{counted(len(rows), 'sequence')} with the largest mean K3"
    header = ("sequence", "step", "length", "K3, mean", "ΣΔ, nats", "max |Δ|, nats")
    found = Table("worst-sequences", caption, header, rows, shown="page")
    return found.without(found.empty)


# ---------------------------------------------------------------- texts of ids, from a tokenizer.json

MOST = 256 << 20
"""Most bytes of a tokenizer.json."""
SHOWN = str.maketrans({" ": "·", "\n": "↵", "\t": "→"})
"""White space, made visible."""
NO_TEXT = "\ufffd"
"""What a tokenizer decodes bytes to that are no text by themselves."""


def with_texts(result: Result, path: Path | None) -> Result:
    """Add the text of every token id that a report shows, if a tokenizer.json is given.

    White space is made visible, and a token without a text of its own has its name in the vocabulary.
    """
    if path is None:
        return result
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
    ids = {one for row in result.worst for one in row.token_ids}
    texts = {}
    for one in sorted(one for one in ids if 0 <= one < 1 << 32):
        text = tokenizer.decode([one], skip_special_tokens=False)
        if not text or NO_TEXT in text:
            text = tokenizer.id_to_token(one) or ""
        if text:
            texts[str(one)] = printable(text.translate(SHOWN))
    charts = result.charts.model_copy(update={"token_texts": texts})
    return result.model_copy(update={"charts": charts})
