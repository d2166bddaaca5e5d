"""What ROLL logs (utils/train_infer_corrections.py): r = π_old/π_rollout and π_old − π_rollout, unclamped.

Four granularities: token; geometric (a mean over the sequence); sequence (a product, or a sum); segment (a
mean over a turn). Its masked mean divides by (Σmask + 1e-8), which is reproduced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.keys import acted, kept
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.read import EPS
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Preset, Reject, Statistic

GRANULARITIES = {"token": "token", "geometric": "mean", "sequence": "sum", "segment": "segment"}
"""ROLL's word → ours."""
MEASURES = {"ratio": "ratio", "diff": "prob_diff"}

# ---------------------------------------------------------------- what is summed


def _row_mean(total: Tensor, view: View) -> Tensor:
    """ROLL's masked mean of a row from its sum, [S]."""
    return total / (view.n + EPS)


DIFFERENCE = Measure("prob diff", lambda view: view.ratios.token("prob_diff"))


def _of_turns(of: Statistic, view: View, after: Callable[[Tensor], Tensor]) -> Tensor:
    """Row means of what each turn's mean becomes, [S]."""
    batch = view.batch
    many = segments.lengths(batch.cu_runs).to(torch.float64)
    means = after(view.ratios.turns(of) * (many / (many + EPS)))
    return _row_mean(segments.total(means * many, batch.turns), view)


def _of_row(value: Tensor, view: View) -> Tensor:
    """Row means of a number that every token of the row has; 0 for a row without a token."""
    return torch.where(view.there, _row_mean(value * view.n, view), 0.0)


def _plain(x: Tensor) -> Tensor:
    return x


MEANS: dict[str, Callable[[View], Tensor]] = {
    "ratio token": lambda v: _row_mean(v.total(powers.RATIO), v),
    "ratio geometric": lambda v: _of_row(torch.exp(_row_mean(v.total(powers.LOG), v)), v),
    "ratio sequence": lambda v: _of_row(torch.exp(v.total(powers.LOG)), v),
    "ratio segment": lambda v: _of_turns("ratio", v, torch.exp),
    "diff token": lambda v: _row_mean(v.total(DIFFERENCE), v),
    "diff geometric": lambda v: _of_row(_row_mean(v.total(DIFFERENCE), v), v),
    "diff sequence": lambda v: _of_row(v.total(DIFFERENCE), v),
    "diff segment": lambda v: _of_turns("prob_diff", v, _plain),
}
"""Per sequence [S]; shared by presets."""


def _rules(preset: Preset, measure: str, granularity: str) -> list[Reject]:
    return [
        rule
        for rule in preset.reject
        if rule.statistic == MEASURES[measure] and rule.over == GRANULARITIES[granularity]
    ]


def _filters(measure: str, granularity: str) -> Callable[[Preset], bool]:
    return lambda preset: bool(_rules(preset, measure, granularity))


def _passed(measure: str, granularity: str) -> Callable[[View], Tensor]:
    """Tokens that one filter lets through, [S]; the last one's where there are several of a kind."""

    def of(view: View) -> Tensor:
        rule, some = _rules(view.preset, measure, granularity)[-1], view.far
        if rule.over == "segment" and rule.advantage == "any":
            return view.n - _failed_turns(view, rule)
        passes = correction.passes(some.of(rule.policy), rule)
        if passes.per == "sequence":
            return view.n * passes.values
        return view.n - segments.count(~passes.values, some.batch.cu_seqlens)

    return of


def _failed_turns(view: View, rule: Reject) -> Tensor:
    """Tokens of the turns that a rule drops, [S]: no token need be looked at."""
    above, below = correction.beyond(view.of(rule.policy or view.preset.policy), rule)
    return correction.per_sequence(above.values | below.values, above, view.batch)


def _capped(preset: Preset) -> bool:
    """is_weight with an upper bound, where weights are applied."""
    return preset.apply and preset.weight is not None and preset.weight.upper is not None


def _above(view: View) -> Tensor:
    """Tokens whose weight is above the bound, [S]."""
    weighed = view.pieces.first.weighed
    assert weighed is not None
    return weighed.high * view.n if weighed.final.per == "sequence" else weighed.high


SUMS = (
    *(Column(name, of) for name, of in MEANS.items()),
    Column("above", _above, own=True, when=_capped, by=acted),
    Column(
        "left", lambda v: v.pieces.kept_tokens, own=True, when=lambda preset: bool(preset.reject), by=kept
    ),
    *(
        Column(f"{measure} {name} passed", _passed(measure, name), own=True, when=_filters(measure, name))
        for measure in MEASURES
        for name in GRANULARITIES
    ),
)

# ---------------------------------------------------------------- what is logged

PADDING = (
    "Since v0.2.0 ROLL's token-mean also adds up prompts, tool tokens and padding (functionals.py:253-256 of "
    "8eb27cc2), which a dump does not have, and divides by loss tokens; where there are none it is this"
)
WHAT = {
    "ratio token": "r = π_old/π_rollout of each token",
    "ratio geometric": "the geometric mean of r = π_old/π_rollout over the sequence",
    "ratio sequence": "the product of r = π_old/π_rollout over the sequence",
    "ratio segment": "the geometric mean of r = π_old/π_rollout over the turn (a contiguous run of the mask)",
    "diff token": "π_old − π_rollout, signed, of each token",
    "diff geometric": "the arithmetic mean of π_old − π_rollout over the sequence, whatever its name says",
    "diff sequence": "the sum of π_old − π_rollout over the sequence, so it grows with length",
    "diff segment": "the mean of π_old − π_rollout over the turn",
}


def _over_samples(column: str) -> Callable[[Page], float]:
    return lambda page: page(column) / (page.sequences + EPS)


def _over_tokens(column: str) -> Callable[[Page], float]:
    return lambda page: page(column) / max(page.tokens, 1.0)


def _mean(measure: str, name: str) -> Entry:
    return Entry(
        f"actor/train_infer_{measure}_{name}_mean@sum",
        f"{WHAT[f'{measure} {name}']}: mean over the tokens of a sequence, then over sequences with a token, "
        "before any filter or bound. Older versions log only the granularities they filter by",
        _over_samples(f"{measure} {name}"),
    )


def _pass_rate(measure: str, name: str) -> Entry:
    return Entry(
        f"actor/train_infer_{name}_{measure}_mask_mean@sum",
        f"the share of tokens that this filter lets through, alone, by {WHAT[f'{measure} {name}']}. "
        f"{PADDING}",
        _over_tokens(f"{measure} {name} passed"),
        _filters(measure, name),
    )


ENTRIES = (
    *(_mean(measure, name) for measure in MEASURES for name in GRANULARITIES),
    Entry(
        "actor/is_weight_clipfrac@sum",
        f"the share of tokens whose weight is above its upper bound, filtered ones included. {PADDING}",
        _over_tokens("above"),
        _capped,
    ),
    *(_pass_rate(measure, name) for measure in MEASURES for name in GRANULARITIES),
    Entry(
        "actor/train_infer_final_mask_mean",
        "the share of tokens that all filters let through; over loss tokens, without padding",
        lambda page: page("left") / (page.tokens + EPS),
        lambda preset: bool(preset.reject),
    ),
)

BOOK = Ledger("roll", SUMS, (), ENTRIES)
