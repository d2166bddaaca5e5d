"""What AReaL logs of its actor's update (trainer/ppo/actor.py, utils/functional), under `ppo_actor/update/`.

Every statistic comes as `/avg`, `/min` and `/max` over the tokens of its own denominator, of which there are
two: the valid tokens (all, or what M2PO leaves), and the behave tokens, those kept with a weight above 0.
A statistic of no token is not logged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers, update
from offpol_diag.crosswalk.areal_masks import Some, behave, kept, valid
from offpol_diag.crosswalk.ledger import Absent, Column, Entry, Ledger, Page, View, always
from offpol_diag.metrics.outcome import applied
from offpol_diag.presets import Preset
from offpol_diag.ratios import Level

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


def _spread(level: Level, view: View) -> Tensor:
    return level.values if level.per == "token" else segments.spread(level.values, view.batch.cu_seqlens)


def _weight(view: View) -> Tensor:
    weighed = view.done.weighed
    assert weighed is not None
    return view.ratios.once(_weight_key(view), lambda: _spread(weighed.final, view))


def _weight_key(view: View) -> object:
    return "areal weight", correction.weight_key(view.preset)


def _update_key(view: View) -> object:
    return view.preset.loss == "gspo"


def _gap(view: View) -> object:
    return None


def _total_gap(view: View) -> Tensor:
    """v = log π_θ − log π_rollout."""
    return view.scene.ratios("current").delta


def _dual(view: View) -> Tensor:
    return powers.k3(view.scene.ratios("current"))


def _masked_ratio(view: View) -> Tensor:
    """For the extremes: the smallest and largest ratio kept, and 0 for each sequence that lost a token."""
    left = kept(view)
    ends = left.ends(update.ratio(view), view, ("ratio", _update_key(view)))
    lost = left.count(view) < valid(view).count(view)
    return torch.cat((ends, torch.zeros_like(lost[lost], dtype=torch.float64)))


@dataclass(frozen=True)
class Stat:
    """What is logged with its average and extremes.

    Attributes:
        name: as in the tracker, below the scope.
        meaning: what is averaged.
        of: its value at every token, [T].
        over: its denominator.
        per: the column that counts the denominator.
        key: with `name`, what its values depend on besides the numerator.
        when: under which presets.
        needs: fields of the batch.
    """

    name: str
    meaning: str
    of: Callable[[View], Tensor]
    over: Callable[[View], Some]
    per: str
    key: Callable[[View], object] = _gap
    when: When = always
    needs: tuple[str, ...] = update.NEEDS

    def sum(self) -> Column:
        """Σ over its denominator."""
        return self._column(self.name, lambda v: self.over(v).total(self.of(v), v, (self.name, self.key(v))))

    def ends(self) -> Column:
        """Its extremes."""
        name = f"{self.name}/range"
        return self._column(name, lambda v: self.over(v).ends(self.of(v), v, (self.name, self.key(v))))

    def _column(self, name: str, of: Callable[[View], Tensor]) -> Column:
        return Column(name, of, own=True, when=self.when, needs=self.needs)

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
        update.ratio,
        kept,
        "valid",
        _update_key,
        _of_tokens,
    ),
    Stat(
        "approx_kl",
        "log π_θ − log π_old over the valid tokens, dropped ones included: the opposite sign of ppo_kl "
        "elsewhere.",
        update.log_ratio,
        valid,
        "valid",
        _update_key,
        _of_tokens,
    ),
    Stat(
        "behave_imp_weight",
        f"π_old/π_rollout after masking or clamping, {_BEHAVE}: a mean of survivors, which hides what was "
        "dropped; at level sequence with the ratio it is the geometric mean, by tokens.",
        _weight,
        behave,
        "behave",
        _weight_key,
        _samples,
        (),
    ),
    Stat(
        "behave_approx_kl",
        f"log π_old − log π_rollout, {_BEHAVE}; of the token itself at every level, and unclamped: the "
        "opposite sign of k1.",
        lambda view: view.ratios.delta,
        behave,
        "behave",
        _gap,
        _samples,
        (),
    ),
    Stat(
        "compute_logp/kl_div_direct",
        f"log π_rollout − log π_θ, {_BEHAVE}: k1 of both drifts together, with π_θ where others have π_old.",
        lambda view: -_total_gap(view),
        behave,
        "behave",
    ),
    Stat(
        "compute_logp/kl_div_taylor",
        f"(log π_θ − log π_rollout)²/2, {_BEHAVE}: k2 of both drifts together.",
        lambda view: _total_gap(view).square() / 2,
        behave,
        "behave",
    ),
    Stat(
        "compute_logp/kl_div_dual",
        f"r − 1 − log r with r = π_θ/π_rollout, {_BEHAVE}: k3 of both drifts together, unclamped.",
        _dual,
        behave,
        "behave",
    ),
)


def _changed(view: View) -> Tensor:
    """Valid tokens that are dropped, or whose weight is clamped, [S]."""
    weighed = view.done.weighed
    assert weighed is not None
    dropped = valid(view).count(view) - kept(view).count(view)
    rule = view.preset.weight
    if rule is None or rule.action != "truncate":
        return dropped
    clamped = weighed.high + weighed.low
    per_token = weighed.final.per == "token"
    return dropped + (clamped if per_token else clamped * view.batch.lengths.to(torch.float64))


SUMS = (
    Column("valid", lambda view: valid(view).count(view), own=True),
    Column("behave", lambda view: behave(view).count(view), own=True),
    Column("changed", _changed, own=True, when=_filters),
    *(stat.sum() for stat in STATS),
)
_MASKED = STATS[0]
EXTREMES = (
    Column("importance_weight/range", _masked_ratio, own=True, when=_of_tokens, needs=update.NEEDS),
    *(stat.ends() for stat in STATS[1:]),
)
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

BOOK = Ledger("areal", SUMS, EXTREMES, ENTRIES)
