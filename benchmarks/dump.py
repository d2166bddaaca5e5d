"""The dump that the benchmarks read: `python benchmarks/dump.py PATH [--shape NAME] [--sequences N] …`.

The same numbers give the same file: sequences are drawn in blocks, each from a seed of its own, so that a
longer dump begins with the shorter one and row groups may have any size. The drift is made up to look like a
training step: rounding of bf16 on most tokens, a larger gap on a few in a thousand, and one token in 200,000
that the trainer all but rules out, so that truncation, masks and vetoes have something to do. `SHAPES` has
dumps of other lengths and of a larger drift, of about as many tokens.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SEQUENCES = 16_384
ROWS_PER_GROUP = 1024
BLOCK = 1024
GROUP = 8
"""Sequences that share a prompt."""
MASKED = 0.02
GAP, STEP = 1.0, 0.01
"""Standard deviation of Δ, where the sampled token was unlikely: of a gap; old → current."""
GAPS, RULED_OUT = 4e-3, 5e-6
"""Shares of tokens with a gap, and of those that one policy rules out."""


@dataclass(frozen=True)
class Shape:
    """Lengths, which are log-normal, and drift of a dump.

    Attributes:
        mean: tokens of a row before the longest are cut; 1 is added.
        spread: standard deviation of the log of a length.
        longest: tokens of a row at most.
        rounding: standard deviation of Δ of most tokens, where the sampled token was unlikely, in nats.
        rows: rows that stand in place of an ordinary one, in a row group as well.
    """

    mean: float = 1024
    spread: float = 0.8
    longest: int = 8192
    rounding: float = 0.03
    rows: int = 1


SHAPES = {
    "ordinary": Shape(),
    "collapsed": Shape(rounding=2.0),
    "log_normal": Shape(spread=1.6, longest=65_536),
    "short": Shape(mean=7.5, spread=0.3, longest=32, rows=128),
}
"""`ordinary`: presets act on one token in a hundred; `collapsed`: on most; `log_normal`: half of the rows
have fewer than 300 tokens, and some tens of thousands; `short`: about 8 tokens a row."""
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]


def make(
    path: Path, sequences: int = SEQUENCES, rows_per_group: int = ROWS_PER_GROUP, shape: str = "ordinary"
) -> dict[str, int]:
    """Write the dump; return its sequences, its tokens (masked ones included) and its bytes.

    Args:
        path: of the file.
        sequences: of about 1,010 tokens; of another shape, as many rows as have about as many tokens.
        rows_per_group: such sequences in a row group.
        shape: one of `SHAPES`.
    """
    of = SHAPES[shape]
    tokens = 0
    writer: pq.ParquetWriter | None = None
    for group in _grouped(_blocks(sequences * of.rows, of), rows_per_group * of.rows):
        writer = writer or pq.ParquetWriter(path, group.schema, compression="zstd")
        writer.write_table(group, row_group_size=len(group))
        tokens += sum(len(chunk.flatten()) for chunk in group["response_mask"].chunks)
    assert writer is not None, "a dump has sequences"
    writer.close()
    return {"sequences": sequences * of.rows, "tokens": tokens, "bytes": path.stat().st_size}


def _blocks(sequences: int, shape: Shape) -> Iterator[pa.Table]:
    for start in range(0, sequences, BLOCK * shape.rows):
        yield block(start, shape).slice(0, sequences - start)


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


def block(start: int, shape: Shape = SHAPES["ordinary"]) -> pa.Table:
    """Make `BLOCK` sequences, or the rows in their place, the first being number `start`."""
    rows = BLOCK * shape.rows
    rng = np.random.default_rng([4, start // rows])
    drawn = rng.lognormal(np.log(shape.mean) - shape.spread**2 / 2, shape.spread, rows)
    lengths = np.minimum(drawn.astype(np.int32) + 1, shape.longest)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
    rollout, old, current = _policies(rng, int(lengths.sum()), shape.rounding)
    mask = (rng.random(len(rollout)) >= MASKED).astype(np.int8)
    lists = {"rollout_log_probs": rollout, "old_log_probs": old, "current_log_probs": current}
    columns = {name: pa.array(values.astype(np.float32)) for name, values in lists.items()}
    columns |= {"response_mask": pa.array(mask)}
    ragged = {name: pa.ListArray.from_arrays(offsets, values) for name, values in columns.items()}
    advantages = pa.array(rng.normal(size=rows))
    return pa.table(
        ragged | {"advantages": advantages, "group_id": pa.array((start + np.arange(rows)) // GROUP)}
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
    parser.add_argument("--shape", choices=[*SHAPES], default="ordinary", help="lengths and drift")
    given = parser.parse_args()
    print(json.dumps(make(given.path, given.sequences, given.rows_per_group, given.shape)))


if __name__ == "__main__":
    main()
