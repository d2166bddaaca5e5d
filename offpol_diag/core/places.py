"""Places along which the mismatch is broken down, such as steps, lags, lengths, positions, turns.

An axis is a row of a table: its name and what gives a token, or a sequence, its place. The same sums are kept
at every place of every axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from offpol_diag.core.gap import Terms
from offpol_diag.core.intervals import SHARED
from offpol_diag.core.segments import floats
from offpol_diag.core.state import MOST_PLACES, Array, Table
from offpol_diag.dump.batch import Batch, label
from offpol_diag.dump.check import UNKNOWN
from offpol_diag.dump.schema import TRAIN_VERSION

COLUMNS = (
    *("tokens", "sequences", "log_ratio", "abs_log_ratio", "ratio_minus_1", "ratio_sq_minus_1"),
    *("k3", "prob_diff", "f_2"),
)
"""Sums at every place, as `gap.columns` names them."""
PREFIX = "where."
"""Begins the name of an axis's table."""
STEP, LAG, LENGTH, POSITION = "step", "policy_lag", "length", "position"
POSITIONS, TURNS, LAGS = 18, 64, 64
"""Places of positions (octaves), turns and lags of tokens; the last holds all beyond."""
PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class By:
    """An axis.

    Attributes:
        name: of its table and in results.
        title: on the page.
        places: of each token, [T], or sequence, [S]: its label's index, or `len(labels)` for none; without
            labels, values of a column. None where the dump lacks it.
        labels: of the places.
        alike: whether neighbouring tokens mostly share a place.
        fewest: places below which the axis is not shown.
    """

    name: str
    title: str
    places: Callable[[Batch], Any]
    labels: tuple[str, ...] = ()
    alike: bool = True
    fewest: int = 1


def octave(x: Array) -> Array:
    """Compute ⌊log2 x⌋ of integers ≥ 1, from the exponent of a float64."""
    return (x.astype(np.float64).view(np.int64) >> 52) - 1023


def of_octave(at: int) -> str:
    """Return the lengths in an octave."""
    return f"{2**at}–{2 ** (at + 1) - 1}"


def _token_lag(batch: Batch) -> Array | None:
    """Return each token's lag plus 1: the trainer's version less that of the weights that sampled it."""
    sampled, trained = batch.weight_versions, batch.scalars.get(TRAIN_VERSION)
    if sampled is None or trained is None:
        return None
    versions = np.array([one if type(one) is int else UNKNOWN for one in trained], np.int64)
    trainer = np.repeat(versions, batch.lengths)
    lag = np.clip(trainer - sampled, -1, LAGS - 2)
    return np.where((trainer > UNKNOWN) & (sampled > UNKNOWN), lag + 1, LAGS)


def _probability(batch: Batch) -> Array:
    """Return how many of `PROBABILITIES` each token's probability is above."""
    flags = [(batch.rollout > math.log(edge)).view(np.uint8) for edge in PROBABILITIES]
    return reduce(np.add, flags).astype(np.int64)  # faster than a search


def _sign(batch: Batch) -> Array | None:
    """Return 0 for A < 0, 1 for A = 0, 2 for A > 0."""
    return None if batch.advantages is None else np.sign(batch.advantages).astype(np.int64) + 1


_LENGTH = By(
    LENGTH,
    "response length (unmasked tokens)",
    lambda batch: octave(np.maximum(batch.lengths, 1)),
    tuple(map(of_octave, range(63))),
)


def of_sequences(group_by: Sequence[str] = ()) -> list[By]:
    """Return the axes that give a sequence a place; `group_by` are columns that are axes too."""
    titles = {STEP: "training step", LAG: "policy lag (updates)"} | {name: name for name in group_by}
    step, lag, *others = (By(name, title, partial(_column, name)) for name, title in titles.items())
    return [step, lag, _LENGTH, *others]


def _column(name: str, batch: Batch) -> list[object] | None:
    return batch.scalars.get(name)


OF_TOKENS = (
    By(
        POSITION,
        "position in the response",
        lambda batch: np.minimum(octave(np.maximum(batch.position + 1, 1)), POSITIONS - 1),
        ("0", *(f"{2**at - 1}–{2 ** (at + 1) - 2}" for at in range(1, POSITIONS - 1)), f"{2**17 - 1}+"),
    ),
    By(
        "turn",
        "turn of the response",
        lambda batch: np.minimum(batch.turn, TURNS - 1),
        (*map(str, range(1, TURNS)), f"{TURNS}+"),
        fewest=2,
    ),
    By(
        "token_lag",
        "policy lag of the token (updates)",
        _token_lag,
        ("< 0", *map(str, range(LAGS - 2)), f"{LAGS - 2}+"),
    ),
    By(
        "rollout_probability",
        "probability of the token under π_rollout",
        _probability,
        ("< 0.01", "0.01–0.1", "0.1–0.5", "0.5–0.9", "0.9–0.99", "> 0.99"),
        alike=False,
    ),
    By("advantage_sign", "sign of the advantage", _sign, ("A < 0", "A = 0", "A > 0")),
)


# ---------------------------------------------------------------- sums of a batch


@dataclass(frozen=True)
class Pieces:
    """Tokens in pieces, each of adjacent tokens of a sequence that share their places."""

    row: Array  # the sequence of each piece, [N]
    places: dict[str, Array]  # axis → the place of each piece, [N]
    sums: dict[str, Array]  # column → its sum over each piece, [N]; in place of Σ(r² − 1), Σ(r − 1)²


def _cut(terms: Terms) -> tuple[Pieces, Pieces]:
    """Cut a batch into pieces along axes whose places neighbours share, and into tokens for the others."""
    batch = terms.tokens.batch
    row = np.repeat(np.arange(batch.sequences), batch.lengths)
    places = {by: at for by in OF_TOKENS if (at := by.places(batch)) is not None}
    tokens = {
        "log_ratio": terms.log_ratio,
        "k3": terms.k3,
        "ratio_minus_1": terms.ratio_minus_1,
        "abs_log_ratio": terms.abs_log_ratio,
        "prob_diff": terms.prob_diff,
        "ratio_sq_minus_1": terms.ratio_minus_1 * terms.ratio_minus_1,
        "f_2": floats(terms.abs_log_ratio > math.log(2)),
        "tokens": np.ones(batch.tokens),
    }
    alike = {by.name: at for by, at in places.items() if by.alike}
    new = np.arange(batch.tokens) == 0
    for codes in (row, *alike.values()):
        new[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(new)
    sums = {name: np.add.reduceat(x, starts) if len(starts) else x for name, x in tokens.items()}
    runs = Pieces(row[starts], {name: at[starts] for name, at in alike.items()}, sums)
    return runs, Pieces(row, {by.name: at for by, at in places.items() if not by.alike}, tokens)


def observe(
    terms: Terms,
    columns: Mapping[str, Array],
    more: Mapping[str, Mapping[str, Array]],
    buckets: Array,
    group_by: Sequence[str] = (),
) -> dict[str, Table]:
    """Sum by place along every axis that the dump has.

    Args:
        terms: of the main drift.
        columns: sums of each sequence, with the drift's prefix, [S].
        more: axis of sequences → what else is summed there, [S].
        buckets: what sums are kept apart for, [S].
        group_by: scalar columns that are axes too.
    """
    batch, tables = terms.tokens.batch, dict[str, Table]()
    of_rows = {name: columns[name if name in SHARED else terms.drift.prefix + name] for name in COLUMNS}
    for by in of_sequences(group_by):
        at, most = by.places(batch), 0
        if at is not None and not by.labels:
            texts = {value: label(value) for value in set(at)}
            at, most = [texts[value] for value in at], 0 if by.name == STEP else MOST_PLACES
        if at is not None:
            tables[PREFIX + by.name] = Table.of({**of_rows, **more.get(by.name, {})}, buckets, at, most=most)
    labels, which = np.unique(buckets, return_inverse=True)
    for some in _cut(terms) if batch.tokens else ():
        for by in (by for by in OF_TOKENS if by.name in some.places):
            at, size = some.places[by.name], len(by.labels) + 1
            codes, many = which[some.row] * size + at, len(labels) * size
            sums = {name: np.bincount(codes, x, many) for name, x in some.sums.items()}
            sums["ratio_sq_minus_1"] += 2 * sums["ratio_minus_1"]
            row, place = np.divmod(np.flatnonzero(np.bincount(some.row * size + at)), size)
            sums["sequences"] = np.bincount(which[row] * size + place, minlength=many).astype(np.float64)
            bucket, place = np.divmod(np.arange(many), size)
            there = (sums["tokens"] > 0) & (place < size - 1)
            found = {name: sums[name][there] for name in COLUMNS}
            tables[PREFIX + by.name] = Table.of(found, labels[bucket[there]], place[there])
    return tables
