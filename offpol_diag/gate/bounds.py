"""Parser of bounds: the name of a number, a limit or a tolerance, and the training steps it applies to.

    BOUND      = [QUANTIFIER ":"] NUMBER "=" LIMIT
    QUANTIFIER = step | first | last | min | max | mean | median | pNN      over the training steps
    NUMBER     = METRIC | drift2.METRIC | total.METRIC | PRESET.METRIC   or as logged: `aliases.py`
    TOLERANCE  = SHARE "%" | AMOUNT | SHARE "%" "+" AMOUNT
    STEPS      = FIRST ".." LAST | FIRST ".." | ".." LAST | STEP

The command line and gate files use the same grammar.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from offpol_diag.errors import OffpolError, UsageError, did_you_mean
from offpol_diag.gate.aliases import ours

Kind = Literal["max", "min"]
Level = Literal["error", "warn"]
Judge = Literal["interval", "point"]

EVERY = "step"
QUANTIFIERS = (EVERY, "first", "last", "min", "max", "mean", "median")
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
GRAMMAR = f"a quantifier is {', '.join(QUANTIFIERS)} or pNN (p90: the 90th percentile over steps)"


@contextmanager
def prefixed(place: str, hint: str = "") -> Iterator[None]:
    """Put the place of a mistake before its message, and a hint beside it where it has none."""
    try:
        yield
    except OffpolError as error:
        raise UsageError(f"{place}{error.message}", error.hint or hint) from error


# ---------------------------------------------------------------- names of numbers


@dataclass(frozen=True)
class Name:
    """The name of a number, with an optional quantifier over training steps.

    Attributes:
        number: a metric (`k3`, `drift2.k3`) or a preset's (`seq_mis.ess_tokens`).
        over: the quantifier over steps; empty for the number of the whole dump.
        said: the trainer's name for it that was given; empty if it was ours.
    """

    number: str
    over: str = ""
    said: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.over}:{self.number}" if self.over else self.number


def name(text: str) -> Name:
    """Parse `k3`, `seq_mis.ess_tokens`, `p90:k3`, or a name that a trainer logs (`rollout_corr/kl`).

    Raises:
        UsageError: there is no number, or what stands before the colon is no quantifier.
    """
    over, colon, number = (part.strip() for part in text.rpartition(":"))
    if not number or "=" in text:
        raise UsageError(f'"{text}" names no number', "a name is k3, seq_mis.ess_tokens or median:k3")
    percentile = PERCENTILE.fullmatch(over)
    if colon and over not in QUANTIFIERS and not (percentile and float(percentile[1]) > 0):
        ends = {"p0": "say min", "p100": "say max"}.get(re.sub(r"\.0*$", "", over))
        hint = ends or did_you_mean(over, list(QUANTIFIERS)) or GRAMMAR
        raise UsageError(f'"{text}": "{over}" is no quantifier', hint)
    found = ours(number)
    return Name(found, over, number if found != number else "")


def comparable(text: str) -> Name:
    """Parse a name that means one number per run, so that two runs can be compared.

    Raises:
        UsageError: not a name, or its quantifier is `step` (one number per step).
    """
    found = name(text)
    if found.over == EVERY:
        raise UsageError(
            f'"{text}": two runs have different steps', f"compare max:{found.number} or median:{found.number}"
        )
    return found


GAPS = ("drift2", "total")
"""Prefixes of the metrics of the other two policy gaps; any other prefix is a preset."""


def splits(name: str) -> Iterator[tuple[str, str]]:
    """Split `a.b.c` into (a.b, c) and (a, b.c): names of presets and of metrics may both hold dots."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:cut]), ".".join(parts[cut:])


def presets_in(names: Iterable[str], known: Container[object]) -> tuple[str, ...]:
    """List the presets named in names of numbers, each once: the only presets to compute.

    A prefix that is neither `known` nor a policy gap is returned too, so that the caller can refuse it.
    """
    prefixes = [[prefix for prefix, _ in splits(name)] for name in names]
    found = (next((prefix for prefix in some if prefix in known), some[-1]) for some in prefixes if some)
    return tuple(dict.fromkeys(prefix for prefix in found if prefix not in GAPS))


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class Span:
    """A range of training steps from `first` to `last`, both included."""

    first: float = -math.inf
    last: float = math.inf

    def __contains__(self, step: float) -> bool:
        return self.first <= step <= self.last

    def __str__(self) -> str:
        first, last = ("" if math.isinf(end) else f"{end:g}" for end in (self.first, self.last))
        return first if self.first == self.last else f"{first}..{last}"


SPAN = re.compile(r"(-?\d+)?\s*\.\.\s*(-?\d+)?|(-?\d+)")


def span(text: str) -> Span:
    """Parse `100..200`, `100..`, `..99` or `7`.

    Raises:
        UsageError: anything else, or a span that ends before it begins.
    """
    found = SPAN.fullmatch(text.strip())
    if not found or text.strip() == "..":
        raise UsageError(f'"{text}" is no span of steps', 'write "100..200", "100..", "..99" or "7"')
    low, high, one = found.groups()
    made = Span(float(one or low or -math.inf), float(one or high or math.inf))
    if made.last < made.first:
        raise UsageError(f'"{text}" ends before it begins', f'write "{high}..{low}"')
    return made


@dataclass(frozen=True)
class Steps:
    """The steps in `within` but in no span of `without`, to which later overrides apply."""

    within: Span = Span()
    without: tuple[Span, ...] = ()

    def __contains__(self, step: float) -> bool:
        return step in self.within and not any(step in one for one in self.without)

    def __bool__(self) -> bool:
        """Return whether the steps are restricted at all."""
        return self.within != Span() or bool(self.without)

    def __str__(self) -> str:
        outside = f"except {', '.join(map(str, self.without))}" if self.without else ""
        return ", ".join(
            part for part in ("" if self.within == Span() else str(self.within), outside) if part
        )


# ---------------------------------------------------------------- bounds


@dataclass(frozen=True)
class Bound:
    """A limit that a number must not exceed (`max`) or fall below (`min`).

    Attributes:
        name: a metric (`k3`, `drift2.k3`) or a preset's (`seq_mis.ess_tokens`).
        kind: max or min.
        limit: finite.
        over: the quantifier over steps, see `Name`.
        level: whether a failure fails the gate (error) or is only reported (warn).
        judge: whether the 95% interval decides, or the plain value.
        steps: the steps that the quantifier ranges over.
        source: the option, or the gate file and the table in it.
        note: the user's note from the gate file.
        said: the trainer's name of the number that was given; empty if it was ours.
    """

    name: str
    kind: Kind
    limit: float
    over: str = ""
    level: Level = "error"
    judge: Judge = "interval"
    steps: Steps = Steps()
    source: str = field(default="", compare=False)
    note: str = ""
    said: str = ""

    @property
    def full_name(self) -> Name:
        """The name with its quantifier."""
        return Name(self.name, self.over)


def parse(text: str, kind: Kind, judge: Judge = "interval") -> Bound:
    """Parse `k3=0.002` as a bound.

    Raises:
        UsageError: no `=`, no name, no such quantifier, or a limit that is no finite number.
    """
    said, equals, limit = (part.strip() for part in text.partition("="))
    if not (said and equals and limit):
        raise UsageError(f'--{kind} "{text}": a bound is NAME=NUMBER', f"write --{kind} k3=0.002")
    with prefixed(f"--{kind} ", f"write --{kind} k3=0.002"):
        found = name(said)
    value = _finite(limit)
    if value is None:
        raise UsageError(f'--{kind} "{text}": "{limit}" is no finite number', f"write --{kind} {said}=0.002")
    return Bound(found.number, kind, value, found.over, judge=judge, source=f"--{kind}", said=found.said)


def _finite(text: str) -> float | None:
    try:
        return value if math.isfinite(value := float(text)) else None
    except ValueError:
        return None


# ---------------------------------------------------------------- tolerances


@dataclass(frozen=True)
class Tolerance:
    """Allowed worsening: a share of the baseline's value plus an amount in the metric's unit."""

    share: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        share, amount = f"{100 * self.share:g}%", f"{self.amount:g}"
        return " + ".join([share] * bool(self.share or not self.amount) + [amount] * bool(self.amount))

    def of(self, value: float) -> float:
        """Return the allowed amount for a given baseline value."""
        return self.share * abs(value) + self.amount


USUAL = Tolerance(share=0.1)


def tolerance(text: str) -> Tolerance:
    """Parse `10%`, `0.001` or `10% + 0.001`.

    Raises:
        UsageError: anything else, a negative one, or one that is not finite.
    """
    parts = [part.strip() for part in re.split(r"(?<![eE])\+", text)]
    shares = [_finite(part[:-1]) for part in parts if part.endswith("%")]
    amounts = [_finite(part) for part in parts if not part.endswith("%")]
    share, amount = (sum(one or 0.0 for one in some) for some in (shares, amounts))
    some = [-1.0 if one is None else one for one in (*shares, *amounts)]
    if len(shares) > 1 or len(amounts) > 1 or min(some) < 0:
        example = 'write "10%" (of the baseline), "0.001" (in its unit) or "10% + 0.001"'
        raise UsageError(f'"{text}" is no tolerance', example)
    return Tolerance(share / 100, amount)


def named_tolerance(text: str) -> tuple[Name | None, Tolerance]:
    """Parse `10%` (for all numbers) or `k3=5%` (for one).

    Raises:
        UsageError: neither of these forms.
    """
    before, equals, after = text.rpartition("=")
    with prefixed(f'--tolerance "{text}": '):
        return (comparable(before) if equals else None), tolerance(after)
