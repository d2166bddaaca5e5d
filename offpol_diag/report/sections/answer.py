"""The answer of an analysis: verdict, checks, cause, what to do, how sure, and the headline numbers.

The terminal prints it by default, a pull request shows it first, and it is the first screen of the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median
from typing import Literal

from offpol_diag.advice.prescription import expressible, prescribed
from offpol_diag.metrics import PAIRS, Tone, band, title, tone
from offpol_diag.numerals import count, counted, doubted, rounded, say, written
from offpol_diag.presets.candidates import DEFAULT, NOTHING
from offpol_diag.presets.tuning import command
from offpol_diag.report.sections import columns
from offpol_diag.report.sections.diagnosis import cause_details, is_bug, undecided
from offpol_diag.report.sections.numbers import (
    Tile,
    alerts,
    curve,
    drift,
    heavy,
    intervals_of,
    steps_of,
    tiles,
)
from offpol_diag.summary import (
    MARGIN,
    CandidateCause,
    Cause,
    Diagnosis,
    Fired,
    Number,
    Recommendation,
    Summary,
)
from offpol_diag.trainers import TRAINERS, named_in

GROWN = 5.0
"""Factor between the first and last third of the steps from which K3 is said to grow, as in the alert."""
MERGE, ALIGNED = 0.015, 0.001
"""Bounds proposed for the gate: that of a merge, and the one of a dense model where this dump is below it."""
SMALLER = (
    "Make updates smaller: a lower learning rate, fewer epochs per batch, fewer steps between weight syncs."
)
ALONE = "A correction alone does not save the run."
STANDARD = ("seq_is", "seq_mis", "geo_rs")
"""Presets of whole sequences that are shown beside the recommended rule."""
WEIGHTS = (
    "ess_tokens",
    "ess_sequences",
    "weight_max",
    "weight_mean",
    "truncated_high",
    "truncated_low",
    "tokens_weighted",
    "tokens_rejected",
    "sequences_dropped",
)
"""Rows of the table of weights under the method, the runner-up and no correction."""
TITLES = {
    "healthy": "Healthy: nothing points to a logging bug",
    "honest_mismatch": "Honest mismatch: nothing points to a logging bug",
    "bug": "A bug: the log-probs are logged or computed wrongly",
    "cannot_tell": "Cannot tell a bug from honest mismatch",
}
FITTING = "Cannot tell: nothing in this dump establishes a cause"
DECIDE = "Decide"
"""Label of the measurement that decides between the candidates, which stand before it."""
MISSING = "Missing"
"""Label of the columns that a hook can write, and of what they would decide."""
LABELS = {
    "default": "The default: no alternative has a measurably lower estimated error.",
    "measured": "Measured on this dump: no alternative has a measurably lower estimated error.",
    "no difference detected": "No method has a measurably lower estimated error than no correction.",
}
UNRANKED = {
    "default": "The default: estimated errors could not be compared on this dump.",
    "measured": "Measured on this dump, but not by estimated errors, which could not be compared.",
    "no difference detected": "Estimated errors could not be compared on this dump.",
}
"""Label of the recommendation → how sure it is, where no alternative is ahead, and where none is ranked."""
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
Weights = tuple[tuple[str, ...], tuple[tuple[str, tuple[Number | None, ...]], ...]]
"""Titles of columns, and rows with a title each."""


@dataclass(frozen=True)
class Check:
    """One check: passed, failed or not testable."""

    state: Literal["ok", "no", "un"]
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Correction:
    """A correction: the share of tokens with a weight, and its effective sample size."""

    name: str
    weighted: Number
    ess: Number
    what: str


@dataclass(frozen=True)
class Answer:
    """All that a reader needs first.

    Attributes:
        about: what was read.
        columns: under which names, and what was ignored; `all_read`: that there is nothing to say of it.
        headline: the verdict; its first sentence is what `--quiet` prints.
        tone: how bad it is.
        cautions: what limits every number: skipped rows, warnings about the data.
        bug: whether the log-probs are logged wrongly, so that no correction is ranked.
        verdict: the diagnosis in a phrase, and the checks behind it.
        cause: its statement; `evidence`: bold opening and sentence; `others`: further causes.
        candidates: where no cause is established, those that fit; `decide`: the measurement that decides.
        action: what to do; `why` it is recommended, `effect` what it changes on this dump.
        weights: of the method, the runner-up and no correction.
        configs: trainer → configuration to paste, the dump's own first; `config`: of that or of --for.
        sure: how the decision was made, and whether the runner-up ties; `reasons` and what is not known.
        facts: label → sentences: all of that in short.
        steps: what the curves of the tiles run over; empty without training steps.
        heavy: which of the tiles' numbers a heavy tail leaves unknown; empty where it is light.
    """

    about: str
    columns: str
    all_read: str
    headline: tuple[str, ...]
    tone: Tone
    cautions: tuple[str, ...]
    bug: bool
    verdict: str
    checks: tuple[Check, ...]
    cause: str
    evidence: tuple[tuple[str, str], ...]
    others: tuple[Cause, ...]
    candidates: tuple[CandidateCause, ...]
    decide: str
    action: str
    why: str
    rule: str
    weights: Weights | tuple[()]
    configs: tuple[tuple[str, str], ...]
    config: str
    preset: str
    sure: tuple[str, ...]
    reasons: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    tiles: tuple[Tile, ...]
    steps: str
    heavy: str
    findings: tuple[str, ...]
    corrections: tuple[Correction, ...]
    others_at: str
    commands: tuple[tuple[str, str], ...]


def answer(summary: Summary) -> Answer:
    """Return the answer of an analysis."""
    prefix, bug, given = drift(summary), is_bug(summary), summary.recommendation
    causes, open_ = summary.diagnosis.causes if summary.diagnosis else [], undecided(summary)
    found, steps = tiles(summary), steps_of(summary)
    row = band("k3", summary.metrics.get(f"{prefix}k3", Number()))
    ranked = None if bug else given
    corrections = _corrections(summary, ranked) if ranked else ()
    named = given is not None and given.method in summary.presets and not given.settings
    more = f"All {len(summary.presets)} presets: -v." if len(summary.presets) > len(corrections) > 0 else ""
    every = _configs(summary, ranked) if ranked else ()
    own = dict(every).get(trainer_of(summary), "")
    config = (ranked.config or forms(own)[0]) if ranked else ""
    checked, evidence = checks(summary), _evidence(summary)
    sure = () if bug or given is None else certainty(given)
    return Answer(
        about=about(summary),
        columns=columns.in_short(summary.dump),
        all_read=columns.all_read(summary.dump),
        headline=headline(summary),
        tone="bad" if bug else "warn" if row is None or _few(summary) else tone(row.name),
        cautions=cautions(summary),
        bug=bug,
        verdict=_title(summary),
        checks=checked,
        cause=causes[0].statement if causes else "",
        evidence=evidence,
        others=tuple(causes[1:]),
        candidates=tuple(open_.candidates) if open_ else (),
        decide=open_.decide if open_ else "",
        action=_action(summary, given, open_ is not None) if given else "",
        why=_why(given, open_, _before(summary)) if given else "",
        rule=summary.presets[given.method].method if named and given and given.method else "",
        weights=_weights(summary, ranked) if ranked else (),
        configs=every,
        config=config,
        preset=command(ranked.method, ranked.settings) if ranked and ranked.method else "",
        sure=sure,
        reasons=_reasons(ranked) if ranked else (),
        facts=tuple(fact for fact in _facts(summary, checked, evidence, sure) if fact[1]),
        tiles=found,
        steps=f"steps {steps[0]} to {steps[-1]}" if steps and any(tile.curve for tile in found) else "",
        heavy=heavy(summary),
        findings=() if corrections else findings(summary),
        corrections=corrections,
        others_at=more,
        commands=_commands(summary, prefix),
    )


def _title(summary: Summary) -> str:
    if summary.diagnosis is None:
        return "Not examined"
    return FITTING if undecided(summary) else TITLES[summary.diagnosis.verdict]


def about(summary: Summary) -> str:
    """Return what was read, in one line."""
    dump, steps = summary.dump, steps_of(summary)
    name = PurePath(dump.files[0]).name if dump.files else "dump"
    more = f" and {counted(len(dump.files) - 1, 'more file')}" if len(dump.files) > 1 else ""
    parts = [counted(dump.sequences, "sequence"), counted(dump.tokens, "token")]
    parts += [counted(dump.groups, "prompt")] if "group_id" in dump.columns else []
    parts += [f"steps {steps[0]} to {steps[-1]}"] if len(steps) > 1 else []
    return f"{name}{more}: {', '.join(parts)}"


def cautions(summary: Summary) -> tuple[str, ...]:
    """Return what limits every number: skipped rows, and warnings about the data."""
    skipped = summary.dump.skipped
    rows = "1 row was" if skipped.count == 1 else f"{count(skipped.count)} rows were"
    left_out = (f"{rows} skipped as bad; no number here covers them.",) if skipped.count else ()
    return (*left_out, *summary.dump.notes)


# ---------------------------------------------------------------- verdict


def headline(summary: Summary) -> tuple[str, ...]:
    """Return the verdict in one sentence, and a second on growth over the steps or on the bug's share."""
    prefix, given = drift(summary), summary.diagnosis
    k3 = summary.metrics.get(f"{prefix}k3", Number())
    size = ""
    if k3.known:
        value, interval = written(k3.model_copy(update={"note": None}))
        over = f" ({PAIRS[prefix]})" if prefix else ""
        size = f"K3 KL is {value} nats per token{f' {interval}' if interval else ''}{over}"
    if given is not None and given.verdict == "bug":
        after = given.causes[0].after if given.causes else None
        fixed = f"; {_approximately(after.k3, after.approximate)} after the fix" if after else ""
        first = given.headline[:1].lower() + given.headline[1:]
        return (f"BUG: {first}", f"As logged, {size}{fixed}." if size else "")
    if not size:
        return ("The dump holds no pair of policies whose mismatch could be measured.",)
    row = band("k3", k3)
    name = row.name if row else ""
    if _few(summary):
        return (f"TOO LITTLE DATA for a verdict: {size} ({name})", growth(summary))
    if summary.recommendation and summary.recommendation.rule == "identical":
        return ("THE SAME NUMBERS TWICE: was one column copied from the other?", "")
    if given is not None and given.verdict == "cannot_tell" and not given.candidates:
        return (f"CANNOT TELL a bug from a mismatch: {size} ({name})", growth(summary))
    return (f"{name.upper()} off-policy mismatch: {size}", growth(summary))


def _approximately(value: float, approximate: bool) -> str:
    return f"{'about ' if approximate else ''}{rounded(value)}"


def growth(summary: Summary) -> str:
    """Return a sentence on a collapse: K3 that grows over the steps, and the mean reward that falls."""
    known = [(key, value) for key, value in curve(summary, "k3") if value is not None]
    third = len(known) // 3
    if not third:
        return ""
    first, last = (median(v for _, v in part) for part in (known[:third], known[-third:]))
    if last <= max(GROWN * first, 1e-4):
        return ""
    rewards = [value for _, value in curve(summary, "reward") if value is not None]
    fell = len(rewards) > 1 and rewards[-1] < rewards[0] - 0.5 * abs(rewards[0])
    word = "It collapses" if fell and last > MERGE else "It grows"
    (a, low), (b, high) = known[0], known[-1]
    rises = f"{word}: K3 rises from {rounded(low)} (step {a}) to {rounded(high)} (step {b})"
    if high < GROWN * low:  # the first or the last step is unlike its third
        rises = f"{word}: the median K3 of the steps rises from {rounded(first)} (first third)"
        rises += f" to {rounded(last)} (last third)"
    ends = (
        f", while the mean reward falls from {rounded(rewards[0])} to {rounded(rewards[-1])}" if fell else ""
    )
    return f"{rises}{ends}."


def _last_good(summary: Summary) -> tuple[str, str]:
    """Return where K3 goes above the merge gate for good; empty where it does not, or is from the first step.

    Returns:
        The first step from which on its whole interval is above the gate, and from which on its value is.
    """
    known = curve(summary, "k3")
    if not growth(summary):
        return "", ""
    steps = summary.charts.steps
    names = [str(one) for one in steps.first] if steps else [key for key, _ in known]
    ends = intervals_of(summary, "k3")
    lows = [value if end is None else end[0] for (_, value), end in zip(known, ends, strict=True)]
    sure, likely = _beyond(names, lows), _beyond(names, [value for _, value in known])
    return ("", "") if sure == names[0] else (sure, likely)


def _beyond(names: list[str], values: list[float | None]) -> str:
    """Return the first step from which on all values are above the merge gate."""
    first = ""
    for name, value in zip(reversed(names), reversed(values), strict=True):
        if value is None or value <= MERGE:
            break
        first = name
    return first


def _before(summary: Summary) -> str:
    """Return what a run whose K3 grows needs before a correction: the last good step, and smaller updates."""
    sure, likely = _last_good(summary)
    if is_bug(summary) or not sure:
        return ""
    perhaps = f" (perhaps from step {likely})" if likely != sure else ""
    said = f"Resume from before step {sure}: from there K3 is above {MERGE:g}{perhaps}."
    return f"{said} {SMALLER}" if _grew(summary) else said


def _grew(summary: Summary) -> bool:
    """Return whether stale weights are the cause, and K3 grows at a constant lag: so the updates do."""
    lag, given = summary.charts.lag, summary.diagnosis
    stale = given is not None and bool(given.causes) and given.causes[0].id == "stale"
    return bool(stale and lag and lag.growth and lag.growth > 2 and lag.start and lag.end and lag.steps)


def _few(summary: Summary) -> bool:
    return summary.recommendation is not None and summary.recommendation.rule == "few"


# ---------------------------------------------------------------- bug and cause


def checks(summary: Summary) -> tuple[Check, ...]:
    """Return what was checked for a bug."""
    given, prefix = summary.diagnosis, drift(summary)
    if given is None:
        return ()
    found = [Check("no", one.statement, one.statistic) for one in given.causes if one.kind == "bug"]
    k1 = summary.metrics.get(f"{prefix}k1", Number())
    if k1.value is not None:
        negative = (k1.interval or (k1.value, k1.value))[1] < 0
        said = "K1 is negative" if negative else f"K1 is not {'clearly ' if k1.value < 0 else ''}negative"
        detail = f"{say(k1)} nats. {CHECKED['k1']}"
        if negative and not is_bug(summary):
            said, why = UNEXPLAINED[k1.value > -ROUNDING]
            found.append(Check("un", said, f"{detail} {why}"))
        else:
            found.append(Check("no" if negative else "ok", said, detail))
    synced = summary.charts.lag.in_sync if summary.charts.lag else None
    if synced and synced.value is not None and not is_bug(summary):
        row = band("k3", Number(value=synced.value))
        agree = row is not None and tone(row.name) in ("good", "info")
        said = f"In sync (lag 0) K3 is {rounded(synced.value)}"
        detail = f"There engine and trainer {'agree' if agree else 'differ already'}. {CHECKED['sync']}"
        found.append(Check("ok" if agree else "un", said, detail))
    ratio = summary.metrics.get(f"{prefix}mean_ratio", Number())
    if ratio.value is not None and doubted(ratio):
        mean = written(ratio.model_copy(update={"note": None})).value
        detail = f"The tail of r is too heavy: its sample mean, {mean}, is not a usable estimate."
        found.append(Check("un", "E[r] = 1 cannot be tested", detail))
    elif ratio.interval is not None:
        low, high = ratio.interval
        found.append(Check("ok" if low <= 1 <= high else "un", f"E[r] is {say(ratio)}", CHECKED["centre"]))
    if given.ruled_out:
        said = f"{counted(len(given.ruled_out), 'further fault')} ruled out"
        found.append(Check("ok", said, "; ".join(given.ruled_out) + "."))
    found += [Check("un", "Not testable on this dump", one) for one in given.undecidable]
    return tuple(found)


def _evidence(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Return the evidence for the cause, the most telling first: (bold opening, sentence)."""
    given, lag = summary.diagnosis, summary.charts.lag
    first = given.causes[0] if given and given.causes else None
    if given is None or first is None:
        return ()
    if is_bug(summary):
        return tuple(line.partition(": ")[::2] for line in cause_details(first, given, summary.metrics))
    said: list[tuple[str, str]] = []
    if _grew(summary) and lag and lag.start and lag.end and lag.steps:
        ends = (
            f"{rounded(one.value)} (step {step})"
            for one, step in zip((lag.start, lag.end), lag.steps, strict=True)
            if one.value is not None
        )
        said.append(
            ("Growing updates:", f"at a constant lag of {lag.lag}, K3 rises from {' to '.join(ends)}.")
        )
    synced = lag.in_sync.value if lag and lag.in_sync else None
    if lag and synced is not None and lag.in_sync_share is not None and lag.in_sync_share < 0.5:
        share = rounded(lag.in_sync_share, "share")
        there = f"as far as lag 0 shows: there K3 is {rounded(synced)}, {share} of all."
        said.append(("Not the engine,", there))
    if lag and lag.ratio_by_lag:
        times = [f"{key} behind, {rounded(one)} times" for key, one in lag.ratio_by_lag.items()]
        said.append(("Lag:", f"K3 against lag 0, in updates: {'; '.join(times[:3])}."))
    said += [("Evidence:", _sentence(first.statistic))] if not said else []
    said += [("To confirm:", first.confirm)] if first.confirm else []
    return (*said, ("At the source:", first.fix)) if first.fix else tuple(said)


# ---------------------------------------------------------------- what to do, and how sure


def _action(summary: Summary, given: Recommendation, open_: bool) -> str:
    if open_ and given.title:
        return f"Measure first; until the cause is known, {given.title}"
    if is_bug(summary):
        causes = summary.diagnosis.causes if summary.diagnosis else []
        fix = causes[0].fix if causes else ""
        return f"Fix the bug first{f': {fix}' if fix else ''}"
    at = f"{given.method} at {given.threshold}" if given.threshold else given.method
    named, step = given.title or at, _last_good(summary)[0]
    if step and named:
        return f"Resume from before step {step}, then use {named}"
    return f"Use {named}" if named else given.decision[:1].upper() + given.decision[1:]


def _why(given: Recommendation, open_: Diagnosis | None, before: str) -> str:
    """Return why it is recommended, after what comes first: a measurement, or an earlier step."""
    first = f"First: {_lower(open_.decide)}" if open_ and open_.decide else ""
    return " ".join(filter(None, (first, before, before and ALONE, given.sentence)))


def _effect(summary: Summary, given: Recommendation) -> str:
    """Return what the method changes on this dump: ESS, and the tokens that it truncates or leaves out.

    A raw ESS that is unreliable is no measure of what the method gains.
    """
    numbers = given.numbers.get(given.title or "", {})
    raw = summary.metrics.get(f"{drift(summary)}ess_tokens", Number())
    cut, weighted = (numbers.get(name, Number()) for name in ("truncated_high", "tokens_weighted"))
    parts = []
    if "ess_tokens" in numbers:
        before = f"{written(raw).value} → " if raw.known and not doubted(raw) else ""
        parts.append(f"ESS {before}{written(numbers['ess_tokens']).value}")
    if weighted.value is not None and weighted.value < 1:
        parts.append(f"{written(weighted).value} of the tokens with a weight")
    elif cut.value:
        parts.append(f"{written(cut).value} truncated")
    return ", ".join(parts)


def _weights(summary: Summary, given: Recommendation) -> Weights | tuple[()]:
    """Return the weights without correction, under the method and under the runner-up, where known."""
    if not given.title or given.title not in given.numbers:
        return ()
    names = [name for name in (given.title, given.runner_up or "") if name in given.numbers]
    known, prefix = summary.metrics, drift(summary)
    ess = {key: known.get(prefix + key) for key in ("ess_tokens", "ess_sequences")}
    raw = {**ess, "weight_mean": known.get(f"{prefix}mean_ratio")}
    columns: list[Mapping[str, Number | None]] = [raw, *(given.numbers[name] for name in names)]
    rows = ((title(key), tuple(column.get(key) for column in columns)) for key in WEIGHTS)
    return ("uncorrected", *names), tuple(row for row in rows if any(one and one.value for one in row[1]))


def _configs(summary: Summary, given: Recommendation) -> tuple[tuple[str, str], ...]:
    """Return the recommendation in the syntax of each trainer that can say it.

    That of --for comes first, then the dump's own.
    """
    if not given.method:
        return ()
    own = trainer_of(summary)
    known = [name for name in TRAINERS if expressible(given.method, given.settings, name)]
    found = [(name, prescribed(given, name) or "") for name in known]
    asked = next((name for name, text in found if text == given.config), own)
    if given.config and not any(text == given.config for _, text in found) and own not in known:
        found.insert(0, (own or "configuration", given.config))
    first = (asked, own)
    ranked = sorted(found, key=lambda one: first.index(one[0]) if one[0] in first else len(first))
    return tuple(one for one in ranked if one[1])


def forms(text: str) -> tuple[str, str]:
    """Split a configuration into its first form and all others, which begin with a comment each."""
    pieces = text.strip().split("\n\n# ")
    head = 2 if len(pieces) > 1 and all(line.startswith("#") for line in pieces[0].splitlines()) else 1
    first, others = "\n\n# ".join(pieces[:head]), "\n\n# ".join(pieces[head:])
    return first, f"# {others}" if others else ""


def tie(given: Recommendation) -> list[str]:
    """Return a sentence on the runner-up, or on the default beside no correction: a toss-up, or not.

    There is none if its error is lower, which `ahead` says.
    """
    other = given.runner_up or (DEFAULT.title if given.decision == "no correction needed" else "")
    found = next((one for one in given.ranking if one.title == other and one.behind), None)
    if found is None or found.behind is None or found.behind.interval is None:
        return [f"The runner-up is {other}."] if given.runner_up else []
    low, high = found.behind.interval
    if found.ahead:
        return []
    if found.tie and max(-low, high) <= MARGIN:
        return [f"A toss-up with {other}, whose estimated error is within {MARGIN:.0%}: so the simpler one."]
    if found.tie:
        return [f"A toss-up with {other}, whose estimated error is {_by(found.behind)}: so the simpler one."]
    return [f"The estimated error of {other} is {_by(found.behind)}."]


def certainty(given: Recommendation) -> tuple[str, ...]:
    """Return how the decision was made, what is measured against it, and how the runner-up stands."""
    compared = any(one.behind and one.behind.interval for one in given.ranking)
    stands = ahead(given) or (LABELS if compared else UNRANKED).get(given.label or "", "")
    return tuple(filter(None, (stands, *tie(given))))


def ahead(given: Recommendation) -> str:
    """Return a sentence on the alternatives whose estimated error is measurably lower; empty without."""
    found = [(one.title, one.behind) for one in given.ranking if one.ahead and one.behind]
    chosen = given.title or NOTHING.title
    why = f"; {chosen} is advised all the same{f', because {given.despite}' if given.despite else ''}."
    if not found:
        return ""
    if len(found) == 1:
        ((title, behind),) = found
        size = _by(behind)
        if title == NOTHING.title:
            return f"Without a correction the estimated error is {size}{why}"
        article = "an" if re.match(r"8|1[18](\D|$)", size) else "a"
        return f"{_capital(title)} has {article} {size} estimated error{why}"
    every = ", ".join(f"{title} ({_by(behind).removesuffix(' lower')})" for title, behind in found)
    return f"Estimated errors that are measurably lower: {every}{why}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _by(number: Number) -> str:
    """Return a difference of errors in words: 3.1% [1.6%, 4.5%] higher."""
    value, ends = number.value or 0.0, number.interval or (0.0, 0.0)
    low, high = sorted(ends) if value >= 0 else sorted(-end for end in ends)
    size = say(number.model_copy(update={"value": abs(value), "interval": (low, high)}))
    return f"{size} {'higher' if value >= 0 else 'lower'}"


def _reasons(given: Recommendation) -> tuple[str, ...]:
    """Return the reasons, what is not known, the longest response and who set the rule."""
    longest = given.longest_response
    usable = longest and (longest.unknown if longest.value is None else f"{say(longest)} tokens")
    limit = f"Longest response at which importance sampling of whole sequences keeps 10% ESS: {usable}"
    sources = dict.fromkeys(one.source for one in given.fired if one.rule == given.rule and one.source)
    return (
        *given.reasons,
        *(f"Not known: {_lower(line)}" for line in given.unknown),
        *((limit,) if usable else ()),
        *(f"Source: {source}" for source in sources),
    )


# ---------------------------------------------------------------- in short


def _facts(
    summary: Summary, checked: tuple[Check, ...], evidence: tuple[tuple[str, str], ...], sure: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Return bug, cause, remedy and certainty in a few sentences each."""
    given, advised = summary.diagnosis, summary.recommendation
    causes = given.causes if given else []
    if is_bug(summary) and causes:
        return _of_bug(causes, advised)
    said = [one.text for one in checked if not one.text.endswith(("on this dump", "ruled out"))]
    no_sign = f"No sign of one. {' '.join(map(_sentence, said))}".strip()
    bug = "Not examined." if given is None else given.headline if given.verdict == "cannot_tell" else no_sign
    short = evidence and evidence[0][0].startswith("Growing")  # which says more than the cause's own clause
    cause = (causes[0].statement.partition(":")[0] if short else causes[0].statement) if causes else ""
    unknown = [line for line in advised.unknown if "needs" in line] if advised and sure else []
    levels = alerts(summary)
    sure_of = [one.sentence.rstrip(".") for one in levels if _tells(one, summary)][:2]
    many = f"{len(levels)} published {'level is' if len(levels) == 1 else 'levels are'} crossed (-v)"
    among = ", among them" if len(sure_of) < len(levels) else ""
    warnings = f"{many}{among}: {'; '.join(sure_of)}." if sure_of else ""
    open_ = undecided(summary)
    told = open_.decide if open_ else ""
    lacks = [f"{name}: {why}" for name, why in columns.missing(summary.dump).items() if name not in told]
    missing = (MISSING, f"{'; '.join(lacks)}." if lacks else "")
    if open_:
        return (
            ("Bug?", open_.headline),
            (DECIDE, open_.decide),
            ("What to do", _remedy(summary, causes)),
            missing,
            ("Warnings", warnings),
        )
    return (
        ("Bug?", bug),
        ("Cause", f"{_sentence(cause)} {' '.join(evidence[0])}" if evidence else cause),
        ("What to do", _remedy(summary, causes)),
        ("How sure", " ".join([*sure, *(f"Not known: {_lower(line)}" for line in unknown[:1])])),
        missing,
        ("Warnings", warnings),
    )


def _tells(alert: Fired, summary: Summary) -> bool:
    """Return whether an alert says what the rest of the answer does not: growth and the heavy tail are there.

    Nor is a level told as crossed by a number that the tail leaves unknown.
    """
    known = not any(doubted(summary.metrics.get(key, Number())) for key in alert.saw)
    return known and alert.rule not in ("growing", "heavy tail")


def _remedy(summary: Summary, causes: list[Cause]) -> str:
    """Return the correction, what it changes, and the fix at the source."""
    given = summary.recommendation
    if given is None:
        return ""
    if undecided(summary):
        return _until_decided(summary, given)
    fix = next((one.fix for one in causes if one.kind == "honest" and one.fix), "")
    also = f" At the source: {_lower(_sentence(fix))}" if fix else ""
    if not given.title:
        label = {"no correction needed": "No correction is needed. "}.get(given.decision, "")
        said = f"{label}{given.sentence}" + (also if given.decision == "no method helps" else "")
        return f"{_before(summary)} {said}".strip()
    title, effect = _capital(given.title), _effect(summary, given)
    if before := _before(summary):
        then = f"Then {given.title}{f' ({effect})' if effect else ''}: alone it does not save the run."
        return f"{before} {then}{'' if _grew(summary) else also}"
    small = summary.diagnosis is not None and summary.diagnosis.verdict == "healthy"
    why = f" {given.sentence}" if effect and small else ""  # although the mismatch is small
    return f"{title}: {_sentence(effect or given.sentence)}{why}{also}"


def _until_decided(summary: Summary, given: Recommendation) -> str:
    """Return what limits the harm while the cause is not known."""
    if not given.title:
        return " ".join(filter(None, ("Measure first.", _before(summary), given.sentence)))
    effect = _effect(summary, given)
    harm = f"Until the cause is known, {given.title} limits the harm{f': {effect}' if effect else ''}"
    return " ".join(filter(None, ("Measure first.", _before(summary), _sentence(harm))))


def _of_bug(causes: list[Cause], given: Recommendation | None) -> tuple[tuple[str, str], ...]:
    first, *others = causes
    after = first.after
    fixed = f" After it, K3 is {_approximately(after.k3, after.approximate)} nats." if after else ""
    also = f" Also: {' '.join(one.statement for one in others)}" if others else ""
    _, _, until = given.sentence.partition("Until then, ") if given else ("", "", "")
    leave = f" Until then, {until}" if until else ""
    return (
        ("Bug?", f"Yes ({first.id}): {_sentence(first.statistic)}{also}"),
        ("Where", _sentence(first.where)),
        ("To confirm", _sentence(first.confirm)),
        ("What to do", f"{_sentence(first.fix)}{fixed}{leave}"),
        ("How sure", f"{'Counted, not estimated. ' if first.exact else ''}Nothing is ranked before the fix."),
    )


def findings(summary: Summary) -> tuple[str, ...]:
    """Return what else matters, in sentences."""
    longest = summary.recommendation.longest_response if summary.recommendation else None
    top, f_2 = (summary.metrics.get(drift(summary) + name, Number()) for name in ("k3_top1_share", "f_2"))
    said = []
    if f_2.value is not None:
        some = f"{say(f_2)} of the tokens differ" if f_2.value else "No token differs"
        said.append(f"{some} by more than a factor of 2.")
    if top.value is not None:
        said.append(f"The top 1% of the tokens carry {written(top).value} of K3.")
    if longest is not None and longest.value is not None:
        mean = count(round(summary.dump.mean_length))
        keep = f"Sequence weights keep less than 10% ESS beyond {say(longest)} tokens"
        said.append(f"{keep}; the mean response has {mean}.")
    return tuple(said)


# ---------------------------------------------------------------- corrections and commands


def _corrections(summary: Summary, given: Recommendation) -> tuple[Correction, ...]:
    """Return the recommended rule, the runner-up and the usual rules of whole sequences."""
    if not given.title:
        return ()
    some = [(given.title, given.numbers.get(given.title, {}), "recommended")]
    if given.runner_up:
        some.append((given.runner_up, given.numbers.get(given.runner_up, {}), "runner-up"))
    for name in STANDARD:
        preset = summary.presets.get(name)
        if preset is not None and not preset.needs:
            what = preset.method.partition("; veto")[0].removeprefix("weight ")
            some.append((name, preset.metrics, what.replace("keep sequences with ", "")))
    rows = []
    for name, numbers, what in some:
        ess, weighted = (numbers.get(key, Number()) for key in ("ess_tokens", "tokens_weighted"))
        if ess.value is not None:
            rows.append(Correction(name, weighted, ess, what))
    return tuple(rows)


def _commands(summary: Summary, prefix: str) -> tuple[tuple[str, str], ...]:
    """Return the commands to go on with: the configuration of the method, and a gate."""
    given = summary.recommendation
    k3 = summary.metrics.get(f"{prefix}k3", Number()).value
    found = []
    if given is not None and given.method and not is_bug(summary):
        shown = command(given.method, given.settings)
        found.append(("config", f"{shown} --for {trainer_of(summary) or 'TRAINER'}"))
    if k3 is not None:
        limit = ALIGNED if k3 < ALIGNED else MERGE
        found.append(("gate", f"offpol-diag gate NEXT.parquet --fail-on bug --max {prefix}k3={limit}"))
    return tuple(found)


def trainer_of(summary: Summary) -> str:
    """Return the trainer that the dump's metadata names; empty if it names none that is known."""
    return named_in(summary.dump.provenance)


# ---------------------------------------------------------------- words


def _sentence(text: str) -> str:
    """Return a clause as a sentence; names of columns and options keep their first letter."""
    text = text.strip()
    if text.partition(" ")[0].rstrip(",:;").replace("-", "").isalpha():
        text = text[:1].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) or not text else ".")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
