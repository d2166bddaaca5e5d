"""Bins of sequences by length: eight to an octave, the same on every device."""

import pytest
import torch

from offpol_diag.engine.selection import LENGTH_BINS, length_bin
from tests.devices import DEVICES, present

LENGTHS = [*range(1, 2000), *(2**n + by for n in range(11, 31) for by in (-1, 0, 1))]


@pytest.mark.parametrize("device", DEVICES)
def test_the_bin_of_a_length_is_the_whole_part_of_eight_times_its_logarithm(device):
    with present(device):
        found = length_bin(torch.tensor(LENGTHS).to(device)).tolist()

    assert found == [min((length**8).bit_length() - 1, LENGTH_BINS - 1) for length in LENGTHS]


def test_a_sequence_without_a_token_is_in_the_first_bin():
    assert length_bin(torch.tensor([0, 1])).tolist() == [0, 0]
