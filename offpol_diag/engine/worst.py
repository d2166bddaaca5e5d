"""The sequences and tokens with the largest mismatch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from offpol_diag.batch import Batch
from offpol_diag.engine import gap, sample, segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Records
from offpol_diag.engine.terms import Drift, Terms, collected
from offpol_diag.number import LARGEST
from offpol_diag.result import WorstSequence, WorstToken

SEQUENCES, TOKENS, CONTEXT, TIES = 10, 20, 3, 1000
SOME, STRIP = 9, 256
"""Sequences to choose a typical one from, and most tokens of a sequence that are kept."""

M = TypeVar("M")


class Largest:
    """Collect the largest |Δ| of every sequence."""

    def __init__(self, context: BatchContext, drift: Drift) -> None:
        self.parts: list[Array] = []

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        self.parts.append(segments.largest(terms.size, terms.block.offsets))

    @property
    def most(self) -> Array:
        """Largest |Δ| of each sequence, [S]; -inf for an empty sequence."""
        return np.concatenate(self.parts)


def records(most: int, scored: Sequence[tuple[float, NamedTuple]]) -> Records:
    """Keep the records of highest score, as JSON; equal scores are ordered by that text."""
    scores, texts = ([score for score, _ in scored], [json.dumps(row._asdict()) for _, row in scored])
    columns = {"score": pa.array(scores, pa.float64()), "record": pa.array(texts, pa.string())}
    return Records.of(most, pa.table(columns))


def read(kept: Records, kind: type[M]) -> list[M]:
    """Read what `records` kept, best first."""
    return [kind(**json.loads(text)) for text in kept.table["record"].to_pylist()]


def renumbered(kept: Records, rows: int) -> Records:
    """Return records of sequences that are named by their row, where so many rows come before them."""
    texts = []
    for text in kept.table["record"].to_pylist():
        record = json.loads(text)
        number = record["sequence_id"]
        if number.isdecimal() and len(number) < 20:
            record["sequence_id"] = str(int(number) + rows)
        texts.append(json.dumps(record))
    table = kept.table.set_column(1, "record", pa.array(texts, pa.string()))
    return Records.of(kept.most, table, seen=kept.seen)


def sequences(context: BatchContext, drift: Drift) -> Records:
    """Find the sequences with the largest mean k3 above 0."""
    batch, columns = context.batch, gap.columns(context, drift)
    k3 = np.nan_to_num(columns[f"{drift.prefix}k3"] / np.maximum(batch.lengths, 1))
    at = _largest(k3, SEQUENCES)
    whole = np.stack((at, batch.cu_seqlens[at], batch.lengths[at]), axis=1)
    best = _best(whole, _table(context, drift, k3)[at], SEQUENCES)
    rows = _sequences(batch, drift, [ints for ints, _ in best], [reals for _, reals in best])
    return records(SEQUENCES, [(row.k3_mean, row) for row in rows])


def typical(context: BatchContext, drift: Drift) -> Records:
    """Choose a few sequences by hash, those with policy lag 0 first."""
    batch, lags = context.batch, context.batch.scalars.get("policy_lag")
    k3 = gap.columns(context, drift)[f"{drift.prefix}k3"] / np.maximum(batch.lengths, 1)
    chance = sample.hashes(batch, *_policies(batch, drift)).astype(np.float64) / 2.0**64 + 0.5
    starts = np.stack((chance, batch.cu_seqlens[:-1], batch.lengths), axis=1)
    known = np.concatenate((starts, _table(context, drift, k3)), axis=1)
    scores = known[:, 0]
    if lags is not None:
        scores += [lag == 0 for lag in lags]
    scores[~np.isfinite(known).all(axis=1)] = -1.0  # an empty sequence has no largest |Δ|
    least = np.sort(scores)[-SOME:][0] if len(scores) else 0.0
    few = np.flatnonzero((scores >= least) & (scores >= 0)).tolist()
    few.sort(key=lambda row: (-scores[row], sequence_id(batch, row)))
    few = few[:SOME]
    whole = [[row, *known[row, 1:3].astype(np.int64).tolist()] for row in few]
    rows = _sequences(batch, drift, whole, known[few, 3:].tolist())
    return records(SOME, list(zip(scores[few].tolist(), rows, strict=True)))


def _table(context: BatchContext, drift: Drift, k3: Array) -> Array:
    """Return mean k3, ΣΔ, largest |Δ| and reward of each sequence, [S, 4]; without rewards 0."""
    most, rewards = collected(context, drift, Largest).most, context.batch.rewards
    total = gap.columns(context, drift)[f"{drift.prefix}d"]
    total, most = np.nan_to_num(total), np.minimum(most, LARGEST)  # what overflows is the largest float64
    return np.stack((k3, total, most, np.zeros_like(k3) if rewards is None else rewards), axis=1)


def _sequences(
    batch: Batch, drift: Drift, whole: list[list[int]], numbers: list[list[float]]
) -> list[WorstSequence]:
    """Describe sequences (row, first token, length), with their tokens: at most `STRIP`, of largest ΣK3."""
    if not whole:
        return []
    rows, begins, lengths = zip(*whole, strict=True)
    index = np.concatenate([np.arange(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)])
    q, p = _policies(batch, drift)
    columns = [q, p, batch.position, *([] if batch.token_ids is None else [batch.token_ids])]
    copied = np.stack([x[index].astype(np.float64) for x in columns])
    ends = np.cumsum(lengths)
    return [
        _sequence(batch, row, each, copied[:, end - n : end])
        for row, each, n, end in zip(rows, numbers, lengths, ends.tolist(), strict=True)
    ]


def _policies(batch: Batch, drift: Drift) -> tuple[Array, Array]:
    """Return the log-probs of both policies of a drift, [T] each."""
    q, p = (batch.policy(policy) for policy in (drift.denominator, drift.numerator))
    assert q is not None
    assert p is not None
    return q, p


def _strip(columns: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Return a sequence's tokens as fields, from log-probs, positions and ids, [3 or 4, n]."""
    q, p, *_ = columns
    first, many = 0, columns.shape[1]
    delta = p - q
    if many > STRIP:
        total = np.cumsum(np.concatenate(([0.0], np.nan_to_num(np.expm1(delta) - delta))))
        first = int(np.argmax(total[STRIP:] - total[:-STRIP]))
    here_ = slice(first, first + STRIP)
    position, *ids = columns[2:, here_].astype(np.int64).tolist()
    return {
        "first": first,
        "positions": position,
        "token_ids": ids[0] if ids else [],
        "log_ratios": np.nan_to_num(delta[here_]).tolist(),
        "rollout_log_probs": np.nan_to_num(q[here_]).tolist(),
        "train_log_probs": np.nan_to_num(p[here_]).tolist(),
    }


def tokens(context: BatchContext, drift: Drift) -> Records:
    """Find the tokens with the largest |Δ|, with the log-ratios around them."""
    batch = context.batch
    q, p = _policies(batch, drift)
    at = _among(batch, collected(context, drift, Largest).most)
    at = at[_largest(np.abs(p[at] - q[at]), TOKENS)]
    around = _around(q, p, at)
    real = np.concatenate((np.abs(around[:, CONTEXT : CONTEXT + 1]), _columns(at, q, p), around), axis=1)
    rows = [_token(batch, ints, reals) for ints, reals in _best(_whole(batch, at), real, TOKENS)]
    return records(TOKENS, [(abs(row.log_ratio), row) for row in rows])


def _among(batch: Batch, most: Array) -> Array:
    """Return candidates: tokens of sequences whose largest |Δ| is among the largest."""
    last = np.partition(most, -TOKENS)[-TOKENS] if len(most) >= TOKENS else 0.0
    rows = np.flatnonzero((most >= last) & (most > 0))
    lengths = batch.lengths[rows]
    begins = batch.cu_seqlens[rows] - (np.cumsum(lengths) - lengths)
    return np.repeat(begins, lengths) + np.arange(int(lengths.sum()))


def _largest(scores: Array, many: int) -> Array:
    """Return the indices of the largest scores above 0, falling, with up to `TIES` ties.

    Of these `Records` chooses by text.
    """
    last = np.partition(scores, -many)[-many] if len(scores) > many else 0.0
    candidates = np.flatnonzero((scores >= last) & (scores > 0))
    return candidates[np.argsort(-scores[candidates], kind="stable")[: many + TIES]]


def _best(whole: Array, real: Array, many: int) -> list[tuple[list[int], list[float]]]:
    """Return both tables' rows, if the score (first real) is above 0 and among the best."""
    rows: list[tuple[list[int], list[float]]] = list(zip(whole.tolist(), real.tolist(), strict=True))
    last = rows[min(many, len(rows)) - 1][1][0] if rows else 0.0
    return [row for row in rows if row[1][0] >= last and row[1][0] > 0]


def _sequence(batch: Batch, at: int, numbers: list[float], columns: npt.NDArray[np.float64]) -> WorstSequence:
    k3, total, most, reward = numbers
    lags = batch.scalars.get("policy_lag")
    lag = None if lags is None else lags[at]
    return WorstSequence(
        sequence_id=sequence_id(batch, at),
        step=step(batch, at),
        length=columns.shape[1],
        log_ratio_sum=total,
        k3_mean=k3,
        max_abs_log_ratio=most,
        policy_lag=lag if isinstance(lag, int) else None,
        reward=None if batch.rewards is None else reward,
        **_strip(columns),
    )


def _columns(at: Array, *values: Array) -> Array:
    return np.stack([x[at] for x in values], axis=1)


def _whole(batch: Batch, at: Array) -> Array:
    """Return integers of tokens: sequence, index in it, its length, position, token id."""
    owner = np.searchsorted(batch.cu_seqlens, at, side="right") - 1
    start, end = batch.cu_seqlens[owner], batch.cu_seqlens[owner + 1]
    ids = at if batch.token_ids is None else batch.token_ids[at]
    return np.stack((owner, at - start, end - start, batch.position[at], ids), axis=1)


def _around(q: Array, p: Array, at: Array) -> Array:
    """Return Δ of tokens and their neighbours, [many, 2 · CONTEXT + 1], also across sequence borders."""
    near = np.clip(at[:, None] + np.arange(-CONTEXT, CONTEXT + 1), 0, max(len(q) - 1, 0))
    delta: Array = np.nan_to_num(p[near] - q[near])
    return delta


def _token(batch: Batch, ints: list[int], reals: list[float]) -> WorstToken:
    sequence, at, length, position, token = ints
    _, q, p, *around = reals
    return WorstToken(
        sequence_id=sequence_id(batch, sequence),
        step=step(batch, sequence),
        position=position,
        length=length,
        token_id=None if batch.token_ids is None else token,
        rollout_log_prob=q,
        train_log_prob=p,
        log_ratio=around[CONTEXT],
        before=around[max(CONTEXT - at, 0) : CONTEXT],
        after=around[CONTEXT + 1 : CONTEXT + length - at],
    )


def sequence_id(batch: Batch, at: int) -> str:
    """Return the id of a sequence as text; "?" where the dump has none."""
    values = batch.scalars.get("sequence_id")
    return "?" if values is None or values[at] is None else str(values[at])


def step(batch: Batch, at: int) -> int | None:
    """Return the step of a sequence, if the dump has one that is a whole number."""
    values = batch.scalars.get("step")
    result = None if values is None else values[at]
    return result if isinstance(result, int) else None
