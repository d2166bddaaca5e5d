"""Which hypothesis reproduces a column: each column by itself, of all tokens, by place and by prompt.

Hypotheses are ranked by the mean of log(|Δ| + tau): the means of |Δ| and of K3 are decided by a few tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from offpol_diag.diagnosis.reference import FLOORS, LEAST_GROUPS, beyond, gaps, k3, mean_error
from offpol_diag.rescore.variants import HONEST, Variant
from offpol_diag.result import Fit, Side, State

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

LEAD, LEAD_OF_PART = 3.0, 4.0
"""Standard errors by which a hypothesis must beat every honest one: of all tokens, and of a part of many."""
TIED = 2.0
"""Standard errors below which another hypothesis fits as well."""
REPRODUCED = 1.5
"""Own floors of a variant within which it reproduces a column."""
MOST_VALUES = 64
"""Most values of a label that is searched for places: hosts and steps, not names of rows."""
CLEAR = 0.95
"""Share of a place's tokens that must be at fault, and of the fault that must be in such places."""
MOST_NAMED = 4
"""Places that are named."""


@dataclass(frozen=True)
class Evidence:
    """The log-probs of every hypothesis at the tokens that count, [T] each.

    Attributes:
        scores: hypothesis → log-probs.
        noise: |Δ| between the reference in bf16 and in float32.
        groups: prompt of each token.
        places: labels that can be places: (name, number of its value at each token, values).
        variants: the hypotheses, "as given" first.
    """

    scores: Mapping[str, Floats]
    noise: Floats
    groups: Ints
    places: Sequence[tuple[str, Ints, Sequence[object]]]
    variants: Sequence[Variant]

    @cached_property
    def tau(self) -> float:
        """The median of the noise, below which differences mean nothing."""
        return float(np.median(self.noise)) + 1e-6

    @property
    def reference(self) -> Floats:
        """The log-probs of the model as given."""
        return self.scores[self.variants[0].name]

    @cached_property
    def family(self) -> dict[str, str]:
        """Hypothesis → its family."""
        return {one.name: one.family for one in self.variants}

    def place_of(self, among: Flags) -> str:
        """Return the values of a label that tokens have in common, and no others; empty if there is none."""
        for name, at, values in self.places:
            share = np.bincount(at, among, len(values)) / np.maximum(
                np.bincount(at, minlength=len(values)), 1
            )
            inside = np.flatnonzero(share > CLEAR).tolist()
            if inside and among[~np.isin(at, inside)].mean() < 1 - CLEAR:
                return _place(name, [values[i] for i in inside])
        return ""


def _place(name: str, values: Sequence[object]) -> str:
    return f"{name} = {', '.join(map(str, values[:MOST_NAMED]))}"


class Winner(NamedTuple):
    """The nearest hypothesis, its lead in standard errors, its tokens [T], their place."""

    name: str
    lead: float
    among: Flags
    where: str = ""


@dataclass(frozen=True)
class Comparison:
    """A column beside every hypothesis: `logs` has log(|Δ| + tau) of each, [T]."""

    logs: Mapping[str, Floats]
    evidence: Evidence

    @property
    def honest(self) -> list[str]:
        """The hypotheses that are no fault."""
        return [name for name in self.logs if self.evidence.family[name] in HONEST]

    def lead_of(self, names: Iterable[str], at: Flags, units: Ints) -> tuple[str, float]:
        """Return the best of some hypotheses at some tokens, and its lead over the best honest one.

        The lead is in standard errors, clustered by `units` [T].
        """
        means = {name: float(self.logs[name][at].mean()) for name in names}
        best, fair = (min(some, key=means.__getitem__) for some in (means, self.honest))
        if best == fair:
            return best, 0.0
        lead, error = mean_error((self.logs[fair] - self.logs[best])[at], units[at])
        return best, lead / error if error > 0 else 0.0

    def winner(self) -> Winner:
        """Return what a column is: in the places or prompts where a hypothesis wins, else of all tokens."""
        family, groups = self.evidence.family, self.evidence.groups
        every_token = np.ones(len(groups), np.bool_)
        best, lead = self.lead_of(self.logs, every_token, groups)
        for name, units, values in (*self.evidence.places, ("", groups, ())):  # last the prompts themselves
            every, within = np.unique(units), groups if name else np.arange(len(units))
            won = defaultdict[str, list[int]](list)  # family → the units where one of it wins
            for unit in every:
                at = units == unit
                local_best, local_lead = self.lead_of(self.logs, at, within)
                if local_lead >= LEAD_OF_PART and (not name or len(np.unique(groups[at])) > 2):
                    won[family[local_best]].append(int(unit))
            if not won:
                continue
            kind, units_won = max(won.items(), key=lambda one: len(one[1]))
            if len(units_won) == len(every) or (not name and len(units_won) < LEAST_GROUPS):
                continue
            among = np.isin(units, units_won)
            of_kind = (one for one in family if family[one] == kind)
            of_part, its_lead = self.lead_of([*self.honest, *of_kind], among, groups)
            if its_lead < LEAD:
                continue
            if lead >= LEAD and kind == family[best] and not self.honest_wins(best, ~among):
                break  # the others have it too, less clearly
            named = _place(name, [values[i] for i in units_won]) if name else self.evidence.place_of(among)
            return Winner(of_part, its_lead, among, named)
        return Winner(best, lead, every_token)

    def honest_wins(self, variant: str, rest: Flags) -> bool:
        """Return whether an honest hypothesis beats a variant in the rest of the tokens."""
        if not rest.any():
            return False
        fair = min(self.honest, key=lambda name: float(self.logs[name][rest].mean()))
        lead, error = mean_error((self.logs[variant] - self.logs[fair])[rest], self.evidence.groups[rest])
        return bool(lead > LEAD * error) if np.isfinite(error) else lead > 0

    def tied(self, best: str, among: Flags) -> list[str]:
        """Return the hypotheses that fit as well as the best one, the nearest first."""
        found = []
        for name, values in self.logs.items():
            mean, error = mean_error((values - self.logs[best])[among], self.evidence.groups[among])
            if name != best and mean <= TIED * error:
                found.append((mean, name))
        return [name for _, name in sorted(found)]

    def tally(self) -> dict[str, int]:
        """Return how many prompts each hypothesis fits best."""
        names, groups = list(self.logs), self.evidence.groups
        sums = np.stack([np.bincount(groups, self.logs[name]) for name in names])
        best = sums[:, np.bincount(groups) > 0].argmin(0)
        many = {names[i]: int((best == i).sum()) for i in np.unique(best)}
        return dict(sorted(many.items(), key=lambda one: -one[1]))


def side(name: str, column: Floats, evidence: Evidence, noise_of: Callable[[Variant], Floats]) -> Side:
    """Judge one column by itself.

    Args:
        name: what it is called.
        column: its log-probs, [T].
        evidence: the log-probs of every hypothesis.
        noise_of: what bf16 changes of a hypothesis, [T]; asked of the one that wins.
    """
    distance, noise = gaps(column, evidence.reference), evidence.noise
    logs = {one: np.log(gaps(scores, column) + evidence.tau) for one, scores in evidence.scores.items()}
    comparison = Comparison(logs, evidence)
    best, lead, at, where = comparison.winner()
    wins, variant = lead >= LEAD, next(one for one in evidence.variants if one.name == best)
    state: State = "same"
    floors, share = np.inf, 1.0
    if wins:
        left, own = gaps(evidence.scores[best], column), noise_of(variant)
        floors, share = float(left[at].mean() / max(float(own[at].mean()), 1e-9)), float(at.mean())
        state = "unknown" if beyond(left[at], np.maximum(own, noise)[at], evidence.groups[at]) else "variant"
    elif beyond(distance, noise, evidence.groups):
        state = "unknown"
    elif (far := _far_groups(distance, evidence)).any():
        state, share, where = "unknown", float(far.mean()), evidence.place_of(far)
    found = state == "variant"
    return Side(
        column=name,
        state=state,
        distance=float(distance.mean()),
        variant="" if state == "same" else best,
        meaning="" if state == "same" else variant.meaning,
        fix=variant.fix if found else "",
        lead=lead if wins else None,
        reproduced=found and floors <= REPRODUCED,
        alike=comparison.tied(best, at) if found else [],
        share=share,
        where=where,
        groups=comparison.tally(),
        fits=_fits(column, evidence, at),
    )


def _far_groups(distance: Floats, evidence: Evidence) -> Flags:
    """Return the tokens of prompts that are beyond the floor each by itself, where there are at least two."""
    found, many = np.zeros(len(distance), np.bool_), 0
    for group in np.unique(evidence.groups):
        at = evidence.groups == group
        mean, error = mean_error((distance - FLOORS * evidence.noise)[at], np.arange(int(at.sum())))
        if mean > LEAD_OF_PART * error:
            found |= at
            many += 1
    return found if many >= LEAST_GROUPS else np.zeros(len(distance), np.bool_)


def _fits(column: Floats, evidence: Evidence, at: Flags) -> list[Fit]:
    """Return every hypothesis by its rank."""
    within, found = float(np.quantile(evidence.noise, 0.9)), []
    for one in evidence.variants:
        scores = evidence.scores[one.name]
        left = gaps(scores, column)[at]
        share, score = float((left <= within).mean()), float(np.log(left + evidence.tau).mean())
        numbers = {"share": share, "k3": k3(scores[at], column[at]), "distance": float(left.mean())}
        found.append(Fit(name=one.name, family=one.family, meaning=one.meaning, score=score, **numbers))
    return sorted(found, key=lambda fit: fit.score)


def tokens_needed(evidence: Evidence) -> dict[str, int]:
    """Return how many tokens tell each hypothesis from the model as given: N ≈ 10·(6/ρ)².

    ρ is the change of the hypothesis over the noise, both root mean squares: known before a column is read.
    """
    noise = float(np.sqrt((evidence.noise**2).mean())) + 1e-9
    found = {}
    for one in evidence.variants[1:]:
        change = gaps(evidence.scores[one.name], evidence.reference)
        size = float(np.sqrt((np.minimum(change, 1.0) ** 2).mean())) / noise
        found[one.name] = int(min(10 * (6 / size) ** 2, 2**53)) if size > 0 else 2**53
    return found
