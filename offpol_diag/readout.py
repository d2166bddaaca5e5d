"""From a finished tally to the Summary: every state is read once, here."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from offpol_diag import correction, evidence, loglattice
from offpol_diag.accumulators import Best, Counts, Extremes, GroupSample, Places, State, Sums
from offpol_diag.aspects import aspects
from offpol_diag.crosswalk import BOOKS
from offpol_diag.crosswalk.spread import Read
from offpol_diag.formulas import guards
from offpol_diag.formulas import method as in_words
from offpol_diag.metrics import (
    bystep,
    gap,
    method,
    normal,
    policyloss,
    residual,
    selection,
    tails,
    update,
    where,
)
from offpol_diag.metrics.alignment import Folds
from offpol_diag.metrics.formula import Formula, Reader, missing, plain
from offpol_diag.metrics.gap import DRIFTS, Drift
from offpol_diag.metrics.selection import Grid
from offpol_diag.presets import Preset
from offpol_diag.readers import Dump
from offpol_diag.summary import (
    DumpFacts,
    Histogram,
    Location,
    Number,
    Numbers,
    PresetResult,
    Run,
    Skipped,
    Summary,
    Worst,
)
from offpol_diag.tally import Study, Tally


@dataclass(frozen=True)
class Readout:
    """A tally, its states under their types."""

    study: Study
    tally: Tally

    @cached_property
    def reader(self) -> Reader:
        """Sums and replicates."""
        sums = _typed(self.tally.states["sums"], Sums).read()
        sums |= normal.read(self.normal, self.study.normalised)
        sums |= method.own_denominators(self.study.presets, sums)
        longest = torch.tensor([self.ranges["response"][1]], dtype=torch.float64)
        return Reader(sums | {"longest": longest}, self.groups.groups)

    @cached_property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Extremes by name."""
        return _typed(self.tally.states["ranges"], Extremes).read()

    @cached_property
    def groups(self) -> GroupSample:
        """The sample of groups."""
        return _typed(self.tally.states["group"], GroupSample)

    @cached_property
    def selected(self) -> dict[str, Numbers]:
        """Whom each preset drops."""
        found = selection.numbers(_typed(self.tally.states["length"], Grid), self.groups)
        return {preset.name: numbers for preset, numbers in zip(self.study.presets, found, strict=True)}

    @cached_property
    def rows(self) -> dict[str, dict[str, Number]]:
        """Row → preset → its number, of those whose columns were summed."""
        return dict(_of_presets(self))

    @property
    def normal(self) -> Places[Sums]:
        """Sums per trainer batch of presets that are normalised in it."""
        return _typed(self.tally.states["normal"], Places)

    @cached_property
    def factors(self) -> dict[str, dict[str, float]]:
        """Preset → trainer batch → what its weights are divided by."""
        return normal.factors(self.normal, self.study.normalised)

    @cached_property
    def logged(self) -> Read:
        """What the crosswalk reads."""
        both = {**_typed(self.tally.states["logged"], Sums).read(), **self.reader.sums}
        both |= normal.norms(self.normal, self.study.normalised)
        return Read({name: float(values.numpy()[0]) for name, values in both.items()}, self.ranges)


S = TypeVar("S")


def _typed(state: State, kind: type[S]) -> S:
    assert isinstance(state, kind)
    return state


def summary(study: Study, tally: Tally, presets: Sequence[Preset], facts: DumpFacts, run: Run) -> Summary:
    """Every number of the report."""
    out = Readout(study, tally)
    by = where.locations(_places(tally), out.reader.groups, study.group_by, whole=bool(study.by_step))
    by |= _asked(out, by)
    folds = _typed(tally.states["alignment"], Folds)
    batch = study.update or evidence.per_update(by.get("step"), facts.sequences)
    return Summary(
        dump=facts,
        metrics=metrics(out),
        presets={preset.name: preset_result(out, preset) for preset in presets},
        by=by,
        alignment=evidence.alignment(folds, study.side, study.columns, batch),
        histograms={f"{drift.prefix}log_ratio": histogram(out, drift) for drift in study.drifts},
        worst=Worst(
            sequences=[row for _, row in _typed(tally.states["worst.sequences"], Best).records],
            tokens=[row for _, row in _typed(tally.states["worst.tokens"], Best).records],
        ),
        run=run,
    )


def _asked(out: Readout, by: Mapping[str, Location]) -> dict[str, Location]:
    """The steps with the numbers that are asked for by step."""
    steps, found = out.tally.states.get("steps"), by.get("step")
    if steps is None or found is None:
        return {}
    numbers = bystep.numbers(
        _typed(steps, Places), out.normal, out.study.presets, out.study.by_step, out.reader.groups
    )
    places = [place.model_copy(update={"asked": numbers.get(place.key, {})}) for place in found.places]
    return {"step": found.model_copy(update={"places": places})}


def facts(dump: Dump, tally: Tally, made: Sequence[str] = ()) -> DumpFacts:
    """What was read, what was left out, and what was `made` of it."""
    skipped = dump.skipped
    return DumpFacts(
        **counts(tally),
        files=list(dump.info.files),
        rows=dump.info.rows,
        columns=dict(dump.info.columns),
        provenance=dict(dump.info.provenance),
        skipped=Skipped(count=skipped.count, examples=[str(example) for example in skipped.examples]),
        notes=[*dump.notes, *made],
    )


def counts(tally: Tally) -> dict[str, Any]:
    """Those facts that a tally knows, by their names in `DumpFacts`."""
    sums = _typed(tally.states["sums"], Sums).read()
    groups = _typed(tally.states["group"], GroupSample)
    tokens, sequences = (round(float(sums[name][0])) for name in ("tokens", "sequences"))
    return {
        "sequences": sequences,
        "tokens": tokens,
        "masked_tokens": round(float(_typed(tally.states["logged"], Sums).read()["masked"][0])),
        "groups": groups.groups,
        "groups_exact": not groups.full,
        "mean_length": tokens / sequences,
        "max_length": int(_typed(tally.states["ranges"], Extremes).read()["length"][1]),
    }


def metrics(out: Readout) -> Numbers:
    """The policy gap and the raw weights, for drift 1, drift 2 and the total."""
    found: Numbers = {}
    for drift in DRIFTS:
        known = drift in out.study.drifts
        found |= _gap(out, drift) if known else _unknown(drift, out.study.columns)
    return found


def _gap(out: Readout, drift: Drift) -> Numbers:
    found = {drift.prefix + row.name: out.reader.number(row, drift.prefix) for row in gap.ROWS}
    for name, source, pick, unit, over, text in gap.EXTREMES:
        found[drift.prefix + name] = plain(pick(*out.ranges[drift.prefix + source]), unit, over, text)
    high = {name: pair[1] for name, pair in out.ranges.items()}
    found |= tails.numbers(out.reader, out.tally.states, drift, high)
    return _cautioned(found, out, drift)


MEANS_OF_RATIOS = {
    "mean_ratio": tails.doubt,
    "chi2_token": tails.doubt,
    "k3": tails.caution,
    "tv": tails.caution,
    "mult_prob_error": tails.caution,
}
"""Means over tokens of something that grows like r, and what a heavy tail makes of them."""


def _cautioned(found: Numbers, out: Readout, drift: Drift) -> Numbers:
    """Say where the tail of r cannot be trusted, and how often the overflow guard acted."""
    khat = found[f"{drift.prefix}khat_tokens"]
    overflow = float(out.reader.column("overflow", drift.prefix)[0]) / float(out.reader.sums["tokens"][0])
    for name, judge in MEANS_OF_RATIOS.items():
        number = judge(found[drift.prefix + name], khat)
        found[drift.prefix + name] = number.model_copy(update={"clamped": overflow})
    return found


def _unknown(drift: Drift, columns: frozenset[str]) -> Numbers:
    lacking = [column for column in drift.columns if column not in columns]
    rows: list[Formula] = [*gap.ROWS, gap.CHI2_SEQUENCE, tails.ESS_TOKENS, tails.ESS_SEQUENCES]
    return {drift.prefix + row.name: missing(row, lacking) for row in rows}


def preset_result(out: Readout, preset: Preset) -> PresetResult:
    """One preset's part of the Summary."""
    needs = correction.needs(preset, set(out.study.columns))
    result = PresetResult(
        summary=preset.summary,
        policy=preset.policy,
        method=in_words(preset),
        loss=preset.loss,
        family=preset.family,
        denominator=preset.denominator,
        guards=list(guards(preset)),
        aspects=aspects(preset),
        applied=preset.apply,
        aliases=list(preset.aliases),
        trainers=list(preset.trainers),
        source=preset.source,
        note=preset.note,
        logs=preset.logs,
        needs=needs,
    )
    if needs:
        return result
    logged = BOOKS[preset.logs].logged(preset, out.logged) if preset.logs in BOOKS else {}
    return result.model_copy(update={"metrics": preset_metrics(out, preset), "as_logged": _finite(logged)})


def _finite(logged: dict[str, float]) -> dict[str, float | None]:
    return {name: value if abs(value) < float("inf") else None for name, value in logged.items()}


def preset_metrics(out: Readout, preset: Preset) -> Numbers:
    """Everything of §5 for one preset."""
    prefix = f"{preset.name}|"
    found = {row.name: out.rows[row.name][preset.name] for row in (*method.ROWS, *residual.ROWS)}
    found |= _weight_range(out, preset)
    found |= _conditional(out, preset)
    found |= {name: _bounded(found[name], out, prefix) for name in BOUNDED}
    return found | out.selected[preset.name]


BOUNDED = ("weight_mean", "weight_std", "ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence")
"""Numbers of the weights, on which a preset's safety bound may have acted."""


def _bounded(number: Number, out: Readout, prefix: str) -> Number:
    """The number with the share of weights on which the safety bound acted."""
    hits, tries = (float(out.reader.column(name, prefix)[0]) for name in ("bounded", "tries"))
    known = 0 <= hits <= tries and 0 < tries < math.inf
    return number.model_copy(update={"clamped": hits / tries if known else None})


def _weight_range(out: Readout, preset: Preset) -> Numbers:
    name = f"{preset.name}|weight"
    low, high = (
        normal.span(_typed(out.tally.states["normal.ranges"], Places), out.factors[preset.name], name)
        if preset.name in out.factors
        else out.ranges[name]
    )
    return {
        "weight_min": plain(low, "", "kept tokens", "smallest final weight"),
        "weight_max": plain(high, "", "kept tokens", "largest final weight"),
    }


CONDITIONAL: tuple[tuple[tuple[Formula, ...], str, tuple[str, ...]], ...] = (
    (method.SIGN_ROWS, "positive", ("advantages",)),
    (update.ROWS, "update", ("advantages",)),
    (policyloss.ROWS, "loss", ("current_log_probs", "advantages")),
)
"""Rows, a column that is there where they can be read, and what the dump needs for it."""


def _rows(out: Readout) -> Iterator[tuple[Formula, list[str]]]:
    """Every row, and the presets whose columns it reads were summed."""
    names = [preset.name for preset in out.study.presets]
    yield from ((row, names) for row in (*method.ROWS, *residual.ROWS))
    for rows, column, _ in CONDITIONAL:
        have = [name for name in names if f"{name}|{column}" in out.reader.sums]
        yield from ((row, have) for row in rows)


def _of_presets(out: Readout) -> Iterator[tuple[str, dict[str, Number]]]:
    """Each row's numbers; what cannot happen is not counted, so that its 0 is exact."""
    idle = {preset.name: method.idle(preset) for preset in out.study.presets}
    for row, names in _rows(out):
        found: dict[str, Number] = {}
        for exact in (False, True):
            some = [name for name in names if (row.name in idle[name]) is exact]
            read = replace(row, counts=row.counts and not exact)
            found |= zip(some, out.reader.numbers(read, [f"{name}|" for name in some]), strict=True)
        yield row.name, found


def _conditional(out: Readout, preset: Preset) -> Numbers:
    """Rows that need advantages, and rows that need the current policy as well."""
    found: Numbers = {}
    for rows, _, needed in CONDITIONAL:
        lacking = [name for name in needed if name not in out.study.columns]
        for row in rows:
            read = out.rows[row.name].get(preset.name)
            found[row.name] = missing(row, lacking) if read is None else read
    return found


def factors(study: Study, tally: Tally) -> dict[str, dict[str, float]]:
    """What batch normalisation divides the weights by, per preset that normalises and trainer batch."""
    return Readout(study, tally).factors


def _places(tally: Tally) -> dict[str, Places[Sums] | Sums]:
    return {
        name.removeprefix("where."): state
        for name, state in tally.states.items()
        if isinstance(state, Places | Sums) and name.startswith("where.")
    }


def histogram(out: Readout, drift: Drift, bins: int = 81) -> Histogram:
    """Δ over equal bins that span its 0.01 % to 99.99 % quantiles; the outermost take what lies beyond."""
    counts = _typed(out.tally.states[f"{drift.prefix}bins.d"], Counts).counts.cpu()
    reach = max(abs(loglattice.quantile(counts, q)) for q in (1e-4, 1 - 1e-4)) or 1e-6
    edges = torch.linspace(-reach, reach, bins + 1, dtype=torch.float64)
    fine = loglattice.edges()
    below = torch.cat((torch.zeros(1, dtype=torch.float64), torch.cumsum(counts, 0)))
    at = torch.searchsorted(fine, edges).clamp(1, len(fine) - 1)
    share = ((edges - fine[at - 1]) / (fine[at] - fine[at - 1])).clamp(0, 1)
    cumulative = below[at - 1] + share * (below[at] - below[at - 1])
    cumulative[0], cumulative[-1] = 0.0, below[-1]
    return Histogram(
        title=f"log-ratio, {drift.title}",
        unit="nats",
        edges=edges.tolist(),
        counts=cumulative.diff().clamp(min=0).tolist(),
    )


def peak_rss() -> int:
    """The most memory this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
