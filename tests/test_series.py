"""Sums over near tokens by power series: the same as from the tokens themselves, or refused."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from offpol_diag import catalogue, losses, segments
from offpol_diag.batch import PER_TOKEN, Batch
from offpol_diag.metrics import nearsums, policyloss, update
from offpol_diag.metrics.lines import compiled
from offpol_diag.metrics.outcome import of
from offpol_diag.metrics.polynomials import Untraced
from offpol_diag.metrics.powersums import PowerSums
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.series import Space
from offpol_diag.metrics.traced import Mixed, Traced, _rows, mapped, symbolic
from offpol_diag.near import FREE, RADII, Near
from offpol_diag.presets import Clip, Preset, Reject
from offpol_diag.ratios import Ratios
from offpol_diag.tally import Study, observe

ALL = catalogue.load().resolve("all")
LENGTHS = (0, 1, 700, 3, 0, 90, 2000, 0)


def near_batch(radius=0.09, scale=None, rows=True, lengths=LENGTHS, seed=0):
    """Tokens that lie within a radius, their advantages one for each sequence or one for each token."""
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


def by_series(formula, batch, radius=0.09, reduce=segments.total):
    """The formula's sum over each sequence, by power sums."""
    space = Space(radius)
    tokens = symbolic(Ratios(batch, "old"), space).batch
    return PowerSums((compiled(reduce(formula(tokens), space.offsets)),)).values(batch)[0]


def k3(x):
    return torch.expm1(x) - x


FORMULAS = {
    "Δ": lambda b: b.old - b.rollout,
    "|Δ|": lambda b: (b.old - b.rollout).abs(),
    "u": lambda b: b.current - b.old,
    "Δ²": lambda b: (b.old - b.rollout).square(),
    "r": lambda b: torch.exp(b.old - b.rollout),
    "e^|Δ|": lambda b: torch.exp((b.current - b.rollout).abs()),
    "|r − 1|": lambda b: torch.expm1(b.current - b.old).abs(),
    "(r − 1)²": lambda b: torch.expm1(b.old - b.rollout).square(),
    "r² − 1": lambda b: torch.expm1(b.old - b.rollout) * (torch.expm1(b.old - b.rollout) + 2),
    "k3": lambda b: k3(b.current - b.old),
    "k3²": lambda b: k3(b.current - b.rollout).square(),
    "k3 reversed": lambda b: k3(b.rollout - b.current),
    "log cosh": lambda b: torch.log1p(2 * torch.sinh((b.old - b.rollout) / 4).square()),
    "prob diff": lambda b: torch.exp(b.rollout) * torch.expm1(b.old - b.rollout),
    "|prob diff|": lambda b: (torch.exp(b.rollout) * torch.expm1(b.rollout - b.old)).abs(),
    "surprisal": lambda b: -torch.exp(b.current - b.rollout) * b.current,
    "entropy": lambda b: b.entropy * 2,
    "A e^u": lambda b: -b.advantages * torch.exp(b.current - b.old),
    "|A e^u|": lambda b: (-b.advantages * torch.exp(b.current - b.old)).abs(),
    "A log π_θ e^u": lambda b: -b.advantages * torch.exp(b.current - b.old) * b.current,
    "k3 from 0": lambda b: k3(b.current - b.old).clamp(min=0),
    "−k3 to 0": lambda b: (-k3(b.current - b.old)).clamp(-1e9, 0),
    "k3 below 0": lambda b: (k3(b.current - b.old) < 0).to(torch.float64),
    "A e^u r": lambda b: b.advantages * torch.exp(b.current - b.old) * torch.exp(b.old - b.rollout),
    "positive A": lambda b: b.advantages.clamp(min=0),
    "negative A": lambda b: -b.advantages.clamp(max=0),
    "A > 0": lambda b: (b.advantages > 0).to(torch.float64),
    "A < 0": lambda b: (b.advantages < 0).to(torch.float64),
    "A >= 0": lambda b: (b.advantages >= 0).to(torch.float64),
    "A <= 0": lambda b: (b.advantages <= 0).to(torch.float64),
    "A = 0": lambda b: (b.advantages == 0).to(torch.float64),
    "A ≠ 0 or r > 2": lambda b: ((b.advantages != 0) | (torch.exp(b.old - b.rollout) > 2)).to(torch.float64),
    "A where it pulls": lambda b: torch.where(
        b.advantages * torch.exp(b.old - b.rollout) != 0, 0.0, b.advantages.abs() + 1
    ),
    "max(Δ, 1)": lambda b: (b.old - b.rollout).clamp(min=1.0),
    "bounds out of reach": lambda b: torch.exp(b.old - b.rollout).clamp(0.5, 2.0),
    "bounds far out of reach": lambda b: torch.exp(b.old - b.rollout).clamp(-1e300, 1e300),
    "1 where r is low": lambda b: (torch.exp(b.old - b.rollout) < 1.2).to(torch.float64),
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("radius", [0.03, 0.09, 0.2])
@pytest.mark.parametrize("scale", [1e-6, None])
def test_power_series_give_the_sums_of_the_tokens(name, rows, radius, scale):
    batch = near_batch(radius, scale, rows)
    if name == "1 where r is low" and radius > 0.1:
        return
    each = FORMULAS[name](batch).tolist()
    starts = batch.cu_seqlens.tolist()
    size = max(map(abs, each), default=0.0)
    # Where the tokens' own formula subtracts numbers near 1, its digits end at 1e-16 of 1, not of the result.
    noise = (
        1e-16 if name in ("k3", "k3 from 0", "−k3 to 0", "k3 reversed", "k3²", "r² − 1", "log cosh") else 0.0
    )
    for s, found in enumerate(by_series(FORMULAS[name], batch, radius).tolist()):
        tokens = each[starts[s] : starts[s + 1]]
        exact, sizes = math.fsum(tokens), math.fsum(map(abs, tokens))
        assert found == pytest.approx(
            exact, rel=1e-12, abs=1e-13 * sizes + noise * len(tokens) * min(size + 1e-6, 1e-6)
        )


@pytest.mark.parametrize(
    "name", ["Δ", "|Δ|", "Δ²", "r", "u", "k3", "e^|Δ|", "bounds out of reach", "max(Δ, 1)"]
)
@pytest.mark.parametrize("reduce", [segments.largest, segments.smallest])
def test_ends_of_functions_that_rise_or_fall_are_found_at_the_ends_of_what_they_are_of(name, reduce):
    batch = near_batch()
    for sign in (1, -1):
        expected = reduce(sign * FORMULAS[name](batch), batch.cu_seqlens)
        found = by_series(lambda b, s=sign: FORMULAS[name](b) * s, batch, reduce=reduce)
        torch.testing.assert_close(found, expected, rtol=1e-15, atol=0.0 if name != "k3" else 1e-17)


REFUSED = {
    "a bound within reach": lambda b: torch.exp(b.old - b.rollout).clamp(max=1.09),
    "a count beyond a bound within reach": lambda b: (b.old - b.rollout > 0.089).to(torch.float64),
    "equal log-probs": lambda b: (b.old == b.rollout).to(torch.float64),
    "A²": lambda b: b.advantages.square(),
    "a bound on A": lambda b: b.advantages.clamp(max=1.0),
    "a bound on log-probs": lambda b: b.rollout.clamp(min=-5.0),
    "p log p": lambda b: torch.exp(b.rollout) * b.rollout,
    "p²": lambda b: torch.exp(2 * b.rollout),
    "e^A": lambda b: torch.exp(b.advantages),
    "several log-ratios": lambda b: (b.old - b.rollout).square() * (b.current - b.rollout),
    "|two log-ratios|": lambda b: ((b.old - b.rollout) + 2 * (b.current - b.rollout)).abs(),
    "a sign of the other": lambda b: (b.old - b.rollout).abs() * (b.current - b.rollout),
    "log 0": lambda b: torch.log1p(b.old - b.rollout - 1.0),
    "a square that a fourth power outweighs": lambda b: (
        (b.old - b.rollout).square() - 200 * (b.old - b.rollout).square().square()
    ).clamp(min=0),
    "|x| with a second root": lambda b: (b.old - b.rollout - 20 * (b.old - b.rollout).square()).abs(),
    "a function it does not know": lambda b: torch.sin(b.old),
    "a method it does not know": lambda b: b.old.tanh(),
    "a decision": lambda b: b.old if b.old > b.rollout else b.rollout,
    "a tensor": lambda b: b.old * torch.ones(3),
    "division by a number of tokens": lambda b: b.old / b.rollout,
    "infinity": lambda b: torch.where(b.advantages > 0, torch.inf, 0.0),
    "a series that does not end": lambda b: torch.log1p(20 * torch.expm1(b.old - b.rollout)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_power_series_do_not_follow_is_refused(name):
    with pytest.raises(Untraced):
        by_series(REFUSED[name], near_batch())


@pytest.mark.parametrize(
    "formula",
    [
        lambda b: (b.old - b.rollout).square() - 0.1 * (b.old - b.rollout),
        lambda b: b.advantages,
        lambda b: b.old,
    ],
)
def test_ends_of_what_does_not_rise_throughout_are_refused(formula):
    with pytest.raises(Untraced):
        by_series(formula, near_batch(), reduce=segments.largest)


def test_sums_over_turns_and_of_sums_are_refused():
    space = Space(0.09)
    tokens = symbolic(Ratios(near_batch(), "old"), space).batch
    with pytest.raises(Untraced):
        segments.total(tokens.old, tokens.cu_runs)
    for after in (lambda x: x / torch.ones(3), lambda x: torch.exp(x), lambda x: x.abs()):
        with pytest.raises(Untraced):
            after(segments.total(tokens.old, tokens.cu_seqlens))
    with pytest.raises(Untraced):
        segments.mean(tokens.old, tokens.cu_seqlens)


# ---------------------------------------------------------------- all that ships


def scene_of(batch, near):
    return Scene(batch, torch.ones(batch.sequences, 1, dtype=torch.float64), near=near)


def everything(batch, monkeypatch):
    """What is asked of near tokens for every preset: the scene, its near tokens, and the steps."""
    monkeypatch.setattr(nearsums, "BLOCK", 500)
    columns = frozenset(f"{name}_log_probs" for name in ("rollout", "old", "current")) | {"advantages"}
    presets = [preset for preset in ALL if preset.weight is None or preset.weight.action != "psis"]
    presets = [preset for preset in presets if all(rule.over != "batch" for rule in preset.reject)]
    study = Study(tuple(presets), columns, (), 0, 1)
    scene = scene_of(batch, study.near)
    observe(study, scene)
    kinds = nearsums.kinds(study.presets, study.near)
    return scene, scene.parts(kinds[0])[1][0], list(nearsums.steps(scene, kinds))


@pytest.mark.parametrize("rows", [True, False])
def test_every_sum_that_is_traced_is_what_its_step_makes_of_the_tokens(monkeypatch, rows):
    scene, close, steps = everything(near_batch(study_radius(), rows=rows), monkeypatch)
    traced = Traced.of(scene, close, steps)
    tokens = Ratios(close.batch, close.policy, close.settled, whole=close.whole)
    for policy, make in steps:
        make(scene, tokens.of(policy))
    compared = 0
    for policy, values in traced.found(close.batch).items():
        kept = tokens.of(policy).kept()
        for key, value in values.items():
            close_to = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11, msg=str((policy, key)))
            mapped(close_to, [value, kept[key]])
            compared += 1
    assert compared > 80
    assert len(traced.rest) < len(steps) / 6


def test_formulas_are_followed_without_a_copy_of_the_near_tokens(monkeypatch):
    scene, close, steps = everything(near_batch(study_radius()), monkeypatch)
    fresh = Ratios(scene.batch.some(None, torch.tensor([3])), "rollout", whole=close.whole)
    Traced.of(scene, fresh, steps)

    assert not {*PER_TOKEN} & {*vars(fresh.batch)}


def study_radius():
    return Near.of(ALL).radius


def test_an_entry_that_is_not_per_sequence_has_no_place():
    with pytest.raises(Mixed):
        mapped(lambda x: x, ["a word"])


def test_what_power_sums_make_only_a_part_of_is_left_to_the_tokens():
    space = Space(0.09)
    line = segments.total(symbolic(Ratios(near_batch(), "old"), space).batch.old, space.offsets)
    assert [*_rows({"a": (line,)}, {})] == [line]
    assert _rows({"a": (line,), "b": torch.ones(2)}, {}) == {}


def test_a_batch_without_near_tokens_has_sums_of_nothing():
    batch = near_batch(lengths=(0, 0))
    assert by_series(FORMULAS["r"], batch).tolist() == [0.0, 0.0]
    assert by_series(FORMULAS["r"], batch, reduce=segments.largest).tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize("radius", RADII)
def test_what_is_left_out_of_a_series_cannot_be_seen(radius):
    degree = Space(radius).degree
    assert (2 * radius) ** (degree + 1) / math.factorial(degree + 1) < 1e-17 * radius**4
    assert degree < 30


def test_sums_are_the_same_in_blocks_of_any_size(monkeypatch):
    batch = near_batch()
    whole = by_series(FORMULAS["A e^u r"], batch)
    monkeypatch.setattr("offpol_diag.metrics.moments.BLOCK", 50)
    assert torch.equal(by_series(FORMULAS["A e^u r"], batch), whole)


# ---------------------------------------------------------------- losses with one ratio for a sequence


@pytest.mark.parametrize("clip", [Clip(low=0.0, high=0.0, dual=1.01), Clip(low=0.01, high=None, dual=None)])
@pytest.mark.parametrize("rows", [True, False])
def test_a_pooled_loss_is_the_advantage_times_that_of_its_sign(clip, rows):
    batch = near_batch(2.0, rows=rows, lengths=LENGTHS + (5,) * 30)
    ratios, gspo = Ratios(batch, "old"), Preset("gspo", "", policy="old", loss="gspo", clip=clip)
    each, both = losses.token_loss(ratios, gspo), losses.by_sign(ratios, gspo)
    assert (each.clipped & (batch.advantages != 0)).any()
    assert not each.clipped.all()
    for sign, part in losses.parts(batch.advantages).items():
        at = part > 0
        for name, unit in (("loss", part), ("slope", part), ("clipped", 1), ("clipped_lower", 1)):
            wide = segments.spread(getattr(both[sign], name), batch.cu_seqlens) * unit
            assert torch.equal(wide[at], (getattr(each, name) * 1)[at]), (sign, name)


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("weight", [None, FREE])
def test_sums_of_a_pooled_loss_are_those_of_its_tokens(rows, weight):
    batch = near_batch(2.0, rows=rows, lengths=LENGTHS + (50,) * 30)
    clip = Clip(low=0.0, high=0.0, dual=1.01)
    rule = Reject("k2", "token", upper=0.4)
    gspo = Preset("gspo", "", policy="old", weight=weight, reject=(rule,), loss="gspo", clip=clip)
    for one in (gspo, replace(gspo, reject=())):
        done = of(Ratios(batch, "old"), one)
        each, w = losses.token_loss(done.ratios, one), 1 if weight is None else done.weighed.final.values
        keep = torch.ones_like(batch.rollout) if done.kept.tokens is None else done.kept.tokens * 1.0
        expected = {
            "loss": each.loss * w * keep,
            "pull": (each.slope * w * keep).abs(),
            "clipped": each.clipped * keep,
            "clipped_lower": each.clipped_lower * keep,
            "kl": (batch.old - batch.current) * keep,
            **{sign: x * (each.slope * keep == 0) for sign, x in losses.parts(batch.advantages).items()},
        }
        found = (
            policyloss.weighed_sums(done, one)
            | policyloss.clip_sums(done, one)
            | update.still_sums(done, one)
        )
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(
                found[name], segments.total(x, batch.cu_seqlens), rtol=1e-12, atol=1e-12
            )
            assert bool(found[name].any()), name
