"""The pass over a dump.

`examine` plans a `Study` and has an engine of `run/` call `Observe` on every batch that `dump.read` yields.
What a batch leaves merges with what any other leaves, and `readout` makes a `Result` of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa

from offpol_diag.core import (
    breakdowns,
    charts,
    gap,
    histograms,
    kept_rows,
    places,
    preset_numbers,
    readout,
    tails,
)
from offpol_diag.core.gap import Tokens
from offpol_diag.core.kept_rows import Sample
from offpol_diag.core.places import PREFIX, STEP
from offpol_diag.core.preset_numbers import factors
from offpol_diag.core.segments import extremes, memory_of, to_host
from offpol_diag.core.sequences import SequenceWriter, table
from offpol_diag.core.state import REPLICATES, State, Table, buckets_of, groups_of
from offpol_diag.core.study import Readout, Study
from offpol_diag.core.whole_steps import MADE, WholeSteps, read_whole_steps, refuse_steps
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import Dump, Progress
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.presets import Preset, catalogue
from offpol_diag.result import DumpFacts, Result, Run
from offpol_diag.run.devices import CPU, Choice, devices
from offpol_diag.run.ray import Engine, connected
from offpol_diag.run.threads import Threads, device_of_thread, peak_rss

# ---------------------------------------------------------------- one batch


@dataclass(frozen=True)
class Observed:
    """What a part of a dump leaves: its state, and a row of each sequence where they are to be written."""

    state: State
    rows: tuple[pa.Table, ...] = ()

    def merge(self, other: Observed) -> Observed:
        """Add what another part leaves."""
        state = self.state.merge(other.state)
        if (steps := state.tables.get(PREFIX + STEP)) is not None:
            refuse_steps(len(steps.labels))
        return Observed(state, self.rows + other.rows)


@dataclass(frozen=True)
class Observe:
    """Computes what one batch contributes to a study.

    Attributes:
        study: what is measured.
        whole: what is known of whole steps; None where a batch is all of the dump.
        rows: whether a row is made of each sequence.
        devices: where presets are computed, `CPU` or GPUs such as "cuda:0": each thread takes one of them.
            All else is computed here.
    """

    study: Study
    whole: WholeSteps | None = None
    rows: bool = False
    devices: tuple[str, ...] = (CPU,)

    @np.errstate(all="ignore")
    def __call__(self, batch: Batch) -> Observed:
        """Compute the columns of a batch's sequences, [S] each, and what each part of the core keeps."""
        refuse_steps(len(set(batch.steps)))
        study, device = self.study, device_of_thread(self.devices)
        whole = self.whole or WholeSteps.of_batch(study, batch)
        batch, cut, presets = whole.filled(batch), partial(whole.cut, batch), study.presets
        groups = groups_of(batch.key, batch.steps)
        buckets = buckets_of(groups)
        with memory_of(device):
            tokens = Tokens.of(batch, cut, device)
            pending = preset_numbers.columns(tokens, presets)  # a GPU computes them while the host goes on

        host = tokens if device == CPU else Tokens.of(batch, cut)
        columns, states, n = {**host.counts}, [State.of_groups(groups)], host.sequences.n
        ranges = {"length": extremes(n), "response": extremes(n + batch.masked)}
        main = host.terms(study.main)
        for terms in (main, *map(host.terms, study.drifts[1:])):
            sums = gap.columns(terms)
            columns |= sums
            ranges |= gap.ranges(terms, sums)
            states.append(tails.observe(terms, sums[f"{terms.drift.prefix}log_ratio"], buckets))
        states += [histograms.observe(main), kept_rows.observe(main, groups)]
        if study.pairs:
            states.append(kept_rows.observe_drops(main, buckets, study.pairs))

        preset_columns = to_host(pending)
        select = partial(preset_numbers.one_column, preset_columns)
        more = {places.LENGTH: select("left", presets)}
        more[places.LAG] = select("weighted", presets) if study.lag_0 else {}
        tables = places.observe(main, columns, more, buckets, study.group_by)
        tables |= charts.observe(main, study.drifts, columns, select("kept", study.families), buckets)
        tables[breakdowns.PREFIXES] = breakdowns.prefixes(main, buckets)
        states.append(preset_numbers.observe(preset_columns, presets, buckets, batch.steps))
        unnormalised = [preset for preset in presets if preset not in study.normalised]
        columns |= preset_numbers.added(preset_columns, unnormalised)
        tables["dump"] = Table.of(columns, buckets)
        if study.by_step:
            tables["steps"] = Table.of(columns, buckets, batch.steps)
        counts = {"masked": np.array([batch.masked.sum()], np.float64)}
        rows = (table(tokens, study.main, presets, columns | preset_columns),) if self.rows else ()
        return Observed(State.joined(*states, State(tables=tables, counts=counts, ranges=ranges)), rows)


# ---------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Examined:
    """What one pass over a dump leaves; presets are also those that lack a column."""

    study: Study
    state: State
    presets: tuple[Preset, ...]
    facts: DumpFacts
    run: Run

    @property
    def sample(self) -> Sample:
        """A sample of the sequences, token by token."""
        found: Sample = self.state.records["sample"].read()
        return found

    def summary(self) -> Result:
        """Read out every number; the verdict is the diagnosis's."""
        return readout.summary(Readout(self.study, self.state), self.presets, self.facts, self.run)


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
    """Analyse a dump under some presets: compute what all numbers are read from.

    Args:
        dump: the dump, opened with the same columns to group by.
        presets: corrections to try, by name ("token_is,seq_mis", "all") or as `catalogue.load()` has them.
        group_by: scalar columns to break the mismatch down by.
        device: auto, cpu, cuda (all GPUs here) or cuda:N; with the engine ray, auto is cpu, and cuda a GPU
            for each task.
        seed: of the bootstrap.
        sequences: where to write one row per sequence (Parquet), or None.
        progress: called as rows are done.
        engine: where it runs, local or ray.
        threads: how many compute; None for one per core. The numbers are the same to the last bit.
        against: a preset whose drops are compared with those of each other one.
        by_step: names of numbers (`drift2.k3`, `token_is.ess_tokens`) to be had for every training step too.
        lag_0: whether to count what each preset keeps of policy lag 0.

    Raises:
        DumpError: the dump cannot be read.
        UsageError: the device is not there, or the engine has no such threads.
        ClusterError: the cluster cannot be reached, or does not do its work.
    """
    began, chosen = time.perf_counter(), catalogue.load().resolve(presets)
    asked = {"group_by": tuple(group_by), "by_step": tuple(by_step), "seed": seed, "against": against}
    study = Study.of(dump.columns, chosen, lag_0=lag_0, **asked)
    if engine == "local":
        choice = devices(device, dump.tokens, len(study.presets))
    else:  # each task that has a GPU sees no other; the engine refuses cuda:N
        choice = Choice() if device in ("auto", CPU) else Choice((device,))
    with running(engine, choice, threads, progress) as runs, SequenceWriter.open(sequences) as writer:
        whole = read_whole_steps(runs, dump, study)
        job = Observe(study, whole, writer is not None, choice.devices)
        found = runs.reduce(dump, job, partial(written, writer) if writer else None)
        if found is None:
            raise DumpError("the dump has no sequence", "check that its writer was closed")
        if writer:
            writer.finish(factors(found.state, study.presets))
    facts = readout.facts(dump, found.state, [MADE] * study.makes_advantages)
    run = Run(
        command="analyze",
        version=version("offpol-diag"),
        device=" ".join(choice.devices),
        engine=f"{runs.name}; {choice.unused}" if choice.unused else runs.name,
        seed=seed,
        replicates=REPLICATES,
        tokens=facts.tokens,
        sequences=facts.sequences,
        peak_rss_bytes=peak_rss(),
        seconds={"total": time.perf_counter() - began},
    )
    return Examined(study, found.state, chosen, facts, run)


def written(writer: SequenceWriter, found: Observed) -> Observed:
    """Write the rows of a part of the dump."""
    for rows in found.rows:
        writer.write(rows)
    return replace(found, rows=())


def running(
    engine: str, choice: Choice, threads: int | None, progress: Progress | None
) -> AbstractContextManager[Engine]:
    """Start an engine: local, or ray.

    Raises:
        UsageError: the engine is unknown, or a number of threads is given for a cluster.
    """
    if engine == "local":
        return nullcontext(Threads(threads, progress))
    if engine != "ray":
        raise UsageError(f"engine {engine!r} is not known", "give local or ray")
    if threads and threads > 1:
        what = f"--threads {threads} is for this machine: with --engine ray the cluster says how many"
        raise UsageError(what, "offer Ray more or fewer CPUs")
    return connected(choice.devices[0], progress)
