"""`offpol-diag doctor`, and how a diagnosis is shown everywhere."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from drawn import markdown, terminal
from factory import make_summary, recommendation
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.report import answered
from offpol_diag.result import After, Cause, Diagnosis, load

SHIFTED = Cause(
    id="off_by_one",
    statement="The rollout column is shifted by one token.",
    statistic="the columns correlate 1.00 one token apart and 0.22 in place",
    exact=True,
    where="engine = 3",
    tokens=1200,
    sequences=60,
    examples=[("p-1/s-<2>", 7, -0.5, -4.25)],
    confirm="shift one column and look whether K3 falls",
    fix="slice rollout_log_probs[:, 1:]",
    after=After(what="with the shift undone", k3=4e-4, mean_ratio=1.001, ess_tokens=0.99, tokens=1140),
)
STALE = Cause(
    id="stale",
    kind="honest",
    statement="Stale weights.",
    statistic="K3 at lag 2 is 0.05",
    fix="sync more often",
)
BUG = Diagnosis(
    verdict="bug",
    headline=SHIFTED.statement,
    causes=[SHIFTED, STALE],
    undecidable=["special tokens: needs the column token_ids"],
    sequences=64,
    tokens=2000,
)
HONEST = Diagnosis(verdict="honest_mismatch", headline="The two engines disagree.")


def facts(**changes):
    return {one.label: one for one in answered(make_summary(gates=[], **changes)).facts}


def texts(fact):
    return list(map(str, fact.lines))


@pytest.mark.parametrize(
    ("verdict", "headline", "said"),
    [
        ("bug", "The rollout column is shifted.", "BUG: the rollout column is shifted"),
        ("honest_mismatch", "Numerics: two engines.", "ELEVATED off-policy mismatch: K3 KL is 0.0020 nats"),
        ("healthy", "K3 is small.", "ELEVATED off-policy mismatch: K3 KL is 0.0020 nats per token"),
        ("cannot_tell", "E[r] = 0.9: too few.", "CANNOT TELL a bug from a mismatch: K3 KL is 0.0020 nats"),
    ],
)
def test_the_verdict_is_one_sentence(verdict, headline, said):
    given = Diagnosis(verdict=verdict, headline=headline)
    found = answered(make_summary(diagnosis=given, recommendation=None, gates=[]))
    assert found.headline.startswith(said)
    assert (found.tone == "bad") is (verdict == "bug")


def test_a_bug_comes_with_its_evidence_and_with_what_cannot_be_decided():
    found = facts(diagnosis=BUG)
    checked, todo = texts(found["Bug?"]), found["What to do"]
    assert found["Bug?"].text.startswith("A bug (off_by_one). Counted: ")
    assert found["Where"].title == "engine = 3; 1,200 of 2,000 tokens; 60 of 64 sequences"
    assert found["To confirm"].sentence
    assert "Examples: sequence p-1/s-<2>, position 7: log π_rollout -0.5, log π_train -4.25" in checked
    assert "✓ Looked for faults in 64 of the 5,120 sequences" in checked
    assert "? Not testable on this dump: special tokens: needs the column token_ids" in checked
    assert checked[2] == "✗ Stale weights. K3 at lag 2 is 0.05."
    assert "After it, K3 is 0.00040 nats, E[r] 1.001 and ESS 99%." in todo.sentence
    assert "Until then, leave out the sequences with engine = 3." in todo.sentence
    drawn = terminal(make_summary(diagnosis=BUG, gates=[]), verbose=True)
    for shown in (" ".join(drawn.split()), markdown(make_summary(diagnosis=BUG, gates=[]))):
        for said in ("1,200 of 2,000 tokens; 60 of 64 sequences", "position 7"):
            assert said in shown


def test_while_it_is_a_bug_no_method_is_recommended():
    given = recommendation()
    summary = make_summary(diagnosis=BUG, recommendation=given, gates=[])
    found = answered(summary)
    assert facts(diagnosis=BUG, recommendation=given)["What to do"].title.startswith("Fix the bug first")
    assert "corrections" not in {table.id for table in found.tables if table.rows}
    drawn = terminal(summary, verbose=True)
    assert "offpol-diag presets" not in drawn


def run(*args):
    return CliRunner().invoke(app, [str(one) for one in args])


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """Write an honest dump, and one whose trainer logs positive values."""
    folder = tmp_path_factory.mktemp("doctor")
    draw = np.random.default_rng(0)
    lengths = draw.integers(5, 60, 96)
    rollout = [-draw.exponential(0.5, n) - 0.2 for n in lengths]
    old = [np.minimum(one + draw.normal(0, 0.03, len(one)), 0) for one in rollout]
    broken = [np.where(np.arange(len(one)) % 7 == 0, 0.5, one) for one in old]
    for name, column in (("honest", old), ("broken", broken)):
        columns = {"rollout_log_probs": rollout, "old_log_probs": column}
        columns |= {"group_id": np.arange(96) // 4, "engine": [1] * 96}
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    return folder


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_line_is_the_verdict_and_nothing_is_written(dumps, empty_folder):
    ran = run("doctor", dumps / "broken.parquet", "-q")

    assert ran.exit_code == 0
    assert ran.stdout.splitlines() == [
        "BUG: a log-prob column holds positive values; a log-probability is never positive"
    ]
    assert run("analyze", dumps / "broken.parquet", "-q", "--no-html", "--presets", "token_is").exit_code == 0
    assert run("doctor", dumps / "broken.parquet", "-qv").stdout.count("\nBUG: ") == 1
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(("name", "code"), [("broken", 1), ("honest", 0)])
@pytest.mark.parametrize(
    "command", ["doctor --strict", "analyze --strict --no-html --presets token_is", "gate --fail-on bug"]
)
def test_strict_fails_on_a_bug_and_on_nothing_else(dumps, command, name, code):
    command, *options = command.split()
    assert run(command, dumps / f"{name}.parquet", "-q", *options).exit_code == code


def test_a_comparison_gives_the_diagnosis_of_each_run_or_of_the_dump(dumps):
    two = run("compare", dumps / "honest.parquet", dumps / "broken.parquet", "-qv").stdout
    one = run("compare", dumps / "broken.parquet", "--presets", "token_is,seq_mis", "-qv").stdout
    assert "B: A log-prob column holds positive values" in two
    assert "\nBug: " in one


def test_every_form_is_written_where_asked_also_when_it_fails_and_holds_the_diagnosis(dumps, empty_folder):
    forms = ("--html", "d.html", "--md", "d.md", "--json", "d.json")
    ran = run("doctor", dumps / "broken.parquet", "--strict", "--group-by", "engine", *forms)

    assert ran.exit_code == 1
    assert sorted(one.name for one in empty_folder.iterdir()) == ["d.html", "d.json", "d.md"]
    assert "**BUG: " in (empty_folder / "d.md").read_text()
    assert "<h1" in (empty_folder / "d.html").read_text()
    found = load(empty_folder / "d.json")
    assert (found.run.command, found.diagnosis.verdict) == ("doctor", "bug")
    assert (found.presets, found.recommendation, "engine" in found.axes) == ({}, None, True)
    for refused in (("nowhere.parquet", "--strict"), (dumps / "honest.parquet", "--html", "no/such/d.html")):
        assert run("doctor", *refused).exit_code == 2
