"""Guards: each trips on its side of its line and not on the other; what one refuses is not chosen."""

from __future__ import annotations

import pytest

from offpol_diag.guards import GUARDS, guarded
from offpol_diag.ladder import choose
from offpol_diag.summary import Number
from tests.estimated import alignment, row
from tests.factory import make_summary, preset

GUARD = {guard.name: guard for guard in GUARDS}
HEAVY = Number(value=0.5, note="unreliable: k̂ = 0.9 is above 0.7")


def quarters(short, long):
    """Shares kept of the shortest and of the longest quarter."""
    return {"kept_length_q1": short, "kept_length_q4": long}


def signs(positive, negative):
    """Shares kept of each sign of the advantage."""
    return {"kept_positive": positive, "kept_negative": negative}


TABLE = [
    # guard, changes of the row, metrics that trip it, metrics that do not
    ("length trap", {}, quarters(0.9, 0.44), quarters(0.9, 0.45)),
    ("signs", {}, signs(0.9, 0.44), signs(0.9, 0.45)),
    ("signs", {}, signs(0.44, 0.9), signs(0.45, 0.9)),
    ("groups", {}, {"groups_lost": 0.11}, {"groups_lost": 0.10}),
    ("ESS", {"judges": "sequence"}, {"ess_sequences": 0.09}, {"ess_sequences": 0.1}),
    ("tail", {"judges": "sequence"}, {"ess_sequences": HEAVY}, {"ess_sequences": 0.5}),
    ("loss scale", {}, {"loss_scale_kept": 0.49}, {"loss_scale_kept": 0.5}),
    ("loss scale", {}, {"loss_scale_kept": 2.01}, {"loss_scale_kept": 2.0}),
]
SILENT = [
    # metrics that say nothing
    {"kept_length_q4": 0.1},
    {"kept_length_q1": 0.9},
    {"kept_negative": 0.1},
    {"kept_positive": 0.1},
    {"kept_length_q1": 0.4, "kept_length_q4": 0.9},
    {"ess_sequences": 0.01},
    {"ess_sequences": HEAVY},
    {},
]


def seen(values):
    return {name: x if isinstance(x, Number) else Number(value=x) for name, x in values.items()}


def tripped(given, values):
    return [guard.name for guard in GUARDS if guard.trips(given, seen(values))]


@pytest.mark.parametrize(("name", "change", "above", "below"), TABLE)
def test_a_guard_trips_on_its_side_of_its_line_alone(name, change, above, below):
    given = row(**change)

    assert tripped(given, above) == [name]
    assert tripped(given, below) == []


@pytest.mark.parametrize(("kept", "names"), [(0.49, ["kept"]), (0.5, [])])
def test_less_than_half_of_the_weight_is_too_little(kept, names):
    assert tripped(row(kept=kept), {}) == names


def test_a_method_without_a_preset_cannot_be_recommended():
    assert tripped(row(method=None), {}) == ["preset"]


@pytest.mark.parametrize("values", SILENT, ids=str)
def test_what_is_unknown_or_no_matter_of_tokens_refuses_nothing(values):
    assert tripped(row(), values) == []


@pytest.mark.parametrize("name", ["ess_sequences", "groups_lost", "loss_scale_kept", "kept_length_q4"])
def test_a_number_without_a_value_refuses_nothing(name):
    values = {"kept_length_q1": 0.9, name: Number(unknown="missing column")}
    assert tripped(row(judges="sequence"), values) == []


def test_every_guard_is_in_the_table_and_says_why():
    assert {row[0] for row in TABLE} | {"kept", "preset"} == set(GUARD)
    assert all(guard.why for guard in GUARDS)
    assert len({guard.why for guard in GUARDS}) == len(GUARDS)


def summary(presets=None, **rows):
    return make_summary(presets=presets or {}, alignment=alignment(**rows))


def test_a_refused_row_says_why_and_the_others_nothing():
    found = guarded(summary(seq_tis_2_0=row("seq_tis_2.0", 0.5, kept=0.2))).alignment.rows

    assert found["seq_tis_2.0"].refused == GUARD["kept"].why
    assert [name for name, one in found.items() if one.refused] == ["seq_tis_2.0"]


def test_a_refused_candidate_is_not_chosen_whatever_its_score():
    free = summary(token_mask_0_5_2_0=row("token_mask_0.5_2.0", 5.0))
    trapped = summary(token_mask_0_5_2_0=row("token_mask_0.5_2.0", 5.0, kept=0.2))

    assert choose(guarded(free).alignment).best == "token_mask_0.5_2.0"
    assert choose(guarded(trapped).alignment).best == "token_tis_2.0"


def analysed(**values):
    return preset("x", "y", 0.9).model_copy(update={"metrics": seen(values)})


def test_a_row_is_judged_by_the_metrics_of_its_preset():
    found = guarded(summary({"seq_is": analysed(groups_lost=0.5)})).alignment.rows
    assert [name for name, one in found.items() if one.refused] == ["seq_tis_2.0"]


def test_metrics_of_a_preset_at_other_thresholds_say_nothing_of_a_row():
    """geo_rs_1% is decoupled_geo_rs with wider bounds than those that were analysed."""
    found = guarded(summary({"decoupled_geo_rs": analysed(groups_lost=0.5)})).alignment.rows
    assert [name for name, one in found.items() if one.refused] == ["geo_rs_0.1%"]


def test_a_refusal_of_before_does_not_outlive_its_reason():
    once = guarded(summary(seq_tis_2_0=row("seq_tis_2.0", kept=0.2, refused="an older reason")))
    assert once.alignment.rows["seq_tis_2.0"].refused == GUARD["kept"].why
    freed = guarded(summary(seq_tis_2_0=row("seq_tis_2.0", refused="an older reason")))
    assert freed.alignment.rows["seq_tis_2.0"].refused is None


def test_without_estimates_there_is_nothing_to_refuse():
    plain = make_summary()
    assert plain.alignment is None
    assert guarded(plain) is plain


def test_guarding_changes_nothing_but_refusals():
    before = summary(seq_tis_2_0=row("seq_tis_2.0", kept=0.2))
    after = guarded(before)

    assert after.model_dump(exclude={"alignment"}) == before.model_dump(exclude={"alignment"})
    for name, one in after.alignment.rows.items():
        assert one.model_copy(update={"refused": None}) == before.alignment.rows[name]
