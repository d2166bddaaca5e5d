"""Headline numbers with their bands and curves over the training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from statistics import median
from typing import Any

from offpol_diag.metrics import METRICS, Tone, band, title, tone
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, written
from offpol_diag.report.answer import Tile
from offpol_diag.result import Result
from offpol_diag.result.steps import Point, at_steps, curve

SHORT = ("k3", "ppl_ratio", "ess_tokens", "ess_sequences", "chi2_token")
"""Numbers with a tile in the short answer too."""
MASKS = ("seq_mis", "geo_rs", "bypass_ppo_clip_geo_rs")
"""Presets whose rejected tokens are shown where the recommended method rejects none; the last of dumps
without π_old."""
FEWEST = 6
"""Fewest values without intervals whose scatter tells whether a curve is flat."""


def heavy(summary: Result) -> str:
    """Return the sentence on a heavy tail: which numbers it leaves unknown; empty where there is none."""
    prefix = summary.prefix
    tokens, sequences = (
        written(summary.whole.get(f"{prefix}khat_{over}", Number())).value.rstrip("*")
        if doubted(summary.whole.get(f"{prefix}ess_{over}", Number()))
        else ""
        for over in ("tokens", "sequences")
    )
    if tokens:
        also = f" and {sequences}" if sequences else ""
        return f"Heavy tail (k̂ {tokens}{also}): ESS, χ² and E[r] cannot be estimated, and K3 may be too low."
    if sequences:
        return f"Heavy tail (k̂ {sequences}): ESS and χ² of sequences cannot be estimated."
    return ""


def tiles(summary: Result) -> tuple[Tile, ...]:
    """Return the eight headline numbers: the mismatch, what methods reject, the tail, the reward."""
    found = [tile for name in SHORT if (tile := _tile(summary, name))]
    found += _rejected(summary)
    found += [tile] if (tile := _tile(summary, "khat_tokens")) else []
    reward, rewards = summary.whole.get("mean_reward", Number()), curve(summary, "reward")
    if reward.value is not None or len({one.value for one in rewards}) > 1:
        course = _course(summary, "reward", reward.unit, rewards if len(rewards) > 1 else ())
        found.append(Tile(title("mean_reward"), reward, key="mean_reward", short=True, **course))
    return tuple(found)


def _rejected(summary: Result) -> list[Tile]:
    """Return what the recommended method rejects or, where that is nothing, what usual masks would."""
    method = (summary.recommendation and summary.recommendation.method) or ""
    rejects = {
        name: one
        for name in (method, *MASKS)
        if (one := summary.preset(name).get("tokens_rejected", Number())).value is not None
    }
    if not rejects:
        return []
    if (own := rejects.pop(method, None)) and own.value:
        rejects = {method: own}
    (first, number), *others = [*rejects.items()][:2] or [(method, own or Number())]
    beside = "; ".join([first, *(f"{name}: {written(one).value}" for name, one in others)])
    key = f"{first}.tokens_rejected"
    course = _course(summary, key, number.unit, curve(summary, key))
    return [Tile("Rejected", replace(number, interval=None), interval=beside, key=key, **course)]


def _tile(summary: Result, key: str) -> Tile | None:
    prefix = summary.prefix
    number = summary.whole.get(prefix + key, Number())
    points = curve(summary, key)
    if not number.known:
        return None
    row, interval, doubt = band(key, number), "", ""
    named: tuple[str, Tone | None] = (row.name, tone(row.name)) if row and not summary.is_bug else ("", None)
    if key == "khat_tokens":
        sequences = summary.whole.get(f"{prefix}khat_sequences", Number())
        named = ("unreliable", "bad") if number.note else ("reliable", "good")
        if sequences.value is not None:
            interval = f"sequences: {written(sequences).value.rstrip('*')}"
        number = replace(number, note=None, interval=None)
    elif doubted(number):
        doubt, named = "unreliable", ("", None)
    remark = below_0(key, number)
    return Tile(
        title(key),
        number,
        *(("", None) if remark else named),
        interval=interval,
        key=prefix + key,
        unit="nats/token" if key == "k3" else "",
        doubt=doubt,
        remark=remark,
        short=key in SHORT,
        log=METRICS[key].log,
        **_course(
            summary, key, number.unit, points if sum(one.value is not None for one in points) > 1 else ()
        ),
    )


def _course(summary: Result, name: str, unit: str, points: Sequence[Point]) -> dict[str, Any]:
    """Return the curve of a tile, whether it is flat, and its ends in words."""
    known = [(one.value, one.interval) for one in points if one.value is not None]
    values = tuple(one.value for one in points)
    if not known:
        return {"curve": values}
    flat = is_flat(summary, name)
    ordered = sorted(known, key=itemgetter(0)) if flat else known
    first, last = (Number(value=value, interval=ends, unit=unit) for value, ends in (ordered[0], ordered[-1]))
    spelled = [written(one).value for one in (first, last)]
    below = " to ".join(dict.fromkeys(spelled)) if flat else " → ".join(spelled)
    return {"curve": values, "flat": flat, "below": below}


def below_0(name: str, number: Number) -> str:
    """Return what it means that mean(r²) − 1 is below 0, as no χ² is; empty of any other number."""
    if not name.startswith("chi2") or number.value is None or number.value >= 0:
        return ""
    chance = number.interval is not None and number.interval[1] >= 0
    return "0 by its interval" if chance else "mean of r² below 1"


def steps_of(summary: Result) -> list[str]:
    """Return the training steps of the dump, as far as its rows have one."""
    return [one.key.removesuffix(".0") for one in at_steps(summary)]


def is_flat(summary: Result, name: str) -> bool:
    """Return whether the means of the thirds of a curve differ by no more than their 95% intervals.

    Of too few points without intervals nothing is known, and the curve is not called flat.
    """
    points = [
        (value, (value - ends[0], ends[1] - value) if ends else None)
        for _, value, ends in curve(summary, name)
        if value is not None
    ]
    third = max(1, round(len(points) / 3))
    parts = [part for part in (points[:third], points[third:-third], points[-third:]) if part]
    if len(points) < 2 or not any(halves for _, halves in points):
        spread = _scatter([value for value, _ in points])
        parts = [[(value, (spread, spread)) for value, _ in part] for part in parts]
        if not math.isfinite(spread):
            return False
    widest = tuple(max(end) for end in zip(*(halves for _, halves in points if halves), strict=True))
    means = [_mean([(value, halves or widest) for value, halves in part]) for part in parts]
    return max(low for low, _ in means) <= min(high for _, high in means)


def _scatter(values: Sequence[float]) -> float:
    """Return the 95% half width of a single value, from the differences of neighbours; infinite if unknown.

    Their median is that of noise also where the curve jumps or rises.
    """
    if len(values) < FEWEST:
        return math.inf
    freedom = (len(values) - 1) / 2
    deviation = median(abs(b - a) for a, b in pairwise(values)) / 0.954  # of normal noise
    return (1.96 + 2.37 / freedom + 2.82 / freedom**2) * deviation  # Student's t


def _mean(points: Sequence[tuple[float, tuple[float, ...]]]) -> tuple[float, float]:
    """Return the interval of the mean of independent values, given how far their own reach."""
    mean = math.fsum(value for value, _ in points) / len(points)
    below, above = (math.hypot(*(halves[side] for _, halves in points)) / len(points) for side in (0, 1))
    return mean - below, mean + above
