"""Which groups (prompts) two runs share: the bootstrap draws those together, by their keys."""

from __future__ import annotations

from typing import Literal

import torch

from offpol_diag.accumulators import GroupSample
from offpol_diag.analysis.readout import Readout
from offpol_diag.analyze import Examined
from offpol_diag.numerals import count
from offpol_diag.summary import Pairing

ENOUGH = 0.5
"""Of the smaller run's groups: what has to be shared for two runs to be called paired."""

By = Literal["group_id", "contents", "nothing"]
WHAT = {"group_id": "prompts (group_id)", "contents": "responses", "nothing": "groups"}


def pairing(a: Examined, b: Examined) -> Pairing:
    """How many groups are in both runs, and how many in one."""
    one, other = (Readout(run.study, run.tally).groups for run in (a, b))
    shared, exact = _shared(one, other), not (one.full or other.full)
    only = max(one.groups - shared, 0), max(other.groups - shared, 0)
    by = _by("group_id" in a.facts.columns, "group_id" in b.facts.columns)
    return Pairing(
        by=by,
        shared=shared,
        only_a=only[0],
        only_b=only[1],
        exact=exact,
        sentence=_sentence(by, shared, *only, exact),
    )


def _by(in_a: bool, in_b: bool) -> By:
    if in_a and in_b:
        return "group_id"
    return "nothing" if in_a or in_b else "contents"


def _shared(one: GroupSample, other: GroupSample) -> int:
    """Exact while all keys are known; else by how many of those are shared that both would know."""
    last = min((int(sample.keys[-1]) for sample in (one, other) if sample.full), default=2**63 - 1)
    mine, theirs = (sample.keys[sample.keys <= last] for sample in (one, other))
    both = int(torch.isin(mine, theirs).sum())
    return round(both * one.groups / max(len(mine), 1)) if one.full or other.full else both


def _sentence(by: By, shared: int, only_a: int, only_b: int, exact: bool) -> str:
    if not shared:
        return f"Independent: {_why(by)}; each run is resampled by itself."
    smaller = shared + min(only_a, only_b)
    word = "Paired" if shared >= ENOUGH * smaller else "Paired in part"
    about = "" if exact else "about "
    rest = f"{about}{count(only_a)} are only in A and {about}{count(only_b)} only in B"
    return f"{word}: {about}{count(shared)} {WHAT[by]} are in both runs and are resampled together; {rest}."


def _why(by: By) -> str:
    if by == "nothing":
        return "only one of the two has a group_id"
    if by == "contents":
        return "there is no group_id, and no response is in both"
    return "no group_id is in both runs"
