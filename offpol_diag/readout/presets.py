"""What a report says of one preset."""

from __future__ import annotations

import math

from offpol_diag import correction
from offpol_diag.accumulators import Places
from offpol_diag.aspects import aspects
from offpol_diag.crosswalk import BOOKS
from offpol_diag.formulas import guards
from offpol_diag.formulas import method as in_words
from offpol_diag.metrics import method, normal, residual
from offpol_diag.metrics.formula import missing, plain
from offpol_diag.presets import Preset
from offpol_diag.readout.reading import Readout, typed
from offpol_diag.readout.rows import CONDITIONAL, of_weights
from offpol_diag.summary import Number, Numbers, PresetResult


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


def candidate_metrics(out: Readout, preset: Preset) -> Numbers:
    """Of the weights of a method that could be recommended."""
    return dict(of_weights(preset, out.reader)) | _weight_range(out, preset)


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
        normal.span(typed(out.tally.states["normal.ranges"], Places), out.factors[preset.name], name)
        if preset.name in out.factors
        else out.ranges[name]
    )
    return {
        "weight_min": plain(low, "", "kept tokens", "smallest final weight"),
        "weight_max": plain(high, "", "kept tokens", "largest final weight"),
    }


def _conditional(out: Readout, preset: Preset) -> Numbers:
    """Rows that need advantages, and rows that need the current policy as well."""
    found: Numbers = {}
    for rows, _, needed in CONDITIONAL:
        lacking = [name for name in needed if name not in out.study.columns]
        for row in rows:
            read = out.rows[row.name].get(preset.name)
            found[row.name] = missing(row, lacking) if read is None else read
    return found
