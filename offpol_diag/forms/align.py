"""Apply an alignment to rows, and check it against the data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

import numpy as np

from offpol_diag.errors import DumpError, UsageError
from offpol_diag.forms.form import Alignment, Row
from offpol_diag.readers.columns import CURRENT, MASK, OLD, ROLLOUT

TRAIN = (OLD, CURRENT)
SAMPLE, FEW = 20_000, 32
"""Tokens on which an alignment is checked, and the fewest that say anything."""
LARGE, FAR = 0.1, 3.0
"""Nats of mean |train − rollout| from which on an alignment is doubted, and how many times better a
neighbour must be."""
SHIFTS = (-1, 1)
HINT = "say --align response or full, left or right (padding), shift=1, or several: --align full,shift=1"


def parse(text: str | None, declared: Alignment) -> Alignment:
    """Return the alignment with the user's changes, such as `full,shift=1`."""
    found = declared
    for word in (part.strip() for part in (text or "").split(",")):
        shift = re.fullmatch(r"shift=([+-]?\d{1,3})", word)
        if shift:
            found = replace(found, shift=int(shift[1]))
        elif word in ("response", "full"):
            found = replace(found, span=word)  # type: ignore[arg-type]
        elif word in ("left", "right"):
            found = replace(found, padding=word)  # type: ignore[arg-type]
        elif word:
            raise UsageError(f"--align {text}: {word!r} is no alignment", HINT)
    return found


def aligned(row: Row, how: Alignment) -> Row | None:
    """Return the tokens of a row that all columns have and the span includes; None if there is none."""
    longest = max((len(values) for values in row.tokens.values()), default=0)
    begins = {name: _offset(row, name, longest, how) for name in row.tokens}
    first = max([0, *begins.values()])
    last = min([longest, *(begins[name] + len(values) for name, values in row.tokens.items())])
    last = max(first, last)
    tokens = {name: values[first - begins[name] : last - begins[name]] for name, values in row.tokens.items()}
    mask = tokens.get(MASK)
    if mask is not None and (how.span, how.padding) != ("response", "none"):  # cut off prompt and padding
        counted = np.flatnonzero(mask)
        front = how.span == "full" or how.padding == "left"
        back = how.span == "full" or how.padding == "right"
        begin = int(counted[0]) if len(counted) and front else 0
        end = 0 if not len(counted) else int(counted[-1]) + 1 if back else len(mask)
        tokens = {name: values[begin:end] for name, values in tokens.items()}
    return replace(row, tokens=tokens) if any(map(len, tokens.values())) or not row.tokens else None


def cut(row: Row, how: Alignment) -> Row:
    """Return a row without its prompt and padding, its columns not shifted against each other."""
    found = aligned(row, replace(how, shift=0))
    return found or replace(row, tokens={name: values[:0] for name, values in row.tokens.items()})


def _offset(row: Row, name: str, longest: int, how: Alignment) -> int:
    """Return the token to which the first value of a column belongs."""
    length = len(row.tokens[name])
    shift = how.shift if name in TRAIN else 0
    if length == longest or (shift > 0 and length == longest - shift):
        return shift
    if how.span == "full":
        return longest - length
    other = next(one for one, values in row.tokens.items() if len(values) == longest)
    hint = "where some lists cover the whole sequence and others its response, say --align full"
    raise DumpError(f"{row.where}: {name!r} has {length} values, and {other!r} {longest}", hint)


def checked(rows: Iterable[Row], how: Alignment, chosen: bool, notes: list[str]) -> Iterator[Row]:
    """Yield aligned rows after looking at the first of them: would a neighbouring shift fit far better?

    Where the user chose the shift, that is added to `notes`.
    """
    held, size, stream = list[Row](), 0, iter(rows)
    for row in stream:
        held.append(row)
        size += len(row.tokens.get(ROLLOUT, ()))
        if size >= SAMPLE:
            break
    gaps = {shift: _gap(held, shift) for shift in (0, *SHIFTS)}
    best = min(SHIFTS, key=lambda shift: gaps[shift])
    if gaps[0] > LARGE and gaps[best] * FAR < gaps[0]:
        better = how.shift + best
        found = (
            f"{held[0].where.partition(', ')[0]}: the trainer's log-probs fit the rollout's with shift "
            f"{better}, not {how.shift}: mean |difference| {gaps[best]:.2g} nats instead of {gaps[0]:.2g}"
        )
        if not chosen:
            hint = f"read them so with --align shift={better}, or as they are with --align shift={how.shift}"
            raise DumpError(found, hint)
        notes.append(found)
    yield from chain(held, stream)


@np.errstate(over="ignore", invalid="ignore")
def _gap(rows: Iterable[Row], shift: int) -> float:
    """Return the mean |train − rollout| over unmasked tokens, the train columns moved by some tokens."""
    gaps = [np.empty(0)]
    for row in rows:
        train = next((row.tokens[name] for name in TRAIN if name in row.tokens), None)
        rollout = row.tokens.get(ROLLOUT)
        if train is not None and rollout is not None:
            at = np.arange(len(rollout))
            counted = row.tokens.get(MASK, np.ones(len(at))) != 0
            keep = (at - shift >= 0) & (at - shift < len(train)) & counted
            gaps.append(np.abs(train[at[keep] - shift].astype(np.float64) - rollout[keep]))
    every = np.concatenate(gaps)
    every = every[np.isfinite(every)]
    return float(every.mean()) if len(every) >= FEW else math.inf if shift else 0.0
