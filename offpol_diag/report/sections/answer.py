"""The answer in short: verdict, cause, what to do, how sure; headline numbers; the corrections that matter.

What the terminal prints by default, and a pull request shows first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median

from offpol_diag.bands import Tone, band
from offpol_diag.numerals import count, counted, doubted, say, written
from offpol_diag.presets.candidates import DEFAULT
from offpol_diag.presets.tuning import command
from offpol_diag.summary import MARGIN, Cause, Number, Numbers, Place, Recommendation, Summary
from offpol_diag.trainers import TRAINERS

DRIFTS = ("", "total.", "drift2.")
GROWN = 5.0
"""Factor between the first and last third of the steps from which K3 is said to grow, as in the alert."""
MERGE, ALIGNED = 0.015, 0.001
"""Bounds proposed for the gate: that of a merge, and the one of a dense model where this dump is below it."""
STANDARD = ("seq_is", "seq_mis", "geo_rs")
"""Presets of whole sequences that are shown beside the recommended rule."""


@dataclass(frozen=True)
class Tile:
    """A headline number: label, key for the gate, band, and its values by training step."""

    label: str
    key: str
    number: Number
    band: str
    tone: Tone
    curve: tuple[float | None, ...] = ()
    unit: str = ""
    beside: str = ""

    @property
    def value(self) -> str:
        """The value with its interval or, where there is none, with what stands beside it."""
        if self.number.value is None and self.number.log10 is None:
            return self.beside
        return " ".join(part for part in (*written(self.number), self.beside) if part)


@dataclass(frozen=True)
class Correction:
    """A correction: what it keeps, and its effective sample size."""

    name: str
    kept: float | None
    ess: Number
    what: str


@dataclass(frozen=True)
class Answer:
    """All that a reader needs first.

    Attributes:
        about: what was read.
        headline: the verdict; its first sentence is what `--quiet` prints.
        tone: how bad it is.
        cautions: what limits every number: skipped rows, warnings about the data.
        facts: label → sentences.
        steps: what the curves of the tiles run over; empty without training steps.
    """

    about: str
    headline: tuple[str, ...]
    tone: Tone
    cautions: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    tiles: tuple[Tile, ...]
    steps: str
    findings: tuple[str, ...]
    corrections: tuple[Correction, ...]
    others: str
    commands: tuple[tuple[str, str], ...]


def answer(summary: Summary) -> Answer:
    """Return the answer of an analysis."""
    prefix = drift(summary)
    bug = _bug(summary)
    corrections = () if bug else _corrections(summary)
    tiles = _tiles(summary, prefix)
    steps = _steps(summary)
    tone: Tone = "bad" if bug else _tone(summary, prefix)
    return Answer(
        about(summary),
        headline(summary),
        tone,
        cautions(summary),
        tuple((label, text) for label, text in _facts(summary, prefix) if text),
        tiles,
        f"steps {steps[0].key} to {steps[-1].key}" if any(tile.curve for tile in tiles) else "",
        () if corrections else findings(summary),
        corrections,
        f"All {len(summary.presets)} presets: -v."
        if corrections and len(summary.presets) > len(corrections)
        else "",
        _commands(summary, prefix),
    )


def drift(summary: Summary) -> str:
    """Return the prefix of the main pair of policies: rollout → old, else rollout → current."""
    known = (prefix for prefix in DRIFTS if summary.metrics.get(f"{prefix}k3", Number()).value is not None)
    return next(known, "")


def about(summary: Summary) -> str:
    """Return what was read, in one line."""
    dump, steps = summary.dump, _steps(summary)
    name = PurePath(dump.files[0]).name if dump.files else "dump"
    more = f" and {counted(len(dump.files) - 1, 'more file')}" if len(dump.files) > 1 else ""
    parts = [counted(dump.sequences, "sequence"), counted(dump.tokens, "token")]
    parts += [counted(dump.groups, "prompt")] if "group_id" in dump.columns else []
    parts += [f"steps {steps[0].key} to {steps[-1].key}"] if len(steps) > 1 else []
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
    prefix = drift(summary)
    k3 = summary.metrics.get(f"{prefix}k3", Number())
    given = summary.diagnosis
    size = _size(k3, prefix)
    if given is not None and given.verdict == "bug":
        after = given.causes[0].after if given.causes else None
        fixed = f"; {_approximately(after.k3, after.approximate)} after the fix" if after else ""
        first = given.headline[:1].lower() + given.headline[1:]
        return (f"BUG: {first}", f"As logged, {size}{fixed}." if size else "")
    if not size:
        return ("The dump holds no pair of policies whose mismatch could be measured.",)
    grown = growth(summary)
    row = band("k3", k3)
    name = row.name if row else ""
    if _few(summary):
        return (f"TOO LITTLE DATA for a verdict: {size} ({name})", grown)
    if summary.recommendation and summary.recommendation.rule == "identical":
        return ("THE SAME NUMBERS TWICE: was one column copied from the other?", "")
    if given is not None and given.verdict == "cannot_tell":
        return (f"CANNOT TELL a bug from a mismatch: {size} ({name})", grown)
    return (f"{name.upper()} off-policy mismatch: {size}", grown)


def _size(k3: Number, prefix: str) -> str:
    if k3.value is None and k3.log10 is None:
        return ""
    value, interval = written(k3.model_copy(update={"note": None}))
    over = {"total.": " (rollout → current)", "drift2.": " (old → current)"}.get(prefix, "")
    return f"K3 KL is {value} nats per token{f' {interval}' if interval else ''}{over}"


def _approximately(value: float, approximate: bool) -> str:
    return f"{'about ' if approximate else ''}{say(Number(value=value))}"


def growth(summary: Summary) -> str:
    """Return a sentence on a collapse: K3 that grows over the steps, and the mean reward that falls."""
    prefix = drift(summary)
    known = [(key, value) for key, value in _curve(summary, prefix, "k3") if value is not None]
    third = len(known) // 3
    if not third:
        return ""
    first, last = (median(v for _, v in part) for part in (known[:third], known[-third:]))
    if last <= max(GROWN * first, 1e-4):
        return ""
    (a, low), (b, high) = known[0], known[-1]
    word = "It collapses" if last > MERGE else "It grows"
    told = f"{word}: K3 rises from {_short(low)} (step {a}) to {_short(high)} (step {b})"
    rewards = [value for _, value in _curve(summary, prefix, "reward") if value is not None]
    fell = len(rewards) > 1 and rewards[-1] < 0.5 * rewards[0]
    return told + (
        f", while the mean reward falls from {_short(rewards[0])} to {_short(rewards[-1])}." if fell else "."
    )


def _tone(summary: Summary, prefix: str) -> Tone:
    row = band("k3", summary.metrics.get(f"{prefix}k3", Number()))
    return "warn" if row is None or _few(summary) else row.tone


def _bug(summary: Summary) -> bool:
    return summary.diagnosis is not None and summary.diagnosis.verdict == "bug"


def _few(summary: Summary) -> bool:
    given = summary.recommendation
    return given is not None and given.rule == "few"


# ---------------------------------------------------------------- bug, cause, remedy, how sure


def _facts(summary: Summary, prefix: str) -> tuple[tuple[str, str], ...]:
    given = summary.diagnosis
    causes = given.causes if given else []
    if _bug(summary) and causes:
        return _of_bug(causes, summary.recommendation)
    return (
        ("Bug?", _checks(summary, prefix)),
        ("Cause", _cause(summary, causes[0]) if causes else ""),
        ("What to do", remedy(summary)),
        ("How sure", how_sure(summary)),
        ("Warnings", _warnings(summary)),
    )


def _of_bug(causes: list[Cause], given: Recommendation | None) -> tuple[tuple[str, str], ...]:
    first, *others = causes
    after = first.after
    fixed = f" After it, K3 is {_approximately(after.k3, after.approximate)} nats." if after else ""
    also = f" Also: {' '.join(one.statement for one in others)}" if others else ""
    _, _, until = given.sentence.partition("Until then, ") if given else ("", "", "")
    leave = f" Until then, {until}" if until else ""
    return (
        ("Bug?", f"Yes ({first.id}): {_sentence(first.statistic)}{also}"),
        ("Where", _sentence(first.where) if first.where else ""),
        ("To confirm", _sentence(first.confirm)),
        ("What to do", f"{_sentence(first.fix)}{fixed}{leave}"),
        ("How sure", f"{'Counted, not estimated. ' if first.exact else ''}Nothing is ranked before the fix."),
    )


def _checks(summary: Summary, prefix: str) -> str:
    """Return what speaks against a bug, and what could not be tested."""
    given = summary.diagnosis
    if given is None:
        return "Not examined."
    if given.verdict == "cannot_tell":
        return given.headline
    k1 = summary.metrics.get(f"{prefix}k1", Number())
    parts = ["K1 is not negative"] if (k1.interval or (k1.value or 0.0,) * 2)[1] >= 0 else []
    parts += ["log-probs line up"] if any("shifted" in line for line in given.ruled_out) else []
    synced = _in_sync(summary, prefix)
    parts += [f"in sync (lag 0) K3 is {_short(synced)}"] if synced is not None else []
    return f"No sign of one. {_sentence(_listed(parts))} {_centre(summary, prefix)}".strip()


def _centre(summary: Summary, prefix: str) -> str:
    ratio, khat = (summary.metrics.get(prefix + name, Number()) for name in ("mean_ratio", "khat_tokens"))
    if ratio.value is None:
        return ""
    if doubted(ratio):
        return f"E[r] = 1 cannot be tested: k̂ = {say(khat.model_copy(update={'note': None}))}."
    if ratio.interval is None:
        return "E[r] = 1 cannot be tested: too few prompts for an interval."
    low, high = ratio.interval
    return f"E[r] is {say(ratio)}{', as it must be' if low <= 1 <= high else ''}."


def _in_sync(summary: Summary, prefix: str) -> float | None:
    """Return K3 at lag 0 where some other tokens lag."""
    lags = summary.by.get("policy_lag")
    places = lags.places if lags else []
    synced = len(places) > 1 and places[0].key == "0" and not prefix
    return _at(places[0], "k3").value if synced else None


def _cause(summary: Summary, cause: Cause) -> str:
    """Return a cause with its evidence: where K3 grows at one lag, that."""
    lag, said = summary.charts.lag, f"{_sentence(cause.statement)} {_sentence(cause.statistic)}"
    if cause.id != "stale" or lag is None or not (lag.start and lag.end and lag.steps):
        return said
    (first, last), low, high = lag.steps, lag.start.value, lag.end.value
    if low is None or high is None or (lag.growth or 0.0) < GROWN:
        return said
    ends = f"{_short(low)} (step {first}) to {_short(high)} (step {last})"
    return f"Stale rollouts and growing updates: at a constant lag of {lag.lag}, K3 rises from {ends}."


def remedy(summary: Summary) -> str:
    """Return the correction, what it changes, and the fix at the source."""
    given = summary.recommendation
    if given is None:
        return ""
    causes = summary.diagnosis.causes if summary.diagnosis else []
    at_source = next((one.fix for one in causes if one.kind == "honest" and one.fix), "")
    also = f" At the source: {_sentence(at_source).lower()}" if at_source else ""
    if not given.title:
        label = {"no correction needed": "No correction is needed. "}.get(given.decision, "")
        return f"{label}{given.sentence}" + (also if given.decision == "no method helps" else "")
    title = given.title[:1].upper() + given.title[1:]
    return f"{title}: {_effect(summary, given)}.{also}"


def _effect(summary: Summary, given: Recommendation) -> str:
    numbers = given.numbers.get(given.title or "", {})
    raw = summary.metrics.get(f"{drift(summary)}ess_tokens", Number())
    parts = []
    if "ess_tokens" in numbers:
        parts.append(f"ESS {_value(raw)} → {_value(numbers['ess_tokens'])}")
    for name, what in (("truncated_high", "truncated"), ("tokens_rejected", "rejected")):
        number = numbers.get(name, Number())
        parts += [f"{_value(number)} {what}"] if number.value else []
    return ", ".join(parts) or given.sentence.removesuffix(".")


def how_sure(summary: Summary) -> str:
    """Return how the decision was made, whether the runner-up ties with it, and what is not known."""
    given = summary.recommendation
    if given is None or given.label is None:
        return ""
    said = {
        "default": "The default: nothing measured here is better.",
        "measured": "Measured on this dump.",
        "no difference detected": "K3 lies below what a difference needs to show.",
    }[given.label]
    unknown = [line for line in given.unknown if "needs" in line]
    return " ".join([said, *tie(given), *(f"Not known: {_lower(line)}" for line in unknown[:1])])


def tie(given: Recommendation) -> list[str]:
    """Return a sentence on the runner-up, or on the default beside no correction: a toss-up, or not."""
    other = given.runner_up or (DEFAULT.title if given.decision == "no correction needed" else "")
    found = next((one for one in given.ranking if one.title == other and one.behind), None)
    if found is None or found.behind is None or found.behind.interval is None:
        return [f"The runner-up is {other}."] if given.runner_up else []
    low, high = found.behind.interval
    if found.tie and max(-low, high) <= MARGIN:
        return [f"A toss-up with {other}, whose estimated error is within {MARGIN:.0%}: so the simpler one."]
    if found.tie:
        return [f"A toss-up with {other}, whose estimated error is {_by(found.behind)}: so the simpler one."]
    who = f"The runner-up, {other}" if given.runner_up else f"{other[:1].upper()}{other[1:]}"
    return [f"{who}, is {'behind' if low > 0 else 'ahead'}: its estimated error is {_by(found.behind)}."]


def _by(number: Number) -> str:
    """Return a difference of errors in words: 3.1% higher [1.6%, 4.5%]."""
    value, ends = number.value or 0.0, number.interval or (0.0, 0.0)
    low, high = sorted(ends) if value >= 0 else sorted(-end for end in ends)
    size = say(number.model_copy(update={"value": abs(value), "interval": (low, high)}))
    return f"{size} {'higher' if value >= 0 else 'lower'}"


def _warnings(summary: Summary) -> str:
    """Return how many published warning levels are crossed, and the first of them."""
    fired = summary.recommendation.fired if summary.recommendation else []
    levels = [one for one in fired if one.level == "alert"]
    said = [one.sentence.rstrip(".") for one in levels if one.rule != "growing"][:2]
    word = "level is" if len(levels) == 1 else "levels are"
    return f"{len(levels)} published {word} crossed (-v): {'; '.join(said)}." if said else ""


# ---------------------------------------------------------------- numbers


def _tiles(summary: Summary, prefix: str) -> tuple[Tile, ...]:
    metrics = summary.metrics
    sequences = metrics.get(f"{prefix}khat_sequences", Number())
    beside = f"(sequences {_value(sequences)})" if sequences.value is not None else ""
    found = [
        _tile(summary, prefix, "K3 KL", "k3"),
        _tile(summary, prefix, "PPL ratio", "ppl_ratio"),
        _tile(summary, prefix, "ESS, tokens", "ess_tokens"),
        _tile(summary, prefix, "ESS, sequences", "ess_sequences"),
        _tile(summary, prefix, "χ², tokens", "chi2_token"),
        _tile(summary, prefix, "Pareto k̂", "khat_tokens", beside),
        _reward(summary),
    ]
    return tuple(tile for tile in found if tile is not None)


def _reward(summary: Summary) -> Tile | None:
    number, curve = summary.metrics.get("mean_reward", Number()), _curve(summary, "", "reward")
    values = tuple(value for _, value in curve)
    if number.value is None and len(set(values)) < 2:
        return None
    return Tile("Mean reward", "mean_reward", number, "", "info", values if len(values) > 1 else ())


def _tile(summary: Summary, prefix: str, label: str, key: str, beside: str = "") -> Tile | None:
    number = summary.metrics.get(prefix + key, Number())
    if number.value is None and number.log10 is None:
        return None
    curve = tuple(value for _, value in _curve(summary, prefix, key))
    row = band(key, number)
    name, tone = (row.name, row.tone) if row else ("", "info")
    if key == "khat_tokens":
        name, tone = ("unreliable", "bad") if number.note else ("reliable", "good")
        number = number.model_copy(update={"note": None})
    known = sum(value is not None for value in curve)
    return Tile(label, prefix + key, number, name, tone, curve if known > 1 else (), number.unit, beside)


def _steps(summary: Summary) -> list[Place]:
    where = summary.by.get("step")
    return where.places if where else []


def _curve(summary: Summary, prefix: str, name: str) -> list[tuple[str, float | None]]:
    """Return a number of the main pair of policies by training step."""
    steps = summary.charts.steps
    if steps is None:
        return [(one.key, _at(one, prefix + name).value) for one in _steps(summary)]
    values = steps.series[name].values if name in steps.series else []
    return [(str(last), value) for last, value in zip(steps.last, values, strict=False)]


def _at(place: Place, name: str) -> Number:
    """Return a number of a place; there the main pair of policies has no prefix."""
    for key in (name, name.removeprefix("total.").removeprefix("drift2.")):
        for numbers in (place.metrics, place.asked):
            if key in numbers:
                return numbers[key]
    return Number()


def findings(summary: Summary, most: int = 3) -> tuple[str, ...]:
    """Return what else matters, in sentences."""
    prefix = drift(summary)
    longest = summary.recommendation.longest_response if summary.recommendation else None
    top, f_2 = (summary.metrics.get(prefix + name, Number()) for name in ("k3_top1_share", "f_2"))
    said = []
    if f_2.value is not None:
        said.append(f"{say(f_2)} of the tokens differ by more than a factor of 2.")
    if top.value is not None:
        said.append(f"The top 1% of the tokens carry {_value(top)} of K3.")
    if longest is not None and longest.value is not None:
        mean = count(round(summary.dump.mean_length))
        said.append(
            f"Sequence weights keep less than 10% ESS beyond {say(longest)} tokens; "
            f"the mean response has {mean}."
        )
    return tuple(said[:most])


# ---------------------------------------------------------------- corrections


def _corrections(summary: Summary) -> tuple[Correction, ...]:
    """Return the recommended rule, the runner-up and the usual rules of whole sequences."""
    given = summary.recommendation
    if given is None or not given.title:
        return ()
    rows = [_correction(given.title, given.numbers.get(given.title, {}), "recommended")]
    if given.runner_up:
        rows.append(_correction(given.runner_up, given.numbers.get(given.runner_up, {}), "runner-up"))
    for name in STANDARD:
        preset = summary.presets.get(name)
        if preset is not None and not preset.needs:
            what = (
                preset.method.partition("; veto")[0]
                .removeprefix("weight ")
                .replace("keep sequences with ", "")
            )
            rows.append(_correction(name, preset.metrics, what))
    return tuple(row for row in rows if row.ess.value is not None)


def _correction(name: str, numbers: Numbers, what: str) -> Correction:
    rejected = numbers.get("tokens_rejected", Number()).value
    kept = None if rejected is None else 1 - rejected
    return Correction(name, kept, numbers.get("ess_tokens", Number()), what)


def _commands(summary: Summary, prefix: str) -> tuple[tuple[str, str], ...]:
    """Return the commands to go on with: the configuration of the method, and a gate."""
    given = summary.recommendation
    k3 = summary.metrics.get(f"{prefix}k3", Number()).value
    found = []
    if given is not None and given.method and not _bug(summary):
        found.append(
            ("config", f"{command(given.method, given.settings)} --for {trainer_of(summary) or 'TRAINER'}")
        )
    if k3 is not None:
        limit = ALIGNED if k3 < ALIGNED else MERGE
        found.append(("gate", f"offpol-diag gate NEXT.parquet --max {prefix}k3={limit}"))
    return tuple(found)


def trainer_of(summary: Summary) -> str:
    """Return the trainer that the dump's metadata names; empty if it names none that is known."""
    said = re.split(r"[^a-z0-9-]+", str(summary.dump.provenance.get("trainer", "")).lower().replace("_", "-"))
    return next((name for name in TRAINERS if name in said), "")


# ---------------------------------------------------------------- words


def _value(number: Number) -> str:
    """Return a value without its interval."""
    return written(number).value


def _short(value: float) -> str:
    return say(Number(value=value))


def _sentence(text: str) -> str:
    """Return a clause as a sentence; names of columns and options keep their first letter."""
    text = text.strip()
    if text.partition(" ")[0].rstrip(",:;").replace("-", "").isalpha():
        text = text[:1].upper() + text[1:]
    return text + ("" if text.endswith((".", "!", "?")) or not text else ".")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}" if parts else ""
