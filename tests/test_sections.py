import shlex

import pytest
from factory import dump_facts, make_summary, metrics, number, place, preset, recommendation, unknown
from typer.testing import CliRunner

from offpol_diag.blocks import Code, Figure, Section, Table, Text, Verdict
from offpol_diag.cli import app
from offpol_diag.numerals import counted, say, size
from offpol_diag.presets.candidates import CANDIDATES
from offpol_diag.report.render.markdown import LIMIT, PARTS, render_markdown
from offpol_diag.report.render.numbers import shown
from offpol_diag.report.render.terminal import BRIEF
from offpol_diag.report.sections import SECTIONS, sections
from offpol_diag.report.sections.crosswalk import ACROSS
from offpol_diag.report.sections.where import finding
from offpol_diag.summary import Location, Number, Recommendation, Worst

OF_COMMANDS = ("comparison", "runs", "sweep")
"""Sections of what only some commands find."""


def section(name: str, **changes) -> Section:
    return next(one for one in sections(make_summary(**changes)) if one.id == name)


def table(name: str, of: Section) -> Table:
    return next(block for block in of.blocks if isinstance(block, Table) and block.id == name)


def words(of: Section) -> str:
    """Everything a reader of the section sees."""
    lines = []
    for block in of.blocks:
        match block:
            case Text():
                lines.append(block.text)
            case Verdict():
                lines += [block.label, block.text, *block.detail]
            case Table():
                lines += [block.caption, *block.header, *block.notes]
                lines += [shown(cell).text for row in block.rows for cell in row]
            case Figure():
                lines += [block.title, block.caption]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (number(2.03e-3, 1.5e-4), "0.0020 [0.0019, 0.0022]"),
        (number(0.9954, 4e-4, "fraction"), "99.54% [99.50%, 99.58%]"),
        (number(0.53, 0.02, "fraction"), "53% [51%, 55%]"),
        (number(0.999996, 2e-6, "fraction"), "100.00% [100.00%, 100.00%]"),
        (number(3.71e-4, 5e-5, "fraction"), "0.037% [0.032%, 0.042%]"),
        (number(0.0, 0.0), "0"),
        (number(1.0, 1e-4), "1.0000 [0.9999, 1.0001]"),
        (number(0.0, unit="fraction"), "0%"),
        (number(0.0, 2e-6), "0 [-2.0e-6, 2.0e-6]"),
        (number(-1.5e-3, 2.1e-3), "-0.0015 [-0.0036, 0.0006]"),
        (number(1234567.0), "1,234,567"),
        (number(1 / 3), "0.33"),
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


def test_the_report_opens_with_the_diagnosis_and_every_section_has_its_own_id():
    ids = [one.id for one in sections(make_summary())]
    assert ids[:1] == ["diagnosis"]
    assert ids == [one for one in SECTIONS if one not in OF_COMMANDS]


def test_sections_that_are_not_wanted_are_not_made(monkeypatch):
    whole = sections(make_summary())
    monkeypatch.setitem(SECTIONS, "crosswalk", None)
    wanted = ("made", "verdict", "sweep")

    assert sections(make_summary(), wanted) == tuple(one for one in whole if one.id in wanted)


def test_what_a_terminal_and_a_pull_request_are_told_is_made_and_no_more():
    assert {*BRIEF, *PARTS} <= set(SECTIONS)
    assert "crosswalk" not in {*BRIEF, *PARTS}


def test_ids_of_tables_and_figures_are_unique():
    blocks = [block for one in sections(make_summary()) for block in one.blocks]
    ids = [block.id for block in blocks if isinstance(block, Table | Figure)]
    assert len(ids) == len(set(ids))


def test_every_row_of_every_table_has_as_many_cells_as_the_header():
    blocks = [block for one in sections(make_summary()) for block in one.blocks if isinstance(block, Table)]
    assert [block.id for block in blocks for row in block.rows if len(row) != len(block.header)] == []


def test_the_decision_comes_with_its_numbers_its_source_and_what_to_try_next():
    head = section("verdict").blocks[0]
    assert head.label == "token_is at upper 2"
    said = "\n".join(head.detail)
    assert "Measured: ess_sequences = 3.1% [1.9%, 4.3%]" in said
    assert "Source: Vehtari et al. 2024" in said
    assert "Runner-up: seq_mis" in said


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda one: one.name)
def test_the_verdict_names_its_preset_by_a_command_that_runs(candidate):
    name, settings = candidate.preset_name("old"), candidate.changes("old")
    given = recommendation().model_copy(update={"method": name, "settings": settings})
    said = words(section("verdict", recommendation=given))

    (line,) = [line for line in said.splitlines() if line.startswith("Preset: ")]
    program, *arguments = shlex.split(line.removeprefix("Preset: "))
    ran = CliRunner().invoke(app, arguments)

    assert program == "offpol-diag"
    assert ran.exit_code == 0, ran.output
    assert [value for value in settings.values() if f"={value}" not in ran.stdout] == []


def test_an_alert_names_what_it_saw_and_its_source():
    given = section("verdict")
    assert table("alerts", given).rows[0][1:] == ("k1 = 0.0021 [0.0019, 0.0022]", "verl issue 3984")
    assert "1 published warning level is crossed" in [
        block.label for block in given.blocks if isinstance(block, Verdict)
    ]


def test_the_reasons_the_cost_and_what_is_not_known_come_with_the_decision():
    cost = {
        "truncated_high": number(0.012, unit="fraction"),
        "truncated_low": number(0.0, unit="fraction"),
        "ess_tokens": number(0.94, unit="fraction"),
    }
    given = recommendation().model_copy(
        update={
            "title": "token TIS at 2.0",
            "label": "default",
            "reasons": ["Mismatch: K3 = 5e-3 nats."],
            "unknown": ["Whether staleness shows: needs the column advantages."],
            "numbers": {"token TIS at 2.0": cost},
        }
    )
    head = section("verdict", recommendation=given).blocks[0]

    assert head.label == "Token TIS at 2.0 (default)"
    assert head.detail[1:5] == (
        "Mismatch: K3 = 5e-3 nats.",
        "Cost: 1.2% of the weights truncated, ESS of tokens 94%",
        "Runner-up: seq_mis at [0.5, 2]: it drops 25% of the sequences, the long ones first.",
        "Not known: whether staleness shows: needs the column advantages.",
    )


@pytest.mark.parametrize(
    ("longest", "said"),
    [
        (Number(value=1151.0, unit="tokens"), "1,151 tokens"),
        (Number(unknown="beyond the longest responses"), "beyond the longest responses"),
    ],
)
def test_the_longest_response_is_told(longest, said):
    known = recommendation().model_copy(update={"longest_response": longest})
    assert f"whole sequences keeps 10% ESS: {said}" in words(section("verdict", recommendation=known))
    assert "10% ESS" not in words(section("verdict"))


def test_the_method_and_those_beside_it_have_their_numbers_in_the_verdict():
    weighed = {"token TIS at 1.5": {"ess_tokens": number(0.94)}, "no correction": {"ess_tokens": number(1.0)}}
    given = recommendation().model_copy(update={"numbers": weighed, "title": "token TIS at 1.5"})
    rows = table("numbers", section("verdict", recommendation=given)).rows

    assert [(row[0], row[1].value) for row in rows] == [("token TIS at 1.5", 0.94), ("no correction", 1.0)]


@pytest.mark.parametrize(
    ("settings", "mark"), [({}, "recommended"), ({"weight.upper": "1.5"}, "recommended, but at 1.5")]
)
def test_a_method_at_another_threshold_than_its_presets_is_told_so(settings, mark):
    given = recommendation().model_copy(
        update={
            "settings": settings,
            "method": "token_is",
            "threshold": "1.5",
            "title": "token TIS at 1.5",
            "numbers": {"token TIS at 1.5": {"ess_sequences": number(0.94, unit="fraction")}},
        }
    )
    found = section("presets", recommendation=given)

    assert f"token_is ({mark})" in [row[0] for row in table("presets", found).rows]
    assert "Under the recommended token TIS at 1.5, the effective sample size" in words(found)
    assert "over sequences is 94%" in words(found)


def test_the_configuration_is_shown_where_a_trainer_was_named():
    given = recommendation().model_copy(update={"config": "rollout_is: token\n"})
    blocks = section("verdict", recommendation=given).blocks
    assert [one.text for one in blocks if isinstance(one, Code)] == ["rollout_is: token\n"]
    assert not [one for one in section("verdict").blocks if isinstance(one, Code)]


@pytest.mark.parametrize(
    "decision", ["fix the bug first", "no correction needed", "no method helps", "not enough data"]
)
def test_a_decision_without_a_method_is_said_in_its_own_words(decision):
    given = recommendation().model_copy(update={"decision": decision, "method": None, "threshold": None})
    assert section("verdict", recommendation=given).blocks[0].label.lower() == decision


def test_a_summary_with_the_bare_minimum_still_makes_a_report():
    bare = {"metrics": {}, "presets": {}, "by": {}, "histograms": {}, "worst": Worst(), "gates": []}
    made = sections(make_summary(**bare, diagnosis=None, recommendation=None))
    assert [one.id for one in made] == ["verdict", "numbers", "dump", "made"]


def test_the_total_drift_stands_in_where_the_dump_has_two_policies_only():
    two = {**metrics(), "k3": unknown("missing column old_log_probs"), "total.k3": number(4e-3, 1e-4)}
    assert ("total.k3", number(4e-3, 1e-4)) in [
        row[:2] for row in table("headline", section("numbers", metrics=two)).rows
    ]


def test_an_unknown_number_names_the_missing_column():
    assert "cannot be known: missing column current_log_probs" in words(section("policies"))


@pytest.mark.parametrize("forbidden", ["nan", "None", "null"])
def test_no_cell_is_blank_or_a_leftover_of_the_program(forbidden):
    for one in sections(make_summary()):
        assert forbidden not in words(one).split()
        assert all(line for line in words(one).split("\n"))


def test_a_ratio_whose_interval_misses_one_is_called_out():
    off = {**metrics(), "mean_ratio": number(1.3, 0.1)}
    assert "begins at 1.2 and does not cover 1" in words(section("numbers", metrics=off))
    assert "covers 1" in words(section("numbers"))


def test_a_ratio_that_is_unreliable_is_not_said_to_cover_one_or_to_miss_it():
    doubted = number(0.98, 0.01).model_copy(update={"note": "unreliable: k̂ = 0.97 is above 0.70"})
    said = words(section("numbers", metrics={**metrics(), "mean_ratio": doubted}))

    assert "nothing can be said about whether it is 1" in said
    assert "cover" not in said


def test_groups_are_prompts_only_where_the_dump_names_them():
    columns = {"rollout_log_probs": "rollout_log_probs", "old_log_probs": "old_log_probs"}

    named = words(section("dump", dump=dump_facts(columns={**columns, "group_id": "uid"})))
    unnamed = words(section("dump", dump=dump_facts(columns=columns)))

    assert "groups (prompts)" in named
    assert "groups (prompts)" not in unnamed
    assert "without a group_id" in unnamed


def test_one_of_a_thing_is_told_without_an_s():
    facts = dump_facts(files=["a"], rows=1, sequences=1, tokens=1, groups=1)
    bare = {"k3": Number(value=0.1), "mean_ratio": Number(value=1.1)}

    said = words(section("dump", dump=facts))
    assert said.startswith("1 file with 1 row held 1 sequence with 1 unmasked response token, in 1 group")
    caption = table("headline", section("numbers", dump=facts, metrics=bare)).caption
    assert caption == "Policy gap over 1 token of 1 sequence, without intervals: 1 group to resample"
    assert [counted(n, "row") for n in (0, 1, 2, 1234)] == ["0 rows", "1 row", "2 rows", "1,234 rows"]


def test_a_pair_of_policies_that_the_dump_lacks_has_no_column():
    lacking = {"drift2.k1": unknown("missing column x"), "drift2.k3": unknown("missing column x")}
    gap = {"k3": Number(value=0.1), "total.k3": Number(log10=400.0)} | lacking
    said = section("policies", metrics=metrics() | gap)

    assert table("policies", said).header == (
        "number",
        "rollout → old (engine numerics and policy lag)",
        "total: rollout → current",
    )
    assert "old → current (updates within the step): cannot be known: missing column x" in words(said)


def test_a_number_that_no_preset_has_is_a_note_and_no_column():
    def known(**numbers):
        return preset("P", "m", 0.5).model_copy(
            update={"metrics": {"ess_tokens": Number(value=1.0), **numbers}}
        )

    lack = unknown("missing column advantages")
    some = {"a": known(update_removed=lack), "b": known(update_removed=lack, weight_max=Number(log10=400.0))}
    found = table("presets", section("presets", presets=some))
    assert found.header == ("preset", "family", "ess_tokens", "weight_max")
    assert "update_removed cannot be known: missing column advantages." in found.notes

    some["c"] = known(update_removed=Number(value=0.5))
    found = table("presets", section("presets", presets=some))
    assert "update_removed" in found.header
    assert not any("cannot be known" in note for note in found.notes)


def test_intervals_are_spoken_of_where_there_are_some():
    caption = table("headline", section("numbers")).caption
    assert caption.endswith("with 95% intervals from resampling 640 groups")


def test_provenance_is_told_as_json_where_it_is_more_than_a_text():
    facts = dump_facts(provenance={"model": "q3", "regime": {"lags": [2], "quantize": True}})
    rows = table("provenance", section("dump", dump=facts)).rows
    assert rows == (("model", "q3"), ("regime", '{"lags": [2], "quantize": true}'))


def test_presets_that_need_a_column_are_listed_with_what_they_need():
    assert ("ppo_is_bypass", "needs current_log_probs", "PPO-IS") in table("needs", section("presets")).rows


def lacking(column: str, many: int, **columns: str) -> Section:
    given = make_summary().presets | {
        f"p{i}": preset("P", "m", 0.5).model_copy(update={"needs": [column]}) for i in range(many)
    }
    return section("presets", presets=given, dump=dump_facts(columns=columns))


@pytest.mark.parametrize(("many", "folded"), [(7, False), (8, True)])
def test_many_presets_that_need_a_column_are_folded_away(many, folded):
    found = table("needs", lacking("current_log_probs", many))
    assert len(found.rows) == many + 1
    assert found.collapsed is folded


def test_a_dump_of_two_policies_is_told_how_most_presets_could_be_had():
    hint = "The trainer's one policy is read as the old one with --columns old=pi."
    assert hint in words(lacking("old_log_probs", 1, current_log_probs="pi"))
    assert "--columns" not in words(lacking("old_log_probs", 1))
    assert "--columns" not in words(lacking("advantages", 1, current_log_probs="pi"))


def test_the_recommended_and_the_metrics_only_preset_are_marked():
    titles = [row[0] for row in table("presets", section("presets")).rows]
    assert "token_is (recommended)" in titles
    assert "seq_is_metrics (metrics only)" in titles


def test_the_preset_table_starts_from_the_raw_weights():
    shape = table("presets", section("presets"))
    raw = dict(zip(shape.header, shape.rows[0], strict=True))
    assert raw["preset"] == "uncorrected, rollout → old"
    assert raw["ess_sequences"] == metrics()["ess_sequences"]
    assert raw["weight_mean"] == metrics()["mean_ratio"]


def test_losses_are_left_out_where_none_is_known():
    without = preset("x", "y", 0.9)
    numbers = {name: one for name, one in without.metrics.items() if not name.startswith(("pg_", "ppo_"))}
    given = {"x": without.model_copy(update={"metrics": numbers})}
    assert "losses" not in [getattr(block, "id", "") for block in section("presets", presets=given).blocks]


def location(*k3: float, numeric: bool = True) -> Location:
    places = [place(str(i), i, value) for i, value in enumerate(k3)]
    return Location(axis="step", title="step", numeric=numeric, places=places)


def test_a_trend_is_only_claimed_when_the_intervals_at_the_ends_are_apart():
    assert "k3 rises with step" in finding(location(1e-3, 2e-3), "k3")
    assert "k3 falls with step" in finding(location(2e-3, 1e-3), "k3")
    assert finding(location(1e-3, 1.05e-3), "k3").count("cannot be told apart")


def test_a_hill_between_two_equal_ends_is_not_passed_over():
    assert "k3 differs by step: 0.0050" in finding(location(1e-3, 5e-3, 1.05e-3), "k3")


def test_a_difference_between_names_is_only_claimed_when_their_intervals_are_apart():
    assert "k3 differs by step" in finding(location(1e-3, 3e-3, 2e-3, numeric=False), "k3")
    assert finding(location(1e-3, 1.05e-3, numeric=False), "k3").count("cannot be told apart")


def test_one_place_is_too_few_for_a_curve():
    made = section("where", by={"step": location(1e-3)}, histograms={})
    assert [type(block) for block in made.blocks] == [Table]


def test_buckets_stand_on_the_axis_under_their_own_names():
    places = [place(key, i, 1e-3) for i, key in enumerate(("0", "1–2", "3+"))]
    made = section(
        "where", by={"position": Location(axis="position", title="position", numeric=True, places=places)}
    )
    series = made.blocks[0].series[0]
    assert series.x == ("0", "1–2", "3+")
    assert series.kind == "line"


def test_a_preset_that_logs_alone_has_its_names_in_one_column():
    given = table("logged-verl-2025-11", logging({"token_is": {"kl": 0.00205, "chi2_seq": None}}))
    assert given.header == ("name in the trainer", "token_is")
    assert given.rows == (("kl", Number(value=0.00205)), ("chi2_seq", Number()))


def test_what_all_presets_of_a_trainer_log_alike_is_said_once():
    given = logging({"a": {"kl": 0.1, "ess": 0.5}, "b": {"kl": 0.1, "ess": 0.6, "veto": 0.0}})
    assert table("logged-verl-2025-11-same", given).rows == (("kl", Number(value=0.1)),)
    apart = table("logged-verl-2025-11", given)
    assert apart.header[1:] == ("a", "b")
    assert apart.rows[0] == ("ess", Number(value=0.5), Number(value=0.6))
    assert apart.rows[1] == ("veto", None, Number(value=0.0))
    assert apart.notes


def test_a_name_that_not_every_preset_logs_is_not_said_to_be_the_same_under_all():
    given = logging({"a": {"kl": 0.1}, "b": {"kl": 0.1, "veto": 0.0}, "c": {"veto": 0.0}})
    assert [block.id for block in given.blocks if isinstance(block, Table)] == ["logged-verl-2025-11"]


def test_many_presets_with_few_names_stand_in_rows():
    given = table(
        "logged-verl-2025-11", logging({f"p{i}": {"kl": i / 7, "ess": 1 / (i + 1)} for i in range(30)})
    )
    assert given.header == ("preset", "kl", "ess")
    assert [row[0] for row in given.rows] == [f"p{i}" for i in range(30)]


def test_many_presets_with_many_names_are_split_and_every_number_stands_once():
    given = logging({f"p{i}": {f"n{j}": i + j / 100 for j in range(20)} for i in range(30)})
    tables = [block for block in given.blocks if isinstance(block, Table)]
    assert max(len(one.header) for one in tables) <= 1 + ACROSS
    assert [name for one in tables for name in one.header[1:]] == [f"p{i}" for i in range(30)]
    assert sum(cell is not None for one in tables for row in one.rows for cell in row[1:]) == 30 * 20


def logging(names: dict[str, dict[str, float | None]]) -> Section:
    """The section of presets that log these numbers under one set of names."""
    given = {
        name: preset("x", "y", 0.9, logs="verl-2025-11", as_logged=logged) for name, logged in names.items()
    }
    return section("crosswalk", presets=given)


# ---------------------------------------------------------------- families


def many(families: int = 10, each: int = 5, **more) -> dict:
    """Presets of several families, whose members take turns in the catalogue."""
    order = [(family, place) for place in range(each) for family in range(families)]
    return {f"f{f}_{i}": preset("x", f"weight {i}", 0.1 * i, family=f"idea {f}", **more) for f, i in order}


def recommending(method: str) -> Recommendation:
    return recommendation().model_copy(update={"method": method})


def test_of_many_presets_one_of_each_family_is_shown_and_the_recommended_first():
    given = section("presets", presets=many(), recommendation=recommending("f4_3"))
    shown_first = [row[0] for row in table("presets", given).rows if row[1] != "–"]
    assert shown_first == ["f4_3 (recommended)", *(f"f{f}_0" for f in range(10) if f != 4)]


def test_the_first_of_a_family_that_can_be_computed_stands_for_it():
    given = many()
    given["f2_0"] = given["f2_0"].model_copy(update={"needs": ["current_log_probs"], "metrics": {}})
    titles = [row[0] for row in table("presets", section("presets", presets=given)).rows]
    assert "f2_1" in titles
    assert "f2_0" not in titles


def test_every_row_stands_in_the_table_of_its_family_and_families_keep_the_catalogues_order():
    given = section("presets", presets=many(), recommendation=recommending("f4_3"))
    folded = [block for block in given.blocks if isinstance(block, Table) and block.id.startswith("family-")]
    assert [block.caption for block in folded] == [f"idea {f}, 5 presets" for f in range(10)]
    assert all(block.collapsed for block in folded)
    assert [row[0] for row in folded[4].rows] == ["f4_3 (recommended)", "f4_0", "f4_1", "f4_2", "f4_4"]
    assert sum(len(block.rows) for block in folded) == 50


def test_few_presets_are_all_shown_and_no_family_is_folded():
    given = section("presets", presets=many(4, 6))
    assert len([row for row in table("presets", given).rows if row[1] != "–"]) == 24
    assert not [block for block in given.blocks if getattr(block, "id", "").startswith("family-")]


def test_the_shortlist_says_how_to_see_the_others():
    notes = " ".join(table("presets", section("presets", presets=many())).notes)
    assert "all 50" in notes
    assert "compare --presets a,b" in notes


def test_a_family_is_said_to_differ_in_the_aspects_in_which_its_rows_do_and_in_no_other():
    caption = family_caption(
        {"a": {"numerator": "old", "veto": "none"}, "b": {"numerator": "current", "veto": "none"}}
    )
    assert caption.startswith("IcePop: 2 presets that differ in numerator. ")


def test_rows_that_are_defined_alike_are_said_to_be():
    same = {"numerator": "old"}
    assert family_caption({"a": same, "b": same}).startswith("IcePop: 2 presets that are defined alike. ")


def test_how_far_apart_a_family_is_are_its_smallest_and_its_largest_number():
    caption = family_caption(
        {"a": {}, "b": {}, "c": {}}, weight_mean=(0.93, 1.25, 0.99), ess_tokens=(0.5, 0.5, 0.5)
    )
    assert caption.endswith("On this dump weight_mean goes from 0.93 to 1.25.")


def test_equal_numbers_are_said_to_be_equal():
    caption = family_caption({"a": {}, "b": {}}, weight_mean=(0.93, 0.93), ess_tokens=(0.5, 0.5))
    assert caption.endswith("On this dump their weight_mean and ess_tokens are equal.")


def test_a_number_that_is_unknown_everywhere_is_not_spoken_of():
    caption = family_caption({"a": {}, "b": {}}, weight_mean=(None, None), ess_tokens=(0.5, None))
    assert "weight_mean" not in caption
    assert "their ess_tokens are equal" in caption


def test_a_family_of_one_has_nothing_to_be_told_apart_from():
    given = {"a": preset("x", "y", 0.9, family="IcePop"), "b": preset("x", "y", 0.9, family="MIS")}
    assert "families" not in [one.id for one in sections(make_summary(presets=given))]


def test_a_familys_table_has_each_rows_note_and_guards():
    rows = {
        name: preset("x", "y", 0.9, family="IcePop", note=f"note {name}", guards=["g1", "g2"])
        for name in "ab"
    }
    given = table("same-1", section("families", presets=rows))
    cells = dict(zip(given.header, given.rows[1], strict=True))
    assert (cells["note"], cells["guards"], cells["weight and rules"]) == ("note b", "g1; g2", "y")


def family_caption(aspects: dict[str, dict[str, str]], **numbers: tuple[float | None, ...]) -> str:
    """What is said of one family of presets with these aspects, and with these numbers in turn."""
    rows = {
        name: preset("x", "y", 0.9, family="IcePop", aspects=said).model_copy(
            update={"metrics": {key: Number(value=values[place]) for key, values in numbers.items()}}
        )
        for place, (name, said) in enumerate(aspects.items())
    }
    return table("same-1", section("families", presets=rows)).caption + ("" if numbers else " ")


def test_every_number_of_the_summary_is_defined():
    summary = make_summary()
    defined = {row[0] for row in table("definitions", section("made")).rows}
    assert set(summary.metrics) <= defined
    assert {f"PRESET.{name}" for name in summary.presets["token_is"].metrics} <= defined


def test_markdown_holds_verdict_gates_headline_and_presets():
    text = render_markdown(make_summary())
    for expected in (
        "**token_is at upper 2**",
        "✗ failed",
        "| k3 | 0.0020 [0.0019, 0.0022]",
        "| seq_mis |",
        "geometric",
    ):
        assert expected in text


def test_markdown_prints_the_cautions_of_its_numbers():
    text = render_markdown(make_summary())
    assert "| khat_sequences | 1.2\\* [1.0, 1.4] (1) |" in text
    assert "(1) k̂ exceeds 0.67" in text


def test_markdown_escapes_what_would_break_a_table_or_open_a_tag():
    evil = recommendation().model_copy(update={"sentence": "a|b <b>bold</b> *x* `y`\nz [l](http://x)"})
    text = render_markdown(make_summary(recommendation=evil))
    assert r"a\|b &lt;b>bold&lt;/b> \*x\* \`y\` z [l]\(http://x)" in text


def test_markdown_stays_within_what_github_accepts_and_says_what_it_cut():
    text = render_markdown(make_summary(presets=many(2000, 1)))
    assert len(text.encode()) < LIMIT
    assert "does not fit here" in text


def test_markdown_has_a_row_per_family_not_per_preset():
    text = render_markdown(make_summary(presets=many(10, 20)))
    assert [f"| f{f}_0 " in text for f in range(10)] == [True] * 10
    assert "_1 |" not in text


def test_equal_summaries_give_equal_markdown():
    assert render_markdown(make_summary()) == render_markdown(make_summary())
