"""Measure the least waiting time: `--help`, and `analyze` on the sample dump, each a fresh process.

python benchmarks/startup.py [--rounds N] [--write]
"""

from __future__ import annotations

import tempfile
from statistics import median

import part
import peak


def measure(given: part.Given) -> part.Result:
    """Measure wall seconds, imports included; the two commands in turn."""
    spent: dict[str, list[peak.Spent]] = {"--help": [], "analyze": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            spent["--help"].append(peak.offpol_diag("--help"))
            spent["analyze"].append(peak.offpol_diag("analyze", "--quiet", "-o", f"{folder}/report.html"))
    return {
        "rounds": given.rounds,
        "seconds": {name: median(one.wall for one in runs) for name, runs in spent.items()},
        "cpu": {name: median(one.cpu for one in runs) for name, runs in spent.items()},
    }


if __name__ == "__main__":
    part.main("startup", measure, __doc__)
