"""`check`: curves of independent restatements of three trainers, with and without planted differences."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import verl_reference
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.check import curves
from offpol_diag.check.verdict import same
from offpol_diag.cli import app
from offpol_diag.errors import UsageError
from offpol_diag.report.check import not_finite, notes
from tests.trainers import logged_hub, logged_slime
from tests.trainers.padded import padded
from tests.trainers.samples import samples

SAMPLE = Path(__file__).parents[1] / "sample_data" / "collapse.parquet"
STEPS, ROWS, START = 4, 24, 3


def verl(rows, bound=2.0, level="token"):
    names = ("response_mask", "old_log_probs", "rollout_log_probs", "current_log_probs")
    columns = {name: [row[name] for row in rows] for name in names}
    config = {
        "rollout_is": level,
        "rollout_is_threshold": bound,
        "rollout_is_batch_normalize": False,
    }
    return verl_reference.run("2025-11", columns, config).metrics


def trl(rows, bound=3.0, mode="token_truncate"):
    return logged_hub.trl(padded(rows), mode=mode, clip_max=bound)


def slime(rows, bound=2.0):
    return logged_slime.tis(samples(rows), tis_clip=bound)


TRAINERS = {
    "verl": (verl, "token_is", "rollout_corr/k3_kl", "rollout_corr/rollout_is_ratio_fraction_high"),
    "trl": (
        trl,
        "token_is@3",
        "sampling/sampling_logp_difference/mean",
        "sampling/importance_sampling_ratio/mean",
    ),
    "slime": (slime, "token_is", "train/train_rollout_logprob_abs_diff", "train/tis_clipfrac"),
}
"""Restatement, its preset, and a metric of the gap and one of the weight."""


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write a dump of four steps; return it with its rows by step, 24 each, masked in places."""
    table = pq.read_table(SAMPLE)
    rows = table.to_pylist()
    steps = {step: [row for row in rows if row["step"] == START + step][:ROWS] for step in range(STEPS)}
    for some in steps.values():
        for i, row in enumerate(some):  # masked tokens whose log-probs differ, and unequal lengths
            mask = row["response_mask"]
            row["response_mask"] = [int(m and (t + i) % (i % 5 + 2) > 0) for t, m in enumerate(mask)]
            row["rollout_log_probs"] = [
                x - 0.01 * (i % 7 + 1) * (t % 3) - 0.9 * (t % 97 == 0) - 0.6 * (t % 89 == 1)
                for t, x in enumerate(row["rollout_log_probs"])
            ]
    file = tmp_path_factory.mktemp("check") / "dump.parquet"
    kept = [row for step in steps.values() for row in step]
    pq.write_table(pa.Table.from_pylist(kept, schema=table.schema), file)
    read = pq.read_table(file).to_pylist()  # as float32 rounds them
    return file, {s + START: [r for r in read if r["step"] == s + START] for s in range(STEPS)}


def reversed_ratio(run, rows):
    """Exchange the two policies."""
    exchanged = {"rollout_log_probs": "old_log_probs", "old_log_probs": "rollout_log_probs"}
    return run([row | {name: row[other] for name, other in exchanged.items()} for row in rows])


def mean_of_ranks(run, rows):
    """Average over four data-parallel ranks without their sizes."""
    every = [run(rows[at : at + 6]) for at in range(0, ROWS, 6)]
    return {name: sum(one[name] for one in every) / len(every) for name in every[0]}


PLANTED = {
    "reversed": reversed_ratio,
    "mean_of_ranks": mean_of_ranks,
    "upper_1.5": lambda run, rows: run(rows, 1.5),
}


def command(*words):
    return CliRunner().invoke(app, ["check", *map(str, words)])


def write(folder, values):
    file = folder / "history.jsonl"
    lines = (json.dumps({"_step": step, **{k: float(x) for k, x in v.items()}}) for step, v in values.items())
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("planted", PLANTED)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_metric_differs_at_the_steps_at_which_another_definition_changes_it(
    trainer, planted, dump, tmp_path
):
    file, rows = dump
    run, preset, *_ = TRAINERS[trainer]
    right = {step: run(rows[step]) for step in (START, START + 1)}
    values = {START: right[START], START + 1: PLANTED[planted](run, rows[START + 1])}

    found = offpol_diag.check(file, write(tmp_path, values), preset=preset)
    assert len(found.metrics) >= len(values[START]) - 1
    for one in found.metrics:
        changed = [at for at in values if not same(values[at][one.name], right[at][one.name])]
        assert one.different == changed, one.name
        assert one.worst == (changed or [one.worst])[0]


def test_the_first_step_that_differs_is_said_and_the_exit_code_is_one(dump, tmp_path):
    file, rows = dump
    values = {step: slime(some) for step, some in rows.items()}
    values[START + 2]["train/tis_abs"] *= 1.001
    logged = write(tmp_path, values)
    result = tmp_path / "r.json"
    ran = command(file, "--logged", logged, "--preset", "token_is", "--strict", "--json", result)

    assert ran.exit_code == 1
    said = " ".join(ran.output.split())  # however wide the terminal is
    assert "Different: 1 of 7 metrics differs from step 5 on (train/tis_abs by 0.10% at step 5)" in said
    (one,) = [m for m in json.loads(result.read_text())["metrics"] if m["different"]]
    assert (one["name"], one["different"]) == ("train/tis_abs", [START + 2])


# ---------------------------------------------------------------- every trainer


# ---------------------------------------------------------------- which trainer and preset


@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainer_and_preset_are_found_by_the_names_and_the_numbers(trainer, dump, tmp_path):
    file, rows = dump
    if trainer == "slime":
        table = pq.read_table(file)
        file = tmp_path / "said.parquet"
        pq.write_table(table.replace_schema_metadata({"offpol_diag.trainer": trainer}), file)
    run, preset, _, _ = TRAINERS[trainer]
    right = {step: run(some) for step, some in rows.items()}

    found = offpol_diag.check(file, write(tmp_path, right))
    assert (found.trainer, found.preset, found.equal) == (trainer, preset, True)
    assert len(found.metrics) >= 5


def test_a_trainer_whose_names_no_curve_has_is_an_error(dump, tmp_path):
    logged = write(tmp_path, {START: trl(dump[1][START])})
    with pytest.raises(UsageError, match="no curve has a name that verl logs"):
        offpol_diag.check(dump[0], logged, trainer="verl")


# ---------------------------------------------------------------- steps


def test_values_that_are_not_finite_differ_and_are_named(dump, tmp_path):
    file, rows = dump
    values = {step: slime(some) for step, some in rows.items()}
    values[START + 1]["train/tis"] = float("nan")
    del values[START + 2]["train/tis"]

    found = offpol_diag.check(file, write(tmp_path, values), preset="token_is")
    (one,) = found.different
    assert (one.name, one.different) == ("train/tis", [START + 1])
    assert [point.step for point in one.points] == [START, START + 1, START + 3]
    assert [point.logged is None for point in one.points] == [False, True, False]
    assert json.loads(found.to_json())["metrics"]
    assert not_finite(found) == (f"train/tis is NaN or infinite at step {START + 1}.",)


@pytest.mark.parametrize("by", [1, -1, 1000])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_steps_that_are_numbered_otherwise_throughout_are_a_note_and_no_difference(
    trainer, by, dump, tmp_path
):
    file, rows = dump
    run, preset, _, _ = TRAINERS[trainer]
    logged = write(tmp_path, {step + by: run(some) for step, some in rows.items()})

    found = offpol_diag.check(file, logged, preset=preset)
    assert (found.equal, found.shift, found.steps, found.missing) == (True, by, [*rows], [])
    how = {1: "one higher", -1: "one lower", 1000: "1,000 higher"}[by]
    (note,) = [line for line in notes(found) if line.startswith("Numbering differs")]
    assert note == (
        f"Numbering differs: the curves count every step {how} than the dump, whose step {START} is their "
        f"{START + by}. Steps here are the dump's."
    )
    done = CliRunner().invoke(app, ["check", str(file), "--logged", str(logged), "--strict"])
    assert done.exit_code == 0
    assert f"count every step {how}" in " ".join(done.output.split())


def test_one_step_logged_under_another_number_is_the_same_note(dump, tmp_path):
    rows = pq.read_table(dump[0]).filter(pc.field("step") == START)
    pq.write_table(rows, tmp_path / "one.parquet")

    found = offpol_diag.check(tmp_path / "one.parquet", write(tmp_path, {START + 1: trl(dump[1][START])}))
    assert (found.equal, found.shift, found.steps) == (True, 1, [START])


def test_a_metric_that_lags_while_the_others_do_not_is_a_difference(dump, tmp_path):
    file, rows = dump
    name = TRAINERS["slime"][2]
    values = {step: slime(some) for step, some in rows.items()}
    late = {step: one | {name: values[max(step - 1, START)][name]} for step, one in values.items()}

    found = offpol_diag.check(file, write(tmp_path, late), preset="token_is")
    assert (found.shift, [one.name for one in found.different]) == (0, [name])


def test_a_shift_that_leaves_one_metric_different_is_none(dump, tmp_path):
    file, rows = dump
    name = TRAINERS["slime"][2]
    values = {step + 1: slime(some) for step, some in rows.items()}
    values[START + 2][name] *= 1.01

    found = offpol_diag.check(file, write(tmp_path, values), preset="token_is")
    assert (found.equal, found.shift) == (False, 0)


def test_steps_that_are_missing_are_listed_and_numbers_one_apart_are_hinted_at(dump, tmp_path):
    file, rows = dump
    some = {step: slime(rows[step]) for step in (START, START + 2)}
    assert offpol_diag.check(file, write(tmp_path, some), preset="token_is").missing == [
        START + 1,
        START + 3,
    ]

    with pytest.raises(UsageError) as caught:
        offpol_diag.check(file, write(tmp_path, {START - 1: some[START]}), preset="token_is")
    assert "their steps are one apart" in caught.value.hint


# ---------------------------------------------------------------- files

CURVE = {"train/x": {3: 1.5, 4: 2.5}, "bad": {3: float("nan"), 4: 1.0}}
HISTORY = [{"_step": step, "train/x": x, "bad": CURVE["bad"][step]} for step, x in CURVE["train/x"].items()]


@pytest.mark.parametrize("name", ["h.csv", "h.jsonl", "h.parquet"])
def test_what_pandas_and_arrow_write_is_read(name, tmp_path):
    frame = import_module("pandas").DataFrame(HISTORY)
    frame.to_csv(tmp_path / "h.csv", na_rep="NaN")
    (tmp_path / "h.jsonl").write_text("\n".join(map(json.dumps, frame.to_dict("records"))))
    pq.write_table(pa.Table.from_pylist(HISTORY), tmp_path / "h.parquet")

    found = curves.read([tmp_path / name])
    for name, points in CURVE.items():
        assert found[name] == pytest.approx(points, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "text", "metric"),
    [
        ("w.csv", '"Step","run - train/x","run - train/x__MIN"\n3,1.5,0\n', "train/x"),
        ("w.csv", '"train/global_step","a - b - train/x","a - b - _step"\n3,1.5,90\n4,,91\n', "train/x"),
        ("w.csv", 'step,train/x,note\n3,1.5,"a, b"\n\n4\n', "train/x"),
        ("h.jsonl", '{"_step": 3, "train": {"x": 1.5}, "other": null}\n', "train/x"),
        ("h.jsonl", '{"_step": 9, "global_step": 3, "train/x": 1.5}\n{"x": 1}\n', "train/x"),
        ("run-a-tag-train_x.csv", "Wall time,Step,Value\n1.0,3,1.5\n", "train_x"),
    ],
)
def test_exports_of_trackers_are_read(name, text, metric, tmp_path):
    (tmp_path / name).write_text(text)
    found = curves.read([tmp_path / name])

    assert found[metric] == {3: 1.5}
    assert curves.matched(found, ["train/x"])[0] == {"train/x": metric}


def test_curves_of_evaluation_are_not_taken_for_those_of_training():
    both = {"train/sampling/x": {}, "eval/sampling/x": {}}
    assert curves.matched(both, ["sampling/x"]) == ({"sampling/x": "train/sampling/x"}, {})
    several = {"a/sampling/x": {}, "b/sampling/x": {}}
    assert curves.matched(several, ["sampling/x"]) == ({}, {"sampling/x": list(several)})


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "a,b\n1,2\n", '{"step": 1}', "Step,a - x,b - x\n1,2,3\n", "\xff\0\xff" * 99]
)
@pytest.mark.parametrize("name", ["x.csv", "x.jsonl", "x.parquet", "x.json"])
def test_a_file_without_curves_is_one_error(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError):
        curves.read([tmp_path / name])


# ---------------------------------------------------------------- what is printed and written


@pytest.fixture(scope="module")
def wrong(dump, tmp_path_factory):
    """Make curves of verl that are ranks' means from the second step on, with a name that is markup."""
    file, rows = dump
    values = {step: (verl if step == START else partial(mean_of_ranks, verl))(rows[step]) for step in rows}
    values[START]["<b>\x1b[2J"] = 1.0
    return file, write(tmp_path_factory.mktemp("wrong"), values)


def test_the_first_lines_say_what_differs_by_how_much_and_since_when(wrong):
    ran = command(wrong[0], "--logged", wrong[1])
    text = " ".join(ran.output.split())

    assert ran.exit_code == 0
    assert "history.jsonl Different: 16 of 29 metrics differ from step 4 on (rollout_corr/" in text
    assert "verl logs nothing of the name <b>" in text
    assert command(wrong[0], "--logged", wrong[1], "--strict").exit_code == 1


def test_quiet_is_one_line_and_verbose_has_every_metric(wrong):
    quiet, brief, whole = (
        command(wrong[0], "--logged", wrong[1], *way).output for way in (["-q"], [], ["-v"])
    )
    assert quiet.startswith("Different: 16 of 29 metrics differ from step 4 on")
    assert quiet.count("\n") == 1
    assert "The other 13 are equal." in brief
    assert "-v: Every metric." in brief
    assert "rollout_corr/training_ppl" not in brief
    assert "rollout_corr/training_ppl" in whole


def test_curves_named_twice_count_once(wrong, tmp_path):
    (tmp_path / "again.jsonl").symlink_to(wrong[1])
    once, twice = (
        command(wrong[0], "-q", *(f"--logged={one}" for one in names))
        for names in ([wrong[1]], [wrong[1], wrong[1].parent / "." / wrong[1].name, tmp_path / "again.jsonl"])
    )
    assert twice.output == once.output


def test_json_page_and_markdown_say_the_same_and_are_drawn_again(wrong, tmp_path):
    ways = {name: tmp_path / f"r.{name}" for name in ("json", "html", "md")}
    assert (
        command(
            wrong[0], "--logged", wrong[1], *(x for k, v in ways.items() for x in (f"--{k}", v))
        ).exit_code
        == 0
    )
    found = json.loads(ways["json"].read_text())
    page, text = ways["html"].read_text(), ways["md"].read_text()

    assert len([one for one in found["metrics"] if one["verdict"] == "different"]) == 16
    sentence = "16 of 29 metrics differ from step 4 on"
    assert sentence in text
    assert sentence in page
    assert page.count("<svg") >= 2
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    again = tmp_path / "again.html"
    assert CliRunner().invoke(app, ["report", str(ways["json"]), "--html", str(again)]).exit_code == 0
    assert again.read_text() == page


def test_a_damaged_result_is_one_error(wrong, tmp_path):
    command(wrong[0], "--logged", wrong[1], "--json", tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text())
    found["metrics"][0]["worst"] = 99
    (tmp_path / "r.json").write_text(json.dumps(found))
    ran = CliRunner().invoke(app, ["report", str(tmp_path / "r.json")])

    assert ran.exit_code == 2
    assert "a step that differs has no point" in ran.output


def test_what_was_not_compared_is_said(dump, tmp_path):
    file, rows = dump
    values = {step: dict(slime(some)) for step, some in list(rows.items())[:3]}
    for some in values.values():
        some["a/train/ppo_kl"] = some["b/train/ppo_kl"] = some.pop("train/ppo_kl")
        del some["train/ois"]
    ran = command(file, "--logged", write(tmp_path, values), "--preset", "token_is")
    text = " ".join(ran.output.split())

    assert "Equal: all 5 metrics at 3 steps (3 to 5) are what the dump says, to float32" in text
    assert "No curve has a point at step 6, which the dump has." in text
    assert "Not compared, as several curves may be it: train/ppo_kl (a/train/ppo_kl, b/train/ppo_kl)." in text
    assert "No curve holds train/ois." in text


@pytest.mark.parametrize("values", [{999: {"train/tis": 1.0}}, {START: {"loss": 1.0}}])
def test_nothing_to_compare_is_exit_code_two(values, dump, tmp_path):
    ran = command(dump[0], "--logged", write(tmp_path, values), "--preset", "token_is")

    assert ran.exit_code == 2
    assert "hint:" in ran.output
