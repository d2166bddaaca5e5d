"""Extrapolate the stored measurements to larger dumps: the numbers of docs/scale.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES = {"10⁹": 1e9, "10¹²": 1e12, "10¹⁴": 1e14}
CORES = 64
"""Cores of the machine that the page assumes."""


def costs(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compute every number of the page; empty without a measured analysis, None for other gaps."""
    if "peers" not in found:
        return {}
    peers, memory, gpu = (_result(found, name) for name in ("peers", "memory", "gpu"))
    core, disk = peers["tokens"] / peers["seconds"]["analyze"]["cpu"], peers["bytes"] / peers["tokens"]
    return {
        "core": core,
        "disk": disk,
        "read_per_core": core * disk,
        "cores": CORES,
        "cpu": found["peers"]["machine"]["cpu"],
        "memory": max(row.get("together") or row["peak"] for row in memory["rows"]) if memory else None,
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
    """Compute the cost of so many tokens; `per_second` is the read rate that ends within an hour."""
    hours = tokens / core / 3600
    return {
        "name": name,
        "disk": tokens * disk,
        "core_hours": hours,
        "machine_hours": hours / CORES,
        "machines": max(1, -int(-hours // CORES)),
        "per_second": tokens * disk / 3600,
    }
