"""Runs against the first: nothing against itself, calibrated where nothing differs, sharp where paired."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import t as student
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.compare import of_runs, shared_groups
from offpol_diag.core.intervals import Groups, holm, p_value
from offpol_diag.core.observe import examine
from offpol_diag.core.state import State, mix
from offpol_diag.numerals import say
from offpol_diag.presets.catalogue import load
from offpol_diag.report import answered
from offpol_diag.report.page import page as drawn
from offpol_diag.result import loads
from tests.factory import DumpFile, with_numbers
from tests.reading import opened

COLUMNS = ("rollout_log_probs", "old_log_probs", "current_log_probs", "group_id", "rewards")


def make(path, noise, seed, prompts=range(24), without=""):
    """Make three responses to each prompt; hard prompts are hard in every run, which scales their noise."""
    rng, rows = np.random.default_rng(seed), []
    for prompt in prompts:
        own = np.random.default_rng(1000 + prompt)
        scale = noise * math.exp(0.5 * own.standard_normal())
        for _ in range(3):
            n = int(own.integers(10, 40))
            q = -rng.exponential(0.7, n) - 0.5
            p = q + scale * rng.standard_normal(n) - scale**2 / 2
            current = p + 0.01 * rng.standard_normal(n)
            rows.append((q, p, current, prompt, float(rng.random() < 0.4)))
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    with DumpFile(path) as writer:
        writer.write(**{name: values for name, values in columns.items() if name != without})
    return str(path)


def read(path, seed=0, presets="token_is,seq_mis"):
    return examine(
        opened(str(path)), presets=load().resolve(presets) if presets else (), device="cpu", seed=seed
    )


def against(a, b):
    (found,) = of_runs([a, b], [a.summary(), b.summary()])
    return found


def named(found, name):
    return next(one for one in found.contrasts if one.name == name)


def counts(found):
    """Return how many numbers differ, and how many were tested."""
    tested = [one.differs for one in found.contrasts if one.differs is not None]
    return sum(tested), len(tested)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("runs")
    runs = {
        "a": (0.05, 1),
        "same": (0.05, 2),
        "worse": (0.09, 3, range(2, 26)),
        "others": (0.05, 4, range(500, 524)),
        "two": (0.05, 5, range(24), "current_log_probs"),
        "three_prompts": (0.05, 6, range(3)),
        "bypass": (0.05, 1, range(24), "old_log_probs"),
    }
    for name, how in runs.items():
        make(found / f"{name}.parquet", *how)
    pq.write_table(pq.read_table(found / "a.parquet").slice(0, 0), found / "empty.parquet")
    return found


@pytest.fixture(scope="module")
def a(folder):
    return read(folder / "a.parquet")


@pytest.fixture(scope="module")
def worse(folder, a):
    return against(a, read(folder / "worse.parquet"))


# ---------------------------------------------------------------- differences and tests


def test_a_run_against_itself_differs_by_exactly_nothing(a):
    found = against(a, a)
    assert {one.difference.value for one in found.contrasts} <= {0.0, None}
    assert {one.difference.interval for one in found.contrasts} <= {(0.0, 0.0), None}
    assert (counts(found)[0], counts(found)[1] > 40) == (0, True)
    assert {one.p_adjusted for one in found.contrasts if one.differs is not None} == {1.0}
    summary = a.summary().model_copy(update={"against": [found]})
    assert answered(summary).more.startswith("No difference is established: 0 of ")


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
    values, many = np.array([1.3, *(1.3 + drawn)]), Groups(24, 20.0)
    assert [p_value(values, few) for few in (Groups(4, 4.0), Groups(9, 2.0))] == [None, None]
    rows = (values * 0, np.full(257, 2.0), values * math.nan)
    assert [p_value(row, many) for row in rows] == [1.0, 0.0, None]


def test_holm_rejects_step_by_step():
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = (rng.random(8) ** 4).tolist()
        for alpha in (0.01, 0.05, 0.3):
            order = sorted(range(8), key=lambda i: values[i])
            kept = [place for place, at in enumerate(order) if values[at] > alpha / (8 - place)]
            rejected = {*order[: kept[0] if kept else 8]}
            assert {at for at, p in enumerate(holm(values)) if p <= alpha} == rejected


def test_where_nothing_differs_nothing_is_named_and_raw_p_values_are_uniform(tmp_path):
    """More runs with NULL_RUNS=120: something named in 1, and 3.0% of the p-values below 5%."""
    runs = int(os.environ.get("NULL_RUNS", "3"))
    fired, raw = 0, []
    for at in range(runs):
        two = (make(tmp_path / f"{at}-{i}.parquet", 0.05, 100 + 2 * at + i) for i in (0, 1))
        found = against(*(read(path, seed=at) for path in two))
        fired += counts(found)[0] > 0
        raw += [one.p_value < 0.05 for one in found.contrasts if one.p_value is not None]
    said = f"something was named in {fired} of {runs} runs; {sum(raw) / len(raw):.1%} of p-values below 5%"
    print(said)  # noqa: T201
    assert fired <= 0.05 * runs + 2.3 * math.sqrt(0.0475 * runs), said  # 1% of simulations would have more
    assert 0.005 < sum(raw) / len(raw) < 0.13, said


def test_a_real_shift_is_found_whenever_prompts_are_shared(tmp_path):
    for at in range(2):
        two = (make(tmp_path / f"{at}-{i}.parquet", (0.05, 0.065)[i], 2 * at + i) for i in (0, 1))
        k3 = named(against(*(read(path, seed=at, presets="") for path in two)), "k3")
        low, high = (end / (0.065 / 0.05) ** 2 for end in k3.ratio.interval)
        assert (k3.differs, low < 1.05, high > 0.95) == (True, True, True)


def test_what_differs_comes_first_in_it_what_matters_and_then_what_differs_most(worse):
    order = [{True: 0, False: 1, None: 2}[one.differs] for one in worse.contrasts]
    assert (order, worse.contrasts[0].name) == (sorted(order), "k3")
    others = [one for one in worse.contrasts if one.differs and one.name.startswith("total.")]
    sizes = [abs(one.difference.value) / (abs(one.a.value) + abs(one.b.value)) for one in others]
    assert len(sizes) > 3
    assert sizes == sorted(sizes, reverse=True)


def test_shared_prompts_are_counted_and_without_prompt_ids_equal_responses_are_paired(
    worse, a, folder, tmp_path
):
    apart = against(a, read(folder / "others.parquet", presets="")).pairing
    assert worse.pairing.startswith("Paired: 22 prompts (group_id) are in both runs")
    assert "2 are only in A and 2 only in B" in worse.pairing
    assert "Independent: no prompts (group_id) are in both" in apart
    one, other = (
        read(make(tmp_path / f"{x}.parquet", 0.05, x, without="group_id"), presets="") for x in (1, 2)
    )
    assert against(one, one).pairing.startswith("Paired: 72 responses are in both runs")
    assert "no responses are in both" in against(one, other).pairing


def test_of_more_groups_than_are_kept_the_shared_ones_are_estimated():
    def sample(first, last):
        return State.of_groups(mix(mix(np.arange(first, last, dtype=np.uint64))))

    for other, shared in (((15_000, 45_000), 15_000), ((0, 30_000), 30_000), ((50_000, 60_000), 0)):
        found = shared_groups(sample(0, 30_000), sample(*other))
        assert found == pytest.approx(shared, rel=0.1, abs=1)


def test_what_one_run_lacks_is_named_and_the_rest_compared(folder):
    found = against(
        *(read(folder / name, presets="token_is,pure_is") for name in ("a.parquet", "two.parquet"))
    )
    assert {"drift 2: old → current", "pure_is"} <= {*found.missing}
    assert not [one for one in found.contrasts if one.name.startswith(("drift2.", "total.", "pure_is."))]
    assert named(found, "k3").differs is False
    assert named(found, "token_is.ess_tokens").p_value is not None


def test_few_prompts_and_heavy_tails_are_not_tested(folder, a):
    found = against(a, read(folder / "three_prompts.parquet", presets=""))
    assert counts(found) == (0, 0)
    assert "too few groups" in named(found, "k3").reason
    said = answered(a.summary().model_copy(update={"against": [found]})).more
    assert said.startswith("Cannot say: too few groups (prompts)")

    summary, other = a.summary(), read(folder / "same.parquet", presets="")
    heavy = replace(summary.whole["mean_ratio"], note="unreliable: k̂ = 0.9 is above 0.7")
    doubted = with_numbers(summary, "dump", summary.whole | {"mean_ratio": heavy})
    (found,) = of_runs([a, other], [doubted, other.summary()])
    mean = named(found, "mean_ratio")
    assert (mean.differs, "tail" in mean.reason) == (None, True)


# ---------------------------------------------------------------- what is shown


def run(*arguments, command="compare"):
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def test_any_number_of_runs_is_compared_with_the_first_and_every_report_says_the_same(folder, worse):
    """Numbers and p-values are those of two runs; these are corrected over the tests of all runs."""
    files = [folder / f"{name}.parquet" for name in ("a", "same", "worse")]
    json, html, md, again = (folder / f"r.{end}" for end in ("json", "html", "md", "again.html"))
    ran = run(
        *files,
        "--presets",
        "token_is,seq_mis",
        "--json",
        json,
        "-o",
        html,
        "--md",
        md,
        "-v",
        "--device",
        "cpu",
    )
    found = loads(json.read_text(), "r.json")
    same, alone = found.against, {one.name: one for one in worse.contrasts}

    assert ran.exit_code == 0, ran.stderr
    assert [one.letter for one in same] == ["B", "C"]
    assert {one.name for one in same[1].contrasts} == alone.keys()
    for one in same[1].contrasts:
        for name in ("a", "b", "difference"):
            assert getattr(one, name).parts() == getattr(alone[one.name], name).parts()
        assert one.p_value == alone[one.name].p_value
    tested = [one for other in same for one in other.contrasts if one.p_value is not None]
    assert sorted(one.p_adjusted for one in tested) == sorted(holm([one.p_value for one in tested]))

    said = " ".join(ran.stdout.split())
    assert said.startswith("A is a.parquet; B is same.parquet; C is worse.parquet")
    for report in (said, html.read_text(), md.read_text()):
        assert "Worse in C" in report
        assert "{} of {} metrics differ after correction".format(*counts(same[1])) in report
    table = next(one for one in answered(found).tables if one.id == "decisive")
    assert table.header == ("number", "B against A", "C against A", "A", "B", "C")
    k3 = next(row for row in table.rows if row[0] == "k3")
    assert k3[1:3] == ("not told apart", f"×{say(named(same[1], 'k3').ratio)}")
    assert k3[3:] == tuple(one.whole["k3"] for one in (found, same[0].run, same[1].run))
    assert (found.to_json(), drawn(found)) == (json.read_text(), html.read_text())
    assert run(json, "-o", again, command="report").exit_code == 0
    assert again.read_text() == html.read_text()


def test_the_curves_of_all_runs_by_step_are_one_chart():
    names = ("stale", "collapse", "quantized")
    found = offpol_diag.compare(*(f"sample_data/{name}.parquet" for name in names), progress=False)
    chart = next(one for one in answered(found).charts if one.name == "runs_by_step")
    lines = [one for one in chart.data if one["showlegend"]]
    assert [one["name"] for one in lines] == ["A", "B", "C"]
    for result, line in zip((found, *(one.run for one in found.against)), lines, strict=True):
        assert line["y"] == [one.numbers["k3"].value for one in result.at("step")]
    assert "; K3 of C lies above A's at " in chart.title


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (("a",) * 27, (), ("27 runs: at most 26 are compared", "quoted glob")),
        (("a", "nowhere"), (), ("nowhere.parquet: no such file",)),
        (("two",), ("--presets", "pure_is"), ("no current_log_probs",)),
        (("a", "empty"), (), ("empty.parquet",)),
        (("two", "bypass"), (), ("no pair of policies in common",)),
    ],
)
def test_what_cannot_be_compared_is_refused(folder, names, options, words):
    refused = run(*(folder / f"{name}.parquet" for name in names), *options)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert all(word in refused.stderr for word in (*words, "hint: ")), refused.stderr


def test_the_page_shows_what_is_printed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = Path("docs/compare.md").read_text(encoding="utf-8")
    samples = ("sample_data/healthy.parquet", "sample_data/quantized.parquet")
    printed = run(*samples, "-v").stdout + run(samples[1], "--presets", "token_is,seq_mis", "-v").stdout
    shown = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL)).splitlines()

    assert len(shown) > 25
    lines = set(printed.splitlines())
    assert [line for line in shown if line not in lines and line != "…" and not line.startswith("$ ")] == []
