"""The diagnosis: run all signatures, also by group, and derive the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from offpol_diag.core.intervals import Z
from offpol_diag.core.kept_rows import Sample
from offpol_diag.diagnosis import candidates, definition, honest, laws, sampled, signatures, sync
from offpol_diag.diagnosis import locate as places
from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.numbers import HEALTHY_K3, Evidence
from offpol_diag.diagnosis.recorded import recorded
from offpol_diag.diagnosis.rows import (
    MACHINES,
    Estimate,
    Flags,
    Floats,
    Ints,
    Rows,
    alike,
    measured,
    partitions,
)
from offpol_diag.diagnosis.signatures import Found, percent
from offpol_diag.number import Number
from offpol_diag.numerals import doubted, say
from offpol_diag.result import After, Cause, Diagnosis, Example, Result

SIGNATURES: tuple[Callable[[Rows], Found | None], ...] = (
    laws.storage,
    signatures.sentinels,
    sampled.top1_logged,
    signatures.shifts,
    signatures.turns,
    signatures.permutations,
    sync.digests,
    sampled.repetition_penalty,
    definition.fading,
    signatures.boundaries,
    signatures.contexts,
    signatures.special_tokens,
    signatures.jumps,
    signatures.breaks,
    laws.sampling,
    laws.positions,
)
"""The signatures in the order in which they run, exact ones first; each works on the repaired rows."""
TOKENS = 64
"""Fewest tokens for a diagnosis."""
ERRORS = 0.02
"""Largest standard error of E[r] at which the identities can rule out a temperature or top-p."""


CHOSEN = "repetition_penalty"
"""Cause whose repair leaves out tokens by how likely they are: E[r] of the others is not 1."""


class Findings(NamedTuple):
    """The findings in order, and the rows after all repairs."""

    found: tuple[Found, ...]
    rest: Rows


def run_signatures(rows: Rows) -> Findings:
    """Run all signatures in order, each on the rows repaired by the one before."""
    found: list[Found] = []
    for signature in SIGNATURES:
        if rows.tokens < TOKENS // 2:
            break
        if signature in (signatures.breaks, signatures.jumps, signatures.special_tokens) and any(
            map(_misplaced, found)
        ):
            continue
        if signature is signatures.jumps and any(one.cause == CHOSEN for one in found):
            continue  # the more tokens were penalised, the likelier are the others
        one = signature(rows)
        if one is None or one.cause in {other.cause for other in found}:
            continue
        if found and signature in (laws.sampling, laws.positions):
            alone = one.fields.get("shape", "") in ("", "E")
            if alone or any(other.cause == CHOSEN for other in found):
                continue  # E[r] or K1 alone, beside a fault that may not be mended whole
        found.append(one)
        if one.repaired is not None and not one.repaired.tokens:
            return Findings((one,), one.repaired)  # a column without a log-prob: nothing else is to be seen
        if one.repaired is not None and one.repaired.tokens >= TOKENS // 4:
            rows = one.repaired
    return Findings(tuple(one for one in found if not _side_effect(one, found)), rows)


def _misplaced(one: Found) -> bool:
    """Return whether over 30% of sequences are misaligned; unrepaired ones then look like other faults."""
    return one.cause in ("off_by_one", "row_permutation", "wrong_context") and one.sequences.mean() > 0.3


def _side_effect(one: Found, found: Sequence[Found]) -> bool:
    """Return whether another finding explains one: a shift the values that it moves in from padding, say."""
    if (
        one.cause == "off_by_one"
        and "retokenization" in {other.cause for other in found}
        and one.sequences.mean() < 0.35
    ):
        return True  # sequences that break at their first tokens
    if (
        one.cause == "boundary"
        and one.fields.get("place") == "the first token"
        and "wrong_context" in {other.cause for other in found}
    ):
        return True  # it differs most after another prompt
    moved = next((other for other in found if other.cause in ("off_by_one", "row_permutation")), None)
    affected = ("sentinel", "wrong_mask", "boundary", "row_permutation")
    if moved is None or one is moved or one.cause not in affected:
        return False
    if not (one.exact and _misplaced(moved)) and not moved.sequences.all():
        names, others = (
            [each.rows.column("sequence_id")[i] for i in np.flatnonzero(each.sequences)]
            for each in (one, moved)
        )
        if np.mean([name in others for name in names]) <= 0.4:
            return False
    if one.cause == "row_permutation" or not one.exact:
        return True
    rows = one.rows
    if moved.cause == "row_permutation":
        return bool(np.mean(rows.from_end[one.tokens] < rows.lengths[rows.owner[one.tokens]] - 1) > 0.5)
    return bool(np.mean(np.minimum(*signatures.edges(rows))[one.tokens] < int(moved.fields["lag"])) > 0.7)


# Groups: a fault that only some engines, hosts or steps have.


def locate(rows: Rows, sequences: Flags) -> str:
    """Return the group of nearly all affected sequences and hardly any others (`host = b`), or ''."""
    if sequences.mean() > 0.9:
        return ""
    total = int(sequences.sum())
    for name, parts in partitions(rows):
        for value, at in parts.items():  # nearly all of so many in one group is not by chance
            chance = -total * np.log(at.mean())
            if sequences[at].sum() > 0.95 * total and chance > 9 + np.log(len(parts)):
                return f"{name} = {value}"
        inside = [value for value, at in parts.items() if sequences[at].mean() > 0.6]
        if not inside:
            continue
        whole = np.logical_or.reduce([parts[value] for value in inside])
        if (
            whole.mean() < 0.9
            and sequences[~whole].mean() < 0.05
            and sequences[whole].sum() > 0.9 * sequences.sum()
        ):
            return _named(name, inside, list(parts))
    return ""


def _named(name: str, inside: Sequence[Any], values: Sequence[Any]) -> str:
    """Format a group: `host = b`, `step 4 to 7`."""
    if name == "step" and len(inside) > 1:
        order = sorted(value for value in values if value is not None)
        at = sorted(order.index(value) for value in inside)
        if at == list(range(at[0], at[-1] + 1)):
            return f"step {order[at[0]]} to {order[at[-1]]}"
    return f"{name} = {', '.join(map(str, inside[:4]))}{' …' if len(inside) > 4 else ''}"


def by_group(rows: Rows, seen: Findings) -> Found | None:
    """Find a fault of one group: a cause found only in its sequences, or a mismatch larger than elsewhere.

    It is looked for in the group that differs most from the others in mean |Δ|, among sequences of the same
    step and policy lag: hosts that hold weights of different steps differ honestly.
    """
    best: tuple[float, str, Any, Flags, Flags] | None = None
    logs, weights = np.log(np.maximum(rows.level, 1e-9)), alike(rows)
    for name, parts in partitions(rows):
        for value, at in parts.items() if name != "step" else ():
            if at.sum() < 6 or (~at).sum() < 6 or at.mean() > 0.6:
                continue
            gap, spread, compared = _apart(logs, at, weights)
            times = float(np.exp(gap))
            if gap / max(spread, 1e-9) > 5.5 and times > 2.5 and (best is None or times > best[0]):
                best = times, name, value, at, compared
    if best is None:
        return None
    times, name, value, at, compared = best
    where, without = f"{name} = {value}", rows.only(~at)
    others = {one.cause for one in run_signatures(without).found}
    for one in run_signatures(rows.only(at)).found:
        mended = one.repaired is None or one.cause not in ("special_token", "boundary")
        if not mended and one.repaired is not None:  # is the group then like the others?
            mended = bool(np.median(one.repaired.level) < 2.5 * np.median(without.level))
        if one.cause not in others and mended:
            return Found.of_sequences(
                one.cause,
                one.statistic,
                rows,
                at,
                repaired=without,
                exact=one.exact,
                fields=one.fields | {"after": "without these sequences"},
                where=where,
            )
    machine = MACHINES.search(name.lower())
    if times < (2.5 if machine else 5) or seen.found:
        return None  # prompts of another kind may be harder to agree on; machines all do the same work
    inside, outside = rows.level[at & compared], rows.level[~at & compared]
    statistic = (
        f"mean |Δ| of a sequence is {np.median(inside):.2g} nats with {where} ({len(inside):,} sequences) "
        f"and {np.median(outside):.2g} with others ({len(outside):,}), medians"
    )
    fields = {"times": f"{times:.0f}"}
    return Found.of_sequences(
        "group_fault", statistic, rows, at, repaired=without, fields=fields, where=where
    )


def _apart(logs: Floats, at: Flags, alike: Ints) -> tuple[float, float, Flags]:
    """Compare the mean of `logs` [S] at flagged sequences with that of others of the same weights.

    Returns:
        The difference, its standard error (infinite where there is too little to compare), and the sequences
        that were compared, [S].
    """
    groups = int(alike.max()) + 1
    inside, outside = (np.bincount(alike, some, groups) for some in (at, ~at))
    both = (inside > 0) & (outside > 0)
    compared, strata = both[alike], int(both.sum())
    gaps, errors = np.zeros(groups), np.zeros(groups)
    for sign, some, many in ((1, at, inside), (-1, ~at, outside)):
        some = some & compared
        free = int(some.sum()) - strata
        if free < 5:
            return 0.0, np.inf, compared
        means = np.bincount(alike[some], logs[some], groups) / np.maximum(many, 1)
        gaps += sign * means
        errors += np.square(logs[some] - means[alike[some]]).sum() / free / np.maximum(many, 1)
    weights = np.where(both, inside * outside / np.maximum(inside + outside, 1), 0.0)
    total = weights.sum()
    return float(weights @ gaps / total), float(np.sqrt(weights**2 @ errors) / total), compared


# The verdict.


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
    if not rows.delta.any():
        headline = (
            "The two columns hold the same numbers, token for token: was one copied from the other? Engines "
            "that agree to the last bit exist; then this is what to expect."
        )
        return Diagnosis(
            verdict="cannot_tell", headline=headline, sequences=rows.sequences, tokens=rows.tokens
        )
    return _diagnosed(summary, rows).model_copy(update={"where": places.locate(rows)})


def _diagnosed(summary: Result, rows: Rows) -> Diagnosis:
    """Return the verdict on tokens that differ."""
    seen = run_signatures(rows)
    found = [replace(one, where=locate(one.rows, one.sequences)) for one in seen.found]
    grouped = by_group(rows, seen)
    if grouped is not None and not any(one.where for one in found):
        same = [one.cause == grouped.cause for one in found]
        if any(same):
            found[same.index(True)] = grouped
        elif not found:
            found.append(grouped)
    mended = not any(one.approximate or one.repaired is None for one in found)
    share = laws.systematic(seen.rest)
    rest = _honest(seen.rest, summary, share)
    if not found and (other := definition.model_differs(rest)) is not None:
        found = [other]
    causes = [*_positive(summary), *map(_cause, found)]
    judged = _judged(Evidence(summary), rows, rest, causes, mended)
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


def _honest(rows: Rows, summary: Result, share: Estimate | None) -> honest.Seen:
    """Return what decides between honest causes; `rows` are those after all repairs."""
    evidence, lag = Evidence(summary), summary.charts.lag
    k3 = (lag.in_sync if lag else evidence.number("k3")) or Number()
    synced = k3.interval[0] if k3.interval else k3.value
    return honest.Seen(
        rows, recorded(summary.dump.provenance), share, evidence.errors("surrogate_gain"), synced
    )


def _beside(seen: honest.Seen, mended: bool) -> list[Cause]:
    """Return the honest cause beside a bug: one that the dump records, in rows that are mended."""
    if seen.rows.tokens < TOKENS or not seen.rows.delta.any():
        return []
    unmoved = replace(seen, moved=None)  # advantages are of the numbers as logged
    found = honest.stale(unmoved) or (honest.quantised(unmoved) if mended else None)
    return [_cause(found)] if found else []


def _cause(one: Found) -> Cause:
    row, fields = CAUSES[one.cause], one.fields
    column, temperature = fields.get("column"), fields.get("temperature")
    share = one.tokens.mean() if one.cause == "sentinel" else one.sequences.mean()
    words = {
        "share": percent(float(share)),
        "where": one.where,
        "side": "engine" if column == "rollout" else "trainer",
        **fields,
        "temperature": f" (T ≈ {temperature})" if temperature else "",
    }
    statement = fields.get("sentence", row.sentence).format(**words)
    if one.where and one.where not in statement:
        statement += f", where {one.where}"
    after, undone = None, fields.get("after", row.after)
    if row.kind == "bug" and one.repaired is not None and one.repaired.tokens and undone:
        size = measured(one.repaired)
        if np.isfinite(list(size.values())).all():
            after = After(what=undone, tokens=one.repaired.tokens, approximate=one.approximate, **size)
    return Cause(
        id=one.cause,
        kind=row.kind,
        statement=statement[0].upper() + statement[1:] + ".",
        statistic=one.statistic,
        violates=row.violates,
        exact=one.exact,
        where=one.where,
        tokens=int(one.tokens.sum()),
        sequences=int(one.sequences.sum()),
        examples=_examples(one) if row.kind == "bug" else [],
        confirm=fields.get("confirm", row.confirm).format(**words),
        fix=fields.get("fix", row.fix).format(**words),
        after=after,
    )


def _examples(one: Found, most: int = 3) -> list[Example]:
    """Return the worst token of each of a few affected sequences."""
    rows, found = one.rows, []
    names = rows.column("sequence_id")
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


def _judged(evidence: Evidence, rows: Rows, seen: honest.Seen, bugs: list[Cause], mended: bool) -> Diagnosis:
    """Return the verdict; `seen` is what is left after all repairs."""
    missing = {
        "raw log-probs in both columns beside a temperature or top-p: needs the column entropy": rows.entropy,
        "single tokens that are scored differently: needs the column token_ids": rows.ids,
        "stale weights or weights that do not arrive: needs the column policy_lag": seen.known or None,
    }
    known: dict[str, Any] = {
        "undecidable": [question for question, column in missing.items() if column is None],
        "sequences": rows.sequences,
        "tokens": rows.tokens,
    }
    if bugs:
        late = any(one.id == "sync_stopped" for one in bugs)  # then the recorded lags are wrong
        causes = [*bugs, *([] if late else _beside(seen, mended))]
        return Diagnosis(verdict="bug", headline=bugs[0].statement, causes=causes, **known)
    k3, ratio = evidence.number("k3"), laws.identities(seen.rows).ratio
    blunt = not ratio.error < ERRORS and not (k3.value is not None and k3.value < HEALTHY_K3)
    if blunt and ratio.error > 0.1:
        headline = (
            f"E[r] = {ratio.value:.3g} ± {ratio.error:.2g}: too few tokens to tell a bug from a mismatch."
        )
        return Diagnosis(verdict="cannot_tell", headline=headline, **known)
    least = k3.interval[0] if k3.interval else k3.value
    small = least is not None and least <= HEALTHY_K3 and evidence.value("k3") <= HEALTHY_K3
    lone = not small and rows.k3_cut.mean() <= HEALTHY_K3  # a single outlier is an alert, not a verdict
    healthy = (small or lone) and not evidence.value("f_2") > 2 * HEALTHY_K3
    mean_ratio = evidence.number("mean_ratio")
    found = honest.named(seen, healthy)
    if off_centre(mean_ratio):
        return _undecided(seen, f"E[r] is {say(mean_ratio)} and not 1", False, known)
    if found is None and not healthy:
        tested = ratio.error < ERRORS and not doubted(mean_ratio)
        return _undecided(seen, candidates.explained(seen), tested, known)
    size = "as small as rounding makes it" if healthy else "real"
    if healthy and lone:
        many = int((np.abs(rows.delta) > 1.0).sum())
        size += f", but for {many:,} of {rows.tokens:,} tokens that are off by more than a nat"
    causes = [_cause(found)] if found else []
    what = causes[0].statement if causes else ""
    return Diagnosis(
        verdict="healthy" if healthy else "honest_mismatch",
        headline=f"{what} Nothing points to a logging bug, and the mismatch is {size}.".strip(),
        causes=causes,
        ruled_out=_ruled_out({cause.id for cause in causes}),
        **known,
    )


CENTRED = 0.005
"""|E[r] − 1| up to which rounding may move it: kernels stay below 0.002."""
SURELY = 3.29 / Z
"""Half width of a 99.9% interval in that of a 95% one: one healthy dump in a thousand is doubted."""


def off_centre(ratio: Number) -> bool:
    """Return whether E[r] is not 1 beyond doubt: tokens were not sampled from the logged distribution."""
    if ratio.value is None or ratio.interval is None or doubted(ratio):
        return False
    low, high = ratio.interval
    off = ratio.value - 1
    half = high - ratio.value if off < 0 else ratio.value - low
    return abs(off) > max(CENTRED, SURELY * half)


def _undecided(seen: honest.Seen, but: str, tested: bool, known: dict[str, Any]) -> Diagnosis:
    """Return that the dump cannot tell, with the causes that fit.

    Args:
        seen: what is left after all repairs.
        but: what has to be explained, in a clause.
        tested: whether E[r] = 1 could be tested, and holds.
        known: what is known of any verdict.
    """
    found = candidates.fitting(seen)
    measurement = candidates.deciding(seen, found)
    fitting = {one.id for one in found}
    known["undecidable"] += [
        f"{question}: needs the column{s} {names}"
        for question, s, names, decides in _LACKING
        if decides & fitting and not all(_recorded(seen.rows, name) for name in names.split(" and "))
    ]
    lined_up = "the columns line up" + (" and the sampling is the logged one" if tested else "")
    fit = f"{NUMBERS[len(found)]} cause{' fits' if len(found) == 1 else 's fit'}"
    return Diagnosis(
        verdict="cannot_tell",
        headline=f"Cannot tell from this dump: {lined_up}, but {but}; {fit}.",
        candidates=found,
        decide=measurement.text if measurement else "",
        decide_by=dict(measurement.lines) if measurement else {},
        ruled_out=_ruled_out({one.id for one in found}),
        **known,
    )


def _recorded(rows: Rows, column: str) -> bool:
    """Return whether a dump has a column; of machines, under any name."""
    if column == "host":
        return any(MACHINES.search(name.lower()) for name in rows.scalars)
    return None not in rows.column(column)


_LACKING = (
    ("whether the engine has the trainer's weights", "s", " and ".join(sync.DIGESTS), candidates.OF_WEIGHTS),
    ("whether one machine alone has other weights", "", "host", candidates.OF_WEIGHTS - {"stale"}),
)
"""Questions that a dump cannot tell, the columns that decide them, and the candidates they decide between."""
NUMBERS = ("no", "one", "two", "three")


def _ruled_out(named: set[str]) -> list[str]:
    return [row.ruled_out for id_, row in CAUSES.items() if row.ruled_out and id_ not in named]
