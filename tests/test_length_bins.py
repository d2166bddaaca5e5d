"""Bins of sequences by length: eight to an octave, the same on every device."""

import pytest
import torch

from offpol_diag.engine.selection import LENGTH_BINS, by_quartile, length_bin
from tests.devices import DEVICES, present

LENGTHS = [*range(1, 2000), *(2**n + by for n in range(11, 31) for by in (-1, 0, 1))]


@pytest.mark.parametrize("device", DEVICES)
def test_the_bin_of_a_length_is_the_whole_part_of_eight_times_its_logarithm(device):
    with present(device):
        found = length_bin(torch.tensor(LENGTHS).to(device)).tolist()

    assert found == [min((length**8).bit_length() - 1, LENGTH_BINS - 1) for length in LENGTHS]


def test_a_sequence_without_a_token_is_in_the_first_bin():
    assert length_bin(torch.tensor([0, 1])).tolist() == [0, 0]


def test_sums_by_quartile_are_the_same_however_the_grid_lies_in_memory():
    """It lies otherwise where states come from worker processes; a product of matrices rounds by layout."""
    random = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 50, (LENGTH_BINS, 1), generator=random).double()
    tokens = sequences * torch.randint(1, 900, (LENGTH_BINS, 1), generator=random)
    kept = (tokens * torch.rand(LENGTH_BINS, 2000, dtype=torch.float64, generator=random)).floor()
    grid = torch.cat((sequences, tokens, kept), dim=1)

    by_column = grid.T.contiguous().T
    elsewhere = torch.cat((torch.zeros(1).double(), grid.flatten()))[1:].view(grid.shape)

    assert torch.equal(by_quartile(grid), by_quartile(by_column))
    assert torch.equal(by_quartile(grid), by_quartile(elsewhere))
