"""Headline numbers: tiles with their bands, published warning levels, all numbers of the policy pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from offpol_diag.blocks import Block, Cell, Composite, Section, Table, Text, filled
from offpol_diag.metrics import METRICS, PAIRS, REGIMES, Tone, band, title, tone
from offpol_diag.numerals import count, counted, doubted, rounded, say, written
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.summary import Fired, Number, Place, Series, Summary

TILES = (
    ("k3", "nats/token", True),
    ("ppl_ratio", "", True),
    ("ess_tokens", "", True),
    ("ess_sequences", "", True),
    ("chi2_token", "", True),
    ("chi2_sequence", "", False),
    ("khat_tokens", "", True),
)
"""Number, unit, and whether it stands in the short answer."""
FEWEST = 6
"""Fewest values without intervals whose scatter tells whether a curve is flat."""


@dataclass(frozen=True)
class Tile:
    """A headline number with its band, its values by training step, and what stands beside it.

    `short`: whether it stands in the short answer as well; `doubt`: a mark where it is unreliable, which
    leaves it without a band; `flat`: whether the thirds of the curve do not differ beyond their intervals;
    `intervals`: those of the curve's values.
    """

    label: str
    key: str
    number: Number
    unit: str
    band: str
    tone: Tone | None
    curve: tuple[float | None, ...]
    doubt: str = ""
    beside: str = ""
    short: bool = True
    flat: bool = False
    intervals: tuple[tuple[float, float] | None, ...] = ()

    @property
    def ends(self) -> str:
        """The first and last value of the curve; of a flat one the smallest and the largest."""
        intervals = self.intervals or (None,) * len(self.curve)
        known = [pair for pair in zip(self.curve, intervals, strict=True) if pair[0] is not None]
        if not known:
            return ""
        if self.flat:
            ranked = sorted(known, key=lambda pair: pair[0] or 0.0)
            return " to ".join(dict.fromkeys(self._written(*pair) for pair in (ranked[0], ranked[-1])))
        return " → ".join(self._written(*pair) for pair in (known[0], known[-1]))

    def _written(self, value: float | None, interval: tuple[float, float] | None) -> str:
        """Format a value of the curve with the digits that its interval supports."""
        return written(Number(value=value, interval=interval, unit=self.number.unit)).value

    @property
    def course(self) -> str:
        """The ends of the curve, and whether it shows no trend."""
        return f"no trend, {self.ends}" if self.flat else self.ends


@dataclass(frozen=True)
class Tiles(Composite):
    """The headline numbers side by side; `heavy`: which of them a heavy tail leaves unknown."""

    lead: str
    tiles: tuple[Tile, ...]
    heavy: str = ""

    def plain(self) -> tuple[Block, ...]:
        """Return the lead and the table; a renderer without curves writes their ends.

        The sentence on the heavy tail is the note of every number that it is about.
        """
        rows = [
            (
                f"{one.label} ({one.key})" if one.key else one.label,
                self._noted(one.number),
                "; ".join(part for part in (one.band, one.beside) if part) or "–",
                one.course or "–",
            )
            for one in self.tiles
            if one.number.known
        ]
        return filled(Text(self.lead), Table("tiles", "", ("number", "value", "band", "by step"), rows))

    def _noted(self, number: Number) -> Number:
        if not self.heavy or not number.note:
            return number
        note = f"unreliable: {self.heavy}" if doubted(number) else number.note.partition(": k̂")[0]
        return number.model_copy(update={"note": note})


def numbers(summary: Summary) -> Section | None:
    """Return the tiles, warning levels, bands, meanings and all numbers of the policy pairs."""
    pairs, made = _policies(summary), tiles(summary)
    blocks = filled(
        Tiles(_resampled(summary), made, heavy(summary)) if made else None,
        _alerts(summary),
        _meanings(summary, collapsed=bool(pairs.rows)),
        pairs,
        _bands(summary),
    )
    return Section("numbers", "Headline numbers", blocks, "Numbers") if blocks else None


def drift(summary: Summary) -> str:
    """Return the prefix of the main pair of policies: rollout → old, else rollout → current."""
    known = (prefix for prefix in PAIRS if summary.metrics.get(f"{prefix}k3", Number()).value is not None)
    return next(known, "")


# ---------------------------------------------------------------- tiles


def heavy(summary: Summary) -> str:
    """Return the sentence on a heavy tail: which numbers it leaves unknown; empty where there is none."""
    prefix = drift(summary)
    tokens, sequences = (
        written(summary.metrics.get(f"{prefix}khat_{over}", Number())).value.rstrip("*")
        if doubted(summary.metrics.get(f"{prefix}ess_{over}", Number()))
        else ""
        for over in ("tokens", "sequences")
    )
    if tokens:
        also = f" and {sequences}" if sequences else ""
        return f"Heavy tail: ESS, χ² and E[r] cannot be estimated (k̂ {tokens}{also}); K3 can."
    if sequences:
        return f"Heavy tail: ESS and χ² of sequences cannot be estimated (k̂ {sequences}); K3 can."
    return ""


def tiles(summary: Summary) -> tuple[Tile, ...]:
    """Return the headline numbers of the mismatch, and what the recommendation truncates or leaves out."""
    found = [one for row in TILES if (one := _tile(summary, *row))]
    reward, rewards = summary.metrics.get("mean_reward", Number()), [v for _, v in curve(summary, "reward")]
    if reward.value is not None or len(set(rewards)) > 1:
        values = tuple(rewards) if len(rewards) > 1 else ()
        flat = bool(values) and is_flat(summary, "reward")
        ends = intervals_of(summary, "reward") if values else ()
        found.append(
            Tile(title("mean_reward"), "mean_reward", reward, "", "", None, values, flat=flat, intervals=ends)
        )
    given = summary.recommendation
    weighed = given.numbers.get(given.title, {}) if given and given.title and not is_bug(summary) else {}
    weighted, truncated = (weighed.get(name, Number()) for name in ("tokens_weighted", "truncated_high"))
    if weighted.value is not None and given and given.title:
        method = next((name for name, one in summary.weights.items() if one == weighed), "")
        drops = weighted.value < 1 or truncated.value is None
        key, number = ("tokens_weighted", weighted) if drops else ("truncated_high", truncated)
        label, unit = ("Tokens with a weight", "") if drops else ("Truncated", "of tokens")
        name = f"{method}.{key}"
        values, flat = tuple(v for _, v in curve(summary, name)), is_flat(summary, name)
        ends = intervals_of(summary, name)
        last = Tile(label, "", number, unit, given.title, None, values, "", "", False, flat, ends)
        found.append(last)
    return tuple(found)


def _tile(summary: Summary, key: str, unit: str, short: bool) -> Tile | None:
    prefix = drift(summary)
    number = summary.metrics.get(prefix + key, Number())
    values = tuple(value for _, value in curve(summary, key))
    values = values if sum(one is not None for one in values) > 1 else ()
    if not number.known:
        return None
    row, beside, doubt = band(key, number), "", ""
    named: tuple[str, Tone | None] = (row.name, tone(row.name)) if row else ("", None)
    if key == "khat_tokens":
        sequences = summary.metrics.get(f"{prefix}khat_sequences", Number())
        named = ("unreliable", "bad") if number.note else ("reliable", "good")
        beside = f"sequences: {written(sequences).value.rstrip('*')}" if sequences.value is not None else ""
        number = number.model_copy(update={"note": None, "interval": None})
    elif doubted(number):
        doubt, named = "unreliable", ("", None)
    if short_of_0 := below_0(key, number):
        beside, named = short_of_0, ("", None)
    flat = bool(values) and is_flat(summary, key)
    ends = intervals_of(summary, key) if values else ()
    return Tile(title(key), prefix + key, number, unit, *named, values, doubt, beside, short, flat, ends)


def below_0(name: str, number: Number) -> str:
    """Return what it means that mean(r²) − 1 is below 0, as no χ² is; empty of any other number."""
    if not name.startswith("chi2") or number.value is None or number.value >= 0:
        return ""
    chance = number.interval is not None and number.interval[1] >= 0
    return "0 by its interval" if chance else "no χ²: mean square < 1"


def steps_of(summary: Summary) -> list[str]:
    """Return the training steps of the dump."""
    return [one.key for one in summary.by["step"].places] if "step" in summary.by else []


def curve(summary: Summary, name: str) -> list[tuple[str, float | None]]:
    """Return a number of the main pair of policies by training step."""
    steps = summary.charts.steps
    if steps is None:
        places = summary.by["step"].places if "step" in summary.by else []
        return [(one.key, _at(one, drift(summary), name).value) for one in places]
    values = steps.series[name].values if name in steps.series else []
    return [(str(last), value) for last, value in zip(steps.last, values, strict=False)]


def intervals_of(summary: Summary, name: str) -> tuple[tuple[float, float] | None, ...]:
    """Return the interval of each value of `curve`."""
    steps = summary.charts.steps
    if steps is None:
        places = summary.by["step"].places if "step" in summary.by else []
        return tuple(_at(one, drift(summary), name).interval for one in places)
    found = steps.series.get(name, Series(values=[]))
    none = [None] * len(found.values)
    ends = zip(steps.last, found.low or none, found.high or none, strict=False)
    return tuple(None if low is None or high is None else (low, high) for _, low, high in ends)


def is_flat(summary: Summary, name: str) -> bool:
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


def _with_halves(summary: Summary, name: str) -> list[tuple[float, tuple[float, ...] | None]]:
    """Return the known values of a curve, each with how far its interval reaches below and above."""
    steps = summary.charts.steps
    if steps is None:
        places = summary.by["step"].places if "step" in summary.by else []
        numbers = [_at(one, drift(summary), name) for one in places]
        each = [(one.value, *(one.interval or (None, None))) for one in numbers]
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


def _at(place: Place, prefix: str, name: str) -> Number:
    """Return a number of a place; there the main pair of policies has no prefix."""
    every = {**place.asked, **place.metrics}
    return every.get(prefix + name, every.get(name, Number()))


def _resampled(summary: Summary) -> str:
    """Return what the intervals rest on, and what the small curves run over."""
    steps, dump = summary.charts.steps, summary.dump
    curves = ""
    if steps is not None and len(steps.first) > 1:
        curves = f" The small curves run from step {steps.first[0]} to {steps.last[-1]}."
    if all(number.interval is None for number in summary.metrics.values()):
        return f"Without intervals: there are {count(dump.groups)} groups to resample.{curves}"
    unit = "prompt" if "group_id" in dump.columns else "sequence"
    return f"95% intervals, resampling the {counted(dump.groups, unit)}.{curves}"


# ---------------------------------------------------------------- tables


def alerts(summary: Summary) -> list[Fired]:
    """Return the published warning levels that this dump crosses."""
    fired = summary.recommendation.fired if summary.recommendation else []
    return [one for one in fired if one.level == "alert"]


def _alerts(summary: Summary) -> Table:
    rows = [(one.sentence, _saw(one, summary), one.source or "–") for one in alerts(summary)]
    said = f"{len(rows)} published warning {'level is' if len(rows) == 1 else 'levels are'} crossed"
    return Table("alerts", said, ("level", "this dump", "set by"), rows, folded=True)


def _saw(one: Fired, summary: Summary) -> str:
    """Return the numbers that crossed a level, with intervals if they are metrics."""
    parts = []
    for key, value in one.saw.items():
        metric = summary.metrics.get(key, Number())
        number = metric if metric.value == value else Number(value=value, unit=metric.unit)
        parts.append(f"{key} = {say(number)}")
    return "; ".join(parts) or "–"


def _meanings(summary: Summary, collapsed: bool) -> Table:
    """Return the main numbers of the main pair, each with what it says."""
    known, prefix = summary.metrics, drift(summary)
    said = {name: one.meaning for name, one in METRICS.items() if one.meaning}
    keys = {prefix + name: says for name, says in said.items() if prefix + name in known}
    rows = [(key, known[key], says) for key, says in keys.items()]
    caption, header = "What the headline numbers mean", ("number", "value", "what it says")
    return Table("headline", caption, header, rows, collapsed=collapsed, folded=True)


def _policies(summary: Summary) -> Table:
    """Return every number for each pair of policies, side by side."""
    known = summary.metrics
    pairs = {
        prefix: PAIRS[prefix]
        for prefix in ("", "drift2.", "total.")
        if known.get(f"{prefix}k3", Number()).known
    }
    names = dict.fromkeys(
        key.removeprefix(prefix) for key in known for prefix in PAIRS if prefix and key.startswith(prefix)
    )
    names |= {name: None for name, one in METRICS.items() if names and one.meaning and name in known}
    none = Number(unknown="not computed for this pair")
    rows: list[tuple[Cell, ...]] = [
        (name, *(known.get(p + name, none) for p in pairs)) for name in names if pairs
    ]
    caption = "All numbers of the three policy pairs"
    note = (
        "Rollout → old is engine numerics and policy lag; old → current, the updates within the step. K1 "
        "adds up over the two; K3 of old → current is the size of the update, not a KL."
    )
    header = ("number", *pairs.values())
    return Table("policies", caption, header, rows, (note,), folded=True)


def _bands(summary: Summary) -> Table:
    rows = []
    for one in summary.charts.bands:
        low, high = (None if end is None else rounded(end) for end in (one.low, one.high))
        span = f"{low} to {high}" if low and high else f"below {high}" if high else f"above {low}"
        rows.append((one.metric, one.name, span, one.regime, one.source))
    header = ("number", "band", "range", "regime", "source")
    said = "Where the bands come from; a value is only comparable within its regime"
    return Table("bands", said, header, [*rows, *REGIMES] if rows else (), collapsed=True)
