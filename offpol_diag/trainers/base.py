"""Building blocks of trainers' logged metrics: sums and extremes over the dump, and tables of named values.

The whole dump is one trainer batch. Nothing here imports numpy, so that printing a trainer's configuration is
fast.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, TypeVar

from offpol_diag.presets import Preset, Reject, Veto
from offpol_diag.trainers.measures import Measure, squared, where

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import View

T = TypeVar("T")
Ends = tuple["Array", "Array"]
"""Minimum and maximum of each sequence, [S] each, ±inf for a sequence without values; or of all."""
Columns = dict[str, "Array"]
Ranges = dict[str, Ends]
When = Callable[[Preset], bool]
Rows = Callable[["View"], "Array"]
"""Function that computes a number of each sequence under one preset, [S] float64."""
SMALLEST_NORM = 1e-8
"""Lower bound on the mean weight that batch normalisation divides by."""


def applied(preset: Preset) -> Preset:
    """Return the preset as applied: without weight, rules and veto if it is only logged."""
    return preset if preset.apply else replace(preset, weight=None, reject=(), veto=None)


def always(preset: Preset) -> bool:
    """Return True for every preset."""
    return True


def weighs(preset: Preset) -> bool:
    """Return whether the preset has a weight and applies it."""
    return preset.apply and preset.weight is not None


Side = Literal["lower", "upper"]


def half(rule: Reject, side: Side) -> Reject | None:
    """Return the rule with only its lower or upper bound; None if it has no such bound."""
    if getattr(rule, side) is None:
        return None
    return replace(rule, upper=None) if side == "lower" else replace(rule, lower=None)


def half_veto(veto: Veto | None, side: Side) -> Veto:
    """Return the veto with only that bound, if it has it."""
    return Veto(**{side: getattr(veto, side)}) if veto else Veto()


def among(ends: Ends, flags: Array) -> Ends:
    """Replace the extremes of sequences that are not flagged by ±inf."""
    return where(flags, ends[0], math.inf), where(flags, ends[1], -math.inf)


def ends(x: Array, flags: Array | None = None) -> Ends:
    """Return one number per sequence as its minimum and maximum; ±inf for sequences not flagged."""
    return (x, x) if flags is None else among((x, x), flags)


# ---------------------------------------------------------------- sums and extremes


@dataclass(frozen=True, eq=False)
class Sum:
    """A number of each sequence that is summed over the dump.

    Attributes:
        name: unique among the sums of a trainer.
        of: computes it, [S].
        shared: whether it is the same under all presets with one numerator.
        needs: fields of the batch that it requires; entries that read it are skipped without them.
    """

    name: str
    of: Rows
    shared: bool = False
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Range:
    """A minimum and maximum over the dump; the attributes are those of `Sum`."""

    name: str
    of: Callable[[View], Ends]
    shared: bool = False
    needs: tuple[str, ...] = ()


@cache
def total(of: Measure) -> Sum:
    """Return the sum of a measure over the tokens of the dump."""
    return Sum(of.name, lambda view: view.total(of), _same(of), of.needs)


@cache
def row_mean(of: Measure) -> Sum:
    """Return the sum of the sequences' means of a measure; 0 for one without tokens."""
    return Sum(f"mean {of.name}", mean(of), _same(of), of.needs)


@cache
def span(of: Measure) -> Range:
    """Return the extremes of a measure over the tokens of the dump."""
    return Range(of.name, lambda view: view.ends(of), _same(of), of.needs)


def _same(of: Measure) -> bool:
    return not of.own and of.rows is None


def mean(of: Measure) -> Rows:
    """Return the mean of a measure over the tokens of each sequence; 0 for one without tokens."""
    return lambda view: view.total(of) / view.divisor


class Absent(LookupError):
    """Raised for a sum that was not computed: the dump lacks a column, or the preset does not need it."""


@dataclass(frozen=True)
class Read:
    """Sums and extremes over the dump.

    Attributes:
        sums: column → its sum over the dump.
        ranges: name → (smallest, largest).
    """

    sums: dict[str, float]
    ranges: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Totals:
    """The sums and extremes of one preset over the dump, as one trainer logs them."""

    preset: Preset
    read: Read
    log: str

    def __call__(self, column: Sum) -> float:
        """Return the sum over the dump.

        Raises:
            Absent: it was not computed.
        """
        return _found(self.read.sums, key(self.log, self.preset, column))

    def ends(self, column: Range) -> tuple[float, float]:
        """Return the minimum and maximum over the dump."""
        return _found(self.read.ranges, key(self.log, self.preset, column))

    @property
    def tokens(self) -> float:
        """Number of unmasked tokens of the dump."""
        return self.read.sums["tokens"]

    @property
    def rows(self) -> float:
        """Number of sequences, including those without unmasked tokens."""
        return self.read.sums["rows"]

    @property
    def sequences(self) -> float:
        """Number of sequences with an unmasked token."""
        return self.read.sums["sequences"]


def _found(made: Mapping[str, T], name: str) -> T:
    if name not in made:
        raise Absent(name)
    return made[name]


def key(log: str, preset: Preset, column: Sum | Range) -> str:
    """Return the key of a column: presets with the same numerator share it, or it belongs to one preset."""
    return f"{log}/{preset.policy}/{column.name}" if column.shared else f"{preset.name}!{column.name}"


# ---------------------------------------------------------------- values


@dataclass(frozen=True)
class Value:
    """A number that is computed from sums and extremes over the dump.

    Attributes:
        of: computes it.
        columns: the sums and extremes that it reads.
    """

    of: Callable[[Totals], float]
    columns: tuple[Sum | Range, ...]

    def __neg__(self) -> Value:
        return Value(lambda totals: -self.of(totals), self.columns)

    def __add__(self, x: float) -> Value:
        return Value(lambda totals: self.of(totals) + x, self.columns)

    def __sub__(self, x: float) -> Value:
        return Value(lambda totals: self.of(totals) - x, self.columns)

    def means(self, meaning: str, when: When | None = None) -> Row:
        """Return the row of a table: the value with its definition in the trainer."""
        return Row(self, meaning, when)


@dataclass(frozen=True)
class Row:
    """A value, its definition, and the presets under which it is logged if not those of its table."""

    value: Value
    meaning: str
    when: When | None = None


def per_token(of: Sum | Measure) -> Value:
    """Return a sum divided by the number of tokens."""
    column = total(of) if isinstance(of, Measure) else of
    return Value(lambda totals: totals(column) / totals.tokens, (column,))


def per_row(of: Sum | Measure) -> Value:
    """Return a sum, or the sequences' means of a measure, divided by the number of sequences."""
    column = row_mean(of) if isinstance(of, Measure) else of
    return Value(lambda totals: totals(column) / totals.rows, (column,))


def ratio(of: Sum, to: Sum) -> Value:
    """Return a sum divided by another."""
    return Value(lambda totals: totals(of) / totals(to), (of, to))


def highest(of: Range | Measure) -> Value:
    """Return a maximum over the dump."""
    column = span(of) if isinstance(of, Measure) else of
    return Value(lambda totals: totals.ends(column)[1], (column,))


def lowest(of: Range | Measure) -> Value:
    """Return a minimum over the dump."""
    column = span(of) if isinstance(of, Measure) else of
    return Value(lambda totals: totals.ends(column)[0], (column,))


def deviation(of: Measure, less: float = 1) -> Value:
    """Return the standard deviation of a measure over tokens, n − less below."""
    first, second = total(of), total(squared(of))
    return Value(lambda totals: std(totals(first), totals(second), totals.tokens, less), (first, second))


def std(first: float, second: float, n: float, less: float = 1) -> float:
    """Return √((Σx² − (Σx)²/n) / (n − less)) from Σx and Σx²; NaN if n ≤ less. A shift of x is allowed."""
    return math.sqrt(max(second - first * first / n, 0.0) / (n - less)) if n > less else math.nan


# ---------------------------------------------------------------- what is logged


@dataclass(frozen=True)
class Entry:
    """One metric that the trainer logs.

    Attributes:
        name: the logged name, with its prefix.
        value: its value.
        meaning: its definition in the trainer, and what it must not be confused with.
        when: predicate: the presets under which it is logged.
    """

    name: str
    value: Value
    meaning: str
    when: When = always


def table(rows: Mapping[str, Row], prefix: str = "", when: When = always) -> tuple[Entry, ...]:
    """Return entries from a table of logged names; `when` is of the rows that do not say it themselves."""
    return tuple(Entry(prefix + name, one.value, one.meaning, one.when or when) for name, one in rows.items())


@dataclass(frozen=True, eq=False)
class Log:
    """The metrics that one trainer, or one generation of it, logs.

    Attributes:
        name: the value of `logs` in presets.
        entries: logged metrics, in the trainer's order.
        shares: prefix of the keys of shared columns; generations with the same one compute these once.
    """

    name: str
    entries: tuple[Entry, ...] = ()
    shares: str = ""

    def entries_of(self, preset: Preset) -> tuple[Entry, ...]:
        """Return what is logged under a preset."""
        return tuple(entry for entry in self.entries if entry.when(preset))

    def columns(self, view: View) -> tuple[Columns, Ranges]:
        """Compute the summands and extremes of each sequence, [S]; shared ones only once per batch."""
        sums: Columns = {}
        ranges: Ranges = {}
        entries = self.entries_of(view.preset)
        for column in dict.fromkeys(column for entry in entries for column in entry.value.columns):
            if any(getattr(view.batch, field) is None for field in column.needs):
                continue
            name = key(self.shares or self.name, view.preset, column)
            if isinstance(column, Sum):
                make: Callable[[], Array] = partial(column.of, view)
                sums[name] = view.once(("Σ", name), make) if column.shared else make()
            else:
                found: Callable[[], Ends] = partial(column.of, view)
                ranges[name] = view.once(("ends", name), found) if column.shared else found()
        return sums, ranges

    def logged(self, preset: Preset, read: Read) -> dict[str, float]:
        """Return name → value that the trainer would have logged for the dump as one batch."""
        totals = Totals(preset, read, self.shares or self.name)
        found: dict[str, float] = {}
        for entry in self.entries_of(preset):
            with contextlib.suppress(Absent):
                found[entry.name] = entry.value.of(totals)
        return found

    def names(self) -> Mapping[str, str]:
        """Return logged name → meaning; all meanings if they depend on the preset."""
        found: dict[str, dict[str, None]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, {})[entry.meaning] = None
        return {name: ". Under other presets: ".join(meanings) for name, meanings in found.items()}
