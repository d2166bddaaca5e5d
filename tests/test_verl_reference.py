"""verl's numbers: those its own functions printed, and its rules restated, on dumps that no golden file has.

`golden/verl.json` says what was run on the dumps beside it. The restatement of `verl_reference` is checked
against these numbers first; each preset of ours is then checked against it, by its configuration in verl's
names.
"""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.presets import Preset, Reject, Weight, catalogue
from tests import trainer_dumps, verl_reference
from tests.trainers.ours import differences

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "verl.json").read_text())
SHORT = {"2025-10": "g2510", "2025-11": "g2511", "2026-01": "g2601"}
LEVEL = {"token": "token", "sum": "sequence", "mean": "geometric"}
OURS = catalogue.load(HERE / "golden_presets.toml")
MARCH = (
    "token_is",
    "seq_is",
    "token_icepop",
    "bypass_pg_token_icepop",
    "seq_mis",
    "seq_icepop@weight.safety=20",
)
VERLS = [preset for preset in OURS.values() if (preset.logs or "").startswith("verl-")]
VERLS += [replace(OURS[name], logs="verl-2026-03") for name in MARCH]
OPTIONS = [
    Reject(statistic, over, *bounds, safety=20.0, safety_at="token")
    for statistic, over, *bounds in (
        ("ratio", "token", 1 / 1.4, 1 / 0.6),
        ("k2", "token", None, 2.0),
        ("k3", "token", None, 2.0),
        ("ratio", "sum", 0.5, 2.0),
        ("k2", "sum", None, 3.0),
        ("k3", "sum", None, 2.5),
        ("ratio", "mean", 1 / 1.001, 1 / 0.999),
        ("k2", "mean", None, 2.0),
        ("k3", "mean", None, 0.01),
        ("k2", "max", None, 2.5),
        ("k3", "max", None, 2.0),
    )
]
"""Every option of rollout_rs since 2026-01, on r where verl compares −Δ."""


def key_of(generation):
    return f"verl_{generation.replace('-', '_')}"


def names_of(generation, case):
    """Return our presets for a golden case: one of a user's file, and that of the catalogue, by verl's name.

    Not that of another trainer, whose clamps differ, nor where r is 1 by construction there.
    """
    own = f"{SHORT[generation]}_{case}"
    if own not in OURS:
        return
    yield own
    word = f"verl_2025_10_{case.removesuffix('_noveto')}" if generation == "2025-10" else case
    for name in (word, f"verl_{generation.replace('-', '_')}_{case}_is_norm"):
        if name not in OURS or OURS[name].policy != OURS[own].policy:
            continue
        if (OURS[name].logs or "verl").startswith("verl"):
            yield f"{name}@logs=verl-{generation}"


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """Return, by golden dump, what is logged, kept and weighted."""
    found = {}
    for stem in GOLDEN["datasets"]:
        table = tmp_path_factory.mktemp(stem) / "sequences.parquet"
        dump = str(HERE / "golden" / f"{stem}.parquet")
        cases = GOLDEN["datasets"][stem]
        words = [word for one in SHORT for case in cases[key_of(one)] for word in names_of(one, case)]
        presets = [OURS[word] for word in dict.fromkeys(words)]
        found[stem] = analyze([dump], presets=presets, sequences=table), pq.read_table(table).to_pydict()
    return found


@pytest.mark.parametrize("stem", GOLDEN["datasets"])
@pytest.mark.parametrize("generation", SHORT)
def test_verls_own_output_is_reproduced_by_presets_and_by_the_reference(analysed, stem, generation):
    columns = pq.read_table(HERE / "golden" / f"{stem}.parquet").to_pydict()
    summary, table = analysed[stem]
    for case, want in GOLDEN["datasets"][stem][key_of(generation)].items():
        if case == "ppo_is_bypass":
            continue  # there r is of the rollout and itself: 1, whatever the dump
        again = verl_reference.run(generation, columns, GOLDEN["configs"][key_of(generation)][case])
        # verl takes k3 as e^Δ − 1 − Δ: near 0 it has the rounding of the processor's e^Δ
        assert differences(again.metrics, want["metrics"], 2e-5, 5e-16) == {}, case
        assert again.kept.tolist() == want["kept_tokens"], case
        check_weights(again.weight_sum, want["weight_sum"])
        for word in names_of(generation, case):
            name = OURS[word].name
            assert differences(summary.presets[name].as_logged, want["metrics"], 2e-5, 0.0) == {}, name
            assert table[f"{name}.kept_tokens"] == want["kept_tokens"], name
            check_weights(table[f"{name}.weight_sum"], want["weight_sum"])


def check_weights(got, want):
    """Check weights; None stands for no weights, of a dump or of each sequence."""
    got = None if got is None or got[0] is None else list(got)
    assert got == (None if want is None else pytest.approx(list(want), rel=1e-6))


def dumps():
    """Return dumps by name."""
    spread = partial(trainer_dumps.spread_rows, dtype=np.float32)
    rng = np.random.default_rng(20260129)
    long = partial(rng.integers, 1, 90, 40)
    steep = rng.choice([-25.0, -6.0, -1e-3, 0.0, 1e-3, 6.0, 25.0], 40)
    return {
        **{f"sigma {s:g}": spread(i, long(), s) for i, s in enumerate((1e-4, 1e-2, 0.4, 3.0))},
        "holes, of float64": spread(4, long(), 0.1, holes=0.3, dtype=np.float64),
        "wild tokens": spread(5, long(), 0.05, wild=0.02),
        "steep rows": spread(6, long(), 0.02, bias=steep, wild=0.005),
        "one token a row": spread(7, [1] * 30, 0.5),
        "one row": spread(8, [37], 0.2),
        "one row, one token": spread(9, [1], 0.3),
        "one row of five with one token": spread(10, [5, 7, 1, 4, 3], 0.3, empty=(0, 1, 3, 4)),
        "empty rows": spread(11, long(), 0.3, empty=(0, 7, 39), holes=0.1),
        "empty rows, all ratios large": spread(12, [6] * 9, 0.01, bias=[0.9] * 9, empty=(2, 8)),
        "empty rows, all ratios small": spread(13, [6] * 9, 0.01, bias=[-0.9] * 9, empty=(2, 8)),
        "empty rows, past the clamp": spread(14, [3] * 9, 0.1, bias=[-26.0] * 9, empty=(4,)),
        "identical policies": spread(15, long(), 0.0),
    }


def columns_of(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


DUMPS = dumps()
HARDEST = ("wild tokens", "empty rows")
"""Dumps on which every preset is tried; on each of the others a seventh of them, in turn."""


def varied():
    """Vary every row that logs as verl does; one of each kind with other bounds; several rules at once."""
    kinds = set()
    for one in VERLS:
        yield one
        weight, rules = one.weight, one.reject
        kind = one.logs, *((w.over, w.action) for w in [weight] if w), *((r.statistic, r.over) for r in rules)
        if kind in kinds:
            continue
        kinds.add(kind)
        if weight and weight.action != "none":
            bands = (
                ((None, 1.2), (None, 10.0)) if weight.lower is None else ((0.9, 1.1), (1.1, 3.0), (1e3, 1e4))
            )
            for low, high in bands:
                yield replace(one, weight=replace(weight, lower=low, upper=high))
            if "2026" in one.logs:
                yield replace(one, weight=replace(weight, normalize=True))
        if len(rules) == 1:
            (rule,) = rules
            ratio = ((0.2, 1.3), (1.1, 3.0), (0.99, 1.0))  # 1.1 rejects a ratio of 1; ln 1 = 0 is a bound
            for low, high in ratio if rule.statistic == "ratio" else ((None, rule.upper / 100),):
                yield replace(one, reject=(replace(rule, lower=low, upper=high),))
        if one.veto:
            yield replace(one, veto=replace(one.veto, lower=0.3))
    for rule in OPTIONS:
        yield Preset(option_of(rule), "", reject=(rule,), logs="verl-2026-01")
    for statistics in (("ratio",), ("k2",), ("k3",), ("ratio", "k3")):
        rules = tuple(rule for rule in OPTIONS if rule.statistic in statistics)
        weight = Weight("sum", upper=2.0, normalize=True) if len(statistics) > 1 else None
        yield Preset("several", "", weight=weight, reject=rules, logs="verl-2026-01")


def config_of(preset):
    """Return verl's configuration for a preset: its own names read back out of ours."""
    generation, config = preset.logs.removeprefix("verl-"), {}
    rule, weight = preset.reject[0] if preset.reject else None, preset.weight
    if generation == "2025-10":
        bound = rule or weight
        config = {"rollout_is_level": LEVEL[bound.over], "rollout_is_threshold": bound.upper}
        config |= {
            "rollout_is_mode": "mask" if rule else "truncate",
            "rollout_is_threshold_lower": bound.lower,
        }
        return config | ({"rollout_is_veto_threshold": preset.veto.lower} if preset.veto else {})
    config |= {"bypass": 1} if preset.policy == "current" else {}
    if weight:
        config |= {"rollout_is": LEVEL[weight.over], "rollout_is_threshold": weight.upper}
        config |= {"rollout_is_batch_normalize": weight.normalize}
        if weight.action == "mask":
            config["rollout_is_threshold"] = f"{weight.lower}_{weight.upper}"
    if rule and generation == "2025-11":
        config |= {"rollout_rs": LEVEL[rule.over], "rollout_rs_threshold": rule.upper}
        config["rollout_rs_threshold_lower"] = rule.lower
    elif rule:
        config["rollout_rs"] = ",".join(map(option_of, preset.reject))
        config["rollout_rs_threshold"] = ",".join(map(spec_of, preset.reject))
    return config | ({"rollout_token_veto_threshold": preset.veto.lower} if preset.veto else {})


def option_of(rule):
    kind = "k1" if rule.statistic == "ratio" else rule.statistic
    return f"token_{kind}" if rule.over == "token" else f"seq_{rule.over}_{kind}"


def spec_of(rule):
    return f"{1 / rule.upper!r}_{1 / rule.lower!r}" if rule.statistic == "ratio" else repr(rule.upper)


PRESETS = [replace(preset, name=f"{i} {preset.name}") for i, preset in enumerate(varied())]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in DUMPS), ("empty rows", {"batch_tokens": 500})]
)
def test_presets_log_and_keep_as_verl_does(tmp_path, name, options):
    turn, columns = [*DUMPS].index(name), columns_of(DUMPS[name])
    some = PRESETS if name in HARDEST and not options else PRESETS[turn % 7 :: 7]
    dump = trainer_dumps.write(DUMPS[name], tmp_path / "dump.parquet")
    sequences = tmp_path / "sequences.parquet"
    summary = analyze([dump], presets=some, sequences=sequences, **options)
    table = pq.read_table(sequences).to_pydict()
    for preset in some:
        want = verl_reference.run(preset.logs.removeprefix("verl-"), columns, config_of(preset))
        # what verl logs beside its helper's numbers is held in test_logged
        logged = summary.presets[preset.name].as_logged.items()
        got = {key: value for key, value in logged if not key.startswith(("training/", "actor/"))}
        assert differences(got, want.metrics, 2e-5, 1e-15, of_std=3e-8) == {}, preset
        assert table[f"{preset.name}.kept_tokens"] == want.kept.tolist(), preset
        check_weights(table[f"{preset.name}.weight_sum"], want.weight_sum)


def test_the_lower_threshold_of_a_truncation_is_only_logged_by_verl(tmp_path):
    """verl 2025-10 counts against it and truncates from above alone; our `lower` truncates too."""
    own = Preset("own", "", weight=Weight(upper=2.0, lower=0.8), logs="verl-2025-10")
    rows = DUMPS["sigma 0.4"]
    dump = trainer_dumps.write(rows, tmp_path / "dump.parquet")
    got = analyze([dump], presets=[own]).presets["own"].as_logged
    got = {key: value for key, value in got.items() if key.startswith("mismatch/")}
    want = verl_reference.run("2025-10", columns_of(rows), config_of(own)).metrics
    assert differences(got, want, 2e-5, 1e-15, of_std=3e-8) == {}
