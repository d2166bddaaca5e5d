"""Numbers that verl's own functions printed, of three generations, reproduced through a user's preset file.

`golden/verl.json` says what was run; the dumps beside it are what it was run on.
"""

import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from offpol_diag.analyze import analyze
from offpol_diag.presets import catalogue

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "verl.json").read_text())
SHORT = {"verl_2025_10": "g2510", "verl_2025_11": "g2511", "verl_2026_01": "g2601"}
CASES = [
    (stem, generation, case)
    for stem, generations in GOLDEN["datasets"].items()
    for generation, cases in generations.items()
    for case in cases
]
BUILT_IN = [
    *(
        ("verl_2025_10", f"{level}_{mode}_{veto}", f"verl_2025_10_{level}_{mode}{suffix}")
        for level in ("token", "sequence", "geometric")
        for mode in ("truncate", "mask")
        for veto, suffix in (("noveto", ""), ("veto", "_veto"))
    ),
    ("verl_2025_11", "token_is", "token_tis"),
    ("verl_2025_11", "seq_is", "seq_is"),
    ("verl_2025_11", "seq_is_rs", "seq_mis"),
    ("verl_2025_11", "geo_rs", "geo_mis"),
    ("verl_2025_11", "ppo_is_bypass", "ppo_is_bypass"),
    ("verl_2025_11", "pure_is", "pure_is"),
    ("verl_2025_11", "disabled", "disabled"),
    ("verl_2026_01", "disabled", "verl_2026_01_disabled"),
    ("verl_2026_01", "token_norm", "verl_2026_01_token_is_norm"),
    ("verl_2026_01", "seq_norm", "verl_2026_01_seq_is_norm"),
    *(
        ("verl_2026_01", case, case)
        for case in GOLDEN["configs"]["verl_2026_01"]
        if case.startswith(("decoupled_", "bypass_"))
    ),
]


@pytest.fixture(scope="module", params=list(GOLDEN["datasets"]))
def stem(request):
    return request.param


@pytest.fixture(scope="module")
def analysed(tmp_path_factory):
    """Every golden case and every built-in preset, on both dumps."""
    rows = catalogue.load(HERE / "golden_presets.toml").resolve("all")
    found = {}
    for name in GOLDEN["datasets"]:
        table = tmp_path_factory.mktemp(name) / "sequences.parquet"
        dump = HERE / "golden" / f"{name}.parquet"
        found[name] = analyze([str(dump)], presets=rows, sequences=table), pq.read_table(table)
    return found


def close(got, want):
    return math.isclose(got, want, rel_tol=2e-5, abs_tol=0.0) or got == want


def differences(wanted, logged):
    return {
        name: (logged.get(name), value)
        for name, value in wanted.items()
        if name not in logged or not close(logged[name], value)
    }


@pytest.mark.parametrize(("stem", "generation", "case"), CASES)
def test_every_figure_that_verl_logs_is_reproduced(analysed, stem, generation, case):
    wanted = GOLDEN["datasets"][stem][generation][case]["metrics"]
    summary, _ = analysed[stem]
    logged = summary.presets[f"{SHORT[generation]}_{case}"].as_logged

    assert differences(wanted, logged) == {}
    assert set(logged) == set(wanted)


@pytest.mark.parametrize(("stem", "generation", "case"), CASES)
def test_every_sequence_keeps_verls_tokens_and_weights(analysed, stem, generation, case):
    wanted = GOLDEN["datasets"][stem][generation][case]
    _, table = analysed[stem]
    name = f"{SHORT[generation]}_{case}"

    assert table[f"{name}.kept_tokens"].to_pylist() == wanted["kept_tokens"]
    got = table[f"{name}.weight_sum"].to_pylist()
    if wanted["weight_sum"] is None:
        assert set(got) == {None}
    else:
        assert got == pytest.approx(wanted["weight_sum"], rel=1e-6)


@pytest.mark.parametrize("stem", list(GOLDEN["datasets"]))
@pytest.mark.parametrize(("generation", "case", "preset"), BUILT_IN)
def test_the_built_in_rows_are_verls_presets(analysed, stem, generation, case, preset):
    wanted = GOLDEN["datasets"][stem][generation][case]
    summary, table = analysed[stem]
    name = catalogue.load().resolve(preset)[0].name

    assert differences(wanted["metrics"], summary.presets[name].as_logged) == {}
    assert table[f"{name}.kept_tokens"].to_pylist() == wanted["kept_tokens"]


def test_every_golden_case_has_a_row():
    rows = catalogue.load(HERE / "golden_presets.toml")

    for generation, cases in GOLDEN["configs"].items():
        assert [case for case in cases if f"{SHORT[generation]}_{case}" not in rows] == []
