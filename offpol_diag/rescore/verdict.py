"""Which hypothesis a column is: each column by itself, of all tokens, by place and by prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
"""Values of a label that are still places: hosts and steps, not names of rows."""
CLEAR = 0.95
"""Share of a place's tokens that must be at fault, and of the fault that must be in such places."""
MOST_NAMED = 4
"""Places that are named."""


@dataclass(frozen=True)
class Evidence:
    """What every hypothesis says of the tokens that count, [T] each.

    Attributes:
        scores: hypothesis → log-probs.
        noise: |Δ| between the reference in bf16 and in float32.
        groups: prompt of each token.
        labels: column → number of its value at each token, and the values.
        variants: the hypotheses, "as given" first.
    """

    scores: Mapping[str, Floats]
    noise: Floats
    groups: Ints
    labels: Mapping[str, tuple[Ints, Sequence[object]]]
    variants: Sequence[Variant]

    @property
    def tau(self) -> float:
        """The median of the noise, below which differences say nothing."""
        return float(np.median(self.noise)) + 1e-6

    @property
    def reference(self) -> Floats:
        """The log-probs of the model as given."""
        return self.scores[self.variants[0].name]

    @property
    def places(self) -> list[tuple[str, Ints, Sequence[object]]]:
        """Return (name, number of its value at each token, values) of labels that can be places."""
        every = [(name, *one) for name, one in self.labels.items()]
        return [one for one in every if 2 <= len(one[2]) <= MOST_VALUES]


@dataclass(frozen=True)
class Near:
    """log(|Δ| + tau) between every hypothesis and a column, [T] each, and which of them are honest."""

    f: Mapping[str, Floats]
    family: Mapping[str, str]
    groups: Ints

    @property
    def honest(self) -> list[str]:
        """The hypotheses that are no fault."""
        return [name for name in self.f if self.family[name] in HONEST]

    def lead_of(self, names: Iterable[str], at: Flags, units: Ints) -> tuple[str, float]:
        """Return the best of some hypotheses at some tokens, and its lead over the best honest one."""
        means = {name: float(self.f[name][at].mean()) for name in names}
        best, fair = (min(some, key=means.__getitem__) for some in (means, self.honest))
        if best == fair:
            return best, 0.0
        lead, error = mean_error((self.f[fair] - self.f[best])[at], units[at])
        return best, lead / error if error > 0 else 0.0

    def clean(self, variant: str, rest: Flags) -> bool:
        """Return whether an honest hypothesis beats a variant in the rest."""
        if not rest.any():
            return False
        fair = min(self.honest, key=lambda name: float(self.f[name][rest].mean()))
        lead, error = mean_error((self.f[variant] - self.f[fair])[rest], self.groups[rest])
        return bool(lead > LEAD * error) if np.isfinite(error) else lead > 0

    def alike(self, best: str, among: Flags) -> list[str]:
        """Return the hypotheses that are not told from the best one."""
        found = []
        for name, values in self.f.items():
            mean, error = mean_error((values - self.f[best])[among], self.groups[among])
            if name != best and mean <= TIED * error:
                found.append((mean, name))
        return [name for _, name in sorted(found)]

    def tally(self) -> dict[str, int]:
        """Return how many prompts each hypothesis fits best."""
        names, counts = list(self.f), np.bincount(self.groups)
        sums = np.stack([np.bincount(self.groups, self.f[name]) for name in names]) / np.maximum(counts, 1)
        best = sums[:, counts > 0].argmin(0)
        many = {names[i]: int((best == i).sum()) for i in np.unique(best)}
        return dict(sorted(many.items(), key=lambda one: -one[1]))


class Winner(NamedTuple):
    """The nearest hypothesis, its lead in standard errors, whether it wins, its tokens [T], their place."""

    name: str
    lead: float
    wins: bool
    among: Flags
    where: str = ""


def winner(near: Near, seen: Evidence) -> Winner:
    """Return what a column is: in the places or prompts where a hypothesis wins, else of all tokens."""
    honest, family, groups = near.honest, near.family, near.groups
    whole = np.ones(len(groups), np.bool_)
    best, lead = near.lead_of(near.f, whole, groups)
    wins = lead >= LEAD
    for name, units, values in (*seen.places, ("", groups, ())):
        every, within = np.unique(units), groups if name else np.arange(len(units))
        won = defaultdict[str, list[int]](list)
        for unit in every:
            at = units == unit
            here, its_lead = near.lead_of(near.f, at, within)
            if its_lead >= LEAD_OF_PART and (not name or len(np.unique(groups[at])) > 2):
                won[family[here]].append(int(unit))
        if not won:
            continue
        kind, held = max(won.items(), key=lambda one: len(one[1]))
        if len(held) == len(every) or (not name and len(held) < LEAST_GROUPS):
            continue
        among = np.isin(units, held)
        of_part, its_lead = near.lead_of(
            [*honest, *(one for one in family if family[one] == kind)], among, groups
        )
        if its_lead < LEAD:
            continue
        if wins and kind == family[best] and not near.clean(best, ~among):
            break  # the others have it too, less clearly
        where = _place(name, [values[i] for i in held]) if name else _located(among, seen)
        return Winner(of_part, its_lead, True, among, where)
    return Winner(best, lead, wins, whole)


def _place(name: str, values: Sequence[object]) -> str:
    return f"{name} = {', '.join(map(str, values[:MOST_NAMED]))}"


def _located(among: Flags, seen: Evidence) -> str:
    """Return the values of a label that tokens have in common, and no others."""
    for name, at, values in seen.places:
        share = np.bincount(at, among, len(values)) / np.maximum(np.bincount(at, minlength=len(values)), 1)
        inside = np.flatnonzero(share > CLEAR).tolist()
        if inside and among[~np.isin(at, inside)].mean() < 1 - CLEAR:
            return _place(name, [values[i] for i in inside])
    return ""


def side(name: str, column: Floats, seen: Evidence, noise_of: Callable[[Variant], Floats]) -> Side:
    """Judge one column by itself.

    Args:
        name: what it is called.
        column: its log-probs, [T].
        seen: what every hypothesis says.
        noise_of: what bf16 changes of a hypothesis, [T]; asked of the one that wins.
    """
    distance = gaps(column, seen.reference)
    f = {name: np.log(gaps(one, column) + seen.tau) for name, one in seen.scores.items()}
    near = Near(f, {one.name: one.family for one in seen.variants}, seen.groups)
    best, lead, wins, at, where = winner(near, seen)
    about = next(one for one in seen.variants if one.name == best)
    state: State = "same"
    own, share = None, 1.0
    if wins:
        left, noise = gaps(seen.scores[best], column), noise_of(about)
        own = float(left[at].mean() / max(float(noise[at].mean()), 1e-9))
        apart = beyond(left[at], np.maximum(noise, seen.noise)[at], seen.groups[at])
        state, share = "unknown" if apart else "variant", float(at.mean())
    elif beyond(distance, seen.noise, seen.groups):
        state = "unknown"
    elif (held := _far_groups(distance, seen)).any():
        state, share, where = "unknown", float(held.mean()), _located(held, seen)
    told = state == "variant"
    return Side(
        column=name,
        state=state,
        distance=float(distance.mean()),
        k3=k3(seen.reference, column),
        variant="" if state == "same" else best,
        meaning="" if state == "same" else about.meaning,
        fix=about.fix if told else "",
        lead=lead if wins else None,
        reproduced=own is not None and own <= REPRODUCED and told,
        alike=near.alike(best, at) if told else [],
        share=share,
        where=where,
        groups=near.tally(),
        fits=_fits(column, seen, at),
    )


def _far_groups(distance: Floats, seen: Evidence) -> Flags:
    """Return the tokens of prompts that are beyond the floor each by itself, where there are at least two."""
    found = np.zeros(len(distance), np.bool_)
    many = 0
    for group in np.unique(seen.groups):
        at = seen.groups == group
        mean, error = mean_error((distance - FLOORS * seen.noise)[at], np.arange(int(at.sum())))
        if mean > LEAD_OF_PART * error:
            found |= at
            many += 1
    return found if many >= LEAST_GROUPS else np.zeros(len(distance), np.bool_)


def _fits(column: Floats, seen: Evidence, at: Flags) -> list[Fit]:
    """Return every hypothesis by its rank."""
    wide = float(np.quantile(seen.noise, 0.9))
    found = []
    for one in seen.variants:
        values = seen.scores[one.name]
        left = gaps(values, column)[at]
        found.append(
            Fit(
                name=one.name,
                family=one.family,
                meaning=one.meaning,
                share=float((left <= wide).mean()),
                k3=k3(values[at], column[at]),
                distance=float(left.mean()),
                score=float(np.log(left + seen.tau).mean()),
            )
        )
    return sorted(found, key=lambda fit: fit.score)


def tokens_needed(seen: Evidence) -> dict[str, int]:
    """Return how many tokens tell each hypothesis from the model as given: N ≈ 10·(6/ρ)².

    ρ is the change of the hypothesis over the noise, both root mean squares: known before a column is read.
    """
    noise = float(np.sqrt((seen.noise**2).mean())) + 1e-9
    found = {}
    for one in seen.variants[1:]:
        change = gaps(seen.scores[one.name], seen.reference)
        size = float(np.sqrt((np.minimum(change, 1.0) ** 2).mean())) / noise
        found[one.name] = int(min(10 * (6 / size) ** 2, 2**53)) if size > 0 else 2**53
    return found
