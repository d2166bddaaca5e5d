"""Rows that several presets share are made once, and each preset reads what it would have had alone."""

import torch

from offpol_diag.engine.rows import Rows, Sheet, distinct, joined, together, woven


def of(values, at):
    return Rows(torch.tensor(values, dtype=torch.float64), at)


A = of([[1, 2], [3, 4]], (0, 1, 0, 1))
B = of([[5, 6], [7, 8]], (0, 0, 1, 1))


def test_each_preset_reads_its_row():
    assert A.all.tolist() == [[1, 2], [3, 4], [1, 2], [3, 4]]
    assert A.of([3, 0]).all.tolist() == [[3, 4], [1, 2]]
    assert A.map(torch.neg).all.tolist() == (-A.all).tolist()


def test_the_same_tensor_is_one_row():
    x, y = torch.zeros(2), torch.ones(2)
    found = Rows.of_tensors([x, y, x, torch.zeros(2)])

    assert found.at == (0, 1, 0, 2)
    assert found.all.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_two_of_equal_places_are_joined_row_by_row():
    assert joined(torch.mul, A, A).values.tolist() == [[1, 4], [9, 16]]


def test_every_combination_that_occurs_is_made_once():
    sizes = []

    def times(x, y):
        sizes.append(len(x))
        return x * y

    thrice = joined(times, A, of([[1, 1], [2, 2]], (0, 1, 0, 1)))
    found = joined(times, A, B)

    assert sizes == [2, 4]
    assert torch.equal(found.all, A.all * B.all)
    assert thrice.all.tolist() == [[1, 2], [6, 8], [1, 2], [6, 8]]


def test_rows_that_no_preset_has_are_left_out():
    (x,), at = together(of([[9, 9], [1, 2]], (1, 1)))

    assert x.tolist() == [[1, 2]]
    assert at == (0, 0)


def test_rows_of_some_presets_and_of_the_others_are_woven():
    found = woven({(1, 3): A.of([1, 3]), (0, 2): B.of([0, 2])})

    assert found.all.tolist() == [[5, 6], [3, 4], [7, 8], [3, 4]]


def test_distinct_keys_are_told_by_where_they_are_first():
    assert distinct([]) == ([], ())
    assert distinct([0, None, False, (), 0, None]) == ([0, 1, 3], (0, 1, 0, 2, 0, 1))


def test_names_of_one_tensor_share_a_row_of_a_sheet():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0])
    sheet = Sheet.shared({"a": x, "b": y, "c": x})

    assert sheet.height == 2
    assert sheet.values.tolist() == [[1, 2]] * 3
