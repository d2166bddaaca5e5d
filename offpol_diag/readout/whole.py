"""Every number of the report, from a finished tally."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offpol_diag import candidates
from offpol_diag.accumulators import Best, Places, Sums
from offpol_diag.diagnosis import diagnose
from offpol_diag.metrics import bystep, prefixes, where
from offpol_diag.metrics.prefixes import Prefixes
from offpol_diag.metrics.sample import Sample
from offpol_diag.presets import Preset
from offpol_diag.readout.gaps import histogram, metrics
from offpol_diag.readout.presets import candidate_metrics, preset_result
from offpol_diag.readout.reading import Readout, typed
from offpol_diag.summary import DumpFacts, Location, Numbers, Run, Summary, Worst
from offpol_diag.tally import Study, Tally


def summary(study: Study, tally: Tally, presets: Sequence[Preset], facts: DumpFacts, run: Run) -> Summary:
    """Every number of the report, and the diagnosis."""
    out = Readout(study, tally)
    by = where.locations(_places(tally), out.reader.groups, study.group_by, whole=bool(study.by_step))
    by |= _asked(out, by)
    found = Summary(
        dump=facts,
        metrics=metrics(out),
        presets={preset.name: preset_result(out, preset) for preset in presets},
        by=by,
        lengths=prefixes.lengths(out.reader, typed(tally.states["prefixes"], Prefixes)),
        weights=_weights(out),
        histograms={f"{drift.prefix}log_ratio": histogram(out, drift) for drift in study.drifts},
        worst=Worst(
            sequences=[row for _, row in typed(tally.states["worst.sequences"], Best).records],
            tokens=[row for _, row in typed(tally.states["worst.tokens"], Best).records],
        ),
        run=run,
    )
    sample = tally.states.get("sample")
    seen = diagnose(found, sample) if isinstance(sample, Sample) else None
    return found.model_copy(update={"diagnosis": seen})


def _weights(out: Readout) -> dict[str, Numbers]:
    """Numbers of the weights of every correction that can be recommended, by its name."""
    return {
        preset.name.removeprefix(candidates.MARK): candidate_metrics(out, preset)
        for preset in out.study.candidates
    }


def _asked(out: Readout, by: Mapping[str, Location]) -> dict[str, Location]:
    """The steps with the numbers that are asked for by step."""
    steps, found = out.tally.states.get("steps"), by.get("step")
    if steps is None or found is None:
        return {}
    numbers = bystep.numbers(
        typed(steps, Places), out.normal, out.study.presets, out.study.by_step, out.reader.groups
    )
    places = [place.model_copy(update={"asked": numbers.get(place.key, {})}) for place in found.places]
    return {"step": found.model_copy(update={"places": places})}


def _places(tally: Tally) -> dict[str, Places[Sums] | Sums]:
    return {
        name.removeprefix("where."): state
        for name, state in tally.states.items()
        if isinstance(state, Places | Sums) and name.startswith("where.")
    }


def factors(study: Study, tally: Tally) -> dict[str, dict[str, float]]:
    """What batch normalisation divides the weights by, per preset that normalises and trainer batch."""
    return Readout(study, tally).factors
