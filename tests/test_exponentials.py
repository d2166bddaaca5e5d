"""e^d − 1 itself in place of its series: only where the series is all that is asked of d besides d."""

import math
from itertools import pairwise

import pytest
import torch

from offpol_diag import segments
from offpol_diag.metrics.exponentials import exact
from offpol_diag.metrics.lines import End, compiled
from offpol_diag.metrics.powersums import PowerSums
from offpol_diag.metrics.series import Space
from offpol_diag.metrics.traced import symbolic
from offpol_diag.ratios import Ratios
from tests.test_series import near_batch

ONE, LOG, SIGN = ("", "", ""), ("log", "A+", ""), ("", "", "old")
RATIO = [1 / math.factorial(k) for k in range(1, 11)]


def times(x, ray):
    return [x * c for c in ray]


def test_the_series_of_r_and_powers_of_no_more_than_d_become_single_sums():
    end = End("max", "old", (0.0, 1.0), ("high",))
    rows = (
        {(ONE, "old"): RATIO, (ONE, ""): [3.0]},
        {(LOG, "old"): times(-2.5, RATIO[:8]), (SIGN, "old"): [7.0]},
        end,
        {(ONE, "drift"): [2.0]},
    )
    assert exact(rows) == (
        {(ONE, "old ratio"): [1.0], (ONE, ""): [3.0]},
        {(LOG, "old ratio"): [-2.5], (SIGN, "old"): [7.0]},
        end,
        {(ONE, "drift"): [2.0]},
    )


@pytest.mark.parametrize(
    "other",
    [
        [0.0, 1.0],
        [0.0, *RATIO[1:]],
        times(2.0, [1.0, *RATIO[:9]]),
        RATIO[:7],
        [*RATIO[:9], RATIO[9] * (1 + 1e-9)],
        [*RATIO[:9], 0.0],
    ],
)
def test_another_series_of_the_same_log_ratio_keeps_all_powers(other):
    rows = ({(ONE, "old"): RATIO}, {(LOG, "old"): other}, {(ONE, "drift"): RATIO})
    assert exact(rows) == (*rows[:2], {(ONE, "drift ratio"): [1.0]})


def r1(b):
    return torch.expm1(b.old - b.rollout)


FORMULAS = {
    "r − 1": r1,
    "|r − 1|": lambda b: r1(b).abs(),
    "A (r − 1)": lambda b: b.advantages * r1(b),
    "q (r − 1) − Δ": lambda b: torch.exp(b.rollout) * r1(b) - (b.old - b.rollout),
}


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("scale", [None, 1e-9])
@pytest.mark.parametrize("radius", [0.03, 0.09, 0.5])
def test_sums_of_r_are_those_of_plain_python(rows, scale, radius):
    """By as few sums as there are formulas, and next to 0 as far from it."""
    batch, space = near_batch(radius, scale, rows=rows), Space(radius)
    tokens = symbolic(Ratios(batch, "old"), space).batch
    lines = [compiled(segments.total(formula(tokens), space.offsets)) for formula in FORMULAS.values()]
    sums = PowerSums(tuple(lines))
    assert set(sums.degrees.values()) == {1}
    for name, found in zip(FORMULAS, sums.values(batch), strict=True):
        terms = [plain(name, batch, at) for at in range(batch.tokens)]
        for x, (first, last) in zip(found.tolist(), runs(batch), strict=True):
            run = terms[first:last]
            assert x == pytest.approx(math.fsum(run), rel=0, abs=1e-14 * math.fsum(map(abs, run)))


def plain(name, batch, at):
    q, p, a = (float(x[at]) for x in (batch.rollout, batch.old, batch.advantages))
    return {
        "r − 1": math.expm1(p - q),
        "|r − 1|": abs(math.expm1(p - q)),
        "A (r − 1)": a * math.expm1(p - q),
        "q (r − 1) − Δ": math.exp(q) * math.expm1(p - q) - (p - q),
    }[name]


def runs(batch):
    ends = batch.cu_seqlens.tolist()
    return pairwise(ends)
