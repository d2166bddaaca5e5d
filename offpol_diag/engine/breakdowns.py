"""Numbers by location: step, lag, length, position, probability, advantage sign, any column.

An axis maps every sequence, or every token, to its location. On request any number that is computed from sums
is also read by training step (`by_step`); tails, quantiles, extremes and sequence weights in the log domain
have no value by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offpol_diag.core.intervals import Formula, Groups, Reader
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.batch import label as text_of
from offpol_diag.engine import gap, method, normal, policyloss, residual, segments
from offpol_diag.engine.bootstrap import resampled, resampled_by
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.gap import DRIFTS
from offpol_diag.engine.segments import Array, sum_by, sums_by
from offpol_diag.engine.tails import ESS_TOKENS
from offpol_diag.engine.tally import (
    MOST_KEYS,
    OTHER_KEYS,
    Arrays,
    ByKey,
    Names,
    Tally,
    estimated_others,
    retained,
)
from offpol_diag.engine.terms import Block, Drift, Terms, collected
from offpol_diag.number import Numbers
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import plain
from offpol_diag.result import Axis, Place

MOST_LISTED = 400
"""Most rows of a location table; a longer axis is thinned in the report, not in the tally."""

POSITIONS = 18
_LOG_EDGES = tuple(math.log(edge) for edge in (0.01, 0.1, 0.5, 0.9, 0.99))

# ---------------------------------------------------------------- axes


@dataclass(frozen=True)
class TokenAxis:
    """An axis of tokens.

    Attributes:
        name: in tallies and results.
        title: on the page.
        labels: of its places.
        at: gives each token's place among the labels, [t] int64, or None where the dump lacks it.
        steady: whether neighbours mostly share a place.
    """

    name: str
    title: str
    labels: tuple[str, ...]
    at: Callable[[Block], Array | None]
    steady: bool


@dataclass(frozen=True)
class SequenceAxis:
    """An axis of sequences: a scalar column of the dump, or a function of the batch; keys are texts."""

    name: str
    title: str
    keys: Callable[[Batch], list[object] | None]


def _octave(x: Array) -> Array:
    """Compute ⌊log2 x⌋ of integers ≥ 1, from the exponent of a float64."""
    return (x.astype(np.float64).view(np.int64) >> 52) - 1023


def _position(block: Block) -> Array:
    return np.minimum(_octave(np.maximum(block.position + 1, 1)), POSITIONS - 1)


def _probability(block: Block) -> Array:
    """Return the number of edges below each token's probability."""
    log = block.batch.rollout[block.tokens]
    first, *others = ((log > edge).view(np.uint8) for edge in _LOG_EDGES)  # faster than a search
    return sum(others, start=first).astype(np.int64)


def _sign(block: Block) -> Array | None:
    """Return 0 for A < 0, 1 for A = 0, 2 for A > 0."""
    return None if block.advantages is None else np.sign(block.advantages).astype(np.int64) + 1


TOKEN_AXES = (
    TokenAxis(
        "position",
        "position in the response",
        (
            *(f"{2**i - 1}–{2 ** (i + 1) - 2}" if i else "0" for i in range(POSITIONS - 1)),
            f"{2 ** (POSITIONS - 1) - 1}+",
        ),
        _position,
        steady=True,
    ),
    TokenAxis(
        "rollout_probability",
        "probability of the token under π_rollout",
        ("< 0.01", "0.01–0.1", "0.1–0.5", "0.5–0.9", "0.9–0.99", "> 0.99"),
        _probability,
        steady=False,
    ),
    TokenAxis("advantage_sign", "sign of the advantage", ("A < 0", "A = 0", "A > 0"), _sign, steady=True),
)


def column_axis(name: str, title: str = "") -> SequenceAxis:
    """Build an axis along a scalar column of the dump."""
    return SequenceAxis(name, title or name, lambda batch: batch.scalars.get(name))


def _length_keys(batch: Batch) -> list[object]:
    return list(_octave(np.maximum(batch.lengths, 1)).tolist())


LENGTH = SequenceAxis("length", "response length (unmasked tokens)", _length_keys)


def octave(key: str) -> str:
    """Return the lengths of a place of `LENGTH`, in words."""
    return f"{2 ** int(key)}–{2 ** (int(key) + 1) - 1}"


STEP = "step"
"""The axis whose places are all kept: `tally.MOST_STEPS` bounds their number."""
SEQUENCE_AXES = (
    column_axis(STEP, "training step"),
    column_axis("policy_lag", "policy lag (updates)"),
    LENGTH,
)

_SHOWN = ("k3", "k1", "mean_ratio", "ess_tokens", "abs_log_ratio", "prob_diff_mean", "f_2")
_GAP = (*gap.ROWS, ESS_TOKENS)
ROWS = tuple(row for name in _SHOWN for row in _GAP if row.name == name)
"""Numbers at every place."""

COLUMNS = ("d", "k3", "r1", "abs", "pd", "r2", "f_2", "tokens", "sequences")
"""Columns summed for each place."""

# ---------------------------------------------------------------- sums of one batch


class ByPlace:
    """Collect sums by sequence and place along every axis of tokens."""

    def __init__(self, context: BatchContext, drift: Drift) -> None:
        self.parts: dict[str, list[Array]] = {}

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        x = {"d": terms.delta, "abs": terms.size, "pd": terms.pd}
        x |= {"r1": terms.r1, "r11": terms.r11, "k3": terms.k3}
        x |= {"f_2": segments.numbers(terms.size > math.log(2)), "tokens": terms.block.out("ones")}
        places = {axis: at for axis in TOKEN_AXES if (at := axis.at(terms.block)) is not None}
        offsets = terms.block.offsets
        rows = segments.spread(np.arange(len(offsets) - 1), offsets)
        runs = _runs(rows, [at for axis, at in places.items() if axis.steady])
        of_runs = None if runs is None else {name: segments.total(one, runs) for name, one in x.items()}
        for axis, at in places.items():
            size = len(axis.labels)
            many = (len(offsets) - 1) * size
            if runs is not None and of_runs is not None and axis.steady:
                codes = rows[runs[:-1]] * size + at[runs[:-1]]
                result = {name: sum_by(codes, many, one) for name, one in of_runs.items()}
            else:
                result = sums_by(rows * size + at, many, x)
            result["r2"] = result["r11"] + 2 * result["r1"]
            result["sequences"] = (result["tokens"] > 0).astype(np.float64)
            table = np.stack([result[name] for name in COLUMNS])  # [C, s · size]
            self.parts.setdefault(axis.name, []).append(table)


def _runs(rows: Array, places: Sequence[Array]) -> Array | None:
    """Return the starts of runs of tokens of one sequence with equal places, and the end, [R+1].

    Summing runs takes a fifth of the time of summing by code. None where runs are short.
    """
    if not len(rows):
        return None
    changed = np.zeros(len(rows) - 1, np.bool_)
    for x in (rows, *places):
        changed |= x[1:] != x[:-1]
    starts = np.flatnonzero(changed) + 1
    if 8 * len(starts) >= len(rows):
        return None
    return np.concatenate(([0], starts, [len(rows)]))


LARGEST = 1000
"""Values of a column of `--group-by` that are kept where there are more: those that most rows have."""


@dataclass(frozen=True)
class Kept:
    """The values of a column that are kept, those of most rows, and the number of all others."""

    name: str
    values: frozenset[str]
    others: int


PREFIX = "where."
"""Prefix of the names of axes in a tally."""


def tally(context: BatchContext, drift: Drift, group_by: Sequence[str], kept: Sequence[Kept] = ()) -> Tally:
    """Sum by place along every axis of the dump; of axes of tokens, all places in one array.

    Of a column in `kept` these values are places of their own; of others with many values some, by hash.
    """
    chosen = {one.name: one.values for one in kept}
    parts, columns = collected(context, drift, ByPlace).parts, gap.columns(context, drift)
    if not columns:
        return Tally()
    shared = context.counts
    summed = {name: shared[name] if name in shared else columns[drift.prefix + name] for name in COLUMNS}
    stacked, by_sequence = np.stack((*summed.values(),)), dict[str, ByKey]()
    for axis in (*SEQUENCE_AXES, *map(column_axis, group_by)):
        keys = axis.keys(context.batch)
        if keys is not None:
            bounded = axis.name != STEP
            rows = _rows(keys, bounded, chosen.get(axis.name))
            members = {key: segments.index(at) for key, at in rows.items()}
            sums = resampled_by(members, stacked, context.draws, context.batch.key)
            arrays = Arrays(sums={"columns": sums}, names={"columns": Names(COLUMNS)})
            result = ByKey.of(members, arrays, "others" if bounded else "none")
            by_sequence[PREFIX + axis.name] = result
    by_token = {
        PREFIX + axis.name: _token_places(context, np.concatenate(parts[axis.name], -1), len(axis.labels))
        for axis in TOKEN_AXES
        if axis.name in parts
    }
    return Tally(Arrays(sums=by_token), by_sequence)


def _rows(keys: Sequence[object], bounded: bool, kept: Collection[str] | None) -> dict[str, list[int]]:
    """Return the sequences of each place that is kept, and of all others."""
    rows = segments.by_key(map(text_of, keys))
    if kept is None and bounded and len(rows) > MOST_KEYS:
        kept = retained(rows)
    if kept is not None and not set(kept).issuperset(rows):
        others = sorted(row for key, members in rows.items() if key not in kept for row in members)
        rows = {key: members for key, members in rows.items() if key in kept} | {OTHER_KEYS: others}
    return rows


def _token_places(context: BatchContext, table: Array, many: int) -> Array:
    """Sum tables [C, S · places] over sequences: [places, C, 1+B]."""
    stacked = table.reshape(len(COLUMNS), -1, many).transpose(2, 0, 1)  # [places, C, S]
    sums = resampled(stacked.reshape(many * len(COLUMNS), -1), context.draws, context.batch.key)
    return sums.reshape(many, len(COLUMNS), -1)


# ---------------------------------------------------------------- reading


def locations(
    tally: Tally,
    groups: int,
    group_by: Sequence[str],
    whole: bool = False,
    kept: Sequence[Kept] = (),
) -> dict[str, tuple[Axis, list[Numbers]]]:
    """Read out every axis, and the numbers at its places; with `whole`, without a cap on their number."""
    others = {one.name: one.others for one in kept}
    axes: list[TokenAxis | SequenceAxis] = [*SEQUENCE_AXES, *map(column_axis, group_by), *TOKEN_AXES]
    each = ((axis, _sums_of(tally, axis)) for axis in axes)
    return {a.name: _location(a, sums, groups, whole, others.get(a.name, 0)) for a, sums in each if sums}


def _sums_of(tally: Tally, axis: TokenAxis | SequenceAxis) -> dict[str, dict[str, Array]]:
    """Return key → column → its sums, of the places that an axis has; of tokens, those that have one."""
    name = PREFIX + axis.name
    if isinstance(axis, SequenceAxis):
        by_key = tally.by_key.get(name)
        return {} if by_key is None else {key: one.read("columns") for key, one in by_key.items()}
    sums = tally.whole.sums.get(name)
    if sums is None:
        return {}
    each = ((label, Names(COLUMNS).read(x)) for label, x in zip(axis.labels, sums, strict=True))
    return {label: one for label, one in each if one["tokens"][0] > 0}


def _number(key: str) -> float:
    """Return a key as a number; inf if it is none."""
    try:
        result = float(key)
    except ValueError:
        result = math.inf
    return result if math.isfinite(result) else math.inf


def _location(
    axis: TokenAxis | SequenceAxis,
    sums: Mapping[str, Mapping[str, Array]],
    groups: int,
    whole: bool,
    others: int,
) -> tuple[Axis, list[Numbers]]:
    labels = axis.labels if isinstance(axis, TokenAxis) else ()
    order = {key: float(labels.index(key)) if labels else _number(key) for key in sums}
    keys = sorted(sums.keys() - {OTHER_KEYS}, key=lambda key: (order[key], key))
    kept = keys if whole or others else _thin(keys)
    unkept = others or estimated_others(sums)
    listed = [
        _place(
            octave(key) if axis is LENGTH else key,
            order[key] if order[key] < math.inf else float(i),
            _reader(sums[key], groups),
        )
        for i, key in enumerate(kept)
    ]
    if unkept:
        title = f"all others, {'' if others else 'about '}{unkept} values"
        listed.append(_place(title, float(len(keys)), _reader(sums[OTHER_KEYS], groups)))
    found = Axis(
        title=axis.title,
        numeric=not unkept and all(order[key] < math.inf for key in keys),
        places=[place.key for place in listed],
        order=[place.order for place in listed],
        tokens=[place.tokens for place in listed],
        sequences=[place.sequences for place in listed],
        left_out=len(keys) - len(kept),
    )
    return found, [place.numbers for place in listed]


def _thin(keys: list[str]) -> list[str]:
    """Select at most MOST_LISTED keys, evenly spaced, including the first and last."""
    if len(keys) <= MOST_LISTED:
        return keys
    stride = (len(keys) - 1) / (MOST_LISTED - 1)
    return [keys[round(i * stride)] for i in range(MOST_LISTED)]


def _reader(sums: Mapping[str, Array], groups: int) -> Reader:
    return Reader(sums, Groups.drawn(sums["tokens"], groups))


def _place(key: str, order: float, reader: Reader) -> Place:
    return Place(
        key=key,
        order=order,
        tokens=round(float(reader.drawn["tokens"][0])),
        sequences=round(float(reader.drawn["sequences"][0])),
        numbers={row.name: reader.number(row) for row in ROWS},
    )


# ---------------------------------------------------------------- any number by step

_PRESET = (*method.ROWS, *residual.ROWS, *policyloss.ROWS)


def by_step(
    steps: ByKey,
    batches: ByKey,
    presets: Sequence[Preset],
    names: Sequence[str],
    groups: int,
) -> dict[str, dict[str, Numbers]]:
    """Return step → subject (`dump`, `preset/NAME`) → the numbers requested, as far as sums give them.

    Args:
        steps: sums of the dump's columns, by step.
        batches: the same for presets whose weights are normalised in each trainer batch.
        presets: all presets analysed.
        names: as in `gate`: `k3`, `drift2.k3`, `PRESET.ess_tokens`; a preset by name or alias.
        groups: number of groups in the dump.
    """
    rows = {name: row for name in names if (row := _row(name, presets)) is not None}
    divided = normal.normalised(presets)
    result: dict[str, dict[str, Numbers]] = {}
    divisible = {label: one.read("columns") for label, one in batches.items()} if divided else {}
    for label, one in steps.items():
        sums = one.read("columns")
        if own := divisible.get(label):
            for preset in divided:
                sums |= normal.rescaled(own, preset)
        sums |= method.own_denominators(presets, sums)
        reader = _reader(sums, min(groups, round(float(sums["sequences"][0]))))
        result[label] = {}
        for formula, prefix in rows.values():
            try:
                number = reader.number(formula, prefix)
            except KeyError:  # a column that the dump, or this step, does not have
                continue
            subject, first = (f"preset/{prefix[:-1]}", "") if prefix.endswith("|") else ("dump", prefix)
            result[label].setdefault(subject, {})[first + formula.name] = number
    return result


def is_by_step(name: str, presets: Sequence[Preset]) -> bool:
    """Return whether `by_step` can give a number of this name."""
    return _row(name, presets) is not None


def names_by_step(presets: Sequence[Preset]) -> list[str]:
    """List the names of the numbers that `by_step` can give."""
    result = [drift.prefix + row.name for drift in DRIFTS for row in _GAP]
    return result + [f"{preset.name}.{row.name}" for preset in presets for row in _PRESET]


def _row(name: str, presets: Sequence[Preset]) -> tuple[Formula, str] | None:
    """Find the formula of a name, and the prefix of its columns."""
    readings = [(d.prefix, name.removeprefix(d.prefix), _GAP) for d in DRIFTS if name.startswith(d.prefix)]
    readings += [
        (f"{preset.name}|", name[len(word) + 1 :], _PRESET)
        for preset in presets
        for word in (preset.name, *preset.aliases)
        if plain(name).startswith(plain(word) + ".")
    ]
    every = ((row, prefix) for prefix, metric, rows in readings for row in rows if row.name == metric)
    return next(every, None)
