"""Print throughput on a GPU with every preset: sums of batches in memory, and whole dumps beside the CPU.

    python benchmarks/gpu.py [--sequences N] [--rounds N]

Run it from a checkout on any machine with CUDA. Where there is none it says so and runs the same code on a
few thousand tokens on the CPU, which checks the script and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np
import torch

from offpol_diag.core import preset_numbers
from offpol_diag.core.gap import Tokens
from offpol_diag.core.observe import examine
from offpol_diag.core.segments import Array, memory_of, to_host
from offpol_diag.core.study import Study
from offpol_diag.core.whole_steps import WholeSteps, read_whole_steps
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import MemoryShortage
from offpol_diag.presets.catalogue import load
from offpol_diag.result import Result
from offpol_diag.run.threads import Threads

HERE = Path(__file__).parent
SIZES = (1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20)
"""Tokens per batch; the first that does not fit ends the list."""
TOLERANCE = 1e-9
COPY_BYTES = 1 << 32
PRESETS = tuple(load().resolve("all"))


def seconds(job: Callable[[], object], rounds: int) -> float:
    """Return the median of the seconds that a job takes, after one that is not counted."""
    job()
    spent = []
    for _ in range(rounds):
        began = time.perf_counter()
        job()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def loaded(path: Path, size: int) -> tuple[WholeSteps, list[Batch]]:
    """Load the dump's batches into memory, with what presets need of whole trainer batches."""
    dump = open_dump([str(path)], batch_tokens=size)
    return read_whole_steps(Threads(1), dump, Study.of(dump.columns, PRESETS)), [*dump.batches()]


def started(batch: Batch, whole: WholeSteps, device: str) -> dict[str, Array]:
    """Start what presets do to each sequence of a batch."""
    with memory_of(device):
        return preset_numbers.columns(Tokens.of(batch, partial(whole.cut, batch), device), PRESETS)


def resident(path: Path, device: str, rounds: int, bandwidth: float) -> None:
    """Print tokens per second from batches in memory to sums in memory, by tokens of a batch."""
    for size in SIZES if device != "cpu" else SIZES[:1]:
        whole, every = loaded(path, size)
        tokens, taken = sum(one.tokens for one in every), sum(map(_bytes, every))

        @np.errstate(all="ignore")
        def sums(whole: WholeSteps = whole, every: list[Batch] = every) -> None:
            for batch in every:
                to_host(started(batch, whole, device))

        try:
            took = seconds(sums, rounds)
        except MemoryShortage:
            print(f"batches of {size:,} tokens do not fit")
            break
        rate, of_copy = tokens / took / 1e6, taken / took / bandwidth
        waited = f", {waits(every[0], whole, device)} waits a batch" if device != "cpu" else ""
        print(f"batches of {size:9,}: {rate:8.1f} M tokens/s, {of_copy:.1%} of a copy{waited}")


def _bytes(batch: Batch) -> int:
    arrays = (getattr(batch, field.name) for field in fields(batch))
    return sum(x.nbytes for x in arrays if isinstance(x, np.ndarray))


def waits(batch: Batch, whole: WholeSteps, device: str) -> int:
    """Count how often the host waits for the GPU while the sums of a batch are started, as CUDA counts it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            started(batch, whole, device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in said)


def copy_bandwidth(device: str, size: int) -> float:
    """Measure the bytes per second that a plain copy on the device reads and writes."""
    source = torch.zeros(size // 8, dtype=torch.float64, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device != "cpu":
            torch.cuda.synchronize(device)

    return 2 * size / seconds(copy, 5)


def whole(path: Path, device: str, tokens: int) -> None:
    """Print the rate from file to Result, on the GPU and on the CPU; exit if their numbers differ."""
    found: dict[str, Result] = {}
    for one in (device, "cpu"):
        began = time.perf_counter()
        found[one] = examine(open_dump([str(path)]), presets=PRESETS, device=one).summary()
        print(f"file to result, {one:7}: {tokens / (time.perf_counter() - began) / 1e6:.2f} M tokens/s")
    there, here = (found[one].numbers for one in (device, "cpu"))
    for subject, numbers in here.items():
        for name, number in numbers.items():
            a, b = number.value, there[subject][name].value
            if a is not b and not math.isclose(a or 0.0, b or 0.0, rel_tol=TOLERANCE, abs_tol=1e-12):
                sys.exit(f"gpu: {subject} {name} is {b} on {device} and {a} on the CPU")


def main() -> None:
    """Make a dump and measure it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=16_384, help="of about 1,010 tokens each")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    there = torch.cuda.is_available()
    device, many = ("cuda:0", given.sequences) if there else ("cpu", min(given.sequences, 16))
    name = torch.cuda.get_device_name() if there else "no GPU here: a check of the script, no measurement"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "dump.parquet"
        command = [sys.executable, str(HERE / "dump.py"), str(path), f"--sequences={many}"]
        facts = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        print(f"{name}; {facts['tokens']:,} tokens, {len(PRESETS)} presets")
        bandwidth = copy_bandwidth(device, COPY_BYTES if there else 1 << 20)
        resident(path, device, given.rounds if there else 1, bandwidth)
        whole(path, device, facts["tokens"])


if __name__ == "__main__":
    main()
