"""A dump, opened: what it is, and its sequences as batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from offpol_diag.batch import Batch
from offpol_diag.errors import DumpError
from offpol_diag.readers import files, kinds
from offpol_diag.readers.columns import MASK, ROLLOUT
from offpol_diag.readers.files import DumpInfo, Part
from offpol_diag.readers.join import join
from offpol_diag.readers.long import gathered
from offpol_diag.readers.pack import keep_memory, pack
from offpol_diag.readers.reel import Reel
from offpol_diag.readers.schemas import Plan, agree
from offpol_diag.readers.signs import Count, Signs
from offpol_diag.readers.sizes import Size, share, sizes
from offpol_diag.readers.skipping import Sieve, Skipped
from offpol_diag.readers.slices import Slice, slices, tokens_in
from offpol_diag.readers.sources import find

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Noticed:
    """What a reading noticed beside its batches.

    Attributes:
        rows: sequences, bad ones included.
        tokens: that were kept.
        skipped: rows left out.
        signs: what was seen of the signs of the train columns, by our name.
    """

    rows: int
    tokens: int
    skipped: Skipped
    signs: dict[str, Count]


@dataclass
class Dump:
    """A dump whose files, columns and types were found right; its values are judged as they are read.

    Attributes:
        info: what a report says of it.
        skipped: rows left out by the last reading so far.
    """

    info: DumpInfo
    _parts: list[Part]
    _plan: Plan
    _skip: bool
    _tokens: int
    skipped: Skipped = field(default_factory=Skipped)
    _signs: Signs | None = None
    _kept: int = 0
    _shard: bool = False
    _waits: bool = False
    _before: int = 0
    _rate: float = 0.0
    _reel: Reel = field(default_factory=Reel, compare=False, repr=False)

    @property
    def long(self) -> bool:
        """Whether a row is a token."""
        return self._plan.form.long

    def shard(self, parts: Sequence[Part], before: int) -> Dump:
        """Some of its rows as a dump, of which it is no error to hold no token.

        Args:
            parts: files, or row groups of them.
            before: rows of the files before them.
        """
        info = replace(self.info, rows=sum(part.rows for part in parts))
        first = before + sum(parts[0].group_rows[: parts[0].groups.start]) + (parts[0].between or (0,))[0]
        begun = Dump(info, list(parts), self._plan, self._skip, self._tokens, _rate=self._rate)
        return replace(begun, _shard=True, _waits=first > 0, _before=before, _reel=self._reel)

    def only(self, roles: Collection[str]) -> Dump:
        """The same dump with no more than some columns, by our names; batches lack all else.

        They have no positions, turns or keys either. The dump itself, where rows are left out or put together
        by what stands in all their columns.
        """
        if self._skip or self.long:
            return self
        needed = {ROLLOUT, MASK, *roles}
        plan = self._plan.only(needed)
        return replace(self, _plan=plan, skipped=Skipped(), _signs=None, _reel=Reel())

    @property
    def rows(self) -> int:
        """Rows of the files, bad ones included: a sequence each, or a token each in the long form."""
        return sum(part.rows for part in self._parts)

    @property
    def batch_tokens(self) -> int:
        """How many tokens, masked ones included, are held at once."""
        return self._tokens

    @property
    def tokens(self) -> float:
        """About how many its files hold, masked ones included.

        Raises:
            DumpError: its first file does not open any more.
        """
        return sum(self.group_tokens)

    @property
    def group_tokens(self) -> list[float]:
        """About how many each row group holds that is read, masked ones included.

        By its bytes before compression, and what they are to a token in the first of them.

        Raises:
            DumpError: the first file does not open any more.
        """
        found = sizes(self._parts, by_rows=self.long)
        filled = next((one for one in found if one[2]), None)
        if filled and not self._rate:
            part, group, size = filled
            self._rate = max(tokens_in(part, group, self._plan), 1) / size
        return [self._rate * size * share(part, group) for part, group, size in found]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its files, those without rows left out."""
        return tuple(self._parts)

    @property
    def signs(self) -> dict[str, Count]:
        """What the last reading so far saw of the signs of columns, by their names in the dump."""
        counts = self._signs.counts if self._signs else {}
        return {self._plan.columns[role]: count for role, count in counts.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings from opening and from the last reading; complete once the reading ended."""
        return (*_padding(self._parts[0], self._plan), *(self._signs.notes() if self._signs else ()))

    def batches(self, progress: Progress | None = None, even: bool = False) -> Iterator[Batch]:
        """The sequences as CPU float64 batches, in the order of the files; it can be called again.

        Args:
            progress: Called with the number of rows just read, bad ones included; they add up to `rows`.
            even: Whether they may be a little larger than was asked for, to be of about one size: a small one
                costs what a large one does beside its tokens.

        Yields:
            Batches of at most about `batch_tokens` tokens, or of one sequence.

        Raises:
            DumpError: A bad row (unless skipped), corrupt data, a column of the wrong sign, or nothing left:
                every row skipped or every token masked.
        """
        keep_memory()
        self.skipped, self._signs, self._kept = Skipped(), Signs(self._plan, waits=self._waits), 0
        size = Size.evenly(self.tokens, self._tokens) if even else Size(self._tokens)
        for batch in join(self._packed(size, self._signs, progress), size.most, size.aim):
            self._kept += batch.tokens
            if self._kept or self._shard:
                yield batch
        if not (self._kept or self._shard):
            raise self._nothing()

    def noticed(self) -> Noticed:
        """What the last reading noticed; complete once it ended."""
        signs = self._signs.counts if self._signs else {}
        return Noticed(self.info.rows, self._kept, self.skipped, signs)

    def notice(self, shards: Iterable[Noticed]) -> None:
        """Know what the readings of its shards noticed, in order, as if all of it had been read here.

        Raises:
            DumpError: a column of the wrong sign, or nothing left.
        """
        self.skipped, self._signs, self._kept, rows = Skipped(), Signs(self._plan), 0, 0
        for one in shards:
            rows += one.rows
            self._kept += one.tokens
            self.skipped.merge(one.skipped)
            self._signs.merge(one.signs)
        self.info = replace(self.info, rows=rows)
        if not self._kept:
            raise self._nothing()

    def _packed(self, size: Size, signs: Signs, progress: Progress | None) -> Iterator[Batch]:
        sieve = Sieve(self._plan, self._skip, self.skipped)
        sequences = 0
        for piece in self._slices(size, progress or (lambda _: None)):
            good, rows = sieve.sift(piece)
            signs.see(good, rows)
            if len(good.rows):
                yield pack(good, rows, self._plan)
            sequences += len(piece.rows)
        self.info = replace(self.info, rows=sequences)

    def _slices(self, size: Size, progress: Progress) -> Iterator[Slice]:
        if self._plan.form.long:
            yield from gathered(self._parts, self._plan, size.most, progress)
            return
        before, held = self._before, iter(self.group_tokens if size.even else ())
        for part in self._parts:
            most = {at: size.of(next(held, 0.0)) for at in part.groups}
            for piece in slices(part, self._plan, before, most, self._reel):
                yield piece
                progress(len(piece.rows))
            before += sum(part.group_rows)

    def _nothing(self) -> DumpError:
        name = _named(self._parts)
        if self.skipped.count == self.info.rows:
            return DumpError(
                f"{name}: every row was skipped, all {self.info.rows}; the first: {self.skipped.examples[0]}",
                "mend what is wrong with the first, then read again",
            )
        return DumpError(f"{name}: no token is left in {self.info.rows} rows", _masked_hint(self._plan))


def _masked_hint(plan: Plan) -> str:
    mask = plan.columns.get(MASK)
    if mask is None:
        return "every list is empty; check the writer"
    return f"column {mask!r} excludes every token; 1 is a token that counts, 0 one that does not"


def open_dump(
    sources: Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    batch_tokens: int = 1_000_000,
) -> Dump:
    """Open a dump and check its files, columns and types; values are read by `Dump.batches`.

    Args:
        sources: Parquet files, directories (searched recursively for *.parquet) and globs.
        columns: Which column plays a part, where its name does not say: `{"rollout": "my_logps"}`. A part is
            one of rollout, old, current, mask, or a canonical column name.
        group_by: Columns with one value per row that should reach `Batch.scalars`.
        on_bad_row: Whether a bad row is an error or is left out and counted.
        batch_tokens: How many tokens, masked ones included, are held at once.

    Raises:
        DumpError: A source that cannot be found or read, a column that is missing, ambiguous or of the wrong
            type, files that differ, or no row at all.
    """
    parts = files.describe(find(sources))
    filled = [part for part in parts if part.rows]
    if not filled:
        raise DumpError(
            f"{_named(parts)}: the dump is empty: it has no row", "check that its writer was closed"
        )
    plan = agree(filled, columns or {}, group_by)
    return Dump(_info(parts, plan), filled, plan, on_bad_row == "skip", max(1, batch_tokens))


def _info(parts: Sequence[Part], plan: Plan) -> DumpInfo:
    return DumpInfo(
        files=tuple(str(part.path) for part in parts),
        rows=sum(part.rows for part in parts),
        row_groups=sum(len(part.group_rows) for part in parts),
        bytes=sum(part.bytes for part in parts),
        columns=dict(plan.columns),
        provenance=files.merged(part.provenance for part in parts),
    )


def _named(parts: Sequence[Part]) -> str:
    rest = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return ", ".join(str(part.path) for part in parts[:3]) + rest


def _padding(part: Part, plan: Plan) -> tuple[str, ...]:
    """A warning where padding may be taken for tokens."""
    column = plan.columns[ROLLOUT]
    if MASK in plan.columns or not kinds.is_padded(part.schema.field(column).type):
        return ()
    return (f"{column!r} is padded to one length and there is no {MASK}: padding, if any, counts as tokens",)
