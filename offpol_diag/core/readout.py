"""From what was kept of a dump to its `Result`: every number is read once, here.

A metric is a `Formula` over sums. A `Reader` computes it from the sums and from their 512 bootstrap
replicates, and makes the `Number` with its interval. What makes a number doubtful is
added to it: a heavy tail as a note, terms that a safety bound held as the share `clamped`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offpol_diag.core import breakdowns, charts, gap, preset_numbers, tails
from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import DRIFTS, Drift
from offpol_diag.core.intervals import known, missing
from offpol_diag.core.state import State
from offpol_diag.core.study import Readout
from offpol_diag.dump.read import Dump
from offpol_diag.number import Number, Numbers
from offpol_diag.presets import Preset
from offpol_diag.presets.words import method as in_words
from offpol_diag.result import DumpFacts, PresetFacts, Result, Run, WorstSequence


@np.errstate(all="ignore")
def summary(out: Readout, presets: Sequence[Preset], facts: DumpFacts, run: Run) -> Result:
    """Read out every number of the report.

    Args:
        out: what was kept of the dump.
        presets: those that were asked for, also such as lack a column.
        facts: what was read.
        run: how it was computed.
    """
    axes, at_places = breakdowns.places(out)
    of_presets = {f"preset/{preset.name}": of_preset(out, preset) for preset in presets}
    numbers = {"dump": of_dump(out)} | {of: some for of, some in of_presets.items() if some} | at_places
    result = Result(
        dump=facts,
        subjects=numbers,
        axes=axes,
        lengths=charts.lengths(out),
        presets={
            preset.name: PresetFacts(
                summary=preset.summary,
                policy=preset.policy,
                method=in_words(preset),
                loss=preset.loss,
                kind=preset.kind,
                aliases=list(preset.aliases),
                needs=preset.lacking(out.study.columns),
            )
            for preset in presets
        },
        worst=out.state.records["worst"].read(WorstSequence),
        run=run,
    )
    result.charts = charts.charts_of(out, result)
    return result


def facts(dump: Dump, state: State, made: Sequence[str] = ()) -> DumpFacts:
    """Describe the rows read and skipped; `made` are notes on columns computed from others."""
    sums, seen = state.tables["dump"].sums(), dump.seen
    tokens, sequences = (round(sums[name]) for name in ("tokens", "sequences"))
    return DumpFacts(
        sequences=sequences,
        tokens=tokens,
        masked_tokens=round(float(state.counts["masked"][0])),
        groups=state.many,
        groups_exact=state.counted,
        files=list(dump.files),
        given=list(dump.given),
        rows=seen.rows,
        columns=dict(dump.columns),
        others=list(dump.others),
        ignored=list(dump.ignored),
        provenance=dict(dump.provenance),
        skipped=seen.skipped,
        skipped_examples=seen.examples,
        above_0=dict(seen.above),
        notes=[*dump.notes, *made],
    )


# ---------------------------------------------------------------- the dump, whatever the preset

MEANS_OF_RATIOS = {
    **dict.fromkeys(("mean_ratio", "chi2_token"), tails.HEAVY),
    **dict.fromkeys(("k3", "tv", "mult_prob_error"), tails.FEW_DECIDE),
}
"""Means over tokens of what grows like r → the note on them under a heavy tail."""
WEIGHED = ("ess_tokens", "max_weight_share", "k3_top1_share")
"""Numbers that compare tokens' r, or k3, with each other."""
PERPLEXITIES = ("ppl_train", "ppl_rollout", "ppl_ratio")
"""Means over sequences of an exponential."""


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
    row, there = gap.REWARD, "reward" in out.reader.drawn
    return result | {row.name: out.reader.number(row) if there else missing(row, ["rewards"])}


def _of_drift(out: Readout, drift: Drift) -> Numbers:
    """Read out one drift, by names without its prefix."""
    prefix, reader, row = drift.prefix, out.reader, gap.SURROGATE
    result = {one.name: reader.number(one, prefix) for one in gap.ROWS}
    there = "advantages" in out.study.columns
    result[row.name] = reader.number(row, prefix) if there else missing(row, ["advantages"])
    for one in gap.EXTREMES:
        value = one.of(lambda name: np.array(out.state.ranges[prefix + name]))
        result[one.name] = known(one.blank, float(value))
    result |= tails.numbers(out.reader, out.state, drift)
    for name, text in gap.SECOND_DRIFT.items() if drift.denominator == "old" else ():
        result[name] = replace(result[name], formula=text)
    held = reader.sum(f"{prefix}overflow") / reader.sum("tokens")  # the share of tokens whose r is clipped
    for name, note in MEANS_OF_RATIOS.items():
        number = tails.qualified(result[name], result["khat_tokens"], int(reader.sum("tokens")), note)
        result[name] = replace(number, clamped=held)
    for name in WEIGHED if held else ():
        result[name] = replace(result[name], clamped=held)
    for name in PERPLEXITIES:
        result[name] = _held(result[name], reader.sum(prefix + name), reader.sum("sequences"), 2 * LARGEST)
    return result


def _held(number: Number, total: float, terms: float, largest: float) -> Number:
    """Add the share of terms that the overflow guard held: each of them adds e^`largest` to the sum."""
    if not terms > 0 or not math.exp(largest) * (1 - 1e-9) <= total < math.inf:
        return number
    hits = min(math.floor(total / math.exp(largest) * (1 + 1e-9)), terms)
    return replace(number, clamped=hits / terms)


# ---------------------------------------------------------------- presets

BOUNDED = ("weight_mean", "weight_std", "ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence")
"""Numbers computed from the weights, which a preset's safety bound may have changed."""


def of_preset(out: Readout, preset: Preset) -> Numbers:
    """Read out one preset's numbers, none if it needs a column; others name the columns that they need."""
    if preset.lacking(out.study.columns):
        return {}
    name, lacking = preset.name, [one for one in preset_numbers.NEEDED if one not in out.study.columns]
    ends = np.array(preset_numbers.weight_range(out.state, preset))
    result = {row.name: missing(row, lacking) for row in (*preset_numbers.ROWS, *preset_numbers.LOSSES)}
    result |= preset_numbers.numbers(out.reader, preset)
    result |= {row.name: known(row.blank, float(row.of(lambda _: ends))) for row in preset_numbers.EXTREMES}
    columns = ("bounded", "tries", "kept", "left", "k3", "ppl")
    hits, tries, kept, left, k3, ppl = (out.reader.sum(f"{name}|{one}") for one in columns)
    share = hits / tries if 0 <= hits <= tries and 0 < tries < math.inf else None
    result |= {metric: replace(result[metric], clamped=share) for metric in BOUNDED}
    result["k3"] = _held(result["k3"], k3, kept, LARGEST)
    result["ppl_ratio"] = _held(result["ppl_ratio"], ppl, left, 2 * LARGEST)
    at_lag_0 = breakdowns.at_lag_0(out, preset)
    return result | ({preset_numbers.AT_LAG_0.name: at_lag_0} if at_lag_0 else {})
