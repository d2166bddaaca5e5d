"""The number of a name in a result, or why there is none."""

from __future__ import annotations

from offpol_diag.catalogue import plain
from offpol_diag.errors import did_you_mean
from offpol_diag.gate.bounds import GAPS, splits
from offpol_diag.summary import Number, PresetResult, Summary

Found = Number | str
"""A `str` in place of a number is the reason why there is none."""


def find(summary: Summary, name: str, near: bool = True) -> Found:
    """The number of that name, of the whole dump; `near`: where there is none, say what names are like it."""
    if name in summary.metrics:
        return summary.metrics[name]
    for prefix, metric in splits(name):
        result = preset(summary, prefix)
        if result is not None:
            return _find_in_preset(result, prefix, metric, near)
    names = _names(summary) if near else []
    return (near and _absent(summary, name)) or no_such("metric", name, names, "in this result")


def preset(summary: Summary, name: str) -> PresetResult | None:
    """By name or alias, as the catalogue compares them."""
    if name in summary.presets:
        return summary.presets[name]
    wanted, rows = plain(name), summary.presets.items()
    return next((row for key, row in rows if wanted in map(plain, (key, *row.aliases))), None)


def preset_of(summary: Summary, name: str) -> str | None:
    """The preset whose number a name is, as the result calls it; None for a number of the policy gap."""
    if name in summary.metrics:
        return None
    found = (preset(summary, prefix) for prefix, _ in splits(name))
    result = next((one for one in found if one is not None), None)
    return next((key for key, one in summary.presets.items() if one is result), None)


def no_such(what: str, name: str, known: list[str], where: str = "") -> str:
    """That there is no such thing, and what is nearest to it."""
    parts = (f'no {what} "{name}" {where}'.rstrip(), did_you_mean(name, known))
    return "; ".join(part for part in parts if part)


def _absent(summary: Summary, name: str) -> str:
    """What to say of a preset that this result lacks; empty where the name is more like a slip."""
    metrics = {metric for result in summary.presets.values() for metric in result.metrics}
    named = next((prefix for prefix, metric in splits(name) if metric in metrics), "")
    if not named or did_you_mean(named, [*summary.presets, *GAPS]):
        return ""
    return f"{named} is not among the presets of this result; analyze the dump with --presets {named}"


def _find_in_preset(result: PresetResult, named: str, metric: str, near: bool) -> Found:
    if result.needs:
        return f"{named} needs {', '.join(result.needs)}, which the dump lacks"
    known = list(result.metrics) if near else []
    return result.metrics.get(metric) or no_such("metric", metric, known, f"of {named}")


def _names(summary: Summary) -> list[str]:
    own = [f"{key}.{metric}" for key, result in summary.presets.items() for metric in result.metrics]
    return [*summary.metrics, *own]
