"""ESS of whole-sequence importance sampling by length: against plain Python, and however a dump is read."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offpol_diag.analyze import analyze
from offpol_diag.engine.prefixes import FEWEST, GRID
from offpol_diag.summary import Lengths, Number
from tests import oracles
from tests.devices import DEVICES, present
from tests.oracles import Sequence


def ess_at(sequences: list[Sequence], tokens: int) -> tuple[int, float]:
    """How many sequences have so many tokens, and (Σw)² / (n Σw²) of the products over them."""
    logs = [math.fsum(one.delta("old")[:tokens]) for one in sequences if one.n >= tokens]
    weights = [math.exp(log - max(logs)) for log in logs]
    many = len(logs)
    return many, math.fsum(weights) ** 2 / (many * math.fsum(w * w for w in weights))


def longest(curve: list[tuple[int, float]]) -> float | None:
    """By trying every whole T: log ESS is a line between two lengths, and 0 at none."""
    ends = [(0, 1.0), *curve]
    for (t0, e0), (t1, e1) in pairwise(ends):
        inside = [t for t in range(t0, t1 + 1) if _line(t, t0, e0, t1, e1) >= math.log(0.1)]
        if t1 not in inside:
            return float(max(inside))
    return None


def _line(t: int, t0: int, e0: float, t1: int, e1: float) -> float:
    return math.log(e0) + (math.log(e1) - math.log(e0)) * (t - t0) / (t1 - t0)


def lengths(*paths: str | Path, **how: Any) -> Lengths:
    found = analyze([str(path) for path in paths], **{"device": "cpu", **how}).lengths
    assert found is not None
    return found


@pytest.fixture(scope="module", params=[0.05, 0.6, 3.0], ids=["little", "some", "much"])
def rows(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return oracles.make_rows(request.param, many=240)


@pytest.mark.parametrize("device", DEVICES)
def test_ess_at_every_length_is_that_of_plain_python(rows, tmp_path, device):
    with present(device):
        found = lengths(oracles.write(rows, tmp_path / "d.parquet"), device=device)
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
def test_where_every_length_keeps_a_tenth_the_longest_response_is_beyond_them(name, said):
    found = lengths(f"sample_data/{name}.parquet").longest

    assert found.value is None
    assert found.unknown.startswith(f"beyond the longest responses ({said} tokens, which ")


def test_where_a_single_token_keeps_less_than_a_tenth_no_length_does(tmp_path):
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


# ---------------------------------------------------------------- however the dump is read


def same(one: Lengths, two: Lengths) -> bool:
    pairs = [(one.longest, two.longest)]
    pairs += [(a.ess_sequences, b.ess_sequences) for a, b in zip(one.curve, two.curve, strict=True)]
    counts = [[(at.tokens, at.sequences) for at in each.curve] for each in (one, two)]
    return counts[0] == counts[1] and all(close(a, b) for a, b in pairs)


def close(one: Number, two: Number) -> bool:
    values = [[x.value, *(x.interval or ())] for x in (one, two)]
    return values[0] == pytest.approx(values[1], rel=1e-9) and one.unknown == two.unknown


def test_batches_change_no_length():
    whole = lengths("sample_data/collapse.parquet")

    assert same(lengths("sample_data/collapse.parquet", batch_tokens=3000), whole)
