"""What is asked for: a name, a limit, and how it is to be judged.

    BOUND      = [QUANTIFIER ":"] NUMBER "=" LIMIT
    QUANTIFIER = step | first | last | min | max | mean | median | pNN      over the training steps
    NUMBER     = METRIC | drift2.METRIC | total.METRIC | PRESET.METRIC

The same grammar on the command line, in a gate file and for tolerances.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from offpol_diag.errors import OffpolError, UsageError, did_you_mean

Kind = Literal["max", "min"]
Level = Literal["error", "warn"]
Judge = Literal["interval", "point"]

EVERY = "step"
QUANTIFIERS = (EVERY, "first", "last", "min", "max", "mean", "median")
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
GRAMMAR = f"a quantifier is {', '.join(QUANTIFIERS)} or pNN (p90: the 90th percentile over steps)"


# ---------------------------------------------------------------- names


@dataclass(frozen=True)
class Name:
    """What a number is called.

    Attributes:
        number: a metric (`k3`, `drift2.k3`) or a preset's (`seq_mis.ess_tokens`).
        over: the quantifier over steps; empty for the number of the whole dump.
    """

    number: str
    over: str = ""

    def __str__(self) -> str:
        return f"{self.over}:{self.number}" if self.over else self.number


def name(text: str) -> Name:
    """`k3`, `seq_mis.ess_tokens`, `p90:k3`.

    Raises:
        UsageError: there is no number, or what stands before the colon is no quantifier.
    """
    before, colon, after = (part.strip() for part in text.rpartition(":"))
    if not after or "=" in text:
        raise UsageError(f'"{text}" names no number', "a name is k3, seq_mis.ess_tokens or median:k3")
    if colon and not _quantifies(before):
        raise UsageError(f'"{text}": "{before}" is no quantifier', _meant(before))
    return Name(after, before)


def _quantifies(word: str) -> bool:
    found = PERCENTILE.fullmatch(word)
    return word in QUANTIFIERS or (found is not None and 0 < float(found[1]) < 100)


def _meant(word: str) -> str:
    ends = {"p0": "say min", "p100": "say max"}
    whole = re.sub(r"\.0*$", "", word)
    if whole in ends:
        return ends[whole]
    return did_you_mean(word, list(QUANTIFIERS)) or GRAMMAR


# ---------------------------------------------------------------- steps


@dataclass(frozen=True)
class Span:
    """Training steps from `first` to `last`, both within."""

    first: float = -math.inf
    last: float = math.inf

    def __contains__(self, step: float) -> bool:
        return self.first <= step <= self.last

    def __str__(self) -> str:
        ends = ("" if math.isinf(end) else f"{end:g}" for end in (self.first, self.last))
        return ends_alike if (ends_alike := self._one()) else "..".join(ends)

    def _one(self) -> str:
        return f"{self.first:g}" if self.first == self.last else ""


SPAN = re.compile(r"(-?\d+)?\s*\.\.\s*(-?\d+)?|(-?\d+)")


def span(text: str) -> Span:
    """`100..200`, `100..`, `..99`, `7`.

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
    """Those of `within`, less those of any span of `without`: where later rows of a file override."""

    within: Span = Span()
    without: tuple[Span, ...] = ()

    def __contains__(self, step: float) -> bool:
        return step in self.within and not any(step in one for one in self.without)

    def __bool__(self) -> bool:
        """Whether anything is asked of the steps at all."""
        return self.within != Span() or bool(self.without)

    def __str__(self) -> str:
        inside = "" if self.within == Span() else str(self.within)
        outside = f"except {', '.join(map(str, self.without))}" if self.without else ""
        return ", ".join(part for part in (inside, outside) if part)


# ---------------------------------------------------------------- bounds


@dataclass(frozen=True)
class Bound:
    """One bound: the number must not exceed (`max`) or fall below (`min`) the limit.

    Attributes:
        name: a metric (`k3`, `drift2.k3`) or a preset's (`seq_mis.ess_tokens`).
        kind: max or min.
        limit: finite.
        over: the quantifier over steps, see `Name`.
        level: whether a failure fails the gate, or is only told.
        judge: whether the 95% interval decides, or the plain value.
        steps: the steps that the quantifier is over.
        source: who asks: an option, or a file and its table.
        note: what the file says about it.
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

    @property
    def asked(self) -> Name:
        """Its number's name with the quantifier."""
        return Name(self.name, self.over)


def parse(text: str, kind: Kind, judge: Judge = "interval") -> Bound:
    """`k3=0.002` as a bound.

    Raises:
        UsageError: no `=`, no name, no such quantifier, or a limit that is no finite number.
    """
    said, equals, limit = (part.strip() for part in text.partition("="))
    if not (said and equals and limit):
        raise UsageError(f'--{kind} "{text}": a bound is NAME=NUMBER', f"write --{kind} k3=0.002")
    try:
        found = name(said)
    except OffpolError as error:
        raise UsageError(f"--{kind} {error.message}", error.hint or f"write --{kind} k3=0.002") from error
    value = _finite(limit)
    if value is None:
        raise UsageError(f'--{kind} "{text}": "{limit}" is no finite number', f"write --{kind} {said}=0.002")
    return Bound(found.number, kind, value, found.over, judge=judge, source=f"--{kind}")


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def splits(name: str) -> Iterator[tuple[str, str]]:
    """`a.b.c` as (a.b, c), (a, b.c): a preset's name may hold dots, and so may a metric's."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:cut]), ".".join(parts[cut:])


GAPS = ("drift2", "total")
"""Prefixes of the metrics of the other two policy gaps; any other prefix is a preset."""


def presets_in(names: Iterable[str], known: Container[object]) -> tuple[str, ...]:
    """The presets that names of numbers speak of, each once.

    What stands before a dot and is neither `known` nor a policy gap is given back too, to be refused.
    """
    prefixes = [[prefix for prefix, _ in splits(name)] for name in names]
    found = (next((prefix for prefix in some if prefix in known), some[-1]) for some in prefixes if some)
    return tuple(dict.fromkeys(prefix for prefix in found if prefix not in GAPS))
