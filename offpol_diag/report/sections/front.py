"""The first screen of an analysis: verdict, checks, cause, what to do, and headline numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offpol_diag.advice.prescription import expressible, prescribed
from offpol_diag.bands import Tone, band
from offpol_diag.numerals import count, doubted, say, written
from offpol_diag.presets.tuning import command
from offpol_diag.report.sections.answer import drift, headline, remedy, trainer_of
from offpol_diag.report.sections.diagnosis import cause_details, is_bug
from offpol_diag.summary import Number, Numbers, Recommendation, Summary
from offpol_diag.trainers import TRAINERS

CHECKED = {
    "k1": "A clearly negative K1 would mean that the tokens were not drawn from the logged distribution.",
    "sync": "A wrong temperature, a shifted column or a padding value would show here already.",
    "centre": "1 when the tokens were drawn from the logged distribution.",
}


@dataclass(frozen=True)
class Check:
    """One check: passed, failed or not testable."""

    state: Literal["ok", "no", "un"]
    text: str
    detail: str = ""


@dataclass(frozen=True)
class Tab:
    """The configuration of one trainer."""

    name: str
    text: str


@dataclass(frozen=True)
class Tile:
    """A headline number with its band and its curve by step."""

    label: str
    value: str
    unit: str
    interval: str
    doubt: str
    band: str
    tone: Tone | None
    curve: tuple[float | None, ...]
    ends: str
    key: str
    metric: str


def lede(summary: Summary) -> str:
    """Return what follows the headline: growth over the steps, and whether it is a bug."""
    given = summary.diagnosis
    said = [*headline(summary)[1:]]
    if given is not None and given.verdict != "bug":
        said.append(given.headline)
    return " ".join(one for one in said if one)


def checks(summary: Summary) -> tuple[Check, ...]:
    """Return what was checked for a bug."""
    given, prefix = summary.diagnosis, drift(summary)
    if given is None:
        return ()
    found = [Check("no", one.statement, one.statistic) for one in given.causes if one.kind == "bug"]
    k1 = summary.metrics.get(f"{prefix}k1", Number())
    if k1.value is not None:
        negative = (k1.interval or (k1.value, k1.value))[1] < 0
        said = "K1 is negative" if negative else "K1 is not negative"
        found.append(Check("no" if negative else "ok", f"{said}: {say(k1)} nats", CHECKED["k1"]))
    lag = summary.charts.lag
    if lag and lag.in_sync and lag.in_sync.value is not None and not is_bug(summary):
        synced = Number(value=lag.in_sync.value)
        row = band("k3", synced)
        agree = row is not None and row.tone in ("good", "info")
        said = "engine and trainer agree" if agree else "engine and trainer differ already"
        found.append(
            Check("ok" if agree else "un", f"In sync, {said}: K3 {say(synced)} at lag 0", CHECKED["sync"])
        )
    ratio, khat = (summary.metrics.get(prefix + name, Number()) for name in ("mean_ratio", "khat_tokens"))
    if ratio.value is not None and doubted(ratio):
        plain = ratio.model_copy(update={"note": None, "interval": None})
        detail = f"The sample mean of r is {say(plain)}, but above k̂ = 0.7 it is not a usable estimate."
        found.append(Check("un", f"E[r] = 1 cannot be tested: k̂ = {written(khat)[0].rstrip('*')}", detail))
    elif ratio.interval is not None:
        low, high = ratio.interval
        state: Literal["ok", "un"] = "ok" if low <= 1 <= high else "un"
        found.append(Check(state, f"E[r] is {say(ratio)}", CHECKED["centre"]))
    if given.ruled_out:
        found.append(
            Check("ok", f"{len(given.ruled_out)} further faults ruled out", "; ".join(given.ruled_out) + ".")
        )
    found += [Check("un", "Not testable on this dump", one) for one in given.undecidable]
    return tuple(found)


def verdict_title(summary: Summary) -> str:
    """Return the diagnosis in a phrase."""
    given = summary.diagnosis
    titles = {
        "healthy": "Healthy: nothing points to a logging bug",
        "honest_mismatch": "Honest mismatch: nothing points to a logging bug",
        "bug": "A bug: the log-probs are logged or computed wrongly",
        "cannot_tell": "Cannot tell a bug from honest mismatch",
    }
    return titles[given.verdict] if given else "Not examined"


def evidence(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Return the evidence for the cause: (bold opening, sentence)."""
    given, lag = summary.diagnosis, summary.charts.lag
    if given is None:
        return ()
    if is_bug(summary):
        return tuple(
            line.partition(": ")[::2]
            for one in given.causes[:1]
            for line in cause_details(one, given, summary.metrics)
        )
    said: list[tuple[str, str]] = []
    if (
        lag
        and lag.in_sync
        and lag.in_sync.value is not None
        and lag.in_sync_share is not None
        and lag.in_sync_share < 0.5
    ):
        share = say(Number(value=lag.in_sync_share, unit="share"))
        said.append(
            (
                "Not the engine,",
                f"as far as lag 0 shows: there K3 is {say(Number(value=lag.in_sync.value))}, {share} of all.",
            )
        )
    if lag and lag.ratio_by_lag:
        times = "; ".join(
            f"{key} behind, {say(Number(value=one))} times" for key, one in list(lag.ratio_by_lag.items())[:3]
        )
        said.append(("Lag.", f"K3 against lag 0, in updates: {times}."))
    if lag and lag.growth and lag.growth > 2 and lag.start and lag.end:
        ends = (say(Number(value=one.value, interval=one.interval)) for one in (lag.start, lag.end))
        said.append(("Growing updates.", f"At lag {lag.lag} it rises from {' to '.join(ends)}."))
    first = given.causes[0] if given.causes else None
    if first:
        said += [("Evidence.", first.statistic)] if not said else []
        said += [("To confirm:", first.confirm)] if first.confirm else []
        said += [("At the source:", first.fix)] if first.fix else []
    return tuple(said)


def action(summary: Summary) -> tuple[str, str]:
    """Return the title of what to do, and a sentence."""
    given = summary.recommendation
    if given is None:
        return "", ""
    if is_bug(summary):
        causes = summary.diagnosis.causes if summary.diagnosis else []
        fix = causes[0].fix if causes else ""
        return f"Fix the bug first{f': {fix}' if fix else ''}", given.sentence
    at = f"{given.method} at {given.threshold}" if given.threshold else given.method
    if given.title or at:
        return f"Use {given.title or at}", given.sentence
    return given.decision[:1].upper() + given.decision[1:], given.sentence if given.sentence else remedy(
        summary
    )


ROWS = (
    ("ess_tokens", "ESS of tokens"),
    ("ess_sequences", "ESS of sequences"),
    ("weight_max", "Largest weight"),
    ("weight_mean", "Mean weight"),
    ("truncated_high", "Truncated"),
    ("tokens_rejected", "Rejected"),
)


def before_after(
    summary: Summary,
) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[Number | None, ...]], ...]]:
    """Return the heads and rows of the table of weights: no correction, the method, the runner-up."""
    given = summary.recommendation
    if given is None or is_bug(summary) or not given.title or given.title not in given.numbers:
        return (), ()
    heads = [name for name in ("no correction", given.title, given.runner_up or "") if name in given.numbers]
    raw: dict[str, Number | None] = {
        "ess_tokens": summary.metrics.get(f"{drift(summary)}ess_tokens"),
        "ess_sequences": summary.metrics.get(f"{drift(summary)}ess_sequences"),
        "weight_mean": summary.metrics.get(f"{drift(summary)}mean_ratio"),
    }
    columns: list[Numbers | dict[str, Number | None]] = [
        raw,
        *(given.numbers[name] for name in heads if name != "no correction"),
    ]
    names = ("uncorrected", *(name for name in heads if name != "no correction"))
    rows = tuple((title, tuple(column.get(key) for column in columns)) for key, title in ROWS)
    return names, rows


def tabs(summary: Summary) -> tuple[Tab, ...]:
    """Return the recommendation in the syntax of each trainer that can say it, the dump's own first."""
    given = summary.recommendation
    if given is None or is_bug(summary) or not given.method:
        return ()
    own = trainer_of(summary)
    found = [
        Tab(name, prescribed(given, name) or "")
        for name in TRAINERS
        if expressible(given.method, given.settings, name)
    ]
    if given.config and own not in {one.name for one in found}:
        found.insert(0, Tab(own or "configuration", given.config))
    return tuple(sorted((one for one in found if one.text), key=lambda one: one.name != own))


def forms(text: str) -> tuple[str, str]:
    """Split a configuration into its first form and all others, which begin with a comment each."""
    pieces = text.strip().split("\n\n# ")
    head = 2 if len(pieces) > 1 and all(line.startswith("#") for line in pieces[0].splitlines()) else 1
    first, others = "\n\n# ".join(pieces[:head]), "\n\n# ".join(pieces[head:])
    return first, f"# {others}" if others else ""


def sure(given: Recommendation | None) -> tuple[str, ...]:
    """Return the reasons, what is not known, and what to try next."""
    if given is None:
        return ()
    unknown = tuple(f"Not known: {line[:1].lower()}{line[1:]}" for line in given.unknown)
    return (*given.reasons, *unknown)


def preset_command(given: Recommendation) -> str:
    """Return the command that shows the method as a preset."""
    return command(given.method, given.settings) if given.method else ""


# ---------------------------------------------------------------- tiles

TILES = (
    ("K3 KL", "k3", "nats/token"),
    ("PPL ratio", "ppl_ratio", ""),
    ("ESS, tokens", "ess_tokens", ""),
    ("ESS, sequences", "ess_sequences", ""),
    ("χ², tokens", "chi2_token", ""),
    ("χ², sequences", "chi2_sequence", ""),
    ("Pareto k̂, tokens", "khat_tokens", ""),
)


def tiles(summary: Summary) -> tuple[Tile, ...]:
    """Return the headline numbers: seven of the mismatch, and what the recommendation rejects."""
    prefix = drift(summary)
    found = [one for label, key, unit in TILES if (one := _tile(summary, label, prefix, key, unit))]
    given = summary.recommendation
    if given and given.title and not is_bug(summary):
        numbers = given.numbers.get(given.title, {})
        rejected, truncated = (numbers.get(name, Number()) for name in ("tokens_rejected", "truncated_high"))
        if rejected.value is not None:
            method = next((name for name in summary.weights if summary.weights[name] == numbers), "")
            curve = _curve(summary, f"{method}.{'tokens_rejected' if rejected.value else 'truncated_high'}")
            low = f"truncated: {say(truncated)}" if truncated.value is not None else ""
            found.append(
                Tile(
                    "Rejected",
                    written(rejected).value,
                    "of tokens",
                    low,
                    "",
                    given.title,
                    None,
                    curve,
                    _ends(curve, "share"),
                    "",
                    "",
                )
            )
    return tuple(found)


def _tile(summary: Summary, label: str, prefix: str, key: str, unit: str) -> Tile | None:
    number = summary.metrics.get(prefix + key, Number())
    if number.value is None and number.log10 is None:
        return None
    khat = summary.metrics.get(f"{prefix}khat_{'sequences' if 'sequence' in key else 'tokens'}", Number())
    doubt = (
        f"unreliable, k̂ {written(khat)[0].rstrip('*')}"
        if doubted(number) and key != "khat_tokens" and khat.value is not None
        else ""
    )
    value, interval = written(number.model_copy(update={"note": None}))
    row = band(key, number)
    name, tone = (row.name, row.tone) if row else ("", None)
    if key == "khat_tokens":
        name, tone = ("unreliable", "bad") if number.note else ("reliable", "good")
        sequences = summary.metrics.get(f"{prefix}khat_sequences", Number())
        interval = f"sequences: {written(sequences)[0].rstrip('*')}" if sequences.value is not None else ""
    curve = _curve(summary, key)
    return Tile(
        label, value, unit, interval, doubt, name, tone, curve, _ends(curve, number.unit), prefix + key, key
    )


def _curve(summary: Summary, name: str) -> tuple[float | None, ...]:
    steps = summary.charts.steps
    found = steps.series.get(name) if steps else None
    known = [one for one in found.values if one is not None] if found else []
    return tuple(found.values) if found and len(known) > 1 else ()


def _ends(curve: tuple[float | None, ...], unit: str) -> str:
    known = [one for one in curve if one is not None]
    return " → ".join(say(Number(value=one, unit=unit)) for one in (known[0], known[-1])) if known else ""


def resampled(summary: Summary) -> str:
    """Return what the intervals rest on, and what the small curves run over."""
    steps, dump = summary.charts.steps, summary.dump
    curves = (
        f" The small curves run from step {steps.first[0]} to {steps.last[-1]}."
        if steps and len(steps.first) > 1
        else ""
    )
    if all(number.interval is None for number in summary.metrics.values()):
        return f"Without intervals: there are {count(dump.groups)} groups to resample.{curves}"
    unit = "prompts" if "group_id" in dump.columns else "sequences"
    return f"95% intervals, resampling the {count(dump.groups)} {unit}.{curves}"
