"""Read a finished tally out into the Result: every array is read once, here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from offpol_diag.core import breakdowns, charts, kept_rows
from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import DRIFTS, Drift
from offpol_diag.core.intervals import Formula, Groups, Reader, missing, plain
from offpol_diag.core.study import Study
from offpol_diag.diagnosis.reference import in_dump
from offpol_diag.diagnosis.rows import Rows
from offpol_diag.diagnosis.verdict import diagnose
from offpol_diag.dump.read import Dump
from offpol_diag.engine import (
    gap,
    loglattice,
    method,
    normal,
    policyloss,
    residual,
    selection,
    tails,
)
from offpol_diag.engine.segments import Array
from offpol_diag.engine.selection import SampledGroups
from offpol_diag.engine.tally import ByKey, Tally
from offpol_diag.number import Number, Numbers, finite
from offpol_diag.presets import Preset
from offpol_diag.presets.formulas import method as in_words
from offpol_diag.result import (
    Axis,
    DumpFacts,
    Histogram,
    PresetFacts,
    Result,
    Run,
    Skipped,
    place_of,
)


@dataclass(frozen=True)
class Readout:
    """A tally, each part of which is read once."""

    study: Study
    tally: Tally

    @cached_property
    def reader(self) -> Reader:
        """Sums and their bootstrap replicates."""
        sums = self.tally.whole.read("columns")
        sums |= normal.read(self.batches, self.study.normalised)
        sums |= method.own_denominators(self.study.presets, sums)
        longest = np.array([self.ranges["response"][1]])
        return Reader(sums | {"longest": longest}, Groups.drawn(sums["tokens"], self.groups.many))

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest values by name."""
        return ranges(self.tally)

    @cached_property
    def groups(self) -> SampledGroups:
        """The sample of groups, kept for counts that are not sums."""
        return SampledGroups.read(self.tally.by_key["groups"])

    @cached_property
    def at_lag_0(self) -> dict[str, Number]:
        """Preset → what it keeps of policy lag 0, where that was asked for."""
        names = [preset.name for preset in self.study.presets]
        return selection.read_at_lag_0(self.reader, names) if self.study.lag_0 else {}

    @cached_property
    def rows(self) -> dict[str, dict[str, Number]]:
        """Metric → preset → number, for presets whose columns were summed."""
        return dict(of_presets(self.study.presets, self.reader))

    @property
    def batches(self) -> ByKey:
        """Sums per trainer batch, of presets whose weights are normalised there."""
        return self.tally.by_key["batches"]

    @cached_property
    def factors(self) -> dict[str, dict[str, float]]:
        """Preset → trainer batch → the factor that its weights are divided by."""
        return normal.factors(self.batches, self.study.normalised)


def ranges(tally: Tally) -> dict[str, tuple[float, float]]:
    """Return name → smallest and largest value."""
    each = tally.whole.read("ranges").items()
    return {name: (-minus, high) for name, (minus, high) in ((name, x.tolist()) for name, x in each)}


# ---------------------------------------------------------------- what was read


def facts(dump: Dump, tally: Tally, made: Sequence[str] = ()) -> DumpFacts:
    """Describe the rows read and skipped; `made` are notes on columns computed from others."""
    skipped = dump.seen.skipped
    return DumpFacts(
        **counts(tally),
        files=list(dump.info.files),
        given=list(dump.info.given),
        rows=dump.seen.rows,
        columns=dict(dump.info.columns),
        others=list(dump.info.others),
        ignored=list(dump.info.ignored),
        prompts=dump.info.prompts,
        provenance=dict(dump.info.provenance),
        skipped=Skipped(count=skipped.count, examples=skipped.examples),
        notes=[*dump.notes, *made],
    )


def counts(tally: Tally) -> dict[str, Any]:
    """Compute the fields of `DumpFacts` that a tally determines."""
    whole, groups = tally.whole, SampledGroups.read(tally.by_key["groups"])
    sums = whole.read("columns")
    tokens, sequences = (round(float(sums[name][0])) for name in ("tokens", "sequences"))
    return {
        "sequences": sequences,
        "tokens": tokens,
        "masked_tokens": round(float(tally.state.counts["masked"][0])),
        "groups": groups.many,
        "groups_exact": not groups.full,
        "mean_length": tokens / sequences,
        "max_length": int(ranges(tally)["length"][1]),
    }


# ---------------------------------------------------------------- the whole


@np.errstate(all="ignore")
def summary(study: Study, tally: Tally, presets: Sequence[Preset], facts: DumpFacts, run: Run) -> Result:
    """Read out every number of the report, and diagnose."""
    out = Readout(study, tally)
    axes, at_places = places(out)
    found = {preset.name: preset_numbers(out, preset) for preset in presets}
    numbers = {f"preset/{name}": own for name, own in found.items() if own}
    result = Result(
        dump=facts,
        numbers={"dump": metrics(out)} | numbers | at_places,
        axes=axes,
        presets=same_as({preset.name: preset_facts(out, preset) for preset in presets}, found),
        histograms={f"{drift.prefix}log_ratio": histogram(out, drift) for drift in study.drifts},
        worst=kept_rows.worst(tally.state),
        run=run,
    )
    state = replace(tally.state, largest=tally.state.largest | tally.whole.largest)
    drawn = charts.Drawn(state, study.seed, study.drifts, study.families, out.reader, result)
    main = result.histograms[f"{study.main.prefix}log_ratio"]
    main.in_sync = charts.in_sync(drawn, main.edges)
    result.lengths = charts.lengths(drawn)
    result.charts = charts.charts_of(drawn)
    sample = kept_rows.sample(tally.state)
    result.diagnosis = diagnose(result, sample)
    if "reference" in sample.values:
        result.reference = in_dump(Rows.sampled(sample), facts.provenance, facts.columns)
    return result


# ---------------------------------------------------------------- the drifts, whatever the preset


def metrics(out: Readout) -> Numbers:
    """Read out the policy gap and the uncorrected ratios for drift 1, drift 2 and the total."""
    result: Numbers = {}
    for drift in DRIFTS:
        if drift in out.study.drifts:
            result |= _gap(out, drift)
            continue
        lacking = [column for column in drift.columns if column not in out.study.columns]
        rows = (*gap.ROWS, gap.SURROGATE, gap.CHI2_SEQUENCE, tails.ESS_TOKENS, tails.ESS_SEQUENCES)
        result |= {drift.prefix + row.name: missing(row, lacking) for row in rows}
    row, known = gap.REWARD, "reward" in out.reader.drawn
    return result | {row.name: out.reader.number(row) if known else missing(row, ["rewards"])}


def _gap(out: Readout, drift: Drift) -> Numbers:
    result = {drift.prefix + row.name: out.reader.number(row, drift.prefix) for row in gap.ROWS}
    result[drift.prefix + gap.SURROGATE.name] = (
        out.reader.number(gap.SURROGATE, drift.prefix)
        if "advantages" in out.study.columns
        else missing(gap.SURROGATE, ["advantages"])
    )
    for name, source, pick, unit, over, text in gap.EXTREMES:
        result[drift.prefix + name] = plain(pick(*out.ranges[drift.prefix + source]), unit, over, text)
    high = {name: pair[1] for name, pair in out.ranges.items()}
    result |= tails.numbers(out.reader, out.tally.whole, drift, high)
    if drift.denominator == "old":
        for name, text in gap.SECOND_DRIFT.items():
            key = drift.prefix + name
            result[key] = replace(result[key], formula=text)
    khat = result[f"{drift.prefix}khat_tokens"]
    overflow = float(out.reader.column("overflow", drift.prefix)[0]) / float(out.reader.drawn["tokens"][0])
    for name, qualify in MEANS_OF_RATIOS.items():
        number = qualify(result[drift.prefix + name], khat)
        result[drift.prefix + name] = replace(number, clamped=overflow)  # by the overflow guard
    for name in WEIGHED if overflow else ():
        result[drift.prefix + name] = replace(result[drift.prefix + name], clamped=overflow)
    for name, column in PERPLEXITIES.items():
        result[drift.prefix + name] = _guarded(
            result[drift.prefix + name], out, drift.prefix + column, "sequences", 2 * LARGEST
        )
    return result


def _guarded(number: Number, out: Readout, column: str, per: str, largest: float) -> Number:
    """Add the share of terms that the overflow guard bounded: each of them adds e^`largest` to the sum."""
    total, terms = (float(out.reader.drawn[name][0]) for name in (column, per))
    if not terms > 0 or not math.exp(largest) * (1 - 1e-9) <= total < math.inf:
        return number
    hits = min(math.floor(total / math.exp(largest) * (1 + 1e-9)), terms)
    return replace(number, clamped=hits / terms)


WEIGHED = ("ess_tokens", "max_weight_share", "k3_top1_share")
"""Numbers of drifts that compare tokens' r, or k3, with each other."""
PERPLEXITIES = {"ppl_train": "ppl_p", "ppl_rollout": "ppl_q", "ppl_ratio": "ppl_ratio"}
"""Mean over sequences of an exponential → its column."""


MEANS_OF_RATIOS = {
    "mean_ratio": tails.doubt,
    "chi2_token": tails.doubt,
    "k3": tails.caution,
    "tv": tails.caution,
    "mult_prob_error": tails.caution,
}
"""Means over tokens of quantities that grow like r → the function that qualifies them under a heavy tail."""


def histogram(out: Readout, drift: Drift) -> Histogram:
    """Count Δ in whole tokens, in bins that reach from the smallest Δ to the largest.

    Bins are about equally wide within the 0.01% and 99.99% quantiles, and grow by a quarter each beyond;
    their edges are edges of the lattice that Δ was counted on, so that no count is interpolated.
    """
    counts = out.tally.whole.sums[f"{drift.prefix}bins.d"]
    title, unit = f"log-ratio, {drift.title}", "nats"
    if not counts.any():
        return Histogram(title=title, unit=unit, edges=[0.0], counts=[])
    low, high = (finite(float(end)) for end in out.ranges[f"{drift.prefix}d"])
    reach = max(abs(loglattice.quantile(counts, q)) for q in (1e-4, 1 - 1e-4)) or 1e-6
    fine = loglattice.edges()
    occupied = np.flatnonzero(counts)
    first, last = int(occupied[0]), int(occupied[-1]) + 1
    at = np.unique(np.searchsorted(fine, _edges(reach, max(-low, high, reach))))
    inner = at[(at > first) & (at < last)]
    below = np.concatenate(([0.0], np.cumsum(counts)))
    cuts = [first, *inner, last]
    ends = [low, high] if low < high else fine[[first, last]].tolist()
    return Histogram(
        title=title,
        unit=unit,
        edges=[ends[0], *fine[inner].tolist(), ends[1]],
        counts=[round(count) for count in np.diff(below[cuts]).tolist()],
    )


BINS = 81
"""Number of about equally wide bins."""
GROWTH = 1.25
"""Factor by which each bin beyond the equal ones is wider than the one before it."""


def _edges(reach: float, furthest: float) -> Array:
    """Compute target edges, rising and symmetric: equal steps within ±reach, growing ones to ±furthest."""
    tails = [reach]
    while tails[-1] < furthest:
        tails.append(tails[-1] * GROWTH)
    beyond = np.array(tails[1:])
    inner = np.linspace(-reach, reach, BINS + 1)
    return np.concatenate((-beyond[::-1], inner, beyond))


# ---------------------------------------------------------------- one preset


def of_presets(presets: Sequence[Preset], reader: Reader) -> Iterator[tuple[str, dict[str, Number]]]:
    """Yield each metric with the numbers of all presets that carry an interval.

    Events that a preset's rules make impossible are not counted as rare events, so that their 0 is exact.
    """
    idle = {preset.name: method.idle(preset) for preset in presets}
    names = list(idle)
    rows = [(row, names) for row in (*method.ROWS, *residual.ROWS)]
    with_loss = [name for name in names if f"{name}|loss" in reader.drawn]
    rows += [(row, with_loss) for row in policyloss.ROWS]
    for row, whose in rows:
        result: dict[str, Number] = {}
        alike: dict[Formula, list[str]] = {}
        for name in whose:
            alike.setdefault(method.row_of(row, idle[name]), []).append(name)
        for read, some in alike.items():
            result |= zip(some, reader.numbers(read, [f"{name}|" for name in some]), strict=True)
        yield row.name, result


def places(out: Readout) -> tuple[dict[str, Axis], dict[str, Numbers]]:
    """Read out every axis, and by subject the numbers at its places, also those requested with `by_step`."""
    study, tally, groups = out.study, out.tally, out.reader.groups.many
    whole = bool(study.by_step)
    every = breakdowns.locations(tally.state, study.seed, study.group_by, whole, study.kept)
    numbers = {
        place_of(axis, place): own
        for axis, (found, each) in every.items()
        for place, own in zip(found.places, each, strict=True)
    }
    for lengths, name, dropped in selection.read_by_octave(tally.by_key["dropped"], study.presets, groups):
        numbers[place_of("length", lengths, f"preset/{name}")] = {selection.DROPPED.name: dropped}
    if "steps" in tally.by_key and "step" in every:
        asked = breakdowns.by_step(readers_by_step(out), study.presets, study.by_step)
        for step in every["step"][0].places:
            for subject, own in asked.get(step, {}).items():
                at = place_of("step", step, subject)
                numbers[at] = {**own, **numbers.get(at, {})}
    return {axis: found for axis, (found, _) in every.items()}, numbers


def readers_by_step(out: Readout) -> Iterator[tuple[str, Reader]]:
    """Yield every training step with the sums of all columns there."""
    study, groups = out.study, out.reader.groups.many
    divisible = {label: one.read("columns") for label, one in out.batches.items()} if study.normalised else {}
    for label, one in out.tally.by_key["steps"].items():
        sums = one.read("columns")
        if own := divisible.get(label):
            for preset in study.normalised:
                sums |= normal.rescaled(own, preset)
        sums |= method.own_denominators(study.presets, sums)
        many = min(groups, round(float(sums["sequences"][0])))
        yield label, Reader(sums, Groups.drawn(sums["tokens"], many))


def preset_facts(out: Readout, preset: Preset) -> PresetFacts:
    """Say what one preset is."""
    return PresetFacts(
        summary=preset.summary,
        policy=preset.policy,
        method=in_words(preset),
        loss=preset.loss,
        family=preset.family,
        aliases=list(preset.aliases),
        logs=preset.logs,
        needs=preset.lacking(out.study.columns),
    )


def preset_numbers(out: Readout, preset: Preset) -> Numbers:
    """Read out one preset's numbers, none if it needs a column; others name the columns that they need."""
    if preset.lacking(out.study.columns):
        return {}
    result = {row.name: out.rows[row.name][preset.name] for row in (*method.ROWS, *residual.ROWS)}
    result |= _weight_range(out, preset)
    lacking = [name for name in policyloss.NEEDED if name not in out.study.columns]
    for row in policyloss.ROWS:
        read = out.rows[row.name].get(preset.name)
        result[row.name] = missing(row, lacking) if read is None else read
    result |= {name: _bounded(result[name], out, f"{preset.name}|") for name in BOUNDED}
    for name, (column, per, largest) in GUARDED.items():
        prefix = f"{preset.name}|"
        result[name] = _guarded(result[name], out, prefix + column, prefix + per, largest)
    fresh = out.at_lag_0.get(preset.name)
    return result if fresh is None else result | {selection.AT_LAG_0.name: fresh}


BOUNDED = ("weight_mean", "weight_std", "ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence")
"""Numbers computed from the weights, which a preset's safety bound may have changed."""


GUARDED = {
    "k3": ("residual_k3", "kept", LARGEST),
    "ppl_ratio": ("residual_ppl", "residual_left", 2 * LARGEST),
}
"""Numbers of a preset whose terms the overflow guard bounds → their sum, of how many, and the bound's log."""


def _bounded(number: Number, out: Readout, prefix: str) -> Number:
    """Add the share of weights on which the safety bound acted."""
    hits, tries = (float(out.reader.column(name, prefix)[0]) for name in ("bounded", "tries"))
    known = 0 <= hits <= tries and 0 < tries < math.inf
    return replace(number, clamped=hits / tries if known else None)


def _weight_range(out: Readout, preset: Preset) -> Numbers:
    low, high = (
        normal.span(out.batches, out.factors[preset.name], preset.name)
        if preset.name in out.factors
        else out.ranges[f"{preset.name}|weight"]
    )
    return {
        "weight_min": plain(low, "", "tokens not rejected", "smallest final weight"),
        "weight_max": plain(high, "", "tokens not rejected", "largest final weight"),
    }


def same_as(presets: Mapping[str, PresetFacts], numbers: Mapping[str, Numbers]) -> dict[str, PresetFacts]:
    """Name in each preset the first one with the same numbers on this dump."""
    first: dict[tuple[object, ...], str] = {}
    result = {}
    for name, one in presets.items():
        key = tuple((metric, number.value, number.interval) for metric, number in numbers[name].items())
        earlier = first.setdefault(key, name) if key else name
        result[name] = one if earlier == name else one.model_copy(update={"same_as": earlier})
    return result
