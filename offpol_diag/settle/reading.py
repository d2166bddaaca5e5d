"""The reading that goes before, and a second one where a cut falls inside a bin of the lattice."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from offpol_diag import pareto
from offpol_diag.accumulators import State
from offpol_diag.errors import DumpError
from offpol_diag.readers import Dump
from offpol_diag.run.task import Engine, Job
from offpol_diag.scope import Label, Settled
from offpol_diag.settle.asked import Asked, Cut, Found
from offpol_diag.settle.cuts import Gather, bin_of, falls_at
from offpol_diag.settle.look import Look, Seen

M = TypeVar("M", bound=State)


def settle(engine: Engine, dump: Dump, asked: Asked) -> Found:
    """Read the dump, and once more where a cut falls inside a bin of the lattice."""
    seen = _read(engine, dump, asked, Look(asked)) or Seen({}, {}, None)
    bins = {cut: {label: bin_of(one, cut[1]) for label, one in seen.bins[cut].items()} for cut in asked.cuts}
    inside = _inside(engine, dump, {cut: found for cut, found in bins.items() if any(found.values())})
    cuts = {
        cut: {
            label: falls_at(seen.bins[cut][label], at, inside.get((cut, label)), cut[1])
            for label, at in found.items()
        }
        for cut, found in bins.items()
    }
    tails = {key: {at: pareto.smooth(tail) for at, tail in seen.tails[key].items()} for key in asked.tails}
    return Found(Settled(cuts, tails), seen.rewards)


def _read(engine: Engine, dump: Dump, asked: Asked, job: Job[M]) -> M | None:
    """A reading of no more columns than it takes; only all of them say which row is the first bad one."""
    narrow = asked.narrow(dump)
    try:
        return engine.reduce(narrow, job)
    except DumpError:
        if narrow is dump:
            raise
        return engine.reduce(dump, job)


def _inside(engine: Engine, dump: Dump, bins: dict[Cut, dict[Label, int]]) -> dict[tuple[Cut, Label], Tensor]:
    """All values that share the bin of a cut; the dump is not read when there is none."""
    found = _read(engine, dump, Asked(tuple(bins), (), rewards=False), Gather(bins)) if bins else None
    return found.parts if found else {}
