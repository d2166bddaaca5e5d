"""The verdict: what is counted, then what fits, weights, honest causes; else what may be and what decides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from offpol_diag.core.intervals import Z
from offpol_diag.core.kept_rows import Sample
from offpol_diag.core.observe import Examined
from offpol_diag.diagnosis.cause import Found
from offpol_diag.diagnosis.causes.group import GroupFault, places
from offpol_diag.diagnosis.causes.sampling import Identities, other_base
from offpol_diag.diagnosis.causes.weights import DIGESTS
from offpol_diag.diagnosis.locate import locate
from offpol_diag.diagnosis.numbers import HEALTHY_K3, Evidence
from offpol_diag.diagnosis.recorded import MOST_EXCUSED, recorded
from offpol_diag.diagnosis.reference import in_dump
from offpol_diag.diagnosis.registry import CANDIDATES, CAUSES
from offpol_diag.diagnosis.rows import MACHINES, Known, Rows, measured, percent
from offpol_diag.diagnosis.seen import OUTLYING, ROUNDED, Seen
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, rounded, say
from offpol_diag.result import After, CandidateCause, Cause, Diagnosis, Example, Result

TOKENS = 64
"""Fewest tokens for a diagnosis."""
ERRORS, BLUNT = 0.02, 0.1
"""Largest standard error of E[r] at which the identities can rule out a temperature or top-p, and from which
too few tokens tell a bug from a mismatch."""
MISPLACED = 0.3
"""Share of sequences from which a fault of alignment leaves rows that look like other faults."""
MOST = 3
"""Most candidates that are listed."""


class Findings(NamedTuple):
    """The findings in order, and the rows after all repairs."""

    found: tuple[Found, ...]
    rest: Rows


# ---------------------------------------------------------------- what is found


def search(rows: Rows) -> Findings:
    """Look for every bug in order, each in the rows as the one before would leave them repaired."""
    found: list[Found] = []
    for cause in CAUSES:
        ids = {one.id for one in found}
        if rows.tokens < TOKENS // 2 or cause.kind == "honest":
            break
        if any(rows.column(name)[0] is None for name in cause.needs if name != "token_ids"):
            continue
        if ("token_ids" in cause.needs and rows.ids is None) or cause.id in ids:
            continue
        if cause.id in HIDDEN and any(map(_misplaced, found)):
            continue
        if "repetition_penalty" in ids and (cause.kind == "sampled" or cause.id == "long_context"):
            continue  # its repair leaves out tokens by how likely they are: of the others E[r] is not 1
        one = cause.look(rows)
        if one is None or one.id in ids or not one.helps or (found and one.alone):
            continue
        found.append(one)
        if one.repaired is not None and not one.repaired.tokens:
            return Findings((one,), one.repaired)  # a column without a log-prob: nothing else is to be seen
        if one.repaired is not None and one.repaired.tokens >= TOKENS // 4:
            rows = one.repaired
    return Findings(tuple(one for one in found if not _side_effect(one, found)), rows)


HIDDEN = ("retokenization", "long_context", "special_token")
"""Causes that rows which stay misaligned look like."""


def _misplaced(one: Found) -> bool:
    """Return whether a finding leaves many rows misaligned."""
    return one.id in ("off_by_one", "row_permutation", "wrong_context") and one.sequences.mean() > MISPLACED


def _side_effect(one: Found, found: Sequence[Found]) -> bool:
    """Return whether another finding explains one: a shift the values that it moves in from padding, say."""
    ids = {other.id for other in found}
    if one.id == "off_by_one" and "retokenization" in ids and one.sequences.mean() < 0.35:
        return True  # sequences that break at their first tokens
    if one.id == "boundary" and one.words.get("place") == "the first token" and "wrong_context" in ids:
        return True  # it differs most after another prompt
    moved = next((other for other in found if other.id in ("off_by_one", "row_permutation")), None)
    affected = ("sentinel", "wrong_mask", "boundary", "row_permutation")
    if moved is None or one is moved or one.id not in affected:
        return False
    if not (one.exact and _misplaced(moved)) and not moved.sequences.all():
        names, others = (
            [each.rows.column("sequence_id")[i] for i in np.flatnonzero(each.sequences)]
            for each in (one, moved)
        )
        if np.mean([name in others for name in names]) <= 0.4:
            return False
    if one.id == "row_permutation" or not one.exact:
        return True
    rows = one.rows
    if moved.id == "row_permutation":
        return bool(np.mean(rows.from_end[one.tokens] < rows.lengths[rows.owner[one.tokens]] - 1) > 0.5)
    return bool(np.mean(np.minimum(*rows.edges)[one.tokens] < int(moved.words["lag"])) > 0.7)


def by_group(rows: Rows, seen: Findings) -> Found | None:
    """Find a fault of one group: a cause found only in its sequences, or a mismatch larger than elsewhere."""
    fault = GroupFault()
    group = fault.group(rows)
    if group is None:
        return None
    without = rows.only(~group.at)
    others = {one.id for one in search(without).found}
    for one in search(rows.only(group.at)).found:
        mended = one.repaired is None or one.id not in ("special_token", "boundary")
        if not mended and one.repaired is not None:  # is the group then like the others?
            mended = bool(np.median(one.repaired.level) < 2.5 * np.median(without.level))
        if one.id not in others and mended:
            words = {**one.words, "after": "without these sequences"}
            rest = {"repaired": without, "exact": one.exact, "words": words, "where": group.where}
            return one.cause.of_sequences(one.evidence, rows, group.at, **rest)
    return None if seen.found else fault.stands_out(rows, group)


# ---------------------------------------------------------------- the verdict


def diagnosed(found: Examined) -> Result:
    """Return the numbers of a dump with the verdict, and that of three where it has reference log-probs."""
    result, sample = found.summary(), found.sample
    result.diagnosis = diagnose(result, sample)
    if "reference" in sample.values:
        result.reference = in_dump(Rows.sampled(sample), result.dump.provenance, result.dump.columns)
    return result


def diagnose(summary: Result, sample: Sample | None) -> Diagnosis:
    """Return the verdict, causes with evidence, ruled-out or undecidable ones, and where the mismatch lives.

    Args:
        summary: the numbers of the dump.
        sample: a sample of its sequences, token by token; None if there is none.
    """
    rows = Rows.sampled(sample) if sample is not None and len(sample.lengths) else None
    if rows is None or rows.tokens < TOKENS:
        many = summary.dump.tokens
        return Diagnosis(verdict="cannot_tell", headline=f"{many:,} tokens are too few to tell.")
    size = {"sequences": rows.sequences, "tokens": rows.tokens}
    if not rows.delta.any():
        headline = (
            "The two columns hold the same numbers, token for token: was one copied from the other? Engines "
            "that agree to the last bit exist; then this is what to expect."
        )
        return Diagnosis(verdict="cannot_tell", headline=headline, **size)
    return _diagnosed(summary, rows).model_copy(update={"where": locate(rows)})


def _diagnosed(summary: Result, rows: Rows) -> Diagnosis:
    """Return the verdict on tokens that differ."""
    numbers = Evidence(summary)
    rows = replace(rows, known=_known(summary, numbers, rows))
    seen = search(rows)
    found = [replace(one, where=next(places(one.rows, one.sequences), "")) for one in seen.found]
    grouped = by_group(rows, seen)
    if grouped is not None and not any(one.where for one in found):
        same = [one.id == grouped.id for one in found]
        if any(same):
            found[same.index(True)] = grouped
        elif not found:
            found.append(grouped)
    if not found:
        alone = (one.look_alone(seen.rest) for one in CAUSES)
        found = [one for one in alone if one is not None and one.helps][:1]
    judged = _judged(numbers, rows, seen.rest, found, [*_positive(summary), *map(_cause, found)])
    share = seen.rest.once(Seen).share
    if share is None:
        return judged
    systematic = Number(
        value=share.value,
        interval=(share.low, share.high),
        unit="fraction",
        over="variance of min(r, 2)",
        formula="what tokens of one kind (a token id after another) have in common",
    )
    return judged.model_copy(update={"systematic": systematic})


def _known(summary: Result, numbers: Evidence, rows: Rows) -> Known:
    """Return what the dump says as a whole."""
    lag, k3 = summary.charts.lag, numbers.number("k3")
    synced = (lag.in_sync if lag else k3) or Number()
    least, lowest = (one.interval[0] if one.interval else one.value for one in (k3, synced))
    small = least is not None and least <= HEALTHY_K3 and numbers.value("k3") <= HEALTHY_K3
    lone = rows.k3_cut.mean() <= HEALTHY_K3  # a single outlier is an alert, not a verdict
    healthy = (small or bool(lone)) and not numbers.value("f_2") > 2 * HEALTHY_K3
    said = recorded(summary.dump.provenance)
    return Known(said, numbers.errors("surrogate_gain"), lowest, healthy, healthy and not small)


def _positive(summary: Result) -> Iterator[Cause]:
    """Yield the cause for positive log-probs, if the reader noted any."""
    notes = [note for note in summary.dump.notes if "no log-probabilities" in note]
    if notes:
        yield Cause(
            id="sentinel",
            statement="A log-prob column holds positive values, which no log-probability can be.",
            statistic=" ".join(notes),
            violates="log-probs are at most 0",
            exact=True,
            confirm="look at the rows named in the note, in the trainer's tensors",
            fix="log log-softmax values of the sampled token, in float32",
        )


def _judged(
    numbers: Evidence, rows: Rows, rest: Rows, found: Sequence[Found], bugs: list[Cause]
) -> Diagnosis:
    """Return the verdict; `rest` is what is left after all repairs."""
    missing = {
        "raw log-probs in both columns beside a temperature or top-p: needs the column entropy": rows.entropy,
        "single tokens that are scored differently: needs the column token_ids": rows.ids,
        "stale weights or weights that do not arrive: needs the column policy_lag": rest.once(
            Seen
        ).recorded_lags
        or None,
    }
    known: dict[str, Any] = {
        "undecidable": [question for question, column in missing.items() if column is None],
        "sequences": rows.sequences,
        "tokens": rows.tokens,
    }
    if bugs:
        mended = not any(one.approximate or one.repaired is None for one in found)
        late = any(one.id == "weights_not_synced" for one in bugs)  # then the recorded lags are wrong
        causes = [*bugs, *([] if late else _beside(rest, mended))]
        return Diagnosis(verdict="bug", headline=bugs[0].statement, causes=causes, **known)
    k3, ratio, mean_ratio = numbers.number("k3"), rest.once(Identities.of).ratio, numbers.number("mean_ratio")
    small = k3.value is not None and k3.value < HEALTHY_K3
    if not small and ratio.error > BLUNT:
        headline = (
            f"E[r] = {ratio.value:.3g} ± {ratio.error:.2g}: too few tokens to tell a bug from a mismatch."
        )
        return Diagnosis(verdict="cannot_tell", headline=headline, **known)
    if (base := other_base(rest)) is not None:
        return _undecided(rest, base.rstrip("?"), False, known)
    if off_centre(mean_ratio):
        return _undecided(rest, f"E[r] is {say(mean_ratio)} and not 1", False, known)
    healthy, honest = rest.known.healthy, _honest(rest)
    if honest is None and not healthy:
        return _undecided(
            rest, explained(rest.once(Seen)), ratio.error < ERRORS and not doubted(mean_ratio), known
        )
    size = "as small as rounding makes it" if healthy else "real"
    if rest.known.lone:
        many = int((np.abs(rows.delta) > 1.0).sum())
        size += f", but for {many:,} of {rows.tokens:,} tokens that are off by more than a nat"
    causes = [_cause(honest)] if honest else []
    what = causes[0].statement if causes else ""
    return Diagnosis(
        verdict="healthy" if healthy else "honest_mismatch",
        headline=f"{what} Nothing points to a logging bug, and the mismatch is {size}.".strip(),
        causes=causes,
        ruled_out=_ruled_out({cause.id for cause in causes}),
        **known,
    )


def _honest(rows: Rows) -> Found | None:
    """Return the honest cause that the dump records or that has a shape of its own, or None."""
    able = [one for one in CAUSES if one.kind == "honest"]
    if rows.once(Seen).inexcusable:  # outliers of a healthy dump may be, too
        able = [one for one in able if one.id == "numerics" and rows.known.healthy]
    looked = (one.look(rows) for one in able)
    return next((one for one in looked if one is not None), None)


def _beside(rows: Rows, mended: bool) -> list[Cause]:
    """Return the honest cause beside a bug: one that the dump records, in rows that are mended."""
    if rows.tokens < TOKENS or not rows.delta.any():
        return []
    unmoved = replace(rows, known=replace(rows.known, moved=None))  # advantages are of the numbers as logged
    recorded = {"stale"} | ({"quantized_rollout"} if mended else set())
    looked = (one.look(unmoved) for one in CAUSES if one.id in recorded)
    return [_cause(one) for one in looked if one is not None][:1]


CENTRED, SURELY = 0.005, 3.29 / Z
"""|E[r] − 1| up to which rounding may move it (kernels stay below 0.002), and half width of a 99.9% interval
in that of a 95% one: one healthy dump in a thousand is doubted."""


def off_centre(ratio: Number) -> bool:
    """Return whether E[r] is not 1 beyond doubt: tokens were not sampled from the logged distribution."""
    if ratio.value is None or ratio.interval is None or doubted(ratio):
        return False
    low, high = ratio.interval
    off = ratio.value - 1
    half = high - ratio.value if off < 0 else ratio.value - low
    return abs(off) > max(CENTRED, SURELY * half)


# ---------------------------------------------------------------- where nothing is established


class Measurement(NamedTuple):
    """A measurement that tells some candidates from all others.

    Attributes:
        text: what to do, and what each outcome would mean.
        candidates: ids of the candidates on one side.
        lines: trainer → the line that makes it there.
    """

    text: str
    candidates: frozenset[str]
    lines: Mapping[str, str] = {}


PLAIN = {
    "verl": "actor_rollout_ref.rollout.dtype=bfloat16 actor_rollout_ref.rollout.enforce_eager=True "
    "actor_rollout_ref.rollout.enable_prefix_caching=False",
    "TRL": "trl vllm-serve --dtype bfloat16 --enforce_eager True --enable_prefix_caching False",
    "slime": "--sglang-dtype bfloat16 --sglang-disable-cuda-graph --sglang-disable-radix-cache",
}
"""Trainer → what makes its engine compute in bf16, eager, without prefix cache."""
LAG = {
    name: f"docs/trainers/{name.lower()}.md has a hook that writes it" for name in ("verl", "TRL", "slime")
}
"""Trainer → what writes the policy lag."""
SCORE_TWICE = Measurement(
    "Score the same 64 responses twice with the trainer: if the two scorings differ as much, it is noise "
    "of kernels, the router or dropout; if they are equal, engine and trainer compute different things.",
    frozenset({"moe_outliers", "numerics"}),
)
WRITE_LAG = Measurement(
    "Write policy_lag (or rollout_version and train_version) into the next dump: with stale weights K3 "
    "rises with the lag and is as small as rounding at lag 0; with weights that do not arrive, or any "
    "other cause, it is larger at lag 0 too.",
    frozenset({"stale"}),
    LAG,
)
AT_LAG_0 = Measurement(
    "Write policy_lag for a step whose responses are sampled right after a sync, at lag 0: with stale "
    "weights K3 is as small as rounding there; with any other cause it is larger there too.",
    frozenset({"stale"}),
    LAG,
)
IN_BF16 = Measurement(
    "The same step with the engine in bf16, eager, without prefix cache: if K3 falls to rounding, it was "
    "the precision or a kernel; if it stays, the weights or the texts differ.",
    frozenset({"quantized_rollout", "numerics", "moe_outliers"}),
    PLAIN,
)
CHECKSUM = Measurement(
    "Score the same 64 responses twice, once by the engine as it runs and once by an engine that has "
    "just loaded the trainer's checkpoint: if only the second agrees with the trainer, the weights did "
    "not arrive. Or write the digests of both sides' weights (docs/dumps.md) into the next dump.",
    frozenset({"stale", "weights_not_synced"}),
)


def deciding(seen: Seen, found: Sequence[CandidateCause]) -> Measurement | None:
    """Return the measurement that tells the first candidate from the second, or else from any other."""
    first, *others = [one.id for one in found]
    if seen.noise or seen.outlying:
        return SCORE_TWICE
    able = [
        *([] if seen.recorded_lags else [WRITE_LAG]),
        *([AT_LAG_0] if seen.behind else []),
        IN_BF16,
        CHECKSUM,
    ]
    tells = (
        one for rival in others for one in able if (first in one.candidates) != (rival in one.candidates)
    )
    return next(tells, None) or next((one for one in able if first in one.candidates), None)


def fitting(seen: Seen) -> list[CandidateCause]:
    """Return the causes that fit, the least contradicted first, with what speaks for and against each."""
    order = sorted(
        (one for one in CAUSES if one.statement), key=lambda one: (*CANDIDATES, one.id).index(one.id)
    )
    able = [one for one in order if one.fits(seen)]
    if not able or (not seen.returns and {one.id for one in able} <= {"weights_not_synced"}):
        able = [one for one in order if one in able or one.id in ALWAYS]
    found = []
    for one in able:
        said = [
            [text for says in side if (text := says(seen))] for side in (one.speaks_for, one.speaks_against)
        ]
        recorded = any(text.startswith("The dump says") for text in said[0])
        cause = CandidateCause(
            id=one.id, kind=one.verdict, statement=one.statement, for_=said[0], against=said[1]
        )
        found.append((len(said[1]) - recorded, cause))
    return [cause for _, cause in sorted(found, key=lambda pair: pair[0])][:MOST]


ALWAYS = ("quantized_rollout", "weights_not_synced")
"""Candidates where none fits by its own condition: nothing rules them out."""


def explained(seen: Seen) -> str:
    """Return what has to be explained, in a clause."""
    if seen.inexcusable and seen.rows.known.synced is not None:
        of = seen.recorded.precision if seen.most < MOST_EXCUSED else "a number format"
        at = "K3 at lag 0 is" if seen.recorded_lags else "K3 is"
        return f"{at} above {seen.rows.known.synced:.2g}, and {of} excuses no more than {seen.most:.2g}"
    if seen.returns:
        return "K3 is large at some steps and rounding at others"
    if seen.growth is not None:
        return f"K3 grows {rounded(seen.growth)}-fold over the steps"
    if seen.outlying:
        return "a few tokens differ by much"
    if seen.body.tail >= OUTLYING and seen.body.scale <= ROUNDED:
        return "a part of the tokens differs by much"
    if seen.noise:
        return "the noise of single tokens is larger than rounding makes it"
    return "the tokens differ by more than rounding makes them"


def _undecided(rows: Rows, but: str, tested: bool, known: dict[str, Any]) -> Diagnosis:
    """Return that the dump cannot tell, with the causes that fit.

    Args:
        rows: what is left after all repairs.
        but: what has to be explained, in a clause.
        tested: whether E[r] = 1 could be tested, and holds.
        known: what is known of any verdict.
    """
    seen = rows.once(Seen)
    found = fitting(seen)
    measurement, ids = deciding(seen, found), {one.id for one in found}
    machine = any(MACHINES.search(name.lower()) for name in rows.scalars)
    if ids & {"stale", "weights_not_synced"} and any(None in rows.column(name) for name in DIGESTS):
        lacks = f"whether the engine has the trainer's weights: needs the columns {' and '.join(DIGESTS)}"
        known["undecidable"].append(lacks)
    if "weights_not_synced" in ids and not machine:
        known["undecidable"].append("whether one machine alone has other weights: needs the column host")
    lined_up = "the columns line up" + (" and the sampling is the logged one" if tested else "")
    fit = f"{('no', 'one', 'two', 'three')[len(found)]} cause{' fits' if len(found) == 1 else 's fit'}"
    return Diagnosis(
        verdict="cannot_tell",
        headline=f"Cannot tell from this dump: {lined_up}, but {but}; {fit}.",
        candidates=found,
        decide=measurement.text if measurement else "",
        decide_by=dict(measurement.lines) if measurement else {},
        ruled_out=_ruled_out(ids),
        **known,
    )


def _ruled_out(named: set[str]) -> list[str]:
    return [one.ruled_out for one in CAUSES if one.ruled_out and one.id not in named]


# ---------------------------------------------------------------- as it is kept


def _cause(one: Found) -> Cause:
    """Return a finding as it is kept in the result, its texts filled in."""
    cause = one.cause
    share = one.tokens.mean() if cause.id == "sentinel" else one.sequences.mean()
    side = "engine" if one.words.get("column") == "rollout" else "trainer"
    words = {"share": percent(float(share)), "where": one.where, "side": side, "temperature": "", **one.words}
    statement, confirm, fix = (
        words.get(name, getattr(cause, name)).format(**words) for name in ("sentence", "confirm", "fix")
    )
    if one.where and one.where not in statement:
        statement += f", where {one.where}"
    after, undone = None, words.get("after", cause.after)
    if cause.kind != "honest" and one.repaired is not None and one.repaired.tokens and undone:
        size = measured(one.repaired)
        if np.isfinite(list(size.values())).all():
            after = After(what=undone, tokens=one.repaired.tokens, approximate=one.approximate, **size)
    return Cause(
        id=cause.id,
        kind=cause.verdict,
        statement=statement[0].upper() + statement[1:] + ".",
        statistic=one.evidence,
        violates=cause.violates,
        exact=one.exact,
        where=one.where,
        tokens=int(one.tokens.sum()),
        sequences=int(one.sequences.sum()),
        examples=_examples(one) if cause.kind != "honest" else [],
        confirm=confirm,
        fix=fix,
        after=after,
    )


def _examples(one: Found, most: int = 3) -> list[Example]:
    """Return the worst token of each of a few affected sequences."""
    rows, found, names = one.rows, [], one.rows.column("sequence_id")
    for i in np.flatnonzero(one.sequences)[:most]:
        a, b = int(rows.starts[i]), int(rows.starts[i + 1])
        at = a + int(np.where(one.tokens[a:b], np.abs(rows.delta[a:b]), -1).argmax())
        found.append(
            Example(
                sequence_id=str(names[i] if names[i] is not None else i),
                position=int(rows.position[at]),
                rollout_log_prob=float(rows.q[at]),
                train_log_prob=float(rows.p[at]),
            )
        )
    return found
