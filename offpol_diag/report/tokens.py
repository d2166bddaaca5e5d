"""The worst responses, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from offpol_diag import files
from offpol_diag.errors import UsageError, install
from offpol_diag.number import Number
from offpol_diag.numerals import counted, rounded
from offpol_diag.printable import printable
from offpol_diag.result import Result, WorstSequence
from offpol_diag.table import Cell, Table

STEPS = (1.1, 2.0, 10.0, 1000.0)
"""Factors between the policies at which the colour of a token changes."""
SEQUENCES = ("sequence", "step", "length", "K3, mean", "ΣΔ, nats", "max |Δ|, nats")
NOTE = "Positions count from 0. Log-probs in nats; Δ = log π_train − log π_rollout."


@dataclass(frozen=True)
class Token:
    """A token: its text, its colour (n1 to n4: less likely under the trainer; p1 to p4), a remark."""

    text: str
    look: str
    remark: str


@dataclass(frozen=True)
class Response:
    """A response as a strip of tokens."""

    name: str
    facts: str
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Strips:
    """The worst responses."""

    worst: tuple[Response, ...]
    open: int = 2


def strips(summary: Result) -> Strips | None:
    """Return the worst responses as strips; None where the texts of their tokens are not known."""
    texts = summary.charts.token_texts
    worst = tuple(_response(one, texts) for one in summary.worst if one.token_ids)
    return Strips(worst) if worst and texts else None


def tables(summary: Result) -> Iterator[Table]:
    """Yield the worst sequences."""
    caption = f"{counted(len(summary.worst), 'sequence')} with the largest mean K3"
    yield _told(Table("worst-sequences", caption, SEQUENCES, [*map(_sequence, summary.worst)]))


def _told(table: Table) -> Table:
    """Return a table without columns that the dump lacks, which the notes name."""
    notes = (NOTE, *(f"The dump does not say: {table.header[i]}." for i in table.empty))
    rows = [["not in the dump" if cell is None else cell for cell in row] for row in table.rows]
    return replace(table, rows=rows, notes=notes, shown="page").without(table.empty)


def title(summary: Result) -> str:
    """Return a finding on the worst responses: their step and reward."""
    worst = summary.worst
    if not worst:
        return "Worst sequences"
    many = f"The {counted(len(worst), 'worst response')}"
    steps = [one.step for one in worst if one.step is not None]
    usual = max(set(steps), key=steps.count) if steps else None
    several = len(summary.at("step")) > 1
    parts = [f"{steps.count(usual)} come from step {usual}"] if usual is not None and several else []
    rewards = {one.reward for one in worst}
    if len(rewards) == 1 and None not in rewards and len(worst) > 1:
        parts.append(f"all scored {rounded(rewards.pop())}")
    return f"{many}: {', and '.join(parts)}" if parts else many


def _response(one: WorstSequence, texts: Mapping[str, str]) -> Response:
    facts = [f"step {one.step}"] if one.step is not None else []
    facts += [f"lag {one.policy_lag}"] if one.policy_lag is not None else []
    facts += [f"{one.length} tokens", f"mean K3 {rounded(one.k3_mean)}"]
    facts += [f"reward {rounded(one.reward)}"] if one.reward is not None else []
    facts += [f"from token {one.first}"] if one.first else []
    ids = [texts.get(str(token), str(token)) for token in one.token_ids]
    found: list[Token] = []
    for place, delta in enumerate(one.log_ratios):
        if place and one.positions[place] != one.positions[place - 1] + 1:
            gap = one.positions[place] - one.positions[place - 1] - 1
            found.append(Token(f"[{gap} masked]", "mk", ""))
        q, p = (math.exp(min(logs[place], 700)) for logs in (one.rollout_log_probs, one.train_log_probs))
        look = shade(delta)
        said = f"position {one.positions[place]}: Δ {delta:+.3g}, π_rollout {q:.3g}, π_train {p:.3g}"
        found.append(Token(ids[place], look, said if look[1:] in ("3", "4") else ""))
    return Response(one.sequence_id, " · ".join(facts), tuple(found))


def shade(delta: float) -> str:
    """Return the colour of a token by its log-ratio; empty if both policies agree within a factor of 1.1."""
    strength = sum(abs(delta) >= math.log(step) for step in STEPS)
    return f"{'n' if delta < 0 else 'p'}{strength}" if strength else ""


# ---------------------------------------------------------------- tables


def _sequence(one: WorstSequence) -> tuple[Cell, ...]:
    numbers = (one.k3_mean, one.log_ratio_sum, one.max_abs_log_ratio)
    return (one.sequence_id, one.step, one.length, *(Number(value=value) for value in numbers))


# ---------------------------------------------------------------- texts of ids, from a tokenizer.json

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
    ids = {one for row in summary.worst for one in row.token_ids}
    texts = {}
    for one in sorted(one for one in ids if 0 <= one < 1 << 32):
        text = tokenizer.decode([one], skip_special_tokens=False)
        if not text or NO_TEXT in text:
            text = tokenizer.id_to_token(one) or ""
        if text:
            texts[str(one)] = printable(text.translate(SHOWN))
    charts = summary.charts.model_copy(update={"token_texts": texts})
    return summary.model_copy(update={"charts": charts})
