"""Where a mismatch lives: the cut of one column that best separates damaged tokens from clean ones.

The level of a token is min(K3, `CAP`). Of each split (`splits`) the cut is taken that gains most deviance of
an exponential model of the level, as a regression tree would split; a second one may cut what is inside a
split of sequences. A cut is kept where levels differ `RATIO`-fold, the inside carries at least half, and
groups agree.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.rows import Flags, Floats, Ints, Rows, numbered
from offpol_diag.diagnosis.splits import Split, splits
from offpol_diag.numerals import rounded
from offpol_diag.result import Location

CAP, FLOOR = 4.0, 1e-7
"""Largest level of a token, nats, so that none decides alone; and level below which tokens count as equal."""
RATIO, CARRIED, FEWEST = 5.0, 0.5, 30
"""Of a cut: least ratio of the levels, least share of the whole level inside, fewest tokens of a side."""
LEVEL, GAIN, MOST = 0.001, 0.3, 0.9
"""Of an established place: least level inside (rounding makes less), least gain, largest share of the tokens.
Of 217 dumps with known causes no healthy one has such a place."""
SURE, FEW, SHUFFLES = 6.0, 30, 100
"""Standard errors over groups by which levels differ, as the best of some 10,000 cuts is taken; groups below
which half of that is enough, if no such number of shufflings of the labels gains as much."""
SPAN, SECOND, CODES = 0.2, 0.3, 256
"""What a second end of a cut must gain, and a second split beyond any single one; most places at which a cut
of two ends may begin or end (a cut of one end may at any)."""
SEEDS, TRIED, LISTED, AS_WELL = 3, 8, 3, 0.8
"""First splits that are split again, cuts of a split that are tried, most places that are listed, and least
gain of each in that of the first: what gains less goes with it."""


class Column(NamedTuple):
    """The tokens by one split: values and their codes (−1: none), [T], and the number of different values.

    Cuts go along the codes: rising values, or those of the highest level first where values have no order.
    """

    split: Split
    values: Floats
    codes: Ints
    many: int
    of_sequences: bool


class Cut(NamedTuple):
    """A cut of some tokens, `within` [T], into those `inside` [T] and the rest.

    `score` is what it gains, less `SPAN` for a second end.
    """

    column: Column
    inside: Flags
    score: float
    within: Flags

    def words(self, some: Flags) -> tuple[str, str] | None:
        """Return in words either side of the cut, `some`, and the rest; None if it is no interval."""
        split, values, codes, *_ = self.column
        if split.kinds:
            names = [split.kinds[int(one)] for one in np.unique(values[some & (codes >= 0)])]
            return split.noun.format(" or ".join(names)), "elsewhere"
        low, high, rest = codes[some].min(), codes[some].max(), codes[self.within & ~some]
        if low < 0 or ((rest > low) & (rest < high)).any():
            return None
        first = values[some].min() if low > codes.min() else None
        return split.words(first, values[some].max() if (rest > high).any() else None)


class Search(NamedTuple):
    """The search for cuts: rows, level of each token, [T] nats, and its group (a prompt of a step), [T]."""

    rows: Rows
    level: Floats
    group: Ints

    def column(self, split: Split) -> Column | None:
        """Order the tokens by a split; None where all are alike."""
        found = split.values(self.rows)
        if found is None:
            return None
        of_sequences = len(found) < self.rows.tokens
        values = np.asarray(found[self.rows.owner] if of_sequences else found, np.float64)
        different = np.unique(values[~np.isnan(values)])
        codes = np.where(np.isnan(values), -1, np.searchsorted(different, values))
        if split.kinds and len(different):
            tokens, level = self.sums(codes, len(different))
            codes = np.where(codes < 0, -1, np.argsort(np.argsort(-level / np.maximum(tokens, 1)))[codes])
        alike = codes.min() == codes.max()
        return None if alike else Column(split, values, codes, len(different), of_sequences)

    def sums(self, codes: Ints, many: int) -> tuple[Floats, Floats]:
        """Return the number of tokens of each code, and the sum of their levels, [C] each."""
        tokens, level = (np.bincount(codes + 1, weights, many + 1)[1:] for weights in (None, self.level))
        return np.asarray(tokens, np.float64), np.asarray(level, np.float64)

    def gains(self, column: Column, codes: Ints) -> tuple[Ints, Ints, Floats]:
        """Return the codes from which to before which each cut goes, and its gain; −inf where it is none."""
        tokens, whole, many = len(self.level), self.level.sum(), column.many
        n, x = (np.concatenate(([0.0], np.cumsum(one))) for one in self.sums(codes, many))
        ends = np.arange(1, many)
        low, high = np.zeros_like(ends), ends
        if not column.split.kinds:
            grid = np.linspace(0, many, min(many, CODES) + 1).astype(np.int64)
            first, last = (grid[at] for at in np.triu_indices(len(grid), 1))
            low, high = np.concatenate((low, ends, first)), np.concatenate((high, ends * 0 + many, last))
        size, held = n[high] - n[low], x[high] - x[low]
        inside, outside = held / np.maximum(size, 1), (whole - held) / np.maximum(tokens - size, 1)
        gain = gained(size / tokens, inside, outside) - SPAN * ((low > 0) & (high < many))
        fits = (np.minimum(size, tokens - size) >= FEWEST) & (held >= CARRIED * whole)
        return low, high, np.where(fits & (inside > outside), gain, -np.inf)

    def best(self, column: Column, within: Flags) -> Cut | None:
        """Return the cut of some tokens from all others that gains most, of those on which groups agree."""
        codes = np.where(within, column.codes, -1)
        low, high, gain = self.gains(column, codes)
        for at in np.argsort(-gain)[:TRIED]:
            inside = (codes >= low[at]) & (codes < high[at])
            if gain[at] > -np.inf and self.agreed(inside):
                return Cut(column, inside, float(gain[at]), within)
        return None

    def agreed(self, inside: Flags) -> bool:
        """Return whether the levels surely differ, by linearisation over groups."""
        groups, difference, error = int(self.group.max()) + 1, 0.0, np.zeros(1)
        for sign, some in ((1, inside), (-1, ~inside)):
            n = np.bincount(self.group[some], minlength=groups)
            x = np.bincount(self.group[some], self.level[some], groups)
            mean = x.sum() / n.sum()
            difference, error = difference + sign * mean, error + sign * (x - mean * n) / n.sum()
        sure = SURE if groups >= FEW else SURE / 2
        return bool(difference > sure * np.sqrt(np.square(error).sum()))

    def by_chance(self, cut: Cut) -> bool:
        """Return whether groups are few, and shuffled labels of groups, sequences or tokens gain as much.

        What differs within sequences is rotated in each of them, as neighbours have levels alike.
        """
        if self.group.max() + 1 >= FEW:
            return False
        rows, codes, chance = self.rows, cut.column.codes, np.random.default_rng(0)
        for units in (self.group, rows.owner, np.arange(rows.tokens)):
            first = np.unique(units, return_index=True)[1]
            if (codes == codes[first][units]).all():
                break
        for _ in range(SHUFFLES):
            turned = (rows.index + chance.integers(0, rows.lengths)[rows.owner]) % rows.lengths[rows.owner]
            at = rows.starts[rows.owner] + turned
            if len(first) < rows.tokens:
                at = first[chance.permutation(len(first))[units]]
            if self.gains(cut.column, np.where(cut.within, codes[at], -1))[2].max() >= cut.score:
                return True
        return False

    def location(self, cuts: list[Cut]) -> Location:
        """Describe the tokens inside the last cut; the sentence is of the smaller side where both fit."""
        last, level = cuts[-1], self.level
        share, inside, outside = last.inside.mean(), level[last.inside].mean(), level[~last.inside].mean()
        words = [one for cut in cuts if (one := cut.words(cut.inside))]
        inner, rest = ", ".join(one for one, _ in words), words[0][1] if len(cuts) == 1 else "elsewhere"
        sentence = f"K3 is {rounded(inside)} {inner} and {rounded(outside)} {rest}."
        if len(cuts) == 1 and share > 0.5 and (other := last.words(~last.inside)):
            sentence = f"K3 is {rounded(outside)} {other[0]} and {rounded(inside)} {other[1]}."
        return Location(
            split=" and ".join(cut.column.split.id for cut in cuts),
            words=inner,
            sentence=sentence,
            inside=inside,
            outside=outside,
            share=share,
            gain=float(gained(share, inside, outside)),
            measure=last.column.split.measure,
        )


def gained(share: Floats, inside: Floats, outside: Floats) -> Floats:
    """Compute log m − s log a − (1 − s) log b for levels a and b of shares s and 1 − s, of mean m."""
    a, b = np.maximum(inside, FLOOR), np.maximum(outside, FLOOR)
    return np.asarray(np.log(share * a + (1 - share) * b) - share * np.log(a) - (1 - share) * np.log(b))


def locate(rows: Rows) -> list[Location]:
    """Return the places that separate damaged tokens from clean ones and are established, clearest first."""
    delta = np.clip(rows.delta, -30, 30)
    level = np.minimum(np.expm1(delta) - delta, CAP)
    if not level.any():
        return []
    group = numbered(zip(rows.weights.tolist(), rows.group.tolist(), strict=True))
    search = Search(rows, level, group[rows.owner])
    columns = [column for column in map(search.column, splits(rows)) if column]
    single = [cut for column in columns if (cut := search.best(column, rows.every))]
    found = [[cut] for cut in single]
    first_cuts = sorted((cut for cut in single if cut.column.of_sequences), key=lambda cut: -cut.score)
    for first, column in product(first_cuts[:SEEDS], columns):
        second = search.best(column, first.inside)
        if second and second.score > max(cut.score for cut in single) + SECOND:
            found.append([first, second])
    places: list[Location] = []
    for cuts in sorted(found, key=lambda cuts: -round(cuts[-1].score, 1)):
        place = search.location(cuts)
        if place.inside < max(LEVEL, RATIO * place.outside) or place.gain < GAIN or place.share > MOST:
            continue
        as_clear = not places or place.gain >= AS_WELL * places[0].gain
        if as_clear and len(places) < LISTED and not search.by_chance(cuts[-1]):
            places.append(place)
    return places
