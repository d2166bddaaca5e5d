"""What is summed of a dump for what AReaL logs: see `areal`; under all presets of a numerator in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk import powers, update
from offpol_diag.crosswalk.areal_masks import BEHAVE, LEFT, ONE, VALID, Some
from offpol_diag.crosswalk.ends import Ends, among
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.crosswalk.views import Views, once
from offpol_diag.metrics.outcome import applied
from offpol_diag.metrics.rows import Rows

T = TypeVar("T")


def _weight(view: View) -> Tensor:
    """Of each token; where sequences have weights, 1: those multiply the sums of their tokens."""
    weighed = view.done.weighed
    if weighed is None or weighed.final.per == "sequence":
        return torch.ones_like(view.ratios.delta)
    return weighed.final.values


WEIGHT = Measure("areal weight", _weight, lambda view: correction.weight_key(applied(view.preset)))
U = Measure("areal u", update.log_ratio, update.pooled)
E_U = Measure("areal e^u", update.ratio, update.pooled)
V = Measure("areal −v", lambda view: -view.of("current").delta)
"""v = log π_θ − log π_rollout."""
V_SQUARED = Measure("areal v²/2", lambda view: view.of("current").delta.square() / 2)
V_DUAL = Measure("areal k3 of v", lambda view: powers.k3(view.of("current")))

OF_CURRENT = {VALID: (U,), LEFT: (E_U,), BEHAVE: (V, V_SQUARED, V_DUAL)}
"""What is summed over each denominator where the dump has π_θ."""
OF_BOTH = {VALID: (), LEFT: (), BEHAVE: (powers.LOG,)}
"""And whether it has or not."""


def _measures(over: Some, views: Views) -> tuple[Measure, ...]:
    return *OF_BOTH[over], *(() if views[0].batch.current is None else OF_CURRENT[over])


def _columns(x: Rows, measures: Sequence[Measure]) -> list[dict[Measure, Tensor]]:
    """Rows of K measures, [R, K, S] → each preset's, [S]."""
    rows = [dict(zip(measures, row.unbind(), strict=True)) for row in x.values.unbind()]
    return [rows[at] for at in x.at]


def _made(over: Some, views: Views) -> list[tuple[dict[Measure, Tensor], ...]]:
    """Sums, smallest and largest of all that is logged over a denominator."""
    measures = (ONE, *_measures(over, views))
    return list(zip(*(_columns(x, measures) for x in over.sums(views, measures)), strict=True))


def _weights(views: Views) -> list[tuple[dict[Measure, Tensor], ...]]:
    """The same of the weights of behave tokens."""
    return list(zip(*(_columns(x, (WEIGHT,)) for x in BEHAVE.sums(views, (WEIGHT,))), strict=True))


def sums(over: Some, of: Measure) -> Callable[[Views], list[Tensor]]:
    """Σ of a measure over a denominator under each preset, [S] each."""
    return lambda views: [total[of] for total, _, _ in _once(over, of, views)]


def spans(over: Some, of: Measure) -> Callable[[Views], list[Ends]]:
    """The smallest and the largest of each sequence."""
    return lambda views: [(low[of], high[of]) for _, low, high in _once(over, of, views)]


def _once(over: Some, of: Measure, views: Views) -> list[tuple[dict[Measure, Tensor], ...]]:
    if of is WEIGHT:
        return once(views, "areal weights", _weights)
    return once(views, ("areal", over), lambda new: _made(over, new))


def counts(over: Some) -> Callable[[Views], list[Tensor]]:
    """How many tokens a denominator has."""
    return sums(over, ONE)


def _counted(over: Some, views: Views) -> Tensor:
    """The same, [V, S]."""
    return torch.stack(counts(over)(views))


def _dropped(views: Views) -> Tensor:
    """Valid tokens that are dropped, [V, S]."""
    return _counted(VALID, views) - _counted(LEFT, views)


def masked_ratio(views: Views) -> list[Ends]:
    """The smallest and largest ratio kept, and 0 for each sequence that lost a token."""
    low, high = map(torch.stack, zip(*spans(LEFT, E_U)(views), strict=True))
    lost = _dropped(views) > 0
    low, high = torch.where(lost, low.clamp(max=0.0), low), torch.where(lost, high.clamp(min=0.0), high)
    return list(zip(low.unbind(), high.unbind(), strict=True))


def weighted(views: Views) -> Sequence[Tensor]:
    """Σ of the weights over behave tokens."""
    own, ones = _own(views, sums(BEHAVE, WEIGHT)), torch.ones_like(views[0].n)
    tokens = [own.get(id(view), n) for view, n in zip(views, counts(BEHAVE)(views), strict=True)]
    times = [ones if w is None else w for w in _of_sequences(views)]
    return (torch.stack(tokens) * torch.stack(times)).unbind()


def weight_ends(views: Views) -> list[Ends]:
    """The smallest and largest of the weights of behave tokens."""
    own, weights = _own(views, spans(BEHAVE, WEIGHT)), _of_sequences(views)
    ends = [own[id(view)] if w is None else (w, w) for view, w in zip(views, weights, strict=True)]
    lows, highs = map(torch.stack, zip(*ends, strict=True))
    low, high = among((lows, highs), _counted(BEHAVE, views) > 0)
    return list(zip(low.unbind(), high.unbind(), strict=True))


def _own(views: Views, make: Callable[[Views], list[T]]) -> dict[int, T]:
    """By the id of the view, where tokens have weights of their own."""
    some = [view for view, w in zip(views, _of_sequences(views), strict=True) if w is None]
    return dict(zip(map(id, some), make(some) if some else (), strict=True))


def _of_sequences(views: Views) -> list[Tensor | None]:
    """The weights of sequences, [S]; None where there are none."""
    return [view.pieces.per_sequence for view in views]


def changed(views: Views) -> Sequence[Tensor]:
    """Valid tokens that are dropped, or whose weight is clamped."""
    return (_dropped(views) + torch.stack([_clamped(view) for view in views])).unbind()


def _clamped(view: View) -> Tensor:
    weighed, rule = view.pieces.first.weighed, view.preset.weight
    assert weighed is not None
    if rule is None or rule.action != "truncate":
        return view.zeros
    clamped = weighed.high + weighed.low
    return clamped if weighed.final.per == "token" else clamped * view.n
