"""Other definitions that a trainer may have computed: changes of the batch, the preset or the averaging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from offpol_diag.batch import Batch
from offpol_diag.check.expected import Logged, swapped
from offpol_diag.engine import segments
from offpol_diag.presets import Preset

Values = dict[str, float]
Parts = Sequence[list[int]]
BOUNDS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0, 10.0, 100.0)
"""Upper bounds of weights that are tried in place of the preset's."""
RANKS = (2, 4, 8, 16, 32, 64)


@dataclass
class Step:
    """One training step of the dump, and what was computed of it.

    Attributes:
        batch: its rows.
        unmasked: the same rows with masked tokens counted, or None where the dump does not hold them.
        preset: the correction that is assumed.
        columns: canonical columns of the dump.
        micro, ranks: sequences of a micro-batch and number of data-parallel ranks, where they are known.
        near: the steps before and after it, where the dump has them.
    """

    batch: Batch
    unmasked: Batch | None
    preset: Preset
    columns: frozenset[str]
    micro: int | None
    ranks: int | None
    near: dict[int, Step] = field(default_factory=dict)
    made: dict[object, Logged] = field(default_factory=dict)

    def logged(
        self,
        key: object = "",
        batch: Callable[[Step], Batch | None] | None = None,
        preset: Preset | None = None,
    ) -> Logged | None:
        """Return the trainer's summands of a changed batch or preset, computed once per key."""
        if key not in self.made:
            chosen = self.batch if batch is None else batch(self)
            if chosen is None:
                return None
            self.made[key] = Logged.of(chosen, preset or self.preset, self.columns)
        return self.made[key]

    @property
    def base(self) -> Logged:
        """Return the summands of the step as it is."""
        found = self.logged()
        assert found is not None
        return found

    def expected(self, of: Logged | None = None, masked: bool = False) -> Values:
        """Return logged name → value, averaged over ranks and micro-batches where those are given."""
        one = of or self.base
        if self.micro is None and self.ranks is None:
            return one.values(masked=masked)
        return averaged(one, split(one.sequences, self.ranks or 1, self.micro), masked)


def split(rows: int, ranks: int, micro: int | None, strided: bool = False) -> list[list[int]]:
    """Divide rows among ranks, contiguous or in turns, and those of each into micro-batches."""
    cuts = [rows * i // ranks for i in range(ranks + 1)]
    own = [list(range(i, rows, ranks)) for i in range(ranks)]
    if not strided:
        own = [list(range(a, b)) for a, b in pairwise(cuts)]
    size = micro or rows
    return [one[at : at + size] for one in own for at in range(0, len(one), size)]


def averaged(of: Logged, parts: Parts, masked: bool = False, lengths: bool = False) -> Values:
    """Return the unweighted mean over parts of what is logged of each, or weighted by their tokens.

    Of names that end in max or min the largest and smallest are taken.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for rows in parts:
        n = float(of.sums["tokens"][rows].sum())
        if n:
            for name, value in of.values(rows, masked).items():
                found.setdefault(name, []).append((value, n if lengths else 1.0))
    return {name: _mean(name, values) for name, values in found.items()}


def _mean(name: str, values: Sequence[tuple[float, float]]) -> float:
    if name.endswith(("max", "min")):
        return (max if name.endswith("max") else min)(value for value, _ in values)
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


@dataclass(frozen=True)
class Variant:
    """Another definition.

    Attributes:
        name: a short key for the JSON.
        text: the definition in words, after "the trainer computes".
        of: its values of a step; empty where it does not apply.
    """

    name: str
    text: str
    of: Callable[[Step], Mapping[str, float]]


def _batch(name: str, text: str, change: Callable[[Step], Batch | None]) -> Variant:
    def of(step: Step) -> Values:
        made = step.logged(name, change)
        return {} if made is None else step.expected(made)

    return Variant(name, text, of)


def _zeros(step: Step) -> Batch | None:
    """Append the masked tokens of each sequence with log-probs and advantages of 0."""
    batch = step.batch
    if not bool(batch.masked.any()):
        return None
    n, more = batch.lengths, batch.masked
    order = torch.repeat_interleave(torch.arange(len(n)), n)
    at = torch.arange(batch.tokens) + (more.cumsum(0) - more)[order]
    total = int((n + more).sum())

    def wide(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.new_zeros(total).index_copy_(0, at, x)

    starts = torch.cat((n.new_zeros(1), (n + more).cumsum(0)))
    return replace(
        batch,
        **{name: wide(getattr(batch, name)) for name in ("rollout", "old", "current", "advantages")},  # type: ignore[arg-type]
        token_ids=None,
        entropy=None,
        position=segments.spread(-starts[:-1], segments.sized(starts, total)) + torch.arange(total),
        cu_seqlens=segments.sized(starts, total),
        cu_runs=segments.sized(torch.unique_consecutive(starts), total),
        masked=torch.zeros_like(more),
        masked_negative=None,
    )


def _reversed(step: Step) -> Batch | None:
    return None if step.preset.policy == "rollout" else swapped(step.batch, step.preset)


def _policy(use: str, for_: str) -> Callable[[Step], Batch | None]:
    def change(step: Step) -> Batch | None:
        x = step.batch.policy(use)
        return None if x is None or step.batch.policy(for_) is None else replace(step.batch, **{for_: x})  # type: ignore[arg-type]

    return change


def _singles(lengths: bool) -> Callable[[Step], Values]:
    return lambda step: averaged(step.base, [[i] for i in range(step.base.sequences)], lengths=lengths)


def _times(name: str) -> Callable[[Step], Values]:
    def of(step: Step) -> Values:
        factor = float(step.base.sums[name].sum())
        return {
            key: value * factor for key, value in step.expected().items() if not key.endswith(("max", "min"))
        }

    return of


def _neighbour(by: int) -> Callable[[Step], Values]:
    return lambda step: step.near[by].expected() if by in step.near else {}


def _split(ranks: int | None, micro: int | None, strided: bool = False) -> Callable[[Step], Values]:
    def of(step: Step) -> Values:
        rows, many = step.base.sequences, ranks or step.ranks or 1
        if many > rows or (micro is not None and micro >= rows):
            return {}
        return averaged(step.base, split(rows, many, micro or step.micro, strided))

    return of


COMMON: tuple[Variant, ...] = (
    Variant(
        "masked_in_denominator",
        "means whose denominator also counts masked tokens",
        lambda step: step.expected(masked=True),
    ),
    _batch("mask_ignored", "means over all tokens, masked ones with their log-probs", lambda s: s.unmasked),
    _batch("masked_as_zeros", "means over all tokens, masked ones with log-probs of 0", _zeros),
    _batch("reversed", "the ratio in the other direction, π_rollout/π_train", _reversed),
    _batch("current_for_old", "π_θ (current) where old is meant", _policy("current", "old")),
    _batch("old_for_current", "π_old where π_θ (current) is meant", _policy("old", "current")),
    Variant("sequence_mean", "a mean over sequences of the means of their tokens", _singles(False)),
    Variant("token_mean", "a mean over tokens, not of the sequences' means", _singles(True)),
    Variant("sum_tokens", "a sum over tokens, not their mean", _times("tokens")),
    Variant("sum_sequences", "a sum over sequences, not their mean", _times("rows")),
    Variant("step_before", "the values of the step before: the curve lags by one", _neighbour(-1)),
    Variant("step_after", "the values of the step after: the curve is one step ahead", _neighbour(1)),
)
"""Variants that need no size of the dump."""


def variants(step: Step, presets: Sequence[Preset]) -> Iterator[Variant]:
    """Yield the variants to try, the likeliest first; `presets` are others that log the same names."""
    yield from COMMON
    rows = step.base.sequences
    for ranks in RANKS:
        for strided, how in ((False, "in blocks"), (True, "in turns")):
            text = f"means of {ranks} data-parallel ranks (rows dealt {how}), averaged without their sizes"
            yield Variant(f"dp_{ranks}{'_strided' * strided}", text, _split(ranks, None, strided))
    for micro in sorted({2**k for k in range(1, rows.bit_length())}, reverse=True):
        text = f"means of micro-batches of {micro} sequences, averaged without their sizes"
        yield Variant(f"micro_{micro}", text, _split(None, micro))
    for name, text, preset in _clamps(step.preset):
        yield Variant(name, text, _as(name, preset))
    for other in presets:
        name = f"preset_{other.name}"
        yield Variant(name, f"what it logs under the preset {other.name}", _as(name, other))


def _as(key: str, preset: Preset) -> Callable[[Step], Values]:
    def of(step: Step) -> Values:
        made = step.logged(key, preset=preset)
        return {} if made is None else step.expected(made)

    return of


def _clamps(preset: Preset) -> Iterator[tuple[str, str, Preset]]:
    weight = preset.weight
    if weight is None:
        return
    for upper in BOUNDS:
        if upper != weight.upper and (weight.lower is None or weight.lower < upper):
            text = (
                f"weights bounded at {upper:g}, not at {'nothing' if weight.upper is None else weight.upper}"
            )
            yield f"upper_{upper:g}", text, replace(preset, weight=replace(weight, upper=upper))
    raw = replace(weight, action="none", upper=None, lower=None)
    yield "unbounded", "weights without bounds", replace(preset, weight=raw)
    if weight.action in ("truncate", "mask"):
        other = "mask" if weight.action == "truncate" else "truncate"
        text = "weights outside the bounds set to 0, not clamped"
        if other == "truncate":
            text = "weights clamped to the bounds, not set to 0 outside them"
        yield f"{other}_weights", text, replace(preset, weight=replace(weight, action=other))  # type: ignore[arg-type]
