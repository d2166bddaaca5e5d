"""What a preset leaves of a batch at every threshold at once: a row per threshold, a column per sequence.

Whether a token or a sequence stays is decided by where its statistic lies among the thresholds, so the tokens
are sorted into the gaps between thresholds once; what each threshold leaves is a running sum over the gaps.
Where one token's fate depends on others (a cut through the trainer batch, a mean over the tokens left), the
preset is applied at each threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offpol_diag import correction, segments, tables
from offpol_diag.metrics.outcome import PER_SEQUENCE, Moments, powers
from offpol_diag.metrics.pieces import Pieces, pieces
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.stack import Stack
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.ratios import FLOAT32_OVERFLOW, Ratios
from offpol_diag.sweeps.dial import Dial


@dataclass(frozen=True)
class Table:
    """[N, S] float64 each: N thresholds, S sequences.

    Attributes:
        kept: tokens left.
        sums: of the final weights over them.
        acted: weights that the bound changes; 0 where the bound is not one of the weight.
    """

    kept: Tensor
    sums: Moments
    acted: Tensor


def table(scene: Scene, preset: Preset, dial: Dial, values: Sequence[float]) -> Table:
    """The preset at rising thresholds."""
    return _way(preset, dial)(scene, preset, dial, values)


def single(preset: Preset, dial: Dial) -> bool:
    """Whether the fate of each token or sequence is decided by its own statistic alone."""
    return _way(preset, dial) is not _each


def _way(preset: Preset, dial: Dial) -> Callable[[Scene, Preset, Dial, Sequence[float]], Table]:
    held, weight = dial.held(preset), preset.weight
    if dial.part == "veto":
        return _veto
    if any(part.among == "left" for part in (*preset.reject, *([weight] if weight else ()))):
        return _each
    if isinstance(held, Reject):
        plain = held.over in ("token", "segment") and held.advantage == "any"
        return _token_rule if plain else _each
    assert isinstance(held, Weight)
    truncated_twice = held.action == "truncate" and dial.side == "window"
    return _each if held.over in PER_SEQUENCE or truncated_twice else _token_weight


# ---------------------------------------------------------------- one by one


def _each(scene: Scene, preset: Preset, dial: Dial, values: Sequence[float]) -> Table:
    stack = Stack.of(scene, [dial.turned(preset, dial.bounds(value)) for value in values])
    there = (stack.n > 0).to(torch.float64)
    acted = [item.acted(stack.n, there, stack.none) for item in stack.items]
    beyond = [sum((one[key] for key in _acting(dial)), stack.none) for one in acted]
    sums = Moments(**{name: rows.all for name, rows in stack.sums.items()})
    return Table(stack.kept_tokens, sums, torch.stack(beyond))


def _acting(dial: Dial) -> tuple[str, ...]:
    if dial.part != "weight":
        return ()
    return {"upper": ("high",), "lower": ("low",), "window": ("high", "low")}[dial.side]


# ---------------------------------------------------------------- a veto


def _veto(scene: Scene, preset: Preset, dial: Dial, values: Sequence[float]) -> Table:
    done = pieces(scene, dial.turned(preset, {dial.side: None}))
    worst = worst_token(done.ratios, dial)
    edges = worst.new_tensor([math.log(value) for value in values])[:, None]
    passed = (worst >= edges if dial.side == "lower" else worst <= edges).to(torch.float64)
    return Table(done.kept_tokens * passed, done.sums.times(passed), torch.zeros_like(passed))


def worst_token(ratios: Ratios, dial: Dial) -> Tensor:
    """The Δ of each sequence that a veto judges it by, [S]."""
    reduce = segments.smallest if dial.side == "lower" else segments.largest
    return reduce(ratios.delta, ratios.batch.cu_seqlens)


# ---------------------------------------------------------------- a rule on tokens


def _token_rule(scene: Scene, preset: Preset, dial: Dial, values: Sequence[float]) -> Table:
    rule, others = dial.held(preset), _without(preset, dial)
    assert isinstance(rule, Reject)
    done = pieces(scene, others)
    x = correction.statistic(done.ratios.of(rule.policy), rule).values
    gaps = _Gaps(_gap(x, dial, rule, values, rule.statistic == "ratio"), len(values), done, dial)
    kept = gaps.within(None)
    return Table(kept, _rule_sums(gaps, kept), torch.zeros_like(kept))


def _without(preset: Preset, dial: Dial) -> Preset:
    return replace(preset, reject=tuple(one for at, one in enumerate(preset.reject) if at != dial.index))


def _rule_sums(gaps: _Gaps, kept: Tensor) -> Moments:
    weighed, own = gaps.done.first.weighed, gaps.done.per_sequence
    if weighed is None:
        return Moments(kept, kept, torch.zeros_like(kept), torch.zeros_like(kept))
    if own is not None:
        return powers(own).times(kept)
    return Moments(**{name: gaps.within(x) for name, x in powers(weighed.final.values).named().items()})


# ---------------------------------------------------------------- a bound on token weights


def _token_weight(scene: Scene, preset: Preset, dial: Dial, values: Sequence[float]) -> Table:
    weight = dial.held(preset)
    assert isinstance(weight, Weight)
    done = pieces(scene, preset)
    log = done.ratios.log_ratio(weight.over, weight.safety, weight.safety_at).values
    free = dial.turned(preset, dict.fromkeys(dial.bounds(1.0)))
    raw = correction.weigh(done.ratios, free).final.values
    at = _gap(log, dial, weight, values, logarithmic=True)
    acted = _Gaps(at, len(values), done, dial, every=True)
    if weight.overflow == "zero":
        at = torch.where(log > FLOAT32_OVERFLOW, 0, at)  # dropped whatever the bound
    gaps = _Gaps(at, len(values), done, dial)
    kept = gaps.everything(None)
    beyond = kept - gaps.within(None)
    ends = powers(kept.new_tensor([_end(value, weight) for value in values])[:, None]).named()
    sums = {name: gaps.within(x) + ends[name] * beyond for name, x in powers(raw).named().items()}
    return Table(kept, Moments(**sums), acted.everything(None) - acted.within(None))


def _end(value: float, weight: Weight) -> float:
    """What a weight beyond the bound becomes."""
    return value if weight.action == "truncate" else 0.0


# ---------------------------------------------------------------- gaps between thresholds


@dataclass(frozen=True)
class _Gaps:
    """Tokens sorted into the gaps between N thresholds.

    Attributes:
        at: of how many thresholds each token lies outside, from the tightest on, [T] int64 in [0, N].
        size: N.
        done: the rest of the preset, which says what else is dropped.
        dial: knows which end is the tightest.
        every: whether dropped tokens count as well.
    """

    at: Tensor
    size: int
    done: Pieces
    dial: Dial
    every: bool = False

    def within(self, x: Tensor | None) -> Tensor:
        """The sum of x [T] (None: 1 for each) over the tokens within each threshold, [N, S]."""
        found = self._by_gap(x).cumsum(dim=1)[:, : self.size].T
        return found.flip(0) if self.dial.side == "lower" else found

    def everything(self, x: Tensor | None) -> Tensor:
        """The sum over all tokens, [N, S]."""
        return self._by_gap(x).sum(dim=1).expand(self.size, -1)

    def _by_gap(self, x: Tensor | None) -> Tensor:
        """[S, N + 1]; nothing of what is dropped."""
        batch, kept = self.done.ratios.batch, self.done.first.kept
        first = torch.arange(0, batch.sequences * (self.size + 1), self.size + 1, device=self.at.device)
        codes = segments.spread(first, batch.cu_seqlens) + self.at
        if not self.every and kept.tokens is not None:
            codes, x = codes[kept.tokens], None if x is None else x[kept.tokens]
        many = batch.sequences * (self.size + 1)
        found = tables.count(codes, many) if x is None else tables.total(codes, many, x.contiguous())
        found = found.view(batch.sequences, self.size + 1)
        return found if self.every else found * kept.sequences.to(torch.float64)[:, None]


def _gap(x: Tensor, dial: Dial, held: Weight | Reject, values: Sequence[float], logarithmic: bool) -> Tensor:
    """Of how many thresholds each value lies outside, from the tightest on; N beyond a fixed bound."""
    tight_first = list(values) if dial.side != "lower" else list(values)[::-1]
    bounds = [dial.bounds(value) for value in tight_first]
    found = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    for side, sign in (("upper", 1), ("lower", -1)):
        moving = [one[side] for one in bounds if side in one]
        fixed = getattr(held, side)
        if moving:
            outside = _outside(x * sign, [sign * _edge(b, logarithmic) for b in moving], held.strict)
        elif fixed is not None and isinstance(held, Reject | Weight) and _drops(held):
            outside = len(values) * _outside(x * sign, [sign * _edge(fixed, logarithmic)], held.strict)
        else:
            continue
        found = torch.maximum(found, outside)
    return found


def _drops(held: Weight | Reject) -> bool:
    """Whether beyond the bound that does not move nothing counts; a truncated weight still does."""
    return isinstance(held, Reject)


def _outside(x: Tensor, edges: list[float], strict: bool) -> Tensor:
    """Of how many rising edges each value lies above (or on, if strict)."""
    return torch.searchsorted(x.new_tensor(edges), x.contiguous(), right=strict)


def _edge(bound: float, logarithmic: bool) -> float:
    if not logarithmic:
        return bound
    return math.log(bound) if bound > 0 else -math.inf
