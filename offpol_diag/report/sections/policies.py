"""Section on the gaps between rollout, old and current policy."""

from __future__ import annotations

from offpol_diag.blocks import Cell, Section, Table, Text
from offpol_diag.numerals import say
from offpol_diag.summary import Number, Summary

DRIFTS = (
    ("", "rollout → old (engine numerics and policy lag)"),
    ("drift2.", "old → current (updates within the step)"),
    ("total.", "total: rollout → current"),
)


def policies(summary: Summary) -> Section | None:
    """Return every gap metric for each pair of policies, side by side."""
    names = _names(summary)
    if not names:
        return None
    drifts = {prefix: title for prefix, title in DRIFTS if _known(summary, prefix)}
    rows = tuple((name, *(_cell(summary, prefix + name) for prefix in drifts)) for name in names)
    header = ("number", *drifts.values())
    table = Table("policies", "The gap between each pair of policies", header, rows)
    return Section("policies", "Three policies", (Text(_finding(summary)), table))


def _names(summary: Summary) -> tuple[str, ...]:
    """Return the metrics that another pair besides rollout → old also has."""
    others = [prefix for prefix, _ in DRIFTS if prefix]
    shared = (
        key.removeprefix(prefix) for key in summary.metrics for prefix in others if key.startswith(prefix)
    )
    return tuple(dict.fromkeys(shared))


def _known(summary: Summary, prefix: str) -> bool:
    """Return whether the dump has both policies of a pair."""
    found = summary.metrics.get(f"{prefix}k3", Number())
    return found.value is not None or found.log10 is not None


def _cell(summary: Summary, key: str) -> Cell:
    return summary.metrics.get(key, Number(unknown="not computed for this pair"))


def _finding(summary: Summary) -> str:
    """Return a sentence on K1 of each pair of policies, the one metric that is additive."""
    known = [(title, summary.metrics.get(f"{prefix}k1")) for prefix, title in DRIFTS]
    clauses = "; ".join(f"{title}: {say(one)}" for title, one in known if one)
    opening = "Rollout → old is engine numerics and policy lag; old → current, the updates within the step."
    if not clauses:
        return opening
    return (
        f"{opening} K1, which adds up over the two: {clauses}. "
        "K3 of old → current is the size of the update, not a KL: the tokens were sampled from π_rollout."
    )
