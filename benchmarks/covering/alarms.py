"""How often the exact identities call an honest dump a bug, and how often they see a fault.

What the product sums is summed here by prompt and position, so that thousands of dumps can be judged; the
intervals and the verdict are the product's own. No tail is called too heavy here, so every dump is judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from covering.worlds import HONEST, World, batch
from offpol_diag import resample
from offpol_diag.accumulators import Sums
from offpol_diag.batch import Batch
from offpol_diag.diagnose import diagnose
from offpol_diag.metrics import gap, where
from offpol_diag.metrics.formula import Reader
from offpol_diag.summary import DumpFacts, Location, Number, Place, Run, Summary

PLACES = 12
"""Octaves of the position: 0, 1–2, 3–6, …"""
ROWS = {row.name: row for row in (*gap.ROWS, *where.ROWS) if row.name in ("k1", "mean_ratio")}


@dataclass(frozen=True)
class Fault:
    """What is wrong with the logged old log-probs: so much too large, below a position."""

    name: str
    shift: float
    first: int = 1 << 30


FAULTS = (
    Fault("E[r] = 1.02 everywhere", 0.02),
    Fault("first token: r too large by 10%", 0.095, 1),
    Fault("first three tokens: r too large by 5%", 0.05, 3),
    Fault("first token: r too large by 2%", 0.02, 1),
)


def causes(given: Batch) -> list[str]:
    """The causes that the product finds."""
    found = diagnose(summary(given))
    return [cause.id for cause in found.causes]


def summary(given: Batch) -> Summary:
    """What the identities look at."""
    assert given.old is not None
    delta = given.old - given.rollout
    place = torch.log2(given.position.double() + 1).floor().long().clamp(max=PLACES - 1)
    key, group = torch.unique(given.key, return_inverse=True)
    cell = torch.repeat_interleave(group, given.lengths) * PLACES + place
    tables = {name: _table(cell, x, len(key)) for name, x in _columns(delta).items()}
    draws = resample.draws(key, 0)
    whole = Reader(Sums.of({name: x.sum(1) for name, x in tables.items()}, draws).read(), len(key))
    places = [
        Reader(Sums.of({name: x[:, at] for name, x in tables.items()}, draws).read(), len(key))
        for at in range(PLACES)
    ]
    there = [(at, reader) for at, reader in enumerate(places) if float(reader.sums["tokens"][0]) > 0]
    return Summary(
        dump=_facts(given, len(key)),
        metrics={"k3": Number(value=0.01), **_numbers(whole)},
        presets={},
        by={
            "position": Location(
                axis="position", title="", numeric=True, places=[_place(*one) for one in there]
            )
        },
        run=_RUN,
    )


def _columns(delta: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"d": delta, "r1": torch.expm1(delta), "tokens": torch.ones_like(delta)}


def _table(cell: torch.Tensor, x: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.bincount(cell, x, groups * PLACES).reshape(groups, PLACES)


def _numbers(reader: Reader) -> dict[str, Number]:
    return {name: reader.number(row) for name, row in ROWS.items()}


def _place(at: int, reader: Reader) -> Place:
    metrics = {**_numbers(reader), "k3": Number(value=0.01)}
    return Place(
        key=str(at), order=at, tokens=round(float(reader.sums["tokens"][0])), sequences=1, metrics=metrics
    )


def _facts(given: Batch, groups: int) -> DumpFacts:
    return DumpFacts(
        files=[],
        rows=given.sequences,
        sequences=given.sequences,
        tokens=given.tokens,
        masked_tokens=0,
        groups=groups,
        mean_length=1.0,
        max_length=1,
        columns={},
    )


_RUN = Run(
    version="", device="cpu", seed=0, replicates=256, tokens=0, sequences=0, peak_rss_bytes=0, seconds={}
)


def faulty(given: Batch, fault: Fault) -> Batch:
    """A dump with a fault."""
    assert given.old is not None
    return replace(given, old=given.old + fault.shift * (given.position < fault.first))


def rate(world: World, groups: int, dumps: int, fault: Fault | None = None) -> int:
    """How many of so many dumps are called a bug."""
    found = 0
    for i in range(dumps):
        given = batch(world, groups, np.random.default_rng((99, HONEST.index(world), groups, i)))
        found += bool(causes(faulty(given, fault) if fault else given))
    return found


def measured(dumps: int) -> dict[str, dict[str, int]]:
    """Alarms of honest dumps, and of faulty ones, a hundredth as many."""
    torch.set_num_threads(1)
    few = max(dumps // 100, 20)
    honest = {f"{world.name}|{many}": rate(world, many, dumps) for world in HONEST[:3] for many in (20, 128)}
    seen = {
        f"{fault.name}|{many}": rate(HONEST[0], many, few, fault) for fault in FAULTS for many in (20, 128)
    }
    return {"dumps": {"honest": dumps, "faulty": few}, "honest": honest, "faulty": seen}
