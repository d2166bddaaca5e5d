"""The numbers of the main policy gap of a dump, which the verdict and the recommendation rest on."""

from __future__ import annotations

from dataclasses import dataclass

from offpol_diag.number import Number
from offpol_diag.presets import Policy
from offpol_diag.result import Result

FEWEST_GROUPS, FEWEST_TOKENS, FEWEST_SEQUENCES, FEWEST_INTERVAL = 20, 1000, 50, 5
"""Fewest prompts, tokens and sequences for a verdict, and fewest prompts for an interval to be used."""
SAMPLES = 16
"""Assumed number of rows per prompt in a dump without group_id."""
HEALTHY_K3 = 1e-3
"""K3, nats per token, up to which rounding explains a mismatch."""


@dataclass(frozen=True)
class MainGap:
    """The numbers of the gap rollout → old, or rollout → current in a dump of two policies."""

    summary: Result

    @property
    def prefix(self) -> str:
        """Prefix of its metrics: '' for rollout → old, 'total.' if the dump has no old log-probs."""
        return "" if self.number("k3", "").value is not None else "total."

    def number(self, name: str, prefix: str | None = None) -> Number:
        """Return a metric, or an empty Number."""
        return self.summary.whole.get((self.prefix if prefix is None else prefix) + name, Number())

    def value(self, name: str) -> float:
        """Return the value of a metric; NaN if unknown, so that every comparison with it is false."""
        value = self.number(name).value
        return float("nan") if value is None else value

    @property
    def policy(self) -> Policy:
        """The train policy of the gap."""
        return "current" if self.prefix else "old"

    @property
    def few(self) -> bool:
        """Whether there is too little data for a verdict; that the mismatch is small needs fewer prompts."""
        dump = self.summary.dump
        if dump.sequences < FEWEST_SEQUENCES or dump.tokens < FEWEST_TOKENS:
            return True
        prompts = dump.groups if "group_id" in dump.columns else dump.sequences // SAMPLES
        return prompts < (FEWEST_INTERVAL if self.small else FEWEST_GROUPS)

    @property
    def small(self) -> bool:
        """Whether the interval of K3 and the share of tokens off by more than 2× are at most 1e-3."""
        ends = self.number("k3").interval
        return ends is not None and ends[1] <= HEALTHY_K3 and self.value("f_2") <= HEALTHY_K3
