"""What to do and why, and what was asked of the gate."""

from __future__ import annotations

from offpol_diag.blocks import Block, Section, Table, Text, Tone, Verdict
from offpol_diag.numerals import say
from offpol_diag.sections.advice import advice, weights
from offpol_diag.sections.diagnosis import is_bug
from offpol_diag.sections.gate import report
from offpol_diag.summary import Fired, Number, Numbers, Recommendation, Summary
from offpol_diag.tuning import command

DECISION_TONES: dict[str, Tone] = {
    "fix the bug first": "bad",
    "no correction needed": "good",
    "METHOD at THRESHOLD": "info",
    "no method helps": "bad",
    "not enough data": "warn",
}

FIX_FIRST = Verdict(
    "Fix the bug first",
    "No correction mends numbers that are logged wrongly, and one may make things worse.",
    "bad",
)
"""All that is said of corrections while the diagnosis is a bug."""

ALERTS = "Numbers stand where a source, named below, warns of them."


def verdict(summary: Summary) -> Section:
    """The decision, its evidence, the alerts and the gates; nothing is ranked while there is a bug."""
    blocks = (
        *_advice(summary),
        *((report(summary.gates),) if summary.gates else ()),
    )
    return Section("verdict", "Verdict", blocks)


def _advice(summary: Summary) -> tuple[Block, ...]:
    given = summary.recommendation
    if is_bug(summary):
        return (FIX_FIRST, *_alerts(_alerted(given), summary.metrics))
    return _recommendation(given, summary) if given else _silent()


def _silent() -> tuple[Block, ...]:
    return (Text("No recommendation was made for this dump; the numbers below stand on their own."),)


def _recommendation(given: Recommendation, summary: Summary) -> tuple[Block, ...]:
    metrics = summary.metrics
    deciding = [fired for fired in given.fired if fired.rule == given.rule]
    why = (
        *_preset(given),
        f"Rule that fired: {given.rule}",
        *(line for fired in deciding for line in _evidence(fired, metrics)),
        f"Runner-up: {_runner_up(given)}",
        *_longest(given),
    )
    head = Verdict(_decision(given), given.sentence, DECISION_TONES[given.decision], why)
    others = [fired for fired in given.fired if fired not in deciding]
    return (
        head,
        *weights(given),
        *advice(given, summary.alignment),
        *_alerts(_alerted(given), metrics),
        *_also([fired for fired in others if fired.level != "alert"], metrics),
    )


def _alerted(given: Recommendation | None) -> list[Fired]:
    fired = given.fired if given else []
    return [one for one in fired if one.level == "alert"]


def _runner_up(given: Recommendation) -> str:
    if given.runner_up is None:
        return "none"
    if not given.price:
        return f"{given.runner_up}; as good by the estimate, and not for sure"
    price = Number(value=given.price, unit="fraction")
    return f"{given.runner_up}; choosing it would cost {say(price)} of the alignment, by the estimate"


def _longest(given: Recommendation) -> tuple[str, ...]:
    longest = given.longest_response
    if longest is None:
        return ()
    tokens = longest.unknown if longest.value is None else f"{say(longest)} tokens"
    return (f"Longest response at which importance sampling of whole sequences keeps 10% ESS: {tokens}",)


def _decision(given: Recommendation) -> str:
    at = f"{given.method} at {given.threshold}" if given.threshold else given.method
    said = given.title or at or given.decision
    return said if said == at else said[0].upper() + said[1:]


def _preset(given: Recommendation) -> tuple[str, ...]:
    """The command that shows the method as a preset."""
    return () if given.method is None else (f"Preset: {command(given.method, given.settings)}",)


def _evidence(fired: Fired, metrics: Numbers) -> tuple[str, ...]:
    saw = _saw(fired, metrics)
    return (*((f"It saw: {saw}",) if saw else ()), *((f"Source: {fired.source}",) if fired.source else ()))


def _saw(fired: Fired, metrics: Numbers) -> str:
    return "; ".join(f"{name} = {say(_number(name, value, metrics))}" for name, value in fired.saw.items())


def _alerts(fired: list[Fired], metrics: Numbers) -> tuple[Block, ...]:
    """One row each: there may be many."""
    label = "1 alert" if len(fired) == 1 else f"{len(fired)} alerts"
    rows = tuple((one.sentence, _saw(one, metrics) or "–", one.source or "–") for one in fired)
    table = Table("alerts", "What each alert saw, and who warns of it", ("alert", "it saw", "source"), rows)
    return (Verdict(label, ALERTS, "warn"), table) if fired else ()


def _also(fired: list[Fired], metrics: Numbers) -> tuple[Block, ...]:
    rows = tuple((one.rule, one.sentence, _saw(one, metrics) or "–", one.source or "–") for one in fired)
    header = ("rule", "what it says", "what it saw", "source")
    return (Table("rules", "Other rules whose condition held", header, rows, wide=True),) if rows else ()


def _number(name: str, value: float | None, metrics: Numbers) -> Number:
    """The number as the rule saw it, with the interval where it is the metric itself."""
    metric = metrics.get(name)
    return (
        metric
        if metric and metric.value == value
        else Number(value=value, unit=metric.unit if metric else "")
    )
