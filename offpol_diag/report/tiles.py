"""Headline numbers with their bands and curves over the training steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from offpol_diag.metrics import METRICS, Tone, band, title, tone
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, written
from offpol_diag.report.answer import Tile
from offpol_diag.result import Place, Result, Series

NO_STEP = "∅"
"""Key of the rows without a step."""

TILES = ("k3", "ppl_ratio", "ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence", "khat_tokens")
SHORT = ("k3", "ppl_ratio", "ess_tokens", "ess_sequences", "chi2_token")
"""Numbers with a tile; those that stand in the short answer too."""
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
        return f"Heavy tail: ESS, χ² and E[r] cannot be estimated (k̂ {tokens}{also}); K3 can."
    if sequences:
        return f"Heavy tail: ESS and χ² of sequences cannot be estimated (k̂ {sequences}); K3 can."
    return ""


def tiles(summary: Result) -> tuple[Tile, ...]:
    """Return the headline numbers of the mismatch, and what the recommendation rejects or truncates."""
    found = [tile for name in TILES if (tile := _tile(summary, name))]
    reward, rewards = summary.whole.get("mean_reward", Number()), [v for _, v in curve(summary, "reward")]
    if reward.value is not None or len(set(rewards)) > 1:
        values = tuple(rewards) if len(rewards) > 1 else ()
        found.append(
            Tile(
                title("mean_reward"),
                reward,
                key="mean_reward",
                short=True,
                **_course(summary, "reward", reward.unit, values),
            )
        )
    given = summary.recommendation
    weighed = given.numbers.get(given.title, {}) if given and given.title and not summary.is_bug else {}
    rejected, weighted, truncated = (
        weighed.get(name, Number()) for name in ("tokens_rejected", "tokens_weighted", "truncated_high")
    )
    if weighted.value is not None and given and given.title:
        drops = weighted.value < 1 or truncated.value is None
        label, key, number = "Truncated", "truncated_high", truncated
        if rejected.value:
            label, key, number = "Rejected", "tokens_rejected", rejected
        elif drops:
            label, key, number = "With a weight", "tokens_weighted", weighted
        method = next((name for name, one in summary.candidates.items() if one == weighed), "")
        name = f"{method}.{key}"
        course = _course(summary, name, number.unit, tuple(v for _, v in curve(summary, name)))
        found.append(Tile(label, number, "recommended", short=True, **course))
    return tuple(found)


def _tile(summary: Result, key: str) -> Tile | None:
    prefix = summary.prefix
    number = summary.whole.get(prefix + key, Number())
    values = tuple(value for _, value in curve(summary, key))
    values = values if sum(one is not None for one in values) > 1 else ()
    if not number.known:
        return None
    row, interval, doubt = band(key, number), "", ""
    named: tuple[str, Tone | None] = (row.name, tone(row.name)) if row else ("", None)
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
        **_course(summary, key, number.unit, values),
    )


def _course(summary: Result, name: str, unit: str, values: tuple[float | None, ...]) -> dict[str, Any]:
    """Return the curve of a tile, whether it is flat, and its ends in words."""
    if not values:
        return {}
    intervals = intervals_of(summary, name) or (None,) * len(values)
    known = [pair for pair in zip(values, intervals, strict=True) if pair[0] is not None]
    flat = is_flat(summary, name)
    if not known:
        return {"curve": values}

    def spelled(value: float | None, interval: tuple[float, float] | None) -> str:
        return written(Number(value=value, interval=interval, unit=unit)).value

    if flat:
        known = sorted(known, key=lambda pair: pair[0] or 0.0)
        ends = " to ".join(dict.fromkeys(spelled(*pair) for pair in (known[0], known[-1])))
    else:
        ends = " → ".join(spelled(*pair) for pair in (known[0], known[-1]))
    return {"curve": values, "flat": flat, "below": ends}


def below_0(name: str, number: Number) -> str:
    """Return what it means that mean(r²) − 1 is below 0, as no χ² is; empty of any other number."""
    if not name.startswith("chi2") or number.value is None or number.value >= 0:
        return ""
    chance = number.interval is not None and number.interval[1] >= 0
    return "0 by its interval" if chance else "no χ²: mean square < 1"


def steps_of(summary: Result) -> list[str]:
    """Return the training steps of the dump, as far as its rows have one."""
    return [one.key.removesuffix(".0") for one in _at_steps(summary)]


def _at_steps(summary: Result) -> list[Place]:
    return [one for one in summary.at("step") if one.key != NO_STEP]


def curve(summary: Result, name: str) -> list[tuple[str, float | None]]:
    """Return a number of the main pair of policies by training step."""
    steps = summary.charts.steps
    if steps is None:
        return [(one.key, number.value) for one, number in _by_step(summary, name)]
    values = steps.series[name].values if name in steps.series else []
    return [(str(last), value) for last, value in zip(steps.last, values, strict=False)]


def intervals_of(summary: Result, name: str) -> tuple[tuple[float, float] | None, ...]:
    """Return the interval of each value of `curve`."""
    steps = summary.charts.steps
    if steps is None:
        return tuple(number.interval for _, number in _by_step(summary, name))
    found = steps.series.get(name, Series(values=[]))
    none = [None] * len(found.values)
    ends = zip(steps.last, found.low or none, found.high or none, strict=False)
    return tuple(None if low is None or high is None else (low, high) for _, low, high in ends)


def is_flat(summary: Result, name: str) -> bool:
    """Return whether the means of the thirds of a curve differ by no more than their 95% intervals.

    Of too few points without intervals nothing is known, and the curve is not called flat.
    """
    points = _with_halves(summary, name)
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


def _with_halves(summary: Result, name: str) -> list[tuple[float, tuple[float, ...] | None]]:
    """Return the known values of a curve, each with how far its interval reaches below and above."""
    steps = summary.charts.steps
    if steps is None:
        each = [(one.value, *(one.interval or (None, None))) for _, one in _by_step(summary, name)]
    else:
        found = steps.series.get(name, Series(values=[]))
        none = [None] * len(found.values)
        each = list(zip(found.values, found.low or none, found.high or none, strict=True))
    return [
        (value, None if low is None or high is None else (value - low, high - value))
        for value, low, high in each
        if value is not None
    ]


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


def _by_step(summary: Result, name: str) -> list[tuple[Place, Number]]:
    """Return a number at each step; there the main pair of policies has no prefix."""
    prefix, places = summary.prefix, _at_steps(summary)
    return [(one, one.numbers.get(prefix + name, one.numbers.get(name, Number()))) for one in places]
