"""Weights that do not arrive: the course of the mismatch over the steps, against the recorded lag."""

from __future__ import annotations

import numpy as np
import pytest

from offpol_diag.diagnosis import sync, verdict
from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.rows import Rows

STEPS, PROMPTS, ANSWERS, TOKENS = 12, 4, 4, 24
FRESH = 0.01
GROWING = [FRESH, *(0.1 * (1 + i) for i in range(STEPS - 1))]
JUMP = [FRESH, *[0.12] * (STEPS - 1)]
LATE = [*[FRESH] * 5, *(0.1 * (1 + i) for i in range(STEPS - 5))]
SAW = [FRESH if step % 3 == 0 else 0.1 * (step % 3) for step in range(STEPS)]
ODD = [FRESH if step in (0, 1, 6) else 0.2 for step in range(STEPS)]
HIGH = [0.3 * 1.2**step for step in range(STEPS)]
BY_LAG = {0: FRESH, 1: 0.1, 2: 0.2, 4: 0.4}


def rows(level, lag=0, engine_moves=True, hosts=1, place=None, **columns):
    """Return rows of a run whose |Δ|/(1 − q) is `level(step, host, lag)` on the average.

    `lag` is a number, or a function of step and host; None: not recorded. `place` multiplies the level by
    position. What the engine samples moves with the steps (reward and surprisal) or stands still.
    """
    chance = np.random.default_rng(5)
    q, p, position, scalars = [], [], [], {name: [] for name in ("step", "group_id", "rewards", "host")}
    scalars |= {name: [] for name in ("policy_lag", *columns)}
    for step in range(STEPS):
        for row in range(PROMPTS * ANSWERS):
            host = row % hosts
            own = lag(step, host) if callable(lag) else lag
            size = level(step, host, own) if callable(level) else level[step]
            log = -chance.exponential(1.0 + (0.1 * step if engine_moves else 0.0), TOKENS) - 0.05
            off = chance.normal(0.0, size * np.sqrt(np.pi / 2), TOKENS) * -np.expm1(log)
            if place is not None:
                off *= place(np.arange(TOKENS))
            q.append(log)
            p.append(log + off)
            position.append(np.arange(TOKENS))
            scalars["step"].append(step)
            scalars["group_id"].append(f"{step}-{row // ANSWERS}")
            scalars["rewards"].append(chance.normal() + (step if engine_moves else 0.0))
            scalars["host"].append(f"host-{host}")
            scalars["policy_lag"].append(own)
            for name, make in columns.items():
                scalars[name].append(make(step, host))
    starts = np.arange(len(q) + 1) * TOKENS
    return Rows(*(np.concatenate(x) for x in (q, p)), starts, np.concatenate(position), scalars=scalars)


CASES = {
    "in sync": (None, rows(lambda step, host, lag: FRESH)),
    "8-bit weights": (None, rows(lambda step, host, lag: 0.1)),
    "one step behind, as recorded": (None, rows(lambda s, h, lag: BY_LAG[lag], lag=lambda s, h: min(s, 1))),
    "a recorded saw-tooth": (None, rows(SAW, lag=lambda s, h: s % 3)),
    "a saw-tooth, no lag recorded": (None, rows(SAW, lag=None)),
    "hosts behind, as recorded": (
        None,
        rows(lambda s, h, lag: BY_LAG[lag], lag=lambda s, h: (0, 1, 2, 4)[h] if s >= 4 else 0, hosts=4),
    ),
    "growing and all behind, but the engine moves": (None, rows(HIGH, lag=2)),
    "weights stop arriving": ("sync_stopped", rows(LATE, engine_moves=False)),
    "weights never arrive": ("sync_stopped", rows(GROWING, engine_moves=False)),
    "never, and the dump begins later": ("sync_stopped", rows(HIGH, engine_moves=False)),
    "never, and the dump says two steps behind": ("sync_stopped", rows(HIGH, lag=2, engine_moves=False)),
    "an adapter at another scale": ("weights_differ", rows(GROWING)),
    "every third step": ("sync_period", rows(SAW)),
    "now and then": ("sync_period", rows(ODD)),
    "damaged by the first sync": ("sync_corrupts", rows(JUMP)),
    "a host that gets nothing": (
        "replica_stale",
        rows(lambda s, h, lag: GROWING[s] if h == 3 else FRESH, hosts=4, engine_moves=False),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_that_do_not_arrive_are_told_from_lags_that_are_written_down(case):
    cause, made = CASES[case]
    found = verdict.weights(made)
    assert (found and found.cause) == cause


def test_the_statement_names_steps_hosts_and_levels():
    def said(case):
        found = verdict.weights(CASES[case][1])
        return CAUSES[found.cause].sentence.format(where=found.where, **found.fields), found.statistic

    assert said("weights stop arriving")[0].startswith("new weights do not reach the engine, since step 5")
    assert "every 3 steps" in said("every third step")[0]
    assert "at steps 0, 1, 6 alone" in said("now and then")[0]
    assert "since step 1" in said("damaged by the first sync")[0]
    assert said("a host that gets nothing")[0].endswith("host = host-3")
    assert "0: 0.01" in said("every third step")[1]


def test_a_mismatch_that_decays_along_the_response_and_grows_is_an_old_prefix_cache():
    def decays(position):
        return 4.0 / np.log2(position + 2)

    level = [0.01 + 0.01 * step for step in range(STEPS)]
    assert verdict.weights(rows(level, place=decays)).cause == "stale_prefix_cache"
    found = verdict.weights(rows(level))
    assert found is None or found.cause != "stale_prefix_cache"


def test_digests_say_it_exactly():
    fresh = {"weight_digest_train": lambda s, h: f"w{s}"}
    same = rows(JUMP, lag=None, weight_digest_rollout=lambda s, h: f"w{s}", **fresh)
    assert verdict.weights(same) is None
    late = rows(JUMP, lag=None, weight_digest_rollout=lambda s, h: f"w{min(s, 4)}", **fresh)
    found = verdict.weights(late)
    assert (found.cause, found.exact, found.fields["since"]) == ("sync_stopped", True, "since step 5")
    other = rows(JUMP, lag=0, weight_digest_rollout=lambda s, h: f"v{s}", **fresh)
    assert verdict.weights(other).cause == "weights_differ"
    behind = rows(JUMP, lag=None, weight_digest_rollout=lambda s, h: f"w{s - 1}", **fresh)
    assert verdict.weights(behind) is None  # honestly older, for all that the dump says


def test_a_mean_that_moves_is_told_from_one_that_stands_still():
    still, moving = CASES["weights never arrive"][1], CASES["in sync"][1]
    assert sync.engine_moves(still) < sync.STILL
    assert sync.engine_moves(moving) > sync.MOVING
    assert sync.moves(still, [None] * still.sequences) is None
