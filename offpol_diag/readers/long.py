"""Gather dumps of one row per token into slices of one row per sequence.

A sequence begins at the first row with its id and waits for those that began before it, so the order of the
sequences is that of their first rows, however the dump is cut. Its rows may lie anywhere, in one file or in
several, as long as no more than `FAR` other rows lie between one and the next: so many rows are held, no
matter how few tokens the reader may hold. A bad row, in messages, is where its sequence begins.

Tokens are ordered by the position column, if there is one, else by row. The first position of a sequence is
its index 0. Where positions jump, the writer left tokens out: they part two turns as masked tokens do, but
nothing is known of them, and they are not counted as masked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns
from offpol_diag.readers.checks import SKIP
from offpol_diag.readers.columns import TOKENS, Plan
from offpol_diag.readers.decode import MOST_TOKENS, Ints, Problem, Slice, cuts, dense, starts

FAR = 4_000_000
"""Rows of others between two rows of a sequence, at most: four row groups of a million."""
WORTHWHILE = 0.25
"""Share of buffered tokens that must belong to finished sequences before these are sorted and yielded."""
NUMBER = ""
"""Name of the buffered column with the sequence number; no other column has an empty name."""
WHOLE = frozenset({columns.TOKEN_IDS, columns.POSITION})


def gathered(
    pieces: Iterable[Slice], plan: Plan, tokens: int, progress: Callable[[int], None]
) -> Iterator[Slice]:
    """Yield the sequences of a long-form dump in slices of about `tokens` tokens, or of one sequence."""
    gathering = Gathering(plan, tokens)
    views = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    for piece in pieces:  # without views, from which Arrow cannot `take`
        fields = [field.with_type(views.get(field.type, field.type)) for field in piece.table.schema]
        gathering.add(replace(piece, table=piece.table.cast(pa.schema(fields))))
        yield from gathering.finished()
        progress(len(piece.rows))
    yield from gathering.hand_out(len(gathering.last))


class Spans(NamedTuple):
    """Rows by sequence: row indices sorted by sequence, [N]; each sequence's number, begin and end, [S]."""

    order: Ints
    numbers: Ints
    begins: Ints
    ends: Ints

    @classmethod
    def of(cls, numbers: Ints) -> Spans:
        """Group rows by their sequence numbers [N]."""
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        begins = np.flatnonzero(np.diff(ordered, prepend=-1))
        return cls(order, ordered[begins], begins, np.append(begins[1:], len(order)))


@dataclass
class Gathering:
    """Buffer of unfinished sequences, numbered in the order of their first rows.

    Attributes:
        numbers: id → number, for every sequence so far.
        read: rows so far.
        out: number of sequences already yielded.
        last: latest row of each buffered sequence.
        sizes: rows so far of each buffered sequence.
        held: tokens of the buffered sequences, in the order of the rows.
        openings: first rows of the buffered sequences, with the number of the first of them; their tables
            hold the columns that are constant within a sequence.
        flaws: sequence number → canonical column name and description of the defect.
    """

    plan: Plan
    tokens: int
    numbers: dict[object, int] = field(default_factory=dict)
    read: int = 0
    out: int = 0
    last: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    held: list[pa.Table] = field(default_factory=list)
    openings: list[tuple[int, Slice]] = field(default_factory=list)
    flaws: dict[int, tuple[str, str]] = field(default_factory=dict)

    def add(self, piece: Slice) -> None:
        """Add the next rows."""
        begun = len(self.numbers)
        numbers = self._number(piece)
        spans = Spans.of(numbers)
        self._advance(piece, spans, begun)
        self._open(piece, spans, begun)
        held = {NUMBER: pa.array(numbers)}
        for role in TOKENS:
            if role in self.plan.columns:  # in the widest type of its kind, since files may differ
                name = self.plan.columns[role]
                wide = pa.int64() if role in WHOLE else pa.float64()
                held[name] = dense(piece.table.column(name)).cast(wide, safe=False)
        self.held.append(pa.table(held))
        self.read += piece.table.num_rows

    def _number(self, piece: Slice) -> Ints:
        """Return the number of each row's sequence, [N]."""
        name = self.plan.columns[columns.SEQUENCE]
        ids = dense(piece.table.column(name))
        if pt.is_string(ids.type) or pt.is_large_string(ids.type):  # which may be invalid UTF-8
            ids = ids.cast(pa.large_binary())
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

    def _advance(self, piece: Slice, spans: Spans, begun: int) -> None:
        """Update the latest row of each sequence, and refuse gaps of more than `FAR` rows."""
        new = np.zeros(len(self.numbers) - begun, np.int64)
        self.last, self.sizes = np.concatenate((self.last, new)), np.concatenate((self.sizes, new))
        rows = spans.order + self.read
        open_ = self.last[np.maximum(spans.numbers - self.out, 0)]
        previous = np.concatenate(([0], rows[:-1]))
        previous[spans.begins] = np.where(spans.numbers < begun, open_, rows[spans.begins] - 1)
        previous[spans.begins[spans.numbers < self.out]] = -FAR - 2
        late = spans.order[rows - previous - 1 > FAR]
        if late.size:
            row, name = int(late.min()), self.plan.columns[columns.SEQUENCE]
            raise DumpError(
                f"{piece.place(row)}, column {name!r}: sequence {value(piece.table.column(name)[row])!r} "
                f"comes back after more than {FAR} rows of others",
                f"sort the dump by {name!r}, or write the rows of a sequence nearer to each other",
            )
        self.last[spans.numbers - self.out] = rows[spans.ends - 1]
        self.sizes[spans.numbers - self.out] += spans.ends - spans.begins
        if self.sizes.size and self.sizes.max() > MOST_TOKENS:
            row, name = spans.order[-1], self.plan.columns[columns.SEQUENCE]
            what = f"{piece.place(row)}, column {name!r}: a sequence has more than {MOST_TOKENS} tokens"
            raise DumpError(what, f"give every sequence an id of its own in {name!r}")

    def _open(self, piece: Slice, spans: Spans, begun: int) -> None:
        """Store the first row of each new sequence, and record later rows that differ in constant columns."""
        roles = {name: role for role, name in self.plan.columns.items()}
        constant = {name: roles.get(name, name) for name in self.plan.names}
        constant = {name: role for name, role in constant.items() if role not in TOKENS}
        heads = spans.order[spans.begins]
        first = heads[spans.numbers >= begun]
        if first.size:
            table = piece.table.select(list(constant)).take(pa.array(first))
            self.openings.append((begun, replace(piece, rows=piece.rows[first], table=table)))
        old = int(np.searchsorted(spans.numbers, begun))  # sequences that began in an earlier piece
        for name, role in constant.items():
            if role == columns.SEQUENCE:
                continue
            values = piece.table.column(name)
            differing = _differing(values, spans)
            for at in dict.fromkeys((*range(old), *differing)):
                number = int(spans.numbers[at])
                start, opening = self.openings[bisect_right(self.openings, number, key=itemgetter(0)) - 1]
                one = value(opening.table.column(name)[number - start])
                for row in (int(heads[at]), *differing.get(at, ())):
                    two = value(values[row])
                    if one != two and (one == one or two == two):  # NaN is NaN
                        text = (
                            f"a sequence has one value, and this one has {one!r} where it begins and "
                            f"{two!r} in row {piece.rows[row]} of {piece.file}"
                        )
                        self.flaws.setdefault(number, (role, text))

    def finished(self) -> Iterator[Slice]:
        """Yield sequences that can have no further rows, once these hold enough tokens."""
        open_ = np.flatnonzero(self.read - self.last - 1 <= FAR)
        count = int(open_[0]) if open_.size else len(self.last)
        if self.sizes[:count].sum() > WORTHWHILE * self.sizes.sum():
            yield from self.hand_out(count)

    def hand_out(self, count: int) -> Iterator[Slice]:
        """Yield the first `count` buffered sequences."""
        if not count:
            return
        begin, end = self.out, self.out + count
        tokens = pa.concat_tables(self.held).combine_chunks()
        go = tokens.column(NUMBER).to_numpy() < end
        self.held = [tokens.filter(pa.array(~go))]
        tokens = self._sorted(tokens.filter(pa.array(go)))
        offsets = starts(self.sizes[:count])
        self.last, self.sizes, self.out = self.last[count:], self.sizes[count:], end
        openings = self.openings
        self.openings = [one for one in openings if one[0] + len(one[1].rows) > end]
        for first, opening in openings:
            low, high = max(begin - first, 0), min(end - first, len(opening.rows))
            if low < high:
                cut = offsets[first + low - begin : first + high - begin + 1]
                yield from self._slices(first + low, opening.between(low, high), tokens, cut)

    def _sorted(self, tokens: pa.Table) -> pa.Table:
        """Sort tokens by sequence, position and row; record null and duplicate positions."""
        number = tokens.column(NUMBER).to_numpy()
        name = self.plan.columns.get(columns.POSITION)
        if name is None:
            order = np.argsort(number, kind="stable")
        else:
            null = tokens.column(name).is_null().to_numpy()
            position = tokens.column(name).fill_null(0).to_numpy()
            order = np.lexsort((position, number))
            number, position = number[order], position[order]
            twice = np.flatnonzero((np.diff(number) == 0) & (np.diff(position) == 0))
            self._note(number, np.flatnonzero(null[order]), lambda _: "it is null in a row of the sequence")
            self._note(number, twice, lambda row: f"two rows of the sequence are at position {position[row]}")
        return tokens if (np.diff(order) == 1).all() else tokens.take(pa.array(order))

    def _note(self, number: Ints, bad: Ints, text: Callable[[int], str]) -> None:
        """Record the first bad row of each sequence; rows [N] are sorted by sequence number."""
        sequences, first = np.unique(number[bad], return_index=True)
        for sequence, row in zip(sequences.tolist(), bad[first].tolist(), strict=True):
            self.flaws.setdefault(sequence, (columns.POSITION, text(row)))

    def _slices(self, first: int, opening: Slice, tokens: pa.Table, offsets: Ints) -> Iterator[Slice]:
        """Yield the sequences from number `first` on as slices; their tokens lie at `offsets` [S+1]."""
        for begin, end in cuts(offsets, self.tokens):
            part = tokens.slice(offsets[begin], offsets[end] - offsets[begin])
            bounds = pa.array(offsets[begin : end + 1] - offsets[begin])
            found = opening.between(begin, end)
            table = found.table
            for name in part.column_names[1:]:
                values = part.column(name).combine_chunks()
                table = table.append_column(name, pa.LargeListArray.from_arrays(bounds, values))
            yield replace(found, table=table, problems=self._problems(first + begin, first + end))

    def _problems(self, begin: int, end: int) -> tuple[Problem, ...]:
        """Return and remove the defects of some sequences, by column."""
        by_role: dict[str, list[tuple[int, str]]] = {}
        for number in range(begin, end):
            if number in self.flaws:
                role, text = self.flaws.pop(number)
                by_role.setdefault(role, []).append((number - begin, text))
        return tuple(
            Problem(role, np.array([row for row, _ in some]), [text for _, text in some].__getitem__, SKIP)
            for role, some in by_role.items()
        )


def _differing(column: pa.Array, spans: Spans) -> dict[int, tuple[int]]:
    """Find sequences with differing values in a piece: index in the spans → the first differing row."""
    plain = dense(column)
    if pt.is_null(plain.type):
        return {}
    codes = plain.dictionary_encode(null_encoding="encode").indices.to_numpy()[spans.order]
    bad = np.flatnonzero(codes != np.repeat(codes[spans.begins], spans.ends - spans.begins))
    which, at = np.unique(np.searchsorted(spans.begins, bad, side="right") - 1, return_index=True)
    rows = spans.order[bad[at]]
    return {index: (row,) for index, row in zip(which.tolist(), rows.tolist(), strict=True)}


def value(scalar: pa.Scalar) -> Any:
    """Return a Python value for messages and comparisons; invalid UTF-8 becomes replacement characters."""
    try:
        found = scalar.as_py()
    except UnicodeDecodeError:
        found = scalar.as_buffer().to_pybytes()
    return found.decode(errors="replace") if isinstance(found, bytes) else found
