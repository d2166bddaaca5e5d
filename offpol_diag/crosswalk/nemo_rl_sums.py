"""What is summed of a dump for what NeMo-RL logs: see `nemo_rl`.

Everything is of the sequences that the error mask leaves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers, update
from offpol_diag.crosswalk.ledger import Column, View
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Preset, Reject
from offpol_diag.ratios import FLOAT32_OVERFLOW

# ---------------------------------------------------------------- what the mask leaves


def _errors(preset: Preset) -> tuple[Reject, ...]:
    """The error mask, if there is one."""
    return tuple(rule for rule in applied(preset).reject if rule.statistic == "mult_prob_error")


def _left(view: View) -> Tensor:
    """Sequences with a token that the error mask leaves, [S] bool."""
    rules = _errors(view.preset)
    return view.ratios.once(("nemo-rl left", rules), lambda: _passed(view, rules))


def _passed(view: View, rules: tuple[Reject, ...]) -> Tensor:
    left = view.batch.lengths > 0
    for rule in rules:
        left = left & correction.passes(view.ratios, rule).values
    return left


def _lengths(view: View) -> Tensor:
    return view.batch.lengths.to(torch.float64)


def _in_left(x: Tensor, view: View) -> Tensor:
    return torch.where(_left(view), x, 0.0)


Tokens = Callable[[View], Tensor]
Shared = Callable[[Preset], object]


def _gap(preset: Preset) -> object:
    """What a number of drift 1 depends on besides the numerator: nothing."""
    return None


def _loss(preset: Preset) -> object:
    """What a number of the loss's own ratio depends on."""
    return preset.loss, preset.clip


def _sum(name: str, of: Tokens, shared: Shared = _gap, needs: tuple[str, ...] = ()) -> Column:
    """Σ over the tokens that are left; presets share the sums per sequence."""

    def column(view: View) -> Tensor:
        key = ("nemo-rl", name, shared(view.preset))
        sums = view.ratios.once(key, lambda: segments.total(of(view), view.batch.cu_seqlens))
        return _in_left(sums, view)

    return Column(name, column, own=True, needs=needs)


def _range(name: str, of: Tokens) -> Column:
    """Smallest and largest of the tokens that are left; by sequence, which is slow, if some are not."""

    def column(view: View) -> Tensor:
        x = view.ratios.once(("nemo-rl", name, _loss(view.preset)), lambda: of(view))
        if not _errors(view.preset):
            return x
        left, offsets = _left(view), view.batch.cu_seqlens
        return torch.cat((segments.smallest(x, offsets)[left], segments.largest(x, offsets)[left]))

    return Column(name, column, own=True, needs=update.NEEDS)


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


def _surprisal(view: View) -> Tensor:
    current = view.batch.current
    assert current is not None
    return -powers.ratio(view.scene.ratios("current")) * current


def _weights(view: View) -> Tensor:
    """Σ of the weights as the loss gets them; of a sequence's weight, once."""
    done = view.done
    if done.weighed is None:
        d = view.ratios.delta
        raw = torch.where(d > FLOAT32_OVERFLOW, 0.0, powers.ratio(view.ratios))
        return segments.total(raw, view.batch.cu_seqlens) * (done.kept_tokens > 0)
    if done.weighed.final.per == "sequence":
        return done.weighed.final.values * (done.kept_tokens > 0)
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
    weighed, weight = view.done.weighed, view.preset.weight
    assert weighed is not None
    assert weight is not None
    outside = weighed.high + weighed.low
    if weight.overflow == "zero" and not weight.lower:
        log = view.ratios.aggregate("ratio", weight.over)
        outside = outside - correction.per_sequence(log.values > FLOAT32_OVERFLOW, log, view.batch)
    return outside if weighed.final.per == "token" else outside * _lengths(view)


# ---------------------------------------------------------------- errors of sequences


def _error(view: View) -> Tensor:
    """Mean e^|Δ| of each sequence, [S]; 0 for one without a token."""
    return view.ratios.aggregate("mult_prob_error", "mean").values


def _dropped_correct(view: View) -> Tensor:
    rewards = view.batch.rewards
    assert rewards is not None
    return ((view.batch.lengths > 0) & ~_left(view) & (rewards == 1)).to(torch.float64)


SUMS = (
    Column("tokens", lambda view: _in_left(_lengths(view), view), own=True),
    Column("rows", lambda view: _left(view).to(torch.float64), own=True),
    _sum("error", lambda view: view.ratios.token("mult_prob_error")),
    _sum("k3", lambda view: view.ratios.token("k3")),
    _sum("k3_reverse", lambda view: view.ratios.token("k3_reverse")),
    _sum("js", _js),
    Column("weights", _weights, own=True),
    Column("oob", _oob, own=True, when=bounds),
    _sum("ratio", _ratio, _loss, update.NEEDS),
    _sum("clipped", _clipped, _loss, update.NEEDS),
    _sum("surprisal", _surprisal, _gap, update.NEEDS),
    Column("row_error", _error),
    Column("row_error_left", lambda view: _in_left(_error(view), view), own=True),
    Column("dropped_correct", _dropped_correct, own=True, needs=("rewards",)),
)
EXTREMES = (
    _range("ratio_range", _ratio),
    _range("clipped_range", _clipped),
    Column("row_errors", lambda view: _error(view)[view.batch.lengths > 0]),
    Column("row_errors_left", lambda view: _error(view)[_left(view)], own=True),
)
