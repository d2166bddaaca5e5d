"""Dumps at the edge of what floats and counts allow: every number is there, or says why not."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.presets import catalogue
from offpol_diag.result import loads
from tests import oracles
from tests.kinds import EACH
from tests.reading import analyze


def dump(rollout, old=None, many=1, **more):
    """Return the columns of so many equal rows, or of those given."""
    columns = {"rollout_log_probs": rollout, "old_log_probs": old} | more
    return {name: values * many for name, values in columns.items() if values}


DUMPS = {
    "one token": dump([[-1.0]], [[-1.2]]),
    "two policies": dump([[-1.0, -2.0], [-0.5]], current_log_probs=[[-1.1, -2.0], [-0.6]]),
    "nothing differs": dump([[-1.0]], [[-1.0]], 9),
    "a sentinel of the engine": dump([[-9999.0, -1.0]], [[-0.1, -1.0]], 9),
    "a sentinel of the trainer": dump([[-0.1, -1.0]], [[-9999.0, -1.0]], 9),
    "products beyond float64": dump([[-9.0] * 200], [[-0.1] * 200], 9),
    "logarithms beyond float64": dump([[-1.7e308] * 3], [[-0.1] * 3], 9),
    "certain tokens": dump([[0.0] * 5], [[0.0] * 5], 9),
    "rows masked whole": dump(
        *([[-1.0, -2.0]] * 9, [[-1.1, -2.0]] * 9),
        current_log_probs=[[-1.2, -2.0]] * 9,
        advantages=[1.0] * 9,
        response_mask=[[0, 0]] * 4 + [[1, 1]] * 5,
    ),
    "empty rows": dump([[], [-1.0]], [[], [-1.1]]),
    "advantages of zero": dump([[-1.0]], [[-1.1]], 9, advantages=[0.0]),
}


@pytest.mark.parametrize("name", DUMPS)
def test_every_number_is_finite_or_says_why_it_is_not(tmp_path, name):
    """Of a third of the kinds of presets in each dump, in turn."""
    presets = EACH[[*DUMPS].index(name) % 3 :: 3]
    pq.write_table(pa.table(DUMPS[name]), tmp_path / "dump.parquet")
    summary = analyze([str(tmp_path / "dump.parquet")], presets=presets, sequences=tmp_path / "s.parquet")

    numbers = dict(summary.whole)
    for preset in summary.presets:
        numbers |= {f"{preset}.{metric}": number for metric, number in summary.preset(preset).items()}
    for metric, number in numbers.items():
        assert (number.value is None) == (number.unknown is not None), metric
        assert number.value is None or math.isfinite(number.value), metric
    assert loads(summary.to_json(), "result") == summary
    assert pq.read_table(tmp_path / "s.parquet").num_rows == len(DUMPS[name]["rollout_log_probs"])


# ---------------------------------------------------------------- differences of probabilities

LOGS = [0.0 - x for x in (0, 0.1, 1, 3, 40, 300, 346, 500, 700, 744, 746, 800, 1352, 9999)]
PAIRS = [(q, p) for q in LOGS for p in (*LOGS, q - 1e-7, q + 1e-7) if p <= 0]
"""log π_rollout and log π_train, Δ from 1e-7 to ±9999."""


def pairs(pairs_of_logs, advantages=(1.0,)):
    """Return the columns of rows of one token, one for each pair and advantage."""
    every = [(q, p, a) for q, p in pairs_of_logs for a in advantages]
    q, p, a = ([[one[i]] for one in every] for i in range(3))
    ids = [str(i) for i in range(len(every))]
    policies = {"rollout_log_probs": q, "old_log_probs": p, "current_log_probs": p}
    return {"sequence_id": ids, **policies, "advantages": a}


def run(tmp_path, columns, presets=(), **options):
    pq.write_table(pa.table(columns), tmp_path / "dump.parquet")
    return analyze([str(tmp_path / "dump.parquet")], presets=presets, threads=1, device="cpu", **options)


def test_probability_differences_of_every_size_have_an_exact_mean_and_deviation(tmp_path):
    columns = pairs(PAIRS)
    numbers = run(tmp_path, columns | {"current_log_probs": columns["rollout_log_probs"]}).whole
    gaps = [abs(oracles.exact_prob_diff(p, q)) for q, p in PAIRS]
    for prefix in ("", "drift2."):
        assert numbers[f"{prefix}prob_diff_mean"].value == pytest.approx(oracles.mean(gaps), rel=1e-13)
        assert numbers[f"{prefix}prob_diff_std"].value == pytest.approx(oracles.std(gaps), rel=1e-12)
        assert numbers[f"{prefix}prob_diff_max"].value == max(gaps) == 1.0


def test_every_rule_decides_right_at_every_log_ratio(tmp_path):
    """Those on probability differences kept a token at a rollout log-prob below −745."""
    presets = [one for one in catalogue.load().values() if one.reject]
    presets = [one for one in presets if all(rule.over != "batch" for rule in one.reject)]
    columns = pairs([(q, p) for q, p in PAIRS[::2] if abs(p - q) > 1e-6 or p == q], (1.0, 0.0, -1.0))
    run(tmp_path, columns, presets, sequences=tmp_path / "s.parquet")
    kept = pq.read_table(tmp_path / "s.parquet").to_pydict()
    rows = [{name: column[int(i)] for name, column in columns.items()} for i in kept["sequence_id"]]
    data = oracles.sequences(rows)
    assert {"ipo", "dppo_tv"} <= {preset.name for preset in presets}
    for preset in presets:
        assert kept[f"{preset.name}.kept_tokens"] == [
            int(oracles.apply(s, replace(preset, loss="reinforce"), {}).kept[0]) for s in data
        ], preset.name


# ---------------------------------------------------------------- e to the power of a mean


LOGS_OF = tuple(f"{name}_log_probs" for name in ("rollout", "old", "current"))


def steps(*changes):
    """Return the columns of 30 rows of 20 tokens in 15 groups and 3 steps, slightly off-policy.

    A change is a column, a slice of its rows (and of their tokens), and their value; of scalars a factor.
    """
    random, row = np.random.default_rng(3), np.arange(30)
    rollout = -3 * random.random((30, 20)) - 0.01
    logs = [np.minimum(rollout + random.normal(0, sd, (30, 20)), 0.0) for sd in (0.0, 0.02, 0.03)]
    columns = {**dict(zip(LOGS_OF, logs, strict=True)), "group_id": row // 2, "step": row // 10}
    columns |= {"advantages": random.normal(size=30), "rewards": random.random(30)}
    for name, at, value in changes:
        columns[name][at] = value if columns[name].ndim == 2 else columns[name][at] * value
    return {name: x.tolist() for name, x in columns.items()}


ROLLOUT, OLD, CURRENT = LOGS_OF
EVERY, TOKENS = np.s_[:], np.s_[:, ::7]
BEYOND = {
    "slightly off-policy": steps(),
    "five rows of old at -300": steps((OLD, np.s_[::6], -300.0)),
    "five rows of rollout at -300": steps((ROLLOUT, np.s_[::6], -300.0)),
    "five rows of old at -800": steps((OLD, np.s_[::6], -800.0)),
    "all rows of old at -800": steps((OLD, EVERY, -800.0)),
    "all rows of rollout at -800": steps((ROLLOUT, EVERY, -800.0)),
    "single tokens of rollout at -9999": steps((ROLLOUT, TOKENS, -9999.0)),
    "single tokens of old at -9999": steps((OLD, TOKENS, -9999.0)),
    "three rows of current at -1e5": steps((CURRENT, np.s_[::10], -1e5)),
    "three rows of old at -1e300": steps((OLD, np.s_[::10], -1e300)),
    "sums beyond float64": steps((ROLLOUT, np.s_[::15], -1.7e308), (OLD, np.s_[::10], -1.7e308)),
    "advantages of 1e300": steps(("advantages", EVERY, 1e300)),
    "rewards of 1e308": steps(("rewards", EVERY, 1e308)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_the_interval_of_the_pooled_perplexity_ratio_is_that_of_k1_exponentiated(tmp_path, name):
    summary = run(tmp_path, BEYOND[name])
    for prefix in ("", "drift2.", "total."):
        k1, number = (summary.whole[prefix + name] for name in ("k1", "ppl_ratio_pooled"))
        if k1.value is None:  # its sum overflows
            assert number.value is None
            continue
        ends = k1.interval or ()  # none where squares overflow
        assert (number.interval or ()) == tuple(pytest.approx(power(end), rel=1e-12) for end in ends)
        assert bool(number.note) == any(end > LOG_LARGEST for end in ends)
        if k1.value < LOG_LARGEST:
            assert number.value == pytest.approx(math.exp(k1.value), rel=1e-12)
        else:
            assert number.value is None
            assert number.log10 == pytest.approx(k1.value / math.log(10), rel=1e-12)
            assert number.unknown == "overflows float64; see its log10"


LOG_LARGEST = math.log(sys.float_info.max)


def power(x):
    """Compute e^x; the largest float64 where it overflows."""
    return math.exp(x) if x < LOG_LARGEST else sys.float_info.max


FAR, NEAR = [[-800.0, -800.0]], [[-1.0, -1.0]]
PRODUCTS = DUMPS["products beyond float64"]
R = ("k3", "mean_ratio", "chi2_token", "tv", "mult_prob_error", "ess_tokens", "max_weight_share")
FEW = {"ppl_rollout": 3 / 9, "ppl_train": 1 / 9, "ppl_ratio": 1 / 9, "recompute.ppl_ratio": 1 / 9}
HELD = {  # columns, a preset, number → the share that is told
    "perplexities beyond e^690, and r beyond e^345": (
        dump(FAR * 3 + NEAR * 6, NEAR * 8 + FAR),
        "recompute",
        dict.fromkeys(R, 4 / 9) | FEW | {"recompute.k3": 3 / 9, "k1": None, "f_2": None},
    ),
    "each drift by itself": (
        dump(NEAR, NEAR, current_log_probs=[[-1.0, -2000.0]]),
        "recompute",
        {"k3": 0.0, "mean_ratio": 0.0, "drift2.k3": 0.5, "drift2.mean_ratio": 0.5, "total.k3": 0.5},
    ),
    "products": (PRODUCTS, "seq_is", {"seq_is.ess_tokens": 1.0, "seq_is.weight_mean": 1.0}),
    "tokens": (PRODUCTS, "token_is", {"token_is.ess_tokens": 0.0, "token_is.weight_mean": 0.0}),
    "no bound": (
        dump([[-800.0, -1.0]], NEAR, 9),
        "ipo@0.2:policy=old",
        {"ipo@0.2:policy=old.ess_tokens": 0.5},
    ),
}


@pytest.mark.parametrize(("columns", "preset", "told"), HELD.values(), ids=HELD)
def test_the_share_of_terms_that_a_safety_or_the_overflow_guard_bounds_is_told(
    tmp_path, columns, preset, told
):
    found = run(tmp_path, columns, catalogue.load().resolve(preset))
    numbers = found.whole | {f"{preset}.{name}": one for name, one in found.preset(preset).items()}
    assert {name: numbers[name].clamped for name in told} == {
        name: share and pytest.approx(share) for name, share in told.items()
    }


@pytest.mark.parametrize("lowest", [-400.0, -1e155, -1e300])
def test_k3_of_a_dump_and_of_what_a_preset_keeps_is_not_negative_where_the_ratio_is_clamped(tmp_path, lowest):
    found = run(tmp_path, dump([[lowest, -1.0]], [[-1.0, -1.0]], 9), catalogue.load().resolve("recompute"))
    for k3 in (found.whole["k3"], found.preset("recompute")["k3"]):
        assert k3.value == pytest.approx(math.expm1(345) / 2, rel=1e-12)
    assert found.whole["k3"].clamped == 0.5


# ---------------------------------------------------------------- every command


ORDINARY = ("slightly off-policy", "five rows of rollout at -300", "rewards of 1e308")
CALLS = (
    "analyze dump.parquet --html a.html --md a.md -v",
    "compare dump.parquet --presets=token_is,seq_mis,ipo --html c.html",
    "compare plain.parquet dump.parquet --presets=token_is --html ab.html",
    "sweep dump.parquet --preset seq_mis --html s.html",
    "sweep dump.parquet --preset ipo",
    "gate 0.json --max k3=0.1 --max step:k3=1 --max token_is.k3=1 --max ppl_ratio_pooled=1.1",
    "gate 0.json --baseline 1.json",
    "report 0.json --html drawn.html",
)


def refuse(name):
    """Refuse NaN and Infinity, as strict readers of JSON do."""
    raise ValueError(name)


@pytest.mark.parametrize("name", [name for name in BEYOND if name not in ORDINARY])
def test_what_any_command_writes_holds_finite_numbers_and_is_read_back(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table(BEYOND[name]), "dump.parquet")
    pq.write_table(pa.table(BEYOND["slightly off-policy"]), "plain.parquet")
    for at, line in enumerate(CALLS):
        json_too = [] if line.startswith("report") else ["--json", f"{at}.json"]
        ran = CliRunner().invoke(app, [*line.split(), *json_too])
        said = (line, ran.stdout[-2000:], ran.stderr[-2000:])
        assert ran.exit_code in ((0, 1, 2) if line.startswith("gate") else (0,)), said
        assert not any(word in ran.stderr for word in ("Traceback", "error:")), said
        if json_too:
            json.loads(Path(json_too[1]).read_text(), parse_constant=refuse)
