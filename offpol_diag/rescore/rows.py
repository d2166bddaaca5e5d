"""A dump → responses with their prompts: whole groups, in an order that a seed decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offpol_diag.dump import schema as role
from offpol_diag.dump.check import Seen, good_rows
from offpol_diag.dump.pack import Rows, labels, plain
from offpol_diag.errors import DumpError
from offpol_diag.rescore.score import Row

if TYPE_CHECKING:
    from offpol_diag.dump.read import Dump

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

TEMPERATURE = "temperature"
"""What the logits were divided by, as a column or in the metadata."""
TABLE = 1 << 18
"""Tokens that are read at once."""
PER_TOKEN = ("live", "engine", "trainer")
NOT_UNITS = (
    *(role.SEQUENCE, role.GROUP, role.PROMPT_LENGTH, role.PROMPT_IDS, role.FINISH_REASON, *role.DIGESTS),
    TEMPERATURE,
)
"""Labels that are no place where a fault could be."""


@dataclass(frozen=True)
class Responses:
    """S responses of G prompts, those of a prompt side by side.

    Attributes:
        table: their rows in the dump, with all columns, [S].
        rows: what a model is given, S.
        live: which response tokens count, of all responses end to end, [T].
        engine, trainer: the two columns, [T], NaN where a token does not count.
        group: index of the prompt of each response, rising from 0, [S].
        labels: column → the label of each response, for places (hosts, steps).
        groups: prompts in the whole dump.
        notes: what was assumed and left out.
    """

    table: pa.Table
    rows: list[Row]
    live: Flags
    engine: Floats
    trainer: Floats
    group: Ints
    labels: dict[str, list[Any]]
    groups: int
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> Ints:
        """Tokens of each response, [S]."""
        return np.array([row.size for row in self.rows], np.int64)

    @property
    def here(self) -> int:
        """Prompts of these responses."""
        return int(self.group[-1]) + 1


def read(dump: Dump, groups: int | None, tokens: int, seed: int, longest: int | None = None) -> Responses:
    """Read the responses of some prompts.

    Args:
        dump: the dump.
        groups: how many prompts at least; None for all.
        tokens: how many tokens at least.
        seed: decides the order of the prompts.
        longest: sequences of more tokens are left out.

    Raises:
        DumpError: the dump lacks token ids or prompts, or a row is bad.
    """
    files = ", ".join(dump.files[:3])
    for name in (role.TOKEN_IDS, role.PROMPT_IDS):
        if name not in dump.columns:
            what = f"{files}: rescore needs the column {name}: without the tokens nothing can be scored"
            raise DumpError(what, f"write {name} into the dump (docs/dumps.md)")
    keys, sizes = _keys(dump)
    names, group = np.unique(keys, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    if groups is not None:
        held = np.cumsum(np.bincount(group, sizes, len(names))[order])
        order = order[: max(groups, int(np.searchsorted(held, tokens)) + 1)]
    place = np.full(len(names), -1, np.int64)
    place[order] = np.arange(len(order))
    seen = Seen() if dump.skip else None
    said = dump.provenance.get(TEMPERATURE)
    usual = float(said) if isinstance(said, int | float) and not isinstance(said, bool) else 1.0
    found: list[dict[str, Any]] = []
    for rows in dump.read(None, TABLE):
        wanted = place[group[rows.number]] >= 0
        if wanted.any():
            found += _each(good_rows(rows.only(wanted), seen), usual)
    most = longest or math.inf
    left = sum(len(one["ids"]) > most for one in found)
    found = [one for one in found if len(one["ids"]) <= most and one["live"].any()]
    if not found:
        raise DumpError(f"{files}: no response is left to be scored", "raise --max-length, or --sample")
    found.sort(key=lambda one: (place[group[one["number"]]], one["number"]))
    notes = []
    if not all(one["temperature"] > 0 for one in found):
        notes.append("Temperature 0 is read as 1: nothing was sampled by it.")
    notes += [f"{left:,} sequences of more than {longest:,} tokens are left out."] if left else []
    notes += [f"{seen.skipped:,} bad rows are left out."] if seen and seen.skipped else []
    heat = [one["temperature"] if one["temperature"] > 0 else 1.0 for one in found]
    units = dict.fromkeys(name for one in found for name in one["labels"] if name not in NOT_UNITS)
    _, at = np.unique([place[group[one["number"]]] for one in found], return_inverse=True)
    return Responses(
        table=pa.concat_tables([one["table"] for one in found], promote_options="permissive"),
        rows=[Row(one["ids"], one["start"], t) for one, t in zip(found, heat, strict=True)],
        group=at,
        labels={name: [one["labels"].get(name) for one in found] for name in units},
        groups=len(names),
        notes=tuple(notes),
        **{name: np.concatenate([one[name] for one in found]) for name in PER_TOKEN},
    )


def _keys(dump: Dump) -> tuple[list[str], Ints]:
    """Return the prompt of each row of the dump, by its id or its contents, and the row's tokens."""
    names, sizes = list[str](), list[int]()
    group, rollout = (
        dump.columns.get(role.GROUP) or dump.columns[role.PROMPT_IDS],
        dump.columns[role.ROLLOUT],
    )
    for rows in dump.read([*{rollout, group}], TABLE):
        sizes += pa.compute.list_value_length(rows.table.column(rollout)).fill_null(0).to_pylist()
        names += [
            f"{'row' if one is None else 'id'}/{i if one is None else one}"
            for i, one in zip(rows.number, plain(rows.table.column(group), rows.where), strict=True)
        ]
    return names, np.array(sizes, np.int64)


def _each(rows: Rows, usual: float) -> Iterator[dict[str, Any]]:
    """Yield what is needed of each row, with the row as a table and its own temperature or the usual one."""
    lists, named, whole = rows.lists, labels(rows), pa.Table.from_batches([rows.table])
    ids = lists[role.TOKEN_IDS].values
    live = np.array(np.broadcast_to(rows.live, len(ids)), np.bool_)
    engine = np.where(live, lists[role.ROLLOUT].values, np.nan)
    trainer = np.where(live, lists[role.OLD if role.OLD in lists else role.CURRENT].values, np.nan)
    offsets, heat = rows.rollout.offsets, [None] * len(rows.row)
    if TEMPERATURE in whole.column_names:
        heat = whole.column(TEMPERATURE).to_pylist()
    for i, (begin, end, own) in enumerate(zip(offsets[:-1], offsets[1:], heat, strict=True)):
        if end == begin:
            continue
        prompt = named[role.PROMPT_IDS][i]
        if prompt is None or not len(prompt):
            hint = "a response begins after a token: write at least the token that begins every sequence"
            raise DumpError(f"{rows.place(i)}: its prompt is empty", hint)
        yield {
            "number": int(rows.number[i]),
            "table": whole.slice(i, 1),
            "ids": np.concatenate((prompt, ids[begin:end])).astype(np.int64),
            "start": len(prompt),
            "live": live[begin:end],
            "engine": engine[begin:end],
            "trainer": trainer[begin:end],
            "labels": {name: column[i] for name, column in named.items()},
            "temperature": float(own) if isinstance(own, int | float) else usual,
        }
