"""The verdict of three: which of engine and trainer a third computation of the same tokens reproduces.

Here is what needs no model: numbers of tokens, their means clustered by prompt, the outcomes and their words.
`offpol_diag.rescore` adds the hypotheses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from offpol_diag.diagnosis.rows import Floats, Ints, Rows, clusters
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
    delta = np.nan_to_num(one - other, nan=CLIP, posinf=CLIP, neginf=-CLIP)
    return np.minimum(np.abs(delta), CLIP)


def k3(one: Floats, other: Floats) -> float:
    """Return K3, nats per token, of Δ = one − other."""
    delta = np.clip(np.nan_to_num(one - other, nan=CLIP, posinf=CLIP, neginf=-CLIP), -CLIP, CLIP)
    return float(np.mean(np.expm1(delta) - delta))


def mean_error(x: Floats, groups: Ints) -> tuple[float, float]:
    """Return the mean of tokens [T], and its standard error clustered by group; infinite for one group."""
    found, at = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(at, x, len(found)), np.bincount(at, minlength=len(found))
    mean = float(sums.sum() / counts.sum())
    if len(found) < LEAST_GROUPS:
        return mean, np.inf
    rest = sums - mean * counts
    return mean, float(np.sqrt((rest**2).sum() * len(found) / (len(found) - 1)) / counts.sum())


def beyond(distance: Floats, noise: Floats, groups: Ints, floors: float = FLOORS) -> bool:
    """Return whether distances [T] are beyond so many floors, noise [T] being what bf16 changes."""
    mean, error = mean_error(distance - floors * noise, groups)
    return bool(mean > ERRORS * error)


def outcome(engine: bool, trainer: bool, alike: bool) -> Outcome:
    """Return the outcome, given which columns are odd, and whether both are alike."""
    if engine and trainer:
        return "reference" if alike else "both"
    return "engine" if engine else "trainer" if trainer else "same"


def headline(found: Outcome, engine: Side, trainer: Side, apart: float) -> str:
    """Return the verdict in one sentence, without what it rests on."""
    off = {name: f"{rounded(side.distance)} nats" for name, side in (("e", engine), ("t", trainer))}
    if found == "same":
        return f"engine and trainer are both reproduced ({off['e']} and {off['t']} a token)"
    if found == "reference":
        near = f"both are {off['e']} from it and {rounded(apart)} from each other"
        return f"the reference is neither's: {near}; it is not the model that ran"
    if found == "both":
        return f"neither is reproduced, and they are not alike: engine {off['e']} off, trainer {off['t']}"
    if found == "engine":
        return f"the engine is not reproduced ({off['e']} a token); the trainer is ({off['t']})"
    if found == "trainer":
        return f"the trainer is not reproduced ({off['t']} a token); the engine is ({off['e']})"
    return "too few prompts for a verdict"


def in_dump(rows: Rows | None, provenance: Mapping[str, Any], columns: Mapping[str, str]) -> Reference | None:
    """Return the verdict on a dump that holds the reference's column; None on any other.

    The provenance says what bf16 changes of the reference, and what the verdict rests on.
    """
    said = provenance.get(KEY)
    if rows is None or rows.reference is None or not isinstance(said, dict):
        return None
    try:
        floor = float(said["floor"])
    except (KeyError, TypeError, ValueError):
        return None
    groups = clusters(rows)[rows.owner]
    reference, noise = rows.reference, np.full(rows.tokens, floor)
    names = (
        columns.get("rollout_log_probs", ""),
        columns.get("old_log_probs") or columns.get("current_log_probs"),
    )
    sides = []
    for name, column in zip(names, (rows.q, rows.p), strict=True):
        distance = gaps(column, reference)
        state = "unknown" if beyond(distance, noise, groups) else "same"
        size = {"distance": float(distance.mean()), "k3": k3(reference, column)}
        sides.append(Side(column=str(name), state=state, **size))
    engine, trainer = sides
    between = gaps(rows.q, rows.p)
    few = len(np.unique(groups)) < LEAST_GROUPS
    odd = [one.state != "same" for one in sides]
    found = "few" if few else outcome(odd[0], odd[1], not beyond(between, noise, groups))
    return Reference(
        verdict=found,
        headline=headline(found, engine, trainer, float(between.mean())),
        model=str(said.get("model", "")),
        rests_on=str(said.get("rests_on", "")),
        floor=floor,
        apart=float(between.mean()),
        engine=engine,
        trainer=trainer,
        tokens=rows.tokens,
        sequences=rows.sequences,
        groups=len(np.unique(groups)),
    )
