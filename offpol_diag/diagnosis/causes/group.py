"""One engine, host or other group that stands out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import MACHINES, Rows, alike, jittered, partitions

ERRORS, TIMES, PLAIN_TIMES = 5.5, 2.5, 5.0
"""Standard errors and factor of mean |Δ| from which a group stands out; and the factor of a group that is not
one of machines: prompts of another kind may be harder to agree on, machines all do the same work."""
FEWEST, MOST = 6, 0.6
"""Fewest sequences inside and outside a group, and most of all sequences that it may have."""


class GroupFault(Cause):
    """One engine, host or other group stands out.

    Responses of one value of a column (host, engine, env) differ several-fold more than those of the others,
    within the same step and lag. The others are at the usual level.
    """

    kind = "weights"
    id = "group_fault"
    sentence = "sequences with {where} differ {times}-fold more than the others"
    confirm = "restart or replace what is behind {where}, and compare again"
    fix = "check the weights, the version and the flags of {where}: did it miss a weight sync?"
    after = "without these sequences"
    apart = {"quantized_rollout": "A group of another precision is honest where the dump says so."}
    blanks = {"where": "one value of a column"}

    def look_alone(self, rows: Rows) -> Found | None:
        """Find the group that differs most in mean |Δ| from what is usual at its own step and lag."""
        best, found, logs, weights = 0.0, None, np.log(np.maximum(rows.level, 1e-9)), alike(rows)
        for one in np.unique(weights):
            logs[weights == one] -= np.median(logs[weights == one])
        every = ((name, *one) for name, parts in partitions(rows) if name != "step" for one in parts.items())
        for name, value, at in every:
            if min(at.sum(), (~at).sum()) < FEWEST or at.mean() > MOST:
                continue
            gap = float(logs[at].mean() - logs[~at].mean())
            error = np.hypot(*(logs[some].std() / np.sqrt(some.sum()) for some in (at, ~at)))
            times = TIMES if MACHINES.search(name.lower()) else PLAIN_TIMES
            if gap > max(best, ERRORS * error, np.log(times)):
                where, here, there = f"{name} = {value}", *(np.median(rows.level[x]) for x in (at, ~at))
                evidence = (
                    f"mean |Δ| of a sequence is {here:.2g} nats with {where} ({int(at.sum()):,} sequences) "
                )
                evidence += f"and {there:.2g} with others, medians"
                words = {"times": f"{np.exp(gap):.0f}"}
                rest = {"repaired": rows.only(~at), "words": words, "where": where}
                best, found = gap, self.of_sequences(evidence, rows, at, **rest)
        return found

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        host = [f"h{i % 4}" for i in range(rows.sequences)]
        p = jittered(rows, np.where(np.array(host) == "h2", 0.4, 0.0)[rows.owner], rng)
        return replace(rows, p=p, scalars={**rows.scalars, "host": host})
