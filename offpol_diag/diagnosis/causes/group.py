"""One engine, host or other group that stands out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import MACHINES, Flags, Rows, alike, jittered, partitions

ERRORS, TIMES, PLAIN_TIMES = 5.5, 2.5, 5.0
"""Standard errors and factor of mean |Δ| from which a group stands out; and the factor of a group that is not
one of machines: prompts of another kind may be harder to agree on, machines all do the same work."""
FEWEST, MOST = 6, 0.6
"""Fewest sequences inside and outside a group, and most of all sequences that it may have."""
HELD, MOSTLY, CHANCE = 0.95, 0.6, 9.0
"""Share of the sequences with a fault that are in a place; share of a value's sequences that make it a part
of the place; and −log of the chance that all of these are in it."""


@dataclass(frozen=True)
class Group:
    """A group whose sequences differ more than others of the same step and lag.

    Attributes:
        name: of the column.
        where: the group in words.
        at: its sequences, [S].
        times: factor of mean |Δ|.
    """

    name: str
    where: str
    at: Flags
    times: float


class GroupFault(Cause):
    """One engine, host or other group stands out.

    Responses of one value of a column (host, engine, env) differ several-fold more than those of the others,
    within the same step and lag. The others are at the usual level.
    """

    kind = "weights"
    id = "group_fault"
    sentence = "sequences with {where} differ {times}-fold more than the others"
    violates = "engines with the same weights and kernels differ alike"
    confirm = "restart or replace what is behind {where}, and compare again"
    fix = (
        "check the weights, the version and the flags of {where}: a replica that missed a weight sync, "
        "another dtype or kernel"
    )
    after = "without these sequences"
    ruled_out = "one engine, host or other group that stands out"
    apart = {"quantized_rollout": "A group of another precision is honest where the dump says so."}
    blanks = {"where": "one value of a column", "times": "several"}

    def group(self, rows: Rows) -> Group | None:
        """Return the group that differs most in mean |Δ| from what is usual at its own step and lag."""
        found, logs, weights = list[Group](), np.log(np.maximum(rows.level, 1e-9)), alike(rows)
        for one in np.unique(weights):
            logs[weights == one] -= np.median(logs[weights == one])
        for name, parts in partitions(rows):
            for value, at in parts.items() if name != "step" else ():
                if min(at.sum(), (~at).sum()) < FEWEST or at.mean() > MOST:
                    continue
                gap = float(logs[at].mean() - logs[~at].mean())
                error = np.hypot(*(logs[some].std() / np.sqrt(some.sum()) for some in (at, ~at)))
                if gap > ERRORS * error and np.exp(gap) > TIMES:
                    found.append(Group(name, f"{name} = {value}", at, float(np.exp(gap))))
        return max(found, key=lambda one: one.times, default=None)

    def stands_out(self, rows: Rows, one: Group) -> Found | None:
        """Return the finding that a group differs, whatever the cause."""
        if one.times < (TIMES if MACHINES.search(one.name.lower()) else PLAIN_TIMES):
            return None
        evidence = (
            f"mean |Δ| of a sequence is {np.median(rows.level[one.at]):.2g} nats with {one.where} "
            f"({int(one.at.sum()):,} sequences) and {np.median(rows.level[~one.at]):.2g} with others, medians"
        )
        rest = {"repaired": rows.only(~one.at), "words": {"times": f"{one.times:.0f}"}, "where": one.where}
        return self.of_sequences(evidence, rows, one.at, **rest)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        host = np.arange(rows.sequences) % 4
        p = jittered(rows, np.where(host == 2, 0.4, 0.0)[rows.owner], rng)
        return replace(rows, p=p, scalars={**rows.scalars, "host": [f"h{one}" for one in host]})


def places(rows: Rows, sequences: Flags) -> Iterator[str]:
    """Yield the groups of nearly all flagged sequences, [S], that are not so by chance: `host = b`."""
    total = int(sequences.sum())
    for name, parts in partitions(rows) if sequences.mean() < HELD else ():
        most = max(parts, key=lambda value: int(sequences[parts[value]].sum()))
        inside = [value for value, at in parts.items() if sequences[at].mean() > MOSTLY] or [most]
        whole = np.logical_or.reduce([parts[value] for value in inside])
        chance = -total * np.log(whole.mean()) - np.log(len(parts))
        if sequences[whole].sum() > HELD * total and whole.mean() < HELD and chance > CHANCE:
            more = f" and {len(inside) - 4} more" if len(inside) > 4 else ""
            yield f"{name} = {', '.join(map(str, inside[:4]))}{more}"
