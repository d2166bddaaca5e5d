"""Sums by fold and bucket, times what rows do to sequences: against a plain loop and `math.fsum`."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from offpol_diag.metrics import foldbins
from offpol_diag.metrics.coordinates import BUCKETS, FOLDS
from offpol_diag.metrics.foldbins import FoldBins

LENGTHS = {
    "ragged": [3, 0, 40, 1, 0, 0, 17, 300, 2, 2, 9, 0],
    "long": [200, 300, 150],
    "short": [1] * 50,
    "empty": [0, 0, 0],
    "none": [],
    "a giant and dwarfs": [5000, *([1] * 30), 4000, 700],
}
CUTS = {"at once": 10**6, "by three": 3, "one by one": 1}
EVERY = {"tables": (0, 5), "one table": (0, 10**4), "rows": (10**9, 5), "both": (20, 5)}


def told(lengths, fold, times, bucket, x):
    """[FOLDS, BUCKETS], of one row."""
    found, at = {}, 0
    for i, n in enumerate(lengths):
        for t in range(at, at + n):
            one = 1.0 if times is None else times[i]
            found.setdefault((fold[i], bucket[t]), []).append(x[t] * one)
        at += n
    values = np.zeros((FOLDS, BUCKETS))
    for place, terms in found.items():
        values[place] = math.fsum(terms)
    return values


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("shape", LENGTHS)
def test_sums_are_those_of_a_plain_loop(shape, cut, every, monkeypatch):
    long, lines = EVERY[every]
    monkeypatch.setattr(foldbins, "LONG", long)
    monkeypatch.setattr(foldbins, "LINES", lines)
    rng = np.random.default_rng(3)
    lengths = np.array(LENGTHS[shape], np.int64)
    fold, bucket = rng.integers(0, FOLDS, len(lengths)), rng.integers(0, 9, lengths.sum())
    rows = {
        "one": [None, rng.normal(size=len(lengths)), None, rng.integers(0, 2, len(lengths)).astype(float)],
        "two": [rng.normal(size=len(lengths))],
        "idle": [],
    }
    values = {kind: rng.normal(size=lengths.sum()) for kind in rows}
    starts = np.concatenate(([0], np.cumsum(lengths)))

    bins = FoldBins(fold, rows)
    for first, last in pairwise([*range(0, len(lengths), CUTS[cut]), len(lengths)]):
        here = slice(starts[first], starts[last])
        part = {kind: x[here].copy() for kind, x in values.items()}
        bins.add(slice(first, last), lengths[first:last], bucket[here], part)

    for kind, times in rows.items():
        expected = [told(lengths, fold, one, bucket, values[kind]) for one in times]
        assert bins.sums(kind).shape == (len(times), FOLDS, BUCKETS)
        for found, one in zip(bins.sums(kind), expected, strict=True):
            np.testing.assert_allclose(found, one, rtol=1e-12, atol=1e-11)


def test_asking_for_the_sums_does_not_end_them():
    fold, one = np.zeros(2, np.int64), {"x": np.array([1.5])}
    bins = FoldBins(fold, {"x": [None]})
    for at in (0, 1):
        bins.add(slice(at, at + 1), np.array([1]), np.array([7]), one)
        assert bins.sums("x")[0, 0, 7] == 1.5 * (at + 1)
