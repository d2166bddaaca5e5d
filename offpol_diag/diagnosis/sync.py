"""The weights of engine and trainer: their digests, and the level of the mismatch over the steps of a run.

The level is the mean of |Δ|/(1 − π_rollout) over uncertain tokens: unlike K3 it does not grow where text
becomes harder.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.rows import Flags, Floats, Rows, clusters, estimate, numbers, uncertain
from offpol_diag.diagnosis.signatures import Found, percent

DIGESTS = ("weight_digest_rollout", "weight_digest_train")
"""Columns with a digest of the weights that sampled a row, and of those that scored it."""
FEWEST_STEPS = 4
"""Fewest steps for a course."""
FEWEST_SEQUENCES, FEWEST_OF_STEP, FEWEST_TOKENS = 16, 4, 200
"""Least size of a step: sequences, prompts, uncertain tokens."""
ROUNDED = 0.05
"""Level up to which the weights may be the same, computed in another precision of 8 bits or more."""
APART, ERRORS = 3.0, 4.0
"""Least factor between high levels and low ones, and standard errors by which they are apart."""
AT_ONCE = 0.5
"""Least level of step 0, in the highest of all steps, of what is there before any weight has changed."""


class Course(NamedTuple):
    """The level of the mismatch by step, with its standard error over prompts.

    Attributes:
        steps: rising, [N].
        level: mean of |Δ|/(1 − π_rollout) over uncertain tokens, [N].
        error: its standard error, [N].
    """

    steps: Floats
    level: Floats
    error: Floats

    def __bool__(self) -> bool:
        return len(self.steps) >= FEWEST_STEPS

    @property
    def text(self) -> str:
        """Levels by step in words, at most four from each end."""
        pairs = [f"{s:g}: {x:.2g}" for s, x in zip(self.steps, self.level, strict=True)]
        return ", ".join(pairs if len(pairs) <= 9 else [*pairs[:4], "…", *pairs[-4:]])


def course(rows: Rows) -> Course:
    """Return the level by step, of steps that are large enough to be compared."""
    some, step, group = uncertain(rows), numbers(rows.column("step")), clusters(rows)
    many = rows.sum(some)
    found = []
    for one in np.unique(step[np.isfinite(step)]):
        at = step == one
        enough = at.sum() >= FEWEST_SEQUENCES and many[at].sum() >= FEWEST_TOKENS
        if enough and len(np.unique(group[at])) >= FEWEST_OF_STEP:
            level = estimate(rows, rows.scaled, some & at[rows.owner])
            found.append((float(one), level.value, level.error))
    return Course(*np.array(found).reshape(-1, 3).T)


def from_start(rows: Rows) -> Course | None:
    """Return the levels by step if all is at a recorded lag of 0 and step 0 is as far off as any other.

    An adapter that is missing, and weights that do not arrive, are the trainer's own at step 0.
    """
    if not (numbers(rows.column("policy_lag")) == 0).all():
        return None
    seen = course(rows)
    known = bool(seen) and seen.steps[0] == 0
    return seen if known and seen.level[0] >= AT_ONCE * seen.level.max() else None


def growth(level: Floats) -> float:
    """Return the factor by which the level grows over its steps, from the first third to the last."""
    third = max(1, len(level) // 3)
    return float(np.mean(level[-third:])) / max(float(np.mean(level[:third])), 1e-12)


def split(seen: Course) -> Flags | None:
    """Flag the high levels, [N], where they are apart from low ones: beyond chance, and beyond precision."""
    order = np.sort(seen.level)
    at = int(np.argmax(order[1:] / np.maximum(order[:-1], 1e-12)))
    high = seen.level > order[at]
    low, least = order[at], int(np.argmin(np.where(high, seen.level, np.inf)))
    sure = seen.level[least] - ERRORS * seen.error[least] > 1.5 * low
    return high if low <= ROUNDED and seen.level[least] >= APART * low and sure else None


# ---------------------------------------------------------------- digests


def digests(rows: Rows) -> Found | None:
    """Find rows that are recorded at policy lag 0 and whose weights are not the trainer's, by their digests.

    Older weights honestly have another digest at any other lag. Where no row has equal digests, the two
    sides may be made of different tensors or dtypes, and nothing follows; nor where the engine's digests are
    the trainer's of no step at all, up to a step or from it on.
    """
    pairs = list(zip(*(rows.column(name) for name in DIGESTS), strict=True))
    lags, step = rows.column("policy_lag"), numbers(rows.column("step"))
    known = np.array([lag == 0 and None not in two for lag, two in zip(lags, pairs, strict=True)], np.bool_)
    other = np.array([a != b for a, b in pairs], np.bool_)
    if not (known & ~other).any():
        return None
    trained = {theirs for _, theirs in pairs}
    foreign = known & np.array([own not in trained for own, _ in pairs], np.bool_)
    if foreign.any() and not _interleaved(step[foreign], step[known & ~foreign]):
        known &= ~foreign
    differ = known & other
    if not differ.any():
        return None
    held, wanted = (len(set(side)) for side in zip(*(pairs[i] for i in np.flatnonzero(differ)), strict=True))
    statistic = (
        f"engine and trainer have other digests in {int(differ.sum()):,} of {int(known.sum()):,} rows of "
        f"policy lag 0: {held:,} of the engine, {wanted:,} of the trainer"
    )
    cause, fields = "weights_differ", {"since": f"in {percent(float(differ.mean()))} of the responses"}
    if held == 1 and wanted >= FEWEST_STEPS:
        cause = "sync_stopped"
    elif _of_earlier_steps(rows, differ):
        several = held > 1 or len(np.unique(step[known])) >= FEWEST_STEPS
        if not several or not (step[known & ~other] > step[differ].min()).any():
            return None  # a constant lag that is not written down is no fault of the sync
        cause, fields = "sync_stopped", {"since": f"at some steps ({fields['since']})"}
    repaired = rows.only(~differ)
    return Found.of_sequences(cause, statistic, rows, differ, repaired=repaired, exact=True, fields=fields)


def _interleaved(some: Floats, others: Floats) -> bool:
    """Return whether steps are known, and not all of some before or after all of others."""
    return bool(some.min() <= others.max() and others.min() <= some.max())


def _of_earlier_steps(rows: Rows, differ: Flags) -> bool:
    """Return whether each digest of the engine in the flagged rows is the trainer's of an earlier step."""
    step, (held, scored) = numbers(rows.column("step")), (rows.column(name) for name in DIGESTS)
    first: dict[object, float] = {}
    for digest, one in zip(scored, step, strict=True):
        first[digest] = min(first.get(digest, np.inf), one)
    return all(first.get(held[i], np.inf) < step[i] for i in np.flatnonzero(differ))
