"""One preset at many thresholds, which are presets that differ in one bound; the bounds that keep a share."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from offpol_diag.core import tails
from offpol_diag.core.gap import Tokens
from offpol_diag.core.observe import examine, running
from offpol_diag.core.preset_numbers import AT_LAG_0, DROPPED
from offpol_diag.core.state import Array
from offpol_diag.core.steps import rule as rule_of
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import Dump
from offpol_diag.errors import DumpError, UsageError, did_you_mean
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import say_value
from offpol_diag.presets import OF_SEQUENCES, Preset, Reject, Veto, Weight
from offpol_diag.presets.grammar import named
from offpol_diag.presets.words import RATIOS, judged
from offpol_diag.result import Place, Result, SolvedWindow, Sweep, SweptPoint, place_of
from offpol_diag.run.devices import ON_CPU
from offpol_diag.run.ray import Engine
from offpol_diag.run.threads import Progress
from offpol_diag.trainers import trainer_named
from offpol_diag.trainers.translate import config_for

Side = Literal["upper", "lower", "window"]
Bounded = Weight | Reject | Veto
LOGARITHMIC = ("ratio", "mult_prob_error")
"""Statistics whose bounds are factors: 1.001 is near, and a window is [1/b, b]."""
SIGNED = ("ratio", "k1", "prob_diff")
"""Statistics that deviate from their on-policy value in both directions."""
ALIKE = 0.01
"""Largest relative difference of |log| of two bounds that count as 1/b and b."""
METRICS = (
    *("tokens_weighted", "tokens_rejected", "sequences_dropped", "truncated_high", "truncated_low"),
    *("ess_tokens", "ess_sequences", "weight_mean", "chi2_token", "chi2_sequence", AT_LAG_0.name),
)
"""Numbers of a preset that are listed at each threshold."""

# ---------------------------------------------------------------- the bound that moves


@dataclass(frozen=True)
class SweptBound:
    """One bound of a preset, or two that vary together.

    Attributes:
        part: weight, reject or veto.
        index: position of the rule in reject; None for the others.
        side: upper, lower, or window: [1/b, b].
    """

    part: str
    index: int | None
    side: Side

    def __str__(self) -> str:
        return self.place if self.side == "window" else f"{self.place}.{self.side}"

    @property
    def place(self) -> str:
        """The key of the part in a preset's table: `weight`, `reject[0]`, `veto`."""
        return self.part if self.index is None else f"{self.part}[{self.index}]"

    def rule(self, preset: Preset) -> Bounded:
        """Return the part of the preset that has the bound."""
        found: Bounded = preset.reject[self.index] if self.index is not None else getattr(preset, self.part)
        return found

    def statistic(self, preset: Preset) -> str:
        """Return the name of the statistic that is compared with the bound."""
        rule = self.rule(preset)
        return rule.statistic if isinstance(rule, Reject) else "ratio"

    def unit(self, preset: Preset) -> str:
        """Return what the bound acts on: token or sequence."""
        rule = self.rule(preset)
        return "sequence" if isinstance(rule, Veto) or rule.over in OF_SEQUENCES else "token"

    def in_words(self, preset: Preset) -> str:
        """Return the formula of the statistic."""
        rule = self.rule(preset)
        if isinstance(rule, Reject):
            return judged(rule)
        if isinstance(rule, Weight):
            return RATIOS[rule.over]
        return "r_t, any token" if self.side == "upper" else "the smallest r_t"

    def threshold(self, preset: Preset) -> float | None:
        """Return the preset's own bound; for a window, its upper end."""
        rule = self.rule(preset)
        return rule.lower if self.side == "lower" else rule.upper

    def bounds(self, value: float) -> dict[str, float]:
        """Return the keys of the part that vary, with their values at a threshold."""
        return {"lower": 1 / value, "upper": value} if self.side == "window" else {self.side: value}

    def moved(self, preset: Preset, bounds: Mapping[str, float | None]) -> Preset:
        """Return the preset with bounds of the part replaced."""
        rule: Any = replace(self.rule(preset), **bounds)  # type: ignore[arg-type]
        if self.index is None:
            return replace(preset, **{self.part: rule})
        rules = (*preset.reject[: self.index], rule, *preset.reject[self.index + 1 :])
        return replace(preset, reject=rules)

    def named(self, preset: Preset, bounds: Mapping[str, float]) -> str:
        """Return the name of the preset with bounds of the part replaced: `seq_mis@2..0.4..2.5`.

        Thresholds stand by position where the preset has a place for each, else by key.
        """
        places = {f"{self.part}.{side}": end for side, end in bounds.items()}
        if "=" in preset.name or len(preset.reject) > 1 or not places.keys() <= {*preset.places}:
            return named(preset.name, {f"{self.place}.{side}": repr(end) for side, end in bounds.items()})
        parts = {"reject": preset.reject[0] if preset.reject else None}
        for place in preset.places:
            part, _, side = place.partition(".")
            end = getattr(parts.get(part, getattr(preset, part)), side)
            places.setdefault(place, math.inf if end is None else end)
        return named(
            preset.name, {"": "..".join(f"{places[one]!r}".removesuffix(".0") for one in preset.places)}
        )


def swept_bounds(preset: Preset) -> tuple[SweptBound, ...]:
    """List the bounds of a preset that can vary: rules first, then weight and veto; windows before sides."""
    parts: list[tuple[str, int | None, Bounded | None]] = [
        *(("reject", index, rule) for index, rule in enumerate(preset.reject)),
        ("weight", None, preset.weight),
        ("veto", None, preset.veto),
    ]
    sides: tuple[Side, ...] = ("window", "upper", "lower")
    return tuple(
        SweptBound(part, index, side)
        for part, index, rule in parts
        if rule and not (isinstance(rule, Weight) and rule.action not in ("truncate", "mask"))
        for side in sides
        if (_reciprocal(rule) if side == "window" else getattr(rule, side) is not None)
    )


def _reciprocal(rule: Bounded) -> bool:
    """Return whether the bounds are 1/b and b."""
    factor = not isinstance(rule, Reject) or rule.statistic == "ratio"
    if not factor or isinstance(rule, Veto) or not rule.lower or not rule.upper or rule.upper <= 1:
        return False
    up = math.log(rule.upper)
    return abs(up + math.log(rule.lower)) <= ALIKE * up


def pick(preset: Preset, which: str | None) -> SweptBound:
    """Return the bound of this name (`reject.upper`: of the first rule that has one), or the main one.

    Raises:
        UsageError: the preset has no bound, or none of this name.
    """
    found = swept_bounds(preset)
    if not found:
        hint = "name a preset with a threshold"
        raise UsageError(f"there is nothing to sweep in {preset.name}: it has no bound", hint)
    if which is None:
        return found[0]
    named = {name: one for one in reversed(found) for name in (str(one), str(replace(one, index=None)))}
    if which not in named:
        known = [str(one) for one in found]
        hint = did_you_mean(which, known) or f"--which may be {', '.join(known)}"
        raise UsageError(f'{preset.name} has no bound "{which}"', hint)
    return named[which]


# ---------------------------------------------------------------- thresholds

STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Round numbers within a decade."""
FAR = (2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 1000.0, 10_000.0)
MOST = 12
"""Most thresholds that a table shows, roughly."""
LIMIT = 200
"""Most thresholds that `--at` accepts."""
EXAMPLE = "write them like --at 1.0001,1.001,1.01"
MUCH = 0.1
"""Thresholds that change more than this share of the weights of tokens count as equal in effect."""
LITTLE = 0.02
"""Thresholds whose kept shares of tokens and of sequences sum to less than this count as equal in effect."""


def parse(text: str, preset: Preset, bound: SweptBound) -> tuple[float, ...]:
    """Parse the thresholds of `--at`, which must ascend.

    Raises:
        UsageError: not numbers, not ascending, too many, or invalid for the bound.
    """
    values = []
    for word in map(str.strip, text.split(",")):
        try:
            values.append(float(word))
        except ValueError:
            raise UsageError(f'--at: "{word}" is no number', EXAMPLE) from None
        if not math.isfinite(values[-1]):
            raise UsageError(f"--at: {word} is no threshold", "give finite numbers")
    if any(one >= two for one, two in pairwise(values)):
        raise UsageError(f"--at {text}: thresholds must rise", EXAMPLE)
    if len(values) > LIMIT:
        raise UsageError(f"--at has {len(values)} thresholds, and {LIMIT} are the most", "leave some out")
    for value in values:
        if objection := _objection(value, preset, bound):
            raise UsageError(f"--at {value:g}: {bound}{objection[0]}", objection[1])
    return tuple(values)


def _objection(value: float, preset: Preset, bound: SweptBound) -> tuple[str, str] | None:
    """Return why a threshold is invalid for the bound, and a hint; None if it is valid."""
    if bound.side == "window" and value <= 1:
        hint = f"give b, or sweep one side with --which {bound}.upper"
        return " is the window [1/b, b] on r, and b must be above 1", hint
    moved = bound.rule(bound.moved(preset, bound.bounds(value)))
    for key, rule in moved.problems():
        return f"{key and ': '}{key}: {rule}", "leave that one out"
    return None


def round_numbers(preset: Preset, bound: SweptBound) -> tuple[float, ...]:
    """List all round thresholds of a wide range, ascending, and the preset's own."""

    def decades(first: int, last: int) -> list[float]:  # each the float nearest to the intended decimal
        return [float(f"{step * 10.0**power:.9g}") for power in range(first, last + 1) for step in STEPS]

    statistic, below = bound.statistic(preset), bound.side == "lower"
    if statistic not in LOGARITHMIC:
        sign = -1 if below and statistic in ("k1", "prob_diff") else 1
        values = [sign * x for x in decades(-8, 2)]
    elif below:
        values = [float(f"{1 - x:.9g}") for x in decades(-6, -1)] + [10.0**-k for k in range(1, 9)]
    else:
        values = [float(f"{1 + x:.9g}") for x in decades(-6, -1)] + list(FAR)
    found = {value for value in values if _objection(value, preset, bound) is None}
    own = bound.threshold(preset)
    return tuple(sorted(found if own is None else found | {own}))


def informative(points: Sequence[SweptPoint], bound: SweptBound, preset: Preset) -> list[SweptPoint]:
    """Select the thresholds to show: where what they do changes, evenly thinned, and the preset's own."""
    much = MUCH if bound.unit(preset) == "token" else 1.0
    effects = [_effect(point.numbers, bound, much) for point in points]
    changes = [at for at, (one, two) in enumerate(pairwise(effects)) if abs(one - two) > 1e-12]
    first, last = (changes[0], changes[-1] + 1) if changes else (0, len(points) - 1)
    shown = range(first, last + 1)
    kept = {*shown[:: max(1, math.ceil(len(shown) / MOST))], last}
    return [point for at, point in enumerate(points) if at in kept or point.own]


def _effect(numbers: Numbers, bound: SweptBound, much: float) -> float:
    """Return the share of weights that a threshold changes, or the sum of the shares that it keeps."""
    high, low, tokens, sequences = (
        numbers[name].value or 0.0
        for name in ("truncated_high", "truncated_low", "tokens_rejected", "sequences_dropped")
    )
    if bound.part == "weight":
        return min({"upper": high, "lower": low}.get(bound.side, high + low), much)
    return max(2 - tokens - sequences, LITTLE)


# ---------------------------------------------------------------- the sweep


@dataclass(frozen=True)
class SweepOptions:
    """The preset, the bound and the thresholds of a sweep.

    Attributes:
        bound: the bound of the preset that varies.
        values: thresholds, ascending; None for round numbers in the range of the data.
        keep: the share that the solved bounds must keep, or None.
        chosen: whether the user named the bound, so that only this one is solved for.
        trainer: the trainer whose configuration of the solved bounds is printed, or empty.
    """

    preset: Preset
    bound: SweptBound
    values: tuple[float, ...] | None = None
    keep: float | None = None
    chosen: bool = False
    trainer: str = ""

    @classmethod
    def of(
        cls, preset: Preset, which: str | None, at: str | None, keep: float | None, trainer: str | None
    ) -> SweepOptions:
        """Check what a user asks for, on the command line or in Python, before the dump is read.

        Raises:
            UsageError: there is no such bound, or a threshold, the share or the trainer does not go with it.
        """
        bound = pick(preset, which)
        values = None if at is None else parse(at, preset, bound)
        if keep is not None:
            check_share(keep, preset, bound)
        if trainer is not None and keep is None:
            raise UsageError(
                "--for prints the bounds that --keep solves for",
                f"add --keep 0.95, or print the preset: offpol-diag presets {preset.name} --for {trainer}",
            )
        if trainer is not None:
            config_for(preset, trainer)  # which refuses a preset that it cannot express
        named = trainer_named(trainer) if trainer is not None else ""
        return cls(preset, bound, values, keep, which is not None, named)


@np.errstate(all="ignore")
def sweep(
    dump: Dump,
    options: SweepOptions,
    *,
    engine: str = "local",
    threads: int | None = None,
    progress: Progress | None = None,
    **how: Any,
) -> Result:
    """Analyse a preset at many thresholds; arguments other than `options` are those of `examine`.

    Returns:
        The Result of the dump with the unchanged preset, and `sweep` filled.

    Raises:
        UsageError: the dump lacks a column that the preset reads, or the bounds cannot be solved for.
        DumpError, ClusterError: as of `examine`.
    """
    preset, bound = options.preset, options.bound
    have = set(dump.info.columns)
    lacking = preset.lacking(have | ({"advantages"} if {"rewards", "group_id"} <= have else set()))
    if lacking:
        raise UsageError(
            f"the dump has no {' and no '.join(lacking)}, which {preset.name} cannot do without",
            "name the column with --columns, or sweep another preset",
        )
    values = options.values or round_numbers(preset, bound)
    every, counts = [bound.bounds(value) for value in values], dict[str, int]()
    if options.keep is not None:
        with running(engine, ON_CPU, threads, progress) as runs:
            solved, counts = solve(runs, dump, options)
        every.append(solved)
    moved = [_named(preset, bound, bounds) for bounds in every]
    how |= {"engine": engine, "threads": threads, "progress": progress}
    found = examine(dump, presets=(preset, *moved), lag_0=True, **how)
    whole = found.summary()
    points = [
        SweptPoint(
            threshold=bounds.get("upper", bounds.get("lower", 0.0)),
            bounds={f"{bound.place}.{side}": end for side, end in bounds.items()},
            own=bounds == bound.bounds(bound.threshold(preset) or 0.0),
            numbers={name: x for name in METRICS if (x := whole.preset(one.name).get(name))},
            dropped=_dropped(whole, one.name),
        )
        for bounds, one in zip(every, moved, strict=True)
    ]
    shown = points[: len(values)]
    result = Sweep(
        preset=preset.name,
        which=str(bound),
        others=[str(one) for one in swept_bounds(preset) if one != bound],
        statistic=bound.in_words(preset),
        unit=bound.unit(preset),
        points=shown if options.values else informative(shown, bound, preset),
    )
    if options.keep is not None:
        name = options.trainer
        config = config_for(bound.moved(preset, solved), name).text() if name else ""
        result.window = SolvedWindow(
            asked=options.keep,
            **counts,
            preset=bound.named(preset, solved),
            point=points[-1],
            trainer=name,
            config=config,
        )
    result.remarks = warnings(result, whole.at("length"))
    if preset.weight is not None and preset.weight.normalize:
        result.remarks.append("The weights are shown before they are divided by their batch mean.")
    only, run = {preset.name: whole.presets[preset.name]}, whole.run.model_copy(update={"command": "sweep"})
    lengths = [place.key for place in whole.at("length")]
    others = {f"preset/{one.name}" for one in moved}
    others |= {place_of("length", key, f"preset/{one.name}") for one in moved for key in lengths}
    numbers = {subject: one for subject, one in whole.numbers.items() if subject not in others}
    return whole.model_copy(update={"presets": only, "numbers": numbers, "run": run, "sweep": result})


def _dropped(whole: Result, name: str) -> Numbers:
    places = whole.at("length", f"preset/{name}")
    return {place.key: x for place in places if (x := place.numbers.get(DROPPED.name))}


def _named(preset: Preset, bound: SweptBound, bounds: Mapping[str, float]) -> Preset:
    """Return the preset at one threshold, under a name of its own.

    Its weights are not divided by their batch mean, after which a mean weight says nothing of a bound.
    """
    moved = bound.moved(preset, bounds)
    weight = moved.weight and replace(moved.weight, normalize=False)
    name = f"{preset.name}@{','.join(f'{end!r}' for end in bounds.values())}"
    return replace(moved, name=name, weight=weight, generation=None, aliases=())


# ---------------------------------------------------------------- warnings

TRAP, TRAP_RATIO = 0.05, 0.9
"""A threshold drops long responses if the kept share of the longest is lower by this much, and less than this
multiple, than that of the shortest."""
FEWEST = 0.1
"""Share of the sequences that an octave of length has at least, to be the shortest or the longest."""
FLIPS = 0.32
"""A threshold that drops more than this share at lag 0 lies within one standard deviation of numerics."""


def warnings(found: Sweep, lengths: Sequence[Place]) -> list[str]:
    """Return what to beware of at the preset's own threshold, and at the bounds that were solved for."""
    said, least = list[str](), FEWEST * sum(place.sequences for place in lengths)
    usual = [place.key for place in lengths if place.sequences >= least]
    each = [(f"{one.threshold:.7g}, the preset as it stands,", one) for one in found.points if one.own]
    each += [("what was solved for", found.window.point)] if found.window else []
    for whose, point in each:
        fresh = point.numbers.get(AT_LAG_0.name, Number()).value
        gone = [point.dropped[key].value for key in usual if key in point.dropped]
        short, long = (1 - (one or 0.0) for one in (gone[0], gone[-1])) if gone else (1.0, 1.0)
        if short - long > TRAP and long < TRAP_RATIO * short:
            said.append(
                f"Length trap: {whose} keeps {say_value(short, 'fraction')} of the responses of {usual[0]} "
                f"tokens and {say_value(long, 'fraction')} of those of {usual[-1]}. The batch that is left "
                "is a shorter one, whatever its quality."
            )
        if fresh is not None and 1 - fresh > FLIPS:
            said.append(
                f"Noise: {whose} drops {say_value(1 - fresh, 'fraction')} of the tokens of policy lag 0, "
                "where nothing but numerics (and what is wrong with them) makes the policies differ."
            )
    if found.window and found.window.ties:
        more = f"{found.window.ties} {found.unit}s more than asked are kept"
        said.append(f"{more}: they equal the last one, and no bound parts them.")
    return said


# ---------------------------------------------------------------- the window that keeps a share

SPARE = 1e-3
"""Relative distance of a bound from the outermost value, if there is no value beyond it."""
MOST_NATS = 700.0
"""Largest |log| of a bound, whose exponential is still a float."""


def check_share(share: float, preset: Preset, bound: SweptBound) -> None:
    """Refuse a share outside (0, 1], and bounds that cannot be solved for.

    Raises:
        UsageError: the share is invalid, or what the bound drops depends on more than the statistic of each
            token or sequence.
    """
    if not 0 < share <= 1:  # also refuses NaN
        raise UsageError(f"--keep {share:g}: it must be above 0 and at most 1", "to keep 95%: --keep 0.95")
    rule = bound.rule(preset)
    hint = "leave --keep out: the table shows what each threshold keeps"
    if isinstance(rule, Reject) and rule.over == "batch":
        raise UsageError(f"--keep: what {bound} of {preset.name} drops depends on other tokens", hint)
    if isinstance(rule, Reject) and rule.advantage != "any":
        raise UsageError(f"--keep: {bound} of {preset.name} acts only for some signs of the advantage", hint)


@dataclass(frozen=True)
class Values:
    """The statistic of some tokens or sequences.

    Attributes:
        counts: of all of them, by bin of `tails`, [SIZE].
        values: the values in the bins that were asked for, each once, rising.
        times: how often each occurs.
    """

    counts: Array
    values: Array
    times: Array

    def merge(self, other: Values) -> Values:
        """Add counts, and join the values."""
        values, at = np.unique(np.concatenate((self.values, other.values)), return_inverse=True)
        times = np.bincount(at, np.concatenate((self.times, other.times)), len(values))
        return Values(self.counts + other.counts, values, times)


@dataclass(frozen=True)
class Look:
    """The job of one pass: what the bound is compared with, of each token or non-empty sequence of a batch.

    Ratios are seen as logs. `wanted` holds the bins whose values are kept.
    """

    preset: Preset
    bound: SweptBound
    wanted: tuple[int, ...] = ()

    def __call__(self, batch: Batch) -> Values:
        """Collect the values of one batch."""
        x = self._statistic(batch)
        bins = tails.index(x)
        values, times = np.unique(x[np.isin(bins, self.wanted)], return_counts=True)
        return Values(np.bincount(bins, minlength=tails.SIZE), values, times)

    def _statistic(self, batch: Batch) -> Array:
        rule, policy = self.bound.rule(self.preset), self.preset.policy
        tokens = Tokens.of(batch)
        runs = tokens.sequences
        if isinstance(rule, Veto):
            extreme = runs.min if self.bound.side == "lower" else runs.max
            least: Array = extreme(tokens.log_ratio(policy))[runs.filled]
            return least
        if isinstance(rule, Weight):
            rule = Reject("ratio", rule.over, safety=rule.safety, safety_at=rule.safety_at)
        x: Array = tokens.judged(rule_of(policy, rule))
        return x[runs.filled] if rule.over in OF_SEQUENCES else x


def solve(engine: Engine, dump: Dump, options: SweepOptions) -> tuple[dict[str, float], dict[str, int]]:
    """Find the bounds that keep the share, as many lost below as above, in two passes over a dump.

    Both bounds of the rule are sought if it has both, unless the user named one. The counts are the fields of
    `SolvedWindow`.
    """
    preset, bound, share = options.preset, options.bound, options.keep or 1.0
    rule, name = bound.rule(preset), bound.statistic(preset)
    both = rule.lower is not None and rule.upper is not None and name in SIGNED and not options.chosen
    sides = ("lower", "upper") if both or bound.side == "window" else (bound.side,)
    look = Look(preset, bound)
    seen: Values | None = engine.reduce(dump, look)
    if seen is None or not seen.counts.any():
        raise DumpError("the dump has no sequence", "check that its writer was closed")
    many = round(float(seen.counts.sum()))
    keep = max(1, math.ceil(share * many - 1e-9))
    below = (many - keep) // 2 if len(sides) == 2 else many - keep if sides == ("lower",) else 0
    ranks = {side: below + 1 if side == "lower" else below + keep for side in sides}
    values, times, upto = _near(engine, dump, look, seen.counts, list(ranks.values()))
    bounds, kept = {}, many
    for side, rank in ranks.items():
        at = int(np.searchsorted(upto, rank))
        ends = (values[at], values[at + 1]) if side == "upper" else (values[at - 1], values[at])
        bounds[side] = shortest(*ends, name == "ratio", nearest=values[at])
        kept -= round(float(many - upto[at] if side == "upper" else upto[at] - times[at]))
    return bounds, {"kept": kept, "of": many, "ties": kept - keep}


def _near(
    engine: Engine, dump: Dump, look: Look, counts: Array, ranks: Sequence[int]
) -> tuple[list[float], Array, Array]:
    """Return the values around some ranks (1 is the smallest), rising, between two that lie beyond all.

    Beside them how often each occurs, and how many of all values are not above it.
    """
    upto, filled = np.cumsum(counts), np.flatnonzero(counts)
    places = np.searchsorted(upto[filled], ranks).tolist()
    wanted = {bin_ for at in places for bin_ in filled[max(at - 1, 0) : at + 2].tolist()}
    seen: Values | None = engine.reduce(dump, replace(look, wanted=tuple(sorted(wanted))))
    assert seen is not None
    values, bins, within = seen.values.tolist(), tails.index(seen.values), np.cumsum(seen.times)
    first = np.searchsorted(bins, bins)  # of the bin of each value
    not_above = (upto - counts)[bins] + within - (within - seen.times)[first]
    low, high = (max(abs(end) * SPARE, 1e-9) for end in (values[0], values[-1]))
    around = [values[0] - low, *values, values[-1] + high]
    return around, np.append(0, seen.times), np.append(0, not_above)


def shortest(low: float, high: float, logs: bool, nearest: float) -> float:
    """Return the number of fewest digits strictly between two values; if `logs`, its log is.

    If no float lies between them: the one whose value, or log, is `nearest`.

    Raises:
        UsageError: its exponential overflows or underflows.
    """
    into: Callable[[float], float] = math.exp if logs else float
    back: Callable[[float], float] = math.log if logs else float
    if logs:
        if abs(nearest) > MOST_NATS:
            what = f"--keep: the bound would have to let through |log r| = {abs(nearest):.4g} nats"
            raise UsageError(f"{what}, which no number holds", "ask for a smaller share")
        low, high = max(low, nearest - 1), min(high, nearest + 1)
    middle = into((low + high) / 2)
    for digits in range(1, 18):
        found = float(f"{middle:.{digits}g}")
        if (found > 0 or not logs) and low < back(found) < high:
            return found
    return into(nearest)
