"""Compare corrections on padded batches, as trainers compute them, with ours: time per token and preset.

    python benchmarks/padded.py [--sequences N] [--rounds N] [--write]

A trainer holds a batch as padded [batch, longest] float32 tensors and passes over them once for the one
correction it is set to; trying another is another pass. Here are four such passes, with the numbers a trainer
logs of them and nothing else: no intervals, no locations, and building the padded tensors is left out of the
time. Ours is the whole analysis from the file, divided by its tokens and presets. The numbers of both must
agree as far as float32 goes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import duck
import machine
import part
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from offpol_diag.analyze import analyze
from offpol_diag.presets.catalogue import load
from offpol_diag.result import Result

COLUMNS = ("rollout_log_probs", "old_log_probs", "response_mask")
TOLERANCE = 1e-3
"""Relative tolerance; sums of float32 over a padded batch are no better."""


@dataclass(frozen=True)
class Padded:
    """A padded batch [batch, longest], float32: log-probs, and a mask that is 1 where a token counts."""

    rollout: Tensor
    old: Tensor
    mask: Tensor


def batches(path: Path) -> Iterator[Padded]:
    """Build a batch of each row group."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=list(COLUMNS)).combine_chunks()
            yield Padded(*(_pad(table[name].chunk(0)) for name in COLUMNS))


def _pad(ragged: pa.ListArray) -> Tensor:
    lengths = torch.tensor(ragged.value_lengths().to_numpy(), dtype=torch.int64)
    there = torch.arange(int(lengths.max())) < lengths[:, None]
    rows = torch.zeros(there.shape, dtype=torch.float32)
    rows[there] = torch.tensor(ragged.flatten().to_numpy(), dtype=torch.float32)
    return rows


Numbers = dict[str, Tensor]


def token_truncation(batch: Padded) -> Numbers:
    """Compute token weights min(r, 2), masked, and their usual numbers."""
    weights = torch.exp(torch.clamp(batch.old - batch.rollout, -20, 20))
    high = ((weights > 2) * batch.mask).sum()
    final = torch.clamp(weights, max=2) * batch.mask
    return {"w": final.sum(), "ww": (final * final).sum(), "high": high, "largest": final.max()}


def sequence_weights(batch: Padded) -> Numbers:
    """Compute one weight min(∏r, 2) for all tokens of a sequence."""
    log_ratio = ((batch.old - batch.rollout) * batch.mask).sum(dim=1, keepdim=True)
    weights = torch.exp(torch.clamp(log_ratio, -20, 20)).expand_as(batch.mask)
    final = torch.clamp(weights, max=2) * batch.mask
    return {"v": final.sum(), "vv": (final * final).sum(), "largest": final.max()}


def rejection(batch: Padded) -> Numbers:
    """Compute the mask without tokens whose r lies outside [0.5, 2]."""
    ratio = torch.exp(torch.clamp(batch.old - batch.rollout, -20, 20))
    left = ((ratio >= 0.5) & (ratio <= 2)) * batch.mask
    return {"tokens": batch.mask.sum(), "left": left.sum(), "by_sequence": left.sum(dim=1).min()}


def veto(batch: Padded) -> Numbers:
    """Compute the mask without sequences that have a token of r < 1e-4."""
    ratio = torch.exp(torch.clamp(batch.old - batch.rollout, -20, 20))
    vetoed = ((ratio < 1e-4) & (batch.mask > 0)).any(dim=1, keepdim=True)
    left = batch.mask * ~vetoed
    return {
        "sequences": vetoed.new_tensor(len(vetoed), dtype=torch.int64),
        "vetoed": vetoed.sum(),
        "kept": left.sum(),
    }


PASSES: tuple[Callable[[Padded], Numbers], ...] = (token_truncation, sequence_weights, rejection, veto)


def sweep(path: Path) -> tuple[dict[str, float], float, float]:
    """Run every pass over every batch; return its numbers, its seconds, and the places of all batches."""
    sums: Counter[str] = Counter()
    seconds, places = 0.0, 0
    for batch in batches(path):
        places += batch.mask.numel()
        for one in PASSES:
            before = time.perf_counter()
            found = {name: float(value) for name, value in one(batch).items()}
            seconds += time.perf_counter() - before
            sums.update(found)
    return _read(sums), seconds, places


def _read(sums: Counter[str]) -> dict[str, float]:
    """Convert sums over batches to numbers that an analysis has too."""
    n = sums["tokens"]
    return {
        "truncated_ess": sums["w"] ** 2 / (n * sums["ww"]),
        "sequence_weight_ess": sums["v"] ** 2 / (n * sums["vv"]),
        "tokens_rejected": 1 - sums["left"] / n,
        "vetoed": sums["vetoed"] / sums["sequences"],
    }


def ours(summary: Result) -> dict[str, float]:
    """Compute the same numbers by an analysis."""
    found = duck.ours(summary)
    names = ("truncated_ess", "tokens_rejected", "vetoed")
    weights = summary.preset("seq_is")["ess_tokens"].value
    return {name: found[name] for name in names} | {"sequence_weight_ess": weights or 0.0}


def measure(given: part.Given) -> part.Result:
    """Measure nanoseconds per token and preset of both, in turn."""
    torch.set_num_threads(machine.THREADS)
    presets = load().resolve("all")
    mine, theirs = [], []
    with part.dump(given.sequences) as (path, facts):
        for _ in range(given.rounds):
            numbers, seconds, places = sweep(path)
            theirs.append(seconds / len(PASSES))
            before = time.perf_counter()
            summary = analyze([str(path)], presets=presets, threads=machine.THREADS)
            mine.append((time.perf_counter() - before) / len(presets))
            duck.agree(ours(summary), numbers, TOLERANCE)
    each = 1e9 / facts["tokens"]
    return facts | {
        "rounds": given.rounds,
        "presets": len(presets),
        "passes": [one.__name__ for one in PASSES],
        "places_per_token": places / facts["tokens"],
        "ours_ns": median(mine) * each,
        "padded_ns": median(theirs) * each,
        "padded_over_ours": median(b / a for a, b in zip(mine, theirs, strict=True)),
        "agreed": numbers,
    }


if __name__ == "__main__":
    part.main("padded", measure, __doc__)
