"""Section on the recommendation, its evidence, and the gate's verdicts."""

from __future__ import annotations

from offpol_diag.blocks import Block, Section, Table, Text, Tone, Verdict
from offpol_diag.numerals import say
from offpol_diag.presets.tuning import command
from offpol_diag.report.sections.advice import config, ranking, weights
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.gate import report
from offpol_diag.summary import Fired, Number, Numbers, Recommendation, Summary

DECISION_TONES: dict[str, Tone] = {
    "fix the bug first": "bad",
    "no correction needed": "good",
    "METHOD at THRESHOLD": "info",
    "no method helps": "bad",
    "not enough data": "warn",
}

COSTS = (
    ("truncated_high", "weights", "truncated"),
    ("truncated_low", "weights", "below the lower bound"),
    ("tokens_rejected", "tokens", "masked"),
)
"""Metric, with what it counts and what the method does to it."""

LEVELS = "each with this dump's number and who set it."


def verdict(summary: Summary) -> Section:
    """Return the recommendation, its evidence, the alerts and the gates; with a bug, nothing is ranked."""
    blocks = (
        *_advice(summary),
        *((report(summary.gates),) if summary.gates else ()),
    )
    return Section("verdict", "Verdict", blocks)


def _advice(summary: Summary) -> tuple[Block, ...]:
    given = summary.recommendation
    if is_bug(summary):
        said = given.sentence if given else ""
        return (Verdict("Fix the bug first", said, "bad"), *_alerts(_alerted(given), summary.metrics))
    return _recommendation(given, summary) if given else _silent()


def _silent() -> tuple[Block, ...]:
    return (Text("No recommendation was made for this dump; the numbers below stand on their own."),)


def _recommendation(given: Recommendation, summary: Summary) -> tuple[Block, ...]:
    metrics = summary.metrics
    deciding = [fired for fired in given.fired if fired.rule == given.rule]
    why = (
        *_preset(given),
        *given.reasons,
        *_costs(given),
        *((f"Runner-up: {given.runner_up}",) if given.runner_up else ()),
        *(f"Not known: {line[0].lower()}{line[1:]}" for line in given.unknown),
        *_longest(given),
        *(line for fired in deciding for line in _evidence(fired, metrics, saw=not given.reasons)),
    )
    head = Verdict(_decision(given), given.sentence, DECISION_TONES[given.decision], why)
    others = [fired for fired in given.fired if fired not in deciding]
    return (
        head,
        *weights(given),
        *ranking(given),
        *config(given),
        *_alerts(_alerted(given), metrics),
        *_also([fired for fired in others if fired.level != "alert"], metrics),
    )


def _alerted(given: Recommendation | None) -> list[Fired]:
    fired = given.fired if given else []
    return [one for one in fired if one.level == "alert"]


def _costs(given: Recommendation) -> tuple[str, ...]:
    """Return how many weights the method changes, and the effective sample size after it."""
    found = given.numbers.get(given.title or "", {})
    parts = [
        f"{say(found[name])} of the {over} {what}"
        for name, over, what in COSTS
        if name in found and found[name].value
    ]
    ess = found.get("ess_tokens")
    parts += [f"ESS of tokens {say(ess)}"] if ess and ess.value is not None else []
    return (f"Cost: {', '.join(parts)}",) if parts else ()


def _longest(given: Recommendation) -> tuple[str, ...]:
    longest = given.longest_response
    if longest is None:
        return ()
    tokens = longest.unknown if longest.value is None else f"{say(longest)} tokens"
    return (f"Longest response at which importance sampling of whole sequences keeps 10% ESS: {tokens}",)


def _decision(given: Recommendation) -> str:
    at = f"{given.method} at {given.threshold}" if given.threshold else given.method
    said = given.title or at or given.decision
    label = f" ({given.label})" if given.label else ""
    return (said if said == at else said[0].upper() + said[1:]) + label


def _preset(given: Recommendation) -> tuple[str, ...]:
    """Return the command that shows the method as a preset."""
    return () if given.method is None else (f"Preset: {command(given.method, given.settings)}",)


def _evidence(fired: Fired, metrics: Numbers, saw: bool) -> tuple[str, ...]:
    """Return a rule's source, and its input numbers unless a sentence states them already."""
    said = _saw(fired, metrics) if saw else ""
    return (
        *((f"Measured: {said}",) if said else ()),
        *((f"Source: {fired.source}",) if fired.source else ()),
    )


def _saw(fired: Fired, metrics: Numbers) -> str:
    return "; ".join(f"{name} = {say(_number(name, value, metrics))}" for name, value in fired.saw.items())


def _alerts(fired: list[Fired], metrics: Numbers) -> tuple[Block, ...]:
    """Return a table of alerts, one row each."""
    crossed = "level is" if len(fired) == 1 else "levels are"
    label = f"{len(fired)} published warning {crossed} crossed"
    rows = tuple((one.sentence, _saw(one, metrics) or "–", one.source or "–") for one in fired)
    table = Table("alerts", "Warning levels that this dump crosses", ("level", "this dump", "set by"), rows)
    return (Verdict(label, LEVELS, "warn"), table) if fired else ()


def _also(fired: list[Fired], metrics: Numbers) -> tuple[Block, ...]:
    rows = tuple((one.rule, one.sentence, _saw(one, metrics) or "–", one.source or "–") for one in fired)
    header = ("rule", "what it says", "what it saw", "source")
    return (Table("rules", "Other rules whose condition held", header, rows, wide=True),) if rows else ()


def _number(name: str, value: float | None, metrics: Numbers) -> Number:
    """Return the rule's input number, with an interval if it is a metric."""
    metric = metrics.get(name)
    return (
        metric
        if metric and metric.value == value
        else Number(value=value, unit=metric.unit if metric else "")
    )
