"""Where the mismatch is: by step, lag, length, position, probability, advantage sign, any column.

An axis is a row: it gives every sequence, or every token, its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.accumulators import Places, Sums
from offpol_diag.batch import Batch
from offpol_diag.metrics.formula import Formula, Reader, mean
from offpol_diag.metrics.gap import Drift
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.tails import ESS_TOKENS
from offpol_diag.ratios import OVERFLOW
from offpol_diag.summary import Location, Place

MOST_PLACES = 400
"""Rows of a location table; a longer axis is thinned in the report, not in the tally."""

_PROBABILITY_EDGES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class TokenAxis:
    """Places of tokens: `at(batch)` gives each token its bucket [T], or None when the dump cannot say."""

    name: str
    title: str
    labels: tuple[str, ...]
    at: Callable[[Batch], Tensor | None]


@dataclass(frozen=True)
class SequenceAxis:
    """Places of sequences: one of the dump's scalar columns, or a function of the batch; keys are texts."""

    name: str
    title: str
    keys: Callable[[Batch], list[object] | None]


def _octave(x: Tensor, count: int) -> Tensor:
    return torch.log2((x + 1).to(torch.float64)).floor().to(torch.int64).clamp(max=count - 1)


def _octave_labels(count: int) -> tuple[str, ...]:
    labels = [f"{2**i - 1}–{2 ** (i + 1) - 2}" if i else "0" for i in range(count - 1)]
    return (*labels, f"{2 ** (count - 1) - 1}+")


def _probability(batch: Batch) -> Tensor:
    edges = torch.tensor(_PROBABILITY_EDGES, dtype=torch.float64, device=batch.rollout.device).log()
    return torch.bucketize(batch.rollout, edges)


def _sign(batch: Batch) -> Tensor | None:
    return None if batch.advantages is None else torch.sign(batch.advantages).to(torch.int64) + 1


POSITIONS = 18

TOKEN_AXES = (
    TokenAxis(
        "position",
        "position in the response",
        _octave_labels(POSITIONS),
        lambda b: _octave(b.position, POSITIONS),
    ),
    TokenAxis(
        "rollout_probability",
        "probability of the token under π_rollout",
        ("< 0.01", "0.01–0.1", "0.1–0.5", "0.5–0.9", "0.9–0.99", "> 0.99"),
        _probability,
    ),
    TokenAxis("advantage_sign", "sign of the advantage", ("A < 0", "A = 0", "A > 0"), _sign),
)


def column_axis(name: str, title: str = "") -> SequenceAxis:
    """An axis along a scalar column of the dump."""
    return SequenceAxis(name, title or name, lambda batch: batch.scalars.get(name))


def _length_keys(batch: Batch) -> list[object]:
    return list(torch.log2(batch.lengths.clamp(min=1).to(torch.float64)).floor().to(torch.int64).tolist())


LENGTH = SequenceAxis("length", "response length (unmasked tokens)", _length_keys)
SEQUENCE_AXES = (
    column_axis("step", "training step"),
    column_axis("policy_lag", "policy lag (updates)"),
    LENGTH,
)


def token_columns(batch: Batch, drift: Drift) -> dict[str, Tensor] | None:
    """Per-token terms [T] of the location metrics."""
    q, p = batch.policy(drift.denominator), batch.policy(drift.numerator)
    if p is None or q is None:
        return None
    d = p - q
    r1 = torch.expm1(d.clamp(-OVERFLOW, OVERFLOW))
    terms = {"d": d, "k3": r1 - d, "r1": r1, "r2": r1 * (r1 + 2), "abs": d.abs()}
    return terms | {"pd": (torch.exp(q) * r1).abs(), "f_2": (d.abs() > 0.6931471805599453).to(torch.float64)}


_T = "tokens"
ROWS = (
    Formula("k3", "nats", _T, "mean(e^Δ − 1 − Δ)", mean("k3")),
    Formula("k1", "nats", _T, "mean(−Δ)", lambda get: -get("d") / get("tokens")),
    Formula("mean_ratio", "", _T, "mean(r)", mean("r1", plus=1.0)),
    ESS_TOKENS,
    Formula("abs_log_ratio", "nats", _T, "mean |Δ|", mean("abs")),
    Formula("prob_diff_mean", "", _T, "mean |π_train − π_rollout|", mean("pd")),
    Formula("f_2", "fraction", _T, "P(|Δ| > ln 2)", mean("f_2")),
)


def places(scene: Scene, drift: Drift, group_by: Sequence[str]) -> dict[str, Places[Sums]]:
    """Sums by place along every axis that this dump has."""
    terms = token_columns(scene.batch, drift)
    if terms is None:
        return {}
    per_sequence = {name: segments.total(x, scene.batch.cu_seqlens) for name, x in terms.items()}
    found = {
        axis.name: _sequence_places(scene, per_sequence, axis)
        for axis in (*SEQUENCE_AXES, *map(column_axis, group_by))
    }
    found |= {axis.name: _token_places(scene, terms, axis) for axis in TOKEN_AXES}
    return {name: where for name, where in found.items() if where is not None}


def _sequence_places(scene: Scene, columns: dict[str, Tensor], axis: SequenceAxis) -> Places[Sums] | None:
    keys = axis.keys(scene.batch)
    if keys is None:
        return None
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault("∅" if key is None else str(key), []).append(row)
    columns = columns | {name: scene.counts[name] for name in ("tokens", "sequences")}
    found = {}
    for key, members in rows.items():
        at = torch.tensor(members, device=scene.draws.device)
        found[key] = Sums.of({name: x[at] for name, x in columns.items()}, scene.draws[at])
    return Places(found)


def _token_places(scene: Scene, terms: dict[str, Tensor], axis: TokenAxis) -> Places[Sums] | None:
    at = axis.at(scene.batch)
    if at is None:
        return None
    size, many = len(axis.labels), scene.batch.sequences
    flat = segments.spread(torch.arange(many, device=at.device), scene.batch.cu_seqlens) * size + at
    tables = {
        name: torch.bincount(flat, weights=x, minlength=many * size).view(many, size)
        for name, x in terms.items()
    }
    tables["tokens"] = torch.bincount(flat, minlength=many * size).view(many, size).to(torch.float64)
    tables["sequences"] = (tables["tokens"] > 0).to(torch.float64)
    used = tables["tokens"].sum(dim=0) > 0
    return Places(
        {
            label: Sums.of({name: table[:, i] for name, table in tables.items()}, scene.draws)
            for i, label in enumerate(axis.labels)
            if used[i]
        }
    )


def locations(found: dict[str, Places[Sums]], groups: int, group_by: Sequence[str]) -> dict[str, Location]:
    """Read every axis out, in the order of its places."""
    tokens = {axis.name: (axis.title, _label_order(axis.labels)) for axis in TOKEN_AXES}
    sequences = {
        axis.name: (axis.title, _key_order) for axis in (*SEQUENCE_AXES, *map(column_axis, group_by))
    }
    return {
        name: _location(name, title, where, order, groups)
        for name, (title, order) in (sequences | tokens).items()
        if (where := found.get(name)) is not None
    }


def _label_order(labels: tuple[str, ...]) -> Callable[[str], tuple[float, str]]:
    return lambda key: (float(labels.index(key)), key)


def _key_order(key: str) -> tuple[float, str]:
    try:
        return float(key), key
    except ValueError:
        return float("inf"), key


def _location(
    name: str, title: str, where: Places[Sums], order: Callable[[str], tuple[float, str]], groups: int
) -> Location:
    keys = sorted(where.sums, key=order)
    numeric = all(order(key)[0] != float("inf") for key in keys)
    kept = _thin(keys)
    listed = [
        _place(key, _label(name, key), order(key)[0], i, where.sums[key], groups)
        for i, key in enumerate(kept)
    ]
    return Location(axis=name, title=title, numeric=numeric, places=listed, left_out=len(keys) - len(kept))


def _thin(keys: list[str]) -> list[str]:
    """At most MOST_PLACES keys, evenly spaced, the first and the last among them."""
    if len(keys) <= MOST_PLACES:
        return keys
    stride = (len(keys) - 1) / (MOST_PLACES - 1)
    return [keys[round(i * stride)] for i in range(MOST_PLACES)]


def _label(axis: str, key: str) -> str:
    return f"{2 ** int(key)}–{2 ** (int(key) + 1) - 1}" if axis == LENGTH.name else key


def _place(key: str, label: str, order: float, at: int, sums: Sums, groups: int) -> Place:
    reader = Reader(sums.read(), groups)
    return Place(
        key=label,
        order=order if order != float("inf") else float(at),
        tokens=round(float(reader.sums["tokens"][0])),
        sequences=round(float(reader.sums["sequences"][0])),
        metrics={row.name: reader.number(row) for row in ROWS},
    )
