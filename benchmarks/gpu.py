"""Measure throughput on a GPU with every preset: the presets' sums of batches in memory, and a whole dump.

    python benchmarks/gpu.py [--sequences N] [--rounds N] [--write]

Run it from a checkout on any machine with CUDA. Where there is none it says so and runs the same code on a
few thousand tokens on the CPU, which checks the script and measures nothing.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from unittest.mock import patch

import duck
import numpy as np
import part
import rounds
import torch

from offpol_diag.analysis.first_pass import FirstPass, Needs, read_ahead
from offpol_diag.analyze import analyze
from offpol_diag.batch import Batch
from offpol_diag.engine import preset_sums
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.scope import NO_FITS
from offpol_diag.errors import MemoryShortage
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import load
from offpol_diag.readers import open_dump
from offpol_diag.run.threads import Threads

NO_GPU = "no GPU here: a check of the script on the CPU, not a measurement"
SIZES = (1 << 16, 1 << 17, 1 << 18, 1 << 19, 1 << 20)
"""Tokens per block; the first that does not fit ends the list, and is printed."""
TOLERANCE = 1e-9
COPY_BYTES = 1 << 32


@dataclass(frozen=True)
class Bench:
    """A dump, the presets, and the device, as torch names it."""

    path: Path
    device: str
    presets: tuple[Preset, ...]
    rounds: int

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def scenes(bench: Bench) -> list[BatchContext]:
    """Load the dump's batches into memory, with what presets need of whole trainer batches."""
    dump = open_dump([str(bench.path)])
    asked = Needs.of(bench.presets, False)
    fits = (read_ahead(Threads(1), dump, asked) if asked else FirstPass(NO_FITS, None)).fits
    return [BatchContext.of(batch, 0, 1, fits, device=bench.device) for batch in dump.batches()]


def resident(bench: Bench, block_tokens: int) -> part.Result:
    """Measure tokens per second from batches in memory to sums in memory, by blocks of so many tokens."""
    every = scenes(bench)
    tokens, taken = sum(one.batch.tokens for one in every), sum(_bytes(one.batch) for one in every)

    def sums() -> None:
        with np.errstate(all="ignore"):
            for context in every:
                _ = PresetSums.of(context, bench.presets).of_plan

    def started() -> None:
        with np.errstate(all="ignore"):
            PresetSums.of(every[0], bench.presets)

    with patch.dict(preset_sums.BLOCK, gpu=block_tokens):
        sums()
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = rounds.alternate({"resident": sums}, bench.rounds).median("resident")
        return {
            "block_tokens": block_tokens,
            "batches": len(every),
            "tokens_per_second": tokens / seconds,
            "bytes_per_second": taken / seconds,
            "waits": waits(bench, started),
            "peak": torch.cuda.max_memory_allocated() if bench.cuda else None,
        }


def _bytes(batch: Batch) -> int:
    arrays = (getattr(batch, field.name) for field in fields(batch))
    return sum(x.nbytes for x in arrays if isinstance(x, np.ndarray))


def waits(bench: Bench, work: Callable[[], object]) -> int | None:
    """Count how often the host waits for the GPU during some work, as CUDA counts it; None on a CPU."""
    if not bench.cuda:
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in said)


def copied(bench: Bench, size: int) -> float:
    """Measure the bytes per second that a plain copy on the device reads and writes."""
    source = torch.zeros(size // 8, dtype=torch.float64, device=bench.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        bench.wait()

    copy()
    return 2 * size / rounds.alternate({"copy": copy}, max(bench.rounds, 5)).median("copy")


def swept(bench: Bench, sizes: Sequence[int]) -> list[part.Result]:
    """Measure throughput by block size, up to the device's memory."""
    rows: list[part.Result] = []
    for size in sizes:
        try:
            rows.append(resident(bench, size))
        except MemoryShortage:
            print(f"blocks of {size:,} tokens do not fit", file=sys.stderr)
            torch.cuda.empty_cache()
            break
    return rows


def end_to_end(bench: Bench, tokens: int) -> part.Result:
    """Measure from file to Result, on the GPU and on the CPU; raise if the numbers differ."""
    summaries, seconds = {}, {}
    for device in (bench.device, "cpu"):
        before = time.perf_counter()
        summaries[device] = analyze([str(bench.path)], presets=bench.presets, device=device, every_log=False)
        seconds[device] = time.perf_counter() - before
    there, here = (duck.ours(summaries[device]) for device in (bench.device, "cpu"))
    duck.agree(there, here, TOLERANCE)
    return {
        "seconds": seconds[bench.device],
        "tokens_per_second": tokens / seconds[bench.device],
        "cpu_tokens_per_second": tokens / seconds["cpu"],
        "engine": summaries[bench.device].run.engine,
    }


def measure(given: part.Given) -> part.Result:
    """Measure the whole table, or check the script where there is no GPU."""
    there = torch.cuda.is_available()
    sizes, copy = (SIZES, COPY_BYTES) if there else ((1 << 13,), 1 << 20)
    presets = load().resolve("all")
    with part.dump(given.sequences if there else min(given.sequences, 16)) as (path, facts):
        bench = Bench(path, "cuda:0" if there else "cpu", presets, given.rounds if there else 1)
        bandwidth = copied(bench, copy)
        rows = swept(bench, sizes)
        whole = end_to_end(bench, facts["tokens"])
    for row in rows:
        row["of_copy"] = row["bytes_per_second"] / bandwidth
    return facts | {
        "device": torch.cuda.get_device_name() if there else "cpu",
        **({} if there else {part.NOTHING: NO_GPU}),
        "presets": len(presets),
        "rounds": bench.rounds,
        "copy_bytes_per_second": bandwidth,
        "rows": rows,
        "end_to_end": whole,
    }


if __name__ == "__main__":
    part.main("gpu", measure, __doc__, threads=None)
