"""Rows of numbers per sequence keep their names however they are put together."""

import pytest
import torch

from offpol_diag.engine import method
from offpol_diag.engine.rows import Rows, Sheet
from offpol_diag.engine.stack import Stack
from offpol_diag.presets import Preset


def _read(sheet):
    return dict(zip(sheet.names, sheet.values.tolist(), strict=True))


def _row(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_every_row_of_joined_sheets_lies_under_its_own_name():
    one = Sheet.of({"a": _row(1, 2), "b": _row(3, 4)})
    two = Sheet(("c", "d"), (_row(5, 6)[None], _row(7, 8)[None]))

    assert _read(Sheet.joined(one, two)) == {"a": [1, 2], "b": [3, 4], "c": [5, 6], "d": [7, 8]}


def test_sheets_of_other_sequences_are_laid_beside_each_other_in_order():
    one, two = Sheet.of({"a": _row(1, 2), "b": _row(3, 4)}), Sheet.of({"a": _row(5), "b": _row(6)})

    assert _read(Sheet.beside([one, two])) == {"a": [1, 2, 5], "b": [3, 4, 6]}


class _Scene:
    counts = {"tokens": _row(3, 4)}  # noqa: RUF012


def test_a_column_of_many_presets_has_a_row_under_each_ones_name():
    presets = (Preset("x", "", "old"), Preset("y", "", "old"))
    stack = Stack(_Scene(), presets, ())
    named = stack.named({"own": Rows(torch.stack((_row(5, 6), _row(1, 2))), (1, 0)), "shared": _row(8, 9)})

    assert _read(named) == {"x|own": [1, 2], "y|own": [5, 6], "x|shared": [8, 9], "y|shared": [8, 9]}


def test_no_preset_has_no_column():
    assert method.columns(Stack(_Scene(), (), ())).names == ()


def test_names_of_one_tensor_share_a_row_and_those_of_equal_ones_do_not():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    sheet = Sheet.shared({"a": x, "b": y, "c": x, "d": x.clone()})

    assert sheet.names == ("a", "b", "c", "d")
    assert torch.cat(sheet.parts).tolist() == [[1, 2], [3, 4], [1, 2]]
    assert sheet.which is not None
    assert sheet.which.tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize("columns", [(0, 2, 5), (4, 1), (3,), (), range(6)])
def test_some_columns_keep_their_names_and_bring_no_other_rows(columns):
    one = Sheet(("a", "b", "c"), (torch.stack((_row(1, 2), _row(3, 4))),), torch.tensor([1, 0, 1]))
    two = Sheet(("d", "e", "f"), (_row(5, 6)[None], torch.stack((_row(7, 8), _row(9, 0)))))
    every = Sheet.joined(one, two)
    some = every.only(columns)

    assert _read(some) == {every.names[at]: _read(every)[every.names[at]] for at in columns}
    assert _read(some.trimmed) == _read(some)
    assert some.trimmed.height == len({tuple(row) for row in _read(some).values()})


def test_no_column_of_no_sheet():
    none = Sheet((), ()).only(()).trimmed

    assert none.names == none.parts == ()
