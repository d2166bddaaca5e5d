"""A dump → responses with their prompts: whole groups, in an order that a seed decides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt
from numpy.typing import NDArray

from offpol_diag.dump import schema as role
from offpol_diag.dump.check import Skipped, good_rows
from offpol_diag.dump.pack import Ragged, Rows, labels, plain
from offpol_diag.errors import DumpError, UsageError, install
from offpol_diag.rescore.score import UNPENALISED, Penalties, Row

if TYPE_CHECKING:
    from offpol_diag.dump.read import Dump

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "prompt_tokens")
PROMPTS = ("prompt", "messages")
"""Names of the columns of prompts, as token ids and as text or messages."""
REFERENCE = ("reference_log_probs", "reference_entropy", "reference_rank")
"""The columns that are written."""
TABLE = 1 << 18
"""Tokens that are read at once."""
PER_TOKEN = ("live", "engine", "trainer")
PENALTIES = tuple(f"{name}_penalty" for name in Penalties._fields)
"""Names of the penalties, in the metadata or as columns."""
NOT_UNITS = (
    *(role.SEQUENCE, role.GROUP, role.PROMPT_LENGTH, role.PROMPT_IDS, role.FINISH_REASON, *role.DIGESTS),
    "temperature",
    *PENALTIES,
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
    def tokens(self) -> int:
        """Tokens that count."""
        return int(self.live.sum())

    @property
    def here(self) -> int:
        """Prompts of these responses."""
        return int(self.group[-1]) + 1 if len(self.group) else 0

    def first(self, groups: int) -> Responses:
        """Return the responses of the first prompts."""
        many = int(np.searchsorted(self.group, groups))
        end = int(self.sizes[:many].sum())
        labels = {name: column[:many] for name, column in self.labels.items()}
        per_token = {name: getattr(self, name)[:end] for name in PER_TOKEN}
        rows, group = self.rows[:many], self.group[:many]
        return replace(
            self, table=self.table.slice(0, many), rows=rows, group=group, labels=labels, **per_token
        )

    def enough(self, groups: int, tokens: int) -> int:
        """Return how many prompts have at least so many prompts and tokens; all where there are fewer."""
        per_row = np.add.reduceat(self.live, np.concatenate(([0], np.cumsum(self.sizes)[:-1])))
        held = np.cumsum(np.bincount(self.group, per_row, self.here))
        return min(max(groups, int(np.searchsorted(held, tokens)) + 1), self.here)


def read(
    dump: Dump,
    groups: int | None,
    tokens: int,
    seed: int,
    tokenizer: Path | None = None,
    longest: int | None = None,
) -> Responses:
    """Read the responses of some prompts.

    Args:
        dump: the dump.
        groups: how many prompts at least; None for all.
        tokens: how many tokens at least.
        seed: decides the order of the prompts.
        tokenizer: of prompts that are text.
        longest: sequences of more tokens are left out.

    Raises:
        DumpError: the dump lacks token ids or prompts, or a row is bad.
    """
    prompts = _prompts(dump, tokenizer)
    keys, sizes = _keys(dump)
    names, group = np.unique(keys, return_inverse=True)
    order = np.random.default_rng(seed).permutation(len(names))
    if groups is not None:
        held = np.cumsum(np.bincount(group, sizes, len(names))[order])
        order = order[: max(groups, int(np.searchsorted(held, tokens)) + 1)]
    place = np.full(len(names), -1, np.int64)
    place[order] = np.arange(len(order))
    skipped = Skipped() if dump.skip else None
    found: list[tuple[int, dict[str, Any], pa.Table]] = []
    for rows in _rows(dump):
        wanted = place[group[rows.number]] >= 0
        if wanted.any():
            rows = good_rows(rows.only(wanted), skipped)
            found += [(place[group[one["number"]]], one, part) for one, part in _each(rows, prompts)]
    left = sum(one["length"] > (longest or math.inf) for _, one, _ in found)
    found = [one for one in found if one[1]["length"] <= (longest or math.inf) and one[1]["live"].any()]
    if not found:
        raise DumpError(
            f"{_named(dump)}: no response is left to be scored", "raise --max-length, or --sample"
        )
    found.sort(key=lambda one: (one[0], one[1]["number"]))
    heat = _temperatures(dump, [one for _, one, _ in found])
    said = dump.info.provenance
    made = [
        Row(one["ids"], one["start"], t if t > 0 else 1.0, penalties=_penalties(one["penalties"], said))
        for (_, one, _), t in zip(found, heat, strict=True)
    ]
    live, engine, trainer = (np.concatenate([one[name] for _, one, _ in found]) for name in PER_TOKEN)
    _, at = np.unique([one[0] for one in found], return_inverse=True)
    named = dict.fromkeys(name for _, one, _ in found for name in one["labels"] if name not in NOT_UNITS)
    notes = [*prompts.notes]
    if not all(t > 0 for t in heat):
        notes.append("Temperature 0 is read as 1: nothing was sampled by it.")
    notes += [f"{left:,} sequences of more than {longest:,} tokens are left out."] if left else []
    notes += [f"{skipped.count:,} bad rows are left out."] if skipped and skipped.count else []
    return Responses(
        pa.concat_tables([table for *_, table in found], promote_options="permissive"),
        made,
        live,
        engine,
        trainer,
        at,
        {name: [one["labels"].get(name) for _, one, _ in found] for name in named},
        len(names),
        tuple(notes),
    )


def _named(dump: Dump) -> str:
    return ", ".join(dump.info.files[:3])


def _rows(dump: Dump, names: Sequence[str] | None = None) -> Iterator[Rows]:
    """Yield the rows of a dump with all its columns, or some."""
    yield from dump.read(names, TABLE)


def _keys(dump: Dump) -> tuple[list[str], Ints]:
    """Return the prompt of each row of the dump, by its id or its contents, and the row's tokens."""
    names, sizes = list[str](), list[int]()
    group, rollout = dump.info.columns.get(role.GROUP), dump.info.columns[role.ROLLOUT]
    prompts = next((name for name in (*PROMPT_IDS, *PROMPTS) if name in dump.parts[0].schema.names), "")
    wanted = {rollout, group or prompts}
    for rows in _rows(dump, [*wanted]):
        lengths = pa.compute.list_value_length(rows.table.column(rollout)).fill_null(0)
        sizes += lengths.to_pylist()
        values = plain(rows.table.column(group or prompts)).to_pylist()
        names += [
            f"{'row' if one is None else 'id'}/{i if one is None else one}"
            for i, one in zip(rows.number, values, strict=True)
        ]
    return names, np.array(sizes, np.int64)


def _each(rows: Rows, prompts: _Prompts) -> Iterator[tuple[dict[str, Any], pa.Table]]:
    """Yield what is needed of each row, and the row as a table."""
    lists, named = rows.lists, labels(rows)
    ids, live = lists[role.TOKEN_IDS].values, np.broadcast_to(rows.live, len(lists[role.TOKEN_IDS].values))
    engine = np.where(live, lists[role.ROLLOUT].values, np.nan)
    trainer = np.where(live, lists[role.OLD if role.OLD in lists else role.CURRENT].values, np.nan)
    given, whole = prompts.of(rows), pa.Table.from_batches([rows.table])
    for i, (begin, end) in enumerate(zip(rows.offsets[:-1], rows.offsets[1:], strict=True)):
        if end == begin:
            continue
        prompt = given[i]
        if not len(prompt):
            hint = "a response begins after a token: write at least the token that begins every sequence"
            raise DumpError(f"{rows.place(i)}: its prompt is empty", hint)
        own = {
            "number": int(rows.number[i]),
            "ids": np.concatenate((prompt, ids[begin:end])).astype(np.int64),
            "start": len(prompt),
            "length": len(prompt) + int(end - begin),
            "live": np.asarray(live[begin:end], np.bool_),
            "engine": engine[begin:end],
            "trainer": trainer[begin:end],
            "labels": {name: column[i] for name, column in named.items()},
            "temperature": _number(rows, i, "temperature"),
            "penalties": [_number(rows, i, name) for name in PENALTIES],
        }
        yield own, whole.slice(i, 1)


def _number(rows: Rows, i: int, name: str) -> float | None:
    """Return the row's own value of a column, if it has one."""
    if name not in rows.table.schema.names:
        return None
    value = rows.table.column(name)[i].as_py()
    return float(value) if isinstance(value, int | float) else None


def _penalties(own: Sequence[float | None], said: Mapping[str, Any]) -> Penalties:
    """Return the penalties of a row: its own, else what the provenance says, else none."""
    found = []
    for value, name, none in zip(own, PENALTIES, UNPENALISED, strict=True):
        given = said.get(name) if value is None else value
        number = float(given) if isinstance(given, int | float) and not isinstance(given, bool) else none
        found.append(number if math.isfinite(number) and (none == 0 or number > 0) else none)
    return Penalties(*found)


# ---------------------------------------------------------------- prompts


@dataclass(frozen=True)
class _Prompts:
    """How prompts are read: the column, whether it holds token ids, and else the tokenizer."""

    column: str
    ids: bool
    tokenizer: Any = None
    notes: tuple[str, ...] = ()

    def of(self, rows: Rows) -> list[Ints]:
        """Return the tokens of the prompt of each row."""
        column = rows.table.column(self.column)
        if self.ids:
            found = Ragged.of(column)
            return [one.astype(np.int64) for one in np.split(found.values, np.cumsum(found.lengths)[:-1])]
        return [np.array(self._encoded(one), np.int64) for one in column.to_pylist()]

    def _encoded(self, prompt: Any) -> list[int]:
        if isinstance(prompt, list):
            found = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        else:
            found = self.tokenizer(str(prompt or ""), add_special_tokens=True)["input_ids"]
        return list(found)


def _prompts(dump: Dump, tokenizer: Path | None) -> _Prompts:
    """Find the prompts of a dump."""
    schema, name = dump.parts[0].schema, _named(dump)
    if role.TOKEN_IDS not in dump.info.columns:
        hint = "write token_ids, the sampled tokens, into the dump (docs/dumps.md)"
        raise DumpError(f"{name}: rescore needs the column token_ids", hint)
    for column in PROMPT_IDS:
        if column in schema.names and not role.misfit(
            role.COLUMNS[role.PROMPT_IDS], schema.field(column).type, long=False
        ):
            return _Prompts(column, True)
    texts = [one for one in PROMPTS if one in schema.names and not pt.is_null(schema.field(one).type)]
    if not texts:
        hint = "write prompt_ids, the tokens before the response, into the dump (docs/dumps.md)"
        raise DumpError(
            f"{name}: rescore needs the column prompt_ids: without the context nothing can be scored", hint
        )
    if tokenizer is None:
        hint = f"name the tokenizer that made tokens of it: --tokenizer FOLDER; better, write {PROMPT_IDS[0]}"
        raise DumpError(
            f"{name}: its prompts are text (column {texts[0]!r}), and the model reads tokens", hint
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UsageError(
            "--tokenizer needs transformers, which is not installed", install("rescore")
        ) from error
    try:
        made = AutoTokenizer.from_pretrained(str(tokenizer))
    except (OSError, ValueError) as error:
        why = str(error).strip().partition("\n")[0]
        raise UsageError(
            f"--tokenizer {tokenizer}: it cannot be read ({why})", "name the folder of the model"
        ) from error
    note = f"Prompts are text, made tokens again by {tokenizer}: a verdict of the context rests on that."
    return _Prompts(texts[0], False, made, (note,))


def _temperatures(dump: Dump, rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return what divides the logits of each row: its own column, else what the provenance says, else 1."""
    said = dump.info.provenance.get("temperature")
    general = float(said) if isinstance(said, int | float) and not isinstance(said, bool) else 1.0
    return [general if row["temperature"] is None else row["temperature"] for row in rows]
