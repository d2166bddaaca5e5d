"""Presets side by side and runs against the first: paired differences, tests, and what each drops."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import t as student
from typer.testing import CliRunner

import offpol_diag
from offpol_diag import api
from offpol_diag.cli import app
from offpol_diag.compare import of_preset, of_presets, of_runs, pairing, reference
from offpol_diag.core.intervals import Groups, holm, p_value
from offpol_diag.core.observe import examine
from offpol_diag.core.readout import Readout
from offpol_diag.core.state import State, draws, groups_of, mix
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import UsageError
from offpol_diag.numerals import format_number
from offpol_diag.presets import Preset, Reject, Veto, Weight
from offpol_diag.presets.catalogue import load
from offpol_diag.report import answered
from offpol_diag.result import Comparison, loads
from tests import oracles
from tests.drawn import html, markdown
from tests.factory import DumpFile, make_summary, with_numbers
from tests.reading import opened
from tests.test_terminal import SAMPLES

ROWS = oracles.make_rows(0.3, seed=3, many=60, outliers=0.01)
SOME = (
    Preset("all", ""),
    Preset("band", "", reject=(Reject("ratio", "token", 0.7, 1.4),)),
    Preset("whole", "", weight=Weight("sum", upper=2.0), reject=(Reject("ratio", "sum", 0.5, 2.0),)),
    Preset("cautious", "", reject=(Reject("ratio", "mean", 0.9, 1.1),), veto=Veto(lower=0.4)),
    Preset("pop", "", weight=Weight("token", "mask", lower=0.8, upper=1.25)),
    Preset("signed", "", reject=(Reject("k3", "token", upper=0.02, advantage="negative"),)),
)
METRICS = ("ess_tokens", "ess_sequences", "tokens_rejected", "weight_std", "k3", "pg_loss")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return oracles.write(ROWS, tmp_path_factory.mktemp("compare") / "dump.parquet")


def compare(path, presets, against, **options):
    """Examine a dump, opened with options, and compare its presets with the one named `against`."""
    found = examine(opened(path, **options), presets=presets, device="cpu", against=against)
    return found, of_presets(found, found.summary(), against)


@pytest.fixture(scope="module")
def both(path):
    return compare(path, SOME, "all", batch_tokens=200)


def test_a_difference_is_taken_within_each_replicate(both, path):
    """Replicates are those of the rows that each draws, a group as often as the other side's."""
    found, compared = both
    (batch,) = open_dump([path]).batches()
    times = draws(groups_of(batch.key, batch.steps), found.study.seed).astype(int).tolist()
    out, data = Readout(found.study, found.state), oracles.sequences(ROWS)
    one, other = (of_preset(out, found.summary(), found.study.presets[at]).drawn for at in (0, 2))
    for replicate in (0, 7, 511):
        drawn = [s for s, many in zip(data, times, strict=True) for _ in range(many[replicate])]
        a, b = (oracles.preset_metrics(drawn, SOME[at])[0] for at in (2, 0))
        for name in METRICS:
            difference = float(other[name][1 + replicate] - one[name][1 + replicate])
            assert difference == pytest.approx(a[name] - b[name], rel=1e-9, abs=1e-10), name
    for name in METRICS:
        number = compared.differences["whole"][name]
        assert number.value == float(other[name][0] - one[name][0])
        assert number.interval[0] < number.value < number.interval[1]


def test_presets_that_do_the_same_differ_by_exactly_nothing(path):
    same = Preset("same", "", reject=(Reject("ratio", "token", 0.7, 1.4),))
    _, compared = compare(path, (SOME[1], same), "band")
    known = [number for number in compared.differences["same"].values() if number.unknown is None]
    assert len(known) > 20
    assert {number.value for number in known} == {0.0}
    assert {number.interval for number in known} == {(0.0, 0.0), None}
    assert all(one.tokens.count == one.sequences.count == 0 for one in compared.drops)


def test_the_reference_is_the_first_that_can_be_computed():
    known, columns = load(), {"rollout_log_probs": "r", "old_log_probs": "o"}
    assert reference(columns, known.resolve("pure_is,token_is,seq_mis")) == "token_is"
    with pytest.raises(UsageError, match="no current_log_probs, which pure_is cannot do without"):
        reference(columns, known.resolve("pure_is"))


def left(s, preset):
    """Return which tokens keep a gradient: kept, and of a weight that is not 0."""
    done = oracles.apply(s, preset, {})
    return [kept and weight != 0 for kept, weight in zip(done.kept, done.weights, strict=True)]


def test_examples_are_the_five_of_the_largest_mismatch_and_shares_have_intervals_of_groups(both):
    found, compared = both
    data = {s.ident: s for s in oracles.sequences(ROWS)}
    for one, preset in zip(compared.drops[::2], SOME[1:], strict=True):
        lost = {s.ident: sum(not kept for kept in left(s, preset)) for s in data.values()}
        total = {name: abs(math.fsum(data[name].delta("old"))) for name, many in lost.items() if many}
        worst = sorted(total, key=lambda name: -total[name])[:5]
        rows = [(row.sequence_id, row.tokens, row.length) for row in one.examples]
        assert rows == [(name, lost[name], data[name].n) for name in worst]
    rejected = found.summary().preset("band")["tokens_rejected"]
    share = compared.drops[0].tokens.numbers["share"]
    assert [share.value, *share.interval] == pytest.approx([rejected.value, *rejected.interval], rel=1e-9)
    assert compared.all_tokens.count == sum(s.n for s in data.values())


def test_nothing_is_looked_at_of_many_presets_and_comparing_changes_no_number(path, both):
    many = tuple(Preset(f"p{i}", "", weight=Weight("token", upper=2.0 + i)) for i in range(9))
    crowd, compared = compare(path, many, "p0")
    assert not [name for name in (*crowd.state.tables, *crowd.state.records) if "drops" in name]
    assert (len(compared.differences), compared.drops) == (8, [])
    plain = examine(opened(path, batch_tokens=200), presets=SOME, device="cpu").summary()
    assert plain.subjects == both[0].summary().subjects


def tables(summary):
    return {one.id: one for one in answered(summary).tables}


def test_of_two_presets_what_each_drops_has_counts_and_five_examples_in_at_most_60_lines():
    found = api.compare(SAMPLES / "stale.parquet", presets="token_is,seq_mis@2..3", progress=False)
    (drops,) = (one for one in found.comparison.drops if one.tokens.count)
    assert (drops.dropped_by, drops.kept_by, len(drops.examples)) == ("seq_mis@2..3", "token_is", 5)
    assert len(tables(found)["dropped"].rows) == 5
    (row, every) = tables(found)["drops"].rows
    assert row[:3] == ["seq_mis@2..3", "token_is", drops.tokens.count]
    assert every[2] == found.dump.tokens
    assert markdown(found).count("\n") <= 60
    assert "Sequences that lose tokens to one preset only" in html(found)
    assert loads(found.to_json(), "x") == found
    assert answered(found).sentence.startswith("ESS of tokens: token_is 99.2% [98.9%, 99.4%], seq_mis@2..3 ")


def test_what_cannot_be_computed_is_named():
    compared = make_summary(gates=[], comparison=Comparison(against="disabled", differences={}))
    assert "ppo_is_bypass needs current_log_probs" in answered(compared).cautions[-1]


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
    chosen = load().resolve(presets) if presets else ()
    return examine(opened(str(path)), presets=chosen, device="cpu", seed=seed)


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


def test_a_run_against_itself_differs_by_exactly_nothing(a):
    found = against(a, a)
    assert {one.difference.value for one in found.contrasts} <= {0.0, None}
    assert {one.difference.interval for one in found.contrasts} <= {(0.0, 0.0), None}
    assert (counts(found)[0], counts(found)[1] > 40) == (0, True)
    assert {one.p_adjusted for one in found.contrasts if one.differs is not None} == {1.0}
    summary = a.summary().model_copy(update={"against": [found]})
    assert answered(summary).more.startswith("0 of ")


def test_a_difference_is_of_the_values_of_both_runs_and_that_of_rewards_is_not_tested(a, worse):
    judged = [{True: 0, False: 1, None: 2}[one.differs] for one in worse.contrasts]
    assert (judged, worse.contrasts[0].name) == (sorted(judged), "k3")
    for one in worse.contrasts:
        if one.a.value is not None and one.b.value is not None:
            assert one.difference.value == pytest.approx(one.b.value - one.a.value, rel=1e-9, abs=1e-15)
    for one in (named(worse, name) for name in ("mean_reward", "tokens_differ")):
        assert (one.differs, one.p_value, one.reason[:10]) == (None, None, "not tested")
        assert (one.a, one.b) == (a.summary().whole[one.name], worse.run.whole[one.name])


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


def test_holm_multiplies_the_smallest_by_all_the_next_by_one_less_and_never_lets_them_fall():
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert (holm([]), holm([0.9, 0.8])) == ([], [1.0, 1.0])


def test_where_nothing_differs_nothing_is_named_and_raw_p_values_are_uniform(tmp_path):
    """More runs with NULL_RUNS=120: something named in 1, and 3.0% of the p-values below 5%."""
    runs, fired, raw = int(os.environ.get("NULL_RUNS", "3")), 0, []
    for at in range(runs):
        two = (make(tmp_path / f"{at}-{i}.parquet", 0.05, 100 + 2 * at + i) for i in (0, 1))
        found = against(*(read(path, seed=at) for path in two))
        fired += counts(found)[0] > 0
        raw += [one.p_value < 0.05 for one in found.contrasts if one.p_value is not None]
    # 1% of simulations would have more
    assert fired <= 0.05 * runs + 2.3 * math.sqrt(0.0475 * runs), f"{fired} of {runs}"
    assert 0.005 < sum(raw) / len(raw) < 0.13


def test_a_real_shift_is_found_whenever_prompts_are_shared(tmp_path):
    for at in range(2):
        two = (make(tmp_path / f"{at}-{i}.parquet", (0.05, 0.065)[i], 2 * at + i) for i in (0, 1))
        k3 = named(against(*(read(path, seed=at, presets="") for path in two)), "k3")
        low, high = (end / (0.065 / 0.05) ** 2 for end in k3.ratio.interval)
        assert (k3.differs, low < 1.05, high > 0.95) == (True, True, True)


def test_shared_prompts_are_counted_or_else_equal_responses_are(worse, a, folder, tmp_path):
    apart = against(a, read(folder / "others.parquet", presets="")).pairing
    assert worse.pairing.startswith("Paired: 22 prompts (group_id) are in both runs")
    assert "2 are only in A and 2 only in B" in worse.pairing
    assert "Independent: no prompts (group_id) are in both" in apart
    bare = [make(tmp_path / f"{x}.parquet", 0.05, x, without="group_id") for x in (1, 2)]
    one, other = (read(path, presets="") for path in bare)
    assert against(one, one).pairing.startswith("Paired: 72 responses are in both runs")
    assert "no responses are in both" in against(one, other).pairing


def test_of_more_groups_than_are_kept_it_is_said_whether_some_are_shared():
    """30,000 groups; the smallest hashes of 4,096 of them are kept."""

    def run(first, last):
        state = State.of_groups(mix(mix(np.arange(first, last, dtype=np.uint64))))
        return SimpleNamespace(state=state, facts=SimpleNamespace(columns={"group_id": "uid"}))

    shared, apart = (pairing(run(0, 30_000), run(first, 60_000), "B") for first in (29_000, 30_000))
    assert shared == "Paired: prompts (group_id) that are in both runs are resampled together."
    assert apart.startswith("Independent: no prompts (group_id) are in both")


def test_what_one_run_lacks_is_named_and_the_rest_compared(folder):
    runs = [read(folder / name, presets="token_is,pure_is") for name in ("a.parquet", "two.parquet")]
    found = against(*runs)
    assert {"drift 2: old → current", "pure_is"} <= {*found.missing}
    assert not [one for one in found.contrasts if one.name.startswith(("drift2.", "total.", "pure_is."))]
    assert named(found, "k3").differs is False
    assert named(found, "token_is.ess_tokens").p_value is not None


def test_few_prompts_and_heavy_tails_are_not_tested(folder, a):
    found, summary = against(a, read(folder / "three_prompts.parquet", presets="")), a.summary()
    assert (counts(found), "too few groups" in named(found, "k3").reason) == ((0, 0), True)
    said = answered(summary.model_copy(update={"against": [found]})).more
    assert said.startswith("Cannot say: too few groups (prompts)")

    heavy = replace(summary.whole["mean_ratio"], note="unreliable: k̂ = 0.9 is above 0.7")
    doubted = with_numbers(summary, "dump", summary.whole | {"mean_ratio": heavy})
    (found,) = of_runs([a, a], [doubted, summary])
    mean = named(found, "mean_ratio")
    assert (mean.differs, "tail" in mean.reason) == (None, True)


def run(*arguments, command="compare"):
    return CliRunner().invoke(app, [command, *map(str, arguments)])


def test_any_number_of_runs_is_compared_with_the_first_and_every_report_says_the_same(folder, worse):
    """Numbers and p-values are those of two runs; these are corrected over the tests of all runs."""
    files = [folder / f"{name}.parquet" for name in ("a", "same", "worse")]
    json, page, md, again = (folder / f"r.{end}" for end in ("json", "html", "md", "again.html"))
    to = ("--json", json, "-o", page, "--md", md)
    ran = run(*files, "--presets", "token_is,seq_mis", *to, "--device", "cpu")
    assert ran.exit_code == 0, ran.stderr
    found = loads(json.read_text(), "r.json")
    b, c = found.against
    for one in c.contrasts:
        alone = named(worse, one.name)
        for name in ("a", "b", "difference"):
            assert getattr(one, name).parts() == getattr(alone, name).parts()
        assert one.p_value == alone.p_value
    tested = [one for other in (b, c) for one in other.contrasts if one.p_value is not None]
    assert sorted(one.p_adjusted for one in tested) == sorted(holm([one.p_value for one in tested]))

    said = " ".join(ran.stdout.split())
    assert said.startswith("A is a.parquet; B is same.parquet; C is worse.parquet")
    for report in (said, page.read_text(), md.read_text()):
        assert "Worse in C" in report
        assert "{} of {} metrics differ after correction".format(*counts(c)) in report
    table = tables(found)["decisive"]
    assert table.header == ("number", "B against A", "C against A", "A", "B", "C")
    k3 = next(row for row in table.rows if row[0] == "k3")
    assert k3[1:3] == ("not told apart", f"×{format_number(named(c, 'k3').ratio)}")
    assert k3[3:] == tuple(one.whole["k3"] for one in (found, b.run, c.run))
    assert run(json, "-o", again, command="report").exit_code == 0
    assert again.read_text() == page.read_text()


def test_the_curves_of_all_runs_by_step_are_one_chart():
    names = ("stale", "collapse", "quantized")
    found = offpol_diag.compare(*(f"sample_data/{name}.parquet" for name in names), progress=False)
    chart = next(one for one in answered(found).charts if one.name == "runs_by_step")
    lines = [one for one in chart.data if one["showlegend"]]
    assert [one["name"] for one in lines] == ["A", "B", "C"]
    for result, line in zip((found, *(one.run for one in found.against)), lines, strict=True):
        assert line["y"] == [one.numbers["k3"].value for one in result.at("step")]
    assert chart.title == "Worse in B, Better in C: K3 by step"


def test_what_cannot_be_compared_is_refused(folder):
    said = {"a " * 27: "27 runs: at most 26", "a empty": "empty.parquet", "two bypass": "no pair of policies"}
    for names, problem in said.items():
        refused = run(*(folder / f"{name}.parquet" for name in names.split()))
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert problem in refused.stderr
        assert "hint: " in refused.stderr


def test_the_page_shows_what_is_printed(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    page = Path("docs/compare.md").read_text(encoding="utf-8")
    samples = ("sample_data/healthy.parquet", "sample_data/quantized.parquet")
    printed = run(*samples, "-v").stdout + run(samples[1], "--presets", "token_is,seq_mis", "-v").stdout
    shown = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL)).splitlines()

    assert len(shown) > 25
    lines = set(printed.splitlines())
    assert [line for line in shown if line not in lines and line != "…" and not line.startswith("$ ")] == []
