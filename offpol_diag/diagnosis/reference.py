"""The verdict of three: which of engine and trainer a third computation of the same tokens reproduces.

Here is what needs no model: numbers of tokens, their means clustered by prompt, the outcomes and their words.
`offpol_diag.rescore` adds the hypotheses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from offpol_diag.diagnosis.rows import Floats, Ints, Rows, clusters, ratio
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
    return ratio(np.bincount(at, x), np.bincount(at))


def beyond(distance: Floats, noise: Floats, groups: Ints, floors: float = FLOORS) -> bool:
    """Return whether distances [T] are beyond so many floors, noise [T] being what bf16 changes."""
    mean, error = mean_error(distance - floors * noise, groups)
    return bool(mean > ERRORS * error)


def outcome(engine: bool, trainer: bool, alike: bool) -> Outcome:
    """Return the outcome, given which columns are odd, and whether both are alike."""
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
    said = provenance.get(KEY)
    if rows.reference is None or not isinstance(said, dict) or not isinstance(said.get("floor"), float):
        return None
    groups, noise = clusters(rows)[rows.owner], np.full(rows.tokens, said["floor"])
    between, many = gaps(rows.q, rows.p), len(np.unique(groups))
    train = columns.get("old_log_probs") or columns.get("current_log_probs")
    sides = []
    for name, column in ((columns.get("rollout_log_probs", ""), rows.q), (train, rows.p)):
        distance = gaps(column, rows.reference)
        state = "unknown" if beyond(distance, noise, groups) else "same"
        size = {"distance": float(distance.mean()), "k3": k3(rows.reference, column)}
        sides.append(Side(column=str(name), state=state, **size))
    engine, trainer = sides
    odd = outcome(engine.state != "same", trainer.state != "same", not beyond(between, noise, groups))
    found = "few" if many < LEAST_GROUPS else odd
    return Reference(
        verdict=found,
        headline=headline(found, engine, trainer, float(between.mean())),
        model=str(said.get("model", "")),
        rests_on=str(said.get("rests_on", "")),
        floor=said["floor"],
        apart=float(between.mean()),
        engine=engine,
        trainer=trainer,
        tokens=rows.tokens,
        sequences=rows.sequences,
        groups=many,
    )
