"""The smallest and largest of many are found in one go, whatever parts each of them has."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offpol_diag.crosswalk.ends import among, outermost, rows

INF = math.inf


def _row(*values):
    return torch.tensor(values, dtype=torch.float64)


def _read(found):
    return {name: (float(low), float(high)) for name, (low, high) in found.items()}


def test_ends_of_rows_turns_and_single_numbers_keep_their_names_and_order():
    ranges = {
        "rows": (_row(3, 1, 2), _row(4, 7, 5)),
        "one": (_row(8)[0], _row(9)[0]),
        "turns": (_row(6, 5, 4, 3), _row(6, 5, 4, 3)),
        "more rows": (_row(-1, 0, 1), _row(0, 0, 2)),
    }
    found = outermost(ranges)

    assert _read(found) == {"rows": (1, 7), "one": (8, 9), "turns": (3, 6), "more rows": (-1, 2)}
    assert list(found) == list(ranges)


def test_where_there_is_nothing_the_ends_are_infinite_and_nan_is_told():
    nothing, bad = torch.empty(0, dtype=torch.float64), _row(1, math.nan)
    found = _read(outermost({"nothing": (nothing, nothing), "bad": (bad, bad)}))

    assert found["nothing"] == (INF, -INF)
    assert all(math.isnan(end) for end in found["bad"])
    assert outermost({}) == {}


def test_rows_that_are_not_there_have_no_say():
    there = torch.tensor([False, True, True])
    low, high = rows(_row(-9, 2, 3), there)

    assert (low.tolist(), high.tolist()) == ([INF, 2, 3], [-INF, 2, 3])
    assert among((_row(1, 5, 2), _row(9, 6, 7)), there)[1].tolist() == [-INF, 6, 7]
    assert rows(_row(1, 2))[0].tolist() == [1, 2]


class _Reductions(TorchDispatchMode):
    """Counts searches for a smallest or largest value."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += str(func).startswith(("aten.amin", "aten.amax", "aten.min", "aten.max", "aten.aminmax"))
        return func(*args, **(kwargs or {}))


def test_the_ends_of_many_are_looked_for_as_often_as_those_of_one():
    counts = []
    for many in (1, 50):
        with _Reductions() as seen:
            outermost({f"x{i}": (_row(1, 2), _row(3, 4)) for i in range(many)})
        counts.append(seen.count)

    assert counts == [2, 2]
