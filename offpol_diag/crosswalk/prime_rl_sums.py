"""What is summed of a dump for what prime-rl logs: see `prime_rl`."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.bounds import Side, bound, half, half_veto
from offpol_diag.crosswalk.ends import rows
from offpol_diag.crosswalk.keys import KEPT, kept
from offpol_diag.crosswalk.ledger import Column, Range
from offpol_diag.crosswalk.measures import Mask, Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Over, Preset, Veto
from offpol_diag.ratios import Level

LARGEST = 1e30
"""Where newer versions cut one token's mismatch KL off; older ones log inf beyond float32."""


def _kl(view: View) -> Tensor:
    return (powers.excess(view.ratios).clamp(max=LARGEST) - view.ratios.delta).clamp(max=LARGEST)


def _kl_squared(view: View) -> Tensor:
    return view.values(KL).square()


KL = Measure("prime-rl kl", _kl)
KL_SQUARED = Measure("prime-rl kl²", _kl_squared)


def _per(x: Tensor, tokens: Tensor) -> Tensor:
    """Per sequence, a mean over that many of its tokens; 0 where there is none."""
    return x / tokens.clamp(min=1)


def _failed(view: View) -> Tensor | None:
    """Tokens that the rules on tokens drop, [T] bool."""
    kept = view.done.kept.tokens
    return (
        view.ratios.once("none", lambda: torch.zeros_like(view.ratios.delta, dtype=torch.bool))
        if kept is None
        else ~kept
    )


FAILED = Mask(_failed, lambda view: ("failed", KEPT.by(view)))


def _over_dropped(view: View, of: Measure) -> Tensor:
    """Σ over the tokens that the rules drop: all of a sequence that is dropped as a whole, [S]."""
    return torch.where(view.pieces.sequences, view.total(of, FAILED), view.total(of))


def _dropped(view: View) -> Tensor:
    """How many tokens the preset's rules drop, [S]."""
    return view.n - view.pieces.kept_tokens


def _signed(sign: int) -> Measure:
    """1 for tokens whose advantage has that sign; without advantages for all."""

    def of(view: View) -> Tensor:
        a = view.batch.advantages
        return torch.ones_like(view.ratios.delta) if a is None else (a * sign > 0).to(torch.float64)

    return Measure(f"A has sign {sign}", of)


HIGH, LOW = _signed(1), _signed(-1)


def _dropped_signed(view: View, of: Measure) -> Tensor:
    return view.once(("dropped", of.name), lambda: _over_dropped(view, of))


def _dropped_kl(view: View) -> Tensor:
    return _over_dropped(view, KL)


def _kept_kl(view: View) -> Tensor:
    return torch.where(view.pieces.sequences, view.total(KL, KEPT), 0.0)


# ---------------------------------------------------------------- which rows log what


def now(preset: Preset) -> bool:
    """The losses since 2026-03, whose masks are on probability differences."""
    return any(rule.statistic == "prob_diff" for rule in preset.reject)


def then(preset: Preset) -> bool:
    """Those of v0.2."""
    return not now(preset)


def default(preset: Preset) -> bool:
    """The loss whose mask looks at the advantage; `ipo` logs less."""
    return any(rule.statistic == "prob_diff" and rule.advantage != "any" for rule in preset.reject)


# ---------------------------------------------------------------- masks of v0.2


def _bands(view: View, over: Over, side: Side) -> list[Level]:
    """What each band of r lets through on one side alone: tokens or sequences."""
    rules = [rule for rule in view.preset.reject if rule.statistic == "ratio" and rule.over == over]
    ratios = view.far
    return [correction.passes(ratios, half(rule, side)) for rule in rules if bound(rule, side) is not None]


def _tokens_outside(side: Side) -> Callable[[View], Tensor]:
    def of(view: View) -> Tensor:
        gone = [~passed.values for passed in _bands(view, "token", side)]
        return (
            segments.count(reduce(torch.logical_or, gone), view.far.batch.cu_seqlens) if gone else view.zeros
        )

    return of


def _sequences_outside(side: Side) -> Callable[[View], Tensor]:
    def of(view: View) -> Tensor:
        gone = [~passed.values for passed in _bands(view, "mean", side)]
        return reduce(torch.logical_or, gone).to(torch.float64) if gone else view.zeros

    return of


def _vetoed(side: Side) -> Callable[[View], Tensor]:
    def of(view: View) -> Tensor:
        veto = half_veto(view.preset.veto or Veto(), side)
        return (correction.veto_hits(view.far, veto) > 0).to(torch.float64)

    return of


# ---------------------------------------------------------------- what is summed

MASKED_MEANS: dict[str, Callable[[View], Tensor]] = {
    "masked_mismatch_kl": lambda v: _per(_dropped_kl(v), _dropped(v)),
    "unmasked_mismatch_kl": lambda v: _per(_kept_kl(v), v.pieces.kept_tokens),
    "is_masked": lambda v: _per(_dropped(v), v.n),
}
SIGNED_MEANS: dict[str, Callable[[View], Tensor]] = {
    "is_masked_low": lambda v: _per(_dropped_signed(v, LOW), v.n),
    "is_masked_high": lambda v: _per(_dropped_signed(v, HIGH), v.n),
    "masked_advantage_positive": lambda v: _per(_dropped_signed(v, HIGH), _dropped(v)),
    "masked_advantage_negative": lambda v: _per(_dropped_signed(v, LOW), _dropped(v)),
}
"""Per sequence [S]; a preset's own."""

OLD_FLAGS: dict[str, Callable[[View], Tensor]] = {
    "sequence_masked_low": _vetoed("lower"),
    "sequence_masked_high": _vetoed("upper"),
    "geo_masked_low": _sequences_outside("lower"),
    "geo_masked_high": _sequences_outside("upper"),
}
OLD_COUNTS: dict[str, Callable[[View], Tensor]] = {
    "is_masked": _dropped,
    "is_masked_low": _tokens_outside("lower"),
    "is_masked_high": _tokens_outside("upper"),
}
"""Tokens per sequence: v0.2 takes their mean over tokens."""


def _entropy(view: View) -> Tensor:
    assert view.batch.entropy is not None
    return view.batch.entropy


ENTROPY = Measure("entropy", _entropy)


def _row_kl(view: View) -> Tensor:
    return _per(view.total(KL), view.n)


def _both(column: Column, when: Callable[[Preset], bool]) -> Range:
    """The ends of what is summed as well."""
    return Range(column.name, lambda view: rows(column.made(view)), own=column.own, when=when, by=column.by)


ROW_KL = Column("row kl", _row_kl, when=then)
MASKED = tuple(Column(name, of, own=True, by=kept) for name, of in MASKED_MEANS.items())
SIGNED = tuple(Column(name, of, own=True, when=default, by=kept) for name, of in SIGNED_MEANS.items())
SUMS = (
    Column("kl", lambda v: v.total(KL)),
    Column("kl²", lambda v: v.total(KL_SQUARED)),
    ROW_KL,
    Column("row kl²", lambda v: _row_kl(v).square(), when=then),
    Column("geo − 1", lambda v: torch.expm1(v.total(powers.LOG) / v.divisor), when=then),
    Column("entropy", lambda v: v.total(ENTROPY), needs=("entropy",)),
    *MASKED,
    *SIGNED,
    *(Column(name, of, own=True, when=then) for name, of in OLD_FLAGS.items()),
    *(Column(f"tokens {name}", of, own=True, when=then) for name, of in OLD_COUNTS.items()),
)
EXTREMES = (
    Range("token kl", lambda v: v.ends(KL)),
    _both(ROW_KL, then),
    *(_both(column, now) for column in MASKED),
    *(_both(column, default) for column in SIGNED),
)
