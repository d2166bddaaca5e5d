"""The dump that the benchmarks read: `python benchmarks/dump.py PATH [--sequences N] [--rows-per-group N]`.

The same numbers give the same file: sequences are drawn in blocks, each from a seed of its own, so that a
longer dump begins with the shorter one and row groups may have any size. The drift is made up to look like a
training step: rounding of bf16 on most tokens, a larger gap on a few in a thousand, and one token in 200,000
that the trainer all but rules out, so that truncation, masks and vetoes have something to do.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SEQUENCES = 16_384
ROWS_PER_GROUP = 1024
BLOCK = 1024
LONGEST = 8192
MEAN_LENGTH, SPREAD = 1024, 0.8
GROUP = 8
"""Sequences that share a prompt."""
MASKED = 0.02
ROUNDING, GAP, STEP = 0.03, 1.0, 0.01
"""Standard deviation of Δ, where the sampled token was unlikely: rounding; a gap; old → current."""
GAPS, RULED_OUT = 4e-3, 5e-6
"""Shares of tokens with a gap, and of those that one policy rules out."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def make(
    path: Path, sequences: int = SEQUENCES, rows_per_group: int = ROWS_PER_GROUP, rounding: float = ROUNDING
) -> dict[str, int]:
    """Write the dump; return its sequences, its tokens (masked ones included) and its bytes."""
    tokens = 0
    writer: pq.ParquetWriter | None = None
    for group in _grouped(_blocks(sequences, rounding), rows_per_group):
        writer = writer or pq.ParquetWriter(path, group.schema, compression="zstd")
        writer.write_table(group, row_group_size=len(group))
        tokens += sum(len(chunk.flatten()) for chunk in group["response_mask"].chunks)
    assert writer is not None, "a dump has sequences"
    writer.close()
    return {"sequences": sequences, "tokens": tokens, "bytes": path.stat().st_size}


def _blocks(sequences: int, rounding: float) -> Iterator[pa.Table]:
    for start in range(0, sequences, BLOCK):
        yield block(start, rounding).slice(0, sequences - start)


def _grouped(blocks: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of `rows`."""
    held: list[pa.Table] = []
    for table in blocks:
        held.append(table)
        while sum(map(len, held)) >= rows:
            every = pa.concat_tables(held)
            yield every.slice(0, rows)
            held = [every.slice(rows)]
    if sum(map(len, held)):
        yield pa.concat_tables(held)


def block(start: int, rounding: float = ROUNDING) -> pa.Table:
    """Make `BLOCK` sequences, the first being number `start`."""
    rng = np.random.default_rng([4, start // BLOCK])
    drawn = rng.lognormal(np.log(MEAN_LENGTH) - SPREAD**2 / 2, SPREAD, BLOCK)
    lengths = np.minimum(drawn.astype(np.int32) + 1, LONGEST)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    rollout, old, current = _policies(rng, int(lengths.sum()), rounding)
    mask = (rng.random(len(rollout)) >= MASKED).astype(np.int8)
    lists = {"rollout_log_probs": rollout, "old_log_probs": old, "current_log_probs": current}
    columns = {name: pa.array(values.astype(np.float32)) for name, values in lists.items()}
    columns |= {"response_mask": pa.array(mask)}
    ragged = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    advantages = pa.array(rng.normal(size=BLOCK))
    return pa.table(
        ragged | {"advantages": advantages, "group_id": pa.array((start + np.arange(BLOCK)) // GROUP)}
    )


def _policies(rng: np.random.Generator, tokens: int, rounding: float) -> tuple[Floats, Floats, Floats]:
    """Draw log-probs under rollout, old and current: a sure token drifts less than an unlikely one."""
    rollout = -rng.exponential(0.3, tokens)
    spread = np.where(rng.random(tokens) < GAPS, GAP, rounding)
    ruled_out = np.where(rng.random(tokens) < RULED_OUT, 10 + rng.exponential(1, tokens), 0)
    old = np.minimum(_moved(rng, rollout, spread) - ruled_out, 0)
    return rollout, old, np.minimum(_moved(rng, old, np.full(tokens, STEP)), 0)


def _moved(rng: np.random.Generator, log_probs: Floats, spread: Floats) -> Floats:
    """Return log-probs after a drift with E[r] = 1."""
    spread = spread * -np.expm1(log_probs)
    return log_probs + rng.normal(size=len(log_probs)) * spread - spread**2 / 2


def main() -> None:
    """Make one dump and print its size."""
    parser = argparse.ArgumentParser(description="Make the dump that the benchmarks read.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--rows-per-group", type=int, default=ROWS_PER_GROUP)
    parser.add_argument("--rounding", type=float, default=ROUNDING, help="standard deviation of Δ, nats")
    given = parser.parse_args()
    print(json.dumps(make(given.path, given.sequences, given.rows_per_group, given.rounding)))


if __name__ == "__main__":
    main()
