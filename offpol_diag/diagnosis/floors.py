"""Expected floors: K3 of engine and trainer without a known fault, by precision, architecture and trainer."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from offpol_diag import wholefiles
from offpol_diag.errors import UsageError
from offpol_diag.metrics import Band

MOST = 1 << 20
"""Most bytes of a file of floors."""
KEYS = {"precision": str, "experts": bool, "says": list, "low": float, "high": float, "regime": str}
KEYS |= {"source": str}
TOML = "name a TOML file"
PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "int8", "4 bits")


@dataclass(frozen=True)
class Floor:
    """One row: what a dump must say, and the range of K3 that is expected of it.

    Attributes:
        low, high: ends of the range, nats per token.
        regime: what it was measured on, in words.
        source: who published it.
        precision: number format of the engine, one of `PRECISIONS`.
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


def read(text: str, file: str) -> tuple[Floor, ...]:
    """Read rows of TOML; a `UsageError` names what is wrong in the file."""
    hint = "rows are [[floor]] with low, high, regime, source, precision, and experts and says if they matter"
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file}: {error}", hint) from error
    rows = given.get("floor")
    if given.keys() - {"floor"} or not isinstance(rows, list):
        raise UsageError(f"{file}: it holds {', '.join(given) or 'nothing'}, and [[floor]] is needed", hint)
    return tuple(_row(one, f"{file}, floor {place}", hint) for place, one in enumerate(rows, 1))


def _row(given: Any, where: str, hint: str) -> Floor:
    if not isinstance(given, dict):
        raise UsageError(f"{where}: it is no table", hint)
    if unknown := given.keys() - KEYS:
        raise UsageError(f"{where}: there is no key {', '.join(sorted(unknown))}", hint)
    if absent := KEYS.keys() - given.keys() - {"experts", "says"}:
        raise UsageError(f"{where}: it lacks {', '.join(sorted(absent))}", hint)
    given = {k: float(x) if KEYS[k] is float and type(x) is int else x for k, x in given.items()}
    for key, value in given.items():
        if not isinstance(value, KEYS[key]):
            raise UsageError(f"{where}: {key} = {value!r} is no {KEYS[key].__name__}", hint)
    if given["precision"] not in PRECISIONS:
        raise UsageError(f"{where}: precision is {given['precision']!r}", f"it is {', '.join(PRECISIONS)}")
    if not 0 <= given["low"] < given["high"] < float("inf"):
        raise UsageError(f"{where}: {given['low']:g} to {given['high']:g} is no range", "0 <= low < high")
    return Floor(**given | {"says": tuple(str(word).lower() for word in given.get("says", ()))})


FLOORS = read(files("offpol_diag").joinpath("data", "floors.toml").read_text(encoding="utf-8"), "floors.toml")


def observed() -> list[tuple[str, str, str, str, str]]:
    """Return the published rows as those of `metrics.REGIMES`: number, band, range, regime and source."""
    return [("k3", "–", f"{one.low:g} to {one.high:g}", one.regime, one.source) for one in FLOORS]


def own(path: Path | None) -> tuple[Floor, ...]:
    """Read the user's rows; none without a file."""
    if path is None:
        return ()
    try:
        data = wholefiles.read(path, MOST)
    except OSError as error:
        raise UsageError(f"{path}: it cannot be read ({error.strerror or error})", TOML) from error
    return read(data.decode(errors="replace"), str(path))


def expected(provenance: Mapping[str, Any], rows: tuple[Floor, ...] = ()) -> list[Band]:
    """Return the range of the row that fits the metadata and says most, if any; the user's come first."""
    from offpol_diag.diagnosis.honest import recorded

    said = recorded(provenance)
    precision = _precision(said.quantised, said.four_bits, said.plain)
    text = json.dumps(provenance, default=str).lower()
    fit = [
        one
        for one in (*rows, *FLOORS)
        if one.precision == precision
        and one.experts == bool(said.experts)
        and all(word in text for word in one.says)
    ]
    if not fit:
        return []
    best = max(fit, key=lambda one: (len(one.says), one in rows))
    return [Band("k3", "expected", best.low, best.high, best.regime, best.source)]


def _precision(quantised: str, four_bits: bool, plain: str) -> str:
    """Return the number format of an engine that its metadata says, or nothing."""
    text = quantised.lower() if quantised else plain.lower()
    if four_bits:
        return "4 bits"
    words = {
        "fp8": ("fp8", "float8", "e4m3", "e5m2", "f8e"),
        "int8": ("int8", "w8a"),
        "bf16": ("bf16", "bfloat16"),
        "fp16": ("fp16", "float16", "half"),
        "fp32": ("fp32", "float32"),
    }
    return next((name for name, some in words.items() if any(word in text for word in some)), "")
