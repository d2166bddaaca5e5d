"""The pass over a dump.

`examine` plans a `Study` and has an engine of `run/` call `Observe` on every batch that `dump.read` yields.
What a batch leaves merges with what any other leaves, and `readout` makes a `Result` of the whole.

Some presets need a step's rows together before a token of it can be judged: M2PO's cut, and advantages that
are made of rewards. For these alone the dump is read once before (`read_ahead`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from operator import attrgetter
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
from offpol_diag.core.formulas import batch_cut
from offpol_diag.core.gap import Tokens
from offpol_diag.core.kept_rows import Sample
from offpol_diag.core.places import PREFIX, STEP
from offpol_diag.core.preset_numbers import factors
from offpol_diag.core.segments import extremes, memory_of, to_host
from offpol_diag.core.sequences import SequenceWriter, table
from offpol_diag.core.state import REPLICATES, Array, State, Table, buckets_of, groups_of
from offpol_diag.core.steps import Rule
from offpol_diag.core.steps import rule as rule_of
from offpol_diag.core.study import Readout, Study
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import Dump
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.presets import Policy, Preset, Reject, catalogue
from offpol_diag.result import DumpFacts, Result, Run
from offpol_diag.run.devices import CPU, ON_CPU, Choice, devices, worth_a_gpu
from offpol_diag.run.ray import Engine, connected
from offpol_diag.run.threads import Progress, Threads, own, peak_rss

MADE = (
    "there are no advantages: they are made of the rewards, normalised within each group (prompt) of a step"
)
MADE += " as GRPO does"

# ---------------------------------------------------------------- before: what needs a step's rows together

MOST_VALUES = 1 << 26
"""Most values of one step that are held in memory to be sorted."""
MOST_STEPS = 1 << 14
"""Most training steps of a dump; sums are kept of each."""
GRPO_EPS = 1e-6
"""Added to a group's standard deviation: that of verl's compute_grpo_outcome_advantage."""

Cut = tuple[Policy, Reject]
Values = tuple[int, float, tuple[Array, ...]]


class TooMany(DumpError):
    """The dump has more steps, or more values of a step, than are kept."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "name the column that numbers the trainer batches with --columns step=NAME")


def refuse_steps(steps: int) -> None:
    """Raise `TooMany` for more than `MOST_STEPS` training steps."""
    if steps > MOST_STEPS:
        raise TooMany(f"column 'step': more than {MOST_STEPS} training steps, and sums are kept of each")


@dataclass(frozen=True)
class Seen:
    """What the first reading leaves of a part of a dump.

    M2PO drops the largest values of a step until the mean of the rest is below the rule's `upper`. What is
    below it never has to go, so that its number and sum are enough; all others are held.

    Attributes:
        values: rule, step → number and sum of its tokens' values below `upper`, and the others, in parts.
        rewards: group and reward of sequences, [S] each, in parts; none where advantages are not made.
    """

    values: dict[tuple[Cut, str], Values]
    rewards: tuple[tuple[Array, Array], ...] = ()

    @classmethod
    def of(cls, study: Study, batch: Batch) -> Seen:
        """Collect them from one batch."""
        steps, step = np.unique(batch.steps, return_inverse=True)
        refuse_steps(len(steps))
        tokens, values = Tokens.of(batch), dict[tuple[Cut, str], Values]()
        of_tokens = tokens.sequences.spread(step)
        order = np.argsort(of_tokens, kind="stable")
        ends = np.cumsum(np.bincount(of_tokens, minlength=len(steps)))[:-1]
        for cut in study.cuts:
            x = tokens.judged(rule_of(*cut))[order]
            for name, some in zip(steps.tolist(), np.split(x, ends), strict=True):
                below = some < cut[1].upper
                values[cut, name] = int(below.sum()), float(some[below].sum()), (some[~below],)
        if not study.makes_advantages or batch.rewards is None:
            return cls(values)
        return cls(values, ((groups_of(batch.key, batch.steps), batch.rewards),))

    def merge(self, other: Seen) -> Seen:
        """Merge with what is left of another part.

        Raises:
            TooMany: there are too many steps, or too many values of one to be sorted in memory.
        """
        values = dict(self.values)
        for key, (below, total, others) in other.values.items():
            before = values.get(key, (0, 0.0, ()))
            values[key] = before[0] + below, before[1] + total, before[2] + others
            if sum(map(len, values[key][2])) > MOST_VALUES:
                what = (
                    f"a step has more than {MOST_VALUES >> 20} M tokens above the bound of a rule over the "
                )
                raise TooMany(f"{what}trainer batch (M2PO), which sorts them in memory")
        refuse_steps(len({step for _, step in values}))
        return Seen(values, self.rewards + other.rewards)


@dataclass(frozen=True)
class Ahead:
    """What is known of whole steps before their tokens are judged.

    Attributes:
        cuts: rule → step → the value from which on tokens are dropped.
        groups: hashes of groups, rising, [G]; None where advantages are not made of rewards.
        mean: mean reward of each, [G]: an advantage is (reward − mean) / scale.
        scale: standard deviation, with n − 1, and 1e-6 more; a group of one keeps its reward over 1 + 1e-6.
            Source: Shao et al. 2024 (DeepSeekMath).
    """

    cuts: Mapping[Cut, Mapping[str, float]]
    groups: Array | None = None
    mean: Array | None = None
    scale: Array | None = None

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, seen: Seen) -> Ahead:
        """Find the cuts, mean and deviation."""
        cuts: dict[Cut, dict[str, float]] = {}
        for (cut, step), (below, total, others) in seen.values.items():
            x, upper = np.concatenate(others), cut[1].upper or 0.0
            cuts.setdefault(cut, {})[step] = float(batch_cut(x, upper, below, total)) if len(x) else math.inf
        if not seen.rewards:
            return cls(cuts)
        every, rewards = (np.concatenate(x) for x in zip(*seen.rewards, strict=True))
        groups, at = np.unique(every, return_inverse=True)
        n = np.bincount(at)
        mean = np.bincount(at, rewards) / n
        deviation = np.sqrt(np.bincount(at, np.square(rewards - mean[at])) / np.maximum(n - 1, 1))
        alone = n == 1
        return cls(cuts, groups, np.where(alone, 0.0, mean), np.where(alone, 1.0, deviation) + GRPO_EPS)

    @classmethod
    def of_batch(cls, study: Study, batch: Batch) -> Ahead:
        """Return what is known of a dump that is one batch."""
        return cls.of(Seen.of(study, batch))

    def cut(self, batch: Batch, rule: Rule, _: Array) -> Array:
        """Return the value from which on a rule drops tokens, for every token of a batch, [T]."""
        cuts = self.cuts[rule.policy, rule.reject]
        return np.repeat(np.array([cuts[step] for step in batch.steps], np.float64), batch.lengths)

    def filled(self, batch: Batch) -> Batch:
        """Add advantages to a batch, where they are made of rewards."""
        if self.groups is None or self.mean is None or self.scale is None:
            return batch
        at = np.searchsorted(self.groups, groups_of(batch.key, batch.steps))
        advantages = (batch.rewards - self.mean[at]) / self.scale[at]
        return replace(batch, advantages=np.repeat(advantages, batch.lengths))


def read_ahead(engine: Engine, dump: Dump, study: Study) -> Ahead:
    """Read the dump for what presets need of whole steps; it is not read where they need nothing."""
    if not study.cuts and not study.makes_advantages:
        return Ahead({})
    return Ahead.of(engine.reduce(dump, partial(Seen.of, study)) or Seen({}))


# ---------------------------------------------------------------- one batch


@dataclass(frozen=True)
class Observed:
    """What a part of a dump leaves: its state, and a row of each sequence where they are written."""

    state: State
    rows: pa.Table | None = None

    def merge(self, other: Observed) -> Observed:
        """Add the state of another part; rows have been written before."""
        state = self.state.merge(other.state)
        if (steps := state.tables.get(PREFIX + STEP)) is not None:
            refuse_steps(len(steps.labels))
        return Observed(state)


@dataclass(frozen=True)
class Observe:
    """The job of an analysis.

    Attributes:
        study: what is measured.
        ahead: what is known of whole steps; None where a batch is all of the dump.
        rows: whether a row is made of each sequence.
        devices: where presets are computed, `CPU` or GPUs such as "cuda:0": each thread takes one of them.
            All else is computed here.
    """

    study: Study
    ahead: Ahead | None = None
    rows: bool = False
    devices: tuple[str, ...] = (CPU,)

    @np.errstate(all="ignore")
    def __call__(self, batch: Batch) -> Observed:
        """Compute the columns of a batch's sequences, [S] each, and what each part of the core keeps."""
        refuse_steps(len(set(batch.steps)))
        study, device, ahead = self.study, own(self.devices), self.ahead or Ahead.of_batch(self.study, batch)
        batch, presets = ahead.filled(batch), study.presets
        groups, cut = groups_of(batch.key, batch.steps), partial(ahead.cut, batch)
        buckets = buckets_of(groups)
        with memory_of(device):
            tokens = Tokens.of(batch, cut, device)
            started = preset_numbers.columns(tokens, presets)  # a GPU computes them while the host goes on
        host = tokens if device == CPU else Tokens.of(batch, cut)
        columns, states, n = {**host.counts}, [State.of_groups(groups)], host.sequences.n
        ranges = {"length": extremes(n), "response": extremes(n + batch.masked)}
        main = host.terms(study.main)
        for terms in (main, *map(host.terms, study.drifts[1:])):
            sums = gap.columns(terms)
            columns |= sums
            ranges |= gap.ranges(terms, sums)
            states.append(tails.observe(terms, sums[f"{terms.drift.prefix}d"], buckets))
        pieces = places.cut(main)
        states += [histograms.observe(main), kept_rows.observe(main, groups)]
        if study.pairs:
            states.append(kept_rows.observe_drops(main, buckets, study.pairs))

        of_presets = to_host(started)
        named = partial(preset_numbers.one_column, of_presets)
        kept, fresh = named("kept", study.families), named("weighted", presets if study.lag_0 else ())
        more = {places.LENGTH: named("left", presets), places.LAG: fresh}
        tables = places.observe(main, pieces, columns, more, buckets, study.group_by)
        tables |= charts.observe(main, study.drifts, pieces[0], columns, kept, buckets)
        states.append(preset_numbers.observe(of_presets, presets, buckets, batch.steps))
        every = [preset for preset in presets if preset not in study.normalised]
        columns |= preset_numbers.of_presets(of_presets, every)
        tables |= {
            "dump": Table.of(columns, buckets),
            breakdowns.PREFIXES: breakdowns.prefixes(main, buckets),
        }
        if study.by_step:
            tables["steps"] = Table.of(columns, buckets, batch.steps)
        counts = {"masked": np.array([batch.masked.sum()], np.float64)}
        rows = table(tokens, study.main, presets, columns | of_presets) if self.rows else None
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
    study = Study.of(dump.info.columns, chosen, lag_0=lag_0, **asked)
    if engine == "local":
        choice = devices(device, worth_a_gpu(dump.tokens, len(study.presets)))
    else:  # each task that has a GPU sees no other; the engine refuses cuda:N
        choice = ON_CPU if device in ("auto", CPU) else Choice((device,))
    with running(engine, choice, threads, progress) as runs, SequenceWriter.open(sequences) as writer:
        ahead = read_ahead(runs, dump, study)
        job = Observe(study, ahead, writer is not None, choice.devices)
        found = runs.reduce(dump, job, (attrgetter("rows"), writer.write) if writer else None)
        if found is None:
            raise DumpError("the dump has no sequence", "check that its writer was closed")
        if writer:
            writer.finish(factors(found.state, study.presets))
    facts = readout.facts(dump, found.state, [MADE] * study.makes_advantages)
    run = Run(
        command="analyze",
        version=version("offpol-diag"),
        device=choice.name,
        engine=f"{runs.name}; {choice.unused}" if choice.unused else runs.name,
        seed=seed,
        replicates=REPLICATES,
        tokens=facts.tokens,
        sequences=facts.sequences,
        peak_rss_bytes=peak_rss(),
        seconds={"total": time.perf_counter() - began},
    )
    return Examined(study, found.state, chosen, facts, run)


def running(
    engine: str, choice: Choice, threads: int | None, progress: Progress | None
) -> AbstractContextManager[Engine]:
    """Start an engine: local, or ray.

    Raises:
        UsageError: no engine is called so, or threads are asked for where a cluster says how many.
    """
    if engine == "local":
        return nullcontext(Threads(threads, progress))
    if engine != "ray":
        raise UsageError(f"engine {engine!r} is not known", "give local or ray")
    if threads and threads > 1:
        what = f"--threads {threads} is for this machine: with --engine ray the cluster says how many"
        raise UsageError(what, "offer Ray more or fewer CPUs")
    return connected(choice.name, progress)
