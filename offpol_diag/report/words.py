"""The sentences of an analysis: checks for a bug, causes with their evidence, what to do, what was read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from offpol_diag.advice import GROWN, MERGE, Growth, growth, prescribed
from offpol_diag.diagnosis.numbers import Evidence
from offpol_diag.metrics import band, title, tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, doubted, format_number, format_value, formatted, rounded
from offpol_diag.presets import catalogue
from offpol_diag.report.answer import EXPLAIN, Answer, Fact, Line
from offpol_diag.result import (
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
from offpol_diag.trainers.translate import trainers_for

if TYPE_CHECKING:
    from offpol_diag.diagnosis.cause import Cause as KnownCause

TITLES = {
    "healthy": "Healthy: nothing points to a logging bug",
    "honest_mismatch": "Honest mismatch: nothing points to a logging bug",
    "bug": "A bug: the log-probs are logged or computed wrongly",
    "cannot_tell": "Cannot tell: nothing in this dump establishes a cause",
}
"""Verdict → the diagnosis in a phrase."""
FIRST = "No correction is named before the fix."
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

DRAWN = "A clearly negative K1 would mean that the tokens were not drawn from the logged distribution."
ALSO_NEGATIVE = (
    "Rounding, a few tokens that are logged far off, sampling cut by top-p or top-k, and responses that are "
    "selected by their outcome make it negative too."
)
K1 = {
    "above": ("ok", "K1 is not negative", ""),
    "around": ("ok", "K1 is not clearly negative", ""),
    "bug": ("no", "K1 is negative", ""),
    "open": ("un", "K1 is negative, which no logging fault looked for explains", f" {ALSO_NEGATIVE}"),
}
"""Where K1 lies → mark, finding, and what else it may come from."""


def checks(result: Result) -> Iterator[Line]:
    """Yield what was checked for a bug; `brief` ones stand in the short answer where no bug was found."""
    given, whole = result.diagnosis, result.whole
    if given is None:
        return
    yield from (Line(one.statement, "no", one.statistic) for one in given.causes if one.kind == "bug")
    k1, ratio = (whole.get(result.prefix + name, Number()) for name in ("k1", "mean_ratio"))
    if k1.value is not None:
        place = "above" if k1.value >= 0 else "around"
        if k1.interval and k1.interval[1] < 0:
            place = "bug" if result.is_bug else "open"
        mark, said, why = K1[place]
        yield Line(said, mark, f"{format_number(k1)} nats. {DRAWN}{why}", brief=True)
    if (apart := apart_in_sync(result)) and not result.is_bug:
        least, most = (f"{rounded(one.value)} (step {one.step})" for one in apart)
        why = "Weights in sync differ by numerics alone, and as much at every step."
        yield Line(f"In sync (lag 0) K3 is {least} to {most}", "un", why, brief=True)
    synced = in_sync(result)
    if synced and not result.is_bug and (row := band("k3", Number(value=synced.value))):
        agree = tone(row.name) in ("good", "info")
        why = f"There engine and trainer {'agree' if agree else 'differ already'}. "
        why += "A wrong temperature, a shifted column or a padding value would show here already."
        yield Line(f"In sync (lag 0) K3 is {rounded(synced.value)}", "ok" if agree else "un", why, brief=True)
    if ratio.value is not None and doubted(ratio):
        mean = formatted(replace(ratio, note=None)).value
        why = f"The tail of r is too heavy: its sample mean, {mean}, is not a usable estimate."
        yield Line("E[r] = 1 cannot be tested", "un", why, brief=True)
    elif ratio.interval is not None:
        holds = ratio.interval[0] <= 1 <= ratio.interval[1]
        why = "1 when the tokens were drawn from the logged distribution."
        yield Line(f"E[r] is {format_number(ratio)}", "ok" if holds else "un", why, brief=True)
    if given.sequences and given.sequences < result.dump.sequences:
        some = f"{count(given.sequences)} of the {count(result.dump.sequences)} sequences"
        yield Line(f"Looked for faults in {some}", "ok")
    yield from (Line("Not testable on this dump", "un", one) for one in given.undecidable)


# ---------------------------------------------------------------- causes


def evidence(result: Result) -> list[str]:
    """Return the evidence for an honest cause in sentences, the most telling first."""
    lag, given, synced = result.charts.lag, result.diagnosis, in_sync(result)
    if given is None or not given.causes:
        return []
    said = list[str]()
    if lag and lag.start and lag.end and lag.steps and grew(result):
        first, last = rounded(lag.start.value), rounded(lag.end.value)
        said.append(
            f"At a constant lag of {lag.lag}, K3 rises from {first} (step {lag.steps[0]}) to {last} (step "
            f"{lag.steps[1]}): the updates grow, or weights no longer arrive, which a checksum of them on "
            "both sides tells apart."
        )
    if lag and synced and lag.in_sync_share is not None and lag.in_sync_share < MOSTLY:
        level, share = rounded(synced.value), rounded(lag.in_sync_share, "share")
        said.append(f"Not the engine, as far as lag 0 shows: there K3 is {level}, {share} of all.")
    every = {"Evidence": sentence(given.causes[0].statistic) if not said else ""}
    every |= {"To confirm": given.causes[0].confirm, "At the source": given.causes[0].fix}
    return said + [f"{label}: {text}" for label, text in every.items() if text]


MOSTLY, TWICE = 0.5, 2.0
"""Share of K3 at lag 0 below which it is not the engine's; growth at one lag from which the updates grow."""


def grew(result: Result) -> bool:
    """Return whether stale weights are the cause, and K3 grows at a constant lag."""
    lag, given = result.charts.lag, result.diagnosis
    stale = given is not None and bool(given.causes) and given.causes[0].id == "stale"
    return bool(stale and lag and lag.growth and lag.growth > TWICE and lag.start and lag.end and lag.steps)


def candidates(given: Diagnosis) -> Fact:
    """Return the causes that fit in their order, each with what speaks for it and against it."""
    many = len(given.candidates)
    heading = "One fits, and is not established" if many == 1 else f"{many} fit, the least contradicted first"
    lines = []
    for place, one in enumerate(given.candidates, 1):
        some, others = (" ".join(said) or "nothing in this dump." for said in (one.for_, one.against))
        lines.append(Line(f"{place}. {one.statement}", "", f"For: {some} Against: {others}"))
    return Fact("Candidates", "", heading, tuple(lines), spelled=True)


def bug_facts(result: Result) -> Iterator[Fact]:
    """Yield what is wrong, where, how to confirm it, what to do, and how sure that is."""
    assert result.diagnosis is not None
    given, checked = result.diagnosis, tuple(checks(result))
    if not given.causes:
        yield Fact("Bug?", given.headline, TITLES["bug"], checked)
        yield Fact("What to do", f"Fix the bug first. {FIRST}", "Fix the bug first")
        return
    first, *others = given.causes
    also = f" Also: {' '.join(one.statement for one in others)}" if others else ""
    lines = [Line(f"{label}: {text}") for label, text in _details(first, given, result).items() if text]
    lines += [Line(f"Also: {one.statement} {one.statistic}") for one in others]
    after, where = mended(result), next((one.where for one in given.causes if one.where), "")
    fixed = f" After it, K3 is {after} nats." if after else ""
    leave = f" Until then, leave out the sequences with {where}." if where else ""
    heading = f"Fix the bug first{f': {first.fix}' if first.fix else ''}"
    why = (Line(result.recommendation.sentence),) if result.recommendation else ()
    yield Fact("Bug?", f"Yes ({first.id}): {sentence(first.statistic)}{also}", TITLES["bug"], checked)
    yield Fact("Where", sentence(first.where))
    yield from located(result)
    yield Fact("To confirm", sentence(first.confirm))
    yield Fact("Cause", "", first.statement, tuple(lines))
    yield Fact("What to do", f"{sentence(first.fix)}{fixed}{leave}", heading, why)
    yield Fact("How sure", f"{'Counted, not estimated. ' * first.exact}{FIRST}")


def _details(cause: Cause, given: Diagnosis, result: Result) -> dict[str, str]:
    """Return the evidence of a cause, where it is, how to confirm it, its fix, and the numbers after it."""
    counts = ((cause.tokens, given.tokens, "tokens"), (cause.sequences, given.sequences, "sequences"))
    affected = [
        f"{count(some)} of {count(of or some)} {what}" for some, of, what in counts if some is not None
    ]
    examples = (
        f"sequence {name}, position {at}: log π_rollout {format_value(q)}, log π_train {format_value(p)}"
        for name, at, q, p in cause.examples
    )
    found = {
        "Counted" if cause.exact else "Evidence": cause.statistic,
        "Where": "; ".join([cause.where, *affected] if cause.where else affected),
        "Examples": "; ".join(examples),
        "To confirm": cause.confirm,
        "Fix": cause.fix,
    }
    if after := cause.after:
        then = []
        for name, key, unit in (("K3", "k3", ""), ("E[r]", "mean_ratio", ""), ("ESS", "ess_tokens", "share")):
            logged = format_number(replace(result.main(key), interval=None, note=None))
            then.append(
                f"{name} {logged} → {'≈ ' * after.approximate}{format_value(getattr(after, key), unit)}"
            )
        over = f"(over {counted(after.tokens, 'token')})"
        found[f"After the fix, {after.what}"] = f"{', '.join(then)} {over}"
    return found


def located(result: Result) -> Iterator[Fact]:
    """Yield the clearest place that tells damaged tokens from clean ones, and what decides there."""
    for one in result.diagnosis.where[:1] if result.diagnosis else ():
        yield Fact("Where", one.sentence, lines=(Line(one.measure),))


def mended(result: Result) -> str:
    """Return K3 after the first cause is repaired, where that at least halves it; else nothing."""
    causes, k3 = result.diagnosis.causes if result.diagnosis else [], result.main("k3").value
    after = causes[0].after if causes else None
    if after is None or (k3 is not None and after.k3 > k3 / 2):
        return ""
    return f"{'about ' * after.approximate}{rounded(after.k3)}"


# ---------------------------------------------------------------- what to do


def grows(result: Result) -> str:
    """Return a sentence on K3 that grows over the steps, and on the mean reward that falls."""
    grown = growth(result)
    if grown is None:
        return ""
    (a, low, _), (b, high, _) = grown.ends
    first, last = grown.thirds
    rises = f"K3 rises from {rounded(low)} (step {a}) to {rounded(high)} (step {b})"
    if (high or 0.0) < GROWN * (low or 0.0):  # the first or the last step is unlike its third
        rises = f"the median K3 of the steps rises from {rounded(first)} (first third)"
        rises += f" to {rounded(last)} (last third)"
    fall = ""
    if grown.reward is not None:
        before, after = map(rounded, grown.reward)
        fall = f", while the mean reward falls from {before} (first third) to {after} (last third)"
    return f"{'It collapses' if fall and last > MERGE else 'It grows'}: {rises}{fall}."


REMEDIES = {
    "open": (
        "Until the cause is known, {title} limits the harm: {effect}.",
        "Measure first; until the cause is known, {title}",
    ),
    "grows": ("Then {title} ({effect}).", "Resume from before step {step}, then use {title}"),
    "": ("{title}: {effect}.", "Use {title}"),
}
"""What a correction is given for: causes that are open, a run whose K3 grows, any other → what to do, and the
heading of its card."""


def what_to_do(result: Result, given: Recommendation) -> Fact:
    """Return the correction, why, what it changes on this dump, and its configuration for each trainer."""
    open_, grown, method = result.undecided, growth(result), given.method or ""
    before = _resume(result, grown)
    remedy, heading, source = given.sentence, capital(given.decision), ""
    if given.decision == "no correction needed" and not open_:
        remedy = f"No correction is needed. {remedy}"
    if given.title:
        case = REMEDIES["open" if open_ else "grows" if before else ""]
        effect, step = _effect(result, method), grown and grown.surely
        remedy, heading = (one.format(title=given.title, effect=effect, step=step) for one in case)
        causes = result.diagnosis.causes if result.diagnosis else []
        fix = next((one.fix for one in causes if one.kind == "honest" and one.fix), "")
        source = f"At the source: {lower(sentence(fix))}" if fix and not (before and grew(result)) else ""
    lines = [Line(f"First: {lower(open_.decide)}")] if open_ and open_.decide else []
    lines += [Line(before, said=True)] if before else []
    lines += [Line(given.sentence, said=not given.title)]
    if method in result.presets:
        lines.append(
            Line(f"As a rule: {result.presets[method].method}, where r = π_train / π_rollout of a token.")
        )
    lines += [Line(f"As a preset: `offpol-diag presets {method}`")] if method else []
    said = " ".join(filter(None, ("Measure first." * bool(open_), before, capital(remedy), source)))
    return Fact("What to do", said, heading, tuple(lines), _weights(result, given), _configs(result, given))


def _resume(result: Result, grown: Growth | None) -> str:
    """Return what a run whose K3 grows needs before a correction: the last good step, and smaller updates."""
    if grown is None or grown.surely is None:
        return ""
    perhaps = f" (perhaps from step {grown.perhaps})" if grown.perhaps != grown.surely else ""
    said = f"Resume from before step {grown.surely}: from there K3 is above {MERGE:g}{perhaps}."
    return f"{said} {SMALLER}" if grew(result) else said


def _effect(result: Result, method: str) -> str:
    """Return what the method changes on this dump: ESS, from a raw one that is reliable, and truncation."""
    numbers, raw = result.preset(method), result.main("ess_tokens")
    if "ess_tokens" not in numbers:
        return "it is none of the presets that were computed"
    before = f"{formatted(raw).value} → " if raw.known and not doubted(raw) else ""
    cut = numbers.get("truncated_high", Number())
    said = f"ESS {before}{formatted(numbers['ess_tokens']).value}"
    return f"{said}, {formatted(cut).value} truncated" if cut.value else said


def _weights(result: Result, given: Recommendation) -> Table | None:
    """Return the weights without correction and under the method, where known."""
    own = result.preset(given.method or "")
    if not given.title or not own:
        return None
    raw = {name: result.main(key) for name, key in UNCORRECTED.items()}
    pairs = [(name, raw.get(name), own.get(name)) for name in WEIGHTS]
    rows = [(title(name), *pair) for name, *pair in pairs if any(one and one.value for one in pair)]
    return Table("weights", "Weights before and after", ("on this dump", "uncorrected", given.title), rows)


UNCORRECTED = {"ess_tokens": "ess_tokens", "ess_sequences": "ess_sequences", "weight_mean": "mean_ratio"}
WEIGHTS = (*UNCORRECTED, "weight_max", "truncated_high", "tokens_rejected", "sequences_dropped")
"""Rows of the table of weights; of some the number of the dump that it is without a correction."""


def _configs(result: Result, given: Recommendation) -> tuple[tuple[str, str], ...]:
    """Return the recommendation for each trainer that can say it: that of --for, the dump's, all others."""
    known, own = catalogue.load(), named_in(result.dump.provenance)
    if not given.method or given.method not in known:
        return ()
    policy = Evidence(result).policy
    found = {name: prescribed(given, name, policy) for name in trainers_for(known[given.method])}
    ranked = sorted(found.items(), key=lambda one: (one[1] != given.config, one[0] != own))
    return tuple((name, text) for name, text in ranked if text)


def how_sure(given: Recommendation) -> Iterator[Fact]:
    """Yield what the decision rests on, and what is not known, where a correction was weighed up."""
    if given.decision in ("no correction needed", "METHOD at THRESHOLD"):
        yield Fact("How sure", given.source, "How sure?", (Line(given.source, said=True), Line(NO_GRADIENT)))


# ---------------------------------------------------------------- what was read

FEW = 5
"""Ignored columns that are named in the short form."""


def every_column(facts: DumpFacts) -> str:
    """Return that every column was read under its own name, a mask among them; empty if not so."""
    own = all(role == column for role, column in facts.columns.items())
    every = own and "response_mask" in facts.columns and facts.ignored == []
    return f", all {count(len(facts.columns) + len(facts.others))} columns read" if every else ""


def columns(facts: DumpFacts) -> str:
    """Return what was read, columns of other names with them, and what was ignored."""
    read = [role if role == column else f"{role} = {column}" for role, column in facts.columns.items()]
    read += [] if "response_mask" in facts.columns else ["no mask"]
    said = ", ".join([*read, *facts.others])
    if facts.ignored is None:
        return said
    more = f" and {count(len(facts.ignored) - FEW)} more" if len(facts.ignored) > FEW else ""
    names = ", ".join(facts.ignored[:FEW])
    return f"{said}; {f'ignored: {names}{more}' if names else 'none ignored'}"


# ---------------------------------------------------------------- a cause, without a dump

KINDS = {
    "logged": "a bug: the numbers are logged wrongly",
    "sampled": "a bug: tokens were sampled from another distribution than the logged one",
    "model": "a bug: the two sides compute different models",
    "weights": "a bug: the two sides hold different weights",
    "honest": "an honest mismatch",
}
"""Kind of a cause → what is said of it."""


def explained(cause: KnownCause) -> Answer:
    """Return what it looks like, known threads, how to confirm it, how to fix it, and what looks alike."""
    from offpol_diag.diagnosis.cause import TRAINERS  # which imports numpy

    said = [("Looks like", cause.looks)]
    for one in cause.threads:
        why = f" Cause: {one.cause}." if one.cause else ""
        said.append(("Known from", f"{', '.join(one.at)}: {one.symptom}.{why}"))
    said.append(("Confirm", filled(cause, cause.confirm)))
    said += [(f"In {TRAINERS[name]}", text) for name, text in cause.settings.items()]
    said.append(("Fix", filled(cause, cause.fix)))
    said += [("Look-alikes", f"{name}: {what}") for name, what in cause.apart.items()]
    others = tuple(("explain", f"{EXPLAIN} {name}") for name in list(cause.apart)[:1])
    return Answer(
        f"{cause.id}: {KINDS[cause.kind]}",
        "",
        cause.title,
        "info",
        facts=tuple(Fact(label, text.replace("`", "")) for label, text in said if text),
        next=(*others, ("doctor", "offpol-diag doctor DUMP.parquet")),
        heading=cause.id,
    )


def filled(cause: KnownCause, text: str) -> str:
    """Return a text of a cause as a sentence, with words for what a dump would fill in."""
    return sentence(text.format_map(defaultdict(str, cause.blanks)))


def every_cause() -> Answer:
    """Return the list of causes."""
    from offpol_diag.diagnosis.registry import CAUSES

    rows = [(one.id, one.kind, one.title) for one in CAUSES]
    return Answer(
        "what each looks like, how to confirm it in a trainer, and how to fix it",
        "",
        f"{len(rows)} causes of a mismatch",
        "info",
        tables=(Table("causes", "", ("cause", "kind", "what it is"), rows),),
        next=(("explain", f"{EXPLAIN} CAUSE"),),
    )
