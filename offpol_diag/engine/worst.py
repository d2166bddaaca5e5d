"""The sequences and tokens with the largest mismatch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import gap, sample, segments
from offpol_diag.engine.accumulators import Best
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import on_host, sent
from offpol_diag.engine.terms import Drift, Terms, collected
from offpol_diag.summary import LARGEST, Strip, WorstSequence, WorstToken

SEQUENCES, TOKENS, CONTEXT, TIES = 10, 20, 3, 1000
SOME, STRIP = 9, 256
"""Sequences to choose a typical one from, and most tokens of a sequence that are kept."""


class Largest:
    """Collect the largest |Δ| of every sequence."""

    def __init__(self, scene: Scene, drift: Drift) -> None:
        self.parts: list[Tensor] = []

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        self.parts.append(segments.largest(terms.size, terms.block.offsets))

    @property
    def most(self) -> Tensor:
        """Largest |Δ| of each sequence, [S]; -inf for an empty sequence."""
        return torch.cat(self.parts)


def sequences(scene: Scene, drift: Drift) -> Best[WorstSequence]:
    """Find the sequences with the largest mean k3 above 0."""
    batch, columns = scene.batch, gap.columns(scene, drift)
    k3 = (columns[f"{drift.prefix}k3"] / batch.lengths.clamp(min=1)).nan_to_num()
    at = _largest(k3, SEQUENCES)
    whole = torch.stack((at, batch.cu_seqlens[at], batch.lengths[at]), dim=1)
    best = _best(whole, _table(scene, drift, k3)[at], SEQUENCES)
    rows = _sequences(batch, drift, [ints for ints, _ in best], [reals for _, reals in best])
    none: Best[WorstSequence] = Best(SEQUENCES, ())
    return none.merge(Best(SEQUENCES, tuple((row.k3_mean, row) for row in rows)))


def typical(scene: Scene, drift: Drift) -> Best[WorstSequence]:
    """Choose a few sequences by hash, those with policy lag 0 first."""
    batch, lags = scene.batch, scene.batch.scalars.get("policy_lag")
    k3 = gap.columns(scene, drift)[f"{drift.prefix}k3"] / batch.lengths.clamp(min=1)
    chance = sample.hashes(batch, *_policies(batch, drift)).to(torch.float64) / 2.0**64 + 0.5
    starts = torch.stack((chance, batch.cu_seqlens[:-1], batch.lengths), dim=1)
    known = sample.host(torch.cat((starts, _table(scene, drift, k3)), dim=1))
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
    return Best(SOME, tuple(zip(scores[few].tolist(), rows, strict=True)))


def _table(scene: Scene, drift: Drift, k3: Tensor) -> Tensor:
    """Return mean k3, ΣΔ, largest |Δ| and reward of each sequence, [S, 4]; without rewards 0."""
    most, rewards = collected(scene, drift, Largest).most, scene.batch.rewards
    total = gap.columns(scene, drift)[f"{drift.prefix}d"]
    total, most = total.nan_to_num(), most.clamp(max=LARGEST)  # what overflows is the largest float64
    return torch.stack((k3, total, most, torch.zeros_like(k3) if rewards is None else rewards), dim=1)


def _sequences(
    batch: Batch, drift: Drift, whole: list[list[int]], numbers: list[list[float]]
) -> list[WorstSequence]:
    """Describe sequences (row, first token, length), with their tokens: at most `STRIP`, of largest ΣK3."""
    if not whole:
        return []
    rows, begins, lengths = zip(*whole, strict=True)
    index = torch.cat([torch.arange(begin, begin + n) for begin, n in zip(begins, lengths, strict=True)])
    q, p = _policies(batch, drift)
    columns = [q, p, batch.position, *([] if batch.token_ids is None else [batch.token_ids])]
    index = sent(index, q.device)
    copied = sample.host(torch.stack([x.index_select(0, index).to(torch.float64) for x in columns]))
    ends = np.cumsum(lengths)
    return [
        _sequence(batch, row, each, copied[:, end - n : end])
        for row, each, n, end in zip(rows, numbers, lengths, ends.tolist(), strict=True)
    ]


def _policies(batch: Batch, drift: Drift) -> tuple[Tensor, Tensor]:
    """Return the log-probs of both policies of a drift, [T] each."""
    q, p = (batch.policy(policy) for policy in (drift.denominator, drift.numerator))
    assert q is not None
    assert p is not None
    return q, p


def _strip(columns: npt.NDArray[np.float64]) -> Strip:
    """Build from log-probs of both policies, positions and ids, [3 or 4, n]."""
    q, p, *_ = columns
    first, many = 0, columns.shape[1]
    with np.errstate(all="ignore"):
        delta = p - q
        if many > STRIP:
            total = np.cumsum(np.concatenate(([0.0], np.nan_to_num(np.expm1(delta) - delta))))
            first = int(np.argmax(total[STRIP:] - total[:-STRIP]))
    here_ = slice(first, first + STRIP)
    position, *ids = columns[2:, here_].astype(np.int64).tolist()
    return Strip(
        first=first,
        positions=position,
        token_ids=ids[0] if ids else [],
        log_ratios=np.nan_to_num(delta[here_]).tolist(),
        rollout_log_probs=np.nan_to_num(q[here_]).tolist(),
        train_log_probs=np.nan_to_num(p[here_]).tolist(),
    )


def tokens(scene: Scene, drift: Drift) -> Best[WorstToken]:
    """Find the tokens with the largest |Δ|, with the log-ratios around them."""
    batch = scene.batch
    q, p = _policies(batch, drift)
    at = _among(batch, collected(scene, drift, Largest).most)
    at = at[_largest((p[at] - q[at]).abs(), TOKENS)]
    around = _around(q, p, at)
    real = torch.cat((around[:, CONTEXT : CONTEXT + 1].abs(), _columns(at, q, p), around), dim=1)
    rows = [_token(batch, ints, reals) for ints, reals in _best(_whole(batch, at), real, TOKENS)]
    none: Best[WorstToken] = Best(TOKENS, ())
    return none.merge(Best(TOKENS, tuple((abs(row.log_ratio), row) for row in rows)))


def _among(batch: Batch, most: Tensor) -> Tensor:
    """Return candidates: tokens of sequences whose largest |Δ| is among the largest.

    On a GPU all tokens are candidates: counting fewer would make the host wait.
    """
    if not on_host(most):
        return torch.arange(batch.tokens, device=most.device)
    last = float(torch.topk(most, TOKENS).values[-1]) if len(most) >= TOKENS else 0.0
    rows = torch.nonzero((most >= last) & (most > 0)).flatten()
    lengths = batch.lengths[rows]
    begins = batch.cu_seqlens[rows] - (torch.cumsum(lengths, 0) - lengths)
    return torch.repeat_interleave(begins, lengths) + torch.arange(int(lengths.sum()))


def _largest(scores: Tensor, many: int) -> Tensor:
    """Return the indices of the largest scores, falling, with up to `TIES` ties; `Best` chooses by text.

    On a CPU only scores above 0 and not below the `many`-th best are sorted. On a GPU all are: to count some
    would make the host wait.
    """
    if not on_host(scores):
        return torch.sort(scores, descending=True, stable=True).indices[: many + TIES]
    last = float(torch.topk(scores, many).values[-1]) if len(scores) > many else 0.0
    candidates = torch.nonzero((scores >= last) & (scores > 0)).flatten()
    return candidates[torch.sort(scores[candidates], descending=True, stable=True).indices[: many + TIES]]


def _best(whole: Tensor, real: Tensor, many: int) -> list[tuple[list[int], list[float]]]:
    """Return both tables' rows on the host, if the score (first real) is above 0 and among the best."""
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
        strip=_strip(columns),
    )


def _columns(at: Tensor, *values: Tensor) -> Tensor:
    return torch.stack([x[at] for x in values], dim=1)


def _whole(batch: Batch, at: Tensor) -> Tensor:
    """Return integers of tokens: sequence, index in it, its length, position, token id."""
    owner = torch.searchsorted(batch.cu_seqlens, at, right=True) - 1
    start, end = batch.cu_seqlens[owner], batch.cu_seqlens[owner + 1]
    ids = at if batch.token_ids is None else batch.token_ids[at]
    return torch.stack((owner, at - start, end - start, batch.position[at], ids), dim=1)


def _around(q: Tensor, p: Tensor, at: Tensor) -> Tensor:
    """Return Δ of tokens and their neighbours, [many, 2 · CONTEXT + 1], also across sequence borders."""
    steps = torch.arange(-CONTEXT, CONTEXT + 1, device=at.device)
    near = (at[:, None] + steps).clamp(0, max(len(q) - 1, 0))
    return (p[near] - q[near]).nan_to_num()


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
    found = None if values is None else values[at]
    return found if isinstance(found, int) else None
