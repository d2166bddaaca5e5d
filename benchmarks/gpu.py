"""Measure throughput on a GPU with every preset: of resident batches, and of a dump from its file.

    python benchmarks/gpu.py [--sequences N] [--rounds N] [--write]

Run it from a checkout on any machine with CUDA. Where there is none it says so and runs the same code on a
few thousand tokens on the CPU, which checks the script and measures nothing.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from pathlib import Path

import duck
import part
import rounds
import torch
from torch import Tensor

from offpol_diag.analysis.first_pass import Found, Needs, read_ahead
from offpol_diag.analysis.tally import Study
from offpol_diag.analyze import Observe, analyze
from offpol_diag.batch import Batch
from offpol_diag.engine.scope import NO_FITS
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import load
from offpol_diag.readers import open_dump
from offpol_diag.run.pool import on

NO_GPU = "no GPU here: a check of the script on the CPU, not a measurement"
SIZES = (1 << 18, 1 << 20, 1 << 22, 1 << 23, 1 << 24)
"""Tokens per batch; the first that does not fit ends the list, and is printed."""
TOLERANCE = 1e-9
COPY_BYTES = 1 << 32


@dataclass(frozen=True)
class Bench:
    """A dump, the presets, and the device."""

    path: Path
    device: torch.device
    presets: tuple[Preset, ...]
    rounds: int

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def job(bench: Bench, batch_tokens: int) -> tuple[Observe, list[Batch]]:
    """Build the job of an analysis, and load the dump's batches onto the device."""
    dump = open_dump([str(bench.path)], batch_tokens=batch_tokens)
    study = Study.of(dump.info.columns, bench.presets, (), 0)
    asked = Needs.of(study.presets, False)
    found = read_ahead(on([bench.device]), dump, asked) if asked else Found(NO_FITS, None)
    return Observe(study, found, False), [batch.to(bench.device) for batch in dump.batches()]


def resident(bench: Bench, batch_tokens: int) -> part.Result:
    """Measure tokens per second over resident batches, merging included."""
    observe, batches = job(bench, batch_tokens)
    tokens, taken = sum(batch.tokens for batch in batches), sum(map(_bytes, batches))

    def every() -> None:
        reduce(lambda one, other: one.merge(other), map(observe, batches))
        bench.wait()

    every()
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = rounds.alternate({"resident": every}, bench.rounds).median("resident")
    return {
        "batch_tokens": batch_tokens,
        "batches": len(batches),
        "tokens_per_second": tokens / seconds,
        "bytes_per_second": taken / seconds,
        "waits": waits(bench.device, partial(observe, batches[0])),
        "waits_of_one_preset": waits(bench.device, partial(_alone(observe), batches[0])),
        "peak": torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else None,
    }


def _alone(observe: Observe) -> Observe:
    """Return the same bench with the first preset only."""
    return replace(observe, study=replace(observe.study, presets=observe.study.presets[:1]))


def _bytes(batch: Batch) -> int:
    tensors = (getattr(batch, field.name) for field in fields(batch))
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))


def waits(device: torch.device, work: Callable[[], object]) -> int | None:
    """Count how often the host waits for the GPU during some work, as CUDA counts it; None on a CPU."""
    if device.type != "cuda":
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
    """Measure resident throughput by batch size, up to the device's memory."""
    rows: list[part.Result] = []
    for size in sizes:
        try:
            rows.append(resident(bench, size))
        except torch.OutOfMemoryError:
            print(f"batches of {size:,} tokens do not fit", file=sys.stderr)
            gc.collect()  # what was computed of them may know itself, in a ring
            torch.cuda.empty_cache()
            break
    return rows


def end_to_end(bench: Bench, tokens: int, batch_tokens: int) -> part.Result:
    """Measure from file to Summary; raise if the numbers are not those of the CPU."""
    before = time.perf_counter()
    summary = analyze(
        [str(bench.path)], presets=bench.presets, device=str(bench.device), batch_tokens=batch_tokens
    )
    seconds = time.perf_counter() - before
    expected = analyze([str(bench.path)], presets=bench.presets, device="cpu")
    duck.agree(duck.ours(summary), duck.ours(expected), TOLERANCE)
    return {
        "batch_tokens": batch_tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "clock": summary.run.seconds,
    }


def measure(given: part.Given) -> part.Result:
    """Measure the whole table, or check the script where there is no GPU."""
    there = torch.cuda.is_available()
    sizes, copy = (SIZES, COPY_BYTES) if there else ((1 << 13,), 1 << 20)
    presets = load().resolve("all")
    with part.dump(given.sequences if there else min(given.sequences, 16)) as (path, facts):
        bench = Bench(path, torch.device("cuda:0" if there else "cpu"), presets, given.rounds if there else 1)
        bandwidth = copied(bench, copy)
        rows = swept(bench, sizes)
        best = max(rows, key=lambda row: float(row["tokens_per_second"]))
        whole = end_to_end(bench, facts["tokens"], best["batch_tokens"])
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
