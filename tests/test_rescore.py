"""`rescore`: which side is reproduced, what the other computes, by place, and what is bad input."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.cli import app
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.numerals import rounded
from offpol_diag.rescore import models
from offpol_diag.rescore.rows import read
from offpol_diag.rescore.score import Head, score
from offpol_diag.rescore.variants import in_bf16, put, table
from offpol_diag.result import load
from tests.factory import DumpFile

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "sample_data" / "adapter_not_loaded"
GROUPS = 8


@pytest.fixture(scope="module")
def loaded():
    """Load the sample's model once; every test leaves it as it was."""
    torch.set_num_threads(1)
    return models.load([str(SAMPLE / "adapter")], device="cpu")


def test_the_base_model_that_an_adapter_names_is_looked_for_beside_it_first(tmp_path, monkeypatch):
    (tmp_path / "base").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert models.load([str(SAMPLE / "adapter")], device="cpu").model is not None


@pytest.fixture(scope="module")
def responses():
    from offpol_diag.dump.convert import open_dump

    return read(open_dump([str(SAMPLE / "dump.parquet")]), GROUPS, 1, 0)


@pytest.fixture(scope="module")
def numbers(loaded, responses):
    """Score the sample's responses under every hypothesis, as a trainer in bf16 would: name → lists."""
    ends, scored = np.cumsum(responses.sizes)[:-1], {}
    for one in table(loaded.model, responses.rows, {})[0]:
        with one.of(loaded.model) as model, contextlib.ExitStack() as back:
            in_bf16(model, back)
            (values,) = score(model, one.rows(responses.rows), [one.head._replace(logits=torch.bfloat16)])
        scored[one.name] = np.split(values, ends)
    return scored


def write(path, responses, engine, trainer, **more):
    """Write a dump of the sample's responses with two columns."""
    rows = responses.rows
    with DumpFile(path, trainer="ours", temperature=1.0) as out:
        out.write(
            rollout_log_probs=engine,
            old_log_probs=trainer,
            token_ids=[row.ids[row.start :] for row in rows],
            prompt_ids=[row.ids[: row.start] for row in rows],
            group_id=[int(one) for one in responses.group],
            **more,
        )
    return path


def asked(path, loaded, **more):
    return offpol_diag.rescore(path, loaded.model, **{"sample": GROUPS} | more)


# ---------------------------------------------------------------- the verdict of three


def test_the_sample_is_told_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["rescore", str(SAMPLE / "dump.parquet"), "--model", str(SAMPLE / "adapter"), "--sample", "6"]
    more = ["--try", "adapter off,temperature", "--json", "r.json", "--md", "r.md", "-o", "r.html"]

    ran = CliRunner().invoke(app, [*words, *more])

    assert ran.exit_code == 0, ran.output
    assert "The engine is not reproduced" in ran.stdout
    assert "the base model without the adapter" in " ".join(ran.stdout.split())
    assert "enable_lora" in ran.stdout
    assert "trainer and reference" in ran.stdout
    found = load(Path("r.json")).reference
    assert found.verdict == "engine"
    assert (found.engine.state, found.engine.variant) == ("variant", "adapter off")
    assert found.engine.reproduced
    assert found.trainer.state == "same"
    assert found.trainer.distance < 3 * found.floor < found.engine.distance
    for file in ("r.md", "r.html"):
        text = Path(file).read_text()
        assert "without the adapter" in text
        assert "adapter off" in text
    drawn = CliRunner().invoke(app, ["report", "r.json", "-o", "again.html"])
    assert drawn.exit_code == 0
    assert Path("again.html").read_text() == Path("r.html").read_text()
    strict = CliRunner().invoke(app, [*words, "--try", "none", "--strict", "-q"])
    assert strict.exit_code == 1
    assert "The engine is not reproduced" in strict.stdout
    kept = pq.read_table("dump-rescored.parquet")
    assert "reference_log_probs" in kept.column_names
    names = ["again.html", "dump-rescored.parquet", "r.html", "r.json", "r.md"]
    assert sorted(path.name for path in Path().iterdir()) == names


def test_a_side_that_is_near_a_hypothesis_but_not_within_its_noise_is_not_reproduced(
    tmp_path, loaded, responses, numbers
):
    floor = asked(write(tmp_path / "a.parquet", responses, numbers["as given"], numbers["as given"]), loaded)
    rng, size = np.random.default_rng(0), 2.5 * floor.reference.floor
    noisy = [np.minimum(one + rng.normal(0, size, len(one)), 0.0) for one in numbers["adapter off"]]
    path = write(tmp_path / "d.parquet", responses, noisy, numbers["as given"])

    engine = asked(path, loaded, to=tmp_path / "b.parquet").reference.engine

    assert (engine.state, engine.variant, engine.reproduced) == ("variant", "adapter off", False)


def test_analyze_and_doctor_of_what_is_written_say_the_same(tmp_path, loaded, responses, numbers):
    path = write(tmp_path / "d.parquet", responses, numbers["adapter off"], numbers["as given"])
    first = asked(path, loaded, to=tmp_path / "scored.parquet", tries="none")
    sides = first.reference
    sizes = [rounded(one) for one in (sides.trainer.distance, sides.engine.distance, sides.apart)]
    distances = first.to_html().partition("mean |Δ| of a token, nats")[2].partition("</table>")[0]
    assert all(one in distances for one in sizes)

    for function in (offpol_diag.doctor, offpol_diag.analyze):
        report = function(tmp_path / "scored.parquet")
        found = report.reference
        assert (found.verdict, found.engine.state, found.trainer.state) == ("engine", "unknown", "same")
        assert "the engine is not reproduced" in report.to_markdown()
    assert offpol_diag.doctor(path).reference is None


def test_a_column_of_that_name_that_rescore_did_not_write_is_nothing(tmp_path, responses, numbers):
    given, off = numbers["as given"], numbers["adapter off"]
    path = write(tmp_path / "d.parquet", responses, off, given, reference_log_probs=given)
    assert offpol_diag.doctor(path).reference is None


@pytest.mark.parametrize(
    ("engine", "trainer", "verdict", "named"),
    [
        ("as given", "as given", "same", ("", "")),
        ("adapter off", "as given", "engine", ("adapter off", "")),
        ("as given", "adapter x 0.5", "trainer", ("", "adapter x 0.5")),
        ("as given", "temperature 0.7", "trainer", ("", "temperature 0.7")),
        ("no BOS", "adapter off", "both", ("no BOS", "adapter off")),
        ("adapter off", "adapter off", "reference", ("adapter off", "adapter off")),
    ],
)
def test_the_side_and_what_it_computes(engine, trainer, verdict, named, tmp_path, loaded, responses, numbers):
    path = write(tmp_path / "d.parquet", responses, numbers[engine], numbers[trainer])

    found = asked(path, loaded).reference

    assert found.verdict == verdict
    for side, name in zip((found.engine, found.trainer), named, strict=True):
        assert (side.state == "variant", side.reproduced) == (bool(name), bool(name))
        assert (side.variant, side.fits[0].name) == (name, name) or not name
    assert "temperature 1" in found.rests_on
    assert "recorded by ours" in found.rests_on


def test_a_fault_that_no_hypothesis_has_is_none_of_these(tmp_path, loaded, responses, numbers):
    with contextlib.ExitStack() as back:
        for name, one in loaded.model.named_modules():
            if ".layers.1." in name and hasattr(one, "lora_A"):
                put(back, one, "scaling", {key: -2.0 * x for key, x in one.scaling.items()})
        (odd,) = score(loaded.model, responses.rows)
    engine = np.split(odd, np.cumsum(responses.sizes)[:-1])
    path = write(tmp_path / "d.parquet", responses, engine, numbers["as given"])

    report = asked(path, loaded)

    found = report.reference
    assert (found.verdict, found.engine.state, found.trainer.state) == ("engine", "unknown", "same")
    assert "none of these" in report.to_markdown()


@pytest.mark.parametrize("label", ["host", "step", None])
def test_a_fault_of_some_responses_is_found_where_it_is(label, tmp_path, loaded, responses, numbers):
    odd = responses.group % 4 == 1
    pairs = zip(numbers["adapter off"], numbers["as given"], odd, strict=True)
    engine = [bad if at else good for bad, good, at in pairs]
    named = {label: [6 + int(at) for at in odd]} if label else {}
    path = write(tmp_path / "d.parquet", responses, engine, numbers["as given"], **named)

    found = asked(path, loaded).reference

    assert found.verdict == "engine"
    assert (found.engine.state, found.engine.variant) == ("variant", "adapter off")
    assert found.engine.share == pytest.approx(np.repeat(odd, responses.sizes).mean())
    assert found.engine.where == (f"{label} = 7" if label else "")
    assert found.engine.groups["adapter off"] == 2


def test_what_is_written_keeps_the_columns_and_adds_the_reference(tmp_path, loaded, responses, numbers):
    host = [f"h{i % 2}" for i in range(len(responses.rows))]
    path = write(tmp_path / "d.parquet", responses, numbers["adapter off"], numbers["as given"], host=host)

    asked(path, loaded, to=tmp_path / "s.parquet", tries="none", sample=0)

    before, after = pq.read_table(path), pq.read_table(tmp_path / "s.parquet")
    assert after.num_rows == before.num_rows
    assert {*after.column_names} == {*before.column_names, "reference_log_probs"}
    plain = score(loaded.model, responses.rows, [Head()])[0]
    parts = zip(responses.rows, np.split(plain, np.cumsum(responses.sizes)[:-1]), strict=True)
    want = {tuple(row.ids.tolist()): part for row, part in parts}
    for row in after.to_pylist():
        own = want[tuple(row["prompt_ids"] + row["token_ids"])]
        assert np.abs(np.array(row["reference_log_probs"]) - own).max() < 1e-5
        assert row["host"] in host
    said = json.loads(after.schema.metadata[b"offpol_diag"])
    assert said["reference"]["floor"] > 0
    assert said["trainer"] == "ours"


def test_one_prompt_is_no_verdict(tmp_path, loaded, responses, numbers):
    many = int((responses.group == 0).sum())
    one = replace(responses, rows=responses.rows[:many], group=responses.group[:many])
    path = write(tmp_path / "d.parquet", one, numbers["adapter off"][:many], numbers["as given"][:many])
    assert asked(path, loaded, tries="none").reference.verdict == "few"


# ---------------------------------------------------------------- hypotheses


def test_a_live_model_is_left_as_it_was(tmp_path, loaded, responses, numbers):
    path = write(tmp_path / "d.parquet", responses, numbers["as given"], numbers["as given"])
    before = score(loaded.model, responses.rows)[0]
    state = {name: one.clone() for name, one in loaded.model.state_dict().items()}
    config = loaded.model.config.to_dict()
    loaded.model.train()
    report = asked(path, loaded)
    assert loaded.model.training
    loaded.model.eval()
    assert all(torch.equal(one, state[name]) for name, one in loaded.model.state_dict().items())
    assert loaded.model.config.to_dict() == config
    found = table(loaded.model, responses.rows, {})[0]
    for one in found:
        with one.of(loaded.model) as model:
            inside = score(model, one.rows(responses.rows), [one.head])[0]
        assert one.name == "as given" or (inside != before).any(), one.name
        assert (score(loaded.model, responses.rows)[0] == before).all(), one.name

    absent = {"window off", "RoPE scaling off", "sinks off", "soft-cap off", "other checkpoints"}
    assert absent <= {*report.reference.missing}
    assert "the configuration has no window" in report.to_markdown()


def test_checkpoints_are_hypotheses(tmp_path, loaded, responses, numbers):
    half = tmp_path / "step_90"
    shutil.copytree(SAMPLE / "adapter", half)
    config = json.loads((half / "adapter_config.json").read_text())
    (half / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] // 2}))
    path = write(tmp_path / "d.parquet", responses, numbers["adapter x 0.5"], numbers["as given"])
    base = str(SAMPLE / "base")

    how = {"base": base, "sample": GROUPS, "tries": "checkpoint,adapter off"}
    found = offpol_diag.rescore(path, [SAMPLE / "adapter", half], **how).reference

    assert (found.verdict, found.engine.variant) == ("engine", "step_90")
    assert found.engine.reproduced


# ---------------------------------------------------------------- bad input


def refused(*words):
    ran = CliRunner().invoke(app, ["rescore", *map(str, words)])
    assert ran.exit_code == 2, ran.output
    assert ran.stderr.count("error: ") == 1
    assert "\n\nhint: " in ran.stderr
    assert "Traceback" not in ran.stderr
    return " ".join(ran.stderr.split())


def test_bad_input_is_one_error_with_a_hint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dump, adapter = SAMPLE / "dump.parquet", SAMPLE / "adapter"
    (tmp_path / "empty").mkdir()
    shutil.copytree(adapter, tmp_path / "alone")
    for name in ("bare", "damaged"):
        shutil.copytree(SAMPLE / "base", tmp_path / name)
    (tmp_path / "bare" / "model.safetensors").unlink()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"no weights at all")
    assert "there is no such folder" in refused(dump, "--model", "runs/1/checkpoint")
    for model in ("empty", "bare", "damaged", "alone"):
        assert "cannot be loaded" in refused(dump, "--model", model)
    for words, said in {
        ("--try", "fp9"): "--try fp9: no hypothesis is called so",
        ("--sample", "-1"): "--sample",
        ("--max-length", "5"): "no response is left",
        ("--to", dump): "is what is read",
    }.items():
        assert said in refused(dump, "--model", adapter, *words)

    rows = pq.read_table(dump)
    other = pa.array([[1000, *one[1:]] for one in rows["token_ids"].to_pylist()])
    empty = pa.array([[]] * rows.num_rows, pa.list_(pa.int32()))
    for held, said in (
        (rows.drop_columns(["prompt_ids"]), "needs the column prompt_ids"),
        (rows.drop_columns(["token_ids"]), "needs the column token_ids"),
        (rows.drop_columns(["token_ids"]).append_column("token_ids", other), "holds token 1,000, and"),
        (rows.drop_columns(["prompt_ids"]).append_column("prompt_ids", empty), "its prompt is empty"),
    ):
        pq.write_table(held, "bad.parquet")
        assert said in refused("bad.parquet", "--model", adapter)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_recipes_are_short_and_give_prompts_without_padding():
    text = (ROOT / "docs" / "rescore.md").read_text(encoding="utf-8")
    verl, trl, slime, _ = re.findall(r"```python\n(.+?)```", text, re.DOTALL)
    assert max(len(one.splitlines()) for one in (verl, trl, slime)) <= 10
    space: dict = {}
    for one in (verl, trl, slime):
        exec(one, space)
    prompts, seen = torch.tensor([[0, 0, 5], [6, 7, 8]]), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    responses = torch.tensor([[1, 2], [3, 0]])
    batch = {"prompts": prompts, "attention_mask": seen, "responses": responses}
    out = {"prompt_ids": prompts, "prompt_mask": seen[:, :3], "completion_ids": responses}
    data = {"tokens": [torch.tensor([5, 1, 2]), torch.tensor([6, 7, 8, 3])], "response_lengths": [2, 1]}
    for columns in (space["verl_columns"](SimpleNamespace(batch=batch)), space["trl_columns"](out)):
        assert [one.tolist() for one in columns["prompt_ids"]] == [[5], [6, 7, 8]]
        assert columns["token_ids"] is responses
    columns = space["slime_columns"](data)
    assert [one.tolist() for one in columns["prompt_ids"]] == [[5], [6, 7, 8]]
    assert [one.tolist() for one in columns["token_ids"]] == [[1, 2], [3]]


def test_the_guide_shows_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample_data").symlink_to(SAMPLE.parent)
    place = "sample_data/adapter_not_loaded"
    ran = CliRunner().invoke(
        app, ["rescore", f"{place}/dump.parquet", "--model", f"{place}/adapter"], env={"COLUMNS": "100"}
    )
    assert ran.exit_code == 0, ran.output
    text = (ROOT / "docs" / "rescore.md").read_text(encoding="utf-8")
    (shown,) = [one for one in re.findall(r"```text\n(.+?)```", text, re.DOTALL) if "engine is not" in one]
    assert [line for line in shown.splitlines() if line != "…" and line not in ran.stdout.splitlines()] == []


def test_python_refuses_what_is_no_model(tmp_path):
    with pytest.raises(UsageError, match="no causal language model"):
        offpol_diag.rescore(SAMPLE / "dump.parquet", torch.nn.Linear(2, 2))
    with pytest.raises(DumpError, match="prompt_ids"):
        offpol_diag.rescore("sample_data/healthy.parquet", torch.nn.Linear(2, 2))
