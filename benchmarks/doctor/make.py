"""Make dumps whose cause is known, and a list of them.

    python benchmarks/doctor/make.py --split development --out DIR [--limit N] [--cache DIR]

Writes DIR/NAME.parquet and DIR/manifest.json: for each dump its causes, the verdicts that are right, and how
large the fault is. With --limit, N dumps spread evenly over the plan.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.doctor.faults import BASES, FINAL_BASES, KINDS, PAIRS, Kind, Work, none
from benchmarks.doctor.models import Shape
from benchmarks.doctor.rollouts import Array, Rows, World
from offpol_diag.dump.writer import stamped, to_table, write_tables

CACHE = Path(__file__).parent / ".cache"
SIZES = (16, 32, 64, 64, 128, 128, 256, 256, 512)
HOSTS = 4
SHAPES: dict[str, tuple[Shape, ...]] = {
    "development": (
        Shape("sums-64", "sums", 64, 2, 1, steps=400),
        Shape("sums-40", "sums", 40, 3, 2, steps=250),
        Shape("qwen-64", "bytes", 64, 3, 3, modern=True, kv_heads=2, steps=250),
        Shape("moe-sums-48", "sums", 48, 2, 4, experts=4, top=1, steps=250),
    ),
    "second": (
        Shape("gru-160", "bytes", 160, 1, 11, gru=True, steps=400),
        Shape("gru-96", "bytes", 96, 2, 12, gru=True, steps=250),
        Shape("qwen-80", "sums", 80, 2, 13, modern=True, kv_heads=1, steps=300),
        Shape("sums-56", "sums", 56, 2, 14, steps=300),
        Shape("moe-bytes-48", "bytes", 48, 2, 15, modern=True, kv_heads=2, experts=8, top=2, steps=200),
    ),
    "final": (
        Shape("retention-72", "words", 72, 2, 21, modern=True, retention=True, steps=300),
        Shape("retention-64", "sums", 64, 3, 22, retention=True, steps=300),
        Shape("gru-128", "words", 128, 1, 23, gru=True, steps=300),
        Shape("qwen-72", "words", 72, 3, 24, modern=True, kv_heads=2, steps=250),
        Shape("moe-words-48", "words", 48, 2, 25, modern=True, kv_heads=2, experts=4, top=2, steps=200),
    ),
}
"""Split → models. Severities are split as well: every other one, and others for the final dumps."""


@dataclass(frozen=True)
class Case:
    """One dump to make; `faults` are names of kinds and their arguments."""

    name: str
    split: str
    shape: Shape
    base: str
    causes: tuple[str, ...]
    kind: Kind
    faults: tuple[tuple[Kind, tuple[Any, ...]], ...]
    rows: int
    place: str
    columns: dict[str, bool | str]


def plan(split: str) -> list[Case]:
    """List every dump of a split."""
    found = [*_single(split), *_pairs(split)]
    return [replace(one, name=f"{split[0]}{i:03}-{one.name}") for i, one in enumerate(found)]


def _single(split: str) -> Iterator[Case]:
    for row, kind in enumerate(KINDS):
        for severity in kind.of(split):
            for time in range(kind.times):
                chance = _chance(split, row, severity, time)
                shape = _pick([one for one in SHAPES[split] if _fits(kind, one)], chance)
                if shape is None:
                    continue
                base = (
                    kind.bases[(time + int(chance.integers(2))) % len(kind.bases)]
                    if kind.times >= len(kind.bases)
                    else str(chance.choice(kind.bases))
                )
                base = FINAL_BASES.get(base, base) if split == "final" else base
                place = "host" if kind.host and chance.random() < 0.3 else "all"
                yield _case(kind.cause, split, shape, base, kind, ((kind, severity),), place, chance)


def _pairs(split: str) -> Iterator[Case]:
    by_cause = {}
    for kind in KINDS:
        by_cause.setdefault(kind.cause, kind)
    for row, (base, parts) in enumerate(PAIRS):
        for time in range(2):
            chance = _chance(split, "pairs", row, time)
            kinds = [by_cause[cause] for cause, _ in parts]
            shape = _pick(
                [one for one in SHAPES[split] if not one.experts and all(_fits(kind, one) for kind in kinds)],
                chance,
            )
            assert shape is not None
            columns = {name: value for kind in kinds for name, value in kind.columns.items()}
            merged = replace(
                kinds[0],
                columns=columns | ({"policy_lag": True} if base == "lags" or "stale" in base else {}),
            )
            faults = tuple((kind, severity) for kind, (_, severity) in zip(kinds, parts, strict=True))
            yield _case("pair", split, shape, base, merged, faults, "all", chance)


def _case(
    name: str,
    split: str,
    shape: Shape,
    base: str,
    kind: Kind,
    faults: Any,
    place: str,
    chance: np.random.Generator,
) -> Case:
    causes = tuple(one.cause for one, _ in faults)
    honest = "stale" if base == "lags" else "quantized_rollout" if base in ("fp8", "int4") else ""
    if name == "pair":
        causes += (honest,) if honest and len(causes) == 1 else ("stale",) if "stale" in base else ()
    rows = int(chance.choice(SIZES))
    rows = {
        "many": int(chance.choice((1000, 3000))),
        "long": int(chance.choice((16, 48))),
        "longest": 32,
    }.get(base, rows)
    many = len(BASES[base].pairs)
    steps = many > 1
    columns: dict[str, bool | str] = {
        "group_id": chance.random() < 0.7,
        "token_ids": chance.random() < 0.7,
        "step": chance.random() < (0.8 if steps else 0.3),
        "policy_lag": chance.random() < 0.3,
        "entropy": chance.random() < 0.4 and "top" not in base,
        "advantages": chance.random() < 0.4,
        "host": chance.random() < 0.4 or place == "host",
        "engine": chance.random() < 0.2,
    }
    if "stale" in base and kind.make is none:  # then nothing tells it from other honest causes
        columns["policy_lag"] = False
    return Case(name, split, shape, base, causes, kind, faults, rows, place, columns | kind.columns)


def _fits(kind: Kind, shape: Shape) -> bool:
    wants = {"attention": not (shape.gru or shape.retention), "recurrent": shape.gru, shape.task: True}
    return all(wants.get(one, False) for one in kind.tasks) and kind.experts in (None, bool(shape.experts))


def _pick(shapes: list[Shape], chance: np.random.Generator) -> Shape | None:
    return shapes[chance.integers(len(shapes))] if shapes else None


def _chance(*key: Any) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


@cache
def world(shape: Shape, folder: Path) -> World:
    """Return a world with its model, trained once."""
    return World(shape, folder)


def made(case: Case, folder: Path, out: Path) -> dict[str, Any]:
    """Make one dump; return what is known of it."""
    chance, where = _chance(case.name), world(case.shape, folder)
    work = drawn(case, where, chance)
    before = work.rows
    noise = float(np.abs(before.p - before.q)[before.sampled].mean())
    for kind, severity in case.faults:
        work.rows = work.rows.take(np.arange(len(work.rows.group)))
        kind.make(work, *severity)
    write(case, work, out / f"{case.name}.parquet", chance)
    return {
        "name": case.name,
        "path": f"{case.name}.parquet",
        "split": case.split,
        "causes": list(case.causes),
        "also": [*case.kind.also, *undecided(case)],
        "verdicts": list(case.kind.verdicts),
        "family": case.shape.family,
        "model": case.shape.name,
        "base": case.base,
        "precision": BASES[case.base].precision,
        "severity": "; ".join(", ".join(map(str, severity)) for _, severity in case.faults),
        "place": case.place,
        "where": f"host-{HOSTS - 1}" if case.place == "host" or case.causes == ("group_fault",) else "",
        "sequences": len(work.rows.group),
        "tokens": int(work.rows.sampled.sum()),
        "columns": sorted(name for name, value in case.columns.items() if value),
        "k3": None if case.kind.make is none else k3(before),
        **size(case, before, work, noise, where),
    }


def k3(rows: Rows) -> float:
    """Compute K3 of the responses as they are."""
    delta = (rows.p - rows.q)[rows.sampled].astype(np.float64)
    return float((np.expm1(delta) - delta).mean())


def undecided(case: Case) -> list[str]:
    """List causes that a dump without a policy lag cannot tell from the true one."""
    return ["stale"] if case.causes == ("quantized_rollout",) and not case.columns["policy_lag"] else []


def drawn(case: Case, where: World, chance: np.random.Generator) -> Work:
    """Draw whole groups from the base, and choose which of them the fault is in."""
    rows = where.rows(BASES[case.base])
    groups = chance.permutation(np.unique(rows.group))[: max(2, case.rows // 8)]
    rows = rows.take(np.flatnonzero(np.isin(rows.group, groups)))
    which = np.ones(len(rows.group), bool)
    if case.place == "host" or case.kind.cause == "group_fault":
        which = chance.permutation(len(which)) < max(2, len(which) // HOSTS)
    return Work(rows, which, chance, where)


def size(case: Case, before: Rows, work: Work, noise: float, where: World) -> dict[str, Any]:
    """Count the tokens that are off, and compute their mean error and the mismatch beside it, nats."""
    rows, sampled = work.rows, work.rows.sampled
    off = np.abs(rows.p - rows.q)
    if case.kind.make is none:  # the mismatch itself, against that of a bf16 engine
        kernel = BASES[case.base].kernel
        if kernel:
            late = sampled & (np.arange(off.shape[1]) >= kernel[1])
            return _size(late, off, float(off[sampled & ~late].mean()))
        fresh = where.rows(BASES["bf16"])
        return _size(sampled, off, float(np.abs(fresh.p - fresh.q)[fresh.sampled].mean()))
    if case.kind.cause == "group_fault":
        return _size(sampled & work.which[:, None], off, float(off[sampled & ~work.which[:, None]].mean()))
    changed = sampled & ((rows.q != before.q) | (rows.p != before.p) | ~before.sampled)
    change = np.maximum(np.abs(rows.q - before.q), np.abs(rows.p - before.p))
    changed &= True if work.concerned is None else work.concerned
    return _size(changed, np.where(before.sampled, change, off), noise)


def _size(tokens: Array, by: Array, noise: float) -> dict[str, Any]:
    change = float(by[tokens].mean()) if tokens.any() else 0.0
    sequences = int(tokens.any(axis=1).sum())
    return {"off_tokens": int(tokens.sum()), "off_sequences": sequences, "change": change, "noise": noise}


def write(case: Case, work: Work, path: Path, chance: np.random.Generator) -> None:
    """Write the columns that this dump has, in an order of its own."""
    rows, columns = work.rows, case.columns
    many = len(rows.group)
    order = np.argsort(rows.group, kind="stable") if columns["group_id"] else np.arange(many)
    hosts = chance.integers(0, HOSTS, many)
    if not work.which.all():
        hosts = np.where(work.which, HOSTS - 1, chance.integers(0, HOSTS - 1, many))
    lag = np.zeros_like(rows.lag) if columns["policy_lag"] == "zero" else rows.lag
    optional: dict[str, Any] = {
        "group_id": rows.group,
        "token_ids": rows.tokens,
        "step": rows.trainer,
        "policy_lag": lag,
        "entropy": rows.entropy,
        "advantages": np.round(chance.normal(size=many), 3),
        "host": np.array([f"host-{one}" for one in hosts]),
        "engine": chance.integers(0, 2, many),
    }
    given = {name: value[order] for name, value in optional.items() if columns[name]}
    if "host" in given:
        given["host"] = given["host"].tolist()
    given |= {"rollout_log_probs": rows.q[order], "old_log_probs": rows.p[order]}
    table = to_table(given | {"response_mask": rows.mask[order]}, refuses=False)
    write_tables([table], path, stamped(_recorded(case)))


def _recorded(case: Case) -> dict[str, Any]:
    """Return the metadata: every other dump says in which precision its engine computes."""
    return {"rollout_dtype": BASES[case.base].precision} if zlib.crc32(case.name.encode()) % 2 else {}


def chosen(split: str, limit: int | None) -> list[Case]:
    """Return the plan, or `limit` of its dumps, spread evenly."""
    cases = plan(split)
    return cases if limit is None else [cases[i * len(cases) // limit] for i in range(min(limit, len(cases)))]


def make(cases: list[Case], out: Path, folder: Path) -> list[dict[str, Any]]:
    """Make dumps and their list, grouped by model."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    found = []
    for case in sorted(cases, key=lambda one: (one.shape.name, one.base)):
        found.append(made(case, folder, out))
        text = json.dumps(found, indent=1)  # each time: what is there can be used
        (out / "manifest.json").write_text(text + "\n", encoding="utf-8")
    return found


def main() -> None:
    """Make the dumps of one split."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", choices=SHAPES, default="development")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where models and responses are kept")
    given = parser.parse_args()
    found = make(chosen(given.split, given.limit), given.out, given.cache)
    print(f"{len(found)} dumps in {given.out}")


if __name__ == "__main__":
    main()
