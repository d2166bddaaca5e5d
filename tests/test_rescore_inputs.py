"""What hypotheses do to prompts and to models, and the numbers that the verdict rests on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offpol_diag.diagnosis.reference import beyond, mean_error
from offpol_diag.rescore.score import Row, score
from offpol_diag.rescore.variants import table
from tests import tiny

BOS, SYSTEM, USER, END, BOT = 90, 91, 92, 93, 94
START, STOP, LINE = 80, 81, 10


def of_roles(user):
    return [BOS, SYSTEM, 5, 6, 7, END, USER, *user, END, BOT]


def chatml(user):
    return [START, 30, LINE, 5, 6, 7, STOP, LINE, START, 31, LINE, *user, STOP, LINE, START, 32, LINE]


def rows(prompts, response=(1, 2, 3)):
    return [Row(np.array([*one, *response]), len(one)) for one in prompts]


USERS = ([40, 41], [42], [43, 44, 41], [45, 40, 46, 47])


def changed(prompts):
    """Return what each hypothesis of the prompt makes of prompts, and what cannot be tested."""
    found, left = table(tiny.model("qwen2"), rows(prompts), {})
    made = {one.name: one.rows(rows(prompts)) for one in found if one.row}
    assert all(row.ids[row.start :].tolist() == [1, 2, 3] for some in made.values() for row in some)
    return {name: [row.ids[: row.start].tolist() for row in some] for name, some in made.items()}, left


@pytest.mark.parametrize(("template", "keep", "cut", "end"), [(of_roles, 1, 6, 2), (chatml, 3, 8, 5)])
def test_hypotheses_of_the_prompt_take_one_part_of_the_template(template, keep, cut, end):
    prompts = [template(user) for user in USERS]
    found, _ = changed(prompts)
    bos = [BOS] if template is of_roles else []
    block = found[f"no system prompt ({keep} of its tokens left)"]
    assert block == [[*bos, *one[cut:]] for one in prompts]
    assert found["no generation prompt"] == [one[:-end] for one in prompts]
    assert found["no prompt"] == [one[-1:] for one in prompts]
    assert found["no BOS"] == [one[1:] for one in prompts]
    assert found["two BOS"] == [[one[0], *one] for one in prompts]


def test_a_prompt_is_never_empty_and_what_has_nothing_in_common_is_not_testable():
    found, left = changed([[4], [4]])
    assert found["no BOS"] == [[4], [4]]
    _, left = changed([[4, 5], [6, 7]])
    assert {"no system prompt", "no generation prompt", "no BOS, two BOS"} <= set(left)


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        ("llama", {"RoPE scaling off"}),
        ("mixtral", {"window off"}),
        ("gemma2", {"window off", "soft-cap off"}),
        ("gpt_oss", {"window off", "sinks off", "RoPE scaling off"}),
        ("gpt2", set()),
    ],
)
def test_hypotheses_of_an_architecture_are_made_and_undone(kind, has):
    made, given = tiny.model(kind), tiny.rows()
    before, state = score(made, given)[0], {k: v.clone() for k, v in made.state_dict().items()}
    found, left = table(made, given, {})

    every = {"window off", "soft-cap off", "sinks off", "RoPE scaling off"}
    assert {one.name for one in found} & every == has
    assert {"adapter", *(every - has)} <= set(left)
    for one in found:
        with one.of(made) as other:
            values = score(other, one.rows(given), [one.head])[0]
        assert np.isfinite(values).all()
        assert one.name == "as given" or (values != before).any(), one.name
        assert (score(made, given)[0] == before).all(), one.name
    assert all(torch.equal(one, state[name]) for name, one in made.state_dict().items())


def reconfigured(kind, **change):
    """Make the model again under another configuration."""
    name, given = tiny.KINDS[kind]
    tiny.KINDS["another"] = name, given | change
    try:
        return tiny.model("another")
    finally:
        del tiny.KINDS["another"]


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("mixtral", "window off", {"sliding_window": None}),
        ("gemma2", "soft-cap off", {"final_logit_softcapping": None, "attn_logit_softcapping": None}),
        ("llama", "RoPE scaling off", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    ],
)
def test_a_hypothesis_of_the_architecture_is_the_model_under_another_configuration(kind, name, change):
    made, given = tiny.model(kind), tiny.rows()
    (hypothesis,) = [one for one in table(made, given, {})[0] if one.name == name]
    want = np.concatenate(tiny.plainly(reconfigured(kind, **change), given))
    with hypothesis.of(made) as other:
        assert np.abs(score(other, given)[0] - want).max() <= 3e-5


# ---------------------------------------------------------------- numbers


def test_the_error_of_a_mean_is_clustered_by_group():
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(50), 40)
    shared = random.normal(size=50)[groups]

    mean, error = mean_error(shared, groups)

    assert mean == pytest.approx(shared.mean())
    assert error == pytest.approx(shared[::40].std(ddof=1) / np.sqrt(50), rel=1e-6)
    assert mean_error(shared[:40], groups[:40])[1] == np.inf


def test_beyond_the_floors():
    groups, noise = np.repeat(np.arange(10), 20), np.full(200, 0.01)
    assert not beyond(np.full(200, 0.02), noise, groups)
    assert beyond(np.full(200, 0.04) + np.arange(200) * 1e-5, noise, groups)
    assert not beyond(np.full(20, 1.0), noise[:20], groups[:20])  # one group
