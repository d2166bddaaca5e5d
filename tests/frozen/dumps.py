"""The dumps of the frozen results: those that ship, and small ones that are made the same every time."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests import oracles, trainer_dumps

SAMPLES = Path(__file__).parents[2] / "sample_data"
Dump = Path | Callable[[Path], object]
"""A file, or a function that writes one to the path it is given."""


def sample(name: str) -> Path:
    """Return the path of a dump that ships."""
    return SAMPLES / f"{name}.parquet"


def turns(sigma: float, seed: int, many: int, outliers: float = 0.0) -> list[dict[str, Any]]:
    """Make rows with holes in the mask (tool output), groups, hosts, and advantages that change by turn."""
    rows = oracles.make_rows(sigma, seed=seed, many=many, outliers=outliers)
    for i, row in enumerate(rows):
        row["advantages"] = [((t // 7 + i) % 3 - 1) * (1 + 0.01 * i) for t in range(len(row["token_ids"]))]
        row["response_mask"] = [
            int(live and (t // 7) % 4 != 2) for t, live in enumerate(row["response_mask"])
        ]
    return rows


def made(rows: list[dict[str, Any]], *leave_out: str) -> Dump:
    """Make a dump of rows without some of their columns."""
    kept = [{name: value for name, value in row.items() if name not in leave_out} for row in rows]
    return lambda path: oracles.write(kept, path)


def rewarded(path: Path) -> None:
    """Write rewards and groups in place of advantages, which are made of them."""
    rows = oracles.make_rows(0.1, seed=5, many=120)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "advantages"}
    columns["group_id"] = [f"g{i // 4}" for i in range(len(rows))]
    columns["step"] = [i // 40 for i in range(len(rows))]
    columns["rewards"] = np.random.default_rng(5).integers(0, 3, len(rows)).tolist()
    pq.write_table(pa.table(columns), path)


def long_form(path: Path) -> None:
    """Write one row per token, shuffled within stretches of 60, in row groups of 500."""
    rows = [row for row in oracles.make_rows(0.05, seed=8, many=150) if row["token_ids"]]
    lengths = [len(row["token_ids"]) for row in rows]
    names = {
        "rollout_log_probs": "rollout_log_prob",
        "old_log_probs": "old_log_prob",
        "current_log_probs": "current_log_prob",
        "response_mask": "loss_mask",
        "advantages": "advantage",
        "token_ids": "token_id",
    }
    columns = {new: np.concatenate([row[old] for row in rows]) for old, new in names.items()}
    columns |= {
        name: np.repeat([row[name] for row in rows], lengths) for name in ("sequence_id", "group_id", "step")
    }
    columns["position"] = np.concatenate([np.arange(n) for n in lengths])
    table = pa.table(columns)
    rng, total = np.random.default_rng(8), sum(lengths)
    order = [begin + rng.permutation(min(60, total - begin)) for begin in range(0, total, 60)]
    pq.write_table(table.take(np.concatenate(order)), path, row_group_size=500)


def sentinels(path: Path) -> None:
    """Write log-probs of -9999, products beyond float64, certain tokens, masked and empty rows."""
    pairs = [
        ([-9999.0, -1.0], [-0.1, -1.0]),
        ([-0.1, -1.0], [-9999.0, -1.0]),
        ([-9.0] * 200, [-0.1] * 200),
        ([-1.7e308] * 3, [-0.1] * 3),
        ([0.0] * 5, [0.0] * 5),
        ([-1.0, -2.0], [-1.1, -2.0]),
        ([], []),
    ]
    rows = [
        {
            "rollout_log_probs": rollout,
            "old_log_probs": old,
            "current_log_probs": old,
            "response_mask": [int(i % 9 > 0)] * len(old),
            "advantages": [(-1.0, 0.0, 1.0)[i % 3]] * len(old),
            "group_id": f"g{i // 3}",
        }
        for i, (rollout, old) in enumerate(pairs * 6)
    ]
    oracles.write(rows, path)


def beside_bounds(path: Path) -> None:
    """Write tokens and sequences a hair inside or outside the bounds of presets."""
    trainer_dumps.write(trainer_dumps.rows_beside_bounds()[::9], path)


def piece(name: str, begin: int, end: int | None) -> Dump:
    """Make a dump of some steps of one that ships, by their rank."""

    def write(path: Path) -> None:
        table = pq.read_table(sample(name))
        steps = sorted(set(table["step"].to_pylist()))[begin:end]
        pq.write_table(table.filter(pc.is_in(table["step"], pa.array(steps))), path)

    return write


def fingerprint(path: Path) -> int:
    """Return a CRC-32 of the columns, which tells a change of the dump from a change of the results."""
    return zlib.crc32(json.dumps(pq.read_table(path).to_pydict(), default=str).encode())
