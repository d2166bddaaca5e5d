"""`offpol-diag doctor`, and how a diagnosis is shown everywhere."""

import numpy as np
import pytest
from factory import dump_facts, make_comparison, make_summary, recommendation
from typer.testing import CliRunner

from offpol_diag.blocks import Table, Verdict
from offpol_diag.cli import app
from offpol_diag.report.render.html import render_html
from offpol_diag.report.render.markdown import render_markdown
from offpol_diag.report.render.terminal import terminal
from offpol_diag.report.sections import sections
from offpol_diag.summary import After, Cause, Diagnosis, Example, Number, Skipped, load
from offpol_diag.writer import DumpWriter

SHIFTED = Cause(
    id="off_by_one",
    statement="The rollout column is shifted by one token.",
    statistic="the columns correlate 1.00 one token apart and 0.22 in place",
    violates="both columns are about the same sampled token",
    exact=True,
    where="engine = 3",
    tokens=1200,
    sequences=60,
    examples=[Example(sequence_id="p-1/s-<2>", position=7, rollout_log_prob=-0.5, train_log_prob=-4.25)],
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
    ruled_out=["permuted rows"],
    undecidable=["special tokens: needs the column token_ids"],
    sequences=64,
    tokens=2000,
)
HONEST = Diagnosis(verdict="honest_mismatch", headline="The two engines disagree.")


def section(summary, name="diagnosis"):
    return next(one for one in sections(summary) if one.id == name)


def verdicts(summary, name="diagnosis"):
    return [one for one in section(summary, name).blocks if isinstance(one, Verdict)]


@pytest.mark.parametrize(
    ("verdict", "headline"),
    [
        ("bug", "The rollout column is shifted."),
        ("honest_mismatch", "Numerics: two engines."),
        ("healthy", "K3 is small."),
        ("cannot_tell", "E[r] = 0.9: too few."),
    ],
)
def test_the_first_block_of_all_is_the_verdict_in_one_sentence(verdict, headline):
    first = sections(make_summary(diagnosis=Diagnosis(verdict=verdict, headline=headline)))[0].blocks[0]
    said = headline if headline.startswith(("K3", "E[r]")) else headline[0].lower() + headline[1:]
    assert (first.label, first.text) == (verdict.replace("_", " ").capitalize(), said)


def test_a_cause_comes_with_its_evidence_and_what_was_ruled_out_and_cannot_be_decided_comes_last():
    first, other = verdicts(make_summary(diagnosis=BUG))

    parts = ("Cause", "Counted", "Violates", "Where", "Examples", "To confirm", "Fix")
    assert [line.partition(":")[0] for line in first.detail[:-1]] == [*parts]
    assert first.detail[0] == "Cause: off_by_one"
    assert "Where: engine = 3; 1,200 of 2,000 tokens; 60 of 64 sequences" in first.detail
    assert "Examples: sequence p-1/s-<2>, position 7: log π_rollout -0.5, log π_train -4.25" in first.detail
    assert (other.label, other.text, other.tone) == ("Cause 2, stale", "Stale weights.", "info")
    assert other.detail == ("Evidence: K3 at lag 2 is 0.05", "Fix: sync more often")  # estimated, not counted
    assert first.detail[-1] == (
        "After the fix, with the shift undone: K3 0.0020 → 0.0004, E[r] 1.0000 → 1.001, "
        "ESS 99.5% → 99% (over 1,140 tokens)"
    )
    *_, out, open_ = section(make_summary(diagnosis=BUG)).blocks
    assert out.text == "Ruled out: permuted rows."
    assert open_.text == "Cannot be decided from this dump: special tokens: needs the column token_ids."


def test_an_approximate_repair_says_so_and_a_dump_of_two_policies_has_the_total_before():
    after = SHIFTED.after.model_copy(update={"approximate": True})
    seen = BUG.model_copy(update={"causes": [SHIFTED.model_copy(update={"after": after})]})
    metrics = {"k3": Number(unknown="no π_old"), "total.k3": Number(value=0.5, note="a few tokens decide it")}
    last = verdicts(make_summary(diagnosis=seen, metrics=metrics, by={}))[0].detail[-1]
    assert "K3 0.50 → ≈ 0.0004" in last
    assert "E[r] ≈ 1.001" in last


@pytest.mark.parametrize(("sequences", "said"), [(64, True), (5120, False)])
def test_where_only_a_part_was_looked_at_it_says_so(sequences, said):
    seen = HONEST.model_copy(update={"sequences": sequences, "tokens": 2000})
    texts = [one.text for one in section(make_summary(diagnosis=seen)).blocks]
    part = "Looked at one by one: 2,000 tokens of 64 sequences, of the 5,120 in the dump."
    assert (part in texts) is said


@pytest.mark.parametrize(("diagnosis", "before"), [(HONEST, ["Honest mismatch"]), (None, [])])
def test_skipped_rows_are_told_right_after_the_sentence(diagnosis, before):
    skipped = dump_facts(skipped=Skipped(count=10, examples=["a.parquet, row 7: NaN"]))
    *first, last = verdicts(make_summary(diagnosis=diagnosis, dump=skipped))
    assert [one.label for one in first] == before
    ids = [one.id for one in sections(make_summary(diagnosis=diagnosis))]
    assert ("diagnosis" in ids) is (diagnosis is not None)
    assert last.text.startswith("10 rows were skipped")
    assert last.detail == ("a.parquet, row 7: NaN",)


def test_page_and_pull_request_and_terminal_open_with_it():
    summary = make_summary(diagnosis=BUG, gates=[])
    page, text = render_html(summary), render_markdown(summary)
    for shown in (page, text, terminal(summary, verbose=True)):
        assert shown.index("the rollout column is shifted by one token.") < shown.index("Fix the bug first")
    assert "p-1/s-&lt;2>" in text
    assert "p-1/s-<2>" not in page


def test_while_it_is_a_bug_no_method_is_recommended_or_ranked():
    given = recommendation().model_copy(update={"numbers": {"token TIS": {"k3": Number(value=0.1)}}})
    summary = make_summary(diagnosis=BUG, recommendation=given)
    blocks = section(summary, "verdict").blocks

    assert [one.label for one in verdicts(summary, "verdict")] == ["Fix the bug first"]
    assert blocks[0].detail == ()
    assert [one.id for one in blocks if isinstance(one, Table)] == ["gates"]
    assert "1 published warning level is crossed" in terminal(summary, verbose=True)
    assert "runner-up" not in terminal(summary, verbose=True)


@pytest.mark.parametrize(("diagnosis", "better"), [(BUG, False), (HONEST, True)])
def test_presets_side_by_side_are_not_ranked_beside_a_bug(diagnosis, better):
    summary = make_summary(diagnosis=diagnosis, comparison=make_comparison())
    blocks = section(summary, "comparison").blocks
    (table,) = (one for one in blocks if getattr(one, "id", "") == "comparison")
    assert (table.header[-1] == "better") is better
    assert any("fix the bug first" in note for note in table.notes) is not better
    assert {len(row) for row in table.rows} == {len(table.header)}


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
        with DumpWriter(folder / f"{name}.parquet") as writer:
            writer.write(
                rollout_log_probs=rollout, old_log_probs=column, group_id=np.arange(96) // 4, engine=1
            )
    return folder


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_line_is_the_verdict_and_nothing_is_written(dumps, empty_folder):
    ran = run("doctor", dumps / "broken.parquet", "-q")

    assert ran.exit_code == 0
    assert ran.stdout.splitlines() == [
        "BUG: a log-prob column holds positive values, which no log-probability can be."
    ]
    assert run("analyze", dumps / "broken.parquet", "-q", "--no-html", "--presets", "token_is").exit_code == 0
    assert run("doctor", dumps / "broken.parquet", "-qv").stdout.count("\nDiagnosis\n✗ Bug: ") == 1
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(("name", "code"), [("broken", 1), ("honest", 0)])
@pytest.mark.parametrize(
    "command", ["doctor --strict", "analyze --strict --no-html --presets token_is", "gate --fail-on bug"]
)
def test_strict_fails_on_a_bug_and_on_nothing_else(dumps, command, name, code):
    command, *options = command.split()
    assert run(command, dumps / f"{name}.parquet", "-q", *options).exit_code == code


def test_a_comparison_comes_after_the_diagnosis_of_each_run_or_of_the_dump(dumps):
    two = run("compare", dumps / "honest.parquet", dumps / "broken.parquet", "-qv").stdout
    one = run("compare", dumps / "broken.parquet", "--presets", "token_is,seq_mis", "-qv").stdout
    assert two.index(" A: ") < two.index("✗ B: Bug: ") < two.index("Run A against run B")
    assert one.index("✗ Bug: ") < one.index("Presets side by side")


def test_every_form_is_written_where_asked_also_when_it_fails_and_holds_the_diagnosis(dumps, empty_folder):
    forms = ("--html", "d.html", "--md", "d.md", "--json", "d.json")
    ran = run("doctor", dumps / "broken.parquet", "--strict", "--group-by", "engine", *forms)

    assert ran.exit_code == 1
    assert sorted(one.name for one in empty_folder.iterdir()) == ["d.html", "d.json", "d.md"]
    assert "**Bug**" in (empty_folder / "d.md").read_text()
    found = load(empty_folder / "d.json")
    assert (found.run.command, found.diagnosis.verdict) == ("doctor", "bug")
    assert (found.presets, found.recommendation, "engine" in found.by) == ({}, None, True)
    for refused in (("nowhere.parquet", "--strict"), (dumps / "honest.parquet", "--html", "no/such/d.html")):
        assert run("doctor", *refused).exit_code == 2
