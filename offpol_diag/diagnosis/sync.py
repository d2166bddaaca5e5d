"""Weights that do not arrive: signatures of the sync between trainer and engine, over the steps of a run.

Two measurements decide. The level of the mismatch, the mean of |Δ|/(1 − π_rollout) over uncertain tokens, by
step: unlike K3 it does not grow where text becomes harder. And the drift (`drift.measure`): how far the
engine is behind, in steps of the trainer's own movement. Rounding, quantised weights, another task or other
kernels raise the level and leave no drift; a policy lag as the dump records it explains both.

All need a recorded policy lag. Whatever is not established is left to `candidates`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.drift import Drift, Part, enough, measure, numbers, uncertain
from offpol_diag.diagnosis.rows import Estimate, Flags, Floats, Rows, estimate
from offpol_diag.diagnosis.signatures import Found, percent

DIGESTS = ("weight_digest_rollout", "weight_digest_train")
"""Columns with a digest of the weights that sampled a row, and of those that scored it."""
FEWEST_STEPS, FEWEST_BEHIND = 4, 8
"""Fewest steps for a course; and for an engine that stands still or moves in part at all of them."""
ROUNDED = 0.05
"""Level up to which the weights may be the same, computed in another precision of 8 bits or more."""
UNQUANTISED = 0.3
"""Level that no quantised rollout reaches: 4 bits give 0.10 to 0.14 in `benchmarks/doctor`."""
DAMAGED = 0.1
"""Level of damaged weights where the metadata rules out a quantised rollout; harder text jumps to less."""
APART = 3.0
"""Least factor between high levels and low ones."""
AT_ONCE = 0.5
"""Least level of step 0, in the highest of all steps, of what is there before any weight has changed."""
SAME, BROAD = 1e-3, 0.2
"""Level of the same weights and kernels; and above that of 4-bit weights: steps of both need no drift."""
GROWN = 1.5
"""Factor from the first third of the steps to the last from which a level grows."""
STILL, PART = 0.35, (0.1, 0.8)
"""Share of the trainer's movement: below it the engine stands still; between which it moves in part."""
ALIGNED = 0.75
"""Correlation of Δ with the trainer's drift where the engine's weights are older ones: 0.82 to 0.98 in the
rollouts of `benchmarks/doctor`; damaged ones reach 0.65, quantised ones 0.33."""
AGAINST = -0.45
"""The same where the engine is ahead of the trainer: −0.5 and less."""
FELL, STOOD = 0.6, 0.8
"""Least share of the steps since its weights last changed that an engine is behind; and where these are all
steps of a dump, which also begins with a constant lag that is not written down."""
MOST_LAG = 8
"""Steps that no engine is behind where the dump writes 0."""
CAUGHT = 1.2
"""Standard errors by which an engine that catches up carries more of the trainer's movement at last."""
FOLLOWS = 0.6
"""Share of the trainer's movement from which the engine follows it."""
NOT_BEHIND, BEHIND, AHEAD = 0.7, 0.25, -1.1
"""Steps behind that quantised weights reach; from which a step is behind; and from which it is ahead."""
ERRORS = 4.0
"""Standard errors that a step must be away from these."""
PLACES, DECAYED = ((0, 3), (7, 15), (31, 1 << 40)), 1.1
"""Positions between which the mismatch of old keys decays, and by which factor at least."""


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
    """Return the level by step."""
    some, step = uncertain(rows), numbers(rows.column("step"))
    found = []
    for one in np.unique(step[np.isfinite(step)]):
        at = estimate(rows, rows.scaled, some & (step == one)[rows.owner])
        found.append((float(one), at.value, at.error))
    return Course(*np.array(found).reshape(-1, 3).T)


def from_start(rows: Rows) -> Course | None:
    """Return the levels by step if all is at a recorded lag of 0 and step 0 is as far off as any other.

    An adapter that is missing, and weights that do not arrive, are the trainer's own at step 0.
    """
    if not (numbers(rows.column("policy_lag")) == 0).all():
        return None
    seen = course(enough(rows))
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


def at_lag_0(rows: Rows) -> Rows:
    """Return the rows that are recorded as sampled with the trainer's own weights."""
    return rows.only(numbers(rows.column("policy_lag")) == 0)


# ---------------------------------------------------------------- the causes


def weights(rows: Rows, plain: str = "") -> Found | None:
    """Find weights that do not arrive, or others than the trainer's, against the recorded policy lag.

    Args:
        rows: the sequences.
        plain: what the metadata says of an engine that is not quantised, or nothing.
    """
    lags = numbers(rows.column("policy_lag"))
    if not np.isfinite(lags).any():
        return None
    known = rows.only(np.isfinite(lags))
    in_sync = enough(at_lag_0(known))
    seen = course(in_sync) if in_sync.tokens else None
    if seen:
        drift = measure(in_sync)
        for judge in (stale_cache, stopped, returning, jumped, partly):
            if (found := judge(in_sync, seen, drift, plain)) is not None:
                return found
    return behind(enough(known))


def stopped(rows: Rows, seen: Course, drift: Drift | None, plain: str = "") -> Found | None:
    """Find an engine at lag 0 that stands still while the trainer moves on, always or from a step on.

    Levels alone do not tell it from a lag that is not written down while the learning rate warms up.
    """
    if drift is None:
        return None
    since, high = "at any step of this dump", split(seen)
    clear = _stands_still(drift)
    if high is not None and not high[0] and high[int(np.argmax(high)) :].all():
        first = int(np.argmax(high))
        since = f"since step {seen.steps[first]:g}"
        clear |= first > 1 and _rises(seen.level[first:]) and _falls_behind(drift, first)
    if not clear:
        return None
    return Found.of_all("sync_stopped", _said(seen, drift), rows, fields={"since": since})


def _stands_still(drift: Drift) -> bool:
    """Return whether the engine never moves, and is behind at last by about all steps since the first."""
    count = len(drift.steps)
    last = np.arange(count) >= count * 2 // 3
    passed = drift.steps[last].mean() - drift.steps[0]
    still = drift.carried.value + 2 * drift.carried.error < STILL and count >= FEWEST_BEHIND
    fell = drift.behind[last].mean() >= max(STOOD * passed, MOST_LAG) and _late(drift, last, FELL * passed)
    return bool(still and fell and _ends_behind(drift)) and not moves(drift, count // 2)


def moves(drift: Drift, first: int) -> bool:
    """Return whether the engine moves with the trainer from a step on, and further than over all steps.

    One with a constant lag does. Very unlikely tokens are cut, so that one that stands still seems to move
    by up to a third, at first as at last.
    """
    steps = np.arange(len(drift.steps))
    late, whole = drift.carries(steps >= first), drift.carries(steps >= 0)
    further = late.value > whole.value + CAUGHT * np.hypot(late.error, whole.error)
    return bool((late.low > 0 and further) or late.value > FOLLOWS)


def _catches_up(drift: Drift) -> bool:
    """Return whether the engine carries more of the movement in the last half or third than in all steps.

    Where the learning rate rises, or a dump begins with the run, an engine a few steps behind moves little at
    first. One that has half of an adapter goes on as it began.
    """
    count, whole = len(drift.steps), drift.carried
    late = [drift.carries(np.arange(count) >= count - count // part) for part in (2, 3)]
    return any(one.value > whole.value + CAUGHT * np.hypot(one.error, whole.error) for one in late)


def _falls_behind(drift: Drift, first: int) -> bool:
    """Return whether the engine is in sync before a step, and then further behind by about a step a step."""
    before, later = drift.behind[:first], drift.behind[first:]
    late = later - 2 * drift.errors[first:] > BEHIND
    further = (np.diff(later) > -drift.errors[first + 1 :]).mean() >= 0.75 and later[-1] > GROWN * later[0]
    third = max(1, len(later) // 3)
    passed = drift.steps[-third:].mean() - drift.steps[first - 1]
    further = further and later[-third:].mean() >= FELL * passed and not moves(drift, first)
    return bool((np.abs(before) < BEHIND).all() and late.mean() >= 0.9 and further and _ends_behind(drift))


def _ends_behind(drift: Drift) -> bool:
    """Return whether the engine is behind at the last steps, and further than at the first."""
    third = max(1, len(drift.steps) // 3)
    last = np.arange(len(drift.steps)) >= len(drift.steps) - third
    further = drift.behind[last].mean() > drift.behind[:third].mean()
    return bool(_late(drift, last) and further and drift.aligned > ALIGNED)


def _late(drift: Drift, steps: Flags, least: float = 2 * BEHIND) -> bool:
    """Return whether the engine is behind on the average of some steps, flagged [N]."""
    error = np.sqrt(np.square(drift.errors[steps]).sum()) / steps.sum()
    return bool(drift.behind[steps].mean() - ERRORS * error > least)


def _rises(level: Floats) -> bool:
    return bool(len(level) >= 3 and growth(level) >= GROWN and (np.diff(level) > 0).mean() >= 0.6)


def _exact(seen: Course, high: Flags) -> bool:
    """Return whether low levels are those of the same weights and kernels, and others of no precision."""
    low, far = float(seen.level[~high].max()), seen.level[high]
    return bool(low <= SAME and far.min() > BROAD)


def returning(rows: Rows, seen: Course, drift: Drift | None, plain: str = "") -> Found | None:
    """Find new weights that arrive at some steps alone: the level climbs, and falls back at least twice.

    One high step is no period, and steps that are high by turns may be of another task.
    """
    high = split(seen)
    if high is None:
        return None
    fresh = np.flatnonzero(~high)
    teeth = [(a + 1, b) for a, b in pairwise(fresh) if b > a + 1]
    long = [(a, b) for a, b in teeth if b > a + 1]
    if len(teeth) < 2 or not long or not all(seen.level[b - 1] > seen.level[a] for a, b in long):
        return None
    if drift is not None:
        late = high & (drift.behind - 2 * drift.errors > BEHIND)
        climbs = all(drift.behind[b - 1] > drift.behind[a] for a, b in long)
        clear = climbs and late.sum() >= 0.8 * high.sum() and (drift.behind[~high] < BEHIND).all()
        clear = clear and _late(drift, high) and drift.aligned > ALIGNED
    else:
        clear = rows.ids is None and len(long) > 1 and _exact(seen, high)
    if not clear:
        return None
    at, gaps = seen.steps[fresh], np.diff(seen.steps[fresh])
    listed = ", ".join(f"{step:g}" for step in at[:6]) + (" …" if len(at) > 6 else "")
    every = f"every {gaps[0]:g} steps" if np.ptp(gaps) == 0 else f"at steps {listed} alone"
    return Found.of_all("sync_period", _said(seen, drift), rows, fields={"every": every})


def jumped(rows: Rows, seen: Course, drift: Drift | None, plain: str = "") -> Found | None:
    """Find a level that jumps once and stays, though the engine moves with the trainer and is not behind.

    A change of precision looks alike: the metadata or the level itself must rule it out.
    """
    high = split(seen)
    if high is None or drift is None or high[0] or not high[-1] or len(np.flatnonzero(np.diff(high))) != 1:
        return None
    first = int(np.argmax(high))
    level = seen.level[first:]
    low = seen.level - ERRORS * seen.error
    least = DAMAGED if plain else UNQUANTISED
    on_time = drift.behind[first:] - 2 * drift.errors[first:] < NOT_BEHIND
    if len(level) < 3 or growth(level) >= GROWN or low[first:].min() < least * 0.8 or level.mean() < least:
        return None
    follows = drift.carried.value - 2 * drift.carried.error > FOLLOWS
    other = drift.aligned < FOLLOWS or drift.whole.value < NOT_BEHIND
    if not (follows and other and on_time.all()):
        return None
    said = _said(seen, drift) + (f"; the dump says {plain}" if plain else "")
    return Found.of_all("sync_corrupts", said, rows, fields={"since": f"{seen.steps[first]:g}"})


def partly(rows: Rows, seen: Course, drift: Drift | None, plain: str = "") -> Found | None:
    """Find an engine at lag 0 that carries a part of the trainer's movement at every step, or exceeds it."""
    high = split(seen)
    level = seen.level if high is None else seen.level[high]
    if drift is None or growth(level) < GROWN or level[-1] < ROUNDED:
        return None  # what jumps at once and stays is damaged, and no part of a movement
    part = PART[0] < drift.carried.low and drift.carried.high < PART[1]
    slow = part and _ends_behind(drift) and bool((np.diff(drift.behind) > -drift.errors[1:]).mean() >= 0.75)
    slow = slow and bool((drift.behind[len(drift.steps) // 2 :] > BEHIND).all())
    slow = slow and len(drift.steps) >= FEWEST_BEHIND and not _catches_up(drift)
    early = slice(
        1, 1 + len(drift.steps) // 2
    )  # later, an engine far ahead samples what the trainer hardly does
    ahead = drift.behind[early] + ERRORS * drift.errors[early] < 0
    fast = bool(ahead.mean() >= 0.75 and drift.behind[early].mean() < AHEAD and drift.aligned < AGAINST)
    if slow and high is not None and int(np.argmax(high)) > 2:
        return None  # in sync for some steps: the weights did not stop at once, or not in every engine
    fields = {
        "since": "at every step: they move, but not as far as the trainer's"
        if slow
        else "at every step: they move further than the trainer's"
    }
    return Found.of_all("weights_differ", _said(seen, drift), rows, fields=fields) if slow or fast else None


def stale_cache(rows: Rows, seen: Course, drift: Drift | None, plain: str = "") -> Found | None:
    """Find an engine that is behind at the first tokens of a response and less and less along it.

    Keys and values of the prompt that an older version left in the prefix cache weigh most where there is
    little else to attend to, and a little to the end. Weights that change during a response are behind alike
    up to a change, and after the last one not at all; what is left of them after 30 tokens is at most the
    third power of what is left after 10, if they change as often at any token.
    """
    if drift is None or rows.versions is not None:
        return None
    levels, behind = fading(rows), [drift.among(one) for one in places(rows)]
    early, middle, late = behind
    left = late.value - 2 * late.error
    older = early.low > max(1.5 * late.value, 0.0) and early.value > BEHIND
    share = middle.value / early.value if older else 0.0
    older = older and share > 0 and left > share**3 * early.value  # PLACES are 0, about 10 and at least 30
    if not levels or not older or drift.carried.low < PART[1]:
        return None
    statistic = (
        f"|Δ|/(1 − q) by position, {placed(levels)}; by the drift of {drift.kinds} token ids the engine is "
        f"{early.value:.1f} ± {early.error:.1g} steps behind at the first {PLACES[0][1]} tokens and "
        f"{late.value:.1f} ± {late.error:.1g} from {PLACES[2][0]} on"
    )
    return Found.of_all("stale_prefix_cache", statistic, rows)


def behind(rows: Rows) -> Found | None:
    """Find an engine that stands still while the versions that the dump says it has rise.

    In a run that collapses the trainer moves fast at last, and an engine a few steps behind seems further
    behind. One that stands still is behind by about all steps since the first.
    """
    drift = measure(rows) if rows.tokens else None
    if drift is None or not _stands_still(drift):
        return None
    last = drift.steps > np.quantile(drift.steps, 2 / 3)
    if not _late(drift, last, 2 * float(np.nanmean(numbers(rows.column("policy_lag"))))):
        return None
    fields = {"since": "at any step of this dump"}
    return Found.of_all("sync_stopped", _said(course(rows), drift), rows, fields=fields)


def places(rows: Rows) -> list[Flags]:
    """Flag the uncertain tokens at each of `PLACES` in responses that reach the last."""
    some = uncertain(rows) & (rows.lengths > PLACES[-1][0])[rows.owner]
    return [some & (rows.position >= a) & (rows.position < b) for a, b in PLACES]


def fading(rows: Rows) -> list[Estimate]:
    """Return the levels of the mismatch at `PLACES` if it decays along a response, else nothing."""
    levels = [estimate(rows, rows.scaled, at) for at in places(rows)]
    first, _, last = levels
    steep = first.value - 2 * first.error > 2 * last.value
    falls = all(a.value - 2 * a.error > DECAYED * b.value for a, b in pairwise(levels))
    return levels if steep and falls else []


def placed(levels: list[Estimate]) -> str:
    """Return the levels at `PLACES` in words."""
    return ", ".join(f"from {a}: {x.value:.2g}" for (a, _), x in zip(PLACES, levels, strict=True))


def replica(rows: Rows, own: Flags) -> tuple[Drift, Part] | None:
    """Return how far one machine is behind, flagged [S], where others of policy lag 0 are not; or None."""
    alike = numbers(rows.column("policy_lag")) == 0
    some, own = rows.only(alike), own[alike]
    drift = measure(some) if own.any() and not own.all() else None
    if drift is None:
        return None
    later = numbers(some.column("step")) > np.median(drift.steps)
    one, rest = (drift.among((flags & later)[some.owner]) for flags in (own, ~own))
    late = (
        drift.aligned > ALIGNED
        and one.value > NOT_BEHIND
        and one.value - 3 * one.error > BEHIND > abs(rest.value) + 2 * rest.error
    )
    return (drift, one) if late else None


def _said(seen: Course, drift: Drift | None) -> str:
    """Return the evidence in words."""
    said = f"|Δ|/(1 − q) by step: {seen.text}"
    if drift is None:
        return said
    return (
        f"{said}; steps that the engine is behind, by the drift of {drift.kinds} token ids: {drift.text}; it "
        f"carries {drift.share} of the trainer's movement"
    )


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
        cause, fields = "sync_period", {"every": f"at some steps alone, and not {fields['since']}"}
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
