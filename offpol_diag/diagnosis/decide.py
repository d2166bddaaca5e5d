"""The verdict: bugs in order, with those found earlier repaired; else an honest cause; else what fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.core.intervals import Z
from offpol_diag.core.kept_rows import Sample
from offpol_diag.core.observe import Examined
from offpol_diag.diagnosis.candidates import deciding, fitting
from offpol_diag.diagnosis.cause import Cause as KnownCause
from offpol_diag.diagnosis.cause import Found
from offpol_diag.diagnosis.causes.sampling import Identities, other_base
from offpol_diag.diagnosis.estimates import percent
from offpol_diag.diagnosis.locate import locate
from offpol_diag.diagnosis.main_gap import HEALTHY_K3, MainGap
from offpol_diag.diagnosis.metadata import Metadata
from offpol_diag.diagnosis.profile import OUTLYING, ROUNDED, Common, Profile
from offpol_diag.diagnosis.reference import in_dump
from offpol_diag.diagnosis.registry import ALONE, BY_ID, CAUSES
from offpol_diag.diagnosis.rows import Rows
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, format_number, rounded
from offpol_diag.result import After, Cause, Diagnosis, Result

TOKENS = 64
"""Fewest tokens for a diagnosis."""
ERRORS, BLUNT = 0.02, 0.1
"""Largest standard error of E[r] at which the identities can rule out a temperature or top-p, and from which
too few tokens tell a bug from a mismatch."""
CENTRED, SURELY = 0.005, 3.29 / Z
"""|E[r] − 1| up to which rounding may move it (kernels stay below 0.002), and half width of a 99.9% interval
in that of a 95% one: one healthy dump in a thousand is doubted."""
EXAMPLES = 3
"""Most examples of a cause."""


def diagnosed(examined: Examined) -> Result:
    """Return the numbers of a dump with the verdict; with reference log-probs, also which side is off."""
    result, sample = examined.summary(), examined.sample
    result.diagnosis = diagnose(result, sample)
    if "reference" in sample.values:
        result.reference = in_dump(Rows.of(sample), result.dump.provenance, result.dump.columns)
    return result


def diagnose(summary: Result, sample: Sample) -> Diagnosis:
    """Return the verdict on the numbers of a dump and a sample of its sequences, token by token.

    With it come causes with evidence, those that cannot be tested, and where the mismatch lives.
    """
    rows, gap = Rows.of(sample), MainGap(summary)
    if rows.tokens < TOKENS:
        few = f"{summary.dump.tokens:,} tokens are too few to tell."
        return Diagnosis(verdict="cannot_tell", headline=few)
    size = {"sequences": rows.sequences, "tokens": rows.tokens}
    if not rows.delta.any():
        same = (
            "The two columns hold the same numbers, token for token: was one copied from the other? Engines "
            "that agree to the last bit exist; then this is what to expect."
        )
        return Diagnosis(verdict="cannot_tell", headline=same, **size)
    rows = _with_known(rows, gap)
    found, rest = search(rows)
    bugs = [*_positive(summary), *map(_as_cause, found)]
    bug = Diagnosis(verdict="bug", headline=bugs[0].statement, causes=bugs) if bugs else None
    pairs = [(cause.title, name) for cause in CAUSES for name in lacking(rows, cause)]
    untested = [f"{title[0].lower()}{title[1:]}: needs the column {name}" for title, name in pairs]
    return (bug or _no_bug(gap, rest)).model_copy(
        update={**size, "undecidable": untested, "where": locate(rows)}
    )


def _with_known(rows: Rows, gap: MainGap) -> Rows:
    """Return the rows with what the numbers and the metadata of the whole dump say."""
    lag, k3 = gap.summary.charts.lag, gap.number("k3")
    synced = (lag.in_sync if lag else k3) or Number()
    least, lowest = (one.interval[0] if one.interval else one.value for one in (k3, synced))
    small = least is not None and least <= HEALTHY_K3 and gap.value("k3") <= HEALTHY_K3
    small = small or bool(rows.k3.mean() <= HEALTHY_K3)  # a single outlier is an alert, not a verdict
    healthy = small and not gap.value("f_2") > 2 * HEALTHY_K3
    metadata = Metadata.of(gap.summary.dump.provenance)
    return replace(rows, metadata=metadata, synced=lowest, healthy=healthy)


def lacking(rows: Rows, cause: KnownCause) -> list[str]:
    """Return the columns that the rows lack and a cause needs."""
    held = {name for name in rows.scalars if rows.column(name)[0] is not None}
    return [name for name in cause.needs if name not in held and (name != "token_ids" or rows.ids is None)]


MISALIGNED = {"off_by_one", "row_permutation", "wrong_context"}
"""Faults of whole rows, beside which only counts are named: what their repair leaves looks like others."""


def search(rows: Rows) -> tuple[list[Found], Rows]:
    """Look for every bug in order, with those found earlier repaired; return the repaired rows, too."""
    found: list[Found] = []
    if other_base(rows):
        return found, rows  # nothing can be seen in such columns
    for cause in CAUSES:
        if cause.kind == "honest" or rows.tokens < TOKENS // 2:
            break
        if lacking(rows, cause):
            continue
        if cause.kind == "sampled" and any(one.cause.kind == "sampled" for one in found):
            continue  # its repair is approximate, or leaves out likely tokens: E[r] is not 1 afterwards
        one, ids = cause.look(rows), {x.cause.id for x in found}
        if one is None or one.cause.id in ids or not one.helps or (ids & MISALIGNED and not one.exact):
            continue
        found.append(one)
        if one.repaired is not None and not one.repaired.tokens:
            return [one], one.repaired  # a column without a log-prob: nothing else is to be seen
        if one.repaired is not None and one.repaired.tokens >= TOKENS // 4:
            rows = one.repaired
    if not found:
        alone = (BY_ID[name].look_alone(rows) for name in ALONE)
        found = [one for one in alone if one is not None and one.helps][:1]
    return found, rows


def _positive(summary: Result) -> list[Cause]:
    """Return the cause of log-probs above 0, which the reader counts."""
    return [
        Cause(
            id="sentinel",
            statement="A log-prob column holds positive values; a log-probability is never positive.",
            statistic=f"{many:,} of {summary.dump.tokens:,} log-probs in {name!r} are above 0",
            exact=True,
            confirm="look at the rows with positive log-probs in the trainer's tensors",
            fix="log log-softmax values of the sampled token, in float32",
        )
        for name, many in summary.dump.above_0.items()
    ]


def _as_cause(found: Found) -> Cause:
    """Return a finding as it is kept in the result, its texts filled in."""
    cause, rows = found.cause, found.rows
    words = {"share": percent(float(found.sequences.mean())), **found.words}
    statement, confirm, fix = (text.format_map(words) for text in (cause.sentence, cause.confirm, cause.fix))
    after, examples, repair = None, [], words.get("after", cause.after)
    if repair and found.repaired is not None and found.repaired.tokens:
        delta = np.clip(found.repaired.delta, -700, 300)  # whose ratios have finite squares
        off = np.expm1(delta)
        after = After(
            what=repair,
            k3=float(np.mean(off - delta)),
            mean_ratio=1 + float(np.mean(off)),
            ess_tokens=float(np.square(1 + off.mean()) / np.square(1 + off).mean()),
            tokens=found.repaired.tokens,
            approximate=found.approximate,
        )
    for i in np.flatnonzero(found.sequences)[:EXAMPLES] if cause.kind != "honest" else ():
        at = int(np.where(found.tokens & (rows.owner == i), np.abs(rows.delta), -1).argmax())
        name, position = str(rows.column("sequence_id")[i]), int(rows.position[at])
        examples.append((name, position, float(rows.q[at]), float(rows.p[at])))
    return Cause(
        id=cause.id,
        kind=cause.verdict,
        statement=statement[0].upper() + statement[1:] + ".",
        statistic=found.evidence,
        exact=found.exact,
        where=words.get("where", ""),
        tokens=int(found.tokens.sum()),
        sequences=int(found.sequences.sum()),
        examples=examples,
        confirm=confirm,
        fix=fix,
        after=after,
    )


# ---------------------------------------------------------------- where no bug is found


def _no_bug(gap: MainGap, rows: Rows) -> Diagnosis:
    """Return the verdict where no bug is found."""
    ratio, mean_ratio, base = rows.once(Identities.of).ratio, gap.number("mean_ratio"), other_base(rows)
    profile, healthy = rows.once(Profile), rows.healthy
    if not gap.value("k3") < HEALTHY_K3 and ratio.error > BLUNT:
        few = f"E[r] = {ratio.value:.3g} ± {ratio.error:.2g}: too few tokens to tell a bug from a mismatch."
        return Diagnosis(verdict="cannot_tell", headline=few)
    if base is not None:
        return _undecided(profile, f"the columns line up, but {base.rstrip('?')}")
    if off_centre(mean_ratio):
        return _undecided(profile, f"the columns line up, but E[r] is {format_number(mean_ratio)} and not 1")
    able = [cause for cause in CAUSES if cause.kind == "honest"]
    if profile.inexcusable:  # outliers of a healthy dump may be, too
        able = [BY_ID["numerics"]] * healthy
    honest = next((found for cause in able if (found := cause.look(rows))), None)
    if honest is None and not healthy:
        tested = ratio.error < ERRORS and not doubted(mean_ratio)
        sampling = " and the sampling is the logged one" if tested else ""
        return _undecided(profile, f"the columns line up{sampling}, but {_unexplained(profile)}")
    causes = [_as_cause(honest)] if honest else []
    statement = f"{causes[0].statement} " if causes else ""
    size = "no larger than rounding explains" if healthy else "real"
    return Diagnosis(
        verdict="healthy" if healthy else "honest_mismatch",
        headline=f"{statement}Nothing points to a logging bug, and the mismatch is {size}.",
        causes=causes,
    )


def off_centre(ratio: Number) -> bool:
    """Return whether E[r] is not 1 beyond doubt: tokens were not sampled from the logged distribution."""
    if ratio.value is None or ratio.interval is None or doubted(ratio):
        return False
    low, high = ratio.interval
    off = ratio.value - 1
    return abs(off) > max(CENTRED, SURELY * (high - ratio.value if off < 0 else ratio.value - low))


def _undecided(profile: Profile, why: str) -> Diagnosis:
    """Return that the dump cannot tell and why, with the causes that fit and what decides between them."""
    found = fitting(profile)
    fit = ("one cause fits", "two causes fit", "three causes fit")[len(found) - 1]
    return Diagnosis(
        verdict="cannot_tell",
        headline=f"Cannot tell from this dump: {why}; {fit}.",
        candidates=found,
        decide=deciding(profile, [candidate.id for candidate in found]),
    )


def _unexplained(profile: Profile) -> str:
    """Return what has to be explained, in a clause."""
    if profile.inexcusable:
        at, what = " at lag 0" if profile.lags else "", profile.metadata.precision or "a number format"
        return f"K3{at} is above {profile.synced:.2g}, and {what} excuses no more than {profile.ceiling:.2g}"
    if profile.course.back:
        return "K3 is large at some steps and rounding at others"
    if profile.course.growth:
        return f"K3 grows {rounded(profile.course.growth)}-fold over the steps"
    if profile.outlying or (profile.usual <= ROUNDED and profile.outliers >= OUTLYING):
        return "some tokens differ by a lot"
    if profile.common == Common.NOISE:
        return "the noise of single tokens is larger than rounding explains"
    return "the tokens differ by more than rounding explains"
