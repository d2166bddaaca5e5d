"""Where the mismatch is: by step, lag, length, position, probability, advantage sign, any column.

An axis is a row: it gives every sequence, or every token, its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import segments, tables
from offpol_diag.accumulators import Places, Sums
from offpol_diag.batch import Batch
from offpol_diag.host import here
from offpol_diag.metrics import gap
from offpol_diag.metrics.formula import Formula, Reader, mean
from offpol_diag.metrics.gap import Drift
from offpol_diag.metrics.interval import POSITIVE
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.tails import ESS_TOKENS
from offpol_diag.summary import Location, Place

MOST_PLACES = 400
"""Rows of a location table; a longer axis is thinned in the report, not in the tally."""

POSITIONS = 18
_LOG_EDGES = tuple(math.log(edge) for edge in (0.01, 0.1, 0.5, 0.9, 0.99))


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


def _octave(x: Tensor) -> Tensor:
    """⌊log2 x⌋ of whole numbers from 1, off the exponent of a float64."""
    return (x.to(torch.float64).view(torch.int64) >> 52).sub_(1023)


def _octave_labels(count: int) -> tuple[str, ...]:
    labels = [f"{2**i - 1}–{2 ** (i + 1) - 2}" if i else "0" for i in range(count - 1)]
    return (*labels, f"{2 ** (count - 1) - 1}+")


def _probability(batch: Batch) -> Tensor:
    """How many edges lie below each token's probability: comparing costs less than searching."""
    below = torch.zeros(batch.tokens, dtype=torch.uint8, device=batch.rollout.device)
    for edge in _LOG_EDGES:
        below += segments.above(batch.rollout, edge).view(torch.uint8)
    return below


def _sign(batch: Batch) -> Tensor | None:
    """0 below zero, 1 at it, 2 above."""
    x = batch.advantages
    if x is None:
        return None
    return segments.above(x, 0.0).view(torch.uint8) + (1 - segments.above(-x, 0.0).view(torch.uint8))


def _position(batch: Batch) -> Tensor:
    """The octave of each token's position; looked up where they are small enough for a table to pay."""
    x = batch.position
    top = int(x.max()) if here(x) and len(x) else len(x)
    if top >= len(x):
        return _octave(x + 1).clamp_(max=POSITIONS - 1)
    octaves = _octave(torch.arange(1, top + 2)).clamp_(max=POSITIONS - 1).to(torch.uint8)
    return torch.from_numpy(octaves.numpy().take(x.numpy()))


TOKEN_AXES = (
    TokenAxis(
        "position",
        "position in the response",
        _octave_labels(POSITIONS),
        _position,
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
    return list(_octave(batch.lengths.clamp(min=1)).tolist())


LENGTH = SequenceAxis("length", "response length (unmasked tokens)", _length_keys)
SEQUENCE_AXES = (
    column_axis("step", "training step"),
    column_axis("policy_lag", "policy lag (updates)"),
    LENGTH,
)


_T = "tokens"
ROWS = (
    Formula("k3", "nats", _T, "mean(e^Δ − 1 − Δ)", mean("k3"), POSITIVE),
    Formula("k1", "nats", _T, "mean(−Δ)", lambda get: -get("d") / get("tokens")),
    Formula("mean_ratio", "", _T, "mean(r)", mean("r1", plus=1.0), POSITIVE),
    ESS_TOKENS,
    Formula("abs_log_ratio", "nats", _T, "mean |Δ|", mean("abs"), POSITIVE),
    Formula("prob_diff_mean", "", _T, "mean |π_train − π_rollout|", mean("pd"), POSITIVE),
    Formula("f_2", "fraction", _T, "P(|Δ| > ln 2)", mean("f_2"), counts=True),
)


COLUMNS = ("d", "k3", "r1", "r2", "abs", "pd", "f_2")
"""What is summed of each place, and the counts."""


def places(scene: Scene, drift: Drift, group_by: Sequence[str]) -> dict[str, Places[Sums] | Sums]:
    """Sums by place along every axis that this dump has; of tokens, all places in one."""
    if gap.terms(scene, drift) is None:
        return {}
    columns = {name: gap.columns(scene, drift)[drift.prefix + name] for name in COLUMNS}
    columns |= {name: scene.counts[name] for name in ("tokens", "sequences")}
    axes = (*SEQUENCE_AXES, *map(column_axis, group_by))
    found: dict[str, Places[Sums] | Sums | None] = {
        axis.name: _sequence_places(scene, columns, axis) for axis in axes
    }
    found |= {axis.name: _token_places(scene, drift, axis) for axis in TOKEN_AXES}
    return {name: where for name, where in found.items() if where is not None}


def _sequence_places(scene: Scene, columns: dict[str, Tensor], axis: SequenceAxis) -> Places[Sums] | None:
    keys = axis.keys(scene.batch)
    if keys is None:
        return None
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault("∅" if key is None else str(key), []).append(row)
    order = torch.tensor([row for members in rows.values() for row in members], dtype=torch.int64)
    order = order.to(scene.draws.device)
    stacked, draws = torch.stack(tuple(columns.values()))[:, order], scene.draws[order]
    found, start = {}, 0
    for key, members in rows.items():
        here = slice(start, start := start + len(members))
        found[key] = Sums.of_stacked(tuple(columns), stacked[:, here], draws[here])
    return Places(found)


def _token_places(scene: Scene, drift: Drift, axis: TokenAxis) -> Sums | None:
    at = axis.at(scene.batch)
    if at is None:
        return None
    sums = _tables(scene, drift, at, len(axis.labels))
    stacked = torch.stack(tuple(sums.values())).transpose(1, 2)  # [C, places, S]
    names = tuple(f"{name}|{label}" for name in sums for label in axis.labels)
    return Sums.of_stacked(names, stacked.reshape(len(names), -1), scene.draws, scene.batch.key)


def _tables(scene: Scene, drift: Drift, at: Tensor, size: int) -> dict[str, Tensor]:
    """Sums of the columns by sequence and place, [S, size]."""
    terms = gap.terms(scene, drift)
    assert terms is not None
    offsets = scene.batch.cu_seqlens
    columns = {"d": terms.delta, "k3": terms.k3, "r1": terms.r1, "r11": scene.once("r11", terms.r1.square)}
    columns |= {"abs": terms.size, "pd": terms.pd}
    tokens, sums = tables.by_sequence(at, size, offsets, columns)
    far = scene.once("f_2", lambda: segments.above(terms.size, math.log(2)))
    sums["r2"] = sums.pop("r11") + 2 * sums["r1"]
    sums["f_2"] = tables.few_by_sequence(at, size, offsets, far)
    return sums | {"tokens": tokens, "sequences": (tokens > 0).to(torch.float64)}


def _by_label(sums: Sums, axis: TokenAxis) -> Places[Sums]:
    """The places that have a token, each with sums of its own."""
    size = len(axis.labels)
    names = tuple(name.rsplit("|", 1)[0] for name in sums.names[::size])
    found = {
        label: Sums(names, *(x[at::size] for x in (sums.point, sums.rest, sums.drawn)))
        for at, label in enumerate(axis.labels)
    }
    tokens = names.index("tokens")
    return Places({label: one for label, one in found.items() if one.point[tokens] > 0})


def locations(
    found: Mapping[str, Places[Sums] | Sums], groups: int, group_by: Sequence[str], whole: bool = False
) -> dict[str, Location]:
    """Read every axis out, in the order of its places; `whole`: without a cap on their number."""
    tokens = {axis.name: axis for axis in TOKEN_AXES}
    sequences = {axis.name: axis for axis in (*SEQUENCE_AXES, *map(column_axis, group_by))}
    return {
        name: _location(name, axis.title, _places(where, axis), _order(axis), groups, whole)
        for name, axis in (sequences | tokens).items()
        if (where := found.get(name)) is not None
    }


def _places(where: Places[Sums] | Sums, axis: TokenAxis | SequenceAxis) -> Places[Sums]:
    if isinstance(where, Places):
        return where
    assert isinstance(axis, TokenAxis)
    return _by_label(where, axis)


def _order(axis: TokenAxis | SequenceAxis) -> Callable[[str], tuple[float, str]]:
    return _label_order(axis.labels) if isinstance(axis, TokenAxis) else _key_order


def _label_order(labels: tuple[str, ...]) -> Callable[[str], tuple[float, str]]:
    return lambda key: (float(labels.index(key)), key)


def _key_order(key: str) -> tuple[float, str]:
    try:
        return float(key), key
    except ValueError:
        return float("inf"), key


def _location(
    name: str,
    title: str,
    where: Places[Sums],
    order: Callable[[str], tuple[float, str]],
    groups: int,
    whole: bool,
) -> Location:
    keys = sorted(where.sums, key=order)
    numeric = all(order(key)[0] != float("inf") for key in keys)
    kept = keys if whole else _thin(keys)
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
