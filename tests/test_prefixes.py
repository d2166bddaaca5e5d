"""Check sequences by their length: ESS of their products against plain Python, and bins of dropped ones."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offpol_diag.core.observe import analyze
from offpol_diag.engine.prefixes import FEWEST, GRID
from offpol_diag.engine.selection import LENGTH_BINS, length_bin
from offpol_diag.number import Number
from offpol_diag.result import Lengths
from tests import oracles
from tests.oracles import Sequence


def ess_at(sequences: list[Sequence], tokens: int) -> tuple[int, float]:
    """Count the sequences of so many tokens, and compute (Σw)² / (n Σw²) of the products over them."""
    logs = [math.fsum(one.delta("old")[:tokens]) for one in sequences if one.n >= tokens]
    weights = [math.exp(log - max(logs)) for log in logs]
    many = len(logs)
    return many, math.fsum(weights) ** 2 / (many * math.fsum(w * w for w in weights))


def longest(curve: list[tuple[int, float]]) -> float | None:
    """Try every whole T: log ESS is a line between two lengths, and 0 at none."""
    ends = [(0, 1.0), *curve]
    for (t0, e0), (t1, e1) in pairwise(ends):
        inside = [t for t in range(t0, t1 + 1) if _line(t, t0, e0, t1, e1) >= math.log(0.1)]
        if t1 not in inside:
            return float(max(inside))
    return None


def _line(t: int, t0: int, e0: float, t1: int, e1: float) -> float:
    return math.log(e0) + (math.log(e1) - math.log(e0)) * (t - t0) / (t1 - t0)


def lengths(*paths: str | Path, **how: Any) -> Lengths:
    found = analyze([str(path) for path in paths], **{"device": "cpu", "presets": (), **how}).lengths
    assert found is not None
    return found


def test_ess_at_every_length_is_that_of_plain_python(tmp_path):
    for sigma in (0.05, 0.6, 3.0):
        rows = oracles.make_rows(sigma, many=240)
        found = lengths(oracles.write(rows, tmp_path / "d.parquet"))
        sequences = oracles.sequences(rows)
        enough = [t for t in GRID if sum(one.n >= t for one in sequences) >= FEWEST]

        assert [at.tokens for at in found.curve] == enough
        for at in found.curve:
            many, ess = ess_at(sequences, at.tokens)
            assert (at.sequences, at.ess_sequences.value) == (many, pytest.approx(ess, rel=1e-9))
            assert at.ess_sequences.interval[0] <= ess <= at.ess_sequences.interval[1]
        assert found.longest.value == longest([(at.tokens, at.ess_sequences.value) for at in found.curve])


def test_the_longest_response_has_the_ends_of_the_curves_interval_for_its_own():
    found = lengths("sample_data/collapse.parquet")
    low, high = ([(at.tokens, at.ess_sequences.interval[end]) for at in found.curve] for end in (0, 1))

    assert (found.longest.value, found.longest.interval) == (42.0, (23.0, 181.0))
    assert (longest(low), longest(high)) == (23.0, None)  # never above 10% at the end: as far as is known
    assert found.curve[-1].tokens == 181


@pytest.mark.parametrize(("name", "said"), [("healthy", "181"), ("stale", "128")])
def test_the_longest_length_is_unknown_where_every_length_keeps_a_tenth(name, said):
    found = lengths(f"sample_data/{name}.parquet").longest

    assert found.value is None
    assert found.unknown.startswith(f"beyond the longest responses ({said} tokens, which ")


def test_no_length_keeps_a_tenth_where_a_single_token_does_not(tmp_path):
    rows = oracles.make_rows(0.1, many=200)
    for row in rows[:2]:
        row["response_mask"] = [1] * len(row["rollout_log_probs"])
        row["old_log_probs"] = [log + 12.0 for log in row["rollout_log_probs"]]
    found = lengths(oracles.write(rows, tmp_path / "d.parquet")).longest

    assert (found.value, found.interval[0]) == (0.0, 0.0)


def test_fewer_than_fifty_responses_have_no_longest_length(tmp_path):
    found = lengths(oracles.write(oracles.make_rows(0.1, many=FEWEST - 1), tmp_path / "d.parquet"))

    assert (found.longest.value, found.longest.unknown) == (None, "fewer than 50 responses")
    assert found.curve == []


def test_batches_change_no_length():
    few = lengths("sample_data/collapse.parquet", batch_tokens=12_000)
    whole = lengths("sample_data/collapse.parquet")
    for one, two in zip(few.curve, whole.curve, strict=True):
        assert (one.tokens, one.sequences) == (two.tokens, two.sequences)
        same(one.ess_sequences, two.ess_sequences)
    same(few.longest, whole.longest)


def same(one: Number, two: Number) -> None:
    values = [[x.value, *(x.interval or ())] for x in (one, two)]
    assert values[0] == pytest.approx(values[1], rel=1e-9)


# ---------------------------------------------------------------- bins, eight to an octave

LENGTHS = [*range(1, 2000), *(2**n + by for n in range(11, 31) for by in (-1, 0, 1))]


def test_the_bin_of_a_length_is_the_whole_part_of_eight_times_its_logarithm():
    """And the first one without a token."""
    found = length_bin(np.array([0, *LENGTHS])).tolist()
    assert found == [0, *(min((length**8).bit_length() - 1, LENGTH_BINS - 1) for length in LENGTHS)]
