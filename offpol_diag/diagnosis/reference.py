"""The verdict by side: whether a third computation of the same tokens reproduces the engine, or the trainer.

The third one is the column `reference_log_probs`, the run's model scored again by `offpol_diag.rescore`.
Here is what needs no model: distances of columns with errors clustered by prompt, outcomes and their words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from offpol_diag.diagnosis.estimates import Estimate
from offpol_diag.diagnosis.rows import Floats, Ints, Rows
from offpol_diag.numerals import rounded
from offpol_diag.result import Outcome, Reference, Side

FLOORS, ERRORS = 3.0, 2.0
"""Floors beyond which a column computes something else, and standard errors beyond them."""
CLIP = 20.0
"""Bound on |Δ|, nats: a variant may forbid a token."""
LEAST_GROUPS = 2
"""Prompts without which there is no standard error, and no verdict."""
KEY = "reference"
"""Where the provenance of a dump says what its column `reference_log_probs` is."""


def gaps(one: Floats, other: Floats) -> Floats:
    """Return |Δ| of tokens, [T], bounded."""
    return np.minimum(np.abs(np.nan_to_num(one - other, nan=CLIP, posinf=CLIP, neginf=-CLIP)), CLIP)


def k3(one: Floats, other: Floats) -> float:
    """Return K3, nats per token, of Δ = one − other."""
    delta = np.clip(np.nan_to_num(one - other, nan=CLIP, posinf=CLIP, neginf=-CLIP), -CLIP, CLIP)
    return float(np.mean(np.expm1(delta) - delta))


def mean_error(x: Floats, groups: Ints) -> tuple[float, float]:
    """Return the mean of tokens [T], and its standard error clustered by group; infinite for one group."""
    at = np.unique(groups, return_inverse=True)[1]
    mean = Estimate.ratio(np.bincount(at, x), np.bincount(at))
    return mean.value, mean.error


def beyond(distance: Floats, noise: Floats, groups: Ints, floors: float = FLOORS) -> bool:
    """Return whether distances [T] are beyond this many floors; noise [T] is what bf16 changes."""
    mean, error = mean_error(distance - floors * noise, groups)
    return bool(mean > ERRORS * error)


def outcome(engine: bool, trainer: bool, alike: bool) -> Outcome:
    """Return the outcome, given which columns differ from the reference, and whether both are alike."""
    if engine and trainer:
        return "reference" if alike else "both"
    return "engine" if engine else "trainer" if trainer else "same"


HEADLINES: dict[Outcome, str] = {
    "same": "engine and trainer are both reproduced ({engine} and {trainer} a token)",
    "reference": "the reference is neither's: both are {engine} from it and {apart} from each other; it is "
    "not the model that ran",
    "both": "neither is reproduced, and they are not alike: engine {engine} off, trainer {trainer}",
    "engine": "the engine is not reproduced ({engine} a token); the trainer is ({trainer})",
    "trainer": "the trainer is not reproduced ({trainer} a token); the engine is ({engine})",
    "few": "too few prompts for a verdict",
}


def headline(found: Outcome, engine: Side, trainer: Side, apart: float) -> str:
    """Return the verdict in one sentence, without what it rests on."""
    off = {"engine": f"{rounded(engine.distance)} nats", "trainer": f"{rounded(trainer.distance)} nats"}
    return HEADLINES[found].format(**off, apart=rounded(apart))


def in_dump(rows: Rows, provenance: Mapping[str, Any], columns: Mapping[str, str]) -> Reference | None:
    """Return the verdict on a dump that holds the reference's column; None on any other.

    The provenance says what bf16 changes of the reference, and what the verdict rests on.
    """
    about = provenance.get(KEY)
    if rows.reference is None or not isinstance(about, dict) or not isinstance(about.get("floor"), float):
        return None
    group, noise = rows.group[rows.owner], np.full(rows.tokens, about["floor"])

    def side(name: str, column: Floats, reference: Floats) -> Side:
        """Return how far a column is from the reference."""
        distance = gaps(column, reference)
        state = "unknown" if beyond(distance, noise, group) else "same"
        return Side(column=name, state=state, distance=float(distance.mean()))

    train = columns.get("old_log_probs") or columns.get("current_log_probs")
    engine = side(columns.get("rollout_log_probs", ""), rows.q, rows.reference)
    trainer = side(str(train), rows.p, rows.reference)
    apart, groups = gaps(rows.q, rows.p), len(np.unique(group))
    differ = outcome(engine.state != "same", trainer.state != "same", not beyond(apart, noise, group))
    found = "few" if groups < LEAST_GROUPS else differ
    return Reference(
        verdict=found,
        headline=headline(found, engine, trainer, float(apart.mean())),
        model=str(about.get("model", "")),
        rests_on=str(about.get("rests_on", "")),
        floor=about["floor"],
        apart=float(apart.mean()),
        engine=engine,
        trainer=trainer,
        tokens=rows.tokens,
        sequences=rows.sequences,
        groups=groups,
    )
