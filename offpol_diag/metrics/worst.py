"""The sequences and tokens with the largest mismatch, to be looked at one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.accumulators import Best
from offpol_diag.batch import Batch
from offpol_diag.metrics.gap import Drift
from offpol_diag.ratios import OVERFLOW
from offpol_diag.summary import WorstSequence, WorstToken

SEQUENCES, TOKENS, CONTEXT, TIES = 10, 20, 3, 1000


def sequences(batch: Batch, drift: Drift) -> Best[WorstSequence]:
    """The sequences with the largest mean k3 above 0."""
    d = _delta(batch, drift)
    k3 = segments.mean(torch.expm1(d.clamp(-OVERFLOW, OVERFLOW)) - d, batch.cu_seqlens)
    total, most = segments.total(d, batch.cu_seqlens), segments.largest(d.abs(), batch.cu_seqlens)
    found = ((float(k3[i]), _sequence(batch, i, float(k3[i]), total, most)) for i in _largest(k3, SEQUENCES))
    none: Best[WorstSequence] = Best(SEQUENCES, ())
    return none.merge(Best(SEQUENCES, tuple(found)))


def _largest(scores: Tensor, many: int) -> list[int]:
    """Where the largest scores above 0 are, and up to `TIES` that equal the last; `Best` chooses by text."""
    last = torch.topk(scores, min(many, len(scores))).values.min() if len(scores) else scores.sum()
    candidates = torch.nonzero((scores >= last) & (scores > 0)).flatten()
    worth = torch.sort(scores[candidates], descending=True, stable=True).indices[: many + TIES]
    found: list[int] = candidates[worth].tolist()
    return found


def _delta(batch: Batch, drift: Drift) -> Tensor:
    q, p = batch.policy(drift.denominator), batch.policy(drift.numerator)
    assert p is not None
    assert q is not None
    return p - q


def _sequence(batch: Batch, at: int, k3: float, total: Tensor, most: Tensor) -> WorstSequence:
    return WorstSequence(
        sequence_id=_text(batch, "sequence_id", at),
        step=_step(batch, at),
        length=int(batch.lengths[at]),
        log_ratio_sum=float(total[at]),
        k3_mean=k3,
        max_abs_log_ratio=float(most[at]),
    )


def tokens(batch: Batch, drift: Drift) -> Best[WorstToken]:
    """The tokens with the largest |Δ|, with the log-ratios around them."""
    d = _delta(batch, drift)
    worst = torch.tensor(_largest(d.abs(), TOKENS), dtype=torch.int64, device=d.device)
    owner = torch.searchsorted(batch.cu_seqlens, worst, right=True) - 1
    rows = zip(worst.tolist(), owner.tolist(), strict=True)
    found = ((abs(float(d[t])), _token(batch, drift, d, t, s)) for t, s in rows)
    none: Best[WorstToken] = Best(TOKENS, ())
    return none.merge(Best(TOKENS, tuple(found)))


def _token(batch: Batch, drift: Drift, d: Tensor, at: int, sequence: int) -> WorstToken:
    start, end = batch.cu_seqlens[sequence : sequence + 2].tolist()
    q, p = batch.policy(drift.denominator), batch.policy(drift.numerator)
    assert p is not None
    assert q is not None
    return WorstToken(
        sequence_id=_text(batch, "sequence_id", sequence),
        step=_step(batch, sequence),
        position=int(batch.position[at]),
        length=end - start,
        token_id=None if batch.token_ids is None else int(batch.token_ids[at]),
        rollout_log_prob=float(q[at]),
        train_log_prob=float(p[at]),
        log_ratio=float(d[at]),
        before=d[max(start, at - CONTEXT) : at].tolist(),
        after=d[at + 1 : min(end, at + 1 + CONTEXT)].tolist(),
    )


def _text(batch: Batch, name: str, at: int) -> str:
    values = batch.scalars.get(name)
    return "?" if values is None or values[at] is None else str(values[at])


def _step(batch: Batch, at: int) -> int | None:
    values = batch.scalars.get("step")
    found = None if values is None else values[at]
    return found if isinstance(found, int) else None
