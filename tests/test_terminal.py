"""The terminal: the answer in forty lines, tables at any width, and what never reaches the terminal."""

from __future__ import annotations

import io
import json
from itertools import product
from pathlib import Path

import faults
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from offpol_diag.blocks import Figure, Section, Series, Table, Text, Verdict
from offpol_diag.report.render.brief import LINES, _bar, answer_lines, plain, sparkline
from offpol_diag.report.render.markdown import render_markdown
from offpol_diag.report.render.svg import panel_svg
from offpol_diag.report.render.terminal import PIPE_WIDTH, make_console, render_terminal, terminal
from offpol_diag.report.sections import sections
from offpol_diag.report.sections.answer import answer, growth
from offpol_diag.report.sections.charts import pictures
from offpol_diag.report.sections.comparison import comparison
from offpol_diag.report.sections.numbers import is_flat
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

from offpol_diag.cli import app
from offpol_diag.numerals import doubted, written
from offpol_diag.report.picture import Layer, Panel
from offpol_diag.summary import BySteps, CandidateCause, Charts, Diagnosis, Estimate, Number, load
from offpol_diag.summary import Series as Curve
from tests.factory import dump_facts, make_comparison, make_summary

SAMPLES = Path(__file__).parents[1] / "sample_data"
BUGS = ("shift", "raw")
PARTS = ("onestep", "onedrift", "tiny")
DUMPS = ("collapse", "healthy", "stale", *PARTS, *BUGS)


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
        call = ["analyze", str(dump), "--presets", "token_is", "--no-html", "--json", str(made)]
        ran = CliRunner().invoke(app, call)
        assert ran.exit_code == 0, ran.output
        found[name] = load(made)
    return found


def lines(summary, width=80, encoding="utf-8"):
    return [text for text, _ in answer_lines(answer(summary), width, encoding)]


def said(summary):
    return " ".join(" ".join(lines(summary)).split())


# ---------------------------------------------------------------- the answer


def test_the_answer_takes_forty_lines_at_most_and_no_more_than_the_width(results):
    for one in results.values():
        for width in (40, 60, 80, 120):
            drawn = [line for line in lines(one, width) if "offpol-diag " not in line]  # to be copied
            assert max(map(cell_len, drawn)) <= width
        assert len(lines(one)) + 2 <= LINES == 40  # two lines say where the files are
        assert not any(word in said(one).split() for word in ("nan", "None", "null"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("collapse", ["SEVERE off-policy mismatch: K3 KL is 0.26 nats per token [0.19, 0.34]"]),
        ("collapse", ["It collapses: K3 rises from 0.00072 (step 0) to 0.73 (step 8)", "86% → 1.6%"]),
        (
            "collapse",
            ["the mean reward falls from 0.52 to 0", "0.48 → 0.89", "Mean reward", "tokens with a weight"],
        ),
        ("collapse", ["No sign of one.", "in sync (lag 0) K3 is 0.00072", "E[r] = 1 cannot be tested"]),
        (
            "collapse",
            [
                "Resume from before step 4: from there K3 is above 0.015 (perhaps from step 3). Make updates",
                "Then token TIS at 2.0 (ESS 93%, 0.62% truncated): alone it does not save the run.",
            ],
        ),
        ("collapse", ["* Heavy tail: ESS, χ² and E[r] cannot be estimated (k̂ 0.97 and 0.81); K3 can."]),
        (
            "collapse",
            ["Without a correction the estimated error is 3.0% [1.6%, 4.4%] lower; token TIS at 2.0"],
        ),
        (
            "collapse",
            ["at a constant lag of 2, K3 rises from 0.014", "advised all the same, because a dump of"],
        ),
        ("collapse", ["--max k3=0.015", "recommended", "presets token_is --for"]),
        ("healthy", ["TYPICAL off-policy mismatch", "No correction is needed.", "--max k3=0.001"]),
        ("stale", ["ELEVATED off-policy mismatch", "At the source: fewer steps between weight syncs"]),
        (
            "stale",
            ["The default: no alternative has a measurably lower estimated error. A toss-up with token"],
        ),
        ("stale", ["* Heavy tail: ESS, χ² and E[r] cannot be estimated (k̂ 0.75); K3 can."]),
        (
            "stale",
            ["token IcePop 0.5–5.0 ███████████████· 99.3% 98.7% runner-up", "████ 100% 99.2% recommended"],
        ),
        ("onestep", ["TOO LITTLE DATA for a verdict", "(severe)"]),
        ("onedrift", ["(rollout → current)", "--max total.k3=0.015"]),
        ("tiny", ["TOO LITTLE DATA for a verdict", "3 sequences, 489 tokens, 1 prompt"]),
        ("shift", ["BUG: the rollout column is shifted by one token", "0.0039 after the fix"]),
        ("raw", ["BUG: the rollout column does not hold", "To confirm", "log processed log-probs in the"]),
    ],
)
def test_the_answer_says(results, name, words):
    assert all(word.lower() in said(results[name]).lower() for word in words), said(results[name])


def test_published_levels_are_warned_of_where_there_is_room(results):
    assert "9 published levels" in " ".join(lines(results["collapse"], 100))


def test_beside_a_bug_no_correction_is_shown_and_a_collapse_is_dated_by_the_worst_band_of_k3(results):
    for name in BUGS:
        assert lines(results[name])[2].startswith("BUG: ")
        assert "with a weight" not in said(results[name])
        assert "recommended" not in said(results[name])
    titles = [picture.title for picture in pictures(results["collapse"])]
    assert "K3 passes 0.1 at step 4; from step 3 to 8 the mean reward falls from 0.69 to 0" in titles


def test_a_heavy_tail_is_told_once_and_leaves_its_numbers_without_a_band_and_no_gain(results, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("collapse", "stale", "healthy"):
        found, drawn = answer(results[name]), said(results[name])
        starred = [tile for tile in found.tiles if doubted(tile.number)]
        assert [(tile.key, tile.band, tile.tone) for tile in starred if tile.band or tile.tone] == []
        assert {"ess_tokens", "chi2_token"} <= {tile.key for tile in starred} or name == "healthy"
        assert all(tile.band for tile in found.tiles if tile.key == "k3")
        assert drawn.count("Heavy tail") == (name != "healthy")
        assert drawn.count("k̂") == (1 if name == "healthy" else 2)  # the row itself, and the sentence
        assert not any("*" in text for _, text in found.facts)
        for one in (terminal(results[name], verbose=True), render_markdown(results[name])):
            rows = [line for line in one.splitlines() if "ESS, tokens" in line or "χ², tokens" in line]
            assert [line for line in rows if ("*" in line) == any(b in line for b in BANDED)] == []


BANDED = ("good", "fair", "low", "typical", "elevated")


def test_a_bar_is_full_or_empty_only_where_the_share_is(results):
    for one in results["stale"].presets.values():
        share = one.metrics["tokens_weighted"].value
        assert (share, _bar(share)) == (1.0, "█" * 16)
    assert [_bar(x).count("█") for x in (0.0, 1e-6, 0.5, 0.9966, 1 - 1e-9, 1.0)] == [0, 1, 8, 15, 15, 16]


def test_what_was_masked_is_told_by_the_tokens_with_a_weight_and_not_as_truncated(results):
    summary = results["collapse"]
    given = summary.recommendation
    ice = given.model_copy(update={"title": given.runner_up, "runner_up": None})
    facts = dict(answer(summary.model_copy(update={"recommendation": ice})).facts)
    assert (
        "Then token IcePop 0.5–5.0 (ESS 91%, 93% of the tokens with a weight): alone" in facts["What to do"]
    )
    assert "truncated" not in facts["What to do"]


OPENINGS = ("Sequence rules", "Token rules", "Nearly all", "nearly all", "flat", "even", "highest", "alike")


def test_titles_of_charts_give_their_numbers_and_no_opening_chosen_by_another(results):
    titles = {
        name: [one.title for one in pictures(results[name])] for name in ("stale", "collapse", "healthy")
    }
    for some in titles.values():
        assert [title for title in some if any(word in title.split() for word in OPENINGS)] == []
    assert "±0.1% on the geometric mean keeps 22% of tokens, [0.5, 2] on the product 56%" in titles["stale"]
    assert (
        "A cap on r from 1.5 to 5 truncates at most 0.28% of tokens and keeps ESS at 98% or more"
        in titles["stale"]
    )
    assert "No token differs by more than a factor of 2" in titles["healthy"]
    assert (
        "7.2% of tokens differ by more than a factor of 2: 6.6% are less likely under the trainer, 0.62% more"
        in titles["collapse"]
    )


def charted(summary, name, **changes):
    """Return the title of a chart, with parts of the result's charts replaced."""
    changed = summary.model_copy(update={"charts": summary.charts.model_copy(update=changes)})
    return next(one.title for one in pictures(changed) if one.id == name)


def test_a_tail_is_named_by_the_limit_of_its_own_weights(results):
    tails = results["stale"].charts.tails

    def title(tokens, sequences):
        given = {"tokens": (tokens, 0.7), "sequences": (sequences, 0.64)}
        some = {
            over: tails[over].model_copy(update={"khat": Estimate(value=k), "limit": limit})
            for over, (k, limit) in given.items()
        }
        return charted(results["stale"], "tail", tails=some).partition(" for ")[0]

    assert title(0.69, 0.66) == "The tail of the weights of sequences is too heavy"
    assert title(0.75, 0.5) == "The tail of the weights of tokens is too heavy"
    assert title(0.6, 0.6) == "The tail of the weights is light enough"


def test_growth_is_no_collapse_while_the_reward_rises_and_is_told_by_steps_that_grow(results):
    summary = results["collapse"]
    steps = summary.charts.steps

    def grown(**series):
        changed = {name: steps.series[name].model_copy(update={"values": x}) for name, x in series.items()}
        found = steps.model_copy(update={"series": steps.series | changed})
        return growth(
            summary.model_copy(update={"charts": summary.charts.model_copy(update={"steps": found})})
        )

    k3 = steps.series["k3"].values
    assert grown().startswith("It collapses: K3 rises from 0.00072 (step 0) to 0.73 (step 8), while the mean")
    assert grown(reward=[0.1] * 8 + [0.9]) == "It grows: K3 rises from 0.00072 (step 0) to 0.73 (step 8)."
    assert grown(reward=[-1.0] * 8 + [-0.6]) == grown(reward=[0.1] * 9)
    assert grown(k3=[*k3[:-1], 1e-4], reward=[0.1] * 9).endswith("0.0084 (first third) to 0.34 (last third).")


def with_steps(summary, **series):
    """Return a summary with other values of K3 by step and their lower ends."""
    steps = summary.charts.steps
    k3 = steps.series["k3"].model_copy(update=series)
    found = steps.model_copy(update={"series": steps.series | {"k3": k3}})
    return summary.model_copy(update={"charts": summary.charts.model_copy(update={"steps": found})})


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
    found = answer(with_steps(results["collapse"], values=values, low=low, high=[1.0] * len(low)))
    said = dict(found.facts)["What to do"]

    first = f"Resume from before step {step}: from there K3 is above 0.015"
    assert said.startswith(f"{first} (perhaps from step {perhaps})." if perhaps else first) is bool(step)
    assert (f"Resume from before step {step}, then use token TIS at 2.0" == found.action) is bool(step)
    assert ("A correction alone does not save the run" in found.why) is bool(step)
    assert ("Resume" in said) is bool(step)


def test_smaller_updates_are_asked_for_where_k3_grows_at_one_lag_and_nowhere_else(results):
    summary = results["collapse"]
    lag = summary.charts.lag.model_copy(update={"growth": None})
    other = summary.model_copy(update={"charts": summary.charts.model_copy(update={"lag": lag})})

    assert "Make updates smaller: a lower learning rate" in said(summary)
    assert "Resume from before step 4" in said(other)
    assert "smaller" not in said(other)
    assert "At the source: fewer steps between weight syncs." in said(other)


def test_beside_a_bug_and_open_causes_a_run_is_resumed_only_where_that_helps(results):
    summary = results["collapse"]

    def of(verdict, **more):
        given = summary.diagnosis.model_copy(update={"verdict": verdict, **more})
        return dict(answer(summary.model_copy(update={"diagnosis": given})).facts)["What to do"]

    bug = make_summary().diagnosis.causes[0].model_copy(update={"kind": "bug"})
    open_ = [CandidateCause(id="stale", statement="Old weights.")]
    assert "Resume" not in of("bug", causes=[bug])
    hopeless = summary.recommendation.model_copy(update={"title": None, "decision": "no method helps"})
    for verdict, more in (("honest_mismatch", {}), ("cannot_tell", {"causes": [], "candidates": open_})):
        given = summary.diagnosis.model_copy(update={"verdict": verdict, **more})
        found = summary.model_copy(update={"diagnosis": given, "recommendation": hopeless})
        assert "Resume from before step 4" in dict(answer(found).facts)["What to do"]
    assert of("cannot_tell", causes=[], candidates=open_).startswith(
        "Measure first. Resume from before step 4"
    )


def test_quiet_is_one_line_and_verbose_the_tables(results):
    assert {terminal(summary, quiet=True).count("\n") for summary in results.values()} == {1}
    assert "Headline numbers" in terminal(results["collapse"], verbose=True, quiet=True)


def test_cautions_stand_before_the_verdict_and_are_cut_where_they_are_many():
    notes = [f"note {i}: {'word ' * 60}" for i in range(30)]
    drawn = lines(make_summary(dump=dump_facts(notes=notes, skipped={"count": 3, "examples": []})))
    assert "! 3 rows were skipped as bad; no number here covers them." in drawn[:3]
    assert len(drawn) + 2 <= LINES


@pytest.mark.parametrize("verdict", ["healthy", "honest_mismatch", "bug", "cannot_tell"])
def test_any_result_has_an_answer(verdict):
    summary = make_summary(diagnosis=Diagnosis(verdict=verdict, headline="A headline."), by={})
    bare = {"recommendation": None, "metrics": {}, "diagnosis": None}
    for one in (summary, summary.model_copy(update=bare)):
        assert len([line for line in lines(one) if line]) > 2


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
def test_an_encoding_that_lacks_a_character_gets_its_plain_spelling(results, encoding):
    for name in ("collapse", "shift"):
        drawn = "\n".join(lines(results[name], 80, encoding))
        drawn.encode(encoding)
        assert "?" not in drawn.replace("Bug?", "")
    assert plain("K3 ≤ 2 → π", "ascii") == "K3 <= 2 -> pi"


def test_a_curve_shows_its_shape():
    assert sparkline((0.0, 1.0, 2.0, None, 7.0)) == "▁▂▃ █"
    assert sparkline((1.0, 10.0, 100.0), log=True) == sparkline((0.0, 1.0, 2.0))
    assert sparkline((3.0, 3.0)) == "▁▁"
    for values in ((), (1.0,), (None, None), (float("nan"), float("inf"), 1.0)):
        assert sparkline(values) == ""


def flat(values, low=(), high=()):
    """Return whether a curve is flat in a result that has it by step, and nothing else."""
    n = range(len(values))
    steps = BySteps(
        first=n,
        last=n,
        tokens=[1 for _ in n],
        sequences=[1 for _ in n],
        series={"k3": Curve(values=values, low=low, high=high)},
    )
    return is_flat(make_summary(charts=Charts(steps=steps)), "k3")


def around(values, *halves):
    below, above = halves or (0.1, 0.1)
    return flat(values, [v and v - below for v in values], [v and v + above for v in values])


def test_a_curve_is_flat_unless_its_thirds_differ_beyond_their_intervals():
    assert around([1.0, 1.05, 0.95, 1.0, 1.02, 1.1])
    assert not around([1.0, 1.0, 1.0, 2.0, 2.0, 2.0])
    assert not around([1.0, 1.0, 3.0, 3.0, 1.0, 1.0])  # ends alike, and the middle is not
    assert around([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], 5.0, 5.0)
    # the mean of four is known twice as well as each: 0.1 against 0.2
    assert not around([1.0] * 4 + [1.05] * 4 + [1.25] * 4, 0.2, 0.2)
    assert around([1.0] * 4 + [1.05] * 4 + [1.19] * 4, 0.2, 0.2)
    assert not around([1.0, 2.0])
    assert around([1.0, 1.1])
    # ends of intervals are taken as they are
    assert not around([1.0, 1.3, 1.5], 0.01, 0.1)
    assert around([1.5, 1.3, 1.0], 0.01, 0.1) == around([1.0, 1.3, 1.5], 0.01, 0.1)


def test_a_step_without_an_interval_is_taken_as_the_least_known_one_and_none_at_all_by_their_scatter():
    values = [1.0, 1.0, 1.0, 1.0, 1.0, 1.2]
    ends = ([0.9] * 5 + [None], [1.1] * 5 + [None])
    assert flat(values, *ends)
    assert not flat([*values[:-1], 9.0], *ends)
    assert flat([1.0, 1.2, 1.1, 1.0, 1.1, 1.2])
    assert not flat([1.0, 1.2, 1.1, 5.0, 5.1, 5.2])
    assert not flat([1.0, 1.0, 1.0])  # of which nothing is known
    assert not flat([1.0])
    assert flat([1.0, None, 1.0, 1.1, None, 1.0, 1.1, 1.0])


def test_only_a_curve_that_moves_is_drawn(results, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    (row,) = (line for line in lines(results["healthy"], 100) if line.startswith("PPL ratio"))
    assert " ".join(row.split()) == "PPL ratio 1.0000 [0.9999, 1.0001] typical no trend 0.9999 to 1.0003"
    for name in ("K3 KL", "PPL ratio", "ESS, tokens", "Mean reward"):
        (row,) = (line for line in lines(results["collapse"], 100) if line.startswith(f"{name} "))
        assert "→" in row
        assert set(row) & set("▂▃▄▅▆▇")
    plain_table = terminal(results["healthy"], verbose=True)
    assert "no trend, 0.9999 to 1.0003" in plain_table
    assert "no trend, 0.9999 to 1.0003" in render_markdown(results["healthy"])


# ---------------------------------------------------------------- tables


def draw(*blocks, width=80, stack=True):
    """Draw sections, or blocks as those of a section."""
    given = blocks if isinstance(blocks[0], Section) else (Section("s", "A section", blocks),)
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False, emoji=False, markup=False, color_system=None)
    render_terminal(given, console, stack)
    return file.getvalue()


def wide_table(columns, rows=3, **more):
    header = ("preset", *(f"number_{i}" for i in range(columns)))
    cells = tuple(Number(value=0.5, interval=(0.4, 0.6)) for _ in range(columns))
    return Table("t", "A caption", header, tuple((f"row {i}", *cells) for i in range(rows)), **more)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_no_line_of_the_tables_is_wider_than_the_terminal(width):
    summary = make_summary(comparison=make_comparison())
    drawn = draw(*sections(summary), comparison(summary), width=width)
    assert [line for line in drawn.splitlines() if cell_len(line) > width] == []


def test_columns_that_do_not_fit_go_below_or_in_a_summary_are_left_out_and_named():
    below, without = draw(wide_table(12)), draw(wide_table(12), stack=False)

    headers = [line for line in below.splitlines() if line.startswith("preset")]
    assert len(headers) > 1
    assert all(f"number_{i} " in f"{' '.join(headers)} " for i in range(12))
    assert "number_0" in without.splitlines()[4]
    assert "number_11" in without.split("Left out for want of width:")[1]

    wide, narrow = (draw(wide_table(6, context=("number_0",)), width=at, stack=False) for at in (300, 60))
    assert "number_0" in wide
    assert "number_1" in narrow.splitlines()[4]
    assert "number_0" in narrow.split("Left out for want of width:")[1]  # columns of context go first


@pytest.mark.parametrize("stack", [True, False])
@pytest.mark.parametrize(("columns", "width"), [(6, 300), (6, 90), (6, 60), (2, 27), (12, 90)])
def test_no_table_loses_its_intervals_and_columns_go_below_for_them(columns, width, stack):
    drawn = draw(wide_table(columns), width=width, stack=stack)
    body, _, left_out = " ".join(drawn.split()).partition("Left out for want of width: ")
    shown = [f"number_{i}" for i in range(columns) if f"number_{i} " in f"{body} "]
    assert body.count("0.50 [0.40, 0.60]") == 3 * len(shown) > 0
    assert "interval" not in left_out
    assert shown == [f"number_{i}" for i in range(columns)] or "number_" in left_out
    if (columns, width) == (6, 90):  # there is room for the numbers alone
        assert (len(shown), left_out) == (6, "")
        assert sum(line.startswith("preset") for line in drawn.splitlines()) == 2


def test_verbose_has_every_interval_that_the_short_form_has(results, monkeypatch):
    for width in ("80", "100", "120"):
        monkeypatch.setenv("COLUMNS", width)
        for name in ("collapse", "healthy"):
            drawn = terminal(results[name], verbose=True)
            assert "the intervals" not in drawn
            k3 = " ".join(written(results[name].metrics["k3"]))
            assert sum(k3 in line for line in drawn.splitlines() if line.startswith("K3 KL")) == 2


def test_the_short_form_of_a_sweep_may_leave_intervals_out(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ran = CliRunner().invoke(app, ["sweep", str(SAMPLES / "healthy.parquet"), "--preset", "geo_rs"])
    assert "-v: intervals, every threshold" in " ".join(ran.stdout.split())
    assert max(map(len, ran.stdout.splitlines())) <= 80


def test_reference_tables_are_left_out():
    assert "number_0" not in draw(wide_table(1, collapsed=True))
    assert "number_0" in draw(wide_table(1, folded=True))


def test_a_caution_is_a_numbered_note_below_and_none_of_a_column_that_is_left_out():
    cells = (*(Number(value=1.0, note=f"unreliable {i}") for i in range(12)),)
    header = ("preset", *(f"number_{i}" for i in range(12)))
    drawn = draw(Table("t", "A caption", header, (("row", *cells),)), width=60, stack=False)
    assert "1* (1)" in drawn
    assert "(1) unreliable 0" in drawn
    assert "unreliable 11" not in drawn


def test_every_tone_can_be_told_without_colour():
    tones = ("good", "warn", "bad", "info")
    assert len({draw(Verdict("Label", "words", tone)).splitlines()[2][0] for tone in tones}) == 4


def test_strings_from_a_dump_cannot_drive_the_terminal():
    evil = "\x1b[31mred\x1b]0;title\x07\x9b2J[bold]x[/bold] :smile:"
    table = Table("t", evil, (evil, "b"), ((evil, evil),), (evil,))
    figure = Figure(evil, (evil, "b"), (Series(evil, "x", (1.0, 2.0)),))
    drawn = draw(Text(evil), Verdict(evil, evil, "bad", (evil,)), table, figure, width=400)
    drawn += "".join(lines(make_summary(dump=dump_facts(files=[evil], notes=[evil]))))
    assert not set("\x1b\x07\x9b") & set(drawn)
    assert "[bold]x[/bold] :smile:" in drawn


HUGE = (-1.7e308, 1.7e308, 0.0, float("inf"), float("-inf"), float("nan"), None, 5e-324)


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_a_chart_of_anything_is_drawn(scale):
    for y in (HUGE, (1.7e308, 1.7e308), (float("inf"), float("inf")), ()):
        draw(Figure("k3 by step", [*map(str, range(len(y)))], (Series("s", "x", y),)))
        layer = Layer("", range(len(y)), y, "blue", low=y, high=y[::-1])
        svg, points = panel_svg(Panel("step", "nats", (layer,), y_scale=scale), "x")
        json.dumps(points, allow_nan=False)
        assert "nan" not in svg


# ---------------------------------------------------------------- pipes


def pipe(monkeypatch):
    """Make stdout a pipe; not in a fixture, after which pytest sets its own."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())


def test_a_pipe_is_never_wider_than_120_columns_and_loses_nothing(monkeypatch):
    pipe(monkeypatch)
    section = Section("s", "A section", (Text("word " * 300), wide_table(30, context=("number_3",))))
    render_terminal((section,), console := make_console(), stack=False)
    drawn = console.file.getvalue()

    assert max(map(cell_len, drawn.splitlines())) <= 120
    assert all(line == line.rstrip() for line in drawn.splitlines())
    assert drawn.count("[0.40, 0.60]") == 3 * 30
    assert all(f"number_{i} " in f"{drawn} ".replace("\n", " ") for i in range(30))
    assert "eft out" not in drawn


def test_a_pipe_is_120_wide_unless_the_environment_sets_the_width(results, monkeypatch):
    pipe(monkeypatch)
    assert make_console().width == PIPE_WIDTH == 120
    for name, verbose in product(("collapse", "shift"), (False, True)):
        drawn = terminal(results[name], verbose)
        assert max(map(cell_len, drawn.splitlines())) <= 120
        assert "\x1b" not in drawn
    monkeypatch.setenv("COLUMNS", "70")
    assert make_console().width == 70
