"""What AReaL logs of its actor's update (trainer/ppo/actor.py, utils/functional), under `ppo_actor/update/`.

Every statistic comes as `/avg`, `/min` and `/max` over the tokens of its own denominator, of which there are
two: the valid tokens (all, or what M2PO leaves), and the behave tokens, those kept with a weight above 0.
A statistic of no token is not logged.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import correction
from offpol_diag.crosswalk import powers, update
from offpol_diag.crosswalk.areal_masks import BEHAVE, LEFT, VALID, Some, batch_wide
from offpol_diag.crosswalk.ends import Ends, rows
from offpol_diag.crosswalk.ledger import Absent, Column, Entry, Ledger, Page, Range, always
from offpol_diag.crosswalk.view import Measure, View, weighed
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Preset

SCOPE = "ppo_actor/update/"
When = Callable[[Preset], bool]


def _samples(preset: Preset) -> bool:
    """Whether rejection_sampling is set, or the behave_imp_weight_cap that it replaced."""
    return applied(preset).weight is not None


def _filters(preset: Preset) -> bool:
    """Whether it is rejection_sampling for certain: a weight masked without its token is the older cap."""
    rule = applied(preset).weight
    return rule is not None and rule.action != "mask"


def _of_tokens(preset: Preset) -> bool:
    """Under GSPO the ratio is of what is left of each sequence, which is not made here."""
    return preset.loss != "gspo"


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


def _times(view: View) -> Tensor | None:
    """The weights of sequences, [S]."""
    return view.pieces.per_sequence


def _weighted(view: View) -> Tensor:
    """Σ of the weights over behave tokens, [S]."""
    weights = _times(view)
    return BEHAVE.total(WEIGHT, view) if weights is None else weights * BEHAVE.count(view)


def _weight_ends(view: View) -> Ends:
    weights = _times(view)
    return BEHAVE.ends(WEIGHT, view) if weights is None else rows(weights, BEHAVE.count(view) > 0)


def _masked_ratio(view: View) -> Ends:
    """The smallest and largest ratio kept, and 0 for each sequence that lost a token."""
    low, high = LEFT.ends(E_U, view)
    lost = LEFT.count(view) < VALID.count(view)
    return torch.where(lost, low.clamp(max=0.0), low), torch.where(lost, high.clamp(min=0.0), high)


@dataclass(frozen=True)
class Stat:
    """What is logged with its average and extremes.

    Attributes:
        name: as in the tracker, below the scope.
        meaning: what is averaged.
        of: its value at every token.
        over: its denominator.
        per: the column that counts the denominator.
        when: under which presets.
        needs: fields of the batch.
        sums: its sum per sequence, where that is not plainly of its values over its denominator.
        spans: its ends per sequence, likewise.
    """

    name: str
    meaning: str
    of: Measure
    over: Some
    per: str
    when: When = always
    needs: tuple[str, ...] = update.NEEDS
    sums: Callable[[View], Tensor] | None = None
    spans: Callable[[View], Ends] | None = None

    def sum(self) -> Column:
        """Σ over its denominator."""
        of = self.sums or (lambda view: self.over.total(self.of, view))
        return Column(self.name, of, own=True, when=self.when, needs=self.needs, by=self._by)

    def ends(self) -> Range:
        """Its extremes."""
        of = self.spans or (lambda view: self.over.ends(self.of, view))
        return Range(f"{self.name}/range", of, own=True, when=self.when, needs=self.needs, by=self._by)

    def _by(self, view: View) -> Hashable:
        """Which tokens count, and which are valid; the weights if it is of those."""
        weights = weighed(view) if self.of is WEIGHT else None
        return self.over.by and self.over.by(view), batch_wide(view.preset), weights

    def entries(self) -> tuple[Entry, ...]:
        """avg, min, max."""
        name, when = SCOPE + self.name, self.when
        return (
            Entry(f"{name}/avg", f"{self.meaning} The mean.", self._mean, when),
            Entry(f"{name}/min", f"{self.meaning} The smallest.", self._end(Page.low), when),
            Entry(f"{name}/max", f"{self.meaning} The largest.", self._end(Page.high), when),
        )

    def _mean(self, page: Page) -> float:
        return page(self.name) / _count(page, self.per)

    def _end(self, side: Callable[[Page, str], float]) -> Callable[[Page], float]:
        def of(page: Page) -> float:
            _count(page, self.per)
            return side(page, f"{self.name}/range")

        return of


def _count(page: Page, per: str) -> float:
    """How many tokens the denominator has.

    Raises:
        Absent: none.
    """
    found = page(per)
    if found == 0:
        raise Absent(per)
    return found


_BEHAVE = "over tokens that are kept with a weight above 0"
STATS = (
    Stat(
        "importance_weight",
        "π_θ/π_old over the valid tokens (after M2PO), with 0 for each token that rejection sampling drops: "
        "the loss's own ratio, not the mismatch, and lower the more is dropped.",
        E_U,
        LEFT,
        "valid",
        _of_tokens,
        spans=_masked_ratio,
    ),
    Stat(
        "approx_kl",
        "log π_θ − log π_old over the valid tokens, dropped ones included: the opposite sign of ppo_kl "
        "elsewhere.",
        U,
        VALID,
        "valid",
        _of_tokens,
    ),
    Stat(
        "behave_imp_weight",
        f"π_old/π_rollout after masking or clamping, {_BEHAVE}: a mean of survivors, which hides what was "
        "dropped; at level sequence with the ratio it is the geometric mean, by tokens.",
        WEIGHT,
        BEHAVE,
        "behave",
        _samples,
        (),
        _weighted,
        _weight_ends,
    ),
    Stat(
        "behave_approx_kl",
        f"log π_old − log π_rollout, {_BEHAVE}; of the token itself at every level, and unclamped: the "
        "opposite sign of k1.",
        powers.LOG,
        BEHAVE,
        "behave",
        _samples,
        (),
    ),
    Stat(
        "compute_logp/kl_div_direct",
        f"log π_rollout − log π_θ, {_BEHAVE}: k1 of both drifts together, with π_θ where others have π_old.",
        V,
        BEHAVE,
        "behave",
    ),
    Stat(
        "compute_logp/kl_div_taylor",
        f"(log π_θ − log π_rollout)²/2, {_BEHAVE}: k2 of both drifts together.",
        V_SQUARED,
        BEHAVE,
        "behave",
    ),
    Stat(
        "compute_logp/kl_div_dual",
        f"r − 1 − log r with r = π_θ/π_rollout, {_BEHAVE}: k3 of both drifts together, unclamped.",
        V_DUAL,
        BEHAVE,
        "behave",
    ),
)


def _changed(view: View) -> Tensor:
    """Valid tokens that are dropped, or whose weight is clamped, [S]."""
    weighed = view.pieces.first.weighed
    assert weighed is not None
    dropped = VALID.count(view) - LEFT.count(view)
    rule = view.preset.weight
    if rule is None or rule.action != "truncate":
        return dropped
    clamped = weighed.high + weighed.low
    return dropped + (clamped if weighed.final.per == "token" else clamped * view.n)


SUMS = (
    Column("valid", VALID.count, own=True, by=VALID.by),
    Column("behave", BEHAVE.count, own=True, by=BEHAVE.by),
    Column("changed", _changed, own=True, when=_filters, by=lambda view: (_form(view.preset), weighed(view))),
    *(stat.sum() for stat in STATS),
)
EXTREMES = tuple(stat.ends() for stat in STATS)
ENTRIES = (
    *(entry for stat in STATS for entry in stat.entries()),
    Entry(
        f"{SCOPE}rs_filtered_fraction",
        "Share of the valid tokens that rejection sampling drops (action mask) or whose weight it changes "
        "(action clamp). The trainer averages it over micro-batches, each weighing the same; here it is of "
        "the whole dump. Not logged by the cap of v1.0.3 and older.",
        lambda page: page("changed") / max(page("valid"), 1),
        _filters,
    ),
)


def _form(preset: Preset) -> object:
    """Thresholds are told by what they did; M2PO's is not, since tokens count that it drops with others."""
    return preset.weight and preset.weight.action, batch_wide(preset)


BOOK = Ledger("areal", SUMS, EXTREMES, ENTRIES, _form)
