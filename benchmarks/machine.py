"""Describe the machine of a benchmark, and limit it to two threads."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

THREADS = 2
LIBRARIES = ("offpol-diag", "torch", "numpy", "pyarrow", "duckdb", "ray")


def facts() -> dict[str, object]:
    """Return processor, cores, memory, system, versions, GPU where there is one, and the date."""
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": {name: found for name in LIBRARIES if (found := _version(name))},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def limit(threads: int = THREADS) -> None:
    """Limit this process, and those it starts, to `cores` cores; pyarrow to as many threads."""
    import pyarrow as pa

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    pa.set_cpu_count(threads)


def _cpu() -> str:
    """Return the processor's name as Linux gives it, with family and model where the name says little."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    found = {key.strip(): value.strip() for key, value in reversed([*pairs])}
    name, family, model = (found.get(key, "?") for key in ("model name", "cpu family", "model"))
    return f"{name} (family {family}, model {model})"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
