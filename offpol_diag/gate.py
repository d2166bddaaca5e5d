"""The gate: numbers and bounds → verdicts. Pure; the truth table is `tests/test_gate.py`.

    a value on its bound         passes
    a value that is NaN          could not say
    a value that is unknown      could not say
    a name that is no metric     could not say
    a value that overflows       is judged by its log10

The whole: failed if any bound failed, else could not say if any bound could not be judged, else passed.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from offpol_diag.catalogue import plain
from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.summary import GateVerdict, Number, PresetResult, Summary

Kind = Literal["max", "min"]
Outcome = Literal["passed", "failed", "could not say"]

GAPS = ("drift2", "total")
"""Prefixes of the metrics of the other two policy gaps; any other prefix is a preset."""


@dataclass(frozen=True)
class Bound:
    """One bound: `name` must not exceed (`max`) or fall below (`min`) the limit.

    Attributes:
        name: a metric (`k3`, `drift2.k3`) or a preset's (`seq_mis.ess_tokens`).
        kind: max or min.
        limit: finite.
    """

    name: str
    kind: Kind
    limit: float


def parse(text: str, kind: Kind) -> Bound:
    """`k3=0.002` as a bound.

    Raises:
        UsageError: no `=`, no name, or a limit that is no finite number.
    """
    name, equals, limit = (part.strip() for part in text.partition("="))
    if not (name and equals and limit):
        raise UsageError(f'--{kind} "{text}": a bound is NAME=NUMBER', f"write --{kind} k3=0.002")
    try:
        value = float(limit)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f'--{kind} "{text}": "{limit}" is no finite number', f"write --{kind} {name}=0.002")
    return Bound(name, kind, value)


def presets_named(bounds: Iterable[Bound], known: Container[object]) -> tuple[str, ...]:
    """The presets that the bounds speak of, each once: the only ones that need computing.

    What stands before a dot and is neither `known` nor a policy gap is given back too, to be refused.
    """
    prefixes = [[prefix for prefix, _ in _splits(bound.name)] for bound in bounds]
    found = (next((prefix for prefix in some if prefix in known), some[-1]) for some in prefixes if some)
    return tuple(dict.fromkeys(prefix for prefix in found if prefix not in GAPS))


def judge(summary: Summary, bounds: Sequence[Bound]) -> tuple[GateVerdict, ...]:
    """One verdict per bound, in their order."""
    return tuple(_verdict(bound, _find(summary, bound.name)) for bound in bounds)


def outcome(verdicts: Iterable[GateVerdict]) -> Outcome:
    """A failure decides; then a bound that could not be judged; no verdict at all is not a pass."""
    said = [verdict.passed for verdict in verdicts]
    if False in said:
        return "failed"
    return "could not say" if None in said or not said else "passed"


# ---------------------------------------------------------------- one bound


def _verdict(bound: Bound, found: Number | str) -> GateVerdict:
    """A `str` in place of a number is the reason why there is none."""
    if isinstance(found, str):
        return GateVerdict(
            name=bound.name, bound=bound.kind, limit=bound.limit, value=None, passed=None, reason=found
        )
    return GateVerdict(
        name=bound.name,
        bound=bound.kind,
        limit=bound.limit,
        value=None if found.value is None or not math.isfinite(found.value) else found.value,
        interval=found.interval,
        passed=_holds(bound, found),
        reason=_reason(bound, found),
    )


def _holds(bound: Bound, number: Number) -> bool | None:
    """Whether the bound holds; None where nothing can be said."""
    if number.value is None:
        return _holds_beyond(bound, number.log10)
    if math.isnan(number.value):
        return None
    return number.value <= bound.limit if bound.kind == "max" else number.value >= bound.limit


def _holds_beyond(bound: Bound, log10: float | None) -> bool | None:
    """The same for a value too large for a float, known by its log10."""
    if log10 is None:
        return None
    limit = math.log10(bound.limit) if bound.limit > 0 else -math.inf
    return log10 <= limit if bound.kind == "max" else log10 >= limit


def _reason(bound: Bound, number: Number) -> str:
    parts = [_judged(bound, number), _straddle(bound, number), number.note or ""]
    return "; ".join(part for part in parts if part)


def _judged(bound: Bound, number: Number) -> str:
    held = _holds(bound, number)
    if held is None:
        return number.unknown or "there is no value"
    value, limit = _written(number, bound.limit)
    sign = "≤" if bound.kind == "max" else "≥"
    return f"{value} {sign} {limit}" if held else f"{value} is not {sign} {limit}"


def _written(number: Number, limit: float) -> tuple[str, str]:
    if number.value is None:
        return f"10^{number.log10:.4g}", f"{limit:.4g}"
    return apart(number.value, limit)


def _straddle(bound: Bound, number: Number) -> str:
    if number.interval and number.interval[0] < bound.limit < number.interval[1]:
        return "the 95 % interval holds values on both sides of the bound"
    return ""


def apart(value: float, limit: float) -> tuple[str, str]:
    """Both numbers with as many digits as show that they differ; four at least."""
    for digits in range(4, 18):
        pair = (f"{value:.{digits}g}", f"{limit:.{digits}g}")
        if pair[0] != pair[1] or value == limit:
            return pair
    return repr(value), repr(limit)


# ---------------------------------------------------------------- names


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """`a.b.c` as (a.b, c), (a, b.c): a preset's name may hold dots, and so may a metric's."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:cut]), ".".join(parts[cut:])


def _find(summary: Summary, name: str) -> Number | str:
    """The number of that name, or why there is none."""
    if name in summary.metrics:
        return summary.metrics[name]
    for prefix, metric in _splits(name):
        result = _preset(summary, prefix)
        if result is not None:
            return _find_in_preset(result, prefix, metric)
    return _absent(summary, name) or _no_such("metric", name, _names(summary), "in this result")


def _absent(summary: Summary, name: str) -> str:
    """What to say of a preset that this result lacks; empty where the name is more like a slip."""
    metrics = {metric for result in summary.presets.values() for metric in result.metrics}
    preset = next((prefix for prefix, metric in _splits(name) if metric in metrics), "")
    if not preset or did_you_mean(preset, [*summary.presets, *GAPS]):
        return ""
    return f"{preset} is not among the presets of this result; analyze the dump with --presets {preset}"


def _find_in_preset(result: PresetResult, preset: str, metric: str) -> Number | str:
    if result.needs:
        return f"{preset} needs {', '.join(result.needs)}, which the dump lacks"
    return result.metrics.get(metric) or _no_such("metric", metric, list(result.metrics), f"of {preset}")


def _preset(summary: Summary, name: str) -> PresetResult | None:
    """By name or alias, as the catalogue compares them."""
    rows = summary.presets.items()
    known = {plain(word): result for key, result in rows for word in (key, *result.aliases)}
    return summary.presets.get(name) or known.get(plain(name))


def _names(summary: Summary) -> list[str]:
    own = [f"{preset}.{metric}" for preset, result in summary.presets.items() for metric in result.metrics]
    return [*summary.metrics, *own]


def _no_such(what: str, name: str, known: list[str], where: str = "") -> str:
    parts = (f'no {what} "{name}" {where}'.rstrip(), did_you_mean(name, known))
    return "; ".join(part for part in parts if part)
