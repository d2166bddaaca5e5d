"""What speaks for each method that could be recommended: the estimates, as they stand in a result."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from offpol_diag.candidates import CANDIDATES, REFERENCE, Candidate
from offpol_diag.metrics.alignment import Estimate, Folds, estimates, moved, systematic
from offpol_diag.presets import Policy
from offpol_diag.summary import Alignment, AlignmentRow, Location, Number, Numbers

DIRECTION = frozenset({"token_ids", "advantages"})
"""Columns without which only the noise of a method can be estimated, not its bias."""

Z = 1.959964
LARGE = 700.0


def alignment(
    folds: Folds,
    policy: Policy,
    columns: Iterable[str],
    batch: float,
    metrics: Mapping[str, Numbers] | None = None,
) -> Alignment:
    """The estimate for every candidate.

    Args:
        folds: sums of the whole dump.
        policy: the train side of the candidates.
        columns: those that the dump has, or that were made.
        batch: sequences in one update of the trainer.
        metrics: of the weights of candidates, by their names.
    """
    found = estimates(folds, REFERENCE.name, batch)
    return Alignment(
        batch_sequences=batch,
        reference=REFERENCE.name,
        direction=set(columns) >= DIRECTION,
        systematic=_known(systematic(folds).value),
        moved=moved(folds) if "advantages" in set(columns) else None,
        rows={
            one.name: _row(one, policy, found[one.name], (metrics or {}).get(one.name, {}))
            for one in CANDIDATES
        },
    )


def per_update(steps: Location | None, sequences: int) -> float:
    """Sequences in one update, where nobody says it: those of a usual step, else all of the dump."""
    found = [place.sequences for place in steps.places] if steps else []
    return float(median(found)) if found else float(sequences)


def _row(one: Candidate, policy: Policy, found: Estimate, metrics: Numbers) -> AlignmentRow:
    method, threshold, settings = one.named(policy)
    return AlignmentRow(
        title=one.title,
        judges=one.judges,
        method=method,
        threshold=threshold,
        settings=settings,
        kept=found.kept,
        noise=_known(found.noise),
        expected=_known(found.expected),
        measured=_known(found.measured),
        error=_known(found.error),
        distance=_known(found.distance),
        score=_known(found.score),
        alignment=_relative(found.score, 0.0, "e^score"),
        seen=_relative(found.measured, Z * found.error, "e^measured"),
        metrics=metrics,
    )


def _relative(log: float, half: float, formula: str) -> Number:
    """A log of a relative alignment, ± half its interval, as a number."""
    if not (math.isfinite(log) and math.isfinite(half)):
        return Number(over="updates", formula=formula, unknown="the signal drowns in noise")
    interval = (math.exp(log - half), math.exp(min(log + half, LARGE))) if half > 0 else None
    return Number(value=math.exp(log), interval=interval, over="updates", formula=formula)


def _known(x: float) -> float | None:
    return x if math.isfinite(x) else None
