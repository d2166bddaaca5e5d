import re
import shlex

import pytest
from factory import dump_facts, make_summary, metrics, number, preset, recommendation, unknown
from typer.testing import CliRunner

from offpol_diag.blocks import Code, Composite, Figure, Section, Series, Table, Text, Verdict, plain
from offpol_diag.cli import app
from offpol_diag.numerals import counted, say, size
from offpol_diag.presets import catalogue, formulas
from offpol_diag.presets.candidates import CANDIDATES
from offpol_diag.report.render.embedded import unpacked
from offpol_diag.report.render.html import _environment, render_html
from offpol_diag.report.render.markdown import LIMIT, render_markdown
from offpol_diag.report.render.numbers import shown
from offpol_diag.report.render.terminal import terminal
from offpol_diag.report.sections import SECTIONS, sections
from offpol_diag.report.sections.answer import answer, checks
from offpol_diag.report.sections.columns import sentence
from offpol_diag.report.sections.presets import Cards
from offpol_diag.summary import Number, Worst, loads
from tests.factory import OLD, ROLLOUT, write

OF_COMMANDS = ("comparison", "runs", "sweep")
"""Sections of what only some commands find."""


def section(name, **changes):
    return next(one for one in sections(make_summary(**changes)) if one.id == name)


def table(name, of):
    return next(block for block in plain(of.blocks) if isinstance(block, Table) and block.id == name)


def words(of):
    """Return everything a reader of the section sees in a terminal."""
    lines = []
    for block in plain(of.blocks):
        match block:
            case Text():
                lines.append(block.text)
            case Verdict():
                lines += [block.label, block.text, *block.detail]
            case Table():
                lines += [block.caption, *block.header, *block.notes]
                lines += [shown(cell).text for row in block.rows for cell in row]
            case Figure():
                lines.append(block.title)
    return "\n".join(line for line in lines if line)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (number(2.03e-3, 1.5e-4), "0.0020 [0.0019, 0.0022]"),
        (number(0.9954, 4e-4, "fraction"), "99.54% [99.50%, 99.58%]"),
        (number(0.999996, 2e-6, "fraction"), ">99.99% [>99.99%, >99.99%]"),
        (number(3.71e-4, 5e-5, "fraction"), "0.037% [0.032%, 0.042%]"),
        (number(0.0, 0.0), "0"),
        (number(1.0, 1e-4), "1.0000 [0.9999, 1.0001]"),
        (number(0.0, unit="fraction"), "0%"),
        (number(0.0, 2e-6), "0 [-2.0e-6, 2.0e-6]"),
        (number(-1.5e-3, 2.1e-3), "-0.0015 [-0.0036, 0.0006]"),
        (number(1234567.0), "1,234,567"),
        (number(-0.0), "0"),
        (Number(log10=45.2), "10^45.2"),
        (unknown("missing column entropy"), "cannot be known: missing column entropy"),
        (Number(), "cannot be known"),
    ],
)
def test_a_number_is_written_with_the_digits_its_interval_supports(given, text):
    assert say(given) == text


def test_bytes_are_written_in_the_largest_unit_that_keeps_them_above_one():
    assert [size(0), size(1023), size(1024), size(3 * 1024**3)] == ["0 B", "1023 B", "1 KiB", "3 GiB"]


# ---------------------------------------------------------------- all renderers


def test_a_new_section_is_on_the_page_in_the_terminal_and_in_the_pull_request(monkeypatch):
    def added(_):
        blocks = (
            Text("A new paragraph."),
            Verdict("New verdict", "said.", "good"),
            Code("New code", "x = 1"),
            Table("new", "New table", ("head",), (("a new cell",),), folded=True),
            Figure("New figure", ("a label",), (Series("s", "S", (1.0,)),)),
        )
        return Section("new", "A new section", blocks)

    monkeypatch.setitem(SECTIONS, "new", added)
    summary = make_summary()
    for drawn in (render_html(summary), terminal(summary, verbose=True), render_markdown(summary)):
        for said in ("A new section", "A new paragraph.", "New verdict", "x = 1", "New table", "a new cell"):
            assert said in drawn
    assert "New figure" in terminal(summary, verbose=True)
    assert "New figure" not in render_html(summary)  # which has pictures


@pytest.mark.parametrize("kind", Composite.__subclasses__(), ids=lambda one: one.__name__)
def test_every_composite_block_has_a_macro_of_the_page_and_plain_blocks_elsewhere(kind):
    assert kind.plain is not Composite.plain
    assert f"macro {kind.__name__}(" in _environment().loader.get_source(_environment(), "page.html.j2")[0]


def test_every_section_is_drawn_by_all_renderers_and_those_not_wanted_are_not_made(monkeypatch):
    summary = make_summary()
    given = sections(summary)
    assert [one.id for one in given] == [one for one in SECTIONS if one not in OF_COMMANDS]
    drawn, marked, page = terminal(summary, verbose=True), render_markdown(summary), render_html(summary)
    for one in given:
        assert one.title.replace("|", "") in drawn
        assert one.title.replace("|", "") in marked
        assert f'<section id="{one.id}"' in page or one.id == "diagnosis"
    monkeypatch.setitem(SECTIONS, "logs", None)  # what is not wanted is not made
    wanted = ("data", "verdict", "sweep")
    assert sections(summary, wanted) == tuple(one for one in given if one.id in wanted)


def test_ids_are_unique_rows_as_long_as_the_header_and_no_cell_is_a_leftover_of_the_program():
    given = sections(make_summary())
    blocks = [block for one in given for block in plain(one.blocks)]
    ids = [block.id for block in blocks if isinstance(block, Table | Figure)]
    tables = [block for block in blocks if isinstance(block, Table)]
    assert len(ids) == len(set(ids))
    assert [one.id for one in tables for row in one.rows if len(row) != len(one.header)] == []
    assert [one.id for one in given if {"nan", "None", "null"} & set(words(one).split())] == []


def test_a_summary_with_the_bare_minimum_still_makes_a_report():
    bare = {"metrics": {}, "presets": {}, "by": {}, "histograms": {}, "worst": Worst(), "gates": []}
    summary = make_summary(**bare, diagnosis=None, recommendation=None)
    assert [one.id for one in sections(summary)] == ["verdict", "data"]
    for draw in (render_html, render_markdown, terminal):
        assert "no pair of policies" in draw(summary)


# ---------------------------------------------------------------- the verdict


def advised(**changes):
    return section("verdict", recommendation=recommendation().model_copy(update=changes))


@pytest.mark.parametrize(
    ("k1", "said"), [(-0.01, "no logging fault looked for explains"), (-1e-6, "small enough for rounding")]
)
def test_a_negative_k1_without_a_bug_says_why_it_may_be_so(k1, said):
    numbers = metrics() | {"k1": number(k1, abs(k1) / 10, "nats")}
    (check,) = (one for one in checks(make_summary(metrics=numbers)) if one.text.startswith("K1"))
    assert check.state == "un"
    assert said in check.text
    assert ("top-p" in check.detail) is (k1 == -0.01)


def test_the_configuration_that_was_asked_for_comes_first_then_the_dumps_own():
    own = dump_facts(provenance={"trainer": "slime"})
    given = make_summary(dump=own)
    names = dict(answer(given).configs)
    assert next(iter(names)) == "slime"
    asked = recommendation().model_copy(update={"config": names["trl"]})
    first = [name for name, _ in answer(make_summary(dump=own, recommendation=asked)).configs]
    assert first[:2] == ["trl", "slime"]
    assert "configuration" not in first


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda one: one.name)
def test_the_verdict_names_its_preset_by_a_command_that_runs(candidate):
    name, settings = candidate.preset_name("old"), candidate.changes("old")
    (line,) = [x for x in words(advised(method=name, settings=settings)).splitlines() if x[:8] == "Preset: "]
    program, *arguments = shlex.split(line.removeprefix("Preset: "))
    ran = CliRunner().invoke(app, arguments)
    assert program == "offpol-diag"
    assert ran.exit_code == 0, ran.output
    assert [value for value in settings.values() if f"={value}" not in ran.stdout] == []


def test_the_reasons_the_source_and_what_is_not_known_come_with_the_decision():
    head = advised(
        title="token TIS at 2.0",
        label="default",
        reasons=["Mismatch: K3 = 5e-3 nats."],
        unknown=["Whether staleness shows: needs the column advantages."],
        longest_response=Number(value=1151.0, unit="tokens"),
    ).blocks[0]
    beyond = advised(longest_response=Number(unknown="beyond the longest"))

    assert "ESS: beyond the longest" in words(beyond)
    assert "10% ESS" not in words(section("verdict"))
    assert head.label == "Use token TIS at 2.0"
    for said in (
        "The default: estimated errors could not be compared on this dump.",
        "Mismatch: K3 = 5e-3 nats.",
        "Not known: whether staleness shows: needs the column advantages.",
        "Longest response at which importance sampling of whole sequences keeps 10% ESS: 1,151 tokens",
        "Source: Vehtari et al. 2024",
    ):
        assert any(line.startswith(said) for line in head.detail), said


def test_the_weights_stand_beside_the_raw_ones_and_the_configuration_where_a_trainer_was_named():
    weighed = {"token TIS at 1.5": {"ess_tokens": number(0.94)}}
    found = table("weights", advised(numbers=weighed, title="token TIS at 1.5"))
    assert found.header == ("on this dump", "uncorrected", "token TIS at 1.5")
    assert found.rows[0] == ("ESS of tokens", metrics()["ess_tokens"], number(0.94))
    said = "rollout_is: token\n"
    unnamed = section("verdict", dump=dump_facts(provenance={}))
    for drawn, code in ((advised(config=said), [said]), (unnamed, [])):
        assert [one.text for one in drawn.blocks if isinstance(one, Code)] == code


@pytest.mark.parametrize(
    "decision", ["fix the bug first", "no correction needed", "no method helps", "not enough data"]
)
def test_a_decision_without_a_method_is_said_in_its_own_words(decision):
    assert advised(decision=decision, method=None, threshold=None).blocks[0].label.lower() == decision


def test_an_alert_names_what_it_saw_and_its_source():
    found = table("alerts", section("numbers"))
    assert found.rows[0][1:] == ("k1 = 0.0021 [0.0019, 0.0022]", "verl issue 3984")
    assert found.caption == "1 published warning level is crossed"


def test_the_total_stands_in_where_there_are_two_policies_and_a_pair_that_is_lacking_has_no_column():
    two = {**metrics(), "k3": unknown("missing column old_log_probs"), "total.k3": number(4e-3, 1e-4)}
    rows = table("headline", section("numbers", metrics=two)).rows
    assert ("total.k3", number(4e-3, 1e-4)) in [row[:2] for row in rows]
    lacking = {"drift2.k1": unknown("missing column x"), "drift2.k3": unknown("missing column x")}
    gap = {"k3": Number(value=0.1), "total.k3": Number(log10=400.0)} | lacking
    found = table("policies", section("numbers", metrics=metrics() | gap))
    assert found.header == ("number", "rollout → old", "rollout → current")


def test_intervals_are_spoken_of_where_there_are_some():
    assert "95% intervals, resampling the 640" in words(section("numbers"))
    bare = {"k3": Number(value=0.1), "mean_ratio": Number(value=1.1)}
    assert "Without intervals: there are 640 groups" in words(section("numbers", metrics=bare))


# ---------------------------------------------------------------- presets


def lacking(column, **columns):
    one = preset("P", "m", 0.5).model_copy(update={"needs": [column]})
    return section("presets", presets=make_summary().presets | {"p": one}, dump=dump_facts(columns=columns))


def many(families=10, each=5, **more):
    """Make presets of several families, whose members take turns in the catalogue."""
    order = [(family, place) for place in range(each) for family in range(families)]
    names = {(4, 3): "token_is"} if families > 4 < each else {}
    return {
        names.get(one, f"f{one[0]}_{one[1]}"): preset(
            "x", f"weight {one[1]}", 0.1, family=f"idea {one[0]}", **more
        )
        for one in order
    }


def cards(**changes):
    (found,) = [one for one in section("presets", **changes).blocks if isinstance(one, Cards)]
    return found.cards


def test_presets_that_need_a_column_are_listed_and_most_could_be_had_by_one_option():
    hint = "The trainer's one policy is read as the old one with --columns old=pi."
    found = table("needs", lacking("old_log_probs", current_log_probs="pi"))
    assert ("p", "old_log_probs", "P") in found.rows
    assert found.notes == (hint,)
    assert table("needs", lacking("old_log_probs")).notes == ()


def test_the_preset_table_starts_from_the_raw_weights_and_a_number_that_no_preset_has_is_no_column():
    shape = table("presets", section("presets"))
    raw = dict(zip(shape.header, shape.rows[0], strict=True))
    assert raw["preset"] == "uncorrected, rollout → old"
    assert raw["ess_sequences"] == metrics()["ess_sequences"]
    assert raw["weight_mean"] == metrics()["mean_ratio"]
    lack = {"ess_tokens": Number(value=1.0), "update_removed": unknown("missing column advantages")}
    one = preset("P", "m", 0.5).model_copy(update={"metrics": lack})
    header = table("presets", section("presets", presets={"a": one})).header
    assert header == ("preset", "family", "ess_tokens")


def test_of_many_presets_one_of_each_family_is_shown_and_the_recommended_first_in_its_own():
    found = table("presets", section("presets", presets=many()))
    names = [row[0] for row in found.rows if "(" not in row[0] and "," not in row[0]]
    assert names == ["token_is" if f == 4 else f"f{f}_0" for f in range(10)]
    assert found.header == ("preset", "tokens_weighted", "ess_tokens", "ess_sequences")
    assert "One row per family of 50 presets" in found.notes[0]
    few = table("presets", section("presets", presets=many(4, 6)))
    assert sum(row[1] != "–" for row in few.rows) == 24


def test_every_preset_has_a_card_families_stand_together_and_what_is_only_logged_is_said_to_be():
    found = cards(presets=many())
    assert len(found) == 50
    assert [one.name for one in found[20:25]] == ["token_is", "f4_0", "f4_1", "f4_2", "f4_4"]
    (one,) = [one for one in cards() if one.name == "seq_is_metrics"]
    assert "metrics only" in dict(one.lines)[""]


def test_a_card_says_how_to_print_the_configuration_for_the_dumps_trainer_or_its_own():
    method = formulas.method(catalogue.load()["token_is"])
    given = {
        "token_is": preset("x", method, 0.9, trainers=["verl"]),
        "mine": preset("x", "y", 0.9, trainers=["verl"]),
    }
    commands = {one.name: one.command for one in cards(presets=given)}
    assert commands["token_is"] == "offpol-diag presets token_is --for verl"
    assert commands["mine"] == ""  # of a file, which the command does not know by this name
    own = cards(presets=given, dump=dump_facts(provenance={"trainer": "trl"}))
    (command,) = (one.command for one in own if one.name == "token_is")
    assert command == "offpol-diag presets token_is --for trl"
    assert CliRunner().invoke(app, command.split()[1:]).exit_code == 0


def test_configurations_logs_and_other_numbers_of_presets_are_not_on_the_page():
    method = formulas.method(catalogue.load()["token_is"])
    logged = {"logs": "verl-2026-01", "as_logged": {"kl/of_one_only": 0.1}}
    given = {"token_is": preset("x", method, 0.9, trainers=["verl"], **logged), "a": preset("x", "y", 0.9)}
    page = render_html(make_summary(presets=given, recommendation=None))
    table = re.search('<table class="ps".*?</table>', page, re.DOTALL)[0]
    assert "<code>offpol-diag presets token_is --for verl</code>" in table
    hidden = unpacked(re.search('<script type="text/plain" class="cards">(.*?)</script>', page)[1])
    assert "weight_mean 0.998" in hidden
    for gone in ("rollout_is", "kl/of_one_only"):
        assert gone not in table + hidden
    assert "table-all" not in page


def family(aspects, **numbers):
    """Return the row of a family of presets with these aspects, and with these numbers in turn."""
    rows = {
        name: preset("x", "y", 0.9, family="IcePop", aspects=said).model_copy(
            update={"metrics": {key: Number(value=values[place]) for key, values in numbers.items()}}
        )
        for place, (name, said) in enumerate(aspects.items())
    }
    return table("families", section("presets", presets=rows)).rows[0]


def test_a_family_differs_in_the_aspects_in_which_its_presets_do_and_has_the_range_of_their_numbers():
    different = {"a": {"numerator": "old", "veto": "none"}, "b": {"numerator": "current", "veto": "none"}}
    assert family(different)[:3] == ("IcePop", 2, "numerator: old | current")
    assert family({"a": {}, "b": {}})[2] == "defined alike"
    row = family({"a": {}, "b": {}, "c": {}}, weight_mean=(0.93, 1.25, None), ess_tokens=(0.5,) * 3)
    assert row[3] == "weight_mean 0.93 to 1.2; ess_tokens 0.50"
    assert family({"a": {}, "b": {}}, weight_mean=(None, None))[3] == "–"


def logged(names, more=""):
    """Return a table of presets that log these numbers under one set of names."""
    given = {key: preset("x", "y", 0.9, logs="verl-2025-11", as_logged=one) for key, one in names.items()}
    return table(f"logged-verl-2025-11{more}", section("logs", presets=given))


def test_names_in_a_trainer_stand_in_a_column_what_is_alike_once_and_the_recommended_has_all():
    alone = logged({"token_is": {"kl": 0.00205, "chi2_seq": None}})
    assert alone.header == ("name in the trainer", "token_is")
    assert alone.rows == (("kl", Number(value=0.00205)), ("chi2_seq", Number()))
    same = logged({"a": {"kl": 0.1, "ess": 0.5}, "b": {"kl": 0.1, "ess": 0.6, "veto": 0.0}}, "-same")
    assert same.rows == [("kl", Number(value=0.1))]
    recommended = logged({"token_is": {"kl": 0.1, "ess": 0.5}, "b": {"kl": 0.1, "ess": 0.6}})
    assert [row[0] for row in recommended.rows] == ["kl", "ess"]


# ---------------------------------------------------------------- data


def test_groups_are_prompts_only_where_the_dump_names_them_and_provenance_is_told_as_json():
    columns = {"rollout_log_probs": "rollout_log_probs", "old_log_probs": "old_log_probs"}
    for more, said in (({"group_id": "uid"}, "groups (prompts)"), ({}, "without a group_id")):
        assert said in words(section("data", dump=dump_facts(columns=columns | more)))
    facts = dump_facts(provenance={"model": "q3", "regime": {"lags": [2], "quantize": True}})
    rows = table("provenance", section("data", dump=facts)).rows
    assert rows == [("model", "q3"), ("regime", '{"lags": [2], "quantize": true}')]


READ = {"rollout_log_probs": "vllm", "old_log_probs": "old_log_probs", "step": "global_step"}
SHORT = "rollout = vllm, old_log_probs, no mask, step = global_step, host; ignored: prompt, ref_log_probs"
FORMS = {
    "the answer": lambda summary: " ".join(terminal(summary).split()),
    "the tables": lambda summary: " ".join(terminal(summary, verbose=True).split()),
    "markdown": lambda summary: render_markdown(summary).replace("\\", ""),
    "the page": render_html,
    "json": lambda summary: summary.to_json(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_which_columns_were_read_and_which_were_ignored(form):
    facts = dump_facts(columns=READ, others=["host"], ignored=["prompt", "ref_log_probs"])
    text = FORMS[form](make_summary(dump=facts))
    for name in ("vllm", "global_step", "host", "prompt", "ref_log_probs"):
        assert name in text
    if form in ("the answer", "markdown"):
        assert SHORT in text
    if form in ("the tables", "markdown", "the page"):
        assert "which name, and what was ignored" in text


def test_a_long_list_is_counted_in_the_short_form_and_whole_in_the_tables():
    names = [f"feature_{i}" for i in range(300)]
    facts = dump_facts(ignored=names, columns=READ | {"response_mask": "m" * 100})
    summary = make_summary(dump=facts)
    said = sentence(facts)
    assert len(said) < 250
    assert f"mask = {'m' * 39}…" in said
    assert said.endswith("ignored: feature_0, feature_1, feature_2, feature_3, feature_4 and 295 more.")
    assert dict(table("columns", section("data", dump=facts)).rows)["ignored"] == ", ".join(names)
    assert names[-1] in render_html(summary)
    assert names[-1] in terminal(summary, verbose=True)


def test_ten_thousand_columns_are_whole_in_the_json_alone():
    names = [f"a_column_of_some_length_{i}" for i in range(10_000)]
    summary = make_summary(dump=dump_facts(ignored=names))
    assert len(render_markdown(summary)) < LIMIT
    assert len(terminal(summary, verbose=True)) < len(terminal(make_summary(), verbose=True)) + 40_000
    assert dict(table("columns", section("data", dump=summary.dump)).rows)["ignored"].endswith(" more")
    assert loads(summary.to_json(), "").dump.ignored == names


def test_an_older_result_does_not_say_that_nothing_was_ignored():
    said = words(section("data", dump=dump_facts(ignored=None)))
    assert "this result does not say" in said
    assert sentence(dump_facts(ignored=None)).endswith("step.")
    assert sentence(dump_facts(ignored=[])).endswith("; none ignored.")


COMMANDS = {
    "analyze": ("--presets", "token_is", "--no-html"),
    "doctor": (),
    "compare": ("--presets", "token_is,seq_mis"),
    "sweep": ("--preset", "token_is"),
    "gate": ("--max", "k3=1"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_which_columns_were_read_and_which_were_ignored(command, tmp_path):
    names = {"old_log_probs": None, "vllm": ROLLOUT, "rollout_log_probs": None, "train": OLD}
    dump = write(tmp_path / "a.parquet", **names, mask=[[1] * len(row) for row in OLD], notes=ROLLOUT)
    more = (*COMMANDS[command], "--columns", "rollout=vllm,old=train")
    ran = CliRunner().invoke(app, [command, dump, *more])
    assert ran.exit_code == 0, ran.output
    assert "rollout = vllm, old = train, mask = mask; ignored: notes" in " ".join(ran.stdout.split())
    whole = CliRunner().invoke(app, [command, dump, *more, "-v"]).stdout
    assert re.search(r"^.*[Ii]gnored\W+notes", whole, re.MULTILINE)
    assert re.search(r"response_mask\W+mask", whole)


def test_two_runs_say_it_of_both(tmp_path):
    a, b = (write(tmp_path / name, notes=ROLLOUT, **more) for name, more in (("a", {}), ("b", {"host": OLD})))
    for more in ((), ("-v",)):
        said = " ".join(CliRunner().invoke(app, ["compare", a, b, *more]).stdout.split())
        assert "gnored: notes, host." in said
    assert "A. Columns: rollout_log_probs, old_log_probs, no mask; ignored: notes." in " ".join(
        CliRunner().invoke(app, ["compare", a, b]).stdout.split()
    )


def test_one_of_a_thing_is_told_without_an_s():
    facts = dump_facts(files=["a"], rows=1, sequences=1, tokens=1, groups=1)
    said = words(section("data", dump=facts))
    assert said.startswith("1 file with 1 row held 1 sequence with 1 unmasked response token, in 1 group")
    assert [counted(n, "row") for n in (0, 1, 2, 1234)] == ["0 rows", "1 row", "2 rows", "1,234 rows"]


def test_every_number_of_the_summary_is_defined():
    summary = make_summary()
    defined = {row[0] for row in table("definitions", section("data")).rows}
    assert set(summary.metrics) <= defined
    assert {f"PRESET.{name}" for name in summary.presets["token_is"].metrics} <= defined


# ---------------------------------------------------------------- pull requests


def test_markdown_holds_gates_answer_and_folds_of_the_rest():
    text = render_markdown(make_summary())
    top, _, folds = text.partition("<details>")
    for expected in ("✗ failed", "| K3 KL | 0.0020 [0.0019, 0.0022]", "**What to do**"):
        assert expected in top
    assert len(top.splitlines()) < 60
    for expected in ("**Use token_is at upper 2**", "| seq_mis |", "rollout_log_probs", "verl issue 3984"):
        assert expected in folds
    assert "| khat_sequences | 1.2\\* [1.0, 1.4] (1) |" in text  # with its caution
    assert "(1) k̂ exceeds 0.67" in text


def test_markdown_escapes_what_would_break_a_table_or_open_a_tag():
    evil = recommendation().model_copy(update={"sentence": "a|b <b>bold</b> *x* `y`\nz [l](http://x)"})
    text = render_markdown(make_summary(recommendation=evil))
    assert r"a\|b &lt;b>bold&lt;/b> \*x\* \`y\` z [l]\(http://x)" in text


def test_markdown_stays_within_what_github_accepts_and_says_what_it_cut():
    text = render_markdown(make_summary(presets=many(2000, 1)))
    assert len(text.encode()) < LIMIT
    assert "does not fit here" in text
