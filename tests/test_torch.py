"""`offpol_diag.torch.correct`: weights, mask and metrics of padded tensors."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from offpol_diag.analyze import analyze
from offpol_diag.errors import UsageError
from offpol_diag.presets import catalogue
from offpol_diag.torch import correct
from tests import oracles

BUILT_IN = catalogue.load()


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
    every, side = padded(), "old" if preset.policy == "old" else "current"
    other = {"old", "current"} - {side}
    more = {name: every[name] for name in other if any(rule.policy == name for rule in preset.reject)}
    return {name: every[name] for name in ("rollout", "mask", "advantages")} | {"train": every[side]} | more


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_weights_and_mask_are_the_oracles(name):
    preset = BUILT_IN[name]
    data = oracles.sequences(rows())
    scopes = oracles.scopes_of(data, preset)
    done = [oracles.apply(s, preset, scopes[0]) for s in data]
    norm = oracles._norms(data, done, preset)[0]

    found = correct(preset, **given(preset))

    there = padded()["mask"] == 1
    assert found.mask[there].tolist() == [kept for one in done for kept in one.kept]
    assert found.weights[there].numpy() == pytest.approx(
        [w / norm for one in done for w in one.weights], rel=1e-12
    )
    assert not found.mask[~there].any()
    assert not found.weights[~there].any()


@pytest.mark.parametrize(
    "name", ["token_is", "seq_mis", "verl_2026_01_seq_is_norm", "psis_sequence", "m2po", "slime_mis", "gspo"]
)
def test_metrics_are_those_of_analyze(name, tmp_path):
    preset, args = BUILT_IN[name], given(BUILT_IN[name])
    side = "old" if preset.policy == "old" else "current"
    have = {"response_mask", *(f"{one}_log_probs" for one in ("rollout", side)), "advantages"}
    have |= {f"{one}_log_probs" for one in ("old", "current") if one in args}
    dump = [{key: x for key, x in row.items() if key in have} for row in rows()]
    want = analyze(oracles.write(dump, tmp_path / "dump.parquet"), presets=[name], device="cpu")
    wanted = {**want.metrics, **next(iter(want.presets.values())).metrics}

    _, _, found = correct(name, **args)

    known = {key: one.value for key, one in wanted.items() if one.value is not None}
    assert found == pytest.approx(known, rel=1e-9, abs=1e-12)
    assert {"k3", "ess_tokens", "tokens_rejected"} <= set(found)


def test_dtype_and_gradient():
    train = torch.tensor([[-1.5, -0.5]], dtype=torch.bfloat16, requires_grad=True)
    found = correct("token_is", rollout=torch.tensor([[-1.0, -2.0]]), train=train)

    assert found.weights.dtype == torch.bfloat16
    assert not found.weights.requires_grad
    assert found.weights.tolist() == [[pytest.approx(0.6065, rel=4e-3), 2.0]]


def test_nothing_under_the_mask():
    nothing = torch.zeros(2, 3)
    found = correct("seq_mis", rollout=nothing, train=nothing, mask=nothing)
    assert not found.mask.any()
    assert not found.weights.any()


X = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("preset", "args", "said"),
    [
        ("tokn_is", {}, "unknown preset"),
        ("all", {}, "presets"),
        ("token_is", {"train": X[:, :2]}, "one shape"),
        ("token_is", {"mask": X[0]}, "one shape"),
        ("token_is", {"advantages": X[0]}, "advantages have shape"),
        ("token_is", {"train": X / 0}, "train holds log-probs under the mask that are NaN"),
        ("token_is", {"old": X}, "that is `train`"),
        ("gspo", {"rollout": X + 1e9}, "rollout holds log-probs .* positive"),
    ],
)
def test_bad_input_is_refused(preset, args, said):
    with pytest.raises(UsageError, match=said) as refused:
        correct(preset, **({"rollout": X, "train": X} | args))
    assert refused.value.hint
