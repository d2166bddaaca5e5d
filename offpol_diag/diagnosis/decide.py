"""The verdict: bugs in order, each in rows mended of those before; else an honest cause; else what fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.core.intervals import Z
from offpol_diag.core.kept_rows import Sample
from offpol_diag.core.observe import Examined
from offpol_diag.diagnosis.cause import Cause as KnownCause
from offpol_diag.diagnosis.cause import Found
from offpol_diag.diagnosis.causes.group import GroupFault
from offpol_diag.diagnosis.causes.sampling import Identities, other_base
from offpol_diag.diagnosis.locate import locate
from offpol_diag.diagnosis.numbers import HEALTHY_K3, Evidence
from offpol_diag.diagnosis.recorded import recorded
from offpol_diag.diagnosis.reference import in_dump
from offpol_diag.diagnosis.registry import CANDIDATES, CAUSES
from offpol_diag.diagnosis.rows import Rows, percent
from offpol_diag.diagnosis.seen import OUTLYING, Seen, holding
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, format_number, rounded
from offpol_diag.result import After, CandidateCause, Cause, Diagnosis, Result

TOKENS = 64
"""Fewest tokens for a diagnosis."""
ERRORS, BLUNT = 0.02, 0.1
"""Largest standard error of E[r] at which the identities can rule out a temperature or top-p, and from which
too few tokens tell a bug from a mismatch."""
CENTRED, SURELY = 0.005, 3.29 / Z
"""|E[r] − 1| up to which rounding may move it (kernels stay below 0.002), and half width of a 99.9% interval
in that of a 95% one: one healthy dump in a thousand is doubted."""
MOST = 3
"""Most candidates that are listed, and most examples of a cause."""


def diagnosed(found: Examined) -> Result:
    """Return the numbers of a dump with the verdict, and that of three where it has reference log-probs."""
    result, sample = found.summary(), found.sample
    result.diagnosis = diagnose(result, sample)
    if "reference" in sample.values:
        result.reference = in_dump(Rows.sampled(sample), result.dump.provenance, result.dump.columns)
    return result


def diagnose(summary: Result, sample: Sample) -> Diagnosis:
    """Return the verdict on the numbers of a dump and a sample of its sequences, token by token.

    With it come causes with evidence, those undecidable, and where the mismatch lives.
    """
    rows = Rows.sampled(sample)
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
    numbers = Evidence(summary)
    rows = _with_known(rows, summary, numbers)
    base = other_base(rows)
    found, rest = ([], rows) if base else search(rows)
    if not found and not base:
        alone = (cause.look_alone(rest) for cause in (GroupFault(), *CAUSES))
        first = next((one for one in alone if one is not None and one.helps), None)
        found = [first] if first else []
    bugs = [*_positive(summary), *map(_cause, found)]
    bug = Diagnosis(verdict="bug", headline=bugs[0].statement, causes=bugs) if bugs else None
    untested = [f"{x.title}: needs the column {name}" for x in CAUSES for name in lacking(rows, x)]
    untested = [text[0].lower() + text[1:] for text in untested]
    more = {**size, "undecidable": untested, "where": locate(rows)}
    return (bug or _no_bug(numbers, rest)).model_copy(update=more)


def _with_known(rows: Rows, summary: Result, numbers: Evidence) -> Rows:
    """Return the rows with what the dump says as a whole."""
    lag, k3 = summary.charts.lag, numbers.number("k3")
    synced = (lag.in_sync if lag else k3) or Number()
    least, lowest = (one.interval[0] if one.interval else one.value for one in (k3, synced))
    small = least is not None and least <= HEALTHY_K3 and numbers.value("k3") <= HEALTHY_K3
    small = small or bool(rows.k3_cut.mean() <= HEALTHY_K3)  # a single outlier is an alert, not a verdict
    healthy = small and not numbers.value("f_2") > 2 * HEALTHY_K3
    return replace(rows, recorded=recorded(summary.dump.provenance), synced=lowest, healthy=healthy)


def lacking(rows: Rows, cause: KnownCause) -> list[str]:
    """Return the columns that the rows lack and a cause needs."""
    held = {name for name in rows.scalars if rows.column(name)[0] is not None}
    return [name for name in cause.needs if name not in held and (name != "token_ids" or rows.ids is None)]


# ---------------------------------------------------------------- what is found


MISALIGNED = {"off_by_one", "row_permutation", "wrong_context"}
"""Faults of whole rows, beside which only counts are said: what their repair leaves looks like others."""


def search(rows: Rows) -> tuple[list[Found], Rows]:
    """Look for every bug in order, each in rows that are repaired of those before; return these rows, too."""
    found: list[Found] = []
    for cause in CAUSES:
        if cause.kind == "honest" or rows.tokens < TOKENS // 2:
            break
        if lacking(rows, cause):
            continue
        if cause.kind == "sampled" and any(one.cause.kind == "sampled" for one in found):
            continue  # its repair is approximate, or leaves out likely tokens: E[r] is not 1 afterwards
        one = cause.look(rows)
        ids = {x.cause.id for x in found}
        if one is None or one.cause.id in ids or not one.helps or (found and one.alone):
            continue
        if not one.exact and ids & MISALIGNED:
            continue
        found.append(one)
        if one.repaired is not None and not one.repaired.tokens:
            return [one], one.repaired  # a column without a log-prob: nothing else is to be seen
        if one.repaired is not None and one.repaired.tokens >= TOKENS // 4:
            rows = one.repaired
    return found, rows


def _positive(summary: Result) -> list[Cause]:
    """Return the cause of log-probs above 0, which the reader counts."""
    return [
        Cause(
            id="sentinel",
            statement="A log-prob column holds positive values, which no log-probability can be.",
            statistic=f"{many:,} of {summary.dump.tokens:,} log-probs in {name!r} are above 0",
            exact=True,
            confirm="look at the rows named in the note, in the trainer's tensors",
            fix="log log-softmax values of the sampled token, in float32",
        )
        for name, many in summary.dump.above_0.items()
    ]


# ---------------------------------------------------------------- where no bug is found


def _no_bug(numbers: Evidence, rest: Rows) -> Diagnosis:
    """Return the verdict where no bug is found; `rest` is what is left after all repairs."""
    ratio, mean_ratio, base = rest.once(Identities.of).ratio, numbers.number("mean_ratio"), other_base(rest)
    seen, healthy = rest.once(Seen), rest.healthy
    if not numbers.value("k3") < HEALTHY_K3 and ratio.error > BLUNT:
        few = f"E[r] = {ratio.value:.3g} ± {ratio.error:.2g}: too few tokens to tell a bug from a mismatch."
        return Diagnosis(verdict="cannot_tell", headline=few)
    if base is not None:
        return _undecided(seen, f"the columns line up, but {base.rstrip('?')}")
    if off_centre(mean_ratio):
        return _undecided(seen, f"the columns line up, but E[r] is {format_number(mean_ratio)} and not 1")
    able = [one for one in CAUSES if one.kind == "honest"]
    if seen.inexcusable:  # outliers of a healthy dump may be, too
        able = [one for one in able if one.id == "numerics" and healthy]
    honest = next((one for cause in able if (one := cause.look(rest))), None)
    if honest is None and not healthy:
        tested = ratio.error < ERRORS and not doubted(mean_ratio)
        sampling = " and the sampling is the logged one" if tested else ""
        return _undecided(seen, f"the columns line up{sampling}, but {_unexplained(seen)}")
    causes = [_cause(honest)] if honest else []
    what = f"{causes[0].statement} " if causes else ""
    size = "as small as rounding makes it" if healthy else "real"
    return Diagnosis(
        verdict="healthy" if healthy else "honest_mismatch",
        headline=f"{what}Nothing points to a logging bug, and the mismatch is {size}.",
        causes=causes,
    )


def off_centre(ratio: Number) -> bool:
    """Return whether E[r] is not 1 beyond doubt: tokens were not sampled from the logged distribution."""
    if ratio.value is None or ratio.interval is None or doubted(ratio):
        return False
    low, high = ratio.interval
    off = ratio.value - 1
    return abs(off) > max(CENTRED, SURELY * (high - ratio.value if off < 0 else ratio.value - low))


def _undecided(seen: Seen, why: str) -> Diagnosis:
    """Return that the dump cannot tell and why, with the causes that fit and what decides between them."""
    found = fitting(seen)
    ids = [one.id for one in found]
    fit = ("no cause fits", "one cause fits", "two causes fit", "three causes fit")[len(ids)]
    return Diagnosis(
        verdict="cannot_tell",
        headline=f"Cannot tell from this dump: {why}; {fit}.",
        candidates=found,
        decide=deciding(seen, *ids),
    )


def _unexplained(seen: Seen) -> str:
    """Return what has to be explained, in a clause."""
    if seen.inexcusable:
        at, what = " at lag 0" if seen.lags else "", seen.recorded.precision or "a number format"
        return f"K3{at} is above {seen.synced:.2g}, and {what} excuses no more than {seen.most:.2g}"
    if seen.course.back:
        return "K3 is large at some steps and rounding at others"
    if seen.course.growth:
        return f"K3 grows {rounded(seen.course.growth)}-fold over the steps"
    if seen.outlying or (seen.close and seen.tail >= OUTLYING):
        return "a part of the tokens differs by much"
    if seen.noise:
        return "the noise of single tokens is larger than rounding makes it"
    return "the tokens differ by more than rounding makes them"


ALWAYS = ("quantized_rollout", "weights_not_synced")
"""Candidates where none fits by its own condition: nothing rules them out."""


def fitting(seen: Seen) -> list[CandidateCause]:
    """Return the causes that fit, the least contradicted first, with what speaks for and against each."""
    known = {one.id: one for one in CAUSES}
    able = [name for name in CANDIDATES if known[name].fits(seen)]
    if not able or (able == ["weights_not_synced"] and not seen.course.back):
        able = [name for name in CANDIDATES if name in able or name in ALWAYS]
    found: list[tuple[int, CandidateCause]] = []
    for one in map(known.__getitem__, able):
        pro, con = holding(seen, one.speaks_for), holding(seen, one.speaks_against)
        sides = {"for_": [*pro.values()][:1], "against": [*con.values()][:1]}
        said = CandidateCause(id=one.id, kind=one.verdict, statement=one.statement, **sides)
        found.append((len(con) - ("quantised" in pro), said))
    return [said for _, said in sorted(found, key=lambda pair: pair[0])][:MOST]


SCORE_TWICE = (
    "Score the same 64 responses twice with the trainer: if the two scorings differ as much, it is noise "
    "of kernels, the router or dropout; if they are equal, engine and trainer compute different things."
)
WRITE_LAG = (
    "Write policy_lag (or rollout_version and train_version) into the next dump: with stale weights K3 "
    "rises with the lag and is as small as rounding at lag 0; with weights that do not arrive, or any "
    "other cause, it is larger at lag 0 too."
)
AT_LAG_0 = (
    "Write policy_lag for a step whose responses are sampled right after a sync, at lag 0: with stale "
    "weights K3 is as small as rounding there; with any other cause it is larger there too."
)
IN_BF16 = (
    "The same step with the engine in bf16, eager, without prefix cache: if K3 falls to rounding, it was "
    "the precision or a kernel; if it stays, the weights or the texts differ."
)
CHECKSUM = (
    "Score the same 64 responses twice, once by the engine as it runs and once by an engine that has "
    "just loaded the trainer's checkpoint: if only the second agrees with the trainer, the weights did "
    "not arrive. Or write the digests of both sides' weights (docs/dumps.md) into the next dump."
)
TELLS = {
    WRITE_LAG: {"stale"},
    AT_LAG_0: {"stale"},
    IN_BF16: {"quantized_rollout", "numerics", "moe_outliers"},
    CHECKSUM: {"stale", "weights_not_synced"},
}
"""Measurement, with what each outcome would mean → the candidates of one outcome."""


def deciding(seen: Seen, first: str, *others: str) -> str:
    """Return the measurement that tells the first candidate from the second, or else from any other."""
    if seen.noise or seen.outlying:
        return SCORE_TWICE
    able = [WRITE_LAG] * (not seen.lags) + [AT_LAG_0] * seen.behind + [IN_BF16, CHECKSUM]
    told = [one for rival in others for one in able if (first in TELLS[one]) != (rival in TELLS[one])]
    return (told + [one for one in able if first in TELLS[one]] + [""])[0]


# ---------------------------------------------------------------- as it is kept


def _cause(one: Found) -> Cause:
    """Return a finding as it is kept in the result, its texts filled in."""
    cause, rows = one.cause, one.rows
    words = {"share": percent(float(one.sequences.mean())), "where": one.where, **one.words}
    statement, confirm, fix = (text.format_map(words) for text in (cause.sentence, cause.confirm, cause.fix))
    after, what = None, words.get("after", cause.after)
    if what and one.repaired is not None and one.repaired.tokens:
        after = _after(what, one.repaired, one.approximate)
    examples = []
    for i in np.flatnonzero(one.sequences)[:MOST] if cause.kind != "honest" else ():
        at = int(np.where(one.tokens & (rows.owner == i), np.abs(rows.delta), -1).argmax())
        name, position = str(rows.column("sequence_id")[i]), int(rows.position[at])
        examples.append((name, position, float(rows.q[at]), float(rows.p[at])))
    return Cause(
        id=cause.id,
        kind=cause.verdict,
        statement=statement[0].upper() + statement[1:] + ".",
        statistic=one.evidence,
        exact=one.exact,
        where=one.where,
        tokens=int(one.tokens.sum()),
        sequences=int(one.sequences.sum()),
        examples=examples,
        confirm=confirm,
        fix=fix,
        after=after,
    )


def _after(what: str, rows: Rows, approximate: bool) -> After:
    """Return K3, E[r] and the ESS of token ratios after a repair."""
    delta = np.clip(rows.delta, -700, 300)  # whose ratios have finite squares
    off = np.expm1(delta)
    mean, ess = float(np.mean(off)), float(np.square(1 + off.mean()) / np.square(1 + off).mean())
    size = {"k3": float(np.mean(off - delta)), "mean_ratio": 1 + mean, "ess_tokens": ess}
    return After(what=what, tokens=rows.tokens, approximate=approximate, **size)
