"""One side of a rule or a veto: trainers log what fell below and what fell above apart."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

from offpol_diag.presets import Reject, Veto

Side = Literal["lower", "upper"]


def bound(of: Reject | Veto, side: Side) -> float | None:
    """The lower or the upper bound."""
    return of.lower if side == "lower" else of.upper


@cache
def half(rule: Reject, side: Side) -> Reject:
    """The rule with that bound alone."""
    return replace(rule, upper=None) if side == "lower" else replace(rule, lower=None)


@cache
def half_veto(veto: Veto, side: Side) -> Veto:
    """The veto with that bound alone."""
    return Veto(lower=veto.lower) if side == "lower" else Veto(upper=veto.upper)
