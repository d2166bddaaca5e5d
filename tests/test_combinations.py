"""Every statistic at every level beside every trainer's logged numbers is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from offpol_diag import DumpWriter
from offpol_diag.analyze import analyze
from offpol_diag.presets import (
    Among,
    Loss,
    Over,
    Preset,
    Reject,
    Sign,
    SignOf,
    Statistic,
    Weight,
)
from offpol_diag.presets.grammar import LOGS

WEIGHTS = (
    None,
    Weight("token", "truncate", upper=2.0),
    Weight("sum", "truncate", upper=2.0, normalize=True),
    Weight("mean", "mask", lower=0.9, upper=1.1),
    Weight("segment", "none"),
    Weight("token", "psis"),
)
BOUNDS = {"ratio": (0.5, 2.0), "k1": (-0.3, 0.3), "mult_prob_error": (None, 1.5)}


def presets(logs: str) -> Iterator[Preset]:
    """All pairs of statistic and level, plain, and with what else a rule can have, at random."""
    random = np.random.default_rng(LOGS.index(logs))
    for statistic in get_args(Statistic):
        for over in get_args(Over):
            low, high = BOUNDS.get(statistic, (None, 0.1))
            bounds = (None if over == "batch" else low, high)
            odd = {
                "advantage": str(random.choice(get_args(Sign))),
                "advantage_of": str(random.choice(get_args(SignOf))),
                "among": str(random.choice(get_args(Among))),
                "strict": bool(random.integers(2)),
            }
            negative = {"advantage": "negative", "advantage_of": "token"}
            for kind, more in {"plain": {}, "negative": negative, "odd": odd}.items():
                rule = Reject(statistic, over, *bounds, **more)
                if not list(rule.slips()):
                    yield Preset(
                        name=f"{statistic}_{over}_{kind}",
                        summary="",
                        family="token IS",
                        policy=("old", "current")[random.integers(2)],
                        reject=(rule,),
                        weight=WEIGHTS[random.integers(len(WEIGHTS))],
                        loss=str(random.choice(get_args(Loss))),  # type: ignore[arg-type]
                        logs=logs,
                    )


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("combinations") / "small.parquet"
    with DumpWriter(path) as writer:
        for step in range(2):
            lengths = random.integers(1, 9, 12)
            rollout = [-random.exponential(1, n) for n in lengths]
            old = [np.minimum(row + random.normal(0, 0.6, len(row)), -1e-6) for row in rollout]
            current = [np.minimum(row + random.normal(0, 0.3, len(row)), -1e-6) for row in old]
            writer.write(
                rollout_log_probs=rollout,
                old_log_probs=old,
                current_log_probs=current,
                advantages=[float(a) for a in random.normal(size=12)],
                rewards=[float(a) for a in random.integers(0, 2, 12)],
                group_id=[f"{step}.{i // 4}" for i in range(12)],
                step=step,
            )
    return path


@pytest.mark.parametrize("logs", LOGS)
def test_whatever_the_grammar_allows_is_computed(logs: str, dump: Path) -> None:
    tried = tuple(presets(logs))

    summary = analyze([str(dump)], presets=tried, workers=1, device="cpu")

    assert len(tried) > 90
    assert set(summary.presets) == {preset.name for preset in tried}
