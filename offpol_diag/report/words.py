"""The sentences of an analysis: checks for a bug, causes with their evidence, what to do, what was read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from offpol_diag.advice import GROWN, MERGE, Growth, growth, prescribed
from offpol_diag.metrics import band, title, tone
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import count, counted, doubted, rounded, say, say_value, written
from offpol_diag.presets import catalogue
from offpol_diag.report.answer import Fact, Line
from offpol_diag.result import (
    After,
    CandidateCause,
    Cause,
    Diagnosis,
    DumpFacts,
    Recommendation,
    Result,
    apart_in_sync,
    in_sync,
)
from offpol_diag.table import Table
from offpol_diag.trainers import named_in
from offpol_diag.trainers.translate import sayable

TITLES = {
    "healthy": "Healthy: nothing points to a logging bug",
    "honest_mismatch": "Honest mismatch: nothing points to a logging bug",
    "bug": "A bug: the log-probs are logged or computed wrongly",
    "cannot_tell": "Cannot tell a bug from honest mismatch",
}
FIRST = "No correction is named before the fix."
ROUNDING = 1e-5
"""Size of K1 in nats that the rounding of log-probs explains."""
SMALLER = (
    "Make updates smaller: a lower learning rate, fewer epochs per batch, fewer steps between weight syncs."
)
NO_GRADIENT = "Not known: how far the gradient is off without a correction. A dump holds no gradients."


def sentence(text: str) -> str:
    """Return a clause as a sentence; names of columns and options keep their first letter."""
    text = text.strip()
    if text.partition(" ")[0].rstrip(",:;").replace("-", "").isalpha():
        text = capital(text)
    return text + ("" if text.endswith((".", "!", "?")) or not text else ".")


def lower(text: str) -> str:
    """Return a text with its first letter in lower case."""
    return text[:1].lower() + text[1:]


def capital(text: str) -> str:
    """Return a text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- is it a bug


def checks(result: Result) -> Iterator[Line]:
    """Yield what was checked for a bug; `brief` ones stand in the short answer where no bug was found."""
    given, whole, prefix = result.diagnosis, result.whole, result.prefix
    if given is None:
        return
    for one in given.causes:
        if one.kind == "bug":
            yield Line(one.statement, "no", one.statistic)
    if (k1 := whole.get(f"{prefix}k1", Number())).value is not None:
        yield _k1(k1, result.is_bug)
    if not result.is_bug:
        yield from _in_sync(result)
    ratio = whole.get(f"{prefix}mean_ratio", Number())
    if ratio.value is not None and doubted(ratio):
        mean = written(replace(ratio, note=None)).value
        why = f"The tail of r is too heavy: its sample mean, {mean}, is not a usable estimate."
        yield Line("E[r] = 1 cannot be tested", "un", why, brief=True)
    elif ratio.interval is not None:
        low, high = ratio.interval
        why = "1 when the tokens were drawn from the logged distribution."
        yield Line(f"E[r] is {say(ratio)}", "ok" if low <= 1 <= high else "un", why, brief=True)
    if given.ruled_out:
        many = counted(len(given.ruled_out), "further fault")
        yield Line(f"{many} ruled out", "ok", "; ".join(given.ruled_out) + ".")
    yield from (Line("Not testable on this dump", "un", one) for one in given.undecidable)
    if given.sequences is not None and given.tokens is not None and given.sequences < result.dump.sequences:
        some = f"{counted(given.tokens, 'token')} of {counted(given.sequences, 'sequence')}"
        yield Line(f"Looked at one by one: {some}, of the {count(result.dump.sequences)} in the dump", "un")


def _k1(k1: Number, of_bug: bool) -> Line:
    """Return whether K1 is negative, which it is for no tokens drawn from the logged distribution."""
    assert k1.value is not None
    means = "A clearly negative K1 would mean that the tokens were not drawn from the logged distribution."
    negative = k1.interval is not None and k1.interval[1] < 0
    if not negative:
        clearly = "clearly " if k1.value < 0 else ""
        return Line(f"K1 is not {clearly}negative", "ok", f"{say(k1)} nats. {means}", brief=True)
    if of_bug:
        return Line("K1 is negative", "no", f"{say(k1)} nats. {means}", brief=True)
    said = "K1 is negative, which no logging fault looked for explains"
    why = (
        "A few tokens that are logged far off, sampling cut by top-p or top-k, and responses selected by "
        "their outcome make it negative too."
    )
    if k1.value > -ROUNDING:
        said = "K1 is negative, and small enough for rounding"
        why = f"Rounded log-probs alone make it up to {ROUNDING:g} nats negative."
    return Line(said, "un", f"{say(k1)} nats. {means} {why}", brief=True)


def _in_sync(result: Result) -> Iterator[Line]:
    """Yield what K3 is at lag 0: one number, or those of steps that differ."""
    if apart := apart_in_sync(result):
        least, most = (f"{rounded(one.value)} (step {one.step})" for one in apart)
        why = "Weights in sync differ by numerics alone, and as much at every step."
        yield Line(f"In sync (lag 0) K3 is {least} to {most}", "un", why, brief=True)
    if (synced := in_sync(result)) and synced.value is not None:
        row = band("k3", Number(value=synced.value))
        agree = row is not None and tone(row.name) in ("good", "info")
        why = f"There engine and trainer {'agree' if agree else 'differ already'}. "
        why += "A wrong temperature, a shifted column or a padding value would show here already."
        yield Line(f"In sync (lag 0) K3 is {rounded(synced.value)}", "ok" if agree else "un", why, brief=True)


def verdict(result: Result) -> str:
    """Return the diagnosis in a phrase."""
    if result.diagnosis is None:
        return "Not examined"
    fitting = "Cannot tell: nothing in this dump establishes a cause"
    return fitting if result.undecided else TITLES[result.diagnosis.verdict]


# ---------------------------------------------------------------- causes


def evidence(result: Result) -> tuple[str, ...]:
    """Return the evidence for an honest cause in sentences, the most telling first."""
    lag, given = result.charts.lag, result.diagnosis
    if given is None or not given.causes:
        return ()
    first, said = given.causes[0], []
    if grew(result) and lag and lag.start and lag.end and lag.steps:
        ends = (
            f"{rounded(one.value)} (step {s})" for one, s in zip((lag.start, lag.end), lag.steps, strict=True)
        )
        said.append(
            f"At a constant lag of {lag.lag}, K3 rises from {' to '.join(ends)}: the updates grow, or "
            "weights no longer arrive, which a checksum of them on both sides tells apart."
        )
    synced = in_sync(result)
    if (
        lag
        and synced
        and synced.value is not None
        and lag.in_sync_share is not None
        and lag.in_sync_share < 0.5
    ):
        share = rounded(lag.in_sync_share, "share")
        level = rounded(synced.value)
        said.append(f"Not the engine, as far as lag 0 shows: there K3 is {level}, {share} of all.")
    if lag and lag.ratio_by_lag:
        times = [f"{key} behind, {rounded(one)} times" for key, one in lag.ratio_by_lag.items()]
        said.append(f"Lag: K3 against lag 0, in updates: {'; '.join(times[:3])}.")
    said += [f"Evidence: {sentence(first.statistic)}"] if not said else []
    said += [f"To confirm: {first.confirm}"] if first.confirm else []
    return (*said, f"At the source: {first.fix}") if first.fix else tuple(said)


def grew(result: Result) -> bool:
    """Return whether stale weights are the cause, and K3 grows at a constant lag."""
    lag, given = result.charts.lag, result.diagnosis
    stale = given is not None and bool(given.causes) and given.causes[0].id == "stale"
    return bool(stale and lag and lag.growth and lag.growth > 2 and lag.start and lag.end and lag.steps)


def candidates(given: Diagnosis) -> Fact:
    """Return the causes that fit in their order, each with what speaks for it and against it."""
    many = len(given.candidates)
    heading = "One fits, and is not established" if many == 1 else f"{many} fit, the least contradicted first"
    lines = [Line(f"{i}. {one.statement}", "", _both_sides(one)) for i, one in enumerate(given.candidates, 1)]
    return Fact("Candidates", "", heading, tuple(lines), spelled=True)


def _both_sides(one: CandidateCause) -> str:
    nothing = "nothing in this dump"
    if not (one.for_ or one.against):
        return f"For and against: {nothing}."
    sides = (("For", one.for_), ("Against", one.against))
    return " ".join(f"{side}: {' '.join(said) if said else f'{nothing}.'}" for side, said in sides)


def cause_details(cause: Cause, given: Diagnosis, numbers: Numbers) -> tuple[str, ...]:
    """Return the evidence of a cause, how to confirm it and its fix, a line each."""
    examples = "; ".join(
        f"sequence {one.sequence_id}, position {one.position}: log π_rollout "
        f"{say_value(one.rollout_log_prob)}, log π_train {say_value(one.train_log_prob)}"
        for one in cause.examples
    )
    affected = [cause.where] if cause.where else []
    for some, whole, what in (
        (cause.tokens, given.tokens, "tokens"),
        (cause.sequences, given.sequences, "sequences"),
    ):
        if some is not None:
            of = f"all {count(some)}" if some == whole else f"{count(some)} of {count(whole or some)}"
            affected.append(f"{of} {what}")
    detail = (
        f"{'Counted' if cause.exact else 'Evidence'}: {cause.statistic}",
        cause.violates and f"Violates: {cause.violates}",
        affected and f"Where: {'; '.join(affected)}",
        examples and f"Examples: {examples}",
        cause.confirm and f"To confirm: {cause.confirm}",
        cause.fix and f"Fix: {cause.fix}",
        cause.after and _after(cause.after, numbers),
    )
    return tuple(line for line in detail if line)


def _after(after: After, numbers: Numbers) -> str:
    """Return K3, E[r] and ESS, as logged and with the cause fixed."""
    rows = (
        ("K3", "k3", after.k3, "nats"),
        ("E[r]", "mean_ratio", after.mean_ratio, ""),
        ("ESS", "ess_tokens", after.ess_tokens, "fraction"),
    )
    said = []
    for name, key, value, unit in rows:
        found = (numbers.get(one, Number()) for one in (key, f"total.{key}"))
        before = next((one for one in found if one.known), None)
        logged = f"{say(replace(before, interval=None, note=None))} → " if before else ""
        said.append(f"{name} {logged}{'≈ ' * after.approximate}{say_value(value, unit)}")
    return f"After the fix, {after.what}: {', '.join(said)} (over {counted(after.tokens, 'token')})"


def of_bug(result: Result) -> Iterator[Fact]:
    """Yield what is wrong, where, how to confirm it, what to do, and how sure that is."""
    assert result.diagnosis is not None
    given, checked = result.diagnosis, tuple(checks(result))
    if not given.causes:
        yield Fact("Bug?", given.headline, verdict(result), checked)
        yield Fact("What to do", f"Fix the bug first. {FIRST}", "Fix the bug first")
        return
    first, *others = given.causes
    also = f" Also: {' '.join(one.statement for one in others)}" if others else ""
    lines = [*map(Line, cause_details(first, given, result.whole))]
    lines += [Line(f"Also: {one.statement} {one.statistic}") for one in others]
    after, where = (
        mended(result),
        next((one.where for one in given.causes if one.kind == "bug" and one.where), ""),
    )
    fixed = f" After it, K3 is {approximately(after)} nats." if after else ""
    leave = f" Until then, leave out the sequences with {where}." if where else ""
    heading = f"Fix the bug first{f': {first.fix}' if first.fix else ''}"
    why = (Line(result.recommendation.sentence),) if result.recommendation else ()
    yield Fact("Bug?", f"Yes ({first.id}): {sentence(first.statistic)}{also}", verdict(result), checked)
    yield Fact("Where", sentence(first.where))
    yield from located(result)
    yield Fact("To confirm", sentence(first.confirm))
    yield Fact("Cause", "", first.statement, tuple(lines))
    yield Fact("What to do", f"{sentence(first.fix)}{fixed}{leave}", heading, why)
    yield Fact("How sure", f"{'Counted, not estimated. ' * first.exact}{FIRST}")


def located(result: Result) -> Iterator[Fact]:
    """Yield the clearest place that tells damaged tokens from clean ones, and what decides there."""
    for one in result.diagnosis.where[:1] if result.diagnosis else ():
        yield Fact("Where", one.sentence, lines=(Line(one.measure),))


def expected(result: Result) -> Iterator[Fact]:
    """Yield the range that K3 is expected in, where the metadata of the dump says enough."""
    for one in result.charts.expected:
        low, high = rounded(one.low or 0.0), rounded(one.high or 0.0)
        yield Fact("Expected", f"K3 of {low} to {high} ({one.regime}).")


def mended(result: Result) -> After | None:
    """Return the mismatch after the first cause is repaired, where that at least halves K3."""
    causes, k3 = result.diagnosis.causes if result.diagnosis else [], result.main("k3").value
    after = causes[0].after if causes else None
    return after if after and (k3 is None or after.k3 <= k3 / 2) else None


def approximately(after: After) -> str:
    """Return K3 after the fix in words."""
    return f"{'about ' if after.approximate else ''}{rounded(after.k3)}"


# ---------------------------------------------------------------- what to do


def grows(result: Result) -> str:
    """Return a sentence on K3 that grows over the steps, and on the mean reward that falls."""
    grown = growth(result)
    if grown is None:
        return ""
    (a, low, _), (b, high, _) = grown.ends
    first, last = grown.thirds
    word = "It collapses" if grown.reward and last > MERGE else "It grows"
    rises = f"{word}: K3 rises from {rounded(low)} (step {a}) to {rounded(high)} (step {b})"
    if (high or 0.0) < GROWN * (low or 0.0):  # the first or the last step is unlike its third
        rises = f"{word}: the median K3 of the steps rises from {rounded(first)} (first third)"
        rises += f" to {rounded(last)} (last third)"
    if grown.reward is None:
        return f"{rises}."
    before, after = map(rounded, grown.reward)
    return f"{rises}, while the mean reward falls from {before} (first third) to {after} (last third)."


def what_to_do(result: Result, given: Recommendation, causes: Sequence[Cause]) -> Fact:
    """Return the correction, why, what it changes on this dump, and its configuration for each trainer."""
    open_, grown = result.undecided, growth(result)
    before = _resume(result, grown)
    first = f"First: {lower(open_.decide)}" if open_ and open_.decide else ""
    lines = [Line(first)] if first else []
    lines += [Line(before, said=True)] if before else []
    lines += [Line(given.sentence, said=not given.title)]
    if given.method:
        rule = result.presets[given.method].method if given.method in result.presets else ""
        lines += [Line(f"As a rule: {rule}, where r = π_train / π_rollout of a token.")] if rule else []
        lines.append(Line(f"As a preset: `offpol-diag presets {given.method}`"))
    heading = f"Use {given.title}" if given.title else capital(given.decision)
    if open_ and given.title:
        heading = f"Measure first; until the cause is known, {given.title}"
    elif grown and grown.surely and given.title:
        heading = f"Resume from before step {grown.surely}, then use {given.title}"
    said, table = _remedy(result, given, causes, before), _weights(result, given)
    return Fact("What to do", said, heading, tuple(lines), table, _configs(result, given))


def _resume(result: Result, grown: Growth | None) -> str:
    """Return what a run whose K3 grows needs before a correction: the last good step, and smaller updates."""
    if grown is None or grown.surely is None:
        return ""
    perhaps = f" (perhaps from step {grown.perhaps})" if grown.perhaps != grown.surely else ""
    said = f"Resume from before step {grown.surely}: from there K3 is above {MERGE:g}{perhaps}."
    return f"{said} {SMALLER}" if grew(result) else said


def _remedy(result: Result, given: Recommendation, causes: Sequence[Cause], before: str) -> str:
    """Return the correction, what it changes, and the fix at the source."""
    effect = _effect(result, given)
    if result.undecided:
        harm = f"Until the cause is known, {given.title} limits the harm{f': {effect}' if effect else ''}"
        said = sentence(harm) if given.title else given.sentence
        return " ".join(filter(None, ("Measure first.", before, said)))
    fix = next((one.fix for one in causes if one.kind == "honest" and one.fix), "")
    also = f" At the source: {lower(sentence(fix))}" if fix else ""
    if not given.title:
        needless = "No correction is needed. " if given.decision == "no correction needed" else ""
        return f"{before} {needless}{given.sentence}".strip()
    if before:
        then = f"Then {given.title}{f' ({effect})' if effect else ''}."
        return f"{before} {then}{'' if grew(result) else also}"
    return f"{capital(given.title)}: {sentence(effect or given.sentence)}{also}"


def _effect(result: Result, given: Recommendation) -> str:
    """Return what the method changes on this dump: ESS, from a raw one that is reliable, and truncation."""
    numbers, raw, parts = result.preset(given.method or ""), result.main("ess_tokens"), []
    if "ess_tokens" in numbers:
        before = f"{written(raw).value} → " if raw.known and not doubted(raw) else ""
        parts.append(f"ESS {before}{written(numbers['ess_tokens']).value}")
    if numbers.get("truncated_high", Number()).value:
        parts.append(f"{written(numbers['truncated_high']).value} truncated")
    return ", ".join(parts)


WEIGHTS = (
    *("ess_tokens", "ess_sequences", "weight_max", "weight_mean", "truncated_high", "truncated_low"),
    *("tokens_weighted", "tokens_rejected", "sequences_dropped"),
)
"""Rows of the table of weights without a correction and under the method."""


def _weights(result: Result, given: Recommendation) -> Table | None:
    """Return the weights without correction and under the method, where known."""
    own = result.preset(given.method or "")
    if not given.title or not own:
        return None
    raw = {key: result.main(key) for key in ("ess_tokens", "ess_sequences")}
    raw["weight_mean"] = result.main("mean_ratio")
    columns: list[Mapping[str, Number]] = [raw, own]
    rows = [(title(key), *(column.get(key) for column in columns)) for key in WEIGHTS]
    some = [row for row in rows if any(one and one.value for one in row[1:] if not isinstance(one, str))]
    return Table("weights", "Weights before and after", ("on this dump", "uncorrected", given.title), some)


def _configs(result: Result, given: Recommendation) -> tuple[tuple[str, str], ...]:
    """Return the recommendation for each trainer that can say it: that of --for, the dump's, all others."""
    known = catalogue.load()
    if not given.method or given.method not in known:
        return ()
    from offpol_diag.diagnosis.numbers import Evidence  # which imports numpy

    own, policy = trainer_of(result), Evidence(result).policy
    found = {name: prescribed(given, name, policy) or "" for name in sayable(known[given.method])}
    asked = next((name for name, text in found.items() if text == given.config), own)
    if given.config and given.config not in found.values():
        asked = own or "configuration"
        found = {asked: given.config} | {name: text for name, text in found.items() if name != asked}
    ranked = sorted(found.items(), key=lambda one: (one[0] != asked, one[0] != own))
    return tuple(one for one in ranked if one[1])


def trainer_of(result: Result) -> str:
    """Return the trainer that the dump's metadata names; empty if it names none that is known."""
    return named_in(result.dump.provenance)


def how_sure(given: Recommendation) -> Fact | None:
    """Return what the decision rests on, and what is not known; None where no correction was weighed up."""
    if given.decision not in ("no correction needed", "METHOD at THRESHOLD"):
        return None
    return Fact("How sure", given.source, "How sure?", (Line(given.source, said=True), Line(NO_GRADIENT)))


# ---------------------------------------------------------------- what was read

ROLES = {
    "rollout_log_probs": "rollout",
    "old_log_probs": "old",
    "current_log_probs": "current",
    "response_mask": "mask",
}
"""Our name → the word for `--columns`."""
DECIDES = {
    "policy_lag": "it decides between stale weights and weights that do not arrive",
    "group_id": "intervals are too narrow where a prompt was sampled more than once",
}
"""Column that a hook can write → what a dump without it cannot say."""
FEW, NAME = 5, 40
"""Ignored columns, and characters of a name, in the short form."""


def every_column(facts: DumpFacts) -> str:
    """Return that every column was read under its own name, a mask among them; empty if not so."""
    own = all(role == column for role, column in facts.columns.items())
    every = own and "response_mask" in facts.columns and facts.ignored == []
    return f", all {count(len(facts.columns) + len(facts.others))} columns read" if every else ""


def lacking(facts: DumpFacts) -> dict[str, str]:
    """Return those of policy_lag and group_id that the dump lacks, each with what it would decide."""
    held = {*facts.columns, *facts.others}
    held |= {"policy_lag"} if held >= {"rollout_version", "train_version"} else set()
    return {name: why for name, why in DECIDES.items() if name not in held}


def columns(facts: DumpFacts) -> str:
    """Return what was read, columns of other names with them, and what was ignored."""

    def cut(name: str) -> str:
        return name if len(name) <= NAME else f"{name[: NAME - 1]}…"

    named = {
        role: role if role == column else f"{ROLES.get(role, role)} = {cut(column)}"
        for role, column in facts.columns.items()
    }
    first = [named.pop(role) for role in ROLES if role in named]
    first += [] if "response_mask" in facts.columns else ["no mask"]
    renamed = sorted(named.values(), key=lambda said: "=" not in said)
    read = _few([*first, *renamed, *map(cut, facts.others)], 3 * FEW)
    if facts.ignored is None:
        return read
    ignored = _few([*map(cut, facts.ignored)], FEW)
    return f"{read}; {f'ignored: {ignored}' if ignored else 'none ignored'}"


def _few(names: Sequence[str], most: int) -> str:
    more = f" and {count(len(names) - most)} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def columns_of_runs(runs: Mapping[str, DumpFacts]) -> tuple[str, ...]:
    """Return what was read and ignored of several runs, once if it is the same."""
    each = {run: columns(dump) for run, dump in runs.items()}
    every = f"{', '.join([*runs][:-1])} and {[*runs][-1]}"
    said = {every: each["A"]} if len({*each.values()}) == 1 else each
    return tuple(f"{run}. Columns: {text}." for run, text in said.items())
