"""Run A against run B: nothing against itself, calibrated where nothing differs, sharp where paired."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import jsonschema
import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import t as student
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.compare import effect, of_runs, rank, shared_groups
from offpol_diag.core.intervals import Groups, holm, p_value
from offpol_diag.core.observe import examine
from offpol_diag.core.state import State, mix
from offpol_diag.number import Number
from offpol_diag.presets.catalogue import load
from offpol_diag.report import answered
from offpol_diag.report.compare import provenance
from offpol_diag.report.page import page as drawn
from offpol_diag.result import Contrast, Result, loads
from tests.factory import DumpFile, with_numbers
from tests.reading import opened

NAMED = load().resolve("token_is,seq_mis")

COLUMNS = ("rollout_log_probs", "old_log_probs", "current_log_probs", "group_id", "rewards")


def make(path, noise, seed, prompts=range(24), per=3, without=""):
    """Make responses of prompts that are hard or easy in every run, which scales their noise."""
    rng, rows = np.random.default_rng(seed), []
    for prompt in prompts:
        own = np.random.default_rng(1000 + prompt)
        scale = noise * math.exp(0.5 * own.standard_normal())
        for _ in range(per):
            n = int(own.integers(10, 40))
            q = -rng.exponential(0.7, n) - 0.5
            p = q + scale * rng.standard_normal(n) - scale**2 / 2
            current = p + 0.01 * rng.standard_normal(n)
            rows.append((q, p, current, prompt, float(rng.random() < 0.4)))
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    with DumpFile(path) as writer:
        writer.write(**{name: values for name, values in columns.items() if name != without})
    return str(path)


def read(path, seed=0, presets=NAMED):
    return examine(opened(path), presets=presets, device="cpu", seed=seed)


def against(a, b):
    (found,) = of_runs([a, b], [a.summary(), b.summary()])
    return found


def named(found, name):
    return next(one for one in found.contrasts if one.name == name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("runs")
    runs = {
        "a": (0.05, 1),
        "same": (0.05, 2),
        "worse": (0.09, 3, range(2, 26)),
        "others": (0.05, 4, range(500, 524)),
        "two": (0.05, 5, range(24), 3, "current_log_probs"),
        "three_prompts": (0.05, 6, range(3)),
        "bypass": (0.05, 1, range(24), 3, "old_log_probs"),
    }
    for name, how in runs.items():
        make(found / f"{name}.parquet", *how)
    pq.write_table(pq.read_table(found / "a.parquet").slice(0, 0), found / "empty.parquet")
    return found


@pytest.fixture(scope="module")
def a(folder):
    return read(str(folder / "a.parquet"))


@pytest.fixture(scope="module")
def worse(folder, a):
    return against(a, read(str(folder / "worse.parquet")))


def test_a_run_against_itself_differs_by_exactly_nothing(folder, a):
    found = against(a, read(str(folder / "a.parquet")))
    assert {one.difference.value for one in found.contrasts} <= {0.0, None}
    assert {one.difference.interval for one in found.contrasts} <= {(0.0, 0.0), None}
    assert (found.differing, found.tested > 40) == (0, True)
    assert {one.p_adjusted for one in found.contrasts if one.differs is not None} == {1.0}
    assert found.headline.startswith("No difference is established: 0 of ")
    assert named(found, "k3").effect == "equal"
    assert found.notes == ["A and B share 1 file: those rows are compared with themselves."]


def test_a_difference_is_of_the_values_of_both_runs_and_that_of_rewards_is_not_tested(a, worse):
    mine = a.summary().whole
    for one in worse.contrasts:
        if one.name in mine and one.a.value is not None and one.b.value is not None:
            assert (one.a, one.b) == (mine[one.name], worse.run.whole[one.name])
            assert one.difference.value == pytest.approx(one.b.value - one.a.value, rel=1e-9, abs=1e-15)
    for name in ("mean_reward", "tokens_differ"):
        one = named(worse, name)
        assert (one.differs, one.p_value, one.reason[:10]) == (None, None, "not tested")
        assert one.difference.value is not None


def test_the_p_value_is_of_a_t_test_and_agrees_with_the_interval(worse):
    judged = [one for one in worse.contrasts if one.p_value is not None and one.difference.interval]
    assert len(judged) > 40
    for one in judged:
        tested, null = (one.difference, 0.0) if one.ratio is None else (one.ratio, 1.0)
        excludes = not tested.interval[0] <= null <= tested.interval[1]
        assert excludes == (one.p_value < 0.05) or abs(one.p_value - 0.05) < 5e-3, one.name


def test_a_p_value_by_its_definition():
    """The tail of t is that of scipy, or a little larger."""
    drawn = np.sin(3.0 * np.arange(256))
    for groups, t in product((6, 12, 20, 200), (0.1, 1.0, 2.0, 3.0, 6.0)):
        value = t * float(drawn.std(ddof=1)) * math.sqrt(groups / (groups - 1))
        wanted = 2 * float(student.sf(t, 1 / (1 / (groups - 1) + 1 / 255)))
        found = p_value(np.array([value, *(value + drawn)]), Groups(groups + 4, float(groups)))
        assert wanted * 0.99 <= found <= wanted * (1.02 if wanted > 0.01 else 1.1)
    values = np.array([1.3, *(1.3 + drawn)])
    assert p_value(values, Groups(4, 4.0)) is p_value(values, Groups(9, 2.0)) is None
    assert p_value(values * 0, Groups(24, 20.0)) == 1.0
    assert p_value(np.full(257, 2.0), Groups(24, 20.0)) == 0.0
    assert p_value(values * math.nan, Groups(24, 20.0)) is None


def test_holm_rejects_step_by_step():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = (rng.random(8) ** 4).tolist()
        for alpha in (0.01, 0.05, 0.3):
            rejected = set()
            for place, at in enumerate(sorted(range(8), key=lambda i: values[i])):
                if values[at] > alpha / (8 - place):
                    break
                rejected.add(at)
            assert {at for at, p in enumerate(holm(values)) if p <= alpha} == rejected
    assert holm([]) == []
    assert max(holm([0.9, 0.8, 1.0])) == 1.0


def test_where_nothing_differs_nothing_is_named_and_raw_p_values_are_uniform(tmp_path):
    """More runs with NULL_RUNS=120: something named in 1, and 3.0% of the p-values below 5%."""
    runs = int(os.environ.get("NULL_RUNS", "3"))
    fired, raw = 0, []
    for at in range(runs):
        two = (make(tmp_path / f"{at}-{i}.parquet", 0.05, 100 + 2 * at + i) for i in (0, 1))
        found = against(*(read(path, seed=at) for path in two))
        fired += found.differing > 0
        raw += [one.p_value < 0.05 for one in found.contrasts if one.p_value is not None]
    said = f"something was named in {fired} of {runs} runs; {sum(raw) / len(raw):.1%} of p-values below 5%"
    print(said)  # noqa: T201
    assert fired <= 0.05 * runs + 2.3 * math.sqrt(0.0475 * runs), said  # 1% of simulations would have more
    assert 0.005 < sum(raw) / len(raw) < 0.13, said


def test_a_real_shift_is_found_whenever_prompts_areshared_groups(tmp_path):
    for at in range(2):
        two = (make(tmp_path / f"{at}-{i}.parquet", (0.05, 0.065)[i], 2 * at + i) for i in (0, 1))
        k3 = named(against(*(read(path, seed=at, presets=()) for path in two)), "k3")
        assert k3.differs
        assert k3.ratio.interval[0] < (0.065 / 0.05) ** 2 * 1.05
        assert k3.ratio.interval[1] > (0.065 / 0.05) ** 2 * 0.95


def test_what_differs_comes_first_and_in_it_what_matters(worse):
    judged = [{True: 0, False: 1, None: 2}[one.differs] for one in worse.contrasts]
    assert judged == sorted(judged)
    assert worse.contrasts[0].name == "k3"
    assert [one.differs for one in worse.contrasts].count(True) == worse.differing > 5
    assert worse.headline == f"{worse.differing} of {worse.tested} metrics differ after correction."


def test_shared_prompts_are_counted_and_without_prompt_ids_equal_responses_are_paired(
    worse, a, folder, tmp_path
):
    apart = against(a, read(str(folder / "others.parquet"), presets=())).pairing
    for found, said in (
        (worse.pairing, "Paired: 22 prompts (group_id) are in both runs"),
        (worse.pairing, "2 are only in A and 2 only in B"),
        (apart, "Independent: no prompts (group_id) are in both"),
    ):
        assert said in found
    paths = [make(tmp_path / f"{seed}.parquet", 0.05, seed, without="group_id") for seed in (1, 2)]
    one, other = (read(path, presets=()) for path in paths)
    assert against(one, one).pairing.startswith("Paired: 72 responses are in both runs")
    assert "no responses are in both" in against(one, other).pairing


def test_of_more_groups_than_are_kept_the_shared_ones_are_estimated():
    def sample(first, last):
        return State.of_groups(mix(mix(np.arange(first, last, dtype=np.uint64))))

    for other, shared in (((15_000, 45_000), 15_000), ((0, 30_000), 30_000), ((50_000, 60_000), 0)):
        found = shared_groups(sample(0, 30_000), sample(*other))
        assert found == pytest.approx(shared, rel=0.1, abs=1)


@pytest.mark.parametrize(
    ("one", "other", "unit", "said"),
    [
        (0.002, 0.005, "", "2.5x"),
        (0.005, 0.002, "", "0.40x"),
        (-0.1, 0.2, "", "0.30"),
        (0.3, 0.1 + 0.2, "", "equal"),  # but for rounding
        (0.9, 0.5, "fraction", "−40%"),  # large shares in points
        (0.001, 0.002, "fraction", "2x"),
    ],
)
def test_the_effect_is_a_ratio_or_a_difference(one, other, unit, said):
    a, b, gap = (Number(value=x, unit=unit) for x in (one, other, other - one))
    ratio = Number(value=other / one) if one > 0 and other > 0 else None
    assert effect(Contrast(name="x", a=a, b=b, difference=gap, ratio=ratio)) == said


def test_larger_differences_rank_first_and_rounding_is_none():
    def of(one, other):
        return Contrast(name="x", a=Number(value=one), b=Number(value=other), difference=Number(value=0.0))

    assert rank(of(1.0, 3.0), "") == rank(of(1.0, 3.0 + 1e-15), "") < rank(of(1.0, 2.99999), "")
    assert rank(of(0.3, 0.1 + 0.2), "") == rank(of(0.3, 0.3), "") == rank(of(None, 1.0), "")


def test_what_one_run_lacks_is_named_and_the_rest_compared(folder):
    presets = load().resolve("token_is,pure_is")
    found = against(*(read(str(folder / name), presets=presets) for name in ("a.parquet", "two.parquet")))
    assert found.needs == {**found.needs, "drift 2: old → current": "only in A", "pure_is": "only in A"}
    assert not [one for one in found.contrasts if one.name.startswith(("drift2.", "total.", "pure_is."))]
    assert named(found, "k3").differs is False
    assert named(found, "token_is.ess_tokens").p_value is not None


def test_few_prompts_and_heavy_tails_are_not_tested(folder, a):
    found = against(a, read(str(folder / "three_prompts.parquet"), presets=()))
    assert (found.tested, found.differing) == (0, 0)
    assert found.headline == "Cannot say: 3 groups (prompts) are too few for intervals."
    assert "too few groups" in named(found, "k3").reason

    summary, other = a.summary(), read(str(folder / "same.parquet"), presets=())
    heavy = replace(summary.whole["mean_ratio"], note="unreliable: k̂ = 0.9 is above 0.7")
    doubted = with_numbers(summary, "dump", summary.whole | {"mean_ratio": heavy})
    (found,) = of_runs([a, other], [doubted, other.summary()])
    mean = named(found, "mean_ratio")
    assert (mean.differs, "tail" in mean.reason) == (None, True)


def test_what_the_writers_said_of_the_runs_stands_beside_each_other_where_it_differs():
    a = {"engine": {"name": "vLLM", "dtype": "bf16"}, "trainer": "verl"}
    b = {"engine": {"name": "vLLM", "dtype": "fp8"}, "trainer": "verl", "note": "x"}
    assert provenance(a, b) == [("engine.dtype", "bf16", "fp8"), ("note", "not said", "x")]


def run(*arguments, command="compare"):
    return CliRunner().invoke(app, [command, *arguments])


def test_two_dumps_are_compared_as_two_runs_and_every_report_says_the_same(folder):
    files = [str(folder / f"r.{end}") for end in ("json", "html", "md")]
    options = ["-v", "--presets", "seq_mis", "--json", files[0], "-o", files[1], "--md", files[2]]
    ran = run(str(folder / "a.parquet"), str(folder / "worse.parquet"), *options)

    assert ran.exit_code == 0, ran.stderr
    for said in ("a.parquet is run A", "worse.parquet is run B (--as-one reads them as one)"):
        assert said in ran.stderr
    for said in ("K3 KL is ", "Paired: 22 prompts"):
        assert said in " ".join(ran.stdout.split())
    text = (folder / "r.json").read_text()
    summary = loads(text, "r.json")
    jsonschema.validate(json.loads(text), Result.model_json_schema(mode="serialization"))
    assert summary.run.command == "compare"
    assert summary.to_json() == text
    page = (folder / "r.html").read_text()
    assert drawn(summary) == page
    marked = (folder / "r.md").read_text()
    for report in (page, marked, " ".join(ran.stdout.split())):
        assert "The runs" in report
        assert f"{summary.against[0].differing} of {summary.against[0].tested} metrics differ" in report
    assert "a.parquet against worse.parquet" in page
    again = run(str(folder / "r.json"), "-o", str(folder / "again.html"), command="report")
    assert again.stdout.startswith("A is a.parquet; B is worse.parquet\n! A: there are no advantages")
    assert "\n\nWorse in B: K3 KL is " in again.stdout
    assert (folder / "again.html").read_text() == page


def test_any_number_of_runs_is_compared_with_the_first(folder, a, worse):
    """Numbers and p-values are those of two runs; these are corrected over the tests of all runs."""
    files = [str(folder / f"{name}.parquet") for name in ("a", "same", "worse")]
    ran = run(
        *files, "--presets", "token_is,seq_mis", "--json", str(folder / "n.json"), "-v", "--device", "cpu"
    )
    found = loads((folder / "n.json").read_text(), "n.json")
    same, alone = found.against, {one.name: one for one in worse.contrasts}

    assert ran.exit_code == 0, ran.stderr
    assert "c.parquet" not in ran.stderr
    assert "same.parquet is run B, " in " ".join(ran.stderr.split())
    assert [one.letter for one in same] == ["B", "C"]
    assert {one.name for one in same[1].contrasts} == alone.keys()
    for one in same[1].contrasts:
        wanted = alone[one.name]
        assert (one.a.parts(), one.b.parts()) == (wanted.a.parts(), wanted.b.parts())
        assert (one.difference.parts(), one.p_value) == (wanted.difference.parts(), wanted.p_value)
    tested = [one for other in same for one in other.contrasts if one.p_value is not None]
    assert [one.p_adjusted for one in tested] == holm([one.p_value for one in tested])
    said = " ".join(ran.stdout.split())
    assert said.startswith("A is a.parquet; B is same.parquet; C is worse.parquet")
    assert "Worse in C: K3 KL is " in said
    answer = answered(found)
    table = next(one for one in answer.tables if one.id == "decisive")
    assert table.header == ("number", "B against A", "C against A", "A", "B", "C")
    k3 = next(row for row in table.rows if row[0] == "k3")
    assert k3[3:6] == tuple(one.whole["k3"] for one in (found, same[0].run, same[1].run))
    assert {"A", "B", "C"} <= {*next(one for one in answer.tables if one.id == "runs").header}


def test_the_curves_of_all_runs_by_step_are_one_chart():
    names = ("stale", "collapse", "quantized")
    found = offpol_diag.compare(*(f"sample_data/{name}.parquet" for name in names), progress=False)
    chart = next(one for one in answered(found).charts if one.name == "runs_by_step")
    assert [one["name"] for one in chart.data if one["showlegend"]] == ["A", "B", "C"]
    assert "; K3 of C lies above A's at " in chart.title


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (("a",) * 27, (), ("27 runs: at most 26 are compared", "--as-one")),
        (("a", "nowhere"), (), ("nowhere.parquet: no such file",)),
        (("a", "same"), ("--against", "token_is"), ("--against names a preset", "--as-one")),
        (("a",), ("--against", "nothing"), ('unknown preset "nothing"',)),
        (("two",), ("--presets", "token_is", "--against", "pure_is"), ("no current_log_probs",)),
        (("a", "empty"), (), ("empty.parquet",)),
        (("two", "bypass"), (), ("no pair of policies in common",)),
    ],
)
def test_what_cannot_be_compared_is_refused(folder, names, options, words):
    refused = run(*(str(folder / f"{name}.parquet") for name in names), *options)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert all(word in refused.stderr for word in (*words, "hint: ")), refused.stderr


def test_two_dumps_may_be_read_as_one_and_the_reference_be_any_preset(folder):
    two = [str(folder / name) for name in ("a.parquet", "same.parquet")]
    done = run(*two, "--as-one", "--presets", "token_is,seq_mis", "-v")
    assert (done.exit_code, "− token_is" in done.stdout) == (0, True)
    assert "read as one dump" in done.stderr
    for presets in ("token_is,seq_mis", "token_is"):
        done = run(str(folder / "a.parquet"), "--presets", presets, "--against", "seq_mis", "-v")
        assert (done.exit_code, "− seq_mis" in done.stdout) == (0, True)


def test_the_page_shows_what_is_printed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = Path("docs/compare.md").read_text(encoding="utf-8")
    samples = ("sample_data/healthy.parquet", "sample_data/quantized.parquet")
    printed = run(*samples, "-v").stdout + run(samples[1], "--presets", "token_is,seq_mis", "-v").stdout
    shown = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL)).splitlines()

    assert len(shown) > 25
    lines = set(printed.splitlines())
    assert [line for line in shown if line not in lines and line != "…" and not line.startswith("$ ")] == []
