"""What is said of the diagnosis: the checks for a bug, the causes with their evidence, the candidates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from offpol_diag.metrics import band, tone
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import count, counted, doubted, rounded, say, say_value, written
from offpol_diag.report.answer import Fact, Line
from offpol_diag.result import After, CandidateCause, Cause, Diagnosis, Result
from offpol_diag.result.steps import apart_in_sync, in_sync

NOTHING = "nothing in this dump"
FIRST = "No correction is named before the fix."
TITLES = {
    "healthy": "Healthy: nothing points to a logging bug",
    "honest_mismatch": "Honest mismatch: nothing points to a logging bug",
    "bug": "A bug: the log-probs are logged or computed wrongly",
    "cannot_tell": "Cannot tell a bug from honest mismatch",
}
FITTING = "Cannot tell: nothing in this dump establishes a cause"
CHECKED = {
    "k1": "A clearly negative K1 would mean that the tokens were not drawn from the logged distribution.",
    "sync": "A wrong temperature, a shifted column or a padding value would show here already.",
    "centre": "1 when the tokens were drawn from the logged distribution.",
}
ROUNDING = 1e-5
"""Size of K1 in nats that the rounding of log-probs explains."""
UNEXPLAINED = {
    True: (
        "K1 is negative, and small enough for rounding",
        f"Rounded log-probs alone make it up to {ROUNDING:g} nats negative.",
    ),
    False: (
        "K1 is negative, which no logging fault looked for explains",
        "A few tokens that are logged far off, sampling cut by top-p or top-k, and responses selected by "
        "their outcome make it negative too.",
    ),
}
"""Whether K1 is as small as rounding → what is said of a negative K1 where no bug was found, and why."""


def checks(summary: Result) -> tuple[Line, ...]:
    """Return what was checked for a bug."""
    given, prefix = summary.diagnosis, summary.prefix
    if given is None:
        return ()
    found = [Line(one.statement, "no", one.statistic) for one in given.causes if one.kind == "bug"]
    k1 = summary.whole.get(f"{prefix}k1", Number())
    if k1.value is not None:
        negative = k1.interval is not None and k1.interval[1] < 0
        said = "K1 is negative" if negative else f"K1 is not {'clearly ' if k1.value < 0 else ''}negative"
        detail = f"{say(k1)} nats. {CHECKED['k1']}"
        if negative and not summary.is_bug:
            said, why = UNEXPLAINED[k1.value > -ROUNDING]
            found.append(Line(said, "un", f"{detail} {why}"))
        else:
            found.append(Line(said, "no" if negative else "ok", detail))
    synced, apart = in_sync(summary), apart_in_sync(summary)
    if apart and not summary.is_bug:
        least, most = (f"{rounded(one.value)} (step {one.step})" for one in apart)
        detail = "Weights in sync differ by numerics alone, and as much at every step."
        found.append(Line(f"In sync (lag 0) K3 is {least} to {most}", "un", detail))
    if synced and synced.value is not None and not summary.is_bug:
        row = band("k3", Number(value=synced.value))
        agree = row is not None and tone(row.name) in ("good", "info")
        said = f"In sync (lag 0) K3 is {rounded(synced.value)}"
        detail = f"There engine and trainer {'agree' if agree else 'differ already'}. {CHECKED['sync']}"
        found.append(Line(said, "ok" if agree else "un", detail))
    ratio = summary.whole.get(f"{prefix}mean_ratio", Number())
    if ratio.value is not None and doubted(ratio):
        mean = written(replace(ratio, note=None)).value
        detail = f"The tail of r is too heavy: its sample mean, {mean}, is not a usable estimate."
        found.append(Line("E[r] = 1 cannot be tested", "un", detail))
    elif ratio.interval is not None:
        low, high = ratio.interval
        found.append(Line(f"E[r] is {say(ratio)}", "ok" if low <= 1 <= high else "un", CHECKED["centre"]))
    if given.ruled_out:
        said = f"{counted(len(given.ruled_out), 'further fault')} ruled out"
        found.append(Line(said, "ok", "; ".join(given.ruled_out) + "."))
    found += [Line("Not testable on this dump", "un", one) for one in given.undecidable]
    if given.sequences is not None and given.tokens is not None and given.sequences < summary.dump.sequences:
        some = f"{counted(given.tokens, 'token')} of {counted(given.sequences, 'sequence')}"
        said = f"Looked at one by one: {some}, of the {count(summary.dump.sequences)} in the dump"
        found.append(Line(said, "un"))
    return tuple(found)


def evidence(summary: Result) -> tuple[str, ...]:
    """Return the evidence for the cause in sentences, the most telling first."""
    given, lag = summary.diagnosis, summary.charts.lag
    first = given.causes[0] if given and given.causes else None
    if given is None or first is None:
        return ()
    if summary.is_bug:
        return cause_details(first, given, summary.whole)
    said = []
    if grew(summary) and lag and lag.start and lag.end and lag.steps:
        ends = (
            f"{rounded(one.value)} (step {step})"
            for one, step in zip((lag.start, lag.end), lag.steps, strict=True)
            if one.value is not None
        )
        said.append(
            f"At a constant lag of {lag.lag}, K3 rises from {' to '.join(ends)}: the updates grow, or "
            "weights no longer arrive, which a checksum of them on both sides tells apart."
        )
    one = in_sync(summary)
    synced = one.value if one else None
    if lag and synced is not None and lag.in_sync_share is not None and lag.in_sync_share < 0.5:
        share = rounded(lag.in_sync_share, "share")
        said.append(f"Not the engine, as far as lag 0 shows: there K3 is {rounded(synced)}, {share} of all.")
    if lag and lag.ratio_by_lag:
        times = [f"{key} behind, {rounded(one)} times" for key, one in lag.ratio_by_lag.items()]
        said.append(f"Lag: K3 against lag 0, in updates: {'; '.join(times[:3])}.")
    said += [f"Evidence: {sentence(first.statistic)}"] if not said else []
    said += [f"To confirm: {first.confirm}"] if first.confirm else []
    return (*said, f"At the source: {first.fix}") if first.fix else tuple(said)


def expected(summary: Result) -> Iterator[Fact]:
    """Yield the range that K3 is expected in, where the metadata of the dump says enough."""
    for one in summary.charts.expected:
        low, high = rounded(one.low or 0.0), rounded(one.high or 0.0)
        yield Fact("Expected", f"K3 of {low} to {high} ({one.regime}).")


def grew(summary: Result) -> bool:
    """Return whether stale weights are the cause, and K3 grows at a constant lag."""
    lag, given = summary.charts.lag, summary.diagnosis
    stale = given is not None and bool(given.causes) and given.causes[0].id == "stale"
    return bool(stale and lag and lag.growth and lag.growth > 2 and lag.start and lag.end and lag.steps)


def of_bug(summary: Result) -> Iterator[Fact]:
    """Yield what is wrong, where, how to confirm it, what to do, and how sure that is."""
    assert summary.diagnosis is not None
    if not summary.diagnosis.causes:
        yield Fact("Bug?", summary.diagnosis.headline, verdict(summary), checks(summary))
        yield Fact("What to do", f"Fix the bug first. {FIRST}", "Fix the bug first")
        return
    first, *others = summary.diagnosis.causes
    after, given = mended(summary), summary.recommendation
    fixed = f" After it, K3 is {approximately(after)} nats." if after else ""
    also = f" Also: {' '.join(one.statement for one in others)}" if others else ""
    where = next((one.where for one in summary.diagnosis.causes if one.kind == "bug" and one.where), "")
    leave = f" Until then, leave out the sequences with {where}." if where else ""
    lines = tuple(map(Line, evidence(summary)))
    lines += tuple(Line(f"Also: {one.statement} {one.statistic}") for one in others)
    yield Fact(
        "Bug?", f"Yes ({first.id}): {sentence(first.statistic)}{also}", verdict(summary), checks(summary)
    )
    yield Fact("Where", sentence(first.where))
    yield from located(summary)
    yield Fact("To confirm", sentence(first.confirm))
    yield Fact("Cause", "", first.statement, lines)
    title = f"Fix the bug first{f': {first.fix}' if first.fix else ''}"
    why = (Line(given.sentence),) if given else ()
    yield Fact("What to do", f"{sentence(first.fix)}{fixed}{leave}", title, why, shortened="last")
    certain = "Counted, not estimated. " if first.exact else ""
    yield Fact("How sure", f"{certain}{FIRST}")


def located(summary: Result) -> Iterator[Fact]:
    """Yield the clearest place that tells damaged tokens from clean ones, and what decides there."""
    for one in summary.diagnosis.where[:1] if summary.diagnosis else ():
        yield Fact("Where", one.sentence, lines=(Line(one.measure),))


def mended(summary: Result) -> After | None:
    """Return the mismatch after the first cause is repaired, where that at least halves K3."""
    causes, k3 = summary.diagnosis.causes if summary.diagnosis else [], summary.number("k3").value
    after = causes[0].after if causes else None
    return after if after and (k3 is None or after.k3 <= k3 / 2) else None


def approximately(after: After) -> str:
    """Return K3 after the fix in words."""
    return f"{'about ' if after.approximate else ''}{rounded(after.k3)}"


def verdict(summary: Result) -> str:
    """Return the diagnosis in a phrase."""
    if summary.diagnosis is None:
        return "Not examined"
    return FITTING if summary.undecided else TITLES[summary.diagnosis.verdict]


def candidates(given: Diagnosis) -> Fact:
    """Return the causes that fit in their order, each with what speaks for it and against it."""
    many = len(given.candidates)
    title = "One fits, and is not established" if many == 1 else f"{many} fit, the least contradicted first"
    lines = [
        Line(f"{place}. {one.statement}", "", spoken(one)) for place, one in enumerate(given.candidates, 1)
    ]
    return Fact("Candidates", "", title, tuple(lines), spelled=True)


def spoken(one: CandidateCause) -> str:
    """Return what speaks for a candidate and against it."""
    if not (one.for_ or one.against):
        return f"For and against: {NOTHING}."
    sides = (("For", one.for_), ("Against", one.against))
    return " ".join(f"{side}: {' '.join(said) if said else f'{NOTHING}.'}" for side, said in sides)


def cause_details(cause: Cause, given: Diagnosis, metrics: Numbers) -> tuple[str, ...]:
    """Return the evidence of a cause, how to confirm it and its fix, a line each."""
    detail = (
        f"{'Counted' if cause.exact else 'Evidence'}: {cause.statistic}",
        cause.violates and f"Violates: {cause.violates}",
        _found(cause, given),
        _examples(cause),
        cause.confirm and f"To confirm: {cause.confirm}",
        cause.fix and f"Fix: {cause.fix}",
        cause.after and _after(cause.after, metrics),
    )
    return tuple(line for line in detail if line)


def _found(cause: Cause, given: Diagnosis) -> str:
    """Return the location of a cause, and how many of the examined tokens and sequences it affects."""
    concerned = (
        f"{_of(cause.tokens, given.tokens)} tokens" if cause.tokens is not None else "",
        f"{_of(cause.sequences, given.sequences)} sequences" if cause.sequences is not None else "",
    )
    said = "; ".join(part for part in (cause.where, *concerned) if part)
    return said and f"Where: {said}"


def _of(some: int, whole: int | None) -> str:
    if whole is None:
        return count(some)
    return f"all {count(some)}" if some == whole else f"{count(some)} of {count(whole)}"


def _examples(cause: Cause) -> str:
    said = "; ".join(
        f"sequence {one.sequence_id}, position {one.position}: log π_rollout "
        f"{say_value(one.rollout_log_prob)}, log π_train {say_value(one.train_log_prob)}"
        for one in cause.examples
    )
    return said and f"Examples: {said}"


def _after(after: After, metrics: Numbers) -> str:
    """Return K3, E[r] and ESS, as logged and with the cause fixed."""
    sign = "≈ " if after.approximate else ""
    pairs = (
        ("K3", "k3", after.k3, "nats"),
        ("E[r]", "mean_ratio", after.mean_ratio, ""),
        ("ESS", "ess_tokens", after.ess_tokens, "fraction"),
    )
    numbers = ", ".join(
        f"{name} {_before(short, metrics)}{sign}{say_value(value, unit)}"
        for name, short, value, unit in pairs
    )
    return f"After the fix, {after.what}: {numbers} (over {counted(after.tokens, 'token')})"


def _before(short: str, metrics: Numbers) -> str:
    """Return the logged value of the main drift, followed by an arrow; empty if unknown."""
    found = (metrics.get(name, Number()) for name in (short, f"total.{short}"))
    value = next((one for one in found if one.known), None)
    return f"{say(replace(value, interval=None, note=None))} → " if value else ""


# ---------------------------------------------------------------- words


def sentence(text: str) -> str:
    """Return a clause as a sentence; names of columns and options keep their first letter."""
    text = text.strip()
    if text.partition(" ")[0].rstrip(",:;").replace("-", "").isalpha():
        text = text[:1].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) or not text else ".")


def lower(text: str) -> str:
    """Return a text with its first letter in lower case."""
    return text[:1].lower() + text[1:]


def capital(text: str) -> str:
    """Return a text with its first letter in upper case."""
    return text[:1].upper() + text[1:]
