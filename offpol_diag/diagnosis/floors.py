"""Expected floors: K3 of engine and trainer without a known fault, by precision, architecture and trainer."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from offpol_diag.diagnosis.recorded import Recorded, recorded
from offpol_diag.metrics import Band

TIMES, MOST_EXCUSED = 10.0, 0.3
"""Times what is published of a number format, and nats of any format, above which it excuses no K3 at lag 0:
a usual token is then off by a factor of two, which no format is published to do."""


@dataclass(frozen=True)
class Floor:
    """One row: what a dump must say, and the range of K3 that is expected of it.

    Attributes:
        low, high: ends of the range, nats per token.
        regime: what it was measured on, in words.
        source: who published it.
        precision: number format of the engine, one of `recorded.PRECISIONS`.
        experts: whether the model is a mixture of experts.
        says: words that the metadata has, in lower case: a trainer, an engine, a size.
    """

    low: float
    high: float
    regime: str
    source: str
    precision: str
    experts: bool = False
    says: tuple[str, ...] = ()


_TEXT = files("offpol_diag").joinpath("data", "floors.toml").read_text(encoding="utf-8")
FLOORS = tuple(Floor(**{**row, "says": tuple(row.get("says", ()))}) for row in tomllib.loads(_TEXT)["floor"])


def observed() -> list[tuple[str, str, str, str, str]]:
    """Return the rows as those of `metrics.REGIMES`: number, band, range, regime and source."""
    return [("k3", "–", f"{one.low:g} to {one.high:g}", one.regime, one.source) for one in FLOORS]


def expected(provenance: Mapping[str, Any]) -> list[Band]:
    """Return the range of the row that fits the metadata and says most, if any."""
    said, text = recorded(provenance), json.dumps(provenance, default=str).lower()
    fit = [one for one in _of_format(said) if all(word in text for word in one.says)]
    if not fit:
        return []
    best = max(fit, key=lambda one: len(one.says))
    return [Band("k3", "expected", best.low, best.high, best.regime, best.source)]


def ceiling(said: Recorded) -> float:
    """Return the K3 at lag 0, nats, above which what the metadata say excuses nothing."""
    return min([MOST_EXCUSED, *(TIMES * one.high for one in _of_format(said) if not one.says)])


def _of_format(said: Recorded) -> list[Floor]:
    """Return the rows of a number format, with experts or without."""
    return [one for one in FLOORS if one.precision == said.precision and one.experts == bool(said.experts)]
