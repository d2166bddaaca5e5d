"""`offpol_diag.torch.correct`: weights, mask and metrics of padded tensors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject, Weight, catalogue
from offpol_diag.torch import correct
from tests import oracles
from tests.reading import analyze

BUILT_IN = catalogue.load()
RAW = Preset("raw", "", weight=Weight(action="none", safety=None), reject=(Reject("prob_diff", upper=0.2),))


@cache
def rows():
    """Make the rows of one step: a batch in a trainer's loop is one."""
    return [{**row, "step": 0} for row in oracles.make_rows(0.3, seed=5, outliers=0.02)]


@cache
def padded():
    """Return the rows as a trainer holds them, [S, L]; padding is garbage under a mask of 0."""
    width = max(len(row["rollout_log_probs"]) for row in rows())

    def pad(name, fill):
        return torch.tensor(
            [row[name] + [fill] * (width - len(row[name])) for row in rows()], dtype=torch.float64
        )

    return {
        "rollout": pad("rollout_log_probs", float("nan")),
        "old": pad("old_log_probs", 7.0),
        "current": pad("current_log_probs", float("inf")),
        "mask": pad("response_mask", 0),
        "advantages": pad("advantages", 1e300),
    }


def given(preset):
    """Return the arguments of `correct` for a preset, without those it does not need."""
    every = padded()
    return {name: every[name] for name in ("rollout", "mask", "advantages")} | {"train": every[preset.policy]}


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_weights_and_mask_are_the_oracles(name):
    preset = BUILT_IN[name]
    data = oracles.sequences(rows())
    cuts = oracles.cuts_of(data, preset)
    done = [oracles.apply(s, preset, cuts[0]) for s in data]
    norm = oracles._norms(data, done, preset)[0]

    found = correct(preset, **given(preset))

    there = padded()["mask"] == 1
    assert found.mask[there].tolist() == [kept for one in done for kept in one.kept]
    assert found.weights[there].numpy() == pytest.approx(
        [w / norm * kept for one in done for w, kept in zip(one.weights, one.kept, strict=True)], rel=1e-12
    )
    assert not found.mask[~there].any()
    assert not found.weights[~there].any()


@pytest.mark.parametrize("name", ["token_is", "seq_mis", "seq_is_norm", "m2po", "slime_mis", "gspo"])
def test_metrics_are_those_of_analyze(name, tmp_path):
    preset, args = BUILT_IN[name], given(BUILT_IN[name])
    have = {"response_mask", *(f"{one}_log_probs" for one in ("rollout", preset.policy)), "advantages"}
    dump = [{key: x for key, x in row.items() if key in have} for row in rows()]
    want = analyze(oracles.write(dump, tmp_path / "dump.parquet"), presets=[name], device="cpu")
    wanted = {**want.whole, **want.preset(next(iter(want.presets)))}

    found = correct(name, **args).metrics

    known = {key: one.value for key, one in wanted.items() if one.value is not None}
    assert found == pytest.approx(known, rel=1e-9, abs=1e-12)
    assert {"k3", "ess_tokens", "tokens_rejected"} <= set(found)


@pytest.mark.parametrize(
    ("dtype", "of_weights"),
    [(torch.bfloat16, torch.bfloat16), (torch.float64, torch.float64), (torch.int64, torch.float32)],
)
def test_weights_have_the_dtype_of_train_and_no_gradient(dtype, of_weights):
    train = torch.tensor([[-2, -2]], dtype=dtype, requires_grad=dtype.is_floating_point)
    found = correct("token_is", rollout=torch.tensor([[-1, -3]]), train=train).weights

    assert (found.dtype, found.requires_grad) == (of_weights, False)
    assert found.tolist() == [[pytest.approx(math.exp(-1), rel=4e-3), 2.0]]


def test_a_rejected_token_has_weight_0_and_a_kept_one_what_the_dtype_holds():
    for dtype, lowest in ((torch.float32, -100.0), (torch.bfloat16, -100.0), (torch.float16, -20.0)):
        rollout, train = torch.tensor([[lowest, -11.5, -1.0]]), torch.full((1, 3), -0.5, dtype=dtype)
        kept = correct(replace(RAW, reject=()), rollout=rollout, train=train)
        assert kept.mask.all()
        want = [torch.finfo(dtype).max, *[pytest.approx(math.exp(x), rel=4e-3) for x in (11.0, 0.5)]]
        assert kept.weights.tolist() == [want]

        dropped = correct(RAW, rollout=rollout, train=train)
        assert (dropped.mask.any(), dropped.weights.any()) == (False, False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_a_mask_of_0_and_1_may_have_any_dtype(dtype):
    x, mask = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[1, 0, 1]], dtype=dtype)
    assert correct("token_is", rollout=x, train=x, mask=mask).mask.tolist() == [[True, False, True]]


@pytest.mark.parametrize(("shape", "counts"), [((2, 3), 0), ((0, 3), 1), ((2, 0), 1)])
def test_a_batch_in_which_no_token_counts_has_weights_of_1_keeps_nothing_and_has_no_numbers(shape, counts):
    x, signs = -torch.rand(shape, dtype=torch.bfloat16), torch.tensor([1.0, -1.0])[: shape[0]]
    for preset in BUILT_IN.values():
        mask = torch.full(shape, counts)
        found = correct(preset, rollout=x, train=x, advantages=signs, mask=mask)
        assert found.weights.equal(torch.ones_like(x)), preset.name
        assert not found.mask.any(), preset.name
        assert found.metrics == {}, preset.name


def test_a_compiled_function_gets_the_weights_mask_and_metrics_of_an_eager_one():
    def loss(rollout, train, mask):
        found = correct("token_icepop", rollout=rollout, train=train, mask=mask)
        own = found.metrics
        return (found.weights * train * found.mask).sum() * own["ess_tokens"], own["tokens_rejected"]

    rollout, mask = -torch.rand(4, 8), torch.ones(4, 8)
    train = (rollout + torch.randn(4, 8)).requires_grad_()
    want, got = loss(rollout, train, mask), torch.compile(loss, backend="eager")(rollout, train, mask)
    assert got[0].item() == want[0].item()
    assert got[1] == want[1]
    slopes = [torch.autograd.grad(one[0], train)[0].tolist() for one in (want, got)]
    assert slopes[0] == slopes[1]


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("preset", "args", "said"),
    [
        ("tokn_is", {}, "unknown preset"),
        ("all", {}, "presets"),
        ("token_is", {"train": X[:, :2]}, "train has the shape"),
        ("token_is", {"mask": X[0]}, "mask has the shape"),
        ("token_is", {"advantages": X[0]}, "advantages has the shape"),
        ("token_is", {"train": X / 0}, "log-probs under the mask are NaN"),
        *(("token_is", {"mask": x}, "must be 0 or 1") for x in (X + 0.5, X - 1, X / 0, X.long() + 2)),
        ("gspo", {"rollout": X + 1e9}, "log-probs under the mask are .* positive"),
    ],
)
def test_bad_input_is_refused(preset, args, said):
    with pytest.raises(UsageError, match=said) as refused:
        correct(preset, **({"rollout": X, "train": X} | args))
    assert refused.value.hint
