"""The dump's own numbers as the verdict and the recommendation read them."""

from __future__ import annotations

from dataclasses import dataclass

from offpol_diag.engine.student import Z
from offpol_diag.presets import Policy
from offpol_diag.summary import Number, Summary

FEWEST_GROUPS, FEWEST_TOKENS = 20, 1000
FEWEST_SEQUENCES, FEWEST_INTERVAL = 50, 5
"""Sequences below which nothing is said, and prompts below which no interval is believed."""
SAMPLES = 16
"""Rows that one prompt may have where no column says which share one; each is its own group by name only."""
HEALTHY_K3 = 1e-3


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

    @property
    def policy(self) -> Policy:
        """The train side of the main drift."""
        return "current" if self.prefix else "old"

    def errors(self, name: str) -> float | None:
        """How many standard errors a number lies above 0; None without an interval."""
        number = self.number(name)
        if number.value is None or number.interval is None or number.interval[0] == number.interval[1]:
            return None
        return number.value / ((number.interval[1] - number.interval[0]) / (2 * Z))

    @property
    def systematic(self) -> tuple[float, float] | None:
        """Interval of the share of the variance of r that tokens of one kind have in common."""
        found = self.summary.diagnosis.systematic if self.summary.diagnosis else None
        return found.interval if found else None

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
