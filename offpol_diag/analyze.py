"""The one loop over a dump, and the Summary that is left of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from offpol_diag import correction, readout, resample
from offpol_diag.batch import Batch
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.readers import Dump, open_dump
from offpol_diag.scope import UNSETTLED
from offpol_diag.sequences import SequenceWriter
from offpol_diag.settle import Asked, Found, settle
from offpol_diag.summary import Run, Summary
from offpol_diag.tally import Study, Tally, observe

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""
MADE = (
    "there are no advantages: they are made of the rewards, normalised within each group (prompt) of a step "
    "as GRPO does"
)
BATCH_TOKENS = 1 << 17
"""Tokens held at once: the arrays of a batch stay in the caches, and memory stays flat."""


@dataclass
class Clock:
    """Where the time went, in seconds."""

    started: float = field(default_factory=time.perf_counter)
    read: float = 0.0
    compute: float = 0.0

    def reading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, the time spent waiting for them counted."""
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.read += time.perf_counter() - before
            if batch is None:
                return
            before = time.perf_counter()
            yield batch
            self.compute += time.perf_counter() - before

    def seconds(self) -> dict[str, float]:
        """Total, reading (decoding included), computing."""
        total = time.perf_counter() - self.started
        return {"total": total, "read": self.read, "compute": self.compute}


def analyze(
    sources: Sequence[str],
    *,
    presets: Sequence[Preset] = (),
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    device: str = "auto",
    seed: int = 0,
    sequences: Path | None = None,
    progress: Progress | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Summary:
    """Analyse a dump under some presets.

    Args:
        sources: files, directories, globs.
        presets: corrections to try, e.g. `catalogue.load().resolve("all")`.
        columns: our column name → the dump's, where they differ and are not known aliases.
        group_by: scalar columns to break the mismatch down by.
        on_bad_row: whether a bad row is an error or is skipped and counted.
        device: auto, cpu, cuda or cuda:N.
        seed: of the bootstrap.
        sequences: where to write one row per sequence (Parquet), or None.
        progress: called as rows are done.
        batch_tokens: tokens held at once.

    Returns:
        The Summary, without diagnosis, recommendation and gates.

    Raises:
        DumpError: the dump cannot be read.
        UsageError: the device is not there.
    """
    clock, where = Clock(), resolve(device)
    dump = open_dump(
        sources, columns=columns, group_by=group_by, on_bad_row=on_bad_row, batch_tokens=batch_tokens
    )
    study = plan(dump, presets, group_by, seed)
    found = _settled(dump, study, where, clock, progress)
    tally = _run(dump, study, found, where, clock, sequences, progress)
    facts = readout.facts(dump, tally, (MADE,) if found.rewards else ())
    run = Run(
        version=version("offpol-diag"),
        device=str(where),
        seed=seed,
        replicates=study.replicates,
        tokens=facts.tokens,
        sequences=facts.sequences,
        peak_rss_bytes=readout.peak_rss(),
        seconds=clock.seconds(),
    )
    return readout.summary(study, tally, presets, facts, run)


def plan(dump: Dump, presets: Sequence[Preset], group_by: Sequence[str], seed: int) -> Study:
    """Which presets and drifts this dump allows."""
    columns = frozenset(dump.info.columns)
    columns |= {"advantages"} if _makes_advantages(columns) else set()
    able = tuple(preset for preset in presets if not correction.needs(preset, set(columns)))
    return Study(able, columns, tuple(group_by), seed, resample.REPLICATES)


def _makes_advantages(columns: frozenset[str]) -> bool:
    """Whether advantages are made of rewards: only where there are none, and groups are known."""
    return "advantages" not in columns and {"rewards", "group_id"} <= columns


def _settled(
    dump: Dump, study: Study, device: torch.device, clock: Clock, progress: Progress | None
) -> Found:
    """What has to be known before the analysis; the dump is read for it only when something is asked."""
    asked = Asked.of(study.presets, _makes_advantages(frozenset(dump.info.columns)))
    if not asked:
        return Found(UNSETTLED, None)
    return settle(lambda: _batches(dump, device, clock, progress), asked)


def _batches(dump: Dump, device: torch.device, clock: Clock, progress: Progress | None) -> Iterator[Batch]:
    """One reading of the dump, told as it goes."""
    done = 0

    def count(rows: int) -> None:
        nonlocal done
        done += rows
        if progress:
            progress(done, dump.rows)

    return (batch.to(device) for batch in clock.reading(dump.batches(count)))


def resolve(device: str) -> torch.device:
    """auto → cuda where there is one, else cpu.

    Raises:
        UsageError: no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"device {device!r} is not known", "give auto, cpu, cuda or cuda:N") from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"device {device!r}: there are {torch.cuda.device_count()} CUDA devices here", "use --device cpu"
        )
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not supported", "give auto, cpu, cuda or cuda:N")
    return found


def _run(
    dump: Dump,
    study: Study,
    found: Found,
    device: torch.device,
    clock: Clock,
    sequences: Path | None,
    progress: Progress | None,
) -> Tally:
    """Read, observe, merge."""
    tally: Tally | None = None
    with SequenceWriter.open(sequences, study) as writer:
        for batch in _batches(dump, device, clock, progress):
            scene = Scene.of(found.filled(batch), study.seed, study.replicates, found.settled)
            seen = observe(study, scene)
            tally = seen if tally is None else tally.merge(seen)
            writer.write(scene)
            scene.forget()
        if tally is None:
            raise DumpError("the dump has no sequence", "check that its writer was closed")
        writer.finish(readout.factors(study, tally))
    return tally
