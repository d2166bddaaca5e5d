"""The terminal: the answer in 36 lines, tables at any width, and what never reaches the terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import product
from pathlib import Path

import faults
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from drawn import markdown, terminal
from rich.cells import cell_len
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.number import Number
from offpol_diag.numerals import doubted
from offpol_diag.report import answered
from offpol_diag.report.analyze import is_flat
from offpol_diag.report.answer import Fact, sparkline
from offpol_diag.report.charts import charts
from offpol_diag.report.terminal import LINES, PIPE_WIDTH, make_console
from offpol_diag.report.terminal import tables as draw
from offpol_diag.report.words import grows
from offpol_diag.result import CandidateCause, load
from offpol_diag.table import Table
from tests.factory import dump_facts, make_summary

SAMPLES = Path(__file__).parents[1] / "sample_data"
BUGS = ("shift", "raw")
PARTS = ("onestep", "onedrift", "tiny")
DUMPS = ("collapse", "healthy", "stale", "quantized", *PARTS, *BUGS)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return results of the samples, of dumps with a fault, and of parts of a dump."""
    folder = tmp_path_factory.mktemp("dumps")
    whole = pq.read_table(SAMPLES / "collapse.parquet")
    pq.write_table(whole.filter(pc.equal(whole["step"], 5)), folder / "onestep.parquet")
    pq.write_table(whole.drop_columns(["old_log_probs"]), folder / "onedrift.parquet")
    pq.write_table(whole.slice(0, 3), folder / "tiny.parquet")
    for name in BUGS:
        faults.dump(str(folder / f"{name}.parquet"), name)
    found = {}
    for name in DUMPS:
        dump = folder / f"{name}.parquet"
        dump = dump if dump.exists() else SAMPLES / f"{name}.parquet"
        made = folder / f"{name}.json"
        presets = "token_is,seq_is,seq_mis,geo_rs" if name in ("collapse", "stale") else "token_is"
        call = ["analyze", str(dump), "--presets", presets, "--no-html", "--json", str(made)]
        ran = CliRunner().invoke(app, call)
        assert ran.exit_code == 0, ran.output
        found[name] = load(made)
    return found


@pytest.fixture
def at(monkeypatch):
    """Return a function that draws a result in a terminal of some width."""

    def drawn(summary, width=80, **how):
        monkeypatch.setenv("COLUMNS", str(width))
        return terminal(summary, **how)

    return drawn


def text_of(summary):
    return " ".join(terminal(summary).split())


def fact(summary, label):
    return {one.label: one for one in answered(summary).facts}.get(label, Fact(label, ""))


# ---------------------------------------------------------------- the answer


@pytest.mark.parametrize("name", DUMPS)
def test_the_answer_has_few_lines_and_none_wider_than_the_terminal(results, at, name):
    for width, verbose in product((40, 60, 80, 120), (False, True)):
        lines = at(results[name], width, verbose=verbose).splitlines()
        assert [x for x in lines if cell_len(x) > width and "offpol-diag " not in x] == []  # to be copied
        most = (120 if width == 120 else 400) if verbose else (LINES if width >= 80 else 80)
        assert len(lines) <= most
        assert not {"nan", "None", "null"} & set(" ".join(lines).split())
    assert LINES == 36
    assert at(results[name], quiet=True) == f"{answered(results[name]).headline}\n"


SAID = {  # of the samples, `tests/frozen/texts` has all
    "onestep": ("TOO LITTLE DATA for a verdict", "(severe)"),
    "onedrift": ("(rollout → current)", "--max total.k3=0.015"),
    "tiny": ("TOO LITTLE DATA for a verdict", "3 sequences, 489 tokens, 1 prompt"),
    "raw": ("BUG: the rollout column does not hold", "To confirm", "log processed log-probs (vLLM"),
}


@pytest.mark.parametrize("name", SAID)
def test_the_answer_says(results, at, name):
    drawn = " ".join(at(results[name]).split())
    assert [words for words in SAID[name] if words not in drawn] == []


def test_with_v_a_fact_gives_the_evidence_that_its_sentence_does_not(results, at):
    drawn = " ".join(at(results["collapse"], 120, verbose=True).split())
    for once in ("At a constant lag of 2", "A correction alone does", "every correction lasted"):
        assert drawn.count(once) == 1
    for words in (
        "✓ K1 is not negative. It is 0.28 [0.21, 0.35] nats.",
        "? E[r] = 1 cannot be tested. The tail of r is too heavy",
        "To confirm: K3 by policy_lag falls",
        "As a rule: weight min(r_t, 2)",
        "Not known: how far the gradient is off",
        "• K3 passes 0.1 at step 4",
    ):
        assert words in drawn, words


def test_beside_a_bug_no_correction_is_shown(results):
    for name in BUGS:
        assert terminal(results[name]).splitlines()[2].startswith("BUG: ")
        for words in ("with a weight", "recommended", "seq_mis", "TIS"):
            assert words not in text_of(results[name])


BANDED = ("good", "fair", "low", "typical", "elevated")


@pytest.mark.parametrize("name", ["collapse", "stale", "healthy"])
def test_a_heavy_tail_is_told_once_and_leaves_its_numbers_without_a_band(results, at, name):
    found = answered(results[name])
    starred = [tile for tile in found.tiles if doubted(tile.number)]
    assert [(tile.key, tile.band, tile.tone) for tile in starred if tile.band or tile.tone] == []
    assert {"ess_tokens", "chi2_token"} <= {tile.key for tile in starred} or name == "healthy"
    assert all(tile.band for tile in found.tiles if tile.key == "k3")
    assert text_of(results[name]).count("Heavy tail") == (name != "healthy")
    assert not any("*" in one.text for one in found.facts)
    for one in (at(results[name], 160, verbose=True), markdown(results[name])):
        rows = [
            line for line in one.splitlines() if line.lstrip("| ").startswith(("ESS, tokens", "χ², tokens"))
        ]
        assert [line for line in rows if ("*" in line) == any(b in line for b in BANDED)] == []


def test_a_tail_is_named_by_the_limit_of_its_own_weights(results):
    summary = results["stale"]

    def title(tokens, sequences):
        given = {"tokens": (tokens, 0.7), "sequences": (sequences, 0.64)}
        some = {
            over: summary.charts.tails[over].model_copy(update={"khat": Number(value=k), "limit": limit})
            for over, (k, limit) in given.items()
        }
        changed = summary.model_copy(update={"charts": summary.charts.model_copy(update={"tails": some})})
        return next(one.title for one in charts(changed) if one.name == "tail").partition("k̂ of ")[2]

    light, heavy = "(light enough: below", "(too heavy: above"
    assert title(0.69, 0.66) == f"0.69 for tokens {light} 0.7) and of 0.66 for sequences {heavy} 0.64)"
    assert title(0.75, 0.5) == f"0.75 for tokens {heavy} 0.7) and of 0.50 for sequences {light} 0.64)"


def with_series(summary, **series):
    """Return a result with other numbers by step; a bare value keeps its interval."""
    steps = summary.charts.steps
    changed = {
        name: [
            x if isinstance(x, Number) else replace(one, value=x)
            for one, x in zip(steps.series[name], given, strict=True)
        ]
        for name, given in series.items()
    }
    found = steps.model_copy(update={"series": steps.series | changed})
    return summary.model_copy(update={"charts": summary.charts.model_copy(update={"steps": found})})


def test_growth_is_no_collapse_while_the_reward_rises_and_is_told_by_steps_that_grow(results):
    def grown(**series):
        return grows(with_series(results["collapse"], **series))

    k3 = [one.value for one in results["collapse"].charts.steps.series["k3"]]
    rises = "from the first third of the steps to the last, the median K3 rises from 0.0084 to"
    assert grown() == f"It collapses: {rises} 0.52 and the mean reward falls from 0.55 to 0.10."
    zero = [Number(2 / 64, (0.0, 0.08))] * 3 + [Number(0.0, (0.0, 0.0))] * 6
    assert grown(reward=zero).startswith("It grows: "), "2 of 64 right answers and then none is within chance"
    assert grown(reward=[0.1] * 8 + [0.9]) == f"It grows: {rises} 0.52."
    assert grown(reward=[-1.0] * 8 + [-0.6]) == grown(reward=[0.1] * 9)
    assert grown(k3=[*k3[:-1], 1e-4], reward=[0.1] * 9) == f"It grows: {rises} 0.34."


GREW = [0.001, 0.001, 0.001, 0.02, 0.01, 0.02, 0.03, 0.5, 0.6]


@pytest.mark.parametrize(
    ("values", "low", "step", "perhaps"),
    [
        (GREW, [0.0] * 6 + [0.02, 0.4, 0.5], "6", "5"),  # what falls again is no beginning
        (GREW, [0.0] * 5 + [0.016, 0.02, 0.4, 0.5], "5", ""),
        (GREW, [], "5", ""),  # without intervals
        (GREW, [0.0] * 9, "", ""),  # nothing is certain
        ([0.0001] * 6 + [0.01] * 3, [0.0001] * 6 + [0.009] * 3, "", ""),  # it grows, below the gate
        ([0.3] * 9, [0.2] * 9, "", ""),  # high throughout: nothing grows
        ([0.02 * 2**i for i in range(9)], [0.016 * 2**i for i in range(9)], "", ""),  # no step of it is good
    ],
)
def test_a_run_whose_k3_grows_is_resumed_before_the_step_that_stays_above_the_gate(
    results, values, low, step, perhaps
):
    ends = [(end, 1.0) for end in low] or [None] * len(values)
    found = with_series(results["collapse"], k3=list(map(Number, values, ends)))
    todo = fact(found, "What to do")
    why = f"From step {step} on K3 is above 0.015{f' (perhaps from step {perhaps})' if perhaps else ''}."
    assert todo.sentence.startswith(why) is bool(step)
    assert (todo.title == f"Resume from before step {step}; then use token TIS at 2.0") is bool(step)
    assert ("Resume" in todo.text) is bool(step)


def test_smaller_updates_are_asked_for_where_k3_grows_at_one_lag_and_nowhere_else(results):
    summary = results["collapse"]
    lag = summary.charts.lag.model_copy(update={"growth": None})
    other = summary.model_copy(update={"charts": summary.charts.model_copy(update={"lag": lag})})

    assert "Make updates smaller: a lower learning rate" in text_of(summary)
    assert "Resume from before step 4" in text_of(other)
    assert "smaller" not in text_of(other)
    assert "At the source: fewer steps between weight syncs." in text_of(other)


def test_beside_a_bug_and_open_causes_a_run_is_resumed_only_where_that_helps(results):
    summary = results["collapse"]
    fits = CandidateCause(id="stale", kind="honest", statement="Old weights.")
    open_ = {"causes": [], "candidates": [fits]}
    hopeless = summary.recommendation.model_copy(update={"title": None, "decision": "no method helps"})
    bug = make_summary().diagnosis.causes[0].model_copy(update={"kind": "bug"})

    def todo(verdict, recommendation=summary.recommendation, **more):
        given = summary.diagnosis.model_copy(update={"verdict": verdict, **more})
        changed = {"diagnosis": given, "recommendation": recommendation}
        return fact(summary.model_copy(update=changed), "What to do").title

    assert "Resume" not in todo("bug", causes=[bug])
    assert "Resume from before step 4" in todo("honest_mismatch", hopeless)
    assert todo("cannot_tell", hopeless, **open_).startswith("Measure first; resume from before step 4")
    assert todo("cannot_tell", **open_).startswith("Measure first; resume from before step 4")


def test_cautions_stand_before_the_verdict_and_are_cut_where_they_are_many(at):
    notes = [f"note {i}: {'word ' * 60}" for i in range(30)]
    summary = make_summary(gates=[], dump=dump_facts(notes=notes, skipped=3, skipped_examples=["a.p, 7"]))
    drawn = at(summary).splitlines()
    assert "! 3 rows skipped as bad; no number here covers them. The first: a.p, 7." in drawn[:5]
    assert "! 29 more: -v" in drawn
    assert len(drawn) <= LINES
    assert all(f"! note {i}: " in at(summary, verbose=True) for i in range(30))


def test_a_curve_shows_its_shape():
    assert sparkline((0.0, 1.0, 2.0, None, 7.0)) == "▁▂▃ █"
    assert sparkline((3.0, 3.0)) == "▁▁"
    assert {sparkline(x) for x in ((), (1.0,), (None, None))} == {""}


@pytest.mark.parametrize(
    ("values", "halves", "flat"),
    [
        ([1.0, 1.05, 0.95, 1.1], [0.1] * 4, True),
        ([1.0, 1.0, 3.0, 1.0], [0.1] * 4, False),  # the ends are alike, and the middle is not
        ([1.0, 2.0], [0.6, 0.6], True),
        ([1.0, 2.0], [0.6, None], False),  # nothing is known of a step without an interval
    ],
)
def test_a_curve_is_flat_where_one_value_lies_within_every_interval(values, halves, flat):
    ends = [None if half is None else (x - half, x + half) for x, half in zip(values, halves, strict=True)]
    points = [Number(x, end) for x, end in zip(values, ends, strict=True)]
    assert is_flat(points) is flat


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize(("columns", "width"), [(6, 300), (6, 90), (6, 60), (2, 27), (12, 80)])
def test_columns_that_do_not_fit_stand_below_and_no_number_loses_its_interval(columns, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    header = ("preset", *(f"number_{i}" for i in range(columns)))
    rows = [(f"row {i}", *[Number(value=0.5, interval=(0.4, 0.6))] * columns) for i in range(3)]
    drawn = draw([Table("t", "A caption", header, rows)])
    body = " ".join(drawn.split())
    assert max(map(cell_len, drawn.splitlines())) <= width
    assert body.count("0.50 [0.40, 0.60]") == 3 * columns
    assert all(f"number_{i} " in f"{body} " for i in range(columns))


def test_a_caution_is_a_numbered_note_below(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    cells = (Number(value=1.0, note="unreliable: a"), Number(value=1.0, note="b"), Number(unknown="no c"))
    drawn = draw([Table("t", "A caption", ("preset", "x", "y", "z"), (("row", *cells),))])
    assert "1* (1)  1 (2)  unknown (3)" in drawn
    assert drawn.endswith("(1) a (2) b (3) cannot be known: no c\n")


# ---------------------------------------------------------------- pipes


def test_a_pipe_is_120_wide_unless_the_environment_sets_the_width(results, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert make_console().width == PIPE_WIDTH == 120
    for name, verbose in product(("collapse", "shift"), (False, True)):
        drawn = terminal(results[name], verbose)
        assert max(map(cell_len, drawn.splitlines())) <= 120
        assert "\x1b" not in drawn
    monkeypatch.setenv("COLUMNS", "70")
    assert make_console().width == 70
