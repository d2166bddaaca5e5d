"""Policy losses against autograd: a softmax policy over a small vocabulary, trained on another one's samples.

What a trainer computes is written here on padded matrices, with its weights detached; values come from
`analyze` on a dump of the same numbers, gradients from `losses.TokenLoss`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from offpol_diag import DumpWriter, catalogue, losses, segments
from offpol_diag.analyze import analyze
from offpol_diag.metrics.outcome import outcome, token_mask
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.readers import open_dump

VOCABULARY, LONGEST = 5, 9
LENGTHS = (9, 1, 4, 0, 7, 2, 9, 6, 3, 8, 1, 5)
TIGHT = Clip(0.1, 0.15, 1.3)  # so that every branch is taken often


@dataclass
class World:
    """Three policies on one batch of samples, [S, N] each; the logits of π_θ have a gradient."""

    logits: torch.Tensor
    current: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    path: object

    def log_probs(self, policy):
        return {"current": self.current.detach(), "old": self.old, "rollout": self.rollout}[policy]


def world(folder, lengths=LENGTHS, seed=0, drift=0.5, step=0.35, per_sequence=False, many=4):
    """A dump of `many` batches' worth of sequences sampled from π_rollout."""
    torch.manual_seed(seed)
    lengths = torch.tensor(lengths * many)
    shape = (len(lengths), max(lengths.tolist()))
    base = torch.randn(*shape, VOCABULARY, dtype=torch.float64)
    old = base + drift * torch.randn_like(base)
    logits = (old + step * torch.randn_like(base)).requires_grad_()
    tokens = torch.multinomial(base.softmax(-1).flatten(0, 1), 1).view(*shape, 1)
    rollout, before, current = (x.log_softmax(-1).gather(-1, tokens).squeeze(-1) for x in (base, old, logits))
    current.retain_grad()
    advantages = torch.randn(shape, dtype=torch.float64).where(torch.rand(shape) > 0.1, 0.0)
    if per_sequence:
        advantages = advantages[:, :1].expand(shape).contiguous()
    mask = torch.arange(shape[1]) < lengths[:, None]
    made = World(logits, current, before, rollout, advantages, mask, folder / f"{seed}{drift}{step}.parquet")
    write(made)
    return made


def write(made):
    with DumpWriter(made.path, dtype="float64") as writer:
        writer.write(
            rollout_log_probs=made.rollout,
            old_log_probs=made.old,
            current_log_probs=made.current.detach(),
            advantages=made.advantages,
            response_mask=made.mask.to(torch.int64),
        )


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """One with an advantage per token, one with an advantage per sequence."""
    folder = tmp_path_factory.mktemp("worlds")
    return [world(folder, seed=1), world(folder, seed=2, per_sequence=True)]


# ---------------------------------------------------------------- what a trainer computes


def ratio(x, log_prob, anchor, preset):
    u = log_prob - anchor
    if preset.loss == "gspo":
        u = ((u * x.mask).sum(1) / x.mask.sum(1).clamp(min=1))[:, None].expand_as(u)
    return torch.exp(u.clamp(-20, 20))


def clipped(r, clip):
    low = -math.inf if clip.low is None else 1 - clip.low
    high = math.inf if clip.high is None else 1 + clip.high
    return r.clamp(low, high)


def terms(x, log_prob, preset):
    """Loss of each token; the surrogate's has its ratio within."""
    a = x.advantages
    r = ratio(x, log_prob, x.old if preset.policy == "old" else x.rollout, preset)
    if preset.loss == "reinforce":
        return -a * log_prob
    if preset.loss == "surrogate":
        return -a * r
    if preset.loss == "cispo":
        return -a * log_prob * clipped(r, preset.clip).detach()
    worse = torch.maximum(-a * r, -a * clipped(r, preset.clip))
    if preset.clip.dual is None:
        return worse
    return torch.where(a < 0, torch.minimum(worse, -a * preset.clip.dual), worse)


def trainer_weights(x, preset, log_prob):
    """min(r, 1.4) of tokens, min(∏r, 2) of sequences, or the raw r of tokens; else 1."""
    own_ratio = preset.loss == "surrogate" or (preset.policy != "old" and preset.loss != "reinforce")
    if preset.weight is None or own_ratio:
        return torch.ones_like(x.advantages)
    delta = ((x.old if preset.policy == "old" else log_prob) - x.rollout) * x.mask
    if preset.weight.over == "sum":
        return torch.exp(delta.sum(1, keepdim=True)).clamp(max=2.0).expand_as(delta)
    return torch.exp(delta) if preset.weight.action == "none" else torch.exp(delta).clamp(max=1.4)


def trainer_mask(x, preset):
    """r in [0.6, 1.7] of tokens, geometric mean in [0.8, 1.25] of sequences; or all that is there."""
    delta = (x.log_probs(preset.policy) - x.rollout) * x.mask
    keep = x.mask
    for rule in preset.reject:
        geometric = torch.exp(delta.sum(1, keepdim=True) / x.mask.sum(1, keepdim=True).clamp(min=1))
        of = torch.exp(delta) if rule.over == "token" else geometric.expand_as(delta)
        keep = keep & (of >= rule.lower) & (of <= rule.upper)
    return keep


def factors(x, keep, how):
    """What a kept token's loss is multiplied by, so that the sum over tokens is the trainer's loss."""
    rows = keep.any(1).sum()
    keep = keep.to(torch.float64)
    return {
        "pg_loss": keep / keep.sum(),
        "pg_loss_kept": keep / x.mask.sum(),
        "pg_loss_seq_sum": keep / rows,
        "pg_loss_seq_mean": keep / keep.sum(1, keepdim=True).clamp(min=1) / rows,
        "pg_loss_seq_norm": keep / rows / LONGEST,
    }[how]


def trained(x, preset, how, detach=True):
    """The trainer's loss, its gradient by log π_θ [S, N] and by the logits [S, N, V]."""
    weights = trainer_weights(x, preset, x.current.detach() if detach else x.current)
    loss = (terms(x, x.current, preset) * weights * factors(x, trainer_mask(x, preset), how)).sum()
    by_log_prob, by_logits = torch.autograd.grad(loss, (x.current, x.logits), retain_graph=True)
    return loss.item(), by_log_prob, by_logits


# ---------------------------------------------------------------- what we compute


def ours(x, preset):
    """Our loss per token, the final weights that multiply it and what is kept: packed, [T]."""
    (batch,) = open_dump([x.path]).batches()
    scene = Scene.of(batch, 0, 2)
    done = outcome(scene, preset)
    found = losses.token_loss(done.ratios, preset)
    weights = torch.ones_like(found.loss)
    if done.weighed is not None and found.weighted:
        final = done.weighed.final
        weights = final.values if final.per == "token" else segments.spread(final.values, batch.cu_seqlens)
    return found, weights, token_mask(done)


def gradient(x, preset, how):
    """Ours by log π_θ, padded with 0, [S, N]."""
    found, weights, keep = ours(x, preset)
    where = torch.zeros_like(x.mask)
    where[x.mask] = keep > 0
    packed = found.gradient(weights * factors(x, where, how)[x.mask])
    return torch.zeros_like(x.rollout).masked_scatter(x.mask, packed)


def by_logits(x, by_log_prob):
    """Of any gradient by log π_θ, what reaches the logits."""
    return torch.autograd.grad((x.current * by_log_prob.detach()).sum(), x.logits, retain_graph=True)[0]


def numbers(x, *presets):
    found = analyze([x.path], presets=presets).presets
    return [{name: n.value for name, n in found[preset.name].metrics.items()} for preset in presets]


TOKEN, SEQUENCE, RAW = Weight("token", upper=1.4), Weight("sum", upper=2.0), Weight("token", "none")
BAND, GEOMETRIC = Reject("ratio", "token", 0.6, 1.7), Reject("ratio", "mean", 0.8, 1.25)


def preset(name, loss, **given):
    return Preset(name, "", loss=loss, **{"clip": TIGHT, **given})


CASES = (
    preset("ppo", "ppo_clip"),
    preset("ppo_usual_clip", "ppo_clip", clip=Clip()),
    preset("ppo_token_weight", "ppo_clip", weight=TOKEN, reject=(BAND,)),
    preset("ppo_sequence_weight", "ppo_clip", weight=SEQUENCE, reject=(GEOMETRIC,)),
    preset("ppo_no_dual", "ppo_clip", clip=Clip(0.1, 0.15, None), weight=TOKEN),
    preset("ppo_no_clip", "ppo_clip", clip=Clip(None, None, None), weight=TOKEN),
    preset("ppo_low_only", "ppo_clip", clip=Clip(0.1, None, None)),
    preset("ppo_high_only", "ppo_clip", clip=Clip(None, 0.1, None)),
    preset("ppo_dual_only", "ppo_clip", clip=Clip(None, None, 1.2)),
    preset("bypass", "ppo_clip", policy="current", weight=TOKEN, reject=(BAND, GEOMETRIC)),
    preset("rollout", "ppo_clip", policy="rollout", weight=TOKEN),
    preset("reinforce_token", "reinforce", policy="current", weight=TOKEN, reject=(GEOMETRIC,)),
    preset("reinforce_sequence", "reinforce", policy="current", weight=SEQUENCE, reject=(BAND,)),
    preset("reinforce_old", "reinforce", weight=RAW),
    preset("surrogate", "surrogate", policy="current", weight=RAW, reject=(BAND,)),
    preset("gspo", "gspo"),
    preset("gspo_weighted", "gspo", weight=SEQUENCE, reject=(GEOMETRIC,)),
    preset("gspo_of_tokens", "gspo", weight=TOKEN, reject=(BAND,)),
    preset("gspo_no_clip", "gspo", clip=Clip(None, None, None)),
    preset("gspo_bypass", "gspo", policy="current", weight=TOKEN),
    preset("cispo", "cispo", clip=Clip(1.0, 0.2, None)),
    preset("cispo_weighted", "cispo", weight=TOKEN, reject=(BAND,)),
    preset("cispo_bypass", "cispo", policy="current", weight=TOKEN),
)
AGGREGATIONS = ("pg_loss", "pg_loss_kept", "pg_loss_seq_sum", "pg_loss_seq_mean", "pg_loss_seq_norm")


@pytest.fixture(scope="module")
def found(worlds):
    return [dict(zip([one.name for one in CASES], numbers(x, *CASES), strict=True)) for x in worlds]


@pytest.mark.parametrize("how", AGGREGATIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_value_and_gradient_are_autograds(worlds, found, case, how):
    for x, got in zip(worlds, found, strict=True):
        value, by_log_prob, logits = trained(x, case, how)
        mine = gradient(x, case, how)

        assert got[case.name][how] == pytest.approx(value, rel=1e-9, abs=1e-14)
        assert torch.allclose(mine, by_log_prob, rtol=1e-9, atol=1e-15)
        assert torch.allclose(by_logits(x, mine), logits, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("denominator", ["kept", "all"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_loss_of_a_preset_has_its_own_denominator(worlds, case, denominator):
    (got,) = numbers(worlds[0], replace(case, denominator=denominator))
    value, _, _ = trained(worlds[0], case, "pg_loss" if denominator == "kept" else "pg_loss_kept")

    assert got["pg_loss_own"] == pytest.approx(value, rel=1e-9, abs=1e-14)
    assert got["loss_scale"] == got["loss_scale_removed" if denominator == "kept" else "loss_scale_kept"]


def test_the_worlds_clip_on_both_sides_and_reject(worlds, found):
    """Else the comparisons above would show nothing."""
    for got in found:
        assert 0.1 < got["ppo"]["pg_clipfrac"] < 0.9
        assert 0.01 < got["ppo"]["pg_clipfrac_lower"] < 0.5
        assert 0.05 < got["gspo"]["pg_clipfrac"] < 0.9
        assert 0.05 < got["bypass"]["tokens_rejected"] < 0.9


@pytest.mark.parametrize("name", ["reinforce_token", "reinforce_sequence"])
def test_the_weight_is_a_constant_in_the_gradient(worlds, name):
    case = next(one for one in CASES if one.name == name)
    mine = gradient(worlds[0], case, "pg_loss")

    assert torch.allclose(mine, trained(worlds[0], case, "pg_loss")[1], rtol=1e-9, atol=1e-15)
    assert not torch.allclose(mine, trained(worlds[0], case, "pg_loss", detach=False)[1], rtol=1e-2)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo"])
def test_a_loss_around_the_rollout_is_not_corrected_twice(worlds, loss):
    bare = preset("bare", loss, policy="current")
    got, again = numbers(worlds[0], bare, replace(bare, name="weighted", weight=TOKEN))

    assert {name: again[name] for name in (*AGGREGATIONS, "update_kept")} == {
        name: got[name] for name in (*AGGREGATIONS, "update_kept")
    }
    assert not losses.weighted(bare)
    assert losses.weighted(replace(bare, policy="old"))


# ---------------------------------------------------------------- by hand


def tokens(tmp_path, rows, **presets):
    """Metrics of each preset on sequences of (log π_rollout, log π_old, log π_θ, A) tokens."""
    path = tmp_path / "hand.parquet"
    with DumpWriter(path, dtype="float64") as writer:
        rollout, old, current, advantages = ([[t[i] for t in row] for row in rows] for i in range(4))
        writer.write(
            rollout_log_probs=rollout, old_log_probs=old, current_log_probs=current, advantages=advantages
        )
    found = analyze([path], presets=list(presets.values())).presets
    return {
        name: {key: number.value for key, number in found[one.name].metrics.items()}
        for name, one in presets.items()
    }


FAR = (-3.0, -3.0, -1.0)  # r = e² of drift 2
NEAR = (-1.0, -1.0, -3.0)  # r = e^-2


def test_the_dual_clip_bounds_the_loss_where_a_is_negative_only(tmp_path):
    dual, plain = preset("dual", "ppo_clip", clip=Clip(0.2, None, 3.0)), Clip(0.2, None, None)
    for a, want in ((-1.0, 3.0), (1.0, -math.exp(2))):
        got = tokens(tmp_path, [[(*FAR, a)]], dual=dual, none=replace(dual, name="none", clip=plain))
        assert got["dual"]["pg_loss"] == pytest.approx(want)
        assert got["dual"]["pg_clipfrac_lower"] == (a < 0)
        assert got["none"]["pg_loss"] == pytest.approx(-a * math.exp(2))
        assert got["none"]["pg_clipfrac_lower"] == 0


def test_clip_fractions_count_the_side_that_the_advantage_pushes_to(tmp_path):
    ppo = preset("ppo", "ppo_clip", clip=Clip(0.2, 0.2, None))
    rows = [[(*FAR, 1.0), (*FAR, -1.0), (*NEAR, 1.0)], [(*NEAR, -1.0), (*FAR, 0.0), (*NEAR, 0.0)]]
    got = tokens(tmp_path, rows, ppo=ppo, wide=replace(ppo, name="wide", clip=Clip(1.0, 10.0, None)))

    assert got["ppo"]["pg_clipfrac"] == pytest.approx(2 / 6)
    assert got["wide"]["pg_clipfrac"] == 0
    assert got["ppo"]["update_removed"] == pytest.approx(2 / 4)
    assert got["ppo"]["update_kept"] == pytest.approx((math.exp(2) + math.exp(-2)) / 4)


def test_the_divergence_is_of_the_anchor_from_the_current_policy(tmp_path):
    rows = [[(-1.0, -1.5, -1.25, 1.0), (-2.0, -1.5, -1.0, -1.0)]]
    both = {"old": preset("old", "gspo"), "current": preset("current", "gspo", policy="current")}
    got = tokens(tmp_path, rows, **both)

    assert got["old"]["ppo_kl"] == pytest.approx((-0.25 - 0.5) / 2)
    assert got["current"]["ppo_kl"] == pytest.approx((0.25 - 1.0) / 2)


def test_gspo_of_one_token_sequences_is_ppo(tmp_path):
    x = world(tmp_path, lengths=(1,) * 40, seed=5)
    ppo, gspo = preset("ppo", "ppo_clip", weight=TOKEN), preset("gspo", "gspo", weight=TOKEN)

    assert numbers(x, ppo)[0] == pytest.approx(numbers(x, gspo)[0], rel=1e-12, nan_ok=True)
    assert torch.equal(gradient(x, ppo, "pg_loss"), gradient(x, gspo, "pg_loss"))


def test_cispo_leaves_every_token_its_gradient(worlds):
    for x in worlds:
        found, _, _ = ours(x, preset("cispo", "cispo", clip=Clip(0.1, 0.1, None)))
        pushed = x.advantages[x.mask] != 0

        assert bool(found.clipped.any())
        assert bool((found.slope[pushed] != 0).all())


def test_cispo_without_bounds_is_reinforce_with_the_raw_weight_of_drift_2(tmp_path):
    x = world(tmp_path, seed=6)
    x.rollout = x.old
    write(x)
    wide = preset("wide", "cispo", clip=Clip(None, None, None))
    both = numbers(x, wide, preset("pg", "reinforce", policy="current", weight=RAW))
    compared = (*AGGREGATIONS, "update_kept", "update_removed", "ppo_kl")

    assert [both[0][name] for name in compared] == pytest.approx(
        [both[1][name] for name in compared], rel=1e-12
    )


@pytest.mark.parametrize("loss", losses.LOSSES)
@pytest.mark.parametrize("policy", ["old", "current", "rollout"])
def test_on_policy_every_loss_pulls_with_minus_a_over_the_denominator(tmp_path, loss, policy):
    x = world(tmp_path, seed=7, drift=0.0, step=0.0, per_sequence=loss == "gspo")
    mine = gradient(x, preset("one", loss, policy=policy, clip=Clip(), weight=TOKEN), "pg_loss")
    want = torch.where(x.mask, -x.advantages / x.mask.sum(), 0.0)

    assert torch.allclose(mine, want, rtol=1e-12, atol=1e-16)


def test_two_clips_of_one_loss_do_not_share_their_numbers(worlds):
    one, two = preset("one", "ppo_clip"), preset("two", "ppo_clip", clip=Clip(0.3, 0.4, None))

    assert numbers(worlds[0], one, two) == [*numbers(worlds[0], one), *numbers(worlds[0], two)]


# ---------------------------------------------------------------- the update


def test_the_update_that_is_left_is_the_gradients_mass(worlds):
    for case in CASES:
        for x in worlds[
            1:
        ]:  # with one advantage per sequence GSPO's pooled gradient has the mass of its slopes
            a, (got,) = x.advantages[x.mask], numbers(x, case)
            mass = gradient(x, case, "pg_loss_kept").abs().sum() * x.mask.sum() / a.abs().sum()
            assert got["update_kept"] == pytest.approx(mass.item(), rel=1e-9), case.name


def test_what_is_removed_is_told_by_the_sign_of_the_advantage(worlds):
    x, case = worlds[0], preset("one", "ppo_clip", weight=TOKEN, reject=(BAND,))
    pulled, a = gradient(x, case, "pg_loss")[x.mask], x.advantages[x.mask]
    (got,) = numbers(x, case)
    for name, some in (("", a != 0), ("_positive", a > 0), ("_negative", a < 0)):
        share = a[some & (pulled == 0)].abs().sum() / a[some].abs().sum()
        assert got[f"update_removed{name}"] == pytest.approx(share.item(), rel=1e-9)
    assert 0 < got["update_removed_positive"] != got["update_removed_negative"] > 0


def test_a_weight_of_zero_removes_and_a_small_one_does_not(tmp_path):
    rows = [[(-1.0, -1.0, -1.0, 1.0), (-1.0, -9.0, -9.0, 3.0)], [(-1.0, -1.0, -1.0, -4.0)]]
    mask = preset("mask", "ppo_clip", weight=Weight("token", "mask", lower=0.5, upper=2.0))
    whole = preset("whole", "ppo_clip", weight=Weight("sum", "mask", lower=0.5, upper=2.0))
    got = tokens(tmp_path, rows, mask=mask, whole=whole, raw=preset("raw", "ppo_clip", weight=RAW))

    assert got["mask"]["update_removed"] == pytest.approx(3 / 8)
    assert got["mask"]["update_kept"] == pytest.approx(5 / 8)
    assert got["whole"]["update_removed_positive"] == 1
    assert got["whole"]["update_removed_negative"] == 0
    assert got["raw"]["update_removed"] == 0
    assert got["raw"]["update_kept"] == pytest.approx((5 + 3 * math.exp(-8)) / 8)


@pytest.mark.parametrize("loss", losses.LOSSES)
def test_without_the_current_policy_no_clip_acts(tmp_path, worlds, loss):
    x, path = worlds[0], tmp_path / "first.parquet"
    with DumpWriter(path, dtype="float64") as writer:
        writer.write(
            rollout_log_probs=x.rollout,
            old_log_probs=x.old,
            advantages=x.advantages,
            response_mask=x.mask.to(torch.int64),
        )
    case = preset("one", loss, weight=TOKEN)
    got = analyze([path], presets=[case]).presets["one"].metrics
    a, w = x.advantages.abs(), torch.exp(x.old - x.rollout).clamp(max=1.4)

    assert got["update_kept"].value == pytest.approx(
        ((a * w)[x.mask].sum() / a[x.mask].sum()).item(), rel=1e-9
    )
    assert got["update_removed"].value == 0
    assert "without current_log_probs no clip acts" in got["update_removed"].formula
    assert got["pg_loss_own"].unknown == "missing column current_log_probs"


def test_normalised_weights_scale_the_update_that_they_multiply(worlds):
    weight = Weight("token", upper=1.4)
    for policy, scaled in (("old", True), ("current", False)):
        one = preset("one", "ppo_clip", policy=policy, weight=weight)
        two = replace(one, name="two", weight=replace(weight, normalize=True))
        plain, normal = numbers(worlds[0], one, two)
        factor = plain["weight_mean"] if scaled else 1.0
        assert normal["update_kept"] == pytest.approx(plain["update_kept"] / factor, rel=1e-12)
        assert normal["update_removed"] == plain["update_removed"]


def test_the_update_has_intervals(worlds):
    metrics = analyze([worlds[0].path], presets=[CASES[2]]).presets[CASES[2].name].metrics
    for name in ("update_kept", "update_removed", "update_removed_positive", "pg_loss_own", "loss_scale"):
        low, high = metrics[name].interval
        assert low < metrics[name].value < high


def test_without_advantages_the_update_is_unknown(tmp_path):
    path = tmp_path / "bare.parquet"
    with DumpWriter(path) as writer:
        writer.write(rollout_log_probs=[[-1.0]], old_log_probs=[[-1.1]])
    metrics = analyze([path], presets=[CASES[0]]).presets["ppo"].metrics

    assert metrics["update_removed"].unknown == "missing column advantages"


# ---------------------------------------------------------------- the edges


def test_advantages_of_zero_give_no_loss_and_no_update_to_speak_of(tmp_path):
    rows = [[(*FAR, 0.0), (*NEAR, 0.0)], [(*NEAR, 0.0)]]
    for loss in losses.LOSSES:
        got = tokens(tmp_path, rows, one=preset("one", loss, policy="current", weight=RAW))["one"]
        assert got["pg_loss"] == 0
        assert [got[f"update_{name}"] for name in ("kept", "removed", "removed_positive")] == [None] * 3


def test_a_dump_of_one_sign_has_no_share_of_the_other(tmp_path):
    got = tokens(tmp_path, [[(*FAR, 2.0)], [(*NEAR, 1.0)]], one=preset("one", "ppo_clip"))["one"]

    assert got["update_removed"] == got["update_removed_positive"] == pytest.approx(2 / 3)
    assert got["update_removed_negative"] is None


def test_rejecting_everything_leaves_no_loss_and_no_update(tmp_path):
    rows = [[(-1.0, -2.0, -2.0, 1.0)], [(-1.0, -3.0, -3.0, -1.0)]]
    for rule in ({"reject": (BAND,)}, {"reject": (GEOMETRIC,)}, {"veto": Veto(lower=0.9)}):
        got = tokens(tmp_path, rows, one=preset("one", "ppo_clip", weight=TOKEN, **rule))["one"]
        assert (got["pg_loss"], got["pg_loss_own"], got["pg_loss_kept"]) == (None, None, 0)
        assert (got["update_kept"], got["update_removed"]) == (0, 1)


@pytest.mark.parametrize("loss", losses.LOSSES)
def test_log_ratios_beyond_the_safety_bound_stay_finite(tmp_path, loss):
    rows = [[(-200.0, -200.0, -0.1, -1.0), (-0.1, -0.1, -200.0, 1.0)], [(-200.0, -200.0, -0.1, 1.0)]]
    for clip in (Clip(), Clip(None, None, None)):
        got = tokens(tmp_path, rows, one=preset("one", loss, clip=clip))["one"]
        assert all(math.isfinite(got[name]) for name in ("pg_loss", "update_kept", "update_removed"))


def test_on_policy_every_built_in_row_leaves_the_whole_update(tmp_path):
    x = world(tmp_path, seed=8, drift=0.0, step=0.0)
    rows = catalogue.load().resolve("all")
    for row, got in zip(rows, numbers(x, *rows), strict=True):
        assert got["update_kept"] == pytest.approx(1, rel=1e-12), row.name
        assert got["update_removed"] == 0, row.name
        assert got["loss_scale"] == pytest.approx(1, rel=1e-12), row.name
