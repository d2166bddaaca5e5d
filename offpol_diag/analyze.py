"""The analysis of a dump: one pass over its batches, and the Result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import reduce
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from offpol_diag.analysis import readout
from offpol_diag.analysis.first_pass import FirstPass, Needs, read_ahead
from offpol_diag.analysis.sequences import SequenceWriter, table
from offpol_diag.analysis.study import Study, observe, refuse_steps
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.convert import open_dump
from offpol_diag.dump.read import Dump
from offpol_diag.engine import breakdowns, scope
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.scope import NO_FITS
from offpol_diag.engine.tally import Tally
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.presets import Preset, catalogue
from offpol_diag.printable import clean
from offpol_diag.result import DumpFacts, Result, Run
from offpol_diag.run.devices import CPU, ON_CPU, Choice, devices, worth_a_gpu
from offpol_diag.run.ray import Engine, connected
from offpol_diag.run.threads import TOKENS, Progress, Threads, own, peak_rss

MADE = (
    "there are no advantages: they are made of the rewards, normalised within each group (prompt) of a step "
    "as GRPO does"
)
ROWS = 3 << 17
"""Sequences × presets processed at once; a batch with more is split."""


def opened(
    sources: str | Path | Sequence[str | Path],
    *,
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    batch_tokens: int | None = None,
) -> Dump:
    """Open a dump for an analysis; see `forms.open_dump`, and None stands for `TOKENS`."""
    each = [sources] if isinstance(sources, str | Path) else sources
    how: dict[str, Any] = {"columns": columns, "group_by": group_by, "on_bad_row": on_bad_row}
    named = [*map(str, each)]
    dump = open_dump(named, batch_tokens=batch_tokens or TOKENS, **how)
    dump.info = replace(dump.info, given=tuple(map(clean, named)))
    return dump


def analyze(
    sources: str | Path | Sequence[str | Path],
    *,
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    batch_tokens: int | None = None,
    **how: Any,
) -> Result:
    """Return the Result of a dump, with the diagnosis, without recommendation and gates.

    The arguments are those of `opened` and of `examine`.
    """
    more: dict[str, Any] = {"columns": columns, "on_bad_row": on_bad_row}
    dump = opened(sources, group_by=group_by, batch_tokens=batch_tokens, **more)
    return examine(dump, group_by=group_by, **how).summary()


@dataclass(frozen=True)
class Examined:
    """Results of one pass over a dump, with replicates; presets are also those that lack a column."""

    study: Study
    tally: Tally
    presets: tuple[Preset, ...]
    facts: DumpFacts
    run: Run

    def summary(self) -> Result:
        """Read out every number, and the diagnosis."""
        return readout.summary(self.study, self.tally, self.presets, self.facts, self.run)


@np.errstate(all="ignore")  # inf − inf is a NaN, which readers of sums handle
def examine(
    dump: Dump,
    *,
    presets: str | Sequence[Preset | str] = (),
    group_by: Sequence[str] = (),
    device: str = "auto",
    seed: int = 0,
    sequences: Path | None = None,
    progress: Progress | None = None,
    engine: str = "local",
    threads: int | None = None,
    against: str | None = None,
    by_step: Sequence[str] = (),
    lag_0: bool = False,
) -> Examined:
    """Analyse a dump under some presets: compute the states from which all numbers are read.

    Args:
        dump: the dump, opened with the same columns to group by.
        presets: corrections to try, by name ("token_is,seq_mis", "all") or as `catalogue.load()` has them.
        group_by: scalar columns to break the mismatch down by.
        device: auto, cpu, cuda (all GPUs here) or cuda:N; with the engine ray, auto is cpu, and cuda a GPU
            for each task.
        seed: of the bootstrap.
        sequences: where to write one row per sequence (Parquet), or None.
        progress: called as rows are done.
        engine: where it runs, one of `ENGINES`.
        threads: how many compute; None for one per core. The numbers are the same to the last bit.
        against: a preset whose drops are compared with those of each other one.
        by_step: names of numbers (`drift2.k3`, `token_is.ess_tokens`) to be had for every training step too.
        lag_0: whether to count what each preset keeps of policy lag 0.

    Raises:
        DumpError: the dump cannot be read.
        UsageError: the device is not there, or the engine has no such threads.
        ClusterError: the cluster cannot be reached, or does not do its work.
    """
    presets, began = catalogue.chosen(presets), time.perf_counter()
    study = Study.of(dump.info.columns, presets, group_by, seed)
    kept = tuple(_kept(dump, group_by))
    study = replace(study, against=against, by_step=tuple(by_step), kept=kept, lag_0=lag_0)
    choice = chosen_devices(engine, device, worth_a_gpu(dump.tokens, len(study.presets)))
    with ENGINES[engine](choice, threads, progress) as runs:
        found = read_ahead_for(runs, dump, study)
        with SequenceWriter.open(sequences) as writer:
            each = (attrgetter("rows"), writer.write) if writer else None
            job = Observe(study.ready(), found, bool(writer), choice.devices)
            observed: Observed | None = runs.reduce(dump, job, each)
            if observed is None:
                raise DumpError("the dump has no sequence", "check that its writer was closed")
            seen = observed.tally
            if writer:
                writer.finish(readout.Readout(study, seen).factors)
    notes = (MADE,) if found.rewards else ()
    facts = readout.facts(dump, seen, (*notes, *map(largest_groups, kept)))
    seconds = time.perf_counter() - began
    run = record(runs.name, choice, study, facts, seconds)
    return Examined(study, seen, presets, facts, run)


def chosen_devices(engine: str, device: str, worth: bool) -> Choice:
    """Return where presets are computed; on a cluster each task that has a GPU sees no other.

    Args: worth: whether there is work enough for `auto` to start a GPU.
    """
    if engine == "local":
        return devices(device, worth)
    return ON_CPU if device in ("auto", CPU) else Choice((device,))  # the engine refuses cuda:N


def _kept(dump: Dump, group_by: Sequence[str]) -> Iterator[breakdowns.Kept]:
    """Yield the columns with too many values to keep them all, and the largest ones."""
    for name in dict.fromkeys(group_by):
        found = None if name == breakdowns.STEP else dump.largest(name, breakdowns.LARGEST)
        if found:
            yield breakdowns.Kept(name, *found)


def largest_groups(kept: breakdowns.Kept) -> str:
    """Say which groups are listed of a column with too many values."""
    many, others = len(kept.values), kept.others
    whole = f"--group-by {kept.name}: {many + others:,} values"
    return f"{whole}; the {many:,} largest groups, by their rows, are listed, and the other {others:,} as one"


def record(engine: str, choice: Choice, study: Study, facts: DumpFacts, seconds: float) -> Run:
    """Record how the numbers were made: device, seed, amount of data, time, memory."""
    return Run(
        command="analyze",
        version=version("offpol-diag"),
        device=choice.name,
        engine=f"{engine}; {choice.unused}" if choice.unused else engine,
        seed=study.seed,
        replicates=study.replicates,
        tokens=facts.tokens,
        sequences=facts.sequences,
        peak_rss_bytes=peak_rss(),
        seconds={"total": seconds},
    )


Start = Callable[[Choice, int | None, Progress | None], AbstractContextManager[Engine]]


def _here(choice: Choice, threads: int | None, progress: Progress | None) -> AbstractContextManager[Engine]:
    return nullcontext(Threads(threads, progress))


def _there(choice: Choice, threads: int | None, progress: Progress | None) -> AbstractContextManager[Engine]:
    if threads and threads > 1:
        what = f"--threads {threads} is for this machine: with --engine ray the cluster says how many"
        raise UsageError(what, "offer Ray more or fewer CPUs")
    return connected(choice.name, progress)


ENGINES: Mapping[str, Start] = {"local": _here, "ray": _there}
"""Engine → the function that starts it, from devices, number of threads and progress callback."""


def read_ahead_for(engine: Engine, dump: Dump, study: Study) -> FirstPass:
    """Compute the quantities needed before the analysis; the dump is read only if there are any."""
    made = "advantages" in study.columns and "advantages" not in dump.info.columns
    asked = Needs.of(study.presets, made)
    return read_ahead(engine, dump, asked) if asked else FirstPass(NO_FITS, None)


@dataclass(frozen=True)
class Observed:
    """Results on one batch: its tally, and its per-sequence rows if they are written."""

    tally: Tally
    rows: pa.Table | None

    def merge(self, other: Observed) -> Observed:
        """Merge the tallies of both; their rows have been written."""
        return Observed(refuse_steps(self.tally.merge(other.tally)), None)


@dataclass(frozen=True)
class Observe:
    """The job of an analysis.

    Attributes:
        study: what is measured.
        first_pass: statistics of whole trainer batches from the first pass.
        rows: whether per-sequence rows are made.
        devices: where presets are computed; each thread takes one of them.
    """

    study: Study
    first_pass: FirstPass
    rows: bool
    devices: tuple[str, ...] = (CPU,)

    def __call__(self, batch: Batch) -> Observed:
        """Compute a batch's tally, in parts of few sequences (`ROWS`)."""
        scope.refuse_steps(scope.count(batch), 0)  # before parts of it, which have fewer, are computed
        batch = self.first_pass.filled(batch)
        tables: list[pa.Table] = []

        def tally(part: Batch) -> Tally:
            study = self.study
            given = study.seed, study.replicates, self.first_pass.fits, own(self.devices)
            context = BatchContext.of(part, *given)
            seen = observe(study, context)
            if self.rows:
                tables.append(table(context, study))
            context.forget()
            return seen

        # merged one by one, for a part's tally is as large as the batch's
        most = ROWS // max(len(self.study.presets), 1)
        return Observed(
            reduce(Tally.merge, map(tally, batch.parts(most))), pa.concat_tables(tables) if tables else None
        )
