"""Damaged files of every form, and of Parquet, that are read as a dump or converted to one."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.forms import pickled, written
from tests.forms.written import batch
from tests.fuzz import mutations
from tests.fuzz.runner import Input

MADE = batch()
LISTS = {
    "rollout_log_probs": [x.tolist() for x in MADE.rollout],
    "old_log_probs": [x.tolist() for x in MADE.old],
    "response_mask": [x.tolist() for x in MADE.mask],
    "token_ids": [x.tolist() for x in MADE.responses],
}
ROWS = LISTS | {
    "rewards": MADE.rewards,
    "group_id": [f"g{i // 2}" for i in range(8)],
    "step": [i // 4 for i in range(8)],
}
LONG = {name: [x for row in rows for x in row] for name, rows in LISTS.items()}
LONG |= {"sequence_id": [i for i, row in enumerate(MADE.mask) for _ in row]}
PADDED = {
    name: pa.array([row[:16] for row in rows], pa.list_(pa.float64(), 16)) for name, rows in LISTS.items()
}


def parquet(folder: Path, columns: dict[str, Any], **how: Any) -> None:
    """Write a dump of several row groups."""
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=3, **how)


def lines(folder: Path) -> None:
    """Write a dump as JSON lines, compressed."""
    rows = [dict(zip(ROWS, values, strict=True)) for values in zip(*ROWS.values(), strict=True)]
    (folder / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))


FORMS: dict[str, Callable[[Path], object]] = {
    "parquet": lambda folder: parquet(folder, ROWS),
    "parquet with checksums": lambda folder: parquet(
        folder, ROWS, write_page_checksum=True, compression="zstd"
    ),
    "parquet, long": lambda folder: parquet(folder, LONG),
    "parquet, padded": lambda folder: parquet(folder, PADDED, use_dictionary=False, data_page_version="2.0"),
    "JSON lines": lines,
    "nemo-rl": lambda folder: written.nemo_rl(folder, MADE),
    "prime-rl": lambda folder: written.prime_rl(folder, MADE),
    "slime": lambda folder: pickled.slime(folder, MADE),
    "slime, ranks": lambda folder: pickled.ranks(folder, MADE, 2, False),
    "miles, ranks": lambda folder: pickled.ranks(folder, MADE, 2, True, padded=True),
    "skyrl": lambda folder: pickled.skyrl(folder, MADE),
}


@cache
def files(form: str) -> dict[str, bytes]:
    """Return the files of a form."""
    with tempfile.TemporaryDirectory() as name:
        FORMS[form](Path(name))
        found = [path for path in sorted(Path(name).rglob("*")) if path.is_file()]
        return {str(path.relative_to(name)): path.read_bytes() for path in found}


def make(random: Random) -> Input:
    """Draw a form, damage one of its files, and read or convert it."""
    found = dict(files(random.choice([*FORMS])))
    name = random.choice([*found])
    damage = DAMAGE.get(Path(name).suffix) if random.random() < 0.6 else None
    found[name] = damage(random, found[name]) if damage else mutations.blob(random, found[name])
    where = "." if len(found) > 1 else name
    return Input(
        ("convert", where, "--to", "out.parquet") if random.random() < 0.2 else ("read", where), found
    )


def _lines(random: Random, data: bytes) -> bytes:
    rows = data.splitlines()
    at = random.randrange(len(rows))
    rows[at] = mutations.as_json(random, mutations.tree(random, json.loads(rows[at])))
    return b"\n".join(rows)


def _compressed(random: Random, data: bytes) -> bytes:
    return gzip.compress(_lines(random, gzip.decompress(data)))


def _torch(random: Random, data: bytes) -> bytes:
    stream = io.BytesIO()
    try:
        whole = torch.load(io.BytesIO(data))
    except Exception:  # of a class that only its trainer has
        return mutations.blob(random, data)
    torch.save(mutations.tree(random, whole), stream)
    return stream.getvalue()


def _parquet(random: Random, data: bytes) -> bytes:
    rows = pq.read_table(io.BytesIO(data)).to_pydict()
    name, change = random.choice([*rows]), random.choice(["tree", "tree", "drop", "rename", "text", "null"])
    if change == "tree":
        rows[name] = mutations.tree(random, rows[name])
    column = rows.pop(name)
    odd = {"rename": column, "text": list(map(str, column)), "null": [None] * len(column), "tree": column}
    if change != "drop":
        rows[random.choice(["old", name + "x"]) if change == "rename" else name] = odd[change]
    stream = io.BytesIO()
    try:
        pq.write_table(pa.table(rows), stream, row_group_size=3)
    except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError):  # no column of Arrow
        return mutations.blob(random, data)
    return stream.getvalue()


DAMAGE = {".jsonl": _lines, ".gz": _compressed, ".pt": _torch, ".parquet": _parquet}
