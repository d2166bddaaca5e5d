"""What AReaL logs of its actor's update (trainer/ppo/actor.py, utils/functional), under `ppo_actor/update/`.

Every statistic comes as `/avg`, `/min` and `/max` over the tokens of its own denominator, of which there are
two: the valid tokens (all, or what M2PO leaves), and the behave tokens, those kept with a weight above 0.
A statistic of no token is not logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from offpol_diag.crosswalk import powers, update
from offpol_diag.crosswalk.areal_masks import BEHAVE, LEFT, VALID, Some, batch_wide
from offpol_diag.crosswalk.areal_sums import (
    E_U,
    V_DUAL,
    V_SQUARED,
    WEIGHT,
    U,
    V,
    changed,
    counts,
    masked_ratio,
    spans,
    sums,
    weight_ends,
    weighted,
)
from offpol_diag.crosswalk.ends import Ends
from offpol_diag.crosswalk.ledger import Absent, Column, Entry, Ledger, Page, Range, always, together
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.views import Views
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
    sums: Callable[[Views], Sequence[Tensor]] | None = None
    spans: Callable[[Views], Sequence[Ends]] | None = None

    def sum(self) -> Column:
        """Σ over its denominator."""
        return together(self.name, self.sums or sums(self.over, self.of), when=self.when, needs=self.needs)

    def ends(self) -> Range:
        """Its extremes."""
        of = self.spans or spans(self.over, self.of)
        name = f"{self.name}/range"
        return Range(
            name, lambda view: of((view,))[0], own=True, when=self.when, needs=self.needs, of_many=of
        )

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
        spans=masked_ratio,
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
        weighted,
        weight_ends,
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


CHANGED = together("changed", changed, when=_filters)
SUMS = (
    together("valid", counts(VALID)),
    together("behave", counts(BEHAVE)),
    *(stat.sum() for stat in STATS),
)
EXTREMES = tuple(stat.ends() for stat in STATS)
OF_STATS = tuple(entry for stat in STATS for entry in stat.entries())
ENTRIES = (
    *OF_STATS,
    Entry(
        f"{SCOPE}rs_filtered_fraction",
        "Share of the valid tokens that rejection sampling drops (action mask) or whose weight it changes "
        "(action clamp). The trainer averages it over micro-batches, each weighing the same; here it is of "
        "the whole dump. The cap of v1.0.3 and older does not log it (`areal-v1.0.3`).",
        lambda page: page("changed") / max(page("valid"), 1),
        _filters,
    ),
)


def _form(preset: Preset) -> object:
    """Thresholds are told by what they did; M2PO's is not, since tokens count that it drops with others."""
    return preset.weight and preset.weight.action, batch_wide(preset)


BOOKS = (
    Ledger("areal", (*SUMS, CHANGED), EXTREMES, ENTRIES, _form),
    Ledger("areal-v1.0.3", SUMS, EXTREMES, OF_STATS, _form),
)
"""The second is that of `behave_imp_weight_cap`, up to v1.0.3: actor.py:536-542 there, without the share."""
