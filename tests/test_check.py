"""`check`: curves of independent restatements of three trainers, with and without planted differences."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import verl_reference
from typer.testing import CliRunner

import offpol_diag
from offpol_diag.check import curves
from offpol_diag.cli import app
from offpol_diag.errors import UsageError
from tests.test_logged_a import trl as trl_log
from tests.trainers import logged_slime
from tests.trainers.padded import padded
from tests.trainers.samples import samples

SAMPLE = Path(__file__).parents[1] / "sample_data" / "collapse.parquet"
STEPS, ROWS, START = 4, 24, 3


def verl(rows, bound=2.0):
    names = ("response_mask", "old_log_probs", "rollout_log_probs", "current_log_probs")
    columns = {name: [row[name] for row in rows] for name in names}
    config = {
        "rollout_is": "token",
        "rollout_is_threshold": bound,
        "rollout_is_batch_normalize": False,
    }
    return verl_reference.run("2025-11", columns, config).metrics


def trl(rows, bound=3.0):
    return trl_log(padded(rows), mode="token_truncate", clip_max=bound)


def slime(rows, bound=2.0):
    return logged_slime.tis(samples(rows), tis_clip=bound)


TRAINERS = {
    "verl": (verl, "token_is", "rollout_corr/k3_kl", "rollout_corr/rollout_is_ratio_fraction_high"),
    "trl": (
        trl,
        "trl_token_truncate",
        "sampling/sampling_logp_difference/mean",
        "sampling/importance_sampling_ratio/mean",
    ),
    "slime": (slime, "slime_tis", "train/train_rollout_logprob_abs_diff", "train/tis_clipfrac"),
}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """A file of four steps, and its rows by step; 24 rows each, masked in places."""
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


def plain(run, rows):
    return run(rows)


def changed(change):
    return lambda run, rows: run([{**row, **change(row)} for row in rows])


def mean_of(parts):
    def make(run, rows):
        every = [run(some) for some in parts(rows)]
        return {name: sum(one[name] for one in every) / len(every) for name in every[0]}

    return make


def tokens(rows):
    return sum(sum(row["response_mask"]) for row in rows)


def token_mean(run, rows):
    every = [(run([row]), tokens([row])) for row in rows]
    return {name: sum(one[name] * n for one, n in every) / tokens(rows) for name in every[0][0]}


def times(factor):
    return lambda run, rows: {name: value * factor(rows) for name, value in run(rows).items()}


PLANTED = {
    "mask_ignored": changed(lambda row: {"response_mask": [1] * len(row["response_mask"])}),
    "masked_as_zeros": changed(
        lambda row: (
            {
                name: [x * m for x, m in zip(row[name], row["response_mask"], strict=True)]
                for name in ("rollout_log_probs", "old_log_probs", "current_log_probs")
            }
            | {"response_mask": [1] * len(row["response_mask"])}
        )
    ),
    "masked_in_denominator": times(
        lambda rows: tokens(rows) / sum(len(row["response_mask"]) for row in rows)
    ),
    "reversed": changed(
        lambda row: {
            "rollout_log_probs": row["old_log_probs"],
            "old_log_probs": row["rollout_log_probs"],
        }
    ),
    "current_for_old": changed(lambda row: {"old_log_probs": row["current_log_probs"]}),
    "micro_8": mean_of(lambda rows: [rows[at : at + 8] for at in range(0, ROWS, 8)]),
    "micro_16": mean_of(lambda rows: [rows[:16], rows[16:]]),
    "dp_4": mean_of(lambda rows: [rows[at : at + 6] for at in range(0, ROWS, 6)]),
    "dp_4_strided": mean_of(lambda rows: [rows[at::4] for at in range(4)]),
    "sequence_mean": mean_of(lambda rows: [[row] for row in rows]),
    "token_mean": token_mean,
    "sum_tokens": times(tokens),
    "sum_sequences": times(len),
    "upper_1.5": lambda run, rows: run(rows, 1.5),
}
PER_SEQUENCE = ("micro_8", "dp_4", "dp_4_strided", "sequence_mean", "masked_in_denominator")
"""Of slime, whose numbers are means of rows already: equal parts leave them as they are."""
CASES = [
    (trainer, name)
    for trainer in TRAINERS
    for name in PLANTED
    if name not in (PER_SEQUENCE if trainer == "slime" else ("token_mean",))
]


def write(folder, values):
    file = folder / "history.jsonl"
    lines = (json.dumps({"_step": step, **{k: float(x) for k, x in v.items()}}) for step, v in values.items())
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_a_trainer_logs_right_is_equal_and_its_preset_is_found(trainer, dump, tmp_path):
    file, rows = dump
    run, preset, *_ = TRAINERS[trainer]
    logged = write(tmp_path, {step: run(some) for step, some in rows.items()})

    found = offpol_diag.check(file, logged, trainer=trainer, preset=preset)
    assert {one.name for one in found.metrics if one.verdict == "different"} == set()
    assert len(found.metrics) >= 5


@pytest.mark.parametrize(("trainer", "planted"), CASES)
def test_every_planted_difference_is_named(trainer, planted, dump, tmp_path):
    file, rows = dump
    run, preset, gap, weight = TRAINERS[trainer]
    name = weight if planted.startswith("upper") else gap
    values = {step: {name: PLANTED[planted](run, some)[name]} for step, some in rows.items()}

    (one,) = offpol_diag.check(file, write(tmp_path, values), preset=preset).metrics
    symmetric = trainer != "verl" and planted == "reversed"  # |Δ| has no direction
    assert one.verdict == ("equal" if symmetric else "different")
    assert symmetric or planted in (one.variant, *one.also)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_curve_that_lags_by_a_step_and_one_that_nothing_reproduces(trainer, dump, tmp_path):
    file, rows = dump
    run, preset, gap, weight = TRAINERS[trainer]
    right = {step: run(some) for step, some in rows.items()}
    late = {step + 1: {gap: one[gap], weight: one[weight] + 0.0123 * step} for step, one in right.items()}

    found = {one.name: one for one in offpol_diag.check(file, write(tmp_path, late), preset=preset).metrics}
    assert found[gap].variant == "step_before"
    assert found[weight].verdict == "different"
    assert found[weight].variant is None


def test_given_micro_batches_and_ranks_are_averaged(dump, tmp_path):
    file, rows = dump
    name = TRAINERS["trl"][2]
    parts = mean_of(
        lambda some: (
            [some[a : a + 5] for a in (0, 12)]
            + [some[a + 5 : a + 10] for a in (0, 12)]
            + [some[a + 10 : a + 12] for a in (0, 12)]
        )
    )
    logged = write(tmp_path, {step: {name: parts(trl, some)[name]} for step, some in rows.items()})

    preset = "trl_token_truncate"
    assert offpol_diag.check(file, logged, preset=preset, micro_batch=5, dp=2).equal
    assert not offpol_diag.check(file, logged, preset=preset).equal


def test_the_first_step_that_differs_is_said_and_the_exit_code_is_one(dump, tmp_path):
    file, rows = dump
    values = {step: slime(some) for step, some in rows.items()}
    values[START + 2]["train/tis_abs"] *= 1.001
    logged = write(tmp_path, values)
    ran = CliRunner().invoke(
        app,
        [
            "check",
            str(file),
            "--logged",
            str(logged),
            "--preset",
            "slime_tis",
            "--json",
            str(tmp_path / "r.json"),
        ],
    )

    assert ran.exit_code == 1
    assert "different: 1 of 7 metrics at 4 steps" in ran.output
    (one,) = [m for m in json.loads((tmp_path / "r.json").read_text())["metrics"] if m["different"]]
    assert (one["name"], one["first"], one["different"]) == ("train/tis_abs", START + 2, 1)


@pytest.mark.parametrize(
    ("name", "text", "metric"),
    [
        ("w.csv", '"Step","run - train/x","run - train/x__MIN"\n3,1.5,0\n', "train/x"),
        ("h.jsonl", '{"_step": 3, "train": {"x": 1.5}, "other": "NaN"}\n', "train/x"),
        ("run-a-tag-train_x.csv", "Wall time,Step,Value\n1.0,3,1.5\n", "train_x"),
        ("run-a-tag-train_x.json", "[[1.0, 3, 1.5]]", "train_x"),
    ],
)
def test_exports_of_trackers_are_read(name, text, metric, tmp_path):
    (tmp_path / name).write_text(text)
    found = curves.read([tmp_path / name])

    assert found == {metric: {3: 1.5}}
    assert curves.matched(found, ["train/x"]) == {"train/x": metric}


def test_event_files_are_read(tmp_path):
    writer = pytest.importorskip("tensorboardX").SummaryWriter(str(tmp_path))
    writer.add_scalar("train/x", 1.5, 3)
    writer.close()

    assert curves.read(tmp_path.glob("*tfevents*")) == {"train/x": {3: 1.5}}


@pytest.mark.parametrize("text", ["", "{", "[1]", "a,b\n1,2\n", '{"step": 1}', "Step,a - x,b - x\n1,2,3\n"])
@pytest.mark.parametrize("name", ["x.csv", "x.jsonl"])
def test_what_holds_no_curves_is_one_error(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError):
        curves.read([tmp_path / name])


@pytest.mark.parametrize("values", [{999: {"train/tis": 1.0}}, {START: {"loss": 1.0}}])
def test_nothing_to_compare_is_exit_code_two(values, dump, tmp_path):
    logged = write(tmp_path, values)
    ran = CliRunner().invoke(app, ["check", str(dump[0]), "--logged", str(logged), "--preset", "slime_tis"])

    assert ran.exit_code == 2
    assert "hint:" in ran.output
