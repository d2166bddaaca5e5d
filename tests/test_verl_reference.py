"""verl's numbers on dumps that no golden file has: against its rules restated in `verl_reference`.

The restatement is held to the golden numbers first. A case is a generation, its arguments in verl's names,
and a preset that means the same.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import verl_reference

from offpol_diag.analyze import analyze
from offpol_diag.engine.outcome import applied
from offpol_diag.presets import catalogue

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "verl.json").read_text())
SHORT = {"2025-10": "g2510", "2025-11": "g2511", "2026-01": "g2601"}
OVER = {"token": "token", "sequence": "sum", "geometric": "mean"}
LEVEL = {over: level for level, over in OVER.items()}
ROUNDING = 1e-15
"""Where the number is a difference of numbers near 1, this is all that verl's own is good for."""


@dataclass(frozen=True)
class Case:
    """One preset of ours, and what verl was told."""

    preset: catalogue.Preset
    generation: str
    config: dict


def close(got, want, name):
    if got is None:
        return not math.isfinite(want)
    floor = 3e-8 * max(1.0, abs(want)) if name.endswith("_std") else ROUNDING
    return math.isclose(got, want, rel_tol=2e-5, abs_tol=floor)


def differences(got, want):
    names = sorted({*got, *want})
    return {
        name: (got.get(name, "absent"), want.get(name, "absent"))
        for name in names
        if name not in got or name not in want or not close(got[name], want[name], name)
    }


# ---------------------------------------------------------------- the restatement itself


@pytest.mark.parametrize("stem", list(GOLDEN["datasets"]))
@pytest.mark.parametrize("generation", list(SHORT))
def test_the_reference_prints_what_verl_printed(stem, generation):
    columns = pq.read_table(HERE / "golden" / f"{stem}.parquet").to_pydict()
    key = f"verl_{generation.replace('-', '_')}"

    for case, wanted in GOLDEN["datasets"][stem][key].items():
        got = verl_reference.run(generation, columns, GOLDEN["configs"][key][case])
        assert got.metrics == pytest.approx(wanted["metrics"], rel=2e-5, abs=0.0), case
        assert got.kept.tolist() == wanted["kept_tokens"]
        if wanted["weight_sum"] is None:
            assert got.weight_sum is None
        else:
            assert got.weight_sum == pytest.approx(wanted["weight_sum"], rel=1e-6)


# ---------------------------------------------------------------- dumps


def rows_of(rng, lengths, sigma, *, bias=None, wild=0.0, empty=(), holes=0.0, dtype=np.float32):
    """Columns of a dump: Δ of spread `sigma` about each row's `bias`, a share `wild` of tokens far off."""
    found = {name: [] for name in ("rollout_log_probs", "old_log_probs", "current_log_probs")}
    found["response_mask"] = []
    for i, n in enumerate(lengths):
        middle = 0.0 if bias is None else bias[i]
        old, current = middle + sigma * rng.normal(size=(2, n))
        far = rng.random(n) < wild
        old = np.where(far, rng.choice([-31.0, -21.0, -12.0, -9.0, 8.0, 14.0, 22.0, 30.0], n), old)
        current = np.where(far & (rng.random(n) < 0.5), old, current)
        rollout = -rng.exponential(0.4, n) - np.maximum(0.0, np.maximum(old, current))
        mask = (rng.random(n) >= holes).astype(np.int8)
        mask[0] = 1
        found["rollout_log_probs"].append(rollout.astype(dtype))
        found["old_log_probs"].append((rollout + old).astype(dtype))
        found["current_log_probs"].append((rollout + current).astype(dtype))
        found["response_mask"].append(np.zeros_like(mask) if i in empty else mask)
    return found


def dumps():
    """Name → columns."""
    rng = np.random.default_rng(20260129)

    def long(count=40, most=90):
        return rng.integers(1, most, count)

    steep = rng.choice([-25.0, -6.0, -1e-3, 0.0, 1e-3, 6.0, 25.0], 40)
    return {
        **{f"sigma {s:g}": rows_of(rng, long(), s) for s in (1e-4, 1e-2, 0.4, 3.0)},
        "holes": rows_of(rng, long(), 0.1, holes=0.3),
        "wild tokens": rows_of(rng, long(60), 0.05, wild=0.02),
        "steep rows": rows_of(rng, long(), 0.02, bias=steep, wild=0.005),
        "one token a row": rows_of(rng, [1] * 30, 0.5),
        "one row": rows_of(rng, [37], 0.2),
        "one row, one token": rows_of(rng, [1], 0.3),
        "one row of five with one token": rows_of(rng, [5, 7, 1, 4, 3], 0.3, empty=(0, 1, 3, 4)),
        "empty rows": rows_of(rng, long(), 0.3, empty=(0, 7, 39), holes=0.1),
        "empty rows, all ratios large": rows_of(rng, [6] * 9, 0.01, bias=[0.9] * 9, empty=(2, 8)),
        "empty rows, all ratios small": rows_of(rng, [6] * 9, 0.01, bias=[-0.9] * 9, empty=(2, 8)),
        "empty rows, past the clamp": rows_of(rng, [3] * 9, 0.1, bias=[-26.0] * 9, empty=(4,)),
        "one length": rows_of(rng, [32] * 24, 0.1),
        "float64": rows_of(rng, long(), 0.1, dtype=np.float64),
        "identical policies": rows_of(rng, long(), 0.0),
        "many groups": rows_of(rng, long(300, 20), 0.2, wild=0.002),
    }


DUMPS = dumps()
HARDEST = ("wild tokens", "empty rows")
"""Dumps on which every case is tried; on each of the others a quarter of them, in turn."""


# ---------------------------------------------------------------- cases


def weight_of(over, action, upper, **more):
    return {"over": over, "action": action, **({} if upper is None else {"upper": upper}), **more}


def row_2025_10(config):
    over, high = OVER[config["rollout_is_level"]], config["rollout_is_threshold"]
    if config["rollout_is_mode"] == "truncate":
        table = {"weight": weight_of(over, "truncate", high)}
    else:
        low = config.get("rollout_is_threshold_lower", 1 / high)
        band = {"statistic": "ratio", "over": over, "lower": low, "upper": high, "safety": 20.0}
        table = {"weight": weight_of(over, "none", None), "reject": band}
    if config.get("rollout_is_veto_threshold"):
        table["veto"] = {"lower": config["rollout_is_veto_threshold"]}
    return table


def row_2025_11(config):
    table = {}
    if "rollout_is" in config:
        table["weight"] = weight_of(
            OVER[config["rollout_is"]], "truncate", config.get("rollout_is_threshold", 2.0)
        )
    if "rollout_rs" in config:
        high = config["rollout_rs_threshold"]
        low = config.get("rollout_rs_threshold_lower", 1 / high)
        over = OVER[config["rollout_rs"]]
        table["reject"] = {"statistic": "ratio", "over": over, "lower": low, "upper": high, "safety": 20.0}
    if "rollout_token_veto_threshold" in config:
        table["veto"] = {"lower": config["rollout_token_veto_threshold"]}
    return table


def row_2026_01(config):
    table = {}
    if "rollout_is" in config:
        normalize = config.get("rollout_is_batch_normalize", False)
        upper = config.get("rollout_is_threshold", 2.0)
        table["weight"] = weight_of(OVER[config["rollout_is"]], "truncate", upper, normalize=normalize)
    if "rollout_rs" in config:
        options, specs = config["rollout_rs"].split(","), config["rollout_rs_threshold"].split(",")
        table["reject"] = [rule_of(option, spec) for option, spec in zip(options, specs, strict=True)]
    return table


def rule_of(option, spec):
    over = "token" if option.startswith("token") else option.split("_")[1]
    rule = {"statistic": option[-2:], "over": over, "safety": 20.0, "safety_at": "token"}
    if not option.endswith("k1"):
        return {**rule, "upper": float(spec)}
    low, high = map(float, spec.split("_"))
    return {**rule, "statistic": "ratio", "lower": 1 / high, "upper": 1 / low}


def configs_2025_10():
    for level, thresholds in (
        ("token", (1.2, 5.0, 10.0)),
        ("sequence", (1.2, 5.0)),
        ("geometric", (1.001, 1.2)),
    ):
        for threshold in thresholds:
            for veto in (None, 1e-4, 0.3):
                base = {"rollout_is_level": level, "rollout_is_threshold": threshold}
                base["rollout_is_veto_threshold"] = veto
                yield {**base, "rollout_is_mode": "truncate"}
                yield {**base, "rollout_is_mode": "mask"}
        asymmetric = {"rollout_is_level": level, "rollout_is_mode": "mask", "rollout_is_threshold": 1.3}
        yield {**asymmetric, "rollout_is_threshold_lower": 0.2}
        yield {**asymmetric, "rollout_is_threshold_lower": 1.1}  # rejects a ratio of 1
        yield {**asymmetric, "rollout_is_threshold_lower": 0.99, "rollout_is_veto_threshold": 1e-4}


def configs_2025_11():
    for level in ("token", "sequence"):
        yield from ({"rollout_is": level, "rollout_is_threshold": high} for high in (1.2, 5.0, 10.0))
    for level, high, low in (
        ("token", 1.2, None),
        ("token", 3.0, 0.9),
        ("sequence", 10.0, None),
        ("sequence", 1.5, 0.1),
        ("geometric", 1.0005, None),
        ("geometric", 1.2, 0.99),
        ("geometric", 3.0, 1.1),  # rejects a ratio of 1
    ):
        bounds = {"rollout_rs": level, "rollout_rs_threshold": high}
        bounds |= {} if low is None else {"rollout_rs_threshold_lower": low}
        yield bounds
        yield {**bounds, "rollout_is": "token", "rollout_token_veto_threshold": 1e-2}
        yield {**bounds, "rollout_is": "sequence", "rollout_is_threshold": 3.0}
    yield {"rollout_token_veto_threshold": 1e-6}


def configs_2026_01():
    for level in ("token", "sequence"):
        for high in (1.2, 5.0, 10.0):
            yield {"rollout_is": level, "rollout_is_threshold": high}
            yield {"rollout_is": level, "rollout_is_threshold": high, "rollout_is_batch_normalize": True}
    yield from (
        {"rollout_rs": options, "rollout_rs_threshold": bounds}
        for options, bounds in (
            ("token_k1,seq_sum_k1,seq_mean_k1", "0.5_1.1,0.2_5.0,0.98_1.2"),
            ("seq_mean_k1,seq_max_k3", "0.99_1.001,0.3"),
            ("token_k1,seq_max_k2", "0.6_1.6,2.5"),
            ("token_k2,seq_sum_k2,seq_mean_k2,seq_max_k2", "0.001,0.1,0.002,0.02"),
            ("token_k3,seq_sum_k3,seq_mean_k3,seq_max_k3", "0.001,0.1,0.002,0.02"),
            ("token_k3,seq_sum_k2", "2.0,4.0"),
            ("token_k1,seq_mean_k1", "1.0_1.5,0.7_1.0"),  # a bound of ln 1 = 0 is still a bound
            ("seq_sum_k1", "1.1_3.0"),  # rejects a ratio of 1
        )
    )
    yield {
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_rs": "token_k1,seq_mean_k3",
        "rollout_rs_threshold": "0.8_1.25,0.01",
    }


def row_2026_03(config):
    table = row_2026_01({name: value for name, value in config.items() if name != "rollout_is_threshold"})
    if "rollout_is" in config:
        low, _, high = str(config["rollout_is_threshold"]).rpartition("_")
        table["weight"] |= {"upper": float(high)}
        table["weight"] |= {"action": "mask", "lower": float(low)} if low else {}
    return table


def configs_2026_03():
    for level in ("token", "sequence"):
        for threshold in (1.2, 5.0, "0.5_5.0", "0.9_1.1", "1.1_3.0", "1e3_1e4"):
            for normalize in (False, True):
                yield {
                    "rollout_is": level,
                    "rollout_is_threshold": threshold,
                    "rollout_is_batch_normalize": normalize,
                }
    yield {
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_4.0",
        "rollout_rs": "token_k1,seq_max_k2",
        "rollout_rs_threshold": "0.6_1.6,2.5",
    }


MADE = {
    "2025-10": (configs_2025_10, row_2025_10),
    "2025-11": (configs_2025_11, row_2025_11),
    "2026-01": (configs_2026_01, row_2026_01),
    "2026-03": (configs_2026_03, row_2026_03),
}

SPELT_OTHERWISE = {
    "bounds in nats": (
        "2026-01",
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.98_1.05"},
        {
            "reject": {
                "statistic": "k1",
                "over": "mean",
                "lower": math.log(0.98),
                "upper": math.log(1.05),
                "safety": 20,
                "safety_at": "token",
            }
        },
    ),
    "bounds in nats, no clamp": (
        "2026-01",
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.2"},
        {"reject": {"statistic": "k1", "lower": math.log(0.9), "upper": math.log(1.2)}},
    ),
    "a rule without its clamp": (
        "2026-01",
        {"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1"},
        {"reject": [{"statistic": "k3", "upper": 0.1}]},
    ),
    "integers": (
        "2026-01",
        {"rollout_is": "token", "rollout_rs": "seq_max_k2", "rollout_rs_threshold": "1"},
        {"weight": {"upper": 2}, "reject": {"statistic": "k2", "over": "max", "upper": 1, "safety": 20}},
    ),
    "a mask whose threshold stands in the weight too": (
        "2025-10",
        {"rollout_is_level": "token", "rollout_is_mode": "mask", "rollout_is_threshold": 2.0},
        {
            "weight": {"over": "token", "action": "none", "upper": 2.0},
            "reject": {"lower": 0.5, "upper": 2},
        },
    ),
    "a mask in nats": (
        "2025-10",
        {"rollout_is_level": "sequence", "rollout_is_mode": "mask", "rollout_is_threshold": 2.0},
        {
            "weight": {"over": "sum", "action": "none"},
            "reject": [{"statistic": "k1", "over": "sum", "lower": -math.log(2), "upper": math.log(2)}],
        },
    ),
    "a band in nats": (
        "2025-11",
        {"rollout_rs": "geometric", "rollout_rs_threshold": 1.1, "rollout_rs_threshold_lower": 0.7},
        {
            "reject": {
                "statistic": "k1",
                "over": "mean",
                "lower": -math.log(1.1),
                "upper": -math.log(0.7),
                "safety": 20,
            }
        },
    ),
    "defaults said": (
        "2025-11",
        {"rollout_is": "sequence", "rollout_is_threshold": 4.0},
        {"weight": {"over": "sum", "action": "truncate", "upper": 4, "safety_at": "aggregate"}},
    ),
}


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def written():
    """Presets of our own making: name → (generation, config, table)."""
    found = {}
    for generation, (configs, row) in MADE.items():
        for i, config in enumerate(configs()):
            found[f"made_{generation}_{i}"] = generation, config, row(config)
    for i, entry in enumerate(SPELT_OTHERWISE.values()):
        found[f"spelt_{i}"] = entry
    return found


def config_of(preset):
    """What verl would have to be told for a built-in row: its own names read back out of ours."""
    generation, config = preset.logs.removeprefix("verl-"), {}
    rule = preset.reject[0] if preset.reject else None
    if generation == "2025-10":
        config["rollout_is_level"] = LEVEL[preset.weight.over]
        config["rollout_is_mode"] = "mask" if rule else "truncate"
        config["rollout_is_threshold"] = rule.upper if rule else preset.weight.upper
        config |= {"rollout_is_threshold_lower": rule.lower} if rule else {}
        config |= {"rollout_is_veto_threshold": preset.veto.lower} if preset.veto else {}
        return config
    config |= {"current": {"bypass": 1}, "rollout": {"bypass_identity": 1}}.get(preset.policy, {})
    if preset.weight:
        config |= {"rollout_is": LEVEL[preset.weight.over], "rollout_is_threshold": preset.weight.upper}
        config |= {"rollout_is_batch_normalize": preset.weight.normalize}
        if preset.weight.action == "mask":
            config["rollout_is_threshold"] = f"{preset.weight.lower}_{preset.weight.upper}"
    if rule and generation == "2025-11":
        config |= {"rollout_rs": LEVEL[rule.over], "rollout_rs_threshold": rule.upper}
        config["rollout_rs_threshold_lower"] = rule.lower
    elif rule:
        names = [option_of(rule) for rule in preset.reject]
        config |= {
            "rollout_rs": ",".join(names),
            "rollout_rs_threshold": ",".join(map(spec_of, preset.reject)),
        }
    if preset.veto:
        config["rollout_token_veto_threshold"] = preset.veto.lower
    return config


def is_verls(preset):
    return (preset.logs or "").startswith("verl-")


def option_of(rule):
    kind = "k1" if rule.statistic == "ratio" else rule.statistic
    return f"token_{kind}" if rule.over == "token" else f"seq_{rule.over}_{kind}"


def spec_of(rule):
    return f"{1 / rule.upper!r}_{1 / rule.lower!r}" if rule.statistic == "ratio" else repr(rule.upper)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Every golden case, every built-in row that logs as verl does, and presets of our own making."""
    made = written()
    file = tmp_path_factory.mktemp("presets") / "made.toml"
    lines = (
        f'[{name}]\nlogs = "verl-{generation}"\n'
        + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
        for name, (generation, _, table) in made.items()
    )
    file.write_text("\n".join(lines))
    mine, golden = catalogue.load(file), catalogue.load(HERE / "golden_presets.toml")
    built_in = [preset for preset in catalogue.load().values() if is_verls(preset)]
    return [
        *(Case(mine[name], generation, config) for name, (generation, config, _) in made.items()),
        *(
            Case(golden[f"{SHORT[generation]}_{case}"], generation, config)
            for generation in SHORT
            for case, config in GOLDEN["configs"][f"verl_{generation.replace('-', '_')}"].items()
        ),
        *(Case(preset, preset.logs.removeprefix("verl-"), config_of(preset)) for preset in built_in),
    ]


def analysed(name, presets, folder, **options):
    """The summary of a dump, and its rows per sequence."""
    columns, dump, sequences = DUMPS[name], folder / "dump.parquet", folder / "sequences.parquet"
    groups = np.arange(len(columns["response_mask"])) // 2
    pq.write_table(pa.table({"group_id": groups, **columns}), dump)
    summary = analyze([str(dump)], presets=presets, sequences=sequences, **options)
    return summary, pq.read_table(sequences).to_pydict()


def of_the_correction(result):
    """What verl's helper logs; the rest is held in test_logged_a."""
    beside = ("training/", "actor/")
    return {name: value for name, value in result.as_logged.items() if not name.startswith(beside)}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in DUMPS), ("empty rows", {"batch_tokens": 200})],
)
def test_what_verl_would_have_logged_and_kept(cases, tmp_path, name, options):
    turn = [*DUMPS].index(name)
    some = cases if name in HARDEST and not options else cases[turn % 4 :: 4]
    summary, table = analysed(name, [case.preset for case in some], tmp_path, **options)
    wrong = {}
    for case in some:
        want = verl_reference.run(case.generation, DUMPS[name], case.config)
        found = differences(of_the_correction(summary.presets[case.preset.name]), want.metrics)
        wrong |= {(case.preset.name, str(case.config), key): pair for key, pair in found.items()}
        if applied(case.preset) == case.preset:
            assert table[f"{case.preset.name}.kept_tokens"] == want.kept.tolist(), case
            weights = table[f"{case.preset.name}.weight_sum"]
            if want.weight_sum is None:
                assert set(weights) == {None}
            else:
                assert weights == pytest.approx(want.weight_sum, rel=1e-6), case

    assert wrong == {}


def test_the_lower_threshold_of_a_truncation_is_only_logged_by_verl(tmp_path):
    """verl 2025-10 counts against it and truncates from above alone; our `lower` truncates too."""
    file = tmp_path / "own.toml"
    file.write_text('[own]\nlogs = "verl-2025-10"\nweight = { upper = 2.0, lower = 0.8 }\n')
    config = {
        "rollout_is_level": "token",
        "rollout_is_mode": "truncate",
        "rollout_is_threshold": 2.0,
        "rollout_is_threshold_lower": 0.8,
    }
    summary, _ = analysed("sigma 0.4", [catalogue.load(file)["own"]], tmp_path)
    want = verl_reference.run("2025-10", DUMPS["sigma 0.4"], config)

    assert differences(summary.presets["own"].as_logged, want.metrics) == {}
