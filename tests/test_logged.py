"""What trainers log of a step: the numbers that verl's own functions printed (`golden/verl.json`).

`frozen/` holds those of every trainer on eight dumps, steps and whole.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import offpol_diag
from offpol_diag.dump.batch import joined
from offpol_diag.dump.read import open_dump
from offpol_diag.presets import catalogue
from offpol_diag.trainers import logged as logged_by
from offpol_diag.trainers import table
from offpol_diag.trainers.logged import LOGS, TRAINERS, log_of, steps_of

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "verl.json").read_text())
SAMPLE = HERE.parent / "sample_data" / "stale.parquet"
GENERATIONS = {"2025-10": "g2510", "2025-11": "g2511", "2026-01": "g2601"}
OURS = catalogue.load(HERE / "golden_presets.toml")


def whole(path):
    """Return a dump as one batch, and its columns."""
    dump = open_dump([str(path)])
    return joined([*dump.batches()]), frozenset(dump.columns)


@pytest.mark.parametrize("stem", GOLDEN["datasets"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_verls_own_numbers_and_masks_and_weights_are_reproduced(stem, generation):
    batch, columns = whole(HERE / "golden" / f"{stem}.parquet")
    compared = 0
    for case, want in GOLDEN["datasets"][stem][f"verl_{generation.replace('-', '_')}"].items():
        preset, of = OURS.get(f"{GENERATIONS[generation]}_{case}"), batch
        if case == "ppo_is_bypass":  # there verl takes the rollout's log-probs for the old ones
            preset, of = OURS["token_is"], replace(batch, old=batch.rollout)
        (step,) = steps_of(of, [preset], columns)
        logged = LOGS[f"verl-{generation}"](step)
        finite = {name: x if math.isfinite(x) else None for name, x in logged.items()}
        assert finite == pytest.approx(want["metrics"], rel=2e-5, abs=0), case
        assert step.row_sum(step.kept).tolist() == want["kept_tokens"], case
        if want["weight_sum"] is not None:
            factor = logged["rollout_corr/rollout_is_batch_norm_factor"] if preset.weight.normalize else 1.0
            assert step.row_sum(step.weights) / factor == pytest.approx(want["weight_sum"], rel=1e-6), case
        compared += len(want["metrics"])
    assert compared == {"2025-10": 394, "2025-11": 281, "2026-01": 873}[generation]


@pytest.fixture(scope="module")
def result():
    return offpol_diag.analyze(SAMPLE, presets=[*catalogue.load()], progress=False)


@pytest.fixture(scope="module")
def logged():
    """Return trainer → preset → what it logs of the sample dump, verl in all generations."""
    batch, columns = whole(SAMPLE)
    found = {}
    for step in steps_of(batch, [*catalogue.load().values()], columns):
        for trainer in TRAINERS:
            logs = sorted({log_of(trainer, one, step.preset) for one in logged_by.GENERATIONS})
            numbers = {name: x for log in logs for name, x in LOGS[log](step).items()}
            found.setdefault(trainer, {})[step.preset] = numbers
    return found


NAMES = [
    (trainer, f"{prefix}{name}", of, ours)
    for trainer in TRAINERS
    for logs in table(trainer).get("logs", ())
    for of in ("gap", "preset")
    for name, ours in logs.get(of, {}).items()
    for prefix in logs["prefixes"]
    if prefix
]


@pytest.mark.parametrize(("trainer", "name", "of", "ours"), NAMES)
def test_a_logged_name_that_gates_take_is_of_a_number_that_equals_it(logged, result, trainer, name, of, ours):
    own = [one for one in logged[trainer] if one.source.lower().startswith(trainer)] or [*logged[trainer]]
    compared = 0
    for preset in own:
        if name in logged[trainer][preset]:
            gap = ours if "." in ours or preset.policy == "old" else f"total.{ours}"
            number = result.preset(preset.name)[ours] if of == "preset" else result.whole[gap]
            assert logged[trainer][preset][name] == pytest.approx(number.value, rel=1e-6, abs=1e-12), preset
            compared += 1
    assert compared
