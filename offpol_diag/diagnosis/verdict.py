"""The diagnosis: run all signatures, also by group, and derive the verdict."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offpol_diag.diagnosis import honest, laws, signatures
from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.numbers import HEALTHY_K3, Evidence
from offpol_diag.diagnosis.rows import Estimate, Flags, Rows, measured
from offpol_diag.diagnosis.signatures import Found, percent
from offpol_diag.engine.sample import Sample
from offpol_diag.summary import After, Cause, Diagnosis, Example, Number, Summary

LOOKS: tuple[Callable[[Rows], Found | None], ...] = (
    laws.storage,
    signatures.sentinels,
    signatures.shifts,
    signatures.permutations,
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


@dataclass(frozen=True)
class Seen:
    """The findings in order, each with the rows that it was found in, and the rows after all repairs."""

    found: tuple[tuple[Found, Rows], ...]
    rest: Rows

    @property
    def ids(self) -> set[str]:
        """The ids of the causes found."""
        return {one.cause for one, _ in self.found}


def look(rows: Rows) -> Seen:
    """Run all signatures in order, each on the rows repaired by the one before."""
    found: list[tuple[Found, Rows]] = []
    for signature in LOOKS:
        if rows.tokens < TOKENS // 2:
            break
        if signature in (signatures.breaks, signatures.jumps, signatures.special_tokens) and any(
            _misplaced(one) for one, _ in found
        ):
            continue
        one = signature(rows)
        if one is not None and signature in (laws.sampling, laws.positions) and _plain(one) and found:
            continue  # E[r] alone, beside a fault that may not be mended whole
        if one is not None and one.cause not in {other.cause for other, _ in found}:
            found.append((one, rows))
            if one.repaired is not None and one.repaired.tokens >= TOKENS // 4:
                rows = one.repaired
    return Seen(tuple(one for one in found if not _side_effect(one, found)), rows)


CONSTANTS = ("sentinel", "wrong_mask", "boundary")


def _side_effect(one: tuple[Found, Rows], found: Sequence[tuple[Found, Rows]]) -> bool:
    """Return whether a shift or permutation explains a finding, e.g. values moved in from padding."""
    seen, rows = one
    causes = {other.cause for other, _ in found}
    if seen.cause == "off_by_one" and "retokenization" in causes and seen.sequences.mean() < 0.35:
        return True  # sequences that break at their first tokens
    moved = next((other for other, _ in found if other.cause in ("off_by_one", "row_permutation")), None)
    doubtful = moved is not None and not (seen.exact and _misplaced(moved))
    if moved is not None and doubtful and seen is not moved and not moved.sequences.all():
        before = next(rows for other, rows in found if other is moved)
        ids = set(np.array(before.column("sequence_id"), object)[moved.sequences])
        of_moved = [name in ids for name in np.array(rows.column("sequence_id"), object)[seen.sequences]]
        moved = moved if np.mean(of_moved) > 0.4 else None
    if moved is None or seen is moved or seen.cause not in (*CONSTANTS, "row_permutation"):
        return False
    if seen.cause == "row_permutation" or not seen.exact:
        return True
    first, last = signatures.edges(rows)
    if moved.cause == "row_permutation":
        return bool(np.mean(rows.from_end[seen.tokens] < rows.lengths[rows.owner[seen.tokens]] - 1) > 0.5)
    reach = int(moved.said["lag"])
    return bool(np.mean(np.minimum(first, last)[seen.tokens] < reach) > 0.7)


def _plain(one: Found) -> bool:
    """Return whether the only evidence is E[r] or K1, without a specific pattern."""
    return one.said.get("shape", "") in ("", "E")


def _misplaced(one: Found) -> bool:
    """Return whether over 30% of sequences are misaligned; unrepaired ones then look like other faults."""
    return one.cause in ("off_by_one", "row_permutation", "wrong_context") and bool(
        one.sequences.mean() > 0.3
    )


# Groups: a fault that only some engines, hosts or steps have.

NOT_GROUPS = ("sequence_id", "group_id", "policy_lag", "rollout_version", "train_version")
MOST_VALUES = 64
MACHINES = re.compile("host|engine|rank|worker|node|server|replica|gpu|device|pod|instance")
"""Words in the names of columns that say where a sequence was computed."""


def partitions(rows: Rows) -> Iterator[tuple[str, dict[Any, Flags]]]:
    """Yield columns with few values that describe a sequence's origin, and value → flags [S]."""
    for name, column in rows.scalars.items():
        if name in NOT_GROUPS:
            continue
        values = list(dict.fromkeys(column))
        if not 2 <= len(values) <= MOST_VALUES:
            continue
        parts = {value: np.array([one == value for one in column]) for value in values}
        if sum(at.sum() >= 4 for at in parts.values()) >= 2:
            yield name, parts


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


def apart(rows: Rows) -> tuple[str, Any, Flags, float] | None:
    """Return the group that differs most from the others in mean |Δ|: column, value, flags [S], ratio."""
    best: tuple[str, Any, Flags, float] | None = None
    logs = honest.levels(rows.level)
    for name, parts in partitions(rows):
        if name == "step":
            continue
        for value, at in parts.items():
            if at.sum() < 6 or (~at).sum() < 6 or at.mean() > 0.6:
                continue
            inside, outside = logs[at], logs[~at]
            spread = np.sqrt(inside.var(ddof=1) / len(inside) + outside.var(ddof=1) / len(outside))
            errors = (inside.mean() - outside.mean()) / max(spread, 1e-9)
            times = float(np.exp(inside.mean() - outside.mean()))
            if errors > 5.5 and times > 2.5 and (best is None or times > best[3]):
                best = name, value, at, times
    return best


def by_group(rows: Rows, seen: Seen) -> tuple[Found, Rows, str] | None:
    """Find a fault of one group: a cause found only in its sequences, or a mismatch larger than elsewhere."""
    found = apart(rows)
    if found is None:
        return None
    name, value, at, times = found
    where = f"{name} = {value}"
    alone = look(rows.only(at))
    others = look(rows.only(~at)).ids
    for one, _ in alone.found:
        mended = one.repaired is None or one.cause not in ("special_token", "boundary")
        if not mended and one.repaired is not None:  # is the group then like the others?
            mended = bool(np.median(one.repaired.level) < 2.5 * np.median(rows.only(~at).level))
        if one.cause not in others and mended:
            of_group = replace(
                one,
                tokens=at[rows.owner],
                sequences=at,
                repaired=rows.only(~at),
                said=one.said | {"after": "without these sequences"},
                approximate=False,
            )
            return of_group, rows, where
    machine = MACHINES.search(name.lower())
    if times < (2.5 if machine else 5) or seen.ids:
        return None  # prompts of another kind may be harder to agree on; machines all do the same work
    statistic = (
        f"mean |Δ| of a sequence is {np.median(rows.level[at]):.2g} nats with {where} ({int(at.sum()):,} "
        f"sequences) and {np.median(rows.level[~at]):.2g} with others ({int((~at).sum()):,}), medians"
    )
    said = {"where": where, "times": f"{times:.0f}"}
    return Found("group_fault", statistic, at[rows.owner], at, rows.only(~at), said), rows, where


# The verdict.


def diagnose(summary: Summary, sample: Sample | None) -> Diagnosis:
    """Return the verdict (bug or honest mismatch), causes with evidence, and ruled-out or undecidable ones.

    Args:
        summary: the numbers of the dump.
        sample: a sample of its sequences, token by token; None if there is none.
    """
    evidence = Evidence(summary)
    rows = Rows.sampled(sample) if sample is not None and len(sample.order) else None
    if rows is None or rows.tokens < TOKENS:
        many = summary.dump.tokens
        return Diagnosis(verdict="cannot_tell", headline=f"{many:,} tokens are too few to tell.")
    if not rows.delta.any():
        headline = (
            "The two columns hold the same numbers, token for token: was one copied from the other? Engines "
            "that agree to the last bit exist; then this is what to expect."
        )
        looked = {"sequences": rows.sequences, "tokens": rows.tokens}
        return Diagnosis(verdict="cannot_tell", headline=headline, **looked)
    seen = look(rows)
    located = [(one, before, locate(before, one.sequences)) for one, before in seen.found]
    grouped = by_group(rows, seen)
    if grouped is not None and not any(where for *_, where in located):
        same = [i for i, (one, *_) in enumerate(located) if one.cause == grouped[0].cause]
        if same:
            located[same[0]] = grouped
        elif not located:
            located.append(grouped)
    causes = [_cause(one, before, where) for one, before, where in located]
    positive = _positive(summary)
    causes = [positive, *causes] if positive else causes
    bug = any(cause.kind == "bug" for cause in causes)
    mended = not any(one.approximate or one.repaired is None for one, *_ in located)
    share = laws.systematic(seen.rest)
    causes += [_cause(one, seen.rest, "") for one in _honest(seen.rest, summary, bug, mended, share)]
    found = _judged(evidence, rows, seen, causes)
    if share is None:
        return found
    systematic = Number(
        value=share.value,
        interval=(share.low, share.high),
        unit="fraction",
        over="variance of min(r, 2)",
        formula="what tokens of one kind (a token id after another) have in common",
    )
    return found.model_copy(update={"systematic": systematic})


def _positive(summary: Summary) -> Cause | None:
    """Return the cause for positive log-probs, if the reader noted any."""
    notes = [note for note in summary.dump.notes if "no log-probabilities" in note]
    if not notes:
        return None
    return Cause(
        id="sentinel",
        statement="A log-prob column holds positive values, which no log-probability can be.",
        statistic=" ".join(notes),
        violates="log-probs are at most 0",
        exact=True,
        confirm="look at the rows named in the note, in the trainer's tensors",
        fix="log log-softmax values of the sampled token, in float32",
    )


def _honest(rows: Rows, summary: Summary, bug: bool, mended: bool, share: Estimate | None) -> Iterator[Found]:
    """Yield honest causes; with a bug, only those with evidence of their own, or found after exact repair."""
    if rows.tokens < TOKENS or not rows.delta.any():
        return
    moved = Evidence(summary).errors("surrogate_gain")
    lags = {value for value in rows.column("policy_lag") if value is not None}
    named = [one for one in (honest.stale(rows, None if bug else moved),) if one]
    if not named and not (lags - {0}):
        named += [one for one in (honest.frozen(rows),) if one]
    if not named and not bug:
        named += [one for one in (honest.outliers(rows),) if one]
    yield from named
    if not named:
        size = honest.broad(rows, dict(summary.dump.provenance), share)
        if not bug or (mended and size.cause == "quantized_rollout"):
            yield size


def _cause(one: Found, before: Rows, where: str) -> Cause:
    row = CAUSES[one.cause]
    share = percent(float(one.tokens.mean()) if one.cause == "sentinel" else float(one.sequences.mean()))
    column = one.said.get("column", "")
    temperature = one.said.get("temperature", "")
    words = {
        "share": share,
        "where": where,
        "side": "engine" if column == "rollout" else "trainer",
        "times": "",
        "examples": "",
    }
    words |= one.said | {"temperature": f" (T ≈ {temperature})" if temperature else ""}
    statement = row.sentence.format(**words)
    if where and where not in statement:
        statement += f", where {where}"
    after, undone = None, one.said.get("after", row.after)
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
        where=where,
        tokens=int(one.tokens.sum()),
        sequences=int(one.sequences.sum()),
        examples=_examples(one, before) if row.kind == "bug" else [],
        confirm=row.confirm.format(**words),
        fix=row.fix.format(**words),
        after=after,
    )


def _examples(one: Found, rows: Rows, most: int = 3) -> list[Example]:
    """Return the worst token of each of a few affected sequences."""
    names = rows.column("sequence_id")
    found: list[Example] = []
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


def _judged(evidence: Evidence, rows: Rows, seen: Seen, causes: list[Cause]) -> Diagnosis:
    looked = {"sequences": rows.sequences, "tokens": rows.tokens}
    bugs = [cause for cause in causes if cause.kind == "bug"]
    ruled_out = [
        row.ruled_out for id_, row in CAUSES.items() if row.ruled_out and id_ not in {c.id for c in causes}
    ]
    undecidable = _undecidable(rows)
    if bugs:
        return Diagnosis(
            verdict="bug", headline=bugs[0].statement, causes=causes, undecidable=undecidable, **looked
        )
    k3 = evidence.number("k3")
    ends = k3.interval or (k3.value, k3.value)
    identities = laws.identities(seen.rest)
    blunt = not identities.ratio.error < ERRORS and not (k3.value is not None and k3.value < HEALTHY_K3)
    if blunt and identities.ratio.error > 0.1:
        headline = (
            f"E[r] = {identities.ratio.value:.3g} ± {identities.ratio.error:.2g}: too few tokens to tell a "
            "bug from a mismatch."
        )
        return Diagnosis(
            verdict="cannot_tell", headline=headline, causes=causes, undecidable=undecidable, **looked
        )
    small = ends[0] is not None and float(ends[0]) <= HEALTHY_K3 and evidence.value("k3") <= HEALTHY_K3
    lone = (
        not small and float(rows.k3_cut.mean()) <= HEALTHY_K3
    )  # a single outlier token is an alert, not a verdict
    small = small or lone
    healthy = small and not evidence.value("f_2") > 2 * HEALTHY_K3
    size = "as small as rounding makes it" if healthy else "real"
    if healthy and lone:
        many = int((np.abs(rows.delta) > 1.0).sum())
        size += f", but for {many:,} of {rows.tokens:,} tokens that are off by more than a nat"
    what = causes[0].statement if causes else ""
    headline = f"{what} Nothing points to a logging bug, and the mismatch is {size}.".strip()
    return Diagnosis(
        verdict="healthy" if healthy else "honest_mismatch",
        headline=headline,
        causes=causes,
        ruled_out=ruled_out,
        undecidable=undecidable,
        **looked,
    )


def _undecidable(rows: Rows) -> list[str]:
    """List the questions that need other columns."""
    found = []
    if rows.entropy is None:
        found.append("raw log-probs in both columns beside a temperature or top-p: needs the column entropy")
    if rows.ids is None:
        found.append("single tokens that are scored differently: needs the column token_ids")
    return found
