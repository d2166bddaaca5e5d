"""What hypotheses do to prompts and positions, and the numbers that the verdict rests on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offpol_diag.diagnosis.reference import beyond, mean_error, outcome
from offpol_diag.rescore.score import Row
from offpol_diag.rescore.variants import inputs, rounding
from offpol_diag.rescore.variants.inputs import system_block, without_beginning, without_system

BOS, SYSTEM, USER, END, BOT = 90, 91, 92, 93, 94
START, STOP, LINE = 80, 81, 10


def of_roles(user):
    return [BOS, SYSTEM, 5, 6, 7, END, USER, *user, END, BOT]


def chatml(user):
    return [START, 30, LINE, 5, 6, 7, STOP, LINE, START, 31, LINE, *user, STOP, LINE, START, 32, LINE]


def rows(prompts, response=(1, 2, 3)):
    return [Row(np.array([*one, *response]), len(one)) for one in prompts]


USERS = ([40, 41], [42], [43, 44, 41], [45, 40, 46, 47])


@pytest.mark.parametrize(
    ("template", "marks", "cut"),
    [
        (of_roles, {BOS, SYSTEM, USER, END, BOT}, lambda one: [BOS, *one[6:]]),
        (chatml, {START, STOP}, lambda one: one[8:]),
    ],
)
def test_the_system_block_goes_and_nothing_else(template, marks, cut):
    prompts = [template(user) for user in USERS]

    found = without_system(rows(prompts), marks)

    assert [row.ids[: row.start].tolist() for row in found] == [cut(one) for one in prompts]
    assert all(row.ids[row.start :].tolist() == [1, 2, 3] for row in found)


def test_where_there_is_no_block_nothing_goes():
    assert system_block(np.array([1, 2, 3]), {9}) == (0, 0)
    (row,) = without_system(rows([[1, 2, 3]]), {9})
    assert row.ids.tolist() == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(("template", "keep", "cut"), [(of_roles, 1, 6), (chatml, 3, 8)])
def test_without_marks_what_prompts_begin_with_goes_but_for_the_users_header(template, keep, cut):
    prompts = [template(user) for user in USERS]
    found = without_beginning(rows(prompts), keep)
    bos = [BOS] if template is of_roles else []
    assert [row.ids[: row.start].tolist() for row in found] == [[*bos, *one[cut:]] for one in prompts]


def test_a_prompt_is_never_empty_and_positions_jump_at_the_response():
    (row,) = inputs.cut(rows([[4, 5]]), lambda prompt: prompt[2:])
    assert row.ids.tolist() == [5, 1, 2, 3]
    assert row.start == 1
    (row,) = inputs.moved(rows([[4, 5]]), lambda row: 10)
    assert row.positions.tolist() == [0, 1, 12, 13, 14]
    long, short = inputs.padded(rows([[4, 5, 6], [7]]), 0)
    assert short.ids.tolist() == [0, 0, 7, 1, 2, 3]
    assert (long.start, short.start) == (3, 3)


# ---------------------------------------------------------------- rounding


def nearest(x, levels):
    levels = np.asarray(levels, np.float64)
    return levels[np.abs(np.asarray(x, np.float64)[..., None] - levels).argmin(-1)]


def e4m3_levels():
    positive = [m / 8 * 2.0**-6 for m in range(8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return sorted({*positive, *(-one for one in positive)})


def test_fp8_is_the_nearest_of_its_values_under_the_scale():
    w = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))

    for how, axis in ((rounding.fp8_tensor, None), (rounding.fp8_channel, 1)):
        x = w.double().numpy()
        scale = np.abs(x).max(axis=axis, keepdims=axis is not None) / 448
        want = nearest(x / scale, e4m3_levels()) * scale
        assert np.abs(how(w, -1).double().numpy() - want).max() < 1e-6 * np.abs(x).max() + 0.07 * scale.max()
    assert (rounding.fp8_block(w) - rounding.fp8_tensor(w)).abs().max() < 1e-6  # one block


def test_integers_are_the_nearest_level_of_their_row_or_group():
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).double()

    x = w.numpy()
    scale = np.abs(x).max(1, keepdims=True) / 127
    assert np.abs(rounding.int8_channel(w, -1).numpy() - np.rint(x / scale) * scale).max() < 1e-5
    parts = x.reshape(6, 2, 32)
    scale = np.abs(parts).max(-1, keepdims=True) / 7
    want = (np.rint(parts / scale) * scale).reshape(6, 64)
    assert np.abs(rounding.int4_group(w, -1).numpy() - want).max() < 1e-5
    turned = rounding.int4_group(w.T.contiguous(), -2)
    assert np.abs(turned.T.numpy() - want).max() < 1e-5


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


@pytest.mark.parametrize(
    ("odd", "alike", "want"),
    [
        ((False, False), True, "same"),
        ((True, False), False, "engine"),
        ((False, True), False, "trainer"),
        ((True, True), False, "both"),
        ((True, True), True, "reference"),
    ],
)
def test_the_five_outcomes(odd, alike, want):
    assert outcome(*odd, alike) == want
