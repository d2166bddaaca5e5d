"""Measure how often the exact identities call an honest dump a bug, and how often they see a fault.

Only the two signatures that rest on E[r] = 1 and k1 ≥ 0 are asked, so that thousands of dumps can be judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from covering.worlds import HONEST, World, batch
from offpol_diag.batch import Batch
from offpol_diag.diagnosis import laws
from offpol_diag.diagnosis.rows import Rows


@dataclass(frozen=True)
class Fault:
    """A fault of the logged old log-probs: an offset in nats, below a position."""

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
    """List the causes that the identities find."""
    assert given.old is not None
    rows = Rows(
        given.rollout,
        given.old,
        given.cu_seqlens,
        given.position,
        scalars={"group_id": given.key.tolist()},
    )
    return [one.cause for one in (laws.sampling(rows), laws.positions(rows)) if one]


def faulty(given: Batch, fault: Fault) -> Batch:
    """Put a fault into a dump."""
    assert given.old is not None
    return replace(given, old=given.old + fault.shift * (given.position < fault.first))


def rate(world: World, groups: int, dumps: int, fault: Fault | None = None) -> int:
    """Count the drawn dumps that are called a bug."""
    found = 0
    for i in range(dumps):
        given = batch(world, groups, np.random.default_rng((99, HONEST.index(world), groups, i)))
        found += bool(causes(faulty(given, fault) if fault else given))
    return found


def measured(dumps: int) -> dict[str, dict[str, int]]:
    """Measure alarms of honest dumps, and of faulty ones, a hundredth as many."""
    few = max(dumps // 100, 20)
    honest = {f"{world.name}|{many}": rate(world, many, dumps) for world in HONEST[:3] for many in (20, 128)}
    seen = {
        f"{fault.name}|{many}": rate(HONEST[0], many, few, fault) for fault in FAULTS for many in (20, 128)
    }
    return {"dumps": {"honest": dumps, "faulty": few}, "honest": honest, "faulty": seen}
