"""The mismatch by location: step, lag, length, position, probability, advantage sign, any column.

An axis maps every sequence, or every token, to its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import gap, segments, tables
from offpol_diag.engine.accumulators import Places, Sums
from offpol_diag.engine.formula import POSITIVE, Formula, Reader, mean
from offpol_diag.engine.gap import Drift
from offpol_diag.engine.host import here, sent
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.stretches import Stretches
from offpol_diag.engine.tails import ESS_TOKENS
from offpol_diag.engine.terms import Array, Block, Pair, Terms, joined, seen
from offpol_diag.summary import Location, Place

MOST_PLACES = 400
"""Most rows of a location table; a longer axis is thinned in the report, not in the tally."""

POSITIONS = 18
_LOG_EDGES = tuple(math.log(edge) for edge in (0.01, 0.1, 0.5, 0.9, 0.99))


@dataclass(frozen=True)
class TokenAxis:
    """An axis of tokens: `at(block)` gives each token's bucket [t], or None when the dump lacks it."""

    name: str
    title: str
    labels: tuple[str, ...]
    at: Callable[[Block], Tensor | None]


@dataclass(frozen=True)
class SequenceAxis:
    """An axis of sequences: a scalar column of the dump, or a function of the batch; keys are texts."""

    name: str
    title: str
    keys: Callable[[Batch], list[object] | None]


def _octave(x: Tensor) -> Tensor:
    """Compute ⌊log2 x⌋ of integers ≥ 1, from the exponent of a float64."""
    return (x.to(torch.float64).view(torch.int64) >> 52).sub_(1023)


def _octave_labels(count: int) -> tuple[str, ...]:
    labels = [f"{2**i - 1}–{2 ** (i + 1) - 2}" if i else "0" for i in range(count - 1)]
    return (*labels, f"{2 ** (count - 1) - 1}+")


def _probability(block: Block) -> Tensor:
    """Return the probability bucket of each token: the number of edges below it, by comparisons."""
    log = block.rollout
    if isinstance(log, Tensor):
        return sum((log > edge).view(torch.uint8) for edge in _LOG_EDGES)  # type: ignore[return-value]
    found, above = np.zeros(len(log), np.uint8), np.empty(len(log), np.bool_)
    for edge in _LOG_EDGES:
        found += np.greater(log, edge, out=above).view(np.uint8)
    return torch.from_numpy(found)


def _sign(block: Block) -> Tensor | None:
    """Return the sign bucket of each token: 0 for A < 0, 1 for A = 0, 2 for A > 0."""
    x = block.advantages
    if x is None:
        return None
    return segments.above(x, 0.0).view(torch.uint8) + (1 - segments.above(-x, 0.0).view(torch.uint8))


def _position(block: Block) -> Tensor:
    """Return the octave of each token's position."""
    return _octave(block.position + 1).clamp_(max=POSITIONS - 1)


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
    """Build an axis along a scalar column of the dump."""
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
"""Columns summed for each place, besides the counts."""


class ByPlace:
    """Collect sums by sequence and place along every axis of tokens."""

    def __init__(self, scene: Scene, drift: Pair) -> None:
        self.rows = scene.batch.sequences
        self.parts: dict[str, list[Array]] = {}
        self.stretches = Stretches.of(scene.batch, POSITIONS) if here(scene.batch.rollout) else None

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        arrays, beyond = _arrays(terms), terms.beyond(_FAR)
        if self.stretches is not None:
            self._keep("", _by_run(terms, self.stretches, arrays, beyond))
        for axis in TOKEN_AXES:
            if self._along(axis.name) is None and (at := axis.at(terms.block)) is not None:
                self._keep(axis.name, _by_code(at, len(axis.labels), terms, arrays, beyond))

    def _keep(self, name: str, part: Array) -> None:
        self.parts.setdefault(name, []).append(part)

    def _along(self, name: str) -> Tensor | None:
        """Return the place of each run along an axis, [M]."""
        runs = self.stretches
        return None if runs is None else {"position": runs.octaves, "advantage_sign": runs.signs}.get(name)

    def table(self, axis: TokenAxis) -> Tensor | None:
        """Return the sums [C, S, places] along an axis, or None where the dump lacks it."""
        at, runs, size = self._along(axis.name), self.stretches, len(axis.labels)
        if at is None or runs is None:
            return _table(self.parts[axis.name], size) if axis.name in self.parts else None
        codes, many = runs.rows * size + at, self.rows * size
        sums = joined(self.parts[""])
        return sums.new_zeros(len(sums), many).index_add_(1, codes, sums).view(len(sums), -1, size)


def places(scene: Scene, drift: Drift, group_by: Sequence[str]) -> dict[str, Places[Sums] | Sums]:
    """Sum by place along every axis of the dump; for token axes, all places in one `Sums`."""
    by_place, columns = seen(scene, drift, ByPlace), gap.columns(scene, drift)
    if not columns:
        return {}
    summed = {name: columns[drift.prefix + name] for name in COLUMNS}
    summed |= {name: scene.counts[name] for name in ("tokens", "sequences")}
    axes = (*SEQUENCE_AXES, *map(column_axis, group_by))
    found: dict[str, Places[Sums] | Sums | None] = {
        axis.name: _sequence_places(scene, summed, axis) for axis in axes
    }
    for axis in TOKEN_AXES:
        table = by_place.table(axis)
        found[axis.name] = None if table is None else _token_places(scene, table, axis)
    return {name: where for name, where in found.items() if where is not None}


def _sequence_places(scene: Scene, columns: dict[str, Tensor], axis: SequenceAxis) -> Places[Sums] | None:
    keys = axis.keys(scene.batch)
    if keys is None:
        return None
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault("∅" if key is None else str(key), []).append(row)
    order = torch.tensor([row for members in rows.values() for row in members], dtype=torch.int64)
    order = sent(order, scene.draws.device)
    stacked, draws = torch.stack(tuple(columns.values()))[:, order], scene.draws[order]
    found, start = {}, 0
    for key, members in rows.items():
        here = slice(start, start := start + len(members))
        found[key] = Sums.of_stacked(tuple(columns), stacked[:, here], draws[here])
    return Places(found)


def _token_places(scene: Scene, table: Tensor, axis: TokenAxis) -> Sums:
    sums = dict(zip(_KEPT, table, strict=True))
    sums["r2"] = sums["r11"] + 2 * sums["r1"]
    sums["sequences"] = (sums["tokens"] > 0).to(torch.float64)
    stacked = torch.stack([sums[name] for name in _NAMED]).transpose(1, 2)  # [C, places, S]
    names = tuple(f"{name}|{label}" for name in _NAMED for label in axis.labels)
    return Sums.of_stacked(names, stacked.reshape(len(names), -1), scene.draws, scene.batch.key)


_KEPT = ("d", "k3", "r1", "abs", "pd", "r11", "f_2", "tokens")
_NAMED = ("d", "k3", "r1", "abs", "pd", "r2", "f_2", "tokens", "sequences")
_FAR = math.log(2)
"""The |Δ| above which f_2 counts tokens."""


def _arrays(terms: Terms) -> dict[str, str]:
    """Return name → the array of per-token terms that is summed."""
    return {"d": "delta", "abs": "size", "pd": "pd", **gap.ratios(terms)}


def _by_run(terms: Terms, stretches: Stretches, arrays: Mapping[str, str], beyond: Array) -> Array:
    """Sum over runs, [C, m]; sums over sequences follow from them and are kept.

    Except k3, by which sequences are ranked: its rounding must not depend on where runs are cut.
    """
    begins, whole = stretches.within(terms.block)
    sums = {name: np.add.reduceat(getattr(terms, array), begins) for name, array in arrays.items()}
    terms.summed |= {
        array: segments.total_of(sums[name], whole) for name, array in arrays.items() if name != "k3"
    }
    far = np.bincount(np.searchsorted(begins, beyond, side="right") - 1, minlength=len(begins))
    return _stacked(sums, far, np.diff(begins, append=len(terms.delta)))


def _by_code(at: Tensor, size: int, terms: Terms, arrays: Mapping[str, str], beyond: Array) -> Array:
    """Sum by sequence and place, by a code for each token, [C, s · size]."""
    block, made = terms.block, {name: getattr(terms, array) for name, array in arrays.items()}
    if block.kit is torch:
        tokens, sums = tables.by_sequence(at, size, block.offsets, made)
        far = tables.few_by_sequence(at, size, block.offsets, beyond)
        return _stacked({name: x.flatten() for name, x in sums.items()}, far.flatten(), tokens.flatten())
    codes, many = _lanes(at.numpy(), size, block), len(block.lengths) * size
    wide = torch.zeros(len(made) + 1, many * LANES, dtype=torch.float64)
    for table, x in zip(wide, (*made.values(), block.ones), strict=True):
        table.scatter_add_(0, codes, torch.from_numpy(x))
    *found, tokens = wide.numpy().reshape(len(wide), many, LANES).sum(axis=2)
    few = np.bincount(block.owners(beyond) * size + at.numpy()[beyond], minlength=many)
    return _stacked(dict(zip(made, found, strict=True)), few, tokens)


LANES = 4


def _lanes(at: NDArray[np.uint8], size: int, block: Block) -> Tensor:
    """Compute codes of sequence, place and lane: adding twice in a row to one address stalls a core."""
    firsts = np.arange(0, len(block.lengths) * size * LANES, size * LANES)
    codes = np.repeat(firsts, block.lengths.numpy())
    codes += at * np.uint8(LANES) + _pattern(1 << len(at).bit_length())[: len(at)]
    return torch.from_numpy(codes)


@cache
def _pattern(size: int) -> NDArray[np.uint8]:
    """Return the lanes in rotation."""
    return np.tile(np.arange(LANES, dtype=np.uint8), size // LANES + 1)


def _stacked(sums: dict[str, Array], far: Array, tokens: Array) -> Array:
    whole = gap.with_ratio(sums) | {"f_2": far, "tokens": tokens}
    stack = torch.stack if isinstance(tokens, Tensor) else np.stack
    return stack([whole[name] for name in _KEPT])


def _table(parts: Sequence[Array], size: int) -> Tensor:
    sums = joined(parts)
    return sums.view(len(sums), -1, size)


def _by_label(sums: Sums, axis: TokenAxis) -> Places[Sums]:
    """Split sums by label into the places that have a token."""
    size, sums = len(axis.labels), sums.whole
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
    """Read out every axis, in the order of its places; with `whole`, without a cap on their number."""
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
        found = float(key)
    except ValueError:
        found = math.inf
    return (found if math.isfinite(found) else math.inf), key


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
    """Select at most MOST_PLACES keys, evenly spaced, including the first and last."""
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
