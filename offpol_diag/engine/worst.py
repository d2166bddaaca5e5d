"""The sequences and tokens with the largest mismatch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import gap, sample, segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Records
from offpol_diag.engine.terms import Drift, Terms, collected
from offpol_diag.number import LARGEST
from offpol_diag.result import WorstSequence, WorstToken
from offpol_diag.result.facts import TOKEN_COLUMNS

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


def records(most: int, kind: type[NamedTuple], scored: Sequence[tuple[float, NamedTuple]]) -> Records:
    """Keep the records of a kind that score highest as JSON, numbers of tokens as the bytes of an array.

    Equal scores are ordered by that text, then by those bytes.
    """
    columns: dict[str, pa.Array] = {"score": pa.array([score for score, _ in scored], pa.float64())}
    rows = [row._asdict() for _, row in scored]
    of_tokens = {
        name: pa.array([np.asarray(row.pop(name), dtype).tobytes() for row in rows], pa.binary())
        for name, dtype in TOKEN_COLUMNS.items()
        if name in kind._fields
    }
    columns["record"] = pa.array([json.dumps(row) for row in rows], pa.string())
    return Records.of(most, pa.table(columns | of_tokens))


def read(kept: Records, kind: type[M]) -> list[M]:
    """Read what `records` kept, best first."""
    rows = [json.loads(text) for text in kept.table["record"].to_pylist()]
    for name in TOKEN_COLUMNS.keys() & set(kept.table.column_names):
        for row, data in zip(rows, kept.table[name].to_pylist(), strict=True):
            row[name] = np.frombuffer(data, TOKEN_COLUMNS[name]).tolist()
    return [kind(**row) for row in rows]


def sequences(context: BatchContext, drift: Drift) -> Records:
    """Find the sequences with the largest mean k3 above 0."""
    batch, columns = context.batch, gap.columns(context, drift)
    k3 = np.nan_to_num(columns[f"{drift.prefix}k3"] / np.maximum(batch.lengths, 1))
    rows = _sequences(batch, drift, _largest(k3, SEQUENCES), _table(context, drift, k3))
    return records(SEQUENCES, WorstSequence, [(row.k3_mean, row) for row in rows])


def typical(context: BatchContext, drift: Drift) -> Records:
    """Choose a few sequences by hash, those with policy lag 0 first."""
    batch, lags = context.batch, context.batch.scalars.get("policy_lag")
    k3 = gap.columns(context, drift)[f"{drift.prefix}k3"] / np.maximum(batch.lengths, 1)
    table = _table(context, drift, k3)
    scores = sample.hashes(batch, *_policies(batch, drift)).astype(np.float64) / 2.0**64 + 0.5
    if lags is not None:
        scores += [lag == 0 for lag in lags]
    scores[~np.isfinite(table).all(axis=1)] = -1.0  # an empty sequence has no largest |Δ|
    few = _largest(scores, SOME)
    rows = _sequences(batch, drift, few, table)
    return records(SOME, WorstSequence, list(zip(scores[few].tolist(), rows, strict=True)))


def _table(context: BatchContext, drift: Drift, k3: Array) -> Array:
    """Return mean k3, ΣΔ, largest |Δ| and reward of each sequence, [S, 4]; without rewards 0."""
    most, rewards = collected(context, drift, Largest).most, context.batch.rewards
    total = gap.columns(context, drift)[f"{drift.prefix}d"]
    total, most = np.nan_to_num(total), np.minimum(most, LARGEST)  # what overflows is the largest float64
    return np.stack((k3, total, most, np.zeros_like(k3) if rewards is None else rewards), axis=1)


def _policies(batch: Batch, drift: Drift) -> tuple[Array, Array]:
    """Return the log-probs of both policies of a drift, [T] each."""
    q, p = (batch.policy(policy) for policy in (drift.denominator, drift.numerator))
    assert q is not None
    assert p is not None
    return q, p


def _sequences(batch: Batch, drift: Drift, rows: Array, table: Array) -> list[WorstSequence]:
    """Describe some sequences, with the numbers of `_table` and at most `STRIP` tokens of each."""
    lags, (q, p) = batch.scalars.get("policy_lag"), _policies(batch, drift)
    result = []
    for row, (k3, total, most, reward) in zip(rows.tolist(), table[rows].tolist(), strict=True):
        lag = None if lags is None else lags[row]
        result.append(
            WorstSequence(
                sequence_id=sequence_id(batch, row),
                step=step(batch, row),
                length=int(batch.lengths[row]),
                log_ratio_sum=total,
                k3_mean=k3,
                max_abs_log_ratio=most,
                policy_lag=lag if isinstance(lag, int) else None,
                reward=None if batch.rewards is None else reward,
                **_strip(batch, q, p, *batch.cu_seqlens[row : row + 2].tolist()),
            )
        )
    return result


def _strip(batch: Batch, q: Array, p: Array, begin: int, end: int) -> dict[str, Any]:
    """Return the tokens of a sequence as fields: at most `STRIP`, those of largest ΣK3."""
    first = 0
    if end - begin > STRIP:
        delta = p[begin:end] - q[begin:end]
        total = np.cumsum(np.concatenate(([0.0], np.nan_to_num(np.expm1(delta) - delta))))
        first = int(np.argmax(total[STRIP:] - total[:-STRIP]))
    here_ = slice(begin + first, min(begin + first + STRIP, end))
    return {
        "first": first,
        "positions": batch.position[here_],
        "token_ids": [] if batch.token_ids is None else batch.token_ids[here_],
        "log_ratios": np.nan_to_num(p[here_] - q[here_]),
        "rollout_log_probs": np.nan_to_num(q[here_]),
        "train_log_probs": np.nan_to_num(p[here_]),
    }


def tokens(context: BatchContext, drift: Drift) -> Records:
    """Find the tokens with the largest |Δ|, with the log-ratios around them."""
    batch = context.batch
    q, p = _policies(batch, drift)
    at = _among(batch, collected(context, drift, Largest).most)
    at = at[_largest(np.abs(p[at] - q[at]), TOKENS)]
    rows = [_token(batch, q, p, one) for one in at.tolist()]
    return records(TOKENS, WorstToken, [(abs(row.log_ratio), row) for row in rows])


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


def _token(batch: Batch, q: Array, p: Array, at: int) -> WorstToken:
    sequence = int(np.searchsorted(batch.cu_seqlens, at, side="right")) - 1
    first, last = batch.cu_seqlens[sequence : sequence + 2].tolist()
    begin, end = max(at - CONTEXT, first), min(at + CONTEXT + 1, last)
    around = np.nan_to_num(p[begin:end] - q[begin:end]).tolist()
    return WorstToken(
        sequence_id=sequence_id(batch, sequence),
        step=step(batch, sequence),
        position=int(batch.position[at]),
        length=last - first,
        token_id=None if batch.token_ids is None else int(batch.token_ids[at]),
        rollout_log_prob=float(q[at]),
        train_log_prob=float(p[at]),
        log_ratio=around[at - begin],
        before=around[: at - begin],
        after=around[at - begin + 1 :],
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


def typical_of(records: Records) -> list[WorstSequence]:
    """Return the sequence of median K3 of a sample, of those with lag 0 where there are any."""
    every = read(records, WorstSequence)
    synced = [row for row in every if row.policy_lag == 0]
    rows = sorted(synced or every, key=lambda row: (row.k3_mean, row.sequence_id))
    return [with_short_strip(rows[(len(rows) - 1) // 2])] if rows else []


def with_short_strip(row: WorstSequence) -> WorstSequence:
    """Round the log-probs of a sequence's tokens to 5 digits."""
    logs = (row.log_ratios, row.rollout_log_probs, row.train_log_probs)
    ratios, rollout, train = ([float(f"{x:.5g}") for x in some] for some in logs)
    return row._replace(log_ratios=ratios, rollout_log_probs=rollout, train_log_probs=train)
