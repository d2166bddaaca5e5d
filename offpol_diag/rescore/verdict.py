"""Which hypothesis a column is: each column by itself, of all tokens, by place and by prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offpol_diag.diagnosis.reference import LEAST_GROUPS, beyond, gaps, k3, mean_error
from offpol_diag.rescore.variants import Variant, numerics
from offpol_diag.result.reference import Fit, Side, State

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
CLEAR = 0.95


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

    def distances(self, column: Floats) -> dict[str, Floats]:
        """Return log(|Δ| + tau) between every hypothesis and a column."""
        return {name: np.log(gaps(one, column) + self.tau) for name, one in self.scores.items()}


@dataclass(frozen=True)
class Judged:
    """What a column is, before the floor of its variant is known.

    Attributes:
        column: the column, [T].
        best: the nearest hypothesis.
        lead: its lead over the honest ones in standard errors.
        among: the tokens that it holds for, [T].
        where: their place.
        alike: hypotheses that fit as well.
        tally: hypothesis → prompts that it fits best.
        named: whether some hypothesis wins.
    """

    column: Floats
    best: str
    lead: float
    among: Flags
    named: bool
    where: str = ""
    alike: list[str] = field(default_factory=list)
    tally: dict[str, int] = field(default_factory=dict)


def lead_of(
    f: Mapping[str, Floats], names: Sequence[str], honest: Sequence[str], at: Flags, groups: Ints
) -> tuple[str, float]:
    """Return the best hypothesis of some tokens, and its lead over the best honest one in standard errors."""
    means = {name: float(f[name][at].mean()) for name in names}
    best = min(means, key=means.__getitem__)
    fair = min(honest, key=means.__getitem__)
    if best in honest:
        return best, 0.0
    lead, error = mean_error(f[fair][at] - f[best][at], groups[at])
    return best, lead / error if error > 0 else 0.0


def judge(column: Floats, seen: Evidence) -> Judged:
    """Judge one column by itself."""
    f, honest = seen.distances(column), numerics(seen.variants)
    names, whole = list(f), np.ones(len(column), np.bool_)
    family = {one.name: one.family for one in seen.variants}
    best, lead = lead_of(f, names, honest, whole, seen.groups)
    wins = best not in honest and lead >= LEAD
    tally = _tally(f, seen.groups)
    for units, name, values in _units(seen):
        found = _part(f, family, honest, units, seen.groups, by_group=not name)
        if found is None:
            continue
        of_part, its_lead, held = found
        among = np.isin(units, held)
        if name and among.all():
            break
        rest = ~among
        if wins and family[of_part] == family[best] and not _clean(f, best, honest, rest, seen.groups):
            break  # the others have it too, less clearly
        where = f"{name} = {', '.join(str(values[i]) for i in held[:4])}" if name else _located(among, seen)
        return Judged(column, of_part, its_lead, among, True, where, _alike(f, of_part, among, seen), tally)
    return Judged(column, best, lead, whole, wins, "", _alike(f, best, whole, seen) if wins else [], tally)


def _units(seen: Evidence) -> Iterator[tuple[Ints, str, Sequence[object]]]:
    """Yield how tokens are divided: by each label of few values, then by prompt."""
    for name, (at, values) in seen.labels.items():
        if 2 <= len(values) <= MOST_VALUES:
            yield at, name, values
    yield seen.groups, "", ()


def _part(
    f: Mapping[str, Floats],
    family: Mapping[str, str],
    honest: Sequence[str],
    units: Ints,
    groups: Ints,
    by_group: bool,
) -> tuple[str, float, list[int]] | None:
    """Return a hypothesis that wins in some units and not in others, its lead there, and those units."""
    found: dict[str, list[tuple[int, str]]] = {}
    every = np.unique(units)
    within = np.arange(len(units)) if by_group else groups
    for unit in every:
        at = units == unit
        best, lead = lead_of(f, list(f), honest, at, within)
        if best not in honest and lead >= LEAD_OF_PART and (by_group or len(np.unique(groups[at])) > 2):
            found.setdefault(family[best], []).append((int(unit), best))
    if not found:
        return None
    _, held = max(found.items(), key=lambda one: len(one[1]))
    chosen = [unit for unit, _ in held]
    if len(chosen) == len(every) or (by_group and len(chosen) < LEAST_GROUPS):
        return None
    at = np.isin(units, chosen)
    names = [name for name in f if family[name] == family[held[0][1]] or name in honest]
    best, lead = lead_of(f, names, honest, at, groups)
    return (best, lead, chosen) if lead >= LEAD else None


def _clean(f: Mapping[str, Floats], variant: str, honest: Sequence[str], rest: Flags, groups: Ints) -> bool:
    """Return whether an honest hypothesis beats a variant in the rest."""
    if not rest.any():
        return False
    fair = min(honest, key=lambda name: float(f[name][rest].mean()))
    lead, error = mean_error(f[variant][rest] - f[fair][rest], groups[rest])
    return bool(lead > LEAD * error) if np.isfinite(error) else lead > 0


def _alike(f: Mapping[str, Floats], best: str, among: Flags, seen: Evidence) -> list[str]:
    """Return the hypotheses that are not told from the best one."""
    found = []
    for name, values in f.items():
        mean, error = mean_error((values - f[best])[among], seen.groups[among])
        if name != best and mean <= TIED * error:
            found.append((mean, name))
    return [name for _, name in sorted(found)]


def _tally(f: Mapping[str, Floats], groups: Ints) -> dict[str, int]:
    """Return how many prompts each hypothesis fits best."""
    names, counts = list(f), np.bincount(groups)
    sums = np.stack([np.bincount(groups, f[name]) for name in names]) / np.maximum(counts, 1)
    best = sums[:, counts > 0].argmin(0)
    many = {names[i]: int((best == i).sum()) for i in np.unique(best)}
    return dict(sorted(many.items(), key=lambda one: -one[1]))


def _located(among: Flags, seen: Evidence) -> str:
    """Return the values of a label that tokens have in common, and no others."""
    for name, (at, values) in seen.labels.items():
        if not 2 <= len(values) <= MOST_VALUES:
            continue
        share = np.bincount(at, among, len(values)) / np.maximum(np.bincount(at, minlength=len(values)), 1)
        inside = np.flatnonzero(share > CLEAR)
        if len(inside) and among[~np.isin(at, inside)].mean() < 1 - CLEAR:
            return f"{name} = {', '.join(str(values[i]) for i in inside[:4])}"
    return ""


# ---------------------------------------------------------------- with the floor of its variant


def side(name: str, judged: Judged, seen: Evidence, own_noise: Floats | None) -> Side:
    """Return what is said of a column; `own_noise` is what bf16 changes of the winning variant, [T]."""
    column, reference, at = judged.column, seen.reference, judged.among
    by_name = {one.name: one for one in seen.variants}
    distance, share, where = gaps(column, reference), 1.0, judged.where
    own, state, variant = None, "same", ""
    if judged.named:
        left = gaps(seen.scores[judged.best], column)
        noise = seen.noise if own_noise is None else own_noise
        own = float(left[at].mean() / max(float(noise[at].mean()), 1e-9))
        apart = beyond(left[at], np.maximum(noise, seen.noise)[at], seen.groups[at])
        state, variant, share = ("unknown" if apart else "variant"), judged.best, float(at.mean())
    elif beyond(distance, seen.noise, seen.groups):
        state, variant = "unknown", judged.best
    else:
        held = _far_groups(distance, seen)
        if held.any():
            state, variant, share, where = "unknown", judged.best, float(held.mean()), _located(held, seen)
    found: State = state  # type: ignore[assignment]
    about = by_name[variant] if variant else None
    named = about if state == "variant" else None
    return Side(
        column=name,
        state=found,
        distance=float(distance.mean()),
        k3=k3(reference, column),
        variant=variant,
        meaning=about.meaning if about else "",
        fix=named.fix if named else "",
        lead=judged.lead if judged.named else None,
        own_floors=own,
        reproduced=own is not None and own <= REPRODUCED and state == "variant",
        alike=judged.alike if state == "variant" else [],
        share=share,
        where=where,
        groups=judged.tally,
        fits=_fits(column, seen, at),
    )


def _far_groups(distance: Floats, seen: Evidence) -> Flags:
    """Return the tokens of prompts that are beyond the floor each by itself, where there are at least two."""
    found = np.zeros(len(distance), np.bool_)
    many = 0
    for group in np.unique(seen.groups):
        at = seen.groups == group
        mean, error = mean_error((distance - 3 * seen.noise)[at], np.arange(int(at.sum())))
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
