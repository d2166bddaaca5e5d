"""The dump's own numbers as the verdict and the recommendation read them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from offpol_diag.student import Z, quantile
from offpol_diag.summary import Number, Summary

SURE = 4.0
"""Standard errors beyond which an identity counts as broken where groups are many: two-sided p = 6e-5. How
often honest clustered dumps get there is measured in `docs/coverage.md`.
"""
VISIBLE = 2e-3
"""Smallest |E[r] − 1| worth calling a bug: kernels that round their own log-probs stay below it."""
FEWEST_GROUPS, FEWEST_TOKENS = 20, 1000
FEWEST_SEQUENCES, FEWEST_INTERVAL = 50, 5
"""Sequences below which nothing is said, and prompts below which no interval is believed."""
SAMPLES = 16
"""Rows that one prompt may have where no column says which share one; each is its own group by name only."""
HEALTHY_K3 = 1e-3
NO_MEAN = 1.0
"""k̂ from which on the weights have no mean at all."""


@dataclass(frozen=True)
class Evidence:
    """The main drift's numbers: drift 1, or the total of a two-policy dump."""

    summary: Summary

    @property
    def prefix(self) -> str:
        """'' for drift 1, 'total.' when the dump has no old log-probs."""
        return "" if self.number("k3", "").value is not None else "total."

    def number(self, name: str, prefix: str | None = None) -> Number:
        """A metric, or an empty one."""
        return self.summary.metrics.get((self.prefix if prefix is None else prefix) + name, Number())

    def value(self, name: str) -> float:
        """Its value; NaN when unknown, so that every comparison with it is false."""
        found = self.number(name).value
        return float("nan") if found is None else found

    def sure(self, looks: int = 1) -> float:
        """Standard errors beyond which an identity counts as broken, with this many groups."""
        return sure(self.summary.dump.groups, looks)

    @property
    def prompts(self) -> int:
        """Distinct groups; where the dump does not name them, as few as there may be."""
        dump = self.summary.dump
        return dump.groups if "group_id" in dump.columns else dump.sequences // SAMPLES

    @property
    def few(self) -> bool:
        """Whether there is too little data to tell.

        That the mismatch is small needs fewer prompts than anything else, and the same with and without
        `group_id`.
        """
        dump = self.summary.dump
        if dump.sequences < FEWEST_SEQUENCES or dump.tokens < FEWEST_TOKENS:
            return True
        return self.prompts < (FEWEST_INTERVAL if self.small else FEWEST_GROUPS)

    @property
    def small(self) -> bool:
        """Whether the interval of k3 lies below what is healthy, and hardly a token is far off."""
        ends = self.number("k3").interval
        return ends is not None and ends[1] <= HEALTHY_K3 and self.value("f_2") <= HEALTHY_K3

    def trusted(self, name: str) -> bool:
        """Whether the tail of the weights lets the number be believed."""
        return self.number(name).note is None


def standard_errors(number: Number, target: float) -> float:
    """How many standard errors a number lies above `target`; 0 when it has no interval.

    The error is that of the interval's end towards the target: an interval may be skewed.
    """
    if number.value is None or number.interval is None:
        return 0.0
    low, high = number.interval
    error = (number.value - low if number.value > target else high - number.value) / Z
    return (number.value - target) / error if error > 0 else 0.0


def sure(groups: int, looks: int = 1) -> float:
    """Standard errors that any of so many looks is beyond as rarely as a normal number is beyond `SURE`.

    Each look has its share of that chance (Bonferroni), and the tails are those of Student's t, by Wallace's
    normal score of t (1959). The errors are those of `standard_errors`: a half width over 1.96, where the
    interval took its t quantile.
    """
    normal, freedom = NormalDist(), max(groups - 1, 2)
    score = normal.inv_cdf(normal.cdf(-SURE) / max(looks, 1)) * (8 * freedom + 3) / (8 * freedom + 1)
    return math.sqrt(freedom * math.expm1(score**2 / freedom)) * Z / quantile(freedom)
