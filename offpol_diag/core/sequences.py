"""One row per sequence, as Parquet: kept tokens, sum of weights and veto of each preset (`--sequences`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.core.gap import Drift, Tokens
from offpol_diag.core.segments import to_host
from offpol_diag.core.state import Array
from offpol_diag.dump.batch import label
from offpol_diag.errors import UsageError
from offpol_diag.files import beside, placed
from offpol_diag.presets import Preset

Factors = Mapping[str, Mapping[str, float]]
"""Preset → trainer batch → the factor that its weights are divided by."""


class SequenceWriter:
    """Streams rows to a file beside the target, which is renamed at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows, self.divided = (Path(f"{beside(path.resolve())}{number}") for number in ("", 2))
        self._writer: pq.ParquetWriter | None = None

    @classmethod
    @contextmanager
    def open(cls, path: Path | None) -> Iterator[SequenceWriter | None]:
        """Open a writer, or None without a path; a block that fails leaves nothing behind."""
        if path is None:
            yield None
            return
        if not path.parent.is_dir():
            raise UsageError(f"{path}: its folder does not exist", f"make it first: mkdir -p {path.parent}")
        writer = cls(path)
        try:
            yield writer
        finally:
            with suppress(OSError):  # of a writer that failed
                writer.close()
            writer.rows.unlink(missing_ok=True)
            writer.divided.unlink(missing_ok=True)

    def write(self, table: pa.Table) -> None:
        """Append the rows of a batch."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.rows, table.schema, compression="zstd")
        self._writer.write_table(table.cast(self._writer.schema, safe=False))

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def finish(self, factors: Factors) -> None:
        """Divide normalised weights by their trainer batch's factor, and rename the file to its target."""
        self.close()
        if factors:
            source = pq.ParquetFile(self.rows)
            with source, pq.ParquetWriter(self.divided, source.schema_arrow, compression="zstd") as out:
                for group in range(source.num_row_groups):
                    out.write_table(divided(source.read_row_group(group), factors))
        placed(self.divided if factors else self.rows, self.path)


def divided(table: pa.Table, factors: Factors) -> pa.Table:
    """Divide the weights of some rows by the factors of their trainer batches."""
    steps = [label(step) for step in table.column("step").to_pylist()]
    for preset, by_step in factors.items():
        factor = np.array([by_step.get("") or by_step[step] for step in steps])
        at = table.schema.get_field_index(f"{preset}.weight_sum")
        weights = pa.array(table.column(at).to_numpy() / factor)
        table = table.set_column(at, table.schema.field(at), weights)
    return table


def table(tokens: Tokens, main: Drift, presets: Sequence[Preset], columns: Mapping[str, Array]) -> pa.Table:
    """Describe the sequences of a batch, a row each, by their columns [S].

    Columns: sequence_id, step, length, log_ratio_sum (ΣΔ of the main drift), and per preset NAME.kept_tokens,
    NAME.weight_sum (Σ of the final weights over all tokens; null where the preset has no weight) and
    NAME.vetoed.
    """
    batch = tokens.batch
    ids, steps = (batch.scalars.get(name) or [None] * batch.sequences for name in ("sequence_id", "step"))
    whole = not any(isinstance(step, float) for step in steps)
    rows = {
        "sequence_id": pa.array([None if one is None else str(one) for one in ids], pa.string()),
        "step": pa.array(steps, pa.int64() if whole else pa.float64()),
        "length": pa.array(batch.lengths),
        "log_ratio_sum": pa.array(columns[f"{main.prefix}log_ratio"]),
    }
    weights = [(one.name, one.policy, one.weight) for one in presets if one.weight is not None]
    sums = to_host({name: tokens.over_all(policy, weight) for name, policy, weight in weights})
    nothing = pa.nulls(batch.sequences, pa.float64())
    for name in (preset.name for preset in presets):
        rows |= {
            f"{name}.kept_tokens": pa.array(columns[f"{name}|kept"].astype(np.int64)),
            f"{name}.weight_sum": pa.array(sums[name]) if name in sums else nothing,
            f"{name}.vetoed": pa.array(columns[f"{name}|vetoed"].astype(np.bool_)),
        }
    return pa.table(rows)
