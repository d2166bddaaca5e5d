"""Thresholds: those asked for, or round numbers, of which a report shows those where something happens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject
from offpol_diag.sweeps.dial import Dial

STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Round numbers to a decade."""
FAR = (2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 1000.0, 10_000.0)
MOST = 12
"""Thresholds that a table has room for."""
MUCH = 0.1
"""A bound that changes more of the weights than that does no more than fix them."""
LITTLE = 0.02
"""A bound that keeps less than 1% of tokens and of sequences keeps nothing to speak of."""
LIMIT = 200
"""Thresholds that can be asked for at once."""
EXAMPLE = "--at 1.0001,1.001,1.01"


def asked(text: str, preset: Preset, dial: Dial) -> tuple[float, ...]:
    """The thresholds of `--at`, rising.

    Raises:
        UsageError: not numbers, not rising, too many, or no bound can stand there.
    """
    values = [_number(word.strip()) for word in text.split(",")]
    if any(one >= two for one, two in pairwise(values)):
        raise UsageError(f"--at {text}: thresholds must rise", f"write them like {EXAMPLE}")
    if len(values) > LIMIT:
        raise UsageError(f"--at has {len(values)} thresholds, and {LIMIT} are the most", "leave some out")
    for value in values:
        _possible(value, preset, dial)
    return tuple(values)


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise UsageError(f'--at: "{word}" is no number', f"write them like {EXAMPLE}") from None
    if not math.isfinite(value):
        raise UsageError(f"--at: {word} is no threshold", "give finite numbers")
    return value


def _possible(value: float, preset: Preset, dial: Dial) -> None:
    """Refuse what the grammar of a preset would refuse."""
    if dial.side == "window" and value <= 1:
        raise UsageError(
            f"--at {value:g}: {dial} is the window [1/b, b] on r, and b must be above 1",
            f"give b, or sweep one side with --which {dial}.upper",
        )
    held = dial.held(dial.turned(preset, dial.bounds(value)))
    for key, rule in held.slips():
        raise UsageError(f"--at {value:g}: {dial}{key and ': '}{key}: {rule}", "leave that one out")


def round_numbers(preset: Preset, dial: Dial) -> tuple[float, ...]:
    """Every round threshold that could matter, rising, the preset's own among them."""
    own = dial.at(preset)
    found = {value for value in _candidates(preset, dial) if _allowed(value, preset, dial)}
    return tuple(sorted(found | ({own} if own is not None else set())))


def _candidates(preset: Preset, dial: Dial) -> list[float]:
    if dial.logarithmic(preset):
        up = [*(_tidy(1 + x) for x in _decades(-6, -1)), *FAR]
        return [_tidy(2 - x) for x in up if x < 2] + [0.1**k for k in range(1, 9)] if _below(dial) else up
    signed = isinstance(held := dial.held(preset), Reject) and held.statistic in ("k1", "prob_diff")
    values = [*_decades(-8, 2)]
    return [-x for x in values] if signed and _below(dial) else values


def _below(dial: Dial) -> bool:
    return dial.side == "lower"


def _decades(first: int, last: int) -> list[float]:
    return [_tidy(step * 10.0**power) for power in range(first, last + 1) for step in STEPS]


def _tidy(x: float) -> float:
    """The float nearest to the decimal that was meant."""
    return float(f"{x:.9g}")


def _allowed(value: float, preset: Preset, dial: Dial) -> bool:
    if dial.side == "window" and value <= 1:
        return False
    return not any(True for _ in dial.held(dial.turned(preset, dial.bounds(value))).slips())


def telling(values: Sequence[float], effects: Sequence[float], own: float | None) -> list[int]:
    """The thresholds worth showing: where the effect changes, evenly thinned, and always the preset's own.

    Args:
        values: rising.
        effects: what each one does, e.g. the share kept.
        own: the preset's own threshold.

    Returns:
        Their indices, rising.
    """
    moving = [
        at
        for at in range(len(values))
        if any(
            abs(effects[at] - effects[to]) > 1e-12 for to in (max(at - 1, 0), min(at + 1, len(values) - 1))
        )
    ]
    first, last = (moving[0], moving[-1]) if moving else (0, len(values) - 1)
    shown = range(first, last + 1)
    stride = max(1, math.ceil(len(shown) / MOST))
    kept = {*shown[::stride], shown[-1]}
    return sorted(kept | {at for at, value in enumerate(values) if value == own})
