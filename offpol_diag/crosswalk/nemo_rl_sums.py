"""What is summed of a dump for what NeMo-RL logs: see `nemo_rl`.

Everything is of the sequences that the error mask leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk import powers, update
from offpol_diag.crosswalk.ends import among, rows
from offpol_diag.crosswalk.keys import weighed
from offpol_diag.crosswalk.ledger import Column, Range
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.view import View
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Over, Preset, Reject
from offpol_diag.ratios import FLOAT32_MAX, FLOAT32_OVERFLOW

FLOAT32_VANISHES = math.log(1.5) - 149 * math.log(2.0)
"""Half of e^x is 0 in float32 from here on, nats."""
SEQUENCES = ("sum", "mean")
"""What weights of sequences are taken over."""

# ---------------------------------------------------------------- what the mask leaves


def _errors(preset: Preset) -> tuple[Reject, ...]:
    """The error mask, if there is one."""
    return tuple(rule for rule in applied(preset).reject if rule.statistic == "mult_prob_error")


def _left(view: View) -> Tensor:
    """Sequences with a token that the error mask leaves, [S] bool."""
    rules = _errors(view.preset)
    return view.ratios.once(("nemo-rl left", rules), lambda: _passed(view, rules))


def _passed(view: View, rules: tuple[Reject, ...]) -> Tensor:
    left = view.there
    for rule in rules:
        left = left & correction.passes(view.ratios, rule).values
    return left


def _in_left(x: Tensor, view: View) -> Tensor:
    return torch.where(_left(view), x, 0.0)


def _loss(view: View) -> object:
    """What a number of the loss's own ratio depends on."""
    return view.preset.loss, view.preset.clip


def _mask(view: View) -> Hashable:
    """What is left."""
    return _errors(view.preset)


def _by(of: Measure) -> Callable[[View], Hashable]:
    """What is left, and what the numbers of tokens depend on."""
    return _mask if of.by is None else lambda view: (_mask(view), _loss(view))


def _sum(name: str, of: Measure, needs: tuple[str, ...] = ()) -> Column:
    """Σ over the tokens that are left."""
    return Column(name, lambda view: _in_left(view.total(of), view), own=True, needs=needs, by=_by(of))


def _range(name: str, of: Measure) -> Range:
    """Smallest and largest of the tokens that are left."""
    return Range(
        name, lambda view: among(view.ends(of), _left(view)), own=True, needs=update.NEEDS, by=_by(of)
    )


# ---------------------------------------------------------------- numbers of tokens


def _js(view: View) -> Tensor:
    """½ k3 of π_old and ½ k3 of π_rollout, each against the mean of both probabilities: log cosh(Δ/2)."""
    return torch.log1p(2 * torch.sinh(view.ratios.delta / 4).square())


def _ratio(view: View) -> Tensor:
    """The loss's ratio; a REINFORCE loss has none, and log π_θ stands in its place."""
    if view.preset.loss == "reinforce":
        assert view.batch.current is not None
        return view.batch.current
    return update.ratio(view)


def _clipped(view: View) -> Tensor:
    reinforce = view.preset.loss == "reinforce"
    return _ratio(view) if reinforce else update.clipped(_ratio(view), view.preset.clip)


def _shared_clipped(view: View) -> Tensor | None:
    r = update.shared(view)
    return None if r is None else update.clipped(r, view.preset.clip)


def _surprisal(view: View) -> Tensor:
    current = view.batch.current
    assert current is not None
    drift = view.of("current")
    found = -powers.ratio(drift) * current
    if view.close:
        return found
    return torch.where((drift.delta > FLOAT32_OVERFLOW) & (current == 0), torch.nan, found)


def _vanished(view: View) -> Tensor:
    """Tokens whose mixture of both probabilities is 0."""
    larger = torch.maximum(view.ratios.train, view.batch.rollout)
    return (larger < FLOAT32_VANISHES).to(torch.float64)


def _held(view: View) -> Tensor:
    """The ratio, 0 where float32 cannot hold it."""
    return torch.where(view.ratios.delta > FLOAT32_OVERFLOW, 0.0, powers.ratio(view.ratios))


ERROR = Measure("e^|Δ|", lambda view: view.ratios.token("mult_prob_error"))
K3_REVERSE = Measure("k3 reverse", lambda view: view.ratios.token("k3_reverse"))
JS = Measure("js", _js)
VANISHED = Measure("nemo-rl vanished", _vanished)
HELD = Measure("nemo-rl held r", _held)
LOSS_RATIO = Measure("nemo-rl e^u", _ratio, lambda view: view.preset.loss, update.shared)
CLIPPED = Measure("nemo-rl clipped e^u", _clipped, _loss, _shared_clipped)
SURPRISAL = Measure("nemo-rl surprisal", _surprisal)


def _weights(view: View) -> Tensor:
    """Σ of the weights as the loss gets them; of a sequence's weight, once."""
    done = view.pieces
    if done.first.weighed is None:
        return view.total(HELD) * (done.kept_tokens > 0)
    if done.per_sequence is not None:
        return done.per_sequence * (done.kept_tokens > 0)
    return done.sums.first


# ---------------------------------------------------------------- out of bounds


def geometric(preset: Preset) -> tuple[Reject, ...]:
    """The rule of seq-mask-tis."""
    return tuple(r for r in applied(preset).reject if r.statistic == "ratio" and r.over == "mean")


def bounds(preset: Preset) -> bool:
    """Whether truncated_importance_sampling_type is set."""
    weight = applied(preset).weight
    return bool(geometric(preset)) or (weight is not None and weight.action in ("truncate", "mask"))


def _oob(view: View) -> Tensor:
    rules = geometric(view.preset)
    return _in_left(_oob_sequences(view, rules) if rules else _oob_tokens(view), view)


def _oob_sequences(view: View, rules: tuple[Reject, ...]) -> Tensor:
    passed = torch.ones_like(view.batch.lengths, dtype=torch.bool)
    for rule in rules:
        passed = passed & correction.passes(view.ratios, rule).values
    return (~passed).to(torch.float64)


def _oob_tokens(view: View) -> Tensor:
    """A weight that float32 cannot hold is 0 when it is compared, so only a lower bound finds it."""
    weighed, weight = view.pieces.first.weighed, view.preset.weight
    assert weighed is not None
    assert weight is not None
    outside = weighed.high + weighed.low
    if weight.overflow == "zero" and not weight.lower:
        outside = outside - _too_large(view, weight.over)
    return outside if weighed.final.per == "token" else outside * view.n


def _too_large(view: View, over: Over) -> Tensor:
    some = view if over in SEQUENCES else view.first
    log = some.ratios.aggregate("ratio", over)
    return correction.per_sequence(log.values > FLOAT32_OVERFLOW, log, some.batch)


# ---------------------------------------------------------------- errors of sequences


def _error(view: View) -> Tensor:
    """Mean e^|Δ| of each sequence, [S]; 0 for one without a token, infinite where float32 has no room."""
    total = view.total(ERROR)
    return torch.where(total > FLOAT32_MAX, torch.inf, total) / view.divisor


def _dropped_correct(view: View) -> Tensor:
    rewards = view.batch.rewards
    assert rewards is not None
    return (view.there & ~_left(view) & (rewards == 1)).to(torch.float64)


SUMS = (
    Column("tokens", lambda view: _in_left(view.n, view), own=True, by=_mask),
    Column("rows", lambda view: _left(view).to(torch.float64), own=True, by=_mask),
    _sum("error", ERROR),
    _sum("k3", powers.K3),
    _sum("k3_reverse", K3_REVERSE),
    _sum("js", JS),
    _sum("vanished", VANISHED),
    Column("weights", _weights, own=True, by=weighed),
    Column("oob", _oob, own=True, when=bounds),
    _sum("ratio", LOSS_RATIO, update.NEEDS),
    _sum("clipped", CLIPPED, update.NEEDS),
    _sum("surprisal", SURPRISAL, update.NEEDS),
    Column("row_error", _error),
    Column("row_error_left", lambda view: _in_left(_error(view), view), own=True, by=_mask),
    Column("dropped_correct", _dropped_correct, own=True, needs=("rewards",), by=_mask),
)
EXTREMES = (
    _range("ratio_range", LOSS_RATIO),
    _range("clipped_range", CLIPPED),
    Range("row_errors", lambda view: rows(_error(view), view.there)),
    Range("row_errors_left", lambda view: rows(_error(view), _left(view)), own=True, by=_mask),
)
