"""One row per sequence, as Parquet: kept tokens, sum of weights and veto of each preset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag.analysis.study import Study
from offpol_diag.engine import scope, segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.errors import UsageError
from offpol_diag.files import beside, placed

Factors = Mapping[str, Mapping[scope.Label, float]]
"""Preset → trainer batch → the factor that its weights are divided by."""


class SequenceWriter:
    """Stream rows to a file beside the target and rename it at the end.

    Columns: sequence_id, step, length, log_ratio_sum (ΣΔ of the main drift), and per preset NAME.kept_tokens,
    NAME.weight_sum (Σ of the final weights over all unmasked tokens; null where the preset has no weight),
    NAME.vetoed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temp = beside(path.resolve())
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
            try:
                if writer._writer is not None:
                    writer._writer.close()
            finally:
                writer._temp.unlink(missing_ok=True)
                Path(f"{writer._temp}2").unlink(missing_ok=True)

    def write(self, table: pa.Table) -> None:
        """Append a batch's sequences, as `table` makes them."""
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._temp, table.schema, compression="zstd")
        self._writer.write_table(table.cast(self._writer.schema, safe=False))

    def finish(self, factors: Factors) -> None:
        """Divide normalised weights by their trainer batch's factor, and rename the file to its target."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if factors:
            _rescale(self._temp, factors)
        placed(self._temp, self._path)


def table(context: BatchContext, study: Study) -> pa.Table:
    """Describe a batch's sequences, a row each."""
    batch = context.batch
    q, p = batch.policy(study.main.denominator), batch.policy(study.main.numerator)
    assert p is not None
    assert q is not None
    ids, steps = (batch.scalars.get(name) or [None] * batch.sequences for name in ("sequence_id", "step"))
    whole = not any(isinstance(step, float) for step in steps)
    result = {
        "sequence_id": pa.array([None if one is None else str(one) for one in ids], pa.string()),
        "step": pa.array(steps, pa.int64() if whole else pa.float64()),
        "length": pa.array(batch.lengths),
        "log_ratio_sum": pa.array(segments.total(p - q, batch.cu_seqlens)),
    }
    sums = PresetSums.of(context, study.presets, losses=False, over_all=True)
    if not study.presets:
        return pa.table(result)
    kept = sums["kept"].all.astype(np.int64)
    over_all, vetoed = sums["over_all"].all, sums.vetoed.all.astype(np.bool_)
    nothing = pa.nulls(batch.sequences, pa.float64())
    for at, preset in enumerate(study.presets):
        weighs = preset.weight is not None
        result |= {
            f"{preset.name}.kept_tokens": pa.array(kept[at]),
            f"{preset.name}.weight_sum": pa.array(over_all[at]) if weighs else nothing,
            f"{preset.name}.vetoed": pa.array(vetoed[at]),
        }
    return pa.table(result)


def _rescale(path: Path, factors: Factors) -> None:
    """Rewrite the file row group by row group with some weights divided by the factor of their step."""
    source = pq.ParquetFile(path)
    temp = Path(f"{path}2")
    with pq.ParquetWriter(temp, source.schema_arrow, compression="zstd") as out:
        for group in range(source.num_row_groups):
            table = source.read_row_group(group)
            steps = [scope.label(step) for step in table.column("step").to_pylist()]
            for name, by_step in factors.items():
                factor = np.array([by_step.get(scope.ONE) or by_step[step] for step in steps])
                at = table.schema.get_field_index(f"{name}.weight_sum")
                values = np.asarray(table.column(at).to_numpy()) / factor
                table = table.set_column(at, table.schema.field(at), pa.array(values))
            out.write_table(table)
    source.close()
    temp.replace(path)
