"""A dump → responses with their prompts: whole groups, in an order that a seed decides."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offpol_diag.dump import schema
from offpol_diag.dump.check import Seen, good_rows
from offpol_diag.dump.pack import Rows, labels, plain
from offpol_diag.dump.read import Dump
from offpol_diag.errors import DumpError
from offpol_diag.rescore.score import Row

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

TEMPERATURE = "temperature"
"""What the logits were divided by, as a column or in the metadata."""
TABLE = 1 << 18
"""Tokens that are read at once."""
NO_PLACES = {schema.SEQUENCE, schema.GROUP, schema.PROMPT_LENGTH, schema.PROMPT_IDS, schema.FINISH_REASON}
NO_PLACES |= {*schema.DIGESTS, TEMPERATURE}
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
        notes: what was left out.
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


class Response(NamedTuple):
    """One response: its number and row in the dump, what a model is given, its columns [T], its labels."""

    number: int
    table: pa.Table
    row: Row
    live: Flags
    engine: Floats
    trainer: Floats
    labels: dict[str, Any]


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
    for name in (schema.TOKEN_IDS, schema.PROMPT_IDS):
        if name not in dump.columns:
            what = f"{files}: rescore needs the column {name}: without the tokens nothing can be scored"
            raise DumpError(what, f"write {name} into the dump (docs/dumps.md)")
    prompts, sizes = _prompts(dump)
    names, group = np.unique(prompts, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    if groups is not None:
        so_far = np.cumsum(np.bincount(group, sizes, len(names))[order])
        order = order[: max(groups, int(np.searchsorted(so_far, tokens)) + 1)]
    place = np.full(len(names), len(names), np.int64)  # of a prompt in that order, or behind all
    place[order] = np.arange(len(order))
    recorded = dump.provenance.get(TEMPERATURE)
    usual = float(recorded) if isinstance(recorded, int | float) and not isinstance(recorded, bool) else 1.0
    seen, found = Seen() if dump.skip else None, list[Response]()
    for rows in dump.read(None, TABLE):
        wanted = place[group[rows.number]] < len(names)
        if wanted.any():
            found += _responses(good_rows(rows.only(wanted), seen), usual)
    most = longest or math.inf
    left_out = sum(len(one.row.ids) > most for one in found)
    found = [one for one in found if len(one.row.ids) <= most and one.live.any()]
    if not found:
        raise DumpError(f"{files}: no response is left to be scored", "raise --max-length, or --sample")
    found.sort(key=lambda one: (place[group[one.number]], one.number))
    notes = [f"{left_out:,} sequences of more than {longest:,} tokens are left out."] if left_out else []
    notes += [f"{seen.skipped:,} bad rows are left out."] if seen and seen.skipped else []
    columns = dict.fromkeys(name for one in found for name in one.labels if name not in NO_PLACES)
    return Responses(
        table=pa.concat_tables([one.table for one in found], promote_options="permissive"),
        rows=[one.row for one in found],
        live=np.concatenate([one.live for one in found]),
        engine=np.concatenate([one.engine for one in found]),
        trainer=np.concatenate([one.trainer for one in found]),
        group=np.unique([place[group[one.number]] for one in found], return_inverse=True)[1],
        labels={name: [one.labels.get(name) for one in found] for name in columns},
        groups=len(names),
        notes=tuple(notes),
    )


def _prompts(dump: Dump) -> tuple[list[str], Ints]:
    """Return the prompt of each row of the dump, by its id or its contents, and the row's tokens."""
    names, sizes, rollout = list[str](), list[int](), dump.columns[schema.ROLLOUT]
    group = dump.columns.get(schema.GROUP) or dump.columns[schema.PROMPT_IDS]
    for rows in dump.read([*{rollout, group}], TABLE):
        sizes += pa.compute.list_value_length(rows.table.column(rollout)).fill_null(0).to_pylist()
        for row, one in zip(rows.number, plain(rows.table.column(group), rows.where), strict=True):
            names.append(f"row/{row}" if one is None else f"id/{one}")
    return names, np.array(sizes, np.int64)


def _responses(rows: Rows, usual: float) -> Iterator[Response]:
    """Yield the responses of rows that are not empty, at their own temperatures or the usual one."""
    lists, named, whole = rows.lists, labels(rows), pa.Table.from_batches([rows.table])
    ids, live = lists[schema.TOKEN_IDS].values, rows.live
    engine = np.where(live, rows.rollout.values, np.nan)
    trainer = np.where(live, lists[schema.OLD if schema.OLD in lists else schema.CURRENT].values, np.nan)
    temperatures = [usual] * len(rows.row)
    if TEMPERATURE in whole.column_names:
        own = whole.column(TEMPERATURE).to_pylist()
        temperatures = [float(one) if isinstance(one, int | float) else usual for one in own]
    for i, (begin, end) in enumerate(zip(rows.rollout.offsets[:-1], rows.rollout.offsets[1:], strict=True)):
        if end == begin:
            continue
        prompt, of_row = named[schema.PROMPT_IDS][i], slice(begin, end)
        if prompt is None or not len(prompt):
            hint = "a response begins after a token: write at least the token that begins every sequence"
            raise DumpError(f"{rows.place(i)}: its prompt is empty", hint)
        every = np.concatenate((prompt, ids[of_row])).astype(np.int64)
        temperature = temperatures[i] if temperatures[i] > 0 else 1.0  # nothing is sampled at 0
        yield Response(
            int(rows.number[i]),
            whole.slice(i, 1),
            Row(every, len(prompt), temperature),
            *(live[of_row], engine[of_row], trainer[of_row]),
            {name: column[i] for name, column in named.items()},
        )
