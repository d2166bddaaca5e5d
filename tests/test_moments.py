"""Check moments of near tokens against plain sums, whatever tokens are far and however turns lie."""

import itertools
import math

import pytest
import torch

from offpol_diag.batch import Batch
from offpol_diag.engine import moments, segments
from offpol_diag.engine.moments import COLUMNS, FUNCTIONS, GATES, Moments

LENGTHS = (5, 0, 40, 1, 0, 300, 7)
D = {"old": ("rollout", "old"), "current": ("rollout", "current"), "drift": ("old", "current")}
F = {
    "1": lambda d: 1.0,
    "d": lambda d: d,
    "−d": lambda d: -d,
    "x": math.expm1,
    "x²": lambda d: math.expm1(d) ** 2,
    "k3": lambda d: math.expm1(d) - d,
    "|d|": abs,
    "d²": lambda d: d * d,
    "|x|": lambda d: abs(math.expm1(d)),
    "k3_reverse": lambda d: math.expm1(-d) + d,
    "e^|d| − 1": lambda d: math.expm1(abs(d)),
    "k3²": lambda d: (math.expm1(d) - d) ** 2,
    "d⁴": lambda d: d**4,
    "log cosh(d/2)": lambda d: math.log1p(2 * math.sinh(d / 4) ** 2),
    **{
        f"{name} {tau}": lambda d, of=of, tau=tau: of(
            1 / (1 + math.exp(-tau * math.expm1(d))), tau, math.exp(d)
        )
        for tau in (0.5, 1.05)
        for name, of in {
            "gate": lambda open, tau, r: 4 / tau * (open - 0.5),
            "gate slope": lambda open, tau, r: 4 * open * (1 - open) * r - 1,
        }.items()
    },
}
SIDE = {
    "": lambda a: 1.0,
    "A+": lambda a: max(a, 0.0),
    "A-": lambda a: max(-a, 0.0),
    "1+": lambda a: float(a > 0),
    "1-": lambda a: float(a < 0),
    "1=": lambda a: float(a == 0),
}
C = {
    "": lambda b, t: 1.0,
    "log π_rollout": lambda b, t: float(b.rollout[t]),
    "log π_θ": lambda b, t: float(b.current[t]),
    "π_rollout": lambda b, t: math.exp(b.rollout[t]),
    "π_old/π_rollout": lambda b, t: math.exp(b.old[t] - b.rollout[t]),
}


def near_batch(radius=0.09, scale=None, rows=True, lengths=LENGTHS, seed=0):
    """Make tokens that lie within a radius, with advantages one for each sequence or one for each token."""
    make = torch.Generator().manual_seed(seed)
    tokens, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)

    def gaps():
        x = torch.randn(tokens, generator=make, dtype=torch.float64) * (scale or radius / 2)
        return x.clamp(-radius / 2, radius / 2)

    old, drift = gaps(), gaps()
    if tokens:
        old[:4], drift[:4] = (
            torch.tensor([0.0, 1, -1, 0.5]) * radius,
            torch.tensor([0.0, -1, 1, 0.5]) * radius,
        )
    rollout = torch.randn(tokens, generator=make, dtype=torch.float64).abs().neg()
    a = torch.randn(len(lengths) if rows else tokens, generator=make, dtype=torch.float64)
    a[torch.rand(len(a), generator=make) < 0.2] = 0.0
    return Batch(
        rollout=rollout,
        old=rollout + old,
        current=rollout + old + drift,
        advantages=segments.spread(a, offsets) if rows else a,
        entropy=rollout.abs(),
        cu_seqlens=offsets,
        cu_runs=offsets.unique(),
        position=torch.arange(tokens),
        key=torch.arange(len(lengths)),
        masked=torch.zeros(len(lengths), dtype=torch.int64),
    )


@pytest.fixture(params=[True, False], ids=["one A for a sequence", "one A for a token"])
def batch(request):
    found = near_batch(rows=request.param)
    cuts = torch.tensor([0, 3, 5, 12, 45, 46, 200, 346, 353])
    return found.__class__(**{**vars_of(found), "cu_runs": cuts})


def vars_of(batch):
    return {name: getattr(batch, name) for name in Batch.__dataclass_fields__}


FAR = torch.tensor([0, 4, 45, 60, 61, 62, 352])


def near_of(batch, first, last):
    far = set(FAR.tolist())
    return [t for t in range(first, last) if t not in far]


def expected(batch, starts, terms):
    """Compute sums of terms [T] over the near tokens of each row."""
    return [
        math.fsum(terms[t] for t in near_of(batch, first, last))
        for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]


def delta(batch, d):
    below, above = (getattr(batch, name).tolist() for name in D[d])
    return [y - x for x, y in zip(below, above, strict=True)]


@pytest.mark.parametrize(("block", "by_turn"), [(1, False), (50, True), (10**9, False)])
def test_every_moment_is_the_sum_of_its_terms(batch, monkeypatch, block, by_turn):
    monkeypatch.setattr(moments, "BLOCK", block)
    found = Moments.near(batch, FAR)
    found = found.turns() if by_turn else found
    starts, tokens = batch.cu_runs if by_turn else batch.cu_seqlens, range(batch.tokens)
    columns = {name: [make(batch, t) for t in tokens] for name, make in C.items()}
    sides = {name: [make(a) for a in batch.advantages.tolist()] for name, make in SIDE.items()}
    for d in D:
        values = {name: [make(x) for x in delta(batch, d)] for name, make in F.items()}
        for (function, f), (column, c), (side, a) in itertools.product(
            values.items(), columns.items(), sides.items()
        ):
            wanted = expected(batch, starts, [x * y * z for x, y, z in zip(f, c, a, strict=True)])
            mine = found.of(function, d, column, side).tolist()
            assert mine == pytest.approx(wanted, rel=1e-12, abs=1e-13), (d, function, column, side)


@pytest.mark.parametrize("function", ["d", "x", "k3", "|d|"])
def test_ends_are_those_of_the_values(batch, function):
    found = Moments.near(batch, FAR)
    values = [F[function](x) for x in delta(batch, "current")]
    for _ in range(2):  # the second time with e^d − 1 at hand
        pairs = zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
        for row, (first, last) in enumerate(pairs):
            seen = [values[t] for t in near_of(batch, first, last)]
            ends = min(seen, default=math.inf), max(seen, default=-math.inf)
            mine = float(found.low("current", function)[row]), float(found.high("current", function)[row])
            assert mine == pytest.approx(ends, rel=1e-14, abs=1e-17)
        assert found.of("x", "current").tolist() == pytest.approx(
            expected(batch, batch.cu_seqlens, [math.expm1(x) for x in delta(batch, "current")]), rel=1e-12
        )


@pytest.mark.parametrize("sign", ["1+", "1-", "1="])
def test_only_tokens_with_the_sign_count(batch, sign):
    found = Moments.near(batch, FAR).turns(sign)
    there = [SIDE[sign](a) for a in batch.advantages.tolist()]
    drift = delta(batch, "old")
    for function in ("1", "x", "k3"):
        for side in ("", "A+", "A-"):
            sided = [SIDE[side](a) for a in batch.advantages.tolist()]
            terms = [x * y * F[function](z) for x, y, z in zip(there, sided, drift, strict=True)]
            wanted = expected(batch, batch.cu_runs, terms)
            assert found.of(function, "old", "", side).tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-14)
    pairs = zip(batch.cu_runs[:-1].tolist(), batch.cu_runs[1:].tolist(), strict=True)
    for run, (first, last) in enumerate(pairs):
        seen = [drift[t] for t in near_of(batch, first, last) if there[t]]
        assert float(found.low("old")[run]) == min(seen, default=math.inf)
        assert float(found.high("old")[run]) == max(seen, default=-math.inf)


def test_the_numerator_that_sampled_has_no_log_ratio(batch):
    found = Moments.near(batch, FAR)
    assert not bool(found.of("x", "rollout").any())
    assert torch.equal(found.exp("rollout"), found.n)
    assert found.low("rollout").tolist() == [0.0 if n else math.inf for n in found.n.tolist()]


def test_the_tables_here_are_those_of_the_code():
    assert {*FUNCTIONS, "1", *(f"{gate} {tau}" for gate in GATES for tau in (0.5, 1.05))} == {*F}
    assert {*COLUMNS, ""} == {*C}


def test_sequences_without_a_token_have_no_moments():
    found = Moments.near(near_batch(lengths=(0, 0)), torch.zeros(0, dtype=torch.int64))
    assert found.of("x", "old").tolist() == found.exp("old", side="A+").tolist() == [0.0, 0.0]
    assert found.low("old").tolist() == [math.inf, math.inf]
