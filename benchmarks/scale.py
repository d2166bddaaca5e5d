"""What larger dumps take, reckoned from the measurements that are kept: the numbers of docs/scale.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = {"10⁹": 1e9, "10¹²": 1e12, "10¹⁴": 1e14}
CORES = 64
"""Of the machine the page reckons with."""
PIECE = 1e10
"""Tokens to a task."""


def costs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Every number of the page; empty where the analysis was not measured, None for what else was not."""
    if "peers" not in found:
        return {}
    peers, memory, tallies, gpu = (_result(found, name) for name in ("peers", "memory", "tallies", "gpu"))
    core, disk = peers["tokens"] / peers["seconds"]["analyze"]["cpu"], peers["bytes"] / peers["tokens"]
    return {
        "core": core,
        "disk": disk,
        "read_per_core": core * disk,
        "cores": CORES,
        "piece": PIECE,
        "cpu": found["peers"]["machine"]["cpu"],
        "memory": max(row.get("together") or row["peak"] for row in memory["rows"]) if memory else None,
        "tally": max(row["tally_bytes"] for row in tallies["rows"]) if tallies else None,
        "merge": tallies.get("merge_seconds"),
        "gpu": _gpu(gpu) if gpu else None,
        "rows": [_row(name, tokens, core, disk) for name, tokens in SIZES.items()],
    }


def _result(found: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return dict(found[name]["result"]) if name in found else {}


def _gpu(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": found["device"],
        "resident": max(row["tokens_per_second"] for row in found["rows"]),
        "whole": found["end_to_end"]["tokens_per_second"],
    }


def _row(name: str, tokens: float, core: float, disk: float) -> dict[str, Any]:
    """What so many tokens take; `per_second` is what the storage must give to be done in an hour."""
    hours = tokens / core / 3600
    return {
        "name": name,
        "disk": tokens * disk,
        "core_hours": hours,
        "machine_hours": hours / CORES,
        "machines": max(1, -int(-hours // CORES)),
        "per_second": tokens * disk / 3600,
        "pieces": max(1, -int(-tokens // PIECE)),
    }
