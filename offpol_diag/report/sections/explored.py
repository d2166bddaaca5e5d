"""Every picture of a result by its id, each with those of the other pairs of policies."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.report.picture import Picture
from offpol_diag.report.sections.charts import DRIFTS, by_drift, cause, pictures
from offpol_diag.report.sections.opening import opening
from offpol_diag.summary import Summary

Drawn = Mapping[str, Mapping[str, Picture]]
"""Id of a chart → name of a pair of policies (`DRIFTS`; "" where there is but one picture) → picture."""


def explored(summary: Summary) -> dict[str, dict[str, Picture]]:
    """Return every chart of the page; one of several pairs of policies begins with the one that is drawn."""
    found = opening(summary)
    shown = [*(found.pictures if found else ())]
    if summary.against is None:
        evidence = cause(summary)
        shown += [*pictures(summary), *([evidence] if evidence else ())]
    made: dict[str, dict[str, Picture]] = {}
    taken: set[str] = set()
    for one in shown:
        if one.id not in taken:
            some = _of_runs(one, shown) or by_drift(summary, one.id)
            made[one.id] = some if len(some) > 1 and one in some.values() else {"": one}
            taken |= {one.id, *(other.id for other in made[one.id].values())}
    return made


def _of_runs(one: Picture, shown: list[Picture]) -> dict[str, Picture]:
    """Return the distributions of two runs by pair of policies."""
    names = {f"runs-{prefix}log_ratio": drift for drift, (prefix, _) in DRIFTS.items()}
    return {names[other.id]: other for other in shown if other.id in names} if one.id in names else {}


def places(charts: Drawn) -> dict[str, tuple[str, str]]:
    """Return where to find a picture by its id: its chart, and the pair of policies."""
    found: dict[str, tuple[str, str]] = {}
    for name, some in charts.items():
        for drift, one in some.items():
            found.setdefault(one.id, (name, drift))
    return found
