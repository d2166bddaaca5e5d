"""The mismatch by place: step, lag, length, turn, position, probability, advantage sign, any column.

An axis is a row of a table that gives each token, or each sequence, its place; the same sums are kept at
every place. Beside them: the ESS of sequence weights by the length of the prefix that they are products over,
and, on request, any number that is made of sums, by training step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from offpol_diag.core import gap, preset_numbers
from offpol_diag.core.gap import DRIFTS, Terms
from offpol_diag.core.intervals import SHARED, Formula, Reader
from offpol_diag.core.segments import Segments, floats
from offpol_diag.core.state import MOST_PLACES, OTHERS, Array, State, Table, largest_of, unkept
from offpol_diag.core.tails import ESS_TOKENS
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.batch import label as text_of
from offpol_diag.dump.check import UNKNOWN
from offpol_diag.dump.schema import TRAIN_VERSION
from offpol_diag.number import Number, Numbers
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import plain
from offpol_diag.result import AtLength, Axis

COLUMNS = ("d", "k3", "r1", "abs", "pd", "r2", "f_2", "tokens", "sequences")
"""Sums at every place: Δ, K3, r − 1, |Δ|, |π_train − π_rollout|, r² − 1, |Δ| > ln 2, and how many."""
_GAP = (*gap.ROWS, ESS_TOKENS)
_SHOWN = ("k3", "k1", "mean_ratio", "ess_tokens", "abs_log_ratio", "prob_diff_mean", "f_2")
ROWS = tuple(row for name in _SHOWN for row in _GAP if row.name == name)
"""Numbers at every place."""
MOST_LISTED = 400
"""Most places of an axis that are listed; a longer one is thinned when it is read."""
PREFIX = "where."
"""Begins the name of an axis's table."""
STEP = "step"

# ---------------------------------------------------------------- axes

POSITIONS, TURNS, LAGS = 18, 64, 64
"""Places of positions (octaves), turns and lags of tokens; the last holds all beyond."""
PROBABILITIES = (0.01, 0.1, 0.5, 0.9, 0.99)


@dataclass(frozen=True)
class By:
    """An axis, along which numbers are broken down.

    Attributes:
        name: of its table and in results.
        title: on the page.
        of: what has places: sequences, or tokens; runs are tokens whose neighbours mostly share a place.
        places: of each token, [T], or sequence, [S]: its label's index, or `len(labels)` for none; without
            labels, values of a column. None where the dump does not tell.
        labels: of the places.
        fewest: places below which the axis is not shown.
    """

    name: str
    title: str
    of: Literal["sequences", "tokens", "runs"]
    places: Callable[[Batch], Any]
    labels: tuple[str, ...] = ()
    fewest: int = 1


def column(name: str, title: str = "") -> By:
    """Return the axis along a scalar column of the dump."""
    return By(name, title or name, "sequences", lambda batch: batch.scalars.get(name))


def octave(x: Array) -> Array:
    """Compute ⌊log2 x⌋ of integers ≥ 1, from the exponent of a float64."""
    return (x.astype(np.float64).view(np.int64) >> 52) - 1023


def of_octave(place: str) -> str:
    """Return the lengths in an octave."""
    return f"{2 ** int(place)}–{2 ** (int(place) + 1) - 1}"


def position(batch: Batch) -> Array:
    """Return the octave of each token's position in the response, from 0."""
    return np.minimum(octave(np.maximum(batch.position + 1, 1)), POSITIONS - 1)


def _token_lag(batch: Batch) -> Array | None:
    """Return each token's lag plus 1: the trainer's version less that of the weights that sampled it."""
    sampled, trained = batch.weight_versions, batch.scalars.get(TRAIN_VERSION)
    if sampled is None or trained is None:
        return None
    versions = np.array([one if type(one) is int else UNKNOWN for one in trained], np.int64)
    trainer = np.repeat(versions, batch.lengths)
    lag = np.clip(trainer - sampled, -1, LAGS - 2)
    return np.where((trainer > UNKNOWN) & (sampled > UNKNOWN), lag + 1, LAGS)


def _probability(batch: Batch) -> Array:
    """Return how many of `PROBABILITIES` each token's probability is above."""
    flags = [(batch.rollout > math.log(edge)).view(np.uint8) for edge in PROBABILITIES]
    return reduce(np.add, flags).astype(np.int64)  # faster than a search


def _sign(batch: Batch) -> Array | None:
    """Return 0 for A < 0, 1 for A = 0, 2 for A > 0."""
    return None if batch.advantages is None else np.sign(batch.advantages).astype(np.int64) + 1


LENGTH = By(
    "length",
    "response length (unmasked tokens)",
    "sequences",
    lambda batch: octave(np.maximum(batch.lengths, 1)),
    tuple(of_octave(str(at)) for at in range(63)),
)
POSITION = By(
    "position",
    "position in the response",
    "runs",
    position,
    ("0", *(f"{2**at - 1}–{2 ** (at + 1) - 2}" for at in range(1, POSITIONS - 1)), f"{2**17 - 1}+"),
)
OF_SEQUENCES = (column(STEP, "training step"), column("policy_lag", "policy lag (updates)"), LENGTH)
_OF_TURNS = (*map(str, range(1, TURNS)), f"{TURNS}+")
_OF_LAGS = ("< 0", *map(str, range(LAGS - 2)), f"{LAGS - 2}+")
_OF_PROBABILITIES = ("< 0.01", "0.01–0.1", "0.1–0.5", "0.5–0.9", "0.9–0.99", "> 0.99")
OF_TOKENS = (
    POSITION,
    By(
        "turn",
        "turn of the response",
        "runs",
        lambda batch: np.minimum(batch.turn, TURNS - 1),
        _OF_TURNS,
        fewest=2,
    ),
    By("token_lag", "policy lag of the token (updates)", "runs", _token_lag, _OF_LAGS),
    By(
        "rollout_probability",
        "probability of the token under π_rollout",
        "tokens",
        _probability,
        _OF_PROBABILITIES,
    ),
    By("advantage_sign", "sign of the advantage", "runs", _sign, ("A < 0", "A = 0", "A > 0")),
)


# ---------------------------------------------------------------- one batch


def observe(
    terms: Terms,
    columns: Mapping[str, Array],
    buckets: Array,
    group_by: Sequence[str] = (),
) -> State:
    """Sum by place along every axis that the dump has, and by prefix.

    Args:
        terms: of the main drift.
        columns: sums of each sequence, with the drift's prefix, [S].
        buckets: what sums are kept apart for, [S].
        group_by: scalar columns that are axes too.
    """
    batch, prefix = terms.batch, terms.drift.prefix
    of_sequence = {name: columns[name if name in SHARED else prefix + name] for name in COLUMNS}
    tables = _by_token(terms, buckets) if batch.tokens else {}
    for by in (*OF_SEQUENCES, *map(column, group_by)):
        places, most = by.places(batch), 0
        if places is None:
            continue
        if not by.labels:
            texts = {value: text_of(value) for value in set(places)}
            places, most = [texts[value] for value in places], 0 if by.name == STEP else MOST_PLACES
        tables[PREFIX + by.name] = Table.of(of_sequence, buckets, places, most=most)
    table, largest = _prefixes(terms.delta, batch, buckets)
    return State(tables={**tables, PREFIXES: table}, largest={PREFIXES: largest})


def _by_token(terms: Terms, buckets: Array) -> dict[str, Table]:
    """Sum by place along every axis of tokens; of runs, by those that share all their places."""
    batch = terms.batch
    labels, which = np.unique(buckets, return_inverse=True)
    row = np.repeat(np.arange(batch.sequences), batch.lengths)
    places = {by: at for by in OF_TOKENS if (at := by.places(batch)) is not None}
    x = {"d": terms.delta, "k3": terms.k3, "r1": terms.r1, "abs": terms.size, "pd": terms.pd}
    x |= {"r2": terms.r11, "f_2": floats(terms.size > math.log(2)), "tokens": np.ones(batch.tokens)}
    starts = _starts(row, *(at for by, at in places.items() if by.of == "runs"))
    of_runs = {name: np.add.reduceat(one, starts) for name, one in x.items()}
    tables = {}
    for by, at in places.items():
        rows, at, each = (row[starts], at[starts], of_runs) if by.of == "runs" else (row, at, x)
        size = len(by.labels) + 1
        codes, many = which[rows] * size + at, len(labels) * size
        sums = {name: np.bincount(codes, one, many) for name, one in each.items()}
        sums["r2"] += 2 * sums["r1"]  # r² − 1 = (r − 1)² + 2 (r − 1)
        owner, where = np.divmod(np.flatnonzero(np.bincount(rows * size + at)), size)
        sums["sequences"] = np.bincount(which[owner] * size + where, minlength=many).astype(np.float64)
        bucket, place = np.divmod(np.arange(many), size)
        there = (sums["tokens"] > 0) & (place < size - 1)
        own = {name: sums[name][there] for name in COLUMNS}
        tables[PREFIX + by.name] = Table.of(own, labels[bucket[there]], place[there])
    return tables


def _starts(*codes: Array) -> Array:
    """Return where runs of tokens with equal codes start."""
    changed = np.ones(len(codes[0]), np.bool_)
    changed[1:] = False
    for x in codes:
        changed[1:] |= x[1:] != x[:-1]
    return np.flatnonzero(changed)


# ---------------------------------------------------------------- sequence weights by prefix

PREFIXES = "prefixes"
GRID = tuple(sorted({round(2 ** (half / 2)) for half in range(35)}))
"""Lengths T of prefixes in tokens, two to an octave, up to 131,072."""
TOP = 2048
"""Largest log-weights kept of each for k̂: all that a fit uses up to 466,000 weights."""
FEWEST = 50
"""Fewest responses for an ESS at a length: each of a few makes up a large share by itself."""
KEPT = 0.1
"""ESS below which sequence-level importance sampling is considered unusable."""
ESS = Formula(
    "ess_sequences",
    "fraction",
    "responses of at least T tokens",
    "(Σw)² / (n Σw²), w = product of the raw ratios of the first T tokens",
    lambda get: get("ess"),
)


def _prefixes(delta: Array, batch: Batch, buckets: Array) -> tuple[Table, Array]:
    """Sum w and w² over the responses of at least T tokens, w the product of the ratios of the first T.

    Returns:
        log Σw, log Σw² and the log of their number, at places T; and the largest log w, [G, TOP].
    """
    grid = np.array(GRID)
    grid = grid[: np.searchsorted(grid, batch.lengths.max(initial=0), side="right")]
    ends = batch.cu_seqlens[:-1, None] + np.minimum(grid, batch.lengths[:, None])
    cuts = np.concatenate((batch.cu_seqlens[:-1, None], ends), axis=1)
    between = Segments(np.append(cuts, batch.tokens), batch.tokens).sum(delta)  # the last: what lies beyond
    logs = between.reshape(-1, len(grid) + 1)[:, :-1].cumsum(axis=1)
    reached = grid <= batch.lengths[:, None]
    sequence, at = np.nonzero(reached)
    x = logs[sequence, at]
    columns = {"w": x, "ww": 2 * x, "many": np.zeros_like(x)}
    table = Table.of(columns, buckets[sequence], grid[at], kind="logs")
    largest = np.full((len(GRID), TOP), -np.inf)
    largest[: len(grid)] = largest_of(np.where(reached, logs, -np.inf).T, TOP)
    return table, largest


def curve(state: State, reader: Reader, seed: int) -> list[AtLength]:
    """Return ESS by the length of the prefix, as long as there are enough responses."""
    found = []
    for tokens, table in state.tables[PREFIXES].by_place().items():
        logs = table.drawn(seed)
        many = round(math.exp(logs["many"][0]))
        if many < FEWEST:
            break
        ess = np.exp(2 * logs["w"] - logs["ww"] - logs["many"])
        found.append(AtLength(tokens=tokens, sequences=many, ess_sequences=reader.wrap(ess, ESS)))
    return found


def longest(curve: Sequence[AtLength]) -> Number:
    """Find the length where the curve first falls below `KEPT`, with an interval."""
    number = Number(
        unit="tokens",
        over="responses",
        formula=f"largest T up to which ESS of the products over the first T tokens stays above {KEPT:.0%}, "
        f"at lengths that at least {FEWEST} responses have",
    )
    if not curve:
        return replace(number, unknown=f"fewer than {FEWEST} responses")
    unknown = next((at.ess_sequences.unknown for at in curve if at.ess_sequences.value is None), None)
    if unknown is not None:
        return replace(number, unknown=unknown)
    value = _crossing(curve, [at.ess_sequences.value for at in curve])
    last = curve[-1]
    if value is None:
        why = f"beyond the longest responses ({last.tokens:,} tokens, which {last.sequences:,} have)"
        return replace(number, unknown=why)
    known = list(takewhile(lambda at: at.ess_sequences.interval is not None, curve))
    low, high = (_crossing(known, [(at.ess_sequences.interval or ())[end] for at in known]) for end in (0, 1))
    interval = None if low is None else (low, float(last.tokens) if high is None else high)
    return replace(number, value=value, interval=interval)


def _crossing(curve: Sequence[AtLength], ess: Sequence[float | None]) -> float | None:
    """Return the last whole token before ESS first falls below `KEPT`; None where it never does.

    log ESS is interpolated linearly in T, as is exact for log-normal ratios; at T = 0 it is 0.
    """
    before, above = 0, math.log(1 / KEPT)
    for at, share in zip(curve, ess, strict=True):
        left = math.log(max(share or 0.0, 1e-300) / KEPT)
        if left < 0:
            return float(math.floor(before + (at.tokens - before) * above / (above - left)))
        before, above = at.tokens, left
    return None


# ---------------------------------------------------------------- reading


def locations(
    state: State,
    seed: int,
    group_by: Sequence[str] = (),
    whole: bool = False,
) -> dict[str, tuple[Axis, list[Numbers]]]:
    """Read out every axis, and the numbers at its places; with `whole`, without a cap on their number."""
    every = (*OF_SEQUENCES, *map(column, group_by), *OF_TOKENS)
    tables = {by: state.tables[PREFIX + by.name] for by in every if PREFIX + by.name in state.tables}
    return {
        by.name: _location(by, table, state.many, seed, whole)
        for by, table in tables.items()
        if by.fewest == 1 or len(table.labels) >= by.fewest
    }


def _location(by: By, table: Table, groups: int, seed: int, whole: bool) -> tuple[Axis, list[Numbers]]:
    """Read out one axis."""
    tables = table.by_place()
    order = {place: float(place) if by.labels else _number(place) for place in tables}
    names = {place: by.labels[place] if by.labels else place for place in tables}
    places = sorted(tables.keys() - {OTHERS}, key=lambda place: (order[place], place))
    listed, many = places, len(places)
    if many > MOST_LISTED and not whole:
        listed = [places[round(at * (many - 1) / (MOST_LISTED - 1))] for at in range(MOST_LISTED)]
    left_out = many - len(listed)
    at = [order[place] if order[place] < math.inf else float(i) for i, place in enumerate(listed)]
    if OTHERS in tables:
        names[OTHERS] = f"all others, about {unkept([*tables])} values"
        listed, at = [*listed, OTHERS], [*at, float(many)]
    readers = [Reader.of(tables[place], seed, groups) for place in listed]
    values = [np.stack([row.of(reader.column) for row in ROWS]) for reader in readers]
    numbers = [reader.wrapped(ROWS, x) for reader, x in zip(readers, values, strict=True)]
    found = Axis(
        title=by.title,
        numeric=OTHERS not in tables and all(order[place] < math.inf for place in places),
        places=[names[place] for place in listed],
        order=at,
        tokens=[round(float(one.drawn["tokens"][0])) for one in readers],
        sequences=[round(float(one.drawn["sequences"][0])) for one in readers],
        left_out=left_out,
    )
    return found, [{row.name: one for row, one in zip(ROWS, own, strict=True)} for own in numbers]


def _number(place: str) -> float:
    """Return a place as a number; inf if it is none."""
    try:
        result = float(place)
    except ValueError:
        result = math.inf
    return result if math.isfinite(result) else math.inf


# ---------------------------------------------------------------- any number by step

_PRESET = (*preset_numbers.ROWS, *preset_numbers.LOSSES)


def by_step(
    steps: Iterable[tuple[str, Reader]],
    presets: Sequence[Preset],
    names: Sequence[str],
) -> dict[str, dict[str, Numbers]]:
    """Return step → subject (`dump`, `preset/NAME`) → the numbers requested, as far as sums give them.

    Args:
        steps: steps, and readers of the sums of all columns there.
        presets: all presets analysed.
        names: as in `gate`: `k3`, `drift2.k3`, `PRESET.ess_tokens`; a preset by name or alias.
    """
    rows = [row for name in dict.fromkeys(names) if (row := row_by_step(name, presets)) is not None]
    result: dict[str, dict[str, Numbers]] = {}
    for step, reader in steps:
        result[step] = {}
        for formula, prefix in rows:
            try:
                number = reader.number(formula, prefix)
            except KeyError:  # a column that the dump, or this step, does not have
                continue
            subject, first = (f"preset/{prefix[:-1]}", "") if prefix.endswith("|") else ("dump", prefix)
            result[step].setdefault(subject, {})[first + formula.name] = number
    return result


def names_by_step(presets: Sequence[Preset]) -> list[str]:
    """List the names of the numbers that `by_step` can give."""
    result = [drift.prefix + row.name for drift in DRIFTS for row in _GAP]
    return result + [f"{preset.name}.{row.name}" for preset in presets for row in _PRESET]


def row_by_step(name: str, presets: Sequence[Preset]) -> tuple[Formula, str] | None:
    """Find the formula of a number that is made of sums, and the prefix of its columns; None of another."""
    readings = [(d.prefix, name.removeprefix(d.prefix), _GAP) for d in DRIFTS if name.startswith(d.prefix)]
    readings += [
        (f"{preset.name}|", name[len(word) + 1 :], _PRESET)
        for preset in presets
        for word in (preset.name, *preset.aliases)
        if plain(name).startswith(plain(word) + ".")
    ]
    every = ((row, prefix) for prefix, metric, rows in readings for row in rows if row.name == metric)
    return next(every, None)
