"""`rescore`: which side is reproduced, what the other computes, by place, and what is bad input."""

from __future__ import annotations

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
from offpol_diag.errors import DumpError, MemoryShortage, UsageError
from offpol_diag.numerals import rounded
from offpol_diag.report.rescore import PASSES
from offpol_diag.rescore import models, run
from offpol_diag.rescore.rows import read
from offpol_diag.rescore.score import Head, Penalties, score
from offpol_diag.rescore.variants import Given, table
from offpol_diag.rescore.variants.rounding import in_bf16
from offpol_diag.result import load
from tests import tiny
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
    found, _ = table(Given(loaded.model, responses.rows))
    ends = np.cumsum(responses.sizes)[:-1]
    scored = {}
    for one in found:
        with one.model(loaded.model), in_bf16(loaded.model):
            given = one.rows(responses.rows) if one.rows else responses.rows
            (values,) = score(loaded.model, given, [one.head._replace(logits=torch.bfloat16)])
        scored[one.name] = np.split(values.log_probs, ends)
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
    assert "trainer ──" in ran.stdout
    found = load(Path("r.json")).reference
    assert found.verdict == "engine"
    assert (found.engine.state, found.engine.variant, found.engine.reproduced) == (
        "variant",
        "adapter off",
        True,
    )
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
    assert {"reference_log_probs", "reference_entropy", "reference_rank"} <= set(kept.column_names)
    assert sorted(path.name for path in Path().iterdir()) == [
        "again.html",
        "dump-rescored.parquet",
        "r.html",
        "r.json",
        "r.md",
    ]


def test_the_estimate_of_time_counts_the_passes_that_this_model_takes(loaded, responses):
    found, _ = table(Given(loaded.model, responses.rows))
    assert run.Passes(loaded, responses, found).many == PASSES


def test_the_page_draws_the_three_distances(tmp_path, loaded, responses, numbers):
    path = write(tmp_path / "d.parquet", responses, numbers["adapter off"], numbers["as given"])
    report = asked(path, loaded, to=tmp_path / "scored.parquet", tries="none")
    found = report.summary.reference
    sizes = [rounded(one) for one in (found.trainer.distance, found.engine.distance, found.apart)]
    drawn = report.to_html()
    triangle = drawn[drawn.index("Mean |Δ| of a token, nats") :].partition("</pre>")[0]
    assert [one in triangle for one in sizes] == [True] * 3


def test_analyze_and_doctor_of_what_is_written_say_the_same(tmp_path, loaded, responses, numbers):
    path = write(tmp_path / "d.parquet", responses, numbers["adapter off"], numbers["as given"])
    asked(path, loaded, to=tmp_path / "scored.parquet", tries="none")

    for function in (offpol_diag.doctor, offpol_diag.analyze):
        report = function(tmp_path / "scored.parquet")
        found = report.summary.reference
        assert found.verdict == "engine"
        assert found.engine.state == "unknown"
        assert found.trainer.state == "same"
        assert "the engine is not reproduced" in report.to_markdown()
    assert offpol_diag.doctor(path).summary.reference is None


def test_a_column_of_that_name_that_rescore_did_not_write_is_nothing(tmp_path, responses, numbers):
    path = tmp_path / "d.parquet"
    write(
        path, responses, numbers["adapter off"], numbers["as given"], reference_log_probs=numbers["as given"]
    )
    assert offpol_diag.doctor(path).summary.reference is None


@pytest.mark.parametrize(
    ("engine", "trainer", "verdict", "named"),
    [
        ("as given", "as given", "same", ("", "")),
        ("adapter off", "as given", "engine", ("adapter off", "")),
        ("as given", "adapter x 0.5", "trainer", ("", "adapter x 0.5")),
        ("fp8 per tensor", "as given", "engine", ("fp8 per tensor", "")),
        ("as given", "temperature 0.7", "trainer", ("", "temperature 0.7")),
        ("int4 in groups of 32", "as given", "engine", ("int4 in groups of 32", "")),
        ("no BOS", "adapter off", "both", ("no BOS", "adapter off")),
        ("adapter off", "adapter off", "reference", ("adapter off", "adapter off")),
    ],
)
def test_the_side_and_what_it_computes(engine, trainer, verdict, named, tmp_path, loaded, responses, numbers):
    path = write(tmp_path / "d.parquet", responses, numbers[engine], numbers[trainer])

    found = asked(path, loaded).summary.reference

    assert found.verdict == verdict
    assert (
        tuple(one.variant if one.state == "variant" else "" for one in (found.engine, found.trainer)) == named
    )
    for side, name in zip((found.engine, found.trainer), named, strict=True):
        assert (side.state == "variant") == bool(name)
        if name:
            assert side.reproduced
            assert side.fits[0].name == name
    assert "temperature 1" in found.rests_on
    assert "recorded by ours" in found.rests_on


@pytest.mark.parametrize("place", ["column", "metadata"])
def test_penalties_are_tried_where_the_dump_gives_them(place, tmp_path, loaded, responses, numbers):
    rows = [replace(row, penalties=Penalties(repetition=1.2)) for row in responses.rows]
    with in_bf16(loaded.model):
        (odd,) = score(loaded.model, rows, (Head(penalised=True, logits=torch.bfloat16),))
    engine = np.split(odd.log_probs, np.cumsum(responses.sizes)[:-1])
    given = {"repetition_penalty": np.full(len(rows), 1.2)} if place == "column" else {}
    path = write(tmp_path / "d.parquet", responses, engine, numbers["as given"], **given)
    if place == "metadata":
        held = pq.read_table(path)
        said = json.loads(held.schema.metadata[b"offpol_diag"]) | {"repetition_penalty": 1.2}
        pq.write_table(held.replace_schema_metadata({"offpol_diag": json.dumps(said)}), path)

    found = asked(path, loaded).summary.reference

    assert (found.verdict, found.engine.variant, found.trainer.state) == ("engine", "penalties", "same")
    assert found.engine.reproduced
    assert "penalties" not in found.missing


def test_a_fault_that_no_hypothesis_has_is_none_of_these(tmp_path, loaded, responses, numbers):
    layers = [
        one for name, one in loaded.model.named_modules() if ".layers.1." in name and hasattr(one, "lora_A")
    ]
    assert layers
    held = [dict(one.scaling) for one in layers]
    for one in layers:
        one.scaling = {name: -2.0 * x for name, x in one.scaling.items()}
    try:
        (odd,) = score(loaded.model, responses.rows)
    finally:
        for one, x in zip(layers, held, strict=True):
            one.scaling = x
    engine = np.split(odd.log_probs, np.cumsum(responses.sizes)[:-1])
    path = write(tmp_path / "d.parquet", responses, engine, numbers["as given"])

    report = asked(path, loaded)

    found = report.summary.reference
    assert (found.verdict, found.engine.state, found.trainer.state) == ("engine", "unknown", "same")
    assert "none of these" in report.to_markdown()


@pytest.mark.parametrize("label", ["host", "step", None])
def test_a_fault_of_some_responses_is_found_where_it_is(label, tmp_path, loaded, responses, numbers):
    odd = responses.group % 4 == 1
    pairs = zip(numbers["adapter off"], numbers["as given"], odd, strict=True)
    engine = [bad if at else good for bad, good, at in pairs]
    named = {
        "host": {"host": ["b" if at else "a" for at in odd]},
        "step": {"step": [7 if at else 6 for at in odd]},
    }
    path = write(tmp_path / "d.parquet", responses, engine, numbers["as given"], **named.get(label, {}))

    found = asked(path, loaded).summary.reference

    assert found.verdict == "engine"
    assert (found.engine.state, found.engine.variant) == ("variant", "adapter off")
    assert found.engine.share == pytest.approx(np.repeat(odd, responses.sizes).mean())
    assert found.engine.where == {"host": "host = b", "step": "step = 7", None: ""}[label]
    assert found.engine.groups["adapter off"] == 2


def test_one_prompt_is_no_verdict(tmp_path, loaded, responses, numbers):
    one = responses.first(1)
    many = len(one.rows)
    path = write(tmp_path / "d.parquet", one, numbers["adapter off"][:many], numbers["as given"][:many])
    assert asked(path, loaded, tries="none").summary.reference.verdict == "few"


def test_what_is_written_keeps_the_columns_and_adds_the_reference(tmp_path, loaded, responses, numbers):
    host = [f"h{i % 2}" for i in range(len(responses.rows))]
    path = write(tmp_path / "d.parquet", responses, numbers["adapter off"], numbers["as given"], host=host)

    asked(path, loaded, to=tmp_path / "s.parquet", tries="none", sample="all")

    before, after = pq.read_table(path), pq.read_table(tmp_path / "s.parquet")
    assert after.num_rows == before.num_rows
    assert set(after.column_names) == {
        *before.column_names,
        "reference_log_probs",
        "reference_entropy",
        "reference_rank",
    }
    plain = score(loaded.model, responses.rows, [Head()], more=True)[0]
    want = {
        tuple(row.ids.tolist()): part
        for row, part in zip(
            responses.rows, np.split(plain.log_probs, np.cumsum(responses.sizes)[:-1]), strict=True
        )
    }
    for row in after.to_pylist():
        key = tuple(row["prompt_ids"] + row["token_ids"])
        assert np.abs(np.array(row["reference_log_probs"]) - want[key]).max() < 1e-5
        assert min(row["reference_rank"]) >= 1
        assert row["host"] in host
    said = json.loads(after.schema.metadata[b"offpol_diag"])
    assert said["reference"]["floor"] > 0
    assert said["trainer"] == "ours"


# ---------------------------------------------------------------- hypotheses


def test_every_hypothesis_is_undone(loaded, responses):
    before = score(loaded.model, responses.rows)[0].log_probs
    state = {name: one.clone() for name, one in loaded.model.state_dict().items()}
    config = loaded.model.config.to_dict()
    found, _ = table(Given(loaded.model, responses.rows))

    for one in found:
        with one.model(loaded.model):
            inside = score(
                loaded.model, one.rows(responses.rows) if one.rows else responses.rows, [one.head]
            )[0]
        assert len(inside.log_probs) == len(before)
        assert one.name == "as given" or (inside.log_probs != before).any(), one.name
        assert (score(loaded.model, responses.rows)[0].log_probs == before).all(), one.name
    assert all(torch.equal(one, state[name]) for name, one in loaded.model.state_dict().items())
    assert loaded.model.config.to_dict() == config


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        ("llama", {"RoPE scaling off"}),
        ("mixtral", {"window off", "router bf16"}),
        ("gemma2", {"window off"}),
        ("gpt_oss", {"window off", "sinks off", "RoPE scaling off", "router bf16"}),
        ("gpt2", set()),
    ],
)
def test_hypotheses_of_an_architecture_are_made_and_undone(kind, has):
    made, given = tiny.model(kind), tiny.rows()
    before, state = score(made, given)[0].log_probs, {k: v.clone() for k, v in made.state_dict().items()}
    found, left = table(Given(made, given))
    named = {one.name for one in found}

    assert has <= named
    assert {"window off", "sinks off", "RoPE scaling off"} - has <= set(left)
    assert "adapter" in left
    for one in found:
        with one.model(made):
            values = score(made, one.rows(given) if one.rows else given, [one.head])[0].log_probs
        assert np.isfinite(values).any()
        absolute = kind == "gpt2" and one.name.startswith(
            "positions"
        )  # learned positions: no jump, but others
        assert one.name == "as given" or absolute or (values != before).any(), one.name
        assert (score(made, given)[0].log_probs == before).all(), one.name
    assert all(torch.equal(one, state[name]) for name, one in made.state_dict().items())


def test_eager_attention_that_would_not_fit_is_refused_at_once(monkeypatch):
    made = tiny.model("gpt_oss")
    made.config._attn_implementation = "eager"
    monkeypatch.setattr(models, "free_memory", lambda device: 1000)
    with pytest.raises(MemoryShortage, match="eager attention of") as caught:
        models.Loaded(made, "it").judge(tiny.rows(), "d.parquet")
    assert "flex_attention" in caught.value.hint


def test_a_live_model_is_left_as_it_was(tmp_path, loaded, responses, numbers):
    path = write(tmp_path / "d.parquet", responses, numbers["as given"], numbers["as given"])
    before = score(loaded.model, responses.rows)[0].log_probs
    loaded.model.train()
    asked(path, loaded, tries="fp8")
    assert loaded.model.training
    loaded.model.eval()
    assert (score(loaded.model, responses.rows)[0].log_probs == before).all()


def test_checkpoints_are_hypotheses(tmp_path, loaded, responses, numbers):
    half = tmp_path / "step_90"
    shutil.copytree(SAMPLE / "adapter", half)
    config = json.loads((half / "adapter_config.json").read_text())
    (half / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": config["lora_alpha"] // 2}))
    path = write(tmp_path / "d.parquet", responses, numbers["adapter x 0.5"], numbers["as given"])
    base = str(SAMPLE / "base")

    found = offpol_diag.rescore(
        path, [SAMPLE / "adapter", half], base=base, sample=GROUPS, tries="checkpoint,adapter off"
    ).summary.reference

    assert (found.verdict, found.engine.variant) == ("engine", "step_90")
    assert found.engine.reproduced


def test_what_cannot_be_tested_says_why(tmp_path, loaded, responses, numbers):
    path = write(tmp_path / "d.parquet", responses, numbers["as given"], numbers["as given"])
    report = asked(path, loaded)
    missing = report.summary.reference.missing
    assert "neither the metadata nor a column gives one (repetition_penalty, " in missing["penalties"]
    assert {"window off", "RoPE scaling off", "sinks off", "other checkpoints", "AWQ, GPTQ"} <= set(missing)
    assert "the configuration has no window" in report.to_markdown()


# ---------------------------------------------------------------- interrupted


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch):
    target, real, passes = tmp_path / "s.parquet", run.score, []
    words = [
        "rescore",
        str(SAMPLE / "dump.parquet"),
        "--model",
        str(SAMPLE / "adapter"),
        "--sample",
        "4",
        "--to",
        str(target),
    ]
    words += ["--try", "adapter off,adapter scale"]

    def counted(*given, **more):
        passes.append(1)
        if len(passes) == 4:
            raise KeyboardInterrupt
        return real(*given, **more)

    monkeypatch.setattr(run, "SAMPLE_TOKENS", 100)
    monkeypatch.setattr(run, "score", counted)
    stopped = CliRunner().invoke(app, words)
    assert stopped.exit_code == 130
    assert "the same command goes on from there" in stopped.stderr
    assert not target.exists()
    went_on = CliRunner().invoke(app, words)
    assert went_on.exit_code == 0, went_on.output
    assert "going on where an interrupted run stopped" in went_on.stderr
    once = len(passes) - 1  # the pass that was interrupted is made again
    assert [path.name for path in tmp_path.iterdir()] == ["s.parquet"]

    passes[:] = [1] * 10
    again = tmp_path / "again.parquet"
    CliRunner().invoke(app, [*words[:7], str(again), *words[8:]])
    assert len(passes) - 10 == once
    assert pq.read_table(again).equals(pq.read_table(target))


# ---------------------------------------------------------------- bad input


def refused(*words):
    ran = CliRunner().invoke(app, ["rescore", *map(str, words)])
    assert ran.exit_code == 2, ran.output
    assert ran.stderr.count("error: ") == 1
    assert "\n\nhint: " in ran.stderr
    assert "Traceback" not in ran.stderr
    return " ".join(ran.stderr.split())


def test_bad_input_is_one_error_with_a_hint(tmp_path, monkeypatch, responses, numbers):
    monkeypatch.chdir(tmp_path)
    dump, adapter = SAMPLE / "dump.parquet", SAMPLE / "adapter"
    (tmp_path / "empty").mkdir()
    assert "there is no such folder" in refused(dump, "--model", "runs/1/checkpoint")
    assert "it has no config.json" in refused(dump, "--model", tmp_path / "empty")
    shutil.copytree(SAMPLE / "base", tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    assert "no weights" in refused(dump, "--model", tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").write_bytes(b"no weights at all")
    assert "cannot be loaded" in refused(dump, "--model", tmp_path / "bare")
    shutil.copytree(adapter, tmp_path / "alone")
    assert "cannot be loaded" in refused(dump, "--model", tmp_path / "alone")
    assert "--try fp9: no hypothesis is called so" in refused(dump, "--model", adapter, "--try", "fp9")
    assert "--sample" in refused(dump, "--model", adapter, "--sample", "1")

    rows = pq.read_table(dump)
    pq.write_table(rows.drop_columns(["prompt_ids"]), "no_prompts.parquet")
    assert "needs the column prompt_ids" in refused("no_prompts.parquet", "--model", adapter)
    pq.write_table(rows.drop_columns(["token_ids"]), "no_tokens.parquet")
    assert "needs the column token_ids" in refused("no_tokens.parquet", "--model", adapter)
    ids = [[1000, *one[1:]] for one in rows["token_ids"].to_pylist()]
    at = rows.column_names.index("token_ids")
    pq.write_table(rows.set_column(at, "token_ids", [ids]), "other.parquet")
    assert "holds token 1,000, and" in refused("other.parquet", "--model", adapter)
    texts = rows.drop_columns(["prompt_ids"]).append_column("prompt", [["x"] * rows.num_rows])
    pq.write_table(texts, "texts.parquet")
    assert "its prompts are text" in refused("texts.parquet", "--model", adapter)
    empty = [[] for _ in range(rows.num_rows)]
    at = rows.column_names.index("prompt_ids")
    pq.write_table(rows.set_column(at, "prompt_ids", [pa.array(empty, pa.list_(pa.int32()))]), "bare.parquet")
    assert "its prompt is empty" in refused("bare.parquet", "--model", adapter)
    assert "no response is left" in refused(dump, "--model", adapter, "--max-length", "5")
    assert "is what is read" in refused(dump, "--model", adapter, "--to", dump)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


BLOCKS = re.findall(
    r"```python\n(.+?)```", (ROOT / "docs" / "rescore.md").read_text(encoding="utf-8"), re.DOTALL
)


def test_the_recipes_are_short_and_give_prompts_without_padding():
    verl, trl, slime, _ = BLOCKS
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


def test_the_guide_and_the_readme_show_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sample_data").symlink_to(SAMPLE.parent)
    place = "sample_data/adapter_not_loaded"
    ran = CliRunner().invoke(
        app, ["rescore", f"{place}/dump.parquet", "--model", f"{place}/adapter"], env={"COLUMNS": "100"}
    )
    assert ran.exit_code == 0, ran.output
    for page in ("README.md", "docs/rescore.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        (shown,) = [
            one for one in re.findall(r"```text\n(.+?)```", text, re.DOTALL) if "engine is not" in one
        ]
        assert [
            line for line in shown.splitlines() if line != "…" and line not in ran.stdout.splitlines()
        ] == []


def test_python_refuses_what_is_no_model(tmp_path):
    with pytest.raises(UsageError, match="no causal language model"):
        offpol_diag.rescore(SAMPLE / "dump.parquet", torch.nn.Linear(2, 2))
    with pytest.raises(DumpError, match="prompt_ids"):
        offpol_diag.rescore("sample_data/healthy.parquet", torch.nn.Linear(2, 2))
