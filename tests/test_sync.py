"""Weights that do not arrive: level of the mismatch and drift over the steps, against the recorded lag."""

from __future__ import annotations

import numpy as np
import pytest

from offpol_diag.diagnosis import drift, honest, sync, verdict
from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.rows import Rows

STEPS, PROMPTS, ANSWERS, TOKENS, WORDS = 12, 6, 4, 40, 24


def rows(
    engine=lambda step, host: step,
    lag=lambda step, host: 0,
    *,
    hosts=1,
    noise=0.01,
    speed=0.1,
    prompts=PROMPTS,
    ids=True,
    older=lambda chance, many: 0.0,
    rates=None,
    task=None,
    steps=STEPS,
    first=0,
    wander=0.0,
):
    """Return rows of a run: a softmax of `WORDS` tokens whose logits move by `speed` a step.

    Args:
        engine: version of the engine's weights at a step on a host, a number that need not be whole.
        lag: recorded policy lag, or None.
        hosts: number of hosts, which share the prompts of a step.
        noise: of logits, a number or a function of step.
        speed: of the trainer, logits per step.
        prompts: per step.
        ids: whether token ids are written.
        older: (random numbers, responses) → versions by which tokens are older, [responses, tokens].
        rates: relative learning rate of each step.
        task: spread of the logits of a step.
        steps: number of steps.
        first: the first of them that is written.
        wander: size of moves in another direction at each step, in the trainer's steady ones.
    """
    chance = np.random.default_rng(7)
    course = np.concatenate(([0.0], np.cumsum(np.ones(steps) if rates is None else rates)))
    course = np.concatenate((course, course[-1] + np.arange(1, steps + 1)))
    direction = chance.normal(0.0, speed, WORDS)
    base = chance.normal(0.0, 1.0, WORDS)
    moves = np.diff(course, prepend=0.0)[:, None] * (direction + wander * speed * other(len(course)))
    path = np.cumsum(moves, axis=0)
    q, p, found = [], [], []
    scalars = {name: [] for name in ("step", "group_id", "policy_lag", "host")}

    def version(number):
        number = np.maximum(number, 0.0)
        low = np.floor(number).astype(int)
        return path[low] + np.asarray(number - low)[..., None] * (path[low + 1] - path[low])

    place, many = np.arange(TOKENS), prompts * ANSWERS
    for step in range(first, steps):
        wide = 1.0 if task is None else task(step)
        size = noise(step) if callable(noise) else noise
        host = np.arange(many) // ANSWERS % hosts
        held = np.array([engine(step, one) for one in range(hosts)], float)[host]
        sampled = held[:, None] - older(chance, many) * np.ones(TOKENS)
        context = base * wide + chance.normal(0.0, 0.7 * wide, (many, TOKENS, WORDS))
        own = version(sampled) + chance.normal(0.0, size, context.shape)
        logits = np.stack([context + own, context + version(step)])
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        below = np.exp(logs[0]).cumsum(-1) < chance.random((many, TOKENS, 1))
        drawn = np.minimum(below.sum(-1), WORDS - 1)
        for x, column in zip((q, p), logs, strict=True):
            x.extend(np.take_along_axis(column, drawn[..., None], -1)[..., 0])
        found.extend(drawn)
        scalars["step"] += [step] * many
        scalars["group_id"] += [f"{step}-{row // ANSWERS}" for row in range(many)]
        scalars["host"] += [f"host-{one}" for one in host]
        scalars["policy_lag"] += [lag(step, one) if lag else None for one in host]
    starts = np.arange(len(q) + 1) * TOKENS
    positions = np.tile(place, len(q))
    tokens = np.concatenate(found) if ids else None
    return Rows(np.concatenate(q), np.concatenate(p), starts, positions, tokens, scalars=scalars)


def other(steps):
    return np.random.default_rng(8).normal(0.0, 1.0, (steps, WORDS))


def in_flight(chance, many):
    """Return ages of tokens whose weights changed three times within the first 20."""
    return (chance.integers(1, 20, (many, 3))[:, :, None] > np.arange(TOKENS)).sum(1)


def at_any_token(chance, many):
    """Return ages of tokens whose weights changed three times, after 20 tokens each on the average."""
    return (1 + chance.exponential(20, (many, 3))[:, :, None] > np.arange(TOKENS)).sum(1)


LATER = (0.02, 0.02, 0.02, *[0.3 * step for step in range(1, STEPS - 2)])
RISING = [2 * (step + 1) / STEPS for step in range(STEPS)]
WARM = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, *[1.5] * (STEPS - 6))
HONEST = {
    "in sync": {},
    "4-bit weights": {"noise": 0.2},
    "two steps behind, as recorded": {"engine": lambda s, h: s - 2, "lag": lambda s, h: min(s, 2)},
    "two behind, the learning rate warms up": {
        "engine": lambda s, h: s - 2,
        "lag": lambda s, h: 2,
        "rates": WARM,
    },
    "two behind, as recorded, in a run that collapses": {
        "engine": lambda s, h: s - 2,
        "lag": lambda s, h: 2,
        "rates": [1.6**step / 12 for step in range(STEPS)],
    },
    "a recorded saw-tooth": {"engine": lambda s, h: s - s % 4, "lag": lambda s, h: s % 4},
    "a saw-tooth, no lag recorded": {"engine": lambda s, h: s - s % 4, "lag": None},
    "no lag recorded, and one sync in twelve steps": {"engine": lambda s, h: 0, "lag": None},
    "hosts behind, as recorded": {
        "engine": lambda s, h: s - (0, 1, 2, 4)[h],
        "lag": lambda s, h: min(s, (0, 1, 2, 4)[h]),
        "hosts": 4,
        "prompts": 16,
    },
    "a precision that changes at a resume": {"noise": lambda s: 0.01 if s < 6 else 0.15},
    "one step of another precision": {"noise": lambda s: 0.2 if s == 5 else 0.01},
    "tasks by turns": {"noise": lambda s: 0.12 if s % 2 else 0.01, "task": lambda s: 0.5 if s % 2 else 1.5},
    "three tasks by turns": {"noise": lambda s: (0.01, 0.1, 0.2)[s % 3]},
    "noise that grows": {"noise": lambda s: 0.08 * (1 + 0.12 * s)},
    "noise that explodes": {"noise": lambda s: 0.01 * 1.5**s, "speed": 0.02},
    "easy to hard": {"noise": 0.1, "task": lambda s: 2.0 - 0.12 * s},
    "few prompts": {"engine": lambda s, h: 0, "prompts": 3},
    "a trainer that hardly moves": {"engine": lambda s, h: 0, "speed": 0.002},
    "a recorded saw-tooth of eight steps": {
        "engine": lambda s, h: s - s % 8,
        "lag": lambda s, h: s % 8,
        "first": 1,
        "steps": STEPS + 1,
    },
    "one behind, not recorded, the learning rate rises late": {"engine": lambda s, h: s - 1, "rates": LATER},
    "three behind, not recorded, the learning rate rises": {"engine": lambda s, h: s - 3, "rates": RISING},
    "three behind, not recorded, in five steps": {"engine": lambda s, h: s - 3, "speed": 0.3, "steps": 5},
    "six behind, not recorded": {"engine": lambda s, h: s - 6, "rates": [1.1**step for step in range(STEPS)]},
    "three behind, not recorded, the learning rate rises late": {
        "engine": lambda s, h: s - 3,
        "rates": LATER,
    },
    "six behind, not recorded, in eight steps": {"engine": lambda s, h: s - 6, "steps": 8, "prompts": 8},
    "one ahead, the learning rate rises": {"engine": lambda s, h: s + 1, "rates": RISING},
    "four optimiser steps a batch while the learning rate warms up": {
        "engine": lambda s, h: s - s % 4,
        "rates": WARM,
    },
    "exact kernels, a frozen policy, then noise": {
        "noise": lambda s: 1e-5 if s < 4 else 0.2 * (1 + 0.15 * (s - 4)),
        "speed": 0.0,
    },
    "exact kernels, a frozen policy, three precisions by turns": {
        "noise": lambda s: (1e-5, 0.1, 0.4)[s % 3],
        "speed": 0.0,
    },
    "exact kernels without token ids, three tasks by turns": {
        "noise": lambda s: (1e-5, 0.1, 0.4)[s % 3],
        "ids": False,
    },
    "weights that change within the first tokens": {"older": in_flight},
    "weights that change as often at any token": {"older": at_any_token},
}
BUGS = {
    "weights never arrive": ("sync_stopped", {"engine": lambda s, h: 0}),
    "weights stop arriving": ("sync_stopped", {"engine": lambda s, h: min(s, 4)}),
    "never, and the dump begins later": ("sync_stopped", {"engine": lambda s, h: -4}),
    "never, and the dump says two behind": (
        "sync_stopped",
        {"engine": lambda s, h: 0, "lag": lambda s, h: min(s, 2)},
    ),
    "every third step": ("sync_period", {"engine": lambda s, h: s - s % 3}),
    "half of an adapter": ("weights_differ", {"engine": lambda s, h: s / 2}),
    "twice an adapter": ("weights_differ", {"engine": lambda s, h: 2 * s}),
    "a host that gets nothing": (
        "replica_stale",
        {"engine": lambda s, h: 0 if h == 3 else s, "hosts": 4, "prompts": 8},
    ),
    "keys of an older prompt": (
        "stale_prefix_cache",
        {"older": lambda chance, many: 6 / (1 + np.arange(TOKENS))},
    ),
}


def said(found):
    return CAUSES[found.cause].sentence.format(where=found.where, share="", **found.fields)


@pytest.mark.parametrize("case", HONEST)
def test_honest_runs_are_called_no_bug(case):
    assert verdict.weights(rows(**HONEST[case]), plain="") is None


@pytest.mark.parametrize("case", BUGS)
def test_weights_that_do_not_arrive_are_named(case):
    cause, how = BUGS[case]
    found = verdict.weights(rows(**how))
    assert (found and found.cause) == cause


def test_the_statement_names_steps_hosts_and_what_was_measured():
    def of(case):
        return verdict.weights(rows(**BUGS[case][1]))

    stopped, period = of("weights stop arriving"), of("every third step")
    assert said(stopped).startswith("new weights do not reach the engine since step 5")
    assert "every 3 steps" in said(period)
    assert said(of("a host that gets nothing")).endswith("host = host-3")
    assert "of the trainer's movement" in stopped.statistic
    assert f"by the drift of {WORDS} token ids" in period.statistic


def test_a_jump_is_damage_only_if_the_metadata_or_its_size_rule_out_a_precision():
    def jumps(size):
        return rows(noise=lambda s: 0.01 if s < 3 else size)

    assert verdict.weights(jumps(0.2)) is None
    assert verdict.weights(jumps(0.2), plain="rollout_dtype: bfloat16").cause == "sync_corrupts"
    assert verdict.weights(jumps(0.03), plain="rollout_dtype: bfloat16") is None
    assert verdict.weights(jumps(0.1), plain="rollout_dtype: bfloat16") is None
    large = verdict.weights(jumps(0.8))
    assert (large.cause, large.fields["since"]) == ("sync_corrupts", "3")


def test_damage_that_looks_as_if_the_engine_were_ahead_is_damage():
    made = rows(engine=lambda s, h: s + 3 * (s > 2), noise=lambda s: 0.01 if s < 3 else 0.8)
    assert verdict.weights(made).cause == "sync_corrupts"


def test_one_step_behind_from_a_step_on_is_no_damage():
    made = rows(engine=lambda s, h: s - (s > 4), wander=6, speed=0.2, noise=0.005)
    assert verdict.weights(made, plain="rollout_dtype: bfloat16") is None


def test_without_token_ids_only_levels_of_the_same_weights_and_kernels_decide():
    every = {"engine": lambda s, h: s - s % 3, "ids": False, "speed": 0.5}
    assert verdict.weights(rows(**every)) is None
    assert verdict.weights(rows(**every, noise=1e-5)).cause == "sync_period"
    until = {"engine": lambda s, h: min(s, 4), "ids": False}
    assert verdict.weights(rows(**until)) is None
    assert verdict.weights(rows(**until, noise=1e-5)) is None  # or a lag of one step, while the rate warms up
    by_turns = rows(noise=lambda s: (1e-5, 0.03, 0.13)[s % 3], ids=False)
    assert verdict.weights(by_turns) is None


@pytest.mark.parametrize(
    ("held", "late", "share"),
    [
        (lambda s, h: s, 0.0, 1.0),
        (lambda s, h: s - 1, 1.0, 1.0),
        (lambda s, h: s - 3, 3.0, 1.0),
        (lambda s, h: 0, 5.5, 0.0),
        (lambda s, h: s / 2, 2.75, 0.5),
    ],
)
@pytest.mark.parametrize("noise", [0.01, 0.15])
def test_the_drift_tells_how_far_the_engine_is_behind(held, late, share, noise):
    made = rows(engine=held, noise=noise)
    found = drift.measure(made)
    assert abs(found.whole.value - late) < max(0.3 * late, 0.15)  # of the first steps it has version 0
    assert abs(found.carried.value - share) < max(4 * found.carried.error, 0.25)
    later = found.carries(found.steps > 5)
    assert abs(later.value - share) < max(4 * later.error, 0.1)


def test_an_engine_that_stands_still_is_not_stale_as_recorded():
    """Its K3 rises with a lag of 0, 1 and then 2, but it falls behind by more."""

    def stale(engine):
        return honest.stale(honest.Seen(rows(engine=engine, lag=lambda s, h: min(s, 2))))

    assert stale(lambda s, h: s - 2) is not None
    assert stale(lambda s, h: 0) is None


def test_rounding_is_not_named_where_the_first_tokens_are_of_older_weights():
    old = honest.Seen(rows(older=lambda chance, many: 2 / (1 + np.arange(TOKENS)), speed=0.05))
    assert honest.named(old, healthy=True) is None
    vars(old)["decay"] = []
    assert honest.named(old, healthy=True).cause == "numerics"


def test_no_drift_is_measured_of_few_versions():
    assert drift.measure(rows(**HONEST["a recorded saw-tooth of eight steps"])) is None


def test_the_drift_follows_the_versions_of_tokens():
    made = rows(engine=lambda s, h: 0, lag=lambda s, h: s, speed=0.15)
    one = np.zeros(made.tokens, np.int64)
    step = np.array(made.column("step"))[made.owner]
    honest = drift.measure(Rows(**{**vars_of(made), "versions": one}))
    wrong = drift.measure(Rows(**{**vars_of(made), "versions": np.where(made.index < 10, 0, step)}))
    assert honest is None  # all tokens are of version 0: there is no movement to compare
    assert wrong is not None
    assert wrong.carried.high < 0.5


def vars_of(made):
    names = ("q", "p", "starts", "position", "ids", "scalars")
    return {name: getattr(made, name) for name in names}


def test_steps_with_too_few_rows_are_left_out():
    made = rows(prompts=3)
    assert drift.enough(made).sequences == 0
    assert drift.enough(rows(prompts=4)).sequences == 16 * STEPS
    assert not sync.course(drift.enough(made))
