"""From what was kept of a dump to its `Result`: every number is read once, here.

A metric is a `Formula` over sums. A `Reader` computes it from the sums and from their 512 bootstrap
replicates, which are drawn here, and makes the `Number` with its interval. What makes a number doubtful is
added to it: a heavy tail as a note, terms that a safety bound held as the share `clamped`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from offpol_diag.core import breakdowns, charts, gap, kept_rows, preset_numbers, tails
from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import DRIFTS, Drift
from offpol_diag.core.intervals import Reader, missing, plain
from offpol_diag.core.state import Array, State
from offpol_diag.core.study import Study
from offpol_diag.diagnosis.decide import diagnose
from offpol_diag.diagnosis.reference import in_dump
from offpol_diag.diagnosis.rows import Rows
from offpol_diag.dump.read import Dump
from offpol_diag.number import Number, Numbers, finite
from offpol_diag.presets import Preset
from offpol_diag.presets.words import method as in_words
from offpol_diag.result import Axis, DumpFacts, Histogram, PresetFacts, Result, Run, Skipped, place_of


@dataclass(frozen=True)
class Readout:
    """What was kept of a dump, with the sums of its replicates, which are drawn once."""

    study: Study
    state: State

    @cached_property
    def reader(self) -> Reader:
        """Sums of the dump, and their replicates."""
        found = Reader.of(self.state.tables["dump"], self.study.seed, self.state.many)
        normalised = preset_numbers.drawn(self.state, self.study.presets, self.study.seed)
        longest = np.array([self.state.ranges["response"][1]])
        return replace(found, drawn={**found.drawn, **normalised, "longest": longest})

    @cached_property
    def presets(self) -> dict[str, dict[str, Number]]:
        """Metric → preset → number, of what is made of sums."""
        return preset_numbers.numbers(self.reader, self.study.presets)

    @cached_property
    def factors(self) -> dict[str, dict[str, float]]:
        """Preset → trainer batch → the factor that its weights are divided by."""
        return preset_numbers.factors(self.state, self.study.presets)

    @cached_property
    def at_lag_0(self) -> dict[str, Number]:
        """Preset → what it keeps of policy lag 0, where that was asked for."""
        return preset_numbers.at_lag_0(self.state, self.study.presets, self.study.seed, self.state.many)

    def sum(self, column: str) -> float:
        """Return the sum of a column over the dump."""
        return float(self.reader.drawn[column][0])


@np.errstate(all="ignore")
def summary(study: Study, state: State, presets: Sequence[Preset], facts: DumpFacts, run: Run) -> Result:
    """Read out every number of the report, and diagnose.

    Args:
        study: what was measured.
        state: what was kept of the dump.
        presets: those that were asked for, also such as lack a column.
        facts: what was read.
        run: how it was computed.
    """
    out = Readout(study, state)
    axes, at_places = places(out)
    found = {preset.name: of_preset(out, preset) for preset in presets}
    result = Result(
        dump=facts,
        numbers={"dump": of_dump(out)}
        | {f"preset/{name}": numbers for name, numbers in found.items() if numbers}
        | at_places,
        axes=axes,
        presets={preset.name: described(out, preset) for preset in presets},
        histograms={f"{drift.prefix}log_ratio": histogram(out, drift) for drift in study.drifts},
        worst=kept_rows.worst(state),
        run=run,
    )
    first: dict[object, str] = {}
    for name, numbers in found.items():
        key = tuple((metric, one.value, one.interval) for metric, one in numbers.items())
        if (earlier := first.setdefault(key, name) if key else name) != name:
            result.presets[name].same_as = earlier
    drawn = charts.Drawn(state, study.seed, study.drifts, study.families, out.reader, result)
    main = result.histograms[f"{study.main.prefix}log_ratio"]
    main.in_sync = charts.in_sync(drawn, main.edges)
    result.lengths = charts.lengths(drawn)
    result.charts = charts.charts_of(drawn)
    sample: kept_rows.Sample = state.records["sample"].read()
    result.diagnosis = diagnose(result, sample)
    if "reference" in sample.values:
        result.reference = in_dump(Rows.sampled(sample), facts.provenance, facts.columns)
    return result


def facts(dump: Dump, state: State, made: Sequence[str] = ()) -> DumpFacts:
    """Describe the rows read and skipped; `made` are notes on columns computed from others."""
    sums, info, skipped = state.tables["dump"].sums(), dump.info, dump.seen.skipped
    tokens, sequences = (round(sums[name]) for name in ("tokens", "sequences"))
    return DumpFacts(
        sequences=sequences,
        tokens=tokens,
        masked_tokens=round(float(state.counts["masked"][0])),
        groups=state.many,
        groups_exact=state.counted,
        mean_length=tokens / sequences,
        max_length=int(state.ranges["length"][1]),
        files=list(info.files),
        given=list(info.given),
        rows=dump.seen.rows,
        columns=dict(info.columns),
        others=list(info.others),
        ignored=list(info.ignored),
        prompts=info.prompts,
        provenance=dict(info.provenance),
        skipped=Skipped(count=skipped.count, examples=skipped.examples),
        notes=[*dump.notes, *made],
    )


# ---------------------------------------------------------------- the dump, whatever the preset

MEANS_OF_RATIOS = {
    "mean_ratio": tails.doubt,
    "chi2_token": tails.doubt,
    "k3": tails.caution,
    "tv": tails.caution,
    "mult_prob_error": tails.caution,
}
"""Means over tokens of what grows like r → the function that qualifies them under a heavy tail."""
WEIGHED = ("ess_tokens", "max_weight_share", "k3_top1_share")
"""Numbers that compare tokens' r, or k3, with each other."""
PERPLEXITIES = {"ppl_train": "ppl_p", "ppl_rollout": "ppl_q", "ppl_ratio": "ppl_ratio"}
"""Mean over sequences of an exponential → its column."""


def of_dump(out: Readout) -> Numbers:
    """Read out the policy gap and the uncorrected ratios for drift 1, drift 2 and the total."""
    result: Numbers = {}
    for drift in DRIFTS:
        if drift in out.study.drifts:
            result |= {drift.prefix + name: number for name, number in _of_drift(out, drift).items()}
            continue
        lacking = [column for column in drift.columns if column not in out.study.columns]
        rows = (*gap.ROWS, gap.SURROGATE, gap.CHI2_SEQUENCE, tails.ESS_TOKENS, tails.ESS_SEQUENCES)
        result |= {drift.prefix + row.name: missing(row, lacking) for row in rows}
    row, known = gap.REWARD, "reward" in out.reader.drawn
    return result | {row.name: out.reader.number(row) if known else missing(row, ["rewards"])}


def _of_drift(out: Readout, drift: Drift) -> Numbers:
    """Read out one drift, by names without its prefix."""
    prefix, row = drift.prefix, gap.SURROGATE
    result = {one.name: out.reader.number(one, prefix) for one in gap.ROWS}
    known = "advantages" in out.study.columns
    result[row.name] = out.reader.number(row, prefix) if known else missing(row, ["advantages"])
    for one in gap.EXTREMES:
        value = one.of(*out.state.ranges[prefix + one.column])
        result[one.name] = plain(value, one.unit, one.over, one.text)
    of_tails = tails.numbers(out.reader, out.state, drift, out.study.seed)
    result |= {name.removeprefix(prefix): number for name, number in of_tails.items()}
    for name, text in gap.SECOND_DRIFT.items() if drift.denominator == "old" else ():
        result[name] = replace(result[name], formula=text)
    held = out.sum(f"{prefix}overflow") / out.sum("tokens")  # the share of tokens whose r is held
    for name, qualified in MEANS_OF_RATIOS.items():
        result[name] = replace(qualified(result[name], result["khat_tokens"]), clamped=held)
    for name in WEIGHED if held else ():
        result[name] = replace(result[name], clamped=held)
    for name, column in PERPLEXITIES.items():
        result[name] = _held(result[name], out.sum(prefix + column), out.sum("sequences"), 2 * LARGEST)
    return result


def _held(number: Number, total: float, terms: float, largest: float) -> Number:
    """Add the share of terms that the overflow guard held: each of them adds e^`largest` to the sum."""
    if not terms > 0 or not math.exp(largest) * (1 - 1e-9) <= total < math.inf:
        return number
    hits = min(math.floor(total / math.exp(largest) * (1 + 1e-9)), terms)
    return replace(number, clamped=hits / terms)


# ---------------------------------------------------------------- Δ in bins

BINS = 81
"""Number of about equally wide bins."""
GROWTH = 1.25
"""Factor by which each bin beyond the equal ones is wider than the one before it."""


def histogram(out: Readout, drift: Drift) -> Histogram:
    """Count Δ in whole tokens, in bins that reach from the smallest Δ to the largest.

    Bins are about equally wide within the 0.01% and 99.99% quantiles, and grow by a quarter each beyond;
    their edges are edges of the lattice that Δ was counted on, so that no count is interpolated.
    """
    counts = out.state.counts[f"{drift.prefix}bins.d"]
    title, unit = f"log-ratio, {drift.title}", "nats"
    if not counts.any():
        return Histogram(title=title, unit=unit, edges=[0.0], counts=[])
    low, high = (finite(float(end)) for end in out.state.ranges[f"{drift.prefix}d"])
    reach = max(abs(tails.quantile(counts, q)) for q in (1e-4, 1 - 1e-4)) or 1e-6
    fine = tails.edges()
    occupied = np.flatnonzero(counts)
    first, last = int(occupied[0]), int(occupied[-1]) + 1
    at = np.unique(np.searchsorted(fine, _edges(reach, max(-low, high, reach))))
    inner = at[(at > first) & (at < last)]
    below = np.concatenate(([0.0], np.cumsum(counts)))
    ends = [low, high] if low < high else fine[[first, last]].tolist()
    return Histogram(
        title=title,
        unit=unit,
        edges=[ends[0], *fine[inner].tolist(), ends[1]],
        counts=[round(count) for count in np.diff(below[[first, *inner, last]]).tolist()],
    )


def _edges(reach: float, furthest: float) -> Array:
    """Compute target edges, rising and symmetric: equal steps within ±reach, growing ones to ±furthest."""
    beyond = [reach]
    while beyond[-1] < furthest:
        beyond.append(beyond[-1] * GROWTH)
    outer = np.array(beyond[1:])
    return np.concatenate((-outer[::-1], np.linspace(-reach, reach, BINS + 1), outer))


# ---------------------------------------------------------------- presets

BOUNDED = ("weight_mean", "weight_std", "ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence")
"""Numbers computed from the weights, which a preset's safety bound may have changed."""


def of_preset(out: Readout, preset: Preset) -> Numbers:
    """Read out one preset's numbers, none if it needs a column; others name the columns that they need."""
    if preset.lacking(out.study.columns):
        return {}
    name, lacking = preset.name, [one for one in preset_numbers.NEEDED if one not in out.study.columns]
    result = {row.name: out.presets[row.name][name] for row in preset_numbers.ROWS}
    low, high = preset_numbers.weight_range(out.state, preset, out.factors.get(name, {}))
    result["weight_min"] = plain(low, "", "tokens not rejected", "smallest final weight")
    result["weight_max"] = plain(high, "", "tokens not rejected", "largest final weight")
    for row in preset_numbers.LOSSES:
        result[row.name] = out.presets[row.name].get(name) or missing(row, lacking)
    hits, tries, kept, left = (out.sum(f"{name}|{one}") for one in ("bounded", "tries", "kept", "left"))
    share = hits / tries if 0 <= hits <= tries and 0 < tries < math.inf else None
    result |= {metric: replace(result[metric], clamped=share) for metric in BOUNDED}
    result["k3"] = _held(result["k3"], out.sum(f"{name}|k3"), kept, LARGEST)
    result["ppl_ratio"] = _held(result["ppl_ratio"], out.sum(f"{name}|ppl"), left, 2 * LARGEST)
    return result | ({preset_numbers.AT_LAG_0.name: out.at_lag_0[name]} if name in out.at_lag_0 else {})


def described(out: Readout, preset: Preset) -> PresetFacts:
    """Say what one preset is."""
    return PresetFacts(
        summary=preset.summary,
        policy=preset.policy,
        method=in_words(preset),
        loss=preset.loss,
        kind=preset.kind,
        aliases=list(preset.aliases),
        needs=preset.lacking(out.study.columns),
    )


# ---------------------------------------------------------------- places


def places(out: Readout) -> tuple[dict[str, Axis], dict[str, Numbers]]:
    """Read out every axis, and by subject the numbers at its places, also those requested with `by_step`."""
    study, state, whole = out.study, out.state, bool(out.study.by_step)
    every = breakdowns.locations(state, study.seed, study.group_by, whole)
    numbers = {
        place_of(axis, place): own
        for axis, (found, each) in every.items()
        for place, own in zip(found.places, each, strict=True)
    }
    for octave, name, number in preset_numbers.by_octave(state, study.presets, study.seed, state.many):
        at = place_of("length", breakdowns.of_octave(str(octave)), f"preset/{name}")
        numbers[at] = {preset_numbers.DROPPED.name: number}
    asked = breakdowns.by_step(_at_steps(out), study.presets, study.by_step) if whole else {}
    for step in every["step"][0].places if "step" in every else ():
        for subject, own in asked.get(step, {}).items():
            at = place_of("step", step, subject)
            numbers[at] = {**own, **numbers.get(at, {})}
    return {axis: found for axis, (found, _) in every.items()}, numbers


def _at_steps(out: Readout) -> Iterator[tuple[str, Reader]]:
    """Yield every training step with the sums of all columns there."""
    study, tables = out.study, out.state.tables
    batches = tables["batches"].by_place() if study.normalised else {}
    for step, table in tables["steps"].by_place().items():
        reader = Reader.of(table, study.seed, out.state.many)
        drawn, apart = dict(reader.drawn), batches[step].drawn(study.seed) if step in batches else {}
        for preset in study.normalised:
            drawn |= preset_numbers.divided(apart, preset) if apart else {}
        yield step, replace(reader, drawn=drawn)
