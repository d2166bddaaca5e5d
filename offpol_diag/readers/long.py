"""The long form, one row per token → slices of one row per sequence.

A sequence begins at the first row with its id and waits for those that began before it, so the order of the
sequences is that of their first rows, however the dump is cut. Its rows may lie anywhere, in one file or in
several, as long as no more than `FAR` other rows lie between one and the next: so many rows are held, no
matter how few tokens the reader is asked to hold. A bad row, in messages, is where its sequence begins.

Tokens are ordered by the position column, if there is one, else by row. The first position of a sequence is
its index 0. Where positions jump, the writer left tokens out: they part two turns as masked tokens do, but
nobody knows more of them, and they are not counted as masked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.errors import DumpError
from offpol_diag.readers import alike, columns
from offpol_diag.readers.alike import Column, Flaw
from offpol_diag.readers.checks import SKIP, Problem
from offpol_diag.readers.files import Part
from offpol_diag.readers.forms import TOKENS
from offpol_diag.readers.ragged import Ints, dense, starts
from offpol_diag.readers.schemas import Plan
from offpol_diag.readers.slices import Slice, cuts, tables
from offpol_diag.readers.spans import Opening, Piece, Spans

# Rows of others between two rows of a sequence, at most: four row groups of a million.
FAR = 4_000_000
# Tokens are handed out once they are this part of those held; sorting then costs a few passes in all.
WORTHWHILE = 0.25
NUMBER = ""  # the held column with the number of the sequence; no column of ours is called so
WHOLE = frozenset({columns.TOKEN_IDS, columns.POSITION})


def gathered(
    parts: Sequence[Part], plan: Plan, tokens: int, progress: Callable[[int], None]
) -> Iterator[Slice]:
    """The sequences of a dump in the long form, at most about `tokens` tokens at a time and at least one.

    Args:
        parts: the files.
        plan: the columns to read.
        tokens: masked ones count.
        progress: called with the number of rows just read.

    Raises:
        DumpError: data that cannot be read, a row without an id, or an id that comes back too late.
    """
    gathering = Gathering(plan, tokens)
    for part in parts:
        for group, first, table in tables(part, plan, dict.fromkeys(part.groups, tokens)):
            if not table.num_rows:
                continue
            gathering.add(str(part.path), group, first, table)
            yield from gathering.finished()
            progress(table.num_rows)
    yield from gathering.rest()


@dataclass
class Gathering:
    """Sequences that may go on, numbered in the order of their first rows.

    Attributes:
        plan: the columns.
        tokens: about how many a slice holds.
        numbers: id → number, of every sequence so far.
        read: rows so far.
        out: sequences that were handed out.
        last: the last row of each of the others.
        sizes: and its rows so far.
        held: their tokens, in the order of the rows.
        openings: and the rows they began in.
        flaws: what is wrong with them, by number.
    """

    plan: Plan
    tokens: int
    numbers: dict[object, int] = field(default_factory=dict)
    read: int = 0
    out: int = 0
    last: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    held: list[pa.Table] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    flaws: dict[int, Flaw] = field(default_factory=dict)

    @property
    def _roles(self) -> list[str]:
        return [role for role in TOKENS if role in self.plan.columns]

    def add(self, file: str, group: int, first: int, table: pa.RecordBatch) -> None:
        """Take the next rows, the first of which has number `first` in its file.

        Raises:
            DumpError: a row without an id, or an id that comes back too late.
        """
        piece = Piece(file, group, first, _without_views(table))
        begun = len(self.numbers)
        numbers = self._number(piece)
        spans = Spans.of(numbers)
        self._advance(piece, spans, begun)
        self._open(piece, spans, begun)
        self._hold(piece, numbers)
        self.read += table.num_rows

    def _number(self, piece: Piece) -> Ints:
        """The number of each row's sequence, [N]."""
        name = self.plan.columns[columns.SEQUENCE]
        ids = _hashable(piece.table.column(name))
        missing = np.flatnonzero(ids.is_null(nan_is_null=True).to_numpy(zero_copy_only=False))
        if missing.size:
            raise DumpError(
                f"{piece.place(missing[0])}, column {name!r}: it is null, and a token belongs to a sequence",
                "give every row the id of its sequence; without one, no sequence can be known to be whole",
            )
        coded = ids.dictionary_encode()
        known = [self.numbers.setdefault(key, len(self.numbers)) for key in coded.dictionary.to_pylist()]
        numbers: Ints = np.array(known, np.int64)[coded.indices.to_numpy()]
        return numbers

    def _advance(self, piece: Piece, spans: Spans, begun: int) -> None:
        """Note where sequences were last seen, and that no gap is too wide."""
        new = len(self.numbers) - begun
        self.last = np.concatenate((self.last, np.zeros(new, np.int64)))
        self.sizes = np.concatenate((self.sizes, np.zeros(new, np.int64)))
        heads = spans.order[spans.begins] + self.read
        before = np.where(
            spans.numbers < begun, self.last[np.maximum(spans.numbers - self.out, 0)], heads - 1
        )
        before[spans.numbers < self.out] = -FAR - 2
        rows = spans.order + self.read
        previous = np.concatenate(([0], rows[:-1]))
        previous[spans.begins] = before
        late = spans.order[rows - previous - 1 > FAR]
        if late.size:
            raise self._too_late(piece, int(late.min()))
        self.last[spans.numbers - self.out] = rows[spans.ends - 1]
        self.sizes[spans.numbers - self.out] += spans.ends - spans.begins

    def _too_late(self, piece: Piece, row: int) -> DumpError:
        name = self.plan.columns[columns.SEQUENCE]
        value = alike.value(piece.table.column(name)[row])
        return DumpError(
            f"{piece.place(row)}, column {name!r}: sequence {value!r} comes back after more than {FAR} rows "
            "of others",
            f"sort the dump by {name!r}, or write the rows of a sequence nearer to each other",
        )

    def _open(self, piece: Piece, spans: Spans, begun: int) -> None:
        """Keep the first row of sequences that begin, and compare the others with it."""
        constant = _constant(self.plan)
        first = spans.order[spans.begins][spans.numbers >= begun]
        if first.size:
            names = [self.plan.columns[columns.SEQUENCE], *(column.name for column in constant)]
            table = piece.table.select(list(dict.fromkeys(names))).take(pa.array(first))
            self.openings.append(Opening(piece.file, piece.group, begun, first + piece.first, table))
        for column in constant:
            for number, flaw in alike.differing(piece, spans, column, begun, self.openings):
                self.flaws.setdefault(number, flaw)

    def _hold(self, piece: Piece, numbers: Ints) -> None:
        held = {NUMBER: pa.array(numbers)}
        for role in self._roles:
            name = self.plan.columns[role]
            held[name] = _widened(piece.table.column(name), role)
        self.held.append(pa.table(held))

    def finished(self) -> Iterator[Slice]:
        """Sequences that cannot go on, once there are enough of them."""
        open_ = np.flatnonzero(self.read - self.last - 1 <= FAR)
        count = int(open_[0]) if open_.size else len(self.last)
        if self.sizes[:count].sum() > WORTHWHILE * self.sizes.sum():
            yield from self._hand_out(count)

    def rest(self) -> Iterator[Slice]:
        """All others: nothing comes after them."""
        yield from self._hand_out(len(self.last))

    def _hand_out(self, count: int) -> Iterator[Slice]:
        """The first sequences of those held."""
        if not count:
            return
        tokens = self._sorted(self._taken(self.out + count))
        offsets = starts(self.sizes[:count])
        begin, end = self.out, self.out + count
        self.last, self.sizes, self.out = self.last[count:], self.sizes[count:], end
        openings, self.openings = self.openings, [o for o in self.openings if o.end > end]
        for opening in openings:
            span = opening.between(begin, end)
            if len(span.rows):
                low, high = span.first - begin, span.end - begin
                yield from self._slices(span, tokens, offsets[low : high + 1])

    def _taken(self, end: int) -> pa.Table:
        """The held tokens of sequences before `end`, which are held no longer."""
        tokens = pa.concat_tables(self.held).combine_chunks()
        go = tokens.column(NUMBER).to_numpy() < end
        self.held = [tokens.filter(pa.array(~go))]
        return tokens.filter(pa.array(go))

    def _sorted(self, tokens: pa.Table) -> pa.Table:
        """Tokens in the order of sequence, position and row; double positions are noted."""
        number = tokens.column(NUMBER).to_numpy()
        name = self.plan.columns.get(columns.POSITION)
        if name is None:
            return _taken(tokens, np.argsort(number, kind="stable"))
        null = tokens.column(name).is_null().to_numpy()
        position = tokens.column(name).fill_null(0).to_numpy()
        order = np.lexsort((position, number))
        number, position = number[order], position[order]
        twice = np.flatnonzero((np.diff(number) == 0) & (np.diff(position) == 0))
        self._note(number, np.flatnonzero(null[order]), lambda _: "it is null in a row of the sequence")
        self._note(number, twice, lambda row: f"two rows of the sequence are at position {position[row]}")
        return _taken(tokens, order)

    def _note(self, number: Ints, bad: Ints, text: Callable[[int], str]) -> None:
        """Note the first bad row of each sequence; rows [N] are sorted by number."""
        sequences, first = np.unique(number[bad], return_index=True)
        for sequence, row in zip(sequences.tolist(), bad[first].tolist(), strict=True):
            self.flaws.setdefault(sequence, Flaw(columns.POSITION, text(row)))

    def _slices(self, opening: Opening, tokens: pa.Table, offsets: Ints) -> Iterator[Slice]:
        """The sequences of an opening, whose tokens lie at `offsets` [S+1]."""
        for begin, end in cuts(offsets, self.tokens):
            part = tokens.slice(offsets[begin], offsets[end] - offsets[begin])
            bounds = pa.array(offsets[begin : end + 1] - offsets[begin])
            found = opening.table.slice(begin, end - begin)
            for name in part.column_names[1:]:
                values = part.column(name).combine_chunks()
                found = found.append_column(name, pa.LargeListArray.from_arrays(bounds, values))
            problems = self._problems(opening.first + begin, opening.first + end)
            yield Slice(opening.file, opening.group, opening.rows[begin:end], 0, found, problems)

    def _problems(self, begin: int, end: int) -> tuple[Problem, ...]:
        """The flaws of some sequences, by column."""
        flawed = [
            (number - begin, self.flaws.pop(number)) for number in range(begin, end) if number in self.flaws
        ]
        found = []
        for role in dict.fromkeys(flaw.role for _, flaw in flawed):
            some = [(row, flaw.text) for row, flaw in flawed if flaw.role == role]
            rows, texts = np.array([row for row, _ in some]), [text for _, text in some]
            found.append(Problem(role, rows, texts.__getitem__, SKIP))
        return tuple(found)


def _constant(plan: Plan) -> list[Column]:
    """The columns that have one value per sequence, save its id."""
    played = {name: role for role, name in plan.columns.items()}
    roles = {name: played.get(name, name) for name in plan.names}
    return [Column(n, role) for n, role in roles.items() if role not in (*TOKENS, columns.SEQUENCE)]


def _hashable(ids: pa.Array) -> pa.Array:
    """Ids without a dictionary, text as bytes: it may be no UTF-8."""
    plain = dense(ids)
    text = (pt.is_string, pt.is_large_string)
    return plain.cast(pa.large_binary()) if any(test(plain.type) for test in text) else plain


def _without_views(table: pa.RecordBatch) -> pa.RecordBatch:
    """The same rows; Arrow cannot pick rows of text in views."""
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return table.cast(
        pa.schema([field.with_type(views.get(field.type, field.type)) for field in table.schema])
    )


def _taken(tokens: pa.Table, order: Ints) -> pa.Table:
    """The rows in an order, which most often is theirs."""
    return tokens if (np.diff(order) == 1).all() else tokens.take(pa.array(order))


def _widened(values: pa.Array, role: str) -> pa.Array:
    """Values in the widest type of their kind: files may differ."""
    return dense(values).cast(pa.int64() if role in WHOLE else pa.float64(), safe=False)
