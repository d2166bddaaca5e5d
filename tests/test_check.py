"""`check`: what a trainer logs of each step of a dump, and curves with planted differences beside it."""

import json
import math
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.check import by_step, curves
from offpol_diag.cli import app
from offpol_diag.dump.batch import joined
from offpol_diag.dump.read import open_dump
from offpol_diag.errors import UsageError
from offpol_diag.presets.catalogue import load
from offpol_diag.trainers.logged import LOGS, steps_of

SAMPLE = Path(__file__).parents[1] / "sample_data" / "stale.parquet"
STEPS = [3, 4, 5, 6]
NAME = "rollout_corr/k3_kl"
RAN = ("--for", "verl", "--presets", "token_is")


def check(dump, trainer="verl", presets="token_is", **more):
    return offpol_diag.check(dump, trainer=trainer, presets=presets, **more)


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """Write a dump of four steps, the rows of the first two in turn."""
    table = pq.read_table(SAMPLE)
    of = {step: [row for row in table.to_pylist() if row["step"] == step] for step in STEPS}
    mixed = [row for pair in zip(of[3], of[4], strict=True) for row in pair]
    file = tmp_path_factory.mktemp("check") / "dump.parquet"
    pq.write_table(pa.Table.from_pylist([*mixed, *of[5], *of[6]], schema=table.schema), file)
    return file


@pytest.fixture(scope="module")
def said(dump):
    """Return step → name → what verl logs of it under token_is."""
    found = check(dump)
    numbers = found.numbers["token_is"].items()
    return {step: {name: x[at] for name, x in numbers} for at, step in enumerate(found.steps)}


def history(folder, values, name="history.jsonl"):
    (folder / name).write_text("\n".join(json.dumps({"_step": step, **of}) for step, of in values.items()))
    return folder / name


def ran(*words):
    return CliRunner().invoke(app, ["check", *map(str, words)])


def test_a_step_has_the_numbers_of_its_rows_alone(dump, said, tmp_path):
    assert list(said) == STEPS
    for step in STEPS:
        table = pq.read_table(dump)
        pq.write_table(table.filter(pc.equal(table["step"], step)), tmp_path / "one.parquet")
        read = open_dump([str(tmp_path / "one.parquet")])
        (one,) = steps_of(joined([*read.batches()]), [load()["token_is"]], read.columns)
        assert said[step] == pytest.approx(LOGS["verl-2026-03"](one), rel=1e-12)
        assert {"actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower"} < set(said[step])


def test_a_dump_without_steps_is_one_and_without_other_columns_logs_less(dump, tmp_path):
    table = pq.read_table(dump).drop_columns(["step", "current_log_probs"])
    pq.write_table(table, file := tmp_path / "one.parquet")
    found = check(file)
    assert found.steps == [None]
    assert not any(name.startswith("actor/") for name in found.numbers["token_is"])
    logged = history(tmp_path, {7: {name: x for name, (x,) in found.numbers["token_is"].items()}})
    assert not check(file, logged=logged).different


def test_a_step_is_given_as_soon_as_it_is_whole(dump):
    read = open_dump([str(dump)], batch_tokens=2000)
    batches, seen = [*read.batches()], []
    assert len(batches) > 8
    read.batches = lambda: (seen.append(1) or one for one in batches)
    steps = by_step(read)
    step, batch = next(steps)
    assert (step, batch.sequences) == (3, 64)
    assert len(seen) <= 1.6 * len(batches), "all of them are read once before, to count"
    assert [step, *(one for one, _ in steps)] == STEPS


WHO = [
    ("verl@2025-10", {}, "verl@2025-10", "mismatch/mismatch_kl"),
    ("verl", {"versions": {"verl": "0.7.1"}}, "verl@2026-01", "rollout_corr/kl"),
    ("", {"trainer": "verl", "versions": {"verl": "0.6.0"}}, "verl@2025-10", "mismatch/mismatch_kl"),
    ("", {"trainer": "verl"}, "verl@2026-03", "training/rollout_probs_diff_mean"),
    ("", {"trainer": "trl"}, "trl", "sampling/importance_sampling_ratio/mean"),
    ("Nemo_RL", {}, "nemo-rl", "train/gen_kl_error"),
]


@pytest.mark.parametrize(("asked", "metadata", "who", "name"), WHO)
def test_who_logs_is_as_asked_else_as_the_metadata_have_it(asked, metadata, who, name, tmp_path):
    table = pq.read_table(SAMPLE).slice(0, 40)
    file = tmp_path / "dump.parquet"
    pq.write_table(table.replace_schema_metadata({"offpol_diag": json.dumps(metadata)}), file)
    found = check(file, asked or None)
    assert found.trainer == who
    assert name in found.numbers["token_is"]


def test_presets_are_the_recommended_one_and_the_trainers_default_unless_they_are_named(dump):
    best = offpol_diag.analyze(dump, device="cpu", progress=False).recommendation.method
    found = check(dump, presets=None)
    assert list(found.numbers) == list(dict.fromkeys([best, "decoupled_geo_rs"]))


def test_curves_are_laid_beside_the_preset_that_ran(dump, said, tmp_path):
    found = check(dump, presets="seq_is,token_is@3,token_is", logged=history(tmp_path, said))
    assert (found.preset, found.different, found.unknown, found.unmatched) == ("token_is", [], [], [])
    assert len(found.rows) == len(said[3])
    assert {row.steps for row in found.rows} == {4}


PLANTED = [  # factors of one curve by step, and which step differs first, which most, and how many do
    ({5: 1.01, 6: 1.02}, 5, 6, 2),
    ({4: 0.9}, 4, 4, 1),
    ({4: 1 + 5e-6}, None, 4, 0),  # less than float32 rounds
    ({6: math.nan}, 6, 6, 1),
]


@pytest.mark.parametrize(("factors", "first", "worst", "many"), PLANTED, ids=str)
def test_planted_differences_are_found_from_their_first_step(
    dump, said, factors, first, worst, many, tmp_path
):
    wrong = {step: of | {NAME: of[NAME] * factors.get(step, 1.0)} for step, of in said.items()}
    file = history(tmp_path, wrong)
    found = check(dump, logged=file)
    (row,) = [row for row in found.rows if row.name == NAME]
    assert (row.first, row.worst, row.differs) == (first, worst, many)
    assert [one.name for one in found.different] == [found.rows[0].name] * bool(many)
    words = f"1 of 35 metrics differs, from step {first} on" if many else "Equal: all 35 metrics"
    done = ran(dump, "--logged", file, *RAN, "--strict")
    assert (done.exit_code, words in " ".join(done.output.split())) == (int(bool(many)), True)


def test_names_that_only_one_side_knows_are_named(dump, said, tmp_path):
    named = {
        step: {"loss" if name == NAME else name: x for name, x in of.items()} for step, of in said.items()
    }
    found = " ".join(ran(dump, "--logged", history(tmp_path, named), *RAN).output.split())
    assert "verl@2026-03 logs nothing of the name loss." in found
    assert f"No single curve has the name of {NAME}." in found


def test_a_curve_may_have_a_prefix_where_no_other_has_the_name(dump, said, tmp_path):
    names = {NAME: [f"train/{NAME}"], "rollout_corr/kl": ["a/rollout_corr/kl", "b/rollout_corr/kl"]}
    logged = {step: {one: of[name] for name in names for one in names[name]} for step, of in said.items()}
    found = check(dump, logged=history(tmp_path, logged))
    assert [(row.name, row.curve) for row in found.rows] == [(NAME, f"train/{NAME}")]


@pytest.mark.parametrize(
    ("name", "text", "metric"),
    [
        ("w.csv", '"Step","run - train/x","run - train/x__MIN"\n3,1.5,0\n', "train/x"),
        ("w.csv", '"train/global_step","a - b - train/x","a - b - _step"\n3,1.5,90\n4,,91\n', "train/x"),
        ("h.jsonl", '{"_step": 9, "global_step": 3, "train/x": 1.5}\n{"x": 1}\n', "train/x"),
        ("h.jsonl", '{"_step": 3, "train/x": 1.5, "other": null}\n{"_step": 3, "train/x": NaN}\n', "train/x"),
    ],
)
def test_exports_of_trackers_are_read(name, text, metric, tmp_path):
    (tmp_path / name).write_text(text)
    pq.write_table(pa.table({"_step": [3, 4], metric: [1.5, None]}), tmp_path / "h.parquet")
    assert curves([tmp_path / name])[metric] == curves([tmp_path / "h.parquet"])[metric] == {3: 1.5}


@pytest.mark.parametrize("text", ["", "[1]", "a,b\n1,2\n", "Step,a - x,b - x\n1,2,3\n", "\xff\0\xff" * 99])
def test_a_file_without_curves_is_one_error(text, tmp_path):
    for name in ("x.csv", "x.jsonl", "x.parquet", "x.json"):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError):
            curves([tmp_path / name])


REFUSED = [
    (["--for", "colossalai"], "what colossalai logs is not known"),
    (["--for", "trl@2026-01"], "trl has no generation '2026-01'"),
    (["--for", "verl", "--presets", "pure_is@x=1"], "x=1"),
    ([], "the dump does not name its trainer"),
    ([*RAN, "--logged", "other.jsonl"], "no curve has a name that verl@2026-03 logs under token_is"),
    ([*RAN, "--logged", "late.jsonl"], "at a step of the dump hint: the dump has steps 3 to 6, and it logs"),
]


@pytest.mark.parametrize(("words", "error"), REFUSED)
def test_what_cannot_be_compared_is_one_error(dump, words, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    history(tmp_path, {3: {"loss": 1.0}}, "other.jsonl")
    history(tmp_path, {99: {NAME: 1.0}}, "late.jsonl")
    done = ran(dump, *words)
    assert done.exit_code == 2
    assert error in " ".join(done.stderr.split())
    assert done.stderr.count("error:") == done.stderr.count("hint:") == 1


def test_numbers_are_printed_of_some_steps_and_with_v_of_every_one(dump, said):
    brief, every = ran(dump, *RAN).output, ran(dump, *RAN, "-v").output
    ends = [f"{said[step][NAME]:.4g}" for step in (3, 4, 6)]
    assert re.search(r"logged name +step 3 +step 4 +step 6\n", brief)
    assert re.search(rf"{NAME} +{' +'.join(ends)}\n", brief)
    assert re.search(rf"step 5 +{NAME} +{said[5][NAME]:.4g}\n", every)


def test_json_page_and_markdown_say_the_same(dump, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wrong = {step: of | {NAME: of[NAME] * 1.5, "<b>\x1b[2J": 1.0} for step, of in said.items()}
    history(tmp_path, wrong)
    words = ("--logged", "history.jsonl", *RAN, "--json", "r.json", "--html", "r.html", "--md", "r.md")
    assert ran(dump, *words).exit_code == 0
    for text in (Path("r.html").read_text(), Path("r.md").read_text()):
        assert "1 of 35 metrics differs, from step 3 on" in text
        assert "<b>\x1b" not in text
    told = json.loads(Path("r.json").read_text())
    assert (told["rows"][0]["name"], told["rows"][0]["off"]) == (NAME, pytest.approx(1 / 3))
    assert told["numbers"]["token_is"][NAME] == [of[NAME] for of in said.values()]
