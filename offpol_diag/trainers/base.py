"""Building blocks of trainers' logged metrics: token measures, their sums and extremes, and named entries.

The whole dump is one trainer batch. Nothing here imports torch, so that printing a trainer's configuration is
fast; `view.py` computes the values. Throughout r = π_train/π_rollout = e^Δ, and
u = log π_θ − log π_anchor is the log of the ratio that a policy loss clips.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from offpol_diag.presets import Clip, Policy, Preset, Reject, Veto

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import Tokens, View

T = TypeVar("T")
Ends = tuple["Tensor", "Tensor"]
"""Minimum and maximum of each sequence, [S] each, ±inf for a sequence without values; or of all."""
Columns = dict[str, "Tensor"]
Ranges = dict[str, Ends]
When = Callable[[Preset], bool]
Rows = Callable[["View"], "Tensor"]
"""Function that computes a number of each sequence under one preset, [S] float64."""

EPS = 1e-8
"""Constant that several trainers' masked means add to the denominator; reproduced here."""
SAFETY = 20.0
"""Bound on log-ratios before exp, nats, in most trainers."""
SMALLEST_NORM = 1e-8
"""Lower bound on the mean weight that batch normalisation divides by."""
FLOAT32_MAX = 2.0**128 - 2.0**104
FLOAT32_OVERFLOW = math.log(FLOAT32_MAX)
"""From here on e^x is infinite in float32."""


def applied(preset: Preset) -> Preset:
    """Return the preset as applied: without weight, rules and veto if it is only logged."""
    return preset if preset.apply else replace(preset, weight=None, reject=(), veto=None)


def always(preset: Preset) -> bool:
    """Return True for every preset."""
    return True


def weighs(preset: Preset) -> bool:
    """Return whether the preset has a weight and applies it."""
    return preset.apply and preset.weight is not None


# ---------------------------------------------------------------- one side of a rule

Side = Literal["lower", "upper"]
SIDES: tuple[Side, ...] = ("lower", "upper")


def half(rule: Reject, side: Side) -> Reject | None:
    """Return the rule with only its lower or upper bound; None if it has no such bound."""
    if getattr(rule, side) is None:
        return None
    return replace(rule, upper=None) if side == "lower" else replace(rule, lower=None)


def half_veto(veto: Veto | None, side: Side) -> Veto:
    """Return the veto with only that bound, if it has it."""
    veto = veto or Veto()
    return Veto(lower=veto.lower) if side == "lower" else Veto(upper=veto.upper)


# ---------------------------------------------------------------- numbers of tokens


@dataclass(frozen=True, eq=False)
class Measure:
    """A number or flag of each token.

    Attributes:
        name: unique among the measures that do not depend on the preset.
        of: computes the values, [T].
        own: whether it depends on more of the preset than its numerator policy.
        near: its equivalent on near tokens, which no rule and no bound of the preset can act on; None:
            itself, or 0 if it is `own`.
        rows: computes one value per sequence, [S], for presets under which its tokens share it; else None.
        policy: fixed numerator policy; None for the preset's.
        linear: its sum over near tokens as a linear combination: (factor, measure) pairs.
        rising: another measure and an increasing function of it that equals this one; gives the extremes.
        moment: its sum over near tokens as a named moment (`Moments.of`): function, log-ratio, column, side.
            The log-ratio is "Δ", "u" or one of the moments' own.
    """

    name: str
    of: Callable[[Tokens], Tensor]
    own: bool = False
    near: Measure | None = None
    rows: Callable[[View], Tensor | None] | None = None
    policy: Policy | None = None
    linear: tuple[tuple[float, Measure], ...] = ()
    rising: tuple[Measure, Callable[[Tensor], Tensor]] | None = None
    moment: tuple[str, str, str, str] | None = None


@dataclass(frozen=True)
class Mask:
    """A selection of tokens.

    Attributes:
        of: computes the flags of the selected tokens, [T] bool; None for all.
        near: whether near tokens, on which the preset cannot act, are selected.
    """

    of: Callable[[Tokens], Tensor | None]
    near: bool = True


def clipped(x: Tensor, clip: Clip) -> Tensor:
    """Clip a ratio to [1 − low, 1 + high]; None means no bound on that side."""
    low = None if clip.low is None else 1 - clip.low
    high = None if clip.high is None else 1 + clip.high
    return x if low is None and high is None else x.clamp(low, high)


def _decides(tokens: Tokens) -> Tensor:
    """Flag the tokens whose clipped term is the larger loss: −A clip(e^u) > −A e^u, [T]."""
    r, a = tokens.update_ratio, tokens.advantages
    return -a * clipped(r, tokens.preset.clip) > -a * r


ONE = Measure("1", lambda x: x.delta * 0 + 1, moment=("1", "", "", ""))
LOG = Measure("Δ", lambda x: x.delta, moment=("d", "Δ", "", ""))
DISTANCE = Measure("|Δ|", lambda x: x.delta.abs(), moment=("|d|", "Δ", "", ""))
SQUARED = Measure("Δ²", lambda x: x.delta.square(), moment=("d²", "Δ", "", ""))
EXCESS = Measure("r − 1", lambda x: x.excess(), moment=("x", "Δ", "", ""))
EXCESS_SIZE = Measure("|r − 1|", lambda x: x.excess().abs(), moment=("|x|", "Δ", "", ""))
EXCESS_SQUARED = Measure("(r − 1)²", lambda x: x.excess().square(), moment=("x²", "Δ", "", ""))
RATIO = Measure("r", lambda x: x.ratio(), linear=((1, ONE), (1, EXCESS)), rising=(LOG, lambda x: x.exp()))
RATIO_HELD = Measure("r, Δ within ±20", lambda x: x.ratio(SAFETY), near=RATIO)
K1 = Measure("−Δ", lambda x: -x.delta, linear=((-1, LOG),))
K2 = Measure(
    "Δ²/2",
    lambda x: x.delta.square() / 2,
    linear=((0.5, SQUARED),),
    rising=(DISTANCE, lambda x: x.square() / 2),
)
K3 = Measure("r − 1 − Δ", lambda x: x.k3(), moment=("k3", "Δ", "", ""))
K3_HELD = Measure("k3, Δ within ±20, at most 10", lambda x: x.k3(SAFETY).clamp(max=10.0), near=K3)
PROB_DIFF = Measure(
    "π_train − π_rollout", lambda x: x.probability_difference(), moment=("x", "Δ", "π_rollout", "")
)
ROLLOUT = Measure(
    "log π_rollout", lambda x: x.batch.rollout, policy="rollout", moment=("1", "", "log π_rollout", "")
)
TRAIN = Measure("log π_train", lambda x: x.ratios.train, linear=((1, ROLLOUT), (1, LOG)))
POSITIVE = Measure("A > 0", lambda x: x.advantages > 0, policy="rollout", moment=("1", "", "", "1+"))
NEGATIVE = Measure("A < 0", lambda x: x.advantages < 0, policy="rollout", moment=("1", "", "", "1-"))
U = Measure("u", lambda x: x.update, rows=lambda view: view.pooled_update, moment=("d", "u", "", ""))
UPDATE_EXCESS = Measure("e^u − 1", lambda x: x.update_ratio - 1, moment=("x", "u", "", ""))
UPDATE_EXCESS_SQUARED = Measure(
    "(e^u − 1)²", lambda x: (x.update_ratio - 1).square(), moment=("x²", "u", "", "")
)
UPDATE_RATIO = Measure(
    "e^u",
    lambda x: x.update_ratio,
    rows=lambda view: view.pooled_ratio,
    linear=((1, ONE), (1, UPDATE_EXCESS)),
    rising=(U, lambda x: x.exp()),
)

_K3_SQUARED = Measure("k3²", lambda x: x.k3().square(), moment=("k3²", "Δ", "", ""))
_FOURTH = Measure("Δ⁴", lambda x: x.delta.square().square(), moment=("d⁴", "Δ", "", ""))
_SQUARES: dict[str, tuple[tuple[float, Measure], ...]] = {
    EXCESS.name: ((1, EXCESS_SQUARED),),
    RATIO.name: ((1, ONE), (2, EXCESS), (1, EXCESS_SQUARED)),
    UPDATE_RATIO.name: ((1, ONE), (2, UPDATE_EXCESS), (1, UPDATE_EXCESS_SQUARED)),
    K1.name: ((1, SQUARED),),
    K2.name: ((0.25, _FOURTH),),
    K3.name: ((1, _K3_SQUARED),),
}
"""Squares of measures whose sums follow from those of other measures."""


@cache
def under(of: Measure, policy: Policy) -> Measure:
    """Return the measure with a fixed numerator policy instead of the preset's."""
    return replace(of, policy=policy, rows=None)


@cache
def squared(of: Measure) -> Measure:
    """Return the square of a measure that does not depend on the preset."""
    near, linear = of.near and squared(of.near), _SQUARES.get(of.name, ())
    return Measure(f"({of.name})²", lambda x: of.of(x).square(), near=near, linear=linear)


RATIO_SQUARED = squared(RATIO_HELD)
WEIGHT = Measure("weight", lambda x: x.weigh().final.values, own=True, near=RATIO)
"""The final weight of a token, applied or not; only for presets with token weights."""
CLIP_DECIDES = Measure("the clip decides", _decides, own=True)
KEPT = Mask(lambda x: x.kept)
"""The tokens that pass the rules on tokens."""


def clip_decides(view: View, mask: Mask | None = None) -> Tensor:
    """Count the tokens whose clipped term is the larger loss, [S]; under GSPO all with one sign of A."""
    r = view.pooled_ratio
    if r is None:
        return view.total(CLIP_DECIDES, mask)
    bounded = clipped(r, view.preset.clip)
    return view.total(POSITIVE, mask) * (bounded < r) + view.total(NEGATIVE, mask) * (bounded > r)


def where(flags: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return x where flags are set, else y; any shape."""
    import torch

    return torch.where(flags, x, y)


def row_mean(of: Measure) -> Rows:
    """Return the mean of a measure over the tokens of each sequence; 0 for one without tokens."""
    return lambda view: view.total(of) / view.divisor


def among(ends: Ends, there: Tensor) -> Ends:
    """Replace the extremes of sequences that are not flagged by ±inf."""
    return ends[0].masked_fill(~there, math.inf), ends[1].masked_fill(~there, -math.inf)


def ends(x: Tensor, there: Tensor | None = None) -> Ends:
    """Return one number per sequence as its minimum and maximum; ±inf for sequences not flagged."""
    return (x, x) if there is None else among((x, x), there)


# ---------------------------------------------------------------- sums and extremes


@dataclass(frozen=True)
class Sum:
    """A sum over the dump.

    Attributes:
        name: name by which entries read it.
        of: computes the summand of each sequence, [S].
        own: whether it depends on more of the preset than its numerator; else shared between such presets.
        when: predicate: the presets that need it.
        needs: fields of the batch that it requires; entries that read it are skipped without them.
    """

    name: str
    of: Rows
    own: bool = False
    when: When = always
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Range:
    """A minimum and maximum over the dump; the attributes are those of `Sum`."""

    name: str
    of: Callable[[View], Ends]
    own: bool = False
    when: When = always
    needs: tuple[str, ...] = ()


UPDATE = ("current",)
"""The field that u requires; a preset is never run without its own numerator."""


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
    """The sums and extremes of one preset over the dump, by the names of `Sum` and `Range`."""

    preset: Preset
    read: Read
    log: str

    def __call__(self, name: str) -> float:
        """Return the sum of this name over the dump.

        Raises:
            Absent: it was not computed.
        """
        return self._of(self.read.sums, name)

    def low(self, name: str) -> float:
        """Return the minimum of this name over the dump."""
        return self._of(self.read.ranges, name)[0]

    def high(self, name: str) -> float:
        """Return the maximum of this name over the dump."""
        return self._of(self.read.ranges, name)[1]

    def _of(self, found: Mapping[str, T], name: str) -> T:
        for key in (own_key(self.preset, name), shared_key(self.log, self.preset, name)):
            if key in found:
                return found[key]
        raise Absent(name)

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

    @property
    def longest(self) -> float:
        """Length of the longest response, including masked tokens: the width of a padded batch."""
        return self.read.ranges["response"][1]


def own_key(preset: Preset, name: str) -> str:
    """Return the key of a number that belongs to one preset."""
    return f"{preset.name}!{name}"


def shared_key(log: str, preset: Preset, name: str) -> str:
    """Return the key of a number that presets with the same numerator share."""
    return f"{log}/{preset.policy}/{name}"


# ---------------------------------------------------------------- logged entries

Value = Callable[[Totals], float]


@dataclass(frozen=True)
class Entry:
    """One metric that the trainer logs.

    Attributes:
        name: the logged name, with its prefix.
        meaning: its definition in the trainer, and what it must not be confused with.
        of: computes its value.
        when: predicate: the presets under which it is logged.
    """

    name: str
    meaning: str
    of: Value
    when: When = always


@dataclass(frozen=True, eq=False)
class Log:
    """The metrics that one trainer, or one generation of it, logs.

    Attributes:
        name: the value of `logs` in presets.
        sums: sums to compute.
        ranges: minima and maxima to compute.
        entries: logged metrics, in the trainer's order.
    """

    name: str
    sums: tuple[Sum, ...]
    ranges: tuple[Range, ...]
    entries: tuple[Entry, ...]

    def columns(self, view: View) -> tuple[Columns, Ranges]:
        """Compute the summands and extremes of each sequence, [S]; shared ones only once per batch."""
        sums = {self._key(one, view): self._made(one, view) for one in self.sums if _asked(one, view)}
        ranges = {self._key(one, view): self._made(one, view) for one in self.ranges if _asked(one, view)}
        return sums, ranges

    def _made(self, one: Sum | Range, view: View) -> Any:
        if one.own:
            return one.of(view)
        key = self.name, view.preset.policy, type(one), one.name
        return view.once(key, lambda: one.of(view))

    def _key(self, one: Sum | Range, view: View) -> str:
        return own_key(view.preset, one.name) if one.own else shared_key(self.name, view.preset, one.name)

    def logged(self, preset: Preset, read: Read) -> dict[str, float]:
        """Return name → value that the trainer would have logged for the dump as one batch."""
        return dict(self._lines(Totals(preset, read, self.name)))

    def _lines(self, totals: Totals) -> Iterator[tuple[str, float]]:
        """Yield name and value of each entry whose sums were computed."""
        for entry in self.entries:
            if entry.when(totals.preset):
                with contextlib.suppress(Absent):
                    yield entry.name, entry.of(totals)

    def names(self) -> Mapping[str, str]:
        """Return logged name → meaning; all meanings if they depend on the preset."""
        found: dict[str, dict[str, None]] = {}
        for entry in self.entries:
            found.setdefault(entry.name, {})[entry.meaning] = None
        return {name: ". Under other presets: ".join(meanings) for name, meanings in found.items()}


def _asked(one: Sum | Range, view: View) -> bool:
    """Return whether the preset needs a sum and the batch has the fields that it requires."""
    return one.when(view.preset) and all(getattr(view.batch, name) is not None for name in one.needs)


def per_token(name: str) -> Value:
    """Return the entry value: a sum divided by the number of tokens."""
    return lambda totals: totals(name) / totals.tokens


def per_row(name: str) -> Value:
    """Return the entry value: a sum divided by the number of sequences, including empty ones."""
    return lambda totals: totals(name) / totals.rows


def highest(name: str) -> Value:
    """Return the entry value: a maximum."""
    return lambda totals: totals.high(name)


def lowest(name: str) -> Value:
    """Return the entry value: a minimum."""
    return lambda totals: totals.low(name)


def std(first: float, second: float, n: float, less: float = 1) -> float:
    """Return √((Σx² − (Σx)²/n) / (n − less)) from Σx and Σx²; NaN if n ≤ less. A shift of x is allowed."""
    return math.sqrt(max(second - first * first / n, 0.0) / (n - less)) if n > less else math.nan
