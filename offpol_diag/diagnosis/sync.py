"""Weights that do not arrive: signatures of the sync between trainer and engine, over the steps of a run.

What is compared is the level of the mismatch: the mean of |Δ|/(1 − π_rollout) over uncertain tokens, by step.
Unlike K3 it does not grow where text becomes harder. Policy lag as the dump records it is an honest cause; a
level that contradicts the recorded lag is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from offpol_diag.diagnosis.rows import Flags, Floats, Rows, clusters
from offpol_diag.diagnosis.signatures import Found

APART = 2.0
"""Least factor between the lowest level after a change and the highest before it."""
ROUNDED = 0.05
"""Level up to which the weights may be the same, computed in another precision."""
FEWEST_TOKENS, FEWEST_STEPS = 50, 4
"""Fewest uncertain tokens of a step for a level, and fewest steps for a course."""
GROWN, RISING = 1.5, 1.2
"""Factor over the steps from which the level grows; and after a change, if it rises from step to step."""
STILL, MOVING = 2.5, 4.0
"""Standard errors of its slope over the steps below which a mean stands still, and from which it moves."""
DECAYED = 1.8
"""Factor between the first tokens and late ones from which the mismatch decays along the response."""


class Course(NamedTuple):
    """The level of the mismatch by step: of the same weights it stays the same.

    Attributes:
        steps: rising, [N].
        level: mean of |Δ|/(1 − π_rollout) over uncertain tokens, each at most `rows.CAP`, [N].
    """

    steps: Floats
    level: Floats

    def __bool__(self) -> bool:
        return len(self.steps) >= FEWEST_STEPS

    @property
    def text(self) -> str:
        """Levels by step in words, at most four from each end."""
        pairs = [f"{s:g}: {x:.2g}" for s, x in zip(self.steps, self.level, strict=True)]
        return ", ".join(pairs if len(pairs) <= 9 else [*pairs[:4], "…", *pairs[-4:]])


def uncertain(rows: Rows) -> Flags:
    """Flag tokens whose logits show: −8 < log π_rollout < −0.02, [T]."""
    return (rows.q < -0.02) & (rows.q > -8)


def course(rows: Rows) -> Course:
    """Return the level by step; steps with too few tokens are left out."""
    some = uncertain(rows)
    total, many = rows.sum(np.where(some, rows.scaled, 0.0)), rows.sum(some)
    column = rows.column("step")
    found = []
    for step in sorted({one for one in column if isinstance(one, int | float)}):
        at = np.array([one == step for one in column])
        if many[at].sum() >= FEWEST_TOKENS:
            found.append((float(step), float(total[at].sum() / many[at].sum())))
    steps, level = np.array(found).reshape(-1, 2).T
    return Course(steps, level)


def split(level: Floats) -> Flags | None:
    """Flag the high levels, [N], if they are apart from the low ones by `APART` and more; else None."""
    order = np.sort(level)
    gaps = order[1:] / np.maximum(order[:-1], 1e-12)
    at = int(np.argmax(gaps))
    return level > order[at] if gaps[at] >= APART and order[at] <= ROUNDED else None


def growth(level: Floats) -> float:
    """Return the factor by which the level grows over its steps, from the first third to the last."""
    third = max(1, len(level) // 3)
    return float(np.mean(level[-third:])) / max(float(np.mean(level[:third])), 1e-12)


def trend(level: Floats) -> float:
    """Return the rank correlation of levels with their order: 1 where each is above the one before."""
    return float(np.corrcoef(np.argsort(np.argsort(level)), np.arange(len(level)))[0, 1])


def of_lag(rows: Rows, lag: float) -> Rows:
    """Return the rows whose recorded policy lag is this one."""
    return rows.only(np.array([one == lag for one in rows.column("policy_lag")]))


def moves(rows: Rows, column: Sequence[Any]) -> float | None:
    """Return by how many standard errors a number of each sequence, [S], rises or falls over the steps.

    Standard errors are over prompts. None where fewer than `FEWEST_STEPS` steps have a value.
    """
    steps = rows.column("step")
    known = np.array(
        [
            isinstance(s, int | float) and isinstance(x, int | float)
            for s, x in zip(steps, column, strict=True)
        ]
    )
    if not known.any() or len({s for s, k in zip(steps, known, strict=True) if k}) < FEWEST_STEPS:
        return None
    x = np.array([float(s) for s, k in zip(steps, known, strict=True) if k])
    y = np.array([float(v) for v, k in zip(column, known, strict=True) if k])
    group = np.unique(clusters(rows)[known], return_inverse=True)[1]
    many = np.bincount(group)
    x, y = np.bincount(group, x) / many, np.bincount(group, y) / many
    off = x - x.mean()
    if not (off @ off > 0) or len(x) < FEWEST_STEPS + 2:
        return None
    slope = off @ y / (off @ off)
    rest = y - y.mean() - slope * off
    error = np.sqrt(rest @ rest / (len(x) - 2) / (off @ off))
    return float(slope / error) if error > 0 else 0.0


def engine_moves(rows: Rows) -> float | None:
    """Return by how many standard errors reward or surprisal of what is sampled moves over the steps."""
    found = [moves(rows, rows.column("rewards")), moves(rows, rows.mean(rows.q).tolist())]
    known = [abs(one) for one in found if one is not None]
    return max(known) if known else None


# ---------------------------------------------------------------- the causes

DIGESTS = ("weight_digest_rollout", "weight_digest_train")
"""Columns with a digest of the weights that sampled a row, and of those that scored it."""


def weights(rows: Rows) -> Found | None:
    """Find weights that do not arrive, or not at every step: by digests, or by the recorded policy lag."""
    return digests(rows) or by_lag(rows)


def digests(rows: Rows) -> Found | None:
    """Find rows of policy lag 0 whose weights are not the trainer's, by the digests that the dump records."""
    lags, steps = rows.column("policy_lag"), rows.column("step")
    pairs = list(zip(*(rows.column(name) for name in DIGESTS), strict=True))
    known = np.array(
        [None not in pair and lag in (0, None) for pair, lag in zip(pairs, lags, strict=True)], np.bool_
    )
    differ = np.array([a != b for a, b in pairs], np.bool_) & known
    if not differ.any():
        return None
    since = ""
    numbers = [one for one in steps if isinstance(one, int | float)]
    if len(numbers) == len(steps):
        at = np.array(numbers, np.float64)
        first = at[differ].min()
        sure = not differ[at < first].any() and differ[known & (at >= first)].all()
        since = f"since step {first:g}" if sure and (at < first).any() else ""
    if any(lag is None for lag in lags) and not since:
        return None  # weights that are honestly older have another digest, too
    held, wanted = (
        {one for one, off in zip(x, differ, strict=True) if off} for x in zip(*pairs, strict=True)
    )
    statistic = (
        f"engine and trainer have other digests in {int(differ.sum()):,} of {int(known.sum()):,} rows: "
        f"{len(held):,} of the engine, {len(wanted):,} of the trainer"
    )
    cause = "sync_stopped" if len(held) == 1 < len(wanted) else "weights_differ"
    fields = {"since": since or "at any step of this dump"}
    return Found.of_sequences(cause, statistic, rows, differ, exact=True, fields=fields)


def by_lag(rows: Rows) -> Found | None:
    """Find a course of the mismatch over the steps that the recorded policy lag contradicts."""
    lags = {one for one in rows.column("policy_lag") if isinstance(one, int | float)}
    if 0 in lags:
        in_sync = of_lag(rows, 0)
        found = stale_cache(in_sync) or _in_sync(in_sync)
        if found is not None or len(lags) == 1:
            return found
    return _behind(rows) if lags else None


def stale_cache(rows: Rows) -> Found | None:
    """Find a mismatch that is largest at the first tokens and decays, while it grows with the weights.

    Keys and values of the prompt that an older version left in the prefix cache weigh most where there is
    little else to attend to.
    """
    seen = course(rows)
    if not seen or growth(seen.level) < GROWN:
        return None
    some = uncertain(rows)
    octave = np.log2(rows.position + 1).astype(np.int64)
    many = np.bincount(octave[some])
    few = np.flatnonzero(many < FEWEST_TOKENS)
    octaves = int(few[0]) if len(few) else len(many)
    if octaves < FEWEST_STEPS:
        return None
    level = (np.bincount(octave[some], rows.scaled[some]) / np.maximum(many, 1))[:octaves]
    if (np.diff(level) < 0).sum() < octaves - 2 or level[:3].mean() < DECAYED * level[-1]:
        return None
    said = ", ".join(f"{2**k - 1}: {x:.2g}" for k, x in enumerate(level))
    statistic = f"|Δ|/(1 − q) by position (from): {said}; by step: {seen.text}"
    return Found.of_all("stale_prefix_cache", statistic, rows)


def _in_sync(rows: Rows) -> Found | None:
    """Judge the course of rows that are recorded as sampled with the trainer's own weights."""
    seen = course(rows)
    if not seen:
        return None
    said = f"|Δ|/(1 − q) by step at a policy_lag of 0: {seen.text}"
    high = split(seen.level)
    if high is None:
        grows = seen.level.min() > ROUNDED and growth(seen.level) >= GROWN
        return _growing(rows, said, "at any step of this dump", always=True) if grows else None
    changes = np.flatnonzero(high[1:] != high[:-1]) + 1
    if len(changes) == 1 and high[-1]:
        return _changed(rows, seen, int(changes[0]), said)
    return _returning(rows, seen, high, said) if len(changes) > 1 else None


def _changed(rows: Rows, seen: Course, at: int, said: str) -> Found | None:
    """Judge a level that is higher from one step on: it goes on growing, or it stays where it is."""
    after, since = seen.level[at:], f"{seen.steps[at]:g}"
    if len(after) < 3:
        return None
    if growth(after) >= (RISING if trend(after) >= 0.5 else GROWN):
        return _growing(_from(rows, seen.steps[at]), said, f"since step {since}", always=at == 1)
    return Found.of_all("sync_corrupts", said, rows, fields={"since": since})


def _growing(rows: Rows, said: str, since: str, always: bool) -> Found | None:
    """Tell weights that stand still from weights that move, but not as the trainer's do."""
    moved = engine_moves(rows)
    if moved is not None and moved >= MOVING and always:
        said += f"; reward or surprisal of what is sampled moves by {moved:.2g} standard errors"
        return Found.of_all("weights_differ", said, rows)
    if moved is not None:
        said += f"; reward and surprisal of what is sampled move by {moved:.2g} standard errors at most"
    return Found.of_all("sync_stopped", said, rows, fields={"since": since})


def _returning(rows: Rows, seen: Course, high: Flags, said: str) -> Found:
    """State that the level falls back: new weights arrive at some steps alone."""
    fresh = seen.steps[~high]
    gaps = np.diff(fresh)
    regular = len(gaps) > 1 and np.ptp(gaps) == 0
    listed = ", ".join(f"{step:g}" for step in fresh[:6]) + (" …" if len(fresh) > 6 else "")
    every = f"every {gaps[0]:g} steps" if regular else f"at steps {listed} alone"
    return Found.of_all("sync_period", said, rows, fields={"every": every})


def _behind(rows: Rows) -> Found | None:
    """Judge rows that are all recorded as behind: the level grows while what is sampled stands still.

    A recorded lag explains a level, and a warm-up of the learning rate lets it grow; but what the engine
    samples moves, too. Without rewards that is not known.
    """
    column = [one for one in rows.column("policy_lag") if one is not None]
    if moves(rows, rows.column("rewards")) is None:
        return None
    lag = max(dict.fromkeys(column), key=column.count)
    some = of_lag(rows, lag)
    seen, moved = course(some), engine_moves(some)
    still = moved is not None and moved < STILL
    if not seen or len(seen.steps) < 2 * FEWEST_STEPS or not still or growth(seen.level) < GROWN:
        return None
    said = (
        f"|Δ|/(1 − q) by step at a policy_lag of {lag:g}: {seen.text}; reward and surprisal of what is "
        f"sampled move by {moved:.2g} standard errors at most"
    )
    return Found.of_all("sync_stopped", said, rows, fields={"since": "at any step of this dump"})


def _from(rows: Rows, step: float) -> Rows:
    """Return the rows from a step on."""
    return rows.only(np.array([isinstance(one, int | float) and one >= step for one in rows.column("step")]))
