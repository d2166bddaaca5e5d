"""One engine, host or other group that stands out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import MACHINES, Flags, Floats, Ints, Rows, alike, jittered, partitions

ERRORS, TIMES, PLAIN_TIMES = 5.5, 2.5, 5.0
"""Standard errors and factor of mean |Δ| from which a group stands out; and the factor of a group that is not
one of machines: prompts of another kind may be harder to agree on, machines all do the same work."""
FEWEST, MOST = 6, 0.6
"""Fewest sequences inside and outside a group, and most of all sequences that it may have."""


@dataclass(frozen=True)
class Group:
    """A group whose sequences differ more than others of the same step and lag.

    Attributes:
        name, value: of the column.
        at: its sequences, [S].
        times: factor of mean |Δ|.
        compared: the sequences that were compared, [S].
    """

    name: str
    value: Any
    at: Flags
    times: float
    compared: Flags

    @property
    def where(self) -> str:
        """The group in words."""
        return f"{self.name} = {self.value}"


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
    apart = {
        "quantized_rollout": "A group of another precision is honest where the dump says so.",
    }
    blanks = {"where": "one value of a column", "times": "several"}

    def group(self, rows: Rows) -> Group | None:
        """Return the group that differs most from the others in mean |Δ|."""
        found, logs, weights = list[Group](), np.log(np.maximum(rows.level, 1e-9)), alike(rows)
        for name, parts in partitions(rows):
            for value, at in parts.items() if name != "step" else ():
                if min(at.sum(), (~at).sum()) < FEWEST or at.mean() > MOST:
                    continue
                gap, spread, compared = _apart(logs, at, weights)
                if gap / max(spread, 1e-9) > ERRORS and np.exp(gap) > TIMES:
                    found.append(Group(name, value, at, float(np.exp(gap)), compared))
        return max(found, key=lambda one: one.times, default=None)

    def stands_out(self, rows: Rows, one: Group) -> Found | None:
        """Return the finding that a group differs, whatever the cause."""
        if one.times < (TIMES if MACHINES.search(one.name.lower()) else PLAIN_TIMES):
            return None
        inside, outside = rows.level[one.at & one.compared], rows.level[~one.at & one.compared]
        evidence = (
            f"mean |Δ| of a sequence is {np.median(inside):.2g} nats with {one.where} ({len(inside):,} "
            f"sequences) and {np.median(outside):.2g} with others ({len(outside):,}), medians"
        )
        rest = {"repaired": rows.only(~one.at), "words": {"times": f"{one.times:.0f}"}, "where": one.where}
        return self.of_sequences(evidence, rows, one.at, **rest)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        host = np.arange(rows.sequences) % 4
        p = jittered(rows, np.where(host == 2, 0.4, 0.0)[rows.owner], rng)
        return replace(rows, p=p, scalars={**rows.scalars, "host": [f"h{one}" for one in host]})


def _apart(logs: Floats, at: Flags, weights: Ints) -> tuple[float, float, Flags]:
    """Compare the mean of `logs` [S] at flagged sequences with that of others of the same weights.

    Returns:
        The difference, its standard error (infinite where there is too little to compare), and the sequences
        that were compared, [S].
    """
    groups = int(weights.max()) + 1
    inside, outside = (np.bincount(weights, some, groups) for some in (at, ~at))
    both = (inside > 0) & (outside > 0)
    compared, strata = both[weights], int(both.sum())
    gaps, errors = np.zeros(groups), np.zeros(groups)
    for sign, some, many in ((1, at, inside), (-1, ~at, outside)):
        some = some & compared
        free = int(some.sum()) - strata
        if free < 5:
            return 0.0, np.inf, compared
        means = np.bincount(weights[some], logs[some], groups) / np.maximum(many, 1)
        gaps += sign * means
        errors += np.square(logs[some] - means[weights[some]]).sum() / free / np.maximum(many, 1)
    share = np.where(both, inside * outside / np.maximum(inside + outside, 1), 0.0)
    return float(share @ gaps / share.sum()), float(np.sqrt(share**2 @ errors) / share.sum()), compared


def places(rows: Rows, sequences: Flags) -> Iterator[str]:
    """Yield the groups of nearly all flagged sequences, [S], and hardly any others: `host = b`."""
    total = int(sequences.sum())
    for name, parts in partitions(rows) if sequences.mean() <= 0.9 else ():
        for value, at in parts.items():  # nearly all of so many in one group is not by chance
            chance = -total * np.log(at.mean())
            if sequences[at].sum() > 0.95 * total and chance > 9 + np.log(len(parts)):
                yield f"{name} = {value}"
        inside = [value for value, at in parts.items() if sequences[at].mean() > 0.6]
        whole = np.logical_or.reduce([parts[value] for value in inside] or [np.zeros(rows.sequences, bool)])
        if not inside or whole.mean() >= 0.9 or sequences[~whole].mean() >= 0.05:
            continue
        if sequences[whole].sum() > 0.9 * total:
            yield _named(name, inside, list(parts))


def _named(name: str, inside: list[Any], values: list[Any]) -> str:
    """Format a group: `host = b`, `step 4 to 7`."""
    if name == "step" and len(inside) > 1:
        order = sorted(value for value in values if value is not None)
        at = sorted(order.index(value) for value in inside)
        if at == list(range(at[0], at[-1] + 1)):
            return f"step {order[at[0]]} to {order[at[-1]]}"
    more = f" and {len(inside) - 4} more" if len(inside) > 4 else ""
    return f"{name} = {', '.join(map(str, inside[:4]))}{more}"
